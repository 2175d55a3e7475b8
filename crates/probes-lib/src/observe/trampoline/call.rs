//! The code of a trampoline where calls of a function that is timed begin or end: at the entry, pushes the time to the
//! calls of its stack in the shared data; at an exit, pops it and adds the time between to a histogram.
//!
//! ```text
//! entry   calls whose frame is this one or an inner one (at this address or a lower one) have gone: unwound
//!         push frame, function, time
//! exit    calls whose frame is an inner one, or this one of another function, have gone: unwound
//!         if the last call left is of this frame and this function, pop it: it lasted until now;
//!         else the exit is unmatched
//! ```
//!
//! A signal handler that interrupts this code may call functions that are timed. So the record of a call is reserved
//! (the depth is incremented) before it is written; its frame is written last, and cleared first of all before the
//! record is freed. A record without a frame is incomplete.
//!
//! For self times, the time of a call that ends is added to the children of the call that has made it: the last one
//! left on the stack. If that record is incomplete, its call has not begun yet, or has ended: then the time is that of
//! a child of the call before, and the incomplete one begins no earlier than the child has ended. A call that was
//! unwound or lost has no time; the one that has made it is then marked as doubtful.
//!
//! If times are distinguished by keys, the histogram of the key is found at the entry, and its number is in the record.
//!
//! If calls are filtered, one that is left out is pushed as well, with a mark: so its exit does not end another call.
//!
//! Registers are saved on the stack (trampoline/saved.rs). Where there is no room, they are saved in MMX registers if
//! the x87 unit is not in use: in OCaml code, and at the entry of a function of C that does not use it (at its exits,
//! it may hold a `long double` result); elsewhere, under a lock. At an entry with a filter or keys that may use MMX
//! registers, they are saved in these only.

use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, dword_ptr, ecx, edi, edx, esi, qword_ptr, r8, r8d, r9, rax, rbx, rcx,
    rdi, rdx, rsi,
};
use iced_x86::{Code, IcedError, Instruction};

pub(super) mod freed_stack;
mod last_call;
mod self_time;
mod slots;
mod slow_call;

use last_call::{before, clear, count_last, drop_others, free, last_call, last_flags, locate_last};
use self_time::{add_self_time, doubt_parent, doubt_parent_of_last};
use slots::{find_other_slot, find_slot, take_slot};

use super::SAVED_IF_TIMED;
use super::at_point::PointContext;
use super::callers;
use super::emit::{at_address, load, offset, time, unless_in_range, word_at};
use super::filter;
use super::function_record::RecordPointers;
use super::histogram::{self, Histograms};
use super::saved::{RegisterSaver, SaveArea};
use super::{keys, values};
use crate::address::LiveAddr;
use crate::observe::layout::calls::{CallsLayout, call_slot, function_data, sums};
use crate::observe::layout::keys::histograms;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::{FilterRole, KeyRole, StackKind, TimedRole, WatchRole};
use crate::patch_plan::displaced::ExitKind;

/// From this bit on, a register that holds the address of a slot has the depth: addresses have fewer bits.
const DEPTH_AT: u32 = 48;

/// Where a call begins or ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CallEnd {
    Entry,
    Exit(ExitKind),
}

/// Which calls are timed, and what else is done with them.
#[derive(Clone, Copy)]
pub(super) struct TimedCalls<'r> {
    pub(super) role: &'r TimedRole,
    /// Which of its calls; `None`: all.
    pub(super) filter: Option<&'r FilterRole>,
    /// The keys by which times are distinguished.
    pub(super) keys: Option<&'r KeyRole>,
    /// What is recorded of slow ones, if they are reported.
    pub(super) reported: Option<&'r WatchRole>,
    /// Whether only those whose time is in a range are recorded.
    pub(super) are_in_range: bool,
}

