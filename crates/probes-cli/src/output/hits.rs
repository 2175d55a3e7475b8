//! Hits, a line each. The field names are those of the JSON output.

use std::collections::HashMap;
use std::fmt::Write;

use probes_lib::{Event, LiveAddr, SourceLocation, SourceMap, Value};
use serde::{Serialize, Serializer};

use super::format::{Format, VERSION, json};
use super::plain::{function_or_unknown, source_or_unknown};
use crate::failure::Failure;
use crate::text::{Escaped, ocaml_string};

/// Formats hits.
pub(crate) struct Hits {
    format: Format,
    /// The source lines of each object.
    sources: Vec<Option<SourceMap>>,
    /// The location of each site that was hit.
    locations: HashMap<LiveAddr, SourceLocation>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename = "hit")]
struct Hit<'h> {
    version: u32,
    time: String,
    thread: Option<i32>,
    name: &'h str,
    object: std::borrow::Cow<'h, str>,
    address: String,
    function: Option<&'h str>,
    file: Option<&'h str>,
    line: Option<u32>,
    arguments: Vec<Argument<'h>>,
}

/// An argument, as an object whose key is its kind.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Argument<'a> {
    Int(i64),
    #[serde(serialize_with = "float")]
    Float(f64),
    String {
        text: String,
        /// The bytes as pairs of hexadecimal digits, if they are not valid UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<String>,
        is_whole: bool,
    },
    Int32(i32),
    Int64(i64),
    Nativeint(i64),
    Block {
        tag: &'a u8,
        size: &'a u64,
    },
    Unread(String),
    Unknown,
}

/// How many hits were not shown.
#[derive(Serialize)]
#[serde(tag = "type", rename = "missing")]
struct Missing {
    version: u32,
    lost: u64,
    skipped: u64,
}

impl Hits {
    /// Formats hits with the source lines of each object.
    pub(crate) fn new(format: Format, sources: Vec<Option<SourceMap>>) -> Hits {
        Hits {
            format,
            sources,
            locations: HashMap::new(),
        }
    }

    /// The line of a hit.
    pub(crate) fn line(&mut self, event: &Event) -> Result<String, Failure> {
        let source = self.sources.get(event.object_index());
        let locate = || {
            let source = source.and_then(Option::as_ref);
            source.map(|source| source.locate(event.site().address()))
        };
        let location = self
            .locations
            .entry(event.address())
            .or_insert_with(|| locate().unwrap_or_default());
        match self.format {
            Format::Json => json(&Hit::of(event, location)),
            Format::Plain | Format::Table => Ok(plain(event, location)),
        }
    }

    /// The line that says how many hits were not shown.
    pub(crate) fn missing(&self, lost: u64, skipped: u64) -> Result<String, Failure> {
        json(&Missing {
            version: VERSION,
            lost,
            skipped,
        })
    }
}

fn plain(event: &Event, location: &SourceLocation) -> String {
    let time = humantime::format_rfc3339_micros(event.time).to_string();
    let time = time.split_once('T').map_or(&*time, |(_, time)| time);
    let thread = event.thread.map_or("-".to_owned(), |tid| tid.to_string());
    let mut line = format!(
        "{} {thread} {} {} {} {}",
        time.trim_end_matches('Z'),
        Escaped(event.name()),
        event.address(),
        function_or_unknown(location.function.as_deref()),
        source_or_unknown(location.file.as_deref(), location.line),
    );
    for argument in &event.arguments {
        // Writing to a string does not fail.
        let _ = write!(line, " {}", in_ocaml(argument));
    }
    line.push('\n');
    line
}

/// A value as OCaml writes it, if OCaml can.
fn in_ocaml(value: &Value) -> String {
    match value {
        Value::Int(number) => number.to_string(),
        Value::Int32(number) => format!("{number}l"),
        Value::Int64(number) => format!("{number}L"),
        Value::Nativeint(number) => format!("{number}n"),
        Value::Float(number) => float_in_ocaml(*number),
        Value::String { bytes, is_whole } => {
            let more = if *is_whole { "" } else { "..." };
            ocaml_string(bytes) + more
        }
        Value::Block { tag, size } => format!("<{tag}:{size}>"),
        Value::Unread(at) => format!("{at:#x}"),
        Value::Unknown => "?".to_owned(),
    }
}

