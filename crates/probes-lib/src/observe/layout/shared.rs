//! [`SharedLayout`]: the layout of the data that all points of an observation share, as offsets.
//! Pure functions only: no system calls.
//!
//! ```text
//! header   64 bytes: the offset of the thread id in a thread's control block, from which time on a pair or call is
//!          slow, where the stack of the main thread ends, and which times are recorded
//! pairs    for each pair of a start point and a stop point: a header, a slot for each thread, a
//!          histogram for each group of threads
//! rings    one for each group of threads: how many records were begun, and the last records
//! pages    which pages may be read (readable_pages.rs)
//!          in whole pages
//! validity two pages, the second unused: since when the table of pages is valid, and for how long
//! calls    the times of functions (calls.rs)
//! values   the histograms of values (values.rs)
//! keys     the hits by key (keys.rs)
//! starts   the waiting starts of pairs by key (keyed_starts.rs)
//! kept     the arguments of starts, if slow pairs are reported (kept_starts.rs)
//! ```
//!
//! The table of pages and its validity are always the process's own, even if the rest is shared with the observer. The
//! kernel clears them in a forked child (`MADV_WIPEONFORK`), because they do not describe the child's mappings; the
//! observer may write a table for the child later. A child that shares the memory of its parent (vfork(2)) shares the
//! table, too.
//!
//! Only the thread that owns a slot writes there; what several threads write is written by locked
//! instructions.

use crate::address::PAGE;
use crate::expression::MAX_ARGUMENTS;
use crate::numbers::u32_at;
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::groups::GROUPS;
use crate::observe::layout::histogram::HISTOGRAM_LEN;
use crate::observe::layout::kept_starts;
use crate::observe::layout::keyed_starts;
use crate::observe::layout::keys::KeysLayout;
use crate::observe::layout::pair_slots::{SLOT_LEN, SLOTS, SLOTS_TRIED};
use crate::observe::layout::readable_pages;
use crate::observe::layout::stack_copies::{BYTES, MAX_BYTES, StackCopies, USED, USUAL_BYTES};
use crate::observe::layout::values::ValuesLayout;
use crate::observe::role::ArgumentRoom;
use crate::observe::value_pages::ValuePages;

/// The length of each header in bytes: that of the shared data, of a pair, and of a ring.
pub(crate) const HEADER_LEN: u64 = 64;

/// In the header, four bytes: the offset from `fs` of the thread's id.
pub(crate) const TID_AT: u64 = 0;

/// In the header, four bytes: the id of the main thread, if stacks are copied.
pub(crate) const MAIN_TID: u64 = 4;

/// In the header, eight bytes: how many ticks a pair or call lasts at least that is reported, if slow ones are.
pub(crate) const SLOW_FROM: u64 = 8;

/// In the header, eight bytes: where the stack of the main thread ends, if stacks are copied; 0 if that is not known.
pub(crate) const MAIN_STACK_END: u64 = 16;

/// In the header, eight bytes each, if only times of a range are recorded: the least of them in ticks, and how many
/// ticks the range has.
pub(crate) const TIMES_FROM: u64 = 24;
pub(crate) const TIMES_LEN: u64 = 32;

/// In the header, eight bytes each, if stacks are copied: how many records were claimed and left unused, and how many
/// hits have found no record whose place for a stack is free. See [`record::IS_UNUSED`].
pub(crate) const UNUSED_RECORDS: u64 = 40;
pub(crate) const HITS_WITHOUT_PLACE: u64 = 48;

/// The fields of the validity of the table of pages, eight bytes each. All zero: it is not valid.
/// The observer, which keeps the table up to date, may be stopped or killed.
pub(crate) mod validity {
    /// When the observer read the mappings that the table describes, in TSC ticks. The start is
    /// stored, not the end: if the TSC restarts from 0, as after a suspend, an end would be far in
    /// the future.
    pub(crate) const SINCE: u64 = 0;
    /// For how many TSC ticks it is valid from then on; and as many before, for a thread that read its clock before the
    /// observer renewed the table.
    pub(crate) const TICKS: u64 = 8;
    /// Whether the kernel may be asked what can be read: a seccomp filter that a thread has installed since may kill it
    /// for that.
    pub(crate) const MAY_ASK: u64 = 16;
}

