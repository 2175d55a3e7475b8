//! Where code is, as text: a function, and a source line.

use super::paths::ShownPaths;
use crate::text::{Escaped, UNKNOWN, or_dash};

/// The name of a function, as one word.
pub(super) fn function_or_unknown(function: Option<&str>) -> String {
    or_dash(function.map(Escaped))
}

/// `file:line`; `file` if the line is not known, `-` if neither is.
pub(super) fn source_or_unknown(
    file: Option<&str>,
    line: Option<u32>,
    paths: &ShownPaths,
) -> String {
    match (file.map(|file| paths.show(file)), line) {
        (Some(file), Some(line)) => format!("{}:{line}", Escaped(file)),
        (Some(file), None) => Escaped(file).to_string(),
        (None, _) => UNKNOWN.to_owned(),
    }
}
