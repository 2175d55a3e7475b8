//! The code of trampolines: a trampoline records a hit of its point and does what the displaced bytes
//! did. Pure.
//!
//! ```text
//! point        call trampoline
//! trampoline   save registers in MMX registers
//!              count    add one to the point's counter in the row that the thread owns (trampoline/count.rs)
//!              pair     push the time to this thread's stack of times in the shared data, or
//!                       pop it (trampoline/pair.rs)
//!              values   add what an expression is to a histogram (trampoline/values.rs)
//!              watch    write a record into the ring of this group (trampoline/record.rs, fields.rs), maybe only if a
//!                       filter is true (trampoline/filter.rs), and of every Nth hit only (trampoline/sampling.rs)
//!              restore registers
//!        tail  disabled: ret        enabled: jmp wrapper, which returns to the point
//!
//! function     jmp trampoline
//! trampoline   save registers, count, restore registers; or, in functions that use the x87 unit, add one to a counter
//!              that all threads share; or, in OCaml code, to one of the domain (trampoline/template.rs)
//!              or begin or end a call (trampoline/call.rs); an end just before the function is left
//!              or call another function before the first call of this one (trampoline/call_once.rs)
//!              or write a record of the call (trampoline/function_record.rs)
//!              the displaced instructions; jmp to what follows them
//! ```
//!
//! It preserves all registers except the flags, which are dead at a point, and those of the x87 unit. It calls nothing
//! (but for trampoline/call_once.rs), and accesses no memory that might be unmapped.
//!
//! At the site of a probe, it does not store below the return address. There may be no more stack: OCaml 4 raises
//! `Stack_overflow` if the fault is in OCaml code, and the process dies if it is in a trampoline. The call's own push
//! is in OCaml code or, at the sites of ppx_probe, in 16 bytes of which the upper half holds a return address. So
//! registers are saved in MMX registers, which belong to the thread, and are saved for signal handlers like all others.
//! They are those of the x87 unit, which is empty at a site: ocamlopt emits no x87 instruction, and the psABI (3.2.1)
//! leaves none in use at a call. In a function that does not use it, it is empty everywhere
//! ([`PatchSite::mmx_is_free`]). Where it may be in use, or calls are timed, registers are saved below the stack
//! pointer or behind a lock (trampoline/saved.rs).

mod at_point;
mod call;
mod call_once;
mod callers;
mod count;
mod fields;
mod filter;
mod function_record;
mod histogram;
mod keys;
mod pair;
mod readable;
mod record;
mod sampling;
mod saved;
mod stack_copy;
mod stack_info;
mod stack_room;
mod template;
mod values;

use std::borrow::Cow;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Add;

use iced_x86::code_asm::{
    AsmMemoryOperand, AsmRegister32, AsmRegister64, AsmRegisterMm, CodeAssembler, CodeLabel, mm0,
    mm1, mm2, mm3, mm4, mm5, mm6, mm7, qword_ptr, r8, r9, rax, rbx, rcx, rdi, rdx, rsi, rsp,
};
use iced_x86::{
    BlockEncoderOptions, Code, Encoder, IcedError, Instruction, MemoryOperand, Register,
};

use self::at_point::{PointContext, SavedAt};
use self::call::{CallEnd, TimedCalls};
use self::count::{CountPointers, SlowPath};
use self::fields::FieldCopies;
use self::function_record::{RecordPointers, RecordedEvent};
use self::pair::Ends;
use self::saved::{LockedRegisters, SaveArea, Saving};
use self::stack_room::RED_ZONE;
use self::template::{CountTemplate, CountTemplates};
use crate::address::{LiveAddr, LoadBias};
use crate::error::Refusal;
use crate::observe::layout::arena::{Arena, LINE, TAIL_LEN};
use crate::observe::layout::rows::claim;
use crate::observe::layout::shared::{self, SharedLayout};
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOf};
use crate::observe::role::{ExitsRole, FilterRole, FunctionPart, Role, WatchRole};
use crate::patch_plan::displaced::{DisplacedCopy, ExitKind};
use crate::patch_plan::site::PatchSite;
use crate::site::{JUMP_LEN, NOP, RET};

/// A register that a trampoline uses, and the one that it is saved in.
type SavedRegister = (AsmRegister64, AsmRegisterMm);

/// Those of a trampoline that only counts.
const SAVED_IF_COUNTED: [SavedRegister; 2] = [(rcx, mm1), (rdx, mm2)];

/// Those of a trampoline with time stamps.
const SAVED_IF_TIMED: [SavedRegister; 8] = [
    (rax, mm0),
    (rcx, mm1),
    (rdx, mm2),
    (rbx, mm3),
    (rsi, mm4),
    (rdi, mm5),
    (r8, mm6),
    (r9, mm7),
];

