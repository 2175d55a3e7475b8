//! [`Prepared`]: an observation that is ready to be installed: all that can be done while the process
//! runs is done.
//!
//! ```text
//! running   plan ─▶ place arenas ─▶ assemble trampolines ─▶ find a code cave
//! stopped   map each arena ─▶ write its code ─▶ write the shared data ─▶ patch all points
//! ```

use std::time::{Duration, Instant};

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ObserveError, ProcessError, Result};
use crate::inject::code_cave;
use crate::inject::injector::{Injector, RedirectMode};
use crate::inject::remote_call::RemoteCall;
use crate::memory::WriteMemory;
use crate::observe::install::patch::{self, Patch};
use crate::observe::install::write_code;
use crate::observe::installed::read_each;
use crate::observe::layout::arena::{Arena, HEADER_LEN};
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::shared;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::ActiveObservation;
use crate::observe::read::data_source::SharedData;
use crate::observe::read::events::{EventReader, PAGES_VALID_FOR, ThreadIds, pages_valid_until};
use crate::observe::{placement, trampoline};
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::site::{JMP, SiteCode};
use crate::sys::ticks::{self, Ticks};
use crate::trace::stopped::Stopped;
use crate::trace::tracer::with_tracer;

/// An observation that is ready to be installed.
pub(crate) struct Prepared {
    plan: ObservationPlan,
    arenas: Vec<Arena>,
    /// Of each arena.
    codes: Vec<Vec<u8>>,
    /// The pages that trampolines may read, and until when, in ticks.
    pages: ReadablePages,
    pages_valid_until: u64,
    is_in_our_namespace: bool,
    /// Known once it is installed.
    thread_ids: ThreadIds,
    ticks: Ticks,
    /// Where the code of injected calls is written.
    pub(crate) code_cave: LiveAddr,
}

/// Installs an observation in a running process, which is stopped meanwhile; returns how long. The
/// caller holds the update lock.
///
/// # Errors
///
/// Same as [`Target::observe`](crate::Target::observe). Parts of the observation may be left then: they
/// can be removed as those of a tool that was killed.
pub(crate) fn install(
    process: &Process,
    memory: &ProcessMemory,
    plan: ObservationPlan,
    deadline: Duration,
) -> Result<(ActiveObservation, Duration)> {
    let mut prepared = Prepared::of(process, memory, plan)?;
    let stop_time = with_tracer(&[process], |tracer| {
        let begun = Instant::now();
        let injector = Injector {
            tracer,
            process,
            memory,
            code_cave: prepared.code_cave,
            limit: deadline,
            mode: RedirectMode::AmongOthers,
        };
        let stopped = tracer.stop(process, deadline)?;
        prepared.install(&injector, stopped, None)?.release();
        Ok(begun.elapsed())
    })?;
    Ok((prepared.into_active(None), stop_time))
}

impl Prepared {
    /// Prepares what a plan says.
    ///
    /// # Errors
    ///
    /// Same as [`Target::observe`](crate::Target::observe).
    pub(crate) fn of(
        process: &Process,
        memory: &ProcessMemory,
        plan: ObservationPlan,
    ) -> Result<Prepared> {
        let pid = process.pid();
        let ticks = Ticks::begin();
        if plan.is_timed() && !ticks::is_tsc_invariant() {
            return Err(ObserveError::NoInvariantTsc.into());
        }
        let maps = read_maps(process)?;
        let no_room = |_| Error::of_process(pid, ObserveError::NoRoom);
        let roles = || plan.points.iter().map(|planned| &planned.role);
        let trampoline_len = trampoline::longest(roles(), plan.shared).map_err(no_room)?;
        let arenas = placement::place(pid, &plan, trampoline_len, &maps)?;
        let code_cave = code_cave::find(process, memory, &maps)?;
        let no_sites = || Error::of_process(pid, ObserveError::NoSites);
        let sharing = arenas.first().ok_or_else(no_sites)?;
        let mut roles = roles();
        let codes = arenas.iter().map(|arena| {
            let roles = roles.by_ref().take(arena.points.len());
            trampoline::arena_code(arena, roles, sharing)
        });
        let codes = codes.collect::<std::result::Result<Vec<_>, _>>();
        let codes = codes.map_err(no_room)?;
        let (pages, pages_valid_until) = if plan.shared.record_len == 0 {
            (ReadablePages::default(), 0)
        } else {
            (ReadablePages::of(&maps), ticks.ahead(PAGES_VALID_FOR))
        };
        Ok(Prepared {
            plan,
            arenas,
            codes,
            pages,
            pages_valid_until,
            is_in_our_namespace: process.status().is_ok_and(|status| status.levels <= 1),
            thread_ids: ThreadIds::Unknown,
            ticks,
            code_cave,
        })
    }

