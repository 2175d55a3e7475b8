//! Emits the part of a trampoline that copies the stack of a hit into its record, for the reader to unwind.
//!
//! ```text
//! fibers   of OCaml 5, from the innermost to the outermost: each from its stack pointer to its handler
//! thread   from its stack pointer to the end of its stack; if that is not known, to the end of the page
//!
//! link     what `caml_c_call` leaves on the stack of the thread when it calls C: the address of the fiber's
//!          description, and the fiber's stack pointer
//! ```
//!
//! Only memory that is known to be mapped is read. Of a stack in use, what is above the stack pointer is mapped; the
//! question is where it ends:
//!
//! - The main thread's stack ends where the kernel has put its end; nothing else is mapped near it.
//! - Another thread's stack ends below the thread's control block, to which `fs` points. It is the stack in use if all
//!   pages from the stack pointer to the control block can be read: at the lower end of each stack is a guard page,
//!   which cannot be read. The main thread's control block is not on its stack: if that thread is on another stack,
//!   the end is unknown.
//! - A fiber's stack ends with its handler. Descriptions of fibers are read if the table of readable pages has them, or
//!   the kernel says that they can be read.
//!
//! In C code, where no register leads to the fibers, the innermost link is searched for in the first bytes of the
//! stack. What looks like one need not be one, or may be an old one, whose fiber is gone: so the kernel is asked
//! before each page there is read.

use iced_x86::code_asm::{
    AsmMemoryOperand, CodeAssembler, CodeLabel, dl, dword_ptr, eax, edi, edx, qword_ptr, r8, r8b,
    r12, r13, r14, r15, rax, rbp, rbx, rcx, rdi, rdx, rsi, rsp,
};
use iced_x86::{IcedError, Register};

use super::at_point::PointContext;
use super::emit::{offset, word_at};
use super::readable::{unless_kernel_reads, unless_readable};
use crate::address::PAGE;
use crate::observe::layout::shared::{
    HITS_WITHOUT_PLACE, MAIN_STACK_END, MAIN_TID, SharedLayout, TID_AT, UNUSED_RECORDS, record,
};
use crate::observe::layout::stack_copies::{
    BYTES, COUNT, END, ENTRY_BITS, FIBER, FIBER_FIELDS_LEN, FIBER_HANDLER, FIBER_POINTER,
    FIRST_END, FROM, FiberFields, HANDLER_LEN, HANDLER_PARENT, IS_TAKEN, LINK, MAX_BYTES,
    OF_THREAD, PART_LIST, PARTS, R12, R13, R14, R15, RBP, RBX, STACK_POINTER, USED,
};

/// A stack pointer that is less than this below the end of the main thread's stack is on that stack: the kernel maps
/// nothing else there. Of a deeper stack, the end counts as unknown.
const MAX_MAIN_STACK: i32 = 64 << 20;

/// The same for another thread: the default size of its stack.
const MAX_THREAD_STACK: i32 = 8 << 20;

/// How many bytes of the stack of the thread are copied first and searched for a link. Less than [`MAX_BYTES`], to
/// leave room for fibers.
const SEARCHED: i32 = 72 << 10;

/// The search ends at this many words that look like links; the last of them is not tried.
const MAX_TRIED: i32 = 64;

/// At most so many records in a row are tried for a free place.
const TRIED: i32 = 8;

/// No memory is mapped below this address (`vm.mmap_min_addr`).
const LOWEST: i32 = 1 << 16;

/// No fiber's stack is longer.
const MAX_FIBER_STACK: i32 = 1 << 30;

/// How to copy a stack.
#[derive(Clone, Copy)]
pub(super) struct StackCopy {
    pub(super) context: PointContext,
    /// Whether OCaml code executes the point, or calls it directly: in OCaml 5, r14 has the state of a domain.
    pub(super) is_ocaml: bool,
    /// Whether the thread may have no control block yet, and the code may execute `rdfsbase`.
    pub(super) is_from_start: bool,
}

