//! A copy of what an ELF file has of debugging information: headers, symbols and `.debug_*` sections, at the same offsets.
//! The rest is a hole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use goblin::elf::header::header64::SIZEOF_EHDR;
use goblin::elf::section_header::{SHT_DYNSYM, SHT_NOBITS, SHT_STRTAB, SHT_SYMTAB};
use goblin::elf::{ProgramHeader, SectionHeader};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};

use super::compression::{WHAT, has_compression_flag};
use super::debug_cost::DebugCost;
use super::file_version::FileVersion;
use super::{CTX, ElfFile};
use crate::error::{ElfDefect, Error, FileError, Result};

/// The most bytes that all copies together may have. The debugging information of the largest programs is about as
/// long.
const MAX_COPIED: u64 = 1 << 30;

/// How many bytes more all copies together may take once they are loaded.
const MAX_LOADED: u64 = 1 << 30;

/// How many bytes are copied at a time.
const PIECE: u64 = 1 << 20;

/// Prefixes of the names of sections that do not matter for source lines.
const WITHOUT_LINES: [&[u8]; 7] = [
    b".debug_frame",
    b".debug_gnu_",
    b".debug_loc",
    b".debug_mac",
    b".debug_names",
    b".debug_pub",
    b".debug_types",
];

/// A copy that is in memory as long as it is used.
pub(super) struct DebugCopy {
    /// A file in memory, which no other process can change.
    pub(super) file: File,
    /// How many bytes of it are not in holes.
    copied: u64,
    /// What it takes in memory, more than that, once it is loaded.
    pub(super) cost: DebugCost,
}

/// The copies that are in memory, each with the version of the file that it is of.
static COPIES: Mutex<Vec<(FileVersion, Weak<DebugCopy>)>> = Mutex::new(Vec::new());

/// The files that are not used, because all copies would have more than [`MAX_COPIED`] bytes, or take more than [`MAX_LOADED`].
static LEFT_OUT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// See [`SourceMap::left_out`](super::source::SourceMap::left_out).
pub(super) fn left_out() -> Vec<PathBuf> {
    lock_left_out().clone()
}

