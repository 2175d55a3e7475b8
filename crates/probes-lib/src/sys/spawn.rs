//! Starts a program in a child process that waits before its execve until its tracer lets it go on.
//!
//! ```text
//! spawning thread       child                        tracer thread
//! ─────────────────     ──────────────────────────   ─────────────────────────
//! Command::spawn  ───▶  writes its pid, waits   ───▶ PTRACE_SEIZE
//!                       goes on                 ◀─── "go"
//! Ok or errno     ◀───  execve
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use crate::sys::fault_point;
use crate::sys::signals::InheritedSignals;

/// The child's ends of the pipes to and from its tracer.
#[derive(Debug)]
pub(crate) struct ChildPipes {
    pid: File,
    go: File,
}

/// The tracer's ends of the pipes from and to the child.
#[derive(Debug)]
pub(crate) struct TracerPipes {
    pid: File,
    go: File,
}

/// The tracer of a child.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TracedBy {
    /// A thread of the child's parent. The descriptor is the tracer's end of the pipe `go`, which
    /// the child inherits.
    SameProcess(RawFd),
    /// Another process.
    Other { pid: i32 },
}

impl TracerPipes {
    /// Returns the [`TracedBy`] for a tracer that is a thread of this process.
    pub(crate) fn traced_by_same_process(&self) -> TracedBy {
        TracedBy::SameProcess(self.go.as_raw_fd())
    }

    /// Waits for the child's pid.
    ///
    /// # Errors
    ///
    /// If the child could not be started.
    pub(crate) fn read_pid(&mut self) -> io::Result<i32> {
        let mut pid = [0; 4];
        self.pid.read_exact(&mut pid)?;
        Ok(i32::from_le_bytes(pid))
    }

    /// Lets the child go on to its execve.
    ///
    /// # Errors
    ///
    /// If the child has exited.
    pub(crate) fn go(&mut self) -> io::Result<()> {
        self.go.write_all(&[1])
    }
}

/// Makes the pipes between a child and its tracer.
pub(crate) fn pipes() -> io::Result<(ChildPipes, TracerPipes)> {
    let (pid_reader, pid_writer) = pipe()?;
    let (go_reader, go_writer) = pipe()?;
    let child_pipes = ChildPipes {
        pid: pid_writer,
        go: go_reader,
    };
    let tracer_pipes = TracerPipes {
        pid: pid_reader,
        go: go_writer,
    };
    Ok((child_pipes, tracer_pipes))
}

/// Makes a pipe that no program inherits; returns the end to read from and the end to write to.
pub(crate) fn pipe() -> io::Result<(File, File)> {
    fault_point!(Pipe);
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    Ok((reader.into(), writer.into()))
}

/// Lets the program that `command` starts inherit a descriptor, which keeps its number.
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

/// Starts `command` in a child process that waits for its tracer before its execve.
pub(crate) fn spawn(
    mut command: Command,
    pipes: ChildPipes,
    traced_by: TracedBy,
    signals: InheritedSignals,
) -> io::Result<Child> {
    let fds = (pipes.pid.as_raw_fd(), pipes.go.as_raw_fd());
    // SAFETY: `wait_to_be_traced` makes only system calls on descriptors that are open in the child,
    // a copy of this process, and allocates nothing.
    unsafe {
        command.pre_exec(move || wait_to_be_traced(fds, traced_by, &signals));
    }
    command.spawn()
}

/// Runs in the child, before its execve: writes our pid for the tracer, waits for the tracer's
/// answer, and restores the signal mask, because the program inherits it.
fn wait_to_be_traced(
    (pid_fd, go_fd): (i32, i32),
    traced_by: TracedBy,
    signals: &InheritedSignals,
) -> io::Result<()> {
    let pid = std::process::id().to_le_bytes();
    let mut go = 0_u8;
    // SAFETY: plain system calls on buffers that outlive them. We close our copy of the tracer's
    // end of the pipe, so that the read returns if the tracer dies.
    unsafe {
        match traced_by {
            TracedBy::SameProcess(tracers_end) => libc::close(tracers_end),
            // Yama may allow only our ancestors to trace us. Without Yama, the call fails; its
            // result is not needed.
            TracedBy::Other { pid } => libc::prctl(libc::PR_SET_PTRACER, pid as libc::c_ulong),
        };
        Errno::result(libc::write(pid_fd, pid.as_ptr().cast(), pid.len()))?;
        if libc::read(go_fd, (&raw mut go).cast(), 1) != 1 {
            // The tracer has died, or has no permission to trace us; our parent learns that from
            // the tracer.
            libc::_exit(127);
        }
    }
    signals.restore();
    Ok(())
}
