//! [`JumpSource`]: where an indirect jump takes its target from, as the instructions before it say.
//!
//! ```text
//! lea T(%rip), %b; movslq (%b,%i,4), %r; add %b, %r; jmp *%r    a table of offsets from T      Relative
//! the same with another base (glibc's printf)                   a table of offsets from code   Relative
//! jmp *T(,%i,8)     or  mov (%b,%i,8), %r; jmp *%r              a table of addresses           Absolute
//! mov (%rbx), %rdi; jmp *%rdi     or  jmp *8(%rax)              a closure     or  a structure  Pointer
//! jmp *G(%rip)                                                  an entry of the GOT            Slot
//! ```

use crate::patch_plan::instruction::{ends_flow, is_call};
use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

/// How many instructions before a jump are looked at.
pub(super) const WINDOW: usize = 16;

/// Where an indirect jump takes its target from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JumpSource {
    /// This address.
    Address(u64),
    /// A pointer that is in no table.
    Pointer,
    /// A pointer at a fixed place, such as an entry of the GOT: it leads to a function.
    Slot,
    /// A table of addresses.
    Absolute(Origin),
    /// A table of 32-bit offsets from a base.
    Relative {
        /// Where the table begins.
        table: Origin,
        /// What its offsets are added to.
        base: Origin,
    },
    /// A register that is set too far before the jump, or by `xchg` or an instruction that reads flags (`cmov`).
    Distant,
    /// A computation that is not understood.
    Computed,
}

/// Where an address in a register comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// It is this address.
    Address(u64),
    /// This register, which is set too far before the jump: by some `lea` of the function into it.
    Register(Register),
    /// Not known: it may be what any `lea` of the function yields, or an address among its other operands.
    Unknown,
}

impl JumpSource {
    /// Returns whether the jump may go through a table of offsets.
    pub(super) fn needs_offsets(&self) -> bool {
        matches!(
            self,
            JumpSource::Relative { .. } | JumpSource::Distant | JumpSource::Computed
        )
    }

    /// Returns in which pass the targets of the jump are found: later passes need tables that are read in earlier ones.
    pub(super) fn order(&self) -> usize {
        match self {
            JumpSource::Relative { .. } => 0,
            JumpSource::Absolute(_) => 1,
            _ => 2,
        }
    }

    /// Returns where the table of offsets begins, if that is known and the offsets count from there.
    pub(super) fn own_table(&self) -> Option<u64> {
        match *self {
            JumpSource::Relative {
                table: Origin::Address(table),
                base: Origin::Address(base),
            } => (table == base).then_some(table),
            _ => None,
        }
    }

    /// Returns the source of a jump; `before` are the instructions in memory before it.
    pub(super) fn of(before: &[Instruction], jump: &Instruction) -> JumpSource {
        let mut search = Search {
            before,
            factory: InstructionInfoFactory::new(),
        };
        if jump.op0_kind() == OpKind::Memory {
            return search.loaded(before.len(), jump);
        }
        search.register(before.len(), jump.op0_register().full_register())
    }
}

struct Search<'i> {
    before: &'i [Instruction],
    factory: InstructionInfoFactory,
}

