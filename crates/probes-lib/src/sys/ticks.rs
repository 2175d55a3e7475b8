//! The time stamp counter of the processors, which the trampolines read, and what its ticks are in time.

use std::fs;
use std::time::{Duration, Instant, SystemTime};

/// Measured over less, the rate of the counter would not be exact: a reading takes about 0.1 µs.
const LEAST: Duration = Duration::from_millis(20);

/// The counter now.
fn now() -> u64 {
    // SAFETY: every x86-64 processor has this instruction, and Linux lets every program use it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Whether the counter goes on at the same rate whatever the processors do: they say so themselves
/// (proc_cpuinfo(5)), or the kernel tells the time by it.
pub(crate) fn is_tsc_invariant() -> bool {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags"));
    let flags: Vec<&str> = flags.unwrap_or_default().split_ascii_whitespace().collect();
    if ["constant_tsc", "nonstop_tsc"]
        .iter()
        .all(|flag| flags.contains(flag))
    {
        return true;
    }
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    fs::read_to_string(source).is_ok_and(|source| source.trim() == "tsc")
}

/// Both clocks at a moment.
#[derive(Clone, Copy, Debug)]
struct Reading {
    ticks: u64,
    at: Instant,
}

/// The counter when a clock was read. We may be interrupted between the two: the best of some readings.
fn read_with<T>(clock: impl Fn() -> T) -> (u64, T) {
    const TRIES: usize = 5;
    let read = || {
        let before = now();
        let time = clock();
        let record_time = now().saturating_sub(before);
        (record_time, before.saturating_add(record_time / 2), time)
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

impl Reading {
    fn take() -> Reading {
        let (ticks, at) = read_with(Instant::now);
        Reading { ticks, at }
    }
}

/// Tells how long a tick is: the better, the longer ago it was begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticks {
    begun: Reading,
}

/// The counter beside the time of day.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    ticks: u64,
    time: SystemTime,
    nanoseconds: f64,
}

impl Ticks {
    pub(crate) fn begin() -> Ticks {
        Ticks {
            begun: Reading::take(),
        }
    }

    /// How many nanoseconds a tick is. Waits if it was begun just now.
    pub(crate) fn nanoseconds(&self) -> f64 {
        std::thread::sleep(LEAST.saturating_sub(self.begun.at.elapsed()));
        let end = Reading::take();
        let ticks = end.ticks.saturating_sub(self.begun.ticks).max(1);
        (end.at - self.begun.at).as_nanos() as f64 / ticks as f64
    }

    /// What the counter will be in a while.
    pub(crate) fn ahead(&self, later: Duration) -> u64 {
        now().saturating_add((later.as_nanos() as f64 / self.nanoseconds()) as u64)
    }

    /// What tells of ticks that were not long ago when they were.
    pub(crate) fn clock(&self) -> Clock {
        let nanoseconds = self.nanoseconds();
        let (ticks, time) = read_with(SystemTime::now);
        Clock {
            ticks,
            time,
            nanoseconds,
        }
    }
}

impl Clock {
    pub(crate) fn time(&self, ticks: u64) -> SystemTime {
        let between = |ticks: u64| Duration::from_nanos((ticks as f64 * self.nanoseconds) as u64);
        let time = match ticks.checked_sub(self.ticks) {
            Some(later) => self.time.checked_add(between(later)),
            None => self.time.checked_sub(between(self.ticks - ticks)),
        };
        time.unwrap_or(self.time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_converted_to_time() {
        let ticks = Ticks::begin();
        let (from, begun) = (now(), Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        let (to, record_time) = (now(), begun.elapsed().as_nanos() as f64);
        let told = (to - from) as f64 * ticks.nanoseconds();
        assert!(
            (told / record_time - 1.0).abs() < 0.01,
            "{told} {record_time}"
        );
        let clock = ticks.clock();
        let earlier = clock.time(from);
        let ago = SystemTime::now().duration_since(earlier).unwrap();
        assert!(ago >= Duration::from_millis(50) && ago < Duration::from_secs(60));
        assert!(clock.time(now()) >= clock.time(to));
    }
}
