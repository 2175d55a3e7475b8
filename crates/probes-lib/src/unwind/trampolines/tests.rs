//! Where threads go on that are at each instruction of a trampoline.

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, ebx, esp, mm3, qword_ptr, r14, rbp, rbx, rsp};
use proptest::prelude::any;

use super::super::registers::{RBP, RBX, RCX, RSP};
use super::*;
use crate::testing::properties;

const CODE: u64 = 0x5555_0000_0000;
const TRAMPOLINE: u64 = CODE + 0x100;
const POINT: u64 = 0x5555_4000_0000;
const OTHER: u64 = 0x5555_4000_1000;
const ID: u64 = 0x1d;
/// What the registers of the function hold.
const BASE: u64 = 0xba5e;
const SAVED: u64 = 0x5afed;
/// Bits of a stack pointer below which the trampoline has room on the stack.
const ROOM: i32 = 0xf80;
const WITH_ROOM: u64 = 0x7fff_0000_0f80;
const WITHOUT_ROOM: u64 = 0x7fff_0000_0020;

/// The code of one observer, and a stack.
struct Memory {
    code: Vec<u8>,
    stack: Vec<(u64, u64)>,
}

impl StackMemory for Memory {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        if let Some(offset) = at.checked_sub(CODE).filter(|it| *it < 0x1000) {
            let code = self.code.get(offset as usize..)?;
            bytes.copy_from_slice(code.get(..bytes.len())?);
            return Some(());
        }
        let (_, word) = self.stack.iter().find(|(word_at, _)| *word_at == at)?;
        bytes.copy_from_slice(&word.to_le_bytes());
        Some(())
    }
}

/// Code at one address, and zeros.
struct CodeAt<'c>(&'c [u8], LiveAddr);

impl StackMemory for CodeAt<'_> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let code = at.checked_sub(self.1.0).map(|offset| offset as usize);
        let code = code.and_then(|offset| self.0.get(offset..)?.get(..bytes.len()));
        bytes.fill(0);
        if let Some(code) = code {
            bytes.copy_from_slice(code);
        }
        Some(())
    }
}

/// Returns the instructions from which on no way out of `code` is found.
pub(crate) fn never_left(code: &[u8], at: LiveAddr, instructions: &[(u64, String)]) -> Vec<String> {
    let range = at.0..at.plus(code.len() as u64).0;
    let is_left = |ip| {
        let mut registers = FrameRegisters::new(ip, WITH_ROOM);
        registers.set(RCX, Some(OTHER));
        let exit = rest::execute(&range, registers, &mut CodeAt(code, at));
        exit.is_some_and(|exit| exit.by != ExitBy::StackPointer)
    };
    let never = instructions.iter().filter(|(ip, _)| !is_left(*ip));
    never.map(|(ip, text)| format!("{ip:x} {text}")).collect()
}

/// A trampoline, and the addresses of its instructions.
struct Trampoline {
    mapped: MappedTrampolines,
    memory: Memory,
    instructions: Vec<u64>,
}

impl Trampoline {
    fn of(is_site: bool, emit: impl Fn(&mut CodeAssembler) -> Result<(), IcedError>) -> Trampoline {
        let mut a = CodeAssembler::new(64).unwrap();
        emit(&mut a).unwrap();
        let code = a.assemble(TRAMPOLINE).unwrap();
        let mut decoder = iced_x86::Decoder::with_ip(64, &code, TRAMPOLINE, 0);
        let instructions = decoder.iter().map(|it| it.ip()).collect();
        Trampoline::with(is_site, &code, instructions)
    }

    fn with(is_site: bool, code: &[u8], instructions: Vec<u64>) -> Trampoline {
        let mut all = vec![0; 0x100];
        all[..8].copy_from_slice(&ID.to_le_bytes());
        all.extend(code);
        let address = LiveAddr(POINT);
        Trampoline {
            mapped: MappedTrampolines {
                code: CODE..CODE + all.len() as u64,
                id: (LiveAddr(CODE), ID),
                first: LiveAddr(TRAMPOLINE),
                len: 0x400,
                points: vec![TrampolinePoint { address, is_site }],
            },
            memory: Memory {
                code: all,
                stack: Vec::new(),
            },
            instructions,
        }
    }

