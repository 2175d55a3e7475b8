//! [`Observer`]: records the hits of a process, until it is removed. The facade of [`observe`].
//!
//! [`observe`]: crate::observe

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::address::LiveAddr;
use crate::error::{
    Effect, Error, ErrorKind, MemoryError, MemoryPart, ObserveError, ProbeError, ProcessError,
    Result,
};
use crate::events_switch::{self, EventsSwitch};
use crate::functions::Functions;
use crate::observe::discarded::DiscardCheck;
use crate::observe::forked::{ForkCheck, with_copies};
use crate::observe::functions::ObservedFunctions;
use crate::observe::install::prepare::{Installed, install, refuse_forbidden};
use crate::observe::install::remove::{
    CleanReport, Cleaned, NameOf, Removed, remove, remove_stale,
};
use crate::observe::install::write_shared;
use crate::observe::installed::{
    find_points, is_abandoned, refuse_if_removal_began, refuse_observed, refuse_replaced,
};
use crate::observe::layout::arena::Arena;
use crate::observe::loaded_later::LoadedLater;
use crate::observe::observer_lock::ObserverLock;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::ActiveObservation;
use crate::observe::read::calls::{FunctionLatency, RecordedCalls};
use crate::observe::read::counts::Counts;
use crate::observe::read::data_source::{DataSource, ProcessData, SharedData};
use crate::observe::read::events::Events;
use crate::observe::read::histograms::read_histograms;
use crate::observe::read::keyed_times::KeyedTimes;
use crate::observe::read::keyed_values::KeyedHistograms;
use crate::observe::read::keys::KeyedCounts;
use crate::observe::read::latency::{HistogramPart, Latency, read_pairs};
use crate::observe::read::values::ValueHistogram;
use crate::observe::{
    AvailableObservation, DiscardedPatches, ForkedChildren, Observation, RefusedFunction,
};
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;
use crate::runtime_events::RuntimeEvents;
use crate::site::SITE_LEN;
use crate::target::Target;
use crate::trace::time_budget::TimeBudget;
use crate::update::code_digest::{self, CodeDigest};
use crate::update::lock::{self, UpdateLock};
use crate::update::options::Options;

/// How long to wait for a killed observer to exit.
const DYING: Duration = Duration::from_millis(100);

/// How long to wait for another tool that is taking over, to learn which one it is.
const TAKING_OVER: Duration = Duration::from_secs(3);

/// Records the hits of probes of a process until it is removed. Whether the probes are enabled is not
/// changed: disabled ones are observed as well, and can be enabled and disabled meanwhile.
///
/// If it is dropped without [`Observer::remove`], the process stays observed, which does no harm;
/// [`Target::clean`] removes the observation.
///
/// ```no_run
/// use std::{thread, time::Duration};
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let target = Target::open(4242)?;
/// let observation = Observation::new().count(Selector::All);
/// let mut observer = target.observe(&observation, Options::default())?;
/// thread::sleep(Duration::from_secs(10));
/// for (name, hits) in observer.remove()?.counts.probes() {
///     println!("{name} {hits}");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub struct Observer {
    target: Target,
    options: Options,
    active: ActiveObservation,
    code_digest: CodeDigest,
    stop_time: Duration,
    is_removed: bool,
    /// How it has switched runtime events on, if it has.
    events_switch: Option<EventsSwitch>,
    /// If it may have taken over: by this lock, the observer that it replaced learns that its successor is alive.
    successor_lock: Option<ObserverLock>,
}

