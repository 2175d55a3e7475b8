//! [`SlowPair`]: a pair, or a call, that lasted long, from the record that the trampoline at its stop, or at the exit,
//! has written.

use std::time::Duration;

use super::decoder::{EventDecoder, RecordedProcess};
use super::{Event, EventKind};
use crate::observe::layout::shared::record;
use crate::observe::read::ring::word;

/// A pair, or a call of a function, that lasted at least as long as
/// [`Observation::report_slow`](crate::Observation::report_slow) says.
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

impl EventDecoder {
    /// Returns the slow pair of a record; `None` if it is not one that a trampoline writes.
    pub(super) fn slow_pair(&mut self, of: RecordedProcess<'_>, record: &[u8]) -> Option<SlowPair> {
        // The record of the stop, then what was kept of the start (whose number is the index of the pair), then the
        // stack.
        let whole = record;
        let (stop, start) = record.split_at_checked(self.layout.kept_len as usize)?;
        let (began, ended) = (word(start, record::TIME), word(stop, record::TIME));
        let mut stop = self.end(of, stop, EventKind::Return)?;
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
            _ => Some(self.end(of, start, EventKind::Hit)?),
        };
        Some(SlowPair {
            pair,
            duration: of.clock.between(began, ended),
            start,
            stop,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::install::thread_ids::ThreadIds;
    use crate::observe::observation::Observation;
    use crate::observe::read::events::decoder::tests::{function, plan_of_functions};
    use crate::observe::read::value::Value;
    use crate::process::Process;
    use crate::ticks::TickMeasurement;

    #[test]
    fn slow_timed_calls_are_slow_pairs() {
        let timing = Observation::new().time_functions(function("outer"));
        let plan = plan_of_functions(&timing.report_slow(Duration::from_millis(1)));
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let mut decoder = EventDecoder::of(&plan, ThreadIds::OfOurNamespace);
        let kept = plan.shared.kept_len as usize;
        let mut bytes = vec![0; plan.shared.record_len as usize];
        let mut put = |at: u64, word: u64| {
            bytes[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        };
        put(record::TIME, 1 << 40);
        put(
            record::TID,
            u64::from(record::SLOW | record::RETURN) << 32 | 77,
        );
        put(record::ARGUMENTS + record::VALUE, 9);
        put(kept as u64 + record::TIME, 1 << 39);
        put(kept as u64 + record::TID, 77);
        put(kept as u64 + record::ARGUMENTS + record::VALUE, 5);
        let of = RecordedProcess {
            process: &process,
            memory: None,
            clock: &clock,
        };
        let mut event = decoder.blank();
        assert!(decoder.decode(of, &bytes[kept..], &mut event).is_none());
        let slow = decoder.slow_pair(of, &bytes).unwrap();
        assert_eq!((slow.pair, slow.stop.kind), (None, EventKind::Return));
        assert_eq!(slow.stop.arguments, [Value::Int(9)]);
        let start = slow.start.unwrap();
        assert_eq!(
            (start.kind, &start.arguments[0]),
            (EventKind::Hit, &Value::Int(5))
        );
        assert_eq!(slow.duration, clock.between(1 << 39, 1 << 40));
    }
}
