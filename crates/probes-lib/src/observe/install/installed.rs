//! Finds the observations that a process has in its memory, of this tool or another, and which of their
//! points are still patched.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use nix::fcntl::OFlag;

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ObserveError, ProcessError, Result, ToolProcess};
use crate::memory::ReadMemory;
use crate::memory::runs;
use crate::observe::install::observer_lock::{is_held, observer_of};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::observer_record::{OBSERVER_RECORD_LEN, ObserverRecord};
use crate::observe::layout::semaphores::WordChange;
use crate::observe::point::{PATCH_LEN, PatchBytes, PatchPlace, PlaceState, Point};
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::tool::since_boot;
use crate::ticks;

/// Returns the arenas that are mapped into a process.
pub(crate) fn find(memory: &ProcessMemory, maps: &[Mapping]) -> Vec<Arena> {
    let may_be = |mapping: &&Mapping| {
        // Not the mappings of the kernel: [vdso], [vsyscall].
        let is_anonymous = mapping.inode == 0 && !mapping.path().starts_with(b"[v");
        mapping.executable && is_anonymous && !mapping.shared
    };
    let found = maps.iter().filter(may_be).map(|mapping| {
        let len = mapping.end.0 - mapping.start.0;
        Arena::find(mapping.start, len, |at, bytes| memory.read(at, bytes))
    });
    // Memory that cannot be read is not an arena.
    found.filter_map(|arena| arena.ok().flatten()).collect()
}

/// Returns the observer of a process by the records of these arenas: a live one if there is any,
/// otherwise one that has ended.
pub(crate) fn observer_in(process: &Process, arenas: &[Arena]) -> Option<ToolProcess> {
    let records = arenas.iter().filter_map(Arena::observer);
    let observers = records.map(|record| observer_of(process, record));
    observers.max_by_key(|observer| observer.is_alive)
}

/// Returns whether the observer of an arena is alive. False for an earlier version of the tool,
/// which leaves no record.
pub(crate) fn has_observer(process: &Process, arena: &Arena) -> bool {
    arena
        .observer()
        .is_some_and(|record| is_held(process, record))
}

/// Returns when runtime events were switched on in a process: when the latest observation that has done so began, by
/// CLOCK_MONOTONIC. 0 if none has. If the machine was suspended since then, the result is too early by the length of
/// the suspension.
pub(crate) fn events_switched_on(process: &Process, maps: &[Mapping]) -> u64 {
    let Ok(memory) = ProcessMemory::open(process, OFlag::O_RDONLY) else {
        return 0;
    };
    let arenas = find(&memory, maps);
    // Semaphores are counted; other words are the flags of events.
    let switches = |arena: &&Arena| {
        let mut changes = arena.semaphores.iter().map(|it| it.change);
        changes.any(|change| change != WordChange::Count)
    };
    let records = arenas.iter().filter(switches).filter_map(Arena::observer);
    let begun = records.map(|record| record.begun).max();
    begun.map_or(0, |begun| {
        let age = since_boot().saturating_sub(Duration::from_nanos(begun));
        ticks::monotonic().saturating_sub(age.as_nanos() as u64)
    })
}

/// Returns whether the process has an orphaned observation, and no live observer.
///
/// # Errors
///
/// If the process has exited.
pub(crate) fn is_orphaned(process: &Process, memory: &ProcessMemory) -> Result<bool> {
    let arenas = find(memory, &read_maps(process)?);
    let is_observed = arenas.iter().any(|arena| has_observer(process, arena));
    Ok(!arenas.is_empty() && !is_observed)
}

/// Checks that no live observer observes the process.
///
/// # Errors
///
/// [`ObserveError::AlreadyObserved`], or if the process has exited.
pub(crate) fn refuse_observed(process: &Process, memory: &ProcessMemory) -> Result<()> {
    let arenas = find(memory, &read_maps(process)?);
    match observer_in(process, &arenas).filter(|observer| observer.is_alive) {
        None => Ok(()),
        Some(observer) => {
            let error = ObserveError::AlreadyObserved { observer };
            Err(Error::of_process(process.pid(), error))
        }
    }
}

