//! What the commands that observe processes for a time have in common (`count`, `gc`, `hist`, `latency`, `record`,
//! `watch`). The processes are read periodically, and at the end the observations are removed, also after an error. If
//! a removal fails, the command fails with that error.

use std::time::{Duration, Instant};

use probes_lib::{Observation, Observer, Options, Target};

use super::closures::warn_of_refused_closures;
use super::gaps::Gaps;
use super::observation_messages::observe_by;
use super::observed_processes::ObservedProcesses;
use super::process_failures::ProcessFailures;
use super::reading_times::{next_time, reading_after, reading_time};
use super::readings::{Display, Outcome, ReadingHandler, ShownReadings};
use super::step_failures::StepFailures;
use crate::clock::thread_time;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::signals::{TerminationSignals, WaitEnd};

/// The observations of a command, from their beginning to their removal.
pub(super) struct Observations<'o> {
    processes: ObservedProcesses,
    duration: Option<Duration>,
    /// See [`ObservationRequest`].
    reads_all_before_removal: bool,
    /// Whether expressions ask for the results of functions.
    of_results: bool,
    interruptible: InterruptibleOutput,
    output: &'o Output,
    /// Whether a termination signal came before all processes were observed: then the observation ends at once.
    is_interrupted: bool,
}

/// How much later than they were read for the last time processes may be restored without a note.
const NOTED_DELAY: Duration = Duration::from_millis(500);

/// What is observed of each process, how, and for how long.
pub(super) struct ObservationRequest {
    pub(super) observation: Observation,
    pub(super) options: Options,
    pub(super) duration: Option<Duration>,
    /// For several processes only: whether all are read once more before the first observation is removed, so that
    /// their figures are of the same time. Otherwise, the figures are those that each removal returns.
    pub(super) reads_all_before_removal: bool,
}

