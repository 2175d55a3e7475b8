//! Templates of the code that counts a hit of a point ([`count`](super::count)): each is assembled once
//! for all such points of an arena, because there are thousands of them.
//!
//! Functions of OCaml are counted by domain. In the first domain, this uses no register, and all code that it executes
//! is in one cache line, in most functions with the displaced instructions.

use iced_x86::code_asm::{CodeAssembler, CodeLabel, ecx, qword_ptr, r14, r14d};
use iced_x86::{
    BlockEncoderOptions, Code, Decoder, DecoderOptions, IcedError, Instruction, Mnemonic, OpKind,
    Register,
};

use super::count::{CountPointers, count_hit, emit_slow_path};
use super::emit::{add, at_address, jump_to, spread_of};
use super::{DoesNotFit, SAVED_IF_COUNTED};
use crate::address::LiveAddr;
use crate::observe::layout::rows::{CLAIM_BITS, CLAIM_LEN_BITS, Rows, claim};

/// The templates for the points of an arena that are in functions.
pub(super) struct CountTemplates {
    of_any: CountTemplate,
    of_ocaml: CountTemplate,
}

impl CountTemplates {
    pub(super) fn of(at: LiveAddr, pointers: CountPointers) -> Result<CountTemplates, DoesNotFit> {
        Ok(CountTemplates {
            of_any: CountTemplate::of(at, pointers, of_thread)?,
            of_ocaml: CountTemplate::of(at, pointers, of_domain)?,
        })
    }

    /// Returns the template for any code.
    pub(super) fn of_any(&self) -> &CountTemplate {
        &self.of_any
    }

    /// Returns the template for a function; `is_ocaml` if it is known to be one of OCaml.
    pub(super) fn of_function(&self, is_ocaml: bool) -> &CountTemplate {
        if is_ocaml {
            &self.of_ocaml
        } else {
            &self.of_any
        }
    }
}

/// Emits the code that counts a hit of the first point in the row of the thread; returns the place of the byte that the
/// displaced instructions replace.
fn of_thread(a: &mut CodeAssembler, pointers: CountPointers) -> Result<CodeLabel, IcedError> {
    let mut displaced = a.create_label();
    for (register, copy) in SAVED_IF_COUNTED {
        a.movq(copy, register)?;
    }
    let slow_path = count_hit(a, pointers, 0)?;
    for (register, copy) in SAVED_IF_COUNTED {
        a.movq(register, copy)?;
    }
    a.emms()?;
    a.set_label(&mut displaced)?;
    a.nop()?;
    emit_slow_path(a, pointers, slow_path)?;
    Ok(displaced)
}

/// Emits the code that counts a hit in a row of the domain, whose state is in r14 in all OCaml code; returns the same as
/// [`of_thread`].
fn of_domain(a: &mut CodeAssembler, pointers: CountPointers) -> Result<CodeLabel, IcedError> {
    let mut displaced = a.create_label();
    let mut is_other = a.create_label();
    let mut missed = a.create_label();
    let mut counted = a.create_label();
    let [(claimed, copy), (resume, copy_of_resume)] = SAVED_IF_COUNTED;
    let first_domain = at_address(pointers.first_domain);
    a.add_instruction(Instruction::with2(
        Code::Cmp_rm64_r64,
        first_domain,
        Register::R14,
    )?)?;
    a.jne(is_other)?;
    let counter = at_address(pointers.first_domain_counter);
    a.add_instruction(Instruction::with1(Code::Inc_rm64, counter)?)?;
    a.set_label(&mut displaced)?;
    a.nop()?;
    a.set_label(&mut is_other)?;
    a.movq(copy, claimed)?;
    spread_of(a, ecx, r14d, CLAIM_BITS)?;
    a.shl(ecx, CLAIM_LEN_BITS)?;
    add(a, claimed, pointers.claims)?;
    // The owner of a free claim is 0, so code whose r14 is 0 cannot own one.
    a.test(r14, r14)?;
    a.je(missed)?;
    a.cmp(qword_ptr(claimed + claim::OWNER), r14)?;
    a.jne(missed)?;
    a.mov(claimed, qword_ptr(claimed + claim::ROW))?;
    a.inc(qword_ptr(claimed + Rows::displacement(0)))?;
    a.set_label(&mut counted)?;
    a.movq(claimed, copy)?;
    a.emms()?;
    a.jmp(displaced)?;
    a.set_label(&mut missed)?;
    a.movq(copy_of_resume, resume)?;
    a.lea(resume, qword_ptr(counted))?;
    a.jmp(pointers.of_ocaml.0)?;
    Ok(displaced)
}

