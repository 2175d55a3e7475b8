//! `observe -clean`: puts back what an observation has left whose observer was killed.

use probes_lib::Options;

use super::observing;
use super::{Failure, Subject};
use crate::output;
use crate::request::Clean;

pub(super) fn run(request: &Clean) -> Result<(), Failure> {
    let target = observing::open(request.pid, &request.answer.messages)?;
    let cleaned = target.clean(Options::default());
    let failed = |error| Failure::Target(Subject::Process(request.pid), error);
    output::print_cleaned(request.answer.format, request.pid, cleaned.map_err(failed)?)
}