/// Returns the code at `at` for the entry of a function, or for an exit. `mmx_is_free`: the function uses neither
/// the MMX registers nor the x87 unit.
pub(super) fn code(
    at: LiveAddr,
    what: CallEnd,
    mmx_is_free: bool,
    timed: TimedCalls<'_>,
    pointers: RecordPointers,
) -> Result<Vec<u8>, IcedError> {
    let TimedCalls {
        role,
        filter,
        keys,
        reported,
        are_in_range,
    } = timed;
    let mut a = CodeAssembler::new(64)?;
    let is_entry = what == CallEnd::Entry;
    let may_use_mmx = is_entry && mmx_is_free || role.is_ocaml;
    let asks = is_entry && (filter.is_some() || keys.is_some());
    let place = if !may_use_mmx {
        SaveArea::StackOrLock
    } else if asks {
        SaveArea::Mmx
    } else {
        SaveArea::StackOrMmx
    };
    let used = match role.stack {
        _ if asks => SAVED_IF_TIMED.len(),
        StackKind::OfThread if is_entry => 6,
        StackKind::OfThread if !pointers.layout.calls.of_self && reported.is_none() => 7,
        StackKind::OfThread | StackKind::OfFiber { .. } => 8,
    };
    let shared = (pointers.shared, pointers.layout);
    let mut over = a.create_label();
    let mut saver = RegisterSaver::new(&mut a, place, used, pointers.saved);
    if role.is_from_start {
        // A forked child has the same stacks as its parent, and shares the data with it: it records nothing.
        let in_program = at_address(pointers.in_program);
        a.add_instruction(Instruction::with2(Code::Cmp_rm8_imm8, in_program, 0)?)?;
        a.je(saver.end())?;
    }
    saver.save(&mut a)?;
    let calls = Calls {
        role,
        shared,
        are_filtered: filter.is_some() || are_in_range,
        are_in_range,
        have_flags: filter.is_some() || keys.is_some(),
        have_keys: keys.is_some(),
    };
    let context = saver.context(pointers.shared, pointers.layout);
    if asks {
        choose(&mut a, (filter, keys), calls, context)?;
    }
    load(&mut a, rbx, shared.0)?;
    match what {
        CallEnd::Entry => entry(&mut a, calls, (reported, context), over)?,
        CallEnd::Exit(kind) => {
            let report = reported.map(|reported| slow_call::ExitReport {
                reported,
                kind,
                context,
            });
            exit(&mut a, calls, report, context, over)?;
        }
    }
    a.set_label(&mut over)?;
    saver.restore(&mut a)?;
    a.assemble(at.0)
}

/// What the code is made for.
#[derive(Clone, Copy)]
struct Calls<'r> {
    role: &'r TimedRole,
    /// Where the address of the shared data is, and their layout.
    shared: (LiveAddr, SharedLayout),
    /// Whether some calls are left out, of this function or of others.
    are_filtered: bool,
    /// Whether those are left out whose time is not in a range.
    are_in_range: bool,
    /// Whether [`choose`] computes the flags of a call at the entry.
    have_flags: bool,
    /// Whether times are distinguished by keys, of this function and of others.
    have_keys: bool,
}

/// Emits the code that puts in r8 the flags of a call that begins: whether a filter leaves it out, and which histogram
/// its key has. Changes the other saved registers.
fn choose(
    a: &mut CodeAssembler,
    (filter, keys): (Option<&FilterRole>, Option<&KeyRole>),
    calls: Calls<'_>,
    context: PointContext,
) -> Result<(), IcedError> {
    let (mut left_out, mut untyped) = (a.create_label(), a.create_label());
    let (mut without_key, mut chosen) = (a.create_label(), a.create_label());
    let Calls { role, shared, .. } = calls;
    if let Some(filter) = filter {
        filter::filter(a, filter, context, left_out, untyped)?;
    }
    a.xor(r8d, r8d)?;
    if let Some(keys) = keys {
        keys::histogram(a, keys, false, context, without_key)?;
        a.shl(r8d, call_slot::HISTOGRAM_AT)?;
    }
    a.jmp(chosen)?;
    if keys.is_some() {
        a.set_label(&mut without_key)?;
        let untyped = histograms::UNTYPED_TIMES << call_slot::HISTOGRAM_AT;
        a.mov(r8d, untyped)?;
        a.jmp(chosen)?;
    }
    if filter.is_some() {
        a.set_label(&mut untyped)?;
        load(a, rbx, shared.0)?;
        count(a, role, shared, function_data::UNTYPED)?;
        a.set_label(&mut left_out)?;
        a.mov(r8d, call_slot::IS_LEFT_OUT)?;
    }
    a.set_label(&mut chosen)?;
    a.nop()
}

