//! How many hits have each stack, in one shape for all formats, and as a picture.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use inferno::flamegraph;
use probes_lib::HitStack;
use serde::Serialize;

use super::format::{Format, VERSION, json};
use super::profiles::name_of;
use super::stack_quality::StackQuality;
use super::table::table_of_stacks;
use crate::failure::Failure;
use crate::text::{Escaped, folded_path, number_of};

/// The most different stacks, and frames of them, that are distinguished.
const MAX_STACKS: usize = 1 << 16;
const MAX_FRAMES: usize = 1 << 22;

/// The hits by their stacks.
#[derive(Debug)]
pub(crate) struct CountedStacks {
    pid: i32,
    program: String,
    hits: HashMap<StackPath, u64>,
    /// How many frames the stacks have together.
    frames: usize,
    /// Hits that have none of these stacks.
    others: u64,
    /// Those of `others` that have a stack for which there was no room.
    without_room: u64,
    untyped: u64,
    lasted: Duration,
}

/// A stack, by the names of its functions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StackPath {
    quality: StackQuality,
    /// The innermost first.
    frames: Vec<String>,
}

impl StackPath {
    fn of(stack: &HitStack) -> StackPath {
        let frames = stack.frames.iter();
        let frames = frames.map(|frame| name_of(frame));
        StackPath {
            quality: StackQuality::of(Some(stack.end), stack.is_guessed),
            frames: frames.collect(),
        }
    }

    /// Its functions with ; between them, the outermost first; before them, what is wrong with it.
    fn folded(&self) -> String {
        let mark = self.quality.mark();
        let frames = self.frames.iter().rev();
        folded_path(mark.iter().chain(frames))
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename = "counted_stacks")]
struct StackCountReport<'r> {
    version: u32,
    pid: i32,
    program: &'r str,
    seconds: f64,
    hits: u64,
    other: u64,
    untyped: u64,
    stacks: Vec<StackRow<'r>>,
}

#[derive(Serialize)]
struct StackRow<'r> {
    hits: u64,
    /// Hits a second.
    rate: f64,
    /// complete, guessed or cut
    stack: StackQuality,
    /// The innermost first.
    frames: &'r [String],
}

impl CountedStacks {
    /// Counts of no hits yet.
    pub(crate) fn new(pid: i32, program: &Path) -> CountedStacks {
        CountedStacks {
            pid,
            program: program.to_string_lossy().into_owned(),
            hits: HashMap::new(),
            frames: 0,
            others: 0,
            without_room: 0,
            untyped: 0,
            lasted: Duration::ZERO,
        }
    }

    /// Adds a hit.
    pub(crate) fn add(&mut self, stack: &HitStack) {
        let path = StackPath::of(stack);
        if let Some(hits) = self.hits.get_mut(&path) {
            *hits += 1;
            return;
        }
        let frames = self.frames + path.frames.len();
        if self.hits.len() >= MAX_STACKS || frames > MAX_FRAMES {
            self.others += 1;
            self.without_room += 1;
            return;
        }
        self.frames = frames;
        self.hits.insert(path, 1);
    }

    /// Adds hits whose stack is not known.
    pub(crate) fn add_others(&mut self, many: u64) {
        self.others = self.others.saturating_add(many);
    }

    /// Adds hits for which a filter has no answer.
    pub(crate) fn add_untyped(&mut self, many: u64) {
        self.untyped = self.untyped.saturating_add(many);
    }

    /// Sets how long hits were counted.
    pub(crate) fn finish(&mut self, lasted: Duration) {
        self.lasted = lasted;
    }

    /// How many hits have a stack that is not known: it was not copied, or overwritten before it was read.
    pub(crate) fn without_stack(&self) -> u64 {
        self.others.saturating_sub(self.without_room)
    }

    /// How many hits have a stack for which there was no room.
    pub(crate) fn without_room(&self) -> u64 {
        self.without_room
    }

    /// How many hits there are, except those for which a filter has no answer.
    pub(crate) fn all(&self) -> u64 {
        let known: u64 = self.hits.values().sum();
        known.saturating_add(self.others)
    }

    /// How many hits there are, if all are untyped.
    pub(crate) fn only_untyped(&self) -> Option<u64> {
        (self.untyped > 0 && self.all() == 0).then_some(self.untyped)
    }

