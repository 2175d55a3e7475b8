//! [`Messages`]: what a command says beside its answer, on standard error.

use std::fmt;

use crate::failure::Failure;
use crate::output::{self, MessageKind, WarningKind};
use crate::standard_error;
use crate::status_line;
use crate::text::{Escaped, number_that_were};

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

/// Writes messages to standard error: in JSON, an object each; in text, a line each, followed by lines that show a
/// place in what was typed, and by a line for the hint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Messages {
    level: Level,
    form: MessageForm,
    /// The process that they are about.
    pid: Option<i32>,
    /// Whether the text names the process.
    shows_pid: bool,
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
            shows_pid: true,
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

    /// The same, about a process that may be the only one.
    pub(crate) fn about_one(self, pid: i32, is_only: bool) -> Messages {
        if is_only {
            self.with_pid(pid)
        } else {
            self.about(pid)
        }
    }

    /// Whether progress may be shown: people read the messages, and want more than errors.
    pub(crate) fn may_show_progress(&self) -> bool {
        self.level > Level::Errors && self.form == MessageForm::Text
    }

    /// Why a command failed, and what to do about it.
    pub(crate) fn failure(&self, failure: &Failure) {
        let about = Messages {
            pid: self.pid.or(failure.pid()),
            ..*self
        };
        let (kind, hint) = (failure.kind(), failure.hint());
        let kind = MessageKind::Error(&kind);
        let marked = failure.marked().unwrap_or_default();
        about.write_marked(kind, &failure.to_string(), &marked, hint.as_deref());
    }

    /// What is unusual, though the command succeeds, and what to do about it.
    pub(crate) fn warning(&self, kind: WarningKind, message: &str, hint: &str) {
        self.write(MessageKind::Warning(kind), message, Some(hint));
    }

    /// What was done that is not a part of the answer on standard output.
    pub(crate) fn note(&self, message: &str) {
        self.write(MessageKind::Note, message, None);
    }

    /// Same as [`Messages::note`], but in text only: in JSON, a field of the answer says it.
    pub(crate) fn note_to_people(&self, message: &str) {
        if self.form == MessageForm::Text {
            self.note(message);
        }
    }

    /// What is being done.
    pub(crate) fn step(&self, message: fmt::Arguments<'_>) {
        if self.level >= Level::Steps {
            self.write(MessageKind::Step, &message.to_string(), None);
        }
    }

    fn write(&self, kind: MessageKind<'_>, message: &str, hint: Option<&str>) {
        self.write_marked(kind, message, "", hint);
    }

    /// Same as `write`. In text, the lines `marked`, which show a place in what was typed, follow the message.
    fn write_marked(&self, kind: MessageKind<'_>, message: &str, marked: &str, hint: Option<&str>) {
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
                let pid = self.pid.filter(|_| self.shows_pid);
                let process = pid.map_or_else(String::new, |pid| format!("{pid}: "));
                // Escaped, because other users may have chosen the names and paths in the message.
                let line = format!("{start}{process}{}\n", Escaped(message));
                let marked = marked.lines().map(|line| format!("{}\n", Escaped(line)));
                let hint = hint.map(|hint| format!("hint: {}\n", Escaped(hint)));
                std::iter::once(line).chain(marked).chain(hint).collect()
            }
        };
        status_line::erase();
        standard_error::write_message(&lines, |dropped| self.line_of_dropped(dropped));
    }

    /// Says how many messages were dropped since that was said last, if any were.
    pub(crate) fn say_dropped(&self) {
        standard_error::say_dropped(|dropped| self.line_of_dropped(dropped));
    }

    fn line_of_dropped(&self, dropped: u64) -> String {
        let dropped = number_that_were(dropped, "message");
        let note = format!("{dropped} dropped here: standard error was not read");
        match self.form {
            MessageForm::Json => output::message(MessageKind::Note, &note, None, None),
            MessageForm::Text => note + "\n",
        }
    }
}
