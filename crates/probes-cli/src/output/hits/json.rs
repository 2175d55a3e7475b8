//! Hits as JSON, an object each.

use std::borrow::Cow;

use probes_lib::{Event, EventKind, Value};
use serde::{Serialize, Serializer};

use super::values::float_in_ocaml;
use super::{HitLocation, Missing, argument_names};
use crate::failure::Failure;
use crate::output::format::{VERSION, json};
use crate::output::function_sources::FirstCallView;
use crate::output::stacks::FoundStack;

/// The line of a hit, with the pid of its process if there are several.
pub(super) fn hit(
    pid: Option<i32>,
    event: &Event,
    location: &HitLocation,
    stack: Option<&FoundStack>,
) -> Result<String, Failure> {
    let hit = HitFields::of(pid, event, location);
    match event.kind {
        EventKind::Return => json(&Return {
            hit,
            result: event.arguments.first().map(Argument::of),
            stack,
        }),
        _ => json(&Hit {
            hit,
            arguments: event.arguments.iter().map(Argument::of).collect(),
            argument_names: argument_names(event).collect(),
            stack,
        }),
    }
}

/// The line that says how many hits were not shown.
pub(crate) fn missing(missing: Missing) -> Result<String, Failure> {
    json(&MissingLine {
        version: VERSION,
        missing,
    })
}

#[derive(Serialize)]
#[serde(tag = "type", rename = "hit")]
struct Hit<'h> {
    #[serde(flatten)]
    hit: HitFields<'h>,
    arguments: Vec<Argument<'h>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    argument_names: Vec<&'h str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<&'h FoundStack>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename = "return")]
struct Return<'h> {
    #[serde(flatten)]
    hit: HitFields<'h>,
    /// If it has one, and not in a floating-point register.
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Argument<'h>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<&'h FoundStack>,
}

/// The fields that hits and returns have in common.
#[derive(Serialize)]
struct HitFields<'h> {
    version: u32,
    /// If there are several processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    time: String,
    thread: Option<i32>,
    name: &'h str,
    object: Cow<'h, str>,
    address: String,
    function: Option<&'h str>,
    file: Option<&'h str>,
    line: Option<u32>,
    /// The first call of the function, where that is all that is known of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_call: Option<&'h FirstCallView>,
}

/// A value: an object whose only key is its kind, or the string "unknown".
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::output) enum Argument<'a> {
    Int(i64),
    #[serde(rename = "int")]
    Unsigned(u64),
    Float(Float),
    String(Text),
    Int32(i32),
    Int64(i64),
    Nativeint(i64),
    Floats {
        numbers: Vec<Float>,
        size: u64,
    },
    List {
        elements: Vec<Argument<'a>>,
        is_whole: bool,
    },
    Exception {
        name: Cow<'a, str>,
        arguments: Vec<Argument<'a>>,
        is_whole: bool,
    },
    Bigarray {
        kind: &'static str,
        layout: &'static str,
        dimensions: &'a [u64],
        rank: u64,
    },
    Custom {
        identifier: &'a str,
    },
    Block {
        tag: u8,
        size: u64,
        /// The kind of block that the tag stands for, if it does.
        #[serde(skip_serializing_if = "Option::is_none")]
        kind: Option<&'static str>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        fields: Vec<Argument<'a>>,
    },
    Unread(String),
    Unknown,
}

/// A string, or its first bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Text {
    text: String,
    /// The bytes as pairs of hexadecimal digits, if they are not valid UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<String>,
    pub(in crate::output) is_whole: bool,
    #[serde(skip)]
    pub(in crate::output) raw: Vec<u8>,
}

impl Text {
    pub(in crate::output) fn of(bytes: &[u8], is_whole: bool) -> Text {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let is_text = text.as_bytes() == bytes;
        let digits = || bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Text {
            bytes: (!is_text).then(digits),
            text,
            is_whole,
            raw: bytes.to_vec(),
        }
    }
}

/// How many hits were not shown.
#[derive(Serialize)]
#[serde(tag = "type", rename = "missing")]
struct MissingLine {
    version: u32,
    #[serde(flatten)]
    missing: Missing,
}

impl<'h> HitFields<'h> {
    fn of(pid: Option<i32>, event: &'h Event, location: &'h HitLocation) -> HitFields<'h> {
        HitFields {
            version: VERSION,
            pid,
            time: humantime::format_rfc3339_nanos(event.time).to_string(),
            thread: event.thread,
            name: event.name(),
            object: event.path().to_string_lossy(),
            address: event.address().to_string(),
            function: location.function.as_deref(),
            file: location.file.as_deref(),
            line: location.line,
            first_call: location.first_call.as_ref(),
        }
    }
}