/// All that an observation has recorded when it ends.
///
/// ```no_run
/// # let mut observer: probes_lib::Observer = unimplemented!();
/// let report = observer.remove()?;
/// println!("{} hits, {} times", report.counts.total(), report.latencies.len());
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ObservationReport {
    /// The hits, up to and including the last one.
    pub counts: Counts,
    /// Of each pair, in the order of the [`Observation`].
    pub latencies: Vec<Latency>,
    /// Of each function that was timed, in the order of their addresses.
    pub function_latencies: Vec<FunctionLatency>,
    /// Of each probe and function whose values were to be shown; see [`Observer::histograms`].
    pub histograms: Vec<ValueHistogram>,
    /// If hits were counted by keys; see [`Observer::keyed_counts`].
    pub keyed_counts: Option<KeyedCounts>,
    /// If each key has a histogram; see [`Observer::keyed_histograms`].
    pub keyed_histograms: Option<KeyedHistograms>,
    /// If times are distinguished by keys; see [`Observer::keyed_times`].
    pub keyed_times: Option<KeyedTimes>,
    /// The hits that have not been read yet.
    pub events: Events,
    /// An upper bound of the total time for which the process was stopped to remove the
    /// observation; zero if it had exited.
    pub stopped: Duration,
    /// Sites whose records are incomplete.
    pub discarded: DiscardedPatches,
    /// See [`CleanReport::still_mapped`].
    pub still_mapped: u64,
    /// Why processes that were forked meanwhile could not be restored, with their pids, if their hits were to be recorded, too
    /// ([`Observation::record_forked`]): [`Target::clean`] restores each.
    pub unrestored: Vec<(i32, Arc<Error>)>,
}

