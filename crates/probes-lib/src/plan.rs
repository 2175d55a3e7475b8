//! Pure planning: table + choices + snapshot -> [`UpdatePlan`], every write with the bytes it
//! expects to find. Nothing here touches a process.

use std::collections::BTreeMap;

use crate::addr::{LiveAddr, LoadBias};
use crate::error::{ErrorKind, Result};
use crate::select::{Action, Choice};
use crate::site::{INT3, OPCODE_OFFSET, Opcode};
use crate::snapshot::{CodeRun, Reading, Snapshot, State};
use crate::spans::PAGE;
use crate::table::{Probe, ProbeId, ProbeTable};

/// All writes of an update, in order.
///
/// The order makes every prefix safe: an enabled site has a handler to call at any time, and a
/// counter says "enabled" only while its sites do. So sites are enabled before their counters and
/// disabled after them, and the probes of a pair one after the other.
#[derive(Debug)]
pub(crate) struct UpdatePlan {
    pub(crate) steps: Vec<Step>,
    /// What has to be in memory before the first write.
    pub(crate) before: Snapshot,
    pub(crate) changes: Vec<Change>,
    /// Probes that were to be disabled and are off already.
    pub(crate) passed_over: Vec<ProbeId>,
}

/// Writes of one kind; within a step the order does not matter.
#[derive(Debug)]
pub(crate) enum Step {
    Code(Vec<CodeWrite>),
    Counters(Vec<CounterWrite>),
}

/// Code to be written in one piece: one opcode, or several of one page with what lies between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeWrite {
    pub(crate) at: LiveAddr,
    pub(crate) old: Vec<u8>,
    pub(crate) new: Vec<u8>,
}

/// A counter to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterWrite {
    /// Index of its semaphore in the table.
    pub(crate) index: usize,
    pub(crate) at: LiveAddr,
    pub(crate) old: u16,
    pub(crate) new: u16,
}

/// What an update does to one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) probe: ProbeId,
    pub(crate) before: u16,
    pub(crate) after: u16,
    /// Sites that are flipped.
    pub(crate) sites: usize,
}

/// What there is to plan with.
pub(crate) struct Inputs<'a> {
    pub(crate) table: &'a ProbeTable,
    pub(crate) bias: LoadBias,
    /// Sets counters and sites whatever they were, instead of counting.
    pub(crate) force: bool,
    /// Addresses of the file's own `cc` bytes in the snapshot's code; any other `cc` is somebody's
    /// breakpoint, and is not to be written over.
    pub(crate) own_int3: &'a [LiveAddr],
}

impl Inputs<'_> {
    /// Plans to carry out `choices` on a process in the state `before`.
    ///
    /// # Errors
    ///
    /// If a chosen probe's sites hold foreign bytes, if its counters and sites disagree (unless
    /// forced), if it was named to be disabled and is off, or if its counter is full.
    pub(crate) fn plan(&self, choices: &[Choice], before: Snapshot) -> Result<UpdatePlan> {
        // Stage by stage, and in each first what is disabled.
        let mut drafts: BTreeMap<(u8, bool), Draft> = BTreeMap::new();
        let mut changes = Vec::with_capacity(choices.len());
        let mut passed_over = Vec::new();
        for choice in choices {
            let probe = self.table.by_id(choice.probe);
            self.refuse_foreign_code(probe, &before)?;
            let reading = before.reading(probe);
            if !self.force {
                refuse_inconsistent(probe, reading)?;
                if choice.action == Action::Disable && reading.state == State::Disabled {
                    if choice.named {
                        let name = probe.name().to_owned();
                        return Err(ErrorKind::NotEnabled { name }.into());
                    }
                    passed_over.push(choice.probe);
                    continue;
                }
            }
            let enable = choice.action == Action::Enable;
            let draft = drafts.entry((choice.stage, enable)).or_default();
            changes.push(self.draft(probe, choice.action, &before, draft)?);
        }
        let mut code = before.code.clone();
        let mut steps = Vec::with_capacity(2 * drafts.len());
        for ((_, enable), draft) in drafts {
            steps.extend(draft.steps(enable, &mut code, self.own_int3));
        }
        Ok(UpdatePlan {
            steps,
            before,
            changes,
            passed_over,
        })
    }

    /// Notes the writes for one probe in `draft`.
    fn draft(
        &self,
        probe: Probe<'_>,
        action: Action,
        before: &Snapshot,
        draft: &mut Draft,
    ) -> Result<Change> {
        let first = probe.semaphore_range().start;
        let old = &before.counters[probe.semaphore_range()];
        let new = old
            .iter()
            .map(|&counter| match (self.force, action) {
                (true, Action::Enable) => Ok(1),
                (true, Action::Disable) => Ok(0),
                (false, Action::Enable) => counter.checked_add(1).ok_or_else(|| {
                    let name = probe.name().to_owned();
                    ErrorKind::CounterFull { name }
                }),
                (false, Action::Disable) => Ok(counter.saturating_sub(1)),
            })
            .collect::<Result<Vec<u16>, ErrorKind>>()?;
        for ((index, &old), &new) in probe.semaphore_range().zip(old).zip(&new) {
            if new != old {
                draft.counters.push(CounterWrite {
                    index,
                    at: self.bias.live(self.table.semaphore(index).counter()),
                    old,
                    new,
                });
            }
        }
        let sites_before = draft.sites.len();
        for (site, index) in probe.sites().zip(probe.site_range()) {
            let opcode = Opcode::of(new[site.semaphore_index() - first] > 0);
            let found = before.sites[index];
            if found.with(opcode) != found {
                let at = self.bias.live(site.address()).plus(OPCODE_OFFSET);
                draft.sites.push((at, opcode.byte()));
            }
        }
        let smallest = |counters: &[u16]| counters.iter().copied().min().unwrap_or(0);
        Ok(Change {
            probe: probe.id(),
            before: smallest(old),
            after: smallest(&new),
            sites: draft.sites.len() - sites_before,
        })
    }

    fn refuse_foreign_code(&self, probe: Probe<'_>, snapshot: &Snapshot) -> Result<()> {
        for (site, index) in probe.sites().zip(probe.site_range()) {
            let found = snapshot.sites[index];
            if !found.same_but_for_opcode(site.code()) {
                return Err(ErrorKind::UnexpectedSite {
                    name: probe.name().to_owned(),
                    address: self.bias.live(site.address()),
                    found,
                    expected: site.code(),
                }
                .into());
            }
        }
        Ok(())
    }
}

