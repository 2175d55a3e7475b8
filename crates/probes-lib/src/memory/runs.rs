//! Groups many small items at sorted addresses into few runs, each of which is read in one go.
//!
//! A run has an item in each of its pages, so every page is known to be mapped, and reading the
//! bytes between the items reads no additional page.

use std::ops::Range;

use crate::address::PAGE;

/// The longest run, in bytes. It bounds the buffer, and is large enough for the cost of the system
/// calls to be small.
const MAX_RUN: u64 = 64 << 10;

/// Neighbouring items with one key (their object or segment).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index of the first item.
    pub(crate) first: usize,
    /// The address of the first item.
    pub(crate) start: u64,
    /// How many items.
    pub(crate) count: usize,
    /// Bytes from the start of the first to the end of the last.
    pub(crate) len: u64,
    /// The key that all of them have.
    pub(crate) key: usize,
}

impl Run {
    /// Returns the indices of its items.
    pub(crate) fn range(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

/// Groups items of `len` bytes at sorted addresses, each with a key; a run has items of one key.
pub(crate) fn group(items: impl Iterator<Item = (u64, usize)>, len: u64) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, (address, key)) in items.enumerate() {
        if let Some(run) = runs.last_mut().filter(|run| run.key == key) {
            let start = run.start;
            let last_page = start.saturating_add(run.len - 1) / PAGE;
            let grown = address.saturating_add(len) - start;
            if address / PAGE <= last_page + 1 && grown <= MAX_RUN {
                run.count += 1;
                run.len = run.len.max(grown);
                continue;
            }
        }
        runs.push(Run {
            first: index,
            start: address,
            count: 1,
            len,
            key,
        });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lens(addresses: &[u64]) -> Vec<(usize, u64)> {
        let runs = group(addresses.iter().map(|&address| (address, 0)), 6);
        runs.iter().map(|run| (run.count, run.len)).collect()
    }

    #[test]
    fn run_ends_at_a_page_without_items() {
        assert_eq!(lens(&[]), []);
        assert_eq!(lens(&[0x1000, 0x1006, 0x2ff0]), [(3, 0x1ff6)]);
        assert_eq!(lens(&[0x1000, 0x3000]), [(1, 6), (1, 6)]);
        // The first one ends with its page, and none is in page 2.
        assert_eq!(lens(&[0x1ffa, 0x3000]), [(1, 6), (1, 6)]);
        // The first one reaches into page 2, which page 3 follows.
        assert_eq!(lens(&[0x1ffe, 0x3000]), [(2, 0x1008)]);
    }

    #[test]
    fn run_is_bounded_and_has_one_key() {
        let dense: Vec<u64> = (0..2000).map(|i| 0x10000 + i * 160).collect();
        let dense_runs = lens(&dense);
        assert!(dense_runs.iter().all(|&(_, len)| len <= MAX_RUN));
        assert_eq!(dense_runs.iter().map(|&(n, _)| n).sum::<usize>(), 2000);

        let addresses = [0x1000, 0x1010, 0x1020].into_iter();
        let keyed = group(addresses.map(|a| (a, (a >= 0x1010).into())), 6);
        assert_eq!(
            keyed.iter().map(|run| run.count).collect::<Vec<_>>(),
            [1, 2]
        );
    }

    #[test]
    fn addresses_at_the_top_do_not_overflow() {
        assert_eq!(lens(&[u64::MAX - 3]).len(), 1);
        assert_eq!(lens(&[u64::MAX - 8, u64::MAX - 3]).len(), 1);
        assert_eq!(lens(&[u64::MAX - 3, u64::MAX - 2]).len(), 1);
    }
}
