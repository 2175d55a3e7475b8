//! The compiled code has the answers of the interpreter: a traced process executes it, with random arguments and
//! memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::process::{Command, Stdio};
use std::sync::Arc;

use iced_x86::code_asm::eax;
use nix::libc::{
    MAP_ANONYMOUS, MAP_FIXED_NOREPLACE, MAP_NORESERVE, MAP_PRIVATE, PROT_EXEC, PROT_READ,
    PROT_WRITE, SYS_mmap, user_fpregs_struct, user_regs_struct,
};
use nix::sys::ptrace::{self, Options, regset};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use proptest::prelude::*;
use test_support::process::{peek, poke};
use test_support::{Guard, eventually};

use super::*;
use crate::address::{LiveAddr, PAGE};
use crate::expression::{
    Answer, Expression, Filter, Hit, IntegerExpression, Parameter, ParameterKind, Scope,
};
use crate::observe::buckets::Linear;
use crate::observe::layout::keys::KeysLayout;
use crate::observe::layout::readable_pages;
use crate::observe::layout::rows::STACK_PART_BITS;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::layout::shared::validity;
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::layout::values::{ValuesLayout, header, order};
use crate::observe::role::{ArgumentRoom, HistogramRole, MemorySource};
use crate::observe::trampoline::at_point::RegisterPlace;
use crate::observe::trampoline::stack_room::RED_ZONE;
use crate::observe::trampoline::values;
use crate::observe::value_pages::runtime_pages;
use crate::ticks;

mod integers;
mod operands;
mod times;

/// Where the code is, after the address of the shared data.
pub(in super::super) const CODE: u64 = 0x10_0000_0000;
const CODE_LEN: u64 = 1 << 16;
/// Some words; the pages before and after them are not mapped.
pub(in super::super) const MEMORY: u64 = 0x10_1000_0000;
pub(in super::super) const PAGES: u64 = 3;
/// For how many ticks the table of pages is valid, if it is.
const VALID_FOR: u64 = 1 << 42;
pub(in super::super) const STACK: u64 = MEMORY + PAGE + 0x800;
pub(in super::super) const SHARED: u64 = 0x10_2000_0000;
pub(in super::super) const LAYOUT: SharedLayout = SharedLayout {
    pairs: 0,
    record_len: 0,
    argument_room: ArgumentRoom::Fields,
    ring_doublings: 0,
    filters_memory: true,
    value_pages: ValuePages::TableOfObserver,
    calls: crate::observe::layout::calls::CallsLayout {
        functions: 0,
        of_self: false,
        by_caller: false,
        keeps_arguments: false,
    },
    values: ValuesLayout {
        histograms: 2,
        steps: 0,
    },
    // For the longest keys of the tests.
    keys: KeysLayout::of_number(6),
    pairs_by_key: false,
    asks_for_threads: false,
    kept_len: 0,
    stacks: StackCopies::None,
};

/// The table of a runtime, and its entries.
pub(in super::super) const RUNTIMES: u64 = 0x10_3000_0000;
const ENTRIES: u64 = RUNTIMES + 0x100;
const ENTRY_BITS: u32 = 4;

/// Where the arguments are whose kinds [`scope`] has.
pub(in super::super) const SOURCES: [ArgumentSource; 7] = [
    ArgumentSource::Register(Register::RAX),
    ArgumentSource::Register(Register::RCX),
    ArgumentSource::Register(Register::R12),
    ArgumentSource::Vector(Register::XMM3),
    ArgumentSource::Register(Register::RDX),
    ArgumentSource::on_stack(24),
    ArgumentSource::Register(Register::RBX),
];

pub(in super::super) fn scope() -> Scope {
    scope_with(ParameterKind::Float)
}

/// The same with another kind of argument in the vector register.
fn scope_with(vector: ParameterKind) -> Scope {
    let number = ParameterKind::Number {
        bits: 16,
        signed: true,
    };
    let kinds = [
        ParameterKind::Value,
        ParameterKind::Value,
        ParameterKind::Word,
        vector,
        number,
        ParameterKind::Value,
        ParameterKind::Value,
    ];
    let parameters = kinds.map(|kind| Parameter { name: None, kind });
    Scope::of("function p", "p", parameters.to_vec()).of_entry()
}

