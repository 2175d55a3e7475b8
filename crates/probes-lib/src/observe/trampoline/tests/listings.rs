//! The code of trampolines of all kinds, as objdump disassembles it: a change of what is emitted is seen in the files of the directory
//! `listings`. There, a branch to `.+5` leads to the fifth line after it, and what is relative to the instruction pointer is its address, so
//! that a new instruction changes few other lines.

use std::num::NonZeroU64;

use test_support::{Talker, fixture};

use super::super::call::{CallEnd, TimedCalls, freed_stack};
use super::super::function::FunctionCode;
use super::super::function_record::{RecordPointers, RecordedEvent};
use super::*;
use crate::address::{CodeRange, FileAddr, LoadBias};
use crate::expression::{Expression, Keys, Parameter, ParameterKind, Scope};
use crate::observe::functions::ObservedFunctions;
use crate::observe::layout::calls::CallsLayout;
use crate::observe::layout::keys::KeysLayout;
use crate::observe::layout::semaphores::{ChangedWord, WordChange};
use crate::observe::layout::stack_copies::{FiberFields, StackCopies};
use crate::observe::layout::values::ValuesLayout;
use crate::observe::observation::{CallOnce, Observation};
use crate::observe::role::{
    ArgumentFormat, ArgumentRoom, ExitsRole, FilterRole, FreedStackRole, FunctionPart,
    HistogramRole, IntegerRole, KeyRole, MemorySource, PairFilter, WatchedFunction, WordKind,
};
use crate::patch_plan::PatchPlanner;
use crate::patch_plan::code::Code;
use crate::patch_plan::site::PatchSite;
use crate::select::function::FunctionSelector;
use crate::unwind::trampolines::tests::never_left;

const FIBERS: FiberFields = FiberFields {
    current_stack: 0x28,
    c_stack: 0x40,
};

const ON_FIBER: StackKind = StackKind::OfFiber {
    current_stack: FIBERS.current_stack,
};

fn function_pointers(layout: SharedLayout) -> FunctionPointers {
    FunctionPointers {
        of_point: pointers(layout),
        counter: LiveAddr(0x5555_0000_0d00),
        in_program: LiveAddr(0x5555_0000_0018),
        saved_registers: LiveAddr(0x5555_0000_0800),
    }
}

fn record_pointers(layout: SharedLayout) -> RecordPointers {
    function_pointers(layout).of_record()
}

/// Returns the trampoline at `AT` of a place in a function that does more than count.
fn of_function(site: &PatchSite, role: &Role, layout: SharedLayout) -> FunctionCode {
    let pointers = function_pointers(layout);
    let made = function::code(AT, (site, LoadBias::NONE), role, &pointers);
    made.unwrap().unwrap()
}

fn timed_layout(of_self: bool, by_caller: bool) -> SharedLayout {
    SharedLayout {
        calls: CallsLayout {
            functions: 3,
            of_self,
            by_caller,
            keeps_arguments: false,
        },
        ..SharedLayout::default()
    }
}

/// The scope of a point with a value and a word, and where they are.
fn scope() -> (Scope, Vec<ArgumentSource>) {
    let kinds = [ParameterKind::Value, ParameterKind::Word];
    let parameters = kinds.map(|kind| Parameter { name: None, kind });
    let scope = Scope::of("function p", "p", parameters.to_vec());
    let sources = [Register::RDI, Register::RSI].map(ArgumentSource::Register);
    (scope.of_entry().asking_kernel_if(true), sources.to_vec())
}

fn filter(text: &str) -> Arc<FilterRole> {
    let expression: Expression = text.parse().unwrap();
    let (scope, arguments) = scope();
    Arc::new(FilterRole {
        filter: expression.filter(&scope).unwrap(),
        arguments,
    })
}

fn keys(text: &str) -> KeyRole {
    let keys: Keys = text.parse().unwrap();
    let (scope, arguments) = scope();
    KeyRole {
        parts: keys.parts(&scope).unwrap(),
        arguments,
        name: 5,
    }
}

fn histogram(text: &str) -> HistogramRole {
    let expression: Expression = text.parse().unwrap();
    let (scope, arguments) = scope();
    let integer = expression.integer(&scope).unwrap();
    HistogramRole {
        number: 1,
        integer: Arc::new(IntegerRole { integer, arguments }),
        linear: None,
    }
}

fn timed_role(stack: StackKind, is_ocaml: bool, is_from_start: bool) -> TimedRole {
    TimedRole {
        function: 2,
        stack,
        is_ocaml,
        is_entry: true,
        is_from_start,
    }
}

fn reported() -> WatchRole {
    WatchRole {
        point: 7,
        arguments: vec![
            ArgumentSource::Register(Register::RDI),
            ArgumentSource::Register(Register::R12),
        ],
        ..WatchRole::default()
    }
}

