//! What counting, timing and showing hits inside a process costs, compared with other tools that count
//! the same hits.

use std::path::Path;

use probes_lib::{Action, Actions, Selector, Target};

use crate::document::Table;
use crate::failure::Result;
use crate::programs::KINDS_SPIN;

mod event;
pub(crate) mod exact;
pub(crate) mod goals;
mod others;
mod ours;
pub(crate) mod questions;
pub(crate) mod stops;
mod workload;

use others::{AddedTime, Tool};
use ours::OwnCosts;
use workload::Workload;

const THREADS: [u64; 2] = [1, 4];

/// gdb last: after it, the program must not be used any more.
const TOOLS: [Tool; 3] = [Tool::Bpftrace, Tool::Perf, Tool::Gdb];

/// What hits cost a program with this many threads, with its probes on or off.
pub(crate) struct Costs {
    threads: u64,
    action: Action,
    ours: OwnCosts,
    /// In the order of [`TOOLS`].
    others: Vec<AddedTime>,
}

pub(crate) fn measure(targets: &Path, rounds: usize) -> Result<Vec<Costs>> {
    let cells = THREADS.into_iter().flat_map(|threads| {
        let actions = [Action::Disable, Action::Enable].into_iter();
        actions.map(move |action| (threads, action))
    });
    cells
        .map(|(threads, action)| measure_one(&targets.join(KINDS_SPIN), threads, action, rounds))
        .collect()
}

fn measure_one(file: &Path, threads: u64, action: Action, rounds: usize) -> Result<Costs> {
    eprintln!("bench: the hits of {threads} threads: {action:?}");
    let mut workload = Workload::start(file, threads);
    let target = Target::open(workload.pid())?;
    if action == Action::Enable {
        target.update(&Actions::of(action, Selector::All))?;
    }
    let ours = ours::measure(&mut workload, &target, rounds)?;
    let mut others = Vec::new();
    for tool in TOOLS {
        eprintln!("bench: the same with {tool}");
        others.push(others::added_time(tool, &mut workload, &target, file)?);
    }
    Ok(Costs {
        threads,
        action,
        ours,
        others,
    })
}

impl Costs {
    /// Returns the time that `tool` adds to a hit, divided by the time that our counting adds.
    fn ratio_to(&self, tool: Tool) -> Option<f64> {
        let mut all = TOOLS.iter().zip(&self.others);
        let (_, adds) = all.find(|(one, _)| **one == tool)?;
        let adds = adds.as_ref().ok()?;
        Some(adds / self.ours.count.adds())
    }

    /// Returns the first two cells of a row: the number of threads, and whether the probes are on.
    fn row_head(&self) -> [String; 2] {
        let on = match self.action {
            Action::Enable => "on",
            Action::Disable => "off",
        };
        [self.threads.to_string(), on.to_owned()]
    }
}

pub(crate) fn table(all: &[Costs]) -> String {
    let mut table = Table::new(&[
        "threads",
        "probes",
        "a bare site",
        "count adds",
        "latency adds, to an event",
        "by key",
        "watch adds: no argument",
        "an int",
        "a string",
        "hits that watch shows (none, int, string)",
    ]);
    for one in all {
        let [threads, on] = one.row_head();
        let ours = &one.ours;
        let shown = [&ours.watch, &ours.watch_int, &ours.watch_string];
        table.row([
            threads,
            on,
            ns(ours.count.bare()),
            ns(ours.count.adds()),
            ns(ours.latency.adds()),
            ns(ours.latency_by_key.adds()),
            ns(ours.watch.adds()),
            ns(ours.watch_int.adds()),
            ns(ours.watch_string.adds()),
            shown.map(|cost| share(cost.shown, cost.dropped)).join(", "),
        ]);
    }
    table.finish() + "\n" + &others_table(all)
}

fn others_table(all: &[Costs]) -> String {
    let mut table = Table::new(&[
        "threads",
        "probes",
        "count adds",
        "bpftrace adds",
        "times as much",
        "`perf stat` adds",
        "times as much",
        "gdb adds",
        "times as much",
    ]);
    let mut reasons: Vec<&str> = Vec::new();
    for one in all {
        let [threads, on] = one.row_head();
        let mut cells = [const { String::new() }; 9];
        cells[..3].clone_from_slice(&[threads, on, ns(one.ours.count.adds())]);
        for (index, (tool, adds)) in TOOLS.iter().zip(&one.others).enumerate() {
            let both = match (adds, one.ratio_to(*tool)) {
                (Ok(adds), Some(times)) => [ns(*adds), format!("{times:.0}")],
                _ => ["–", "–"].map(str::to_owned),
            };
            cells[3 + 2 * index..][..2].clone_from_slice(&both);
            reasons.extend(adds.as_ref().err().map(String::as_str));
        }
        table.row(cells);
    }
    reasons.sort_unstable();
    reasons.dedup();
    let reasons = reasons.iter().map(|why| format!("\n–: {why}.\n"));
    table.finish() + &reasons.collect::<String>()
}

/// Formats a time that is given in picoseconds, in ns.
pub(crate) fn ns(picoseconds: f64) -> String {
    if picoseconds < 1e6 {
        format!("{:.1} ns", picoseconds / 1e3)
    } else {
        format!("{:.0} ns", picoseconds / 1e3)
    }
}

fn share(shown: u64, dropped: u64) -> String {
    format!(
        "{:.1} %",
        100.0 * shown as f64 / (shown + dropped).max(1) as f64
    )
}
