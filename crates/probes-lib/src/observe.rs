//! [`Observer`]: counts hits inside a process, takes the times between them, and shows them one by one,
//! without the kernel.
//!
//! ```text
//! what is wanted ─▶ roles ─▶ lay out ─▶ stop ─▶ map memory ─▶ write trampolines ─▶ patch_to_trampolines ─▶ let go
//! observation       role     arena      sys     detour        trampoline           rewrite
//!                            shared
//!               counts · pairs · events, as long as wanted: counts, latency, ring ─▶ events
//! let go ◀─ unmap ◀─ nobody inside? ◀─ give sites their own calls back ◀─ stop
//! ```
//!
//! What is needed to undo it lies in the process ([`arena`]), so that whoever comes next can do it if
//! we are killed.

pub(crate) mod install;
pub(crate) mod layout;
mod observation;
mod placement;
mod plan;
mod read;
pub(crate) mod shadow;
pub(crate) mod trampoline;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::observation::Observation;
pub use self::read::counts::{Counts, SiteHits};
pub use self::read::events::{Event, Events};
pub use self::read::latency::Latency;
pub use self::read::value::Value;

use crate::error::{
    Effect, Error, ErrorKind, MemoryError, MemoryPart, ObserveError, ProcessError, Result,
};
use crate::inject::injector::{Injector, RedirectMode};
use crate::memory::ReadMemory;
use crate::observe::install::context::{InstallContext, read, refuse_replaced};
use crate::observe::install::prepare::Prepared;
use crate::observe::install::remove::{OrphanedMappings, RemovedObservation, remove};
use crate::observe::layout::arena::Arena;
use crate::observe::layout::shared::PAIR_LEN;
use crate::observe::plan::Role;
use crate::observe::read::data_source::{DataSource, SharedData};
use crate::observe::read::events::{EventReader, PAGES_VALID_FOR};
use crate::observe::shadow::find;
use crate::process::Process;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::program::Program;
use crate::process::seccomp::OwnFilters;
use crate::site::SITE_LEN;
use crate::sys::ticks::{Clock, Ticks};
use crate::target::Target;
use crate::trace::tracer::with_tracer;
use crate::update::lock::UpdateLock;
use crate::update::options::Options;

/// Learns of the hits of probes of a process until it is removed. Whether probes are enabled is not
/// touched: those that are off are observed as well, and can be switched meanwhile.
///
/// If it is dropped without [`Observer::remove`], the process goes on as it is, which does no harm;
/// [`Target::clean`] puts everything back.
pub struct Observer<'t> {
    target: &'t Target,
    options: Options,
    active: ActiveObservation,
    watch: EventReader,
    stopped: Duration,
    is_removed: bool,
}

/// An observation that has begun: to be had from [`Launched::observed`](crate::Launched::observed).
pub struct Installed {
    active: ActiveObservation,
    watch: EventReader,
    options: Options,
    stopped: Duration,
}

/// What is observed, and where that is kept.
struct ActiveObservation {
    program: Arc<Program>,
    arenas: Vec<Arena>,
    /// Of each entry of each arena, its index in the program.
    sites: Vec<Vec<usize>>,
    /// By index in the program.
    roles: Vec<Role>,
    pairs: Vec<(String, String)>,
    /// What the process shares with us, and is there when it has ended, if it does.
    data: Option<SharedData>,
    ticks: Ticks,
}

/// All that was results of the hits of a process.
#[derive(Clone, Debug)]
pub struct Observed {
    /// To the last hit.
    pub counts: Counts,
    /// Of each pair, in the order in which they were wanted.
    pub latencies: Vec<Latency>,
    /// Those that had not been read yet.
    pub events: Events,
    /// How long the process stop_time still to be put back, at most, all in all; zero if it had ended.
    pub stopped: Duration,
    /// As [`CleanReport::still_mapped`].
    pub still_mapped: u64,
}

/// What was put back of observations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CleanReport {
    /// How many sites have got their own calls back.
    pub sites: usize,
    /// How many bytes that were mapped into the process stay there, which does no harm: a thread may
    /// still return to a trampoline from the handler of a signal, as far as can be told by its stack, or the
    /// process has set itself a seccomp filter since. [`Target::clean`] unmaps them when that is over.
    pub still_mapped: u64,
}

