//! What patch sites report.

use test_support::fixture;

use super::*;
use crate::Functions;
use crate::patch_plan::displaced::{DisplacedExit, ExitKind};

/// Returns a site that displaces these bytes.
fn site(address: u64, displaced: &[u8], jump: Jump) -> PatchSite {
    PatchSite {
        address: FileAddr(address),
        displaced: displaced.to_vec(),
        jump,
        moves_call: false,
        flags_are_dead: true,
        exits: Vec::new(),
        mmx_is_free: true,
    }
}

const NEAR: Jump = Jump::Near { padding: 0 };

#[test]
fn harmless_bytes_are_inside_instructions() {
    let harmless = |displaced: &[u8]| {
        let found = site(AT, displaced, NEAR).harmless_byte();
        found.map(|(at, byte)| (at.0 - AT, byte))
    };
    // push %rbx; mov $7,%eax
    assert_eq!(harmless(b"\x53\xb8\x07\0\0\0"), Some((2, 7)));
    assert_eq!(harmless(b"\xb8\x07\0\0\0"), Some((1, 7)));
    assert_eq!(harmless(b"\x53\x50\x51\x52\x57"), None);
}

#[test]
fn exits_that_are_jumps_can_be_left_out() {
    // test %rdi,%rdi; jne to the next function; mov $1,%eax; ret
    let bytes = b"\x48\x85\xff\x75\x06\xb8\x01\0\0\0\xc3";
    let (planner, ranges) = planner_of(&[bytes, b"\xb8\x01\0\0\0\xc3"]);
    let mut plan = planner.function(ranges[0]).exits.unwrap();
    let exit = |offset, kind| DisplacedExit {
        offset,
        flags_are_dead: true,
        kind,
        begins_again: false,
    };
    let (jump, back) = (exit(3, ExitKind::Jump), exit(5, ExitKind::Return));
    assert_eq!(plan.entry.exits(), [jump]);
    assert_eq!((plan.sites.len(), plan.sites[0].exits()), (1, &[back][..]));
    plan.entry.keep_returns();
    assert!(plan.entry.exits().is_empty());
    plan.sites[0].keep_returns();
    assert_eq!(plan.sites[0].exits(), [back]);
}

#[test]
fn jumps_to_the_own_entry_are_marked() {
    // dec %edi; jne to the entry; mov $1,%eax; ret
    let bytes = b"\xff\xcf\x75\xfc\xb8\x01\0\0\0\xc3";
    let (planner, ranges) = planner_of(&[bytes]);
    let plan = planner.function(ranges[0]).exits.unwrap();
    let exits = [&plan.entry].into_iter().chain(&plan.sites);
    let exits = exits.flat_map(|site| site.exits());
    let found: Vec<_> = exits.map(|it| (it.kind, it.begins_again)).collect();
    assert_eq!(found, [(ExitKind::Jump, true), (ExitKind::Return, false)]);
}

#[test]
fn flags_are_live_before_branches_that_read_them() {
    // cmp $1,%rax; mov $1,%ecx; jne after; mov $1,%eax; ret
    let bytes = b"\x48\x83\xf8\x01\xb9\x01\0\0\0\x75\x05\xb8\x01\0\0\0\xc3";
    let (planner, ranges) = planner_of(&[bytes]);
    let are_dead = |offset: u64| {
        let sites = planner.instruction(ranges[0], FileAddr(AT + offset));
        sites.unwrap()[0].flags_are_dead()
    };
    assert_eq!([0, 4, 11].map(are_dead), [true, false, true]);
}

#[test]
fn sites_in_parts_need_one_known_function() {
    // The part: nop; mov $1,%eax; jmp to its function, which returns
    let part = b"\x90\xb8\x01\0\0\0\xe9\xf3\xff\xff\xff";
    let planned = |function: &[u8], other: &[u8], is_known: bool| {
        let (_, ranges) = planner_of(&[function, part, other]);
        let mut code = Code::default();
        code.add(FileAddr(AT), [function, part, other].concat(), true);
        code.add(
            FileAddr(AT + 0x1000),
            0x2000_u32.to_le_bytes().to_vec(),
            false,
        );
        let functions = if is_known {
            &[ranges[0], ranges[2]][..]
        } else {
            &[]
        };
        let planner = PatchPlanner::new(code, functions, &ranges[1..2], []);
        assert_eq!(planner.entry(ranges[1]), Err(Refusal::NoFunction));
        planner.usdt_site(ranges[1], ranges[1].start)
    };
    // test %rdi,%rdi; je to the part; ret
    let function = b"\x48\x85\xff\x74\x02\x90\xc3";
    let sites = planned(function, b"\xc3", true).unwrap();
    assert_eq!(sites[0].displaced(), &part[1..6]);
    assert!(sites[0].flags_are_dead() && !sites[0].mmx_is_free());
    assert_eq!(planned(function, b"\xc3", false), Err(Refusal::NoFunction));
    // Another one jumps there, too.
    let other = b"\x74\xf3\xc3";
    assert_eq!(planned(function, other, true), Err(Refusal::NoFunction));
    // The function goes on where the part has come from with `jc`: the flags are live.
    let reading = b"\x48\x85\xff\x74\x02\x72\xfe";
    assert!(!planned(reading, b"\xc3", true).unwrap()[0].flags_are_dead());
    // It has a jump of which nothing is known.
    let unknown = [SWITCH, function].concat();
    let refusal = Refusal::UnknownTargets { offset: 0xe };
    assert_eq!(planned(&unknown, b"\xc3", true), Err(refusal));
}

