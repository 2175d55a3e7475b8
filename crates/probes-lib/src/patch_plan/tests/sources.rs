//! Where indirect jumps take their targets from.

use iced_x86::code_asm::{AsmRegister64, dword_ptr, ebx, ecx, rbx, rdx, rsi};
use iced_x86::{Code as Opcode, MemoryOperand};

use super::*;
use crate::patch_plan::tables::{JumpSource, Origin};

const TABLE: u64 = AT + 0x2000;

/// An operand that is relative to the instruction pointer.
fn relative(address: u64) -> MemoryOperand {
    MemoryOperand::with_base_displ(Register::RIP, address as i64)
}

fn lea(a: &mut CodeAssembler, register: AsmRegister64, address: u64) {
    let lea = Instruction::with2(
        Opcode::Lea_r64_m,
        Register::from(register),
        relative(address),
    );
    a.add_instruction(lea.unwrap()).unwrap();
}

/// Returns the source of the last of these instructions.
fn source(write: impl FnOnce(&mut CodeAssembler)) -> JumpSource {
    let bytes = assembled(write);
    let instructions: Vec<Instruction> = code::decode(&bytes, AT).collect();
    let (jump, before) = instructions.split_last().unwrap();
    JumpSource::of(before, jump)
}

/// Returns the source of `jmp *%rax` after these instructions.
fn source_after(write: impl FnOnce(&mut CodeAssembler)) -> JumpSource {
    source(|a| {
        write(a);
        a.jmp(rax).unwrap();
    })
}

#[test]
fn targets_in_memory_are_of_tables_or_none() {
    let memory = |operand| source(|a| a.jmp(operand).unwrap());
    let table = JumpSource::Absolute(Origin::Address(TABLE));
    assert_eq!(memory(qword_ptr(rax * 8 + TABLE as i32)), table);
    assert_eq!(memory(qword_ptr(rax + TABLE as i32)), table);
    // Relative to the instruction pointer, and without an index.
    assert_eq!(
        source(|a| {
            let jump = Instruction::with1(Opcode::Jmp_rm64, relative(TABLE));
            a.add_instruction(jump.unwrap()).unwrap();
        }),
        JumpSource::Slot
    );
    assert_eq!(memory(qword_ptr(rax + 8)), JumpSource::Pointer);
    assert_eq!(memory(qword_ptr(rax - 0x10_0000)), JumpSource::Pointer);
    // The base is set before, or not.
    let of_register = JumpSource::Absolute(Origin::Register(Register::RBX));
    assert_eq!(memory(qword_ptr(rbx + rax * 8)), of_register);
    assert_eq!(memory(qword_ptr(rbx + rax * 8 - 0x10_0000)), of_register);
    for is_copied in [false, true] {
        let found = source(|a| {
            lea(a, rbx, TABLE);
            if is_copied {
                a.mov(rdx, rbx).unwrap();
                a.jmp(qword_ptr(rdx + rax * 8)).unwrap();
            } else {
                a.jmp(qword_ptr(rbx + rax * 8)).unwrap();
            }
        });
        assert_eq!(found, table);
    }
    let loaded = source(|a| {
        a.mov(rbx, qword_ptr(rsi)).unwrap();
        a.jmp(qword_ptr(rbx + rax * 8)).unwrap();
    });
    assert_eq!(loaded, JumpSource::Absolute(Origin::Unknown));
    let given = source(|a| {
        a.mov(ebx, TABLE as u32).unwrap();
        a.jmp(qword_ptr(rbx + rax * 8)).unwrap();
    });
    assert_eq!(given, table);
}

