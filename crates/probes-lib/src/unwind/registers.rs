//! [`FrameRegisters`]: the registers of one frame, each known or not.

use super::memory::StackMemory;

/// DWARF's numbers of registers (System V ABI, AMD64 supplement, figure 3.36).
pub(crate) const RAX: usize = 0;
pub(crate) const RDX: usize = 1;
pub(crate) const RCX: usize = 2;
pub(crate) const RBX: usize = 3;
pub(crate) const RSI: usize = 4;
pub(crate) const RDI: usize = 5;
pub(crate) const RBP: usize = 6;
pub(crate) const RSP: usize = 7;
pub(crate) const R8: usize = 8;
pub(crate) const R9: usize = 9;
pub(crate) const R10: usize = 10;
pub(super) const R11: usize = 11;
const COUNT: usize = 16;

/// The registers that a function preserves for its caller, besides the stack pointer.
pub(super) const CALLEE_SAVED: [usize; 6] = [RBX, RBP, 12, 13, 14, 15];

/// The registers of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameRegisters {
    /// The program counter.
    pub(crate) ip: u64,
    general: [Option<u64>; COUNT],
}

impl FrameRegisters {
    /// Only the program counter and the stack pointer are known.
    pub(crate) fn new(ip: u64, stack_pointer: u64) -> FrameRegisters {
        let mut registers = FrameRegisters {
            ip,
            general: [None; COUNT],
        };
        registers.set(RSP, Some(stack_pointer));
        registers
    }

    /// Returns the registers after the return of a function that has nothing on the stack but the return address.
    pub(super) fn returned(&self, memory: &mut impl StackMemory) -> Option<FrameRegisters> {
        let top = self.get(RSP)?;
        let mut registers = *self;
        registers.ip = memory.word(top)?;
        registers.set(RSP, Some(top.checked_add(8)?));
        Some(registers)
    }

    /// Those of a stopped thread.
    pub(crate) fn of_thread(all: &libc::user_regs_struct) -> FrameRegisters {
        let in_order = [
            all.rax, all.rdx, all.rcx, all.rbx, all.rsi, all.rdi, all.rbp, all.rsp, all.r8, all.r9,
            all.r10, all.r11, all.r12, all.r13, all.r14, all.r15,
        ];
        FrameRegisters {
            ip: all.rip,
            general: in_order.map(Some),
        }
    }

    /// The value of a register, if it is known.
    pub(crate) fn get(&self, register: usize) -> Option<u64> {
        self.general.get(register).copied().flatten()
    }

    /// Changes a register; one that does not exist is ignored.
    pub(crate) fn set(&mut self, register: usize, value: Option<u64>) {
        if let Some(place) = self.general.get_mut(register) {
            *place = value;
        }
    }
}
