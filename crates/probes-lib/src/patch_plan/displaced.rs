//! [`DisplacedCopy`]: displaced instructions, to be executed at another address with the same effect.
//!
//! ```text
//! mov x(%rip), %r   the same x, by another displacement          jcc L      the same L, by a near jump
//! call f            push the original return address; jmp f      loop L     by a jump around a jump
//! ```
//!
//! A displaced call pushes the return address that it always pushed: OCaml's collector, exceptions and
//! unwinders look it up. Each instruction is re-encoded by itself: a branch to the start of the patch leaves the copy
//! and passes through the patch again, as it passed through the original instruction.

use iced_x86::{
    Code as Opcode, Encoder, FlowControl, Instruction, MemoryOperand, OpKind, Register,
};

use crate::address::LiveAddr;
use crate::error::Refusal;
use crate::patch_plan::code::decode;
use crate::patch_plan::instruction::{ends_flow, has_near_target, is_call};
use crate::patch_plan::jump::{JUMP_LEN, SHORT_JMP, SHORT_LEN};
use crate::site::INT3;

/// An exit of a function among displaced instructions: a return, or a jump to another function.
///
/// [`PatchPlanner::new`](crate::PatchPlanner::new) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DisplacedExit {
    /// Where it is, in bytes from the first displaced instruction.
    pub offset: usize,
    /// Whether the trampoline may change the status flags when the function is about to be left there.
    pub flags_are_dead: bool,
    pub(crate) kind: ExitKind,
    /// Whether it is a jump to the function's own entry: a loop.
    pub(crate) begins_again: bool,
}

/// How a function is left at an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitKind {
    /// It returns its result.
    Return,
    /// It jumps to another function, whose result is its own.
    Jump,
}

/// The code of displaced instructions at their new address, with the jump back.
///
/// [`PatchSite::copy_at`](crate::PatchSite::copy_at) makes one.
///
/// [`PatchSite`](crate::PatchSite) has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DisplacedCopy {
    code: Vec<u8>,
    moved: Vec<(LiveAddr, LiveAddr)>,
}

impl DisplacedCopy {
    /// The bytes of the copy.
    pub fn code(&self) -> &[u8] {
        &self.code
    }

    /// Returns where in the copy a thread that was stopped at `address` goes on: at the copy of the same instruction.
    /// `None` if no displaced instruction begins there.
    pub fn moved(&self, address: LiveAddr) -> Option<LiveAddr> {
        let found = self.moved.iter().find(|(from, _)| *from == address);
        found.map(|(_, to)| *to)
    }

    /// Returns where each displaced instruction was, and where it is in the copy, in order.
    pub(crate) fn moves(&self) -> impl Iterator<Item = (LiveAddr, LiveAddr)> {
        self.moved.iter().copied()
    }

    /// Makes the copy at `to` of the instructions that are `bytes` at `from`.
    pub(super) fn make(
        bytes: &[u8],
        from: LiveAddr,
        to: LiveAddr,
    ) -> Result<DisplacedCopy, Refusal> {
        DisplacedCopy::make_with_exits(bytes, from, to, &[], &mut |_, _| Ok(Vec::new()))
    }

