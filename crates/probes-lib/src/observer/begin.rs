//! The beginning of an observation: what another tool has left is removed, then the patches are installed.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{
    Effect, Error, ErrorKind, MemoryError, MemoryPart, ObserveError, ProbeError, ProcessError,
    Result,
};
use crate::events_switch;
use crate::functions::Functions;
use crate::observe::functions::ObservedFunctions;
use crate::observe::install::installed::{is_orphaned, refuse_observed};
use crate::observe::install::map_and_write::{install, refuse_forbidden};
use crate::observe::install::observer_lock::ObserverLock;
use crate::observe::install::remove::{CleanReport, Cleaned, NameOf, remove_stale};
use crate::observe::plan::ObservationPlan;
use crate::observe::{AvailableObservation, Observation};
use crate::observer::Observer;
use crate::process::seccomp::OwnFilters;
use crate::site::SITE_LEN;
use crate::target::Target;
use crate::trace::time_budget::TimeBudget;
use crate::update::code_digest;
use crate::update::lock::{self, UpdateLock};
use crate::update::options::Options;

/// How long to wait for a killed observer to exit.
const DYING: Duration = Duration::from_millis(100);

impl Target {
    /// Returns the part of an observation that is possible in this process: to observe processes of different programs
    /// with one observation. Reads files only.
    ///
    /// ```no_run
    /// use probes_lib::{Observation, Options, Selector, Target};
    ///
    /// let wanted = Observation::new().count(Selector::name("req_start")).time("sql_start", "sql_end");
    /// let target = Target::open_any(4242)?;
    /// let available = target.available(&wanted)?;
    /// let observer = available.observation.map(|it| target.observe(&it, Options::default())).transpose()?;
    /// # let _ = observer;
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If its files cannot be read, or something else is wrong with what is selected.
    pub fn available(&self, observation: &Observation) -> Result<AvailableObservation> {
        let (mut kept, mut missing) = (observation.clone(), Vec::new());
        if observation.selects_sites() {
            let program = self.opened.current_image()?.program.clone();
            (kept, missing) = if program.probes().len() > 0 {
                observation.with_sites_of(&program)?
            } else {
                match Target::open(self.pid()) {
                    Ok(target) => observation.with_sites_of(&target.opened.image().program)?,
                    Err(error) if self.opened.has_executed(&error) || error.is_gone() => {
                        return Err(error);
                    }
                    // The error says why no probe was found, once for all of them.
                    Err(error) => (observation.without_sites(), vec![error]),
                }
            };
        }
        if observation.has_functions() {
            let (functions, others) =
                kept.with_functions_of(&Functions::to_select_of(self.pid())?)?;
            kept = functions;
            missing.extend(others);
        }
        let is_any = kept.selects_sites() || kept.has_functions();
        Ok(AvailableObservation {
            observation: is_any.then_some(kept),
            missing,
        })
    }

    /// Begins to record hits. An observation of this process that a killed tool has left is removed first.
    ///
    /// # Errors
    ///
    /// - Another observer observes the process ([`ObserveError::AlreadyObserved`]), unless
    ///   [`Options::take_over`] ends its observation.
    /// - A probe is missing, or no probe that is selected has a site.
    /// - A translator such as valgrind executes the program ([`ProcessError::Translated`](crate::ProcessError::Translated)).
    /// - A site does not hold what its file says, or its code cannot be changed
    ///   ([`MemoryError::Shared`], [`MemoryError::GigaText`]).
    /// - The process cannot be stopped, or the kernel refuses to map memory into it.
    /// - Each thread has a seccomp filter that refuses a system call which observing injects
    ///   ([`ObserveError::SeccompRefuses`], [`ObserveError::SeccompStrict`]), or that cannot be read
    ///   ([`ObserveError::SeccompUnreadable`]).
    /// - Pairs are to be timed, and this machine has no invariant TSC
    ///   ([`ObserveError::NoInvariantTsc`]),
    ///   or a thread of the process may not read the TSC ([`ObserveError::TscDenied`]).
    ///
    /// [`Error::effect`](crate::Error::effect) says what is left behind.
    pub fn observe(&self, observation: &Observation, options: Options) -> Result<Observer> {
        self.try_observe(observation, options).map_err(|error| {
            self.opened
                .executed_or(error)
                .with_effect_if_none(Effect::NothingChanged)
        })
    }

