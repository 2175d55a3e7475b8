//! `trace`: starts a program with its probes set.

use std::path::PathBuf;
use std::process::Command;

use probes_lib::Launch;

use super::{Failure, Subject, answer_change, say_passed_over};
use crate::output::Format;
use crate::request::Trace;

pub(super) fn run(request: Trace) -> Result<(), Failure> {
    let (program, answer) = (PathBuf::from(request.program), request.answer);
    let mut command = Command::new(&program);
    command.args(request.arguments);
    // The child is let go: it goes on by itself when we have ended.
    let launched = Launch::new(command)
        .actions(request.actions)
        .spawn()
        .map_err(|error| Failure::Target(Subject::Program(program.clone()), error))?;
    let report = launched.report();
    say_passed_over(&answer.messages, report);
    answer.messages.step(format_args!(
        "started {} as process {}, {} probes changed",
        program.display(),
        report.pid,
        report.changed.len()
    ));
    // Standard output is the program's, too: nothing of ours goes there unless it is asked for.
    match answer.format {
        Format::Json => answer_change(Format::Json, report, || {
            format!("the program runs as process {}", report.pid)
        }),
        Format::Plain | Format::Table => Ok(()),
    }
}
