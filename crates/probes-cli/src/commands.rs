//! The subcommands: each does what its request says and writes the answer.

mod attach;
mod clean;
mod count;
mod failures;
mod follow;
mod info;
mod latency;
mod list;
mod live;
mod observed;
mod observing;
mod ps;
mod put_back;
mod top;
mod trace;
mod wait;
mod watch;
mod whom;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use probes_lib::{ErrorKind, Report, Result, SourceMap, Target, UnreadableObject};

use crate::hint;
use crate::messages::Messages;
use crate::output::{self, Changes, Detail, Format};
use crate::request::{Answer, Request};

/// Why a command could not do what it was asked to.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The process or file did not allow it.
    Target(Subject, probes_lib::Error),
    /// Something could not be done to some of several processes, which was said of each.
    Several {
        failed: usize,
        total: usize,
        /// What became of the others.
        rest: &'static str,
    },
    /// The probes of so many processes that were followed could not be set, which was said of each.
    FollowEvent(usize),
    /// No process with probes runs a program of that name.
    NobodyCalled(String),
    /// The processes could not be listed.
    Survey(probes_lib::Error),
    /// The answer could not be written.
    Output(io::Error),
    /// What was asked for was done, but the answer could not be written.
    Unanswered(String, io::Error),
    /// What was to be so for a time stays so: why, and what to do by hand.
    NotPutBack(probes_lib::Error, String),
    /// A process stays observed: why.
    NotRemoved(i32, probes_lib::Error),
    /// These probes stay as they are, though the others were put back; and what to do by hand.
    LeftOver(String, String),
    /// A file that was to be written cannot be.
    File(PathBuf, io::Error),
    /// There is no terminal for a screen about a process: why.
    NoTerminal(String, i32),
    /// We cannot wait for the time to be over, or for a program to end.
    Waiting(&'static str, io::Error),
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
    /// The same, once what was changed has been put back.
    fn after_putting_back(self) -> Failure {
        match self {
            Failure::Unanswered(_, error) => {
                Failure::Unanswered("what was changed was put back".to_owned(), error)
            }
            failure => failure,
        }
    }

    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Failure::Target(subject, error) => hint::of(error.kind(), subject),
            // It is about no process.
            Failure::Survey(error) => hint::of(error.kind(), &Subject::Process(0)),
            Failure::NotPutBack(_, hint) => Some(hint.clone()),
            Failure::NotRemoved(pid, _) => Some(format!(
                "`ocaml-probes observe -clean -pid {pid}` puts everything back"
            )),
            Failure::LeftOver(_, hint) => Some(format!("once it is gone, {hint}")),
            Failure::NobodyCalled(_) => {
                Some("`ocaml-probes ps` lists those that there are".to_owned())
            }
            Failure::NoTerminal(_, pid) => Some(format!(
                "`ocaml-probes count -pid {pid} -interval 1s` prints lines instead"
            )),
            Failure::Several { .. }
            | Failure::FollowEvent(_)
            | Failure::Output(_)
            | Failure::Unanswered(..)
            | Failure::File(..)
            | Failure::Waiting(..) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Target(_, error) | Failure::Survey(error) => error.fmt(f),
            Failure::Output(error) => {
                write!(f, "cannot write the answer: {}", reason(error))
            }
            Failure::Several {
                failed,
                total,
                rest,
            } => {
                write!(f, "{failed} of {total} processes failed")?;
                let separator = if rest.is_empty() { "" } else { "; " };
                write!(f, "{separator}{rest}")
            }
            Failure::FollowEvent(1) => f.write_str("the probes of one process could not be set"),
            Failure::FollowEvent(count) => {
                write!(f, "the probes of {count} processes could not be set")
            }
            Failure::NobodyCalled(name) => {
                write!(
                    f,
                    "no process with OCaml probes runs a program called {name}"
                )
            }
            Failure::NotPutBack(error, _) => {
                write!(f, "cannot put back what was changed for a time: {error}")
            }
            Failure::NotRemoved(pid, error) => {
                write!(f, "process {pid} stays observed: {error}")
            }
            Failure::LeftOver(names, _) => write!(
                f,
                "cannot put back {names}: something else, such as a breakpoint, is in their code"
            ),
            Failure::File(path, error) => {
                write!(f, "cannot write {}: {}", path.display(), reason(error))
            }
            Failure::NoTerminal(why, _) => write!(f, "top needs a terminal, and {why}"),
            Failure::Waiting(what, error) => write!(f, "cannot {what}: {}", reason(error)),
            Failure::Unanswered(done, error) => {
                write!(f, "cannot write the answer: {}; {done}", reason(error))
            }
        }
    }
}

