//! [`Arena`]: the memory that an observation maps into a process, as bytes. Pure.
//!
//! ```text
//! code, R-X   header   magic, version, how many sites, where the counters are
//!             table    of each site: its address, what it had there, its stub
//!             stubs    64 bytes each (stub.rs)
//! data, RW-   counters: a row of one u64 a site for each of 16 groups of threads
//! ```
//!
//! What is needed to put everything back stands in the code part, which is never written again: a
//! tool that dies leaves it to the next one.

use std::ops::Range;

use iced_x86::IcedError;

use crate::addr::LiveAddr;
use crate::observe::stub::{self, STUB_LEN};
use crate::spans::PAGE;

const MAGIC: [u8; 16] = *b"ocaml-probes obs";
const VERSION: u32 = 1;

pub(crate) const HEADER_LEN: usize = 64;
const ENTRY_LEN: usize = 24;

/// Where the header says where the counters are: stubs read it there.
const DATA_AT: u64 = 32;

/// More sites than any program has.
const MAX_SITES: usize = 1 << 22;

/// Groups of threads, each with counters of its own, so that they do not fight over them.
pub(crate) const GROUPS: usize = 1 << GROUP_BITS;
pub(crate) const GROUP_BITS: u32 = 4;

/// A site that is observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Of its nop.
    pub(crate) site: LiveAddr,
    /// What follows its opcode in its file: the displacement of its wrapper.
    pub(crate) operand: [u8; 4],
}

/// The memory of an observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Where its code begins, at a page.
    pub(crate) code: LiveAddr,
    pub(crate) entries: Vec<Entry>,
}

impl Arena {
    /// In bytes, whole pages.
    pub(crate) fn code_len(&self) -> u64 {
        let len = self.stub(self.entries.len()).0 - self.code.0;
        len.next_multiple_of(PAGE)
    }

    /// The counters follow the code.
    pub(crate) fn data(&self) -> LiveAddr {
        self.code.plus(self.code_len())
    }

    /// In bytes, whole pages.
    pub(crate) fn data_len(&self) -> u64 {
        (GROUPS as u64) << self.row_bits()
    }

    /// Binary logarithm of the bytes of a group's counters.
    fn row_bits(&self) -> u32 {
        let len = (self.entries.len() as u64 * 8).max(PAGE);
        len.next_power_of_two().trailing_zeros()
    }

    /// Where a stub begins.
    pub(crate) fn stub(&self, index: usize) -> LiveAddr {
        let table = HEADER_LEN + ENTRY_LEN * self.entries.len();
        let stubs = (table as u64).next_multiple_of(STUB_LEN);
        self.code.plus(stubs + STUB_LEN * index as u64)
    }

    /// The byte that decides what a stub does when it has counted.
    pub(crate) fn tail(&self, index: usize) -> LiveAddr {
        self.stub(index).plus(stub::TAIL)
    }

    /// Where the stubs are.
    pub(crate) fn stubs(&self) -> Range<u64> {
        self.stub(0).0..self.stub(self.entries.len()).0
    }

    /// What follows the opcode of an observed site: the displacement of its stub.
    pub(crate) fn call(&self, index: usize) -> [u8; 4] {
        displacement(self.entries[index].site.plus(6), self.stub(index))
    }

    /// All bytes of the code, for sites that are all disabled.
    ///
    /// # Errors
    ///
    /// If it is too far from its counters.
    pub(crate) fn code_bytes(&self) -> Result<Vec<u8>, IcedError> {
        let mut bytes = Vec::with_capacity(self.code_len() as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.entries.len() as u32).to_le_bytes());
        bytes.extend(self.code_len().to_le_bytes());
        bytes.extend(self.data().0.to_le_bytes());
        bytes.extend(self.data_len().to_le_bytes());
        bytes.resize(HEADER_LEN, 0);
        for (index, entry) in self.entries.iter().enumerate() {
            bytes.extend(entry.site.0.to_le_bytes());
            bytes.extend(entry.operand);
            bytes.extend([0; 4]);
            bytes.extend(self.stub(index).0.to_le_bytes());
        }
        let first = (self.stub(0).0 - self.code.0) as usize;
        bytes.resize(first, 0);
        for (index, entry) in self.entries.iter().enumerate() {
            let wrapper = entry.wrapper();
            let at = self.stub(index);
            let counter = stub::Counter {
                data: self.code.plus(DATA_AT),
                row_bits: self.row_bits(),
                offset: 8 * index as u32,
            };
            bytes.extend(stub::counting(at, counter, wrapper)?);
        }
        bytes.resize(self.code_len() as usize, 0);
        Ok(bytes)
    }

    /// How many entries a header at `code` tells of, if it is one.
    fn count_in(header: &[u8; HEADER_LEN]) -> Option<usize> {
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let count = word(20) as usize;
        let is_ours = header.starts_with(&MAGIC) && word(16) == VERSION;
        (is_ours && (1..=MAX_SITES).contains(&count)).then_some(count)
    }

    /// The arena whose code begins at `code`, if one does; `read` reads memory, and `len` bytes are
    /// mapped there.
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
        let entries = table.chunks_exact(ENTRY_LEN).map(Entry::parse).collect();
        let arena = Arena { code, entries };
        // It says of itself what follows from its count.
        let says =
            |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default());
        let is_whole = arena.code_len() <= len
            && says(24) == arena.code_len()
            && says(32) == arena.data().0
            && says(40) == arena.data_len();
        Ok(is_whole.then_some(arena))
    }

    /// The hits of each site, from the bytes of the counters.
    pub(crate) fn hits(&self, data: &[u8]) -> Vec<u64> {
        let rows = data.chunks_exact(1 << self.row_bits());
        let mut hits = vec![0_u64; self.entries.len()];
        for row in rows {
            for (sum, count) in hits.iter_mut().zip(row.chunks_exact(8)) {
                let count = u64::from_le_bytes(count.try_into().unwrap_or_default());
                *sum = sum.wrapping_add(count);
            }
        }
        hits
    }
}

impl Entry {
    /// Where the site's own displacement leads.
    fn wrapper(&self) -> LiveAddr {
        let displacement = i64::from(i32::from_le_bytes(self.operand));
        self.site.plus(6).plus(displacement as u64)
    }

    fn parse(bytes: &[u8]) -> Entry {
        let site = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        Entry {
            site: LiveAddr(site),
            operand: bytes[8..12].try_into().unwrap_or_default(),
        }
    }
}

/// From the end of an instruction to where it leads; the caller knows that it is near enough.
pub(crate) fn displacement(from: LiveAddr, to: LiveAddr) -> [u8; 4] {
    (to.0.wrapping_sub(from.0) as u32).to_le_bytes()
}