/// The length of the validity in bytes.
const VALIDITY_LEN: u64 = 2 * PAGE;

/// How much of the table of pages and its validity gets MADV_WIPEONFORK: all but the last page, so that the
/// mapping is split in two. This shows in /proc/PID/maps that the madvise(2) was executed.
pub(crate) const PAGES_WIPED: u64 = readable_pages::LEN + PAGE;
pub(crate) const PAGES_MAPPED: u64 = readable_pages::LEN + VALIDITY_LEN;

/// The most pairs of an observation.
pub(crate) const MAX_PAIRS: u32 = 64;

/// In the header of a pair: the stops of threads that got no slot.
pub(crate) const SLOT_OVERFLOWS: u64 = 0;

const SLOTS_AT: u64 = HEADER_LEN;
/// Where the histograms of a pair begin in it.
pub(crate) const HISTOGRAMS_AT: u64 = SLOTS_AT + (SLOTS + SLOTS_TRIED) * SLOT_LEN;
pub(crate) const PAIR_LEN: u64 = HISTOGRAMS_AT + GROUPS as u64 * HISTOGRAM_LEN;

/// About how many bytes of records a ring holds, unless it is doubled.
const RING: u64 = 1 << 20;

/// How often the length of a ring can be doubled.
const MAX_DOUBLINGS: u8 = 6;

/// How much more often it is doubled if stacks are copied.
const STACKS_DOUBLINGS: u8 = 3;

/// All shared data are shorter: trampolines address them by 32 bits with a sign.
const MAX_LEN: u64 = 1 << 31;

/// The fields of a record.
pub(crate) mod record {
    use crate::observe::role::ArgumentRoom;

    /// The sequence number in the ring, from 1; written last, so it tells that the record is complete.
    pub(crate) const NUMBER: u64 = 0;
    /// The bit of the number that says that the record has nothing else: its place for a stack was in use.
    pub(crate) const IS_UNUSED: u32 = 63;
    /// The time of the hit, in ticks.
    pub(crate) const TIME: u64 = 8;
    /// The thread's id, four bytes.
    pub(crate) const TID: u64 = 16;
    /// The index of the point in its plan, four bytes; with [`RETURN`] if a function returns there, [`JUMP`] if it
    /// jumps to another one.
    pub(crate) const POINT: u64 = 20;
    /// Added to the index of a point where a function returns. All indices are below the bits of these flags.
    pub(crate) const RETURN: u32 = 1 << 31;
    /// Added to the index of the point at the stop of a slow pair: what was kept of its start follows, with the index
    /// of the pair as its number. A slow call without [`RETURN`] has ended with a jump.
    pub(crate) const SLOW: u32 = 1 << 30;
    /// Added to the index of a point where a function is left by a jump to another one.
    pub(crate) const JUMP: u32 = 1 << 29;
    /// The point of a start of which nothing was kept.
    pub(crate) const UNKNOWN_POINT: u32 = u32::MAX;
    /// A byte for each argument: 0 if it points to no memory that can be read, otherwise one more than the number of
    /// words that were copied from there.
    pub(crate) const COPIED: u64 = 24;
    /// If the exits of a function are recorded: where the return address of the call is. It is an address or, on the
    /// stack of a fiber, the distance from the upper end, which is negative.
    pub(crate) const FRAME: u64 = 32;
    /// Twice the number of the fiber plus one; 0 if the call is on the stack of its thread.
    pub(crate) const FIBER: u64 = 40;
    pub(crate) const ARGUMENTS: u64 = 48;

    /// The fields of an argument: its value, the header of its block, and the first words of the
    /// block, or what [`fields`](super::fields) says.
    pub(crate) const VALUE: u64 = 0;
    pub(crate) const BLOCK_HEADER: u64 = 8;
    /// Instead of the header: the argument is in memory that could not be read, at the address that its value is.
    pub(crate) const UNREAD: u64 = 1;
    pub(crate) const COPY: u64 = 16;
    /// Words of the block that are copied: one more than is shown, because a string that just fits
    /// in those has its end in the next word.
    pub(crate) const COPY_WORDS: u64 = 9;

