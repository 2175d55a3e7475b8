//! [`Observer`]: records the hits of a process, until it is removed. The facade of [`observe`].
//!
//! [`observe`]: crate::observe

use std::time::{Duration, Instant};

use crate::error::{
    Effect, Error, ErrorKind, MemoryError, MemoryPart, ObserveError, ProcessError, Result,
};
use crate::observe::Observation;
use crate::observe::install::prepare::{install, write_shared};
use crate::observe::install::remove::{CleanReport, Removed, remove, remove_stale};
use crate::observe::installed::refuse_replaced;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::ActiveObservation;
use crate::observe::read::counts::Counts;
use crate::observe::read::data_source::{DataSource, SharedData};
use crate::observe::read::events::{Events, PAGES_VALID_FOR};
use crate::observe::read::latency::{Latency, read_pairs};
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;
use crate::site::SITE_LEN;
use crate::target::Target;
use crate::update::lock::UpdateLock;
use crate::update::options::Options;

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
    stop_time: Duration,
    is_removed: bool,
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
    /// Up to the last hit.
    pub counts: Counts,
    /// Of each pair, in the order of the [`Observation`].
    pub latencies: Vec<Latency>,
    /// Those that have not been read yet.
    pub events: Events,
    /// How long the process was stopped to remove the observation, at most, all in all; zero if it had
    /// exited.
    pub stopped: Duration,
    /// See [`CleanReport::still_mapped`].
    pub still_mapped: u64,
}

impl Target {
    /// Begins to record hits. An observation of this process that another tool has left is removed first.
    ///
    /// # Errors
    ///
    /// - A probe is missing, or no probe that is selected has a site.
    /// - A site does not hold what its file says, or its code cannot be changed
    ///   ([`MemoryError::Shared`], [`MemoryError::GigaText`]).
    /// - The process cannot be stopped, or memory cannot be mapped into it, because each thread has set a
    ///   seccomp filter ([`ObserveError::SeccompFiltered`]), or the kernel refuses.
    /// - Times are wanted, and this machine has no invariant TSC ([`ObserveError::NoInvariantTsc`]).
    ///
    /// [`Error::effect`](crate::Error::effect) says what is left behind.
    pub fn observe(&self, observation: &Observation, options: Options) -> Result<Observer> {
        self.try_observe(observation, options).map_err(|error| {
            self.opened
                .or_executed(error)
                .leaving(Effect::NothingChanged)
        })
    }

    fn try_observe(&self, observation: &Observation, options: Options) -> Result<Observer> {
        let process = self.opened.process();
        process.refuse_self_and_ancestors()?;
        ObservationPlan::of(observation, self.opened.current_image()?.program.clone())?;
        let _lock = UpdateLock::wait(process, Instant::now() + options.deadline)?;
        let threads = process.threads().and_then(|mut list| list.read());
        let threads = threads.map_err(|source| process.exited_or(source))?;
        OwnFilters::of(process).refuse_all(threads)?;
        let mut cleaned = self.remove_stale(options)?;
        let begun = Instant::now();
        loop {
            let error = match self.install(observation, options) {
                Ok(observer) => return Ok(observer),
                Err(error) => error,
            };
            // What has been installed so far is removed as if we had been killed.
            match self.remove_stale(options) {
                Err(left) if process.has_exited() || self.opened.has_executed(&left) => {
                    return Err(error.with_effect(Effect::None));
                }
                Err(left) => return Err(left.leaving(Effect::HalfChanged)),
                Ok(again) => cleaned.add(again),
            }
            // If an object has been unloaded meanwhile, the next attempt does not find it.
            let is_transient = matches!(
                error.kind(),
                ErrorKind::Process(ProcessError::KeepsChanging)
                    | ErrorKind::Memory(MemoryError::NotMapped { .. })
            );
            if !is_transient || begun.elapsed() > options.deadline {
                let effect = cleaned.effect(error.effect());
                return Err(error.with_effect(effect));
            }
        }
    }

    /// Installs an observation. If it fails, parts of it may be left.
    fn install(&self, observation: &Observation, options: Options) -> Result<Observer> {
        let process = self.opened.process();
        let image = self.opened.current_image()?;
        let plan = ObservationPlan::of(observation, image.program.clone())?;
        let addresses = plan.points.iter().map(|planned| planned.point.address);
        let ranges = addresses.map(|address| (address, SITE_LEN as u64, MemoryPart::Site));
        image.mappings(process, ranges, options.gigatext)?;
        let memory = self.opened.bare_memory()?;
        let (active, stop_time) = install(process, &memory, plan, options.deadline)?;
        Ok(Observer::of(self.clone(), active, stop_time, options))
    }

    /// Removes the observations that killed tools, or dropped [`Observer`]s, have left in the process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::remove`]. [`Error::effect`](crate::Error::effect) says what is left behind.
    pub fn clean(&self, options: Options) -> Result<CleanReport> {
        let clean = || {
            let process = self.opened.process();
            process.refuse_self_and_ancestors()?;
            let _lock = UpdateLock::wait(process, Instant::now() + options.deadline)?;
            self.remove_stale(options)
        };
        clean().map_err(|error| {
            self.opened
                .or_executed(error)
                .leaving(Effect::NothingChanged)
        })
    }

    fn remove_stale(&self, options: Options) -> Result<CleanReport> {
        remove_stale(
            self.opened.process(),
            &self.opened.bare_memory()?,
            options.deadline,
        )
    }
}

