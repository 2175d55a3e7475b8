//! Trampolines of places in functions, which end with the displaced instructions.

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, qword_ptr, rsp};

use super::at_point::{PointContext, RegisterPlace};
use super::call::{self, CallEnd, TimedCalls, freed_stack};
use super::chosen;
use super::count::{self, CountPointers};
use super::emit::locked_increment;
use super::function_record::{self, RecordPointers, RecordedEvent};
use super::pair::{self, Ends};
use super::saved::{LockedRegisters, SaveArea};
use super::stack_room::RED_ZONE;
use super::template::CountTemplate;
use super::{DoesNotFit, FAR_POINTERS, Pointers, SAVED_IF_COUNTED, SAVED_IF_TIMED, saved_for};
use crate::address::{LiveAddr, LoadBias};
use crate::error::Refusal;
use crate::observe::layout::arena::{Arena, LINE};
use crate::observe::layout::rows::claim;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::role::{ExitsRole, FreedStackRole, FunctionPart, Role};
use crate::patch_plan::displaced::{DisplacedCopy, ExitKind};
use crate::patch_plan::site::PatchSite;

/// A trampoline, and the copy of the displaced instructions in it.
pub(super) type FunctionCode = (Vec<u8>, DisplacedCopy);

/// How the trampoline of a place in a function finds the data that it writes.
pub(super) struct FunctionPointers {
    pub(super) of_point: Pointers,
    /// The counter of the point that all threads share.
    pub(super) counter: LiveAddr,
    /// The byte that distinguishes forked children.
    pub(super) in_program: LiveAddr,
    /// Where registers are saved, under a lock.
    pub(super) saved_registers: LiveAddr,
}

impl FunctionPointers {
    /// Returns the pointers of a point of an arena; the arena `sharing` has the shared data.
    pub(super) fn of(arena: &Arena, point: usize, sharing: &Arena) -> FunctionPointers {
        FunctionPointers {
            of_point: Pointers::of(arena, point, sharing),
            counter: arena.locked_counter(point),
            in_program: arena.data().plus(claim::IN_PROGRAM),
            saved_registers: arena.saved_registers(),
        }
    }

    /// Returns pointers for a trampoline at `near`, whose length is the same wherever it and its data are.
    fn near(near: LiveAddr, layout: SharedLayout) -> FunctionPointers {
        let (far, count) = FAR_POINTERS;
        let distance = far.0.wrapping_sub(near.0);
        let here = |it: LiveAddr| LiveAddr(it.0.wrapping_sub(distance));
        FunctionPointers {
            of_point: Pointers {
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
            },
            counter: near,
            in_program: near,
            saved_registers: near,
        }
    }

    pub(super) fn of_record(&self) -> RecordPointers {
        RecordPointers {
            shared: self.of_point.shared,
            in_program: self.in_program,
            layout: self.of_point.layout,
            untyped: self.of_point.untyped_locked,
            sampled: self.of_point.sampled,
            saved: LockedRegisters {
                at: self.saved_registers,
                unsaved: self.counter,
            },
        }
    }

    /// Emits the code that counts a hit, and saves the registers for that itself.
    fn count_saved(
        &self,
        a: &mut CodeAssembler,
        role: &Role,
        place: SaveArea,
    ) -> Result<(), IcedError> {
        let locked = LockedRegisters {
            at: self.saved_registers,
            unsaved: self.of_point.untyped_locked,
        };
        chosen::count_saved(a, role, &self.of_point, place, (locked, self.counter))
    }
}

/// Returns the trampoline at `at` for a place in a function; `None` if it only counts.
///
/// # Errors
///
/// If it is too far from what it refers to.
pub(super) fn code(
    at: LiveAddr,
    site: (&PatchSite, LoadBias),
    role: &Role,
    pointers: &FunctionPointers,
) -> Option<Result<FunctionCode, DoesNotFit>> {
    match role.freed_stack {
        Some(freed) => Some(after_freed_stack(at, site, (role, freed), pointers)),
        None => recording(at, site, role, pointers),
    }
}

