//! `trace -count`, `-hist`, `-latency`, `-watch` and `-gc`: observes a program from its first instruction to its last.

use std::mem::take;
use std::path::Path;
use std::slice;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use probes_lib::{
    Error, Events, FunctionSelector, Launch, Observation, ObservationReport, Observer, Selector,
    Target,
};

use super::changes::print_started;
use super::closures::warn_of_refused_closures;
use super::gaps::{GapWarning, Gaps};
use super::latency::warn_of_doubts;
use super::observation_messages::{note_sites_without_nop, warn_of_still_mapped};
use super::open_target::sources;
use super::other_keys::warn_of_other_keys;
use super::program_with_events::EventsDirectory;
use super::reading_times::COUNTS_INTERVAL;
use super::slow_pairs::PendingSlowPairs;
use super::step_failures::{StepFailures, report_failures};
use super::trace_collector::CollectorReader;
use super::uncounted::{warn_of_missing_results, warn_of_uncounted_from_start};
use super::until_exit::{Waiter, wait_and_record};
use super::untyped::{only_untyped, warn_of_figures, warn_of_untyped};
use super::wait::Wait;
use super::watch::{HitPrinter, note_unknown_arguments};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    CallFlags, Checked, FieldFlags, FilterFlags, Flags, FunctionOrCollectorFlags, HistogramFlags,
    KeyFlags, NEEDS_OF, OverFlag, Pair, PairKeyFlag, PathFlags, SampleFlag, UsdtFlags, by_name,
    each_once, pair, probe_name,
};
use crate::messages::Messages;
use crate::output::{
    self, CountReport, Detail, Field, FunctionSources, HistogramReading, Histograms, Hits,
    KeyedHistogramReading, KeyedHistogramReport, KeyedQuestion, KeyedReading, KeyedReport,
    Latencies, LatencyReading, PathForm, ReportedFigures, TimesAsked,
};
use crate::question::{CountedBy, WantedHistogram};

// What to observe of a program that is started.
#[derive(Debug, clap::Args)]
pub(super) struct ObserveFlags {
    /// Count the hits of all probes, or with -fn the calls of functions
    #[arg(long)]
    count: bool,
    #[command(flatten)]
    by: Checked<KeyFlags>,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    functions: FunctionOrCollectorFlags,
    #[command(flatten)]
    usdt: UsdtFlags,
    /// Time START,STOP in one thread, or the functions of -fn; may be repeated
    #[arg(long, value_name = "PAIR", value_parser = timed, num_args = 0..=1, default_missing_value = "")]
    latency: Vec<LatencyArgument>,
    #[command(flatten)]
    key: PairKeyFlag,
    #[command(flatten)]
    over: OverFlag,
    /// Show hits of these probes, a comma list, or calls of -fn; may be repeated
    #[arg(long, value_name = "NAMES", value_parser = names_or_functions, num_args = 0..=1, default_missing_value = "")]
    watch: Vec<NamesArgument>,
    #[command(flatten)]
    calls: CallFlags,
    /// Histograms of -of at these probes, a comma list, or at calls of -fn
    #[arg(long, value_name = "NAMES", value_parser = names_or_functions, num_args = 0..=1, default_missing_value = "")]
    hist: Vec<NamesArgument>,
    #[command(flatten)]
    histogram: HistogramFlags,
    #[command(flatten)]
    sample: SampleFlag,
    #[command(flatten)]
    fields: Checked<FieldFlags>,
    #[command(flatten)]
    paths: PathFlags,
}

/// A value of `-latency`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LatencyArgument {
    Pair(Pair),
    /// The functions that `-fn` selects.
    Functions,
}

fn timed(typed: &str) -> Result<LatencyArgument, String> {
    if typed.is_empty() {
        return Ok(LatencyArgument::Functions);
    }
    pair(typed).map(LatencyArgument::Pair)
}

/// A value of `-watch` and of `-hist`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NamesArgument {
    Probes(Vec<String>),
    /// The functions that `-fn` selects.
    Functions,
}

fn names_or_functions(typed: &str) -> Result<NamesArgument, String> {
    if typed.is_empty() {
        return Ok(NamesArgument::Functions);
    }
    let names = typed.split(',').map(probe_name);
    names.collect::<Result<_, _>>().map(NamesArgument::Probes)
}

