//! The code that copies into a record the fields of a block and, for a field that is a block itself, what that block
//! is, as [`fields`](crate::observe::layout::shared::fields) says. A trampoline has it once, away from the code that
//! most hits execute.
//!
//! Memory is read only where the table of pages allows it. An address that was checked stays in a register until it is
//! read: another thread may change the block meanwhile, or overwrite the record, if this thread is stopped for so long
//! that the ring has come around.
//!
//! ```text
//! rcx, r8, rbx   the record, its number, the shared data
//! rdx            the address of the next field
//! rsi            the state, from the lowest bit: index of the next word of the record, that of their end, how many
//!                fields are left, whether they may be those of a cell, index of the argument;
//!                above these 32 bits, while words are copied, how many
//! rax            a field
//! ```

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, al, byte_ptr, dil, dword_ptr, edi, esi, qword_ptr, r9,
    r9b, r9d, rax, rbx, rcx, rdi, rdx, rsi, sil,
};

use super::emit::load;
use super::readable::{unless_listed, unless_of_values};
use crate::address::LiveAddr;
use crate::observe::layout::shared::{SharedLayout, fields, record};
use crate::observe::value_pages::ValuePages;

/// The lowest bit in the state of the index where the words of the argument end.
const END: u32 = 8;
/// The lowest bit of how many fields are left.
const LEFT: u32 = 16;
/// The bit that is set if the fields are those of a block that may be a cell of a list.
const IS_CELL: u32 = 1 << 24;
/// The lowest bit of the index of the argument.
const ARGUMENT: u32 = 25;
/// The lowest bit of how many words are copied.
const COPIED: u32 = 32;

/// The header of a cell, without the colour.
const CELL: i32 = 2 << 10;

/// The arguments whose fields are copied.
#[derive(Default)]
pub(super) struct FieldCopies {
    /// The index of each, where its code begins, and where the trampoline goes on after that.
    arguments: Vec<(u64, CodeLabel, CodeLabel)>,
}

impl FieldCopies {
    /// Returns where a trampoline jumps to, with the header of a block of values in rax and the address of the block in
    /// rdx; it goes on at `after`.
    pub(super) fn begin(
        &mut self,
        a: &mut CodeAssembler,
        index: u64,
        after: CodeLabel,
    ) -> CodeLabel {
        let begin = a.create_label();
        self.arguments.push((index, begin, after));
        begin
    }

    /// Emits the code here, and a jump over it.
    pub(super) fn emit_here(
        self,
        a: &mut CodeAssembler,
        layout: SharedLayout,
        shared: LiveAddr,
    ) -> Result<(), IcedError> {
        if self.arguments.is_empty() {
            return Ok(());
        }
        let mut end = a.create_label();
        a.jmp(end)?;
        self.emit(a, layout, shared)?;
        a.set_label(&mut end)?;
        a.nop()
    }

    /// Emits the code, to which nothing may fall through. The address of the shared data is at `shared`.
    pub(super) fn emit(
        self,
        a: &mut CodeAssembler,
        layout: SharedLayout,
        shared: LiveAddr,
    ) -> Result<(), IcedError> {
        let mut copy = a.create_label();
        let mut leave = a.create_label();
        let Some((_, _, last)) = self.arguments.last().copied() else {
            return Ok(());
        };
        let mut arguments = self.arguments;
        for (index, begin, _) in &mut arguments {
            a.set_label(begin)?;
            a.mov(esi, first_state(*index, layout))?;
            a.jmp(copy)?;
        }
        a.set_label(&mut copy)?;
        let mut code = FieldCode { a, layout, shared };
        code.fields(leave)?;
        let a = code.a;
        a.set_label(&mut leave)?;
        a.shr(esi, ARGUMENT)?;
        for (index, _, after) in &arguments[..arguments.len() - 1] {
            a.cmp(esi, *index as i32)?;
            a.je(*after)?;
        }
        a.jmp(last)
    }
}

