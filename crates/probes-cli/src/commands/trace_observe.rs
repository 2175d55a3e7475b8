//! `trace -count`, `-hist`, `-latency`, `-watch` and `-gc`: observes a program from its first instruction to its last.

use std::mem::take;
use std::path::Path;
use std::slice;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use probes_lib::{Error, Events, Launch, ObservationReport, Observer, Target};

use super::changes::print_started;
use super::closures::warn_of_refused_closures;
use super::doubtful_times::warn_of_doubts;
use super::gaps::{GapWarning, Gaps};
use super::observation_messages::{note_sites_without_nop, warn_of_still_mapped};
use super::open_target::sources;
use super::other_keys::warn_of_other_keys;
use super::program_with_events::EventsDirectory;
use super::reading_times::COUNTS_INTERVAL;
use super::seen_exec::SeenExec;
use super::slow_pairs::PendingSlowPairs;
use super::step_failures::{StepFailures, report_failures};
use super::trace_collector::CollectorReader;
use super::uncounted::{
    note_unknown_arguments, warn_of_missing_results, warn_of_uncounted_from_start,
};
use super::until_exit::{Waiter, wait_and_record};
use super::untyped::{only_untyped, warn_of_figures, warn_of_untyped};
use super::wait::Wait;
use super::watch::HitPrinter;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::ProgramObservation;
use crate::messages::Messages;
use crate::output::{
    self, CountReport, Detail, FunctionSources, HistogramReading, Histograms, Hits,
    KeyedHistogramReading, KeyedHistogramReport, KeyedQuestion, KeyedReading, KeyedReport,
    Latencies, LatencyReading, ReportedFigures, TimesAsked,
};
use crate::question::WantedHistogram;

/// Starts a program, waits until it exits and prints what was observed; returns the status to exit with: the
/// program's, but that of a failure if the program succeeded and what was observed could not be printed.
pub(super) fn run(
    launch: Launch,
    wait: Wait,
    wanted: &ProgramObservation,
    output: &Output,
    program: &Path,
    directory: Option<&EventsDirectory>,
) -> Result<u8, Failure> {
    let launch = if wanted.observes_hits() {
        launch.observe(wanted.observation())
    } else {
        launch.may_lack_probes()
    };
    let launched = launch.spawn();
    let mut launched = launched.map_err(Failure::of_program(program))?;
    let begun = Instant::now();
    let pid = launched.report().pid;
    let output = &output.clone().with_pid(pid);
    let printed = print_started(output, program, launched.report());
    let collector = directory.map(|it| CollectorReader::new(pid, program, output, it, begun));
    let observed = launched.take_observer();
    let (status, recorded) = match observed {
        Some(observer) => {
            warn_of_refused_closures(&output.messages, pid, observer.code_digest());
            let target = observer.target().clone();
            warn_of_unobserved(wanted, &output.messages, &observer);
            let functions = observer.functions().map(FunctionSources::of);
            let recorder = ObservationPrinter::new(&target, wanted, functions, output, begun);
            wait_and_record(launched, wait, |waiter| match collector {
                Some(collector) => {
                    collector.run_beside(&waiter.exited, || recorder.run(observer, waiter))
                }
                None => recorder.run(observer, waiter),
            })
        }
        None => match collector {
            Some(collector) => {
                wait_and_record(launched, wait, |waiter| collector.run(&waiter.exited))
            }
            None => (wait.until_exit(launched), Ok(())),
        },
    };
    // Reported also if waiting has failed.
    let is_complete = report_failures([recorded, printed], &output.messages);
    let status = status.map_err(Failure::of_waiting)?;
    Ok(status.max((!is_complete).into()))
}

/// Warns of functions that were selected and are not observed, or only in part, and of sites that are no place for
/// other tools.
fn warn_of_unobserved(wanted: &ProgramObservation, messages: &Messages, observer: &Observer) {
    note_sites_without_nop(messages, observer);
    // One warning, which is about all of them.
    match wanted.function_uses()[..] {
        [] => {}
        [what] => warn_of_uncounted_from_start(messages, observer, what),
        _ => warn_of_uncounted_from_start(messages, observer, "observed"),
    }
    if wanted.watches_functions() {
        warn_of_missing_results(messages, observer);
    }
    if wanted.watches_functions() || wanted.over.is_given() {
        note_unknown_arguments(messages, observer, wanted.calls.arguments());
    }
}

/// Reads what is observed, and prints it.
struct ObservationPrinter<'l> {
    target: &'l Target,
    wanted: &'l ProgramObservation,
    output: &'l Output,
    watching: HitPrinter,
    slow_pairs: PendingSlowPairs,
    warning: GapWarning,
    seen_exec: SeenExec,
    begun: Instant,
}

