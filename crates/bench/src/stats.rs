//! [`Samples`]: the median, p99 and largest of a few dozen samples.

use std::time::Duration;

/// Samples of one figure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<u64>);

impl Samples {
    pub(crate) fn push(&mut self, sample: u64) {
        self.0.push(sample);
    }

    pub(crate) fn push_time(&mut self, time: Duration) {
        self.push(time.as_nanos() as u64);
    }

    /// Returns the median: the mean of the two middle samples if their number is even, 0 if there are none.
    pub(crate) fn median(&self) -> u64 {
        let sorted = self.sorted();
        let middle = sorted.len() / 2;
        match (sorted.get(middle.wrapping_sub(1)), sorted.get(middle)) {
            (Some(below), Some(above)) if sorted.len() % 2 == 0 => (below + above) / 2,
            (_, Some(&middle)) => middle,
            (_, None) => 0,
        }
    }

    /// Returns the smallest sample that 99 % of the samples do not exceed; if there are fewer than 100
    /// samples, that is the largest.
    pub(crate) fn p99(&self) -> u64 {
        let sorted = self.sorted();
        let rank = (sorted.len() * 99).div_ceil(100);
        sorted.get(rank.wrapping_sub(1)).copied().unwrap_or(0)
    }

    pub(crate) fn max(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    fn sorted(&self) -> Vec<u64> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted
    }
}

impl FromIterator<u64> for Samples {
    fn from_iter<I: IntoIterator<Item = u64>>(samples: I) -> Samples {
        Samples(samples.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::Samples;

    #[test]
    fn median_and_p99_of_few_and_of_many() {
        let of = |samples: &[u64]| {
            let samples: Samples = samples.iter().copied().collect();
            (samples.median(), samples.p99(), samples.max())
        };
        assert_eq!(of(&[]), (0, 0, 0));
        assert_eq!(of(&[7]), (7, 7, 7));
        assert_eq!(of(&[9, 1]), (5, 9, 9));
        assert_eq!(of(&[3, 9, 1]), (3, 9, 9));
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(of(&hundred), (50, 99, 100));
    }
}
