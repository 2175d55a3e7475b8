//! [`StackQuality`]: how well a stack is known; and the marks that precede the functions of a stack in one line.

use std::fmt;

use probes_lib::StackEnd;
use serde::Serialize;

/// How well a stack is known. The names are those of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StackQuality {
    /// Down to the outermost frame.
    Complete,
    /// Frames are missing after the last one.
    Cut,
    /// A register was not known: its frames may be wrong.
    Guessed,
    /// The thread was running.
    Unread,
}

impl StackQuality {
    /// Of a stack with this `end`, if it was read.
    pub(super) fn of(end: Option<StackEnd>, is_guessed: bool) -> StackQuality {
        match end {
            None => StackQuality::Unread,
            Some(_) if is_guessed => StackQuality::Guessed,
            Some(StackEnd::Outermost) => StackQuality::Complete,
            Some(_) => StackQuality::Cut,
        }
    }

    /// What precedes its outermost function where stacks are lines; `None` if it is complete, or was not read.
    pub(super) fn mark(self) -> Option<String> {
        matches!(self, StackQuality::Cut | StackQuality::Guessed).then(|| format!("[{self}]"))
    }
}

/// What precedes a stack if it says whether there was a collection.
pub(super) const IN_COLLECTION: &str = "[collection]";
pub(super) const NOT_IN_COLLECTION: &str = "[no collection]";

/// Returns whether a part of a stack in one line is no function, but says something of those after it.
pub(super) fn is_mark(part: &str) -> bool {
    let qualities = [StackQuality::Cut, StackQuality::Guessed];
    let mut marks = qualities.into_iter().filter_map(StackQuality::mark);
    [IN_COLLECTION, NOT_IN_COLLECTION].contains(&part) || marks.any(|mark| mark == part)
}

impl fmt::Display for StackQuality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StackQuality::Complete => "complete",
            StackQuality::Cut => "cut",
            StackQuality::Guessed => "guessed",
            StackQuality::Unread => "unread",
        })
    }
}
