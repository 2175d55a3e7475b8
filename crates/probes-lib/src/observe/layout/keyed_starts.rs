//! The layout of the table of a pair's starts that wait for a stop with the same key, in any thread: offsets. Pure.
//!
//! ```text
//! table    one for each pair: buckets; a key has one, by its hash
//! bucket   slots; a start is in any that is free
//! slot     the hash of the key, and the time of the start; both are written by one instruction
//! ```
//!
//! A slot is written by one instruction, so a thread may be interrupted, or exit, anywhere. A start for which all slots
//! of its bucket are taken is only counted.

use crate::numbers::u64_at;

/// Binary logarithm of the buckets of a table.
pub(crate) const BUCKET_COUNT_BITS: u32 = 13;
/// Binary logarithm of the bytes of a bucket.
pub(crate) const BUCKET_LEN_BITS: u32 = 7;
/// Slots of a bucket.
pub(crate) const SLOTS: u64 = (1 << BUCKET_LEN_BITS) / slot::LEN;

/// The fields of a slot, eight bytes each.
pub(crate) mod slot {
    pub(crate) const LEN: u64 = 16;
    /// The hash of the key: different single integers have different ones.
    pub(crate) const KEY: u64 = 0;
    /// The time of the start, with [`LEFT_OUT_BIT`]; 0: the slot is free.
    pub(crate) const TIME: u64 = 8;
    /// Set in the time of a start that a filter leaves out: its stop then still finds a start. The time stamp counter
    /// never reaches this bit.
    pub(crate) const LEFT_OUT_BIT: u32 = 63;
}

/// The length of a table in bytes.
pub(crate) const TABLE_LEN: u64 = 1 << (BUCKET_COUNT_BITS + BUCKET_LEN_BITS);

/// Returns how many starts wait in a table, except those that a filter leaves out.
pub(crate) fn waiting(table: &[u8]) -> u64 {
    let slots = table.chunks_exact(slot::LEN as usize);
    let times = slots.filter_map(|slot| u64_at(slot, slot::TIME as usize));
    times.filter(|time| *time as i64 > 0).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_that_are_left_out_are_not_waiting() {
        assert_eq!((SLOTS, TABLE_LEN), (8, 1 << 20));
        let mut table = vec![0; 64];
        let mut put = |at: usize, word: u64| table[at..at + 8].copy_from_slice(&word.to_le_bytes());
        put(8, 12);
        put(16, 5);
        put(40, 13 | 1 << slot::LEFT_OUT_BIT);
        put(56, 14);
        assert_eq!(waiting(&table), 2);
        assert_eq!(waiting(&table[..9]), 0);
    }
}
