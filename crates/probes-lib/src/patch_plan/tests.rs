//! Plans of small pieces of code, and of bytes that are not code.

use iced_x86::code_asm::{CodeAssembler, byte_ptr, eax, qword_ptr, rax, rcx, rdi};
use iced_x86::{Instruction, Mnemonic, Register};

use super::*;
use crate::address::{LiveAddr, LoadBias};
use jump::Jump;

mod any_bytes;
mod codes;
mod few_functions;
mod handwritten;
mod jump_targets;
mod labels;
mod leaning;
mod sections;
mod sites;
mod sources;

const AT: u64 = 0x40_1000;
/// What assemblers write between functions: `cs nopw 0(%rax,%rax,1)`.
const NOPS: &[u8] = b"\x66\x2e\x0f\x1f\x84\0\0\0\0\0";

/// Returns a planner of functions that follow one another, and their ranges, without the `NOPS` at their ends.
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

/// Returns a planner of one function, at fixed addresses if `is_fixed`, with data at `AT + 0x1000`; and the function's
/// range.
fn with_data(code: &[u8], data: &[u8], is_fixed: bool) -> (PatchPlanner, CodeRange) {
    let range = CodeRange {
        start: FileAddr(AT),
        len: code.len() as u64,
    };
    let mut bytes = Code::default();
    bytes.add(FileAddr(AT), code.to_vec(), true);
    bytes.add(FileAddr(AT + 0x1000), data.to_vec(), false);
    if is_fixed {
        bytes.set_fixed();
    }
    (PatchPlanner::new(bytes, &[range], &[], []), range)
}

/// Returns a table of offsets at `AT + 0x1000` that lead to `AT` plus each of the entries.
fn offsets(entries: &[i32]) -> Vec<u8> {
    let entry = |it: &i32| (it - 0x1000).to_le_bytes();
    entries.iter().flat_map(entry).collect()
}

/// lea AT+0x1000(%rip),%rdx; movslq (%rdx,%rax,4),%rax; add %rdx,%rax; jmp *%rax
const SWITCH: &[u8] = b"\x48\x8d\x15\xf9\x0f\0\0\x48\x63\x04\x82\x48\x01\xd0\xff\xe0";

/// Returns the candidates for a patch of the entry of the first of these functions.
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
    let candidates = entry(&[b"\x53\xb8\x01\0\0\0\xc3"]).unwrap();
    assert_eq!(candidates.len(), 1);
    assert_eq!(candidates[0].jump(), Jump::Near { padding: 0 });
    assert_eq!(candidates[0].displaced(), b"\x53\xb8\x01\0\0\0");
}

#[test]
fn padding_after_a_short_function_is_used() {
    let short = [b"\x31\xc0\xc3", NOPS].concat();
    let candidates = entry(&[&short, b"\x31\xc0\xc3"]).unwrap();
    assert_eq!(candidates[0].jump(), Jump::Near { padding: 2 });
    assert_eq!(candidates[0].displaced(), b"\x31\xc0\xc3");
    // Not if something jumps there: `jmp .-9` to the padding's second byte.
    let candidates = entry(&[&short, b"\xeb\xf5"]).unwrap();
    assert!(matches!(candidates[0].jump(), Jump::Punned { .. }));
}

#[test]
fn loop_at_four_is_punned_upwards() {
    // sub $8,%rsp; loop: cmp $1,%rax; jne loop; add $8,%rsp; ret
    let bytes = b"\x48\x83\xec\x08\x48\x83\xf8\x01\x75\xfa\x48\x83\xc4\x08\xc3";
    let candidates = entry(&[bytes]).unwrap();
    let punned = Jump::Punned {
        chosen: 3,
        displacement: 0x4800_0000,
    };
    assert_eq!(candidates[0].jump(), punned);
    let start = AT + 5 + 0x4800_0000;
    let window = LiveAddr(start)..LiveAddr(start + (16 << 20));
    assert_eq!(candidates[0].trampolines(LoadBias::NONE), window);
    let to = LiveAddr(start + 0x12_3456);
    let writes = candidates[0].writes(LoadBias::NONE, to).unwrap();
    assert_eq!(writes, [(LiveAddr(AT), b"\xe9\x56\x34\x12".to_vec())]);
    assert_eq!(candidates[0].writes(LoadBias::NONE, LiveAddr(AT)), None);
}

