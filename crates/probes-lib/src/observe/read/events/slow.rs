//! [`SlowPair`]: a pair that lasted long, from the record that the trampoline of its stop has written.

use std::time::Duration;

use super::{Event, EventKind, EventReader, all_recorded};
use crate::observe::layout::shared::record;
use crate::observe::read::ring::word;
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::sys::ticks::Clock;

/// A pair that lasted as long as [`Observation::report_slow`](crate::Observation::report_slow) says, or longer.
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
    /// The index of the pair in the [`Observation`](crate::Observation).
    pub pair: usize,
    /// How long it lasted.
    pub duration: Duration,
    /// The hit that started it; `None` if it is not known any more: more than 16 starts of the thread waited, or, by key, another
    /// start took its place.
    pub start: Option<Event>,
    /// The hit that stopped it.
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
        let (stop, start) = record.split_at_checked(self.layout.kept_len as usize)?;
        let (began, ended) = (word(start, record::TIME), word(stop, record::TIME));
        let pair = word(start, record::NUMBER) as u32;
        if pair >= self.layout.pairs {
            return None;
        }
        let stop = self.end(process, memory, clock, stop)?;
        let start = match (word(start, record::TID) >> 32) as u32 {
            record::UNKNOWN_POINT => None,
            _ => Some(self.end(process, memory, clock, start)?),
        };
        Some(SlowPair {
            pair: pair as usize,
            duration: clock.between(began, ended),
            start,
            stop,
        })
    }

    /// Returns the hit at an end of a slow pair.
    fn end(
        &mut self,
        process: &Process,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        record: &[u8],
    ) -> Option<Event> {
        let ids = word(record, record::TID);
        let (tid, point) = (ids as u32 as i32, (ids >> 32) as u32);
        let watched = self.points.get(&((point & !record::SLOW) as usize))?;
        let recorded = all_recorded(record, &watched.arguments);
        let what = (watched.of, EventKind::Hit, recorded, tid);
        Some(self.hit(process, memory, clock, record, what))
    }
}
