//! Why the kernel returned EPERM or EACCES, or a seccomp filter any error: repeats the checks of ptrace(2), "Ptrace access mode
//! checking", with what /proc shows.

use std::fs;
use std::io;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{Uid, User, geteuid};

use crate::error::{Denial, Error, Operation, ProcessError};
use crate::process::status::Status;
use crate::process::{Process, hidden, is_gone, name_of};
use crate::sys::ptrace;

/// The name of our threads that trace a process for a short time only.
pub(crate) const TRACER_NAME: &str = "probes-tracer";

/// `CAP_SYS_PTRACE` of capability.h, as a bit of a capability set.
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// Returns the error for an `operation` on a process that failed with `errno`.
pub(crate) fn error(process: &Process, operation: Operation, errno: Errno) -> Error {
    let pid = process.pid();
    match errno {
        Errno::EPERM | Errno::EACCES | Errno::ENOENT | Errno::ESRCH if process.is_hidden() => {
            hidden(pid, operation)
        }
        // The files in /proc of an exited process belong to root, which looks like a denial.
        Errno::EPERM | Errno::EACCES if process.has_exited() => {
            Error::of_process(pid, ProcessError::Exited)
        }
        Errno::EPERM | Errno::EACCES => match of_process(process, errno) {
            // If it has exited meanwhile, the reason found is that of a dead process.
            _ if process.has_exited() => Error::of_process(pid, ProcessError::Exited),
            denial => Error::of_process(pid, ProcessError::Denied { operation, denial }),
        },
        _ if is_gone(errno) => Error::of_process(pid, ProcessError::Exited),
        // Some filters return ENOSYS, as if the kernel had no such call.
        _ if operation == Operation::Attach && ptrace::is_filtered() => {
            let denial = Denial::Seccomp;
            Error::of_process(pid, ProcessError::Denied { operation, denial })
        }
        _ => Error::of_call(pid, operation, errno.into()),
    }
}

/// Same as [`error`], for a failed call of the standard library.
pub(crate) fn denied_or_exited(
    process: &Process,
    operation: Operation,
    source: io::Error,
) -> Error {
    match source.raw_os_error().map(Errno::from_raw) {
        Some(errno @ (Errno::EPERM | Errno::EACCES)) => error(process, operation, errno),
        Some(errno) if is_gone(errno) => error(process, operation, errno),
        _ => Error::of_call(process.pid(), operation, source),
    }
}

/// Returns the error for an `operation` on a process of which `tracer` traces a thread.
pub(crate) fn traced(process: &Process, operation: Operation, tracer: i32) -> Error {
    Error::of_process(
        process.pid(),
        ProcessError::Denied {
            operation,
            denial: by_tracer(tracer),
        },
    )
}

/// Returns the error for a process that the thread `tracer` of another version of this tool follows.
pub(crate) fn other_version(process: &Process, tracer: i32) -> Error {
    not_lent(process, tracer, |tracer, name| Denial::OtherVersion {
        tracer,
        name,
    })
}

/// Returns the error for a process that the thread `tracer` of another user's tool follows.
pub(crate) fn followed_by_other_user(process: &Process, tracer: i32) -> Error {
    not_lent(process, tracer, |tracer, name| {
        Denial::FollowedByOtherUser { tracer, name }
    })
}

/// Returns the error for a process that its follower, of which `tracer` is a thread, does not lend. `why` is passed
/// the pid and the name of the follower.
fn not_lent(process: &Process, tracer: i32, why: impl FnOnce(i32, String) -> Denial) -> Error {
    let status_of = |tid| Process::open(tid).ok()?.status().ok();
    let tracer = status_of(tracer).map_or(tracer, |status| status.tgid);
    let denial = why(tracer, name_of(tracer));
    let operation = Operation::Attach;
    Error::of_process(process.pid(), ProcessError::Denied { operation, denial })
}