/// Checks that arenas are still mapped: the update lock does not exclude tools that see another /proc.
///
/// # Errors
///
/// [`ProcessError::KeepsChanging`], or if the process has exited.
pub(crate) fn refuse_missing(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
) -> Result<()> {
    for arena in arenas {
        let error = match arena.is_there(|at, bytes| memory.read(at, bytes)) {
            Ok(true) => continue,
            Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => ProcessError::Exited,
            Ok(false) | Err(_) => ProcessError::KeepsChanging,
        };
        return Err(Error::of_process(process.pid(), error));
    }
    Ok(())
}

/// Checks that arenas are still mapped, and that no other tool has begun to remove them.
///
/// # Errors
///
/// [`ObserveError::Replaced`], or if the process has exited.
pub(crate) fn refuse_replaced(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
) -> Result<()> {
    let pid = process.pid();
    for arena in arenas {
        match arena.is_there(|at, bytes| memory.read(at, bytes)) {
            Ok(true) => refuse_if_removal_began(process, memory, arena)?,
            Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(Error::of_process(pid, ProcessError::Exited));
            }
            // Memory that cannot be read is not mapped.
            Ok(false) | Err(_) => {
                let observer = other_observer(process, memory, arena);
                return Err(Error::of_process(pid, ObserveError::Replaced { observer }));
            }
        }
    }
    Ok(())
}

/// Checks, in the data of an arena, that no other tool has begun to remove it. This is an error even if that tool was
/// killed: it may have restored some of the points, whose hits are missed.
///
/// # Errors
///
/// [`ObserveError::Replaced`].
pub(crate) fn refuse_if_removal_began(
    process: &Process,
    data: &impl ReadMemory,
    arena: &Arena,
) -> Result<()> {
    let mut bytes = [0; OBSERVER_RECORD_LEN];
    let read = arena.successor_at().map(|at| data.read(at, &mut bytes));
    // If it cannot be read, the next check of the arena says why.
    let written = matches!(read, Some(Ok(())));
    match ObserverRecord::parse_written(&bytes).filter(|_| written) {
        None => Ok(()),
        Some(record) => {
            let observer = Some(observer_of(process, &record));
            let error = ObserveError::Replaced { observer };
            Err(Error::of_process(process.pid(), error))
        }
    }
}

/// Returns the observer that has replaced that of `arena`.
fn other_observer(process: &Process, memory: &ProcessMemory, arena: &Arena) -> Option<ToolProcess> {
    let lock = |arena: &Arena| arena.observer().map(|record| record.lock);
    let mut arenas = find(memory, &read_maps(process).ok()?);
    arenas.retain(|other| lock(other) != lock(arena));
    observer_in(process, &arenas).filter(|observer| observer.is_alive)
}

/// What is found at the points of an arena.
#[derive(Debug, Default)]
pub(crate) struct FoundPoints {
    /// The places that are patched, wholly or in part.
    pub(crate) patched: Vec<FoundPlace>,
    /// The points whose patch is gone, wholly or in part, or has another tool's breakpoint in it.
    pub(crate) discarded: Vec<LiveAddr>,
}

impl FoundPoints {
    /// Returns how many sites are patched, and how many functions and other instructions. A function counts once,
    /// however many exits it has.
    pub(crate) fn sites_and_functions(&self, arena: &Arena) -> (usize, usize) {
        let points = self.patched.iter().map(|place| place.point);
        let points: BTreeSet<usize> = points.collect();
        let points = points.iter().map(|&point| &arena.points[point]);
        let points: Vec<&Point> = points.collect();
        let sites = points.iter().filter(|point| point.is_site()).count();
        let exits = points.iter().filter(|point| point.is_exit()).count();
        // If only exits are patched, at least one function is.
        let functions = points.len() - sites - exits;
        (sites, functions.max(usize::from(exits > 0)))
    }

