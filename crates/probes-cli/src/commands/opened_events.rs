//! The runtime events of a process that runs, switched on if they are not.

use std::io;
use std::iter;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use probes_lib::{
    Error, ErrorKind, Glob, Options, RuntimeEvents, RuntimeEventsError, SelectedEvents,
    SwitchedEvents, Target,
};

use crate::destination::Output;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::WarningKind;
use crate::signals::{TerminationSignals, WaitEnd};

/// How often it is checked whether events are on.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// How long to wait, once events are on, for the runtime to write the names of the program's own events.
const NAMES_TIMEOUT: Duration = Duration::from_millis(300);

/// After how long a note says that we wait for the process.
pub(super) const NOTE_WAITING_AFTER: Duration = Duration::from_millis(300);

/// Events that are on, and what switches them off again if we have switched them on.
pub(super) struct OpenedEvents {
    pub(super) events: RuntimeEvents,
    switched: Option<SwitchedEvents>,
}

impl OpenedEvents {
    /// Switches events on, if they are off, and waits for at most `end` until they are on.
    ///
    /// # Errors
    ///
    /// If they cannot be switched on or read, or the time is over, or a signal comes. They are then as they were
    /// before.
    pub(super) fn of_process(
        target: &Target,
        options: Options,
        end: Duration,
        output: &Output,
        signals: &TerminationSignals,
    ) -> Result<OpenedEvents, Failure> {
        let of_process = Failure::of_process(target.pid());
        let Some(mut switched) = target.switch_on_events(options).map_err(&of_process)? else {
            let events = RuntimeEvents::of_process(target.pid());
            return events.map_err(&of_process).map(OpenedEvents::always_on);
        };
        let messages = &output.messages;
        let stopped = switched.stopped().as_micros();
        messages.note(&format!(
            "stopped {stopped} us, to switch runtime events on"
        ));
        let opened = wait(target, &switched, end, output, signals)
            .and_then(|()| switched.open().map_err(&of_process))
            .and_then(|events| Ok((events, switched.remove_file().map_err(&of_process)?)));
        match opened {
            Ok((events, left)) => {
                warn_of_left_file(messages, left);
                let switched = Some(switched);
                Ok(OpenedEvents { events, switched })
            }
            Err(failure) => {
                let closed = switch_off(target.pid(), &mut switched);
                Err(first_or_both(failure, closed, messages))
            }
        }
    }

    /// Events that we have not switched on.
    pub(super) fn always_on(events: RuntimeEvents) -> OpenedEvents {
        OpenedEvents {
            events,
            switched: None,
        }
    }

