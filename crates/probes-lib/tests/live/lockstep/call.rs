//! One call, executed in both processes.

use std::fmt::Write as _;
use std::ops::Range;

use iced_x86::{FlowControl, Instruction, Mnemonic};
use nix::libc::{PROT_READ, PROT_WRITE, user_fpregs_struct, user_regs_struct};
use nix::sys::ptrace::{self, regset};
use nix::sys::signal::Signal;

use super::instruction::{FLAGS, accessed, decode, difference, is_repeatable, read_flags};
use super::program::{Callee, Twin};
use super::tracee::Tracee;
use super::{DATA, GATE, PAGE, RETURN, STACK};

/// How many instructions of a call are compared.
const MAX_STEPS: usize = 400;
/// More than any trampoline, or what it displaces, takes.
const MAX_INSIDE: usize = 4000;

/// How a call ended without a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    Returned,
    Faulted,
    /// Enough was executed.
    Steps,
    /// The next instruction is a system call, or its effect depends on more than registers and memory.
    Unrepeatable,
    /// Patched code, or memory of the observation, is accessed as data; or a trampoline has an instruction whose effect
    /// depends on more than registers and memory, or that is repeated too often.
    Incomparable,
    /// OCaml's jumps through tables rely on types; random values have none.
    WildJump,
}

/// What a step led to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    Done,
    /// A signal that arrives even after missing pages were mapped: the instruction was not executed.
    Signal(Signal),
}

/// One call, in both processes.
pub(super) struct Call<'t> {
    pub(super) twin: &'t Twin<'t>,
    pub(super) seed: u64,
    pub(super) original: Tracee,
    pub(super) patched: Tracee,
    pub(super) path: Vec<u64>,
    /// Trampolines that were executed.
    pub(super) trampolines: usize,
}

/// A part of a stack.
pub(super) struct Stack {
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Stack {
    pub(super) fn around(tracee: &Tracee, rsp: u64) -> Stack {
        // Trampolines write only to the page of the stack pointer; there may be no more stack below or above it.
        let start = rsp & !(PAGE - 1);
        let bytes = [3, 2, 1]
            .into_iter()
            .find_map(|pages| tracee.read(start, pages * PAGE as usize));
        let bytes = bytes.unwrap_or_default();
        Stack { start, bytes }
    }
}

pub(super) type Result<T> = std::result::Result<T, String>;

impl<'t> Call<'t> {
    pub(super) fn new(twin: &'t Twin<'t>, start: u64, seed: u64) -> Call<'t> {
        let original = twin.program.original.fork();
        let patched = twin.copy.fork();
        let call = Call {
            twin,
            seed,
            original,
            patched,
            path: Vec::new(),
            trampolines: 0,
        };
        let mut random = fastrand::Rng::with_seed(seed);
        // Mostly aligned as for a call; close to the end of a page now and then.
        let mut rsp = STACK.start + 0x8008 + 16 * random.u64(..0x300);
        if random.u32(..8) == 0 {
            rsp = rsp & !(PAGE - 1) | (8 * random.u64(..17));
        }
        let mut value = || value_of(&mut random, &twin.program.callees);
        let registers = user_regs_struct {
            rax: value(),
            rbx: value(),
            rcx: value(),
            rdx: value(),
            rsi: value(),
            rdi: value(),
            rbp: value(),
            r8: value(),
            r9: value(),
            r10: value(),
            r11: value(),
            r12: value(),
            r13: value(),
            r14: value(),
            r15: value(),
            rip: start,
            rsp,
            orig_rax: u64::MAX,
            eflags: 0x202 | u64::from(random.u16(..)) & FLAGS & !0x400,
            ..twin.program.original.registers()
        };
        let mut vectors = call.original.vectors();
        for lane in &mut vectors.xmm_space {
            *lane = random.u32(..) >> random.u32(..32);
        }
        for tracee in [&call.original, &call.patched] {
            for page in (DATA.start..DATA.end).step_by(PAGE as usize) {
                tracee.write(page, &call.contents(page));
            }
            let stack = rsp & !(PAGE - 1);
            tracee.write(stack, &call.contents(stack));
            tracee.write(stack + PAGE, &call.contents(stack + PAGE));
            tracee.write(rsp, &RETURN.to_le_bytes());
            ptrace::setregs(tracee.pid, registers).unwrap();
            ptrace::setregset::<regset::NT_PRFPREG>(tracee.pid, vectors).unwrap();
        }
        call
    }

    /// The random contents of a page.
    pub(super) fn contents(&self, page: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(self.seed ^ page);
        let words = (0..PAGE / 8).map(|_| value_of(&mut random, &self.twin.program.callees));
        words.flat_map(u64::to_le_bytes).collect()
    }