/// Emits the code that takes the place for stacks of the record at rcx, whose number is in r8; the address of the shared
/// data is in rbx. If the place is in use, the record is marked as unused, and the code goes to `claim`, which claims the
/// next record; at the last of each [`TRIED`] records, it goes to `none`. Changes only r8, and that only if it goes there.
///
/// The thread that uses the place was preempted while others of its group filled the ring once, and still relies on what
/// it has stored there. Or it has left the trampoline by siglongjmp(3) in a signal handler: then nobody releases the place.
pub(super) fn take(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    claim: CodeLabel,
    none: CodeLabel,
) -> Result<(), IcedError> {
    let (mut is_last, mut taken) = (a.create_label(), a.create_label());
    let is_taken = dword_ptr(rcx + offset(layout.stack_at() + IS_TAKEN));
    a.lock().bts(is_taken, 0)?;
    a.jnc(taken)?;
    a.bts(r8, record::IS_UNUSED)?;
    a.test(r8b, TRIED - 1)?;
    a.je(is_last)?;
    a.lock().inc(qword_ptr(rbx + offset(UNUSED_RECORDS)))?;
    a.mov(word_at(rcx, record::NUMBER), r8)?;
    a.jmp(claim)?;
    a.set_label(&mut is_last)?;
    a.lock().inc(qword_ptr(rbx + offset(HITS_WITHOUT_PLACE)))?;
    a.mov(word_at(rcx, record::NUMBER), r8)?;
    a.jmp(none)?;
    a.set_label(&mut taken)?;
    // A label needs an instruction, and may be followed by another one.
    a.nop()
}

/// Emits the code that releases the place for stacks, once the record has its number.
pub(super) fn release(a: &mut CodeAssembler, layout: SharedLayout) -> Result<(), IcedError> {
    a.mov(dword_ptr(rcx + offset(layout.stack_at() + IS_TAKEN)), 0)
}

impl StackCopy {
    /// Emits the code that copies the stack into its place, which must be taken ([`take`]). Expects the address of the
    /// shared data in rbx, and that of the record in rcx. Preserves rbx, rcx and r8; uses rax, rdx, rsi, rdi and r9.
    pub(super) fn emit(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        self.context.load(a, rax, Register::RBX)?;
        a.mov(self.field(RBX), rax)?;
        a.lea(rsi, qword_ptr(rsp + self.context.pushed))?;
        a.mov(self.field(STACK_POINTER), rsi)?;
        for (at, register) in [(RBP, rbp), (R12, r12), (R13, r13), (R14, r14), (R15, r15)] {
            a.mov(self.field(at), register)?;
        }
        // This also clears `COUNT`, which follows it.
        a.mov(self.field(USED), 0)?;
        let mut over = a.create_label();
        match self.context.layout.stacks.fibers() {
            Some(fields) if self.is_ocaml => self.fibers(a, fields)?,
            Some(_) if self.context.layout.stacks.may_ask_kernel() => return self.below_c(a),
            _ => {}
        }
        self.find_end(a)?;
        self.part(a, &mut over)
    }

    /// Emits the code that copies the first bytes of the stack of the thread, the fibers of the innermost link there,
    /// and then the rest of the stack, if there is room.
    fn below_c(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let (mut next, mut rest) = (a.create_label(), a.create_label());
        self.find_end(a)?;
        a.mov(self.field(END), rdx)?;
        a.lea(rax, word_at(rsi, SEARCHED))?;
        a.cmp(rdx, rax)?;
        a.cmova(rdx, rax)?;
        a.mov(self.field(FIRST_END), rdx)?;
        self.copy_part(a)?;
        self.find_link(a, rest)?;
        self.find_direct_call(a)?;
        // The description of a fiber is at rdx, and its stack goes on at rsi.
        a.set_label(&mut next)?;
        self.copy_description(a)?;
        self.copy_fiber(a, rest)?;
        self.find_parent(a, rest)?;
        self.unless_full(a, rest)?;
        a.jmp(next)?;
        a.set_label(&mut rest)?;
        a.mov(rsi, self.field(FIRST_END))?;
        a.mov(rdx, self.field(END))?;
        self.copy_part(a)
    }

