//! [`Released`]: what was undone for dead holders.

use probes_lib::ReleasedHold;
use serde::Serialize;

use super::answer_tables::{CHANGE_HEAD, change_cells};
use super::format::VERSION;
use super::view::ChangeView;
use super::{plain, table};

/// What was undone for one dead holder.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "released")]
pub(crate) struct Released<'r> {
    version: u32,
    pid: i32,
    /// The pid of the holder in its own pid namespace.
    holder: i32,
    command: &'r str,
    uid: u32,
    changed: Vec<ChangeView<'r>>,
    /// Probes for which nothing was left to undo.
    passed_over: &'r [String],
    /// Probes that stay held: something else is in their code, or another holder has disabled them.
    not_undone: &'r [String],
    stopped_us: u128,
}

impl<'r> Released<'r> {
    /// Returns what was undone; `None` if that failed.
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

pub(super) fn plain(released: &[Released<'_>], shows_pid: bool) -> String {
    let changes = |one: &Released<'_>| -> String {
        let process = shows_pid.then_some(one.pid);
        let changed = one.changed.iter();
        changed
            .map(|change| plain::change(change, process))
            .collect()
    };
    released.iter().map(changes).collect()
}

pub(super) fn table(released: &[Released<'_>], shows_pid: bool) -> String {
    let rows = released.iter().flat_map(|one| {
        one.changed.iter().map(|change| {
            let pid = shows_pid.then(|| one.pid.to_string());
            let mut row: Vec<String> = pid.into_iter().collect();
            row.push(one.holder.to_string());
            row.extend(change_cells(change));
            row
        })
    });
    let mut head = vec!["holder"];
    head.extend(CHANGE_HEAD);
    if shows_pid {
        head.insert(0, "pid");
    }
    table::table(&head, rows)
}
