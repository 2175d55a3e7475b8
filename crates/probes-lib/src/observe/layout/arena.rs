//! [`Arena`]: the memory that an observation maps into a process, as bytes. Pure.
//!
//! ```text
//! code, R-X   header        magic, version, how many points, where the data are
//!             table         of each point: its address, its displaced operand, its trampoline
//!             trampolines   all of the same length (trampoline.rs)
//! data, RW-   counters      a row of one u64 a point for each of 16 groups of threads
//!             shared data   of all points, in the first arena (shared.rs)
//! ```
//!
//! The code part has all that is needed to remove the observation: if the tool is killed, the next one
//! does it. Only two things are written there again: the tails of trampolines, and the flag that all
//! points are restored.

use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::observe::layout::shared::{GROUPS, SharedLayout};
use crate::observe::point::{PATCH_LEN, Point};

const MAGIC: [u8; 16] = *b"ocaml-probes obs";
const VERSION: u32 = 2;

pub(crate) const HEADER_LEN: usize = 128;
const ENTRY_LEN: usize = 24;

/// In the header: the addresses of the counters and of the shared data, which the trampolines read.
const DATA_AT: u64 = 32;
const SHARED_AT: u64 = 48;

/// In the header: the id.
const ID_AT: usize = 64;

/// In the header: 1 once all points are restored.
const RESTORED_AT: u64 = 72;

/// A cache line: the length of trampolines is a multiple of it, in bytes.
pub(crate) const LINE: u64 = 64;

/// The bytes of the tail, with which a trampoline ends. Its first byte decides what the trampoline does
/// after it has recorded a hit: [`RET`](crate::site::RET) or [`JMP`](crate::site::JMP).
pub(crate) const TAIL_LEN: u64 = 8;

/// More points than any program has.
const MAX_POINTS: usize = 1 << 22;

/// More than all trampolines of an arena take: calls reach 2 GiB.
const MAX_CODE_LEN: u64 = 1 << 31;

/// Longer than any trampoline.
const MAX_TRAMPOLINE_LEN: u64 = 1 << 16;

/// The memory of an observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Where its code begins, at a page.
    pub(crate) code: LiveAddr,
    /// By address.
    pub(crate) points: Vec<Point>,
    /// The bytes of a trampoline.
    pub(crate) trampoline_len: u64,
    /// The layout of the shared data: empty if another arena has them.
    pub(crate) shared: SharedLayout,
    /// Random: an arena that is mapped later at the same address has another.
    pub(crate) id: u64,
}

impl Arena {
    /// Returns the length of the code in bytes, whole pages.
    pub(crate) fn code_len(&self) -> u64 {
        let len = self.trampoline(self.points.len()).0 - self.code.0;
        len.next_multiple_of(PAGE)
    }

    /// Returns the addresses of code and data.
    pub(crate) fn range(&self) -> Range<u64> {
        self.code.0..self.data().plus(self.data_len()).0
    }

    /// Returns where the data begin: they follow the code.
    pub(crate) fn data(&self) -> LiveAddr {
        self.code.plus(self.code_len())
    }

    /// Returns the length of the data in bytes, whole pages.
    pub(crate) fn data_len(&self) -> u64 {
        (self.counters_len() + self.shared.len()).next_multiple_of(PAGE)
    }

    /// Returns the length of the counters in bytes, whole pages.
    pub(crate) fn counters_len(&self) -> u64 {
        (GROUPS as u64) << self.row_bits()
    }

    /// Returns where the shared data begin: they follow the counters.
    pub(crate) fn shared_at(&self) -> LiveAddr {
        self.data().plus(self.counters_len())
    }

    /// Returns the binary logarithm of the bytes of a group's counters.
    pub(crate) fn row_bits(&self) -> u32 {
        let len = (self.points.len() as u64 * 8).max(PAGE);
        len.next_power_of_two().trailing_zeros()
    }

    /// Returns where the trampoline of a point begins.
    pub(crate) fn trampoline(&self, index: usize) -> LiveAddr {
        let table = HEADER_LEN + ENTRY_LEN * self.points.len();
        let trampolines = (table as u64).next_multiple_of(LINE);
        self.code
            .plus(trampolines + self.trampoline_len * index as u64)
    }

    /// Returns where the tail of the trampoline of a point begins.
    pub(crate) fn tail(&self, index: usize) -> LiveAddr {
        self.trampoline(index).plus(self.trampoline_len - TAIL_LEN)
    }

