//! What can be wrong with a file. Each message either names the file, or continues a sentence that
//! begins with its path.

use std::io;

use super::reason;
use crate::address::FileAddr;
use crate::site::SiteCode;

/// Why a file cannot be used; displayed with its path by [`Error`](super::Error).
///
/// ```
/// use probes_lib::{ElfDefect, ErrorKind, FileError, ProbeTable};
///
/// let error = ProbeTable::read("Cargo.toml").unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::File(FileError::Elf(ElfDefect::NotElf))));
/// assert_eq!(error.to_string(), "Cargo.toml is not an ELF file");
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be opened.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Open {
        /// What the kernel said.
        source: io::Error,
    },
    /// It is mapped, but has no name any more by which it could be opened.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Nameless {
        /// Whether it was made by memfd_create(2), and not deleted or replaced.
        in_memory: bool,
    },
    /// It cannot be read.
    #[error("{}", self.with_subject("it").unwrap_or_default())]
    Read {
        /// The part of it that was wanted.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// It is not a program that this crate can work on.
    #[error("{0}")]
    Elf(ElfDefect),
    /// One of its probe notes cannot be read.
    #[error("is corrupt: {0}")]
    MalformedNote(#[source] MalformedNote),
    /// One of its probe notes can be read, but cannot be true of the file.
    #[error("is corrupt: probe note {index} at {offset:#x} ({name}) {defect}")]
    WrongNote {
        /// Position of the note in its section, counted from 0.
        index: usize,
        /// Offset of the note in its section, in bytes.
        offset: usize,
        /// The probe's name, escaped.
        name: String,
        /// What is wrong with it.
        defect: ProbeDefect,
    },
    /// The provider `ocaml` has semaphores of 2 and of 4 bytes, and it is unknown which of them this is.
    #[error(
        "has no symbol for the semaphore of probe {name} at {address}, so its size (2 or 4 bytes) is unknown"
    )]
    UnknownLayout {
        /// The probe's name.
        name: String,
        /// The semaphore's address.
        address: FileAddr,
    },
}

impl FileError {
    /// Returns the message with `subject` in it, if the subject is not its first word; `None` for
    /// the messages that continue a sentence which begins with the subject.
    pub(super) fn with_subject(&self, subject: &str) -> Option<String> {
        let file = subject;
        Some(match self {
            FileError::Open { source } => format!("cannot open {file}: {}", reason(source)),
            FileError::Nameless { in_memory } => {
                format!("cannot open {file}: {}", why_unlinked(*in_memory))
            }
            FileError::Read { what, source } => {
                format!("cannot read {what} of {file}: {}", reason(source))
            }
            FileError::Elf(_)
            | FileError::MalformedNote(_)
            | FileError::WrongNote { .. }
            | FileError::UnknownLayout { .. } => return None,
        })
    }
}

/// Why a file is not a program this crate can work on; the message follows the file's name.
///
/// [`FileError`] has an example.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ElfDefect {
    /// A directory, a device, a pipe.
    #[error("is not a regular file")]
    NotARegularFile,
    /// No ELF magic.
    #[error("is not an ELF file")]
    NotElf,
    /// A 32-bit file.
    #[error("is a 32-bit program; only x86-64 programs are supported")]
    Class32,
    /// Neither 32 nor 64 bits.
    #[error("has the unknown ELF class {0}")]
    UnknownClass(u8),
    /// A big-endian file.
    #[error("is a big-endian program; only x86-64 programs are supported")]
    BigEndian,
    /// Another processor.
    #[error("is a program for {}; only x86-64 programs are supported", machine(*.0))]
    Machine(u16),
    /// An object file, a core dump, or another ELF file that is neither a program nor a library.
    #[error("is {}, not a program", elf_type(*.0))]
    NotAProgram(u16),
    /// The file ends too early.
    #[error("is truncated at {file_len:#x}: no room for {what} ({size} bytes at {offset:#x})")]
    Truncated {
        /// What was to be read.
        what: &'static str,
        /// Its offset in the file, in bytes.
        offset: u64,
        /// Its length in bytes.
        size: u64,
        /// The length of the file in bytes.
        file_len: u64,
    },
    /// A header table, or the names of sections, which cannot be read.
    #[error("is corrupt: {0} cannot be read")]
    Table(&'static str),
    /// A part of the file that is longer than this crate reads.
    #[error("has {size} bytes of {what}: at most {most} can be read")]
    TooLarge {
        /// The section, the table or the segment.
        what: &'static str,
        /// Its length in bytes.
        size: u64,
        /// How many are read.
        most: u64,
    },
    /// Debugging information that is not read, because that of other files takes the memory that there is for it.
    #[error(
        "has source lines that are not read: the debugging information of other files takes {used} of the {most} bytes that it may have in memory"
    )]
    OtherDebugInfo {
        /// How many bytes the others have.
        used: u64,
        /// How many all may have.
        most: u64,
    },
    /// Debugging information that takes far more memory than the file has bytes: it is compressed, or refers to the same
    /// bytes again and again.
    #[error(
        "has source lines that are not read: they take too much of the {most} bytes of memory for tables of source lines, of which those of other files take {used}"
    )]
    DebugInfoExpands {
        /// How many bytes those of the others take.
        used: u64,
        /// How many all may take.
        most: u64,
    },
    /// More code and data than this crate reads.
    #[error("has {size} bytes of code and data: at most {most} can be read")]
    TooMuchCode {
        /// How many there are in its segments.
        size: u64,
        /// How many are read.
        most: u64,
    },
    /// More segments with code or data than this crate reads.
    #[error("has {0} segments with code or data, more than can be read")]
    TooManySegments(usize),
    /// The notes cannot be found without section headers.
    #[error("has no section headers, so its probes cannot be found")]
    NoSectionHeaders,
    /// Names of functions, in symbol tables, that are so long together that they must overlap.
    #[error("is corrupt: the names of its symbols have more than {most} bytes")]
    LongSymbols {
        /// How long the names of such a file may be together, in bytes.
        most: usize,
    },
    /// Neither symbols of functions nor `.eh_frame`, but code.
    #[error("has neither symbols nor .eh_frame, so its functions cannot be found")]
    NoFunctions,
    /// Parts of the file that contradict each other, such as sites that overlap.
    #[error("is corrupt: {0}")]
    Contradiction(String),
}

