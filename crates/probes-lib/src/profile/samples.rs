//! Samples of threads, kept until the records of switches tell what the threads did when the samples were due. Pure.
//!
//! ```text
//! due ├── this tool waits for a processor ──┤ read
//! ```
//!
//! Where processors are shared, the tool gets one late, and perhaps the one that the thread was on. So a sample counts
//! what the thread did when the sample was due; its stack, which is read later, is taken for the one of that moment
//! unless the thread has waited in between.

use std::collections::VecDeque;
use std::time::Duration;

use super::waits::{Presence, Waits};
use crate::stacks::SwitchCounts;

/// Samples whose records are not all read yet, in the order of their times; `K` is what was read of the thread.
#[derive(Debug)]
pub(super) struct PendingSamples<K> {
    samples: VecDeque<Sample<K>>,
    /// For how many of the first ones it is known what the thread did when they were due.
    known: usize,
}

#[derive(Debug)]
struct Sample<K> {
    tid: i32,
    due: Duration,
    read: Duration,
    key: K,
    time: Duration,
    /// What the thread did when it was due, and how often it had begun to wait.
    at_due: Option<(Presence, u64)>,
}

/// A sample of a thread that was on a processor when it was due.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SampleOnProcessor<K> {
    pub(super) key: K,
    pub(super) time: Duration,
    /// Whether it has waited after that, before its stack was read.
    pub(super) is_stale: bool,
}

impl<K> Default for PendingSamples<K> {
    fn default() -> PendingSamples<K> {
        PendingSamples {
            samples: VecDeque::new(),
            known: 0,
        }
    }
}

impl<K> PendingSamples<K> {
    /// Adds a sample that stands for so much `time`. It is neither due nor read before the samples that were added
    /// earlier.
    pub(super) fn add(
        &mut self,
        tid: i32,
        (due, read): (Duration, Duration),
        key: K,
        time: Duration,
    ) {
        self.samples.push_back(Sample {
            tid,
            due,
            read,
            key,
            time,
            at_due: None,
        });
    }

    /// Removes the samples that were read before `until`, and passes those of threads that were on a processor to
    /// `add`. `waits` has all records from before `until`, and no later ones.
    pub(super) fn take_until<L: Clone>(
        &mut self,
        until: Duration,
        waits: &Waits<L>,
        mut add: impl FnMut(SampleOnProcessor<K>),
    ) {
        while let Some(sample) = self.samples.get_mut(self.known) {
            if sample.due >= until {
                break;
            }
            sample.at_due = Some(waits.presence(sample.tid));
            self.known += 1;
        }
        while self.samples.front().is_some_and(|it| it.read < until) {
            let Some(sample) = self.samples.pop_front() else {
                return;
            };
            self.known = self.known.saturating_sub(1);
            let now = waits.presence(sample.tid);
            let (presence, begun) = sample.at_due.unwrap_or(now);
            if presence == Presence::OnProcessor {
                add(SampleOnProcessor {
                    key: sample.key,
                    time: sample.time,
                    is_stale: begun != now.1,
                });
            }
        }
    }
}

/// What is known of a thread just before it is found running, where switches are not recorded.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwitchesBefore {
    counts: SwitchCounts,
    /// Whether it has waited since the look before, and has not been made to leave a processor.
    has_only_waited: bool,
}

/// Whether a thread that was found running was on a processor from then until it was stopped, as far as that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RanUntilStop {
    Yes,
    /// It has waited since: it is not known where it ran.
    Waited,
    /// It had been woken, and waited for a processor: its stack is that of its wait.
    Woken,
}

impl SwitchesBefore {
    pub(super) fn new(counts: SwitchCounts, earlier: Option<SwitchesBefore>) -> SwitchesBefore {
        let has_only_waited = |earlier: SwitchesBefore| {
            let earlier = earlier.counts;
            earlier.voluntary != counts.voluntary && earlier.involuntary == counts.involuntary
        };
        SwitchesBefore {
            counts,
            has_only_waited: earlier.is_some_and(has_only_waited),
        }
    }

