//! [`Rings`]: reads the records that the trampolines write, while they continue to write.
//!
//! A trampoline claims a record by adding one to the head of its ring, and completes the record by
//! writing the record's number into it. The record may be overwritten as soon as the ring has
//! wrapped around. So it is read twice: what was read the second time is valid if the record was
//! complete both times, and the ring had not wrapped around to it afterwards. A thread that is so
//! late that it still writes a record of an earlier round is noticed only once it writes the number.

use std::io;
use std::time::{Duration, Instant};

use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::numbers::u64_at;
use crate::observe::layout::groups::GROUPS;
use crate::observe::layout::shared::{HEADER_LEN, SharedLayout, record};

/// If a thread takes longer than this to complete a record, it is assumed to have exited, or to
/// have left its trampoline in another way.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);

/// How far the rings have been read.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(crate) shared: LiveAddr,
    layout: SharedLayout,
    next: [u64; GROUPS],
    /// Since when the next record of a ring has been incomplete.
    waiting: [Option<Instant>; GROUPS],
}

/// Records, each of the length that the layout says.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub(crate) bytes: Vec<u8>,
    /// How many were overwritten before they could be read, or never completed.
    pub(crate) dropped: u64,
}

impl Rings {
    /// Returns the rings of the shared data at an address, none of whose records has been read.
    pub(crate) fn at(shared: LiveAddr, layout: SharedLayout) -> Rings {
        Rings {
            shared,
            layout,
            next: [0; GROUPS],
            waiting: [None; GROUPS],
        }
    }

    /// Reads the new records, in the order of their times. `is_over` says that no trampoline writes any
    /// more.
    ///
    /// # Errors
    ///
    /// If a ring cannot be read; but if others had new records, these are returned, and the next call fails, unless it
    /// `is_over`.
    pub(crate) fn read(&mut self, memory: &impl ReadMemory, is_over: bool) -> io::Result<Records> {
        let mut records = Records::default();
        if self.layout.record_len == 0 {
            return Ok(records);
        }
        let heads = self.heads(memory)?;
        for (group, head) in heads.into_iter().enumerate() {
            match self.read_ring(memory, (group, head), is_over, &mut records) {
                Err(error) if is_over || records.bytes.is_empty() => return Err(error),
                Err(_) => break,
                Ok(()) => {}
            }
        }
        records.sort(self.layout.record_len as usize);
        Ok(records)
    }

    /// Returns whether there are no new records, and none is awaited.
    pub(crate) fn have_nothing_new(&self, memory: &impl ReadMemory) -> bool {
        let is_awaited = self.layout.record_len == 0 || self.waiting.iter().any(Option::is_some);
        !is_awaited && self.heads(memory).is_ok_and(|heads| heads == self.next)
    }

