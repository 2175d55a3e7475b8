//! What `watch -json` shows, compared with what the programs pass: the number of the hit, and values
//! that follow from it.

use serde_json::Value;

use crate::support::object;

/// Asserts that the values of each hit belong together; returns how many hits have any.
pub(crate) fn check(lines: &str, what: &str) -> u64 {
    let mut checked = 0;
    for line in lines.lines() {
        let hit = object(line);
        let arguments = hit["arguments"].as_array().map_or(&[][..], Vec::as_slice);
        let Some(number) = arguments.iter().find_map(|value| value["int"].as_i64()) else {
            continue;
        };
        for value in arguments {
            assert!(matches_hit(value, number), "{what}: {value} in {line}");
        }
        checked += 1;
    }
    checked
}

/// Whether the test programs pass this value in the hit with this number.
fn matches_hit(value: &Value, number: i64) -> bool {
    if let Some(text) = value["string"]["text"].as_str() {
        // A letter, the number, and maybe dots. Strings of any other form are not checked.
        let digits = text[1..].trim_end_matches('.');
        return digits.parse() == Ok(number) || digits.parse::<i64>().is_err();
    }
    let boxed = ["int64", "int32", "nativeint", "int"];
    if let Some(same) = boxed.iter().find_map(|kind| value[*kind].as_i64()) {
        return same == number;
    }
    value["float"]
        .as_f64()
        .is_none_or(|half| half == number as f64 / 2.0)
}
