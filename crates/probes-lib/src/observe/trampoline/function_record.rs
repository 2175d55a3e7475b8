//! The code of a trampoline that writes a record of a watched call, exit or instruction of a function into the ring of
//! the thread's group.
//!
//! ```text
//! save registers; filter; sample; claim a record; write the arguments, then what they point to; restore registers
//! ```
//!
//! What a function of C is passed need not be an address: the kernel is asked before memory is read
//! (trampoline/readable.rs).
//!
//! Registers are saved in the MMX registers in OCaml code, and at an entry or an instruction of a function that does not
//! use the x87 unit; elsewhere on the stack or under a lock (trampoline/saved.rs).

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, byte_ptr, eax, edi, edx, esi, get_xmm, qword_ptr, r14, rax, rbx, rcx,
    rdi, rdx, rsi, rsp, sil,
};

use super::SAVED_IF_TIMED;
use super::at_point::PointContext;
use super::emit::{load, locked_increment, time, word_at};
use super::fields::FieldCopies;
use super::filter;
use super::readable::{unless_kernel_reads, unless_readable, unless_valid_at_record};
use super::record;
use super::sampling;
use super::saved::{LockedRegisters, RegisterSaver, SaveArea};
use super::stack_info;
use crate::address::{LiveAddr, PAGE};
use crate::observe::layout::shared::{SharedLayout, record as layout_of};
use crate::observe::role::{
    ArgumentFormat, ArgumentSource, FilterRole, FunctionPart, MemorySource, StackKind, WatchRole,
    WatchedFunction, WordKind,
};
use crate::patch_plan::displaced::ExitKind;

/// What the code of watched and timed calls refers to.
#[derive(Clone, Copy)]
pub(super) struct RecordPointers {
    /// Where the address of the shared data is.
    pub(super) shared: LiveAddr,
    /// The byte that distinguishes forked children (`claim::IN_PROGRAM`), which only functions that are timed need.
    pub(super) in_program: LiveAddr,
    pub(super) layout: SharedLayout,
    /// The counter of the hits that a filter has no answer for, if they are filtered.
    pub(super) untyped: LiveAddr,
    /// The counter of the hits that samples are taken from, if hits are sampled.
    pub(super) sampled: LiveAddr,
    pub(super) saved: LockedRegisters,
}

/// What is recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordedEvent {
    /// A call, or an execution of an instruction, with the arguments.
    Call,
    /// An exit, with the result if it is a return.
    Exit(ExitKind),
}

/// Returns the code at `at` that records a call or an exit. If `mmx_is_free`, the function uses neither the MMX
/// registers nor the x87 unit.
pub(super) fn code(
    at: LiveAddr,
    what: RecordedEvent,
    (watched, function, filter): (&WatchRole, WatchedFunction, Option<&FilterRole>),
    mmx_is_free: bool,
    pointers: RecordPointers,
) -> Result<Vec<u8>, IcedError> {
    let place = save_area(what, function, mmx_is_free);
    let mut a = CodeAssembler::new(64)?;
    if function.has_only_results && what == RecordedEvent::Exit(ExitKind::Jump) {
        // The result is that of another function: a filter has no answer.
        a.add_instruction(locked_increment(pointers.untyped)?)?;
        return a.assemble(at.0);
    }
    let mut saver = RegisterSaver::new(&mut a, place, SAVED_IF_TIMED.len(), pointers.saved);
    saver.save(&mut a)?;
    let context = saver.context(pointers.shared, pointers.layout);
    let (mut skipped, mut untyped) = (a.create_label(), a.create_label());
    if let Some(filter) = filter {
        filter::filter(&mut a, filter, context, skipped, untyped)?;
    }
    if let Some(every) = watched.sample {
        sampling::unless_chosen(&mut a, every, pointers.sampled, skipped)?;
    }
    load(&mut a, rbx, pointers.shared)?;
    time(&mut a, rsi)?;
    let point = watched.point | flag(what);
    let claimed = record::begin(&mut a, point, function.is_from_start, pointers.layout)?;
    if let Some(stack) = function.exits_on {
        frame(&mut a, stack)?;
    }
    let mut fields = FieldCopies::default();
    recorded(what, watched, function, context).emit(&mut a, &mut fields)?;
    claimed.end_with_stack(&mut a, watched, context)?;
    if filter.is_some() {
        a.jmp(skipped)?;
        a.set_label(&mut untyped)?;
        a.add_instruction(locked_increment(pointers.untyped)?)?;
    }
    if watched.sample.is_some() || filter.is_some() {
        a.set_label(&mut skipped)?;
        // An instruction can have only one label, and there may be another.
        a.nop()?;
    }
    saver.restore(&mut a)?;
    fields.emit_here(&mut a, pointers.layout, pointers.shared)?;
    a.assemble(at.0)
}

