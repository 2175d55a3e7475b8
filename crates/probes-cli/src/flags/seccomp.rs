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
    /// Refuses -despite-seccomp if nothing is observed; `what` says what is asked for instead.
    pub(crate) fn refuse_without_observation(&self, what: &str) -> Result<(), String> {
        if self.despite_seccomp {
            return Err(format!(
                "-despite-seccomp: {what} alone installs nothing in the process"
            ));
        }
        Ok(())
    }

    /// Returns these options with the risk that was accepted.
    pub(crate) fn options(&self, others: Options) -> Options {
        Options {
            despite_seccomp: self.despite_seccomp,
            ..others
        }
    }
}
