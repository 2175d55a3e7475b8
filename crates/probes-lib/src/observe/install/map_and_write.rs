//! Installs an observation that is [`Prepared`]: maps its arenas, and writes them and the patches.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::address::{LiveAddr, PAGE};
use crate::error::{Error, MemoryPart, ObserveError, ProcessError, Result};
use crate::inject::injector::{Injector, RedirectMode};
use crate::inject::permissions::{Permissions, why_unreadable};
use crate::memory::{ReadMemory, WriteMemory};
use crate::observe::install::data_mapping::{DataMapping, SharedData};
use crate::observe::install::installed::refuse_missing;
use crate::observe::install::observer_lock::ObserverLock;
use crate::observe::install::patch;
use crate::observe::install::planned_patches::PlannedPatches;
use crate::observe::install::prepare::{Prepared, ValidPages};
use crate::observe::install::thread_ids::ThreadIds;
use crate::observe::install::{
    MAPPINGS, exited_of_read, map_calls, mapped_together, semaphores, tsc_access, wipe_calls,
    write_code, write_shared,
};
use crate::observe::layout::arena::{Arena, HEADER_LEN};
use crate::observe::layout::rows::claim;
use crate::observe::layout::shared::{self, validity};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::plan::ObservationPlan;
use crate::process::Process;
use crate::process::limits;
use crate::process::maps::{self, Mapping};
use crate::process::memory::ProcessMemory;
use crate::site::JMP;
use crate::ticks::TickMeasurement;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::with_tracer;
use crate::update::code_digest::{CodeDigest, CodeDigests};
use crate::update::options::Options;

/// Writing this many bytes of code takes less time than stopping a process again.
const WRITTEN_WHILE_STOPPED: usize = 128 << 10;

/// An observation that has been installed in a process.
pub(crate) struct Installed {
    pub(crate) plan: ObservationPlan,
    /// Together they hold the points of the plan in its order: first those of the first arena, then those of
    /// the second, and so on.
    pub(crate) arenas: Vec<Arena>,
    /// The recorded data, if they are in a file that the process shares with us.
    pub(crate) data: Option<SharedData>,
    pub(crate) ticks: TickMeasurement,
    pub(crate) thread_ids: ThreadIds,
    /// What the table of readable pages contains.
    pub(crate) pages: ValidPages,
    pub(crate) lock: ObserverLock,
    /// When it was installed.
    pub(crate) at: Instant,
    pub(crate) code_digest: CodeDigest,
}

/// Installs an observation in a running process, which is stopped meanwhile; before it patches sites, it
/// writes the `digests` of their code. The points are in `mappings`. The caller holds the update lock.
///
/// # Errors
///
/// Same as [`Target::observe`](crate::Target::observe). After an error, parts of the observation
/// may be left in the process: they can be removed like those of a tool that was killed.
pub(crate) fn install(
    process: &Process,
    memory: &ProcessMemory,
    plan: ObservationPlan,
    mappings: Vec<Mapping>,
    digests: &CodeDigests,
    options: Options,
) -> Result<Installed> {
    let mut prepared = Prepared::of(process, memory, plan)?;
    let data = prepared.data_mapping();
    limits::refuse_tight(process, prepared.needed_memory(!data.is_shared()))?;
    prepared.mappings = mappings;
    // A mapping without a file may grow: the kernel merges it with what is mapped next to it.
    prepared.mappings.retain(|mapping| mapping.inode != 0);
    let code_digest = with_tracer(&[process], |tracer| {
        tracer.holds_update_lock.set(true);
        let injector = prepared.injector(tracer, process, memory, options);
        let stopped = digests.stop(tracer, process, memory, options.time_limit)?;
        // Before anything is written: nothing is to be left that could not be removed.
        injector.refuse_forbidden(&stopped, &prepared.calls())?;
        let code_digest = digests.write(&stopped, memory);
        prepared.install(&injector, stopped, data)?.release();
        Ok(code_digest)
    })?;
    Ok(prepared.installed(None, code_digest))
}

