//! Compares kernel resources of two processes.

use std::io;

use nix::errno::Errno;

/// `KCMP_VM` of linux/kcmp.h.
const KCMP_VM: i32 = 1;

/// Returns whether two processes share their memory (kcmp(2)), as after vfork(2) until the child executes a program.
pub(crate) fn shares_memory(one: i32, other: i32) -> io::Result<bool> {
    // SAFETY: takes no pointer; libc has no function for it.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    Ok(Errno::result(order)? == 0)
}
