//! [`PointContext`]: what the code of a trampoline needs to know to read what the program had at a point: saved
//! registers, and operands in memory.

use iced_x86::code_asm::{
    AsmRegister32, AsmRegister64, CodeAssembler, CodeLabel, byte_ptr, dword_ptr, edi, edx,
    get_gpr32, get_gpr64, qword_ptr, r9, rax, rbx, rdx, rsp, word_ptr,
};
use iced_x86::{IcedError, Register};

use super::SavedRegister;
use super::emit::load;
use super::readable::{unless_kernel_reads, unless_listed};
use super::stack_room::{RED_ZONE, unless_room_on_stack};
use crate::address::LiveAddr;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::{MemorySource, STACK_OFFSET_LIMIT};

/// Where registers are saved.
#[derive(Clone, Copy, Debug)]
pub(super) enum RegisterPlace {
    /// In their copies.
    Copies,
    /// At an address, one after the other.
    Address(LiveAddr),
    /// Below the stack pointer if there is room, or else in their copies.
    StackOrCopies,
    /// Below the stack pointer if there is room, or else at an address.
    StackOrAddress(LiveAddr),
    /// On the stack, one after the other from the stack pointer on.
    Pushed,
}

/// What code needs to know to read what the program had at a point.
#[derive(Clone, Copy, Debug)]
pub(super) struct PointContext {
    /// The registers that are saved; the code changes no others.
    pub(super) saved: &'static [SavedRegister],
    pub(super) saved_at: RegisterPlace,
    /// How many bytes the trampoline has on the stack below what is there at the point: its return address, or nothing.
    pub(super) pushed: u64,
    /// Where the address of the shared data is stored.
    pub(super) shared: LiveAddr,
    pub(super) layout: SharedLayout,
}

impl PointContext {
    /// Emits the code that loads what a register held at the point.
    pub(super) fn load(
        self,
        a: &mut CodeAssembler,
        to: AsmRegister64,
        register: Register,
    ) -> Result<(), IcedError> {
        if register == Register::RSP {
            return a.lea(to, qword_ptr(rsp + self.pushed));
        }
        let is_it = |(saved, _): &SavedRegister| Register::from(*saved) == register;
        let Some(place) = self.saved.iter().position(is_it) else {
            return a.mov(to, get_gpr64(register).unwrap_or(to));
        };
        let load_saved = |a: &mut CodeAssembler| match self.saved_at {
            RegisterPlace::Copies | RegisterPlace::StackOrCopies => a.movq(to, self.saved[place].1),
            RegisterPlace::Address(at) | RegisterPlace::StackOrAddress(at) => {
                load(a, to, at.plus(8 * place as u64))
            }
            RegisterPlace::Pushed => a.mov(to, qword_ptr(rsp + 8 * place as u64)),
        };
        let (RegisterPlace::StackOrCopies | RegisterPlace::StackOrAddress(_)) = self.saved_at
        else {
            return load_saved(a);
        };
        let (mut elsewhere, mut known) = (a.create_label(), a.create_label());
        unless_room_on_stack(a, elsewhere)?;
        let depth = self.saved.len() - place;
        a.mov(to, qword_ptr(rsp - 8 * depth as i32))?;
        a.jmp(known)?;
        a.set_label(&mut elsewhere)?;
        load_saved(a)?;
        a.set_label(&mut known)?;
        // A label needs an instruction.
        a.nop()
    }

    /// Emits the code that loads an operand in memory, which can be read. Uses r9.
    pub(super) fn operand(
        self,
        a: &mut CodeAssembler,
        to: AsmRegister64,
        memory: MemorySource,
    ) -> Result<(), IcedError> {
        self.operand_address(a, to, memory)?;
        let low = low(to);
        match memory.size {
            1 => a.movzx(low, byte_ptr(to)),
            2 => a.movzx(low, word_ptr(to)),
            4 => a.mov(low, dword_ptr(to)),
            _ => a.mov(to, qword_ptr(to)),
        }
    }

