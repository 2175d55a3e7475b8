//! [`Format`], the figures that are shown in all of them, and what all JSON answers have in common.

use std::io::{self, Write};
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::ser::Formatter;

use crate::failure::Failure;
use crate::text::is_unprintable;

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

/// An object as a line. It can be written to a terminal, like all text.
pub(super) fn json(answer: &impl Serialize) -> Result<String, Failure> {
    let mut lines = JsonLines::default();
    lines.add(answer)?;
    lines.text()
}

/// Objects, each as a line.
#[derive(Default)]
pub(super) struct JsonLines(Vec<u8>);

impl JsonLines {
    pub(super) fn add(&mut self, object: &impl Serialize) -> Result<(), Failure> {
        write_json(object, &mut self.0).map_err(Failure::of_output)
    }

    pub(super) fn text(self) -> Result<String, Failure> {
        String::from_utf8(self.0).map_err(|error| Failure::of_output(io::Error::other(error)))
    }
}

/// Writes an object as a line.
pub(super) fn write_json(answer: &impl Serialize, mut to: impl Write) -> io::Result<()> {
    let mut serializer = serde_json::Serializer::with_formatter(&mut to, Printable);
    answer.serialize(&mut serializer)?;
    to.write_all(b"\n")
}

/// `12.3 `: what a line begins with that is printed while an observation goes on, with the seconds so far.
pub(super) fn time_prefix(at: Option<Duration>) -> String {
    at.map(|at| format!("{:.1} ", at.as_secs_f64()))
        .unwrap_or_default()
}

/// Serializes a duration as seconds.
pub(super) fn seconds<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(value.as_secs_f64())
}

/// The same, or null.
pub(super) fn seconds_or_null<S: Serializer>(
    value: &Option<Duration>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => seconds(value, to),
        None => to.serialize_none(),
    }
}

/// Serializes a value as the word for it.
pub(super) fn word<S: Serializer>(
    value: &(impl Copy + Into<&'static str>),
    to: S,
) -> Result<S::Ok, S::Error> {
    to.serialize_str((*value).into())
}

/// Compact JSON in which characters that a terminal would not show are escapes.
struct Printable;

impl Formatter for Printable {
    /// `fragment` has no character that JSON requires to be escaped.
    fn write_string_fragment<W>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()>
    where
        W: ?Sized + Write,
    {
        let mut rest = fragment;
        // Nearly all text is such.
        if fragment.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            return writer.write_all(fragment.as_bytes());
        }
        while let Some((at, hidden)) = rest.char_indices().find(|&(_, c)| is_unprintable(c)) {
            writer.write_all(&rest.as_bytes()[..at])?;
            for unit in hidden.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = &rest[at + hidden.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
}

/// Figures that are shown in all formats, and as a picture.
pub(crate) trait ReportedFigures: serde::Serialize {
    /// A line for each.
    fn plain(&self) -> String;

    /// The table, and charts.
    fn charts(&self) -> String;

    fn table(&self) -> String;

    fn picture(&self) -> String;

    /// The same, while the observation goes on.
    fn so_far(self) -> Self
    where
        Self: Sized;

    /// How many lines there are, and what they add up to, in words.
    fn sum(&self) -> (usize, String);

    /// How many hits or calls there are, if all are untyped.
    fn only_untyped(&self) -> Option<u64>;

    /// How many hits have keys that found no room.
    fn of_other_keys(&self) -> u64 {
        0
    }

    fn text(&self, format: Format) -> Result<String, Failure>
    where
        Self: Sized,
    {
        match format {
            Format::Plain => Ok(self.plain()),
            Format::Table => Ok(self.charts()),
            Format::Json => json(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_nothing_that_steers_a_terminal() {
        let text = "é\u{1b}\u{7f}\u{9b}31m\u{202e}\u{e0041} \"";
        let line = json(&text).unwrap();
        assert_eq!(
            line,
            "\"é\\u001b\\u007f\\u009b31m\\u202e\\udb40\\udc41 \\\"\"\n"
        );
        let read: String = serde_json::from_str(&line).unwrap();
        assert_eq!(read, text);
    }
}
