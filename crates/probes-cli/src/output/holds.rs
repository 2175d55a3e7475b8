//! Who holds probes, and what was given back for the dead.

use std::collections::HashMap;
use std::time::Duration;

use probes_lib::{Holder, Holders, ReleasedHold};
use serde::Serialize;

use super::counted::seconds;
use super::format::VERSION;
use super::plain;
use super::table::table;
use super::view::ChangeView;
use crate::text::Escaped;

/// Who holds a probe, or held it until its death.
#[derive(Debug, Serialize)]
pub(super) struct HolderView<'t> {
    /// `None` if it is one of another pid namespace.
    pid: Option<i32>,
    command: &'t str,
    uid: u32,
    /// How long ago it began.
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// Whether it will give back what it holds.
    alive: bool,
    /// What it has added to the counter of the probe.
    amount: i32,
}

impl<'t> HolderView<'t> {
    fn of(holder: &'t Holder, amount: i32) -> HolderView<'t> {
        let tool = &holder.tool;
        HolderView {
            pid: tool.is_in_our_namespace.then_some(tool.pid),
            command: &tool.command,
            uid: holder.user,
            seconds: tool.age,
            alive: tool.is_alive,
            amount,
        }
    }

    /// `holder 4242 alive 1 ocaml-probes attach …`
    pub(super) fn line(&self) -> String {
        let pid = self
            .pid
            .map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let state = if self.alive { "alive" } else { "dead" };
        let command = Escaped(self.command);
        format!("  holder {pid} {state} {} {command}\n", self.amount)
    }

    /// `4242`, `4243 (dead)`
    fn short(&self) -> String {
        let pid = self
            .pid
            .map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        if self.alive { pid } else { pid + " (dead)" }
    }
}

/// Who holds a probe, in the column of a table.
pub(super) fn held_by(holders: &[HolderView<'_>]) -> String {
    let holders: Vec<String> = holders.iter().map(HolderView::short).collect();
    holders.join(", ")
}

/// Returns the holders of each probe.
pub(super) fn by_probe(holders: &Holders) -> HashMap<&str, Vec<HolderView<'_>>> {
    let mut by_probe: HashMap<&str, Vec<HolderView<'_>>> = HashMap::new();
    for holder in &holders.list {
        for probe in &holder.probes {
            let view = HolderView::of(holder, probe.amount);
            by_probe.entry(&probe.name).or_default().push(view);
        }
    }
    by_probe
}

/// What was given back for one dead holder.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "released")]
pub(crate) struct Released<'r> {
    version: u32,
    pid: i32,
    /// Its pid in its own pid namespace.
    holder: i32,
    command: &'r str,
    uid: u32,
    changed: Vec<ChangeView<'r>>,
    /// Probes of which nothing was left to give back.
    passed_over: &'r [String],
    /// Probes that stay held: something else is in their code.
    not_undone: &'r [String],
    stopped_us: u128,
}

impl<'r> Released<'r> {
    /// Returns what was given back; `None` if that failed.
    pub(crate) fn of(released: &'r ReleasedHold) -> Option<Released<'r>> {
        let tool = &released.holder.tool;
        let report = released.report.as_ref().ok()?;
        Some(Released {
            version: VERSION,
            pid: report.pid,
            holder: tool.pid,
            command: &tool.command,
            uid: released.holder.user,
            changed: report.changed.iter().map(ChangeView::of).collect(),
            passed_over: &report.skipped,
            not_undone: &report.not_undone,
            stopped_us: report.stopped.as_micros(),
        })
    }
}

pub(super) fn plain(released: &[Released<'_>], names_process: bool) -> String {
    let changes = |one: &Released<'_>| -> String {
        let process = names_process.then_some(one.pid);
        let changed = one.changed.iter();
        changed
            .map(|change| plain::change(change, process))
            .collect()
    };
    released.iter().map(changes).collect()
}

pub(super) fn released_table(released: &[Released<'_>], names_process: bool) -> String {
    let rows = released.iter().flat_map(|one| {
        one.changed.iter().map(|change| {
            let pid = names_process.then(|| one.pid.to_string());
            let mut row: Vec<String> = pid.into_iter().collect();
            row.extend([
                one.holder.to_string(),
                Escaped(change.name).to_string(),
                change.before.to_string(),
                change.after.to_string(),
                change.sites.to_string(),
            ]);
            row
        })
    });
    let mut head = vec!["holder", "probe", "before", "after", "sites"];
    if names_process {
        head.insert(0, "pid");
    }
    table(&head, rows)
}