    /// Emits the code that loads the address of an operand in memory. Uses r9.
    pub(super) fn operand_address(
        self,
        a: &mut CodeAssembler,
        to: AsmRegister64,
        memory: MemorySource,
    ) -> Result<(), IcedError> {
        match memory.base {
            Some(base) => {
                self.load(a, to, base)?;
                a.add(to, memory.displacement as i32)?;
            }
            None => a.mov(to, memory.displacement)?,
        }
        if let Some((index, scale)) = memory.index {
            self.load(a, r9, index)?;
            a.lea(to, qword_ptr(to + r9 * u32::from(scale)))?;
        }
        Ok(())
    }

    /// Emits a jump to `otherwise` unless an operand in memory can be read: the table of pages, which has to be valid,
    /// and the kernel both say so. If it is in the frame of the point, one of them is enough, and the table need not be
    /// valid: the frame is mapped, and no table has the stacks of the youngest threads yet.
    ///
    /// `unless_valid` emits a jump to `otherwise` unless the table is valid, and may use rax, rdx, rdi and r9. The code
    /// expects the address of the shared data in rbx, or 0 if the table is not valid, and a multiple of 8 in rcx; it
    /// uses rax, rdx, rsi, rdi and r9.
    pub(super) fn unless_operand_readable(
        self,
        a: &mut CodeAssembler,
        memory: MemorySource,
        unless_valid: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>,
        otherwise: CodeLabel,
    ) -> Result<(), IcedError> {
        if memory.is_static() {
            return Ok(());
        }
        let layout = self.layout;
        let last = i32::from(memory.size) - 1;
        let (mut ask, mut over) = (a.create_label(), a.create_label());
        let unless_far_readable = |a: &mut CodeAssembler| {
            unless_valid(a)?;
            self.operand_address(a, rdx, memory)?;
            unless_listed(a, layout, rdx, 0, otherwise)?;
            unless_listed(a, layout, rdx, last, otherwise)
        };
        if memory.is_near_stack() {
            let (mut unlisted, mut is_far) = (a.create_label(), a.create_label());
            self.operand_address(a, rdx, memory)?;
            if !memory.is_in_frame() {
                a.lea(rax, qword_ptr(rsp - RED_ZONE))?;
                a.mov(r9, rdx)?;
                a.sub(r9, rax)?;
                a.cmp(r9, STACK_OFFSET_LIMIT)?;
                a.jae(is_far)?;
            }
            a.test(rbx, rbx)?;
            a.je(unlisted)?;
            unless_listed(a, layout, rdx, 0, unlisted)?;
            unless_listed(a, layout, rdx, last, unlisted)?;
            a.jmp(over)?;
            if !memory.is_in_frame() {
                a.set_label(&mut is_far)?;
                a.nop()?;
                unless_far_readable(a)?;
                a.jmp(ask)?;
            }
            a.set_label(&mut unlisted)?;
            a.nop()?;
            // A live observer is needed: it may withdraw the permission to ask the kernel.
            unless_valid(a)?;
            a.set_label(&mut ask)?;
        } else {
            unless_far_readable(a)?;
        }
        self.unless_kernel_reads(a, memory, over, otherwise)?;
        a.set_label(&mut over)?;
        a.nop()
    }

    /// Emits a jump to `otherwise` unless the kernel may be asked, and reads an operand in memory; and one to `over` if
    /// it can. Expects and uses the same as [`PointContext::unless_operand_readable`].
    fn unless_kernel_reads(
        self,
        a: &mut CodeAssembler,
        memory: MemorySource,
        over: CodeLabel,
        otherwise: CodeLabel,
    ) -> Result<(), IcedError> {
        let PointContext { layout, shared, .. } = self;
        let last = i32::from(memory.size) - 1;
        self.operand_address(a, rdx, memory)?;
        a.and(rdx, -8)?;
        unless_kernel_reads(a, 0, layout, shared, otherwise)?;
        if last == 0 {
            return Ok(());
        }
        self.operand_address(a, rdx, memory)?;
        a.lea(rax, qword_ptr(rdx + last))?;
        a.xor(rdx, rax)?;
        a.test(edx, -8)?;
        a.je(over)?;
        a.mov(rdx, rax)?;
        a.and(rdx, -8)?;
        unless_kernel_reads(a, 0, layout, shared, otherwise)
    }
}

/// Returns the low half of a general register.
pub(super) fn low(register: AsmRegister64) -> AsmRegister32 {
    let low = Register::from(register).full_register32();
    get_gpr32(low).unwrap_or(edi)
}
