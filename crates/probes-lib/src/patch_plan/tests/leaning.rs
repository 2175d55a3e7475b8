//! Functions that lean on the next one: their return becomes a short jump with the next one's first byte.

use super::*;

/// mov %rax,%rdi; lea 0x100(%rip),%rax; call; ret
const WRAPPER: &[u8] = b"\x48\x89\xc7\x48\x8d\x05\x00\x01\0\0\xe8\0\x01\0\0\xc3";
const CALL: usize = 10;
const RETURN: u64 = 15;

fn leaning(functions: &[&[u8]]) -> Option<ExitPlan> {
    let (planner, ranges) = planner_of(functions);
    planner.leaning(ranges[0])
}

fn changed(change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = WRAPPER.to_vec();
    change(&mut bytes);
    bytes
}

#[test]
fn return_becomes_jump_to_island_among_displaced_code() {
    let plan = leaning(&[WRAPPER, WRAPPER]).unwrap();
    assert_eq!(plan.entry.displaced(), &WRAPPER[..RETURN as usize]);
    assert!(plan.entry.moves_call() && plan.entry.exits().is_empty());
    assert!(plan.overwrites_next);
    let [exit] = &plan.sites[..] else {
        panic!("{plan:?}");
    };
    let island = FileAddr(AT + 9);
    assert_eq!(
        (exit.address(), exit.jump()),
        (FileAddr(AT + RETURN), Jump::Short { island })
    );
    assert_eq!(exit.exits().len(), 1);
    let writes = exit
        .writes(LoadBias::NONE, LiveAddr(AT + 0x1_0000))
        .unwrap();
    let [(_, to_trampoline), (at, short)] = &writes[..] else {
        panic!("{writes:x?}");
    };
    assert_eq!((to_trampoline.len(), *at), (5, LiveAddr(AT + RETURN)));
    // The second byte is `clc` for threads that enter the next function.
    assert_eq!(short, b"\xeb\xf8");
}

#[test]
fn padding_spares_the_next_function() {
    let padded = [WRAPPER, NOPS].concat();
    let plan = leaning(&[&padded, WRAPPER]).unwrap();
    assert!(!plan.overwrites_next);
    let island = FileAddr(AT + RETURN - 5);
    assert_eq!(plan.sites[0].jump(), Jump::Short { island });
    let reserved = FileAddr(AT + RETURN)..FileAddr(AT + RETURN + 2);
    assert!(plan.sites[0].reserved().any(|it| it == reserved));
    // 11 displaced bytes have room for the island after a prefixed jump; 8 do not.
    let padded = [
        &b"\x48\x8d\x44\x00\x07\x48\x89\xc3\x48\x89\xc3\xc3"[..],
        NOPS,
    ];
    assert!(leaning(&[&padded.concat(), WRAPPER]).is_some());
    let padded = [&b"\x48\x8d\x44\x00\x07\x48\x89\xc3\xc3"[..], NOPS];
    assert_eq!(leaning(&[&padded.concat(), WRAPPER]), None);
}

#[test]
fn prefixed_jumps_leave_the_first_byte() {
    let near = &entry(&[WRAPPER]).unwrap()[0];
    let prefixed = near.prefixed().unwrap();
    assert_eq!(
        (prefixed.address(), prefixed.jump()),
        (FileAddr(AT), Jump::Prefixed)
    );
    let writes = prefixed
        .writes(LoadBias::NONE, LiveAddr(AT + 0x106))
        .unwrap();
    assert_eq!(writes, [(LiveAddr(AT + 1), b"\xe9\0\x01\0\0".to_vec())]);
    let reserved: Vec<_> = prefixed.reserved().collect();
    assert_eq!(reserved, [FileAddr(AT + 1)..FileAddr(AT + 10)]);
    let start = prefixed.trampolines(LoadBias(1 << 40)).start.0;
    assert_eq!(start, (1 << 40) + AT + 6 - (1 << 31));
    assert_eq!(prefixed.prefixed(), None);
    // mov $1,%eax; add $1,%eax: no REX prefix. lea: five bytes, too few.
    assert_eq!(
        entry(&[b"\xb8\x01\0\0\0\x83\xc0\x01\xc3"]).unwrap()[0].prefixed(),
        None
    );
    let five = &entry(&[b"\x48\x8d\x44\x00\x07\x48\x89\xc3\xc3"]).unwrap()[0];
    assert_eq!((five.displaced().len(), five.prefixed()), (5, None));
    // A punned jump: sub $8,%rsp; loop: cmp; jne loop; add; ret.
    let punned = entry(&[b"\x48\x83\xec\x08\x48\x83\xf8\x01\x75\xfa\x48\x83\xc4\x08\xc3"]);
    assert_eq!(punned.unwrap()[0].prefixed(), None);
}

