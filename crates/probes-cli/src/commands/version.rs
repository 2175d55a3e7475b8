//! `version`: which version of the tool this is.

use crate::failure::Failure;
use crate::flags::{Checked, OutputFlags};
use crate::output;

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes version [FLAGS]")]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let output = args.output.open()?;
    output.print(&output::release(output.format)?)
}
