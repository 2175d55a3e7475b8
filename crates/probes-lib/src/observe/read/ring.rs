//! [`Rings`]: reads the records that the trampolines write, while they continue to write.
//!
//! A trampoline claims a record by adding one to the head of its ring, and completes the record by
//! writing the record's number into it. The record may be overwritten as soon as the ring has
//! wrapped around. So it is read twice, one system call for both: what was read the second time is valid if the record
//! was complete both times, and the ring had not wrapped around to it afterwards. A thread that is so
//! late that it still writes a record of an earlier round is noticed only once it writes the number.
//!
//! A record whose place for a stack is in use is marked as unused, and most hits then take another one. So the records
//! that were not read are no count of lost hits: from them are taken those that the trampolines count as unused.
//!
//! A record has room for a deep stack, and most stacks are not deep: of each record, only so many bytes are read as most
//! have, and the few longer ones once more as a whole.

use std::io;
use std::time::{Duration, Instant};

use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::numbers::u64_at;
use crate::observe::layout::groups::GROUPS;
use crate::observe::layout::shared::{
    HEADER_LEN, HITS_WITHOUT_PLACE, SharedLayout, UNUSED_RECORDS, record,
};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::read::data_source::{LARGE, reserve_exact};

/// If a thread takes longer than this to complete a record, it is assumed to have exited, or to
/// have left its trampoline in another way.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);

/// How many bytes a buffer may keep from one reading to the next.
const MAX_KEPT: usize = 4 << 20;

/// How many bytes of a ring are read at once, at most, unless a record has more: so few that the second copy finds them
/// in the caches of the processor.
const PART: usize = 64 << 10;

/// How many records of each ring were claimed.
pub(crate) type Heads = [u64; GROUPS];

/// The rings of an observation, and how far they have been read.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(crate) shared: LiveAddr,
    layout: SharedLayout,
    /// The record of each ring that is read next. A head only grows: one that is smaller has been overwritten by the
    /// program.
    next: Heads,
    /// Since when the next record of a ring has been incomplete.
    waiting: [Option<Instant>; GROUPS],
    /// If stacks are copied: what the trampolines had counted when that was last read.
    unused: UnusedCounts,
    /// So many of the records counted as unused have not been read yet.
    unused_ahead: u64,
    /// What was read the first time.
    first_copy: Vec<u8>,
}

/// What trampolines that copy stacks count beside the records.
#[derive(Clone, Copy, Debug, Default)]
struct UnusedCounts {
    /// Records that were claimed for a hit, which has taken a later one.
    records: u64,
    /// Hits that have got no record.
    hits: u64,
}

/// Records that were read, in the order of their times.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// The first `len` bytes are records, each of `record_len` bytes.
    bytes: Vec<u8>,
    len: usize,
    record_len: usize,
    /// Those that are longer.
    whole: WholeRecords,
    /// The time of the last of them, and whether each is as late as the one before it.
    last_time: u64,
    are_in_order: bool,
    /// Their times and indices in the order of time; empty if the records are in that order already.
    order: Vec<(u64, usize)>,
    /// How many were overwritten before they could be read, or never completed.
    pub(crate) dropped: u64,
    /// How many of these hits have found no free place for a stack.
    pub(crate) without_place: u64,
}

/// Records that were read as a whole.
#[derive(Debug, Default)]
struct WholeRecords {
    /// By their indices, which are in order.
    by_index: Vec<(usize, Vec<u8>)>,
    /// How many bytes they have, and for how many of them enough memory was left when that was last checked.
    len: usize,
    checked_len: usize,
}

impl WholeRecords {
    /// Returns whether there is memory for so many bytes of another one, and for what is decoded from all of them. Checks
    /// it once for each [`LARGE`] number of bytes.
    fn have_memory_for(&mut self, len: usize) -> bool {
        let all = self.len.saturating_add(len);
        if all - self.checked_len >= LARGE {
            if reserve_exact(&mut Vec::new(), all).is_err() {
                return false;
            }
            self.checked_len = all;
        }
        self.len = all;
        true
    }

    #[inline]
    fn get(&self, index: usize) -> Option<&[u8]> {
        let found = self
            .by_index
            .binary_search_by_key(&index, |(index, _)| *index);
        found.ok().map(|at| &self.by_index[at].1[..])
    }

