//! The code that counts a hit: adds one to the counter of the point in the row of the thread ([`rows`]).
//!
//! ```text
//! trampoline   if the claim that the stack pointer selects is of this thread and this part of its stack,
//!              increment the counter in its row; else → routine
//! of OCaml     if this is the first domain, increment the counter in its row, whose address is fixed; else,
//!              if the claim that the domain's state selects is of this domain,
//!              increment the counter in its row; else → routine
//! routine      for the first domain to come here, take its row; else find the claim of the thread or domain nearby, or
//!              make one; increment the counter in the row; or, if there is no row left, or no room for a claim nearby,
//!              increment the counter in a shared row, locked; → trampoline
//! ```
//!
//! It accesses no memory through the `fs` base, which is 0 or invalid in some threads, as in every program before its
//! loader has made thread-local storage. `rdfsbase` only reads it. Where the kernel does not allow that (before Linux
//! 5.9), the routine makes no claims, so that the trampolines never reach that instruction.
//!
//! The increment is one instruction, so a signal handler that hits the same point loses nothing. While a claim is
//! being written, it belongs to no thread: a signal handler that runs then makes another claim for the same thread.

use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, byte_ptr, dword_ptr, eax, ebx, ecx, edx, esi, qword_ptr, r8, r8d, r9,
    r9d, r14, r14d, rax, rbx, rcx, rdi, rdx, rsi, rsp,
};
use iced_x86::{BlockEncoderOptions, Code, Encoder, IcedError, Instruction, Register};

use super::emit::{add, at_address, by_address, locked_increment, spread_of, word_at};
use super::{DoesNotFit, SAVED_IF_COUNTED, SAVED_IF_TIMED, SavedRegister};
use crate::address::LiveAddr;
use crate::observe::layout::arena::{Arena, ROUTINE_LEN};
use crate::observe::layout::rows::{
    self, CLAIM_BITS, CLAIM_LEN, CLAIM_LEN_BITS, CLAIMED_ROWS, CLAIMS_TRIED, Rows, SHARED_ROW_BITS,
    STACK_PART_BITS, claim, header,
};
use crate::site::NOP;

/// Where the code that counts finds what it needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountPointers {
    /// The place in memory that holds the address of the claims.
    pub(super) claims: LiveAddr,
    /// The routine, which counts the hits for which a trampoline does not find the claim.
    pub(super) routine: LiveAddr,
    /// The entry of the routine for OCaml code.
    pub(super) of_ocaml: LiveAddr,
    /// The word that holds the address of the first domain's state.
    pub(super) first_domain: LiveAddr,
    /// The counter of the first point in the row of the first domain.
    pub(super) first_domain_counter: LiveAddr,
}

impl CountPointers {
    pub(super) fn of(arena: &Arena) -> CountPointers {
        CountPointers {
            claims: arena.data_pointer(),
            routine: arena.routine(),
            of_ocaml: arena.routine().plus(OF_OCAML),
            first_domain: arena.data().plus(claim::FIRST_DOMAIN),
            first_domain_counter: arena.data().plus(arena.rows().first_domain_row()),
        }
    }
}

/// Where the routine begins for OCaml code: after a short jump.
const OF_OCAML: u64 = 2;

/// The slow path of a trampoline, for hits for which [`count_hit`] finds no claim.
#[derive(Clone, Copy)]
pub(super) struct SlowPath {
    /// Where the slow path begins.
    missed: CodeLabel,
    /// Where the trampoline continues after it.
    counted: CodeLabel,
}

/// Emits the code that adds one to the counter of the point with this index, and uses rcx and rdx. [`emit_slow_path`]
/// must emit the code that it jumps to, somewhere after it.
pub(super) fn count_hit(
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
    a.cmp(word_at(rdx, claim::STACK_PART), rcx)?;
    a.jne(slow_path.missed)?;
    // The address of the counter does not depend on the slow `rdfsbase`; only a branch does.
    a.rdfsbase(rcx)?;
    a.cmp(word_at(rdx, claim::OWNER), rcx)?;
    a.jne(slow_path.missed)?;
    a.mov(rdx, word_at(rdx, claim::ROW))?;
    a.inc(qword_ptr(rdx + Rows::displacement(point)))?;
    a.set_label(&mut slow_path.counted)?;
    Ok(slow_path)
}

/// Emits the code that has the routine count a hit.
pub(super) fn emit_slow_path(
    a: &mut CodeAssembler,
    pointers: CountPointers,
    mut slow_path: SlowPath,
) -> Result<(), IcedError> {
    a.set_label(&mut slow_path.missed)?;
    a.lea(rdx, qword_ptr(slow_path.counted))?;
    a.jmp(pointers.routine.0)
}

