//! [`Arena`]: the memory that an observation maps into a process, as bytes. Nothing here accesses a
//! process by itself.
//!
//! ```text
//! code, R-X   header        magic, version, how many points, where the data are, the observer
//!             table         of each point: its address, what its patch overwrites
//!             semaphores    those that are raised, and other words that are changed (semaphores.rs)
//!             routine       counts hits of threads that have not claimed a row (trampoline/count.rs)
//!             trampolines   all of the same length (trampoline.rs)
//! data, RW-   counters      rows with one u64 for each point (rows.rs)
//!             shared data   of all points, in the first arena (shared.rs)
//!             successor     the observer that takes over from a live one
//!             registers     saved here by trampolines that may not use the stack
//! ```
//!
//! ```text
//! entry   +0 address   +8 displaced operand, of a site; or bytes overwritten   +13 how many, 0 of a site
//!         +14 1 if it leads to an island   +15 displacement to it   +16 bytes overwritten there
//!         +21 1 if it is an exit of a function
//! ```
//!
//! The code part has all that is needed to remove the observation: if the tool is killed, the next one
//! does it. Once it is complete, only three things in it are written again: the tails of trampolines, how far each
//! semaphore has been changed, and the flag that says that all points are restored.

use std::ops::{Range, RangeInclusive};

use crate::address::{LiveAddr, PAGE};
use crate::inject::code_cave::CodeCave;
use crate::numbers::{u32_at, u64_at};
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::groups::GROUPS;
use crate::observe::layout::keys::KeysLayout;
use crate::observe::layout::observer_record::{OBSERVER_RECORD_LEN, ObserverRecord};
use crate::observe::layout::rows::Rows;
use crate::observe::layout::semaphores::{PROGRESS_AT, SEMAPHORE_RECORD_LEN, SemaphoreRecord};
use crate::observe::layout::shared::{MAX_ARGUMENTS, MAX_PAIRS, SharedLayout, record};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::layout::values::ValuesLayout;
use crate::observe::point::{Island, PATCH_LEN, PatchBytes, PatchPlace, Point, PointKind};
use crate::observe::value_pages::ValuePages;
use crate::patch_plan::jump::SHORT_LEN;

const MAGIC: [u8; 16] = *b"ocaml-probes obs";
const VERSION: u32 = 7;

/// The versions whose arenas are laid out as now. In the first, no trampolines were moved ([`Arena::lead`]).
const CURRENT_VERSIONS: RangeInclusive<u32> = 6..=VERSION;

/// The versions with a row of counters for each group of threads. What their tools have left is removed as well.
const VERSIONS_OF_GROUPS: RangeInclusive<u32> = 4..=5;

/// The versions that do not record the observer. What their tools have left is removed as well.
const VERSIONS_WITHOUT_OBSERVER: RangeInclusive<u32> = 2..=3;

/// The length of the header in bytes: its fields, then the record of the observer.
pub(crate) const HEADER_LEN: usize = BASE_LEN + OBSERVER_RECORD_LEN;
/// The length of the fields.
const BASE_LEN: usize = 80;
/// The length of the whole header in the versions without that record.
const BASE_LEN_WITHOUT_RECORD: usize = 128;
const ENTRY_LEN: usize = 24;

/// Where the fields of the header begin.
const VERSION_AT: usize = 16;
const COUNT_AT: usize = 20;
/// The length of a trampoline; from bit [`LEAD_BIT`] on, how far the first one is moved.
const TRAMPOLINE_LEN_AT: usize = 24;
const LEAD_BIT: u32 = 20;
const _: () = assert!(MAX_TRAMPOLINE_LEN < 1 << LEAD_BIT && PAGE <= 1 << (32 - LEAD_BIT));
const PAIRS_AT: usize = 28;
/// How many bits the number of pairs has; the number of the layout of the histograms follows it.
const PAIRS_BITS: u32 = 7;
const _: () = assert!(MAX_PAIRS < 1 << PAIRS_BITS && PAIRS_BITS + ValuesLayout::NUMBER_BITS <= 32);
/// The addresses of the counters and of the shared data, which the trampolines read.
const DATA_AT: usize = 32;
const DATA_LEN_AT: usize = 40;
const SHARED_AT: usize = 48;
/// The length of records, without stacks; from bit [`KEPT_LEN_BIT`] on, that of what is kept of the starts of pairs.
const RECORD_LEN_AT: usize = 56;
const KEPT_LEN_BIT: u32 = 16;
const _: () = assert!(2 * record::len(MAX_ARGUMENTS) < 1 << KEPT_LEN_BIT);
/// The number of the layout of the data about timed functions.
const CALLS_AT: usize = 60;
const ID_AT: usize = 64;
/// 1 once all points are restored.
const RESTORED_AT: usize = 72;
/// How many semaphores are raised.
const SEMAPHORES_AT: usize = 76;
/// 1 if hits are filtered, so that each point has a second counter; from bit [`KEYS_BIT`] on, the number of the layout
/// of the hits by key.
const FILTERED_AT: usize = 73;
/// 1 if filters read memory; and the bits below, from [`PAIRS_BY_KEY_BIT`] on.
const FLAGS_AT: usize = 74;
/// 1 if hits are sampled, so that each point has another counter.
const SAMPLED_AT: usize = 75;
const OBSERVER_AT: usize = BASE_LEN;
const KEYS_BIT: u32 = 4;
const PAIRS_BY_KEY_BIT: u32 = 1;
const LARGE_RINGS_BIT: u32 = 2;
/// The bit that says whether expressions ask for the ids of threads.
const ASKS_FOR_THREADS_BIT: u32 = 3;
/// The bit that says whether stacks are copied.
const STACKS_BIT: u32 = 4;
const _: () = assert!(KEYS_BIT + KeysLayout::NUMBER_BITS <= 8);

