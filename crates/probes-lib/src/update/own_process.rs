//! [`OwnMemory`]: memory of our own process, to be changed while its other threads run.
//!
//! Code is written through /proc/self/mem, past the protection of the page, which stays as it is.
//! Where the kernel refuses that (proc_mem.force_override), the page is replaced by a new one
//! ([`code_page`]).

use std::io;

use crate::address::{LiveAddr, PAGE};
use crate::memory::{CounterFault, ReadMemory, WriteMemory};
use crate::sys::code_page::{self, FilePage};

/// Our own memory.
pub(crate) struct OwnMemory<M, F> {
    memory: M,
    /// Returns what is mapped in the page at an address, if that is code of a file and nothing else.
    mapped: F,
}

impl<'f, M: ReadMemory, F: Fn(LiveAddr) -> Option<FilePage<'f>>> OwnMemory<M, F> {
    /// `memory` has to be that of this process.
    pub(crate) fn new(memory: M, mapped: F) -> OwnMemory<M, F> {
        OwnMemory { memory, mapped }
    }

    /// Writes code by replacing the page it is on.
    fn replace_page(&self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        let offset = (at.0 % PAGE) as usize;
        let start = LiveAddr(at.0 - offset as u64);
        let page = (self.mapped)(start).ok_or_else(|| {
            io::Error::other("the kernel forbids writing to code (proc_mem.force_override), and the page is not mapped from its file")
        })?;
        let mut code = [0; PAGE as usize];
        self.memory.read(start, &mut code)?;
        code.get_mut(offset..offset + bytes.len())
            .ok_or(io::ErrorKind::InvalidInput)?
            .copy_from_slice(bytes);
        code_page::replace(page, start, &code)
    }
}

impl<M: ReadMemory, F> ReadMemory for OwnMemory<M, F> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read(at, bytes)
    }
}

impl<'f, M, F> WriteMemory for OwnMemory<M, F>
where
    M: WriteMemory,
    F: Fn(LiveAddr) -> Option<FilePage<'f>>,
{
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        match self.memory.write_code(at, bytes) {
            Err(error) if error.raw_os_error() == Some(libc::EIO) => self.replace_page(at, bytes),
            result => result,
        }
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        self.memory.write_counters(writes)
    }
}
