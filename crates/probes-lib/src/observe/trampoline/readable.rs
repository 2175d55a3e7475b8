//! The code that looks up whether memory may be read: in the table that the runtime of OCaml 4 has of the pages of
//! values ([`ValuePages::TableOfRuntime`]), in that of the observer, or by a system call.
//!
//! What a function of C is passed need not be an address, and if it is one, the memory there may have been unmapped a
//! moment ago: `free` leaves the address of what it has unmapped in a register. So the kernel is asked before memory is
//! read: rt_sigprocmask(2), called with the word as the new mask and with an invalid `how`, fails with `EFAULT` if the
//! word cannot be read, else with `EINVAL`. No mask is changed. That takes about a tenth of a microsecond.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, cl, dword_ptr, eax, ecx, edi, edx, qword_ptr, r9, r9d,
    r10, r10d, r11, rax, rbx, rcx, rdi, rdx, rsi,
};

use super::emit::{load, offset, word_at};
use crate::address::{LiveAddr, PAGE};
use crate::observe::layout::readable_pages;
use crate::observe::layout::shared::{SharedLayout, record, validity};
use crate::observe::value_pages::ValuePages;
use crate::observe::value_pages::runtime_pages::{ENTRIES, HASH_FACTOR, MASK, OF_VALUES, SHIFT};

/// Binary logarithm of how many entries are tried: the runtime keeps half of them empty.
const TRIED_BITS: u32 = 6;

/// Emits a jump to `otherwise` unless the address in `page` is of memory of values. Uses these three registers, none of
/// which is rcx.
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

/// Emits a jump to `otherwise` unless the table of readable pages has the word `offset_of` bytes after `base`, which
/// is not r9. The address of the shared data is in rbx. Uses rdi and r9.
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

/// Emits a jump to `otherwise` unless the word at rax, to which a value points, may be read. Expects the same as
/// [`unless_readable`]; the code uses rax, rdi and r9.
pub(super) fn unless_readable_value(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    match layout.value_pages {
        ValuePages::TableOfObserver => unless_readable(a, layout, otherwise),
        ValuePages::TableOfRuntime(table) => unless_of_values(a, table, [rax, r9, rdi], otherwise),
        ValuePages::NoTable => a.jmp(otherwise),
    }
}

/// Emits a jump to `otherwise` unless the table of pages was valid at the time of the record at rcx, and says that the
/// word at rax may be read. The address of the shared data is in rbx. The code uses rdi and r9.
pub(super) fn unless_readable(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    unless_valid_at_record(a, layout, otherwise)?;
    unless_listed(a, layout, rax, 0, otherwise)
}

/// Emits a jump to `otherwise` unless the table of pages was valid at the time of the record at rcx. The address of the
/// shared data is in rbx. Uses rdi and r9.
pub(super) fn unless_valid_at_record(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    a.mov(r9, word_at(rcx, record::TIME))?;
    check_validity(a, layout, [r9, rdi])?;
    a.jae(otherwise)
}

/// Emits the code that leaves the flags of *below* if the table of pages was valid at the time in `ticks`, in TSC
/// ticks. The address of the shared data is in rbx. Uses both registers.
pub(super) fn check_validity(
    a: &mut CodeAssembler,
    layout: SharedLayout,
    [ticks, negated]: [AsmRegister64; 2],
) -> Result<(), IcedError> {
    let validity = layout.validity();
    a.sub(ticks, qword_ptr(rbx + offset(validity + validity::SINCE)))?;
    // The observer may have renewed the table after the thread read its clock.
    a.mov(negated, ticks)?;
    a.neg(negated)?;
    a.cmovns(ticks, negated)?;
    a.cmp(ticks, qword_ptr(rbx + offset(validity + validity::TICKS)))
}

/// Emits a jump to `otherwise` unless the kernel may be asked, and reads the word `offset_of` bytes after rdx. Expects
/// a multiple of 8 in rcx; leaves the address of the shared data, which is at `shared`, in rbx. Keeps rcx and rdx, and
/// uses rax, rsi, rdi and r9.
pub(super) fn unless_kernel_reads(
    a: &mut CodeAssembler,
    offset_of: i32,
    layout: SharedLayout,
    shared: LiveAddr,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    /// What is added to rcx, a multiple of 8, to get an invalid `how`: neither 0, 1 nor 2. The kernel finds that out only
    /// after it has read the word.
    const NO_HOW: i32 = 4;
    load(a, rbx, shared)?;
    let may_ask = offset(layout.validity() + validity::MAY_ASK);
    a.cmp(qword_ptr(rbx + may_ask), 0)?;
    a.je(otherwise)?;
    a.lea(rsi, qword_ptr(rdx + offset_of))?;
    // The system call changes rax, rcx and r11; rdi and rsi stay as they are.
    a.mov(rbx, r11)?;
    a.mov(r9, r10)?;
    a.lea(rdi, word_at(rcx, NO_HOW))?;
    a.xor(edx, edx)?;
    a.mov(r10d, 8)?;
    a.mov(eax, libc::SYS_rt_sigprocmask as i32)?;
    a.syscall()?;
    a.mov(r10, r9)?;
    a.mov(r11, rbx)?;
    a.lea(rcx, qword_ptr(rdi - NO_HOW))?;
    a.lea(rdx, qword_ptr(rsi - offset_of))?;
    load(a, rbx, shared)?;
    a.cmp(eax, -libc::EINVAL)?;
    a.jne(otherwise)
}
