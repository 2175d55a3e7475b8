//! Several processes that are observed together, and give one answer.

use std::time::{Duration, Instant};

use probes_lib::{Observation, Observer, Options, Target};

use super::forked_processes::{
    ForkedProcess, ForkedProcesses, ObservedAncestor, warn_of_late_start, warn_of_unrestored,
    without_take_over,
};
use super::gaps::{GapWarning, Gaps};
use super::observe_loop::{
    next_time, observe_by, reading_after, reading_time, warn_of_still_mapped, warn_of_unread_end,
};
use super::open_target::describe;
use super::process_failures::ProcessFailures;
use super::readings::{Display, Outcome, ReadingHandler, ShownReadings, Unreported};
use super::step_failures::StepFailures;
use super::undo::retry_each;
use crate::clock::thread_time;
use crate::descriptors;
use crate::destination::Output;
use crate::failure::{Failure, exit_or_exec};
use crate::flags::ForkedFlag;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::signals::{RunningProcesses, TerminationSignals, WaitEnd};

/// Why callers are not distinguished if there may be several processes, or they are distinguished `by_pid`.
pub(super) fn why_not_by_caller(by_pid: bool) -> &'static str {
    if by_pid {
        "-by caller is for one process, because addresses differ between processes: give one -pid, without -follow, and -by without pid"
    } else {
        "-by caller is for one process, because addresses differ between processes: give one -pid, without -follow"
    }
}

/// Processes that are observed.
pub(super) struct SeveralObservations<'o> {
    each: Vec<ObservedProcess>,
    /// The targets of `each`, in the same order.
    targets: Vec<Target>,
    failures: ProcessFailures,
    request: ObservationRequest,
    forked: Option<ForkedProcesses>,
    begun: Instant,
    /// For how much longer than the last process the first was observed when the time began.
    lead: Duration,
    interruptible: InterruptibleOutput,
    output: &'o Output,
    /// Whether a signal came before all of them were observed: then it ends at once.
    is_interrupted: bool,
}

/// How many descriptors may be open if processes are followed.
const DESCRIPTORS: u64 = 1 << 16;

/// What is observed of each process, how, and for how long.
pub(super) struct ObservationRequest {
    pub(super) observation: Observation,
    pub(super) options: Options,
    pub(super) duration: Option<Duration>,
    /// Whether the figures are of a reading of all processes before the first observation is removed, and so of the
    /// same time; otherwise, they are what each removal returns.
    pub(super) reads_all_before_removal: bool,
}

/// One of the processes.
struct ObservedProcess {
    observer: Observer,
    /// When the last reading was, since the beginning.
    read_at: Option<Duration>,
    /// The index of its reading among those of all.
    reading: Option<usize>,
    /// Whether it was read together with the others, in the end.
    is_read_last: bool,
    /// When a reading failed: it is not read again.
    failed_at: Option<Duration>,
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
            failed_at: None,
            since: Instant::now(),
            warning: GapWarning::default(),
        }
    }

    fn as_parent<'p>(&'p self, target: &'p Target) -> ObservedAncestor<'p> {
        ObservedAncestor {
            target,
            observer: &self.observer,
            has_ended: self.failed_at.is_some(),
        }
    }
}

