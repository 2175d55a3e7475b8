//! `info`: the state of every probe of processes, which are not stopped for it.

use probes_lib::{Object, ProbeState, ProbeStates, State, Target};

use super::failures::Failures;
use super::open_target::{describe, detail};
use crate::failure::Failure;
use crate::flags::{Checked, OutputFlags, OutputOptions, TargetSelection};
use crate::hint;
use crate::output::{self, Listing};
use crate::say::{self, Messages};
use crate::text::few;

const HELP: &str = "\
In plain format, it prints a line for each probe, sorted by name: NAME enabled, NAME disabled, or, where
counters and sites disagree, NAME inconsistent. With -sites, below each
    site ADDRESS enabled|disabled|foreign FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS VALUE
with addresses in the process, and - where the file has no information. If a site does not hold the
bytes of the file, they come after its state: foreign(90cc00000000). What belongs to a library or plugin
comes after a line
    in OBJECT

With several processes, each line begins with the PID, and -json prints a line for each process. A
process that cannot be read is an error; the others are shown.

RE is an extended regular expression, as in grep -E.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes info -pid N [FLAGS]", after_help = HELP)]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    /// Also show each site and semaphore
    #[arg(long)]
    sites: bool,
    #[command(flatten)]
    output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let messages = args.output.messages;
    let pids = args.selection.pids(&messages)?;
    let mut failures = Failures::new(&args.selection, pids.len(), messages);
    for pid in pids {
        let read = Target::open(pid).and_then(|target| Ok((target.states()?, target)));
        if read
            .as_ref()
            .is_err_and(|error| args.selection.has_exited_since(pid, error))
        {
            continue;
        }
        if let Some((states, target)) = failures.record(pid, read) {
            let output = OutputOptions {
                messages: failures.messages(pid),
                ..*args.output
            };
            show(args.sites, output, &target, &states, failures.several())?;
        }
    }
    failures.finish("")
}

fn show(
    sites: bool,
    output: OutputOptions,
    target: &Target,
    states: &ProbeStates,
    several: bool,
) -> Result<(), Failure> {
    describe(&output.messages, target);
    let source_maps = states.objects().iter().map(Object::source_map);
    let detail = detail(output, sites, source_maps);
    let listing = Listing::of_process(target, states, &detail);
    say::print(&output::listing(output.format, &listing, sites, several)?)?;
    warn_of_inconsistent(&output.messages, target.pid(), states);
    warn_of_observed(&output.messages, target.pid(), states.observed_sites());
    Ok(())
}

/// Says that sites are observed, by an observer that may have been killed.
fn warn_of_observed(messages: &Messages, pid: i32, sites: usize) {
    let are = match sites {
        0 => return,
        1 => "1 site is".to_owned(),
        sites => format!("{sites} sites are"),
    };
    messages.warning(
        &format!("{are} observed, by an ocaml-probes that is running or was killed"),
        &format!("if none is running, `ocaml-probes observe -clean -pid {pid}` removes its instrumentation"),
    );
}

/// Names the probes whose counters and sites disagree.
fn warn_of_inconsistent(messages: &Messages, pid: i32, states: &ProbeStates) {
    let inconsistent: Vec<_> = states
        .probes()
        .filter(|probe| probe.state() == State::Inconsistent)
        .collect();
    match inconsistent.as_slice() {
        [] => {}
        [probe] => warn_of_one(messages, pid, probe),
        several => {
            let names: Vec<&str> = several.iter().map(ProbeState::name).collect();
            let names = few(&names).unwrap_or_default();
            messages.warning(
                &format!("counters and sites of {} probes disagree: {names}", several.len()),
                &format!("`ocaml-probes attach -pid {pid} -force -enable-all` or `-force -disable-all` repairs all"),
            );
        }
    }
}

fn warn_of_one(messages: &Messages, pid: i32, probe: &ProbeState<'_>) {
    let enabled = |on| {
        probe
            .sites()
            .filter(|site| site.enabled() == Some(on))
            .count()
    };
    let (name, counter) = (probe.name(), probe.counter());
    let (on, off, sites) = (enabled(true), enabled(false), probe.site_count());
    let foreign = match sites - on - off {
        0 => String::new(),
        foreign => format!(", {foreign} hold foreign bytes"),
    };
    messages.warning(
        &format!(
            "{on} of {sites} sites of \"{name}\" are enabled{foreign} and its counter is {counter}"
        ),
        &hint::repair(pid, name),
    );
}
