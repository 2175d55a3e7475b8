//! `record`: what happens in a process, on one time line, in a file for a viewer.

mod sink;
mod timeline;

use std::mem::take;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use probes_lib::{RuntimeEvents, Target};

use self::sink::Sink;
use self::timeline::Timeline;
use super::event_loop::{EventReader, read_until_end, warn_of_lost_words};
use super::failed::Failed;
use super::observe_loop::{ActiveObservation, Display};
use super::open_target::open_to_observe;
use super::uncounted::{warn_of_missing_exits, warn_of_uncounted};
use super::watch::{READ_INTERVAL, note_unknown_arguments};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, DurationFlag, OneProcess, OutputFlags, RecordedFlags, SeccompFlag, TakeOver, duration,
    with_regexp_help,
};
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{
    LostWords, RecordCounts, RecordReport, SUFFIXES, TimelineFile, TimelineFormat, TracedProcess,
    WarningKind,
};
use crate::signals::TerminationSignals;
use crate::usage::UsageError;

const HELP: &str = "\
Writes a time line to FILE while it records, in the format that the name says: .perfetto-trace (ui.perfetto.dev),
.json (Chrome's trace events: ui.perfetto.dev, chrome://tracing, speedscope), .fxt (Fuchsia: ui.perfetto.dev,
magic-trace). All times are of one clock, CLOCK_MONOTONIC.

Calls of the functions of -fn are slices of their thread, from entry to exit, with their arguments and with -results
their results; so are the pairs of -pair. Hits of -probe and -usdt are instants with their arguments. With -gc, what
the collector of OCaml 5 does are slices and counters, by domain; runtime events have to be on (docs/gc.md).

A slice whose end was not seen is ended, and says why: the call was unwound by an exception, or was still running. What came
faster than it could be read is lost: an instant says where and how much, and so do a warning and the summary. If the disk
is full, or the tool is killed, what was written can be read. docs/record.md says more.

With -until NAME it ends when that probe is hit, with -over when a pair or a call has taken so long. With -last 10s only the
last 10 seconds are kept, in memory, and written in the end: a flight recorder.

When the duration is over, on Ctrl-C, or when the process exits, it prints in plain format:
    slices N instants N values N unwound N running N without_stop N unmatched_exits N unmatched_stops N too_deep N
    lost_hits N lost_words N bytes N seconds S
on one line.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes record -pid N -o FILE [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    recorded: Checked<RecordedFlags>,
    #[command(flatten)]
    until: DurationFlag,
    /// Keep the last DURATION in memory, and write it in the end
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    last: Option<Duration>,
    #[command(flatten)]
    seccomp: SeccompFlag,
    #[command(flatten)]
    take_over: TakeOver,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (path, format) = file(args)?;
    let pid = args.process.pid;
    let output = args.output.open_stdout().with_pid(pid);
    let of_process = Failure::of_process(pid);
    let target = open_to_observe(pid, args.recorded.needs_probes(), &output.messages)?;
    let events = if args.recorded.gc {
        Some(RuntimeEvents::of_process(pid).map_err(&of_process)?)
    } else {
        None
    };
    let file = TimelineFile::create(&path)?;
    let sink = Sink::new(format, &traced(&target), file, args.last);
    let (pairs, until) = (args.recorded.pairs.clone(), args.recorded.until.clone());
    let mut recording = Recording {
        target: &target,
        timeline: Timeline::new(pid, pairs, until, sink),
        events,
    };
    let begun = Instant::now();
    let failures = if args.recorded.observes() {
        recording.observe(args, &output)?
    } else {
        recording.read_until_end(args, &output)?
    };
    let lasted = begun.elapsed();
    recording.finish(&output, failures, format, lasted)
}

/// The file to write, and its format.
fn file(args: &Args) -> Result<(PathBuf, TimelineFormat), Failure> {
    let usage = |why: String| Failure::Usage(UsageError::new(Some("record"), why));
    let Some(path) = args.output.file() else {
        return Err(usage(format!(
            "needs -o FILE, whose name ends with {SUFFIXES}"
        )));
    };
    let format = TimelineFormat::of(path).ok_or_else(|| {
        let path = path.display();
        usage(format!(
            "-o {path}: the name of the file has to end with {SUFFIXES}"
        ))
    })?;
    Ok((path.to_owned(), format))
}

/// The process, and the clocks now.
fn traced(target: &Target) -> TracedProcess {
    let program = target.program();
    let name = program.file_name().unwrap_or(program.as_os_str());
    TracedProcess {
        pid: target.pid(),
        name: name.to_string_lossy().into_owned(),
        monotonic: clock(ClockId::CLOCK_MONOTONIC),
        boottime: clock(ClockId::CLOCK_BOOTTIME),
        realtime: clock(ClockId::CLOCK_REALTIME),
    }
}

/// A clock in nanoseconds.
fn clock(id: ClockId) -> u64 {
    let now = clock_gettime(id).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// What is read of a process, and the time line that is made of it.
struct Recording<'t> {
    target: &'t Target,
    timeline: Timeline,
    events: Option<RuntimeEvents>,
}

