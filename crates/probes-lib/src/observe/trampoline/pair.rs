//! The code of a trampoline at the start or the stop of a pair: at a start, pushes the time to the
//! thread's stack of starts in the shared data; at a stop, pops it and adds the time between to a
//! histogram. Or, by a key, in a table of all threads (`keyed.rs`).

mod interleaving;
mod keyed;
mod slow;

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, dword_ptr, eax, edx, qword_ptr, r8, r9, rax, rbx, rcx, rdi, rdx, rsi,
};

use super::Pointers;
use super::at_point::PointContext;
use super::emit::{find_shared_and_time, offset, spread, unless_in_range, word_at};
use super::filter;
use super::histogram::{self, Histograms};
use super::keys;
use super::values;
use crate::observe::layout::groups::GROUP_BITS;
use crate::observe::layout::histogram::{HISTOGRAM_LEN, PRECISION};
use crate::observe::layout::pair_slots::{SLOT_BITS, SLOT_LEN, SLOT_LEN_BITS, SLOTS_TRIED, slot};
use crate::observe::layout::shared::{self, SLOT_OVERFLOWS, SharedLayout};
use crate::observe::role::{KeyRole, Marks, PairEnd, PairFilter, Role, WatchRole};

/// A point as the end of pairs.
#[derive(Clone, Copy)]
pub(super) struct Ends<'r> {
    pub(super) ends: &'r [PairEnd],
    pub(super) marks: &'r Marks,
    pub(super) key: Option<&'r KeyRole>,
    pub(super) filter: &'r PairFilter,
    /// The keys by which times are distinguished, at a stop (`latency -by`).
    pub(super) time_keys: Option<&'r KeyRole>,
    /// What is recorded of slow pairs, if they are reported.
    pub(super) reported: Option<&'r WatchRole>,
    /// Whether only pairs with times of a range are recorded.
    pub(super) are_in_range: bool,
}

/// Emits the code of a point that is the end of pairs. Expects in the copies of the saved registers what these held at
/// the point, and does not change the copies. Changes all of the registers themselves; in the end, the address of the
/// shared data is in rbx, and the time in rsi.
pub(super) fn ends(
    a: &mut CodeAssembler,
    ends: Ends<'_>,
    pointers: &Pointers,
    context: PointContext,
) -> Result<(), IcedError> {
    let PairFilter::Starts(filter) = ends.filter else {
        let starts = StartKind::Timed;
        return ends.emit(a, starts, pointers, context);
    };
    let (mut left_out, mut untyped) = (a.create_label(), a.create_label());
    let mut over = a.create_label();
    filter::filter(a, filter, context, left_out, untyped)?;
    ends.emit(a, StartKind::Timed, pointers, context)?;
    a.jmp(over)?;
    a.set_label(&mut untyped)?;
    ends.count(a, pointers, |end| match end {
        PairEnd::Start(_) => &[slot::UNTYPED],
        PairEnd::Stop(_) => &[],
    })?;
    a.set_label(&mut left_out)?;
    ends.emit(a, StartKind::LeftOut, pointers, context)?;
    a.set_label(&mut over)?;
    // A label needs an instruction, and the caller may set another label here.
    a.nop()
}

/// What is done with each time.
#[derive(Clone, Copy)]
struct KeptTimes {
    /// Whether they are kept in r8.
    keeps_time: bool,
    /// Whether only those of a range are recorded.
    are_in_range: bool,
}

/// What is done with a start.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StartKind {
    Timed,
    /// Its time is not recorded, but its stop has to find it.
    LeftOut,
}

