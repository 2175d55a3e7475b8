//! Removes observations: restores the points, and unmaps the arenas once no thread is in a trampoline.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::error::{
    Effect, Error, ErrorKind, MemoryPart, ObserveError, ProcessError, Result, Subject,
};
use crate::inject::code_cave::{self, CodeCave};
use crate::inject::injected_call::{self, InjectedCall};
use crate::inject::injector::{Injector, RedirectMode};
use crate::memory::ReadMemory;
use crate::memory::page_copies::PageCopies;
use crate::observe::install::installed::{
    self, FoundPlace, find_points, has_observer, refuse_missing, refuse_replaced,
};
use crate::observe::install::patch::{self, Patch};
use crate::observe::install::{
    exited_of_read, semaphores, unmap_call, unmapped_together, write_code, write_shared,
};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::observer_record::ObserverRecord;
use crate::observe::point::{PatchPlace, Point, PointKind};
use crate::patch_plan::jump::{SHORT_JMP, SHORT_LEN};
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::site::JMP;
use crate::trace::moves::Moves;
use crate::trace::stopped::{Stopped, ThreadInside};
use crate::trace::time_budget::TimeBudget;
use crate::trace::tracer::with_tracer;
use crate::update::options::Options;

/// How much time threads get to leave the trampolines.
const LEAVING: Duration = Duration::from_secs(2);

/// Reading this many bytes of recorded data takes less time than stopping a process again.
const READ_WHILE_STOPPED: u64 = 256 << 10;

/// What was removed of observations.
///
/// ```no_run
/// use probes_lib::{Options, Target};
///
/// let removed = Target::open(4242)?.clean(Options::default())?;
/// println!("restored {} sites and functions", removed.sites);
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CleanReport {
    /// How many sites and functions were restored.
    pub sites: usize,
    /// How many bytes stay mapped in the process, which does no harm. The cause is that a thread
    /// may still return to a trampoline from a signal handler (its stack holds such an address),
    /// or that the process has set a seccomp filter since they were mapped.
    /// [`Target::clean`](crate::Target::clean) unmaps them when that is over.
    pub still_mapped: u64,
}

impl CleanReport {
    /// Adds a later report: the sites add up, and only the later `still_mapped` counts.
    pub(crate) fn add(&mut self, later: CleanReport) {
        self.sites += later.sites;
        self.still_mapped = later.still_mapped;
    }

    /// Returns the effect of an observation that could not be installed and was removed; its failure
    /// had the effect `before`.
    pub(crate) fn effect(&self, before: Effect) -> Effect {
        let is_written = matches!(before, Effect::Restored | Effect::HalfChanged);
        match self.still_mapped {
            0 if self.sites == 0 && !is_written => Effect::NothingChanged,
            0 => Effect::Restored,
            _ => Effect::StillMapped,
        }
    }
}

/// Memory of arenas whose tool was killed before it wrote their headers.
struct OrphanedMappings {
    /// The calls that unmap it, by the place of the injected code that records it.
    calls: Vec<(CodeCave, Vec<InjectedCall>)>,
}

impl OrphanedMappings {
    /// Returns the orphaned mappings; none if a killed tool has left only code in the code cave. `None` if there are
    /// no such mappings and the code cave is empty, or if there is no code cave.
    fn find(
        process: &Process,
        memory: &ProcessMemory,
        maps: &[Mapping],
        arenas: &[Arena],
    ) -> Option<OrphanedMappings> {
        let code_cave = code_cave::find(process, memory, maps).ok()?;
        let is_orphaned = |call: &InjectedCall| {
            let start = call.range().start;
            let mut all = arenas.iter().map(Arena::range);
            let has_header = all.any(|range| range.contains(&start));
            !has_header && maps.iter().any(|mapping| call.matches(mapping))
        };
        let mut is_cave_empty = true;
        let mut calls = Vec::new();
        let rooms = arenas.iter().map(Arena::call_room);
        for place in std::iter::once(code_cave).chain(rooms) {
            let mut bytes = vec![0; place.len as usize];
            if memory.read(place.at, &mut bytes).is_err() {
                continue;
            }
            is_cave_empty &= place != code_cave || bytes.iter().all(|&byte| byte == 0);
            let found = injected_call::orphaned_mappings(&bytes).into_iter();
            let found: Vec<InjectedCall> = found.filter(is_orphaned).collect();
            if !found.is_empty() {
                calls.push((place, found));
            }
        }
        (!is_cave_empty || !calls.is_empty()).then_some(OrphanedMappings { calls })
    }