    fn try_observe(&self, observation: &Observation, options: Options) -> Result<Observer> {
        let process = self.opened.process();
        process.refuse_self_and_ancestors()?;
        self.opened.current_image()?.refuse_translated(process)?;
        let mut functions = self.find_functions(observation)?;
        // What is wrong with the question is found before anything that another tool has left is removed.
        let mut planned = Some(self.plan(observation, &functions)?);
        let _lock = self.lock_unobserved(options)?;
        let before = process.stop_time().total();
        self.refuse_if_seccomp_forbids(observation, &functions, options)?;
        let successor_lock = self.successor_lock(options)?;
        let remove_stale = |functions: &ObservedFunctions| {
            self.remove_stale(options, successor_lock.as_ref(), &|at| {
                functions.name_at(at)
            })
        };
        let Cleaned {
            report: mut cleaned,
            why_mapped,
        } = remove_stale(&functions)?;
        if let Some(why) = why_mapped.filter(|_| observation.has_functions()) {
            // A thread may return from there into the middle of instructions that a jump replaces now.
            return Err(why.with_effect(cleaned.effect(Effect::Unspecified)));
        }
        let mut budget = TimeBudget::new(options.time_limit);
        loop {
            let install = || self.install(observation, &functions, planned.take(), options);
            // A panic is a defect of this tool: the process must not stay patched because of it.
            let installed = catch_unwind(AssertUnwindSafe(install)).unwrap_or_else(|panic| {
                let _ = remove_stale(&functions);
                resume_unwind(panic)
            });
            let error = match installed {
                Ok(mut observer) => {
                    observer.stop_time = process.stop_time().since(before);
                    observer.successor_lock = successor_lock;
                    return Ok(observer);
                }
                Err(error) => error,
            };
            let is_being_changed = error.is_being_updated();
            let is_transient = is_being_changed || self.is_due_to_changing_objects(&error);
            // What has been installed so far is removed like the stale observation of a killed
            // tool.
            match remove_stale(&functions) {
                Err(left) if process.has_exited() || self.opened.has_executed(&left) => {
                    return Err(error.without_effect());
                }
                Err(left) => return Err(left.with_effect_if_none(Effect::HalfChanged)),
                Ok(again) => cleaned.add(again.report),
            }
            // Another observer may have come meanwhile: tools that see another /proc have another update lock.
            self.refuse_observed(options)
                .map_err(|error| error.with_effect(cleaned.effect(Effect::Unspecified)))?;
            if !is_transient || budget.is_spent() {
                let effect = cleaned.effect(error.effect());
                return Err(error.with_effect(effect));
            }
            if is_being_changed {
                lock::pause();
            }
            functions = self.find_functions(observation)?;
        }
    }

    /// Finds the functions that are to be observed.
    fn find_functions(&self, observation: &Observation) -> Result<Arc<ObservedFunctions>> {
        let functions = ObservedFunctions::find(self.pid(), observation);
        functions.map(Arc::new)
    }

    /// Returns what is to be recorded in the process as it is now.
    fn plan(
        &self,
        observation: &Observation,
        functions: &Arc<ObservedFunctions>,
    ) -> Result<ObservationPlan> {
        let program = self.opened.current_image()?.program.clone();
        ObservationPlan::of(observation, program, functions.clone())
    }