impl Observer {
    /// Returns the observer of an observation that is installed in the process of `target`.
    pub(crate) fn of(
        target: Target,
        active: ActiveObservation,
        stop_time: Duration,
        options: Options,
    ) -> Observer {
        Observer {
            target,
            options,
            active,
            stop_time,
            is_removed: false,
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

    /// Reads the counts so far. Does not stop the process.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed another program; if another observer has replaced this one
    /// ([`ObserveError::Replaced`]), or it has been removed ([`ObserveError::Removed`]).
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
        let pairs = self.read(|source| read_pairs(self.target.pid(), source, arenas))?;
        Ok(Latency::of_pairs(&plan.pairs, &pairs, &self.active.ticks))
    }

    /// Reads the hits of probes that are watched since the last call. Does not stop the process, which
    /// keeps about a megabyte of them for each of 16 groups of threads: if this is called too seldom,
    /// events are dropped.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn events(&mut self) -> Result<Events> {
        self.refuse_removed()?;
        let renewed = self.renew_pages();
        renewed.map_err(|error| self.target.opened.or_executed(error))?;
        let clock = self.active.ticks.clock();
        let (target, active) = (&self.target, &mut self.active);
        let (process, events) = (target.opened.process(), &mut active.events);
        read_from(target, &active.arenas, &active.data, |source, memory| {
            events.read(process, source, memory, &clock, false)
        })
    }

    /// Renews the table of pages that trampolines may read, if it is time.
    fn renew_pages(&mut self) -> Result<()> {
        let (process, sharing) = (self.target.opened.process(), self.active.arenas.first());
        let sharing = sharing.filter(|_| self.active.events.is_due());
        // No other observer may replace this one meanwhile; if one is just doing so, it is seen next time.
        let lock = sharing.map(|_| UpdateLock::wait(process, Instant::now()));
        if let (Some(sharing), Some(Ok(_lock))) = (sharing, lock) {
            let until = self.active.ticks.ahead(PAGES_VALID_FOR);
            let writes = self.active.events.renew(&read_maps(process)?, until);
            let memory = self.target.opened.bare_memory()?;
            refuse_replaced(process.pid(), &memory, &self.active.arenas)?;
            write_shared(process.pid(), &memory, sharing, &writes)?;
        }
        Ok(())
    }

    /// Removes the observation, and returns all that it has recorded. If the program was launched to be
    /// observed, that is known even if it has exited.
    ///
    /// # Errors
    ///
    /// If the process has exited or executed another program; if it cannot be stopped, or another update
    /// is in progress: then it stays observed, nothing is dropped, and this can be called again. If
    /// another observer has replaced this one ([`ObserveError::Replaced`]), or it has been removed
    /// ([`ObserveError::Removed`]).
    pub fn remove(&mut self) -> Result<ObservationReport> {
        self.refuse_removed()?;
        let removed = self.try_to_remove();
        self.is_removed = removed.is_ok();
        removed.map_err(|error| self.target.opened.or_executed(error))
    }

    fn try_to_remove(&mut self) -> Result<ObservationReport> {
        let (target, active) = (&self.target, &mut self.active);
        let (process, options) = (target.opened.process(), self.options);
        let (pid, clock) = (process.pid(), active.ticks.clock());
        let mut read_results = |source: &DataSource<'_>, memory: Option<&ProcessMemory>| {
            let counts = Counts::read(pid, source, &active.plan, &active.arenas)?;
            let pairs = read_pairs(pid, source, &active.arenas)?;
            let events = active.events.read(process, source, memory, &clock, true)?;
            Ok((counts, pairs, events))
        };
        let mut remove_all = || {
            let _lock = UpdateLock::wait(process, Instant::now() + options.deadline)?;
            let memory = target.opened.bare_memory()?;
            let source = match &active.data {
                Some(data) => DataSource::Shared(data),
                None => DataSource::Process(&memory),
            };
            let read = || read_results(&source, Some(&memory));
            remove(process, &memory, &active.arenas, options.deadline, read)
        };
        let removed = match (remove_all(), &active.data) {
            // Nothing is left that could be removed.
            (Err(error), Some(data))
                if process.has_exited() || target.opened.has_executed(&error) =>
            {
                Removed::nothing(read_results(&DataSource::Shared(data), None)?)
            }
            (removed, _) => removed?,
        };
        let (counts, pairs, events) = removed.results;
        Ok(ObservationReport {
            counts,
            latencies: Latency::of_pairs(&active.plan.pairs, &pairs, &active.ticks),
            events,
            stopped: removed.stop_time,
            still_mapped: removed.still_mapped,
        })
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
        let active = &self.active;
        let read = |source: &DataSource<'_>, _: Option<&_>| read(source);
        read_from(&self.target, &active.arenas, &active.data, read)
    }
}

/// Reads recorded data, and checks that they were of this observation. `read` gets the memory of the
/// process as well, unless it has exited.
fn read_from<T>(
    target: &Target,
    arenas: &[Arena],
    data: &Option<SharedData>,
    read: impl FnOnce(&DataSource<'_>, Option<&ProcessMemory>) -> Result<T>,
) -> Result<T> {
    let memory = target.opened.bare_memory_to_read();
    if let Some(data) = data {
        return read(&DataSource::Shared(data), memory.as_ref().ok());
    }
    let memory = memory?;
    let read = read(&DataSource::Process(&memory), Some(&memory));
    // Afterwards: the observation may have been removed while we read.
    refuse_replaced(target.pid(), &memory, arenas)
        .and(read)
        .map_err(|error| target.opened.or_executed(error))
}
