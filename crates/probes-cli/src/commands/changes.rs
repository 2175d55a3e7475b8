//! What an update has changed, as the answer of `attach` and `trace`.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use probes_lib::{ProbeChange, Report};

use crate::failure::Failure;
use crate::flags::OutputOptions;
use crate::output::{self, Changes, Format};
use crate::say::{self, Messages};
use crate::text::{few, number_of};

/// Prints what was changed in a process that runs, and the notes and warnings about it.
pub(super) fn answer(
    format: Format,
    messages: Messages,
    report: &Report,
    several: bool,
) -> Result<(), Failure> {
    say_skipped(&messages, report);
    say_remarks(&messages, report);
    print(format, report, several, || {
        "the probes were changed".to_owned()
    })
}

/// Prints what was undone of a change.
pub(super) fn answer_undone(
    format: Format,
    messages: Messages,
    undone: &Report,
    several: bool,
) -> Result<(), Failure> {
    if let Some(names) = few(&undone.skipped) {
        messages.note(&format!("nothing is left to undo of {names}"));
    }
    say_remarks(&messages, undone);
    print(format, undone, several, String::new).map_err(Failure::after_undoing)
}

/// Says that a program was started, and which of its probes were set.
pub(super) fn answer_started(
    output: OutputOptions,
    program: &Path,
    report: &Report,
) -> Result<(), Failure> {
    let messages = output.messages;
    say_skipped(&messages, report);
    let (program, pid) = (program.display(), report.pid);
    messages.step(format_args!("started {program} as process {pid}"));
    answer_set(output, report)
}

/// Says which probes were set. Standard output belongs to the traced program, too: only with -json is
/// anything else written there.
pub(super) fn answer_set(output: OutputOptions, report: &Report) -> Result<(), Failure> {
    let pid = report.pid;
    let probes = number_of(report.changed.len(), "probe");
    output
        .messages
        .step(format_args!("process {pid}: {probes} changed"));
    match output.format {
        Format::Json => print(Format::Json, report, false, || {
            format!("the program runs as process {pid}")
        }),
        Format::Plain | Format::Table => Ok(()),
    }
}

/// Prints what was changed. If that fails, what was `done` stays.
fn print(
    format: Format,
    report: &Report,
    several: bool,
    done: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let text = output::changes(format, &Changes::of(report), several)?;
    match say::print(&text) {
        Err(Failure::Output(error)) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::DoneUnwritten(done(), error))
        }
        printed => printed,
    }
}

/// Names the probes that were to be disabled, and were disabled already.
fn say_skipped(messages: &Messages, report: &Report) {
    if let Some(names) = few(&report.skipped) {
        messages.note(&format!("skipped, already disabled: {names}"));
    }
}

fn say_remarks(messages: &Messages, report: &Report) {
    warn_of_still_enabled(messages, report);
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
    if let Some(names) = few(&names) {
        messages.warning(
            &format!("still on, because others have enabled them too: {names}"),
            &format!(
                "`ocaml-probes attach -pid {} -force` with -disable or -disable-all turns them off for all",
                report.pid
            ),
        );
    }
}
