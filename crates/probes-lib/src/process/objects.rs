//! Finds the objects of a process: every file that is mapped with code in it, opened and checked to be
//! the one that is mapped.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::OFlag;
use nix::sys::stat::{major, makedev, minor};

use crate::address::PAGE;
use crate::elf::ElfFile;
use crate::elf::file_version::FileVersion;
use crate::elf::table::ProbeTable;
use crate::error::{
    ElfDefect, Error, ErrorKind, FileError, ProbeError, Result, Subject, is_shortage,
};
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::load_bias;
use crate::process::maps::Mapping;
use crate::process::memory::ProcessMemory;
use crate::process::object::{FileId, Object, UnreadableObject};

/// A file with probes that has been read.
pub(crate) type KnownFile = (Arc<ElfFile>, Arc<ProbeTable>);

/// What is known of a file: the outer `None` if it has not been read yet, the inner `None` if
/// it has no probes.
type CacheEntry = Arc<Mutex<Option<Option<KnownFile>>>>;

/// The files that have been read, by device and inode, so that each is read once, however many
/// processes map it.
#[derive(Default)]
pub(crate) struct Files(Mutex<HashMap<(u64, u64), VersionedEntry>>);

/// An entry, and the version of its file, if that is known.
type VersionedEntry = (Option<FileVersion>, CacheEntry);

