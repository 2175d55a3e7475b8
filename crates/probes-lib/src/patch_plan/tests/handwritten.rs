//! Handwritten code: what it does with flags, stacks and labels of its own.

use super::*;

/// The refusal of the exits of the first of these functions.
fn exits_refused(functions: &[&[u8]]) -> Option<Refusal> {
    let (planner, ranges) = planner_of(functions);
    planner.function(ranges[0]).exits.err()
}

/// add %rsi,%rax, and instructions that leave the flags alone.
const ADD: &[u8] = b"\x48\x01\xf0\x66\x90\x48\x89\xc3\x48\x89\xc1";

/// A call of the function at offset 0 from offset `at`, and what follows it.
fn calling(at: usize, then: &[u8]) -> Vec<u8> {
    let displacement = -(at as i32 + 5);
    [&b"\xe8"[..], &displacement.to_le_bytes(), then, b"\xc3"].concat()
}

#[test]
fn flags_that_callers_read_are_live() {
    let function = [ADD, b"\xc3"].concat();
    // setc %dl; mov %rax,%rdi, adc $0,%rdx.
    for then in [&b"\x0f\x92\xc2"[..], b"\x48\x89\xc7\x48\x83\xd2\0"] {
        let refused = exits_refused(&[&function, &calling(function.len(), then)]);
        let offset = ADD.len() as u64;
        assert_eq!(refused, Some(Refusal::LiveFlags { offset }), "{then:x?}");
    }
    // test %eax,%eax, sete %dl; no reader.
    for then in [&b"\x85\xc0\x0f\x94\xc2"[..], b"\x48\x89\xc7"] {
        let refused = exits_refused(&[&function, &calling(function.len(), then)]);
        assert_eq!(refused, None, "{then:x?}");
    }
}

#[test]
fn callers_of_tail_calls_read_flags() {
    // The first function is jumped to by the second one, after whose call the third one reads the flags.
    let function = [ADD, b"\xc3"].concat();
    let jump = calling(function.len(), b"");
    let jump = [b"\xe9", &jump[1..5], b"\xcc\xcc\xcc"].concat();
    let call = |then: &[u8]| {
        let len = jump.len() as i32;
        [&b"\xe8"[..], &(-len - 5).to_le_bytes(), then, b"\xc3"].concat()
    };
    let refused = |then: &[u8]| exits_refused(&[&function, &jump, &call(then)]);
    let offset = ADD.len() as u64;
    assert_eq!(
        refused(b"\x0f\x92\xc2"),
        Some(Refusal::LiveFlags { offset })
    );
    assert_eq!(refused(b"\x31\xd2"), None);
}

#[test]
fn flags_pass_to_functions_that_read_them() {
    // add; jmp to the next function, which begins with adc $0,%rdx, or with xor %edx,%edx.
    let function = [ADD, b"\xe9\0\0\0\0"].concat();
    let offset = ADD.len() as u64;
    let refused = exits_refused(&[&function, b"\x48\x83\xd2\0\xc3"]);
    assert_eq!(refused, Some(Refusal::LiveFlags { offset }));
    assert_eq!(exits_refused(&[&function, b"\x31\xd2\xc3\x90\x90"]), None);
}

#[test]
fn flags_after_calls_that_never_return_are_others() {
    // test %rdi,%rdi; jne over the call; call the first function, which never returns; over: sete %al; ret
    let function = [ADD, b"\xc3"].concat();
    let call = calling(function.len() + 5, b"\x0f\x94\xc0");
    let caller = [&b"\x48\x85\xff\x75\x05"[..], &call].concat();
    assert_eq!(exits_refused(&[&function, &caller]), None);
}

#[test]
fn own_stack_is_returned_to() {
    // mov 32(%rsp),%rsp, or -8(%rbp), or 16(%r14); pop %rbx; ret; int3
    for (restore, returns) in [
        (&b"\x48\x8b\x64\x24\x20"[..], true),
        (b"\x48\x8b\x65\xf8", true),
        (b"\x49\x8b\x66\x10", false),
    ] {
        let function = [restore, b"\x5b\xc3\xcc\xcc\xcc\xcc"].concat();
        let (planner, ranges) = planner_of(&[&function]);
        let exits = planner.function(ranges[0]).exits.unwrap();
        let many = exits.sites.len() + exits.entry.exits().len();
        assert_eq!(many, usize::from(returns), "{restore:x?}");
    }
}

#[test]
fn stored_labels_may_be_jumped_to() {
    // mov (%rdi),%rax; lea label(%rip),%rdx; what is done with it; jmp *%rax; label: xor %eax,%eax; ret
    let function = |with_label: &[u8]| {
        let after = (with_label.len() + 2 + NOPS.len()) as i32;
        let lea = [&b"\x48\x8d\x15"[..], &after.to_le_bytes()].concat();
        let label = b"\xb8\x01\0\0\0\xc3\xcc\xcc\xcc\xcc";
        [
            b"\x48\x8b\x07",
            &lea[..],
            with_label,
            b"\xff\xe0",
            NOPS,
            label,
        ]
        .concat()
    };
    // mov %rdx,(%rdi)
    let stored = exits_refused(&[&function(b"\x48\x89\x17")]);
    assert_eq!(stored, Some(Refusal::UnknownTargets { offset: 13 }));
    // push %rdx, as OCaml does with a handler.
    assert_eq!(exits_refused(&[&function(b"\x52")]), None);
}

#[test]
fn pushed_labels_at_fixed_addresses_are_handlers() {
    // mov (%rdi),%rax; mov $label,%rdx; what is done with it; jmp *%rax; label: mov $1,%eax; ret
    let refused = |with_label: &[u8]| {
        let before = 3 + 7 + with_label.len() + 2 + NOPS.len();
        let label = (AT as u32 + before as u32).to_le_bytes();
        let load = [&b"\x48\xc7\xc2"[..], &label].concat();
        let end = b"\xb8\x01\0\0\0\xc3\xcc\xcc\xcc\xcc";
        let function = [
            b"\x48\x8b\x07",
            &load[..],
            with_label,
            b"\xff\xe0",
            NOPS,
            end,
        ]
        .concat();
        let mut code = Code::default();
        let range = CodeRange {
            start: FileAddr(AT),
            len: function.len() as u64,
        };
        code.add(FileAddr(AT), function, true);
        code.set_fixed();
        let planner = PatchPlanner::new(code, &[range], &[], []);
        planner.function(range).exits.err()
    };
    // mov %rdx,(%rdi)
    let stored = refused(b"\x48\x89\x17");
    assert_eq!(stored, Some(Refusal::UnknownTargets { offset: 13 }));
    // push %rdx
    assert_eq!(refused(b"\x52"), None);
}

// If each jump looked at each label, this would take many minutes.
#[test]
fn many_jumps_and_labels_are_planned_quickly() {
    const MANY: usize = 200_000;
    // call the next instruction, whose address each lea loads; jmp *SLOT(%rip); ret
    let mut function = b"\xe8\0\0\0\0".to_vec();
    for _ in 0..MANY {
        let displacement = 5 - (function.len() as i32 + 7);
        function.extend(b"\x48\x8d\x05");
        function.extend(displacement.to_le_bytes());
    }
    for _ in 0..MANY {
        function.extend(b"\xff\x25\0\0\x40\0");
    }
    function.push(0xc3);
    let (planner, _) = planner_of(&[&function]);
    let jump = AT + 5 + 7 * MANY as u64;
    let leads = planner.swept.targets.of_jump(jump);
    assert_eq!(leads, targets::JumpTargets::Outside);
}
