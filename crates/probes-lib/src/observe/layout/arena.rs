//! [`Arena`]: the memory that an observation maps into a process, as bytes. Pure.
//!
//! ```text
//! code, R-X   header   magic, version, how many sites, where the data are
//!             table    of each site: its address, what it had there, its trampoline
//!             trampolines    all of the same length (trampoline.rs)
//! data, RW-   counters: a row of one u64 a site for each of 16 groups of threads
//!             what is shared by all sites, in the first arena (shared.rs)
//! ```
//!
//! What is needed to put everything back stands in the code part, of which nothing is written again but
//! the tails of trampolines, and that its sites were given back: a tool that dies leaves it to the next one.

use std::collections::HashMap;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::observe::layout::shared::Shared;
use crate::observe::plan::Role;
use crate::observe::trampoline::{self, DoesNotFit, LINE, TAIL_LEN, TrampolinePlaces};

const MAGIC: [u8; 16] = *b"ocaml-probes obs";
const VERSION: u32 = 2;

pub(crate) const HEADER_LEN: usize = 128;
const ENTRY_LEN: usize = 24;

/// Where the header says where the counters are, and what is shared: trampolines read it there.
const DATA_AT: u64 = 32;
const SHARED_AT: u64 = 48;

/// Where the header has the id.
const ID_AT: usize = 64;

/// Where it has a 1 once all sites have got their own calls back.
const RESTORED_AT: u64 = 72;

/// More sites than any program has.
const MAX_SITES: usize = 1 << 22;

/// More than all trampolines of any program take: they are reached by calls from where they are called.
const MAX_CODE_LEN: u64 = 1 << 31;

/// Longer than any trampoline.
const MAX_TRAMPOLINE_LEN: u64 = 1 << 16;

/// Groups of threads, each with counters of its own, so that they do not fight over them.
pub(crate) const GROUPS: usize = 1 << GROUP_BITS;
pub(crate) const GROUP_BITS: u32 = 4;

/// A site that is observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObservedSite {
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
    pub(crate) entries: Vec<ObservedSite>,
    /// The bytes of a trampoline.
    pub(crate) trampoline_len: u64,
    /// What of its data is shared: nothing if another arena has it.
    pub(crate) shared: Shared,
    /// Tells it from others that may come to have its place.
    pub(crate) id: u64,
}

impl Arena {
    /// In bytes, whole pages.
    pub(crate) fn code_len(&self) -> u64 {
        let len = self.trampoline(self.entries.len()).0 - self.code.0;
        len.next_multiple_of(PAGE)
    }

    /// All of it.
    pub(crate) fn range(&self) -> Range<u64> {
        self.code.0..self.data().plus(self.data_len()).0
    }

    /// The counters follow the code.
    pub(crate) fn data(&self) -> LiveAddr {
        self.code.plus(self.code_len())
    }

    /// In bytes, whole pages.
    pub(crate) fn data_len(&self) -> u64 {
        (self.counters_len() + self.shared.len()).next_multiple_of(PAGE)
    }

    /// In bytes, whole pages.
    pub(crate) fn counters_len(&self) -> u64 {
        (GROUPS as u64) << self.row_bits()
    }

    /// What is shared follows the counters.
    pub(crate) fn shared_at(&self) -> LiveAddr {
        self.data().plus(self.counters_len())
    }

    /// Binary logarithm of the bytes of a group's counters.
    fn row_bits(&self) -> u32 {
        let len = (self.entries.len() as u64 * 8).max(PAGE);
        len.next_power_of_two().trailing_zeros()
    }

    /// Where a trampoline begins.
    pub(crate) fn trampoline(&self, index: usize) -> LiveAddr {
        let table = HEADER_LEN + ENTRY_LEN * self.entries.len();
        let trampolines = (table as u64).next_multiple_of(LINE);
        self.code
            .plus(trampolines + self.trampoline_len * index as u64)
    }