/// Emits the code that begins a call. Expects the address of the shared data in rbx and, if there is a filter or keys,
/// the flags of the call in r8.
fn entry(
    a: &mut CodeAssembler,
    calls: Calls<'_>,
    (reported, context): (Option<&WatchRole>, PointContext),
    over: CodeLabel,
) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut find = a.create_label();
    let mut found = a.create_label();
    let mut too_deep = a.create_label();
    let mut lost = a.create_label();
    let mut again = a.create_label();
    let mut others = a.create_label();
    let mut push = a.create_label();
    a.set_label(&mut find)?;
    find_slot(a, role, shared, lost)?;
    a.je(found)?;
    take_slot(a, shared, find, lost)?;
    a.set_label(&mut found)?;
    a.nop()?;
    a.set_label(&mut again)?;
    locate_last(a, layout, push)?;
    if is_on_fiber(role) {
        a.cmp(last_call(layout, call_slot::CALL_OWNER), r9)?;
        a.jne(others)?;
    }
    // The call is gone if its frame is this one or an inner one; not if it has no frame.
    a.mov(rdi, last_call(layout, call_slot::FRAME))?;
    a.dec(rdi)?;
    a.cmp(rdi, rsi)?;
    a.jae(push)?;
    clear(a, layout)?;
    count_last(a, shared.1, calls.are_filtered, function_data::UNWOUND)?;
    if layout.of_self {
        a.mov(rdi, last_call(layout, call_slot::CHILDREN))?;
        doubt_parent_of_last(a, role, shared)?;
    }
    free(a)?;
    a.jmp(again)?;

    a.set_label(&mut others)?;
    drop_others(a, calls, again)?;

    if layout.of_self {
        a.set_label(&mut too_deep)?;
        a.xor(edi, edi)?;
        doubt_parent(a, layout, role)?;
    }
    a.set_label(&mut lost)?;
    count(a, role, shared, function_data::LOST)?;
    a.jmp(over)?;

    a.set_label(&mut push)?;
    a.cmp(edx, call_slot::MAX_CALLS as i32)?;
    a.jae(if layout.of_self { too_deep } else { lost })?;
    // A signal handler leaves the depth as it finds it, unless it is executed on a stack above: see `free`.
    a.mov(rax, rdx)?;
    a.lea(rdi, qword_ptr(rdx + 1))?;
    a.cmpxchg(word_at(rcx, call_slot::DEPTH), rdi)?;
    a.jne(again)?;
    write_record(a, calls, reported, context)
}

/// Emits the code that writes the record of a call; the record was reserved in the slot at rcx, after rdx others.
fn write_record(
    a: &mut CodeAssembler,
    calls: Calls<'_>,
    reported: Option<&WatchRole>,
    context: PointContext,
) -> Result<(), IcedError> {
    let role = calls.role;
    let layout = calls.shared.1.calls;
    a.shl(edx, layout.call_len_bits())?;
    a.lea(rcx, qword_ptr(rcx + rdx + call_slot::CALLS))?;
    a.mov(dword_ptr(rcx + call_slot::FUNCTION), role.function)?;
    if is_on_fiber(role) {
        a.mov(word_at(rcx, call_slot::CALL_OWNER), r9)?;
    }
    let flags = dword_ptr(rcx + call_slot::FLAGS);
    if calls.have_flags {
        a.mov(flags, r8d)?;
    } else if layout.of_self || calls.are_in_range {
        a.mov(flags, 0)?;
    }
    if layout.of_self {
        for field in [
            call_slot::CHILDREN,
            call_slot::CHILD_ENDED,
            call_slot::NOT_BEFORE,
        ] {
            a.mov(qword_ptr(rcx + field), 0)?;
        }
    }
    if let Some(reported) = reported {
        slow_call::keep(a, reported, context)?;
    }
    time(a, rax)?;
    a.mov(word_at(rcx, call_slot::TIME), rax)?;
    a.mov(word_at(rcx, call_slot::FRAME), rsi)?;
    Ok(())
}