    /// The stacks, most hits first.
    fn sorted(&self) -> Vec<(&StackPath, u64)> {
        let mut sorted: Vec<_> = self.hits.iter().map(|(path, hits)| (path, *hits)).collect();
        sorted.sort_by(|(one, ones), (other, others)| {
            let order = others.cmp(ones).then_with(|| one.frames.cmp(&other.frames));
            order.then_with(|| one.quality.cmp(&other.quality))
        });
        sorted
    }

    fn rate(&self, hits: u64) -> f64 {
        hits as f64 / self.lasted.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// The `shown` stacks with the most hits. `is_terminal`: whether a terminal shows them.
    pub(crate) fn text(
        &self,
        format: Format,
        shown: usize,
        is_terminal: bool,
    ) -> Result<String, Failure> {
        let sorted = self.sorted();
        if format == Format::Json {
            let rows = sorted.iter().map(|(path, hits)| StackRow {
                hits: *hits,
                rate: self.rate(*hits),
                stack: path.quality,
                frames: &path.frames,
            });
            return json(&StackCountReport {
                version: VERSION,
                pid: self.pid,
                program: &self.program,
                seconds: self.lasted.as_secs_f64(),
                hits: self.all(),
                other: self.others,
                untyped: self.untyped,
                stacks: rows.collect(),
            });
        }
        let (first, rest) = sorted.split_at(shown.min(sorted.len()));
        let mut rows: Vec<(u64, String)> = first
            .iter()
            .map(|(path, hits)| (*hits, path.folded()))
            .collect();
        if !rest.is_empty() {
            let hits = rest.iter().map(|(_, hits)| hits).sum();
            rows.push((hits, format!("of {}", number_of(rest.len(), "more stack"))));
        }
        rows.push((self.others, "other".to_owned()));
        rows.push((self.untyped, "untyped".to_owned()));
        if format == Format::Table {
            let cells = rows.into_iter().map(|(hits, stack)| {
                vec![hits.to_string(), format!("{:.1}", self.rate(hits)), stack]
            });
            let head = ["hits", "hits/s", "stack"];
            return Ok(table_of_stacks(is_terminal, &head, cells));
        }
        let mut text = String::new();
        for (hits, stack) in rows {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{hits} {:.1} {stack}", self.rate(hits));
        }
        Ok(text)
    }

    /// Folded stacks, which other tools read: in each line, functions with ; between them, and the hits; or a flame
    /// graph of these.
    pub(crate) fn picture(&self, is_folded: bool) -> Result<Vec<u8>, Failure> {
        let mut lines: Vec<String> = Vec::new();
        for (path, hits) in self.sorted() {
            lines.push(format!("{} {hits}", path.folded()));
        }
        if self.others > 0 {
            lines.push(format!("[other] {}", self.others));
        }
        if is_folded {
            let lines = lines.into_iter().map(|line| line + "\n");
            return Ok(lines.collect::<String>().into_bytes());
        }
        if lines.is_empty() {
            lines.push("[nothing] 1".to_owned());
        }
        let mut options = flamegraph::Options::default();
        options.title = format!("{}, process {}", Escaped(&self.program), self.pid);
        options.count_name = "hits".to_owned();
        options.deterministic = true;
        let mut svg = Vec::new();
        let lines = lines.iter().map(|line| &**line);
        let drawn = flamegraph::from_lines(&mut options, lines, &mut svg);
        drawn.map(|()| svg).map_err(Failure::of_output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_of_one_shape_have_one_order() {
        let path = |quality| StackPath {
            quality,
            frames: vec!["f".to_owned()],
        };
        // The order of a HashMap is another one each time.
        for _ in 0..50 {
            let mut stacks = CountedStacks::new(1, Path::new("/bin/x"));
            let [complete, cut, guessed] = [
                StackQuality::Complete,
                StackQuality::Cut,
                StackQuality::Guessed,
            ];
            let paths = [guessed, cut, complete].map(|quality| (path(quality), 7));
            stacks.hits = paths.into_iter().collect();
            let sorted = stacks.sorted();
            let sorted: Vec<_> = sorted.iter().map(|(path, _)| path.quality).collect();
            assert_eq!(sorted, [complete, cut, guessed]);
        }
    }
}
