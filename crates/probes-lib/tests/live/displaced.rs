//! Patched code has the effect of the original code: both are executed one instruction at a time, in a
//! stopped process, with the same random registers and memory, until they leave the displaced instructions.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};
use nix::libc::{
    MAP_ANONYMOUS, MAP_FIXED_NOREPLACE, MAP_PRIVATE, PROT_EXEC, PROT_READ, PROT_WRITE, SYS_mmap,
    SYS_munmap, c_long, user_fpregs_struct, user_regs_struct,
};
use nix::sys::ptrace::{self, Options, regset};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use probes_lib::{DisplacedCopy, FileAddr, Jump, Linking, LiveAddr, LoadBias, PatchSite, Refusal};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use test_support::process::{peek, poke, settle};
use test_support::{Guard, Talker, fixture_forms, program_forms};

use crate::patches::{Object, libc, ocamlopt};

/// Memory that registers point into, with room for the stack in its middle.
const MEMORY_LEN: usize = 16 << 10;
/// Room for a trampoline.
const ROOM: u64 = 2 << 12;
const STATUS_AND_DIRECTION: u64 = 0xcd5;
/// No displaced instructions take as many steps.
const MAX_STEPS: usize = 200;

/// A stopped process that executes the instructions that it is given.
struct Puppet {
    _guard: Box<dyn std::any::Any>,
    pid: Pid,
    registers: user_regs_struct,
    vectors: user_fpregs_struct,
    memory: u64,
}

/// The result of executing code until it was left.
#[derive(Debug, PartialEq)]
struct Outcome {
    /// Where it went on, or was when a signal arrived.
    address: u64,
    registers: Vec<u64>,
    vectors: (Vec<u32>, Vec<u32>, u32),
    signal: Option<(Signal, i32)>,
    memory: Vec<u8>,
    /// What the instructions address relative to themselves.
    elsewhere: Vec<Option<Vec<u8>>>,
}

/// Indexes in the registers of an outcome.
const RSP: usize = 7;
const FLAGS: usize = 16;

impl Outcome {
    /// Undoes a push of a return address.
    fn undo_push(&mut self, memory: u64, return_address: u64, original: &Outcome) {
        let at = (self.registers[RSP] - memory) as usize;
        assert_eq!(self.memory[at..at + 8], return_address.to_le_bytes());
        self.memory[at..at + 8].copy_from_slice(&original.memory[at..at + 8]);
        self.registers[RSP] += 8;
    }
}

/// Random registers, as numbers that become pointers into the memory or small numbers.
type Seeds = ([u16; 16], [u32; 8], u8);

impl Puppet {
    fn seize(guard: impl std::any::Any, pid: i32) -> Puppet {
        let pid = Pid::from_raw(pid);
        ptrace::seize(pid, Options::PTRACE_O_EXITKILL).unwrap();
        ptrace::interrupt(pid).unwrap();
        waitpid(pid, Some(WaitPidFlag::__WALL)).unwrap();
        let mut registers = ptrace::getregs(pid).unwrap();
        // Whatever call it was in is not restarted.
        registers.orig_rax = u64::MAX;
        let mut puppet = Puppet {
            _guard: Box::new(guard),
            pid,
            registers,
            vectors: ptrace::getregset::<regset::NT_PRFPREG>(pid).unwrap(),
            memory: 0,
        };
        puppet.memory = puppet.map(0x10_0000_0000, MEMORY_LEN as u64).unwrap();
        puppet
    }

    fn call(&self, number: c_long, arguments: [u64; 6]) -> u64 {
        let (pid, at) = (self.pid.as_raw(), self.registers.rip);
        let code = peek(pid, at, 2);
        poke(pid, at, &[0x0f, 0x05]);
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let with = user_regs_struct {
            rax: number as u64,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..self.registers
        };
        ptrace::setregs(self.pid, with).unwrap();
        assert_eq!(self.step(), None);
        poke(pid, at, &code);
        ptrace::getregs(self.pid).unwrap().rax
    }

    /// Maps memory at an address; `None` if something is there.
    fn map(&self, at: u64, len: u64) -> Option<u64> {
        let protection = PROT_READ | PROT_WRITE | PROT_EXEC;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        let arguments = [at, len, protection as u64, flags as u64, u64::MAX, 0];
        let result = self.call(SYS_mmap, arguments);
        (result == at).then_some(at)
    }

    fn unmap(&self, at: u64, len: u64) {
        assert_eq!(self.call(SYS_munmap, [at, len, 0, 0, 0, 0]), 0);
    }

