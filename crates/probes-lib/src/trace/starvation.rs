//! [`StarvedThreads`]: notices a thread that receives signals faster than it can be resumed.
//!
//! ```text
//! the timer        expires ─────────▶ expires ─────────▶ expires ...      every 100 µs
//! the thread       stopped, handler │ stopped, handler │ stopped ...      executes nothing else
//! ```
//!
//! A traced thread stops before it receives a signal. If its timer expires again before the tracer has
//! resumed it and the handler has returned, it stops once more where it was: the handler runs again and
//! again, and the code that was interrupted never. Or that code is `nanosleep`, which ends as soon as it has
//! begun, and is called again for the time that is left: all of it. A timer of 100 µs is enough.
//!
//! So what is measured is how long a thread runs between its resumption and its next signal.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sys::ptrace;

/// A run shorter than this counts as none: a handler and a system call take that long.
const SHORT: Duration = Duration::from_micros(200);

/// How long, and for how many signals at least, a thread is watched before it may count as starved.
const LASTING: Duration = Duration::from_millis(500);
const SIGNALS: u32 = 64;

/// A thread is starved if it executed its own code for less than one in `PARTS` parts of the time.
const PARTS: u32 = 4;

/// The threads that were stopped for signals.
#[derive(Debug, Default)]
pub(crate) struct StarvedThreads {
    threads: HashMap<i32, SignalStops>,
}

/// The latest stops of one thread for signals.
#[derive(Debug)]
struct SignalStops {
    since: Instant,
    signals: u32,
    /// How long it ran between them, without runs shorter than [`SHORT`].
    ran: Duration,
    /// When it was resumed; `None` if the same signal was pending then.
    resumed: Option<Instant>,
}

impl StarvedThreads {
    /// Notes that a thread is stopped for `signal`, and is resumed now. Returns whether it has executed
    /// hardly anything but handlers for some time.
    pub(crate) fn is_starved(&mut self, tid: i32, signal: i32) -> bool {
        let now = Instant::now();
        let stops = self.threads.entry(tid);
        let stops = stops.or_insert_with(|| SignalStops::new(now));
        let is_starved = stops.stop(now);
        stops.resume(now, ptrace::is_pending(tid, signal));
        is_starved
    }

    /// Forgets a thread, which has exited.
    pub(crate) fn forget(&mut self, tid: i32) {
        self.threads.remove(&tid);
    }
}

impl SignalStops {
    fn new(since: Instant) -> SignalStops {
        SignalStops {
            since,
            signals: 0,
            ran: Duration::ZERO,
            resumed: None,
        }
    }

    /// Notes that the thread has stopped. Once it was watched for long enough, returns whether it was starved in that
    /// time, and starts to watch it anew.
    fn stop(&mut self, now: Instant) -> bool {
        if let Some(resumed) = self.resumed {
            let ran = now.duration_since(resumed);
            if ran >= SHORT {
                self.ran += ran;
            }
        }
        self.signals += 1;
        let watched = now.duration_since(self.since);
        if watched < LASTING || self.signals < SIGNALS {
            return false;
        }
        let is_starved = self.ran < watched / PARTS;
        *self = SignalStops::new(now);
        is_starved
    }

    fn resume(&mut self, now: Instant, has_same_pending: bool) {
        self.resumed = (!has_same_pending).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a thread is starved that runs for these times between two stops of 100 µs, with the
    /// same signal pending at its resumption or not.
    fn is_starved(times: impl IntoIterator<Item = (u64, bool)>) -> bool {
        let mut now = Instant::now();
        let mut stops = SignalStops::new(now);
        times.into_iter().any(|(micros, has_same_pending)| {
            let is_starved = stops.stop(now);
            now += Duration::from_micros(100);
            stops.resume(now, has_same_pending);
            now += Duration::from_micros(micros);
            is_starved
        })
    }

    #[test]
    fn signals_in_quick_succession_starve_a_thread() {
        assert!(is_starved((0..6000).map(|_| (100, false))));
        // Not for half a second, or fewer signals.
        assert!(!is_starved((0..2000).map(|_| (100, false))));
        assert!(!is_starved((0..60).map(|_| (100_000, true))));
    }

    #[test]
    fn signals_that_wait_starve_a_thread() {
        // The tracer gets its processor late.
        assert!(is_starved((0..200).map(|_| (5000, true))));
        assert!(is_starved((0..400).map(|n| (5000, n % 8 != 0))));
    }

    #[test]
    fn thread_that_runs_between_signals_is_not_starved() {
        assert!(!is_starved((0..10_000).map(|_| (500, false))));
        // Three timers at once.
        let times = |n| if n % 3 == 0 { 9000 } else { 20 };
        assert!(!is_starved((0..3000).map(|n| (times(n), false))));
    }

    #[test]
    fn burst_of_signals_does_not_starve_a_thread() {
        let times = |n| if n == 1000 { 2_000_000 } else { 20 };
        assert!(!is_starved((0..2000).map(|n| (times(n), false))));
    }
}
