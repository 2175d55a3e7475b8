//! The code of a trampoline where calls of a function that is timed begin or end: at the entry, pushes the time to the
//! calls of its stack in the shared data; at an exit, pops it and adds the time between to a histogram.
//!
//! ```text
//! entry   calls whose frame is this one or an inner one (at this address or a lower one) have gone: unwound
//!         push frame, function, time
//! exit    calls whose frame is an inner one, or this one of another function, have gone: unwound
//!         if the last call left is of this frame and this function, pop it: it lasted until now; else the exit is unmatched
//! ```
//!
//! A signal handler that interrupts this code may call functions that are timed. So the record of a call is reserved (the
//! depth is incremented) before it is written; its frame is written last, and cleared first of all before the record is freed. A
//! record without a frame is incomplete.
//!
//! For self times, the time of a call that ends is added to the children of the call that has made it: the last one left on the
//! stack. If that record is incomplete, its call has not begun yet, or has ended: then the time is that of a child of the call
//! before, and the incomplete one begins no earlier than the child has ended. A call that was unwound or lost has no time; the
//! one that has made it is then marked as doubtful.
//!
//! If times are distinguished by keys, the histogram of the key is found at the entry, and its number is in the record.
//!
//! If calls are filtered, one that is left out is pushed as well, with a mark: so its exit does not end another call.
//!
//! Registers are saved on the stack (trampoline/saved.rs). Where there is no room, they are saved in MMX registers if
//! the x87 unit is not in use: in OCaml code, and at the entry of a function of C that does not use it (at its exits,
//! it may hold a `long double` result); elsewhere, behind a lock. At an entry with a filter or keys that may use MMX
//! registers, they are saved in these only.

use iced_x86::code_asm::{
    AsmMemoryOperand, CodeAssembler, CodeLabel, al, byte_ptr, dword_ptr, eax, ebx, ecx, edi, edx,
    esi, qword_ptr, r8, r8d, r9, r9d, r14, rax, rbx, rcx, rdi, rdx, rsi, rsp,
};
use iced_x86::{Code, IcedError, Instruction};

mod slow_call;

use super::SAVED_IF_TIMED;
use super::at_point::PointContext;
use super::callers;
use super::emit::{at_address, load, offset, spread, unless_in_range, word_at};
use super::filter;
use super::function_record::RecordPointers;
use super::histogram::{self, Histograms};
use super::saved::{SaveArea, Saving};
use super::stack_info::{FIBER, UPPER_END};
use super::{keys, values};
use crate::address::LiveAddr;
use crate::observe::layout::calls::{CallsLayout, call_slot, function_data, sums};
use crate::observe::layout::keys::histograms;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::{FilterRole, KeyRole, StackKind, TimedRole, WatchRole};
use crate::patch_plan::displaced::ExitKind;

/// If no slot is free, that of a fiber is abandoned, and may be taken, once its outermost call is 2 to this power of ticks old,
/// about a second: an exception may have ended the fiber and its calls.
const ABANDONED_BITS: u32 = 32;

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
    /// By what times are distinguished.
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
    let mut saving = Saving::new(&mut a, place, used, pointers.saved);
    if role.is_from_start {
        // A forked child has the same stacks as its parent, and shares the data with it: it records nothing.
        let in_program = at_address(pointers.in_program);
        a.add_instruction(Instruction::with2(Code::Cmp_rm8_imm8, in_program, 0)?)?;
        a.je(saving.end())?;
    }
    saving.save(&mut a)?;
    let calls = Calls {
        role,
        shared,
        are_filtered: filter.is_some() || are_in_range,
        are_in_range,
        have_flags: filter.is_some() || keys.is_some(),
        have_keys: keys.is_some(),
    };
    let context = saving.context(pointers.shared, pointers.layout);
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
    saving.restore(&mut a)?;
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
    // Gone, if its frame is this one or an inner one; not if it has none.
    a.mov(rdi, last_call(layout, call_slot::FRAME))?;
    a.dec(rdi)?;
    a.cmp(rdi, rsi)?;
    a.jae(push)?;
    clear(a, layout)?;
    count_last(a, calls, function_data::UNWOUND)?;
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
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)?;
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
    let mut is_positive = a.create_label();
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.lea(r8, qword_ptr(rdx + rax))?;
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