impl<'l> ObservationPrinter<'l> {
    fn new(
        target: &'l Target,
        wanted: &'l ProgramObservation,
        functions: Option<FunctionSources>,
        output: &'l Output,
        begun: Instant,
    ) -> ObservationPrinter<'l> {
        // Not read if no hits are shown, because it takes long.
        let sources = wanted.watches().then(|| sources(target));
        let sources = sources.unwrap_or_default();
        let mut hits = Hits::new(output.format, wanted.paths);
        if functions.is_some() && wanted.watched.is_empty() {
            hits = hits.of_functions_only();
        }
        let functions = functions.unwrap_or_default();
        hits.add_process(target, sources, functions);
        let hits = hits.of_fields(wanted.fields.as_deref());
        ObservationPrinter {
            target,
            wanted,
            output,
            watching: HitPrinter::new(hits, output.clone()),
            slow_pairs: PendingSlowPairs::new(output, None),
            warning: GapWarning::default(),
            seen_exec: SeenExec::default(),
            begun,
        }
    }

    /// Shows hits until the program has exited, then prints what was observed, even if showing hits has failed.
    fn run(mut self, mut observer: Observer, waiter: &Waiter) -> Result<(), Failure> {
        let mut failures = StepFailures::default();
        let replaced = self.show_until_end(&mut observer, waiter, &mut failures);
        let lasted = self.seen_exec.lasted(self.begun.elapsed());
        let (pid, messages) = (self.target.pid(), self.output.messages);
        // Also if another tool has taken over: it may have been killed, and have left something.
        let removed = waiter.trace(|| observer.remove());
        let (observed, replaced) = match replaced.map_or(removed, Err) {
            Ok(observed) => (Ok(observed), None),
            Err(error) if error.is_replaced() => (recorded(&mut observer), Some(error)),
            Err(error) => (Err(error), None),
        };
        match observed.map_err(Failure::of_process(pid)) {
            Ok(observed) => {
                self.warn(&observer);
                self.print_all(observed, lasted, &mut failures);
            }
            Err(failure) => failures.add(Err(failure)),
        }
        let replaced = replaced.map_or(Ok(()), Err);
        failures.add(replaced.map_err(|error| Failure::of_removal(pid, error)));
        failures.finish(&messages)
    }

    /// Prints what was observed and has not been shown yet.
    fn print_all(
        &mut self,
        mut observed: ObservationReport,
        lasted: Duration,
        failures: &mut StepFailures,
    ) {
        warn_of_still_mapped(
            &self.output.messages,
            self.target.pid(),
            observed.still_mapped,
        );
        failures.add(self.show(take(&mut observed.events)));
        failures.add(self.watching.report_missing());
        if self.wanted.counts {
            failures.add(self.print_counts(&mut observed, lasted));
        }
        if let Some(wanted) = &self.wanted.histogram {
            failures.add(self.print_histograms(wanted, &mut observed, lasted));
        }
        if self.wanted.times() {
            let reading = LatencyReading::last(
                observed.latencies,
                observed.function_latencies,
                observed.keyed_times,
                &observed.counts,
            );
            self.print_times(&reading, lasted, failures);
        }
    }

    fn print(&self, text: String) -> Result<(), Failure> {
        self.output.print_result(&text)
    }

    fn print_counts(
        &self,
        observed: &mut ObservationReport,
        lasted: Duration,
    ) -> Result<(), Failure> {
        let format = self.output.format;
        let Some(by) = &self.wanted.by else {
            let detail = Detail::default();
            let counts = CountReport::new(self.target, &observed.counts, &detail);
            self.print(output::counted(format, &counts.hits_since(None, lasted))?)?;
            let only_untyped = only_untyped(&observed.counts);
            warn_of_untyped(&self.output.messages, only_untyped, self.of_results());
            return Ok(());
        };
        let keyed = observed.keyed_counts.take();
        let reading = KeyedReading::last(keyed, observed.counts.refused());
        let sources = FunctionSources::default();
        let targets = slice::from_ref(self.target);
        let report = KeyedReport::new(targets, &reading, None, lasted, by, &sources);
        self.print(output::keyed(format, &report)?)?;
        let messages = &self.output.messages;
        warn_of_untyped(messages, report.only_untyped(), self.of_results());
        warn_of_other_keys(messages, report.of_other_keys());
        Ok(())
    }

    fn print_histograms(
        &self,
        wanted: &WantedHistogram,
        observed: &mut ObservationReport,
        lasted: Duration,
    ) -> Result<(), Failure> {
        let targets = slice::from_ref(self.target);
        let Some(by) = &self.wanted.by else {
            let histograms = take(&mut observed.histograms);
            let reading = HistogramReading::last(histograms, &observed.counts);
            let histograms = Histograms::new(targets, &reading, lasted, wanted);
            return self.print_figures(&histograms);
        };
        let keyed = observed.keyed_histograms.take();
        let reading = KeyedHistogramReading::last(keyed, observed.counts.refused());
        let (asked, sources) = (KeyedQuestion { of: wanted, by }, FunctionSources::default());
        self.print_figures(&KeyedHistogramReport::new(
            targets, &reading, lasted, asked, &sources,
        ))
    }

    /// Prints figures, and warns of what is wrong with them.
    fn print_figures(&self, report: &impl ReportedFigures) -> Result<(), Failure> {
        self.print(report.text(self.output.format)?)?;
        warn_of_figures(&self.output.messages, report, self.of_results());
        Ok(())
    }

    /// Whether hits were asked for the results of functions.
    fn of_results(&self) -> bool {
        self.wanted.observation().asks_for_results()
    }

    fn print_times(
        &mut self,
        reading: &LatencyReading,
        lasted: Duration,
        failures: &mut StepFailures,
    ) {
        if self.wanted.over.is_given() {
            let slow = self.slow_pairs.text(|_| Some(reading));
            failures.add(slow.and_then(|text| self.print(text)));
        }
        let sources = FunctionSources::default();
        let asked = TimesAsked {
            sources: &sources,
            by: None,
        };
        let latencies = Latencies::new(slice::from_ref(self.target), reading, lasted, asked);
        failures.add(self.print_figures(&latencies));
        warn_of_doubts(&self.output.messages, &latencies);
    }

    /// Shows hits until the program has exited; returns the error if another tool takes over.
    fn show_until_end(
        &mut self,
        observer: &mut Observer,
        waiter: &Waiter,
        failures: &mut StepFailures,
    ) -> Option<probes_lib::Error> {
        let mut checked = Instant::now();
        let mut shows_hits = self.wanted.shows_records();
        while waiter.exited.recv_timeout(self.read_interval(observer))
            == Err(RecvTimeoutError::Timeout)
        {
            if shows_hits {
                let shown = self.show_hits(observer);
                shows_hits = shown.is_ok();
                failures.add(shown);
            }
            if checked.elapsed() < COUNTS_INTERVAL {
                continue;
            }
            checked = Instant::now();
            let check = waiter.trace(|| observer.check());
            let of = (self.target.pid(), &self.output.messages);
            self.seen_exec.note(&check, self.begun.elapsed(), of);
            self.warn(observer);
            if let Some(error) = check.err().filter(Error::is_replaced) {
                return Some(error);
            }
        }
        None
    }

    fn warn(&mut self, observer: &Observer) {
        self.warning
            .update(&self.output.messages, &Gaps::of(observer));
    }

    fn read_interval(&self, observer: &Observer) -> Duration {
        if self.wanted.shows_records() {
            observer.next_read()
        } else {
            COUNTS_INTERVAL
        }
    }

    /// Shows the hits and slow pairs so far. If they cannot be read because the process has just exited,
    /// [`ObservationPrinter::run`] shows them after its loop.
    fn show_hits(&mut self, observer: &mut Observer) -> Result<(), Failure> {
        let Ok(events) = observer.events() else {
            return Ok(());
        };
        self.show(events)?;
        if self.wanted.over.is_given() && self.slow_pairs.are_due() {
            if let Ok(reading) = LatencyReading::of(observer) {
                let text = self.slow_pairs.text(|_| Some(&reading))?;
                return self.output.print(&text);
            }
        }
        Ok(())
    }

    /// Shows hits; slow pairs wait for a reading of all times.
    fn show(&mut self, mut events: Events) -> Result<(), Failure> {
        if self.wanted.over.is_given() {
            self.slow_pairs.add(None, take(&mut events.slow_pairs));
        }
        if self.wanted.watches() {
            return self.watching.show_at_once(self.target.pid(), events);
        }
        self.slow_pairs.add_dropped(&events);
        Ok(())
    }
}

/// What was recorded until another tool took over.
fn recorded(observer: &mut Observer) -> probes_lib::Result<ObservationReport> {
    Ok(ObservationReport {
        counts: observer.counts()?,
        latencies: observer.latencies()?,
        function_latencies: observer.function_latencies()?,
        histograms: observer.histograms()?,
        keyed_counts: observer.keyed_counts()?,
        keyed_histograms: observer.keyed_histograms()?,
        keyed_times: observer.keyed_times()?,
        events: observer.events()?,
        discarded: observer.discarded(),
        stopped: Duration::ZERO,
        still_mapped: 0,
        unrestored: Vec::new(),
    })
}
