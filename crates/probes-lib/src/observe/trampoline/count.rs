//! The code that counts a hit: adds one to the counter of the point in the row of the thread ([`rows`]).
//!
//! ```text
//! trampoline   the claim that the stack pointer selects is of this thread, and this part of its stack?
//!              then increment the counter in its row; else → routine
//! routine      find the claim of the thread nearby, or make one; increment the counter in its row; or, if there is
//!              no row left, increment the counter in a shared row, locked; → trampoline
//! ```
//!
//! It accesses no memory through the `fs` base, which is 0 or invalid in some threads, as in every program before its
//! loader has made thread-local storage. `rdfsbase` only reads it. Where the kernel does not allow that (before Linux
//! 5.9), the routine makes no claims, so that the trampolines never come to that instruction.
//!
//! The increment is one instruction, so a signal handler that hits the same point loses nothing. While a claim is
//! written, it is nobody's: a signal handler that interrupts that makes another one for the same thread.

use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, byte_ptr, dword_ptr, eax, ebx, ecx, edx, esi, qword_ptr, r8, r8d, r9,
    r9d, rax, rbx, rcx, rdi, rdx, rsi, rsp,
};
use iced_x86::{
    BlockEncoderOptions, Code, Decoder, DecoderOptions, Encoder, IcedError, Mnemonic, OpKind,
    Register,
};

use super::{
    DoesNotFit, SAVED_IF_COUNTED, SAVED_IF_TIMED, Saved, add, by_address, locked_increment,
    spread_of,
};
use crate::address::LiveAddr;
use crate::observe::layout::arena::{Arena, ROUTINE_LEN};
use crate::observe::layout::rows::{
    self, CLAIM_BITS, CLAIM_LEN, CLAIM_LEN_BITS, CLAIMS_TRIED, OWNED_ROWS, Rows, SHARED_ROW_BITS,
    STACK_PART_BITS, claim, header,
};
use crate::site::NOP;

/// Where the code that counts finds what it needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountPointers {
    /// The place in memory that holds the address of the claims.
    pub(super) claims: LiveAddr,
    /// The routine that counts the other hits.
    pub(super) routine: LiveAddr,
}

impl CountPointers {
    pub(super) fn of(arena: &Arena) -> CountPointers {
        CountPointers {
            claims: arena.data_pointer(),
            routine: arena.routine(),
        }
    }
}

/// The part of a trampoline to which [`lookup`] jumps.
#[derive(Clone, Copy)]
pub(super) struct SlowPath {
    /// The thread has no claim there.
    missed: CodeLabel,
    /// Where it goes on then.
    counted: CodeLabel,
}

/// Emits the code that adds one to the counter of the point with this index, and uses rcx and rdx. What it jumps to has
/// to follow it somewhere: [`emit_slow_path`].
pub(super) fn lookup(
    a: &mut CodeAssembler,
    pointers: CountPointers,
    point: usize,
) -> Result<SlowPath, IcedError> {
    let mut slow_path = SlowPath {
        missed: a.create_label(),
        counted: a.create_label(),
    };
    a.mov(rcx, rsp)?;
    a.shr(rcx, STACK_PART_BITS)?;
    spread_of(a, edx, ecx, CLAIM_BITS)?;
    a.shl(edx, CLAIM_LEN_BITS)?;
    add(a, rdx, pointers.claims)?;
    a.cmp(qword_ptr(rdx + claim::STACK_PART), rcx)?;
    a.jne(slow_path.missed)?;
    // Its address does not depend on the slow `rdfsbase`, only a branch does.
    a.rdfsbase(rcx)?;
    a.cmp(qword_ptr(rdx + claim::OWNER), rcx)?;
    a.jne(slow_path.missed)?;
    a.mov(rdx, qword_ptr(rdx + claim::ROW))?;
    a.inc(qword_ptr(rdx + Rows::displacement(point)))?;
    a.set_label(&mut slow_path.counted)?;
    Ok(slow_path)
}

/// Emits the code that has the routine count a hit. Returns where it begins.
pub(super) fn emit_slow_path(
    a: &mut CodeAssembler,
    pointers: CountPointers,
    mut slow_path: SlowPath,
) -> Result<CodeLabel, IcedError> {
    a.set_label(&mut slow_path.missed)?;
    a.lea(rdx, qword_ptr(slow_path.counted))?;
    a.jmp(pointers.routine.0)?;
    Ok(slow_path.missed)
}

