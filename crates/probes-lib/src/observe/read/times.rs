//! [`Times`]: a histogram of times, with their sum and the longest.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::observe::layout::histogram;

/// How long something took, each time.
///
/// ```no_run
/// # let latency: probes_lib::Latency = unimplemented!();
/// let times: &probes_lib::Times = &latency;
/// println!("{} calls, p99 {:?}, max {:?}", times.count(), times.quantile(0.99), times.max());
/// ```
#[derive(Clone, Debug)]
pub struct Times {
    /// In nanoseconds.
    histogram: Histogram<u64>,
    sum: Duration,
    longest: Duration,
}

impl Times {
    /// Returns how many times were measured.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Returns the sum of all times.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Returns the mean of all times; zero if there are none.
    pub fn mean(&self) -> Duration {
        let mean = self.sum.as_nanos().checked_div(u128::from(self.count()));
        Duration::from_nanos(mean.unwrap_or(0) as u64)
    }

    /// Returns a quantile: the time that a `share` (0 to 1) of all times does not exceed; zero if there are no times.
    /// It is accurate to 0.2 %; or to what [`FunctionLatency`](crate::FunctionLatency),
    /// [`KeyedTimes`](crate::KeyedTimes) and [`WaitTimes`](crate::WaitTimes) say of theirs.
    pub fn quantile(&self, share: f64) -> Duration {
        if self.count() == 0 {
            return Duration::ZERO;
        }
        let time = self.histogram.value_at_quantile(share);
        Duration::from_nanos(time).min(self.longest)
    }

    /// Returns the longest time.
    pub fn max(&self) -> Duration {
        self.longest
    }

    /// Returns the times, as accurate as a [quantile](Times::quantile), and how many there are of each; the shortest
    /// first.
    pub fn times(&self) -> impl Iterator<Item = (Duration, u64)> {
        let recorded = self.histogram.iter_recorded();
        recorded.map(|it| {
            let time = Duration::from_nanos(it.value_iterated_to());
            (time.min(self.longest), it.count_at_value())
        })
    }

    /// Adds other times.
    pub(super) fn add(&mut self, other: &Times) {
        let (mut all, fewer) = if self.longest < other.longest {
            (other.histogram.clone(), &self.histogram)
        } else {
            (self.histogram.clone(), &other.histogram)
        };
        // There is room for the longest.
        for it in fewer.iter_recorded() {
            all.saturating_record_n(it.value_iterated_to(), it.count_at_value());
        }
        *self = Times {
            histogram: all,
            sum: self.sum.saturating_add(other.sum),
            longest: self.longest.max(other.longest),
        };
    }

    /// Returns the times that are counted in buckets of this `precision` ([`histogram::times_of`]), given as bucket and
    /// count. `longest` and `sum` are in ticks, which are `nanoseconds` long. Without a sum, it is that of the middles
    /// of the buckets.
    pub(crate) fn of(
        counts: impl Iterator<Item = (u64, u64)>,
        precision: u32,
        longest: u64,
        sum: Option<u64>,
        nanoseconds: f64,
    ) -> Times {
        let time = |ticks: u64| (ticks as f64 * nanoseconds) as u64;
        let mut histogram = empty(time(longest), precision);
        let mut of_middles = 0_u128;
        for (bucket, count) in counts.filter(|(_, count)| *count > 0) {
            let (least, width) = histogram::times_of(bucket, precision);
            let middle = (least + width / 2).min(longest);
            let of_bucket = u128::from(middle) * u128::from(count);
            of_middles = of_middles.saturating_add(of_bucket);
            // A time that is rounded up beyond the longest is counted as the longest.
            histogram.saturating_record_n(time(middle), count);
        }
        let sum = sum.unwrap_or_else(|| u64::try_from(of_middles).unwrap_or(u64::MAX));
        Times {
            histogram,
            sum: Duration::from_nanos(time(sum)),
            longest: Duration::from_nanos(time(longest)),
        }
    }
}

/// Returns an empty histogram for times up to the longest, with no more digits than buckets of this precision have.
fn empty(longest: u64, precision: u32) -> Histogram<u64> {
    let digits = match precision {
        ..=3 => 1,
        4..=7 => 2,
        _ => 3,
    };
    let of = |longest| Histogram::new_with_max(longest, digits);
    // It fails only for less than 2, and for more than 5 digits.
    of(longest.max(2)).unwrap_or_else(|_| unreachable!("{longest} is a bound"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_those_of_the_buckets() {
        let digits = |precision| empty(1000, precision).sigfig();
        assert_eq!([0, 3, 4, 7, 8, 9].map(digits), [1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn sum_is_given_or_that_of_middles() {
        let bucket = histogram::bucket_of(1000, 3);
        let (least, width) = histogram::times_of(bucket, 3);
        assert!(width > 1);
        let middle = least + width / 2;
        let of = |longest, sum| Times::of([(bucket, 4), (7, 0)].into_iter(), 3, longest, sum, 2.0);
        let nanoseconds = Duration::from_nanos;
        let times = of(1 << 20, None);
        assert_eq!((times.count(), times.sum()), (4, nanoseconds(8 * middle)));
        assert_eq!(times.mean(), nanoseconds(2 * middle));
        assert_eq!(times.max(), nanoseconds(2 << 20));
        // None is longer than the longest.
        let longest = of(least, None);
        assert_eq!(longest.sum(), nanoseconds(8 * least));
        assert_eq!(longest.quantile(0.5), nanoseconds(2 * least));
        assert_eq!(of(1 << 20, Some(99)).sum(), nanoseconds(198));
    }
}
