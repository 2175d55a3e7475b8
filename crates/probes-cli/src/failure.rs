//! [`Failure`]: why a command failed, in words, with the exit status and the hint that go with it; and the
//! sets of library errors that commands treat alike.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use probes_lib::{Effect, Error, ErrorKind, FileError, ObserveError, ProcessError};

use crate::hint::{self, CommandTarget};
use crate::text::{number_of, number_that_were};
use crate::usage::UsageError;

/// Why a command failed. Each variant is a `kind` in JSON, except those of the library's errors.
#[derive(Debug, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Failure {
    /// A usage error.
    Usage(UsageError),
    /// The library's error about a process or file.
    Target(CommandTarget, Error),
    /// Some of several processes failed; each failure was reported when it happened.
    Several {
        failed: usize,
        total: usize,
        /// What became of the others.
        outcome: &'static str,
    },
    /// The probes of this many followed processes could not be set; each failure was reported when it
    /// happened.
    NotSet(usize),
    /// No process runs a program whose name matches, or none with probes, if these are asked for.
    NoProcessNamed { name: String, needs_probes: bool },
    /// The processes could not be listed.
    Survey(Error),
    /// The output could not be written.
    Output {
        /// The file of -o, if it was to be written there.
        file: Option<PathBuf>,
        source: io::Error,
    },
    /// What was asked for was done, but the output could not be written; the failure says why.
    DoneUnwritten(String, Box<Failure>),
    /// A temporary change could not be undone: why, and which command undoes it.
    NotUndone {
        error: Error,
        /// What the user can do.
        hint: String,
        /// Whether undoing it stops no thread (-live).
        is_live: bool,
    },
    /// The changes of these probes were not undone, though the others were; and which command undoes them.
    PartlyUndone(String, String),
    /// An observation could not be removed from a process.
    NotRemoved(i32, Error),
    /// A file that was to be written cannot be.
    WriteFile(PathBuf, io::Error),
    /// A program that was started has written no runtime events.
    NoRuntimeEvents {
        program: PathBuf,
        /// What the user can do.
        hint: String,
    },
    /// A file could not be written to its end: how many bytes of it were.
    CutFile(PathBuf, u64, io::Error),
    /// A file could not be written, and is as it was before.
    KeptFile(PathBuf, io::Error),
    /// A program that was to be profiled cannot be started.
    StartProgram(PathBuf, io::Error),
    /// More processes are to be observed than is possible: how many are observed already.
    TooManyProcesses(usize),
    /// No client can be served at this address.
    Listen(SocketAddr, io::Error),
    /// There is no terminal to show a process on: why.
    NoTerminal(String, i32),
    /// The tool has too little memory to begin: how many bytes have to be free.
    NoMemory { needed: usize },
    /// A system call of the tool itself failed: what it was to do.
    System(&'static str, io::Error),
}

impl Failure {
    /// The library's error about a process.
    pub(crate) fn of_process(pid: i32) -> impl Fn(Error) -> Failure {
        move |error| Failure::Target(CommandTarget::Process(pid), error)
    }

    /// The same about a program that is started.
    pub(crate) fn of_program(program: &Path) -> impl Fn(Error) -> Failure {
        move |error| Failure::Target(CommandTarget::Program(program.to_owned()), error)
    }

    /// We cannot wait for the program that we have started.
    pub(crate) fn of_waiting(source: io::Error) -> Failure {
        Failure::System("wait for the program", source)
    }

    /// A `program` that was started has written no runtime events.
    pub(crate) fn without_events(program: &Path) -> Failure {
        Failure::NoRuntimeEvents {
            program: program.to_owned(),
            hint: hint::without_events(program),
        }
    }

    /// The same for a process that `attach` was to change.
    pub(crate) fn of_attached(pid: i32) -> impl Fn(Error) -> Failure {
        move |error| Failure::Target(CommandTarget::Attached(pid), error)
    }

    /// An observation of a process could not be removed. This is [`Failure::NotRemoved`] only if we still
    /// observe the process: not if another observer has replaced this one, or if only memory is left.
    pub(crate) fn of_removal(pid: i32, error: Error) -> Failure {
        if error.is_replaced() || error.effect() == Effect::StillMapped {
            Failure::Target(CommandTarget::Process(pid), error)
        } else {
            Failure::NotRemoved(pid, error)
        }
    }