    /// Returns how many bytes an argument takes.
    #[inline]
    pub(crate) const fn argument_len(room: ArgumentRoom) -> u64 {
        COPY + 8 * match room {
            ArgumentRoom::Nothing => 0,
            ArgumentRoom::Words => COPY_WORDS,
            ArgumentRoom::Fields => super::fields::WORDS,
        }
    }

    /// Returns the length of a record of so many arguments, in bytes.
    pub(crate) const fn len(arguments: usize, room: ArgumentRoom) -> u32 {
        let len = ARGUMENTS + argument_len(room) * arguments as u64;
        len.next_multiple_of(64) as u32
    }
}

/// What is copied of a block whose words are values, in place of its first words:
///
/// ```text
/// cells    how many cells follow the block in its list, if it is a cell: it has tag 0 and two fields, of which the
///          second is the next cell
/// fields   of a list, the first field of each cell, and then the second one of the last; else those of the block
/// field    a word; and if that is a multiple of 8, the header of the block there, or 0 if it cannot be read
///          string, float, custom block: the first words
///          exception, or another block with the tag of objects: the header of its name, or 0 if it has none; the
///          first words
/// ```
///
/// An exception without arguments is described in place of the fields of its block. The copy ends where there is no
/// room for the next word that it has to have.
pub(crate) mod fields {
    /// How many words there is room for.
    pub(crate) const WORDS: u64 = 22;
    /// How many fields of a block are copied at most: each is at least one word, and the number of cells is the first.
    pub(crate) const MAX: u64 = WORDS - 1;
    /// The greatest tag of plain blocks, in OCaml 4 and 5: in OCaml 5, continuations and lazy values that are being
    /// forced have the next ones.
    pub(crate) const GREATEST_TAG: u8 = 243;
    /// The tags that caml/mlvalues.h defines.
    pub(crate) const OBJECT_TAG: u8 = 248;
    pub(crate) const FORWARD_TAG: u8 = 250;
    pub(crate) const STRING_TAG: u8 = 252;
    pub(crate) const DOUBLE_TAG: u8 = 253;
    pub(crate) const CUSTOM_TAG: u8 = 255;
    /// How many words of the name of an exception are copied at most.
    pub(crate) const NAME_WORDS: u64 = 8;
    /// How many words of a field of these tags are copied at most.
    pub(crate) const OPAQUE_WORDS: [(u8, u64); 3] =
        [(STRING_TAG, 4), (DOUBLE_TAG, 1), (CUSTOM_TAG, 2)];
}

/// Which parts the shared data have, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SharedLayout {
    pub(crate) pairs: u32,
    /// The bytes of a record; 0 if no point is watched.
    pub(crate) record_len: u32,
    /// What records have room for beside each argument. It is not stored in the process, and not known of an observation
    /// that was found there.
    pub(crate) argument_room: ArgumentRoom,
    /// How often the length of a ring is doubled.
    pub(crate) ring_doublings: u8,
    /// Whether filters read memory.
    pub(crate) filters_memory: bool,
    /// The table by which trampolines know what can be read. It is not stored in the process, and not known
    /// of an observation that was found there.
    pub(crate) value_pages: ValuePages,
    pub(crate) calls: CallsLayout,
    pub(crate) values: ValuesLayout,
    pub(crate) keys: KeysLayout,
    /// Whether stops belong to the starts of the same key, in any thread.
    pub(crate) pairs_by_key: bool,
    /// Whether expressions ask for the ids of threads.
    pub(crate) asks_for_threads: bool,
    /// The bytes of what is kept of a start; 0 if slow pairs are not reported.
    pub(crate) kept_len: u32,
    /// Which stacks are copied into the records. The process stores only whether any are.
    pub(crate) stacks: StackCopies,
}

