//! [`SegmentIndex`]: which segment holds a range of addresses, found in logarithmic time: a hostile file has tens of thousands
//! of segments, and millions of addresses to be looked up. Pure.

use crate::address::FileAddr;
use crate::elf::Segment;

/// Segments by their addresses, without those that lie within another one.
pub(crate) struct SegmentIndex {
    /// The start, the end, and the index among all segments. Both the starts and the ends ascend.
    each: Vec<(u64, u64, usize)>,
}

impl SegmentIndex {
    /// Of the bytes that executable segments have in the file.
    pub(crate) fn of_code(segments: &[Segment]) -> SegmentIndex {
        let len = |segment: &Segment| segment.executable.then_some(segment.file_len);
        SegmentIndex::of(segments, len)
    }

    /// Of the bytes that writable segments have in memory.
    pub(crate) fn of_data(segments: &[Segment]) -> SegmentIndex {
        SegmentIndex::of(segments, |segment| segment.writable.then_some(segment.len))
    }

    fn of(segments: &[Segment], len: impl Fn(&Segment) -> Option<u64>) -> SegmentIndex {
        let placed = segments.iter().enumerate().filter_map(|(index, segment)| {
            let (start, len) = (segment.start.0, len(segment)?);
            Some((start, start.saturating_add(len), index))
        });
        let mut each: Vec<(u64, u64, usize)> = placed.collect();
        each.sort_by_key(|&(start, end, index)| (start, std::cmp::Reverse(end), index));
        let mut longest = None;
        each.retain(|&(_, end, _)| {
            let is_within = longest.is_some_and(|longest| end <= longest);
            longest = longest.max(Some(end));
            !is_within
        });
        SegmentIndex { each }
    }

    /// Returns the index of a segment that holds `len` bytes at `address`.
    pub(crate) fn find(&self, address: FileAddr, len: u64) -> Option<usize> {
        let end = address.0.checked_add(len)?;
        let next = self.each.partition_point(|&(start, ..)| start <= address.0);
        // Of all that begin at or before it, this one ends last.
        let &(_, last, index) = self.each.get(next.checked_sub(1)?)?;
        (end <= last).then_some(index)
    }

    /// Returns whether a segment holds `len` bytes at `address`.
    pub(crate) fn holds(&self, address: FileAddr, len: u64) -> bool {
        self.find(address, len).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::properties;

    proptest! {
        #![proptest_config(properties(256))]

        #[test]
        fn segment_is_found_if_one_holds_the_bytes(
            segments in prop::collection::vec((0_u64..64, 0_u64..32, any::<bool>()), 0..12),
            (address, len) in (0_u64..80, 1_u64..8),
            is_at_the_end in any::<bool>(),
        ) {
            let shift = if is_at_the_end { u64::MAX - 64 } else { 0 };
            let segments: Vec<Segment> = segments.into_iter().map(|(start, len, is_code)| Segment {
                start: FileAddr(shift + start),
                offset: 0,
                file_len: len,
                len: len + 4,
                executable: is_code,
                writable: !is_code,
            }).collect();
            let address = FileAddr(shift.saturating_add(address));
            let is_code = |it: &Segment| it.executable && it.holds_in_file(address, len);
            let is_data = |it: &Segment| it.writable && it.holds_in_memory(address, len);
            let code = SegmentIndex::of_code(&segments).find(address, len);
            prop_assert_eq!(code.is_some(), segments.iter().any(is_code));
            prop_assert!(code.is_none_or(|index| is_code(&segments[index])));
            let data = SegmentIndex::of_data(&segments).find(address, len);
            prop_assert_eq!(data.is_some(), segments.iter().any(is_data));
        }
    }
}
