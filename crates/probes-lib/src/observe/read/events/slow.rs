//! [`SlowPair`]: a pair, or a call, that lasted long, from the record that the trampoline at its stop, or at the exit,
//! has written.

use std::time::Duration;

use super::{Event, EventKind, EventReader, all_recorded};
use crate::observe::layout::shared::record;
use crate::observe::read::ring::word;
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::sys::ticks::Clock;

/// A pair, or a call of a function, that lasted as long as [`Observation::report_slow`](crate::Observation::report_slow) says, or longer.
///
/// ```no_run
/// use std::time::Duration;
/// use probes_lib::{Observation, Options, Target};
///
/// let slow = Duration::from_millis(10);
/// let observation = Observation::new().time("req_start", "req_end").report_slow(slow);
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for pair in observer.events()?.slow_pairs {
///     let started = pair.start.map(|start| start.arguments);
///     println!("{:?}: {started:?} to {:?}", pair.duration, pair.stop.arguments);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SlowPair {
    /// The index of the pair in the [`Observation`](crate::Observation); `None` for a call.
    pub pair: Option<usize>,
    /// How long it lasted.
    pub duration: Duration,
    /// The hit that started it, or the entry of the function. The arguments of an entry are only words: what they point
    /// to is not recorded. `None` if the start is not known any more: more than 16 starts of the thread waited, or
    /// another start took its place, as starts with different keys may.
    pub start: Option<Event>,
    /// The hit that stopped it, or the exit of the function: its return, with its result, or a jump to another function
    /// ([`EventKind::Jump`]).
    pub stop: Event,
}

impl EventReader {
    /// Returns the slow pair of a record; `None` if it is not one that a trampoline writes.
    pub(super) fn slow_pair(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
    ) -> Option<SlowPair> {
        // The record of the stop, then what was kept of the start (whose number is the index of the pair), then the stack.
        let whole = record;
        let (stop, start) = record.split_at_checked(self.layout.kept_len as usize)?;
        let (began, ended) = (word(start, record::TIME), word(stop, record::TIME));
        let mut stop = self.end(process, memory, clock, stop, EventKind::Return)?;
        stop.stack = self.stack(whole, &stop);
        let pair = match stop.kind {
            EventKind::Hit => {
                let pair = word(start, record::NUMBER) as u32;
                Some((pair < self.layout.pairs).then_some(pair as usize)?)
            }
            _ => None,
        };
        let start = match (word(start, record::TID) >> 32) as u32 {
            record::UNKNOWN_POINT => None,
            _ => Some(self.end(process, memory, clock, start, EventKind::Hit)?),
        };
        Some(SlowPair {
            pair,
            duration: clock.between(began, ended),
            start,
            stop,
        })
    }

    /// Returns the hit at an end of a slow pair or, of a call, its entry if `of_function` is [`EventKind::Hit`], and
    /// otherwise its exit, whose kind the record says.
    fn end(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
        of_function: EventKind,
    ) -> Option<Event> {
        let ids = word(record, record::TID);
        let (tid, point) = (ids as u32 as i32, (ids >> 32) as u32);
        let index = point & !(record::SLOW | record::RETURN);
        let watched = self.points.get(index as usize)?.as_ref()?;
        let (kind, shapes) = match of_function {
            _ if watched.is_pair_end => (EventKind::Hit, &watched.arguments[..]),
            EventKind::Hit => (EventKind::Hit, &watched.arguments[..]),
            _ if point & record::RETURN == 0 => (EventKind::Jump, &[][..]),
            _ => (EventKind::Return, watched.result.as_slice()),
        };
        let what = (watched.of, kind, all_recorded(record, shapes), tid);
        Some(self.hit(process, memory, clock, record, what))
    }
}
