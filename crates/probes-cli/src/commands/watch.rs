//! `watch`: the hits of probes and the calls of functions, one by one.

mod sample;

use std::mem::take;
use std::time::{Duration, Instant};

use fastrand::Rng;
use probes_lib::{Event, Events, Functions, Observer};

use super::observe_loop::{ActiveObservation, Display};
use super::open_target::{open_to_observe, sources};
use super::uncounted::{warn_of_missing_results, warn_of_uncounted};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    CallFlags, Checked, DurationFlag, FieldFlags, OneProcess, OutputFlags, PathFlags, SeccompFlag,
    TakeOver, WatchedFlags, positive, refuse_fields_in_json, with_regexp_help,
};
use crate::interruptible_output::Next;
use crate::messages::Messages;
use crate::output::{self, Format, FunctionSources, Hits, Missing, WarningKind};
use crate::text::number_of;
use sample::Sample;

/// How often hits are read: fewer hits come in this time than the ring in the process holds, up to
/// some millions a second.
pub(super) const READ_INTERVAL: Duration = Duration::from_millis(2);

/// How often it is reported what was lost or skipped.
const REPORT_INTERVAL: Duration = SECOND;

/// From which -rate chooses hits.
const SECOND: Duration = Duration::from_secs(1);

const HELP: &str = "\
Prints a line for each hit, whether its probe is enabled or not:
    TIME THREAD NAME ADDRESS FUNCTION FILE:LINE ARGUMENTS
