//! [`ValueHistogram`]: the values of an expression at the hits of a probe or function, from what the trampolines have
//! recorded of them.

mod recorder;

pub use recorder::ValueRecorder;

use std::collections::HashMap;
use std::path::PathBuf;

use crate::address::LiveAddr;

/// The values of an expression at the hits of a probe or function
/// ([`Observation::histogram_of`](crate::Observation::histogram_of)).
///
/// Each value is in one bucket, and the counts of buckets are exact. Unless there is a [`Linear`](crate::Linear) range,
/// buckets have one value each up to 1,024, of either sign, and are at most 0.2 % of their least value wide; if there
/// are more than 128 histograms, 256 and 0.8 %; if there are more than 512, 64 and 3 %. The greatest and the least
/// value are exact.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::name("req_end")).histogram_of("arg1".parse()?);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for histogram in observer.histograms()? {
///     println!("{}: {} values, mean {:?}", histogram.name(), histogram.count(), histogram.mean());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ValueHistogram {
    name: String,
    function: Option<(PathBuf, LiveAddr)>,
    untyped: u64,
    /// The buckets that have values, the least first.
    buckets: Vec<ValueBucket>,
    /// The least and the greatest value.
    extremes: Option<(i128, i128)>,
    sum: Option<i128>,
}

/// A histogram without values.
impl Default for ValueHistogram {
    fn default() -> ValueHistogram {
        ValueHistogram {
            name: String::new(),
            function: None,
            untyped: 0,
            buckets: Vec::new(),
            extremes: None,
            sum: Some(0),
        }
    }
}

/// How many values are in a bucket of a histogram.
///
/// ```
/// use probes_lib::ValueRecorder;
///
/// let mut recorder = ValueRecorder::new(Some("0,100,10".parse()?));
/// [7, 12, 15, 120].map(|value| recorder.add(value));
/// let histogram = recorder.histogram("percent");
/// let buckets = histogram.buckets().iter().map(|it| (it.least, it.most, it.count));
/// let expected = [(Some(0), Some(9), 1), (Some(10), Some(19), 2), (Some(100), None, 1)];
/// assert_eq!(buckets.collect::<Vec<_>>(), expected);
/// # Ok::<(), probes_lib::BadLinear>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValueBucket {
    /// The least value that belongs to it; `None` of all that is below a range.
    pub least: Option<i128>,
    /// The greatest value that belongs to it; `None` of all that is above a range.
    pub most: Option<i128>,
    /// How many there were.
    pub count: u64,
}

/// A quantile of values, as exact as the buckets allow: a range that contains it.
///
/// ```
/// use probes_lib::ValueRecorder;
///
/// let mut recorder = ValueRecorder::new(None);
/// (1..=10_000).for_each(|value| recorder.add(value));
/// let median = recorder.histogram("bytes").quantile(0.5).unwrap();
/// assert!((median.least..=median.most).contains(&5_000));
/// assert!(median.value().abs_diff(5_000) <= median.error());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quantile {
    /// The least value that it can be.
    pub least: i128,
    /// The greatest value that it can be.
    pub most: i128,
}

impl Quantile {
    /// Returns the middle of what it can be, rounded down.
    pub fn value(self) -> i128 {
        self.least + (self.most - self.least) / 2
    }

    /// Returns by how much it differs from [`Quantile::value`] at most; 0 if it is exact.
    pub fn error(self) -> u128 {
        (self.most - self.value()).unsigned_abs()
    }
}