/// The names in several values.
fn names(values: &[NamesArgument]) -> Vec<String> {
    let names = values.iter().filter_map(|given| match given {
        NamesArgument::Probes(names) => Some(names),
        NamesArgument::Functions => None,
    });
    names.flatten().cloned().collect()
}

/// Checks what hits are counted by.
fn by(is_counted: bool, given: &Option<CountedBy>) -> Result<Option<CountedBy>, String> {
    let why = match given {
        Some(_) if !is_counted => "-by needs -count or -hist: it says what hits are counted by",
        Some(by) if by.is_stack() => "-by stack can only be used with `count -pid`",
        Some(by) if by.has_pid() => {
            "-by pid is for `count` and `hist`: the hits of one program are counted"
        }
        Some(by) if by.has_caller() => {
            "-by caller is for `count` and `hist`: once the program has exited, its return addresses cannot be named"
        }
        _ => return Ok(given.clone()),
    };
    Err(why.to_owned())
}

/// The checked form of [`ObserveFlags`]: what to observe of a program that is started, if anything.
#[derive(Debug)]
pub(super) struct ProgramObservation {
    /// Whether its collector is reported, from its runtime events.
    pub(super) reports_collector: bool,
    counts: bool,
    /// The keys of counts or histograms; `None`: by probe and function.
    by: Option<CountedBy>,
    /// Which hits are counted and shown.
    filter: FilterFlags,
    /// The functions that are counted; without any, `-count` counts all probes.
    functions: Vec<FunctionSelector>,
    timed_functions: Vec<FunctionSelector>,
    pairs: Vec<Pair>,
    key: PairKeyFlag,
    over: OverFlag,
    watched: Vec<Selector>,
    watched_functions: Vec<FunctionSelector>,
    calls: CallFlags,
    /// What histograms are made of, if any.
    histogram: Option<WantedHistogram>,
    histogram_probes: Vec<Selector>,
    histogram_functions: Vec<FunctionSelector>,
    sample: SampleFlag,
    /// The fields of a hit that are shown; `None`: all.
    pub(super) fields: Option<Vec<Field>>,
    paths: PathForm,
}

impl Flags for ObserveFlags {
    type Value = ProgramObservation;

    fn check(self) -> Result<ProgramObservation, String> {
        let pairs = self.pairs();
        each_once("-latency", &pairs)?;
        let uses = self.uses_of_functions();
        self.refuse_without_latency(&pairs, uses.times)?;
        self.refuse_without_watch()?;
        let by = by(self.count || !self.hist.is_empty(), &self.by)?;
        self.refuse_filter_of_nothing()?;
        let histogram = self.wanted_histogram()?;
        self.calls
            .refuse_results_of_some(&self.filter, self.sample)?;
        let (mut functions, reports_collector) = self.functions.check()?;
        let has_functions = !functions.is_empty();
        let usdt = self.usdt.selectors()?;
        if uses.times && !usdt.is_empty() {
            return Err("-usdt needs -count, -watch or -hist: its probes are not timed".to_owned());
        }
        functions.extend(usdt);
        if functions.is_empty() {
            uses.refuse_without_functions()?;
        } else {
            uses.refuse_none()?;
        }
        uses.refuse_several()?;
        if !uses.watches || !has_functions {
            self.calls.refuse_without("-watch -fn")?;
        }
        let functions_if = |is_chosen: bool| {
            if is_chosen {
                functions.clone()
            } else {
                Vec::new()
            }
        };
        Ok(ProgramObservation {
            reports_collector,
            counts: self.count,
            by,
            filter: self.filter,
            functions: functions_if(uses.counts),
            timed_functions: functions_if(uses.times),
            pairs,
            key: self.key,
            over: self.over,
            watched: by_name("-watch", &names(&self.watch))?,
            watched_functions: functions_if(uses.watches),
            calls: self.calls,
            histogram,
            histogram_probes: by_name("-hist", &names(&self.hist))?,
            histogram_functions: functions_if(uses.has_histograms),
            sample: self.sample,
            fields: self.fields.clone(),
            paths: self.paths.form(),
        })
    }
}

