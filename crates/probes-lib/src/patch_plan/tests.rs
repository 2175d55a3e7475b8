//! Plans of small pieces of code, and of bytes that are none.

use std::path::Path;

use iced_x86::Register;
use iced_x86::code_asm::{CodeAssembler, byte_ptr, eax, qword_ptr, rax, rcx, rdi};
use proptest::prelude::*;
use test_support::{Scratch, fixture};

use super::*;
use crate::Functions;
use crate::address::{LiveAddr, LoadBias};
use site::Jump;

const AT: u64 = 0x40_1000;
/// What the linker writes between functions.
const NOPS: &[u8] = b"\x66\x2e\x0f\x1f\x84\0\0\0\0\0";

/// Returns a planner of functions that follow one another, and their ranges.
fn planner_of(functions: &[&[u8]]) -> (PatchPlanner, Vec<CodeRange>) {
    let mut code = Code::default();
    code.add(FileAddr(AT), functions.concat(), true);
    let mut start = AT;
    let mut range = |bytes: &&[u8]| {
        let padding = if bytes.ends_with(NOPS) { NOPS.len() } else { 0 };
        let len = bytes.len() as u64;
        start += len;
        CodeRange {
            start: FileAddr(start - len),
            len: len - padding as u64,
        }
    };
    let ranges: Vec<CodeRange> = functions.iter().map(&mut range).collect();
    (PatchPlanner::new(code, &ranges, &[], []), ranges)
}

/// Returns the ways to patch the entry of the first of these functions.
fn entry(functions: &[&[u8]]) -> Result<Vec<PatchSite>, Refusal> {
    let (planner, ranges) = planner_of(functions);
    planner.function(ranges[0]).entry
}

fn assembled(write: impl FnOnce(&mut CodeAssembler)) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    write(&mut a);
    a.assemble(AT).unwrap()
}

#[test]
fn whole_instructions_are_displaced() {
    // push %rbx; mov $1,%eax; ret
    let ways = entry(&[b"\x53\xb8\x01\0\0\0\xc3"]).unwrap();
    assert_eq!(ways.len(), 1);
    assert_eq!(ways[0].jump(), Jump::Near { padding: 0 });
    assert_eq!(ways[0].displaced(), b"\x53\xb8\x01\0\0\0");
}

#[test]
fn padding_behind_a_short_function_is_used() {
    let short = [b"\x31\xc0\xc3", NOPS].concat();
    let ways = entry(&[&short, b"\x31\xc0\xc3"]).unwrap();
    assert_eq!(ways[0].jump(), Jump::Near { padding: 2 });
    assert_eq!(ways[0].displaced(), b"\x31\xc0\xc3");
    // Not if something jumps there: `jmp -9` to the padding's second byte.
    let ways = entry(&[&short, b"\xeb\xf5"]).unwrap();
    assert!(matches!(ways[0].jump(), Jump::Punned { .. }));
}

#[test]
fn loop_at_four_is_punned_upwards() {
    // sub $8,%rsp; loop: cmp $1,%rax; jne loop; add $8,%rsp; ret
    let bytes = b"\x48\x83\xec\x08\x48\x83\xf8\x01\x75\xfa\x48\x83\xc4\x08\xc3";
    let ways = entry(&[bytes]).unwrap();
    let punned = Jump::Punned {
        chosen: 3,
        displacement: 0x4800_0000,
    };
    assert_eq!(ways[0].jump(), punned);
    let start = AT + 5 + 0x4800_0000;
    let window = LiveAddr(start)..LiveAddr(start + (16 << 20));
    assert_eq!(ways[0].trampolines(LoadBias::NONE), window);
    let to = LiveAddr(start + 0x12_3456);
    let writes = ways[0].writes(LoadBias::NONE, to).unwrap();
    assert_eq!(writes, [(LiveAddr(AT), b"\xe9\x56\x34\x12".to_vec())]);
    assert_eq!(ways[0].writes(LoadBias::NONE, LiveAddr(AT)), None);
}

