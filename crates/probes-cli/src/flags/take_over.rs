//! `-force`: what to do if another observer observes the process already.

use probes_lib::Options;

/// The help of `-force` in commands that also start programs.
pub(crate) const FORCE_HELP: &str =
    "With -pid: take over from another observer, which fails (serve waits)";

// `-force`.
#[derive(Debug, clap::Args)]
pub(crate) struct TakeOver {
    /// Take over from another observer, which fails (serve waits)
    #[arg(long)]
    force: bool,
}

impl TakeOver {
    pub(crate) fn is_given(&self) -> bool {
        self.force
    }

    /// The options of an observation, or of its removal.
    pub(crate) fn options(&self) -> Options {
        Options {
            take_over: self.force,
            ..Options::default()
        }
    }
}
