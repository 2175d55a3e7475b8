//! What a recording has written, in one shape for all formats. The field names are those of the JSON output.

use std::path::Path;
use std::time::Duration;

use probes_lib::{Activity, Event, RecordedWait, StackEnd, Value};
use serde::Serialize;

use super::format::{Format, VERSION, json, seconds, seconds_or_null};
use super::hits::{argument_names, in_ocaml};
use super::latencies::RecordedPairs;
use super::profiles::name_of;
use super::table::table;
use super::timeline::{Annotation, AnnotationValue, TimelineFormat};
use crate::failure::Failure;
use crate::text::Escaped;

/// What a timeline has, and what is missing in it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct RecordCounts {
    pub(crate) slices: u64,
    pub(crate) instants: u64,
    /// Values of counters.
    pub(crate) values: u64,
    /// Calls that ended without an exit.
    pub(crate) unwound: u64,
    /// Calls that had not ended.
    pub(crate) running: u64,
    /// Starts of pairs that had no stop.
    pub(crate) without_stop: u64,
    /// Exits of calls that began before the recording, or whose entries were lost.
    pub(crate) unmatched_exits: u64,
    pub(crate) unmatched_stops: u64,
    /// Starts and stops of pairs that have no key, and are in no slice.
    pub(crate) without_key: u64,
    /// Starts that were forgotten, because too many waited for the stops with their keys.
    pub(crate) lost_starts: u64,
    /// Calls within too many others.
    pub(crate) too_deep: u64,
    pub(crate) lost_hits: u64,
    pub(crate) lost_words: u64,
    /// The kernel's records of switches.
    pub(crate) lost_switches: u64,
}

/// A name that is frequent among the hits that were read while others were lost.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FrequentName {
    pub(crate) name: String,
    /// The share of those hits that have it, from 0 to 1.
    pub(crate) share: f64,
}

/// What was recorded of a process.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "recorded")]
pub(crate) struct RecordReport<'r> {
    version: u32,
    pid: i32,
    program: String,
    file: String,
    format: TimelineFormat,
    bytes: u64,
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// How much of that time is in the file, with `-last`.
    #[serde(serialize_with = "seconds_or_null")]
    last_seconds: Option<Duration>,
    #[serde(flatten)]
    counts: RecordCounts,
    frequent: Vec<FrequentName>,
    /// Of the whole time, as they were measured in the process.
    pairs: RecordedPairs<'r>,
}

impl<'r> RecordReport<'r> {
    pub(crate) fn new(
        (pid, program): (i32, &Path),
        (file, format, bytes): (&Path, TimelineFormat, u64),
        (seconds, last_seconds): (Duration, Option<Duration>),
        counts: RecordCounts,
        frequent: Vec<FrequentName>,
        pairs: RecordedPairs<'r>,
    ) -> RecordReport<'r> {
        RecordReport {
            version: VERSION,
            pid,
            program: program.to_string_lossy().into_owned(),
            file: file.to_string_lossy().into_owned(),
            format,
            bytes,
            seconds,
            last_seconds,
            counts,
            frequent,
            pairs,
        }
    }

    pub(crate) fn text(&self, format: Format) -> Result<String, Failure> {
        let counts = self.counts;
        let figures = [
            ("slices", counts.slices),
            ("instants", counts.instants),
            ("values", counts.values),
            ("unwound", counts.unwound),
            ("running", counts.running),
            ("without_stop", counts.without_stop),
            ("unmatched_exits", counts.unmatched_exits),
            ("unmatched_stops", counts.unmatched_stops),
            ("without_key", counts.without_key),
            ("lost_starts", counts.lost_starts),
            ("too_deep", counts.too_deep),
            ("lost_hits", counts.lost_hits),
            ("lost_words", counts.lost_words),
            ("lost_switches", counts.lost_switches),
            ("bytes", self.bytes),
        ];
        match format {
            Format::Json => json(self),
            Format::Plain => {
                let figures = figures.map(|(name, value)| format!("{name} {value}"));
                let seconds = self.seconds.as_secs_f64();
                let last = self.last_seconds.map_or_else(String::new, |last| {
                    format!(" last {:.3}", last.as_secs_f64())
                });
                let frequent = self.frequent.iter();
                let frequent =
                    frequent.map(|it| format!("frequent {:.3} {}\n", it.share, Escaped(&it.name)));
                let doubts = self.pairs.doubts();
                let doubts = doubts.map(|(pair, doubt)| format!("pair {pair} {doubt}\n"));
                Ok(format!(
                    "{} seconds {seconds:.3}{last}\n{}",
                    figures.join(" "),
                    frequent.chain(doubts).collect::<String>()
                ))
            }
            Format::Table => {
                let shown = figures
                    .iter()
                    .filter(|(name, value)| *value > 0 || matches!(*name, "slices" | "instants"));
                let rows =
                    shown.map(|(name, value)| vec![name.replace('_', " "), value.to_string()]);
                let frequent = self.frequent.iter().map(|it| {
                    let name = Escaped(&it.name);
                    let share = format!("{:.0} %", it.share * 100.0);
                    vec![format!("frequent when hits were lost: {name}"), share]
                });
                let doubts = self.pairs.doubts();
                let doubts = doubts.map(|(pair, doubt)| vec![format!("times of {pair}"), doubt]);
                let rows = rows.chain(frequent).chain(doubts);
                Ok(table(&["recorded", "how many"], rows))
            }
        }
    }
}