/// What points to no memory.
fn reported_float() -> WatchRole {
    WatchRole {
        point: 7,
        arguments: vec![ArgumentSource::Vector(Register::XMM3)],
        ..WatchRole::default()
    }
}

/// Returns the listing of code: instructions without their addresses. From each of them,
/// a way out is found.
fn listed(code: &[u8], at: LiveAddr) -> Vec<String> {
    let instructions = instructions(code, at);
    assert_eq!(never_left(code, at, &instructions), [""; 0]);
    let end = at.0 + code.len() as u64;
    let line = |(index, (_, text)): (usize, &(u64, String))| {
        if let Some((before, address)) = text.split_once(" # ") {
            let is_relative = |it: &&str| it.ends_with("(%rip)");
            let operand = before.split([' ', ',']).find(is_relative).unwrap();
            return before.replace(operand, &format!("{address}(%rip)"));
        }
        let target = text
            .split_once(" 0x")
            .filter(|(name, _)| name.starts_with('j'));
        let target = target.and_then(|(name, it)| Some((name, u64::from_str_radix(it, 16).ok()?)));
        match target {
            Some((name, target)) if (at.0..end).contains(&target) => {
                // Nops are left out.
                let to = instructions.partition_point(|(address, _)| *address < target);
                format!("{name} .{:+}", to as i64 - index as i64)
            }
            _ => text.clone(),
        }
    };
    instructions.iter().enumerate().map(line).collect()
}

/// Returns the listing of an entry, and of a return or, if the function `jumps`, of a jump to another one.
fn timed(
    timed: TimedCalls<'_>,
    mmx_is_free: bool,
    layout: SharedLayout,
    jumps: bool,
) -> Vec<String> {
    let kind = if jumps {
        ExitKind::Jump
    } else {
        ExitKind::Return
    };
    let both = [CallEnd::Entry, CallEnd::Exit(kind)].map(|what| {
        let code = call::code(AT, what, mmx_is_free, timed, record_pointers(layout)).unwrap();
        listed(&code, AT)
    });
    both.join(&"".to_owned())
}

fn plain(role: &TimedRole) -> TimedCalls<'_> {
    TimedCalls {
        role,
        filter: None,
        keys: None,
        reported: None,
        are_in_range: false,
    }
}

#[test]
fn timed_calls_are_golden() {
    let of_c = timed_role(StackKind::OfThread, false, false);
    let layout = timed_layout(false, false);
    assert_golden(
        "listings/timed.txt",
        &timed(plain(&of_c), false, layout, false),
    );
    // On a fiber of OCaml, with self times and callers, of calls of a range of times.
    let of_ocaml = timed_role(ON_FIBER, true, false);
    let self_times = TimedCalls {
        are_in_range: true,
        ..plain(&of_ocaml)
    };
    let lines = timed(self_times, false, timed_layout(true, true), true);
    assert_golden("listings/timed_self.txt", &lines);
    // From the first instruction on; slow calls are reported with their stacks, of some calls only.
    let from_start = timed_role(StackKind::OfThread, false, true);
    let (filter, reported) = (filter("arg1 > 3"), reported());
    let slow = TimedCalls {
        filter: Some(&filter),
        reported: Some(&reported),
        ..plain(&from_start)
    };
    let layout = SharedLayout {
        record_len: 2 * record::len(2, ArgumentRoom::Fields) + StackCopies::OF_THREADS.len(),
        kept_len: record::len(2, ArgumentRoom::Fields),
        stacks: StackCopies::OF_THREADS,
        calls: CallsLayout {
            keeps_arguments: true,
            ..timed_layout(true, false).calls
        },
        ..SharedLayout::default()
    };
    assert_golden("listings/timed_slow.txt", &timed(slow, true, layout, false));
    // By keys.
    let keys = keys("arg1").with_name();
    let kinds = keys.kinds();
    let by_key = TimedCalls {
        keys: Some(&keys),
        ..plain(&of_c)
    };
    let layout = SharedLayout {
        values: ValuesLayout {
            histograms: crate::observe::layout::keys::histograms::ALL,
            steps: 0,
        },
        keys: KeysLayout::of(&kinds).with_histograms(),
        ..timed_layout(false, true)
    };
    assert_golden(
        "listings/timed_by_key.txt",
        &timed(by_key, false, layout, false),
    );
}

fn watched_function(words: WordKind, part: FunctionPart) -> WatchedFunction {
    WatchedFunction {
        words,
        result: words,
        has_results: true,
        has_only_results: false,
        exits_on: None,
        part,
        is_ocaml: false,
        is_from_start: false,
    }
}

