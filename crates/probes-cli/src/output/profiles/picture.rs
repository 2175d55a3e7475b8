//! A profile as a file: a flame graph, folded stacks, or the formats of speedscope and pprof.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use inferno::flamegraph;
use serde_json::json;

use super::{ProfileReport, pprof};
use crate::failure::Failure;
use crate::text::{Escaped, folded_path};

/// A function with less than this share of the time is not drawn, in percent.
const MIN_DRAWN: f64 = 0.2;

/// What the file of -o is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PictureKind {
    Svg,
    Folded,
    Speedscope,
    Pprof,
}

impl PictureKind {
    /// What a file with this name is to be; `None` if it gets the answer instead.
    pub(crate) fn of(path: &Path) -> Option<PictureKind> {
        let name = path.file_name()?.to_string_lossy();
        Some(if name.ends_with(".svg") {
            PictureKind::Svg
        } else if name.ends_with(".folded") {
            PictureKind::Folded
        } else if name.ends_with(".json") {
            PictureKind::Speedscope
        } else if name.ends_with(".pb.gz") {
            PictureKind::Pprof
        } else {
            return None;
        })
    }
}

impl ProfileReport {
    /// The time of each stack in microseconds, the outermost function first. Stacks of less than one microsecond are
    /// left out: inferno fails if all counts are zero.
    fn folded(&self) -> Vec<(Vec<String>, u64)> {
        let mut sums: BTreeMap<Vec<String>, Duration> = BTreeMap::new();
        for stack in &self.stacks {
            *sums.entry(stack.path(self.how.by)).or_default() += stack.time;
        }
        let sums = sums.into_iter();
        sums.map(|(path, time)| (path, time.as_micros() as u64))
            .filter(|(_, time)| *time > 0)
            .collect()
    }

    /// The lines that are drawn, without the calls of a function by itself: recursion may be thousands of frames deep.
    fn drawn_lines(&self) -> Vec<String> {
        let mut sums: BTreeMap<Vec<String>, u64> = BTreeMap::new();
        for (mut path, time) in self.folded() {
            path.dedup();
            *sums.entry(path).or_default() += time;
        }
        lines(sums)
    }

    pub(crate) fn picture(&self, kind: PictureKind, title: &str) -> Result<Vec<u8>, Failure> {
        match kind {
            PictureKind::Folded => {
                let lines = lines(self.folded());
                let text: String = lines.into_iter().map(|line| line + "\n").collect();
                Ok(text.into_bytes())
            }
            PictureKind::Speedscope => Ok(self.speedscope(title).into_bytes()),
            PictureKind::Svg => self.svg(title),
            PictureKind::Pprof => pprof::encoded(&self.folded()).map_err(Failure::of_output),
        }
    }

    fn svg(&self, title: &str) -> Result<Vec<u8>, Failure> {
        let lines = self.drawn_lines();
        let lines: Vec<&str> = if lines.is_empty() {
            vec!["[nothing] 1"]
        } else {
            lines.iter().map(|line| &**line).collect()
        };
        let mut options = flamegraph::Options::default();
        options.title = Escaped(title).to_string();
        options.count_name = "us".to_owned();
        options.min_width = MIN_DRAWN;
        options.deterministic = true;
        let mut svg = Vec::new();
        let drawn = flamegraph::from_lines(&mut options, lines, &mut svg);
        drawn.map(|()| svg).map_err(Failure::of_output)
    }

    /// The format of speedscope.app: <https://www.speedscope.app/file-format-schema.json>
    fn speedscope(&self, title: &str) -> String {
        let (mut indexes, mut frames): (HashMap<String, usize>, Vec<_>) = Default::default();
        let (mut samples, mut weights) = (Vec::new(), Vec::new());
        for (path, time) in self.folded() {
            let index = |name: String| {
                *indexes.entry(name).or_insert_with_key(|name| {
                    frames.push(json!({ "name": name }));
                    frames.len() - 1
                })
            };
            samples.push(path.into_iter().map(index).collect::<Vec<_>>());
            weights.push(time);
        }
        let all: u64 = weights.iter().sum();
        let file = json!({
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "name": title,
            "exporter": concat!("ocaml-probes ", env!("CARGO_PKG_VERSION")),
            "shared": { "frames": frames },
            "profiles": [{
                "type": "sampled", "name": title, "unit": "microseconds",
                "startValue": 0, "endValue": all, "samples": samples, "weights": weights,
            }],
        });
        format!("{file}\n")
    }
}

/// The lines of the folded format, which flamegraph.pl and inferno read: functions with ; between them, and the
/// microseconds.
fn lines(folded: impl IntoIterator<Item = (Vec<String>, u64)>) -> Vec<String> {
    let line = |(path, time): (Vec<String>, u64)| format!("{} {time}", folded_path(path));
    folded.into_iter().map(line).collect()
}