/// Returns where registers are saved.
fn save_area(what: RecordedEvent, function: WatchedFunction, mmx_is_free: bool) -> SaveArea {
    if function.is_ocaml {
        return SaveArea::Mmx;
    }
    match what {
        // A result may be in the x87 unit, even if the function does not use it itself.
        RecordedEvent::Exit(_) => SaveArea::StackOrLock,
        RecordedEvent::Call if mmx_is_free => SaveArea::Mmx,
        RecordedEvent::Call if function.part == FunctionPart::Inside => SaveArea::Lock,
        RecordedEvent::Call => SaveArea::StackOrLock,
    }
}

/// Returns the flag that a record has beside the number of its point.
fn flag(what: RecordedEvent) -> u32 {
    match what {
        RecordedEvent::Call => 0,
        RecordedEvent::Exit(ExitKind::Return) => layout_of::RETURN,
        RecordedEvent::Exit(ExitKind::Jump) => layout_of::JUMP,
    }
}

/// Returns which words are recorded.
fn recorded(
    what: RecordedEvent,
    watched: &WatchRole,
    function: WatchedFunction,
    context: PointContext,
) -> Arguments<'_> {
    match what {
        RecordedEvent::Call => Arguments {
            sources: &watched.arguments,
            formats: &watched.formats,
            words: function.words,
            context,
        },
        RecordedEvent::Exit(kind) => Arguments {
            sources: match kind {
                ExitKind::Return if function.has_results && watched.result_format.is_some() => {
                    &[ArgumentSource::RESULT]
                }
                _ => &[],
            },
            formats: watched.result_format.as_slice(),
            words: function.result,
            context,
        },
    }
}

/// The arguments that are recorded, or the result.
pub(super) struct Arguments<'w> {
    pub(super) sources: &'w [ArgumentSource],
    pub(super) formats: &'w [ArgumentFormat],
    pub(super) words: WordKind,
    pub(super) context: PointContext,
}

impl Arguments<'_> {
    /// Emits the code that writes them into the record at rcx, which has its time, then what they point to. The address
    /// of the shared data is in rbx. Uses rax, rdx, rsi, rdi and r9.
    pub(super) fn emit(
        self,
        a: &mut CodeAssembler,
        fields: &mut FieldCopies,
    ) -> Result<(), IcedError> {
        for (index, source) in (0..).zip(self.sources) {
            match source {
                ArgumentSource::Memory(memory) => self.operand(a, index, *memory)?,
                _ => self.value(a, index, *source)?,
            }
        }
        if !self.sources.is_empty() {
            a.mov(word_at(rcx, layout_of::COPIED), 0)?;
        }
        for (index, source) in (0..).zip(self.sources) {
            let format = self.formats.get(index as usize).copied();
            if source.may_be_pointer(format) {
                memory(a, index, self.words, self.context, fields)?;
            }
        }
        Ok(())
    }

    /// Emits the code that writes what a register held into the record.
    fn value(
        &self,
        a: &mut CodeAssembler,
        index: u64,
        source: ArgumentSource,
    ) -> Result<(), IcedError> {
        let value = qword_ptr(rcx + self.context.layout.argument_at(index) + layout_of::VALUE);
        match source {
            ArgumentSource::Register(register) => self.context.load(a, rdx, register)?,
            ArgumentSource::Vector(register) => {
                return match get_xmm(register) {
                    Some(register) => a.movq(value, register),
                    None => Ok(()),
                };
            }
            ArgumentSource::Constant(number) => a.mov(rdx, number)?,
            ArgumentSource::Memory(_) | ArgumentSource::Unknown => return Ok(()),
        }
        a.mov(value, rdx)
    }

    /// Emits the code that writes an operand in memory into the record, or its address if it cannot be read. One that is
    /// not static is read only if words are shown as text: only then may the kernel be asked. The address is computed
    /// again before the operand is read: meanwhile, the record may have been overwritten. Uses rax, rdx, rsi, rdi and r9.
    fn operand(
        &self,
        a: &mut CodeAssembler,
        index: u64,
        memory: MemorySource,
    ) -> Result<(), IcedError> {
        let context = self.context;
        let at = context.layout.argument_at(index);
        let value = qword_ptr(rcx + at + layout_of::VALUE);
        let header = qword_ptr(rcx + at + layout_of::BLOCK_HEADER);
        let mut unread = a.create_label();
        if !memory.is_static() {
            context.operand_address(a, rdx, memory)?;
            a.mov(value, rdx)?;
            a.mov(header, layout_of::UNREAD as i32)?;
            if self.words != WordKind::Text {
                return Ok(());
            }
            let unless_valid =
                |a: &mut CodeAssembler| unless_valid_at_record(a, context.layout, unread);
            context.unless_operand_readable(a, memory, unless_valid, unread)?;
        }
        context.operand(a, rdx, memory)?;
        a.mov(value, rdx)?;
        a.mov(header, 0)?;
        a.set_label(&mut unread)?;
        a.nop()
    }
}

