//! The loop that reads the runtime events of a process until the end. `top`, `serve`, `trace`, and `record` of hits have loops
//! of their own.

use std::iter;
use std::time::{Duration, Instant};

use probes_lib::Target;

use crate::failure::{Failure, NO_MORE_EVENTS};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{LostWords, WarningKind};
use crate::signals::{RunningProcesses, WaitEnd};

/// The shortest time between two reads.
const MIN_WAIT: Duration = Duration::from_millis(5);

/// How often it is checked whether the process still writes events.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// What a command does with the events of a process.
pub(super) trait EventHandler {
    /// Whether the process still writes events; not called each time that they are read.
    fn are_written(&mut self) -> Result<bool, Failure>;

    /// How long to wait before the next read.
    fn next_read(&self) -> Duration;

    /// When [`EventHandler::show`] shows something next, as the time since the beginning.
    fn next_shown(&self) -> Duration {
        Duration::MAX
    }

    /// Reads what was written since the last time.
    fn read(&mut self) -> Result<(), Failure>;

    /// Shows what was read, `at` after the beginning, if it is time to; [`Next::Stop`] if the output is interrupted.
    fn show(
        &mut self,
        at: Duration,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure>;

    /// Whether what was shown is all that is wanted.
    fn has_enough(&self) -> bool {
        false
    }
}

/// Why events are not read any more.
pub(super) enum EventsEnd {
    /// The process has exited, or has switched its events off.
    NotWritten,
    /// The time is over, a signal has come, or enough was shown.
    Enough,
}

impl EventsEnd {
    /// Says that the process has ended before the command was to, if so. Of a program that the command has started
    /// (`was_started`), that is expected, and nothing is said.
    pub(super) fn note(&self, was_started: bool, messages: &Messages) {
        if let (EventsEnd::NotWritten, false) = (self, was_started) {
            messages.note(&format!("the process {NO_MORE_EVENTS}"));
        }
    }
}

/// Reads and shows until the time is over, a signal comes, or the process writes no more events.
pub(super) fn read_until_end(
    reader: &mut impl EventHandler,
    target: &Target,
    begun: Instant,
    end: Duration,
    interruptible: &mut InterruptibleOutput,
) -> Result<EventsEnd, Failure> {
    interruptible.set_deadline(begun.checked_add(end));
    let mut running = RunningProcesses::of(iter::once(target))?;
    let mut checked = Duration::ZERO;
    loop {
        let at = begun.elapsed();
        let until_shown = reader.next_shown().saturating_sub(at).max(MIN_WAIT);
        let next = reader.next_read().min(until_shown);
        let left = end.saturating_sub(at).min(next);
        let signals = interruptible.signals();
        let wait_end = signals.wait_for(&mut running, &[], left)?;
        let at = begun.elapsed();
        let mut are_written = !matches!(wait_end, WaitEnd::Exited);
        if are_written && at >= checked + CHECK_INTERVAL {
            checked = at;
            are_written = reader.are_written()?;
        }
        // After the check, so that nothing is missed that was written before.
        reader.read()?;
        if !are_written {
            return Ok(EventsEnd::NotWritten);
        }
        if !matches!(wait_end, WaitEnd::Timeout) || at >= end {
            return Ok(EventsEnd::Enough);
        }
        let shown = reader.show(at, interruptible)?;
        if reader.has_enough() {
            return Ok(EventsEnd::Enough);
        }
        if let Next::Stop = shown {
            // What was written while the output was blocked.
            reader.read()?;
            return Ok(EventsEnd::Enough);
        }
    }
}

/// Warns of events that were overwritten before they were read, if there were any.
pub(super) fn warn_of_lost_words(lost: &LostWords, messages: &Messages) {
    if let Some(lost) = lost.list() {
        messages.warning(
            WarningKind::LostEvents,
            &format!(
                "words of events were overwritten before they were read, so events are missing, and counts, totals \
                 and shares are too low: {lost}"
            ),
            "start the process with larger rings, such as e=18 in OCAMLRUNPARAM (16 without it)",
        );
    }
}