/// Returns the trampoline at `at` of the function that frees the stacks of fibers, and the copy of the displaced
/// instructions in it: what is done there comes first, then what its hits are observed for, if they are.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn after_freed_stack(
    at: LiveAddr,
    site: (&PatchSite, LoadBias),
    (role, freed): (&Role, FreedStackRole),
    pointers: &FunctionPointers,
) -> Result<FunctionCode, DoesNotFit> {
    let of_record = pointers.of_record();
    let free = site.0.mmx_is_free();
    let mut code = freed_stack::code(at, freed, free, role.is_in_range, of_record)?;
    let next = at.plus(code.len() as u64);
    let (rest, copy) = match recording(next, site, role, pointers) {
        Some(made) => made?,
        None if role.is_counted => {
            let mut a = CodeAssembler::new(64)?;
            a.add_instruction(locked_increment(pointers.counter)?)?;
            with_displaced(a.assemble(next.0)?, next, site)?
        }
        None => with_displaced(Vec::new(), next, site)?,
    };
    code.extend(rest);
    Ok((code, copy))
}

/// Returns the trampoline for what is recorded of its hits; `None` if it only counts.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn recording(
    at: LiveAddr,
    site: (&PatchSite, LoadBias),
    role: &Role,
    pointers: &FunctionPointers,
) -> Option<Result<FunctionCode, DoesNotFit>> {
    if !role.ends.is_empty() {
        Some(of_paired_site(at, site, role, &pointers.of_point))
    } else if role.reads_time() {
        Some(of_recorded_function(at, site, role, pointers.of_record()))
    } else if role.may_be_untyped() {
        Some(of_filtered_function(at, site, role, pointers))
    } else {
        None
    }
}

/// Returns the length of the trampoline for a place in a function, in bytes.
pub(super) fn len(
    (site, bias): (&PatchSite, LoadBias),
    role: &Role,
    layout: SharedLayout,
    template: &CountTemplate,
) -> u64 {
    // Anywhere near the site; at another place, up to 7 bytes more are needed to align data.
    let near = LiveAddr(bias.live(site.address()).0 & !7);
    let alignment = if site.moves_call() { 7 } else { 0 };
    let pointers = FunctionPointers::near(near, layout);
    let len = match code(near, (site, bias), role, &pointers) {
        Some(made) => made.map_or(LINE, |(code, _)| code.len() as u64),
        None => {
            let copy = site.copy_at(bias, near);
            let copy = copy.map_or(LINE, |copy| copy.code().len() as u64);
            template.len() as u64 + copy
        }
    };
    (len + alignment).next_multiple_of(LINE)
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
) -> Result<FunctionCode, DoesNotFit> {
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
    with_copy(code, copy)
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
) -> Result<FunctionCode, DoesNotFit> {
    const PUSHED: i32 = RED_ZONE + 8 * SAVED_IF_TIMED.len() as i32;
    let mut a = CodeAssembler::new(64)?;
    a.lea(rsp, qword_ptr(rsp - PUSHED))?;
    for (at, (register, _)) in (0..).step_by(8).zip(SAVED_IF_TIMED) {
        a.mov(qword_ptr(rsp + at), register)?;
    }
    let context = PointContext {
        saved: &SAVED_IF_TIMED,
        saved_at: RegisterPlace::Pushed,
        pushed: PUSHED as u64,
        shared: pointers.shared,
        layout: pointers.layout,
    };
    pair::ends(&mut a, Ends::of(role), pointers, context)?;
    for (at, (register, _)) in (0..).step_by(8).zip(SAVED_IF_TIMED) {
        a.mov(register, qword_ptr(rsp + at))?;
    }
    a.lea(rsp, qword_ptr(rsp + PUSHED))?;
    with_displaced(a.assemble(at.0)?, at, (site, bias))
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
) -> Result<FunctionCode, DoesNotFit> {
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
    with_copy(code, copy)
}