    fn after(&mut self, ip: u64, top: u64, stack: &[(u64, u64)]) -> Option<AfterTrampoline> {
        let mut registers = FrameRegisters::new(ip, top);
        registers.set(RBP, Some(BASE));
        registers.set(RBX, Some(SAVED));
        self.memory.stack = stack.to_vec();
        self.mapped.after(registers, &mut self.memory)
    }

    /// Where a thread goes on that is at an instruction, given by its index.
    fn at(&mut self, index: usize, top: u64, stack: &[(u64, u64)]) -> Option<(u64, u64, Place)> {
        let after = self.after(self.instructions[index], top, stack)?;
        assert_eq!(after.point.0, POINT);
        Some((after.registers.ip, after.registers.get(RSP)?, after.place))
    }
}

/// Uses a register, which is saved on the stack, or in an MMX register; `push rbp` is the displaced instruction.
fn saves(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut elsewhere, mut saved) = (a.create_label(), a.create_label());
    let (mut from_elsewhere, mut end) = (a.create_label(), a.create_label());
    a.test(esp, ROOM)?;
    a.je(elsewhere)?;
    a.mov(qword_ptr(rsp - 8), rbx)?;
    a.set_label(&mut saved)?;
    a.mov(ebx, 1)?;
    a.test(esp, ROOM)?;
    a.je(from_elsewhere)?;
    a.mov(rbx, qword_ptr(rsp - 8))?;
    a.jmp(end)?;
    a.set_label(&mut elsewhere)?;
    a.movq(mm3, rbx)?;
    a.jmp(saved)?;
    a.set_label(&mut from_elsewhere)?;
    a.movq(rbx, mm3)?;
    a.set_label(&mut end)?;
    a.push(rbp)?;
    a.jmp(POINT + 5)
}

#[test]
fn saved_registers_are_restored() {
    let mut trampoline = Trampoline::of(false, saves);
    let used = trampoline.instructions[4];
    let stack = [(WITH_ROOM - 8, 0x0fed)];
    // From the beginning, and from where the register is used; where it is saved is not known in the second case.
    for (top, ip, expected) in [
        (WITH_ROOM, TRAMPOLINE, Some(SAVED)),
        (WITHOUT_ROOM, TRAMPOLINE, Some(SAVED)),
        (WITH_ROOM, used, Some(0x0fed)),
        (WITHOUT_ROOM, used, None),
    ] {
        let after = trampoline.after(ip, top, &stack).unwrap();
        assert_eq!(after.place, Place::Instruction);
        assert_eq!(after.registers.ip, POINT + 5);
        assert_eq!(after.registers.get(RBX), expected, "{ip:x} {top:x}");
    }
}

#[test]
fn displaced_instructions_are_executed() {
    let mut trampoline = Trampoline::of(false, saves);
    for index in 0..trampoline.instructions.len() - 1 {
        let expected = Some((POINT + 5, WITH_ROOM - 8, Place::Instruction));
        assert_eq!(trampoline.at(index, WITH_ROOM, &[]), expected, "{index}");
    }
    // What they write is on the stack.
    let after = trampoline.after(TRAMPOLINE, WITH_ROOM, &[]).unwrap();
    let mut memory = after.writes.over(&mut trampoline.memory);
    assert_eq!(memory.word(WITH_ROOM - 8), Some(BASE));
    // After `push rbp`.
    let last = trampoline.instructions.len() - 1;
    let expected = Some((POINT + 5, WITH_ROOM, Place::Instruction));
    assert_eq!(trampoline.at(last, WITH_ROOM, &[]), expected);
}

