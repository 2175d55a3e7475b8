//! What `watch` shows the hits of: probes, functions and USDT probes.

use probes_lib::{FunctionSelector, Observation, Selector};

use super::buffer::BufferFlag;
use super::call_arguments::CallArgumentsFlag;
use super::checked::Flags;
use super::filter::FilterFlags;
use super::function_selection::FunctionFlags;
use super::probe_selection::ProbeFlags;
use super::sample::SampleFlag;
use super::stack::{StackFlag, StackLimit};
use super::usdt::UsdtFlags;

// What is watched.
#[derive(Debug, clap::Args)]
pub(crate) struct WatchedFlags {
    #[command(flatten)]
    probes: ProbeFlags,
    #[command(flatten)]
    functions: FunctionFlags,
    #[command(flatten)]
    usdt: UsdtFlags,
    #[command(flatten)]
    calls: CallFlags,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    sample: SampleFlag,
    #[command(flatten)]
    stack: StackFlag,
    #[command(flatten)]
    buffer: BufferFlag,
}

// What is shown of calls.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct CallFlags {
    #[command(flatten)]
    arguments: CallArgumentsFlag,
    /// Also show the results of functions, where they return
    #[arg(long)]
    results: bool,
}

/// The checked form of [`WatchedFlags`].
#[derive(Debug)]
pub(crate) struct Watched {
    probes: Vec<Selector>,
    functions: Vec<FunctionSelector>,
    calls: CallFlags,
    filter: FilterFlags,
    sample: SampleFlag,
    stack: StackFlag,
    buffer: BufferFlag,
}

impl Flags for WatchedFlags {
    type Value = Watched;

    fn check(self) -> Result<Watched, String> {
        let mut functions = self.functions.selectors()?;
        if functions.is_empty() {
            self.calls.refuse_without("-fn")?;
        }
        functions.extend(self.usdt.selectors()?);
        let probes = self.probes.given()?;
        if probes.is_empty() && functions.is_empty() {
            return Err(
                "needs -probe NAMES, -regexp RE, -fn GLOBS, -usdt GLOBS, -gc WORK or -events NAMES"
                    .to_owned(),
            );
        }
        self.calls
            .refuse_results_of_some(&self.filter, self.sample)?;
        Ok(Watched {
            probes,
            functions,
            calls: self.calls,
            filter: self.filter,
            sample: self.sample,
            stack: self.stack,
            buffer: self.buffer,
        })
    }
}

impl CallFlags {
    /// Refuses these flags: what they need (`needs`) is not given.
    pub(crate) fn refuse_without(self, needs: &str) -> Result<(), String> {
        self.arguments.refuse_without(needs)?;
        if self.results {
            return Err(format!(
                "-results needs {needs}: it shows results of functions"
            ));
        }
        Ok(())
    }

    /// Returns an error if results are shown, but not of all calls.
    pub(crate) fn refuse_results_of_some(
        self,
        filter: &FilterFlags,
        sample: SampleFlag,
    ) -> Result<(), String> {
        for (flag, is_given) in [
            ("-where", filter.is_given()),
            ("-sample", sample.is_given()),
        ] {
            if self.results && is_given {
                return Err(format!(
                    "{flag} cannot be combined with -results: a return does not tell whether its call was recorded"
                ));
            }
        }
        Ok(())
    }

    /// How many arguments are shown if their number is unknown.
    pub(crate) fn arguments(self) -> CallArgumentsFlag {
        self.arguments
    }

    /// Adds the calls of these functions to what is watched.
    pub(crate) fn add_to(
        self,
        observation: Observation,
        functions: &[FunctionSelector],
    ) -> Observation {
        let functions = functions.iter().cloned();
        let observation = functions.fold(observation, Observation::watch_functions);
        let observation = self.arguments.add_to(observation);
        if self.results {
            observation.watch_results()
        } else {
            observation
        }
    }
}

impl Watched {
    /// Whether the process has to have probes.
    pub(crate) fn needs_probes(&self) -> bool {
        !self.probes.is_empty()
    }

    pub(crate) fn has_functions(&self) -> bool {
        !self.functions.is_empty()
    }

    /// How many frames of stacks are shown, if these are.
    pub(crate) fn stack_limit(&self) -> Option<StackLimit> {
        self.stack.limit()
    }

    pub(crate) fn calls(&self) -> CallFlags {
        self.calls
    }

    pub(crate) fn observation(&self) -> Observation {
        let probes = self.probes.iter().cloned();
        let observation = probes.fold(Observation::new(), Observation::watch);
        let observation = self.sample.add_to(self.filter.add_to(observation));
        let observation = self.buffer.add_to(self.stack.add_to(observation));
        self.calls.add_to(observation, &self.functions)
    }
}
