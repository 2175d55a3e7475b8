//! What `serve` exports: hits, times of pairs and of calls, pauses of the collector.

use std::time::Duration;

use probes_lib::{FunctionSelector, Observation, Selector};

use super::checked::Flags;
use super::duration::duration;
use super::function_selection::NamedFunctionFlags;
use super::pairs::{PairFlags, Pairs};
use super::probe_selection::ProbeFlags;
use super::usdt::UsdtFlags;

/// The upper bounds of the buckets, unless -buckets gives others.
const BUCKETS: [Duration; 16] = [
    Duration::from_micros(1),
    Duration::from_micros(10),
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(10),
];

/// The most bounds: each is a line of every histogram, at every scrape.
const MAX_BUCKETS: usize = 64;

// What is exported.
#[derive(Debug, clap::Args)]
pub(crate) struct ServedFlags {
    #[command(flatten)]
    probes: ProbeFlags,
    #[command(flatten)]
    functions: NamedFunctionFlags,
    #[command(flatten)]
    usdt: UsdtFlags,
    #[command(flatten)]
    pairs: PairFlags,
    /// Export the pauses of OCaml 5's collector, from runtime events
    #[arg(long)]
    gc: bool,
    /// Bounds of the buckets of times, a comma list: 100us,1ms,10ms
    #[arg(long, value_name = "DURATIONS", value_delimiter = ',', value_parser = bucket)]
    buckets: Vec<Duration>,
}

/// The checked form of [`ServedFlags`].
#[derive(Debug)]
pub(crate) struct Served {
    probes: Vec<Selector>,
    counted: Vec<FunctionSelector>,
    timed: Vec<FunctionSelector>,
    pairs: Pairs,
    /// Whether the pauses of the collector are exported.
    pub(crate) gc: bool,
    /// The upper bounds of the buckets of times, the least first.
    pub(crate) buckets: Vec<Duration>,
}

impl Flags for ServedFlags {
    type Value = Served;

    fn check(self) -> Result<Served, String> {
        let pairs = self.pairs.check()?;
        let timed = self.functions.selectors()?;
        let counted = self.usdt.selectors()?;
        let has_others = !pairs.is_empty() || !timed.is_empty() || !counted.is_empty() || self.gc;
        let probes = self.probes.given_or_all(has_others)?;
        let has_times = !pairs.is_empty() || !timed.is_empty() || self.gc;
        if !self.buckets.is_empty() && !has_times {
            return Err(
                "-buckets needs -pair, -fn or -gc: it is about histograms of times".to_owned(),
            );
        }
        let buckets = if self.buckets.is_empty() {
            BUCKETS.to_vec()
        } else {
            self.buckets
        };
        if !buckets.is_sorted_by(|less, more| less < more) {
            return Err("-buckets: each bound has to be larger than the one before".to_owned());
        }
        if buckets.len() > MAX_BUCKETS {
            let given = buckets.len();
            return Err(format!(
                "-buckets: {given} bounds are given; at most {MAX_BUCKETS} are possible"
            ));
        }
        Ok(Served {
            probes,
            counted,
            timed,
            pairs,
            gc: self.gc,
            buckets,
        })
    }
}

impl Served {
    /// Whether a process has to have probes.
    pub(crate) fn needs_probes(&self) -> bool {
        !self.probes.is_empty() || !self.pairs.is_empty()
    }

    pub(crate) fn has_functions(&self) -> bool {
        !self.timed.is_empty() || !self.counted.is_empty()
    }

    /// What to install in each process; `None` if only its runtime events are read.
    pub(crate) fn observation(&self) -> Option<Observation> {
        if !self.needs_probes() && !self.has_functions() {
            return None;
        }
        let probes = self.probes.iter().cloned();
        let observation = probes.fold(self.pairs.add_to(Observation::new()), Observation::count);
        let counted = self.counted.iter().cloned();
        let observation = counted.fold(observation, Observation::count_functions);
        let timed = self.timed.iter().cloned();
        Some(timed.fold(observation, Observation::time_functions))
    }
}

/// Reads the bound of a bucket; there may be spaces around it.
fn bucket(typed: &str) -> Result<Duration, String> {
    duration(typed.trim())
}
