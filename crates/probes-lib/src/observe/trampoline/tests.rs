//! The code as objdump disassembles it; `tests/live/observe.rs` executes it.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use iced_x86::Register;
use test_support::Scratch;

use super::call::{CallEnd, TimedCalls};
use super::function_record::RecordPointers;
use super::probe_site::PUSHED;
use super::saved::LockedRegisters;
use super::*;
use crate::expression::MAX_ARGUMENTS;
use crate::observe::frame_id::FrameId;
use crate::observe::layout::arena::{LINE, TAIL_LEN};
use crate::observe::layout::shared::record;
use crate::observe::point::{Point, PointKind};
use crate::observe::role::{
    ArgumentRoom, ArgumentSource, Marks, PairEnd, StackKind, TimedRole, WatchRole,
};
use crate::patch_plan::displaced::ExitKind;
use crate::process::tool::new_id;
use crate::site::{JMP, RET};
use crate::testing::{arena, program_with_probes};

mod listings;

const AT: LiveAddr = LiveAddr(0x5555_0000_1000);
const WRAPPER: LiveAddr = LiveAddr(0x5555_4000_0000);

fn pointers(layout: SharedLayout) -> Pointers {
    Pointers {
        count: CountPointers {
            claims: LiveAddr(0x5555_0000_0020),
            routine: LiveAddr(0x5555_0000_0a00),
            of_ocaml: LiveAddr(0x5555_0000_0a02),
            first_domain: LiveAddr(0x5555_0000_0038),
            first_domain_counter: LiveAddr(0x5555_0000_0800),
        },
        point: 0x2f,
        untyped: 0x12f,
        untyped_locked: LiveAddr(0x5555_0000_0b00),
        sampled: LiveAddr(0x5555_0000_0c00),
        shared: LiveAddr(0x5555_0000_0030),
        layout,
    }
}

/// Returns the instructions of the trampoline of an enabled point, without the nops.
fn listing(role: &Role, layout: SharedLayout) -> Vec<String> {
    disassembled(&enabled_trampoline(role, layout), AT)
}

fn enabled_trampoline(role: &Role, layout: SharedLayout) -> Vec<u8> {
    let len = probe_site::len(role, layout).unwrap();
    let mut code = site(len, role, &pointers(layout)).unwrap();
    assert_eq!((code.len() as u64, len % LINE), (len, 0));
    let tail = (len - TAIL_LEN) as usize;
    assert_eq!(code[tail], RET);
    code[tail] = JMP;
    code
}

/// Returns the instructions of code at an address, without the nops.
fn disassembled(code: &[u8], at: LiveAddr) -> Vec<String> {
    let instructions = instructions(code, at).into_iter();
    instructions.map(|(_, text)| text).collect()
}

/// Same as [`disassembled`], each instruction with its address.
fn instructions(code: &[u8], at: LiveAddr) -> Vec<(u64, String)> {
    let scratch = Scratch::new();
    let file = scratch.file("trampoline");
    std::fs::write(&file, code).unwrap();
    let output = Command::new("objdump")
        .args(["-D", "-b", "binary", "-m", "i386:x86-64"])
        .arg("--no-show-raw-insn")
        .arg(format!("--adjust-vma={at}"))
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .filter_map(|line| line.split_once(":\t"))
        .map(|(address, text)| {
            let address = u64::from_str_radix(address.trim(), 16).unwrap();
            let words: Vec<&str> = text.split_ascii_whitespace().collect();
            (address, words.join(" "))
        })
        .filter(|(_, text)| text != "nop")
        .collect()
}

#[test]
fn objdump_reads_the_intended_instructions() {
    let role = Role {
        is_counted: true,
        ..Role::default()
    };
    assert_eq!(
        listing(&role, SharedLayout::default()),
        [
            "movq %rcx,%mm1",
            "movq %rdx,%mm2",
            "mov %rsp,%rcx",
            "shr $0xe,%rcx",
            "imul $0x9e3779b9,%ecx,%edx",
            "shr $0x17,%edx",
            "shl $0x5,%edx",
            "add -0x1002(%rip),%rdx # 0x555500000020",
            "cmp %rcx,(%rdx)",
            "jne 0x55550000104c",
            "rdfsbase %rcx",
            "cmp %rcx,0x8(%rdx)",
            "jne 0x55550000104c",
            "mov 0x10(%rdx),%rdx",
            "incq 0x1f8(%rdx)",
            "movq %mm1,%rcx",
            "movq %mm2,%rdx",
            "emms",
            "jmp 0x555500001078",
            "lea -0x16(%rip),%rdx # 0x55550000103d",
            "jmp 0x555500000a00",
            "jmp 0x555540000000",
        ]
    );
}

