//! Descriptors of processes.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use nix::errno::Errno;

/// Opens a descriptor "that refers to the process" (pidfd_open(2)), readable once it has exited.
pub(crate) fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer. The libc crate has no function for it.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: the kernel has just opened it for us, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
