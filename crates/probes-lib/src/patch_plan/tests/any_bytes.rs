//! Plans of bytes that are not code, and of damaged files: sound, and without a panic.

use std::collections::BTreeSet;
use std::path::Path;

use iced_x86::Mnemonic;
use proptest::prelude::*;
use test_support::{Scratch, fixture};

use super::*;
use crate::Functions;

/// Bytes that are often code: branches to near places, calls, returns, jumps through tables, padding.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    const PIECES: [&[u8]; 14] = [
        b"\x48\x83\xec\x08",
        b"\x48\x83\xc4\x08\xc3",
        b"\xc3",
        b"\x53",
        b"\x31\xc0",
        b"\xe8\x05\0\0\0",
        b"\xff\x14\x24",
        b"\x48\x8d\x15\0\0\0\0",
        b"\x48\x01\xd0\xff\xe0",
        b"\xf3\x0f\x1e\xfa",
        NOPS,
        b"\x90",
        b"\xcc",
        b"\xe9\0\0\0\0",
    ];
    let piece = prop::sample::select(PIECES.to_vec()).prop_map(<[u8]>::to_vec);
    let branch = (0x70_u8..0x80, any::<i8>()).prop_map(|(kind, to)| vec![kind, to as u8 % 64]);
    let any = prop::collection::vec(any::<u8>(), 1..4);
    let pieces = prop::collection::vec(prop_oneof![8 => piece, 2 => branch, 1 => any], 1..50);
    pieces.prop_map(|pieces| pieces.concat())
}

/// Plans all functions of a file; returns how many can be counted, or `None` if it cannot be read.
fn plan_file(file: &Path) -> Option<usize> {
    let functions = Functions::of_file(file).ok()?;
    let object = &functions.objects()[0];
    let planner = object.patch_planner().ok()?;
    let ranges: Vec<CodeRange> = object.table().functions().map(|it| it.range()).collect();
    check_plans(&planner, &ranges, &[]);
    let entry = |range: &&CodeRange| planner.function(**range).entry.is_ok();
    Some(ranges.iter().filter(entry).count())
}

proptest! {
    // promise: Bad input: Any bytes taken for code give plans of patches or reasons (256 cases, and a fuzz target)
    #[test]
    fn plans_of_any_bytes_are_sound(
        bytes in bytes(),
        ranges in prop::collection::vec((0_u64..220, 0_u64..220), 0..8),
        data in prop::collection::vec(any::<u8>(), 0..64),
        start in prop::sample::select(vec![0, AT, (1 << 47) - 0x2000]),
        extra in prop::collection::vec(any::<u8>(), 0..4),
    ) {
        let mut code = Code::default();
        code.add(FileAddr(start), bytes.clone(), true);
        code.add(FileAddr(start.wrapping_add(0x1000)), data, false);
        let range = |(offset, len): &(u64, u64)| CodeRange {
            start: FileAddr(start.wrapping_add(*offset)),
            len: *len,
        };
        let ranges: Vec<CodeRange> = ranges.iter().map(range).collect();
        let extra: Vec<_> = extra.iter().map(|at| FileAddr(start.wrapping_add((*at).into()))).collect();
        let planner = PatchPlanner::new(code, &ranges, &ranges[ranges.len() / 2..], extra.clone());
        check_plans(&planner, &ranges, &extra);
    }

    #[test]
    fn damaged_files_are_planned_without_a_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40),
    ) {
        let fixture = fixture("spin_10.pie");
        prop_assert!(plan_file(&fixture).unwrap() > 5);
        let mut bytes = std::fs::read(fixture).unwrap();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let scratch = Scratch::new();
        let file = scratch.file("damaged");
        std::fs::write(&file, bytes).unwrap();
        plan_file(&file);
    }
}

/// Checks the plans of all of these ranges: no site overwrites or moves a branch target, except as its first byte,
/// and copies have the same effect.
pub(super) fn check_plans(planner: &PatchPlanner, ranges: &[CodeRange], targets: &[FileAddr]) {
    let code = &planner.swept.code;
    let mut targets: BTreeSet<u64> = targets.iter().map(|it| it.0).collect();
    for range in ranges {
        for instruction in code::decode(code.bytes(range.start.0, range.len), range.start.0) {
            if instruction::has_near_target(&instruction) {
                targets.insert(instruction.near_branch_target());
            }
        }
    }
    for function in ranges {
        let plan = planner.function(*function);
        let exits = plan.exits.iter();
        let exits = exits.flat_map(|it| it.sites.iter().chain([&it.entry]));
        for site in plan.entry.iter().flatten().chain(exits) {
            let (start, len) = (site.address().0, site.displaced().len() as u64);
            assert!(len > 0);
            let inside = targets.range(start + 1..start + len).next();
            assert_eq!(inside, None, "{site:x?}");
            for bias in [LoadBias::NONE, LoadBias(0x10_0000_0000)] {
                let window = site.trampolines(bias);
                for to in [window.start, LiveAddr(window.end.0.saturating_sub(1))] {
                    check_at(site, bias, to, &targets);
                }
            }
        }
    }
}

/// Checks what a site writes for a trampoline at `to`, and its copy there.
fn check_at(site: &PatchSite, bias: LoadBias, to: LiveAddr, targets: &BTreeSet<u64>) {
    for (at, bytes) in site.writes(bias, to).into_iter().flatten() {
        let start = bias.file(at).0;
        let mut inside = targets.range(start + 1..start + bytes.len() as u64);
        assert_eq!(inside.next(), None, "{site:x?}");
    }
    let Ok(copy) = site.copy_at(bias, to) else {
        return;
    };
    let start = bias.live(site.address()).0;
    let copied_at = |address: u64| {
        let offset = (address - to.0) as usize;
        code::decode(&copy.code()[offset..], address)
            .next()
            .unwrap()
    };
    let originals: Vec<_> = code::decode(site.displaced(), start).collect();
    for original in &originals {
        let moved = copy.moved(LiveAddr(original.ip())).unwrap();
        let copied = copied_at(moved.0);
        if instruction::is_call(original) {
            assert_eq!(copied.mnemonic(), Mnemonic::Push);
            continue;
        }
        assert_eq!(copied.mnemonic(), original.mnemonic());
        let has_near = original.is_jcc_short_or_near() || original.is_jmp_short_or_near();
        if has_near {
            assert_eq!(copied.near_branch_target(), original.near_branch_target());
        }
        if original.is_ip_rel_memory_operand() {
            let address = copied.ip_rel_memory_address();
            assert_eq!(address, original.ip_rel_memory_address());
        }
    }
    let last = originals.last().unwrap();
    if instruction::is_straight(last) {
        let moved = copied_at(copy.moved(LiveAddr(last.ip())).unwrap().0);
        let back = copied_at(moved.next_ip()).near_branch_target();
        assert_eq!(back, last.next_ip());
    }
}

include!("../../../../../fuzz/fuzz_targets/code_input.rs");

#[test]
fn code_corpus_is_planned_without_a_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/code");
    let mut files = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let (code, ranges) = code_input(&bytes).unwrap();
        let parts = &ranges[ranges.len() / 2..];
        check_plans(&PatchPlanner::new(code, &ranges, parts, []), &ranges, &[]);
        files += 1;
    }
    assert!(files > 0);
}
