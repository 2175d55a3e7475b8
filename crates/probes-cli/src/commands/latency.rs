//! `latency`: how long it takes from one probe to another.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use probes_lib::{Latency, Observation, Target};

use super::observe_loop::{ActiveObservation, Display};
use super::open_target::open;
use super::redraw::RedrawnTable;
use crate::failure::Failure;
use crate::flags::{Checked, OneProcess, OutputFlags, PairFlags, Until, duration};
use crate::output::{self, Format, Latencies};
use crate::say::{self, InterruptibleStdout, Next};

const HELP: &str = "\
Takes the times inside the process, whether the probes are enabled or not: a STOP ends the last START
of its thread that has not ended yet, so that pairs may be nested. In the end (the time is over,
Ctrl-C, or the process exits) it removes the instrumentation and prints, in plain format,
    COUNT MEAN P50 P90 P99 P99.9 MAX STARTS STOPS LOST START,STOP
in nanoseconds. STARTS and STOPS are hits without a match; LOST could not be timed: more than 64 starts
waited in their thread, or there were more than a thousand threads. A table comes with a chart of the
times in powers of two. With -interval each line begins with the seconds so far.

START and STOP may be the same: the times are then from each hit to the next.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes latency -pid N -pair START,STOP [FLAGS]")]
#[command(after_help = HELP, next_help_heading = "Flags")]
#[command(mut_group("PairFlags", |pairs| pairs.required(true)))]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    pairs: Checked<PairFlags>,
    #[command(flatten)]
    until: Until,
    /// Show all times so far every 1s; on a terminal, always
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    /// Draw the times into FILE, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let messages = args.output.messages;
    let target = open(args.process.pid, &messages)?;
    // Before anything is changed, because it may fail.
    let picture = args.svg.as_deref().map(Picture::create).transpose()?;
    let observation = args.pairs.iter().fold(Observation::new(), |all, pair| {
        all.time(&pair.start, &pair.stop)
    });
    let active = ActiveObservation::begin(&target, &observation, args.until.duration, messages)?;
    let format = args.output.format;
    let mut timing = Timing {
        target: &target,
        format,
        display: Display::new(format, args.interval),
        last: None,
        table: RedrawnTable::default(),
    };
    let outcome = active.run(
        timing.display.read_interval(),
        |observer| observer.latencies(),
        |latencies, stdout, at| timing.take(latencies, stdout, at),
    )?;
    let total = match outcome.observed {
        Some(observed) => Some((observed.latencies, outcome.lasted)),
        None => timing.last.take(),
    };
    if let Some((latencies, lasted)) = total {
        let latencies = Latencies::new(&target, &latencies, lasted);
        if let Some(picture) = picture {
            picture.write(&latencies.picture())?;
        }
        if outcome.is_read {
            let text = output::latencies(format, &latencies)?;
            say::print(&(timing.table.erase_sequence() + &text))?;
        }
    }
    outcome.failure.map_or(Ok(()), Err)
}

/// Shows the times of pairs.
struct Timing<'t> {
    target: &'t Target,
    format: Format,
    display: Display,
    /// The last reading, and when it was.
    last: Option<(Vec<Latency>, Duration)>,
    table: RedrawnTable,
}

impl Timing<'_> {
    fn take(
        &mut self,
        latencies: Vec<Latency>,
        stdout: &mut InterruptibleStdout,
        at: Duration,
    ) -> Result<Next, Failure> {
        let mut next = Next::Continue;
        if self.display.interval.is_some() {
            let shown = Latencies::new(self.target, &latencies, at).so_far();
            next = if self.display.is_redrawn {
                self.table.redraw(&shown.table(), stdout)?
            } else {
                stdout.write(&output::latencies(self.format, &shown)?)?
            };
        }
        self.last = Some((latencies, at));
        Ok(next)
    }
}

/// A file for a picture.
struct Picture {
    path: PathBuf,
    file: File,
}

impl Picture {
    fn create(path: &Path) -> Result<Picture, Failure> {
        let path = path.to_owned();
        // What was there stays until there is a new one.
        let mut file = OpenOptions::new();
        match file.write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(Picture { path, file }),
            Err(error) => Err(Failure::WriteFile(path, error)),
        }
    }

    fn write(mut self, picture: &str) -> Result<(), Failure> {
        // A pipe or a terminal has no length.
        let _ = self.file.set_len(0);
        let written = self.file.write_all(picture.as_bytes());
        written.map_err(|error| Failure::WriteFile(self.path, error))
    }
}