/// The length of a cache line in bytes. The length of a trampoline is a multiple of it.
pub(crate) const LINE: u64 = 64;

/// The length of the routine that trampolines share, in bytes.
pub(crate) const ROUTINE_LEN: u64 = 6 * LINE;

/// The bytes of the tail, with which a trampoline ends. Its first byte decides what the trampoline does
/// after it has recorded a hit: [`RET`](crate::site::RET) or [`JMP`](crate::site::JMP).
pub(crate) const TAIL_LEN: u64 = 8;

/// The bytes of [`Arena::saved_registers`]: the lock, and the registers.
const SAVED_REGISTERS_LEN: u64 = 2 * LINE;

/// More points than any program has.
const MAX_POINTS: usize = 1 << 22;

/// More bytes than the code of an arena takes: a call does not reach further than 2 GiB.
const MAX_CODE_LEN: u64 = 1 << 31;

/// More bytes than the data of an arena take.
const MAX_DATA_LEN: u64 = 1 << 40;

/// Longer than any trampoline.
const MAX_TRAMPOLINE_LEN: u64 = 1 << 19;

/// The version of this tool that has written a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HeaderVersion {
    /// One that does not record its observer.
    WithoutRecord {
        /// The length of the data in bytes, which that version may have laid out differently.
        data_len: u64,
    },
    /// One with a row of counters for each group of threads.
    Grouped(ObserverRecord),
    /// This one.
    Current(ObserverRecord),
}

impl HeaderVersion {
    /// Returns the length of a header in bytes.
    fn len(&self) -> usize {
        match self {
            HeaderVersion::WithoutRecord { .. } => BASE_LEN_WITHOUT_RECORD,
            HeaderVersion::Grouped(_) | HeaderVersion::Current(_) => HEADER_LEN,
        }
    }
}

/// The memory of an observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Where its code begins, at a page.
    pub(crate) code: LiveAddr,
    /// Sorted by address.
    pub(crate) points: Vec<Point>,
    /// The semaphores that are raised while they are observed.
    pub(crate) semaphores: Vec<SemaphoreRecord>,
    /// The length of a trampoline in bytes.
    pub(crate) trampoline_len: u64,
    /// How many bytes stay unused before the first trampoline, less than a page, so that it begins where a jump leads.
    pub(crate) lead: u64,
    /// The layout of the shared data: empty if another arena has them.
    pub(crate) shared: SharedLayout,
    /// Whether hits are filtered: each point has a second counter, for those that the filter has no answer for.
    pub(crate) is_filtered: bool,
    /// Whether hits are sampled: each point has another counter, the last one, of all hits of which some are recorded.
    pub(crate) is_sampled: bool,
    /// Random: an arena that is mapped later at the same address has another.
    pub(crate) id: u64,
    pub(crate) version: HeaderVersion,
}

impl Arena {
    /// Returns the length of the code in bytes, whole pages.
    pub(crate) fn code_len(&self) -> u64 {
        let len = self.trampoline(self.points.len()).0 - self.code.0;
        len.next_multiple_of(PAGE)
    }

    /// Returns the addresses of code and data.
    pub(crate) fn range(&self) -> Range<u64> {
        self.code.0..self.data().plus(self.data_len()).0
    }

    /// Returns where the data begin: they follow the code.
    pub(crate) fn data(&self) -> LiveAddr {
        self.code.plus(self.code_len())
    }

    /// Returns the length of the data in bytes, whole pages.
    pub(crate) fn data_len(&self) -> u64 {
        match self.version {
            HeaderVersion::WithoutRecord { data_len } => data_len,
            HeaderVersion::Grouped(_) => {
                let successor = self.counters_len() + self.shared.len();
                (successor + OBSERVER_RECORD_LEN as u64).next_multiple_of(PAGE)
            }
            HeaderVersion::Current(_) => {
                let end = self.saved_registers().plus(SAVED_REGISTERS_LEN);
                (end.0 - self.data().0).next_multiple_of(PAGE)
            }
        }
    }

    /// Returns the layout of the counters of this version.
    pub(crate) fn rows(&self) -> Rows {
        let counters_of_each = 1 + usize::from(self.is_filtered) + usize::from(self.is_sampled);
        Rows {
            points: self.points.len() * counters_of_each,
        }
    }

    /// Returns the index of the second counter of a point.
    pub(crate) fn untyped_counter(&self, index: usize) -> usize {
        self.points.len() + index
    }

    /// Returns the index of the counter of a point for the hits of which some are recorded.
    pub(crate) fn sampled_counter(&self, index: usize) -> usize {
        self.points.len() * (1 + usize::from(self.is_filtered)) + index
    }

    /// Returns the length of the counters in bytes, whole pages.
    fn counters_len(&self) -> u64 {
        match self.version {
            HeaderVersion::Current(_) => self.rows().len(),
            _ => {
                let row = (self.points.len() as u64 * 8).max(PAGE);
                GROUPS as u64 * row.next_power_of_two()
            }
        }
    }

    /// Returns where the shared data begin: they follow the counters.
    pub(crate) fn shared_at(&self) -> LiveAddr {
        self.data().plus(self.counters_len())
    }

    /// Returns the address of the table of readable pages; `None` if there is none.
    pub(crate) fn pages_at(&self) -> Option<LiveAddr> {
        let has_pages = self.shared.has_pages();
        has_pages.then(|| self.shared_at().plus(self.shared.pages()))
    }

    /// Returns where a successor writes its record before it removes the observation of a live
    /// observer; `None` if this version has no place for it.
    pub(crate) fn successor_at(&self) -> Option<LiveAddr> {
        self.observer()?;
        Some(self.shared_at().plus(self.shared.len()))
    }

