//! What is written where: the answer to standard output, everything else to standard error.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write, stderr, stdout};
use std::mem::take;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::failure::Failure;
use crate::signals::{TerminationSignals, WaitEnd};
use crate::text::Escaped;

/// How much to write to standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// Only errors (-quiet).
    Errors,
    /// Also warnings, what was skipped, and how long the process was stopped.
    #[default]
    Warnings,
    /// Also each step (-verbose).
    Steps,
}

/// Writes messages to standard error, one line each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Messages {
    level: Level,
    /// The process that they are about, where there are several.
    pid: Option<i32>,
}

impl Messages {
    /// Writes the messages of `level` and the more important ones.
    pub(crate) fn new(level: Level) -> Messages {
        Messages { level, pid: None }
    }

    /// The same, with the pid at the start of each message.
    pub(crate) fn about(self, pid: i32) -> Messages {
        Messages {
            pid: Some(pid),
            ..self
        }
    }

    /// Why a command failed, and what to do about it.
    pub(crate) fn failure(&self, failure: &Failure) {
        self.write(Level::Errors, "ocaml-probes: ", format_args!("{failure}"));
        if let Some(hint) = failure.hint() {
            self.hint(Level::Errors, &hint);
        }
    }

    /// What is unusual, though the command succeeds, and what to do about it.
    pub(crate) fn warning(&self, message: &str, hint: &str) {
        let start = "ocaml-probes: warning: ";
        self.write(Level::Warnings, start, format_args!("{message}"));
        self.hint(Level::Warnings, hint);
    }

    /// What was done that is not a part of the answer.
    pub(crate) fn note(&self, message: &str) {
        self.write(Level::Warnings, "", format_args!("{message}"));
    }

    /// What is being done.
    pub(crate) fn step(&self, message: fmt::Arguments<'_>) {
        self.write(Level::Steps, "", message);
    }

    /// Writes a hint without the pid, which the message before it already has.
    fn hint(self, level: Level, hint: &str) {
        let without_pid = Messages { pid: None, ..self };
        without_pid.write(level, "hint: ", format_args!("{hint}"));
    }

    fn write(&self, level: Level, start: &str, message: fmt::Arguments<'_>) {
        if level <= self.level {
            let process = self.pid.map_or_else(String::new, |pid| format!("{pid}: "));
            // Escaped, because other users may have chosen the names and paths in the message. Written as a
            // whole line, because a traced program may write to the same place.
            let line = format!("{start}{process}{}\n", Escaped(&message.to_string()));
            // If standard error is closed, there is no place to report that.
            let _ = stderr().write_all(line.as_bytes());
        }
    }
}

/// Writes an answer to standard output.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_bytes(text.as_bytes())
}

/// The same, of text that may begin within a character.
pub(crate) fn print_bytes(text: &[u8]) -> Result<(), Failure> {
    let mut out = BufWriter::new(stdout().lock());
    let written = out.write_all(text).and_then(|()| out.flush());
    written.map_err(Failure::Output)
}

/// Writes what took time to learn to standard output, or to standard error if that fails: the answer must
/// not be lost. The failure is returned all the same. But a reader that has gone does not want the answer.
pub(crate) fn print_result(text: &str) -> Result<(), Failure> {
    let printed = print(text);
    if let Err(failure) = &printed {
        if !failure.is_closed_pipe() {
            // If it cannot be written there either, there is no other place.
            let _ = print_to_stderr(text);
        }
    }
    printed
}

/// Writes a result, while nobody reads standard output, to standard error, as far as that takes it without
/// waiting: the command was told to end.
pub(crate) fn print_result_without_waiting(text: &str) -> Result<(), Failure> {
    // poll(2) says that a pipe can be written if there is room for PIPE_BUF bytes.
    const PIECE: usize = 4096;
    for piece in text.as_bytes().chunks(PIECE) {
        let mut errors = stderr();
        let mut fds = [PollFd::new(errors.as_fd(), PollFlags::POLLOUT)];
        if !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1)) {
            break;
        }
        errors.write_all(piece).map_err(Failure::Output)?;
    }
    Ok(())
}