#[test]
fn usdt_sites_are_patched_after_their_nop() {
    let of = |bytes: &[u8]| {
        let (planner, ranges) = planner_of(&[bytes]);
        let sites = planner.usdt_site(ranges[0], FileAddr(AT + 2)).unwrap();
        let sites = sites.iter().map(|it| (it.address().0 - AT, it.jump()));
        sites.collect::<Vec<_>>()
    };
    // xor %eax,%eax; nop; mov $1,%eax; ret
    let usual = b"\x31\xc0\x90\xb8\x01\0\0\0\xc3";
    assert_eq!(of(usual), [(3, NEAR), (2, NEAR)]);
    // With jrcxz after the nop, which is not executed each time.
    let entered = b"\xe3\x01\x90\xb8\x01\0\0\0\xc3";
    assert!(of(entered).iter().all(|(at, _)| *at == 2));
    // Not a nop of one byte.
    let long = b"\x31\xc0\x66\x90\xb8\x01\0\0\0\xc3";
    assert_eq!(of(long), [(2, NEAR)]);
    // The function ends after it, and has room before the next.
    let last = b"\x31\xc0\x90\xc3\xcc\xcc\xcc\xcc\xcc\xcc\xcc";
    assert_eq!(of(last)[0].0, 3);
}

// As in ____longjmp_chk of glibc 2.42.
#[test]
fn site_after_a_call_and_padding_is_found() {
    let of = |padding: &[u8]| {
        let jump = [0x74, 5 + padding.len() as u8];
        // je over the call and its padding; call; padding; nop; mov $1,%eax; ret
        let bytes = [
            &jump,
            &b"\xe8\0\0\0\0"[..],
            padding,
            b"\x90\xb8\x01\0\0\0\xc3",
        ]
        .concat();
        let (planner, ranges) = planner_of(&[&bytes]);
        let nop = AT + 7 + padding.len() as u64;
        let sites = planner.usdt_site(ranges[0], FileAddr(nop))?;
        Ok(sites
            .iter()
            .map(|it| it.address().0 - nop)
            .collect::<Vec<_>>())
    };
    // add $0x5050505,%eax, and the first byte of another such instruction.
    assert_eq!(of(&[5; 6]), Ok(vec![1, 0]));
    // No instruction begins so.
    assert_eq!(of(&[6; 3]), Ok(vec![1, 0]));
    assert_eq!(of(&[0x90; 3]), Ok(vec![1, 0]));
    // Different bytes may be code.
    let refusal = Refusal::NoInstruction { offset: 13 };
    assert_eq!(of(b"\x05\x05\x05\x05\x05\x04"), Err(refusal));
}

#[test]
fn usdt_sites_are_moved_only_as_such() {
    // nop; mov $1,%eax; ret
    let bytes = b"\x90\xb8\x01\0\0\0\xc3";
    let range = CodeRange {
        start: FileAddr(AT),
        len: bytes.len() as u64,
    };
    let nop = CodeRange { len: 1, ..range };
    let planner = |is_restartable: bool| {
        let mut code = Code::default();
        code.add(FileAddr(AT), bytes.to_vec(), true);
        code.add_foreign(nop);
        if is_restartable {
            code.add_restartable(CodeRange { len: 2, ..range });
        }
        PatchPlanner::new(code, &[range], &[], [])
    };
    let usual = planner(false);
    let entries = EntryPlanner::of(&usual);
    let what = "a probe site";
    let refusal = Refusal::Unmovable { offset: 0, what };
    assert_eq!(usual.instruction(range, FileAddr(AT)), Err(refusal));
    let sites = usual.usdt_site(range, FileAddr(AT)).unwrap();
    let places = sites.iter().map(|it| (it.address(), it.jump()));
    let expected = [FileAddr(AT + 1), FileAddr(AT)].map(|it| (it, NEAR));
    assert!(places.eq(expected));
    assert_eq!(entries.usdt_site(range, FileAddr(AT)), Ok(sites));
    assert_eq!(
        entries.executed_with(range, FileAddr(AT)),
        [FileAddr(AT + 1), FileAddr(AT + 6)]
    );
    // The kernel restarts it there.
    let refusal = planner(true).usdt_site(range, FileAddr(AT)).unwrap_err();
    assert!(matches!(refusal, Refusal::Unmovable { offset: 0, .. }));
}

