//! `watch`: the hits of probes, one by one.

use std::mem::take;
use std::time::{Duration, Instant};

use probes_lib::{Event, Events, Observation};

use super::observe_loop::ActiveObservation;
use super::open_target::{open, sources};
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::{
    Checked, DurationFlag, OneProcess, OutputFlags, ProbeFlags, SeccompFlag, TakeOver, positive,
    with_regexp_help,
};
use crate::output::{Format, Hits, WarningKind};
use crate::say::Next;

/// How often hits are read: fewer hits come in this time than the ring in the process holds, up to
/// some millions a second.
pub(super) const READ_INTERVAL: Duration = Duration::from_millis(2);

/// How often it is reported what was lost or skipped.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

const HELP: &str = "\
Prints a line for each hit, whether its probe is enabled or not:
    TIME THREAD NAME ADDRESS FUNCTION FILE:LINE ARGUMENTS
with the time of day in UTC. The arguments are those in the note of the site, six at most: ints, strings
(their first 64 bytes, and ... if there are more), floats, boxed integers (7l 7L 7n); of other blocks
the tag and the number of words, <0:3>. A value in memory that cannot be read is shown as its address,
and an unsupported argument as ?. With -json each hit is an object on a line.

Hits that come faster than they can be read are lost. Their number, and that of the hits that -rate
skips, is reported on standard error (with -json, on a line of its own). The instrumentation is removed
when the command ends.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes watch -pid N -probe NAMES [FLAGS]")]
#[command(after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
#[command(mut_group("ProbeFlags", |probes| probes.required(true)))]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    probes: Checked<ProbeFlags>,
    /// Stop after K hits
    #[arg(long, value_name = "K", value_parser = positive)]
    limit: Option<u64>,
    /// Show no more than R hits a second, and say how many were skipped
    #[arg(long, value_name = "R", value_parser = positive)]
    rate: Option<u64>,
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
    let output = args.output.open()?.with_pid(args.process.pid);
    let target = open(args.process.pid, &output.messages)?;
    let probes = args.probes.iter().cloned();
    let observation = probes.fold(Observation::new(), Observation::watch);
    let active = ActiveObservation::begin(
        &target,
        &observation,
        args.seccomp.options(args.take_over.options()),
        args.until.duration,
        &output,
    )?;
    let hits = Hits::new(output.format, sources(&target));
    let mut watching = Watching::new(hits, output.clone());
    (watching.limit, watching.rate) = (args.limit, args.rate);
    let outcome = active.run(
        READ_INTERVAL,
        |observer| observer.events(),
        |events, interruptible, _| watching.show(events, |text| interruptible.write(text)),
    );
    let mut failures = outcome.failures;
    if outcome.was_read {
        if let Some(observed) = outcome.observed {
            failures.add(watching.show_last(observed.events));
        }
        failures.add(watching.report_missing());
    }
    failures.finish(&output.messages)
}

/// Shows hits.
pub(super) struct Watching {
    hits: Hits,
    output: Output,
    /// How many hits are shown at most; `None`: all.
    limit: Option<u64>,
    /// How many hits are shown in a second at most; `None`: all.
    rate: Option<u64>,
    shown: u64,
    /// In the second that began at `second`.
    shown_in_second: u64,
    second: Instant,
    reported: Instant,
    lost: u64,
    skipped: u64,
}

impl Watching {
    pub(super) fn new(hits: Hits, output: Output) -> Watching {
        Watching {
            hits,
            output,
            limit: None,
            rate: None,
            shown: 0,
            shown_in_second: 0,
            second: Instant::now(),
            reported: Instant::now(),
            lost: 0,
            skipped: 0,
        }
    }

    /// Shows hits by `write`; [`Next::Stop`] if the limit is reached.
    pub(super) fn show(
        &mut self,
        events: Events,
        write: impl FnOnce(&str) -> Result<Next, Failure>,
    ) -> Result<Next, Failure> {
        self.lost = self.lost.saturating_add(events.dropped);
        let mut text = String::new();
        for event in &events.events {
            if self.has_enough() {
                break;
            }
            if self.is_within_rate() {
                self.push_line(event, &mut text)?;
            } else {
                self.skipped += 1;
            }
        }
        let (mut lost, mut skipped) = (0, 0);
        if self.reported.elapsed() >= REPORT_INTERVAL {
            (lost, skipped) = (self.lost, self.skipped);
            text.push_str(&self.take_missing()?);
        }
        let next = write(&text).inspect_err(|_| {
            // To be reported in the end.
            (self.lost, self.skipped) = (lost, skipped);
        })?;
        Ok(if self.has_enough() { Next::Stop } else { next })
    }

    /// Same as [`Watching::show`], but blocks until the hits are written, even if a signal comes.
    pub(super) fn show_last(&mut self, events: Events) -> Result<(), Failure> {
        let output = self.output.clone();
        self.show(events, |text| output.print(text).map(|()| Next::Continue))
            .map(drop)
    }

    fn push_line(&mut self, event: &Event, text: &mut String) -> Result<(), Failure> {
        self.shown += 1;
        self.shown_in_second += 1;
        text.push_str(&self.hits.line(event)?);
        Ok(())
    }

    fn has_enough(&self) -> bool {
        self.limit.is_some_and(|limit| self.shown >= limit)
    }

    /// Whether the next hit may be shown in this second.
    fn is_within_rate(&mut self) -> bool {
        let Some(rate) = self.rate else {
            return true;
        };
        if self.second.elapsed() >= Duration::from_secs(1) {
            (self.second, self.shown_in_second) = (Instant::now(), 0);
        }
        self.shown_in_second < rate
    }

    /// Reports what was not shown since the last report.
    pub(super) fn report_missing(&mut self) -> Result<(), Failure> {
        let text = self.take_missing()?;
        if text.is_empty() {
            return Ok(());
        }
        self.output.print_result(&text)
    }

    /// Reports what was not shown since the last report: with -json, as the text returned, which is to be
    /// printed among the hits; otherwise as messages, and the text is empty.
    fn take_missing(&mut self) -> Result<String, Failure> {
        self.reported = Instant::now();
        let (lost, skipped) = (take(&mut self.lost), take(&mut self.skipped));
        if (lost, skipped) == (0, 0) {
            return Ok(String::new());
        }
        if self.output.format == Format::Json {
            return self.hits.missing(lost, skipped);
        }
        let messages = self.output.messages;
        if skipped > 0 {
            messages.note(&format!("{skipped} hits were skipped"));
        }
        if lost > 0 {
            let hint = "watch fewer probes, or count them, which loses none";
            messages.warning(
                WarningKind::LostHits,
                &format!("{lost} hits were lost: they came faster than they could be read"),
                hint,
            );
        }
        Ok(String::new())
    }
}
