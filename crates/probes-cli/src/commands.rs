//! The subcommands: each does what its request says and writes the answer.

mod attach;
mod info;
mod list;
mod trace;

use std::fmt;
use std::io;
use std::path::PathBuf;

use probes_lib::{Report, Result, SourceMap};

use crate::hint;
use crate::messages::Messages;
use crate::output::{Detail, Format};
use crate::request::{Answer, Request};

/// Why a command could not do what it was asked to.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The process or file did not allow it.
    Target(Subject, probes_lib::Error),
    /// The answer could not be written.
    Output(io::Error),
}

/// What a command is about.
#[derive(Debug)]
pub(crate) enum Subject {
    /// A running process.
    Process(i32),
    /// A file that is to be run.
    Program(PathBuf),
    /// A file that is to be read.
    File(PathBuf),
}

impl Failure {
    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Failure::Target(subject, error) => hint::of(error.kind(), subject),
            Failure::Output(_) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Target(_, error) => error.fmt(f),
            Failure::Output(error) => {
                let text = error.to_string();
                let reason = text.split(" (os error").next().unwrap_or_default();
                write!(f, "cannot write the answer: {reason}")
            }
        }
    }
}

/// Does what is asked for.
pub(crate) fn run(request: Request) -> Result<(), Failure> {
    match request {
        Request::Trace(request) => trace::run(request),
        Request::Attach(request) => attach::run(&request),
        Request::Info(request) => info::run(&request),
        Request::List(request) => list::run(&request),
    }
}

/// What to show of each probe. Source lines are read only if they are shown, because that takes
/// longer than everything else; a program without them can be worked on as well.
fn detail(answer: Answer, sites: bool, source_map: impl FnOnce() -> Result<SourceMap>) -> Detail {
    if !sites && answer.format != Format::Json {
        return Detail::default();
    }
    let source = source_map()
        .inspect_err(|error| {
            answer.messages.step(format_args!(
                "functions and source lines are left out: {error}"
            ));
        })
        .ok();
    Detail {
        sites: true,
        source,
    }
}

/// Names the probes that were off already, as far as they fit on a line.
fn say_passed_over(messages: &Messages, report: &Report) {
    const FEW: usize = 8;
    let names = &report.passed_over;
    let Some(shown) = names
        .get(..names.len().min(FEW))
        .filter(|names| !names.is_empty())
    else {
        return;
    };
    let more = match names.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    messages.note(&format!(
        "passed over, off already: {}{more}",
        shown.join(", ")
    ));
}
