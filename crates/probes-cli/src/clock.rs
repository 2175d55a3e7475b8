//! The clocks of the kernel.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// What a clock shows now, in nanoseconds.
pub(crate) fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    in_nanoseconds(now)
}

/// What CLOCK_MONOTONIC shows now, in nanoseconds.
pub(crate) fn monotonic_now() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC)
}

/// How much of a processor the calling thread has taken.
pub(crate) fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// A time in nanoseconds; the greatest number for a longer one.
pub(crate) fn in_nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
