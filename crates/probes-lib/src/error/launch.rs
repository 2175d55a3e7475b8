//! What can keep a program from being started. Each text reads on from the program, as it was given.

use std::io;
use std::path::PathBuf;

use nix::sys::signal::Signal;

use super::{Denial, reason};

/// Why a program was not started with its probes set; reads on from the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// It cannot be executed.
    #[error("cannot be run: {}", reason(source))]
    Exec {
        /// What the kernel said.
        source: io::Error,
    },
    /// It can be executed, but its dynamic linker does not exist.
    #[error("cannot be run: its dynamic linker {} does not exist", interpreter.display())]
    NoInterpreter {
        /// The dynamic linker that it asks for.
        interpreter: PathBuf,
    },
    /// It exited before its first instruction: the kernel kills a program that it cannot load.
    #[error("cannot be run: it {} before its first instruction", end_text(*.signal))]
    DiedAtStart {
        /// The signal that killed it, if it is known.
        signal: Option<i32>,
    },
    /// It exited before its own code began.
    #[error("cannot be run: it exited while its libraries were being loaded")]
    DiedLoading,
    /// It may not be traced by the process that started it.
    #[error("cannot be traced from its start: {}", denied(.0))]
    Denied(Denial),
    /// It would run without the privilege that its file gives it.
    #[error(
        "is setuid or setgid, and would run without that privilege if it was traced from its start"
    )]
    Setuid,
    /// Starting it was interrupted.
    #[error("cannot be run: interrupted while it was being started")]
    Interrupted,
    /// It is to be followed and observed from its start.
    #[error("cannot be both followed and observed from its start")]
    FollowedAndObserved,
}

/// Some reasons are about the process that is to be traced: this one, until it has executed the program.
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
