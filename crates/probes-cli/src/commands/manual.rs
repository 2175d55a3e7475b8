//! `man`: the manual pages, from the same definition as the help.

mod page;

use std::fs;
use std::path::PathBuf;

use clap::Command;

use crate::destination::print;
use crate::failure::Failure;
use crate::spelling::there_are;
use crate::usage::UsageError;

const HELP: &str = "\
To read the page of a subcommand:
    ocaml-probes man latency | man -l -
With -all it writes a page for ocaml-probes, and one for each subcommand, into a directory, which is
created if it is missing.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes man [SUBCOMMAND | -all DIRECTORY]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    /// The subcommand; without it, the page is about all of them
    #[arg(value_name = "SUBCOMMAND")]
    subcommand: Option<String>,
    /// Write all pages into DIRECTORY
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "subcommand")]
    all: Option<PathBuf>,
}

/// `root` is the definition of the command line with all flags.
pub(super) fn run(args: &Args, root: &Command) -> Result<(), Failure> {
    let shown = || root.get_subcommands().filter(|it| !it.is_hide_set());
    if let Some(directory) = &args.all {
        let failed = |path: &PathBuf| {
            let path = path.clone();
            move |error| Failure::WriteFile(path, error)
        };
        fs::create_dir_all(directory).map_err(failed(directory))?;
        let pages = std::iter::once(page::of_tool(root));
        for page in pages.chain(shown().map(page::of_subcommand)) {
            let path = directory.join(format!("{}.1", page.name));
            fs::write(&path, page.text).map_err(failed(&path))?;
        }
        return Ok(());
    }
    match &args.subcommand {
        None => print(&page::of_tool(root).text),
        Some(name) => match shown().find(|it| it.get_name() == name) {
            Some(subcommand) => print(&page::of_subcommand(subcommand).text),
            None => {
                let message = format!("no subcommand \"{name}\"; {}", there_are(root));
                Err(Failure::Usage(UsageError::new(Some("man"), message)))
            }
        },
    }
}