    /// Returns the calls that unmap what is orphaned now.
    fn unmap_calls(
        process: &Process,
        memory: &ProcessMemory,
    ) -> Result<Vec<(CodeCave, Vec<InjectedCall>)>> {
        let maps = read_maps(process)?;
        let arenas = installed::find(memory, &maps);
        let found = OrphanedMappings::find(process, memory, &maps, &arenas);
        Ok(found.map_or_else(Vec::new, |orphaned| orphaned.calls))
    }
}

/// Which tool removes an observation.
#[derive(Clone, Copy)]
enum Remover<'r> {
    /// Its own observer.
    Observer,
    /// Another tool. It leaves the record of its `successor` to an observer that is still alive.
    Other {
        successor: Option<&'r ObserverRecord>,
        name_of: NameOf<'r>,
    },
}

/// Returns the name of the function at an address, where known.
pub(crate) type NameOf<'n> = &'n (dyn Fn(LiveAddr) -> Option<String> + Sync);

/// What was removed of the observations of other tools.
pub(crate) struct Cleaned {
    pub(crate) report: CleanReport,
    /// Why memory stays mapped, if any does.
    pub(crate) why_mapped: Option<Error>,
}

/// Removes the observations that were left by killed tools; if there is a `successor`, also those
/// of live observers. The caller holds the update lock. Errors name functions by `name_of`.
///
/// # Errors
///
/// Same as [`remove`], and if injected calls of a killed tool are still there, so that no others can be injected.
pub(crate) fn remove_stale(
    process: &Process,
    memory: &ProcessMemory,
    options: Options,
    successor: Option<&ObserverRecord>,
    name_of: NameOf<'_>,
) -> Result<Cleaned> {
    let budget = TimeBudget::new(options.time_limit);
    remove_stale_within(process, memory, options, successor, name_of, budget)
}

/// Same as [`remove_stale`]; attempts are made until the `budget` is spent.
fn remove_stale_within(
    process: &Process,
    memory: &ProcessMemory,
    options: Options,
    successor: Option<&ObserverRecord>,
    name_of: NameOf<'_>,
    mut budget: TimeBudget,
) -> Result<Cleaned> {
    let mut is_spent = false;
    let mut report = CleanReport::default();
    loop {
        let maps = read_maps(process)?;
        let mut arenas = installed::find(memory, &maps);
        let is_nothing_orphaned = OrphanedMappings::find(process, memory, &maps, &arenas).is_none();
        arenas.retain(|arena| successor.is_some() || !has_observer(process, arena));
        if arenas.is_empty() && is_nothing_orphaned {
            let report = CleanReport {
                still_mapped: 0,
                ..report
            };
            let why_mapped = None;
            return Ok(Cleaned { report, why_mapped });
        }
        if is_spent && !is_nothing_orphaned {
            let error = Error::of_process(process.pid(), ProcessError::KeepsChanging);
            return Err(error.with_effect(Effect::StillMapped));
        }
        let remover = Remover::Other { successor, name_of };
        let removed = remove_all(process, memory, &arenas, options, remover, || Ok(()));
        is_spent = budget.is_spent();
        let is_unmapped = removed
            .as_ref()
            .is_err_and(|error| is_unmapped_meanwhile(process, memory, &arenas, error));
        if is_unmapped && !is_spent {
            continue;
        }
        let removed = removed.map_err(|error| {
            if report.sites == 0 {
                error
            } else {
                error.with_effect_if_none(Effect::Restored)
            }
        })?;
        report.add(CleanReport {
            sites: removed.sites,
            still_mapped: removed.still_mapped,
        });
        match removed.why_mapped {
            Some(why) if !is_spent && may_succeed_later(&why) => {}
            why_mapped if is_nothing_orphaned => return Ok(Cleaned { report, why_mapped }),
            // A thread may still execute a call that maps memory, and only the code in the cave says what.
            Some(why) => return Err(why.with_effect(Effect::StillMapped)),
            // What was orphaned should be gone now.
            None => {}
        }
    }
}

