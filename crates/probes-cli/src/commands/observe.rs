//! `observe -clean`: removes the instrumentation of an observer that was killed.

use super::observation_messages::warn_of_still_mapped;
use super::open_target::open_to_observe;
use crate::failure::Failure;
use crate::flags::{Checked, OneProcess, OutputFlags, OverrideFlags};
use crate::output;
use crate::usage::UsageError;

const HELP: &str = "\
If count, latency, watch or top is killed, its instrumentation stays in the process, which does no
harm. `info` reports it. This command removes it, and so does the next count, latency, watch or top.
In plain format, this command prints how many sites and functions were observed:
    PID OBSERVED
With -quiet this is printed only if -format, -json or -o asks for it.
The instrumentation of a command that still runs is removed only with -force.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes observe -clean -pid N [FLAGS]")]
#[command(after_help = HELP)]
#[command(next_help_heading = "Flags")]
#[command(mut_arg("force", |force| force.help("Remove the instrumentation of a live observer, too")))]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    /// Restore the original code of the observed sites and functions
    #[arg(long)]
    clean: bool,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let pid = args.process.pid;
    if !args.clean {
        let message = format!(
            "needs -clean, which removes what a killed observer left; `count -pid {pid}` and `top -pid {pid}` observe"
        );
        return Err(Failure::Usage(UsageError::new(Some("observe"), message)));
    }
    let output = args.output.open()?.with_pid(pid);
    let messages = output.messages;
    let target = open_to_observe(pid, false, &messages)?;
    let cleaned = target.clean(args.overrides.options());
    let cleaned = cleaned.map_err(Failure::of_process(pid))?;
    warn_of_still_mapped(&messages, pid, cleaned.still_mapped);
    if !output.reports_changes {
        return Ok(());
    }
    let text = output::cleaned(output.format, pid, cleaned)?;
    output
        .print(&text)
        .map_err(|failure| failure.after_doing("the observation was removed"))
}