/// How a trampoline finds the data that it writes.
#[derive(Clone, Copy, Debug)]
struct Pointers {
    count: CountPointers,
    /// The index of the point, and of its counter.
    point: usize,
    /// The index of its second counter, if hits are filtered, and where that is which all threads share.
    untyped: usize,
    untyped_locked: LiveAddr,
    /// Its counter of the hits of which some are recorded, if they are sampled.
    sampled: LiveAddr,
    /// The place in memory that holds the address of the shared data.
    shared: LiveAddr,
    layout: SharedLayout,
}

impl Pointers {
    /// Of a point of an arena; the arena `sharing` has the shared data.
    fn of(arena: &Arena, point: usize, sharing: &Arena) -> Pointers {
        Pointers {
            count: CountPointers::of(arena),
            point,
            untyped: arena.untyped_counter(point),
            untyped_locked: arena.locked_counter(arena.untyped_counter(point)),
            sampled: arena.locked_counter(arena.sampled_counter(point)),
            shared: arena.shared_pointer(),
            layout: sharing.shared,
        }
    }
}

/// A trampoline cannot be made: the data are too far away, or it is longer than its place.
#[derive(Debug)]
pub(crate) struct DoesNotFit;

impl From<IcedError> for DoesNotFit {
    fn from(_: IcedError) -> DoesNotFit {
        DoesNotFit
    }
}

/// The code of an arena.
#[derive(Default)]
pub(crate) struct ArenaCode {
    pub(crate) bytes: Vec<u8>,
    /// The addresses of displaced instructions, each with that of its copy in a trampoline, where a thread goes on that
    /// was stopped there. Not those of the first instruction of a place, where the jump is: such a thread executes the
    /// jump.
    pub(crate) moves: Vec<(LiveAddr, LiveAddr)>,
    /// The functions whose trampoline is too far from what their displaced instructions refer to, or longer than its
    /// place.
    pub(crate) out_of_reach: Vec<usize>,
}

/// Returns the code of an arena, whose sites are disabled; `planned` are its points. The arena `sharing` has the
/// shared data. If it `claims_rows`, the process must be allowed to execute `rdfsbase`.
///
/// # Errors
///
/// If the data are too far away, or a trampoline is longer than the arena's are.
pub(crate) fn arena_code(
    arena: &Arena,
    plan: &ObservationPlan,
    planned: &[PlannedPoint],
    sharing: &Arena,
    claims_rows: bool,
) -> Result<ArenaCode, DoesNotFit> {
    let mut code = ArenaCode {
        bytes: arena.header_and_table(sharing),
        ..ArenaCode::default()
    };
    code.bytes.extend(count::routine(arena, claims_rows)?);
    let first = arena.trampoline(0).0 - arena.code.0;
    code.bytes.resize(first as usize, NOP);
    let templates = CountTemplates::of(arena.trampoline(0), CountPointers::of(arena))?;
    for (index, planned) in planned.iter().enumerate() {
        let at = arena.trampoline(index);
        let len = arena.trampoline_len;
        let Some((site, bias)) = plan.patch_site(planned) else {
            let role = &planned.role;
            let wrapper = planned.point.wrapper().ok_or(DoesNotFit)?;
            let made = trampoline(at, len, wrapper, |tail| {
                let counting = (role.is_only_counted())
                    .then(|| templates.of_any().around_jump(at, index, tail));
                if let Some(code) = counting.transpose()?.flatten() {
                    return Ok(code);
                }
                recording(at, role, &Pointers::of(arena, index, sharing), tail)
            });
            code.bytes.extend(made?);
            continue;
        };
        let end = code.bytes.len() + len as usize;
        let PointOf::Function(function) = planned.of else {
            return Err(DoesNotFit);
        };
        let role = &planned.role;
        let made = if !role.ends.is_empty() {
            let pointers = Pointers::of(arena, index, sharing);
            of_paired_site(at, (site, bias), role, &pointers)
        } else if role.reads_time() {
            let pointers = RecordPointers {
                shared: arena.shared_pointer(),
                in_program: arena.data().plus(claim::IN_PROGRAM),
                layout: sharing.shared,
                untyped: arena.locked_counter(arena.untyped_counter(index)),
                sampled: arena.locked_counter(arena.sampled_counter(index)),
                saved: LockedRegisters {
                    at: arena.saved_registers(),
                    lost: arena.locked_counter(index),
                },
            };
            of_recorded_function(at, (site, bias), role, pointers)
        } else if role.may_be_untyped() {
            let pointers = Pointers::of(arena, index, sharing);
            let locked = LockedRegisters {
                at: arena.saved_registers(),
                lost: arena.locked_counter(pointers.untyped),
            };
            let counter = arena.locked_counter(index);
            of_filtered_function(at, (site, bias), role, &pointers, (locked, counter))
        } else if let Some(once) = plan.calls_once_at(planned) {
            let entry = planned.point.address;
            call_once::code(at, (site, bias), entry, once, arena.locked_counter(index))
        } else {
            let template = templates.of_function(plan.is_of_ocaml(planned));
            of_function(at, index, site, bias, arena, template)
        };
        match made {
            Ok((bytes, copy)) if bytes.len() as u64 <= len => {
                code.moves.extend(copy.moves().skip(1));
                code.bytes.extend(bytes);
            }
            _ => code.out_of_reach.push(function),
        }
        code.bytes.resize(end, NOP);
    }
    code.bytes.resize(arena.code_len() as usize, 0);
    Ok(code)
}

