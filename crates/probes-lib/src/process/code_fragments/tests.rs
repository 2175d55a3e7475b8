use proptest::prelude::*;

use super::*;
use crate::memory::WriteMemory;
use crate::memory::double::SliceMemory;
use crate::testing::properties;

const TABLE: u64 = 0x10000;
const CELLS: u64 = 0x20000;
const FRAGMENTS: u64 = 0x30000;
const SYSTEM: u64 = 0x9000;
const DIGEST: Digest = [7; 16];

/// The code of the fragments: the program's, the runtime's and a plugin's.
const CODE: [(u64, u64); 3] = [(0x1000, 0x8000), (SYSTEM, 0x9100), (0xa000, 0xb000)];

fn table(kind: TableKind) -> CodeFragments {
    CodeFragments {
        kind,
        at: LiveAddr(TABLE),
        system_code: Some(LiveAddr(SYSTEM)),
        computing: Vec::new(),
    }
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The bytes of a fragment's struct, filled up to 64 with `after`.
fn fragment(layout: FragmentLayout, index: usize, status: u32, after: u8) -> Vec<u8> {
    let (start, end) = CODE[index];
    let mut all = vec![after; 64];
    all[..layout.len].fill(0);
    all[..16].copy_from_slice(&bytes(&[start, end]));
    if layout.ignore.is_some() {
        all[16..20].copy_from_slice(&(index as u32).to_le_bytes());
    }
    all[layout.digest..][..16].copy_from_slice(&DIGEST);
    let (at, len) = layout.status;
    all[at..at + len].copy_from_slice(&status.to_le_bytes()[..len]);
    all
}

/// The fragments in memory: the digest of the first is not computed yet, that of the second never is, that of the third
/// is computed.
fn fragments(layout: FragmentLayout) -> Vec<u8> {
    let ignored = layout.ignore.unwrap_or(layout.later);
    let statuses = [layout.later, ignored, layout.provided];
    let all = statuses.iter().enumerate();
    all.flat_map(|(index, &status)| fragment(layout, index, status, 0xff))
        .collect()
}

fn at(index: usize) -> u64 {
    FRAGMENTS + index as u64 * 64
}

fn array_of(layout: FragmentLayout) -> SliceMemory {
    let contents: Vec<u64> = (0..3).map(at).collect();
    SliceMemory::new([
        (TABLE, bytes(&[3 | 8 << 32, CELLS])),
        (CELLS, bytes(&contents)),
        (FRAGMENTS, fragments(layout)),
    ])
}

fn skip_list_of(layout: FragmentLayout) -> SliceMemory {
    let mut head = vec![0; LEVELS as usize + 1];
    head[0] = CELLS;
    let cell = |index: usize, next| bytes(&[CODE[index].0, at(index), next]);
    let cells = [cell(0, CELLS + 24), cell(1, CELLS + 48), cell(2, 0)];
    SliceMemory::new([
        (TABLE, bytes(&head)),
        (CELLS, cells.concat()),
        (FRAGMENTS, fragments(layout)),
    ])
}

/// Head, a removed cell, three cells, tail, of 48 bytes each.
fn lock_free_of(layout: FragmentLayout) -> SliceMemory {
    let cell = |key, fragment, level, number: u64, removed| {
        bytes(&[
            key,
            fragment,
            level,
            0xdead,
            0,
            CELLS + 48 * (number + 1) + removed,
        ])
    };
    let cells = [
        cell(0, 0, LEVELS - 1, 0, 0),
        cell(0x500, 1, 0, 1, 1),
        cell(CODE[0].0, at(0), 0, 2, 0),
        cell(CODE[1].0, at(1), 3, 3, 0),
        cell(CODE[2].0, at(2), 0, 4, 0),
        cell(u64::MAX, 0, LEVELS - 1, 5, 0),
    ];
    SliceMemory::new([
        (TABLE, bytes(&[CELLS, CELLS + 5 * 48, 0, CELLS])),
        (CELLS, cells.concat()),
        (FRAGMENTS, fragments(layout)),
    ])
}

/// Lays a table out in memory.
type MakeTable = fn(FragmentLayout) -> SliceMemory;

const KNOWN: [(TableKind, FragmentLayout, MakeTable); 4] = [
    (TableKind::Array, WITH_FLAG, array_of),
    (TableKind::SkipList, STATUS_LAST, skip_list_of),
    (TableKind::LockFree, STATUS_LAST, lock_free_of),
    (TableKind::LockFree, WITH_MUTEX, lock_free_of),
];

// promise: Closures: The tables of code fragments of OCaml 4.11, 4.12 to 4.14, 5.0 and 5.1 on are read (4 layouts)
#[test]
fn fragments_of_every_layout_are_read_and_written() {
    for (kind, layout, make) in KNOWN {
        let mut memory = make(layout);
        let read = table(kind).read(&memory).unwrap();
        let code: Vec<_> = read
            .iter()
            .map(|it| (it.code.start.0, it.code.end.0))
            .collect();
        assert_eq!(code, CODE);
        assert!(read.iter().all(|fragment| fragment.layout == layout));
        let second = match layout.ignore {
            Some(_) => DigestStatus::Never,
            None => DigestStatus::Later,
        };
        let statuses: Vec<_> = read.iter().map(|it| it.status).collect();
        assert_eq!(
            statuses,
            [DigestStatus::Later, second, DigestStatus::Computed(DIGEST)]
        );
        let before = memory.clone();
        for (at, bytes) in read[0].writes([9; 16]) {
            memory.write_code(at, &bytes).unwrap();
        }
        let after = table(kind).read(&memory).unwrap();
        assert_eq!(after[0].status, DigestStatus::Computed([9; 16]));
        assert_eq!(after[1..], read[1..]);
        let changed = before.differences(&memory);
        let own = at(0)..at(1);
        assert!(changed.iter().all(|(at, ..)| own.contains(&at.0)));
    }
}

#[test]
fn runtime_that_has_not_started_has_no_fragments() {
    for kind in [TableKind::Array, TableKind::SkipList, TableKind::LockFree] {
        let memory = SliceMemory::new([(TABLE, vec![0; kind.len() as usize])]);
        assert_eq!(table(kind).read(&memory), Ok(Vec::new()));
    }
}

#[test]
fn layout_that_could_be_either_is_unknown() {
    // Bytes 36 to 40 are the status in one layout, and the end of the digest in the other.
    let mut memory = lock_free_of(WITH_MUTEX);
    for index in 0..3 {
        memory.poke(LiveAddr(at(index) + 36), &IGNORE.to_le_bytes());
    }
    assert_eq!(table(TableKind::LockFree).read(&memory), Err(UnknownTable));
}

#[test]
fn inconsistent_tables_are_rejected() {
    let wrong = |place: u64, word: u64, kind, make: MakeTable, layout| {
        let mut memory = make(layout);
        memory.poke(LiveAddr(place), &word.to_le_bytes());
        let read = table(kind).read(&memory);
        assert_eq!(read, Err(UnknownTable), "{kind:?} {place:#x} {word:#x}");
    };
    let (array, list, free) = (TableKind::Array, TableKind::SkipList, TableKind::LockFree);
    // A size above the capacity; an array at the address 0.
    wrong(TABLE, 9 | 8 << 32, array, array_of, WITH_FLAG);
    wrong(TABLE + 8, 0, array, array_of, WITH_FLAG);
    // Code that ends before it starts, or does not start where the list says.
    wrong(at(0) + 8, 0xfff, array, array_of, WITH_FLAG);
    wrong(at(0), 0x1001, list, skip_list_of, STATUS_LAST);
    // An invalid status; a digest of the runtime's own code.
    wrong(at(0) + 32, 7 << 32, list, skip_list_of, STATUS_LAST);
    wrong(at(1) + 32, 2 << 32, list, skip_list_of, STATUS_LAST);
    wrong(at(0) + 16, 9 << 32, free, lock_free_of, WITH_MUTEX);
    // Cyclic and unsorted lists; invalid levels, and an invalid key of the tail.
    wrong(CELLS + 40, CELLS, list, skip_list_of, STATUS_LAST);
    wrong(CELLS + 24, 1, list, skip_list_of, STATUS_LAST);
    wrong(TABLE + LEVELS * 8, LEVELS, list, skip_list_of, STATUS_LAST);
    wrong(
        CELLS + 48 * 4 + 40,
        CELLS + 48,
        free,
        lock_free_of,
        WITH_MUTEX,
    );
    wrong(CELLS + 16, 3, free, lock_free_of, WITH_MUTEX);
    wrong(CELLS + 48 * 5, 1 << 60, free, lock_free_of, WITH_MUTEX);
}

#[test]
fn table_kind_is_recognized_by_symbol_length() {
    let symbol = |len| Symbol {
        address: FileAddr(0x1234),
        len,
    };
    let at = FileAddr(0x1234);
    assert_eq!(table_of(&[symbol(16)], &[]), Ok((TableKind::Array, at)));
    assert_eq!(table_of(&[], &[symbol(144)]), Ok((TableKind::SkipList, at)));
    assert_eq!(table_of(&[], &[symbol(32)]), Ok((TableKind::LockFree, at)));
    assert_eq!(table_of(&[], &[symbol(16)]), Err(UnknownTable));
    assert_eq!(table_of(&[symbol(16)], &[symbol(32)]), Err(UnknownTable));
    let two = [symbol(32), symbol(32)];
    assert_eq!(table_of(&[], &two), Err(UnknownTable));
}

proptest! {
    #![proptest_config(properties(300))]

    // promise: Closures: Any bytes give fragments of code or none, and reading them ends
    #[test]
    fn reading_any_bytes_terminates(
        known in 0..KNOWN.len(),
        damage in proptest::collection::vec((0u64..3, 0u64..0x120, any::<u8>()), 1..20),
    ) {
        let (kind, layout, make) = KNOWN[known];
        let mut memory = make(layout);
        let read = |memory: &SliceMemory| table(kind).read(memory);
        prop_assert!(read(&memory).is_ok());
        for (piece, offset, byte) in damage {
            let start = [TABLE, CELLS, FRAGMENTS][piece as usize];
            let mut found = [0];
            let place = LiveAddr(start + offset);
            if memory.read(place, &mut found).is_ok() {
                memory.poke(place, &[byte]);
            }
        }
        for fragment in read(&memory).unwrap_or_default() {
            prop_assert!(fragment.code.start <= fragment.code.end);
        }
    }
}
