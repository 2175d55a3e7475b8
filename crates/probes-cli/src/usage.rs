//! [`UsageError`]: what is wrong with the arguments.

use std::fmt;

/// What is wrong with the arguments, and which help says how to do it right.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UsageError {
    subcommand: Option<String>,
    message: String,
    marked: Option<String>,
}

impl UsageError {
    /// What is wrong with the arguments of `subcommand`; `None` before there is one.
    pub(crate) fn new(subcommand: Option<&str>, message: impl Into<String>) -> UsageError {
        UsageError {
            subcommand: subcommand.map(str::to_owned),
            message: message.into(),
            marked: None,
        }
    }

    /// The same error, with lines that show where in a value the mistake is.
    pub(crate) fn with_marked(self, marked: Option<String>) -> UsageError {
        UsageError { marked, ..self }
    }

    /// Lines that show the place in a value.
    pub(crate) fn marked(&self) -> Option<&str> {
        self.marked.as_deref()
    }

    /// Says which help to read.
    pub(crate) fn hint(&self) -> String {
        match &self.subcommand {
            Some(subcommand) => format!("see ocaml-probes help {subcommand}"),
            None => "see ocaml-probes help".to_owned(),
        }
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subcommand {
            Some(subcommand) => write!(f, "{subcommand}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}
