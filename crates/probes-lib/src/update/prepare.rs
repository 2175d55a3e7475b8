//! One update of a process whose image is known: everything that is prepared while it runs, and
//! what is done while it stands.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::address::{LiveAddr, PAGE};
use crate::error::{Effect, Error, MemoryError, MemoryPart, ProbeError, Result};
use crate::memory::ReadMemory;
use crate::memory::shadow::Shadowed;
use crate::process::Process;
use crate::process::image::Image;

use crate::process::maps::{self, Mapping};
use crate::process::memory::ProcessMemory;
use crate::select::Choice;
use crate::sys::code_page::FilePage;
use crate::trace::stopped::Stopped;
use crate::update::breakpoints;
use crate::update::options::Options;
use crate::update::own::OwnMemory;
use crate::update::patch::{self, Outcome};
use crate::update::plan::{Inputs, OpcodeChange, Step, UpdatePlan};
use crate::update::report::{ProbeChange, Report};
use crate::update::snapshot::Layout;

/// How long pages are copied beforehand: enough for 300 of them at 2 µs each.
const COPYING: Duration = Duration::from_micros(600);

/// A process and what is known of it, for the length of one update.
#[derive(Clone, Copy)]
pub(crate) struct UpdateContext<'a> {
    pub(crate) process: &'a Process,
    pub(crate) image: &'a Image,
    pub(crate) memory: &'a Shadowed<ProcessMemory>,
}

/// How a process is kept from getting in the stop_mode of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopMode {
    /// All its threads are stopped.
    Stopped,
    /// Not at all: it runs.
    Live,
    /// It is our own; it runs, and can unload nothing.
    Own,
}

impl StopMode {
    pub(crate) fn of(options: Options) -> StopMode {
        match options.live {
            true => StopMode::Live,
            false => StopMode::Stopped,
        }
    }
}

/// What is wanted of an update.
#[derive(Clone, Copy)]
pub(crate) struct UpdateRequest<'a> {
    pub(crate) choices: &'a [Choice],
    pub(crate) stop_mode: StopMode,
    pub(crate) gigatext: bool,
}

impl<'a> UpdateRequest<'a> {
    /// For a process that is not our own.
    pub(crate) fn of(choices: &'a [Choice], options: Options) -> UpdateRequest<'a> {
        UpdateRequest {
            choices,
            stop_mode: StopMode::of(options),
            gigatext: options.gigatext,
        }
    }
}

/// An update, planned for the state in which the process was.
pub(crate) struct PreparedUpdate<'a> {
    context: UpdateContext<'a>,
    layout: Layout,
    mappings: Vec<Mapping>,
    plan: UpdatePlan,
    gigatext: bool,
}

impl<'a> UpdateContext<'a> {
    /// Plans what is wanted, for the process as it is now.
    ///
    /// # Errors
    ///
    /// If anything is not as it has to be; nothing has been written then.
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
        let breakpoints = breakpoints::find(program.objects(), &before.code)?;
        let inputs = Inputs {
            program,
            breakpoints: &breakpoints,
            one_by_one: request.stop_mode != StopMode::Stopped,
        };
        let plan = inputs.plan(request.choices, before)?;
        Ok(PreparedUpdate {
            context: self,
            layout,
            mappings,
            plan,
            gigatext: request.gigatext,
        })
    }
}

impl UpdateContext<'_> {
    /// Writes one byte of code that is already there: the kernel copies its page for the process
    /// now, and not while the process is stopped, or refuses the write.
    fn touch(&self, at: LiveAddr, byte: u8) -> io::Result<()> {
        if self.memory.covers(at) {
            // The page is the process's own already.
            return Ok(());
        }
        self.memory.bare().write(at, &[byte])
    }
}

