//! [`EventGaps`]: when the program has paused and resumed its events. Pure.

use std::collections::BTreeSet;

/// When events were paused and resumed, in all domains (`caml_runtime_events_pause`, `caml_runtime_events_resume`). A
/// begin before such a time and an end after it may not belong together: events between them may not have been written.
///
/// ```
/// let mut gaps = probes_lib::EventGaps::default();
/// gaps.add(100);
/// gaps.add(200);
/// assert_eq!(gaps.last_in(50, 150), Some(100));
/// assert_eq!(gaps.last_in(110, 190), None);
/// ```
#[derive(Clone, Debug, Default)]
pub struct EventGaps {
    times: BTreeSet<u64>,
    /// The latest of the times that are not kept.
    forgotten: Option<u64>,
}

/// How many times are kept.
const MAX_TIMES: usize = 4096;

impl EventGaps {
    /// Adds a time at which events were paused or resumed, in nanoseconds of `CLOCK_MONOTONIC`. Rings are read one
    /// after the other, so earlier times may be added later.
    pub fn add(&mut self, time: u64) {
        self.times.insert(time);
        if self.times.len() > MAX_TIMES {
            self.forgotten = self.forgotten.max(self.times.pop_first());
        }
    }

    /// Returns the last such time after `began`, up to `ended`. What began before the last 4096 times is taken to
    /// reach the first one that is not kept.
    pub fn last_in(&self, began: u64, ended: u64) -> Option<u64> {
        let after = began.checked_add(1).filter(|after| *after <= ended)?;
        let kept = self.times.range(after..=ended).next_back().copied();
        kept.or_else(|| self.forgotten.filter(|&time| began < time && time <= ended))
    }

    /// Returns the latest time at which events were paused or resumed; 0 if they never were.
    pub fn latest(&self) -> u64 {
        let latest = self.times.last().copied();
        latest.max(self.forgotten).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pause_is_a_gap_of_its_own() {
        let mut gaps = EventGaps::default();
        assert_eq!((gaps.last_in(0, u64::MAX), gaps.latest()), (None, 0));
        for time in [200, 210, 100, 110] {
            gaps.add(time);
        }
        assert_eq!(gaps.latest(), 210);
        let found = [(50, 150), (99, 100), (100, 105), (110, 199), (150, 250)];
        let found = found.map(|(began, ended)| gaps.last_in(began, ended));
        assert_eq!(found, [Some(110), Some(100), None, None, Some(210)]);
        assert_eq!(gaps.last_in(u64::MAX, u64::MAX), None);
        assert_eq!(gaps.last_in(150, 100), None);
    }

    #[test]
    fn many_gaps_take_bounded_memory() {
        let mut gaps = EventGaps::default();
        (1..=100_000).for_each(|time| gaps.add(10 * time));
        assert_eq!(gaps.times.len(), MAX_TIMES);
        // Of the forgotten ones, something is known to be in between.
        assert!(gaps.last_in(15, 999_999).is_some());
        assert_eq!(gaps.last_in(999_991, 999_999), None);
        assert_eq!(gaps.last_in(999_989, 999_999), Some(999_990));
    }
}
