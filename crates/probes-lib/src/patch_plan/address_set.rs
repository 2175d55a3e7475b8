//! [`AddressSet`]: a set of addresses of code, a bit for each.

use std::ops::Range;

/// Ranges of code, each with a bit for every address in it.
#[derive(Clone, Debug)]
pub(super) struct AddressSet(Vec<(Range<u64>, Vec<u64>)>);

impl AddressSet {
    /// Returns an empty set that can hold the addresses in these ranges.
    pub(super) fn new(ranges: impl Iterator<Item = Range<u64>>) -> AddressSet {
        let words = |range: &Range<u64>| (range.end - range.start).div_ceil(64) as usize;
        let empty = |range: Range<u64>| (range.clone(), vec![0; words(&range)]);
        AddressSet(ranges.map(empty).collect())
    }

    /// Adds an address, unless it is outside of the ranges.
    pub(super) fn insert(&mut self, address: u64) {
        if let Some((range, bits)) = self.0.iter_mut().find(|it| it.0.contains(&address)) {
            let at = address - range.start;
            bits[(at / 64) as usize] |= 1 << (at % 64);
        }
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        let part = self.0.iter().find(|it| it.0.contains(&address));
        part.is_some_and(|(range, bits)| {
            let at = address - range.start;
            bits[(at / 64) as usize] & 1 << (at % 64) != 0
        })
    }
}
