//! Sets the probes of a program after its execve(2): before its entry and, if its loader allows it, before the
//! initialisers of its libraries.
//!
//! ```text
//! PTRACE_EVENT_EXEC            the kernel has mapped the program and its loader
//! the loader, dynamic linking  maps the libraries, which may have probes as well
//!                              ◀── here the probes are set
//! initialisers, entry          the first code of the program
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;

use crate::address::LiveAddr;
use crate::error::{Error, LaunchError, Operation, ProcessError, Result};
use crate::follow::resolved_actions::ResolvedActions;
use crate::memory::shadow::{Shadow, Shadowed};
use crate::process::Process;
use crate::process::denial;
use crate::process::dynamic_loader;
use crate::process::load_bias;
use crate::process::memory::ProcessMemory;
use crate::process::object::Object;
use crate::select::Actions;
use crate::trace::at_exec::AtExec;
use crate::trace::run_to::NotReached;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;
use crate::update::options::Options;
use crate::update::patch::PatchOutcome;
use crate::update::prepare::{StopMode, UpdateContext, UpdateRequest};
use crate::update::report::Report;

/// What to do to a program that is stopped at its exec.
pub(super) struct SetUp<'s> {
    pub(super) tracer: &'s Tracer<'s>,
    pub(super) at_exec: &'s AtExec,
    pub(super) program: &'s Path,
    pub(super) actions: &'s Actions,
    pub(super) options: Options,
    /// Whether the program may lack what the actions name.
    pub(super) allow_missing_names: bool,
}

/// A program whose probes are set, and which is stopped before its entry.
pub(super) struct Ready<'s> {
    pub(super) stopped: Stopped<'s>,
    pub(super) report: Report,
    /// The objects whose probes are set.
    pub(super) objects: Vec<Object>,
    /// What the actions name that the program lacks.
    pub(super) missing: Option<Error>,
}

impl<'s> SetUp<'s> {
    /// Sets the probes of the program, and leaves it stopped: at its exec or, if it has a loader, where that has mapped
    /// all libraries.
    ///
    /// # Errors
    ///
    /// If that fails, or we are interrupted. The program is then killed, at the latest when this thread ends: it must
    /// not run without its probes.
    pub(super) fn run(&self) -> Result<Ready<'s>> {
        let process = self.process();
        let memory = ProcessMemory::open(process, OFlag::O_RDWR)
            .map_err(|source| denial::denied_or_exited(process, Operation::Attach, source))?;
        let mut stopped = self.at_exec.stopped(self.tracer);
        if let Some(entry) = loader_entry(process)? {
            stopped = self
                .run_until_loaded(stopped, &memory, entry)
                .map_err(|reason| self.not_reached(reason))?;
        }
        let resolved = self.resolve()?;
        let report = self.set_probes(&resolved, memory, &stopped)?;
        if self.tracer.is_interrupted() {
            // The signal may have reached only us, as with a Ctrl-C before the child existed: the program must not run.
            let program = self.program.to_owned();
            return Err(Error::of_program(&program, LaunchError::Interrupted));
        }
        Ok(Ready {
            stopped,
            report,
            objects: resolved.image.program.objects().to_vec(),
            missing: resolved.missing,
        })
    }

    fn process(&self) -> &'s Process {
        self.at_exec.process()
    }

    /// Runs a program until its loader has mapped everything that the program is linked with, none of which
    /// has run by then. If the loader has no function to stop at, runs the program up to `entry`: then the
    /// initialisers of its libraries have run.
    fn run_until_loaded(
        &self,
        mut stopped: Stopped<'s>,
        memory: &ProcessMemory,
        entry: LiveAddr,
    ) -> Result<Stopped<'s>, NotReached> {
        let process = self.process();
        let function = dynamic_loader::debug_function(process);
        let mut next = function;
        loop {
            let places: Vec<LiveAddr> = next.into_iter().chain([entry]).collect();
            let (stopped_there, reached) =
                self.at_exec
                    .run_to(self.tracer, stopped, memory, &places, true)?;
            stopped = stopped_there;
            if reached == entry {
                return Ok(stopped);
            }
            next = if function == Some(reached) {
                // The loader calls it before and after it maps objects. After the first call, the program runs to
                // where the call returns to, and from there to the second call.
                match dynamic_loader::has_loaded(process, memory) {
                    Some(true) => return Ok(stopped),
                    Some(false) => Some(self.at_exec.return_address(memory)?),
                    // Not known: the next stop is the entry.
                    None => None,
                }
            } else {
                function
            };
        }
    }

    fn not_reached(&self, reason: NotReached) -> Error {
        match reason {
            NotReached::Exited => Error::of_program(self.program, LaunchError::DiedLoading),
            NotReached::Interrupted => Error::of_program(self.program, LaunchError::Interrupted),
            reason => reason.error(self.process().pid(), Operation::ControlStart),
        }
    }

    fn resolve(&self) -> Result<ResolvedActions> {
        let mut resolved = ResolvedActions::of(self.process(), Arc::default(), self.actions)?;
        match resolved.missing.take() {
            Some(error) if !self.allow_missing_names => return Err(error),
            missing => resolved.missing = missing,
        }
        Ok(resolved)
    }

    fn set_probes(
        &self,
        resolved: &ResolvedActions,
        memory: ProcessMemory,
        stopped: &Stopped<'_>,
    ) -> Result<Report> {
        let process = self.process();
        // Nothing observes a program that has not run: it has no patches to hide.
        let memory = Shadowed::new(memory, Shadow::default());
        let context = UpdateContext {
            process,
            image: &resolved.image,
            memory: &memory,
        };
        let prepared = context.prepare(UpdateRequest {
            choices: &resolved.choices,
            stop_mode: StopMode::Stopped,
            gigatext: self.options.gigatext,
        })?;
        if prepared.has_nothing_to_do() {
            return Ok(prepared.report(Duration::ZERO));
        }
        if prepared.carry_out(stopped)? == PatchOutcome::Outdated {
            return Err(Error::of_process(
                process.pid(),
                ProcessError::KeepsChanging,
            ));
        }
        // The runtime has not started, and so has registered no code whose digest could be written.
        let code_digest = context.digests(&resolved.choices).unwritten();
        Ok(Report {
            code_digest,
            ..prepared.report(Duration::ZERO)
        })
    }
}

/// Returns the entry point of a program that a loader starts; `None` if there is no loader, so that
/// the kernel has mapped all of the program.
fn loader_entry(process: &Process) -> Result<Option<LiveAddr>> {
    let auxv = process
        .read_of_living_thread("auxv")
        .map_err(|source| process.exited_or(source))?;
    let has_loader = load_bias::auxv_value(&auxv, load_bias::AT_BASE).is_some_and(|base| base != 0);
    let entry = load_bias::auxv_value(&auxv, load_bias::AT_ENTRY).filter(|_| has_loader);
    Ok(entry.map(LiveAddr))
}