    /// Returns the addresses of all trampolines.
    pub(crate) fn trampolines(&self) -> Range<u64> {
        self.trampoline(0).0..self.trampoline(self.points.len()).0
    }

    /// Returns the patch of a point: a call of its trampoline.
    pub(crate) fn patch(&self, index: usize) -> [u8; PATCH_LEN] {
        self.points[index].patched(self.trampoline(index))
    }

    /// Returns the beginning of the code, up to the first trampoline: header and table. The arena
    /// `sharing` has the shared data.
    pub(crate) fn header_and_table(&self, sharing: &Arena) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.code_len() as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.points.len() as u32).to_le_bytes());
        bytes.extend((self.trampoline_len as u32).to_le_bytes());
        bytes.extend(self.shared.pairs.to_le_bytes());
        bytes.extend(self.data().0.to_le_bytes());
        bytes.extend(self.data_len().to_le_bytes());
        bytes.extend(sharing.shared_at().0.to_le_bytes());
        bytes.extend(self.shared.record_len.to_le_bytes());
        bytes.resize(ID_AT, 0);
        bytes.extend(self.id.to_le_bytes());
        bytes.resize(HEADER_LEN, 0);
        for (index, point) in self.points.iter().enumerate() {
            bytes.extend(point.address.0.to_le_bytes());
            bytes.extend(point.operand);
            bytes.extend([0; 4]);
            bytes.extend(self.trampoline(index).0.to_le_bytes());
        }
        let first = (self.trampoline(0).0 - self.code.0) as usize;
        bytes.resize(first, 0);
        bytes
    }

    /// Returns where the header has the address of the counters, for the trampolines.
    pub(crate) fn data_pointer(&self) -> LiveAddr {
        self.code.plus(DATA_AT)
    }

    /// Returns where the header has the address of the shared data, for the trampolines.
    pub(crate) fn shared_pointer(&self) -> LiveAddr {
        self.code.plus(SHARED_AT)
    }

    /// Returns how many points a header says that there are; `None` if it is not one of ours.
    fn count_in(header: &[u8; HEADER_LEN]) -> Option<usize> {
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let count = word(20) as usize;
        let is_ours = header.starts_with(&MAGIC) && word(16) == VERSION;
        (is_ours && (1..=MAX_POINTS).contains(&count)).then_some(count)
    }

    /// Returns the arena whose code begins at `code`, if there is one; `read` reads memory, and `len`
    /// bytes are mapped there.
    pub(crate) fn find<E>(
        code: LiveAddr,
        len: u64,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<Option<Arena>, E> {
        let mut header = [0; HEADER_LEN];
        read(code, &mut header)?;
        let Some(count) = Arena::count_in(&header) else {
            return Ok(None);
        };
        if (HEADER_LEN + ENTRY_LEN * count) as u64 > len {
            return Ok(None);
        }
        let mut table = vec![0; ENTRY_LEN * count];
        read(code.plus(HEADER_LEN as u64), &mut table)?;
        let number =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let arena = Arena {
            code,
            points: table.chunks_exact(ENTRY_LEN).map(parse_entry).collect(),
            trampoline_len: u64::from(number(24)),
            shared: SharedLayout {
                pairs: number(28),
                record_len: number(56),
            },
            id: word(&header, ID_AT),
        };
        let is_valid = (LINE..=MAX_TRAMPOLINE_LEN).contains(&arena.trampoline_len);
        let addresses = || arena.points.iter().map(|point| point.address);
        let is_valid = is_valid && addresses().all(|address| address.0 != 0);
        let is_valid = is_valid && addresses().is_sorted_by(|one, other| one < other);
        if !is_valid || arena.trampoline_len % LINE != 0 || !arena.shared.is_possible() {
            return Ok(None);
        }
        // The header repeats what follows from its other numbers.
        let says = |at: usize| word(&header, at);
        let is_whole = arena.code_len() <= len.min(MAX_CODE_LEN)
            && says(32) == arena.data().0
            && says(40) == arena.data_len();
        Ok(is_whole.then_some(arena))
    }

    /// Returns whether it is still mapped: another observer may have removed it.
    pub(crate) fn is_there<E>(
        &self,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut header = [0; HEADER_LEN];
        read(self.code, &mut header)?;
        Ok(Arena::count_in(&header).is_some() && word(&header, ID_AT) == self.id)
    }

    /// Returns the address of the flag that all its points are restored: what is found at the points
    /// later was not written by this observation.
    pub(crate) fn restored_flag(&self) -> LiveAddr {
        self.code.plus(RESTORED_AT)
    }

    /// Returns whether that flag is set.
    pub(crate) fn is_restored<E>(
        &self,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut byte = [0];
        read(self.restored_flag(), &mut byte)?;
        Ok(byte == [1])
    }

    /// Returns the hits of each point, from the bytes of the counters.
    pub(crate) fn hits(&self, data: &[u8]) -> Vec<u64> {
        let rows = data.chunks_exact(1 << self.row_bits());
        let mut hits = vec![0_u64; self.points.len()];
        for row in rows {
            for (sum, count) in hits.iter_mut().zip(row.chunks_exact(8)) {
                let count = u64::from_le_bytes(count.try_into().unwrap_or_default());
                *sum = sum.wrapping_add(count);
            }
        }
        hits
    }
}

