//! [`ValueRecorder`]: histograms of values that do not come from trampolines, with the same buckets.

use std::collections::BTreeMap;

use super::{ValueBucket, ValueHistogram};
use crate::observe::buckets::Linear;
use crate::observe::layout::values::ValuesLayout;

/// Adds up values, one by one, to a [`ValueHistogram`].
///
/// ```
/// use probes_lib::ValueRecorder;
///
/// let mut recorder = ValueRecorder::new(None);
/// [3, 3, 9].map(|value| recorder.add(value));
/// let histogram = recorder.histogram("minor_promoted");
/// assert_eq!((histogram.count(), histogram.sum(), histogram.max()), (3, Some(15), Some(9)));
/// ```
#[derive(Clone, Debug)]
pub struct ValueRecorder {
    linear: Option<Linear>,
    layout: ValuesLayout,
    /// By bucket.
    counts: BTreeMap<u64, u64>,
    extremes: Option<(i128, i128)>,
    sum: i128,
    untyped: u64,
}

impl ValueRecorder {
    /// Makes an empty one, whose buckets are the steps of a range, if there is one.
    pub fn new(linear: Option<Linear>) -> ValueRecorder {
        let layout = ValuesLayout {
            histograms: 1,
            steps: linear.map_or(0, Linear::steps),
        };
        ValueRecorder {
            linear,
            layout,
            counts: BTreeMap::new(),
            extremes: None,
            sum: 0,
            untyped: 0,
        }
    }

    /// Adds a signed value.
    pub fn add(&mut self, value: i64) {
        self.add_wide(value.into());
    }

    /// Adds an unsigned value.
    pub fn add_unsigned(&mut self, value: u64) {
        self.add_wide(value.into());
    }

    /// Adds something that has no value.
    pub fn add_untyped(&mut self) {
        self.untyped = self.untyped.saturating_add(1);
    }

    fn add_wide(&mut self, value: i128) {
        let count = self.counts.entry(self.layout.bucket(value, self.linear));
        *count.or_default() += 1;
        let (least, most) = self.extremes.unwrap_or((value, value));
        self.extremes = Some((least.min(value), most.max(value)));
        // It does not overflow before 2^63 values of 64 bits.
        self.sum = self.sum.saturating_add(value);
    }

    /// Returns what was added so far.
    pub fn histogram(&self, name: &str) -> ValueHistogram {
        let buckets = self.counts.iter().map(|(bucket, count)| {
            let (least, most) = self.layout.values_of(*bucket, self.linear);
            ValueBucket {
                least,
                most,
                count: *count,
            }
        });
        ValueHistogram {
            name: name.to_owned(),
            function: None,
            untyped: self.untyped,
            buckets: buckets.collect(),
            extremes: self.extremes,
            sum: Some(self.sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn empty_histogram_has_no_figures() {
        let mut recorder = ValueRecorder::new(None);
        recorder.add_untyped();
        let empty = recorder.histogram("x");
        assert_eq!((empty.count(), empty.untyped(), empty.max()), (0, 1, None));
        assert_eq!(empty.quantile(0.5), None);
    }

    proptest! {
        #[test]
        fn figures_are_those_of_all_values(
            signed in prop::collection::vec(any::<i64>(), 1..50),
            unsigned in prop::collection::vec(any::<u64>(), 0..50),
            is_linear in any::<bool>(),
        ) {
            let linear = is_linear.then(|| "0,1000,7".parse().unwrap());
            let mut recorder = ValueRecorder::new(linear);
            signed.iter().for_each(|value| recorder.add(*value));
            unsigned.iter().for_each(|value| recorder.add_unsigned(*value));
            let mut all: Vec<i128> = signed.iter().map(|it| i128::from(*it)).collect();
            all.extend(unsigned.iter().map(|it| i128::from(*it)));
            all.sort_unstable();
            let histogram = recorder.histogram("x");
            prop_assert_eq!(histogram.count(), all.len() as u64);
            prop_assert_eq!(histogram.sum(), Some(all.iter().sum()));
            prop_assert_eq!(histogram.min(), all.first().copied());
            prop_assert_eq!(histogram.max(), all.last().copied());
            for share in [0.5, 0.9, 1.0] {
                let rank = (all.len() as f64 * share).ceil() as usize;
                let exact = all[rank.max(1) - 1];
                let found = histogram.quantile(share).unwrap();
                prop_assert!((found.least..=found.most).contains(&exact), "{exact} {found:?}");
            }
        }
    }
}