#[test]
fn jump_over_a_prefix_is_a_target() {
    // lock incl (%rdi); xor %eax,%eax; ret; jmp over the lock prefix.
    let refusal = entry(&[b"\xf0\xff\x07\x31\xc0\xc3\xeb\xf9"]).unwrap_err();
    assert_eq!(refusal, Refusal::BranchTarget { offset: 1 });
}

#[test]
fn call_after_a_nop_is_a_target() {
    // As runtime.goexit of Go: nop; call; nop. Only the nop may be overwritten.
    for displacement in [b"\x1a\x25\0\0", b"\xf0\xff\xff\xff"] {
        let bytes = [b"\x90\xe8", &displacement[..], b"\x90"].concat();
        let candidates = entry(&[&bytes]).unwrap();
        assert!(candidates.iter().all(|it| it.displaced() == b"\x90"));
        let writes_one = |it: &PatchSite| matches!(it.jump(), Jump::Punned { chosen: 0, .. });
        assert!(candidates.iter().all(writes_one));
    }
    // Where there is no room for such a jump, here in the code itself.
    let refusal = entry(&[b"\x90\xe8\0\0\0\0\x90", &[0xcc; 0x200]]).unwrap_err();
    assert_eq!(refusal, Refusal::BranchTarget { offset: 1 });
}

#[test]
fn call_after_the_entry_stays() {
    // sub $8,%rsp; call; add $8,%rsp; ret: the call's e8 is the jump's last byte.
    let bytes = b"\x48\x83\xec\x08\xe8\0\0\0\0\x48\x83\xc4\x08\xc3";
    let candidates = entry(&[bytes]).unwrap();
    let displacement = 0xe800_0000_u32 as i32;
    assert_eq!(
        candidates[0].jump(),
        Jump::Punned {
            chosen: 3,
            displacement
        }
    );
    assert!(!candidates[0].moves_call() && candidates[1].moves_call());
    // At fixed addresses there is nothing 384 MiB below.
    let at_fixed = |bytes: &[u8]| {
        let mut code = Code::default();
        code.add(FileAddr(AT), bytes.to_vec(), true);
        code.set_fixed();
        let range = CodeRange {
            start: FileAddr(AT),
            len: 14,
        };
        let plan = PatchPlanner::new(code, &[range], &[], []).function(range);
        plan.entry.unwrap()
    };
    let candidates = at_fixed(bytes);
    assert!(candidates.len() == 1 && candidates[0].jump() == Jump::Near { padding: 0 });
    // With padding nearby, a short jump does not displace the call either.
    let candidates = at_fixed(&[bytes, NOPS].concat());
    let island = FileAddr(AT + 14);
    assert!(candidates[0].jump() == Jump::Near { padding: 0 } && candidates[0].moves_call());
    assert_eq!(candidates[1].jump(), Jump::Short { island });
    assert_eq!(candidates[1].displaced(), b"\x48\x83\xec\x08");
    assert!(!candidates[1].moves_call());
}

#[test]
fn patch_comes_after_endbr64() {
    let candidates = entry(&[b"\xf3\x0f\x1e\xfa\xb8\x01\0\0\0\xc3"]).unwrap();
    assert_eq!(candidates[0].address(), FileAddr(AT + 4));
}

