//! `gc`: the pauses of the garbage collector, from the events that the runtime of OCaml 5 writes itself.

use std::iter;
use std::mem::take;
use std::time::{Duration, Instant};

use probes_lib::{GcPauses, RuntimeEvents, Target};

use super::failed::Failed;
use crate::destination::{Output, print_result_without_waiting};
use crate::failure::Failure;
use crate::flags::{Checked, DurationFlag, OneProcess, OutputFlags, duration};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{GcReport, LongPause, WarningKind};
use crate::signals::{TerminationSignals, WaitEnd};

const HELP: &str = "\
Reads the events that the runtime of OCaml 5 writes itself, if it was started with OCAML_RUNTIME_EVENTS_START=1
in its environment, or has switched them on. It stops nothing, and changes nothing. docs/gc.md says what they mean.

When the duration is over, on Ctrl-C, or when the process exits, it prints in plain format, times in nanoseconds:
    all count N total N p50 N p90 N p99 N p99.9 N max N seconds S allocated N promoted N heap N lost N
    domain D count N ... max N share S allocated N promoted N lost N
    phase NAME count N ... max N
A pause is the time from when a domain begins work of the collector until it goes on with its own; share is that of
all pauses in the time. Times of phases include those of phases in them. allocated, promoted and heap are bytes; heap
is - until a major collection has ended. lost are words of events that were overwritten before they were read: the
figures are those of the others. Quantiles are at most 0.1 % too low, max and total exact.

With -over it also prints each pause that is longer, with its phases, those inside others after more >:
    pause NS domain D began NS stw_leader NS >minor NS
With -interval it also prints the figures so far, each line after the seconds so far.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes gc -pid N [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    until: DurationFlag,
    /// Print the figures so far every DURATION
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Print each pause longer than DURATION, with its phases
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    over: Option<Duration>,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

/// How often events are read: a ring holds more than what is written in this time.
const READ_INTERVAL: Duration = Duration::from_millis(5);

/// How often it is checked whether the process still writes events.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let output = &args.output.open()?.with_pid(args.process.pid);
    let pid = args.process.pid;
    let of_process = Failure::of_process(pid);
    let target = Target::open_any(pid).map_err(&of_process)?;
    let events = RuntimeEvents::of_process(pid).map_err(&of_process)?;
    let signals = TerminationSignals::block()?;
    let mut interruptible = InterruptibleOutput::new(output.destination.clone(), signals)?;
    let begun = Instant::now();
    let end = args.until.duration.unwrap_or(Duration::MAX);
    interruptible.set_deadline(begun.checked_add(end));
    let mut reading = Reading {
        args,
        output,
        target: &target,
        events,
        pauses: GcPauses::default(),
        long: String::new(),
        begun,
    };
    let mut failures = Failed::default();
    failures.add(output.begin());
    failures.add(reading.until_end(end, &mut interruptible));
    let seconds = begun.elapsed();
    let was_read = interruptible.was_read();
    let rest = interruptible.take_rest();
    interruptible.into_signals().unblock();
    failures.add(output.destination.print(&rest));
    let long = take(&mut reading.long);
    let report = reading.report(seconds);
    let text = report.text(output.format).map(|text| long + &text);
    failures.add(text.and_then(|text| {
        if was_read {
            output.print_result(&text)
        } else {
            print_result_without_waiting(&text)
        }
    }));
    if let Some(lost) = report.lost() {
        output.messages.warning(
            WarningKind::LostEvents,
            &format!("words of events were overwritten before they were read: {lost}"),
            "start the process with larger rings: e=18 in OCAMLRUNPARAM",
        );
    }
    failures.finish(&output.messages)
}

/// Events that are read and added up.
struct Reading<'g> {
    args: &'g Args,
    output: &'g Output,
    target: &'g Target,
    events: RuntimeEvents,
    pauses: GcPauses,
    /// Pauses that are to be printed.
    long: String,
    begun: Instant,
}

impl Reading<'_> {
    /// Reads and shows until the time is over, a signal comes, or the process writes no more.
    fn until_end(
        &mut self,
        end: Duration,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<(), Failure> {
        let interval = self.args.interval.unwrap_or(Duration::MAX);
        let (mut next, mut checked) = (interval, Duration::ZERO);
        loop {
            let left = end.saturating_sub(self.begun.elapsed()).min(READ_INTERVAL);
            let wait_end = interruptible
                .signals()
                .wait(iter::once(self.target), left)?;
            let at = self.begun.elapsed();
            let mut writes = !matches!(wait_end, WaitEnd::Exited);
            if writes && at >= checked + CHECK_INTERVAL {
                checked = at;
                let mapped = self.events.is_mapped();
                writes = mapped.map_err(Failure::of_process(self.target.pid()))?;
            }
            // After the check, so that nothing is missed that was written before.
            self.read()?;
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
        let pid = self.target.pid();
        let over = self.args.over.unwrap_or(Duration::MAX);
        let (pauses, format) = (&mut self.pauses, self.output.format);
        let mut long = Vec::new();
        let read = self.events.read(|entry| {
            let pause = pauses.add(&entry);
            long.extend(pause.filter(|pause| pause.time > over));
        });
        for pause in long {
            self.long += &LongPause::new(pid, pause).text(format)?;
        }
        read.map_err(Failure::of_process(pid))
    }

    fn report(&self, seconds: Duration) -> GcReport<'_> {
        let (pid, program) = (self.target.pid(), self.target.program());
        GcReport::new(pid, program, self.events.version(), seconds, &self.pauses)
    }
}
