//! `list`: the probes of a file that is not running.

use std::path::PathBuf;

use probes_lib::{Linking, ProbeTable, SourceMap};

use super::open_target::detail;
use crate::failure::Failure;
use crate::flags::{Checked, OutputFlags, PathFlags};
use crate::hint::Operand;
use crate::output::{self, Listing};
use crate::text::number_of;

const HELP: &str = "\
In plain format, it prints one name on each line, sorted. With -sites, below each name
    site ADDRESS FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS
with addresses in the file; `-` stands for what the file does not tell.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes list -prog FILE [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    /// The file, as a path: it is not looked up in PATH
    #[arg(short, long, value_name = "FILE")]
    prog: PathBuf,
    /// Also show each site and semaphore
    #[arg(long)]
    sites: bool,
    #[command(flatten)]
    paths: PathFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let output = args.output.open()?;
    let file = &args.prog;
    let table = ProbeTable::read(file)
        .map_err(|error| Failure::Target(Operand::File(file.clone()), error))?;
    let linking = match table.linking() {
        Linking::Fixed => "linked to fixed addresses",
        Linking::PositionIndependent => "position independent",
    };
    output.messages.step(format_args!(
        "{} has {} probes and is {linking}",
        file.display(),
        table.probes().len()
    ));
    let sources = std::iter::once_with(|| SourceMap::read(file));
    let detail = detail(&output, args.sites, args.paths.form(), sources);
    let listing = Listing::of_file(&table, &detail);
    let text = output::listing(output.format, &listing, args.sites, false)?;
    output.print(&text)?;
    let probes = table.probes().len();
    output.sum_up(&output.messages, probes, || {
        let sites = table.probes().map(|probe| probe.sites().len()).sum();
        let (probes, sites) = (number_of(probes, "probe"), number_of(sites, "site"));
        format!("{probes}, {sites}")
    });
    Ok(())
}