#[test]
fn jump_over_a_prefix_is_a_target() {
    // lock incl (%rdi), of which the lock prefix may be skipped; then three bytes, and the jump.
    let refusal = entry(&[b"\xf0\xff\x07\x31\xc0\xc3\xeb\xf9"]).unwrap_err();
    assert_eq!(refusal, Refusal::BranchTarget { offset: 1 });
}

#[test]
fn call_behind_the_entry_stays() {
    // sub $8,%rsp; call; add $8,%rsp; ret: the call's e8 is the jump's last byte.
    let bytes = b"\x48\x83\xec\x08\xe8\0\0\0\0\x48\x83\xc4\x08\xc3";
    let ways = entry(&[bytes]).unwrap();
    let displacement = 0xe800_0000_u32 as i32;
    assert_eq!(
        ways[0].jump(),
        Jump::Punned {
            chosen: 3,
            displacement
        }
    );
    assert!(!ways[0].moves_call() && ways[1].moves_call());
    // At fixed addresses there is nothing 400 MiB below.
    let mut code = Code::default();
    code.add(FileAddr(AT), bytes.to_vec(), true);
    code.set_fixed();
    let range = CodeRange {
        start: FileAddr(AT),
        len: bytes.len() as u64,
    };
    let plan = PatchPlanner::new(code, &[range], &[], []).function(range);
    let ways = plan.entry.unwrap();
    assert!(ways.len() == 1 && ways[0].jump() == Jump::Near { padding: 0 });
}

#[test]
fn patch_comes_after_endbr64() {
    let ways = entry(&[b"\xf3\x0f\x1e\xfa\xb8\x01\0\0\0\xc3"]).unwrap();
    assert_eq!(ways[0].address(), FileAddr(AT + 4));
}

#[test]
fn island_is_reached_by_a_short_jump() {
    // cmp %al,%al, then a branch target; all of the last bytes of its jump are fixed.
    let target = b"\x38\xc0\xff\xff\xff\x7f\xeb\xfa";
    let island = [b"\xc3", NOPS].concat();
    let (planner, ranges) = planner_of(&[b"\x38\xc0\x0f\x1f\0\xeb\xfb", &island, target]);
    let plan = planner.function(ranges[0]);
    let ways = plan.entry.unwrap();
    let short = ways.iter().find_map(|way| match way.jump() {
        Jump::Short { island } => Some((way, island)),
        _ => None,
    });
    let (way, island) = short.unwrap();
    assert_eq!(
        (way.displaced(), island),
        (&b"\x38\xc0"[..], FileAddr(AT + 8))
    );
    let writes = way.writes(LoadBias::NONE, LiveAddr(AT + 0x1000)).unwrap();
    let near = (LiveAddr(AT + 8), b"\xe9\xf3\x0f\0\0".to_vec());
    assert_eq!(writes, [near, (LiveAddr(AT), b"\xeb\x06".to_vec())]);
}

#[test]
fn exits_do_not_overlap_the_entry() {
    // The return is in the entry's jump, or close behind it.
    let (planner, ranges) = planner_of(&[b"\x48\x8b\x07\xc3\xcc", b"\x48\x8b\x47\x08\x90\xc3"]);
    for range in ranges {
        let exits = planner.function(range).exits.unwrap();
        assert_eq!((exits.sites.len(), exits.in_entry), (0, 1), "{exits:?}");
        assert_eq!(exits.entry.displaced().last(), Some(&0xc3));
    }
}

