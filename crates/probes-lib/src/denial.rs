//! Why the kernel said EPERM or EACCES: the checks of ptrace(2), "Ptrace access mode checking",
//! gone through again with what /proc shows.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use nix::errno::Errno;
use nix::unistd::{Uid, User, geteuid};

use crate::error::{Denial, Error, ErrorKind};
use crate::process::{Process, name_of};
use crate::sys::ptrace;

/// `CAP_SYS_PTRACE` of capability.h.
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// The error for an `operation` on a process that failed with `errno`.
pub(crate) fn error(process: &Process, operation: &'static str, errno: Errno) -> Error {
    let pid = process.pid();
    match errno {
        // What is left of it belongs to root, and has no memory to look into.
        Errno::EPERM | Errno::EACCES if process.has_ended() => ErrorKind::Exited { pid },
        Errno::EPERM | Errno::EACCES => ErrorKind::Denied {
            pid,
            operation,
            denial: of_process(process, errno),
        },
        Errno::ENOENT | Errno::ESRCH => ErrorKind::Exited { pid },
        _ => ErrorKind::system(pid, "attach to a thread", errno.into()),
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
fn by_tracer(tracer: i32) -> Denial {
    let leader = Process::open(tracer).and_then(|tracer| tracer.leader());
    let tracer = leader.unwrap_or(tracer);
    Denial::Traced {
        tracer,
        name: name_of(tracer),
    }
}

fn of_process(process: &Process, errno: Errno) -> Denial {
    let status = process.status().unwrap_or_default();
    if status.tracer != 0 {
        return by_tracer(status.tracer);
    }
    if ptrace::is_filtered() {
        return Denial::Seccomp;
    }
    let privileged = has_sys_ptrace();
    if !privileged && status.uid != geteuid().as_raw() {
        return Denial::OtherUser {
            uid: status.uid,
            name: user_name(status.uid),
        };
    }
    if !is_own_user_namespace(process) {
        return Denial::UserNamespace;
    }
    if !privileged {
        // The files in /proc of a process that is not dumpable belong to root.
        let owner = fs::metadata(format!("/proc/{}/maps", process.pid())).map(|m| m.uid());
        if owner.is_ok_and(|owner| owner != status.uid) {
            return Denial::NotDumpable;
        }
    }
    match yama_scope() {
        Some(scope) if scope == 3 || (scope > 0 && !privileged) => Denial::Yama { scope },
        _ if errno == Errno::EACCES => Denial::Policy,
        _ => Denial::Unexplained,
    }
}

/// Why a child that is about to execute a program may not be traced.
pub(crate) fn of_own_child(errno: Errno) -> Denial {
    match yama_scope() {
        _ if ptrace::is_filtered() => Denial::Seccomp,
        Some(scope) if scope > 1 => Denial::Yama { scope },
        _ if errno == Errno::EACCES => Denial::Policy,
        _ => Denial::Unexplained,
    }
}

fn has_sys_ptrace() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|caps| u64::from_str_radix(caps.trim(), 16).ok())
        .is_some_and(|caps| caps & CAP_SYS_PTRACE != 0)
}

fn is_own_user_namespace(process: &Process) -> bool {
    match (
        process.read_link("ns/user"),
        fs::read_link("/proc/self/ns/user"),
    ) {
        (Ok(theirs), Ok(ours)) => theirs == ours,
        // Reading the link takes the same permission that we were denied.
        _ => true,
    }
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