with the time of day in UTC. The arguments are those in the note of the site, six at most: ints, strings
(their first 64 bytes, and ... if there are more), floats, boxed integers (7l 7L 7n), the fields of tuples,
records and arrays, (3, \"abc\"), lists, [1; 2; ...], exceptions, Failure \"boom\", constructors by their tag,
<1>(3); of blocks within blocks the tag and the number of words, <0:3>. A value in memory that cannot be read
is shown as its address, and an unsupported argument as ?. -fields time,name,args prints only these, in this order. The table
format has the same in columns. With -json each hit is an object on a line, with all fields.

With -fn it shows the calls of functions of any native program, as
    TIME THREAD NAME ADDRESS FILE:LINE ARGUMENTS
Functions are given as for `count -fn`; what is named and cannot be watched is an error, and what a pattern with
* or ? matches and cannot be watched is left out, with a warning. How many arguments an OCaml function has
is known, unless it uses variables of an outer function; how many one of C has, if debugging information
tells and no structure is among them; of all others, -args N shows N words. Arguments of C are integers,
text if a word points to some, or addresses: what is not passed in a general register (floats, structures)
is not shown, and a word that is no argument may be anything. With -probe as well, lines have the field
FUNCTION before FILE:LINE. With -results there is a line for each return, too, with `returns RESULT` instead
of the arguments; a call that ends with an exception, or with a jump to another function in tail position,
has none.

With -usdt it shows the hits of USDT probes that C and other languages have, such as 'postgresql:query__*', with
the arguments that the note of the site tells of. While they are watched, their semaphores are raised by one.

With -rate, hits are shown once a second: R of those that came in it, chosen at random, so that each
had the same chance, and all if they are no more.

With -where it shows only the hits for which an expression is true, such as
    arg0 > 5 && arg1 == \"GET\"
The others are not even copied. It is reported how many were untyped: neither true nor false, because an
argument is not what is asked for. docs/ask.md has all that can be asked.

With -sample 1/1000, the program records only every 1000th hit of each site and function, as counted by all
its threads: so many can be watched that are hit more often than can be printed. It chooses after -where, and
before -rate.

Hits that come faster than they can be read are dropped. Their number, and that of the hits that -sample
and -rate skip, is reported on standard error (with -json, on a line of its own). The instrumentation is removed
when the command ends.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes watch -pid N -probe NAMES [FLAGS]
       ocaml-probes watch -pid N -fn GLOBS [FLAGS]
       ocaml-probes watch -pid N -usdt GLOBS [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    watched: Checked<WatchedFlags>,
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
    seccomp: SeccompFlag,
    #[command(flatten)]
    take_over: TakeOver,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    refuse_fields_in_json("watch", args.fields.as_deref(), args.output.format)?;
    let output = args.output.open()?.with_pid(args.process.pid);
    let (pid, watched) = (args.process.pid, &args.watched);
    let target = open_to_observe(pid, watched.needs_probes(), &output.messages)?;
    let observation = watched.observation();
    // Before anything is observed, because it may take long.
    let mut hits = Hits::new(output.format, &target, sources(&target), args.paths.form());
    if watched.has_functions() {
        // If it has exited meanwhile, their source lines are not known.
        let functions = Functions::of_process(pid).ok();
        let functions = functions.map(FunctionSources::of).unwrap_or_default();
        hits = hits.with_functions(functions, !watched.needs_probes());
    }
    let hits = hits.of_fields(args.fields.as_deref());
    let active = ActiveObservation::begin(
        &target,
        &observation,
        args.seccomp.options(args.take_over.options()),
        args.until.duration,
        &output,
    )?;
    if watched.has_functions() {
        warn_of_uncounted(&output.messages, active.observer(), "watched");
        warn_of_missing_results(&output.messages, active.observer());
        note_unknown_arguments(&output.messages, active.observer(), watched.calls());
    }
    let mut watching = Watching::new(hits, output.clone());
    watching.limit = args.limit;
    watching.sample = args.rate.map(|rate| Sample::new(rate, Rng::new()));
    let mut outcome = active.run(
        Display {
            interval: Some(READ_INTERVAL),
            table: None,
        },
        |observer| observer.events(),
        |shown, interruptible| watching.show(shown.reading, |text| interruptible.write(text)),
    );
    if outcome.was_read {
        let observed = outcome.observed.take().map(|observed| observed.events);
        let failures = &mut outcome.failures;
        failures.add(watching.show_rest(observed.unwrap_or_default()));
        failures.add(watching.report_missing());
    }
    outcome.finish(&output.messages)
}

/// Says of how many functions no arguments are shown, because it is not known how many they have.
pub(super) fn note_unknown_arguments(messages: &Messages, observer: &Observer, calls: CallFlags) {
    let unknown = observer.functions_of_unknown_arguments();
    if unknown > 0 && !calls.says_arguments() {
        let functions = number_of(unknown, "function");
        let note = format!(
            "how many arguments {functions} {} is not known, and none are shown: -args N shows N",
            if unknown == 1 { "has" } else { "have" }
        );
        messages.note(&note);
    }
}

/// Shows hits.
pub(super) struct Watching {
    hits: Hits,
    output: Output,
    /// How many hits are shown at most; `None`: all.
    limit: Option<u64>,
    /// The hits of the second that began at `second`; `None`: all are shown at once.
    sample: Option<Sample<Event>>,
    second: Instant,
    shown: u64,
    reported: Instant,
    missing: Missing,
}

impl Watching {
    pub(super) fn new(hits: Hits, output: Output) -> Watching {
        Watching {
            hits,
            output,
            limit: None,
            sample: None,
            second: Instant::now(),
            shown: 0,
            reported: Instant::now(),
            missing: Missing::default(),
        }
    }

    /// Shows hits by `write`; [`Next::Stop`] if the limit is reached.
    pub(super) fn show(
        &mut self,
        events: Events,
        write: impl FnOnce(&str) -> Result<Next, Failure>,
    ) -> Result<Next, Failure> {
        let is_over = self.second.elapsed() >= SECOND;
        let chosen = self.choose(events, is_over);
        self.show_chosen(&chosen, write)
    }

    /// Same as [`Watching::show`], but blocks until the hits are written, even if a signal comes.
    pub(super) fn show_at_once(&mut self, events: Events) -> Result<(), Failure> {
        let output = self.output.clone();
        self.show(events, |text| output.print(text).map(|()| Next::Continue))
            .map(drop)
    }

    /// The same for the last hits, although their second is not over.
    fn show_rest(&mut self, events: Events) -> Result<(), Failure> {
        let chosen = self.choose(events, true);
        let output = self.output.clone();
        self.show_chosen(&chosen, |text| output.print(text).map(|()| Next::Continue))
            .map(drop)
    }

    /// Which hits are shown now; once the second is over, some of those that came in it.
    fn choose(&mut self, events: Events, is_over: bool) -> Vec<Event> {
        self.missing.lost = self.missing.lost.saturating_add(events.dropped);
        self.missing.skipped = self.missing.skipped.saturating_add(events.skipped);
        if let Some(more) = events.untyped {
            let untyped = self.missing.untyped.get_or_insert(0);
            *untyped = untyped.saturating_add(more);
        }
        let Some(sample) = &mut self.sample else {
            return events.events;
        };
        if self.limit.is_some_and(|limit| self.shown >= limit) {
            return Vec::new();
        }
        events
            .events
            .into_iter()
            .for_each(|event| sample.offer(event));
        if !is_over {
            return Vec::new();
        }
        self.second = Instant::now();
        let (chosen, left_out) = sample.take();
        self.missing.skipped += left_out;
        chosen
    }

    fn show_chosen(
        &mut self,
        chosen: &[Event],
        write: impl FnOnce(&str) -> Result<Next, Failure>,
    ) -> Result<Next, Failure> {
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
        // If that fails, it is reported in the end.
        let next = write(&text)?;
        if is_report_due {
            // Below the hits, and so below the head of their table.
            self.say_missing();
        }
        let has_enough = self.limit.is_some_and(|limit| self.shown >= limit);
        Ok(if has_enough { Next::Stop } else { next })
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

    /// Ends what is reported; without -json, says it in messages.
    fn say_missing(&mut self) {
        self.reported = Instant::now();
        let missing = take(&mut self.missing);
        if self.output.format == Format::Json {
            return;
        }
        let messages = self.output.messages;
        if missing.skipped > 0 {
            messages.note(&format!("{} hits were skipped", missing.skipped));
        }
        if let Some(untyped @ 1..) = missing.untyped {
            let note = "hits were untyped: -where is neither true nor false of them";
            messages.note(&format!("{untyped} {note}"));
        }
        let lost = missing.lost;
        if lost > 0 {
            let hint = "watch fewer probes, or count them, which loses none";
            messages.warning(
                WarningKind::LostHits,
                &format!("{lost} hits were dropped: they came faster than they could be read"),
                hint,
            );
        }
    }
}