/// Emits the code that ends a call. Expects the address of the shared data in rbx.
fn exit(
    a: &mut CodeAssembler,
    calls: Calls<'_>,
    report: Option<slow_call::ExitReport<'_>>,
    context: PointContext,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut again = a.create_label();
    let mut gone = a.create_label();
    let mut others = a.create_label();
    let mut found = a.create_label();
    let mut ended = a.create_label();
    let mut outer = a.create_label();
    let mut none = a.create_label();
    time(a, r8)?;
    find_slot(a, role, shared, over)?;
    a.je(found)?;
    find_other_slot(a, layout, found)?;
    if layout.of_self {
        a.jmp(none)?;
        a.set_label(&mut outer)?;
        // The entry of this call was not recorded.
        a.xor(edi, edi)?;
        doubt_parent(a, layout, role)?;
    }
    a.set_label(&mut none)?;
    count(a, role, shared, function_data::UNMATCHED)?;
    a.jmp(over)?;

    a.set_label(&mut found)?;
    a.nop()?;
    a.set_label(&mut again)?;
    locate_last(a, layout, none)?;
    a.mov(rdi, last_call(layout, call_slot::FRAME))?;
    if is_on_fiber(role) {
        a.cmp(last_call(layout, call_slot::CALL_OWNER), r9)?;
        a.jne(others)?;
    }
    a.cmp(rdi, rsi)?;
    a.ja(if layout.of_self { outer } else { none })?;
    a.jb(gone)?;
    a.cmp(
        dword_ptr(rcx + rax + before(layout, call_slot::FUNCTION)),
        role.function as i32,
    )?;
    a.je(ended)?;
    a.set_label(&mut gone)?;
    drop_last(a, calls)?;
    a.jmp(again)?;

    a.set_label(&mut others)?;
    drop_others(a, calls, again)?;

    a.set_label(&mut ended)?;
    if calls.are_in_range {
        leave_out_by_time(a, layout)?;
    }
    if let Some(report) = report {
        report.if_slow(a, calls)?;
    }
    if layout.of_self {
        return add_self_time(a, calls);
    }
    end_last(a, calls, context, none, over)
}

/// Emits the code that drops the last call, whose frame is in rdi: it has ended without an exit.
fn drop_last(a: &mut CodeAssembler, calls: Calls<'_>) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut not_begun = a.create_label();
    clear(a, layout)?;
    // Without a frame, the record was not complete: its function is not known.
    a.test(rdi, rdi)?;
    a.je(not_begun)?;
    count_last(a, shared.1, calls.are_filtered, function_data::UNWOUND)?;
    if layout.of_self {
        a.mov(rdi, last_call(layout, call_slot::CHILDREN))?;
    }
    a.set_label(&mut not_begun)?;
    a.nop()?;
    if layout.of_self {
        doubt_parent_of_last(a, role, shared)?;
    }
    free(a)
}

/// Emits the code that ends the last call, which is located, at the time in r8, and adds its time. It goes to `none` if
/// a signal handler has freed its record.
fn end_last(
    a: &mut CodeAssembler,
    calls: Calls<'_>,
    context: PointContext,
    none: CodeLabel,
    over: CodeLabel,
) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut is_positive = a.create_label();
    if calls.are_filtered || calls.have_keys {
        a.mov(edi, last_flags(layout))?;
    }
    a.sub(r8, last_call(layout, call_slot::TIME))?;
    // The time stamp counters of two processors may differ a little: a negative time becomes 0.
    a.jnc(is_positive)?;
    a.xor(r8d, r8d)?;
    a.set_label(&mut is_positive)?;
    clear(a, layout)?;
    free(a)?;
    a.jne(none)?;
    if calls.are_filtered {
        a.test(edi, call_slot::IS_LEFT_OUT as i32)?;
        a.jne(over)?;
    }
    if !calls.have_keys {
        return add_time(a, role, shared);
    }
    a.mov(esi, edi)?;
    add_time(a, role, shared)?;
    a.mov(rcx, r8)?;
    a.mov(r8d, esi)?;
    a.shr(r8d, call_slot::HISTOGRAM_AT)?;
    values::add_time(a, context)
}