    /// Executes an instruction of a process; what it accesses is mapped first if it can be.
    pub(super) fn step(&mut self, is_patched: bool) -> Step {
        loop {
            let tracee = if is_patched {
                &self.patched
            } else {
                &self.original
            };
            let Some(signal) = tracee.step() else {
                return Step::Done;
            };
            let pages = if signal == Signal::SIGSEGV {
                self.missing_pages(tracee)
            } else {
                Vec::new()
            };
            if pages.is_empty() {
                return Step::Signal(signal);
            }
            for page in pages {
                let contents = self.contents(page);
                let access = PROT_READ | PROT_WRITE;
                let tracee = if is_patched {
                    &mut self.patched
                } else {
                    &mut self.original
                };
                if !tracee.map(GATE.start, page..page + PAGE, access) {
                    return Step::Signal(signal);
                }
                tracee.write(page, &contents);
                tracee.given.insert(page);
            }
        }
    }

    /// Returns the pages that the next instruction accesses and that are not mapped.
    pub(super) fn missing_pages(&self, tracee: &Tracee) -> Vec<u64> {
        const USER: Range<u64> = 0x1_0000..1 << 46;
        let registers = tracee.registers();
        let Some(code) = tracee.read(registers.rip, 15) else {
            return Vec::new();
        };
        let mut pages = Vec::new();
        for accessed in accessed(&decode(&code, registers.rip), &registers) {
            for address in [accessed.start, accessed.end.wrapping_sub(1)] {
                let page = address & !(PAGE - 1);
                let is_missing = USER.contains(&page)
                    && self.twin.program.mapping(page).is_none()
                    && !self.twin.is_inside(page)
                    && !tracee.given.contains(&page);
                if is_missing && !pages.contains(&page) {
                    pages.push(page);
                }
            }
        }
        pages
    }

    /// Executes the call.
    pub(super) fn run(&mut self) -> Result<End> {
        let end = self.steps()?;
        let are_same = !matches!(end, End::WildJump | End::Incomparable);
        if are_same {
            self.compare_memory()?;
        }
        Ok(end)
    }

    pub(super) fn steps(&mut self) -> Result<End> {
        let program = self.twin.program;
        let mut dead = 0;
        let mut before = self.original.registers();
        let mut jumped = None;
        for _ in 0..MAX_STEPS {
            let at = before.rip;
            self.path.push(at);
            if at == RETURN {
                return Ok(End::Returned);
            }
            let Some(instruction) = program.instruction(at) else {
                let is_code = program.mapping(at).is_some_and(|it| it.is_code);
                return Ok(if is_code {
                    End::Unrepeatable
                } else {
                    End::Faulted
                });
            };
            if !is_repeatable(&instruction) {
                return Ok(End::Unrepeatable);
            }
            if self.touches_observation(&instruction, &before) {
                return Ok(End::Incomparable);
            }
            if read_flags(&instruction) & dead != 0 {
                return Err(format!("{} reads flags that differ", program.place(at)));
            }
            if instruction.flow_control() == FlowControl::IndirectBranch {
                jumped = program.callee_at(at).filter(|it| it.is_ocaml).map(|_| at);
            }
            let trampolines_before = self.trampolines;
            let end = match self.step_both(&before) {
                Ok(end) => end,
                Err(_) if jumped.is_some() => return Ok(End::WildJump),
                Err(error) => return Err(error),
            };
            if let Some(end) = end {
                return Ok(end);
            }
            let after = self.original.registers();
            let other = self.patched.registers();
            if self.trampolines > trampolines_before {
                dead |= (after.eflags ^ other.eflags) & FLAGS;
                self.compare_vectors()?;
            }
            dead &= after.eflags ^ other.eflags;
            let difference = difference(&after, &other, dead);
            if !difference.is_empty() {
                return if jumped.is_some() {
                    Ok(End::WildJump)
                } else {
                    Err(format!("after {}: {difference}", program.place(at)))
                };
            }
            before = after;
        }
        Ok(End::Steps)
    }

    /// Executes an instruction in the patched process, with the trampoline that it leads to, and code with the same
    /// effect in the other process. Returns how the call ends, if both end with the same signal.
    pub(super) fn step_both(&mut self, before: &user_regs_struct) -> Result<Option<End>> {
        let is_patched = self
            .twin
            .patched
            .range(before.rip..before.rip + 5)
            .next()
            .is_some();
        let stack = is_patched.then(|| Stack::around(&self.original, before.rsp));
        let end = self.step_each()?;
        if let Some(stack) = stack {
            self.restore_dead_stack(before, &stack, end == Some(End::Faulted));
        }
        Ok(end)
    }

