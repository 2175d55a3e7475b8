//! `attach`: changes the probes of a running process.

use std::time::Duration;

use probes_lib::{Options, ProbeChange, Report, Target};

use super::{Failure, Subject, answer_change, few, say_passed_over, say_what};
use crate::messages::Messages;
use crate::request::Attach;

pub(super) fn run(request: &Attach) -> Result<(), Failure> {
    let (pid, messages) = (request.pid, request.answer.messages);
    let failed = |error| Failure::Target(Subject::Process(pid), error);
    let target = Target::open_to_change(pid).map_err(failed)?;
    say_what(&messages, &target);
    let options = Options {
        gigatext: request.gigatext,
        ..Options::default()
    };
    let report = target
        .update_with(&request.actions, options)
        .map_err(failed)?;
    say_passed_over(&messages, &report);
    say_still_on(&messages, pid, &report);
    if report.stopped > Duration::ZERO {
        messages.note(&format!("stopped {} us", report.stopped.as_micros()));
    }
    answer_change(request.answer.format, &report, || {
        "the probes were changed".to_owned()
    })
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