impl<'o> SeveralObservations<'o> {
    /// Begins to observe processes, until the time is over or a signal comes. A process that cannot be observed is a
    /// failure, and the others are observed.
    pub(super) fn begin(
        targets: Vec<Target>,
        mut request: ObservationRequest,
        forked: ForkedFlag,
        mut failures: ProcessFailures,
        output: &'o Output,
    ) -> Result<SeveralObservations<'o>, Failure> {
        if forked.follow {
            request.observation = request.observation.record_forked();
            // Each process takes several.
            descriptors::raise_limit(DESCRIPTORS);
            if request.observation.lacks_forked() {
                output.messages.note(
                    "times in newly forked processes are measured from about 200 ms after the fork: those of processes that exit \
                     before are missing",
                );
            }
            if request.observation.may_lack_values_of_forked() {
                output.messages.note_to_people(
                    "in the first 200 ms of a newly forked process, strings and fields in memory may not be read: they are shown as \
                     addresses, and hits whose question needs them are untyped",
                );
            }
        }
        // Signals are blocked before anything is changed, so that none can keep an observation from being removed.
        let signals = TerminationSignals::block()?;
        let interruptible = InterruptibleOutput::new(output, signals)?;
        let (mut each, mut are_observed) = (Vec::new(), Vec::new());
        let mut is_interrupted = false;
        for target in targets {
            // To prepare many takes long.
            is_interrupted = interruptible.signals().take_interrupt();
            if is_interrupted {
                break;
            }
            let pid = target.pid();
            let messages = failures.messages(pid);
            let observe = || target.observe(&request.observation, request.options);
            let observer = observe_by(&target, &messages, observe);
            if let Some(observer) = failures.record_unless_exited(pid, observer) {
                each.push(ObservedProcess::of(observer));
                are_observed.push(target);
            }
        }
        Ok(SeveralObservations {
            each,
            targets: are_observed,
            failures,
            request,
            forked: forked.follow.then(ForkedProcesses::default),
            begun: Instant::now(),
            lead: Duration::ZERO,
            interruptible,
            output,
            is_interrupted,
        })
    }

    /// The observers, each with the [`Messages`] for its process.
    pub(super) fn each(&self) -> impl Iterator<Item = (Messages, &Observer)> {
        let each = self.each.iter().zip(&self.targets);
        each.map(|(one, target)| (self.failures.messages(target.pid()), &one.observer))
    }

    /// Calls [`ReadingHandler::show`] at the intervals of `display` until the observation is over or all processes have
    /// exited; then removes the observation from all processes. In between, each process is read too, because it may
    /// exit. Returns what was observed until then, whatever fails.
    ///
    /// If all are read together in the end, what [`ReadingHandler::last`] returns is kept only of those that could
    /// not be read then.
    pub(super) fn run<H: ReadingHandler>(
        mut self,
        mut display: Display,
        handler: &mut H,
    ) -> Outcome<H::Reading> {
        let mut last = Vec::new();
        self.observe_forked(handler);
        self.begin_time();
        let mut printed = Ok(());
        // The file of -o stays as it is if none can be observed.
        if !self.each.is_empty() {
            printed = self.output.begin();
            if printed.is_ok() && !self.is_interrupted {
                printed = self.read_repeatedly(&mut display, &mut last, handler);
            }
        }
        let lasted = self.begun.elapsed();
        if self.request.reads_all_before_removal {
            self.read_last(lasted, &mut last, handler);
        }
        self.remove_all(lasted, &mut last, handler);
        self.restore_forked();
        let (output_was_read, rest_printed) = self.interruptible.end();
        printed = printed.and(rest_printed);
        if let Some(table) = display.table.as_mut().filter(|_| output_was_read) {
            printed = printed.and(self.output.print(&table.erase_sequence()));
        }
        let mut failures = StepFailures::default();
        failures.add(printed);
        Outcome {
            targets: self.targets,
            last,
            read_until: lasted,
            lasted,
            output_was_read,
            of_results: self.request.observation.asks_for_results(),
            failures,
            unreported: Unreported::OfSeveral {
                failures: self.failures,
                lead: self.lead,
            },
        }
    }

    /// Removes the observation from all processes, whatever has failed so far. Of those that were read together, the last
    /// reading stays.
    fn remove_all<H: ReadingHandler>(
        &mut self,
        lasted: Duration,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) {
        let signals = self.interruptible.signals();
        let mut observed: Vec<(&mut ObservedProcess, i32)> = (self.each.iter_mut())
            .zip(self.targets.iter().map(Target::pid))
            .collect();
        let removed = retry_each(
            signals,
            &mut observed,
            |(_, pid)| self.failures.messages(*pid),
            |(one, _)| one.observer.remove(),
        );
        for ((one, pid), removed) in observed.into_iter().zip(removed) {
            let messages = self.failures.messages(pid);
            let lead = lead(self.begun, one.since);
            match removed {
                Ok(report) => {
                    warn_of_still_mapped(&messages, pid, report.still_mapped);
                    warn_of_unrestored(&messages, pid, &report);
                    let gaps = gaps_without_separate(&self.forked, &one.observer);
                    one.warning.update(&messages, &gaps);
                    let reading = handler.last(pid, report, lead);
                    if !one.is_read_last {
                        keep(last, &mut one.reading, pid, reading);
                    }
                }
                Err(error) => match exit_or_exec(&error) {
                    // The others are read no later than it was.
                    Some(_) if one.is_read_last => {}
                    Some(exit_or_exec) => {
                        let subject = format!("process {pid} {exit_or_exec}");
                        let ended = one.failed_at.unwrap_or(lasted);
                        warn_of_unread_end(&messages, &subject, one.read_at, ended);
                        let gaps = gaps_without_separate(&self.forked, &one.observer);
                        one.warning.update(&messages, &gaps);
                    }
                    None => self.failures.add(pid, Failure::of_removal(pid, error)),
                },
            }
        }
    }

    /// Reads each process. One that can be read no more is not read again.
    fn read_each<H: ReadingHandler>(
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
            match handler.read(pid, &mut one.observer, lead(self.begun, one.since)) {
                Ok(Some(reading)) => {
                    one.read_at = Some(at);
                    keep(last, &mut one.reading, pid, reading);
                }
                Ok(None) => {}
                Err(error) => {
                    one.failed_at = Some(at);
                    if exit_or_exec(&error).is_none() {
                        self.failures.add(pid, Failure::of_process(pid)(error));
                    }
                }
            }
        }
    }

    /// Reads each process once more. Of those that cannot be read, the removal tells what is wrong.
    fn read_last<H: ReadingHandler>(
        &mut self,
        at: Duration,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) {
        for (one, target) in self.each.iter_mut().zip(&self.targets) {
            let pid = target.pid();
            let reading = match one.failed_at {
                None => handler.read(pid, &mut one.observer, lead(self.begun, one.since)),
                Some(_) => continue,
            };
            if let Ok(Some(reading)) = reading {
                one.read_at = Some(at);
                keep(last, &mut one.reading, pid, reading);
                one.is_read_last = true;
            }
        }
    }

    /// Begins the time of the observation, now that all processes are observed.
    fn begin_time(&mut self) {
        self.begun = Instant::now();
        let since = || self.each.iter().map(|one| one.since);
        if let (Some(first), Some(last)) = (since().min(), since().max()) {
            self.lead = last - first;
        }
        let end = self
            .request
            .duration
            .and_then(|after| self.begun.checked_add(after));
        self.interruptible.set_deadline(end);
    }

    /// What the observations miss, as far as is known.
    fn gaps(&self) -> Gaps {
        let observers = self.each.iter().map(|one| &one.observer);
        match &self.forked {
            None => Gaps::of_all(observers),
            Some(forked) => Gaps::of_all(observers).without_separate(forked.observed_separately()),
        }
    }

    /// Observes forked processes by themselves, if that is asked for and it is time.
    fn observe_forked(&mut self, handler: &mut impl ReadingHandler) {
        let Some(forked) = &mut self.forked else {
            return;
        };
        let observed = self.each.iter().zip(&self.targets);
        let found = forked.find(observed.map(|(one, target)| one.as_parent(target)));
        for it in found {
            self.failures.add_process();
            match self.observe_one_forked(it) {
                Ok((child, observer)) => {
                    handler.add_process(&child);
                    self.each.push(ObservedProcess::of(observer));
                    self.targets.push(child);
                }
                Err(Failure::Target(_, error)) if exit_or_exec(&error).is_some() => {}
                Err(failure) => self.failures.add(it.pid, failure),
            }
        }
    }

    fn observe_one_forked(&self, forked: ForkedProcess) -> Result<(Target, Observer), Failure> {
        let ForkedProcess { pid, parent, .. } = forked;
        let messages = self.failures.messages(pid);
        let child = self.targets[parent].open_forked(pid);
        let child = child.map_err(Failure::of_process(pid))?;
        describe(&messages, &child);
        let options = without_take_over(self.request.options);
        let observe = || child.observe(&self.request.observation, options);
        let observer = observe_by(&child, &messages, observe)?;
        if forked.is_late {
            warn_of_late_start(&messages, pid, self.targets[parent].pid());
        }
        Ok((child, observer))
    }

    /// Restores forked processes whose hits were recorded with a process that has exited.
    fn restore_forked(&mut self) {
        let Some(forked) = &self.forked else {
            return;
        };
        let observed = self.each.iter().zip(&self.targets);
        let observed = observed.map(|(one, target)| one.as_parent(target));
        for (pid, error) in forked.restore(observed) {
            self.failures.add(pid, Failure::of_removal(pid, error));
        }
    }

    /// The processes that are read.
    fn running(&self) -> impl Iterator<Item = (&ObservedProcess, &Target)> {
        let each = self.each.iter().zip(&self.targets);
        each.filter(|(one, _)| one.failed_at.is_none())
    }

    /// The same, to be waited for.
    fn to_wait_for(&self) -> Result<RunningProcesses, Failure> {
        RunningProcesses::of(self.running().map(|(_, target)| target))
    }

    /// How long to wait before the processes are read and shown again.
    fn next_read(&self, display: &Display, handler: &impl ReadingHandler) -> Duration {
        display.next_read(handler, self.running().map(|(one, _)| &one.observer))
    }

    /// Reads and shows until the observation is over.
    fn read_repeatedly<H: ReadingHandler>(
        &mut self,
        display: &mut Display,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) -> Result<(), Failure> {
        let mut running = self.to_wait_for()?;
        let end = self.request.duration.unwrap_or(Duration::MAX);
        let mut interval = self.next_read(display, handler);
        let mut next = interval;
        let mut reading_at = reading_after(Duration::ZERO, interval, Duration::ZERO);
        loop {
            let left = end.min(next).min(reading_at);
            let left = left.saturating_sub(self.begun.elapsed());
            let signals = self.interruptible.signals();
            let wait_end = signals.wait_for(&mut running, left)?;
            let at = self.begun.elapsed();
            if matches!(wait_end, WaitEnd::Interrupted) || at >= end {
                return Ok(());
            }
            let began = thread_time();
            let known = (self.targets.len(), self.running().count());
            self.read_each(at, last, handler);
            let took = reading_time(self.each.iter().map(|it| &it.observer), began);
            self.observe_forked(handler);
            if (self.targets.len(), self.running().count()) != known {
                running = self.to_wait_for()?;
            }
            interval = self.next_read(display, handler);
            if self.each.iter().all(|one| one.failed_at.is_some()) {
                return Ok(());
            }
            if at >= next {
                let shown = ShownReadings {
                    targets: &self.targets,
                    each: last,
                    at,
                    gaps: self.gaps(),
                    table: display.table.as_mut(),
                };
                if let Next::Stop = handler.show(shown, &mut self.interruptible)? {
                    return Ok(());
                }
                next = next_time(at, interval);
            }
            reading_at = reading_after(at, interval, took);
        }
    }
}

/// What an observation misses, without the forked processes that are observed by themselves.
fn gaps_without_separate(forked: &Option<ForkedProcesses>, observer: &Observer) -> Gaps {
    match forked {
        None => Gaps::of(observer),
        Some(forked) => Gaps::of(observer).without_separate(forked.observed_separately()),
    }
}

/// How long a process was observed before the time of the observation began.
fn lead(begun: Instant, since: Instant) -> Duration {
    begun.saturating_duration_since(since)
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