/// Returns whether a removal has failed because an arena is gone that was just there: a thread has made a system call
/// that the killed tool had injected.
fn is_unmapped_meanwhile(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    error: &Error,
) -> bool {
    error.keeps_changing()
        && refuse_missing(process, memory, arenas).is_err_and(|missing| missing.keeps_changing())
}

/// Returns whether what has failed may succeed a moment later.
fn may_succeed_later(error: &Error) -> bool {
    use ObserveError::{NoThreadToRedirect, NotRunning};
    let kind = error.kind();
    error.is_transient() || matches!(kind, ErrorKind::Observe(NoThreadToRedirect | NotRunning))
}

/// What was removed, and what was read just before.
pub(crate) struct Removed<T> {
    pub(crate) results: T,
    /// How many sites and functions were restored.
    sites: usize,
    /// The points whose patch was gone.
    pub(crate) discarded: Vec<LiveAddr>,
    /// How many bytes stay mapped.
    pub(crate) still_mapped: u64,
    /// Why, if it is known.
    why_mapped: Option<Error>,
}

impl<T> Removed<T> {
    /// Returns results with nothing to remove: the process has exited.
    pub(crate) fn nothing(results: T) -> Removed<T> {
        Removed {
            results,
            sites: 0,
            discarded: Vec::new(),
            still_mapped: 0,
            why_mapped: None,
        }
    }
}

/// Restores the points of `arenas`, waits until no thread is in a trampoline, and unmaps the arenas;
/// `read` reads the results just before they are unmapped. If the removal fails, `read` has not
/// been called or has failed, and the removal can be tried again. The caller holds the update lock.
///
/// # Errors
///
/// If the process cannot be stopped or written to, has exited or executed a new program. Once the
/// points are restored, it is an error only if the process has exited or executed a new program,
/// or if `read` fails: memory that cannot be unmapped stays mapped.
pub(crate) fn remove<T: Send>(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    options: Options,
    read: impl FnOnce() -> Result<T> + Send,
) -> Result<Removed<T>> {
    let remover = Remover::Observer;
    remove_all(process, memory, arenas, options, remover, read)
}

/// Same as [`remove`]; another tool also unmaps what is orphaned.
fn remove_all<T: Send>(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    options: Options,
    remover: Remover<'_>,
    read: impl FnOnce() -> Result<T> + Send,
) -> Result<Removed<T>> {
    let maps = read_maps(process)?;
    if let Remover::Observer = remover {
        // Before a process is stopped that another tool observes.
        refuse_replaced(process, memory, arenas)?;
    }
    let code_cave = code_cave::find(process, memory, &maps)?;
    // Planned while the process runs, and used once it is stopped if the code is still the same.
    let mut copies = PageCopies::of(arenas.iter().flat_map(Arena::patch_state));
    let mut planned = match copies.update(memory) {
        Ok(_) => restoring_patches(process, &copies.over(memory), arenas).ok(),
        Err(_) => None,
    };
    let (copies, planned) = (&mut copies, &mut planned);
    with_tracer(&[process], |tracer| {
        tracer.holds_update_lock.set(true);
        let injector = Injector {
            tracer,
            process,
            memory,
            code_cave,
            limit: options.time_limit,
            despite_seccomp: options.despite_seccomp,
            mode: RedirectMode::RunningProcess,
        };
        let stopped = tracer.stop(process, options.time_limit)?;
        let removal = Removal {
            process,
            memory,
            arenas,
            remover,
        };
        let restored = removal.restore(&stopped, copies, planned.take())?;
        let marked = mark_restored(&injector, &stopped, arenas);
        // Threads already in a trampoline leave on their own; no new ones can enter.
        let code = removal.code(&code_cave);
        let left = marked.and_then(|()| injector.wait_until_left(stopped, &code, LEAVING));
        let (emptied, mut failure, inside) = match left {
            Err(error) if error.is_program_gone() => return Err(error),
            Err(error) => (None, Some(error), None),
            Ok(Err(inside)) => (None, None, Some(inside)),
            Ok(Ok(emptied)) => (Some(emptied), None, None),
        };
        let emptied = emptied.map(|stopped| removal.released_if_much_is_read(stopped));
        let results = read().map_err(|error| error.with_effect_if_none(Effect::StillMapped))?;
        let unmap = |stopped| removal.unmap_and_release(&injector, stopped);
        let still_mapped = match emptied.map(unmap) {
            Some(Ok(())) => 0,
            // The points are restored and the results are read: the next tool unmaps what is still
            // mapped.
            failed => {
                failure = failed.and_then(Result::err).or(failure);
                bytes_mapped(process, memory, arenas)
            }
        };
        let inside = inside.map(|inside| still_inside(process, arenas, remover, inside));
        Ok(Removed {
            results,
            sites: restored.sites,
            discarded: restored.discarded,
            still_mapped,
            why_mapped: failure.or(inside),
        })
    })
}

