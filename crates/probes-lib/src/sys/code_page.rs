//! Changes a page of code of our own process while other threads may execute it.
//!
//! No page of code may lose its permission to be executed, as a thread that is on it would die, nor
//! gain the permission to be written. So a new page of the same file is made beside it, filled,
//! protected, and moved into the old one's place:
//!
//! ```text
//! mmap      file ──▶ new page rw-   the code as it is, with the change
//! mprotect           new page r-x
//! mremap             new page ────▶ in the place of the old page, which is unmapped
//! ```
//!
//! To other threads, the move is one step: the kernel holds the lock of the address space from the
//! unmapping of the old page to the mapping of the new one, and a thread that faults on the page
//! meanwhile waits for that lock.

use std::io;
use std::mem;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use libc::c_void;
use nix::sys::mman::{MRemapFlags, MapFlags, ProtFlags, mmap, mprotect, mremap, munmap};

use crate::address::{LiveAddr, PAGE};

const PAGE_LEN: NonZeroUsize = NonZeroUsize::new(PAGE as usize).unwrap();

/// A page of a file that is mapped as code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePage<'f> {
    pub(crate) file: BorrowedFd<'f>,
    /// In bytes.
    pub(crate) offset: u64,
}

/// Replaces the page of our own code at `start`, which is mapped from `page`, by `code`: the bytes
/// that the page holds now, with the change made.
pub(crate) fn replace(
    page: FilePage<'_>,
    start: LiveAddr,
    code: &[u8; PAGE as usize],
) -> io::Result<()> {
    NewPage::map(page)?.fill(code)?.move_to(start)
}

/// A mapping of one page that no other code knows of; unmapped when dropped.
struct NewPage(NonNull<c_void>);

impl NewPage {
    fn map(page: FilePage<'_>) -> io::Result<NewPage> {
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let offset = libc::off_t::try_from(page.offset).map_err(io::Error::other)?;
        // SAFETY: the kernel chooses an address where nothing is mapped.
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
        // SAFETY: no other code uses the page yet.
        unsafe { mprotect(self.0, PAGE_LEN.get(), executable) }?;
        Ok(self)
    }

    fn move_to(self, start: LiveAddr) -> io::Result<()> {
        let place = NonNull::new(start.0 as *mut c_void).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        let len = PAGE_LEN.get();
        // SAFETY: at `place` is a page of code of the same file, which may be executed at any time
        // but is not read as data; the new one holds the same but for the bytes to change.
        unsafe { mremap(self.0, len, len, flags, Some(place)) }?;
        // The mapping is not at its old address any more: there is nothing to unmap.
        mem::forget(self);
        Ok(())
    }
}

impl Drop for NewPage {
    fn drop(&mut self) {
        // SAFETY: the page is ours alone.
        let _ = unsafe { munmap(self.0, PAGE_LEN.get()) };
    }
}
