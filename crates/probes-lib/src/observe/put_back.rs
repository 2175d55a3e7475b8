//! Ends an observation: the sites get their own calls back, and the memory is unmapped once nobody is
//! in it any more.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::image::read_maps;
use crate::maps::Mapping;
use crate::memory::ReadMemory;
use crate::observe::arena::Arena;
use crate::observe::work::{Way, Work, refuse_replaced, unmap};
use crate::observe::{detour, place, rewrite};
use crate::process::Process;
use crate::session::Options;
use crate::sys::mem::ProcessMemory;
use crate::sys::threads::{Stopped, with_tracer};

/// How long threads are given to get out of the stubs.
const LEAVING: Duration = Duration::from_secs(2);

/// How long they are given at first.
const PAUSE: Duration = Duration::from_micros(100);

/// What somebody has left who was killed before there was a header.
pub(crate) struct Left {
    /// What unmaps what he has mapped.
    calls: Vec<detour::Call>,
}

impl Left {
    pub(crate) fn find(
        process: &Process,
        memory: &ProcessMemory,
        maps: &[Mapping],
        arenas: &[Arena],
    ) -> Option<Left> {
        let cave = place::cave(process, memory, maps).ok()?;
        let mut bytes = [0; detour::ROOM];
        memory.read(cave, &mut bytes).ok()?;
        if bytes == [0; detour::ROOM] {
            return None;
        }
        let is_left = |call: &detour::Call| {
            let has_header = arenas.iter().any(|arena| {
                let len = arena.code_len() + arena.data_len();
                (arena.code.0..arena.code.plus(len).0).contains(&call.range().start)
            });
            !has_header && maps.iter().any(|mapping| call.is_about(mapping))
        };
        let calls = detour::mapped_by(&bytes).into_iter().filter(is_left);
        Some(Left {
            calls: calls.collect(),
        })
    }
}

/// Gives the sites their own calls back, waits until nobody is in the stubs, and unmaps them; `read`
/// reads what was learnt, just before. Says how long the process stood still for it, all in all.
pub(crate) fn put_back<T: Send>(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    left: Option<Left>,
    options: Options,
    read: impl FnOnce() -> Result<T> + Send,
) -> Result<(T, Duration)> {
    let maps = read_maps(process)?;
    let cave = place::cave(process, memory, &maps)?;
    with_tracer(&[process], |tracer| {
        let work = Work {
            tracer,
            process,
            memory,
            cave,
            limit: options.deadline,
            way: Way::Sent,
        };
        let since = Instant::now();
        let mut stopped = tracer.stop(process, options.deadline)?;
        refuse_replaced(process.pid(), memory, arenas)?;
        let changes = work.changes_back(&stopped, arenas)?;
        rewrite::carry_out(process.pid(), &mut stopped.memory(memory)?, &changes)?;
        let begun = Instant::now();
        let stubs: Vec<Range<u64>> = arenas.iter().map(Arena::stubs).collect();
        let is_inside = |stopped: &Stopped<'_>| {
            let mut stubs = stubs.iter();
            stubs.any(|stubs| stopped.leads_into(memory, stubs))
        };
        let mut pause = PAUSE;
        while is_inside(&stopped) {
            if begun.elapsed() > LEAVING {
                stopped.release();
                // Whoever is inside comes out by himself, some day; nobody gets in any more.
                let stood = since.elapsed();
                return Ok((read()?, stood));
            }
            stopped = tracer.let_out(process, stopped, &stubs, pause, options.deadline)?;
            // Where there are many threads, it takes a while until it is somebody's turn.
            pause = (pause * 2).min(LEAVING / 8);
        }
        let data = read()?;
        let left: Vec<detour::Call> = left.into_iter().flat_map(|left| left.calls).collect();
        match work.unmap_all(stopped, &left, arenas.iter().map(unmap)) {
            Ok(unmapped) => {
                unmapped.release();
                Ok((data, since.elapsed()))
            }
            // The sites are as they were, and what was learnt is known: what is still mapped is nobody's
            // any more, and the next one takes it away.
            Err(error) if !arenas.is_empty() && is_passing(&error) => Ok((data, since.elapsed())),
            Err(error) => Err(error),
        }
    })
}

/// Whether it may be otherwise in a moment.
fn is_passing(error: &Error) -> bool {
    use ErrorKind::{Busy, KeepsChanging, NoTraveller, ThreadsKeepStarting};
    let kind = error.kind();
    matches!(
        kind,
        Busy { .. } | KeepsChanging { .. } | NoTraveller { .. } | ThreadsKeepStarting { .. }
    )
}
