//! What can keep a program from being started. Each text names the program as it was given, or
//! continues a sentence that begins with its name.

use std::io;
use std::path::PathBuf;

use nix::sys::signal::Signal;

use super::{Denial, reason};

/// Why a program was not started with its probes set; displayed with the program by [`Error`](super::Error).
///
/// ```no_run
/// use std::process::Command;
/// use probes_lib::{ErrorKind, Launch, LaunchError};
///
/// if let Err(error) = Launch::new(Command::new("./server.exe")).spawn() {
///     if let ErrorKind::Launch(LaunchError::NoInterpreter { interpreter }) = error.kind() {
///         println!("install {}", interpreter.display());
///     }
/// }
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum LaunchError {
    /// It cannot be executed.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Exec {
        /// What the kernel said.
        source: io::Error,
    },
    /// It can be executed, but its dynamic linker does not exist.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    NoInterpreter {
        /// The dynamic linker that it asks for.
        interpreter: PathBuf,
    },
    /// It exited before its first instruction: the kernel kills a program that it cannot load.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    DiedAtStart {
        /// The signal that killed it, if it is known.
        signal: Option<i32>,
    },
    /// It exited before its own code began.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    DiedLoading,
    /// The process that started it is not permitted to trace it.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Denied(Denial),
    /// It would run without the privilege that its file gives it.
    #[error(
        "is setuid or setgid, and would run without that privilege if it was traced from its start"
    )]
    Setuid,
    /// It would run without the capabilities that its file gives it.
    #[error("has file capabilities, and would run without them if it was traced from its start")]
    FileCapabilities,
    /// Starting it was interrupted.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Interrupted,
    /// It was to be both followed and observed from its start, which cannot be done together.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    FollowedAndObserved,
}

impl LaunchError {
    /// Returns the text if the subject is not its first word; `None` if the text continues a sentence that
    /// begins with the subject.
    pub(super) fn with_subject(&self, subject: &str) -> Option<String> {
        let program = subject;
        Some(match self {
            LaunchError::Exec { source } => format!("cannot run {program}: {}", reason(source)),
            LaunchError::NoInterpreter { interpreter } => format!(
                "cannot run {program}: its dynamic linker {} does not exist",
                interpreter.display()
            ),
            LaunchError::DiedAtStart { signal } => format!(
                "cannot run {program}: it {} before its first instruction",
                end_text(*signal)
            ),
            LaunchError::DiedLoading => {
                format!("cannot run {program}: it exited while its libraries were being loaded")
            }
            LaunchError::Denied(denial) => {
                format!("cannot trace {program} from its start: {}", denied(denial))
            }
            LaunchError::Interrupted => format!("interrupted while {program} was being started"),
            LaunchError::FollowedAndObserved => {
                format!("cannot both follow {program} and observe it from its start")
            }
            LaunchError::Setuid | LaunchError::FileCapabilities => return None,
        })
    }
}

/// Some reasons are predicates and need a subject: the process that is to be traced. Until its execve,
/// that is a fork of this process.
fn denied(denial: &Denial) -> String {
    match denial {
        Denial::Traced { .. } | Denial::BeingChanged { .. } => format!("this process {denial}"),
        _ => denial.to_string(),
    }
}

fn end_text(signal: Option<i32>) -> String {
    match signal.map(|number| (number, Signal::try_from(number))) {
        Some((_, Ok(signal))) => format!("was killed by {signal}"),
        Some((number, Err(_))) => format!("was killed by signal {number}"),
        None => "exited".to_owned(),
    }
}
