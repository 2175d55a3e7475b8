//! The part of the code at the ends of a pair that notices that a stop belongs to another start than the last one.
//!
//! Three things show it, and one raises doubts. Each is counted in the slot; `read/latency.rs` draws the conclusions.
//!
//! ```text
//! frame    start A   start B   stop   stop     Where pairs nest, B is in a function that was called after A: in
//!                                              another frame. If it is in the same frame, and A gets a stop, too,
//!                                              the stops may be those of A and B.
//!          start A   start B   stop             If the stop is in the frame of A, and that is no caller of the frame
//!                                              of B, it is the stop of A: B is on another stack.
//! number   start 1   start 2   stop 1          The first arguments are numbers, or of a USDT probe of C integers or
//!                                              pointers: that of the stop is not that of the start that it would end,
//!                                              but that of an earlier one.
//! name     start 1   stop 2                    If the numbers have one name at both ends, it is enough that they
//!                                              differ: start 2 may have been in another thread.
//! doubt    start A   start B   stop            A waits in the frame of B, or in that of the stop, and no numbers tell
//!                                              which of them has ended. If A never does, an exception may have
//!                                              skipped its stop.
//! ```
//!
//! A start that an exception has left without a stop shows nothing: no stop ends it.

use iced_x86::code_asm::{
    AsmMemoryOperand, AsmRegister32, CodeAssembler, CodeLabel, dil, dword_ptr, edi, edx, esp,
    qword_ptr, r8, r8b, r8d, r9, r9d, rax, rcx, rdi, rdx, rsp,
};
use iced_x86::{IcedError, Register};

use super::super::at_point::PointContext;
use super::super::emit::word_at;
use super::locate_start;
use crate::observe::frame_id::FrameId;
use crate::observe::layout::pair_slots::slot;
use crate::observe::role::Marks;

/// Emits the code that marks the start that is located by rdx in the slot at rcx. The code uses rdi, r8 and r9.
pub(super) fn mark_start(
    a: &mut CodeAssembler,
    marks: &Marks,
    context: PointContext,
) -> Result<(), IcedError> {
    let frame = frame(a, marks.frame, context)?;
    a.mov(dword_ptr(rcx + rdx * 4 + slot::MARKS), frame)?;
    let argument = dword_ptr(rcx + rdx * 4 + (slot::MARKS + 4));
    let Some(register) = marks.argument else {
        return a.mov(argument, 0);
    };
    let mut is_new = a.create_label();
    load_number(a, marks, register, context)?;
    a.mov(argument, r8d)?;
    // Once a stop had the number, the highest bit of its place is flipped: a repeated number differs in no other bit.
    let place = number_place();
    select_number(a, r8d)?;
    a.mov(r9d, place)?;
    a.mov(place, r8d)?;
    // The place was empty.
    a.test(r9d, r9d)?;
    a.je(is_new)?;
    a.xor(r9d, r8d)?;
    a.add(r9d, r9d)?;
    a.jne(is_new)?;
    a.inc(word_at(rcx, slot::REPEATED_NUMBER))?;
    a.set_label(&mut is_new)?;
    a.nop()
}

/// Emits the code that compares a stop with the start that it ends, which is located by rdx in the slot at rcx, with
/// rax others that still wait. The code uses rdi, r8 and r9.
pub(super) fn check_stop(
    a: &mut CodeAssembler,
    marks: &Marks,
    context: PointContext,
) -> Result<(), IcedError> {
    let mut by_frame = a.create_label();
    let mut doubt = a.create_label();
    let mut same_frame = a.create_label();
    let mut over = a.create_label();
    a.mov(r9d, slot::SAME_FRAME as u32)?;
    if let Some(register) = marks.argument {
        let paths = StopPaths {
            by_frame,
            doubt,
            same_frame,
            over,
        };
        compare_numbers(a, marks, register, context, paths)?;
    }
    a.set_label(&mut by_frame)?;
    find_frame(a, marks, context, doubt)?;
    a.inc(word_at(rcx, slot::OTHER_FRAME))?;
    a.jmp(over)?;

    a.set_label(&mut doubt)?;
    count_doubt(a, marks, context, same_frame)?;

    // The last start after this one has been ended: was it in the same frame, and did it come later?
    a.set_label(&mut same_frame)?;
    locate_next(a, 1)?;
    a.mov(r8d, dword_ptr(rcx + rdi * 4 + slot::MARKS))?;
    a.cmp(r8d, frame_of_start())?;
    a.jne(over)?;
    a.mov(r8, qword_ptr(rcx + rdi * 8 + (slot::STARTS + 8)))?;
    a.cmp(r8, qword_ptr(rcx + rdx * 8 + (slot::STARTS + 8)))?;
    a.jbe(over)?;
    a.inc(qword_ptr(rcx + r9))?;
    a.set_label(&mut over)?;
    a.nop()
}

