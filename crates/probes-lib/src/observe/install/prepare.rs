//! [`Prepared`]: an observation that is ready to be installed: all that can be done while the process
//! runs is done. The drawing in `install.rs` has all steps.

use std::time::Duration;

use crate::error::{ObserveError, Result};
use crate::expression::times::TimeRange;
use crate::inject::code_cave::{self, CodeCave};
use crate::inject::injected_call::{InjectedCall, PlacedCall, placed};
use crate::inject::injector::{Injector, RedirectMode};
use crate::memory::page_copies::PageCopies;
use crate::observe::install::assemble::place_all;
use crate::observe::install::data_mapping::DataMapping;
use crate::observe::install::observer_lock::ObserverLock;
use crate::observe::install::planned_patches::{PlannedPatches, copied};
use crate::observe::install::thread_ids::ThreadIds;
use crate::observe::install::{
    fs_base, map_calls, mapped_together, tsc_access, unmap_call, unmapped_together, wipe_calls,
};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::readable_pages::{self, ReadablePages};
use crate::observe::layout::rows::CLAIMS_MAPPED;
use crate::observe::layout::shared::PAGES_MAPPED;
use crate::observe::plan::ObservationPlan;
use crate::process::Process;
use crate::process::limits::NeededMemory;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;
use crate::ticks::{self, TickMeasurement};
use crate::trace::moves::Moves;
use crate::trace::tracer::Tracer;
use crate::update::options::Options;

/// An observation that is ready to be installed.
pub(crate) struct Prepared {
    pub(super) plan: ObservationPlan,
    pub(super) arenas: Vec<Arena>,
    /// The code of each arena.
    pub(super) codes: Vec<Vec<u8>>,
    /// The code that is patched, as it was when the process was read last.
    pub(super) copies: PageCopies,
    /// The patches of this code, if it can be patched.
    pub(super) patches: Option<PlannedPatches>,
    /// Where threads that are stopped at a displaced instruction continue, in order.
    pub(super) moves: Moves,
    /// The pages that trampolines may read.
    pub(super) pages: ValidPages,
    /// Whether the kernel may be asked what can be read.
    pub(super) may_ask_kernel: bool,
    /// Pairs and calls that last this many ticks or longer are recorded one by one; 0: none are.
    pub(super) slow_from: u64,
    /// If only times of a range are recorded: the least of them, in ticks, and how many ticks the range has.
    pub(super) times: Option<(u64, u64)>,
    /// Where the stack of the main thread ends; 0 if that is not known.
    pub(super) main_stack_end: u64,
    /// The id of its main thread in its own pid namespace.
    pub(super) main_tid: i32,
    /// The mappings of the points, which must still be there when the points are patched.
    pub(super) mappings: Vec<Mapping>,
    /// Whether its pid namespace is ours.
    pub(super) is_in_our_namespace: bool,
    /// Whether threads claim rows of counters.
    pub(super) claims_rows: bool,
    /// Known once it is installed.
    pub(super) thread_ids: ThreadIds,
    pub(super) ticks: TickMeasurement,
    /// Taken before the header of any arena names us as the observer.
    pub(super) lock: ObserverLock,
    /// Where the code of injected calls is written.
    pub(crate) code_cave: CodeCave,
}

/// The pages that trampolines may read.
#[derive(Default)]
pub(crate) struct ValidPages {
    pub(crate) pages: ReadablePages,
    /// Since when they are valid, and for how long, in ticks.
    pub(super) since: u64,
    pub(crate) ticks: u64,
}

impl ValidPages {
    fn read(process: &Process, ticks: &TickMeasurement) -> Result<ValidPages> {
        // First: it may wait until the measurement has lasted long enough.
        let ticks = ticks.ticks_in(readable_pages::VALID_FOR);
        Ok(ValidPages {
            since: ticks::now(),
            pages: ReadablePages::of(&read_maps(process)?),
            ticks,
        })
    }
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
        let record = lock.record();
        let (arenas, codes) = place_all(process, memory, &mut plan, &maps, &record, claims_rows)?;
        let moves = codes.iter().flat_map(|code| code.moves.iter().copied());
        let moves = Moves::of(moves.collect());
        let mut copies = PageCopies::of(copied(&plan, &arenas));
        let patches = match copies.update(memory) {
            // Planned again if the code has changed once the process is stopped.
            Ok(_) => PlannedPatches::of(process.pid(), &copies.over(memory), &plan, &arenas).ok(),
            Err(_) => None,
        };
        let pages = if plan.shared.has_pages() {
            ValidPages::read(process, &ticks)?
        } else {
            ValidPages::default()
        };
        let may_ask_kernel = !plan.asks_kernel() || OwnFilters::of(process).allow_questions();
        Ok(Prepared {
            times: times_in_ticks(&plan, &ticks),
            main_stack_end: main_stack_end(&maps),
            main_tid: process
                .status()
                .map_or(process.pid(), |status| status.innermost),
            slow_from: slow_from_in_ticks(&plan, &ticks),
            plan,
            arenas,
            codes: codes.into_iter().map(|code| code.bytes).collect(),
            copies,
            patches,
            moves,
            pages,
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

    pub(super) fn injector<'i>(
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
    pub(super) fn data_mapping(&self) -> DataMapping<'static> {
        if self.plan.shares_data() {
            DataMapping::SharedWithChildren
        } else {
            DataMapping::Private
        }
    }

    /// Returns all system calls that it takes to install the observation in a running process and to
    /// remove it, even if only a part of it is installed.
    pub(super) fn calls(&self) -> Vec<PlacedCall> {
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
            for call in wipe_calls(arena, data) {
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
}

/// Returns from which duration on pairs and calls are recorded one by one, in ticks; 0: none are.
fn slow_from_in_ticks(plan: &ObservationPlan, ticks: &TickMeasurement) -> u64 {
    match plan.slow_from {
        Duration::ZERO => 0,
        // A little less, because the length of a tick is known better by the time pairs are read.
        slow_from => ticks.ticks_in(slow_from.mul_f64(0.99)),
    }
}

/// Returns the least of the times that are recorded, in ticks, and how many ticks their range has; `None` if all times are
/// recorded.
fn times_in_ticks(plan: &ObservationPlan, ticks: &TickMeasurement) -> Option<(u64, u64)> {
    let TimeRange { from, until } = plan.times?;
    let from = ticks.ticks_in(from);
    Some((from, ticks.ticks_in(until).saturating_sub(from)))
}

/// Returns where the stack of the main thread ends; 0 if that is not known.
fn main_stack_end(maps: &[Mapping]) -> u64 {
    let mut stacks = maps.iter().filter(|it| it.path() == b"[stack]");
    stacks.next().map_or(0, |stack| stack.end.0)
}