/// The thread control block, and where in it the id of the thread is, and what it is.
const THREAD: u64 = RUNTIMES + 0x200;
const TID_OFFSET: u32 = 0x40;
pub(in super::super) const TID: u32 = 4711;

/// A process that executes code.
pub(in super::super) struct Puppet {
    _guard: Guard,
    pub(in super::super) pid: Pid,
    pub(in super::super) registers: user_regs_struct,
    vectors: user_fpregs_struct,
}

impl Puppet {
    pub(in super::super) fn new() -> Puppet {
        let mut command = Command::new("sleep");
        command.arg("1000").stdin(Stdio::null());
        let guard = Guard::spawn(&mut command);
        let pid = Pid::from_raw(guard.pid());
        // It has executed the program.
        eventually("the process sleeps", || {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            (name == "sleep\n").then_some(())
        });
        ptrace::seize(pid, Options::PTRACE_O_EXITKILL).unwrap();
        ptrace::interrupt(pid).unwrap();
        waitpid(pid, Some(WaitPidFlag::__WALL)).unwrap();
        let mut registers = ptrace::getregs(pid).unwrap();
        // Whatever call it was in is not restarted.
        registers.orig_rax = u64::MAX;
        registers.fs_base = THREAD;
        let vectors = ptrace::getregset::<regset::NT_PRFPREG>(pid).unwrap();
        let puppet = Puppet {
            _guard: guard,
            pid,
            registers,
            vectors,
        };
        for (at, len) in [
            (CODE, CODE_LEN),
            (MEMORY, PAGES * PAGE),
            (SHARED, LAYOUT.len()),
            (RUNTIMES, PAGE),
        ] {
            puppet.map(at, len);
        }
        poke(pid.as_raw(), CODE, &SHARED.to_le_bytes());
        poke(pid.as_raw(), SHARED + TID_AT, &TID_OFFSET.to_le_bytes());
        let tid_at = THREAD + u64::from(TID_OFFSET);
        poke(pid.as_raw(), tid_at, &TID.to_le_bytes());
        puppet
    }

    fn map(&self, at: u64, len: u64) {
        let old = peek(self.pid.as_raw(), self.registers.rip, 3);
        // syscall; int3
        poke(self.pid.as_raw(), self.registers.rip, &[0x0f, 0x05, 0xcc]);
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE;
        let with = user_regs_struct {
            rax: SYS_mmap as u64,
            rdi: at,
            rsi: len.next_multiple_of(PAGE),
            rdx: (PROT_READ | PROT_WRITE | PROT_EXEC) as u64,
            r10: flags as u64,
            r8: u64::MAX,
            r9: 0,
            ..self.registers
        };
        assert_eq!(self.run(with).map(|it| it.rax), Ok(at));
        poke(self.pid.as_raw(), self.registers.rip, &old);
    }

    /// Runs until a breakpoint; returns the registers there, or the signal that arrived instead and the program
    /// counter.
    pub(in super::super) fn run(
        &self,
        with: user_regs_struct,
    ) -> Result<user_regs_struct, (Signal, u64)> {
        ptrace::setregs(self.pid, with).unwrap();
        ptrace::cont(self.pid, None).unwrap();
        let status = waitpid(self.pid, Some(WaitPidFlag::__WALL)).unwrap();
        let registers = ptrace::getregs(self.pid).unwrap();
        match status {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => Ok(registers),
            WaitStatus::Stopped(_, signal) => Err((signal, registers.rip)),
            other => panic!("{other:?}"),
        }
    }