/// A float as text that OCaml reads as a float (never as an int), and as the same number.
fn float_in_ocaml(number: f64) -> String {
    match number {
        _ if number.is_nan() => "nan".to_owned(),
        f64::INFINITY => "infinity".to_owned(),
        f64::NEG_INFINITY => "neg_infinity".to_owned(),
        _ => {
            let text = format!("{number:?}");
            text.strip_suffix(".0")
                .map_or(text.clone(), |whole| format!("{whole}."))
        }
    }
}

impl<'h> Hit<'h> {
    fn of(event: &'h Event, location: &'h SourceLocation) -> Hit<'h> {
        Hit {
            version: VERSION,
            time: humantime::format_rfc3339_nanos(event.time).to_string(),
            thread: event.thread,
            name: event.name(),
            object: event.object().path().to_string_lossy(),
            address: event.address().to_string(),
            function: location.function.as_deref(),
            file: location.file.as_deref(),
            line: location.line,
            arguments: event.arguments.iter().map(Argument::of).collect(),
        }
    }
}

impl<'a> Argument<'a> {
    fn of(value: &'a Value) -> Argument<'a> {
        match value {
            Value::Int(number) => Argument::Int(*number),
            Value::Float(number) => Argument::Float(*number),
            Value::String { bytes, is_whole } => {
                let text = String::from_utf8_lossy(bytes).into_owned();
                let is_text = text.as_bytes() == bytes;
                let digits = || bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                Argument::String {
                    bytes: (!is_text).then(digits),
                    text,
                    is_whole: *is_whole,
                }
            }
            Value::Int32(number) => Argument::Int32(*number),
            Value::Int64(number) => Argument::Int64(*number),
            Value::Nativeint(number) => Argument::Nativeint(*number),
            Value::Block { tag, size } => Argument::Block { tag, size },
            Value::Unread(at) => Argument::Unread(format!("{at:#x}")),
            Value::Unknown => Argument::Unknown,
        }
    }
}

/// JSON has neither infinities nor NaN: they are strings.
fn float<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() {
        to.serialize_f64(*value)
    } else {
        to.serialize_str(&float_in_ocaml(*value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_in_ocaml() {
        let text = |bytes: &[u8], is_whole| Value::String {
            bytes: bytes.to_vec(),
            is_whole,
        };
        for (value, written) in [
            (Value::Int(-7), "-7"),
            (Value::Int64(7), "7L"),
            (Value::Int32(7), "7l"),
            (Value::Nativeint(7), "7n"),
            (Value::Float(1.5), "1.5"),
            (Value::Float(-2.0), "-2."),
            (Value::Float(1e300), "1e300"),
            (Value::Float(f64::NAN), "nan"),
            (Value::Float(f64::NEG_INFINITY), "neg_infinity"),
            (text("é\n".as_bytes(), true), "\"é\\n\""),
            (text(b"\xc3", false), "\"\\195\"..."),
            (Value::Block { tag: 0, size: 3 }, "<0:3>"),
            (Value::Unread(0x7f00_0000_1000), "0x7f0000001000"),
            (Value::Unknown, "?"),
        ] {
            assert_eq!(in_ocaml(&value), written);
        }
    }

    #[test]
    fn json_values_have_their_kind() {
        let json = |value: &Value| serde_json::to_string(&Argument::of(value)).unwrap();
        assert_eq!(json(&Value::Int(7)), r#"{"int":7}"#);
        assert_eq!(
            json(&Value::Float(f64::INFINITY)),
            r#"{"float":"infinity"}"#
        );
        let string = |bytes: &[u8]| Value::String {
            bytes: bytes.to_vec(),
            is_whole: true,
        };
        assert_eq!(
            json(&string("é\n".as_bytes())),
            r#"{"string":{"text":"é\n","is_whole":true}}"#
        );
        assert_eq!(
            json(&string(b"a\xff")),
            "{\"string\":{\"text\":\"a\u{fffd}\",\"bytes\":\"61ff\",\"is_whole\":true}}"
        );
        let block = Value::Block { tag: 0, size: 2 };
        assert_eq!(json(&block), r#"{"block":{"tag":0,"size":2}}"#);
        assert_eq!(json(&Value::Unknown), r#""unknown""#);
    }
}
