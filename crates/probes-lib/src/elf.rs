//! [`ElfFile`]: the sections, segments, kind and build-id of an ELF file. Reads only what is needed, never
//! the whole file, and checks each offset and size against the file's length before use.

pub(crate) mod arguments;
pub(crate) mod bytecode;
mod compression;
mod debug_copy;
mod debug_cost;
mod debug_file;
mod debug_units;
mod entry_lines;
pub(crate) mod file_version;
pub(crate) mod functions;
mod line_tables;
pub(crate) mod lines;
pub(crate) mod mangling;
pub(crate) mod note;
pub(crate) mod parameters;
pub(crate) mod relocations;
mod segment_index;
pub(crate) mod source;
pub(crate) mod symbols;
pub(crate) mod table;
pub(crate) mod unwind_entry;
pub(crate) mod usdt;

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gimli::{EndianSlice, LittleEndian};
use goblin::container::{Container, Ctx, Endian};
use goblin::elf::header::{
    self, EI_CLASS, EI_DATA, ELFCLASS32, ELFCLASS64, ELFDATA2LSB, EM_X86_64, ET_DYN, ET_EXEC,
    header64,
};
use goblin::elf::program_header::{PF_W, PF_X, PT_INTERP, PT_LOAD, PT_TLS};
use goblin::elf::section_header::{SHF_EXECINSTR, SHT_NOBITS, SHT_NOTE};
use goblin::elf::{Header, ProgramHeader, SectionHeader};

use crate::address::FileAddr;
use crate::build_id::BuildId;
use crate::error::{ElfDefect, Error, FileError, Result};
use crate::numbers::u32_at;
use crate::sys::fault_point;

/// How many bytes of the name of a section are looked at.
const MAX_SECTION_NAME: usize = 64;

/// The largest table or section that is read. Nearly all real ones are smaller (a million notes take
/// about 100 MiB); a sparse file may claim far more.
const MAX_SECTION: u64 = 128 << 20;

/// How many bytes of all segments together are read. The largest programs have 200 MB of code and data; a hostile
/// file may have many segments of the same bytes.
pub(crate) const MAX_LOADED: u64 = 256 << 20;

pub(crate) const CTX: Ctx = Ctx {
    container: Container::Big,
    le: Endian::Little,
};

/// How the program's addresses relate to where it is loaded.
///
/// ```no_run
/// let table = probes_lib::ProbeTable::read("server.exe")?;
/// let is_pie = table.linking() == probes_lib::Linking::PositionIndependent;
/// # let _ = is_pie;
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linking {
    /// `ET_EXEC`: loaded exactly where it was linked.
    Fixed,
    /// `ET_DYN`: position independent (PIE, static PIE or shared object).
    PositionIndependent,
}

/// An open ELF file for x86-64, its headers read and checked.
#[derive(Debug)]
pub(crate) struct ElfFile {
    file: File,
    path: PathBuf,
    len: u64,
    header: Header,
    segments: Vec<ProgramHeader>,
    sections: Vec<SectionHeader>,
    section_names: Vec<u8>,
    /// Looked up when it is first needed.
    interprets_bytecode: OnceLock<bool>,
    /// The same.
    debug_file: OnceLock<debug_file::Found>,
}