impl Target {
    /// Returns what of an observation the process has, for processes of different programs that are observed alike. Reads
    /// files only.
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
                    // It says why, once for all of them.
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
            let error = match self.install(observation, &functions, planned.take(), options) {
                Ok(mut observer) => {
                    observer.stop_time = process.stop_time().since(before);
                    observer.successor_lock = successor_lock;
                    return Ok(observer);
                }
                Err(error) => error,
            };
            let is_transient = self.is_due_to_changing_objects(&error);
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
    pub fn clean_abandoned(&self, options: Options) -> Result<()> {
        let process = self.opened.process();
        let memory = self.opened.unshadowed_memory_to_read()?;
        if is_abandoned(process, &memory)? {
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
            let lock =
                UpdateLock::wait(self.opened.process(), Instant::now() + options.time_limit)?;
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

impl Observer {
    /// Returns the observer of an observation that is installed in the process of `target`.
    pub(crate) fn of(target: Target, installed: Installed, options: Options) -> Observer {
        Observer {
            target,
            options,
            active: installed.active,
            code_digest: installed.code_digest,
            stop_time: Duration::ZERO,
            is_removed: false,
            events_switch: None,
            successor_lock: None,
        }
    }

    /// The same observer, whose observation switches runtime events on in this way.
    pub(crate) fn with_events_switch(self, switch: EventsSwitch) -> Observer {
        // If that fails, the process is waited for; if it has exited, that is found then.
        let _ = switch.interrupt_domains(&self.target);
        Observer {
            events_switch: Some(switch),
            ..self
        }
    }

    /// Returns the process that is observed.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns how long the process was stopped to install the observation, at most.
    pub fn stopped(&self) -> Duration {
        self.stop_time
    }

    /// Checks that the process is still observed by this observer. Does not stop the process, and
    /// takes less time than reading.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed a new program; if another observer has replaced this one
    /// ([`ObserveError::Replaced`]), or it has been removed ([`ObserveError::Removed`]).
    pub fn check(&self) -> Result<()> {
        self.refuse_removed()?;
        self.refuse_if_removal_began()?;
        self.look_for_gaps();
        self.renew_pages_of_filters();
        let memory = self.target.opened.unshadowed_memory_to_read()?;
        refuse_taken_over(&self.target, &memory, &self.active.arenas)
            .map_err(|error| self.target.opened.executed_or(error))
    }

    /// Returns whether the runtime events that [`Target::observe_with_events`] switches on are on by now; true if this
    /// observation switches none on. Does not stop the process.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed a new program; if it could not create the file of its events any more
    /// ([`RuntimeEventsError::CannotSwitchOn`](crate::RuntimeEventsError::CannotSwitchOn)), or the disk is nearly full
    /// ([`RuntimeEventsError::NoRoom`](crate::RuntimeEventsError::NoRoom)). Then the observation is to be removed.
    pub fn events_are_on(&self) -> Result<bool> {
        let Some(switch) = &self.events_switch else {
            return Ok(true);
        };
        let is_on = switch.is_enabled(&self.target)?;
        switch.refuse_hindered(&self.target, is_on, || self.counts())?;
        Ok(is_on)
    }

    /// Whether this observation switches runtime events on, because they were off or paused when it began.
    pub fn switches_events_on(&self) -> bool {
        self.events_switch.is_some()
    }

    /// Opens the runtime events of the process once they are on, from now on.
    ///
    /// # Errors
    ///
    /// Same as [`RuntimeEvents::of_process`].
    pub fn open_events(&self) -> Result<RuntimeEvents> {
        // The process may have been in a phase when others switched its events off.
        let off_until = self.events_switch.as_ref().map_or(0, |it| it.off_until);
        RuntimeEvents::on_since(self.target.pid(), off_until)
    }

    /// Removes the name of the file of runtime events, if the process has created one because they were switched on.
    /// The process still writes to the file, and readers that have opened it still read it. If the name could not be
    /// removed, returns the path and the reason.
    ///
    /// # Errors
    ///
    /// If the process has exited.
    pub fn remove_events_file(&mut self) -> Result<Option<(PathBuf, io::Error)>> {
        match &mut self.events_switch {
            Some(switch) => switch.remove_file(&self.target),
            None => Ok(None),
        }
    }

    /// Returns whether closures that the process marshals are accepted by others of its program while it is
    /// observed, and afterwards.
    pub fn code_digest(&self) -> CodeDigest {
        self.code_digest
    }

    /// Reads the counts so far. Does not stop the process.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed a new program; if another observer has replaced this one
    /// ([`ObserveError::Replaced`]), or it has been removed ([`ObserveError::Removed`]). If the program was
    /// launched to be observed, only if this observer has been removed: until then, what was recorded is still there.
    pub fn counts(&self) -> Result<Counts> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        self.read(|source| Counts::read(self.target.pid(), source, plan, arenas))
    }

    /// Reads the times of each pair so far. Does not stop the process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn latencies(&self) -> Result<Vec<Latency>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        let part = HistogramPart::UpToLongest;
        let pairs = self.read(|source| read_pairs(self.target.pid(), source, arenas, part))?;
        Ok(Latency::of_pairs(&plan.pairs, &pairs, &self.active.ticks))
    }

    /// Reads the times of the calls of each function that is timed, in the order of their addresses. Does not stop the
    /// process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn function_latencies(&self) -> Result<Vec<FunctionLatency>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        let pid = self.target.pid();
        let calls = self.read(|source| RecordedCalls::read(pid, source, plan, arenas))?;
        Ok(calls.latencies(plan, &self.active.ticks))
    }

