//! `doctor`: what this machine and a process allow, and so which commands work.

mod requirements;

use std::process::ExitCode;

use probes_lib::Diagnosis;

pub(super) use requirements::Need;

use crate::failure::Failure;
use crate::flags::{Checked, OutputFlags, pid};
use crate::hint::{self, CommandTarget};
use crate::output::DiagnosisReport;

const HELP: &str = "\
Checks everything that decides whether the commands work: on this machine, and with -pid on a
process. It stops nothing, and changes nothing. In plain format, it prints for each check, and then
for each command
    check NAME pass|fail|unknown WHAT WAS FOUND
    hint NAME WHAT TO DO
    command NAME works|limited|fails WHY
The hint of a failed check is that of a command that fails because of it. A check is unknown if the
process may not be read, or would have to be stopped for it. docs/doctor.md says what each check is
about.

Exit status: 0 if all commands work, also with limits; 1 if one does not.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes doctor [-pid N] [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    /// Also check this process
    #[arg(short, long, value_name = "N", value_parser = pid)]
    pid: Option<i32>,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

/// `commands` are the names of all commands, with what each needs.
pub(super) fn run(
    args: &Args,
    commands: impl Iterator<Item = (&'static str, &'static [Need])>,
) -> Result<ExitCode, Failure> {
    let mut output = args.output.open()?;
    let diagnosis = match args.pid {
        Some(pid) => {
            output = output.with_pid(pid);
            Diagnosis::of_process(pid).map_err(Failure::of_process(pid))?
        }
        None => Diagnosis::of_machine(),
    };
    // Without -pid, no hint names a process.
    let operand = CommandTarget::Process(args.pid.unwrap_or(0));
    let commands = commands.map(|(name, needs)| requirements::answer(name, needs, &diagnosis));
    let report = DiagnosisReport::of(
        &diagnosis,
        |check| hint::of_check(check, &operand),
        commands.collect(),
    );
    let is_terminal = output.destination.is_terminal_on_stdout();
    output.print_result(&report.text(output.format, is_terminal)?)?;
    Ok(if report.has_failed_commands() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
