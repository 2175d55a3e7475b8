//! The record of the last call of a stack: where it is, and how it is dropped.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmMemoryOperand, CodeAssembler, CodeLabel, dword_ptr, eax, edi, edx, qword_ptr, rax, rbx, rcx,
    rdi, rdx,
};

use super::super::emit::{offset, word_at};
use super::Calls;
use crate::observe::layout::calls::{CallsLayout, call_slot, function_data};
use crate::observe::layout::shared::SharedLayout;

/// Emits the code that puts in rdx how many calls have not ended on the stack at rcx, and in rax what locates the last
/// one; goes to `none` if there is none.
pub(super) fn locate_last(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    none: CodeLabel,
) -> Result<(), IcedError> {
    a.mov(rdx, word_at(rcx, call_slot::DEPTH))?;
    a.test(rdx, rdx)?;
    a.je(none)?;
    a.mov(eax, edx)?;
    a.shl(eax, layout.call_len_bits())
}

/// Returns a field of the call that is located.
pub(super) fn last_call(layout: CallsLayout, field: u64) -> AsmMemoryOperand {
    qword_ptr(rcx + rax + before(layout, field))
}

/// Returns the flags of the call that is located.
pub(super) fn last_flags(layout: CallsLayout) -> AsmMemoryOperand {
    dword_ptr(rcx + rax + before(layout, call_slot::FLAGS))
}

/// Returns the displacement of a field of a call from the slot's address plus the length of all calls up to that one.
pub(super) fn before(layout: CallsLayout, field: u64) -> i32 {
    (call_slot::CALLS + field) as i32 - (1 << layout.call_len_bits())
}

/// Emits the code that makes the record of the last call, which is located, incomplete. Until it is freed, no signal
/// handler's call overwrites it.
pub(super) fn clear(a: &mut CodeAssembler, layout: CallsLayout) -> Result<(), IcedError> {
    a.mov(last_call(layout, call_slot::FRAME), 0)
}

/// Emits the code that frees the record of the last call, which was cleared: it decrements the depth, which is in rdx.
/// It clears ZF if the depth has changed meanwhile: a signal handler on a stack at higher addresses, to which the
/// calls of this stack look like inner ones, has taken them for unwound, and freed their records. The code uses rax.
pub(super) fn free(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, rdx)?;
    a.dec(edx)?;
    a.cmpxchg(word_at(rcx, call_slot::DEPTH), rdx)
}

/// Emits the code that drops the last call, which is located, counts it as lost, and goes to `again`: it is one of
/// another fiber, which had the slot before. Of an incomplete one, the function is not known.
pub(super) fn drop_others(
    a: &mut CodeAssembler,
    calls: Calls<'_>,
    again: CodeLabel,
) -> Result<(), IcedError> {
    let layout = calls.shared.1.calls;
    let mut counted = a.create_label();
    a.cmp(last_call(layout, call_slot::FRAME), 0)?;
    // Leaves the flags as they are.
    clear(a, layout)?;
    a.je(counted)?;
    count_last(a, calls.shared.1, calls.are_filtered, function_data::LOST)?;
    a.set_label(&mut counted)?;
    free(a)?;
    a.jmp(again)
}

/// Emits the code that counts the call that is located, unless it is left out. `are_filtered`: whether some calls are.
/// Expects the address of the shared data in rbx; uses rdi.
pub(super) fn count_last(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    are_filtered: bool,
    what: u64,
) -> Result<(), IcedError> {
    let mut over = a.create_label();
    if are_filtered {
        let flags = last_flags(layout.calls);
        a.test(flags, call_slot::IS_LEFT_OUT as i32)?;
        a.jne(over)?;
    }
    a.mov(rdi, last_call(layout.calls, call_slot::FUNCTION))?;
    a.shl(edi, function_data::LEN_BITS)?;
    let field = offset(layout.calls() + what);
    a.lock().inc(qword_ptr(rbx + rdi + field))?;
    if are_filtered {
        a.set_label(&mut over)?;
        a.nop()?;
    }
    Ok(())
}
