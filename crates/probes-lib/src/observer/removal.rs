//! The end of an observation: its patches are removed, and all that it has recorded is read.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Effect, Error, ErrorKind, ObserveError, ProcessError, Result};
use crate::observe::DiscardedPatches;
use crate::observe::install::remove::{Removed, remove};
use crate::observe::read::calls::{FunctionLatency, RecordedCalls};
use crate::observe::read::counts::Counts;
use crate::observe::read::data_source::DataSource;
use crate::observe::read::events::Events;
use crate::observe::read::histograms::read_histograms;
use crate::observe::read::keyed_times::KeyedTimes;
use crate::observe::read::keyed_values::KeyedHistograms;
use crate::observe::read::keys::KeyedCounts;
use crate::observe::read::latency::Latency;
use crate::observe::read::latency::pair_data::{HistogramPart, PairData, read_pairs};
use crate::observe::read::values::ValueHistogram;
use crate::observer::{Observer, source_of};
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::update::lock::{UpdateLock, while_being_changed};
use crate::update::options::Options;

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
    /// Of each pair, in the order of the [`Observation`](crate::Observation).
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
    /// Sites and functions whose records are incomplete, because their patches were discarded.
    pub discarded: DiscardedPatches,
    /// See [`CleanReport::still_mapped`](crate::CleanReport::still_mapped).
    pub still_mapped: u64,
    /// The pids of forked processes that could not be restored, each with the error, if their hits were recorded, too
    /// ([`Observation::record_forked`](crate::Observation::record_forked)). [`Target::clean`](crate::Target::clean)
    /// restores each.
    pub unrestored: Vec<(i32, Arc<Error>)>,
}

