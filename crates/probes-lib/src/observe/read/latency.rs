//! [`Latency`]: the times of a pair, from what the trampolines have recorded of them.

pub(crate) mod pair_data;

use std::ops::Deref;

use self::pair_data::PairData;
use crate::numbers::words;
use crate::observe::layout::histogram::{BUCKETS, PRECISION};
use crate::observe::layout::pair_slots::{SLOT_LEN, slot};
use crate::observe::plan::PlannedPair;
use crate::observe::read::ring::word;
use crate::observe::read::times::Times;
use crate::ticks::TickMeasurement;

/// At least so many events have to seem to move between threads: exceptions and threads that exit also leave single
/// starts and stops.
const MIN_MOVED: u64 = 8;

/// The times from the hits of one probe to those of another, in the same thread, or with the same key
/// ([`Observation::match_by`](crate::Observation::match_by)).
///
/// ```no_run
/// use probes_lib::{Observation, Options, Target};
///
/// let observation = Observation::new().time("req_start", "req_end");
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for pair in observer.latencies()? {
///     println!("{} to {}: p99 {:?}", pair.start(), pair.stop(), pair.quantile(0.99));
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Latency {
    start: String,
    stop: String,
    times: Times,
    unmatched_starts: u64,
    unmatched_stops: u64,
    dropped: u64,
    interleaved: u64,
    doubtful: u64,
    untyped: u64,
    without_key: u64,
    by_key: bool,
    moved: u64,
    detects_interleaving: bool,
}

impl Latency {
    /// Returns the latencies of several processes together: those of each pair are added up. The time of an event that
    /// starts in one process and stops in another is not measured.
    ///
    /// ```no_run
    /// # let (one, other): (probes_lib::Observer, probes_lib::Observer) = unimplemented!();
    /// let (one, other) = (one.latencies()?, other.latencies()?);
    /// let both = probes_lib::Latency::of_processes([&one[..], &other[..]]);
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn of_processes<'l>(each: impl IntoIterator<Item = &'l [Latency]>) -> Vec<Latency> {
        let mut all: Vec<Latency> = Vec::new();
        for latency in each.into_iter().flatten() {
            let is_it =
                |it: &&mut Latency| (&it.start, &it.stop) == (&latency.start, &latency.stop);
            match all.iter_mut().find(is_it) {
                Some(sum) => sum.add(latency),
                None => all.push(latency.clone()),
            }
        }
        all
    }

    fn add(&mut self, other: &Latency) {
        self.times.add(&other.times);
        let add = |to: &mut u64, number: u64| *to = to.saturating_add(number);
        add(&mut self.unmatched_starts, other.unmatched_starts);
        add(&mut self.unmatched_stops, other.unmatched_stops);
        add(&mut self.dropped, other.dropped);
        add(&mut self.interleaved, other.interleaved);
        add(&mut self.doubtful, other.doubtful);
        add(&mut self.untyped, other.untyped);
        add(&mut self.without_key, other.without_key);
        add(&mut self.moved, other.moved);
        self.detects_interleaving &= other.detects_interleaving;
    }

    /// Returns the name of the probe at which times start.
    pub fn start(&self) -> &str {
        &self.start
    }

    /// Returns the name of the probe at which they stop.
    pub fn stop(&self) -> &str {
        &self.stop
    }

    /// Returns how many starts have no stop: those that wait for it, and those whose threads have exited; of pairs by
    /// key, also those that another start of the same key has replaced.
    pub fn unmatched_starts(&self) -> u64 {
        self.unmatched_starts
    }

    /// Returns how many stops came without a start.
    pub fn unmatched_stops(&self) -> u64 {
        self.unmatched_stops
    }

    /// Returns how many events were not measured: those of the outer starts, if more than 64 starts wait in a thread,
    /// and those in threads beyond about a thousand. Each is counted at its stop. Of pairs by key, also the starts for
    /// which there was no room; their stops are [`unmatched`](Latency::unmatched_stops), too.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Returns how many stops seem to belong to another start of their thread than the last one, because events
    /// interleave, as with Lwt, Async or Eio. If there are any, **none of the times can be trusted**: those of other
    /// stops are likely to be wrong, too. Zero if the pairs are seen to nest, or nothing is seen that contradicts it.
    ///
    /// A stop is counted in four cases:
    ///
    /// - An argument of the same name at both probes is an OCaml int, and it differs from that of the start that the
    ///   stop ends: the event began before another one, or in another thread.
    /// - Its first argument is an OCaml int, and that of another start than the last one. This counts only if these
    ///   numbers distinguish events.
    /// - There are no such numbers, and the stop ends a start after a later start in the same stack frame was ended: an
    ///   event that starts while another is open in the same frame is not within it, unless one function starts and
    ///   stops several by turns.
    /// - It is in the frame of an earlier start, and that frame is not a caller's of the last start's: the last start
    ///   was on another stack.
    pub fn interleaved(&self) -> u64 {
        self.interleaved
    }

    /// Returns how many stops came while an earlier start of their stack frame waited, and no numbers showed which of the
    /// starts has ended. Either events interleave, or an exception has left that start without a stop.
    ///
    /// For pairs by key ([`Observation::match_by`](crate::Observation::match_by)), returns how many starts had the key
    /// of a start that waited, which then has no stop. Either several events under way had one key, or an exception has
    /// left that start without a stop.
    pub fn doubtful(&self) -> u64 {
        self.doubtful
    }

    /// Returns how many events at least seem to start in one thread and stop in another: more stops than there are
    /// times have no start in their thread, and as many starts have no stop. If there are any, **none of the times can
    /// be trusted**: other stops may have ended starts of their thread that are not theirs. Zero if there are less than
    /// eight.
    ///
    /// One start and one stop of each thread do not count: an event may have been under way when the observation began
    /// or ended.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Returns whether events that interleave, or move between threads, are certain to be noticed: stops find their
    /// starts by a key, or both probes have an argument of one name, which was an OCaml int at all stops. Otherwise
    /// [`interleaved`](Self::interleaved) and [`moved`](Self::moved) may be 0 although events do.
    pub fn detects_interleaving(&self) -> bool {
        self.by_key || self.detects_interleaving
    }

    /// Returns whether stops find their starts by a key ([`Observation::match_by`](crate::Observation::match_by)).
    pub fn is_by_key(&self) -> bool {
        self.by_key
    }

    /// Returns how many starts and stops are left out because an expression has no answer for them: the key, or, at
    /// starts, [`Observation::only_starts_where`](crate::Observation::only_starts_where).
    pub fn untyped(&self) -> u64 {
        self.untyped
    }

    /// Returns how many starts and stops of pairs by key have no key, because its expression has no answer. They are
    /// left out. If they are the stop of one event and the start of the next one with the same key, the two events are
    /// measured as one.
    pub fn without_key(&self) -> u64 {
        self.without_key
    }

    /// Returns whether the times can be trusted: `Some(false)` if events interleave
    /// ([`interleaved`](Self::interleaved)) or move between threads ([`moved`](Self::moved)). `None` if they may do so:
    /// because something points to it ([`doubtful`](Self::doubtful)), because starts or stops of pairs by key have no
    /// key ([`without_key`](Self::without_key)), or because it might not be noticed
    /// ([`detects_interleaving`](Self::detects_interleaving)).
    pub fn is_trusted(&self) -> Option<bool> {
        if self.interleaved.max(self.moved) > 0 {
            return Some(false);
        }
        let may_be_wrong = self.without_key > 0 || !self.detects_interleaving();
        let is_known = self.doubtful == 0 && !(may_be_wrong && self.count() > 0);
        is_known.then_some(true)
    }

    /// Returns the latency of each pair, from its bytes.
    pub(crate) fn of_pairs(
        planned: &[PlannedPair],
        pairs: &[PairData],
        ticks: &TickMeasurement,
    ) -> Vec<Latency> {
        if pairs.is_empty() {
            return Vec::new();
        }
        let nanoseconds = ticks.nanoseconds_per_tick();
        let both = planned.iter().zip(pairs);
        both.map(|(planned, pair)| Latency::of(planned, pair, nanoseconds))
            .collect()
    }

    /// Returns the latency of a pair, from its bytes; `nanoseconds` is the length of a tick.
    fn of(planned: &PlannedPair, data: &PairData, nanoseconds: f64) -> Latency {
        let each = |field: u64| {
            let slots = data.slots.chunks_exact(SLOT_LEN as usize);
            slots.map(move |slot| word(slot, field))
        };
        let sum = |field| total(each(field));
        let longest = each(slot::MAX).max().unwrap_or(0);
        let mut counts = vec![0_u64; BUCKETS as usize];
        for group in &data.histograms {
            for (sum, count) in counts.iter_mut().zip(words(group)) {
                *sum = sum.saturating_add(count);
            }
        }
        let sum_of_times = sum(slot::SUM);
        let unmatched = || {
            let unmatched = each(slot::DEPTH).zip(each(slot::ABANDONED_STARTS));
            let unmatched = unmatched.zip(each(slot::LEFT_OUT));
            unmatched.map(|((waiting, abandoned), left_out)| {
                waiting.saturating_add(abandoned).saturating_sub(left_out)
            })
        };
        // An event of each thread was under way when the observation began, and one when it ended.
        let but_one = |number: u64| number.saturating_sub(1);
        let moved =
            total(unmatched().map(but_one)).min(total(each(slot::UNMATCHED_STOPS).map(but_one)));
        let measured = counts.iter().copied().fold(0, u64::saturating_add);
        // If a probe is paired with itself, each hit ends the one before. If only times of a range are
        // recorded, not all pairs are among the times.
        let is_one_probe = planned.start == planned.stop;
        let shows_moves = data.waiting.is_none() && !is_one_probe && !planned.has_range;
        let have_moved = shows_moves && moved >= MIN_MOVED && moved > measured;
        let has_numbers = planned.has_named_number && sum(slot::NO_NUMBER) == 0;
        let (waiting, replaced) = (data.waiting.unwrap_or(0), sum(slot::REPLACED_STARTS));
        Latency {
            start: planned.start.clone(),
            stop: planned.stop.clone(),
            times: Times::of(
                (0..).zip(counts),
                PRECISION,
                longest,
                Some(sum_of_times),
                nanoseconds,
            ),
            unmatched_starts: total(unmatched().chain([waiting, replaced])),
            unmatched_stops: sum(slot::UNMATCHED_STOPS),
            dropped: total(
                each(slot::OVERWRITTEN_STARTS)
                    .chain(each(slot::STARTS_WITHOUT_ROOM))
                    .chain([data.overflows]),
            ),
            interleaved: Crossings {
                same_frame: sum(slot::SAME_FRAME),
                same_frame_own: sum(slot::SAME_FRAME_OWN),
                same_frame_other: sum(slot::SAME_FRAME_OTHER),
                other_frame: sum(slot::OTHER_FRAME),
                other: sum(slot::OTHER_NUMBER),
                unknown: sum(slot::UNKNOWN_NUMBER),
                repeated: sum(slot::REPEATED_NUMBER),
                different: if planned.has_named_number {
                    sum(slot::DIFFERENT_NUMBER)
                } else {
                    0
                },
            }
            .interleaved(),
            doubtful: sum(slot::DOUBTFUL).saturating_add(replaced),
            untyped: sum(slot::UNTYPED),
            without_key: sum(slot::WITHOUT_KEY),
            by_key: data.waiting.is_some(),
            moved: if have_moved { moved } else { 0 },
            // A number that several events have does not distinguish them.
            detects_interleaving: is_one_probe || (has_numbers && sum(slot::REPEATED_NUMBER) == 0),
        }
    }
}

