//! `-by`: what hits are counted by.

use std::error::Error;

use probes_lib::{BadExpression, Keys};

use super::checked::Flags;
use super::duration::positive;
use super::misplaced::Misplaced;
use crate::question::{ByKeys, CountedBy};

/// The key that is not computed in the process, but found in the stacks that trampolines copy.
const STACK: &str = "stack";

/// The key that is known outside of the process. An argument of that name is `(pid)`.
const PID: &str = "pid";

// `-by` and `-top`.
#[derive(Debug, clap::Args)]
pub(crate) struct KeyFlags {
    /// By what EXPR is at each hit, such as arg0, caller; or stack
    #[arg(id = "by", long, value_name = "EXPR,...", value_parser = counted_by, allow_hyphen_values = true)]
    by: Option<ByKeys>,
    /// Show the N keys with most hits; 20 by default; JSON has all
    #[arg(long, value_name = "N", value_parser = positive)]
    top: Option<u64>,
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

/// Reads what hits are counted by. The pid comes first: it is no expression, but known outside of the process.
fn counted_by(typed: &str) -> Result<ByKeys, Box<dyn Error + Send + Sync>> {
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
        return misplaced(pid, "pid has to be the first key, as in -by pid,arg0");
    }
    let by_pid = parts.first() == Some(&PID);
    let rest = match typed.split_once(',') {
        _ if by_stack => None,
        _ if !by_pid => Some(typed),
        rest => rest.map(|(_, rest)| rest),
    };
    let keys = rest.map(keys).transpose()?;
    Ok(ByKeys {
        by_pid,
        by_stack,
        keys,
    })
}

/// Reads keys.
pub(super) fn keys(typed: &str) -> Result<Keys, BadExpression> {
    typed.parse()
}
