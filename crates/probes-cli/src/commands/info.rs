//! `info`: the state of every probe of a process, which is not stopped for it.

use probes_lib::{Object, ProbeState, State, Target};

use super::{Failure, Subject, detail, few, say_what};
use crate::hint;
use crate::messages::Messages;
use crate::output::{self, Listing};
use crate::request::Info;

pub(super) fn run(request: &Info) -> Result<(), Failure> {
    let (pid, answer) = (request.pid, request.answer);
    let failed = |error| Failure::Target(Subject::Process(pid), error);
    let target = Target::open(pid).map_err(failed)?;
    say_what(&answer.messages, &target);
    let states = target.states().map_err(failed)?;
    let source_maps = states.objects().iter().map(Object::source_map);
    let detail = detail(answer, request.sites, source_maps);
    let listing = Listing::of_process(&target, &states, &detail);
    output::print_listing(answer.format, &listing, request.sites)?;
    let inconsistent: Vec<_> = states
        .probes()
        .filter(|probe| probe.state() == State::Inconsistent)
        .collect();
    match inconsistent.as_slice() {
        [] => {}
        [probe] => warn(&answer.messages, pid, probe),
        several => {
            let names: Vec<&str> = several.iter().map(ProbeState::name).collect();
            let names = few(&names).unwrap_or_default();
            answer.messages.warning(
                &format!("counters and sites of {} probes disagree: {names}", several.len()),
                &format!("`ocaml-probes attach -pid {pid} -force -enable-all` or `-force -disable-all` repairs all"),
            );
        }
    }
    Ok(())
}

fn warn(messages: &Messages, pid: i32, probe: &ProbeState<'_>) {
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
