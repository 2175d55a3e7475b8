//! [`Stop`]: why nothing is run: the arguments make no sense, or help was asked for.

use std::fmt;

/// Why parsing ends before anything is run.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Help or the version was asked for: the answer.
    Asked(String),
    /// The arguments cannot be used.
    Usage(UsageError),
}

/// What is wrong with the arguments, and whose help says how it is done right.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UsageError {
    subcommand: Option<String>,
    message: String,
}

impl UsageError {
    /// What is wrong with the arguments of `subcommand`; `None` before there is one.
    pub(crate) fn new(subcommand: Option<&str>, message: impl Into<String>) -> UsageError {
        UsageError {
            subcommand: subcommand.map(str::to_owned),
            message: message.into(),
        }
    }

    /// Where to read on.
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

impl From<UsageError> for Stop {
    fn from(error: UsageError) -> Stop {
        Stop::Usage(error)
    }
}
