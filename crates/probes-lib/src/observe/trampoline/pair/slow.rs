//! The code at the ends of a pair that writes a record into the ring for each slow one, if these are reported: at a
//! start, it keeps the arguments; at a stop, it compares the time, and if that is long, it writes the record.

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, dword_ptr, eax, edi, edx, qword_ptr, r8, r9, rax, rbx, rcx, rdi, rdx,
    rsi,
};

use super::super::at_point::PointContext;
use super::super::emit::{offset, time, word_at};
use super::super::fields::FieldCopies;
use super::super::function_record::Arguments;
use super::super::record;
use crate::observe::layout::kept_starts::{DEPTH_BITS, INCOMPLETE, KEY_BITS};
use crate::observe::layout::pair_slots::SLOT_LEN_BITS;
use crate::observe::layout::shared::{SLOW_FROM, SharedLayout, TID_AT, record as layout_of};
use crate::observe::role::{PairEnd, WatchRole};

/// Which entry of the table of kept starts ([`kept_starts`](crate::observe::layout::kept_starts)) is that of a start.
#[derive(Clone, Copy)]
pub(super) struct StartPlace {
    pair: u32,
    is_by_key: bool,
}

impl StartPlace {
    /// Returns the entry of the key whose hash is in r8.
    pub(super) fn of_key(end: PairEnd) -> StartPlace {
        StartPlace {
            is_by_key: true,
            ..StartPlace::of_slot(end)
        }
    }

    /// Returns the entry of the thread's slot, which is at rcx, and of a depth in rdx: how many starts wait, without
    /// the one that begins or ends.
    pub(super) fn of_slot(end: PairEnd) -> StartPlace {
        let (PairEnd::Start(pair) | PairEnd::Stop(pair)) = end;
        StartPlace {
            pair,
            is_by_key: false,
        }
    }

    /// Emits the code that puts its address in rdx. Expects the hash of the key in r8, or the address of the slot in
    /// rcx and the depth in rdx; and the address of the shared data in rbx. Changes rax.
    fn find(self, a: &mut CodeAssembler, layout: SharedLayout) -> Result<(), IcedError> {
        if self.is_by_key {
            a.mov(rax, r8)?;
            a.shr(rax, 64 - KEY_BITS)?;
        } else {
            a.and(edx, (1 << DEPTH_BITS) - 1)?;
            a.mov(rax, rcx)?;
            a.sub(rax, rbx)?;
            a.sub(rax, offset(layout.slots(self.pair)))?;
            a.shr(rax, SLOT_LEN_BITS - DEPTH_BITS)?;
            a.add(rax, rdx)?;
        }
        a.imul_3(rax, rax, layout.kept_len as i32)?;
        a.lea(
            rdx,
            qword_ptr(rbx + rax + offset(layout.kept_starts(self.pair))),
        )
    }
}

/// Emits the code that keeps a start. Expects the address of the shared data in rbx and the time in rsi; preserves rbx
/// and r8, and leaves in rsi the time of the start: that is taken when the arguments have been copied, so that the pair
/// does not include how long that takes.
pub(super) fn keep(
    a: &mut CodeAssembler,
    place: StartPlace,
    reported: &WatchRole,
    context: PointContext,
) -> Result<(), IcedError> {
    let layout = context.layout;
    let mut done = a.create_label();
    place.find(a, layout)?;
    a.mov(rcx, rdx)?;
    // An incomplete entry is being written by another thread, or by this one if a signal handler has interrupted it:
    // it is left alone.
    a.mov(eax, INCOMPLETE as u32)?;
    if place.is_by_key {
        a.xchg(word_at(rcx, layout_of::NUMBER), rax)?;
        a.cmp(rax, INCOMPLETE as i32)?;
        a.je(done)?;
    } else {
        a.cmp(word_at(rcx, layout_of::NUMBER), rax)?;
        a.je(done)?;
        a.mov(word_at(rcx, layout_of::NUMBER), rax)?;
    }
    a.mov(word_at(rcx, layout_of::TIME), rsi)?;
    a.mov(eax, dword_ptr(rbx + offset(TID_AT)))?;
    a.mov(eax, dword_ptr(rax).fs())?;
    a.mov(dword_ptr(rcx + layout_of::TID), eax)?;
    a.mov(dword_ptr(rcx + layout_of::POINT), reported.point)?;
    arguments(a, reported, context)?;
    time(a, rsi)?;
    a.mov(word_at(rcx, layout_of::TIME), rsi)?;
    a.mov(word_at(rcx, layout_of::NUMBER), rsi)?;
    a.set_label(&mut done)?;
    // A label needs an instruction.
    a.nop()
}

/// Emits the code that goes to `not_slow` unless the time from the start, in r9, to the stop, in rsi, is long. Expects
/// the address of the shared data in rbx; uses rax.
pub(super) fn unless_slow(a: &mut CodeAssembler, not_slow: CodeLabel) -> Result<(), IcedError> {
    a.mov(rax, rsi)?;
    a.sub(rax, r9)?;
    // A negative time counts as a long one; the reader takes it for zero, and drops the record.
    a.cmp(rax, qword_ptr(rbx + offset(SLOW_FROM)))?;
    a.jb(not_slow)
}

/// Emits the code that records a pair: the stop, and what was kept of the start. Expects the address of the shared data
/// in rbx, the time of the start in r9, and that of the stop in rsi; changes all registers but rbx.
pub(super) fn report(
    a: &mut CodeAssembler,
    place: StartPlace,
    reported: &WatchRole,
    context: PointContext,
) -> Result<(), IcedError> {
    let layout = context.layout;
    let mut next = a.create_label();
    let mut unknown = a.create_label();
    let mut known = a.create_label();
    place.find(a, layout)?;
    let claimed = record::begin(a, reported.point | layout_of::SLOW, false, layout)?;
    let start = u64::from(layout.kept_len);
    a.mov(dword_ptr(rcx + (start + layout_of::NUMBER)), place.pair)?;
    a.mov(qword_ptr(rcx + (start + layout_of::TIME)), r9)?;
    a.cmp(word_at(rdx, layout_of::NUMBER), r9)?;
    a.jne(unknown)?;
    a.mov(edi, layout.kept_len - layout_of::TID as u32)?;
    a.set_label(&mut next)?;
    let last = layout_of::TID - 8;
    a.mov(rax, qword_ptr(rdx + rdi + last))?;
    a.mov(qword_ptr(rcx + rdi + (start + last)), rax)?;
    a.sub(edi, 8)?;
    a.jne(next)?;
    // Another start may have overwritten it meanwhile.
    a.cmp(word_at(rdx, layout_of::NUMBER), r9)?;
    a.je(known)?;
    a.set_label(&mut unknown)?;
    let point = dword_ptr(rcx + (start + layout_of::POINT));
    a.mov(point, layout_of::UNKNOWN_POINT)?;
    a.set_label(&mut known)?;
    arguments(a, reported, context)?;
    claimed.end_with_stack(a, reported, context)
}

/// Emits the code that records the arguments. Those of a USDT probe are recorded as when it is watched.
fn arguments(
    a: &mut CodeAssembler,
    reported: &WatchRole,
    context: PointContext,
) -> Result<(), IcedError> {
    let PointContext { layout, shared, .. } = context;
    let mut fields = FieldCopies::default();
    match reported.function {
        Some(function) => Arguments {
            sources: &reported.arguments,
            formats: &reported.formats,
            words: function.words,
            context,
        }
        .emit(a, &mut fields)?,
        None => record::arguments(a, reported, context, &mut fields)?,
    }
    fields.emit_here(a, layout, shared)
}
