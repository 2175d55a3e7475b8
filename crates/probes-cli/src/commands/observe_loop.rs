//! What the commands that observe one process for a time have in common (`count`, `gc`, `hist`, `latency`, `record`,
//! `watch`): the process is read periodically, and in the end the observation is removed, also after an error. If the
//! removal fails, the command fails with that error.

use std::iter;
use std::slice;
use std::time::{Duration, Instant};

use probes_lib::{Error, Observation, Observer, Options, Target};

use super::closures::warn_of_refused_closures;
use super::gaps::{GapWarning, Gaps};
use super::readings::{Display, Outcome, ReadingHandler, ShownReadings, Unreported};
use super::step_failures::StepFailures;
use super::undo::retry;
use crate::clock::thread_time;
use crate::destination::Output;
use crate::failure::{Failure, exit_or_exec};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::WarningKind;
use crate::progress::LongWork;
use crate::signals::{RunningProcesses, TerminationSignals, WaitEnd};
use crate::text::join_first_few;

/// How often a process is read, however seldom readings are shown. If the process exits, the last reading is all there
/// is.
pub(super) const COUNTS_INTERVAL: Duration = Duration::from_millis(200);

/// When a process is read for the first time: one that exits soon has hits, too.
const FIRST_READING: Duration = Duration::from_millis(2);

/// A process that is observed.
pub(super) struct ObservationLoop<'o> {
    target: Target,
    observer: Observer,
    begun: Instant,
    duration: Option<Duration>,
    /// When the last reading was, since the beginning.
    read_at: Option<Duration>,
    interruptible: InterruptibleOutput,
    output: &'o Output,
    warning: GapWarning,
    of_results: bool,
}

