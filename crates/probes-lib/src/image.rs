//! [`Image`]: an executable in the memory of a process; its probes, where it is loaded, and which
//! mappings hold them.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::addr::LoadBias;
use crate::bias;
use crate::denial;
use crate::elf::ElfFile;
use crate::elf::source::SourceMap;
use crate::error::{ErrorKind, Result};
use crate::maps::{self, Mapping};
use crate::process::Process;
use crate::snapshot::Layout;
use crate::table::ProbeTable;

const GIGABYTE: u64 = 1 << 30;

/// The executable of a process, in its memory.
pub(crate) struct Image {
    pub(crate) table: ProbeTable,
    pub(crate) bias: LoadBias,
    /// The executable, for what is read from it later.
    pub(crate) elf: ElfFile,
    /// Tells the mappings of the file from others. Only the inode: on some file systems (btrfs,
    /// overlayfs) stat(2) and /proc/PID/maps name different devices for one file.
    inode: u64,
    /// What the kernel told the program when it was executed: addresses at random among it, so that
    /// no other execution is told the same.
    auxv: Vec<u8>,
}

impl Image {
    /// Reads the executable of `process` and finds where it is loaded.
    pub(crate) fn of(process: &Process) -> Result<Image> {
        let denied = |source: io::Error| denial::or_lost(process, "look into", source);
        let auxv = process.read_program("auxv").map_err(denied)?;
        let exe = process.look(|folder| {
            let exe = format!("{folder}/exe");
            let path = process.read_link(&exe)?;
            Ok(Some((path, process.open_file(&exe, OFlag::O_RDONLY)?)))
        });
        let (path, file) = exe.map_err(denied)?;
        let metadata = file.metadata().map_err(denied)?;
        let path = without_deleted_mark(path, metadata.nlink());
        let inode = metadata.ino();
        let elf = ElfFile::read(file, path)?;
        let table = ProbeTable::of(&elf)?;
        let maps = read_maps(process)?;
        // What was read in between is of one program only if this is so.
        if process.read_program("auxv").map_err(denied)? != auxv {
            let pid = process.pid();
            return Err(ErrorKind::Executed { pid }.into());
        }
        let bias = bias::of_executable(
            table.linking(),
            table.entry(),
            table.segments(),
            &auxv,
            &maps,
            |mapping| mapping.inode == inode,
        );
        let bias = bias.ok_or_else(|| ErrorKind::NoLoadBias {
            pid: process.pid(),
            path: table.path().to_owned(),
        })?;
        Ok(Image {
            table,
            bias,
            elf,
            inode,
            auxv,
        })
    }

    /// Whether the process has executed another program, or this one anew, since.
    pub(crate) fn is_replaced(&self, process: &Process) -> bool {
        let auxv = process.read_program("auxv");
        auxv.is_ok_and(|auxv| auxv != self.auxv)
    }

    /// Whether it is the executable that is mapped there.
    pub(crate) fn is_mapped(&self, mapping: &Mapping) -> bool {
        mapping.inode == self.inode
    }

    /// Opens the executable for source lines and functions.
    pub(crate) fn source_map(&self) -> Result<SourceMap> {
        let own = format!("/proc/self/fd/{}", self.elf.as_raw_fd());
        SourceMap::open(Path::new(&own), self.table.path())
    }

    /// The mappings that hold what `layout` reads.
    ///
    /// # Errors
    ///
    /// If something is not mapped, or not in a way in which it could be changed.
    pub(crate) fn mappings(
        &self,
        process: &Process,
        layout: &Layout,
        gigatext: bool,
    ) -> Result<Vec<Mapping>> {
        let maps = read_maps(process)?;
        let mut found: Vec<&Mapping> = Vec::new();
        for (address, len, what) in layout.ranges() {
            // A run has something in each of its pages, so its mappings follow on each other.
            let mut at = address;
            while at.0 < address.0.saturating_add(len) {
                let mapping = maps::find(&maps, at, 1).ok_or_else(|| ErrorKind::NotMapped {
                    pid: process.pid(),
                    what,
                    path: self.table.path().to_owned(),
                    address: at,
                })?;
                if mapping.shared {
                    return Err(ErrorKind::SharedMapping {
                        pid: process.pid(),
                        what,
                        address: at,
                    }
                    .into());
                }
                if found.last() != Some(&mapping) && !found.contains(&mapping) {
                    found.push(mapping);
                }
                at = mapping.end;
            }
        }
        if !gigatext {
            self.refuse_gigatext(process, &found)?;
        }
        Ok(found.into_iter().cloned().collect())
    }

    /// Only memory that is not the file's any more can lie on huge pages of 1 GiB: some programs
    /// move their text there. Telling the size of its pages walks them all, so we ask for no other.
    fn refuse_gigatext(&self, process: &Process, mappings: &[&Mapping]) -> Result<()> {
        let moved = |mapping: &&&Mapping| mapping.executable && !self.is_mapped(mapping);
        let mut moved = mappings.iter().filter(moved).peekable();
        if moved.peek().is_none() {
            return Ok(());
        }
        let smaps = process
            .read_program("smaps")
            .map_err(|source| process.lost(source))?;
        let mut sizes = moved.filter_map(|mapping| maps::page_size(&smaps, mapping.start));
        if sizes.any(|size| size >= GIGABYTE) {
            let pid = process.pid();
            return Err(ErrorKind::GigaText { pid }.into());
        }
        Ok(())
    }
}

/// The kernel appends " (deleted)" to the name of a file that has no name any more.
fn without_deleted_mark(path: PathBuf, links: u64) -> PathBuf {
    match path.as_os_str().as_bytes().strip_suffix(b" (deleted)") {
        Some(name) if links == 0 => OsStr::from_bytes(name).into(),
        _ => path,
    }
}

fn read_maps(process: &Process) -> Result<Vec<Mapping>> {
    let maps = process
        .read_program("maps")
        .map_err(|source| denial::or_lost(process, "look into", source))?;
    Ok(maps::parse(&maps))
}

/// Whether all `mappings` are still there as they were.
pub(crate) fn still_mapped(process: &Process, mappings: &[Mapping]) -> Result<bool> {
    let mut mappings: Vec<&Mapping> = mappings.iter().collect();
    mappings.sort_unstable_by_key(|mapping| mapping.start);
    let lines: Vec<&[u8]> = mappings.iter().map(|it| it.line.as_slice()).collect();
    process
        .has_lines("maps", &lines)
        .map_err(|source| process.lost(source))
}