/// Returns the point of an entry of the table.
fn parse_entry(bytes: &[u8]) -> Point {
    let address = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
    Point {
        address: LiveAddr(address),
        operand: bytes[8..12].try_into().unwrap_or_default(),
    }
}

fn word(header: &[u8; HEADER_LEN], at: usize) -> u64 {
    u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default())
}

/// Returns a random id.
pub(crate) fn new_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // It has random keys.
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe::layout::shared::record;

    fn arena() -> (Arena, Vec<u8>) {
        let point = |index: u64| Point {
            address: LiveAddr(0x5555_0000_0000 + 16 * index),
            operand: [1, 2, 3, index as u8],
        };
        let arena = Arena {
            code: LiveAddr(0x5555_1000_0000),
            points: (0..100).map(point).collect(),
            trampoline_len: 4 * LINE,
            shared: SharedLayout {
                pairs: 2,
                record_len: record::len(3),
            },
            id: new_id(),
        };
        let mut bytes = arena.header_and_table(&arena);
        bytes.resize(arena.code_len() as usize, 0);
        (arena, bytes)
    }

    fn find(arena: &Arena, bytes: &[u8]) -> Option<Arena> {
        let read = |at: LiveAddr, to: &mut [u8]| -> Result<(), ()> {
            let start = at.0.checked_sub(arena.code.0).ok_or(())? as usize;
            let from = bytes.get(start..).and_then(|rest| rest.get(..to.len()));
            to.copy_from_slice(from.ok_or(())?);
            Ok(())
        };
        let found = Arena::find(arena.code, bytes.len() as u64, read);
        found.ok().flatten()
    }

    #[test]
    fn table_longer_than_the_mapping_is_not_read() {
        let (arena, bytes) = arena();
        let reads = std::cell::Cell::new(0);
        let read = |at: LiveAddr, to: &mut [u8]| -> Result<(), ()> {
            reads.set(reads.get() + 1);
            let start = (at.0 - arena.code.0) as usize;
            to.copy_from_slice(&bytes[start..start + to.len()]);
            Ok(())
        };
        let table_end = (HEADER_LEN + ENTRY_LEN * arena.points.len()) as u64;
        assert_eq!(Arena::find(arena.code, table_end - 1, read), Ok(None));
        assert_eq!(reads.get(), 1);
    }

    #[test]
    fn removal_finds_all_it_needs_in_the_arena() {
        let (arena, bytes) = arena();
        assert_eq!(bytes.len() as u64, arena.code_len());
        assert_eq!(find(&arena, &bytes), Some(arena.clone()));
        assert!(new_id() != arena.id);
        // A part of an arena is not an arena.
        for len in [0, HEADER_LEN - 1, HEADER_LEN, 1000, bytes.len() - 1] {
            assert_eq!(find(&arena, &bytes[..len]), None);
        }
    }

    proptest! {
        #[test]
        fn any_header_is_refused_or_fits(
            places in prop::collection::vec((16..HEADER_LEN, any::<u8>()), 1..8),
        ) {
            let (arena, mut bytes) = arena();
            for (at, byte) in places {
                bytes[at] = byte;
            }
            if let Some(found) = find(&arena, &bytes) {
                prop_assert!(found.code_len() <= bytes.len() as u64);
                prop_assert!(found.data_len() < 1 << 40);
            }
        }
    }
}