#[test]
fn sites_are_written_at_once_within_a_page() {
    let is_on_one_page = |address, jump| site(address, &[0x90; 5], jump).is_on_one_page();
    assert!(is_on_one_page(0x1ffb, NEAR) && !is_on_one_page(0x1ffc, NEAR));
    let short = |island| Jump::Short {
        island: FileAddr(island),
    };
    assert!(is_on_one_page(0x1f80, short(0x1ffb)) && is_on_one_page(0x1fe0, short(0x1fc0)));
    assert!(!is_on_one_page(0x1f80, short(0x1ffc)) && !is_on_one_page(0x1f80, short(0x2000)));
}

#[test]
fn trampolines_are_in_reach_of_the_last_jump() {
    let at = 0x2_0000_0000;
    let (below, above) = (1 << 31, (1 << 31) - 1);
    let window = |jump| {
        let site = site(at, &[0x90; 5], jump);
        let live = site.trampolines(LoadBias::NONE);
        let window = site.window();
        assert_eq!(window, i128::from(live.start.0)..i128::from(live.end.0));
        let moved = site.trampolines(LoadBias(0x1000));
        assert_eq!(moved.start, live.start.plus(0x1000));
        live.start.0..live.end.0
    };
    assert_eq!(window(NEAR), at + 5 - below..at + 5 + above + 1);
    let island = FileAddr(at + 0x40);
    let short = window(Jump::Short { island });
    assert_eq!(short, at + 0x45 - below..at + 0x45 + above + 1);
    let punned = |chosen, displacement| Jump::Punned {
        chosen,
        displacement,
    };
    let first = at + 5 + 0x1200_0000;
    assert_eq!(window(punned(3, 0x1200_0000)), first..first + (1 << 24));
    assert_eq!(window(punned(0, -7)), at - 2..at - 1);
}

#[test]
fn overlaps_with_others_and_own_are_distinguished() {
    let text = |offset| Refusal::Overlap { offset }.to_string();
    assert_eq!(
        text(0),
        "has too little room beside the patch of another function"
    );
    assert_eq!(
        text(16),
        "has too little room between two patches, at +0x10"
    );
    assert_eq!(Refusal::Overlap { offset: 0 }.name(), "overlap");
    assert_eq!(Refusal::NotCode.name(), "not_code");
}

#[test]
fn transactions_and_interrupts_are_not_moved() {
    let unmovable = |bytes: &[u8]| {
        let instruction = code::decode(bytes, AT).next().unwrap();
        displaced::unmovable(&instruction)
    };
    assert_eq!(unmovable(b"\xc7\xf8\0\0\0\0"), Some("a transaction"));
    assert_eq!(unmovable(b"\xcd\x80"), Some("an interrupt"));
    assert_eq!(unmovable(b"\x0f\x05"), Some("a system call"));
    // jmp, call, ret
    for movable in [&b"\xe9\0\0\0\0"[..], b"\xe8\0\0\0\0", b"\xc3"] {
        assert_eq!(unmovable(movable), None, "{movable:x?}");
    }
}

#[test]
fn restartable_sequences_of_files_are_left_alone() {
    let functions = Functions::of_file(fixture("sequences.pie")).unwrap();
    let object = &functions.objects()[0];
    let planner = object.patch_planner().unwrap();
    let what = "an instruction of a restartable sequence";
    let is_in_sequence = |range: CodeRange| {
        let addresses = (range.start.0..range.end()).map(FileAddr);
        let refusals = addresses.filter_map(|at| planner.instruction(range, at).err());
        let of_sequence =
            |it: &Refusal| matches!(it, Refusal::Unmovable { what: it, .. } if *it == what);
        refusals.filter(of_sequence).count() > 1
    };
    let with_sequences = object
        .table()
        .functions()
        .filter(|it| is_in_sequence(it.range()));
    let names: Vec<String> = with_sequences
        .flat_map(|it| it.names().map(|it| it.text).collect::<Vec<_>>())
        .collect();
    assert_eq!(names, ["go_through"]);
}

#[test]
fn few_addresses_are_not_all_that_is_planned() {
    // push %rbx; call; mov $1,%eax; ret: the jump in place of the `push` leads to one address only.
    let code = b"\x53\xe8\x6a\xf9\x10\x10\xb8\x01\0\0\0\xc3";
    let (planner, ranges) = planner_of(&[code]);
    let plans = planner.exits(ranges[0], |_| Ok(())).unwrap();
    let entries = plans
        .iter()
        .map(|it| (it.entry.jump(), it.entry.moves_call()));
    let displacement = 0x10f9_6ae8;
    let punned = Jump::Punned {
        chosen: 0,
        displacement,
    };
    let expected = [(punned, false), (Jump::Near { padding: 0 }, true)];
    assert_eq!(entries.collect::<Vec<_>>(), expected);
    assert!(plans.iter().all(|it| it.sites.len() == 1));
    // mov $1,%eax; ret: its jump leads to any address nearby.
    let (planner, ranges) = planner_of(&[&code[6..]]);
    assert_eq!(planner.exits(ranges[0], |_| Ok(())).unwrap().len(), 1);
}
