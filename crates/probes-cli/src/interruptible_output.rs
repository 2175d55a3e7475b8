//! [`InterruptibleOutput`]: where a long-running command writes its answer.

use std::fs::{File, OpenOptions};
use std::io::{self, Write, stderr, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::destination::Output;
use crate::failure::Failure;
use crate::output::WarningKind;
use crate::poll::is_writable;
use crate::signals::{TerminationSignals, WaitEnd};

/// Opens the terminal that is standard output once more, so that writes to the returned file do not
/// block, but writes of other processes to the terminal still do. If it cannot be opened, for example
/// because it is another user's after su(1), returns a duplicate of standard output, whose writes may block.
pub(crate) fn open_terminal() -> io::Result<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(flags.bits());
    match options.open("/proc/self/fd/1") {
        Ok(file) => Ok(file),
        Err(_) => Ok(stdout().as_fd().try_clone_to_owned()?.into()),
    }
}

/// How long, after a signal, a reader may take to make room for the next part of what is being written: a slow
/// reader gets all of it, and one that does not read delays the end no longer than this.
const MAX_WAIT_FOR_ROOM: Duration = Duration::from_secs(1);

/// Where a long-running command writes its result: a reader that stopped reading cannot keep the
/// command from ending at a signal or at its deadline.
pub(crate) struct InterruptibleOutput {
    output: Output,
    signals: TerminationSignals,
    deadline: Option<Instant>,
    /// Standard output, if it is a terminal.
    terminal: Option<File>,
    output_was_read: bool,
    /// The bytes that did not fit when the deadline came.
    rest: Vec<u8>,
}

/// Whether a long-running command continues.
pub(crate) enum Next {
    Continue,
    Stop,
}

impl InterruptibleOutput {
    /// Returns an output whose [`InterruptibleOutput::write`] gives up on a reader that does not read once one of
    /// `signals` comes.
    pub(crate) fn new(
        output: &Output,
        signals: TerminationSignals,
    ) -> Result<InterruptibleOutput, Failure> {
        let is_terminal = output.destination.is_terminal_on_stdout();
        let terminal = is_terminal.then(open_terminal).transpose();
        Ok(InterruptibleOutput {
            output: output.clone(),
            signals,
            deadline: None,
            terminal: terminal.map_err(Failure::of_output)?,
            output_was_read: true,
            rest: Vec::new(),
        })
    }

    /// From now on, [`InterruptibleOutput::write`] waits no longer than until `deadline`.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    pub(crate) fn signals(&self) -> &TerminationSignals {
        &self.signals
    }

    /// Unblocks the signals, and writes what there was no room for when the deadline came. Returns whether the output
    /// was read, and whether this last write succeeded. If a signal came while the reader did not read, the output was
    /// not read: warns of that, unless standard error would block.
    pub(crate) fn end(self) -> (bool, Result<(), Failure>) {
        self.signals.unblock();
        if !self.output_was_read && is_writable(stderr().as_fd()) {
            self.output.messages.warning(
                WarningKind::UnreadAnswer,
                "the answer is cut off, perhaps within a line: its reader had not made room for the rest when the command \
                 was asked to end, nor within a second of that",
                "what was not written is lost, unless it follows here; -for ends a command without cutting its answer off",
            );
        }
        // An empty write would empty the file of -o, even if the command has failed.
        let written = if self.rest.is_empty() {
            Ok(())
        } else {
            self.output.destination.print(&self.rest)
        };
        (self.output_was_read, written)
    }

    /// Does the same after a failure, which is returned; if the last write fails, too, that is reported.
    pub(crate) fn end_after(self, failure: Failure) -> Failure {
        let messages = self.output.messages;
        let (_, printed) = self.end();
        if let Err(unwritten) = printed {
            messages.failure(&unwritten);
        }
        failure
    }

    /// Writes lines. Returns [`Next::Stop`] if a signal or the deadline comes before all of them are written. After the
    /// first signal, the rest is still written as long as room for each part of it comes within [`MAX_WAIT_FOR_ROOM`].
    pub(crate) fn write(&mut self, text: &str) -> Result<Next, Failure> {
        self.write_after(false, text)
    }

    /// Same as [`InterruptibleOutput::write`], maybe after the first signal. Writes nothing more once the output was not read.
    pub(crate) fn write_after(
        &mut self,
        mut is_interrupted: bool,
        text: &str,
    ) -> Result<Next, Failure> {
        if !self.output_was_read {
            return Ok(Next::Stop);
        }
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let soon = is_interrupted.then(|| Instant::now() + MAX_WAIT_FOR_ROOM);
            let deadline = soon.or(self.deadline);
            match self
                .signals
                .wait_to_write(&self.output.destination, deadline)?
            {
                None => {}
                Some(WaitEnd::Interrupted) if !is_interrupted => {
                    is_interrupted = true;
                    continue;
                }
                Some(end) => {
                    self.output_was_read = !is_interrupted && !matches!(end, WaitEnd::Interrupted);
                    if self.output_was_read {
                        self.rest = rest.to_vec();
                    }
                    return Ok(Next::Stop);
                }
            }
            match self.write_some(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if is_temporary(&error) => {}
                Err(error) => return Err(self.output.destination.unwritten(error)),
            }
        }
        Ok(if is_interrupted {
            Next::Stop
        } else {
            Next::Continue
        })
    }

    /// Writes as much as there is room for now.
    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(terminal) = &self.terminal {
            let mut terminal = terminal;
            return terminal.write(bytes);
        }
        self.output.destination.write_some(bytes)
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