/// Returns the trampoline at `at` for a place in a function that is timed or watched, and the copy of the displaced
/// instructions in it.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn of_recorded_function(
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
    role: &Role,
    pointers: RecordPointers,
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    if let Some(timed) = &role.timed {
        let what = TimedCalls {
            role: timed,
            filter: role.filter.as_deref(),
            keys: role.time_keys.as_deref(),
            reported: role.reported.as_ref(),
            are_in_range: role.is_in_range,
        };
        return of_timed_function(at, (site, bias), what, pointers);
    }
    let watched = role.watched.as_ref().ok_or(DoesNotFit)?;
    let function = watched.function.ok_or(DoesNotFit)?;
    let code_at = |at, what| {
        let mmx_is_free = site.mmx_is_free();
        let filter = role.filter.as_deref();
        let watched = (watched, function, filter);
        function_record::code(at, what, watched, mmx_is_free, pointers)
    };
    let mut code = Vec::new();
    if function.part != FunctionPart::Exit && !function.has_only_results {
        code = code_at(at, RecordedEvent::Call)?;
    }
    let here = at.plus(code.len() as u64);
    let copy = if function.has_results || function.exits_on.is_some() {
        let mut at_exit =
            |at, kind| code_at(at, RecordedEvent::Exit(kind)).map_err(|_| Refusal::OutOfReach);
        site.copy_with_exits(bias, here, &mut at_exit)
    } else {
        site.copy_at(bias, here)
    };
    let copy = copy.map_err(|_| DoesNotFit)?;
    code.extend(copy.code());
    Ok((code, copy))
}

/// Returns the trampoline at `at` for the site of a USDT probe that is an end of pairs, and the copy of the displaced
/// instructions in it.
///
/// Registers are saved on the stack, below what the function may have there: a hit that was lost because a lock is not
/// free would make wrong pairs, and the x87 unit may hold something. There is room on the stack: these are functions of
/// C, which call others and may be interrupted by signal handlers, and these take more.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn of_paired_site(
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
    role: &Role,
    pointers: &Pointers,
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    const PUSHED: i32 = RED_ZONE + 8 * SAVED_IF_TIMED.len() as i32;
    let mut a = CodeAssembler::new(64)?;
    a.lea(rsp, qword_ptr(rsp - PUSHED))?;
    for (at, (register, _)) in (0..).step_by(8).zip(SAVED_IF_TIMED) {
        a.mov(qword_ptr(rsp + at), register)?;
    }
    let context = PointContext {
        saved: &SAVED_IF_TIMED,
        saved_at: SavedAt::Pushed,
        pushed: PUSHED as u64,
        shared: pointers.shared,
        layout: pointers.layout,
    };
    pair::ends(&mut a, Ends::of(role), pointers, context)?;
    for (at, (register, _)) in (0..).step_by(8).zip(SAVED_IF_TIMED) {
        a.mov(register, qword_ptr(rsp + at))?;
    }
    a.lea(rsp, qword_ptr(rsp + PUSHED))?;
    with_displaced(a.assemble(at.0)?, at, site, bias)
}

/// Returns the trampoline at `at` for an entry or an exit of a function that is timed, and the copy of the displaced
/// instructions in it.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn of_timed_function(
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
    timed: TimedCalls<'_>,
    pointers: RecordPointers,
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    let code_at = |at, what| {
        let mmx_is_free = site.mmx_is_free();
        call::code(at, what, mmx_is_free, timed, pointers)
    };
    let mut code = Vec::new();
    if timed.role.is_entry {
        code = code_at(at, CallEnd::Entry)?;
    }
    let here = at.plus(code.len() as u64);
    let mut at_exit = |at, kind| code_at(at, CallEnd::Exit(kind)).map_err(|_| Refusal::OutOfReach);
    let copy = site.copy_with_exits(bias, here, &mut at_exit);
    let copy = copy.map_err(|_| DoesNotFit)?;
    code.extend(copy.code());
    Ok((code, copy))
}

/// Returns the trampoline at `at` of a function that is counted, the point with this index, and the copy of the
/// displaced instructions in it.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn of_function(
    at: LiveAddr,
    index: usize,
    site: &PatchSite,
    bias: LoadBias,
    arena: &Arena,
    template: &CountTemplate,
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    if site.mmx_is_free() {
        let copy = site.copy_at(bias, at.plus(template.split() as u64));
        let copy = copy.map_err(|_| DoesNotFit)?;
        if let Some(code) = template.around(at, index, copy.code()) {
            return Ok((code, copy));
        }
    }
    with_displaced(count::count_locked(at, arena, index)?, at, site, bias)
}