/// Returns the routine of an arena, [`ROUTINE_LEN`] bytes long. Expects in rdx the address where the trampoline goes
/// on, which directly follows the displacement of the counter, and the saved rcx and rdx in [`SAVED_IF_COUNTED`]. If
/// it `claims` no rows, all hits are counted in shared rows.
pub(super) fn routine(arena: &Arena, claims: bool) -> Result<Vec<u8>, DoesNotFit> {
    let mut a = CodeAssembler::new(64)?;
    let pointers = CountPointers::of(arena);
    let (rows, data) = (arena.rows(), arena.data());
    let at_header = |offset| data.plus(rows.header() + offset);
    let row_at = |offset: u64| data.plus(offset).0.wrapping_sub(rows::ROW_BIAS);
    let row_len = i32::try_from(rows.row_len()).map_err(|_| DoesNotFit)?;
    let mut counted = a.create_label();
    let mut marked = a.create_label();
    for (register, copy) in saved_by_routine() {
        a.movq(copy, register)?;
    }
    a.movsxd(rcx, dword_ptr(rdx - 4))?;
    a.mov(rsi, rsp)?;
    a.shr(rsi, STACK_PART_BITS)?;
    if claims {
        let mut next = a.create_label();
        let mut check = a.create_label();
        let mut own = a.create_label();
        let mut other = a.create_label();
        let mut none_left = a.create_label();
        a.rdfsbase(rdi)?;
        spread_of(&mut a, r8d, esi, CLAIM_BITS)?;
        a.shl(r8d, CLAIM_LEN_BITS)?;
        add(&mut a, r8, pointers.claims)?;
        a.xor(r9d, r9d)?;
        a.set_label(&mut next)?;
        // The exclusive or visits all claims of the aligned group that contains the one that the hash selects.
        a.mov(rbx, r8)?;
        a.xor(rbx, r9)?;
        a.mov(rax, qword_ptr(rbx + claim::STACK_PART))?;
        a.set_label(&mut check)?;
        a.cmp(rax, rsi)?;
        a.je(own)?;
        a.test(rax, rax)?;
        a.jne(other)?;
        by_address(
            &mut a,
            Code::Mov_r32_rm32,
            Register::ECX,
            at_header(header::CLAIMED),
        )?;
        a.cmp(ecx, OWNED_ROWS as i32)?;
        a.jae(none_left)?;
        a.mov(rcx, i64::from(claim::IN_PROGRESS))?;
        a.lock().cmpxchg(qword_ptr(rbx + claim::STACK_PART), rcx)?;
        // Another thread was faster: rax is its part.
        a.jne(check)?;
        a.mov(eax, 1)?;
        by_address(
            &mut a,
            Code::Lea_r64_m,
            Register::RCX,
            at_header(header::CLAIMED),
        )?;
        a.lock().xadd(dword_ptr(rcx), eax)?;
        a.imul_3(rcx, rax, row_len)?;
        by_address(
            &mut a,
            Code::Lea_r64_m,
            Register::R9,
            LiveAddr(row_at(rows.owned_row(0))),
        )?;
        a.add(rcx, r9)?;
        a.cmp(eax, OWNED_ROWS as i32)?;
        a.mov(eax, 0)?;
        a.jae(other)?;
        a.mov(qword_ptr(rbx + claim::OWNER), rdi)?;
        a.mov(qword_ptr(rbx + claim::ROW), rcx)?;
        a.mov(qword_ptr(rbx + claim::STACK_PART), rsi)?;
        a.set_label(&mut own)?;
        a.cmp(qword_ptr(rbx + claim::OWNER), rdi)?;
        a.jne(other)?;
        a.mov(rbx, qword_ptr(rbx + claim::ROW))?;
        a.movsxd(rcx, dword_ptr(rdx - 4))?;
        a.inc(qword_ptr(rbx + rcx))?;
        a.jmp(counted)?;
        a.set_label(&mut other)?;
        a.add(r9d, CLAIM_LEN as i32)?;
        a.cmp(r9d, (CLAIM_LEN * CLAIMS_TRIED) as i32)?;
        a.jb(next)?;
        a.set_label(&mut none_left)?;
        a.movsxd(rcx, dword_ptr(rdx - 4))?;
    }
    spread_of(&mut a, ebx, esi, SHARED_ROW_BITS)?;
    by_address(
        &mut a,
        Code::Lea_r64_m,
        Register::RAX,
        at_header(header::USED),
    )?;
    a.cmp(byte_ptr(rax + rbx), 0)?;
    a.jne(marked)?;
    a.mov(byte_ptr(rax + rbx), 1)?;
    a.set_label(&mut marked)?;
    a.imul_3(rbx, rbx, row_len)?;
    by_address(
        &mut a,
        Code::Lea_r64_m,
        Register::RAX,
        LiveAddr(row_at(rows.shared_row(0))),
    )?;
    a.add(rax, rbx)?;
    a.lock().inc(qword_ptr(rax + rcx))?;
    a.set_label(&mut counted)?;
    for (register, copy) in saved_by_routine() {
        a.movq(register, copy)?;
    }
    a.jmp(rdx)?;
    let mut code = a.assemble(arena.routine().0)?;
    if code.len() as u64 > ROUTINE_LEN {
        return Err(DoesNotFit);
    }
    code.resize(ROUTINE_LEN as usize, NOP);
    Ok(code)
}

