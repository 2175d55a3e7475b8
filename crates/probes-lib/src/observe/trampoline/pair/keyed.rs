//! The code at the ends of a pair whose stops find their starts by a key, in a table of all threads ([`keyed_starts`]).
//!
//! ```text
//! start   write key and time into a free slot of the key's bucket, or into the one that has the key
//! stop    take key and time out of the slot that has the key
//! ```
//!
//! Each is one instruction, which fails if another thread was faster; then the bucket is searched again.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, eax, ebx, ecx, edi, edx, qword_ptr, r8, r9, r9d, rax, rbx, rcx, rdi,
    rdx, rsi, xmmword_ptr,
};

use super::super::Pointers;
use super::super::emit::{load, offset, word_at};
use super::{KeptTimes, StartKind, add_time, find_slot, reset_slot_of_exited_thread};
use crate::observe::layout::keyed_starts::{BUCKET_COUNT_BITS, BUCKET_LEN_BITS, SLOTS, slot};
use crate::observe::layout::pair_slots;
use crate::observe::role::PairEnd;

/// Emits the code of the start or the stop of a pair. Expects the address of the shared data in rbx, the time in rsi,
/// and the hash of the key in r8, and preserves them; but if times are kept, the time from start to stop replaces the
/// hash. After a stop, the time of its start is in r9. Goes to `over` after a start that replaces another, or if the
/// thread has no slot, a stop has no start, or its time is not recorded.
pub(super) fn end(
    a: &mut CodeAssembler,
    end: PairEnd,
    starts: StartKind,
    pointers: &Pointers,
    times: KeptTimes,
    over: CodeLabel,
) -> Result<(), IcedError> {
    match end {
        PairEnd::Start(_) => start(a, end, starts, pointers, over),
        PairEnd::Stop(pair) => {
            take_start(a, end, pointers, over)?;
            a.mov(rax, rsi)?;
            a.sub(rax, r9)?;
            add_time(a, pair, pointers.layout, times, over)
        }
    }
}

/// Emits the code that searches the bucket. It goes to `same` with the slot of the key in rdi, and its time in rdx;
/// otherwise it goes on, with a free slot in rcx, or 0 if there is none or `finds_free` is false.
fn search(
    a: &mut CodeAssembler,
    end: PairEnd,
    pointers: &Pointers,
    finds_free: bool,
    same: CodeLabel,
) -> Result<(), IcedError> {
    let (PairEnd::Start(pair) | PairEnd::Stop(pair)) = end;
    let (mut next, mut is_other) = (a.create_label(), a.create_label());
    let mut is_held = a.create_label();
    let table = offset(pointers.layout.keyed_starts(pair));
    load(a, rbx, pointers.shared)?;
    a.mov(rdi, r8)?;
    a.shr(rdi, 64 - BUCKET_COUNT_BITS)?;
    a.shl(edi, BUCKET_LEN_BITS)?;
    a.lea(rdi, qword_ptr(rbx + rdi + table))?;
    a.mov(r9d, SLOTS as u32)?;
    a.xor(ecx, ecx)?;
    a.set_label(&mut next)?;
    a.mov(rdx, word_at(rdi, slot::TIME))?;
    a.test(rdx, rdx)?;
    a.jne(is_held)?;
    if finds_free {
        a.test(rcx, rcx)?;
        a.cmove(rcx, rdi)?;
    }
    a.jmp(is_other)?;
    a.set_label(&mut is_held)?;
    a.cmp(word_at(rdi, slot::KEY), r8)?;
    a.je(same)?;
    a.set_label(&mut is_other)?;
    a.add(rdi, slot::LEN as i32)?;
    a.dec(r9d)?;
    a.jne(next)
}

/// Emits the code that writes a start into the table.
fn start(
    a: &mut CodeAssembler,
    end: PairEnd,
    starts: StartKind,
    pointers: &Pointers,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let (mut again, mut same) = (a.create_label(), a.create_label());
    let (mut no_room, mut written) = (a.create_label(), a.create_label());
    let write = |a: &mut CodeAssembler, again: CodeLabel| {
        a.mov(rbx, r8)?;
        a.mov(rcx, rsi)?;
        if starts == StartKind::LeftOut {
            a.bts(rcx, slot::LEFT_OUT_BIT)?;
        }
        a.lock().cmpxchg16b(xmmword_ptr(rdi))?;
        a.jne(again)
    };
    a.set_label(&mut again)?;
    search(a, end, pointers, true, same)?;
    a.test(rcx, rcx)?;
    a.je(no_room)?;
    a.mov(rdi, rcx)?;
    a.xor(eax, eax)?;
    a.xor(edx, edx)?;
    write(a, again)?;
    a.jmp(written)?;

    // It replaces a start, which is left without a stop.
    a.set_label(&mut same)?;
    a.mov(rax, r8)?;
    write(a, again)?;
    a.mov(r9, rdx)?;
    load(a, rbx, pointers.shared)?;
    a.test(r9, r9)?;
    a.js(over)?;
    count(a, end, pointers, pair_slots::slot::REPLACED_STARTS, over)?;
    a.jmp(over)?;

    a.set_label(&mut no_room)?;
    count(
        a,
        end,
        pointers,
        pair_slots::slot::STARTS_WITHOUT_ROOM,
        over,
    )?;
    a.set_label(&mut written)?;
    load(a, rbx, pointers.shared)
}

/// Emits the code that takes the start for a stop out of the table, and puts its time in r9 and the address of the
/// thread's slot in rcx. Goes to `over` if there is no start, or it is left out, or the thread has no slot.
fn take_start(
    a: &mut CodeAssembler,
    end: PairEnd,
    pointers: &Pointers,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let (mut again, mut same) = (a.create_label(), a.create_label());
    a.set_label(&mut again)?;
    search(a, end, pointers, false, same)?;
    count(a, end, pointers, pair_slots::slot::UNMATCHED_STOPS, over)?;
    a.jmp(over)?;

    a.set_label(&mut same)?;
    a.mov(rax, r8)?;
    a.xor(ebx, ebx)?;
    a.xor(ecx, ecx)?;
    a.lock().cmpxchg16b(xmmword_ptr(rdi))?;
    a.jne(again)?;
    a.mov(r9, rdx)?;
    load(a, rbx, pointers.shared)?;
    a.test(r9, r9)?;
    a.js(over)?;
    find_slot(a, end, pointers.layout, over)?;
    reset_slot_of_exited_thread(a)
}

/// Emits the code that adds one to a field of the thread's slot; goes to `over` if it has none.
fn count(
    a: &mut CodeAssembler,
    end: PairEnd,
    pointers: &Pointers,
    field: u64,
    over: CodeLabel,
) -> Result<(), IcedError> {
    find_slot(a, end, pointers.layout, over)?;
    reset_slot_of_exited_thread(a)?;
    a.inc(qword_ptr(rcx + field))
}
