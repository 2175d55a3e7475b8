//! `trace -count`, `-latency` and `-watch`: observes a program from its first instruction to its last.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use probes_lib::{Launch, Launched, Observation, Observer, Selector, Target};

use super::changes::answer_started;
use super::observe_loop::{self, warn_of_still_mapped};
use super::open_target::sources;
use super::wait::Wait;
use super::watch::{self, Watching};
use crate::failure::Failure;
use crate::flags::{Flags, OutputOptions, Pair, by_name, each_once, pair, probe_name};
use crate::hint::Subject;
use crate::output::{self, Counted, Format, Hits, Latencies};
use crate::say;

/// What to observe of a program that is started.
#[derive(Debug, clap::Args)]
pub(super) struct ObserveFlags {
    /// Count the hits of all probes, from the first to the last
    #[arg(long)]
    count: bool,
    /// Time each START to the next STOP in its thread; may be repeated
    #[arg(long, value_name = "START,STOP", value_parser = pair)]
    latency: Vec<Pair>,
    /// Show each hit of these probes, a comma list; may be repeated
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = probe_name)]
    watch: Vec<String>,
}

/// What to observe of a program that is started, if anything.
#[derive(Debug)]
pub(super) struct ProgramObservation {
    counts: bool,
    pairs: Vec<Pair>,
    watched: Vec<Selector>,
}

impl Flags for ObserveFlags {
    type Meaning = ProgramObservation;

    fn check(self) -> Result<ProgramObservation, String> {
        each_once("-latency", &self.latency)?;
        Ok(ProgramObservation {
            counts: self.count,
            pairs: self.latency,
            watched: by_name("-watch", &self.watch)?,
        })
    }
}

impl ProgramObservation {
    pub(super) fn is_any(&self) -> bool {
        self.counts || !self.pairs.is_empty() || self.is_watched()
    }

    fn is_watched(&self) -> bool {
        !self.watched.is_empty()
    }

    fn observation(&self) -> Observation {
        let mut observation = Observation::new();
        if self.counts {
            observation = observation.count(Selector::All);
        }
        for pair in &self.pairs {
            observation = observation.time(&pair.start, &pair.stop);
        }
        let watched = self.watched.iter().cloned();
        watched.fold(observation, Observation::watch)
    }
}

/// Starts a program, waits until it exits and prints what was observed; returns the status to exit with.
pub(super) fn run(
    launch: Launch,
    wait: Wait,
    wanted: &ProgramObservation,
    output: OutputOptions,
    program: &Path,
) -> Result<u8, Failure> {
    let begun = Instant::now();
    let launched = launch.observe(wanted.observation()).spawn();
    let mut launched =
        launched.map_err(|error| Failure::Target(Subject::Program(program.to_owned()), error))?;
    let answered = answer_started(output, program, launched.report());
    let observed = launched.observed();
    let status = match observed {
        Some(observer) => {
            let target = observer.target().clone();
            let recorder = Recorder::new(&target, wanted, output, begun);
            record_until_exit(launched, wait, recorder, observer)
        }
        None => wait.until_exit(launched),
    };
    if let Err(failure) = answered {
        // The program has run, and our exit status has to be its own.
        output.messages.failure(&failure);
    }
    status.map_err(|source| Failure::System("wait for the program", source))
}

/// Waits for the program in this thread, and records in another.
fn record_until_exit(
    launched: Launched,
    wait: Wait,
    recorder: Recorder<'_>,
    observer: Observer,
) -> std::io::Result<u8> {
    let (running, exited) = channel::<()>();
    std::thread::scope(|scope| {
        let record = move || {
            let messages = recorder.output.messages;
            if let Err(failure) = recorder.run(observer, &exited) {
                messages.failure(&failure);
            }
        };
        std::thread::Builder::new().spawn_scoped(scope, record)?;
        let status = wait.until_exit(launched);
        drop(running);
        status
    })
}

/// Reads what is observed, and prints it.
struct Recorder<'l> {
    target: &'l Target,
    wanted: &'l ProgramObservation,
    output: OutputOptions,
    watching: Watching,
    begun: Instant,
}

impl<'l> Recorder<'l> {
    fn new(
        target: &'l Target,
        wanted: &'l ProgramObservation,
        output: OutputOptions,
        begun: Instant,
    ) -> Recorder<'l> {
        let hits = Hits::new(output.format, sources(target));
        Recorder {
            target,
            wanted,
            output,
            watching: Watching::new(hits, output, printer(output.format)),
            begun,
        }
    }

    fn run(mut self, mut observer: Observer, exited: &Receiver<()>) -> Result<(), Failure> {
        while exited.recv_timeout(self.read_interval()) == Err(RecvTimeoutError::Timeout) {
            self.show_hits(&mut observer)?;
        }
        let lasted = self.begun.elapsed();
        let observed = observer.remove();
        let pid = self.target.pid();
        let observed = observed.map_err(Failure::of_process(pid))?;
        warn_of_still_mapped(&self.output.messages, pid, observed.still_mapped);
        let (format, print) = (self.output.format, printer(self.output.format));
        self.watching.show_all(observed.events)?;
        self.watching.report_missing()?;
        if self.wanted.counts {
            let counted = Counted::new(self.target, &observed.counts, &[]).since(None, lasted);
            print(&output::counted(format, &counted)?)?;
        }
        if !observed.latencies.is_empty() {
            let latencies = Latencies::new(self.target, &observed.latencies, lasted);
            print(&output::latencies(format, &latencies)?)?;
        }
        Ok(())
    }

    fn read_interval(&self) -> Duration {
        if self.wanted.is_watched() {
            watch::READ_INTERVAL
        } else {
            observe_loop::READ_INTERVAL
        }
    }

    /// Shows the hits so far. What cannot be read, because the process has just exited, is shown in the
    /// end.
    fn show_hits(&mut self, observer: &mut Observer) -> Result<(), Failure> {
        if let (true, Ok(events)) = (self.wanted.is_watched(), observer.events()) {
            self.watching.show_all(events)?;
        }
        Ok(())
    }
}

/// Standard output belongs to the traced program, too: only with -json is anything else written there.
fn printer(format: Format) -> fn(&str) -> Result<(), Failure> {
    match format {
        Format::Json => say::print,
        Format::Plain | Format::Table => say::print_to_stderr,
    }
}
