//! Pure planning: program + choices + snapshot -> [`UpdatePlan`], every write with the bytes it
//! expects to find. Nothing here touches a process.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::error::{ProbeError, Result};
use crate::process::program::{Member, ProbeId, Program};
use crate::select::{Action, Aim, Choice};
use crate::site::{OPCODE_OFFSET, Opcode};
use crate::update::report::AppliedChange;
use crate::update::snapshot::{CodeRun, Reading, Snapshot, State};

/// All writes of an update, in order.
///
/// The order makes every prefix safe: an enabled site has a handler to call at any time, and a
/// counter says "enabled" only while its sites do. So sites are enabled before their counters and
/// disabled after them, and the probes of a pair one after the other.
#[derive(Debug)]
pub(crate) struct UpdatePlan {
    pub(crate) steps: Vec<Step>,
    /// All opcodes that are changed, by address.
    pub(crate) opcode_changes: Vec<OpcodeChange>,
    /// What has to be in memory before the first write.
    pub(crate) before: Snapshot,
    pub(crate) changes: Vec<PlannedChange>,
    /// Probes that were to be disabled and are off already.
    pub(crate) skipped: Vec<ProbeId>,
    /// Probes that could not be applied back, because a site of theirs holds foreign bytes.
    pub(crate) not_undone: Vec<ProbeId>,
}

/// Writes of one kind; within a step the order does not matter.
#[derive(Debug)]
pub(crate) enum Step {
    Code(Vec<CodeWrite>),
    Counters(Vec<CounterWrite>),
}

/// When a write is made: stage by stage, and in each first what is disabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WriteStage {
    stage: u8,
    enable: bool,
}

/// An opcode that is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpcodeChange {
    pub(crate) at: LiveAddr,
    pub(crate) new: u8,
    lock: WriteStage,
}

/// Code to be written in one piece: one opcode, or several of one page with what lies between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeWrite {
    pub(crate) at: LiveAddr,
    pub(crate) len: usize,
    /// The opcodes in it that change, in this lock or in others, as indices of the plan's opcode_changes.
    opcode_changes: Range<usize>,
    lock: WriteStage,
}

impl UpdatePlan {
    /// What there will be to take back.
    pub(crate) fn applied(&self, program: &Program) -> impl Iterator<Item = AppliedChange> {
        self.changes.iter().map(|change| AppliedChange {
            name: program.by_id(change.probe).name().to_owned(),
            stage: change.stage,
            added: change.added.clone(),
        })
    }

    /// Puts into `bytes` what is at the place of `write` before it is made.
    pub(crate) fn old_code(&self, write: &CodeWrite, bytes: &mut Vec<u8>) {
        self.code_where(write, |lock| lock < write.lock, bytes);
    }

    /// Puts into `bytes` what is at the place of `write` after it was made.
    pub(crate) fn new_code(&self, write: &CodeWrite, bytes: &mut Vec<u8>) {
        self.code_where(write, |lock| lock <= write.lock, bytes);
    }

    fn code_where(
        &self,
        write: &CodeWrite,
        is_flipped: impl Fn(WriteStage) -> bool,
        bytes: &mut Vec<u8>,
    ) {
        bytes.clear();
        // Every write lies in one run of the snapshot.
        bytes.extend(self.before.code_at(write.at, write.len).unwrap_or_default());
        for opcode_change in &self.opcode_changes[write.opcode_changes.clone()] {
            if is_flipped(opcode_change.lock) {
                bytes[(opcode_change.at.0 - write.at.0) as usize] = opcode_change.new;
            }
        }
    }
}

/// A counter to be written.
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
    pub(crate) before: u16,
    pub(crate) after: u16,
    /// What is added to each of its counters.
    pub(crate) added: Box<[(LiveAddr, i32)]>,
    /// Sites that are flipped.
    pub(crate) sites: usize,
}

