//! What can be wrong with the memory of a process. Each text reads on from the process.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::reason;
use crate::address::LiveAddr;

/// Why memory of a process cannot be used; reads on from the process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// It cannot be read.
    #[error("has {part} at {address} that cannot be read: {}", reason(source))]
    Read {
        /// What is there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("has {part} at {address} that cannot be written: {}{}", reason(source), write_obstacle(*.part, source))]
    Write {
        /// What is there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// What was read back is not what was written.
    #[error("has {part} at {address} that does not hold the value just written")]
    NotHeld {
        /// What is there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
    },
    /// Nothing is mapped where the file and the process's maps say that it is.
    #[error("has nothing mapped at {address}, where {part} of {} should be", object.display())]
    NotMapped {
        /// What should be there.
        part: MemoryPart,
        /// The object that has it.
        object: PathBuf,
        /// The address.
        address: LiveAddr,
    },
    /// It is mapped `MAP_SHARED`: a change would be one for other processes too, or fail.
    #[error("has {part} at {address} in a shared mapping, which cannot be changed for one process")]
    Shared {
        /// What is there.
        part: MemoryPart,
        /// An address in the mapping.
        address: LiveAddr,
    },
    /// It cannot be determined where an object is loaded.
    #[error("has {} loaded at an address that cannot be determined", object.display())]
    UnknownLoadBias {
        /// The object.
        object: PathBuf,
    },
    /// The kernel lets only tracers write to code.
    #[error(
        "has code that cannot be written while it runs: this kernel does not permit it (proc_mem.force_override)"
    )]
    LiveRefused,
    /// The program's text lies on 1 GiB pages.
    #[error("has its text on 1 GiB huge pages, and the first write to one copies a gigabyte")]
    GigaText,
}

/// A part of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryPart {
    /// The site of a probe.
    Site,
    /// The semaphore of a probe: its counter.
    Semaphore,
    /// The trampolines of an observation.
    Trampoline,
    /// The code of injected calls.
    InjectedCall,
    /// The data of an observation, which its trampolines read and write.
    ObservationData,
}

impl fmt::Display for MemoryPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryPart::Site => "a site",
            MemoryPart::Semaphore => "a semaphore",
            MemoryPart::Trampoline => "a trampoline",
            MemoryPart::InjectedCall => "an injected call",
            MemoryPart::ObservationData => "observation data",
        })
    }
}

/// EIO is what /proc/PID/mem says where it must not write; ptrace was tried then, too.
fn write_obstacle(part: MemoryPart, error: &io::Error) -> &'static str {
    let is_code = matches!(
        part,
        MemoryPart::Site | MemoryPart::Trampoline | MemoryPart::InjectedCall
    );
    if is_code && error.raw_os_error() == Some(libc::EIO) {
        ": proc_mem.force_override=never and POKETEXT failed"
    } else {
        ""
    }
}
