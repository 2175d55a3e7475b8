//! `hist`: a histogram of what an expression is at each hit.

mod events;
mod keyed;

use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Observation, Target};

use super::gaps::Gaps;
use super::observe_loop::{Display, ObservationLoop, ShownReading};
use super::open_target::open_to_observe;
use super::redraw::RedrawnTable;
use super::report_file::ReportFile;
use super::several::{self, ObservationRequest, SeveralObservations};
use super::uncounted::warn_of_uncounted;
use super::untyped::warn_of_untyped;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, Counted, CountedBy, DurationFlag, FilterFlags, ForkedFlag, HistogramSource,
    HistogramSourceFlags, KeyFlags, OutputFlags, SeccompFlag, TakeOver, TargetSelection,
    WantedHistogram, duration, with_regexp_help,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{self, HistogramReading, Histograms, KeyedQuestion};
use crate::usage::UsageError;

const HELP: &str = "\
Makes a histogram of what EXPR is at each hit, inside the process, at some ten nanoseconds a hit:
one for each probe, by its name, and one for each function. EXPR is an integer, such as
    arg0        request + 1        len(page)        arg1 & 0xff        int(arg0.1)
docs/ask.md describes all expressions. When the duration is over, on Ctrl-C, or when the process
exits, it removes the instrumentation and prints, in plain format,
    count N untyped N sum N mean N min N max N p50 N p90 N p99 N p99.9 N NAME
and below it a line with a bar for each power of two, [1K, 2K) being from 1,024 to 2,047. Counts,
minimum, maximum and sum are exact; a sum that is too large to be known is shown as -. Quantiles
from -1,024 to 1,024 are exact, too; others are followed by +- and their maximum error, at most 0.1
%; with more than 128 histograms, these are -256 to 256 and 0.4 %, and with more than 512, -64 to 64
and 1.6 %. untyped are hits for which EXPR has no value, because an argument does not have the type
that EXPR needs. Of more than 24 histograms, those without hits are left out; at most 1,024 can be
made.

With -linear LO,HI,STEP there is a bar for each STEP from LO to HI, one for what is below, and one
for what is not below HI. Quantiles are as precise as the steps then.

Hits are selected by -probe, -regexp, -fn and -usdt, as for `count`, and by -where.

With -events it makes one of each runtime event of OCaml 5 whose name matches a glob, such as
minor_promoted, or all: of the values of counters and of the program's own ints, and of how long
phases and the program's spans take, in nanoseconds. An end is paired with the last begin of the
same name and domain; an end without a recorded begin is left out. untyped are events that have no
value. Each name is preceded by its kind, as in phase minor. Lines `lost WORDS domain D` say what
was overwritten before it was read. Events that are off are switched on, as by `gc`, and off again
in the end.

With -by EXPR,... there is a histogram for each key instead of one for each name: of what an
expression is at the hit, as for `count -by`, such as arg0, str(page), probe, tid, caller; up to 4.
The 20 keys with most values are shown (-top), then the number of values of the remaining keys, and
other: the histogram of the keys for which there was no room, as some 1,000 are distinguished.
Together, they have all values. Buckets are wider: exact up to 64, then at most 3 % wide.

With several processes, of -pid and -name, there is one histogram for each name, with the values of
all processes; with -by pid one for each process and name, whose line ends with PID NAME; with -by
pid,EXPR one for each process and key. If a process exits, its values are kept, and the others are
observed further. With -follow, the processes that they have forked are observed, too, and those
that they fork meanwhile: the values of these are values of the process that has forked them.

