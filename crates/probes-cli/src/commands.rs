//! The subcommands. Each has a file: its flags, what they mean, and what it does. The other files have
//! what several of them share.

mod attach;
mod changes;
mod count;
mod failures;
mod follow;
mod info;
mod latency;
mod list;
mod observe;
mod observe_loop;
mod open_target;
mod ps;
mod redraw;
mod restore;
mod top;
mod trace;
mod trace_observe;
mod wait;
mod watch;

use std::process::ExitCode;

use clap::Subcommand;

use crate::failure::Failure;
use crate::say;

/// A subcommand with its flags, checked as far as can be without the program it is about.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a program with its probes set before any of its code runs
    Trace(trace::Args),
    /// Change the probes of a running process, all or nothing
    Attach(attach::Args),
    /// Show the state of every probe of a running process, without stopping it
    Info(info::Args),
    /// Show the probes of a file that is not running
    List(list::Args),
    /// Count how often the probes of a running process are hit
    Count(count::Args),
    /// Show how long a running process takes from one probe to another
    Latency(latency::Args),
    /// Show the hits of a running process one by one, with their arguments
    Watch(watch::Args),
    /// Remove instrumentation left behind by a killed observer
    Observe(observe::Args),
    /// Show how often probes are hit, live, and switch them, on a terminal
    Top(top::Args),
    /// Show the running processes that have OCaml probes
    Ps(ps::Args),
    /// Print the version
    Version,
}

impl Command {
    /// Runs the command; returns the status to exit with.
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        match self {
            Command::Trace(args) => return trace::run(args),
            Command::Attach(args) => attach::run(&args),
            Command::Info(args) => info::run(&args),
            Command::List(args) => list::run(&args),
            Command::Count(args) => count::run(&args),
            Command::Latency(args) => latency::run(&args),
            Command::Watch(args) => watch::run(&args),
            Command::Observe(args) => observe::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Ps(args) => ps::run(&args),
            Command::Version => {
                say::print(concat!("ocaml-probes ", env!("CARGO_PKG_VERSION"), "\n"))
            }
        }
        .map(|()| ExitCode::SUCCESS)
    }
}
