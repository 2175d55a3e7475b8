//! [`ObservedProcesses`]: what is read of each, what it misses, and what has failed.

use std::time::{Duration, Instant};

use probes_lib::{Error, Observation, ObservationReport, Observer, Options, Target};

use super::forked_processes::{
    ForkedProcess, ForkedProcesses, ObservedAncestor, warn_of_late_start, warn_of_unrestored,
    without_take_over,
};
use super::gaps::{GapWarning, Gaps};
use super::observation_messages::{observe_by, warn_of_still_mapped, warn_of_unread_end};
use super::open_target::describe;
use super::process_failures::ProcessFailures;
use super::readings::{ReadingHandler, Unreported};
use super::undo::retry_each;
use crate::failure::{Failure, exit_or_exec};
use crate::messages::Messages;
use crate::signals::{RunningProcesses, TerminationSignals};

/// Processes that are observed: one, or several that give one answer.
pub(super) struct ObservedProcesses {
    each: Vec<ObservedProcess>,
    /// The targets of `each`, in the same order.
    targets: Vec<Target>,
    /// Whether the answer is about one process.
    is_of_one: bool,
    pub(super) failures: ProcessFailures,
    /// With -follow: what the processes have forked.
    forked: Option<FollowedForks>,
    begun: Instant,
}

/// One of the processes.
struct ObservedProcess {
    observer: Observer,
    /// When the last reading was, since the beginning.
    read_at: Option<Duration>,
    /// The index of its reading among those of all.
    reading: Option<usize>,
    /// Whether it was read together with the others, at the end.
    is_read_last: bool,
    /// When it was last tried to remove its observation: it records until then.
    removed_at: Option<Duration>,
    /// When a reading failed: it is not read again.
    failed_at: Option<Duration>,
    /// Why a reading failed, until that is reported; `None` if the process has exited or exec'd.
    read_error: Option<Error>,
    /// Whether a reading has failed because another tool has replaced the observer.
    was_replaced: bool,
    /// Since when it is observed.
    since: Instant,
    warning: GapWarning,
}

impl ObservedProcess {
    fn of(observer: Observer) -> ObservedProcess {
        ObservedProcess {
            observer,
            read_at: None,
            reading: None,
            is_read_last: false,
            removed_at: None,
            failed_at: None,
            read_error: None,
            was_replaced: false,
            since: Instant::now(),
            warning: GapWarning::default(),
        }
    }

    fn as_ancestor<'p>(&'p self, target: &'p Target) -> ObservedAncestor<'p> {
        ObservedAncestor {
            target,
            observer: &self.observer,
            has_ended: self.failed_at.is_some(),
        }
    }

    /// For how long it was observed before the time of the observation began.
    fn extra_time(&self, begun: Instant) -> Duration {
        begun.saturating_duration_since(self.since)
    }

    /// Reads it; returns whether there was anything new.
    fn read<H: ReadingHandler>(
        &mut self,
        pid: i32,
        (begun, at): (Instant, Duration),
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) -> probes_lib::Result<bool> {
        let extra_time = self.extra_time(begun);
        let reading = handler.read(pid, &mut self.observer, extra_time)?;
        let is_new = reading.is_some();
        if let Some(reading) = reading {
            self.read_at = Some(at);
            self.keep(last, pid, reading);
        }
        Ok(is_new)
    }

    /// Keeps a reading of it, in place of the previous one.
    fn keep<T>(&mut self, last: &mut Vec<(i32, T)>, pid: i32, reading: T) {
        keep(last, &mut self.reading, pid, reading);
    }
}

/// The processes that observed ones have forked, and how they are observed.
struct FollowedForks {
    processes: ForkedProcesses,
    observation: Observation,
    options: Options,
}

impl FollowedForks {
    /// Observes a forked process on its own, from now on.
    fn observe(
        &self,
        forked: ForkedProcess,
        parent: &Target,
        messages: &Messages,
    ) -> Result<(Target, Observer), Failure> {
        let child = parent.open_forked(forked.pid);
        let child = child.map_err(Failure::of_process(forked.pid))?;
        describe(messages, &child);
        let observe = || child.observe(&self.observation, self.options);
        let observer = observe_by(&child, messages, observe)?;
        if forked.is_late {
            warn_of_late_start(messages, forked.pid, parent.pid());
        }
        Ok((child, observer))
    }
}