    fn clear(&mut self) {
        self.by_index.clear();
        (self.len, self.checked_len) = (0, 0);
    }
}

impl Rings {
    /// Returns the rings of the shared data at an address, none of whose records has been read.
    pub(crate) fn at(shared: LiveAddr, layout: SharedLayout) -> Rings {
        Rings {
            shared,
            layout,
            next: [0; GROUPS],
            waiting: [None; GROUPS],
            unused: UnusedCounts::default(),
            unused_ahead: 0,
            first_copy: Vec::new(),
        }
    }

    /// Reads the new records, and replaces `records` by these. `heads` are those of the rings, if they were just read.
    /// `is_over` says that no trampoline writes any more.
    ///
    /// # Errors
    ///
    /// If a ring cannot be read. Unless `is_over`, records that were read or dropped before that are returned first, and the
    /// next call fails.
    pub(crate) fn read(
        &mut self,
        memory: &impl ReadMemory,
        heads: Option<Heads>,
        is_over: bool,
        records: &mut Records,
    ) -> io::Result<()> {
        records.clear();
        records.record_len = self.layout.read_first();
        shrink(&mut self.first_copy);
        if self.layout.record_len == 0 {
            return Ok(());
        }
        let heads = heads.map_or_else(|| self.heads(memory), Ok)?;
        for (group, head) in heads.into_iter().enumerate() {
            match self.read_ring(memory, (group, head), is_over, records) {
                Err(error) if is_over || records.is_empty() && records.dropped == 0 => {
                    return Err(error);
                }
                Err(_) => break,
                Ok(()) => {}
            }
        }
        if self.layout.stacks != StackCopies::None {
            match self.unused_counts(memory) {
                Err(error) if is_over => return Err(error),
                Err(_) => {}
                Ok(unused) => self.leave_out_unused(unused, records),
            }
        }
        records.sort();
        Ok(())
    }

    /// Reads what the trampolines count beside the records. Read after these, the counts include all that are marked.
    fn unused_counts(&self, memory: &impl ReadMemory) -> io::Result<UnusedCounts> {
        let mut counts = [[0; 8]; 2];
        let places = [UNUSED_RECORDS, HITS_WITHOUT_PLACE].map(|at| self.shared.plus(at));
        let mut pieces: Vec<_> = places
            .into_iter()
            .zip(&mut counts)
            .map(|(at, count)| (at, &mut count[..]))
            .collect();
        let read = memory.read_pieces(&mut pieces);
        read.map_err(|(_, error)| error)?;
        let [records, hits] = counts.map(u64::from_le_bytes);
        Ok(UnusedCounts { records, hits })
    }

    /// Takes the unused records from those that count as dropped.
    fn leave_out_unused(&mut self, unused: UnusedCounts, records: &mut Records) {
        let before = std::mem::replace(&mut self.unused, unused);
        let new = unused.records.saturating_sub(before.records);
        let unused_ahead = self.unused_ahead.saturating_add(new);
        let left_out = unused_ahead.min(records.dropped);
        self.unused_ahead = unused_ahead - left_out;
        records.dropped -= left_out;
        records.without_place = unused.hits.saturating_sub(before.hits).min(records.dropped);
    }

    /// Returns whether these heads show no new record and none is incomplete; `false` if nothing is recorded.
    pub(crate) fn have_nothing_new(&self, heads: &Heads) -> bool {
        self.layout.record_len > 0
            && self.waiting.iter().all(Option::is_none)
            && heads
                .iter()
                .zip(&self.next)
                .all(|(head, next)| head <= next)
    }

    /// Reads the new records of the ring of a group up to its `head`. In parts, because a program may fill a large ring
    /// completely while the whole of it is copied: then all would be dropped, each time.
    fn read_ring(
        &mut self,
        memory: &impl ReadMemory,
        (group, head): (usize, u64),
        is_over: bool,
        records: &mut Records,
    ) -> io::Result<()> {
        let mut first = self.next[group].max(head.saturating_sub(self.layout.records()));
        // With too little memory for all of them, the oldest count as dropped.
        while first < head && !self.has_memory_for((head - first) as usize, records) {
            first += (head - first).div_ceil(2);
        }
        while self.next[group] < head {
            let many = self.part((head - first) as usize);
            self.read_part(memory, (group, first, many), is_over, records)?;
            if self.next[group] <= first {
                break;
            }
            first = self.next[group];
        }
        Ok(())
    }