    /// The output could not be written, or not be made.
    pub(crate) fn of_output(source: io::Error) -> Failure {
        let file = None;
        Failure::Output { file, source }
    }

    /// A failure to write the output, after what was asked for was `done`.
    pub(crate) fn after_doing(self, done: &str) -> Failure {
        match self {
            Failure::Output { .. } if !self.is_closed_pipe() => {
                Failure::DoneUnwritten(done.to_owned(), Box::new(self))
            }
            failure => failure,
        }
    }

    /// The failure to write what was changed, if that is undone by the time it is reported.
    pub(crate) fn after_undoing(self) -> Failure {
        self.after_doing("what was changed was undone")
    }

    /// Whether the reader of the output has gone: it does not want the rest.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Failure::Output { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }

    /// 2 for a usage error, otherwise 1.
    pub(crate) fn exit_status(&self) -> ExitCode {
        match self {
            Failure::Usage(_) => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }

    /// A name for programs, which stays the same when messages change.
    pub(crate) fn kind(&self) -> String {
        match self {
            Failure::Target(_, error) | Failure::Survey(error) => error.kind().name(),
            failure => <&str>::from(failure).to_owned(),
        }
    }

    /// The process that it is about, if it is about one.
    pub(crate) fn pid(&self) -> Option<i32> {
        match self {
            Failure::Target(CommandTarget::Process(pid) | CommandTarget::Attached(pid), _)
            | Failure::NotRemoved(pid, _)
            | Failure::NoTerminal(_, pid) => Some(*pid),
            Failure::Target(_, error) | Failure::NotUndone { error, .. } => error.pid(),
            _ => None,
        }
    }

    /// Lines that show the place in an expression, if it is about one.
    pub(crate) fn marked(&self) -> Option<String> {
        match self {
            Failure::Usage(error) => error.marked().map(str::to_owned),
            Failure::Target(_, error) => match error.kind() {
                ErrorKind::Observe(
                    ObserveError::Expression(bad) | ObserveError::LongExpression(bad),
                ) => Some(bad.marked()),
                _ => None,
            },
            _ => None,
        }
    }

    /// What to do about it.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Failure::Usage(error) => Some(error.hint()),
            Failure::Target(operand, error) => hint::of(error, operand),
            // The error is about no process.
            Failure::Survey(error) => hint::of(error, &CommandTarget::Process(0)),
            Failure::NotUndone {
                error,
                hint,
                is_live,
            } if error.is_transient() => {
                // -live, too, has to wait for an update of another tool.
                let at_once = if error.is_being_updated() || *is_live {
                    ""
                } else {
                    "; with -live, at once"
                };
                Some(format!(
                    "once no other tool traces, stops or updates it, {hint}{at_once}"
                ))
            }
            Failure::NotUndone { hint, .. } | Failure::NoRuntimeEvents { hint, .. } => {
                Some(hint.clone())
            }
            Failure::NotRemoved(pid, error) => Some(format!(
                "`{}ocaml-probes observe -clean -pid {pid}` removes the observation",
                hint::sudo_after(error)
            )),
            Failure::PartlyUndone(_, hint) => Some(format!("once those bytes are gone, {hint}")),
            Failure::NoProcessNamed {
                needs_probes: true, ..
            } => Some(
                "`ocaml-probes ps` lists the processes with probes; `count -fn GLOB` counts functions of any program, \
                 `latency -fn GLOB` times them"
                    .to_owned(),
            ),
            Failure::NoProcessNamed { .. } => Some(
                "the name is that of the program's file, to which `/proc/PID/exe` points"
                    .to_owned(),
            ),
            Failure::NoTerminal(_, pid) => Some(format!(
                "`ocaml-probes count -pid {pid} -interval 1s` prints lines instead"
            )),
            Failure::NoMemory { .. } => Some(hint::LIMITED.to_owned()),
            Failure::TooManyProcesses(_) => Some(
                "narrow -name, or run several `serve`, each with its own -name and port".to_owned(),
            ),
            Failure::Listen(address, error) => hint::of_listen(*address, error),
            Failure::Several { .. }
            | Failure::NotSet(_)
            | Failure::Output { .. }
            | Failure::DoneUnwritten(..)
            | Failure::WriteFile(..)
            | Failure::CutFile(..)
            | Failure::KeptFile(..)
            | Failure::StartProgram(..)
            | Failure::System(..) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(error) => error.fmt(f),
            Failure::Target(_, error) | Failure::Survey(error) => error.fmt(f),
            Failure::Output { file, source } => {
                f.write_str("cannot write the output")?;
                if let Some(path) = file {
                    write!(f, " to {}", path.display())?;
                }
                write!(f, ": {}", reason(source))
            }
            Failure::DoneUnwritten(done, unwritten) => write!(f, "{unwritten}; {done}"),
            Failure::Several {
                failed,
                total,
                outcome,
            } => {
                write!(f, "failed for {failed} of {}", number_of(*total, "process"))?;
                let separator = if outcome.is_empty() { "" } else { "; " };
                write!(f, "{separator}{outcome}")
            }
            Failure::NotSet(1) => f.write_str("the probes of one process could not be set"),
            Failure::NotSet(count) => {
                write!(f, "the probes of {count} processes could not be set")
            }
            Failure::NoProcessNamed { name, needs_probes } => {
                let with_probes = if *needs_probes {
                    " with OCaml probes"
                } else {
                    ""
                };
                write!(
                    f,
                    "no process{with_probes} runs a program whose name matches \"{name}\""
                )
            }
            Failure::NotUndone { error, .. } => {
                write!(f, "cannot undo the temporary change: {error}")
            }
            Failure::PartlyUndone(names, _) => write!(
                f,
                "cannot undo the changes of {names}: their sites hold other bytes, such as a breakpoint"
            ),
            Failure::NotRemoved(pid, error) => {
                write!(
                    f,
                    "process {pid} is still observed, because removing the observation failed: {error}"
                )
            }
            Failure::WriteFile(path, error) => {
                write!(f, "cannot write {}: {}", path.display(), reason(error))
            }
            Failure::KeptFile(path, error) => {
                let (path, why) = (path.display(), reason(error));
                write!(
                    f,
                    "cannot write {path}: {why}; the file is as it was before"
                )
            }
            Failure::NoRuntimeEvents { program, .. } => {
                write!(f, "{} has written no runtime events", program.display())
            }
            Failure::CutFile(path, len, error) => {
                write!(
                    f,
                    "cannot write more to {}: {}",
                    path.display(),
                    reason(error)
                )?;
                if *len == 0 {
                    return Ok(());
                }
                write!(
                    f,
                    "; {} written and can be read",
                    number_that_were(*len, "byte")
                )
            }
            Failure::StartProgram(path, error) => {
                write!(f, "cannot start {}: {}", path.display(), reason(error))
            }
            Failure::NoTerminal(why, _) => write!(f, "top needs a terminal, but {why}"),
            Failure::NoMemory { needed } => write!(
                f,
                "too little memory: {} MiB have to be free to begin; nothing was changed",
                needed >> 20
            ),
            Failure::TooManyProcesses(most) => {
                write!(
                    f,
                    "cannot observe more processes: {most} are observed already, which is the limit"
                )
            }
            Failure::Listen(address, error) => {
                write!(f, "cannot listen at {address}: {}", reason(error))
            }
            Failure::System(what, error) => write!(f, "cannot {what}: {}", reason(error)),
        }
    }
}

