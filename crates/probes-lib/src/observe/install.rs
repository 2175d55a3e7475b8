//! Installs an observation in a process, and removes it.

pub(crate) mod at_launch;
mod fs_base;
pub(crate) mod patch;
pub(crate) mod prepare;
pub(crate) mod remove;
mod semaphores;
mod tsc_access;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Result};
use crate::inject::code_cave::CodeCave;
use crate::inject::injected_call::InjectedCall;
use crate::inject::injector::Injector;
use crate::memory::WriteMemory;
use crate::observe::layout::arena::Arena;
use crate::process::memory::ProcessMemory;
use crate::trace::stopped::Stopped;

/// Writes into the code part of an arena.
fn write_code(
    injector: &Injector<'_>,
    stopped: &Stopped<'_>,
    at: LiveAddr,
    bytes: &[u8],
) -> Result<()> {
    let mut memory = stopped.memory(injector.memory)?;
    let written = memory.write_code(at, bytes);
    let pid = injector.process.pid();
    written.map_err(|source| Error::of_write(pid, MemoryPart::Trampoline, at, source))
}

/// Writes bytes into the shared data, each at its offset.
///
/// # Errors
///
/// If the shared data cannot be written.
pub(crate) fn write_shared(
    pid: i32,
    memory: &ProcessMemory,
    sharing: &Arena,
    writes: &[(u64, Vec<u8>)],
) -> Result<()> {
    for (offset, bytes) in writes {
        let at = sharing.shared_at().plus(*offset);
        let written = memory.while_it_runs().write_code(at, bytes);
        written.map_err(|source| Error::of_write(pid, MemoryPart::ObservationData, at, source))?;
    }
    Ok(())
}

/// Returns the call that unmaps an arena.
fn unmap_call(arena: &Arena) -> InjectedCall {
    InjectedCall::unmap(&arena.range(), libc::PROT_READ | libc::PROT_EXEC)
}

/// Returns the calls that unmap arenas, as many at once as fit in `room`.
fn unmapped_together(room: CodeCave, arenas: &[Arena]) -> impl Iterator<Item = Vec<InjectedCall>> {
    let chunks = arenas.chunks(room.most_calls());
    chunks.map(|arenas| arenas.iter().map(unmap_call).collect())
}