/// Checks whether a process can be observed although all of its threads have seccomp filters. If
/// the filters can be read, the process is stopped to read them.
///
/// # Errors
///
/// See [`Permissions::check_some_thread_may_call`]; if the observation cannot be prepared, or the process not
/// stopped.
pub(crate) fn refuse_forbidden(
    process: &Process,
    memory: &ProcessMemory,
    plan: ObservationPlan,
    options: Options,
) -> Result<()> {
    if let Some(why) = why_unreadable() {
        let permissions = Permissions::of(process, options.despite_seccomp);
        return permissions.check_some_running_thread_may_call(why);
    }
    let prepared = Prepared::of(process, memory, plan)?;
    with_tracer(&[process], |tracer| {
        let injector = prepared.injector(tracer, process, memory, options);
        let stopped = tracer.stop(process, options.time_limit)?;
        injector.refuse_forbidden(&stopped, &prepared.calls())
    })
}

impl Prepared {
    /// Installs the observation in a stopped process, with its data mapped as `data` says.
    ///
    /// # Errors
    ///
    /// If the process cannot map memory, or a point does not hold the code that its ELF file says;
    /// [`ProcessError::KeepsChanging`] if something else has been mapped where an arena is to be.
    pub(crate) fn install<'s>(
        &mut self,
        injector: &Injector<'s>,
        stopped: Stopped<'s>,
        data: DataMapping<'_>,
    ) -> Result<Stopped<'s>> {
        let mut stopped = self.map_arenas(injector, stopped, data)?;
        injector.clear(&stopped)?;
        // A program that has not run yet has inherited our PR_SET_TSC mode: it may read the TSC.
        let is_running = matches!(injector.mode, RedirectMode::RunningProcess);
        let timed = self.arenas.first().filter(|_| self.plan.is_timed());
        if let (Some(sharing), true) = (timed, is_running) {
            let at = sharing.shared_at().plus(shared::TID_AT);
            stopped = tsc_access::refuse_denied(injector, stopped, at)?;
        }
        // A program that has not run yet has no thread control blocks either: trampolines do without them if they may
        // read the base of `fs`.
        let needs_control_blocks = is_running || !self.claims_rows;
        let has_timed = self.plan.functions.timed_indices().next().is_some();
        let asks_for_threads = self.plan.shared.asks_for_threads;
        let reads_them = self.plan.watches_functions() || has_timed || asks_for_threads;
        if reads_them && needs_control_blocks {
            refuse_without_control_block(injector.process, injector.memory, &stopped)?;
        }
        let len: usize = self.codes.iter().map(Vec::len).sum();
        let mut is_written = false;
        if is_running && len > WRITTEN_WHILE_STOPPED {
            stopped.release();
            // A kernel that refuses this allows it while the process is stopped.
            let written = self.write_trampolines(&mut injector.memory.while_it_runs());
            is_written = written.is_ok();
            self.copy_pages(injector.memory);
            stopped = injector.tracer.stop(injector.process, injector.limit)?;
            refuse_missing(injector.process, injector.memory, &self.arenas)?;
        }
        if !is_written {
            let written = self.write_trampolines(&mut stopped.memory(injector.memory)?);
            let failed = |(at, source)| {
                let pid = injector.process.pid();
                Error::of_write(pid, MemoryPart::Trampoline, at, source)
            };
            written.map_err(failed)?;
        }
        self.write_shared_data(injector, &stopped)?;
        self.patch_points(injector, &stopped)?;
        Ok(stopped)
    }

    /// Maps the arenas, and writes their headers and tables. If we are killed before there is a header, the tool that
    /// cleans up learns from the injected calls what was mapped: those that map the first arena are in the code cave,
    /// and the others in the room of its trampolines.
    fn map_arenas<'s>(
        &self,
        injector: &Injector<'s>,
        mut stopped: Stopped<'s>,
        data: DataMapping<'_>,
    ) -> Result<Stopped<'s>> {
        refuse_occupied(&stopped, &self.arenas)?;
        let mut codes = self.arenas.iter().zip(&self.codes);
        let mut write_header = |stopped: &Stopped<'_>| match codes.next() {
            None => Ok(()),
            Some((arena, code)) => {
                // The header last.
                let table_end = (arena.trampoline_room().0 - arena.code.0) as usize;
                let (header, table) = code[..table_end.min(code.len())].split_at(HEADER_LEN);
                let table_at = arena.code.plus(header.len() as u64);
                write_code(injector, stopped, table_at, table)?;
                write_code(injector, stopped, arena.code, header)
            }
        };
        let Some((first, others)) = self.arenas.split_first() else {
            return Ok(stopped);
        };
        stopped = injector.run(stopped, &map_calls(first, data))?;
        write_header(&stopped)?;
        for call in wipe_calls(first, data) {
            stopped = injector.run(stopped, &[call])?;
        }
        let room = first.call_room();
        for calls in mapped_together(room, others, data) {
            stopped = injector.at(room).run(stopped, &calls)?;
            for _ in 0..calls.len() / MAPPINGS {
                write_header(&stopped)?;
            }
        }
        for call in others.iter().flat_map(|arena| wipe_calls(arena, data)) {
            stopped = injector.run(stopped, &[call])?;
        }
        if let DataMapping::File(file) = data {
            stopped = injector.run(stopped, &[file.close()])?;
        }
        Ok(stopped)
    }

    /// Writes the trampolines, those of the first arena last: until then, the calls in their room tell what is mapped.
    fn write_trampolines(
        &self,
        memory: &mut impl WriteMemory,
    ) -> std::result::Result<(), (LiveAddr, io::Error)> {
        for (arena, code) in self.arenas.iter().zip(&self.codes).rev() {
            let at = arena.trampoline_room();
            let trampolines = code.get((at.0 - arena.code.0) as usize..);
            let written = memory.write_code(at, trampolines.unwrap_or_default());
            written.map_err(|source| (at, source))?;
        }
        Ok(())
    }

    /// Makes the kernel copy the pages of code that are to be patched, before the process is stopped for that: one
    /// byte of each is written over itself. Because the process runs, this is done only in the executable, which stays
    /// mapped, and the byte is read right before.
    fn copy_pages(&self, memory: &ProcessMemory) {
        let mut page = 0;
        for (at, byte) in self.plan.functions.bytes_to_touch() {
            let mut found = [0];
            if at.0 / PAGE != page && memory.read(at, &mut found).is_ok() && found == [byte] {
                page = at.0 / PAGE;
                // Only saves time; the write that matters reports its own error.
                let _ = memory.write(at, &found);
            }
        }
    }

    /// Writes into the shared data what the trampolines read there.
    fn write_shared_data(&mut self, injector: &Injector<'_>, stopped: &Stopped<'_>) -> Result<()> {
        let (process, memory) = (injector.process, injector.memory);
        let mut tid_offset = None;
        if self.plan.is_timed() || self.plan.shared.asks_for_threads {
            tid_offset = stopped.tid_offset(process, memory);
        }
        // Expressions read the ids of threads by the base of `fs`, if that may be read.
        let knows_threads = tid_offset.is_some() && self.claims_rows;
        if self.plan.shared.asks_for_threads && !knows_threads {
            return Err(Error::of_process(process.pid(), ObserveError::NoThreadIds));
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
        let pages = self.pages.pages.writes().into_iter();
        let pages = pages.map(|write| (sharing.shared.pages() + write.at, write.bytes));
        let at = sharing.shared.validity();
        let validity = [
            (at + validity::SINCE, self.pages.since),
            (at + validity::TICKS, self.pages.ticks),
            (at + validity::MAY_ASK, self.may_ask_kernel.into()),
        ];
        let validity = validity.map(|(offset, ticks)| (offset, ticks.to_le_bytes().to_vec()));
        let validity = validity.into_iter().filter(|_| sharing.shared.has_pages());
        let slow_from = (shared::SLOW_FROM, self.slow_from.to_le_bytes().to_vec());
        let times = self
            .times
            .into_iter()
            .flat_map(|(from, many)| [(shared::TIMES_FROM, from), (shared::TIMES_LEN, many)]);
        let times = times.map(|(offset, ticks)| (offset, ticks.to_le_bytes().to_vec()));
        let copies_stacks = sharing.shared.stacks != StackCopies::None;
        let main_stack_end = self.main_stack_end.to_le_bytes().to_vec();
        let main_stack_end = (shared::MAIN_STACK_END, main_stack_end);
        let main_tid = (shared::MAIN_TID, self.main_tid.to_le_bytes().to_vec());
        let writes: Vec<_> = tid_offset
            .into_iter()
            .chain(copies_stacks.then_some(main_stack_end))
            .chain(copies_stacks.then_some(main_tid))
            .chain((self.slow_from > 0).then_some(slow_from))
            .chain(times)
            .chain(pages)
            .chain(validity)
            .collect();
        write_shared(process.pid(), memory, sharing, &writes)?;
        if self.plan.functions.are_from_start
            && self.plan.functions.timed_indices().next().is_some()
        {
            for arena in &self.arenas {
                let at = arena.data().plus(claim::IN_PROGRAM);
                let written = memory.while_it_runs().write_code(at, &[1]);
                let part = MemoryPart::ObservationData;
                written.map_err(|source| Error::of_write(process.pid(), part, at, source))?;
            }
        }
        Ok(())
    }

    /// Patches the points. Before that, it writes a jump into the tails of the trampolines whose
    /// sites are enabled.
    fn patch_points(&mut self, injector: &Injector<'_>, stopped: &Stopped<'_>) -> Result<()> {
        let pid = injector.process.pid();
        // An object may have been unloaded since, and be loaded again at this moment.
        if !maps::are_among(&self.mappings, stopped.maps()?) {
            return Err(Error::of_process(pid, ProcessError::KeepsChanging));
        }
        let is_changed = self.copies.update(injector.memory);
        let is_changed = is_changed.map_err(exited_of_read(pid))?;
        let before = self.copies.over(injector.memory);
        let planned = match self.patches.take().filter(|_| !is_changed) {
            Some(planned) => planned,
            None => PlannedPatches::of(pid, &before, &self.plan, &self.arenas)?,
        };
        for &tail in &planned.enabled {
            write_code(injector, stopped, tail, &[JMP])?;
        }
        // Before the jumps are written. These threads continue with the same code at another address.
        stopped.move_threads(injector.memory, &self.moves)?;
        let mut memory = stopped.memory(injector.memory)?;
        semaphores::refuse_full(pid, &memory, &self.arenas)?;
        patch::write_all(pid, &mut memory, &before, &planned.patches)?;
        semaphores::raise(injector.process, &mut memory, &self.arenas)?;
        if !planned.changed.is_empty() {
            Arc::make_mut(&mut self.plan.functions).add_refused(planned.changed);
        }
        Ok(())
    }

    /// The observation, which has been installed; `data`: its recorded data, if they are in a file.
    pub(super) fn installed(self, data: Option<SharedData>, code_digest: CodeDigest) -> Installed {
        Installed {
            plan: self.plan,
            arenas: self.arenas,
            data,
            ticks: self.ticks,
            thread_ids: self.thread_ids,
            pages: self.pages,
            lock: self.lock,
            at: Instant::now(),
            code_digest,
        }
    }
}

/// Checks that all threads have a thread control block.
fn refuse_without_control_block(
    process: &Process,
    memory: &ProcessMemory,
    stopped: &Stopped<'_>,
) -> Result<()> {
    let has_none = |tid: &i32| matches!(stopped.control_block(*tid, memory), Ok(None));
    match stopped.tids().find(has_none) {
        None => Ok(()),
        Some(tid) => {
            let kind = ObserveError::NoControlBlock { tid };
            Err(Error::of_process(process.pid(), kind))
        }
    }
}

/// Checks that nothing has been mapped at the addresses of arenas since they were placed.
fn refuse_occupied(stopped: &Stopped<'_>, arenas: &[Arena]) -> Result<()> {
    let maps = stopped.maps()?;
    let is_occupied = |range: Range<u64>| {
        let mut maps = maps.iter();
        maps.any(|it| it.start.0 < range.end && it.end.0 > range.start)
    };
    if arenas.iter().any(|it| is_occupied(it.range())) {
        let (pid, kind) = (stopped.process().pid(), ProcessError::KeepsChanging);
        return Err(Error::of_process(pid, kind));
    }
    Ok(())
}
