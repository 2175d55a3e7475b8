//! Where jumps through tables and registers lead, and what else in code and data says where something may jump to.

use super::*;

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
fn table_continues_after_cases_outside_the_function() {
    // The switch; neg %esi, to which the first entry leads; mov %esi,%eax; ret. The second leads after the function.
    let function = [SWITCH, b"\xf7\xde\x89\xf0\xc3"].concat();
    let range = CodeRange {
        start: FileAddr(AT),
        len: function.len() as u64,
    };
    let mut code = Code::default();
    code.add(FileAddr(AT), [function, vec![0x90; 0x100]].concat(), true);
    let table = offsets(&[0x10, 0x80, 0x12, 0x2000]);
    code.add(FileAddr(AT + 0x1000), table, false);
    let planner = PatchPlanner::new(code, &[range], &[], []);
    for site in planner.instruction(range, FileAddr(AT + 0x10)).unwrap() {
        assert_eq!(site.displaced(), b"\xf7\xde", "{site:?}");
    }
    // The second entry leads behind the function: this may be an exit.
    let refusal = planner.function(range).exits.unwrap_err();
    assert_eq!(refusal, Refusal::UnknownTargets { offset: 0xe });
}

#[test]
fn constants_do_not_end_a_table() {
    // mov $0x402008,%edi, the address of the table's third entry; the switch, whose cases are three nops and a ret.
    let constant = (AT as u32 + 0x1008).to_le_bytes();
    let mut code = [b"\xbf", &constant[..], SWITCH, b"\x90\x90\x90\xc3\x90\x90"].concat();
    code[5 + 3..5 + 7].copy_from_slice(&(0x1000 - 12_i32).to_le_bytes());
    for is_fixed in [false, true] {
        let (planner, range) = with_data(&code, &offsets(&[0x15, 0x16, 0x17, 0x18]), is_fixed);
        assert!(planner.swept.targets.contains(AT + 0x17));
        assert!(planner.function(range).entry.is_ok());
    }
}

#[test]
fn tables_end_where_the_next_begins() {
    // Two switches with two cases each, nop and ret.
    let second = b"\x48\x8d\x15\xed\x0f\0\0\x48\x63\x04\x82\x48\x01\xd0\xff\xe0";
    let code = [SWITCH, b"\x90\xc3\x90\x90", second, b"\x90\xc3\x90\x90"].concat();
    let entries = [
        [0x10, 0x11].map(|it| it - 0x1000),
        [0x24, 0x25].map(|it| it - 0x1008),
    ];
    let data: Vec<u8> = entries
        .iter()
        .flatten()
        .flat_map(|it: &i32| it.to_le_bytes())
        .collect();
    let range = |start| CodeRange {
        start: FileAddr(AT + start),
        len: 0x14,
    };
    let planner = |code: &[u8]| {
        let mut bytes = Code::default();
        bytes.add(FileAddr(AT), code.to_vec(), true);
        bytes.add(FileAddr(AT + 0x1000), data.clone(), false);
        PatchPlanner::new(bytes, &[range(0), range(0x14)], &[], [])
    };
    // Counted from the start of the first table, the entries of the second lead to 8 bytes below its cases.
    let is_read_too_far = |planner: &PatchPlanner| planner.swept.targets.contains(AT + 0x24 - 8);
    assert!(!is_read_too_far(&planner(&code)));
    // A `lea` whose address no jump uses ends no table.
    let mut unused = code.clone();
    unused[0x1b..0x24].fill(0x90);
    assert!(is_read_too_far(&planner(&unused)));
}

