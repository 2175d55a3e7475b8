//! Padding: bytes between functions and blocks that are never executed, and can be overwritten.

use iced_x86::{Instruction, Mnemonic};

use crate::patch_plan::code::{Code, decode};
use crate::patch_plan::targets::Targets;

/// How much padding is looked at; alignment to a cache line is less.
const MAX_LEN: u64 = 64;

/// Returns how many bytes from `address` on are padding, provided that the instruction before it does not fall
/// through: nops, and the `int3` of some linkers, up to the first branch target. Zeros do not count: they may be data.
pub(super) fn len_at(code: &Code, targets: &Targets, address: u64) -> u64 {
    let mut end = address;
    for instruction in decode(code.bytes(address, MAX_LEN), address) {
        let is_reached = (end..instruction.next_ip()).any(|it| targets.contains(it));
        if is_reached || !is_padding(&instruction) {
            break;
        }
        end = instruction.next_ip();
    }
    end - address
}

fn is_padding(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3) && !instruction.is_invalid()
}