impl<'o> Observations<'o> {
    /// Begins to observe a process by `observe`, until the time is over or a signal comes.
    pub(super) fn of_process(
        target: &Target,
        duration: Option<Duration>,
        output: &'o Output,
        observe: impl FnOnce() -> probes_lib::Result<Observer>,
    ) -> Result<Observations<'o>, Failure> {
        // Signals are blocked before anything is changed, so that none can keep an observation from being removed.
        let signals = TerminationSignals::block()?;
        let mut observations = Observations::none(signals, duration, output)?;
        let observer = observe_by(target, &output.messages, observe)?;
        observations.processes.add(target.clone(), observer);
        Ok(observations)
    }

    /// Continues the observation of a program that was launched to be observed. Signals are passed on to the program.
    pub(super) fn of_program(
        target: &Target,
        observer: Observer,
        duration: Option<Duration>,
        output: &'o Output,
    ) -> Result<Observations<'o>, Failure> {
        let pid = target.pid();
        let signals = TerminationSignals::block_and_pass_on(Some(pid))?;
        let mut observations = Observations::none(signals, duration, output)?;
        warn_of_refused_closures(&output.messages, pid, observer.code_digest());
        observations.processes.add(target.clone(), observer);
        Ok(observations)
    }

    /// Begins to observe several processes. If one cannot be observed, that is recorded as a failure, and the others
    /// are observed.
    pub(super) fn of_several(
        targets: Vec<Target>,
        mut request: ObservationRequest,
        follows_forks: bool,
        failures: ProcessFailures,
        output: &'o Output,
    ) -> Result<Observations<'o>, Failure> {
        if follows_forks {
            request.observation = request.observation.record_forked();
            note_gaps_at_forks(&request.observation, &output.messages);
        }
        let signals = TerminationSignals::block()?;
        let mut observations = Observations {
            processes: ObservedProcesses::of_several(failures),
            reads_all_before_removal: request.reads_all_before_removal,
            of_results: request.observation.asks_for_results(),
            ..Observations::none(signals, request.duration, output)?
        };
        let processes = &mut observations.processes;
        for target in targets {
            // To prepare many takes long.
            observations.is_interrupted = observations.interruptible.signals().take_interrupt();
            if observations.is_interrupted {
                break;
            }
            let pid = target.pid();
            let messages = processes.failures.messages(pid);
            let observe = || target.observe(&request.observation, request.options);
            let observer = observe_by(&target, &messages, observe);
            if let Some(observer) = processes.failures.record_unless_exited(pid, observer) {
                processes.add(target, observer);
            }
        }
        if follows_forks {
            processes.follow_forks(request.observation, request.options);
        }
        Ok(observations)
    }

    /// Returns observations without processes, for an answer about one process, which is added next. (`of_several`
    /// replaces its processes.)
    fn none(
        signals: TerminationSignals,
        duration: Option<Duration>,
        output: &'o Output,
    ) -> Result<Observations<'o>, Failure> {
        Ok(Observations {
            processes: ObservedProcesses::of_one(output.messages),
            duration,
            reads_all_before_removal: false,
            of_results: false,
            interruptible: InterruptibleOutput::new(output, signals)?,
            output,
            is_interrupted: false,
        })
    }

    /// Returns these observations with `of_results`: whether expressions ask for the results of functions.
    pub(super) fn of_results(self, of_results: bool) -> Observations<'o> {
        Observations { of_results, ..self }
    }

    /// The observer, if the answer is about one process.
    pub(super) fn only(&self) -> Option<&Observer> {
        self.processes.only()
    }

    /// The observers, each with the [`Messages`] for its process.
    pub(super) fn each(&self) -> impl Iterator<Item = (Messages, &Observer)> {
        self.processes.with_messages()
    }

    /// Calls [`ReadingHandler::show`] at the intervals of `display` until the time is over, a signal comes, or all
    /// processes have exited. Then removes all observations. If the intervals are long, each process is also read in
    /// between, because it may exit before the next reading is shown. A redrawn table is erased at the end. Returns
    /// what was observed, whatever has failed.
    ///
    /// With `reads_all_before_removal`, what [`ReadingHandler::last`] returns is kept only for the processes that had
    /// no new reading before the removal.
    pub(super) fn run<H: ReadingHandler>(
        mut self,
        mut display: Display,
        handler: &mut H,
    ) -> Outcome<H::Reading> {
        let mut last = Vec::new();
        let begun = self.processes.begin_time(handler);
        let end = self.duration.and_then(|after| begun.checked_add(after));
        self.interruptible.set_deadline(end);
        let mut shown = Ok(());
        // The file of -o stays as it is if none can be observed.
        if !self.processes.are_none() {
            shown = self.output.begin();
            if shown.is_ok() && !self.is_interrupted {
                shown = self.read_repeatedly(begun, &mut display, &mut last, handler);
            }
        }
        let lasted = begun.elapsed();
        let mut processes = self.processes;
        if self.reads_all_before_removal {
            processes.read_last(lasted, &mut last, handler);
        }
        // The observations are removed whatever has failed so far. Signals are still blocked here, and the rest of the
        // output is written only afterwards: neither a signal nor a reader that does not read can prevent the removal.
        let removed = processes.remove_all(self.interruptible.signals());
        let unrestored = processes.restore_forked();
        let (output_was_read, rest_printed) = self.interruptible.end();
        let mut failures = StepFailures::default();
        failures.add(rest_printed);
        if let Some(table) = display.table.as_mut().filter(|_| output_was_read) {
            // Before the messages that follow: what is written below a table would be erased with it.
            failures.add(self.output.print(&table.erase_sequence()));
        }
        failures.add(shown);
        let read_until = processes.take_results(removed, lasted, &mut last, handler);
        if read_until > lasted + NOTED_DELAY {
            self.output.messages.note_to_people(&format!(
                "the figures are of {:.1} s: the observation could not be removed before",
                read_until.as_secs_f64()
            ));
        }
        for (pid, error) in unrestored {
            let failure = Failure::of_removal(pid, error);
            processes.failures.add(pid, failure);
        }
        Outcome {
            extra_time: processes.extra_time(),
            targets: processes.targets().to_vec(),
            last,
            read_until,
            lasted: lasted.max(read_until),
            output_was_read,
            of_results: self.of_results,
            failures,
            unreported: processes.unreported(),
        }
    }

    /// Reads and shows until the observation is over.
    fn read_repeatedly<H: ReadingHandler>(
        &mut self,
        begun: Instant,
        display: &mut Display,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) -> Result<(), Failure> {
        let mut running = self.processes.to_wait_for()?;
        let end = self.duration.unwrap_or(Duration::MAX);
        let mut interval = display.next_read(handler, self.processes.running_observers());
        let mut next = interval;
        // Read often even if results are shown rarely: if a process exits, or another observer takes over, the last reading
        // is all there is.
        let mut reading_at = reading_after(Duration::ZERO, interval, Duration::ZERO);
        loop {
            let left = end.min(next).min(reading_at);
            let left = left.saturating_sub(begun.elapsed());
            let signals = self.interruptible.signals();
            let wait_end = signals.wait_for(&mut running, &[], left)?;
            let at = begun.elapsed();
            if matches!(wait_end, WaitEnd::Interrupted) || at >= end {
                return Ok(());
            }
            let began = thread_time();
            let processes = &mut self.processes;
            let has_failed = processes.read_each(at, last, handler);
            let took = reading_time(processes.observers(), began);
            let has_found = processes.observe_forked(handler);
            let have_exited = matches!(wait_end, WaitEnd::Exited) && !has_found;
            if have_exited || processes.running_observers().next().is_none() {
                return Ok(());
            }
            if has_failed || has_found {
                running = processes.to_wait_for()?;
            }
            interval = display.next_read(handler, processes.running_observers());
            if at >= next {
                let mut gaps = Gaps::default();
                if display.table.is_some() {
                    gaps = processes.gaps();
                } else {
                    processes.warn_of_gaps();
                }
                let shown = ShownReadings {
                    targets: processes.targets(),
                    each: last,
                    at,
                    gaps,
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

/// Notes what is missing of processes that are newly forked.
fn note_gaps_at_forks(observation: &Observation, messages: &Messages) {
    if observation.lacks_forked() {
        messages.note(
            "times in newly forked processes are measured from about 200 ms after the fork: those of processes that exit \
             before are missing",
        );
    }
    if observation.may_lack_values_of_forked() {
        messages.note_to_people(
            "in the first 200 ms of a newly forked process, strings and fields in memory may not be read: they are shown as \
             addresses, and hits whose question needs them are untyped",
        );
    }
}
