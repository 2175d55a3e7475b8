//! [`AtExec`]: a program that has been started and is stopped before its first instruction.
//!
//! ```text
//! tracer thread                      child
//! ───────────────────────────────    ─────────────────────────────────────────
//! SEIZE, with TRACEEXEC         ◀─── waits before its execve (sys::spawn)
//! "go"                          ───▶ execve
//! PTRACE_EVENT_EXEC             ◀─── is stopped before its first instruction
//! ```
//!
//! If we die here, or this thread ends, the kernel kills the program before it runs.
//! `Command::spawn` returns the exact error of a failed execve, but blocks until the execve has
//! succeeded or failed. So it is called in a thread of its own, the spawner. The tracer never reaps the
//! child: the spawner's `Child` does.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::address::LiveAddr;
use crate::error::{Error, LaunchError, ProcessError, Result};
use crate::process::Process;
use crate::process::denial;
use crate::process::memory::ProcessMemory;
use crate::sys::ptrace::{self, TraceeState};
use crate::sys::signals::InheritedSignals;
use crate::sys::spawn::{self, TracerPipes};
use crate::trace::run_to::{self, NotReached};
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;

/// A program whose execve is done, but which has not executed an instruction yet. It stays traced until it is
/// released; if this thread ends before that, the kernel kills it.
pub(crate) struct AtExec {
    process: Process,
}

impl AtExec {
    /// A program that this thread has traced to its exec.
    pub(crate) fn new(process: Process) -> AtExec {
        AtExec { process }
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the stopped process; the calling thread has to be its tracer. Dropping the returned
    /// value kills the process, unless it has been released.
    pub(crate) fn stopped(&self, _: &Tracer<'_>) -> Stopped<'_> {
        Stopped::adopt(&self.process).killed_on_drop()
    }

    /// Lets the program run to the first of `places` that its main thread comes to, and stops all its threads there;
    /// returns which it is. Other threads run meanwhile: the main thread may wait for them.
    ///
    /// # Errors
    ///
    /// If it exits first, or executes another program, or cannot be stopped; if it `may_interrupt`, also if a signal comes
    /// that ends this tool. It is still traced then, or has been killed.
    pub(crate) fn run_to<'s>(
        &'s self,
        tracer: &Tracer<'_>,
        stopped: Stopped<'s>,
        memory: &ProcessMemory,
        places: &[LiveAddr],
        may_interrupt: bool,
    ) -> Result<(Stopped<'s>, LiveAddr), NotReached> {
        // The main thread is not detached: if we die, the kernel kills it, and the process.
        stopped.keep_only(self.process.pid());
        self.run_main_thread_to(tracer, memory, places, may_interrupt)
    }

    /// Lets the main thread, which is stopped, run to the first of `places` that it comes to, and stops all threads
    /// there.
    fn run_main_thread_to<'s>(
        &'s self,
        tracer: &Tracer<'_>,
        memory: &ProcessMemory,
        places: &[LiveAddr],
        may_interrupt: bool,
    ) -> Result<(Stopped<'s>, LiveAddr), NotReached> {
        let pid = self.process.pid();
        let reached = run_to::run_to(tracer, pid, memory, places, may_interrupt)?;
        let failed = |error: Error| NotReached::Failed(io::Error::other(error.to_string()));
        let stopped = tracer.stop_or_kill(&self.process);
        Ok((stopped.map_err(failed)?, reached))
    }

    /// Lets the program, whose main thread is stopped at `back`, run from `entry` until it is at `back` again. Other
    /// threads stay stopped.
    ///
    /// # Errors
    ///
    /// See [`AtExec::run_to`].
    pub(crate) fn run_round_trip<'s>(
        &'s self,
        tracer: &Tracer<'_>,
        stopped: Stopped<'s>,
        memory: &ProcessMemory,
        entry: LiveAddr,
        back: LiveAddr,
    ) -> Result<Stopped<'s>, NotReached> {
        let failed = |errno: Errno| NotReached::Failed(errno.into());
        ptrace::set_program_counter(self.process.pid(), entry).map_err(failed)?;
        // Not detached: the program must not run untraced.
        stopped.keep_threads();
        let (stopped, _) = self.run_main_thread_to(tracer, memory, &[back], false)?;
        Ok(stopped)
    }

    /// Returns the return address of the function at whose start the program is stopped.
    pub(crate) fn return_address(&self, memory: &ProcessMemory) -> Result<LiveAddr, NotReached> {
        run_to::return_address(self.process.pid(), memory)
    }
}

/// The child of a launch. Dropping it kills and reaps the child, unless it was taken.
///
/// It has to outlive the thread that traces the child: a process cannot be reaped while threads of it that have
/// exited are traced, and the kernel detaches these when their tracer exits.
#[derive(Default)]
pub(crate) struct SpawnedChild(Option<Child>);