    /// Emits the code that searches the copied words of the thread's stack for the innermost link to a fiber, and puts
    /// the fiber's description in rdx and its stack pointer in rsi; goes to `none` if there is no link.
    fn find_link(self, a: &mut CodeAssembler, none: CodeLabel) -> Result<(), IcedError> {
        let (mut search, mut not_this) = (a.create_label(), a.create_label());
        let mut elsewhere = a.create_label();
        a.mov(rsi, self.field(STACK_POINTER))?;
        a.sub(rsi, 8)?;
        a.mov(self.field(LINK), rsi)?;
        // Until the link is found, this field counts the words that may still be tried.
        a.mov(self.field(OF_THREAD), MAX_TRIED)?;
        a.set_label(&mut search)?;
        a.mov(rsi, self.field(LINK))?;
        a.set_label(&mut not_this)?;
        a.add(rsi, 8)?;
        a.lea(rax, qword_ptr(rsi + 16))?;
        a.cmp(rax, self.field(FIRST_END))?;
        a.ja(none)?;
        a.mov(rdx, qword_ptr(rsi))?;
        a.mov(rax, qword_ptr(rsi + 8))?;
        // A description is in memory of malloc(3): aligned, below the fiber's stack pointer, and not on this stack.
        a.test(dl, 15)?;
        a.jne(not_this)?;
        a.sub(rax, rdx)?;
        a.jbe(not_this)?;
        a.cmp(rax, MAX_FIBER_STACK)?;
        a.ja(not_this)?;
        a.cmp(rdx, LOWEST)?;
        a.jb(not_this)?;
        a.cmp(rdx, self.field(STACK_POINTER))?;
        a.jb(elsewhere)?;
        a.cmp(rdx, self.field(END))?;
        a.jb(not_this)?;
        a.set_label(&mut elsewhere)?;
        a.mov(self.field(LINK), rsi)?;
        a.dec(self.field(OF_THREAD))?;
        a.je(none)?;
        for at in [FIBER_POINTER, FIBER_HANDLER] {
            self.unless_kernel_reads(a, at, search)?;
        }
        a.mov(rsi, self.field(LINK))?;
        a.mov(rsi, qword_ptr(rsi + 8))?;
        a.cmp(rsi, word_at(rdx, FIBER_POINTER))?;
        a.jne(search)?;
        unless_between(a, search)
    }

    /// Emits the code that copies the stack of the fiber whose description was copied; goes to `rest` if it cannot be
    /// read.
    fn copy_fiber(self, a: &mut CodeAssembler, rest: CodeLabel) -> Result<(), IcedError> {
        let mut page = a.create_label();
        a.mov(rdx, self.field(FIBER))?;
        a.mov(rdx, word_at(rdx, FIBER_HANDLER))?;
        a.add(rdx, HANDLER_LEN as i32)?;
        a.mov(rax, self.field(FROM))?;
        a.add(rax, MAX_BYTES as i32)?;
        a.cmp(rdx, rax)?;
        a.cmova(rdx, rax)?;
        // During the check of its pages, this field has the end of the fiber's stack.
        a.mov(self.field(OF_THREAD), rdx)?;
        a.mov(rdx, self.field(FROM))?;
        a.set_label(&mut page)?;
        self.unless_kernel_reads(a, 0, rest)?;
        end_of_page(a)?;
        a.cmp(rdx, self.field(OF_THREAD))?;
        a.jb(page)?;
        a.mov(rdx, self.field(OF_THREAD))?;
        a.mov(rsi, self.field(FROM))?;
        self.copy_part(a)
    }