    /// Writes the table of a runtime: the readable pages of a hit as pages of values, its other pages as pages of
    /// something else, and some pages elsewhere.
    pub(in super::super) fn poke_runtimes_table(&self, hit: &RecordedHit) {
        let mut entries = [0_u64; 1 << ENTRY_BITS];
        let mut add = |page: u64, of: u64| {
            let hash = (page / PAGE).wrapping_mul(runtime_pages::HASH_FACTOR) >> (64 - ENTRY_BITS);
            let mut index = hash as usize;
            while entries[index] != 0 {
                index = (index + 1) % entries.len();
            }
            entries[index] = page | of;
        };
        for other in 1..=5 {
            add(other * 0x77 * PAGE, 1);
        }
        for page in 0..PAGES {
            let is_readable = hit.readable >> page & 1 == 1;
            add(
                MEMORY + page * PAGE,
                if is_readable { 1 << page } else { 8 },
            );
        }
        let pid = self.pid.as_raw();
        for (index, entry) in (0..).zip(entries) {
            poke(pid, ENTRIES + 8 * index, &entry.to_le_bytes());
        }
        for (at, word) in [
            (runtime_pages::SHIFT, u64::from(64 - ENTRY_BITS)),
            (runtime_pages::MASK, (1 << ENTRY_BITS) - 1),
            (runtime_pages::ENTRIES, ENTRIES),
        ] {
            poke(pid, RUNTIMES + at, &word.to_le_bytes());
        }
    }

    /// Executes the code of a filter.
    fn answer(&self, filter: &Filter, hit: &RecordedHit) -> Answer {
        let after = self.execute_by_each(|pages| code(filter, pages), filter, hit);
        match after.rax {
            1 => Answer::True,
            2 => Answer::False,
            3 => Answer::Untyped,
            other => panic!("{other}"),
        }
    }

    /// Executes the code of an integer.
    fn integer(&self, integer: &IntegerExpression, hit: &RecordedHit) -> Option<u64> {
        let after = self.execute_by_each(|pages| code_of_integer(integer, pages), integer, hit);
        match after.rax {
            1 => Some(after.rcx),
            3 => None,
            other => panic!("{other}"),
        }
    }

    /// Executes the code for each table that may say what can be read of values; the answers have to be the same.
    /// Returns the registers at its end.
    fn execute_by_each(
        &self,
        code: impl Fn(ValuePages) -> Vec<u8>,
        of: &impl Debug,
        hit: &RecordedHit,
    ) -> user_regs_struct {
        let after = self.execute(&code(ValuePages::TableOfObserver), of, hit);
        if hit.is_valid {
            self.poke_runtimes_table(hit);
            let runtimes = ValuePages::TableOfRuntime(LiveAddr(RUNTIMES));
            let by_runtime = self.execute(&code(runtimes), of, hit);
            let answer =
                |after: &user_regs_struct| (after.rax, (after.rax == 1).then_some(after.rcx));
            assert_eq!(answer(&by_runtime), answer(&after), "{of:?} with {hit:x?}");
        }
        after
    }

    /// Writes code, and the memory of a hit.
    pub(in super::super) fn prepare(&self, code: &[u8], hit: &RecordedHit) {
        let pid = self.pid.as_raw();
        assert!((code.len() as u64) < CODE_LEN - 64);
        poke(pid, CODE + 64, code);
        poke(pid, MEMORY, &hit.bytes());
        let (pages, validity) = (SHARED + LAYOUT.pages(), SHARED + LAYOUT.validity());
        let first = MEMORY / PAGE % 32;
        let mask = u64::from(hit.readable) << first;
        let key = MEMORY >> readable_pages::KEY_SHIFT;
        poke(
            pid,
            pages + key % readable_pages::ENTRIES * 8,
            &(key << 32 | mask).to_le_bytes(),
        );
        // The table may be renewed after the code has read the clock; but not long after it.
        let away = if hit.is_valid {
            VALID_FOR / 2
        } else {
            2 * VALID_FOR
        };
        let (ticks, since) = match hit.arguments[2] % 3 {
            0 if !hit.is_valid => (0, ticks::now()),
            1 => (VALID_FOR, ticks::now().wrapping_sub(away)),
            _ => (VALID_FOR, ticks::now().wrapping_add(away)),
        };
        poke(pid, validity + validity::SINCE, &since.to_le_bytes());
        poke(pid, validity + validity::TICKS, &ticks.to_le_bytes());
        let may_ask = u64::from(hit.may_ask);
        poke(pid, validity + validity::MAY_ASK, &may_ask.to_le_bytes());
    }

