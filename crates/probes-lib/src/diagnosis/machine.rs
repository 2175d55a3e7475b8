//! Checks of this tool, its user, the kernel and the processor.

use std::fs;

use nix::unistd::geteuid;

use super::{Check, CheckKind};
use crate::error::{Denial, Error, MemoryError, ObserveError, Operation, ProcessError, Subject};
use crate::process::denial::{
    is_initial_user_namespace, is_ptracer, may_be_ptracer, own_status, read_own_status, user_name,
    yama_scope,
};
use crate::process::memory::ProcessMemory;
use crate::process::mounts;
use crate::process::{Process, check_proc};
use crate::profile::{self, PermittedSamples};
use crate::sys::ptrace;
use crate::ticks;

pub(super) fn checks() -> Vec<Check> {
    vec![
        proc_directory(),
        hidepid(),
        user(),
        capabilities(),
        user_namespace(),
        yama(),
        own_filter(),
        force_override(),
        invariant_tsc(),
    ]
    .into_iter()
    .chain(perf_events())
    .collect()
}

/// The error that attaching to any process would fail with.
fn denied(denial: Denial) -> Error {
    let operation = Operation::Attach;
    Error::new(Subject::None, ProcessError::Denied { operation, denial })
}

fn proc_directory() -> Check {
    match check_proc() {
        Ok(()) => Check::pass(CheckKind::Proc, "shows the pids of this pid namespace"),
        Err(error) => Check::error(CheckKind::Proc, error),
    }
}

fn hidepid() -> Check {
    let kind = CheckKind::Hidepid;
    if check_proc().is_err() {
        return Check::unknown(kind, "/proc does not show how it is mounted");
    }
    let own_mounts = mounts::own();
    match mounts::hidepid(&own_mounts) {
        Some(mode) if !is_ptracer(&own_status()) => Check::fail(
            kind,
            format!(
                "/proc is mounted with hidepid={mode}, which hides the processes of other users"
            ),
        ),
        Some(mode) => Check::pass(kind, format!("hidepid={mode} hides nothing from this user")),
        None => Check::pass(kind, "/proc shows the processes of all users"),
    }
}

fn user() -> Check {
    let uid = geteuid().as_raw();
    let name = user_name(uid);
    let reach = match read_own_status() {
        Some(own) if is_ptracer(&own) => " may observe and change the processes of all users",
        Some(_) => " may observe and change the processes of the same user",
        None => "",
    };
    Check::pass(CheckKind::User, format!("uid {uid} ({name}){reach}"))
}

fn capabilities() -> Check {
    let kind = CheckKind::Capabilities;
    let Some(ours) = read_own_status() else {
        return Check::unknown(kind, "/proc does not show those of this tool");
    };
    if is_ptracer(&ours) {
        Check::pass(kind, "CAP_SYS_PTRACE")
    } else if may_be_ptracer(&ours) {
        Check::pass(
            kind,
            "no CAP_SYS_PTRACE, which only processes of other users, and processes that protect themselves, need",
        )
    } else {
        // Without CAP_SYS_PTRACE, root is like any other user.
        let uid = geteuid().as_raw();
        let name = user_name(uid);
        let denial = Denial::Incapable(Box::new(Denial::OtherUser { uid, name }));
        Check::fail(
            kind,
            "this container or service lacks CAP_SYS_PTRACE, so no process of another user can be observed or changed",
        )
        .because(denied(denial))
    }
}

fn user_namespace() -> Check {
    if check_proc().is_err() {
        return Check::unknown(CheckKind::UserNamespace, "/proc does not show it");
    }
    let finding = if is_initial_user_namespace() {
        "the initial one"
    } else {
        "one of its own: processes outside of it cannot be observed or changed"
    };
    Check::pass(CheckKind::UserNamespace, finding)
}

