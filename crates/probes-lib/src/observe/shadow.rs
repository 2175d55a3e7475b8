//! Hides the observations of a process from those that read and switch its probes: the shadow of what
//! is found to be installed.

use crate::memory::shadow::{Shadow, Shadowed, ShadowedSite};
use crate::observe::installed::{find, patched_points};
use crate::observe::layout::arena::Arena;
use crate::process::Process;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;

/// Returns the memory of a process with its observed sites shown as if they were not observed.
pub(crate) fn shadowed_memory(memory: ProcessMemory, maps: &[Mapping]) -> Shadowed<ProcessMemory> {
    let shadow = shadow_of(&find(&memory, maps));
    Shadowed::new(memory, shadow)
}

/// Returns the shadow of what these arenas observe.
pub(crate) fn shadow_of(arenas: &[Arena]) -> Shadow {
    let of_arena = |arena: &Arena| -> Vec<ShadowedSite> {
        let points = arena.points.iter().enumerate();
        let shadowed = points.map(|(index, point)| {
            let [_, call @ ..] = arena.patch(index);
            ShadowedSite {
                site: point.address,
                call,
                operand: point.operand,
                tail: arena.tail(index),
            }
        });
        shadowed.collect()
    };
    Shadow::of(arenas.iter().flat_map(of_arena).collect())
}

/// Returns how many sites of a process are observed just now.
pub(crate) fn count_observed(process: &Process, memory: &ProcessMemory, arenas: &[Arena]) -> usize {
    // What cannot be read is not observed.
    let observed = |arena| patched_points(process, memory, arena).map_or(0, |points| points.len());
    arenas.iter().map(observed).sum()
}