    /// The byte that decides what a trampoline does when it has results of a hit.
    pub(crate) fn tail(&self, index: usize) -> LiveAddr {
        self.trampoline(index).plus(self.trampoline_len - TAIL_LEN)
    }

    /// Where the trampolines are.
    pub(crate) fn trampolines(&self) -> Range<u64> {
        self.trampoline(0).0..self.trampoline(self.entries.len()).0
    }

    /// What follows the opcode of an observed site: the displacement of its trampoline.
    pub(crate) fn call(&self, index: usize) -> [u8; 4] {
        displacement(self.entries[index].site.plus(6), self.trampoline(index))
    }

    /// All bytes of the code, for sites that are all disabled and have these roles; the arena `sharing`
    /// has what is shared.
    ///
    /// # Errors
    ///
    /// If it is too far from its counters, or its trampolines are longer than was said of them.
    pub(crate) fn code_bytes<'r>(
        &self,
        roles: impl Iterator<Item = &'r Role>,
        sharing: &Arena,
    ) -> Result<Vec<u8>, DoesNotFit> {
        let mut bytes = Vec::with_capacity(self.code_len() as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.entries.len() as u32).to_le_bytes());
        bytes.extend((self.trampoline_len as u32).to_le_bytes());
        bytes.extend(self.shared.pairs.to_le_bytes());
        bytes.extend(self.data().0.to_le_bytes());
        bytes.extend(self.data_len().to_le_bytes());
        bytes.extend(sharing.shared_at().0.to_le_bytes());
        bytes.extend(self.shared.record_len.to_le_bytes());
        bytes.resize(ID_AT, 0);
        bytes.extend(self.id.to_le_bytes());
        bytes.resize(HEADER_LEN, 0);
        for (index, entry) in self.entries.iter().enumerate() {
            bytes.extend(entry.site.0.to_le_bytes());
            bytes.extend(entry.operand);
            bytes.extend([0; 4]);
            bytes.extend(self.trampoline(index).0.to_le_bytes());
        }
        let first = (self.trampoline(0).0 - self.code.0) as usize;
        bytes.resize(first, 0);
        for ((index, entry), role) in self.entries.iter().enumerate().zip(roles) {
            let places = TrampolinePlaces {
                counters: self.code.plus(DATA_AT),
                row_bits: self.row_bits(),
                counter: 8 * index as u32,
                shared: self.code.plus(SHARED_AT),
                layout: sharing.shared,
            };
            let at = self.trampoline(index);
            bytes.extend(trampoline::whole(
                at,
                self.trampoline_len,
                role,
                &places,
                entry.wrapper(),
            )?);
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
        let number =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let arena = Arena {
            code,
            entries: table
                .chunks_exact(ENTRY_LEN)
                .map(ObservedSite::parse)
                .collect(),
            trampoline_len: u64::from(number(24)),
            shared: Shared {
                pairs: number(28),
                record_len: number(56),
            },
            id: word(&header, ID_AT),
        };
        let is_valid = (LINE..=MAX_TRAMPOLINE_LEN).contains(&arena.trampoline_len);
        let mut sites = arena.entries.iter().map(|entry| entry.site);
        let is_valid = is_valid && sites.all(|site| site.0 != 0);
        let is_valid = is_valid
            && arena
                .entries
                .is_sorted_by(|one, other| one.site < other.site);
        if !is_valid || arena.trampoline_len % LINE != 0 || !arena.shared.is_possible() {
            return Ok(None);
        }
        // It says of itself what follows from its count.
        let says = |at: usize| word(&header, at);
        let is_whole = arena.code_len() <= len.min(MAX_CODE_LEN)
            && says(32) == arena.data().0
            && says(40) == arena.data_len();
        Ok(is_whole.then_some(arena))
    }

    /// Whether it is still where it was: another observation may have put it back.
    pub(crate) fn is_there<E>(
        &self,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut header = [0; HEADER_LEN];
        read(self.code, &mut header)?;
        Ok(Arena::count_in(&header).is_some() && word(&header, ID_AT) == self.id)
    }

    /// Where it is said that its sites have got their own calls back. They are nobody's then: what
    /// happens to them afterwards is not its own.
    pub(crate) fn restored_flag(&self) -> LiveAddr {
        self.code.plus(RESTORED_AT)
    }

    /// Whether that is said.
    pub(crate) fn is_restored<E>(
        &self,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut byte = [0];
        read(self.restored_flag(), &mut byte)?;
        Ok(byte == [1])
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

impl ObservedSite {
    /// Where the site's own displacement leads.
    pub(crate) fn wrapper(&self) -> LiveAddr {
        let displacement = i64::from(i32::from_le_bytes(self.operand));
        self.site.plus(6).plus(displacement as u64)
    }

    fn parse(bytes: &[u8]) -> ObservedSite {
        let site = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        ObservedSite {
            site: LiveAddr(site),
            operand: bytes[8..12].try_into().unwrap_or_default(),
        }
    }
}

fn word(header: &[u8; HEADER_LEN], at: usize) -> u64 {
    u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default())
}