/// The system's reason without Rust's "(os error 28)": in the words of strerror(3), as other commands print them, also
/// where the library has nix's.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error")
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// What may have become of a process of which no more runtime events can be read.
pub(crate) const NO_MORE_EVENTS: &str =
    "has exited, has executed a new program, or writes no more events";

/// What has become of a process in which there is nothing left to undo: it has exited, or executed a new
/// program.
pub(crate) fn exit_or_exec(error: &Error) -> Option<&'static str> {
    if error.is_exec() {
        return Some("has executed a new program");
    }
    error.is_gone().then_some("has exited")
}

/// Whether a process is refused only because it has no probes, or the notes of its probes cannot be used: it may have
/// functions.
pub(crate) fn may_have_functions(error: &Error) -> bool {
    let is_about_probes = matches!(
        error.kind(),
        ErrorKind::Process(ProcessError::Bytecode)
            | ErrorKind::File(
                FileError::MalformedNote(_)
                    | FileError::WrongNote { .. }
                    | FileError::UnknownLayout { .. }
            )
    );
    is_about_probes || error.is_missing_name()
}

/// Whether a file could not be opened because no path leads to it any more: it has been deleted or
/// replaced, or exists only in memory.
pub(crate) fn is_deleted_or_replaced(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::File(FileError::Nameless { .. }))
}