fn lock_left_out() -> MutexGuard<'static, Vec<PathBuf>> {
    LEFT_OUT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ElfFile {
    /// Returns a copy of the debugging information in memory. All users of one version of the file share one copy.
    pub(super) fn debugging_information(&self) -> Result<Arc<DebugCopy>> {
        let metadata = self.file.metadata();
        let version = metadata.map(|metadata| FileVersion::of(&metadata));
        let version = version.map_err(|source| self.uncopied(source))?;
        let mut copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
        copies.retain(|(_, copy)| copy.strong_count() > 0);
        let found = copies.iter().find(|(of, _)| *of == version);
        if let Some(copy) = found.and_then(|(_, copy)| copy.upgrade()) {
            return Ok(copy);
        }
        let used = copies.iter().filter_map(|(_, copy)| copy.upgrade());
        let used: Vec<_> = used.map(|copy| (copy.copied, copy.cost.bytes)).collect();
        let copied = used.iter().map(|(copied, _)| copied).sum();
        let mut copy = self.copy_debugging_information(copied)?;
        let loaded = used.iter().map(|(_, cost)| cost).sum();
        copy.cost = self.cost_of(&copy, loaded)?;
        let copy = Arc::new(copy);
        lock_left_out().retain(|path| path != self.path());
        copies.push((version, Arc::downgrade(&copy)));
        Ok(copy)
    }

    /// Makes a copy; the other copies have `used` bytes.
    fn copy_debugging_information(&self, used: u64) -> Result<DebugCopy> {
        let size = self.copied_ranges().map(|(_, len)| len);
        let size = size.fold(0, u64::saturating_add);
        let most = MAX_COPIED;
        if size > most {
            let what = WHAT;
            return Err(self.leave_out(ElfDefect::TooLarge { what, size, most }));
        }
        let file = self.empty_copy().map_err(|source| self.uncopied(source))?;
        let mut copied = 0;
        let mut piece = Vec::new();
        for (start, len) in self.copied_ranges() {
            let end = start + len;
            for at in (start..end).step_by(PIECE as usize) {
                piece.resize((end - at).min(PIECE) as usize, 0);
                self.read_at(at, &mut piece, WHAT)?;
                // A hole takes no memory.
                if piece.iter().all(|&byte| byte == 0) {
                    continue;
                }
                copied += piece.len() as u64;
                if copied > most.saturating_sub(used) {
                    return Err(self.leave_out(ElfDefect::OtherDebugInfo { used, most }));
                }
                let written = file.write_all_at(&piece, at);
                written.map_err(|source| self.uncopied(source))?;
            }
        }
        Ok(DebugCopy {
            file,
            copied,
            cost: DebugCost::default(),
        })
    }

    /// Returns what a copy takes once it is loaded. All others take `used` bytes.
    fn cost_of(&self, copy: &DebugCopy, used: u64) -> Result<DebugCost> {
        let file = copy.file.try_clone();
        let file = file.map_err(|source| self.uncopied(source))?;
        // Not this file, which may be written to meanwhile.
        let copy = ElfFile::read(file, self.path().to_owned())?;
        let most = MAX_LOADED;
        let cost = DebugCost::of(&copy, most.saturating_sub(used));
        if cost.bytes <= most.saturating_sub(used) {
            return Ok(cost);
        }
        Err(self.leave_out(ElfDefect::DebugInfoExpands { used, most }))
    }

    fn leave_out(&self, why: ElfDefect) -> Error {
        let mut left_out = lock_left_out();
        if !left_out.iter().any(|path| path == self.path()) {
            left_out.push(self.path().to_owned());
        }
        self.defect(why)
    }

    fn uncopied(&self, source: io::Error) -> Error {
        let what = WHAT;
        Error::of_file(self.path(), FileError::Read { what, source })
    }

    /// Makes a file in memory that is as long as this one.
    fn empty_copy(&self) -> io::Result<File> {
        // setrlimit(2): a process that makes a file longer than this is killed by SIGXFSZ.
        let (longest, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
        if longest < self.len {
            return Err(Errno::EFBIG.into());
        }
        let copy = File::from(memfd_create(c"ocaml-probes", MFdFlags::MFD_CLOEXEC)?);
        copy.set_len(self.len)?;
        Ok(copy)
    }

    /// The offsets and lengths of what is copied, without what is outside of the file.
    fn copied_ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        let (header, len) = (&self.header, self.len);
        let segments = self.segments.len() * ProgramHeader::size(CTX);
        let sections = self.sections.len() * SectionHeader::size(CTX);
        let headers = [
            (0, SIZEOF_EHDR as u64),
            (header.e_phoff, segments as u64),
            (header.e_shoff, sections as u64),
        ];
        let wanted = self.sections.iter().filter(|it| self.is_copied(it));
        let wanted = wanted.map(|section| (section.sh_offset, section.sh_size));
        let is_in_file = move |&(start, size): &(u64, u64)| {
            size > 0 && start.checked_add(size).is_some_and(|end| end <= len)
        };
        headers.into_iter().chain(wanted).filter(is_in_file)
    }

    fn is_copied(&self, section: &SectionHeader) -> bool {
        let is_table = [SHT_SYMTAB, SHT_DYNSYM, SHT_STRTAB].contains(&section.sh_type);
        let is_named = |prefix: &[u8]| self.is_named(section, prefix);
        let is_debug = is_named(b".debug_") || is_named(b".zdebug_");
        // As a hole, a compressed section would be corrupt: its compression header would be zero.
        let is_unread =
            !has_compression_flag(section) && WITHOUT_LINES.iter().any(|it| is_named(it));
        section.sh_type != SHT_NOBITS && (is_table || (is_debug && !is_unread))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use test_support::{Scratch, fixture};

    use super::*;
    use crate::elf::source::SourceMap;
    use crate::elf::symbols::SymbolTable;

    #[test]
    fn symbols_are_known_after_the_file_is_truncated() {
        let scratch = Scratch::new();
        let file = scratch.file("program");
        // Not the mode of the fixture, which is read-only.
        fs::write(&file, fs::read(fixture("churn.nopie")).unwrap()).unwrap();
        let elf = ElfFile::open(&file).unwrap();
        let symbols = elf.symbols(SymbolTable::Static);
        let main = symbols.unwrap().unwrap().find(["main"]).unwrap()[0][0].address;
        let before = SourceMap::of(&elf).unwrap();
        let opened = OpenOptions::new().write(true).open(&file).unwrap();
        opened.set_len(0x40).unwrap();
        let found = before.locate(main);
        assert_eq!(found.function.as_deref(), Some("main"));
        assert!(SourceMap::of(&elf).is_err());
    }

    #[test]
    fn holes_are_not_copied() {
        const HOLE: u64 = 64 << 20;
        let scratch = Scratch::new();
        let path = scratch.file("program");
        fs::write(&path, fs::read(fixture("churn.nopie")).unwrap()).unwrap();
        let elf = ElfFile::open(&path).unwrap();
        let is_info = |it: &SectionHeader| elf.is_named(it, b".debug_info\0");
        let index = elf.sections.iter().position(is_info).unwrap();
        let header = elf.header.e_shoff + (index * SectionHeader::size(CTX)) as u64;
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(elf.len + HOLE).unwrap();
        // sh_offset and sh_size (elf(5)).
        let place = [elf.len.to_le_bytes(), HOLE.to_le_bytes()].concat();
        file.write_all_at(&place, header + 24).unwrap();
        let elf = ElfFile::open(&path).unwrap();
        let copy = elf.debugging_information().unwrap();
        assert!(copy.copied < HOLE / 8, "{}", copy.copied);
        let in_memory = copy.file.metadata().unwrap().blocks() * 512;
        assert!(in_memory < HOLE / 8, "{in_memory}");
    }

    #[test]
    fn users_of_a_file_share_its_copy() {
        let of_file = |file: &Path| ElfFile::open(file).unwrap().debugging_information();
        let first = of_file(&fixture("churn.nopie")).unwrap();
        assert!(Arc::ptr_eq(
            &first,
            &of_file(&fixture("churn.nopie")).unwrap()
        ));
        assert!(!Arc::ptr_eq(
            &first,
            &of_file(&fixture("churn.pie")).unwrap()
        ));
    }

    #[test]
    fn copies_are_bounded_together() {
        // Other tests copy the fixture itself, which is then no longer left out.
        let scratch = Scratch::new();
        let path = scratch.file("program");
        fs::write(&path, fs::read(fixture("churn.nopie")).unwrap()).unwrap();
        let elf = ElfFile::open(&path).unwrap();
        let copied = elf.copy_debugging_information(0).unwrap().copied;
        assert!(elf.copy_debugging_information(MAX_COPIED - copied).is_ok());
        let Err(error) = elf.copy_debugging_information(MAX_COPIED - copied + 1) else {
            panic!("more was copied than may be in memory");
        };
        assert!(
            error
                .to_string()
                .contains("debugging information of other files"),
            "{error}"
        );
        assert!(left_out().contains(&path));
    }
}
