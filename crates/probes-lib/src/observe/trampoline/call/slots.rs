//! Finds the slot that has the calls of a stack, or takes one.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, al, ebx, edi, edx, qword_ptr, r9, r14, rax, rbx, rcx, rdi, rdx, rsi,
    rsp,
};

use super::super::emit::{load, offset, spread, time, word_at};
use super::super::stack_info::{FIBER, UPPER_END};
use crate::address::LiveAddr;
use crate::observe::layout::calls::{CallsLayout, call_slot};
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::{StackKind, TimedRole};

/// If no slot is free, that of a fiber is abandoned, and may be taken, once its outermost call is 2 to this power of
/// ticks old, about a second: the fiber may never go on.
const ABANDONED_BITS: u32 = 32;

/// Emits the code that loads the owner of the stack into rdi (and, if that is a fiber, into r9), the frame into rsi,
/// and the address of the slot that is tried first into rcx. It sets ZF if that slot is the owner's. Goes to `without`
/// if the thread has no control block yet.
pub(super) fn find_slot(
    a: &mut CodeAssembler,
    role: &TimedRole,
    shared: (LiveAddr, SharedLayout),
    without: CodeLabel,
) -> Result<(), IcedError> {
    a.mov(rsi, rsp)?;
    match role.stack {
        StackKind::OfThread if role.is_from_start => {
            // Slower than reading the block's address from the block itself (`fs:0`), which may not be there yet.
            a.rdfsbase(rdi)?;
            a.test(rdi, rdi)?;
            a.je(without)?;
        }
        StackKind::OfThread => a.mov(rdi, qword_ptr(0).fs())?,
        StackKind::OfFiber { current_stack } => {
            a.mov(rcx, qword_ptr(r14 + u32::from(current_stack)))?;
            a.mov(rdi, word_at(rcx, FIBER))?;
            a.lea(rdi, qword_ptr(rdi + rdi + 1))?;
            a.mov(r9, rdi)?;
            a.sub(rsi, word_at(rcx, UPPER_END))?;
        }
    }
    first_slot(a, shared.1)
}

/// Emits the code that loads the address of the slot that is tried first for the owner in rdi into rcx, and sets ZF if
/// it is the owner's. Expects the address of the shared data in rbx.
pub(super) fn first_slot(a: &mut CodeAssembler, layout: SharedLayout) -> Result<(), IcedError> {
    a.mov(edx, edi)?;
    spread(a, edx, call_slot::COUNT_BITS)?;
    a.shl(edx, layout.calls.slot_len_bits())?;
    let stacks = layout.calls() + layout.calls.slots();
    a.lea(rcx, qword_ptr(rbx + rdx + offset(stacks)))?;
    a.cmp(word_at(rcx, call_slot::OWNER), rdi)
}

/// Emits the code that searches the slots after that at rcx for the owner in rdi. If it has one, the code jumps to
/// `found` with the slot's address in rcx.
pub(super) fn find_other_slot(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    found: CodeLabel,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    a.mov(edx, call_slot::TRIED as u32 - 1)?;
    a.set_label(&mut next)?;
    a.add(rcx, layout.slot_len() as i32)?;
    a.cmp(word_at(rcx, call_slot::OWNER), rdi)?;
    a.je(found)?;
    a.dec(edx)?;
    a.jne(next)
}

/// Emits the code that loads the address of a slot for the owner in rdi into rcx, searching from rcx on: its own; else
/// a free one; else the last one tried, if it is abandoned. It jumps to `lost` if there is none, and to `retry` if the
/// slot has changed hands meanwhile.
pub(super) fn take_slot(
    a: &mut CodeAssembler,
    shared: (LiveAddr, SharedLayout),
    retry: CodeLabel,
    lost: CodeLabel,
) -> Result<(), IcedError> {
    let stack_len = shared.1.calls.slot_len() as i32;
    let mut next = a.create_label();
    let mut is_free = a.create_label();
    let mut is_taken = a.create_label();
    let mut has_one = a.create_label();
    let mut take = a.create_label();
    let mut replace = a.create_label();
    let mut over = a.create_label();
    a.xor(ebx, ebx)?;
    a.mov(edx, call_slot::TRIED as u32)?;
    a.set_label(&mut next)?;
    a.mov(rax, word_at(rcx, call_slot::OWNER))?;
    a.cmp(rax, rdi)?;
    a.je(has_one)?;
    a.test(rbx, rbx)?;
    a.jne(is_taken)?;
    a.test(rax, rax)?;
    a.je(is_free)?;
    // The slot of a fiber is free while it has no calls: the fiber may have ended.
    a.test(al, 1)?;
    a.je(is_taken)?;
    a.cmp(word_at(rcx, call_slot::DEPTH), 0)?;
    a.jne(is_taken)?;
    a.set_label(&mut is_free)?;
    a.mov(rbx, rcx)?;
    a.set_label(&mut is_taken)?;
    a.add(rcx, stack_len)?;
    a.dec(edx)?;
    a.jne(next)?;
    a.sub(rcx, stack_len)?;
    a.test(rbx, rbx)?;
    a.cmovne(rcx, rbx)?;
    load(a, rbx, shared.0)?;
    a.jne(take)?;
    // None is free: the last one tried, if it is a fiber's and its outermost call began more than about a second ago.
    time(a, rdx)?;
    a.sub(rdx, qword_ptr(rcx + (call_slot::CALLS + call_slot::TIME)))?;
    // The call began after the time was read, or on a processor whose clock is ahead.
    a.jc(lost)?;
    a.shr(rdx, ABANDONED_BITS)?;
    a.je(lost)?;
    // Read once: the fiber may end meanwhile (call/freed_stack.rs).
    a.mov(rax, word_at(rcx, call_slot::OWNER))?;
    a.test(al, 1)?;
    a.je(lost)?;
    a.jmp(replace)?;
    a.set_label(&mut take)?;
    // Another thread may have taken it meanwhile.
    a.mov(rax, word_at(rcx, call_slot::OWNER))?;
    a.test(rax, rax)?;
    a.je(replace)?;
    a.test(al, 1)?;
    a.je(retry)?;
    a.cmp(word_at(rcx, call_slot::DEPTH), 0)?;
    a.jne(retry)?;
    a.set_label(&mut replace)?;
    // Marked first: a signal handler that interrupts this and jumps away leaves no slot that the reader does not see.
    let (layout, calls) = (shared.1, shared.1.calls);
    a.mov(rdx, rcx)?;
    a.sub(rdx, rbx)?;
    a.sub(rdx, offset(layout.calls() + calls.slots()))?;
    a.shr(rdx, calls.slot_len_bits() + call_slot::SLOTS_OF_BIT)?;
    let taken = qword_ptr(rbx + offset(layout.calls() + calls.taken()));
    a.lock().bts(taken, rdx)?;
    a.lock().cmpxchg(word_at(rcx, call_slot::OWNER), rdi)?;
    a.jne(retry)?;
    a.jmp(over)?;
    a.set_label(&mut has_one)?;
    load(a, rbx, shared.0)?;
    a.set_label(&mut over)?;
    a.nop()
}
