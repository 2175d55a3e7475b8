//! [`Recording`]: what is read of a process, the time line that is made of it, and what is said of it in the end.

use std::fmt;
use std::io;
use std::mem::take;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::time::ClockId;
use probes_lib::{
    Activity, EventBatch, Events, Latency, ObservationReport, Observer, RecordedWait,
    RuntimeEvents, Target,
};

use super::Args;
use super::keyed_starts::MAX_WAITING;
use super::sink::{MAX_KEPT, Sink};
use super::timeline::Timeline;
use super::waits::WaitsReader;
use crate::clock::{clock_now, in_nanoseconds, monotonic_now};
use crate::commands::doubtful_times::warn_of_interleaved;
use crate::commands::event_loop::{EventHandler, read_until_end, warn_of_lost_words};
use crate::commands::lost_switches::warn_of_lost_switches;
use crate::commands::observations::Observations;
use crate::commands::opened_events::{
    EventsOff, NOTE_WAITING_AFTER, OpenedEvents, note_waiting_for_events, warn_of_left_file,
};
use crate::commands::readings::{Display, ReadingHandler, ShownReadings};
use crate::commands::step_failures::StepFailures;
use crate::commands::uncounted::{
    note_unknown_arguments, warn_of_missing_exits, warn_of_uncounted,
};
use crate::commands::untyped::warn_of_slices_without_key;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{
    FrequentName, LostWords, RecordCounts, RecordReport, RecordedPairs, TimelineFile,
    TimelineFormat, TracedProcess, WarningKind, with_unit,
};
use crate::progress::Progress;
use crate::signals::TerminationSignals;
use crate::text::{Escaped, bytes_text, number_of, number_that_were};

/// How often waits are read if nothing else is.
const WAITS_INTERVAL: Duration = Duration::from_millis(2);

/// What to do about pairs that interleave, or may.
const BY_KEY: &str = "give -key EXPR, such as -key arg0: it says which stop belongs to which start; `latency -key \
                      EXPR` has the times alone";

/// How often it is checked whether pairs interleave.
const LATENCIES_INTERVAL: Duration = Duration::from_millis(200);

/// What is read of a process, and the time line that is made of it.
pub(super) struct Recording<'r> {
    args: &'r Args,
    output: &'r Output,
    pid: i32,
    program: PathBuf,
    format: TimelineFormat,
    timeline: Timeline,
    /// Runtime events, once they are there.
    events: Option<OpenedEvents>,
    /// Whether runtime events were read.
    has_events: bool,
    /// What was missed of the runtime events.
    missed: Option<EventsOff>,
    waits: Option<WaitsReader>,
    /// The times of the pairs, as they were measured in the process, and when they were read.
    latencies: Vec<Latency>,
    latencies_read: Option<Instant>,
    /// When it began, in nanoseconds of CLOCK_MONOTONIC.
    begun: u64,
    /// When it ended; `None` while it lasts.
    ended: Option<u64>,
    /// Whether the process is observed, which has stopped it before `begun`.
    is_observed: bool,
    /// The progress that is shown on a terminal while the recording lasts.
    progress: Option<Progress>,
}

/// Adds what is read of an observed process to a recording.
struct Recorder<'o, 'r> {
    recording: &'o mut Recording<'r>,
    /// Whether runtime events are asked for, and are not there yet.
    are_awaited: bool,
    has_noted_waiting: bool,
    /// The hits that the removal returns.
    rest: Events,
}

impl ReadingHandler for Recorder<'_, '_> {
    /// Hits are added at once.
    type Reading = ();

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<()>> {
        if observer.events_are_on()? && self.are_awaited {
            let (events, left) = open_switched(observer)?;
            self.are_awaited = false;
            warn_of_left_file(&self.recording.output.messages, left);
            self.recording.set_events(OpenedEvents::always_on(events));
        }
        self.recording.timeline.add_batch(observer.event_batch()?);
        if self.recording.latencies_are_due() {
            self.recording.set_latencies(observer.latencies()?);
        }
        Ok(Some(()))
    }

    fn last(&mut self, _: i32, report: ObservationReport, _: Duration) {
        self.recording.set_latencies(report.latencies);
        self.rest = report.events;
    }

