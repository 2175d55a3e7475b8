//! What lies behind an error: what is wrong with a file, a note, or our rights. Each reads on from
//! the error that it is in.

use crate::site::SiteCode;

/// Why a file is not a program this crate can work on; reads on from the file's name.
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
    #[error("is a 32-bit program, only x86-64 programs can be handled")]
    Class32,
    /// Neither 32 nor 64 bits.
    #[error("has the unknown ELF class {0}")]
    UnknownClass(u8),
    /// A big-endian file.
    #[error("is a big-endian program, only x86-64 programs can be handled")]
    BigEndian,
    /// Another processor.
    #[error("is a program for {}, only x86-64 programs can be handled", machine(*.0))]
    Machine(u16),
    /// An object file or a core dump.
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
    /// A header table that cannot be read.
    #[error("is corrupt: {0} cannot be read")]
    Table(&'static str),
    /// A section of an impossible size.
    #[error("is corrupt: {what} claim {size} bytes")]
    TooLarge {
        /// The section.
        what: &'static str,
        /// Its claimed length in bytes.
        size: u64,
    },
    /// The notes cannot be found without section headers.
    #[error(
        "has no section headers, so its probes cannot be found: keep .note.stapsdt when stripping"
    )]
    NoSectionHeaders,
    /// Sites or semaphores that contradict each other.
    #[error("is corrupt: {0}")]
    Contradiction(String),
}

/// Why what a note says cannot be true of its file; reads on from the note.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeDefect {
    /// The name is empty or not printable.
    #[error("has a name that is empty or not printable")]
    Name,
    /// The argument string is not UTF-8.
    #[error("has an argument string that is not text")]
    Arguments,
    /// No site, in a generation where each note has one.
    #[error("has no site (pc 0), which only provider ocaml_2 may say")]
    NoSite,
    /// The site is not in executable bytes of the file.
    #[error("has its site at {0}, outside the executable segments of the file")]
    SiteOutside(crate::FileAddr),
    /// The bytes in the file are not a site.
    #[error(
        "has its site at {address}: found {found}, expected 90 3d or 90 e8 and four more bytes"
    )]
    NotASite {
        /// The site's address.
        address: crate::FileAddr,
        /// The bytes there.
        found: SiteCode,
    },
    /// No semaphore.
    #[error("has no semaphore")]
    NoSemaphore,
    /// The semaphore is not in the `.probes` section.
    #[error("has its semaphore at {0}, outside .probes")]
    SemaphoreOutside(crate::FileAddr),
    /// The semaphore is not in memory that the program can write.
    #[error("has its semaphore at {0}, outside the writable segments")]
    SemaphoreNotWritable(crate::FileAddr),
}

/// Why the kernel did not let us at a process; reads on from the process, or from what was tried.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Denial {
    /// The Yama security module.
    #[error("kernel.yama.ptrace_scope={scope} {}", yama(*.scope))]
    Yama {
        /// The value of `kernel.yama.ptrace_scope`.
        scope: u8,
    },
    /// A seccomp filter on ourselves, as in many containers.
    #[error("this container's seccomp profile blocks ptrace")]
    Seccomp,
    /// The process is of another user.
    #[error("belongs to uid {uid} ({name})")]
    OtherUser {
        /// Its real uid.
        uid: u32,
        /// That user's name.
        name: String,
    },
    /// The process is in a user namespace over which we have no power.
    #[error("is in another user namespace")]
    UserNamespace,
    /// The process gained privileges, or asked not to be looked at.
    #[error("is not dumpable (setuid or file capabilities, or prctl)")]
    NotDumpable,
    /// The process has capabilities that we lack.
    #[error("has capabilities that ocaml-probes lacks")]
    MorePrivileged,
    /// For this reason, which `CAP_SYS_PTRACE` would overcome, and nobody here can have it: it is not
    /// in our bounding set.
    #[error("{0}, and this container lacks CAP_SYS_PTRACE")]
    Incapable(Box<Denial>),
    /// A Linux security module.
    #[error("denied by a security policy (AppArmor, SELinux)")]
    Policy,
    /// Somebody else traces it.
    #[error("is already traced by pid {tracer} ({name})")]
    Traced {
        /// The tracer.
        tracer: i32,
        /// The tracer's command name.
        name: String,
    },
    /// Another update is at work, or was when we tried.
    #[error("is being changed by {}", changer(*.tracer, .name))]
    BeingChanged {
        /// The process that changes it; 0 if it is of another pid namespace.
        tracer: i32,
        /// That process's command name, `?` if it has ended.
        name: String,
    },
    /// None of the known causes.
    #[error(
        "the kernel does not permit it, possibly because it is traced from outside this container"
    )]
    Unexplained,
}

fn changer(pid: i32, name: &str) -> String {
    match pid {
        0 => "somebody outside this container".to_owned(),
        pid => format!("pid {pid} ({name})"),
    }
}

fn yama(scope: u8) -> &'static str {
    match scope {
        1 => "allows only descendants",
        2 => "allows only CAP_SYS_PTRACE",
        _ => "disables ptrace until reboot",
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
