//! [`Near`]: which code has to be swept if patches of a few functions are planned. To decode all code takes most of the
//! time; here its bytes are only compared.
//!
//! ```text
//! the functions and what is around them       short branches, calls that return there, padding
//! any four bytes that could be a              near branches and calls, `lea`, addresses in fixed code
//!     displacement or an address to there
//! any two bytes that could be an              what tables hold, and where they end
//!     indirect jump
//! ```
//!
//! It is too much rather than too little: such bytes may be in the middle of an instruction, or belong to two of them.

use std::ops::Range;

use crate::address::CodeRange;
use crate::patch_plan::code::Code;

/// For more functions, all code is swept.
const MOST: usize = 64;

/// How far from a function a patch of it looks for padding and branch targets.
const AROUND: u64 = 512;

/// How far a short branch reaches, and the longest instruction.
const REACH: u64 = 128 + LONGEST;
const LONGEST: u64 = 15;

/// The binary logarithm of the length of the blocks of code for which it is known whether they are near.
const BLOCK_BITS: u32 = 7;

/// The code that has to be swept.
pub(super) struct Near {
    /// The functions and what is around them.
    windows: Vec<Range<u64>>,
    /// Where there are bytes that may refer to them, or that may be an indirect jump; in order.
    found: Vec<u64>,
}

impl Near {
    /// Compares all code. `None` if all of it has to be swept.
    pub(super) fn of(code: &Code, functions: &[CodeRange]) -> Option<Near> {
        let window =
            |it: &CodeRange| it.start.0.saturating_sub(AROUND)..it.end().saturating_add(AROUND);
        let windows: Vec<Range<u64>> = functions.iter().map(window).collect();
        let start = windows.iter().map(|it| it.start).min()?;
        let end = windows.iter().map(|it| it.end).max()?;
        // Addresses of 32 bits, so that those of instructions that use only so many are found as well.
        let is_low = |it: Range<u64>| it.end < 1 << 32;
        if functions.len() > MOST || !is_low(0..end) || !code.executable().all(is_low) {
            return None;
        }
        let start = start & !((1 << BLOCK_BITS) - 1);
        let mut is_near = vec![false; ((end - start) >> BLOCK_BITS) as usize + 1];
        for window in &windows {
            let block = |at: u64| ((at - start) >> BLOCK_BITS) as usize;
            is_near[block(window.start)..=block(window.end)].fill(true);
        }
        let refers = |address: u32| {
            let block = address.wrapping_sub(start as u32) >> BLOCK_BITS;
            is_near.get(block as usize).is_some_and(|is_near| *is_near)
        };
        let mut found = Vec::new();
        for segment in code.executable() {
            let bytes = code.bytes(segment.start, segment.end - segment.start);
            for (at, four) in (segment.start..).zip(bytes.windows(4)) {
                let &[one, two, three, four] = four else {
                    continue;
                };
                let word = u32::from_le_bytes([one, two, three, four]);
                // All displacements of branches and of `lea` are the last four bytes of the instruction.
                let relative = (at as u32).wrapping_add(4).wrapping_add(word);
                let is_address = code.is_fixed() && refers(word);
                if refers(relative) || is_address || may_jump(one, two) {
                    found.push(at);
                }
            }
            // For indirect jumps among the last bytes.
            found.push(segment.end.saturating_sub(1));
        }
        found.sort_unstable();
        Some(Near { windows, found })
    }

    /// Returns whether this code has to be swept.
    pub(super) fn needs(&self, range: &Range<u64>) -> bool {
        let is_around = |window: &Range<u64>| {
            range.start < window.end.saturating_add(REACH)
                && range.end.saturating_add(REACH) > window.start
        };
        let first = self.found.partition_point(|it| *it < range.start);
        // The instruction may have begun before, and its last byte may be in other code.
        let end = range.end.saturating_add(2 * LONGEST);
        let has_any = self.found.get(first).is_some_and(|it| *it < end);
        has_any || self.windows.iter().any(is_around)
    }
}

/// Returns whether these may be the opcode of an indirect jump, and its operand, that can lead through a table: `ff /4`, or
/// `ff /5` with memory. Without an index and an address of four bytes, it leads to what a register points to
/// ([`JumpSource::Pointer`](crate::patch_plan::tables::JumpSource::Pointer)).
fn may_jump(opcode: u8, operand: u8) -> bool {
    let (form, extension, base) = (operand >> 6, operand >> 3 & 7, operand & 7);
    let has_index = base == 4;
    let may_lead = match form {
        3 => extension == 4,
        2 => true,
        _ => has_index,
    };
    opcode == 0xff && matches!(extension, 4 | 5) && may_lead
}

#[cfg(test)]
mod tests {
    use iced_x86::{FlowControl, OpKind};

    use super::*;
    use crate::patch_plan::code::decode;
    use crate::patch_plan::tables::JumpSource;

    #[test]
    fn every_jump_through_a_table_is_noticed() {
        let mut noticed = 0;
        for operand in 0..=u8::MAX {
            let bytes = [0xff, operand, 0x8d, 0x10, 0x20, 0x30, 0x40];
            let instruction = decode(&bytes, 0x1000).next().unwrap();
            let is_jump = instruction.flow_control() == FlowControl::IndirectBranch;
            let is_pointer = is_jump
                && instruction.op0_kind() == OpKind::Memory
                && JumpSource::of(&[], &instruction) == JumpSource::Pointer;
            assert!(
                may_jump(0xff, operand) || !is_jump || is_pointer,
                "{operand:x}"
            );
            noticed += usize::from(may_jump(0xff, operand));
        }
        assert!(noticed < 64 && !may_jump(0xfe, 0xe0));
    }
}
