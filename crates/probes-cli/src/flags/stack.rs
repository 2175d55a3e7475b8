//! `-stack [N]`: the stack of each hit.

use probes_lib::Observation;

use crate::text::unsigned;

// The stacks of hits.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct StackFlag {
    /// Also show the stack of each, N frames at most
    #[arg(long, value_name = "N", value_parser = frames, num_args = 0..=1, default_missing_value = "")]
    stack: Option<StackLimit>,
}

/// How many frames of a stack are shown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StackLimit(pub(crate) usize);

impl StackFlag {
    /// How many frames of each stack are shown; `None` if stacks are not.
    pub(crate) fn limit(self) -> Option<StackLimit> {
        self.stack
    }

    /// Returns an observation that copies stacks if the flag is given.
    pub(crate) fn add_to(self, observation: Observation) -> Observation {
        match self.stack {
            Some(_) => observation.with_stacks(),
            None => observation,
        }
    }
}

/// Reads how many frames are shown: all of them if no number is given.
fn frames(typed: &str) -> Result<StackLimit, String> {
    if typed.is_empty() {
        return Ok(StackLimit(usize::MAX));
    }
    let many = unsigned(typed).filter(|many| *many > 0);
    let many = many.map(StackLimit);
    many.ok_or_else(|| format!("\"{typed}\" is not a number of frames above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_a_positive_number() {
        let limit = |typed| frames(typed).map(|limit| limit.0);
        assert_eq!(limit(""), Ok(usize::MAX));
        assert_eq!(limit("12"), Ok(12));
        for typed in ["0", "-1", "+1", "1.5", "all", "18446744073709551616"] {
            assert!(limit(typed).is_err(), "{typed}");
        }
    }
}
