//! What an update has changed, as `attach` and `trace` print_report it.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use probes_lib::{ProbeChange, Report};

use super::closures::warn_of_refused_closures;
use crate::failure::Failure;
use crate::flags::OutputOptions;
use crate::output::{self, Changes, Format};
use crate::say::{self, Messages};
use crate::text::{join_first_few, number_of};

/// Prints what was changed in a process that runs, and the notes and warnings about it.
pub(super) fn print_changes(
    format: Format,
    messages: Messages,
    report: &Report,
    names_process: bool,
) -> Result<(), Failure> {
    say_skipped(&messages, report);
    say_remarks(&messages, report);
    print_report(format, report, names_process, || {
        "the probes were changed".to_owned()
    })
}

/// Prints what undoing an update has changed.
pub(super) fn print_undone(
    format: Format,
    messages: Messages,
    undone: &Report,
    names_process: bool,
) -> Result<(), Failure> {
    if let Some(names) = join_first_few(&undone.skipped) {
        messages.note(&format!("no changes of {names} are left to undo"));
    }
    say_remarks(&messages, undone);
    print_report(format, undone, names_process, String::new).map_err(Failure::after_undoing)
}

/// Says that a program was started, and how many of its probes were changed.
pub(super) fn print_started(
    output: OutputOptions,
    program: &Path,
    report: &Report,
) -> Result<(), Failure> {
    let messages = output.messages;
    say_skipped(&messages, report);
    let (program, pid) = (program.display(), report.pid);
    messages.step(format_args!("started {program} as process {pid}"));
    print_set(output, report)
}

/// Says how many probes were changed. The traced program writes to standard output, too: only with
/// -json are the changes printed there.
pub(super) fn print_set(output: OutputOptions, report: &Report) -> Result<(), Failure> {
    let pid = report.pid;
    warn_of_refused_closures(&output.messages, pid, report.code_digest);
    let probes = number_of(report.changed.len(), "probe");
    output
        .messages
        .step(format_args!("process {pid}: {probes} changed"));
    match output.format {
        Format::Json => print_report(Format::Json, report, false, || {
            format!("the program runs as process {pid}")
        }),
        Format::Plain | Format::Table => Ok(()),
    }
}

/// Prints what was changed. If printing fails, the update stays in effect; the error says what was
/// `done`.
fn print_report(
    format: Format,
    report: &Report,
    names_process: bool,
    done: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let text = output::changes(format, &Changes::of(report), names_process)?;
    match say::print(&text) {
        Err(Failure::Output(error)) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::DoneUnwritten(done(), error))
        }
        printed => printed,
    }
}

/// Names the probes that were to be disabled, and were disabled already.
fn say_skipped(messages: &Messages, report: &Report) {
    if let Some(names) = join_first_few(&report.skipped) {
        messages.note(&format!("skipped, already disabled: {names}"));
    }
}

fn say_remarks(messages: &Messages, report: &Report) {
    warn_of_still_enabled(messages, report);
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
        messages.warning(
            &format!("still on, because others have enabled them too: {names}"),
            &format!(
                "`ocaml-probes attach -pid {} -force` with -disable or -disable-all turns them off for all",
                report.pid
            ),
        );
    }
}
