//! `watch`: the hits of probes and the calls of functions, one by one.

mod events;
mod reservoir;

use std::mem::take;
use std::time::{Duration, Instant};

use fastrand::Rng;
use probes_lib::{Events, ObservationReport, Observer, Stacks, Target};

use super::observations::ObservationRequest;
use super::open_target::sources;
use super::opened_processes::ChosenProcesses;
use super::readings::{Display, ReadingHandler, ShownReadings};
use super::uncounted::{note_unknown_arguments, warn_of_missing_results, warn_of_uncounted};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, DurationFlag, EventsOr, EventsOrHits, FieldFlags, ForkedFlag, OutputFlags,
    OverrideFlags, PathFlags, TargetSelection, Watched, WatchedFlags, positive,
    refuse_fields_in_json, with_regexp_help,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{self, Format, FunctionSources, Hits, Missing, ProcessHit, WarningKind};
use crate::text::number_that_were;
use reservoir::Reservoir;

/// How often the numbers of hits that were lost or skipped are reported.
const REPORT_INTERVAL: Duration = SECOND;

/// -rate R chooses R hits of each such time.
const SECOND: Duration = Duration::from_secs(1);

const HELP: &str = "\
Prints a line for each hit, whether its probe is enabled or not:
    TIME THREAD NAME ADDRESS FUNCTION FILE:LINE ARGUMENTS
with the time of day in UTC. The arguments are those in the note of the site, six at most: ints,
strings (their first 64 bytes, and ... if there are more), floats, boxed integers (7l 7L 7n), the
fields of tuples, records and arrays, (3, \"abc\"), lists, [1; 2; ...], exceptions, Failure \"boom\",
constructors by their tag, <1>(3); of blocks within blocks the tag and the number of words, <0:3>. A
value in memory that cannot be read is shown as its address, and an unsupported argument as
?. -fields time,name,args prints only these, in this order. The table format has the same in
columns. With -json each hit is an object on a line, with all fields.

With -fn it shows the calls of functions of any native program, as
    TIME THREAD NAME ADDRESS FILE:LINE ARGUMENTS
Functions are given as for `count -fn`; what is named and cannot be watched is an error, and what a
pattern with * or ? matches and cannot be watched is left out, with a warning. How many arguments an
OCaml function has is known, unless it uses variables of an outer function; how many one of C has,
if debugging information tells and no structure is among them; of all others, -args N shows N words.
Arguments of C are integers, text if a word points to some, or addresses: what is not passed in a
general register (floats, structures) is not shown, and a word that is no argument may be anything.
With -probe as well, lines have the field FUNCTION before FILE:LINE. With -results there is a line
for each return, too, with `returns RESULT` instead of the arguments; a call that ends with an
exception, or with a jump to another function in tail position, has none.

With -usdt it shows the hits of USDT probes that C and other languages have, such as
'postgresql:query__*', with the arguments that the note of the site tells of. While they are
watched, their semaphores are raised by one.

With -rate, hits are shown once a second: R of those that came in it, chosen at random, so that each
had the same chance, and all if they are no more.

With -where it shows only the hits for which an expression is true, such as
    arg0 > 5 && arg1 == \"GET\"
The others are not even copied. It is reported how many were untyped: neither true nor false,
because an argument does not have the type that the expression needs. docs/ask.md describes all
expressions.

With -sample 1/1000, the program records only every 1000th hit of each site and function, as counted
by all its threads: so many can be watched that are hit more often than can be printed. It chooses
after -where, and before -rate.

With -stack, the stack of each hit follows its line, as it was then, the innermost frame first, in
the format of the command `stack`; -stack 5 shows five frames. 80 KiB of the stack are copied: if
there are more, it is cut, and its last line says so. It costs the process a microsecond for each
hit, or more. docs/profile.md has more.

With -events it shows the runtime events of OCaml 5: what its garbage collector does, and what the
program itself writes with Runtime_events, as
    TIME DOMAIN EVENT NAME VALUE
where EVENT is begin or end of a phase, counter, lifecycle, alloc, or of the program's own unit,
int, span_begin, span_end or custom (the first 64 bytes). NAMES are globs such as minor,'major_*',
or all. Events that are off are switched on, as by `gc`, and off again in the end. What was
overwritten before it was read is the line `- DOMAIN lost - WORDS`, before what came after it. Lines
are in the order of their times as far as they were read together.

With several processes, of -pid and -name, the hits of all are shown in the order of their times, as
far as they are read together, and each with the PID before THREAD; -limit and -rate are about all
of them. A process that exits shows the hits that were read of it, and the others go on.
With -follow, the hits of the processes that they have forked are shown, too, and of those that they
fork meanwhile, with the PID of the process that has forked them.

Hits that come faster than they can be read are dropped. Their number, and that of the hits
that -sample and -rate skip, is reported on standard error (with -json, on a line of its own). The
instrumentation is removed when the command ends.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes watch -pid N -probe NAMES [FLAGS]
       ocaml-probes watch -pid N -fn GLOBS [FLAGS]
       ocaml-probes watch -pid N -usdt GLOBS [FLAGS]
       ocaml-probes watch -name RE -probe NAMES [FLAGS]
       ocaml-probes watch -pid N -events NAMES [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    watched: Checked<EventsOr<WatchedFlags>>,
    /// Stop after K hits
    #[arg(long, value_name = "K", value_parser = positive)]
    limit: Option<u64>,
    /// Show R hits of each second, chosen at random, and say how many were skipped
    #[arg(long, value_name = "R", value_parser = positive)]
    rate: Option<u64>,
    #[command(flatten)]
    fields: Checked<FieldFlags>,
    #[command(flatten)]
    paths: PathFlags,
    #[command(flatten)]
    until: DurationFlag,
    #[command(flatten)]
    forked: ForkedFlag,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    refuse_fields_in_json("watch", args.fields.as_deref(), args.output.format)?;
    let output = args.output.open()?;
    let watched = match &*args.watched {
        EventsOrHits::Events(globs) => return events::run(args, globs, &output),
        EventsOrHits::Hits(watched) => watched,
    };
    let (selection, needs_probes) = (&args.selection, watched.needs_probes());
    let chosen = ChosenProcesses::of(selection, needs_probes, false, args.forked, &output)?;
    let is_of_several = chosen.is_of_several;
    let (opened, output) = chosen.open(output)?;
    let mut hits = Hits::new(output.format, args.paths.form());
    if is_of_several {
        hits = hits.of_several();
    }
    if watched.has_functions() && !watched.needs_probes() {
        hits = hits.of_functions_only();
    }
    // Before anything is observed, because it may take long.
    for target in opened.targets() {
        add_process(&mut hits, watched, target);
    }
    let hits = hits.of_fields(args.fields.as_deref());
    let active = opened.begin(
        ObservationRequest {
            observation: watched.observation(),
            options: args.overrides.options(),
            duration: args.until.duration,
            reads_all_before_removal: false,
        },
        &output,
    )?;
    for (messages, observer) in active.each() {
        say_unwatched(&messages, observer, watched);
    }
    let mut watcher = Watcher {
        watched,
        printer: HitPrinter::of(args, hits, &output),
    };
    let mut outcome = active.run(Display::default(), &mut watcher);
    if outcome.output_was_read {
        let failures = &mut outcome.failures;
        failures.add(watcher.printer.show_rest());
        failures.add(watcher.printer.report_missing());
    }
    outcome.finish(&output.messages)
}

/// Reads and shows hits.
struct Watcher<'w> {
    watched: &'w Watched,
    printer: HitPrinter,
}