fn refuse_inconsistent(probe: Probe<'_>, reading: Reading) -> Result<()> {
    if reading.state != State::Inconsistent {
        return Ok(());
    }
    Err(ErrorKind::Inconsistent {
        name: probe.name().to_owned(),
        enabled: reading.enabled_sites,
        sites: probe.sites().len(),
        counter: reading.counter,
    }
    .into())
}

/// The writes of one stage and action.
#[derive(Debug, Default)]
struct Draft {
    /// Address of the opcode, and its new value.
    sites: Vec<(LiveAddr, u8)>,
    counters: Vec<CounterWrite>,
}

impl Draft {
    fn steps(
        mut self,
        enable: bool,
        code: &mut [CodeRun],
        own_int3: &[LiveAddr],
    ) -> impl Iterator<Item = Step> {
        self.sites.sort_unstable();
        self.counters.sort_unstable_by_key(|write| write.at);
        let code = group(&self.sites, code, own_int3);
        let code = (!code.is_empty()).then_some(Step::Code(code));
        let counters = (!self.counters.is_empty()).then_some(Step::Counters(self.counters));
        let steps = if enable {
            [code, counters]
        } else {
            [counters, code]
        };
        steps.into_iter().flatten()
    }
}

/// Groups single-byte writes, sorted by address, into one write per page, and applies them to the
/// image of the code. A group ends before a breakpoint of somebody else's: whoever set it may
/// remove it at any time, and writing the old `cc` back would then kill the process.
fn group(sites: &[(LiveAddr, u8)], image: &mut [CodeRun], own_int3: &[LiveAddr]) -> Vec<CodeWrite> {
    let mut writes: Vec<CodeWrite> = Vec::new();
    let mut run = 0;
    for &(at, opcode) in sites {
        // Every site lies in a run of the layout the snapshot was read by.
        while image[run].start.0 + image[run].bytes.len() as u64 <= at.0 {
            run += 1;
        }
        let CodeRun { start, bytes } = &mut image[run];
        let to = (at.0 - start.0) as usize;
        let grown = writes.last_mut().filter(|write| {
            write.at.0 / PAGE == at.0 / PAGE && write.at >= *start && {
                let from = (write.at.0 - start.0) as usize + write.new.len();
                !holds_breakpoint(&bytes[from..to], start.plus(from as u64), own_int3)
            }
        });
        match grown {
            Some(write) => {
                let from = (write.at.0 - start.0) as usize + write.new.len();
                write.old.extend_from_slice(&bytes[from..=to]);
                write.new.extend_from_slice(&bytes[from..to]);
                write.new.push(opcode);
            }
            None => writes.push(CodeWrite {
                at,
                old: vec![bytes[to]],
                new: vec![opcode],
            }),
        }
        bytes[to] = opcode;
    }
    writes
}

fn holds_breakpoint(bytes: &[u8], start: LiveAddr, own_int3: &[LiveAddr]) -> bool {
    bytes
        .iter()
        .zip(start.0..)
        .any(|(&byte, at)| byte == INT3 && own_int3.binary_search(&LiveAddr(at)).is_err())
}

#[cfg(test)]
mod tests;
