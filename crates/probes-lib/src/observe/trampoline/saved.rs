//! The code that saves the registers that a trampoline uses where calls are timed or watched, and restores them.
//!
//! ```text
//! on the stack        in the red zone, the 128 bytes below the stack pointer, which signal handlers leave alone (psABI
//!                     3.2.2), and which is free at an entry and at an exit. Only if all of it is in the page of the
//!                     return address, which has been written to: for a fault at the end of the stack, OCaml 4 raises
//!                     `Stack_overflow` only if the fault is in OCaml code
//! in MMX registers    which alias those of the x87 unit, if that is not in use
//! under a lock        in the data of the arena; all threads share this place
//! ```

use iced_x86::code_asm::{AsmMemoryOperand, CodeAssembler, CodeLabel, qword_ptr, rsp};
use iced_x86::{Code, IcedError, Instruction, Register};

use super::at_point::{PointContext, RegisterPlace};
use super::emit::{at_address, load, locked_increment};
use super::stack_room::unless_room_on_stack;
use super::{SAVED_IF_TIMED, SavedRegister};
use crate::address::LiveAddr;
use crate::observe::layout::shared::SharedLayout;

/// How many times the lock is tried. There is code for each time: no register is free for the counter of a loop.
const TRIES: u32 = 8;

/// Where registers are saved that can be saved neither on the stack nor in the x87 unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockedRegisters {
    /// The lock; the registers follow it.
    pub(super) at: LiveAddr,
    /// The counter of hits whose registers could not be saved, because the lock did not become free: of lost or untyped
    /// ones.
    pub(super) unsaved: LiveAddr,
}

impl LockedRegisters {
    /// Where the registers are.
    pub(super) fn registers(self) -> LiveAddr {
        self.at.plus(8)
    }
}

/// Which of the places in the table above are used: if two, the stack if it has room, or else the other.
/// [`RegisterPlace`] is the same with addresses, for code that reads the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveArea {
    Mmx,
    Lock,
    StackOrMmx,
    StackOrLock,
}

impl SaveArea {
    fn is_stack_first(self) -> bool {
        matches!(self, SaveArea::StackOrMmx | SaveArea::StackOrLock)
    }

    fn has_mmx(self) -> bool {
        matches!(self, SaveArea::Mmx | SaveArea::StackOrMmx)
    }
}

/// Registers that are saved, used, and restored.
pub(super) struct RegisterSaver {
    place: SaveArea,
    used: &'static [SavedRegister],
    locked: LockedRegisters,
    /// The code that saves the registers in the other place if there is no room on the stack, and the code that
    /// restores them from there.
    elsewhere: CodeLabel,
    from_elsewhere: CodeLabel,
    /// What follows the code that saves them, and the end of the code that restores them.
    saved: CodeLabel,
    end: CodeLabel,
}

impl RegisterSaver {
    /// Saves the first `count` registers of [`SAVED_IF_TIMED`].
    pub(super) fn new(
        a: &mut CodeAssembler,
        place: SaveArea,
        count: usize,
        locked: LockedRegisters,
    ) -> RegisterSaver {
        RegisterSaver {
            place,
            used: &SAVED_IF_TIMED[..count],
            locked,
            elsewhere: a.create_label(),
            from_elsewhere: a.create_label(),
            saved: a.create_label(),
            end: a.create_label(),
        }
    }

    /// Where the code that [`RegisterSaver::restore`] emits ends, with all registers as they were.
    pub(super) fn end(&self) -> CodeLabel {
        self.end
    }

    /// Emits the code that saves them; it jumps to [`RegisterSaver::end`] if they cannot be saved.
    pub(super) fn save(&mut self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        if !self.place.is_stack_first() {
            return self.save_elsewhere(a);
        }
        unless_room_on_stack(a, self.elsewhere)?;
        for (index, (register, _)) in self.used.iter().enumerate() {
            a.mov(self.on_stack(index), *register)?;
        }
        a.set_label(&mut self.saved)?;
        // The caller may set a label here, too; an instruction can have only one.
        a.nop()
    }

    /// Emits the code that restores them, and the end.
    pub(super) fn restore(&mut self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        if self.place.is_stack_first() {
            unless_room_on_stack(a, self.from_elsewhere)?;
            for (index, (register, _)) in self.used.iter().enumerate() {
                a.mov(*register, self.on_stack(index))?;
            }
            a.jmp(self.end)?;
            a.set_label(&mut self.elsewhere)?;
            self.save_elsewhere(a)?;
            a.jmp(self.saved)?;
            a.set_label(&mut self.from_elsewhere)?;
        }
        self.restore_elsewhere(a)?;
        a.set_label(&mut self.end)?;
        // A label needs an instruction.
        a.nop()
    }

    fn save_elsewhere(&self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        if self.place.has_mmx() {
            for (register, copy) in self.used {
                a.movq(*copy, *register)?;
            }
            return Ok(());
        }
        self.lock(a)?;
        for (index, (register, _)) in self.used.iter().enumerate() {
            let (place, register) = (
                at_address(self.under_lock(index)),
                Register::from(*register),
            );
            a.add_instruction(Instruction::with2(Code::Mov_rm64_r64, place, register)?)?;
        }
        Ok(())
    }

    fn restore_elsewhere(&self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        if self.place.has_mmx() {
            for (register, copy) in self.used {
                a.movq(*register, *copy)?;
            }
            return a.emms();
        }
        for (index, (register, _)) in self.used.iter().enumerate() {
            load(a, *register, self.under_lock(index))?;
        }
        let unlocked = at_address(self.locked.at);
        a.add_instruction(Instruction::with2(Code::Mov_rm32_imm32, unlocked, 0)?)
    }

    /// Emits the code that takes the lock; it jumps to [`RegisterSaver::end`] if the lock does not become free.
    fn lock(&self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let mut taken = a.create_label();
        for _ in 0..TRIES {
            let mut take = Instruction::with2(Code::Bts_rm32_imm8, at_address(self.locked.at), 0)?;
            take.set_has_lock_prefix(true);
            a.add_instruction(take)?;
            a.jnc(taken)?;
            a.pause()?;
        }
        a.add_instruction(locked_increment(self.locked.unsaved)?)?;
        a.jmp(self.end)?;
        a.set_label(&mut taken)
    }

    /// Returns the context for code that reads what the registers held when they were saved.
    pub(super) fn context(&self, shared: LiveAddr, layout: SharedLayout) -> PointContext {
        let registers = self.locked.registers();
        PointContext {
            saved: self.used,
            saved_at: match self.place {
                SaveArea::Mmx => RegisterPlace::Copies,
                SaveArea::Lock => RegisterPlace::Address(registers),
                SaveArea::StackOrMmx => RegisterPlace::StackOrCopies,
                SaveArea::StackOrLock => RegisterPlace::StackOrAddress(registers),
            },
            pushed: 0,
            shared,
            layout,
        }
    }

    /// Returns where a register is saved on the stack.
    fn on_stack(&self, index: usize) -> AsmMemoryOperand {
        qword_ptr(rsp + 8 * (index as i32 - self.used.len() as i32))
    }

    /// Returns where a register is saved under the lock.
    fn under_lock(&self, index: usize) -> LiveAddr {
        self.locked.registers().plus(8 * index as u64)
    }
}