    /// Executes the code of an expression at a hit; returns the registers at its end.
    pub(in super::super) fn execute(
        &self,
        code: &[u8],
        of: &impl Debug,
        hit: &RecordedHit,
    ) -> user_regs_struct {
        self.prepare(code, hit);
        let pid = self.pid.as_raw();
        let [in_rax, in_rcx, in_r12, vector, in_rdx, _, in_rbx] = hit.arguments;
        let mut vectors = self.vectors;
        vectors.xmm_space[12] = vector as u32;
        vectors.xmm_space[13] = (vector >> 32) as u32;
        ptrace::setregset::<regset::NT_PRFPREG>(self.pid, vectors).unwrap();
        let with = user_regs_struct {
            rip: CODE + 64,
            rsp: STACK,
            rax: in_rax,
            rcx: in_rcx,
            r12: in_r12,
            rdx: in_rdx,
            rbx: in_rbx,
            rsi: 1,
            rdi: 2,
            r8: 3,
            r9: 4,
            rbp: 0,
            ..self.registers
        };
        let after = self.run(with).unwrap_or_else(|(signal, at)| {
            panic!("{signal} at {:#x} of {of:?} with {hit:x?}", at - CODE - 64)
        });
        assert_eq!((after.rsp, after.r12), (STACK, in_r12));
        assert_eq!(peek(pid, MEMORY, hit.bytes().len()), hit.bytes());
        after
    }
}

fn role(filter: &Filter) -> FilterRole {
    FilterRole {
        filter: filter.clone(),
        arguments: SOURCES.to_vec(),
    }
}

fn role_of_integer(integer: &IntegerExpression) -> IntegerRole {
    IntegerRole {
        integer: integer.clone(),
        arguments: SOURCES.to_vec(),
    }
}

/// Returns code that leaves the answer in rax: 1, 2, or 3 if it is untyped.
fn code(filter: &Filter, pages: ValuePages) -> Vec<u8> {
    let role = role(filter);
    finished(
        saved(&role),
        filter,
        pages,
        |a, context, is_false, untyped| super::filter(a, &role, context, is_false, untyped),
    )
}

/// Returns code that leaves an integer in rcx and 1 in rax, or 3 there if it is untyped.
fn code_of_integer(integer: &IntegerExpression, pages: ValuePages) -> Vec<u8> {
    let role = role_of_integer(integer);
    finished(
        saved_of_integer(&role),
        integer,
        pages,
        |a, context, _, untyped| super::integer(a, &role, false, context, untyped),
    )
}

/// Returns what is emitted, and after it what sets rax.
pub(in super::super) fn finished(
    saved: &'static [SavedRegister],
    of: &impl Debug,
    value_pages: ValuePages,
    emit: impl FnOnce(&mut CodeAssembler, PointContext, CodeLabel, CodeLabel) -> Result<(), IcedError>,
) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let (mut is_false, mut untyped) = (a.create_label(), a.create_label());
    for (register, copy) in saved {
        a.movq(*copy, *register).unwrap();
    }
    // What is not saved is not changed.
    let kept = [rax, rsi, rdi, r8, r9, rbx];
    let is_kept = |it: &&AsmRegister64| !saved.iter().any(|(saved, _)| saved == *it);
    let kept = kept.iter().filter(is_kept);
    let context = PointContext {
        saved,
        saved_at: RegisterPlace::Copies,
        pushed: 8,
        shared: LiveAddr(CODE),
        layout: SharedLayout {
            value_pages,
            ..LAYOUT
        },
    };
    emit(&mut a, context, is_false, untyped).unwrap();
    a.mov(eax, 1).unwrap();
    a.int3().unwrap();
    a.set_label(&mut is_false).unwrap();
    a.mov(eax, 2).unwrap();
    a.int3().unwrap();
    a.set_label(&mut untyped).unwrap();
    a.mov(eax, 3).unwrap();
    a.int3().unwrap();
    let code = a.assemble(CODE + 64).unwrap();
    for register in kept {
        assert!(
            !changes(&code, Register::from(*register)),
            "{register:?} in {of:?}"
        );
    }
    code
}

/// Returns whether an instruction before the end of the code writes a register.
fn changes(code: &[u8], register: Register) -> bool {
    use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess};
    let mut info = InstructionInfoFactory::new();
    let decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let end = code.len() as u64 - 18;
    decoder
        .into_iter()
        .take_while(|it| it.ip() < end)
        .any(|it| {
            let used = info.info(&it).used_registers();
            used.iter().any(|used| {
                let is_written = !matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
                used.register().full_register() == register && is_written
            })
        })
}