#[test]
fn only_straight_code_leans() {
    assert!(leaning(&[WRAPPER]).is_some());
    // Without a call: the call is replaced by a `mov` of the same length.
    let straight = changed(|it| it[CALL] = 0xb8);
    let plan = leaning(&[&straight, WRAPPER]).unwrap();
    assert!(!plan.entry.moves_call());
    // A return with a number; one of two bytes; a jump; a system call; a call that is not last; a conditional jump.
    for other in [
        [&WRAPPER[..15], b"\xc2\x08\0"].concat(),
        [&WRAPPER[..15], b"\xf3\xc3"].concat(),
        changed(|it| it[CALL] = 0xe9),
        changed(|it| it[CALL..].copy_from_slice(b"\x0f\x05\x90\x90\x90\xc3")),
        [&WRAPPER[..15], b"\x48\x89\xc3\xc3"].concat(),
        [&WRAPPER[..10], b"\x74\x00", &WRAPPER[10..]].concat(),
        // An instruction after the return; too few bytes; too many instructions.
        [WRAPPER, b"\x90"].concat(),
        b"\x48\x8d\x44\x00\x07\x48\x89\xc3\x90\xc3".to_vec(),
        [&[0x90; 15], WRAPPER].concat(),
    ] {
        assert_eq!(leaning(&[&other, WRAPPER]), None, "{other:x?}");
    }
}

#[test]
fn raising_an_exception_is_no_return() {
    // lea 0x100(%rip),%rax; mov 16(%r14),%rsp; pop %r14; ret: this returns to the handler, which is on the stack that
    // was loaded.
    let raises = b"\x48\x8d\x05\x00\x01\0\0\x49\x8b\x66\x10\x41\x5e\xc3";
    assert_eq!(leaning(&[raises, WRAPPER]), None);
    // With mov 16(%r14),%r12 instead, the stack stays the same.
    let mut returns = raises.to_vec();
    returns[7..11].copy_from_slice(b"\x4d\x8b\x66\x10");
    assert!(leaning(&[&returns, WRAPPER]).is_some());
}

#[test]
fn code_that_is_entered_elsewhere_does_not_lean() {
    // A jump to the call; into it; to the return, which is not displaced; to the entry.
    for (to, leans) in [(10, false), (12, false), (15, true), (0, true)] {
        let distance = to - (16 + 2);
        let jump = [0xeb, distance as i8 as u8];
        let is_leaning = leaning(&[WRAPPER, &jump]).is_some();
        assert_eq!(is_leaning, leans, "{to}");
    }
}

#[test]
fn leaning_functions_share_a_page_with_the_next() {
    let leans_at = |start: u64| {
        let mut code = Code::default();
        code.add(FileAddr(start), [WRAPPER, WRAPPER].concat(), true);
        let range = |start| CodeRange {
            start: FileAddr(start),
            len: 16,
        };
        let ranges = [range(start), range(start + 16)];
        let planner = PatchPlanner::new(code, &ranges, &[], []);
        planner.leaning(ranges[0]).is_some()
    };
    // The jump of the next one ends 22 bytes after the start.
    let page = AT + 0x1000;
    assert!(leans_at(page - 22) && !leans_at(page - 21) && !leans_at(page - 1) && leans_at(page));
}
