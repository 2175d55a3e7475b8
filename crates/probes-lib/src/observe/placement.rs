//! Finds places in a process for the memory of an observation, near enough to its sites to be called
//! from there.

use crate::address::{LiveAddr, PAGE};
use crate::error::{Error, ObserveError, Result};
use crate::observe::layout::arena::{Arena, ObservedSite, new_id, trampoline_len};
use crate::observe::layout::shared::Shared;
use crate::observe::plan::Role;
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::program::Program;

/// How far from its sites an arena may begin or end: calls reach 2 GiB.
const REACH: u64 = (1 << 31) - (1 << 20);

/// Kept free around an arena, so that the kernel does not join it with what comes next to it.
const GAP: u64 = 1 << 20;

/// From one place that is tried to the next.
const STEP: u64 = 16 << 20;

/// An arena, and of each of its entries the index of the site in the program.
type PlacedArena = (Arena, Vec<usize>);

/// Lays out arenas for the sites that have a role: one for all objects that lie near each other. The
/// first has what they share.
///
/// # Errors
///
/// If there is no room near an object, or no site is wanted.
pub(crate) fn lay_out(
    process: &Process,
    program: &Program,
    roles: &[Role],
    layout: Shared,
    maps: &[Mapping],
) -> Result<Vec<PlacedArena>> {
    let pid = process.pid();
    let observed = roles.iter().filter(|role| !role.is_empty());
    let trampoline_len = trampoline_len(observed, layout)
        .map_err(|_| Error::of_process(pid, ObserveError::NoRoom))?;
    let mut sites: Vec<(LiveAddr, usize)> = program
        .sites_by_address()
        .filter(|site| !roles[site.index()].is_empty())
        .map(|site| (site.address, site.index()))
        .collect();
    sites.sort_unstable_by_key(|(address, _)| *address);
    let mut applied: Vec<(u64, u64)> = maps.iter().map(|it| (it.start.0, it.end.0)).collect();
    let mut placed = Vec::new();
    let mut rest = sites.as_slice();
    while let Some((first, _)) = rest.first() {
        // Half of the reach, so that there is room on both sides.
        let near = rest.partition_point(|(address, _)| address.0 - first.0 < REACH / 2);
        let (these, others) = rest.split_at(near);
        rest = others;
        let shared = match placed.is_empty() {
            true => layout,
            false => Shared::default(),
        };
        let entries = these.iter().map(|&(site, index)| ObservedSite {
            site,
            operand: program.site(index).site.code().operand(),
        });
        let mut arena = Arena {
            code: LiveAddr(0),
            entries: entries.collect(),
            trampoline_len,
            shared,
            id: new_id(),
        };
        arena.code = place(&arena, &applied).ok_or(Error::of_process(pid, ObserveError::NoRoom))?;
        let end = arena.data().plus(arena.data_len());
        applied.push((arena.code.0, end.0));
        placed.push((arena, these.iter().map(|(_, index)| *index).collect()));
    }
    match placed.is_empty() {
        true => Err(Error::of_process(pid, ObserveError::NoSites)),
        false => Ok(placed),
    }
}

/// Where an arena can begin that its sites reach.
fn place(arena: &Arena, applied: &[(u64, u64)]) -> Option<LiveAddr> {
    let len = arena.code_len() + arena.data_len();
    // Stubs call wrappers as sites call trampolines.
    let sites = arena.entries.iter();
    let places = sites.flat_map(|entry| [entry.site.0, entry.wrapper().0]);
    let (first, last) = (places.clone().min()?, places.max()?);
    let is_free = |start: u64| {
        let (from, to) = (start.saturating_sub(GAP), start.saturating_add(len + GAP));
        applied
            .iter()
            .all(|&(begin, end)| end <= from || begin >= to)
    };
    // Below first: the heap grows upwards from the executable.
    let below = (1..REACH / STEP).map(|step| first.wrapping_sub(step * STEP + len));
    let above = (1..REACH / STEP)
        .rev()
        .map(|step| last.wrapping_add(step * STEP));
    let reaches = |start: u64| {
        let lowest = first.min(start);
        let highest = last.max(start.saturating_add(len));
        start >= STEP && highest < 1 << 47 && highest - lowest < REACH
    };
    let starts = below.chain(above).map(|start| start & !(PAGE - 1));
    let mut fit = starts.filter(|&start| reaches(start) && is_free(start));
    fit.next().map(LiveAddr)
}