#[test]
fn saved_registers_are_found_as_arguments() {
    let arguments = vec![
        ArgumentSource::Register(Register::RDI),
        ArgumentSource::Register(Register::R12),
        ArgumentSource::Register(Register::RAX),
        ArgumentSource::on_stack(16),
        ArgumentSource::Vector(Register::XMM3),
        ArgumentSource::Unknown,
    ];
    let layout = SharedLayout {
        pairs: 2,
        record_len: record::len(arguments.len(), ArgumentRoom::Fields),
        ..SharedLayout::default()
    };
    let role = Role {
        is_counted: true,
        ends: vec![PairEnd::Stop(1), PairEnd::Start(0)],
        marks: Marks {
            argument: Some(Register::RDI),
            is_word: false,
            frame: FrameId::StackAndRbx,
        },
        watched: Some(WatchRole {
            formats: Vec::new(),
            result_format: Some(Default::default()),
            function: None,
            is_ocaml: false,
            sample: None,
            point: 7,
            arguments,
        }),
        ..Role::default()
    };
    let listing = listing(&role, layout);
    // Nothing is stored on the stack, and every register that is saved is restored.
    assert!(!listing.iter().any(|line| line.starts_with("push")));
    for (register, copy) in SAVED_IF_TIMED {
        let name = |register: Register| format!("%{register:?}").to_lowercase();
        let (register, copy) = (name(register.into()), name(copy.into()));
        let count = |text: String| listing.iter().filter(|line| **line == text).count();
        assert_eq!(count(format!("movq {register},{copy}")), 1, "{listing:#?}");
        assert!(
            count(format!("movq {copy},{register}")) >= 1,
            "{listing:#?}"
        );
    }
    // rdi and rax are saved, and r12 is not.
    let is_there = |text: &str| listing.iter().any(|line| line == text);
    for text in [
        "movq %mm5,%rdx",
        "mov %r12,%rdx",
        "movq %mm0,%rdx",
        "lea 0x8(%rsp),%rdx",
        "add $0x10,%rdx",
        "movl $0x7,0x14(%rcx)",
    ] {
        assert!(is_there(text), "{text} in {listing:#?}");
    }
    assert!(listing.iter().any(|line| line.contains("movq %xmm3,")));
    assert_eq!(listing.iter().filter(|line| *line == "rdtsc").count(), 1);
}

// The whole code of a trampoline that counts, times and records, as text.
#[test]
fn whole_listing_is_golden() {
    let arguments = vec![
        ArgumentSource::Register(Register::RDI),
        ArgumentSource::on_stack(16),
        ArgumentSource::Vector(Register::XMM3),
    ];
    let layout = SharedLayout {
        pairs: 2,
        record_len: record::len(arguments.len(), ArgumentRoom::Fields),
        ..SharedLayout::default()
    };
    let role = Role {
        is_counted: true,
        ends: vec![PairEnd::Stop(1), PairEnd::Start(0)],
        marks: Marks {
            argument: Some(Register::RDI),
            is_word: false,
            frame: FrameId::StackAndRbx,
        },
        watched: Some(WatchRole {
            formats: Vec::new(),
            result_format: Some(Default::default()),
            function: None,
            is_ocaml: false,
            sample: None,
            point: 7,
            arguments,
        }),
        ..Role::default()
    };
    assert_golden("listing.txt", &listing(&role, layout));
}

/// Asserts that a file of this directory has these lines.
fn assert_golden(name: &str, lines: &[String]) {
    let text = lines.join("\n") + "\n";
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/observe/trampoline/");
    let file = format!("{directory}{name}");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap();
    assert!(
        golden == text,
        "not as in {file}; UPDATE_GOLDEN=1 rewrites it:\n{text}"
    );
}

