//! `-force`: what to do if another observer observes the process already.

use probes_lib::Options;

use super::SeccompFlag;

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
    /// Refuses this flag and -despite-seccomp if nothing is observed; `what` is the flag that asks for the rest.
    pub(crate) fn refuse_without_observation(
        &self,
        seccomp: &SeccompFlag,
        what: &str,
    ) -> Result<(), String> {
        let flag = if self.force {
            "-force"
        } else if seccomp.is_given() {
            "-despite-seccomp"
        } else {
            return Ok(());
        };
        Err(format!(
            "{flag} has no effect: {what} alone installs nothing in the process"
        ))
    }

    /// The options of an observation, or of its removal.
    pub(crate) fn options(&self) -> Options {
        Options {
            take_over: self.force,
            ..Options::default()
        }
    }
}
