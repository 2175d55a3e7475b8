//! Checks of whether a process may be read, stopped and observed.

use std::time::Duration;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use super::machine::perf_events_of;
use super::{Check, CheckKind};
use crate::error::{
    Denial, Error, ErrorKind, MemoryLimitKind, ObserveError, Operation, ProcessError,
    UnreadableFilter,
};
use crate::inject::code_cave;
use crate::inject::permissions::{Permissions, why_unreadable};
use crate::observe::install::tsc_access;
use crate::process::Process;
use crate::process::denial::{self, AccessChecks, user_name};
use crate::process::image::open_executable;
use crate::process::limits;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::seccomp::OwnFilters;
use crate::process::status::Status;
use crate::trace::lease::{Lease, NoLease};
use crate::trace::tracee_set::is_follower;

/// How long to wait for the follower of a process to say whether it lends it.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

pub(super) fn checks(process: &Process) -> Vec<Check> {
    let memory = memory(process);
    // If the kernel lets its memory be opened, a denial that `AccessChecks` finds does not apply: a process can exempt
    // tools from Yama, for example (prctl(2), PR_SET_PTRACER).
    let is_permitted = memory.cause().is_none();
    let checks = AccessChecks::of(process);
    let check =
        |kind, denial: Option<Denial>, finding: String| match denial.filter(|_| !is_permitted) {
            Some(denial) => Check::error(kind, denied(process, denial)),
            None => Check::pass(kind, finding),
        };
    let status = process.status().unwrap_or_default();
    let own = geteuid().as_raw();
    let user = if status.uid == own {
        format!("uid {own} ({}), the same as the process", user_name(own))
    } else {
        let (ours, theirs) = (user_name(own), user_name(status.uid));
        format!(
            "uid {own} ({ours}); the process has uid {} ({theirs})",
            status.uid
        )
    };
    let dumpable = if checks.is_dumpable() {
        "it does not protect itself from its own user"
    } else {
        "it is not dumpable, which does not matter to this user"
    };
    let mut found = vec![
        check(CheckKind::User, checks.user(), user),
        check(
            CheckKind::Capabilities,
            checks.capabilities(),
            "it has no capability that this tool lacks".to_owned(),
        ),
        check(
            CheckKind::UserNamespace,
            checks.user_namespace(),
            "the user namespace of the process permits it".to_owned(),
        ),
        pid_namespace(&status),
        check(CheckKind::Dumpable, checks.dumpable(), dumpable.to_owned()),
    ];
    if let Some(denial) = checks.yama().filter(|_| !is_permitted) {
        found.push(Check::error(CheckKind::Yama, denied(process, denial)));
    } else if let (Some(_), Some(scope)) = (checks.yama(), denial::yama_scope()) {
        let finding = format!("kernel.yama.ptrace_scope={scope}, and the process permits it");
        found.push(Check::pass(CheckKind::Yama, finding));
    }
    found.extend([
        tracer(process, &checks, is_permitted),
        ancestor(process),
        seccomp(process),
        memory_limit(process),
        code_cave_for_calls(process),
        files(process),
        memory,
    ]);
    found.extend(perf_events_of(process));
    // What prctl(2) has set is not known without injected calls.
    let strict = tsc_access::refuse_strict(process).err();
    let strict = strict.filter(|error| !error.is_gone());
    found.extend(strict.map(|error| Check::error(CheckKind::InvariantTsc, error)));
    found
}

fn denied(process: &Process, denial: Denial) -> Error {
    let operation = Operation::Attach;
    Error::of_process(process.pid(), ProcessError::Denied { operation, denial })
}

fn files(process: &Process) -> Check {
    let kind = CheckKind::Files;
    let read = read_maps(process).and_then(|_| {
        open_executable(process)
            .map_err(|source| denial::denied_or_exited(process, Operation::Read, source))
    });
    match read {
        Ok(_) => Check::pass(kind, "its maps and its executable may be read"),
        Err(error) => Check::error(kind, error),
    }
}

