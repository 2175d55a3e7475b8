//! [`Looks`]: what a thread was seen to do when it waited, until the records of that time are there. Pure.
//!
//! ```text
//! out ├── look ──┤ in   out ├── look ──┤      there are two looks already when the first `in` is read
//! ```

use std::collections::VecDeque;
use std::time::Duration;

/// How many looks at a thread are kept, at most: records come less than a millisecond after a look, and looks are not much closer.
const MAX_LOOKS: usize = 8;

/// What a thread was seen to do when it waited.
#[derive(Clone, Debug)]
pub(super) struct WaitLook<L> {
    pub(super) at: Duration,
    /// Until then, it has not run since.
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

    /// Returns the last look from before a wait that began at this time.
    pub(super) fn before(&self, since: Duration) -> Option<&WaitLook<L>> {
        self.0.iter().rev().find(|look| look.at <= since)
    }

    /// Forgets what is of no wait after this time, except what the thread was last seen to do.
    pub(super) fn forget_before(&mut self, at: Duration) {
        while self.0.get(1).is_some_and(|second| second.at <= at) {
            self.0.pop_front();
        }
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
        let before =
            |looks: &Looks<&'static str>, since| looks.before(at(since)).map(|found| found.look);
        assert_eq!(
            [5, 21, 50].map(|since| before(&looks, since)),
            [None, Some("read"), Some("poll")]
        );
        assert!(looks.reach(at(40)) && !looks.reach(at(41)));
        looks.forget_before(at(39));
        assert_eq!(looks.0.len(), 2);
        looks.forget_before(at(41));
        assert_eq!((looks.0.len(), before(&looks, 50)), (1, Some("poll")));
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