    /// Reads the histograms so far ([`Observation::histogram_of`]): those of probes by name, then those of functions
    /// in the order of their addresses. Does not stop the process. Hits of this moment may be missing in one figure of
    /// a histogram and not in another.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn histograms(&self) -> Result<Vec<ValueHistogram>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        self.read(|source| read_histograms(self.target.pid(), source, plan, arenas))
    }

    /// Reads how often hits had each key so far ([`Observation::by`]); `None` if they are not counted by keys. Does
    /// not stop the process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn keyed_counts(&self) -> Result<Option<KeyedCounts>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        self.read(|source| KeyedCounts::read(self.target.pid(), source, plan, arenas))
    }

    /// Reads the histograms of all keys so far ([`Observation::histogram_of`] and [`Observation::by`]); `None` if
    /// there are none by key. Does not stop the process. Hits of this moment may be missing in one figure of a
    /// histogram and not in another.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn keyed_histograms(&self) -> Result<Option<KeyedHistograms>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        self.read(|source| KeyedHistograms::read(self.target.pid(), source, plan, arenas))
    }

    /// Reads the times by keys so far ([`Observation::time_by`]); `None` if they are not distinguished by keys. Does
    /// not stop the process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn keyed_times(&self) -> Result<Option<KeyedTimes>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        let (pid, ticks) = (self.target.pid(), &self.active.ticks);
        self.read(|source| KeyedTimes::read(pid, source, plan, arenas, ticks))
    }

    /// Returns the functions that were selected and cannot be observed.
    pub fn refused(&self) -> &[RefusedFunction] {
        &self.active.plan.functions.refused
    }

    /// Returns the functions that are watched without their results or exits, although these are to be recorded, and
    /// why.
    pub fn without_results(&self) -> &[RefusedFunction] {
        &self.active.plan.functions.without_results
    }

    /// Returns the sites of USDT probes whose `nop` is overwritten while they are observed, each by the name of its probe
    /// and its address in the process. At all others, other tools, such as `bpftrace` and `perf`, can set their
    /// breakpoints meanwhile; at these, a breakpoint would end the process.
    ///
    /// ```no_run
    /// # let observer: probes_lib::Observer = unimplemented!();
    /// for (name, address) in observer.sites_without_nop() {
    ///     println!("do not start bpftrace at {name}, {address}");
    /// }
    /// ```
    pub fn sites_without_nop(&self) -> impl Iterator<Item = (&str, LiveAddr)> {
        let functions = self.active.plan.functions.functions.iter();
        let without = functions.filter(|function| function.overwrites_nop());
        without.map(|function| (&*function.wanted.name, function.wanted.address))
    }

    /// Returns the functions of the process as they were when it began to be observed; `None` if no calls of functions
    /// are watched.
    pub fn functions(&self) -> Option<Arc<Functions>> {
        self.active.plan.functions.all.clone()
    }

    /// Returns how many functions are watched, or have their slow calls shown, of which it is not known how many
    /// arguments they have ([`Observation::unknown_arguments`]).
    pub fn functions_of_unknown_arguments(&self) -> usize {
        let functions = self.active.plan.functions.functions.iter();
        let watched = functions.filter_map(|function| function.watching().or(function.reported()));
        watched.filter(|it| !it.is_number_known()).count()
    }

    /// Reads the hits, since the last call, of the probes and functions that are watched. Does not stop the
    /// process, which keeps about a megabyte of them for each of 16 groups of threads: if this is
    /// called too seldom ([`Observer::next_read`]), events are dropped.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`]; up to 50 ms later, if nothing was hit meanwhile.
    pub fn events(&mut self) -> Result<Events> {
        self.refuse_removed()?;
        self.look_for_gaps();
        if let Err(error) = self.renew_pages() {
            // What has been recorded in a shared file can still be read.
            if self.active.data.is_none() || !is_replaced(&error) {
                return Err(self.target.opened.executed_or(error));
            }
        }
        let clock = self.active.ticks.clock();
        let (target, active) = (&self.target, &mut self.active);
        let process = target.opened.process();
        let events = active.events.get_mut();
        let events = events.unwrap_or_else(PoisonError::into_inner);
        let rings = source_of(target, &active.arenas, &active.data, None);
        if let Some(nothing) = events.empty_if_no_new_records(&rings) {
            return Ok(nothing);
        }
        read_from(target, &active.arenas, &active.data, |source, memory| {
            events.read(process, source, memory, &clock, false)
        })
    }

    /// Returns how long to wait before the next [`Observer::events`]: 2 ms, which is enough for some million hits a second;
    /// if none has come for a tenth of a second, up to 10 ms, which is enough for a million.
    pub fn next_read(&self) -> Duration {
        let events = self.active.events.lock();
        let events = events.unwrap_or_else(PoisonError::into_inner);
        events.next_read()
    }

    /// Returns the sites that have been found to record no hits any more. They are looked for whenever something is
    /// read, but at most five times a second; [`Observer::remove`] looks once more.
    pub fn discarded(&self) -> DiscardedPatches {
        self.lock_discards().found()
    }

    /// Returns the files with functions that were asked for and are not observed, because the process has loaded them
    /// since: a new observation has them as well. Looked for when [`Observer::discarded`] are. Functions that were
    /// asked for by their addresses do not matter.
    pub fn loaded_later(&self) -> Vec<PathBuf> {
        self.lock_loaded_later().found()
    }

    fn lock_loaded_later(&self) -> MutexGuard<'_, LoadedLater> {
        let loaded = self.active.loaded_later.lock();
        loaded.unwrap_or_else(PoisonError::into_inner)
    }

    fn find_loaded_later(&self) -> Result<()> {
        let mut loaded = self.lock_loaded_later();
        if loaded.is_possible() {
            let process = self.target.opened.process();
            let maps = read_maps(process)?;
            let memory = self.target.opened.unshadowed_memory_to_read()?;
            // Afterwards: so these are not the mappings of another program that it has executed.
            refuse_replaced(process, &memory, &self.active.arenas)?;
            loaded.look(process, &maps);
        }
        Ok(())
    }

    /// Returns the processes that the observed process was found to have forked, whose hits or times are missing.
    /// Looked for when [`Observer::discarded`] are.
    pub fn forked(&self) -> ForkedChildren {
        self.lock_forked().found()
    }

    /// Returns whether the hits of a process that this one, or one of its children, has forked are recorded with its own: it was forked while
    /// this one was observed, and the data are shared ([`Observation::record_forked`]).
    pub fn records_forked(&self, pid: i32) -> bool {
        let process = self.target.opened.process();
        let forked = self.lock_forked();
        forked.is_recorded(pid, process, &self.active.arenas)
    }

    /// Returns the pids of all these processes. Looks at all processes of the machine, since the parent of one may have exited, as a
    /// daemon's has.
    pub fn recorded_forked(&self) -> Vec<i32> {
        let arena = self.active.arenas.first();
        let arena = arena.filter(|_| self.active.plan.records_forked);
        arena.map_or_else(Vec::new, |arena| {
            with_copies(self.target.opened.process(), arena)
        })
    }

    fn lock_forked(&self) -> MutexGuard<'_, ForkCheck> {
        self.active
            .forked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_discards(&self) -> MutexGuard<'_, DiscardCheck> {
        let discards = self.active.discards.lock();
        discards.unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks for patches that the process has discarded, for files that it has loaded, and for processes that it has
    /// forked, if it is time. If the process cannot be read, the next reading reports that.
    fn look_for_gaps(&self) {
        self.lock_forked()
            .look_if_due(self.target.opened.process(), &self.active.arenas);
        let mut discards = self.lock_discards();
        if discards.is_due() {
            let _ = self.look_for_discarded(&mut discards);
            let _ = self.find_loaded_later();
        }
    }

    fn look_for_discarded(&self, discards: &mut DiscardCheck) -> Result<()> {
        let (process, active) = (self.target.opened.process(), &self.active);
        let memory = self.target.opened.unshadowed_memory_to_read()?;
        let mut points = Vec::new();
        for arena in &active.arenas {
            points.extend(find_points(process, &memory, arena)?.discarded);
        }
        let sites = discards.unknown(&active.plan, &points);
        if !sites.is_empty() {
            let maps = read_maps(process)?;
            // Afterwards: another tool that removes this observation says so before it restores the sites.
            refuse_replaced(process, &memory, &active.arenas)?;
            discards.add(&sites, &maps);
        }
        Ok(())
    }

    /// Returns whether each reading also tells the process which of its memory may be read: then it should be read at least
    /// five times a second, or more hits are without an answer to what is asked of them.
    ///
    /// ```no_run
    /// # fn pause(observer: &probes_lib::Observer) -> std::time::Duration {
    /// std::time::Duration::from_millis(if observer.has_to_be_read() { 200 } else { 1000 })
    /// # }
    /// ```
    pub fn has_to_be_read(&self) -> bool {
        self.active.plan.shared.has_pages()
    }

    /// Renews the table of pages, if it is time and filters need it. If the process cannot be read, what reads its
    /// results reports that.
    fn renew_pages_of_filters(&self) {
        if self.active.plan.shared.filters_memory {
            let _ = self.renew_pages();
        }
    }

    /// Renews the table of pages that trampolines may read, if it is time.
    fn renew_pages(&self) -> Result<()> {
        let (process, sharing) = (self.target.opened.process(), self.active.arenas.first());
        let events = self.active.events.lock();
        let mut events = events.unwrap_or_else(PoisonError::into_inner);
        let sharing = sharing.filter(|_| events.pages_are_due(Instant::now()));
        // The lock keeps other observers from replacing this one meanwhile. If one is just doing
        // so, the pages are not renewed, and the replacement is noticed at the next call.
        let lock = sharing.map(|_| UpdateLock::wait(process, Instant::now()));
        if let (Some(sharing), Some(Ok(_lock))) = (sharing, lock) {
            events.renew_pages(process, |writes| {
                let memory = self.target.opened.unshadowed_memory()?;
                refuse_replaced(process, &memory, &self.active.arenas)?;
                write_shared(process.pid(), &memory, sharing, writes)
            })?;
        }
        Ok(())
    }

    /// Removes the observation, and returns all that it has recorded. If the program was launched
    /// to be observed, its records can be read even if it has exited.
    ///
    /// # Errors
    ///
    /// - The process has exited or executed a new program.
    /// - It cannot be stopped, or another update is in progress. Then it stays observed, nothing is
    ///   dropped, and this can be called again.
    /// - Another observer has replaced this one ([`ObserveError::Replaced`]), or this one has been
    ///   removed ([`ObserveError::Removed`]).
    pub fn remove(&mut self) -> Result<ObservationReport> {
        self.refuse_removed()?;
        if let Some(mut switch) = self.events_switch.take() {
            // If that fails, the removal says why.
            let _ = switch.wait_for_begun_call(&self.target, || self.counts());
            self.events_switch = Some(switch);
        }
        self.lock_forked()
            .look(self.target.opened.process(), &self.active.arenas);
        let mut removed = self.try_to_remove();
        if let Ok(report) = &mut removed {
            report.unrestored = self.restore_all_forked();
        }
        if let (Ok(report), Some(switch)) = (&removed, &mut self.events_switch) {
            // If the process has exited, nothing is left to be undone.
            let undone = switch.undo_late_call(&self.target, &report.counts);
            let _ = undone.and_then(|()| switch.undo_pause(&self.target));
        }
        // Again: those that were about to execute a program have done so.
        self.lock_forked()
            .look(self.target.opened.process(), &self.active.arenas);
        self.is_removed = removed.is_ok();
        if self.is_removed {
            (self.active.lock, self.successor_lock) = (None, None);
        }
        removed.map_err(|error| {
            if self.active.data.is_some() && is_replaced(&error) {
                return error;
            }
            self.target.opened.executed_or(error)
        })
    }

    /// Restores the processes that were forked meanwhile, if their hits were to be recorded, too. Returns why some could not be.
    fn restore_all_forked(&self) -> Vec<(i32, Arc<Error>)> {
        let pids = self.recorded_forked().into_iter();
        let failed = pids.filter_map(|pid| Some((pid, Arc::new(self.restore_forked(pid).err()?))));
        failed.collect()
    }

    /// Restores a process that was forked meanwhile ([`Observer::records_forked`]), as [`Observer::remove`] does with those of a
    /// process that has not exited: its copies of the trampolines are removed like those of a tool that was killed.
    ///
    /// # Errors
    ///
    /// See [`Target::clean`]; that it has exited, or executed a program, is none.
    pub fn restore_forked(&self, pid: i32) -> Result<()> {
        let options = Options {
            take_over: false,
            ..self.options
        };
        let child = self.target.open_forked(pid);
        match child.and_then(|child| child.clean(options)) {
            Err(error) if !error.is_gone() && !error.is_exec() => Err(error),
            _ => Ok(()),
        }
    }

    fn try_to_remove(&mut self) -> Result<ObservationReport> {
        let (target, active) = (&self.target, &mut self.active);
        let (process, options) = (target.opened.process(), self.options);
        let (pid, clock) = (process.pid(), active.ticks.clock());
        let events = active.events.get_mut();
        let events = events.unwrap_or_else(PoisonError::into_inner);
        let mut read_results = |source: &DataSource<'_>, memory: Option<&ProcessMemory>| {
            let counts = Counts::read(pid, source, &active.plan, &active.arenas)?;
            let pairs = read_pairs(pid, source, &active.arenas, HistogramPart::Whole)?;
            let calls = RecordedCalls::read(pid, source, &active.plan, &active.arenas)?;
            let histograms = read_histograms(pid, source, &active.plan, &active.arenas)?;
            let keyed = KeyedCounts::read(pid, source, &active.plan, &active.arenas)?;
            let events = events.read(process, source, memory, &clock, true)?;
            let keyed_histograms =
                KeyedHistograms::read(pid, source, &active.plan, &active.arenas)?;
            let (plan, arenas) = (&active.plan, &active.arenas);
            let times = KeyedTimes::read(pid, source, plan, arenas, &active.ticks)?;
            let keyed = (keyed, keyed_histograms, times);
            Ok((counts, pairs, calls, histograms, keyed, events))
        };
        let mut maps = Vec::new();
        let mut before = None;
        let mut remove_all = || {
            let _lock = UpdateLock::wait(process, Instant::now() + options.time_limit)?;
            before.get_or_insert_with(|| process.stop_time().total());
            let memory = target.opened.unshadowed_memory()?;
            let source = source_of(target, &active.arenas, &active.data, Some(&memory));
            let read = || read_results(&source, Some(&memory));
            maps = read_maps(process)?;
            remove(process, &memory, &active.arenas, options, read)
        };
        let removed = match remove_all() {
            // Again, without that follower or connected to it anew.
            Err(error) if is_follower_lost(&error) && !is_partly_removed(&error) => remove_all(),
            removed => removed,
        };
        let stop_time = before.map_or(Duration::ZERO, |before| process.stop_time().since(before));
        let discards = active.discards.get_mut();
        let discards = discards.unwrap_or_else(PoisonError::into_inner);
        match &removed {
            Ok(removed) => {
                let sites = discards.unknown(&active.plan, &removed.discarded);
                discards.add(&sites, &maps);
                let loaded = active.loaded_later.get_mut();
                let loaded = loaded.unwrap_or_else(PoisonError::into_inner);
                if loaded.is_possible() {
                    loaded.look(process, &maps);
                }
            }
            Err(error) if is_partly_removed(error) => discards.end(),
            Err(_) => {}
        }
        let removed = match (removed, &active.data) {
            (Err(error), Some(data)) => {
                let data = DataSource::Shared(data);
                // The arenas record which tool has replaced this one, even after the process has
                // exited.
                let mut arenas = active.arenas.iter();
                arenas.try_for_each(|arena| refuse_if_removal_began(process, &data, arena))?;
                if !process.has_exited() && !target.opened.has_executed(&error) {
                    return Err(error);
                }
                // Nothing is left that could be removed.
                Removed::nothing(read_results(&data, None)?)
            }
            (removed, _) => removed?,
        };
        let (counts, pairs, calls, histograms, keyed, events) = removed.results;
        let (keyed_counts, keyed_histograms, keyed_times) = keyed;
        Ok(ObservationReport {
            counts,
            latencies: Latency::of_pairs(&active.plan.pairs, &pairs, &active.ticks),
            function_latencies: calls.latencies(&active.plan, &active.ticks),
            histograms,
            keyed_counts,
            keyed_histograms,
            keyed_times,
            events,
            discarded: discards.found(),
            stopped: stop_time,
            still_mapped: removed.still_mapped,
            unrestored: Vec::new(),
        })
    }

    /// Checks, without the process, that no other tool has replaced this observation.
    fn refuse_if_removal_began(&self) -> Result<()> {
        let (process, active) = (self.target.opened.process(), &self.active);
        let Some(data) = &active.data else {
            return Ok(());
        };
        let data = DataSource::Shared(data);
        let mut arenas = active.arenas.iter();
        arenas.try_for_each(|arena| refuse_if_removal_began(process, &data, arena))
    }

    fn refuse_removed(&self) -> Result<()> {
        if self.is_removed {
            let pid = self.target.pid();
            return Err(Error::of_process(pid, ObserveError::Removed));
        }
        Ok(())
    }

    /// Reads recorded data.
    fn read<T>(&self, read: impl FnOnce(&DataSource<'_>) -> Result<T>) -> Result<T> {
        self.refuse_removed()?;
        self.look_for_gaps();
        self.renew_pages_of_filters();
        let active = &self.active;
        let read = |source: &DataSource<'_>, _: Option<&_>| read(source);
        read_from(&self.target, &active.arenas, &active.data, read)
    }
}

