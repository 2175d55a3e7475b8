//! `-follow`: stays with processes, and says what becomes of them.

use std::path::PathBuf;
use std::process::ExitCode;

use probes_lib::{Error, ErrorKind, FollowEvent, Follower, Options, Target};

use super::put_back::Endings;
use super::{Failure, Subject, attach, trace};
use crate::messages::Messages;
use crate::request::{Answer, Attach};

/// `attach -follow`: changes the targets, and stays with them until told to end.
pub(super) fn attached(
    request: &Attach,
    targets: &[Target],
    options: Options,
) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let endings = Endings::hold_back()?;
    let mut answered = Ok(());
    let mut failures: Vec<Failure> = Vec::new();
    // If the only one cannot be changed, that is the answer.
    let mut is_begun = targets.len() > 1;
    let mut tell = |event: FollowEvent| match event {
        FollowEvent::Set(report) => {
            is_begun = true;
            let messages = messages.about(report.pid);
            let said = attach::answer(request.answer.format, messages, &report, true);
            if answered.is_ok() {
                answered = said;
            }
        }
        FollowEvent::Failed { pid, error } => {
            let failure = Failure::Target(Subject::Process(pid), error);
            if is_begun {
                messages
                    .about(pid)
                    .error(&failure.to_string(), failure.hint());
            }
            failures.push(failure);
        }
        event => say(&messages, &event),
    };
    let is_over = || endings.is_told();
    probes_lib::follow(targets, &request.actions, options, &mut tell, &is_over)
        .map_err(|error| Failure::Target(Subject::Process(targets[0].pid()), error))?;
    match failures.len() {
        0 => answered,
        1 if !is_begun => Err(failures.remove(0)),
        failed => Err(Failure::FollowEvent(failed)),
    }
}

/// `trace -follow`: what the process does that follows the program.
pub(super) fn launched(
    mut follower: Follower,
    answer: Answer,
    program: PathBuf,
) -> Result<ExitCode, Failure> {
    let endings = Endings::hold_back()?;
    let messages = answer.messages;
    let mut is_begun = false;
    let mut tell = |event: FollowEvent| match event {
        FollowEvent::Set(report) => {
            let said = match is_begun {
                false => trace::say_started(answer, &program, &report),
                true => trace::say_set(answer, &report),
            };
            is_begun = true;
            // They are set whether it can be said or not.
            if let Err(failure) = said {
                messages.error(&failure.to_string(), failure.hint());
            }
        }
        FollowEvent::Failed { pid, error } => {
            let failure = Failure::Target(Subject::Process(pid), error);
            messages
                .about(pid)
                .error(&failure.to_string(), failure.hint());
        }
        event => say(&messages, &event),
    };
    match follower.run(&mut tell, &|| endings.is_told()) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            // Said before the other process hears of it, and ends.
            let failure = Failure::Target(Subject::Program(program.clone()), error);
            messages.error(&failure.to_string(), failure.hint());
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Whether something is missing that may come, with a program that is executed or an object that is
/// loaded.
pub(super) fn is_not_yet(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NoProbes { .. } | ErrorKind::UnknownProbe { .. } | ErrorKind::NoMatch { .. }
    )
}

fn say(messages: &Messages, event: &FollowEvent) {
    match event {
        FollowEvent::NotYet { pid, error } => messages.about(*pid).warning(
            &format!("{error}, so far"),
            "it is followed for what it executes and loads",
        ),
        FollowEvent::Forked { parent, pid } => {
            messages.step(format_args!("process {parent} has started process {pid}"));
        }
        FollowEvent::Executed { pid, program } => {
            messages.step(format_args!("process {pid} runs {}", program.display()));
        }
        FollowEvent::LetGo { pid } => {
            messages.step(format_args!("process {pid} has no probes, and was let go"));
        }
        FollowEvent::Blind { pid, reason } => messages.note(&format!(
            "objects that process {pid} loads later will not be seen: {reason}"
        )),
        FollowEvent::Ended { pid } => messages.step(format_args!("process {pid} has ended")),
        _ => {}
    }
}
