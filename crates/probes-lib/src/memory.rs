//! [`Memory`]: the reads and writes that an update makes in a process, behind a trait, so that
//! planning and patching are tested without one.

use std::io;

use crate::address::LiveAddr;

/// Memory that can be read.
pub(crate) trait ReadMemory {
    /// Fills `bytes` from `at`. An error of kind [`io::ErrorKind::UnexpectedEof`] means that the
    /// address space is gone: the process has exited or executed another program.
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()>;
}

/// Memory that can be changed.
pub(crate) trait WriteMemory: ReadMemory {
    /// Writes `bytes` at `at`, in pages that the process itself may not be able to write.
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()>;

    /// The same by one write within a page, which is made or not, even if we are killed meanwhile;
    /// `false`, and nothing written, where code can only be written word by word.
    fn write_code_at_once(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
        self.write_code(at, bytes).map(|()| true)
    }

    /// Sets counters, exactly two bytes each, in the order given.
    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault>;
}

/// A counter could not be written; those before it were.
#[derive(Debug)]
pub(crate) struct CounterFault {
    /// How many counters were written.
    pub(crate) done: usize,
    /// What the kernel said of the next.
    pub(crate) source: io::Error,
}

#[cfg(test)]
pub(crate) mod double;
pub(crate) mod shadow;
pub(crate) mod spans;