/// The frame of the start that is located by rdx in the slot at rcx.
fn frame_of_start() -> AsmMemoryOperand {
    dword_ptr(rcx + rdx * 4 + slot::MARKS)
}

/// Where the code of [`check_stop`] goes on once the numbers are compared.
#[derive(Clone, Copy)]
struct StopPaths {
    by_frame: CodeLabel,
    doubt: CodeLabel,
    same_frame: CodeLabel,
    over: CodeLabel,
}

/// Emits the code that compares the number in the stop's `register` with that of the start: a part of [`check_stop`]. It falls through to
/// `by_frame` if the numbers say nothing.
fn compare_numbers(
    a: &mut CodeAssembler,
    marks: &Marks,
    register: Register,
    context: PointContext,
    paths: StopPaths,
) -> Result<(), IcedError> {
    let number_of_start = dword_ptr(rcx + rdx * 4 + (slot::MARKS + 4));
    let mut is_other = a.create_label();
    let mut look_up = a.create_label();
    let mut is_unknown = a.create_label();
    let mut no_number = a.create_label();
    load_number(a, marks, register, context)?;
    a.cmp(number_of_start, r8d)?;
    a.jne(is_other)?;
    // An even value is not a number, but an address, which the garbage collector may reuse.
    a.test(r8b, 1)?;
    a.je(no_number)?;
    select_number(a, r8d)?;
    a.mov(number_place(), 0)?;
    a.mov(r9d, slot::SAME_FRAME_OWN as u32)?;
    // The start before this one has another number, so that it is not mistaken for this one.
    locate_next(a, -1)?;
    a.cmp(dword_ptr(rcx + rdi * 4 + (slot::MARKS + 4)), r8d)?;
    a.jne(paths.same_frame)?;
    a.jmp(paths.doubt)?;

    a.set_label(&mut is_other)?;
    a.mov(edi, number_of_start)?;
    a.and(edi, r8d)?;
    a.test(dil, 1)?;
    a.je(no_number)?;
    a.inc(word_at(rcx, slot::DIFFERENT_NUMBER))?;
    // If the stop is in the frame of this start, and the start before is not, this is its start, whatever its
    // number.
    a.test(rax, rax)?;
    a.je(look_up)?;
    locate_next(a, -1)?;
    a.mov(edi, dword_ptr(rcx + rdi * 4 + slot::MARKS))?;
    a.cmp(edi, frame_of_start())?;
    a.je(look_up)?;
    let here = frame(a, marks.frame, context)?;
    a.cmp(frame_of_start(), here)?;
    a.jne(look_up)?;
    a.mov(edi, number_of_start)?;
    hash_number(a)?;
    a.mov(number_place(), 0)?;
    a.jmp(paths.over)?;

    a.set_label(&mut look_up)?;
    select_number(a, r8d)?;
    a.cmp(number_place(), r8d)?;
    a.jne(is_unknown)?;
    a.xor(number_place(), i32::MIN)?;
    a.inc(word_at(rcx, slot::OTHER_NUMBER))?;
    a.mov(r9d, slot::SAME_FRAME_OTHER as u32)?;
    a.jmp(paths.doubt)?;
    a.set_label(&mut is_unknown)?;
    a.inc(word_at(rcx, slot::UNKNOWN_NUMBER))?;
    a.jmp(paths.by_frame)?;

    a.set_label(&mut no_number)?;
    a.inc(word_at(rcx, slot::NO_NUMBER))
}