/// Emits the code that marks the last call, which is located and ended at the time in r8, as left out, unless its time
/// is in the range that is recorded. Uses rdi.
fn leave_out_by_time(a: &mut CodeAssembler, layout: CallsLayout) -> Result<(), IcedError> {
    let mut is_positive = a.create_label();
    let (mut left_out, mut over) = (a.create_label(), a.create_label());
    a.mov(rdi, r8)?;
    a.sub(rdi, last_call(layout, call_slot::TIME))?;
    a.jnc(is_positive)?;
    a.xor(edi, edi)?;
    a.set_label(&mut is_positive)?;
    unless_in_range(a, rdi, left_out)?;
    a.jmp(over)?;
    a.set_label(&mut left_out)?;
    a.or(last_flags(layout), call_slot::IS_LEFT_OUT as i32)?;
    a.set_label(&mut over)?;
    a.nop()
}

fn is_on_fiber(role: &TimedRole) -> bool {
    matches!(role.stack, StackKind::OfFiber { .. })
}

/// Returns the offset of a field of the function in the shared data.
fn field(role: &TimedRole, shared: (LiveAddr, SharedLayout), field: u64) -> i32 {
    let layout = shared.1;
    offset(layout.calls() + layout.calls.function(role.function) + field)
}

fn count(
    a: &mut CodeAssembler,
    role: &TimedRole,
    shared: (LiveAddr, SharedLayout),
    what: u64,
) -> Result<(), IcedError> {
    a.lock().inc(qword_ptr(rbx + field(role, shared, what)))
}

/// Emits the code that counts the time in r8 in the histogram of the function and, if callers are distinguished, for
/// the caller. If it is a self time, it is added to the sum of these, and the time in rsi to that of times from entry
/// to exit.
fn add_time(
    a: &mut CodeAssembler,
    role: &TimedRole,
    shared: (LiveAddr, SharedLayout),
) -> Result<(), IcedError> {
    let mut is_longer = a.create_label();
    let mut is_shorter = a.create_label();
    let mut is_known = a.create_label();
    let of_function = |what| qword_ptr(rbx + field(role, shared, what));
    a.set_label(&mut is_longer)?;
    a.mov(rax, of_function(function_data::MAX))?;
    a.cmp(rax, r8)?;
    a.jae(is_shorter)?;
    a.lock().cmpxchg(of_function(function_data::MAX), r8)?;
    a.jne(is_longer)?;
    a.set_label(&mut is_shorter)?;
    a.mov(rdx, r8)?;
    let layout = shared.1;
    let precision = layout.calls.precision();
    histogram::bucket(a, precision)?;
    // Its octave.
    a.mov(ecx, edx)?;
    a.shr(ecx, precision)?;
    a.mov(rax, of_function(function_data::OCTAVES))?;
    a.bt(rax, rcx)?;
    a.jc(is_known)?;
    a.lock().bts(of_function(function_data::OCTAVES), rcx)?;
    a.set_label(&mut is_known)?;
    let histograms = Histograms {
        at: layout.calls() + layout.calls.histogram(role.function, 0),
        len: layout.calls.histogram_len(),
        group_bits: layout.calls.group_bits(),
        by_fs_base: role.is_from_start,
        groups: Some(layout.calls() + layout.calls.function(role.function) + function_data::GROUPS),
    };
    histogram::add(a, histograms)?;
    if layout.calls.of_self {
        let sum = |of| {
            let at = layout.calls() + layout.calls.sums(role.function, 0) + of;
            qword_ptr(rax + offset(at))
        };
        a.lock().add(sum(sums::OWN), r8)?;
        a.lock().add(sum(sums::ALL), rsi)?;
    }
    if layout.calls.by_caller {
        callers::add(a, layout, role.function)?;
    }
    Ok(())
}
