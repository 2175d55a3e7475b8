//! What can be wrong with the functions that were asked for.

use std::path::PathBuf;

use super::probe::{did_you_mean, file_name, unreadable_suffix};

/// Why functions are not found. The subject of the error is the program's file.
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum FunctionError {
    /// No function has a name that matches.
    #[error("no function matches {glob}")]
    NoMatch {
        /// What was asked for.
        glob: String,
        /// Files that are mapped and could not be read.
        unreadable: Vec<PathBuf>,
        /// Names that there are, nearest first.
        near: Vec<String>,
    },
}

impl FunctionError {
    /// Returns the message about the file `subject`.
    pub(super) fn with_subject(&self, subject: &str) -> String {
        let FunctionError::NoMatch {
            glob,
            unreadable,
            near,
        } = self;
        format!(
            "no function in {} matches {glob}{}{}",
            file_name(subject.as_ref()),
            unreadable_suffix(unreadable),
            did_you_mean(near)
        )
    }
}
