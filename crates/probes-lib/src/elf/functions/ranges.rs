//! [`RangeSet`]: which of many address ranges an address is in.

/// Address ranges that do not overlap, in order.
pub(super) struct RangeSet(Vec<(u64, u64)>);

impl RangeSet {
    /// The ranges with these starts and lengths. Overlapping ones become one range. One that reaches past the end of the
    /// address space, as in a corrupt file, ends there.
    pub(super) fn of(ranges: impl Iterator<Item = (u64, u64)>) -> RangeSet {
        let with_end = ranges.map(|(start, len)| (start, start.saturating_add(len)));
        let mut ranges: Vec<(u64, u64)> = with_end.filter(|(start, end)| start < end).collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let overlaps = next.0 < last.1;
            if overlaps {
                last.1 = last.1.max(next.1);
            }
            overlaps
        });
        RangeSet(ranges)
    }

    /// The end of the range that `address` is in.
    pub(super) fn end_at(&self, address: u64) -> Option<u64> {
        let next = self.0.partition_point(|&(start, _)| start <= address);
        let (_, end) = self.0[next.checked_sub(1)?];
        (address < end).then_some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_are_one() {
        let ranges = [(40, 5), (10, 10), (15, 1), (18, 12), (30, 10), (7, 0)];
        let ranges = RangeSet::of(ranges.into_iter());
        for (address, end) in [
            (7, None),
            (9, None),
            (10, Some(30)),
            (29, Some(30)),
            // Ranges that touch stay separate.
            (30, Some(40)),
            (44, Some(45)),
            (45, None),
        ] {
            assert_eq!(ranges.end_at(address), end, "{address}");
        }
    }

    #[test]
    fn range_ends_with_the_address_space() {
        let ranges = RangeSet::of([(u64::MAX - 1, 9)].into_iter());
        assert_eq!(ranges.end_at(u64::MAX - 1), Some(u64::MAX));
        assert_eq!(ranges.end_at(5), None);
        assert_eq!(RangeSet::of([].into_iter()).end_at(0), None);
    }
}