    fn next_read(&self, observer: &Observer) -> Option<Duration> {
        let events = self.recording.events.as_ref();
        let of_events = events.map(|it| it.events.next_read());
        of_events.into_iter().chain([observer.next_read()]).min()
    }

    fn show(
        &mut self,
        shown: ShownReadings<'_, ()>,
        _: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        if self.are_awaited && !self.has_noted_waiting && shown.at > NOTE_WAITING_AFTER {
            self.has_noted_waiting = true;
            note_waiting_for_events(&self.recording.output.messages);
        }
        self.recording.read()?;
        Ok(self.recording.after_reading())
    }
}

impl<'r> Recording<'r> {
    /// A recording of this process, which executes the program; nothing is read yet.
    pub(super) fn new(
        args: &'r Args,
        output: &'r Output,
        (pid, program): (i32, &Path),
        (file, format): (TimelineFile, TimelineFormat),
    ) -> Recording<'r> {
        let sink = Sink::new(format, &traced(pid, program), file, args.last);
        let (pairs, until) = (args.recorded.pairs.to_vec(), args.recorded.until.clone());
        let probes = args.recorded.probes.clone();
        let timeline = Timeline::new(pid, pairs, until, sink).with_instants(probes);
        Recording {
            args,
            output,
            pid,
            program: program.to_owned(),
            format,
            timeline: if args.recorded.pairs.are_by_key() {
                timeline.with_pairs_by_key()
            } else {
                timeline
            },
            events: None,
            has_events: false,
            missed: None,
            waits: None,
            latencies: Vec::new(),
            latencies_read: None,
            begun: monotonic_now(),
            ended: None,
            is_observed: false,
            progress: None,
        }
    }

    /// Shows progress from now on; not for a program that was started, which writes to the terminal itself.
    fn show_progress(&mut self) {
        if self.args.observed.is_process() {
            self.progress = Progress::begin(&self.output.messages);
        }
    }

    /// Waits are recorded from now on, if they are asked for.
    pub(super) fn begin_waits(&mut self) -> Result<(), Failure> {
        if !self.args.recorded.off_cpu {
            return Ok(());
        }
        let (pid, messages) = (self.pid, &self.output.messages);
        match WaitsReader::begin(pid) {
            Ok(waits) => {
                messages.step(format_args!("recording the waits of process {pid}"));
                self.waits = Some(waits);
            }
            Err(Failure::Target(_, error)) if error.is_gone() => warn_of_early_exit(messages),
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    /// Runtime events are read from now on.
    pub(super) fn set_events(&mut self, events: OpenedEvents) {
        self.events = Some(events);
    }

    /// Observes the process, and adds what is read, until the end.
    pub(super) fn observe(&mut self, target: &Target) -> Result<StepFailures, Failure> {
        let (args, output, recorded) = (self.args, self.output, &self.args.recorded);
        let options = args.overrides.options();
        let observe = || {
            let observation = recorded.observation();
            if recorded.gc {
                return target.observe_with_events(&observation, options);
            }
            target.observe(&observation, options)
        };
        // Before anything is changed, because it may fail.
        self.begin_waits()?;
        let active = Observations::of_process(target, args.until.duration, output, observe)?;
        self.begun = monotonic_now();
        self.is_observed = true;
        if recorded.has_functions() {
            for (messages, observer) in active.each() {
                warn_of_uncounted(&messages, observer, "recorded");
                warn_of_missing_exits(&messages, observer);
                note_unknown_arguments(&messages, observer, recorded.calls().arguments());
            }
        }
        let switches_on = active.only().is_some_and(Observer::switches_events_on);
        let mut are_awaited = recorded.gc;
        if recorded.gc && !switches_on {
            // If that fails, the first reading tries again, and reports the error.
            if let Ok(events) = RuntimeEvents::of_process(self.pid) {
                are_awaited = false;
                self.set_events(OpenedEvents::always_on(events));
            }
        }
        let mut recorder = Recorder {
            recording: self,
            are_awaited,
            has_noted_waiting: false,
            rest: Events::default(),
        };
        recorder.recording.show_progress();
        let outcome = active.run(Display::default(), &mut recorder);
        let (are_awaited, rest) = (recorder.are_awaited, recorder.rest);
        self.progress = None;
        if switches_on {
            let events = self.events.as_ref();
            self.missed = events.and_then(OpenedEvents::missed_meanwhile);
        } else {
            self.find_missed(target);
        }
        // Waits from here on are those of the removal.
        self.ended = Some(self.begun.saturating_add(in_nanoseconds(outcome.lasted)));
        self.add_hits(&rest);
        if are_awaited {
            output.messages.warning(
                WarningKind::EventsPaused,
                "the file has no runtime events: the process has not allocated or collected meanwhile",
                "they are switched on when it does",
            );
        }
        let mut failures = StepFailures::default();
        failures.add(outcome.finish(&output.messages));
        Ok(failures)
    }

    /// Adds the hits of a reading.
    pub(super) fn add_batch(&mut self, hits: EventBatch<'_>) {
        self.timeline.add_batch(hits);
    }

    /// Adds hits that were read.
    pub(super) fn add_hits(&mut self, hits: &Events) {
        self.timeline.add_hits(hits);
    }

    /// Adds the runtime events and waits that were not read yet. Returns whether what was read ends the recording.
    pub(super) fn read_beside_hits(&mut self) -> Result<Next, Failure> {
        self.read()?;
        Ok(self.after_reading())
    }

    /// Ends the recording: waits from now on are those of the removal, and are not recorded.
    pub(super) fn end(&mut self) {
        self.ended = Some(monotonic_now());
    }

    /// Whether it is time to check whether pairs interleave: now and then, and before a pair ends the recording.
    pub(super) fn latencies_are_due(&self) -> bool {
        let is_over = self.if_over(self.timeline.longest_pair()).is_some();
        let is_old = |read: Instant| read.elapsed() >= LATENCIES_INTERVAL;
        !self.args.recorded.pairs.is_empty() && (is_over || self.latencies_read.is_none_or(is_old))
    }

    /// Returns the longest time, and what took it, if it ends the recording (`-over`).
    fn if_over<'n>(
        &self,
        longest: Option<(u64, &'n dyn fmt::Display)>,
    ) -> Option<(Duration, &'n dyn fmt::Display)> {
        let over = self.args.recorded.over?;
        longest
            .map(|(nanoseconds, name)| (Duration::from_nanos(nanoseconds), name))
            .filter(|(longest, _)| *longest >= over)
    }

    /// The times of the pairs, as they are measured in the process.
    pub(super) fn set_latencies(&mut self, latencies: Vec<Latency>) {
        self.latencies_read = Some(Instant::now());
        for (index, latency) in latencies.iter().enumerate() {
            if latency.is_trusted() == Some(false) {
                self.timeline.distrust_pair(index);
            }
        }
        self.latencies = latencies;
    }

    /// Whether what was read ends the recording.
    fn after_reading(&self) -> Next {
        let (recorded, messages) = (&self.args.recorded, &self.output.messages);
        let until = recorded.until.as_ref();
        if let Some(name) = until.filter(|_| self.timeline.is_hit()) {
            messages.note(&format!("{name} was hit"));
            return Next::Stop;
        }
        if let Some((longest, name)) = self.if_over(self.timeline.longest()) {
            let (name, took) = (name.to_string(), with_unit(longest));
            messages.note(&format!("{} took {took}", Escaped(&name)));
            return Next::Stop;
        }
        Next::Continue
    }

    /// Records runtime events and off-CPU waits, but no hits, until the end. `open` opens the events if they are
    /// asked for; it may take long, and a signal interrupts it.
    pub(super) fn read_without_hits(
        &mut self,
        target: &Target,
        open: impl FnOnce(Duration, &TerminationSignals) -> Result<Option<OpenedEvents>, Failure>,
    ) -> Result<StepFailures, Failure> {
        let output = self.output;
        let was_started = !self.args.observed.is_process();
        let signals = TerminationSignals::block_and_pass_on(was_started.then_some(self.pid))?;
        let mut interruptible = InterruptibleOutput::new(output, signals)?;
        let end = self.args.until.duration.unwrap_or(Duration::MAX);
        match open(end, interruptible.signals()) {
            Ok(events) => self.events = events,
            Err(failure) => return Err(interruptible.end_after(failure)),
        }
        if let Err(failure) = self.begin_waits() {
            let failure = match self.events.take() {
                Some(events) => events.close_after(failure, self.pid, &output.messages),
                None => failure,
            };
            return Err(interruptible.end_after(failure));
        }
        let mut failures = StepFailures::default();
        let begun = Instant::now();
        self.begun = monotonic_now();
        self.show_progress();
        let ended = read_until_end(self, target, begun, end, &mut interruptible);
        self.progress = None;
        self.end();
        failures.add(ended.map(|end| end.note(was_started, &output.messages)));
        self.find_missed(target);
        let closed = self.events.as_mut().map(|events| events.close(self.pid));
        failures.add(closed.unwrap_or(Ok(())));
        let (_, printed) = interruptible.end();
        failures.add(printed);
        Ok(failures)
    }

    fn read_runtime_events(&mut self) -> Result<(), Failure> {
        let Some(opened) = &mut self.events else {
            return Ok(());
        };
        let (timeline, has_events) = (&mut self.timeline, &mut self.has_events);
        let read = opened.events.read(|entry| {
            *has_events = true;
            timeline.add_runtime_event(&entry);
        });
        read.map_err(Failure::of_process(self.pid))
    }

    /// Finds out whether the events of a process were off for a time. Not for a program that `record` has started:
    /// its events are on from the start.
    fn find_missed(&mut self, target: &Target) {
        let events = self.events.as_ref();
        let events = events.filter(|_| self.args.observed.is_process());
        self.missed = events.and_then(|events| events.missed(target));
    }

    fn read_waits(&mut self) {
        let waits: Vec<RecordedWait> = self.waits.iter().flat_map(WaitsReader::take).collect();
        self.add_waits(&waits);
    }

    /// Adds the waits of the recording: without those before and after it, and without the stop with which the
    /// observation began.
    fn add_waits(&mut self, waits: &[RecordedWait]) {
        let recorded = self.begun..self.ended.unwrap_or(u64::MAX);
        for wait in waits {
            // The stop with which the observation began: the thread may have been scheduled again only after `begun`.
            // A stop by another tracer at that moment looks the same, and is left out, too.
            let is_stop = self.is_observed
                && wait.is_whole
                && wait.activity == Activity::Stopped
                && wait.since < recorded.start;
            if wait.until > recorded.start && wait.since < recorded.end && !is_stop {
                self.timeline.add_wait(wait);
            }
        }
    }

    /// Reads the waits that are left when the recording is over.
    fn end_waits(&mut self) -> Result<(), Failure> {
        self.read_waits();
        let Some(waits) = self.waits.take() else {
            return Ok(());
        };
        let waits = waits.end();
        self.add_waits(&waits.rest);
        self.timeline.add_lost_switches(waits.lost);
        warn_of_lost_switches(
            waits.lost,
            waits.unrecorded_processors,
            &self.output.messages,
        );
        let error = waits.error.map(Failure::of_process(self.pid));
        error.map_or(Ok(()), Err)
    }

    /// Writes the rest, and says what was recorded.
    pub(super) fn finish(mut self, mut failures: StepFailures) -> Result<(), Failure> {
        let ended = self.ended.unwrap_or_else(monotonic_now);
        let lasted = Duration::from_nanos(ended.saturating_sub(self.begun));
        failures.add(self.read_runtime_events());
        failures.add(self.end_waits());
        self.add_doubts();
        self.timeline.finish(ended);
        failures.add(self.timeline.sink().flush(true));
        let counts = self.counts_in_file();
        let frequent = self.timeline.frequent();
        let last = self.timeline.sink().last_written();
        let last = last.map(|last| last.min(lasted));
        failures.add(self.print_report((lasted, last), counts, frequent.clone()));
        let lost_words = take(&mut self.timeline.lost_words);
        warn(counts, &frequent, &lost_words, self.output);
        self.warn_of_pairs();
        self.warn_of_missed_events();
        if let Some(last) = last {
            self.warn_if_short(last);
        }
        failures.finish(&self.output.messages)
    }

    /// Writes into the file what may be wrong with its slices.
    fn add_doubts(&mut self) {
        let pairs = RecordedPairs::of(&self.latencies);
        let doubts = pairs.cautions().map(|(doubt, _)| doubt);
        let counts = self.timeline.counts;
        let left_out = [left_out_without_key(counts), lost_starts(counts)];
        let doubts = doubts
            .chain(pairs.unknown())
            .chain(left_out.into_iter().flatten());
        for doubt in doubts {
            self.timeline.add_doubt(doubt);
        }
    }

    /// What was recorded; of slices, instants and values, how many are in the file.
    fn counts_in_file(&mut self) -> RecordCounts {
        let written = self.timeline.sink().in_file();
        RecordCounts {
            slices: written.slices,
            instants: written.instants,
            values: written.values,
            ..self.timeline.counts
        }
    }

    /// Prints what was recorded. `times` are how long it lasted, and how much of that is in the file if it is only the
    /// last part.
    fn print_report(
        &mut self,
        times: (Duration, Option<Duration>),
        counts: RecordCounts,
        frequent: Vec<FrequentName>,
    ) -> Result<(), Failure> {
        let file = self.timeline.sink().file();
        let report = RecordReport::new(
            (self.pid, &self.program),
            (file.path(), self.format, file.len()),
            times,
            counts,
            frequent,
            RecordedPairs::of(&self.latencies),
        );
        self.output.print_result(&report.text(self.output.format)?)
    }

    /// Warns of slices that may be wrong, or are missing.
    fn warn_of_pairs(&self) {
        let messages = &self.output.messages;
        let pairs = RecordedPairs::of(&self.latencies);
        let are_by_key = self.args.recorded.pairs.are_by_key();
        let cautions = pairs.cautions();
        let cautions = cautions.map(|(caution, hint)| {
            let hint = if are_by_key { hint } else { BY_KEY };
            (caution, hint)
        });
        warn_of_interleaved(messages, cautions, pairs.unknown());
        if let Some(what) = left_out_without_key(self.timeline.counts) {
            warn_of_slices_without_key(messages, &what);
        }
        if let Some(what) = lost_starts(self.timeline.counts) {
            let hint = "a start whose stop is skipped by an exception keeps waiting, too: record for a shorter time, \
                        or a pair that always ends";
            messages.warning(WarningKind::LostTimes, &what, hint);
        }
    }

    fn warn_of_missed_events(&self) {
        match &self.missed {
            Some(missed) => missed.warn(self.pid, &self.output.messages),
            None if self.events.is_some() && !self.has_events => {
                self.output.messages.note(&format!(
                    "the file has no runtime events: process {} has not collected meanwhile",
                    self.pid
                ));
            }
            None => {}
        }
    }

    /// Warns if the file has less of the `last` time than -last asks for.
    fn warn_if_short(&mut self, last: Duration) {
        if !self.timeline.sink().is_short() {
            return;
        }
        let seconds = last.as_secs_f64();
        self.output.messages.warning(
            WarningKind::ShortRecording,
            &format!(
                "only the last {seconds:.3} s are in the file: -last keeps at most {} MiB of events",
                MAX_KEPT >> 20
            ),
            "record fewer functions or probes, or without -last",
        );
    }
}

impl EventHandler for Recording<'_> {
    fn are_written(&mut self) -> Result<bool, Failure> {
        if self.waits.as_ref().is_some_and(WaitsReader::has_ended) {
            return Ok(false);
        }
        let opened = self.events.as_ref();
        // Without events, the recording lasts until the process has exited.
        let written = opened.map_or(Ok(true), OpenedEvents::are_written);
        written.map_err(Failure::of_process(self.pid))
    }

    fn next_read(&self) -> Duration {
        let opened = self.events.as_ref();
        opened.map_or(WAITS_INTERVAL, |it| it.events.next_read())
    }

    fn read(&mut self) -> Result<(), Failure> {
        self.read_runtime_events()?;
        self.read_waits();
        self.timeline.sink().flush(false)?;
        if let Some(progress) = &mut self.progress {
            let lasted = monotonic_now().saturating_sub(self.begun);
            let (lasted, timeline) = (Duration::from_nanos(lasted), &mut self.timeline);
            progress.update_by(|| line(lasted, self.args, timeline));
        }
        Ok(())
    }

    fn show(&mut self, _: Duration, _: &mut InterruptibleOutput) -> Result<Next, Failure> {
        Ok(Next::Continue)
    }
}