/// The system's reason without Rust's "(os error 28)".
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error")
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// Writes the answer to a change that has been made, which is not undone for want of an answer.
fn answer_change(
    format: Format,
    report: &Report,
    several: bool,
    done: impl FnOnce() -> String,
) -> Result<(), Failure> {
    match output::print_changes(format, &Changes::of(report), several) {
        Err(Failure::Output(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Unanswered(done(), error))
        }
        answered => answered,
    }
}

/// Does what is asked for; says with which status to exit.
pub(crate) fn run(request: Request) -> Result<ExitCode, Failure> {
    match request {
        Request::Trace(request) => return trace::run(request),
        Request::Attach(request) => attach::run(&request),
        Request::Info(request) => info::run(&request),
        Request::List(request) => list::run(&request),
        Request::Ps(request) => ps::run(&request),
        Request::Count(request) => count::run(&request),
        Request::Latency(request) => latency::run(&request),
        Request::Watch(request) => watch::run(&request),
        Request::Clean(request) => clean::run(&request),
        Request::Top(request) => top::run(&request),
    }
    .map(|()| ExitCode::SUCCESS)
}

/// What to show of each probe. Source lines are read only if they are shown, because that takes
/// longer than everything else; a program without them can be worked on as well.
fn detail(
    answer: Answer,
    sites: bool,
    source_maps: impl IntoIterator<Item = Result<SourceMap>>,
) -> Detail {
    if !sites && answer.format != Format::Json {
        return Detail::default();
    }
    let or_none = |source_map: Result<SourceMap>| {
        source_map
            .inspect_err(|error| {
                answer.messages.step(format_args!(
                    "functions and source lines are left out: {error}"
                ));
            })
            .ok()
    };
    Detail {
        sites: true,
        sources: source_maps.into_iter().map(or_none).collect(),
    }
}

/// Says what was found at a pid.
fn say_what(messages: &Messages, target: &Target) {
    let (pid, program) = (target.pid(), target.program().display());
    messages.step(format_args!("process {pid} runs {program}"));
    for object in target.objects() {
        messages.step(format_args!(
            "{} has {} probes; load bias {}",
            object.path().display(),
            object.table().probes().len(),
            object.load_bias()
        ));
    }
    warn_of_passed_over(messages, target);
}

/// Names the files that could not be looked into, which may have probes as well.
fn warn_of_passed_over(messages: &Messages, target: &Target) {
    let is_nameless = |one: &UnreadableObject| matches!(one.why.kind(), ErrorKind::Nameless { .. });
    let (nameless, others): (Vec<_>, Vec<_>) =
        target.unreadable().into_iter().partition(is_nameless);
    let warn = |why: &str, kind: &ErrorKind| {
        let hint = hint::of(kind, &Subject::Process(target.pid()));
        let hint = hint.unwrap_or_else(|| "the probes of all other files are there".to_owned());
        messages.warning(&format!("passed over: {why}"), &hint);
    };
    for one in &others {
        warn(&one.why.to_string(), one.why.kind());
    }
    match nameless.as_slice() {
        [] => {}
        [one] => warn(&one.why.to_string(), one.why.kind()),
        // All libraries of a program, perhaps, after the system was upgraded.
        [first, ..] => {
            let paths = nameless.iter().map(|one| one.path.display().to_string());
            let mut paths: Vec<String> = paths.collect();
            paths.sort();
            let names = few(&paths).unwrap_or_default();
            let why = format!("cannot open files that have no name any more: {names}");
            warn(&why, first.why.kind());
        }
    }
}

/// Names the probes that were off already.
fn say_passed_over(messages: &Messages, report: &Report) {
    if let Some(names) = few(&report.skipped) {
        messages.note(&format!("passed over, off already: {names}"));
    }
}

/// As many of the names as fit on a line; `None` if there are none.
pub(crate) fn few(names: &[impl AsRef<str>]) -> Option<String> {
    const FEW: usize = 8;
    let shown: Vec<&str> = names.iter().take(FEW).map(AsRef::as_ref).collect();
    let text = shown.join(", ");
    match names.len() - shown.len() {
        _ if shown.is_empty() => None,
        0 => Some(text),
        more => Some(format!("{text} and {more} more")),
    }
}
