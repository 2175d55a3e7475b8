//! [`EventBatch`]: the hits of one reading, one after the other.

use super::decoder::RecordedProcess;
use super::reader::{EventReader, ReadingTotals};
use super::{Event, Events};
use crate::error::Result;
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::ticks::Clock;

/// The hits of one reading, decoded one after the other: for programs that look at millions of them a second, and keep
/// none. [`Event::clone`] keeps one. Hits that are left when it is dropped are lost, and not counted;
/// [`EventBatch::into_events`] returns them, and the slow pairs and calls.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().watch(Selector::name("req_start"));
/// let mut observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// let mut batch = observer.event_batch()?;
/// let mut latest = 0;
/// while let Some(event) = batch.next_event() {
///     latest = event.monotonic.max(latest);
/// }
/// println!("the last hit was at {latest}, and {} were dropped", batch.dropped());
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct EventBatch<'o> {
    reader: &'o mut EventReader,
    process: &'o Process,
    memory: Option<ProcessMemory>,
    clock: Clock,
    /// The index of the next record.
    next: usize,
    event: Event,
    beside: ReadingTotals,
}

impl<'o> EventBatch<'o> {
    /// Returns the batch that `read` reads into the reader. `read` returns what is read beside the
    /// events, and the memory of the process, unless it has exited.
    pub(crate) fn of(
        reader: &'o mut EventReader,
        process: &'o Process,
        clock: Clock,
        read: impl FnOnce(&mut EventReader) -> Result<(ReadingTotals, Option<ProcessMemory>)>,
    ) -> Result<EventBatch<'o>> {
        let (beside, memory) = read(reader)?;
        Ok(EventBatch {
            event: reader.blank(),
            reader,
            process,
            memory,
            clock,
            next: 0,
            beside,
        })
    }

    /// Returns the next hit, in the order of their times; `None` after the last one.
    #[inline]
    pub fn next_event(&mut self) -> Option<&Event> {
        let of = RecordedProcess {
            process: self.process,
            memory: self.memory.as_ref(),
            clock: &self.clock,
        };
        let (next, beside, event) = (&mut self.next, &mut self.beside, &mut self.event);
        let is_one = self.reader.decode_next(of, next, beside, event);
        is_one.then_some(&self.event)
    }

    /// Returns how many hits were lost; see [`Events::dropped`]. Those with invalid records are known only once these
    /// have been looked at.
    pub fn dropped(&self) -> u64 {
        self.beside.dropped
    }

    /// Returns all hits that are left.
    pub fn into_events(mut self) -> Events {
        let of = RecordedProcess {
            process: self.process,
            memory: self.memory.as_ref(),
            clock: &self.clock,
        };
        self.reader.decode_rest(of, &mut self.next, self.beside)
    }
}
