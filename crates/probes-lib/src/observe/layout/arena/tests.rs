use proptest::prelude::*;

use super::header::{ID_AT, MAX_POINTS, RESTORED_AT, VERSION, VERSION_AT};
use super::*;
use crate::inject::injected_call::MAX_LEN;
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::keys::KeysLayout;
use crate::observe::layout::observer_record::ObserverRecord;
use crate::observe::layout::semaphores::WordChange;
use crate::observe::layout::shared::record;
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::layout::values::ValuesLayout;
use crate::observe::point::{Island, PatchBytes};
use crate::observe::role::ArgumentRoom;
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
            record_len: record::len(3, ArgumentRoom::Fields),
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
    for (is_filtered, is_sampled) in [(false, false), (false, true), (true, false), (true, true)] {
        let filtered = Arena {
            is_filtered,
            is_sampled,
            shared: SharedLayout {
                filters_memory: is_filtered,
                ring_doublings: is_sampled.into(),
                asks_for_threads: is_filtered != is_sampled,
                ..arena.shared
            },
            ..arena.clone()
        };
        assert!(found_by_header(&filtered));
    }
    let most = record::len(6, ArgumentRoom::Fields);
    assert!(found_by_header(&shared(64, most)));
    let mut reporting = shared(3, 2 * record::len(4, ArgumentRoom::Fields));
    reporting.shared.kept_len = record::len(4, ArgumentRoom::Fields);
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
    // Another id: another arena. No magic: other memory.
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
    // An arena of which only the first part is mapped is not found.
    for len in [0, HEADER_LEN - 1, HEADER_LEN, 1000, bytes.len() - 1] {
        assert_eq!(find(&arena, &bytes[..len]), None);
    }
}

#[test]
fn semaphores_are_found_after_the_table() {
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
    // More semaphores than points; a semaphore of a point that there is not.
    arena.semaphores = (0..101).map(|_| semaphore(0)).collect();
    assert!(!found_by_header(&arena));
    arena.semaphores = vec![semaphore(33)];
    assert!(!found_by_header(&arena));
}

#[test]
fn trampolines_with_a_lead_are_found() {
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
fn arenas_of_versions_4_and_5_are_found() {
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
    for (is_filtered, is_sampled) in [(false, false), (true, false), (false, true), (true, true)] {
        let arena = Arena {
            is_filtered,
            is_sampled,
            ..arena().0
        };
        let count = arena.points.len();
        let untyped = (0..count).map(|point| arena.untyped_counter(point));
        let sampled = (0..count).map(|point| arena.sampled_counter(point));
        let all = (0..count)
            .chain(untyped.filter(|_| is_filtered))
            .chain(sampled.filter(|_| is_sampled));
        let all: Vec<usize> = all.collect();
        // The counters are numbered without gaps.
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
    let kept = record::len(2, ArgumentRoom::Fields);
    for shared in [
        SharedLayout {
            filters_memory: true,
            ..plain
        },
        SharedLayout {
            pairs_by_key: true,
            ..plain
        },
        plain.with_rings_of(2 << 20),
        plain.with_rings_of(64 << 20),
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
fn trampolines_with_a_lead_leave_call_room() {
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