fn watch_role(function: WatchedFunction, arguments: &[ArgumentSource]) -> WatchRole {
    WatchRole {
        point: 7,
        arguments: arguments.to_vec(),
        function: Some(function),
        is_ocaml: function.is_ocaml,
        result_format: Some(ArgumentFormat::WORD),
        ..WatchRole::default()
    }
}

fn recorded_layout(stacks: StackCopies) -> SharedLayout {
    SharedLayout {
        record_len: record::len(MAX_ARGUMENTS, ArgumentRoom::Fields) + stacks.len(),
        ring_doublings: 1,
        stacks,
        ..SharedLayout::default()
    }
}

fn recorded(
    watched: &WatchRole,
    (what, filter): (RecordedEvent, Option<&FilterRole>),
    mmx_is_free: bool,
    layout: SharedLayout,
) -> Vec<String> {
    let function = watched.function.unwrap();
    let watched = (watched, function, filter);
    let pointers = record_pointers(layout);
    let code = function_record::code(AT, what, watched, mmx_is_free, pointers).unwrap();
    listed(&code, AT)
}

fn in_memory(base: Option<Register>, index: Option<(Register, u8)>, size: u8) -> ArgumentSource {
    ArgumentSource::Memory(MemorySource {
        base,
        index,
        displacement: 0x18,
        size,
    })
}

#[test]
fn recorded_calls_of_c_are_golden() {
    let layout = recorded_layout(StackCopies::None);
    let of_c = watched_function(WordKind::Text, FunctionPart::Entry);
    let mut role = watch_role(
        of_c,
        &[
            ArgumentSource::Register(Register::RDI),
            ArgumentSource::Register(Register::R12),
            ArgumentSource::Vector(Register::XMM3),
            ArgumentSource::Constant(77),
        ],
    );
    let format = |size, is_float| ArgumentFormat {
        size,
        signed: false,
        is_float,
    };
    role.formats = vec![format(8, false), format(4, false), format(8, true)];
    let call = (RecordedEvent::Call, None);
    assert_golden(
        "listings/recorded.txt",
        &recorded(&role, call, false, layout),
    );
    // Operands in memory, at an instruction: registers are saved under the lock. Some of them are read.
    let inside = watched_function(WordKind::Text, FunctionPart::Inside);
    let mut role = watch_role(
        inside,
        &[
            in_memory(Some(Register::RSP), None, 8),
            in_memory(Some(Register::RCX), Some((Register::R13, 4)), 4),
            in_memory(None, None, 2),
            in_memory(None, Some((Register::RDX, 8)), 1),
        ],
    );
    role.sample = NonZeroU64::new(1000);
    let filter = filter("arg1 > 3");
    let some = (RecordedEvent::Call, Some(&*filter));
    assert_golden(
        "listings/recorded_operands.txt",
        &recorded(&role, some, false, layout),
    );
    // Without asking the kernel, only addresses are recorded; of numbers, nothing else.
    let numbers = watched_function(WordKind::Numbers, FunctionPart::Entry);
    let role = watch_role(numbers, &role.arguments);
    assert_golden(
        "listings/recorded_addresses.txt",
        &recorded(&role, call, true, layout),
    );
}

#[test]
fn calls_are_sampled_or_filtered_or_both() {
    let layout = recorded_layout(StackCopies::None);
    let function = watched_function(WordKind::Numbers, FunctionPart::Entry);
    let filter = filter("arg0.1 > 3");
    // Where the code counts the hits that are sampled, and those that are untyped.
    let counters = |(sample, filter): (u64, Option<&FilterRole>)| {
        let role = WatchRole {
            sample: NonZeroU64::new(sample),
            ..watch_role(function, &[])
        };
        let lines = recorded(&role, (RecordedEvent::Call, filter), true, layout);
        // A branch to a label that is nowhere would leave the code.
        let leaves = |line: &String| line.starts_with('j') && !line.contains(" .");
        assert!(!lines.iter().any(leaves), "{lines:#?}");
        ["0x555500000c00", "0x555500000b00"].map(|at| {
            let with_it = lines.iter().filter(|line| line.contains(at));
            with_it.count()
        })
    };
    let all = [
        (0, None),
        (1000, None),
        (0, Some(&*filter)),
        (1000, Some(&*filter)),
    ];
    assert_eq!(all.map(counters), [[0, 0], [1, 0], [0, 1], [1, 1]]);
}

