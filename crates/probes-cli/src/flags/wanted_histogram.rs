//! `-of` and `-linear`: what histograms are made of, and with which buckets.

use std::error::Error;

use clap::ArgMatches;
use probes_lib::{Expression, Glob, Linear};

use super::counted::{Counted, CountedFlags};
use super::events::{EventFlags, refuse_beside_events};
use super::filter::expression;
use super::misplaced::Misplaced;
use crate::question::WantedHistogram;

// `-of` and `-linear`.
#[derive(Debug, clap::Args)]
pub(crate) struct HistogramFlags {
    /// What of each hit, such as arg0 or 'len(page)': an integer
    #[arg(id = "of", long, value_name = "EXPR", value_parser = measured, allow_hyphen_values = true)]
    of: Option<Expression>,
    /// Steps of one width in a range, LO,HI,STEP, instead of powers of two
    #[arg(long, value_name = "RANGE", allow_hyphen_values = true)]
    linear: Option<Linear>,
}

/// What is missing without an expression.
pub(crate) const NEEDS_OF: &str = "needs -of EXPR: what of each hit, such as arg0";

/// The command that measures times.
pub(crate) const LATENCY_COMMAND: &str =
    "`ocaml-probes latency -pid N -pair START,STOP` (or `-fn GLOBS`)";

impl HistogramFlags {
    /// Returns what is given; `None` without `-of`, even with `-linear`.
    pub(crate) fn given(&self) -> Option<WantedHistogram> {
        Some(WantedHistogram {
            expression: self.of.clone()?,
            linear: self.linear,
        })
    }

    pub(crate) fn is_linear(&self) -> bool {
        self.linear.is_some()
    }
}

impl super::Flags for HistogramFlags {
    type Value = WantedHistogram;

    fn check(self) -> Result<WantedHistogram, String> {
        let given = self.given();
        given.ok_or_else(|| NEEDS_OF.to_owned())
    }
}

// What histograms are made of: hits, or runtime events.
#[derive(Debug, clap::Args)]
pub(crate) struct HistogramSourceFlags {
    #[command(flatten)]
    events: EventFlags,
    #[command(flatten)]
    histogram: HistogramFlags,
    #[command(flatten)]
    counted: CountedFlags,
}

/// The checked form of [`HistogramSourceFlags`].
#[derive(Debug)]
pub(crate) enum HistogramSource {
    /// Runtime events whose names match; all if there are none.
    Events {
        globs: Vec<Glob>,
        linear: Option<Linear>,
    },
    Hits {
        histogram: WantedHistogram,
        counted: Counted,
    },
}

impl super::Flags for HistogramSourceFlags {
    type Value = HistogramSource;

    fn check(self) -> Result<HistogramSource, String> {
        if let Some(globs) = self.events.globs()? {
            let linear = self.histogram.linear;
            return Ok(HistogramSource::Events { globs, linear });
        }
        Ok(HistogramSource::Hits {
            histogram: self.histogram.check()?,
            counted: self.counted.check()?,
        })
    }

    fn check_others(matches: &ArgMatches) -> Result<(), String> {
        refuse_beside_events(matches)
    }
}

/// Reads what histograms are made of. Refuses times: other commands make their histograms.
fn measured(typed: &str) -> Result<Expression, Box<dyn Error + Send + Sync>> {
    let of = expression(typed)?;
    match of.place_of_time() {
        None => Ok(of),
        Some(place) => {
            let message = "elapsed is not known at a hit; `latency`, or `trace -latency`, measures times, and prints their histogram";
            Err(Misplaced::at(typed, place, message).into())
        }
    }
}
