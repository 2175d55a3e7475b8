//! [`ReadablePages`]: which pages of a process its trampolines may read, so that they never access one
//! that is not mapped. Pure.
//!
//! ```text
//! address   63 .. 17   16 .. 12   11 .. 0
//!           key        page       offset
//! entry     key, 32 bits │ a bit for each of 32 pages     index in the table: the key's low bits
//! ```
//!
//! An entry is read by one instruction. It is changed in three steps, each of which leaves a valid
//! entry: clear the pages, write the new key, write the pages of that key.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::time::Duration;

use crate::address::PAGE;
use crate::process::maps::Mapping;

/// Bits of an address below its key.
pub(crate) const KEY_SHIFT: u32 = 17;
/// Entries of the table: enough for 128 GiB of contiguous memory.
pub(crate) const ENTRIES: u64 = 1 << 20;
/// The length of the table, in bytes.
pub(crate) const LEN: u64 = ENTRIES * 8;

/// How long the table is valid, from when the mappings were read.
pub(crate) const VALID_FOR: Duration = Duration::from_secs(1);

/// Where user space ends.
const END: u64 = 1 << 47;

/// The nonempty entries of a table, by index, and the address ranges that they cover.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadablePages {
    entries: BTreeMap<u32, PageEntry>,
    ranges: Vec<Range<u64>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PageEntry {
    /// A bit for each page.
    pages: u32,
    key: u32,
}

/// Bytes to write at an offset in the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableWrite {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
}

impl ReadablePages {
    /// Returns the pages where OCaml values may be.
    pub(crate) fn of(maps: &[Mapping]) -> ReadablePages {
        ReadablePages::covering(ranges(maps))
    }

    /// Returns the pages of the current mappings; `None` if the mappings have not changed.
    pub(crate) fn renewed(&self, maps: &[Mapping]) -> Option<ReadablePages> {
        let ranges = ranges(maps);
        (ranges != self.ranges).then(|| ReadablePages::covering(ranges))
    }

    fn covering(ranges: Vec<Range<u64>>) -> ReadablePages {
        let mut pages = ReadablePages::default();
        for range in &ranges {
            pages.add(range.start, range.end);
        }
        ReadablePages { ranges, ..pages }
    }

    /// Adds the pages of a range. Where two keys have the same entry, the first one keeps it.
    fn add(&mut self, start: u64, end: u64) {
        let end = end.min(END);
        let mut at = start;
        while at < end && (self.entries.len() as u64) < ENTRIES {
            let key = (at >> KEY_SHIFT) as u32;
            let next = u64::from(key + 1) << KEY_SHIFT;
            let entry = self
                .entries
                .entry(key % ENTRIES as u32)
                .or_insert(PageEntry { pages: 0, key });
            if entry.key == key {
                for page in at / PAGE..next.min(end).div_ceil(PAGE) {
                    entry.pages |= 1 << (page % 32);
                }
            }
            at = next;
        }
    }

    /// Returns the writes that fill an empty table.
    pub(crate) fn writes(&self) -> Vec<TableWrite> {
        let mut writes: Vec<TableWrite> = Vec::new();
        for (&index, entry) in &self.entries {
            let at = u64::from(index) * 8;
            let bytes = entry.bytes();
            match writes.last_mut() {
                Some(last) if last.at + last.bytes.len() as u64 == at => last.bytes.extend(bytes),
                _ => writes.push(TableWrite {
                    at,
                    bytes: bytes.to_vec(),
                }),
            }
        }
        writes
    }

    /// Returns the writes that turn the table of `before` into this one, in the order in which they
    /// are to be made: the table is valid after each.
    pub(crate) fn changes(&self, before: &ReadablePages) -> Vec<TableWrite> {
        let mut indices: Vec<u32> = before
            .entries
            .keys()
            .chain(self.entries.keys())
            .copied()
            .collect();
        indices.sort_unstable();
        indices.dedup();
        let of = |pages: &ReadablePages, index| pages.entries.get(&index).copied();
        let mut writes = Vec::new();
        for index in indices {
            let (was, is) = (of(before, index), of(self, index));
            if was == is {
                continue;
            }
            let mut half = |offset, bytes: u32| {
                writes.push(TableWrite {
                    at: u64::from(index) * 8 + offset,
                    bytes: bytes.to_le_bytes().to_vec(),
                });
            };
            let is = is.unwrap_or_default();
            if was.is_some_and(|was| was.key == is.key) {
                half(0, is.pages);
                continue;
            }
            half(0, 0);
            half(4, is.key);
            half(0, is.pages);
        }
        writes
    }
}

impl PageEntry {
    fn bytes(self) -> [u8; 8] {
        (u64::from(self.key) << 32 | u64::from(self.pages)).to_le_bytes()
    }
}

