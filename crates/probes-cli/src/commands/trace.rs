//! `trace`: starts a program with its probes set.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use probes_lib::{Launch, Report, Split};

use super::wait::Wait;
use super::{Failure, Subject, answer_change, follow, observed, say_passed_over};
use crate::output::Format;
use crate::request::{Answer, Trace};

pub(super) fn run(request: Trace) -> Result<ExitCode, Failure> {
    let (program, answer) = (PathBuf::from(request.program), request.answer);
    let mut command = Command::new(&program);
    command.args(request.arguments);
    let mut launch = Launch::new(command).actions(request.actions);
    let failed = |source| Failure::Waiting("wait for the program", source);
    if let Some(wanted) = &request.observed {
        // First: once the program runs, there is no way back.
        let wait = Wait::prepare().map_err(failed)?;
        let launch = launch.attended();
        let status = observed::run(launch, wait, wanted, answer, &program)?;
        return Ok(ExitCode::from(status));
    }
    let mut wait = None;
    if request.wait {
        // First: once the program runs, there is no way back.
        wait = Some(Wait::prepare().map_err(failed)?);
        launch = launch.attended();
    }
    let of_program = |error| Failure::Target(Subject::Program(program.clone()), error);
    if request.follow {
        let starter = match launch.split().map_err(of_program)? {
            Split::Starter(starter) => starter,
            Split::Follower(follower) => {
                return follow::launched(follower, answer, program);
            }
        };
        answer
            .messages
            .step(format_args!("process {} follows it", starter.follower()));
        let Some(launched) = starter.spawn().map_err(of_program)? else {
            return Ok(ExitCode::FAILURE);
        };
        return match wait {
            Some(wait) => Ok(ExitCode::from(
                wait.until_the_end(launched).map_err(failed)?,
            )),
            None => Ok(ExitCode::SUCCESS),
        };
    }
    let launched = launch.spawn().map_err(of_program)?;
    let report = launched.report();
    let answered = say_started(answer, &program, report);
    let Some(wait) = wait else {
        // The child is let go: it goes on by itself when we have ended.
        return answered.map(|()| ExitCode::SUCCESS);
    };
    match answered {
        // The program runs, and whoever waits for us waits for its status.
        Err(failure) if !is_closed_pipe(&failure) => {
            answer.messages.error(&failure.to_string(), failure.hint());
        }
        _ => {}
    }
    let status = wait.until_the_end(launched).map_err(failed)?;
    Ok(ExitCode::from(status))
}

/// Says that the program runs.
pub(super) fn say_started(answer: Answer, program: &Path, report: &Report) -> Result<(), Failure> {
    say_passed_over(&answer.messages, report);
    let (program, pid) = (program.display(), report.pid);
    let messages = answer.messages;
    messages.step(format_args!("started {program} as process {pid}"));
    say_set(answer, report)
}

/// Says which probes were set. Standard output is the program's, too: nothing of ours goes there
/// unless it is asked for.
pub(super) fn say_set(answer: Answer, report: &Report) -> Result<(), Failure> {
    let pid = report.pid;
    let what = match report.changed.len() {
        1 => "1 probe".to_owned(),
        count => format!("{count} probes"),
    };
    answer
        .messages
        .step(format_args!("process {pid}: {what} changed"));
    match answer.format {
        Format::Json => answer_change(Format::Json, report, false, || {
            format!("the program runs as process {}", report.pid)
        }),
        Format::Plain | Format::Table => Ok(()),
    }
}

fn is_closed_pipe(failure: &Failure) -> bool {
    matches!(failure, Failure::Output(error) if error.kind() == ErrorKind::BrokenPipe)
}