impl ReadingHandler for Watcher<'_> {
    /// Hits wait in the printer.
    type Reading = ();

    fn add_process(&mut self, target: &Target) {
        add_process(&mut self.printer.hits, self.watched, target);
    }

    fn read(
        &mut self,
        pid: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<()>> {
        self.printer.add(pid, observer.events()?);
        Ok(Some(()))
    }

    fn last(&mut self, pid: i32, report: ObservationReport, _: Duration) {
        self.printer.add(pid, report.events);
    }

    fn next_read(&self, observer: &Observer) -> Option<Duration> {
        Some(observer.next_read())
    }

    fn show(
        &mut self,
        _: ShownReadings<'_, ()>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        self.printer.show(|text| interruptible.write(text))
    }
}

/// Adds what is shown of the hits of a process.
fn add_process(hits: &mut Hits, watched: &Watched, target: &Target) {
    let shows_functions = watched.has_functions();
    let functions = shows_functions.then(|| FunctionSources::of_process(target.pid()));
    hits.add_process(target, sources(target), functions.unwrap_or_default());
    if let Some(limit) = watched.stack_limit() {
        // If it has exited meanwhile, it has no hits.
        if let Ok(stacks) = Stacks::of_process(target.pid()) {
            hits.add_stacks(stacks, limit.0);
        }
    }
}

/// Warns of functions that are not watched, or are without their results or arguments.
fn say_unwatched(messages: &Messages, observer: &Observer, watched: &Watched) {
    if watched.has_functions() {
        warn_of_uncounted(messages, observer, "watched");
        warn_of_missing_results(messages, observer);
        note_unknown_arguments(messages, observer, watched.calls().arguments());
    }
}

/// Shows hits.
pub(super) struct HitPrinter {
    hits: Hits,
    output: Output,
    /// How many hits are shown at most; `None`: all.
    limit: Option<u64>,
    /// The hits of the second that began at `second`; `None`: all are shown at once.
    reservoir: Option<Reservoir<ProcessHit>>,
    second: Instant,
    /// The hits that are to be shown next.
    waiting: Vec<ProcessHit>,
    shown: u64,
    reported: Instant,
    missing: Missing,
}

impl HitPrinter {
    pub(super) fn new(hits: Hits, output: Output) -> HitPrinter {
        HitPrinter {
            hits,
            output,
            limit: None,
            reservoir: None,
            second: Instant::now(),
            waiting: Vec::new(),
            shown: 0,
            reported: Instant::now(),
            missing: Missing::default(),
        }
    }

