//! [`Source`]: where the bytes of a file of runtime events are read: in the file, which can be read even after the
//! process has exited, or in the memory that it is mapped to.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{major, minor};

use super::ring::RingBytes;
use crate::address::LiveAddr;
use crate::error::{Operation, Result};
use crate::memory::ReadMemory;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::process::{Process, denial};

/// Where the bytes are.
#[derive(Debug)]
pub(super) enum Source {
    File(File, u64),
    Memory(ProcessMemory, Mapping),
}

impl Source {
    /// Opens the file that a process has mapped; if that cannot be opened, the memory of the process.
    pub(super) fn of_mapping(process: &Process, mapping: &Mapping) -> Result<Source> {
        let is_mapped = |file: &File| {
            let metadata = file.metadata()?;
            let device = (major(metadata.dev()) as u32, minor(metadata.dev()) as u32);
            Ok((device, metadata.ino()) == (mapping.device, mapping.inode) && metadata.is_file())
        };
        let (start, end) = (mapping.start.0, mapping.end.0);
        // Works for a file without a name, too, but only root can open it.
        let by_address = process
            .open_file(&format!("map_files/{start:x}-{end:x}"), OFlag::O_RDONLY)
            .ok()
            .filter(|file| file.metadata().is_ok_and(|it| it.is_file()));
        let path = Path::new(OsStr::from_bytes(mapping.path()));
        let by_path = || process.open_mapped(path, is_mapped);
        let file = by_address.or_else(|| by_path().ok());
        if let Some(source) = file.and_then(|file| Source::of_file(file).ok()) {
            return Ok(source);
        }
        let memory = ProcessMemory::open(process, OFlag::O_RDONLY);
        let memory =
            memory.map_err(|source| denial::denied_or_exited(process, Operation::Read, source))?;
        Ok(Source::Memory(memory, mapping.clone()))
    }

    pub(super) fn of_file(file: File) -> io::Result<Source> {
        let len = file.metadata()?.len();
        Ok(Source::File(file, len))
    }

    /// Its length in bytes when it was opened.
    pub(super) fn len(&self) -> u64 {
        match self {
            Source::File(_, len) => *len,
            Source::Memory(_, mapping) => mapping.end.0 - mapping.start.0,
        }
    }
}

impl RingBytes for Source {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Source::File(file, _) => file.read_exact_at(bytes, at),
            Source::Memory(memory, mapping) => {
                let read = memory.read(LiveAddr(mapping.start.0 + at), bytes);
                read.map_err(|error| match error.kind() {
                    // The process has exited, or exec'd another program.
                    io::ErrorKind::UnexpectedEof => Errno::ESRCH.into(),
                    _ => error,
                })
            }
        }
    }
}
