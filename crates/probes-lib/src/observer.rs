//! [`Observer`]: records the hits of a process, until it is removed. The facade of [`observe`].
//!
//! [`observe`]: crate::observe

mod begin;
mod gaps;
mod removal;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::address::LiveAddr;
use crate::error::{Error, ObserveError, Result};
use crate::events_switch::EventsSwitch;
use crate::functions::Functions;
use crate::observe::RefusedFunction;
use crate::observe::install::data_mapping::SharedData;
use crate::observe::install::installed::{refuse_if_removal_began, refuse_replaced};
use crate::observe::install::map_and_write::Installed;
use crate::observe::install::observer_lock::ObserverLock;
use crate::observe::install::write_shared;
use crate::observe::layout::arena::Arena;
use crate::observe::read::ActiveObservation;
use crate::observe::read::calls::{FunctionLatency, RecordedCalls};
use crate::observe::read::counts::Counts;
use crate::observe::read::data_source::{DataSource, ProcessData};
use crate::observe::read::events::{EventBatch, EventReader, Events};
use crate::observe::read::histograms::read_histograms;
use crate::observe::read::keyed_times::KeyedTimes;
use crate::observe::read::keyed_values::KeyedHistograms;
use crate::observe::read::keys::KeyedCounts;
use crate::observe::read::latency::Latency;
use crate::observe::read::latency::pair_data::{HistogramPart, read_pairs};
use crate::observe::read::values::ValueHistogram;
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::runtime_events::RuntimeEvents;
use crate::select::function::{CollectorWork, FunctionSelector};
use crate::target::Target;
use crate::update::code_digest::CodeDigest;
use crate::update::lock::UpdateLock;
use crate::update::options::Options;
pub use removal::ObservationReport;

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

