//! The rest of a trampoline, executed as far as it concerns the stack and registers whose values are known. Pure but
//! for the memory that it is given.
//!
//! Which way a branch goes is known only where it asks for room on the stack; elsewhere, any way out will do: where a
//! trampoline ends, all registers are those of the function, whichever way it has taken.

use std::collections::HashSet;
use std::ops::Range;

use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory,
    Mnemonic, OpAccess, OpKind, Register, RflagsBits,
};

use super::super::memory::StackMemory;
use super::super::registers::{
    FrameRegisters, R8, R9, R10, R11, RAX, RBP, RBX, RCX, RDI, RDX, RSI, RSP,
};

/// The most instructions that are executed.
const MAX_INSTRUCTIONS: usize = 1 << 13;

/// How many bytes of code are read at once.
const FETCHED: u64 = 256;

/// The most bytes of an instruction.
const MAX_LEN: u64 = 15;

/// The longest memory operand, in bytes, of which each word is taken for changed.
const MAX_OPERAND: u64 = 64;

/// How a thread leaves a trampoline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExitBy {
    Jump,
    Return,
    /// Not yet: the next instruction sets the stack pointer to what is not known.
    StackPointer,
}

/// Where a thread leaves a trampoline.
#[derive(Debug)]
pub(super) struct Exit {
    pub(super) by: ExitBy,
    /// The address of the last instruction there.
    pub(super) last: u64,
    pub(super) registers: FrameRegisters,
    pub(super) writes: Writes,
}

/// The words that were written to memory, the first one first: the address of each, and the word if it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Writes(Vec<(u64, Option<u64>)>);

impl Writes {
    /// Returns memory as it is after them.
    pub(in super::super) fn over<'m>(
        &'m self,
        memory: &'m mut dyn StackMemory,
    ) -> WrittenMemory<'m> {
        WrittenMemory {
            writes: self,
            memory,
        }
    }
}

/// Memory, and what was written to it.
pub(in super::super) struct WrittenMemory<'m> {
    writes: &'m Writes,
    memory: &'m mut dyn StackMemory,
}

impl StackMemory for WrittenMemory<'_> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let end = at.saturating_add(bytes.len() as u64);
        let is_read = |write: u64| write < end && at < write.saturating_add(8);
        let mut writes = self.writes.0.iter().rev();
        match writes.find(|(write, _)| is_read(*write)) {
            None => self.memory.read(at, bytes),
            Some((write, word)) if *write == at && bytes.len() == 8 => {
                bytes.copy_from_slice(&(*word)?.to_le_bytes());
                Some(())
            }
            Some(_) => None,
        }
    }
}

/// Executes the rest of a trampoline from these registers on; `None` if no way out of `code` is found.
pub(super) fn execute(
    code: &Range<u64>,
    registers: FrameRegisters,
    memory: &mut dyn StackMemory,
) -> Option<Exit> {
    let mut fetch = Fetch {
        code,
        start: 0,
        bytes: Vec::new(),
    };
    let mut factory = InstructionInfoFactory::new();
    let mut seen = HashSet::new();
    let mut paths = vec![Execution {
        registers,
        mmx: [None; 8],
        writes: Writes::default(),
        is_zero: None,
    }];
    while let Some(mut state) = paths.pop() {
        while seen.len() < MAX_INSTRUCTIONS && seen.insert(state.registers.ip) {
            let last = state.registers.ip;
            let Some(instruction) = fetch.instruction(last, memory) else {
                break;
            };
            let effect = state.execute(&instruction, &mut factory, memory);
            let by = match effect {
                AfterInstruction::Unknown => break,
                AfterInstruction::Next => ExitBy::Jump,
                AfterInstruction::Return => ExitBy::Return,
                AfterInstruction::StackPointer => ExitBy::StackPointer,
                AfterInstruction::Branch(target) if !code.contains(&target) => {
                    state.registers.ip = target;
                    ExitBy::Jump
                }
                AfterInstruction::Branch(target) => {
                    // Forward first: that leads out sooner.
                    let mut other = state.clone();
                    let next = &mut state.registers.ip;
                    other.registers.ip = (*next).min(target);
                    *next = (*next).max(target);
                    paths.push(other);
                    ExitBy::Jump
                }
            };
            if by == ExitBy::StackPointer || !code.contains(&state.registers.ip) {
                return Some(Exit {
                    by,
                    last,
                    registers: state.registers,
                    writes: state.writes,
                });
            }
        }
    }
    None
}

/// Reads instructions.
struct Fetch<'c> {
    code: &'c Range<u64>,
    start: u64,
    bytes: Vec<u8>,
}

impl Fetch<'_> {
    fn instruction(&mut self, at: u64, memory: &mut dyn StackMemory) -> Option<Instruction> {
        let end = self.start + self.bytes.len() as u64;
        let needed = at.saturating_add(MAX_LEN).min(self.code.end);
        if at < self.start || needed > end {
            let len = self.code.end.checked_sub(at)?.min(FETCHED);
            (self.start, self.bytes) = (at, vec![0; len as usize]);
            memory.read(at, &mut self.bytes)?;
        }
        let bytes = self.bytes.get((at - self.start) as usize..)?;
        let instruction = Decoder::with_ip(64, bytes, at, DecoderOptions::NONE).decode();
        (!instruction.is_invalid()).then_some(instruction)
    }
}