    /// Reads the new records of the ring of a group, with its head.
    fn read_ring(
        &mut self,
        memory: &impl ReadMemory,
        (group, head): (usize, u64),
        is_over: bool,
        records: &mut Records,
    ) -> io::Result<()> {
        let room = self.layout.records();
        let next = self.next[group];
        // A head only grows: one that is smaller has been overwritten by the program.
        if head <= next {
            return Ok(());
        }
        let mut first = next.max(head.saturating_sub(room));
        let len = self.layout.record_len as usize;
        let is_complete = |(record, number): &(&[u8], u64)| word(record, record::NUMBER) == *number;
        let bytes = self.copy(memory, group, first, head)?;
        // The head may be u64::MAX, so one more than it cannot be the end of a range.
        let numbers = |from: u64, to: u64| (from..to).map(|position| position + 1);
        let numbered = || bytes.chunks_exact(len).zip(numbers(first, head));
        let end = if is_over {
            head
        } else {
            first + numbered().take_while(is_complete).count() as u64
        };
        // The records are read again, now that it is known which of them are complete.
        let was_complete: Vec<bool> = numbered().map(|one| is_complete(&one)).collect();
        let mut bytes = self.copy(memory, group, first, end)?;
        let oldest = self.head(memory, group)?.saturating_sub(room);
        let gone = oldest.clamp(first, end.max(first)) - first;
        bytes.drain(..gone as usize * len);
        let was_complete = was_complete.iter().skip(gone as usize);
        // A record of an earlier round of the ring that was completed late may have overwritten one
        // of these.
        let numbers = numbers(first + gone, end);
        let candidates = bytes.chunks_exact(len).zip(numbers).zip(was_complete);
        let stayed =
            |(one, was_complete): ((&[u8], u64), &bool)| *was_complete && is_complete(&one);
        let stayed: Vec<bool> = candidates.map(stayed).collect();
        // Long runs are copied at once.
        let mut rest = &bytes[..];
        for run in stayed.chunk_by(|one, next| one == next) {
            let (these, behind) = rest.split_at(run.len() * len);
            rest = behind;
            if run[0] {
                records.bytes.extend_from_slice(these);
            } else {
                records.drop_records(run.len() as u64);
            }
        }
        first = first.max(oldest);
        let mut after = end.max(first);
        records.drop_records(first - next);
        self.waiting[group] = if after > next {
            None
        } else {
            self.waiting[group].or_else(|| Some(Instant::now()))
        };
        if self.waiting[group].is_some_and(|since| since.elapsed() > COMPLETION_TIMEOUT) {
            records.drop_records(1);
            after += 1;
            // The next record may take as long.
            self.waiting[group] = None;
        }
        self.next[group] = after;
        Ok(())
    }

    /// Returns the address of a ring.
    fn ring(&self, group: usize) -> LiveAddr {
        self.shared.plus(self.layout.ring(group))
    }

    /// Reads the heads of all rings.
    fn heads(&self, memory: &impl ReadMemory) -> io::Result<[u64; GROUPS]> {
        let mut heads = [[0; 8]; GROUPS];
        let groups = heads.iter_mut().enumerate();
        let pieces = groups.map(|(group, head)| (self.ring(group), &mut head[..]));
        let read = memory.read_pieces(&mut pieces.collect::<Vec<_>>());
        read.map_err(|(_, error)| error)?;
        Ok(heads.map(u64::from_le_bytes))
    }

    /// Reads the head of a ring: how many records have been claimed.
    fn head(&self, memory: &impl ReadMemory, group: usize) -> io::Result<u64> {
        memory.read_word(self.ring(group))
    }

    /// Reads the bytes of the records from `first` up to, not including, `end`. There must not be
    /// more of them than a ring holds.
    fn copy(
        &self,
        memory: &impl ReadMemory,
        group: usize,
        first: u64,
        end: u64,
    ) -> io::Result<Vec<u8>> {
        let (room, len) = (self.layout.records(), u64::from(self.layout.record_len));
        let start = self.ring(group).plus(HEADER_LEN);
        let mut bytes = vec![0; ((end - first) * len) as usize];
        let at = first % room;
        let before_wrap = (room - at).min(end - first);
        let (one, other) = bytes.split_at_mut((before_wrap * len) as usize);
        let mut pieces = vec![(start.plus(at * len), one)];
        if !other.is_empty() {
            pieces.push((start, other));
        }
        let read = memory.read_pieces(&mut pieces);
        read.map_err(|(_, error)| error)?;
        Ok(bytes)
    }
}

impl Records {
    fn drop_records(&mut self, many: u64) {
        self.dropped = self.dropped.saturating_add(many);
    }

    fn sort(&mut self, len: usize) {
        let mut order: Vec<&[u8]> = self.bytes.chunks_exact(len).collect();
        let time = |record: &&[u8]| word(record, record::TIME);
        if !order.is_sorted_by_key(time) {
            order.sort_by_key(time);
            self.bytes = order.concat();
        }
    }
}