/// A removal from a process.
struct Removal<'r> {
    process: &'r Process,
    memory: &'r ProcessMemory,
    arenas: &'r [Arena],
    remover: Remover<'r>,
}

impl Removal<'_> {
    /// The code that has to be left by all threads before anything is unmapped.
    fn code(&self, code_cave: &CodeCave) -> Vec<Range<u64>> {
        let mut code: Vec<Range<u64>> = self.arenas.iter().map(Arena::trampolines).collect();
        if let Remover::Other { .. } = self.remover {
            // A thread that the killed tool has redirected may still map memory while it is in there.
            code.push(code_cave.range());
        }
        code
    }

    /// Lets the process run if much is to be read: nothing is recorded any more, so it need not be stopped meanwhile.
    fn released_if_much_is_read<'s>(&self, stopped: Stopped<'s>) -> Option<Stopped<'s>> {
        let len: u64 = self.arenas.iter().map(Arena::data_len).sum();
        if len > READ_WHILE_STOPPED {
            stopped.release();
            return None;
        }
        Some(stopped)
    }

    /// Unmaps the arenas, and lets the process run. It is stopped first, if it is not.
    fn unmap_and_release<'s>(
        &self,
        injector: &Injector<'s>,
        stopped: Option<Stopped<'s>>,
    ) -> Result<()> {
        let stopped = match stopped {
            Some(stopped) => stopped,
            None => {
                let stopped = injector.tracer.stop(self.process, injector.limit)?;
                refuse_missing(self.process, self.memory, self.arenas)?;
                stopped
            }
        };
        self.unmap(injector, stopped)?.release();
        Ok(())
    }

    /// Restores the points of a stopped process, as `planned` if its code is still that in `copies`.
    fn restore(
        &self,
        stopped: &Stopped<'_>,
        copies: &mut PageCopies,
        planned: Option<RestorePlan>,
    ) -> Result<RestorePlan> {
        let (process, memory, arenas) = (self.process, self.memory, self.arenas);
        let successor = match self.remover {
            Remover::Observer => {
                refuse_replaced(process, memory, arenas)?;
                None
            }
            Remover::Other { successor, .. } => {
                refuse_missing(process, memory, arenas)?;
                successor
            }
        };
        let restored = self.write_restored(stopped, copies, planned, successor);
        restored.inspect_err(|error| {
            if error.effect() != Effect::HalfChanged && successor.is_some() {
                // The observer continues, unless this write fails, too: then it ends.
                let _ = write_successor(process, memory, arenas, Some(&ObserverRecord::default()));
            }
        })
    }

    /// Writes the original bytes of the points, and lowers semaphores; before the first write, the record of the `successor`.
    fn write_restored(
        &self,
        stopped: &Stopped<'_>,
        copies: &mut PageCopies,
        planned: Option<RestorePlan>,
        successor: Option<&ObserverRecord>,
    ) -> Result<RestorePlan> {
        let (process, memory, arenas) = (self.process, self.memory, self.arenas);
        let pid = process.pid();
        let is_changed = copies.update(memory);
        let is_changed = is_changed.map_err(exited_of_read(pid))?;
        let before = copies.over(memory);
        let restored = match planned.filter(|_| !is_changed) {
            Some(planned) => planned,
            None => restoring_patches(process, &before, arenas)?,
        };
        stopped.move_threads(memory, &restored.moves)?;
        let mut stopped_memory = stopped.memory(memory)?;
        // The last step before the points are restored, because we may be killed at any moment: a live observer is to know
        // its successor before it misses a hit, and to continue if none is missed.
        write_successor(process, memory, arenas, successor)?;
        let lowered = semaphores::lower(process, &mut stopped_memory, arenas);
        let written = lowered
            .and_then(|()| patch::write_all(pid, &mut stopped_memory, &before, &restored.patches));
        written.inspect_err(|_| {
            // Its observer may continue.
            let _ = semaphores::raise(process, &mut stopped_memory, arenas);
        })?;
        Ok(restored)
    }

    /// Unmaps the arenas, in which no thread is any more; another tool also unmaps what is orphaned.
    fn unmap<'s>(&self, injector: &Injector<'s>, mut stopped: Stopped<'s>) -> Result<Stopped<'s>> {
        if let Remover::Other { .. } = self.remover {
            for (place, calls) in OrphanedMappings::unmap_calls(self.process, self.memory)? {
                // All at once, because only the code in this place records what is still to be unmapped: if we
                // are killed, it has to list all of it.
                stopped = injector.at(place).run(stopped, &calls)?;
            }
        }
        unmap_arenas(injector, stopped, self.arenas)
    }
}