    pub(super) fn step_each(&mut self) -> Result<Option<End>> {
        let patched = self.step(true);
        let mut at = self.patched.registers().rip;
        if !self.twin.is_inside(at) {
            let original = self.step(false);
            let there = self.original.registers().rip;
            if patched != original {
                return Err(format!("{patched:?} instead of {original:?}"));
            }
            if let Step::Signal(_) = original {
                return Ok(Some(End::Faulted));
            }
            if at == there {
                return Ok(None);
            }
            // It may be at an island.
            let island = self.step(true);
            let from = at;
            at = self.patched.registers().rip;
            if island != Step::Done || !self.twin.is_inside(at) {
                let place = |at| self.twin.program.place(at);
                return Err(format!("at {} instead of {}", place(from), place(there)));
            }
            return self.through_trampoline(Some(there));
        }
        self.through_trampoline(None)
    }

    /// Executes the rest of a trampoline, and what it displaces in the other process, which is at `there` if it has
    /// executed the first instruction of that already.
    pub(super) fn through_trampoline(&mut self, there: Option<u64>) -> Result<Option<End>> {
        self.trampolines += 1;
        let entered = self.patched.registers().rip;
        let mut at = entered;
        let mut ended = Step::Done;
        for steps in 0.. {
            if !self.twin.is_inside(at) {
                break;
            }
            if steps == MAX_INSIDE && self.repeats(at) {
                return Ok(Some(End::Incomparable));
            }
            if steps == MAX_INSIDE {
                return Err(format!("the trampoline at {entered:#x} does not end"));
            }
            ended = self.step(true);
            if ended != Step::Done {
                break;
            }
            at = self.patched.registers().rip;
        }
        let mut there = there;
        for _ in 0..MAX_INSIDE {
            if there == Some(at) && ended == Step::Done {
                return Ok(None);
            }
            let before = self.original.registers();
            let instruction = self.twin.program.instruction(before.rip);
            let Some(instruction) = instruction else {
                break;
            };
            if !is_repeatable(&instruction) {
                return Ok(Some(End::Incomparable));
            }
            if self.touches_observation(&instruction, &before) {
                return Ok(Some(End::Incomparable));
            }
            let step = self.step(false);
            if step == ended && ended != Step::Done {
                self.compare_fault(&instruction)?;
                return Ok(Some(End::Faulted));
            }
            if step != Step::Done {
                return Err(format!("{ended:?} instead of {step:?}"));
            }
            there = Some(self.original.registers().rip);
        }
        let place = |at| self.twin.program.place(at);
        let there = self.original.registers().rip;
        Err(format!(
            "the trampoline at {entered:#x} leads to {} ({ended:?}), the code to {}",
            place(at),
            place(there)
        ))
    }

    /// Returns whether the instruction in a trampoline is a repeated one.
    pub(super) fn repeats(&self, at: u64) -> bool {
        let code = self.patched.read(at, 15).unwrap_or_default();
        let instruction = decode(&code, at);
        instruction.has_rep_prefix() || instruction.has_repne_prefix()
    }

    /// Compares the registers at a fault of a displaced instruction and its copy.
    pub(super) fn compare_fault(&mut self, instruction: &Instruction) -> Result<()> {
        let mut other = self.patched.registers();
        let own = self.original.registers();
        let is_call = instruction.mnemonic() == Mnemonic::Call;
        if is_call && other.rsp + 8 == own.rsp {
            // It pushes the return address before it reads where to go.
            let pushed = self.patched.read(other.rsp, 8).unwrap_or_default();
            if pushed != instruction.next_ip().to_le_bytes() {
                return Err(format!("pushed {pushed:x?}"));
            }
            let under = self.original.read(other.rsp, 8).unwrap_or_default();
            self.patched.write(other.rsp, &under);
            other.rsp += 8;
        }
        other.rip = own.rip;
        // Flags are dead there or not; the next instruction would show it.
        let difference = difference(&own, &other, FLAGS);
        if difference.is_empty() {
            return Ok(());
        }
        Err(format!(
            "at the fault of {:?}: {difference}",
            instruction.code()
        ))
    }