/// A hit as the interpreter sees it.
#[derive(Debug)]
pub(in super::super) struct RecordedHit {
    /// What is in the places of [`SOURCES`].
    pub(in super::super) arguments: [u64; 7],
    pub(in super::super) words: BTreeMap<u64, u64>,
    /// A bit for each page that the table has.
    pub(in super::super) readable: u8,
    pub(in super::super) is_valid: bool,
    /// Whether the kernel may be asked what can be read.
    pub(in super::super) may_ask: bool,
}

impl RecordedHit {
    pub(in super::super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; (PAGES * PAGE) as usize];
        let stack = (STACK + 8 + 24, self.arguments[5]);
        for (at, word) in self
            .words
            .iter()
            .map(|(at, word)| (*at, *word))
            .chain([stack])
        {
            bytes[(at - MEMORY) as usize..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn mapped_word(&self, address: u64) -> u64 {
        let at = (address - MEMORY) as usize;
        u64::from_le_bytes(self.bytes()[at..][..8].try_into().unwrap())
    }
}

impl Hit for RecordedHit {
    fn thread(&self) -> Option<u32> {
        Some(TID)
    }

    fn caller(&self) -> Option<u64> {
        Some(self.mapped_word(STACK + 8))
    }

    fn argument(&self, index: usize) -> Option<u64> {
        match SOURCES.get(index)? {
            ArgumentSource::Memory(memory) => {
                // It is mapped: one of the table and the kernel is enough.
                let at = STACK + 8 + memory.displacement as u64;
                let listed = self.word_at(at);
                let asked = self.may_ask.then(|| self.mapped_word(at));
                listed.or(asked.filter(|_| self.is_valid))
            }
            _ => self.arguments.get(index).copied(),
        }
    }

    fn word_at(&self, address: u64) -> Option<u64> {
        let offset = address.wrapping_sub(MEMORY);
        if offset >= PAGES * PAGE || !self.is_valid {
            return None;
        }
        let is_readable = self.readable >> (offset / PAGE) & 1 == 1;
        is_readable.then(|| self.mapped_word(address))
    }
}

/// Texts that are compared, of all lengths modulo 8, and some that begin like others.
const TEXTS: [&str; 8] = [
    "",
    "a",
    "GET",
    "GET /in",
    "GET /ind",
    "GET /index",
    "GET /index.htm?",
    "GET /index.html?and=so+on&as=long+as+64+bytes&which+are+compared",
];

fn int(number: i64) -> u64 {
    (number << 1) as u64 | 1
}

const FLOATS: [f64; 10] = [
    0.0,
    -0.0,
    1.5,
    -1.5,
    f64::NAN,
    -f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    5e-324,
    2.0,
];

/// Where blocks are: in all pages, and across their boundaries.
fn block_places() -> impl Strategy<Value = u64> {
    let borders = (1..PAGES, -10..10_i64).prop_map(|(page, word)| {
        MEMORY
            .wrapping_add(page * PAGE)
            .wrapping_add((8 * word) as u64)
    });
    prop_oneof![
        4 => (0..16_u64).prop_map(|index| MEMORY + 0x100 + index * 0x80),
        2 => borders,
        1 => Just(MEMORY + PAGES * PAGE - 8),
        1 => Just(MEMORY),
    ]
}

/// A value of OCaml, or anything.
fn values() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (-3..10_i64).prop_map(int),
        1 => any::<u64>(),
        1 => prop_oneof![Just(0), Just(8), Just(u64::MAX - 7), Just(1 << 63), Just(1 << 47)],
        6 => block_places(),
        1 => block_places().prop_map(|at| at + 4),
    ]
}

/// A block: its tag, and its words.
fn blocks() -> impl Strategy<Value = (u64, Vec<u64>)> {
    let strings = proptest::sample::select(&TEXTS[..]);
    let strings = (strings, proptest::option::of(0..64_usize)).prop_map(|(text, changed)| {
        let mut bytes = text.as_bytes().to_vec();
        if let Some(changed) = changed.filter(|it| *it < bytes.len()) {
            bytes[changed] ^= 1;
        }
        (STRING_TAG, block_of(&bytes))
    });
    let floats =
        proptest::sample::select(&FLOATS[..]).prop_map(|it| (DOUBLE_TAG, vec![it.to_bits()]));
    prop_oneof![
        4 => strings,
        2 => floats,
        3 => (0..3_u64, proptest::collection::vec(values(), 0..4)),
        1 => (250..256_u64, proptest::collection::vec(any::<u64>(), 0..3)),
    ]
}

