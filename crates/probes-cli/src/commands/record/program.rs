//! `record -prog`: a program that is started, and recorded from its beginning.
//!
//! ```text
//! -gc alone         started, and its runtime events are read from the first
//! -off-cpu alone    started, and its waits are recorded as soon as they can be
//! anything else     observed from its first instruction; one thread waits for it, another reads
//! ```

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use probes_lib::{Launch, ObservationReport, Observer, Target};

use super::recording::{Recording, warn_of_early_exit};
use super::{Args, NamedFile};
use crate::commands::closures::warn_of_refused_closures;
use crate::commands::gaps::{GapWarning, Gaps};
use crate::commands::observation_messages::warn_of_still_mapped;
use crate::commands::opened_events::OpenedEvents;
use crate::commands::program_with_events::{AwaitedEvents, EventsDirectory, ProgramWithEvents};
use crate::commands::reading_times::COUNTS_INTERVAL;
use crate::commands::seen_exec::SeenExec;
use crate::commands::started_program::StartedProgram;
use crate::commands::step_failures::{StepFailures, report_failures};
use crate::commands::uncounted::{
    note_unknown_arguments, warn_of_missing_exits, warn_of_uncounted_from_start,
};
use crate::commands::undo::{RETRY_INTERVAL, RETRY_TIMEOUT};
use crate::commands::until_exit::{Waiter, wait_and_record};
use crate::commands::wait::Wait;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::Next;

/// Starts and records a program. Returns its status, or 1 if that is 0 and the recording is not complete.
pub(super) fn run(
    args: &Args,
    file: &NamedFile,
    program: &Path,
    arguments: &[OsString],
) -> Result<ExitCode, Failure> {
    args.output.refuse_to_overwrite_started(program)?;
    if args.recorded.observes() {
        observed(args, file, program, arguments)
    } else if args.recorded.gc {
        with_events(args, file, program, arguments)
    } else {
        with_waits(args, file, program, arguments)
    }
}

/// Records the waits of a program, and nothing else.
fn with_waits(
    args: &Args,
    file: &NamedFile,
    program: &Path,
    arguments: &[OsString],
) -> Result<ExitCode, Failure> {
    let output = args.output.open_stderr();
    let file = file.create(&output.messages)?;
    let started = StartedProgram::start(program, arguments, [])?;
    let pid = started.pid();
    let output = output.with_pid(pid);
    let mut recording = Recording::new(args, &output, (pid, program), file);
    let target = Target::open_any(pid).map_err(Failure::of_process(pid));
    let read = target.and_then(|target| recording.read_without_hits(&target, |_, _| Ok(None)));
    let read = match read {
        Err(failure) if started.is_of_exit(&failure) => {
            warn_of_early_exit(&output.messages);
            Ok(StepFailures::default())
        }
        read => read,
    };
    let done = read.and_then(|failures| recording.finish(failures));
    started.wait(report_failures([done], &output.messages))
}

/// Records the runtime events of a program, and nothing else.
fn with_events(
    args: &Args,
    file: &NamedFile,
    program: &Path,
    arguments: &[OsString],
) -> Result<ExitCode, Failure> {
    let output = args.output.open_stderr();
    let file = file.create(&output.messages)?;
    let started = ProgramWithEvents::start(program, arguments, &output.messages)?;
    let pid = started.pid();
    let output = output.with_pid(pid);
    let mut recording = Recording::new(args, &output, (pid, &started.path()), file);
    let read = match Target::open_any(pid) {
        Ok(target) => recording.read_without_hits(&target, |end, signals| {
            let events = started.events(&target, end, signals)?;
            Ok(Some(OpenedEvents::always_on(events)))
        }),
        Err(error) if !error.is_gone() => Err(Failure::of_process(pid)(error)),
        Err(_) => started.events_of_exited().map(|events| {
            recording.set_events(OpenedEvents::always_on(events));
            StepFailures::default()
        }),
    };
    let done = read.and_then(|failures| recording.finish(failures));
    started.wait(report_failures([done], &output.messages))
}

/// Records what is observed of a program, and its runtime events if they are asked for.
fn observed(
    args: &Args,
    file: &NamedFile,
    program: &Path,
    arguments: &[OsString],
) -> Result<ExitCode, Failure> {
    // Before the program is started, because it may fail.
    let wait = Wait::prepare().map_err(Failure::of_waiting)?;
    let output = args.output.open_stderr();
    // Before there is anything to remove: while it waits for the reader of a pipe, a signal ends it.
    let file = file.create(&output.messages)?;
    let make_directory = || EventsDirectory::make(program, &output.messages);
    let directory = args.recorded.gc.then(make_directory).transpose()?;
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(directory) = &directory {
        command.envs(directory.variables());
    }
    let launch = Launch::new(command)
        .attended()
        .options(args.overrides.options())
        .observe(args.recorded.observation());
    let launched = launch.spawn();
    let mut launched = launched.map_err(Failure::of_program(program))?;
    let pid = launched.report().pid;
    let output = output.with_pid(pid);
    let messages = &output.messages;
    messages.step(format_args!(
        "started {} as process {pid}",
        program.display()
    ));
    let (status, recorded) = match launched.take_observer() {
        Some(observer) => {
            warn_of_refused_closures(messages, pid, observer.code_digest());
            if args.recorded.has_functions() {
                warn_of_uncounted_from_start(messages, &observer, "recorded");
                warn_of_missing_exits(messages, &observer);
                note_unknown_arguments(messages, &observer, args.recorded.calls().arguments());
            }
            let target = observer.target().clone();
            let recorder = ProgramRecorder {
                recording: Recording::new(args, &output, (pid, target.program()), file),
                args,
                output: &output,
                pid,
                program,
                awaited: directory.as_ref().map(AwaitedEvents::in_directory),
                warning: GapWarning::default(),
                seen_exec: SeenExec::default(),
                begun: Instant::now(),
            };
            wait_and_record(launched, wait, |waiter| recorder.run(observer, waiter))
        }
        None => (wait.until_exit(launched), Ok(())),
    };
    // Reported also if waiting has failed.
    let is_complete = report_failures([recorded], messages);
    let status = status.map_err(Failure::of_waiting)?;
    Ok(ExitCode::from(status.max((!is_complete).into())))
}

