//! What `record` records: probes, pairs, functions, and the collector.

use std::collections::BTreeSet;
use std::time::Duration;

use probes_lib::{FunctionSelector, Observation, Selector};

use super::buffer::BufferFlag;
use super::checked::Flags;
use super::duration::bound;
use super::function_selection::NamedFunctionFlags;
use super::pairs::{PairFlags, Pairs};
use super::probe_selection::{ProbeFlags, probe_name};
use super::usdt::UsdtFlags;
use super::watched::CallFlags;

// What is recorded.
#[derive(Debug, clap::Args)]
pub(crate) struct RecordedFlags {
    #[command(flatten)]
    probes: ProbeFlags,
    #[command(flatten)]
    pairs: PairFlags,
    #[command(flatten)]
    functions: NamedFunctionFlags,
    #[command(flatten)]
    usdt: UsdtFlags,
    #[command(flatten)]
    calls: CallFlags,
    /// End the recording once this probe is hit
    #[arg(long, value_name = "NAME", value_parser = probe_name)]
    until: Option<String>,
    /// End the recording once a pair or a call has taken DURATION or longer
    #[arg(long, value_name = "DURATION", value_parser = bound)]
    over: Option<Duration>,
    /// Record the phases and counters of the garbage collector of OCaml 5
    #[arg(long)]
    gc: bool,
    /// Record when threads wait, in what, and with which stack
    #[arg(long)]
    off_cpu: bool,
    #[command(flatten)]
    buffer: BufferFlag,
}

/// The checked form of [`RecordedFlags`].
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) probes: Vec<Selector>,
    pub(crate) pairs: Pairs,
    functions: Vec<FunctionSelector>,
    calls: CallFlags,
    pub(crate) until: Option<String>,
    pub(crate) over: Option<Duration>,
    pub(crate) gc: bool,
    pub(crate) off_cpu: bool,
    buffer: BufferFlag,
}

impl Flags for RecordedFlags {
    type Value = Recorded;

    fn check(self) -> Result<Recorded, String> {
        let mut functions = self.functions.selectors()?;
        let pairs = self.pairs.check()?;
        if functions.is_empty() {
            self.calls.refuse_without("-fn")?;
        }
        if self.over.is_some() && functions.is_empty() && pairs.is_empty() {
            return Err("-over needs -pair or -fn: it is about slices of these".to_owned());
        }
        functions.extend(self.usdt.selectors()?);
        let probes = self.probes.given()?;
        let has_points = self.until.is_some()
            || !probes.is_empty()
            || !functions.is_empty()
            || !pairs.is_empty();
        if !(has_points || self.gc || self.off_cpu) {
            return Err(
                "needs -probe NAMES, -regexp RE, -pair START,STOP, -fn GLOBS, -usdt GLOBS, -until NAME, -gc or -off-cpu"
                    .to_owned(),
            );
        }
        if !has_points {
            self.buffer.refuse_without(
                "-probe NAMES, -regexp RE, -pair START,STOP, -fn GLOBS or -usdt GLOBS",
            )?;
        }
        Ok(Recorded {
            probes,
            pairs,
            functions,
            calls: self.calls,
            until: self.until,
            over: self.over,
            gc: self.gc,
            off_cpu: self.off_cpu,
            buffer: self.buffer,
        })
    }
}

impl Recorded {
    /// Whether the process has to have probes.
    pub(crate) fn needs_probes(&self) -> bool {
        !self.probes.is_empty() || !self.pairs.is_empty() || self.until.is_some()
    }

    /// Whether -probe or -regexp selects the probe of this name.
    fn has_probe(&self, name: &str) -> bool {
        self.probes.iter().any(|probe| selects(probe, name))
    }

    /// Whether -regexp selects the probe of this name, and -probe does not.
    fn matches_probe(&self, name: &str) -> bool {
        let is_it = |probe: &Selector| matches!(probe, Selector::Name(it) if it == name);
        self.has_probe(name) && !self.probes.iter().any(is_it)
    }

    pub(crate) fn has_functions(&self) -> bool {
        !self.functions.is_empty()
    }

    /// Whether anything is recorded by observing the process.
    pub(crate) fn observes(&self) -> bool {
        self.needs_probes() || self.has_functions()
    }

    pub(crate) fn calls(&self) -> CallFlags {
        self.calls
    }

    pub(crate) fn observation(&self) -> Observation {
        let probes = self.probes.iter().cloned();
        let observation = probes.fold(Observation::new(), Observation::watch);
        // Probes that -probe or -regexp selects are watched already. If a probe of a pair is missing, that is noticed
        // all the same.
        let ends = self.pairs.iter().flat_map(|pair| [&pair.start, &pair.stop]);
        let ends = ends.filter(|end| !self.has_probe(end));
        let until = self.until.iter().filter(|until| !self.has_probe(until));
        let names: BTreeSet<&String> = ends.chain(until).collect();
        let names = names.into_iter().map(Selector::name);
        let observation = names.fold(observation, Observation::watch);
        // A regular expression may match the name of a probe that the process lacks: counting it notices that.
        let matched = self.until.iter().filter(|until| self.matches_probe(until));
        let observation = matched.fold(observation, |observation, until| {
            observation.count(Selector::name(until))
        });
        // Pairs are timed in the process, too: there it is seen if they interleave.
        let observation = self.pairs.add_to(observation).with_pair_keys();
        let observation = self.calls.add_to(observation, &self.functions);
        self.buffer.add_to(observation).watch_exits()
    }
}

/// Whether a selector of -probe or -regexp selects the probe of this name.
pub(crate) fn selects(selector: &Selector, name: &str) -> bool {
    match selector {
        Selector::Name(probe) => probe == name,
        Selector::Regexp(regexp) => regexp.find(name).is_some_and(|it| it.start() == 0),
        _ => false,
    }
}