/// Returns the code of a trampoline at `at` with the copy of the displaced instructions after it, and that copy.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn with_displaced(
    mut code: Vec<u8>,
    at: LiveAddr,
    site: &PatchSite,
    bias: LoadBias,
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    let copy = site.copy_at(bias, at.plus(code.len() as u64));
    let copy = copy.map_err(|_| DoesNotFit)?;
    code.extend(copy.code());
    Ok((code, copy))
}

/// Returns the trampoline at `at` of a function of which only some hits are counted, or which has a histogram, and the
/// copy of the displaced instructions in it. If the function uses the x87 unit, registers are saved behind the lock
/// `locked`, and the two counters of the point are incremented by locked instructions: the first one, at `counter`, and
/// the second one, also if the lock is not free.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn of_filtered_function(
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
    role: &Role,
    pointers: &Pointers,
    (locked, counter): (LockedRegisters, LiveAddr),
) -> Result<(Vec<u8>, DisplacedCopy), DoesNotFit> {
    if let Some(exits) = role.exits {
        let mut at_exit = |at: LiveAddr, kind| {
            let code = ask_at_exit(at, (exits, kind), role, pointers, (locked, counter));
            code.map_err(|_| Refusal::OutOfReach)
        };
        let copy = site.copy_with_exits(bias, at, &mut at_exit);
        let copy = copy.map_err(|_| DoesNotFit)?;
        return Ok((copy.code().to_vec(), copy));
    }
    let mut a = CodeAssembler::new(64)?;
    let mut end = a.create_label();
    let registers = saved_for(role);
    if site.mmx_is_free() {
        let mut over = a.create_label();
        for (register, copy) in registers {
            a.movq(*copy, *register)?;
        }
        let slow_paths = filter_and_count(&mut a, role, pointers, registers, 0, over)?;
        a.set_label(&mut over)?;
        for (register, copy) in SAVED_IF_COUNTED {
            a.movq(register, copy)?;
        }
        a.emms()?;
        a.jmp(end)?;
        for slow_path in slow_paths {
            count::emit_slow_path(&mut a, pointers.count, slow_path)?;
        }
    } else {
        count_saved(&mut a, role, pointers, SaveArea::Lock, (locked, counter))?;
    }
    a.set_label(&mut end)?;
    // A label needs an instruction.
    a.nop()?;
    with_displaced(a.assemble(at.0)?, at, site, bias)
}

/// Returns the code at `at` that asks for the result of a function where it returns. If it jumps to another function
/// instead, the hit is untyped: the result is that of the other one.
fn ask_at_exit(
    at: LiveAddr,
    (exits, kind): (ExitsRole, ExitKind),
    role: &Role,
    pointers: &Pointers,
    (locked, counter): (LockedRegisters, LiveAddr),
) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    match kind {
        ExitKind::Jump => a.add_instruction(locked_increment(locked.lost)?)?,
        ExitKind::Return => {
            // A result of C may be in the x87 unit.
            let place = if exits.is_ocaml {
                SaveArea::Mmx
            } else {
                SaveArea::StackOrLock
            };
            count_saved(&mut a, role, pointers, place, (locked, counter))?;
        }
    }
    a.assemble(at.0)
}

/// Returns the registers that the trampoline of a point uses, which have to be saved before.
fn saved_for(role: &Role) -> &'static [SavedRegister] {
    match (&role.filter, &role.histogram) {
        _ if role.reads_time() || role.keys.is_some() => &SAVED_IF_TIMED,
        (filter, Some(histogram)) => values::saved(filter.as_deref(), histogram),
        (Some(filter), None) => filter::saved(filter),
        (None, None) => &SAVED_IF_COUNTED,
    }
}

/// Emits the code that, if the filter is true, adds a value to the histogram of the point, or counts the hit by its
/// key, or in the first counter of the point if there are no keys, or no room for this one. An untyped hit is counted
/// in the second counter. The code goes on at `over`, or behind itself. The registers `saved` are in their copies; in
/// the end, all of them but those of [`SAVED_IF_COUNTED`] hold these again. `pushed` bytes of the trampoline are on the
/// stack.
fn filter_and_count(
    a: &mut CodeAssembler,
    role: &Role,
    pointers: &Pointers,
    saved: &'static [SavedRegister],
    pushed: u64,
    over: CodeLabel,
) -> Result<Vec<SlowPath>, IcedError> {
    let (mut is_false, mut untyped) = (a.create_label(), a.create_label());
    let context = PointContext {
        saved,
        saved_at: SavedAt::Copies,
        pushed,
        shared: pointers.shared,
        layout: pointers.layout,
    };
    let restore = |a: &mut CodeAssembler| -> Result<(), IcedError> {
        let others = saved.iter().filter(|it| !SAVED_IF_COUNTED.contains(it));
        for (register, copy) in others {
            a.movq(*register, *copy)?;
        }
        // A label needs an instruction.
        a.nop()
    };
    let mut slow_paths = Vec::new();
    if let Some(filter) = &role.filter {
        filter::filter(a, filter, context, is_false, untyped)?;
    }
    if let Some(histogram) = &role.histogram {
        values::record(a, histogram, role.keys.as_deref(), context, untyped)?;
        a.jmp(is_false)?;
    } else {
        if let Some(keys) = &role.keys {
            let mut other = a.create_label();
            keys::count(a, keys, context, untyped, other)?;
            a.jmp(is_false)?;
            a.set_label(&mut other)?;
        }
        restore(a)?;
        slow_paths.push(count::lookup(a, pointers.count, pointers.point)?);
        a.jmp(over)?;
    }
    a.set_label(&mut untyped)?;
    restore(a)?;
    slow_paths.push(count::lookup(a, pointers.count, pointers.untyped)?);
    a.jmp(over)?;
    a.set_label(&mut is_false)?;
    restore(a)?;
    Ok(slow_paths)
}

