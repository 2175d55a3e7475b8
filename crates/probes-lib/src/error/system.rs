//! Failures of the operating system that no other error type explains.

use std::fmt;
use std::io;

use super::reason;

/// What the operating system refused.
///
/// ```
/// use std::io;
/// use probes_lib::{Error, Operation, Subject, SystemError};
///
/// let (operation, source) = (Operation::Attach, io::ErrorKind::OutOfMemory.into());
/// let error = Error::new(Subject::Process(4242), SystemError::Call { operation, source });
/// assert!(error.to_string().starts_with("cannot attach to process 4242: "));
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum SystemError {
    /// A system call failed where no failure is expected. On its own, the message calls the process
    /// `it`.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Call {
        /// What was tried.
        operation: Operation,
        /// What the kernel said.
        source: io::Error,
    },
    /// This process cannot start another thread, which tracing needs. The message names no subject.
    #[error("cannot start a thread to trace from: {}", reason(source))]
    NoThread {
        /// What the kernel said.
        source: io::Error,
    },
    /// /proc is of another pid namespace than this process's. The message names no subject.
    #[error("/proc shows another pid namespace than that of the calling process")]
    ForeignProc,
    /// There is no /proc that shows this process. The message names no subject.
    #[error("/proc is not mounted, or does not show this process")]
    NoProc,
}

impl SystemError {
    /// Returns the message if it names `subject` in its middle; `None` if the message follows its
    /// subject, or has none.
    pub(super) fn with_subject(&self, subject: &str) -> Option<String> {
        match self {
            SystemError::Call { operation, source } => {
                Some(format!("cannot {operation} {subject}: {}", reason(source)))
            }
            _ => None,
        }
    }
}

/// What was tried on a process; displayed as the words that follow `cannot`.
///
/// [`SystemError`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// To read its memory, or what /proc shows of it.
    Read,
    /// To attach to it, to open its memory for writing, or to open the file of its update lock.
    Attach,
    /// To take its update lock, or its observer lock.
    Lock,
    /// To record a hold on its probes.
    RecordHold,
    /// To read the records of holds on its probes, or the counters that these are about.
    ReadHolds,
    /// To have it stopped by the tool that follows it ([`Follow`](crate::Follow)).
    StopByFollower,
    /// To make one of its threads execute an injected call.
    InjectCall,
    /// To run it, just started, up to where it is to be stopped.
    ControlStart,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Read => "read",
            Operation::Attach => "attach to",
            Operation::Lock => "lock",
            Operation::RecordHold => "record the hold on",
            Operation::ReadHolds => "read the records of holds on",
            Operation::StopByFollower => "ask the follower to stop",
            Operation::InjectCall => "inject a call into",
            Operation::ControlStart => "control the start of",
        })
    }
}