fn yama() -> Check {
    let kind = CheckKind::Yama;
    let is_privileged = is_ptracer(&own_status());
    match yama_scope() {
        None if !exists("/proc/sys/kernel") => {
            Check::unknown(kind, "/proc does not show the settings of the kernel")
        }
        None => Check::pass(kind, "this kernel has no Yama"),
        Some(0) => Check::pass(
            kind,
            "kernel.yama.ptrace_scope=0 allows it for the same user",
        ),
        Some(scope) if scope < 3 && is_privileged => Check::pass(
            kind,
            format!("kernel.yama.ptrace_scope={scope} allows it with CAP_SYS_PTRACE"),
        ),
        Some(scope) => Check::error(kind, denied(Denial::Yama { scope })),
    }
}

fn exists(path: &str) -> bool {
    fs::exists(path).is_ok_and(|it| it)
}

fn own_filter() -> Check {
    if ptrace::is_filtered() {
        Check::error(CheckKind::Ptrace, denied(Denial::Seccomp))
    } else {
        Check::pass(
            CheckKind::Ptrace,
            "no seccomp filter of this process blocks ptrace",
        )
    }
}

/// A byte on a read-only page.
static READ_ONLY: u8 = 0x5a;

/// Writes to a read-only byte of this process, by /proc/PID/mem, the value that it has: the kernel shows the setting
/// nowhere.
fn force_override() -> Check {
    let kind = CheckKind::ForceOverride;
    let at = crate::address::LiveAddr(&raw const READ_ONLY as u64);
    let written = Process::own().and_then(|own| {
        let memory = ProcessMemory::open(&own, nix::fcntl::OFlag::O_RDWR);
        let memory = memory.map_err(|source| own.exited_or(source))?;
        Ok(memory.write(at, &[READ_ONLY]))
    });
    match written {
        Ok(Ok(())) => Check::pass(kind, "code may be written without ptrace"),
        Ok(Err(error)) if error.raw_os_error() == Some(libc::EIO) => Check::fail(
            kind,
            "this kernel does not let code be written without ptrace (proc_mem.force_override)",
        )
        .because(Error::new(Subject::None, MemoryError::LiveRefused)),
        Ok(Err(error)) => Check::unknown(kind, format!("it cannot be tried: {error}")),
        Err(error) => Check::unknown(kind, format!("it cannot be tried: {error}")),
    }
}

fn invariant_tsc() -> Check {
    let kind = CheckKind::InvariantTsc;
    if ticks::is_tsc_invariant() {
        Check::pass(kind, "the time stamp counter has one rate")
    } else if exists("/proc/cpuinfo") {
        Check::error(kind, ObserveError::NoInvariantTsc)
    } else {
        Check::unknown(kind, "/proc does not show the processors")
    }
}

fn perf_events() -> [Check; 2] {
    match check_proc().and_then(|()| Process::own()) {
        Ok(own) => perf_events_of(&own),
        Err(error) => [CheckKind::PerfEvents, CheckKind::PerfSamples]
            .map(|kind| Check::unknown(kind, format!("it cannot be tried: {error}"))),
    }
}

/// Opens the perf events that `profile` opens, for a moment: `kernel.perf_event_paranoid` alone does not tell whether
/// the kernel permits them.
pub(super) fn perf_events_of(process: &Process) -> [Check; 2] {
    [waits(process), samples(process)]
}

fn samples(process: &Process) -> Check {
    let kind = CheckKind::PerfSamples;
    match profile::try_to_sample(process) {
        PermittedSamples::Everywhere => Check::pass(
            kind,
            "the kernel samples threads that run, in their own code and in the kernel",
        ),
        PermittedSamples::InUserSpace(why) => Check::fail(
            kind,
            format!(
                "the kernel samples threads while they execute their own code, and not in the kernel: {why}"
            ),
        ),
        PermittedSamples::Nowhere(why) => {
            Check::fail(kind, format!("the kernel does not sample threads: {why}"))
        }
    }
}

fn waits(process: &Process) -> Check {
    let kind = CheckKind::PerfEvents;
    match profile::try_to_record_waits(process) {
        Ok(()) => {
            let paranoid = profile::paranoid();
            let paranoid = paranoid.map_or_else(|| "?".to_owned(), |value| value.to_string());
            Check::pass(
                kind,
                format!("perf_event_open is permitted (kernel.perf_event_paranoid={paranoid})"),
            )
        }
        Err(why) => Check::fail(kind, why),
    }
}