impl SharedLayout {
    /// Returns whether it can be a layout of ours: its numbers may have been read from a process.
    pub(crate) fn is_possible(self) -> bool {
        let longest = record::len(MAX_ARGUMENTS, ArgumentRoom::Fields);
        let is_possible = self.pairs <= MAX_PAIRS && self.calls.is_possible();
        let is_possible = is_possible && self.values.is_possible() && self.keys.is_possible();
        let is_possible = is_possible && self.kept_len <= longest && self.kept_len % 64 == 0;
        let is_possible = is_possible && self.ring_doublings <= MAX_DOUBLINGS;
        let longest = longest.max(2 * self.kept_len) + self.stacks.len();
        let records = 2 * self.kept_len + self.stacks.len()..=longest;
        is_possible && records.contains(&self.record_len) && self.record_len % 64 == 0
    }

    /// Returns whether nothing is shared.
    pub(crate) fn is_empty(self) -> bool {
        self == SharedLayout::default()
    }

    /// Returns the offset of a pair.
    pub(crate) fn pair(self, index: u32) -> u64 {
        HEADER_LEN + PAIR_LEN * u64::from(index)
    }

    /// Returns the offset of the slots of a pair.
    pub(crate) fn slots(self, pair: u32) -> u64 {
        self.pair(pair) + SLOTS_AT
    }

    /// Returns the offset of the histograms of a pair.
    pub(crate) fn histograms(self, pair: u32) -> u64 {
        self.pair(pair) + HISTOGRAMS_AT
    }

    /// Returns the layout with rings that hold as much as this, if there is room for as large ones.
    pub(crate) fn with_rings_of(self, bytes: u64) -> SharedLayout {
        let wanted = bytes.min(RING << MAX_DOUBLINGS).div_ceil(RING).max(1);
        let wanted = wanted.next_power_of_two().ilog2() as u8;
        let wanted = match self.stacks {
            StackCopies::None => wanted,
            _ => wanted.saturating_sub(STACKS_DOUBLINGS),
        };
        let most = wanted.max(self.ring_doublings);
        let with = |ring_doublings| SharedLayout {
            ring_doublings,
            ..self
        };
        let mut larger = (self.ring_doublings..=most).rev().map(with);
        larger.find(|it| it.len() < MAX_LEN).unwrap_or(self)
    }

    /// Returns the offset of an argument in a record.
    #[inline]
    pub(crate) fn argument_at(self, index: u64) -> u64 {
        record::ARGUMENTS + record::argument_len(self.argument_room) * index
    }

    /// Returns how many records a ring holds, a power of two.
    pub(crate) fn records(self) -> u64 {
        let doublings = match self.stacks {
            StackCopies::None => self.ring_doublings,
            _ => self.ring_doublings.max(1) + STACKS_DOUBLINGS,
        };
        let ring = RING << doublings.min(MAX_DOUBLINGS);
        let fit = ring / u64::from(self.record_len.max(64));
        1 << fit.ilog2()
    }

    /// Returns the length of a ring in bytes.
    pub(crate) fn ring_len(self) -> u64 {
        if self.record_len == 0 {
            return 0;
        }
        HEADER_LEN + self.records() * u64::from(self.record_len)
    }

    /// Returns the offset of the stack in a record.
    pub(crate) fn stack_at(self) -> u64 {
        u64::from(self.record_len - self.stacks.len())
    }

    /// Returns how many bytes of a record are read first: all, except of a stack that is deeper than most.
    pub(crate) fn read_first(self) -> usize {
        match self.stacks {
            StackCopies::None => self.record_len as usize,
            _ => (self.stack_at() + BYTES + USUAL_BYTES) as usize,
        }
    }

    /// Returns the length of a record of which [`SharedLayout::read_first`] bytes were read, if it has more.
    pub(crate) fn whole_len(self, record: &[u8]) -> Option<usize> {
        if self.stacks == StackCopies::None {
            return None;
        }
        let bytes_at = self.stack_at() + BYTES;
        let used = u32_at(record, (self.stack_at() + USED) as usize)?;
        let used = u64::from(used).min(MAX_BYTES);
        (used > USUAL_BYTES).then_some((bytes_at + used) as usize)
    }