/// Returns the error for a thread that has not left a trampoline, or the code of injected calls.
fn still_inside(
    process: &Process,
    arenas: &[Arena],
    remover: Remover<'_>,
    inside: ThreadInside,
) -> Error {
    let ThreadInside {
        tid,
        at,
        is_executing,
    } = inside;
    let point = arenas.iter().find_map(|arena| {
        let offset = at.0.checked_sub(arena.trampoline(0).0)?;
        arena.points.get((offset / arena.trampoline_len) as usize)
    });
    let name = match (point, remover) {
        (Some(point), Remover::Other { name_of, .. }) => name_of(point.address),
        _ => None,
    };
    let is_routine = || {
        arenas
            .iter()
            .any(|arena| arena.trampolines().contains(&at.0))
    };
    let code = match (point, name) {
        (Some(point), Some(name)) => format!("the trampoline of {name} at {}", point.address),
        (Some(point), None) => format!("the trampoline of {}", point.address),
        (None, _) if is_routine() => "the code that trampolines share".to_owned(),
        (None, _) => "a system call that a killed tool has injected".to_owned(),
    };
    let pid = process.pid();
    let status = process.thread_status(tid).unwrap_or_default();
    let kind = ObserveError::StillInside {
        name: status.name,
        is_executing,
        code,
    };
    Error::new(Subject::Thread { pid, tid }, kind)
}

/// Writes the record of the successor, if there is one, into the data of each arena that has a live observer.
fn write_successor(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    successor: Option<&ObserverRecord>,
) -> Result<()> {
    let Some(successor) = successor else {
        return Ok(());
    };
    let bytes = successor.to_bytes();
    for arena in arenas.iter().filter(|arena| has_observer(process, arena)) {
        let write = (arena.shared.len(), bytes.to_vec());
        write_shared(process.pid(), memory, arena, &[write])?;
    }
    Ok(())
}

/// The patches that restore points, and the points whose own patch was gone, wholly or in part.
#[derive(Default)]
struct RestorePlan {
    patches: Vec<Patch>,
    /// How many sites and functions they restore.
    sites: usize,
    discarded: Vec<LiveAddr>,
    /// From the islands, and the jumps in the middle of an instruction, that are restored to the
    /// trampolines they led to.
    moves: Moves,
}

/// Returns the patches that restore the points; a point that holds neither its patch nor a part of it is
/// left alone.
fn restoring_patches(
    process: &Process,
    memory: &impl ReadMemory,
    arenas: &[Arena],
) -> Result<RestorePlan> {
    let mut restored = RestorePlan::default();
    let mut moves = RestoredJumps::default();
    for arena in arenas {
        let found = find_points(process, memory, arena)?;
        let tails = read_tails(process.pid(), memory, arena)?;
        let (sites, functions) = found.sites_and_functions(arena);
        restored.sites += sites + functions;
        restored.discarded.extend(found.discarded);
        for found in &found.patched {
            let point = &arena.points[found.point];
            let patch = Patch {
                at: found.place.at,
                before: found.found,
                after: point.unpatched(&found.place, tails[found.point] == JMP),
                may_be_written_in_steps: point.may_be_written_in_steps(),
                is_beside_breakpoint: false,
            };
            if found.is_under_breakpoint {
                restored.patches.extend(patch.around_breakpoints());
            } else {
                restored.patches.push(patch);
            }
        }
        moves.add(arena, &found.patched);
    }
    restored.patches.sort_unstable_by_key(|patch| patch.at);
    restored.moves = moves.moves();
    Ok(restored)
}