/// Why the bytes are not a list of notes.
///
/// ```
/// use probes_lib::NoteDefect;
///
/// let error = probes_lib::notes(&[8, 0, 0, 0]).next().unwrap().unwrap_err();
/// assert_eq!(error.defect, NoteDefect::HeaderCut { left: 4 });
/// assert_eq!(error.to_string(), "probe note 0 at 0x0 is malformed (its header needs 12 bytes, 4 left)");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("probe note {index} at {offset:#x} is malformed ({defect})")]
pub struct MalformedNote {
    /// Index of the note in its section, from 0.
    pub index: usize,
    /// Offset of the note's header from the start of its section, in bytes.
    pub offset: usize,
    /// What is wrong with it.
    pub defect: NoteDefect,
}

/// What is wrong with a note.
///
/// [`MalformedNote`] has an example.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoteDefect {
    /// The section ends inside the note's header.
    #[error("its header needs 12 bytes, {left} left")]
    HeaderCut {
        /// Bytes from the note's start to the section's end.
        left: usize,
    },
    /// The section ends inside the note's owner or description.
    #[error("needs {needed} bytes, {left} left")]
    BodyCut {
        /// Bytes that the header announces.
        needed: u64,
        /// Bytes from the header's end to the section's end.
        left: usize,
    },
    /// The description cannot hold the three addresses.
    #[error("descsz {0} < 24")]
    ShortDescription(u32),
    /// One of the three strings has no end.
    #[error("its {0} does not end within the note")]
    Unterminated(&'static str),
}

impl NoteDefect {
    /// Whether the section ends too early.
    pub(crate) fn is_cut(&self) -> bool {
        matches!(
            self,
            NoteDefect::HeaderCut { .. } | NoteDefect::BodyCut { .. }
        )
    }
}

/// Why what a note says cannot be true of its file; the message follows the words that name the
/// note.
///
/// ```no_run
/// use probes_lib::{ErrorKind, FileError, ProbeDefect, ProbeTable};
///
/// if let Err(error) = ProbeTable::read("server.exe") {
///     if let ErrorKind::File(FileError::WrongNote { name, defect, .. }) = error.kind() {
///         match defect {
///             ProbeDefect::NotASite { address, .. } => println!("the code at {address} is no site of {name}"),
///             _ => println!("{name} {defect}"),
///         }
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeDefect {
    /// The name is empty or not printable.
    #[error("has a name that is empty or not printable")]
    Name,
    /// The argument string is not UTF-8.
    #[error("has an argument string that is not UTF-8")]
    Arguments,
    /// No site, in a generation where each note has one.
    #[error("has no site (pc 0); only a note of provider ocaml_2 may lack one")]
    NoSite,
    /// The site is not in executable bytes of the file.
    #[error("has its site at {0}, outside the executable segments of the file")]
    SiteOutside(FileAddr),
    /// The bytes in the file are not a site.
    #[error(
        "has its site at {address}: found {found}, expected 90 3d or 90 e8 and four more bytes"
    )]
    NotASite {
        /// The site's address.
        address: FileAddr,
        /// The bytes there.
        found: SiteCode,
    },
    /// No semaphore.
    #[error("has no semaphore")]
    NoSemaphore,
    /// The semaphore is not in the `.probes` section.
    #[error("has its semaphore at {0}, outside .probes")]
    SemaphoreOutside(FileAddr),
    /// The semaphore is not in memory that the program can write.
    #[error("has its semaphore at {0}, outside the writable segments")]
    SemaphoreNotWritable(FileAddr),
}

fn why_unlinked(in_memory: bool) -> &'static str {
    if in_memory {
        "it exists only in memory (memfd_create), and no descriptor for it is open"
    } else {
        "it was deleted or replaced since it was loaded"
    }
}

fn machine(machine: u16) -> String {
    match machine {
        0x03 => "32-bit x86".to_owned(),
        0x28 => "32-bit ARM".to_owned(),
        0xb7 => "AArch64".to_owned(),
        0xf3 => "RISC-V".to_owned(),
        0x15 => "64-bit PowerPC".to_owned(),
        0x16 => "S/390".to_owned(),
        other => format!("machine {other:#x}"),
    }
}

fn elf_type(kind: u16) -> String {
    match kind {
        1 => "a relocatable object file".to_owned(),
        4 => "a core dump".to_owned(),
        other => format!("an ELF file of type {other}"),
    }
}
