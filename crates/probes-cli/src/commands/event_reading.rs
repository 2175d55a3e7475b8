//! What `watch -events`, `count -events` and `hist -events` have in common: they read the runtime events of a process
//! for a time, and show them periodically.

use std::time::{Duration, Instant};

use probes_lib::{Glob, Options, RuntimeEventName, SelectedEntry, SelectedEvents, Target};

use super::event_loop::{EventHandler, read_until_end, warn_of_lost_words};
use super::gaps::Gaps;
use super::opened_events::OpenedEvents;
use super::readings::Display;
use super::step_failures::StepFailures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::TargetSelection;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::LostWords;
use crate::signals::TerminationSignals;
use crate::usage::UsageError;

/// A request to read runtime events of one process.
pub(super) struct EventRequest<'r> {
    target: Target,
    /// All events if there are none.
    globs: &'r [Glob],
    options: Options,
    pub(super) output: Output,
}

/// Runtime events of a process that are read.
struct EventReading<'r> {
    target: &'r Target,
    output: &'r Output,
    opened: OpenedEvents,
    selected: SelectedEvents,
    /// All that was lost so far.
    lost: LostWords,
    /// How many children the process has forked meanwhile.
    forks: u64,
}

/// What a command does with events.
pub(super) trait EventConsumer {
    /// Adds what was read.
    fn add(&mut self, entry: &SelectedEntry<'_>);

    /// The text to show now.
    fn show(&mut self, state: ReadingState<'_>) -> Result<String, Failure>;

    /// Whether the command ends after what was shown.
    fn has_enough(&self) -> bool {
        false
    }

    /// The text to show at the end.
    fn last(&mut self, state: ReadingState<'_>) -> Result<String, Failure>;
}

/// The state of a reading, for a consumer.
#[derive(Clone, Copy)]
pub(super) struct ReadingState<'r> {
    pub(super) target: &'r Target,
    /// The version of OCaml.
    pub(super) ocaml: &'r str,
    pub(super) names: &'r [RuntimeEventName],
    /// How long events have been read.
    pub(super) at: Duration,
    /// Whether the text replaces the previous one on a terminal.
    pub(super) is_redrawn: bool,
}

impl<'r> EventRequest<'r> {
    /// Requests events of the selected process, which must be the only one.
    pub(super) fn new(
        command: &'static str,
        selection: &TargetSelection,
        options: Options,
        globs: &'r [Glob],
        output: &Output,
    ) -> Result<EventRequest<'r>, Failure> {
        let pid = only_pid(command, selection, &output.messages)?;
        Ok(EventRequest {
            target: Target::open_any(pid).map_err(Failure::of_process(pid))?,
            globs,
            options,
            output: output.clone().with_pid(pid),
        })
    }

    /// Reads events from now on, and shows them at the intervals of `display`, until the time is over, a signal
    /// comes, the process writes no more events, or the consumer has enough; then shows the final text.
    pub(super) fn run(
        &self,
        consumer: &mut impl EventConsumer,
        mut display: Display,
        duration: Option<Duration>,
    ) -> Result<(), Failure> {
        let (target, output) = (&self.target, &self.output);
        let messages = &output.messages;
        let signals = TerminationSignals::block()?;
        let mut interruptible = InterruptibleOutput::new(output, signals)?;
        let end = duration.unwrap_or(Duration::MAX);
        let mut reading = match self.open(end, interruptible.signals()) {
            Ok(reading) => reading,
            Err(failure) => return Err(interruptible.end_after(failure)),
        };
        let begun = Instant::now();
        let mut failures = StepFailures::default();
        failures.add(output.begin());
        let mut shown = ShownEvents {
            next: display.interval.unwrap_or(Duration::MAX),
            reading: &mut reading,
            consumer,
            display: &mut display,
        };
        let why = read_until_end(&mut shown, target, begun, end, &mut interruptible);
        failures.add(why.map(|why| why.note(false, messages)));
        let lasted = begun.elapsed();
        let missed = reading.opened.missed(target);
        // Before anything that may wait for a reader of the output: the process must not write events meanwhile.
        failures.add(reading.opened.close(target.pid()));
        let (output_was_read, rest_printed) = interruptible.end();
        failures.add(rest_printed);
        if let Some(table) = display.table.as_mut().filter(|_| output_was_read) {
            failures.add(output.print(&table.erase_sequence()));
        }
        let last = consumer.last(reading.state(lasted, false));
        failures.add(last.and_then(|text| output.print_last(&text, output_was_read)));
        if reading.forks > 1 {
            let forks = reading.forks;
            messages.note(&format!(
                "the process has forked {forks} children, each with rings of its own"
            ));
        }
        warn_of_lost_words(&reading.lost, messages);
        if let Some(missed) = missed {
            missed.warn(target.pid(), messages);
        }
        failures.finish(messages)
    }

    /// Opens the events. If they are off, switches them on, and waits for at most `end` until they are on.
    fn open(
        &self,
        end: Duration,
        signals: &TerminationSignals,
    ) -> Result<EventReading<'_>, Failure> {
        let (target, output) = (&self.target, &self.output);
        let mut opened = OpenedEvents::of_process(target, self.options, end, output, signals)?;
        let pid = target.pid();
        let selected = match opened.select(self.globs) {
            Ok(selected) => selected,
            Err(error) => {
                let failure = Failure::of_process(pid)(error);
                return Err(opened.close_after(failure, pid, &output.messages));
            }
        };
        let ocaml = opened.events.version();
        output.messages.step(format_args!(
            "reading the runtime events of process {pid}, OCaml {ocaml}, from now on"
        ));
        Ok(EventReading {
            target,
            output,
            opened,
            selected,
            lost: LostWords::default(),
            forks: 0,
        })
    }
}

