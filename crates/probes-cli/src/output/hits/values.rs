//! Values as text.

use std::iter;

use probes_lib::Value;

use crate::text::{Escaped, ocaml_string};

/// A value as OCaml writes it, if OCaml can.
pub(in crate::output) fn in_ocaml(value: &Value) -> String {
    match value {
        Value::Int(number) => number.to_string(),
        Value::Unsigned(number) => number.to_string(),
        Value::Int32(number) => format!("{number}l"),
        Value::Int64(number) => format!("{number}L"),
        Value::Nativeint(number) => format!("{number}n"),
        Value::Float(number) => float_in_ocaml(*number),
        Value::String { bytes, is_whole } => {
            let more = if *is_whole { "" } else { "..." };
            ocaml_string(bytes) + more
        }
        Value::Floats { numbers, size } => {
            let is_whole = numbers.len() as u64 == *size;
            let numbers = numbers.iter().map(|number| float_in_ocaml(*number));
            format!("[|{}|]", joined("; ", numbers, is_whole))
        }
        Value::List { elements, is_whole } => {
            let elements = elements.iter().map(in_ocaml);
            format!("[{}]", joined("; ", elements, *is_whole))
        }
        Value::Exception {
            name,
            arguments,
            is_whole,
        } => exception(name, arguments, *is_whole),
        Value::Bigarray {
            kind,
            is_fortran,
            dimensions,
            rank,
        } => {
            let layout = if *is_fortran { "fortran" } else { "c" };
            let is_whole = dimensions.len() as u64 == *rank;
            let dimensions = dimensions.iter().map(u64::to_string);
            let dimensions = joined("x", dimensions, is_whole);
            let words = ["<bigarray", kind, layout, &dimensions];
            words.join(" ").trim_end().to_owned() + ">"
        }
        Value::Custom { identifier } => format!("<custom {identifier}>"),
        Value::Block { tag, size, fields } => block(*tag, *size, fields),
        Value::Unread(at) => format!("{at:#x}"),
        Value::Unknown => "?".to_owned(),
    }
}

/// A float as text that OCaml reads as a float (never as an int), and as the same number.
pub(super) fn float_in_ocaml(number: f64) -> String {
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

/// A block: what its tag says that it is; otherwise its tag with a tuple of its fields, or its size if it has none.
fn block(tag: u8, size: u64, fields: &[Value]) -> String {
    let is_whole = fields.len() as u64 == size;
    let all = || joined(", ", fields.iter().map(in_ocaml), is_whole);
    match (Value::kind_of_block(tag), fields) {
        (Some("forced"), [value]) => format!("lazy {}", in_ocaml(value)),
        (Some("abstract"), _) => format!("<abstract:{size}>"),
        (Some(kind), _) => format!("<{kind}>"),
        (None, []) => format!("<{tag}:{size}>"),
        (None, _) if tag == 0 => format!("({})", all()),
        (None, _) => format!("<{tag}>({})", all()),
    }
}

/// A constructor with its arguments.
fn exception(name: &[u8], arguments: &[Value], is_whole: bool) -> String {
    let name = Escaped(&String::from_utf8_lossy(name)).to_string();
    match arguments {
        [] if is_whole => name,
        [] => name + "...",
        [only @ (Value::String { .. } | Value::Exception { .. })] if is_whole => {
            format!("{name} {}", in_ocaml(only))
        }
        _ => {
            let arguments = arguments.iter().map(in_ocaml);
            format!("{name} ({})", joined(", ", arguments, is_whole))
        }
    }
}

/// Joins parts, and adds `...` if these are not all.
fn joined(between: &str, parts: impl Iterator<Item = String>, is_whole: bool) -> String {
    let more = iter::once("...".to_owned()).take(usize::from(!is_whole));
    parts.chain(more).collect::<Vec<_>>().join(between)
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
            (Value::Unsigned(u64::MAX), "18446744073709551615"),
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
            (Value::Unread(0x7f00_0000_1000), "0x7f0000001000"),
            (Value::Unknown, "?"),
        ] {
            assert_eq!(in_ocaml(&value), written);
        }
    }

    #[test]
    fn blocks_are_written_as_what_their_bytes_prove() {
        let block = |tag, size, fields: &[Value]| Value::Block {
            tag,
            size,
            fields: fields.to_vec(),
        };
        let text = Value::String {
            bytes: b"two".to_vec(),
            is_whole: true,
        };
        let fields = [Value::Int(1), text.clone()];
        let list = |is_whole| Value::List {
            elements: vec![Value::Int(1), block(0, 2, &[])],
            is_whole,
        };
        let exception = |arguments: &[Value], is_whole| Value::Exception {
            name: b"Stdlib.Exit".to_vec(),
            arguments: arguments.to_vec(),
            is_whole,
        };
        let bigarray = |is_fortran, dimensions: &[u64], rank| Value::Bigarray {
            kind: "float64",
            is_fortran,
            dimensions: dimensions.to_vec(),
            rank,
        };
        let floats = |size| Value::Floats {
            numbers: vec![1.5, -2.],
            size,
        };
        let custom = Value::Custom {
            identifier: "_chan".into(),
        };
        for (value, written) in [
            (block(0, 3, &[]), "<0:3>"),
            (block(0, 2, &fields), "(1, \"two\")"),
            (block(0, 1000, &fields), "(1, \"two\", ...)"),
            (block(2, 1, &fields[1..]), "<2>(\"two\")"),
            (block(246, 1, &[]), "<lazy>"),
            (block(250, 1, &fields[..1]), "lazy 1"),
            (block(250, 1, &[]), "<forced>"),
            (block(247, 4, &[]), "<closure>"),
            (block(249, 4, &[]), "<closure>"),
            (block(248, 4, &[]), "<object>"),
            (block(251, 6, &[]), "<abstract:6>"),
            (block(255, 6, &[]), "<custom>"),
            (list(true), "[1; <0:2>]"),
            (list(false), "[1; <0:2>; ...]"),
            (exception(&[], true), "Stdlib.Exit"),
            (exception(&[], false), "Stdlib.Exit..."),
            (exception(&fields[1..], true), "Stdlib.Exit \"two\""),
            (exception(&[Value::Int(-1)], true), "Stdlib.Exit (-1)"),
            (exception(&fields, false), "Stdlib.Exit (1, \"two\", ...)"),
            (bigarray(false, &[3, 4], 2), "<bigarray float64 c 3x4>"),
            (bigarray(true, &[3], 5), "<bigarray float64 fortran 3x...>"),
            (bigarray(false, &[], 0), "<bigarray float64 c>"),
            (floats(2), "[|1.5; -2.|]"),
            (floats(9), "[|1.5; -2.; ...|]"),
            (custom, "<custom _chan>"),
        ] {
            assert_eq!(in_ocaml(&value), written);
        }
    }
}
