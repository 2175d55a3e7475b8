//! `-args N`: how many arguments to show of a function whose number of arguments is unknown.

use probes_lib::Observation;

use crate::text::unsigned;

/// The most arguments of a call that are shown.
const MAX_ARGUMENTS: u8 = 6;

// How many arguments are shown if their number is unknown.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct CallArgumentsFlag {
    /// Show N arguments of functions with an unknown number of them
    #[arg(long, value_name = "N", value_parser = arguments)]
    args: Option<u8>,
}

impl CallArgumentsFlag {
    /// Refuses the flag: what it `needs` is not given.
    pub(crate) fn refuse_without(self, needs: &str) -> Result<(), String> {
        match self.args {
            None => Ok(()),
            Some(_) => Err(format!(
                "-args needs {needs}: it is about arguments of functions"
            )),
        }
    }

    pub(crate) fn is_given(self) -> bool {
        self.args.is_some()
    }

    pub(crate) fn add_to(self, observation: Observation) -> Observation {
        observation.unknown_arguments(self.args.unwrap_or(0).into())
    }
}

/// Reads how many arguments are shown.
fn arguments(typed: &str) -> Result<u8, String> {
    let many = unsigned(typed).filter(|many| *many <= MAX_ARGUMENTS);
    many.ok_or_else(|| format!("\"{typed}\" is not a number from 0 to {MAX_ARGUMENTS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_arguments_has_no_sign() {
        assert_eq!(arguments("0"), Ok(0));
        assert_eq!(arguments("6"), Ok(6));
        for typed in ["", "7", "+3", "-3", "256", "all"] {
            assert!(arguments(typed).is_err(), "{typed}");
        }
    }
}
