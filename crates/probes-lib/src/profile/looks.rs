//! [`Looks`]: what a thread was seen to do when it waited, until the records of that time are there; and [`LooksByLength`]. Pure.
//!
//! ```text
//! out ├── look ──┤ in   out ├── look ──┤      there are two looks already when the first `in` is read
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use crate::numbers::nanoseconds;
use crate::observe::layout::histogram;

/// How many looks at a thread are kept, at most: records come less than a millisecond after a look, and looks are not much closer.
const MAX_LOOKS: usize = 8;

/// What a thread was seen to do when it waited.
#[derive(Clone, Debug)]
pub(super) struct WaitLook<L> {
    pub(super) at: Duration,
    /// The thread has not run between `at` and this time.
    pub(super) until: Duration,
    pub(super) look: L,
}

impl<L> WaitLook<L> {
    /// Whether it was of a wait from `since` until `until`: it has not run in between if some time is of both.
    fn is_within(&self, since: Duration, until: Duration) -> bool {
        self.at <= until && since <= self.until
    }
}

/// Looks at one thread, in the order of their times.
#[derive(Debug)]
pub(super) struct Looks<L>(VecDeque<WaitLook<L>>);

impl<L> Default for Looks<L> {
    fn default() -> Looks<L> {
        Looks(VecDeque::new())
    }
}

impl<L> Looks<L> {
    pub(super) fn add(&mut self, at: Duration, look: L) {
        if self.0.len() >= MAX_LOOKS {
            self.0.pop_front();
        }
        let until = at;
        self.0.push_back(WaitLook { at, until, look });
    }

    /// The thread has not run since the last look, up to this time.
    pub(super) fn extend_to(&mut self, at: Duration) {
        if let Some(look) = self.0.back_mut() {
            look.until = look.until.max(at);
        }
    }

    /// Returns whether it was looked at when it waited, at this time or later.
    pub(super) fn reach(&self, at: Duration) -> bool {
        self.0.back().is_some_and(|look| at <= look.until)
    }

    /// Returns the look at a wait, the last one if there are more.
    pub(super) fn within(&self, since: Duration, until: Duration) -> Option<&WaitLook<L>> {
        let mut looks = self.0.iter().rev();
        looks.find(|look| look.is_within(since, until))
    }

    /// Forgets what is of no wait after this time, except the last look.
    pub(super) fn forget_before(&mut self, at: Duration) {
        while self.0.get(1).is_some_and(|second| second.at <= at) {
            self.0.pop_front();
        }
    }
}

/// What a thread was last seen to do in waits of each length. Among waits of about the same length, chance decides
/// which are looked at, whatever the thread did.
#[derive(Debug)]
pub(super) struct LooksByLength<L>(Vec<(u64, L)>);

/// The mantissa bits of a class of lengths, and the greatest distance of the classes of two waits of about the same
/// length.
const LENGTH_PRECISION: u32 = 2;
const SIMILAR: u64 = 1 << LENGTH_PRECISION;

impl<L> Default for LooksByLength<L> {
    fn default() -> LooksByLength<L> {
        LooksByLength(Vec::new())
    }
}

impl<L> LooksByLength<L> {
    fn class(length: Duration) -> u64 {
        histogram::bucket_of(nanoseconds(length), LENGTH_PRECISION)
    }

    /// Adds a look at a wait of this length.
    pub(super) fn add(&mut self, length: Duration, look: L) {
        let class = LooksByLength::<L>::class(length);
        match self.0.iter_mut().find(|(of, _)| *of == class) {
            Some(known) => known.1 = look,
            None => self.0.push((class, look)),
        }
    }

    /// Returns the last look at a wait of about this length: within a factor of 2.5.
    pub(super) fn similar(&self, length: Duration) -> Option<&L> {
        let class = LooksByLength::<L>::class(length);
        let distances = self.0.iter().map(|(of, look)| (of.abs_diff(class), look));
        let near = distances.filter(|(distance, _)| *distance <= SIMILAR);
        near.min_by_key(|(distance, _)| *distance)
            .map(|(_, look)| look)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    #[test]
    fn looks_are_found_by_their_waits() {
        let mut looks = Looks::default();
        looks.add(at(10), "read");
        looks.extend_to(at(20));
        looks.add(at(40), "poll");
        let within = |looks: &Looks<&'static str>, since, until| {
            looks.within(at(since), at(until)).map(|found| found.look)
        };
        assert_eq!(within(&looks, 5, 25), Some("read"));
        assert_eq!(within(&looks, 15, 25), Some("read"));
        assert_eq!(within(&looks, 21, 39), None);
        assert_eq!(within(&looks, 30, 50), Some("poll"));
        assert!(looks.reach(at(40)) && !looks.reach(at(41)));
        looks.forget_before(at(39));
        assert_eq!(looks.0.len(), 2);
        looks.forget_before(at(41));
        assert_eq!((looks.0.len(), within(&looks, 30, 50)), (1, Some("poll")));
    }

    #[test]
    fn looks_at_similar_waits_are_found() {
        let mut looks = LooksByLength::default();
        looks.add(at(1000), "read");
        looks.add(at(8000), "poll");
        let similar =
            |looks: &LooksByLength<&'static str>, length| looks.similar(at(length)).copied();
        let found = [1, 600, 1010, 1900, 3000, 7900, 15_000, 20_000].map(|it| similar(&looks, it));
        let (read, poll) = (Some("read"), Some("poll"));
        let expected = [None, read, read, read, None, poll, poll, None];
        assert_eq!(found, expected);
        looks.add(at(1001), "write");
        assert_eq!(similar(&looks, 1000), Some("write"));
    }

    #[test]
    fn looks_without_records_take_bounded_memory() {
        let mut looks = Looks::default();
        for time in 0..100 {
            looks.add(at(time), time);
        }
        assert_eq!(looks.0.len(), MAX_LOOKS);
        assert!(looks.reach(at(99)));
    }
}
