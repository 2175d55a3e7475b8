//! What an update has changed, as `attach` and `trace` print it.

use std::path::Path;
use std::time::Duration;

use probes_lib::{ProbeChange, Report};

use super::closures::warn_of_refused_closures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::{self, Changes, Update, WarningKind};
use crate::text::{join_first_few, number_of};

/// Prints what was changed in a process that runs, and the notes and warnings about it.
pub(super) fn print_changes(
    output: &Output,
    messages: Messages,
    report: &Report,
    shows_pid: bool,
    is_forced: bool,
) -> Result<(), Failure> {
    say_about_changes(&messages, report, is_forced);
    print_report(output, Update::Changed, report, shows_pid, || {
        "the probes were changed".to_owned()
    })?;
    sum_up(output, &messages, report);
    Ok(())
}

/// The notes and warnings about what was changed in a process that runs. If it `is_forced`, nothing that others have
/// added is left.
pub(super) fn say_about_changes(messages: &Messages, report: &Report, is_forced: bool) {
    say_skipped(messages, report);
    if !is_forced {
        warn_of_still_enabled(messages, report);
    }
    say_about_process(messages, report);
}

/// Prints what undoing an update has changed. Does not wait for the reader of the output if it has stopped reading.
pub(super) fn print_undone(
    output: &Output,
    messages: Messages,
    undone: &Report,
    shows_pid: bool,
    output_was_read: bool,
) -> Result<(), Failure> {
    if let Some(names) = join_first_few(&undone.skipped) {
        messages.note(&format!("no changes of {names} are left to undo"));
    }
    say_about_result(&messages, undone);
    let text = text_of(output, Update::Undone, undone, shows_pid)?;
    let printed = if output_was_read {
        output.print(&text)
    } else {
        output.print_last(&text, false)
    };
    printed.map_err(Failure::after_undoing)?;
    sum_up(output, &messages, undone);
    Ok(())
}

/// What is printed of an update: nothing, if changes are not to be printed.
pub(super) fn text_of(
    output: &Output,
    update: Update,
    report: &Report,
    shows_pid: bool,
) -> Result<String, Failure> {
    if !output.reports_changes {
        return Ok(String::new());
    }
    output::changes(output.format, &Changes::of(update, report), shows_pid)
}

pub(super) fn sum_up(output: &Output, messages: &Messages, report: &Report) {
    output.sum_up(messages, report.changed.len(), || {
        let probes = number_of(report.changed.len(), "probe");
        let sites: usize = report.changed.iter().map(|change| change.sites).sum();
        let sites = number_of(sites, "site");
        format!("{probes} changed, {sites} switched")
    });
}

/// Says that a program was started, and how many of its probes were changed.
pub(super) fn print_started(
    output: &Output,
    program: &Path,
    report: &Report,
) -> Result<(), Failure> {
    let messages = output.messages.with_pid(report.pid);
    say_skipped(&messages, report);
    let (program, pid) = (program.display(), report.pid);
    messages.step(format_args!("started {program} as process {pid}"));
    print_number_changed(output, Update::Started, report)
}

/// Says how many probes were changed. Lines between those of the traced program would be of little use:
/// the changes are printed only as JSON, or into a file.
pub(super) fn print_number_changed(
    output: &Output,
    update: Update,
    report: &Report,
) -> Result<(), Failure> {
    let pid = report.pid;
    let messages = output.messages.with_pid(pid);
    warn_of_refused_closures(&messages, pid, report.code_digest);
    let probes = number_of(report.changed.len(), "probe");
    messages.step(format_args!("process {pid}: {probes} changed"));
    if !output.is_separable() {
        return Ok(());
    }
    print_report(output, update, report, false, || {
        format!("the program runs as process {pid}")
    })
}

/// Prints what was changed. If printing fails, the update stays in effect; the error says what was
/// `done`.
fn print_report(
    output: &Output,
    update: Update,
    report: &Report,
    shows_pid: bool,
    done: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if !output.reports_changes {
        return Ok(());
    }
    let text = text_of(output, update, report, shows_pid)?;
    let printed = output.print(&text);
    printed.map_err(|failure| failure.after_doing(&done()))
}

/// Names the probes that were to be disabled, and were disabled already.
fn say_skipped(messages: &Messages, report: &Report) {
    if let Some(names) = join_first_few(&report.skipped) {
        messages.note(&format!("skipped, already disabled: {names}"));
    }
}

/// The notes and warnings about an update that was undone.
pub(super) fn say_about_result(messages: &Messages, report: &Report) {
    warn_of_still_enabled(messages, report);
    say_about_process(messages, report);
}

/// Warns of closures that are refused, and says for how long the process was stopped.
fn say_about_process(messages: &Messages, report: &Report) {
    warn_of_refused_closures(messages, report.pid, report.code_digest);
    if report.stopped > Duration::ZERO {
        messages.note(&format!("stopped {} us", report.stopped.as_micros()));
    }
}

/// Names the probes that were disabled and stay on, because others have enabled them as well.
fn warn_of_still_enabled(messages: &Messages, report: &Report) {
    let is_still_on = |change: &&ProbeChange| change.after > 0 && change.after < change.before;
    let names = report.changed.iter().filter(is_still_on);
    let names: Vec<String> = names
        .map(|change| format!("{} ({})", change.name, change.after))
        .collect();
    if let Some(names) = join_first_few(&names) {
        messages.warning(WarningKind::StillEnabled,
            &format!("still enabled, because others have enabled them too: {names}"),
            &format!(
                "`ocaml-probes attach -pid {} -force` with -disable or -disable-all turns them off for all",
                report.pid
            ),
        );
    }
}