With -interval it also prints the current histograms, whose first lines begin with the seconds since
the start; on a terminal, it redraws a table of the figures. JSON has every bucket that has values.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes hist -pid N -of EXPR [FLAGS]
       ocaml-probes hist -pid N -pid M -of EXPR [FLAGS]
       ocaml-probes hist -name RE -of EXPR [FLAGS]
       ocaml-probes hist -pid N -events NAMES [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    by: Checked<KeyFlags>,
    #[command(flatten)]
    source: Checked<HistogramSourceFlags>,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    until: DurationFlag,
    #[command(flatten)]
    forked: ForkedFlag,
    #[command(flatten)]
    take_over: TakeOver,
    /// Show the histograms so far every DURATION; on a terminal, 1s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Draw the histograms into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    seccomp: SeccompFlag,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if let Some(svg) = &args.svg {
        args.output.refuse_to_overwrite("-svg", svg)?;
    }
    let output = &args.output.open()?;
    let hits = match &*args.source {
        HistogramSource::Events { globs, linear } => {
            return events::run(args, globs, *linear, output);
        }
        HistogramSource::Hits { histogram, counted } => MeasuredHits { histogram, counted },
    };
    let pids = args
        .selection
        .pids(hits.counted.needs_probes(), &output.messages)?;
    if args.by.as_ref().is_some_and(CountedBy::is_stack) {
        return Err(refused("-by stack can only be used with `count`"));
    }
    if let Some(by) = args.by.as_ref().filter(|by| !by.has_expressions()) {
        by.refuse_top().map_err(|why| refused(&why))?;
    }
    let by_pid = args.by.as_ref().is_some_and(CountedBy::has_pid);
    let is_of_several = args.selection.is_by_name() || args.forked.follow || by_pid;
    let (&[pid], false) = (&pids[..], is_of_several) else {
        return run_of_several(args, hits, &pids, output);
    };
    run_of_one(args, hits, pid, &output.clone().with_pid(pid))
}

/// Makes histograms of one process.
fn run_of_one(
    args: &Args,
    hits: MeasuredHits<'_>,
    pid: i32,
    output: &Output,
) -> Result<(), Failure> {
    let messages = &output.messages;
    let target = open_to_observe(pid, hits.counted.needs_probes(), messages)?;
    // Before anything is changed, because it may fail.
    let report_file = args.svg.as_deref().map(ReportFile::create).transpose()?;
    let display = Display::new(output, args.interval)?;
    let active = ObservationLoop::begin(
        &target,
        &observation(args, hits),
        args.seccomp.options(args.take_over.options()),
        args.until.duration,
        output,
    )?;
    if hits.counted.has_functions() {
        warn_of_uncounted(messages, active.observer(), "observed");
    }
    if let Some(question) = keyed_question(args, hits) {
        return keyed::run(question, active, display, &target, report_file, output);
    }
    let mut showing = Showing {
        target: &target,
        output,
        wanted: hits.histogram,
        last: None,
    };
    let mut outcome = active.run(display, HistogramReading::of, |shown, interruptible| {
        showing.show(shown, interruptible)
    });
    let total = match outcome.observed.take() {
        Some(report) => {
            let reading = HistogramReading::last(report.histograms, &report.counts);
            Some((reading, outcome.lasted))
        }
        None => outcome.last.take().or_else(|| showing.last.take()),
    };
    if let Some((reading, lasted)) = total {
        let targets = std::slice::from_ref(&target);
        let histograms = Histograms::new(targets, &reading, lasted, hits.histogram);
        outcome.print(output, output::histograms(output.format, &histograms));
        if let Some(report_file) = report_file {
            let written = report_file.write(histograms.picture());
            outcome.failures.add(written);
        }
        let (lines, summary) = histograms.sum();
        output.sum_up(messages, lines, || summary);
        if outcome.output_was_read {
            warn_of_untyped(messages, histograms.only_untyped());
        }
    }
    outcome.finish(messages)
}

/// The hits that are observed, and what is measured of them.
#[derive(Clone, Copy)]
struct MeasuredHits<'a> {
    histogram: &'a WantedHistogram,
    counted: &'a Counted,
}

fn observation(args: &Args, hits: MeasuredHits<'_>) -> Observation {
    let observation = args.filter.add_to(hits.counted.observation());
    let observation = hits.histogram.add_to(observation);
    match &*args.by {
        Some(by) => by.add_to(observation),
        None => observation,
    }
}

