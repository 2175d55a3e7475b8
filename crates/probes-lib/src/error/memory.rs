//! What can be wrong with the memory of a process. Each message names the process.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::reason;
use crate::address::LiveAddr;

/// Why memory of a process cannot be used; displayed with its process by [`Error`](super::Error).
///
/// ```no_run
/// use probes_lib::{Actions, ErrorKind, MemoryError, Options, Selector, Target};
///
/// let target = Target::open(4242)?;
/// let actions = Actions::new().enable(Selector::All);
/// let live = Options { live: true, ..Options::default() };
/// if let Err(error) = target.update_with(&actions, live) {
///     if matches!(error.kind(), ErrorKind::Memory(MemoryError::LiveRefused)) {
///         target.update(&actions)?;
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryError {
    /// It cannot be read.
    #[error("{}", self.with_subject("it"))]
    Read {
        /// What is there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// It cannot be written.
    #[error("{}", self.with_subject("it"))]
    Write {
        /// What is there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// What was read back is not what was written.
    #[error("{}", self.with_subject("it"))]
    NotAsWritten {
        /// What is there.
        part: MemoryPart,
        /// The address.
        address: LiveAddr,
    },
    /// This part is not mapped, or its object is not mapped as a whole: it was unloaded, or is being loaded.
    #[error("{}", self.with_subject("it"))]
    NotMapped {
        /// What should be there.
        part: MemoryPart,
        /// The object that has it.
        object: PathBuf,
        /// The address.
        address: LiveAddr,
    },
    /// It is mapped `MAP_SHARED`: a change would affect other processes too, or fail.
    #[error("{}", self.with_subject("it"))]
    Shared {
        /// What is there.
        part: MemoryPart,
        /// An address in the mapping.
        address: LiveAddr,
    },
    /// It cannot be determined where an object is loaded.
    #[error("{}", self.with_subject("it"))]
    UnknownLoadBias {
        /// The object.
        object: PathBuf,
    },
    /// The kernel lets only a tracer write to code, so it cannot be patched without a stop.
    #[error("{}", self.with_subject("it"))]
    LiveRefused,
    /// The program's code is on pages of 1 GiB, which the kernel copies whole at the first write.
    #[error("{}", self.with_subject("it"))]
    GigaText,
}

impl MemoryError {
    /// Returns the message, in which `subject` names the process.
    pub(super) fn with_subject(&self, subject: &str) -> String {
        match self {
            MemoryError::Read {
                part,
                address,
                source,
            } => format!(
                "cannot read {part} at {address} of {subject}: {}",
                reason(source)
            ),
            MemoryError::Write {
                part,
                address,
                source,
            } => format!(
                "cannot write {part} at {address} of {subject}: {}{}",
                reason(source),
                write_obstacle(*part, source)
            ),
            MemoryError::NotAsWritten { part, address } => {
                format!("{part} at {address} of {subject} does not hold the value just written")
            }
            MemoryError::NotMapped {
                part,
                object,
                address,
            } => format!(
                "{part} of {} at {address} is not mapped in {subject}",
                object.display()
            ),
            MemoryError::Shared { part, address } => format!(
                "{part} of {subject} at {address} is mapped shared, and cannot be changed for this process alone"
            ),
            MemoryError::UnknownLoadBias { object } => {
                format!(
                    "cannot determine where {} is loaded in {subject}: none of its segments fits the mappings",
                    object.display()
                )
            }
            MemoryError::LiveRefused => format!(
                "this kernel does not let the code of {subject} be written while it runs (proc_mem.force_override)"
            ),
            MemoryError::GigaText => format!(
                "the text of {subject} lies on 1 GiB huge pages, and the first write to one copies a gigabyte"
            ),
        }
    }
}

/// A part of a process's memory.
///
/// ```
/// use probes_lib::{Error, LiveAddr, MemoryError, MemoryPart, Subject};
///
/// let (part, address) = (MemoryPart::Site, LiveAddr(0x55d0_c3b4));
/// let error = Error::new(Subject::Process(4242), MemoryError::NotAsWritten { part, address });
/// let expected = "a site at 0x55d0c3b4 of process 4242 does not hold the value just written";
/// assert_eq!(error.to_string(), expected);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryPart {
    /// The site of a probe.
    Site,
    /// Code that an observation patches: a site, or a part of a function.
    Code,
    /// The semaphore of a probe: its counter.
    Semaphore,
    /// The trampolines of an observation.
    Trampoline,
    /// The code of injected calls.
    InjectedCall,
    /// The data of an observation, which its trampolines read and write.
    ObservationData,
    /// The stack of a thread.
    Stack,
    /// A flag of the runtime of OCaml, which has it switch its events on or off.
    RuntimeFlag,
}

impl fmt::Display for MemoryPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryPart::Site => "a site",
            MemoryPart::Code => "code",
            MemoryPart::Semaphore => "the counter of a probe",
            MemoryPart::Trampoline => "a trampoline",
            MemoryPart::InjectedCall => "the code of an injected call",
            MemoryPart::ObservationData => "observation data",
            MemoryPart::Stack => "a stack",
            MemoryPart::RuntimeFlag => "a flag of the runtime",
        })
    }
}

/// A write to /proc/PID/mem that the kernel refuses fails with EIO; ptrace was tried after that, too.
fn write_obstacle(part: MemoryPart, error: &io::Error) -> &'static str {
    let is_code = matches!(
        part,
        MemoryPart::Site | MemoryPart::Code | MemoryPart::Trampoline | MemoryPart::InjectedCall
    );
    if is_code && error.raw_os_error() == Some(libc::EIO) {
        "; ptrace(2) cannot write it either (was the kernel booted with proc_mem.force_override=never? /proc/cmdline says)"
    } else {
        ""
    }
}
