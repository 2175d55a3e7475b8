//! Places the arenas of a plan, and assembles their code, until all that is left of the plan has room.

use std::result;

use crate::error::{Error, ObserveError, Refusal, Result};
use crate::expression::ExpressionProblem;
use crate::observe::install::exited_of_read;
use crate::observe::install::placement::{self, Placed};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::observer_record::ObserverRecord;
use crate::observe::plan::ObservationPlan;
use crate::observe::trampoline::{self, ArenaCode};
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;

/// The longest trampoline that evaluates expressions, in bytes.
const MAX_FILTER_CODE: u64 = 8 << 10;

/// Places the arenas of a plan, and makes their code. Functions that cannot be patched as planned are patched in
/// another way, or refused.
pub(super) fn place_all(
    process: &Process,
    memory: &ProcessMemory,
    plan: &mut ObservationPlan,
    maps: &[Mapping],
    record: &ObserverRecord,
    claims_rows: bool,
) -> Result<(Vec<Arena>, Vec<ArenaCode>)> {
    let pid = process.pid();
    loop {
        let unmapped = plan.functions.unmapped(maps);
        plan.refuse(&unmapped);
        let changed = plan.functions.changed(memory);
        let changed = changed.map_err(exited_of_read(pid))?;
        if !changed.is_empty() {
            plan.refuse_changed(&changed);
            continue;
        }
        plan.lean();
        let overlapping = plan.functions.overlapping();
        if !overlapping.is_empty() {
            plan.try_next(&overlapping);
            continue;
        }
        plan.refuse_empty()?;
        let trampoline_len = trampoline::longest(plan).map_err(|_| no_room(pid))?;
        refuse_long_expressions(pid, plan, trampoline_len)?;
        let arenas = match placement::place(pid, plan, trampoline_len, maps, record)? {
            Placed::Arenas(arenas) => arenas,
            Placed::NoRoom(functions) => {
                plan.try_next(&because(functions, &Refusal::NoRoom));
                continue;
            }
        };
        let codes = codes_of(pid, plan, &arenas, claims_rows)?;
        let out_of_reach = codes
            .iter()
            .flat_map(|code| code.out_of_reach.iter().copied());
        let out_of_reach: Vec<usize> = out_of_reach.collect();
        if out_of_reach.is_empty() {
            return Ok((arenas, codes));
        }
        plan.try_next(&because(out_of_reach, &Refusal::OutOfReach));
    }
}

/// Checks that trampolines are not longer than permitted because of an expression.
fn refuse_long_expressions(pid: i32, plan: &ObservationPlan, trampoline_len: u64) -> Result<()> {
    if !plan.has_expressions() || trampoline_len <= MAX_FILTER_CODE {
        return Ok(());
    }
    // The code that records the hits may be longer than that of the expressions.
    let given = trampoline::longest_without_records(plan).map_err(|_| no_room(pid))?;
    match &plan.longest_expression {
        Some(longest) if given > MAX_FILTER_CODE => {
            let most = MAX_FILTER_CODE;
            let too_much = ExpressionProblem::TooMuchCode { given, most };
            Err(ObserveError::LongExpression(longest.bad(too_much)).into())
        }
        _ => Ok(()),
    }
}

/// Returns the code of each arena.
fn codes_of(
    pid: i32,
    plan: &ObservationPlan,
    arenas: &[Arena],
    claims_rows: bool,
) -> Result<Vec<ArenaCode>> {
    let no_sites = || Error::of_process(pid, ObserveError::NoSites);
    let sharing = arenas.first().ok_or_else(no_sites)?;
    let codes = plan
        .points_by_arena(arenas)
        .map(|(arena, points)| trampoline::arena_code(arena, plan, points, sharing, claims_rows));
    let codes: result::Result<_, _> = codes.collect();
    codes.map_err(|_| no_room(pid))
}

fn no_room(pid: i32) -> Error {
    Error::of_process(pid, ObserveError::NoRoom)
}

/// Returns these functions by ascending index, each with the same reason.
fn because(mut functions: Vec<usize>, why: &Refusal) -> Vec<(usize, Refusal)> {
    functions.sort_unstable();
    // A function has several points.
    functions.dedup();
    functions
        .into_iter()
        .map(|index| (index, why.clone()))
        .collect()
}
