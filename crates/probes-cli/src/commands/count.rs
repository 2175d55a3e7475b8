//! `count`: how often probes are hit and functions are called.

mod events;
mod keyed;
mod stacks;

use std::mem::take;
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Counts, ObservationReport, Observer, Target};

use super::observations::{ObservationRequest, Observations};
use super::open_target::sources;
use super::opened_processes::{ChosenProcesses, why_not_by_caller};
use super::readings::{Display, Outcome, ReadingHandler, ShownReadings};
use super::uncounted::warn_of_uncounted;
use super::untyped::{only_untyped, warn_of_untyped};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    BufferFlag, Checked, Counted, CountedFlags, DurationFlag, EventsOr, EventsOrHits, FilterFlags,
    ForkedFlag, KeyFlags, OutputFlags, OverrideFlags, PathFlags, TargetSelection, duration,
    with_regexp_help,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{self, CountReport, Detail, FunctionSources};
use crate::question::CountedBy;
use crate::text::number_of;
use crate::usage::UsageError;

const HELP: &str = "\
Counts inside the process, at a few nanoseconds a hit, whether a probe is enabled or not. When the
duration is over, on Ctrl-C, or when the process exits, it removes the instrumentation and prints,
in plain format,
    HITS RATE NAME
most hits first, with hits a second; with -sites,
    HITS RATE NAME ADDRESS FUNCTION FILE:LINE

