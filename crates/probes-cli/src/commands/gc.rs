//! `gc`: the pauses of the garbage collector, from the events that the runtime of OCaml 5 writes itself.

mod functions;
mod program;
mod switched;

use std::ffi::OsString;
use std::iter;
use std::mem::take;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use probes_lib::{Error, ErrorKind, GcPauses, RuntimeEvents, RuntimeEventsError, Target};

use self::program::StartedProgram;
use self::switched::OpenedEvents;
use super::failed::Failed;
use crate::destination::{Output, print_result_without_waiting};
use crate::failure::Failure;
use crate::flags::{Checked, DurationFlag, OutputFlags, TakeOver, duration, pid};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{GcReport, LongPause, WarningKind};
use crate::signals::{TerminationSignals, WaitEnd};

const HELP: &str = "\
Reads the events that the runtime of OCaml 5 writes itself. If they are not on, it switches them on once the process
allocates or collects, which stops it for a moment, and off again in the end. docs/gc.md says what they mean.

When the duration is over, on Ctrl-C, or when the process exits, it prints in plain format, times in nanoseconds:
    all count N total N p50 N p90 N p99 N p99.9 N max N seconds S allocated N promoted N heap N lost N compactions N
    domain D count N ... max N share S allocated N promoted N lost N
    stw domain D led N last N joined count N ... max N waits count N ... max N
    phase NAME count N ... max N
A pause is the time from when a domain begins work of the collector until it goes on with its own; share is that of
all pauses in the time. Times of phases include those of phases in them. allocated, promoted and heap are bytes; heap
is - until a major collection has ended. lost are words of events that were overwritten before they were read: the
figures are those of the others. Quantiles are at most 0.1 % too low, max and total exact.
stw: how many stop-the-world requests the domain has made, of how many others it was the last to join, how late it joined
these, and how long it waited for other domains.

With -over it also prints each pause that is longer, with its phases, those inside others after more >:
    pause NS domain D began NS stw_leader NS >minor NS
Of OCaml 4, and where the events cannot be had, the calls of the collector's functions are timed instead, each without those
in it: minor, slice, major, compact. What is not known is - then.

With -interval it also prints the figures so far, each line after the seconds so far.

With -prog FILE it starts the program with its events on, and exits with its status, or 128 plus the number of the
signal that ended it. The answer is on standard error then, unless -o names a file.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes gc -pid N [FLAGS]
       ocaml-probes gc -prog FILE [FLAGS] [-- ARGS]")]
#[command(after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    observed: Observed,
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
    /// Arguments of the program
    #[arg(
        last = true,
        id = "argument",
        value_name = "ARGS",
        help_heading = "Arguments",
        requires = "prog"
    )]
    arguments: Vec<OsString>,
}

// A process, or a program to start.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Observed {
    /// The process
    #[arg(short, long, value_name = "N", value_parser = pid)]
    pid: Option<i32>,
    /// The program to start; with no slash in it, it is looked up in PATH
    #[arg(long, value_name = "FILE")]
    prog: Option<PathBuf>,
}

/// How often events are read: a ring holds more than what is written in this time.
const READ_INTERVAL: Duration = Duration::from_millis(5);

/// How often it is checked whether the process still writes events.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Some(pid) = args.observed.pid {
        let output = args.output.open()?.with_pid(pid);
        let target = Target::open_any(pid).map_err(Failure::of_process(pid))?;
        let open = |end, signals: &TerminationSignals| {
            OpenedEvents::of_process(&target, &args.take_over, end, &output, signals)
        };
        let done = match read(args, &target, &output, open) {
            Err(Failure::Target(_, why)) if is_without_events(&why) => {
                functions::run(args, &target, why, &output)
            }
            done => done,
        };
        return done.map(|()| ExitCode::SUCCESS);
    }
    let Some(program) = &args.observed.prog else {
        // The flags are checked: there is one of them.
        return Ok(ExitCode::FAILURE);
    };
    args.output.refuse_to_overwrite("-prog", program)?;
    let output = args.output.open_beside_program()?;
    let started = StartedProgram::start(program, &args.arguments)?;
    let output = output.with_pid(started.pid());
    let done = match started.open() {
        Ok(target) => read(args, &target, &output, |_, signals| {
            let events = started.events(&target, signals)?;
            Ok(OpenedEvents::always_on(events))
        }),
        Err(error) if !error.is_gone() => Err(Failure::of_process(started.pid())(error)),
        Err(_) => started
            .events_of_exited()
            .and_then(|events| read_exited(args, &started, events, &output)),
    };
    // Its status is ours, whatever has become of the figures.
    if let Err(failure) = &done {
        output.messages.failure(failure);
    }
    started.wait()
}

/// Whether the collector of a process is shown by its functions: it has no events, or they cannot be had.
pub(super) fn is_without_events(why: &Error) -> bool {
    matches!(
        why.kind(),
        ErrorKind::RuntimeEvents(
            RuntimeEventsError::Ocaml4
                | RuntimeEventsError::CannotSwitchOn { .. }
                | RuntimeEventsError::NoVersion
                | RuntimeEventsError::UnknownVersion { .. }
        )
    )
}

