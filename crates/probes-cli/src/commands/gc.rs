//! `gc`: the pauses of the garbage collector, from the events that the runtime of OCaml 5 writes itself.

mod functions;

use std::ffi::OsString;
use std::mem::take;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use probes_lib::{GcPauses, RuntimeEvents, Target};

use super::event_loop::{EventHandler, read_until_end, warn_of_lost_words};
use super::opened_events::{OpenedEvents, is_without_events};
use super::program_with_events::ProgramWithEvents;
use super::step_failures::{StepFailures, report_failures};
use crate::clock::monotonic_now;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, DurationFlag, FORCE_HELP, GivenTarget, OutputFlags, ProcessOrProgram, TakeOver,
    duration,
};
use crate::hint;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{GcReport, LongPause, WarningKind};
use crate::progress::LongWork;
use crate::search_path::look_up;
use crate::signals::TerminationSignals;

const HELP: &str = "\
Reads the events that the runtime of OCaml 5 writes itself. If they are not on, it switches them on
once the process allocates or collects, which stops it for a moment, and off again in the end.
docs/gc.md says what they mean.

When the duration is over, on Ctrl-C, or when the process exits, it prints in plain format, times in
nanoseconds:
    all count N total N p50 N ... max N seconds S allocated N promoted N heap N lost N compactions N
    domain D count N ... max N share S allocated N promoted N lost N
    stw domain D led N last N joined count N ... max N waits count N ... max N
    phase NAME count N ... max N
A pause is the time from when a domain begins work of the collector until it goes on with its own;
share is that of all pauses in the time. Times of phases include those of phases in them. allocated,
promoted and heap are bytes; heap is - until a major collection has ended. lost are words of events
that were overwritten before they were read: the figures are those of the others. Quantiles (p50,
p90, p99, p99.9) are at most 0.2 % too low, max and total exact. stw: how many stop-the-world
requests the domain has made, of how many others it was the last to join, how late it joined these,
and how long it waited for other domains.

With -over it also prints each pause that is longer, with its phases, those inside others after more
>:
    pause NS domain D began NS stw_leader NS >minor NS
Of OCaml 4, and where the events of a process cannot be had, the calls of the collector's functions
are timed instead, each without those in it: minor, slice, major, compact. What is not known is -
then, and all times but max are within 0.2 %.

With -interval it also prints the figures so far, each line after the seconds so far.

With -prog FILE it starts the program, with its events on if it is of OCaml 5, and exits with its
status, or 128 plus the number of the signal that ended it. The answer is on standard error then,
unless -o names a file.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes gc -pid N [FLAGS]
       ocaml-probes gc -prog FILE [FLAGS] [-- ARGS]")]
