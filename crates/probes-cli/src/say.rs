//! Writes the result of a command to standard output, and everything else to standard error.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write, stderr, stdout};
use std::mem::take;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Instant;

use nix::fcntl::OFlag;

use crate::destination::Destination;
use crate::failure::Failure;
use crate::output::{self, MessageKind, WarningKind};
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

/// How messages are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MessageForm {
    /// For people.
    #[default]
    Text,
    /// An object each, for programs.
    Json,
}

/// Writes messages to standard error, one line each, and a second one for a hint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Messages {
    level: Level,
    form: MessageForm,
    /// The process that they are about.
    pid: Option<i32>,
    /// Whether the text names the process.
    names_process: bool,
}

impl Messages {
    /// Writes the messages of `level` and the more important ones.
    pub(crate) fn new(level: Level, form: MessageForm) -> Messages {
        Messages {
            level,
            form,
            ..Messages::default()
        }
    }

    /// The same, about one of several processes: with the pid at the start of each message.
    pub(crate) fn about(self, pid: i32) -> Messages {
        Messages {
            names_process: true,
            ..self.with_pid(pid)
        }
    }

    /// The same, about the only process: its pid is in JSON, but not in the text.
    pub(crate) fn with_pid(self, pid: i32) -> Messages {
        Messages {
            pid: Some(pid),
            ..self
        }
    }

    /// Why a command failed, and what to do about it.
    pub(crate) fn failure(&self, failure: &Failure) {
        let about = Messages {
            pid: self.pid.or(failure.pid()),
            ..*self
        };
        let (kind, hint) = (failure.kind(), failure.hint());
        let kind = MessageKind::Error(&kind);
        about.write(kind, &failure.to_string(), hint.as_deref());
    }

    /// What is unusual, though the command succeeds, and what to do about it.
    pub(crate) fn warning(&self, kind: WarningKind, message: &str, hint: &str) {
        self.write(MessageKind::Warning(kind), message, Some(hint));
    }

    /// Reports what was done, where it does not belong into the result on standard output.
    pub(crate) fn note(&self, message: &str) {
        self.write(MessageKind::Note, message, None);
    }

    /// What is being done.
    pub(crate) fn step(&self, message: fmt::Arguments<'_>) {
        if self.level >= Level::Steps {
            self.write(MessageKind::Step, &message.to_string(), None);
        }
    }

    fn write(&self, kind: MessageKind<'_>, message: &str, hint: Option<&str>) {
        let (level, start) = match kind {
            MessageKind::Error(_) => (Level::Errors, "ocaml-probes: "),
            MessageKind::Warning(_) => (Level::Warnings, "ocaml-probes: warning: "),
            MessageKind::Note => (Level::Warnings, ""),
            MessageKind::Step => (Level::Steps, ""),
        };
        if level > self.level {
            return;
        }
        let lines = match self.form {
            MessageForm::Json => vec![output::message(kind, message, hint, self.pid)],
            MessageForm::Text => {
                let pid = self.pid.filter(|_| self.names_process);
                let process = pid.map_or_else(String::new, |pid| format!("{pid}: "));
                // Escaped, because other users may have chosen the names and paths in the message.
                let line = format!("{start}{process}{}\n", Escaped(message));
                let hint = hint.map(|hint| format!("hint: {}\n", Escaped(hint)));
                std::iter::once(line).chain(hint).collect()
            }
        };
        for line in lines {
            // Each line by one write, because a traced program may write to the same place. If standard
            // error is closed, there is no place to report that.
            let _ = stderr().write_all(line.as_bytes());
        }
    }
}

/// Writes a result to standard output.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_bytes(text.as_bytes())
}

/// Same as [`print()`], for text that may begin in the middle of a UTF-8 character.
pub(crate) fn print_bytes(text: &[u8]) -> Result<(), Failure> {
    let mut out = BufWriter::new(stdout().lock());
    let written = out.write_all(text).and_then(|()| out.flush());
    written.map_err(Failure::Output)
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

/// Where a long-running command writes its result: a reader that stopped reading cannot keep the
/// command from ending at a signal or at its deadline.
pub(crate) struct InterruptibleOutput {
    destination: Destination,
    signals: TerminationSignals,
    deadline: Option<Instant>,
    /// Standard output, if it is a terminal.
    terminal: Option<File>,
    was_read: bool,
    /// What there was no room for when the deadline came.
    rest: Vec<u8>,
}

/// Whether a long-running command continues.
pub(crate) enum Next {
    Continue,
    Stop,
}

impl InterruptibleOutput {
    /// Its [`InterruptibleOutput::write`] waits no longer than until one of `signals` comes.
    pub(crate) fn new(
        destination: Destination,
        signals: TerminationSignals,
    ) -> Result<InterruptibleOutput, Failure> {
        let is_terminal = destination.is_terminal_on_stdout();
        let terminal = is_terminal.then(open_terminal).transpose();
        Ok(InterruptibleOutput {
            destination,
            signals,
            deadline: None,
            terminal: terminal.map_err(Failure::Output)?,
            was_read: true,
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

    /// Returns the signals.
    pub(crate) fn into_signals(self) -> TerminationSignals {
        self.signals
    }

    /// False if a signal came while the reader did not read.
    pub(crate) fn was_read(&self) -> bool {
        self.was_read
    }

    /// What there was no room for when the deadline came, to be printed before all else.
    pub(crate) fn take_rest(&mut self) -> Vec<u8> {
        take(&mut self.rest)
    }

    /// Writes lines; [`Next::Stop`] if a signal or the deadline comes before there is room for them.
    pub(crate) fn write(&mut self, text: &str) -> Result<Next, Failure> {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            if let Some(end) = self
                .signals
                .wait_to_write(&self.destination, self.deadline)?
            {
                self.was_read = !matches!(end, WaitEnd::Interrupted);
                if self.was_read {
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
        if let Some(terminal) = &self.terminal {
            let mut terminal = terminal;
            return terminal.write(bytes);
        }
        self.destination.write_some(bytes)
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