/// Emits the code that does the same, and saves and restores registers itself, at a place that may be behind the lock
/// `locked`. Both counters of the point are incremented by locked instructions: the first one, at `counter`, and the
/// second one, also if the lock is not free.
fn count_saved(
    a: &mut CodeAssembler,
    role: &Role,
    pointers: &Pointers,
    place: SaveArea,
    (locked, counter): (LockedRegisters, LiveAddr),
) -> Result<(), IcedError> {
    let (mut is_false, mut untyped) = (a.create_label(), a.create_label());
    // `Saving` saves the first ones of SAVED_IF_TIMED: rax as well.
    let saved = match saved_for(role) {
        saved if saved.len() == SAVED_IF_COUNTED.len() => &SAVED_IF_TIMED[..3],
        saved => saved,
    };
    let mut saving = Saving::new(a, place, saved.len(), locked);
    saving.save(a)?;
    let context = saving.context(pointers.shared, pointers.layout);
    if let Some(filter) = &role.filter {
        filter::filter(a, filter, context, is_false, untyped)?;
    }
    match (&role.histogram, &role.keys) {
        (Some(histogram), keys) => {
            values::record(a, histogram, keys.as_deref(), context, untyped)?;
        }
        (None, Some(keys)) => {
            let mut other = a.create_label();
            keys::count(a, keys, context, untyped, other)?;
            a.jmp(is_false)?;
            a.set_label(&mut other)?;
            a.add_instruction(locked_increment(counter)?)?;
        }
        (None, None) => a.add_instruction(locked_increment(counter)?)?,
    }
    a.jmp(is_false)?;
    a.set_label(&mut untyped)?;
    a.add_instruction(locked_increment(locked.lost)?)?;
    a.set_label(&mut is_false)?;
    a.nop()?;
    saving.restore(a)
}

/// Returns the length of the longest trampoline of a plan, in bytes.
///
/// # Errors
///
/// See [`arena_code`].
pub(crate) fn longest(plan: &ObservationPlan) -> Result<u64, DoesNotFit> {
    longest_of(plan, Cow::Borrowed)
}

/// Returns how long the longest trampoline of a plan would be if no hits were recorded one by one.
///
/// # Errors
///
/// See [`arena_code`].
pub(crate) fn longest_without_records(plan: &ObservationPlan) -> Result<u64, DoesNotFit> {
    longest_of(plan, |role| {
        Cow::Owned(Role {
            watched: None,
            reported: None,
            ..role.clone()
        })
    })
}

fn longest_of<'p>(
    plan: &'p ObservationPlan,
    role_of: impl Fn(&'p Role) -> Cow<'p, Role>,
) -> Result<u64, DoesNotFit> {
    let sites = plan.points.iter().filter(|it| it.site().is_some());
    let roles: Vec<Cow<'_, Role>> = sites.map(|it| role_of(&it.role)).collect();
    let of_sites = longest_of_sites(roles.iter().map(|it| &**it), plan.shared)?;
    let templates = CountTemplates::of(FAR_POINTERS.0, FAR_POINTERS.1)?;
    let of_functions = plan.points.iter().filter_map(|planned| {
        let (site, bias) = plan.patch_site(planned)?;
        if plan.calls_once_at(planned).is_some() {
            return Some(call_once::LEN);
        }
        let template = templates.of_function(plan.is_of_ocaml(planned));
        let role = role_of(&planned.role);
        Some(len_of_function(site, bias, &role, plan.shared, template))
    });
    Ok(of_functions.fold(of_sites, u64::max))
}

/// Returns the length of the longest trampoline of sites with these roles, in bytes.
fn longest_of_sites<'r>(
    roles: impl Iterator<Item = &'r Role>,
    layout: SharedLayout,
) -> Result<u64, DoesNotFit> {
    // Most roles differ only in the number of their point.
    let mut lens: HashMap<Role, u64> = HashMap::new();
    let mut longest = LINE;
    for role in roles {
        let mut shape = role.clone();
        for recorded in shape.watched.iter_mut().chain(&mut shape.reported) {
            recorded.point = 0;
        }
        let len = match lens.get(&shape) {
            Some(len) => *len,
            None => {
                let len = len(role, layout)?;
                lens.insert(shape, len);
                len
            }
        };
        longest = longest.max(len);
    }
    Ok(longest)
}

