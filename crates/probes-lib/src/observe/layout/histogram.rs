//! Histograms of times: which bucket a time belongs to.

/// Mantissa bits of a bucket: a time's bucket is selected by the position of its highest set bit and
/// the `PRECISION` bits below it, so a bucket is one tick wide, or at most 1/512 of its lowest time.
pub(crate) const PRECISION: u32 = 9;
/// Binary logarithm of the longest time, in ticks: longer ones are counted as that.
pub(crate) const LONGEST_BITS: u32 = 48;
pub(crate) const BUCKETS: u64 = ((LONGEST_BITS - PRECISION + 1) as u64) << PRECISION;
pub(crate) const HISTOGRAM_LEN: u64 = BUCKETS * 8;

/// Returns the bucket of a time, computed as the trampolines do.
#[cfg(test)]
pub(crate) fn bucket(ticks: u64) -> u64 {
    let ticks = ticks.min((1 << LONGEST_BITS) - 1);
    let shift = (ticks | 1 << PRECISION).ilog2() - PRECISION;
    (u64::from(shift) << PRECISION) + (ticks >> shift)
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