With -fn it counts calls of functions of any native program, with or without probes; probes are then
counted only if -probe or -regexp selects some. A glob is for a whole name as `list -functions`
shows it, such as 'Stdlib.List.*'; if there is a ( or <, a comma before a space is part of a name.
Of functions of one name, a symbol selects one: camlCafe__fun_341, as perf and gdb show it.
0xADDRESS is a function, or an instruction within one. FILE:LINE is where a source line begins; the
end of the path is enough. What is named and cannot be counted is an error; what a glob with *, ? or
[ matches and cannot be counted is left out, with a warning. Of more than 24 functions, those
without hits are left out. With -sites a function is
    HITS RATE NAME ADDRESS OBJECT FILE:LINE
Calls that the compiler has inlined are not counted, nor are functions of libraries that are loaded
later. A function that calls itself in tail position may be counted once for each such call.

With -usdt it counts the sites of USDT probes that C and other languages have, such as
'postgresql:query__*'. While they are counted, their semaphores are raised by one.

With -where it counts only the hits for which an expression is true, such as
    arg0 > 5 && arg1 == \"GET\"
Lines end with `untyped N` then: N hits for which it is neither true nor false, because an argument
does not have the type that the expression needs. docs/ask.md describes all expressions.

With -by it counts hits by the values of one or several expressions: integers, strings as
str(arg0), and by themselves probe, caller (where a function is called) and tid. It prints
    HITS RATE KEY...
most hits first, -top N of them, then lines for the keys that are not shown, for `other` hits, whose
keys found no room (about 4,096 are distinguished), and for `untyped` ones. All lines add up to all
hits. Of a string that is longer than 64 bytes, the first 64 are the key.

With -by stack it counts the hits of one process by their stacks, and prints
    HITS RATE FUNCTION;FUNCTION;...
the outermost function first, after [cut] or [guessed] if the stack is not complete (docs/profile.md
says when). Each hit is recorded with its stack; those that come faster than they can be read, some
ten thousand a second, and those of more than 65,536 stacks, are `other`; -buffer gives bursts more
room. -svg FILE draws a flame graph of the hits; FILE.folded gets lines for other tools.

With -events it counts runtime events of OCaml 5 by their names, globs such as minor,'major_*', or
all, as
    EVENTS RATE WHAT NAME
where WHAT is phase, counter, lifecycle, alloc, or user for the program's own; phases and spans
count when they begin. Of more than 24 names, those without events are left out. Lines `lost WORDS
domain D` say how much was overwritten unread. Events that are off are switched on, as by
`gc`, and off again in the end.

With several processes, of -pid and -name, the hits of all of them are counted by name, in one
answer; those of each by itself with -by pid or -by pid,EXPR,... A process that exits keeps its
hits, and the others go on. With -follow, the processes that they have forked are counted, too, and
those that they fork meanwhile; their hits are counted as hits of the process that forked them.

With -interval it also prints the new hits of each interval, in lines that begin with the seconds so
far; on a terminal, it redraws a table. With -json there is one line for each interval. The last
interval may be shorter.

If it is killed, the process goes on counting, which does no harm: `info` reports it, and the next
count, or `observe -clean`, removes the instrumentation.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes count -pid N [FLAGS]
       ocaml-probes count -pid N -pid M [FLAGS]
       ocaml-probes count -name RE [FLAGS]
       ocaml-probes count -pid N -events NAMES [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    counted: Checked<EventsOr<CountedFlags>>,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    by: Checked<KeyFlags>,
    /// Count each site separately, and show where functions are
    #[arg(long)]
    sites: bool,
    #[command(flatten)]
    paths: PathFlags,
    #[command(flatten)]
    until: DurationFlag,
    #[command(flatten)]
    forked: ForkedFlag,
    /// Show the new hits every DURATION; on a terminal, all hits so far
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// With -by stack: a flame graph into FILE, or lines into FILE.folded
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    buffer: BufferFlag,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    refuse_with_stacks(args)?;
    if args.sites && args.by.is_some() {
        let message = "-sites cannot be combined with -by: hits of all sites are counted together";
        return Err(Failure::Usage(UsageError::new(Some("count"), message)));
    }
    let usage = |why| Failure::Usage(UsageError::new(Some("count"), why));
    let paths = args.paths.refuse_without("-sites", args.sites);
    paths.map_err(usage)?;
    let output = args.output.open()?;
    let counted = match &*args.counted {
        EventsOrHits::Events(globs) => return events::run(args, globs, &output),
        EventsOrHits::Hits(counted) => counted,
    };
    let (selection, needs_probes) = (&args.selection, counted.needs_probes());
    let by_pid = args.by.as_ref().is_some_and(CountedBy::has_pid);
    let chosen = ChosenProcesses::of(selection, needs_probes, by_pid, args.forked, &output)?;
    if chosen.is_of_several {
        refuse_for_several_processes(args)?;
    }
    let (opened, output) = chosen.open(output)?;
    let request = |observation| ObservationRequest {
        observation: args.filter.add_to(observation),
        options: args.overrides.options(),
        duration: args.until.duration,
        reads_all_before_removal: true,
    };
    let by_stack = args.by.as_ref().filter(|by| by.is_stack());
    if let (Some(target), Some(by)) = (opened.only(), by_stack) {
        let (svg, messages) = (args.svg.as_deref(), &output.messages);
        let counting = stacks::StackCounting::new(target.pid(), by.shown(), svg, messages)?;
        let observation = args.buffer.add_to(counted.with_stacks());
        let active = opened.begin(request(observation), &output)?;
        warn_of_uncounted_functions(&active, counted, &output);
        return counting.run(active, &output);
    }
    let display = Display::new(&output, args.interval)?;
    let only = opened.only().cloned();
    let observation = counted.observation();
    let active = opened.begin(
        request(match &*args.by {
            Some(by) => by.add_to(observation),
            None => observation,
        }),
        &output,
    )?;
    warn_of_uncounted_functions(&active, counted, &output);
    let is_redrawn = display.table.is_some();
    if let (None, Some(target)) = (&*args.by, &only) {
        let mut counting = Counting::new(args, counted, &output, target, is_redrawn);
        let outcome = active.run(display, &mut counting);
        return counting.finish(outcome);
    }
    // Sites and functions differ between processes: the hits of several are counted by name.
    let by = args.by.clone().unwrap_or_else(CountedBy::by_name);
    let mut counting = keyed::KeyedCounting::new(&by, only.as_ref(), is_redrawn, &output);
    let outcome = active.run(display, &mut counting);
    counting.finish(outcome)
}

/// Warns of functions that are not counted, if the answer is about one process.
fn warn_of_uncounted_functions(active: &Observations<'_>, counted: &Counted, output: &Output) {
    if let Some(observer) = active.only().filter(|_| counted.has_functions()) {
        warn_of_uncounted(&output.messages, observer, "counted");
    }
}

/// Refuses flags that cannot be combined with `-by stack`, and flags that need it.
fn refuse_with_stacks(args: &Args) -> Result<(), Failure> {
    let is_by_stack = args.by.as_ref().is_some_and(CountedBy::is_stack);
    if !is_by_stack {
        let refused = args.buffer.refuse_without("-by stack");
        refused.map_err(|why| Failure::Usage(UsageError::new(Some("count"), why)))?;
    }
    let message = match (&args.svg, args.interval) {
        (Some(_), _) if !is_by_stack => "-svg needs -by stack: it draws where hits come from",
        (_, Some(_)) if is_by_stack => {
            "-interval cannot be combined with -by stack: stacks are shown at the end"
        }
        _ if is_by_stack && (args.selection.is_by_name() || args.forked.follow) => {
            "-by stack is for one process: give it by -pid, without -follow"
        }
        _ => {
            if let Some(svg) = &args.svg {
                args.output.refuse_to_overwrite("-svg", svg)?;
            }
            return Ok(());
        }
    };
    Err(Failure::Usage(UsageError::new(Some("count"), message)))
}

/// Refuses flags that are for one process.
fn refuse_for_several_processes(args: &Args) -> Result<(), Failure> {
    let by = args.by.as_ref();
    let message = if args.sites {
        "-sites is for one process, because sites differ between processes: give one -pid, without -follow"
    } else if by.is_some_and(CountedBy::is_stack) {
        "-by stack is for one process, because addresses differ between processes: give one -pid, without -follow"
    } else if by.is_some_and(CountedBy::has_caller) {
        why_not_by_caller(by.is_some_and(CountedBy::has_pid))
    } else {
        return Ok(());
    };
    Err(Failure::Usage(UsageError::new(Some("count"), message)))
}

/// Returns, for example, `30 probes, 1600 functions (12 of them called), 2 USDT sites (1 of them hit), 4711 hits`.
fn sum(counts: &Counts) -> String {
    let mut sum = Vec::new();
    match counts.probes().count() {
        0 => {}
        probes => sum.push(number_of(probes, "probe")),
    }
    for (is_usdt, noun, verb) in [(false, "function", "called"), (true, "USDT site", "hit")] {
        let all = || counts.functions().filter(|it| it.is_usdt == is_usdt);
        if all().next().is_some() {
            let hit = all().filter(|it| it.hits > 0).count();
            let all = number_of(all().count(), noun);
            sum.push(format!("{all} ({hit} of them {verb})"));
        }
    }
    sum.push(number_of(counts.total(), "hit"));
    if let Some(untyped) = counts.total_untyped() {
        sum.push(format!("{untyped} untyped"));
    }
    sum.join(", ")
}

/// Reads and shows counts.
struct Counting<'t> {
    target: &'t Target,
    output: &'t Output,
    is_redrawn: bool,
    detail: Detail,
    /// The last reading that was shown, and its time.
    shown: Option<(Counts, Duration)>,
}

impl<'t> Counting<'t> {
    fn new(
        args: &Args,
        counted: &Counted,
        output: &'t Output,
        target: &'t Target,
        is_redrawn: bool,
    ) -> Counting<'t> {
        let sources = args.sites.then(|| sources(target));
        let shows_functions = args.sites && counted.has_functions();
        let function_sources = shows_functions.then(|| FunctionSources::of_process(target.pid()));
        let detail = Detail {
            sites: args.sites,
            sources: sources.unwrap_or_default(),
            function_sources: function_sources.unwrap_or_default(),
            paths: args.paths.form(),
        };
        Counting {
            target,
            output,
            is_redrawn,
            detail,
            shown: None,
        }
    }

    /// Prints the final counts.
    fn finish(&self, mut outcome: Outcome<Counts>) -> Result<(), Failure> {
        let (output, messages) = (self.output, &self.output.messages);
        let (last, lasted) = (take(&mut outcome.last), outcome.read_until);
        if let [(_, counts)] = &last[..] {
            let rest = if outcome.output_was_read {
                self.rest(counts, lasted)
            } else {
                Ok(String::new())
            };
            let total = self.total(counts, lasted);
            outcome.print(output, rest.and_then(|rest| Ok(rest + &total?)));
            let many = counts.probes().count() + counts.functions().len();
            output.sum_up(messages, many, || sum(counts));
            if outcome.output_was_read {
                warn_of_untyped(messages, only_untyped(counts), outcome.of_results);
            }
        }
        outcome.finish(messages)
    }

    /// The hits since the last interval that was shown, so that all intervals together have all hits.
    fn rest(&self, counts: &Counts, lasted: Duration) -> Result<String, Failure> {
        let shown = self.shown.as_ref().filter(|_| !self.is_redrawn);
        let Some((before, at)) = shown.filter(|(_, at)| *at < lasted) else {
            return Ok(String::new());
        };
        let counted = CountReport::new(self.target, counts, &self.detail)
            .hits_since(Some(before), lasted.saturating_sub(*at))
            .at(lasted);
        output::counted(self.output.format, &counted)
    }

    fn total(&self, counts: &Counts, lasted: Duration) -> Result<String, Failure> {
        let counted = CountReport::new(self.target, counts, &self.detail).hits_since(None, lasted);
        output::counted(self.output.format, &counted)
    }
}

impl ReadingHandler for Counting<'_> {
    type Reading = Counts;

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<Counts>> {
        observer.counts().map(Some)
    }

    fn last(&mut self, _: i32, report: ObservationReport, _: Duration) -> Counts {
        report.counts
    }

    /// Shows the hits since the last reading that was shown. A table that is redrawn shows all hits so far, with the
    /// rates since that reading.
    fn show(
        &mut self,
        shown: ShownReadings<'_, Counts>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let ([(_, counts)], at) = (shown.each, shown.at) else {
            return Ok(Next::Continue);
        };
        let since = self.shown.as_ref().map_or(Duration::ZERO, |(_, at)| *at);
        let last = self.shown.as_ref().map(|(counts, _)| counts);
        let counted = CountReport::new(self.target, counts, &self.detail);
        let next = if let Some(table) = shown.table {
            let text = counted.with_rates_since(last, at - since).table();
            table.redraw(&text, &shown.gaps, interruptible)
        } else {
            let counted = counted.hits_since(last, at - since).at(at);
            let text = output::counted(self.output.format, &counted);
            text.and_then(|text| interruptible.write(&text))
        };
        // This reading counts as shown even if it could not be written.
        self.shown = Some((counts.clone(), at));
        next
    }
}
