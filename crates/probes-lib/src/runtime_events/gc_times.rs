//! [`GcTimes`]: how long each pause, phase or wait of the collector took.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::numbers::nanoseconds;

/// Times, with their quantiles.
#[derive(Clone, Debug, Default)]
pub struct GcTimes {
    count: u64,
    total: u64,
    max: u64,
    /// How many times are in each bucket, by the beginning of the bucket in nanoseconds.
    buckets: BTreeMap<u64, u64>,
}

/// The binary digits of a time that are kept: a quantile is at most 1/512, 0.2 %, too low.
const DIGITS: u32 = 10;

/// Returns where the bucket begins that a time is in.
fn bucket_of(time: u64) -> u64 {
    let dropped = (u64::BITS - time.leading_zeros()).saturating_sub(DIGITS);
    time >> dropped << dropped
}

impl GcTimes {
    pub(super) fn add(&mut self, time: Duration) {
        let time = nanoseconds(time);
        self.count += 1;
        self.total = self.total.saturating_add(time);
        self.max = self.max.max(time);
        *self.buckets.entry(bucket_of(time)).or_default() += 1;
    }

    /// Returns these times, each given with how many there are of it, and with their exact sum and maximum.
    pub fn of(
        times: impl IntoIterator<Item = (Duration, u64)>,
        total: Duration,
        max: Duration,
    ) -> GcTimes {
        let mut all = GcTimes::default();
        for (time, count) in times {
            let time = nanoseconds(time);
            all.count += count;
            *all.buckets.entry(bucket_of(time)).or_default() += count;
        }
        (all.total, all.max) = (nanoseconds(total), nanoseconds(max));
        all
    }

    /// Adds other times.
    pub fn merge(&mut self, other: &GcTimes) {
        self.count += other.count;
        self.total = self.total.saturating_add(other.total);
        self.max = self.max.max(other.max);
        for (bucket, count) in &other.buckets {
            *self.buckets.entry(*bucket).or_default() += count;
        }
    }

    /// Returns how many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns their sum.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.total)
    }

    /// Returns the longest; zero if there are none.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// Returns the times, at most 0.2 % too low, and how many there are of each; the shortest first.
    pub fn times(&self) -> impl Iterator<Item = (Duration, u64)> {
        let buckets = self.buckets.iter();
        buckets.map(|(time, count)| (Duration::from_nanos(*time), *count))
    }

    /// Returns the time that `part` of a thousand times do not exceed, at most 0.2 % too low; zero if there are none.
    pub fn per_mille(&self, part: u64) -> Duration {
        let rank = (u128::from(self.count) * u128::from(part))
            .div_ceil(1000)
            .max(1);
        let mut sum = 0;
        let found = self.buckets.iter().find(|(_, count)| {
            sum += u128::from(**count);
            sum >= rank
        });
        Duration::from_nanos(found.map_or(0, |(bucket, _)| *bucket))
    }
}