    pub(crate) fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    /// Installs the observation in a stopped process. If there is a file for its `data`, they are mapped
    /// from there.
    ///
    /// # Errors
    ///
    /// If the process cannot map memory, or a point does not hold what its file says;
    /// [`ProcessError::KeepsChanging`] if something else has been mapped where an arena is to be.
    pub(crate) fn install<'s>(
        &mut self,
        injector: &Injector<'s>,
        mut stopped: Stopped<'s>,
        data: Option<&SharedData>,
    ) -> Result<Stopped<'s>> {
        for (arena, code) in self.arenas.iter().zip(&self.codes) {
            refuse_occupied(injector.process, arena)?;
            stopped = injector.run(stopped, &map_calls(arena, data))?;
            // The header comes last: until then, the code in the cave says what was mapped.
            let (header, rest) = code.split_at(HEADER_LEN.min(code.len()));
            write_code(
                injector,
                &stopped,
                arena.code.plus(header.len() as u64),
                rest,
            )?;
            write_code(injector, &stopped, arena.code, header)?;
        }
        if let Some(data) = data {
            stopped = injector.run(stopped, &[data.close()])?;
        }
        injector.clear(&stopped)?;
        self.write_shared_data(injector, &stopped)?;
        self.patch_points(injector, &stopped)?;
        Ok(stopped)
    }

    /// Writes what the trampolines read in the shared data.
    fn write_shared_data(&mut self, injector: &Injector<'_>, stopped: &Stopped<'_>) -> Result<()> {
        let (process, memory) = (injector.process, injector.memory);
        let mut tid_offset = None;
        if self.plan.is_timed() {
            tid_offset = stopped.tid_offset(process, memory);
        }
        self.thread_ids = match tid_offset {
            None => ThreadIds::Unknown,
            Some(_) if self.is_in_our_namespace => ThreadIds::OfOurNamespace,
            Some(_) => ThreadIds::OfAnotherNamespace,
        };
        let Some(sharing) = self.arenas.first() else {
            return Ok(());
        };
        let tid_offset = tid_offset.map(|offset| (shared::TID_AT, offset.to_le_bytes().to_vec()));
        let pages = self.pages.writes().into_iter();
        let pages = pages.map(|write| (sharing.shared.pages() + write.at, write.bytes));
        let has_shared = !sharing.shared.is_empty();
        let until = has_shared.then(|| pages_valid_until(self.pages_valid_until));
        let writes: Vec<_> = tid_offset.into_iter().chain(pages).chain(until).collect();
        write_shared(process.pid(), memory, sharing, &writes)
    }

    /// Patches the points; before, it sets the tails of those whose probes are enabled.
    fn patch_points(&mut self, injector: &Injector<'_>, stopped: &Stopped<'_>) -> Result<()> {
        let pid = injector.process.pid();
        let mut patches = Vec::new();
        let mut planned = self.plan.points.iter();
        for (arena, code) in self.arenas.iter().zip(&mut self.codes) {
            let addresses: Vec<LiveAddr> = arena.points.iter().map(|it| it.address).collect();
            let found = read_each(pid, injector.memory, &addresses)?;
            let found: Vec<SiteCode> = found.into_iter().map(SiteCode).collect();
            for (found, planned) in found.iter().zip(planned.by_ref()) {
                if !planned.point.is_unpatched(*found) {
                    return Err(self.plan.unexpected(planned, *found).into());
                }
            }
            let mut is_any_enabled = false;
            for (index, found) in found.iter().enumerate() {
                if found.enabled() == Some(true) {
                    code[(arena.tail(index).0 - arena.code.0) as usize] = JMP;
                    is_any_enabled = true;
                }
                patches.push(Patch {
                    at: arena.points[index].patch_at(),
                    before: found.tail(),
                    after: arena.patch(index),
                });
            }
            if is_any_enabled {
                write_code(injector, stopped, arena.code, code)?;
            }
        }
        patch::write_all(pid, &mut stopped.memory(injector.memory)?, &patches)
    }

    /// Returns the observation once it is installed.
    pub(crate) fn into_active(self, data: Option<SharedData>) -> ActiveObservation {
        let shared_at = self.arenas.first().map_or(LiveAddr(0), Arena::shared_at);
        ActiveObservation {
            events: EventReader::begin(&self.plan, shared_at, self.thread_ids, self.pages),
            plan: self.plan,
            arenas: self.arenas,
            data,
            ticks: self.ticks,
        }
    }
}

/// Checks that nothing has been mapped at the addresses of an arena since it was placed.
fn refuse_occupied(process: &Process, arena: &Arena) -> Result<()> {
    let range = arena.range();
    let is_within = |it: &Mapping| it.start.0 < range.end && it.end.0 > range.start;
    if read_maps(process)?.iter().any(is_within) {
        let kind = ProcessError::KeepsChanging;
        return Err(Error::of_process(process.pid(), kind));
    }
    Ok(())
}

/// Returns the calls that map an arena; if there is a file for its `data`, they are mapped from there.
fn map_calls(arena: &Arena, data: Option<&SharedData>) -> [RemoteCall; 2] {
    let (read, write, execute) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
    [
        RemoteCall::map(arena.code, arena.code_len(), read | execute),
        match data {
            Some(data) => data.map(arena),
            None => RemoteCall::map(arena.data(), arena.data_len(), read | write),
        },
    ]
}

/// Writes into the shared data, at offsets.
///
/// # Errors
///
/// If they cannot be written.
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