impl AsFd for ElfFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for ElfFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl ElfFile {
    /// Opens `path`. A pipe or device is refused without waiting for it.
    pub(crate) fn open(path: &Path) -> Result<ElfFile> {
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|source| Error::of_file(path, FileError::Open { source }))?;
        ElfFile::read(file, path.to_owned())
    }

    /// Reads the headers of an open file; errors name `path`.
    pub(crate) fn read(file: File, path: PathBuf) -> Result<ElfFile> {
        let metadata = file
            .metadata()
            .map_err(|source| Error::of_file(&path, FileError::Open { source }))?;
        if !metadata.is_file() {
            return Err(Error::of_file(
                &path,
                FileError::Elf(ElfDefect::NotARegularFile),
            ));
        }
        let mut elf = ElfFile {
            file,
            path,
            len: metadata.len(),
            header: Header::new(CTX),
            segments: Vec::new(),
            sections: Vec::new(),
            section_names: Vec::new(),
            interprets_bytecode: OnceLock::new(),
            debug_file: OnceLock::new(),
        };
        elf.header = elf.read_header()?;
        elf.segments = elf.read_segments()?;
        elf.sections = elf.read_sections()?;
        elf.section_names = elf.read_section_names()?;
        Ok(elf)
    }

    fn read_header(&self) -> Result<Header> {
        let mut start = [0; header64::SIZEOF_EHDR];
        let available = (self.len as usize).min(start.len());
        self.read_at(0, &mut start[..available], "the ELF header")?;
        if available < header::SIZEOF_IDENT || &start[..4] != header::ELFMAG {
            return Err(self.defect(ElfDefect::NotElf));
        }
        match (start[EI_CLASS], start[EI_DATA]) {
            (ELFCLASS64, ELFDATA2LSB) => {}
            (ELFCLASS64, _) => return Err(self.defect(ElfDefect::BigEndian)),
            (ELFCLASS32, _) => return Err(self.defect(ElfDefect::Class32)),
            (class, _) => return Err(self.defect(ElfDefect::UnknownClass(class))),
        }
        if available < start.len() {
            return Err(self.truncated("the ELF header", 0, start.len() as u64));
        }
        let header = Header::from(*header64::Header::from_bytes(&start));
        if header.e_machine != EM_X86_64 {
            return Err(self.defect(ElfDefect::Machine(header.e_machine)));
        }
        if !matches!(header.e_type, ET_EXEC | ET_DYN) {
            return Err(self.defect(ElfDefect::NotAProgram(header.e_type)));
        }
        Ok(header)
    }

    fn read_segments(&self) -> Result<Vec<ProgramHeader>> {
        let what = "the program headers";
        let count = usize::from(self.header.e_phnum);
        let bytes = self.read_table(
            self.header.e_phoff,
            count as u64,
            self.header.e_phentsize,
            ProgramHeader::size(CTX),
            what,
        )?;
        ProgramHeader::parse(&bytes, 0, count, CTX).map_err(|_| self.defect(ElfDefect::Table(what)))
    }

    fn read_sections(&self) -> Result<Vec<SectionHeader>> {
        let what = "the section headers";
        if self.header.e_shoff == 0 {
            return Ok(Vec::new());
        }
        let size = SectionHeader::size(CTX);
        let entsize = self.header.e_shentsize;
        let mut count = u64::from(self.header.e_shnum);
        if count == 0 {
            // elf(5): "If the number of entries in the section header table is larger than or
            // equal to SHN_LORESERVE, e_shnum holds zero and the real number [is] in sh_size of
            // the initial entry."
            let first = self.read_table(self.header.e_shoff, 1, entsize, size, what)?;
            count = SectionHeader::parse_from(&first, 0, 1, CTX)
                .ok()
                .and_then(|headers| headers.first().map(|header| header.sh_size))
                .unwrap_or(0);
        }
        let bytes = self.read_table(self.header.e_shoff, count, entsize, size, what)?;
        SectionHeader::parse_from(&bytes, 0, count as usize, CTX)
            .map_err(|_| self.defect(ElfDefect::Table(what)))
    }

    fn read_section_names(&self) -> Result<Vec<u8>> {
        // elf(5): "If the index of section name string table section is larger than or equal to
        // SHN_LORESERVE (0xff00), this member holds SHN_XINDEX (0xffff) and the real index [is]
        // held in the sh_link member of the initial entry."
        const SHN_XINDEX: u16 = 0xffff;
        let index = match self.header.e_shstrndx {
            SHN_XINDEX => self
                .sections
                .first()
                .map_or(0, |first| first.sh_link as usize),
            index => usize::from(index),
        };
        if self.sections.is_empty() {
            return Ok(Vec::new());
        }
        match self.sections.get(index) {
            Some(section) => self.section_bytes(section, "the section names"),
            None => Err(self.defect(ElfDefect::Table("the section names"))),
        }
    }

    /// Reads `count` table entries of `size` bytes at `offset`; `entsize` is their size according to the file.
    fn read_table(
        &self,
        offset: u64,
        count: u64,
        entsize: u16,
        size: usize,
        what: &'static str,
    ) -> Result<Vec<u8>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        if usize::from(entsize) != size {
            return Err(self.defect(ElfDefect::Table(what)));
        }
        let bytes = count
            .checked_mul(size as u64)
            .ok_or_else(|| self.truncated(what, offset, u64::MAX))?;
        self.read_range(offset, bytes, what)
    }

    /// Reads `size` bytes at `offset`, after checking that the file has them and that they are not too many.
    fn read_range(&self, offset: u64, size: u64, what: &'static str) -> Result<Vec<u8>> {
        self.read_up_to(MAX_SECTION, offset, size, what)
    }

    fn read_up_to(&self, most: u64, offset: u64, size: u64, what: &'static str) -> Result<Vec<u8>> {
        self.check_range(offset, size, what, most)?;
        let mut bytes = vec![0; size as usize];
        self.read_at(offset, &mut bytes, what)?;
        Ok(bytes)
    }

    fn check_range(&self, offset: u64, size: u64, what: &'static str, most: u64) -> Result<()> {
        match offset.checked_add(size) {
            Some(end) if end <= self.len => {}
            _ => return Err(self.truncated(what, offset, size)),
        }
        if size > most {
            return Err(self.defect(ElfDefect::TooLarge { what, size, most }));
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8], what: &'static str) -> Result<()> {
        let read = |bytes: &mut [u8]| {
            fault_point!(ReadElf);
            self.file.read_exact_at(bytes, offset)
        };
        read(bytes).map_err(|source| {
            if source.kind() == std::io::ErrorKind::UnexpectedEof {
                self.truncated(what, offset, bytes.len() as u64)
            } else {
                Error::of_file(&self.path, FileError::Read { what, source })
            }
        })
    }

    fn section_bytes(&self, section: &SectionHeader, what: &'static str) -> Result<Vec<u8>> {
        self.section_up_to(MAX_SECTION, section, what)
    }

    fn section_up_to(
        &self,
        most: u64,
        section: &SectionHeader,
        what: &'static str,
    ) -> Result<Vec<u8>> {
        if section.sh_type == SHT_NOBITS {
            return Ok(Vec::new());
        }
        self.read_up_to(most, section.sh_offset, section.sh_size, what)
    }

    fn section(&self, name: &str) -> Option<&SectionHeader> {
        self.sections.iter().find(|section| {
            self.section_names
                .get(section.sh_name..)
                .and_then(|names| names.strip_prefix(name.as_bytes()))
                .is_some_and(|rest| rest.first() == Some(&0))
        })
    }

    /// Returns the path that errors and reports show.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn linking(&self) -> Linking {
        if self.header.e_type == ET_EXEC {
            Linking::Fixed
        } else {
            Linking::PositionIndependent
        }
    }

    /// Returns whether it has code that the Go compiler has compiled; not known of a file without section headers.
    pub(crate) fn has_go(&self) -> bool {
        // Position-independent programs have .gopclntab under another name.
        let mut sections = [".gopclntab", ".note.go.buildid"].into_iter();
        sections.any(|name| self.section(name).is_some())
    }

    /// Returns the dynamic loader of the program, if it names one.
    pub(crate) fn interpreter(&self) -> Option<PathBuf> {
        let segment = self.segments.iter().find(|one| one.p_type == PT_INTERP)?;
        // The kernel executes no path longer than PATH_MAX.
        let len = segment.p_filesz.min(libc::PATH_MAX as u64);
        let bytes = self.read_range(segment.p_offset, len, "the dynamic loader's name");
        let bytes = bytes.ok()?;
        let name = bytes.split(|&byte| byte == 0).next()?;
        Some(OsStr::from_bytes(name).into())
    }

    /// Returns the entry point.
    pub(crate) fn entry(&self) -> FileAddr {
        FileAddr(self.header.e_entry)
    }

    pub(crate) fn has_sections(&self) -> bool {
        !self.sections.is_empty()
    }

    /// Returns whether the name of a section begins so.
    fn is_named(&self, section: &SectionHeader, prefix: &[u8]) -> bool {
        let name = self.section_names.get(section.sh_name..);
        name.is_some_and(|name| name.starts_with(prefix))
    }

    /// Returns the bytes of a section; `None` if there is none, or it cannot be read.
    pub(crate) fn whole_section(&self, name: &'static str) -> Option<Vec<u8>> {
        self.section_bytes(self.section(name)?, name).ok()
    }

    /// Returns the contents of a section, to be read part by part; `None` if there is no such section.
    pub(crate) fn contents(&self, name: &'static str) -> Result<Option<SectionContents<'_>>> {
        let Some(section) = self.section(name) else {
            return Ok(None);
        };
        let (offset, len) = match section.sh_type {
            SHT_NOBITS => (0, 0),
            _ => (section.sh_offset, section.sh_size),
        };
        self.check_range(offset, len, name, MAX_SECTION)?;
        Ok(Some(SectionContents {
            elf: self,
            name,
            offset,
            len: len as usize,
        }))
    }

    /// Returns the address and length in bytes of a loaded section.
    pub(crate) fn section_range(&self, name: &str) -> Option<(FileAddr, u64)> {
        let section = self.section(name)?;
        Some((FileAddr(section.sh_addr), section.sh_size))
    }

    /// Returns the segments that are loaded (`PT_LOAD`).
    pub(crate) fn loaded(&self) -> impl Iterator<Item = Segment> {
        self.segments
            .iter()
            .filter(|segment| segment.p_type == PT_LOAD)
            .map(|segment| Segment {
                start: FileAddr(segment.p_vaddr),
                offset: segment.p_offset,
                file_len: segment.p_filesz,
                len: segment.p_memsz,
                executable: segment.p_flags & PF_X != 0,
                writable: segment.p_flags & PF_W != 0,
            })
    }

    /// Returns where the thread-local variables are in the file's address space (`PT_TLS`); `None` if there are none.
    pub(crate) fn thread_locals(&self) -> Option<ThreadLocals> {
        let segment = self.segments.iter().find(|one| one.p_type == PT_TLS)?;
        Some(ThreadLocals {
            start: FileAddr(segment.p_vaddr),
            len: segment.p_memsz,
            align: segment.p_align,
        })
    }

    /// Returns whether there is a section of this name.
    pub(crate) fn has_section(&self, name: &str) -> bool {
        self.section(name).is_some()
    }

    /// Reads bytes of the file that are loaded at `address`; they must be within the segment.
    pub(crate) fn read_loaded(
        &self,
        segment: &Segment,
        address: FileAddr,
        bytes: &mut [u8],
    ) -> Result<()> {
        let offset = segment
            .offset
            .checked_add(address.0 - segment.start.0)
            .ok_or_else(|| self.truncated("a site", segment.offset, bytes.len() as u64))?;
        self.read_at(offset, bytes, "the code around a site")
    }

    /// Reads the bytes that are loaded at `address`, whichever segment has them; `None` if the file does not have all of them.
    pub(crate) fn read_address(&self, address: FileAddr, bytes: &mut [u8]) -> Option<()> {
        let mut segments = self.loaded();
        let segment = segments.find(|it| it.holds_in_file(address, bytes.len() as u64))?;
        self.read_loaded(&segment, address, bytes).ok()
    }

    /// Reads all that the file has of a segment.
    pub(crate) fn read_segment(&self, segment: &Segment) -> Result<Vec<u8>> {
        self.read_up_to(MAX_LOADED, segment.offset, segment.file_len, "a segment")
    }

    /// Reads segments that are wanted, one after the other, up to [`MAX_LOADED`] bytes in all; those that cannot be read are left out.
    pub(crate) fn read_wanted(
        &self,
        is_wanted: impl Fn(&Segment) -> bool,
    ) -> impl Iterator<Item = (Segment, Vec<u8>)> {
        let mut len = 0_u64;
        let wanted = self.loaded().filter(is_wanted).take_while(move |segment| {
            len = len.saturating_add(segment.file_len);
            len <= MAX_LOADED
        });
        wanted.filter_map(|segment| Some((segment, self.read_segment(&segment).ok()?)))
    }

    /// Returns the name, address and length in bytes of each section with code.
    pub(crate) fn code_sections(&self) -> impl Iterator<Item = (&[u8], FileAddr, u64)> {
        let has_code = |section: &&SectionHeader| {
            section.sh_flags & u64::from(SHF_EXECINSTR) != 0 && section.sh_type != SHT_NOBITS
        };
        self.sections.iter().filter(has_code).map(|section| {
            let name = self.section_names.get(section.sh_name..);
            let name = name.map(|name| &name[..name.len().min(MAX_SECTION_NAME)]);
            let name = name.and_then(|name| name.split(|&byte| byte == 0).next());
            let address = FileAddr(section.sh_addr);
            (name.unwrap_or_default(), address, section.sh_size)
        })
    }

    /// Returns the build-id, if the file has one that can be read.
    pub(crate) fn build_id(&self) -> Option<BuildId> {
        let section = self.section(".note.gnu.build-id")?;
        if section.sh_type != SHT_NOTE || section.sh_size > 4096 {
            return None;
        }
        let bytes = self.section_bytes(section, "the build-id").ok()?;
        // namesz, descsz, type, "GNU\0", then the id.
        let descsz = u32_at(&bytes, 4)? as usize;
        let id = bytes.get(16..)?.get(..descsz)?;
        (!id.is_empty()).then(|| BuildId::new(id))
    }

    fn defect(&self, defect: ElfDefect) -> crate::error::Error {
        Error::of_file(&self.path, FileError::Elf(defect))
    }

    fn truncated(&self, what: &'static str, offset: u64, size: u64) -> crate::error::Error {
        self.defect(ElfDefect::Truncated {
            what,
            offset,
            size,
            file_len: self.len,
        })
    }
}

