//! What code is, where its functions end, and what of it refers to other code.

use super::*;
use crate::patch_plan::code::Contents;

fn range(start: u64, len: u64) -> CodeRange {
    CodeRange {
        start: FileAddr(AT + start),
        len,
    }
}

#[test]
fn segments_end_below_the_upper_half() {
    let add = |start: u64, len: usize| Code::default().add(FileAddr(start), vec![0xc3; len], true);
    assert!(add((1 << 63) - 16, 16) && !add((1 << 63) - 16, 17) && !add(u64::MAX, 2));
    let mut code = Code::default();
    let added = (0..1000).take_while(|it| code.add(FileAddr(AT + 64 * it), vec![0xc3; 8], true));
    let many = added.count();
    assert_eq!((many, code.len()), (64, 64 * 8));
    assert!(code.add_contents(FileAddr(0), vec![], Contents::Data) || many == 64);
}

#[test]
fn only_data_is_relocated() {
    let mut code = Code::default();
    code.add(FileAddr(0x1000), vec![0xc3; 16], true);
    code.add(FileAddr(0x2000), vec![0; 16], false);
    for at in [0x1000, 0x2008, 0x200c, 0x3000] {
        code.relocate(FileAddr(at), FileAddr(0x1234_5678));
    }
    assert_eq!(code.bytes(0x1000, 16), [0xc3; 16]);
    // Not the last four bytes either.
    let word = 0x1234_5678_u64.to_le_bytes();
    assert_eq!(code.bytes(0x2000, 16), [[0; 8], word].concat());
    let words: Vec<u64> = code.data_words().map(|it| it.0).collect();
    assert_eq!(words[2..], [0, 0x1234_5678]);
}

#[test]
fn functions_are_whole_and_executable() {
    let mut code = Code::default();
    code.add(FileAddr(AT), vec![0x90; 16], true);
    code.add(FileAddr(AT + 0x1000), vec![0x90; 16], false);
    let body = |start, len| code.body(range(start, len)).map(|it| it.instructions.len());
    assert_eq!((body(0, 16), body(4, 12)), (Ok(16), Ok(12)));
    for (start, len) in [(0, 17), (0, 0), (0x1000, 16), (0x20, 1)] {
        assert_eq!(body(start, len), Err(Refusal::NotCode), "{start:x} {len}");
    }
    assert!(code.is_executable(AT) && !code.is_executable(AT + 16));
    assert!(!code.is_executable(AT + 0x1000));
    assert!(code.is_label(AT + 16) && !code.is_label(AT + 17));
}

#[test]
fn tables_are_not_in_sections_of_code() {
    use code::Contents::{Both, Code as OnlyCode, Data};
    let mut code = Code::default();
    for (start, contents) in [(0, OnlyCode), (0x10, Both), (0x20, Data)] {
        assert!(code.add_contents(FileAddr(AT + start), vec![0x90; 16], contents));
    }
    let is_data = [0, 0xf, 0x10, 0x20, 0x2f, 0x30].map(|it| code.is_data(AT + it));
    assert_eq!(is_data, [false, false, true, true, true, false]);
}

#[test]
fn memory_may_have_room_outside_the_object() {
    let mut code = Code::default();
    code.add(FileAddr(0x10_0000), vec![0x90; 0x1000], true);
    let has_room = |code: &Code, window: std::ops::Range<i128>| code.may_have_room(&window);
    assert!(!has_room(&code, 0x10_0000..0x10_1000) && !has_room(&code, 0x10_0010..0x10_0020));
    assert!(has_room(&code, 0x0f_ffff..0x10_1000) && has_room(&code, 0x10_0000..0x10_1001));
    // Where it is loaded is not known, unless that is fixed.
    let low = -0x100..0x1_0000;
    let end = (1 << 47) - 0x1000;
    assert!(has_room(&code, low.clone()) && has_room(&code, end..end + 8));
    code.set_fixed();
    assert!(!has_room(&code, low) && !has_room(&code, end..end + 8));
    assert!(has_room(&code, -0x100..0x1_0001) && has_room(&code, end - 1..end + 8));
}

#[test]
fn longest_functions_are_left_out_if_many_overlap() {
    // All but the first of these functions are the whole code: together they are many times as much.
    let len = 1 << 18;
    let planner = |many: usize| {
        let mut code = Code::default();
        code.add(FileAddr(AT), vec![0x90; len as usize], true);
        let mut functions = vec![range(0, 16)];
        functions.extend(vec![range(0, len); many]);
        PatchPlanner::new(code, &functions, &[], [])
    };
    // Eight times the code, and one MiB more.
    let is_left_out = |many| {
        let planner = planner(many);
        assert!(planner.function(range(0, 16)).entry.is_ok());
        planner.function(range(0, len)).entry == Err(Refusal::TooLarge { len })
    };
    assert!(!is_left_out(11) && is_left_out(12));
}

