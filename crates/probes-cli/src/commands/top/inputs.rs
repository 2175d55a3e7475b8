//! [`Inputs`]: waits for the next event: a key, a signal, the exit of the process, the loss of the
//! terminal.

use std::io::{self, stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Pid, read};

use super::keys::{KeyDecoder, KeyPress};
use crate::failure::Failure;
use crate::poll::poll_timeout;
use crate::signals::{TerminationSignals, block};

/// How long an Esc waits for the rest of an escape sequence.
const SEQUENCE: Duration = Duration::from_millis(50);

/// What `top` reacts to.
#[derive(Debug)]
pub(super) enum Input {
    Keys(Vec<KeyPress>),
    /// The terminal has another size, or we were stopped, after which anything may be on it.
    Redraw {
        was_stopped: bool,
    },
    /// SIGTSTP, which asks us to stop.
    Suspend,
    /// Nothing came in time.
    Timeout,
    End(End),
}

/// Why `top` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Quit,
    /// By a termination signal.
    Interrupted,
    /// The process has exited, or executed a new program.
    Exited,
    TerminalLost,
}

/// Waits for inputs.
pub(super) struct Inputs<'e> {
    termination: &'e TerminationSignals,
    /// The signals about the terminal.
    signals: SignalFd,
    /// Readable once the process has exited; `None` if there are several.
    exit: Option<OwnedFd>,
    keys: KeyDecoder,
    /// When bytes were read last: a sequence that has begun goes on within [`SEQUENCE`].
    keys_read_at: Instant,
}

impl<'e> Inputs<'e> {
    /// `exit` is readable once the process has exited. The exits of several processes are no input.
    pub(super) fn new(
        termination: &'e TerminationSignals,
        exit: Option<OwnedFd>,
    ) -> Result<Inputs<'e>, Failure> {
        let signals = [Signal::SIGWINCH, Signal::SIGTSTP, Signal::SIGCONT];
        Ok(Inputs {
            termination,
            signals: block(&SigSet::from_iter(signals))?,
            exit,
            keys: KeyDecoder::default(),
            keys_read_at: Instant::now(),
        })
    }

    /// Returns the next input, or [`Input::Timeout`] after `duration`.
    pub(super) fn wait(&mut self, duration: Duration) -> Result<Input, Failure> {
        let until = Instant::now().checked_add(duration);
        loop {
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            let left = if self.keys.is_waiting() {
                left.min(SEQUENCE.saturating_sub(self.keys_read_at.elapsed()))
            } else {
                left
            };
            let Some(ready) = self.poll(left)? else {
                continue;
            };
            if ready.termination && self.termination.take_interrupt() {
                return Ok(Input::End(End::Interrupted));
            }
            if ready.exit {
                return Ok(Input::End(End::Exited));
            }
            if ready.signal {
                if let Some(input) = self.read_signals() {
                    return Ok(input);
                }
            }
            if ready.input {
                match self.read_keys() {
                    Ok(keys) if keys.is_empty() => {}
                    Ok(keys) => return Ok(Input::Keys(keys)),
                    Err(_) => return Ok(Input::End(End::TerminalLost)),
                }
            } else if self.keys_read_at.elapsed() >= SEQUENCE {
                if let Some(key) = self.keys.flush() {
                    return Ok(Input::Keys(vec![key]));
                }
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Ok(Input::Timeout);
            }
        }
    }

    /// Returns which descriptors are readable; `None` if a signal handler interrupted the wait.
    fn poll(&self, left: Duration) -> Result<Option<Ready>, Failure> {
        let input = stdin();
        let termination = self.termination.as_fd();
        let exit = self.exit.as_ref().map_or(termination, AsFd::as_fd);
        let fds = [termination, exit, self.signals.as_fd(), input.as_fd()];
        let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut fds, poll_timeout(left)) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(Failure::System("wait", errno.into())),
        }
        // A terminal that is gone is readable; the error comes when it is read.
        let [termination, exit, signal, input] = fds.map(|fd| fd.any() == Some(true));
        Ok(Some(Ready {
            termination,
            exit: exit && self.exit.is_some(),
            signal,
            input,
        }))
    }

    fn read_keys(&mut self) -> io::Result<Vec<KeyPress>> {
        let mut bytes = [0; 256];
        match read(stdin().as_fd(), &mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.keys_read_at = Instant::now();
                Ok(self.keys.feed(&bytes[..count]))
            }
            Err(Errno::EINTR | Errno::EAGAIN) => Ok(Vec::new()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn read_signals(&self) -> Option<Input> {
        let mut input = None;
        while let Ok(Some(info)) = self.signals.read_signal() {
            input = match (Signal::try_from(info.ssi_signo as i32), input) {
                (Ok(Signal::SIGTSTP), _) => return Some(Input::Suspend),
                (Ok(Signal::SIGCONT), _) => Some(Input::Redraw { was_stopped: true }),
                (Ok(Signal::SIGWINCH), None) => Some(Input::Redraw { was_stopped: false }),
                (_, input) => input,
            };
        }
        input
    }
}

/// Which descriptors are readable.
struct Ready {
    termination: bool,
    exit: bool,
    signal: bool,
    input: bool,
}

/// Which processes stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// All processes of the job, as if the terminal had turned Ctrl-Z into SIGTSTP.
    Job,
    /// Only this process, which was sent the signal.
    ThisProcess,
}

/// Stops this process as Ctrl-Z does, and returns when it is continued. In an orphaned process group
/// (setpgid(2)), where no shell could continue it, the kernel does not stop it.
pub(super) fn stop(which: Stop) {
    let stopping = SigSet::from(Signal::SIGTSTP);
    // SIGTSTP stays blocked until the terminal has been restored. The caller has done that by now, so
    // it is unblocked here, which stops us. These calls do not fail.
    let _ = match which {
        Stop::Job => kill(Pid::from_raw(0), Signal::SIGTSTP),
        Stop::ThisProcess => raise(Signal::SIGTSTP),
    };
    let _ = stopping.thread_unblock();
    let _ = stopping.thread_block();
}