/// Returns where OCaml values may be: in private readable memory, anonymous or of an object.
fn ranges(maps: &[Mapping]) -> Vec<Range<u64>> {
    let file = |mapping: &Mapping| (mapping.device, mapping.inode);
    let code = maps.iter().filter(|it| it.executable && !it.shared);
    let objects: HashSet<_> = code.map(file).collect();
    let holds_values = |mapping: &&Mapping| {
        let is_values = if mapping.inode == 0 {
            // Not the mappings of the kernel: [vdso], [vvar].
            !mapping.path().starts_with(b"[v")
        } else {
            objects.contains(&file(mapping))
        };
        is_values && mapping.is_readable() && !mapping.shared
    };
    let values = maps.iter().filter(holds_values);
    values.map(|it| it.start.0..it.end.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::maps::parse;

    /// Returns whether a trampoline would read at an address.
    fn may_read(table: &[u8], address: u64) -> bool {
        let key = address >> KEY_SHIFT;
        let at = (key % ENTRIES) as usize * 8;
        let entry = u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
        entry >> 32 == key && entry >> (address / PAGE % 32) & 1 == 1
    }

    fn put(table: &mut [u8], writes: &[TableWrite]) {
        for write in writes {
            table[write.at as usize..][..write.bytes.len()].copy_from_slice(&write.bytes);
        }
    }

    const BEFORE: &str = "\
55d0c0000000-55d0c0001000 r-xp 00000000 fe:01 7 /bin/it
55d0c0001000-55d0c0003000 rw-p 00001000 fe:01 7 /bin/it
55d0c1000000-55d0c1100000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000001000 ---p 00000000 00:00 0
7f0000001000-7f0000801000 rw-p 00000000 00:00 0
7f1000000000-7f1000001000 rw-s 00000000 00:01 9 /dev/shm/x
7f1000001000-7f1000002000 rw-p 00000000 fe:01 9 /home/data
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
7ffc00030000-7ffc00034000 r--p 00000000 00:00 0 [vvar]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
";

    #[test]
    fn only_memory_of_values_may_be_read() {
        let maps = parse(BEFORE.as_bytes());
        let mut table = vec![0; LEN as usize];
        put(&mut table, &ReadablePages::of(&maps).writes());
        for address in [
            0x55d0c0000000,
            0x55d0c0002ff8,
            0x55d0c1000000,
            0x55d0c10ffff8,
            0x7f0000001000,
            0x7f0000800ff8,
            0x7ffc00020ff8,
        ] {
            assert!(may_read(&table, address), "{address:x}");
        }
        for address in [
            0,
            8,
            0x55d0c0003000,
            0x55d0c0fffff8,
            0x55d0c1100000,
            0x7f0000000ff8,
            0x7f0000801000,
            0x7f1000000000,
            0x7f1000001000,
            0x7ffc00021000,
            0x7ffc00030000,
            0xffff_ffff_ff60_0000,
            0x8000_7f00_0000_1000,
            u64::MAX - 7,
        ] {
            assert!(!may_read(&table, address), "{address:x}");
        }
    }

    #[test]
    fn table_holds_no_entry_without_a_page() {
        let writes = |line: &str| ReadablePages::of(&parse(line.as_bytes())).writes();
        // From one boundary of a key to another.
        let keys = writes("40000-80000 rw-p 00000000 00:00 0 \n");
        let bytes = [u32::MAX, 2, u32::MAX, 3].map(u32::to_le_bytes).concat();
        assert_eq!(keys, [TableWrite { at: 16, bytes }]);
        // The last page of one key, and the first of another.
        let two = writes("5f000-61000 rw-p 00000000 00:00 0 \n");
        let bytes = [1 << 31, 2, 1, 3].map(u32::to_le_bytes).concat();
        assert_eq!(two, [TableWrite { at: 16, bytes }]);
        assert_eq!(writes(""), []);
    }

    #[test]
    fn whole_address_space_fills_the_table_once() {
        let line = "0-8000000000000000 rw-p 00000000 00:00 0 \n";
        let writes = ReadablePages::of(&parse(line.as_bytes())).writes();
        assert_eq!(writes.len(), 1);
        assert_eq!((writes[0].at, writes[0].bytes.len() as u64), (0, LEN));
        // Nothing above user space may be read.
        let line = "7ffffffff000-800000001000 rw-p 00000000 00:00 0 \n";
        let top = ReadablePages::of(&parse(line.as_bytes()));
        assert_eq!(
            top,
            ReadablePages {
                ranges: top.ranges.clone(),
                ..ReadablePages::covering(std::iter::once(END - PAGE..END).collect())
            }
        );
        assert_eq!((END, LEN, top.entries.len()), (1 << 47, 8 << 20, 1));
    }

    #[test]
    fn same_mappings_need_no_renewal() {
        let maps = parse(BEFORE.as_bytes());
        let pages = ReadablePages::of(&maps);
        assert_eq!(pages.renewed(&maps), None);
        let renewed = pages.renewed(&maps[1..]).unwrap();
        assert_eq!(renewed, ReadablePages::of(&maps[1..]));
        assert_eq!(renewed.changes(&renewed), []);
    }

    #[test]
    fn every_step_of_a_change_is_valid() {
        let before = parse(BEFORE.as_bytes());
        // One range grows, one is unmapped, and one is mapped that needs the entry of another key.
        let line = "7f0000001000-7f0000801000";
        let after = BEFORE.replace(line, "7f0000001000-7f0000a01000").replace(
            "55d0c1000000-55d0c1100000 rw-p",
            "55f0c1000000-55f0c1100000 rw-p",
        );
        let after = parse(after.as_bytes());
        let (from, to) = (ReadablePages::of(&before), ReadablePages::of(&after));
        let mut table = vec![0; LEN as usize];
        put(&mut table, &from.writes());
        let mut wanted = vec![0; LEN as usize];
        put(&mut wanted, &to.writes());
        let either = |address| {
            let mut maps = before.iter().chain(&after);
            maps.any(|it| it.contains(crate::address::LiveAddr(address), 8))
        };
        for write in to.changes(&from) {
            put(&mut table, &[write]);
            for base in [0x55d0c1000000, 0x55f0c1000000, 0x7f0000801000_u64] {
                for address in (base..base + 0x200000).step_by(PAGE as usize) {
                    assert!(!may_read(&table, address) || either(address), "{address:x}");
                }
            }
        }
        for (index, entry) in table.chunks(8).enumerate() {
            // The key of an entry without a page has no effect.
            let pages = &entry[..4];
            assert_eq!(pages, &wanted[index * 8..index * 8 + 4]);
        }
        assert!(may_read(&table, 0x7f0000a00ff8) && may_read(&table, 0x55f0c1000000));
    }
}