// What a hit of the first domain executes is in one cache line.
#[test]
fn calls_of_ocaml_are_counted_by_domain() {
    let templates = CountTemplates::of(AT, pointers(SharedLayout::default()).count).unwrap();
    let template = templates.of_function(true);
    let at = AT.plus(0x1000);
    // sub $0x8,%rsp; ret
    let code = template
        .around(at, 2, &[0x48, 0x83, 0xec, 0x08, 0xc3])
        .unwrap();
    assert_eq!(code.len(), template.len() + 5);
    assert_eq!(code[template.split()..][..4], [0x48, 0x83, 0xec, 0x08]);
    assert_eq!(
        disassembled(&code, at),
        [
            "cmp %r14,-0x1fcf(%rip) # 0x555500000038",
            "jne 0x555500002015",
            "incq -0x1800(%rip) # 0x555500000810",
            "sub $0x8,%rsp",
            "ret",
            "movq %rcx,%mm1",
            "imul $0x9e3779b9,%r14d,%ecx",
            "shr $0x17,%ecx",
            "shl $0x5,%ecx",
            "add -0x200d(%rip),%rcx # 0x555500000020",
            "test %r14,%r14",
            "je 0x55550000204b",
            "cmp %r14,0x8(%rcx)",
            "jne 0x55550000204b",
            "mov 0x10(%rcx),%rcx",
            "incq 0x90(%rcx)",
            "movq %mm1,%rcx",
            "emms",
            "jmp 0x555500002010",
            "movq %rdx,%mm2",
            "lea -0x13(%rip),%rdx # 0x555500002043",
            "jmp 0x555500000a02",
        ]
    );
    assert!(template.around(at, 2, &[0x90; 64]).is_some());
    assert!(template.around(at, 2, &[0x90; 128]).is_none());
}

/// Returns an arena with one site.
fn arena_of_one() -> Arena {
    Arena {
        points: vec![Point {
            address: LiveAddr(0x5555_0000_0000),
            kind: PointKind::Site { operand: [0; 4] },
        }],
        id: new_id(),
        ..arena(0x5555_1000_0000)
    }
}

// The routine that counts hits of threads without a row, with claims and without.
#[test]
fn routine_listing_is_golden() {
    let arena = arena_of_one();
    for (name, claims) in [("routine.txt", true), ("routine_without_claims.txt", false)] {
        let code = count::routine(&arena, claims).unwrap();
        let lines = disassembled(&code, arena.routine());
        assert_eq!(lines.iter().any(|it| it.contains("fsbase")), claims);
        // It stores nothing on the stack.
        assert!(
            !lines
                .iter()
                .any(|it| it.starts_with("push") || it.contains("rsp)"))
        );
        assert_golden(name, &lines);
    }
}

#[test]
fn calls_are_counted_before_the_displaced_instructions() {
    let pointers = pointers(SharedLayout::default()).count;
    let templates = CountTemplates::of(AT, pointers).unwrap();
    let template = templates.of_function(false);
    let at = AT.plus(0x1000);
    // xor %eax,%eax; ret
    let code = template.around(at, 2, &[0x31, 0xc0, 0xc3]).unwrap();
    assert_eq!(code.len(), template.len() + 3);
    assert_eq!(code[template.split()..][..3], [0x31, 0xc0, 0xc3]);
    assert_eq!(
        disassembled(&code, at)[7..],
        [
            "add -0x2002(%rip),%rdx # 0x555500000020",
            "cmp %rcx,(%rdx)",
            "jne 0x55550000204a",
            "rdfsbase %rcx",
            "cmp %rcx,0x8(%rdx)",
            "jne 0x55550000204a",
            "mov 0x10(%rdx),%rdx",
            "incq 0x90(%rdx)",
            "movq %mm1,%rcx",
            "movq %mm2,%rdx",
            "emms",
            "xor %eax,%eax",
            "ret",
            "lea -0x14(%rip),%rdx # 0x55550000203d",
            "jmp 0x555500000a00",
        ]
    );
    // At the address that it was made for; and around so many bytes that its short branches still reach over them, or
    // do not.
    let own = template.around(AT, 0, &[]).unwrap();
    assert_eq!(own.len(), template.len());
    assert!(template.around(at, 2, &[0x90; 80]).is_some());
    assert!(template.around(at, 2, &[0x90; 120]).is_none());
}