impl Ends<'_> {
    /// Returns the ends of a role.
    pub(super) fn of(role: &Role) -> Ends<'_> {
        Ends {
            ends: &role.ends,
            marks: &role.marks,
            key: role.pair_key.as_deref(),
            filter: &role.pair_filter,
            time_keys: role.time_keys.as_deref(),
            reported: role.reported.as_ref(),
            are_in_range: role.is_in_range,
        }
    }

    fn emit(
        self,
        a: &mut CodeAssembler,
        starts: StartKind,
        pointers: &Pointers,
        context: PointContext,
    ) -> Result<(), IcedError> {
        let (mut untyped, mut over) = (a.create_label(), a.create_label());
        if let Some(key) = self.key {
            keys::hash(a, key, context, untyped)?;
            a.mov(r8, rdx)?;
        }
        find_shared_and_time(a, pointers)?;
        let kept_times = KeptTimes {
            keeps_time: self.time_keys.is_some(),
            are_in_range: self.are_in_range,
        };
        for (index, end) in self.ends.iter().enumerate() {
            let mut next = a.create_label();
            let is_kept = matches!(end, PairEnd::Start(_)) && starts == StartKind::Timed;
            match (self.key.is_some(), self.reported) {
                (true, Some(reported)) if is_kept => {
                    let kept = slow::StartPlace::of_key(*end);
                    slow::keep(a, kept, reported, context)?;
                    keyed::end(a, *end, starts, pointers, kept_times, next)?;
                }
                (true, _) => keyed::end(a, *end, starts, pointers, kept_times, next)?,
                (false, reported) => {
                    if let Some(reported) = reported.filter(|_| is_kept) {
                        find_slot(a, *end, pointers.layout, next)?;
                        reset_slot_of_exited_thread(a)?;
                        a.mov(rdx, word_at(rcx, slot::DEPTH))?;
                        let kept = slow::StartPlace::of_slot(*end);
                        slow::keep(a, kept, reported, context)?;
                    }
                    self.nested_end(a, *end, starts, context, pointers.layout, next)?;
                }
            }
            if let (PairEnd::Stop(pair), Some(keys)) = (end, self.time_keys) {
                add_by_key(a, keys, *pair, context)?;
                if let Some(key) = self.key.filter(|_| index + 1 < self.ends.len()) {
                    keys::hash(a, key, context, untyped)?;
                    a.mov(r8, rdx)?;
                }
                find_shared_and_time(a, pointers)?;
            }
            if let (PairEnd::Stop(_), Some(reported)) = (end, self.reported) {
                slow::unless_slow(a, next)?;
                let kept = if self.key.is_some() {
                    slow::StartPlace::of_key(*end)
                } else {
                    a.mov(rcx, rdi)?;
                    a.mov(rdx, word_at(rcx, slot::DEPTH))?;
                    slow::StartPlace::of_slot(*end)
                };
                slow::report(a, kept, reported, context)?;
                // The report has changed the registers. The time is taken again, so that a pair that begins here does
                // not include what the report took.
                if let Some(key) = self.key.filter(|_| index + 1 < self.ends.len()) {
                    keys::hash(a, key, context, untyped)?;
                    a.mov(r8, rdx)?;
                }
                find_shared_and_time(a, pointers)?;
            }
            a.set_label(&mut next)?;
            // A label needs an instruction.
            a.nop()?;
        }
        if self.key.is_some() {
            a.jmp(over)?;
            a.set_label(&mut untyped)?;
            // A start that is left out was not chosen, or is counted as untyped already.
            self.count(a, pointers, |end| match end {
                PairEnd::Start(_) if starts == StartKind::LeftOut => &[slot::WITHOUT_KEY],
                _ => &[slot::WITHOUT_KEY, slot::UNTYPED],
            })?;
            a.set_label(&mut over)?;
        }
        a.nop()
    }

    /// Emits the code of a start, or of a stop that belongs to the last start of its thread. Expects the address of the
    /// shared data in rbx and the time in rsi, and preserves them. Goes to `over` if the thread has no slot, or the
    /// stop has no start, or its time is not recorded. After a stop, if slow pairs are reported, the slot is at rdi,
    /// and the time of the start in r9.
    fn nested_end(
        self,
        a: &mut CodeAssembler,
        end: PairEnd,
        starts: StartKind,
        context: PointContext,
        layout: SharedLayout,
        over: CodeLabel,
    ) -> Result<(), IcedError> {
        find_slot(a, end, layout, over)?;
        reset_slot_of_exited_thread(a)?;
        match end {
            PairEnd::Start(_) => {
                push_start(a, starts, *self.filter != PairFilter::All)?;
                interleaving::mark_start(a, self.marks, context)?;
            }
            PairEnd::Stop(pair) => {
                let is_filtered = *self.filter != PairFilter::All;
                pop_start(a, is_filtered, over)?;
                interleaving::check_stop(a, self.marks, context)?;
                if is_filtered {
                    let mut is_timed = a.create_label();
                    let start = qword_ptr(rcx + rdx * 8 + slot::STARTS);
                    a.bt(start, slot::LEFT_OUT_BIT)?;
                    a.jnc(is_timed)?;
                    a.dec(word_at(rcx, slot::LEFT_OUT))?;
                    a.jmp(over)?;
                    a.set_label(&mut is_timed)?;
                }
                let start = qword_ptr(rcx + rdx * 8 + (slot::STARTS + 8));
                if self.reported.is_some() {
                    a.mov(r9, start)?;
                    a.mov(rdi, rcx)?;
                }
                a.mov(rax, rsi)?;
                a.sub(rax, start)?;
                let times = KeptTimes {
                    keeps_time: self.time_keys.is_some(),
                    are_in_range: self.are_in_range,
                };
                add_time(a, pair, layout, times, over)?;
            }
        }
        Ok(())
    }

    /// Emits the code that counts a hit in `fields` of the slot of each of its ends. Leaves the address of the shared
    /// data in rbx and the time in rsi.
    fn count(
        self,
        a: &mut CodeAssembler,
        pointers: &Pointers,
        fields: impl Fn(PairEnd) -> &'static [u64],
    ) -> Result<(), IcedError> {
        find_shared_and_time(a, pointers)?;
        let counted = self.ends.iter().map(|end| (*end, fields(*end)));
        for (end, fields) in counted.filter(|(_, fields)| !fields.is_empty()) {
            let mut over = a.create_label();
            find_slot(a, end, pointers.layout, over)?;
            reset_slot_of_exited_thread(a)?;
            for field in fields {
                a.inc(word_at(rcx, *field))?;
            }
            a.set_label(&mut over)?;
            // A label needs an instruction.
            a.nop()?;
        }
        Ok(())
    }
}