impl Recording<'_> {
    /// Observes the process until the end.
    fn observe(&mut self, args: &Args, output: &Output) -> Result<Failed, Failure> {
        let (recorded, target) = (&args.recorded, self.target);
        let active = ActiveObservation::begin(
            target,
            &recorded.observation(),
            args.seccomp.options(args.take_over.options()),
            args.until.duration,
            output,
        )?;
        if recorded.has_functions() {
            warn_of_uncounted(&output.messages, active.observer(), "recorded");
            warn_of_missing_exits(&output.messages, active.observer());
            note_unknown_arguments(&output.messages, active.observer(), recorded.calls());
        }
        let display = Display {
            interval: Some(READ_INTERVAL),
            table: None,
        };
        let mut outcome = active.run(
            display,
            |observer| observer.events(),
            |shown, _| {
                self.timeline.add_hits(&shown.reading);
                self.read_runtime_events()?;
                self.timeline.sink().flush(false)?;
                Ok(self.after_reading(args, output))
            },
        );
        let rest = outcome.observed.take().map(|observed| observed.events);
        let rest = rest.or(outcome.last.take().map(|(events, _)| events));
        self.timeline.add_hits(&rest.unwrap_or_default());
        let mut failures = Failed::default();
        failures.add(outcome.finish(&output.messages));
        Ok(failures)
    }

    /// Whether what was read ends the recording.
    fn after_reading(&self, args: &Args, output: &Output) -> Next {
        let over = args.recorded.over;
        let longest = Duration::from_nanos(self.timeline.longest());
        if let Some(name) = args
            .recorded
            .until
            .as_ref()
            .filter(|_| self.timeline.is_hit())
        {
            output.messages.note(&format!("{name} was hit"));
            return Next::Stop;
        }
        if over.is_some_and(|over| longest >= over) {
            let nanoseconds = longest.as_nanos();
            output
                .messages
                .note(&format!("a slice took {nanoseconds} ns"));
            return Next::Stop;
        }
        Next::Continue
    }

    /// Reads runtime events alone, until the end.
    fn read_until_end(&mut self, args: &Args, output: &Output) -> Result<Failed, Failure> {
        let signals = TerminationSignals::block()?;
        let mut interruptible = InterruptibleOutput::new(output.destination.clone(), signals)?;
        let (target, begun) = (self.target, Instant::now());
        let end = args.until.duration.unwrap_or(Duration::MAX);
        let ended = read_until_end(self, target, begun, end, &mut interruptible);
        let mut failures = Failed::default();
        failures.add(ended.map(|end| end.note(&output.messages)));
        let (_, printed) = interruptible.end();
        failures.add(printed);
        Ok(failures)
    }

    fn read_runtime_events(&mut self) -> Result<(), Failure> {
        let Some(events) = &mut self.events else {
            return Ok(());
        };
        let read = events.read(|entry| self.timeline.add_runtime_event(&entry));
        read.map_err(Failure::of_process(self.target.pid()))
    }

    /// Writes the rest, and says what was recorded.
    fn finish(
        mut self,
        output: &Output,
        mut failures: Failed,
        format: TimelineFormat,
        lasted: Duration,
    ) -> Result<(), Failure> {
        failures.add(self.read_runtime_events());
        self.timeline.finish(clock(ClockId::CLOCK_MONOTONIC));
        failures.add(self.timeline.sink().flush(true));
        let mut counts = self.timeline.counts;
        let lost_words = take(&mut self.timeline.lost_words);
        let sink = self.timeline.sink();
        let last = sink.last_written();
        if let Some(written) = last {
            (counts.slices, counts.instants, counts.values) =
                (written.slices, written.instants, written.values);
        }
        let file = sink.file();
        let last = last.map(|last| last.time.min(lasted));
        let report = RecordReport::new(
            (self.target.pid(), self.target.program()),
            (file.path(), format, file.len()),
            (lasted, last),
            counts,
        );
        let is_short = sink.is_short();
        let text = report.text(output.format);
        failures.add(text.and_then(|text| output.print_result(&text)));
        warn(counts, &lost_words, output);
        if let Some(last) = last.filter(|_| is_short) {
            let seconds = last.as_secs_f64();
            output.messages.warning(
                WarningKind::ShortRecording,
                &format!("only the last {seconds:.3} s are in the file: more does not fit into the memory for them"),
                "record fewer functions or probes, or without -last",
            );
        }
        failures.finish(&output.messages)
    }
}

impl EventReader for Recording<'_> {
    fn are_written(&mut self) -> Result<bool, Failure> {
        let mapped = self.events.as_ref().map(RuntimeEvents::is_mapped);
        let mapped = mapped.unwrap_or(Ok(false));
        mapped.map_err(Failure::of_process(self.target.pid()))
    }

    fn read(&mut self) -> Result<(), Failure> {
        self.read_runtime_events()?;
        self.timeline.sink().flush(false)
    }

    fn show(&mut self, _: Duration, _: &mut InterruptibleOutput) -> Result<Next, Failure> {
        Ok(Next::Continue)
    }
}

/// Says what the time line lacks.
fn warn(counts: RecordCounts, lost_words: &LostWords, output: &Output) {
    let messages = output.messages;
    if counts.lost_hits > 0 {
        messages.warning(
            WarningKind::LostHits,
            &format!(
                "{} hits were lost: they came faster than they could be read",
                counts.lost_hits
            ),
            "record fewer functions or probes; the time line has instants where they are missing",
        );
    }
    warn_of_lost_words(lost_words, &messages);
    if counts.too_deep > 0 {
        messages.warning(
            WarningKind::LostCalls,
            &format!(
                "{} calls within too many others were left out",
                counts.too_deep
            ),
            "record functions that are not recursive",
        );
    }
}