impl ValueHistogram {
    /// Returns the histograms of several processes together: those of one name are added up, and have no
    /// [`function`](Self::function), whose address differs between processes. Where processes have buckets of different
    /// widths, the wider ones are kept.
    ///
    /// ```no_run
    /// # let (one, other): (probes_lib::Observer, probes_lib::Observer) = unimplemented!();
    /// let (one, other) = (one.histograms()?, other.histograms()?);
    /// let both = probes_lib::ValueHistogram::of_processes([&one[..], &other[..]]);
    /// # Ok::<(), probes_lib::Error>(())
    /// ```
    pub fn of_processes<'h>(
        each: impl IntoIterator<Item = &'h [ValueHistogram]>,
    ) -> Vec<ValueHistogram> {
        let mut all: Vec<ValueHistogram> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for histogram in each.into_iter().flatten() {
            let place = *places.entry(&histogram.name).or_insert(all.len());
            match all.get_mut(place) {
                Some(sum) => sum.add(histogram),
                None => all.push(ValueHistogram {
                    function: None,
                    ..histogram.clone()
                }),
            }
        }
        all
    }

    /// Returns the histogram of these buckets, each with its least and greatest value and the count of its values.
    /// `cut` is the sum of those in buckets of several values, cut off to 64 bits.
    pub(super) fn of_buckets(
        buckets: impl Iterator<Item = (Option<i128>, Option<i128>, u64)>,
        extremes: Option<(i128, i128)>,
        cut: u64,
    ) -> ValueHistogram {
        let buckets = buckets.map(|(least, most, count)| ValueBucket { least, most, count });
        let buckets: Vec<ValueBucket> = buckets.collect();
        ValueHistogram {
            sum: sum(&buckets, extremes.unwrap_or_default(), cut),
            buckets,
            extremes,
            ..ValueHistogram::default()
        }
    }

    /// Returns it as the histogram of a probe or function.
    pub(super) fn named(
        self,
        name: String,
        function: Option<(PathBuf, LiveAddr)>,
        untyped: u64,
    ) -> ValueHistogram {
        ValueHistogram {
            name,
            function,
            untyped,
            ..self
        }
    }

    /// Adds the values of another one.
    pub(super) fn add(&mut self, other: &ValueHistogram) {
        self.untyped = self.untyped.saturating_add(other.untyped);
        self.sum = self.sum.and_then(|sum| sum.checked_add(other.sum?));
        self.extremes = match (self.extremes, other.extremes) {
            (Some((least, most)), Some((low, high))) => Some((least.min(low), most.max(high))),
            (one, other) => one.or(other),
        };
        self.buckets.extend(&other.buckets);
        // What is below a range comes first, as `None` does.
        self.buckets.sort_by_key(|it| it.least);
        let mut joined: Vec<ValueBucket> = Vec::new();
        for bucket in self.buckets.drain(..) {
            match joined.last_mut() {
                Some(last)
                    if last
                        .most
                        .is_none_or(|most| bucket.least.is_none_or(|it| it <= most)) =>
                {
                    // What is above a range has no end.
                    last.most = last
                        .most
                        .zip(bucket.most)
                        .map(|(one, other)| one.max(other));
                    last.count = last.count.saturating_add(bucket.count);
                }
                _ => joined.push(bucket),
            }
        }
        self.buckets = joined;
    }

    /// Returns the name of the probe or function.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns, of a function, the path of the file that it is in, and its address in the process.
    pub fn function(&self) -> Option<(&std::path::Path, LiveAddr)> {
        let function = self.function.as_ref();
        function.map(|(object, address)| (object.as_path(), *address))
    }

    /// Returns how many values there are.
    pub fn count(&self) -> u64 {
        let counts = self.buckets.iter().map(|it| it.count);
        counts.fold(0, u64::saturating_add)
    }

    /// Returns how many hits have no value, because an argument does not have the type that the expression needs, or
    /// memory could not be read; and those for which the filter has no answer
    /// ([`Observation::only_where`](crate::Observation::only_where)).
    pub fn untyped(&self) -> u64 {
        self.untyped
    }

    /// Returns the buckets that have values, the least first.
    pub fn buckets(&self) -> &[ValueBucket] {
        &self.buckets
    }

    /// Returns the least value.
    pub fn min(&self) -> Option<i128> {
        self.extremes.map(|(least, _)| least)
    }

    /// Returns the greatest value.
    pub fn max(&self) -> Option<i128> {
        self.extremes.map(|(_, most)| most)
    }

    /// Returns the exact sum of all values; `None` if it is so large that it is not known.
    pub fn sum(&self) -> Option<i128> {
        self.sum
    }

    /// Returns the mean of all values; `None` without values, or if their sum is not known.
    pub fn mean(&self) -> Option<f64> {
        self.extremes?;
        Some(self.sum? as f64 / self.count() as f64)
    }

    /// Returns what a `share` (0 to 1) of all values does not exceed. `None` without values.
    pub fn quantile(&self, share: f64) -> Option<Quantile> {
        let extremes = self.extremes?;
        let rank = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut before = 0_u64;
        let bucket = self.buckets.iter().find(|it| {
            before = before.saturating_add(it.count);
            before >= rank
        });
        let bucket = bucket.or_else(|| self.buckets.last())?;
        Some(within(bucket, extremes))
    }
}

