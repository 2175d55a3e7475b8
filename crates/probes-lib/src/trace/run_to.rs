//! Lets a launched program that is stopped run up to a place: to where its loader has mapped all libraries
//! and none of their code has run, to the program's entry, or to where OCaml code begins.
//!
//! ```text
//! PTRACE_EVENT_EXEC   only the program and its loader are mapped
//!     an int3 is written at each place, and the program resumes
//! ld.so               maps the libraries, calls _dl_debug_state, runs their initialisers
//! SIGTRAP             the int3s are replaced by the instructions; the caller stops all threads
//! ```

use std::io;

use crate::address::LiveAddr;
use crate::error::{Error, LaunchError, Operation, ProcessError};
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::memory::ProcessMemory;
use crate::site::INT3;
use crate::sys::ptrace::{self, TraceeState};
use crate::trace::memory::StoppedMemory;
use crate::trace::thread_calls::ThreadCalls;
use crate::trace::tracer::Tracer;

/// Why no place was reached.
pub(crate) enum NotReached {
    /// The program exited first: its loader may not have found a library.
    Exited,
    /// It executed a new program, such as from an initialiser of a library.
    Executed,
    /// A signal came that ends this tool ([`Tracer::is_interrupted`]).
    Interrupted,
    /// It could not be stopped or changed.
    Failed(io::Error),
}

impl NotReached {
    /// Returns the error of `operation` for the process `pid`.
    pub(crate) fn error(self, pid: i32, operation: Operation) -> Error {
        match self {
            NotReached::Exited => Error::of_process(pid, ProcessError::Exited),
            NotReached::Executed => Error::of_process(pid, ProcessError::Executed),
            NotReached::Interrupted => Error::of_process(pid, LaunchError::Interrupted),
            NotReached::Failed(source) => Error::of_call(pid, operation, source),
        }
    }
}

/// Lets the first thread of the program `pid`, which is stopped, run to the first of `places` that it
/// comes to; returns which. On return, it has been resumed, and is about to stop again before the instruction at that
/// place. `may_interrupt`: whether this fails if a signal that ends this tool comes first.
pub(crate) fn run_to(
    tracer: &Tracer<'_>,
    pid: i32,
    memory: &ProcessMemory,
    places: &[LiveAddr],
    may_interrupt: bool,
) -> Result<LiveAddr, NotReached> {
    let mut code = StoppedMemory::new(memory, pid, ThreadCalls::Own);
    let mut instructions = Vec::with_capacity(places.len());
    for &place in places {
        let mut instruction = [0];
        code.read(place, &mut instruction)
            .and_then(|()| code.write_code(place, &[INT3]))
            .map_err(NotReached::Failed)?;
        instructions.push((place, instruction));
    }
    let trapped_at = || {
        let after = ptrace::program_counter(pid).ok()?;
        places.iter().copied().find(|place| place.0 + 1 == after)
    };
    ptrace::resume(pid, 0);
    let reached = loop {
        match ptrace::peek_state_even_if_consumed(pid) {
            TraceeState::Signal(signal) => match trapped_at().filter(|_| signal == libc::SIGTRAP) {
                Some(place) => break place,
                // Sent from outside, or raised by an initialiser.
                None => ptrace::resume(pid, signal),
            },
            TraceeState::EventStopped | TraceeState::Cloned(_) => ptrace::resume(pid, 0),
            // The loader may wait for ever, such as for a file.
            TraceeState::GroupStopped | TraceeState::Running
                if may_interrupt && tracer.is_interrupted() =>
            {
                return Err(NotReached::Interrupted);
            }
            TraceeState::GroupStopped => {
                ptrace::listen(pid);
                tracer.wait_for_event();
            }
            TraceeState::Running => {
                tracer.wait_for_event();
            }
            TraceeState::Executed => return Err(NotReached::Executed),
            TraceeState::Exited | TraceeState::Gone => return Err(NotReached::Exited),
        }
    };
    instructions
        .iter()
        .try_for_each(|(place, instruction)| code.write_code(*place, instruction))
        .and_then(|()| Ok(ptrace::set_program_counter(pid, reached)?))
        .map_err(NotReached::Failed)?;
    // It is stopped by the trap's SIGTRAP, which must not be delivered. So it is resumed without
    // that signal, and interrupted first, so that it stops again at once.
    ptrace::interrupt(pid).map_err(|errno| NotReached::Failed(errno.into()))?;
    ptrace::resume(pid, 0);
    Ok(reached)
}

/// Returns the return address of the function that a thread has just entered.
pub(crate) fn return_address(pid: i32, memory: &ProcessMemory) -> Result<LiveAddr, NotReached> {
    let stack = ptrace::stack_pointer(pid).map_err(|errno| NotReached::Failed(errno.into()))?;
    let address = memory.read_word(LiveAddr(stack));
    address.map(LiveAddr).map_err(NotReached::Failed)
}