    /// Same as [`DisplacedCopy::make`], with code before each of these `exits`: `at_exit` returns it, given its address
    /// and the kind of the exit.
    pub(super) fn make_with_exits(
        bytes: &[u8],
        from: LiveAddr,
        to: LiveAddr,
        exits: &[DisplacedExit],
        at_exit: &mut dyn FnMut(LiveAddr, ExitKind) -> Result<Vec<u8>, Refusal>,
    ) -> Result<DisplacedCopy, Refusal> {
        let mut copy = Writer {
            at: to,
            code: Vec::new(),
            return_addresses: Vec::new(),
        };
        let mut moved = Vec::new();
        let mut falls_through = true;
        let mut conditional = Vec::new();
        for instruction in decode(bytes, from.0) {
            let offset = instruction.ip() - from.0;
            if let Some(what) = unmovable(&instruction) {
                return Err(Refusal::Unmovable { offset, what });
            }
            moved.push((LiveAddr(instruction.ip()), copy.here()));
            let exit = exits.iter().find(|exit| exit.offset as u64 == offset);
            if exit.is_some() && instruction.flow_control() == FlowControl::ConditionalBranch {
                conditional.push(copy.conditional_exit(&instruction, offset)?);
                falls_through = true;
                continue;
            }
            if let Some(exit) = exit {
                let code = at_exit(copy.here(), exit.kind)?;
                copy.code.extend(code);
            }
            if is_call(&instruction) {
                copy.call(&instruction)?;
            } else {
                copy.instruction(&instruction)?;
            }
            falls_through = !is_call(&instruction) && !ends_flow(&instruction);
        }
        if falls_through {
            let back = from.plus(bytes.len() as u64);
            copy.branch(Opcode::Jmp_rel32_64, back.0)?;
        }
        for (end, target) in conditional {
            copy.set_displacement(end, copy.code.len())?;
            let code = at_exit(copy.here(), ExitKind::Jump)?;
            copy.code.extend(code);
            copy.branch(Opcode::Jmp_rel32_64, target)?;
        }
        let code = copy.finish()?;
        Ok(DisplacedCopy { code, moved })
    }
}

/// Returns what an instruction is, with its article, if it cannot be moved; `None` if it can.
pub(super) fn unmovable(instruction: &Instruction) -> Option<&'static str> {
    if instruction.is_invalid() {
        return Some("no instruction");
    }
    match instruction.flow_control() {
        FlowControl::Interrupt => return Some("an interrupt"),
        FlowControl::XbeginXabortXend => return Some("a transaction"),
        // The kernel restarts a system call at its own address, and C libraries compare that address when they cancel a
        // thread.
        FlowControl::Call if !is_call(instruction) => return Some("a system call"),
        _ => {}
    }
    if !is_call(instruction) {
        // Processors differ in the effect of an operand-size prefix on a branch.
        let is_odd = instruction.op_count() > 0 && instruction.op0_kind() == OpKind::NearBranch16;
        return is_odd.then_some("an unusual jump");
    }
    let is_lost = match instruction.op0_kind() {
        OpKind::Register => instruction.op0_register() == Register::RSP,
        // What is pushed must not overwrite the operand.
        _ if instruction.memory_base() == Register::RSP => {
            let displacement = instruction.memory_displacement64() as i64;
            (-15..0).contains(&displacement) || instruction.memory_index() != Register::None
        }
        // The displacement from a 32-bit stack pointer may wrap.
        _ => instruction.memory_base() == Register::ESP,
    };
    match instruction.code() {
        Opcode::Call_rel32_64 => None,
        Opcode::Call_rm64 if !is_lost => None,
        _ => Some("an unusual call"),
    }
}

/// Writes instructions one after the other, the first one at `at`.
struct Writer {
    at: LiveAddr,
    code: Vec<u8>,
    /// Words after the code that instructions push: for each, the end of the instruction, and the word.
    return_addresses: Vec<(usize, u64)>,
}

impl Writer {
    fn here(&self) -> LiveAddr {
        self.at.plus(self.code.len() as u64)
    }

    fn instruction(&mut self, instruction: &Instruction) -> Result<(), Refusal> {
        if !has_near_target(instruction) {
            return self.encode(instruction);
        }
        let mut branch = *instruction;
        branch.set_code(branch.code().as_near_branch());
        if !branch.is_jcc_short_or_near() && !branch.is_jmp_short_or_near() {
            return self.short_only(branch);
        }
        self.encode(&branch)
    }