/// Returns the eight bytes at offset `at` of a record as a number; 0 if the record does not have them all.
pub(crate) fn word(record: &[u8], at: u64) -> u64 {
    u64_at(record, at as usize).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::observe::layout::calls::CallsLayout;
    use crate::observe::layout::keys::KeysLayout;
    use crate::observe::layout::stack_copies::StackCopies;
    use crate::observe::layout::values::ValuesLayout;
    use crate::observe::value_pages::ValuePages;

    const LAYOUT: SharedLayout = SharedLayout {
        pairs: 0,
        record_len: 1 << 16,
        has_large_rings: false,
        filters_memory: false,
        value_pages: ValuePages::TableOfObserver,
        calls: CallsLayout::of_number(0),
        values: ValuesLayout::of_number(0),
        keys: KeysLayout::of_number(0),
        pairs_by_key: false,
        asks_for_threads: false,
        kept_len: 0,
        stacks: StackCopies::None,
    };
    const BASE: LiveAddr = LiveAddr(0x10000);

    type Change = Box<dyn Fn(&mut Vec<u8>)>;

    /// Shared data. `meanwhile` are the changes that trampolines make, one after each read; the
    /// last element is made first.
    struct Memory {
        bytes: RefCell<Vec<u8>>,
        meanwhile: RefCell<Vec<Change>>,
    }

    impl ReadMemory for Memory {
        fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            let mut all = self.bytes.borrow_mut();
            let start = (at.0 - BASE.0) as usize;
            bytes.copy_from_slice(&all[start..start + bytes.len()]);
            if let Some(change) = self.meanwhile.borrow_mut().pop() {
                change(&mut all);
            }
            Ok(())
        }

        /// One read: of the heads.
        fn read_pieces(
            &self,
            pieces: &mut [(LiveAddr, &mut [u8])],
        ) -> Result<(), (LiveAddr, io::Error)> {
            let (last, others) = pieces.split_last_mut().unwrap();
            for (at, bytes) in others {
                let start = (at.0 - BASE.0) as usize;
                bytes.copy_from_slice(&self.bytes.borrow()[start..start + bytes.len()]);
            }
            self.read(last.0, last.1).map_err(|error| (last.0, error))
        }
    }

    fn memory() -> Memory {
        Memory {
            bytes: RefCell::new(vec![0; LAYOUT.ring(GROUPS) as usize]),
            meanwhile: RefCell::new(Vec::new()),
        }
    }

    fn claim(bytes: &mut [u8], group: usize) -> u64 {
        let at = LAYOUT.ring(group) as usize;
        let head = word(&bytes[at..], 0);
        bytes[at..at + 8].copy_from_slice(&(head + 1).to_le_bytes());
        head
    }

    fn complete(bytes: &mut [u8], group: usize, position: u64, time: u64) {
        let len = u64::from(LAYOUT.record_len);
        let at = LAYOUT.ring(group) + HEADER_LEN + position % LAYOUT.records() * len;
        let mut put = |offset, word: u64| {
            bytes[(at + offset) as usize..][..8].copy_from_slice(&word.to_le_bytes());
        };
        put(record::TIME, time);
        put(record::NUMBER, position + 1);
    }

    fn hit(bytes: &mut [u8], group: usize, time: u64) {
        let position = claim(bytes, group);
        complete(bytes, group, position, time);
    }

    fn times(records: &Records) -> Vec<u64> {
        let records = records.bytes.chunks_exact(LAYOUT.record_len as usize);
        records.map(|record| word(record, record::TIME)).collect()
    }

    #[test]
    fn new_records_are_read_once_in_order() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        for (group, time) in [(3, 10), (3, 20), (0, 15), (15, 5)] {
            hit(&mut memory.bytes.borrow_mut(), group, time);
        }
        assert_eq!(times(&rings.read(&memory, false).unwrap()), [5, 10, 15, 20]);
        assert!(times(&rings.read(&memory, false).unwrap()).is_empty());
        hit(&mut memory.bytes.borrow_mut(), 3, 30);
        assert_eq!(times(&rings.read(&memory, false).unwrap()), [30]);
    }

    #[test]
    fn nothing_is_new_until_a_record_is_claimed() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        assert!(rings.have_nothing_new(&memory));
        hit(&mut memory.bytes.borrow_mut(), 3, 10);
        assert!(!rings.have_nothing_new(&memory));
        rings.read(&memory, false).unwrap();
        assert!(rings.have_nothing_new(&memory));
        let late = claim(&mut memory.bytes.borrow_mut(), 0);
        for _ in 0..2 {
            assert!(!rings.have_nothing_new(&memory));
            rings.read(&memory, false).unwrap();
        }
        complete(&mut memory.bytes.borrow_mut(), 0, late, 20);
        assert!(!rings.have_nothing_new(&memory));
        assert_eq!(times(&rings.read(&memory, false).unwrap()), [20]);
        assert!(rings.have_nothing_new(&memory));
    }

    #[test]
    fn records_before_an_error_are_returned() {
        /// Memory of which the records of the groups from this one on cannot be read, but their heads.
        struct CutMemory(Memory, usize);

        impl ReadMemory for CutMemory {
            fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
                if at.0 >= BASE.0 + LAYOUT.ring(self.1) && bytes.len() > 8 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.0.read(at, bytes)
            }
        }

        let memory = CutMemory(memory(), 5);
        let mut rings = Rings::at(BASE, LAYOUT);
        for (group, time) in [(3, 10), (5, 20), (0, 15)] {
            hit(&mut memory.0.bytes.borrow_mut(), group, time);
        }
        let mut again = Rings::at(BASE, LAYOUT);
        assert!(again.read(&memory, true).is_err());
        assert_eq!(times(&rings.read(&memory, false).unwrap()), [10, 15]);
        assert!(rings.read(&memory, false).is_err());
        assert_eq!(times(&rings.read(&memory.0, false).unwrap()), [20]);
    }

    #[test]
    fn slow_reader_drops_and_counts_the_oldest() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let room = LAYOUT.records();
        for time in 0..room + 5 {
            hit(&mut memory.bytes.borrow_mut(), 1, time);
        }
        let records = rings.read(&memory, false).unwrap();
        assert_eq!(records.dropped, 5);
        assert_eq!(times(&records), (5..room + 5).collect::<Vec<_>>());
    }

    #[test]
    fn record_overwritten_while_read_is_dropped() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        // The time of each is its position.
        let hits = |bytes: &mut Vec<u8>, many| {
            for _ in 0..many {
                let position = claim(bytes, 0);
                complete(bytes, 0, position, position);
            }
        };
        let room = LAYOUT.records();
        hits(&mut memory.bytes.borrow_mut(), room);
        // After the head is read, after the first copy, and after the second.
        for _ in 0..3 {
            let more = Box::new(move |bytes: &mut Vec<u8>| hits(bytes, 2));
            memory.meanwhile.borrow_mut().push(more);
        }
        let records = rings.read(&memory, false).unwrap();
        let mut all = times(&records);
        let more = rings.read(&memory, false).unwrap();
        all.extend(times(&more));
        assert_eq!(all.len() as u64 + records.dropped + more.dropped, room + 6);
        assert_eq!(
            all,
            (room + 6 - all.len() as u64..room + 6).collect::<Vec<_>>()
        );
    }

    #[test]
    fn records_overwritten_between_copies_are_dropped() {
        let room = LAYOUT.records();
        // After the first copy, or after the second.
        for copies in 1..=2 {
            let memory = memory();
            let mut rings = Rings::at(BASE, LAYOUT);
            for time in 0..room {
                hit(&mut memory.bytes.borrow_mut(), 0, time);
            }
            let more = move |bytes: &mut Vec<u8>| {
                hit(bytes, 0, room);
                hit(bytes, 0, room + 1);
            };
            let mut meanwhile = memory.meanwhile.borrow_mut();
            meanwhile.push(Box::new(more));
            // The head is read before.
            for _ in 0..copies {
                meanwhile.push(Box::new(|_| {}));
            }
            drop(meanwhile);
            let records = rings.read(&memory, false).unwrap();
            assert_eq!((times(&records), records.dropped), ((2..room).collect(), 2));
            let records = rings.read(&memory, false).unwrap();
            assert_eq!(times(&records), [room, room + 1]);
        }
    }

    #[test]
    fn record_of_an_earlier_round_is_dropped() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let room = LAYOUT.records();
        for time in 0..room {
            hit(&mut memory.bytes.borrow_mut(), 0, time);
        }
        rings.read(&memory, false).unwrap();
        for time in 0..3 {
            hit(&mut memory.bytes.borrow_mut(), 0, 1000 + time);
        }
        // After the first copy, a thread completes what it claimed in the round before.
        let late = |bytes: &mut Vec<u8>| complete(bytes, 0, 1, 7);
        let mut meanwhile = memory.meanwhile.borrow_mut();
        meanwhile.push(Box::new(late));
        // The head is read before.
        meanwhile.push(Box::new(|_| {}));
        drop(meanwhile);
        let records = rings.read(&memory, false).unwrap();
        assert_eq!((times(&records), records.dropped), (vec![1000, 1002], 1));
    }

    #[test]
    fn incomplete_record_is_awaited_then_dropped() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let late = claim(&mut memory.bytes.borrow_mut(), 0);
        hit(&mut memory.bytes.borrow_mut(), 0, 20);
        assert!(times(&rings.read(&memory, false).unwrap()).is_empty());
        complete(&mut memory.bytes.borrow_mut(), 0, late, 10);
        assert_eq!(times(&rings.read(&memory, false).unwrap()), [10, 20]);
        claim(&mut memory.bytes.borrow_mut(), 0);
        hit(&mut memory.bytes.borrow_mut(), 0, 40);
        let records = rings.read(&memory, true).unwrap();
        assert_eq!((times(&records), records.dropped), (vec![40], 1));
    }

    #[test]
    fn each_incomplete_record_is_awaited_equally_long() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        for _ in 0..2 {
            claim(&mut memory.bytes.borrow_mut(), 0);
        }
        hit(&mut memory.bytes.borrow_mut(), 0, 30);
        for _ in 0..2 {
            for _ in 0..3 {
                let records = rings.read(&memory, false).unwrap();
                assert_eq!((times(&records), records.dropped), (vec![], 0));
            }
            let long_ago = Instant::now().checked_sub(2 * COMPLETION_TIMEOUT).unwrap();
            rings.waiting[0] = rings.waiting[0].map(|_| long_ago);
            assert_eq!(rings.read(&memory, false).unwrap().dropped, 1);
        }
        assert_eq!(times(&rings.read(&memory, false).unwrap()), [30]);
    }

    #[test]
    fn wait_begins_again_behind_a_completed_record() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let first = claim(&mut memory.bytes.borrow_mut(), 0);
        claim(&mut memory.bytes.borrow_mut(), 0);
        assert!(times(&rings.read(&memory, false).unwrap()).is_empty());
        let long_ago = Instant::now().checked_sub(2 * COMPLETION_TIMEOUT).unwrap();
        rings.waiting[0] = Some(long_ago);
        complete(&mut memory.bytes.borrow_mut(), 0, first, 10);
        let records = rings.read(&memory, false).unwrap();
        assert_eq!((times(&records), records.dropped), (vec![10], 0));
        assert_eq!(rings.read(&memory, false).unwrap().dropped, 0);
    }

    #[test]
    fn any_head_can_be_read() {
        let room = LAYOUT.records();
        for heads in [
            [u64::MAX, u64::MAX],
            [u64::MAX - room, u64::MAX],
            [1 << 63, u64::MAX],
            [u64::MAX, 5],
        ] {
            for is_over in [false, true] {
                let memory = memory();
                let mut rings = Rings::at(BASE, LAYOUT);
                for head in heads {
                    for group in 0..GROUPS {
                        let at = LAYOUT.ring(group) as usize;
                        memory.bytes.borrow_mut()[at..at + 8].copy_from_slice(&head.to_le_bytes());
                    }
                    let records = rings.read(&memory, is_over).unwrap();
                    assert!(records.bytes.is_empty());
                }
            }
        }
    }
}
