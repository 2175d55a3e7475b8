//! Reads the functions of a file with arbitrary bytes (a memfd). The tests of the library check the corpus in the
//! same way.

#![no_main]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use nix::sys::memfd::{MFdFlags, memfd_create};
use probes_lib::FunctionTable;

static FILE: LazyLock<(File, String)> = LazyLock::new(|| {
    let file = memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("memory for a file");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    (file.into(), path)
});

fuzz_target!(|bytes: &[u8]| {
    let (file, path) = &*FILE;
    file.set_len(bytes.len() as u64).expect("memory");
    file.write_all_at(bytes, 0).expect("memory");
    match FunctionTable::read(path) {
        // Writing the message must not panic.
        Err(error) => drop(error.to_string()),
        Ok(table) => {
            let mut last = None;
            for function in table.functions() {
                assert!(last < Some(function.address()) && function.len() > 0);
                last = Some(function.address());
                for name in function.names() {
                    assert!(!name.text.is_empty());
                }
            }
        }
    }
});
