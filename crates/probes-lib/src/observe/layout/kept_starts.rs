//! The layout of the tables that keep the arguments of starts until their stops, if slow pairs are reported. Pure.
//!
//! ```text
//! table   one for each pair: entries
//! entry   laid out as a record of the ring (shared.rs); its number is the time of the start, once it is complete
//! ```
//!
//! The thread's slot and the depth of a start select its entry, or its key does. If another start has the same entry,
//! the arguments of one of them are lost: its stop finds another time there.

use crate::observe::layout::pair_slots::{SLOT_LEN_BITS, SLOTS, SLOTS_TRIED};

/// Binary logarithm of how many of the innermost starts of a thread are kept.
pub(crate) const DEPTH_BITS: u32 = 4;
const _: () = assert!(DEPTH_BITS < SLOT_LEN_BITS);

/// How many bits of the hash of a key select the entry.
pub(crate) const KEY_BITS: u32 = 14;

/// Entries of a table.
pub(crate) const ENTRIES: u64 = (SLOTS + SLOTS_TRIED) << DEPTH_BITS;
const _: () = assert!(1 << KEY_BITS <= ENTRIES);

/// The number of an entry that is being written.
pub(crate) const INCOMPLETE: u64 = 1;