#[test]
fn padding_is_never_executed_or_reached() {
    let jump = |padding: &[u8], other: &[u8]| {
        let short = [&b"\x31\xc0\xc3"[..], padding].concat();
        let mut code = Code::default();
        code.add(FileAddr(AT), [&short[..], other].concat(), true);
        let functions = [range(0, 3), range(short.len() as u64, other.len() as u64)];
        let planner = PatchPlanner::new(code, &functions, &[], []);
        planner.function(functions[0]).entry.unwrap()[0].jump()
    };
    let whole = Jump::Near { padding: 2 };
    let other = b"\x31\xc0\xc3";
    assert_eq!(jump(b"\x90\x90", other), whole);
    assert_eq!(jump(b"\xcc\xcc", other), whole);
    assert_eq!(jump(b"\x66\x90", other), whole);
    // An instruction, one byte of padding, bytes that are none, and data.
    for padding in [&b"\x53\x90"[..], b"\x90", b"\x06\x06", b"\0\0"] {
        assert!(
            matches!(jump(padding, other), Jump::Punned { .. }),
            "{padding:x?}"
        );
    }
}

#[test]
fn references_of_instructions_are_targets() {
    let contains = |bytes: &[u8], offset: u64, is_fixed: bool| {
        let code = [bytes, &[0x90; 0x40][..]].concat();
        let (planner, _) = with_data(&code, &[0; 0x40], is_fixed);
        planner.swept.targets.contains(AT + offset)
    };
    // lea 0x20(%rip), to code; to data; to neither.
    assert!(contains(b"\x48\x8d\x05\x20\0\0\0", 0x27, false));
    let (data, _) = with_data(b"\x48\x8d\x05\xf9\x0f\0\0\xc3", &[0; 8], false);
    assert!(data.swept.targets.contains(AT) && !data.swept.targets.contains(AT + 0xf9));
    // mov 0x20(%rip),%rax is none, nor a short displacement, nor an address if it is not fixed.
    assert!(!contains(b"\x48\x8b\x05\x20\0\0\0", 0x27, true));
    let address = (AT as u32 + 0x20).to_le_bytes();
    let moved = [&[0xb8], &address[..]].concat();
    assert!(contains(&moved, 0x20, true) && !contains(&moved, 0x20, false));
    // call +0x10, and what follows it.
    let call = b"\xe8\x10\0\0\0";
    assert!(contains(call, 0x15, false) && contains(call, 5, false));
    let (planner, _) = with_data(&[&call[..], &[0x90; 0x40]].concat(), &[], false);
    let targets = &planner.swept.targets;
    assert!(targets.is_called(AT + 0x15) && !targets.is_called(AT + 5));
    // jmp +0x10 is no call.
    let (planner, _) = with_data(
        &[&b"\xe9\x10\0\0\0"[..], &[0x90; 0x40]].concat(),
        &[],
        false,
    );
    let targets = &planner.swept.targets;
    assert!(targets.contains(AT + 0x15) && !targets.is_called(AT + 0x15));
    // Whatever branches into code through memory refers to no near place.
    let instruction = |bytes: &[u8]| code::decode(bytes, AT).next().unwrap();
    assert!(instruction::has_near_target(&instruction(call)));
    assert!(!instruction::has_near_target(&instruction(b"\xc3")));
    assert!(!instruction::has_near_target(&instruction(b"\xff\xe0")));
}

#[test]
fn ends_of_blocks_are_where_nothing_falls_through() {
    // jmp -2; 2 nops; ret; 3 nops; mov $1,%eax; ret
    let bytes = b"\xeb\xfe\x90\x90\xc3\x90\x90\x90\xb8\x01\0\0\0\xc3";
    let (planner, _) = planner_of(&[bytes]);
    let ends = |from: u64, to: u64| -> Vec<u64> {
        let ends = planner.swept.targets.after_ends(AT + from..AT + to);
        ends.map(|it| it - AT).collect()
    };
    assert_eq!(ends(0, 100), [2, 5, 14]);
    assert_eq!((ends(2, 14), ends(3, 15)), (vec![2, 5], vec![5, 14]));
}

#[test]
fn entries_of_the_linkage_table_begin_functions() {
    // jmp *0x10(%rip), after endbr64 or not; jmp *%rax; call *0x10(%rip)
    let begins = |bytes: &[u8]| {
        let code = [bytes, &[0x90; 0x40][..]].concat();
        let mut all = Code::default();
        all.add(FileAddr(AT), code, true);
        PatchPlanner::new(all, &[], &[], [])
            .swept
            .begins_function(AT)
    };
    assert!(begins(b"\xff\x25\x10\0\0\0") && begins(b"\xf3\x0f\x1e\xfa\xff\x25\x10\0\0\0"));
    assert!(!begins(b"\xff\xe0") && !begins(b"\xff\x15\x10\0\0\0") && !begins(b"\x90"));
}