    /// Returns whether the error is due to an object that was being loaded or has been unloaded:
    /// the next attempt finds it completely loaded, or not at all.
    fn is_due_to_changing_objects(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::Process(ProcessError::KeepsChanging)
            | ErrorKind::Memory(MemoryError::NotMapped { .. }) => true,
            ErrorKind::Probe(ProbeError::UnexpectedSite { address, .. }) => {
                self.opened.image().can_be_unloaded(*address)
            }
            // Objects without probes, of which functions are observed, are not in the image.
            ErrorKind::Memory(MemoryError::Read {
                part: MemoryPart::Code,
                address,
                ..
            }) => {
                let program = &self.opened.image().program;
                let object = program.object_at(*address);
                object.is_none_or(|object| program.can_unload(object))
            }
            _ => self.opened.is_unloaded(error),
        }
    }

    /// Checks that seccomp filters allow what observing takes, before anything that another tool has left is
    /// removed.
    fn refuse_if_seccomp_forbids(
        &self,
        observation: &Observation,
        functions: &Arc<ObservedFunctions>,
        options: Options,
    ) -> Result<()> {
        let process = self.opened.process();
        if OwnFilters::of(process).is_any_unfiltered()? {
            return Ok(());
        }
        let plan = self.plan(observation, functions)?;
        let memory = self.opened.unshadowed_memory()?;
        match refuse_forbidden(process, &memory, plan, options) {
            Err(error) if error.is_refused_by_seccomp() => Err(error),
            // Any other error is that of the installation, which may be tried again.
            _ => Ok(()),
        }
    }

    /// Installs an observation, which may have been `planned` with these functions. If it fails, parts of it may be left.
    fn install(
        &self,
        observation: &Observation,
        functions: &Arc<ObservedFunctions>,
        planned: Option<ObservationPlan>,
        options: Options,
    ) -> Result<Observer> {
        let process = self.opened.process();
        let image = self.opened.current_image()?;
        let program = &image.program;
        let mut plan = match planned.filter(|plan| Arc::ptr_eq(&plan.program, program)) {
            Some(planned) => planned,
            None => ObservationPlan::of(observation, program.clone(), functions.clone())?,
        };
        plan.find_values_and_stacks(process, &image);
        let sites = plan
            .points
            .iter()
            .filter(|planned| planned.site().is_some());
        let ranges =
            sites.map(|planned| (planned.point.address, SITE_LEN as u64, MemoryPart::Site));
        let mappings = image.mappings(process, ranges, options.gigatext)?;
        let memory = self.opened.unshadowed_memory()?;
        let sites = plan.points.iter().map(|planned| planned.point.address);
        let digests = code_digest::prepare(process, &image, &memory, sites);
        let installed = install(process, &memory, plan, mappings, &digests, options)?;
        Ok(Observer::of(self.clone(), installed, options))
    }

    /// Removes the observations that were left in the process by killed tools or dropped
    /// [`Observer`]s.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::remove`], and [`ObserveError::AlreadyObserved`] if the process is observed by
    /// an observer that is still there, unless [`Options::take_over`] ends its observation.
    /// [`Error::effect`](crate::Error::effect) says what is left behind.
    pub fn clean(&self, options: Options) -> Result<CleanReport> {
        let clean = || {
            let process = self.opened.process();
            process.refuse_self_and_ancestors()?;
            let _lock = self.lock_unobserved(options)?;
            let successor_lock = self.successor_lock(options)?;
            let cleaned = self.remove_stale(options, successor_lock.as_ref(), &|_| None)?;
            // Of a process that has exited, nothing is left.
            let _ = events_switch::remove_left(self);
            Ok(cleaned.report)
        };
        clean().map_err(|error| {
            self.opened
                .executed_or(error)
                .with_effect_if_none(Effect::NothingChanged)
        })
    }

    /// Removes what killed tools have left in the process, if there is anything: they may have switched on runtime events that look as if
    /// they were always on. Does nothing if an observer is still there.
    ///
    /// # Errors
    ///
    /// Same as [`Target::clean`].
    pub(crate) fn clean_orphaned(&self, options: Options) -> Result<()> {
        let process = self.opened.process();
        let memory = self.opened.unshadowed_memory_to_read()?;
        if is_orphaned(process, &memory)? {
            self.clean(options)?;
        }
        Ok(())
    }

    /// Checks that the process has no observer, unless it may be taken over.
    fn refuse_observed(&self, options: Options) -> Result<()> {
        if options.take_over {
            return Ok(());
        }
        let memory = self.opened.unshadowed_memory_to_read()?;
        refuse_observed(self.opened.process(), &memory)
    }

    /// Waits for the update lock of a process that has no observer, or may be taken over.
    fn lock_unobserved(&self, options: Options) -> Result<UpdateLock> {
        let begun = Instant::now();
        loop {
            let lock = UpdateLock::wait(self.opened.process(), options.deadline())?;
            let refused = self.refuse_observed(options);
            let is_refused = refused.as_ref().is_err_and(is_already_observed);
            if !is_refused || begun.elapsed() > DYING {
                return refused.map(|()| lock);
            }
            drop(lock);
            lock::pause();
        }
    }

    /// Takes the lock by which an observer that is taken over learns that its successor is alive.
    fn successor_lock(&self, options: Options) -> Result<Option<ObserverLock>> {
        let process = self.opened.process();
        let lock = options.take_over.then(|| ObserverLock::take(process));
        lock.transpose()
    }

    /// Removes stale observations; with the lock of a successor, also that of a live observer.
    fn remove_stale(
        &self,
        options: Options,
        successor_lock: Option<&ObserverLock>,
        name_of: NameOf<'_>,
    ) -> Result<Cleaned> {
        let (process, memory) = (self.opened.process(), self.opened.unshadowed_memory()?);
        let successor = successor_lock.map(ObserverLock::record);
        remove_stale(process, &memory, options, successor.as_ref(), name_of)
    }
}

fn is_already_observed(error: &Error) -> bool {
    let kind = error.kind();
    matches!(
        kind,
        ErrorKind::Observe(ObserveError::AlreadyObserved { .. })
    )
}
