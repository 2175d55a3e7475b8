//! The code of glibc that makes a thread. Its unwind tables end at the system call, because both the caller and the new
//! thread return from it (`clone.S` and `clone3.S` in sysdeps/unix/sysv/linux/x86_64):
//!
//! ```text
//! syscall
//! test %rax, %rax
//! jl   error
//! je   new thread      its table says that the frame is the outermost one
//! ret                  of the caller: nothing is on its stack but the return address
//! ```

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

use super::memory::StackMemory;

/// How many bytes from `syscall` to `ret`, at most.
const MAX_LEN: usize = 24;

/// `syscall`.
const SYSTEM_CALL: [u8; 2] = [0x0f, 0x05];

/// A place in this code.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClonePlace {
    /// Where the new thread goes on.
    pub(super) new_thread: u64,
    /// Whether the system call has been executed, or is under way.
    pub(super) is_after_call: bool,
}

/// Returns where in such code the instruction at an address is; `None` if it is not in such code.
pub(super) fn place(ip: u64, memory: &mut impl StackMemory) -> Option<ClonePlace> {
    let first = ip.checked_sub(MAX_LEN as u64)?;
    let mut code = [0; 2 * MAX_LEN];
    memory.read(first, &mut code)?;
    (0..=MAX_LEN).rev().find_map(|offset| {
        let start = first + offset as u64;
        let code = code[offset..].strip_prefix(&SYSTEM_CALL)?;
        let after = start + SYSTEM_CALL.len() as u64;
        let (new_thread, starts) = of_result(&code[..code.len().min(MAX_LEN)], after)?;
        (ip == start || starts.contains(&ip)).then_some(ClonePlace {
            new_thread,
            is_after_call: ip != start,
        })
    })
}

/// Returns where the code after the system call jumps to if the result is 0, and where its instructions start.
fn of_result(code: &[u8], start: u64) -> Option<(u64, Vec<u64>)> {
    let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    let mut next = || -> Option<Instruction> { decoder.can_decode().then(|| decoder.decode()) };
    let test = next()?;
    let (mut new_thread, mut starts) = (None, vec![test.ip()]);
    while let (Mnemonic::Test, Some(instruction)) = (test.mnemonic(), next()) {
        starts.push(instruction.ip());
        match instruction.flow_control() {
            FlowControl::Return => return Some((new_thread?, starts)),
            FlowControl::ConditionalBranch if instruction.mnemonic() == Mnemonic::Je => {
                new_thread = Some(instruction.near_branch_target());
            }
            FlowControl::ConditionalBranch => {}
            _ => break,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: u64 = 0x40_0000;

    /// `syscall; test %rax, %rax; jl; je; ret` of glibc 2.36.
    const OF_GLIBC: [u8; 12] = [
        0x0f, 0x05, 0x48, 0x85, 0xc0, 0x7c, 0x18, 0x74, 0x01, 0xc3, 0x31, 0xed,
    ];

    struct Code<'c>(&'c [u8]);

    impl StackMemory for Code<'_> {
        fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
            for (at, byte) in (at..).zip(bytes) {
                let index = at.checked_sub(CODE).map(|index| index as usize);
                *byte = *index.and_then(|index| self.0.get(index)).unwrap_or(&0x90);
            }
            Some(())
        }
    }

    /// Returns where the new thread goes on from this code, and whether the call was made before the instruction at an
    /// offset.
    fn found(code: &[u8], offset: u64) -> Option<(u64, bool)> {
        let place = place(CODE + offset, &mut Code(code))?;
        Some((place.new_thread - CODE, place.is_after_call))
    }

    #[test]
    fn instructions_around_the_call_are_known() {
        for offset in [0, 2, 5, 7, 9] {
            assert_eq!(found(&OF_GLIBC, offset), Some((10, offset != 0)));
        }
        for offset in [1, 3, 8, 10] {
            assert_eq!(found(&OF_GLIBC, offset), None);
        }
    }

    #[test]
    fn other_system_calls_are_left_alone() {
        // cmp $-4095, %rax; jae; ret
        let ordinary = [
            0x0f, 0x05, 0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff, 0x73, 0x01, 0xc3,
        ];
        assert_eq!(found(&ordinary, 2), None);
        // Without `je`, and without `ret`.
        let mut other = OF_GLIBC;
        other[7] = 0x75;
        assert_eq!(found(&other, 2), None);
        other = OF_GLIBC;
        other[9] = 0xe8;
        assert_eq!(found(&other, 2), None);
    }
}