#[test]
fn island_is_reached_by_a_short_jump() {
    let after_island = b"\x38\xc0\xff\xff\xff\x7f\xeb\xfa";
    let island = [b"\xc3", NOPS].concat();
    // cmp %al,%al; a nop; jmp to the nop, so that the last three bytes of a near jump are fixed.
    let (planner, ranges) = planner_of(&[b"\x38\xc0\x0f\x1f\0\xeb\xfb", &island, after_island]);
    let plan = planner.function(ranges[0]);
    let candidates = plan.entry.unwrap();
    let short = candidates
        .iter()
        .find_map(|candidate| match candidate.jump() {
            Jump::Short { island } => Some((candidate, island)),
            _ => None,
        });
    let (candidate, island) = short.unwrap();
    assert_eq!(
        (candidate.displaced(), island),
        (&b"\x38\xc0"[..], FileAddr(AT + 8))
    );
    let writes = candidate
        .writes(LoadBias::NONE, LiveAddr(AT + 0x1000))
        .unwrap();
    let near = (LiveAddr(AT + 8), b"\xe9\xf3\x0f\0\0".to_vec());
    assert_eq!(writes, [near, (LiveAddr(AT), b"\xeb\x06".to_vec())]);
}

#[test]
fn exits_do_not_overlap_the_entry() {
    // The return is in the entry's jump, or right after it.
    let (planner, ranges) = planner_of(&[b"\x48\x8b\x07\xc3\xcc", b"\x48\x8b\x47\x08\x90\xc3"]);
    for range in ranges {
        let exits = planner.function(range).exits.unwrap();
        assert_eq!(
            (exits.sites.len(), exits.entry.exits().len()),
            (0, 1),
            "{exits:?}"
        );
        assert_eq!(exits.entry.displaced().last(), Some(&0xc3));
    }
}

#[test]
fn entries_are_extended_by_at_most_eight_instructions() {
    // mov $1,%eax; nops; ret, whose jump would be on two pages, the boundary being five bytes after the mov.
    let function = |nops: usize| {
        let bytes = [&b"\xb8\x01\0\0\0"[..], &vec![0x90; nops], b"\xc3"].concat();
        let range = CodeRange {
            start: FileAddr(0x2000 - 10),
            len: bytes.len() as u64,
        };
        let mut code = Code::default();
        code.add(range.start, bytes, true);
        let exits = PatchPlanner::new(code, &[range], &[], [])
            .function(range)
            .exits;
        exits.map(|it| (it.sites.len(), it.entry.displaced().len()))
    };
    assert_eq!(function(7), Ok((0, 13)));
    assert!(function(8).is_err());
}

#[test]
fn entries_are_extended_over_straight_code() {
    // Either je to the next function or mov $1,%eax; then pop %rax; ret. The next function jumps to itself, or to the pop.
    let exits = |entry: &[u8], jump: &[u8]| {
        let function = [entry, b"\x58\xc3"].concat();
        let (planner, ranges) = planner_of(&[&function, &[b"\x90", jump].concat()]);
        planner.function(ranges[0]).exits.map(|it| it.sites.len())
    };
    let (je, mov) = (b"\x0f\x84\x02\0\0\0", b"\xb8\x01\0\0\0");
    assert_eq!(exits(mov, b"\xeb\xfe"), Ok(0));
    assert!(exits(je, b"\xeb\xfe").is_err());
    assert!(exits(mov, b"\xeb\xfb").is_err());
}

