//! [`Object`]: an ELF object (executable, shared object, plugin) in the memory of a process: its
//! probes, and where it is loaded. [`UnreadableObject`]: one of which that cannot be told.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::source::SourceMap;
use crate::elf::table::ProbeTable;
use crate::error::{Error, Result};
use crate::process::maps::Mapping;

/// An object that is mapped into a process.
#[derive(Clone, Debug)]
pub struct Object {
    /// Shared between the places where one file is loaded.
    pub(crate) table: Arc<ProbeTable>,
    pub(crate) bias: LoadBias,
    /// For what is read from it later.
    pub(crate) elf: Arc<ElfFile>,
    /// Tells the mappings of the file from others.
    pub(crate) file: FileId,
}

/// A file that is mapped into a process with code in it, and could not be looked into. It may have
/// probes that we do not know of.
#[derive(Clone, Debug)]
pub struct UnreadableObject {
    /// The file, as the kernel names it.
    pub path: PathBuf,
    /// Why.
    pub why: Arc<Error>,
}

/// A file, as the maps of a process tell one from the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    /// Major and minor number, as the maps have them: on some file systems (btrfs, overlayfs) stat(2)
    /// says another. `None` if only stat was asked.
    pub(crate) device: Option<(u32, u32)>,
    pub(crate) inode: u64,
}

impl FileId {
    pub(crate) fn is_of(self, mapping: &Mapping) -> bool {
        let same_device = self.device.is_none_or(|device| device == mapping.device);
        same_device && self.inode == mapping.inode
    }
}

impl Object {
    /// The file, as the kernel names it.
    pub fn path(&self) -> &Path {
        self.table.path()
    }

    /// The probes of the file.
    pub fn table(&self) -> &ProbeTable {
        &self.table
    }

    /// What is added to the file's addresses to get the process's.
    pub fn load_bias(&self) -> LoadBias {
        self.bias
    }

    /// Opens the file for source lines and functions. Takes longer the more debugging information
    /// it has, unlike anything else here.
    ///
    /// # Errors
    ///
    /// If the file cannot be read.
    pub fn source_map(&self) -> Result<SourceMap> {
        let own = format!("/proc/self/fd/{}", self.elf.as_raw_fd());
        SourceMap::open(Path::new(&own), self.table.path())
    }

    /// Where its first segment is.
    pub(crate) fn start(&self) -> LiveAddr {
        let segments = self.table.segments().iter();
        let first = segments.map(|segment| segment.start).min();
        self.bias.live(first.unwrap_or(FileAddr(0)))
    }

    /// Whether both are the same file in the same place.
    pub(crate) fn is_same(&self, other: &Object) -> bool {
        (self.file, self.bias) == (other.file, other.bias)
    }

    /// Whether the mapping is of this object's file.
    pub(crate) fn is_mapped(&self, mapping: &Mapping) -> bool {
        self.file.is_of(mapping)
    }
}
