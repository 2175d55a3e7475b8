//! Pairs of probes: the start and the stop of an event.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use probes_lib::{Glob, Keys, Observation};

use super::checked::{Flags, each_once};
use super::duration::bound;
use super::keys::keys;
use super::probe_selection::probe_name;
use super::usdt::usdt_probe;

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

// Which STOP belongs to which START.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PairKeyFlag {
    /// Time from START to the STOP with the same EXPR, in any thread
    #[arg(id = "key", long, value_name = "EXPR,...", value_parser = keys, allow_hyphen_values = true)]
    key: Option<Keys>,
}

impl PairKeyFlag {
    pub(crate) fn is_given(&self) -> bool {
        self.key.is_some()
    }

    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        match &self.key {
            Some(key) => observation.match_by(key.clone()),
            None => observation,
        }
    }
}

// Which pairs and calls are shown one by one.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct OverFlag {
    /// Also show each pair or call that takes DURATION or longer
    #[arg(id = "over", long, value_name = "DURATION", value_parser = bound)]
    over: Option<Duration>,
}

impl OverFlag {
    pub(crate) fn is_given(self) -> bool {
        self.over.is_some()
    }

    pub(crate) fn add_to(self, observation: Observation) -> Observation {
        match self.over {
            Some(bound) => observation.report_slow(bound),
            None => observation,
        }
    }
}

// The pairs to time.
#[derive(Debug, clap::Args)]
pub(crate) struct PairFlags {
    /// Time each START to its STOP in the same thread; may be repeated
    #[arg(id = "pair", long, value_name = "START,STOP", value_parser = pair)]
    pairs: Vec<Pair>,
    #[command(flatten)]
    key: PairKeyFlag,
}

/// The checked form of [`PairFlags`].
#[derive(Debug)]
pub(crate) struct Pairs {
    pairs: Vec<Pair>,
    key: PairKeyFlag,
}

impl Flags for PairFlags {
    type Value = Pairs;

    fn check(self) -> Result<Pairs, String> {
        self.check_beside(false)
    }
}

impl PairFlags {
    /// Checks the flags. `beside`: whether other flags of the command name pairs, to which -key applies as well.
    pub(crate) fn check_beside(self, beside: bool) -> Result<Pairs, String> {
        each_once("-pair", &self.pairs)?;
        if self.key.is_given() && self.pairs.is_empty() && !beside {
            let why = "-key needs -pair START,STOP: it says which STOP belongs to which START";
            return Err(why.to_owned());
        }
        Ok(Pairs {
            pairs: self.pairs,
            key: self.key,
        })
    }
}

/// The start and the stop of an event, USDT probes of other providers.
#[derive(Clone, Debug)]
pub(crate) struct UsdtPair {
    start: Glob,
    stop: Glob,
}

impl UsdtPair {
    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        observation.time_usdt(self.start.clone(), self.stop.clone())
    }
}

/// Reads two names of USDT probes.
pub(crate) fn usdt_pair(typed: &str) -> Result<UsdtPair, String> {
    let names: Vec<&str> = typed.split(',').map(str::trim).collect();
    let &[start, stop] = names.as_slice() else {
        return Err(format!(
            "\"{typed}\" is not two names, PROVIDER:START,PROVIDER:STOP"
        ));
    };
    Ok(UsdtPair {
        start: usdt_probe(start)?,
        stop: usdt_probe(stop)?,
    })
}

impl Pairs {
    /// Whether stops find their starts by a key.
    pub(crate) fn are_by_key(&self) -> bool {
        self.key.is_given()
    }

    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        let pairs = self.pairs.iter();
        let observation = pairs.fold(observation, |all, pair| all.time(&pair.start, &pair.stop));
        self.key.add_to(observation)
    }
}

impl Deref for Pairs {
    type Target = [Pair];

    fn deref(&self) -> &[Pair] {
        &self.pairs
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
