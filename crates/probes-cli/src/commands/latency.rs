//! `latency`: how long it takes from one probe to another, and how long calls of functions last.

use std::borrow::Cow;
use std::mem::take;
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Functions, ObservationReport, Observer, Stacks, Target};

use super::doubtful_times::{warn_of_doubts, warn_of_separate_stacks};
use super::observations::ObservationRequest;
use super::opened_processes::{ChosenProcesses, why_not_by_caller};
use super::readings::{Display, FiguresHandler, Outcome, ReadingHandler, ShownReadings, as_one};
use super::report_file::ReportFile;
use super::slow_pairs::PendingSlowPairs;
use super::uncounted::{note_unknown_arguments, warn_of_uncounted};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    CallArgumentsFlag, Checked, DurationFlag, ForkedFlag, OutputFlags, OverrideFlags,
    TargetSelection, TimedFlags, duration,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{FunctionSources, Latencies, LatencyReading, ReportedFigures, TimesAsked};
use crate::usage::UsageError;

const HELP: &str = "\
Measures latencies inside the process, whether the probes are enabled or not: a STOP ends the last
START of its thread that has not ended yet, so that pairs may be nested. When the duration is over,
on Ctrl-C, or when the process exits, it removes the instrumentation and prints, in plain format,
    COUNT MEAN P50 P90 P99 P99.9 MAX UNMATCHED_STARTS UNMATCHED_STOPS LOST START,STOP
in nanoseconds. UNMATCHED_STARTS and UNMATCHED_STOPS are the hits of START and of STOP that have no
match. LOST are times that could not be measured, because more than 64 starts of a thread had not
ended yet, with -key more than about 10,000 of all, or because there were more than a thousand
threads. The table format also shows a histogram of the times, with a bucket for each power of two.
With -interval each line begins with the seconds so far.

Requests that overlap in one thread, as with Lwt, Async or Eio, or move between threads or domains,
need -key EXPR: a STOP then ends the START with the same EXPR, such as arg0, request, or str(arg1),
in whichever thread that was. It must differ between all requests that are under way at a time. If a
START has that of an earlier one without STOP, it replaces it, and the line ends with `doubtful N`.
Without -key, the times of such requests are wrong. If that is noticed, by N stops, the line ends
with `interleaved N untrusted`: no time can be trusted. It ends with `doubtful N` if either requests
overlap, or exceptions skip stops, and some times may be wrong: at N stops, an earlier start of
their stack frame waited. A warning says the same. It ends with `may interleave` if it might not be
noticed: START and STOP have no int argument of one name.

With -where, only the pairs are timed for whose START EXPR is true, and the calls for whose entry it
is; 'elapsed > 10ms', by itself or beside &&, is about the time that they take: only those that take
so long are counted. The line ends with `untyped N` if there were N hits or calls for which -where
or -key has no answer: these are left out.

START and STOP may be the same: the times are then from each hit to the next.

With -usdt, START and STOP are USDT probes of other providers than OCaml's, such as
postgresql:query__start,postgresql:query__done: of C and C++ programs, of Julia or Python. Their
semaphores are raised meanwhile. All flags apply to them.

With -over, each pair that takes DURATION or longer is shown by itself, too, within 0.2 seconds
after it has ended:
    slow TIME THREAD NANOSECONDS START,STOP ARGUMENTS -> ARGUMENTS
with the time of day in UTC when it ended, and the arguments of its START and of its STOP, as
`watch` shows them; START's are `unknown` if more than 16 starts of the thread waited at once. After
the names comes `untrusted`, `doubtful` or `may interleave` if that is known so far of the pair.
With -over 0 every pair is shown. If they come faster than they can be read, some are not shown; a
warning says how many.
With -fn, so is each call, as
    slow TIME THREAD NANOSECONDS NAME ARGUMENTS -> RESULT
with the arguments as far as their number is known, -args N of others: ints, and of anything else
its address at that time. If it ends with a jump to another function in tail position, there is no
RESULT. With -self, too, it is the whole call that takes so long. With -stack, the stack follows, as
it was at the STOP, or when the function was left, in the format of the command `stack`: N frames at
most.

