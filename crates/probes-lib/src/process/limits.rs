//! The limits of a process (setrlimit(2)) that keep it from mapping memory.

use std::str;

use crate::error::MemoryLimit;
use crate::process::Process;

/// Returns the limit that keeps a process from mapping `len` bytes more of private memory; `None` if there is no
/// such limit, or it cannot be read.
pub(crate) fn exceeded(process: &Process, len: u64) -> Option<MemoryLimit> {
    let limits = process.read_of_living_thread("limits").ok()?;
    let status = process.status().ok()?;
    let limit = |resource: &'static str, name: &[u8], used: u64| {
        let limit = soft_limit(&limits, name)?;
        let is_exceeded = used.saturating_add(len) > limit;
        is_exceeded.then_some(MemoryLimit {
            resource,
            limit,
            used,
        })
    };
    limit("RLIMIT_AS", b"Max address space", status.address_space)
        .or_else(|| limit("RLIMIT_DATA", b"Max data size", status.data))
}

/// Returns a soft limit, in bytes, of `/proc/PID/limits`; `None` if there is none.
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
}
