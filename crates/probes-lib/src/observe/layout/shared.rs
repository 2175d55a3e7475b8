//! [`SharedLayout`]: the layout of the data that all points of an observation share, as offsets. Pure.
//!
//! ```text
//! header   64 bytes: the offset of the thread id in a thread's control block, until when the pages
//!          are valid
//! pairs    of each: a header, a slot for each thread, a histogram for each group of threads
//! rings    one for each group of threads: how many records were begun, and the last of them
//! pages    which pages may be read (readable_pages.rs)
//! ```
//!
//! Only the thread that owns a slot writes there; what several threads write is written by locked
//! instructions.

use crate::observe::layout::readable_pages;

/// Groups of threads: each has counters, histograms and a ring of its own, so that threads do not
/// contend for cache lines.
pub(crate) const GROUPS: usize = 1 << GROUP_BITS;
pub(crate) const GROUP_BITS: u32 = 4;

/// The length of the header of each part, in bytes.
pub(crate) const HEADER_LEN: u64 = 64;

/// In the header, four bytes: the offset from `fs` of the thread's id.
pub(crate) const TID_AT: u64 = 0;

/// In the header: until when the table of pages is valid, in ticks. The tool that keeps it up to date
/// may be killed.
pub(crate) const PAGES_VALID_UNTIL: u64 = 8;

/// The most pairs of an observation.
pub(crate) const MAX_PAIRS: u32 = 64;

/// The most arguments of a hit that are recorded.
pub(crate) const MOST_ARGUMENTS: usize = 6;

/// Slots of a pair.
pub(crate) const SLOTS: u64 = 1 << SLOT_BITS;
pub(crate) const SLOT_BITS: u32 = 10;
/// How many slots a thread tries, from the one that its hash selects: so many more follow the last.
pub(crate) const SEEK: u64 = 16;
/// Binary logarithm of the bytes of a slot.
pub(crate) const SLOT_LEN_BITS: u32 = 11;
pub(crate) const SLOT_LEN: u64 = 1 << SLOT_LEN_BITS;

/// The fields of a slot, eight bytes each.
pub(crate) mod slot {
    /// The thread that owns it: the address of its control block.
    pub(crate) const OWNER: u64 = 0;
    /// The id of its thread.
    pub(crate) const TID: u64 = 8;
    /// How many starts wait for their stop.
    pub(crate) const DEPTH: u64 = 16;
    /// Starts without a stop of earlier threads with the same control block.
    pub(crate) const LEFT: u64 = 24;
    /// Stops without a start.
    pub(crate) const STOPS: u64 = 32;
    /// Stops whose start was overwritten, because too many other starts came after it.
    pub(crate) const DEEP: u64 = 40;
    /// The sum of all times, in ticks.
    pub(crate) const SUM: u64 = 48;
    /// The longest time, in ticks.
    pub(crate) const MAX: u64 = 56;
    /// The innermost of the starts that wait: of each its depth and its time.
    pub(crate) const STARTS: u64 = 64;
    /// How many of them are kept, a power of two.
    pub(crate) const ROOM: u64 = 64;
    /// Binary logarithm of the bytes of each.
    pub(crate) const START_LEN_BITS: u32 = 4;
}

/// In the header of a pair: stops of threads for which there was no slot.
pub(crate) const SLOT_OVERFLOWS: u64 = 0;

/// How many bits of a time, from the highest that is set, select its bucket: buckets are a thousandth wide.
pub(crate) const PRECISION: u32 = 9;
/// Binary logarithm of the longest time, in ticks: longer ones are counted as that.
pub(crate) const LONGEST_BITS: u32 = 48;
pub(crate) const BUCKETS: u64 = ((LONGEST_BITS - PRECISION + 1) as u64) << PRECISION;
pub(crate) const HISTOGRAM_LEN: u64 = BUCKETS * 8;

const SLOTS_AT: u64 = HEADER_LEN;
const HISTOGRAMS_AT: u64 = SLOTS_AT + (SLOTS + SEEK) * SLOT_LEN;
pub(crate) const PAIR_LEN: u64 = HISTOGRAMS_AT + GROUPS as u64 * HISTOGRAM_LEN;

/// About how many bytes of records a ring holds.
const RING: u64 = 1 << 20;

/// The fields of a record.
pub(crate) mod record {
    /// Once the record is complete, one more than its position in the ring.
    pub(crate) const NUMBER: u64 = 0;
    /// The time of the hit, in ticks.
    pub(crate) const TIME: u64 = 8;
    /// The thread's id, four bytes.
    pub(crate) const TID: u64 = 16;
    /// The index of the point in its plan, four bytes.
    pub(crate) const POINT: u64 = 20;
    /// A byte for each argument: 0 if it is not a block that can be read, otherwise one more than the
    /// number of its words that were copied.
    pub(crate) const COPIED: u64 = 24;
    pub(crate) const ARGUMENTS: u64 = 32;

