//! Hides the observations of a process from the code that reads and switches its probes: makes the
//! [`Shadow`] of the arenas that are found installed in it.

use crate::memory::shadow::{Shadow, Shadowed, ShadowedSite};
use crate::observe::installed::{find, find_points, observer_in};
use crate::observe::layout::arena::Arena;
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::update::report::ObservedSites;

/// Returns the memory of a process with its observed sites shown as if they were not observed.
pub(crate) fn shadowed_memory(memory: ProcessMemory, maps: &[Mapping]) -> Shadowed<ProcessMemory> {
    let shadow = shadow_of(&find(&memory, maps));
    Shadowed::new(memory, shadow)
}

/// Returns the shadow of what these arenas observe.
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

/// Returns how many sites of a process are observed just now, and by whom.
pub(crate) fn observed_sites(
    process: &Process,
    memory: &ProcessMemory,
    arenas: Vec<Arena>,
) -> ObservedSites {
    // What cannot be read is not observed.
    let observed =
        |arena: &Arena| find_points(process, memory, arena).map_or(0, |found| found.patched.len());
    let counted = arenas.into_iter().map(|arena| (observed(&arena), arena));
    let (counts, arenas): (Vec<usize>, Vec<Arena>) =
        counted.filter(|(sites, _)| *sites > 0).unzip();
    ObservedSites {
        count: counts.iter().sum(),
        observer: observer_in(process, &arenas),
    }
}
