//! The threads of a process between two samples, and the times that the kernel counts of each.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};

use super::answer::ThreadTimes;
use super::samples::SwitchesBefore;
use super::time_sums::ProfileKey;
use super::waits::ThreadWait;
use crate::stacks::{Slices, ThreadFiles};

/// How many descriptors the files of threads leave free. As far as there are more, three files of each thread stay open; those of the
/// other threads are opened for each sample, which takes four times as long.
const LEFT_BY_THREAD_FILES: u64 = 128;

/// A thread between two samples.
pub(super) struct ProfiledThread {
    pub(super) name: Arc<str>,
    /// `None` if there are too many threads.
    pub(super) files: Option<ThreadFiles>,
    /// When to look for its domain next, and how long after that; `None` if the domain is known, or never will be.
    pub(super) domain_attempt: Option<(Instant, Duration)>,
    /// What it does as long as its slices stay the same, and since when that is known.
    pub(super) blocked: Option<(Slices, ProfileKey, Duration)>,
    /// What the kernel had counted just before it was looked at last, and whether it had waited since the look before, if waits are
    /// not recorded.
    pub(super) switches: Option<SwitchesBefore>,
    /// Whether it was not there from the beginning.
    pub(super) is_new: bool,
    /// When it was first looked at, and when last, and how long it had run and waited for a processor. Where waits are sampled, when
    /// these samples were due.
    pub(super) first: Option<ThreadCounts>,
    pub(super) last: Option<ThreadCounts>,
    /// How long it has waited since the last look.
    pub(super) waited_after_last: Duration,
}

impl ProfiledThread {
    /// From the first look at it to the last.
    pub(super) fn looks(&self) -> Option<Range<Duration>> {
        Some(self.first?.at..self.last?.at)
    }

    /// Returns what it does, and since when, if it has not run since it was seen blocked.
    pub(super) fn still_blocked(&self, slices: &Slices) -> Option<(&ProfileKey, Duration)> {
        let (before, key, since) = self.blocked.as_ref()?;
        (before == slices).then_some((key, *since))
    }

    pub(super) fn times(&self) -> ThreadTimes {
        let (Some(first), Some(last)) = (self.first, self.last) else {
            return ThreadTimes {
                off: self.waited_after_last,
                ..ThreadTimes::default()
            };
        };
        let running = last.running.saturating_sub(first.running);
        let runnable = last.runnable.saturating_sub(first.runnable);
        let looked = last.at.saturating_sub(first.at);
        let off = looked.saturating_sub(running.saturating_add(runnable));
        let off = off.saturating_add(self.waited_after_last);
        // What the kernel has counted of a new thread was all since the beginning.
        let (running, runnable) = if self.is_new {
            (last.running, last.runnable)
        } else {
            (running, runnable)
        };
        ThreadTimes {
            running,
            runnable,
            off,
        }
    }
}

/// What the kernel counts of a thread, at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThreadCounts {
    pub(super) at: Duration,
    pub(super) running: Duration,
    pub(super) runnable: Duration,
}

impl ThreadCounts {
    /// `None` if the kernel counts no times.
    pub(super) fn of(slices: &Slices, at: Duration) -> Option<ThreadCounts> {
        let (running, runnable) = slices.times()?;
        Some(ThreadCounts {
            at,
            running,
            runnable,
        })
    }
}

/// The times of threads, to which waits are added that the kernel's counts lack: those before the first look at a thread, and after
/// the last.
pub(super) struct WaitCounts<'p> {
    pub(super) threads: &'p mut HashMap<i32, ProfiledThread>,
    pub(super) exited: &'p mut ThreadTimes,
}

impl WaitCounts<'_> {
    /// `looks_at_exited` are those at the thread if it has exited.
    pub(super) fn add(
        &mut self,
        wait: &ThreadWait<ProfileKey>,
        looks_at_exited: Option<&Range<Duration>>,
    ) {
        let thread = self.threads.get_mut(&wait.tid);
        let looks = thread.as_ref().and_then(|thread| thread.looks());
        let Some(looks) = looks.or_else(|| looks_at_exited.cloned()) else {
            self.exited.off = self.exited.off.saturating_add(wait.time());
            return;
        };
        let (before, after) = wait.outside(looks);
        self.exited.off = self.exited.off.saturating_add(before);
        // Until it is looked at again.
        let since = match thread {
            Some(thread) => &mut thread.waited_after_last,
            None => &mut self.exited.off,
        };
        *since = since.saturating_add(after);
    }
}

/// Returns the name of a thread; an empty one if it was not looked at so far.
pub(super) fn name_in(threads: &HashMap<i32, ProfiledThread>, tid: i32) -> Arc<str> {
    let thread = threads.get(&tid);
    thread.map_or_else(|| "".into(), |thread| thread.name.clone())
}

/// Returns how many threads may have their files open, beside so many others.
pub(super) fn max_open(others: usize) -> usize {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
    let left = limit.saturating_sub(LEFT_BY_THREAD_FILES.saturating_add(others as u64));
    usize::try_from(left / 3).unwrap_or(usize::MAX)
}
