//! The header of an arena, and the table of its points, as bytes: written by an observer, read by the next one.
//!
//! ```text
//! entry   +0 address   +8 of a site: displaced operand; of another point: the bytes overwritten
//!         +13 number of bytes overwritten, 0 for a site   +14 1 if the patch leads to an island
//!         +15 displacement to the island   +16 bytes overwritten by the island
//!         +21 1 for an exit of a function, 2 for the site of a USDT probe
//! ```

use std::ops::RangeInclusive;

use crate::address::{LiveAddr, PAGE};
use crate::expression::MAX_ARGUMENTS;
use crate::numbers::{u32_at, u64_at};
use crate::observe::layout::arena::{Arena, LINE};
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::keys::KeysLayout;
use crate::observe::layout::observer_record::{OBSERVER_RECORD_LEN, ObserverRecord};
use crate::observe::layout::semaphores::{SEMAPHORE_RECORD_LEN, SemaphoreRecord};
use crate::observe::layout::shared::{MAX_PAIRS, SharedLayout, record};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::layout::values::ValuesLayout;
use crate::observe::point::{Island, PATCH_LEN, PatchBytes, Point, PointKind};
use crate::observe::role::ArgumentRoom;
use crate::observe::value_pages::ValuePages;
use crate::patch_plan::jump::SHORT_LEN;

const MAGIC: [u8; 16] = *b"ocaml-probes obs";
pub(super) const VERSION: u32 = 8;

/// The versions whose arenas are laid out as now. In the first, no trampolines were moved ([`Arena::lead`]); before the last,
/// rings were doubled once at most.
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
const HEADER_LEN_WITHOUT_RECORD: usize = 128;
pub(super) const ENTRY_LEN: usize = 24;

/// Where the fields of the header begin.
pub(super) const VERSION_AT: usize = 16;
const COUNT_AT: usize = 20;
/// The length of a trampoline; from bit [`LEAD_BIT`] on, how far the first one is moved.
const TRAMPOLINE_LEN_AT: usize = 24;
const LEAD_BIT: u32 = 20;
const _: () = assert!(MAX_TRAMPOLINE_LEN < 1 << LEAD_BIT && PAGE <= 1 << (32 - LEAD_BIT));
const PAIRS_AT: usize = 28;
/// How many bits the number of pairs has; the number of the layout of the histograms follows it.
const PAIRS_BITS: u32 = 7;
const _: () = assert!(MAX_PAIRS < 1 << PAIRS_BITS && PAIRS_BITS + ValuesLayout::NUMBER_BITS <= 32);
/// The address of the counters, which the trampolines read here.
const DATA_AT: usize = 32;
const DATA_LEN_AT: usize = 40;
/// The address of the shared data, which the trampolines read here.
const SHARED_AT: usize = 48;
/// The length of records, without stacks; from bit [`KEPT_LEN_BIT`] on, that of what is kept of the starts of pairs.
const RECORD_LEN_AT: usize = 56;
const KEPT_LEN_BIT: u32 = 16;
const _: () = assert!(2 * record::len(MAX_ARGUMENTS, ArgumentRoom::Fields) < 1 << KEPT_LEN_BIT);
/// The number of the layout of the data about timed functions.
const CALLS_AT: usize = 60;
pub(super) const ID_AT: usize = 64;
/// 1 once all points are restored.
pub(super) const RESTORED_AT: usize = 72;
/// How many words of the program are changed: semaphores and flags ([`SemaphoreRecord`]).
const SEMAPHORES_AT: usize = 76;
/// 1 if hits are filtered, so that each point has a second counter; from bit [`KEYS_BIT`] on, the number of the layout
/// of the hits by key.
const FILTERED_AT: usize = 73;
/// A byte of flags. Bit 0: filters read memory; the others are the constants below, from [`PAIRS_BY_KEY_BIT`] on.
const FLAGS_AT: usize = 74;
/// 1 if hits are sampled, so that each point has another counter.
const SAMPLED_AT: usize = 75;
const OBSERVER_AT: usize = BASE_LEN;
const KEYS_BIT: u32 = 4;
const PAIRS_BY_KEY_BIT: u32 = 1;
/// The bit that says whether rings are doubled, and those that say how often beside once.
const DOUBLED_RINGS_BIT: u32 = 2;
const MORE_DOUBLINGS_BIT: u32 = 5;
/// The bit that says whether expressions ask for the ids of threads.
const ASKS_FOR_THREADS_BIT: u32 = 3;
/// The bit that says whether stacks are copied.
const STACKS_BIT: u32 = 4;
const _: () = assert!(KEYS_BIT + KeysLayout::NUMBER_BITS <= 8);

/// More points than any program has.
pub(super) const MAX_POINTS: usize = 1 << 22;

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
    /// This one, or an earlier one with the same layout.
    Current(ObserverRecord),
}

impl HeaderVersion {
    /// Reads the rest of a header whose fields say this version.
    fn read<E>(
        version: u32,
        code: LiveAddr,
        header: &[u8; BASE_LEN],
        read: impl Fn(LiveAddr, &mut [u8]) -> Result<(), E>,
    ) -> Result<HeaderVersion, E> {
        if !has_record(version) {
            let data_len = word(header, DATA_LEN_AT);
            return Ok(HeaderVersion::WithoutRecord { data_len });
        }
        let mut record = [0; OBSERVER_RECORD_LEN];
        read(code.plus(OBSERVER_AT as u64), &mut record)?;
        let record = ObserverRecord::parse(&record);
        Ok(if CURRENT_VERSIONS.contains(&version) {
            HeaderVersion::Current(record)
        } else {
            HeaderVersion::Grouped(record)
        })
    }

