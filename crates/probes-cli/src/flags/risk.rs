//! `-despite-seccomp`: what an observation may risk.

use probes_lib::Options;

// What an observation may risk.
#[derive(Debug, clap::Args)]
pub(crate) struct RiskFlags {
    /// Observe under unreadable seccomp filters, which may kill the process
    #[arg(long)]
    despite_seccomp: bool,
}

impl RiskFlags {
    /// Returns these options with the risk that was accepted.
    pub(crate) fn options(&self, others: Options) -> Options {
        Options {
            despite_seccomp: self.despite_seccomp,
            ..others
        }
    }
}