/// An address, and pointers from there that need displacements of four bytes.
const FAR_POINTERS: (LiveAddr, CountPointers) = (
    LiveAddr(1 << 20),
    CountPointers {
        claims: LiveAddr(1 << 21),
        routine: LiveAddr(1 << 21),
        of_ocaml: LiveAddr(1 << 21),
        first_domain: LiveAddr(1 << 21),
        first_domain_counter: LiveAddr(1 << 21),
    },
);

/// Returns the length of the trampoline for a place in a function, in bytes.
fn len_of_function(
    site: &PatchSite,
    bias: LoadBias,
    role: &Role,
    layout: SharedLayout,
    template: &CountTemplate,
) -> u64 {
    // Anywhere near the site; at another place, up to 7 bytes more are needed to align data.
    let near = LiveAddr(bias.live(site.address()).0 & !7);
    let alignment = if site.moves_call() { 7 } else { 0 };
    let (far, count) = FAR_POINTERS;
    let distance = far.0.wrapping_sub(near.0);
    let here = |it: LiveAddr| LiveAddr(it.0.wrapping_sub(distance));
    let of_counts = Pointers {
        count: CountPointers {
            claims: here(count.claims),
            routine: here(count.routine),
            ..count
        },
        point: 0,
        untyped: 0,
        untyped_locked: near,
        sampled: near,
        shared: near,
        layout,
    };
    let len = if !role.ends.is_empty() {
        let made = of_paired_site(near, (site, bias), role, &of_counts);
        made.map_or(LINE, |(code, _)| code.len() as u64)
    } else if role.reads_time() {
        let pointers = RecordPointers {
            shared: near,
            in_program: near,
            layout,
            untyped: near,
            sampled: near,
            saved: LockedRegisters {
                at: near,
                lost: near,
            },
        };
        let made = of_recorded_function(near, (site, bias), role, pointers);
        made.map_or(LINE, |(code, _)| code.len() as u64)
    } else if role.may_be_untyped() {
        let locked = LockedRegisters {
            at: near,
            lost: near,
        };
        let made = of_filtered_function(near, (site, bias), role, &of_counts, (locked, near));
        made.map_or(LINE, |(code, _)| code.len() as u64)
    } else {
        let copy = site.copy_at(bias, near);
        let copy = copy.map_or(LINE, |copy| copy.code().len() as u64);
        template.len() as u64 + copy
    };
    (len + alignment).next_multiple_of(LINE)
}

/// Returns the length of a trampoline, in bytes.
fn len(role: &Role, layout: SharedLayout) -> Result<u64, DoesNotFit> {
    let (at, count) = FAR_POINTERS;
    let pointers = Pointers {
        count,
        point: 0,
        untyped: 0,
        untyped_locked: at,
        sampled: at,
        shared: at,
        layout,
    };
    let code = recording(at, role, &pointers, count.routine)?;
    Ok((code.len() as u64 + TAIL_LEN).next_multiple_of(LINE))
}

/// Returns the trampoline at `at`, `len` bytes long, of a point that is disabled. `recording` returns the code before its tail, whose
/// address it is given.
fn trampoline(
    at: LiveAddr,
    len: u64,
    wrapper: LiveAddr,
    recording: impl FnOnce(LiveAddr) -> Result<Vec<u8>, IcedError>,
) -> Result<Vec<u8>, DoesNotFit> {
    let tail = len.saturating_sub(TAIL_LEN) as usize;
    let tail_at = at.plus(tail as u64);
    let mut code = recording(tail_at)?;
    // A trampoline that was cut off would crash the thread that executes it.
    if code.len() > tail {
        return Err(DoesNotFit);
    }
    code.resize(tail, NOP);
    // The two instructions that a tail can be, `jmp wrapper` and `ret`, differ in the first byte
    // only.
    code.extend(jump_to(wrapper, tail_at.0)?);
    code[tail] = RET;
    code.resize(len as usize, NOP);
    Ok(code)
}

