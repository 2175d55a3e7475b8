//! `observe -clean`: puts back what an observation has left whose observer was killed.

use probes_lib::Options;

use super::observing;
use super::{Failure, Subject};
use crate::messages::Messages;
use crate::output;
use crate::request::Clean;

pub(super) fn run(request: &Clean) -> Result<(), Failure> {
    let target = observing::open(request.pid, &request.answer.messages)?;
    let cleaned = target.clean(Options::default());
    let failed = |error| Failure::Target(Subject::Process(request.pid), error);
    let cleaned = cleaned.map_err(failed)?;
    output::print_cleaned(request.answer.format, request.pid, cleaned)?;
    say_still_mapped(&request.answer.messages, request.pid, cleaned.still_mapped);
    Ok(())
}

/// Says that memory stays mapped in a process that is not observed any more.
pub(super) fn say_still_mapped(messages: &Messages, pid: i32, bytes: u64) {
    if bytes > 0 {
        let why = "a thread may still return there, or the process has a seccomp filter of its own";
        messages.warning(
            &format!("{bytes} bytes stay mapped in process {pid}, which does no harm: {why}"),
            &format!("`ocaml-probes observe -clean -pid {pid}` unmaps them when it may"),
        );
    }
}