#[command(after_help = HELP)]
#[command(next_help_heading = "Flags", mut_arg("force", |force| force.conflicts_with("prog").help(FORCE_HELP)))]
pub(crate) struct Args {
    #[command(flatten)]
    observed: ProcessOrProgram,
    #[command(flatten)]
    until: DurationFlag,
    /// Print the figures so far every DURATION
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Print each pause longer than DURATION, with its phases
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    over: Option<Duration>,
    #[command(flatten)]
    take_over: TakeOver,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, Failure> {
    match args.observed.given() {
        GivenTarget::Process(pid) => of_process(args, pid).map(|()| ExitCode::SUCCESS),
        GivenTarget::Program { path, arguments } => of_program(args, path, arguments),
    }
}

fn of_process(args: &Args, pid: i32) -> Result<(), Failure> {
    let output = args.output.open()?.with_pid(pid);
    let target = Target::open_any(pid).map_err(Failure::of_process(pid))?;
    let open = |end, signals: &TerminationSignals| {
        OpenedEvents::of_process(&target, args.take_over.options(), end, &output, signals)
    };
    match read(args, &target, &output, None, open) {
        Err(Failure::Target(_, why)) if is_without_events(&why) => {
            functions::of_process(args, &target, why, &output)
        }
        done => done,
    }
}

/// Starts a program, and returns its status.
fn of_program(args: &Args, path: &Path, arguments: &[OsString]) -> Result<ExitCode, Failure> {
    args.output.refuse_to_overwrite_started(path)?;
    // If there is no such program, starting it says so.
    let checked = look_up(path).map(RuntimeEvents::check_program);
    if let Some(Err(why)) = checked {
        return functions::of_program(args, path, arguments, &why);
    }
    let output = args.output.open_beside_program()?;
    let started = ProgramWithEvents::start(path, arguments, &output.messages)?;
    let output = output.with_pid(started.pid());
    let done = match Target::open_any(started.pid()) {
        Ok(target) => read(args, &target, &output, Some(&started), |end, signals| {
            let events = started.events(&target, end, signals)?;
            Ok(OpenedEvents::always_on(events))
        }),
        Err(error) if !error.is_gone() => Err(Failure::of_process(started.pid())(error)),
        Err(_) => started
            .events_of_exited()
            .and_then(|events| read_exited(args, &started, events, &output)),
    };
    // Not the hint to try what has just failed.
    let done = done.map_err(|failure| match failure {
        Failure::NoRuntimeEvents { program, .. } => Failure::NoRuntimeEvents {
            program,
            hint: hint::ANOTHER_PROGRAM.to_owned(),
        },
        failure => failure,
    });
    started.wait(report_failures([done], &output.messages))
}

/// Opens the events of a process with `open`, reads them until the end, and prints what they add up to: since the
/// program was `started`, if the command has started it, or else since they were opened.
fn read(
    args: &Args,
    target: &Target,
    output: &Output,
    started: Option<&ProgramWithEvents>,
    open: impl FnOnce(Duration, &TerminationSignals) -> Result<OpenedEvents, Failure>,
) -> Result<(), Failure> {
    let pid = target.pid();
    let signals = TerminationSignals::block_and_pass_on(started.map(ProgramWithEvents::pid))?;
    let mut interruptible = InterruptibleOutput::new(output, signals)?;
    let end = args.until.duration.unwrap_or(Duration::MAX);
    let progress = show_progress(args, &output.messages);
    let opened = open(end, interruptible.signals());
    let events = match opened {
        Ok(events) => events,
        Err(failure) => return Err(interruptible.end_after(failure)),
    };
    let begun = started.map_or_else(Instant::now, ProgramWithEvents::begun);
    let mut reading = GcReader {
        args,
        output,
        pid,
        program: target.program(),
        pauses: GcPauses::within(events.events.under_way()),
        events,
        long: String::new(),
        next: args.interval.unwrap_or(Duration::MAX),
    };
    let mut failures = StepFailures::default();
    failures.add(output.begin());
    let ended = read_until_end(&mut reading, target, begun, end, &mut interruptible);
    drop(progress);
    failures.add(ended.map(|end| end.note(started.is_some(), &output.messages)));
    let seconds = begun.elapsed();
    // A pause that was under way when the process exited never ends.
    let until = if target.has_exited() {
        0
    } else {
        monotonic_now()
    };
    let missed = reading.events.missed(target);
    // Before anything waits for a reader of the answer: meanwhile, the process is not to write events.
    failures.add(reading.events.close(pid));
    let (output_was_read, rest_printed) = interruptible.end();
    failures.add(rest_printed);
    let long = take(&mut reading.long);
    reading.pauses.finish();
    let report = reading.report(seconds);
    let text = report.text(output.format).map(|text| long + &text);
    failures.add(text.and_then(|text| output.print_last(&text, output_was_read)));
    warn_of_lost_words(&report.lost(), &output.messages);
    if let Some(missed) = missed.filter(|_| started.is_none()) {
        missed.warn(pid, &output.messages);
    }
    warn_of_partial_pauses(&reading.pauses, until, seconds, &output.messages);
    failures.finish(&output.messages)
}

/// Shows on a terminal that the command goes on, unless it prints something meanwhile, or a program that it has started may
/// do so.
fn show_progress(args: &Args, messages: &Messages) -> Option<LongWork> {
    let is_process = matches!(args.observed.given(), GivenTarget::Process(_));
    let is_silent = is_process && args.interval.is_none() && args.over.is_none();
    let what = match args.until.duration {
        Some(all) => format!("watching the collector for {} s", all.as_secs_f64()),
        None => "watching the collector until Ctrl-C".to_owned(),
    };
    is_silent.then(|| LongWork::begin(what, messages))?
}

/// Names the domains that were in pauses which are left out for a hundredth of the time or more.
fn warn_of_partial_pauses(pauses: &GcPauses, until: u64, seconds: Duration, messages: &Messages) {
    for (domain, left_out) in pauses
        .left_out(until)
        .filter(|(_, it)| *it >= seconds / 100)
    {
        messages.warning(
            WarningKind::PauseLeftOut,
            &format!(
                "domain {domain} spent {:.3} of {:.3} s in a pause that had begun before or has not ended: that time is left out",
                left_out.as_secs_f64(),
                seconds.as_secs_f64(),
            ),
            "look for longer, so that the whole pause is seen; `gc -over` and `record -gc` show it then",
        );
    }
}

/// Reads the events of a program that has exited before they could be opened, and prints what they add up to.
fn read_exited(
    args: &Args,
    started: &ProgramWithEvents,
    events: RuntimeEvents,
    output: &Output,
) -> Result<(), Failure> {
    let program = started.path();
    let mut reading = GcReader {
        args,
        output,
        pid: started.pid(),
        program: &program,
        events: OpenedEvents::always_on(events),
        pauses: GcPauses::default(),
        long: String::new(),
        next: Duration::MAX,
    };
    let seconds = started.begun().elapsed();
    output.begin()?;
    reading.read()?;
    reading.pauses.finish();
    let long = take(&mut reading.long);
    let report = reading.report(seconds);
    output.print_result(&(long + &report.text(output.format)?))?;
    warn_of_lost_words(&report.lost(), &output.messages);
    Ok(())
}

/// Events that are read and added up.
struct GcReader<'g> {
    args: &'g Args,
    output: &'g Output,
    pid: i32,
    program: &'g Path,
    events: OpenedEvents,
    pauses: GcPauses,
    /// Pauses that are to be printed.
    long: String,
    /// When the figures so far are shown next, as the time since the beginning.
    next: Duration,
}