/// The registers that the routine uses, but for rcx and rdx. In a trampoline with time stamps, their copies hold the same
/// already.
fn saved_by_routine() -> impl Iterator<Item = Saved> {
    let is_saved = |saved: &Saved| !SAVED_IF_COUNTED.contains(saved);
    SAVED_IF_TIMED.into_iter().filter(is_saved)
}

/// Returns the instruction that adds one to the counter of the point with this index in the first shared row.
pub(super) fn count_locked(
    at: LiveAddr,
    arena: &Arena,
    point: usize,
) -> Result<Vec<u8>, IcedError> {
    let increment = locked_increment(arena.locked_counter(point))?;
    let mut encoder = Encoder::new(64);
    encoder.encode(&increment, at.0)?;
    Ok(encoder.take_buffer())
}

/// A template of the code that counts a hit of a point in a function. It is assembled once for all such points of an arena,
/// because there are thousands of them.
pub(super) struct CountTemplate {
    /// Its code at this address, for the first point.
    at: LiveAddr,
    code: Vec<u8>,
    /// Where the displaced instructions are to be inserted.
    split: usize,
    /// Where the displacement of the counter is.
    counter: usize,
    fixups: Vec<Fixup>,
}

/// An operand that is relative to the address of its instruction.
struct Fixup {
    start: usize,
    end: usize,
    /// Where the operand is, and how many bytes it has.
    operand: usize,
    len: usize,
    target: u64,
}

impl CountTemplate {
    pub(super) fn of(at: LiveAddr, pointers: CountPointers) -> Result<CountTemplate, DoesNotFit> {
        let mut a = CodeAssembler::new(64)?;
        for (register, copy) in SAVED_IF_COUNTED {
            a.movq(copy, register)?;
        }
        let slow_path = lookup(&mut a, pointers, 0)?;
        for (register, copy) in SAVED_IF_COUNTED {
            a.movq(register, copy)?;
        }
        a.emms()?;
        let missed = emit_slow_path(&mut a, pointers, slow_path)?;
        let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let assembled = a.assemble_options(at.0, options)?;
        let split = (assembled.label_ip(&missed)? - at.0) as usize;
        let mut counter_at = 0;
        let code = assembled.inner.code_buffer;
        let mut fixups = Vec::new();
        let mut decoder = Decoder::with_ip(64, &code, at.0, DecoderOptions::NONE);
        while decoder.can_decode() {
            let instruction = decoder.decode();
            let offsets = decoder.get_constant_offsets(&instruction);
            let start = (instruction.ip() - at.0) as usize;
            if instruction.mnemonic() == Mnemonic::Inc {
                counter_at = start + offsets.displacement_offset();
            }
            let (operand, len, target) = if instruction.is_ip_rel_memory_operand() {
                let target = instruction.ip_rel_memory_address();
                (
                    offsets.displacement_offset(),
                    offsets.displacement_size(),
                    target,
                )
            } else if instruction.op0_kind() == OpKind::NearBranch64 {
                let target = instruction.near_branch_target();
                (offsets.immediate_offset(), offsets.immediate_size(), target)
            } else {
                continue;
            };
            fixups.push(Fixup {
                start,
                end: start + instruction.len(),
                operand: start + operand,
                len,
                target,
            });
        }
        Ok(CountTemplate {
            at,
            code,
            split,
            counter: counter_at,
            fixups,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.code.len()
    }

    /// Returns how many bytes precede the displaced instructions.
    pub(super) fn split(&self) -> usize {
        self.split
    }

    /// Returns the trampoline at `at` of the point with this index; `None` if there are too many bytes of displaced
    /// instructions.
    pub(super) fn around(&self, at: LiveAddr, point: usize, displaced: &[u8]) -> Option<Vec<u8>> {
        let (before, after) = self.code.split_at(self.split);
        let mut code = [before, displaced, after].concat();
        let moved = |offset: usize| {
            let inserted = if offset < self.split {
                0
            } else {
                displaced.len()
            };
            offset + inserted
        };
        let counter = u32::try_from(Rows::displacement(point)).ok()?;
        code[self.counter..][..4].copy_from_slice(&counter.to_le_bytes());
        for fixup in &self.fixups {
            let end = moved(fixup.start) + (fixup.end - fixup.start);
            let inside = fixup.target.wrapping_sub(self.at.0);
            let target = if inside < self.code.len() as u64 {
                at.plus(moved(inside as usize) as u64)
            } else {
                LiveAddr(fixup.target)
            };
            let distance = target.0.wrapping_sub(at.plus(end as u64).0) as i64;
            let operand = &mut code[moved(fixup.operand)..][..fixup.len];
            match fixup.len {
                1 => operand.copy_from_slice(&i8::try_from(distance).ok()?.to_le_bytes()),
                4 => operand.copy_from_slice(&i32::try_from(distance).ok()?.to_le_bytes()),
                _ => return None,
            }
        }
        Some(code)
    }
}