pub(in super::super) fn hits() -> impl Strategy<Value = RecordedHit> {
    let float = proptest::sample::select(&FLOATS[..]).prop_map(f64::to_bits);
    let arguments = (
        values(),
        values(),
        values(),
        float,
        any::<u64>(),
        values(),
        values(),
    );
    let memory = proptest::collection::vec((block_places(), blocks()), 4..24);
    (arguments, memory, 0..16_u8, 0..10_u8).prop_map(|(arguments, memory, pages, valid)| {
        let mut words = BTreeMap::new();
        for (at, (tag, block)) in memory {
            let header = (block.len() as u64) << 10 | tag;
            for (index, word) in (0..).zip(std::iter::once(header).chain(block)) {
                let at = at.wrapping_sub(8).wrapping_add(8 * index);
                if (MEMORY..MEMORY + PAGES * PAGE).contains(&at) {
                    words.insert(at, word);
                }
            }
        }
        let (a, b, c, d, e, f, g) = arguments;
        RecordedHit {
            arguments: [a, b, c, d, e, f, g],
            words,
            // All of them, in most cases.
            readable: if pages < 8 { 7 } else { pages - 8 },
            is_valid: valid > 0,
            may_ask: true,
        }
    })
}

/// A number, as text.
pub(in super::super) fn numbers() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        4 => proptest::sample::select(&["arg0", "arg1", "arg2", "arg4", "arg5", "arg6", "int(arg2)"][..])
            .prop_map(str::to_owned),
        2 => proptest::sample::select(&["arg0.0", "arg1.1", "arg5.1", "arg6.0.1", "tag(arg0)", "tag(arg6.1)"][..])
            .prop_map(str::to_owned),
        2 => proptest::sample::select(&["len(arg0)", "len(arg1.0)", "len(str(arg5))", "len(arg6)"][..])
            .prop_map(str::to_owned),
        1 => proptest::sample::select(&["tid", "caller", "u64(tid)"][..]).prop_map(str::to_owned),
        3 => (-3..10_i64).prop_map(|it| it.to_string()),
        1 => any::<i64>().prop_map(|it| it.to_string()),
    ];
    leaf.prop_recursive(4, 12, 2, |inner| {
        prop_oneof![
            (
                inner.clone(),
                proptest::sample::select(&["+", "-", "*", "&"][..]),
                inner.clone()
            )
                .prop_map(|(one, operator, other)| format!("({one} {operator} {other})")),
            (inner.clone(), 0..64_u8).prop_map(|(of, by)| format!("({of} >> {by})")),
            (inner.clone(), 0..64_u8).prop_map(|(of, by)| format!("int(u64({of}) >> {by})")),
            inner.prop_map(|of| format!("-({of})")),
        ]
    })
}

/// An expression, as text.
fn expressions() -> impl Strategy<Value = String> {
    const RELATIONS: &[&str] = &["==", "!=", "<", "<=", ">", ">="];
    let relation = || proptest::sample::select(RELATIONS);
    let value =
        || proptest::sample::select(&["arg0", "arg1", "arg5", "arg6", "arg0.0", "arg6.1.0"][..]);
    let float = || {
        proptest::sample::select(
            &[
                "arg3",
                "float(arg0)",
                "float(arg5)",
                "float(arg6.0)",
                "1.5",
                "0.",
                "-1.5",
                "2",
            ][..],
        )
    };
    let text = || proptest::sample::select(&TEXTS[..]);
    let test = prop_oneof![
        4 => (numbers(), relation(), numbers()).prop_map(|(a, is, b)| format!("{a} {is} {b}")),
        1 => (numbers(), relation(), numbers()).prop_map(|(a, is, b)| format!("u64({a}) {is} u64({b})")),
        2 => (float(), relation(), float()).prop_map(|(a, is, b)| format!("{a} {is} {b}")),
        2 => (value(), 0..2_usize, text()).prop_map(|(of, is, text)| {
            format!("{of} {} \"{text}\"", ["==", "!="][is])
        }),
        2 => (value(), text()).prop_map(|(of, text)| format!("{of} ^= \"{text}\"")),
        2 => (0..3_usize, text()).prop_map(|(is, text)| {
            format!("str(arg2) {} \"{text}\"", ["==", "!=", "^="][is])
        }),
        1 => proptest::sample::select(&["probe == \"p\"", "probe != \"p\""][..]).prop_map(str::to_owned),
    ];
    test.prop_recursive(4, 8, 2, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} && {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} || {b})")),
            inner.prop_map(|it| format!("!({it})")),
        ]
    })
}