/// Opens its memory, as an update does.
fn memory(process: &Process) -> Check {
    let kind = CheckKind::Memory;
    match ProcessMemory::open(process, OFlag::O_RDWR) {
        Ok(_) => Check::pass(kind, "the kernel lets it be read and written"),
        Err(source) => Check::error(
            kind,
            denial::denied_or_exited(process, Operation::Attach, source),
        ),
    }
}

fn pid_namespace(status: &Status) -> Check {
    let finding = if status.levels > 1 {
        format!("in a pid namespace of its own, as pid {}", status.innermost)
    } else {
        "the same as that of the mounted /proc".to_owned()
    };
    Check::pass(CheckKind::PidNamespace, finding)
}

fn tracer(process: &Process, checks: &AccessChecks<'_>, is_permitted: bool) -> Check {
    let kind = CheckKind::Tracer;
    let Some(denial) = checks.tracer() else {
        return Check::pass(kind, "no other tool traces it");
    };
    let traced = || Check::error(kind, denied(process, denial));
    let tracer = process.status().map_or(0, |status| status.tracer);
    // Only a tool that may trace the process may ask its follower for it.
    if !is_permitted || !is_follower(tracer) {
        return traced();
    }
    match Lease::connect(tracer, process, false, ANSWER_LIMIT) {
        Ok(_) => Check::pass(
            kind,
            "an `attach -follow` or `trace -follow` follows it, and lends it to other commands",
        ),
        Err(NoLease::OtherUser) => {
            Check::error(kind, denial::followed_by_other_user(process, tracer))
        }
        Err(NoLease::OtherVersion) => Check::error(kind, denial::other_version(process, tracer)),
        Err(_) => traced(),
    }
}

fn ancestor(process: &Process) -> Check {
    match process.refuse_self_and_ancestors() {
        Ok(()) => Check::pass(CheckKind::Ancestor, "this tool does not run below it"),
        Err(error) => Check::error(CheckKind::Ancestor, error),
    }
}

/// The filters themselves can be read only while the process is stopped.
fn seccomp(process: &Process) -> Check {
    let kind = CheckKind::Seccomp;
    let permissions = Permissions::of(process, false);
    let why = why_unreadable();
    let unread = why.unwrap_or(UnreadableFilter::NotPermitted);
    match (permissions.check_some_running_thread_may_call(unread), why) {
        // A thread has filters of its own; another one makes the calls.
        (Ok(()), _) if OwnFilters::of(process).has_any().unwrap_or(false) => Check::pass(
            kind,
            "some of its threads have set themselves seccomp filters, and others have not",
        ),
        (Ok(()), _) => Check::pass(
            kind,
            "it has no seccomp filter but those that it was started with",
        ),
        (Err(error), Some(_)) => Check::error(kind, error),
        (Err(error), None) => match error.kind() {
            ErrorKind::Observe(ObserveError::SeccompUnreadable { .. }) => Check::unknown(
                kind,
                "it has set itself seccomp filters, which are read once it is stopped",
            ),
            _ => Check::error(kind, error),
        },
    }
}

/// Whether there is a code cave for injected calls.
fn code_cave_for_calls(process: &Process) -> Check {
    let kind = CheckKind::CodeCave;
    let opened = ProcessMemory::open(process, OFlag::O_RDONLY).ok();
    let Some((memory, maps)) = opened.zip(read_maps(process).ok()) else {
        return Check::unknown(kind, "its memory cannot be read");
    };
    match code_cave::find(process, &memory, &maps) {
        Ok(_) => Check::pass(kind, "an object has a code cave for injected calls"),
        Err(error) => Check::error(kind, error),
    }
}

fn memory_limit(process: &Process) -> Check {
    let kind = CheckKind::MemoryLimit;
    match limits::tightest(process) {
        Some(limit) if limits::is_ample(&limit) => Check::pass(
            kind,
            format!("{} leaves more than any observation needs", limit.kind),
        ),
        Some(limit) => Check::unknown(
            kind,
            format!(
                "{} is {} bytes, of which {} are in use: an observation that needs more than {} is refused",
                limit.kind,
                limit.limit,
                limit.used,
                match limit.kind {
                    MemoryLimitKind::Cgroup => "what is left",
                    _ => "half of what is left",
                }
            ),
        ),
        None => Check::pass(kind, "its memory is not limited"),
    }
}
