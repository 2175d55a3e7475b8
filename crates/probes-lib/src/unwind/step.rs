//! One step: from a frame to its caller.

use gimli::{EndianSlice, Evaluation, EvaluationResult, LittleEndian, Location, Value, X86_64};

use super::StackEnd;
use super::memory::StackMemory;
use super::registers::{CALLEE_SAVED, FrameRegisters, RSP};
use super::tables::{CallerValue, Cfa, DwarfExpression, UnwindRow};
use crate::address::LiveAddr;

/// If the table says that a register is saved fewer than this many bytes below the stack pointer, it was popped already:
/// the register of this frame has the caller's value.
const MAX_POPPED: u64 = 64;

/// The maximum number of operations of an expression that are executed.
const MAX_OPERATIONS: u32 = 1000;

/// Replaces the registers of a frame by those of its caller. `within` is an address within the current instruction of
/// the frame, which errors name; `cfa`, if given, is used instead of the CFA of the row.
///
/// # Errors
///
/// If it has no caller, or none that can be found. The registers are unchanged.
pub(super) fn step(
    row: &UnwindRow,
    registers: &mut FrameRegisters,
    within: LiveAddr,
    memory: &mut impl StackMemory,
    cfa: Option<u64>,
) -> Result<(), StackEnd> {
    let Some(return_address) = &row.return_address else {
        return Err(StackEnd::Outermost);
    };
    let mut frame = Frame {
        registers,
        within,
        memory,
    };
    let cfa = match (&row.cfa, cfa) {
        (_, Some(cfa)) => cfa,
        (Cfa::Register(register, offset), None) => {
            frame.register(*register)?.wrapping_add_signed(*offset)
        }
        (Cfa::Expression(expression), None) => frame.evaluate(expression, None)?,
    };
    let ip = frame.value_in_caller(return_address, cfa)?;
    let ip = ip.ok_or(StackEnd::UnknownRegister(within))?;
    let mut caller = FrameRegisters::new(ip, cfa);
    let stack_pointer = frame.registers.get(RSP).unwrap_or(0);
    for register in CALLEE_SAVED {
        caller.set(register, frame.registers.get(register));
    }
    for (register, saved) in &row.registers {
        let is_popped = saved.is_saved_below(cfa, stack_pointer, MAX_POPPED);
        let value = if is_popped {
            frame.registers.get(*register)
        } else {
            frame.value_in_caller(saved, cfa).unwrap_or(None)
        };
        caller.set(*register, value);
    }
    if ip == 0 {
        // This frame is wrong, or the stack of a coroutine begins here.
        return Err(StackEnd::UnknownCode(LiveAddr(0)));
    }
    if ip == registers.ip && caller.get(RSP) == registers.get(RSP) {
        return Err(StackEnd::Loop(within));
    }
    *registers = caller;
    Ok(())
}

struct Frame<'f, M> {
    registers: &'f FrameRegisters,
    within: LiveAddr,
    memory: &'f mut M,
}

impl<M: StackMemory> Frame<'_, M> {
    fn register(&self, register: usize) -> Result<u64, StackEnd> {
        let value = self.registers.get(register);
        value.ok_or(StackEnd::UnknownRegister(self.within))
    }

    fn word(&mut self, at: u64) -> Result<u64, StackEnd> {
        let word = self.memory.word(at);
        word.ok_or(StackEnd::Unreadable(LiveAddr(at)))
    }

    fn value_in_caller(&mut self, saved: &CallerValue, cfa: u64) -> Result<Option<u64>, StackEnd> {
        Ok(match saved {
            CallerValue::Unknown => None,
            CallerValue::SavedAt(offset) => Some(self.word(cfa.wrapping_add_signed(*offset))?),
            CallerValue::CfaPlus(offset) => Some(cfa.wrapping_add_signed(*offset)),
            CallerValue::InRegister(register) => self.registers.get(*register),
            CallerValue::SavedAtExpression(expression) => {
                let at = self.evaluate(expression, Some(cfa))?;
                Some(self.word(at)?)
            }
            CallerValue::ValueExpression(expression) => Some(self.evaluate(expression, Some(cfa))?),
        })
    }

    fn evaluate(
        &mut self,
        expression: &DwarfExpression,
        initial: Option<u64>,
    ) -> Result<u64, StackEnd> {
        let bytes = EndianSlice::new(&expression.bytes, LittleEndian);
        let mut evaluation = Evaluation::new(bytes, expression.encoding);
        evaluation.set_max_iterations(MAX_OPERATIONS);
        if let Some(value) = initial {
            evaluation.set_initial_value(value);
        }
        let bad = |_| StackEnd::NoUnwindInfo(self.within);
        let mut result = evaluation.evaluate().map_err(bad)?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = match register {
                        X86_64::RA => self.registers.ip,
                        other => self.register(other.0.into())?,
                    };
                    evaluation.resume_with_register(Value::Generic(value))
                }
                EvaluationResult::RequiresMemory { address, size, .. } => {
                    let word = self.memory.word(address);
                    let word = word.ok_or(StackEnd::Unreadable(LiveAddr(address)))?;
                    let unused = 64 - 8 * u32::from(size.clamp(1, 8));
                    evaluation.resume_with_memory(Value::Generic(word << unused >> unused))
                }
                _ => return Err(StackEnd::NoUnwindInfo(self.within)),
            }
            .map_err(bad)?;
        }
        let pieces = evaluation.result();
        match pieces.last().map(|piece| &piece.location) {
            Some(Location::Address { address }) => Ok(*address),
            _ => Err(StackEnd::NoUnwindInfo(self.within)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables::CallerValue;
    use super::*;

    /// Memory in which each word is 0.
    struct Zeros;

    impl StackMemory for Zeros {
        fn read(&mut self, _: u64, bytes: &mut [u8]) -> Option<()> {
            bytes.fill(0);
            Some(())
        }
    }

    #[test]
    fn only_tables_say_that_a_frame_is_outermost() {
        let step = |return_address| {
            let row = UnwindRow {
                cfa: Cfa::Register(RSP, 8),
                registers: Vec::new(),
                return_address,
                is_signal_frame: false,
                function: 0..1,
            };
            let mut registers = FrameRegisters::new(0x40_0000, 0x7fff_0000);
            let within = LiveAddr(registers.ip);
            step(&row, &mut registers, within, &mut Zeros, None)
        };
        assert_eq!(step(None), Err(StackEnd::Outermost));
        let returns_to_zero = step(Some(CallerValue::SavedAt(-8)));
        assert_eq!(returns_to_zero, Err(StackEnd::UnknownCode(LiveAddr(0))));
    }
}
