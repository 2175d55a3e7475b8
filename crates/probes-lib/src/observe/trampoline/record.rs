//! Emits the part of a trampoline that writes a record of a watched hit into the ring of the
//! thread's group.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, al, byte_ptr, dl, dword_ptr, eax, esi, get_xmm, qword_ptr, r8, rax,
    rbx, rcx, rdx, rsi, sil,
};

use super::at_point::PointContext;
use super::emit::{offset, spread, word_at};
use super::fields::FieldCopies;
use super::readable::{unless_readable_value, unless_valid_at_record};
use super::stack_copy::{self, StackCopy};
use crate::expression::typed::NO_SCAN_TAG;
use crate::observe::layout::groups::GROUP_BITS;
use crate::observe::layout::shared::{self, HEADER_LEN, SharedLayout, record};
use crate::observe::layout::stack_copies::StackCopies;
use crate::observe::role::{ArgumentSource, WatchRole};

/// Emits the code that records a watched hit. Expects the address of the shared data in rbx and the time in rsi, and in
/// the copies of the saved registers what these held at the point. Returns the copies of fields, whose code the
/// caller has to emit where nothing falls through to it.
pub(super) fn record(
    a: &mut CodeAssembler,
    watched: &WatchRole,
    context: PointContext,
) -> Result<FieldCopies, IcedError> {
    let mut fields = FieldCopies::default();
    let claimed = begin(a, watched.point, false, context.layout)?;
    arguments(a, watched, context, &mut fields)?;
    claimed.end_with_stack(a, watched, context)?;
    Ok(fields)
}

/// A record that was claimed ([`begin`]), and is to be completed.
#[must_use]
pub(super) struct Claimed {
    layout: SharedLayout,
    /// If stacks are copied: where the code goes on without a record, as none has a free place for a stack.
    without: Option<CodeLabel>,
}

impl Claimed {
    /// Emits the code that completes the record at rcx, whose number is in r8.
    pub(super) fn end(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        // Written last: a record with its number is complete, as other processors see the stores in
        // this order.
        a.mov(word_at(rcx, record::NUMBER), r8)?;
        let Some(mut without) = self.without else {
            return Ok(());
        };
        stack_copy::release(a, self.layout)?;
        a.set_label(&mut without)?;
        // A label needs an instruction, and may be followed by another one.
        a.nop()
    }

    /// The same, after the stack of the hit was copied into the record, if stacks are copied. The address of the shared
    /// data is in rbx. The code uses the same registers as [`arguments`].
    pub(super) fn end_with_stack(
        self,
        a: &mut CodeAssembler,
        watched: &WatchRole,
        context: PointContext,
    ) -> Result<(), IcedError> {
        if self.without.is_some() {
            let copy = StackCopy {
                context,
                is_ocaml: watched.is_ocaml,
                is_from_start: watched.function.is_some_and(|it| it.is_from_start),
            };
            copy.emit(a)?;
        }
        self.end(a)
    }
}

/// Emits the code that records the arguments of a hit in the record at rcx, which has its time. The code uses rax, rdx,
/// rsi, rdi and r9.
pub(super) fn arguments(
    a: &mut CodeAssembler,
    watched: &WatchRole,
    context: PointContext,
    fields: &mut FieldCopies,
) -> Result<(), IcedError> {
    if !watched.arguments.is_empty() {
        a.mov(word_at(rcx, record::COPIED), 0)?;
    }
    for (index, source) in (0..).zip(&watched.arguments) {
        argument(a, index, *source, context, fields)?;
    }
    Ok(())
}

/// Emits the code that claims a record of a point, and its place for a stack if stacks are copied. Expects the address
/// of the shared data in rbx and the time in rsi; leaves the address of the record in rcx, its number in r8, and the id of
/// the thread in eax. If it is `from_start`, the code works before the thread has a control block, with 0 as its id, and
/// the process has to be allowed to execute `rdfsbase`.
pub(super) fn begin(
    a: &mut CodeAssembler,
    point: u32,
    from_start: bool,
    layout: SharedLayout,
) -> Result<Claimed, IcedError> {
    let mut claim = a.create_label();
    a.set_label(&mut claim)?;
    if from_start {
        a.rdfsbase(rax)?;
    } else {
        a.mov(eax, dword_ptr(0).fs())?;
    }
    spread(a, eax, GROUP_BITS)?;
    a.imul_3(rcx, rax, layout.ring_len() as i32)?;
    a.lea(rcx, qword_ptr(rbx + rcx + offset(layout.ring(0))))?;
    a.mov(eax, 1)?;
    a.lock().xadd(qword_ptr(rcx), rax)?;
    a.lea(r8, qword_ptr(rax + 1))?;
    a.and(eax, layout.records() as i32 - 1)?;
    a.imul_3(rax, rax, layout.record_len as i32)?;
    // From here on rcx is the record, and r8 its number.
    a.lea(rcx, qword_ptr(rcx + rax + HEADER_LEN))?;
    let mut without = None;
    if layout.stacks != StackCopies::None {
        let label = *without.insert(a.create_label());
        stack_copy::take(a, layout, claim, label)?;
    }
    a.mov(word_at(rcx, record::TIME), rsi)?;
    let mut known = a.create_label();
    if from_start {
        a.rdfsbase(rax)?;
        a.test(rax, rax)?;
        a.je(known)?;
    }
    a.mov(eax, dword_ptr(rbx + offset(shared::TID_AT)))?;
    a.mov(eax, dword_ptr(rax).fs())?;
    if from_start {
        a.set_label(&mut known)?;
    }
    a.mov(dword_ptr(rcx + record::TID), eax)?;
    a.mov(dword_ptr(rcx + record::POINT), point)?;
    Ok(Claimed { layout, without })
}

