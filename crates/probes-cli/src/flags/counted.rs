//! What `count` and `top` count: probes, functions, USDT probes of other providers.

use probes_lib::{FunctionSelector, Observation, Selector};

use super::checked::Flags;
use super::function_selection::FunctionFlags;
use super::probe_selection::ProbeFlags;
use super::usdt::UsdtFlags;

// What is counted.
#[derive(Debug, clap::Args)]
pub(crate) struct CountedFlags {
    #[command(flatten)]
    probes: ProbeFlags,
    #[command(flatten)]
    functions: FunctionFlags,
    #[command(flatten)]
    usdt: UsdtFlags,
}

/// The checked form of [`CountedFlags`].
#[derive(Debug)]
pub(crate) struct Counted {
    probes: Vec<Selector>,
    functions: Vec<FunctionSelector>,
}

impl Flags for CountedFlags {
    type Value = Counted;

    fn check(self) -> Result<Counted, String> {
        let mut functions = self.functions.selectors()?;
        functions.extend(self.usdt.selectors()?);
        let probes = self.probes.given_or_all(!functions.is_empty())?;
        Ok(Counted { probes, functions })
    }
}

impl Counted {
    /// Whether the process has to have probes.
    pub(crate) fn needs_probes(&self) -> bool {
        !self.probes.is_empty()
    }

    pub(crate) fn has_functions(&self) -> bool {
        !self.functions.is_empty()
    }

    /// Returns the observation that records each hit with its stack instead of counting.
    pub(crate) fn with_stacks(&self) -> Observation {
        let probes = self.probes.iter().cloned();
        let observation = probes.fold(Observation::new(), Observation::watch);
        let functions = self.functions.iter().cloned();
        let observation = functions.fold(observation, Observation::watch_functions);
        observation.with_stacks()
    }

    pub(crate) fn observation(&self) -> Observation {
        let probes = self.probes.iter().cloned();
        let observation = probes.fold(Observation::new(), Observation::count);
        let functions = self.functions.iter().cloned();
        functions.fold(observation, Observation::count_functions)
    }
}
