//! The code that records each slow call in the ring, if slow calls are reported. At the entry, it keeps the arguments
//! in the slot of the stack; at an exit, if the call lasted long, it writes a record of the ring.

use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, eax, edi, edx, qword_ptr, r8, r9, rax, rbx, rcx, rdi, rdx, rsi,
};
use iced_x86::{IcedError, Register};

use super::super::at_point::PointContext;
use super::super::emit::word_at;
use super::super::record;
use super::super::stack_copy::StackCopy;
use super::last_call::{before, last_call, last_flags};
use super::{Calls, DEPTH_AT, is_on_fiber};
use crate::observe::layout::calls::call_slot;
use crate::observe::layout::shared::{SLOW_FROM, SharedLayout, record as layout_of};
use crate::observe::layout::stack_copies::{KEPT, StackCopies};
use crate::observe::role::{ArgumentSource, TimedRole, WatchRole};
use crate::observe::trampoline::emit::offset;
use crate::patch_plan::displaced::ExitKind;

/// Emits the code that keeps the arguments with the call in the slot; rcx has the address of the call. Uses rdi.
pub(super) fn keep(
    a: &mut CodeAssembler,
    reported: &WatchRole,
    context: PointContext,
) -> Result<(), IcedError> {
    for (index, source) in (0..).zip(&reported.arguments) {
        if let ArgumentSource::Register(register) = source {
            context.load(a, rdi, *register)?;
            a.mov(qword_ptr(rcx + (call_slot::ARGUMENTS + 8 * index)), rdi)?;
        }
    }
    Ok(())
}

/// What is recorded at an exit.
pub(super) struct ExitReport<'r> {
    pub(super) reported: &'r WatchRole,
    pub(super) kind: ExitKind,
    pub(super) context: PointContext,
}

impl ExitReport<'_> {
    /// Emits the code that records the call, if it was slow. Expects, and leaves, the address of the shared data in
    /// rbx, the slot in rcx, the depth in rdx, the call located by rax, and the time in r8; on a fiber, the owner in
    /// r9.
    pub(super) fn if_slow(
        self,
        a: &mut CodeAssembler,
        Calls {
            role,
            shared: (_, layout),
            are_filtered,
            ..
        }: Calls<'_>,
    ) -> Result<(), IcedError> {
        let calls = layout.calls;
        let mut over = a.create_label();
        if are_filtered {
            a.test(last_flags(calls), call_slot::IS_LEFT_OUT as i32)?;
            a.jne(over)?;
        }
        a.mov(rdi, r8)?;
        a.sub(rdi, last_call(calls, call_slot::TIME))?;
        // A negative time is taken for a long one here. For the reader it is zero, and so the call is left out.
        a.cmp(rdi, qword_ptr(rbx + offset(SLOW_FROM)))?;
        a.jb(over)?;
        a.mov(rdi, rdx)?;
        a.shl(rdi, DEPTH_AT)?;
        a.or(rdi, rcx)?;
        a.lea(rdx, qword_ptr(rcx + rax + before(calls, 0)))?;
        a.mov(r9, r8)?;
        a.mov(rsi, r8)?;
        let returns = match self.kind {
            ExitKind::Return => layout_of::RETURN,
            ExitKind::Jump => 0,
        };
        let point = self.reported.point | layout_of::SLOW | returns;
        let claimed = record::begin(a, point, role.is_from_start, layout)?;
        self.write_call(a, layout)?;
        if layout.stacks != StackCopies::None {
            self.copy_stack(a, role, layout)?;
        }
        claimed.end(a)?;

        a.mov(rcx, rdi)?;
        a.shl(rcx, 64 - DEPTH_AT)?;
        a.shr(rcx, 64 - DEPTH_AT)?;
        a.shr(rdi, DEPTH_AT)?;
        a.mov(edx, edi)?;
        a.mov(eax, edx)?;
        a.shl(eax, calls.call_len_bits())?;
        a.mov(r8, r9)?;
        if is_on_fiber(role) {
            a.mov(r9, last_call(calls, call_slot::CALL_OWNER))?;
        }
        a.set_label(&mut over)?;
        // A label needs an instruction.
        a.nop()
    }

    /// Emits the code that writes the call at rdx, with its arguments and result, into the record at rcx; the thread's id is in eax.
    fn write_call(&self, a: &mut CodeAssembler, layout: SharedLayout) -> Result<(), IcedError> {
        let start = u64::from(layout.kept_len);
        a.mov(dword_ptr(rcx + (start + layout_of::TID)), eax)?;
        a.mov(
            dword_ptr(rcx + (start + layout_of::POINT)),
            self.reported.point,
        )?;
        a.mov(rax, word_at(rdx, call_slot::TIME))?;
        a.mov(qword_ptr(rcx + (start + layout_of::TIME)), rax)?;
        a.mov(qword_ptr(rcx + (start + layout_of::COPIED)), 0)?;
        for index in 0..self.reported.arguments.len() as u64 {
            a.mov(rax, qword_ptr(rdx + (call_slot::ARGUMENTS + 8 * index)))?;
            let argument = start + layout.argument_at(index) + layout_of::VALUE;
            a.mov(qword_ptr(rcx + argument), rax)?;
        }
        a.mov(word_at(rcx, layout_of::COPIED), 0)?;
        self.context.load(a, rax, Register::RAX)?;
        a.mov(
            qword_ptr(rcx + (layout.argument_at(0) + layout_of::VALUE)),
            rax,
        )
    }

    /// Emits the code that copies the stack into the record at rcx. Leaves rdi and r9 as they are.
    fn copy_stack(
        &self,
        a: &mut CodeAssembler,
        role: &TimedRole,
        layout: SharedLayout,
    ) -> Result<(), IcedError> {
        let kept = |at: u64| qword_ptr(rcx + offset(layout.stack_at() + KEPT + at));
        a.mov(kept(0), rdi)?;
        a.mov(kept(8), r9)?;
        let copy = StackCopy {
            context: self.context,
            is_ocaml: role.is_ocaml,
            is_from_start: role.is_from_start,
        };
        copy.emit(a)?;
        a.mov(rdi, kept(0))?;
        a.mov(r9, kept(8))
    }
}
