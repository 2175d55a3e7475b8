//! A file in memory, of which each run of a target replaces the bytes.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use nix::sys::memfd::{MFdFlags, memfd_create};

static FILE: LazyLock<(File, String)> = LazyLock::new(|| {
    let file = memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("memory for a file");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    (file.into(), path)
});

/// Returns the path of a file with these bytes, until the next call.
pub fn file_with(bytes: &[u8]) -> &'static str {
    let (file, path) = &*FILE;
    file.set_len(bytes.len() as u64).expect("memory");
    file.write_all_at(bytes, 0).expect("memory");
    path
}
