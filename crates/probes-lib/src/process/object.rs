//! [`Object`]: an ELF object (executable, shared object, plugin) in the memory of a process: its
//! probes, and where it is loaded. [`UnreadableObject`]: one whose file could not be read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address::{FileAddr, LiveAddr, LoadBias};
use crate::elf::ElfFile;
use crate::elf::source::SourceMap;
use crate::elf::table::ProbeTable;
use crate::error::{Error, Result};
use crate::process::maps::Mapping;

/// An object that is mapped into a process.
///
/// ```no_run
/// let target = probes_lib::Target::open(4242)?;
/// for object in target.objects() {
///     println!("{}: {} probes", object.path().display(), object.table().probes().len());
/// }
/// for object in target.unreadable() {
///     println!("{}: {}", object.path.display(), object.why);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Object {
    /// Shared between the places where one file is loaded.
    pub(crate) table: Arc<ProbeTable>,
    pub(crate) bias: LoadBias,
    /// The file, from which more may be read later.
    pub(crate) elf: Arc<ElfFile>,
    /// Identifies the mappings of the file.
    pub(crate) file: FileId,
}

/// A file that is mapped into a process with code in it, and could not be read. It may have probes that
/// are not known.
///
/// [`Object`] has an example.
#[derive(Clone, Debug)]
pub struct UnreadableObject {
    /// The file, as the kernel names it.
    pub path: PathBuf,
    /// Why it could not be read.
    pub why: Arc<Error>,
    /// Whether it may have notes of USDT probes.
    pub(crate) may_have_usdt_probes: bool,
}

/// What identifies a file in the maps of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    /// Major and minor number in the maps: on some file systems (btrfs, overlayfs), stat(2) returns
    /// others. `None` if only the numbers of stat(2) are known.
    pub(crate) device: Option<(u32, u32)>,
    pub(crate) inode: u64,
}

impl FileId {
    /// Returns whether the mapping is of this file.
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

    /// What is added to an address in the file to get the address in the process.
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
        SourceMap::of(&self.elf)
    }

    /// Returns the address of its first segment.
    pub(crate) fn start(&self) -> LiveAddr {
        let segments = self.table.segments().iter();
        let first = segments.map(|segment| segment.start).min();
        self.bias.live(first.unwrap_or(FileAddr(0)))
    }

    /// Returns whether both are the same file at the same place.
    pub(crate) fn is_same(&self, other: &Object) -> bool {
        (self.file, self.bias) == (other.file, other.bias)
    }

    /// Returns whether the mapping is of this object's file.
    pub(crate) fn is_mapped_by(&self, mapping: &Mapping) -> bool {
        self.file.is_of(mapping)
    }
}