/// Emits the code that drops the last call, whose frame is in rdi: it has ended without an exit.
fn drop_last(a: &mut CodeAssembler, calls: Calls<'_>) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut not_begun = a.create_label();
    clear(a, layout)?;
    // Without a frame, the record was not complete: its function is not known.
    a.test(rdi, rdi)?;
    a.je(not_begun)?;
    count_last(a, calls, function_data::UNWOUND)?;
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

/// Emits the code that ends the last call, which is located, at the time in r8, and adds its self time.
fn add_self_time(a: &mut CodeAssembler, calls: Calls<'_>) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut left_out = a.create_label();
    let mut counted = a.create_label();
    if calls.are_filtered {
        a.test(last_flags(layout), call_slot::IS_LEFT_OUT as i32)?;
        a.jne(left_out)?;
    }
    end_of_self(a, calls, true)?;
    add_time(a, role, shared)?;
    if calls.are_filtered {
        a.jmp(counted)?;
        a.set_label(&mut left_out)?;
        end_of_self(a, calls, false)?;
        a.set_label(&mut counted)?;
    }
    a.mov(rcx, r9)?;
    a.shl(rcx, 64 - DEPTH_AT)?;
    a.shr(rcx, 64 - DEPTH_AT)?;
    a.shr(r9, DEPTH_AT)?;
    a.mov(edx, r9d)?;
    free(a)
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

/// Emits the code that ends the last call, which is located and ended at the time in r8, and adds how long it lasted to
/// the children of the call that has made it. Puts how long it lasted in rsi, its self time in r8, and the address of
/// the slot in r9, with the depth from bit [`DEPTH_AT`] on: the caller frees the record once it has counted the times.
/// Until then the record is incomplete: if a signal handler that interrupts this never returns, it shows that they may
/// be missing. If `is_doubted`, a self time that may be wrong is counted as doubtful.
fn end_of_self(a: &mut CodeAssembler, calls: Calls<'_>, is_doubted: bool) -> Result<(), IcedError> {
    let Calls { role, shared, .. } = calls;
    let layout = shared.1.calls;
    let mut is_positive = a.create_label();
    let mut is_enough = a.create_label();
    let mut is_doubtful = a.create_label();
    let mut is_certain = a.create_label();
    let mut no_parent = a.create_label();
    // When it began.
    a.mov(rdi, last_call(layout, call_slot::TIME))?;
    a.cmp(rdi, last_call(layout, call_slot::NOT_BEFORE))?;
    a.cmovb(rdi, last_call(layout, call_slot::NOT_BEFORE))?;
    // From here on, the calls of a signal handler are children of the call before.
    clear(a, layout)?;
    // Calls that a signal handler has made since the time in r8 was read are children of this one: it ends after them.
    a.mov(rsi, last_call(layout, call_slot::CHILD_ENDED))?;
    a.cmp(r8, rsi)?;
    a.cmovb(r8, rsi)?;
    a.mov(rsi, r8)?;
    a.sub(rsi, rdi)?;
    a.jnc(is_positive)?;
    a.xor(esi, esi)?;
    a.set_label(&mut is_positive)?;
    a.mov(rdi, rsi)?;
    a.sub(rdi, last_call(layout, call_slot::CHILDREN))?;
    a.jnc(is_enough)?;
    a.xor(edi, edi)?;
    a.jmp(is_doubtful)?;
    a.set_label(&mut is_enough)?;
    a.test(last_flags(layout), call_slot::IS_DOUBTFUL as i32)?;
    a.je(is_certain)?;
    a.set_label(&mut is_doubtful)?;
    if is_doubted {
        count(a, role, shared, function_data::DOUBTFUL)?;
    }
    // There may be another label.
    a.nop()?;
    a.set_label(&mut is_certain)?;
    a.mov(ebx, edx)?;
    a.dec(edx)?;
    let begin_later = |a: &mut CodeAssembler| raise(a, layout, call_slot::NOT_BEFORE);
    locate_parent(a, layout, role, no_parent, begin_later)?;
    a.add(last_call(layout, call_slot::CHILDREN), rsi)?;
    raise(a, layout, call_slot::CHILD_ENDED)?;
    a.set_label(&mut no_parent)?;
    a.shl(rbx, DEPTH_AT)?;
    a.lea(r9, qword_ptr(rbx + rcx))?;
    load(a, rbx, shared.0)?;
    a.mov(r8, rdi)
}

/// Emits the code that sets a field of the call that is located to the time in r8, unless it holds a later one: a
/// signal handler that interrupted this code may have set it.
fn raise(a: &mut CodeAssembler, layout: CallsLayout, field: u64) -> Result<(), IcedError> {
    let mut is_later = a.create_label();
    a.cmp(last_call(layout, field), r8)?;
    a.jae(is_later)?;
    a.mov(last_call(layout, field), r8)?;
    a.set_label(&mut is_later)?;
    a.nop()
}

/// Emits the code that locates the last complete call among the first calls of the stack, as many as edx says. Goes to
/// `none` if there is none. Does what `note` emits with each incomplete one after it.
fn locate_parent(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    role: &TimedRole,
    none: CodeLabel,
    note: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    let mut found = a.create_label();
    a.set_label(&mut next)?;
    a.mov(eax, edx)?;
    a.shl(eax, layout.call_len_bits())?;
    a.je(none)?;
    a.cmp(last_call(layout, call_slot::FRAME), 0)?;
    a.jne(found)?;
    note(a)?;
    a.dec(edx)?;
    a.jmp(next)?;
    a.set_label(&mut found)?;
    if is_on_fiber(role) {
        a.cmp(last_call(layout, call_slot::CALL_OWNER), r9)?;
        a.jne(none)?;
        return Ok(());
    }
    a.nop()
}

/// Emits the code that does [`doubt_parent`] for the call that has made the last one, and leaves the depth in rdx.
fn doubt_parent_of_last(
    a: &mut CodeAssembler,
    role: &TimedRole,
    shared: (LiveAddr, SharedLayout),
) -> Result<(), IcedError> {
    a.mov(ebx, edx)?;
    a.dec(edx)?;
    doubt_parent(a, shared.1.calls, role)?;
    a.mov(edx, ebx)?;
    load(a, rbx, shared.0)
}

/// Emits the code that marks the parent of a call whose time is not known as doubtful. edx says how many calls are
/// before that call; rdi is the time of its children, which is added to those of the parent. Incomplete calls between
/// the two are marked as well: whether they had begun is not known.
fn doubt_parent(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    role: &TimedRole,
) -> Result<(), IcedError> {
    let mut none = a.create_label();
    let doubt = |a: &mut CodeAssembler| a.or(last_flags(layout), call_slot::IS_DOUBTFUL as i32);
    locate_parent(a, layout, role, none, doubt)?;
    a.add(last_call(layout, call_slot::CHILDREN), rdi)?;
    doubt(a)?;
    a.set_label(&mut none)?;
    a.nop()
}

/// Emits the code that loads the owner of the stack into rdi (and, if that is a fiber, into r9), the frame into rsi,
/// and the address of the slot that is tried first into rcx. It sets ZF if that slot is the owner's. Goes to `without`
/// if the thread has no control block yet.
fn find_slot(
    a: &mut CodeAssembler,
    role: &TimedRole,
    shared: (LiveAddr, SharedLayout),
    without: CodeLabel,
) -> Result<(), IcedError> {
    a.mov(rsi, rsp)?;
    match role.stack {
        StackKind::OfThread if role.is_from_start => {
            // Slower than reading the block's address from the block itself (`fs:0`), which may not be there yet.
            a.rdfsbase(rdi)?;
            a.test(rdi, rdi)?;
            a.je(without)?;
        }
        StackKind::OfThread => a.mov(rdi, qword_ptr(0).fs())?,
        StackKind::OfFiber { current_stack } => {
            a.mov(rcx, qword_ptr(r14 + u32::from(current_stack)))?;
            a.mov(rdi, word_at(rcx, FIBER))?;
            a.lea(rdi, qword_ptr(rdi + rdi + 1))?;
            a.mov(r9, rdi)?;
            a.sub(rsi, word_at(rcx, UPPER_END))?;
        }
    }
    a.mov(edx, edi)?;
    spread(a, edx, call_slot::COUNT_BITS)?;
    let layout = shared.1;
    a.shl(edx, layout.calls.slot_len_bits())?;
    let stacks = layout.calls() + layout.calls.slots();
    a.lea(rcx, qword_ptr(rbx + rdx + offset(stacks)))?;
    a.cmp(word_at(rcx, call_slot::OWNER), rdi)
}

/// Emits the code that searches the slots after that at rcx for the owner in rdi. If it has one, the code jumps to `found` with
/// the slot's address in rcx.
fn find_other_slot(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    found: CodeLabel,
) -> Result<(), IcedError> {
    let mut next = a.create_label();
    a.mov(edx, call_slot::TRIED as u32 - 1)?;
    a.set_label(&mut next)?;
    a.add(rcx, layout.slot_len() as i32)?;
    a.cmp(word_at(rcx, call_slot::OWNER), rdi)?;
    a.je(found)?;
    a.dec(edx)?;
    a.jne(next)
}

/// Emits the code that loads the address of a slot for the owner in rdi into rcx, searching from rcx on: its own; else a free
/// one; else the last one tried, if it is abandoned. It jumps to `lost` if there is none, and to `retry` if the slot has
/// changed hands meanwhile.
fn take_slot(
    a: &mut CodeAssembler,
    shared: (LiveAddr, SharedLayout),
    retry: CodeLabel,
    lost: CodeLabel,
) -> Result<(), IcedError> {
    let stack_len = shared.1.calls.slot_len() as i32;
    let mut next = a.create_label();
    let mut is_free = a.create_label();
    let mut is_taken = a.create_label();
    let mut has_one = a.create_label();
    let mut take = a.create_label();
    let mut replace = a.create_label();
    let mut over = a.create_label();
    a.xor(ebx, ebx)?;
    a.mov(edx, call_slot::TRIED as u32)?;
    a.set_label(&mut next)?;
    a.mov(rax, word_at(rcx, call_slot::OWNER))?;
    a.cmp(rax, rdi)?;
    a.je(has_one)?;
    a.test(rbx, rbx)?;
    a.jne(is_taken)?;
    a.test(rax, rax)?;
    a.je(is_free)?;
    // That of a fiber, which may have ended, is free while it has no calls.
    a.test(al, 1)?;
    a.je(is_taken)?;
    a.cmp(word_at(rcx, call_slot::DEPTH), 0)?;
    a.jne(is_taken)?;
    a.set_label(&mut is_free)?;
    a.mov(rbx, rcx)?;
    a.set_label(&mut is_taken)?;
    a.add(rcx, stack_len)?;
    a.dec(edx)?;
    a.jne(next)?;
    a.sub(rcx, stack_len)?;
    a.test(rbx, rbx)?;
    a.cmovne(rcx, rbx)?;
    load(a, rbx, shared.0)?;
    a.jne(take)?;
    // None is free: the last one tried, if it is a fiber's and its outermost call began more than about a second ago.
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.or(rdx, rax)?;
    a.sub(rdx, qword_ptr(rcx + (call_slot::CALLS + call_slot::TIME)))?;
    // It began after the time was read, or on a processor whose clock is ahead.
    a.jc(lost)?;
    a.shr(rdx, ABANDONED_BITS)?;
    a.je(lost)?;
    a.test(byte_ptr(rcx + call_slot::OWNER), 1)?;
    a.je(lost)?;
    a.mov(rax, word_at(rcx, call_slot::OWNER))?;
    a.jmp(replace)?;
    a.set_label(&mut take)?;
    // Another thread may have taken it meanwhile.
    a.mov(rax, word_at(rcx, call_slot::OWNER))?;
    a.test(rax, rax)?;
    a.je(replace)?;
    a.test(al, 1)?;
    a.je(retry)?;
    a.cmp(word_at(rcx, call_slot::DEPTH), 0)?;
    a.jne(retry)?;
    a.set_label(&mut replace)?;
    // Marked first: a signal handler that interrupts this and jumps away leaves no slot that the reader does not see.
    let (layout, calls) = (shared.1, shared.1.calls);
    a.mov(rdx, rcx)?;
    a.sub(rdx, rbx)?;
    a.sub(rdx, offset(layout.calls() + calls.slots()))?;
    a.shr(rdx, calls.slot_len_bits() + call_slot::SLOTS_OF_BIT)?;
    let taken = qword_ptr(rbx + offset(layout.calls() + calls.taken()));
    a.lock().bts(taken, rdx)?;
    a.lock().cmpxchg(word_at(rcx, call_slot::OWNER), rdi)?;
    a.jne(retry)?;
    a.jmp(over)?;
    a.set_label(&mut has_one)?;
    load(a, rbx, shared.0)?;
    a.set_label(&mut over)?;
    a.nop()
}

fn is_on_fiber(role: &TimedRole) -> bool {
    matches!(role.stack, StackKind::OfFiber { .. })
}

/// Emits the code that puts in rdx how many calls have not ended on the stack at rcx, and in rax what locates the last
/// one; goes to `none` if there is none.
fn locate_last(
    a: &mut CodeAssembler,
    layout: CallsLayout,
    none: CodeLabel,
) -> Result<(), IcedError> {
    a.mov(rdx, word_at(rcx, call_slot::DEPTH))?;
    a.test(rdx, rdx)?;
    a.je(none)?;
    a.mov(eax, edx)?;
    a.shl(eax, layout.call_len_bits())
}

/// Returns a field of the call that is located.
fn last_call(layout: CallsLayout, field: u64) -> AsmMemoryOperand {
    qword_ptr(rcx + rax + before(layout, field))
}

/// Returns the flags of the call that is located.
fn last_flags(layout: CallsLayout) -> AsmMemoryOperand {
    dword_ptr(rcx + rax + before(layout, call_slot::FLAGS))
}

/// Returns the displacement of a field of a call from the slot's address plus the length of all calls up to that one.
fn before(layout: CallsLayout, field: u64) -> i32 {
    (call_slot::CALLS + field) as i32 - (1 << layout.call_len_bits())
}

/// Emits the code that makes the record of the last call, which is located, incomplete. Until it is freed, no signal
/// handler's call overwrites it.
fn clear(a: &mut CodeAssembler, layout: CallsLayout) -> Result<(), IcedError> {
    a.mov(last_call(layout, call_slot::FRAME), 0)
}

/// Emits the code that frees the record of the last call, which was cleared: it decrements the depth, which is in rdx.
/// It clears ZF if the depth has changed meanwhile: a signal handler on a stack at higher addresses, for which the
/// calls of this stack have the frames of inner ones, has taken them for unwound, and freed their records. The code
/// uses rax.
fn free(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rax, rdx)?;
    a.dec(edx)?;
    a.cmpxchg(word_at(rcx, call_slot::DEPTH), rdx)
}

/// Emits the code that drops the last call, which is located, counts it as lost, and goes to `again`: it is one of
/// another fiber, which had the slot before. Of an incomplete one, the function is not known.
fn drop_others(a: &mut CodeAssembler, calls: Calls<'_>, again: CodeLabel) -> Result<(), IcedError> {
    let layout = calls.shared.1.calls;
    let mut counted = a.create_label();
    a.cmp(last_call(layout, call_slot::FRAME), 0)?;
    // Leaves the flags as they are.
    clear(a, layout)?;
    a.je(counted)?;
    count_last(a, calls, function_data::LOST)?;
    a.set_label(&mut counted)?;
    free(a)?;
    a.jmp(again)
}

/// Emits the code that counts the call that is located, unless it is left out.
fn count_last(a: &mut CodeAssembler, calls: Calls<'_>, what: u64) -> Result<(), IcedError> {
    let layout = calls.shared.1;
    let mut over = a.create_label();
    if calls.are_filtered {
        let flags = last_flags(layout.calls);
        a.test(flags, call_slot::IS_LEFT_OUT as i32)?;
        a.jne(over)?;
    }
    a.mov(rdi, last_call(layout.calls, call_slot::FUNCTION))?;
    a.shl(edi, function_data::LEN_BITS)?;
    let field = offset(layout.calls() + what);
    a.lock().inc(qword_ptr(rbx + rdi + field))?;
    if calls.are_filtered {
        a.set_label(&mut over)?;
        a.nop()?;
    }
    Ok(())
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
