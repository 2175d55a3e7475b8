//! Carries out an [`UpdatePlan`]: checks every expected byte, then writes and reads back, and on any
//! failure restores what it wrote.

use crate::address::LiveAddr;
use crate::error::{Effect, Error, MemoryError, MemoryPart, Result};
use crate::memory::{CounterFault, WriteMemory};
use crate::update::plan::{CounterWrite, OpcodeChange, Step, UpdatePlan};
use crate::update::snapshot::{Layout, Snapshot};

/// The result of carrying out a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchOutcome {
    /// Everything was written and read back.
    Done,
    /// The process is not in the state that the plan is for; nothing was written.
    Outdated,
}

/// Carries out `plan` in `memory`. Meanwhile, nothing else may change what the plan writes.
///
/// # Errors
///
/// If a write fails, or memory does not hold what was written. [`Error::effect`] says whether everything
/// was restored.
pub(crate) fn apply(
    plan: &UpdatePlan,
    layout: &Layout,
    pid: i32,
    memory: &mut impl WriteMemory,
) -> Result<PatchOutcome> {
    let unchanged = layout
        .is_unchanged(pid, memory, &plan.before)
        .map_err(|error| error.with_effect_if_none(Effect::NothingChanged))?;
    if !unchanged {
        return Ok(PatchOutcome::Outdated);
    }
    let mut journal = Vec::with_capacity(plan.steps.len());
    let written = plan
        .steps
        .iter()
        .try_for_each(|step| write(plan, step, pid, memory, &mut journal))
        .and_then(|()| read_back(plan, layout, pid, memory));
    match written {
        Ok(()) => Ok(PatchOutcome::Done),
        Err(error) => {
            restore(plan, &journal, memory);
            let found = layout.read(pid, memory);
            let effect = if found.is_ok_and(|found| is_restored(&journal, &plan.before, &found)) {
                Effect::Restored
            } else {
                Effect::HalfChanged
            };
            Err(error.with_effect_if_none(effect))
        }
    }
}

/// How much of a step was written: the first `done` of its writes, the last of them perhaps in part.
struct Written<'p> {
    step: &'p Step,
    done: usize,
}

fn write<'p>(
    plan: &UpdatePlan,
    step: &'p Step,
    pid: i32,
    memory: &mut impl WriteMemory,
    journal: &mut Vec<Written<'p>>,
) -> Result<()> {
    match step {
        Step::Code(writes) => {
            let mut code = Vec::new();
            for (done, write) in writes.iter().enumerate() {
                plan.new_code(write, &mut code);
                if let Err(source) = memory.write_code(write.at, &code) {
                    // It may have been written in part.
                    journal.push(Written {
                        step,
                        done: done + 1,
                    });
                    return Err(Error::of_write(pid, MemoryPart::Site, write.at, source));
                }
            }
            let done = writes.len();
            journal.push(Written { step, done });
        }
        Step::Counters(writes) => {
            let result = memory.write_counters(&counters(writes, |write| write.new));
            let done = match &result {
                Ok(()) => writes.len(),
                // The next may have been written in part.
                Err(fault) => writes.len().min(fault.done + 1),
            };
            journal.push(Written { step, done });
            if let Err(CounterFault { done, source }) = result {
                let at = writes[done.min(writes.len() - 1)].at;
                return Err(Error::of_write(pid, MemoryPart::Semaphore, at, source));
            }
        }
    }
    Ok(())
}

fn counters(writes: &[CounterWrite], value: impl Fn(&CounterWrite) -> u16) -> Vec<(LiveAddr, u16)> {
    writes
        .iter()
        .map(|write| (write.at, value(write)))
        .collect()
}

/// Restores what the journal says was written, from its end; continues after a failure, to restore as
/// much as possible.
fn restore(plan: &UpdatePlan, journal: &[Written<'_>], memory: &mut impl WriteMemory) {
    let mut code = Vec::new();
    for Written { step, done } in journal.iter().rev() {
        match step {
            Step::Code(writes) => {
                for write in writes[..*done].iter().rev() {
                    // Whether it worked is checked by reading it back.
                    plan.old_code(write, &mut code);
                    let _ = memory.write_code(write.at, &code);
                }
            }
            Step::Counters(writes) => {
                let mut rest = counters(&writes[..*done], |write| write.old);
                rest.reverse();
                while let Err(fault) = memory.write_counters(&rest) {
                    rest.drain(..(fault.done + 1).min(rest.len()));
                }
            }
        }
    }
}

/// Whether everything that the journal says was written is as it was before.
fn is_restored(journal: &[Written<'_>], before: &Snapshot, found: &Snapshot) -> bool {
    journal.iter().all(|Written { step, done }| match step {
        Step::Code(writes) => writes[..*done]
            .iter()
            .all(|write| found.code_at(write.at, write.len) == before.code_at(write.at, write.len)),
        Step::Counters(writes) => writes[..*done]
            .iter()
            .all(|write| found.counters[write.index] == before.counters[write.index]),
    })
}

/// Checks that memory holds what was written. The code between the changed opcodes is not compared:
/// debuggers may set breakpoints there, even now.
fn read_back(
    plan: &UpdatePlan,
    layout: &Layout,
    pid: i32,
    memory: &impl WriteMemory,
) -> Result<()> {
    let not_as_written = |part, address| {
        Err(Error::of_process(
            pid,
            MemoryError::NotAsWritten { part, address },
        ))
    };
    let mut opcode_changes = plan.opcode_changes.iter().peekable();
    layout.visit_code(pid, memory, |_, start, bytes| {
        let is_as_written = |change: &OpcodeChange| {
            let offset = change.at.0.wrapping_sub(start.0) as usize;
            bytes.get(offset) == Some(&change.new)
        };
        while opcode_changes
            .next_if(|change| is_as_written(change))
            .is_some()
        {}
        // The next change is in another run, or its byte is not what was written.
        true
    })?;
    if let Some(change) = opcode_changes.next() {
        return not_as_written(MemoryPart::Site, change.at);
    }
    let counters = layout.read_counters(pid, memory)?;
    let mut writes = plan.steps.iter().flat_map(|step| match step {
        Step::Counters(writes) => writes.as_slice(),
        Step::Code(_) => &[],
    });
    match writes.find(|write| counters[write.index] != write.new) {
        Some(write) => not_as_written(MemoryPart::Semaphore, write.at),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