/// Opens the events that an observer has switched on, and removes the name of their file; if it could not be removed,
/// returns the path and the reason.
fn open_switched(
    observer: &mut Observer,
) -> probes_lib::Result<(RuntimeEvents, Option<(PathBuf, io::Error)>)> {
    let events = observer.open_events()?;
    Ok((events, observer.remove_events_file()?))
}

/// Says that a program had exited before its waits could be recorded.
pub(super) fn warn_of_early_exit(messages: &Messages) {
    messages.warning(
        WarningKind::UnreadStacks,
        "the program exited before its waits could be recorded",
        "record a longer run of it",
    );
}

/// How far a recording is.
fn line(lasted: Duration, args: &Args, timeline: &mut Timeline) -> String {
    let seconds = lasted.as_secs_f64();
    let (of_all, end) = match args.until.duration {
        Some(all) => (format!(" of {} s", all.as_secs_f64()), ""),
        None => (" s".to_owned(), "; Ctrl-C ends it"),
    };
    let RecordCounts {
        slices, instants, ..
    } = timeline.counts;
    let sink = timeline.sink();
    let where_to = match (sink.kept(), args.last) {
        (Some(events), Some(last)) => {
            let (events, last) = (number_of(events as u64, "event"), last.as_secs_f64());
            format!("{events} of the last {last} s")
        }
        _ => bytes_text(sink.file().len() as f64),
    };
    let (slices, instants) = (number_of(slices, "slice"), number_of(instants, "instant"));
    format!("recording {seconds:.1}{of_all}, {slices}, {instants}, {where_to}{end}")
}