impl Target {
    /// Learns of hits from now on. What an earlier observation has left is put back first.
    ///
    /// # Errors
    ///
    /// If a probe is not there, or none that is wanted has a site; if a site does not hold what its file
    /// says, or its text cannot be changed ([`MemoryError::Shared`], [`MemoryError::GigaText`]); if the
    /// process cannot be stopped, or memory cannot be mapped into it: each thread has set itself a
    /// seccomp filter ([`ObserveError::SeccompFiltered`]), or its kernel refuses; if times are wanted, and the
    /// processors' clocks do not go evenly ([`ObserveError::NoInvariantTsc`]).
    /// [`Error::effect`](crate::Error::effect) says what it is left with.
    pub fn observe(&self, observation: &Observation, options: Options) -> Result<Observer<'_>> {
        self.try_observe(observation, options)
            .map_err(|error| self.or_executed(error).leaving(Effect::NothingChanged))
    }

    fn try_observe(&self, observation: &Observation, options: Options) -> Result<Observer<'_>> {
        let process = self.process();
        process.refuse_self_and_ancestors()?;
        observation.roles(&self.current_image()?.program)?;
        let _lock = UpdateLock::wait(process, Instant::now() + options.deadline)?;
        let threads = process.threads().and_then(|mut list| list.read());
        let threads = threads.map_err(|source| process.exited_or(source))?;
        OwnFilters::of(process).refuse_all(threads)?;
        let mut cleaned = self.remove_stale(options)?;
        let begun = Instant::now();
        loop {
            let error = match self.install(observation, options) {
                Ok(installed) => return Ok(installed.observer(self)),
                Err(error) => error,
            };
            // What it has come to is put back as if we had been killed.
            match self.remove_stale(options) {
                Err(left) if process.has_exited() || self.has_executed(&left) => {
                    return Err(error.with_effect(Effect::None));
                }
                Err(left) => return Err(left.leaving(Effect::HalfChanged)),
                Ok(again) => cleaned.add(again),
            }
            // The next look does not find what has been unloaded.
            let is_passing = matches!(
                error.kind(),
                ErrorKind::Process(ProcessError::KeepsChanging)
                    | ErrorKind::Memory(MemoryError::NotMapped { .. })
            );
            if !is_passing || begun.elapsed() > options.deadline {
                let effect = cleaned.effect(error.effect());
                return Err(error.with_effect(effect));
            }
        }
    }

    /// The caller has the lock. If it fails, something may be left.
    fn install(&self, observation: &Observation, options: Options) -> Result<Installed> {
        let process = self.process();
        let image = self.current_image()?;
        let program = image.program.clone();
        let roles = observation.roles(&program)?;
        let sites = program.sites_by_address();
        let sites = sites.filter(|site| !roles[site.index()].is_empty());
        let ranges = sites.map(|site| (site.address, SITE_LEN as u64, MemoryPart::Site));
        image.mappings(process, ranges, options.gigatext)?;
        let memory = self.bare_memory()?;
        let mut prepared = Prepared::of(process, program, &memory, observation)?;
        let (stopped, has_tids) = with_tracer(&[process], |tracer| {
            let begun = Instant::now();
            let work = InstallContext::of(Injector {
                tracer,
                process,
                memory: &memory,
                code_cave: prepared.code_cave,
                limit: options.deadline,
                mode: RedirectMode::AmongOthers,
            });
            let stopped = tracer.stop(process, options.deadline)?;
            let (stopped, has_tids) = prepared.install(&work, stopped, None)?;
            stopped.release();
            Ok((begun.elapsed(), has_tids))
        })?;
        Ok(prepared.into_installed(has_tids, None, stopped, options))
    }

    /// Puts back what observations have left in the process; says what that was.
    ///
    /// # Errors
    ///
    /// As of [`Observer::remove`]. [`Error::effect`](crate::Error::effect) says what it is left with.
    pub fn clean(&self, options: Options) -> Result<CleanReport> {
        let clean = || {
            let process = self.process();
            process.refuse_self_and_ancestors()?;
            let _lock = UpdateLock::wait(process, Instant::now() + options.deadline)?;
            self.remove_stale(options)
        };
        clean().map_err(|error| self.or_executed(error).leaving(Effect::NothingChanged))
    }

    /// The caller has the lock.
    fn remove_stale(&self, options: Options) -> Result<CleanReport> {
        let memory = self.bare_memory()?;
        let begun = Instant::now();
        let mut cleaned = CleanReport::default();
        loop {
            let maps = read_maps(self.process())?;
            let arenas = find(&memory, &maps);
            let left = OrphanedMappings::find(self.process(), &memory, &maps, &arenas);
            let is_clear = left.is_none();
            if !is_clear && begun.elapsed() > options.deadline {
                return cleaned.unless_pending(self.pid());
            }
            cleaned.still_mapped = 0;
            if !arenas.is_empty() || !is_clear {
                let done = remove(self.process(), &memory, &arenas, left, options, || Ok(()));
                let done = done.map_err(|error| match cleaned.sites {
                    0 => error,
                    _ => error.leaving(Effect::Restored),
                })?;
                cleaned.add(CleanReport {
                    sites: done.sites,
                    still_mapped: done.still_mapped,
                });
            }
            // A thread that was sent to map memory by somebody who was killed may do so only now.
            if is_clear {
                return Ok(cleaned);
            }
        }
    }
}