/// A template, with a byte in place of the displaced instructions.
pub(super) struct CountTemplate {
    /// Its code at this address, for the first point.
    at: LiveAddr,
    code: Vec<u8>,
    /// The byte that the displaced instructions replace.
    split: usize,
    /// Where the displacement of the counter from the address of a row is.
    counter_operand: usize,
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
    /// Whether the target is the counter of the point.
    is_counter: bool,
}

impl CountTemplate {
    fn of(
        at: LiveAddr,
        pointers: CountPointers,
        emit: impl Fn(&mut CodeAssembler, CountPointers) -> Result<CodeLabel, IcedError>,
    ) -> Result<CountTemplate, DoesNotFit> {
        let mut a = CodeAssembler::new(64)?;
        let displaced = emit(&mut a, pointers)?;
        let options = BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let assembled = a.assemble_options(at.0, options)?;
        let split = (assembled.label_ip(&displaced)? - at.0) as usize;
        let mut counter_operand = None;
        let code = assembled.inner.code_buffer;
        let mut fixups = Vec::new();
        let mut decoder = Decoder::with_ip(64, &code, at.0, DecoderOptions::NONE);
        while decoder.can_decode() {
            let instruction = decoder.decode();
            let offsets = decoder.get_constant_offsets(&instruction);
            let start = (instruction.ip() - at.0) as usize;
            let is_counter = instruction.mnemonic() == Mnemonic::Inc;
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
                if is_counter && offsets.displacement_size() == 4 {
                    counter_operand = Some(start + offsets.displacement_offset());
                }
                continue;
            };
            fixups.push(Fixup {
                start,
                end: start + instruction.len(),
                operand: start + operand,
                len,
                target,
                is_counter,
            });
        }
        Ok(CountTemplate {
            at,
            code,
            split,
            counter_operand: counter_operand.ok_or(DoesNotFit)?,
            fixups,
        })
    }

    /// Returns how many bytes it has around the displaced instructions.
    pub(super) fn len(&self) -> usize {
        self.code.len() - 1
    }

    /// Returns how many bytes precede the displaced instructions.
    pub(super) fn split(&self) -> usize {
        self.split
    }

    /// Returns the code at `at` that counts a hit of the point with this index, the site of a probe, and jumps to
    /// `tail`; `None` as with [`CountTemplate::around`].
    ///
    /// # Errors
    ///
    /// If the tail is too far away.
    pub(super) fn around_jump(
        &self,
        at: LiveAddr,
        point: usize,
        tail: LiveAddr,
    ) -> Result<Option<Vec<u8>>, IcedError> {
        let jump = jump_to(tail, at.0 + self.split as u64)?;
        Ok(self.around(at, point, &jump))
    }

    /// Returns the trampoline at `at` of the point with this index; `None` if one of its operands does not reach its
    /// target, as with too many bytes of displaced instructions.
    pub(super) fn around(&self, at: LiveAddr, point: usize, displaced: &[u8]) -> Option<Vec<u8>> {
        let (before, after) = self.code.split_at(self.split);
        let mut code = [before, displaced, after.get(1..)?].concat();
        let moved = |offset: usize| {
            if offset <= self.split {
                offset
            } else {
                offset - 1 + displaced.len()
            }
        };
        let displacement = u32::try_from(Rows::displacement(point)).ok()?;
        code[moved(self.counter_operand)..][..4].copy_from_slice(&displacement.to_le_bytes());
        for fixup in &self.fixups {
            let end = moved(fixup.start) + (fixup.end - fixup.start);
            let inside = fixup.target.wrapping_sub(self.at.0);
            let target = if inside < self.code.len() as u64 {
                at.plus(moved(inside as usize) as u64)
            } else if fixup.is_counter {
                LiveAddr(fixup.target).plus(8 * point as u64)
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