impl PlannedChange {
    fn is_none(&self) -> bool {
        self.sites == 0 && self.added.iter().all(|&(_, added)| added == 0)
    }
}

impl Aim {
    /// What becomes of the counter at `at`; `None` if it can hold no more.
    fn of_counter(&self, counter: u16, at: LiveAddr) -> Option<u16> {
        match self {
            Aim::Set(Action::Enable) => Some(1),
            Aim::Set(Action::Disable) => Some(0),
            Aim::Count(Action::Enable) => counter.checked_add(1),
            Aim::Count(Action::Disable) => Some(counter.saturating_sub(1)),
            Aim::Undo(added) => {
                let added = added.iter().find(|(place, _)| *place == at);
                let left = i32::from(counter) - added.map_or(0, |&(_, added)| added);
                Some(left.clamp(0, i32::from(u16::MAX)) as u16)
            }
        }
    }
}

/// What there is to plan with.
pub(crate) struct Inputs<'a> {
    pub(crate) program: &'a Program,
    /// Breakpoints of others in the code that was read, by address.
    pub(crate) breakpoints: &'a [LiveAddr],
    /// Whether each opcode is written by itself: the process runs, and executes what lies between.
    pub(crate) one_by_one: bool,
}

impl Inputs<'_> {
    /// Plans to carry out `choices` on a process in the state `before`.
    ///
    /// # Errors
    ///
    /// If a chosen probe's sites hold foreign bytes, if its counters and sites disagree (unless
    /// forced), if it was named to be disabled and is off, or if its counter is full.
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
            match (self.refuse_foreign_code(probe, &before), &choice.aim) {
                (Ok(()), _) => {}
                // The others are not to stay for its sake.
                (Err(_), Aim::Undo(_)) => {
                    not_undone.push(choice.probe);
                    continue;
                }
                (Err(error), _) => return Err(error),
            }
            let reading = before.reading(probe);
            if let Aim::Count(action) = choice.aim {
                refuse_inconsistent(probe, reading)?;
                if action == Action::Disable && reading.state == State::Disabled {
                    if choice.named {
                        let name = probe.name().to_owned();
                        return Err(ProbeError::NotEnabled { name }.into());
                    }
                    skipped.push(choice.probe);
                    continue;
                }
            }
            let change = self.draft(probe, choice, &before, &mut draft)?;
            match choice.aim {
                Aim::Undo(_) if change.is_none() => skipped.push(choice.probe),
                _ => changes.push(change),
            }
        }
        let opcode_changes = self.opcode_changes(&draft.opcodes);
        let mut steps = Vec::with_capacity(2 * draft.counters.len());
        for (lock, mut counters) in draft.counters {
            counters.sort_unstable_by_key(|write| write.at);
            let code = self.group(lock, &opcode_changes, &before.code);
            let code = (!code.is_empty()).then_some(Step::Code(code));
            let counters = (!counters.is_empty()).then_some(Step::Counters(counters));
            let in_order = if lock.enable {
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

    /// Notes the writes for one probe in `draft`.
    fn draft(
        &self,
        probe: Member<'_>,
        choice: &Choice,
        before: &Snapshot,
        draft: &mut Draft,
    ) -> Result<PlannedChange> {
        let write = |index: usize| {
            let at = self.program.counter(index);
            let old = before.counters[index];
            let new = choice.aim.of_counter(old, at);
            let name = || probe.name().to_owned();
            let new = new.ok_or_else(|| ProbeError::CounterFull { name: name() })?;
            Ok(CounterWrite {
                index,
                at,
                old,
                new,
            })
        };
        let writes: Vec<CounterWrite> = probe.semaphores().map(write).collect::<Result<_>>()?;
        let old = || writes.iter().map(|write| write.old);
        let new = || writes.iter().map(|write| write.new);
        let on = new().any(|one| one > 0);
        if matches!(choice.aim, Aim::Count(_)) && on && new().any(|one| one == 0) {
            return Err(ProbeError::UnequalCounters {
                name: probe.name().to_owned(),
                smallest: old().min().unwrap_or(0),
                largest: old().max().unwrap_or(0),
            }
            .into());
        }
        let lock = WriteStage {
            stage: choice.stage,
            enable: on,
        };
        let mut sites = 0;
        let mut first = 0;
        for part in probe.parts() {
            let own = &writes[first..first + part.semaphores.len()];
            first += own.len();
            let base = part.probe.semaphore_range().start;
            for (site, index) in part.probe.sites().zip(part.sites) {
                let opcode = Opcode::of(own[site.semaphore_index() - base].new > 0);
                let found = before.sites[index];
                if found.with(opcode) != found {
                    draft.opcodes[index] = Some((lock, opcode));
                    sites += 1;
                }
            }
        }
        let added = |write: &CounterWrite| (write.at, i32::from(write.new) - i32::from(write.old));
        let change = PlannedChange {
            probe: probe.id(),
            stage: choice.stage,
            before: old().min().unwrap_or(0),
            after: new().min().unwrap_or(0),
            added: writes.iter().map(added).collect(),
            sites,
        };
        let changed = writes.into_iter().filter(|write| write.new != write.old);
        draft.counters.entry(lock).or_default().extend(changed);
        Ok(change)
    }

    /// The opcodes to change, by address.
    fn opcode_changes(&self, opcodes: &[Option<(WriteStage, Opcode)>]) -> Vec<OpcodeChange> {
        let sites = self.program.sites_by_address();
        let mut opcode_changes: Vec<OpcodeChange> = sites
            .filter_map(|site| {
                let (lock, opcode) = opcodes[site.index()]?;
                Some(OpcodeChange {
                    at: site.address.plus(OPCODE_OFFSET),
                    new: opcode.byte(),
                    lock,
                })
            })
            .collect();
        // Object by object so far.
        opcode_changes.sort_unstable_by_key(|opcode_change| opcode_change.at);
        opcode_changes
    }

    fn refuse_foreign_code(&self, probe: Member<'_>, snapshot: &Snapshot) -> Result<()> {
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
    /// Groups the opcode_changes of one lock into one write per page. A group ends before a breakpoint of
    /// somebody else's: whoever set it may remove it at any time, and writing the old `cc` back
    /// would then kill the process.
    fn group(
        &self,
        lock: WriteStage,
        opcode_changes: &[OpcodeChange],
        code: &[CodeRun],
    ) -> Vec<CodeWrite> {
        let mut writes: Vec<CodeWrite> = Vec::new();
        let mut run = 0;
        for (index, opcode_change) in opcode_changes.iter().enumerate() {
            let at = opcode_change.at;
            if opcode_change.lock != lock {
                continue;
            }
            // Every site lies in a run of the layout the snapshot was read by.
            while code[run].start.0 + code[run].bytes.len() as u64 <= at.0 {
                run += 1;
            }
            let start = code[run].start;
            let grown = writes.last_mut().filter(|write| {
                !self.one_by_one && write.at.0 / PAGE == at.0 / PAGE && write.at >= start && {
                    // Flips of other turns are no breakpoints, before nor after.
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
                    lock,
                }),
            }
        }
        writes
    }

    /// Whether there is a breakpoint at `start` or behind it, before `end`.
    fn holds_breakpoint(&self, start: LiveAddr, end: LiveAddr) -> bool {
        let next = self.breakpoints.partition_point(|&at| at < start);
        self.breakpoints.get(next).is_some_and(|&at| at < end)
    }
}

fn refuse_inconsistent(probe: Member<'_>, reading: Reading) -> Result<()> {
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

/// What is to be written, probe by probe.
struct Draft {
    /// The counters of each lock.
    counters: BTreeMap<WriteStage, Vec<CounterWrite>>,
    /// What becomes of each site of the program, and when.
    opcodes: Vec<Option<(WriteStage, Opcode)>>,
}

#[cfg(test)]
mod tests;