/// The expression and the keys, if there is a histogram for each key.
fn keyed_question<'a>(args: &'a Args, hits: MeasuredHits<'a>) -> Option<KeyedQuestion<'a>> {
    let by = args.by.as_ref().filter(|by| by.has_expressions())?;
    Some(KeyedQuestion {
        of: hits.histogram,
        by,
    })
}

fn refused(message: &str) -> Failure {
    Failure::Usage(UsageError::new(Some("hist"), message))
}

/// Makes histograms of several processes.
fn run_of_several(
    args: &Args,
    hits: MeasuredHits<'_>,
    pids: &[i32],
    output: &Output,
) -> Result<(), Failure> {
    if let Some(by) = args.by.as_ref().filter(|by| by.has_caller()) {
        return Err(refused(several::why_not_by_caller(by.has_pid())));
    }
    let needs_probes = hits.counted.needs_probes();
    let (targets, failures) =
        several::open(&args.selection, pids, needs_probes, args.forked, output);
    let report_file = args.svg.as_deref().map(ReportFile::create).transpose()?;
    let display = Display::new(output, args.interval)?;
    let active = SeveralObservations::begin(
        targets,
        ObservationRequest {
            observation: observation(args, hits),
            options: args.seccomp.options(args.take_over.options()),
            duration: args.until.duration,
            is_read_together: true,
        },
        args.forked,
        failures,
        output,
    )?;
    if let Some(asked) = keyed_question(args, hits) {
        return keyed::run_of_several(asked, active, display, report_file, output);
    }
    let by_pid = args.by.as_ref().is_some_and(CountedBy::has_pid);
    let of_all = |each: &[_]| HistogramReading::of_processes(each, by_pid);
    let outcome = active.run(
        display,
        |_| (),
        |_, observer, _| HistogramReading::of(observer).map(Some),
        |_, report, _| HistogramReading::last(report.histograms, &report.counts),
        |targets, each, shown, interruptible| {
            let reading = of_all(each);
            let so_far = Histograms::new(targets, &reading, shown.at, hits.histogram).so_far();
            write_so_far(&so_far, shown.table, &shown.gaps, output, interruptible)
        },
    );
    if outcome.last.is_empty() {
        return outcome.finish(output, Ok(String::new()));
    }
    let (reading, lasted) = (of_all(&outcome.last), outcome.lasted);
    let targets = outcome.targets.clone();
    let histograms = Histograms::new(&targets, &reading, lasted, hits.histogram);
    let text = output::histograms(output.format, &histograms);
    let written = report_file.map_or(Ok(()), |file| file.write(histograms.picture()));
    let (lines, summary) = histograms.sum();
    output.sum_up(&output.messages, lines, || summary);
    if outcome.output_was_read {
        warn_of_untyped(&output.messages, histograms.only_untyped());
    }
    outcome.warn_of_lead(&output.messages);
    outcome.finish(output, text).and(written)
}

/// Writes histograms while more hits are observed.
fn write_so_far(
    so_far: &Histograms<'_>,
    table: Option<&mut RedrawnTable>,
    gaps: &Gaps,
    output: &Output,
    interruptible: &mut InterruptibleOutput,
) -> Result<Next, Failure> {
    if let Some(table) = table {
        return table.redraw(&so_far.table(), gaps, interruptible);
    }
    let text = output::histograms(output.format, so_far);
    text.and_then(|text| interruptible.write(&text))
}

/// Shows histograms.
struct Showing<'t> {
    target: &'t Target,
    output: &'t Output,
    wanted: &'t WantedHistogram,
    /// The last reading, and when it was.
    last: Option<(HistogramReading, Duration)>,
}

impl Showing<'_> {
    /// Shows a reading, and keeps it, even if it could not be written.
    fn show(
        &mut self,
        shown: ShownReading<'_, HistogramReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let (reading, at) = (shown.reading, shown.at);
        let targets = std::slice::from_ref(self.target);
        let so_far = Histograms::new(targets, &reading, at, self.wanted).so_far();
        let next = write_so_far(
            &so_far,
            shown.table,
            &shown.gaps,
            self.output,
            interruptible,
        );
        self.last = Some((reading, at));
        next
    }
}
