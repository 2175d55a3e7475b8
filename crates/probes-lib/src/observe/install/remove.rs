//! Ends an observation: the sites get their own calls back, and the memory is unmapped once nobody is
//! in it any more.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::error::{Effect, Error, Result};
use crate::inject::code_cave;
use crate::inject::injector::{Injector, RedirectMode};
use crate::inject::remote_call::{self, RemoteCall};
use crate::memory::ReadMemory;
use crate::observe::install::context::{InstallContext, refuse_replaced, unmap};
use crate::observe::install::patch_sites;
use crate::observe::layout::arena::Arena;
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::with_tracer;
use crate::update::options::Options;

/// How long threads are given to get out of the trampolines.
const LEAVING: Duration = Duration::from_secs(2);

/// How long they are given at first.
const PAUSE: Duration = Duration::from_micros(100);

/// What somebody has left who was killed before there was a header.
pub(crate) struct OrphanedMappings {
    /// What unmaps what he has mapped.
    calls: Vec<RemoteCall>,
}

impl OrphanedMappings {
    pub(crate) fn find(
        process: &Process,
        memory: &ProcessMemory,
        maps: &[Mapping],
        arenas: &[Arena],
    ) -> Option<OrphanedMappings> {
        let code_cave = code_cave::find(process, memory, maps).ok()?;
        let mut bytes = [0; remote_call::MAX_LEN];
        memory.read(code_cave, &mut bytes).ok()?;
        if bytes == [0; remote_call::MAX_LEN] {
            return None;
        }
        let is_left = |call: &RemoteCall| {
            let start = call.range().start;
            let mut all = arenas.iter().map(Arena::range);
            let has_header = all.any(|range| range.contains(&start));
            !has_header && maps.iter().any(|mapping| call.is_about(mapping))
        };
        let calls = remote_call::orphaned_mappings(&bytes)
            .into_iter()
            .filter(is_left);
        Some(OrphanedMappings {
            calls: calls.collect(),
        })
    }
}

/// What has become of observations that were put back.
pub(crate) struct RemovedObservation<T> {
    pub(crate) results: T,
    /// How many sites have got their own calls back.
    pub(crate) sites: usize,
    /// How many bytes stay mapped, as somebody may still return there, or nobody may unmap them.
    pub(crate) still_mapped: u64,
    /// How long the process stop_time still for it, all in all.
    pub(crate) stopped: Duration,
}

/// Gives the sites their own calls back, waits until nobody is in the trampolines, and unmaps them; `read`
/// reads what was results, just before. If it fails, nothing has been results, and it can be tried again.
///
/// # Errors
///
/// If the process cannot be stopped or written to, has ended or executed another program. Once the sites
/// are as they were, only the end of the process is an error: what cannot be unmapped stays mapped.
pub(crate) fn remove<T: Send>(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    left: Option<OrphanedMappings>,
    options: Options,
    read: impl FnOnce() -> Result<T> + Send,
) -> Result<RemovedObservation<T>> {
    let maps = read_maps(process)?;
    let code_cave = code_cave::find(process, memory, &maps)?;
    with_tracer(&[process], |tracer| {
        let work = InstallContext::of(Injector {
            tracer,
            process,
            memory,
            code_cave,
            limit: options.deadline,
            mode: RedirectMode::AmongOthers,
        });
        let since = Instant::now();
        let stopped = tracer.stop(process, options.deadline)?;
        refuse_replaced(process.pid(), memory, arenas)?;
        let changes = work.changes_back(&stopped, arenas)?;
        patch_sites::carry_out(process.pid(), &mut stopped.memory(memory)?, &changes)?;
        let told = work.mark_restored(&stopped, arenas);
        let emptied = match told.and_then(|()| wait_until_left(&work, stopped, arenas)) {
            Err(error) if is_over(&error) => return Err(error),
            Err(_) => None,
            Ok(emptied) => emptied,
        };
        let results = read().map_err(|error| error.leaving(Effect::StillMapped))?;
        let left: Vec<RemoteCall> = left.into_iter().flat_map(|left| left.calls).collect();
        let all = |stopped| {
            work.injector
                .unmap_all(stopped, &left, arenas.iter().map(unmap))
        };
        let still_mapped = match emptied.map(all) {
            Some(Ok(unmapped)) => {
                unmapped.release();
                0
            }
            // The sites are as they were, and what was results is known: what is still mapped is nobody's
            // any more, and the next one takes it away.
            Some(Err(_)) | None => bytes_mapped(process, memory, arenas),
        };
        Ok(RemovedObservation {
            results,
            sites: changes.len(),
            still_mapped,
            stopped: since.elapsed(),
        })
    })
}

/// Lets threads run until none is in a trampoline any more, or may return there; `None` if that takes too long.
/// Whoever is inside comes out by himself, some day; nobody gets in any more.
fn wait_until_left<'s>(
    work: &InstallContext<'s>,
    mut stopped: Stopped<'s>,
    arenas: &[Arena],
) -> Result<Option<Stopped<'s>>> {
    let begun = Instant::now();
    let trampolines: Vec<Range<u64>> = arenas.iter().map(Arena::trampolines).collect();
    let is_inside = |stopped: &Stopped<'_>| {
        let mut trampolines = trampolines.iter();
        trampolines.any(|trampolines| stopped.leads_into(work.memory, trampolines))
    };
    let mut pause = PAUSE;
    while is_inside(&stopped) {
        if begun.elapsed() > LEAVING {
            return Ok(None);
        }
        let Injector { tracer, limit, .. } = work.injector;
        stopped = tracer.run_until_out(work.process, stopped, &trampolines, pause, limit)?;
        // Where there are many threads, it takes a while until it is somebody's lock.
        pause = (pause * 2).min(LEAVING / 8);
    }
    Ok(Some(stopped))
}

/// How much of what was mapped still is.
fn bytes_mapped(process: &Process, memory: &ProcessMemory, arenas: &[Arena]) -> u64 {
    let is_there = |arena: &&Arena| {
        let is_there = arena.is_there(|at, bytes| memory.read(at, bytes));
        is_there.unwrap_or(false)
    };
    let of_arenas = arenas.iter().filter(is_there).map(Arena::range);
    let maps = read_maps(process).unwrap_or_default();
    let left = OrphanedMappings::find(process, memory, &maps, arenas);
    let of_left = left.into_iter().flat_map(|left| left.calls);
    let ranges = of_arenas.chain(of_left.map(|call| call.range()));
    ranges.map(|range| range.end - range.start).sum()
}

/// Whether the process has nothing any more that could be put back.
fn is_over(error: &Error) -> bool {
    error.is_gone() || error.is_executed()
}
