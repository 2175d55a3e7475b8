//! [`EventDurations`]: how long phases and spans take, from their begins and ends. Pure.

use std::collections::HashMap;

use super::gaps::EventGaps;

/// Pairs the begins of phases and spans with their ends: in each domain, an end belongs to the last begin of its name
/// that has no end yet.
///
/// ```
/// use probes_lib::EventDurations;
///
/// let mut durations = EventDurations::default();
/// let (domain, name) = (0, 7);
/// durations.begin(domain, name, 100);
/// assert_eq!(durations.end(domain, name, 130), Some(30));
/// // Its begin was not read.
/// assert_eq!(durations.end(domain, name, 150), None);
/// ```
#[derive(Clone, Debug, Default)]
pub struct EventDurations {
    /// The times of the begins that have no end yet, by domain and name.
    open: HashMap<u32, HashMap<usize, Vec<u64>>>,
    gaps: EventGaps,
}

/// No program nests so many phases or spans of one name: if there are more, their ends were not written.
const MAX_OPEN: usize = 1024;

impl EventDurations {
    /// Adds a begin; times are in nanoseconds, names are numbers.
    pub fn begin(&mut self, domain: u32, name: usize, time: u64) {
        let open = self
            .open
            .entry(domain)
            .or_default()
            .entry(name)
            .or_default();
        if open.len() >= MAX_OPEN {
            open.clear();
        }
        open.push(time);
    }

    /// Adds an end; returns how long the phase or span took, in nanoseconds. `None` if its begin was not read, or
    /// events were paused meanwhile, or it ends before it began.
    pub fn end(&mut self, domain: u32, name: usize, time: u64) -> Option<u64> {
        let open = self.open.get_mut(&domain)?.get_mut(&name)?;
        let began = open.pop()?;
        if self.gaps.last_in(began, time).is_some() {
            return None;
        }
        time.checked_sub(began)
    }

    /// Forgets what is open in a domain, because events of it were lost, or it has ended.
    pub fn forget(&mut self, domain: u32) {
        self.open.remove(&domain);
    }

    /// Tells that events were paused or resumed at this time: an end after it does not belong to a begin before it, in
    /// any domain. Rings are read one after the other, so begins and ends of other domains from before that time may
    /// still be added.
    pub fn paused_or_resumed(&mut self, time: u64) {
        self.gaps.add(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_belong_to_the_last_begin() {
        let mut durations = EventDurations::default();
        for time in [10, 20, 25] {
            durations.begin(1, 0, time);
        }
        durations.begin(1, 9, 26);
        durations.begin(2, 0, 27);
        assert_eq!(durations.end(1, 0, 30), Some(5));
        assert_eq!(durations.end(1, 0, 40), Some(20));
        assert_eq!(durations.end(2, 0, 28), Some(1));
        assert_eq!(durations.end(1, 0, 9), None, "it ends before it began");
        assert_eq!(durations.end(1, 0, 50), None);
        assert_eq!(durations.end(1, 9, 50), Some(24));
        assert_eq!(durations.end(3, 9, 50), None);
    }

    #[test]
    fn nothing_is_paired_across_a_gap() {
        let mut durations = EventDurations::default();
        durations.begin(1, 0, 10);
        durations.begin(2, 0, 10);
        durations.forget(1);
        assert_eq!(durations.end(1, 0, 20), None);
        assert_eq!(durations.end(2, 0, 20), Some(10));
        durations.begin(1, 0, 30);
        durations.paused_or_resumed(35);
        assert_eq!(durations.end(1, 0, 40), None);
        // Of a ring that is read after that, and of one that was read before.
        durations.begin(2, 0, 31);
        assert_eq!(durations.end(2, 0, 33), Some(2));
        durations.begin(2, 0, 34);
        assert_eq!(durations.end(2, 0, 36), None);
        durations.begin(2, 0, 52);
        durations.paused_or_resumed(50);
        assert_eq!(durations.end(2, 0, 54), Some(2));
    }

    #[test]
    fn nothing_is_paired_across_an_earlier_pause() {
        let mut durations = EventDurations::default();
        // Paused twice before the ring of domain 2 is read.
        for time in [100, 110, 200, 210] {
            durations.paused_or_resumed(time);
        }
        durations.begin(2, 0, 50);
        assert_eq!(durations.end(2, 0, 150), None);
        durations.begin(2, 0, 160);
        assert_eq!(durations.end(2, 0, 170), Some(10));
        durations.begin(2, 0, 180);
        assert_eq!(durations.end(2, 0, 220), None);
    }

    #[test]
    fn begins_without_ends_take_bounded_memory() {
        let mut durations = EventDurations::default();
        for time in 0..100_000 {
            durations.begin(0, 0, time);
        }
        assert!(durations.open[&0][&0].len() <= MAX_OPEN);
    }
}
