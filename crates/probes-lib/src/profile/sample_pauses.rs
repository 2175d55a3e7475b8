//! [`SamplePauses`]: how far apart samples are, so that neither the stops nor the profiler take too much time.
//!
//! ```text
//! sample costs ──▶ owed, many times as much ──▶ pauses of the samples that follow, a sixteenth of it each
//!                    ▲────────── less by the time that passes ─────────┘
//! ```
//!
//! A sample stands for the time since the one before it. So the time of the next sample must not depend on what was
//! just found. Samples that find a thread running cost more than those that find it waiting, as the process is stopped
//! only for the former. If each sample were followed by a pause for its own cost, fewer samples would be taken while
//! threads run, and most of the pause in which a thread begins to wait would count as a wait: of 20 ms in which it
//! runs, half could be missing.

use std::time::Duration;

/// For what part of the time the process is stopped at most: one of so many.
const STOPPED: u32 = 50;

/// For what part of the time the profiler looks at threads at most: without waits to look at, and with them.
const LOOKING: u32 = 20;
const LOOKING_BESIDES: u32 = 40;

/// Over how many samples the cost of one is spread.
const SPREAD: u32 = 16;

/// The pauses that samples need.
#[derive(Debug, Default)]
pub(super) struct SamplePauses {
    for_stops: Duration,
    for_looks: Duration,
}

impl SamplePauses {
    /// Adds a sample: how long after the one before it was taken, for how long the process was stopped, and how long looking at it
    /// took on a processor, of a profiler that looks at waits or not.
    pub(super) fn add(
        &mut self,
        after: Duration,
        (stop, look): (Duration, Duration),
        looks_at_waits: bool,
    ) {
        let looking = if looks_at_waits {
            LOOKING_BESIDES
        } else {
            LOOKING
        };
        let owed = |owed: Duration, cost: Duration, part: u32| {
            let paid = owed.saturating_sub(after);
            paid.saturating_add(cost.saturating_mul(part - 1))
        };
        self.for_stops = owed(self.for_stops, stop, STOPPED);
        self.for_looks = owed(self.for_looks, look, looking);
    }

    /// Returns how long to wait until the next sample at least.
    pub(super) fn next(&self) -> Duration {
        self.for_stops.max(self.for_looks) / SPREAD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// A thread runs for 20 ms and waits for 30 ms, in turns; it is stopped when it runs. Returns how much of the time it runs,
    /// by samples, and for how much it is stopped.
    fn sampled(stop: Duration) -> (f64, f64) {
        fastrand::seed(17);
        let mut pauses = SamplePauses::default();
        let (mut now, mut running, mut stopped) = (0.0, 0.0, 0.0);
        for _ in 0..20_000 {
            let period = 0.01 * (0.5 + fastrand::f64());
            let pause = pauses.next().as_secs_f64() * (1.0 + fastrand::f64());
            let after = period.max(pause);
            now += after;
            let mut cost = Duration::ZERO;
            if now % 0.05 < 0.02 {
                running += after;
                cost = stop.mul_f64(2.0 * fastrand::f64());
            }
            stopped += cost.as_secs_f64();
            pauses.add(Duration::from_secs_f64(after), (cost, ms(0)), false);
        }
        (running / now, stopped / now)
    }

    // promise: Profiles: When samples are due does not depend on what they find, also where stops take long: the time on the processor is right
    //    within 2 %, of the whole time (6 times of stops)
    #[test]
    fn samples_are_as_many_whatever_they_find() {
        for stop in [0, 150, 500, 1000, 5000, 50_000].map(Duration::from_micros) {
            let (running, stopped) = sampled(stop);
            assert!((running - 0.4).abs() < 0.02, "{stop:?}: {running}");
            assert!(stopped < 0.021, "{stop:?}: {stopped}");
        }
    }

    #[test]
    fn costs_are_spread_over_later_samples() {
        let mut pauses = SamplePauses::default();
        pauses.add(ms(10), (ms(16), ms(0)), false);
        assert_eq!(pauses.next(), ms(49));
        // Nothing is owed any more.
        pauses.add(ms(784), (ms(0), ms(0)), false);
        assert_eq!(pauses.next(), ms(0));
        // Cheap samples delay nothing.
        for _ in 0..1000 {
            pauses.add(
                ms(10),
                (Duration::from_micros(150), Duration::from_micros(200)),
                true,
            );
        }
        assert!(pauses.next() < ms(1), "{pauses:?}");
    }

    #[test]
    fn looks_take_a_part_of_a_processor() {
        for (looks_at_waits, part) in [(false, 0.05), (true, 0.025)] {
            let mut pauses = SamplePauses::default();
            let mut now = ms(0);
            for _ in 0..1000 {
                let after = pauses.next().max(ms(10));
                now += after;
                pauses.add(after, (ms(0), ms(20)), looks_at_waits);
            }
            let share = (ms(20) * 1000).as_secs_f64() / now.as_secs_f64();
            assert!((share / part - 1.0).abs() < 0.1, "{share} of {part}");
        }
    }
}
