//! The code of trampolines: a trampoline records a hit of its point and does what the displaced bytes
//! did. Pure.
//!
//! ```text
//! point        call trampoline
//! trampoline   save registers in MMX registers
//!              count    add one to the point's counter in the row that the thread owns (trampoline/count.rs)
//!              pair     push the time to this thread's stack of times in the shared data, or
//!                       pop it (trampoline/pair.rs)
//!              values   add the value of an expression to a histogram (trampoline/values.rs)
//!              watch    write a record into the ring of this group (trampoline/record.rs, fields.rs), maybe only if a
//!                       filter is true (trampoline/filter.rs), and of every Nth hit only (trampoline/sampling.rs)
//!              restore registers
//!        tail  disabled: ret        enabled: jmp wrapper, which returns to the point
//!
//! function     jmp trampoline
//! trampoline   save registers, count, restore registers; or, in functions that use the x87 unit, add one to a counter
//!              that all threads share; or, in OCaml code, to one of the domain (trampoline/template.rs)
//!              or begin or end a call (trampoline/call.rs); an end just before the function is left
//!              or drop the calls of a fiber that has ended (trampoline/call/freed_stack.rs)
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
//! pointer or under a lock (trampoline/saved.rs).

mod at_point;
mod call;
mod call_once;
mod callers;
mod chosen;
mod count;
mod emit;
mod fields;
mod filter;
mod function;
mod function_record;
mod histogram;
mod keys;
mod pair;
mod probe_site;
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

use iced_x86::IcedError;
use iced_x86::code_asm::{
    AsmRegister64, AsmRegisterMm, mm0, mm1, mm2, mm3, mm4, mm5, mm6, mm7, r8, r9, rax, rbx, rcx,
    rdi, rdx, rsi,
};

use self::count::CountPointers;
use self::function::FunctionPointers;
use self::template::CountTemplates;
use crate::address::LiveAddr;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::shared::SharedLayout;
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOwner};
use crate::observe::role::Role;
use crate::site::NOP;

/// A register that a trampoline uses, and the one that it is saved in.
type SavedRegister = (AsmRegister64, AsmRegisterMm);

/// The registers of a trampoline that only counts.
const SAVED_IF_COUNTED: [SavedRegister; 2] = [(rcx, mm1), (rdx, mm2)];

/// The registers of a trampoline with time stamps.
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
    /// The index of its counter of hits without an answer, if hits are filtered, and the one that all
    /// threads share.
    untyped: usize,
    untyped_locked: LiveAddr,
    /// If its hits are sampled, the counter of the hits from which those to record are chosen.
    sampled: LiveAddr,
    /// The place in memory that holds the address of the shared data.
    shared: LiveAddr,
    layout: SharedLayout,
}

impl Pointers {
    /// Returns the pointers of a point of an arena; the arena `sharing` has the shared data.
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
    /// The addresses of displaced instructions, each with that of its copy in a trampoline: a thread that was stopped
    /// at the instruction continues at the copy. The first instruction of a place is not among them: a thread that was
    /// stopped there executes the jump.
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
    let len = arena.trampoline_len;
    for (index, planned) in planned.iter().enumerate() {
        let (at, role) = (arena.trampoline(index), &planned.role);
        let Some(site) = plan.patch_site(planned) else {
            let wrapper = planned.point.wrapper().ok_or(DoesNotFit)?;
            let made = probe_site::code(at, len, wrapper, |tail| {
                let counting = (role.is_only_counted())
                    .then(|| templates.of_any().around_jump(at, index, tail));
                if let Some(code) = counting.transpose()?.flatten() {
                    return Ok(code);
                }
                probe_site::recording(at, role, &Pointers::of(arena, index, sharing), tail)
            });
            code.bytes.extend(made?);
            continue;
        };
        let end = code.bytes.len() + len as usize;
        let PointOwner::Function(function) = planned.of else {
            return Err(DoesNotFit);
        };
        let pointers = FunctionPointers::of(arena, index, sharing);
        let made = if let Some(made) = function::code(at, site, role, &pointers) {
            made
        } else if let Some(once) = plan.calls_once_at(planned) {
            let entry = planned.point.address;
            call_once::code(at, site, entry, once, pointers.counter)
        } else {
            let template = templates.of_function(plan.is_of_ocaml(planned));
            function::counting(at, index, site, arena, template)
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

/// Returns the registers that the trampoline of a point uses, which have to be saved before.
fn saved_for(role: &Role) -> &'static [SavedRegister] {
    match (&role.filter, &role.histogram) {
        _ if role.reads_time() || role.keys.is_some() => &SAVED_IF_TIMED,
        (filter, Some(histogram)) => values::saved(filter.as_deref(), histogram),
        (Some(filter), None) => filter::saved(filter),
        (None, None) => &SAVED_IF_COUNTED,
    }
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
    let of_sites = probe_site::longest(roles.iter().map(|it| &**it), plan.shared)?;
    let templates = CountTemplates::of(FAR_POINTERS.0, FAR_POINTERS.1)?;
    let of_functions = plan.points.iter().filter_map(|planned| {
        let site = plan.patch_site(planned)?;
        if plan.calls_once_at(planned).is_some() {
            return Some(call_once::LEN);
        }
        let template = templates.of_function(plan.is_of_ocaml(planned));
        let role = role_of(&planned.role);
        Some(function::len(site, &role, plan.shared, template))
    });
    Ok(of_functions.fold(of_sites, u64::max))
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

#[cfg(test)]
mod tests;
