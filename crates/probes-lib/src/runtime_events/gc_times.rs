//! [`GcTimes`]: how long each pause, phase or wait of the collector took.

use std::time::Duration;

use crate::numbers::nanoseconds;

/// Times, with their quantiles.
///
/// ```
/// use std::time::Duration;
/// use probes_lib::GcTimes;
///
/// let ms = Duration::from_millis;
/// let times = GcTimes::of([(ms(1), 98), (ms(20), 2)], ms(138), ms(20));
/// assert_eq!((times.count(), times.total(), times.max()), (100, ms(138), ms(20)));
/// assert!(times.per_mille(500) <= ms(1) && times.per_mille(990) > ms(19));
/// ```
#[derive(Clone, Debug, Default)]
pub struct GcTimes {
    count: u64,
    total: u64,
    max: u64,
    /// How many times are in each bucket: [`PER_LENGTH`] buckets together, none of which exist until one is filled.
    buckets: Vec<Vec<u64>>,
}

/// How many times have a bucket of their own. Longer ones share a bucket if only their last binary digits differ: a
/// quantile is at most 1/512, 0.2 %, too low.
const EXACT: u64 = 1024;

/// How many buckets there are for the times from a power of two, at least [`EXACT`], up to the next one.
const PER_LENGTH: usize = EXACT as usize / 2;

/// Returns the index of the bucket that a time is in.
fn bucket_of(time: u64) -> usize {
    let dropped = (time / EXACT).checked_ilog2().map_or(0, |log| log + 1);
    dropped as usize * PER_LENGTH + (time >> dropped) as usize
}

/// Returns where a bucket begins.
fn begin_of(bucket: usize) -> u64 {
    let dropped = (bucket / PER_LENGTH).saturating_sub(1);
    ((bucket - dropped * PER_LENGTH) as u64) << dropped
}

impl GcTimes {
    pub(super) fn add(&mut self, time: Duration) {
        let time = nanoseconds(time);
        self.count += 1;
        self.total = self.total.saturating_add(time);
        self.max = self.max.max(time);
        self.fill(bucket_of(time), 1);
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
            all.fill(bucket_of(time), count);
        }
        (all.total, all.max) = (nanoseconds(total), nanoseconds(max));
        all
    }

    /// Adds other times.
    pub fn merge(&mut self, other: &GcTimes) {
        self.count += other.count;
        self.total = self.total.saturating_add(other.total);
        self.max = self.max.max(other.max);
        for (bucket, count) in other.filled() {
            self.fill(bucket, count);
        }
    }

    fn fill(&mut self, bucket: usize, count: u64) {
        let (group, index) = (bucket / PER_LENGTH, bucket % PER_LENGTH);
        if self.buckets.len() <= group {
            self.buckets.resize(group + 1, Vec::new());
        }
        let buckets = &mut self.buckets[group];
        if buckets.is_empty() {
            buckets.resize(PER_LENGTH, 0);
        }
        buckets[index] += count;
    }

    /// Returns the buckets that are not empty, and how many times are in each.
    fn filled(&self) -> impl Iterator<Item = (usize, u64)> {
        let groups = (0..).step_by(PER_LENGTH).zip(&self.buckets);
        let buckets = groups.flat_map(|(first, group)| (first..).zip(group.iter().copied()));
        buckets.filter(|(_, count)| *count > 0)
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
        self.filled()
            .map(|(bucket, count)| (Duration::from_nanos(begin_of(bucket)), count))
    }

    /// Returns the time that `part` of a thousand times do not exceed, at most 0.2 % too low; zero if there are none.
    pub fn per_mille(&self, part: u64) -> Duration {
        let rank = (u128::from(self.count) * u128::from(part))
            .div_ceil(1000)
            .max(1);
        let mut sum = 0;
        let found = self.filled().find(|(_, count)| {
            sum += u128::from(*count);
            sum >= rank
        });
        Duration::from_nanos(found.map_or(0, |(bucket, _)| begin_of(bucket)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_begin_little_before_each_time() {
        let powers = (0..64).map(|log| 1_u64 << log);
        let near = powers.flat_map(|it| [it - 1, it, it + 1, it + it / 3, it + (it - 1)]);
        let times = (0..5000).chain(near).chain([u64::MAX]);
        for time in times {
            let (bucket, begin) = (bucket_of(time), begin_of(bucket_of(time)));
            assert!(begin <= time && time - begin <= time / 512, "{time}");
            assert_eq!(bucket_of(begin), bucket, "{time}");
            assert!(begin == 0 || bucket_of(begin - 1) == bucket - 1, "{time}");
        }
        assert!(bucket_of(u64::MAX) < 1 << 15);
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_times() {
        let mut times = GcTimes::default();
        for time in (0..1000).rev() {
            times.add(Duration::from_nanos(time));
        }
        let mut all = GcTimes::default();
        all.merge(&times);
        for part in [0, 1, 500, 999, 1000] {
            let expected = Duration::from_nanos(part.max(1) - 1);
            assert_eq!(all.per_mille(part), expected);
        }
        assert_eq!(all.times().count(), 1000);
    }
}