/// Records a program while another thread waits for it.
struct ProgramRecorder<'r> {
    recording: Recording<'r>,
    args: &'r Args,
    output: &'r Output,
    pid: i32,
    program: &'r Path,
    /// Its runtime events, if they are recorded and could not be opened so far.
    awaited: Option<AwaitedEvents<'r>>,
    warning: GapWarning,
    seen_exec: SeenExec,
    begun: Instant,
}

impl ProgramRecorder<'_> {
    /// Whatever fails, what was recorded until then is written.
    fn run(mut self, mut observer: Observer, waiter: &Waiter) -> Result<(), Failure> {
        let mut failures = StepFailures::default();
        failures.add(self.recording.begin_waits());
        let read = self.read_until_end(&mut observer, waiter, &mut failures);
        self.recording.end();
        // Also if another tool has taken over: it may have been killed, and have left something.
        let removed = remove(&mut observer, waiter);
        match read.and(removed) {
            Ok(observed) => {
                warn_of_still_mapped(&self.output.messages, self.pid, observed.still_mapped);
                self.recording.set_latencies(observed.latencies);
                self.recording.add_hits(&observed.events);
            }
            Err(error) => {
                // What was recorded until then can still be read, also if another tool has taken over.
                if let Ok(latencies) = observer.latencies() {
                    self.recording.set_latencies(latencies);
                }
                self.recording
                    .add_hits(&observer.events().unwrap_or_default());
                failures.add(Err(Failure::of_removal(self.pid, error)));
            }
        }
        self.warn(&observer);
        failures.add(self.open_events_in_the_end());
        self.recording.finish(failures)
    }

    /// Reads until the program has exited, or until the recording is over.
    ///
    /// # Errors
    ///
    /// If another tool takes over.
    fn read_until_end(
        &mut self,
        observer: &mut Observer,
        waiter: &Waiter,
        failures: &mut StepFailures,
    ) -> Result<(), probes_lib::Error> {
        let end = self.args.until.duration.unwrap_or(Duration::MAX);
        let mut checked = Duration::ZERO;
        loop {
            let left = end.saturating_sub(self.begun.elapsed());
            let waited = waiter.exited.recv_timeout(observer.next_read().min(left));
            let at = self.begun.elapsed();
            if waited != Err(RecvTimeoutError::Timeout) || at >= end {
                return Ok(());
            }
            self.try_to_open_events(at);
            // A failure is no error here: if the program has just exited, the report of the removal has these events.
            if let Ok(hits) = observer.event_batch() {
                self.recording.add_batch(hits);
                if self.recording.latencies_are_due() {
                    if let Ok(latencies) = observer.latencies() {
                        self.recording.set_latencies(latencies);
                    }
                }
                match self.recording.read_beside_hits() {
                    Ok(Next::Continue) => {}
                    Ok(Next::Stop) => return Ok(()),
                    Err(failure) => {
                        failures.add(Err(failure));
                        return Ok(());
                    }
                }
            }
            if at >= checked + COUNTS_INTERVAL {
                checked = at;
                let check = waiter.trace(|| observer.check());
                let of = (self.pid, &self.output.messages);
                self.seen_exec.note(&check, at, of);
                self.warn(observer);
                if let Some(error) = check.err().filter(probes_lib::Error::is_replaced) {
                    return Err(error);
                }
            }
        }
    }

    fn warn(&mut self, observer: &Observer) {
        self.warning
            .update(&self.output.messages, &Gaps::of(observer));
    }

    /// Opens the runtime events if they are there by now.
    fn try_to_open_events(&mut self, at: Duration) {
        let awaited = self.awaited.as_mut();
        if let Some(events) = awaited.and_then(|it| it.try_to_open(self.pid, at)) {
            self.awaited = None;
            self.recording.set_events(OpenedEvents::always_on(events));
        }
    }

    /// Opens the file of runtime events if they could not be opened while the program ran.
    fn open_events_in_the_end(&mut self) -> Result<(), Failure> {
        if let Some(awaited) = self.awaited.take() {
            let events = awaited.of_exited(self.pid, self.program)?;
            self.recording.set_events(OpenedEvents::always_on(events));
        }
        Ok(())
    }
}

/// Removes the observation, whether the program still runs or not. While it runs, transient failures (another tool
/// traces it, for example) are retried for [`RETRY_TIMEOUT`].
fn remove(
    observer: &mut Observer,
    waiter: &Waiter,
) -> Result<ObservationReport, probes_lib::Error> {
    let begun = Instant::now();
    loop {
        let removed = waiter.trace(|| observer.remove());
        let is_to_be_tried_again = removed.as_ref().is_err_and(probes_lib::Error::is_transient);
        if !is_to_be_tried_again || begun.elapsed() >= RETRY_TIMEOUT {
            return removed;
        }
        if waiter.exited.recv_timeout(RETRY_INTERVAL) != Err(RecvTimeoutError::Timeout) {
            // It has exited meanwhile.
            return waiter.trace(|| observer.remove());
        }
    }
}
