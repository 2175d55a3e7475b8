//! `-by`: what hits are counted by.

use std::error::Error;

use probes_lib::{BadExpression, Keys, Observation};

use super::checked::Flags;
use super::duration::positive;

/// The key that is not computed in the process, but found in the stacks that trampolines copy.
const STACK: &str = "stack";

/// How many keys are shown without `-top`.
const SHOWN: usize = 20;

// `-by` and `-top`.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyFlags {
    /// By what EXPR is at each hit, such as arg0, caller; or stack
    #[arg(id = "by", long, value_name = "EXPR,...", value_parser = counted_by, allow_hyphen_values = true)]
    by: Option<By>,
    /// Show the N keys with most hits; 20 by default; JSON has all
    #[arg(long, value_name = "N", value_parser = positive)]
    top: Option<u64>,
}

/// A value of `-by`: maybe the pid, and maybe what is asked at each hit; or the stack.
#[derive(Clone, Debug)]
struct By {
    by_pid: bool,
    by_stack: bool,
    keys: Option<Keys>,
}

/// What hits are counted by, and how many are shown.
#[derive(Clone, Debug)]
pub(crate) struct CountedBy {
    by: By,
    shown: usize,
}

impl Flags for KeyFlags {
    /// `None`: not by keys.
    type Value = Option<CountedBy>;

    fn check(self) -> Result<Option<CountedBy>, String> {
        if self.top.is_some() && self.by.is_none() {
            return Err("-top needs -by: it says how many keys are shown".to_owned());
        }
        let shown = self
            .top
            .map_or(SHOWN, |many| many.try_into().unwrap_or(usize::MAX));
        Ok(self.by.map(|by| CountedBy { by, shown }))
    }
}

impl CountedBy {
    /// By name, and all are shown: what hits of several processes are counted by without `-by`.
    pub(crate) fn name() -> CountedBy {
        CountedBy {
            by: By {
                by_pid: false,
                by_stack: false,
                keys: None,
            },
            shown: usize::MAX,
        }
    }

    pub(crate) fn add_to(&self, observation: Observation) -> Observation {
        match &self.by.keys {
            Some(keys) => observation.by(keys.clone()),
            None => observation,
        }
    }

    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.by.keys.as_ref()
    }

    /// Whether the only key is `caller`.
    pub(crate) fn is_caller(&self) -> bool {
        self.texts().eq(["caller"])
    }

    /// Whether processes are distinguished.
    pub(crate) fn has_pid(&self) -> bool {
        self.by.by_pid
    }

    /// Whether stacks are distinguished, and nothing else.
    pub(crate) fn is_stack(&self) -> bool {
        self.by.by_stack
    }

    /// Whether anything is asked at each hit.
    pub(crate) fn has_keys(&self) -> bool {
        self.by.keys.is_some()
    }

    /// The keys as they were typed; `probe` is the last one if nothing is asked at each hit.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        let pid = self.by.by_pid.then_some("pid");
        let keys = self.by.keys.iter();
        let keys = keys.flat_map(|it| it.expressions().map(|it| it.as_str()));
        let name = (!self.has_keys()).then_some("probe");
        pid.into_iter().chain(keys).chain(name)
    }

    pub(crate) fn has_caller(&self) -> bool {
        self.texts().any(|it| it == "caller")
    }

    /// How many keys are shown.
    pub(crate) fn shown(&self) -> usize {
        self.shown
    }
}

/// Reads what hits are counted by. The pid comes first: it is no expression, but known outside of the process.
fn counted_by(typed: &str) -> Result<By, Box<dyn Error + Send + Sync>> {
    if typed.trim() == STACK {
        return Ok(By {
            by_pid: false,
            by_stack: true,
            keys: None,
        });
    }
    if typed.split(',').any(|key| key.trim() == STACK) {
        return Err("stack cannot be combined with other keys".into());
    }
    let (first, rest) = typed.split_once(',').unwrap_or((typed, ""));
    if first.trim() != "pid" {
        let keys = Some(keys(typed)?);
        return Ok(By {
            by_pid: false,
            by_stack: false,
            keys,
        });
    }
    let keys = (!rest.is_empty()).then(|| keys(rest)).transpose()?;
    Ok(By {
        by_pid: true,
        by_stack: false,
        keys,
    })
}

/// Reads keys.
pub(super) fn keys(typed: &str) -> Result<Keys, BadExpression> {
    typed.parse()
}
