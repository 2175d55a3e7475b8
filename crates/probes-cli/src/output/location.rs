//! Where code is, as text: a function, and a source line.

use super::paths::ShownPaths;
use crate::text::Escaped;

/// Printed where the file has no information.
const UNKNOWN: &str = "-";

/// The name of a function, as one word.
pub(super) fn function_or_unknown(function: Option<&str>) -> String {
    function.map_or_else(|| UNKNOWN.to_owned(), |name| Escaped(name).to_string())
}

/// `file:line`.
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