/// Bytes of debugging information, or of unwind tables.
pub(crate) type DwarfBytes<'b> = EndianSlice<'b, LittleEndian>;

/// A section whose range is within the file.
pub(crate) struct SectionContents<'e> {
    elf: &'e ElfFile,
    name: &'static str,
    offset: u64,
    /// In bytes.
    pub(crate) len: usize,
}

impl SectionContents<'_> {
    /// Fills `bytes` from `offset` in the section.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.elf
            .read_at(self.offset + offset as u64, bytes, self.name)
    }
}

/// A loaded segment (`PT_LOAD`), in the file's address space; lengths in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) start: FileAddr,
    pub(crate) offset: u64,
    pub(crate) file_len: u64,
    pub(crate) len: u64,
    pub(crate) executable: bool,
    pub(crate) writable: bool,
}

/// The thread-local variables of a file: what each thread has a copy of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadLocals {
    pub(crate) start: FileAddr,
    /// In bytes.
    pub(crate) len: u64,
    pub(crate) align: u64,
}

impl Segment {
    /// Whether `len` bytes at `address` come from the file.
    pub(crate) fn holds_in_file(&self, address: FileAddr, len: u64) -> bool {
        within(self.start, self.file_len, address, len)
    }

    /// Whether `len` bytes at `address` are in memory, zero-filled ones included.
    pub(crate) fn holds_in_memory(&self, address: FileAddr, len: u64) -> bool {
        within(self.start, self.len, address, len)
    }
}

/// Whether `len` bytes at `address` are within `outer_len` bytes at `outer`. A file may claim a segment that
/// reaches past the end of the address space.
pub(crate) fn within(outer: FileAddr, outer_len: u64, address: FileAddr, len: u64) -> bool {
    let end = address.0.checked_add(len);
    end.is_some_and(|end| address >= outer && end - outer.0 <= outer_len)
}

#[cfg(test)]
mod tests;