impl CleanReport {
    /// Takes in what was put back later: what is still mapped is all that is.
    fn add(&mut self, later: CleanReport) {
        self.sites += later.sites;
        self.still_mapped = later.still_mapped;
    }

    /// What there is to say if a thread is still on a detour: it may map memory after all.
    fn unless_pending(self, pid: i32) -> Result<CleanReport> {
        match self.still_mapped {
            0 => {
                Err(Error::of_process(pid, ProcessError::KeepsChanging)
                    .leaving(Effect::StillMapped))
            }
            _ => Ok(self),
        }
    }

    /// What an observation that has not begun leaves behind, whose failure had this effect before it was
    /// put back.
    fn effect(&self, before: Effect) -> Effect {
        let is_written = matches!(before, Effect::Restored | Effect::HalfChanged);
        match self.still_mapped {
            0 if self.sites == 0 && !is_written => Effect::NothingChanged,
            0 => Effect::Restored,
            _ => Effect::StillMapped,
        }
    }
}

impl Observer<'_> {
    /// How long the process stop_time still to be observed, at most.
    pub fn stopped(&self) -> Duration {
        self.stopped
    }

    /// The hits so far. Does not stop the process.
    ///
    /// # Errors
    ///
    /// If the process has ended or executed another program; if another observation of it has begun, which
    /// has put an end to this one ([`ObserveError::Replaced`]).
    pub fn counts(&self) -> Result<Counts> {
        self.refuse_removed()?;
        let pid = self.target.pid();
        let read = |source: &DataSource<'_>, _: Option<&_>| self.active.counts(pid, source);
        self.active.read(self.target, read)
    }

    /// The times so far of each pair. Does not stop the process.
    ///
    /// # Errors
    ///
    /// As of [`Observer::counts`].
    pub fn latencies(&self) -> Result<Vec<Latency>> {
        self.refuse_removed()?;
        let pid = self.target.pid();
        let read = |source: &DataSource<'_>, _: Option<&_>| self.active.read_pairs(pid, source);
        let pairs = self.active.read(self.target, read)?;
        Ok(self.active.latencies(&pairs))
    }

    /// The hits to be watched that have come since they were last asked for. Does not stop the process. It
    /// holds about a megabyte of them for each of 16 groups of threads: whoever asks seldom loses some.
    ///
    /// # Errors
    ///
    /// As of [`Observer::counts`].
    pub fn events(&mut self) -> Result<Events> {
        self.refuse_removed()?;
        let renewed = self.renew_pages();
        renewed.map_err(|error| self.target.or_executed(error))?;
        let process = self.target.process();
        let clock = self.active.ticks.clock();
        let (active, watch) = (&self.active, &mut self.watch);
        active.read(self.target, |source, memory| {
            read_events(watch, process, source, memory, &clock, false)
        })
    }

    /// Tells the trampolines which pages can be read by now, if it is time.
    fn renew_pages(&mut self) -> Result<()> {
        let (process, sharing) = (self.target.process(), self.active.arenas.first());
        let sharing = sharing.filter(|_| self.watch.is_due());
        // Nobody else is to begin to observe it meanwhile; if somebody does, it is told next time.
        let lock = sharing.map(|_| UpdateLock::wait(process, Instant::now()));
        if let (Some(sharing), Some(Ok(_lock))) = (sharing, lock) {
            let until = self.active.ticks.ahead(PAGES_VALID_FOR);
            let changes = self.watch.renew(&read_maps(process)?, until);
            let memory = self.target.bare_memory()?;
            refuse_replaced(process.pid(), &memory, &self.active.arenas)?;
            install::context::put_shared(process.pid(), &memory, sharing, &changes)?;
        }
        Ok(())
    }

    /// Puts everything back; says what was results, to the last hit. Of a program that was launched to be
    /// observed, that is known when it has ended, too.
    ///
    /// # Errors
    ///
    /// If the process has ended or executed another program; if it cannot be stopped, or another has the
    /// lock to change it: then it stays observed, nothing is lost, and it can be tried again. If another
    /// observation of it has begun ([`ObserveError::Replaced`]), or this one has been removed
    /// ([`ObserveError::Removed`]).
    pub fn remove(&mut self) -> Result<Observed> {
        self.refuse_removed()?;
        let removed = self.try_to_remove();
        self.is_removed = removed.is_ok();
        removed.map_err(|error| self.target.or_executed(error))
    }

    fn refuse_removed(&self) -> Result<()> {
        let pid = self.target.pid();
        match self.is_removed {
            true => Err(Error::of_process(pid, ObserveError::Removed)),
            false => Ok(()),
        }
    }

    fn try_to_remove(&mut self) -> Result<Observed> {
        let process = self.target.process();
        let (active, watch) = (&self.active, &mut self.watch);
        let clock = active.ticks.clock();
        let mut read_results = |source: &DataSource<'_>, memory: Option<&_>| {
            let counts = active.counts(process.pid(), source)?;
            let pairs = active.read_pairs(process.pid(), source)?;
            let events = read_events(watch, process, source, memory, &clock, true)?;
            Ok((counts, pairs, events))
        };
        let removed = remove_all(self.target, active, self.options, &mut read_results);
        let RemovedObservation {
            results: (counts, pairs, events),
            stopped,
            still_mapped,
            sites: _,
        } = match (removed, &active.data) {
            // Nothing of it is left that could be put back.
            (Err(error), Some(data))
                if process.has_exited() || self.target.has_executed(&error) =>
            {
                RemovedObservation {
                    results: read_results(&DataSource::Shared(data), None)?,
                    sites: 0,
                    still_mapped: 0,
                    stopped: Duration::ZERO,
                }
            }
            (removed, _) => removed?,
        };
        Ok(Observed {
            counts,
            latencies: active.latencies(&pairs),
            events,
            stopped,
            still_mapped,
        })
    }
}

