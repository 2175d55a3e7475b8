//! Tables, and their places in `docs/benchmarks.md`: between `<!-- bench NAME -->` and
//! `<!-- end -->`. The text around them is written by hand and left alone.

use std::path::Path;

use crate::commands::{Command, ENABLE_ALL, INFO};
use crate::failure::{Failure, Result};
use crate::prepare::LARGE;
use crate::stats::Samples;
use crate::stop_time::StopTimes;

const END: &str = "<!-- end -->";

fn start_marker(name: &str) -> String {
    format!("<!-- bench {name} -->\n")
}

/// Texts by the name of their place.
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
                let len = document[start..].find(END)?;
                Some(start..start + len)
            });
            let Some(place) = place else {
                return Err(Failure::new(format!("no place for the table {name}")));
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

/// Nanoseconds in ms.
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

/// Nanoseconds in µs.
pub(crate) fn us(ns: f64) -> String {
    format!("{:.2} µs", ns / 1e3)
}

/// KiB in MiB.
pub(crate) fn mib(kib: u64) -> String {
    format!("{:.1} MiB", kib as f64 / 1024.0)
}

/// Compares the figures that have goals with these and with the reference tool's figures.
pub(crate) fn goals(stop_times: &[StopTimes], commands: &[Command]) -> Result<String> {
    const NORMAL: &str = "spin_10000.pie";
    let stop_time = |program: &str| {
        let one = stop_times.iter().find(|one| one.program == program);
        let one = one.ok_or_else(|| Failure::new(format!("{program} was not measured")))?;
        Ok::<_, Failure>((one.enable.gap.median(), one.first.gap.median()))
    };
    let cpu = |program: &str, command: &str| {
        let mut all = commands.iter();
        all.find(|one| one.program == program && one.command == command)
            .map(|one| one.cpu_ns.median())
            .ok_or_else(|| Failure::new(format!("{command} was not measured on {program}")))
    };
    let ((again, first), (again_large, first_large)) = (stop_time(NORMAL)?, stop_time(LARGE)?);
    let attach = (cpu(NORMAL, ENABLE_ALL)?, cpu(LARGE, ENABLE_ALL)?);
    let info = (cpu(NORMAL, INFO)?, cpu(LARGE, INFO)?);
    let lines = [
        ("stop time, enable all", again, again_large, 3.0, 27.0),
        (
            "stop time, enable all for the first time",
            first,
            first_large,
            3.0,
            27.0,
        ),
        (
            "CPU of `attach -enable-all`",
            attach.0,
            attach.1,
            10.0,
            35.0,
        ),
        ("CPU of `info`", info.0, info.1, 3.0, 9.0),
    ];
    let mut table = Table::new(&[
        "10,000 sites, 1,000 names; medians",
        "measured",
        "goal",
        "reached",
        "reference tool",
        "times less",
        "padded to 1 GiB",
        "ratio",
    ]);
    for (what, normal, large, goal, reference) in lines {
        let measured = normal as f64 / 1e6;
        let reference_text = match reference {
            27.0 => "27 to 29 ms",
            35.0 => "35 to 40 ms",
            _ => "9 ms",
        };
        table.row([
            what.to_owned(),
            ms(normal),
            format!("{goal} ms"),
            if measured <= goal { "yes" } else { "no" }.to_owned(),
            reference_text.to_owned(),
            format!("{:.0}", reference / measured),
            ms(large),
            format!("{:.2}", large as f64 / normal as f64),
        ]);
    }
    Ok(table.finish())
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
