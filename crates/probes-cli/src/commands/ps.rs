//! `ps`: the running processes that have OCaml probes.

use nix::unistd::{Uid, User};
use probes_lib::survey;

use crate::failure::Failure;
use crate::flags::{Checked, OutputFlags};
use crate::output::{self, ProcessList};
use crate::progress::LongWork;
use crate::text::number_of;

const HELP: &str = "\
In plain format, it prints a line for each process, sorted by pid:
    PID USER PROVIDERS PROBES ENABLED PROGRAM
PROVIDERS are the providers named in the probe notes of the program, and show which compiler built it; PROBES is
the number of its probes, and ENABLED how many of them are enabled. Processes that you have no permission to read are left out; -v says how many.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes ps [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let output = args.output.open()?;
    let reading = LongWork::begin("reading all processes".to_owned(), &output.messages);
    let survey = survey().map_err(Failure::Survey)?;
    drop(reading);
    let processes = ProcessList::of(&survey, user_name);
    output.print(&output::processes(output.format, &processes)?)?;
    let denied = survey.denied.len();
    if denied > 0 {
        let others = number_of(denied, "other process");
        output
            .messages
            .step(format_args!("no permission to read {others}"));
    }
    Ok(())
}

/// The name of a user, or the uid if it has none.
fn user_name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}
