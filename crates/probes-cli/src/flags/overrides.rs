//! `-force` and `-despite-seccomp`: what an observation does only if it is asked for.

use probes_lib::Options;

use super::TakeOver;

// The flags of commands that observe.
#[derive(Debug, clap::Args)]
pub(crate) struct OverrideFlags {
    #[command(flatten)]
    take_over: TakeOver,
    /// Observe under unreadable seccomp filters, which may kill the process
    #[arg(long)]
    despite_seccomp: bool,
}

impl OverrideFlags {
    /// Refuses the flags if nothing is observed; `what` is the flag that asks for the rest.
    pub(crate) fn refuse_without_observation(&self, what: &str) -> Result<(), String> {
        let flag = if self.take_over.is_given() {
            "-force"
        } else if self.despite_seccomp {
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
            despite_seccomp: self.despite_seccomp,
            ..self.take_over.options()
        }
    }
}