impl Search<'_> {
    /// Returns the index of the last instruction before that with index `end` which writes a register. `None` if there
    /// is none, or a call that may change the register or an instruction that does not fall through is in between.
    fn writer(&mut self, end: usize, register: Register) -> Option<usize> {
        use Register::{R12, R13, R14, R15, RBP, RBX, RSP};
        let is_kept = matches!(register, RBX | RBP | RSP | R12 | R13 | R14 | R15);
        for (index, instruction) in self.before.iter().enumerate().take(end).rev() {
            if ends_flow(instruction) || is_call(instruction) && !is_kept {
                return None;
            }
            let used = self.factory.info(instruction).used_registers();
            let is_written = used.iter().any(|it| {
                let writes = matches!(
                    it.access(),
                    OpAccess::Write
                        | OpAccess::ReadWrite
                        | OpAccess::CondWrite
                        | OpAccess::ReadCondWrite
                );
                writes && it.register().full_register() == register
            });
            if is_written {
                return Some(index);
            }
        }
        None
    }

    /// Returns the source of a target that is in a register before the instruction with index `end`.
    fn register(&mut self, end: usize, register: Register) -> JumpSource {
        let Some(index) = self.writer(end, register) else {
            return JumpSource::Distant;
        };
        let it = self.before[index];
        match it.mnemonic() {
            Mnemonic::Mov if it.op1_kind() == OpKind::Memory => self.loaded(index, &it),
            Mnemonic::Mov if it.op1_kind() == OpKind::Register => {
                self.register(index, it.op1_register().full_register())
            }
            Mnemonic::Mov => JumpSource::Address(it.immediate(1)),
            Mnemonic::Lea if it.is_ip_rel_memory_operand() => {
                JumpSource::Address(it.ip_rel_memory_address())
            }
            Mnemonic::Lea => match (it.memory_base(), it.memory_index()) {
                (Register::None, Register::None) => JumpSource::Address(it.memory_displacement64()),
                (base, offset)
                    if it.memory_displacement64() == 0
                        && it.memory_index_scale() == 1
                        && base != Register::None =>
                {
                    self.sum(index, base.full_register(), offset.full_register())
                }
                _ => JumpSource::Computed,
            },
            Mnemonic::Add => match it.op1_kind() {
                OpKind::Register => self.sum(index, register, it.op1_register().full_register()),
                OpKind::Memory => JumpSource::Computed,
                _ => {
                    let table = self.table_of_offset(index, register);
                    let base = Origin::Address(it.immediate(1));
                    table.map_or(JumpSource::Computed, |table| JumpSource::Relative {
                        table,
                        base,
                    })
                }
            },
            // A return address; or one that glibc's setjmp has stored mangled, and longjmp demangles.
            Mnemonic::Pop | Mnemonic::Xor | Mnemonic::Ror | Mnemonic::Rol => JumpSource::Pointer,
            Mnemonic::Xchg => JumpSource::Distant,
            _ if it.rflags_read() != 0 => JumpSource::Distant,
            _ => JumpSource::Computed,
        }
    }

    /// Returns the source of a target that the instruction with index `end` loads from memory.
    fn loaded(&mut self, end: usize, load: &Instruction) -> JumpSource {
        if load.is_ip_rel_memory_operand() {
            return JumpSource::Slot;
        }
        let has_address = load.memory_displ_size() >= 4 && load.memory_displacement64() >> 16 != 0;
        let is_negative = (load.memory_displacement64() as i64) < 0;
        if has_address && !is_negative {
            return JumpSource::Absolute(Origin::Address(load.memory_displacement64()));
        }
        if load.memory_index() == Register::None {
            return JumpSource::Pointer;
        }
        let base = load.memory_base().full_register();
        JumpSource::Absolute(self.origin(end, base))
    }

    /// Returns the source of the sum of two registers: an offset from a table, and a base.
    fn sum(&mut self, end: usize, one: Register, other: Register) -> JumpSource {
        for (offset, base) in [(one, other), (other, one)] {
            if let Some(table) = self.table_of_offset(end, offset) {
                let base = self.origin(end, base);
                return JumpSource::Relative { table, base };
            }
        }
        let (table, base) = (Origin::Unknown, Origin::Unknown);
        JumpSource::Relative { table, base }
    }

    /// Returns the start of the table from which the offset in a register was loaded; `None` if it was not loaded from
    /// memory.
    fn table_of_offset(&mut self, end: usize, register: Register) -> Option<Origin> {
        let index = self.writer(end, register)?;
        let load = self.before[index];
        let loads = matches!(load.mnemonic(), Mnemonic::Movsxd | Mnemonic::Mov);
        if !loads || load.op1_kind() != OpKind::Memory {
            return None;
        }
        if load.is_ip_rel_memory_operand() {
            return Some(Origin::Address(load.ip_rel_memory_address()));
        }
        if load.memory_base() == Register::None {
            return Some(Origin::Address(load.memory_displacement64()));
        }
        Some(self.origin(index, load.memory_base().full_register()))
    }

    /// Returns where the address in a register before the instruction with index `end` comes from.
    fn origin(&mut self, end: usize, register: Register) -> Origin {
        if register == Register::None {
            return Origin::Unknown;
        }
        let Some(index) = self.writer(end, register) else {
            return Origin::Register(register);
        };
        let it = self.before[index];
        match it.mnemonic() {
            Mnemonic::Lea if it.is_ip_rel_memory_operand() => {
                Origin::Address(it.ip_rel_memory_address())
            }
            Mnemonic::Mov if it.op1_kind() == OpKind::Register => {
                self.origin(index, it.op1_register().full_register())
            }
            Mnemonic::Mov if it.op1_kind() != OpKind::Memory => Origin::Address(it.immediate(1)),
            _ => Origin::Unknown,
        }
    }
}
