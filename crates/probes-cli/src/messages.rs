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
}

impl Messages {
    /// Says what is of `level` or more important.
    pub(crate) fn new(level: Level) -> Messages {
        Messages { level }
    }

    /// Why it could not be done, and what can be done about it.
    pub(crate) fn error(&self, message: &str, hint: Option<String>) {
        self.say(Level::Errors, format_args!("ocaml-probes: {message}"));
        if let Some(hint) = hint {
            self.say(Level::Errors, format_args!("hint: {hint}"));
        }
    }

    /// What is odd, though it could be done, and what can be done about it.
    pub(crate) fn warning(&self, message: &str, hint: &str) {
        self.say(
            Level::Warnings,
            format_args!("ocaml-probes: warning: {message}"),
        );
        self.say(Level::Warnings, format_args!("hint: {hint}"));
    }

    /// What was done beside the answer.
    pub(crate) fn note(&self, message: &str) {
        self.say(Level::Warnings, format_args!("{message}"));
    }

    /// What is being done.
    pub(crate) fn step(&self, message: fmt::Arguments<'_>) {
        self.say(Level::Steps, message);
    }

    fn say(&self, level: Level, message: fmt::Arguments<'_>) {
        if level <= self.level {
            // Names and paths in it are other people's. Whole lines, because a traced program may
            // write to the same place.
            let line = format!("{}\n", Escaped(&message.to_string()));
            // There is nobody to tell that standard error is closed.
            let _ = stderr().write_all(line.as_bytes());
        }
    }
}
