//! Pairs of probes: the start and the stop of an event.

use std::fmt;

use super::checked::{Flags, each_once};
use super::probe_selection::probe_name;

/// The names of two probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) start: String,
    pub(crate) stop: String,
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.start, self.stop)
    }
}

// The pairs to time.
#[derive(Debug, clap::Args)]
pub(crate) struct PairFlags {
    /// Time each START to its STOP in the same thread; may be repeated
    #[arg(id = "pair", long, value_name = "START,STOP", value_parser = pair)]
    pairs: Vec<Pair>,
}

impl Flags for PairFlags {
    type Value = Vec<Pair>;

    fn check(self) -> Result<Vec<Pair>, String> {
        each_once("-pair", &self.pairs)?;
        Ok(self.pairs)
    }
}

/// Reads two names. They may be the same: the time is then from each hit to the next.
pub(crate) fn pair(typed: &str) -> Result<Pair, String> {
    let names: Vec<&str> = typed.split(',').collect();
    let &[start, stop] = names.as_slice() else {
        return Err(format!("\"{typed}\" is not two names, START,STOP"));
    };
    Ok(Pair {
        start: probe_name(start)?,
        stop: probe_name(stop)?,
    })
}
