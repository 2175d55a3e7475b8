//! Tables, and their places in `docs/benchmarks.md`: between `<!-- bench NAME -->` and
//! `<!-- end -->`. The text around them is written by hand and left alone.

use std::path::Path;

use crate::failure::{Failure, Result};
use crate::stats::Samples;

const END: &str = "<!-- end -->";

/// The beginning of each start marker.
const START: &str = "<!-- bench ";

fn start_marker(name: &str) -> String {
    format!("{START}{name} -->\n")
}

/// The text of each table, with the name of its place in the document.
#[derive(Default)]
pub(crate) struct Tables(Vec<(&'static str, String)>);

impl Tables {
    pub(crate) fn add(&mut self, name: &'static str, text: String) {
        self.0.push((name, text));
    }

    pub(crate) fn print(&self) {
        for (name, text) in &self.0 {
            println!("## {name}\n\n{text}");
        }
    }

    /// Writes every text into its place in the file.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let name = path.display();
        let text =
            std::fs::read_to_string(path).map_err(Failure::of(format!("cannot read {name}")))?;
        let text = self.insert_into(text)?;
        std::fs::write(path, text).map_err(Failure::of(format!("cannot write {name}")))
    }

    fn insert_into(&self, mut document: String) -> Result<String> {
        for (name, text) in &self.0 {
            let marker = start_marker(name);
            let place = document.find(&marker).and_then(|at| {
                let start = at + marker.len();
                let rest = &document[start..];
                let end = rest.find(START).unwrap_or(rest.len());
                let len = rest[..end].find(END)?;
                Some(start..start + len)
            });
            let Some(place) = place else {
                let why = format!("the document lacks {marker:?}, or {END:?} after it");
                return Err(Failure::new(why));
            };
            document.replace_range(place, &format!("\n{text}\n"));
        }
        Ok(document)
    }
}

/// A table in Markdown.
pub(crate) struct Table(String);

impl Table {
    pub(crate) fn new(head: &[&str]) -> Table {
        let rule = "|---".repeat(head.len());
        Table(format!("| {} |\n{rule}|\n", head.join(" | ")))
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.0.push_str(&format!("| {} |\n", cells.join(" | ")));
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }
}

/// Formats nanoseconds as milliseconds.
pub(crate) fn ms(ns: u64) -> String {
    format!("{:.2} ms", ns as f64 / 1e6)
}

/// Median and p99 of samples in nanoseconds.
pub(crate) fn median_p99(samples: &Samples) -> String {
    format!("{} / {}", ms(samples.median()), ms(samples.p99()))
}

/// Median and largest of samples in nanoseconds.
pub(crate) fn median_max(samples: &Samples) -> String {
    format!("{} / {}", ms(samples.median()), ms(samples.max()))
}

/// Formats nanoseconds as microseconds.
pub(crate) fn us(ns: f64) -> String {
    format!("{:.2} µs", ns / 1e3)
}

/// Formats a number of KiB as MiB.
pub(crate) fn mib(kib: u64) -> String {
    format!("{:.1} MiB", kib as f64 / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::{Table, Tables};

    #[test]
    fn table_replaces_the_previous_one_and_nothing_else() {
        let mut table = Table::new(&["a", "b"]);
        table.row(["1".to_owned(), "2".to_owned()]);
        let mut tables = Tables::default();
        tables.add("x", table.finish());
        let before = "By hand.\n<!-- bench x -->\nold\n<!-- end -->\nBy hand.\n";
        let after = tables.insert_into(before.to_owned()).unwrap();
        let text = "By hand.\n<!-- bench x -->\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n\
                    <!-- end -->\nBy hand.\n";
        assert_eq!(after, text);
        assert_eq!(tables.insert_into(after).unwrap(), text);
        assert!(tables.insert_into("no marker".to_owned()).is_err());
    }
}
