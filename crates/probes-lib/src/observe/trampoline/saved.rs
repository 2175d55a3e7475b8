//! The code that saves the registers that a trampoline uses where calls are timed or watched, and restores them.
//!
//! ```text
//! on the stack        below the stack pointer: at an entry and at an exit nothing is there, and signal handlers leave
//!                     128 bytes alone (psABI 3.2.2). But only if these are in the page with the return address, which
//!                     has been written: OCaml 4 raises `Stack_overflow` only for a fault in its own code
//! in MMX registers    which alias those of the x87 unit, if that is not in use
//! behind a lock       in the data of the arena
//! ```

use iced_x86::code_asm::{AsmMemoryOperand, CodeAssembler, CodeLabel, qword_ptr, rsp};
use iced_x86::{Code, IcedError, Instruction, Register};

use super::at_point::{PointContext, SavedAt};
use super::emit::{at_address, load, locked_increment};
use super::stack_room::unless_room_on_stack;
use super::{SAVED_IF_TIMED, SavedRegister};
use crate::address::LiveAddr;
use crate::observe::layout::shared::SharedLayout;

/// How often the lock is tried: no register is free to count in.
const TRIES: u32 = 8;

/// Where registers are saved that can be saved neither on the stack nor in the x87 unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockedRegisters {
    /// The lock; the registers follow it.
    pub(super) at: LiveAddr,
    /// What is incremented if the lock is not free.
    pub(super) lost: LiveAddr,
}

impl LockedRegisters {
    /// Where the registers are.
    pub(super) fn registers(self) -> LiveAddr {
        self.at.plus(8)
    }
}

/// Where registers are saved.
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
pub(super) struct Saving {
    place: SaveArea,
    used: &'static [SavedRegister],
    locked: LockedRegisters,
    /// Where the registers are saved if there is no room on the stack, and where they are restored then.
    elsewhere: CodeLabel,
    from_elsewhere: CodeLabel,
    /// Where the code goes on once they are saved, and where it ends.
    saved: CodeLabel,
    end: CodeLabel,
}

impl Saving {
    /// For so many of the registers of [`SAVED_IF_TIMED`], from the first.
    pub(super) fn new(
        a: &mut CodeAssembler,
        place: SaveArea,
        count: usize,
        locked: LockedRegisters,
    ) -> Saving {
        Saving {
            place,
            used: &SAVED_IF_TIMED[..count],
            locked,
            elsewhere: a.create_label(),
            from_elsewhere: a.create_label(),
            saved: a.create_label(),
            end: a.create_label(),
        }
    }

    /// Where the code that [`Saving::restore`] emits ends, with all registers as they were.
    pub(super) fn end(&self) -> CodeLabel {
        self.end
    }

    /// Emits the code that saves them; it goes to the end if they cannot be saved.
    pub(super) fn save(&mut self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        if !self.place.is_stack_first() {
            return self.save_elsewhere(a);
        }
        unless_room_on_stack(a, self.elsewhere)?;
        for (index, (register, _)) in self.used.iter().enumerate() {
            a.mov(self.on_stack(index), *register)?;
        }
        a.set_label(&mut self.saved)?;
        // There may be another label.
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
                at_address(self.behind_lock(index)),
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
            load(a, *register, self.behind_lock(index))?;
        }
        let unlocked = at_address(self.locked.at);
        a.add_instruction(Instruction::with2(Code::Mov_rm32_imm32, unlocked, 0)?)
    }

    /// Emits the code that takes the lock; it goes to the end if the lock is not free.
    fn lock(&self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let mut taken = a.create_label();
        for _ in 0..TRIES {
            let mut take = Instruction::with2(Code::Bts_rm32_imm8, at_address(self.locked.at), 0)?;
            take.set_has_lock_prefix(true);
            a.add_instruction(take)?;
            a.jnc(taken)?;
            a.pause()?;
        }
        a.add_instruction(locked_increment(self.locked.lost)?)?;
        a.jmp(self.end)?;
        a.set_label(&mut taken)
    }

    /// Returns the context for code that reads what the registers held when they were saved.
    pub(super) fn context(&self, shared: LiveAddr, layout: SharedLayout) -> PointContext {
        let registers = self.locked.registers();
        PointContext {
            saved: self.used,
            saved_at: match self.place {
                SaveArea::Mmx => SavedAt::Copies,
                SaveArea::Lock => SavedAt::Address(registers),
                SaveArea::StackOrMmx => SavedAt::StackOrCopies,
                SaveArea::StackOrLock => SavedAt::StackOrAddress(registers),
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

    /// Returns where a register is saved behind the lock.
    fn behind_lock(&self, index: usize) -> LiveAddr {
        self.locked.registers().plus(8 * index as u64)
    }
}
