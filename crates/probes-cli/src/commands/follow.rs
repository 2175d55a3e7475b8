//! `-follow`: follows processes and what they start, and reports what happens to them.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use probes_lib::{Actions, Follow, FollowEvent, Follower, Options, Report, Target};

use super::changes;
use super::step_failures::StepFailures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{Update, WarningKind};
use crate::signals::{TerminationSignals, block_all};

/// `attach -follow`: changes the targets, and follows them until interrupted.
pub(super) fn attach_and_follow(
    targets: Vec<Target>,
    actions: Actions,
    options: Options,
    output: &Output,
) -> Result<(), Failure> {
    let messages = output.messages;
    let (first, count) = (targets[0].pid(), targets.len());
    let signals = TerminationSignals::block()?;
    // No signal may stop this process: while it is stopped, those that it follows wait.
    block_all()?;
    let mut printer = ChangePrinter {
        output,
        interruptible: InterruptibleOutput::new(output, signals)?,
        is_forced: actions.is_forced(),
        is_interrupted: false,
        printed: Ok(()),
    };
    let follow = Follow::start(targets, actions, options).map_err(Failure::of_process(first))?;
    let mut failures: Vec<Failure> = Vec::new();
    // If the only target cannot be changed, its failure is returned, and the caller prints it: printed here, it would
    // appear twice.
    let mut reports_each_failure = count > 1;
    while let Some(event) = printer.next_event(&follow)? {
        match event {
            FollowEvent::Set(report) => {
                reports_each_failure = true;
                printer.print(&report);
            }
            FollowEvent::Failed { pid, error } => {
                let failure = Failure::of_process(pid)(error);
                if reports_each_failure {
                    messages.about(pid).failure(&failure);
                }
                failures.push(failure);
            }
            event => report_event(&messages, &event),
        }
    }
    let printed = printer.printed.and(printer.interruptible.end().1);
    let failure = match failures.len() {
        0 => return printed.and_then(|()| output.begin()),
        1 if !reports_each_failure => failures.remove(0),
        failed => Failure::NotSet(failed),
    };
    let mut failed = StepFailures::default();
    failed.add(printed);
    failed.add(Err(failure));
    failed.finish(&messages)
}

/// Prints what is changed in processes that are followed. An output that is not read does not keep a signal from ending it.
struct ChangePrinter<'o> {
    output: &'o Output,
    interruptible: InterruptibleOutput,
    is_forced: bool,
    /// Whether a termination signal has come.
    is_interrupted: bool,
    /// The first failure.
    printed: Result<(), Failure>,
}

impl ChangePrinter<'_> {
    /// Returns the next event; `None` if following is over, which a signal ends.
    fn next_event(&mut self, follow: &Follow) -> Result<Option<FollowEvent>, Failure> {
        loop {
            if !self.is_interrupted {
                self.is_interrupted = self.interruptible.signals().wait_to_read(follow.as_fd())?;
            }
            let timeout = if self.is_interrupted {
                follow.stop();
                Duration::MAX
            } else {
                Duration::ZERO
            };
            let event = follow.next(timeout);
            if event.is_some() || follow.is_over() {
                return Ok(event);
            }
        }
    }

    fn print(&mut self, report: &Report) {
        let messages = self.output.messages.about(report.pid);
        changes::say_about_changes(&messages, report, self.is_forced);
        let text = changes::text_of(self.output, Update::Changed, report, true);
        let printed = text.and_then(|text| {
            let printed = self.interruptible.write_after(self.is_interrupted, &text);
            printed.map_err(|failure| failure.after_doing("the probes were changed"))
        });
        match printed {
            Ok(next) => {
                self.is_interrupted = matches!(next, Next::Stop);
                changes::sum_up(self.output, &messages, report);
            }
            Err(failure) if self.printed.is_ok() => self.printed = Err(failure),
            Err(_) => {}
        }
    }
}

/// `trace -follow`: the part that runs in the process that follows the program.
pub(super) fn follow_launched(
    mut follower: Follower,
    output: &Output,
    program: &Path,
) -> Result<ExitCode, Failure> {
    let signals = TerminationSignals::block()?;
    let messages = output.messages;
    let follow = match follower.start() {
        Ok(follow) => stop_if_interrupted(signals, follow)?,
        Err(error) => {
            // Printed now: afterwards, the other process, the parent of the program, receives the error and exits.
            messages.failure(&Failure::of_program(program)(error));
            return Ok(ExitCode::FAILURE);
        }
    };
    let mut has_begun = false;
    while let Some(event) = follow.next(Duration::MAX) {
        // The output file is emptied only now: without an event, the program may not exist, and nothing was done.
        if let Err(failure) = output.begin() {
            messages.failure(&failure);
        }
        match event {
            FollowEvent::Set(report) => {
                let printed = if has_begun {
                    changes::print_number_changed(output, Update::Changed, &report)
                } else {
                    changes::print_started(output, program, &report)
                };
                has_begun = true;
                // The probes are set, whether the report can be written or not.
                if let Err(failure) = printed {
                    messages.failure(&failure);
                }
            }
            FollowEvent::Failed { pid, error } => {
                let failure = Failure::of_process(pid)(error);
                messages.about(pid).failure(&failure);
            }
            event => report_event(&messages, &event),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn stop_if_interrupted(
    signals: TerminationSignals,
    follow: Follow,
) -> Result<Arc<Follow>, Failure> {
    let follow = Arc::new(follow);
    let to_stop = follow.clone();
    signals.on_interrupt(move || to_stop.stop())?;
    Ok(follow)
}

fn report_event(messages: &Messages, event: &FollowEvent) {
    match event {
        FollowEvent::Missing { pid, error } => messages.about(*pid).warning(
            WarningKind::MissingProbes,
            &format!("{error}, so far"),
            "the process is followed: what it executes or loads later may have these probes",
        ),
        FollowEvent::Forked { parent, pid } => {
            messages.step(format_args!("process {parent} started process {pid}"));
        }
        FollowEvent::Executed { pid, program } => {
            messages.step(format_args!("process {pid} executed {}", program.display()));
        }
        FollowEvent::Detached { pid } => {
            messages.step(format_args!("detached from process {pid}: no probes"));
        }
        FollowEvent::Starved { pid } => messages.about(*pid).warning(
            WarningKind::Unfollowed,
            "not followed any more: it, or a process that it has forked, receives signals faster than \
             a tracer can resume it",
            "probes of what it forks, executes or loads from now on are not set: set them with `attach -pid`",
        ),
        FollowEvent::LoaderNotHooked { pid, reason } => messages.note(&format!(
            "objects that process {pid} loads later will not be seen: {reason}"
        )),
        FollowEvent::NotLent { reason } => messages.note(&format!(
            "other tools cannot stop what is followed: {reason}"
        )),
        FollowEvent::Exited { pid } => messages.step(format_args!("process {pid} exited")),
        _ => {}
    }
}
