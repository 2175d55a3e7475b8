//! The code at the entry of `caml_free_stack`, by which the runtime of OCaml 5 frees the stack of a fiber that has ended.
//! The calls that are left on it were unwound: an exception has ended the fiber, or its thread or domain has ended.
//!
//! ```text
//! unless the caller is the code that moves a stack that grows: the fiber goes on, on another stack
//!     if the fiber has a slot with calls, make the slot one of no fiber
//!     count each of the calls as unwound
//!     free the slot
//! ```
//!
//! Another fiber may take over the slot at the same time, because its calls are old (call/slots.rs). Only one of the two
//! changes the owner of the slot, and then the calls in it.

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, eax, edx, qword_ptr, r9, rax, rbx, rcx, rdi, rdx, rsp};
use iced_x86::{Code, Instruction, Register};

use super::super::SAVED_IF_TIMED;
use super::super::emit::{at_address, load, word_at};
use super::super::function_record::RecordPointers;
use super::super::saved::{RegisterSaver, SaveArea};
use super::super::stack_info::FIBER;
use super::last_call::{clear, count_last, last_call, locate_last};
use super::slots::{find_other_slot, first_slot};
use crate::address::LiveAddr;
use crate::observe::layout::calls::{call_slot, function_data};
use crate::observe::role::FreedStackRole;

/// Returns the code at `at`. `mmx_is_free`: the function uses neither the MMX registers nor the x87 unit.
/// `are_in_range`: only calls whose time is in a range are recorded.
pub(in super::super) fn code(
    at: LiveAddr,
    role: FreedStackRole,
    mmx_is_free: bool,
    are_in_range: bool,
    pointers: RecordPointers,
) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let place = if mmx_is_free {
        SaveArea::StackOrMmx
    } else {
        SaveArea::StackOrLock
    };
    let mut saver = RegisterSaver::new(&mut a, place, SAVED_IF_TIMED.len(), pointers.saved);
    if role.is_from_start {
        // A forked child shares the data with its parent.
        let in_program = at_address(pointers.in_program);
        a.add_instruction(Instruction::with2(Code::Cmp_rm8_imm8, in_program, 0)?)?;
        a.je(saver.end())?;
    }
    saver.save(&mut a)?;
    let mut over = a.create_label();
    let (start, len) = role.moves_stacks;
    a.mov(rax, qword_ptr(rsp))?;
    a.mov(rcx, start.0)?;
    a.sub(rax, rcx)?;
    a.cmp(rax, i32::try_from(len).unwrap_or(i32::MAX))?;
    // The return address is at the end of the code if the call is its last instruction.
    a.jbe(over)?;
    let context = saver.context(pointers.shared, pointers.layout);
    context.load(&mut a, rdi, Register::RDI)?;
    a.mov(rdi, word_at(rdi, FIBER))?;
    a.lea(rdi, qword_ptr(rdi + rdi + 1))?;
    load(&mut a, rbx, pointers.shared)?;
    let layout = pointers.layout;
    let are_filtered = role.are_filtered || are_in_range;
    let mut found = a.create_label();
    first_slot(&mut a, layout)?;
    a.je(found)?;
    find_other_slot(&mut a, layout.calls, found)?;
    a.jmp(over)?;

    a.set_label(&mut found)?;
    a.cmp(word_at(rcx, call_slot::DEPTH), 0)?;
    a.je(over)?;
    a.mov(rax, rdi)?;
    a.mov(edx, call_slot::OF_NONE as u32)?;
    a.lock().cmpxchg(word_at(rcx, call_slot::OWNER), rdx)?;
    a.jne(over)?;
    a.mov(r9, rdi)?;
    let (mut again, mut none) = (a.create_label(), a.create_label());
    let (mut of_others, mut counted) = (a.create_label(), a.create_label());
    a.set_label(&mut again)?;
    locate_last(&mut a, layout.calls, none)?;
    a.cmp(last_call(layout.calls, call_slot::FRAME), 0)?;
    // Leaves the flags as they are.
    clear(&mut a, layout.calls)?;
    a.je(counted)?;
    a.cmp(last_call(layout.calls, call_slot::CALL_OWNER), r9)?;
    a.jne(of_others)?;
    count_last(&mut a, layout, are_filtered, function_data::UNWOUND)?;
    a.jmp(counted)?;
    // They were there when the fiber took the slot over.
    a.set_label(&mut of_others)?;
    count_last(&mut a, layout, are_filtered, function_data::LOST)?;
    a.set_label(&mut counted)?;
    a.dec(rdx)?;
    a.mov(word_at(rcx, call_slot::DEPTH), rdx)?;
    a.jmp(again)?;

    a.set_label(&mut none)?;
    a.xor(eax, eax)?;
    a.mov(word_at(rcx, call_slot::OWNER), rax)?;
    a.set_label(&mut over)?;
    saver.restore(&mut a)?;
    a.assemble(at.0)
}
