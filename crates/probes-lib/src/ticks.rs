//! The time stamp counter (TSC) of the processors, which the trampolines read ([`crate::sys::tsc`]), and its conversion to
//! time.

use std::fs;
use std::io::{BufRead, BufReader};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nix::time::{ClockId, clock_gettime};

pub(crate) use crate::sys::tsc::now;

/// The shortest time over which the counter's rate is measured; one reading takes about 0.1 µs.
const MIN_MEASUREMENT: Duration = Duration::from_millis(20);

/// Returns whether the counter has the same rate in all states of the processors: their flags say so
/// (proc_cpuinfo(5)), or the kernel uses it as its clock source.
pub(crate) fn is_tsc_invariant() -> bool {
    // Only the flags of the first processor are read: with hundreds of processors, the file has megabytes.
    let file = fs::File::open("/proc/cpuinfo").ok();
    let lines = file.map(|it| BufReader::new(it).lines().map_while(Result::ok));
    let flags = lines.and_then(|mut lines| lines.find(|line| line.starts_with("flags")));
    let flags = flags.unwrap_or_default();
    let flags: Vec<&str> = flags.split_ascii_whitespace().collect();
    if ["constant_tsc", "nonstop_tsc"]
        .iter()
        .all(|flag| flags.contains(flag))
    {
        return true;
    }
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    fs::read_to_string(source).is_ok_and(|source| source.trim() == "tsc")
}

/// Returns the time on CLOCK_MONOTONIC, in nanoseconds.
pub(crate) fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    now.as_nanos() as u64
}

/// If the time in suspension has grown by more than this between two readings, the machine was suspended. A smaller
/// difference may be the time between the readings of the two clocks.
const MIN_SUSPENSION: Duration = Duration::from_millis(1);

/// The counter and the clock at one moment.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    ticks: u64,
    at: Instant,
    /// How long the machine has been suspended since boot. The clock stops meanwhile; the counter may go on, or
    /// restart.
    suspended: Duration,
}

/// How many readings are taken, because a preemption of this thread or a suspension of the machine may disturb one.
const TRIES: usize = 5;

/// Reads a clock, and the counter at the same moment. This thread may be preempted in between, so
/// of several readings the one that took the least time is returned.
fn read_with<T>(clock: impl Fn() -> T) -> (u64, T) {
    let read = || {
        let before = now();
        let time = clock();
        let elapsed = now().saturating_sub(before);
        (elapsed, before.saturating_add(elapsed / 2), time)
    };
    let mut best = read();
    for _ in 1..TRIES {
        let next = read();
        if next.0 < best.0 {
            best = next;
        }
    }
    (best.1, best.2)
}

impl ClockReading {
    /// Returns how many ticks there were since an earlier reading, and how long that is. `None` if the machine has
    /// been suspended meanwhile, or if the counter is not higher than before.
    fn since(self, begun: ClockReading) -> Option<(u64, Duration)> {
        let ticks = self.ticks.checked_sub(begun.ticks).filter(|it| *it > 0)?;
        let was_suspended = self.suspended > begun.suspended + MIN_SUSPENSION;
        (!was_suspended).then_some((ticks, self.at - begun.at))
    }

    fn take() -> ClockReading {
        let (ticks, at) = read_with(Instant::now);
        ClockReading {
            ticks,
            at,
            suspended: time_in_suspension(),
        }
    }
}

/// Returns how long the machine has been suspended since boot. This thread may be preempted between the two clocks, so the
/// least of several differences is returned.
fn time_in_suspension() -> Duration {
    let clock = |id| clock_gettime(id).map_or(Duration::ZERO, Duration::from);
    let differences = (0..TRIES).map(|_| {
        let running = clock(ClockId::CLOCK_MONOTONIC);
        clock(ClockId::CLOCK_BOOTTIME).saturating_sub(running)
    });
    differences.min().unwrap_or_default()
}

/// Returns how many ticks there were since a moment after the last suspension of the machine, and how long that is.
/// The first call, and the first one after each suspension, takes [`MIN_MEASUREMENT`]; if the machine is suspended
/// during that, it measures again, up to [`TRIES`] times.
fn elapsed_since_suspension() -> (u64, Duration) {
    static BEGUN: Mutex<Option<ClockReading>> = Mutex::new(None);
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    let elapsed = begun.and_then(|begun| ClockReading::take().since(begun));
    elapsed
        .filter(|(_, time)| *time >= MIN_MEASUREMENT)
        .or_else(|| {
            let mut measured = (0..TRIES).map(|_| {
                let first = *begun.insert(ClockReading::take());
                std::thread::sleep(MIN_MEASUREMENT);
                ClockReading::take().since(first)
            });
            // A measurement during which the machine is suspended is `None`.
            measured.find_map(|it| it)
        })
        .unwrap_or((1, Duration::from_nanos(1)))
}

/// Measures how long a tick is: the longer since it began, the more exact.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TickMeasurement {
    begun: ClockReading,
}

/// Converts ticks to the time of day and to CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// What the counter was at `time`.
    ticks: u64,
    time: SystemTime,
    /// In nanoseconds.
    monotonic: u64,
    nanoseconds_per_tick: f64,
    /// The same as a fixed-point number with [`FRACTION_BITS`]: multiplying by it takes a third of the time.
    fixed_nanoseconds_per_tick: u64,
}