/// A process, and the clocks now.
fn traced(pid: i32, program: &Path) -> TracedProcess {
    let name = program.file_name().unwrap_or(program.as_os_str());
    TracedProcess {
        pid,
        name: name.to_string_lossy().into_owned(),
        monotonic: monotonic_now(),
        boottime: clock_now(ClockId::CLOCK_BOOTTIME),
        realtime: clock_now(ClockId::CLOCK_REALTIME),
    }
}

/// Names the most frequent of the hits that were read while others were lost.
fn most_frequent(names: &[FrequentName]) -> String {
    let each = names.iter().map(|it| {
        let name = Escaped(&it.name);
        format!("{:.0} % were of {name}", it.share * 100.0)
    });
    let each: Vec<String> = each.collect();
    match each.as_slice() {
        [] => String::new(),
        [one] => format!("; of the hits read meanwhile, {one}"),
        [first @ .., last] => {
            format!(
                "; of the hits read meanwhile, {} and {last}",
                first.join(", ")
            )
        }
    }
}

/// Says that ends of pairs are not in the time line, because they have no key.
fn left_out_without_key(counts: RecordCounts) -> Option<String> {
    let ends = number_of(counts.without_key, "end");
    let have = if counts.without_key == 1 {
        "has"
    } else {
        "have"
    };
    let what = format!("{ends} of pairs {have} no key: no slice is drawn for them");
    (counts.without_key > 0).then_some(what)
}

/// Says that starts were forgotten, because too many waited for the stops with their keys.
fn lost_starts(counts: RecordCounts) -> Option<String> {
    let were = number_that_were(counts.lost_starts, "start");
    let what = format!(
        "{were} forgotten, because more than {MAX_WAITING} others waited for the stops with their keys: these slices end too early"
    );
    (counts.lost_starts > 0).then_some(what)
}

/// Says what the time line lacks.
fn warn(counts: RecordCounts, frequent: &[FrequentName], lost_words: &LostWords, output: &Output) {
    let messages = output.messages;
    if counts.lost_hits > 0 {
        messages.warning(
            WarningKind::LostHits,
            &format!(
                "{} lost: they came faster than they could be read{}",
                number_that_were(counts.lost_hits, "hit"),
                most_frequent(frequent)
            ),
            "record fewer functions or probes, or give bursts more room (-buffer, up to 64); the time line has instants where they \
             are missing",
        );
    }
    warn_of_lost_words(lost_words, &messages);
    if counts.too_deep > 0 {
        messages.warning(
            WarningKind::LostCalls,
            &format!(
                "{} left out: too many calls were open",
                number_that_were(counts.too_deep, "call")
            ),
            "record functions that are not recursive",
        );
    }
}