/// Returns the denial if thread `tid` is the tracer. The denial names the process of that thread,
/// as TracerPid is the id of a thread.
fn by_tracer(tid: i32) -> Denial {
    let thread = Process::open(tid).ok();
    let status = thread.as_ref().and_then(|thread| thread.status().ok());
    let tracer = status.as_ref().map_or(tid, |status| status.tgid);
    let name = name_of(tracer);
    match status {
        Some(status) if status.name != TRACER_NAME => Denial::Traced { tracer, name },
        // A short-lived tracer thread of this tool, or a tracer that has exited since: try again.
        Some(_) | None => Denial::BeingChanged {
            updater: tracer,
            name,
        },
    }
}

fn of_process(process: &Process, errno: Errno) -> Denial {
    let checks = AccessChecks::of(process);
    // In one user namespace, what is denied to the user is denied whether another tool traces the process or not.
    let is_sure = checks.user_namespace().is_none();
    let of_user =
        || (checks.user().or_else(|| checks.capabilities())).or_else(|| checks.dumpable());
    let denial = is_sure
        .then(of_user)
        .flatten()
        .or_else(|| checks.tracer())
        .or_else(|| checks.filter())
        .or_else(|| checks.user_namespace())
        .or_else(of_user)
        .or_else(|| checks.program_file())
        .or_else(|| checks.yama());
    denial.unwrap_or(match errno {
        // Opening a file in /proc fails with EACCES whatever the reason is. Outside the initial
        // user namespace, the likely reason is the namespace.
        Errno::EACCES if !checks.is_initial => Denial::UserNamespace,
        Errno::EACCES if checks.is_privileged => Denial::Policy,
        _ => Denial::Unexplained,
    })
}

/// What the kernel checks before it lets us read or trace a process: one method for each check. What one
/// finds is the reason only if those that are asked before it find nothing.
pub(crate) struct AccessChecks<'p> {
    process: &'p Process,
    theirs: Status,
    ours: Status,
    /// Whether we have `CAP_SYS_PTRACE`.
    is_privileged: bool,
    /// Whether we are in the initial user namespace.
    is_initial: bool,
}

impl AccessChecks<'_> {
    pub(crate) fn of(process: &Process) -> AccessChecks<'_> {
        let ours = own_status();
        AccessChecks {
            process,
            theirs: process.status().unwrap_or_default(),
            is_privileged: is_ptracer(&ours),
            is_initial: is_initial_user_namespace(),
            ours,
        }
    }

    /// Another tool that traces it.
    pub(crate) fn tracer(&self) -> Option<Denial> {
        (self.theirs.tracer != 0).then(|| by_tracer(self.theirs.tracer))
    }

    /// A seccomp filter on our own process that forbids ptrace.
    pub(crate) fn filter(&self) -> Option<Denial> {
        ptrace::is_filtered().then_some(Denial::Seccomp)
    }

    /// Ids and capabilities in another user namespace have another meaning.
    pub(crate) fn user_namespace(&self) -> Option<Denial> {
        let is_everywhere = self.is_privileged && self.is_initial;
        let is_denied = !is_everywhere && is_in_other_user_namespace(self.process);
        is_denied.then_some(Denial::UserNamespace)
    }

    pub(crate) fn user(&self) -> Option<Denial> {
        let uid = self.theirs.uid;
        let is_denied = !self.is_privileged && uid != geteuid().as_raw();
        let name = || user_name(uid);
        is_denied.then(|| add_incapable(Denial::OtherUser { uid, name: name() }, &self.ours))
    }

    /// "The caller's capabilities are a superset of the target process's permitted capabilities": to trace it, the
    /// caller's permitted ones count; to open its files in /proc, which comes first, the effective ones.
    pub(crate) fn capabilities(&self) -> Option<Denial> {
        let has_more = self.theirs.permitted & !self.ours.effective != 0;
        let is_denied = !self.is_privileged && has_more;
        is_denied.then(|| add_incapable(Denial::MorePrivileged, &self.ours))
    }

    /// The files in /proc of a process that is not dumpable belong to root.
    pub(crate) fn dumpable(&self) -> Option<Denial> {
        let is_denied = !self.is_privileged && !self.is_dumpable();
        is_denied.then(|| add_incapable(Denial::NotDumpable, &self.ours))
    }

    pub(crate) fn is_dumpable(&self) -> bool {
        let owner = self.process.owner();
        !owner.is_ok_and(|owner| owner != self.theirs.uid)
    }

    /// The kernel lets us see which file it executes, but not open it.
    fn program_file(&self) -> Option<Denial> {
        let is_seen = !self.is_privileged && self.process.identity_of("exe").is_ok();
        let opened = self.process.open_file("exe", OFlag::O_RDONLY);
        let is_denied = opened.is_err_and(|it| it.kind() == io::ErrorKind::PermissionDenied);
        (is_seen && is_denied).then_some(Denial::UnreadableProgram)
    }

    pub(crate) fn yama(&self) -> Option<Denial> {
        let scope = yama_scope()?;
        let is_denied = scope == 3 || (scope > 0 && !self.is_privileged);
        is_denied.then(|| add_incapable(Denial::Yama { scope }, &self.ours))
    }
}

