//! Starts a program and stops it before its first instruction.
//!
//! ```text
//! spawning thread       child                        tracer thread
//! ─────────────────     ──────────────────────────   ─────────────────────────
//! Command::spawn  ───▶  tells its pid, waits    ───▶ SEIZE, with TRACEEXEC
//!                       goes on                 ◀─── "go"
//! Ok or errno     ◀───  execve
//!                       PTRACE_EVENT_EXEC       ───▶ stands before its first instruction
//! ```
//!
//! If we die here, the program does not run.
//! `Command::spawn` gives the exact error of a failed execve, but blocks until it is known, so it
//! needs a thread besides the tracer's. The tracer never reaps: the child is the spawner's.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, pipe2};

use crate::address::LiveAddr;
use crate::error::{ErrorKind, Result};
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::sys::can_fail;
use crate::sys::ptrace::{self, Wait};
use crate::sys::signals::InheritedSignals;
use crate::trace::run_to::{self, NotReached};
use crate::trace::stop::{Stopped, Tracer};

/// A program that has been executed and has not run yet. Dropping it kills and reaps it.
pub(crate) struct AtExec {
    /// AppliedChange only by `keep`, which ends `self`.
    child: Option<Child>,
    process: Process,
}

impl AtExec {
    /// Another process's child, which this thread has traced to its exec. It is not killed when this
    /// is dropped, but when the thread ends.
    pub(crate) fn of_other(process: Process) -> AtExec {
        AtExec {
            child: None,
            process,
        }
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// The process, standing; the tracer is the one that spawned it. It is killed unless it is released.
    pub(crate) fn stopped(&self, _: &Tracer<'_>) -> Stopped<'_> {
        Stopped::adopt(&self.process).killed_on_drop()
    }

    /// Lets the program run to the first of `places` that it comes to, where all its threads stand
    /// again; says which.
    ///
    /// # Errors
    ///
    /// If it ends first, or executes another program, or cannot be stopped within `limit`.
    pub(crate) fn run_to<'s>(
        &'s self,
        tracer: &Tracer<'_>,
        stopped: Stopped<'s>,
        memory: &ProcessMemory,
        places: &[LiveAddr],
        limit: Duration,
    ) -> Result<(Stopped<'s>, LiveAddr), NotReached> {
        // Not released: it is not to go on without us.
        stopped.leave();
        let pid = self.process.pid();
        let reached = run_to::run_to(tracer, pid, memory, places)?;
        let failed = |error: crate::Error| NotReached::Failed(io::Error::other(error.to_string()));
        let stopped = tracer.stop(&self.process, limit).map_err(failed)?;
        Ok((stopped.killed_on_drop(), reached))
    }

    /// Has the program, which stands at `back`, run from `entry` on until it is back there.
    ///
    /// # Errors
    ///
    /// As of [`AtExec::run_to`].
    pub(crate) fn run_round_trip<'s>(
        &'s self,
        tracer: &Tracer<'_>,
        stopped: Stopped<'s>,
        memory: &ProcessMemory,
        entry: LiveAddr,
        back: LiveAddr,
        limit: Duration,
    ) -> Result<Stopped<'s>, NotReached> {
        let failed = |errno: Errno| NotReached::Failed(errno.into());
        ptrace::set_program_counter(self.process.pid(), entry).map_err(failed)?;
        let (stopped, _) = self.run_to(tracer, stopped, memory, &[back], limit)?;
        Ok(stopped)
    }

    /// Where the program will return to, which stands at the start of a function.
    pub(crate) fn return_address(&self, memory: &ProcessMemory) -> Result<LiveAddr, NotReached> {
        run_to::return_address(self.process.pid(), memory)
    }

    /// Kills the program where it stands: it never runs.
    pub(crate) fn kill(&self) {
        // It fails only if the program has been killed already.
        let _ = kill(Pid::from_raw(self.process.pid()), Signal::SIGKILL);
    }

    /// Keeps the program from being killed: it is a child like any other from now on.
    pub(crate) fn keep(mut self) -> Result<Child> {
        let pid = self.process.pid();
        self.child.take().ok_or(ErrorKind::Exited { pid }.into())
    }
}

impl Drop for AtExec {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            end(child);
        }
    }
}

/// Kills and reaps a child; says what it died of, which may have been something else.
pub(crate) fn end(child: &mut Child) -> Option<ExitStatus> {
    let _ = child.kill();
    child.wait().ok()
}