/// Puts the address of the thread's slot in rcx: the one that it has, or the next one that is free. Goes
/// to `over` if there is none.
fn find_slot(
    a: &mut CodeAssembler,
    end: PairEnd,
    layout: SharedLayout,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let (PairEnd::Start(pair) | PairEnd::Stop(pair)) = end;
    let mut found = a.create_label();
    let mut next = a.create_label();
    a.mov(rdi, qword_ptr(0).fs())?;
    a.mov(edx, dword_ptr(0).fs())?;
    spread(a, edx, SLOT_BITS)?;
    a.shl(edx, SLOT_LEN_BITS)?;
    a.lea(rcx, qword_ptr(rbx + rdx + offset(layout.slots(pair))))?;
    a.cmp(word_at(rcx, slot::OWNER), rdi)?;
    a.je(found)?;
    a.mov(edx, SLOTS_TRIED as u32)?;
    a.set_label(&mut next)?;
    a.xor(eax, eax)?;
    a.lock().cmpxchg(word_at(rcx, slot::OWNER), rdi)?;
    a.je(found)?;
    a.cmp(rax, rdi)?;
    a.je(found)?;
    a.add(rcx, SLOT_LEN as i32)?;
    a.dec(edx)?;
    a.jne(next)?;
    // Counted only at the stop, so that a time that is not measured is counted once.
    if let PairEnd::Stop(_) = end {
        a.lock()
            .inc(qword_ptr(rbx + offset(layout.pair(pair) + SLOT_OVERFLOWS)))?;
    }
    a.jmp(over)?;
    a.set_label(&mut found)
}

/// Empties the slot at rcx if it is of an earlier thread that had the same control block.
fn reset_slot_of_exited_thread(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut same = a.create_label();
    a.mov(eax, dword_ptr(rbx + offset(shared::TID_AT)))?;
    a.mov(eax, dword_ptr(rax).fs())?;
    a.cmp(dword_ptr(rcx + slot::TID), eax)?;
    a.je(same)?;
    a.mov(dword_ptr(rcx + slot::TID), eax)?;
    a.xor(eax, eax)?;
    a.xchg(word_at(rcx, slot::DEPTH), rax)?;
    a.add(word_at(rcx, slot::ABANDONED_STARTS), rax)?;
    a.set_label(&mut same)
}

