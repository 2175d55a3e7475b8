//! What the code of OCaml does to its stack, and its unwind tables do not say.

use std::ops::Range;

use super::memory::StackMemory;
use super::registers::{FrameRegisters, R11, RSP};
use super::tables::{Cfa, UnwindRow};
use crate::site::{JUMP_LEN, direct_call_target};

/// No code is at lower addresses: `vm.mmap_min_addr` (mmap(2)).
pub(super) const LOWEST_CODE: u64 = 1 << 16;

/// The instructions of a [raise sequence](handler_of_raised), each with its bytes up to an offset, and the number of
/// the bytes of the offset. An offset from r14 is one in the state of the domain.
const RAISE: [(Instruction, &[u8], usize); 12] = [
    // mov offset(%r14), %rsp
    (Instruction::SetStackPointer, &[0x49, 0x8b, 0x66], 1),
    (Instruction::SetStackPointer, &[0x49, 0x8b, 0xa6], 4),
    // lea offset(%r14), %r11
    (Instruction::Other, &[0x4d, 0x8d, 0x5e], 1),
    (Instruction::Other, &[0x4d, 0x8d, 0x9e], 4),
    // pop offset(%r14), or pop (%r11)
    (Instruction::Pop, &[0x41, 0x8f, 0x46], 1),
    (Instruction::Pop, &[0x41, 0x8f, 0x86], 4),
    (Instruction::Pop, &[0x41, 0x8f, 0x03], 0),
    // mov offset(%r14), %r15
    (Instruction::Other, &[0x4d, 0x8b, 0x7e], 1),
    (Instruction::Other, &[0x4d, 0x8b, 0xbe], 4),
    // pop %r11
    (Instruction::PopR11, &[0x41, 0x5b], 0),
    // jmp *%r11
    (Instruction::JumpR11, &[0x41, 0xff, 0xe3], 0),
    // ret
    (Instruction::Return, &[0xc3], 0),
];

/// A raise sequence has no more bytes than that.
const MAX_RAISE_LEN: usize = 32;

/// What an instruction of a raise sequence does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    /// Sets the stack pointer to that of the innermost exception handler.
    SetStackPointer,
    /// Makes the next outer handler the innermost one.
    Pop,
    PopR11,
    JumpR11,
    Return,
    /// Nothing to the stack.
    Other,
}

impl Instruction {
    /// Returns the first instruction of `code`, and its length.
    fn decode(code: &[u8]) -> Option<(Instruction, usize)> {
        let found = RAISE.iter().find(|(_, bytes, _)| code.starts_with(bytes));
        found.map(|(instruction, bytes, offset)| (*instruction, bytes.len() + offset))
    }
}

/// Code that raises an exception sets the stack pointer to that of the innermost exception handler, makes the next outer
/// handler the innermost one, and jumps to the handler. From then on, its unwind table does not describe the stack.
///
/// ```text
/// caml_raise_exn (runtime/amd64.S)   mov off(%r14), %rsp; pop off(%r14); ret
///                of OCaml 5          mov off(%r14), %rsp; lea off(%r14), %r11; pop (%r11); ret
/// caml_raise_exception of OCaml 4    mov off(%r14), %rsp; pop off(%r14); mov off(%r14), %r15; ret
/// raise, without a backtrace         mov off(%r14), %rsp; pop off(%r14); pop %r11; jmp *%r11
/// ```
///
/// Returns the registers with which the handler begins, if one of these instructions but the first is executed next.
pub(super) fn handler_of_raised(
    registers: &FrameRegisters,
    memory: &mut impl StackMemory,
) -> Option<FrameRegisters> {
    let mut top = registers.get(RSP)?;
    let mut r11 = registers.get(R11);
    for instruction in rest_of_raise(registers.ip, memory)? {
        if instruction == Instruction::JumpR11 {
            return Some(at_handler(registers, r11?, top));
        }
        if !matches!(instruction, Instruction::Other) {
            let word = memory.word(top);
            top = top.checked_add(8)?;
            match instruction {
                Instruction::PopR11 => r11 = word,
                Instruction::Return => return Some(at_handler(registers, word?, top)),
                _ => {}
            }
        }
    }
    None
}

fn at_handler(registers: &FrameRegisters, handler: u64, stack_pointer: u64) -> FrameRegisters {
    let mut changed = *registers;
    changed.ip = handler;
    changed.set(RSP, Some(stack_pointer));
    changed
}

/// Returns the instructions from `ip` to the end of a raise sequence, if it is in one, and not at its beginning.
fn rest_of_raise(ip: u64, memory: &mut impl StackMemory) -> Option<Vec<Instruction>> {
    let mut code = [0; 2 * MAX_RAISE_LEN];
    memory.read(ip.checked_sub(MAX_RAISE_LEN as u64)?, &mut code)?;
    (0..MAX_RAISE_LEN).rev().find_map(|start| {
        let mut at = start;
        let mut rest = Vec::new();
        while at < code.len() {
            let (instruction, len) = Instruction::decode(&code[at..])?;
            if (instruction == Instruction::SetStackPointer) != (at == start) {
                return None;
            }
            if at == MAX_RAISE_LEN || !rest.is_empty() {
                rest.push(instruction);
            }
            at += len;
            if matches!(instruction, Instruction::Return | Instruction::JumpR11) {
                break;
            }
        }
        (!rest.is_empty()).then_some(rest)
    })
}

