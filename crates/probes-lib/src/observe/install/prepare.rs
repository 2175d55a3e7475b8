//! [`Prepared`]: an observation that is ready to be installed: all that can be done while the process
//! runs is done.
//!
//! ```text
//! running   plan ─▶ place arenas ─▶ assemble trampolines ─▶ find a code cave
//! stopped   map the arenas ─▶ write their headers
//! running   write the trampolines ─▶ copy the pages that are patched    (if that takes longer than to stop again)
//! stopped   write the shared data ─▶ patch all points
//! ```

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::address::{LiveAddr, PAGE};
use crate::error::Refusal;
use crate::error::{Error, MemoryPart, ObserveError, ProcessError, Result};
use crate::expression::ExpressionProblem;
use crate::expression::times::TimeRange;
use crate::inject::code_cave::{self, CodeCave};
use crate::inject::injected_call::{InjectedCall, PlacedCall, placed};
use crate::inject::injector::{Injector, RedirectMode};
use crate::inject::permissions::{Permissions, why_unreadable};
use crate::memory::page_copies::PageCopies;
use crate::memory::{ReadMemory, WriteMemory};
use crate::observe::discarded::DiscardCheck;
use crate::observe::forked::ForkCheck;
use crate::observe::install::patch::{self, Patch};
use crate::observe::install::{
    fs_base, semaphores, tsc_access, unmap_call, unmapped_together, write_code, write_shared,
};
use crate::observe::installed::{read_each, refuse_missing};
use crate::observe::layout::arena::{Arena, HEADER_LEN};
use crate::observe::layout::observer_record::ObserverRecord;
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::rows::{CLAIMS_LEN, CLAIMS_MAPPED, claim};
use crate::observe::layout::shared::{self, PAGES_MAPPED, PAGES_WIPED, validity};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::loaded_later::LoadedLater;
use crate::observe::observer_lock::ObserverLock;
use crate::observe::page_table::PageTable;
use crate::observe::placement::{self, Placed};
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOwner};
use crate::observe::point::PATCH_LEN;
use crate::observe::read::ActiveObservation;
use crate::observe::read::data_source::{DataMapping, SharedData};
use crate::observe::read::events::{EventReader, PAGES_VALID_FOR, ThreadIds};
use crate::observe::trampoline::{self, ArenaCode};
use crate::observe::value_pages::ValuePages;
use crate::process::Process;
use crate::process::limits::{self, NeededMemory};
use crate::process::maps::{self, Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;
use crate::site::{JMP, SITE_LEN, SiteCode};
use crate::sys::ticks::{self, TickMeasurement};
use crate::trace::moves::Moves;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::{Tracer, with_tracer};
use crate::update::code_digest::{CodeDigest, CodeDigests};
use crate::update::options::Options;

/// The longest trampoline that evaluates expressions, in bytes.
const MAX_FILTER_CODE: u64 = 8 << 10;

/// The length of a huge page.
const HUGE_PAGE: u64 = 2 << 20;

/// Writing this many bytes of code takes less time than stopping a process again.
const WRITTEN_WHILE_STOPPED: usize = 128 << 10;

/// An observation that is ready to be installed.
pub(crate) struct Prepared {
    plan: ObservationPlan,
    arenas: Vec<Arena>,
    /// The code of each arena.
    codes: Vec<Vec<u8>>,
    /// The code that is patched, as it was when the process was read last.
    copies: PageCopies,
    /// The patches of this code, if it can be patched.
    patches: Option<PlannedPatches>,
    /// Where threads that are stopped at a displaced instruction continue, in order.
    moves: Moves,
    /// The pages that trampolines may read.
    pages: ReadablePages,
    /// Since when `pages` are valid, and for how long, in ticks.
    pages_since: u64,
    pages_ticks: u64,
    /// Whether the kernel may be asked what can be read.
    may_ask_kernel: bool,
    /// Pairs and calls that last this many ticks or longer are recorded one by one; 0: none are.
    slow_from: u64,
    /// If only times of a range are recorded: the least of them, in ticks, and how many ticks the range has.
    times: Option<(u64, u64)>,
    /// Where the stack of the main thread ends; 0 if that is not known.
    main_stack_end: u64,
    /// The id of its main thread in its own pid namespace.
    main_tid: i32,
    /// The mappings of the points, which must still be there when the points are patched.
    mappings: Vec<Mapping>,
    /// Whether its pid namespace is ours.
    is_in_our_namespace: bool,
    /// Whether threads claim rows of counters.
    claims_rows: bool,
    /// Known once it is installed.
    thread_ids: ThreadIds,
    ticks: TickMeasurement,
    /// Taken before the header of any arena names us as the observer.
    lock: ObserverLock,
    /// Where the code of injected calls is written.
    pub(crate) code_cave: CodeCave,
}

/// The patches of all points.
struct PlannedPatches {
    /// In the order of their addresses.
    patches: Vec<Patch>,
    /// The tails of the trampolines whose sites are enabled.
    enabled: Vec<LiveAddr>,
    /// The functions that are not patched, because their code has changed.
    changed: Vec<(usize, Refusal)>,
}

/// An observation that has been installed in a running process.
pub(crate) struct Installed {
    pub(crate) active: ActiveObservation,
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
    Ok(Installed {
        active: prepared.into_active(None),
        code_digest,
    })
}

/// Checks whether a process can be observed although all of its threads have seccomp filters. If
/// the filters can be read, the process is stopped to read them.
///
/// # Errors
///
/// See [`Permissions::check_some_thread_may`]; if the observation cannot be prepared, or the process not
/// stopped.
pub(crate) fn refuse_forbidden(
    process: &Process,
    memory: &ProcessMemory,
    plan: ObservationPlan,
    options: Options,
) -> Result<()> {
    if let Some(why) = why_unreadable() {
        let permissions = Permissions::of(process, options.despite_seccomp);
        return permissions.check_some_thread_may_unread(why);
    }
    let prepared = Prepared::of(process, memory, plan)?;
    with_tracer(&[process], |tracer| {
        let injector = prepared.injector(tracer, process, memory, options);
        let stopped = tracer.stop(process, options.time_limit)?;
        injector.refuse_forbidden(&stopped, &prepared.calls())
    })
}

impl Prepared {
    /// Prepares the observation of a plan.
    ///
    /// # Errors
    ///
    /// Same as [`Target::observe`](crate::Target::observe).
    pub(crate) fn of(
        process: &Process,
        memory: &ProcessMemory,
        mut plan: ObservationPlan,
    ) -> Result<Prepared> {
        let ticks = TickMeasurement::begin();
        if plan.is_timed() {
            if !ticks::is_tsc_invariant() {
                return Err(ObserveError::NoInvariantTsc.into());
            }
            tsc_access::refuse_strict(process)?;
        }
        let maps = read_maps(process)?;
        let lock = ObserverLock::take(process)?;
        let code_cave = code_cave::find(process, memory, &maps)?;
        let claims_rows = fs_base::may_be_read(process);
        let placed = place_all(
            process,
            memory,
            &mut plan,
            &maps,
            &lock.record(),
            claims_rows,
        );
        let (arenas, codes) = placed?;
        let mut moves = Vec::new();
        let codes = codes.into_iter().map(|code| {
            moves.extend(code.moves);
            code.bytes
        });
        let codes = codes.collect();
        let mut copies = PageCopies::of(copied(&plan, &arenas));
        let patches = match copies.update(memory) {
            // Planned again if the code has changed once the process is stopped.
            Ok(_) => PlannedPatches::of(process.pid(), &copies.over(memory), &plan, &arenas).ok(),
            Err(_) => None,
        };
        let (mut pages, mut pages_since, mut pages_ticks) = (ReadablePages::default(), 0, 0);
        if plan.shared.has_pages() {
            pages_ticks = ticks.ticks_in(PAGES_VALID_FOR);
            pages_since = ticks::now();
            // Read again, because they may have changed since.
            pages = ReadablePages::of(&read_maps(process)?);
        }
        let may_ask_kernel = !plan.asks_kernel() || OwnFilters::of(process).allow_questions();
        // A little less, because the length of a tick is known better by the time pairs are read.
        let slow_from = match plan.slow_from {
            Duration::ZERO => 0,
            slow_from => ticks.ticks_in(slow_from.mul_f64(0.99)),
        };
        let times = plan.times.map(|TimeRange { from, until }| {
            let from = ticks.ticks_in(from);
            (from, ticks.ticks_in(until).saturating_sub(from))
        });
        Ok(Prepared {
            times,
            main_stack_end: main_stack_end(&maps),
            main_tid: process
                .status()
                .map_or(process.pid(), |status| status.innermost),
            slow_from,
            plan,
            arenas,
            codes,
            copies,
            patches,
            moves: Moves::of(moves),
            pages,
            pages_since,
            pages_ticks,
            may_ask_kernel,
            mappings: Vec::new(),
            claims_rows,
            is_in_our_namespace: process.status().is_ok_and(|status| status.levels <= 1),
            thread_ids: ThreadIds::Unknown,
            ticks,
            lock,
            code_cave,
        })
    }

    pub(crate) fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    /// Returns how much memory the arenas take. Unless it `is_private`, the data are shared, and little of them is
    /// private memory.
    pub(crate) fn needed_memory(&self, is_private: bool) -> NeededMemory {
        let lens = self.arenas.iter().map(|arena| {
            let range = arena.range();
            let own_pages = arena.pages_at().map_or(0, |_| PAGES_MAPPED);
            let data_len = if is_private {
                arena.data_len()
            } else {
                CLAIMS_MAPPED + own_pages
            };
            (range.end - range.start, data_len)
        });
        let (all, data) = lens.fold((0, 0), |sum: (u64, u64), len| {
            (sum.0 + len.0, sum.1 + len.1)
        });
        NeededMemory { all, data }
    }

    fn injector<'i>(
        &self,
        tracer: &'i Tracer<'i>,
        process: &'i Process,
        memory: &'i ProcessMemory,
        options: Options,
    ) -> Injector<'i> {
        Injector {
            tracer,
            process,
            memory,
            code_cave: self.code_cave,
            limit: options.time_limit,
            despite_seccomp: options.despite_seccomp,
            mode: RedirectMode::RunningProcess,
        }
    }

    /// Returns how the data are mapped in a running process.
    fn data_mapping(&self) -> DataMapping<'static> {
        if self.plan.shares_data() {
            DataMapping::SharedWithChildren
        } else {
            DataMapping::Private
        }
    }

    /// Returns all system calls that it takes to install the observation in a running process and to
    /// remove it, even if only a part of it is installed.
    fn calls(&self) -> Vec<PlacedCall> {
        let data = self.data_mapping();
        let mut calls = Vec::new();
        let mut add = |place: CodeCave, these: &[InjectedCall]| {
            calls.extend(placed(these, place.at));
        };
        let unmaps = |mapped: &[InjectedCall]| -> Vec<InjectedCall> {
            mapped.iter().map(InjectedCall::unmapping).collect()
        };
        for arena in &self.arenas {
            let mapped = map_calls(arena, data);
            add(self.code_cave, &mapped);
            add(self.code_cave, &unmaps(&mapped));
            add(self.code_cave, &[unmap_call(arena)]);
            for call in self.wipe_calls(arena, data) {
                add(self.code_cave, &[call]);
            }
        }
        if let Some((first, others)) = self.arenas.split_first() {
            let room = first.call_room();
            for mapped in mapped_together(room, others, data) {
                add(room, &mapped);
                add(room, &unmaps(&mapped));
            }
            for unmapped in unmapped_together(room, others) {
                add(room, &unmapped);
            }
        }
        calls
    }

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
        injector.clear(&stopped)?;
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
        for call in self.wipe_calls(first, data) {
            stopped = injector.run(stopped, &[call])?;
        }
        let room = first.call_room();
        for calls in mapped_together(room, others, data) {
            stopped = injector.at(room).run(stopped, &calls)?;
            for _ in 0..calls.len() / MAPPINGS {
                write_header(&stopped)?;
            }
        }
        for call in others.iter().flat_map(|arena| self.wipe_calls(arena, data)) {
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
        let pages = self.pages.writes().into_iter();
        let pages = pages.map(|write| (sharing.shared.pages() + write.at, write.bytes));
        let at = sharing.shared.validity();
        let validity = [
            (at + validity::SINCE, self.pages_since),
            (at + validity::TICKS, self.pages_ticks),
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
        let is_changed = is_changed.map_err(|_| Error::of_process(pid, ProcessError::Exited))?;
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

    /// Returns the calls that make the kernel clear, in forked children (MADV_WIPEONFORK), the table of readable pages
    /// with its validity and, if children share the counters, the claims of rows. A table that the observer writes in
    /// children must not be in huge pages.
    fn wipe_calls(&self, arena: &Arena, data: DataMapping<'_>) -> Vec<InjectedCall> {
        let pages = arena.pages_at().map(|at| (at, PAGES_MAPPED, PAGES_WIPED));
        // OCaml code owns the row of its domain, even if threads own none.
        let claims = (data.is_shared()).then(|| (arena.data(), CLAIMS_MAPPED, CLAIMS_LEN));
        let parts = claims.into_iter().chain(pages);
        let calls = parts.flat_map(|(at, mapped, wiped)| {
            let is_shared = data.is_shared();
            let over = is_shared.then(|| InjectedCall::map_over(at, mapped));
            let wipe = InjectedCall::wipe_on_fork(at, wiped);
            let small =
                (is_shared && wiped >= HUGE_PAGE).then(|| InjectedCall::small_pages(at, wiped));
            over.into_iter().chain([wipe]).chain(small)
        });
        calls.collect()
    }

    /// Turns the observation, which has been installed, into an active one.
    pub(crate) fn into_active(self, data: Option<SharedData>) -> ActiveObservation {
        let shared_at = self.arenas.first().map_or(LiveAddr(0), Arena::shared_at);
        let are_recorded = data.is_some() || self.data_mapping().is_shared();
        let asks_kernel = self.plan.asks_kernel();
        let pages = PageTable::of(self.plan.shared, self.pages, self.pages_ticks, asks_kernel);
        // If the runtime has a table of the pages of values, the child has a copy of it.
        let needs_own = self.plan.shared.value_pages == ValuePages::TableOfObserver || asks_kernel;
        let pages_of_forked = needs_own && self.plan.shared.has_pages();
        let pages_of_forked = pages_of_forked.then(|| pages.of_forked());
        ActiveObservation {
            events: Mutex::new(EventReader::begin(
                &self.plan,
                &self.arenas,
                shared_at,
                self.thread_ids,
                pages,
            )),
            discards: Mutex::new(DiscardCheck::new(&self.plan)),
            loaded_later: Mutex::new(LoadedLater::new(&self.plan.functions)),
            forked: Mutex::new(ForkCheck::new(
                are_recorded,
                self.plan.has_times(),
                pages_of_forked,
            )),
            plan: self.plan,
            arenas: self.arenas,
            data,
            ticks: self.ticks,
            lock: Some(self.lock),
        }
    }
}

impl PlannedPatches {
    /// Plans the patches of code that `memory` holds.
    ///
    /// # Errors
    ///
    /// If a site does not hold the code that its file says, or cannot be read.
    fn of(
        pid: i32,
        memory: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<PlannedPatches> {
        let changed = plan.functions.left_out(memory);
        let changed = changed.map_err(|_| Error::of_process(pid, ProcessError::Exited))?;
        let is_changed = |planned: &PlannedPoint| match planned.of {
            PointOwner::Site(_) => false,
            PointOwner::Function(function) => {
                let found = changed.binary_search_by_key(&function, |(index, _)| *index);
                found.is_ok()
            }
        };
        let (mut patches, mut tails) = (Vec::new(), Vec::new());
        let mut planned = plan.points.as_slice();
        for arena in arenas {
            let (these, others) = planned.split_at(arena.points.len());
            planned = others;
            let enabled = enabled_sites(pid, memory, plan, these)?;
            let points = enabled.iter().enumerate();
            let is_enabled = points.filter(|(_, is_enabled)| **is_enabled);
            tails.extend(is_enabled.map(|(index, _)| arena.tail(index)));
            let places = arena.places();
            let places = places.filter(|(index, _)| !is_changed(&these[*index]));
            patches.extend(places.map(|(index, place)| {
                let point = &arena.points[index];
                Patch {
                    at: place.at,
                    before: point.unpatched(&place, enabled[index]),
                    after: place.after,
                    is_written_in_steps: point.is_written_in_steps(),
                    is_beside_breakpoint: false,
                }
            }));
        }
        patches.sort_unstable_by_key(|patch| patch.at);
        Ok(PlannedPatches {
            patches,
            enabled: tails,
            changed,
        })
    }
}

/// Returns the code that patches depend on or overwrite: addresses and lengths.
fn copied(plan: &ObservationPlan, arenas: &[Arena]) -> impl Iterator<Item = (LiveAddr, u64)> {
    let sites = plan.points.iter().filter(|it| it.site().is_some());
    let sites = sites.map(|planned| (planned.point.address, SITE_LEN as u64));
    let places = arenas.iter().flat_map(Arena::places);
    let places = places.map(|(_, place)| (place.at, PATCH_LEN as u64));
    let functions = plan.functions.expected_code();
    sites.chain(places).chain(functions)
}

/// Places the arenas of a plan, and makes their code. Functions that cannot be patched as planned are patched in
/// another way, or refused.
fn place_all(
    process: &Process,
    memory: &ProcessMemory,
    plan: &mut ObservationPlan,
    maps: &[Mapping],
    record: &ObserverRecord,
    claims_rows: bool,
) -> Result<(Vec<Arena>, Vec<ArenaCode>)> {
    let pid = process.pid();
    let no_room = |_| Error::of_process(pid, ObserveError::NoRoom);
    loop {
        let unmapped = plan.functions.unmapped(maps);
        plan.refuse(&unmapped);
        let changed = plan.functions.changed(memory);
        let changed = changed.map_err(|_| Error::of_process(pid, ProcessError::Exited))?;
        plan.refuse(&changed);
        plan.lean();
        let overlapping = plan.functions.overlapping();
        if !overlapping.is_empty() {
            plan.try_next(&overlapping);
            continue;
        }
        plan.refuse_empty()?;
        let trampoline_len = trampoline::longest(plan).map_err(no_room)?;
        if plan.has_expressions() && trampoline_len > MAX_FILTER_CODE {
            // The code that records the hits may be longer than that of the expressions.
            let given = trampoline::longest_without_records(plan).map_err(no_room)?;
            if let Some(longest) = plan
                .longest_expression
                .as_ref()
                .filter(|_| given > MAX_FILTER_CODE)
            {
                let too_much = ExpressionProblem::TooMuchCode {
                    given,
                    most: MAX_FILTER_CODE,
                };
                return Err(ObserveError::LongExpression(longest.bad(too_much)).into());
            }
        }
        let arenas = match placement::place(pid, plan, trampoline_len, maps, record)? {
            Placed::Arenas(arenas) => arenas,
            Placed::NoRoom(functions) => {
                plan.try_next(&because(functions, &Refusal::NoRoom));
                continue;
            }
        };
        let no_sites = || Error::of_process(pid, ObserveError::NoSites);
        let sharing = arenas.first().ok_or_else(no_sites)?;
        let mut planned = plan.points.as_slice();
        let codes = arenas.iter().map(|arena| {
            let (these, others) = planned.split_at(arena.points.len());
            planned = others;
            trampoline::arena_code(arena, plan, these, sharing, claims_rows)
        });
        let codes = codes.collect::<std::result::Result<Vec<_>, _>>();
        let codes = codes.map_err(no_room)?;
        let out_of_reach = codes
            .iter()
            .flat_map(|code| code.out_of_reach.iter().copied());
        let out_of_reach: Vec<usize> = out_of_reach.collect();
        if out_of_reach.is_empty() {
            return Ok((arenas, codes));
        }
        plan.try_next(&because(out_of_reach, &Refusal::OutOfReach));
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

/// Returns these functions by ascending index, each with the same reason.
fn because(mut functions: Vec<usize>, why: &Refusal) -> Vec<(usize, Refusal)> {
    functions.sort_unstable();
    // A function has several points.
    functions.dedup();
    functions
        .into_iter()
        .map(|index| (index, why.clone()))
        .collect()
}

/// Returns for each of these points whether it is the site of an enabled probe.
///
/// # Errors
///
/// If one of the sites holds other code than its file says.
fn enabled_sites(
    pid: i32,
    memory: &impl ReadMemory,
    plan: &ObservationPlan,
    planned: &[PlannedPoint],
) -> Result<Vec<bool>> {
    let mut enabled = vec![false; planned.len()];
    let sites: Vec<(usize, usize)> = (0..)
        .zip(planned)
        .filter_map(|(index, planned)| Some((index, planned.site()?)))
        .collect();
    let address = |&(index, _): &(usize, usize)| planned[index].point.address;
    let addresses: Vec<LiveAddr> = sites.iter().map(address).collect();
    let found = read_each(pid, memory, &addresses)?;
    for ((index, site), found) in sites.into_iter().zip(found) {
        let found = SiteCode(found);
        if !planned[index].point.is_unpatched(found) {
            return Err(plan.unexpected(site, found).into());
        }
        enabled[index] = found.enabled() == Some(true);
    }
    Ok(enabled)
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

/// How many mappings an arena has: code and data.
const MAPPINGS: usize = 2;

/// Returns the calls that map arenas, as many at once as fit in `room`.
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

/// Returns where the stack of the main thread ends; 0 if that is not known.
fn main_stack_end(maps: &[Mapping]) -> u64 {
    let mut stacks = maps.iter().filter(|it| it.path() == b"[stack]");
    stacks.next().map_or(0, |stack| stack.end.0)
}
