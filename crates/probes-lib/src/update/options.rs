//! [`Options`]: what an update or an observation may do.

use std::time::{Duration, Instant};

/// What an update or an observation may do to a process.
///
/// ```
/// use std::time::Duration;
/// use probes_lib::Options;
///
/// let options = Options {
///     time_limit: Duration::from_secs(2),
///     ..Options::default()
/// };
/// assert!(!options.live);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long stopping every thread may take before all are resumed, and how long to wait for another
    /// process that updates the same target; 500 ms by default. If a thread did not stop because it was given no
    /// processor, stopping is tried again after a pause of the same length, three times in all. For a
    /// program that is launched, and has not begun, stopping may take 10 s. Threads of the caller that use the same
    /// [`Target`](crate::Target) wait for each other without a limit.
    pub time_limit: Duration,
    /// Whether to update the process while it runs, without stopping any of its threads; off by
    /// default. An enabled site differs from a disabled one in one byte of an instruction, so that a
    /// thread executes either one or the other. The current process is always updated while it runs.
    /// Observations ignore this: they change more bytes, so they stop every thread.
    pub live: bool,
    /// Whether to write to text on 1 GiB huge pages, where the first write to a page copies a gigabyte;
    /// off by default.
    pub gigatext: bool,
    /// Whether to observe a process whose seccomp filters cannot be read
    /// ([`ObserveError::SeccompUnreadable`](crate::ObserveError::SeccompUnreadable)); off by default. If they
    /// forbid an injected call (`mmap`, `munmap`, `madvise` or `prctl`), the kernel may kill the process. Filters
    /// that can be read and do not allow these calls are respected all the same.
    pub despite_seccomp: bool,
    /// Whether [`Target::observe`](crate::Target::observe) and [`Target::clean`](crate::Target::clean)
    /// also remove the observation of a process that still observes; off by default. That one fails
    /// with [`ObserveError::Replaced`](crate::ObserveError::Replaced). Updates ignore this.
    pub take_over: bool,
}

impl Options {
    /// Returns the moment at which the time limit is over, counted from now; in a hundred years if the limit is longer.
    pub(crate) fn deadline(&self) -> Instant {
        const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        Instant::now() + self.time_limit.min(NEVER)
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            time_limit: Duration::from_millis(500),
            live: false,
            gigatext: false,
            despite_seccomp: false,
            take_over: false,
        }
    }
}
