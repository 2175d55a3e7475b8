//! What `watch`, `count` and `hist` have in common with -events: the runtime events of a process are read for a time, and shown
//! periodically. The process is not changed.

use std::iter;
use std::time::{Duration, Instant};

use probes_lib::{Glob, RuntimeEventName, RuntimeEvents, SelectedEntry, SelectedEvents, Target};

use super::failed::Failed;
use super::gaps::Gaps;
use super::observe_loop::Display;
use crate::destination::{Output, print_result_without_waiting};
use crate::failure::Failure;
use crate::flags::TargetSelection;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{LostWords, WarningKind};
use crate::signals::{TerminationSignals, WaitEnd};
use crate::usage::UsageError;

/// How often events are read: a ring holds more than what is written in this time.
const READ_INTERVAL: Duration = Duration::from_millis(5);

/// How often it is checked whether the process still writes events.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Runtime events of a process that are read.
pub(super) struct EventReading<'o> {
    target: Target,
    output: &'o Output,
    events: RuntimeEvents,
    selected: SelectedEvents,
    begun: Instant,
    /// All that was lost so far.
    lost: LostWords,
    forks: u64,
}

/// What a command does with events.
pub(super) trait EventView {
    /// Adds what was read.
    fn add(&mut self, entry: &SelectedEntry<'_>);

    /// What is to be shown now, and whether that is enough.
    fn show(&mut self, so_far: SoFar<'_>) -> Result<(String, Next), Failure>;

    /// What is shown in the end.
    fn last(&mut self, so_far: SoFar<'_>) -> Result<String, Failure>;
}

/// What is known of the process besides the events.
#[derive(Clone, Copy)]
pub(super) struct SoFar<'r> {
    pub(super) target: &'r Target,
    /// The version of OCaml.
    pub(super) ocaml: &'r str,
    pub(super) names: &'r [RuntimeEventName],
    /// Since the beginning.
    pub(super) at: Duration,
    pub(super) is_redrawn: bool,
}

impl<'o> EventReading<'o> {
    /// Opens the events of the only process that is selected, from now on. No globs mean all events.
    pub(super) fn open(
        command: &'static str,
        selection: &TargetSelection,
        globs: &[Glob],
        output: &'o Output,
    ) -> Result<EventReading<'o>, Failure> {
        let pid = only_pid(command, selection, &output.messages)?;
        let of_process = Failure::of_process(pid);
        let target = Target::open_any(pid).map_err(&of_process)?;
        let mut events = RuntimeEvents::of_process(pid).map_err(&of_process)?;
        let selected = events.select(globs).map_err(&of_process)?;
        let ocaml = events.version();
        output.messages.step(format_args!(
            "reading the runtime events of process {pid}, OCaml {ocaml}, from now on"
        ));
        Ok(EventReading {
            target,
            output,
            events,
            selected,
            begun: Instant::now(),
            lost: LostWords::default(),
            forks: 0,
        })
    }

    /// Reads events and shows them at the intervals of `display`, until the time is over, a signal comes, or the process writes no
    /// more; then shows the last of them.
    pub(super) fn run(
        mut self,
        view: &mut impl EventView,
        mut display: Display,
        duration: Option<Duration>,
    ) -> Result<(), Failure> {
        let output = self.output;
        let signals = TerminationSignals::block()?;
        let mut interruptible = InterruptibleOutput::new(output.destination.clone(), signals)?;
        let end = duration.unwrap_or(Duration::MAX);
        interruptible.set_deadline(self.begun.checked_add(end));
        let mut failures = Failed::default();
        failures.add(output.begin());
        failures.add(self.until_end(view, &mut display, end, &mut interruptible));
        let lasted = self.begun.elapsed();
        let was_read = interruptible.was_read();
        let rest = interruptible.take_rest();
        interruptible.into_signals().unblock();
        failures.add(output.destination.print(&rest));
        if let Some(table) = display.table.as_mut().filter(|_| was_read) {
            failures.add(output.print(&table.erase_sequence()));
        }
        let last = view.last(self.so_far(lasted, false));
        failures.add(last.and_then(|text| {
            if was_read {
                output.print_result(&text)
            } else {
                print_result_without_waiting(&text)
            }
        }));
        if self.forks > 1 {
            let forks = self.forks;
            output.messages.note(&format!(
                "the process has forked {forks} children, each with rings of its own"
            ));
        }
        if let Some(lost) = self.lost.sentence() {
            output.messages.warning(
                WarningKind::LostEvents,
                &format!("words of events were overwritten before they were read: {lost}"),
                "start the process with larger rings: e=18 in OCAMLRUNPARAM",
            );
        }
        failures.finish(&output.messages)
    }

    fn until_end(
        &mut self,
        view: &mut impl EventView,
        display: &mut Display,
        end: Duration,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<(), Failure> {
        let interval = display.interval.unwrap_or(Duration::MAX);
        let (mut next, mut checked) = (interval, Duration::ZERO);
        loop {
            let left = end.saturating_sub(self.begun.elapsed()).min(READ_INTERVAL);
            let wait_end = interruptible
                .signals()
                .wait(iter::once(&self.target), left)?;
            let at = self.begun.elapsed();
            let mut writes = !matches!(wait_end, WaitEnd::Exited);
            if writes && at >= checked + CHECK_INTERVAL {
                checked = at;
                let mapped = self.events.is_mapped();
                writes = mapped.map_err(Failure::of_process(self.target.pid()))?;
            }
            // After the check, so that nothing is missed that was written before.
            self.read(view)?;
            if !writes {
                let note = "the process has exited, or writes no more events";
                self.output.messages.note(note);
                return Ok(());
            }
            if !matches!(wait_end, WaitEnd::Timeout) || at >= end {
                return Ok(());
            }
            if at < next {
                continue;
            }
            next = at.saturating_add(interval);
            let (text, enough) = view.show(self.so_far(at, display.table.is_some()))?;
            let shown = match &mut display.table {
                Some(table) => table.redraw(&text, &Gaps::default(), interruptible)?,
                None => interruptible.write(&text)?,
            };
            if matches!(enough, Next::Stop) || matches!(shown, Next::Stop) {
                return Ok(());
            }
        }
    }

    fn read(&mut self, view: &mut impl EventView) -> Result<(), Failure> {
        let (lost, forks) = (&mut self.lost, &mut self.forks);
        let messages = &self.output.messages;
        let read = self.events.read_selected(&mut self.selected, |entry| {
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
            view.add(&entry);
        });
        read.map_err(Failure::of_process(self.target.pid()))
    }

    fn so_far(&self, at: Duration, is_redrawn: bool) -> SoFar<'_> {
        SoFar {
            target: &self.target,
            ocaml: self.events.version(),
            names: self.selected.names(),
            at,
            is_redrawn,
        }
    }
}

/// The pid, if it is the only one.
fn only_pid(
    command: &'static str,
    selection: &TargetSelection,
    messages: &Messages,
) -> Result<i32, Failure> {
    match selection.pids(messages)?[..] {
        [pid] => Ok(pid),
        _ => {
            let message = "-events is for one process: give one -pid";
            Err(Failure::Usage(UsageError::new(Some(command), message)))
        }
    }
}

/// Says that the events of a child are not read.
fn note_fork(messages: &Messages, child: Option<i64>) {
    let child = child.map_or_else(String::new, |pid| format!(" {pid}, as it calls it,"));
    messages.note(&format!(
        "the process has forked a child{child} whose events are in rings of its own: give its pid to see them"
    ));
}