impl Files {
    /// Returns the file of that device and inode; calls `read` if it has not been read yet, or if the version that was read
    /// is another one. `None` stands for any version.
    pub(crate) fn get(
        &self,
        file: (u64, u64),
        version: Option<FileVersion>,
        read: impl FnOnce() -> Result<Option<KnownFile>>,
    ) -> Result<Option<KnownFile>> {
        let entry = {
            let mut files = lock(&self.0);
            let known = files.entry(file).or_default();
            if version.is_some() && known.0 != version {
                *known = (version, CacheEntry::default());
            }
            known.1.clone()
        };
        // Other threads wait here for this file only.
        let mut entry = lock(&entry);
        if let Some(known) = &*entry {
            return Ok(known.clone());
        }
        let found = read()?;
        *entry = Some(found.clone());
        Ok(found)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The objects of a process other than its executable.
#[derive(Default)]
pub(crate) struct OtherObjects {
    pub(crate) objects: Vec<Object>,
    pub(crate) unreadable: Vec<UnreadableObject>,
}

/// Returns the objects with probes in `maps` except the `executable`.
pub(crate) fn others(
    process: &Process,
    maps: &[Mapping],
    executable: FileId,
    files: &Files,
) -> OtherObjects {
    let mut others = OtherObjects::default();
    let mut seen = HashSet::new();
    for mapping in maps {
        let file = FileId {
            device: Some(mapping.device),
            inode: mapping.inode,
        };
        let is_code = mapping.executable && mapping.inode != 0 && !executable.is_of(mapping);
        if !is_code || !seen.insert(file) {
            continue;
        }
        let (major, minor) = mapping.device;
        let device = makedev(u64::from(major), u64::from(minor));
        let opened = open(process, maps, mapping);
        // One that cannot be opened may have been read when it could be.
        let version = opened
            .as_ref()
            .ok()
            .map(|(_, metadata)| FileVersion::of(metadata));
        let read = || read(opened, process, maps, mapping);
        match files.get((device, mapping.inode), version, read) {
            Ok(Some((elf, table))) => {
                let biases = load_bias::of_object(table.segments(), maps, |one| file.is_of(one));
                others.objects.extend(biases.map(|bias| Object {
                    table: table.clone(),
                    bias,
                    elf: elf.clone(),
                    file,
                }));
            }
            Ok(None) => {}
            Err(why) => {
                others.unreadable.push(unreadable(mapping, why));
            }
        }
    }
    others.objects.sort_by_key(|object| object.start());
    others
}

/// The file of a mapping, which could not be read.
pub(crate) fn unreadable(mapping: &Mapping, why: Error) -> UnreadableObject {
    let path = mapped_path(mapping);
    let path = without_mark(&path).map_or(path.clone(), PathBuf::from);
    UnreadableObject {
        why: Arc::new(about_file(why, &path)),
        path,
        may_have_usdt_probes: true,
    }
}

/// Makes an error name the file if we lacked descriptors or memory, which says nothing about the process.
fn about_file(error: Error, path: &Path) -> Error {
    if !error.is_shortage() || matches!(error.subject(), Subject::File(_)) {
        return error;
    }
    let source = std::error::Error::source(&error).and_then(|it| it.downcast_ref::<io::Error>());
    match source.and_then(io::Error::raw_os_error) {
        Some(errno) => {
            let source = io::Error::from_raw_os_error(errno);
            Error::of_file(path, FileError::Open { source })
        }
        None => error,
    }
}

/// Reads the file of a mapping, whether it has probes or not.
pub(crate) fn elf_of(process: &Process, maps: &[Mapping], mapping: &Mapping) -> Option<ElfFile> {
    let (file, _) = open(process, maps, mapping).ok()?;
    ElfFile::read(file, mapped_path(mapping)).ok()
}

/// Reads the file of a mapping; `None` if it has no probes or is no ELF file.
fn read(
    opened: Result<(File, Metadata)>,
    process: &Process,
    maps: &[Mapping],
    mapping: &Mapping,
) -> Result<Option<KnownFile>> {
    let Some(elf) = opened_code_file(opened, process, maps, mapping)? else {
        return Ok(None);
    };
    match ProbeTable::of(&elf) {
        Ok(table) => Ok(Some((Arc::new(elf), Arc::new(table)))),
        Err(error) if is_not_elf_or_has_no_probes(error.kind()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the file of a mapping of code; `None` if it is no ELF file.
pub(crate) fn code_file(
    process: &Process,
    maps: &[Mapping],
    mapping: &Mapping,
) -> Result<Option<ElfFile>> {
    opened_code_file(open(process, maps, mapping), process, maps, mapping)
}

fn opened_code_file(
    opened: Result<(File, Metadata)>,
    process: &Process,
    maps: &[Mapping],
    mapping: &Mapping,
) -> Result<Option<ElfFile>> {
    let (file, metadata) = match opened {
        Ok(opened) => opened,
        Err(error) if error.is_shortage() => return Err(error),
        Err(error) => match is_elf(process, maps, mapping) {
            Ok(true) => return Err(error),
            // Then it is not known what it is.
            Err(source) if is_shortage(&source) => {
                return Err(Error::of_file(
                    mapped_path(mapping),
                    FileError::Open { source },
                ));
            }
            // Code that a program has generated, or that is not mapped any more.
            Ok(false) | Err(_) => return Ok(None),
        },
    };
    if !metadata.is_file() {
        return Ok(None);
    }
    let path = without_deleted_mark(mapped_path(mapping), metadata.nlink());
    match ElfFile::read(file, path) {
        Ok(elf) => Ok(Some(elf)),
        // Code that a program has generated, written to a file and mapped from there.
        Err(error) if is_not_elf_or_has_no_probes(error.kind()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether the error says that an ELF file has no probes.
pub(crate) fn has_no_probes(kind: &ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Probe(ProbeError::NoProbes { .. })
            | ErrorKind::File(FileError::Elf(ElfDefect::NoSectionHeaders))
    )
}

/// Returns whether the error says that a file is no ELF file or has no probes.
fn is_not_elf_or_has_no_probes(kind: &ErrorKind) -> bool {
    has_no_probes(kind) || matches!(kind, ErrorKind::File(FileError::Elf(ElfDefect::NotElf)))
}

/// Opens the file of a mapping.
fn open(process: &Process, maps: &[Mapping], mapping: &Mapping) -> Result<(File, Metadata)> {
    let is_it = |file: &File| is_mapped(process, maps, mapping, file);
    let path = mapped_path(mapping);
    // By its path, which may lead to another file by now.
    let file = process.open_mapped(&path, is_it).or_else(|error| {
        // A link in /proc/PID/map_files needs a privilege to be opened, and leads also to files
        // without a name, such as deleted ones.
        let range = format!("map_files/{:x}-{:x}", mapping.start.0, mapping.end.0);
        let linked = process.open_file(&range, OFlag::O_RDONLY | OFlag::O_NONBLOCK);
        let found = linked.ok().or_else(|| process.open_held(is_it));
        found.ok_or(error)
    });
    let opened = file.and_then(|file| Ok((file.metadata()?, file)));
    match opened {
        Ok((metadata, file)) => Ok((file, metadata)),
        Err(source) => Err(match without_mark(&path) {
            Some(path) if !is_shortage(&source) => {
                let in_memory = path.as_encoded_bytes().starts_with(b"/memfd:");
                Error::of_file(path, FileError::Nameless { in_memory })
            }
            _ => Error::of_file(path, FileError::Open { source }),
        }),
    }
}

/// Returns whether a file is that of a mapping.
fn is_mapped(
    process: &Process,
    maps: &[Mapping],
    mapping: &Mapping,
    file: &File,
) -> io::Result<bool> {
    let metadata = file.metadata()?;
    if metadata.ino() != mapping.inode {
        return Ok(false);
    }
    let device = metadata.dev();
    if (major(device) as u32, minor(device) as u32) == mapping.device {
        return Ok(true);
    }
    // On some file systems (btrfs, overlayfs) stat(2) and the maps have different devices for one file.
    // So its first page decides: it has the headers, nearly always with the build-id, and is never written to.
    let mut in_memory = vec![0; PAGE as usize];
    if !read_first(process, maps, mapping, &mut in_memory)? {
        return Ok(false);
    }
    let mut in_file = vec![0; in_memory.len().min(metadata.len() as usize)];
    file.read_exact_at(&mut in_file, 0)?;
    Ok(in_memory.starts_with(&in_file))
}

/// Returns whether the file of a mapping may be an ELF file, by its first bytes if they are mapped.
fn is_elf(process: &Process, maps: &[Mapping], mapping: &Mapping) -> io::Result<bool> {
    let mut magic = [0; 4];
    let is_mapped = read_first(process, maps, mapping, &mut magic)?;
    Ok(!is_mapped || magic == *b"\x7fELF")
}

/// Reads the beginning of a mapping's file from memory; returns whether it is mapped.
fn read_first(
    process: &Process,
    maps: &[Mapping],
    mapping: &Mapping,
    bytes: &mut [u8],
) -> io::Result<bool> {
    let is_first =
        |one: &&Mapping| (one.device, one.inode, one.offset) == (mapping.device, mapping.inode, 0);
    let Some(first) = maps.iter().find(is_first) else {
        return Ok(false);
    };
    ProcessMemory::open(process, OFlag::O_RDONLY)?.read(first.start, bytes)?;
    Ok(true)
}

/// Returns the path of a mapping's file.
fn mapped_path(mapping: &Mapping) -> PathBuf {
    let path = mapping.path();
    // proc(5): "Except for newline, which is represented as an octal escape sequence".
    let mut name = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = memchr::memmem::find(rest, b"\\012") {
        name.extend_from_slice(&rest[..at]);
        name.push(b'\n');
        rest = &rest[at + 4..];
    }
    name.extend_from_slice(rest);
    PathBuf::from(std::ffi::OsString::from_vec(name))
}

/// Returns a path without the kernel's mark if the file has no links.
pub(crate) fn without_deleted_mark(path: PathBuf, links: u64) -> PathBuf {
    match without_mark(&path) {
        Some(name) if links == 0 => name.into(),
        _ => path,
    }
}

/// Returns the path without the mark " (deleted)" that the kernel appends to the path of a file
/// that has been deleted; `None` if it has no such mark.
fn without_mark(path: &Path) -> Option<&OsStr> {
    let name = path.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    name.map(OsStr::from_bytes)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn changed_files_are_read_again() {
        let files = Files::default();
        let reads = Cell::new(0);
        let scratch = test_support::Scratch::new();
        let one = scratch.file("one");
        let other = scratch.file("other");
        for file in [&one, &other] {
            std::fs::write(file, "").unwrap();
        }
        let get = |file: Option<&PathBuf>| {
            let metadata = file.map(|file| std::fs::metadata(file).unwrap());
            let version = metadata.map(|metadata| FileVersion::of(&metadata));
            let read = || {
                reads.set(reads.get() + 1);
                Ok(None)
            };
            assert!(files.get((7, 9), version, read).unwrap().is_none());
            reads.get()
        };
        assert_eq!([Some(&one), Some(&one), None].map(get), [1, 1, 1]);
        assert_eq!([Some(&other), Some(&other), None].map(get), [2, 2, 2]);
    }
}
