//! `latency`: how long it takes from one probe to another, and how long calls of functions last.

use std::cell::{Cell, RefCell};
use std::mem::take;
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Functions, ObservationReport, Observer, Stacks, Target};

use super::observe_loop::{Display, ObservationLoop, ShownReading};
use super::open_target::open_to_observe;
use super::report_file::ReportFile;
use super::several::{self, ObservationRequest, SeveralObservations};
use super::slow_pairs::PendingSlowPairs;
use super::uncounted::warn_of_uncounted;
use super::untyped::warn_of_untyped;
use super::watch;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, DurationFlag, ForkedFlag, OutputFlags, SeccompFlag, TakeOver, TargetSelection,
    TimedFlags, duration,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{self, FunctionSources, Latencies, LatencyReading, TimesAsked, WarningKind};
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
their stack frame waited. A warning says the same.

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
the names comes `untrusted` or `doubtful` if that is known so far of the pair. -over 0 shows every
pair. If they come faster than they can be read, some are not shown; a warning says how many.
With -fn, so is each call, as
    slow TIME THREAD NANOSECONDS NAME ARGUMENTS -> RESULT
with the arguments as far as their number is known: ints, and of anything else its address at that
time. If it ends with a jump to another function in tail position, there is no RESULT. With -self,
too, it is the whole call that takes so long. With -stack, the stack follows, as it was at the STOP,
or when the function was left, in the format of the command `stack`: N frames at most.

With several processes, of -pid and -name, the times of each pair in all of them are together;
with -by pid, those of each process by itself, in lines that end with PID START,STOP. So are the
calls of each function, by its name. -over shows the PID before THREAD. A process that exits keeps
its times, and the others go on. With several processes, callers are not distinguished.
With -follow, the processes that they have forked are timed, too, and those that they fork
meanwhile, once they are found, some 200 ms later.

With -fn it times the calls of functions of any native program, with or without probes, from entry
to exit; `list -functions` names them, and says which can be timed. Of more than 24 functions, those
without calls are left out. In plain format,
    COUNT MEAN P50 P90 P99 P99.9 MAX RUNNING UNMATCHED_EXITS LOST UNWOUND NAME
COUNT are the calls that ended with an exit: a return, or a jump to another function in tail
position. RUNNING have not ended yet. UNMATCHED_EXITS are those of calls that had begun before. LOST
were not recorded: 500 other timed calls of their stack had not ended yet; there were more than
about a thousand stacks; or, rarely, registers could not be saved at an exit of a function that is
not OCaml's. UNWOUND ended without an exit: by an exception, by longjmp(3), or with their
thread. -gc selects the functions of OCaml's garbage collector: minor and slice are its usual
pauses.

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
then the times of the other keys, those of some 1,000 keys being distinguished, and those without a
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
    until: DurationFlag,
    #[command(flatten)]
    forked: ForkedFlag,
    #[command(flatten)]
    take_over: TakeOver,
    /// Show the latencies so far every DURATION; on a terminal, 1s by default
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Draw the times into FILE, as SVG
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
    let pids = args
        .selection
        .pids(args.timed.needs_probes(), &output.messages)?;
    let (&[pid], false) = (
        &pids[..],
        args.selection.is_by_name() || args.forked.follow || args.timed.by_pid(),
    ) else {
        return run_of_several(args, &pids, output);
    };
    let output = &output.clone().with_pid(pid);
    let messages = &output.messages;
    let target = open_to_observe(pid, args.timed.needs_probes(), messages)?;
    // Before anything is changed, because it may fail.
    let report_file = args.svg.as_deref().map(ReportFile::create).transpose()?;
    let observation = args.timed.observation();
    let sources = if args.timed.has_caller() {
        let functions = Functions::of_process(pid).map_err(Failure::of_process(pid))?;
        FunctionSources::of(functions)
    } else {
        FunctionSources::default()
    };
    let asked = TimesAsked {
        sources: &sources,
        by: args.timed.keys(),
    };
    let mut slow_pairs = args
        .timed
        .shows_slow_pairs()
        .then(|| PendingSlowPairs::new(output, args.interval));
    if let (Some(slow_pairs), Some(limit)) = (&mut slow_pairs, args.timed.stack_limit()) {
        let stacks = Stacks::of_process(pid).map_err(Failure::of_process(pid))?;
        slow_pairs.add_stacks(None, stacks, limit.0);
    }
    let display = display(args, output)?;
    let active = ObservationLoop::begin(
        &target,
        &observation,
        args.seccomp.options(args.take_over.options()),
        args.until.duration,
        output,
    )?;
    warn_of_untimed(args, messages, active.observer());
    let mut timing = LatencyPrinter {
        target: &target,
        output,
        asked,
        last: None,
        shown_at: Duration::ZERO,
    };
    let mut outcome = match &mut slow_pairs {
        None => active.run(display, LatencyReading::of, |shown, interruptible| {
            timing.show(shown, interruptible)
        }),
        Some(slow_pairs) => {
            let slow_pairs = RefCell::new(slow_pairs);
            let outcome = active.run(
                display,
                |observer| slow_pairs.borrow_mut().read(observer),
                |shown, interruptible| {
                    let slow_pairs = &mut slow_pairs.borrow_mut();
                    timing.show_slow(shown, slow_pairs, args.interval, interruptible)
                },
            );
            outcome.without_last()
        }
    };
    let total = match outcome.observed.take() {
        Some(mut report) => {
            if let Some(slow_pairs) = &mut slow_pairs {
                slow_pairs.add_events(None, take(&mut report.events));
            }
            Some((last_reading(report), outcome.lasted))
        }
        None => outcome.last.take().or_else(|| timing.last.take()),
    };
    if let Some((latencies, lasted)) = total {
        let slow = slow_pairs.as_mut().map(|it| it.text(|_| Some(&latencies)));
        let targets = std::slice::from_ref(&target);
        let latencies = Latencies::new(targets, &latencies, lasted, asked);
        let figures = output::latencies(output.format, &latencies);
        let text = slow.unwrap_or_else(|| Ok(String::new()));
        outcome.print(output, text.and_then(|text| Ok(text + &figures?)));
        if let Some(report_file) = report_file {
            let written = report_file.write(latencies.picture());
            outcome.failures.add(written);
        }
        sum_up(output, &latencies);
        // The result says it, too. A terminal that accepts no output would keep this command from ending.
        if outcome.output_was_read {
            warn_of_doubts(&output.messages, &latencies);
        }
    }
    outcome.finish(&output.messages)
}

