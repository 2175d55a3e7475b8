//! `-despite-seccomp`: observing under a seccomp filter that cannot be read.

use probes_lib::Options;

// `-despite-seccomp`.
#[derive(Debug, clap::Args)]
pub(crate) struct SeccompFlag {
    /// Observe under unreadable seccomp filters, which may kill the process
    #[arg(long)]
    despite_seccomp: bool,
}

impl SeccompFlag {
    pub(crate) fn is_given(&self) -> bool {
        self.despite_seccomp
    }

    /// Returns these options with the risk that was accepted.
    pub(crate) fn options(&self, others: Options) -> Options {
        Options {
            despite_seccomp: self.despite_seccomp,
            ..others
        }
    }
}