/// Returns the code of a trampoline without its tail, to which it jumps.
fn recording(
    at: LiveAddr,
    role: &Role,
    pointers: &Pointers,
    tail: LiveAddr,
) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let saved = saved_for(role);
    let sample = role.watched.as_ref().and_then(|watched| watched.sample);
    let filtered_first = role.filter.as_ref().filter(|_| role.is_only_watched());
    let sampled_first = sample.filter(|_| role.is_only_watched() && filtered_first.is_none());
    // If nothing is recorded of a hit, only these are saved.
    let first: Vec<AsmRegister64> = match filtered_first {
        Some(filter) => filter::saved(filter).iter().map(|(it, _)| *it).collect(),
        None if sampled_first.is_some() => vec![rax, rdx],
        None => Vec::new(),
    };
    let is_first = |(register, _): &&SavedRegister| first.contains(register);
    let (mut skipped, mut untyped) = (a.create_label(), a.create_label());
    for (register, copy) in saved.iter().filter(is_first) {
        a.movq(*copy, *register)?;
    }
    if let Some(every) = sampled_first {
        sampling::unless_chosen(&mut a, every, pointers.sampled, skipped)?;
    }
    let context = |saved| PointContext {
        saved,
        saved_at: SavedAt::Copies,
        pushed: PUSHED,
        shared: pointers.shared,
        layout: pointers.layout,
    };
    if let Some(filter) = filtered_first {
        let context = context(filter::saved(filter));
        filter::filter(&mut a, filter, context, skipped, untyped)?;
    }
    for (register, copy) in saved.iter().filter(|it| !is_first(it)) {
        a.movq(*copy, *register)?;
    }
    let mut slow_paths = Vec::new();
    if role.chooses_records() {
        // That comes last.
    } else if role.may_be_untyped() {
        let mut over = a.create_label();
        slow_paths.extend(filter_and_count(
            &mut a, role, pointers, saved, PUSHED, over,
        )?);
        a.set_label(&mut over)?;
        a.nop()?;
    } else if role.is_counted {
        slow_paths.push(count::lookup(&mut a, pointers.count, pointers.point)?);
    }
    if !role.ends.is_empty() {
        pair::ends(&mut a, Ends::of(role), pointers, context(saved))?;
    } else if role.reads_time() {
        find_shared_and_time(&mut a, pointers)?;
    }
    let fields = match &role.watched {
        Some(watched) => {
            let now = RecordedHit {
                role,
                watched,
                saved,
                filter: role.filter.as_deref().filter(|_| filtered_first.is_none()),
                sample: sample.filter(|_| sampled_first.is_none()),
            };
            now.emit(&mut a, pointers, context(saved), untyped, &mut slow_paths)?
        }
        None => FieldCopies::default(),
    };
    for (register, copy) in saved.iter().filter(|it| !is_first(it)) {
        a.movq(*register, *copy)?;
    }
    if filtered_first.is_some() {
        a.jmp(skipped)?;
        a.set_label(&mut untyped)?;
        a.add_instruction(locked_increment(pointers.untyped_locked)?)?;
    }
    if !first.is_empty() {
        a.set_label(&mut skipped)?;
    }
    for (register, copy) in saved.iter().filter(is_first) {
        a.movq(*register, *copy)?;
    }
    a.emms()?;
    let mut jump = a.create_label();
    a.set_label(&mut jump)?;
    a.db(&[NOP; JUMP_LEN])?;
    for slow_path in slow_paths {
        count::emit_slow_path(&mut a, pointers.count, slow_path)?;
    }
    fields.emit(&mut a, pointers.layout, pointers.shared)?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let assembled = a.assemble_options(at.0, options)?;
    let jump_at = assembled.label_ip(&jump)?;
    let mut code = assembled.inner.code_buffer;
    code[(jump_at - at.0) as usize..][..JUMP_LEN].copy_from_slice(&jump_to(tail, jump_at)?);
    Ok(code)
}

/// A hit that is recorded after all else that is done with it.
struct RecordedHit<'r> {
    role: &'r Role,
    watched: &'r WatchRole,
    saved: &'static [SavedRegister],
    /// Chooses the hits that are recorded, unless that was done first.
    filter: Option<&'r FilterRole>,
    sample: Option<NonZeroU64>,
}

impl RecordedHit<'_> {
    /// Emits the code that records it, and, if a filter chooses hits here, does with the chosen ones what else is done with them.
    fn emit(
        self,
        a: &mut CodeAssembler,
        pointers: &Pointers,
        context: PointContext,
        mut untyped: CodeLabel,
        slow_paths: &mut Vec<SlowPath>,
    ) -> Result<FieldCopies, IcedError> {
        let mut over = a.create_label();
        if let Some(filter) = self.filter {
            filter::filter(a, filter, context, over, untyped)?;
            self.count_chosen(a, pointers, context, slow_paths)?;
            find_shared_and_time(a, pointers)?;
        }
        if let Some(every) = self.sample {
            sampling::unless_chosen(a, every, pointers.sampled, over)?;
        }
        let fields = record::record(a, self.watched, context)?;
        if self.filter.is_some() {
            a.jmp(over)?;
            a.set_label(&mut untyped)?;
            a.add_instruction(locked_increment(pointers.untyped_locked)?)?;
        }
        if self.filter.is_some() || self.sample.is_some() {
            a.set_label(&mut over)?;
            // There may be another label.
            a.nop()?;
        }
        Ok(fields)
    }

    /// Emits the code that adds a chosen hit to its histogram or its key, or counts it.
    fn count_chosen(
        &self,
        a: &mut CodeAssembler,
        pointers: &Pointers,
        context: PointContext,
        slow_paths: &mut Vec<SlowPath>,
    ) -> Result<(), IcedError> {
        let role = self.role;
        let mut count = |a: &mut CodeAssembler, counter| {
            let mut saved = self.saved.iter();
            saved.try_for_each(|(register, copy)| a.movq(*register, *copy))?;
            slow_paths.push(count::lookup(a, pointers.count, counter)?);
            Ok::<(), IcedError>(())
        };
        if role.histogram.is_none() && role.keys.is_none() {
            return if role.is_counted {
                count(a, pointers.point)
            } else {
                Ok(())
            };
        }
        let (mut no_value, mut added) = (a.create_label(), a.create_label());
        if let Some(histogram) = &role.histogram {
            values::record(a, histogram, role.keys.as_deref(), context, no_value)?;
        } else if let Some(keys) = &role.keys {
            let mut other = a.create_label();
            keys::count(a, keys, context, no_value, other)?;
            a.jmp(added)?;
            a.set_label(&mut other)?;
            count(a, pointers.point)?;
        }
        a.jmp(added)?;
        a.set_label(&mut no_value)?;
        count(a, pointers.untyped)?;
        // There is another label.
        a.nop()?;
        a.set_label(&mut added)?;
        a.nop()
    }
}