/// Times pairs and functions of several processes.
fn run_of_several(args: &Args, pids: &[i32], output: &Output) -> Result<(), Failure> {
    if args.timed.has_caller() {
        let why = several::why_not_by_caller(args.timed.by_pid());
        return Err(Failure::Usage(UsageError::new(Some("latency"), why)));
    }
    let needs_probes = args.timed.needs_probes();
    let (targets, failures) =
        several::open(&args.selection, pids, needs_probes, args.forked, output);
    let report_file = args.svg.as_deref().map(ReportFile::create).transpose()?;
    let slow_pairs = args.timed.shows_slow_pairs();
    let mut slow_pairs =
        slow_pairs.then(|| PendingSlowPairs::new(output, args.interval).of_several());
    let add_stacks = |target: &Target, slow_pairs: &mut PendingSlowPairs| {
        let stacks = args.timed.stack_limit().map(|limit| {
            // If it has exited meanwhile, it has no slow pairs.
            let stacks = Stacks::of_process(target.pid()).ok()?;
            slow_pairs.add_stacks(Some(target.pid()), stacks, limit.0);
            Some(())
        });
        stacks.flatten();
    };
    for target in &targets {
        slow_pairs.iter_mut().for_each(|it| add_stacks(target, it));
    }
    let display = display(args, output)?;
    let active = SeveralObservations::begin(
        targets,
        ObservationRequest {
            observation: args.timed.observation(),
            options: args.seccomp.options(args.take_over.options()),
            duration: args.until.duration,
            // Slow pairs are read as long as the process is observed, and figures have to be no older.
            is_read_together: slow_pairs.is_none(),
        },
        args.forked,
        failures,
        output,
    )?;
    for (messages, observer) in active.each() {
        warn_of_untimed(args, &messages, observer);
    }
    let sources = FunctionSources::default();
    let asked = TimesAsked {
        sources: &sources,
        by: args.timed.keys(),
    };
    let mut timing = SeveralLatencyPrinter {
        output,
        by_pid: args.timed.by_pid(),
        asked,
        interval: args.interval,
        shown_at: Duration::ZERO,
    };
    let outcome = match &mut slow_pairs {
        None => active.run(
            display,
            |_| (),
            |_, observer, _| LatencyReading::of(observer).map(Some),
            |_, report, _| last_reading(report),
            |targets, each, shown, interruptible| timing.show(targets, each, shown, interruptible),
        ),
        Some(slow_pairs) => {
            let slow_pairs = RefCell::new(slow_pairs);
            // All processes are read, or none: pairs are not shown with a reading that is older than they are.
            let are_read = Cell::new(true);
            active.run(
                display,
                |target| add_stacks(target, &mut slow_pairs.borrow_mut()),
                |pid, observer, _| {
                    let events = observer.events()?;
                    slow_pairs.borrow_mut().add_events(Some(pid), events);
                    let reading = are_read.get().then(|| LatencyReading::of(observer));
                    reading.transpose()
                },
                |pid, mut report, _| {
                    let events = take(&mut report.events);
                    slow_pairs.borrow_mut().add_events(Some(pid), events);
                    last_reading(report)
                },
                |targets, each, shown, interruptible| {
                    let slow_pairs = &mut slow_pairs.borrow_mut();
                    let next = if are_read.get() {
                        timing.show_slow(targets, each, shown.at, slow_pairs, interruptible)
                    } else {
                        Ok(Next::Continue)
                    };
                    are_read.set(slow_pairs.are_due());
                    next
                },
            )
        }
    };
    if outcome.last.is_empty() {
        return outcome.finish(output, Ok(String::new()));
    }
    let slow = slow_pairs.map_or(Ok(String::new()), |mut it| {
        it.text(|pid| reading_of(&outcome.last, pid))
    });
    let reading = LatencyReading::of_processes(&outcome.last, args.timed.by_pid());
    let (targets, lasted) = (outcome.targets.clone(), outcome.lasted);
    let latencies = Latencies::new(&targets, &reading, lasted, asked);
    let figures = output::latencies(output.format, &latencies);
    let text = slow.and_then(|slow| Ok(slow + &figures?));
    let written = report_file.map_or(Ok(()), |file| file.write(latencies.picture()));
    sum_up(output, &latencies);
    let output_was_read = outcome.output_was_read;
    outcome.warn_of_lead(&output.messages);
    let finished = outcome.finish(output, text);
    if output_was_read {
        warn_of_doubts(&output.messages, &latencies);
    }
    finished.and(written)
}