With several processes, of -pid and -name, the times of each pair in all of them are together;
with -by pid, those of each process by itself, in lines that end with PID START,STOP. So are the
calls of each function, by its name. -over shows the PID before THREAD. A process that exits keeps
its times, and the others go on. With several processes, callers are not distinguished.
With -follow, the processes that they have forked are timed, too, and those that they fork
meanwhile, once they are found, about 200 ms later.

With -fn it times the calls of functions of any native program, with or without probes, from entry
to exit; `list -functions` names them, and says which can be timed. Of more than 24 functions, those
without calls are left out. In plain format,
    COUNT MEAN P50 P90 P99 P99.9 MAX RUNNING UNMATCHED_EXITS LOST UNWOUND NAME
COUNT are the calls that ended with an exit: a return, or a jump to another function in tail
position. RUNNING have not ended yet. UNMATCHED_EXITS are those of calls that had begun before. LOST
were not recorded: 500 other timed calls of their stack had not ended yet; there were more than
about a thousand stacks; or registers could not be saved at an exit of a function that is not
OCaml's, rarely but with more busy threads than processors. UNWOUND ended without an exit: by an
exception, by longjmp(3), or with their thread. -gc selects the functions of OCaml's garbage
collector: minor and slice are its usual pauses.

With -self the times are those of a function's own code: the time of each call that it makes of
another timed function is subtracted. In plain format,
    COUNT MEAN P50 P90 P99 P99.9 MAX RUNNING UNMATCHED_EXITS LOST UNWOUND DOUBTFUL SELF TOTAL NAME
SELF is the sum of the self times, TOTAL that of the times from entry to exit. DOUBTFUL self times
may be too long: a call was unwound or lost, and is not subtracted. In OCaml 5, calls of C functions
are not subtracted from OCaml functions: they are on another stack. If both are timed, each line
ends with `on fiber` or `on thread`.

With -by caller, each function's line is followed by one for each place that calls it,
    by COUNT MEAN MAX SUM CALLER
which is where the calls return to, with the name of its function and, if known, its source line.
SUM is that of the times of these calls, in nanoseconds; with -self, that of the self times, and
TOTAL follows it. Calls of callers for which there was no room are those of `other`. After a tail
call, CALLER is that of the function that has made it.

With -by EXPR,... the times are distinguished by what EXPR is at the STOP of a pair, or at the entry
of a function: an argument, str(page), tid, caller; up to 4, of which at a STOP arguments make one.
Below all other lines is one for each of the 20 keys (-top) with the most time,
    by COUNT MEAN P50 P90 P99 P99.9 MAX SUM NAME KEY
then the times of the other keys, those of about 1,000 keys being distinguished, and those without a
key (`untyped`). All of them add up to those of the pairs and functions; quantiles are known to 3 %.
With -by pid,EXPR, processes are distinguished, too.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes latency -pid N -pair START,STOP [FLAGS]
       ocaml-probes latency -pid N -pid M -pair START,STOP [FLAGS]
       ocaml-probes latency -name RE -pair START,STOP [FLAGS]
       ocaml-probes latency -pid N -usdt PROVIDER:START,PROVIDER:STOP [FLAGS]
       ocaml-probes latency -pid N -fn GLOBS [FLAGS]
       ocaml-probes latency -name RE -fn GLOBS [FLAGS]")]
