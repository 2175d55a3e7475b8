//! One update of a process whose image is known: how it is prepared while the process runs, and carried out while it
//! is stopped, or runs (a live update, or one of the current process).

use std::cell::Cell;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::address::{LiveAddr, PAGE};
use crate::error::{Effect, Error, MemoryError, MemoryPart, ProbeError, Result};
use crate::memory::shadow::Shadowed;
use crate::memory::{ReadMemory, WriteMemory};
use crate::process::Process;
use crate::process::image::Image;

use crate::process::maps::{self, Mapping};
use crate::process::memory::ProcessMemory;
use crate::select::{Choice, CounterChange};
use crate::sys::code_page::FilePage;
use crate::trace::stopped::Stopped;
use crate::update::breakpoints;
use crate::update::code_digest::{self, CodeDigest, CodeDigests};
use crate::update::holds::OverruledHolds;
use crate::update::holds::journal::{HoldChange, HoldJournal};
use crate::update::options::Options;
use crate::update::own_process::OwnMemory;
use crate::update::patch::{self, PatchOutcome};
use crate::update::plan::{OpcodeChange, PlanInputs, Step, UpdatePlan};
use crate::update::report::{ProbeChange, Report};
use crate::update::snapshot::Layout;

/// The time limit for copying pages before the stop: enough for 300 of them at 2 µs each.
const COPY_TIME_LIMIT: Duration = Duration::from_micros(600);

/// The process that is updated, and what is known of it.
#[derive(Clone, Copy)]
pub(crate) struct UpdateContext<'a> {
    pub(crate) process: &'a Process,
    pub(crate) image: &'a Image,
    pub(crate) memory: &'a Shadowed<ProcessMemory>,
}

/// What the process does during an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopMode {
    /// All its threads are stopped.
    Stopped,
    /// It runs.
    Live,
    /// It is the current process: it runs, and cannot unload objects.
    Own,
}

impl StopMode {
    pub(crate) fn of(options: Options) -> StopMode {
        if options.live {
            StopMode::Live
        } else {
            StopMode::Stopped
        }
    }
}

/// What an update has to do.
#[derive(Clone, Copy)]
pub(crate) struct UpdateRequest<'a> {
    pub(crate) choices: &'a [Choice],
    pub(crate) stop_mode: StopMode,
    pub(crate) gigatext: bool,
}

impl<'a> UpdateRequest<'a> {
    /// Returns the request for another process than the current one.
    pub(crate) fn of(choices: &'a [Choice], options: Options) -> UpdateRequest<'a> {
        UpdateRequest {
            choices,
            stop_mode: StopMode::of(options),
            gigatext: options.gigatext,
        }
    }
}

/// An update that is planned for the state in which the process was read.
pub(crate) struct PreparedUpdate<'a> {
    context: UpdateContext<'a>,
    layout: Layout,
    mappings: Vec<Mapping>,
    plan: UpdatePlan,
    gigatext: bool,
    /// What dead holders hold of probes whose counters are set. Found before the stop, because finding it takes time.
    overruled: Cell<OverruledHolds>,
}

impl<'a> UpdateContext<'a> {
    /// Reads the process and plans what is requested.
    ///
    /// # Errors
    ///
    /// If the process or its state does not allow it. Nothing has been written then.
    pub(crate) fn prepare(self, request: UpdateRequest<'_>) -> Result<PreparedUpdate<'a>> {
        let UpdateContext {
            process,
            image,
            memory,
        } = self;
        let program = &image.program;
        let probes = request
            .choices
            .iter()
            .map(|choice| program.by_id(choice.probe));
        let layout = Layout::of(program, probes);
        let mappings = image.mappings(process, layout.ranges(), request.gigatext)?;
        let before = layout.read(process.pid(), memory)?;
        // If the mappings have changed, what was read may be of another object, which was loaded in its place.
        let unloadable = layout
            .ranges()
            .find(|&(address, ..)| image.can_be_unloaded(address));
        if let Some((address, _, part)) = unloadable {
            if !maps::still_mapped(process, &mappings)? {
                return Err(image.not_mapped(process, address, part));
            }
        }
        let breakpoints = breakpoints::find(program.objects(), &before.code)?;
        let inputs = PlanInputs {
            program,
            breakpoints: &breakpoints,
            one_by_one: request.stop_mode != StopMode::Stopped,
        };
        let plan = inputs.plan(request.choices, before)?;
        let forced = request
            .choices
            .iter()
            .filter(|one| matches!(one.counter_change, CounterChange::Set(_)));
        let forced = forced.map(|one| program.by_id(one.probe).name().to_owned());
        let overruled = OverruledHolds::of(process, forced.collect())?;
        Ok(PreparedUpdate {
            context: self,
            layout,
            mappings,
            plan,
            gigatext: request.gigatext,
            overruled: Cell::new(overruled),
        })
    }
}

impl UpdateContext<'_> {
    /// Finds out which digests of code are to be written before the sites of these probes are patched.
    pub(crate) fn digests(&self, choices: &[Choice]) -> CodeDigests {
        let program = &self.image.program;
        let probes = choices.iter().map(|choice| program.by_id(choice.probe));
        let sites = probes.flat_map(|probe| probe.sites());
        let sites = sites.map(|site| program.site(site).address());
        code_digest::prepare(self.process, self.image, self.memory.bare(), sites)
    }

