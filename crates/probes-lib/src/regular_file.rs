//! Opens files that may be devices or pipes: to open one of these may have an effect, or wait.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;

/// Opens for reading what was found by a descriptor of `O_PATH`, if it is a regular file.
///
/// # Errors
///
/// `EINVAL` if it is another kind of file; also if it cannot be opened.
pub(crate) fn open_found(found: &File) -> io::Result<File> {
    if !found.metadata()?.is_file() {
        return Err(Errno::EINVAL.into());
    }
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}
