//! [`StarvedThreads`]: notices a thread that receives signals faster than it can be resumed.
//!
//! ```text
//! the timer        expires ─────────▶ expires ─────────▶ expires ...      every 100 µs
//! the thread       stopped, handler │ stopped, handler │ stopped ...      executes nothing else
//! ```
//!
//! A traced thread stops before it receives a signal. If its timer expires again before the tracer has
//! resumed it and the handler has returned, it stops once more where it was: the handler runs again and
//! again, and the code that was interrupted never. On a slow or busy machine a timer of 100 µs is enough.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sys::ptrace::{self, Registers};

/// The registers are read at one of so many stops.
const STOPS_A_LOOK: u32 = 8;

/// Which of these looks have to find the same registers, and for how long, before a thread counts as
/// starved: about 500 stops in half a second. A thread that waits in a loop without changing a
/// register looks the same, if it receives as many signals.
const LOOKS: u32 = 64;
const LASTING: Duration = Duration::from_millis(500);

/// The threads that were stopped for signals, and where they were.
#[derive(Debug, Default)]
pub(crate) struct StarvedThreads {
    threads: HashMap<i32, SignalStops>,
}

/// The stops of one thread for signals.
#[derive(Debug, Default)]
struct SignalStops {
    stops: u32,
    place: Option<Place>,
}

/// Where a thread was found, again and again.
#[derive(Debug)]
struct Place {
    registers: Registers,
    since: Instant,
    looks: u32,
}

impl StarvedThreads {
    /// Notes that a thread is stopped for a signal; returns whether it has executed nothing but handlers
    /// for some time.
    pub(crate) fn is_starved(&mut self, tid: i32) -> bool {
        let stops = self.threads.entry(tid).or_default();
        stops.stops = stops.stops.wrapping_add(1);
        stops.stops % STOPS_A_LOOK == 0
            && ptrace::registers(tid).is_ok_and(|found| stops.look(found, Instant::now()))
    }

    /// Forgets a thread: it has exited, or has done something.
    pub(crate) fn forget(&mut self, tid: i32) {
        self.threads.remove(&tid);
    }
}

impl SignalStops {
    /// Returns whether the thread has been where `registers` say for too long.
    fn look(&mut self, registers: Registers, now: Instant) -> bool {
        match &mut self.place {
            // A system call that is interrupted goes on, or reports it.
            _ if registers.is_in_system_call() => self.place = None,
            Some(place) if place.registers == registers => {
                place.looks += 1;
                return place.looks >= LOOKS && now.duration_since(place.since) >= LASTING;
            }
            // Another signal has interrupted the handler, which is above on the stack.
            Some(place) if registers.stack_pointer() < place.registers.stack_pointer() => {}
            _ => {
                self.place = Some(Place {
                    registers,
                    since: now,
                    looks: 1,
                });
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a thread is starved that is found at these places, one every 10 ms.
    fn is_starved(places: impl IntoIterator<Item = Registers>) -> bool {
        let (mut stops, mut now) = (SignalStops::default(), Instant::now());
        places.into_iter().any(|registers| {
            now += Duration::from_millis(10);
            stops.look(registers, now)
        })
    }

    fn running(counter: u64, stack: u64) -> Registers {
        Registers::of_user_code(counter, stack)
    }

    #[test]
    fn thread_at_one_place_is_starved() {
        assert!(is_starved((0..100).map(|_| running(1, 1000))));
        assert!(!is_starved((0..50).map(|_| running(1, 1000))));
    }

    #[test]
    fn interrupted_handlers_do_not_count_as_progress() {
        let handler = |n| if n % 3 == 0 { 900 } else { 1000 };
        assert!(is_starved(
            (0..200).map(|n| running(handler(n), handler(n)))
        ));
    }

    #[test]
    fn thread_that_moves_is_not_starved() {
        assert!(!is_starved((0..1000).map(|n| running(n % 40, 1000))));
        // It returns from a function from time to time.
        let stack = |n| if n % 40 == 0 { 1100 } else { 1000 };
        assert!(!is_starved((0..1000).map(|n| running(1, stack(n)))));
    }

    #[test]
    fn thread_in_system_call_is_not_starved() {
        assert!(!is_starved(
            (0..1000).map(|_| Registers::of_system_call(1, 1000))
        ));
    }
}