/// How many bits that number has after the binary point. At 3 GHz, the error is less than 0.7 ns a second.
const FRACTION_BITS: u32 = 32;

impl TickMeasurement {
    pub(crate) fn begin() -> TickMeasurement {
        TickMeasurement {
            begun: ClockReading::take(),
        }
    }

    /// Returns how many nanoseconds a tick is. Waits if the measurement has only just begun, or if the machine has been
    /// suspended since it began.
    pub(crate) fn nanoseconds_per_tick(&self) -> f64 {
        let (ticks, time) = self.elapsed().unwrap_or_else(elapsed_since_suspension);
        time.as_nanos() as f64 / ticks as f64
    }

    /// Returns how many ticks there were since the measurement began, and how long that is. `None` if the machine has been
    /// suspended meanwhile: the clock has stopped, and the counter may have gone on.
    fn elapsed(&self) -> Option<(u64, Duration)> {
        std::thread::sleep(MIN_MEASUREMENT.saturating_sub(self.begun.at.elapsed()));
        ClockReading::take().since(self.begun)
    }

    /// Returns how many ticks a duration has. May wait, as [`TickMeasurement::nanoseconds_per_tick`] does.
    pub(crate) fn ticks_in(&self, time: Duration) -> u64 {
        (time.as_nanos() as f64 / self.nanoseconds_per_tick()) as u64
    }

    /// Returns a clock for recent ticks.
    pub(crate) fn clock(&self) -> Clock {
        let nanoseconds_per_tick = self.nanoseconds_per_tick();
        let (ticks, (time, monotonic)) = read_with(|| (SystemTime::now(), monotonic()));
        Clock {
            ticks,
            time,
            monotonic,
            nanoseconds_per_tick,
            fixed_nanoseconds_per_tick: (nanoseconds_per_tick * (1_u64 << FRACTION_BITS) as f64)
                as u64,
        }
    }
}

impl Clock {
    /// Returns when the counter had this value: the time of day, and the time on CLOCK_MONOTONIC in nanoseconds.
    #[inline]
    pub(crate) fn times(&self, ticks: u64) -> (SystemTime, u64) {
        let (time, monotonic) = match ticks.checked_sub(self.ticks) {
            Some(later) => {
                let later = self.nanoseconds(later);
                let time = self.time.checked_add(Duration::from_nanos(later));
                (time, self.monotonic.saturating_add(later))
            }
            None => {
                let earlier = self.nanoseconds(self.ticks - ticks);
                let time = self.time.checked_sub(Duration::from_nanos(earlier));
                (time, self.monotonic.saturating_sub(earlier))
            }
        };
        (time.unwrap_or(self.time), monotonic)
    }

    /// Returns the time between two values of the counter; zero if the second is before the first, as it may be if they
    /// are of two processors.
    pub(crate) fn between(&self, from: u64, to: u64) -> Duration {
        self.duration(to.saturating_sub(from))
    }

    fn duration(&self, ticks: u64) -> Duration {
        Duration::from_nanos((ticks as f64 * self.nanoseconds_per_tick) as u64)
    }

    #[inline]
    fn nanoseconds(&self, ticks: u64) -> u64 {
        let product = u128::from(ticks) * u128::from(self.fixed_nanoseconds_per_tick);
        u64::try_from(product >> FRACTION_BITS).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_suspension_does_not_count() {
        let begun = ClockReading::take();
        std::thread::sleep(MIN_MEASUREMENT);
        let end = ClockReading::take();
        assert!(end.since(begun).is_some() && begun.since(end).is_none());
        let suspended = end.suspended + Duration::from_secs(1);
        assert!(ClockReading { suspended, ..end }.since(begun).is_none());
        // The counter has restarted: it was higher when the measurement began.
        let expected = TickMeasurement { begun }.nanoseconds_per_tick();
        let ticks = now() + (60e9 / expected) as u64;
        let begun = ClockReading { ticks, ..begun };
        let found = TickMeasurement { begun }.nanoseconds_per_tick();
        assert!((found / expected - 1.0).abs() < 0.01, "{found} {expected}");
    }

    #[test]
    fn ticks_are_converted_to_time() {
        let ticks = TickMeasurement::begin();
        let (from, begun) = (now(), Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        let (to, elapsed) = (now(), begun.elapsed().as_nanos() as f64);
        let converted = (to - from) as f64 * ticks.nanoseconds_per_tick();
        assert!(
            (converted / elapsed - 1.0).abs() < 0.01,
            "{converted} {elapsed}"
        );
        let clock = ticks.clock();
        let (earlier, _) = clock.times(from);
        let ago = SystemTime::now().duration_since(earlier).unwrap();
        assert!(ago >= Duration::from_millis(50) && ago < Duration::from_secs(60));
        assert!(clock.times(now()) >= clock.times(to));
        let (before, ticks, after) = (monotonic(), now(), monotonic());
        let (_, converted) = clock.times(ticks);
        assert!(converted + 100_000 > before && converted < after + 100_000);
    }
}