#[command(after_help = HELP, next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    timed: Checked<TimedFlags>,
    #[command(flatten)]
    arguments: CallArgumentsFlag,
    #[command(flatten)]
    until: DurationFlag,
    #[command(flatten)]
    forked: ForkedFlag,
    /// Show the latencies so far every DURATION; on a terminal, 1s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Draw the times into FILE, as SVG
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
    let timed = &args.timed;
    if !(timed.shows_slow_pairs() && timed.has_functions()) {
        let refused = args.arguments.refuse_without("-over and -fn");
        refused.map_err(|why| Failure::Usage(UsageError::new(Some("latency"), why)))?;
    }
    let output = args.output.open()?;
    let (selection, needs_probes) = (&args.selection, timed.needs_probes());
    let by_pid = timed.by_pid();
    let chosen = ChosenProcesses::of(selection, needs_probes, by_pid, args.forked, &output)?;
    let is_of_several = chosen.is_of_several;
    if is_of_several && timed.has_caller() {
        let why = why_not_by_caller(by_pid);
        return Err(Failure::Usage(UsageError::new(Some("latency"), why)));
    }
    let (opened, output) = chosen.open(output)?;
    let mut sources = FunctionSources::default();
    if let Some(target) = opened.only().filter(|_| timed.has_caller()) {
        let functions = Functions::of_process(target.pid());
        sources = FunctionSources::of(functions.map_err(Failure::of_process(target.pid()))?);
    }
    // Before anything is changed, because it may fail; after what takes long, because a signal would leave it empty.
    let report_file = ReportFile::create_if_given(args.svg.as_deref(), &output.messages)?;
    let mut printer = LatencyPrinter {
        output: &output,
        is_of_several,
        by_pid,
        asked: TimesAsked {
            sources: &sources,
            by: timed.keys(),
        },
        interval: args.interval,
        slow: timed
            .shows_slow_pairs()
            .then(|| ShownSlowPairs::new(args, is_of_several, &output)),
    };
    for target in opened.targets() {
        let added = printer.add_stacks(target);
        // If one of several has exited meanwhile, it has no slow pairs.
        if !is_of_several {
            added.map_err(Failure::of_process(target.pid()))?;
        }
    }
    let display = display(args, &output)?;
    let active = opened.begin(
        ObservationRequest {
            observation: args.arguments.add_to(timed.observation()),
            options: args.overrides.options(),
            duration: args.until.duration,
            // Slow pairs are read as long as the process is observed, and figures have to be no older.
            reads_all_before_removal: printer.slow.is_none(),
        },
        &output,
    )?;
    for (messages, observer) in active.each() {
        warn_of_untimed(args, &messages, observer);
    }
    let outcome = active.run(display, &mut printer);
    printer.finish(outcome, report_file)
}

/// How figures are shown while hits are observed.
fn display(args: &Args, output: &Output) -> Result<Display, Failure> {
    if args.timed.shows_slow_pairs() {
        // Lines would be erased with a table that is redrawn.
        return Ok(Display::default());
    }
    Display::new(output, args.interval)
}

/// Warns of functions that cannot be timed, and of self times that are those of one stack only.
fn warn_of_untimed(args: &Args, messages: &Messages, observer: &Observer) {
    if args.timed.has_functions_or_usdt() {
        warn_of_uncounted(messages, observer, "timed");
    }
    if args.timed.shows_slow_pairs() {
        note_unknown_arguments(messages, observer, args.arguments);
    }
    if args.timed.self_times() {
        warn_of_separate_stacks(messages, observer);
    }
}

/// Reads and shows the times of pairs and functions.
struct LatencyPrinter<'o> {
    output: &'o Output,
    is_of_several: bool,
    by_pid: bool,
    asked: TimesAsked<'o>,
    interval: Option<Duration>,
    /// If they are shown.
    slow: Option<ShownSlowPairs>,
}

/// Slow pairs, and when they and the times were shown.
struct ShownSlowPairs {
    pending: PendingSlowPairs,
    /// How many frames of their stacks are shown at most, if they are.
    frames: Option<usize>,
    /// Whether the next reading includes the times of all processes. Slow pairs are shown only then, because the
    /// times tell whether they can be trusted.
    are_times_read: bool,
    /// When the times were shown last.
    times_shown_at: Duration,
}

impl ShownSlowPairs {
    fn new(args: &Args, is_of_several: bool, output: &Output) -> ShownSlowPairs {
        let mut pending = PendingSlowPairs::new(output, args.interval);
        if is_of_several {
            pending = pending.of_several();
        }
        ShownSlowPairs {
            pending,
            frames: args.timed.stack_limit().map(|limit| limit.0),
            are_times_read: true,
            times_shown_at: Duration::ZERO,
        }
    }
}

