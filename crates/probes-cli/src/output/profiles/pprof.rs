//! The format of pprof: proto/profile.proto of github.com/google/pprof, compressed by gzip. Its messages have only the
//! fields that are written.

use std::collections::HashMap;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    /// The stack, its innermost function first.
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
}

/// The times in microseconds of stacks, each with the outermost function first.
pub(super) fn encoded(folded: &[(Vec<String>, u64)]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&profile(folded).encode_to_vec())?;
    encoder.finish()
}

fn profile(folded: &[(Vec<String>, u64)]) -> Profile {
    let mut profile = Profile {
        sample_type: vec![ValueType { kind: 1, unit: 2 }],
        // The first string has to be empty.
        string_table: ["", "time", "microseconds"].map(str::to_owned).to_vec(),
        ..Profile::default()
    };
    let mut ids: HashMap<&str, u64> = HashMap::new();
    for (path, time) in folded {
        let mut locations = Vec::new();
        for name in path.iter().rev() {
            let next = ids.len() as u64 + 1;
            let id = *ids.entry(name).or_insert_with(|| {
                profile.function.push(Function {
                    id: next,
                    name: profile.string_table.len() as i64,
                });
                profile.string_table.push(name.clone());
                profile.location.push(Location {
                    id: next,
                    line: vec![Line { function_id: next }],
                });
                next
            });
            locations.push(id);
        }
        profile.sample.push(Sample {
            location_id: locations,
            value: vec![i64::try_from(*time).unwrap_or(i64::MAX)],
        });
    }
    profile
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn file_of_pprof_has_each_stack() {
        let stack = |names: &[&str], time| (names.iter().map(ToString::to_string).collect(), time);
        let folded = [
            stack(&["main", "f", "g"], 7),
            stack(&["main", "g", "main"], 3),
        ];
        let mut bytes = Vec::new();
        let encoded = encoded(&folded).unwrap();
        GzDecoder::new(&*encoded).read_to_end(&mut bytes).unwrap();
        let read = Profile::decode(&*bytes).unwrap();
        let name = |id: &u64| {
            let location = read.location.iter().find(|it| it.id == *id).unwrap();
            let function = location.line[0].function_id;
            let function = read.function.iter().find(|it| it.id == function).unwrap();
            read.string_table[function.name as usize].clone()
        };
        let found: Vec<(Vec<String>, u64)> = read
            .sample
            .iter()
            .map(|it| {
                (
                    it.location_id.iter().rev().map(name).collect(),
                    it.value[0] as u64,
                )
            })
            .collect();
        assert_eq!(found, folded);
    }
}
