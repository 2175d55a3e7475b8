//! The code of trampolines: a trampoline records a hit of its point and does what the displaced bytes
//! did. Pure.
//!
//! ```text
//! point        call trampoline
//! trampoline   save registers
//!              count    add one to the point's counter of this group of threads
//!              pair     push the time to the stack of this thread, or pop it (trampoline/pair.rs)
//!              watch    write a record into the ring of this group (trampoline/record.rs)
//!              restore registers
//!        tail  disabled: ret        enabled: jmp wrapper, which returns to the point
//! ```
//!
//! It preserves all registers except the flags, which are dead at a point. It uses a few words of the
//! stack below the return address, calls nothing, and accesses no memory that may not be mapped.

mod pair;
mod record;

use std::collections::HashMap;

use iced_x86::code_asm::{
    AsmRegister32, AsmRegister64, CodeAssembler, dword_ptr, ecx, qword_ptr, r8, r9, rax, rbx, rcx,
    rdi, rdx, rsi,
};
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};

use crate::address::LiveAddr;
use crate::observe::layout::arena::{Arena, LINE, TAIL_LEN};
use crate::observe::layout::shared::{GROUP_BITS, SharedLayout};
use crate::observe::point::Role;
use crate::site::{NOP, RET};

/// The registers that a trampoline with time stamps uses.
const NEEDED: [AsmRegister64; 8] = [rax, rcx, rdx, rbx, rsi, rdi, r8, r9];

/// How a trampoline finds the data that it writes.
#[derive(Clone, Copy, Debug)]
struct Pointers {
    /// Where the address of the counters is in memory.
    counters: LiveAddr,
    /// Binary logarithm of the bytes of a group's counters.
    row_bits: u32,
    /// The offset of the counter of the point among those of a group, in bytes.
    counter: u32,
    /// Where the address of the shared data is in memory.
    shared: LiveAddr,
    layout: SharedLayout,
}

/// A trampoline that cannot be: the data are too far away, or it is longer than its place.
#[derive(Debug)]
pub(crate) struct DoesNotFit;

impl From<IcedError> for DoesNotFit {
    fn from(_: IcedError) -> DoesNotFit {
        DoesNotFit
    }
}

/// Returns the code of an arena, whose points are disabled and have these roles. The arena `sharing`
/// has the shared data.
///
/// # Errors
///
/// If the data are too far away, or a trampoline is longer than the arena's are.
pub(crate) fn arena_code<'r>(
    arena: &Arena,
    roles: impl Iterator<Item = &'r Role>,
    sharing: &Arena,
) -> Result<Vec<u8>, DoesNotFit> {
    let mut code = arena.header_and_table(sharing);
    for ((index, point), role) in arena.points.iter().enumerate().zip(roles) {
        let pointers = Pointers {
            counters: arena.data_pointer(),
            row_bits: arena.row_bits(),
            counter: 8 * index as u32,
            shared: arena.shared_pointer(),
            layout: sharing.shared,
        };
        let at = arena.trampoline(index);
        let len = arena.trampoline_len;
        code.extend(trampoline(at, len, role, &pointers, point.wrapper())?);
    }
    code.resize(arena.code_len() as usize, 0);
    Ok(code)
}

/// Returns the length of the longest trampoline of these roles, in bytes.
///
/// # Errors
///
/// See [`arena_code`].
pub(crate) fn longest<'r>(
    roles: impl Iterator<Item = &'r Role>,
    layout: SharedLayout,
) -> Result<u64, DoesNotFit> {
    // Most roles differ in the number of their point alone.
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
    // A trampoline that were cut off would crash the thread that executes it.
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
    // Of the two instructions that a tail can be, the first byte alone differs.
    code.extend(jump(Code::Jmp_rel32_64, tail, wrapper)?);
    code[tail] = RET;
    code.resize(len as usize, NOP);
    Ok(code)
}

/// Returns the code of a trampoline without its tail.
fn recording(at: LiveAddr, role: &Role, pointers: &Pointers) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let saved: &[AsmRegister64] = if role.is_timed() { &NEEDED } else { &[rcx] };
    for register in saved {
        a.push(*register)?;
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
        pair::end(&mut a, *end, pointers.layout)?;
    }
    if let Some(watched) = &role.watched {
        record::record(&mut a, watched, saved, pointers.layout)?;
    }
    for register in saved.iter().rev() {
        a.pop(*register)?;
    }
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

/// Hashes to so many bits the low half of the address of a thread's control block, to which `fs:0`
/// points (x86-64 psABI, ELF Handling for Thread-Local Storage).
fn spread(a: &mut CodeAssembler, register: AsmRegister32, bits: u32) -> Result<(), IcedError> {
    /// 2³² by the golden ratio: Knuth's multiplicative hashing.
    const SPREAD: i32 = 0x9e37_79b9_u32 as i32;
    a.imul_3(register, register, SPREAD)?;
    a.shr(register, 32 - bits)
}

/// Loads the word at an address, relative to the instruction.
fn load(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Mov_r64_rm64, to, at)
}

/// Adds the word at an address, relative to the instruction.
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

/// Returns an offset of the shared data, as a displacement.
fn offset(of: u64) -> i32 {
    // The shared data are smaller than 2 GiB.
    of as i32
}

#[cfg(test)]
mod tests;
