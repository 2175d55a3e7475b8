//! Locks on open files (fcntl(2), "Open file description locks"): the kernel releases one when its file is
//! closed, at the latest when the process that holds it exits or is killed.

use std::fs::File;
use std::ops::Range;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// What a lock excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockKind {
    /// Exclusive locks. The file has to be readable.
    Shared,
    /// All other locks. The file has to be writable.
    Exclusive,
}

/// All bytes of a file, those written later included.
pub(crate) const WHOLE: Range<u64> = 0..0;

/// Locks bytes of a file.
///
/// # Errors
///
/// If another open file has a lock that excludes this one, or the kernel refuses.
pub(crate) fn lock(file: &File, kind: LockKind, bytes: Range<u64>) -> nix::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&flock(kind, bytes))).map(drop)
}

/// Releases a lock, even if a forked child has the same open file.
pub(crate) fn unlock(file: &File, bytes: Range<u64>) {
    let mut lock = flock(LockKind::Shared, bytes);
    lock.l_type = libc::F_UNLCK as i16;
    // If this fails, the lock is released when the last descriptor of the open file is closed.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&lock));
}

/// Returns whether another open file has a lock that excludes this one.
///
/// # Errors
///
/// If the kernel refuses.
pub(crate) fn is_excluded(file: &File, kind: LockKind, bytes: Range<u64>) -> nix::Result<bool> {
    let mut lock = flock(kind, bytes);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(lock.l_type != libc::F_UNLCK as i16)
}

fn flock(kind: LockKind, bytes: Range<u64>) -> libc::flock {
    let kind = match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    };
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: bytes.start as i64,
        // fcntl(2): 0 stands for all bytes from the start on.
        l_len: (bytes.end - bytes.start) as i64,
        // fcntl(2): "l_pid must be set to zero".
        l_pid: 0,
    }
}
