//! Histograms: which bucket a time or a value belongs to, and how precise they are.

use crate::observe::layout::groups::GROUP_BITS;

/// Mantissa bits of a bucket at full precision: a time's bucket is selected by the position of its highest set bit and
/// the `PRECISION` bits below it, so a bucket is one tick wide, or at most 1/512 of its lowest time.
pub(crate) const PRECISION: u32 = 9;
/// Binary logarithm of the longest time, in ticks: longer ones are counted as the longest.
pub(crate) const LONGEST_BITS: u32 = 48;
pub(crate) const BUCKETS: u64 = ((LONGEST_BITS - PRECISION + 1) as u64) << PRECISION;
pub(crate) const HISTOGRAM_LEN: u64 = BUCKETS * 8;

/// How precise the histograms of functions, or of values, are: `(most, bits)` says that buckets have so many mantissa
/// bits ([`PRECISION`]) if there are at most so many histograms. Unless buckets are linear, all histograms together
/// take less than 64 MiB of the address space of the process.
pub(crate) const PRECISIONS: [(u32, u32); 4] =
    [(FEW, PRECISION), (1 << 9, 7), (1 << 11, 5), (1 << 14, 3)];

/// How many histograms of full precision there are at most. If there are at most half as many, each has several copies,
/// one for each group of threads.
const FEW: u32 = 1 << 7;

/// Returns the mantissa bits of a bucket if there are so many histograms.
pub(crate) fn precision(histograms: u32) -> u32 {
    let fits = PRECISIONS.iter().find(|(most, _)| histograms <= *most);
    fits.map_or(0, |(_, precision)| *precision)
}

/// Returns the binary logarithm of how many copies each histogram has, one for each group of threads, if there are so
/// many histograms.
pub(crate) fn group_bits(histograms: u32) -> u32 {
    let many = FEW / histograms.max(1);
    many.max(1).ilog2().min(GROUP_BITS)
}

/// Returns the bucket of a time, computed as the trampolines do.
pub(crate) fn bucket(ticks: u64) -> u64 {
    bucket_of(ticks.min((1 << LONGEST_BITS) - 1), PRECISION)
}

/// Returns the bucket of a number of 64 bits, computed as the trampolines do.
pub(crate) fn bucket_of(number: u64, precision: u32) -> u64 {
    let shift = (number | 1 << precision).ilog2() - precision;
    (u64::from(shift) << precision) + (number >> shift)
}

/// Returns which times, in ticks, belong to a bucket of this precision: the least, and how many different ones.
pub(crate) fn times_of(bucket: u64, precision: u32) -> (u64, u64) {
    let shift = (bucket >> precision).saturating_sub(1);
    let top = bucket - (shift << precision);
    (top << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_times_without_a_gap() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let (least, many) = times_of(index, PRECISION);
            assert_eq!(least, next);
            assert_eq!((bucket(least), bucket(least + many - 1)), (index, index));
            assert!(many == 1 || least / many >= 1 << PRECISION);
            next = least + many;
        }
        assert_eq!(next, 1 << LONGEST_BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!((BUCKETS, HISTOGRAM_LEN), (40 * 512, 40 * 512 * 8));
    }
}