/// Returns the routine of an arena, [`ROUTINE_LEN`] bytes long. The routine expects in rdx the address where the
/// trampoline continues, which directly follows the displacement of the counter, and the saved rcx and rdx in
/// [`SAVED_IF_COUNTED`]; it restores all registers except rcx. If it does not make `claims` for threads, their hits are
/// counted in shared rows.
pub(super) fn routine(arena: &Arena, claims: bool) -> Result<Vec<u8>, DoesNotFit> {
    let mut routine = Routine::of(arena)?;
    let mut of_ocaml = routine.a.create_label();
    let mut of_thread = routine.a.create_label();
    routine.a.jmp(of_thread)?;
    routine.a.set_label(&mut of_ocaml)?;
    routine.of_ocaml()?;
    routine.a.set_label(&mut of_thread)?;
    routine.of_thread(claims)?;
    routine.find_claim()?;
    routine.count_in_shared_row()?;
    routine.resume()?;
    let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let assembled = routine.a.assemble_options(arena.routine().0, options)?;
    let is_there = assembled.label_ip(&of_ocaml)? == routine.pointers.of_ocaml.0;
    let mut code = assembled.inner.code_buffer;
    if code.len() as u64 > ROUTINE_LEN || !is_there {
        return Err(DoesNotFit);
    }
    code.resize(ROUTINE_LEN as usize, NOP);
    Ok(code)
}

/// The parts of the routine, which is assembled in `a`.
struct Routine<'a> {
    a: CodeAssembler,
    arena: &'a Arena,
    pointers: CountPointers,
    row_len: i32,
    /// Finds or makes a claim of the owner rdi with the stack part rsi, near the one that r8d selects.
    find_claim: CodeLabel,
    /// Adds one to the counter in the row at rbx.
    add_one: CodeLabel,
    /// Adds one to the counter in the shared row that esi selects: there is no claim.
    no_claim: CodeLabel,
    /// Returns to the trampoline.
    counted: CodeLabel,
}