impl<'o> ObservationLoop<'o> {
    /// Begins to observe a process, for `duration` or until a signal comes.
    pub(super) fn begin(
        target: &Target,
        observation: &Observation,
        options: Options,
        duration: Option<Duration>,
        output: &'o Output,
    ) -> Result<ObservationLoop<'o>, Failure> {
        let observe = || target.observe(observation, options);
        let begun = ObservationLoop::begin_by(target, duration, output, observe)?;
        Ok(ObservationLoop {
            of_results: observation.asks_for_results(),
            ..begun
        })
    }

    /// Same as [`ObservationLoop::begin`], with the observer that `observe` returns.
    pub(super) fn begin_by(
        target: &Target,
        duration: Option<Duration>,
        output: &'o Output,
        observe: impl FnOnce() -> probes_lib::Result<Observer>,
    ) -> Result<ObservationLoop<'o>, Failure> {
        let observe = || observe_by(target, &output.messages, observe);
        ObservationLoop::with_observer(target, None, duration, output, observe)
    }

    /// Continues the observation of a program that was started under observation.
    pub(super) fn of(
        target: &Target,
        observer: Observer,
        duration: Option<Duration>,
        output: &'o Output,
    ) -> Result<ObservationLoop<'o>, Failure> {
        let program = Some(target.pid());
        ObservationLoop::with_observer(target, program, duration, output, || {
            warn_of_refused_closures(&output.messages, target.pid(), observer.code_digest());
            Ok(observer)
        })
    }

    /// Signals are passed on to `program`.
    fn with_observer(
        target: &Target,
        program: Option<i32>,
        duration: Option<Duration>,
        output: &'o Output,
        observer: impl FnOnce() -> Result<Observer, Failure>,
    ) -> Result<ObservationLoop<'o>, Failure> {
        // Signals are blocked before anything is changed, so that none can keep the observation
        // from being removed.
        let signals = TerminationSignals::block_and_pass_on(program)?;
        let mut interruptible = InterruptibleOutput::new(output, signals)?;
        let observer = observer()?;
        let begun = Instant::now();
        interruptible.set_deadline(duration.and_then(|after| begun.checked_add(after)));
        Ok(ObservationLoop {
            target: target.clone(),
            observer,
            begun,
            duration,
            read_at: None,
            interruptible,
            output,
            warning: GapWarning::default(),
            of_results: false,
        })
    }

    pub(super) fn observer(&self) -> &Observer {
        &self.observer
    }

    pub(super) fn messages(&self) -> Messages {
        self.output.messages
    }

    /// Calls [`ReadingHandler::show`] at the intervals of `display` until the observation is over; then removes the
    /// observation. If the intervals are long, the process is read in between, too, because it may exit before the next
    /// reading is shown. A table that is redrawn is erased in the end. Returns what was observed until then, whatever
    /// fails.
    pub(super) fn run<H: ReadingHandler>(
        mut self,
        mut display: Display,
        handler: &mut H,
    ) -> Outcome<H::Reading> {
        let mut last = Vec::new();
        let begun = self.output.begin();
        let read_result =
            begun.and_then(|()| self.read_repeatedly(&mut display, &mut last, handler));
        let lasted = self.begun.elapsed();
        // Removed whatever has failed so far.
        let removed = retry(self.interruptible.signals(), &self.output.messages, || {
            self.observer.remove()
        });
        let gaps = Gaps::of(&self.observer);
        let (output_was_read, rest_printed) = self.interruptible.end();
        let mut failures = StepFailures::default();
        failures.add(rest_printed);
        if let Some(table) = display.table.as_mut().filter(|_| output_was_read) {
            // Before the messages that follow: what is written below a table would be erased with it.
            failures.add(self.output.print(&table.erase_sequence()));
        }
        let (read_error, shown) = match read_result {
            Ok(read) => (read.err(), Ok(())),
            Err(failure) => (None, Err(failure)),
        };
        failures.add(shown);
        let pid = self.target.pid();
        let read_until = match removed {
            Ok(report) => {
                warn_of_still_mapped(&self.output.messages, pid, report.still_mapped);
                failures.add(
                    read_error
                        .map_or(Ok(()), Err)
                        .map_err(Failure::of_process(pid)),
                );
                last = vec![(pid, handler.last(pid, report, Duration::ZERO))];
                lasted
            }
            Err(error) => {
                if let Some(exit_or_exec) = exit_or_exec(&error) {
                    let subject = format!("the process {exit_or_exec}");
                    warn_of_unread_end(&self.output.messages, &subject, self.read_at, lasted);
                } else {
                    // The earlier error is more likely to name the observer that replaced this one.
                    let error = read_error.filter(Error::is_replaced).unwrap_or(error);
                    let why = if error.is_replaced() {
                        format!("another tool observes process {pid} now")
                    } else {
                        format!("process {pid} cannot be read any more")
                    };
                    self.output
                        .messages
                        .note(&format!("{why}: the results are those of the last reading"));
                    let failure = Failure::of_removal(pid, error);
                    failures.add(Err(failure));
                }
                self.read_at.unwrap_or(lasted)
            }
        };
        Outcome {
            targets: vec![self.target],
            last,
            read_until,
            lasted,
            output_was_read,
            of_results: self.of_results,
            failures,
            unreported: Unreported::OfOne(self.warning, gaps),
        }
    }

    /// Reads and shows until the observation is over. The inner error is that of a reading that
    /// failed, the outer one that of waiting or showing.
    fn read_repeatedly<H: ReadingHandler>(
        &mut self,
        display: &mut Display,
        last: &mut Vec<(i32, H::Reading)>,
        handler: &mut H,
    ) -> Result<probes_lib::Result<()>, Failure> {
        let pid = self.target.pid();
        let mut running = RunningProcesses::of(iter::once(&self.target))?;
        let end = self.duration.unwrap_or(Duration::MAX);
        let mut interval = display.next_read(handler, [&self.observer]);
        let mut next = interval;
        // Read often even if results are shown rarely: if the process exits, or another observer
        // takes over, the last reading is all there is.
        let mut reading_at = reading_after(Duration::ZERO, interval, Duration::ZERO);
        loop {
            let left = end.min(next).min(reading_at);
            let left = left.saturating_sub(self.begun.elapsed());
            let signals = self.interruptible.signals();
            let wait_end = signals.wait_for(&mut running, left)?;
            let at = self.begun.elapsed();
            if !matches!(wait_end, WaitEnd::Timeout) || at >= end {
                return Ok(Ok(()));
            }
            let began = thread_time();
            match handler.read(pid, &mut self.observer, Duration::ZERO) {
                Ok(Some(reading)) => {
                    self.read_at = Some(at);
                    *last = vec![(pid, reading)];
                }
                Ok(None) => {}
                Err(error) => return Ok(Err(error)),
            }
            let took = reading_time([&self.observer], began);
            interval = display.next_read(handler, [&self.observer]);
            if at >= next {
                let gaps = Gaps::of(&self.observer);
                if display.table.is_none() {
                    self.warning.update(&self.output.messages, &gaps);
                }
                let shown = ShownReadings {
                    targets: slice::from_ref(&self.target),
                    each: last,
                    at,
                    gaps,
                    table: display.table.as_mut(),
                };
                if let Next::Stop = handler.show(shown, &mut self.interruptible)? {
                    return Ok(Ok(()));
                }
                next = next_time(at, interval);
            }
            reading_at = reading_after(at, interval, took);
        }
    }
}