#[test]
fn exits_displace_what_is_before_them() {
    let plan = |bytes: &[u8]| {
        let (planner, ranges) = planner_of(&[bytes, b"\xb8\x01\0\0\0\xc3"]);
        let plan = planner.function(ranges[0]).exits?;
        let all = [&plan.entry].into_iter().chain(&plan.sites);
        let all = all.map(|it| {
            let exits = it.exits().iter().map(|it| it.offset).collect::<Vec<_>>();
            (it.address().0 - AT, it.displaced().len(), exits)
        });
        Ok::<_, Refusal>(all.collect::<Vec<_>>())
    };
    // mov $1,%eax; mov $2,%ecx; pop %rbx; pop %rbp; ret
    let apart = b"\xb8\x01\0\0\0\xb9\x02\0\0\0\x5b\x5d\xc3";
    assert_eq!(plan(apart), Ok(vec![(0, 5, vec![]), (5, 8, vec![7])]));
    // Not over a branch target: xor %eax,%eax; loop: dec %ecx; jne loop... then pop; ret
    let with_loop = b"\xb8\x01\0\0\0\xff\xc9\x75\xfc\xb8\x02\0\0\0\x5b\xc3";
    assert_eq!(plan(with_loop), Ok(vec![(0, 5, vec![]), (9, 7, vec![6])]));
    // Nor over a system call.
    let with_call = b"\xb8\x01\0\0\0\x0f\x05\xc3";
    assert_eq!(plan(with_call), Ok(vec![(0, 5, vec![]), (7, 1, vec![0])]));
    // The result of a function that uses the x87 unit may be in it.
    let (planner, ranges) = planner_of(&[b"\xb8\x01\0\0\0\xd9\xee\xb9\x02\0\0\0\xc3"]);
    let plan = planner.function(ranges[0]).exits.unwrap();
    assert!(!plan.entry.mmx_is_free() && plan.sites.iter().all(|it| !it.mmx_is_free()));
    let (planner, ranges) = planner_of(&[apart]);
    let plan = planner.function(ranges[0]).exits.unwrap();
    assert!(plan.entry.mmx_is_free() && plan.sites[0].mmx_is_free());
}

#[test]
fn data_below_the_stack_pointer_is_seen() {
    // mov $1,%ecx; what accesses memory; mov $2,%ecx; jmp *%rdx, which is no exit for certain.
    let uses = |access: &[u8]| {
        let bytes = [&b"\xb9\x01\0\0\0"[..], access, b"\xb9\x02\0\0\0\xff\xe2"].concat();
        let (planner, ranges) = planner_of(&[&bytes]);
        planner.function(ranges[0]).exits.is_err()
    };
    // mov %rax,-8(%rsp); mov %rax,8(%rsp); lea -8(%rsp),%rax; mov %rax,-8(%rbp); mov %rax,(%rsp)
    assert!(uses(b"\x48\x89\x44\x24\xf8"));
    for other in [
        &b"\x48\x89\x44\x24\x08"[..],
        b"\x48\x8d\x44\x24\xf8",
        b"\x48\x89\x45\xf8",
        b"\x48\x89\x04\x24",
    ] {
        assert!(!uses(other), "{other:x?}");
    }
}

#[test]
fn flags_are_dead_where_they_are_written_first() {
    // What is first executed at the entry's patch, after `nop`: then jne, which reads the flags.
    let are_dead = |bytes: &[u8]| {
        let bytes = [&b"\xb9\x01\0\0\0"[..], bytes, b"\x75\x05\xb8\x01\0\0\0\xc3"].concat();
        let (planner, ranges) = planner_of(&[&bytes]);
        let sites = planner.instruction(ranges[0], FileAddr(AT)).unwrap();
        sites[0].flags_are_dead()
    };
    // cmp $1,%rax; shl $1,%eax; add
    assert!(are_dead(b"\x48\x83\xf8\x01") && are_dead(b"\x48\x01\xd8"));
    // mov; shl %cl,%eax; repe cmpsb: the count may be zero.
    assert!(!are_dead(b"\x48\x89\xd8") && !are_dead(b"\xd3\xe0") && !are_dead(b"\xf3\xa6"));
    // xor %ecx,%ecx, and add %ecx,%eax, which is no shift.
    assert!(are_dead(b"\x31\xc9") && are_dead(b"\x01\xc8") && are_dead(b"\x00\xc8"));
}