/// Returns whether a process has `CAP_SYS_PTRACE`.
pub(crate) fn is_ptracer(status: &Status) -> bool {
    status.effective & CAP_SYS_PTRACE != 0
}

/// Returns whether a process can get `CAP_SYS_PTRACE` at all: in many containers, none can.
pub(crate) fn may_be_ptracer(status: &Status) -> bool {
    status.bounding & CAP_SYS_PTRACE != 0
}

/// Wraps a denial in [`Denial::Incapable`] if CAP_SYS_PTRACE would overcome it, but is not in the
/// bounding set, so that no process of this container can have it.
fn add_incapable(denial: Denial, ours: &Status) -> Denial {
    let is_overcome = !matches!(denial, Denial::Yama { scope: 3 });
    if !may_be_ptracer(ours) && is_overcome {
        Denial::Incapable(Box::new(denial))
    } else {
        denial
    }
}

/// Returns why a child that is about to execute a program may not be traced.
pub(crate) fn of_own_child(errno: Errno) -> Denial {
    let ours = own_status();
    match yama_scope() {
        _ if ptrace::is_filtered() => Denial::Seccomp,
        // Our tracer may trace our children as well.
        _ if ours.tracer != 0 => by_tracer(ours.tracer),
        Some(scope) if scope > 1 => add_incapable(Denial::Yama { scope }, &ours),
        _ if errno == Errno::EACCES => Denial::Policy,
        _ => Denial::Unexplained,
    }
}

pub(crate) fn own_status() -> Status {
    read_own_status().unwrap_or_default()
}

/// The same; `None` if /proc does not show it.
pub(crate) fn read_own_status() -> Option<Status> {
    Process::own().ok()?.status().ok()
}

/// Returns whether the process is in another user namespace than ours. Compares the maps of ids, which nearly always
/// differ then, because reading the link of the namespace takes the permission that was denied.
fn is_in_other_user_namespace(process: &Process) -> bool {
    let differ = |theirs: io::Result<Vec<u8>>, ours: io::Result<Vec<u8>>| matches!((theirs, ours), (Ok(theirs), Ok(ours)) if theirs != ours);
    differ(process.read("uid_map"), fs::read("/proc/self/uid_map"))
        || differ(process.read("gid_map"), fs::read("/proc/self/gid_map"))
}

/// Returns whether we are in the initial user namespace, in which every id is mapped to itself, so that
/// our capabilities count for every process.
pub(crate) fn is_initial_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

pub(crate) fn yama_scope() -> Option<u8> {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    scope.trim().parse().ok()
}

pub(crate) fn user_name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_capabilities_have_to_be_a_superset() {
        let own = Process::open(std::process::id() as i32).unwrap();
        let with = |permitted, effective| Status {
            permitted,
            effective,
            bounding: CAP_SYS_PTRACE,
            ..Status::default()
        };
        for (effective, is_denied) in [(0b11, false), (0b01, true), (0, true)] {
            let checks = AccessChecks {
                process: &own,
                theirs: with(0b11, 0),
                ours: with(0b11, effective),
                is_privileged: false,
                is_initial: true,
            };
            let denial = checks.capabilities();
            assert_eq!(denial, is_denied.then_some(Denial::MorePrivileged));
        }
    }
}
