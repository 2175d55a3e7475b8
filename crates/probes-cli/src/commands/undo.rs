//! Undoes the temporary changes of a command; retries while another tool keeps the process busy.

use std::time::{Duration, Instant};

use probes_lib::{Hold, Options, Report};

use crate::failure::{Failure, exit_or_exec};
use crate::hint;
use crate::messages::Messages;
use crate::signals::TerminationSignals;
use crate::text::join_first_few;

/// How long attempts are repeated while the error is transient.
pub(super) const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// After how long a note says that attempts are repeated.
const NOTED_AFTER: Duration = Duration::from_secs(1);

/// How long until the next attempt.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Undoes the changes of `hold`. Retries transient errors for 30 s or until a termination signal. Returns `None` if the
/// process has exited or exec'd, which leaves nothing to undo.
pub(super) fn undo_changes(
    hold: &Hold,
    options: Options,
    signals: &TerminationSignals,
    messages: &Messages,
) -> Result<Option<Report>, Failure> {
    let undone = retry(signals, messages, || hold.release(options));
    undone_changes(hold, undone, options, messages)
}

/// What has become of the changes of `hold`, which were to be `undone`. `None` if the process has exited or exec'd,
/// which leaves nothing to undo.
pub(super) fn undone_changes(
    hold: &Hold,
    undone: probes_lib::Result<Report>,
    options: Options,
    messages: &Messages,
) -> Result<Option<Report>, Failure> {
    let error = match undone {
        Ok(undone) => return Ok(Some(undone)),
        Err(error) => error,
    };
    match exit_or_exec(&error) {
        Some(exit_or_exec) => {
            let pid = hold.report().pid;
            messages.note(&format!(
                "process {pid} {exit_or_exec}: there is nothing to undo"
            ));
            Ok(None)
        }
        None => {
            let hint = by_hand(hold, options, hint::sudo_after(&error), |_| true);
            let is_live = options.live;
            Err(Failure::NotUndone {
                error,
                hint,
                is_live,
            })
        }
    }
}

/// Repeats `attempt` while its error is transient, for 30 s or until a termination signal.
pub(super) fn retry<T>(
    signals: &TerminationSignals,
    messages: &Messages,
    mut attempt: impl FnMut() -> probes_lib::Result<T>,
) -> probes_lib::Result<T> {
    let attempt = |(): &mut ()| attempt();
    let mut results = retry_each(signals, &mut [()], |()| *messages, attempt);
    // One for one process.
    results.remove(0)
}

/// Calls `attempt` once for each process; then, for 30 s in all or until a termination signal, again for those whose
/// error is transient, so that no process waits for another that is busy. Each gets a second attempt, even if that round
/// takes longer. Returns a result for each.
pub(super) fn retry_each<P, T>(
    signals: &TerminationSignals,
    processes: &mut [P],
    messages: impl Fn(&P) -> Messages,
    mut attempt: impl FnMut(&mut P) -> probes_lib::Result<T>,
) -> Vec<probes_lib::Result<T>> {
    let mut results: Vec<_> = processes.iter_mut().map(&mut attempt).collect();
    let begun = Instant::now();
    let (mut is_second, mut is_said) = (true, false);
    loop {
        let is_busy = |result: &probes_lib::Result<T>| {
            let error = result.as_ref().err();
            error.is_some_and(probes_lib::Error::is_transient)
        };
        // However many there are, each gets a second attempt.
        let may_try = || is_second || begun.elapsed() < RETRY_TIMEOUT;
        if !results.iter().any(is_busy) || !may_try() || signals.take_interrupt() {
            return results;
        }
        let is_long = !is_said && begun.elapsed() >= NOTED_AFTER;
        for (process, result) in processes.iter().zip(&results) {
            let Some(error) = result.as_ref().err().filter(|it| it.is_transient()) else {
                continue;
            };
            messages(process).step(format_args!("trying again: {error}"));
            if is_long {
                let seconds = RETRY_TIMEOUT.as_secs();
                let why = error.text_without_effect();
                messages(process).note(&format!(
                    "not restored so far, trying for up to {seconds} s: {why}"
                ));
            }
        }
        is_said |= is_long;
        std::thread::sleep(RETRY_INTERVAL);
        for (process, result) in processes.iter_mut().zip(&mut results) {
            if is_busy(result) && may_try() {
                if signals.take_interrupt() {
                    return results;
                }
                *result = attempt(process);
            }
        }
        is_second = false;
    }
}

/// Fails if undoing the changes of `hold` with `options` has left some probes as they are; `undone` is the report of
/// the undoing.
pub(super) fn fail_unless_all_undone(
    hold: &Hold,
    options: Options,
    undone: &Report,
) -> Result<(), Failure> {
    let Some(names) = join_first_few(&undone.not_undone) else {
        return Ok(());
    };
    let is_left = |name: &str| undone.not_undone.iter().any(|one| one == name);
    Err(Failure::PartlyUndone(
        names,
        by_hand(hold, options, "", is_left),
    ))
}

/// Says with which command the user can undo the changes of the probes for which `is_meant` is
/// true; `sudo` precedes it. The process may be stopped only if `options` say so.
fn by_hand(hold: &Hold, options: Options, sudo: &str, is_meant: impl Fn(&str) -> bool) -> String {
    let report = hold.report();
    let pid = report.pid;
    let live = if options.live { " -live" } else { "" };
    // A user's record does not count for a process that has become inaccessible to that user.
    if hold.unrecorded().is_none() && sudo.is_empty() {
        // The record stays, and this command is a dead holder once it has exited.
        return format!("`ocaml-probes attach{live} -pid {pid} -release-dead` undoes the changes");
    }
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
    match flags.as_slice() {
        [] => format!("`{sudo}ocaml-probes info -pid {pid}` shows which probes are enabled"),
        flags => format!(
            "`{sudo}ocaml-probes attach{live} -pid {pid} {}` undoes the changes",
            flags.join(" ")
        ),
    }
}
