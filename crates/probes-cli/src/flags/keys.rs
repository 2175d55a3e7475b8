//! `-by`: what hits are counted by.

use probes_lib::{BadExpression, Keys, Observation};

use super::checked::Flags;
use super::duration::positive;

/// How many keys are shown, unless it is said.
const SHOWN: usize = 20;

// By what.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyFlags {
    /// Count by what EXPR is at each hit, such as arg0, caller; up to 4
    #[arg(id = "by", long, value_name = "EXPR,...", value_parser = keys, allow_hyphen_values = true)]
    keys: Option<Keys>,
    /// Show the N keys with most hits; 20 by default; JSON has all
    #[arg(long, value_name = "N", value_parser = positive)]
    top: Option<u64>,
}

/// What hits are counted by, and how many are shown.
#[derive(Clone, Debug)]
pub(crate) struct CountedBy {
    keys: Keys,
    shown: usize,
}

impl Flags for KeyFlags {
    /// `None`: not by keys.
    type Value = Option<CountedBy>;

    fn check(self) -> Result<Option<CountedBy>, String> {
        if self.top.is_some() && self.keys.is_none() {
            return Err("-top needs -by: it says how many keys are shown".to_owned());
        }
        let shown = self
            .top
            .map_or(SHOWN, |many| many.try_into().unwrap_or(usize::MAX));
        Ok(self.keys.map(|keys| CountedBy { keys, shown }))
    }
}

impl CountedBy {
    pub(crate) fn of(&self, observation: Observation) -> Observation {
        observation.by(self.keys.clone())
    }

    /// The expressions, as they were typed.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        self.keys.expressions().map(|it| it.as_str())
    }

    pub(crate) fn has_caller(&self) -> bool {
        self.texts().any(|it| it == "caller")
    }

    /// How many keys are shown.
    pub(crate) fn shown(&self) -> usize {
        self.shown
    }
}

/// Reads keys.
pub(super) fn keys(typed: &str) -> Result<Keys, BadExpression> {
    typed.parse()
}
