//! [`Profile`]: what a profiler has found.

use std::sync::Arc;
use std::time::Duration;

use crate::stacks::{StackFrame, ThreadRole};
use crate::unwind::StackEnd;

use super::activity::Activity;
use super::time_sums::WaitTimes;

/// The times of a process or thread, as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// How long it was on a processor.
    pub running: Duration,
    /// How long it waited for one.
    pub runnable: Duration,
    /// How long it was off the processor for other reasons.
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
#[derive(Debug)]
pub struct Profile {
    /// Each stack of each thread that was seen, most time first.
    pub stacks: Vec<ProfiledStack>,
    /// How long the process was watched.
    pub seconds: Duration,
    /// How often it was looked at.
    pub samples: u64,
    /// How many threads there were.
    pub threads: usize,
    /// The times of all threads, as the kernel counts them; `None` if it does not.
    pub times: Option<ThreadTimes>,
    /// How often, and how long in all, the process was stopped.
    pub stops: u64,
    /// See `stops`.
    pub stopped: Duration,
    /// Why it could not be stopped once, though it had not exited.
    pub not_stopped: Option<String>,
    /// How the waits were found.
    pub waits: WaitMethod,
    /// How it was found where threads run.
    pub running: RunningMethod,
    /// By how much [`Activity::Unseen`](crate::Activity::Unseen) may be too long, at most, because the process was stopped: the time of
    /// such waits that began during a stop, and may be of it.
    pub unseen_excess: Duration,
}

/// How it is found where threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunningMethod {
    /// By stopping them.
    Stopped,
    /// By samples that the kernel takes. Nothing was stopped.
    ByKernel {
        /// Whether it takes them of threads that are in the kernel, too; if not, that time is missing.
        in_kernel: bool,
    },
    /// Not at all: nothing was to be stopped, and there were no samples, as the kernel does not permit them or none were asked for.
    NotRead,
}

/// How waits are found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitMethod {
    /// Each by the kernel's records of switches.
    Recorded {
        /// How many records the kernel has lost because it was not kept up with: waits are missing then, or too short, as
        /// only what was seen to be one wait is counted.
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
    /// Whether some thread of the process was working for the garbage collector; see [`Profiler::distinguish_collections`](crate::Profiler::distinguish_collections).
    pub in_collection: bool,
    /// The innermost first; none if they could not be read.
    pub frames: Vec<Arc<StackFrame>>,
    /// Why there are no more.
    pub end: Option<StackEnd>,
    /// Whether a frame was found by searching the stack.
    pub is_guessed: bool,
    /// The time of the waits, if they were recorded; else that between samples that it stands for.
    pub time: Duration,
    /// In how many samples it was seen; none if it is of waits that were recorded.
    pub samples: u64,
    /// The variance of the time, in seconds squared, that is due to sampling: zero if it is exact. 95 % of all times are within two standard
    /// deviations, the square roots of sums of it.
    pub variance: f64,
    /// How long each wait was, if they were recorded.
    pub waits: Option<WaitTimes>,
}

impl ProfiledStack {
    /// Returns whether its frames reach to the code that the thread began with, and none was guessed.
    pub fn is_complete(&self) -> bool {
        self.end == Some(StackEnd::Outermost) && !self.is_guessed
    }
}