/// Returns which values those in a bucket may have, if all values are between these extremes.
fn within(bucket: &ValueBucket, (least, most): (i128, i128)) -> Quantile {
    let low = bucket.least.unwrap_or(least).max(least);
    Quantile {
        least: low,
        most: bucket.most.unwrap_or(most).min(most).max(low),
    }
}

/// Returns the sum of all values. `cut` is the sum of those in buckets of several values, cut off to 64 bits: what was
/// cut off follows from the bounds of these buckets, unless they are too far apart.
fn sum(buckets: &[ValueBucket], extremes: (i128, i128), cut: u64) -> Option<i128> {
    let (mut known, mut least, mut most) = (0_i128, 0_i128, 0_i128);
    for bucket in buckets {
        let count = i128::from(bucket.count);
        match (bucket.least, bucket.most) {
            (Some(only), Some(same)) if only == same => {
                known = known.checked_add(only.checked_mul(count)?)?;
            }
            _ => {
                let range = within(bucket, extremes);
                least = least.checked_add(range.least.checked_mul(count)?)?;
                most = most.checked_add(range.most.checked_mul(count)?)?;
            }
        }
    }
    if most.checked_sub(least)? >= 1 << 62 {
        return None;
    }
    let beyond = cut.wrapping_sub(least as u64) as i64;
    known.checked_add(least)?.checked_add(i128::from(beyond))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::observe::buckets::Linear;
    use crate::observe::layout::values::ValuesLayout;

    /// Returns the histogram of values, as it is recorded.
    fn histogram(values: &[i128], linear: Option<Linear>) -> ValueHistogram {
        let layout = ValuesLayout {
            histograms: 1,
            steps: linear.map_or(0, Linear::steps),
        };
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        let mut cut = 0_u64;
        for value in values {
            let bucket = layout.bucket(*value, linear);
            *counts.entry(bucket).or_default() += 1;
            let (least, most) = layout.values_of(bucket, linear);
            if least.is_none() || least != most {
                cut = cut.wrapping_add(*value as u64);
            }
        }
        let buckets = counts.into_iter().map(|(bucket, count)| {
            let (least, most) = layout.values_of(bucket, linear);
            (least, most, count)
        });
        let extremes = values
            .iter()
            .min()
            .copied()
            .zip(values.iter().max().copied());
        ValueHistogram::of_buckets(buckets, extremes, cut)
    }

    #[test]
    fn figures_are_those_of_the_values() {
        let values = [-5000, -1, 0, 0, 7, 1023, 1024, 1_000_000_007, -3];
        let all = histogram(&values, None);
        assert_eq!((all.count(), all.sum()), (9, Some(values.iter().sum())));
        assert_eq!((all.min(), all.max()), (Some(-5000), Some(1_000_000_007)));
        let exact = |share| {
            let quantile = all.quantile(share).unwrap();
            (quantile.error() == 0).then(|| quantile.value())
        };
        assert_eq!(all.quantile(0.0).map(|it| it.least), Some(-5000));
        assert_eq!(
            [exact(0.2), exact(0.5), exact(0.6)],
            [Some(-3), Some(0), Some(7)]
        );
        let last = all.quantile(1.0).unwrap();
        assert!(last.least <= 1_000_000_007 && last.most == 1_000_000_007);
        assert!(last.error() <= 1_000_000);
        let zeros = all.buckets().iter().find(|it| it.least == Some(0));
        assert_eq!(zeros.map(|it| (it.most, it.count)), Some((Some(0), 2)));
    }

    #[test]
    fn ranges_have_counts_below_and_above() {
        let range = "0,100,10".parse().ok();
        let all = histogram(&[-5, 0, 9, 10, 99, 100, 1 << 40], range);
        let buckets = all.buckets().iter();
        let buckets: Vec<_> = buckets.map(|it| (it.least, it.most, it.count)).collect();
        let expected = [
            (None, Some(-1), 1),
            (Some(0), Some(9), 2),
            (Some(10), Some(19), 1),
            (Some(90), Some(99), 1),
            (Some(100), None, 2),
        ];
        assert_eq!(buckets, expected);
        assert_eq!(all.sum(), Some(-5 + 9 + 10 + 99 + 100 + (1 << 40)));
    }

    #[test]
    fn sums_beyond_a_word_are_exact_or_unknown() {
        // Their sum has more than 64 bits.
        let most = i128::from(i64::MAX);
        let all = histogram(&[most; 9], None);
        assert_eq!(all.sum(), Some(9 * most));
        let all = histogram(&[i128::from(i64::MIN); 7], None);
        assert_eq!(all.sum(), Some(7 * i128::from(i64::MIN)));
        let all = histogram(&[(1 << 64) - 1, 1 << 63], None);
        assert_eq!(all.sum(), Some((1 << 64) - 1 + (1 << 63)));
        assert_eq!(all.max(), Some((1 << 64) - 1));
        let range = "0,10,1".parse().ok();
        let all = histogram(&[most, most - 5, 12], range);
        assert_eq!((all.sum(), all.mean(), all.count()), (None, None, 3));
    }

    #[test]
    fn histograms_of_processes_add_up() {
        let range: Option<Linear> = "0,100,10".parse().ok();
        for linear in [None, range] {
            let (one, other) = ([-5000, 7, 12, 1 << 20], [7, 13, 99, (1 << 20) + 5, 1 << 33]);
            let each = [&one[..], &other].map(|it| [histogram(it, linear)]);
            let sum = ValueHistogram::of_processes(each.iter().map(|it| &it[..]));
            let both: Vec<i128> = one.into_iter().chain(other).collect();
            let expected = histogram(&both, linear);
            assert_eq!(sum.len(), 1);
            assert_eq!(sum[0].buckets(), expected.buckets());
            assert_eq!((sum[0].sum(), sum[0].count()), (expected.sum(), 9));
            assert_eq!(sum[0].extremes, expected.extremes);
        }
    }

    #[test]
    fn wider_buckets_of_a_process_are_kept() {
        let with = |buckets: &[(i128, i128, u64)]| ValueHistogram {
            buckets: buckets
                .iter()
                .map(|(least, most, count)| ValueBucket {
                    least: Some(*least),
                    most: Some(*most),
                    count: *count,
                })
                .collect(),
            ..histogram(&[], None)
        };
        let narrow = [with(&[(0, 0, 1), (2, 3, 2), (6, 7, 3), (8, 9, 4)])];
        let wide = [with(&[(0, 0, 10), (4, 7, 20), (8, 11, 30)])];
        let both = with(&[(0, 0, 11), (2, 3, 2), (4, 7, 23), (8, 11, 34)]);
        for each in [[&narrow[..], &wide], [&wide, &narrow]] {
            let sum = ValueHistogram::of_processes(each);
            assert_eq!(sum[0].buckets(), both.buckets());
        }
    }

    #[test]
    fn nothing_recorded_has_no_figures() {
        let all = histogram(&[], None);
        assert_eq!((all.count(), all.sum()), (0, Some(0)));
        assert_eq!(
            (all.min(), all.max(), all.quantile(0.5)),
            (None, None, None)
        );
        assert_eq!(all.mean(), None);
    }

    #[test]
    fn middles_of_quantiles_are_within_them() {
        let quantile = Quantile {
            least: 10,
            most: 15,
        };
        assert_eq!((quantile.value(), quantile.error()), (12, 3));
        let exact = Quantile {
            least: -7,
            most: -7,
        };
        assert_eq!((exact.value(), exact.error()), (-7, 0));
    }
}