impl Observer {
    /// Removes the observation, and returns all that it has recorded. If the program was launched
    /// to be observed, its records can be read even if it has exited.
    ///
    /// # Errors
    ///
    /// - The process has exited or executed a new program.
    /// - It cannot be stopped, or another update is in progress. Then it stays observed, nothing is
    ///   dropped, and this can be called again.
    /// - Another observer has replaced this one ([`ObserveError::Replaced`]), or this one has been removed
    ///   ([`ObserveError::Removed`]). If the
    ///   replacing tool was killed, what it has left is removed all the same.
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
        // Looks again: children that were about to call execve(2) have done so by now.
        self.lock_forked()
            .look(self.target.opened.process(), &self.active.arenas);
        self.is_removed = removed.is_ok();
        if self.is_removed {
            (self.active.lock, self.successor_lock) = (None, None);
        }
        removed.map_err(|error| {
            self.clean_after_dead_successor(&error);
            if self.active.data.is_some() && error.is_replaced() {
                return error;
            }
            self.target.opened.executed_or(error)
        })
    }

    /// If the tool that has replaced this observer has exited, removes what it has left: it may have been killed
    /// before it had restored all points of this observation, or before it had removed its own observation.
    fn clean_after_dead_successor(&mut self, error: &Error) {
        let ErrorKind::Observe(ObserveError::Replaced { observer }) = error.kind() else {
            return;
        };
        if !observer.as_ref().is_some_and(|by| by.is_alive) {
            // `clean` does not take this observation for an orphaned one as long as the lock is held.
            self.active.lock = None;
            let options = self.options_to_clean();
            // If that fails, the next tool removes it, or reports why it cannot.
            let _ = self.target.clean(options);
        }
    }

    /// Closes what is open of the process, if it was reaped: nothing can be read of it any more, except what was recorded
    /// in a file. For tools that follow many processes: thousands may have exited.
    ///
    /// ```no_run
    /// # fn read(observers: &mut [probes_lib::Observer]) {
    /// for observer in observers.iter_mut().filter(|it| it.target().has_exited()) {
    ///     observer.close_if_reaped();
    /// }
    /// # }
    /// ```
    pub fn close_if_reaped(&mut self) {
        let is_reaped = self.target.opened.process().close_if_reaped();
        // Forked processes that record in the same file are observed with this lock.
        if is_reaped && self.active.data.is_none() {
            (self.active.lock, self.successor_lock) = (None, None);
        }
    }

    /// Restores the forked processes, if their hits were recorded, too. Returns the errors of those that could not be
    /// restored.
    fn restore_all_forked(&self) -> Vec<(i32, Arc<Error>)> {
        let pids = self.recorded_forked().into_iter();
        let failed = pids.filter_map(|pid| Some((pid, Arc::new(self.restore_forked(pid).err()?))));
        failed.collect()
    }

    /// Restores a forked process ([`Observer::records_forked`]): its copies of the trampolines are removed like those
    /// of a tool that was killed. [`Observer::remove`] does the same, unless the parent has exited.
    ///
    /// # Errors
    ///
    /// See [`Target::clean`](crate::Target::clean). It is no error if the process has exited or executed a program.
    pub fn restore_forked(&self, pid: i32) -> Result<()> {
        let options = self.options_to_clean();
        let child = self.target.open_forked(pid);
        match child.and_then(|child| child.clean(options)) {
            Err(error) if !error.is_program_gone() => Err(error),
            _ => Ok(()),
        }
    }

    /// The options with which orphaned observations are removed.
    fn options_to_clean(&self) -> Options {
        Options {
            take_over: false,
            ..self.options
        }
    }

    fn try_to_remove(&self) -> Result<ObservationReport> {
        let (target, active, options) = (&self.target, &self.active, self.options);
        let process = target.opened.process();
        let mut maps = Vec::new();
        let mut before = None;
        let mut remove_all = || {
            let _lock = UpdateLock::wait(process, options.deadline())?;
            before.get_or_insert_with(|| process.stop_time().total());
            let memory = target.opened.unshadowed_memory()?;
            let source = source_of(target, &active.arenas, &active.data, Some(&memory));
            maps = read_maps(process)?;
            let read = || self.read_results(&source, Some(&memory));
            remove(process, &memory, &active.arenas, options, read)
        };
        let removed = while_being_changed(options.deadline(), || match remove_all() {
            // Tries again, without that follower or with a new connection to it.
            Err(error) if is_follower_lost(&error) && !is_partly_removed(&error) => remove_all(),
            removed => removed,
        });
        let stopped = before.map_or(Duration::ZERO, |before| process.stop_time().since(before));
        self.add_last_gaps(&removed, &maps);
        let removed = match (removed, &active.data) {
            (Err(error), Some(data)) => {
                // The arenas record which tool has replaced this one, even after the process has exited.
                self.refuse_if_removal_began()?;
                if !process.has_exited() && !target.opened.has_executed(&error) {
                    return Err(error);
                }
                // Nothing is left that could be removed.
                Removed::nothing(self.read_results(&DataSource::Shared(data), None)?)
            }
            (removed, _) => removed?,
        };
        let results = removed.results;
        Ok(ObservationReport {
            counts: results.counts,
            latencies: Latency::of_pairs(&active.plan.pairs, &results.pairs, &active.ticks),
            function_latencies: results.calls.latencies(&active.plan, &active.ticks),
            histograms: results.histograms,
            keyed_counts: results.keyed_counts,
            keyed_histograms: results.keyed_histograms,
            keyed_times: results.keyed_times,
            events: results.events,
            discarded: self.discarded(),
            stopped,
            still_mapped: removed.still_mapped,
            unrestored: Vec::new(),
        })
    }

    /// Reads all that is recorded, for the last time.
    fn read_results(
        &self,
        source: &DataSource<'_>,
        memory: Option<&ProcessMemory>,
    ) -> Result<Results> {
        let (process, active) = (self.target.opened.process(), &self.active);
        let (plan, arenas) = (&active.plan, &active.arenas);
        let (pid, clock) = (process.pid(), active.ticks.clock());
        Ok(Results {
            counts: Counts::read(pid, source, plan, arenas)?,
            pairs: read_pairs(pid, source, arenas, HistogramPart::Whole)?,
            calls: RecordedCalls::read(pid, source, plan, arenas)?,
            histograms: read_histograms(pid, source, plan, arenas)?,
            keyed_counts: KeyedCounts::read(pid, source, plan, arenas)?,
            events: self
                .lock_events()
                .read(process, source, memory, &clock, true)?,
            keyed_histograms: KeyedHistograms::read(pid, source, plan, arenas)?,
            keyed_times: KeyedTimes::read(pid, source, plan, arenas, &active.ticks)?,
        })
    }

    /// Adds what a removal has found to the gaps; `maps` are the mappings just before it.
    fn add_last_gaps(&self, removed: &Result<Removed<Results>>, maps: &[Mapping]) {
        let mut discards = self.lock_discards();
        match removed {
            Ok(removed) => {
                let points = discards.new_among(&self.active.plan, &removed.discarded);
                discards.add(&points, maps);
                let mut loaded = self.lock_loaded_later();
                if loaded.is_possible() {
                    loaded.look(self.target.opened.process(), maps);
                }
            }
            Err(error) if is_partly_removed(error) => discards.end(),
            Err(_) => {}
        }
    }
}

/// What is read just before the data are unmapped.
struct Results {
    counts: Counts,
    pairs: Vec<PairData>,
    calls: RecordedCalls,
    histograms: Vec<ValueHistogram>,
    keyed_counts: Option<KeyedCounts>,
    keyed_histograms: Option<KeyedHistograms>,
    keyed_times: Option<KeyedTimes>,
    events: Events,
}

/// Returns whether a removal that failed may have restored sites.
fn is_partly_removed(error: &Error) -> bool {
    matches!(error.effect(), Effect::HalfChanged | Effect::StillMapped)
}

fn is_follower_lost(error: &Error) -> bool {
    let kind = error.kind();
    matches!(kind, ErrorKind::Process(ProcessError::FollowerLost))
}
