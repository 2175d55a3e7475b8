//! The code of trampolines: a trampoline records a hit of its point and does what the displaced bytes
//! did. Pure.
//!
//! ```text
//! point        call trampoline
//! trampoline   save registers in MMX registers
//!              count    add one to the point's hit counter of this thread's group (see `spread`)
//!              pair     push the time to this thread's stack of times in the shared data, or
//!                       pop it (trampoline/pair.rs)
//!              watch    write a record into the ring of this group (trampoline/record.rs)
//!              restore registers
//!        tail  disabled: ret        enabled: jmp wrapper, which returns to the point
//!
//! function     jmp trampoline
//! trampoline   count    add one to the function's hit counter
//!              the displaced instructions; jmp to what follows them
//! ```
//!
//! It preserves all registers except the flags, which are dead at a point, and those of the x87 unit, which that of a
//! function leaves alone. It calls nothing, and accesses no memory that might be unmapped.
//!
//! It does not store below the return address. There may be no more stack: OCaml 4 raises
//! `Stack_overflow` if the fault is in OCaml code, and the process dies if it is in a trampoline. The
//! call's own push is in OCaml code or, at the sites of ppx_probe, in 16 bytes of which the upper half
//! holds a return address. So registers are saved in MMX registers, which belong to the thread, and
//! are saved for signal handlers like all others. They are those of the x87 unit, which is empty at
//! a site: ocamlopt emits no x87 instruction, and the psABI (3.2.1) leaves none in use at a call.

mod pair;
mod record;

use std::collections::HashMap;

use iced_x86::code_asm::{
    AsmRegister32, AsmRegister64, AsmRegisterMm, CodeAssembler, dword_ptr, ecx, get_gpr64, mm0,
    mm1, mm2, mm3, mm4, mm5, mm6, mm7, qword_ptr, r8, r9, rax, rbx, rcx, rdi, rdx, rsi,
};
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};

use crate::address::{LiveAddr, LoadBias};
use crate::observe::layout::arena::{Arena, LINE, TAIL_LEN};
use crate::observe::layout::shared::{GROUP_BITS, SharedLayout};
use crate::observe::plan::{ObservationPlan, PlannedPoint, PointOf};
use crate::observe::point::Role;
use crate::patch_plan::site::PatchSite;
use crate::site::{NOP, RET};

/// A register that a trampoline uses, and the one that it is saved in.
type Saved = (AsmRegister64, AsmRegisterMm);

/// Those of a trampoline that only counts.
const SAVED_IF_COUNTED: [Saved; 1] = [(rcx, mm0)];

/// Those of a trampoline with time stamps.
const SAVED_IF_TIMED: [Saved; 8] = [
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
    /// The place in memory that holds the address of the hit counters.
    counters: LiveAddr,
    /// Binary logarithm of the bytes of a group's counters.
    row_bits: u32,
    /// The offset of the counter of the point among those of a group, in bytes.
    counter: u32,
    /// The place in memory that holds the address of the shared data.
    shared: LiveAddr,
    layout: SharedLayout,
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
    /// Where in the trampolines threads go on that were stopped at a displaced instruction: at the same one. Not that
    /// of the first displaced instruction, at which the jump is.
    pub(crate) moves: Vec<(LiveAddr, LiveAddr)>,
    /// The functions whose trampoline is too far from what their displaced instructions refer to.
    pub(crate) out_of_reach: Vec<usize>,
}