/// An id that no other has.
pub(crate) fn new_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Keyed anew at random.
    RandomState::new().hash_one(std::process::id())
}

/// How long the longest trampoline of these roles is.
///
/// # Errors
///
/// As of [`trampoline::len`].
pub(crate) fn trampoline_len<'r>(
    roles: impl Iterator<Item = &'r Role>,
    layout: Shared,
) -> Result<u64, DoesNotFit> {
    // Most have the same, but for which site it is.
    let mut lens: HashMap<Role, u64> = HashMap::new();
    let mut longest = LINE;
    for role in roles {
        let mut shape = role.clone();
        if let Some(watched) = &mut shape.watched {
            watched.site = 0;
        }
        let len = match lens.get(&shape) {
            Some(len) => *len,
            None => {
                let len = trampoline::len(role, layout)?;
                lens.insert(shape, len);
                len
            }
        };
        longest = longest.max(len);
    }
    Ok(longest)
}

/// From the end of an instruction to where it leads; the caller knows that it is near enough.
pub(crate) fn displacement(from: LiveAddr, to: LiveAddr) -> [u8; 4] {
    (to.0.wrapping_sub(from.0) as u32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::observe::layout::shared::record;
    use crate::observe::plan::{PairEnd, WatchRole};

    fn arena() -> (Arena, Vec<u8>) {
        let entry = |index: u64| ObservedSite {
            site: LiveAddr(0x5555_0000_0000 + 16 * index),
            operand: [1, 2, 3, index as u8],
        };
        let ends = vec![PairEnd::Stop(0), PairEnd::Start(1)];
        let role = Role {
            is_counted: true,
            ends,
            watched: Some(WatchRole::default()),
        };
        let roles = vec![role; 100];
        let shared = Shared {
            pairs: 2,
            record_len: record::len(3),
        };
        let arena = Arena {
            code: LiveAddr(0x5555_1000_0000),
            entries: (0..100).map(entry).collect(),
            trampoline_len: trampoline_len(roles.iter(), shared).unwrap(),
            shared,
            id: new_id(),
        };
        let bytes = arena.code_bytes(roles.iter(), &arena).unwrap();
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
    fn removal_finds_all_it_needs_in_the_arena() {
        let (arena, bytes) = arena();
        assert_eq!(bytes.len() as u64, arena.code_len());
        assert_eq!(find(&arena, &bytes), Some(arena.clone()));
        assert!(new_id() != arena.id);
        for index in 0..100 {
            let tail = (arena.tail(index).0 - arena.code.0) as usize;
            assert_eq!(bytes[tail], trampoline::RET);
        }
        // Cut short, it is none.
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