/// Writes an answer to standard error, for commands whose standard output belongs to a traced program.
pub(crate) fn print_to_stderr(text: &str) -> Result<(), Failure> {
    stderr().write_all(text.as_bytes()).map_err(Failure::Output)
}

/// Standard output, which is a terminal, opened once more, so that writes to the returned file do
/// not block, but writes of other processes still do. If it cannot be opened, for example because
/// the terminal is another user's after su(1), returns a duplicate of standard output.
pub(crate) fn open_terminal() -> io::Result<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(flags.bits());
    match options.open("/proc/self/fd/1") {
        Ok(file) => Ok(file),
        Err(_) => Ok(stdout().as_fd().try_clone_to_owned()?.into()),
    }
}

/// Standard output of a command that runs for a time: a reader that does not read cannot keep it from
/// ending.
pub(crate) struct InterruptibleStdout {
    signals: TerminationSignals,
    deadline: Option<Instant>,
    /// Standard output, if it is a terminal.
    terminal: Option<File>,
    stdout_was_read: bool,
    /// What there was no room for when the deadline came.
    rest: Vec<u8>,
}

/// Whether a command that runs for a time goes on.
pub(crate) enum Next {
    Continue,
    Stop,
}

impl InterruptibleStdout {
    /// Its [`InterruptibleStdout::write`] waits no longer than until one of `signals` comes.
    pub(crate) fn new(signals: TerminationSignals) -> Result<InterruptibleStdout, Failure> {
        let terminal = stdout().is_terminal().then(open_terminal).transpose();
        Ok(InterruptibleStdout {
            signals,
            deadline: None,
            terminal: terminal.map_err(Failure::Output)?,
            stdout_was_read: true,
            rest: Vec::new(),
        })
    }

    /// From now on, [`InterruptibleStdout::write`] waits no longer than until `deadline`.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    pub(crate) fn signals(&self) -> &TerminationSignals {
        &self.signals
    }

    /// Gives the signals back.
    pub(crate) fn into_signals(self) -> TerminationSignals {
        self.signals
    }

    /// False if a signal came while the reader did not read.
    pub(crate) fn stdout_was_read(&self) -> bool {
        self.stdout_was_read
    }

    /// What there was no room for when the deadline came, to be printed before all else.
    pub(crate) fn take_rest(&mut self) -> Vec<u8> {
        take(&mut self.rest)
    }

    /// Writes lines; [`Next::Stop`] if a signal or the deadline comes before there is room for them.
    pub(crate) fn write(&mut self, text: &str) -> Result<Next, Failure> {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            if let Some(end) = self.signals.wait_to_write(self.deadline)? {
                self.stdout_was_read = !matches!(end, WaitEnd::Interrupted);
                if self.stdout_was_read {
                    self.rest = rest.to_vec();
                }
                return Ok(Next::Stop);
            }
            match self.write_some(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if is_temporary(&error) => {}
                Err(error) => return Err(Failure::Output(error)),
            }
        }
        Ok(Next::Continue)
    }

    /// Writes as much as there is room for now.
    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        // poll(2) says that a pipe can be written if there is room for PIPE_BUF bytes.
        const PIECE: usize = 4096;
        if let Some(terminal) = &self.terminal {
            let mut terminal = terminal;
            return terminal.write(bytes);
        }
        // Whole lines, so that no signal cuts one.
        let most = &bytes[..bytes.len().min(PIECE)];
        let end = most.iter().rposition(|&byte| byte == b'\n');
        let piece = &most[..end.map_or(most.len(), |end| end + 1)];
        let mut output = stdout().lock();
        output.write_all(piece)?;
        output.flush()?;
        Ok(piece.len())
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
