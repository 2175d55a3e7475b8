//! Why the kernel said EPERM or EACCES: the checks of ptrace(2), "Ptrace access mode checking",
//! gone through again with what /proc shows.

use std::fs;
use std::io;

use nix::errno::Errno;
use nix::unistd::{Uid, User, geteuid};

use crate::error::{Denial, Error, ErrorKind};
use crate::process::{Process, Status, name_of};
use crate::sys::ptrace;
use crate::sys::threads::TRACER_NAME;

/// `CAP_SYS_PTRACE` of capability.h.
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// The error for an `operation` on a process that failed with `errno`.
pub(crate) fn error(process: &Process, operation: &'static str, errno: Errno) -> Error {
    let pid = process.pid();
    match errno {
        // What is left of it belongs to root, and has no memory to look into.
        Errno::EPERM | Errno::EACCES if process.has_ended() => ErrorKind::Exited { pid },
        Errno::EPERM | Errno::EACCES => match of_process(process, errno) {
            // While it ended, this looked like another reason.
            _ if process.has_ended() => ErrorKind::Exited { pid },
            denial => ErrorKind::Denied {
                pid,
                operation,
                denial,
            },
        },
        Errno::ENOENT | Errno::ESRCH => ErrorKind::Exited { pid },
        _ => ErrorKind::system(pid, "trace a thread", errno.into()),
    }
    .into()
}

/// The error for an `operation` on a process that failed with `source`.
pub(crate) fn or_lost(process: &Process, operation: &'static str, source: io::Error) -> Error {
    match source.raw_os_error().map(Errno::from_raw) {
        Some(errno @ (Errno::EPERM | Errno::EACCES)) => error(process, operation, errno),
        _ => process.lost(source),
    }
}

/// The error for an `operation` on a process of which `tracer` traces a thread.
pub(crate) fn traced(process: &Process, operation: &'static str, tracer: i32) -> Error {
    ErrorKind::Denied {
        pid: process.pid(),
        operation,
        denial: by_tracer(tracer),
    }
    .into()
}

/// TracerPid is the id of a thread; people know the process.
fn by_tracer(tid: i32) -> Denial {
    let thread = Process::open(tid).ok();
    let status = thread.as_ref().and_then(|thread| thread.status().ok());
    let tracer = status.as_ref().map_or(tid, |status| status.tgid);
    let name = name_of(tracer);
    match status {
        Some(status) if status.name != TRACER_NAME => Denial::Traced { tracer, name },
        // One of ours, or one that has ended since: neither stays.
        Some(_) | None => Denial::BeingChanged { tracer, name },
    }
}

fn of_process(process: &Process, errno: Errno) -> Denial {
    let theirs = process.status().unwrap_or_default();
    let ours = own_status();
    if theirs.tracer != 0 {
        return by_tracer(theirs.tracer);
    }
    if ptrace::is_filtered() {
        return Denial::Seccomp;
    }
    let privileged = ours.effective & CAP_SYS_PTRACE != 0;
    if !privileged {
        if theirs.uid != geteuid().as_raw() {
            return Denial::OtherUser {
                uid: theirs.uid,
                name: user_name(theirs.uid),
            };
        }
        // "The caller's permitted capability set is a superset of the target's."
        if theirs.permitted & !ours.permitted != 0 {
            return Denial::MorePrivileged;
        }
        // The files in /proc of a process that is not dumpable belong to root.
        if process.owner().is_ok_and(|owner| owner != theirs.uid) {
            return Denial::NotDumpable;
        }
    }
    if is_in_other_user_namespace(process) || (privileged && !is_initial_user_namespace()) {
        return Denial::UserNamespace;
    }
    match yama_scope() {
        Some(scope) if scope == 3 || (scope > 0 && !privileged) => Denial::Yama { scope },
        // The files in /proc say EACCES whatever the reason.
        _ if errno == Errno::EACCES && privileged => Denial::Policy,
        _ => Denial::Unexplained,
    }
}

/// Why a child that is about to execute a program may not be traced.
pub(crate) fn of_own_child(errno: Errno) -> Denial {
    let ours = own_status();
    match yama_scope() {
        _ if ptrace::is_filtered() => Denial::Seccomp,
        // Who traces us may trace our children as well.
        _ if ours.tracer != 0 => by_tracer(ours.tracer),
        Some(scope) if scope > 1 => Denial::Yama { scope },
        _ if errno == Errno::EACCES => Denial::Policy,
        _ => Denial::Unexplained,
    }
}

fn own_status() -> Status {
    let own = Process::open(std::process::id() as i32).ok();
    own.and_then(|own| own.status().ok()).unwrap_or_default()
}

/// Reading the link takes the same permission that we were denied, so it seldom tells.
fn is_in_other_user_namespace(process: &Process) -> bool {
    match (
        process.read_link("ns/user"),
        fs::read_link("/proc/self/ns/user"),
    ) {
        (Ok(theirs), Ok(ours)) => theirs != ours,
        _ => false,
    }
}

/// Whether our capabilities are good for every process: in the first user namespace every id is
/// mapped to itself.
fn is_initial_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

fn yama_scope() -> Option<u8> {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?;
    scope.trim().parse().ok()
}

fn user_name(uid: u32) -> String {
    match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        _ => "unknown".to_owned(),
    }
}
