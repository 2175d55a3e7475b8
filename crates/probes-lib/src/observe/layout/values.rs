//! [`ValuesLayout`]: the layout of the histograms of values, as offsets. Pure.
//!
//! ```text
//! headers     of each histogram, one for each group of threads: the greatest and the least value, the sum of those in
//!             buckets of several values
//! buckets     of each of them: those of negative values, the least first, then the others; or
//!             below, each step of a range, above
//! ```
//!
//! The headers are together, so that they are on few pages: what reads a thousand histograms reads each page by itself.
//! All of it is written by locked instructions.

use std::ops::RangeInclusive;

use crate::observe::buckets::Linear;
use crate::observe::layout::histogram::{self, bucket_of, times_of};
use crate::observe::layout::keys;

/// The most histograms of an observation that has one for each name.
pub(crate) const MAX_HISTOGRAMS: u32 = 1 << 10;

/// How many histograms an observation that has them for keys always has.
const OF_KEYS: u32 = keys::histograms::ALL;

/// The fields of a header, eight bytes each.
pub(crate) mod header {
    /// The greatest value, as [`order`](super::order) has it. Zero before the first one.
    pub(crate) const GREATEST: u64 = 0;
    /// The least value, in the same way, with all bits inverted.
    pub(crate) const LEAST: u64 = 8;
    /// The sum of the values in buckets of several values, cut off to 64 bits.
    pub(crate) const SUM: u64 = 16;
    pub(crate) const LEN: u64 = 64;
}

/// Maps a value to a number without a sign such that the order is kept: inverts the sign bit of a signed value.
/// It is its own inverse.
pub(crate) fn order(value: u64, is_signed: bool) -> u64 {
    if is_signed { value ^ 1 << 63 } else { value }
}

/// How many histograms there are, and which buckets they have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ValuesLayout {
    pub(crate) histograms: u32,
    /// How many steps the range has; 0 if the buckets are those of powers of two.
    pub(crate) steps: u32,
}

impl ValuesLayout {
    /// How many bits [`ValuesLayout::number`] has.
    pub(crate) const NUMBER_BITS: u32 = HISTOGRAMS_BITS + STEPS_BITS;

    /// Returns whether it can be one of ours: its numbers may have been read from a process.
    pub(crate) fn is_possible(self) -> bool {
        self.histograms <= OF_KEYS && self.steps <= Linear::MAX_STEPS
    }

    /// Returns the layout that has this number; see [`ValuesLayout::number`].
    pub(crate) const fn of_number(number: u32) -> ValuesLayout {
        ValuesLayout {
            histograms: number & ((1 << HISTOGRAMS_BITS) - 1),
            steps: number >> HISTOGRAMS_BITS,
        }
    }

    /// Returns a number that encodes the layout.
    pub(crate) fn number(self) -> u32 {
        self.histograms | self.steps << HISTOGRAMS_BITS
    }

    /// Returns the mantissa bits of a bucket.
    pub(crate) fn precision(self) -> u32 {
        histogram::precision(self.histograms)
    }

    /// Returns the binary logarithm of how many groups of threads have buckets of their own.
    pub(crate) fn group_bits(self) -> u32 {
        histogram::group_bits(self.histograms)
    }

    /// Returns how many buckets of negative values there are, before all others.
    pub(crate) fn negative(self) -> u64 {
        if self.steps > 0 {
            return 0;
        }
        bucket_of(i64::MAX as u64, self.precision()) + 1
    }

    /// Returns how many buckets there are.
    pub(crate) fn buckets(self) -> u64 {
        if self.steps > 0 {
            return u64::from(self.steps) + 2;
        }
        self.negative() + bucket_of(u64::MAX, self.precision()) + 1
    }

    /// Returns the length of the buckets of a group of threads in bytes.
    pub(crate) fn buckets_len(self) -> u64 {
        (self.buckets() * 8).next_multiple_of(header::LEN)
    }

    /// Returns the offset of the header of a histogram for a group of threads.
    pub(crate) fn header(self, histogram: u32, group: u64) -> u64 {
        self.number_of_group(histogram, group) * header::LEN
    }

    /// Returns the offset of the buckets of a histogram for a group of threads.
    pub(crate) fn first_bucket(self, histogram: u32, group: u64) -> u64 {
        let number = self.number_of_group(histogram, group);
        self.header(self.histograms, 0) + number * self.buckets_len()
    }

    fn number_of_group(self, histogram: u32, group: u64) -> u64 {
        (u64::from(histogram) << self.group_bits()) + group
    }