    fn of(args: &Args, hits: Hits, output: &Output) -> HitPrinter {
        let mut watching = HitPrinter::new(hits, output.clone());
        watching.limit = args.limit;
        watching.reservoir = args.rate.map(|rate| Reservoir::new(rate, Rng::new()));
        watching
    }

    /// Adds what was read of the process `pid`, to be shown next; with -rate, what is chosen of it once the second is
    /// over.
    fn add(&mut self, pid: i32, events: Events) {
        let missing = &mut self.missing;
        missing.lost = missing.lost.saturating_add(events.dropped);
        missing.without_place = missing.without_place.saturating_add(events.without_place);
        self.missing.skipped = self.missing.skipped.saturating_add(events.skipped);
        if let Some(more) = events.untyped {
            let untyped = self.missing.untyped.get_or_insert(0);
            *untyped = untyped.saturating_add(more);
        }
        let events = events.events.into_iter();
        let hits = events.map(|event| ProcessHit { pid, event });
        let has_enough = self.has_enough();
        match &mut self.reservoir {
            None => self.waiting.extend(hits),
            Some(_) if has_enough => {}
            Some(reservoir) => hits.for_each(|hit| reservoir.offer(hit)),
        }
    }

    /// Shows hits by `write`; [`Next::Stop`] if the limit is reached.
    fn show(&mut self, write: impl FnOnce(&str) -> Result<Next, Failure>) -> Result<Next, Failure> {
        let is_over = self.second.elapsed() >= SECOND;
        self.show_chosen(is_over, write)
    }

    /// Adds and shows what was read; blocks until the hits are written, even if a signal comes.
    pub(super) fn show_at_once(&mut self, pid: i32, events: Events) -> Result<(), Failure> {
        self.add(pid, events);
        let output = self.output.clone();
        self.show(|text| output.print(text).map(|()| Next::Continue))
            .map(drop)
    }

    /// Shows the last hits, although their second is not over; blocks in the same way.
    fn show_rest(&mut self) -> Result<(), Failure> {
        let output = self.output.clone();
        self.show_chosen(true, |text| output.print(text).map(|()| Next::Continue))
            .map(drop)
    }

    fn has_enough(&self) -> bool {
        self.limit.is_some_and(|limit| self.shown >= limit)
    }

    /// Shows the hits that wait; with -rate, those that were chosen, once their second `is_over`.
    fn show_chosen(
        &mut self,
        is_over: bool,
        write: impl FnOnce(&str) -> Result<Next, Failure>,
    ) -> Result<Next, Failure> {
        if let (Some(reservoir), true) = (&mut self.reservoir, is_over) {
            self.second = Instant::now();
            let (chosen, left_out) = reservoir.take();
            self.missing.skipped += left_out;
            self.waiting = chosen;
        }
        let mut chosen = take(&mut self.waiting);
        // Hits of several processes were read one process after the other.
        chosen.sort_by_key(|hit| hit.event.time);
        let left = self.limit.map_or(u64::MAX, |limit| limit - self.shown);
        let count = chosen
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        self.shown += count as u64;
        let mut text = self.hits.lines(&chosen[..count])?;
        let is_report_due = self.reported.elapsed() >= REPORT_INTERVAL;
        if is_report_due {
            text.push_str(&self.missing_object()?);
        }
        // If that fails, what is missing is reported at the end.
        let next = write(&text)?;
        if is_report_due {
            // Below the hits, and so below the head of their table.
            self.say_missing();
        }
        Ok(if self.has_enough() { Next::Stop } else { next })
    }

    /// Reports what was not shown since the last report.
    pub(super) fn report_missing(&mut self) -> Result<(), Failure> {
        let object = self.missing_object()?;
        self.say_missing();
        if object.is_empty() {
            return Ok(());
        }
        self.output.print_result(&object)
    }

    /// With -json, what was not shown since the last report, to be printed among the hits; otherwise empty.
    fn missing_object(&self) -> Result<String, Failure> {
        if self.output.format != Format::Json || self.missing.is_none() {
            return Ok(String::new());
        }
        output::missing(self.missing)
    }

    /// Resets what was not shown since the last report; without -json, reports it in messages.
    fn say_missing(&mut self) {
        self.reported = Instant::now();
        let missing = take(&mut self.missing);
        if self.output.format == Format::Json {
            return;
        }
        let messages = self.output.messages;
        if missing.skipped > 0 {
            messages.note(&format!(
                "{} skipped",
                number_that_were(missing.skipped, "hit")
            ));
        }
        if let Some(untyped @ 1..) = missing.untyped {
            let untyped = number_that_were(untyped, "hit");
            messages.note(&format!(
                "{untyped} untyped: -where is neither true nor false for them"
            ));
        }
        let lost = missing.lost;
        if lost > 0 {
            let hint = "watch fewer probes, give bursts more room (-buffer, up to 64), or count them, which loses none";
            messages.warning(
                WarningKind::LostHits,
                &format!(
                    "{} dropped: {}",
                    number_that_were(lost, "hit"),
                    output::why_lost(missing.without_place)
                ),
                hint,
            );
        }
    }
}
