//! [`PlannedPatches`]: the patches of all points, and the code that they depend on.

use crate::address::LiveAddr;
use crate::error::{Refusal, Result};
use crate::memory::ReadMemory;
use crate::observe::install::exited_of_read;
use crate::observe::install::installed::read_each;
use crate::observe::install::patch::Patch;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOwner};
use crate::observe::point::PATCH_LEN;
use crate::site::{SITE_LEN, SiteCode};

/// The patches of all points.
pub(super) struct PlannedPatches {
    /// In the order of their addresses.
    pub(super) patches: Vec<Patch>,
    /// The tails of the trampolines whose sites are enabled.
    pub(super) enabled: Vec<LiveAddr>,
    /// The functions that are not patched, because their code has changed.
    pub(super) changed: Vec<(usize, Refusal)>,
}

impl PlannedPatches {
    /// Plans the patches of code that `memory` holds.
    ///
    /// # Errors
    ///
    /// If a site does not hold the code that its file says, or cannot be read.
    pub(super) fn of(
        pid: i32,
        memory: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<PlannedPatches> {
        let changed = plan.functions.left_out(memory);
        let changed = changed.map_err(exited_of_read(pid))?;
        let is_changed = |planned: &PlannedPoint| match planned.of {
            PointOwner::Site(_) => false,
            PointOwner::Function(function) => {
                let found = changed.binary_search_by_key(&function, |(index, _)| *index);
                found.is_ok()
            }
        };
        let (mut patches, mut tails) = (Vec::new(), Vec::new());
        for (arena, these) in plan.points_by_arena(arenas) {
            let enabled = enabled_sites(pid, memory, plan, these)?;
            let points = enabled.iter().enumerate();
            let is_enabled = points.filter(|(_, is_enabled)| **is_enabled);
            tails.extend(is_enabled.map(|(index, _)| arena.tail(index)));
            let places = arena.places();
            let places = places.filter(|(index, _)| !is_changed(&these[*index]));
            patches.extend(places.map(|(index, place)| {
                let point = &arena.points[index];
                Patch {
                    at: place.at,
                    before: point.unpatched(&place, enabled[index]),
                    after: place.after,
                    may_be_written_in_steps: point.may_be_written_in_steps(),
                    is_beside_breakpoint: false,
                }
            }));
        }
        patches.sort_unstable_by_key(|patch| patch.at);
        Ok(PlannedPatches {
            patches,
            enabled: tails,
            changed,
        })
    }
}

/// Returns the code that patches depend on or overwrite: addresses and lengths.
pub(super) fn copied(
    plan: &ObservationPlan,
    arenas: &[Arena],
) -> impl Iterator<Item = (LiveAddr, u64)> {
    let sites = plan.points.iter().filter(|it| it.site().is_some());
    let sites = sites.map(|planned| (planned.point.address, SITE_LEN as u64));
    let places = arenas.iter().flat_map(Arena::places);
    let places = places.map(|(_, place)| (place.at, PATCH_LEN as u64));
    let functions = plan.functions.expected_code();
    sites.chain(places).chain(functions)
}

/// Returns for each of these points whether it is the site of an enabled probe.
///
/// # Errors
///
/// If one of the sites holds other code than its file says.
fn enabled_sites(
    pid: i32,
    memory: &impl ReadMemory,
    plan: &ObservationPlan,
    planned: &[PlannedPoint],
) -> Result<Vec<bool>> {
    let mut enabled = vec![false; planned.len()];
    let sites: Vec<(usize, usize)> = (0..)
        .zip(planned)
        .filter_map(|(index, planned)| Some((index, planned.site()?)))
        .collect();
    let address = |&(index, _): &(usize, usize)| planned[index].point.address;
    let addresses: Vec<LiveAddr> = sites.iter().map(address).collect();
    let found = read_each(pid, memory, &addresses)?;
    for ((index, site), found) in sites.into_iter().zip(found) {
        let found = SiteCode(found);
        if !planned[index].point.is_unpatched(found) {
            return Err(plan.unexpected(site, found).into());
        }
        enabled[index] = found.enabled() == Some(true);
    }
    Ok(enabled)
}