/// Observes a process by `observe`. Notes how long that stopped the process, and whether the process is in a job
/// control stop.
pub(super) fn observe_by(
    target: &Target,
    messages: &Messages,
    observe: impl FnOnce() -> probes_lib::Result<Observer>,
) -> Result<Observer, Failure> {
    let pid = target.pid();
    // An error means that it has exited, which `observe` reports.
    let is_stopped = target.is_stopped().unwrap_or(false);
    let preparing = LongWork::begin(format!("preparing to observe process {pid}"), messages);
    let observer = observe();
    drop(preparing);
    let observer = observer.map_err(Failure::of_process(pid))?;
    warn_of_refused_closures(messages, pid, observer.code_digest());
    messages.note(&format!("stopped {} us", observer.stopped().as_micros()));
    note_sites_without_nop(messages, &observer);
    if is_stopped {
        messages.note(&format!(
            "process {pid} is stopped (state T): it executes nothing until `kill -CONT {pid}`"
        ));
    }
    Ok(observer)
}

/// Notes the sites of USDT probes that no other tool may begin to trace meanwhile.
pub(super) fn note_sites_without_nop(messages: &Messages, observer: &Observer) {
    let mut sites: Vec<&str> = observer.sites_without_nop().map(|(name, _)| name).collect();
    sites.sort_unstable();
    sites.dedup();
    if let Some(names) = join_first_few(&sites) {
        messages.note(&format!(
            "do not attach bpftrace or perf to {names} until this command ends: the nop there is overwritten, and the program would crash"
        ));
    }
}

/// Warns of the hits that are missing of a process that has exited or exec'd after it was observed for `lasted`.
/// `subject` says which of the two.
pub(super) fn warn_of_unread_end(
    messages: &Messages,
    subject: &str,
    read_at: Option<Duration>,
    lasted: Duration,
) {
    let missing = match read_at {
        None => "it was not read before that, so it has no results".to_owned(),
        Some(at) => format!(
            "the last reading is {} ms old, and hits since then are missing",
            lasted.saturating_sub(at).as_millis()
        ),
    };
    messages.warning(
        WarningKind::UnreadEnd,
        &format!("{subject}: {missing}"),
        "results are kept in the memory of the process; a program that `trace` or `record -prog` starts is observed to its last hit",
    );
}

/// Says that memory stays mapped in a process that is not observed any more.
pub(super) fn warn_of_still_mapped(messages: &Messages, pid: i32, bytes: u64) {
    if bytes > 0 {
        let why = "a thread may still return there, or the process has installed a seccomp filter meanwhile";
        messages.warning(
            WarningKind::StillMapped,
            &format!("{bytes} bytes stay mapped in process {pid} (harmless): {why}"),
            &format!("`ocaml-probes observe -clean -pid {pid}` unmaps them later"),
        );
    }
}