    /// How many of so many records are read at once.
    fn part(&self, many: usize) -> usize {
        many.min((PART / self.layout.read_first().max(1)).max(1))
    }

    /// Reads `many` records from `first` on, up to one that is not complete. Unread records before `first` are counted as
    /// dropped.
    fn read_part(
        &mut self,
        memory: &impl ReadMemory,
        (group, first, many): (usize, u64, usize),
        is_over: bool,
        records: &mut Records,
    ) -> io::Result<()> {
        let (room, next) = (self.layout.records(), self.next[group]);
        let head = self.copy_twice(memory, group, (first, many), records)?;
        let len = records.record_len;
        let first_copy = &self.first_copy[..];
        let second_copy = &mut records.bytes[records.len..];
        let mut last_time = records.last_time;
        // `first + index` is below the head that was read before, so adding one does not overflow.
        let has_number = |bytes: &[u8], index: usize| {
            word(&bytes[index * len..], record::NUMBER) == first + index as u64 + 1
        };
        let is_unused = |bytes: &[u8], index: usize| {
            let marked = (first + index as u64 + 1) | 1 << record::IS_UNUSED;
            word(&bytes[index * len..], record::NUMBER) == marked
        };
        let oldest = head.saturating_sub(room);
        let (mut end, mut kept) = (first, 0);
        let mut failed = Ok(());
        for index in 0..many {
            let is_complete = has_number(first_copy, index);
            if !is_complete && !is_over && !is_unused(first_copy, index) {
                break;
            }
            // A record of an earlier round of the ring that was completed late may have overwritten it meanwhile.
            if end >= oldest && is_complete && has_number(second_copy, index) {
                let record = index * len..(index + 1) * len;
                if let Some(len_of_whole) = self.layout.whole_len(&second_copy[record.clone()]) {
                    let whole = if records.whole.have_memory_for(len_of_whole) {
                        self.read_whole(memory, (group, end), len_of_whole)
                    } else {
                        Ok(None)
                    };
                    match whole {
                        Err(error) => {
                            failed = Err(error);
                            break;
                        }
                        Ok(None) => {
                            end += 1;
                            continue;
                        }
                        Ok(Some(whole)) => {
                            let index = records.len / len + kept;
                            records.whole.by_index.push((index, whole));
                        }
                    }
                }
                if kept != index {
                    second_copy.copy_within(record, kept * len);
                }
                let time = word(&second_copy[kept * len..], record::TIME);
                records.are_in_order &= last_time <= time;
                last_time = time;
                kept += 1;
            }
            end += 1;
        }
        records.len += kept * len;
        records.last_time = last_time;
        let mut after = end.max(oldest);
        self.waiting[group] = if after > next {
            None
        } else {
            self.waiting[group].or_else(|| Some(Instant::now()))
        };
        if self.waiting[group].is_some_and(|since| since.elapsed() > COMPLETION_TIMEOUT) {
            after += 1;
            // The next record may take as long.
            self.waiting[group] = None;
        }
        records.drop_records(after - next - kept as u64);
        self.next[group] = after;
        failed
    }

