//! What was tried when an error came up.

use std::fmt;

/// What was tried on a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// To read its memory, or what /proc shows of it.
    Read,
    /// To attach to it, or to open its memory for writing.
    Attach,
    /// To take the lock that keeps two updates of it apart.
    Lock,
    /// To make one of its threads execute an injected call.
    InjectCall,
    /// To stop it at its entry point, having started it.
    StopAtEntry,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Read => "read",
            Operation::Attach => "attach to",
            Operation::Lock => "lock",
            Operation::InjectCall => "inject a call into",
            Operation::StopAtEntry => "stop at its entry point",
        })
    }
}

/// Which part of a process's memory was to be read or written.
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
            MemoryPart::ObservationData => "the data of an observation",
        })
    }
}
