//! `list`: the probes of a file that is not running.

use probes_lib::{Linking, ProbeTable, SourceMap};

use super::{Failure, Subject, detail};
use crate::output::{self, Listing};
use crate::request::List;

pub(super) fn run(request: &List) -> Result<(), Failure> {
    let (file, answer) = (&request.file, request.answer);
    let table = ProbeTable::read(file)
        .map_err(|error| Failure::Target(Subject::File(file.clone()), error))?;
    let linking = match table.linking() {
        Linking::Fixed => "linked to fixed addresses",
        Linking::PositionIndependent => "position independent",
    };
    answer.messages.step(format_args!(
        "{} has {} probes and is {linking}",
        file.display(),
        table.probes().len()
    ));
    let detail = detail(
        answer,
        request.sites,
        std::iter::once_with(|| SourceMap::read(file)),
    );
    let listing = Listing::of_file(&table, &detail);
    output::print_listing(answer.format, &listing, request.sites, false)
}
