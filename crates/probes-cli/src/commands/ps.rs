//! `ps`: the running processes that have OCaml probes.

use std::collections::BTreeMap;

use nix::unistd::{Uid, User};
use probes_lib::{UnreadProcess, proc_hides_others, survey};

use crate::failure::Failure;
use crate::flags::{Checked, HIDDEN_OTHERS, OutputFlags};
use crate::output::{self, ProcessList, WarningKind};
use crate::progress::LongWork;
use crate::text::{join_first_few, number_of};

const HELP: &str = "\
In plain format, it prints a line for each process, sorted by pid:
    PID USER PROVIDERS PROBES ENABLED PROGRAM
PROVIDERS are the providers named in the probe notes of the program, and show which compiler built
it; PROBES is the number of its probes, and ENABLED how many of them are enabled. Processes that you
have no permission to read are left out; -v says how many, and so does a note if no process is
listed. A warning names those whose notes of probes are damaged, and those that could not be read,
for example because too many files were open.";

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
    for (why, pids) in by_reason(&survey.unread) {
        output.messages.warning(
            WarningKind::UnreadableFile,
            &format!("not listed: {pids}: {why}"),
            "`ocaml-probes info -pid N` says what to do",
        );
    }
    let denied = survey.denied.len();
    let others = number_of(denied, "other process");
    let unread = (denied > 0).then(|| format!("no permission to read {others}"));
    if survey.processes.is_empty() {
        let unread = unread.map_or(String::new(), |it| format!(", and there is {it}"));
        if proc_hides_others() {
            output.messages.note(HIDDEN_OTHERS);
        }
        output.messages.note(&format!(
            "no process with probes was found{unread}. Functions of other programs can be observed, too: `ocaml-probes list -functions -pid N` lists them"
        ));
    } else if let Some(unread) = unread {
        output.messages.step(format_args!("{unread}"));
    }
    Ok(())
}

/// Why processes could not be read, and which.
fn by_reason(unread: &[UnreadProcess]) -> BTreeMap<&str, String> {
    let mut pids: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for process in unread {
        let of_same = pids.entry(&process.why).or_default();
        of_same.push(process.pid.to_string());
    }
    let named = |pids: Vec<String>| {
        let noun = if pids.len() == 1 {
            "process"
        } else {
            "processes"
        };
        format!("{noun} {}", join_first_few(&pids).unwrap_or_default())
    };
    let all = pids.into_iter().map(|(why, pids)| (why, named(pids)));
    all.collect()
}

/// The name of a user, or the uid if it has none.
fn user_name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}