/// The size of a trap frame, which `try` pushes: the address of the handler, and the next outer trap frame.
const TRAP_FRAME: i64 = 16;

/// `jmp` with a displacement of one byte.
const SHORT_JUMP: u8 = 0xeb;

/// `jmp` with a displacement of four bytes.
const NEAR_JUMP: u8 = 0xe9;

/// Where the jump of a stub may be, from an address within the stub: after the last byte of the call, or the first one,
/// or there.
const JUMPS: [usize; 3] = [1, JUMP_LEN, 0];

/// The code around an address.
pub(super) struct CodeAround {
    /// From [`JUMP_LEN`] bytes before it on.
    bytes: [u8; 3 * JUMP_LEN],
    at: u64,
}

/// The jump at the end of a stub.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct JumpBack {
    pub(super) at: u64,
    pub(super) target: u64,
}

impl CodeAround {
    pub(super) fn read(at: u64, memory: &mut impl StackMemory) -> Option<CodeAround> {
        let mut bytes = [0; 3 * JUMP_LEN];
        memory.read(at.checked_sub(JUMP_LEN as u64)?, &mut bytes)?;
        Some(CodeAround { bytes, at })
    }

    /// Returns the jump of the stub that an address is in. `ocamlopt` puts the calls of the collector at the end of a
    /// function, and each jumps back to where it is needed:
    ///
    /// ```text
    /// call caml_call_gc
    /// jmp  to an earlier instruction of the function
    /// ```
    ///
    /// The unwind table of the stub is that of the end of the function, without the trap frames that code within `try`
    /// has pushed. The jump changes no register, so the row of its target holds for the whole stub.
    pub(super) fn jump_back(&self, function: &Range<u64>) -> Option<JumpBack> {
        let mut jumps = JUMPS.into_iter().filter_map(|after| {
            let before = self.bytes[after..].first_chunk().copied()?;
            let at = self.at + after as u64;
            direct_call_target(before, at)?;
            let (length, offset) =
                match *self.bytes[JUMP_LEN + after..].first_chunk::<JUMP_LEN>()? {
                    [SHORT_JUMP, offset, ..] => (2, i64::from(offset as i8)),
                    [NEAR_JUMP, a, b, c, d] => (5, i32::from_le_bytes([a, b, c, d]).into()),
                    _ => return None,
                };
            let target = (at + length).wrapping_add_signed(offset);
            Some(JumpBack { at, target })
        });
        jumps.find(|jump| jump.target < jump.at && function.contains(&jump.target))
    }
}

