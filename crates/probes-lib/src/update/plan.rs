//! Pure planning: program + choices + snapshot -> [`UpdatePlan`], every write with the bytes it
//! expects to find. Nothing here touches a process.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::error::{ProbeError, Result};
use crate::process::program::{MergedProbe, ProbeId, Program};
use crate::select::{Action, AppliedChange, Choice, CounterChange};
use crate::site::{OPCODE_OFFSET, Opcode};
use crate::update::snapshot::{CodeRun, ProbeReading, Snapshot, State};

/// All writes of an update, in order.
///
/// The order makes every prefix safe: an enabled site has a handler to call at any time, and a
/// counter is above 0 only while its sites are enabled. So sites are enabled before their counters and
/// disabled after them. Of a pair, the stop probe is enabled first and disabled last: if a start
/// is counted, so is its stop.
#[derive(Debug)]
pub(crate) struct UpdatePlan {
    pub(crate) steps: Vec<Step>,
    /// All opcodes that change, by address.
    pub(crate) opcode_changes: Vec<OpcodeChange>,
    /// The state that memory must have before the first write.
    pub(crate) before: Snapshot,
    pub(crate) changes: Vec<PlannedChange>,
    /// Probes for which there is nothing to do: they are to be disabled and are disabled already,
    /// or an update of them is to be undone and nothing of it is left.
    pub(crate) skipped: Vec<ProbeId>,
    /// Probes whose update cannot be undone, because one of their sites holds foreign bytes.
    pub(crate) not_undone: Vec<ProbeId>,
}

/// Writes of one kind, in any order.
#[derive(Debug)]
pub(crate) enum Step {
    Code(Vec<CodeWrite>),
    Counters(Vec<CounterWrite>),
}

/// When a write is made: writes are ordered by the stage of their choice, and within a stage those that
/// disable come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WriteOrder {
    stage: u8,
    enable: bool,
}

/// An opcode that changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpcodeChange {
    pub(crate) at: LiveAddr,
    pub(crate) new: u8,
    order: WriteOrder,
}

/// Code to be written in one piece: one opcode, or several of one page with what lies between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeWrite {
    pub(crate) at: LiveAddr,
    pub(crate) len: usize,
    /// The opcodes in it that change, in this stage or another, as indices of the plan's opcode changes.
    opcode_changes: Range<usize>,
    order: WriteOrder,
}

impl UpdatePlan {
    /// Returns what [`Target::undo`](crate::Target::undo) has to undo.
    pub(crate) fn applied(&self, program: &Program) -> impl Iterator<Item = AppliedChange> {
        self.changes.iter().map(|change| AppliedChange {
            name: program.by_id(change.probe).name().to_owned(),
            stage: change.stage,
            added: change.added.clone(),
        })
    }

    /// Sets `bytes` to the code as it is before `write`, with the earlier writes of the plan made.
    pub(crate) fn old_code(&self, write: &CodeWrite, bytes: &mut Vec<u8>) {
        self.code_where(write, |order| order < write.order, bytes);
    }

    /// Sets `bytes` to the code as it is after `write`.
    pub(crate) fn new_code(&self, write: &CodeWrite, bytes: &mut Vec<u8>) {
        self.code_where(write, |order| order <= write.order, bytes);
    }

    fn code_where(
        &self,
        write: &CodeWrite,
        is_made: impl Fn(WriteOrder) -> bool,
        bytes: &mut Vec<u8>,
    ) {
        bytes.clear();
        // Every write lies in one run of the snapshot.
        bytes.extend(self.before.code_at(write.at, write.len).unwrap_or_default());
        for change in &self.opcode_changes[write.opcode_changes.clone()] {
            if is_made(change.order) {
                bytes[(change.at.0 - write.at.0) as usize] = change.new;
            }
        }
    }
}

/// A write of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterWrite {
    /// Index of its semaphore in the program.
    pub(crate) index: usize,
    pub(crate) at: LiveAddr,
    pub(crate) old: u16,
    pub(crate) new: u16,
}

/// What an update does to one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedChange {
    pub(crate) probe: ProbeId,
    pub(crate) stage: u8,
    /// The smallest of its counters before the update.
    pub(crate) before: u16,
    /// The smallest of its counters after the update.
    pub(crate) after: u16,
    /// What is added to each of its counters.
    pub(crate) added: Box<[(LiveAddr, i32)]>,
    /// How many of its sites are switched.
    pub(crate) sites: usize,
}

impl PlannedChange {
    fn changes_nothing(&self) -> bool {
        self.sites == 0 && self.added.iter().all(|&(_, added)| added == 0)
    }
}

impl CounterChange {
    /// Returns the new value of the counter at `at`; `None` if it can hold no more.
    fn new_counter(&self, counter: u16, at: LiveAddr) -> Option<u16> {
        match self {
            CounterChange::Set(Action::Enable) => Some(1),
            CounterChange::Set(Action::Disable) => Some(0),
            CounterChange::Count(Action::Enable) => counter.checked_add(1),
            CounterChange::Count(Action::Disable) => Some(counter.saturating_sub(1)),
            CounterChange::Undo(added) => {
                let added = added.iter().find(|(place, _)| *place == at);
                let undone = i32::from(counter) - added.map_or(0, |&(_, added)| added);
                Some(undone.clamp(0, i32::from(u16::MAX)) as u16)
            }
        }
    }
}