    /// Returns the length of all of it in bytes.
    pub(crate) fn len(self) -> u64 {
        self.first_bucket(self.histograms, 0)
    }

    /// Returns the bucket of a value, as the trampolines do.
    pub(crate) fn bucket(self, value: i128, linear: Option<Linear>) -> u64 {
        if let Some(linear) = linear {
            return linear.bucket(value);
        }
        let of = |magnitude: i128| bucket_of(magnitude as u64, self.precision());
        if value < 0 {
            return self.negative() - 1 - of(!value);
        }
        self.negative() + of(value)
    }

    /// Returns the least and the greatest value of a bucket; `None` where values below or above a range have no bound.
    pub(crate) fn values_of(
        self,
        bucket: u64,
        linear: Option<Linear>,
    ) -> (Option<i128>, Option<i128>) {
        if let Some(linear) = linear {
            return linear.values_of(bucket);
        }
        let range = |of: u64| -> RangeInclusive<i128> {
            let (least, many) = times_of(of, self.precision());
            let least = i128::from(least);
            least..=least + i128::from(many) - 1
        };
        let values = match bucket.checked_sub(self.negative()) {
            Some(positive) => range(positive),
            None => {
                let magnitudes = range(self.negative() - 1 - bucket);
                !magnitudes.end()..=!magnitudes.start()
            }
        };
        (Some(*values.start()), Some(*values.end()))
    }
}

const HISTOGRAMS_BITS: u32 = 11;
const STEPS_BITS: u32 = 14;
const _: () = assert!(
    MAX_HISTOGRAMS <= OF_KEYS
        && OF_KEYS < 1 << HISTOGRAMS_BITS
        && Linear::MAX_STEPS < 1 << STEPS_BITS
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(histograms: u32, steps: u32) -> ValuesLayout {
        ValuesLayout { histograms, steps }
    }

    #[test]
    fn headers_and_buckets_follow_each_other_within_reach() {
        for histograms in [1, 2, 8, 9, 128, 129, 512, 513, MAX_HISTOGRAMS, OF_KEYS] {
            for steps in [0, 1, Linear::MAX_STEPS] {
                let all = layout(histograms, steps);
                assert!(all.is_possible());
                assert_eq!(ValuesLayout::of_number(all.number()), all);
                let last = (1 << all.group_bits()) - 1;
                let headers = all.header(histograms - 1, last) + header::LEN;
                assert_eq!(headers, all.first_bucket(0, 0));
                let end = all.first_bucket(histograms - 1, last) + all.buckets_len();
                assert_eq!((all.len(), all.buckets_len() % 64), (end, 0));
                assert!(all.len() < 96 << 20, "{all:?}: {}", all.len());
            }
        }
        assert_eq!(ValuesLayout::default().len(), 0);
        assert!(!layout(OF_KEYS + 1, 0).is_possible());
        assert!(!layout(1, Linear::MAX_STEPS + 1).is_possible());
    }

    #[test]
    fn buckets_cover_all_values_without_a_gap() {
        for histograms in [1, 200, 1000] {
            let all = layout(histograms, 0);
            let mut next = i128::from(i64::MIN);
            for bucket in 0..all.buckets() {
                let (Some(least), Some(most)) = all.values_of(bucket, None) else {
                    panic!("{bucket} has no bounds");
                };
                assert_eq!(least, next);
                assert_eq!(all.bucket(least, None), bucket);
                assert_eq!(all.bucket(most, None), bucket);
                // As precise as promised.
                let (width, near) = (most - least, least.abs().min(most.abs()));
                assert!(width << all.precision() <= near, "{least} to {most}");
                next = most + 1;
            }
            assert_eq!(next, 1 << 64);
        }
    }

    proptest! {
        #[test]
        fn values_are_between_the_bounds_of_their_bucket(
            value in prop_oneof![-5000_i128..5000, i128::from(i64::MIN)..1 << 64],
            least in -100_i64..100,
            width in 1_u64..1000,
            step in 1_u64..100,
        ) {
            let range = format!("{least},{},{step}", least + width as i64);
            let range: Linear = range.parse().unwrap();
            let logarithmic = layout(1, 0);
            let steps = layout(1, range.steps());
            for (all, linear) in [(logarithmic, None), (steps, Some(range))] {
                let bucket = all.bucket(value, linear);
                prop_assert!(bucket < all.buckets());
                let (least, most) = all.values_of(bucket, linear);
                prop_assert!(least.is_none_or(|least| least <= value));
                prop_assert!(most.is_none_or(|most| value <= most));
            }
        }
    }
}