    /// Reads the first `len` bytes of a complete record; `None` if it was overwritten meanwhile, or there is no memory for them.
    fn read_whole(
        &self,
        memory: &impl ReadMemory,
        (group, number): (usize, u64),
        len: usize,
    ) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        if reserve_exact(&mut bytes, len).is_err() {
            return Ok(None);
        }
        bytes.resize(len, 0);
        let (ring, room) = (self.ring(group), self.layout.records());
        let at = ring.plus(HEADER_LEN + number % room * u64::from(self.layout.record_len));
        let (mut number_after, mut head) = ([0; 8], [0; 8]);
        let mut pieces = [
            (at, &mut bytes[..]),
            (at.plus(record::NUMBER), &mut number_after[..]),
            (ring, &mut head[..]),
        ];
        let read = memory.read_pieces(&mut pieces);
        read.map_err(|(_, error)| error)?;
        let [number_after, head] = [number_after, head].map(u64::from_le_bytes);
        let is_same = number_after == number + 1 && head.saturating_sub(room) <= number;
        Ok(is_same.then_some(bytes))
    }

    /// Returns the address of a ring.
    fn ring(&self, group: usize) -> LiveAddr {
        self.shared.plus(self.layout.ring(group))
    }

    /// Reads the heads of all rings: how many records have been claimed.
    pub(crate) fn heads(&self, memory: &impl ReadMemory) -> io::Result<Heads> {
        let mut heads = [[0; 8]; GROUPS];
        let groups = heads.iter_mut().enumerate();
        let pieces = groups.map(|(group, head)| (self.ring(group), &mut head[..]));
        let read = memory.read_pieces(&mut pieces.collect::<Vec<_>>());
        read.map_err(|(_, error)| error)?;
        Ok(heads.map(u64::from_le_bytes))
    }

    /// Reserves memory for so many records, as much of each as is read first, and for the first copy of one part. Returns
    /// whether as much is left for what is decoded from them.
    fn has_memory_for(&mut self, many: usize, records: &mut Records) -> bool {
        let len = records.record_len;
        let part = self.part(many);
        let reserve = |data: &mut Vec<u8>, from: usize, many: usize| {
            let missing = (from + many * len).saturating_sub(data.len());
            reserve_exact(data, missing).is_ok()
        };
        many == 0
            || reserve(&mut self.first_copy, 0, part)
                && reserve(&mut records.bytes, records.len, many)
                && reserve(&mut Vec::new(), 0, many)
    }

    /// Reads the `many` records from `first` on, at most as many as a ring holds, twice: to `first_copy`, and behind those
    /// in `records`. Of records with stacks, reads only what most have. Returns the head afterwards.
    fn copy_twice(
        &mut self,
        memory: &impl ReadMemory,
        group: usize,
        (first, many): (u64, usize),
        records: &mut Records,
    ) -> io::Result<u64> {
        let (room, len) = (self.layout.records(), records.record_len);
        let ring = self.ring(group);
        let start = ring.plus(HEADER_LEN);
        let at = first % room;
        let before_wrap = (room - at).min(many as u64) as usize * len;
        let distance = u64::from(self.layout.record_len);
        let first_copy = room_for(&mut self.first_copy, 0, many * len);
        let second_copy = room_for(&mut records.bytes, records.len, many * len);
        let mut head = [0; 8];
        let mut pieces = Vec::with_capacity(5);
        for copy in [first_copy, second_copy] {
            if len < distance as usize {
                let positions = (first..).map(|number| start.plus(number % room * distance));
                pieces.extend(positions.zip(copy.chunks_exact_mut(len)));
                continue;
            }
            let (to_end, from_start) = copy.split_at_mut(before_wrap);
            pieces.push((start.plus(at * len as u64), to_end));
            if !from_start.is_empty() {
                pieces.push((start, from_start));
            }
        }
        pieces.push((ring, &mut head[..]));
        // The pieces are read one after the other: the second copy begins when the first one is complete,
        // and the head is read last.
        let read = memory.read_pieces(&mut pieces);
        read.map_err(|(_, error)| error)?;
        Ok(u64::from_le_bytes(head))
    }
}

/// Returns so many bytes of a buffer from an offset on; it grows if it has fewer.
fn room_for(buffer: &mut Vec<u8>, from: usize, many: usize) -> &mut [u8] {
    if buffer.len() < from + many {
        buffer.resize(from + many, 0);
    }
    &mut buffer[from..from + many]
}

/// Frees the memory of a buffer that is larger than most readings need.
fn shrink<T>(buffer: &mut Vec<T>) {
    if buffer.capacity() * size_of::<T>() > MAX_KEPT {
        *buffer = Vec::new();
    }
}