// A forked child has the shared data of its parent, with the counter of lost calls and the lock.
#[test]
fn forked_child_leaves_timed_code_at_once() {
    let in_program = LiveAddr(0x5555_0000_0018);
    let locked = LockedRegisters {
        at: LiveAddr(0x5555_0000_0800),
        unsaved: LiveAddr(0x5555_0000_0900),
    };
    let pointers = RecordPointers {
        shared: LiveAddr(0x5555_0000_0030),
        in_program,
        layout: SharedLayout::default(),
        untyped: LiveAddr(0x5555_0000_0b00),
        sampled: LiveAddr(0x5555_0000_0a00),
        saved: locked,
    };
    for (is_entry, mmx_is_free) in [(true, true), (true, false), (false, false)] {
        let role = |is_from_start| TimedRole {
            function: 0,
            stack: StackKind::OfThread,
            is_ocaml: false,
            is_entry,
            is_from_start,
        };
        let what = if is_entry {
            CallEnd::Entry
        } else {
            CallEnd::Exit(ExitKind::Return)
        };
        let code = |role: TimedRole| {
            let timed = TimedCalls {
                role: &role,
                filter: None,
                keys: None,
                reported: None,
                are_in_range: false,
            };
            call::code(AT, what, mmx_is_free, timed, pointers).unwrap()
        };
        let of_program = code(role(true));
        let end = AT.0 + of_program.len() as u64 - 1;
        let lines = disassembled(&of_program, AT);
        assert!(
            lines[0].starts_with("cmpb $0x0,") && lines[0].ends_with(&format!("# {in_program}"))
        );
        assert_eq!(lines[1], format!("je {end:#x}"));
        // If a process ran before it was observed, its forked children have their own data.
        let lines = disassembled(&code(role(false)), AT);
        assert_eq!(lines[0], "test $0xf80,%esp");
    }
}

/// Returns ends of pairs with these numbers: none, a start, a stop, both, several.
fn all_ends(one: u32, other: u32) -> Vec<Vec<PairEnd>> {
    vec![
        vec![],
        vec![PairEnd::Start(one)],
        vec![PairEnd::Stop(one)],
        vec![PairEnd::Stop(one), PairEnd::Start(one)],
        vec![PairEnd::Stop(other), PairEnd::Start(one)],
        vec![PairEnd::Start(one), PairEnd::Start(other)],
        vec![PairEnd::Stop(one), PairEnd::Stop(other)],
        vec![
            PairEnd::Stop(one),
            PairEnd::Stop(other),
            PairEnd::Start(one),
        ],
    ]
}

/// Returns roles, each with variants that differ from it in few things: whether they count, the numbers
/// of their pairs, what they watch.
fn roles_and_variants() -> Vec<(Role, Vec<Role>)> {
    let role = |is_counted, ends: &[PairEnd], many: Option<usize>, point| Role {
        is_counted,
        ends: ends.to_vec(),
        marks: Marks::default(),
        watched: many.map(|many| WatchRole {
            formats: Vec::new(),
            result_format: Some(Default::default()),
            point,
            arguments: vec![ArgumentSource::Register(Register::R12); many],
            sample: None,
            function: None,
            is_ocaml: false,
        }),
        ..Role::default()
    };
    let watched = || (0..=MAX_ARGUMENTS).map(Some).chain([None]);
    let mut all = Vec::new();
    for (which, ends) in all_ends(0, 1).iter().enumerate() {
        for (many, is_counted) in watched().flat_map(|many| [(many, false), (many, true)]) {
            let mut likes = vec![role(!is_counted, ends, many, 0)];
            for (one, other) in [(1, 0), (2, 63)] {
                likes.push(role(is_counted, &all_ends(one, other)[which], many, 1));
            }
            let next = many.map_or(0, |many| many + 1);
            for many in [None, Some(0), Some(next.min(MAX_ARGUMENTS))] {
                likes.push(role(is_counted, ends, many, u32::MAX));
            }
            all.push((role(is_counted, ends, many, 0), likes));
        }
    }
    all
}

// promise: Observations: Every trampoline fits the common length of its arena, whatever roles the other sites have (128
//    roles, each with 6 variants)
#[test]
fn every_trampoline_fits_beside_any_others() {
    let layout = SharedLayout {
        pairs: 64,
        record_len: record::len(MAX_ARGUMENTS, ArgumentRoom::Fields),
        ..SharedLayout::default()
    };
    for (role, likes) in roles_and_variants() {
        for like in &likes {
            for both in [[&role, like], [like, &role]] {
                let len = probe_site::longest(both.into_iter(), layout).unwrap();
                assert_fits(&role, len, layout);
                assert_fits(like, len, layout);
            }
        }
    }
}