impl PreparedUpdate<'_> {
    /// Whether the process is as it is wanted already.
    pub(crate) fn is_done(&self) -> bool {
        self.plan.steps.is_empty()
    }

    /// Makes the kernel copy the pages of code that will be written now, and not while the process
    /// stands: 2 µs a page, but seconds for one of 1 GiB.
    ///
    /// It is a byte of an operand that is written over itself: debuggers and uprobes put their
    /// breakpoints on the nop or the opcode before it.
    ///
    /// Each copy interrupts the processors that the process runs on. In a virtual machine that takes
    /// five times as long as the copy, which is cheap while the process stands: so there is a limit
    /// to how long this may go on, unless pages are known to be huge.
    ///
    /// The process runs, and may have unmapped code since it was looked at. So only the executable's
    /// is written, which stays where it is, and it is looked at once more, right before. (Between
    /// that look and this write lies a microsecond, in which an operand byte could still reach what a
    /// program that unmaps itself has mapped there instead.)
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
            .filter(|write| !image.is_unloadable(write.at))
        {
            if !self.gigatext && begun.elapsed() > COPYING {
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

    /// Writes what was planned, if the process is still in the state that it was planned for.
    ///
    /// # Errors
    ///
    /// If a write fails; the error says what the process was left with.
    pub(crate) fn carry_out(&self, stopped: &Stopped<'_>) -> Result<Outcome> {
        let UpdateContext {
            process, memory, ..
        } = self.context;
        if !maps::still_mapped(process, &self.mappings)? {
            return Ok(Outcome::Outdated);
        }
        let mut memory = memory.over(stopped.memory(memory.bare())?);
        patch::apply(&self.plan, &self.layout, process.pid(), &mut memory)
            .map_err(|error| error.leaving(Effect::NothingChanged))
    }

    /// As `carry_out`, while the process runs.
    ///
    /// # Errors
    ///
    /// As of `carry_out`, and if the kernel does not let us write to code of a process that is not
    /// traced.
    pub(crate) fn carry_out_live(&self) -> Result<Outcome> {
        let UpdateContext {
            process, memory, ..
        } = self.context;
        if !maps::still_mapped(process, &self.mappings)? {
            return Ok(Outcome::Outdated);
        }
        self.refuse_unloadable()?;
        // Before anything is written, counters among it: so that there is nothing to put back.
        if let Some(&OpcodeChange { at, .. }) = self.plan.opcode_changes.first() {
            let operand = at.plus(1);
            if let Some(&[byte]) = self.plan.before.code_at(operand, 1) {
                self.context
                    .touch(operand, byte)
                    .map_err(|source| live_error(process.pid(), operand, source))?;
            }
        }
        let mut memory = memory.over(memory.bare().while_it_runs());
        patch::apply(&self.plan, &self.layout, process.pid(), &mut memory)
            .map_err(|error| error.leaving(Effect::NothingChanged))
    }

    /// As `carry_out`, in our own process, of which nothing can be unloaded meanwhile.
    ///
    /// # Errors
    ///
    /// As of `carry_out`.
    pub(crate) fn carry_out_own(&self) -> Result<Outcome> {
        let UpdateContext {
            process, memory, ..
        } = self.context;
        if !maps::still_mapped(process, &self.mappings)? {
            return Ok(Outcome::Outdated);
        }
        let running = memory.over(memory.bare().while_it_runs());
        let mut memory = OwnMemory::new(running, |at| self.file_page(at));
        patch::apply(&self.plan, &self.layout, process.pid(), &mut memory)
            .map_err(|error| error.leaving(Effect::NothingChanged))
    }

    /// What is mapped in the page that starts at `at`, if it is code of one of the objects.
    fn file_page(&self, at: LiveAddr) -> Option<FilePage<'_>> {
        let mut mappings = self.mappings.iter();
        let mapping = mappings.find(|it| it.contains(at, PAGE) && it.is_plain_code())?;
        let mut objects = self.context.image.program.objects().iter();
        let object = objects.find(|object| object.is_mapped(mapping))?;
        Some(FilePage {
            file: object.elf.as_fd(),
            offset: mapping.offset + (at.0 - mapping.start.0),
        })
    }

    /// What is unloaded while it is written would be written to what comes instead.
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

    /// What was done, `stopped` being how long the process stop_time still.
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
        }
    }
}

/// EIO is all that a kernel says which lets only tracers write to code (proc_mem.force_override).
fn live_error(pid: i32, address: LiveAddr, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EIO) => Error::of_process(pid, MemoryError::LiveRefused),
        _ => Error::of_write(pid, MemoryPart::Site, address, source),
    }
}