/// Counts a stop if the start before the one that it ends waits in the frame of that one, or in that of the stop; or
/// else goes to `otherwise`. The code uses rdi and r8.
fn count_doubt(
    a: &mut CodeAssembler,
    marks: &Marks,
    context: PointContext,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    let mut is_doubtful = a.create_label();
    a.test(rax, rax)?;
    a.je(otherwise)?;
    locate_next(a, -1)?;
    a.mov(r8d, dword_ptr(rcx + rdi * 4 + slot::MARKS))?;
    a.cmp(r8d, dword_ptr(rcx + rdx * 4 + slot::MARKS))?;
    a.je(is_doubtful)?;
    let here = frame(a, marks.frame, context)?;
    a.cmp(r8d, here)?;
    a.jne(otherwise)?;
    a.set_label(&mut is_doubtful)?;
    a.inc(word_at(rcx, slot::DOUBTFUL))
}

/// How many starts are compared with a stop that is not in the frame of the last one.
const MAX_COMPARED: u32 = 16;

/// Goes to `otherwise` unless the point is in the frame of an earlier start that waits, and that frame is not a
/// caller's: it is further from the beginning of its stack than the last start, or on another stack. The code uses rdi
/// and r8, and restores rax and rdx.
fn find_frame(
    a: &mut CodeAssembler,
    marks: &Marks,
    context: PointContext,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let mut none = a.create_label();
    let mut found = a.create_label();
    let here = frame(a, marks.frame, context)?;
    a.mov(r8d, here)?;
    a.mov(edi, dword_ptr(rcx + rdx * 4 + slot::MARKS))?;
    a.sub(edi, r8d)?;
    a.jle(otherwise)?;
    a.mov(edx, MAX_COMPARED)?;
    a.set_label(&mut next)?;
    a.test(rax, rax)?;
    a.je(none)?;
    locate_next(a, -1)?;
    a.cmp(dword_ptr(rcx + rdi * 4 + slot::MARKS), r8d)?;
    a.je(found)?;
    a.dec(rax)?;
    a.dec(edx)?;
    a.jne(next)?;
    a.set_label(&mut none)?;
    a.mov(rax, word_at(rcx, slot::DEPTH))?;
    locate_start(a)?;
    a.jmp(otherwise)?;
    a.set_label(&mut found)?;
    a.mov(rax, word_at(rcx, slot::DEPTH))?;
    locate_start(a)
}

/// Loads the number in a register of the point into r8: as OCaml has it, so that its lowest bit is set.
fn load_number(
    a: &mut CodeAssembler,
    marks: &Marks,
    register: Register,
    context: PointContext,
) -> Result<(), IcedError> {
    context.load(a, r8, register)?;
    if marks.is_word {
        a.lea(r8, qword_ptr(r8 + r8 + 1))?;
    }
    Ok(())
}

/// The bits of a hash that select a place, which are its offset in units of two bytes.
const NUMBER_MASK: i32 = 2 * (slot::NUMBERS_KEPT as i32 - 1);

/// Puts in rdi what selects the place of a number.
fn select_number(a: &mut CodeAssembler, number: AsmRegister32) -> Result<(), IcedError> {
    a.mov(edi, number)?;
    hash_number(a)
}

/// Replaces the number in edi by what selects its place. Numbers that follow each other get different places, as do
/// those that differ by a power of two, such as aligned pointers.
fn hash_number(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.imul_3(edi, edi, GOLDEN_RATIO)?;
    a.shr(edi, 31 - NUMBER_MASK.ilog2())?;
    a.and(edi, NUMBER_MASK)
}

/// About 2³² divided by the golden ratio.
const GOLDEN_RATIO: i32 = 0x9e37_79b1_u32 as i32;

/// Returns the place that rdi selects.
fn number_place() -> AsmMemoryOperand {
    dword_ptr(rcx + rdi * 2 + slot::NUMBERS)
}

/// Locates by rdi the start whose depth is `next` more than rax.
fn locate_next(a: &mut CodeAssembler, next: i32) -> Result<(), IcedError> {
    a.lea(edi, qword_ptr(rax + next))?;
    a.and(edi, slot::STARTS_KEPT as i32 - 1)?;
    a.add(edi, edi)
}

/// Emits the code that puts what identifies the frame of the point into a register, and returns the register. The
/// code uses rdi.
fn frame(
    a: &mut CodeAssembler,
    frame: FrameId,
    context: PointContext,
) -> Result<AsmRegister32, IcedError> {
    match frame {
        FrameId::Stack => Ok(esp),
        FrameId::StackAndRbx => {
            context.load(a, rdi, Register::RBX)?;
            a.lea(edi, qword_ptr(rsp + rdi * 2))?;
            Ok(edi)
        }
    }
}