    /// Returns the offset of the ring of a group.
    pub(crate) fn ring(self, group: usize) -> u64 {
        self.pair(self.pairs) + self.ring_len() * group as u64
    }

    /// Returns whether there is a table of pages that may be read, and its validity.
    pub(crate) fn has_pages(self) -> bool {
        self.record_len > 0 || self.filters_memory
    }

    /// Returns the offset of the table of pages that may be read, in whole pages.
    pub(crate) fn pages(self) -> u64 {
        self.end_of_rings().next_multiple_of(PAGE)
    }

    fn end_of_rings(self) -> u64 {
        self.ring(GROUPS)
    }

    /// Returns the offset of the validity of that table, in whole pages.
    pub(crate) fn validity(self) -> u64 {
        self.pages() + readable_pages::LEN
    }

    /// Returns the length of all shared data in bytes.
    pub(crate) fn len(self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        if self.kept_len > 0 {
            return self.kept_starts(self.pairs);
        }
        self.end_of_keyed_starts()
    }

    /// Returns the offset of what is kept of the starts of a pair.
    pub(crate) fn kept_starts(self, pair: u32) -> u64 {
        let tables = self.end_of_keyed_starts().next_multiple_of(PAGE);
        let table_len = kept_starts::ENTRIES * u64::from(self.kept_len);
        tables + table_len * u64::from(pair)
    }

    fn end_of_keyed_starts(self) -> u64 {
        if self.pairs_by_key {
            self.keyed_starts(self.pairs)
        } else {
            self.end_of_keys()
        }
    }

    /// Returns the offset of the starts of a pair by key, a multiple of the length of a bucket.
    pub(crate) fn keyed_starts(self, pair: u32) -> u64 {
        let tables = self.end_of_keys().next_multiple_of(PAGE);
        tables + keyed_starts::TABLE_LEN * u64::from(pair)
    }

    fn end_of_keys(self) -> u64 {
        match self.keys.len() {
            0 => self.end_of_values(),
            len => self.keys() + len,
        }
    }

    /// Returns the offset of the table of hits by key.
    pub(crate) fn keys(self) -> u64 {
        self.end_of_values().next_multiple_of(HEADER_LEN)
    }

    fn end_of_values(self) -> u64 {
        match self.values.len() {
            0 => self.end_of_calls(),
            len => self.values() + len,
        }
    }

    /// Returns the offset of the histograms of values.
    pub(crate) fn values(self) -> u64 {
        self.end_of_calls().next_multiple_of(HEADER_LEN)
    }

    fn end_of_calls(self) -> u64 {
        match self.calls.len() {
            0 => self.end_of_sites(),
            len => self.calls() + len,
        }
    }

    /// Returns the offset of the data about functions that are timed, in whole pages.
    pub(crate) fn calls(self) -> u64 {
        self.end_of_sites().next_multiple_of(PAGE)
    }

