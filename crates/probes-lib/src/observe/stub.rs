//! The code of a stub: counts a hit, and does then what its site did before. Pure.
//!
//! ```text
//! site     nop; call stub
//! stub     one more in the counter of the site, for this group of threads
//!          off: ret           on: jmp wrapper, which returns to the site
//! ```
//!
//! It keeps all registers, but for the flags, which are dead at a site; it uses one word of the
//! stack beside the return address, calls nothing, and cannot fault.

use iced_x86::code_asm::{CodeAssembler, dword_ptr, ecx, qword_ptr, rcx};
use iced_x86::{Code, IcedError, Instruction, MemoryOperand, Register};

use crate::addr::LiveAddr;
use crate::observe::arena::{GROUP_BITS, displacement};

/// A line of the cache each.
pub(crate) const STUB_LEN: u64 = 64;

/// Where the last instruction begins, whose first byte is `RET` or `JMP`.
pub(crate) const TAIL: u64 = 56;

pub(crate) const RET: u8 = 0xc3;
pub(crate) const JMP: u8 = 0xe9;
const NOP: u8 = 0x90;

/// A counter of a site.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter {
    /// Where the address of the counters stands.
    pub(crate) data: LiveAddr,
    /// Binary logarithm of the bytes of a group's counters.
    pub(crate) row_bits: u32,
    /// In bytes, within those of a group.
    pub(crate) offset: u32,
}

/// The first byte of the tail.
pub(crate) fn tail_byte(enabled: bool) -> u8 {
    if enabled { JMP } else { RET }
}

/// The stub at `at`, of a site that is disabled.
///
/// # Errors
///
/// If `counter` is too far away.
pub(crate) fn counting(
    at: LiveAddr,
    counter: Counter,
    wrapper: LiveAddr,
) -> Result<[u8; STUB_LEN as usize], IcedError> {
    let mut stub = [NOP; STUB_LEN as usize];
    let code = count(at, counter)?;
    let (work, tail) = stub.split_at_mut(TAIL as usize);
    work[..code.len()].copy_from_slice(&code);
    tail[0] = RET;
    tail[1..5].copy_from_slice(&displacement(at.plus(TAIL + 5), wrapper));
    Ok(stub)
}

/// The thread is told by its control block, to which `fs:0` points (x86-64 psABI, ELF Handling for
/// Thread-Local Storage). Threads whose blocks are alike share counters, so these are locked.
fn count(at: LiveAddr, counter: Counter) -> Result<Vec<u8>, IcedError> {
    /// 2³² by the golden ratio: Knuth's multiplicative hashing.
    const SPREAD: i32 = 0x9e37_79b9_u32 as i32;
    let mut a = CodeAssembler::new(64)?;
    a.push(rcx)?;
    a.mov(ecx, dword_ptr(0).fs())?;
    a.imul_3(ecx, ecx, SPREAD)?;
    a.shr(ecx, 32 - GROUP_BITS)?;
    a.shl(ecx, counter.row_bits)?;
    // Relative to the instruction, as the displacement from RIP is an address to this assembler.
    let data = MemoryOperand::with_base_displ(Register::RIP, counter.data.0 as i64);
    a.add_instruction(Instruction::with2(Code::Add_r64_rm64, Register::RCX, data)?)?;
    a.lock().inc(qword_ptr(rcx + counter.offset))?;
    a.pop(rcx)?;
    a.assemble(at.0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use test_support::Scratch;

    #[test]
    fn objdump_reads_what_was_meant() {
        let at = LiveAddr(0x5555_0000_1000);
        let counter = Counter {
            data: LiveAddr(0x5555_0000_0020),
            row_bits: 12,
            offset: 0x1f8,
        };
        let mut code = counting(at, counter, LiveAddr(0x5555_4000_0000)).unwrap();
        assert_eq!(code[TAIL as usize], tail_byte(false));
        code[TAIL as usize] = tail_byte(true);
        assert_eq!(code.len() as u64, STUB_LEN);
        let scratch = Scratch::new();
        let file = scratch.file("stub");
        std::fs::write(&file, code).unwrap();
        let listing = Command::new("objdump")
            .args([
                "-D",
                "-b",
                "binary",
                "-m",
                "i386:x86-64",
                "--no-show-raw-insn",
            ])
            .arg(format!("--adjust-vma={at}"))
            .arg(&file)
            .output()
            .unwrap();
        let text = String::from_utf8(listing.stdout).unwrap();
        let instructions: Vec<String> = text
            .lines()
            .filter_map(|line| line.split_once(":\t"))
            .map(|(_, text)| text.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
            .filter(|text| text != "nop")
            .collect();
        assert_eq!(
            instructions,
            [
                "push %rcx",
                "mov %fs:0x0,%ecx",
                "imul $0x9e3779b9,%ecx,%ecx",
                "shr $0x1c,%ecx",
                "shl $0xc,%ecx",
                "add -0xffc(%rip),%rcx # 0x555500000020",
                "lock incq 0x1f8(%rcx)",
                "pop %rcx",
                "jmp 0x555540000000",
            ]
        );
    }
}