    /// Emits the code that puts the description of the fiber's parent in rdx and its stack pointer in rsi; goes to
    /// `none` if there is none.
    fn find_parent(self, a: &mut CodeAssembler, none: CodeLabel) -> Result<(), IcedError> {
        a.mov(rdx, self.field(FIBER))?;
        a.mov(rdx, word_at(rdx, FIBER_HANDLER))?;
        self.unless_kernel_reads(a, HANDLER_PARENT, none)?;
        a.mov(rdx, word_at(rdx, HANDLER_PARENT))?;
        a.test(rdx, rdx)?;
        a.je(none)?;
        for at in [FIBER_POINTER, FIBER_HANDLER] {
            self.unless_kernel_reads(a, at, none)?;
        }
        a.mov(rsi, word_at(rdx, FIBER_POINTER))?;
        unless_between(a, none)
    }

    /// Emits the code that lowers rsi to the lowest address on the stack of the fiber at rdx that rbx had at the point
    /// or that is in a word of the thread's stack below the link. OCaml calls some functions directly, without a new
    /// link, and keeps its stack pointer in rbx, which they may save. To copy from too far down does no harm. Uses rax
    /// and rdi.
    fn find_direct_call(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let (mut word, mut next, mut over) = (a.create_label(), a.create_label(), a.create_label());
        a.mov(rdi, self.field(STACK_POINTER))?;
        a.mov(rax, self.field(RBX))?;
        a.jmp(word)?;
        a.set_label(&mut next)?;
        a.cmp(rdi, self.field(LINK))?;
        a.jae(over)?;
        a.mov(rax, qword_ptr(rdi))?;
        a.add(rdi, 8)?;
        a.set_label(&mut word)?;
        a.cmp(rax, rdx)?;
        a.jbe(next)?;
        a.cmp(rax, rsi)?;
        a.jae(next)?;
        a.mov(rsi, rax)?;
        a.jmp(next)?;
        a.set_label(&mut over)?;
        a.and(rsi, -8)
    }

    /// Emits the code that copies the beginning of the description of a fiber at rdx, whose stack goes on at rsi, and
    /// stores both addresses in the record.
    fn copy_description(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        a.mov(self.field(FIBER), rdx)?;
        a.mov(self.field(FROM), rsi)?;
        a.mov(rsi, rdx)?;
        a.add(rdx, FIBER_FIELDS_LEN as i32)?;
        self.copy_part(a)
    }

    /// Emits a jump to `otherwise` unless there is room for another fiber: two parts, and some bytes. So the code ends
    /// even if the parents of fibers form a cycle.
    fn unless_full(self, a: &mut CodeAssembler, otherwise: CodeLabel) -> Result<(), IcedError> {
        a.cmp(self.short_field(COUNT), PARTS as i32 - 2)?;
        a.jae(otherwise)?;
        a.cmp(self.short_field(USED), MAX_BYTES as i32)?;
        a.jae(otherwise)
    }

    /// Emits [`StackCopy::part`] with a label of its own.
    fn copy_part(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let mut copied = a.create_label();
        self.part(a, &mut copied)
    }

    /// An operand of eight bytes: a field of the copied stack in the record at rcx.
    fn field(self, at: u64) -> AsmMemoryOperand {
        qword_ptr(rcx + offset(self.context.layout.stack_at() + at))
    }

    /// The same, of four bytes.
    fn short_field(self, at: u64) -> AsmMemoryOperand {
        dword_ptr(rcx + offset(self.context.layout.stack_at() + at))
    }

