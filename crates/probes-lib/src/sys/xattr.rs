//! Extended attributes of files.

use std::ffi::{CStr, CString};
use std::io;
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