#[test]
fn targets_in_registers_are_followed_back() {
    assert_eq!(source_after(|_| {}), JumpSource::Distant);
    let known = JumpSource::Address(TABLE);
    assert_eq!(source_after(|a| a.mov(rax, TABLE).unwrap()), known);
    assert_eq!(source_after(|a| lea(a, rax, TABLE)), known);
    // Without registers, and not relative to the instruction pointer.
    let absolute = [&b"\x48\x8d\x04\x25"[..], &(TABLE as u32).to_le_bytes()].concat();
    assert_eq!(source_after(|a| a.db(&absolute).unwrap()), known);
    let copied = source_after(|a| {
        a.mov(rdx, TABLE).unwrap();
        a.mov(rax, rdx).unwrap();
    });
    assert_eq!(copied, known);
    let loaded = source_after(|a| a.mov(rax, qword_ptr(rbx + 8)).unwrap());
    assert_eq!(loaded, JumpSource::Pointer);
    // Across calls, if callees preserve it.
    let across_call = |is_kept: bool| {
        let bytes = assembled(|a| {
            let register = if is_kept { rbx } else { rdx };
            a.mov(register, TABLE).unwrap();
            a.call(AT).unwrap();
            a.jmp(register).unwrap();
        });
        let instructions: Vec<Instruction> = code::decode(&bytes, AT).collect();
        JumpSource::of(&instructions[..2], &instructions[2])
    };
    assert_eq!(
        (across_call(true), across_call(false)),
        (known, JumpSource::Distant)
    );
    let after_return = source_after(|a| {
        a.mov(rax, TABLE).unwrap();
        a.ret().unwrap();
    });
    assert_eq!(after_return, JumpSource::Distant);
}

#[test]
fn sums_are_offsets_from_tables() {
    let table = Origin::Address(TABLE);
    let own = JumpSource::Relative { table, base: table };
    let load = |a: &mut CodeAssembler| {
        lea(a, rdx, TABLE);
        a.movsxd(rax, dword_ptr(rdx + rcx * 4)).unwrap();
    };
    let added = source_after(|a| {
        load(a);
        a.add(rax, rdx).unwrap();
    });
    assert_eq!(
        (added, added.own_table(), added.needs_offsets()),
        (own, Some(TABLE), true)
    );
    let with_lea = source_after(|a| {
        load(a);
        a.lea(rax, qword_ptr(rax + rdx)).unwrap();
    });
    assert_eq!(with_lea, own);
    // With another base, and with a number.
    let base = Origin::Address(AT + 0x40);
    let other = source_after(|a| {
        load(a);
        lea(a, rbx, AT + 0x40);
        a.add(rax, rbx).unwrap();
    });
    assert_eq!(
        (other, other.own_table()),
        (JumpSource::Relative { table, base }, None)
    );
    let number = source_after(|a| {
        load(a);
        a.add(rax, AT as i32 + 0x40).unwrap();
    });
    assert_eq!(number, JumpSource::Relative { table, base });
    // At a fixed address.
    let fixed = source_after(|a| {
        a.mov(ecx, dword_ptr(rcx * 4 + TABLE as i32)).unwrap();
        lea(a, rbx, AT + 0x40);
        a.lea(rax, qword_ptr(rbx + rcx)).unwrap();
    });
    assert_eq!(fixed, JumpSource::Relative { table, base });
    // Of what is no offset from a table, nothing is known.
    let (table, base) = (Origin::Unknown, Origin::Unknown);
    let unknown = source_after(|a| a.add(rax, rdx).unwrap());
    assert_eq!(unknown, JumpSource::Relative { table, base });
}

#[test]
fn other_computations_are_not_understood() {
    for (write, expected) in [
        (
            (|a| a.add(rax, qword_ptr(rbx))) as fn(&mut CodeAssembler) -> _,
            JumpSource::Computed,
        ),
        (|a| a.add(rax, 7), JumpSource::Computed),
        (
            |a| a.lea(rax, qword_ptr(rdx + rcx * 2)),
            JumpSource::Computed,
        ),
        (
            |a| a.lea(rax, qword_ptr(rdx + rcx + 8)),
            JumpSource::Computed,
        ),
        (|a| a.lea(rax, qword_ptr(rcx * 1)), JumpSource::Computed),
        (|a| a.imul_2(rax, rdx), JumpSource::Computed),
        (|a| a.pop(rax), JumpSource::Pointer),
        (|a| a.xor(rax, rdx), JumpSource::Pointer),
        (|a| a.ror(rax, 17), JumpSource::Pointer),
        (|a| a.xchg(rax, rdx), JumpSource::Distant),
        // Of something else, maybe.
        (|a| a.cmove(rax, rdx), JumpSource::Distant),
    ] {
        let mut found = None;
        let source = source_after(|a| found = Some(write(a)));
        assert!(found.is_some_and(|it| it.is_ok()));
        assert_eq!(source, expected);
    }
}