thread_local! {
    static PUPPET: RefCell<Option<Puppet>> = const { RefCell::new(None) };
}

/// Lends the process of this thread.
pub(in super::super) fn with_puppet<T>(use_it: impl FnOnce(&Puppet) -> T) -> T {
    PUPPET.with_borrow_mut(|puppet| use_it(puppet.get_or_insert_with(Puppet::new)))
}

fn assert_same(expression: &str, hit: &RecordedHit) -> Option<Answer> {
    let expression: Expression = expression.parse().unwrap();
    let Ok(filter) = expression.filter(&scope()) else {
        // Too many numbers at a time.
        return None;
    };
    let answer = with_puppet(|puppet| puppet.answer(&filter, hit));
    assert_eq!(
        answer,
        filter.answer(hit),
        "{} with {hit:x?}",
        expression.as_str()
    );
    Some(answer)
}

// promise: Observations: Compiled expressions have the answers of the interpreter (2,000 random expressions, with random arguments and memory)
#[test]
fn compiled_and_interpreted_answers_agree() {
    use proptest::test_runner::{Config, TestRunner};
    let cases = std::env::var("EXPRESSION_CASES").map_or(2000, |many| many.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(cases)
    });
    let seen = RefCell::new([0_u32; 3]);
    runner
        .run(&(expressions(), hits()), |(expression, hit)| {
            if let Some(answer) = assert_same(&expression, &hit) {
                seen.borrow_mut()[answer as usize] += 1;
            }
            Ok(())
        })
        .unwrap();
    // Each answer is given often.
    assert!(
        seen.borrow().iter().all(|many| *many > cases / 20),
        "{seen:?}"
    );
}

// promise: Observations: Compiled expressions have the answers of the interpreter about floats of 4 bytes (1,500 floats, 5 questions)
#[test]
fn floats_of_4_bytes_are_compared_exactly() {
    let scope = scope_with(ParameterKind::Single);
    // Around each exponent, with both signs, and others in between; NaNs and the smallest floats are among them.
    let around = (0..256_u32).flat_map(|exponent| {
        let bits = exponent << 23;
        [
            bits,
            bits | 1,
            bits | 0x12_3456,
            bits | 0x7f_ffff,
            bits | 0x8000_0000,
            bits | 0x8000_0001,
        ]
    });
    for bits in around {
        let float = f64::from(f32::from_bits(bits));
        let literal = if float.is_finite() { float } else { 1.5 };
        let below = literal - literal.abs() * 1e-9;
        for (test, expected) in [
            (format!("arg3 == {literal:?}"), float == literal),
            (format!("arg3 < {literal:?}"), float < literal),
            (format!("arg3 > {:?}", below), float > below),
            (format!("arg3 <= {:?}", below), float <= below),
            (format!("arg3 != {literal:?}"), float != literal),
        ] {
            let expression: Expression = test.parse().unwrap();
            let filter = expression.filter(&scope).unwrap();
            let mut hit = hit_with_text_of_c(MEMORY, b"");
            // What is above the float does not matter.
            hit.arguments[3] = 0xdead_beef_0000_0000 | u64::from(bits);
            let answer = with_puppet(|puppet| puppet.answer(&filter, &hit));
            assert_eq!(answer, filter.answer(&hit), "{test} of {bits:x}");
            assert_eq!(answer == Answer::True, expected, "{test} of {bits:x}");
        }
    }
}