impl Installed {
    /// The observer of the process, which has to be the one that was launched.
    pub fn observer(self, target: &Target) -> Observer<'_> {
        Observer {
            target,
            options: self.options,
            active: self.active,
            watch: self.watch,
            stopped: self.stopped,
            is_removed: false,
        }
    }
}

fn remove_all<T: Send>(
    target: &Target,
    active: &ActiveObservation,
    options: Options,
    read_results: &mut (impl FnMut(&DataSource<'_>, Option<&ProcessMemory>) -> Result<T> + Send),
) -> Result<RemovedObservation<T>> {
    let process = target.process();
    let _lock = UpdateLock::wait(process, Instant::now() + options.deadline)?;
    let memory = target.bare_memory()?;
    let read = || match &active.data {
        Some(data) => read_results(&DataSource::Shared(data), Some(&memory)),
        None => read_results(&DataSource::Process(&memory), Some(&memory)),
    };
    remove(process, &memory, &active.arenas, None, options, read)
}

/// `is_over` says that nobody writes any more.
fn read_events(
    watch: &mut EventReader,
    process: &Process,
    source: &DataSource<'_>,
    memory: Option<&ProcessMemory>,
    clock: &Clock,
    is_over: bool,
) -> Result<Events> {
    let events = watch.read(process, source, memory, clock, is_over);
    events.map_err(|source| {
        let (part, at) = (MemoryPart::ObservationData, watch.shared());
        Error::of_read(process.pid(), part, at, source)
    })
}

impl ActiveObservation {
    /// Reads what was results, and makes sure that it was ours. The memory of the process, too, can be
    /// read meanwhile, if there is one.
    fn read<T>(
        &self,
        target: &Target,
        read: impl FnOnce(&DataSource<'_>, Option<&ProcessMemory>) -> Result<T>,
    ) -> Result<T> {
        let memory = target.bare_memory_to_read();
        if let Some(data) = &self.data {
            return read(&DataSource::Shared(data), memory.as_ref().ok());
        }
        let memory = memory?;
        let read = read(&DataSource::Process(&memory), Some(&memory));
        // Afterwards: it may have been put back while we read.
        refuse_replaced(target.pid(), &memory, &self.arenas)
            .and(read)
            .map_err(|error| target.or_executed(error))
    }

    fn counts(&self, pid: i32, memory: &impl ReadMemory) -> Result<Counts> {
        let mut hits = vec![None; self.program.site_count()];
        for (arena, sites) in self.arenas.iter().zip(&self.sites) {
            let data = read(pid, memory, arena.data(), arena.counters_len())?;
            for (site, count) in sites.iter().zip(arena.hits(&data)) {
                hits[*site] = self.roles[*site].is_counted.then_some(count);
            }
        }
        let program = self.program.clone();
        Ok(Counts { program, hits })
    }

    /// The bytes of each pair.
    fn read_pairs(&self, pid: i32, memory: &impl ReadMemory) -> Result<Vec<Vec<u8>>> {
        let Some(sharing) = self.arenas.first() else {
            return Ok(Vec::new());
        };
        let place = |pair| sharing.shared_at().plus(sharing.shared.pair(pair));
        let pairs = 0..sharing.shared.pairs;
        pairs
            .map(|pair| read(pid, memory, place(pair), PAIR_LEN))
            .collect()
    }

    fn latencies(&self, pairs: &[Vec<u8>]) -> Vec<Latency> {
        if pairs.is_empty() {
            return Vec::new();
        }
        let nanoseconds = self.ticks.nanoseconds();
        let both = self.pairs.iter().zip(pairs);
        both.map(|(names, pair)| Latency::of(names, pair, nanoseconds))
            .collect()
    }
}
