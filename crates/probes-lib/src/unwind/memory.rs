//! [`StackMemory`], the memory that stacks are read from, and [`CachedPages`], a cache of the pages of a process.

use std::collections::HashMap;
use std::mem;

use crate::address::{LiveAddr, PAGE};
use crate::memory::ReadMemory;
use crate::process::memory::Page;

/// The memory that stacks are read from.
pub(crate) trait StackMemory {
    /// Fills `bytes` from `at`; `None` if that cannot be read.
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()>;

    /// Returns the word at `at`; `None` if it cannot be read.
    fn word(&mut self, at: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }
}

/// The number of cached pages at which the cache is emptied.
const MAX_PAGES: usize = 1 << 12;

/// How many of the used pages are known at most.
const MAX_USED: usize = 64;

/// How many pages are read at once if all of them are mapped.
const AT_ONCE: usize = 4;

const PAGE_LEN: usize = PAGE as usize;

/// The end of the user half of the address space, with 4-level page tables.
const USER_END: u64 = 1 << 47;

/// Pages of a process, cached.
pub(crate) struct CachedPages<'m, M> {
    memory: &'m M,
    /// `None` if the page cannot be read.
    pages: HashMap<u64, Option<Page>>,
    /// The pages that were used since they were last taken, at most [`MAX_USED`].
    used: Vec<u64>,
}

impl<'m, M: ReadMemory> CachedPages<'m, M> {
    pub(crate) fn new(memory: &'m M) -> CachedPages<'m, M> {
        CachedPages {
            memory,
            pages: HashMap::new(),
            used: Vec::new(),
        }
    }

    /// Adds pages that were read, with the addresses where they begin.
    pub(crate) fn add(&mut self, pages: impl IntoIterator<Item = (u64, Page)>) {
        let pages = pages.into_iter().map(|(start, page)| (start, Some(page)));
        self.pages.extend(pages);
    }

    /// Returns the addresses of the pages that were used since this was last called.
    pub(crate) fn take_used(&mut self) -> Vec<u64> {
        mem::take(&mut self.used)
    }

    fn page(&mut self, at: u64) -> Option<&[u8; PAGE_LEN]> {
        let start = at - at % PAGE;
        if !self.pages.contains_key(&start) {
            if self.pages.len() >= MAX_PAGES {
                self.pages.clear();
            }
            self.load(start);
        }
        let page = self.pages.get(&start)?.as_deref()?;
        if self.used.len() < MAX_USED && !self.used.contains(&start) {
            self.used.push(start);
        }
        Some(page)
    }

    /// Reads a page, and the following ones if all [`AT_ONCE`] can be read.
    fn load(&mut self, start: u64) {
        let mut several = [0; AT_ONCE * PAGE_LEN];
        let has_all = start < USER_END - several.len() as u64
            && self.memory.read(LiveAddr(start), &mut several).is_ok();
        if has_all {
            for (page, bytes) in (0..).zip(several.chunks_exact(PAGE_LEN)) {
                let page = start + page * PAGE;
                self.pages
                    .entry(page)
                    .or_insert_with(|| bytes.try_into().ok().map(Box::new));
            }
            return;
        }
        let mut one = [0; PAGE_LEN];
        let is_there = start < USER_END && self.memory.read(LiveAddr(start), &mut one).is_ok();
        self.pages.insert(start, is_there.then(|| Box::new(one)));
    }
}

impl<M: ReadMemory> StackMemory for CachedPages<'_, M> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            let from = at.checked_add(done as u64)?;
            let offset = (from % PAGE) as usize;
            let page = self.page(from)?;
            let len = (bytes.len() - done).min(PAGE_LEN - offset);
            bytes[done..done + len].copy_from_slice(&page[offset..offset + len]);
            done += len;
        }
        Some(())
    }
}