    /// Returns where trampolines save registers if they may not use the stack, behind a lock.
    pub(crate) fn saved_registers(&self) -> LiveAddr {
        let successor = self.shared_at().plus(self.shared.len());
        let end = successor.0 + OBSERVER_RECORD_LEN as u64;
        LiveAddr(end.next_multiple_of(LINE))
    }

    /// Returns the counter of a point that all threads may increment, by a locked instruction.
    pub(crate) fn locked_counter(&self, index: usize) -> LiveAddr {
        self.data()
            .plus(self.rows().shared_row(0) + 8 * index as u64)
    }

    /// Returns where the records of semaphores begin, as an offset.
    fn semaphores_offset(&self) -> usize {
        self.version.len() + ENTRY_LEN * self.points.len()
    }

    /// Returns where it says how far a semaphore, given by its index, has been changed.
    pub(crate) fn semaphore_progress(&self, index: usize) -> LiveAddr {
        let record = self.semaphores_offset() + SEMAPHORE_RECORD_LEN * index;
        self.code.plus(record as u64 + PROGRESS_AT)
    }

    /// Returns where the routine that trampolines share begins.
    pub(crate) fn routine(&self) -> LiveAddr {
        let semaphores = SEMAPHORE_RECORD_LEN * self.semaphores.len();
        let end = self.semaphores_offset() + semaphores;
        self.code.plus((end as u64).next_multiple_of(LINE))
    }

    /// Returns where the trampoline of a point begins.
    pub(crate) fn trampoline(&self, index: usize) -> LiveAddr {
        let routine_len = match self.version {
            HeaderVersion::Current(_) => ROUTINE_LEN,
            _ => 0,
        };
        let trampolines = self.routine().plus(routine_len + self.lead);
        trampolines.plus(self.trampoline_len * index as u64)
    }

    /// Returns where the tail of the trampoline of a point begins.
    pub(crate) fn tail(&self, index: usize) -> LiveAddr {
        self.trampoline(index).plus(self.trampoline_len - TAIL_LEN)
    }

    /// Returns the addresses of all trampolines, and of what they share.
    pub(crate) fn trampolines(&self) -> Range<u64> {
        self.routine().0..self.trampoline(self.points.len()).0
    }

    /// Returns where the room of the trampolines begins: with the bytes that stay unused before the first one.
    pub(crate) fn trampoline_room(&self) -> LiveAddr {
        LiveAddr(self.trampoline(0).0 - self.lead)
    }

    /// Returns where calls can be injected as long as no point leads to a trampoline: the room of the trampolines, up to
    /// a page.
    pub(crate) fn call_room(&self) -> CodeCave {
        let at = self.trampoline_room();
        let len = (self.data().0 - at.0).min(PAGE);
        CodeCave { at, len }
    }

