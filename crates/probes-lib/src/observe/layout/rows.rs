//! [`Rows`]: the layout of the hit counters of an arena, as offsets in its data. Pure.
//!
//! ```text
//! claims   for each thread, and each part of its stack in which it hits points: the row that it owns
//! header   how many rows have an owner, and which shared rows are used
//! shared   8 rows for threads that own none: they are incremented by locked instructions
//! owned    32 rows, each incremented, without a lock, by one thread or by the OCaml code of one domain; the last row
//!          is that of the first domain
//! ```
//!
//! A row has a u64 for each point. The hits of a point are the sum of its column.
//!
//! A thread is identified by its `fs` base and by the 16 KiB that its stack pointer is in. Threads that were created
//! without thread-local storage of their own have the same `fs` base, but other stacks. A thread whose stack reaches
//! into several parts, or that has several stacks, owns several rows.
//!
//! In each domain, only the thread that holds the domain's lock executes OCaml code; in OCaml 4, there is one lock for
//! all threads. So OCaml functions are counted in a row of the domain, which is known by the address of its state, in
//! r14.
//!
//! The claims are the process's own, even if the rows are shared with the observer: the kernel clears them in a forked
//! child (`MADV_WIPEONFORK`), which has the `fs` bases and the stacks of its parent, and claims other rows.

use std::ops::Range;

use crate::address::PAGE;
use crate::numbers::u32_at;

/// Binary logarithm of the length of a part of a stack, in bytes.
pub(crate) const STACK_PART_BITS: u32 = 14;

/// How many claims there is room for, a power of two: so many that two threads rarely select the same one.
pub(crate) const CLAIMS: u64 = 1 << CLAIM_BITS;
pub(crate) const CLAIM_BITS: u32 = 9;
/// How many claims a thread tries: the aligned group of this many claims around the one that its hash selects.
pub(crate) const CLAIMS_TRIED: u64 = 8;
pub(crate) const CLAIM_LEN: u64 = 1 << CLAIM_LEN_BITS;
pub(crate) const CLAIM_LEN_BITS: u32 = 5;

/// The fields of a claim, eight bytes each. All zero: it is free.
pub(crate) mod claim {
    /// The stack pointer, shifted right by [`STACK_PART_BITS`](super::STACK_PART_BITS). Written last.
    pub(crate) const STACK_PART: u64 = 0;
    /// The `fs` base of the thread. Written after the row.
    pub(crate) const OWNER: u64 = 8;
    /// The address of the row, less [`ROW_BIAS`](super::ROW_BIAS).
    pub(crate) const ROW: u64 = 16;
    /// In the first claim: not zero in the program itself, so that forked children, for which the kernel clears it, are
    /// distinguished. Only if functions are timed from the program's first instruction.
    pub(crate) const IN_PROGRAM: u64 = 24;
    /// In place of the part of the stack, while the claim is written; it stays if no row is left for it.
    pub(crate) const IN_PROGRESS: i32 = -1;
    /// In place of the part of the stack, in a claim of a domain. The owner is the address of the domain's state.
    pub(crate) const OF_DOMAIN: i32 = -2;
    /// As an offset from the first claim: the address of the first domain's state, whose row needs no claim; 0 until it
    /// has an owner. It is stored in the second claim, after the fields of that claim.
    pub(crate) const FIRST_DOMAIN: u64 = super::CLAIM_LEN + 24;
}

/// The length of the claims, which are wiped in forked children.
pub(crate) const CLAIMS_LEN: u64 = CLAIMS * CLAIM_LEN;
/// With a page that is unused: see [`PAGES_WIPED`](crate::observe::layout::shared::PAGES_WIPED).
pub(crate) const CLAIMS_MAPPED: u64 = CLAIMS_LEN + PAGE;

/// The fields of the header, as offsets in it.
pub(crate) mod header {
    use super::SHARED_ROWS;

    /// How many rows were claimed, four bytes; it may be more than there are.
    pub(crate) const CLAIMED: u64 = 0;
    /// Four bytes: 1 once the row of the first domain has an owner.
    pub(crate) const HAS_DOMAIN: u64 = 4;
    /// A byte for each shared row: 1 once it is used.
    pub(crate) const USED: u64 = 8;
    pub(crate) const LEN: u64 = super::LINES;
    const _: () = assert!(USED + SHARED_ROWS <= LEN);
}

/// How many rows can be claimed.
pub(crate) const CLAIMED_ROWS: u64 = 31;
/// How many rows can have an owner: these, and that of the first domain.
const OWNED_ROWS: u64 = CLAIMED_ROWS + 1;
pub(crate) const SHARED_ROWS: u64 = 1 << SHARED_ROW_BITS;
pub(crate) const SHARED_ROW_BITS: u32 = 3;