impl ReadingHandler for LatencyPrinter<'_> {
    type Reading = LatencyReading;

    fn add_process(&mut self, target: &Target) {
        // If it has exited meanwhile, it has no slow pairs.
        let _ = self.add_stacks(target);
    }

    fn read(
        &mut self,
        pid: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<LatencyReading>> {
        let pid = self.shown_pid(pid);
        if let Some(slow) = &mut self.slow {
            slow.pending.add_events(pid, observer.events()?);
            if !slow.are_times_read {
                return Ok(None);
            }
        }
        LatencyReading::of(observer).map(Some)
    }

    fn last(&mut self, pid: i32, mut report: ObservationReport, _: Duration) -> LatencyReading {
        let pid = self.shown_pid(pid);
        if let Some(slow) = &mut self.slow {
            slow.pending.add_events(pid, take(&mut report.events));
        }
        let (pairs, functions) = (report.latencies, report.function_latencies);
        LatencyReading::last(pairs, functions, report.keyed_times, &report.counts)
    }

    fn next_read(&self, observer: &Observer) -> Option<Duration> {
        self.slow.is_some().then(|| observer.next_read())
    }

    fn show(
        &mut self,
        shown: ShownReadings<'_, LatencyReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        if self.slow.is_some() {
            return self.show_slow(&shown, interruptible);
        }
        shown.show(self, self.output.format, interruptible)
    }
}

impl FiguresHandler for LatencyPrinter<'_> {
    type Figures<'f>
        = Latencies<'f>
    where
        Self: 'f;

    fn joined<'r>(&self, each: &'r [(i32, LatencyReading)]) -> Cow<'r, LatencyReading> {
        let join = || LatencyReading::of_processes(each, self.by_pid);
        as_one(each, self.is_of_several, join)
    }

    fn figures<'f>(
        &'f self,
        targets: &'f [Target],
        reading: &'f LatencyReading,
        at: Duration,
    ) -> Latencies<'f> {
        Latencies::new(targets, reading, at, self.asked)
    }

    fn warn(&self, messages: &Messages, latencies: &Latencies<'_>) {
        warn_of_doubts(messages, latencies);
    }
}

impl LatencyPrinter<'_> {
    /// The pid, if there may be several.
    fn shown_pid(&self, pid: i32) -> Option<i32> {
        self.is_of_several.then_some(pid)
    }

    /// Prepares to show the stacks of slow pairs.
    fn add_stacks(&mut self, target: &Target) -> probes_lib::Result<()> {
        let pid = self.shown_pid(target.pid());
        if let Some(slow) = &mut self.slow {
            if let Some(frames) = slow.frames {
                let stacks = Stacks::of_process(target.pid())?;
                slow.pending.add_stacks(pid, stacks, frames);
            }
        }
        Ok(())
    }

    /// Shows slow pairs if the times were read with them. If an interval is over, shows the times, too.
    fn show_slow(
        &mut self,
        shown: &ShownReadings<'_, LatencyReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let mut next = Ok(Next::Continue);
        if self.slow.as_ref().is_some_and(|slow| slow.are_times_read) {
            let text = self.slow_text(shown.each)?;
            next = interruptible.write(&(text + &self.times_if_due(shown)?));
        }
        if let Some(slow) = &mut self.slow {
            slow.are_times_read = slow.pending.are_due();
        }
        next
    }

    fn slow_text(&mut self, each: &[(i32, LatencyReading)]) -> Result<String, Failure> {
        let of_process = |pid: Option<i32>| {
            let mut each = each.iter();
            let found = each.find(|(of, _)| pid.is_none_or(|pid| pid == *of));
            found.map(|(_, reading)| reading)
        };
        let slow = self.slow.as_mut();
        slow.map_or(Ok(String::new()), |it| it.pending.text(of_process))
    }

    /// The times, if an interval is over.
    fn times_if_due(
        &mut self,
        shown: &ShownReadings<'_, LatencyReading>,
    ) -> Result<String, Failure> {
        let interval = self.interval.unwrap_or(Duration::MAX);
        match &mut self.slow {
            Some(slow) if shown.at >= slow.times_shown_at.saturating_add(interval) => {
                slow.times_shown_at = shown.at;
            }
            _ => return Ok(String::new()),
        }
        let reading = self.joined(shown.each);
        let so_far = self.figures(shown.targets, &reading, shown.at).so_far();
        so_far.text(self.output.format)
    }

    /// Prints the final times and the slow pairs before them.
    fn finish(
        mut self,
        outcome: Outcome<LatencyReading>,
        report_file: Option<ReportFile>,
    ) -> Result<(), Failure> {
        let slow = match &outcome.last[..] {
            [] => Ok(String::new()),
            last => self.slow_text(last),
        };
        outcome.finish_with(slow, &self, report_file, self.output)
    }
}