    /// Returns the places of the patches of all points, each with the index of its point.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, PatchPlace)> {
        let points = self.points.iter().enumerate();
        points.flat_map(|(index, point)| {
            let places = point.places(self.trampoline(index));
            places.map(move |place| (index, place))
        })
    }

    /// Returns what tells how its points are patched: the places of the patches, the tails of the trampolines of sites, and the
    /// header. Addresses and lengths.
    pub(crate) fn patch_state(&self) -> impl Iterator<Item = (LiveAddr, u64)> {
        let places = self.places().map(|(_, place)| (place.at, PATCH_LEN as u64));
        let points = self.points.iter().enumerate();
        let sites = points.filter(|(_, it)| matches!(it.kind, PointKind::Site { .. }));
        let tails = sites.map(|(index, _)| (self.tail(index), TAIL_LEN));
        let header = (self.code, self.version.len() as u64);
        places.chain(tails).chain([header])
    }

    /// Returns the beginning of the code, up to what is executed: header, table and semaphores. The arena
    /// `sharing` has the shared data.
    pub(crate) fn header_and_table(&self, sharing: &Arena) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.code_len() as usize);
        bytes.resize(self.version.len(), 0);
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(COUNT_AT, &(self.points.len() as u32).to_le_bytes());
        let lengths = self.trampoline_len | self.lead << LEAD_BIT;
        put(TRAMPOLINE_LEN_AT, &(lengths as u32).to_le_bytes());
        let values = self.shared.values.number() << PAIRS_BITS;
        put(PAIRS_AT, &(self.shared.pairs | values).to_le_bytes());
        put(DATA_AT, &self.data().0.to_le_bytes());
        put(DATA_LEN_AT, &self.data_len().to_le_bytes());
        put(SHARED_AT, &sharing.shared_at().0.to_le_bytes());
        let record_len = self.shared.record_len - self.shared.stacks.len();
        let record_lens = record_len | self.shared.kept_len << KEPT_LEN_BIT;
        put(RECORD_LEN_AT, &record_lens.to_le_bytes());
        put(CALLS_AT, &self.shared.calls.number().to_le_bytes());
        put(ID_AT, &self.id.to_le_bytes());
        put(SEMAPHORES_AT, &(self.semaphores.len() as u32).to_le_bytes());
        let filtered = u8::from(self.is_filtered) | self.shared.keys.number() << KEYS_BIT;
        put(FILTERED_AT, &[filtered]);
        put(SAMPLED_AT, &[self.is_sampled.into()]);
        let filters_memory = u8::from(self.shared.filters_memory);
        let by_key = u8::from(self.shared.pairs_by_key) << PAIRS_BY_KEY_BIT;
        let large = u8::from(self.shared.has_large_rings) << LARGE_RINGS_BIT;
        let threads = u8::from(self.shared.asks_for_threads) << ASKS_FOR_THREADS_BIT;
        let stacks = u8::from(self.shared.stacks != StackCopies::None) << STACKS_BIT;
        put(
            FLAGS_AT,
            &[filters_memory | by_key | large | threads | stacks],
        );
        let version = match &self.version {
            HeaderVersion::WithoutRecord { .. } => *VERSIONS_WITHOUT_OBSERVER.start(),
            HeaderVersion::Grouped(record) => {
                put(OBSERVER_AT, &record.to_bytes());
                *VERSIONS_OF_GROUPS.end()
            }
            HeaderVersion::Current(record) => {
                put(OBSERVER_AT, &record.to_bytes());
                VERSION
            }
        };
        put(VERSION_AT, &version.to_le_bytes());
        bytes.extend(self.points.iter().flat_map(entry_of));
        bytes.extend(self.semaphores.iter().flat_map(|it| it.to_bytes()));
        bytes.resize((self.routine().0 - self.code.0) as usize, 0);
        bytes
    }

    /// Returns where the header has the arena's number.
    pub(crate) fn id_at(&self) -> LiveAddr {
        self.code.plus(ID_AT as u64)
    }

    /// Returns where the header has the address of the counters, for the trampolines.
    pub(crate) fn data_pointer(&self) -> LiveAddr {
        self.code.plus(DATA_AT as u64)
    }

    /// Returns where the header has the address of the shared data, for the trampolines.
    pub(crate) fn shared_pointer(&self) -> LiveAddr {
        self.code.plus(SHARED_AT as u64)
    }

    /// Returns the observer, if the header says it.
    pub(crate) fn observer(&self) -> Option<&ObserverRecord> {
        match &self.version {
            HeaderVersion::WithoutRecord { .. } => None,
            HeaderVersion::Grouped(record) | HeaderVersion::Current(record) => Some(record),
        }
    }

    /// Returns how many points a header says that there are, and its version; `None` if it is not one
    /// of ours.
    fn count_in(header: &[u8; BASE_LEN]) -> Option<(usize, u32)> {
        let (count, version) = (
            number(header, COUNT_AT) as usize,
            number(header, VERSION_AT),
        );
        let is_known = has_record(version) || VERSIONS_WITHOUT_OBSERVER.contains(&version);
        let is_ours = header.starts_with(&MAGIC) && is_known;
        (is_ours && (1..=MAX_POINTS).contains(&count)).then_some((count, version))
    }

    /// Returns the arena whose code begins at `code`, if there is one; `len` bytes are mapped
    /// there, and `read` reads memory.
    pub(crate) fn find<E>(
        code: LiveAddr,
        len: u64,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<Option<Arena>, E> {
        let mut header = [0; BASE_LEN];
        read(code, &mut header)?;
        let Some((count, version)) = Arena::count_in(&header) else {
            return Ok(None);
        };
        let says = |at: usize| word(&header, at);
        let version = if has_record(version) {
            let mut record = [0; OBSERVER_RECORD_LEN];
            read(code.plus(OBSERVER_AT as u64), &mut record)?;
            let record = ObserverRecord::parse(&record);
            if CURRENT_VERSIONS.contains(&version) {
                HeaderVersion::Current(record)
            } else {
                HeaderVersion::Grouped(record)
            }
        } else {
            let data_len = says(DATA_LEN_AT);
            HeaderVersion::WithoutRecord { data_len }
        };
        let header_len = version.len() as u64;
        let semaphores = number(&header, SEMAPHORES_AT) as usize;
        if semaphores > count {
            return Ok(None);
        }
        let table_len = ENTRY_LEN * count + SEMAPHORE_RECORD_LEN * semaphores;
        if header_len + table_len as u64 > len {
            return Ok(None);
        }
        let mut table = vec![0; table_len];
        read(code.plus(header_len), &mut table)?;
        let (table, semaphores) = table.split_at(ENTRY_LEN * count);
        let semaphores = semaphores.chunks_exact(SEMAPHORE_RECORD_LEN);
        let stacks = match header[FLAGS_AT] >> STACKS_BIT & 1 {
            1 => StackCopies::OF_THREADS,
            _ => StackCopies::None,
        };
        let lengths = number(&header, TRAMPOLINE_LEN_AT);
        let arena = Arena {
            code,
            points: table.chunks_exact(ENTRY_LEN).map(parse_entry).collect(),
            semaphores: semaphores.map(SemaphoreRecord::parse).collect(),
            trampoline_len: u64::from(lengths & ((1 << LEAD_BIT) - 1)),
            lead: u64::from(lengths >> LEAD_BIT),
            shared: SharedLayout {
                pairs: number(&header, PAIRS_AT) & ((1 << PAIRS_BITS) - 1),
                record_len: (number(&header, RECORD_LEN_AT) & ((1 << KEPT_LEN_BIT) - 1))
                    + stacks.len(),
                has_large_rings: header[FLAGS_AT] >> LARGE_RINGS_BIT & 1 == 1,
                filters_memory: header[FLAGS_AT] & 1 == 1,
                value_pages: ValuePages::default(),
                calls: CallsLayout::of_number(number(&header, CALLS_AT)),
                values: ValuesLayout::of_number(number(&header, PAIRS_AT) >> PAIRS_BITS),
                keys: KeysLayout::of_number(header[FILTERED_AT] >> KEYS_BIT),
                pairs_by_key: header[FLAGS_AT] >> PAIRS_BY_KEY_BIT & 1 == 1,
                asks_for_threads: header[FLAGS_AT] >> ASKS_FOR_THREADS_BIT & 1 == 1,
                kept_len: number(&header, RECORD_LEN_AT) >> KEPT_LEN_BIT,
                stacks,
            },
            is_filtered: header[FILTERED_AT] & 1 == 1,
            is_sampled: header[SAMPLED_AT] == 1,
            id: says(ID_AT),
            version,
        };
        let is_valid = (LINE..=MAX_TRAMPOLINE_LEN).contains(&arena.trampoline_len);
        let addresses = || arena.points.iter().map(|point| point.address);
        let is_valid = is_valid && addresses().all(|address| address.0 != 0);
        let is_valid = is_valid && addresses().is_sorted_by(|one, other| one < other);
        let is_valid = is_valid && arena.points.iter().all(Point::is_possible);
        let is_valid = is_valid && arena.semaphores.iter().all(|it| it.point < count);
        if !is_valid || arena.trampoline_len % LINE != 0 || !arena.shared.is_possible() {
            return Ok(None);
        }
        // Some numbers of the header follow from its other numbers, and have to agree with them.
        let is_whole = arena.code_len() <= len.min(MAX_CODE_LEN)
            && says(DATA_AT) == arena.data().0
            && says(DATA_LEN_AT) == arena.data_len()
            && (arena.counters_len()..MAX_DATA_LEN).contains(&arena.data_len())
            && arena.data_len() % PAGE == 0;
        Ok(is_whole.then_some(arena))
    }

    /// Returns whether it is still mapped: another observer may have removed it.
    pub(crate) fn is_there<E>(
        &self,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut header = [0; BASE_LEN];
        read(self.code, &mut header)?;
        Ok(Arena::count_in(&header).is_some() && word(&header, ID_AT) == self.id)
    }

    /// Returns the address of the flag that says that all its points are restored: what is found at
    /// the points later was not written by this observation.
    pub(crate) fn restored_flag(&self) -> LiveAddr {
        self.code.plus(RESTORED_AT as u64)
    }

    /// Returns whether that flag is set.
    pub(crate) fn is_restored<E>(
        &self,
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut byte = [0];
        read(self.restored_flag(), &mut byte)?;
        Ok(byte == [1])
    }
}

