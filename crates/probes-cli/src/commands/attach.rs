//! `attach`: changes the probes of a running process.

use probes_lib::{Options, Target};

use super::{Failure, Subject, say_passed_over};
use crate::output::{self, Changes};
use crate::request::Attach;

pub(super) fn run(request: &Attach) -> Result<(), Failure> {
    let (pid, messages) = (request.pid, request.answer.messages);
    let failed = |error| Failure::Target(Subject::Process(pid), error);
    let target = Target::open(pid).map_err(failed)?;
    messages.step(format_args!(
        "process {pid} runs {}, which has {} probes; load bias {}",
        target.program().display(),
        target.table().probes().len(),
        target.load_bias()
    ));
    let options = Options {
        gigatext: request.gigatext,
        ..Options::default()
    };
    let report = target
        .update_with(&request.actions, options)
        .map_err(failed)?;
    say_passed_over(&messages, &report);
    messages.note(&format!("stopped {} us", report.stopped.as_micros()));
    output::print_changes(request.answer.format, &Changes::of(&report))
}