#[test]
fn recorded_calls_of_ocaml_are_golden() {
    let arguments = [Register::RAX, Register::RBX].map(ArgumentSource::Register);
    let values = WatchedFunction {
        exits_on: Some(ON_FIBER),
        is_ocaml: true,
        ..watched_function(WordKind::Values, FunctionPart::Entry)
    };
    let role = watch_role(values, &arguments);
    let layout = recorded_layout(StackCopies::Copied {
        fibers: Some(FIBERS),
        may_ask_kernel: true,
    });
    let call = (RecordedEvent::Call, None);
    assert_golden(
        "listings/recorded_on_fiber.txt",
        &recorded(&role, call, false, layout),
    );
    // Code that is called by OCaml 5, from the first instruction on, with the fibers below it.
    let any = WatchedFunction {
        exits_on: Some(StackKind::OfThread),
        is_from_start: true,
        ..watched_function(WordKind::MaybeValues, FunctionPart::Entry)
    };
    let role = watch_role(any, &arguments[..1]);
    assert_golden(
        "listings/recorded_below_c.txt",
        &recorded(&role, call, true, layout),
    );
    let layout = recorded_layout(StackCopies::Copied {
        fibers: Some(FIBERS),
        may_ask_kernel: false,
    });
    let role = watch_role(values, &[]);
    assert_golden(
        "listings/recorded_stacks.txt",
        &recorded(&role, call, false, layout),
    );
}

#[test]
fn recorded_exits_are_golden() {
    let layout = recorded_layout(StackCopies::None);
    let text = watched_function(WordKind::Text, FunctionPart::Exit);
    let exit = |function, kind| {
        let role = watch_role(function, &[]);
        recorded(&role, (RecordedEvent::Exit(kind), None), true, layout)
    };
    assert_golden(
        "listings/recorded_result.txt",
        &exit(text, ExitKind::Return),
    );
    // That of another function is not read.
    let jump = exit(text, ExitKind::Jump);
    assert!(jump.len() < exit(text, ExitKind::Return).len());
    assert!(
        jump.iter().any(|line| line.contains("$0x20000007")),
        "{jump:#?}"
    );
    let without = WatchedFunction {
        has_results: false,
        ..text
    };
    let returned = exit(without, ExitKind::Return);
    assert!(
        returned.iter().any(|line| line.contains("$0x80000007")),
        "{returned:#?}"
    );
    assert_eq!(returned.len(), jump.len());
    let only_results = WatchedFunction {
        has_only_results: true,
        ..text
    };
    let jump = exit(only_results, ExitKind::Jump);
    assert_eq!(jump, ["lock incq 0x555500000b00(%rip)"]);
    assert_eq!(
        exit(only_results, ExitKind::Return),
        exit(text, ExitKind::Return)
    );
}

/// Returns the patch of the entry of a function whose exits are displaced with it: `fldz; nop; ret; int3`, or
/// `mov %rdi,%rax; ret; int3`.
fn short_site(uses_x87: bool) -> PatchSite {
    let bytes: &[u8] = if uses_x87 {
        b"\xd9\xee\x90\xc3\xcc"
    } else {
        b"\x48\x89\xf8\xc3\xcc"
    };
    let start = FileAddr(0x5555_0100_0000);
    let mut code = Code::default();
    code.add(start, bytes.to_vec(), true);
    let range = CodeRange { start, len: 5 };
    let planner = PatchPlanner::new(code, &[range], &[], []);
    let plan = planner.function(range);
    let site = plan.exits.unwrap().entry;
    assert_eq!(site.mmx_is_free(), !uses_x87);
    site
}

/// Returns the layout of an observation with these keys, each maybe with a histogram.
fn keyed_layout(keys: &KeyRole, have_histograms: bool) -> SharedLayout {
    let layout = KeysLayout::of(&keys.kinds());
    SharedLayout {
        keys: if have_histograms {
            layout.with_histograms()
        } else {
            layout
        },
        ..SharedLayout::default()
    }
}

#[test]
fn trampolines_of_functions_that_are_asked_are_golden() {
    let made = |site: &PatchSite, role: &Role, layout| {
        let (code, copy) = of_function(site, role, layout);
        // All displaced instructions are in the trampoline.
        assert!(copy.moves().count() >= 2, "{role:?}");
        listed(&code, AT)
    };
    let filtered = Role {
        is_counted: true,
        filter: Some(filter("arg1 > 3")),
        ..Role::default()
    };
    let plain = SharedLayout::default();
    assert_golden(
        "listings/filtered.txt",
        &made(&short_site(false), &filtered, plain),
    );
    assert_golden(
        "listings/filtered_locked.txt",
        &made(&short_site(true), &filtered, plain),
    );
    let keys = keys("arg1");
    let keyed = Role {
        keys: Some(Arc::new(keys.clone())),
        ..filtered.clone()
    };
    let layout = keyed_layout(&keys, false);
    assert_golden(
        "listings/keyed.txt",
        &made(&short_site(false), &keyed, layout),
    );
    assert_golden(
        "listings/keyed_locked.txt",
        &made(&short_site(true), &keyed, layout),
    );
    // A histogram of the result, at the return.
    let layout = SharedLayout {
        values: ValuesLayout {
            histograms: 2,
            steps: 0,
        },
        ..SharedLayout::default()
    };
    for is_ocaml in [false, true] {
        let of_results = Role {
            histogram: Some(histogram("arg1")),
            exits: Some(ExitsRole { is_ocaml }),
            ..Role::default()
        };
        let name = if is_ocaml {
            "results_of_ocaml"
        } else {
            "results"
        };
        let lines = made(&short_site(false), &of_results, layout);
        assert_golden(&format!("listings/{name}.txt"), &lines);
    }
}

