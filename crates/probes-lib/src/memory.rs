//! [`Memory`]: the reads and writes that an update makes in a process, behind a trait, so that
//! planning and patching are tested without one.

use std::io;

use crate::addr::LiveAddr;

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

/// Bytes of our own that stand for a process's, with writes that can be made to fail.
#[cfg(test)]
pub(crate) mod double {
    use super::*;

    /// `bytes` at address `base`; the write number `fail_at` (from 0) and `fail_count - 1` more
    /// fail, where a counter is one write.
    #[derive(Clone, Debug)]
    pub(crate) struct SliceMemory {
        pub(crate) base: u64,
        pub(crate) bytes: Vec<u8>,
        pub(crate) writes: usize,
        pub(crate) fail: std::ops::Range<usize>,
    }

    impl SliceMemory {
        pub(crate) fn new(base: u64, bytes: Vec<u8>) -> SliceMemory {
            SliceMemory {
                base,
                bytes,
                writes: 0,
                fail: 0..0,
            }
        }

        fn range(&self, at: LiveAddr, len: usize) -> io::Result<std::ops::Range<usize>> {
            let start = at.0.checked_sub(self.base).map(|start| start as usize);
            start
                .filter(|&start| {
                    start
                        .checked_add(len)
                        .is_some_and(|end| end <= self.bytes.len())
                })
                .map(|start| start..start + len)
                .ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))
        }

        fn write(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
            let number = self.writes;
            self.writes += 1;
            if self.fail.contains(&number) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let range = self.range(at, bytes.len())?;
            self.bytes[range].copy_from_slice(bytes);
            Ok(())
        }
    }

    impl ReadMemory for SliceMemory {
        fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            let range = self.range(at, bytes.len())?;
            bytes.copy_from_slice(&self.bytes[range]);
            Ok(())
        }
    }

    impl WriteMemory for SliceMemory {
        fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
            self.write(at, bytes)
        }

        fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
            for (done, &(at, value)) in writes.iter().enumerate() {
                self.write(at, &value.to_le_bytes())
                    .map_err(|source| CounterFault { done, source })?;
            }
            Ok(())
        }
    }
}