#[test]
fn parts_reached_through_tables_have_exits() {
    // The switch, whose cases are mov $1,%eax; ret, and the part: mov $2,%eax; ret
    let function = [SWITCH, b"\xb8\x01\0\0\0\xc3\x90\x90"].concat();
    let part = b"\xb8\x02\0\0\0\xc3\x90\x90";
    let table = offsets(&[0x10, 0x18]);
    let (_, ranges) = planner_of(&[&function, part, &function]);
    let planner = |functions: &[CodeRange], third: &[u8]| {
        let mut code = Code::default();
        let bytes = [&function[..], part, third].concat();
        code.add(FileAddr(AT), bytes, true);
        code.add(FileAddr(AT + 0x1000), table.clone(), false);
        PatchPlanner::new(code, functions, &ranges[1..2], [])
    };
    let exits = |planner: &PatchPlanner| {
        let exits = planner.function(ranges[0]).exits.map(|it| it.sites);
        exits.map(|sites| {
            sites
                .iter()
                .map(|it| it.address().0 - AT)
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(exits(&planner(&ranges[..1], &[])), Ok(vec![0x10, 0x18]));
    // Another function jumps to the part, so the part is that function's: the table was read too far.
    let jump = b"\x90\x90\x90\xe9\xf0\xff\xff\xff";
    let other = [jump, &[0x90; 16][..]].concat();
    let both = [ranges[0], ranges[2]];
    assert_eq!(exits(&planner(&both, &other)), Ok(vec![0x10]));
    // Both jump to the part.
    let mut jumping = function.clone();
    jumping[0x10..0x15].copy_from_slice(b"\xe9\x03\0\0\0");
    let mut code = Code::default();
    code.add(FileAddr(AT), [&jumping[..], part, &other].concat(), true);
    code.add(FileAddr(AT + 0x1000), table.clone(), false);
    let shared = PatchPlanner::new(code, &both, &ranges[1..2], []);
    let refusal = Refusal::UnknownCode { offset: 0x10 };
    assert_eq!(exits(&shared), Err(refusal));
    // Another one jumps through the same table: the part may be either's.
    let mut other = function.clone();
    other[3..7].copy_from_slice(&(0x1000 - 0x27_i32).to_le_bytes());
    let refusal = exits(&planner(&both, &other));
    assert_eq!(refusal, Err(Refusal::UnknownTargets { offset: 0xe }));
}

#[test]
fn pointer_jumps_in_parts_may_lead_anywhere() {
    // test %rdi,%rdi; je to the part; two nops; ret; the part: test %rsi,%rsi; jne to the ret; jmp *%rax
    let function = b"\x48\x85\xff\x74\x03\x90\x90\xc3";
    let part = b"\x48\x85\xf6\x75\xfa\xff\xe0";
    let (_, ranges) = planner_of(&[function, part]);
    let targets = |parts: &[CodeRange]| {
        let mut code = Code::default();
        code.add(FileAddr(AT), [&function[..], part].concat(), true);
        let planner = PatchPlanner::new(code, &ranges[..1], parts, []);
        planner.swept.targets.of_jump(AT + 0xd)
    };
    assert_eq!(targets(&ranges[1..]), targets::JumpTargets::AnyTarget);
    assert_eq!(targets(&[]), targets::JumpTargets::Outside);
}

#[test]
fn jumps_of_interpreters_may_stay_inside() {
    // mov (%rdx),%rcx; jmp *%rcx; nop; nop; ret
    let code = b"\x48\x8b\x0a\xff\xe1\x90\x90\xc3";
    let (_, ranges) = planner_of(&[code]);
    let jump = |label: u64| {
        let mut bytes = Code::default();
        bytes.add(FileAddr(AT), code.to_vec(), true);
        bytes.add(
            FileAddr(AT + 0x1000),
            (AT + label).to_le_bytes().to_vec(),
            false,
        );
        bytes.set_fixed();
        let planner = PatchPlanner::new(bytes, &ranges, &[], []);
        planner.swept.targets.of_jump(AT + 3)
    };
    assert_eq!(jump(6), targets::JumpTargets::AnyTarget);
    // The address of the function's start is no label, and that of its end is in another function.
    assert_eq!(jump(0), targets::JumpTargets::Outside);
    assert_eq!(jump(8), targets::JumpTargets::Outside);
    // The cases of a switch through a table of addresses are no labels for other jumps. Here: jmp *TABLE(,%rax,8)
    let table = (AT as u32 + 0x1000).to_le_bytes();
    let switch = [&code[..5], b"\xff\x24\xc5", &table, b"\x90\x90\xc3"].concat();
    let range = CodeRange {
        start: FileAddr(AT),
        len: switch.len() as u64,
    };
    let mut bytes = Code::default();
    bytes.add(FileAddr(AT), switch, true);
    let cases = [0xc, 0xd].map(|it: u64| (AT + it).to_le_bytes()).concat();
    bytes.add(FileAddr(AT + 0x1000), cases, false);
    bytes.set_fixed();
    let planner = PatchPlanner::new(bytes, &[range], &[], []);
    let leads = [3, 5].map(|it| planner.swept.targets.of_jump(AT + it));
    assert_eq!(
        leads,
        [targets::JumpTargets::Outside, targets::JumpTargets::Inside]
    );
    // No pointer leads to the cases of a switch through offsets: another jump in the function, through a pointer, is
    // an exit.
    let both = [SWITCH, b"\x90\x90\xc3\x48\x8b\x0a\xff\xe1"].concat();
    let table = offsets(&[0x10, 0x11, 0x12, -0x5000]);
    let mut bytes = Code::default();
    let range = CodeRange {
        start: FileAddr(AT),
        len: both.len() as u64,
    };
    bytes.add(FileAddr(AT), both, true);
    bytes.add(FileAddr(AT + 0x1000), table, false);
    let planner = PatchPlanner::new(bytes, &[range], &[], []);
    let of_jump = |at: u64| planner.swept.targets.of_jump(AT + at);
    assert_eq!(of_jump(0xe), targets::JumpTargets::Inside);
    assert_eq!(of_jump(0x16), targets::JumpTargets::Outside);
}

#[test]
fn pointer_jumps_may_lead_to_any_label() {
    // call *%rdi; nop; jmp *%rax. Data has the address of the start, of the nop (where the call returns), or of the
    // jump: only the last is a label.
    let function = b"\xff\xd7\x90\xff\xe0";
    let targets = |label: u64| {
        let (planner, _) = with_data(function, &(AT + label).to_le_bytes(), true);
        planner.swept.targets.of_jump(AT + 3)
    };
    let labels = [0, 2, 3].map(targets);
    use targets::JumpTargets::{AnyTarget, Outside};
    assert_eq!(labels, [Outside, Outside, AnyTarget]);
}

#[test]
fn labels_of_long_functions_are_found() {
    use targets::JumpTargets::{AnyTarget, Outside};
    const LEN: u64 = 1 << 19;
    // The code of the test above, with nops after it.
    let mut function = b"\xff\xd7\x90\xff\xe0".to_vec();
    function.resize(LEN as usize, 0x90);
    let range = CodeRange {
        start: FileAddr(AT),
        len: LEN,
    };
    let targets = |label: u64| {
        let mut code = Code::default();
        code.add(FileAddr(AT), function.clone(), true);
        let planner = PatchPlanner::new(code, &[range], &[], [FileAddr(AT + label)]);
        planner.swept.targets.of_jump(AT + 3)
    };
    assert_eq!([LEN, LEN - 1].map(targets), [Outside, AnyTarget]);
}

#[test]
fn searches_for_labels_are_limited() {
    use targets::JumpTargets::{AnyTarget, Untracked};
    const JUMPS: u64 = 20_000;
    // The code of the tests above, many times. For each jump the function is searched once more, and a label is found
    // at its second byte.
    let function = b"\xff\xd7\x90\xff\xe0".repeat(JUMPS as usize);
    let range = CodeRange {
        start: FileAddr(AT),
        len: function.len() as u64,
    };
    let mut code = Code::default();
    code.add(range.start, function, true);
    let planner = PatchPlanner::new(code, &[range], &[], [FileAddr(AT + 1)]);
    let of_jump = |index: u64| planner.swept.targets.of_jump(AT + 3 + 5 * index);
    let searched = (1 << 24) / (1 + range.len / 64);
    let ends = [0, searched - 1, searched, JUMPS - 1].map(of_jump);
    assert_eq!(ends, [AnyTarget, AnyTarget, Untracked, Untracked]);
}

#[test]
fn addresses_in_any_data_are_targets() {
    // jmp *TABLE(,%rdi,8) with the table in the executable segment; nop; nop; ret
    let table = (AT as u32 + 0x10).to_le_bytes();
    let mut code = [
        b"\xff\x24\xfd",
        &table[..],
        b"\x90\x90\xc3\xcc\xcc\xcc\xcc\xcc\xcc",
    ]
    .concat();
    for label in [7_u64, 8, 9] {
        code.extend((AT + label).to_le_bytes());
    }
    let (planner, range) = with_data(&code, &[], true);
    let function = CodeRange { len: 10, ..range };
    assert!((7..10).all(|it| planner.swept.targets.contains(AT + it)));
    assert_eq!(
        planner.swept.targets.of_jump(AT),
        targets::JumpTargets::Inside
    );
    assert!(planner.function(function).entry.is_ok());
}

#[test]
fn calls_through_arrays_of_functions_are_exits() {
    // The switch, whose cases are two nops and a ret; jmp *ARRAY(,%rdi,8), to another function
    let array = (AT as u32 + 0x1010).to_le_bytes();
    let code = [
        SWITCH,
        b"\x90\x90\xc3\xff\x24\xfd",
        &array,
        b"\xc3\x90\x90\x90",
    ]
    .concat();
    let table = offsets(&[0x10, 0x11, 0x12, -0x5000]);
    let other = (AT + 0x1a).to_le_bytes();
    let mut bytes = Code::default();
    bytes.add(FileAddr(AT), code, true);
    bytes.add(
        FileAddr(AT + 0x1000),
        [&table[..], &other, &other].concat(),
        false,
    );
    bytes.set_fixed();
    let range = |start, len| CodeRange {
        start: FileAddr(AT + start),
        len,
    };
    let ranges = [range(0, 0x1a), range(0x1a, 4)];
    let targets = PatchPlanner::new(bytes, &ranges, &[], []).swept.targets;
    assert_eq!(targets.of_jump(AT + 0xe), targets::JumpTargets::Inside);
    assert_eq!(targets.of_jump(AT + 0x13), targets::JumpTargets::Outside);
}

#[test]
fn all_references_at_fixed_addresses_are_seen() {
    let address = (AT as u32 + 0x40).to_le_bytes();
    let references = [
        // movq $L,(%rip); lea L,%rax; push $L; add $L,%rax; mov L(%rax),%rax; jmp *L(%rax)
        [b"\x48\xc7\x05\0\0\0\0", &address[..]].concat(),
        [b"\x48\x8d\x04\x25", &address[..]].concat(),
        [b"\x68", &address[..]].concat(),
        [b"\x48\x05", &address[..]].concat(),
        [b"\x48\x8b\x80", &address[..]].concat(),
        [b"\xff\xa0", &address[..]].concat(),
    ];
    for mut code in references {
        code.resize(0x80, 0x90);
        let (planner, _) = with_data(&code, &[], true);
        assert!(planner.swept.targets.contains(AT + 0x40), "{code:x?}");
    }
}

#[test]
fn functions_inside_instructions_do_not_split_them() {
    // mov $0xeb9090,%eax, at whose last byte another function begins; jmp to itself; two nops; ret
    let code = b"\xb8\x90\x90\xeb\x00\xeb\xfe\x90\x90\xc3";
    let range = |start, len| CodeRange {
        start: FileAddr(AT + start),
        len,
    };
    let mut bytes = Code::default();
    bytes.add(FileAddr(AT), code.to_vec(), true);
    let ranges = [range(0, 10), range(4, 1)];
    let planner = PatchPlanner::new(bytes, &ranges, &[], []);
    assert!(planner.swept.targets.contains(AT + 5));
}