fn paired_role() -> Role {
    Role {
        ends: vec![PairEnd::Stop(1), PairEnd::Start(0)],
        marks: Marks {
            argument: Some(Register::RDI),
            is_word: false,
            frame: FrameId::Stack,
        },
        ..Role::default()
    }
}

#[test]
fn trampolines_of_paired_sites_are_golden() {
    let layout = SharedLayout {
        pairs: 2,
        pairs_by_key: true,
        kept_len: record::len(2, ArgumentRoom::Fields),
        record_len: 2 * record::len(2, ArgumentRoom::Fields),
        ..SharedLayout::default()
    };
    let role = Role {
        pair_key: Some(Arc::new(keys("arg1"))),
        reported: Some(reported_float()),
        ..paired_role()
    };
    let site = short_site(false);
    let (code, _) = of_function(&site, &role, layout);
    assert_golden("listings/paired_by_key.txt", &listed(&code, AT));
    // Two that it stops: the key of the second one is found again.
    let stops = Role {
        ends: vec![PairEnd::Stop(0), PairEnd::Stop(1)],
        ..role
    };
    let lines = listed(&enabled_trampoline(&stops, layout), AT);
    assert_golden("listings/paired_stops_by_key.txt", &lines);
    // A probe's site with a filter instead of keys.
    let role = Role {
        pair_filter: PairFilter::Starts(filter("arg1 > 3")),
        reported: Some(reported_float()),
        is_in_range: true,
        ..paired_role()
    };
    assert_golden(
        "listings/paired_slow.txt",
        &listed(&enabled_trampoline(&role, layout), AT),
    );
    let by_key = keys("arg1").with_name();
    let layout = SharedLayout {
        pairs: 2,
        ..keyed_layout(&by_key, true)
    };
    let role = Role {
        time_keys: Some(Arc::new(by_key)),
        ..paired_role()
    };
    assert_golden(
        "listings/paired_times_by_key.txt",
        &listed(&enabled_trampoline(&role, layout), AT),
    );
}

#[test]
fn keys_are_hashed_again_after_times_by_key() {
    let by_key = keys("arg1").with_name();
    let layout = SharedLayout {
        pairs: 2,
        pairs_by_key: true,
        ..keyed_layout(&by_key, true)
    };
    let with_ends = |ends: &[PairEnd]| {
        let role = Role {
            ends: ends.to_vec(),
            pair_key: Some(Arc::new(keys("arg1"))),
            time_keys: Some(Arc::new(by_key.clone())),
            ..paired_role()
        };
        listed(&enabled_trampoline(&role, layout), AT)
    };
    // What mixes the bits of a hash: once for each key, and once for the key of a time.
    let hashes = |ends: &[PairEnd]| {
        let lines = with_ends(ends);
        let once = with_ends(&[PairEnd::Start(0)]);
        let is_mul = |it: &&String| it.starts_with("imul") || it.starts_with("mul");
        let [all, one] = [lines, once].map(|it| it.iter().filter(is_mul).count());
        (all, one)
    };
    let (one_stop, start) = hashes(&[PairEnd::Stop(0)]);
    let (stop_and_start, _) = hashes(&[PairEnd::Stop(0), PairEnd::Start(1)]);
    assert!(one_stop > start && stop_and_start > one_stop + start - 1);
    let lines = with_ends(&[PairEnd::Stop(1), PairEnd::Start(0)]);
    assert_golden("listings/paired_key_and_times.txt", &lines);
}

/// Returns a plan of functions, of which the last one uses the x87 unit, 0x100 bytes from each other.
fn plan_of_code(observation: &Observation) -> ObservationPlan {
    // sub $8,%rsp; mov $1,%eax; add $8,%rsp; ret
    let plain = b"\x48\x83\xec\x08\xb8\x01\0\0\0\x48\x83\xc4\x08\xc3";
    // fldz; fstp %st(0); mov $1,%eax; ret
    let x87 = b"\xd9\xee\xdd\xd8\xb8\x01\0\0\0\xc3";
    let code: [(FileAddr, &[u8]); 3] = [
        (FileAddr(0x5555_0100_0000), plain),
        (FileAddr(0x5555_0100_0100), plain),
        (FileAddr(0x5555_0100_0200), x87),
    ];
    let functions = ObservedFunctions::of_code(&code, LoadBias::NONE);
    let program = Arc::new(program_with_probes(&["a"]));
    ObservationPlan::of(observation, program, Arc::new(functions)).unwrap()
}

