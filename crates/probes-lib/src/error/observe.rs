//! What can keep a process from being observed.

use std::io;

use super::reason;

/// Why a process cannot be observed, or not any more; most texts read on from the process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObserveError {
    /// The probes to be observed have counters, but no sites.
    #[error("has no site of any probe that is to be observed")]
    NoSites,
    /// No address range for trampolines is free within reach of the sites.
    #[error("has no address range free for trampolines within reach of its sites")]
    NoRoom,
    /// No object of the process has unused bytes after its code, in which an injected call could be
    /// placed: so it is if the program is linked statically and its last page of code is full.
    #[error(
        "has no loaded object with {bytes} free bytes after its code, which observing needs to inject system calls"
    )]
    NoCodeCave {
        /// How many there have to be.
        bytes: usize,
    },
    /// No thread of the process can be made to execute an injected call.
    #[error(
        "has no thread that can execute an injected system call: all are busy with signals or in restartable sequences"
    )]
    NoThreadToRedirect,
    /// Each thread of the process has a seccomp filter that its parent does not have, and that may kill
    /// it for an injected system call.
    #[error(
        "has a seccomp filter that its parent does not have, which may kill it for the system calls that observing injects"
    )]
    SeccompFiltered,
    /// The process may not map memory that it executes.
    #[error("cannot map memory for trampolines: the kernel or a seccomp filter refuses")]
    MapRefused,
    /// Another observation of the process has begun, and has removed this one.
    #[error("has another observer now, which replaced this one")]
    Replaced,
    /// The observation has been removed.
    #[error("is not observed any more: the observation was removed")]
    Removed,
    /// The processors have no time stamp counter that runs at one rate; without a subject.
    #[error("this machine has no invariant TSC; latencies and timestamps are unavailable")]
    NoInvariantTsc,
    /// No memory can be shared with a program to be started; without a subject.
    #[error("cannot create memory to share with the program: {}", reason(source))]
    NoSharedMemory {
        /// What memfd_create(2) or ftruncate(2) says.
        source: io::Error,
    },
    /// More pairs than can be timed together; without a subject.
    #[error("{given} pairs are too many to be timed together: at most {most}")]
    TooManyPairs {
        /// How many there were.
        given: usize,
        /// How many there can be.
        most: usize,
    },
}