impl ObserveFlags {
    /// Returns the pairs of `-latency`.
    fn pairs(&self) -> Vec<Pair> {
        let pairs = self.latency.iter().filter_map(|given| match given {
            LatencyArgument::Pair(pair) => Some(pair.clone()),
            LatencyArgument::Functions => None,
        });
        pairs.collect()
    }

    fn uses_of_functions(&self) -> FunctionUses {
        FunctionUses {
            counts: self.count,
            times: self.latency.contains(&LatencyArgument::Functions),
            watches: self.watch.contains(&NamesArgument::Functions),
            has_histograms: self.hist.contains(&NamesArgument::Functions),
        }
    }

    /// Refuses flags that say how something is timed, if nothing is.
    fn refuse_without_latency(&self, pairs: &[Pair], times_functions: bool) -> Result<(), String> {
        if self.key.is_given() && pairs.is_empty() {
            let why = "-key needs -latency START,STOP: it says which STOP belongs to which START";
            return Err(why.to_owned());
        }
        if self.over.is_given() && pairs.is_empty() && !times_functions {
            let why = "-over needs -latency: it shows slow pairs and calls";
            return Err(why.to_owned());
        }
        Ok(())
    }

    /// Refuses flags that say what is shown of hits, if none are.
    fn refuse_without_watch(&self) -> Result<(), String> {
        if !self.watch.is_empty() {
            return Ok(());
        }
        if self.fields.is_some() {
            return Err("-fields needs -watch: it chooses what is shown of a hit".to_owned());
        }
        if self.sample.is_given() {
            return Err("-sample needs -watch: it chooses the hits that are recorded".to_owned());
        }
        Ok(())
    }

    fn refuse_filter_of_nothing(&self) -> Result<(), String> {
        let has_hits = self.count || !self.hist.is_empty() || !self.watch.is_empty();
        if self.filter.is_given() && !has_hits {
            let why = "-where needs -count, -hist or -watch: it chooses the hits that are counted, in a histogram, or shown";
            return Err(why.to_owned());
        }
        Ok(())
    }

    /// Checks what histograms are made of, and that `-hist` asks for them.
    fn wanted_histogram(&self) -> Result<Option<WantedHistogram>, String> {
        let histogram = self.histogram.given();
        if self.hist.is_empty() && (histogram.is_some() || self.histogram.is_linear()) {
            return Err(
                "-of and -linear need -hist: they say what histograms are made of".to_owned(),
            );
        }
        if !self.hist.is_empty() && histogram.is_none() {
            return Err(format!("-hist {NEEDS_OF}"));
        }
        if !self.hist.is_empty() && self.count {
            return Err("-hist and -count cannot be combined: histograms have counts".to_owned());
        }
        Ok(histogram)
    }
}

/// What the functions of `-fn`, `-usdt` and `-gc` are selected for.
#[derive(Clone, Copy)]
struct FunctionUses {
    counts: bool,
    times: bool,
    watches: bool,
    has_histograms: bool,
}

impl FunctionUses {
    /// Without functions, refuses each use but -count, which then counts all probes.
    fn refuse_without_functions(self) -> Result<(), String> {
        let why = if self.times {
            "-latency needs START,STOP, or -fn GLOBS or -gc WORK beside it"
        } else if self.watches {
            "-watch needs NAMES, or -fn GLOBS, -usdt GLOBS or -gc WORK beside it"
        } else if self.has_histograms {
            "-hist needs NAMES, or -fn GLOBS, -usdt GLOBS or -gc WORK beside it"
        } else {
            return Ok(());
        };
        Err(why.to_owned())
    }

    /// Refuses functions that are selected for nothing.
    fn refuse_none(self) -> Result<(), String> {
        if self.number() == 0 {
            let why = "-fn, -usdt and -gc WORK need one of -count, or -latency, -watch or -hist without a value";
            return Err(why.to_owned());
        }
        Ok(())
    }

