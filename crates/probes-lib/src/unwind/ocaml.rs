//! What the code of OCaml does to its stack, and its unwind tables do not say.

use super::memory::StackMemory;
use super::registers::{FrameRegisters, RSP};

/// `pop` of the word at the top of the stack into the state of the domain (r14), or where r11 points, and `ret`.
const POPS: [&[u8]; 3] = [
    &[0x41, 0x8f, 0x46],
    &[0x41, 0x8f, 0x86],
    &[0x41, 0x8f, 0x03],
];
/// How many bytes of an offset follow each of them.
const OFFSETS: [usize; 3] = [1, 4, 0];
/// `lea offset(%r14), %r11` without its offset, which is one byte.
const LEA: [u8; 3] = [0x4d, 0x8d, 0x5e];
const LEA_LEN: usize = 4;
const RET: u8 = 0xc3;

/// No code is at lower addresses: `vm.mmap_min_addr` (mmap(2)).
pub(super) const LOWEST_CODE: u64 = 1 << 16;

/// Code that raises an exception sets the stack pointer to that of the innermost exception handler. Then `pop`, in
/// OCaml 5 after a `lea`, makes the next outer handler the innermost one, and `ret` jumps to the handler
/// (`caml_raise_exn` of runtime/amd64.S, and the code that ocamlopt makes of `raise`). Returns the registers with which
/// the handler begins, if one of these instructions is executed next.
pub(super) fn handler_of_raised(
    registers: &FrameRegisters,
    memory: &mut impl StackMemory,
) -> Option<FrameRegisters> {
    let top = registers.get(RSP)?;
    let handler_at = match next_in_pair(registers.ip, memory)? {
        InPair::Pop => top.checked_add(8)?,
        InPair::Ret => top,
    };
    let mut handler = *registers;
    handler.ip = memory.word(handler_at)?;
    handler.set(RSP, Some(handler_at.checked_add(8)?));
    Some(handler)
}

/// Which instruction of such a pair is executed next.
enum InPair {
    Pop,
    Ret,
}

fn next_in_pair(ip: u64, memory: &mut impl StackMemory) -> Option<InPair> {
    const BEFORE: usize = 7;
    let mut code = [0; BEFORE + 12];
    memory.read(ip.checked_sub(BEFORE as u64)?, &mut code)?;
    let (before, mut rest) = code.split_at(BEFORE);
    let mut pops = POPS.iter().zip(OFFSETS);
    if rest[0] == RET {
        let is_before = |(pop, offset): (&&[u8], usize)| {
            let len = pop.len() + offset;
            before[BEFORE - len..].starts_with(pop)
        };
        return pops.any(is_before).then_some(InPair::Ret);
    }
    if rest.starts_with(&LEA) {
        rest = &rest[LEA_LEN..];
    }
    let (pop, offset) = pops.find(|(pop, _)| rest.starts_with(pop))?;
    (rest.get(pop.len() + offset) == Some(&RET)).then_some(InPair::Pop)
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

    #[track_caller]
    fn handler(code: &[u8], offset: u64) -> Option<(u64, u64)> {
        let registers = FrameRegisters::new(CODE + offset, STACK);
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
            assert_eq!(handler(code, code.len() as u64 - 1), Some((0, 8)));
        }
        // OCaml 5: lea 0x30(%r14), %r11; pop (%r11); ret
        let code = [0x4d, 0x8d, 0x5e, 0x30, 0x41, 0x8f, 0x03, 0xc3];
        assert_eq!(handler(&code, 0), Some((8, 16)));
        assert_eq!(handler(&code, 4), Some((8, 16)));
        assert_eq!(handler(&code, 7), Some((0, 8)));
    }

    #[test]
    fn other_returns_are_left_alone() {
        // pop %r14; ret, and a pop without a return.
        assert_eq!(handler(&[0x41, 0x5e, 0xc3], 0), None);
        assert_eq!(handler(&[0x41, 0x5e, 0xc3], 2), None);
        assert_eq!(handler(&[0x41, 0x8f, 0x46, 0x10, 0x90], 0), None);
    }
}
