//! Which commands hold probes of a process: `info` shows them, `attach -for` warns of dead ones, and
//! `attach -release-dead` undoes those holds.

use std::collections::{BTreeMap, HashSet};

use probes_lib::{Hold, Holder, Holders, Options, ReleasedHold, Target};

use super::changes::say_about_result;
use super::process_failures::ProcessFailures;
use super::step_failures::StepFailures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::messages::Messages;
use crate::output::{self, Released, WarningKind};
use crate::text::{join_first_few, number_of};

/// Undoes the holds of dead commands in each process, and prints what changed.
pub(super) fn release_dead(
    targets: &[Target],
    options: Options,
    output: &Output,
    mut failures: ProcessFailures,
) -> Result<(), Failure> {
    let mut printed = Ok(());
    for target in targets {
        let pid = target.pid();
        let released = target.release_dead(options);
        let released = released.map_err(Failure::of_attached(pid));
        let Some(mut released) = failures.record_unless_exited(pid, released) else {
            continue;
        };
        let messages = failures.messages(pid);
        let done: Vec<Released<'_>> = released.iter().filter_map(Released::of).collect();
        let text = output::released(output.format, &done, failures.shows_pid());
        if output.reports_changes {
            printed = printed.and(text.and_then(|text| output.print(&text)));
        }
        if released.is_empty() {
            messages.note("no dead command has a hold that can be undone");
        }
        keep_last_changes(&mut released);
        for one in released {
            let holder = &one.holder;
            let report = one.report.map_err(Failure::of_attached(pid));
            let Some(report) = failures.record_unless_exited(pid, report) else {
                continue;
            };
            let mut undone = names(holder);
            let is_left = |name: &str| {
                let mut left = report.not_undone.iter().chain(&report.skipped);
                left.any(|left| left == name)
            };
            undone.retain(|&it| !is_left(it));
            match join_first_few(&undone) {
                Some(names) => {
                    messages.note(&format!("undid the changes of {}: {names}", holder.tool));
                }
                None if report.not_undone.is_empty() => {
                    messages.note(&format!("{} had nothing to undo", holder.tool));
                }
                None => {}
            }
            say_about_result(&messages, &report);
            if let Some(names) = join_first_few(&report.not_undone) {
                let why = format!(
                    "these stay held, because something else is in their code, another command has disabled them, or their file cannot be \
                     read: {names}"
                );
                messages.warning(
                    WarningKind::DeadHolder,
                    &why,
                    "remove the breakpoint or uprobe, or wait until that command has ended, and release them again",
                );
            }
        }
        warn_of_other_users(&messages, pid, &target.holders());
    }
    let mut steps = StepFailures::default();
    steps.add(printed);
    steps.add(failures.finish("the others were changed"));
    steps.finish(&output.messages)
}

/// Keeps only the last change of each probe, so that the remarks are about its final state: it may still be enabled
/// after one release, and be disabled by a later one.
fn keep_last_changes(released: &mut [ReleasedHold]) {
    let mut seen = HashSet::new();
    for one in released.iter_mut().rev() {
        if let Ok(report) = &mut one.report {
            report
                .changed
                .retain(|change| seen.insert(change.name.clone()));
        }
    }
}

/// Notes which commands hold which probes; warns of dead ones.
pub(super) fn note_holders(messages: &Messages, pid: i32, holders: &Holders) {
    for holder in holders.list.iter().filter(|holder| holder.tool.is_alive) {
        let age = holder.tool.age_in_words();
        let names = join_first_few(&names(holder)).unwrap_or_default();
        messages.note(&format!("held by {}, for {age}: {names}", holder.tool));
    }
    warn_of_dead(messages, pid, holders);
}

/// Warns of dead holders, once for all that have the same hint, and of records that cannot be read.
pub(super) fn warn_of_dead(messages: &Messages, pid: i32, holders: &Holders) {
    let dead = holders.list.iter().filter(|holder| !holder.tool.is_alive);
    let mut by_hint: BTreeMap<String, Vec<&Holder>> = BTreeMap::new();
    for holder in dead {
        let hint = how_to_release(pid, holder);
        by_hint.entry(hint).or_default().push(holder);
    }
    for (hint, dead) in by_hint {
        messages.warning(WarningKind::DeadHolder, &held_by(&dead), &hint);
    }
    if holders.unreadable > 0 {
        let records = number_of(holders.unreadable, "record");
        let hint = "another version of ocaml-probes may have written them: use that one";
        messages.warning(
            WarningKind::UnreadableHold,
            &format!("{records} of the holders of its probes cannot be read"),
            hint,
        );
    }
}

/// Warns of dead holders whose holds only another user may undo.
fn warn_of_other_users(messages: &Messages, pid: i32, holders: &Holders) {
    let others = holders.list.iter().filter(|one| !one.can_be_released);
    let list = others.cloned().collect();
    warn_of_dead(
        messages,
        pid,
        &Holders {
            list,
            unreadable: 0,
        },
    );
}

/// Says which killed commands hold which probes.
fn held_by(dead: &[&Holder]) -> String {
    let mut all: Vec<&str> = dead.iter().flat_map(|holder| names(holder)).collect();
    all.sort_unstable();
    all.dedup();
    let all = join_first_few(&all).unwrap_or_default();
    if let [holder] = dead {
        return format!("held by {}, which was killed: {all}", holder.tool);
    }
    let pids: Vec<String> = dead
        .iter()
        .map(|holder| holder.tool.pid.to_string())
        .collect();
    format!(
        "held by {} commands that were killed (pid {}): {all}",
        dead.len(),
        join_first_few(&pids).unwrap_or_default()
    )
}

fn how_to_release(pid: i32, holder: &Holder) -> String {
    let command = format!("`ocaml-probes attach -pid {pid} -release-dead`");
    let by = match holder.user {
        _ if holder.can_be_released => "",
        0 => ", run as root,",
        user => &format!(", run as root or uid {user},"),
    };
    format!("{command}{by} undoes the changes")
}

/// Warns of a hold that could not be recorded, so that no other tool knows of it.
pub(super) fn warn_of_unrecorded(messages: &Messages, hold: &Hold) {
    if let Some(why) = hold.unrecorded() {
        messages.warning(
            WarningKind::UnrecordedHold,
            &format!("the hold of this command could not be recorded ({why})"),
            "if it is killed, nothing shows or undoes what it has added",
        );
    }
}

fn names(holder: &Holder) -> Vec<&str> {
    holder.probes.iter().map(|it| it.name.as_str()).collect()
}