/// A hit whose C argument is an address, with a text there, as far as there is memory; the table has one page more than
/// there is.
pub(in super::super) fn hit_with_text_of_c(at: u64, text: &[u8]) -> RecordedHit {
    let end = MEMORY + PAGES * PAGE;
    let mut words: BTreeMap<u64, u64> = BTreeMap::new();
    let places = (at..end).zip(text);
    for (at, byte) in places.filter(|(at, _)| *at >= MEMORY) {
        *words.entry(at & !7).or_default() |= u64::from(*byte) << (8 * (at & 7));
    }
    RecordedHit {
        arguments: [1, 1, at, 0, 0, 1, 1],
        words,
        readable: (1 << (PAGES + 1)) - 1,
        is_valid: true,
        may_ask: true,
    }
}

// promise: Observations: Strings of C are compared to the last byte, at any address, and not read where the table has memory that the process
//    has not (600 texts and places)
#[test]
fn texts_of_c_are_compared_exactly() {
    let end = MEMORY + PAGES * PAGE;
    let mut seen = [0; 3];
    for text in TEXTS {
        let whole = [text.as_bytes(), &[0]].concat();
        let places = (0..8).map(|at| MEMORY + 0x100 + at);
        let borders = (1..=70)
            .step_by(3)
            .flat_map(|it| [MEMORY + 2 * PAGE - it, end - it]);
        for at in places.chain(borders).chain([0, end, u64::MAX - 3, 1 << 63]) {
            let hit = hit_with_text_of_c(at, &whole);
            for other in TEXTS {
                for is in ["==", "!=", "^="] {
                    if other.len().abs_diff(text.len()) > 3 && at % 5 != 0 {
                        continue;
                    }
                    let answer = assert_same(&format!("str(arg2) {is} \"{other}\""), &hit).unwrap();
                    seen[answer as usize] += 1;
                    let compared = other.len() + usize::from(is != "^=");
                    let can_be_read = (MEMORY..=end - compared.max(1) as u64).contains(&at);
                    let expected = match (can_be_read, is) {
                        (false, _) => Answer::Untyped,
                        (true, "==") if text == other => Answer::True,
                        (true, "!=") if text != other => Answer::True,
                        (true, "^=") if text.starts_with(other) => Answer::True,
                        _ => Answer::False,
                    };
                    assert_eq!(answer, expected, "{other} {is} {text} at {at:x}");
                }
            }
        }
    }
    assert!(seen.iter().all(|many| *many > 100), "{seen:?}");
}

// promise: Observations: Where the kernel must not be asked, as the process has set a seccomp filter meanwhile, strings of C are not read
#[test]
fn kernel_that_must_not_be_asked_is_not() {
    let mut hit = hit_with_text_of_c(MEMORY + 0x103, b"GET /\0");
    let expression: Expression = "str(arg2) == \"GET /\"".parse().unwrap();
    let filter = expression.filter(&scope()).unwrap();
    let answer = |hit: &RecordedHit| with_puppet(|puppet| puppet.answer(&filter, hit));
    assert_eq!(answer(&hit), Answer::True);
    hit.may_ask = false;
    assert_eq!(answer(&hit), Answer::Untyped);
}

// promise: Observations: Compiled expressions about results have the answers of the interpreter (500 random expressions)
#[test]
fn answers_about_results_agree() {
    use proptest::test_runner::{Config, TestRunner};
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(500)
    });
    let results = expressions()
        .prop_map(|it| (0..7).fold(it, |it, index| it.replace(&format!("arg{index}"), "retval")));
    let seen = RefCell::new([0_u32; 3]);
    runner
        .run(
            &(results, any::<bool>(), hits()),
            |(text, is_ocaml, hit)| {
                let expression: Expression = text.parse().unwrap();
                let kind = if is_ocaml {
                    ParameterKind::Value
                } else {
                    ParameterKind::Word
                };
                // The result is where the first argument of the tests is.
                let scope = Scope::of_exits("function p", "p", kind);
                let Ok(filter) = expression.filter(&scope) else {
                    return Ok(());
                };
                let answer = with_puppet(|puppet| puppet.answer(&filter, &hit));
                assert_eq!(answer, filter.answer(&hit), "{text} with {hit:x?}");
                seen.borrow_mut()[answer as usize] += 1;
                Ok(())
            },
        )
        .unwrap();
    assert!(seen.borrow().iter().all(|many| *many > 10), "{seen:?}");
}