/// Emits the code that records an argument: its value; if that is a block, also its header; and if
/// the garbage collector does not scan the block, also its first words, or else its `fields`.
fn argument(
    a: &mut CodeAssembler,
    index: u64,
    source: ArgumentSource,
    context: PointContext,
    fields: &mut FieldCopies,
) -> Result<(), IcedError> {
    let at = context.layout.argument_at(index);
    let value = qword_ptr(rcx + at + record::VALUE);
    let mut over = a.create_label();
    match source {
        ArgumentSource::Register(register) => context.load(a, rdx, register)?,
        ArgumentSource::Vector(register) => {
            let Some(register) = get_xmm(register) else {
                return Ok(());
            };
            return a.movq(value, register);
        }
        ArgumentSource::Memory(memory) => {
            let header = qword_ptr(rcx + at + record::BLOCK_HEADER);
            context.operand_address(a, rdx, memory)?;
            a.mov(value, rdx)?;
            a.mov(header, record::UNREAD as i32)?;
            let unless_valid =
                |a: &mut CodeAssembler| unless_valid_at_record(a, context.layout, over);
            context.unless_operand_readable(a, memory, unless_valid, over)?;
            context.operand(a, rdx, memory)?;
            a.mov(header, 0)?;
        }
        // Probes of OCaml have no constants.
        ArgumentSource::Constant(_) | ArgumentSource::Unknown => return Ok(()),
    }
    a.mov(value, rdx)?;
    block(a, index, context.layout, over, fields)?;
    a.set_label(&mut over)?;
    a.nop()
}

/// Emits the code that records the header of the block at rdx, which can be read, and leaves it in rax. It goes to
/// `are_values` if the words of the block are values.
pub(super) fn block_header(
    a: &mut CodeAssembler,
    index: u64,
    layout: SharedLayout,
    are_values: CodeLabel,
) -> Result<(), IcedError> {
    let header = qword_ptr(rcx + layout.argument_at(index) + record::BLOCK_HEADER);
    a.mov(rax, qword_ptr(rdx - 8))?;
    a.mov(header, rax)?;
    a.mov(byte_ptr(rcx + record::COPIED + index), 1)?;
    a.cmp(al, NO_SCAN_TAG as i32)?;
    a.jb(are_values)
}

/// Emits the code that puts in rsi the length in words of the block whose header is in rax (bits 10 to 55), limited to
/// what a record holds. It goes to `over` if the block is empty.
pub(super) fn words_of_block(a: &mut CodeAssembler, over: CodeLabel) -> Result<(), IcedError> {
    a.shl(rax, 8)?;
    a.shr(rax, 18)?;
    a.je(over)?;
    a.mov(esi, record::COPY_WORDS as u32)?;
    a.cmp(rax, rsi)?;
    a.cmovb(rsi, rax)
}

/// Emits the code that records the header of the block at rdx, and its first words or, if these are values, its
/// `fields`. It goes to `over` if there is no block, or it cannot be read.
pub(super) fn block(
    a: &mut CodeAssembler,
    index: u64,
    layout: SharedLayout,
    over: CodeLabel,
    fields: &mut FieldCopies,
) -> Result<(), IcedError> {
    let are_values = fields.begin(a, index, over);
    let at = layout.argument_at(index);
    // Blocks are aligned to words; odd values are integers.
    a.test(dl, 7)?;
    a.jne(over)?;
    a.lea(rax, qword_ptr(rdx - 8))?;
    unless_readable_value(a, layout, over)?;
    block_header(a, index, layout, are_values)?;
    words_of_block(a, over)?;
    a.lea(rax, qword_ptr(rdx + rsi * 8 - 8))?;
    unless_readable_value(a, layout, over)?;
    let mut all = a.create_label();
    for word in 0..record::COPY_WORDS {
        a.mov(rax, qword_ptr(rdx + 8 * word))?;
        a.mov(qword_ptr(rcx + at + record::COPY + 8 * word), rax)?;
        if word + 1 < record::COPY_WORDS {
            a.cmp(esi, word as u32 + 1)?;
            a.je(all)?;
        }
    }
    a.set_label(&mut all)?;
    a.add(byte_ptr(rcx + record::COPIED + index), sil)
}
