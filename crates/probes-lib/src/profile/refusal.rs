//! Why the kernel does not record waits, or does not sample threads: what the errors of perf_event_open(2), and of mapping its rings, mean here.

use std::fs;
use std::io;

use crate::process::denial::{is_initial_user_namespace, own_status};

/// `CAP_SYS_ADMIN` and `CAP_PERFMON` of capability.h: either is enough.
const PERFMON: u64 = 1 << 21 | 1 << 38;

/// From this value of `kernel.perf_event_paranoid` on, ordinary users may open no event, on kernels that know the
/// value.
const NONE_PERMITTED: i32 = 3;

/// From this value on, no samples are permitted to them while threads are in the kernel.
const NONE_IN_KERNEL: i32 = 2;

/// What decides whether perf events are permitted.
struct Circumstances {
    /// `kernel.perf_event_paranoid`; `None` if this kernel has no perf events.
    paranoid: Option<i32>,
    /// Whether this process has a seccomp filter.
    is_filtered: bool,
    is_privileged: bool,
}

impl Circumstances {
    fn of_this_process() -> Circumstances {
        let status = own_status();
        Circumstances {
            paranoid: paranoid(),
            is_filtered: status.seccomp != 0,
            // That of another user namespace does not count.
            is_privileged: status.effective & PERFMON != 0 && is_initial_user_namespace(),
        }
    }

    /// Returns what an error means, of an event that samples threads in the kernel or of another; `None` if there is no more to say.
    fn meaning(&self, errno: i32, in_kernel: bool) -> Option<String> {
        let filter = "a seccomp filter of this tool may refuse it, as in many containers";
        let meaning = match (errno, self.paranoid) {
            (libc::EACCES | libc::EPERM, Some(paranoid))
                if in_kernel && paranoid >= NONE_IN_KERNEL && !self.is_privileged =>
            {
                return Some(format!(
                    "kernel.perf_event_paranoid={paranoid} permits samples in the kernel only with CAP_PERFMON; 1 permits them for \
                     processes of the same user"
                ));
            }
            (libc::EACCES | libc::EPERM, Some(paranoid))
                if paranoid >= NONE_PERMITTED && !self.is_privileged =>
            {
                return Some(format!(
                    "kernel.perf_event_paranoid={paranoid} permits it only with CAP_PERFMON; 2 permits it for processes of the \
                     same user"
                ));
            }
            (libc::EACCES | libc::EPERM | libc::ENOSYS, _) if self.is_filtered => filter,
            (libc::EACCES, _) => "the process is another user's, or a security module forbids it",
            (libc::EPERM, _) => {
                "the kernel is locked down, a security module forbids it, or no more memory may be locked for its rings \
                 (kernel.perf_event_mlock_kb, ulimit -l)"
            }
            (libc::ENOSYS, _) => "this kernel has no perf events",
            (libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP, _) => {
                "this machine has no unit (PMU) for such events"
            }
            (libc::EMFILE | libc::ENFILE, _) => "too many files are open (ulimit -n)",
            (libc::ENOMEM, _) => "there is too little memory for its rings",
            _ => return None,
        };
        Some(meaning.to_owned())
    }
}

/// Returns `kernel.perf_event_paranoid`; `None` if the kernel has no perf events.
pub(crate) fn paranoid() -> Option<i32> {
    let value = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid");
    value.ok()?.trim().parse().ok()
}

/// Says why waits are not recorded, or why threads are not sampled, in the kernel or at all.
pub(crate) fn text(why: &io::Error, in_kernel: bool) -> String {
    let Some(errno) = why.raw_os_error() else {
        return format!("perf_event_open is not used: {why}");
    };
    let meaning = Circumstances::of_this_process().meaning(errno, in_kernel);
    let meaning = meaning.map_or_else(String::new, |meaning| format!(": {meaning}"));
    format!("perf_event_open is refused: {why}{meaning}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_their_meanings() {
        let here = |paranoid, is_filtered, is_privileged| Circumstances {
            paranoid,
            is_filtered,
            is_privileged,
        };
        for (here, errno, expected) in [
            (
                here(Some(3), false, false),
                libc::EACCES,
                "perf_event_paranoid=3 permits",
            ),
            (
                here(Some(4), true, false),
                libc::EPERM,
                "perf_event_paranoid=4 permits",
            ),
            (here(Some(4), true, true), libc::EPERM, "a seccomp filter"),
            (here(Some(2), true, false), libc::EACCES, "a seccomp filter"),
            (here(Some(2), true, true), libc::ENOSYS, "a seccomp filter"),
            (here(Some(2), false, false), libc::EACCES, "another user's"),
            (here(Some(2), false, true), libc::EPERM, "locked down"),
            (here(None, false, true), libc::ENOSYS, "has no perf events"),
            (here(Some(2), false, true), libc::ENOENT, "(PMU)"),
            (here(Some(2), false, true), libc::EMFILE, "too many files"),
            (
                here(Some(2), false, true),
                libc::ENOMEM,
                "too little memory",
            ),
        ] {
            let meaning = here.meaning(errno, false).unwrap();
            assert!(meaning.contains(expected), "{errno}: {meaning}");
        }
        assert_eq!(
            here(Some(2), false, true).meaning(libc::EINVAL, false),
            None
        );
        for (here, expected) in [
            (
                here(Some(2), true, false),
                "paranoid=2 permits samples in the kernel",
            ),
            (
                here(Some(4), false, false),
                "paranoid=4 permits samples in the kernel",
            ),
            (here(Some(1), true, false), "a seccomp filter"),
            (here(Some(2), true, true), "a seccomp filter"),
        ] {
            let meaning = here.meaning(libc::EACCES, true).unwrap();
            assert!(meaning.contains(expected), "{meaning}");
        }
        let own = text(&io::Error::other("there are too many threads"), false);
        assert_eq!(
            own,
            "perf_event_open is not used: there are too many threads"
        );
    }
}
