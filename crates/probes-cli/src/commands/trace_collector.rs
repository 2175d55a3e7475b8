//! `trace -gc`: reads the runtime events of the program that `trace` has started with them on, and reports what the
//! collector did, beside whatever else `trace` does.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use probes_lib::{GcPauses, RuntimeEvents};

use super::event_loop::warn_of_lost_words;
use super::program_with_events::{AwaitedEvents, EventsDirectory};
use super::step_failures::StepFailures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::GcReport;

/// How often it is tried to open the events, until there are some.
const OPENING_INTERVAL: Duration = Duration::from_millis(5);

/// Reads the events of a program until it has exited, and reports what they add up to.
pub(super) struct CollectorReader<'r> {
    pid: i32,
    program: &'r Path,
    output: &'r Output,
    awaited: AwaitedEvents<'r>,
    events: Option<RuntimeEvents>,
    pauses: GcPauses,
    begun: Instant,
}

impl<'r> CollectorReader<'r> {
    pub(super) fn new(
        pid: i32,
        program: &'r Path,
        output: &'r Output,
        directory: &'r EventsDirectory,
        begun: Instant,
    ) -> CollectorReader<'r> {
        CollectorReader {
            pid,
            program,
            output,
            awaited: AwaitedEvents::in_directory(directory),
            events: None,
            pauses: GcPauses::default(),
            begun,
        }
    }

    /// Reads until the program has exited, as `exited` says, and prints the report.
    pub(super) fn run(mut self, exited: &Receiver<()>) -> Result<(), Failure> {
        let read = self.read_until_end(exited);
        self.report(read)
    }

    /// The same in another thread, while this one calls `record`; prints the report after what that prints. If there
    /// can be no other thread, reads the events once the program has exited.
    pub(super) fn run_beside(
        mut self,
        exited: &Receiver<()>,
        record: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (end, ended) = channel::<()>();
        let (recorded, read) = thread::scope(|scope| {
            let reader = &mut self;
            let read = move || reader.read_until_end(&ended);
            let reading = thread::Builder::new().spawn_scoped(scope, read);
            let recorded = record();
            // `record` may have ended before the program.
            let _ = exited.recv();
            drop(end);
            let read = match reading.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(read)) => read,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                // `report` reads what the program has left.
                Err(_) => Ok(()),
            };
            (recorded, read)
        });
        let messages = self.output.messages;
        let mut failures = StepFailures::default();
        failures.add(recorded);
        failures.add(self.report(read));
        failures.finish(&messages)
    }

    fn read_until_end(&mut self, ended: &Receiver<()>) -> Result<(), Failure> {
        loop {
            let events = self.events.as_ref();
            let wait = events.map_or(OPENING_INTERVAL, RuntimeEvents::next_read);
            if ended.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                return Ok(());
            }
            if self.events.is_none() {
                self.events = self.awaited.try_to_open(self.pid, self.begun.elapsed());
            }
            self.read()?;
        }
    }

    fn read(&mut self) -> Result<(), Failure> {
        let Some(events) = &mut self.events else {
            return Ok(());
        };
        let pauses = &mut self.pauses;
        let read = events.read(|entry| drop(pauses.add(&entry)));
        self.pauses.match_requests();
        read.map_err(Failure::of_process(self.pid))
    }

    /// Reads what is left, and prints the report.
    fn report(mut self, read: Result<(), Failure>) -> Result<(), Failure> {
        let seconds = self.begun.elapsed();
        let mut failures = StepFailures::default();
        failures.add(read);
        if self.events.is_none() {
            self.events = Some(self.awaited.of_exited(self.pid, self.program)?);
        }
        failures.add(self.read());
        self.pauses.finish();
        let version = self.events.as_ref().map_or("", RuntimeEvents::version);
        let report = GcReport::new(self.pid, self.program, version, seconds, &self.pauses);
        let text = report.text(self.output.format);
        failures.add(text.and_then(|text| self.output.print_result(&text)));
        warn_of_lost_words(&report.lost(), &self.output.messages);
        failures.finish(&self.output.messages)
    }
}