/// Returns whether headers of this version have the record of the observer.
fn has_record(version: u32) -> bool {
    CURRENT_VERSIONS.contains(&version) || VERSIONS_OF_GROUPS.contains(&version)
}

/// In an entry, one byte: what an instruction is.
const IS_EXIT: u8 = 1;
const IS_USDT: u8 = 2;

/// Returns the entry of a point in the table.
fn entry_of(point: &Point) -> [u8; ENTRY_LEN] {
    let mut entry = [0; ENTRY_LEN];
    entry[..8].copy_from_slice(&point.address.0.to_le_bytes());
    match &point.kind {
        PointKind::Site { operand } => entry[8..12].copy_from_slice(operand),
        PointKind::Instruction {
            before,
            island,
            is_exit,
            is_usdt,
        } => {
            entry[21] = match (is_exit, is_usdt) {
                (true, _) => IS_EXIT,
                (false, true) => IS_USDT,
                (false, false) => 0,
            };
            entry[8..8 + before.len()].copy_from_slice(before);
            entry[13] = before.len() as u8;
            if let Some(island) = island {
                entry[14] = 1;
                entry[15] = island.at.0.wrapping_sub(point.address.plus(SHORT_LEN).0) as u8;
                entry[16..16 + PATCH_LEN].copy_from_slice(&island.before);
            }
        }
    }
    entry
}

/// Returns the point of an entry of the table.
fn parse_entry(entry: &[u8]) -> Point {
    let address = LiveAddr(u64_at(entry, 0).unwrap_or(0));
    let kind = match entry[13] {
        0 => PointKind::Site {
            operand: entry[8..12].try_into().unwrap_or_default(),
        },
        len => {
            let distance = SHORT_LEN.wrapping_add(i64::from(entry[15] as i8) as u64);
            let island = (entry[14] == 1).then(|| Island {
                at: address.plus(distance),
                before: entry[16..16 + PATCH_LEN].try_into().unwrap_or_default(),
            });
            let len = usize::from(len).min(PATCH_LEN);
            let before = PatchBytes::of(&entry[8..8 + len]);
            PointKind::Instruction {
                before,
                island,
                is_exit: entry[21] == IS_EXIT,
                is_usdt: entry[21] == IS_USDT,
            }
        }
    };
    Point { address, kind }
}

fn number(header: &[u8; BASE_LEN], at: usize) -> u32 {
    u32_at(header, at).unwrap_or(0)
}