/// What a plan depends on, beside the choices and the state of the process.
pub(crate) struct PlanInputs<'a> {
    pub(crate) program: &'a Program,
    /// Breakpoints in the code that was read, by address.
    pub(crate) breakpoints: &'a [LiveAddr],
    /// Whether each opcode is written on its own, because the process runs meanwhile and executes the code
    /// between them.
    pub(crate) one_by_one: bool,
}

impl PlanInputs<'_> {
    /// Plans how to carry out `choices` on a process in the state `before`.
    ///
    /// # Errors
    ///
    /// If a chosen probe's sites hold foreign bytes (unless its changes are to be undone), if its
    /// counters and sites disagree (unless forced or to be undone), if it was named to be disabled
    /// and is disabled already, if its counter is full, or if disabling it would leave some of its
    /// sites enabled because its counters differ.
    pub(crate) fn plan(&self, choices: &[Choice], before: Snapshot) -> Result<UpdatePlan> {
        let mut draft = Draft {
            counters: BTreeMap::new(),
            opcodes: vec![None; self.program.site_count()],
        };
        let mut changes = Vec::with_capacity(choices.len());
        let mut skipped = Vec::new();
        let mut not_undone = Vec::new();
        for choice in choices {
            let probe = self.program.by_id(choice.probe);
            match (
                self.refuse_foreign_code(probe, &before),
                &choice.counter_change,
            ) {
                (Ok(()), _) => {}
                // The other probes are undone nevertheless.
                (Err(_), CounterChange::Undo(_)) => {
                    not_undone.push(choice.probe);
                    continue;
                }
                (Err(error), _) => return Err(error),
            }
            let reading = before.reading(probe);
            if let CounterChange::Count(action) = choice.counter_change {
                refuse_inconsistent(probe, reading)?;
                if action == Action::Disable && reading.state == State::Disabled {
                    if choice.fails_if_disabled {
                        let name = probe.name().to_owned();
                        return Err(ProbeError::NotEnabled { name }.into());
                    }
                    skipped.push(choice.probe);
                    continue;
                }
            }
            let change = self.add_probe(probe, choice, &before, &mut draft)?;
            match choice.counter_change {
                CounterChange::Undo(_) if change.changes_nothing() => skipped.push(choice.probe),
                _ => changes.push(change),
            }
        }
        let opcode_changes = self.opcode_changes(&draft.opcodes);
        let mut steps = Vec::with_capacity(2 * draft.counters.len());
        for (order, mut counters) in draft.counters {
            counters.sort_unstable_by_key(|write| write.at);
            let code = self.group(order, &opcode_changes, &before.code);
            let code = (!code.is_empty()).then_some(Step::Code(code));
            let counters = (!counters.is_empty()).then_some(Step::Counters(counters));
            let in_order = if order.enable {
                [code, counters]
            } else {
                [counters, code]
            };
            steps.extend(in_order.into_iter().flatten());
        }
        Ok(UpdatePlan {
            steps,
            opcode_changes,
            before,
            changes,
            skipped,
            not_undone,
        })
    }

    /// Adds the writes for one probe to `draft`.
    fn add_probe(
        &self,
        probe: MergedProbe<'_>,
        choice: &Choice,
        before: &Snapshot,
        draft: &mut Draft,
    ) -> Result<PlannedChange> {
        let writes = self.counter_writes(probe, choice, before)?;
        // Each counter has its own order: an undo may disable the sites of one object, and leave those of another
        // enabled.
        let order_of = |write: &CounterWrite| WriteOrder {
            stage: choice.stage,
            enable: write.new > 0,
        };
        let mut sites = 0;
        let mut first = 0;
        for part in probe.parts() {
            let own = &writes[first..first + part.semaphores.len()];
            first += own.len();
            let base = part.probe.semaphore_range().start;
            for (site, index) in part.probe.sites().zip(part.sites) {
                let counter = &own[site.semaphore_index() - base];
                let opcode = Opcode::of(counter.new > 0);
                let found = before.sites[index];
                if found.with(opcode) != found {
                    draft.opcodes[index] = Some((order_of(counter), opcode));
                    sites += 1;
                }
            }
        }
        let added = |write: &CounterWrite| (write.at, i32::from(write.new) - i32::from(write.old));
        let change = PlannedChange {
            probe: probe.id(),
            stage: choice.stage,
            before: writes.iter().map(|it| it.old).min().unwrap_or(0),
            after: writes.iter().map(|it| it.new).min().unwrap_or(0),
            added: writes.iter().map(added).collect(),
            sites,
        };
        for write in writes {
            // The order is added even if the counter stays the same: its sites may change alone.
            let of_order = draft.counters.entry(order_of(&write)).or_default();
            of_order.extend((write.new != write.old).then_some(write));
        }
        Ok(change)
    }

    /// Returns the new values of the counters of a probe, also of those that stay the same.
    fn counter_writes(
        &self,
        probe: MergedProbe<'_>,
        choice: &Choice,
        before: &Snapshot,
    ) -> Result<Vec<CounterWrite>> {
        let name = || probe.name().to_owned();
        let write = |index: usize| {
            let at = self.program.counter(index);
            let old = before.counters[index];
            let new = choice.counter_change.new_counter(old, at);
            let new = new.ok_or_else(|| ProbeError::CounterFull { name: name() })?;
            Ok(CounterWrite {
                index,
                at,
                old,
                new,
            })
        };
        let writes: Vec<CounterWrite> = probe.semaphores().map(write).collect::<Result<_>>()?;
        let stays_enabled = writes.iter().any(|it| it.new > 0);
        let is_one_disabled = writes.iter().any(|it| it.new == 0);
        let is_counted = matches!(choice.counter_change, CounterChange::Count(_));
        if is_counted && stays_enabled && is_one_disabled {
            let old = || writes.iter().map(|it| it.old);
            return Err(ProbeError::UnequalCounters {
                name: name(),
                smallest: old().min().unwrap_or(0),
                largest: old().max().unwrap_or(0),
            }
            .into());
        }
        Ok(writes)
    }

    /// Returns the opcodes to change, by address.
    fn opcode_changes(&self, opcodes: &[Option<(WriteOrder, Opcode)>]) -> Vec<OpcodeChange> {
        let sites = self.program.sites_by_address();
        let mut opcode_changes: Vec<OpcodeChange> = sites
            .filter_map(|site| {
                let (order, opcode) = opcodes[site.index()]?;
                Some(OpcodeChange {
                    at: site.address.plus(OPCODE_OFFSET),
                    new: opcode.byte(),
                    order,
                })
            })
            .collect();
        // Until here they are sorted within each object only.
        opcode_changes.sort_unstable_by_key(|change| change.at);
        opcode_changes
    }

    fn refuse_foreign_code(&self, probe: MergedProbe<'_>, snapshot: &Snapshot) -> Result<()> {
        for index in probe.sites() {
            let found = snapshot.sites[index];
            let site = self.program.site(index);
            if !found.same_but_for_opcode(site.site.code()) {
                return Err(ProbeError::UnexpectedSite {
                    name: probe.name().to_owned(),
                    address: site.address(),
                    found,
                    expected: site.site.code(),
                }
                .into());
            }
        }
        Ok(())
    }

    /// Groups the opcode changes of one `order` into writes: each opcode on its own if `one_by_one`,
    /// else one write for those of a page in one run of the snapshot. A write ends before a
    /// breakpoint: the debugger that set it may remove it at any time, and writing the old `cc`
    /// back would then kill the process.
    fn group(
        &self,
        order: WriteOrder,
        opcode_changes: &[OpcodeChange],
        code: &[CodeRun],
    ) -> Vec<CodeWrite> {
        let mut writes: Vec<CodeWrite> = Vec::new();
        let mut run = 0;
        for (index, change) in opcode_changes.iter().enumerate() {
            let at = change.at;
            if change.order != order {
                continue;
            }
            // Every site lies in a run: the layout by which the snapshot was read covers all sites.
            while code[run].start.0 + code[run].bytes.len() as u64 <= at.0 {
                run += 1;
            }
            let start = code[run].start;
            let grown = writes.last_mut().filter(|write| {
                !self.one_by_one && write.at.0 / PAGE == at.0 / PAGE && write.at >= start && {
                    // The breakpoints found before the update are all there are: no opcode that an
                    // earlier stage changes is `cc`, before or after.
                    let from = write.at.0 + write.len as u64;
                    !self.holds_breakpoint(LiveAddr(from), at)
                }
            });
            match grown {
                Some(write) => {
                    write.len = (at.0 - write.at.0) as usize + 1;
                    write.opcode_changes.end = index + 1;
                }
                None => writes.push(CodeWrite {
                    at,
                    len: 1,
                    opcode_changes: index..index + 1,
                    order,
                }),
            }
        }
        writes
    }

    /// Whether there is a breakpoint from `start` on, before `end`.
    fn holds_breakpoint(&self, start: LiveAddr, end: LiveAddr) -> bool {
        let next = self.breakpoints.partition_point(|&at| at < start);
        self.breakpoints.get(next).is_some_and(|&at| at < end)
    }
}

fn refuse_inconsistent(probe: MergedProbe<'_>, reading: ProbeReading) -> Result<()> {
    if reading.state != State::Inconsistent {
        return Ok(());
    }
    Err(ProbeError::Inconsistent {
        name: probe.name().to_owned(),
        enabled: reading.enabled_sites,
        sites: probe.sites().count(),
        counter: reading.counter,
    }
    .into())
}

/// The writes of a plan, collected probe by probe.
struct Draft {
    /// The writes of counters, by stage and direction.
    counters: BTreeMap<WriteOrder, Vec<CounterWrite>>,
    /// The new opcode of each site of the program that changes, and when it is written.
    opcodes: Vec<Option<(WriteOrder, Opcode)>>,
}

#[cfg(test)]
mod tests;
