//! Which process a command looks at: one that runs, or a program that it starts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::pid;

// A process, or a program to start. A doc comment would be the help of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct ProcessOrProgram {
    #[command(flatten)]
    one: PidOrProgram,
    /// Arguments of the program
    #[arg(
        last = true,
        id = "argument",
        value_name = "ARGS",
        help_heading = "Arguments",
        conflicts_with = "pid"
    )]
    arguments: Vec<OsString>,
}

// A doc comment would be the help of the command.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct PidOrProgram {
    /// The process
    #[arg(short, long, value_name = "N", value_parser = pid)]
    pid: Option<i32>,
    /// The program to start; with no slash in it, it is looked up in PATH
    #[arg(long, value_name = "FILE")]
    prog: Option<PathBuf>,
}

/// The one of the two that was given.
pub(crate) enum GivenTarget<'f> {
    Process(i32),
    Program {
        path: &'f Path,
        arguments: &'f [OsString],
    },
}

impl ProcessOrProgram {
    pub(crate) fn given(&self) -> GivenTarget<'_> {
        match (self.one.pid, &self.one.prog) {
            (Some(pid), _) => GivenTarget::Process(pid),
            // The flags are checked: one of them is given.
            (None, program) => GivenTarget::Program {
                path: program.as_deref().unwrap_or(Path::new("")),
                arguments: &self.arguments,
            },
        }
    }

    pub(crate) fn is_process(&self) -> bool {
        matches!(self.given(), GivenTarget::Process(_))
    }
}