impl ObservedProcesses {
    /// None yet: for an answer about one process, which is added next.
    pub(super) fn of_one(messages: Messages) -> ObservedProcesses {
        ObservedProcesses {
            is_of_one: true,
            ..ObservedProcesses::of_several(ProcessFailures::of_one(messages))
        }
    }

    /// None yet.
    pub(super) fn of_several(failures: ProcessFailures) -> ObservedProcesses {
        ObservedProcesses {
            each: Vec::new(),
            targets: Vec::new(),
            is_of_one: false,
            failures,
            forked: None,
            begun: Instant::now(),
        }
    }

    /// From now on, also observes each process that these fork, on its own.
    pub(super) fn follow_forks(&mut self, observation: Observation, options: Options) {
        self.forked = Some(FollowedForks {
            processes: ForkedProcesses::default(),
            observation,
            options: without_take_over(options),
        });
    }

    /// The observer, if the answer is about one process.
    pub(super) fn only(&self) -> Option<&Observer> {
        self.observers().next().filter(|_| self.is_of_one)
    }

    pub(super) fn are_none(&self) -> bool {
        self.each.is_empty()
    }

    pub(super) fn targets(&self) -> &[Target] {
        &self.targets
    }

    pub(super) fn observers(&self) -> impl Iterator<Item = &Observer> {
        self.each.iter().map(|one| &one.observer)
    }

    /// The observers, each with the [`Messages`] for its process.
    pub(super) fn with_messages(&self) -> impl Iterator<Item = (Messages, &Observer)> {
        let messages = |target: &Target| self.failures.messages(target.pid());
        self.targets.iter().map(messages).zip(self.observers())
    }

    /// Returns when the time of the observation has begun. For one process, this is when it was first observed; for
    /// several, it is now that all are observed, with those that they have forked before.
    pub(super) fn begin_time(&mut self, handler: &mut impl ReadingHandler) -> Instant {
        if !self.is_of_one {
            self.observe_forked(handler);
            self.begun = Instant::now();
        }
        self.begun
    }

    /// How much longer the first process had been observed than the last one when the time began.
    pub(super) fn extra_time(&self) -> Duration {
        let extra_times = || self.each.iter().map(|one| one.extra_time(self.begun));
        let last = extra_times()
            .filter(|extra_time| !extra_time.is_zero())
            .min();
        extra_times().max().unwrap_or_default() - last.unwrap_or_default()
    }

    pub(super) fn add(&mut self, target: Target, observer: Observer) {
        self.each.push(ObservedProcess::of(observer));
        self.targets.push(target);
        self.begun = Instant::now();
    }

    /// The observers of the processes that are read.
    pub(super) fn running_observers(&self) -> impl Iterator<Item = &Observer> {
        self.running().map(|(one, _)| &one.observer)
    }

    fn running(&self) -> impl Iterator<Item = (&ObservedProcess, &Target)> {
        let each = self.each.iter().zip(&self.targets);
        each.filter(|(one, _)| one.failed_at.is_none())
    }

    /// The processes that are read, to be waited for.
    pub(super) fn to_wait_for(&self) -> Result<RunningProcesses, Failure> {
        RunningProcesses::of(self.running().map(|(_, target)| target))
    }

    /// Reads each process, except those of which a reading has failed before. Returns whether a reading has failed.
    pub(super) fn read_each<H: ReadingHandler>(
        &mut self,
        at: Duration,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) -> bool {
        let mut has_failed = false;
        for (one, target) in self.each.iter_mut().zip(&self.targets) {
            if one.failed_at.is_some() {
                continue;
            }
            let pid = target.pid();
            let Err(error) = one.read(pid, (self.begun, at), last, handler) else {
                continue;
            };
            one.failed_at = Some(at);
            has_failed = true;
            if exit_or_exec(&error).is_some() {
                continue;
            }
            one.was_replaced = error.is_replaced();
            if self.is_of_one {
                // The removal may say more.
                one.read_error = Some(error);
            } else {
                self.failures.add(pid, Failure::of_process(pid)(error));
            }
        }
        has_failed
    }