fn arena_of(plan: &ObservationPlan, code: u64, trampoline_len: u64) -> Arena {
    Arena {
        code: LiveAddr(code),
        points: plan.points.iter().map(|planned| planned.point).collect(),
        trampoline_len,
        lead: 0,
        shared: plan.shared,
        is_filtered: plan.is_filtered(),
        is_sampled: plan.is_sampled(),
        ..arena_of_one()
    }
}

#[test]
fn functions_are_counted_in_trampolines_of_their_own() {
    let plan = plan_of_code(&Observation::new());
    let arena = arena_of(&plan, 0x5555_1000_0000, longest(&plan).unwrap());
    let code = arena_code(&arena, &plan, &plan.points, &arena, true).unwrap();
    assert!(code.out_of_reach.is_empty());
    assert_eq!(code.bytes.len() as u64, arena.code_len());
    let start = |index| (arena.trampoline(index).0 - arena.code.0) as usize;
    let lines = |index| {
        listed(
            &code.bytes[start(index)..start(index + 1)],
            arena.trampoline(index),
        )
    };
    let counts = |lines: &[String]| -> Vec<String> {
        let counts = lines.iter().filter(|it| it.contains("inc"));
        counts.cloned().collect()
    };
    let (first, second) = (lines(0), lines(1));
    assert_eq!(first.len(), second.len());
    assert_eq!(counts(&first), ["incq 0x80(%rdx)"]);
    assert_eq!(counts(&second), ["incq 0x88(%rdx)"]);
    assert!(first.contains(&"mov $0x1,%eax".to_owned()));
    // The one with the x87 unit has no registers to save others in.
    assert_golden("listings/counted_locked.txt", &lines(2));
    // Threads that were at the second displaced instruction, and on.
    let moves: Vec<(u64, bool)> = code
        .moves
        .iter()
        .map(|(from, to)| {
            let index = (from.0 - 0x5555_0100_0000) / 0x100;
            let trampoline =
                arena.trampoline(index as usize).0..arena.trampoline(index as usize + 1).0;
            (from.0 - 0x5555_0100_0000, trampoline.contains(&to.0))
        })
        .collect();
    assert_eq!(
        moves,
        [(0x4, true), (0x104, true), (0x202, true), (0x204, true)]
    );
    // Too far away, and too short: none is cut off.
    let far = arena_of(&plan, 0x6666_0000_0000, arena.trampoline_len);
    let code = arena_code(&far, &plan, &plan.points, &far, true).unwrap();
    assert_eq!(code.out_of_reach, [0, 1, 2]);
    let short = arena_of(&plan, 0x5555_1000_0000, LINE / 2);
    let code = arena_code(&short, &plan, &plan.points, &short, true).unwrap();
    assert_eq!(code.out_of_reach, [0, 1]);
    let at = (short.trampoline(0).0 - short.code.0) as usize;
    assert_eq!(
        code.bytes[at..at + LINE as usize / 2],
        [NOP; LINE as usize / 2]
    );
}

#[test]
fn longest_trampoline_is_room_for_all_functions() {
    let target = Talker::start(&fixture("calls.pie"));
    let selectors = ["leaf", "outer", "indirect"];
    let selectors = selectors.map(|name| FunctionSelector::Glob(name.parse().unwrap()));
    let each = |add: fn(Observation, FunctionSelector) -> Observation| {
        selectors.iter().cloned().fold(Observation::new(), add)
    };
    let counted = || each(Observation::count_functions);
    let timed = || each(Observation::time_functions);
    let watched = || each(Observation::watch_functions);
    let expression = |text: &str| -> Expression { text.parse().unwrap() };
    let keys = || "arg0, caller".parse::<Keys>().unwrap();
    for observation in [
        counted(),
        counted().only_where(expression("arg0 > 3")),
        counted().only_where(expression("retval > 3")),
        counted().histogram_of(expression("arg0")),
        counted().by(keys()),
        counted().histogram_of(expression("arg0")).by(keys()),
        timed(),
        timed().self_times().by_caller(),
        timed().only_starts_where(expression("arg0 > 3")),
        timed().report_slow(Duration::from_millis(1)).with_stacks(),
        watched(),
        watched().only_where(expression("arg0 > 3")),
        watched().watch_results(),
        watched().watch_exits().with_stacks(),
        watched().sample(NonZeroU64::new(100).unwrap()),
    ] {
        let functions = ObservedFunctions::find(target.pid(), &observation).unwrap();
        assert_eq!(functions.functions.len(), 3);
        let program = Arc::new(program_with_probes(&["a"]));
        let plan = ObservationPlan::of(&observation, program, Arc::new(functions)).unwrap();
        let near = (plan.points[0].point.address.0 & !0xfff) + (16 << 20);
        let len = longest(&plan).unwrap();
        let arena = arena_of(&plan, near, len);
        let code = arena_code(&arena, &plan, &plan.points, &arena, true).unwrap();
        assert!(code.out_of_reach.is_empty(), "{observation:?}");
        // The room is not much more than the longest takes.
        let takes = |index: usize| {
            let start = (arena.trampoline(index).0 - near) as usize;
            let bytes = &code.bytes[start..start + len as usize];
            bytes
                .iter()
                .rposition(|it| *it != NOP)
                .map_or(0, |last| last + 1)
        };
        let most = (0..plan.points.len()).map(takes).max().unwrap() as u64;
        assert!(len < most + 3 * LINE, "{len} for {most} of {observation:?}");
    }
}