impl EventHandler for GcReader<'_> {
    fn are_written(&mut self) -> Result<bool, Failure> {
        let written = self.events.are_written();
        written.map_err(Failure::of_process(self.pid))
    }

    fn next_read(&self) -> Duration {
        self.events.events.next_read()
    }

    fn next_shown(&self) -> Duration {
        self.next
    }

    fn read(&mut self) -> Result<(), Failure> {
        let pid = self.pid;
        let over = self.args.over.unwrap_or(Duration::MAX);
        let (pauses, format) = (&mut self.pauses, self.output.format);
        let mut long = Vec::new();
        let read = self.events.events.read(|entry| {
            let pause = pauses.add(&entry);
            long.extend(pause.filter(|pause| pause.time > over));
        });
        for pause in long {
            self.long += &LongPause::new(pid, pause).text(format)?;
        }
        self.pauses.match_requests();
        read.map_err(Failure::of_process(pid))
    }

    fn show(
        &mut self,
        at: Duration,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let mut text = take(&mut self.long);
        if at >= self.next {
            self.next = at.saturating_add(self.args.interval.unwrap_or(Duration::MAX));
            text += &self.report(at).so_far().text(self.output.format)?;
        }
        interruptible.write(&text)
    }
}

impl GcReader<'_> {
    fn report(&self, seconds: Duration) -> GcReport<'_> {
        GcReport::new(
            self.pid,
            self.program,
            self.events.events.version(),
            seconds,
            &self.pauses,
        )
    }
}