/// The near jumps of functions that are restored, and where they led.
#[derive(Default)]
struct RestoredJumps {
    of_islands: Vec<(LiveAddr, LiveAddr)>,
    of_points: Vec<(LiveAddr, LiveAddr)>,
    /// Where the short jumps end.
    short_ends: BTreeSet<LiveAddr>,
}

impl RestoredJumps {
    /// Adds those of the points of an arena that are `patched`.
    fn add(&mut self, arena: &Arena, patched: &[FoundPlace]) {
        let is_short = |place: &PatchPlace| place.after.first() == Some(&SHORT_JMP);
        let of_functions = patched
            .iter()
            .filter(|it| !arena.points[it.point].is_site());
        for found in of_functions.filter(|it| !is_short(&it.place)) {
            let led = (found.place.at, arena.trampoline(found.point));
            let is_island = found.place.at != arena.points[found.point].address;
            if is_island {
                self.of_islands.push(led);
            } else {
                self.of_points.push(led);
            }
        }
        let shorts = arena.places().filter(|(_, place)| is_short(place));
        let ends = shorts.map(|(_, place)| place.at.plus(SHORT_LEN));
        self.short_ends.extend(ends);
    }

    /// Returns where threads continue that are stopped at one of these jumps.
    fn moves(self) -> Moves {
        // The last byte of a short jump may be executed as an instruction by itself, followed by a near jump that is
        // not at an instruction of the original code (functions/leaning.rs). A thread may have executed it before
        // another tool changed it, and be stopped at the near jump.
        let of_points = self.of_points.into_iter();
        let in_the_middle = of_points.filter(|(at, _)| self.short_ends.contains(at));
        Moves::of(self.of_islands.into_iter().chain(in_the_middle).collect())
    }
}

/// Returns the first byte of the tail of each trampoline of a site; 0 of the others, whose tails decide nothing.
fn read_tails(pid: i32, memory: &impl ReadMemory, arena: &Arena) -> Result<Vec<u8>> {
    let points = arena.points.iter().enumerate();
    let tail = |(index, point): (usize, &Point)| {
        let mut tail = [0];
        if let PointKind::Site { .. } = point.kind {
            let at = arena.tail(index);
            let read = memory.read(at, &mut tail);
            read.map_err(|source| Error::of_read(pid, MemoryPart::Trampoline, at, source))?;
        }
        Ok(tail[0])
    };
    points.map(tail).collect()
}

/// Sets the flag of each arena that says that all its points are restored.
fn mark_restored(injector: &Injector<'_>, stopped: &Stopped<'_>, arenas: &[Arena]) -> Result<()> {
    let mut arenas = arenas.iter();
    arenas.try_for_each(|arena| write_code(injector, stopped, arena.restored_flag(), &[1]))
}

/// Unmaps arenas, in whose trampolines no thread is any more, and clears the code cave.
fn unmap_arenas<'s>(
    injector: &Injector<'s>,
    mut stopped: Stopped<'s>,
    arenas: &[Arena],
) -> Result<Stopped<'s>> {
    if let Some((last, others)) = arenas.split_first() {
        // The room of its trampolines holds more calls than the code cave.
        let room = last.call_room();
        for calls in unmapped_together(room, others) {
            stopped = injector.at(room).run(stopped, &calls)?;
        }
        stopped = injector.run(stopped, &[unmap_call(last)])?;
    }
    injector.clear(&stopped)?;
    Ok(stopped)
}

/// Returns how many bytes of arenas and orphaned mappings are still mapped.
fn bytes_mapped(process: &Process, memory: &ProcessMemory, arenas: &[Arena]) -> u64 {
    let is_there = |arena: &&Arena| {
        let is_there = arena.is_there(|at, bytes| memory.read(at, bytes));
        is_there.unwrap_or(false)
    };
    let of_arenas = arenas.iter().filter(is_there).map(Arena::range);
    let maps = read_maps(process).unwrap_or_default();
    let orphaned = OrphanedMappings::find(process, memory, &maps, arenas);
    let orphaned = orphaned.into_iter().flat_map(|orphaned| orphaned.calls);
    let orphaned = orphaned.flat_map(|(_, calls)| calls);
    let ranges = of_arenas.chain(orphaned.map(|call| call.range()));
    ranges.map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests;