/// How figures are shown while hits are observed.
fn display(args: &Args, output: &Output) -> Result<Display, Failure> {
    if args.timed.shows_slow_pairs() {
        // Lines would be erased with a table that is redrawn.
        return Ok(Display {
            interval: Some(watch::HITS_INTERVAL),
            table: None,
        });
    }
    Display::new(output, args.interval)
}

/// Warns of functions that cannot be timed, and of self times that are those of one stack only.
fn warn_of_untimed(args: &Args, messages: &Messages, observer: &Observer) {
    if args.timed.has_functions() {
        warn_of_uncounted(messages, observer, "timed");
    }
    if args.timed.of_self() {
        warn_of_separate_stacks(messages, observer);
    }
}

/// Says what all that was timed adds up to.
fn sum_up(output: &Output, latencies: &Latencies<'_>) {
    let (lines, sum) = latencies.sum();
    output.sum_up(&output.messages, lines, || sum);
}

/// Warns of what may be wrong with the times, or missing.
fn warn_of_doubts(messages: &Messages, latencies: &Latencies<'_>) {
    warn_of_interleaved(messages, latencies);
    warn_of_lost_calls(messages, latencies);
    warn_of_untyped(messages, latencies.only_untyped());
}

fn last_reading(report: ObservationReport) -> LatencyReading {
    let (pairs, functions) = (report.latencies, report.function_latencies);
    LatencyReading::last(pairs, functions, report.keyed_times, &report.counts)
}

/// The reading of the process `pid`.
fn reading_of(each: &[(i32, LatencyReading)], pid: Option<i32>) -> Option<&LatencyReading> {
    let mut each = each.iter();
    each.find(|(of, _)| Some(*of) == pid).map(|(_, it)| it)
}

/// Shows the times of pairs and functions of several processes.
struct SeveralLatencyPrinter<'o> {
    output: &'o Output,
    by_pid: bool,
    asked: TimesAsked<'o>,
    interval: Option<Duration>,
    /// When a reading was shown last, together with slow pairs.
    shown_at: Duration,
}