    /// Of an argument: its value, the header of its block, and the first words of the block.
    pub(crate) const VALUE: u64 = 0;
    pub(crate) const BLOCK: u64 = 8;
    pub(crate) const COPY: u64 = 16;
    /// In words: one more than is shown, for the end of a string that just fits.
    pub(crate) const COPY_WORDS: u64 = 9;
    pub(crate) const ARGUMENT_LEN: u64 = COPY + COPY_WORDS * 8;

    /// Returns the length of a record of so many arguments, in bytes.
    pub(crate) fn len(arguments: usize) -> u32 {
        let len = ARGUMENTS + ARGUMENT_LEN * arguments as u64;
        len.next_multiple_of(64) as u32
    }
}

/// Which parts the shared data have, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SharedLayout {
    pub(crate) pairs: u32,
    /// The bytes of a record; 0 if no point is watched.
    pub(crate) record_len: u32,
}

impl SharedLayout {
    /// Returns whether it can be one of ours: its numbers may have been read from a process.
    pub(crate) fn is_possible(self) -> bool {
        let longest = record::len(MOST_ARGUMENTS);
        self.pairs <= MAX_PAIRS && self.record_len <= longest && self.record_len % 64 == 0
    }

    /// Returns whether nothing is shared.
    pub(crate) fn is_empty(self) -> bool {
        self == SharedLayout::default()
    }

    /// Returns the offset of a pair.
    pub(crate) fn pair(self, index: u32) -> u64 {
        HEADER_LEN + PAIR_LEN * u64::from(index)
    }

    /// Returns the offset of the slots of a pair.
    pub(crate) fn slots(self, pair: u32) -> u64 {
        self.pair(pair) + SLOTS_AT
    }

    /// Returns the offset of the histograms of a pair.
    pub(crate) fn histograms(self, pair: u32) -> u64 {
        self.pair(pair) + HISTOGRAMS_AT
    }

    /// Returns how many records a ring holds, a power of two.
    pub(crate) fn records(self) -> u64 {
        let fit = RING / u64::from(self.record_len.max(64));
        1 << fit.ilog2()
    }

    /// Returns the length of a ring in bytes.
    pub(crate) fn ring_len(self) -> u64 {
        if self.record_len == 0 {
            return 0;
        }
        HEADER_LEN + self.records() * u64::from(self.record_len)
    }

    /// Returns the offset of the ring of a group.
    pub(crate) fn ring(self, group: usize) -> u64 {
        self.pair(self.pairs) + self.ring_len() * group as u64
    }

    /// Returns the offset of the table of pages that may be read.
    pub(crate) fn pages(self) -> u64 {
        self.ring(GROUPS)
    }

    /// Returns its length in bytes.
    pub(crate) fn len(self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let has_pages = self.record_len > 0;
        self.pages() + if has_pages { readable_pages::LEN } else { 0 }
    }
}

/// Returns the bucket of a time, computed as the trampolines do.
#[cfg(test)]
pub(crate) fn bucket(ticks: u64) -> u64 {
    let ticks = ticks.min((1 << LONGEST_BITS) - 1);
    let shift = (ticks | 1 << PRECISION).ilog2() - PRECISION;
    (u64::from(shift) << PRECISION) + (ticks >> shift)
}

/// Returns the times that are counted in a bucket: the least, and how many.
pub(crate) fn times_of(bucket: u64) -> (u64, u64) {
    let shift = (bucket >> PRECISION).saturating_sub(1);
    let top = bucket - (shift << PRECISION);
    (top << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_times_without_a_gap() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let (least, many) = times_of(index);
            assert_eq!(least, next);
            assert_eq!((bucket(least), bucket(least + many - 1)), (index, index));
            assert!(many == 1 || least / many >= 1 << PRECISION);
            next = least + many;
        }
        assert_eq!(next, 1 << LONGEST_BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn parts_follow_each_other() {
        assert_eq!(SharedLayout::default().len(), 0);
        for arguments in 0..=6 {
            let record_len = record::len(arguments);
            let shared = SharedLayout {
                pairs: 3,
                record_len,
            };
            assert!(shared.is_possible());
            assert!(shared.slots(2) > shared.pair(2) && shared.histograms(2) > shared.slots(2));
            assert_eq!(shared.pair(3), shared.ring(0));
            assert!(shared.ring(1) - shared.ring(0) <= RING + HEADER_LEN);
            assert!(shared.len() > shared.pages() && shared.len() < 1 << 31);
        }
    }
}
