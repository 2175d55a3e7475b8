//! The clocks of the kernel.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

fn time(clock: ClockId) -> Duration {
    clock_gettime(clock).map_or(Duration::ZERO, Duration::from)
}

/// What a clock shows now, in nanoseconds.
pub(crate) fn clock_now(clock: ClockId) -> u64 {
    in_nanoseconds(time(clock))
}

/// What CLOCK_MONOTONIC shows now, in nanoseconds.
pub(crate) fn monotonic_now() -> u64 {
    clock_now(ClockId::CLOCK_MONOTONIC)
}

/// How long the calling thread has run on processors.
pub(crate) fn thread_time() -> Duration {
    time(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// A time in nanoseconds; `u64::MAX` if it is longer.
pub(crate) fn in_nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