/// How many frames of a stack are shown, the innermost.
const MAX_FRAMES: usize = 128;

/// What a thread waited in.
pub(crate) fn wait_name(wait: &RecordedWait) -> String {
    match wait.activity {
        Activity::Waiting => "waits in the kernel".to_owned(),
        Activity::Unseen => "waits, not looked at".to_owned(),
        activity => {
            let leaf = activity.leaf().unwrap_or_default();
            leaf.trim_matches(['[', ']']).to_owned()
        }
    }
}

/// What is said of a wait: its stack, from the outermost function to the innermost, and whether it is only a part.
pub(crate) fn wait_annotations(wait: &RecordedWait) -> Vec<Annotation> {
    let shown = &wait.frames[..wait.frames.len().min(MAX_FRAMES)];
    let names = shown.iter().rev().map(|frame| name_of(frame));
    let mut names: Vec<String> = names.map(|name| name.replace(';', ":")).collect();
    let is_cut = wait.end != Some(StackEnd::Outermost) || shown.len() < wait.frames.len();
    if is_cut {
        names.insert(0, "[cut]".to_owned());
    }
    let mut annotations = Vec::new();
    if !shown.is_empty() {
        annotations.push(Annotation::text("stack", names.join(";")));
    }
    if !wait.is_whole {
        annotations.push(Annotation::text("part", "of a longer wait"));
    }
    annotations
}

/// The arguments of a hit, or the result of a function, as annotations of a slice or an instant.
#[inline]
pub(crate) fn hit_annotations(event: &Event) -> Vec<Annotation> {
    if event.arguments.is_empty() {
        return Vec::new();
    }
    argument_annotations(event)
}

fn argument_annotations(event: &Event) -> Vec<Annotation> {
    const UNNAMED: [&str; 6] = ["arg0", "arg1", "arg2", "arg3", "arg4", "arg5"];
    let is_call = event.kind == probes_lib::EventKind::Hit;
    let mut names = argument_names(event);
    let values = event.arguments.iter().enumerate();
    let annotations = values.map(|(index, value)| {
        let key = match names.next() {
            Some(name) => name.to_owned().into(),
            None if is_call => UNNAMED.get(index).copied().unwrap_or("argument").into(),
            None => "result".into(),
        };
        let value = match value {
            Value::Int(number) => AnnotationValue::Int(*number),
            value => AnnotationValue::Text(in_ocaml(value).into()),
        };
        Annotation { key, value }
    });
    annotations.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_names_are_in_every_format() {
        let counts = RecordCounts {
            slices: 9,
            lost_hits: 1000,
            ..RecordCounts::default()
        };
        let frequent = [("Cache.find", 0.9344), ("f(int, char)", 0.2)];
        let frequent = frequent.map(|(name, share)| FrequentName {
            name: name.to_owned(),
            share,
        });
        let report = RecordReport::new(
            (42, Path::new("/bin/a")),
            (Path::new("a.json"), TimelineFormat::Chrome, 77),
            (Duration::from_secs(1), None),
            counts,
            frequent.to_vec(),
            RecordedPairs::of(&[]),
        );
        let plain = report.text(Format::Plain).unwrap();
        let (_, lines) = plain.split_once(" lost_hits 1000 ").unwrap();
        let expected = "lost_words 0 lost_switches 0 bytes 77 seconds 1.000\nfrequent 0.934 Cache.find\nfrequent 0.200 f(int, char)\n";
        assert_eq!(lines, expected);
        let table = report.text(Format::Table).unwrap();
        let row = |line: &str| line.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        let rows: Vec<String> = table.lines().map(row).collect();
        let expected = "frequent when hits were lost: Cache.find | 93 %".to_owned();
        assert!(rows.contains(&expected), "{table}");
        let json = report.text(Format::Json).unwrap();
        let object: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(object["frequent"][1]["name"], "f(int, char)");
        assert_eq!(object["frequent"][0]["share"], 0.9344);
    }
}