/// Adds a start to those that wait in the slot at rcx.
fn push_start(
    a: &mut CodeAssembler,
    starts: StartKind,
    is_filtered: bool,
) -> Result<(), IcedError> {
    a.mov(eax, 1)?;
    a.xadd(word_at(rcx, slot::DEPTH), rax)?;
    locate_start(a)?;
    if is_filtered {
        // A start that waits is overwritten: its stop will not know whether it was left out.
        let mut over = a.create_label();
        a.mov(rdi, qword_ptr(rcx + rdx * 8 + slot::STARTS))?;
        a.btr(rdi, slot::LEFT_OUT_BIT)?;
        a.jnc(over)?;
        a.add(rdi, slot::STARTS_KEPT as i32)?;
        a.cmp(rdi, rax)?;
        a.jne(over)?;
        a.dec(word_at(rcx, slot::LEFT_OUT))?;
        a.set_label(&mut over)?;
        // There may be another label.
        a.nop()?;
    }
    if starts == StartKind::LeftOut {
        a.bts(rax, slot::LEFT_OUT_BIT)?;
        a.inc(word_at(rcx, slot::LEFT_OUT))?;
    }
    a.mov(qword_ptr(rcx + rdx * 8 + slot::STARTS), rax)?;
    a.mov(qword_ptr(rcx + rdx * 8 + (slot::STARTS + 8)), rsi)
}

/// Removes the last start that waits in the slot at rcx. Puts in rax how many are left; rdx locates the one that was
/// removed. Goes to `over` if none waits, or if it was overwritten.
fn pop_start(a: &mut CodeAssembler, is_filtered: bool, over: CodeLabel) -> Result<(), IcedError> {
    let mut none = a.create_label();
    let mut found = a.create_label();
    a.mov(rax, word_at(rcx, slot::DEPTH))?;
    a.sub(rax, 1)?;
    a.jc(none)?;
    a.mov(word_at(rcx, slot::DEPTH), rax)?;
    locate_start(a)?;
    let start = qword_ptr(rcx + rdx * 8 + slot::STARTS);
    if is_filtered {
        a.mov(rdi, start)?;
        a.btr(rdi, slot::LEFT_OUT_BIT)?;
        a.cmp(rdi, rax)?;
    } else {
        a.cmp(start, rax)?;
    }
    a.je(found)?;
    a.inc(word_at(rcx, slot::OVERWRITTEN_STARTS))?;
    a.jmp(over)?;
    a.set_label(&mut none)?;
    a.inc(word_at(rcx, slot::UNMATCHED_STOPS))?;
    a.jmp(over)?;
    a.set_label(&mut found)
}

/// Puts in rdx twice the index of the start at depth rax among the starts of the slot, which are a ring: if
/// there are too many, the innermost are kept.
fn locate_start(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(edx, eax)?;
    a.and(edx, slot::STARTS_KEPT as i32 - 1)?;
    a.add(edx, edx)
}

/// Emits the code that adds the time in r8 to the histogram of its key.
fn add_by_key(
    a: &mut CodeAssembler,
    keys: &KeyRole,
    pair: u32,
    context: PointContext,
) -> Result<(), IcedError> {
    let keys = KeyRole {
        name: pair,
        ..keys.clone()
    };
    keys::histogram_of_time(a, &keys, context)?;
    a.mov(rcx, r8)?;
    a.mov(r8, rax)?;
    values::add_time(a, context)
}

/// Records a time, which is in rax; the carry flag says whether it is negative. The thread's slot is at rcx, and the
/// address of the shared data in rbx. Uses rdx, too. If times are kept, r8 holds it then. Goes to `over` if it is not
/// in the range.
fn add_time(
    a: &mut CodeAssembler,
    pair: u32,
    layout: SharedLayout,
    KeptTimes {
        keeps_time,
        are_in_range,
    }: KeptTimes,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let mut is_positive = a.create_label();
    let mut is_shorter = a.create_label();
    a.mov(rdx, rax)?;
    // The time stamp counters of two processors may differ a little: a negative time becomes 0.
    a.jnc(is_positive)?;
    a.xor(edx, edx)?;
    a.set_label(&mut is_positive)?;
    if are_in_range {
        a.mov(rax, rdx)?;
        unless_in_range(a, rax, over)?;
    }
    if keeps_time {
        a.mov(r8, rdx)?;
    }
    a.add(word_at(rcx, slot::SUM), rdx)?;
    a.cmp(word_at(rcx, slot::MAX), rdx)?;
    a.jae(is_shorter)?;
    a.mov(word_at(rcx, slot::MAX), rdx)?;
    a.set_label(&mut is_shorter)?;
    histogram::bucket(a, PRECISION)?;
    let histograms = Histograms {
        at: layout.histograms(pair),
        len: HISTOGRAM_LEN,
        group_bits: GROUP_BITS,
        by_fs_base: false,
        groups: None,
    };
    histogram::add(a, histograms)
}
