//! The layout of what is kept of the starts of a pair until their stop, if slow pairs are reported, as offsets: the arguments. Pure.
//!
//! ```text
//! table   one for each pair: entries
//! entry   as a record of the ring (shared.rs); its number is the time of the start, once it is complete
//! ```
//!
//! A start has one entry, by the thread's slot and its depth, or by its key. Another start may have the same one: then the
//! arguments of the first are not known at its stop, which compares the times.

use crate::observe::layout::pair_slots::{SLOT_LEN_BITS, SLOTS, SLOTS_TRIED};

/// Of how many of the innermost starts of a thread the arguments are kept: 2 to this power.
pub(crate) const DEPTH_BITS: u32 = 4;
const _: () = assert!(DEPTH_BITS < SLOT_LEN_BITS);

/// How many bits of the hash of a key select the entry.
pub(crate) const KEY_BITS: u32 = 14;

/// Entries of a table.
pub(crate) const ENTRIES: u64 = (SLOTS + SLOTS_TRIED) << DEPTH_BITS;
const _: () = assert!(1 << KEY_BITS <= ENTRIES);

/// The number of an entry that is being written.
pub(crate) const INCOMPLETE: u64 = 1;