/// When a process is read after the reading `at`: at first when twice as much time has passed, then five times a
/// second.
pub(super) fn next_reading(at: Duration) -> Duration {
    if at < COUNTS_INTERVAL {
        (2 * at).clamp(FIRST_READING, COUNTS_INTERVAL)
    } else {
        next_time(at, COUNTS_INTERVAL)
    }
}

/// How much processor time a reading has taken since it `began`; zero if the processes have to be read at every
/// interval, whatever that costs.
pub(super) fn reading_time<'o>(
    observers: impl IntoIterator<Item = &'o Observer>,
    began: Duration,
) -> Duration {
    if observers.into_iter().any(Observer::has_to_be_read) {
        return Duration::ZERO;
    }
    thread_time().saturating_sub(began)
}

/// When a process is read next, after the reading `at`, which `took` this much processor time, if readings are shown
/// at the `interval`. Readings in between are so rare that they cost less than a hundredth of a processor, but at
/// most 0.4 s apart.
pub(super) fn reading_after(at: Duration, interval: Duration, took: Duration) -> Duration {
    let due = if at.is_zero() || interval > COUNTS_INTERVAL {
        next_reading(at)
    } else {
        next_time(at, interval)
    };
    if at < COUNTS_INTERVAL {
        return due;
    }
    let pause = took.saturating_mul(120).min(2 * COUNTS_INTERVAL);
    due.max(at.saturating_add(pause))
}

/// The first multiple of `interval` after `at`.
pub(super) fn next_time(at: Duration, interval: Duration) -> Duration {
    let passed = at.as_nanos() % interval.as_nanos().max(1);
    let left = interval.as_nanos().saturating_sub(passed);
    at.saturating_add(Duration::from_nanos(
        u64::try_from(left).unwrap_or(u64::MAX),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_time_is_a_multiple_of_the_interval() {
        let ms = Duration::from_millis;
        assert_eq!(next_time(ms(1000), ms(1000)), ms(2000));
        assert_eq!(next_time(ms(1001), ms(1000)), ms(2000));
        assert_eq!(next_time(ms(5900), ms(1000)), ms(6000));
        assert_eq!(
            next_time(ms(7), Duration::from_nanos(1)),
            ms(7) + Duration::from_nanos(1)
        );
        assert_eq!(next_time(Duration::MAX, ms(1)), Duration::MAX);
    }

    #[test]
    fn process_is_read_soon_then_regularly() {
        let ms = Duration::from_millis;
        assert_eq!(next_reading(Duration::ZERO), FIRST_READING);
        assert_eq!(next_reading(ms(3)), ms(6));
        assert_eq!(next_reading(ms(150)), COUNTS_INTERVAL);
        assert_eq!(next_reading(ms(250)), 2 * COUNTS_INTERVAL);
        assert_eq!(next_reading(Duration::MAX), Duration::MAX);
        // Short intervals are no reason to read later for the first time.
        for interval in [ms(50), COUNTS_INTERVAL] {
            let after = |at| reading_after(at, interval, Duration::ZERO);
            assert_eq!(
                (after(Duration::ZERO), after(ms(3))),
                (FIRST_READING, interval)
            );
        }
        // After a reading that took long, the next one is later.
        for (at, took, expected) in [
            (ms(3), Duration::ZERO, ms(6)),
            // Unless it was one of the first.
            (ms(3), ms(1000), ms(6)),
            (ms(1000), ms(1), ms(1200)),
            (ms(1000), ms(3), ms(1360)),
            (ms(1000), ms(1000), ms(1400)),
            (Duration::MAX, Duration::MAX, Duration::MAX),
        ] {
            assert_eq!(reading_after(at, Duration::MAX, took), expected);
        }
    }
}