    /// Returns the end of what is before those data.
    fn end_of_sites(self) -> u64 {
        if self.has_pages() {
            self.validity() + VALIDITY_LEN
        } else {
            self.end_of_rings()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::layout::pair_slots::slot;

    #[test]
    fn parts_have_known_lengths() {
        assert_eq!((GROUPS, SLOTS, SLOT_LEN), (16, 1024, 2048));
        assert_eq!((slot::MARKS, slot::NUMBERS), (64 + 1024, 1088 + 512 + 64));
        assert_eq!(HISTOGRAMS_AT, 64 + 1040 * 2048);
        assert_eq!(PAIR_LEN, HISTOGRAMS_AT + 16 * HISTOGRAM_LEN);
        for (room, lens) in [
            (ArgumentRoom::Nothing, [64, 64, 128, 128, 128, 128, 192]),
            (ArgumentRoom::Words, [64, 192, 256, 320, 448, 512, 576]),
            (ArgumentRoom::Fields, [64, 256, 448, 640, 832, 1024, 1216]),
        ] {
            let of_room = [0, 1, 2, 3, 4, 5, 6].map(|arguments| record::len(arguments, room));
            assert_eq!(of_room, lens, "{room:?}");
        }
        let shared = |pairs, record_len| SharedLayout {
            pairs,
            record_len,
            ..SharedLayout::default()
        };
        let both = shared(3, 320);
        assert_eq!((both.pair(0), both.pair(2)), (64, 64 + 2 * PAIR_LEN));
        assert_eq!(
            (both.slots(1), both.histograms(1)),
            (both.pair(1) + 64, both.pair(1) + HISTOGRAMS_AT,)
        );
        // A ring is a header and about 1 MiB of records, whose number is a power of two; or 2 MiB.
        assert_eq!((shared(0, 64).records(), both.records()), (16384, 2048));
        assert_eq!(both.ring_len(), 64 + 2048 * 320);
        let large = SharedLayout {
            ring_doublings: 1,
            ..both
        };
        assert_eq!(large.ring_len(), 64 + 4096 * 320);
        assert_eq!(both.ring(2), both.pair(3) + 2 * both.ring_len());
        // The table begins at a page, and the validity follows it.
        let end = both.ring(16);
        assert_eq!(
            (both.pages(), both.validity(), both.len()),
            (
                end + 4096 - end % 4096,
                both.pages() + (8 << 20),
                both.validity() + 8192
            )
        );
        // Without records there are neither rings nor a table.
        let timed = shared(3, 0);
        assert_eq!((timed.ring_len(), timed.len()), (0, timed.pair(3)));
        for (pairs, record_len, is_possible) in [
            (64, 1216, true),
            (65, 64, false),
            (0, 1280, false),
            (0, 65, false),
        ] {
            assert_eq!(shared(pairs, record_len).is_possible(), is_possible);
        }
        let is_empty = |pairs, record_len| shared(pairs, record_len).is_empty();
        assert!(is_empty(0, 0) && !is_empty(1, 0) && !is_empty(0, 64));
    }

    #[test]
    fn parts_follow_each_other() {
        assert_eq!(SharedLayout::default().len(), 0);
        for arguments in 0..=6 {
            let record_len = record::len(arguments, ArgumentRoom::Fields);
            let shared = SharedLayout {
                pairs: 3,
                record_len,
                ..SharedLayout::default()
            };
            assert!(shared.is_possible());
            assert!(shared.slots(2) > shared.pair(2) && shared.histograms(2) > shared.slots(2));
            assert_eq!(shared.pair(3), shared.ring(0));
            assert!(shared.ring(1) - shared.ring(0) <= RING + HEADER_LEN);
            assert_eq!(shared.pages() % PAGE, 0);
            assert_eq!(shared.len(), shared.pages() + PAGES_MAPPED);
            assert!(shared.len() < 1 << 31);
            let by_key = SharedLayout {
                pairs_by_key: true,
                ..shared
            };
            assert!(by_key.keyed_starts(0) >= shared.len());
            assert_eq!(by_key.keyed_starts(2) % PAGE, 0);
            assert_eq!(by_key.len(), by_key.keyed_starts(3));
            let longest = SharedLayout {
                pairs: MAX_PAIRS,
                record_len: 2 * record_len,
                kept_len: record_len,
                ..by_key
            };
            assert!(longest.is_possible());
            assert_eq!(longest.kept_starts(0), longest.keyed_starts(MAX_PAIRS));
            assert_eq!(longest.len(), longest.kept_starts(MAX_PAIRS));
            assert!(longest.len() < MAX_LEN);
            for bytes in [0, 1, 1 << 20, 3 << 20, 64 << 20, u64::MAX >> 1] {
                assert!(longest.with_rings_of(bytes).len() < MAX_LEN, "{bytes}");
                let ring = shared.with_rings_of(bytes).ring_len();
                assert!(ring >= bytes.min(64 << 20) / 2 && ring <= (64 << 20) + HEADER_LEN);
            }
            let too_short = SharedLayout {
                record_len,
                ..longest
            };
            assert!(!too_short.is_possible());
        }
    }
}
