//! `info`: shows the state of every probe of one or more processes, without stopping them.

use probes_lib::{CodeDigest, Holders, Object, ProbeState, ProbeStates, State, Target};

use super::closures::warn_of_refused_closures;
use super::holds::note_holders;
use super::open_target::{describe, detail};
use super::process_failures::ProcessFailures;
use crate::destination::Output;
use crate::failure::{Failure, may_have_functions};
use crate::flags::{Checked, OutputFlags, PathFlags, TargetSelection, with_regexp_help};
use crate::hint;
use crate::messages::Messages;
use crate::output::{self, Listing, WarningKind};
use crate::text::{join_first_few, number_of};
use crate::usage::UsageError;

const HELP: &str = "\
In plain format, it prints a line for each probe, sorted by name: NAME enabled, NAME disabled, or,
where counters and sites disagree, NAME inconsistent. With -sites, below each name
    site ADDRESS enabled|disabled|foreign FUNCTION FILE:LINE ARGUMENTS
    semaphore ADDRESS VALUE
with addresses in the process; `-` if the file does not say. If a site holds bytes that are neither
its enabled nor its disabled form, they follow the state: foreign(90cc00000000). Each command that
holds the probe (`attach -for`, `top`) has a line; `attach -release-dead` undoes what killed
commands have changed:
    holder PID alive|dead AMOUNT COMMAND
What belongs to a library or plugin comes after a line
    in OBJECT

If sites are observed, it names the observer, or warns that it was killed; so it does of functions
(`count -fn`), also if the program has no probes. `observe -clean` removes what a killed observer
left.

With several processes, each line begins with the PID, and -json prints a line for each process. A
process that cannot be read is an error; the others are shown.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes info -pid N [FLAGS]", after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    /// Also show each site and semaphore
    #[arg(long)]
    sites: bool,
    #[command(flatten)]
    paths: PathFlags,
    #[command(flatten)]
    pub(super) output: Checked<OutputFlags>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let usage = |why: String| Failure::Usage(UsageError::new(Some("info"), why));
    let refused = args.paths.refuse_without("-sites", args.sites);
    refused.map_err(usage)?;
    let output = args.output.open()?;
    let messages = output.messages;
    let pids = args.selection.pids(true, &messages)?;
    let mut failures = ProcessFailures::new(&args.selection, pids.len(), messages);
    for pid in pids {
        let read = open_or_observed(pid);
        let read = read.map_err(Failure::of_process(pid));
        let read = failures.record_unless_exited(pid, read);
        if let Some((states, target)) = read {
            let output = Output {
                messages: failures.messages(pid),
                ..output.clone()
            };
            let shown = ProcessInfo {
                target: &target,
                states: &states,
                // If it has exited meanwhile, nothing is left to say of it.
                digest: target.code_digest(&states).unwrap_or_default(),
                holders: target.holders(),
            };
            shown.show(args, &output, failures.shows_pid())?;
        }
    }
    failures.finish("")?;
    // If all of them have exited, nothing was printed.
    output.begin()
}

/// Reads the states of a process that has probes, or whose functions are observed.
fn open_or_observed(pid: i32) -> probes_lib::Result<(ProbeStates, Target)> {
    let read = |target: Target| Ok((target.states()?, target));
    Target::open(pid).and_then(read).or_else(|error| {
        let found = if may_have_functions(&error) {
            Target::open_any(pid).and_then(read).ok()
        } else {
            None
        };
        let is_observed = |(states, _): &(ProbeStates, _)| states.observed_functions() > 0;
        found.filter(is_observed).ok_or(error)
    })
}

/// What is shown of one process.
struct ProcessInfo<'s> {
    target: &'s Target,
    states: &'s ProbeStates,
    digest: CodeDigest,
    holders: Holders,
}

impl ProcessInfo<'_> {
    fn show(&self, args: &Args, output: &Output, shows_pid: bool) -> Result<(), Failure> {
        let (target, states) = (self.target, self.states);
        describe(&output.messages, target);
        let source_maps = states.objects().iter().map(Object::source_map);
        let detail = detail(output, args.sites, args.paths.form(), source_maps);
        let listing = Listing::of_process(target, states, self.digest, &self.holders, &detail);
        let text = output::listing(output.format, &listing, args.sites, shows_pid)?;
        output.print(&text)?;
        let probes = states.probes().count();
        output.sum_up(&output.messages, probes, || sum_of_states(states));
        warn_of_inconsistent(&output.messages, target.pid(), states);
        report_observer(&output.messages, target.pid(), states);
        note_holders(&output.messages, target.pid(), &self.holders);
        warn_of_refused_closures(&output.messages, target.pid(), self.digest);
        Ok(())
    }
}

/// `30 probes: 1 enabled, 29 disabled`.
fn sum_of_states(states: &ProbeStates) -> String {
    let count = |state| {
        let probes = states.probes();
        probes.filter(|probe| probe.state() == state).count()
    };
    let probes = number_of(states.probes().count(), "probe");
    let (enabled, disabled) = (count(State::Enabled), count(State::Disabled));
    let inconsistent = match count(State::Inconsistent) {
        0 => String::new(),
        some => format!(", {some} inconsistent"),
    };
    format!("{probes}: {enabled} enabled, {disabled} disabled{inconsistent}")
}

/// Reports how many sites and functions are observed, and by which process; warns if that was killed.
fn report_observer(messages: &Messages, pid: i32, states: &ProbeStates) {
    if let Some(left) = states.stale_observation() {
        messages.warning(WarningKind::NoObserver, &left, &hint::clean(pid));
    } else if let (Some(are), Some(observer)) = (states.observed_in_words(), states.observer()) {
        let age = observer.age_in_words();
        messages.note(&format!("{are} observed by {observer}, for {age}"));
    }
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
            let names = join_first_few(&names).unwrap_or_default();
            messages.warning(
 WarningKind::Inconsistent,
                &format!("counters and sites of {} probes disagree: {names}", several.len()),
                &format!("`ocaml-probes attach -pid {pid} -force -enable-all` or `-force -disable-all` repairs all"),
            );
        }
    }
}

fn warn_of_one(messages: &Messages, pid: i32, probe: &ProbeState<'_>) {
    let count_sites = |is_enabled| {
        probe
            .sites()
            .filter(|site| site.enabled() == Some(is_enabled))
            .count()
    };
    let (name, counter) = (probe.name(), probe.counter());
    let (on, off, sites) = (count_sites(true), count_sites(false), probe.site_count());
    let foreign = match sites - on - off {
        0 => String::new(),
        1 => ", 1 holds foreign bytes,".to_owned(),
        foreign => format!(", {foreign} hold foreign bytes,"),
    };
    messages.warning(
        WarningKind::Inconsistent,
        &format!(
            "{on} of {} of \"{name}\" are enabled{foreign} and its counter is {counter}",
            number_of(sites, "site")
        ),
        &hint::repair(pid, name),
    );
}
