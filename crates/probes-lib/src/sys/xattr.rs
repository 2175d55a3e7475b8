//! Extended attributes of files.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;

/// Returns the value of an extended attribute (getxattr(2)) that is not longer than `most` bytes.
pub(crate) fn read(file: &Path, name: &CStr, most: usize) -> io::Result<Vec<u8>> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    let mut value = vec![0_u8; most];
    // SAFETY: both strings end with a zero; the kernel writes at most `most` bytes.
    let len = unsafe {
        libc::getxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            most,
        )
    };
    value.truncate(Errno::result(len)? as usize);
    Ok(value)
}

/// Returns whether a file has an extended attribute that is not empty (fgetxattr(2)).
pub(crate) fn is_present(file: &File, name: &CStr) -> bool {
    // SAFETY: the name ends with a zero; with a length of 0, the kernel writes nothing.
    let len = unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), std::ptr::null_mut(), 0) };
    len > 0
}
