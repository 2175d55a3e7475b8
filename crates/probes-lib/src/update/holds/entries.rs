//! What a change of a hold does to each counter. Only computes: no access to processes or files.

use std::collections::HashMap;

use crate::address::LiveAddr;
use crate::process::program::Program;
use crate::update::holds::record::{CounterEntry, ParsedRecord};
use crate::update::plan::UpdatePlan;

/// Returns the entries for a plan that takes a hold.
pub(super) fn taken(plan: &UpdatePlan, program: &Program) -> Vec<CounterEntry> {
    entries(plan, program, |_, added| (0, added, None))
}

/// Returns the entries for a plan that undoes what is held according to `record`, as far as nobody else has taken
/// it away: see [`kept_below_zero`]. If the program has files that cannot be read, and it `keeps_unknown`, probes that the
/// program does not have may be in them, and stay held.
pub(super) fn undone(
    record: &ParsedRecord,
    plan: &UpdatePlan,
    program: &Program,
    held_by_others: &HashMap<LiveAddr, i32>,
    keeps_unknown: bool,
) -> Vec<CounterEntry> {
    let mut held: HashMap<LiveAddr, (&CounterEntry, i32)> = HashMap::new();
    for one in record.held() {
        held.insert(one.entry.at, (one.entry, one.amount));
    }
    let planned = plan.changes.iter().map(|change| change.probe);
    let probes = planned.chain(plan.skipped.iter().copied());
    let indices = probes.flat_map(|probe| program.by_id(probe).semaphores());
    let counters: HashMap<LiveAddr, u16> = indices
        .map(|index| (program.counter(index), plan.before.counters[index]))
        .collect();
    let kept = |at: LiveAddr, amount: i32| {
        let others = held_by_others.get(&at).copied().unwrap_or(0);
        let counter = counters.get(&at);
        counter.map_or(0, |&counter| kept_below_zero(counter, amount, others))
    };
    let mut entries = entries(plan, program, |at, _| {
        let (amount, stage) = held
            .remove(&at)
            .map_or((0, None), |(entry, amount)| (amount, Some(entry.stage)));
        // The stage of the original change: from it, each attempt to undo the hold derives its own.
        (amount, kept(at, amount), stage)
    });
    // Nothing is left of these, or they cannot be undone now and stay held.
    let may_be_unread = keeps_unknown && !program.unreadable().is_empty();
    let is_kept = |name: &str| {
        let mut kept = plan.not_undone.iter();
        kept.any(|&probe| program.by_id(probe).name() == name)
            || may_be_unread && program.probe(name).is_none()
    };
    entries.extend(held.into_iter().map(|(at, (entry, amount))| CounterEntry {
        before: 0,
        after: 0,
        held_before: amount,
        held_after: if is_kept(&entry.name) {
            amount
        } else {
            kept(at, amount)
        },
        ..entry.clone()
    }));
    entries
}

/// Returns how much of `amount`, which is undone, stays held of a counter because the counter does not go below
/// zero. Other holders with a negative amount have subtracted what this holder had added. They will add it later, and
/// it would remain.
fn kept_below_zero(counter: u16, amount: i32, held_by_others: i32) -> i32 {
    let missing = amount.saturating_sub(i32::from(counter)).max(0);
    let taken_away = held_by_others.saturating_neg().max(0);
    missing.min(taken_away)
}

/// Returns an entry for each counter of the probes that a plan changes; `held(address, added)` returns what
/// is held of it before and after, and maybe the stage, if that is not the plan's.
fn entries(
    plan: &UpdatePlan,
    program: &Program,
    mut held: impl FnMut(LiveAddr, i32) -> (i32, i32, Option<u8>),
) -> Vec<CounterEntry> {
    let mut entries = Vec::new();
    for change in &plan.changes {
        let probe = program.by_id(change.probe);
        for (index, &(at, added)) in probe.semaphores().zip(&change.added) {
            let before = plan.before.counters[index];
            let (held_before, held_after, stage) = held(at, added);
            entries.push(CounterEntry {
                name: probe.name().to_owned(),
                stage: stage.unwrap_or(change.stage),
                at,
                before,
                after: (i32::from(before) + added) as u16,
                held_before,
                held_after,
            });
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_others_took_away_stays_held() {
        // The counter is 0 because another holder has disabled the probe.
        assert_eq!(kept_below_zero(0, 1, -1), 1);
        assert_eq!(kept_below_zero(0, 3, -2), 2);
        // Because a tool that holds nothing has.
        assert_eq!(kept_below_zero(0, 1, 0), 0);
        assert_eq!(kept_below_zero(0, 1, 1), 0);
        // It can be undone.
        assert_eq!(kept_below_zero(1, 1, -1), 0);
        assert_eq!(kept_below_zero(0, -1, -1), 0);
    }
}
