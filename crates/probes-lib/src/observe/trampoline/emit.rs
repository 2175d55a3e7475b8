//! Instructions that several parts of a trampoline use: access to memory at addresses, the time, hashing.

use std::ops::Add;

use iced_x86::code_asm::{
    AsmMemoryOperand, AsmRegister32, AsmRegister64, CodeAssembler, CodeLabel, qword_ptr, rax, rbx,
    rdx, rsi,
};
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};

use super::Pointers;
use crate::address::LiveAddr;
use crate::observe::layout::shared;

/// Emits the code that loads the address of the shared data into rbx, and the time into rsi. Uses rax and rdx.
pub(super) fn find_shared_and_time(
    a: &mut CodeAssembler,
    pointers: &Pointers,
) -> Result<(), IcedError> {
    load(a, rbx, pointers.shared)?;
    time(a, rsi)
}

/// Emits the code that reads the time into a register. Uses rax and rdx.
pub(super) fn time(a: &mut CodeAssembler, to: AsmRegister64) -> Result<(), IcedError> {
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    if to == rax {
        a.or(rax, rdx)
    } else if to == rdx {
        a.or(rdx, rax)
    } else {
        a.lea(to, qword_ptr(rdx + rax))
    }
}

/// Emits the code that goes to `over` unless the time in `time`, which it changes, is in the range of those that are
/// recorded. Expects the address of the shared data in rbx.
pub(super) fn unless_in_range(
    a: &mut CodeAssembler,
    time: AsmRegister64,
    over: CodeLabel,
) -> Result<(), IcedError> {
    a.sub(time, qword_ptr(rbx + offset(shared::TIMES_FROM)))?;
    // Below the range, it is a large number without sign.
    a.cmp(time, qword_ptr(rbx + offset(shared::TIMES_LEN)))?;
    a.jae(over)
}

/// Returns a jump that is `JUMP_LEN` bytes long.
pub(super) fn jump_to(target: LiveAddr, at: u64) -> Result<Vec<u8>, IcedError> {
    let mut encoder = Encoder::new(64);
    let jump = Instruction::with_branch(Code::Jmp_rel32_64, target.0)?;
    encoder.encode(&jump, at)?;
    Ok(encoder.take_buffer())
}

/// Hashes the low half of the address of a thread's control block to `bits` bits. `fs:0` holds that
/// address (x86-64 psABI, ELF Handling for Thread-Local Storage).
pub(super) fn spread(
    a: &mut CodeAssembler,
    register: AsmRegister32,
    bits: u32,
) -> Result<(), IcedError> {
    spread_of(a, register, register, bits)
}

/// Hashes a 32-bit number to `bits` bits.
pub(super) fn spread_of(
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
pub(super) fn load(
    a: &mut CodeAssembler,
    to: AsmRegister64,
    at: LiveAddr,
) -> Result<(), IcedError> {
    by_address(a, Code::Mov_r64_rm64, to.into(), at)
}

/// Adds the word at an address, by RIP-relative addressing.
pub(super) fn add(a: &mut CodeAssembler, to: AsmRegister64, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Add_r64_rm64, to.into(), at)
}

/// Subtracts the word at an address, by RIP-relative addressing.
pub(super) fn sub(
    a: &mut CodeAssembler,
    from: AsmRegister64,
    at: LiveAddr,
) -> Result<(), IcedError> {
    by_address(a, Code::Sub_r64_rm64, from.into(), at)
}

pub(super) fn by_address(
    a: &mut CodeAssembler,
    code: Code,
    to: Register,
    at: LiveAddr,
) -> Result<(), IcedError> {
    a.add_instruction(Instruction::with2(code, to, at_address(at))?)
}

/// Returns the instruction that adds one to the word at an address that several threads may change at once.
pub(super) fn locked_increment(at: LiveAddr) -> Result<Instruction, IcedError> {
    let mut increment = Instruction::with1(Code::Inc_rm64, at_address(at))?;
    increment.set_has_lock_prefix(true);
    Ok(increment)
}

/// Returns the word at an offset from the address in a register.
pub(super) fn word_at<T>(base: AsmRegister64, offset: T) -> AsmMemoryOperand
where
    AsmRegister64: Add<T, Output = AsmMemoryOperand>,
{
    qword_ptr(base + offset)
}

/// Returns the operand at an address, by RIP-relative addressing.
pub(super) fn at_address(at: LiveAddr) -> MemoryOperand {
    // The assembler takes the target address as the displacement of an operand with base RIP.
    MemoryOperand::with_base_displ(Register::RIP, at.0 as i64)
}

/// Converts an offset in the shared data to the type of a displacement.
pub(super) fn offset(of: u64) -> i32 {
    // The shared data are smaller than 2 GiB.
    of as i32
}
