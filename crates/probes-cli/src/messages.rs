//! [`Messages`]: what goes to standard error, so that standard output carries nothing but the
//! answer.

use std::fmt;
use std::io::{Write, stderr};

use crate::output::Escaped;

/// How much to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// Why it could not be done (-quiet).
    Errors,
    /// Also what was odd, what was passed over, how long it took.
    #[default]
    Warnings,
    /// Also what is being done (-verbose).
    Steps,
}

/// Says things on standard error, one line each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Messages {
    level: Level,
    /// The process that it is about, where there are several.
    pid: Option<i32>,
}

impl Messages {
    /// Says what is of `level` or more important.
    pub(crate) fn new(level: Level) -> Messages {
        Messages { level, pid: None }
    }

    /// Says of every message which process it is about.
    pub(crate) fn about(self, pid: i32) -> Messages {
        Messages {
            pid: Some(pid),
            ..self
        }
    }

    /// Why it could not be done, and what can be done about it.
    pub(crate) fn error(&self, message: &str, hint: Option<String>) {
        self.say(Level::Errors, "ocaml-probes: ", format_args!("{message}"));
        if let Some(hint) = hint {
            self.hint(Level::Errors, &hint);
        }
    }

    /// What is odd, though it could be done, and what can be done about it.
    pub(crate) fn warning(&self, message: &str, hint: &str) {
        let start = "ocaml-probes: warning: ";
        self.say(Level::Warnings, start, format_args!("{message}"));
        self.hint(Level::Warnings, hint);
    }

    /// What was done beside the answer.
    pub(crate) fn note(&self, message: &str) {
        self.say(Level::Warnings, "", format_args!("{message}"));
    }

    /// What is being done.
    pub(crate) fn step(&self, message: fmt::Arguments<'_>) {
        self.say(Level::Steps, "", message);
    }

    /// It comes behind what says which process it is about.
    fn hint(self, level: Level, hint: &str) {
        let of_all = Messages { pid: None, ..self };
        of_all.say(level, "hint: ", format_args!("{hint}"));
    }

    fn say(&self, level: Level, start: &str, message: fmt::Arguments<'_>) {
        if level <= self.level {
            let process = self.pid.map_or_else(String::new, |pid| format!("{pid}: "));
            // Names and paths in it are other people's. Whole lines, because a traced program may
            // write to the same place.
            let line = format!("{start}{process}{}\n", Escaped(&message.to_string()));
            // There is nobody to tell that standard error is closed.
            let _ = stderr().write_all(line.as_bytes());
        }
    }
}
