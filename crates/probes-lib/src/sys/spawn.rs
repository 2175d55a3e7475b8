//! Starts a program whose child process waits before its execve, until its tracer is there.
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

use crate::sys::can_fail;
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
    /// A thread of its parent, whose end of the pipe the child inherits.
    SameProcess(RawFd),
    /// Another process.
    Other { pid: i32 },
}

impl TracerPipes {
    /// Returns the tracer, if it is a thread of this process.
    pub(crate) fn of_same_process(&self) -> TracedBy {
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
    let childs = ChildPipes {
        pid: pid_writer,
        go: go_reader,
    };
    let tracers = TracerPipes {
        pid: pid_reader,
        go: go_writer,
    };
    Ok((childs, tracers))
}

/// Makes a pipe that no program inherits; returns the end to read from and the end to write to.
pub(crate) fn pipe() -> io::Result<(File, File)> {
    can_fail!(Pipe);
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    Ok((reader.into(), writer.into()))
}

/// Makes the program that `command` starts inherit a descriptor under its number.
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

/// Starts `command`, whose child waits for its tracer before its execve.
pub(crate) fn spawn(
    mut command: Command,
    pipes: ChildPipes,
    by: TracedBy,
    signals: InheritedSignals,
) -> io::Result<Child> {
    let fds = (pipes.pid.as_raw_fd(), pipes.go.as_raw_fd());
    // SAFETY: `wait_to_be_traced` makes only system calls on descriptors that are open in the child,
    // a copy of this process, and allocates nothing.
    unsafe {
        command.pre_exec(move || wait_to_be_traced(fds, by, &signals));
    }
    command.spawn()
}

/// Runs in the child, before its execve: writes our pid for the tracer, waits for its answer, and
/// restores the signal mask, which the program would inherit.
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
            TracedBy::SameProcess(go) => libc::close(go),
            // Yama may allow only our ancestors; where there is no Yama, it fails.
            TracedBy::Other { pid } => libc::prctl(libc::PR_SET_PTRACER, pid),
        };
        Errno::result(libc::write(pid_fd, pid.as_ptr().cast(), pid.len()))?;
        if libc::read(go_fd, (&raw mut go).cast(), 1) != 1 {
            // The tracer has died or may not trace us; no process is left to report that to.
            libc::_exit(127);
        }
    }
    signals.restore();
    Ok(())
}
