//! [`ReadMemory`], [`WriteMemory`]: the reads and writes that an update makes in a process, behind
//! traits, so that planning and patching are tested without one, and a [`shadow`] can wrap them.

use std::io;

use crate::address::LiveAddr;

/// Memory that can be read.
pub(crate) trait ReadMemory {
    /// Fills `bytes` from `at`. An error of kind [`io::ErrorKind::UnexpectedEof`] means that the
    /// address space is gone: the process has exited or executed a new program.
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()>;

    /// Fills each buffer from its address. An error comes with the address that could not be read.
    fn read_pieces(
        &self,
        pieces: &mut [(LiveAddr, &mut [u8])],
    ) -> Result<(), (LiveAddr, io::Error)> {
        let mut pieces = pieces.iter_mut();
        pieces.try_for_each(|(at, bytes)| self.read(*at, bytes).map_err(|error| (*at, error)))
    }

    /// Reads the eight bytes at `at` as a number.
    fn read_word(&self, at: LiveAddr) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// Memory that can be written.
pub(crate) trait WriteMemory: ReadMemory {
    /// Writes `bytes` at `at`, in pages that the process itself may not be able to write.
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()>;

    /// Same as [`WriteMemory::write_code`], but page by page: of each page, all bytes are written or none, even if we
    /// are killed meanwhile. That holds only if `bytes` begin where a page does, or end before the next one. Returns
    /// false, and writes nothing, if this memory can only be written word by word.
    fn write_pages(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
        self.write_code(at, bytes).map(|()| true)
    }

    /// Writes counters, exactly two bytes each, in the order given.
    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault>;
}

/// The error for a counter that could not be written; those before it were.
#[derive(Debug)]
pub(crate) struct CounterFault {
    /// How many counters were written.
    pub(crate) done: usize,
    /// The error for the next one.
    pub(crate) source: io::Error,
}

#[cfg(test)]
pub(crate) mod double;
pub(crate) mod page_copies;
pub(crate) mod runs;
pub(crate) mod shadow;
