//! [`Misplaced`]: a part of an expression or key that is not possible with a flag.

use std::error::Error;
use std::fmt;
use std::ops::Range;

use probes_lib::BadExpression;

/// Why a part of a value is not possible there, and where it is.
#[derive(Debug)]
pub(crate) struct Misplaced {
    message: &'static str,
    marked: String,
}

impl Misplaced {
    /// An error about a place in what was typed, in bytes.
    pub(super) fn at(typed: &str, place: Range<usize>, message: &'static str) -> Misplaced {
        Misplaced {
            message,
            marked: BadExpression::mark(typed, place),
        }
    }

    /// Lines that show the place.
    pub(crate) fn marked(&self) -> String {
        self.marked.clone()
    }
}

impl fmt::Display for Misplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)
    }
}

impl Error for Misplaced {}
