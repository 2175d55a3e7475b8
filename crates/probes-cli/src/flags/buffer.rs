//! `-buffer MIB`: room for hits that have not been read.

use probes_lib::Observation;

use crate::text::unsigned;

/// The most MiB of a ring.
const MAX: u64 = 64;

// How much room there is for hits.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct BufferFlag {
    /// Room for bursts of hits: each of 16 rings takes up to MIB (1 to 64)
    #[arg(id = "buffer", long, value_name = "MIB", value_parser = mebibytes)]
    mebibytes: Option<u64>,
}

impl BufferFlag {
    /// Refuses the flag: what it `needs` is not given.
    pub(crate) fn refuse_without(self, needs: &str) -> Result<(), String> {
        match self.mebibytes {
            None => Ok(()),
            Some(_) => Err(format!("-buffer needs {needs}: it is room for hits")),
        }
    }

    pub(crate) fn add_to(self, observation: Observation) -> Observation {
        match self.mebibytes {
            Some(mebibytes) => observation.with_rings_of(mebibytes << 20),
            None => observation,
        }
    }
}

fn mebibytes(typed: &str) -> Result<u64, String> {
    let many = unsigned(typed).filter(|many| (1..=MAX).contains(many));
    many.ok_or_else(|| format!("\"{typed}\" is not a number of MiB from 1 to {MAX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_between_one_and_64_mebibytes() {
        assert_eq!(mebibytes("1"), Ok(1));
        assert_eq!(mebibytes("64"), Ok(64));
        for typed in [
            "",
            "0",
            "65",
            "-1",
            "+1",
            "2M",
            "1.5",
            "18446744073709551616",
        ] {
            assert!(mebibytes(typed).is_err(), "{typed}");
        }
    }
}
