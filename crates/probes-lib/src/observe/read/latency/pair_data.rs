//! [`PairData`]: what is read of a pair: the slots and histograms that are in use.

use std::ops::RangeInclusive;

use crate::error::Result;
use crate::memory::ReadMemory;
use crate::numbers::words;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::groups::{GROUP_BITS, GROUPS};
use crate::observe::layout::histogram::{BUCKETS, HISTOGRAM_LEN, bucket};
use crate::observe::layout::keyed_starts;
use crate::observe::layout::pair_slots::{SLOT_BITS, SLOT_LEN, SLOTS, SLOTS_TRIED, slot};
use crate::observe::layout::shared::{HEADER_LEN, HISTOGRAMS_AT, SLOT_OVERFLOWS};
use crate::observe::read::data_source;
use crate::observe::read::ring::word;

/// What was read of a pair.
pub(crate) struct PairData {
    /// The stops of threads that got no slot.
    pub(super) overflows: u64,
    /// The slots that threads have got, one after the other.
    pub(super) slots: Vec<u8>,
    /// The histograms of the groups of threads that have times, each up to its longest time.
    pub(super) histograms: Vec<Vec<u8>>,
    /// How many starts of a pair by key wait; `None` for other pairs.
    pub(super) waiting: Option<u64>,
}

/// What is read of the histogram of a group of threads that has times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HistogramPart {
    /// Up to the longest time in the slots. Longer times may not be read: a signal handler that also ended a pair, or
    /// a forked child that shares the data, may have overwritten a longest time with a shorter one.
    UpToLongest,
    Whole,
}

/// Reads each pair.
///
/// # Errors
///
/// If one cannot be read, or the process has exited.
pub(crate) fn read_pairs(
    pid: i32,
    source: &impl ReadMemory,
    arenas: &[Arena],
    part: HistogramPart,
) -> Result<Vec<PairData>> {
    let Some(first_arena) = arenas.first() else {
        return Ok(Vec::new());
    };
    let layout = first_arena.shared;
    let from = first_arena.shared_at();
    let read_pieces =
        |places: &[(u64, u64)]| data_source::read_pieces_from(pid, source, from, places);
    let pairs = 0..layout.pairs;
    pairs
        .map(|pair| {
            let data = read_pair(layout.pair(pair), part, read_pieces)?;
            let waiting = if layout.pairs_by_key {
                // In parts, so that the buffer is memory that the allocator has used before: it costs no page faults.
                let table = layout.keyed_starts(pair);
                let parts = (0..keyed_starts::TABLE_LEN).step_by(PART_LEN as usize);
                let waiting = parts.map(|at| {
                    let part = read_pieces(&[(table + at, PART_LEN)])?;
                    Ok(keyed_starts::waiting(&part))
                });
                Some(waiting.sum::<Result<u64>>()?)
            } else {
                None
            };
            Ok(PairData { waiting, ..data })
        })
        .collect()
}

/// Reads the pair at an offset, as if it had no key. It takes megabytes, of which few are in use.
fn read_pair(
    at: u64,
    part: HistogramPart,
    read_pieces: impl Fn(&[(u64, u64)]) -> Result<Vec<u8>>,
) -> Result<PairData> {
    let slot_at = |slot: u64| at + HEADER_LEN + slot * SLOT_LEN;
    let owners = (0..SLOTS + SLOTS_TRIED).map(|slot| (slot_at(slot) + slot::OWNER, 8));
    let overflows = (at + SLOT_OVERFLOWS, 8);
    let known = read_pieces(&[overflows].into_iter().chain(owners).collect::<Vec<_>>())?;
    let mut known = words(&known);
    let overflows = known.next().unwrap_or(0);
    let owned = (0..).zip(known).filter(|(_, owner)| *owner != 0);
    let owned: Vec<u64> = owned.map(|(slot, _)| slot).collect();
    let places = owned.iter().map(|slot| (slot_at(*slot), SLOT_LEN));
    let slots = read_pieces(&places.collect::<Vec<_>>())?;
    // The histograms are read after the slots. A trampoline updates the longest time before it counts the time in the
    // histogram, so all times counted before the slots were read are read.
    let mut longest = [None; GROUPS];
    for (slot, bytes) in owned.iter().zip(slots.chunks_exact(SLOT_LEN as usize)) {
        let last = match part {
            HistogramPart::UpToLongest => bucket(word(bytes, slot::MAX)),
            HistogramPart::Whole => BUCKETS - 1,
        };
        for group in groups_of(*slot) {
            longest[group] = longest[group].max(Some(last));
        }
    }
    let used = (0..).zip(longest).filter_map(|(group, longest)| {
        let at = at + HISTOGRAMS_AT + group * HISTOGRAM_LEN;
        Some((at, 8 * (longest? + 1)))
    });
    let histograms = used.map(|place| read_pieces(&[place]));
    Ok(PairData {
        overflows,
        slots,
        histograms: histograms.collect::<Result<_>>()?,
        waiting: None,
    })
}