    /// Executes one instruction; returns the signal that arrived instead.
    fn step(&self) -> Option<Signal> {
        ptrace::step(self.pid, None).unwrap();
        match waitpid(self.pid, Some(WaitPidFlag::__WALL)).unwrap() {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => None,
            WaitStatus::Stopped(_, signal) => Some(signal),
            other => panic!("{other:?}"),
        }
    }

    /// Executes from `start` until the program counter is at `start` again or not in the code any more.
    fn run(
        &self,
        start: u64,
        is_inside: impl Fn(u64) -> bool,
        seeds: &Seeds,
        elsewhere: &[u64],
    ) -> Outcome {
        let (pid, (general, vectors, flags)) = (self.pid.as_raw(), seeds);
        let value = |index: usize| match general[index] {
            seed if seed % 4 == 0 => u64::from(seed >> 10),
            seed => self.memory + 4096 + u64::from(seed) % 8192 / 16 * 16,
        };
        let memory: Vec<u8> = (0..MEMORY_LEN as u64 / 8)
            .flat_map(|word| (self.memory + 4096 + word * 40 % 8192).to_le_bytes())
            .collect();
        poke(pid, self.memory, &memory);
        let before: Vec<_> = elsewhere.iter().map(|at| try_peek(pid, *at)).collect();
        let registers = user_regs_struct {
            rip: start,
            rax: value(0),
            rbx: value(1),
            // Counts of repeated instructions.
            rcx: u64::from(general[2] % 16),
            rdx: value(3),
            rsi: value(4),
            rdi: value(5),
            rbp: value(6),
            rsp: self.memory + MEMORY_LEN as u64 / 2 + u64::from(general[7] % 64) * 8,
            r8: value(8),
            r9: value(9),
            r10: value(10),
            r11: value(11),
            r12: value(12),
            r13: value(13),
            r14: value(14),
            r15: value(15),
            eflags: 0x202 | u64::from(*flags) & STATUS_AND_DIRECTION,
            ..self.registers
        };
        ptrace::setregs(self.pid, registers).unwrap();
        let mut fp = self.vectors;
        for (index, lane) in fp.xmm_space.iter_mut().enumerate() {
            *lane = vectors[index % vectors.len()];
        }
        ptrace::setregset::<regset::NT_PRFPREG>(self.pid, fp).unwrap();
        let (mut signal, mut steps, mut last) = (None, 0, start);
        let after = loop {
            signal = signal.or(self.step());
            let registers = ptrace::getregs(self.pid).unwrap();
            steps += 1;
            assert!(steps < MAX_STEPS, "{start:#x} does not end");
            // A repeated string instruction stays where it is.
            let is_back = registers.rip == start && last != start;
            if signal.is_some() || is_back || registers.rip != start && !is_inside(registers.rip) {
                break registers;
            }
            last = registers.rip;
        };
        let signal = signal.map(|signal| {
            let info = ptrace::getsiginfo(self.pid).unwrap();
            (signal, info.si_code)
        });
        let fp = ptrace::getregset::<regset::NT_PRFPREG>(self.pid).unwrap();
        let changed = elsewhere.iter().map(|at| try_peek(pid, *at)).collect();
        for (at, bytes) in elsewhere.iter().zip(before) {
            if let Some(bytes) = bytes {
                poke(pid, *at, &bytes);
            }
        }
        let it = after;
        Outcome {
            address: it.rip,
            registers: vec![
                it.rax,
                it.rbx,
                it.rcx,
                it.rdx,
                it.rsi,
                it.rdi,
                it.rbp,
                it.rsp,
                it.r8,
                it.r9,
                it.r10,
                it.r11,
                it.r12,
                it.r13,
                it.r14,
                it.r15,
                it.eflags & STATUS_AND_DIRECTION,
            ],
            vectors: (fp.xmm_space.to_vec(), fp.st_space.to_vec(), fp.mxcsr),
            signal,
            memory: peek(pid, self.memory, MEMORY_LEN),
            elsewhere: changed,
        }
    }
}

fn try_peek(pid: i32, address: u64) -> Option<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; 64];
    let file = fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    file.read_exact_at(&mut bytes, address).ok()?;
    Some(bytes)
}

/// Returns the load bias of a file in a process.
fn bias_of(pid: i32, file: &Path, linking: Linking) -> LoadBias {
    if linking == Linking::Fixed {
        return LoadBias::NONE;
    }
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let file = file.canonicalize().unwrap();
    let line = maps.lines().find(|it| it.ends_with(file.to_str().unwrap()));
    let start = line.unwrap().split_once('-').unwrap().0;
    // Linkers place the first byte of a file at 0.
    LoadBias(u64::from_str_radix(start, 16).unwrap())
}

