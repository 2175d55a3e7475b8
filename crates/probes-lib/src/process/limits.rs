//! The limits of a process (setrlimit(2)) for the memory that it maps.

use std::str;

use crate::error::{Error, MemoryLimit, ObserveError, Result};
use crate::process::Process;

/// Memory that is to be mapped into a process, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeededMemory {
    pub(crate) all: u64,
    /// Private and writable.
    pub(crate) data: u64,
}

/// Refuses to map memory if a limit would then leave the process less than as much again: it may fail for lack of
/// memory later.
///
/// # Errors
///
/// [`ObserveError::MemoryLimited`]. Limits that cannot be read are left to the kernel.
pub(crate) fn refuse_tight(process: &Process, needed: NeededMemory) -> Result<()> {
    let (Ok(limits), Ok(status)) = (process.read_of_living_thread("limits"), process.status())
    else {
        return Ok(());
    };
    let check = |resource, name: &[u8], used, needed: u64| match soft_limit(&limits, name) {
        Some(limit) if leaves_little(limit, used, needed) => Err(Error::of_process(
            process.pid(),
            ObserveError::MemoryLimited {
                needed,
                limit: MemoryLimit {
                    resource,
                    limit,
                    used,
                },
            },
        )),
        _ => Ok(()),
    };
    let used = status.address_space;
    check("RLIMIT_AS", b"Max address space", used, needed.all)?;
    check("RLIMIT_DATA", b"Max data size", status.data, needed.data)
}

/// Returns the soft limit that has this name in `/proc/PID/limits`; `None` if there is none, or it cannot be read.
pub(crate) fn limit_of(process: &Process, name: &str) -> Option<u64> {
    let limits = process.read_of_living_thread("limits").ok()?;
    soft_limit(&limits, name.as_bytes())
}

/// Returns which limit leaves a process the least memory to map; `None` if there is none, or the limits cannot be read.
pub(crate) fn tightest(process: &Process) -> Option<MemoryLimit> {
    let limits = process.read_of_living_thread("limits").ok()?;
    let status = process.status().ok()?;
    let all = [
        ("RLIMIT_AS", &b"Max address space"[..], status.address_space),
        ("RLIMIT_DATA", b"Max data size", status.data),
    ];
    let found = all.into_iter().filter_map(|(resource, name, used)| {
        let limit = soft_limit(&limits, name)?;
        Some(MemoryLimit {
            resource,
            limit,
            used,
        })
    });
    found.min_by_key(|it| it.limit.saturating_sub(it.used))
}

/// Returns whether less than `needed` would be left of a limit once `needed` is mapped.
fn leaves_little(limit: u64, used: u64, needed: u64) -> bool {
    limit.saturating_sub(used) / 2 < needed
}

/// Returns a soft limit, in the unit of its line, of `/proc/PID/limits`; `None` if there is none.
fn soft_limit(limits: &[u8], name: &[u8]) -> Option<u64> {
    let mut lines = limits.split(|&byte| byte == b'\n');
    let rest = lines.find_map(|line| line.strip_prefix(name))?;
    let mut words = str::from_utf8(rest).ok()?.split_ascii_whitespace();
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limits_are_read() {
        let limits = b"\
Limit                     Soft Limit           Hard Limit           Units     \n\
Max data size             unlimited            unlimited            bytes     \n\
Max address space         31457280             unlimited            bytes     \n";
        assert_eq!(soft_limit(limits, b"Max address space"), Some(31_457_280));
        assert_eq!(soft_limit(limits, b"Max data size"), None);
        assert_eq!(soft_limit(limits, b"Max stack size"), None);
        assert_eq!(soft_limit(b"Max address space", b"Max address space"), None);
    }

    #[test]
    fn as_much_again_has_to_be_left() {
        assert!(!leaves_little(300, 100, 100) && leaves_little(299, 100, 100));
        assert!(leaves_little(50, 100, 1) && !leaves_little(50, 100, 0));
        assert!(leaves_little(u64::MAX, 0, u64::MAX));
    }
}
