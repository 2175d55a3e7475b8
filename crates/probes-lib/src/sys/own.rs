//! Memory of our own process, to be changed while its other threads run.
//!
//! No page of code may lose its permission to be executed, for a thread that is on it then would die,
//! nor have that to be written as well. So code is written through /proc/self/mem, past the protection
//! of the page, which stays as it is. Where the kernel refuses that (proc_mem.force_override), a new
//! page of the same file is made beside it, filled, protected, and moved into the old one's place:
//!
//! ```text
//! mmap      file ──▶ new page rw-   the code as it is, with the change
//! mprotect           new page r-x
//! mremap             new page ────▶ in the place of the old page, which goes
//! ```
//!
//! The move is one step for everybody else: the kernel holds the lock of the address space from the
//! unmapping of the old page to the mapping of the new one, and a thread that misses the page
//! meanwhile waits for that lock.

use std::io;
use std::mem;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use libc::c_void;
use nix::sys::mman::{MRemapFlags, MapFlags, ProtFlags, mmap, mprotect, mremap, munmap};

use crate::address::{LiveAddr, PAGE};
use crate::memory::{CounterFault, ReadMemory, WriteMemory};
use crate::process::memory::{ProcessMemory, RunningMemory};

const PAGE_LEN: NonZeroUsize = NonZeroUsize::new(PAGE as usize).unwrap();

/// A page of a file that is mapped as code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePage<'f> {
    pub(crate) file: BorrowedFd<'f>,
    /// In bytes.
    pub(crate) offset: u64,
}

/// Our own memory.
pub(crate) struct OwnMemory<'m, F> {
    memory: RunningMemory<'m>,
    /// What is mapped in the page at an address, if that is code of a file and nothing else.
    mapped: F,
}

impl<'m, 'f, F: Fn(LiveAddr) -> Option<FilePage<'f>>> OwnMemory<'m, F> {
    /// `memory` has to be that of this process.
    pub(crate) fn new(memory: &'m ProcessMemory, mapped: F) -> OwnMemory<'m, F> {
        OwnMemory {
            memory: memory.while_it_runs(),
            mapped,
        }
    }

    /// Changes code by putting another page into the place of the one it is on.
    fn replace_page(&self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        let offset = (at.0 % PAGE) as usize;
        let start = LiveAddr(at.0 - offset as u64);
        let page = (self.mapped)(start).ok_or_else(|| {
            io::Error::other("the kernel forbids it (proc_mem.force_override), and it is not mapped from its file")
        })?;
        let mut code = [0; PAGE as usize];
        self.memory.read(start, &mut code)?;
        code.get_mut(offset..offset + bytes.len())
            .ok_or(io::ErrorKind::InvalidInput)?
            .copy_from_slice(bytes);
        NewPage::of(page)?.fill(&code)?.move_to(start)
    }
}

impl<F> ReadMemory for OwnMemory<'_, F> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read(at, bytes)
    }
}

impl<'f, F: Fn(LiveAddr) -> Option<FilePage<'f>>> WriteMemory for OwnMemory<'_, F> {
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

/// A mapping of one page that nobody else knows of; unmapped when dropped.
struct NewPage(NonNull<c_void>);

impl NewPage {
    fn of(page: FilePage<'_>) -> io::Result<NewPage> {
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let offset = libc::off_t::try_from(page.offset).map_err(io::Error::other)?;
        // SAFETY: the kernel chooses an address where nothing is.
        let new = unsafe {
            mmap(
                None,
                PAGE_LEN,
                writable,
                MapFlags::MAP_PRIVATE,
                page.file,
                offset,
            )
        };
        Ok(NewPage(new?))
    }

    fn fill(self, code: &[u8; PAGE as usize]) -> io::Result<NewPage> {
        // SAFETY: the page is ours alone, can be written, and is as long as `code`.
        unsafe { self.0.cast::<[u8; PAGE as usize]>().write(*code) };
        let executable = ProtFlags::PROT_READ | ProtFlags::PROT_EXEC;
        // SAFETY: nobody uses the page yet.
        unsafe { mprotect(self.0, PAGE_LEN.get(), executable) }?;
        Ok(self)
    }

    fn move_to(self, start: LiveAddr) -> io::Result<()> {
        let place = NonNull::new(start.0 as *mut c_void).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        let len = PAGE_LEN.get();
        // SAFETY: what is at `place` is a page of code of the same file, which may be executed at any
        // time but is not looked at as data; the new one holds the same but for the bytes to change.
        unsafe { mremap(self.0, len, len, flags, Some(place)) }?;
        // It is not where it was any more.
        mem::forget(self);
        Ok(())
    }
}

impl Drop for NewPage {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody has been told of it.
        let _ = unsafe { munmap(self.0, PAGE_LEN.get()) };
    }
}
