//! What trampolines record, as bytes of memory, for the tests of what reads it.

use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::memory::double::SliceMemory;
use crate::observe::buckets::Linear;
use crate::observe::layout::arena::{Arena, HeaderVersion, LINE};
use crate::observe::layout::keys::slot;
use crate::observe::layout::observer_record::ObserverRecord;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::layout::values::{header, order};
use crate::observe::plan::ObservationPlan;
use crate::observe::point::{Point, PointKind};

/// An arena of one site.
pub(crate) fn arena(code: u64) -> Arena {
    let point = Point {
        address: LiveAddr(code),
        kind: PointKind::Site { operand: [0; 4] },
    };
    Arena {
        code: LiveAddr(code),
        points: vec![point],
        semaphores: Vec::new(),
        trampoline_len: LINE,
        lead: 0,
        shared: SharedLayout::default(),
        is_filtered: false,
        is_sampled: false,
        id: 1,
        version: HeaderVersion::Current(ObserverRecord::default()),
    }
}

/// The data of an arena that has all points of a plan, nothing recorded yet.
pub(crate) struct RecordedData {
    pub(crate) arena: Arena,
    pub(crate) memory: SliceMemory,
}

impl RecordedData {
    pub(crate) fn of(plan: &ObservationPlan) -> RecordedData {
        let arena = Arena {
            points: plan.points.iter().map(|it| it.point).collect(),
            shared: plan.shared,
            is_filtered: plan.is_filtered(),
            is_sampled: plan.is_sampled(),
            ..arena(0x7f00_0000_0000)
        };
        let bytes = vec![0; arena.data_len() as usize];
        let memory = SliceMemory::new([(arena.data().0, bytes)]);
        RecordedData { arena, memory }
    }

    /// Returns where the shared data begin.
    pub(crate) fn shared(&self) -> LiveAddr {
        self.arena.shared_at()
    }

    pub(crate) fn get(&self, at: LiveAddr) -> u64 {
        self.memory.read_word(at).unwrap()
    }

    pub(crate) fn put(&mut self, at: LiveAddr, word: u64) {
        self.memory.poke(at, &word.to_le_bytes());
    }

    /// Counts hits of a point, as threads do that have no row.
    pub(crate) fn hit(&mut self, counter: usize, hits: u64) {
        self.put(self.arena.locked_counter(counter), hits);
    }

    /// Puts a key into the slot with this number, in the table of a group: its words, and which of its parts are signed.
    pub(crate) fn put_key(
        &mut self,
        (group, number): (u64, u64),
        words: &[u64],
        state: u64,
        hits: u64,
    ) {
        let layout = self.arena.shared.keys;
        let table = self.shared().plus(self.arena.shared.keys());
        let at = table.plus(layout.copy_len() * group + layout.slot_len() * number);
        self.put(
            at.plus(slot::STATE),
            0xabcd << slot::HASH_AT | state | slot::HELD,
        );
        self.put(at.plus(slot::HITS), hits);
        for (index, word) in (0..).zip(words) {
            self.put(at.plus(slot::KEY + 8 * index), *word);
        }
    }

    /// Adds a value to the histogram with this number, in the copy of a group.
    pub(crate) fn add_value(
        &mut self,
        (number, group): (u32, u64),
        value: i128,
        is_signed: bool,
        linear: Option<Linear>,
    ) {
        let layout = self.arena.shared.values;
        let values = self.shared().plus(self.arena.shared.values());
        let at = values.plus(layout.header(number, group));
        let word = value as u64;
        let ordered = order(word, is_signed);
        let greatest = self.get(at.plus(header::GREATEST)).max(ordered);
        self.put(at.plus(header::GREATEST), greatest);
        let least = self.get(at.plus(header::LEAST)).max(!ordered);
        self.put(at.plus(header::LEAST), least);
        let bucket = layout.bucket(value, linear);
        let (first, last) = layout.values_of(bucket, linear);
        if first.is_none() || first != last {
            let sum = self.get(at.plus(header::SUM)).wrapping_add(word);
            self.put(at.plus(header::SUM), sum);
        }
        let first_bucket = values.plus(layout.first_bucket(number, group));
        let counter = first_bucket.plus(8 * bucket);
        self.put(counter, self.get(counter) + 1);
    }
}
