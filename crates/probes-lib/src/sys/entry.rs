//! Runs a program that stands at its exec on to its entry. Its libraries have been loaded then, and
//! nothing of its own has run.
//!
//! ```text
//! PTRACE_EVENT_EXEC   only the program and its loader are mapped
//!     an int3 is put on AT_ENTRY, and the program goes on
//! ld.so               maps the libraries, relocates them, runs their initialisers
//! SIGTRAP             AT_ENTRY: the int3 is taken away again, and all threads are stopped
//! ```

use std::io;

use crate::addr::LiveAddr;
use crate::memory::{ReadMemory, WriteMemory};
use crate::site::INT3;
use crate::sys::mem::{ProcessMemory, StoppedMemory};
use crate::sys::ptrace::{self, Wait};
use crate::sys::threads::Tracer;

/// Why the entry was not reached.
pub(crate) enum NotReached {
    /// It ended first: its loader may not have found a library.
    Ended,
    /// It executed another program: from an initialiser of a library.
    Executed,
    /// It could not be changed.
    Failed(io::Error),
}

/// Lets the program `pid`, which stands at its exec, run to `entry`. It is about to stand again when
/// this returns, and has not executed the instruction there.
pub(crate) fn run_to(
    tracer: &Tracer<'_>,
    pid: i32,
    memory: &ProcessMemory,
    entry: LiveAddr,
) -> Result<(), NotReached> {
    let mut code = StoppedMemory::new(memory, pid);
    let mut instruction = [0];
    code.read(entry, &mut instruction)
        .and_then(|()| code.write_code(entry, &[INT3]))
        .map_err(NotReached::Failed)?;
    ptrace::go_on(pid, 0);
    loop {
        match ptrace::peek(pid) {
            Wait::Signal(libc::SIGTRAP) if ptrace::program_counter(pid) == Ok(entry.0 + 1) => break,
            // Somebody else's, or of an initialiser's doing.
            Wait::Signal(signal) => ptrace::go_on(pid, signal),
            Wait::Suspended => {
                ptrace::listen(pid);
                tracer.wait_for_news();
            }
            Wait::Trapped | Wait::Cloned(_) => ptrace::go_on(pid, 0),
            Wait::Running => {
                tracer.wait_for_news();
            }
            Wait::Executed => return Err(NotReached::Executed),
            Wait::Ended | Wait::Gone => return Err(NotReached::Ended),
        }
    }
    code.write_code(entry, &instruction)
        .and_then(|()| Ok(ptrace::set_program_counter(pid, entry)?))
        .map_err(NotReached::Failed)?;
    // It stands for the trap's signal, which it is not to be given: so it stops once more.
    ptrace::interrupt(pid).map_err(|errno| NotReached::Failed(errno.into()))?;
    ptrace::go_on(pid, 0);
    Ok(())
}