impl Deref for Latency {
    type Target = Times;

    /// The times from the one probe to the other.
    fn deref(&self) -> &Times {
        &self.times
    }
}

/// What contradicts that stops belong to the last start; each is the sum of one field of the slots.
#[derive(Clone, Copy, Debug, Default)]
struct Crossings {
    same_frame: u64,
    same_frame_own: u64,
    same_frame_other: u64,
    other_frame: u64,
    other: u64,
    unknown: u64,
    repeated: u64,
    /// Of numbers that have the same name at both ends.
    different: u64,
}

impl Crossings {
    /// See [`Latency::interleaved`].
    fn interleaved(self) -> u64 {
        // Numbers that do not distinguish events, such as sizes and results, are mostly unknown at the stop, or
        // repeated at the start. Numbers that do are unknown only of events that started before the observation, or in
        // another thread.
        let exceptions = self.unknown.saturating_add(self.repeated);
        let crossed = if self.other > exceptions.saturating_mul(2) {
            self.other
        } else {
            self.same_frame_other
        };
        // A number that many events have in common does not confirm that a stop belongs to its start.
        let is_confirmed = self.repeated.saturating_mul(4) < self.same_frame_own;
        let unconfirmed = if is_confirmed { 0 } else { self.same_frame_own };
        self.same_frame
            .saturating_add(self.other_frame)
            .saturating_add(crossed)
            .saturating_add(unconfirmed)
            .max(self.different)
    }
}

