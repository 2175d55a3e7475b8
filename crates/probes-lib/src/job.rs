//! Job control: what only a command-line tool needs. Such a tool stands in for the program that it
//! starts: the shell, and everything else that sends signals, sends them to the tool. The tool blocks
//! its signals before the program exists ([`Launch::attended`]), waits for a signal or the program's exit
//! with poll(2) ([`Launched::pidfd`], signalfd(2)), and passes each signal on ([`Launched::pass_on`]).

use std::io;
use std::os::fd::OwnedFd;

use crate::launch::{Launch, Launched};
use crate::sys::{pidfd, ptrace, signals};

pub use crate::sys::signals::ReceivedSignal;

impl Launch {
    /// For a caller that waits while the program runs, and passes it the signals that it receives
    /// itself.
    ///
    /// [`spawn`](Launch::spawn) blocks all signals except those of faults in the calling thread,
    /// before the program exists, so that none is lost before the caller reads it, with signalfd(2)
    /// or sigwaitinfo(2); they stay blocked. SIGCHLD is no longer ignored, so that the exit of the
    /// program can be waited for. The program inherits neither.
    #[must_use]
    pub fn attended(mut self) -> Launch {
        self.attended = true;
        self
    }
}

impl Launched {
    /// Returns a descriptor that is readable, as poll(2) says, once the program has exited.
    ///
    /// # Errors
    ///
    /// Those of pidfd_open(2). Do not call this for a program that was waited for: its pid may be
    /// another process's then.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        pidfd::open(self.report().pid)
    }

    /// Returns whether the program has exited and can be waited for. Consumes nothing, unlike
    /// [`Child::try_wait`](std::process::Child::try_wait): while another thread of this process traces the program, to
    /// remove an [`Observer`](crate::Observer) for example, that also consumes stops that are meant for that thread.
    ///
    /// # Errors
    ///
    /// ECHILD if it was waited for.
    pub fn has_exited(&self) -> io::Result<bool> {
        Ok(ptrace::has_child_exited(self.report().pid)?)
    }

    /// Sends the program a signal that was sent to this process. If it was queued, with
    /// sigqueue(3), the program sees its sender and value; otherwise, it sees this process as the
    /// sender. If the program has exited, nothing is sent.
    ///
    /// # Errors
    ///
    /// Those of kill(2) or rt_sigqueueinfo(2).
    pub fn pass_on(&mut self, signal: &ReceivedSignal) -> io::Result<()> {
        // An error: it was waited for, and its pid may be another process's by now.
        if self.has_exited().unwrap_or(true) {
            return Ok(());
        }
        Ok(signals::pass_on(self.report().pid, signal)?)
    }
}
