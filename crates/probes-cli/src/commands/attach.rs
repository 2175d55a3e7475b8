//! `attach`: changes the probes of a running process.

use std::time::Duration;

use probes_lib::{Options, ProbeChange, Report, Target};

use super::put_back::{Endings, Over, put_back, refuse_leftovers};
use super::{Failure, Subject, answer_change, few, say_passed_over, say_what};
use crate::messages::Messages;
use crate::request::Attach;

pub(super) fn run(request: &Attach) -> Result<(), Failure> {
    let (pid, messages) = (request.pid, request.answer.messages);
    let failed = |error| Failure::Target(Subject::Process(pid), error);
    let target = Target::open_to_change(pid).map_err(failed)?;
    say_what(&messages, &target);
    let options = Options {
        live: request.live,
        gigatext: request.gigatext,
        ..Options::default()
    };
    // From here on, so that what is changed is put back whenever they come.
    let endings = match request.duration {
        Some(duration) => Some((Endings::hold_back()?, duration)),
        None => None,
    };
    let report = target
        .update_with(&request.actions, options)
        .map_err(failed)?;
    let answered = answer(request, &report);
    let Some((endings, duration)) = endings else {
        return answered;
    };
    if !report.changed.iter().any(is_change) {
        messages.note("nothing was changed, and there is nothing to put back");
        return answered;
    }
    messages.note(&format!(
        "to be put back in {}, or on Ctrl-C",
        humantime::format_duration(duration)
    ));
    let over = endings.wait(&target, duration);
    match &over {
        Ok(Over::Time) | Err(_) => {}
        Ok(Over::Told) => messages.step(format_args!("told to end")),
        Ok(Over::Exited) => messages.step(format_args!("process {pid} has ended")),
    }
    // Whatever has gone wrong so far, it is put back.
    let answered = answered.map_err(|failure| match failure {
        Failure::Unanswered(_, error) => Failure::Unanswered(PUT_BACK.to_owned(), error),
        failure => failure,
    });
    if let Some(back) = put_back(&target, &report, options, &endings, &messages)? {
        if let Some(names) = few(&back.passed_over) {
            messages.note(&format!("nothing is left to put back of {names}"));
        }
        say(&request.answer.messages, pid, &back);
        answer_change(request.answer.format, &back, || PUT_BACK.to_owned())?;
        refuse_leftovers(&report, &back)?;
    }
    over.and(answered)
}

const PUT_BACK: &str = "what was changed was put back";

/// Whether anything has changed.
fn is_change(change: &ProbeChange) -> bool {
    change.before != change.after || change.sites > 0
}

/// Says what was done.
fn answer(request: &Attach, report: &Report) -> Result<(), Failure> {
    let messages = request.answer.messages;
    say_passed_over(&messages, report);
    say(&messages, request.pid, report);
    answer_change(request.answer.format, report, || {
        "the probes were changed".to_owned()
    })
}

/// Says what is to be known beside what has changed.
fn say(messages: &Messages, pid: i32, report: &Report) {
    say_still_on(messages, pid, report);
    if report.stopped > Duration::ZERO {
        messages.note(&format!("stopped {} us", report.stopped.as_micros()));
    }
}

/// Names the probes that were disabled and stay on, because others have enabled them as well.
fn say_still_on(messages: &Messages, pid: i32, report: &Report) {
    let still_on = |change: &&ProbeChange| change.after > 0 && change.after < change.before;
    let names = report.changed.iter().filter(still_on);
    let names: Vec<String> = names
        .map(|change| format!("{} ({})", change.name, change.after))
        .collect();
    if let Some(names) = few(&names) {
        messages.warning(
            &format!("still on, as others have enabled them too: {names}"),
            &format!("`ocaml-probes attach -pid {pid} -force` with -disable or -disable-all turns them off for all"),
        );
    }
}
