//! The code that counts a call of a function, and its time, for its caller: the place that the call returns to.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, edi, edx, qword_ptr, r8, rax, rbx, rcx, rdi, rdx, rsi, rsp,
};

use super::emit::{offset, spread_of, word_at};
use crate::observe::layout::calls::caller;
use crate::observe::layout::shared::SharedLayout;

/// Emits the code that counts the call that ends. Its time is in r8; if that is a self time, the time from entry to
/// exit is in rsi. Its return address is at the top of the stack, the address of the shared data in rbx. The code uses
/// rax, rcx, rdx and rdi.
pub(super) fn add(
    a: &mut CodeAssembler,
    shared: SharedLayout,
    function: u32,
) -> Result<(), IcedError> {
    let at = |offset_in_calls| offset(shared.calls() + offset_in_calls);
    let mut next = a.create_label();
    let mut is_taken = a.create_label();
    let mut other = a.create_label();
    let mut found = a.create_label();
    let mut is_longer = a.create_label();
    let mut is_shorter = a.create_label();
    a.mov(rdi, qword_ptr(rsp))?;
    a.mov(rax, rdi)?;
    a.shr(rax, caller::FUNCTION_AT)?;
    a.jne(other)?;
    spread_of(a, edx, edi, caller::COUNT_BITS)?;
    a.shl(edx, caller::LEN_BITS)?;
    a.lea(rcx, qword_ptr(rbx + rdx + at(shared.calls.callers())))?;
    a.mov(rax, u64::from(function + 1) << caller::FUNCTION_AT)?;
    a.or(rdi, rax)?;
    a.mov(edx, caller::TRIED as u32)?;
    a.set_label(&mut next)?;
    a.mov(rax, word_at(rcx, caller::KEY))?;
    a.cmp(rax, rdi)?;
    a.je(found)?;
    a.test(rax, rax)?;
    a.jne(is_taken)?;
    a.lock().cmpxchg(word_at(rcx, caller::KEY), rdi)?;
    a.je(found)?;
    // Another thread was faster.
    a.cmp(rax, rdi)?;
    a.je(found)?;
    a.set_label(&mut is_taken)?;
    a.add(rcx, caller::LEN as i32)?;
    a.dec(edx)?;
    a.jne(next)?;
    a.set_label(&mut other)?;
    let others = shared.calls.other_callers(function);
    a.lea(rcx, qword_ptr(rbx + at(others)))?;
    a.set_label(&mut found)?;
    a.lock().inc(word_at(rcx, caller::CALLS))?;
    a.lock().add(word_at(rcx, caller::SUM), r8)?;
    if shared.calls.of_self {
        a.lock().add(word_at(rcx, caller::ALL), rsi)?;
    }
    a.set_label(&mut is_longer)?;
    a.mov(rax, word_at(rcx, caller::MAX))?;
    a.cmp(rax, r8)?;
    a.jae(is_shorter)?;
    a.lock().cmpxchg(word_at(rcx, caller::MAX), r8)?;
    a.jne(is_longer)?;
    a.set_label(&mut is_shorter)?;
    // A label needs an instruction.
    a.nop()
}
