//! [`Format`], and what all JSON answers have in common.

use std::io;

use crate::failure::Failure;

/// How an answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Lines for programs to read.
    Plain,
    /// Columns for people to read.
    Table,
    /// One object, on one line.
    Json,
}

/// The version of all JSON output.
pub(super) const VERSION: u32 = 1;

pub(super) fn json(answer: &impl serde::Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string(answer).map_err(io::Error::from);
    Ok(text.map_err(Failure::Output)? + "\n")
}