    fn refuse_several(self) -> Result<(), String> {
        if self.number() > 1 {
            let why = "-fn, -usdt and -gc WORK choose what is counted, timed or shown: give one of -count, -latency without START,STOP, \
                       -watch without NAMES, and -hist without NAMES";
            return Err(why.to_owned());
        }
        Ok(())
    }

    fn number(self) -> usize {
        let uses = [self.counts, self.times, self.watches, self.has_histograms];
        uses.into_iter().filter(|is_one| *is_one).count()
    }
}

impl ProgramObservation {
    /// Warns of functions that were selected and are not observed, or only in part, and of sites that are no place for
    /// other tools.
    fn warn_of_unobserved(&self, messages: &Messages, observer: &Observer) {
        note_sites_without_nop(messages, observer);
        let kinds = [
            (&self.functions, "counted"),
            (&self.histogram_functions, "observed"),
            (&self.timed_functions, "timed"),
            (&self.watched_functions, "watched"),
        ];
        let kinds = kinds.iter().filter(|(functions, _)| !functions.is_empty());
        // One warning, which is about all of them.
        match kinds.map(|(_, what)| *what).collect::<Vec<_>>()[..] {
            [] => {}
            [what] => warn_of_uncounted_from_start(messages, observer, what),
            _ => warn_of_uncounted_from_start(messages, observer, "observed"),
        }
        if !self.watched_functions.is_empty() {
            warn_of_missing_results(messages, observer);
        }
        if !self.watched_functions.is_empty() || self.over.is_given() {
            note_unknown_arguments(messages, observer, self.calls.arguments());
        }
    }

    pub(super) fn observes_anything(&self) -> bool {
        self.reports_collector || self.observes_hits()
    }

    fn observes_hits(&self) -> bool {
        self.counts || self.times() || self.watches() || self.histogram.is_some()
    }

    fn times(&self) -> bool {
        !self.pairs.is_empty() || !self.timed_functions.is_empty()
    }

    /// Whether hits or slow pairs are shown.
    fn shows_records(&self) -> bool {
        self.watches() || self.over.is_given()
    }

    fn watches(&self) -> bool {
        !self.watched.is_empty() || !self.watched_functions.is_empty()
    }

    fn observation(&self) -> Observation {
        let mut observation = self.sample.add_to(self.filter.add_to(Observation::new()));
        if self.counts && self.functions.is_empty() {
            observation = observation.count(Selector::All);
        }
        if let Some(by) = &self.by {
            observation = by.add_to(observation);
        }
        if let Some(histogram) = &self.histogram {
            observation = histogram.add_to(observation);
            let probes = self.histogram_probes.iter().cloned();
            observation = probes.fold(observation, Observation::count);
        }
        let functions = self.functions.iter().chain(&self.histogram_functions);
        let functions = functions.cloned();
        observation = functions.fold(observation, Observation::count_functions);
        let timed = self.timed_functions.iter().cloned();
        observation = timed.fold(observation, Observation::time_functions);
        for pair in &self.pairs {
            observation = observation.time(&pair.start, &pair.stop);
        }
        observation = self.over.add_to(self.key.add_to(observation));
        let watched = self.watched.iter().cloned();
        observation = watched.fold(observation, Observation::watch);
        self.calls.add_to(observation, &self.watched_functions)
    }
}

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
            wanted.warn_of_unobserved(&output.messages, &observer);
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

/// Reads what is observed, and prints it.
struct ObservationPrinter<'l> {
    target: &'l Target,
    wanted: &'l ProgramObservation,
    output: &'l Output,
    watching: HitPrinter,
    slow_pairs: PendingSlowPairs,
    warning: GapWarning,
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
            begun,
        }
    }

    /// Shows hits until the program has exited, then prints what was observed, even if showing hits has failed.
    fn run(mut self, mut observer: Observer, waiter: &Waiter) -> Result<(), Failure> {
        let mut failures = StepFailures::default();
        let replaced = self.show_until_end(&mut observer, waiter, &mut failures);
        let lasted = self.begun.elapsed();
        let (pid, messages) = (self.target.pid(), self.output.messages);
        let removed = replaced.map_or_else(|| waiter.trace(|| observer.remove()), Err);
        let (observed, replaced) = match removed {
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
        self.slow_pairs.add_dropped(events.dropped);
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
