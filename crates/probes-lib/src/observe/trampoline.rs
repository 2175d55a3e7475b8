//! The code of a trampoline: learns of a hit what is to be results, and does then what its site did before.
//! Pure.
//!
//! ```text
//! site     nop; call trampoline
//! trampoline     keep registers
//!          count    one more in the counter of the site, for this group of threads
//!          pair     the time, to or from the stack of this thread (trampoline/pair.rs)
//!          event    a record into a ring (trampoline/event.rs)
//!          give registers back
//!          off: ret           on: jmp wrapper, which returns to the site
//! ```
//!
//! It keeps all registers, but for the flags, which are dead at a site; it uses a few words of the
//! stack beside the return address, calls nothing, and touches no memory that may not be there.

mod pair;
mod record;

use iced_x86::code_asm::{
    AsmRegister32, AsmRegister64, CodeAssembler, dword_ptr, ecx, qword_ptr, r8, r9, rax, rbx, rcx,
    rdi, rdx, rsi,
};
use iced_x86::{Code, IcedError, Instruction, MemoryOperand, Register};

use crate::address::LiveAddr;
use crate::observe::layout::arena::{GROUP_BITS, displacement};
use crate::observe::layout::shared::Shared;
use crate::observe::plan::Role;

/// A line of the cache: trampolines are as many of them as the longest takes.
pub(crate) const LINE: u64 = 64;

/// The bytes of the tail, with which a trampoline ends; its last instruction, whose first byte is `RET` or
/// `JMP`.
pub(crate) const TAIL_LEN: u64 = 8;

pub(crate) use crate::site::{JMP, RET};
const NOP: u8 = 0x90;

/// Registers that what takes time stamps needs.
const NEEDED: [AsmRegister64; 8] = [rax, rcx, rdx, rbx, rsi, rdi, r8, r9];

/// Where a trampoline finds what it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrampolinePlaces {
    /// Where the address of the counters stands.
    pub(crate) counters: LiveAddr,
    /// Binary logarithm of the bytes of a group's counters.
    pub(crate) row_bits: u32,
    /// Of the counter of the site, in bytes, within those of a group.
    pub(crate) counter: u32,
    /// Where the address of what is shared stands.
    pub(crate) shared: LiveAddr,
    pub(crate) layout: Shared,
}

/// The first byte of the tail.
pub(crate) fn tail_byte(enabled: bool) -> u8 {
    if enabled { JMP } else { RET }
}

/// A trampoline that cannot be: what it needs is too far away, or it is longer than its place.
#[derive(Debug)]
pub(crate) struct DoesNotFit;

impl From<IcedError> for DoesNotFit {
    fn from(_: IcedError) -> DoesNotFit {
        DoesNotFit
    }
}

/// How many bytes the trampoline of a site has.
///
/// # Errors
///
/// As of [`whole`].
pub(crate) fn len(role: &Role, layout: Shared) -> Result<u64, DoesNotFit> {
    let near = LiveAddr(1 << 20);
    let places = TrampolinePlaces {
        counters: near,
        row_bits: 12,
        counter: u32::MAX >> 8,
        shared: near,
        layout,
    };
    let code = work(near, role, &places)?;
    Ok((code.len() as u64 + TAIL_LEN).next_multiple_of(LINE))
}

/// The trampoline at `at`, `len` bytes long, of a site that is disabled.
///
/// # Errors
///
/// If what it needs is too far away, or it does not fit.
pub(crate) fn whole(
    at: LiveAddr,
    len: u64,
    role: &Role,
    places: &TrampolinePlaces,
    wrapper: LiveAddr,
) -> Result<Vec<u8>, DoesNotFit> {
    const SHORT_JMP: u8 = 0xeb;
    let mut trampoline = work(at, role, places)?;
    let tail = len.saturating_sub(TAIL_LEN) as usize;
    // One that is cut off kills whoever executes it.
    let left = tail.checked_sub(trampoline.len()).ok_or(DoesNotFit)?;
    match left {
        0 => {}
        1 => trampoline.push(NOP),
        2..130 => trampoline.extend([SHORT_JMP, (left - 2) as u8]),
        _ => {
            let end = at.plus(trampoline.len() as u64 + 5);
            trampoline.push(JMP);
            trampoline.extend(displacement(end, at.plus(tail as u64)));
        }
    }
    trampoline.resize(tail, NOP);
    trampoline.push(RET);
    let end = at.plus(trampoline.len() as u64 + 4);
    trampoline.extend(displacement(end, wrapper));
    trampoline.resize(len as usize, NOP);
    Ok(trampoline)
}

/// All but the tail.
fn work(at: LiveAddr, role: &Role, places: &TrampolinePlaces) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let kept: &[AsmRegister64] = match role.is_timed() {
        true => &NEEDED,
        false => &[rcx],
    };
    for register in kept {
        a.push(*register)?;
    }
    if role.is_counted {
        count(&mut a, places)?;
    }
    if role.is_timed() {
        // From here on rbx is where it is shared, and rsi the time.
        load(&mut a, rbx, places.shared)?;
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.lea(rsi, qword_ptr(rdx + rax))?;
    }
    for end in &role.ends {
        pair::end(&mut a, *end, places.layout)?;
    }
    if let Some(watched) = &role.watched {
        record::record(&mut a, watched, kept, places.layout)?;
    }
    for register in kept.iter().rev() {
        a.pop(*register)?;
    }
    a.assemble(at.0)
}

/// Threads of a group share counters, so these are locked.
fn count(a: &mut CodeAssembler, places: &TrampolinePlaces) -> Result<(), IcedError> {
    a.mov(ecx, dword_ptr(0).fs())?;
    spread(a, ecx, GROUP_BITS)?;
    a.shl(ecx, places.row_bits)?;
    add(a, rcx, places.counters)?;
    a.lock().inc(qword_ptr(rcx + places.counter))
}

/// Makes so many bits of the low half of the address of a thread's control block, to which `fs:0`
/// points (x86-64 psABI, ELF Handling for Thread-Local Storage).
fn spread(a: &mut CodeAssembler, register: AsmRegister32, bits: u32) -> Result<(), IcedError> {
    /// 2³² by the golden ratio: Knuth's multiplicative hashing.
    const SPREAD: i32 = 0x9e37_79b9_u32 as i32;
    a.imul_3(register, register, SPREAD)?;
    a.shr(register, 32 - bits)
}

/// Loads what stands at an address, relative to the instruction.
fn load(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Mov_r64_rm64, to, at)
}

/// Adds what stands at an address, relative to the instruction.
fn add(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Add_r64_rm64, to, at)
}

fn by_address(
    a: &mut CodeAssembler,
    code: Code,
    to: AsmRegister64,
    at: LiveAddr,
) -> Result<(), IcedError> {
    // The displacement from RIP is an address to this assembler.
    let operand = MemoryOperand::with_base_displ(Register::RIP, at.0 as i64);
    a.add_instruction(Instruction::with2(code, Register::from(to), operand)?)
}

/// An offset of what is shared, as instructions have it.
fn offset(of: u64) -> i32 {
    // What is shared is smaller than 2 GiB.
    of as i32
}

#[cfg(test)]
mod tests;