/// Returns whether the effect of an instruction depends only on registers and memory that are reset.
fn is_repeatable(instruction: &Instruction) -> bool {
    use Mnemonic::{Cpuid, Popfq, Rdpid, Rdrand, Rdseed, Rdtsc, Rdtscp, Syscall, Xgetbv};
    let is_wide = (0..instruction.op_count()).any(|operand| {
        instruction.op_kind(operand) == OpKind::Register
            && (instruction.op_register(operand).is_ymm()
                || instruction.op_register(operand).is_zmm())
    });
    let unknown = [
        Cpuid, Popfq, Rdpid, Rdrand, Rdseed, Rdtsc, Rdtscp, Syscall, Xgetbv,
    ];
    !is_wide && !unknown.contains(&instruction.mnemonic())
}

/// Returns whether instructions may change memory that is not reset: thread-local storage, or what a pointer in the
/// object's data points to.
fn changes_other_memory(instructions: &[Instruction]) -> bool {
    let mut pointers = Vec::new();
    for it in instructions {
        let is_store = it.op_count() > 0 && it.op0_kind() == OpKind::Memory;
        let is_of_thread = is_store && it.memory_segment() == Register::FS;
        if is_of_thread || pointers.contains(&it.memory_base()) {
            return true;
        }
        if it.is_ip_rel_memory_operand() && it.mnemonic() == Mnemonic::Mov && !is_store {
            pointers.push(it.op0_register());
        }
    }
    false
}

/// Tests what a site does, patched and not; returns false if its trampoline has no place.
fn same_effect(
    puppet: &Puppet,
    site: &PatchSite,
    bias: LoadBias,
    room: u64,
    seeds: &Seeds,
) -> bool {
    let pid = puppet.pid.as_raw();
    let start = bias.live(site.address());
    let bytes = site.displaced();
    assert_eq!(
        peek(pid, start.0, bytes.len()),
        bytes,
        "the file is another one"
    );
    let decoder = Decoder::with_ip(64, bytes, start.0, DecoderOptions::NONE);
    let instructions: Vec<Instruction> = decoder.into_iter().collect();
    // A branch to itself never leaves the original code, but leaves the copy.
    let is_endless = instructions[0].near_branch_target() == start.0;
    let is_repeatable =
        instructions.iter().all(is_repeatable) && !changes_other_memory(&instructions);
    if is_endless || !is_repeatable {
        return true;
    }
    let elsewhere: Vec<u64> = instructions
        .iter()
        .filter(|it| it.is_ip_rel_memory_operand() && it.mnemonic() != Mnemonic::Lea)
        .map(|it| it.ip_rel_memory_address())
        .collect();
    let window = site.trampolines(bias);
    let trampoline = match site.jump() {
        Jump::Punned { .. } => {
            let steps = (window.end.0 - window.start.0) / 8;
            let tries = (0..8).map(|index| window.start.0 + index * steps);
            let mut mapped = tries.filter_map(|at| Some((at, puppet.map(at & !4095, ROOM)?)));
            match mapped.next() {
                Some((at, _)) => at,
                None => return false,
            }
        }
        _ => room,
    };
    let to = LiveAddr(trampoline);
    assert!(window.contains(&to));
    let copy = match site.copy_at(bias, to) {
        // A punned jump may lead so far that the copy does not reach what the original refers to.
        Err(Refusal::OutOfReach) if to.0 != room => {
            puppet.unmap(to.0 & !4095, ROOM);
            return false;
        }
        copy => copy.unwrap(),
    };
    let end = start.0 + bytes.len() as u64;
    let original = puppet.run(start.0, |at| at > start.0 && at < end, seeds, &elsewhere);
    poke(pid, to.0, copy.code());
    let writes = site.writes(bias, to).unwrap();
    let before: Vec<_> = writes
        .iter()
        .map(|(at, bytes)| (*at, peek(pid, at.0, bytes.len())))
        .collect();
    for (at, bytes) in &writes {
        poke(pid, at.0, bytes);
    }
    let is_inside = |at: u64| {
        let in_copy = at >= to.0 && at < to.0 + copy.code().len() as u64;
        in_copy
            || writes
                .iter()
                .any(|(from, _)| from.0 == at && *from != start)
    };
    let patched = puppet.run(start.0, is_inside, seeds, &elsewhere);
    for (at, bytes) in before {
        poke(pid, at.0, &bytes);
    }
    if to.0 != room {
        puppet.unmap(to.0 & !4095, ROOM);
    }
    if site.flags_are_dead() {
        // A trampoline may leave any flags.
        let others = (seeds.0, seeds.1, !seeds.2);
        let is_original = |at| at > start.0 && at < end;
        let mut other = puppet.run(start.0, is_original, &others, &elsewhere);
        other.registers[FLAGS] = original.registers[FLAGS];
        assert_eq!(other, original, "{instructions:#?}");
    }
    assert_same(puppet.memory, &instructions, &copy, original, patched);
    true
}