    /// Reads each process once more. If that fails, the removal reports why.
    pub(super) fn read_last<H: ReadingHandler>(
        &mut self,
        at: Duration,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) {
        for (one, target) in self.each.iter_mut().zip(&self.targets) {
            if one.failed_at.is_some() {
                continue;
            }
            let pid = target.pid();
            let read = one.read(pid, (self.begun, at), last, handler);
            one.is_read_last = read.is_ok_and(|is_new| is_new);
        }
    }

    /// Removes the observation from all processes.
    pub(super) fn remove_all(
        &mut self,
        signals: &TerminationSignals,
    ) -> Vec<probes_lib::Result<ObservationReport>> {
        let begun = self.begun;
        let pids = self.targets.iter().map(Target::pid);
        let mut observed: Vec<(&mut ObservedProcess, i32)> =
            self.each.iter_mut().zip(pids).collect();
        retry_each(
            signals,
            &mut observed,
            |(_, pid)| self.failures.messages(*pid),
            |(one, _)| {
                // Not after it: the memory may be unmapped a second or more after the sites are restored.
                one.removed_at = Some(begun.elapsed());
                one.observer.remove()
            },
        )
    }

    /// Takes what the removal from each process has returned. Of those that were read together, the last reading stays.
    /// Returns when the last reading was, since the beginning.
    pub(super) fn take_results<H: ReadingHandler>(
        &mut self,
        removed: Vec<probes_lib::Result<ObservationReport>>,
        lasted: Duration,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) -> Duration {
        let mut read_until = None;
        for (index, removed) in removed.into_iter().enumerate() {
            let was_read_at = match removed {
                Ok(report) => {
                    self.take_report(index, report, last, handler);
                    let one = &self.each[index];
                    one.removed_at
                        .filter(|_| !one.is_read_last)
                        .or(Some(lasted))
                }
                Err(error) => {
                    self.take_error(index, error, lasted);
                    self.each[index].read_at
                }
            };
            read_until = read_until.max(was_read_at);
        }
        read_until.unwrap_or(lasted)
    }

    fn take_report<H: ReadingHandler>(
        &mut self,
        index: usize,
        report: ObservationReport,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) {
        let (one, pid) = (&mut self.each[index], self.targets[index].pid());
        let messages = self.failures.messages(pid);
        warn_of_still_mapped(&messages, pid, report.still_mapped);
        warn_of_unrestored(&messages, pid, &report);
        if let Some(error) = one.read_error.take() {
            self.failures.add(pid, Failure::of_process(pid)(error));
        }
        let reading = handler.last(pid, report, one.extra_time(self.begun));
        if !one.is_read_last {
            one.keep(last, pid, reading);
        }
    }

    /// Takes the error of a removal.
    fn take_error(&mut self, index: usize, error: Error, lasted: Duration) {
        let (one, pid) = (&mut self.each[index], self.targets[index].pid());
        let messages = self.failures.messages(pid);
        if let Some(exit_or_exec) = exit_or_exec(&error) {
            // A process that was read last, with the others, misses nothing: these were read no later.
            if !one.is_read_last {
                let subject = if self.is_of_one {
                    format!("the process {exit_or_exec}")
                } else {
                    format!("process {pid} {exit_or_exec}")
                };
                let ended = one.failed_at.unwrap_or(lasted);
                warn_of_unread_end(&messages, &subject, one.read_at, ended);
            }
            return;
        }
        note_last_reading(&messages, pid, &error);
        // The earlier error is more likely to name the observer that replaced this one.
        let earlier = one.read_error.take().filter(Error::is_replaced);
        let is_reported = one.was_replaced && earlier.is_none() && error.is_replaced();
        if !is_reported {
            let error = earlier.unwrap_or(error);
            self.failures.add(pid, Failure::of_removal(pid, error));
        }
    }

    /// Warns of what the observations are known to miss, unless that was reported.
    pub(super) fn warn_of_gaps(&mut self) {
        for index in 0..self.each.len() {
            let gaps = self.gaps_of(&self.each[index].observer);
            let messages = self.failures.messages(self.targets[index].pid());
            self.each[index].warning.update(&messages, &gaps);
        }
    }

