//! Checks of what killed observers have left: in a process, or in any process of this machine that may be read.

use nix::fcntl::OFlag;

use super::{Check, CheckKind};
use crate::error::{Result, number_of};
use crate::observe::install::installed::find;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::{Process, pids};
use crate::target::Target;

const KIND: CheckKind = CheckKind::StaleObservation;

/// How many processes are named.
const FEW: usize = 5;

pub(super) fn of_process(process: &Process) -> Check {
    match left_in(process.pid()) {
        Ok(None) => Check::pass(KIND, "no killed observer has left anything in it"),
        Ok(Some(left)) => Check::fail(KIND, left),
        Err(why) => Check::unknown(KIND, why.to_string()),
    }
}

pub(super) fn of_machine() -> Check {
    let pids = match pids() {
        Ok(pids) => pids,
        Err(why) => return Check::unknown(KIND, format!("/proc cannot be read: {why}")),
    };
    let (mut left, mut unknown) = (Vec::new(), Vec::new());
    // Processes that may not be read, or have exited meanwhile, are left out.
    for pid in pids.into_iter().filter(|&pid| may_be_observed(pid)) {
        match left_in(pid) {
            Ok(found) => left.extend(found.map(|found| format!("process {pid}: {found}"))),
            Err(error) if error.is_program_gone() => {}
            Err(error) => unknown.push(error.to_string()),
        }
    }
    match &left[..] {
        [] if !unknown.is_empty() => Check::unknown(KIND, unknown.join("; ")),
        [] => Check::pass(
            KIND,
            "no killed observer has left anything in a process that may be read",
        ),
        few if few.len() <= FEW => Check::fail(KIND, few.join("; ")),
        many => {
            let (named, more) = many.split_at(FEW);
            let (named, more) = (named.join("; "), more.len());
            Check::fail(
                KIND,
                format!("{named}; and {}", number_of(more, "more process")),
            )
        }
    }
}

/// The stale observation that `info` reports, if there is one.
fn left_in(pid: i32) -> Result<Option<String>> {
    Ok(Target::open_any(pid)?.states()?.stale_observation())
}

/// Returns whether something of an observer is mapped into a process. For nearly all processes, this is the only check.
fn may_be_observed(pid: i32) -> bool {
    let Ok(process) = Process::open(pid) else {
        return false;
    };
    let memory = ProcessMemory::open(&process, OFlag::O_RDONLY);
    let (Ok(memory), Ok(maps)) = (memory, read_maps(&process)) else {
        return false;
    };
    !find(&memory, &maps).is_empty()
}
