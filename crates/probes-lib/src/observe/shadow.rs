//! Finds the observations that a process has in its memory, and hides them from readers by a
//! [`Shadow`].

use crate::memory::ReadMemory;
use crate::memory::shadow::{Shadow, Shadowed, ShadowedSite};
use crate::observe::install::context::observed_of;
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
        let entries = arena.entries.iter().enumerate();
        let shadowed = entries.map(|(index, entry)| ShadowedSite {
            site: entry.site,
            call: arena.call(index),
            operand: entry.operand,
            tail: arena.tail(index),
        });
        shadowed.collect()
    };
    Shadow::of(arenas.iter().flat_map(of_arena).collect())
}

/// Returns how many sites of a process are observed just now.
pub(crate) fn count_observed(process: &Process, memory: &ProcessMemory, arenas: &[Arena]) -> usize {
    // What cannot be read is not observed.
    let observed = |arena| observed_of(process, memory, arena).map_or(0, |sites| sites.len());
    arenas.iter().map(observed).sum()
}

/// Returns the observations that a process has in its memory.
pub(crate) fn find(memory: &ProcessMemory, maps: &[Mapping]) -> Vec<Arena> {
    let may_be = |mapping: &&Mapping| {
        // The kernel's own have names: [vdso], [vsyscall].
        let is_anonymous = mapping.inode == 0 && !mapping.path().starts_with(b"[v");
        mapping.executable && is_anonymous && !mapping.shared
    };
    let found = maps.iter().filter(may_be).map(|mapping| {
        let len = mapping.end.0 - mapping.start.0;
        Arena::find(mapping.start, len, |at, bytes| memory.read(at, bytes))
    });
    // What cannot be read is none.
    found.filter_map(|arena| arena.ok().flatten()).collect()
}
