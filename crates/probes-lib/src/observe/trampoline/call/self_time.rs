//! Self times: the time of a call without that of the calls that it makes.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, eax, ebx, edi, edx, esi, qword_ptr, r8, r9, r9d, rbx, rcx, rdi, rsi,
};

use super::super::emit::load;
use super::last_call::{clear, free, last_call, last_flags};
use super::{Calls, DEPTH_AT, add_time, count, is_on_fiber};
use crate::address::LiveAddr;
use crate::observe::layout::calls::{CallsLayout, call_slot, function_data};
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::TimedRole;

/// Emits the code that ends the last call, which is located, at the time in r8, and adds its self time.
pub(super) fn add_self_time(a: &mut CodeAssembler, calls: Calls<'_>) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut left_out = a.create_label();
    let mut counted = a.create_label();
    if calls.are_filtered {
        a.test(last_flags(layout), call_slot::IS_LEFT_OUT as i32)?;
        a.jne(left_out)?;
    }
    end_of_self(a, calls, true)?;
    add_time(a, role, shared)?;
    if calls.are_filtered {
        a.jmp(counted)?;
        a.set_label(&mut left_out)?;
        end_of_self(a, calls, false)?;
        a.set_label(&mut counted)?;
    }
    a.mov(rcx, r9)?;
    a.shl(rcx, 64 - DEPTH_AT)?;
    a.shr(rcx, 64 - DEPTH_AT)?;
    a.shr(r9, DEPTH_AT)?;
    a.mov(edx, r9d)?;
    free(a)
}

/// Emits the code that ends the last call, which is located, at the time in r8, and adds its duration to the children
/// of its parent. Puts the duration in rsi, the self time in r8, and the address of the slot in r9, with the depth
/// from bit [`DEPTH_AT`] on. The caller frees the record once it has counted the times. Until then the record is
/// incomplete: if a signal handler interrupts this code and never returns, the incomplete record shows that the times
/// may be missing. With `is_doubted`, a self time that may be wrong is counted as doubtful.
fn end_of_self(a: &mut CodeAssembler, calls: Calls<'_>, is_doubted: bool) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut is_positive = a.create_label();
    let mut is_enough = a.create_label();
    let mut is_doubtful = a.create_label();
    let mut is_certain = a.create_label();
    let mut no_parent = a.create_label();
    // When it began.
    a.mov(rdi, last_call(layout, call_slot::TIME))?;
    a.cmp(rdi, last_call(layout, call_slot::NOT_BEFORE))?;
    a.cmovb(rdi, last_call(layout, call_slot::NOT_BEFORE))?;
    // From here on, calls made by a signal handler are children of the parent.
    clear(a, layout)?;
    // Calls that a signal handler has made since the time in r8 was read are children of this one: it ends after them.
    a.mov(rsi, last_call(layout, call_slot::CHILD_ENDED))?;
    a.cmp(r8, rsi)?;
    a.cmovb(r8, rsi)?;
    a.mov(rsi, r8)?;
    a.sub(rsi, rdi)?;
    a.jnc(is_positive)?;
    a.xor(esi, esi)?;
    a.set_label(&mut is_positive)?;
    a.mov(rdi, rsi)?;
    a.sub(rdi, last_call(layout, call_slot::CHILDREN))?;
    a.jnc(is_enough)?;
    a.xor(edi, edi)?;
    a.jmp(is_doubtful)?;
    a.set_label(&mut is_enough)?;
    a.test(last_flags(layout), call_slot::IS_DOUBTFUL as i32)?;
    a.je(is_certain)?;
    a.set_label(&mut is_doubtful)?;
    if is_doubted {
        count(a, role, shared, function_data::DOUBTFUL)?;
    }
    // An instruction can have only one label. Without `is_doubted`, two would meet here.
    a.nop()?;
    a.set_label(&mut is_certain)?;
    a.mov(ebx, edx)?;
    a.dec(edx)?;
    let begin_later = |a: &mut CodeAssembler| set_if_later(a, layout, call_slot::NOT_BEFORE);
    locate_parent(a, layout, role, no_parent, begin_later)?;
    a.add(last_call(layout, call_slot::CHILDREN), rsi)?;
    set_if_later(a, layout, call_slot::CHILD_ENDED)?;
    a.set_label(&mut no_parent)?;
    a.shl(rbx, DEPTH_AT)?;
    a.lea(r9, qword_ptr(rbx + rcx))?;
    load(a, rbx, shared.0)?;
    a.mov(r8, rdi)
}

/// Emits the code that sets a field of the call that is located to the time in r8, unless it holds a later one: a
/// signal handler that interrupted this code may have set it.
fn set_if_later(a: &mut CodeAssembler, layout: CallsLayout, field: u64) -> Result<(), IcedError> {
    let mut is_later = a.create_label();
    a.cmp(last_call(layout, field), r8)?;
    a.jae(is_later)?;
    a.mov(last_call(layout, field), r8)?;
    a.set_label(&mut is_later)?;
    a.nop()
}

/// Emits the code that locates the last complete call among the first edx calls of the stack. Goes to `none` if there
/// is none, or if it is a call of another fiber. Executes the code of `note` for each incomplete call that it passes.
fn locate_parent(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    role: &TimedRole,
    none: CodeLabel,
    note: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let mut found = a.create_label();
    a.set_label(&mut next)?;
    a.mov(eax, edx)?;
    a.shl(eax, layout.call_len_bits())?;
    a.je(none)?;
    a.cmp(last_call(layout, call_slot::FRAME), 0)?;
    a.jne(found)?;
    note(a)?;
    a.dec(edx)?;
    a.jmp(next)?;
    a.set_label(&mut found)?;
    if is_on_fiber(role) {
        a.cmp(last_call(layout, call_slot::CALL_OWNER), r9)?;
        a.jne(none)?;
        return Ok(());
    }
    a.nop()
}

/// Emits the code of [`doubt_parent`] for the last call. Leaves the depth in rdx, and the shared data's address in
/// rbx.
pub(super) fn doubt_parent_of_last(
    a: &mut CodeAssembler,
    role: &TimedRole,
    shared: (LiveAddr, SharedLayout),
) -> Result<(), IcedError> {
    a.mov(ebx, edx)?;
    a.dec(edx)?;
    doubt_parent(a, shared.1.calls, role)?;
    a.mov(edx, ebx)?;
    load(a, rbx, shared.0)
}

/// Emits the code that marks the parent of a call as doubtful, because the time of that call is not known. edx is the
/// number of calls before it; rdi is the time of its children, which is added to the children of the parent.
/// Incomplete calls between the two are marked as well: it is not known whether they had begun.
pub(super) fn doubt_parent(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    role: &TimedRole,
) -> Result<(), IcedError> {
    let mut none = a.create_label();
    let doubt = |a: &mut CodeAssembler| a.or(last_flags(layout), call_slot::IS_DOUBTFUL as i32);
    locate_parent(a, layout, role, none, doubt)?;
    a.add(last_call(layout, call_slot::CHILDREN), rdi)?;
    doubt(a)?;
    a.set_label(&mut none)?;
    a.nop()
}