    /// Restores what trampolines have overwritten below the stack pointer, unless the function itself has written
    /// there. Trampolines that take times save registers there, because nothing is there at the entry and the exits of
    /// a function.
    pub(super) fn restore_dead_stack(
        &self,
        before: &user_regs_struct,
        stack: &Stack,
        has_faulted: bool,
    ) {
        const SAVED: u64 = 64;
        let after = self.original.registers();
        let is_entry = |at: u64| self.twin.program.entries.contains(&at);
        // It may also be about to leave, and fault.
        let is_leaving = self.twin.program.instruction(after.rip).is_some_and(|it| {
            let flow = it.flow_control();
            matches!(flow, FlowControl::Return | FlowControl::IndirectBranch)
        });
        let has_left = after.rip == RETURN
            || is_leaving && has_faulted
            || is_entry(after.rip)
            || after.rsp > before.rsp
            || !self.same_function(before.rip, after.rip);
        let marked = |at: u64| {
            let instruction = self.twin.program.instruction(at);
            instruction.is_some_and(|it| it.mnemonic() == Mnemonic::Endbr64)
        };
        let entered = before.rip.wrapping_sub(4);
        let is_entry = is_entry(before.rip) || is_entry(entered) && marked(entered);
        // A return has taken its address off the stack.
        let tops = [
            (is_entry, before.rsp),
            (has_left, after.rsp),
            (has_left, after.rsp.wrapping_sub(8)),
        ];
        for at in tops
            .iter()
            .filter(|it| it.0)
            .flat_map(|(_, top)| top.saturating_sub(SAVED)..*top)
        {
            let Some(was) = at
                .checked_sub(stack.start)
                .and_then(|it| stack.bytes.get(it as usize))
            else {
                continue;
            };
            let is = [&self.original, &self.patched].map(|it| it.read(at, 1).map(|it| it[0]));
            if is[0] == Some(*was) && is[1] != is[0] {
                self.patched.write(at, &[*was]);
            }
        }
    }

    pub(super) fn same_function(&self, one: u64, other: u64) -> bool {
        let callee = self.twin.program.callee_at(one);
        callee.is_some_and(|it| it.code.contains(&other))
    }

    /// Returns whether an instruction accesses patched code as data, or memory of the observation, as random addresses
    /// may.
    fn touches_observation(&self, instruction: &Instruction, registers: &user_regs_struct) -> bool {
        accessed(instruction, registers)
            .into_iter()
            .any(|it| self.twin.is_inside(it.start) || self.twin.patched.range(it).next().is_some())
    }

    pub(super) fn compare_vectors(&self) -> Result<()> {
        let (one, other) = (self.original.vectors(), self.patched.vectors());
        let x87 = |vectors: &user_fpregs_struct| {
            let top = usize::from(vectors.swd >> 11 & 7);
            let in_use = (0..8).filter(|it| vectors.ftw >> ((top + it) % 8) & 1 != 0);
            let words = |it: usize| vectors.st_space[4 * it..4 * it + 3].to_vec();
            let stack: Vec<Vec<u32>> = in_use.map(words).collect();
            (vectors.cwd, stack)
        };
        if one.xmm_space != other.xmm_space || one.mxcsr != other.mxcsr {
            return Err(format!("vectors {one:x?} instead of {other:x?}"));
        }
        if x87(&one) != x87(&other) {
            return Err(format!(
                "x87 {:x?} instead of {:x?}",
                x87(&other),
                x87(&one)
            ));
        }
        Ok(())
    }

    pub(super) fn compare_memory(&self) -> Result<()> {
        self.compare_vectors()?;
        if self.original.given != self.patched.given {
            let (one, other) = (&self.original.given, &self.patched.given);
            return Err(format!("accessed pages {other:x?} instead of {one:x?}"));
        }
        let data = self.twin.program.mapped.iter();
        let data = data.filter(|(_, it)| it.is_private_data && !it.is_kernels);
        let data = data.map(|(start, it)| *start..it.end);
        let given = self.original.given.iter().map(|page| *page..page + PAGE);
        for range in data.chain(given) {
            let len = (range.end - range.start) as usize;
            let (one, other) = (
                self.original.read(range.start, len),
                self.patched.read(range.start, len),
            );
            if one != other {
                let both = one.iter().flatten().zip(other.iter().flatten());
                let at = both.take_while(|(one, other)| one == other).count();
                let at = range.start + at as u64;
                let words = [&self.original, &self.patched].map(|it| it.read(at & !7, 8));
                let rsp = self.original.registers().rsp;
                return Err(format!("memory at {at:#x}, rsp {rsp:#x}: {words:x?}"));
            }
        }
        Ok(())
    }

    /// Returns the last instructions that both executed.
    pub(super) fn last(&self) -> String {
        let mut text = String::new();
        for &at in self.path.iter().rev().take(12).rev() {
            let program = self.twin.program;
            let instruction = program
                .instruction(at)
                .map_or_else(String::new, |it| format!("{:?}", it.code()));
            let _ = writeln!(text, "  {at:#x} {} {instruction}", program.place(at));
        }
        text
    }
}

/// A random word: small, a pointer to data, or to a function.
fn value_of(random: &mut fastrand::Rng, callees: &[Callee]) -> u64 {
    match random.u32(..16) {
        0..=4 => random.u64(..8),
        5 => random.u64(..) >> random.u32(..64),
        6 => random.choice(callees).map_or(0, |it| it.code.start),
        7 => STACK.start + 0x4000 + 8 * random.u64(..0x800),
        _ => DATA.start + 8 + 16 * random.u64(..0x300),
    }
}