impl SeveralLatencyPrinter<'_> {
    /// Shows the readings of all processes.
    fn show(
        &self,
        targets: &[Target],
        each: &[(i32, LatencyReading)],
        shown: ShownReading<'_, ()>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let Some(table) = shown.table else {
            return interruptible.write(&self.text(targets, each, shown.at)?);
        };
        let reading = LatencyReading::of_processes(each, self.by_pid);
        let so_far = Latencies::new(targets, &reading, shown.at, self.asked).so_far();
        table.redraw(&so_far.table(), &shown.gaps, interruptible)
    }

    /// Shows slow pairs and, each time that an interval is over, the readings.
    fn show_slow(
        &mut self,
        targets: &[Target],
        each: &[(i32, LatencyReading)],
        at: Duration,
        slow_pairs: &mut PendingSlowPairs,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let mut text = slow_pairs.text(|pid| reading_of(each, pid))?;
        let interval = self.interval.unwrap_or(Duration::MAX);
        if at >= self.shown_at.saturating_add(interval) {
            self.shown_at = at;
            text += &self.text(targets, each, at)?;
        }
        interruptible.write(&text)
    }

    fn text(
        &self,
        targets: &[Target],
        each: &[(i32, LatencyReading)],
        at: Duration,
    ) -> Result<String, Failure> {
        let reading = LatencyReading::of_processes(each, self.by_pid);
        let so_far = Latencies::new(targets, &reading, at, self.asked).so_far();
        output::latencies(self.output.format, &so_far)
    }
}

/// Warns of calls that were not timed, which may be most of them.
pub(super) fn warn_of_lost_calls(messages: &Messages, latencies: &Latencies<'_>) {
    if let Some(caution) = latencies.lost_calls() {
        let hint = "the outermost 500 calls of each stack are timed, on a thousand stacks, those of OCaml 5's fibers among them; docs/functions.md has other reasons";
        messages.warning(WarningKind::LostCalls, &caution, hint);
    }
}

/// Warns of calls that are not subtracted from the time of their caller, because they are on another stack.
fn warn_of_separate_stacks(messages: &Messages, observer: &Observer) {
    // If the process has exited meanwhile, that is reported later.
    let timed = observer.function_latencies().unwrap_or_default();
    let on_fibers = timed.iter().filter(|it| it.is_on_fiber()).count();
    if on_fibers > 0 && on_fibers < timed.len() {
        messages.warning(
            WarningKind::SeparateStacks,
            "OCaml 5 executes C code on other stacks than OCaml code: self times of functions on fibers include their calls of \
             functions on threads, and the other way round",
            "the last words of each line, or the column stack, say which are on which",
        );
    }
}

/// Warns of times that may not be those of an event.
pub(super) fn warn_of_interleaved(messages: &Messages, latencies: &Latencies<'_>) {
    for (caution, hint) in latencies.cautions() {
        messages.warning(WarningKind::Interleaved, &caution, hint);
    }
    if let Some(names) = latencies.unknown() {
        messages.note_to_people(&format!(
            "{names}: if events interleave in a thread, that may not be seen, and times are wrong: the probes have no int of one name as \
             an argument; -key EXPR says which stop belongs to which start"
        ));
    }
}

/// Shows the times of pairs and functions.
struct LatencyPrinter<'t> {
    target: &'t Target,
    output: &'t Output,
    asked: TimesAsked<'t>,
    /// The last reading, and when it was.
    last: Option<(LatencyReading, Duration)>,
    /// When one was shown last, together with slow pairs.
    shown_at: Duration,
}

impl<'t> LatencyPrinter<'t> {
    fn targets(&self) -> &'t [Target] {
        std::slice::from_ref(self.target)
    }

    /// Shows a reading, and keeps it, even if it could not be written.
    fn show(
        &mut self,
        shown: ShownReading<'_, LatencyReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let (latencies, at) = (shown.reading, shown.at);
        let so_far = Latencies::new(self.targets(), &latencies, at, self.asked).so_far();
        let next = if let Some(table) = shown.table {
            table.redraw(&so_far.table(), &shown.gaps, interruptible)
        } else {
            let text = output::latencies(self.output.format, &so_far);
            text.and_then(|text| interruptible.write(&text))
        };
        self.last = Some((latencies, at));
        next
    }

    /// If there is a reading, shows slow pairs and, each time that an interval is over, the reading; keeps the reading.
    fn show_slow(
        &mut self,
        shown: ShownReading<'_, Option<LatencyReading>>,
        slow_pairs: &mut PendingSlowPairs,
        interval: Option<Duration>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let (Some(latencies), at) = (shown.reading, shown.at) else {
            return Ok(Next::Continue);
        };
        let mut text = slow_pairs.text(|_| Some(&latencies))?;
        if interval.is_some_and(|interval| at >= self.shown_at.saturating_add(interval)) {
            self.shown_at = at;
            let so_far = Latencies::new(self.targets(), &latencies, at, self.asked).so_far();
            text += &output::latencies(self.output.format, &so_far)?;
        }
        self.last = Some((latencies, at));
        interruptible.write(&text)
    }
}
