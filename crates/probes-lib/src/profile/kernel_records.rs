//! What the kernel records of a process while it is profiled: switches and samples, which become waits and running time.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::activity::Activity;
use super::samples::PendingSamples;
use super::switches::SwitchRecorder;
use super::threads::{WaitCounts, name_in};
use super::time_sums::{ProfileKey, TimeSums};
use super::waits::{Cause, ThreadWait, Waits};

/// What the kernel records.
pub(super) struct KernelRecords {
    pub(super) switches: SwitchRecorder,
    pub(super) waits: Waits<ProfileKey>,
    pub(super) samples: PendingSamples<ProfileKey>,
    /// What the kernel's samples add up to, if threads are stopped, too.
    pub(super) beside_stops: Option<TimeSums>,
    /// Before this time, samples beside stops are not read at once: that would take too much of a processor.
    pub(super) read_at_once_after: Duration,
    /// When the process was stopped, until the records of that time are there.
    pub(super) stops: Vec<Range<Duration>>,
    /// See [`Profile::unseen_excess`].
    pub(super) unseen_excess: Duration,
    /// From the first look at each exited thread to the last, until its exit is recorded.
    pub(super) looks_at_exited: HashMap<i32, Range<Duration>>,
    /// How long the profiler's thread had run when waits were last looked at; and how long that look took.
    pub(super) ran_until: Duration,
    pub(super) ran: Duration,
    /// How much longer or shorter the pause is, by chance: the process may do something in step with looks at it.
    pub(super) stretch: f64,
    /// Threads are not looked at again before this time; records may have to be read more often.
    pub(super) next_look_at: Duration,
    /// The threads that were switched since the last look at waits.
    pub(super) switched: HashSet<i32>,
    /// Waits, if they are not added up but kept, each by itself.
    pub(super) kept: Option<Vec<ThreadWait<ProfileKey>>>,
}

impl KernelRecords {
    /// Begins with what records switches, with no waits but those in `waits`; `beside_stops`: see the field.
    pub(super) fn new(
        switches: SwitchRecorder,
        waits: Waits<ProfileKey>,
        beside_stops: Option<TimeSums>,
    ) -> KernelRecords {
        KernelRecords {
            switches,
            waits,
            samples: PendingSamples::default(),
            beside_stops,
            read_at_once_after: Duration::ZERO,
            stops: Vec::new(),
            unseen_excess: Duration::ZERO,
            looks_at_exited: HashMap::new(),
            ran_until: processor_time(),
            ran: Duration::ZERO,
            stretch: 1.0,
            next_look_at: Duration::ZERO,
            switched: HashSet::new(),
            kept: None,
        }
    }

    /// Adds a wait, unless it is only that the process was stopped.
    pub(super) fn add_wait(
        &mut self,
        wait: ThreadWait<ProfileKey>,
        sums: &mut TimeSums,
        counts: &mut WaitCounts<'_>,
    ) {
        if wait.cause == Cause::Stop || wait.time().is_zero() {
            return;
        }
        if let Some(kept) = &mut self.kept {
            return kept.push(wait);
        }
        if wait.cause == Cause::PerhapsStop && wait.seen.is_none() {
            self.unseen_excess = self.unseen_excess.saturating_add(wait.time());
        }
        counts.add(&wait, self.looks_at_exited.get(&wait.tid));
        sums.add_wait(wait, |tid| name_in(counts.threads, tid));
    }

    /// Adds the samples up to `until` of the threads that were on a processor. Waiting for one after a wait is a part of the wait.
    pub(super) fn add_samples(&mut self, until: Duration, sums: &mut TimeSums) {
        self.samples.take_until(until, &self.waits, |sample| {
            let stack = sample.key.stack.filter(|_| !sample.is_stale);
            let key = ProfileKey {
                activity: Activity::Running,
                stack,
                ..sample.key
            };
            sums.add_sample(key, (sample.time, sample.time), false);
        });
    }
}

/// Returns how long this thread has run.
pub(super) fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