/// Returns the code of an arena, whose sites are disabled; `planned` are its points. The arena `sharing` has the
/// shared data.
///
/// # Errors
///
/// If the data are too far away, or a trampoline is longer than the arena's are.
pub(crate) fn arena_code(
    arena: &Arena,
    plan: &ObservationPlan,
    planned: &[PlannedPoint],
    sharing: &Arena,
) -> Result<ArenaCode, DoesNotFit> {
    let mut code = ArenaCode {
        bytes: arena.header_and_table(sharing),
        ..ArenaCode::default()
    };
    for (index, planned) in planned.iter().enumerate() {
        let pointers = Pointers {
            counters: arena.data_pointer(),
            row_bits: arena.row_bits(),
            counter: 8 * index as u32,
            shared: arena.shared_pointer(),
            layout: sharing.shared,
        };
        let at = arena.trampoline(index);
        let len = arena.trampoline_len;
        let Some((site, bias)) = plan.patch_site(planned) else {
            let wrapper = planned.point.wrapper().ok_or(DoesNotFit)?;
            code.bytes
                .extend(trampoline(at, len, &planned.role, &pointers, wrapper)?);
            continue;
        };
        let end = code.bytes.len() + len as usize;
        code.bytes
            .extend(count_call(at, arena.data().plus(8 * index as u64))?);
        let here = at.plus(len - (end - code.bytes.len()) as u64);
        match site.copy_at(bias, here) {
            Ok(copy) => {
                code.moves.extend(copy.moves().skip(1));
                code.bytes.extend(copy.code());
            }
            Err(_) => {
                if let PointOf::Function(function) = planned.of {
                    code.out_of_reach.push(function);
                }
            }
        }
        if let (true, PointOf::Function(function)) = (code.bytes.len() > end, planned.of) {
            code.out_of_reach.push(function);
        }
        code.bytes.resize(end, NOP);
    }
    code.bytes.resize(arena.code_len() as usize, 0);
    Ok(code)
}

/// Returns the instruction that adds one to the counter of a function.
fn count_call(at: LiveAddr, counter: LiveAddr) -> Result<Vec<u8>, IcedError> {
    let operand = MemoryOperand::with_base_displ(Register::RIP, counter.0 as i64);
    let mut increment = Instruction::with1(Code::Inc_rm64, operand)?;
    increment.set_has_lock_prefix(true);
    let mut encoder = Encoder::new(64);
    encoder.encode(&increment, at.0)?;
    Ok(encoder.take_buffer())
}

/// How many bytes [`count_call`] takes.
const COUNT_CALL_LEN: u64 = 8;

