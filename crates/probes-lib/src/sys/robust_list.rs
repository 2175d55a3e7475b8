//! The robust futexes of a thread, which the kernel releases if it dies. The head of their list is in its thread
//! control block.

use std::io;
use std::ptr;

use nix::errno::Errno;

/// Returns the address that a thread has given to set_robust_list(2), in its process; 0 if it has given none.
pub(crate) fn robust_list(tid: i32) -> io::Result<u64> {
    let mut head: *mut libc::c_void = ptr::null_mut();
    let mut len: libc::size_t = 0;
    // SAFETY: the kernel writes a pointer and a length to these variables; libc has no function for it.
    let done = unsafe { libc::syscall(libc::SYS_get_robust_list, tid, &mut head, &mut len) };
    Errno::result(done)?;
    Ok(head as u64)
}