    /// Selects events by their names. If events were just switched on, waits for the names of the program's own
    /// events: the runtime writes them a moment later.
    ///
    /// # Errors
    ///
    /// Same as [`RuntimeEvents::select`].
    pub(super) fn select(&mut self, globs: &[Glob]) -> Result<SelectedEvents, Error> {
        let begun = Instant::now();
        loop {
            let selected = self.events.select(globs);
            let may_come = self.switched.is_some() && begun.elapsed() < NAMES_TIMEOUT;
            if selected.is_ok() || !may_come {
                return selected;
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    /// Returns what was missed because the events were off for a time. To be called before they are closed.
    pub(super) fn missed(&self, target: &Target) -> Option<EventsOff> {
        if target.has_exited() {
            return self.missed_meanwhile();
        }
        // If the program has no symbols, only its events tell whether they are paused.
        let are_paused = self.switched.is_none() && self.events.are_paused();
        match target.check_events() {
            Ok(true) if !are_paused => self.missed_meanwhile(),
            Err(error) if error.is_program_gone() => self.missed_meanwhile(),
            // Not known: too many files are open, for example.
            Err(error) if matches!(error.kind(), ErrorKind::System(_)) => self.missed_meanwhile(),
            checked => Some(EventsOff::Still {
                can_be_switched_on: matches!(checked, Ok(false)),
            }),
        }
    }

    /// Returns [`EventsOff::ForATime`] if the program has paused and resumed its events.
    pub(super) fn missed_meanwhile(&self) -> Option<EventsOff> {
        (self.events.resumed() > 0).then_some(EventsOff::ForATime)
    }

    /// Switches the events off, if we have switched them on.
    pub(super) fn close(&mut self, pid: i32) -> Result<(), Failure> {
        match &mut self.switched.take() {
            Some(switched) => switch_off(pid, switched),
            None => Ok(()),
        }
    }

    /// Same as [`OpenedEvents::close`], after a failure, which is returned.
    pub(super) fn close_after(
        mut self,
        failure: Failure,
        pid: i32,
        messages: &Messages,
    ) -> Failure {
        first_or_both(failure, self.close(pid), messages)
    }

    /// Returns whether the process still writes them.
    ///
    /// # Errors
    ///
    /// If another tool has switched off what we have switched on.
    pub(super) fn are_written(&self) -> Result<bool, Error> {
        let are_written = self.events.is_mapped()?;
        if let Some(switched) = self.switched.as_ref().filter(|_| are_written) {
            switched.is_on()?;
        }
        Ok(are_written)
    }
}

/// When events were off after they had been on.
#[derive(Clone, Copy)]
pub(super) enum EventsOff {
    /// For a time: the program has paused and resumed them.
    ForATime,
    /// They are still off: another tool had switched them on, or the program has paused them.
    Still { can_be_switched_on: bool },
}

impl EventsOff {
    /// Warns that the events of a process were off.
    pub(super) fn warn(self, pid: i32, messages: &Messages) {
        let (what, hint) = match self {
            EventsOff::ForATime => (
                format!(
                    "the program has paused and resumed its runtime events: what process {pid} did in between is missing"
                ),
                "the event ring_resume says when they were resumed: `watch -events 'ring_*'`",
            ),
            EventsOff::Still { can_be_switched_on } => (
                format!(
                    "process {pid} writes no runtime events any more: they are off or paused (perhaps the command \
                     that had switched them on has ended); what the process did since is missing"
                ),
                if can_be_switched_on {
                    "the same command again switches them on"
                } else {
                    "they cannot be switched on from outside; if the program has paused them, only it can resume them"
                },
            ),
        };
        messages.warning(WarningKind::EventsPaused, &what, hint);
    }
}

/// Warns of the file of events that were switched on, if it could not be removed.
pub(super) fn warn_of_left_file(messages: &Messages, left: Option<(PathBuf, io::Error)>) {
    if let Some((path, error)) = left {
        messages.warning(
            WarningKind::LeftFile,
            &format!("the file of the events was not removed: {error}"),
            &format!("remove {} when the process has exited", path.display()),
        );
    }
}

/// Tells the user that we wait for the process.
pub(super) fn note_waiting_for_events(messages: &Messages) {
    messages.note("waiting for the process to allocate: its events are switched on then");
}

/// Returns the failure. If `then` fails, too, prints the failure, and returns that of `then`.
fn first_or_both(failure: Failure, then: Result<(), Failure>, messages: &Messages) -> Failure {
    match then {
        Ok(()) => failure,
        Err(also) => {
            messages.failure(&failure);
            also
        }
    }
}

fn switch_off(pid: i32, switched: &mut SwitchedEvents) -> Result<(), Failure> {
    match switched.switch_off() {
        Err(error) if !error.is_program_gone() => Err(Failure::of_removal(pid, error)),
        _ => Ok(()),
    }
}

/// Waits until the events are on.
///
/// # Errors
///
/// Why they are not on, if a signal comes, the process exits, or the time is over.
fn wait(
    target: &Target,
    switched: &SwitchedEvents,
    end: Duration,
    output: &Output,
    signals: &TerminationSignals,
) -> Result<(), Failure> {
    let (begun, pid) = (Instant::now(), target.pid());
    let mut was_said = false;
    while !switched.is_on().map_err(Failure::of_process(pid))? {
        let left = end.saturating_sub(begun.elapsed());
        let wait_end = signals.wait(iter::once(target), left.min(CHECK_INTERVAL))?;
        if !matches!(wait_end, WaitEnd::Timeout) || left.is_zero() {
            return Err(Failure::of_process(pid)(switched.why_not_on()));
        }
        if !was_said && begun.elapsed() > NOTE_WAITING_AFTER {
            was_said = true;
            note_waiting_for_events(&output.messages);
        }
    }
    Ok(())
}

/// Whether a process has no events, or these cannot be read: `gc` then times the functions of the collector instead.
pub(super) fn is_without_events(why: &Error) -> bool {
    matches!(
        why.kind(),
        ErrorKind::RuntimeEvents(
            RuntimeEventsError::Ocaml4
                | RuntimeEventsError::CannotSwitchOn { .. }
                | RuntimeEventsError::NoVersion
                | RuntimeEventsError::UnknownVersion { .. }
        )
    )
}