/// Returns the state at the beginning. An argument's first word says how many cells follow; the fields are after it.
fn first_state(index: u64, layout: SharedLayout) -> u32 {
    let first = (layout.argument_at(index) + record::COPY) / 8;
    let end = first + fields::WORDS;
    (first + 1) as u32 | (end as u32) << END | (index as u32) << ARGUMENT
}

struct FieldCode<'a> {
    a: &'a mut CodeAssembler,
    layout: SharedLayout,
    shared: LiveAddr,
}

impl FieldCode<'_> {
    /// Emits the code that copies the fields of the block at rdx, whose header is in rax, and falls through; or goes to
    /// `leave` if these cannot be copied.
    fn fields(&mut self, leave: CodeLabel) -> Result<(), IcedError> {
        let mut scan = self.a.create_label();
        let mut is_no_cell = self.a.create_label();
        let mut next = self.a.create_label();
        let mut is_block = self.a.create_label();
        let mut advance = self.a.create_label();
        let mut finish = self.a.create_label();
        let mut is_object = self.a.create_label();
        let is_exception = self.a.create_label();
        self.a.cmp(al, u32::from(fields::GREATEST_TAG))?;
        self.a.jbe(scan)?;
        self.a.cmp(al, u32::from(fields::OBJECT_TAG))?;
        self.a.je(is_object)?;
        self.a.cmp(al, u32::from(fields::FORWARD_TAG))?;
        self.a.jne(leave)?;
        self.a.set_label(&mut scan)?;
        // A block of OxCaml has words that are no values if any of these bits is set.
        self.a.mov(rdi, rax)?;
        self.a.shr(rdi, 56)?;
        self.a.jne(leave)?;
        self.a.mov(rdi, rax)?;
        self.a.shr(rdi, 10)?;
        self.a.je(leave)?;
        self.a.cmp(rdi, 2)?;
        self.a.jne(is_no_cell)?;
        self.a.test(al, al)?;
        self.a.jne(is_no_cell)?;
        self.a.or(esi, IS_CELL as i32)?;
        self.a.set_label(&mut is_no_cell)?;
        self.a.mov(r9d, fields::MAX as u32)?;
        self.a.cmp(rdi, r9)?;
        self.a.cmova(rdi, r9)?;
        self.a.lea(rax, qword_ptr(rdx + rdi * 8 - 8))?;
        self.a.shl(edi, LEFT)?;
        self.a.or(esi, edi)?;
        self.unless_readable(rax, 0, leave)?;
        self.no_cells()?;
        self.a.jmp(next)?;

        // As if it were the field of a block.
        self.a.set_label(&mut is_object)?;
        self.no_cells()?;
        self.a.or(esi, 1 << LEFT)?;
        self.a.mov(qword_ptr(rcx + rdi * 8), rdx)?;
        self.a.mov(rdi, rax)?;
        self.a.mov(rax, rdx)?;
        self.header()?;
        self.a.jmp(is_exception)?;

        self.a.set_label(&mut next)?;
        self.room()?;
        self.a.je(finish)?;
        self.a.mov(rax, qword_ptr(rdx))?;
        self.a.movzx(r9d, sil)?;
        self.a.mov(qword_ptr(rcx + r9 * 8), rax)?;
        self.a.test(al, 7)?;
        self.a.je(is_block)?;
        self.a.inc(esi)?;
        self.a.jmp(advance)?;

        self.a.set_label(&mut is_block)?;
        self.a.cmp(dil, 2)?;
        self.a.jb(finish)?;
        self.block([next, advance, finish], is_exception)?;

        self.a.set_label(&mut advance)?;
        self.a.add(rdx, 8)?;
        self.a.sub(esi, 1 << LEFT)?;
        self.a.mov(edi, esi)?;
        self.a.shr(edi, LEFT)?;
        self.a.test(dil, dil)?;
        self.a.jne(next)?;

        self.a.set_label(&mut finish)?;
        // How many words were written: as many as there are, without those that are left.
        self.room()?;
        self.a.mov(r9d, fields::WORDS as u32)?;
        self.a.sub(r9b, dil)?;
        self.a.mov(edi, esi)?;
        self.a.shr(edi, ARGUMENT)?;
        self.a.add(byte_ptr(rcx + rdi + record::COPIED), r9b)
    }

    /// Emits the code that writes what the block at rax is, whose address is written already; or goes to its first
    /// field if it is the next cell of a list.
    fn block(
        &mut self,
        [next, advance, finish]: [CodeLabel; 3],
        mut is_exception: CodeLabel,
    ) -> Result<(), IcedError> {
        let mut is_no_cell = self.a.create_label();
        let mut is_limited = self.a.create_label();
        let mut whole = self.a.create_label();
        let mut unread = self.a.create_label();
        self.unless_readable(rax, -8, unread)?;
        self.a.mov(rdi, qword_ptr(rax - 8))?;
        self.next_cell(next, is_no_cell, finish)?;

        self.a.set_label(&mut is_no_cell)?;
        self.header()?;
        self.a.cmp(dil, u32::from(fields::OBJECT_TAG))?;
        self.a.je(is_exception)?;
        for (tag, words) in fields::OPAQUE_WORDS {
            self.a.mov(r9d, words as u32)?;
            self.a.cmp(dil, u32::from(tag))?;
            self.a.je(is_limited)?;
        }
        self.a.jmp(whole)?;
        self.a.set_label(&mut is_limited)?;
        self.first_words(whole, unread)?;
        self.a.set_label(&mut whole)?;
        self.a.add(esi, 2)?;
        self.a.jmp(advance)?;

        self.a.set_label(&mut is_exception)?;
        self.exception_name(finish, unread)?;
        self.a.jmp(is_limited)?;

        self.a.set_label(&mut unread)?;
        self.a.xor(edi, edi)?;
        self.header()?;
        self.a.mov(esi, esi)?;
        self.a.add(esi, 2)?;
        self.a.jmp(advance)
    }

    /// Emits the code that goes on with the next cell of a list, if the field is that: the last one of a cell, with
    /// the header of a cell in rdi.
    fn next_cell(
        &mut self,
        next: CodeLabel,
        is_no_cell: CodeLabel,
        finish: CodeLabel,
    ) -> Result<(), IcedError> {
        self.a.test(esi, IS_CELL as i32)?;
        self.a.je(is_no_cell)?;
        self.a.mov(r9d, esi)?;
        self.a.shr(r9d, LEFT)?;
        self.a.cmp(r9b, 1)?;
        self.a.jne(is_no_cell)?;
        self.a.mov(r9, rdi)?;
        self.a.btr(r9, 8)?;
        self.a.btr(r9, 9)?;
        self.a.cmp(r9, CELL)?;
        self.a.jne(is_no_cell)?;
        self.unless_readable(rax, 8, finish)?;
        self.a.mov(r9d, esi)?;
        self.a.shr(r9d, END)?;
        self.a.movzx(r9d, r9b)?;
        self.a
            .inc(dword_ptr(rcx + r9 * 8 - 8 * fields::WORDS as i32))?;
        self.a.mov(rdx, rax)?;
        self.a.add(esi, 1 << LEFT)?;
        self.a.jmp(next)
    }

    /// Emits the code that copies the first words of the block in rax, at most as many as are in r9 and as there is
    /// room for. The header of the block is in rdi.
    fn first_words(&mut self, whole: CodeLabel, unread: CodeLabel) -> Result<(), IcedError> {
        let mut copy = self.a.create_label();
        self.a.shl(rdi, 8)?;
        self.a.shr(rdi, 18)?;
        self.a.cmp(r9, rdi)?;
        self.a.cmova(r9, rdi)?;
        self.room()?;
        self.a.sub(dil, 2)?;
        self.a.movzx(edi, dil)?;
        self.a.cmp(r9d, edi)?;
        self.a.cmova(r9d, edi)?;
        self.a.test(r9d, r9d)?;
        self.a.je(whole)?;
        self.a.mov(rdi, r9)?;
        self.a.shl(rdi, COPIED)?;
        self.a.or(rsi, rdi)?;
        self.a.lea(rdi, qword_ptr(rax + r9 * 8 - 8))?;
        self.unless_readable(rdi, 0, unread)?;
        self.a.mov(r9, rsi)?;
        self.a.shr(r9, COPIED)?;
        self.a.movzx(edi, sil)?;
        self.a.lea(rdi, qword_ptr(rcx + rdi * 8 + 16))?;
        self.a.set_label(&mut copy)?;
        self.a.mov(rbx, qword_ptr(rax + r9 * 8 - 8))?;
        self.a.mov(qword_ptr(rdi + r9 * 8 - 8), rbx)?;
        self.a.dec(r9)?;
        self.a.jne(copy)?;
        load(self.a, rbx, self.shared)?;
        self.a.mov(r9, rsi)?;
        self.a.shr(r9, COPIED)?;
        self.a.mov(esi, esi)?;
        self.a.add(esi, r9d)
    }

    /// Emits the code that finds the name of an exception: the first field of the block in rax. Leaves the name there,
    /// its header in rdi, and in r9 how many words of it are copied at most.
    fn exception_name(&mut self, finish: CodeLabel, unread: CodeLabel) -> Result<(), IcedError> {
        self.room()?;
        self.a.cmp(dil, 3)?;
        self.a.jb(finish)?;
        self.unless_readable(rax, 0, unread)?;
        self.a.mov(rax, qword_ptr(rax))?;
        self.a.inc(esi)?;
        self.a.test(al, 7)?;
        self.a.jne(unread)?;
        self.unless_readable(rax, -8, unread)?;
        self.a.mov(rdi, qword_ptr(rax - 8))?;
        self.a.cmp(dil, u32::from(fields::STRING_TAG))?;
        self.a.jne(unread)?;
        self.header()?;
        self.a.mov(r9d, fields::NAME_WORDS as u32)
    }

    /// Emits the code that writes that no cells follow. Leaves the index of the next word in rdi.
    fn no_cells(&mut self) -> Result<(), IcedError> {
        self.a.movzx(edi, sil)?;
        self.a.mov(qword_ptr(rcx + rdi * 8 - 8), 0)
    }

    /// Emits the code that writes the header in rdi after the field.
    fn header(&mut self) -> Result<(), IcedError> {
        self.a.movzx(r9d, sil)?;
        self.a.mov(qword_ptr(rcx + r9 * 8 + 8), rdi)
    }

    /// Emits the code that puts in dil how many words can be written, and sets the flags.
    fn room(&mut self) -> Result<(), IcedError> {
        self.a.mov(edi, esi)?;
        self.a.shr(edi, END)?;
        self.a.sub(dil, sil)
    }

    /// Emits a jump to `otherwise` unless the word `offset` bytes after `base` may be read. Uses rdi and r9.
    fn unless_readable(
        &mut self,
        base: AsmRegister64,
        offset: i32,
        otherwise: CodeLabel,
    ) -> Result<(), IcedError> {
        match self.layout.value_pages {
            ValuePages::TableOfObserver => {
                unless_listed(self.a, self.layout, base, offset, otherwise)
            }
            ValuePages::TableOfRuntime(table) => {
                let mut is_readable = self.a.create_label();
                let mut is_not = self.a.create_label();
                self.a.lea(r9, qword_ptr(base + offset))?;
                unless_of_values(self.a, table, [r9, rdi, rbx], is_not)?;
                load(self.a, rbx, self.shared)?;
                self.a.jmp(is_readable)?;
                self.a.set_label(&mut is_not)?;
                load(self.a, rbx, self.shared)?;
                self.a.jmp(otherwise)?;
                self.a.set_label(&mut is_readable)?;
                self.a.nop()
            }
            ValuePages::NoTable => self.a.jmp(otherwise),
        }
    }
}

#[cfg(test)]
mod tests;