    /// Returns how many of these functions and other instructions are sites of USDT probes.
    pub(crate) fn usdt_sites(&self, arena: &Arena) -> usize {
        let points = self.patched.iter().map(|place| place.point);
        let points: BTreeSet<usize> = points.collect();
        let is_usdt = |&&point: &&usize| arena.points[point].is_usdt();
        points.iter().filter(is_usdt).count()
    }
}

/// A place that is patched, wholly or in part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundPlace {
    /// The index of its point in the arena.
    pub(crate) point: usize,
    pub(crate) place: PatchPlace,
    /// What is there now.
    pub(crate) found: PatchBytes,
    /// Whether another tool's breakpoints are among these bytes.
    pub(crate) is_under_breakpoint: bool,
}

/// Returns what is found at the points of an arena; nothing once they are restored.
///
/// # Errors
///
/// If the arena cannot be read, or the process has exited.
pub(crate) fn find_points(
    process: &Process,
    memory: &impl ReadMemory,
    arena: &Arena,
) -> Result<FoundPoints> {
    let is_restored = arena.is_restored(|at, bytes| memory.read(at, bytes));
    let is_restored = is_restored.map_err(|source| {
        Error::of_read(process.pid(), MemoryPart::Trampoline, arena.code, source)
    })?;
    if is_restored {
        return Ok(FoundPoints::default());
    }
    let places: Vec<(usize, PatchPlace)> = arena.places().collect();
    let all = read_places(process, memory, &places)?;
    let mut found = FoundPoints::default();
    for (bytes, (index, place)) in all.into_iter().zip(places) {
        let (Some(bytes), point) = (bytes, &arena.points[index]) else {
            continue;
        };
        let classified = point.classify(&place, bytes);
        if matches!(
            classified,
            PlaceState::Patched | PlaceState::PartlyPatched | PlaceState::UnderBreakpoint
        ) {
            found.patched.push(FoundPlace {
                point: index,
                place,
                found: PatchBytes::of(&bytes[..place.after.len()]),
                is_under_breakpoint: classified == PlaceState::UnderBreakpoint,
            });
        }
        if !matches!(classified, PlaceState::Patched | PlaceState::Other) {
            found.discarded.push(point.address);
        }
    }
    Ok(found)
}

/// Returns the bytes at places that are or were patched; `None` where an object has been unloaded.
fn read_places(
    process: &Process,
    memory: &impl ReadMemory,
    places: &[(usize, PatchPlace)],
) -> Result<Vec<Option<[u8; PATCH_LEN]>>> {
    let pid = process.pid();
    let places: Vec<LiveAddr> = places.iter().map(|(_, place)| place.at).collect();
    if let Ok(all) = read_each(pid, memory, &places) {
        return Ok(all.into_iter().map(Some).collect());
    }
    // Fails if the process has exited; otherwise some object has been unloaded.
    read_maps(process)?;
    let one = |place: &LiveAddr| {
        let found = read_each(pid, memory, std::slice::from_ref(place));
        found.ok()?.into_iter().next()
    };
    Ok(places.iter().map(one).collect())
}

/// Reads `LEN` bytes at each of these addresses, in few calls.
///
/// # Errors
///
/// If any of them cannot be read.
pub(crate) fn read_each<const LEN: usize>(
    pid: i32,
    memory: &impl ReadMemory,
    addresses: &[LiveAddr],
) -> Result<Vec<[u8; LEN]>> {
    let mut order: Vec<usize> = (0..addresses.len()).collect();
    order.sort_unstable_by_key(|&index| addresses[index]);
    let by_address = order.iter().map(|&index| (addresses[index].0, 0));
    let mut found = vec![[0; LEN]; addresses.len()];
    let mut bytes = Vec::new();
    for run in &runs::group(by_address, LEN as u64) {
        bytes.resize(run.len as usize, 0);
        let start = LiveAddr(run.start);
        let read = memory.read(start, &mut bytes);
        read.map_err(|source| Error::of_read(pid, MemoryPart::Site, start, source))?;
        for &index in &order[run.range()] {
            let at = (addresses[index].0 - run.start) as usize;
            found[index].copy_from_slice(&bytes[at..at + LEN]);
        }
    }
    Ok(found)
}