/// Asserts that both outcomes are the same, except for the address of a fault in the copy. The `memory` is at this
/// address.
fn assert_same(
    memory: u64,
    instructions: &[Instruction],
    copy: &DisplacedCopy,
    original: Outcome,
    mut patched: Outcome,
) {
    let at_fault = instructions
        .iter()
        .find(|it| original.signal.is_some() && it.ip() == original.address);
    if let Some(at_fault) = at_fault {
        let moved = copy.moved(LiveAddr(at_fault.ip())).unwrap();
        if at_fault.mnemonic() == Mnemonic::Call {
            assert!(patched.address >= moved.0);
            if patched.address > moved.0 {
                // The return address is pushed before the target is read, not after.
                patched.undo_push(memory, at_fault.next_ip(), &original);
            }
        } else {
            assert_eq!(patched.address, moved.0);
        }
        patched.address = original.address;
    }
    assert_eq!(patched, original, "{instructions:#?}");
}

/// Tests random sites of an object that is loaded in the process.
fn test_object(puppet: &Puppet, file: &Path, cases: u32) {
    let object = Object::read(file);
    let bias = bias_of(puppet.pid.as_raw(), file, object.linking);
    let first = bias.live(object.functions[0].start).0;
    // Beside the object, in reach of all of its code.
    let room = (1..64).find_map(|step: u64| {
        let below = first.checked_sub(step << 24).filter(|at| *at >= 1 << 24);
        let above = first + (step << 24);
        let near = [below, Some(above)].into_iter().flatten();
        near.into_iter().find_map(|at| puppet.map(at & !4095, ROOM))
    });
    let room = room.unwrap();
    let (tried, without_room) = (Cell::new(0), Cell::new(0));
    let count = |site: &PatchSite, seeds: &Seeds| {
        tried.set(tried.get() + 1);
        if !same_effect(puppet, site, bias, room, seeds) {
            without_room.set(without_room.get() + 1);
        }
    };
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let result = TestRunner::new(config).run(
        &(
            any::<prop::sample::Index>(),
            any::<prop::sample::Index>(),
            any::<Seeds>(),
        ),
        |(function, offset, seeds)| {
            let function = object.functions[function.index(object.functions.len())];
            let plan = object.planner.function(function);
            for site in plan.entry.iter().flatten().take(3) {
                count(site, &seeds);
            }
            let prefixed = plan.entry.iter().flatten().find_map(PatchSite::prefixed);
            let leaning = object.planner.leaning(function);
            let leaning = leaning
                .iter()
                .flat_map(|it| it.sites.iter().chain([&it.entry]));
            for site in prefixed.iter().chain(leaning) {
                count(site, &seeds);
            }
            let exits = plan.exits.iter().flat_map(|exits| &exits.sites);
            for site in exits.take(4) {
                count(site, &seeds);
            }
            let offset = offset.index(function.len as usize) as u64;
            let address = FileAddr(function.start.0 + offset);
            let anywhere = object.planner.instruction(function, address);
            for site in anywhere.iter().flatten().take(2) {
                count(site, &seeds);
            }
            Ok(())
        },
    );
    result.unwrap();
    assert!(tried.get() > cases as usize && without_room.get() < tried.get() / 4);
}

#[test]
fn patched_code_has_the_original_effect() {
    for program in program_forms("handlers") {
        let talker = Talker::start(&program);
        let pid = talker.pid();
        settle(pid);
        let puppet = Puppet::seize(talker, pid);
        test_object(&puppet, &program, 300);
        test_object(&puppet, &libc(), 300);
    }
}

#[test]
fn patched_compiler_has_the_original_effect() {
    use std::process::{Command, Stdio};
    let mut command = Command::new(ocamlopt());
    // It reads its input until that ends.
    command
        .args(["-c", "-impl", "/dev/stdin"])
        .stdin(Stdio::piped());
    let guard = Guard::spawn(&mut command);
    let pid = guard.pid();
    let puppet = Puppet::seize(guard, pid);
    test_object(&puppet, &ocamlopt(), 600);
}

#[test]
fn patched_wrappers_have_the_original_effect() {
    for program in fixture_forms("externals") {
        let talker = Talker::start(&program);
        let pid = talker.pid();
        settle(pid);
        let puppet = Puppet::seize(talker, pid);
        test_object(&puppet, &program, 100);
    }
}