    /// Writes a branch that has only a short form, `loop` or `jrcxz`, as a branch to a near jump.
    fn short_only(&mut self, mut branch: Instruction) -> Result<(), Refusal> {
        let target = branch.near_branch_target();
        let start = self.code.len();
        branch.set_near_branch64(self.here().0);
        self.encode(&branch)?;
        // Over the short jump, which is executed if the branch is not taken.
        branch.set_near_branch64(self.here().0.wrapping_add(SHORT_LEN));
        self.code.truncate(start);
        self.encode(&branch)?;
        self.code.extend([SHORT_JMP, JUMP_LEN as u8]);
        self.branch(Opcode::Jmp_rel32_64, target)
    }

    /// Writes a conditional jump to code that is not written yet; returns the index of the byte after it, and its
    /// original target.
    fn conditional_exit(
        &mut self,
        jump: &Instruction,
        offset: u64,
    ) -> Result<(usize, u64), Refusal> {
        if !jump.is_jcc_short_or_near() {
            let what = "an unusual jump";
            return Err(Refusal::Unmovable { offset, what });
        }
        let mut near = *jump;
        near.set_code(near.code().as_near_branch());
        near.set_near_branch64(self.here().0);
        self.encode(&near)?;
        Ok((self.code.len(), jump.near_branch_target()))
    }

    /// Sets the displacement at the end of an instruction so that it refers to the byte with this index.
    fn set_displacement(&mut self, end: usize, index: usize) -> Result<(), Refusal> {
        let displacement = (index - end) as u32;
        let operand = self.code.get_mut(end - 4..end);
        let operand = operand.ok_or(Refusal::OutOfReach)?;
        operand.copy_from_slice(&displacement.to_le_bytes());
        Ok(())
    }

    fn encode(&mut self, instruction: &Instruction) -> Result<(), Refusal> {
        let mut encoder = Encoder::new(64);
        let encoded = encoder.encode(instruction, self.here().0);
        encoded.map_err(|_| Refusal::OutOfReach)?;
        self.code.extend(encoder.take_buffer());
        Ok(())
    }

    fn branch(&mut self, kind: Opcode, to: u64) -> Result<(), Refusal> {
        let branch = Instruction::with_branch(kind, to).map_err(|_| Refusal::OutOfReach)?;
        self.encode(&branch)
    }

    fn call(&mut self, call: &Instruction) -> Result<(), Refusal> {
        // A word after the code, so that the push is one instruction.
        let word = MemoryOperand::with_base_displ(Register::RIP, self.here().0 as i64);
        let push = Instruction::with1(Opcode::Push_rm64, word);
        self.encode(&push.map_err(|_| Refusal::OutOfReach)?)?;
        self.return_addresses
            .push((self.code.len(), call.next_ip()));
        if call.code() == Opcode::Call_rel32_64 {
            return self.branch(Opcode::Jmp_rel32_64, call.near_branch_target());
        }
        let mut jump = *call;
        jump.set_code(Opcode::Jmp_rm64);
        if jump.op0_kind() == OpKind::Memory && jump.memory_base() == Register::RSP {
            // The push has moved the stack pointer.
            let displacement = jump.memory_displacement64().wrapping_add(8);
            jump.set_memory_displacement64(displacement);
            jump.set_memory_displ_size(8);
        }
        self.instruction(&jump)
    }

    /// Returns the code, followed by the words that it refers to.
    fn finish(mut self) -> Result<Vec<u8>, Refusal> {
        for (end, word) in std::mem::take(&mut self.return_addresses) {
            // Aligned, so that no word is on two pages.
            while self.here().0 % 8 != 0 {
                self.code.push(INT3);
            }
            self.set_displacement(end, self.code.len())?;
            self.code.extend(word.to_le_bytes());
        }
        Ok(self.code)
    }
}

/// Returns whether one of the instructions is a call of a function.
pub(super) fn has_call(instructions: &[Instruction]) -> bool {
    instructions.iter().any(is_call)
}
