//! `info`: the state of every probe of processes, which are not stopped for it.

use probes_lib::{Object, ProbeState, ProbeStates, State, Target};

use super::failures::Failures;
use super::whom::{has_ended_since, pids};
use super::{Failure, detail, few, say_what};
use crate::hint;
use crate::messages::Messages;
use crate::output::{self, Listing};
use crate::request::{Answer, Info};

pub(super) fn run(request: &Info) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let pids = pids(&request.whom, &messages)?;
    let mut failures = Failures::of(&request.whom, pids.len(), messages);
    for pid in pids {
        let read = Target::open(pid).and_then(|target| Ok((target.states()?, target)));
        if read
            .as_ref()
            .is_err_and(|error| has_ended_since(&request.whom, pid, error))
        {
            continue;
        }
        if let Some((states, target)) = failures.but(pid, read) {
            let answer = Answer {
                messages: failures.messages(pid),
                ..request.answer
            };
            show(request, answer, &target, &states, failures.several())?;
        }
    }
    failures.end("")
}

fn show(
    request: &Info,
    answer: Answer,
    target: &Target,
    states: &ProbeStates,
    several: bool,
) -> Result<(), Failure> {
    say_what(&answer.messages, target);
    let source_maps = states.objects().iter().map(Object::source_map);
    let detail = detail(answer, request.sites, source_maps);
    let listing = Listing::of_process(target, states, &detail);
    output::print_listing(answer.format, &listing, request.sites, several)?;
    warn(&answer.messages, target.pid(), states);
    say_observed(&answer.messages, target.pid(), states.observed_sites());
    Ok(())
}

/// Says that hits are counted, by somebody who may have been killed.
fn say_observed(messages: &Messages, pid: i32, sites: usize) {
    let are = match sites {
        0 => return,
        1 => "1 site is".to_owned(),
        sites => format!("{sites} sites are"),
    };
    messages.warning(
        &format!("{are} observed: by an ocaml-probes that runs, or by one that was killed"),
        &format!("if none runs, `ocaml-probes observe -clean -pid {pid}` puts everything back"),
    );
}

/// Names the probes whose counters and sites disagree.
fn warn(messages: &Messages, pid: i32, states: &ProbeStates) {
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