/// Emits the code that writes where the call is on its stack into the record. Uses rax and rdx.
fn frame(a: &mut CodeAssembler, stack: StackKind) -> Result<(), IcedError> {
    match stack {
        StackKind::OfThread => {
            a.mov(word_at(rcx, layout_of::FRAME), rsp)?;
            a.mov(word_at(rcx, layout_of::FIBER), 0)
        }
        StackKind::OfFiber { current_stack } => {
            a.mov(rax, qword_ptr(r14 + u32::from(current_stack)))?;
            a.mov(rdx, word_at(rax, stack_info::FIBER))?;
            a.lea(rdx, qword_ptr(rdx + rdx + 1))?;
            a.mov(word_at(rcx, layout_of::FIBER), rdx)?;
            // Fibers move when they grow.
            a.mov(rdx, rsp)?;
            a.sub(rdx, word_at(rax, stack_info::UPPER_END))?;
            a.mov(word_at(rcx, layout_of::FRAME), rdx)
        }
    }
}

/// Emits the code that copies what an argument points to into the record.
fn memory(
    a: &mut CodeAssembler,
    index: u64,
    words: WordKind,
    context: PointContext,
    fields: &mut FieldCopies,
) -> Result<(), IcedError> {
    if words == WordKind::Numbers {
        return Ok(());
    }
    let mut over = a.create_label();
    a.mov(
        rdx,
        qword_ptr(rcx + context.layout.argument_at(index) + layout_of::VALUE),
    )?;
    match words {
        WordKind::Values => record::block(a, index, context.layout, over, fields)?,
        WordKind::MaybeValues => maybe_block(a, index, context, over)?,
        WordKind::Text => text(a, index, context, over)?,
        WordKind::Numbers => {}
    }
    a.set_label(&mut over)?;
    a.nop()
}

/// Emits the code that copies the word that the address in rdx is in, and those after it, as far as they can be read.
fn text(
    a: &mut CodeAssembler,
    index: u64,
    context: PointContext,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let mut part = a.create_label();
    let mut whole = a.create_label();
    let mut copy = a.create_label();
    let last = 8 * (layout_of::COPY_WORDS as i32 - 1);
    a.and(rdx, -8)?;
    unless_table_and_kernel_allow(a, 0, context, over)?;
    a.lea(rax, qword_ptr(rdx + last))?;
    a.xor(rax, rdx)?;
    a.test(eax, -(PAGE as i32))?;
    a.je(whole)?;
    unless_table_and_kernel_allow(a, last, context, part)?;
    a.set_label(&mut whole)?;
    a.mov(esi, layout_of::COPY_WORDS as u32)?;
    a.jmp(copy)?;
    a.set_label(&mut part)?;
    a.mov(esi, edx)?;
    a.neg(esi)?;
    a.and(esi, PAGE as i32 - 1)?;
    a.shr(esi, 3)?;
    a.set_label(&mut copy)?;
    copy_words(a, index, context.layout)
}

/// Emits the code that does the same as [`record::block`] with a value that may be any word, but copies no fields.
fn maybe_block(
    a: &mut CodeAssembler,
    index: u64,
    context: PointContext,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let last = 8 * (layout_of::COPY_WORDS as i32 - 1);
    let header = qword_ptr(rcx + context.layout.argument_at(index) + layout_of::BLOCK_HEADER);
    a.test(edx, 7)?;
    a.jne(over)?;
    unless_table_and_kernel_allow(a, -8, context, over)?;
    record::block_header(a, index, context.layout, over)?;
    // The first and the last word that a record has room for are checked, however short the block is.
    unless_table_and_kernel_allow(a, last, context, over)?;
    unless_table_and_kernel_allow(a, 0, context, over)?;
    a.mov(rax, header)?;
    record::words_of_block(a, over)?;
    copy_words(a, index, context.layout)
}

/// Emits the code that copies as many words from rdx on as esi says, at least one.
fn copy_words(a: &mut CodeAssembler, index: u64, layout: SharedLayout) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let at = layout.argument_at(index) + layout_of::COPY;
    a.xor(edi, edi)?;
    a.set_label(&mut next)?;
    a.mov(rax, qword_ptr(rdx + rdi * 8))?;
    a.mov(qword_ptr(rcx + rdi * 8 + at as i32), rax)?;
    a.inc(edi)?;
    a.cmp(edi, esi)?;
    a.jb(next)?;
    a.inc(esi)?;
    a.mov(byte_ptr(rcx + layout_of::COPIED + index), sil)
}

/// Emits a jump to `otherwise` unless the word at rdx + `offset` may be read: the table of pages and the kernel
/// both say so. Uses rax, rsi, rdi and r9.
fn unless_table_and_kernel_allow(
    a: &mut CodeAssembler,
    offset: i32,
    context: PointContext,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    a.lea(rax, qword_ptr(rdx + offset))?;
    unless_readable(a, context.layout, otherwise)?;
    unless_kernel_reads(a, offset, context.layout, context.shared, otherwise)
}