/// Starts `command` and stops it before its first instruction.
///
/// # Errors
///
/// If the program cannot be executed or traced; no child is left behind then.
pub(crate) fn at_exec(
    tracer: &Tracer<'_>,
    command: Command,
    signals: InheritedSignals,
) -> Result<AtExec> {
    let program: std::path::PathBuf = command.get_program().into();
    let exec_error = |source: io::Error| ErrorKind::Exec {
        program: program.clone(),
        source,
    };
    let (childs, tracers) = ends().map_err(exec_error)?;
    let by = TracedBy::SameProcess {
        go: tracers.go.as_raw_fd(),
    };
    std::thread::scope(|scope| {
        let spawner = std::thread::Builder::new()
            .spawn_scoped(scope, move || spawn(command, childs, by, signals))
            .map_err(&exec_error)?;
        let traced = trace_to_exec(tracer, tracers);
        let spawned = match spawner.join() {
            Ok(spawned) => spawned,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        match (spawned, traced) {
            (Ok(mut child), Ok(pid)) => match Process::open(pid) {
                Ok(process) => Ok(AtExec {
                    child: Some(child),
                    process,
                }),
                Err(error) => {
                    end(&mut child);
                    Err(error)
                }
            },
            (Ok(mut child), Err(error)) => {
                let status = end(&mut child);
                Err(match error {
                    Untraced::Ended => ErrorKind::DiedAtStart {
                        program: program.clone(),
                        signal: status.and_then(|status| status.signal()),
                    },
                    Untraced::Refused(errno) => refused(&program, errno),
                }
                .into())
            }
            (Err(_), Err(Untraced::Refused(errno))) => Err(refused(&program, errno).into()),
            (Err(source), _) => Err(exec_error(source).into()),
        }
    })
}

/// Has the program that `command` starts inherit a descriptor under its number.
pub(crate) fn inherit(command: &mut Command, descriptor: RawFd) {
    // SAFETY: `fcntl` is a plain system call, and the caller keeps the descriptor open until the program
    // has been started.
    unsafe {
        command.pre_exec(move || {
            Errno::result(libc::fcntl(descriptor, libc::F_SETFD, 0))?;
            Ok(())
        });
    }
}

/// The child's ends of the pipes between it and its tracer.
#[derive(Debug)]
pub(crate) struct ChildsEnds {
    pid: File,
    go: File,
}

/// The tracer's ends of the pipes between it and the child.
#[derive(Debug)]
pub(crate) struct TracersEnds {
    pid: File,
    go: File,
}

/// Who traces a child.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TracedBy {
    /// A thread of its parent's, whose end of the pipe it inherits.
    SameProcess { go: RawFd },
    /// Another process.
    Other { pid: i32 },
}

pub(crate) fn ends() -> io::Result<(ChildsEnds, TracersEnds)> {
    let (pid_reader, pid_writer) = pipe()?;
    let (go_reader, go_writer) = pipe()?;
    let childs = ChildsEnds {
        pid: pid_writer,
        go: go_reader,
    };
    let tracers = TracersEnds {
        pid: pid_reader,
        go: go_writer,
    };
    Ok((childs, tracers))
}

/// Starts `command`, which waits for its tracer before it is executed.
pub(crate) fn spawn(
    mut command: Command,
    ends: ChildsEnds,
    by: TracedBy,
    signals: InheritedSignals,
) -> io::Result<Child> {
    let fds = (ends.pid.as_raw_fd(), ends.go.as_raw_fd());
    // SAFETY: `wait_to_be_traced` makes only system calls on descriptors that are open in the child,
    // a copy of this process, and allocates nothing.
    unsafe {
        command.pre_exec(move || wait_to_be_traced(fds, by, &signals));
    }
    command.spawn()
}

/// A pipe that no program inherits: what is read from it, and what is written to it.
pub(crate) fn pipe() -> io::Result<(File, File)> {
    can_fail!(Pipe);
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    Ok((reader.into(), writer.into()))
}

pub(crate) fn refused(program: &std::path::Path, errno: Errno) -> ErrorKind {
    ErrorKind::CannotTraceChild {
        program: program.to_owned(),
        denial: crate::process::denial::of_own_child(errno),
    }
}

/// Why a child was not traced up to its exec.
pub(crate) enum Untraced {
    /// It ended first: the spawner knows why.
    Ended,
    /// The kernel does not let us trace it.
    Refused(Errno),
}

/// In the child, before execve: tells the tracer our pid, waits for its word, and stops holding
/// signals back, as the program would inherit that.
fn wait_to_be_traced(
    (pid_fd, go_fd): (i32, i32),
    by: TracedBy,
    signals: &InheritedSignals,
) -> io::Result<()> {
    let pid = std::process::id().to_le_bytes();
    let mut go = 0_u8;
    // SAFETY: plain system calls on buffers that outlive them. Our copy of the tracer's end is
    // closed, so that the read ends should the tracer die.
    unsafe {
        match by {
            TracedBy::SameProcess { go } => libc::close(go),
            // Yama may allow nobody else but our ancestors; where there is no Yama, it fails.
            TracedBy::Other { pid } => libc::prctl(libc::PR_SET_PTRACER, pid),
        };
        Errno::result(libc::write(pid_fd, pid.as_ptr().cast(), pid.len()))?;
        if libc::read(go_fd, (&raw mut go).cast(), 1) != 1 {
            // The tracer has died or may not trace us; there is nobody to tell.
            libc::_exit(127);
        }
    }
    signals.restore();
    Ok(())
}

/// Traces a child, and lets it go on to its exec.
pub(crate) fn trace_to_exec(tracer: &Tracer<'_>, mut ends: TracersEnds) -> Result<i32, Untraced> {
    let mut pid = [0; 4];
    ends.pid.read_exact(&mut pid).map_err(|_| Untraced::Ended)?;
    let pid = i32::from_le_bytes(pid);
    match ptrace::seize_for_exec(pid) {
        Ok(()) => {}
        Err(Errno::ESRCH) => return Err(Untraced::Ended),
        Err(errno) => return Err(Untraced::Refused(errno)),
    }
    ends.go.write_all(&[1]).map_err(|_| Untraced::Ended)?;
    loop {
        match ptrace::peek(pid) {
            Wait::Executed => return Ok(pid),
            Wait::Ended | Wait::Gone => return Err(Untraced::Ended),
            Wait::Running => {
                tracer.wait_for_news();
            }
            // A signal on its way to the child: from the terminal, perhaps.
            Wait::Signal(signal) => ptrace::resume(pid, signal),
            // Stopped, from the terminal perhaps, until it is resumed.
            Wait::Suspended => {
                ptrace::listen(pid);
                tracer.wait_for_news();
            }
            Wait::Trapped | Wait::Cloned(_) => ptrace::resume(pid, 0),
        }
    }
}