/// How many bytes the trampoline of a site has on the stack: its return address.
const PUSHED: u64 = 8;

/// Emits the code that loads the address of the shared data into rbx, and the time into rsi. Uses rax and rdx.
fn find_shared_and_time(a: &mut CodeAssembler, pointers: &Pointers) -> Result<(), IcedError> {
    load(a, rbx, pointers.shared)?;
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.lea(rsi, qword_ptr(rdx + rax))
}

/// Emits the code that goes to `over` unless the time in `time`, which it changes, is in the range of those that are
/// recorded. Expects the address of the shared data in rbx.
fn unless_in_range(
    a: &mut CodeAssembler,
    time: AsmRegister64,
    over: CodeLabel,
) -> Result<(), IcedError> {
    a.sub(time, qword_ptr(rbx + offset(shared::TIMES_FROM)))?;
    // Below the range, it is a large number without sign.
    a.cmp(time, qword_ptr(rbx + offset(shared::TIMES_MANY)))?;
    a.jae(over)
}

/// Returns a jump that is `JUMP_LEN` bytes long.
fn jump_to(target: LiveAddr, at: u64) -> Result<Vec<u8>, IcedError> {
    let mut encoder = Encoder::new(64);
    let jump = Instruction::with_branch(Code::Jmp_rel32_64, target.0)?;
    encoder.encode(&jump, at)?;
    Ok(encoder.take_buffer())
}

/// Hashes the low half of the address of a thread's control block to `bits` bits. `fs:0` holds that
/// address (x86-64 psABI, ELF Handling for Thread-Local Storage).
fn spread(a: &mut CodeAssembler, register: AsmRegister32, bits: u32) -> Result<(), IcedError> {
    spread_of(a, register, register, bits)
}

/// Hashes a 32-bit number to `bits` bits.
fn spread_of(
    a: &mut CodeAssembler,
    to: AsmRegister32,
    number: AsmRegister32,
    bits: u32,
) -> Result<(), IcedError> {
    /// 2³² divided by the golden ratio: Knuth's multiplicative hashing.
    const SPREAD: i32 = 0x9e37_79b9_u32 as i32;
    a.imul_3(to, number, SPREAD)?;
    a.shr(to, 32 - bits)
}

/// Loads the word at an address, by RIP-relative addressing.
fn load(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Mov_r64_rm64, to.into(), at)
}

/// Adds the word at an address, by RIP-relative addressing.
fn add(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Add_r64_rm64, to.into(), at)
}

/// Subtracts it.
fn sub(a: &mut CodeAssembler, from: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Sub_r64_rm64, from.into(), at)
}

fn by_address(
    a: &mut CodeAssembler,
    code: Code,
    to: Register,
    at: LiveAddr,
) -> Result<(), IcedError> {
    a.add_instruction(Instruction::with2(code, to, at_address(at))?)
}

/// Returns the instruction that adds one to the word at an address that several threads may change at once.
fn locked_increment(at: LiveAddr) -> Result<Instruction, IcedError> {
    let mut increment = Instruction::with1(Code::Inc_rm64, at_address(at))?;
    increment.set_has_lock_prefix(true);
    Ok(increment)
}

/// Returns the word at an offset from the address in a register.
fn word_at<T>(base: AsmRegister64, offset: T) -> AsmMemoryOperand
where
    AsmRegister64: Add<T, Output = AsmMemoryOperand>,
{
    qword_ptr(base + offset)
}

/// Returns the operand at an address, by RIP-relative addressing.
fn at_address(at: LiveAddr) -> MemoryOperand {
    // The assembler takes the target address as the displacement of an operand with base RIP.
    MemoryOperand::with_base_displ(Register::RIP, at.0 as i64)
}

/// Converts an offset in the shared data to the type of a displacement.
fn offset(of: u64) -> i32 {
    // The shared data are smaller than 2 GiB.
    of as i32
}

#[cfg(test)]
mod tests;