/// How execution goes on after an instruction.
enum AfterInstruction {
    /// The program counter is that of the next instruction.
    Next,
    /// Same, or the next one is at this address.
    Branch(u64),
    Return,
    /// It sets the stack pointer to what is not known. What is known of the thread is as before it.
    StackPointer,
    /// It is not known what follows.
    Unknown,
}

/// What is known of a thread.
#[derive(Clone)]
struct Execution {
    registers: FrameRegisters,
    mmx: [Option<u64>; 8],
    writes: Writes,
    /// The zero flag, if it is known.
    is_zero: Option<bool>,
}

/// Returns DWARF's number of a register of 64 bits.
fn number(register: Register) -> Option<usize> {
    Some(match register {
        Register::RAX => RAX,
        Register::RDX => RDX,
        Register::RCX => RCX,
        Register::RBX => RBX,
        Register::RSI => RSI,
        Register::RDI => RDI,
        Register::RBP => RBP,
        Register::RSP => RSP,
        Register::R8 => R8,
        Register::R9 => R9,
        Register::R10 => R10,
        Register::R11 => R11,
        Register::R12 => 12,
        Register::R13 => 13,
        Register::R14 => 14,
        Register::R15 => 15,
        _ => return None,
    })
}

/// Returns the index of an MMX register.
fn mmx_number(register: Register) -> Option<usize> {
    register.is_mm().then(|| register.number())
}

impl Execution {
    fn execute(
        &mut self,
        instruction: &Instruction,
        factory: &mut InstructionInfoFactory,
        memory: &mut dyn StackMemory,
    ) -> AfterInstruction {
        self.registers.ip = instruction.next_ip();
        match instruction.flow_control() {
            FlowControl::Next => self.straight(instruction, factory, memory),
            FlowControl::Call if instruction.mnemonic() == Mnemonic::Syscall => {
                self.registers.set(RAX, None);
                self.straight(instruction, factory, memory)
            }
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
                if instruction.op0_kind() == OpKind::NearBranch64 =>
            {
                self.branch(instruction)
            }
            FlowControl::IndirectBranch => match self.value(instruction, 0, memory) {
                Some(target) => {
                    self.registers.ip = target;
                    AfterInstruction::Next
                }
                None => AfterInstruction::Unknown,
            },
            FlowControl::Return => match self.pop(memory) {
                Some(target) if instruction.op_count() == 0 => {
                    self.registers.ip = target;
                    AfterInstruction::Return
                }
                _ => AfterInstruction::Unknown,
            },
            _ => AfterInstruction::Unknown,
        }
    }

    fn branch(&mut self, instruction: &Instruction) -> AfterInstruction {
        let target = instruction.near_branch_target();
        let is_taken = match instruction.condition_code() {
            ConditionCode::e => self.is_zero,
            ConditionCode::ne => self.is_zero.map(|zero| !zero),
            _ if instruction.flow_control() == FlowControl::UnconditionalBranch => Some(true),
            _ => None,
        };
        match is_taken {
            Some(true) => self.registers.ip = target,
            Some(false) => {}
            None => return AfterInstruction::Branch(target),
        }
        AfterInstruction::Next
    }

    /// Executes an instruction that the next one follows.
    fn straight(
        &mut self,
        instruction: &Instruction,
        factory: &mut InstructionInfoFactory,
        memory: &mut dyn StackMemory,
    ) -> AfterInstruction {
        let is_zero = self.is_zero_after(instruction);
        let done = match instruction.mnemonic() {
            Mnemonic::Mov | Mnemonic::Movq if is_word(instruction, 0) => {
                let value = self.value(instruction, 1, memory);
                // It leads to another stack: the row of the next instruction may not describe it.
                let is_other_stack = instruction.op0_register() == Register::RSP
                    && instruction.op1_kind() == OpKind::Memory;
                self.assign(instruction, value.filter(|_| !is_other_stack))
            }
            Mnemonic::Lea if is_word(instruction, 0) => {
                let value = self.address(instruction, 1);
                self.assign(instruction, value)
            }
            Mnemonic::Push if is_word(instruction, 0) => {
                let value = self.value(instruction, 0, memory);
                self.moved_by(-8).map(|()| {
                    let top = self.registers.get(RSP);
                    self.writes.0.extend(top.map(|top| (top, value)));
                })
            }
            Mnemonic::Pop if is_word(instruction, 0) => {
                let value = self.pop(memory);
                self.assign(instruction, value)
            }
            Mnemonic::Leave => self.leave(memory),
            Mnemonic::Add | Mnemonic::Sub
                if instruction.op0_register() == Register::RSP
                    && matches!(
                        instruction.op1_kind(),
                        OpKind::Immediate8to64 | OpKind::Immediate32to64
                    ) =>
            {
                let many = instruction.immediate(1) as i64;
                let is_added = instruction.mnemonic() == Mnemonic::Add;
                self.moved_by(if is_added { many } else { many.wrapping_neg() })
            }
            _ => self.forget(instruction, factory),
        };
        if done.is_none() {
            return AfterInstruction::StackPointer;
        }
        if instruction.rflags_modified() & RflagsBits::ZF != 0 {
            self.is_zero = is_zero;
        }
        AfterInstruction::Next
    }

