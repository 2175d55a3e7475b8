//! The code that looks up whether memory is of values, in the table that the runtime of OCaml 4 has of their pages
//! ([`ValuePages::Runtimes`](crate::observe::value_pages::ValuePages::Runtimes)), or in that of the observer.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, cl, dword_ptr, ecx, edi, qword_ptr, r9, r9d, rbx, rcx,
    rdi,
};

use super::offset;
use crate::address::{LiveAddr, PAGE};
use crate::observe::layout::readable_pages;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::value_pages::runtime_pages::{ENTRIES, HASH_FACTOR, MASK, OF_VALUES, SHIFT};

/// Binary logarithm of how many entries are tried: the runtime keeps half of them empty.
const TRIED_BITS: u32 = 6;

/// Emits a jump to `otherwise` unless the address in `page` is of memory of values. Uses these three registers, none of which is
/// rcx.
pub(super) fn unless_of_values(
    a: &mut CodeAssembler,
    table: LiveAddr,
    [page, index, saved]: [AsmRegister64; 3],
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let mut none = a.create_label();
    let mut found = a.create_label();
    let mut checked = a.create_label();
    let field = |offset: u64| table.0.wrapping_add(offset);
    let page_bits = PAGE.trailing_zeros();
    a.and(page, -(PAGE as i32))?;
    a.mov(saved, page)?;
    a.shr(saved, page_bits)?;
    a.mov(index, HASH_FACTOR)?;
    a.imul_2(index, saved)?;
    a.mov(saved, rcx)?;
    a.mov(rcx, field(SHIFT))?;
    a.mov(ecx, dword_ptr(rcx))?;
    a.shr(index, cl)?;
    a.set_label(&mut next)?;
    a.mov(rcx, field(ENTRIES))?;
    a.mov(rcx, qword_ptr(rcx))?;
    // Before the runtime has started, there are none.
    a.test(rcx, rcx)?;
    a.je(none)?;
    a.mov(rcx, qword_ptr(rcx + index * 8))?;
    a.xor(rcx, page)?;
    a.cmp(rcx, PAGE as i32 - 1)?;
    a.jbe(found)?;
    // An empty entry.
    a.cmp(rcx, page)?;
    a.je(none)?;
    // How many were tried is in the low bits of the address of the page.
    a.inc(page)?;
    a.bt(page, TRIED_BITS)?;
    a.jc(none)?;
    a.inc(index)?;
    a.mov(rcx, field(MASK))?;
    a.and(index, qword_ptr(rcx))?;
    a.jmp(next)?;
    a.set_label(&mut none)?;
    a.xor(ecx, ecx)?;
    a.jmp(checked)?;
    a.set_label(&mut found)?;
    a.xor(rcx, page)?;
    a.set_label(&mut checked)?;
    a.test(ecx, OF_VALUES as i32)?;
    a.mov(rcx, saved)?;
    a.je(otherwise)
}

/// Emits a jump to `otherwise` unless the table of readable pages has the word `offset_of` bytes behind `base`, which is not r9. The
/// address of the shared data is in rbx. Uses rdi and r9.
pub(super) fn unless_listed(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    base: AsmRegister64,
    offset_of: i32,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    let page_bits = PAGE.trailing_zeros();
    a.lea(r9, qword_ptr(base + offset_of))?;
    a.mov(rdi, r9)?;
    a.shr(rdi, readable_pages::KEY_SHIFT)?;
    a.and(edi, readable_pages::ENTRIES as i32 - 1)?;
    a.mov(rdi, qword_ptr(rbx + rdi * 8 + offset(layout.pages())))?;
    a.shr(r9, page_bits)?;
    a.bt(edi, r9d)?;
    a.jnc(otherwise)?;
    a.shr(r9, readable_pages::KEY_SHIFT - page_bits)?;
    a.shr(rdi, 32)?;
    a.cmp(r9, rdi)?;
    a.jne(otherwise)
}