#[test]
fn tail_jumps_are_exits_and_loops_are_not() {
    let other = b"\x31\xc0\xc3\x90\x90\x90\x90\x90";
    let function = assembled(|a| {
        let mut again = a.create_label();
        a.add(rax, rcx).unwrap();
        a.add(rcx, 1).unwrap();
        a.set_label(&mut again).unwrap();
        a.inc(rcx).unwrap();
        a.dec(rdi).unwrap();
        a.jne(again).unwrap();
        // To the next function, with a near jump.
        a.db(b"\xe9\0\0\0\0").unwrap();
    });
    let (planner, ranges) = planner_of(&[&function, other]);
    let exits = planner.function(ranges[0]).exits.unwrap();
    let addresses: Vec<_> = exits.sites.iter().map(PatchSite::address).collect();
    assert_eq!(addresses, [FileAddr(ranges[1].start.0 - 5)]);
    // If the other code is a part of the function, its return is the exit.
    let mut code = Code::default();
    code.add(FileAddr(AT), [&function[..], other].concat(), true);
    let planner = PatchPlanner::new(code, &ranges[..1], &ranges[1..], []);
    let exits = planner.function(ranges[0]).exits.unwrap();
    assert!(exits.sites[0].address() >= ranges[1].start);
    // If nothing is known of it, the function may end there or not.
    let mut code = Code::default();
    code.add(FileAddr(AT), [&function[..], other].concat(), true);
    let planner = PatchPlanner::new(code, &ranges[..1], &[], []);
    let refusal = planner.function(ranges[0]).exits.unwrap_err();
    assert!(matches!(refusal, Refusal::UnknownCode { .. }), "{refusal}");
}

#[test]
fn jump_tables_yield_branch_targets() {
    // lea table(%rip),%rdx; movslq (%rdx,%rax,4),%rax; add %rdx,%rax; jmp *%rax; two cases
    let table = AT + 0x1000;
    let mut bytes = b"\x48\x8d\x15\xf9\x0f\0\0\x48\x63\x04\x82\x48\x01\xd0\xff\xe0".to_vec();
    bytes.extend(b"\x90\x90\xb8\x01\0\0\0\xc3\xb8\x02\0\0\0\xc3");
    let range = CodeRange {
        start: FileAddr(AT),
        len: bytes.len() as u64,
    };
    let plan = |entries: &[u64]| {
        let mut code = Code::default();
        code.add(FileAddr(AT), bytes.clone(), true);
        let entry = |case: &u64| (AT.wrapping_add(*case).wrapping_sub(table) as u32).to_le_bytes();
        code.add(
            FileAddr(table),
            entries.iter().flat_map(entry).collect(),
            false,
        );
        PatchPlanner::new(code, &[range], &[], [])
    };
    let planner = plan(&[0x12, 0x18, 0x2000]);
    let at = |offset: u64| planner.instruction(range, FileAddr(AT + offset));
    assert!(matches!(
        at(0x11).unwrap()[0].jump(),
        Jump::Punned { chosen: 0, .. }
    ));
    assert!(planner.function(range).exits.is_ok());
    let unknown = plan(&[0x2000]).function(range);
    assert_eq!(unknown.entry, Err(Refusal::UnknownTargets { offset: 0xe }));
}

#[test]
fn refusals_say_why() {
    let refusal = |bytes: &[u8]| entry(&[bytes]).unwrap_err().to_string();
    assert_eq!(refusal(b"\xc3"), "is too short: 1 byte, and a jump takes 5");
    assert_eq!(refusal(b""), "is not in the code of its file");
    assert_eq!(
        refusal(b"\x53\x06\x90\x90\x90\x90"),
        "has bytes at +0x1 that are not an instruction"
    );
    assert_eq!(
        refusal(b"\x0f\x05\xc3"),
        "has a system call at +0x0, which cannot be moved"
    );
    // A branch target at +1, whose bytes lead into the program itself.
    assert_eq!(
        refusal(b"\x53\0\0\0\0\0\0\xeb\xf8"),
        "has a branch target at +0x1, inside the bytes of the jump"
    );
    let (planner, ranges) = planner_of(&[b"\xb8\x01\0\0\0\xc3"]);
    let inside = planner.instruction(ranges[0], FileAddr(AT + 1));
    assert_eq!(inside, Err(Refusal::NoInstruction { offset: 1 }));
}

#[test]
fn copies_refer_to_the_same_addresses() {
    let bytes = assembled(|a| {
        a.mov(rax, qword_ptr(AT + 0x100)).unwrap();
    });
    let ways = entry(&[&[&bytes[..], b"\xc3"].concat()]).unwrap();
    for to in [AT + 0x1_0000, AT - 0x1_0000] {
        let copy = ways[0].copy_at(LoadBias::NONE, LiveAddr(to)).unwrap();
        let copied: Vec<_> = code::decode(copy.code(), to).collect();
        assert_eq!(copied[0].memory_displacement64(), AT + 0x100);
        assert_eq!(copied[1].near_branch_target(), AT + bytes.len() as u64);
        assert_eq!(copy.moved(LiveAddr(AT)), Some(LiveAddr(to)));
    }
    let far = ways[0].copy_at(LoadBias::NONE, LiveAddr(AT + (3 << 30)));
    assert_eq!(far, Err(Refusal::OutOfReach));
}

