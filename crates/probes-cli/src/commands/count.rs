//! `count`: how often probes are hit.

use std::time::Duration;

use probes_lib::{Counts, Observation, SourceMap, Target};

use super::observe_loop::{ActiveObservation, Display};
use super::open_target::{open, sources};
use super::redraw::RedrawnTable;
use crate::failure::Failure;
use crate::flags::{Checked, OneProcess, OutputFlags, ProbeFlags, Until, duration};
use crate::output::{self, Counted, Format};
use crate::say::{self, InterruptibleStdout, Next};

const HELP: &str = "\
Counts inside the process, at a few nanoseconds a hit, whether a probe is enabled or not. In the end
(the time is over, Ctrl-C, or the process exits) it removes the instrumentation and prints, in plain
format,
    HITS RATE NAME
most hits first, with hits a second; with -sites,
    HITS RATE NAME ADDRESS FUNCTION FILE:LINE
With -interval it also prints the new hits each time, in lines that begin with the seconds so far; on a
terminal, it redraws a table. With -json each time is one line.

If it is killed, the process goes on counting, which does no harm: `info` reports it, and the next count
removes the instrumentation.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes count -pid N [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    probes: Checked<ProbeFlags>,
    /// Count each site by itself
    #[arg(long)]
    sites: bool,
    #[command(flatten)]
    until: Until,
    /// Show what is new every 1s; on a terminal, always, all so far
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    interval: Option<Duration>,
    #[command(flatten)]
    output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let messages = args.output.messages;
    let target = open(args.process.pid, &messages)?;
    let probes = args.probes.iter().cloned();
    let observation = probes.fold(Observation::new(), Observation::count);
    let active = ActiveObservation::begin(&target, &observation, args.until.duration, messages)?;
    let mut counting = Counting::new(args, &target);
    let outcome = active.run(
        counting.display.read_interval(),
        |observer| observer.counts(),
        |counts, stdout, at| counting.take(counts, stdout, at),
    )?;
    let total = match outcome.observed {
        Some(observed) => Some((observed.counts, outcome.lasted)),
        None => counting.last.take(),
    };
    if let Some((counts, lasted)) = total.filter(|_| outcome.is_read) {
        counting.show_total(&counts, lasted)?;
    }
    outcome.failure.map_or(Ok(()), Err)
}

/// Shows counts.
struct Counting<'t> {
    target: &'t Target,
    format: Format,
    display: Display,
    /// Of each object, if sites are shown.
    sources: Vec<Option<SourceMap>>,
    /// The last reading, and when it was.
    last: Option<(Counts, Duration)>,
    table: RedrawnTable,
}

impl<'t> Counting<'t> {
    fn new(args: &Args, target: &'t Target) -> Counting<'t> {
        let format = args.output.format;
        let sources = args.sites.then(|| sources(target));
        Counting {
            target,
            format,
            display: Display::new(format, args.interval),
            sources: sources.unwrap_or_default(),
            last: None,
            table: RedrawnTable::default(),
        }
    }

    fn take(
        &mut self,
        counts: Counts,
        stdout: &mut InterruptibleStdout,
        at: Duration,
    ) -> Result<Next, Failure> {
        let next = match self.display.interval {
            Some(_) => self.show(&counts, stdout, at)?,
            None => Next::Continue,
        };
        self.last = Some((counts, at));
        Ok(next)
    }

    /// Shows the hits since the last time; redrawn, all hits, and the rates since the last time.
    fn show(
        &mut self,
        counts: &Counts,
        stdout: &mut InterruptibleStdout,
        at: Duration,
    ) -> Result<Next, Failure> {
        let since = self.last.as_ref().map_or(Duration::ZERO, |(_, at)| *at);
        let last = self.last.as_ref().map(|(counts, _)| counts);
        let counted = Counted::new(self.target, counts, &self.sources);
        if self.display.is_redrawn {
            let table = counted.lately(last, at - since).table();
            return self.table.redraw(&table, stdout);
        }
        let counted = counted.since(last, at - since).at(at);
        stdout.write(&output::counted(self.format, &counted)?)
    }

    fn show_total(&self, counts: &Counts, lasted: Duration) -> Result<(), Failure> {
        let counted = Counted::new(self.target, counts, &self.sources).since(None, lasted);
        let text = output::counted(self.format, &counted)?;
        say::print(&(self.table.erase_sequence() + &text))
    }
}
