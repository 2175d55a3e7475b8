//! [`Observed`]: one process that `serve` observes.

use std::thread;
use std::time::Duration;

use probes_lib::{
    GcPauses, Observation, ObservationReport, Observer, Options, RuntimeEvents, Target,
};

use super::exposition::shortened;
use super::figures::{CollectorTotals, ProcessFigures, value_of_state};
use crate::commands::closures::warn_of_refused_closures;
use crate::commands::gaps::{GapWarning, Gaps};
use crate::commands::observation_messages::warn_of_still_mapped;
use crate::commands::uncounted::warn_of_uncounted;
use crate::commands::undo::retry;
use crate::failure::{Failure, exit_or_exec};
use crate::messages::Messages;
use crate::signals::TerminationSignals;

/// Distinguishes an observation from the next one of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ObservationId {
    pub(super) pid: i32,
    pub(super) number: u64,
}

/// A process that is observed: by trampolines, by its runtime events, or by both.
pub(super) struct Observed {
    pub(super) id: ObservationId,
    pub(super) target: Target,
    observer: Option<Observer>,
    collector: Option<CollectorReading>,
    warning: GapWarning,
}

/// The runtime events of a process, added up.
struct CollectorReading {
    events: RuntimeEvents,
    pauses: GcPauses,
}

/// What is read only when a client asks.
#[derive(Debug, Default)]
pub(super) struct Details {
    pub(super) states: Vec<(String, &'static str)>,
    pub(super) discarded: usize,
    pub(super) refused_functions: usize,
}

impl Observed {
    /// Begins to observe a process.
    pub(super) fn begin(
        id: ObservationId,
        target: Target,
        observation: Option<&Observation>,
        options: Options,
        events: Option<RuntimeEvents>,
        messages: &Messages,
    ) -> Result<Observed, Failure> {
        let pid = target.pid();
        let observer = observation
            .map(|observation| target.observe(observation, options))
            .transpose()
            .map_err(Failure::of_process(pid))?;
        // Made at once: if what follows panics, the instrumentation is removed.
        let observed = Observed {
            id,
            target,
            observer,
            collector: events.map(CollectorReading::of),
            warning: GapWarning::default(),
        };
        if let Some(observer) = &observed.observer {
            warn_of_refused_closures(messages, pid, observer.code_digest());
            warn_of_uncounted(messages, observer, "observed");
        }
        Ok(observed)
    }

    /// How long it was stopped when its observation began.
    pub(super) fn stopped(&self) -> Duration {
        let observer = self.observer.as_ref();
        observer.map_or(Duration::ZERO, Observer::stopped)
    }

    /// Whether its runtime events are read.
    pub(super) fn reads_events(&self) -> bool {
        self.collector.is_some()
    }

    /// Begins to read its runtime events.
    pub(super) fn set_events(&mut self, events: RuntimeEvents) {
        self.collector = Some(CollectorReading::of(events));
    }

    /// Reads its runtime events no more.
    pub(super) fn end_events(&mut self) {
        self.collector = None;
    }

    /// Reads what it has recorded. Does not stop it.
    pub(super) fn read(&mut self, bounds: &[Duration]) -> probes_lib::Result<ProcessFigures> {
        let mut figures = ProcessFigures::default();
        if let Some(observer) = &self.observer {
            let (counts, pairs) = (observer.counts()?, observer.latencies()?);
            let calls = observer.function_latencies()?;
            figures = ProcessFigures::of(bounds, &counts, &pairs, &calls);
        }
        figures.collector = self.collector_figures(bounds);
        Ok(figures)
    }

    /// What its collector has done, as far as it was read.
    pub(super) fn collector_figures(&self, bounds: &[Duration]) -> Option<CollectorTotals> {
        let collector = self.collector.as_ref()?;
        Some(CollectorTotals::of(bounds, &collector.pauses))
    }

    /// Reads its new runtime events, before they are overwritten.
    pub(super) fn read_events(&mut self) -> probes_lib::Result<()> {
        let Some(collector) = &mut self.collector else {
            return Ok(());
        };
        let pauses = &mut collector.pauses;
        let read = collector.events.read(|entry| {
            pauses.add(&entry);
        });
        pauses.match_requests();
        read
    }

    /// Returns false if its runtime events are read, and it does not have them mapped any more: it has exited, or
    /// executed a new program.
    pub(super) fn has_events(&self) -> bool {
        let collector = self.collector.as_ref();
        collector.is_none_or(|collector| matches!(collector.events.is_mapped(), Ok(true)))
    }

    /// Whether nothing is read but runtime events.
    pub(super) fn has_only_events(&self) -> bool {
        self.observer.is_none()
    }

    /// Reads the states of the probes that `figures` names, and what else is shown of it; warns of what makes figures
    /// wrong.
    pub(super) fn details(&mut self, figures: &ProcessFigures, messages: &Messages) -> Details {
        let Some(observer) = &self.observer else {
            return Details::default();
        };
        self.warning.update(messages, &Gaps::of(observer));
        let ends = figures.pairs.keys().flat_map(|(start, stop)| [start, stop]);
        // The figures have long names in their shortened form.
        let is_shown = |name: &str| {
            let name = &*shortened(name);
            figures.hits.contains_key(name) || ends.clone().any(|end| end == name)
        };
        // A process without probes has no states.
        let states = self.target.states().ok();
        let states = states.iter().flat_map(|states| states.probes());
        let states = states.filter(|probe| is_shown(probe.name()));
        Details {
            states: states
                .map(|probe| (probe.name().to_owned(), value_of_state(probe.state())))
                .collect(),
            discarded: observer.discarded().patches(),
            refused_functions: observer.refused().len(),
        }
    }

    /// Removes the trampolines, if there are any; tries for some time. Returns whether it has removed any.
    pub(super) fn remove(
        &mut self,
        signals: &TerminationSignals,
        messages: &Messages,
    ) -> Result<bool, Failure> {
        self.remove_by(messages, |observer| {
            retry(signals, messages, || observer.remove())
        })
    }

    /// The same; tries once.
    pub(super) fn try_to_remove(&mut self, messages: &Messages) -> Result<bool, Failure> {
        self.remove_by(messages, Observer::remove)
    }

    fn remove_by(
        &mut self,
        messages: &Messages,
        remove: impl FnOnce(&mut Observer) -> probes_lib::Result<ObservationReport>,
    ) -> Result<bool, Failure> {
        let pid = self.target.pid();
        let Some(observer) = &mut self.observer else {
            return Ok(false);
        };
        match remove(observer) {
            Ok(report) => {
                warn_of_still_mapped(messages, pid, report.still_mapped);
                Ok(true)
            }
            // Nothing is left, or it is left to the observer that has replaced this one.
            Err(error) if exit_or_exec(&error).is_some() || error.is_replaced() => Ok(false),
            Err(error) => Err(Failure::of_removal(pid, error)),
        }
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        // Errors are not reported during a panic.
        if let (true, Some(observer)) = (thread::panicking(), &mut self.observer) {
            let _ = observer.remove();
        }
    }
}

impl CollectorReading {
    fn of(events: RuntimeEvents) -> CollectorReading {
        CollectorReading {
            pauses: GcPauses::within(events.under_way()),
            events,
        }
    }
}
