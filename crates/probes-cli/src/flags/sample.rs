//! `-sample 1/N`: every Nth hit.

use std::num::NonZeroU64;

use probes_lib::Observation;

use crate::text::unsigned;

// Which hits are recorded.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct SampleFlag {
    /// Record every Nth hit of each site and function, and count the others
    #[arg(id = "sample", long, value_name = "1/N", value_parser = one_in)]
    every: Option<NonZeroU64>,
}

impl SampleFlag {
    pub(crate) fn is_given(self) -> bool {
        self.every.is_some()
    }

    /// Returns an observation that records these hits only.
    pub(crate) fn add_to(self, observation: Observation) -> Observation {
        match self.every {
            Some(every) => observation.sample(every),
            None => observation,
        }
    }
}

/// Reads `1/N`.
fn one_in(typed: &str) -> Result<NonZeroU64, String> {
    let many = typed.strip_prefix("1/").and_then(unsigned);
    many.ok_or_else(|| {
        format!(
            "\"{typed}\" is not 1/N with a whole number N above 0, such as 1/1000: every 1000th hit"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_is_one_in_a_positive_number() {
        for (typed, every) in [
            ("1/1", 1),
            ("1/1000", 1000),
            ("1/18446744073709551615", u64::MAX),
        ] {
            assert_eq!(one_in(typed).map(NonZeroU64::get), Ok(every));
        }
        for typed in [
            "",
            "1",
            "1/",
            "1/0",
            "1/-2",
            "1/+2",
            "2/3",
            "1/1.5",
            "0.1",
            "1000",
            "1/18446744073709551616",
        ] {
            assert!(one_in(typed).is_err(), "{typed}");
        }
    }
}