/// Returns the groups whose threads may have this slot. The hash of a thread selects the first slot that it tries, and
/// its highest bits are the group.
fn groups_of(slot: u64) -> RangeInclusive<usize> {
    let group = |slot: u64| (slot.min(SLOTS - 1) >> (SLOT_BITS - GROUP_BITS)) as usize;
    group(slot.saturating_sub(SLOTS_TRIED - 1))..=group(slot)
}

/// How much of a table of starts is read at a time.
pub(super) const PART_LEN: u64 = 1 << 16;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::observe::layout::histogram;
    use crate::observe::layout::shared::PAIR_LEN;
    use crate::observe::read::latency::Latency;
    use crate::observe::read::latency::tests::{data as all_of, pair_named, put};

    #[test]
    fn only_what_is_in_use_is_read() {
        const AT: u64 = 1 << 12;
        let mut pair = vec![0; PAIR_LEN as usize];
        put(&mut pair, SLOT_OVERFLOWS, 3);
        // The second thread is of group 0, but has the first slot of group 1, whose own threads have no times. The
        // third time is counted in the last bucket.
        let threads = [(5, 0, 100), (64, 0, 7), (1039, 15, u64::MAX)];
        for (slot, group, ticks) in threads {
            let at = HEADER_LEN + slot * SLOT_LEN;
            put(&mut pair, at + slot::OWNER, 0x7f00_0000_1700);
            put(&mut pair, at + slot::MAX, ticks);
            put(&mut pair, at + slot::SUM, ticks);
            let histogram = HISTOGRAMS_AT + group * HISTOGRAM_LEN;
            put(&mut pair, histogram + 8 * histogram::bucket(ticks), 1);
        }
        let read = RefCell::new(0);
        let read_pieces = |places: &[(u64, u64)]| {
            let piece =
                |(at, len): &(u64, u64)| pair[(at - AT) as usize..][..*len as usize].to_vec();
            let pieces: Vec<u8> = places.iter().flat_map(piece).collect();
            *read.borrow_mut() += pieces.len() as u64;
            Ok(pieces)
        };
        let data = read_pair(AT, HistogramPart::UpToLongest, read_pieces).unwrap();
        let whole = all_of(&pair);
        assert_eq!((data.overflows, data.waiting), (3, None));
        assert_eq!(data.slots.len() as u64, 3 * SLOT_LEN);
        let of = |data| Latency::of(&pair_named("a", "b"), data, 1.0);
        let (some, all) = (of(&data), of(&whole));
        assert_eq!(some.count(), 3);
        assert!(some.times().eq(all.times()) && some.sum() == all.sum());
        let counts = 8 * (histogram::bucket(100) + 1 + histogram::bucket(7) + 1);
        let all_in_use = 3 * SLOT_LEN + HISTOGRAM_LEN + counts;
        let headers = 8 * (1 + SLOTS + SLOTS_TRIED);
        assert_eq!(read.replace(0), headers + all_in_use);
        let data = read_pair(AT, HistogramPart::Whole, read_pieces).unwrap();
        assert_eq!(of(&data).count(), 3);
        assert_eq!(*read.borrow(), headers + 3 * SLOT_LEN + 3 * HISTOGRAM_LEN);
    }

    #[test]
    fn slot_tells_possible_groups_of_its_thread() {
        for (slot, groups) in [
            (0, 0..=0),
            (63, 0..=0),
            (64, 0..=1),
            (78, 0..=1),
            (79, 1..=1),
        ] {
            assert_eq!(groups_of(slot), groups, "{slot}");
        }
        assert_eq!(groups_of(SLOTS + SLOTS_TRIED - 1), 15..=15);
    }
}
