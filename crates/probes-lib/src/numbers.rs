//! Little-endian numbers in bytes, and durations as numbers.

use std::time::Duration;

/// Returns a duration in nanoseconds; `u64::MAX` if that is too small for it.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the eight bytes at offset `at` as a number; `None` if there are fewer.
#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Returns the four bytes at offset `at` as a number; `None` if there are fewer.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Returns the two bytes at offset `at` as a number; `None` if there are fewer.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Returns the words of eight bytes, one after the other; what is left at the end is no word.
pub(crate) fn words(bytes: &[u8]) -> impl DoubleEndedIterator<Item = u64> + ExactSizeIterator {
    let words = bytes.chunks_exact(8);
    words.map(|word| word.try_into().map_or(0, u64::from_le_bytes))
}
