//! `-force`: what to do if another observer observes the process already.

use probes_lib::Options;

/// The help of `-force` in commands that also start programs.
pub(crate) const FORCE_HELP: &str = "With -pid: take over from another observer, which then fails";

// `-force`.
#[derive(Debug, clap::Args)]
pub(crate) struct TakeOver {
    /// Take over from another observer, which then fails with an error
    #[arg(long)]
    force: bool,
}

impl TakeOver {
    /// Refuses -force if nothing is observed; `what` says what is asked for instead.
    pub(crate) fn refuse_without_observation(&self, what: &str) -> Result<(), String> {
        if self.force {
            return Err(format!(
                "-force: {what} alone installs nothing in the process"
            ));
        }
        Ok(())
    }

    /// The options of an observation, or of its removal.
    pub(crate) fn options(&self) -> Options {
        Options {
            take_over: self.force,
            ..Options::default()
        }
    }
}
