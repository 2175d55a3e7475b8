//! [`Session`]: what `top` does to a process, and how that is undone.

use std::time::{Duration, Instant};

use probes_lib::{
    Action, Actions, Counts, Latency, Observation, Observer, Options, ProbeStates, Report, Result,
    Selector, Target,
};

use crate::commands::Failure;
use crate::commands::put_back::{Endings, patiently, put_back, refuse_leftovers};
use crate::messages::Messages;

/// Counts in a process, and switches its probes. If it is dropped, by a panic, everything is put back
/// as well.
pub(super) struct Session<'t> {
    target: &'t Target,
    /// Until it is removed.
    observer: Option<Observer<'t>>,
    begun: Instant,
    /// What was switched and not back again, in the order in which it was done.
    switched: Vec<Report>,
}

impl<'t> Session<'t> {
    /// Begins to observe.
    pub(super) fn begin(target: &'t Target, observation: &Observation) -> Result<Session<'t>> {
        Ok(Session {
            observer: Some(target.observe(observation, Options::default())?),
            target,
            begun: Instant::now(),
            switched: Vec::new(),
        })
    }

    /// How long the process stood still, at most.
    pub(super) fn stopped(&self) -> Duration {
        let observer = self.observer.as_ref();
        observer.map_or(Duration::ZERO, Observer::stopped)
    }

    /// What was counted so far, and since when, and the times of pairs; `None` if the process has ended
    /// or executed another program.
    pub(super) fn sample(&self) -> Option<(Duration, Counts, Vec<Latency>)> {
        let observer = self.observer.as_ref()?;
        let (counts, latencies) = (observer.counts().ok()?, observer.latencies().ok()?);
        Some((self.begun.elapsed(), counts, latencies))
    }

    /// What is on and what is off; `None` if that cannot be told just now.
    pub(super) fn states(&self) -> Option<ProbeStates> {
        self.target.states().ok()
    }

    /// Switches a probe; says what its counter was and is.
    pub(super) fn switch(&mut self, name: &str, on: bool) -> Result<(u16, u16)> {
        let action = match on {
            true => Action::Enable,
            false => Action::Disable,
        };
        let actions = Actions::of(action, Selector::name(name));
        let report = self.target.update(&actions)?;
        let (before, after) = counters(&report, name);
        // What undoes an earlier one leaves nothing to put back.
        let undone = self.switched.iter().rposition(|earlier| {
            let (was, is) = counters(earlier, name);
            was != is && (is > was) != on
        });
        match undone {
            Some(undone) => drop(self.switched.remove(undone)),
            None => self.switched.push(report),
        }
        Ok((before, after))
    }

    /// Switches everything back, the last first; says what that was.
    pub(super) fn switch_back(
        &mut self,
        endings: &Endings,
        messages: &Messages,
    ) -> std::result::Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        let mut outcome = Ok(());
        while let Some(report) = self.switched.pop() {
            match put_back(self.target, &report, Options::default(), endings, messages) {
                Ok(Some(back)) => {
                    let done = back.changed.iter().map(|change| change.name.clone());
                    names.extend(done);
                    outcome = outcome.and(refuse_leftovers(&report, &back));
                }
                Ok(None) => {}
                Err(failure) => outcome = outcome.and(Err(failure)),
            }
        }
        names.sort();
        names.dedup();
        outcome.map(|()| names)
    }

    /// Ends counting; says how many bytes stay mapped.
    pub(super) fn remove(&mut self, endings: &Endings, messages: &Messages) -> Result<u64> {
        let Some(observer) = &mut self.observer else {
            return Ok(0);
        };
        let removed = patiently(endings, messages, || observer.remove())?;
        self.observer = None;
        Ok(removed.still_mapped)
    }

    /// There is nothing to put back any more.
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

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // Nobody is left who could be told.
        while let Some(report) = self.switched.pop() {
            let _ = self.target.undo(&report, Options::default());
        }
        if let Some(observer) = &mut self.observer {
            let _ = observer.remove();
        }
    }
}
