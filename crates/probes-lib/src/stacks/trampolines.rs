//! The trampolines that observers have mapped into a process, as its stacks are found through them.

use crate::observe::install::installed;
use crate::observe::layout::arena::Arena;
use crate::process::Process;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::unwind::trampolines::{MappedTrampolines, TrampolinePoint};

/// Returns the trampolines of all observers of a process, also of those that were killed.
pub(super) fn mapped_into(process: &Process, memory: &ProcessMemory) -> Vec<MappedTrampolines> {
    let maps = read_maps(process).unwrap_or_default();
    let arenas = installed::find(memory, &maps);
    arenas.iter().map(trampolines_of).collect()
}

fn trampolines_of(arena: &Arena) -> MappedTrampolines {
    let points = arena.points.iter().map(|point| TrampolinePoint {
        address: point.address,
        is_site: point.is_site(),
    });
    MappedTrampolines {
        code: arena.code.0..arena.trampolines().end,
        id: (arena.id_at(), arena.id),
        first: arena.trampoline(0),
        len: arena.trampoline_len,
        points: points.collect(),
    }
}
