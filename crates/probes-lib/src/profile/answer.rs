//! [`Profile`]: what a profiler has found.

use std::sync::Arc;
use std::time::Duration;

use crate::stacks::{StackFrame, ThreadRole};
use crate::unwind::StackEnd;

use super::activity::Activity;
use super::time_sums::WaitTimes;

/// The times of a process or thread, as the kernel counts them.
///
/// [`Profile`] has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// How long it was on a processor. That of a process is of all its threads, however short they were.
    pub running: Duration,
    /// How long it waited for a processor, as far as it was looked at.
    pub runnable: Duration,
    /// How long it was off the processor for other reasons. The time before the first look at a thread and after the
    /// last is the sum of its waits, if they were recorded; if not, it is estimated ([`Profile::off_variance`]).
    pub off: Duration,
}

impl ThreadTimes {
    pub(super) fn add(&mut self, other: ThreadTimes) {
        self.running = self.running.saturating_add(other.running);
        self.runnable = self.runnable.saturating_add(other.runnable);
        self.off = self.off.saturating_add(other.off);
    }
}

/// Where the time has gone.
///
/// ```no_run
/// use probes_lib::{RunningMethod, WaitMethod};
///
/// # let mut profiler: probes_lib::Profiler = unimplemented!();
/// let profile = profiler.profile();
/// if let Some(times) = profile.times {
///     println!("{:?} running, {:?} of it not sampled", times.running, profile.not_sampled);
/// }
/// if let WaitMethod::Sampled { because: Some(why) } = &profile.waits {
///     println!("waits were not recorded: {why}");
/// }
/// if profile.running == RunningMethod::NotRead {
///     println!("it is not known where running threads were");
/// }
/// ```
#[derive(Debug)]
pub struct Profile {
    /// Each stack of each thread that was seen, most time first.
    pub stacks: Vec<ProfiledStack>,
    /// How long the process was watched.
    pub seconds: Duration,
    /// How often all its threads were looked at; samples that the kernel takes are not counted.
    pub samples: u64,
    /// How many threads there were; if waits were not recorded, how many were seen.
    pub threads: usize,
    /// The times of all threads, as the kernel counts them; `None` if it does not.
    pub times: Option<ThreadTimes>,
    /// The variance of [`ThreadTimes::off`], in seconds squared; zero if it is exact: if waits were recorded, or if no thread began
    /// meanwhile.
    pub off_variance: f64,
    /// The running time of which there is no sample. The times of [`Activity::Running`] in `stacks` and this time add
    /// up to how long the process ran.
    pub not_sampled: Duration,
    /// How often the process was stopped for a sample.
    pub stops: u64,
    /// The stop time of all these stops.
    pub stopped: Duration,
    /// Why it could not be stopped for a sample, the last time that this failed though it had not exited.
    pub not_stopped: Option<String>,
    /// How the waits were found.
    pub waits: WaitMethod,
    /// How the stacks of running threads were read.
    pub running: RunningMethod,
    /// By how much the time of [`Activity::Unseen`](crate::Activity::Unseen) may be too long, at most, because the
    /// process was stopped: the sum of the unseen waits that may be nothing but a stop.
    pub unseen_excess: Duration,
}

/// How the stacks of running threads are read.
///
/// [`Profile`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunningMethod {
    /// By stopping them.
    Stopped,
    /// By samples that the kernel takes. Nothing was stopped, except in a process of OCaml 5 if the profiler is not
    /// live: its threads were stopped as well ([`Profile::stops`]), but too late, so the kernel's samples are the
    /// answer.
    ByKernel {
        /// Whether it also takes samples while a thread is in the kernel; if not, that time is missing.
        in_kernel: bool,
    },
    /// Not at all: nothing was to be stopped, and the kernel took no samples, because it does not permit that or was
    /// not asked to.
    NotRead,
}

/// How waits are found.
///
/// [`Profile`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitMethod {
    /// Each wait, by the kernel's records of context switches.
    Recorded {
        /// How many records were lost because they were not read in time. Waits are missing then, or too short: only
        /// the part that is known to be one wait is counted.
        lost: u64,
        /// How many processors have come online meanwhile: what happens there is not recorded.
        unrecorded_processors: usize,
    },
    /// By samples.
    Sampled {
        /// Why they were not recorded; `None` if that was not asked for.
        because: Option<String>,
    },
}

/// How long a thread had one stack.
///
/// [`Profiler`](crate::Profiler) has an example.
#[derive(Clone, Debug)]
pub struct ProfiledStack {
    /// The thread.
    pub tid: i32,
    /// Its name, as the kernel has it.
    pub thread_name: String,
    /// What it is for the runtime of OCaml.
    pub role: ThreadRole,
    /// See [`ThreadStack::domain`](crate::ThreadStack::domain).
    pub domain: Option<u32>,
    /// What it was doing.
    pub activity: Activity,
    /// Whether some thread of the process was working for the garbage collector; see
    /// [`Profiler::distinguish_collections`](crate::Profiler::distinguish_collections). `None` if that was not asked for, or is not
    /// known: a thread that ran could not be read.
    pub in_collection: Option<bool>,
    /// The innermost first; none if they could not be read.
    pub frames: Vec<Arc<StackFrame>>,
    /// Why there are no more.
    pub end: Option<StackEnd>,
    /// Whether a frame was found by searching the stack.
    pub is_guessed: bool,
    /// How long in all: the waits, if they were recorded; else, for each sample, the time since the one before.
    pub time: Duration,
    /// In how many samples it was seen; zero if its waits were recorded.
    pub samples: u64,
    /// The variance of the time that is due to sampling, in seconds squared; zero if the time is exact. Variances of
    /// several stacks add up like their times, and the square root of the sum is the standard deviation: 95 % of all
    /// times are within two of them.
    pub variance: f64,
    /// The variance that is due to dividing the time into collections and the rest ([`ProfiledStack::in_collection`]).
    /// This is known only at the moments of samples, for all threads at once: so the standard deviations of several
    /// threads add up.
    pub split_variance: f64,
    /// How long each wait was, if they were recorded.
    pub waits: Option<WaitTimes>,
}

impl ProfiledStack {
    /// Subtracts a time from each of its waits, if they were recorded.
    pub(super) fn shorten_waits(&mut self, time: Duration) {
        if let Some(waits) = &mut self.waits {
            let subtracted;
            (*waits, subtracted) = waits.shortened_by(time);
            self.time = self.time.saturating_sub(subtracted);
        }
    }

    /// Returns whether its frames reach to the code that the thread began with, and none was guessed.
    pub fn is_complete(&self) -> bool {
        self.end == Some(StackEnd::Outermost) && !self.is_guessed
    }
}