fn assert_fits(role: &Role, len: u64, layout: SharedLayout) {
    for point in [0, 0x2f] {
        let pointers = Pointers {
            point,
            ..pointers(layout)
        };
        let recording =
            probe_site::recording(AT, role, &pointers, AT.plus(len - TAIL_LEN)).unwrap();
        assert!(
            recording.len() as u64 + TAIL_LEN <= len,
            "{role:?} in {len}"
        );
        let whole = site(len, role, &pointers).unwrap();
        assert!(whole.starts_with(&recording), "{role:?}");
        assert_eq!(whole.len() as u64, len);
        assert_eq!(whole[(len - TAIL_LEN) as usize], RET);
    }
}

#[test]
fn oversized_trampoline_is_not_truncated() {
    let role = Role {
        is_counted: true,
        ends: vec![PairEnd::Start(0)],
        ..Role::default()
    };
    let layout = SharedLayout {
        pairs: 1,
        record_len: 0,
        ..SharedLayout::default()
    };
    let pointers = pointers(layout);
    let of_len = |len| site(len, &role, &pointers);
    let far = probe_site::len(&role, layout).unwrap();
    let needed = (0..far).rev().find(|len| of_len(*len).is_err()).unwrap() + 1;
    assert!(needed > 200);
    for len in 0..needed {
        assert!(of_len(len).is_err(), "{len}");
    }
    for len in needed..needed + 200 {
        assert_eq!(of_len(len).unwrap().len() as u64, len);
    }
}

/// The trampoline of a site.
fn site(len: u64, role: &Role, pointers: &Pointers) -> Result<Vec<u8>, DoesNotFit> {
    probe_site::code(AT, len, WRAPPER, |tail| {
        probe_site::recording(AT, role, pointers, tail)
    })
}

#[test]
fn every_point_of_an_arena_has_its_trampoline() {
    let counted = Role {
        is_counted: true,
        ..Role::default()
    };
    check_arena(&counted, SharedLayout::default());
    let role = Role {
        is_counted: true,
        ends: vec![PairEnd::Stop(0), PairEnd::Start(1)],
        marks: Marks::default(),
        watched: Some(WatchRole::default()),
        ..Role::default()
    };
    let shared = SharedLayout {
        pairs: 2,
        record_len: record::len(3, ArgumentRoom::Fields),
        ..SharedLayout::default()
    };
    check_arena(&role, shared);
}

/// Checks the trampolines of an arena whose points have this role.
fn check_arena(role: &Role, shared: SharedLayout) {
    let planned = |index: u64| PlannedPoint {
        point: Point {
            address: LiveAddr(0x5555_0000_0000 + 16 * index),
            kind: PointKind::Site {
                operand: [1, 2, 3, index as u8],
            },
        },
        role: role.clone(),
        of: PointOwner::Site(index as usize),
        part: 0,
        changed_word: None,
    };
    let plan = ObservationPlan::of_points((0..100).map(planned).collect(), shared);
    let arena = Arena {
        points: plan.points.iter().map(|planned| planned.point).collect(),
        trampoline_len: longest(&plan).unwrap(),
        shared,
        id: new_id(),
        ..arena(0x5555_1000_0000)
    };
    let code = arena_code(&arena, &plan, &plan.points, &arena, true).unwrap();
    assert!(code.moves.is_empty() && code.out_of_reach.is_empty());
    let code = code.bytes;
    assert_eq!(code.len() as u64, arena.code_len());
    for index in 0..100 {
        let tail = (arena.tail(index).0 - arena.code.0) as usize;
        assert_eq!(code[tail], RET);
        if role.is_only_counted() {
            // It is made from a template, and is what the assembler would make.
            let at = arena.trampoline(index);
            let pointers = Pointers::of(&arena, index, &arena);
            let assembled = probe_site::recording(at, role, &pointers, arena.tail(index)).unwrap();
            let of_template = &code[(at.0 - arena.code.0) as usize..];
            assert_eq!(assembled, of_template[..assembled.len()]);
        }
    }
}
