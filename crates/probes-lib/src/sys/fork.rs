//! fork(2) of a process that has one thread.

use std::fs;
use std::io;

use nix::unistd::{ForkResult, fork, setsid};

/// Makes a copy of this process, in a session of its own; returns its pid, or `None` in the copy.
///
/// # Errors
///
/// If this process has several threads: the copy would have one, and what the others had locked
/// would stay locked.
pub(crate) fn fork_into_new_session() -> io::Result<Option<i32>> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other(
            "the process that is to follow the program has several threads",
        ));
    }
    // SAFETY: this process has one thread, so the child lacks no thread that could hold a lock.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Some(child.as_raw())),
        ForkResult::Child => {
            // It fails only for the leader of a process group, which a new process is not.
            let _ = setsid();
            Ok(None)
        }
    }
}
