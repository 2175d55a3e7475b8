//! Hides the observations of a process from the code that reads and switches its probes: makes the
//! [`Shadow`] of the arenas that are found installed in it.

use crate::memory::shadow::{Shadow, Shadowed, ShadowedSite};
use crate::observe::install::installed::{find, find_points, observer_in};
use crate::observe::layout::arena::Arena;
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::update::report::ObservedPoints;

/// Returns the memory of a process with its observed sites shown as if they were not observed.
pub(crate) fn shadowed_memory(memory: ProcessMemory, maps: &[Mapping]) -> Shadowed<ProcessMemory> {
    let shadow = shadow_of(&find(&memory, maps));
    Shadowed::new(memory, shadow)
}

/// Returns the shadow of the sites that these arenas observe.
pub(crate) fn shadow_of(arenas: &[Arena]) -> Shadow {
    let of_arena = |arena: &Arena| -> Vec<ShadowedSite> {
        let shadowed = arena.places().filter_map(|(index, place)| {
            let point = arena.points[index];
            point.wrapper()?;
            let [_, trampoline @ ..] = &*place.after else {
                return None;
            };
            let [_, unobserved @ ..] = &*place.before else {
                return None;
            };
            Some(ShadowedSite {
                site: point.address,
                trampoline_operand: trampoline.try_into().ok()?,
                unobserved_operand: unobserved.try_into().ok()?,
                tail: arena.tail(index),
            })
        });
        shadowed.collect()
    };
    Shadow::of(arenas.iter().flat_map(of_arena).collect())
}

/// Returns how many sites and functions of a process are observed now, and by whom.
pub(crate) fn observed_points(
    process: &Process,
    memory: &ProcessMemory,
    arenas: Vec<Arena>,
) -> ObservedPoints {
    let mut observed = ObservedPoints::default();
    let is_observed = |arena: &Arena| {
        // Points that cannot be read count as not observed.
        let found = find_points(process, memory, arena).unwrap_or_default();
        let (sites, functions) = found.sites_and_functions(arena);
        observed.sites += sites;
        observed.functions += functions;
        observed.usdt_sites += found.usdt_sites(arena);
        !found.patched.is_empty()
    };
    let arenas: Vec<Arena> = arenas.into_iter().filter(is_observed).collect();
    ObservedPoints {
        observer: observer_in(process, &arenas),
        ..observed
    }
}