/// Opens the events of a process with `open`, reads them until the end, and prints what they add up to.
fn read(
    args: &Args,
    target: &Target,
    output: &Output,
    open: impl FnOnce(Duration, &TerminationSignals) -> Result<OpenedEvents, Failure>,
) -> Result<(), Failure> {
    let pid = target.pid();
    let signals = TerminationSignals::block()?;
    let mut interruptible = InterruptibleOutput::new(output.destination.clone(), signals)?;
    let end = args.until.duration.unwrap_or(Duration::MAX);
    let opened = open(end, interruptible.signals());
    let events = match opened {
        Ok(events) => events,
        Err(failure) => {
            interruptible.into_signals().unblock();
            return Err(failure);
        }
    };
    let begun = Instant::now();
    interruptible.set_deadline(begun.checked_add(end));
    let mut reading = Reading {
        args,
        output,
        pid,
        program: target.program(),
        events,
        pauses: GcPauses::default(),
        long: String::new(),
        begun,
    };
    let mut failures = Failed::default();
    failures.add(output.begin());
    failures.add(reading.until_end(target, end, &mut interruptible));
    let seconds = begun.elapsed();
    // Before anything waits for a reader.
    failures.add(reading.events.close(pid));
    let was_read = interruptible.was_read();
    let rest = interruptible.take_rest();
    interruptible.into_signals().unblock();
    failures.add(output.destination.print(&rest));
    let long = take(&mut reading.long);
    reading.pauses.finish();
    let report = reading.report(seconds);
    let text = report.text(output.format).map(|text| long + &text);
    failures.add(text.and_then(|text| {
        if was_read {
            output.print_result(&text)
        } else {
            print_result_without_waiting(&text)
        }
    }));
    warn_of_lost(&report, output);
    failures.finish(&output.messages)
}

/// Reads the events of a program that has exited before they could be opened, and prints what they add up to.
fn read_exited(
    args: &Args,
    started: &StartedProgram,
    events: RuntimeEvents,
    output: &Output,
) -> Result<(), Failure> {
    let program = started.path();
    let mut reading = Reading {
        args,
        output,
        pid: started.pid(),
        program: &program,
        events: OpenedEvents::always_on(events),
        pauses: GcPauses::default(),
        long: String::new(),
        begun: started.begun(),
    };
    let seconds = reading.begun.elapsed();
    output.begin()?;
    reading.read()?;
    reading.pauses.finish();
    let long = take(&mut reading.long);
    let report = reading.report(seconds);
    output.print_result(&(long + &report.text(output.format)?))?;
    warn_of_lost(&report, output);
    Ok(())
}

fn warn_of_lost(report: &GcReport<'_>, output: &Output) {
    if let Some(lost) = report.lost() {
        output.messages.warning(
            WarningKind::LostEvents,
            &format!("words of events were overwritten before they were read: {lost}"),
            "start the process with larger rings: e=18 in OCAMLRUNPARAM",
        );
    }
}

/// Events that are read and added up.
struct Reading<'g> {
    args: &'g Args,
    output: &'g Output,
    pid: i32,
    program: &'g Path,
    events: OpenedEvents,
    pauses: GcPauses,
    /// Pauses that are to be printed.
    long: String,
    begun: Instant,
}

impl Reading<'_> {
    /// Reads and shows until the time is over, a signal comes, or the process writes no more.
    fn until_end(
        &mut self,
        target: &Target,
        end: Duration,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<(), Failure> {
        let interval = self.args.interval.unwrap_or(Duration::MAX);
        let (mut next, mut checked) = (interval, Duration::ZERO);
        loop {
            let left = end.saturating_sub(self.begun.elapsed()).min(READ_INTERVAL);
            let wait_end = interruptible.signals().wait(iter::once(target), left)?;
            let at = self.begun.elapsed();
            let mut writes = !matches!(wait_end, WaitEnd::Exited);
            if writes && at >= checked + CHECK_INTERVAL {
                checked = at;
                let mapped = self.events.events.is_mapped();
                writes = mapped.map_err(Failure::of_process(self.pid))?;
                if writes {
                    let check = self.events.check();
                    check.map_err(Failure::of_process(self.pid))?;
                }
            }
            // After the check, so that nothing is missed that was written before.
            self.read()?;
            if !writes && self.args.observed.pid.is_none() {
                return Ok(());
            }
            if !writes {
                let note = "the process has exited, or writes no more events";
                self.output.messages.note(note);
                return Ok(());
            }
            if !matches!(wait_end, WaitEnd::Timeout) || at >= end {
                return Ok(());
            }
            let mut text = take(&mut self.long);
            if at >= next {
                next = at.saturating_add(interval);
                text += &self.report(at).so_far().text(self.output.format)?;
            }
            if let Next::Stop = interruptible.write(&text)? {
                return Ok(());
            }
        }
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
        self.pauses.settle();
        read.map_err(Failure::of_process(pid))
    }

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