    /// Writes one byte of code over itself, so that the kernel copies its page for the process now,
    /// and not while the process is stopped. Fails if the kernel refuses the write.
    fn touch(&self, at: LiveAddr, byte: u8) -> io::Result<()> {
        if self.memory.covers(at) {
            // The site is patched, so the process has its own copy of the page already.
            return Ok(());
        }
        self.memory.bare().write(at, &[byte])
    }
}

impl PreparedUpdate<'_> {
    /// Whether the process already is as requested.
    pub(crate) fn has_nothing_to_do(&self) -> bool {
        self.plan.steps.is_empty()
    }

    /// Records what the plan is about to write.
    ///
    /// # Errors
    ///
    /// See [`HoldJournal::record_intent`].
    pub(crate) fn record_intent(&self, hold: &HoldJournal, change: HoldChange) -> Result<()> {
        let UpdateContext { process, image, .. } = self.context;
        hold.record_intent(&self.plan, &image.program, change, process.pid())
    }

    /// Records what stays held after the plan, which has nothing to write.
    ///
    /// # Errors
    ///
    /// See [`HoldJournal::record_intent`].
    pub(crate) fn record_intent_without_writes(
        &self,
        hold: &HoldJournal,
        change: HoldChange,
    ) -> Result<()> {
        let UpdateContext { process, image, .. } = self.context;
        hold.record_intent_without_writes(&self.plan, &image.program, change, process.pid())
    }

    /// Removes, from the records of dead holders, the probes whose counters the plan sets, whatever they were. To be
    /// called just before the first write: an update that fails earlier, for example because the process cannot be
    /// stopped, changes no records.
    pub(crate) fn forget_overruled(&self) {
        self.overruled.take().forget();
    }

    /// Makes the kernel copy the pages of code that the plan writes: now, and not while the process
    /// is stopped. That takes 2 µs for a page, but seconds for a page of 1 GiB.
    ///
    /// One byte of an operand is written over itself: debuggers and uprobes set their breakpoints on the
    /// nop or the opcode before it.
    ///
    /// Each copy interrupts the processors that the process runs on. In a virtual machine these
    /// interrupts take five times as long as the copy itself. A copy while the process is stopped
    /// is cheap: so this has a time limit, unless pages are known to be huge.
    ///
    /// The process runs, and may have unmapped code since it was read. So only code of the executable,
    /// which stays mapped, is written, and it is read once more right before. (In the microsecond
    /// in between, a program that unmaps itself could map something else there, and that byte would
    /// be written to it.)
    pub(crate) fn break_copy_on_write(&self) {
        let begun = Instant::now();
        let memory = self.context.memory;
        let code = self.plan.steps.iter().filter_map(|step| match step {
            Step::Code(writes) => Some(writes),
            Step::Counters(_) => None,
        });
        let mut found = Vec::new();
        let image = self.context.image;
        for write in code
            .flatten()
            .filter(|write| !image.can_be_unloaded(write.at))
        {
            if !self.gigatext && begun.elapsed() > COPY_TIME_LIMIT {
                break;
            }
            let operand = write.at.plus(1);
            let same_page = operand.0 / PAGE == write.at.0 / PAGE;
            let before = &self.plan.before;
            let (Some(expected), Some(&[byte])) = (
                before.code_at(write.at, write.len),
                before.code_at(operand, 1),
            ) else {
                continue;
            };
            found.resize(write.len, 0);
            if same_page && memory.read(write.at, &mut found).is_ok() && found == expected {
                // Only saves time; the write that matters reports its own error.
                let _ = self.context.touch(operand, byte);
            }
        }
    }

    /// Carries out the plan, if the process is still in the state that the plan is for.
    ///
    /// # Errors
    ///
    /// If a write fails; the error says what the process is left with.
    pub(crate) fn carry_out(&self, stopped: &Stopped<'_>) -> Result<PatchOutcome> {
        let UpdateContext {
            process, memory, ..
        } = self.context;
        if !maps::still_mapped(process, &self.mappings)? {
            return Ok(PatchOutcome::Outdated);
        }
        let mut memory = memory.over(stopped.memory(memory.bare())?);
        self.apply(&mut memory)
    }

    /// Same as [`PreparedUpdate::carry_out`], while the process runs.
    ///
    /// # Errors
    ///
    /// Also if an object with one of the probes can be unloaded, or if the kernel refuses writes to code of a process
    /// that is not traced.
    pub(crate) fn carry_out_live(&self) -> Result<PatchOutcome> {
        let UpdateContext {
            process, memory, ..
        } = self.context;
        if !maps::still_mapped(process, &self.mappings)? {
            return Ok(PatchOutcome::Outdated);
        }
        self.refuse_unloadable()?;
        // If the kernel refuses to write code, it refuses this first write, and nothing has to be restored.
        if let Some(&OpcodeChange { at, .. }) = self.plan.opcode_changes.first() {
            let operand = at.plus(1);
            if let Some(&[byte]) = self.plan.before.code_at(operand, 1) {
                self.context
                    .touch(operand, byte)
                    .map_err(|source| live_error(process.pid(), operand, source))?;
            }
        }
        let mut memory = memory.over(memory.bare().while_it_runs());
        self.apply(&mut memory)
    }

    /// Same as [`PreparedUpdate::carry_out`], in the current process, while none of its objects can be
    /// unloaded.
    ///
    /// # Errors
    ///
    /// See [`PreparedUpdate::carry_out`].
    pub(crate) fn carry_out_own(&self) -> Result<PatchOutcome> {
        let UpdateContext {
            process, memory, ..
        } = self.context;
        if !maps::still_mapped(process, &self.mappings)? {
            return Ok(PatchOutcome::Outdated);
        }
        let running = memory.over(memory.bare().while_it_runs());
        self.apply(&mut OwnMemory::new(running, |at| self.file_page(at)))
    }

    fn apply(&self, memory: &mut impl WriteMemory) -> Result<PatchOutcome> {
        self.forget_overruled();
        patch::apply(&self.plan, &self.layout, self.context.process.pid(), memory)
            .map_err(|error| error.with_effect_if_none(Effect::NothingChanged))
    }

    /// Returns the part of a file that is mapped in the page at `at`, if that is code of an object.
    fn file_page(&self, at: LiveAddr) -> Option<FilePage<'_>> {
        let mut mappings = self.mappings.iter();
        let mapping = mappings.find(|it| it.contains(at, PAGE) && it.is_plain_code())?;
        let mut objects = self.context.image.program.objects().iter();
        let object = objects.find(|object| object.is_mapped_by(mapping))?;
        Some(FilePage {
            file: object.elf.as_fd(),
            offset: mapping.offset + (at.0 - mapping.start.0),
        })
    }

    /// Refuses probes of objects that can be unloaded: the writes could reach what is mapped there next.
    fn refuse_unloadable(&self) -> Result<()> {
        let image = self.context.image;
        let program = &image.program;
        let changes = self.plan.changes.iter();
        let probes = changes.map(|change| program.by_id(change.probe));
        let parts = probes.flat_map(|probe| probe.parts().map(move |part| (probe, part)));
        let mut unloadable = parts.filter(|(_, part)| program.can_unload(part.object));
        match unloadable.next() {
            None => Ok(()),
            Some((probe, part)) => Err(ProbeError::LiveUnloadable {
                name: probe.name().to_owned(),
                object: part.object.path().to_owned(),
            }
            .into()),
        }
    }

    /// Returns the report of an update that has been carried out, or had nothing to do, with the stop time.
    pub(crate) fn report(self, stopped: Duration) -> Report {
        let program = &self.context.image.program;
        let name = |id| program.by_id(id).name().to_owned();
        let changes = self.plan.changes.iter().map(|change| ProbeChange {
            name: name(change.probe),
            before: change.before,
            after: change.after,
            sites: change.sites,
        });
        Report {
            pid: self.context.process.pid(),
            changed: changes.collect(),
            applied: self.plan.applied(program).collect(),
            skipped: self.plan.skipped.into_iter().map(name).collect(),
            not_undone: self.plan.not_undone.into_iter().map(name).collect(),
            stopped,
            code_digest: CodeDigest::Unaffected,
        }
    }
}

/// Returns the error for a failed first write to code: a kernel that lets only tracers write there
/// (proc_mem.force_override) fails with EIO.
fn live_error(pid: i32, address: LiveAddr, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EIO) => Error::of_process(pid, MemoryError::LiveRefused),
        _ => Error::of_write(pid, MemoryPart::Site, address, source),
    }
}
