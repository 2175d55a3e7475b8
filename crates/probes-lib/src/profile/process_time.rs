//! [`ProcessTime`]: how long a process has run, by its own clock, and how much of that its samples stand for.
//!
//! ```text
//! ├──────────── running, by the clock of the process ────────────┤
//! ├── samples ──┤├── samples ──┤                ├─ not sampled ──┤
//! ```
//!
//! The clock counts all threads, also those that have exited, however short they were; and no child processes. So the times of
//! samples and what is not sampled add up to it: a sample never stands for time that the process has not run.

use std::time::Duration;

use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

use crate::process::Process;

/// The clock of a process: how long all its threads have run.
#[derive(Debug)]
pub(super) struct ProcessClock(ClockId);

impl ProcessClock {
    /// `None` if the kernel has none.
    pub(super) fn of_process(process: &Process) -> Option<ProcessClock> {
        let clock = clock_getcpuclockid(Pid::from_raw(process.pid())).ok()?;
        Some(ProcessClock(clock))
    }

    /// Returns how long the process has run; `None` if it was reaped.
    pub(super) fn read(&self, process: &Process) -> Option<Duration> {
        let time = clock_gettime(self.0).ok()?;
        // The clock is found by the pid, which another process may have by now.
        process.identity_of("stat").ok()?;
        Some(time.into())
    }
}

/// How long a process has run since a moment, and for how much of that samples stand.
#[derive(Debug, Default)]
pub(super) struct ProcessTime {
    /// What its clock showed at that moment.
    first: Duration,
    /// How long it had run when its clock was last read.
    read: Duration,
    /// How long it has run since then, as far as is known.
    after: Duration,
    sampled: Duration,
}

impl ProcessTime {
    pub(super) fn begin(first: Duration) -> ProcessTime {
        ProcessTime {
            first,
            ..ProcessTime::default()
        }
    }

    /// Sets what the clock shows now.
    pub(super) fn set(&mut self, now: Duration) {
        self.read = self.read.max(now.saturating_sub(self.first));
        self.after = Duration::ZERO;
    }

    /// Sets how long it has run since the clock was last read.
    pub(super) fn set_after(&mut self, after: Duration) {
        self.after = after;
    }

    pub(super) fn running(&self) -> Duration {
        self.read.saturating_add(self.after)
    }

    /// How much of the running time no sample stands for.
    pub(super) fn not_sampled(&self) -> Duration {
        self.running().saturating_sub(self.sampled)
    }

    /// Takes up to `time` of the running time that no sample stands for. Returns how much that is.
    pub(super) fn take(&mut self, time: Duration) -> Duration {
        let taken = time.min(self.not_sampled());
        self.sampled = self.sampled.saturating_add(taken);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn samples_and_the_rest_add_up() {
        fastrand::seed(11);
        let mut time = ProcessTime::begin(ms(5000));
        let (mut now, mut sampled) = (ms(5000), Duration::ZERO);
        for _ in 0..1000 {
            now += ms(fastrand::u64(..10));
            time.set(now);
            for _ in 0..fastrand::usize(..3) {
                sampled += time.take(ms(fastrand::u64(..12)));
            }
            assert_eq!(sampled + time.not_sampled(), time.running());
        }
        assert_eq!(time.running(), now - ms(5000));
    }

    #[test]
    fn samples_stand_for_no_more_than_ran() {
        let mut time = ProcessTime::begin(ms(1000));
        assert_eq!(time.take(ms(10)), ms(0), "it has not run");
        time.set(ms(1004));
        assert_eq!(time.take(ms(10)), ms(4));
        time.set(ms(1024));
        // Two that ran at once, and a third.
        assert_eq!(
            [10, 8, 9].map(|it| time.take(ms(it))),
            [ms(10), ms(8), ms(2)]
        );
        assert_eq!(time.not_sampled(), ms(0));
    }

    #[test]
    fn time_since_the_clock_was_read_counts() {
        let mut time = ProcessTime::begin(ms(0));
        time.set(ms(7));
        time.set_after(ms(2));
        time.set_after(ms(3));
        assert_eq!(time.running(), ms(10));
        // The clock has it now; and it does not go back.
        time.set(ms(12));
        assert_eq!(time.running(), ms(12));
        time.set(ms(11));
        assert_eq!(time.running(), ms(12));
    }

    #[test]
    fn clock_of_a_process_counts_ended_threads() {
        let process = Process::own().unwrap();
        let clock = ProcessClock::of_process(&process).unwrap();
        let before = clock.read(&process).unwrap();
        std::thread::spawn(|| {
            let begun = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
            let ran = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
            while ran().unwrap() < begun.unwrap() + ms(20) {}
        })
        .join()
        .unwrap();
        let after = clock.read(&process).unwrap();
        assert!(after >= before + ms(20), "{before:?} {after:?}");
    }
}