    /// Returns the zero flag after an instruction that asks for bits of the stack pointer.
    fn is_zero_after(&self, instruction: &Instruction) -> Option<bool> {
        let asks = instruction.mnemonic() == Mnemonic::Test
            && instruction.op0_register() == Register::ESP
            && instruction.op1_kind() == OpKind::Immediate32;
        let bits = asks.then(|| instruction.immediate32());
        Some(self.registers.get(RSP)? as u32 & bits? == 0)
    }

    /// Returns the value of an operand of 64 bits.
    fn value(
        &self,
        instruction: &Instruction,
        operand: u32,
        memory: &mut dyn StackMemory,
    ) -> Option<u64> {
        if !is_word(instruction, operand) {
            return None;
        }
        match instruction.op_kind(operand) {
            OpKind::Register => {
                let register = instruction.op_register(operand);
                match mmx_number(register) {
                    Some(index) => *self.mmx.get(index)?,
                    None => self.registers.get(number(register)?),
                }
            }
            OpKind::Memory => {
                let at = self.address(instruction, operand)?;
                self.writes.over(memory).word(at)
            }
            _ => Some(instruction.immediate(operand)),
        }
    }

    /// Returns the address of an operand in memory.
    fn address(&self, instruction: &Instruction, operand: u32) -> Option<u64> {
        instruction.virtual_address(operand, 0, |register, _, _| self.part_of_address(register))
    }

    fn part_of_address(&self, register: Register) -> Option<u64> {
        match register {
            Register::ES | Register::CS | Register::SS | Register::DS => Some(0),
            // Of fs and gs, it is not known; of 32 bits, nothing is needed.
            _ => self.registers.get(number(register)?),
        }
    }

    /// Assigns to the first operand; `None` if that is the stack pointer, and the value is not known.
    fn assign(&mut self, instruction: &Instruction, value: Option<u64>) -> Option<()> {
        if instruction.op0_kind() == OpKind::Memory {
            let at = self.address(instruction, 0);
            self.writes.0.extend(at.map(|at| (at, value)));
            return Some(());
        }
        self.set(instruction.op0_register(), value)
    }

    fn set(&mut self, register: Register, value: Option<u64>) -> Option<()> {
        if register == Register::RSP && value.is_none() {
            return None;
        }
        if let Some(number) = number(register) {
            self.registers.set(number, value);
        }
        let mmx = mmx_number(register).and_then(|index| self.mmx.get_mut(index));
        if let Some(place) = mmx {
            *place = value;
        }
        Some(())
    }

    fn moved_by(&mut self, many: i64) -> Option<()> {
        let top = self.registers.get(RSP)?;
        self.set(Register::RSP, Some(top.wrapping_add_signed(many)))
    }

    fn pop(&mut self, memory: &mut dyn StackMemory) -> Option<u64> {
        let top = self.registers.get(RSP)?;
        let word = self.writes.over(memory).word(top);
        self.moved_by(8)?;
        word
    }

    fn leave(&mut self, memory: &mut dyn StackMemory) -> Option<()> {
        let base = self.registers.get(RBP)?;
        self.registers.set(RSP, Some(base));
        let caller = self.pop(memory);
        self.set(Register::RBP, caller)
    }

    /// Forgets what an instruction changes; `None` if that is the stack pointer.
    fn forget(
        &mut self,
        instruction: &Instruction,
        factory: &mut InstructionInfoFactory,
    ) -> Option<()> {
        let is_write = |access| {
            matches!(
                access,
                OpAccess::Write
                    | OpAccess::CondWrite
                    | OpAccess::ReadWrite
                    | OpAccess::ReadCondWrite
            )
        };
        let info = factory.info(instruction);
        for used in info.used_memory().iter().filter(|it| is_write(it.access())) {
            let at = used.virtual_address(0, |register, _, _| self.part_of_address(register));
            let len = (used.memory_size().size() as u64).min(MAX_OPERAND);
            let words = at
                .into_iter()
                .flat_map(|at| (at..at.saturating_add(len)).step_by(8));
            self.writes.0.extend(words.map(|at| (at, None)));
        }
        let mut changed = info
            .used_registers()
            .iter()
            .filter(|it| is_write(it.access()));
        changed.try_for_each(|used| self.set(used.register().full_register(), None))
    }
}

/// Returns whether an operand has 64 bits: a register, memory, or an immediate value, which is extended to as many.
fn is_word(instruction: &Instruction, operand: u32) -> bool {
    match instruction.op_kind(operand) {
        OpKind::Register => {
            let register = instruction.op_register(operand);
            number(register).or(mmx_number(register)).is_some()
        }
        OpKind::Memory => instruction.memory_size().size() == 8,
        OpKind::Immediate8to64 | OpKind::Immediate32to64 | OpKind::Immediate64 => true,
        _ => false,
    }
}
