//! [`KeysLayout`]: the layout of the table of hits by key, as offsets. Pure.
//!
//! ```text
//! copy   one for each group of threads: slots, some more at the end, so that a search need not wrap around
//! slot   state, how many hits, the parts of the key
//! ```
//!
//! If each key has a histogram, all threads share one smaller table, and each slot has the histogram of the same number
//! ([`values`]); after these are those of the keys for which there is no room.
//!
//! [`values`]: crate::observe::layout::values
//!
//! A thread claims a slot by one instruction, writes the key, and then the state that says so; hits are counted by
//! locked instructions. A slot that is claimed and has no key yet is passed over, and the same key may be in several
//! slots: their hits add up.

use std::ops::Range;

use crate::observe::layout::groups::GROUP_BITS;
use crate::observe::role::KeyKind;

/// How many bits of the hash of a key select its slot.
const SLOTS_BITS: u32 = 12;
/// How many slots are tried, from that one on.
pub(crate) const TRIED: u64 = 16;

/// How many bits of the hash of a key select its slot, if each key has a histogram.
const SLOTS_WITH_HISTOGRAM_BITS: u32 = 10;

/// The histograms of keys: one for each slot, and those of the other keys.
pub(crate) mod histograms {
    use super::{SLOTS_WITH_HISTOGRAM_BITS, TRIED};

    pub(crate) const OF_SLOTS: u32 = (1 << SLOTS_WITH_HISTOGRAM_BITS) + TRIED as u32;
    /// The histograms of other keys: of values without a sign, and of values with one.
    pub(crate) const OTHER: u32 = OF_SLOTS;
    pub(crate) const OTHER_SIGNED: u32 = OF_SLOTS + 1;
    /// The histogram of times that have no key. Times have no sign.
    pub(crate) const UNTYPED_TIMES: u32 = OTHER_SIGNED;
    pub(crate) const ALL: u32 = OF_SLOTS + 2;
}

/// The fields of a slot, eight bytes each.
pub(crate) mod slot {
    /// Zero: free. Else the hash of the key in all but the lowest 8 bits; which parts may be negative, a bit each from
    /// [`SIGNS_AT`] on; and what the slot holds.
    pub(crate) const STATE: u64 = 0;
    pub(crate) const SIGNS_AT: u32 = 2;
    /// Whether the values in its histogram may be negative.
    pub(crate) const SIGN_OF_VALUES_AT: u32 = 6;
    pub(crate) const HASH_AT: u32 = 8;
    /// It is claimed; and it holds its key.
    pub(crate) const CLAIMED: u64 = 1;
    pub(crate) const HELD: u64 = 2;
    pub(crate) const HITS: u64 = 8;
    pub(crate) const KEY: u64 = 16;
}

/// A string in a slot: how many words it has, then these words, 8 at most. A string of 64 bytes has 9, the last of
/// which only ends it; a longer one counts as 10.
pub(crate) mod text {
    pub(crate) const WORDS: u64 = 8;
    pub(crate) const WHOLE: u64 = WORDS + 1;
    pub(crate) const LONGER: u64 = WORDS + 2;
    /// For a string of C: this plus how many bytes it has, 65 if there are more than 64; then the bytes, with zeros
    /// up to a whole word.
    pub(crate) const OF_C: u64 = 16;
    /// How many bytes of it a key has at most; one more is read.
    pub(crate) const MAX_READ: u64 = 8 * WORDS;
}

/// How long the slots are, and whether each has a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct KeysLayout {
    /// The length of a slot, in units of [`UNIT`] bytes; 0: there is no table.
    units: u8,
    /// Whether each key has a histogram.
    pub(crate) has_histograms: bool,
}

const UNIT: u64 = 32;
const UNITS_BITS: u32 = 3;

impl KeysLayout {
    /// How many bits [`KeysLayout::number`] has.
    pub(crate) const NUMBER_BITS: u32 = 4;

    /// Returns the layout for keys of these parts.
    pub(crate) fn of(kinds: &[KeyKind]) -> KeysLayout {
        let end = parts(kinds).last().map_or(0, |part| part.end);
        KeysLayout {
            units: end.div_ceil(UNIT) as u8,
            has_histograms: false,
        }
    }

    /// Returns the layout with a histogram of each key.
    pub(crate) fn with_histograms(self) -> KeysLayout {
        KeysLayout {
            has_histograms: true,
            ..self
        }
    }

    /// Returns whether it can be one of ours: its number may have been read from a process.
    pub(crate) fn is_possible(self) -> bool {
        u32::from(self.units) < 1 << UNITS_BITS && (self.units > 0 || !self.has_histograms)
    }

    pub(crate) const fn of_number(number: u8) -> KeysLayout {
        KeysLayout {
            units: number & ((1 << UNITS_BITS) - 1),
            has_histograms: number >> UNITS_BITS & 1 == 1,
        }
    }

    /// Returns a number that encodes the layout.
    pub(crate) fn number(self) -> u8 {
        self.units | u8::from(self.has_histograms) << UNITS_BITS
    }

    /// Returns how many bits of the hash of a key select its slot.
    pub(crate) fn slots_bits(self) -> u32 {
        if self.has_histograms {
            SLOTS_WITH_HISTOGRAM_BITS
        } else {
            SLOTS_BITS
        }
    }

    /// Returns the binary logarithm of how many groups of threads have a table.
    pub(crate) fn group_bits(self) -> u32 {
        if self.has_histograms { 0 } else { GROUP_BITS }
    }

    pub(crate) fn slot_len(self) -> u64 {
        u64::from(self.units) * UNIT
    }

    pub(crate) fn copy_len(self) -> u64 {
        self.slot_len() * ((1 << self.slots_bits()) + TRIED)
    }

    /// Returns the length of all copies in bytes.
    pub(crate) fn len(self) -> u64 {
        self.copy_len() << self.group_bits()
    }
}

/// Returns where the parts of a key are in its slot.
pub(crate) fn parts(kinds: &[KeyKind]) -> impl Iterator<Item = Range<u64>> + '_ {
    kinds.iter().scan(slot::KEY, |next, kind| {
        let start = *next;
        *next += match kind {
            KeyKind::Text => 8 + 8 * text::WORDS,
            KeyKind::Integer | KeyKind::Thread | KeyKind::Caller | KeyKind::Probe => 8,
        };
        Some(start..*next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_keys_fit() {
        let longest = [
            KeyKind::Text,
            KeyKind::Text,
            KeyKind::Caller,
            KeyKind::Thread,
        ];
        let layout = KeysLayout::of(&longest);
        assert_eq!(parts(&longest).last(), Some(168..176));
        assert_eq!((layout.slot_len(), layout.is_possible()), (192, true));
        assert_eq!(KeysLayout::of_number(layout.number()), layout);
        assert_eq!(KeysLayout::of(&[KeyKind::Integer]).slot_len(), 32);
        assert_eq!(KeysLayout::default().len(), 0);
        let with_histograms = layout.with_histograms();
        assert!(with_histograms.is_possible() && with_histograms != layout);
        assert_eq!(
            KeysLayout::of_number(with_histograms.number()),
            with_histograms
        );
        assert!(u32::from(with_histograms.number()) < 1 << KeysLayout::NUMBER_BITS);
        assert_eq!(with_histograms.len(), 1040 * 192);
        assert_eq!(layout.len(), 16 * 4112 * 192);
        assert!(!KeysLayout::default().with_histograms().is_possible());
    }
}