#[test]
fn exits_have_the_jump_with_most_room() {
    // cmp $1,%eax; je to the next function; call *%rax; L: dec %rdi; jne L; mov $1,%eax; ret
    let function = b"\x3d\x01\0\0\0\x74\x0d\xff\xd0\x48\xff\xcf\x75\xfb\xb8\x01\0\0\0\xc3";
    let (planner, ranges) = planner_of(&[function, b"\xb8\x02\0\0\0\xc3"]);
    let exits = planner.function(ranges[0]).exits.unwrap();
    let punned = Jump::Punned {
        chosen: 3,
        displacement: 0x4800_0000,
    };
    assert_eq!(exits.sites[0].jump(), punned);
    assert_eq!(exits.sites[0].displaced(), b"\x74\x0d\xff\xd0");
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
fn refusals_say_why() {
    let refusal = |bytes: &[u8]| entry(&[bytes]).unwrap_err().to_string();
    assert_eq!(refusal(b"\xc3"), "is too short: 1 byte, and a jump takes 5");
    assert_eq!(refusal(b""), "is not in the code of its file");
    // After its endbr64, another function may begin.
    assert_eq!(
        refusal(b"\xf3\x0f\x1e\xfa"),
        "has a branch target at +0x4, inside the bytes that the jump to its trampoline would take"
    );
    assert_eq!(
        refusal(b"\x53\x06\x90\x90\x90\x90"),
        "has bytes at +0x1 that are not an instruction"
    );
    assert_eq!(
        refusal(b"\x0f\x05\xc3"),
        "has a system call at +0x0, which cannot be moved"
    );
    // A branch target at +1; the bytes from there on, as the displacement of a jump, lead into the program itself.
    assert_eq!(
        refusal(b"\x53\0\0\0\0\0\0\xeb\xf8"),
        "has a branch target at +0x1, inside the bytes that the jump to its trampoline would take"
    );
    let (planner, ranges) = planner_of(&[b"\xb8\x01\0\0\0\xc3"]);
    let inside = planner.instruction(ranges[0], FileAddr(AT + 1));
    assert_eq!(inside, Err(Refusal::NoInstruction { offset: 1 }));
}

#[test]
fn instructions_of_a_block_are_executed_together() {
    // push %rbx; sub $8,%rsp; loop: cmp $1,%rax; push %rax; jne loop; push %rbx; call f; pop %rbx; ret; and f.
    let bytes = b"\x53\x48\x83\xec\x08\x48\x83\xf8\x01\x50\x75\xf9\x53\xe8\x02\0\0\0\x5b\xc3";
    let (planner, ranges) = planner_of(&[bytes, b"\xc3"]);
    let with = |offset: u64| {
        let found = planner.executed_with(ranges[0], FileAddr(AT + offset));
        found.iter().map(|it| it.0 - AT).collect::<Vec<u64>>()
    };
    assert_eq!(with(0), [1]);
    assert_eq!(with(1), [0]);
    assert_eq!(with(5), [9, 10]);
    assert_eq!(with(9), [10, 5]);
    assert_eq!(with(10), [9, 5]);
    assert_eq!(with(12), [13]);
    assert_eq!(with(13), [12]);
    assert_eq!(with(18), [19]);
    assert!(with(2).is_empty());
}

#[test]
fn refusals_are_documented() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/functions.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in <Refusal as strum::VariantNames>::VARIANTS {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn copies_refer_to_the_same_addresses() {
    let bytes = assembled(|a| {
        a.mov(rax, qword_ptr(AT + 0x100)).unwrap();
    });
    let candidates = entry(&[&[&bytes[..], b"\xc3"].concat()]).unwrap();
    for to in [AT + 0x1_0000, AT - 0x1_0000] {
        let copy = candidates[0].copy_at(LoadBias::NONE, LiveAddr(to)).unwrap();
        let copied: Vec<_> = code::decode(copy.code(), to).collect();
        assert_eq!(copied[0].memory_displacement64(), AT + 0x100);
        assert_eq!(copied[1].near_branch_target(), AT + bytes.len() as u64);
        assert_eq!(copy.moved(LiveAddr(AT)), Some(LiveAddr(to)));
    }
    let far = candidates[0].copy_at(LoadBias::NONE, LiveAddr(AT + (3 << 30)));
    assert_eq!(far, Err(Refusal::OutOfReach));
}

#[test]
fn displaced_call_pushes_its_own_return_address() {
    // call *8(%rsp), which is displaced; nop; ret
    let bytes = b"\xff\x54\x24\x08\x90\xc3";
    let copy = displaced::DisplacedCopy::make(&bytes[..4], LiveAddr(AT), LiveAddr(AT + 0x1000));
    let copy = copy.unwrap();
    let copied: Vec<_> = code::decode(copy.code(), AT + 0x1000).take(2).collect();
    let word = copied[0].ip_rel_memory_address() - AT - 0x1000;
    // It is aligned, so that it is not on two pages.
    assert_eq!(word % 8, 0);
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
fn branches_in_copies_keep_their_targets() {
    let from = 0x1_0000_0000;
    // je, jmp, loop, jrcxz, jecxz, each to itself or close to it; a near je.
    let branches: [&[u8]; 6] = [
        b"\x74\xfe",
        b"\xeb\xfe",
        b"\xe2\xfe",
        b"\xe3\x10",
        b"\x67\xe3\xf0",
        b"\x0f\x84\xf7\xff\xfe\xff",
    ];
    for branch in branches {
        let target = code::decode(branch, from)
            .next()
            .unwrap()
            .near_branch_target();
        let copy = |to| displaced::DisplacedCopy::make(branch, LiveAddr(from), LiveAddr(to));
        for to in [from + 0x1000, from - 0x7fff_0000, from + 0x7ffe_0000] {
            let copied = copy(to).unwrap();
            let copied: Vec<_> = code::decode(copied.code(), to).collect();
            let leads = |it: &Instruction| it.near_branch_target();
            assert!(copied.iter().any(|it| leads(it) == target), "{copied:x?}");
            // Execution goes on after the branch, unless it is a `jmp`.
            let goes_on = copied
                .iter()
                .any(|it| leads(it) == from + branch.len() as u64);
            assert_eq!(goes_on, branch[0] != 0xeb, "{copied:x?}");
            assert!(copied.iter().all(|it| leads(it) != to && !it.is_invalid()));
        }
    }
    let far = b"\x0f\x84\xf7\xff\xfe\xff";
    let to = LiveAddr(from + 6 + 0x7fff_8000);
    let copy = displaced::DisplacedCopy::make(far, LiveAddr(from), to);
    assert_eq!(copy, Err(Refusal::OutOfReach));
}

#[test]
fn calls_below_the_stack_pointer_stay() {
    // call *-8(%rsp), *-15(%rsp), *-16(%rsp), *0(%rsp), *8(%rsp), *8(%rsp,%rax), *%rsp, *(%rax), *8(%esp)
    for (call, moves) in [
        (&b"\xff\x54\x24\xf8"[..], false),
        (b"\xff\x54\x24\xf1", false),
        (b"\xff\x54\x24\xf0", true),
        (b"\xff\x54\x24\x00", true),
        (b"\xff\x54\x24\x08", true),
        (b"\xff\x54\x04\x08", false),
        (b"\xff\xd4", false),
        (b"\xff\x10", true),
        (b"\x67\xff\x54\x24\x08", false),
    ] {
        let call = code::decode(call, AT).next().unwrap();
        assert_eq!(displaced::unmovable(&call).is_none(), moves, "{call:?}");
    }
}

#[test]
fn flags_live_where_a_comparison_is_returned() {
    // cmp %rsi,%rdi, or sub; a nop; ret. The return is displaced with the entry, or by an exit of its own.
    for (compare, live) in [(&b"\x48\x39\xf7"[..], true), (b"\x48\x29\xf7", false)] {
        for before in [&b""[..], &[0x90; 40]] {
            let function = [before, compare, b"\x66\x90\xc3"].concat();
            let (planner, ranges) = planner_of(&[&function, b"\x31\xc0\xc3"]);
            let plan = planner.function(ranges[0]);
            let offset = function.len() as u64 - 1;
            let refusal = live.then_some(Refusal::LiveFlags { offset });
            assert!(plan.entry.is_ok());
            assert_eq!(plan.exits.err(), refusal, "{function:x?}");
        }
    }
}

#[test]
fn flags_live_at_jumps_into_functions() {
    // cmp %rsi,%rdi; a nop; jmp to the second instruction of the next function, a jc, or to its first, a test.
    let other = b"\x85\xc0\x72\x02\x31\xc0\xc3";
    for (to, are_dead) in [(2, false), (0, true)] {
        let function = [&b"\x48\x39\xf7\x66\x90\xe9"[..], &[to, 0, 0, 0]].concat();
        let (planner, ranges) = planner_of(&[&function, other]);
        let exits = planner.exits(ranges[0], |_| Ok(())).unwrap().remove(0);
        assert_eq!(exits.sites[0].exits()[0].flags_are_dead, are_dead);
        // With live flags, it can be counted, and not timed.
        let plan = planner.function(ranges[0]);
        let live = (!are_dead).then_some(Refusal::LiveFlags { offset: 5 });
        assert!(plan.entry.is_ok());
        assert_eq!(plan.exits.err(), live);
    }
}

#[test]
fn loops_to_a_patched_entry_are_exits() {
    // endbr64; mov %rsi,(%rdi); mov %rdi,%rax; dec %rsi; jne to the first mov; mov $1,%eax; add $8,%rsp; ret
    let entry = b"\xf3\x0f\x1e\xfa\x48\x89\x37\x48\x89\xf8\x48\xff\xce\x75\xf5";
    let exit = b"\xb8\x01\0\0\0\x48\x83\xc4\x08\xc3";
    let (planner, ranges) = planner_of(&[&[&entry[..], exit].concat()]);
    let plan = planner.function(ranges[0]);
    assert_eq!(plan.entry.unwrap()[0].address(), FileAddr(AT + 4));
    let exits = planner.exits(ranges[0], |_| Ok(())).unwrap().remove(0);
    let addresses: Vec<u64> = exits.sites.iter().map(|it| it.address().0 - AT).collect();
    assert_eq!(addresses, [13, 20]);
}

#[test]
fn jumps_between_parts_are_no_exits() {
    // xor %eax,%eax; 3 nops; jmp to the part: jne to its own start; mov $1,%eax; ret
    let function = b"\x31\xc0\x90\x90\x90\xe9\0\0\0\0";
    let part = b"\x75\xfe\xb8\x01\0\0\0\xc3";
    let (_, ranges) = planner_of(&[function, part]);
    let mut code = Code::default();
    code.add(FileAddr(AT), [&function[..], part].concat(), true);
    let planner = PatchPlanner::new(code, &ranges[..1], &ranges[1..], []);
    let exits = planner.function(ranges[0]).exits.unwrap();
    assert_eq!(exits.sites.len(), 1, "{exits:?}");
    assert_eq!(exits.sites[0].jump(), Jump::Near { padding: 0 });
}

#[test]
fn falling_through_is_no_exit() {
    // Three functions that end after mov $1,%eax; with a call, which does not return; with ret and padding.
    let (planner, ranges) = planner_of(&[
        b"\xb8\x01\0\0\0",
        b"\xb8\x01\0\0\0\xe8\0\0\0\0",
        b"\xb8\x01\0\0\0\xc3\x90",
    ]);
    let refusal = planner.function(ranges[0]).exits.unwrap_err();
    assert_eq!(refusal, Refusal::FallsThrough { offset: 0 });
    assert!(planner.function(ranges[1]).exits.is_ok());
    assert!(planner.function(ranges[2]).exits.is_ok());
}

#[test]
fn probe_sites_stay() {
    // sub $8,%rsp; then a site that a loop goes to; mov $1,%eax; jmp to the site
    let bytes = b"\x48\x83\xec\x08\x90\x3d\0\0\0\0\xb8\x01\0\0\0\xeb\xf3";
    let at = |offset, len| CodeRange {
        start: FileAddr(AT + offset),
        len,
    };
    let refusal = |site: Option<CodeRange>, offset| {
        let mut code = Code::default();
        code.add(FileAddr(AT), bytes.to_vec(), true);
        site.into_iter().for_each(|site| code.add_foreign(site));
        let planner = PatchPlanner::new(code, &[at(0, 17)], &[], []);
        planner.instruction(at(0, 17), FileAddr(AT + offset)).err()
    };
    assert_eq!((refusal(None, 0), refusal(None, 4)), (None, None));
    // Its first byte would be the last one of the entry's jump.
    let site = Some(at(4, 6));
    assert_eq!(refusal(site, 0), Some(Refusal::BranchTarget { offset: 4 }));
    let unmovable = refusal(site, 4).unwrap().to_string();
    assert_eq!(unmovable, "has a probe site at +0x4, which cannot be moved");
    assert_eq!(refusal(site, 10), None);
}

#[test]
fn restartable_sequences_stay() {
    // mov $1,%eax; mov $2,%eax; mov %rdx,(%rdi); ret: the last mov ends a sequence that begins with the second one.
    let bytes = b"\xb8\x01\0\0\0\xb8\x02\0\0\0\x48\x89\x17\xc3";
    let at = |offset, len| CodeRange {
        start: FileAddr(AT + offset),
        len,
    };
    let mut code = Code::default();
    code.add(FileAddr(AT), bytes.to_vec(), true);
    code.add_restartable(at(5, 8));
    let planner = PatchPlanner::new(code, &[at(0, 14)], &[], []);
    assert!(planner.function(at(0, 14)).entry.is_ok());
    for offset in [5, 10] {
        let refusal = planner.instruction(at(0, 14), FileAddr(AT + offset));
        let what = "an instruction of a restartable sequence";
        assert_eq!(refusal.unwrap_err(), Refusal::Unmovable { offset, what });
    }
}

#[test]
fn results_in_the_x87_unit_are_kept() {
    // sub $8,%rsp; test %edi,%edi; je end; mov $1,%eax; call *%rax; mov $2,%edx; mov $3,%eax; call *%rax;
    // mov $4,%edx; end: add $8,%rsp; ret
    let bytes = b"\x48\x83\xec\x08\x85\xff\x74\x18\xb8\x01\0\0\0\xff\xd0\xba\x02\0\0\0\xb8\x03\0\0\0\xff\xd0\xba\x04\0\0\0\x48\x83\xc4\x08\xc3";
    let (planner, ranges) = planner_of(&[bytes]);
    // Before a call, nothing is in the unit.
    for (offset, is_free) in [(0, true), (8, true), (15, true), (27, false), (32, false)] {
        let sites = planner
            .instruction(ranges[0], FileAddr(AT + offset))
            .unwrap();
        assert_eq!(sites[0].mmx_is_free(), is_free, "{offset}");
    }
}

#[test]
fn islands_are_reserved() {
    let site = PatchSite {
        address: FileAddr(AT),
        displaced: vec![0x31, 0xc0],
        jump: Jump::Short {
            island: FileAddr(AT + 8),
        },
        moves_call: false,
        flags_are_dead: false,
        exits: Vec::new(),
        mmx_is_free: true,
    };
    let reserved: Vec<_> = site.reserved().collect();
    let range = |start, end| FileAddr(AT + start)..FileAddr(AT + end);
    assert_eq!(reserved, [range(0, 2), range(8, 13)]);
}

#[test]
fn endbr64_is_a_target() {
    // Even if nothing refers to it, and in the middle of an instruction.
    let (planner, _) = planner_of(&[b"\x90\xb8\xf3\x0f\x1e\xfa\xc3"]);
    assert!(planner.swept.targets.contains(AT + 2));
}

#[test]
fn functions_that_are_too_large_are_refused() {
    // 10,000 functions of the same code: to decode it for each would take too long.
    let code = vec![0x90; 0x1000];
    let whole = CodeRange {
        start: FileAddr(AT),
        len: 0x1000,
    };
    let small = CodeRange { len: 16, ..whole };
    let mut functions = vec![whole; 10_000];
    functions.push(small);
    let mut bytes = Code::default();
    bytes.add(FileAddr(AT), code, true);
    let planner = PatchPlanner::new(bytes.clone(), &functions, &[], []);
    assert!(planner.function(small).entry.is_ok());
    let refusal = planner.function(whole).entry.unwrap_err();
    assert_eq!(refusal, Refusal::TooLarge { len: 0x1000 });
    // One function of this length is not too large.
    let planner = PatchPlanner::new(bytes, &[whole, small], &[], []);
    assert!(planner.function(whole).entry.is_ok());
    let mut bytes = Code::default();
    let len = (4 << 20) + 1;
    bytes.add(FileAddr(AT), vec![0x90; len as usize], true);
    let range = CodeRange { len, ..whole };
    let plan = PatchPlanner::new(bytes, &[range], &[], []).function(range);
    assert_eq!(plan.entry, Err(Refusal::TooLarge { len }));
}

#[test]
fn many_exits_are_planned() {
    // 200,000 returns with padding, none of them on two pages. There are 20 billion pairs of them: to compare all
    // would take too long.
    let bytes = b"\xc3\xcc\xcc\xcc\xcc\xcc\xcc\xcc".repeat(200_000);
    let bytes = [b"\xb8\x01\0\0\0\x90\x90\x90", &bytes[..]].concat();
    let (planner, ranges) = planner_of(&[&bytes]);
    let exits = planner.function(ranges[0]).exits.unwrap();
    assert_eq!(exits.sites.len(), 200_000);
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

/// The copy of an entry, with `nop` as the code at exits.
fn copy_of_entry(exits: &ExitPlan) -> Vec<Instruction> {
    let mut at_exit = |_, _| Ok(vec![0x90]);
    let to = LiveAddr(AT + 0x1000);
    let copy = exits
        .entry
        .copy_with_exits(LoadBias::NONE, to, &mut at_exit);
    code::decode(copy.unwrap().code(), to.0).collect()
}

#[test]
fn exits_of_an_entry_have_their_code() {
    let mnemonics = |copy: &[Instruction]| copy.iter().map(|it| it.mnemonic()).collect::<Vec<_>>();
    // mov (%rdi),%rax; ret
    let (planner, ranges) = planner_of(&[b"\x48\x8b\x07\xc3\xcc"]);
    let exits = planner.function(ranges[0]).exits.unwrap();
    let copy = copy_of_entry(&exits);
    assert_eq!(
        mnemonics(&copy),
        [Mnemonic::Mov, Mnemonic::Nop, Mnemonic::Ret]
    );

    // test %edi,%edi; je to the next function; nop; nop; mov $1,%eax; ret
    let other = b"\x31\xc0\x90\x90\x90\x90\x90\xc3";
    let function = b"\x85\xff\x0f\x84\x08\0\0\0\x90\x90\xb8\x01\0\0\0\xc3";
    let (planner, ranges) = planner_of(&[function, other]);
    let exits = planner.function(ranges[0]).exits.unwrap();
    assert_eq!(exits.entry.exits().len(), 1, "{exits:?}");
    let copy = copy_of_entry(&exits);
    let expected = [
        Mnemonic::Test,
        Mnemonic::Je,
        Mnemonic::Jmp,
        Mnemonic::Nop,
        Mnemonic::Jmp,
    ];
    assert_eq!(mnemonics(&copy), expected);
    let targets = [1, 2, 4].map(|index: usize| copy[index].near_branch_target());
    assert_eq!(targets, [copy[3].ip(), AT + 8, ranges[1].start.0]);
}

#[test]
fn raises_are_no_exits() {
    // test %edi,%edi; je over; mov 16(%r14),%rsp; pop 16(%r14); pop %r11; jmp *%r11; over: mov $1,%eax; ret
    let raise = b"\x49\x8b\x66\x10\x41\x8f\x46\x10\x41\x5b\x41\xff\xe3";
    let function = [
        &b"\x85\xff\x74\x0d"[..],
        raise,
        b"\xb8\x01\0\0\0\xc3\xcc\xcc\xcc\xcc",
    ];
    let (planner, ranges) = planner_of(&[&function.concat()]);
    let exits = planner.function(ranges[0]).exits.unwrap();
    assert_eq!(exits.sites.len(), 1, "{exits:?}");
    assert_eq!(exits.sites[0].displaced().last(), Some(&0xc3));
}

#[test]
fn unknown_jumps_with_a_red_zone_are_refused() {
    // jmp *(%rdi), in a function that stores below the stack pointer, and in one that only computes an address there.
    let jump = b"\xff\x27\xcc\xcc\xcc\xcc";
    let stored = [&b"\x48\x89\x7c\x24\xf8"[..], jump].concat();
    let computed = [&b"\x48\x8d\x7c\x24\xf8"[..], jump].concat();
    let (planner, ranges) = planner_of(&[&stored, &computed]);
    let refused = planner.function(ranges[0]).exits;
    assert_eq!(refused, Err(Refusal::UnknownTargets { offset: 5 }));
    assert_eq!(
        planner.function(ranges[1]).exits.map(|it| it.sites.len()),
        Ok(1)
    );
}
