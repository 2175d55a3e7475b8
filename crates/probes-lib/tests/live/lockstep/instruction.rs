//! What an instruction reads and depends on, and how registers differ.

use std::ops::Range;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, RflagsBits,
};
use nix::libc::user_regs_struct;

/// The status flags and the direction flag.
pub(super) const FLAGS: u64 = 0xcd5;

pub(super) fn decode(bytes: &[u8], address: u64) -> Instruction {
    Decoder::with_ip(64, bytes, address, DecoderOptions::NONE).decode()
}

/// Returns the addresses that an instruction accesses as data.
pub(super) fn accessed(instruction: &Instruction, registers: &user_regs_struct) -> Vec<Range<u64>> {
    let mut factory = InstructionInfoFactory::new();
    let memory = factory.info(instruction).used_memory();
    let is_lea = instruction.mnemonic() == Mnemonic::Lea || instruction.mnemonic() == Mnemonic::Nop;
    let accessed = memory.iter().filter(|_| !is_lea).filter_map(|it| {
        let start = it.virtual_address(0, |register, _, _| register_of(register, registers))?;
        // Those of unknown size save the whole state.
        let len = match it.memory_size().size() as u64 {
            0 => 64,
            len => len,
        };
        Some(start..start.checked_add(len)?)
    });
    accessed.collect()
}

pub(super) fn register_of(
    register: iced_x86::Register,
    registers: &user_regs_struct,
) -> Option<u64> {
    use iced_x86::Register;
    let value = match register.full_register() {
        Register::RAX => registers.rax,
        Register::RBX => registers.rbx,
        Register::RCX => registers.rcx,
        Register::RDX => registers.rdx,
        Register::RSI => registers.rsi,
        Register::RDI => registers.rdi,
        Register::RBP => registers.rbp,
        Register::RSP => registers.rsp,
        Register::R8 => registers.r8,
        Register::R9 => registers.r9,
        Register::R10 => registers.r10,
        Register::R11 => registers.r11,
        Register::R12 => registers.r12,
        Register::R13 => registers.r13,
        Register::R14 => registers.r14,
        Register::R15 => registers.r15,
        Register::FS => registers.fs_base,
        Register::GS => registers.gs_base,
        Register::CS | Register::DS | Register::ES | Register::SS => 0,
        _ => return None,
    };
    Some(if register.size() == 4 {
        value & 0xffff_ffff
    } else {
        value
    })
}

/// Returns the bits of the flags that an instruction reads.
pub(super) fn read_flags(instruction: &Instruction) -> u64 {
    let read = instruction.rflags_read();
    let bits = [
        (RflagsBits::CF, 0x1),
        (RflagsBits::PF, 0x4),
        (RflagsBits::AF, 0x10),
        (RflagsBits::ZF, 0x40),
        (RflagsBits::SF, 0x80),
        (RflagsBits::DF, 0x400),
        (RflagsBits::OF, 0x800),
    ];
    let is_read = bits.iter().filter(|(bit, _)| read & bit != 0);
    is_read.map(|(_, flag)| flag).sum()
}

/// Returns whether the effect of an instruction depends only on registers and memory.
pub(super) fn is_repeatable(instruction: &Instruction) -> bool {
    use Mnemonic::{Rdpid, Rdpmc, Rdrand, Rdseed, Rdtsc, Rdtscp, Xbegin, Xtest};
    let unknown = [Rdpid, Rdpmc, Rdrand, Rdseed, Rdtsc, Rdtscp, Xbegin, Xtest];
    let is_system_call = instruction.flow_control() == FlowControl::Call
        && instruction.mnemonic() != Mnemonic::Call
        || instruction.flow_control() == FlowControl::Interrupt;
    !is_system_call && !unknown.contains(&instruction.mnemonic())
}

/// Returns the registers that differ, but for these flags.
pub(super) fn difference(one: &user_regs_struct, other: &user_regs_struct, dead: u64) -> String {
    let all = |it: &user_regs_struct| {
        [
            ("rip", it.rip),
            ("rsp", it.rsp),
            ("rax", it.rax),
            ("rbx", it.rbx),
            ("rcx", it.rcx),
            ("rdx", it.rdx),
            ("rsi", it.rsi),
            ("rdi", it.rdi),
            ("rbp", it.rbp),
            ("r8", it.r8),
            ("r9", it.r9),
            ("r10", it.r10),
            ("r11", it.r11),
            ("r12", it.r12),
            ("r13", it.r13),
            ("r14", it.r14),
            ("r15", it.r15),
            ("fs", it.fs_base),
            ("flags", it.eflags & FLAGS & !dead),
        ]
    };
    let both = all(one).into_iter().zip(all(other));
    let differing = both.filter(|(one, other)| one != other);
    let texts =
        differing.map(|((name, one), (_, other))| format!("{name} {other:#x} instead of {one:#x}"));
    texts.collect::<Vec<_>>().join(", ")
}
