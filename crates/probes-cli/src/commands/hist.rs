//! `hist`: a histogram of what an expression is at each hit.

mod events;
mod keyed;

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Observation, ObservationReport, Observer, Target};

use super::observations::ObservationRequest;
use super::opened_processes::{ChosenProcesses, why_not_by_caller};
use super::readings::{Display, FiguresHandler, ReadingHandler, ShownReadings, as_one};
use super::report_file::ReportFile;
use super::uncounted::warn_of_uncounted;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, Counted, DurationFlag, FilterFlags, ForkedFlag, HistogramSource, HistogramSourceFlags,
    KeyFlags, OutputFlags, OverrideFlags, TargetSelection, duration, with_regexp_help,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{HistogramReading, Histograms, KeyedQuestion};
use crate::question::{CountedBy, WantedHistogram};
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
other: the histogram of the keys for which there was no room, as about 1,000 are distinguished.
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
    /// Show the histograms so far every DURATION; on a terminal, 1s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Draw the histograms into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if let Some(svg) = &args.svg {
        args.output.refuse_to_overwrite("-svg", svg)?;
    }
    let output = args.output.open()?;
    let hits = match &*args.source {
        HistogramSource::Events { globs, linear } => {
            return events::run(args, globs, *linear, &output);
        }
        HistogramSource::Hits { histogram, counted } => MeasuredHits { histogram, counted },
    };
    let (selection, needs_probes) = (&args.selection, hits.counted.needs_probes());
    let by_pid = args.by.as_ref().is_some_and(CountedBy::has_pid);
    let chosen = ChosenProcesses::of(selection, needs_probes, by_pid, args.forked, &output)?;
    let is_of_several = chosen.is_of_several;
    if args.by.as_ref().is_some_and(CountedBy::is_stack) {
        return Err(refused("-by stack can only be used with `count`"));
    }
    if let Some(by) = args.by.as_ref().filter(|by| !by.has_expressions()) {
        by.refuse_top().map_err(|why| refused(&why))?;
    }
    if is_of_several && args.by.as_ref().is_some_and(CountedBy::has_caller) {
        return Err(refused(why_not_by_caller(by_pid)));
    }
    let (opened, output) = chosen.open(output)?;
    // Before anything is changed, because it may fail.
    let report_file = ReportFile::create_if_given(args.svg.as_deref(), &output.messages)?;
    let display = Display::new(&output, args.interval)?;
    let only = opened.only().cloned();
    let active = opened.begin(
        ObservationRequest {
            observation: observation(args, hits),
            options: args.overrides.options(),
            duration: args.until.duration,
            reads_all_before_removal: true,
        },
        &output,
    )?;
    if let Some(observer) = active.only().filter(|_| hits.counted.has_functions()) {
        warn_of_uncounted(&output.messages, observer, "observed");
    }
    if let Some(question) = keyed_question(args, hits) {
        let mut printer = keyed::KeyedHistogramPrinter::new(question, only.as_ref(), &output);
        let outcome = active.run(display, &mut printer);
        return outcome.finish_with(Ok(String::new()), &printer, report_file, &output);
    }
    let mut printer = HistogramPrinter {
        output: &output,
        is_of_several,
        by_pid,
        wanted: hits.histogram,
    };
    let outcome = active.run(display, &mut printer);
    outcome.finish_with(Ok(String::new()), &printer, report_file, &output)
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

/// Reads and shows histograms.
struct HistogramPrinter<'o> {
    output: &'o Output,
    is_of_several: bool,
    by_pid: bool,
    wanted: &'o WantedHistogram,
}

impl ReadingHandler for HistogramPrinter<'_> {
    type Reading = HistogramReading;

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<HistogramReading>> {
        HistogramReading::of(observer).map(Some)
    }

    fn last(&mut self, _: i32, report: ObservationReport, _: Duration) -> HistogramReading {
        HistogramReading::last(report.histograms, &report.counts)
    }

    fn show(
        &mut self,
        shown: ShownReadings<'_, HistogramReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        shown.show(self, self.output.format, interruptible)
    }
}

impl FiguresHandler for HistogramPrinter<'_> {
    type Figures<'f>
        = Histograms<'f>
    where
        Self: 'f;

    fn joined<'r>(&self, each: &'r [(i32, HistogramReading)]) -> Cow<'r, HistogramReading> {
        let join = || HistogramReading::of_processes(each, self.by_pid);
        as_one(each, self.is_of_several, join)
    }

    fn figures<'f>(
        &'f self,
        targets: &'f [Target],
        reading: &'f HistogramReading,
        at: Duration,
    ) -> Histograms<'f> {
        Histograms::new(targets, reading, at, self.wanted)
    }
}
