//! What can be wrong with the functions that were asked for.

use std::path::PathBuf;

use crate::address::LiveAddr;

use crate::patch_plan::refusal::Refusal;

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
    /// No function is known to be at this address of the process.
    #[error("no function is known at {address}")]
    NoneAt {
        /// The address that was asked for.
        address: LiveAddr,
    },
    /// None of the functions that were asked for can be observed.
    #[error("{}", none_possible(refused))]
    NonePossible {
        /// Which, and why.
        refused: Vec<(String, Refusal)>,
    },
}

impl FunctionError {
    /// Returns the message about the file `subject`.
    pub(super) fn with_subject(&self, subject: &str) -> String {
        let FunctionError::NoMatch {
            glob,
            unreadable,
            near,
        } = self
        else {
            return format!("{}: {self}", file_name(subject.as_ref()));
        };
        format!(
            "no function in {} matches {glob}{}{}",
            file_name(subject.as_ref()),
            unreadable_suffix(unreadable),
            did_you_mean(near)
        )
    }
}

/// Says why functions cannot be observed: the first of them, and how many more there are.
fn none_possible(refused: &[(String, Refusal)]) -> String {
    let Some((name, why)) = refused.first() else {
        return "no function can be observed".to_owned();
    };
    match refused.len() - 1 {
        0 => format!("the function {name} {why}"),
        others => format!("the function {name} {why}, and {others} more cannot be observed either"),
    }
}
