//! Finds addresses for the arenas of an observation: unmapped, and near enough to the points to be called
//! from there.

use crate::address::{LiveAddr, PAGE};
use crate::error::{Error, ObserveError, Result};
use crate::observe::layout::arena::{Arena, new_id};
use crate::observe::layout::shared::SharedLayout;
use crate::observe::plan::ObservationPlan;
use crate::process::maps::Mapping;

/// How far from its points an arena may begin or end: calls reach 2 GiB.
const REACH: u64 = (1 << 31) - (1 << 20);

/// Kept unmapped around an arena, so that the kernel does not merge it with an adjacent mapping.
const GAP: u64 = 1 << 20;

/// The distance from one address that is tried to the next.
const STEP: u64 = 16 << 20;

/// Returns the arenas of a plan, whose trampolines are `trampoline_len` bytes long: one for all points
/// that are near each other, by address. The first one has the shared data.
///
/// # Errors
///
/// If there is no room near a point, or there are no points.
pub(crate) fn place(
    pid: i32,
    plan: &ObservationPlan,
    trampoline_len: u64,
    maps: &[Mapping],
) -> Result<Vec<Arena>> {
    let mut occupied: Vec<(u64, u64)> = maps.iter().map(|it| (it.start.0, it.end.0)).collect();
    let mut arenas = Vec::new();
    let mut rest = plan.points.as_slice();
    while let Some(first) = rest.first() {
        let first = first.point.address.0;
        // Half of the reach, so that there is room on both sides.
        let near = rest.partition_point(|it| it.point.address.0 - first < REACH / 2);
        let (these, others) = rest.split_at(near);
        rest = others;
        let is_first = arenas.is_empty();
        let mut arena = Arena {
            code: LiveAddr(0),
            points: these.iter().map(|planned| planned.point).collect(),
            trampoline_len,
            shared: if is_first {
                plan.shared
            } else {
                SharedLayout::default()
            },
            id: new_id(),
        };
        let no_room = || Error::of_process(pid, ObserveError::NoRoom);
        arena.code = address_for(&arena, &occupied).ok_or_else(no_room)?;
        let range = arena.range();
        occupied.push((range.start, range.end));
        arenas.push(arena);
    }
    if arenas.is_empty() {
        return Err(Error::of_process(pid, ObserveError::NoSites));
    }
    Ok(arenas)
}

/// Returns where an arena can begin that is within reach of its points.
fn address_for(arena: &Arena, occupied: &[(u64, u64)]) -> Option<LiveAddr> {
    let len = arena.code_len() + arena.data_len();
    // Points have to reach the trampolines, and trampolines the wrappers.
    let points = arena.points.iter();
    let near = points.flat_map(|point| [point.address.0, point.wrapper().0]);
    let (first, last) = (near.clone().min()?, near.max()?);
    let is_free = |start: u64| {
        let (from, to) = (start.saturating_sub(GAP), start.saturating_add(len + GAP));
        occupied
            .iter()
            .all(|&(begin, end)| end <= from || begin >= to)
    };
    // Below first: the heap grows upwards from the executable.
    let below = (1..REACH / STEP).map(|step| first.wrapping_sub(step * STEP + len));
    let above = (1..REACH / STEP)
        .rev()
        .map(|step| last.wrapping_add(step * STEP));
    let is_reached = |start: u64| {
        let lowest = first.min(start);
        let highest = last.max(start.saturating_add(len));
        start >= STEP && highest < 1 << 47 && highest - lowest < REACH
    };
    let starts = below.chain(above).map(|start| start & !(PAGE - 1));
    let mut fit = starts.filter(|&start| is_reached(start) && is_free(start));
    fit.next().map(LiveAddr)
}