    /// What the observations are known to miss.
    pub(super) fn gaps(&self) -> Gaps {
        self.without_separate(Gaps::of_all(self.observers()))
    }

    fn gaps_of(&self, observer: &Observer) -> Gaps {
        self.without_separate(Gaps::of(observer))
    }

    /// The same, without the forked processes that are observed on their own.
    fn without_separate(&self, gaps: Gaps) -> Gaps {
        match &self.forked {
            None => gaps,
            Some(forked) => gaps.without_separate(forked.processes.observed_separately()),
        }
    }

    /// Observes new forked processes on their own, if that is asked for and it is time. Returns whether any was added.
    pub(super) fn observe_forked(&mut self, handler: &mut impl ReadingHandler) -> bool {
        let known = self.each.len();
        let Some(forked) = &mut self.forked else {
            return false;
        };
        for one in self.each.iter_mut().filter(|one| one.failed_at.is_some()) {
            one.observer.close_if_reaped();
        }
        let observed = self.each.iter().zip(&self.targets);
        let observed = observed.map(|(one, target)| one.as_ancestor(target));
        for it in forked.processes.find(observed) {
            let (pid, messages) = (it.pid, self.failures.messages(it.pid));
            match forked.observe(it, &self.targets[it.parent], &messages) {
                Ok((child, observer)) => {
                    self.failures.add_process();
                    handler.add_process(&child);
                    self.each.push(ObservedProcess::of(observer));
                    self.targets.push(child);
                }
                Err(Failure::Target(_, error)) if exit_or_exec(&error).is_some() => {}
                Err(failure) => {
                    self.failures.add_process();
                    self.failures.add(pid, failure);
                }
            }
        }
        self.each.len() > known
    }

    /// Restores forked processes whose hits were recorded with a process that has exited. Returns the failures.
    pub(super) fn restore_forked(&self) -> Vec<(i32, Error)> {
        let observed = self.each.iter().zip(&self.targets);
        let observed = observed.map(|(one, target)| one.as_ancestor(target));
        let forked = self.forked.as_ref();
        forked.map_or_else(Vec::new, |forked| forked.processes.restore(observed))
    }

    /// Ends the observations, and returns what is to be reported after the results are printed.
    pub(super) fn unreported(self) -> Unreported {
        let gaps = self.each.iter().zip(&self.targets);
        let gaps: Vec<(i32, Gaps)> = gaps
            .map(|(one, target)| (target.pid(), self.gaps_of(&one.observer)))
            .collect();
        let warnings = self.each.into_iter().map(|one| one.warning);
        Unreported {
            gaps: warnings.zip(gaps).collect(),
            failures: self.failures,
        }
    }
}

/// Notes that the results of a process, whose observation could not be removed, are those of the last reading.
fn note_last_reading(messages: &Messages, pid: i32, error: &Error) {
    let why = if error.is_replaced() {
        format!("another tool has replaced this observer of process {pid}")
    } else {
        format!("process {pid} cannot be read any more")
    };
    messages.note(&format!("{why}: the results are those of the last reading"));
}

/// Keeps a reading of a process, in place of the previous one, whose `index` is kept. Another process may have had its pid
/// before.
fn keep<T>(last: &mut Vec<(i32, T)>, index: &mut Option<usize>, pid: i32, reading: T) {
    match index.and_then(|index| last.get_mut(index)) {
        Some((_, kept)) => *kept = reading,
        None => {
            *index = Some(last.len());
            last.push((pid, reading));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_one_pid_keep_their_readings() {
        let mut last = Vec::new();
        let (mut first, mut other, mut second) = (None, None, None);
        keep(&mut last, &mut first, 7, "a");
        keep(&mut last, &mut other, 8, "b");
        keep(&mut last, &mut first, 7, "c");
        keep(&mut last, &mut second, 7, "d");
        keep(&mut last, &mut other, 8, "e");
        assert_eq!(last, [(7, "c"), (8, "e"), (7, "d")]);
    }
}
