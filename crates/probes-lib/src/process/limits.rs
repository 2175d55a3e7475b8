//! The limits of a process for the memory that it maps (setrlimit(2)), and that it and others use (cgroups(7)).

use std::str;

use crate::error::{Error, MemoryLimit, MemoryLimitKind, ObserveError, Result};
use crate::process::status::Status;
use crate::process::{Process, cgroup};

/// More than any observation reserves: the largest parts of one are the 264 MiB of `watch -stack`, and 90 MiB of slow calls.
const MAX_NEEDED: u64 = 1 << 30;

/// How many bytes are reserved at most in a process that has locked its memory: filling them takes about 50 ms.
const MAX_LOCKED: u64 = 32 << 20;

/// Memory that is to be mapped into a process, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeededMemory {
    pub(crate) all: u64,
    /// Private and writable.
    pub(crate) data: u64,
}

/// Refuses to map memory if a limit would then leave the process less than the same amount again: the process might
/// fail later. For a cgroup, which counts only memory that is used, the amount itself has to be left. Refuses also a
/// large amount if the process has locked its memory, because all of it would be filled at once.
///
/// # Errors
///
/// [`ObserveError::MemoryLimited`], [`ObserveError::MemoryLocked`]. Limits that cannot be read are left to the kernel.
pub(crate) fn refuse_tight(process: &Process, needed: NeededMemory) -> Result<()> {
    let refused = |kind| Err(Error::of_process(process.pid(), kind));
    let status = process.status().ok();
    if needed.all > MAX_LOCKED && status.as_ref().is_some_and(locks_all) {
        return refused(ObserveError::MemoryLocked { needed: needed.all });
    }
    for limit in all(process, status.as_ref()) {
        let needed = match limit.kind {
            MemoryLimitKind::AddressSpace | MemoryLimitKind::Cgroup => needed.all,
            MemoryLimitKind::Data => needed.data,
        };
        if usable(&limit) < needed {
            return refused(ObserveError::MemoryLimited { needed, limit });
        }
    }
    Ok(())
}

/// Returns whether a process has locked nearly all its resident memory: parts that nobody may access and those of
/// devices are never locked. Then what is mapped later may be locked, too.
fn locks_all(status: &Status) -> bool {
    status.locked > 0 && status.locked >= status.resident / 10 * 9
}

/// Returns the soft limit that has this name in `/proc/PID/limits`; `None` if there is none, or it cannot be read.
pub(crate) fn limit_of(process: &Process, name: &str) -> Option<u64> {
    let limits = process.read_of_living_thread("limits").ok()?;
    soft_limit(&limits, name.as_bytes())
}

/// Returns which limit leaves a process the least memory; `None` if there is none, or the limits cannot be read.
pub(crate) fn tightest(process: &Process) -> Option<MemoryLimit> {
    let status = process.status().ok();
    let limits = all(process, status.as_ref());
    limits.into_iter().min_by_key(usable)
}

/// Returns the limits that there are; `status` is that of the process, if it can be read.
fn all(process: &Process, status: Option<&Status>) -> Vec<MemoryLimit> {
    let own = process.read_of_living_thread("limits").ok();
    let own = own.zip(status).map(|(limits, status)| {
        let of = |kind, name: &[u8], used| {
            let limit = soft_limit(&limits, name)?;
            Some(MemoryLimit { kind, limit, used })
        };
        let space = status.address_space;
        [
            of(MemoryLimitKind::AddressSpace, b"Max address space", space),
            of(MemoryLimitKind::Data, b"Max data size", status.data),
        ]
    });
    let own = own.into_iter().flatten().flatten();
    own.chain(cgroup::memory_limit(process)).collect()
}

/// Returns whether a limit leaves more than any observation needs.
pub(crate) fn is_ample(limit: &MemoryLimit) -> bool {
    usable(limit) > MAX_NEEDED
}

/// Returns how much may be mapped: half of what a limit leaves, so that the process has as much again; all that a
/// cgroup leaves, because a cgroup counts only memory that is used.
fn usable(limit: &MemoryLimit) -> u64 {
    let left = limit.limit.saturating_sub(limit.used);
    match limit.kind {
        MemoryLimitKind::AddressSpace | MemoryLimitKind::Data => left / 2,
        MemoryLimitKind::Cgroup => left,
    }
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
        let usable = |kind, limit, used| usable(&MemoryLimit { kind, limit, used });
        for kind in [MemoryLimitKind::AddressSpace, MemoryLimitKind::Data] {
            assert_eq!((usable(kind, 300, 100), usable(kind, 299, 100)), (100, 99));
            assert_eq!(usable(kind, 50, 100), 0);
            assert_eq!(usable(kind, u64::MAX, 0), u64::MAX / 2);
        }
        assert_eq!(usable(MemoryLimitKind::Cgroup, 300, 100), 200);
        assert_eq!(usable(MemoryLimitKind::Cgroup, 50, 100), 0);
    }
}