impl Observer {
    /// Returns the observer of an observation that is installed in the process of `target`.
    pub(crate) fn of(target: Target, installed: Installed, options: Options) -> Observer {
        Observer {
            target,
            options,
            code_digest: installed.code_digest,
            active: ActiveObservation::of(installed),
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

    /// Reads the histograms so far ([`Observation::histogram_of`](crate::Observation::histogram_of)): those of probes by name, then those of functions
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

    /// Reads how often hits had each key so far ([`Observation::by`](crate::Observation::by)); `None` if they are not counted by keys. Does
    /// not stop the process.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`].
    pub fn keyed_counts(&self) -> Result<Option<KeyedCounts>> {
        let (plan, arenas) = (&self.active.plan, &self.active.arenas);
        self.read(|source| KeyedCounts::read(self.target.pid(), source, plan, arenas))
    }

    /// Reads the histograms of all keys so far ([`Observation::histogram_of`](crate::Observation::histogram_of) and [`Observation::by`](crate::Observation::by)); `None` if
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

    /// Reads the times by keys so far ([`Observation::time_by`](crate::Observation::time_by)); `None` if they are not distinguished by keys. Does
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
    /// arguments they have ([`Observation::unknown_arguments`](crate::Observation::unknown_arguments)).
    pub fn functions_of_unknown_arguments(&self) -> usize {
        let functions = self.active.plan.functions.functions.iter();
        let watched = functions.filter_map(|function| function.watching().or(function.reported()));
        watched.filter(|it| !it.is_number_known()).count()
    }

    /// Whether calls for [`CollectorWork::StopTheWorld`](crate::CollectorWork) are among those that are observed: most of
    /// them may be no stop-the-world sections. The function is also called, and returns 0 at once, while another domain
    /// leads a section. Calls that return 1 are sections; if the observation asks for results, this is false.
    pub fn has_failed_sections(&self) -> bool {
        let stop_the_world = |it: &FunctionSelector| {
            matches!(it, FunctionSelector::Collector(CollectorWork::StopTheWorld))
        };
        let functions = &self.active.plan.functions;
        // If results are asked for, failed attempts are told by them.
        let all_calls = functions.functions.iter().any(|it| !it.evaluates_at_exits);
        all_calls && functions.selectors.iter().any(stop_the_world)
    }

    /// Reads the hits, since the last call, of the probes and functions that are watched. Does not stop the
    /// process, which keeps about a megabyte of them for each of 16 groups of threads: if this is
    /// called too seldom ([`Observer::next_read`]), events are dropped.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::counts`]; up to 50 ms later, if nothing was hit meanwhile, or no argument is an OCaml value.
    pub fn events(&mut self) -> Result<Events> {
        self.event_batch().map(EventBatch::into_events)
    }

    /// Reads the hits as [`Observer::events`] does, to be decoded one after the other.
    ///
    /// # Errors
    ///
    /// Same as [`Observer::events`].
    pub fn event_batch(&mut self) -> Result<EventBatch<'_>> {
        self.refuse_removed()?;
        self.look_for_gaps();
        if let Err(error) = self.renew_pages() {
            // What has been recorded in a shared file can still be read.
            if self.active.data.is_none() || !error.is_replaced() {
                return Err(self.target.opened.executed_or(error));
            }
        }
        let clock = self.active.ticks.clock();
        let (target, active) = (&self.target, &mut self.active);
        let process = target.opened.process();
        let reader = active.events.get_mut();
        let reader = reader.unwrap_or_else(PoisonError::into_inner);
        EventBatch::of(reader, process, clock, |reader| {
            let rings = source_of(target, &active.arenas, &active.data, None);
            let heads = reader.heads(&rings);
            if reader.has_nothing_new(heads.as_ref()) {
                return Ok((reader.nothing(), None));
            }
            if heads.is_some() && !reader.is_full_reading_needed() {
                // Records that carry the number of this observation are its own. If they do not, the reading below
                // finds out why.
                if let Ok(beside) = reader.read_rings(process, &rings, heads, false) {
                    return Ok((beside, None));
                }
            }
            let read = |source: &DataSource<'_>| reader.read_records(process, source, heads, false);
            read_with_memory(target, &active.arenas, &active.data, read)
        })
    }

    /// Returns how long to wait before the next [`Observer::events`]: 2 ms, which is enough for some million hits a second;
    /// if none has come for a tenth of a second, up to 10 ms, which is enough for a million.
    pub fn next_read(&self) -> Duration {
        self.lock_events().next_read()
    }

    fn lock_events(&self) -> MutexGuard<'_, EventReader> {
        let events = self.active.events.lock();
        events.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether each reading also updates the table of memory that trampolines may read. Then read at least five
    /// times a second; otherwise there are more hits of which conditions cannot be decided.
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
        let mut events = self.lock_events();
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

    /// Checks, without the process, that no other tool has replaced this observation.
    fn refuse_if_removal_began(&self) -> Result<()> {
        let (process, active) = (self.target.opened.process(), &self.active);
        let Some(data) = &active.data else {
            return Ok(());
        };
        let data = DataSource::Shared(data);
        unless_taken_over(process, || {
            let mut arenas = active.arenas.iter();
            arenas.try_for_each(|arena| refuse_if_removal_began(process, &data, arena))
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
        self.look_for_gaps();
        self.renew_pages_of_filters();
        let active = &self.active;
        let read = read_with_memory(&self.target, &active.arenas, &active.data, read);
        read.map(|(read, _)| read)
    }
}

/// Reads recorded data, and checks that they belong to this observation. Also returns the memory of the process, unless it has
/// exited.
fn read_with_memory<T>(
    target: &Target,
    arenas: &[Arena],
    data: &Option<SharedData>,
    read: impl FnOnce(&DataSource<'_>) -> Result<T>,
) -> Result<(T, Option<ProcessMemory>)> {
    let memory = target.opened.unshadowed_memory_to_read();
    if data.is_some() {
        let memory = memory.ok();
        let source = source_of(target, arenas, data, memory.as_ref());
        return read(&source).map(|read| (read, memory));
    }
    let memory = memory?;
    let read = read(&source_of(target, arenas, data, Some(&memory)));
    // Afterwards: the observation may have been removed while we read.
    let checked = refuse_taken_over(target, &memory, arenas).and(read);
    let read = checked.map_err(|error| target.opened.executed_or(error))?;
    Ok((read, Some(memory)))
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

/// Checks that arenas are still installed.
fn refuse_taken_over(target: &Target, memory: &ProcessMemory, arenas: &[Arena]) -> Result<()> {
    let process = target.opened.process();
    unless_taken_over(process, || refuse_replaced(process, memory, arenas))
}

/// Runs a check that fails if an observation is replaced. If another tool is taking over, waits until it is done, and
/// checks again: the other tool may fail, and if it does not, the error can name it.
fn unless_taken_over(process: &Process, check: impl Fn() -> Result<()>) -> Result<()> {
    let checked = check();
    if !checked.as_ref().is_err_and(Error::is_replaced) {
        return checked;
    }
    let _lock = UpdateLock::wait(process, Instant::now() + TAKING_OVER);
    check()
}
