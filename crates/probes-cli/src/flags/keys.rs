//! `-by`: what hits are counted by.

use std::error::Error;

use probes_lib::{BadExpression, Keys, Observation};

use super::checked::Flags;
use super::duration::positive;
use super::misplaced::Misplaced;

/// The key that is not computed in the process, but found in the stacks that trampolines copy.
const STACK: &str = "stack";

/// The key that is known outside of the process. An argument of that name is `(pid)`.
const PID: &str = "pid";

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
    /// How many keys are shown, if `-top` says it.
    top: Option<usize>,
}

impl Flags for KeyFlags {
    /// `None`: not by keys.
    type Value = Option<CountedBy>;

    fn check(self) -> Result<Option<CountedBy>, String> {
        if self.top.is_some() && self.by.is_none() {
            return Err("-top needs -by: it says how many keys are shown".to_owned());
        }
        let top = self.top.map(|many| many.try_into().unwrap_or(usize::MAX));
        Ok(self.by.map(|by| CountedBy { by, top }))
    }
}

impl CountedBy {
    /// By name, and all are shown: what hits of several processes are counted by without `-by`.
    pub(crate) fn by_name() -> CountedBy {
        CountedBy {
            by: By {
                by_pid: false,
                by_stack: false,
                keys: None,
            },
            top: Some(usize::MAX),
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
    pub(crate) fn has_expressions(&self) -> bool {
        self.by.keys.is_some()
    }

    /// The keys as they were typed; `probe` is the last one if nothing is asked at each hit.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        let pid = self.by.by_pid.then_some("pid");
        let keys = self.by.keys.iter();
        let keys = keys.flat_map(|it| it.expressions().map(|it| it.as_str()));
        let name = (!self.has_expressions()).then_some("probe");
        pid.into_iter().chain(keys).chain(name)
    }

    pub(crate) fn has_caller(&self) -> bool {
        self.texts().any(|it| it == "caller")
    }

    /// How many keys are shown.
    pub(crate) fn shown(&self) -> usize {
        self.top.unwrap_or(SHOWN)
    }

    /// Refuses `-top`, if the answer has lines of names, all of which are shown, and none of keys.
    pub(crate) fn refuse_top(&self) -> Result<(), String> {
        match self.top {
            Some(_) => {
                let by: Vec<&str> = self.texts().filter(|&it| it != "probe").collect();
                let by = by.join(",");
                Err(format!(
                    "-top is for keys: with -by {by}, all lines are shown"
                ))
            }
            None => Ok(()),
        }
    }
}

/// Reads what hits are counted by. The pid comes first: it is no expression, but known outside of the process.
fn counted_by(typed: &str) -> Result<By, Box<dyn Error + Send + Sync>> {
    let parts: Vec<&str> = Keys::split(typed).into_iter().map(str::trim).collect();
    let misplaced = |part: &str, message| {
        let start = part.as_ptr().addr() - typed.as_ptr().addr();
        Err(Misplaced::at(typed, start..start + part.len(), message).into())
    };
    let by_stack = parts == [STACK];
    if let Some(stack) = parts.iter().find(|&&it| it == STACK && !by_stack) {
        return misplaced(stack, "stack cannot be combined with other keys");
    }
    if let Some(pid) = parts.iter().skip(1).find(|&&it| it == PID) {
        return misplaced(pid, "pid is the first key, as in -by pid,arg0");
    }
    let by_pid = parts.first() == Some(&PID);
    let rest = match typed.split_once(',') {
        _ if by_stack => None,
        _ if !by_pid => Some(typed),
        rest => rest.map(|(_, rest)| rest),
    };
    let keys = rest.map(keys).transpose()?;
    Ok(By {
        by_pid,
        by_stack,
        keys,
    })
}

/// Reads keys.
pub(super) fn keys(typed: &str) -> Result<Keys, BadExpression> {
    typed.parse()
}
