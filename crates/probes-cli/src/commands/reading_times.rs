//! When observed processes are read.

use std::time::Duration;

use probes_lib::Observer;

use crate::clock::thread_time;

/// How often a process is read, however seldom readings are shown. If the process exits, the last reading is all there
/// is.
pub(super) const COUNTS_INTERVAL: Duration = Duration::from_millis(200);

/// When a process is read for the first time: one that exits soon has hits, too.
const FIRST_READING: Duration = Duration::from_millis(2);

/// When a process is read after the reading `at`: at first when twice as much time has passed, then five times a
/// second.
pub(super) fn next_reading(at: Duration) -> Duration {
    if at < COUNTS_INTERVAL {
        (2 * at).clamp(FIRST_READING, COUNTS_INTERVAL)
    } else {
        next_time(at, COUNTS_INTERVAL)
    }
}

/// How much processor time a reading has taken since it `began`; zero if the processes have to be read at every
/// interval, whatever that costs.
pub(super) fn reading_time<'o>(
    observers: impl IntoIterator<Item = &'o Observer>,
    began: Duration,
) -> Duration {
    if observers.into_iter().any(Observer::has_to_be_read) {
        return Duration::ZERO;
    }
    thread_time().saturating_sub(began)
}

/// When a process is read next, after the reading `at`, which `took` this much processor time, if readings are shown
/// at the `interval`. Readings in between are so rare that they cost less than a hundredth of a processor, but at
/// most 0.4 s apart.
pub(super) fn reading_after(at: Duration, interval: Duration, took: Duration) -> Duration {
    let due = if at.is_zero() || interval > COUNTS_INTERVAL {
        next_reading(at)
    } else {
        next_time(at, interval)
    };
    if at < COUNTS_INTERVAL {
        return due;
    }
    let pause = took.saturating_mul(120).min(2 * COUNTS_INTERVAL);
    due.max(at.saturating_add(pause))
}

/// The first multiple of `interval` after `at`.
pub(super) fn next_time(at: Duration, interval: Duration) -> Duration {
    let passed = at.as_nanos() % interval.as_nanos().max(1);
    let left = interval.as_nanos().saturating_sub(passed);
    at.saturating_add(Duration::from_nanos(
        u64::try_from(left).unwrap_or(u64::MAX),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_time_is_a_multiple_of_the_interval() {
        let ms = Duration::from_millis;
        assert_eq!(next_time(ms(1000), ms(1000)), ms(2000));
        assert_eq!(next_time(ms(1001), ms(1000)), ms(2000));
        assert_eq!(next_time(ms(5900), ms(1000)), ms(6000));
        assert_eq!(
            next_time(ms(7), Duration::from_nanos(1)),
            ms(7) + Duration::from_nanos(1)
        );
        assert_eq!(next_time(Duration::MAX, ms(1)), Duration::MAX);
    }

    #[test]
    fn process_is_read_soon_then_regularly() {
        let ms = Duration::from_millis;
        assert_eq!(next_reading(Duration::ZERO), FIRST_READING);
        assert_eq!(next_reading(ms(3)), ms(6));
        assert_eq!(next_reading(ms(150)), COUNTS_INTERVAL);
        assert_eq!(next_reading(ms(250)), 2 * COUNTS_INTERVAL);
        assert_eq!(next_reading(Duration::MAX), Duration::MAX);
        // Short intervals are no reason to read later for the first time.
        for interval in [ms(50), COUNTS_INTERVAL] {
            let after = |at| reading_after(at, interval, Duration::ZERO);
            assert_eq!(
                (after(Duration::ZERO), after(ms(3))),
                (FIRST_READING, interval)
            );
        }
        // After a reading that took long, the next one is later.
        for (at, took, expected) in [
            (ms(3), Duration::ZERO, ms(6)),
            // Unless it was one of the first.
            (ms(3), ms(1000), ms(6)),
            (ms(1000), ms(1), ms(1200)),
            (ms(1000), ms(3), ms(1360)),
            (ms(1000), ms(1000), ms(1400)),
            (Duration::MAX, Duration::MAX, Duration::MAX),
        ] {
            assert_eq!(reading_after(at, Duration::MAX, took), expected);
        }
    }
}