fn word(header: &[u8; BASE_LEN], at: usize) -> u64 {
    u64_at(header, at).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::inject::injected_call::MAX_LEN;
    use crate::observe::layout::semaphores::WordChange;
    use crate::observe::layout::shared::record;
    use crate::process::tool::new_id;

    fn arena() -> (Arena, Vec<u8>) {
        let point = |index: u64| Point {
            address: LiveAddr(0x5555_0000_0000 + 16 * index),
            kind: match index % 3 {
                0 => PointKind::Site {
                    operand: [1, 2, 3, index as u8],
                },
                1 => PointKind::Instruction {
                    before: PatchBytes::of(&[5, 6, 7, 8, index as u8]),
                    island: None,
                    is_exit: index % 2 == 0,
                    is_usdt: index % 3 == 1 && index % 2 == 1,
                },
                _ => PointKind::Instruction {
                    before: PatchBytes::of(&[8, 9]),
                    island: Some(Island {
                        at: LiveAddr(0x5555_0000_0000 + 16 * index - index),
                        before: [0xcc; PATCH_LEN],
                    }),
                    is_exit: false,
                    is_usdt: false,
                },
            },
        };
        let arena = Arena {
            code: LiveAddr(0x5555_1000_0000),
            points: (0..100).map(point).collect(),
            semaphores: Vec::new(),
            trampoline_len: 4 * LINE,
            lead: 0,
            shared: SharedLayout {
                pairs: 2,
                record_len: record::len(3),
                ..SharedLayout::default()
            },
            is_filtered: false,
            is_sampled: false,
            id: new_id(),
            version: HeaderVersion::Current(ObserverRecord {
                pid: 4711,
                namespace: 0xefff_fffc,
                proc_device: 21,
                begun: 12_000_000_000,
                lock: new_id(),
                command: "ocaml-probes count -pid 4242".to_owned(),
            }),
        };
        let bytes = bytes_of(&arena);
        (arena, bytes)
    }

    fn bytes_of(arena: &Arena) -> Vec<u8> {
        let mut bytes = arena.header_and_table(arena);
        bytes.resize(arena.code_len() as usize, 0);
        bytes
    }

    fn find(arena: &Arena, bytes: &[u8]) -> Option<Arena> {
        let read = |at: LiveAddr, to: &mut [u8]| -> Result<(), ()> {
            let start = at.0.checked_sub(arena.code.0).ok_or(())? as usize;
            let from = bytes.get(start..).and_then(|rest| rest.get(..to.len()));
            to.copy_from_slice(from.ok_or(())?);
            Ok(())
        };
        let found = Arena::find(arena.code, bytes.len() as u64, read);
        found.ok().flatten()
    }

    /// Returns an arena like that of `arena`, at the same place, with other points.
    fn with_points(addresses: impl Iterator<Item = u64>, trampoline_len: u64) -> Arena {
        let point = |address| Point {
            address: LiveAddr(address),
            kind: PointKind::Site { operand: [0; 4] },
        };
        Arena {
            points: addresses.map(point).collect(),
            trampoline_len,
            ..arena().0
        }
    }

    #[test]
    fn parts_follow_each_other() {
        let (arena, header) = arena();
        let base = arena.code.0;
        // In lines of 64 bytes, the header and the table of 100 points take 42, the routine 6, the trampolines 400.
        assert_eq!(arena.routine().0, base + 2688);
        assert_eq!(arena.trampolines(), base + 2688..base + 28672);
        assert_eq!(arena.trampoline(1).0, base + 3072 + 256);
        assert_eq!(arena.tail(1).0, base + 3072 + 2 * 256 - 8);
        assert_eq!((arena.code_len(), arena.data().0), (0x7000, base + 0x7000));
        // The claims take 5 pages. In lines of 128 bytes, the header of the rows takes 1, and each of 40 rows 7.
        assert_eq!(arena.counters_len(), 0x5000 + 0x9000);
        assert_eq!(arena.shared_at().0, base + 0x15000);
        let successor = arena.shared_at().plus(arena.shared.len());
        assert_eq!(arena.successor_at(), Some(successor));
        let data_len = 0xe000 + (arena.shared.len() + 176).next_multiple_of(PAGE);
        assert_eq!(arena.data_len(), data_len);
        assert_eq!(arena.range(), base..base + 0x7000 + data_len);
        let pages = arena.shared_at().plus(arena.shared.pages());
        assert_eq!(arena.pages_at(), Some(pages));
        // The trampolines find their data by the header.
        for (pointer, value) in [
            (arena.data_pointer(), arena.data()),
            (arena.shared_pointer(), arena.shared_at()),
        ] {
            let at = (pointer.0 - base) as usize;
            assert_eq!(header[at..at + 8], value.0.to_le_bytes());
        }
        let (_, place) = arena.places().find(|(index, _)| *index == 3).unwrap();
        let distance = arena.trampoline(3).0 - (arena.points[3].address.0 + 6);
        assert_eq!(
            (place.after[0], &place.after[1..]),
            (0xe8, &distance.to_le_bytes()[..4])
        );
        // Every third point has an island.
        assert_eq!(arena.places().count(), 133);
    }

    #[test]
    fn impossible_arenas_are_not_found() {
        let (arena, bytes) = arena();
        assert!(find(&arena, &bytes).is_some());
        let shared = |pairs, record_len| Arena {
            shared: SharedLayout {
                pairs,
                record_len,
                ..SharedLayout::default()
            },
            ..arena.clone()
        };
        for (is_filtered, is_sampled) in
            [(false, false), (false, true), (true, false), (true, true)]
        {
            let filtered = Arena {
                is_filtered,
                is_sampled,
                shared: SharedLayout {
                    filters_memory: is_filtered,
                    has_large_rings: is_sampled,
                    asks_for_threads: is_filtered != is_sampled,
                    ..arena.shared
                },
                ..arena.clone()
            };
            assert!(found_by_header(&filtered));
        }
        let most = record::len(6);
        assert!(found_by_header(&shared(64, most)));
        let mut reporting = shared(3, 2 * record::len(4));
        reporting.shared.kept_len = record::len(4);
        assert!(found_by_header(&reporting));
        reporting.shared.stacks = StackCopies::OF_THREADS;
        reporting.shared.record_len += reporting.shared.stacks.len();
        assert!(found_by_header(&reporting));
        assert!(found_by_header(&with_points(1..3, LINE)));
        assert!(found_by_header(&with_points(1..3, 1 << 19)));
        for impossible in [
            with_points(1..3, 0),
            with_points(1..3, LINE / 2),
            with_points(1..3, LINE + 1),
            with_points(1..3, (1 << 19) + LINE),
            with_points(0..2, LINE),
            with_points(0..0, LINE),
            with_points([2, 1].into_iter(), LINE),
            with_points([1, 1].into_iter(), LINE),
            // More code than calls reach.
            with_points(1..40_000, 1 << 16),
            shared(65, most),
            shared(64, most + 64),
            shared(64, 65),
        ] {
            assert!(!found_by_header(&impossible), "{:?}", impossible.shared);
        }
        // In the header: magic, version, where the data are, and their length.
        for at in [0, 15, 16, 32, 40] {
            let mut bytes = bytes.clone();
            bytes[at] ^= 2;
            assert_eq!(find(&arena, &bytes), None, "{at}");
        }
    }

    /// Returns whether the arena is found if all its code is mapped.
    fn found_by_header(arena: &Arena) -> bool {
        let bytes = arena.header_and_table(arena);
        let read = |at: LiveAddr, to: &mut [u8]| -> Result<(), ()> {
            let start = (at.0 - arena.code.0) as usize;
            to.copy_from_slice(&bytes[start..start + to.len()]);
            Ok(())
        };
        let found = Arena::find(arena.code, u64::MAX, read).unwrap();
        assert!(found.is_none() || found.as_ref() == Some(arena));
        found.is_some()
    }

    #[test]
    fn more_points_than_possible_are_not_read() {
        let (arena, mut bytes) = arena();
        bytes[20..24].copy_from_slice(&(MAX_POINTS as u32 + 1).to_le_bytes());
        let read = |at: LiveAddr, to: &mut [u8]| {
            assert_eq!(at, arena.code);
            to.copy_from_slice(&bytes[..to.len()]);
            Ok::<(), ()>(())
        };
        assert_eq!(Arena::find(arena.code, u64::MAX, read), Ok(None));
    }

    #[test]
    fn mapped_arena_is_known_by_header_and_id() {
        let (arena, bytes) = arena();
        let is_there = |bytes: &[u8]| {
            arena.is_there(|at, to: &mut [u8]| {
                assert_eq!(at, arena.code);
                to.copy_from_slice(&bytes[..to.len()]);
                Ok::<(), ()>(())
            })
        };
        assert_eq!(is_there(&bytes), Ok(true));
        // Another arena, and other memory.
        for at in [ID_AT, 0] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_eq!(is_there(&other), Ok(false));
        }
        assert_eq!(arena.is_there(|_, _| Err(())), Err(()));
    }

    #[test]
    fn restored_flag_is_one_byte_of_the_header() {
        let (arena, mut bytes) = arena();
        for (byte, is_restored) in [(0, false), (1, true), (2, false)] {
            bytes[RESTORED_AT] = byte;
            let read = |at: LiveAddr, to: &mut [u8]| {
                assert_eq!((at, to.len()), (arena.restored_flag(), 1));
                to[0] = bytes[(at.0 - arena.code.0) as usize];
                Ok::<(), ()>(())
            };
            assert_eq!(arena.is_restored(read), Ok(is_restored));
        }
    }

    #[test]
    fn table_longer_than_the_mapping_is_not_read() {
        let (arena, bytes) = arena();
        let reads = std::cell::Cell::new(0);
        let read = |at: LiveAddr, to: &mut [u8]| -> Result<(), ()> {
            reads.set(reads.get() + 1);
            let start = (at.0 - arena.code.0) as usize;
            to.copy_from_slice(&bytes[start..start + to.len()]);
            Ok(())
        };
        let table_end = (HEADER_LEN + ENTRY_LEN * arena.points.len()) as u64;
        assert_eq!(Arena::find(arena.code, table_end - 1, read), Ok(None));
        // The header and the record, but not the table.
        assert_eq!(reads.get(), 2);
        assert_eq!(Arena::find(arena.code, table_end, read), Ok(None));
        assert_eq!(reads.get(), 5);
    }

    #[test]
    fn removal_finds_all_it_needs_in_the_arena() {
        let (arena, bytes) = arena();
        assert_eq!(bytes.len() as u64, arena.code_len());
        assert_eq!(find(&arena, &bytes), Some(arena.clone()));
        assert!(new_id() != arena.id);
        // A part of an arena is not an arena.
        for len in [0, HEADER_LEN - 1, HEADER_LEN, 1000, bytes.len() - 1] {
            assert_eq!(find(&arena, &bytes[..len]), None);
        }
    }

    #[test]
    fn semaphores_are_found_behind_the_table() {
        let (mut arena, without) = arena();
        let semaphore = |index: u64| SemaphoreRecord {
            at: LiveAddr(0x5555_0400_0000 + 2 * index),
            point: 3 * index as usize + 1,
            change: WordChange::Count,
        };
        arena.semaphores = (0..7).map(semaphore).collect();
        let bytes = bytes_of(&arena);
        assert_eq!(find(&arena, &bytes), Some(arena.clone()));
        let table_end = HEADER_LEN + ENTRY_LEN * arena.points.len();
        assert_eq!(bytes[HEADER_LEN..table_end], without[HEADER_LEN..table_end]);
        let second = arena.semaphore_progress(1).0 - arena.code.0;
        assert_eq!(second as usize, table_end + 16 + 12);
        assert!(arena.routine().0 >= arena.code.0 + (table_end + 7 * 16) as u64);
        // More than points, or of a point that there is not.
        arena.semaphores = (0..101).map(|_| semaphore(0)).collect();
        assert!(!found_by_header(&arena));
        arena.semaphores = vec![semaphore(33)];
        assert!(!found_by_header(&arena));
    }

    #[test]
    fn moved_trampolines_are_found() {
        let (mut arena, _) = arena();
        let first = arena.trampoline(0);
        for lead in [1, 77, PAGE - 1] {
            arena.lead = lead;
            let found = find(&arena, &bytes_of(&arena)).unwrap();
            assert_eq!(found, arena);
            assert_eq!(found.trampoline(0), first.plus(lead));
            assert!(found.trampoline(100).0 <= found.data().0);
        }
    }

    #[test]
    fn arena_of_groups_is_found() {
        for (points, counters_len) in [(100, 16 * 0x1000), (600, 16 * 0x2000)] {
            let mut arena = with_points(1..points + 1, LINE);
            let HeaderVersion::Current(record) = arena.version.clone() else {
                panic!("another version");
            };
            arena.version = HeaderVersion::Grouped(record.clone());
            let mut bytes = bytes_of(&arena);
            for version in [4, 5] {
                bytes[VERSION_AT] = version;
                let found = find(&arena, &bytes).unwrap();
                assert_eq!(found, arena);
                assert_eq!(found.observer(), Some(&record));
                // The trampolines follow the table.
                let table_end = HEADER_LEN as u64 + ENTRY_LEN as u64 * points;
                let first = table_end.next_multiple_of(LINE);
                assert_eq!(found.trampoline(0), arena.code.plus(first));
                assert_eq!(found.shared_at(), found.data().plus(counters_len));
            }
            bytes[VERSION_AT] = 6;
            assert_eq!(find(&arena, &bytes), None);
            bytes[VERSION_AT] = VERSION as u8 + 1;
            assert_eq!(find(&arena, &bytes), None);
        }
    }

    #[test]
    fn arena_without_a_record_is_found() {
        let (mut arena, _) = arena();
        // Other versions may have more data, or less.
        for data_len in [arena.data_len() + PAGE, arena.data_len() - PAGE] {
            arena.version = HeaderVersion::WithoutRecord { data_len };
            let bytes = bytes_of(&arena);
            assert_eq!(bytes[VERSION_AT..][..4], [2, 0, 0, 0]);
            // The table follows a header of 128 bytes.
            assert_eq!(bytes[128..][..8], arena.points[0].address.0.to_le_bytes());
            let found = find(&arena, &bytes).unwrap();
            assert_eq!(found, arena);
            assert_eq!(found.range().end, found.data().0 + data_len);
            assert_eq!(found.observer(), None);
        }
        for data_len in [
            0,
            arena.counters_len() - PAGE,
            arena.data_len() + 1,
            1 << 40,
        ] {
            arena.version = HeaderVersion::WithoutRecord { data_len };
            assert_eq!(find(&arena, &bytes_of(&arena)), None, "{data_len}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_refused_or_fits(
            places in prop::collection::vec((16..HEADER_LEN, any::<u8>()), 1..8),
        ) {
            let (arena, mut bytes) = arena();
            for (at, byte) in places {
                bytes[at] = byte;
            }
            if let Some(found) = find(&arena, &bytes) {
                prop_assert!(found.code_len() <= bytes.len() as u64);
                prop_assert!(found.data_len() < 1 << 40);
            }
        }
    }

    #[test]
    fn counters_of_a_point_are_its_own() {
        for (is_filtered, is_sampled) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let arena = Arena {
                is_filtered,
                is_sampled,
                ..arena().0
            };
            let many = arena.points.len();
            let untyped = (0..many).map(|point| arena.untyped_counter(point));
            let sampled = (0..many).map(|point| arena.sampled_counter(point));
            let all = (0..many)
                .chain(untyped.filter(|_| is_filtered))
                .chain(sampled.filter(|_| is_sampled));
            let all: Vec<usize> = all.collect();
            // They follow each other.
            assert!(all.iter().copied().eq(0..all.len()), "{all:?}");
            assert_eq!(arena.rows().points, all.len());
            let first = arena.data().plus(arena.rows().shared_row(0));
            let places = all.iter().map(|counter| arena.locked_counter(*counter));
            assert!(places.eq((0..all.len() as u64).map(|index| first.plus(8 * index))));
        }
    }

    #[test]
    fn every_part_of_the_layout_is_found_again() {
        let (arena, _) = arena();
        let plain = arena.shared;
        let kept = record::len(2);
        for shared in [
            SharedLayout {
                filters_memory: true,
                ..plain
            },
            SharedLayout {
                pairs_by_key: true,
                ..plain
            },
            SharedLayout {
                has_large_rings: true,
                ..plain
            },
            SharedLayout {
                asks_for_threads: true,
                ..plain
            },
            SharedLayout {
                kept_len: kept,
                record_len: 2 * kept,
                ..plain
            },
            SharedLayout {
                stacks: StackCopies::OF_THREADS,
                record_len: plain.record_len + StackCopies::OF_THREADS.len(),
                ..plain
            },
            SharedLayout {
                calls: CallsLayout {
                    functions: 3,
                    ..CallsLayout::default()
                },
                ..plain
            },
            SharedLayout {
                values: ValuesLayout {
                    histograms: 5,
                    steps: 7,
                },
                keys: KeysLayout::of_number(3),
                ..plain
            },
        ] {
            for (is_filtered, is_sampled) in [(false, true), (true, false)] {
                let arena = Arena {
                    shared,
                    is_filtered,
                    is_sampled,
                    ..arena.clone()
                };
                assert_eq!(find(&arena, &bytes_of(&arena)), Some(arena));
            }
        }
    }

    #[test]
    fn moved_trampolines_leave_room_for_calls() {
        let (arena, _) = arena();
        for lead in 0..PAGE {
            let one = Arena {
                points: arena.points[..1].to_vec(),
                trampoline_len: LINE,
                lead,
                ..arena.clone()
            };
            let room = one.call_room();
            assert!(room.len >= MAX_LEN as u64, "{lead}");
            assert!(room.at.0 + room.len <= one.data().0, "{lead}");
        }
    }

    #[test]
    fn calls_are_injected_into_room_of_trampolines() {
        let (arena, _) = arena();
        let room = arena.call_room();
        assert_eq!((room.at, room.len), (arena.trampoline(0), PAGE));
        let one = Arena {
            points: arena.points[..1].to_vec(),
            trampoline_len: LINE,
            ..arena
        };
        let room = one.call_room();
        assert_eq!(room.at.plus(room.len), one.data());
        assert!(room.len < PAGE);
    }
}