impl EventReading<'_> {
    fn read(&mut self, consumer: &mut impl EventConsumer) -> Result<(), Failure> {
        let (lost, forks) = (&mut self.lost, &mut self.forks);
        let messages = &self.output.messages;
        let read = self
            .opened
            .events
            .read_selected(&mut self.selected, |entry| {
                match entry {
                    SelectedEntry::Lost { domain, words } => lost.add(domain, words),
                    SelectedEntry::Forked(child) => {
                        *forks += 1;
                        if *forks == 1 {
                            note_fork(messages, child);
                        }
                    }
                    _ => {}
                }
                consumer.add(&entry);
            });
        read.map_err(Failure::of_process(self.target.pid()))
    }

    fn state(&self, at: Duration, is_redrawn: bool) -> ReadingState<'_> {
        ReadingState {
            target: self.target,
            ocaml: self.opened.events.version(),
            names: self.selected.names(),
            at,
            is_redrawn,
        }
    }
}

/// Events that are read and shown at the intervals of a display.
struct ShownEvents<'s, 'r, C> {
    reading: &'s mut EventReading<'r>,
    consumer: &'s mut C,
    display: &'s mut Display,
    /// The time of the next display, since the start of the reading.
    next: Duration,
}

impl<C: EventConsumer> EventHandler for ShownEvents<'_, '_, C> {
    fn are_written(&mut self) -> Result<bool, Failure> {
        let written = self.reading.opened.are_written();
        written.map_err(Failure::of_process(self.reading.target.pid()))
    }

    fn next_read(&self) -> Duration {
        self.reading.opened.events.next_read()
    }

    fn next_shown(&self) -> Duration {
        self.next
    }

    fn read(&mut self) -> Result<(), Failure> {
        self.reading.read(self.consumer)
    }

    fn show(
        &mut self,
        at: Duration,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        if at < self.next {
            return Ok(Next::Continue);
        }
        self.next = at.saturating_add(self.display.interval.unwrap_or(Duration::MAX));
        let table = &mut self.display.table;
        let text = self
            .consumer
            .show(self.reading.state(at, table.is_some()))?;
        match table {
            Some(table) => table.redraw(&text, &Gaps::default(), interruptible),
            None => interruptible.write(&text),
        }
    }

    fn has_enough(&self) -> bool {
        self.consumer.has_enough()
    }
}

/// Returns the pid of the selected process; an error unless exactly one is selected.
fn only_pid(
    command: &'static str,
    selection: &TargetSelection,
    messages: &Messages,
) -> Result<i32, Failure> {
    match selection.pids(false, messages)?[..] {
        [pid] => Ok(pid),
        _ => {
            let message = "-events is for one process: give one -pid";
            Err(Failure::Usage(UsageError::new(Some(command), message)))
        }
    }
}

/// Says that the events of a child are not read.
fn note_fork(messages: &Messages, child: Option<i64>) {
    let child = child.map_or_else(String::new, |pid| {
        format!(" (pid {pid} in its pid namespace)")
    });
    messages.note(&format!(
        "the process has forked a child{child}, whose events are in rings of its own: give its pid to see them"
    ));
}