    /// Returns the length of a header in bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            HeaderVersion::WithoutRecord { .. } => HEADER_LEN_WITHOUT_RECORD,
            HeaderVersion::Grouped(_) | HeaderVersion::Current(_) => HEADER_LEN,
        }
    }
}

impl Arena {
    /// Returns where the header has the id of the arena.
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

    /// Returns the record of the observer, if the header has it.
    pub(crate) fn observer(&self) -> Option<&ObserverRecord> {
        match &self.version {
            HeaderVersion::WithoutRecord { .. } => None,
            HeaderVersion::Grouped(record) | HeaderVersion::Current(record) => Some(record),
        }
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

    /// Returns the address of the flag that says that all its points are restored. Once it is set, nothing that is
    /// found at the points was written by this observation.
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

    /// Returns what comes before the executed code: header, table of points, and records of semaphores. The shared
    /// data are those of the arena `sharing`.
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
        let doublings = self.shared.ring_doublings;
        let doubled = u8::from(doublings > 0) << DOUBLED_RINGS_BIT
            | doublings.saturating_sub(1) << MORE_DOUBLINGS_BIT;
        let threads = u8::from(self.shared.asks_for_threads) << ASKS_FOR_THREADS_BIT;
        let stacks = u8::from(self.shared.stacks != StackCopies::None) << STACKS_BIT;
        put(
            FLAGS_AT,
            &[filters_memory | by_key | doubled | threads | stacks],
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
        let version = HeaderVersion::read(version, code, &header, &read)?;
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
        let lengths = number(&header, TRAMPOLINE_LEN_AT);
        let arena = Arena {
            code,
            points: table.chunks_exact(ENTRY_LEN).map(parse_entry).collect(),
            semaphores: semaphores.map(SemaphoreRecord::parse).collect(),
            trampoline_len: u64::from(lengths & ((1 << LEAD_BIT) - 1)),
            lead: u64::from(lengths >> LEAD_BIT),
            shared: shared_layout_in(&header),
            is_filtered: header[FILTERED_AT] & 1 == 1,
            is_sampled: header[SAMPLED_AT] == 1,
            id: word(&header, ID_AT),
            version,
        };
        Ok((arena.is_possible() && arena.fits(&header, len)).then_some(arena))
    }

    /// Returns whether an observer may have written it: its numbers are in their ranges.
    fn is_possible(&self) -> bool {
        let addresses = || self.points.iter().map(|point| point.address);
        (LINE..=MAX_TRAMPOLINE_LEN).contains(&self.trampoline_len)
            && self.trampoline_len % LINE == 0
            && addresses().all(|address| address.0 != 0)
            && addresses().is_sorted_by(|one, other| one < other)
            && self.points.iter().all(Point::is_possible)
            && self
                .semaphores
                .iter()
                .all(|it| it.point < self.points.len())
            && self.shared.is_possible()
    }

    /// Returns whether the numbers in the header that can be computed from others are right, and the code fits in
    /// `len` bytes.
    fn fits(&self, header: &[u8; BASE_LEN], len: u64) -> bool {
        let data_len = self.data_len();
        self.code_len() <= len.min(MAX_CODE_LEN)
            && word(header, DATA_AT) == self.data().0
            && word(header, DATA_LEN_AT) == data_len
            && (self.counters_len()..MAX_DATA_LEN).contains(&data_len)
            && data_len % PAGE == 0
    }
}

/// Returns the layout of the shared data that a header says.
fn shared_layout_in(header: &[u8; BASE_LEN]) -> SharedLayout {
    let flag = |bit: u32| header[FLAGS_AT] >> bit & 1 == 1;
    let stacks = if flag(STACKS_BIT) {
        StackCopies::OF_THREADS
    } else {
        StackCopies::None
    };
    let record_lens = number(header, RECORD_LEN_AT);
    let pairs = number(header, PAIRS_AT);
    SharedLayout {
        pairs: pairs & ((1 << PAIRS_BITS) - 1),
        record_len: (record_lens & ((1 << KEPT_LEN_BIT) - 1)) + stacks.len(),
        argument_room: ArgumentRoom::default(),
        ring_doublings: u8::from(flag(DOUBLED_RINGS_BIT))
            + (header[FLAGS_AT] >> MORE_DOUBLINGS_BIT),
        filters_memory: flag(0),
        value_pages: ValuePages::default(),
        calls: CallsLayout::of_number(number(header, CALLS_AT)),
        values: ValuesLayout::of_number(pairs >> PAIRS_BITS),
        keys: KeysLayout::of_number(header[FILTERED_AT] >> KEYS_BIT),
        pairs_by_key: flag(PAIRS_BY_KEY_BIT),
        asks_for_threads: flag(ASKS_FOR_THREADS_BIT),
        kept_len: record_lens >> KEPT_LEN_BIT,
        stacks,
    }
}

/// Returns whether headers of this version have the record of the observer.
fn has_record(version: u32) -> bool {
    CURRENT_VERSIONS.contains(&version) || VERSIONS_OF_GROUPS.contains(&version)
}

/// The values of byte 21 of the entry of an instruction, besides 0.
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
