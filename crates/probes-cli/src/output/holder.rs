//! [`HolderView`]: a tool that holds a probe.

use std::collections::HashMap;
use std::time::Duration;

use probes_lib::{Holder, Holders};
use serde::Serialize;

use super::format::seconds;
use crate::text::{Escaped, join_first, or_dash};

/// A process that holds a probe, or held it until it was killed.
#[derive(Clone, Debug, Serialize)]
pub(super) struct HolderView<'t> {
    /// `None` if it is in another pid namespace.
    pid: Option<i32>,
    command: &'t str,
    uid: u32,
    /// How long ago the hold began.
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// Whether it will undo what it holds.
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
        let pid = or_dash(self.pid);
        let state = if self.alive { "alive" } else { "dead" };
        let command = Escaped(self.command);
        format!("  holder {pid} {state} {} {command}\n", self.amount)
    }

    /// `4242`, `4243 (dead)`, `? (dead)`: a dash before a parenthesis is hard to read.
    fn short(&self) -> String {
        let pid = self
            .pid
            .map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        if self.alive { pid } else { pid + " (dead)" }
    }
}

/// The holders of a probe, in the column of a table: the first three, and how many more.
pub(super) fn held_by(holders: &[HolderView<'_>]) -> String {
    let holders: Vec<String> = holders.iter().map(HolderView::short).collect();
    join_first(3, &holders).unwrap_or_default()
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