impl Routine<'_> {
    fn of(arena: &Arena) -> Result<Routine<'_>, DoesNotFit> {
        let mut a = CodeAssembler::new(64)?;
        Ok(Routine {
            arena,
            pointers: CountPointers::of(arena),
            row_len: i32::try_from(arena.rows().row_len()).map_err(|_| DoesNotFit)?,
            find_claim: a.create_label(),
            add_one: a.create_label(),
            no_claim: a.create_label(),
            counted: a.create_label(),
            a,
        })
    }

    /// Returns the address of a field of the header.
    fn at_header(&self, field: u64) -> LiveAddr {
        let rows = self.arena.rows();
        self.arena.data().plus(rows.header() + field)
    }

    /// Returns the address of a row as claims have it.
    fn row_at(&self, offset: u64) -> LiveAddr {
        let row = self.arena.data().plus(offset);
        LiveAddr(row.0.wrapping_sub(rows::ROW_BIAS))
    }

    /// Emits the entry for OCaml code: the owner is the domain. The first domain has a row of its own, for which it
    /// makes no claim.
    fn of_ocaml(&mut self) -> Result<(), IcedError> {
        let has_domain = at_address(self.at_header(header::HAS_DOMAIN));
        let first_row = self.row_at(self.arena.rows().first_domain_row());
        let a = &mut self.a;
        save_registers(a)?;
        a.add_instruction(Instruction::with2(
            Code::Mov_rm64_imm32,
            Register::RSI,
            claim::OF_DOMAIN,
        )?)?;
        // The owner of a free claim is 0, so code whose r14 is 0 cannot own one.
        a.test(r14, r14)?;
        a.je(self.no_claim)?;
        a.mov(rdi, r14)?;
        a.mov(r8d, r14d)?;
        let mut take_row = Instruction::with2(Code::Bts_rm32_imm8, has_domain, 0)?;
        take_row.set_has_lock_prefix(true);
        a.add_instruction(take_row)?;
        a.jc(self.find_claim)?;
        let first_domain = at_address(self.pointers.first_domain);
        a.add_instruction(Instruction::with2(
            Code::Mov_rm64_r64,
            first_domain,
            Register::R14,
        )?)?;
        address_of(a, Register::RBX, first_row)?;
        a.jmp(self.add_one)
    }

    /// Emits the entry for other code: the owner is the thread, if it makes `claims` for threads.
    fn of_thread(&mut self, claims: bool) -> Result<(), IcedError> {
        let a = &mut self.a;
        save_registers(a)?;
        a.mov(rsi, rsp)?;
        a.shr(rsi, STACK_PART_BITS)?;
        a.mov(r8d, esi)?;
        if claims {
            a.rdfsbase(rdi)
        } else {
            a.jmp(self.no_claim)
        }
    }

    /// Emits the code that finds or makes a claim, and counts the hit in its row. If there is none, it falls through.
    fn find_claim(&mut self) -> Result<(), IcedError> {
        let claimed = self.at_header(header::CLAIMED);
        let a = &mut self.a;
        let (mut next, mut check) = (a.create_label(), a.create_label());
        let (mut own, mut other) = (a.create_label(), a.create_label());
        a.set_label(&mut self.find_claim)?;
        spread_of(a, r8d, r8d, CLAIM_BITS)?;
        a.shl(r8d, CLAIM_LEN_BITS)?;
        add(a, r8, self.pointers.claims)?;
        a.xor(r9d, r9d)?;
        a.set_label(&mut next)?;
        // XOR visits all claims of the aligned group that contains the claim selected by the hash.
        a.mov(rbx, r8)?;
        a.xor(rbx, r9)?;
        a.mov(rax, word_at(rbx, claim::STACK_PART))?;
        a.set_label(&mut check)?;
        a.cmp(rax, rsi)?;
        a.je(own)?;
        a.test(rax, rax)?;
        a.jne(other)?;
        by_address(a, Code::Mov_r32_rm32, Register::ECX, claimed)?;
        a.cmp(ecx, CLAIMED_ROWS as i32)?;
        a.jae(self.no_claim)?;
        let in_progress =
            Instruction::with2(Code::Mov_rm64_imm32, Register::RCX, claim::IN_PROGRESS)?;
        a.add_instruction(in_progress)?;
        a.lock().cmpxchg(word_at(rbx, claim::STACK_PART), rcx)?;
        // Another thread was faster: rax is the stack part of its claim, or IN_PROGRESS.
        a.jne(check)?;
        self.claim_row()?;
        let a = &mut self.a;
        a.set_label(&mut own)?;
        a.cmp(word_at(rbx, claim::OWNER), rdi)?;
        a.jne(other)?;
        a.mov(rbx, word_at(rbx, claim::ROW))?;
        a.set_label(&mut self.add_one)?;
        a.movsxd(rcx, dword_ptr(rdx - 4))?;
        a.inc(qword_ptr(rbx + rcx))?;
        a.jmp(self.counted)?;
        a.set_label(&mut other)?;
        a.add(r9d, CLAIM_LEN as i32)?;
        a.cmp(r9d, (CLAIM_LEN * CLAIMS_TRIED) as i32)?;
        a.jb(next)
    }

    /// Emits the code that completes the claim at rbx, which is in progress, with the next row.
    fn claim_row(&mut self) -> Result<(), IcedError> {
        let claimed = self.at_header(header::CLAIMED);
        let first_row = self.row_at(self.arena.rows().owned_row(0));
        let a = &mut self.a;
        a.mov(eax, 1)?;
        address_of(a, Register::RCX, claimed)?;
        a.lock().xadd(dword_ptr(rcx), eax)?;
        a.imul_3(rcx, rax, self.row_len)?;
        address_of(a, Register::R9, first_row)?;
        a.add(rcx, r9)?;
        a.cmp(eax, CLAIMED_ROWS as i32)?;
        // Other threads have claimed the last rows meanwhile. This claim stays in progress, so that all pass over it.
        a.jae(self.no_claim)?;
        a.mov(word_at(rbx, claim::ROW), rcx)?;
        a.mov(word_at(rbx, claim::OWNER), rdi)?;
        a.mov(word_at(rbx, claim::STACK_PART), rsi)
    }

    /// Emits the code that counts the hit in a shared row, and marks the row as used.
    fn count_in_shared_row(&mut self) -> Result<(), IcedError> {
        let used = self.at_header(header::USED);
        let first_row = self.row_at(self.arena.rows().shared_row(0));
        let a = &mut self.a;
        let mut marked = a.create_label();
        a.set_label(&mut self.no_claim)?;
        spread_of(a, ebx, esi, SHARED_ROW_BITS)?;
        address_of(a, Register::RAX, used)?;
        a.cmp(byte_ptr(rax + rbx), 0)?;
        a.jne(marked)?;
        a.mov(byte_ptr(rax + rbx), 1)?;
        a.set_label(&mut marked)?;
        a.imul_3(rbx, rbx, self.row_len)?;
        address_of(a, Register::RAX, first_row)?;
        a.add(rax, rbx)?;
        a.movsxd(rcx, dword_ptr(rdx - 4))?;
        a.lock().inc(qword_ptr(rax + rcx))
    }

    /// Emits the code that restores the registers and returns to the trampoline.
    fn resume(&mut self) -> Result<(), IcedError> {
        let a = &mut self.a;
        a.set_label(&mut self.counted)?;
        for (register, copy) in saved_by_routine() {
            a.movq(register, copy)?;
        }
        a.mov(rcx, rdx)?;
        for (register, copy) in SAVED_IF_COUNTED {
            if register != rcx {
                a.movq(register, copy)?;
            }
        }
        a.jmp(rcx)
    }
}

/// Saves the registers that the routine uses.
fn save_registers(a: &mut CodeAssembler) -> Result<(), IcedError> {
    for (register, copy) in saved_by_routine() {
        a.movq(copy, register)?;
    }
    Ok(())
}

/// Loads an address, by RIP-relative addressing.
fn address_of(a: &mut CodeAssembler, to: Register, at: LiveAddr) -> Result<(), IcedError> {
    by_address(a, Code::Lea_r64_m, to, at)
}

/// The registers that the routine uses, except rcx and rdx. In a trampoline with time stamps, their copies already hold
/// the same values.
fn saved_by_routine() -> impl Iterator<Item = SavedRegister> {
    let is_saved = |saved: &SavedRegister| !SAVED_IF_COUNTED.contains(saved);
    SAVED_IF_TIMED.into_iter().filter(is_saved)
}

/// Returns the locked instruction at `at` that adds one to the counter of the point with this index in the first shared
/// row.
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