    /// Emits the code that copies the stacks of fibers, if the point is on one, or is called from one. Expects the
    /// stack pointer in rsi, and leaves that of the thread's own stack there.
    fn fibers(self, a: &mut CodeAssembler, fields: FiberFields) -> Result<(), IcedError> {
        let (mut not_on_fiber, mut on_fiber) = (a.create_label(), a.create_label());
        let (mut next, mut over) = (a.create_label(), a.create_label());
        a.mov(self.field(OF_THREAD), rsi)?;
        a.mov(rdx, r14)?;
        for field in [fields.current_stack, fields.c_stack] {
            self.unless_mapped(a, field.into(), over)?;
        }
        a.mov(rdx, qword_ptr(r14 + u32::from(fields.current_stack)))?;
        self.unless_fiber(a, over)?;
        a.mov(rsi, self.field(STACK_POINTER))?;
        unless_between(a, not_on_fiber)?;
        a.jmp(on_fiber)?;
        // Code that OCaml calls directly, on the stack of the thread; rbx then has the stack pointer of OCaml.
        a.set_label(&mut not_on_fiber)?;
        a.mov(rsi, self.field(RBX))?;
        unless_between(a, over)?;
        a.jmp(next)?;
        a.set_label(&mut on_fiber)?;
        a.mov(rax, qword_ptr(r14 + u32::from(fields.c_stack)))?;
        a.mov(self.field(OF_THREAD), rax)?;
        // The description of a fiber is at rdx, and its stack goes on at rsi.
        a.set_label(&mut next)?;
        self.copy_description(a)?;
        a.mov(rdx, self.field(FIBER))?;
        a.mov(rdx, word_at(rdx, FIBER_HANDLER))?;
        a.add(rdx, HANDLER_LEN as i32)?;
        a.mov(rsi, self.field(FROM))?;
        self.copy_part(a)?;
        a.mov(rdx, self.field(FIBER))?;
        a.mov(rax, word_at(rdx, FIBER_HANDLER))?;
        a.mov(rdx, word_at(rax, HANDLER_PARENT))?;
        a.test(rdx, rdx)?;
        a.je(over)?;
        self.unless_fiber(a, over)?;
        a.mov(rsi, word_at(rdx, FIBER_POINTER))?;
        unless_between(a, over)?;
        self.unless_full(a, over)?;
        a.jmp(next)?;
        a.set_label(&mut over)?;
        a.mov(rsi, self.field(OF_THREAD))
    }

    /// Emits a jump to `otherwise` unless the table of readable pages, or else the kernel, says that the word `at`
    /// bytes after rdx can be read. Uses rax, rsi, rdi and r9.
    fn unless_mapped(
        self,
        a: &mut CodeAssembler,
        at: u64,
        otherwise: CodeLabel,
    ) -> Result<(), IcedError> {
        if !self.context.layout.stacks.may_ask_kernel() {
            a.lea(rax, qword_ptr(rdx + at))?;
            return unless_readable(a, self.context.layout, otherwise);
        }
        let (mut ask, mut known) = (a.create_label(), a.create_label());
        a.lea(rax, qword_ptr(rdx + at))?;
        unless_readable(a, self.context.layout, ask)?;
        a.jmp(known)?;
        // The page may have been mapped after the table was written.
        a.set_label(&mut ask)?;
        self.unless_kernel_reads(a, at, otherwise)?;
        a.set_label(&mut known)?;
        a.nop()
    }

    /// Emits a jump to `otherwise` unless the kernel may be asked, and can read the word `at` bytes after rdx. Uses
    /// rax, rsi, rdi and r9.
    fn unless_kernel_reads(
        self,
        a: &mut CodeAssembler,
        at: u64,
        otherwise: CodeLabel,
    ) -> Result<(), IcedError> {
        unless_kernel_reads(
            a,
            at as i32,
            self.context.layout,
            self.context.shared,
            otherwise,
        )
    }

    /// Emits a jump to `otherwise` unless the description of a fiber at rdx can be read. Uses rax, rsi, rdi and r9.
    fn unless_fiber(self, a: &mut CodeAssembler, otherwise: CodeLabel) -> Result<(), IcedError> {
        for at in [FIBER_POINTER, FIBER_HANDLER] {
            self.unless_mapped(a, at, otherwise)?;
        }
        Ok(())
    }

