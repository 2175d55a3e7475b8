//! [`MappedTrampolines`]: the trampolines that an observer has mapped into the process. No unwind table describes
//! them: a thread that is in one is where the trampoline leaves it, with the registers that it has there.
//!
//! ```text
//! pc in a trampoline ─▶ the rest of it, as far as it concerns the stack ─▶ registers where the thread goes on
//! ```
//!
//! A trampoline ends with the displaced instructions of its point, or is returned from, so what follows is known from
//! its code. Nothing of it depends on how the trampoline records a hit.

mod rest;

use std::ops::Range;

use super::memory::StackMemory;
use super::registers::FrameRegisters;
use crate::address::LiveAddr;
use crate::numbers::u32_at;
use crate::site::SITE_LEN;
pub(super) use rest::Writes;
use rest::{Exit, ExitBy};

/// The most bytes of displaced instructions: the last one begins within the five bytes of a jump.
const MAX_DISPLACED: u64 = 19;

/// `push displacement(%rip)`, with which the copy of a displaced call begins: its opcode, and its length.
const PUSH_WORD: ([u8; 2], u64) = ([0xff, 0x35], 6);

/// The trampolines of one observer that are mapped at one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MappedTrampolines {
    /// All of the code, and what precedes it.
    pub(crate) code: Range<u64>,
    /// Where a word says which trampolines these are, and what it is: others may be mapped at the same place later.
    pub(crate) id: (LiveAddr, u64),
    /// Where the first trampoline begins, and how long each is.
    pub(crate) first: LiveAddr,
    pub(crate) len: u64,
    /// The points that lead to them, in the order of their addresses.
    pub(crate) points: Vec<TrampolinePoint>,
}

/// The point that a trampoline belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrampolinePoint {
    pub(crate) address: LiveAddr,
    /// Whether it is the site of a probe, which calls its trampoline. Others jump there.
    pub(crate) is_site: bool,
}

/// Where a thread goes on that is in a trampoline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AfterTrampoline {
    /// The point of the trampoline: the thread is at it, or at an instruction that was displaced from there.
    pub(super) point: LiveAddr,
    /// The registers there.
    pub(super) registers: FrameRegisters,
    /// What the rest of the trampoline writes to memory.
    pub(super) writes: Writes,
    pub(super) place: Place,
}

/// What the program counter is where a thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// That of an instruction of the function, or of one that it jumps to.
    Instruction,
    /// That after a call in the function.
    AfterCall,
    /// That after the call of the function.
    Caller,
}

impl MappedTrampolines {
    fn point_of(&self, address: u64) -> Option<TrampolinePoint> {
        let index = address.checked_sub(self.first.0)?.checked_div(self.len)?;
        self.points.get(usize::try_from(index).ok()?).copied()
    }

    /// Returns whether a call at this point, or one that was displaced from there, may return to an address.
    pub(super) fn may_return_to(&self, address: LiveAddr) -> bool {
        let after = self.points.partition_point(|it| it.address < address);
        let before = after.checked_sub(1).and_then(|last| self.points.get(last));
        before.is_some_and(|point| address.0 - point.address.0 <= MAX_DISPLACED)
    }

    /// Returns where a thread goes on that has these registers, and is in a trampoline; `None` if that is not known.
    pub(super) fn after(
        &self,
        registers: FrameRegisters,
        memory: &mut dyn StackMemory,
    ) -> Option<AfterTrampoline> {
        let (id_at, id) = self.id;
        if memory.word(id_at.0)? != id {
            return None;
        }
        let exit = rest::execute(&self.code, registers, memory)?;
        let point = self.point_of(exit.last)?;
        let address = point.address;
        let (registers, place) = match exit.by {
            // The site has called the trampoline; if its probe is enabled, the trampoline jumps to the handler.
            ExitBy::Return | ExitBy::Jump if point.is_site => {
                let mut registers = exit.registers;
                if exit.by == ExitBy::Jump {
                    registers = exit.popped(memory)?;
                }
                if registers.ip != address.plus(SITE_LEN as u64).0 {
                    return None;
                }
                (registers, Place::AfterCall)
            }
            ExitBy::Return => (exit.registers, Place::Caller),
            ExitBy::Jump if exit.is_call(address, memory) => {
                (exit.popped(memory)?, Place::AfterCall)
            }
            ExitBy::Jump => (exit.registers, Place::Instruction),
            // It is a displaced instruction: so far, the stack is as at the point.
            ExitBy::StackPointer => {
                let mut registers = exit.registers;
                registers.ip = address.0;
                (registers, Place::Instruction)
            }
        };
        Some(AfterTrampoline {
            point: address,
            registers,
            writes: exit.writes,
            place,
        })
    }
}

impl Exit {
    /// Returns the registers after the function has returned that is about to be entered.
    fn popped(&self, memory: &mut dyn StackMemory) -> Option<FrameRegisters> {
        self.registers.returned(&mut self.writes.over(memory))
    }

    /// Returns whether the jump is the end of a displaced call: the instruction before it pushes the address after the
    /// original call, which is near the `point`.
    fn is_call(&self, point: LiveAddr, memory: &mut dyn StackMemory) -> bool {
        let (opcode, len) = PUSH_WORD;
        let mut code = [0; PUSH_WORD.1 as usize];
        let read = memory.read(self.last.wrapping_sub(len), &mut code);
        if read.is_none() || code[..2] != opcode {
            return false;
        }
        let displacement = u32_at(&code, 2).unwrap_or(0) as i32;
        let word = memory.word(self.last.wrapping_add_signed(displacement.into()));
        let near = point.0..=point.0.saturating_add(MAX_DISPLACED);
        word.is_some_and(|word| near.contains(&word))
    }
}

#[cfg(test)]
pub(crate) mod tests;