/// Returns how many trap frames a frame has more at one row than at another; `None` if that is not what they differ by.
pub(super) fn trap_frames_between(fewer: &UnwindRow, more: &UnwindRow) -> Option<i64> {
    let (Cfa::Register(RSP, fewer_bytes), Cfa::Register(RSP, more_bytes)) = (&fewer.cfa, &more.cfa)
    else {
        return None;
    };
    let bytes = more_bytes.checked_sub(*fewer_bytes)?;
    (more.is_as_in_ocaml() && bytes % TRAP_FRAME == 0).then_some(bytes / TRAP_FRAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: u64 = 0x40_0000;
    const STACK: u64 = 0x7fff_0000;

    /// Code at one address, and a stack that holds its own addresses.
    struct Memory<'c>(&'c [u8]);

    impl StackMemory for Memory<'_> {
        fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
            for (at, byte) in (at..).zip(bytes) {
                *byte = match at.checked_sub(CODE) {
                    Some(index) if at < STACK => *self.0.get(index as usize).unwrap_or(&0xcc),
                    Some(_) => (at & !7).to_le_bytes()[(at % 8) as usize],
                    None => 0x90,
                };
            }
            Some(())
        }
    }

    const SET_STACK_POINTER: [u8; 4] = [0x49, 0x8b, 0x66, 0x10];

    /// Returns where the handler and its stack pointer are found at an instruction of this code, which is after
    /// `mov 0x10(%r14), %rsp`.
    #[track_caller]
    fn handler(code: &[u8], offset: usize) -> Option<(u64, u64)> {
        let all = [&[0x90; MAX_RAISE_LEN], &SET_STACK_POINTER[..], code].concat();
        let offset = all.len() - code.len() + offset;
        handler_at(&all, offset)
    }

    fn handler_at(code: &[u8], offset: usize) -> Option<(u64, u64)> {
        let mut registers = FrameRegisters::new(CODE + offset as u64, STACK);
        registers.set(R11, Some(STACK + 0x500));
        let found = handler_of_raised(&registers, &mut Memory(code))?;
        Some((found.ip - STACK, found.get(RSP)? - STACK))
    }

    #[test]
    fn handler_is_found_at_each_instruction() {
        // OCaml 4.13: pop 0x10(%r14); ret, or with a longer offset.
        for code in [
            &[0x41, 0x8f, 0x46, 0x10, 0xc3][..],
            &[0x41, 0x8f, 0x86, 0, 1, 0, 0, 0xc3],
        ] {
            assert_eq!(handler(code, 0), Some((8, 16)));
            assert_eq!(handler(code, code.len() - 1), Some((0, 8)));
        }
        // OCaml 5: lea 0x30(%r14), %r11; pop (%r11); ret
        let code = [0x4d, 0x8d, 0x5e, 0x30, 0x41, 0x8f, 0x03, 0xc3];
        assert_eq!(handler(&code, 0), Some((8, 16)));
        assert_eq!(handler(&code, 4), Some((8, 16)));
        assert_eq!(handler(&code, 7), Some((0, 8)));
        // caml_raise_exception of OCaml 4.13: pop 0x10(%r14); mov 0x8(%r14), %r15; ret
        let code = [0x41, 0x8f, 0x46, 0x10, 0x4d, 0x8b, 0x7e, 0x08, 0xc3];
        assert_eq!(handler(&code, 0), Some((8, 16)));
        assert_eq!(handler(&code, 4), Some((0, 8)));
        assert_eq!(handler(&code, 8), Some((0, 8)));
    }

    #[test]
    fn handler_is_found_where_ocamlopt_raises() {
        // pop 0x10(%r14); pop %r11; jmp *%r11
        let code = [0x41, 0x8f, 0x46, 0x10, 0x41, 0x5b, 0x41, 0xff, 0xe3];
        assert_eq!(handler(&code, 0), Some((8, 16)));
        assert_eq!(handler(&code, 4), Some((0, 8)));
        assert_eq!(handler(&code, 6), Some((0x500, 0)));
        // Before the stack pointer is set, the table is right.
        let all = [&[0x90; MAX_RAISE_LEN], &SET_STACK_POINTER[..], &code].concat();
        assert_eq!(handler_at(&all, MAX_RAISE_LEN), None);
        assert_eq!(handler_at(&all, MAX_RAISE_LEN - 1), None);
    }

    #[test]
    fn other_code_is_left_alone() {
        // pop %r14; ret, a pop without a return, and within an instruction.
        assert_eq!(handler(&[0x41, 0x5e, 0xc3], 0), None);
        assert_eq!(handler(&[0x41, 0x5e, 0xc3], 2), None);
        assert_eq!(handler(&[0x41, 0x8f, 0x46, 0x10, 0x90], 0), None);
        assert_eq!(handler(&[0x41, 0x8f, 0x46, 0x10, 0xc3], 2), None);
        // Nothing has set the stack pointer.
        let code = [&[0x90; MAX_RAISE_LEN], &[0x41, 0x8f, 0x46, 0x10, 0xc3][..]].concat();
        assert_eq!(handler_at(&code, MAX_RAISE_LEN), None);
    }

    /// Returns the jump of a stub at an offset from its call, which begins at an address of a function.
    fn jump_back(stub: &[u8], offset: u64, function: Range<u64>) -> Option<(u64, u64)> {
        let mut code = [0x90; 0x200];
        code[0x100..][..stub.len()].copy_from_slice(stub);
        let around = CodeAround::read(CODE + 0x100 + offset, &mut Memory(&code))?;
        let jump = around.jump_back(&(CODE + function.start..CODE + function.end))?;
        Some((jump.at - CODE, jump.target - CODE))
    }

    #[test]
    fn stubs_of_the_collector_are_found() {
        let call = [0xe8, 0, 1, 0, 0];
        let short = [&call[..], &[0xeb, 0x80]].concat();
        let near = [&call[..], &[0xe9, 0x16, 0xff, 0xff, 0xff]].concat();
        // At the call, in the call that is executing, and at the jump.
        for offset in [0, 4, 5] {
            let found = |stub| jump_back(stub, offset, 0x10..0x120);
            assert_eq!(found(&short), Some((0x105, 0x87)));
            assert_eq!(found(&near), Some((0x105, 0x20)));
        }
        assert_eq!(jump_back(&short, 4, 0x88..0x120), None);
        assert_eq!(jump_back(&short, 3, 0x10..0x120), None);
        // A jump forwards, one that no call comes before, and one that the code decides on.
        let forwards = [&call[..], &[0xeb, 0x10]].concat();
        assert_eq!(jump_back(&forwards, 4, 0x10..0x180), None);
        assert_eq!(
            jump_back(&[0x90, 0, 1, 0, 0, 0xeb, 0x80], 4, 0x10..0x120),
            None
        );
        assert_eq!(
            jump_back(&[0xe8, 0, 1, 0, 0, 0x74, 0x80], 4, 0x10..0x120),
            None
        );
    }
}