impl<'a> Argument<'a> {
    pub(in crate::output) fn of(value: &'a Value) -> Argument<'a> {
        match value {
            Value::Int(number) => Argument::Int(*number),
            Value::Unsigned(number) => Argument::Unsigned(*number),
            Value::Float(number) => Argument::Float(Float(*number)),
            Value::String { bytes, is_whole } => Argument::String(Text::of(bytes, *is_whole)),
            Value::Int32(number) => Argument::Int32(*number),
            Value::Int64(number) => Argument::Int64(*number),
            Value::Nativeint(number) => Argument::Nativeint(*number),
            Value::Floats { numbers, size } => Argument::Floats {
                numbers: numbers.iter().copied().map(Float).collect(),
                size: *size,
            },
            Value::List { elements, is_whole } => Argument::List {
                elements: elements.iter().map(Argument::of).collect(),
                is_whole: *is_whole,
            },
            Value::Exception {
                name,
                arguments,
                is_whole,
            } => Argument::Exception {
                name: String::from_utf8_lossy(name),
                arguments: arguments.iter().map(Argument::of).collect(),
                is_whole: *is_whole,
            },
            Value::Bigarray {
                kind,
                is_fortran,
                dimensions,
                rank,
            } => Argument::Bigarray {
                kind,
                layout: if *is_fortran { "fortran" } else { "c" },
                dimensions,
                rank: *rank,
            },
            Value::Custom { identifier } => Argument::Custom { identifier },
            Value::Block { tag, size, fields } => Argument::Block {
                tag: *tag,
                size: *size,
                kind: Value::kind_of_block(*tag),
                fields: fields.iter().map(Argument::of).collect(),
            },
            Value::Unread(at) => Argument::Unread(format!("{at:#x}")),
            Value::Unknown => Argument::Unknown,
        }
    }
}

/// JSON has neither infinities nor NaN: they are strings.
pub(in crate::output) struct Float(f64);

impl Serialize for Float {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            to.serialize_f64(self.0)
        } else {
            to.serialize_str(&float_in_ocaml(self.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_values_have_their_kind() {
        let json = |value: &Value| serde_json::to_string(&Argument::of(value)).unwrap();
        assert_eq!(json(&Value::Int(7)), r#"{"int":7}"#);
        let most = json(&Value::Unsigned(u64::MAX));
        assert_eq!(most, r#"{"int":18446744073709551615}"#);
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
        let block = |tag, fields: &[Value]| Value::Block {
            tag,
            size: 2,
            fields: fields.to_vec(),
        };
        for (value, expected) in [
            (block(0, &[]), r#"{"block":{"tag":0,"size":2}}"#),
            (
                block(0, &[Value::Int(1), block(3, &[])]),
                r#"{"block":{"tag":0,"size":2,"fields":[{"int":1},{"block":{"tag":3,"size":2}}]}}"#,
            ),
            (
                block(247, &[]),
                r#"{"block":{"tag":247,"size":2,"kind":"closure"}}"#,
            ),
            (
                Value::Floats {
                    numbers: vec![1.5, f64::NAN],
                    size: 3,
                },
                r#"{"floats":{"numbers":[1.5,"nan"],"size":3}}"#,
            ),
            (
                Value::List {
                    elements: vec![Value::Int(1)],
                    is_whole: false,
                },
                r#"{"list":{"elements":[{"int":1}],"is_whole":false}}"#,
            ),
            (
                Value::Exception {
                    name: b"Failure".to_vec(),
                    arguments: vec![string(b"boom")],
                    is_whole: true,
                },
                r#"{"exception":{"name":"Failure","arguments":[{"string":{"text":"boom","is_whole":true}}],"is_whole":true}}"#,
            ),
            (
                Value::Bigarray {
                    kind: "float64",
                    is_fortran: false,
                    dimensions: vec![3, 4],
                    rank: 2,
                },
                r#"{"bigarray":{"kind":"float64","layout":"c","dimensions":[3,4],"rank":2}}"#,
            ),
            (
                Value::Custom {
                    identifier: "_chan".into(),
                },
                r#"{"custom":{"identifier":"_chan"}}"#,
            ),
        ] {
            assert_eq!(json(&value), expected);
        }
        assert_eq!(json(&Value::Unknown), r#""unknown""#);
    }
}
