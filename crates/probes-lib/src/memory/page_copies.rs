//! [`PageCopies`]: copies of the pages that many small items are in. A process is stopped for a shorter time if its pages
//! are read once, in few calls.

use std::io;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::memory::ReadMemory;

/// How many bytes are read by one call at most.
const MAX_PIECE: u64 = 1 << 20;

/// How many bytes are copied at most, which is more than the code of any program; other pages are read each time.
const MAX_COPIED: u64 = 256 << 20;

/// Copies of pages of a process.
#[derive(Debug, Default)]
pub(crate) struct PageCopies {
    /// By address; they do not overlap.
    pieces: Vec<Piece>,
    /// What a piece is read into, to compare it with its bytes; kept to be allocated once.
    found: Vec<u8>,
}

#[derive(Debug)]
struct Piece {
    start: u64,
    bytes: Vec<u8>,
    /// Whether `bytes` is a copy: the last attempt to read the piece succeeded.
    is_read: bool,
}

impl PageCopies {
    /// Makes room for the pages of these items, given by address and length. Nothing is read yet.
    pub(crate) fn of(items: impl Iterator<Item = (LiveAddr, u64)>) -> PageCopies {
        let pages = items.map(|(at, len)| {
            let end = at.0.saturating_add(len).checked_next_multiple_of(PAGE);
            at.0 & !(PAGE - 1)..end.unwrap_or(u64::MAX)
        });
        let mut pages: Vec<Range<u64>> = pages.collect();
        pages.sort_unstable_by_key(|it| it.start);
        pages.dedup();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for page in pages {
            let Some(last) = ranges.last_mut() else {
                ranges.push(page);
                continue;
            };
            let is_short = page.end <= last.start.saturating_add(MAX_PIECE);
            if is_short && page.start <= last.end {
                last.end = last.end.max(page.end);
            } else {
                let start = page.start.max(last.end);
                ranges.push(start..page.end);
            }
        }
        let mut left = MAX_COPIED;
        ranges.retain(|range| {
            let len = range.end.saturating_sub(range.start);
            let rest = left.checked_sub(len).filter(|_| len > 0);
            left = rest.unwrap_or(left);
            rest.is_some()
        });
        let piece = |range: Range<u64>| Piece {
            start: range.start,
            bytes: vec![0; (range.end - range.start) as usize],
            is_read: false,
        };
        PageCopies {
            pieces: ranges.into_iter().map(piece).collect(),
            found: Vec::new(),
        }
    }

    /// Copies the pages as they are now, and returns whether any has changed since the last time. Those that cannot be read
    /// have no copy.
    ///
    /// # Errors
    ///
    /// If the address space is gone.
    pub(crate) fn update(&mut self, memory: &impl ReadMemory) -> io::Result<bool> {
        let mut is_changed = false;
        for piece in &mut self.pieces {
            self.found.resize(piece.bytes.len(), 0);
            let read = memory.read(LiveAddr(piece.start), &mut self.found);
            if let Err(error) = &read {
                if error.kind() == io::ErrorKind::UnexpectedEof {
                    return read.and(Ok(true));
                }
            }
            if read.is_ok() != piece.is_read || read.is_ok() && self.found != piece.bytes {
                is_changed = true;
                piece.is_read = read.is_ok();
                piece.bytes.copy_from_slice(&self.found);
            }
        }
        Ok(is_changed)
    }

    /// Returns `memory`, with the copied pages read from the copies. `memory` must not have changed since these were
    /// made.
    pub(crate) fn over<'c, M: ReadMemory>(&'c self, memory: &'c M) -> CopiedMemory<'c, M> {
        let copies = self;
        CopiedMemory { copies, memory }
    }

    /// Returns the copied bytes from an address on, up to the end of a piece.
    fn rest_at(&self, at: u64) -> Option<&[u8]> {
        let after = self.pieces.partition_point(|piece| piece.start <= at);
        let piece = self.pieces.get(after.checked_sub(1)?)?;
        let rest = piece.bytes.get((at - piece.start) as usize..)?;
        (piece.is_read && !rest.is_empty()).then_some(rest)
    }

    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = self.rest_at(at.0.checked_add(done as u64)?)?;
            let len = rest.len().min(bytes.len() - done);
            bytes[done..done + len].copy_from_slice(&rest[..len]);
            done += len;
        }
        Some(())
    }
}

/// Memory of which some pages are copied.
pub(crate) struct CopiedMemory<'c, M> {
    copies: &'c PageCopies,
    memory: &'c M,
}

impl<M: ReadMemory> ReadMemory for CopiedMemory<'_, M> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        match self.copies.read(at, bytes) {
            Some(()) => Ok(()),
            None => self.memory.read(at, bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::double::SliceMemory;

    /// Two pages, of which the first is full of ones and the second of twos.
    fn memory(start: u64) -> SliceMemory {
        let page = PAGE as usize;
        let bytes = [vec![1; page], vec![2; page]].concat();
        SliceMemory::new([(start, bytes)])
    }

    fn read(memory: &impl ReadMemory, at: u64) -> Option<[u8; 2]> {
        let mut bytes = [0; 2];
        memory.read(LiveAddr(at), &mut bytes).ok()?;
        Some(bytes)
    }

    #[test]
    fn copied_pages_are_not_read_again() {
        let items = [(0x2ff8, 16), (0x2800, 4), (0x7000, 1)];
        let items = items.map(|(at, len)| (LiveAddr(at), len));
        let mut copies = PageCopies::of(items.into_iter());
        let mut memory = memory(0x2000);
        assert_eq!(read(&copies.over(&memory), 0x2000), Some([1, 1]));
        assert!(copies.update(&memory).unwrap());
        assert!(!copies.update(&memory).unwrap());
        memory.poke(LiveAddr(0x2fff), &[9; 2]);
        // Also across the page boundary, and where the items are not.
        for (at, bytes) in [(0x2000, [1, 1]), (0x2fff, [1, 2]), (0x3ffe, [2, 2])] {
            assert_eq!(read(&copies.over(&memory), at), Some(bytes), "{at:x}");
        }
        for at in [0x1fff, 0x3fff, 0x7000, u64::MAX] {
            assert_eq!(read(&copies.over(&memory), at), None, "{at:x}");
        }
        assert!(copies.update(&memory).unwrap());
        assert_eq!(read(&copies.over(&memory), 0x2fff), Some([9, 9]));
    }

    #[test]
    fn length_of_all_copies_is_limited() {
        let step = MAX_PIECE / PAGE;
        let items = (0..2 * MAX_COPIED / PAGE).map(|page| (LiveAddr(page * PAGE), 1));
        let copies = PageCopies::of(items);
        let len: u64 = copies.pieces.iter().map(|it| it.bytes.len() as u64).sum();
        assert_eq!(len, MAX_COPIED);
        let longest = copies.pieces.iter().map(|it| it.bytes.len()).max();
        assert_eq!(longest, Some((step * PAGE) as usize));
        let ends = [(LiveAddr(u64::MAX - 1), 8), (LiveAddr(PAGE), u64::MAX)];
        assert!(PageCopies::of(ends.into_iter()).pieces.is_empty());
    }
}