/// Reads recorded data, and checks that they belong to this observation. `read` is also passed the
/// memory of the process, unless it has exited.
fn read_from<T>(
    target: &Target,
    arenas: &[Arena],
    data: &Option<SharedData>,
    read: impl FnOnce(&DataSource<'_>, Option<&ProcessMemory>) -> Result<T>,
) -> Result<T> {
    let memory = target.opened.unshadowed_memory_to_read();
    if data.is_some() {
        let memory = memory.as_ref().ok();
        return read(&source_of(target, arenas, data, memory), memory);
    }
    let memory = memory?;
    let read = read(
        &source_of(target, arenas, data, Some(&memory)),
        Some(&memory),
    );
    // Afterwards: the observation may have been removed while we read.
    refuse_taken_over(target, &memory, arenas)
        .and(read)
        .map_err(|error| target.opened.executed_or(error))
}

/// Returns where the recorded data are read.
fn source_of<'d>(
    target: &Target,
    arenas: &'d [Arena],
    data: &'d Option<SharedData>,
    memory: Option<&'d ProcessMemory>,
) -> DataSource<'d> {
    match data {
        Some(data) => DataSource::Shared(data),
        None => DataSource::Process(ProcessData {
            pid: target.pid(),
            memory,
            arenas,
        }),
    }
}