/// Returns the trampoline at `at` of a function that is counted, the point with this index, and the copy of the
/// displaced instructions in it.
///
/// # Errors
///
/// If it is too far from what it refers to.
pub(super) fn counting(
    at: LiveAddr,
    index: usize,
    (site, bias): (&PatchSite, LoadBias),
    arena: &Arena,
    template: &CountTemplate,
) -> Result<FunctionCode, DoesNotFit> {
    if site.mmx_is_free() {
        let copy = site.copy_at(bias, at.plus(template.split() as u64));
        let copy = copy.map_err(|_| DoesNotFit)?;
        if let Some(code) = template.around(at, index, copy.code()) {
            return Ok((code, copy));
        }
    }
    with_displaced(count::count_locked(at, arena, index)?, at, (site, bias))
}

/// Returns the code of a trampoline at `at` with the copy of the displaced instructions after it, and that copy.
///
/// # Errors
///
/// If it is too far from what it refers to.
pub(super) fn with_displaced(
    code: Vec<u8>,
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
) -> Result<FunctionCode, DoesNotFit> {
    let copy = site.copy_at(bias, at.plus(code.len() as u64));
    with_copy(code, copy)
}

fn with_copy(
    mut code: Vec<u8>,
    copy: Result<DisplacedCopy, Refusal>,
) -> Result<FunctionCode, DoesNotFit> {
    let copy = copy.map_err(|_| DoesNotFit)?;
    code.extend(copy.code());
    Ok((code, copy))
}

/// Returns the trampoline at `at` of a function of which only some hits are counted, or which has a histogram, and the
/// copy of the displaced instructions in it. If the function uses the x87 unit, registers are saved under the lock,
/// and the two counters of the point are incremented by locked instructions; the second one also if the lock is not
/// free.
///
/// # Errors
///
/// If it is too far from what it refers to.
fn of_filtered_function(
    at: LiveAddr,
    (site, bias): (&PatchSite, LoadBias),
    role: &Role,
    pointers: &FunctionPointers,
) -> Result<FunctionCode, DoesNotFit> {
    if let Some(exits) = role.exits {
        let mut at_exit = |at: LiveAddr, kind| {
            let code = ask_at_exit(at, (exits, kind), role, pointers);
            code.map_err(|_| Refusal::OutOfReach)
        };
        return with_copy(Vec::new(), site.copy_with_exits(bias, at, &mut at_exit));
    }
    let mut a = CodeAssembler::new(64)?;
    let mut end = a.create_label();
    let registers = saved_for(role);
    if site.mmx_is_free() {
        let mut over = a.create_label();
        for (register, copy) in registers {
            a.movq(*copy, *register)?;
        }
        let slow_paths =
            chosen::filter_and_count(&mut a, role, &pointers.of_point, registers, 0, over)?;
        a.set_label(&mut over)?;
        for (register, copy) in SAVED_IF_COUNTED {
            a.movq(register, copy)?;
        }
        a.emms()?;
        a.jmp(end)?;
        for slow_path in slow_paths {
            count::emit_slow_path(&mut a, pointers.of_point.count, slow_path)?;
        }
    } else {
        pointers.count_saved(&mut a, role, SaveArea::Lock)?;
    }
    a.set_label(&mut end)?;
    // A label needs an instruction.
    a.nop()?;
    with_displaced(a.assemble(at.0)?, at, (site, bias))
}

/// Returns the code at `at` that asks for the result of a function where it returns. If it jumps to another function
/// instead, the hit is untyped: the result is that of the other one.
fn ask_at_exit(
    at: LiveAddr,
    (exits, kind): (ExitsRole, ExitKind),
    role: &Role,
    pointers: &FunctionPointers,
) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    match kind {
        ExitKind::Jump => a.add_instruction(locked_increment(pointers.of_point.untyped_locked)?)?,
        ExitKind::Return => {
            // A result of C may be in the x87 unit.
            let place = if exits.is_ocaml {
                SaveArea::Mmx
            } else {
                SaveArea::StackOrLock
            };
            pointers.count_saved(&mut a, role, place)?;
        }
    }
    a.assemble(at.0)
}