#[test]
fn displaced_call_pushes_its_own_return_address() {
    // call *8(%rsp), four bytes, and a byte of padding.
    let bytes = b"\xff\x54\x24\x08\x90\xc3";
    let copy = displaced::DisplacedCopy::make(&bytes[..4], LiveAddr(AT), LiveAddr(AT + 0x1000));
    let copy = copy.unwrap();
    let copied: Vec<_> = code::decode(copy.code(), AT + 0x1000).take(2).collect();
    let word = copied[0].ip_rel_memory_address() - AT - 0x1000;
    assert_eq!(
        copy.code()[word as usize..][..8],
        (AT + 4).to_le_bytes(),
        "{copied:?}"
    );
    let jump = (copied[1].mnemonic(), copied[1].memory_base());
    assert_eq!(jump, (Mnemonic::Jmp, Register::RSP));
    assert_eq!(copied[1].memory_displacement64(), 16);
}

#[test]
fn code_between_functions_is_swept() {
    // Something that no symbol names jumps to the second instruction.
    let function = assembled(|a| {
        a.push(rax).unwrap();
        a.mov(eax, 1).unwrap();
        a.mov(byte_ptr(rdi), 0).unwrap();
        a.ret().unwrap();
    });
    let hidden = [0xeb, (-2 - function.len() as i8 + 1) as u8];
    let mut code = Code::default();
    code.add(FileAddr(AT), [&function[..], &hidden].concat(), true);
    let range = CodeRange {
        start: FileAddr(AT),
        len: function.len() as u64,
    };
    let plan = PatchPlanner::new(code, &[range], &[], []).function(range);
    assert!(matches!(plan.entry.unwrap()[0].jump(), Jump::Punned { .. }));
}

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
        start in prop::sample::select(vec![0, AT, u64::MAX - 100]),
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

/// Checks the plans of all of these ranges: no site displaces one of the `targets`, except as its first byte.
fn check_plans(planner: &PatchPlanner, ranges: &[CodeRange], targets: &[FileAddr]) {
    for function in ranges {
        let plan = planner.function(*function);
        let exits = plan.exits.iter();
        let exits = exits.flat_map(|it| it.sites.iter().chain([&it.entry]));
        for site in plan.entry.iter().flatten().chain(exits) {
            let (start, len) = (site.address().0, site.displaced().len() as u64);
            assert!(len > 0);
            let inside = start + 1..start + len;
            assert!(!targets.iter().any(|it| inside.contains(&it.0)));
            for bias in [LoadBias::NONE, LoadBias(0x10_0000_0000)] {
                let to = site.trampolines(bias).start;
                if site.writes(bias, to).is_some() {
                    let _ = site.copy_at(bias, to);
                }
            }
        }
    }
}

// As fuzz/fuzz_targets/code.rs reads them.
#[test]
fn code_corpus_is_planned_without_a_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/code");
    let mut files = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let (count, rest) = bytes.split_first().unwrap();
        let (ranges, rest) = rest.split_at(rest.len().min(2 * usize::from(*count)));
        let range = |pair: &[u8]| CodeRange {
            start: FileAddr(AT + 4 * u64::from(pair[0])),
            len: 4 * u64::from(pair[1]),
        };
        let ranges: Vec<CodeRange> = ranges.chunks_exact(2).map(range).collect();
        let (text, data) = rest.split_at(rest.len() - rest.len() / 8);
        let mut code = Code::default();
        code.add(FileAddr(AT), text.to_vec(), true);
        code.add(FileAddr(AT + 0x1000), data.to_vec(), false);
        check_plans(&PatchPlanner::new(code, &ranges, &[], []), &ranges, &[]);
        files += 1;
    }
    assert!(files > 0);
}
