//! Raises the semaphores of the USDT probes that are observed, while the process is stopped, and lowers them again.
//!
//! They are raised once the points are patched, and lowered before these are restored. As long as the patch of a point
//! is there, its object has not been unloaded, and the semaphore is still its own.

use std::collections::{HashMap, HashSet};

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ObserveError, Result};
use crate::memory::{ReadMemory, WriteMemory};
use crate::observe::install::installed::find_points;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::semaphores::{PROGRESS_LEN, Progress, WordChange};
use crate::process::Process;

/// Checks that all semaphores can be raised.
///
/// # Errors
///
/// [`ObserveError::SemaphoreFull`]; if one cannot be read.
pub(super) fn refuse_full(pid: i32, memory: &impl ReadMemory, arenas: &[Arena]) -> Result<()> {
    // Each is raised once for each site of its probe.
    let mut sites: HashMap<LiveAddr, u16> = HashMap::new();
    let semaphores = arenas.iter().flat_map(|arena| &arena.semaphores);
    for semaphore in semaphores.filter(|it| it.change == WordChange::Count) {
        let sites = sites.entry(semaphore.at).or_default();
        *sites = sites.saturating_add(1);
    }
    for (address, sites) in sites {
        if read(pid, memory, address)?.checked_add(sites).is_none() {
            let kind = ObserveError::SemaphoreFull { address };
            return Err(Error::of_process(pid, kind));
        }
    }
    Ok(())
}

/// Raises the semaphores of the points that are patched.
///
/// # Errors
///
/// If one cannot be read or written: those before it are raised.
pub(super) fn raise(
    process: &Process,
    memory: &mut impl WriteMemory,
    arenas: &[Arena],
) -> Result<()> {
    change(process, memory, arenas, true)
}

/// Lowers the semaphores that are raised.
///
/// # Errors
///
/// If one cannot be read or written: those before it are lowered.
pub(super) fn lower(
    process: &Process,
    memory: &mut impl WriteMemory,
    arenas: &[Arena],
) -> Result<()> {
    change(process, memory, arenas, false)
}

fn change(
    process: &Process,
    memory: &mut impl WriteMemory,
    arenas: &[Arena],
    is_to_be_raised: bool,
) -> Result<()> {
    let pid = process.pid();
    complete_interrupted_changes(pid, memory, arenas)?;
    for arena in arenas.iter().filter(|arena| !arena.semaphores.is_empty()) {
        let found = find_points(process, memory, arena)?;
        let patched: HashSet<usize> = found.patched.iter().map(|it| it.point).collect();
        for (index, semaphore) in arena.semaphores.iter().enumerate() {
            if !patched.contains(&semaphore.point) {
                continue;
            }
            let progress_at = arena.semaphore_progress(index);
            let progress = read_progress(pid, memory, progress_at)?;
            let value = read(pid, memory, semaphore.at)?;
            if progress.is_raised(value) == is_to_be_raised {
                continue;
            }
            let (during, new, after) = if is_to_be_raised {
                if semaphore.change == WordChange::ClearAtEnd {
                    write_progress(pid, memory, progress_at, Progress::Raised)?;
                }
                let Some(new) = semaphore.change.changed(value) else {
                    continue;
                };
                (Progress::Raising(value), new, Progress::Raised)
            } else {
                let new = semaphore.change.restored(value);
                (Progress::Lowering(value), new, Progress::Lowered)
            };
            write_progress(pid, memory, progress_at, during)?;
            let written = memory.write_counters(&[(semaphore.at, new)]);
            written.map_err(|fault| {
                Error::of_write(pid, MemoryPart::Semaphore, semaphore.at, fault.source)
            })?;
            write_progress(pid, memory, progress_at, after)?;
        }
    }
    Ok(())
}

/// Completes the record of the semaphore that a killed tool was changing: whether it is raised. This is done before any
/// semaphore is changed, because the records of several sites may be about the same one.
fn complete_interrupted_changes(
    pid: i32,
    memory: &mut impl WriteMemory,
    arenas: &[Arena],
) -> Result<()> {
    for arena in arenas {
        for (index, semaphore) in arena.semaphores.iter().enumerate() {
            let at = arena.semaphore_progress(index);
            let progress = read_progress(pid, memory, at)?;
            if matches!(progress, Progress::Raising(_) | Progress::Lowering(_)) {
                // It may have been unmapped with its object.
                let is_raised =
                    read(pid, memory, semaphore.at).is_ok_and(|value| progress.is_raised(value));
                let completed = if is_raised {
                    Progress::Raised
                } else {
                    Progress::Lowered
                };
                write_progress(pid, memory, at, completed)?;
            }
        }
    }
    Ok(())
}

fn read_progress(pid: i32, memory: &impl ReadMemory, at: LiveAddr) -> Result<Progress> {
    let mut bytes = [0; PROGRESS_LEN];
    let read = memory.read(at, &mut bytes);
    read.map_err(|source| Error::of_read(pid, MemoryPart::ObservationData, at, source))?;
    Ok(Progress::parse(bytes))
}

fn read(pid: i32, memory: &impl ReadMemory, at: LiveAddr) -> Result<u16> {
    let mut bytes = [0; 2];
    let read = memory.read(at, &mut bytes);
    read.map_err(|source| Error::of_read(pid, MemoryPart::Semaphore, at, source))?;
    Ok(u16::from_le_bytes(bytes))
}

fn write_progress(
    pid: i32,
    memory: &mut impl WriteMemory,
    at: LiveAddr,
    progress: Progress,
) -> Result<()> {
    let written = memory.write_code(at, &progress.to_bytes());
    written.map_err(|source| Error::of_write(pid, MemoryPart::ObservationData, at, source))
}
