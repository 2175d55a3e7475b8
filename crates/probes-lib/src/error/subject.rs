//! [`Subject`]: the process, thread, file or program that an error is about.

use std::fmt;
use std::path::PathBuf;

/// What an error is about.
///
/// [`Error`](crate::Error) has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Subject {
    /// No process and no file: the request, one of its probes, or this machine.
    None,
    /// A process.
    Process(i32),
    /// A thread of a process.
    Thread {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// A file.
    File(PathBuf),
    /// A program to be started, as it was given.
    Program(PathBuf),
}

impl Subject {
    /// Returns the pid if the subject is a process, or a thread of a process.
    pub fn pid(&self) -> Option<i32> {
        match self {
            Subject::Process(pid) | Subject::Thread { pid, .. } => Some(*pid),
            Subject::None | Subject::File(_) | Subject::Program(_) => None,
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::None => Ok(()),
            Subject::Process(pid) => write!(f, "process {pid}"),
            Subject::Thread { pid, tid } => write!(f, "thread {tid} of process {pid}"),
            Subject::File(path) | Subject::Program(path) => path.display().fmt(f),
        }
    }
}