#[test]
fn exits_lead_to_callers() {
    let stack = [(WITH_ROOM + 8, OTHER), (WITH_ROOM, POINT + 7)];
    let mut returns = Trampoline::of(false, |a| {
        a.add(rsp, 8)?;
        a.ret()
    });
    let expected = Some((OTHER, WITH_ROOM + 16, Place::Caller));
    assert_eq!(returns.at(0, WITH_ROOM, &stack), expected);
    assert_eq!(returns.at(1, WITH_ROOM + 8, &stack), expected);
    // A jump to another function; its caller is that of this one, even if it is a call near the point.
    let mut jumps = Trampoline::of(false, |a| a.jmp(OTHER));
    let expected = Some((OTHER, WITH_ROOM, Place::Instruction));
    assert_eq!(jumps.at(0, WITH_ROOM, &stack), expected);
    // `leave` needs rbp.
    let mut leaves = Trampoline::of(false, |a| {
        a.leave()?;
        a.ret()
    });
    let expected = Some((OTHER, BASE + 16, Place::Caller));
    let stack = [(BASE, 1), (BASE + 8, OTHER)];
    assert_eq!(leaves.at(0, WITH_ROOM, &stack), expected);
}

#[test]
fn displaced_calls_return_to_the_function() {
    let mut calls = Trampoline::of(false, |a| {
        let mut word = a.create_label();
        a.push(qword_ptr(word))?;
        a.jmp(OTHER)?;
        a.set_label(&mut word)?;
        a.dq(&[POINT + 7])
    });
    let expected = Some((POINT + 7, WITH_ROOM, Place::AfterCall));
    assert_eq!(calls.at(0, WITH_ROOM, &[]), expected);
    let stack = [(WITH_ROOM - 8, POINT + 7)];
    assert_eq!(calls.at(1, WITH_ROOM - 8, &stack), expected);
}

#[test]
fn sites_have_called_their_trampolines() {
    let after_site = POINT + SITE_LEN as u64;
    let expected = Some((after_site, WITH_ROOM + 8, Place::AfterCall));
    let stack = [(WITH_ROOM, after_site)];
    // With a probe that is disabled, and with one that is enabled.
    let mut returns = Trampoline::of(true, |a| a.ret());
    assert_eq!(returns.at(0, WITH_ROOM, &stack), expected);
    let mut jumps = Trampoline::of(true, |a| a.jmp(OTHER));
    assert_eq!(jumps.at(0, WITH_ROOM, &stack), expected);
    let elsewhere = [(WITH_ROOM, OTHER)];
    assert_eq!(jumps.at(0, WITH_ROOM, &elsewhere), None);
}

#[test]
fn unknown_stacks_are_those_of_the_point() {
    // OCaml 5 calls C on another stack.
    let mut switches = Trampoline::of(false, |a| {
        a.mov(rsp, qword_ptr(r14 + 64))?;
        a.jmp(POINT + 5)
    });
    let expected = Some((POINT, WITH_ROOM, Place::Instruction));
    assert_eq!(switches.at(0, WITH_ROOM, &[]), expected);
    let mut allocates = Trampoline::of(false, |a| {
        a.sub(rsp, rbx)?;
        a.jmp(POINT + 5)
    });
    assert_eq!(allocates.at(0, WITH_ROOM, &[]), expected);
}

#[test]
fn other_code_is_not_executed() {
    let mut trampoline = Trampoline::of(false, saves);
    trampoline.mapped.id.1 += 1;
    assert_eq!(trampoline.at(0, WITH_ROOM, &[]), None);
    let mut endless = Trampoline::of(false, |a| a.jmp(TRAMPOLINE));
    assert_eq!(endless.at(0, WITH_ROOM, &[]), None);
}

proptest::proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn any_code_ends(code in proptest::collection::vec(any::<u8>(), 0..0x300), is_site in any::<bool>()) {
        let mut trampoline = Trampoline::with(is_site, &code, Vec::new());
        for ip in CODE..CODE + 0x100 + code.len() as u64 {
            trampoline.after(ip, WITH_ROOM, &[(WITH_ROOM, POINT + 6)]);
        }
    }
}
