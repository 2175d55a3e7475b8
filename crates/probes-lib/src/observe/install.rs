//! Installs an observation in a process, and removes it.
//!
//! ```text
//! running   plan ─▶ place arenas ─▶ assemble trampolines ─▶ find a code cave              prepare.rs
//! stopped   map the arenas ─▶ write their headers                                         map_and_write.rs
//! running   write the trampolines ─▶ copy the pages that are patched    (if that takes longer than to stop again)
//! stopped   write the shared data ─▶ patch all points                                     map_and_write.rs, patch.rs
//! ```

mod assemble;
pub(crate) mod at_launch;
pub(crate) mod data_mapping;
mod fs_base;
pub(crate) mod installed;
pub(crate) mod map_and_write;
pub(crate) mod observer_lock;
pub(crate) mod patch;
mod placement;
mod planned_patches;
mod prepare;
pub(crate) mod remove;
mod semaphores;
pub(crate) mod shadow;
pub(crate) mod thread_ids;
pub(crate) mod tsc_access;

use std::io;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ProcessError, Result};
use crate::inject::code_cave::CodeCave;
use crate::inject::injected_call::InjectedCall;
use crate::inject::injector::Injector;
use crate::memory::WriteMemory;
use crate::observe::install::data_mapping::DataMapping;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::rows::{CLAIMS_LEN, CLAIMS_MAPPED};
use crate::observe::layout::shared::{PAGES_MAPPED, PAGES_WIPED};
use crate::process::memory::ProcessMemory;
use crate::trace::stopped::Stopped;

/// The length of a huge page.
const HUGE_PAGE: u64 = 2 << 20;

/// Returns the error for a read of code that has failed: the process has exited. Code that is no longer mapped is no
/// error ([`PageCopies::update`](crate::memory::page_copies::PageCopies::update)).
fn exited_of_read(pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |_| Error::of_process(pid, ProcessError::Exited)
}

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

/// How many mappings an arena has: code and data.
const MAPPINGS: usize = 2;

/// Returns the calls that map arenas, in groups of as many as fit in `room`.
fn mapped_together<'a>(
    room: CodeCave,
    arenas: &'a [Arena],
    data: DataMapping<'a>,
) -> impl Iterator<Item = Vec<InjectedCall>> + 'a {
    let chunks = arenas.chunks(room.most_calls() / MAPPINGS);
    chunks.map(move |arenas| {
        let calls = arenas.iter().flat_map(|arena| map_calls(arena, data));
        calls.collect()
    })
}

/// Returns the calls that map an arena: its code, and its data as `data` says.
fn map_calls(arena: &Arena, data: DataMapping<'_>) -> [InjectedCall; MAPPINGS] {
    let code = libc::PROT_READ | libc::PROT_EXEC;
    [
        InjectedCall::map(arena.code, arena.code_len(), code),
        data.map(arena),
    ]
}

/// Returns the calls that make the kernel clear memory in forked children (MADV_WIPEONFORK): the table of readable
/// pages with its validity and, if children share the counters, the claims of rows. If the observer writes the table
/// in children, it must not be in huge pages.
fn wipe_calls(arena: &Arena, data: DataMapping<'_>) -> Vec<InjectedCall> {
    let pages = arena.pages_at().map(|at| (at, PAGES_MAPPED, PAGES_WIPED));
    // Wiped even if threads make no claims: domains may have made some.
    let claims = (data.is_shared()).then(|| (arena.data(), CLAIMS_MAPPED, CLAIMS_LEN));
    let parts = claims.into_iter().chain(pages);
    let calls = parts.flat_map(|(at, mapped, wiped)| {
        let is_shared = data.is_shared();
        let over = is_shared.then(|| InjectedCall::map_over(at, mapped));
        let wipe = InjectedCall::wipe_on_fork(at, wiped);
        let small = (is_shared && wiped >= HUGE_PAGE).then(|| InjectedCall::small_pages(at, wiped));
        over.into_iter().chain([wipe]).chain(small)
    });
    calls.collect()
}

/// Returns the call that unmaps an arena.
fn unmap_call(arena: &Arena) -> InjectedCall {
    InjectedCall::unmap(&arena.range(), libc::PROT_READ | libc::PROT_EXEC)
}

/// Returns the calls that unmap arenas, in groups of as many as fit in `room`.
fn unmapped_together(room: CodeCave, arenas: &[Arena]) -> impl Iterator<Item = Vec<InjectedCall>> {
    let chunks = arenas.chunks(room.most_calls());
    chunks.map(|arenas| arenas.iter().map(unmap_call).collect())
}