#[test]
fn calls_and_exits_are_recorded_where_they_are() {
    let site = short_site(false);
    let layout = recorded_layout(StackCopies::None);
    let made = |function: WatchedFunction| {
        let role = Role {
            watched: Some(watch_role(function, &[])),
            ..Role::default()
        };
        of_function(&site, &role, layout).0.len()
    };
    let part = |part, has_results, exits_on| WatchedFunction {
        has_results,
        exits_on,
        ..watched_function(WordKind::Text, part)
    };
    let (entry, exit) = (FunctionPart::Entry, FunctionPart::Exit);
    let plain = made(part(entry, false, None));
    let displaced = site.copy_at(LoadBias::NONE, AT).unwrap().code().len();
    assert_eq!(made(part(exit, false, None)), displaced);
    // A call; an exit with its result, or without; both.
    let (call, result) = (plain - displaced, made(part(exit, true, None)));
    let place = Some(StackKind::OfThread);
    let left = made(part(exit, false, place));
    assert!(call > 100 && result > displaced + 100 && left > displaced + 100);
    assert!((call + result).abs_diff(made(part(entry, true, None))) < 16);
    let only_results = WatchedFunction {
        has_only_results: true,
        ..part(entry, true, None)
    };
    assert_eq!(made(only_results), result);
}

#[test]
fn watched_sites_save_what_they_need_first() {
    let layout = recorded_layout(StackCopies::None);
    let watched = || Role {
        watched: Some(reported_float()),
        ..Role::default()
    };
    let with_stack = recorded_layout(StackCopies::OF_THREADS);
    let lines = listed(&enabled_trampoline(&watched(), with_stack), AT);
    assert_golden("listings/watched_stack.txt", &lines);
    let filtered = Role {
        filter: Some(filter("arg1 > 3")),
        ..watched()
    };
    assert_golden(
        "listings/watched_some.txt",
        &listed(&enabled_trampoline(&filtered, layout), AT),
    );
    let mut sampled = watched();
    sampled.watched.as_mut().unwrap().sample = NonZeroU64::new(1000);
    assert_golden(
        "listings/watched_sampled.txt",
        &listed(&enabled_trampoline(&sampled, layout), AT),
    );
    // What else is recorded has to be saved for as well.
    let mut counted = Role {
        is_counted: true,
        ..filtered.clone()
    };
    counted.watched.as_mut().unwrap().sample = NonZeroU64::new(1000);
    assert_golden(
        "listings/watched_counted.txt",
        &listed(&enabled_trampoline(&counted, layout), AT),
    );
    let by_keys = Role {
        histogram: Some(histogram("arg1")),
        ..filtered
    };
    let layout = SharedLayout {
        values: ValuesLayout {
            histograms: 2,
            steps: 0,
        },
        ..layout
    };
    assert_golden(
        "listings/watched_histogram.txt",
        &listed(&enabled_trampoline(&by_keys, layout), AT),
    );
}

#[test]
fn first_call_of_another_function_is_golden() {
    let site = short_site(false);
    let once = CallOnce {
        before: LiveAddr(0x5555_0100_0000),
        callee: LiveAddr(0x5555_0200_0000),
        ret: LiveAddr(0x5555_0200_1000),
        pid: 4711,
        word: ChangedWord {
            at: LiveAddr(0x5555_0300_0000),
            change: WordChange::Set,
        },
    };
    let counter = LiveAddr(0x5555_0000_0d00);
    let made = call_once::code(AT, (&site, LoadBias::NONE), once.before, &once, counter);
    let (code, _) = made.unwrap();
    assert!(code.len() as u64 <= call_once::LEN);
    assert_golden("listings/call_once.txt", &listed(&code, AT));
}