    /// What it has done until it was stopped: the stop counts once as a voluntary switch, which is no wait at the next look.
    pub(super) fn until_stop(&mut self, stopped: SwitchCounts, is_in_call: bool) -> RanUntilStop {
        let before = std::mem::replace(&mut self.counts, stopped);
        let was_preempted = stopped.involuntary != before.involuntary;
        let has_arrived = stopped.arrivals > before.arrivals;
        if stopped.voluntary > before.voluntary.saturating_add(1) {
            RanUntilStop::Waited
        } else if self.has_only_waited && is_in_call && has_arrived && !was_preempted {
            RanUntilStop::Woken
        } else {
            RanUntilStop::Yes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::{PerfRecord, RecordKind};
    use super::*;
    use RecordKind::{In, Out, Preempted};

    const PID: i32 = 1;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Returns whether a sample that is due at 100 and read at 200 is stale; `None` if the thread was not on a
    /// processor.
    fn taken(records: &[(u64, RecordKind)]) -> Option<bool> {
        let mut waits: Waits<()> = Waits::of_process(PID, at(0));
        waits.add_existing(PID);
        let mut samples = PendingSamples::default();
        samples.add(PID, (at(100), at(200)), "key", at(10));
        let mut found = Vec::new();
        for (time, kind) in records {
            samples.take_until(at(*time), &waits, |it| found.push(it));
            let record = PerfRecord {
                at: at(*time),
                pid: PID,
                tid: PID,
                event: 0,
                kind: kind.clone(),
            };
            waits.add(record, &[]);
        }
        samples.take_until(Duration::MAX, &waits, |it| found.push(it));
        assert!(samples.samples.is_empty() && samples.known == 0);
        let taken = found.pop()?;
        assert_eq!((taken.key, taken.time, found.len()), ("key", at(10), 0));
        Some(taken.is_stale)
    }

    #[test]
    fn samples_count_what_threads_did_when_due() {
        let (on, stale) = (Some(false), Some(true));
        // It ran all the time; until this tool took its processor; until it was stopped for its stack.
        assert_eq!(taken(&[]), on);
        assert_eq!(taken(&[(10, In), (101, Preempted)]), on);
        assert_eq!(taken(&[(10, In), (201, Out), (202, In)]), on);
        // It waited for a processor, also if it has got one since.
        assert_eq!(taken(&[(10, In), (90, Preempted)]), None);
        assert_eq!(taken(&[(90, Preempted), (150, In)]), None);
        // It was on a processor, and then waited, also if it runs again.
        assert_eq!(taken(&[(10, In), (150, Out)]), stale);
        assert_eq!(taken(&[(10, In), (150, Out), (180, In)]), stale);
        // It waited, though it runs when it is read.
        assert_eq!(taken(&[(90, Out), (120, In)]), None);
        assert_eq!(taken(&[(90, Out), (300, In)]), None);
    }

    #[test]
    fn threads_that_wait_before_their_stop_are_known() {
        let counts = |arrivals, voluntary| SwitchCounts {
            arrivals,
            voluntary,
            involuntary: 0,
        };
        let earlier = SwitchesBefore::new(counts(10, 5), None);
        let until = |mut before: SwitchesBefore, arrivals, voluntary, is_in_call| {
            before.until_stop(counts(arrivals, voluntary), is_in_call)
        };
        // It ran since the look before, and was perhaps preempted.
        let before = SwitchesBefore::new(counts(11, 5), Some(earlier));
        assert_eq!(until(before, 11, 6, true), RanUntilStop::Yes);
        assert_eq!(until(before, 12, 6, true), RanUntilStop::Yes);
        assert_eq!(until(before, 12, 7, true), RanUntilStop::Waited);
        assert_eq!(until(before, 12, 7, false), RanUntilStop::Waited);
        // It has waited since then; and waited for a processor, or got to its own code.
        let before = SwitchesBefore::new(counts(11, 6), Some(earlier));
        assert_eq!(until(before, 11, 7, true), RanUntilStop::Yes);
        assert_eq!(until(before, 12, 7, true), RanUntilStop::Woken);
        assert_eq!(until(before, 12, 7, false), RanUntilStop::Yes);
        // It was preempted, which looks the same otherwise.
        let preempted = SwitchCounts {
            involuntary: 1,
            ..counts(12, 7)
        };
        let mut before = SwitchesBefore::new(counts(11, 6), Some(earlier));
        assert_eq!(before.until_stop(preempted, true), RanUntilStop::Yes);
        let preempted = SwitchCounts {
            involuntary: 1,
            ..counts(11, 6)
        };
        let mut before = SwitchesBefore::new(preempted, Some(earlier));
        let stopped = SwitchCounts {
            involuntary: 1,
            ..counts(12, 7)
        };
        assert_eq!(before.until_stop(stopped, true), RanUntilStop::Yes);
        // Nothing is known of it.
        assert_eq!(until(earlier, 12, 6, true), RanUntilStop::Yes);
        // The stop before was no wait.
        let mut stopped = earlier;
        stopped.until_stop(counts(11, 6), true);
        let before = SwitchesBefore::new(counts(12, 6), Some(stopped));
        assert_eq!(until(before, 13, 7, true), RanUntilStop::Yes);
    }

    #[test]
    fn samples_are_taken_one_by_one() {
        let mut waits: Waits<()> = Waits::of_process(PID, at(0));
        waits.add_existing(PID);
        let mut samples = PendingSamples::default();
        for due in [100, 200, 300] {
            samples.add(PID, (at(due), at(due + 50)), due, at(10));
        }
        let mut taken = |until: u64| {
            let mut keys = Vec::new();
            samples.take_until(at(until), &waits, |it| keys.push(it.key));
            keys
        };
        assert!(taken(120).is_empty());
        assert_eq!(taken(210), [100]);
        assert_eq!(taken(350), [200]);
        assert_eq!(taken(351), [300]);
    }
}
