//! [`Session`]: what `top` does to a process, and undoes at the end.

use std::time::Duration;

use probes_lib::{
    Action, Actions, CodeDigest, Counts, Hold, Latency, Observation, ObservationReport, Observer,
    Options, ProbeStates, Report, Result, Selector, Target,
};

use crate::commands::gaps::Gaps;
use crate::commands::undo::{fail_unless_all_undone, undo_changes};
use crate::failure::Failure;
use crate::messages::Messages;
use crate::signals::TerminationSignals;

/// Counts in a process, and switches its probes. Dropping it undoes everything, also in a panic.
pub(super) struct Session {
    target: Target,
    /// `None` once it is forgotten. Removing an observation that was removed fails, and changes nothing.
    observer: Option<Observer>,
    /// The updates that have switched a probe and are still to be undone, in the order they were made.
    switched: Vec<Hold>,
}

/// The figures of a process since it was first observed.
pub(super) struct Reading {
    pub(super) counts: Counts,
    /// Of each pair.
    pub(super) latencies: Vec<Latency>,
}

impl Session {
    /// Installs an observation.
    pub(super) fn begin(
        target: &Target,
        observation: &Observation,
        options: Options,
    ) -> Result<Session> {
        Ok(Session {
            observer: Some(target.observe(observation, options)?),
            target: target.clone(),
            switched: Vec::new(),
        })
    }

    pub(super) fn pid(&self) -> i32 {
        self.target.pid()
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    /// `None` once it is forgotten.
    pub(super) fn observer(&self) -> Option<&Observer> {
        self.observer.as_ref()
    }

    /// How long the process was stopped in order to observe it: an upper bound.
    pub(super) fn stopped(&self) -> Duration {
        let observer = self.observer.as_ref();
        observer.map_or(Duration::ZERO, Observer::stopped)
    }

    /// Whether closures that the process marshals are accepted by others of its program.
    pub(super) fn code_digest(&self) -> CodeDigest {
        let observer = self.observer.as_ref();
        observer.map_or(CodeDigest::Unaffected, Observer::code_digest)
    }

    /// Reads the figures so far; `None` if they cannot be read any more: the process has exited or executed a new
    /// program, or another tool has replaced this one.
    pub(super) fn sample(&self) -> Option<Reading> {
        let observer = self.observer.as_ref()?;
        Some(Reading {
            counts: observer.counts().ok()?,
            latencies: observer.latencies().ok()?,
        })
    }

    /// What the observation misses, as far as is known.
    pub(super) fn gaps(&self) -> Option<Gaps> {
        self.observer.as_ref().map(Gaps::of)
    }

    /// Which probes are enabled; `None` if that cannot be read now.
    pub(super) fn states(&self) -> Option<ProbeStates> {
        self.target.states().ok()
    }

    /// Switches a probe; returns its counter before and after.
    pub(super) fn switch(&mut self, name: &str, on: bool) -> Result<(u16, u16)> {
        let action = if on { Action::Enable } else { Action::Disable };
        let actions = Actions::of(action, Selector::name(name));
        // If this reverses an earlier update, neither must be undone at the end.
        let earlier = self.switched.iter().rposition(|earlier| {
            let (was, is) = counters(earlier.report(), name);
            was != is && (is > was) != on
        });
        if let Some(earlier) = earlier {
            // Checked, because undoing succeeds where switching the probe would fail: at a breakpoint, for example.
            self.target.check(&actions, Options::default())?;
            let undone = self.switched[earlier].release(Options::default())?;
            self.switched.remove(earlier);
            return Ok(counters(&undone, name));
        }
        let hold = self.target.hold(&actions, Options::default())?;
        let counters = counters(hold.report(), name);
        self.switched.push(hold);
        Ok(counters)
    }

    /// Undoes the switches of probes, the last one first; returns the names of the probes.
    pub(super) fn undo_switches(
        &mut self,
        signals: &TerminationSignals,
        messages: &Messages,
    ) -> std::result::Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        let mut outcome = Ok(());
        while let Some(hold) = self.switched.pop() {
            let options = Options::default();
            match undo_changes(&hold, options, signals, messages) {
                Ok(Some(undone)) => {
                    names.extend(undone.changed.iter().map(|change| change.name.clone()));
                    outcome = outcome.and(fail_unless_all_undone(&hold, options, &undone));
                }
                Ok(None) => {}
                Err(failure) => outcome = outcome.and(Err(failure)),
            }
        }
        names.sort();
        names.dedup();
        outcome.map(|()| names)
    }

    /// Removes the observation; `None` if it is forgotten.
    pub(super) fn remove(&mut self) -> Result<Option<ObservationReport>> {
        let observer = self.observer.as_mut();
        observer.map(Observer::remove).transpose()
    }

    /// Closes what is open of the process, if it was reaped.
    pub(super) fn close_if_reaped(&mut self) {
        if let Some(observer) = &mut self.observer {
            observer.close_if_reaped();
        }
    }

    /// Forgets all that would be undone: the process is gone.
    pub(super) fn forget(&mut self) {
        self.observer = None;
        self.switched.clear();
    }
}

/// The counter of a probe before and after.
fn counters(report: &Report, name: &str) -> (u16, u16) {
    let mut changed = report.changed.iter();
    let change = changed.find(|change| change.name == name);
    change.map_or((0, 0), |change| (change.before, change.after))
}

impl Drop for Session {
    fn drop(&mut self) {
        // Errors are not reported during a panic.
        while let Some(hold) = self.switched.pop() {
            let _ = hold.release(Options::default());
        }
        if let Some(observer) = &mut self.observer {
            let _ = observer.remove();
        }
    }
}