impl SpawnedChild {
    /// Takes the child out: dropping this no longer kills it.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub(crate) fn take(&mut self, pid: i32) -> Result<Child> {
        let exited = Error::of_process(pid, ProcessError::Exited);
        self.0.take().ok_or(exited)
    }
}

impl Drop for SpawnedChild {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            kill_and_reap(child);
        }
    }
}

/// Kills and reaps a child; returns its exit status. It may have exited before it is killed.
pub(crate) fn kill_and_reap(child: &mut Child) -> Option<ExitStatus> {
    let _ = child.kill();
    child.wait().ok()
}

/// Starts `command` and stops it before its first instruction; stores the child in `spawned`.
///
/// # Errors
///
/// If the program cannot be executed or traced.
pub(crate) fn spawn_to_exec(
    tracer: &Tracer<'_>,
    command: Command,
    signals: InheritedSignals,
    spawned: &mut SpawnedChild,
) -> Result<AtExec> {
    let program: PathBuf = command.get_program().into();
    let exec_error = |source: io::Error| Error::of_program(&program, LaunchError::Exec { source });
    let (child_pipes, tracer_pipes) = spawn::pipes().map_err(&exec_error)?;
    let traced_by = tracer_pipes.traced_by_same_process();
    std::thread::scope(|scope| {
        let spawner = std::thread::Builder::new()
            .spawn_scoped(scope, move || {
                spawn::spawn(command, child_pipes, traced_by, signals)
            })
            .map_err(&exec_error)?;
        let traced = trace_to_exec(tracer, tracer_pipes);
        let child = match spawner.join() {
            Ok(child) => child,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        match (child, traced) {
            (Ok(child), Ok(pid)) => {
                spawned.0 = Some(child);
                Ok(AtExec::new(Process::open(pid)?))
            }
            (Ok(mut child), Err(error)) => {
                let status = kill_and_reap(&mut child);
                Err(match error {
                    Untraced::Exited => Error::of_program(
                        &program,
                        LaunchError::DiedAtStart {
                            signal: status.and_then(|status| status.signal()),
                        },
                    ),
                    Untraced::Refused(errno) => refused(&program, errno),
                    Untraced::Interrupted => interrupted(&program),
                })
            }
            (Err(_), Err(Untraced::Refused(errno))) => Err(refused(&program, errno)),
            (Err(source), _) => Err(exec_error(source)),
        }
    })
}

/// Returns the error for a child that may not be traced.
pub(crate) fn refused(program: &Path, errno: Errno) -> Error {
    Error::of_program(program, LaunchError::Denied(denial::of_own_child(errno)))
}

/// Returns the error for a child that was killed because a signal was to end us.
pub(crate) fn interrupted(program: &Path) -> Error {
    Error::of_program(program, LaunchError::Interrupted)
}

/// Why a child was not traced up to its exec.
pub(crate) enum Untraced {
    /// It exited first: its spawner knows why.
    Exited,
    /// The kernel does not let us trace it.
    Refused(Errno),
    /// It was killed because a signal was to end us.
    Interrupted,
}

/// Traces a child up to its exec; returns its pid.
pub(crate) fn trace_to_exec(tracer: &Tracer<'_>, mut pipes: TracerPipes) -> Result<i32, Untraced> {
    let pid = pipes.read_pid().map_err(|_| Untraced::Exited)?;
    match ptrace::seize_for_exec(pid) {
        Ok(()) => {}
        Err(Errno::ESRCH) => return Err(Untraced::Exited),
        Err(errno) => return Err(Untraced::Refused(errno)),
    }
    pipes.go().map_err(|_| Untraced::Exited)?;
    loop {
        match ptrace::peek_state_even_if_consumed(pid) {
            TraceeState::Executed => return Ok(pid),
            TraceeState::Exited | TraceeState::Gone => return Err(Untraced::Exited),
            // Its execve may wait for ever, such as for a file system; and a child that is stopped, for SIGCONT.
            TraceeState::GroupStopped | TraceeState::Running if tracer.is_interrupted() => {
                // It fails only if the child has exited.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                return Err(Untraced::Interrupted);
            }
            TraceeState::Running => {
                tracer.wait_for_event();
            }
            // A signal to the child, perhaps from the terminal.
            TraceeState::Signal(signal) => ptrace::resume(pid, signal),
            // Stopped, from the terminal perhaps, until it receives SIGCONT.
            TraceeState::GroupStopped => {
                ptrace::listen(pid);
                tracer.wait_for_event();
            }
            TraceeState::EventStopped | TraceeState::Cloned(_) => ptrace::resume(pid, 0),
        }
    }
}