/// Returns the length of the longest trampoline of a plan, in bytes.
///
/// # Errors
///
/// See [`arena_code`].
pub(crate) fn longest(plan: &ObservationPlan) -> Result<u64, DoesNotFit> {
    let sites = plan.points.iter().filter(|it| it.site().is_some());
    let of_sites = longest_of_sites(sites.map(|it| &it.role), plan.shared)?;
    let functions = plan.points.iter().filter_map(|it| plan.patch_site(it));
    let of_functions = functions.map(|(site, bias)| len_of_function(site, bias));
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
        if let Some(watched) = &mut shape.watched {
            watched.point = 0;
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

/// Returns the length of the trampoline of a function, in bytes.
fn len_of_function(site: &PatchSite, bias: LoadBias) -> u64 {
    // Anywhere near the site; at another place, up to 7 bytes more are needed to align data.
    let near = LiveAddr(bias.live(site.address()).0 & !7);
    let copy = site
        .copy_at(bias, near)
        .map_or(LINE, |copy| copy.code().len() as u64);
    let alignment = if site.moves_call() { 7 } else { 0 };
    (COUNT_CALL_LEN + copy + alignment).next_multiple_of(LINE)
}

/// Returns the length of a trampoline, in bytes.
fn len(role: &Role, layout: SharedLayout) -> Result<u64, DoesNotFit> {
    let near = LiveAddr(1 << 20);
    let pointers = Pointers {
        counters: near,
        row_bits: 12,
        counter: u32::MAX >> 8,
        shared: near,
        layout,
    };
    let code = recording(near, role, &pointers)?;
    Ok((code.len() as u64 + TAIL_LEN).next_multiple_of(LINE))
}

/// Returns the trampoline at `at`, `len` bytes long, of a point that is disabled.
fn trampoline(
    at: LiveAddr,
    len: u64,
    role: &Role,
    pointers: &Pointers,
    wrapper: LiveAddr,
) -> Result<Vec<u8>, DoesNotFit> {
    let mut code = recording(at, role, pointers)?;
    let tail = len.saturating_sub(TAIL_LEN) as usize;
    // A trampoline that was cut off would crash the thread that executes it.
    let gap = tail.checked_sub(code.len()).ok_or(DoesNotFit)?;
    let jump = |kind, from: usize, to: LiveAddr| {
        let mut encoder = Encoder::new(64);
        let jump = Instruction::with_branch(kind, to.0)?;
        encoder.encode(&jump, at.plus(from as u64).0)?;
        Ok::<_, IcedError>(encoder.take_buffer())
    };
    let tail_at = at.plus(tail as u64);
    match gap {
        0 | 1 => {}
        2..130 => code.extend(jump(Code::Jmp_rel8_64, code.len(), tail_at)?),
        _ => code.extend(jump(Code::Jmp_rel32_64, code.len(), tail_at)?),
    }
    code.resize(tail, NOP);
    // The two instructions that a tail can be, `jmp wrapper` and `ret`, differ in the first byte
    // only.
    code.extend(jump(Code::Jmp_rel32_64, tail, wrapper)?);
    code[tail] = RET;
    code.resize(len as usize, NOP);
    Ok(code)
}

/// Returns the code of a trampoline without its tail.
fn recording(at: LiveAddr, role: &Role, pointers: &Pointers) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let saved: &[Saved] = if role.is_timed() {
        &SAVED_IF_TIMED
    } else {
        &SAVED_IF_COUNTED
    };
    for (register, copy) in saved {
        a.movq(*copy, *register)?;
    }
    if role.is_counted {
        count(&mut a, pointers)?;
    }
    if role.is_timed() {
        // From here on rbx is the address of the shared data, and rsi the time.
        load(&mut a, rbx, pointers.shared)?;
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.lea(rsi, qword_ptr(rdx + rax))?;
    }
    for end in &role.ends {
        pair::end(&mut a, *end, &role.marks, saved, pointers.layout)?;
    }
    if let Some(watched) = &role.watched {
        record::record(&mut a, watched, saved, pointers.layout)?;
    }
    for (register, copy) in saved {
        a.movq(*register, *copy)?;
    }
    a.emms()?;
    a.assemble(at.0)
}

/// Adds one to the counter, by a locked instruction: the threads of a group share it.
fn count(a: &mut CodeAssembler, pointers: &Pointers) -> Result<(), IcedError> {
    a.mov(ecx, dword_ptr(0).fs())?;
    spread(a, ecx, GROUP_BITS)?;
    a.shl(ecx, pointers.row_bits)?;
    add(a, rcx, pointers.counters)?;
    a.lock().inc(qword_ptr(rcx + pointers.counter))
}

/// Hashes the low half of the address of a thread's control block to `bits` bits. `fs:0` holds that
/// address (x86-64 psABI, ELF Handling for Thread-Local Storage).
fn spread(a: &mut CodeAssembler, register: AsmRegister32, bits: u32) -> Result<(), IcedError> {
    /// 2³² divided by the golden ratio: Knuth's multiplicative hashing.
    const SPREAD: i32 = 0x9e37_79b9_u32 as i32;
    a.imul_3(register, register, SPREAD)?;
    a.shr(register, 32 - bits)
}

/// Loads what a general register held at the point, which is in the copies of the `saved` registers.
fn load_at_point(
    a: &mut CodeAssembler,
    to: AsmRegister64,
    register: Register,
    saved: &[Saved],
) -> Result<(), IcedError> {
    let register = get_gpr64(register);
    match saved.iter().find(|(saved, _)| Some(*saved) == register) {
        Some((_, copy)) => a.movq(to, *copy),
        None => a.mov(to, register.unwrap_or(to)),
    }
}

/// Loads the word at an address, by RIP-relative addressing.
fn load(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Mov_r64_rm64, to, at)
}

/// Adds the word at an address, by RIP-relative addressing.
fn add(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Add_r64_rm64, to, at)
}

fn by_address(
    a: &mut CodeAssembler,
    code: Code,
    to: AsmRegister64,
    at: LiveAddr,
) -> Result<(), IcedError> {
    // This assembler takes the target address as the displacement of an operand with base RIP.
    let operand = MemoryOperand::with_base_displ(Register::RIP, at.0 as i64);
    a.add_instruction(Instruction::with2(code, Register::from(to), operand)?)
}

/// Converts an offset in the shared data to the type of a displacement.
fn offset(of: u64) -> i32 {
    // The shared data are smaller than 2 GiB.
    of as i32
}

#[cfg(test)]
mod tests;