/// The length of a cache line and of the one that is prefetched with it: threads that write to either contend for both.
const LINES: u64 = 128;

/// Added to the offset of each counter in its row, and subtracted from the address of the row, so that all
/// displacements have four bytes.
pub(crate) const ROW_BIAS: u64 = 128;

/// The layout of the counters of so many points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) points: usize,
}

impl Rows {
    /// Returns the length of a row in bytes.
    pub(crate) fn row_len(self) -> u64 {
        (self.points as u64 * 8).next_multiple_of(LINES)
    }

    /// Returns the offset of the header.
    pub(crate) fn header(self) -> u64 {
        CLAIMS_MAPPED
    }

    /// Returns the offset of a shared row. The first one is always in use.
    pub(crate) fn shared_row(self, index: u64) -> u64 {
        self.header() + header::LEN + index * self.row_len()
    }

    /// Returns the offset of a row that a thread can own.
    pub(crate) fn owned_row(self, index: u64) -> u64 {
        self.shared_row(SHARED_ROWS + index)
    }

    /// Returns the offset of the row of the first domain.
    pub(crate) fn first_domain_row(self) -> u64 {
        self.owned_row(CLAIMED_ROWS)
    }

    /// Returns the displacement of the counter of a point from the address of a row in a claim.
    pub(crate) fn displacement(index: usize) -> u64 {
        ROW_BIAS + 8 * index as u64
    }

    /// Returns the length of all of it in bytes, whole pages.
    pub(crate) fn len(self) -> u64 {
        self.owned_row(OWNED_ROWS).next_multiple_of(PAGE)
    }

    /// Returns the offsets of the rows that are in use, as a header says.
    pub(crate) fn in_use(self, header: &[u8; header::LEN as usize]) -> Vec<Range<u64>> {
        let claimed = u32_at(header, header::CLAIMED as usize).unwrap_or(0);
        let is_used = |index: &u64| *index == 0 || header[(header::USED + index) as usize] != 0;
        let shared = (0..SHARED_ROWS).filter(is_used);
        let shared = shared.map(|index| self.shared_row(index)..self.shared_row(index + 1));
        let owned = self.owned_row(0)..self.owned_row(CLAIMED_ROWS.min(claimed.into()));
        let has_domain = header[header::HAS_DOMAIN as usize] != 0;
        let of_domain = self.first_domain_row()..self.owned_row(OWNED_ROWS);
        shared
            .chain([owned])
            .chain(has_domain.then_some(of_domain))
            .filter(|range| !range.is_empty())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_no_line() {
        for (points, row_len) in [(1, 128), (16, 128), (17, 256), (20_000, 160_000)] {
            let rows = Rows { points };
            assert_eq!((rows.row_len(), rows.header() % PAGE), (row_len, 0));
            let all = (0..SHARED_ROWS).map(|index| rows.shared_row(index));
            let all = all.chain((0..OWNED_ROWS).map(|index| rows.owned_row(index)));
            let mut next = rows.header() + header::LEN;
            for row in all {
                assert_eq!((row, row % LINES), (next, 0));
                next += row_len;
            }
            assert!((next..next + PAGE).contains(&rows.len()) && rows.len() % PAGE == 0);
        }
        // All counters of 20,000 points.
        assert!(Rows { points: 20_000 }.len() < 7 << 20);
        assert_eq!((CLAIMS_LEN, CLAIMS_MAPPED), (0x4000, 0x5000));
        assert_eq!(Rows::displacement(2), 144);
    }

    #[test]
    fn rows_in_use_are_those_of_the_header() {
        let rows = Rows { points: 3 };
        let in_use = |claimed: u32, used: &[u64]| {
            let mut header = [0; header::LEN as usize];
            header[..4].copy_from_slice(&claimed.to_le_bytes());
            for index in used {
                header[(header::USED + index) as usize] = 1;
            }
            rows.in_use(&header)
        };
        let shared = |index| rows.shared_row(index)..rows.shared_row(index + 1);
        let owned = |count| rows.owned_row(0)..rows.owned_row(count);
        assert_eq!(in_use(0, &[]), [shared(0)]);
        assert_eq!(in_use(2, &[]), [shared(0), owned(2)]);
        assert_eq!(in_use(0, &[0, 7]), [shared(0), shared(7)]);
        for claimed in [31, 32, u32::MAX] {
            assert_eq!(in_use(claimed, &[3]), [shared(0), shared(3), owned(31)]);
        }
        let mut header = [0; header::LEN as usize];
        header[4] = 1;
        let of_domain = rows.owned_row(31)..rows.owned_row(32);
        assert_eq!(rows.in_use(&header), [shared(0), of_domain.clone()]);
        header[0] = 40;
        assert_eq!(rows.in_use(&header), [shared(0), owned(31), of_domain]);
    }
}
