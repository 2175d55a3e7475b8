//! Undoing what a command has changed for a time, while other tools may be in the way.

use std::time::{Duration, Instant};

use probes_lib::{Options, Report, Target};

use crate::failure::{Failure, fate};
use crate::say::Messages;
use crate::signals::TerminationSignals;
use crate::text::few;

/// How long another tool may be in the way.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long until the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// Undoes the changes in `report`. Waits for others that are in the way, unless a signal comes. Returns
/// `None` if the process has exited or executed a new program, which leaves nothing to undo.
pub(super) fn restore(
    target: &Target,
    report: &Report,
    options: Options,
    signals: &TerminationSignals,
    messages: &Messages,
) -> Result<Option<Report>, Failure> {
    let undone = retry(signals, messages, || target.undo(report, options));
    let error = match undone {
        Ok(undone) => return Ok(Some(undone)),
        Err(error) => error,
    };
    match fate(&error) {
        Some(fate) => {
            let pid = report.pid;
            messages.note(&format!("process {pid} {fate}: there is nothing to undo"));
            Ok(None)
        }
        None => Err(Failure::NotRestored(error, by_hand(report, |_| true))),
    }
}

/// Tries something again while others are in the way, until a signal comes.
pub(super) fn retry<T>(
    signals: &TerminationSignals,
    messages: &Messages,
    mut attempt: impl FnMut() -> probes_lib::Result<T>,
) -> probes_lib::Result<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(error)
                if error.is_transient()
                    && begun.elapsed() < PATIENCE
                    && !signals.is_interrupted() =>
            {
                messages.step(format_args!("trying again: {error}"));
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// Fails if `undone`, which has undone the changes in `report`, has left some probes as they are.
pub(super) fn refuse_leftovers(report: &Report, undone: &Report) -> Result<(), Failure> {
    let Some(names) = few(&undone.not_undone) else {
        return Ok(());
    };
    let is_left = |name: &str| undone.not_undone.iter().any(|one| one == name);
    Err(Failure::PartlyRestored(names, by_hand(report, is_left)))
}

/// The command that undoes by hand the changes of the probes that `is_meant` is true of.
fn by_hand(report: &Report, is_meant: impl Fn(&str) -> bool) -> String {
    let names = |is_wanted: fn(u16, u16) -> bool| -> Vec<&str> {
        let changed = report.changed.iter();
        changed
            .filter(|change| is_wanted(change.before, change.after) && is_meant(&change.name))
            .map(|change| change.name.as_str())
            .collect()
    };
    let enabled = names(|before, after| after > before);
    let disabled = names(|before, after| after < before);
    let lists = [("-disable", enabled), ("-enable", disabled)];
    let flags: Vec<String> = lists
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(flag, names)| format!("{flag} {}", names.join(",")))
        .collect();
    let pid = report.pid;
    match flags.as_slice() {
        [] => format!("`ocaml-probes info -pid {pid}` says what is on"),
        flags => format!(
            "`ocaml-probes attach -pid {pid} {}` does it by hand",
            flags.join(" ")
        ),
    }
}