/// Checks that arenas are still installed. If another tool is taking over, waits until it is done:
/// it may fail, and if it does not, the error can name it.
fn refuse_taken_over(target: &Target, memory: &ProcessMemory, arenas: &[Arena]) -> Result<()> {
    let process = target.opened.process();
    let checked = refuse_replaced(process, memory, arenas);
    if !checked.as_ref().is_err_and(is_replaced) {
        return checked;
    }
    let _lock = UpdateLock::wait(process, Instant::now() + TAKING_OVER);
    refuse_replaced(process, memory, arenas)
}

/// Returns whether a removal that failed may have restored sites.
fn is_partly_removed(error: &Error) -> bool {
    matches!(error.effect(), Effect::HalfChanged | Effect::StillMapped)
}

fn is_already_observed(error: &Error) -> bool {
    let kind = error.kind();
    matches!(
        kind,
        ErrorKind::Observe(ObserveError::AlreadyObserved { .. })
    )
}

fn is_follower_lost(error: &Error) -> bool {
    let kind = error.kind();
    matches!(kind, ErrorKind::Process(ProcessError::FollowerLost))
}

fn is_replaced(error: &Error) -> bool {
    let kind = error.kind();
    matches!(kind, ErrorKind::Observe(ObserveError::Replaced { .. }))
}