#[test]
fn freed_stack_is_golden() {
    let freed = FreedStackRole {
        moves_stacks: (LiveAddr(0x5555_5000_0000), 0x2f0),
        are_filtered: true,
        is_from_start: false,
    };
    let made = |freed, mmx_is_free, layout| {
        let pointers = record_pointers(layout);
        let code = freed_stack::code(AT, freed, mmx_is_free, false, pointers).unwrap();
        listed(&code, AT)
    };
    let lines = made(freed, true, timed_layout(false, false));
    assert_golden("listings/freed_stack.txt", &lines);
    // From the first instruction on, in a function that uses the x87 unit, and of all calls.
    let from_start = FreedStackRole {
        is_from_start: true,
        are_filtered: false,
        ..freed
    };
    let lines = made(from_start, false, timed_layout(true, false));
    assert_golden("listings/freed_stack_from_start.txt", &lines);
}

#[test]
fn callers_are_above_what_is_pushed() {
    let keys = keys("caller");
    let layout = keyed_layout(&keys, false);
    let role = Role {
        is_counted: true,
        keys: Some(Arc::new(keys)),
        ..Role::default()
    };
    let lines = listed(&enabled_trampoline(&role, layout), AT);
    let caller = format!("mov {PUSHED:#x}(%rsp),");
    assert!(lines.iter().any(|it| it.starts_with(&caller)), "{lines:#?}");
}

#[test]
fn fibers_below_c_need_the_kernel() {
    let of_c = watch_role(watched_function(WordKind::Text, FunctionPart::Entry), &[]);
    let with = |fibers| {
        let layout = recorded_layout(StackCopies::Copied {
            fibers,
            may_ask_kernel: false,
        });
        recorded(&of_c, (RecordedEvent::Call, None), true, layout)
    };
    assert_eq!(with(Some(FIBERS)), with(None));
}

#[test]
fn lengths_of_functions_are_those_of_their_code() {
    // sub $8,%rsp; call *(%rip); add $8,%rsp; ret
    let calling = b"\x48\x83\xec\x08\xff\x15\0\0\0\0\x48\x83\xc4\x08\xc3";
    let range = CodeRange {
        start: FileAddr(0x5555_0100_0000),
        len: calling.len() as u64,
    };
    let mut code = Code::default();
    code.add(range.start, calling.to_vec(), true);
    let planner = PatchPlanner::new(code, &[range], &[], []);
    let mut candidates = planner.function(range).entry.unwrap().into_iter();
    let calling = candidates.find(PatchSite::moves_call).unwrap();
    let layout = SharedLayout::default();
    let templates = CountTemplates::of(FAR_POINTERS.0, FAR_POINTERS.1).unwrap();
    let template = templates.of_function(false);
    for (site, alignment) in [(short_site(false), 0), (calling, 7)] {
        let at = LiveAddr(site.address().0);
        let len = |role: &Role| function::len((&site, LoadBias::NONE), role, layout, template);
        let of_code = |len: usize| (len + alignment).next_multiple_of(LINE as usize) as u64;
        let copy = site.copy_at(LoadBias::NONE, at).unwrap();
        let counted = template.len() + copy.code().len();
        assert_eq!(len(&Role::default()), of_code(counted));
        for terms in 1..12 {
            let role = Role {
                is_counted: true,
                filter: Some(filter(&vec!["arg1 > 3"; terms].join(" && "))),
                ..Role::default()
            };
            let pointers = function_pointers(layout);
            let made = function::code(at, (&site, LoadBias::NONE), &role, &pointers);
            assert_eq!(
                len(&role),
                of_code(made.unwrap().unwrap().0.len()),
                "{terms}"
            );
        }
    }
}

#[test]
fn operands_are_loaded_with_their_size() {
    let loads = |size| {
        let (_, mut arguments) = scope();
        arguments[1] = in_memory(Some(Register::RCX), None, size);
        let filter = FilterRole {
            arguments,
            filter: filter("arg1 > 3").filter.clone(),
        };
        let role = Role {
            is_counted: true,
            filter: Some(Arc::new(filter)),
            ..Role::default()
        };
        let lines = listed(&enabled_trampoline(&role, SharedLayout::default()), AT);
        let is_load = |it: &String| it.starts_with("mov") && it.contains(" (%rcx),");
        lines.into_iter().find(|it| is_load(it)).unwrap_or_default()
    };
    let expected = [
        "movzbl (%rcx),%ecx",
        "movzwl (%rcx),%ecx",
        "mov (%rcx),%ecx",
        "mov (%rcx),%rcx",
    ];
    assert_eq!([1, 2, 4, 8].map(loads), expected);
}