/// Returns the sum of numbers that were read from a process. They can have any value, so the sum
/// saturates.
fn total(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::observe::layout::histogram::{self, HISTOGRAM_LEN};
    use crate::observe::layout::keyed_starts;
    use crate::observe::layout::pair_slots::{SLOTS, SLOTS_TRIED};
    use crate::observe::layout::shared::{HEADER_LEN, HISTOGRAMS_AT, PAIR_LEN, SLOT_OVERFLOWS};
    use crate::observe::observation::Observation;
    use crate::observe::plan::ObservationPlan;
    use crate::observe::read::latency::pair_data::{HistogramPart, PART_LEN, read_pairs};
    use crate::testing::{RecordedData, program_with_arguments};

    pub(super) fn put(pair: &mut [u8], at: u64, word: u64) {
        pair[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
    }

    pub(super) fn pair_named(start: &str, stop: &str) -> PlannedPair {
        PlannedPair {
            start: start.to_owned(),
            stop: stop.to_owned(),
            ..PlannedPair::default()
        }
    }

    /// All slots and histograms of a pair.
    pub(super) fn data(bytes: &[u8]) -> PairData {
        let (slots, histograms) = bytes.split_at(bytes.len().min(HISTOGRAMS_AT as usize));
        PairData {
            overflows: word(bytes, SLOT_OVERFLOWS),
            slots: slots
                .get(HEADER_LEN as usize..)
                .unwrap_or_default()
                .to_vec(),
            histograms: histograms
                .chunks(HISTOGRAM_LEN as usize)
                .map(<[u8]>::to_vec)
                .collect(),
            waiting: None,
        }
    }

    #[test]
    fn times_read_equal_times_recorded() {
        let mut pair = vec![0; PAIR_LEN as usize];
        // In two groups, 1000 ticks a hundred times, and 3 million once.
        for group in [0, 7] {
            let at = HISTOGRAMS_AT + group * HISTOGRAM_LEN;
            put(&mut pair, at + 8 * histogram::bucket(1000), 50);
        }
        put(
            &mut pair,
            HISTOGRAMS_AT + 8 * histogram::bucket(3_000_000),
            1,
        );
        for (index, sum) in [(3, 50_000), (SLOTS + SLOTS_TRIED - 1, 3_050_000)] {
            let at = HEADER_LEN + index * SLOT_LEN;
            put(&mut pair, at + slot::SUM, sum);
            put(&mut pair, at + slot::MAX, 3_000_000);
            put(&mut pair, at + slot::DEPTH, 2);
            put(&mut pair, at + slot::ABANDONED_STARTS, 4);
            put(&mut pair, at + slot::LEFT_OUT, 3);
            put(&mut pair, at + slot::UNMATCHED_STOPS, 4);
            put(&mut pair, at + slot::OVERWRITTEN_STARTS, 5);
        }
        put(&mut pair, SLOT_OVERFLOWS, 6);
        let latency = Latency::of(&pair_named("a", "b"), &data(&pair), 0.5);
        assert_eq!((latency.start(), latency.stop()), ("a", "b"));
        assert_eq!(latency.count(), 101);
        assert_eq!(latency.mean(), Duration::from_nanos(3_100_000 / 101 / 2));
        assert_eq!(latency.max(), Duration::from_micros(1500));
        let near = |time: Duration, nanoseconds: u64| {
            let off = time.as_nanos().abs_diff(u128::from(nanoseconds));
            assert!(off <= u128::from(nanoseconds) / 500 + 1, "{time:?}");
        };
        near(latency.quantile(0.5), 500);
        near(latency.quantile(0.99), 500);
        near(latency.quantile(1.0), 1_500_000);
        assert_eq!(latency.times().map(|(_, count)| count).sum::<u64>(), 101);
        assert_eq!(latency.unmatched_starts(), 6);
        assert_eq!(latency.unmatched_stops(), 8);
        assert_eq!(latency.dropped(), 16);
    }

    #[test]
    fn interleaving_is_concluded_from_all_slots() {
        let mut pair = vec![0; PAIR_LEN as usize];
        for index in [0, SLOTS + SLOTS_TRIED - 1] {
            let at = HEADER_LEN + index * SLOT_LEN;
            put(&mut pair, at + slot::SAME_FRAME, 3);
            put(&mut pair, at + slot::OTHER_FRAME, 5);
            put(&mut pair, at + slot::OTHER_NUMBER, 20);
            put(&mut pair, at + slot::UNKNOWN_NUMBER, 9);
            put(&mut pair, at + slot::DIFFERENT_NUMBER, 29);
        }
        let mut planned = pair_named("a", "b");
        assert_eq!(Latency::of(&planned, &data(&pair), 1.0).interleaved(), 56);
        planned.has_named_number = true;
        assert_eq!(Latency::of(&planned, &data(&pair), 1.0).interleaved(), 58);
    }

    #[test]
    fn other_numbers_of_one_name_are_never_excused() {
        let mut pair = vec![0; PAIR_LEN as usize];
        for field in [
            slot::DIFFERENT_NUMBER,
            slot::UNKNOWN_NUMBER,
            slot::REPEATED_NUMBER,
        ] {
            put(&mut pair, HEADER_LEN + field, 1);
        }
        let mut planned = pair_named("a", "b");
        let trusted = |planned: &PlannedPair| Latency::of(planned, &data(&pair), 1.0).is_trusted();
        assert_eq!(trusted(&planned), Some(true));
        planned.has_named_number = true;
        assert_eq!(trusted(&planned), Some(false));
    }

    #[test]
    fn latencies_of_processes_add_up() {
        let of = |ticks: &[u64], stop: &str| {
            let mut pair = vec![0; PAIR_LEN as usize];
            for ticks in ticks {
                let at = HISTOGRAMS_AT + 8 * histogram::bucket(*ticks);
                let before = pair[at as usize];
                put(&mut pair, at, u64::from(before) + 1);
            }
            let fields = [
                (slot::SUM, ticks.iter().sum()),
                (slot::MAX, ticks.iter().copied().max().unwrap_or(0)),
                (slot::DEPTH, 1),
                (slot::UNMATCHED_STOPS, 2),
                (slot::OVERWRITTEN_STARTS, 3),
                (slot::DOUBTFUL, 4),
                (slot::OTHER_FRAME, 5),
                (slot::UNTYPED, 6),
            ];
            for (field, number) in fields {
                put(&mut pair, HEADER_LEN + field, number);
            }
            Latency::of(&pair_named("a", stop), &data(&pair), 1.0)
        };
        let one = [of(&[100, 100, 7], "b"), of(&[], "c")];
        let other = [of(&[5_000_000, 100], "b"), of(&[9], "c")];
        for each in [[&one[..], &other], [&other, &one]] {
            let [b, c] = &Latency::of_processes(each)[..] else {
                panic!("{each:?}");
            };
            assert_eq!((b.count(), b.sum().as_nanos()), (5, 5_000_307));
            let times: Vec<_> = b
                .times()
                .map(|(time, many)| (time.as_nanos(), many))
                .collect();
            assert_eq!(times, [(7, 1), (100, 3), (5_000_000, 1)]);
            assert_eq!((c.count(), c.max().as_nanos()), (1, 9));
            let figures = [
                b.unmatched_starts,
                b.unmatched_stops,
                b.dropped,
                b.doubtful,
                b.interleaved,
                b.untyped,
            ];
            assert_eq!(figures, [2, 4, 6, 8, 10, 12]);
        }
    }

    #[test]
    fn interleaved_or_doubtful_times_are_not_trusted() {
        let trusted = |fields: &[u64]| {
            let mut pair = vec![0; PAIR_LEN as usize];
            for field in fields {
                put(&mut pair, HEADER_LEN + field, 1);
            }
            Latency::of(&pair_named("a", "b"), &data(&pair), 1.0).is_trusted()
        };
        assert_eq!(trusted(&[]), Some(true));
        assert_eq!(trusted(&[slot::DOUBTFUL]), None);
        assert_eq!(trusted(&[slot::DOUBTFUL, slot::SAME_FRAME]), Some(false));
    }

    #[test]
    fn times_of_events_without_numbers_are_not_trusted() {
        let trusted = |planned: &PlannedPair, times| {
            let mut pair = vec![0; PAIR_LEN as usize];
            put(&mut pair, HISTOGRAMS_AT, times);
            Latency::of(planned, &data(&pair), 1.0).is_trusted()
        };
        let mut planned = pair_named("a", "b");
        assert_eq!(
            [0, 1].map(|times| trusted(&planned, times)),
            [Some(true), None]
        );
        assert_eq!(trusted(&pair_named("a", "a"), 1), Some(true));
        planned.has_named_number = true;
        assert_eq!(trusted(&planned, 1), Some(true));
    }

    // promise: Observations: Pairs by key are not trusted if some of their starts or stops have no key
    #[test]
    fn times_beside_ends_without_key_are_doubtful() {
        let trusted = |without_key, times, filtered| {
            let mut pair = vec![0; PAIR_LEN as usize];
            put(
                &mut pair,
                HEADER_LEN + slot::UNTYPED,
                without_key + filtered,
            );
            put(&mut pair, HEADER_LEN + slot::WITHOUT_KEY, without_key);
            put(&mut pair, HISTOGRAMS_AT, times);
            let data = PairData {
                waiting: Some(0),
                ..data(&pair)
            };
            Latency::of(&pair_named("a", "b"), &data, 1.0).is_trusted()
        };
        assert_eq!(trusted(1, 1, 0), None);
        assert_eq!(trusted(0, 1, 0), Some(true));
        // There is no time that may be wrong.
        assert_eq!(trusted(1, 0, 0), Some(true));
        // A filter leaves out starts with their stops.
        assert_eq!(trusted(0, 1, 1), Some(true));
    }

    // promise: Observations: Pairs are untrusted if starts and stops without each other, in different threads, outnumber their times
    #[test]
    fn starts_and_stops_of_different_threads_have_moved() {
        let moved_of =
            |planned: &PlannedPair, starts: &[u64], stops: &[u64], times: u32, waiting| {
                let mut pair = vec![0; PAIR_LEN as usize];
                let slots = starts.iter().map(|it| (slot::DEPTH, *it));
                let slots = slots.chain(stops.iter().map(|it| (slot::UNMATCHED_STOPS, *it)));
                for (index, (field, number)) in (0..).zip(slots) {
                    put(&mut pair, HEADER_LEN + index * SLOT_LEN + field, number);
                }
                put(&mut pair, HISTOGRAMS_AT, times.into());
                let data = PairData {
                    waiting,
                    ..data(&pair)
                };
                let latency = Latency::of(planned, &data, 1.0);
                assert_eq!(latency.is_trusted() == Some(false), latency.moved() > 0);
                latency.moved()
            };
        let pair = pair_named("a", "b");
        let moved = |starts: &[u64], stops: &[u64], times, waiting| {
            moved_of(&pair, starts, stops, times, waiting)
        };
        // Each hit ends the one before; or not all pairs are among the times.
        assert_eq!(
            moved_of(&pair_named("a", "a"), &[4000], &[4000], 0, None),
            0
        );
        let ranged = PlannedPair {
            has_range: true,
            ..pair_named("a", "b")
        };
        assert_eq!(moved_of(&ranged, &[4000], &[4000], 0, None), 0);
        assert_eq!(moved(&[4000], &[3000, 1000], 0, None), 3998);
        assert_eq!(moved(&[50], &[60], 48, None), 49);
        // As many are timed; exceptions skip stops, or starts; each of many threads is within an event; by key.
        assert_eq!(moved(&[50], &[60], 49, None), 0);
        assert_eq!(moved(&[4000], &[1], 0, None), 0);
        assert_eq!(moved(&[1], &[4000], 0, None), 0);
        assert_eq!(moved(&[1; 100], &[1; 100], 0, None), 0);
        assert_eq!(
            (moved(&[9], &[9], 0, None), moved(&[8], &[9], 0, None)),
            (8, 0)
        );
        assert_eq!(moved(&[4000], &[4000], 0, Some(0)), 0);
    }

    #[test]
    fn events_are_distinguished_by_one_name() {
        let mut pair = vec![0; PAIR_LEN as usize];
        let mut planned = pair_named("a", "b");
        let are_distinguished = |planned: &PlannedPair, data: &PairData| {
            Latency::of(planned, data, 1.0).detects_interleaving()
        };
        assert!(!are_distinguished(&planned, &data(&pair)));
        planned.has_named_number = true;
        assert!(are_distinguished(&planned, &data(&pair)));
        // Several events have one number.
        let repeated = HEADER_LEN + 7 * SLOT_LEN + slot::REPEATED_NUMBER;
        put(&mut pair, repeated, 1);
        assert!(!are_distinguished(&planned, &data(&pair)));
        assert!(are_distinguished(&pair_named("a", "a"), &data(&pair)));
        put(&mut pair, repeated, 0);
        // A string has the name.
        put(&mut pair, HEADER_LEN + 7 * SLOT_LEN + slot::NO_NUMBER, 1);
        assert!(!are_distinguished(&planned, &data(&pair)));
        let by_key = PairData {
            waiting: Some(0),
            ..data(&pair)
        };
        assert!(are_distinguished(&planned, &by_key));
    }

    #[test]
    fn numbers_count_only_where_they_distinguish_events() {
        let found = |other, unknown, repeated| {
            let found = Crossings {
                other,
                unknown,
                repeated,
                same_frame_other: 5,
                ..Crossings::default()
            };
            found.interleaved()
        };
        assert_eq!([found(7, 3, 0), found(7, 0, 3), found(7, 1, 2)], [7; 3]);
        assert_eq!([found(6, 3, 0), found(6, 0, 3), found(6, 1, 2)], [5; 3]);
        // The number of the start confirms the stop, unless it is that of many starts.
        let own = |own, repeated| {
            let found = Crossings {
                same_frame_own: own,
                repeated,
                ..Crossings::default()
            };
            found.interleaved()
        };
        assert_eq!([own(9, 0), own(9, 2), own(9, 3), own(8, 2)], [0, 0, 9, 8]);
    }

    #[test]
    fn no_times_give_zeroes() {
        let names = PlannedPair::default();
        for bytes in [&[] as &[u8], &vec![0; PAIR_LEN as usize]] {
            let latency = Latency::of(&names, &data(bytes), 1.0);
            assert_eq!((latency.count(), latency.times().count()), (0, 0));
            assert_eq!(
                (latency.mean(), latency.max()),
                <(Duration, Duration)>::default()
            );
            assert_eq!(latency.quantile(0.5), Duration::ZERO);
        }
    }

    #[test]
    fn any_bytes_can_be_read() {
        let pair = vec![0xff; PAIR_LEN as usize];
        let names = PlannedPair::default();
        for len in [1000, pair.len()] {
            Latency::of(&names, &data(&pair[..len]), 1.0).quantile(0.5);
        }
    }

    /// Returns the latencies of two pairs; `record` writes what trampolines would.
    fn latencies(observation: Observation, record: impl FnOnce(&mut RecordedData)) -> Vec<Latency> {
        let program = program_with_arguments(&[("a", "8@%rdi"), ("b", "8@%rdi")]);
        let observation = observation.time("a", "b").time("b", "a");
        let program = Arc::new(program);
        let plan = ObservationPlan::of(&observation, program, Arc::default()).unwrap();
        let mut data = RecordedData::of(&plan);
        record(&mut data);
        assert!(
            read_pairs(1, &data.memory, &[], HistogramPart::Whole)
                .unwrap()
                .is_empty()
        );
        let pairs = read_pairs(1, &data.memory, &[data.arena], HistogramPart::UpToLongest).unwrap();
        Latency::of_pairs(&plan.pairs, &pairs, &TickMeasurement::begin())
    }

    #[test]
    fn figures_of_each_pair_are_read() {
        let all = latencies(Observation::new(), |data| {
            let at = data.arena.shared.pair(1) + HEADER_LEN + 3 * SLOT_LEN;
            let at = data.shared().plus(at);
            data.put(at.plus(slot::OWNER), 1);
            data.put(at.plus(slot::DOUBTFUL), 5);
            data.put(at.plus(slot::UNTYPED), 6);
            data.put(at.plus(slot::SAME_FRAME), 7);
            data.put(at.plus(slot::DEPTH), 8);
        });
        let figures = |it: &Latency| {
            let stops = (it.interleaved(), it.doubtful(), it.untyped());
            (
                it.start().to_owned(),
                it.unmatched_starts(),
                stops,
                it.is_by_key(),
            )
        };
        let all: Vec<_> = all.iter().map(figures).collect();
        let first = ("a".to_owned(), 0, (0, 0, 0), false);
        let second = ("b".to_owned(), 8, (7, 5, 6), false);
        assert_eq!(all, [first, second]);
        assert!(Latency::of_pairs(&[], &[], &TickMeasurement::begin()).is_empty());
    }

    #[test]
    fn starts_that_wait_by_key_are_counted() {
        let by_key = Observation::new().match_by("arg0".parse().unwrap());
        let all = latencies(by_key, |data| {
            let table = data.arena.shared.keyed_starts(1);
            let last = keyed_starts::TABLE_LEN - keyed_starts::slot::LEN;
            for at in [0, PART_LEN, last] {
                let at = data.shared().plus(table + at);
                data.put(at.plus(keyed_starts::slot::KEY), 1);
                data.put(at.plus(keyed_starts::slot::TIME), 1);
            }
            let at = data.arena.shared.pair(1) + HEADER_LEN;
            let at = data.shared().plus(at);
            data.put(at.plus(slot::OWNER), 1);
            data.put(at.plus(slot::REPLACED_STARTS), 4);
        });
        let starts: Vec<u64> = all.iter().map(Latency::unmatched_starts).collect();
        assert_eq!(starts, [0, 7]);
        assert!(all.iter().all(Latency::is_by_key));
        assert_eq!((all[1].doubtful(), all[0].doubtful()), (4, 0));
    }
}
