//! `-follow`: stays with processes, and says what becomes of them.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use probes_lib::{Error, ErrorKind, Follow, FollowEvent, Follower, Options, Target};

use super::put_back::Endings;
use super::{Failure, Subject, attach, trace};
use crate::messages::Messages;
use crate::request::{Answer, Attach};

/// `attach -follow`: changes the targets, and follows them until interrupted.
pub(super) fn attached(
    request: &Attach,
    targets: Vec<Target>,
    options: Options,
) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let (first, count) = (targets[0].pid(), targets.len());
    let endings = Endings::hold_back()?;
    // All others too: what stops this process makes those wait that it follows.
    let waiting = |errno: Errno| Failure::Waiting("hold signals back", errno.into());
    SigSet::all().thread_block().map_err(waiting)?;
    let follow = Follow::start(targets, request.actions.clone(), options)
        .map_err(|error| Failure::Target(Subject::Process(first), error))?;
    let follow = stopped_by(endings, follow)?;
    let mut answered = Ok(());
    let mut failures: Vec<Failure> = Vec::new();
    // If the only one cannot be changed, that is the answer.
    let mut is_begun = count > 1;
    while let Some(event) = follow.next(Duration::MAX) {
        match event {
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
        }
    }
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
    let follow = match follower.start() {
        Ok(follow) => stopped_by(endings, follow)?,
        Err(error) => {
            // Said before the other process learns of it, and exits.
            let failure = Failure::Target(Subject::Program(program.clone()), error);
            messages.error(&failure.to_string(), failure.hint());
            return Ok(ExitCode::FAILURE);
        }
    };
    let mut is_begun = false;
    while let Some(event) = follow.next(Duration::MAX) {
        match event {
            FollowEvent::Set(report) => {
                let said = if is_begun {
                    trace::say_set(answer, &report)
                } else {
                    trace::say_started(answer, &program, &report)
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
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Has one of the signals stop the following. A thread waits for them, so that they are noticed while
/// an answer is being written that nobody reads.
fn stopped_by(endings: Endings, follow: Follow) -> Result<Arc<Follow>, Failure> {
    let follow = Arc::new(follow);
    let stopped = follow.clone();
    let wait = move || {
        loop {
            let mut signal = [PollFd::new(endings.as_fd(), PollFlags::POLLIN)];
            if poll(&mut signal, PollTimeout::NONE) != Err(Errno::EINTR) {
                return stopped.stop();
            }
        }
    };
    thread::Builder::new()
        .spawn(wait)
        .map_err(|source| Failure::Waiting("wait for signals", source))?;
    Ok(follow)
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
        FollowEvent::Missing { pid, error } => messages.about(*pid).warning(
            &format!("{error}, so far"),
            "it is followed for what it executes and loads",
        ),
        FollowEvent::Forked { parent, pid } => {
            messages.step(format_args!("process {parent} started process {pid}"));
        }
        FollowEvent::Executed { pid, program } => {
            messages.step(format_args!("process {pid} runs {}", program.display()));
        }
        FollowEvent::Detached { pid } => {
            messages.step(format_args!(
                "process {pid} has no probes, and was detached from"
            ));
        }
        FollowEvent::LoaderNotHooked { pid, reason } => messages.note(&format!(
            "objects that process {pid} loads later will not be seen: {reason}"
        )),
        FollowEvent::Exited { pid } => messages.step(format_args!("process {pid} exited")),
        _ => {}
    }
}