impl Records {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.len / self.record_len.max(1)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the record of this index, in the order of their times; `None` if there are not so many.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&[u8]> {
        let index = self.order.get(index).map_or(index, |(_, index)| *index);
        if let Some(whole) = self.whole.get(index) {
            return Some(whole);
        }
        let start = index.checked_mul(self.record_len)?;
        let records = self.bytes[..self.len].get(start..)?;
        let record = records.get(..self.record_len)?;
        (!record.is_empty()).then_some(record)
    }

    /// Forgets them.
    pub(crate) fn clear(&mut self) {
        shrink(&mut self.bytes);
        shrink(&mut self.order);
        self.order.clear();
        self.whole.clear();
        (self.len, self.dropped, self.without_place) = (0, 0, 0);
        (self.last_time, self.are_in_order) = (0, true);
    }

    fn drop_records(&mut self, many: u64) {
        self.dropped = self.dropped.saturating_add(many);
    }

    fn sort(&mut self) {
        if !self.are_in_order {
            let records = self.bytes[..self.len]
                .chunks_exact(self.record_len)
                .enumerate();
            let times = records.map(|(index, record)| (word(record, record::TIME), index));
            self.order.extend(times);
            self.order.sort();
        }
    }
}

/// Returns the eight bytes at offset `at` of a record as a number; 0 if the record does not have them all.
#[inline]
pub(crate) fn word(record: &[u8], at: u64) -> u64 {
    u64_at(record, at as usize).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::observe::layout::calls::CallsLayout;
    use crate::observe::layout::keys::KeysLayout;
    use crate::observe::layout::stack_copies::{BYTES, LEN, MAX_BYTES, USED, USUAL_BYTES};
    use crate::observe::layout::values::ValuesLayout;
    use crate::observe::role::ArgumentRoom;
    use crate::observe::value_pages::ValuePages;

    const LAYOUT: SharedLayout = SharedLayout {
        pairs: 0,
        record_len: 1 << 13,
        argument_room: ArgumentRoom::Fields,
        ring_doublings: 0,
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
    /// last element is applied first.
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

        /// Changes are made after each piece longer than a head, and after the last piece.
        fn read_pieces(
            &self,
            pieces: &mut [(LiveAddr, &mut [u8])],
        ) -> Result<(), (LiveAddr, io::Error)> {
            let (last, others) = pieces.split_last_mut().unwrap();
            for (at, bytes) in others {
                if bytes.len() > 8 {
                    self.read(*at, bytes).map_err(|error| (*at, error))?;
                    continue;
                }
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

    fn read(rings: &mut Rings, memory: &impl ReadMemory, is_over: bool) -> io::Result<Records> {
        let mut records = Records::default();
        let read = rings.read(memory, None, is_over, &mut records);
        read.map(|()| records)
    }

    fn times(records: &Records) -> Vec<u64> {
        let records = (0..records.count()).map(|index| records.get(index).unwrap());
        records.map(|record| word(record, record::TIME)).collect()
    }

    const WITH_STACKS: SharedLayout = SharedLayout {
        record_len: 64 + LEN as u32,
        stacks: StackCopies::OF_THREADS,
        ..LAYOUT
    };

    fn memory_with_stacks() -> Memory {
        Memory {
            bytes: RefCell::new(vec![0; WITH_STACKS.ring(1) as usize + 8 * GROUPS]),
            meanwhile: RefCell::new(Vec::new()),
        }
    }

    /// Records a hit in the first group, with a stack of so many bytes, of which the last is 7.
    fn hit_with_stack(bytes: &mut [u8], time: u64, used: u64) {
        let ring = WITH_STACKS.ring(0);
        let position = word(bytes, ring);
        let len = u64::from(WITH_STACKS.record_len);
        let at = ring + HEADER_LEN + position % WITH_STACKS.records() * len;
        let stack = at + WITH_STACKS.stack_at();
        for (at, word) in [
            (ring, position + 1),
            (at + record::TIME, time),
            (at + record::NUMBER, position + 1),
            (stack + USED, used),
        ] {
            bytes[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[(stack + BYTES + used - 1) as usize] = 7;
    }

    /// Reads the first ring.
    fn read_stacks(rings: &mut Rings, memory: &Memory) -> Records {
        let (mut records, mut heads) = (Records::default(), [0; GROUPS]);
        heads[0] = word(&memory.bytes.borrow(), WITH_STACKS.ring(0));
        rings
            .read(memory, Some(heads), false, &mut records)
            .unwrap();
        records
    }

    #[test]
    fn deep_stacks_are_read_whole() {
        let memory = memory_with_stacks();
        let mut rings = Rings::at(BASE, WITH_STACKS);
        let many = WITH_STACKS.records() - 2;
        for number in 0..many {
            hit_with_stack(&mut memory.bytes.borrow_mut(), number, 8);
        }
        assert_eq!(read_stacks(&mut rings, &memory).count() as u64, many);
        // The ring begins again after two of them.
        let hits = [
            (20, 100),
            (30, USUAL_BYTES + 8),
            (40, USUAL_BYTES),
            (10, MAX_BYTES),
            (50, 8),
        ];
        for (time, used) in hits {
            hit_with_stack(&mut memory.bytes.borrow_mut(), time, used);
        }
        let records = read_stacks(&mut rings, &memory);
        assert_eq!(times(&records), [10, 20, 30, 40, 50]);
        let mut hits = hits.to_vec();
        hits.sort();
        let bytes_at = WITH_STACKS.stack_at() + BYTES;
        for (index, (time, used)) in hits.into_iter().enumerate() {
            let record = records.get(index).unwrap();
            assert_eq!(record[(bytes_at + used - 1) as usize], 7, "{time}");
            assert!(used == MAX_BYTES || record.len() < WITH_STACKS.record_len as usize);
        }
        assert!(records.get(5).is_none());
        assert_eq!(read_stacks(&mut rings, &memory).count(), 0);
    }

    #[test]
    fn deep_stack_overwritten_while_read_is_dropped() {
        let wrap: fn(&mut Vec<u8>) = |bytes| {
            for time in 0..WITH_STACKS.records() {
                hit_with_stack(bytes, time, 8);
            }
        };
        let nothing: fn(&mut Vec<u8>) = |_| {};
        for (after, kept) in [(4, 0), (5, 1)] {
            let memory = memory_with_stacks();
            let mut rings = Rings::at(BASE, WITH_STACKS);
            hit_with_stack(&mut memory.bytes.borrow_mut(), 10, MAX_BYTES);
            // Two copies, the head, and then the whole record and the head again.
            let changes = (1..=5).map(|read| if read == after { wrap } else { nothing });
            let changes = changes.rev().map(|change| Box::new(change) as Change);
            memory.meanwhile.borrow_mut().extend(changes);
            let records = read_stacks(&mut rings, &memory);
            assert_eq!((records.count(), records.dropped), (kept, 1 - kept as u64));
        }
    }

    /// Claims a record of the first group, and marks it as unused; the hit takes the next one, or is lost if it `is_last`.
    fn leave_unused(bytes: &mut [u8], is_last: bool) {
        let ring = WITH_STACKS.ring(0);
        let position = word(bytes, ring);
        let len = u64::from(WITH_STACKS.record_len);
        let number = ring + HEADER_LEN + position % WITH_STACKS.records() * len + record::NUMBER;
        let counter = if is_last {
            HITS_WITHOUT_PLACE
        } else {
            UNUSED_RECORDS
        };
        let count = word(bytes, counter) + 1;
        let marked = (position + 1) | 1 << record::IS_UNUSED;
        for (at, word) in [(ring, position + 1), (counter, count), (number, marked)] {
            bytes[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
    }

    #[test]
    fn unused_records_are_no_hits() {
        let memory = memory_with_stacks();
        let mut rings = Rings::at(BASE, WITH_STACKS);
        let change = |many: u64, is_last: bool| {
            for _ in 0..many {
                leave_unused(&mut memory.bytes.borrow_mut(), is_last);
            }
        };
        let mut check = |count, dropped, without_place| {
            let records = read_stacks(&mut rings, &memory);
            assert_eq!(
                (records.count(), records.dropped, records.without_place),
                (count, dropped, without_place)
            );
        };
        change(3, false);
        hit_with_stack(&mut memory.bytes.borrow_mut(), 10, 8);
        check(1, 0, 0);
        change(2, false);
        change(1, true);
        check(0, 1, 1);
        check(0, 0, 0);
        // They are no hits either if they are overwritten before they are read.
        change(5, false);
        for _ in 0..WITH_STACKS.records() {
            hit_with_stack(&mut memory.bytes.borrow_mut(), 20, 8);
        }
        hit_with_stack(&mut memory.bytes.borrow_mut(), 20, 8);
        check(WITH_STACKS.records() as usize, 1, 0);
        // The first copy of a record may be read before the mark is written, and the count after it.
        let position = word(&memory.bytes.borrow(), WITH_STACKS.ring(0));
        change(1, false);
        let number = WITH_STACKS.ring(0)
            + HEADER_LEN
            + position % WITH_STACKS.records() * u64::from(WITH_STACKS.record_len);
        let marked = word(&memory.bytes.borrow(), number);
        memory.bytes.borrow_mut()[number as usize..][..8].fill(0);
        check(0, 0, 0);
        memory.bytes.borrow_mut()[number as usize..][..8].copy_from_slice(&marked.to_le_bytes());
        hit_with_stack(&mut memory.bytes.borrow_mut(), 30, 8);
        check(1, 0, 0);
    }

    #[test]
    fn new_records_are_read_once_in_order() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        for (group, time) in [(3, 10), (3, 20), (0, 15), (15, 5)] {
            hit(&mut memory.bytes.borrow_mut(), group, time);
        }
        assert_eq!(
            times(&read(&mut rings, &memory, false).unwrap()),
            [5, 10, 15, 20]
        );
        assert!(times(&read(&mut rings, &memory, false).unwrap()).is_empty());
        hit(&mut memory.bytes.borrow_mut(), 3, 30);
        assert_eq!(times(&read(&mut rings, &memory, false).unwrap()), [30]);
    }

    #[test]
    fn no_record_is_beyond_the_last() {
        assert!(Records::default().get(0).is_none());
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        for (group, time) in [(3, 10), (0, 15), (3, 20)] {
            hit(&mut memory.bytes.borrow_mut(), group, time);
            let records = read(&mut rings, &memory, false).unwrap();
            assert_eq!(records.count(), 1);
            assert!(records.get(0).is_some() && records.get(1).is_none());
        }
        for (group, time) in [(3, 40), (0, 30)] {
            hit(&mut memory.bytes.borrow_mut(), group, time);
        }
        let records = read(&mut rings, &memory, false).unwrap();
        assert_eq!(times(&records), [30, 40]);
        assert!(records.get(2).is_none() && records.get(usize::MAX).is_none());
    }

    #[test]
    fn nothing_is_new_until_a_record_is_claimed() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        assert!(rings.have_nothing_new(&rings.heads(&memory).unwrap()));
        hit(&mut memory.bytes.borrow_mut(), 3, 10);
        assert!(!rings.have_nothing_new(&rings.heads(&memory).unwrap()));
        read(&mut rings, &memory, false).unwrap();
        assert!(rings.have_nothing_new(&rings.heads(&memory).unwrap()));
        let late = claim(&mut memory.bytes.borrow_mut(), 0);
        for _ in 0..2 {
            assert!(!rings.have_nothing_new(&rings.heads(&memory).unwrap()));
            read(&mut rings, &memory, false).unwrap();
        }
        complete(&mut memory.bytes.borrow_mut(), 0, late, 20);
        assert!(!rings.have_nothing_new(&rings.heads(&memory).unwrap()));
        assert_eq!(times(&read(&mut rings, &memory, false).unwrap()), [20]);
        assert!(rings.have_nothing_new(&rings.heads(&memory).unwrap()));
    }

    #[test]
    fn records_before_an_error_are_returned() {
        /// Memory in which the records of the groups from this one on cannot be read, but their heads can.
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
        assert!(read(&mut again, &memory, true).is_err());
        assert_eq!(times(&read(&mut rings, &memory, false).unwrap()), [10, 15]);
        assert!(read(&mut rings, &memory, false).is_err());
        assert_eq!(times(&read(&mut rings, &memory.0, false).unwrap()), [20]);
    }

    #[test]
    fn slow_reader_drops_and_counts_the_oldest() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let room = LAYOUT.records();
        for time in 0..room + 5 {
            hit(&mut memory.bytes.borrow_mut(), 1, time);
        }
        let records = read(&mut rings, &memory, false).unwrap();
        assert_eq!(records.dropped, 5);
        assert_eq!(times(&records), (5..room + 5).collect::<Vec<_>>());
    }

    #[test]
    fn ring_that_fills_while_read_is_not_lost() {
        /// While four records are read, one is written.
        struct BusyMemory(Memory);

        impl ReadMemory for BusyMemory {
            fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
                self.0.read(at, bytes)?;
                for _ in 0..bytes.len() / LAYOUT.record_len as usize / 4 {
                    hit(&mut self.0.bytes.borrow_mut(), 0, 0);
                }
                Ok(())
            }
        }

        let memory = BusyMemory(memory());
        let mut rings = Rings::at(BASE, LAYOUT);
        let room = LAYOUT.records();
        for _ in 0..room {
            hit(&mut memory.0.bytes.borrow_mut(), 0, 0);
        }
        let records = read(&mut rings, &memory, false).unwrap();
        // The first part loses its four oldest records while it is read; what is overwritten while the second is read was
        // read before.
        assert_eq!((records.count() as u64, records.dropped), (room - 4, 4));
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
        let records = read(&mut rings, &memory, false).unwrap();
        let mut all = times(&records);
        let more = read(&mut rings, &memory, false).unwrap();
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
            // Nothing changes before that: after the head is read and, in the second case, after the first copy.
            for _ in 0..copies {
                meanwhile.push(Box::new(|_| {}));
            }
            drop(meanwhile);
            let records = read(&mut rings, &memory, false).unwrap();
            assert_eq!((times(&records), records.dropped), ((2..room).collect(), 2));
            let records = read(&mut rings, &memory, false).unwrap();
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
        read(&mut rings, &memory, false).unwrap();
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
        let records = read(&mut rings, &memory, false).unwrap();
        assert_eq!((times(&records), records.dropped), (vec![1000, 1002], 1));
    }

    #[test]
    fn incomplete_record_is_awaited_then_dropped() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let late = claim(&mut memory.bytes.borrow_mut(), 0);
        hit(&mut memory.bytes.borrow_mut(), 0, 20);
        assert!(times(&read(&mut rings, &memory, false).unwrap()).is_empty());
        complete(&mut memory.bytes.borrow_mut(), 0, late, 10);
        assert_eq!(times(&read(&mut rings, &memory, false).unwrap()), [10, 20]);
        claim(&mut memory.bytes.borrow_mut(), 0);
        hit(&mut memory.bytes.borrow_mut(), 0, 40);
        let records = read(&mut rings, &memory, true).unwrap();
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
        for after_it in [vec![], vec![30]] {
            for _ in 0..3 {
                let records = read(&mut rings, &memory, false).unwrap();
                assert_eq!((times(&records), records.dropped), (vec![], 0));
            }
            let long_ago = Instant::now().checked_sub(2 * COMPLETION_TIMEOUT).unwrap();
            rings.waiting[0] = rings.waiting[0].map(|_| long_ago);
            let records = read(&mut rings, &memory, false).unwrap();
            assert_eq!((times(&records), records.dropped), (after_it, 1));
        }
    }

    #[test]
    fn wait_begins_again_after_a_completed_record() {
        let memory = memory();
        let mut rings = Rings::at(BASE, LAYOUT);
        let first = claim(&mut memory.bytes.borrow_mut(), 0);
        claim(&mut memory.bytes.borrow_mut(), 0);
        assert!(times(&read(&mut rings, &memory, false).unwrap()).is_empty());
        let long_ago = Instant::now().checked_sub(2 * COMPLETION_TIMEOUT).unwrap();
        rings.waiting[0] = Some(long_ago);
        complete(&mut memory.bytes.borrow_mut(), 0, first, 10);
        let records = read(&mut rings, &memory, false).unwrap();
        assert_eq!((times(&records), records.dropped), (vec![10], 0));
        assert_eq!(read(&mut rings, &memory, false).unwrap().dropped, 0);
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
                    let records = read(&mut rings, &memory, is_over).unwrap();
                    assert!(records.is_empty());
                }
            }
        }
    }
}