    /// Emits the code that puts in rdx the end of the stack that rsi is on; if that is not known, the end of the page
    /// that rsi is in. Preserves rsi; uses rax, rdi and r9.
    fn find_end(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let (mut known, mut next) = (a.create_label(), a.create_label());
        let (mut of_page, mut of_thread, mut other_stack) =
            (a.create_label(), a.create_label(), a.create_label());
        a.mov(rdx, qword_ptr(rbx + offset(MAIN_STACK_END)))?;
        a.mov(rax, rdx)?;
        a.sub(rax, rsi)?;
        a.cmp(rax, MAX_MAIN_STACK)?;
        a.jb(known)?;
        if self.is_from_start {
            a.rdfsbase(rdx)?;
        } else {
            a.mov(rdx, qword_ptr(0).fs())?;
        }
        a.mov(rax, rdx)?;
        a.sub(rax, rsi)?;
        a.cmp(rax, MAX_THREAD_STACK)?;
        a.jae(of_page)?;
        a.mov(eax, dword_ptr(rbx + offset(TID_AT)))?;
        a.mov(eax, dword_ptr(rax).fs())?;
        a.cmp(eax, dword_ptr(rbx + offset(MAIN_TID)))?;
        a.je(of_page)?;
        a.mov(self.field(END), rdx)?;
        a.mov(self.field(FROM), rsi)?;
        a.mov(rdx, rsi)?;
        end_of_page(a)?;
        a.set_label(&mut next)?;
        a.cmp(rdx, self.field(END))?;
        a.jae(of_thread)?;
        self.unless_mapped(a, 0, other_stack)?;
        a.add(rdx, PAGE as i32)?;
        a.jmp(next)?;
        a.set_label(&mut other_stack)?;
        a.mov(rsi, self.field(FROM))?;
        a.set_label(&mut of_page)?;
        a.mov(rdx, rsi)?;
        end_of_page(a)?;
        a.jmp(known)?;
        a.set_label(&mut of_thread)?;
        a.mov(rsi, self.field(FROM))?;
        a.mov(rdx, self.field(END))?;
        a.set_label(&mut known)?;
        a.nop()
    }

    /// Emits the code that copies the bytes between the addresses in rsi and rdx, as far as there is room, and sets the
    /// label `over` after it. Uses rax, rdx, rsi and rdi.
    fn part(self, a: &mut CodeAssembler, over: &mut CodeLabel) -> Result<(), IcedError> {
        let mut next = a.create_label();
        let stack = self.context.layout.stack_at();
        a.mov(eax, self.short_field(USED))?;
        a.mov(edi, MAX_BYTES as i32)?;
        a.sub(edi, eax)?;
        a.add(rdi, rsi)?;
        a.cmp(rdx, rdi)?;
        a.cmova(rdx, rdi)?;
        a.mov(eax, self.short_field(COUNT))?;
        a.cmp(eax, PARTS as i32)?;
        a.jae(*over)?;
        a.cmp(rdx, rsi)?;
        a.jbe(*over)?;
        a.sub(rdx, rsi)?;
        a.and(rdx, -8)?;
        a.je(*over)?;
        a.shl(eax, ENTRY_BITS)?;
        a.mov(qword_ptr(rcx + rax + offset(stack + PART_LIST)), rsi)?;
        a.mov(qword_ptr(rcx + rax + offset(stack + PART_LIST + 8)), rdx)?;
        a.inc(self.short_field(COUNT))?;
        a.mov(eax, self.short_field(USED))?;
        a.lea(rdi, qword_ptr(rcx + rax + offset(stack + BYTES)))?;
        a.add(eax, edx)?;
        a.mov(self.short_field(USED), eax)?;
        // The last word first.
        a.set_label(&mut next)?;
        a.mov(rax, qword_ptr(rsi + rdx - 8))?;
        a.mov(qword_ptr(rdi + rdx - 8), rax)?;
        a.sub(rdx, 8)?;
        a.jne(next)?;
        a.set_label(over)?;
        // A label needs an instruction, and may be followed by another one.
        a.nop()
    }
}

/// Emits a jump to `otherwise` unless rsi is on the stack of the fiber whose description is at rdx.
fn unless_between(a: &mut CodeAssembler, otherwise: CodeLabel) -> Result<(), IcedError> {
    a.cmp(rsi, rdx)?;
    a.jbe(otherwise)?;
    a.cmp(rsi, word_at(rdx, FIBER_HANDLER))?;
    a.jae(otherwise)
}

/// Emits the code that puts in rdx the end of the page that it is in.
fn end_of_page(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.or(rdx, PAGE as i32 - 1)?;
    a.inc(rdx)
}
