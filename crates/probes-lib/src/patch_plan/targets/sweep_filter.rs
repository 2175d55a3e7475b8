//! [`SweepFilter`]: which code has to be swept if patches of a few functions are planned. Decoding all code takes most
//! of the time of planning; this scans the bytes without decoding them. On the left, which code it selects; on the
//! right, what for:
//!
//! ```text
//! the functions and what is around them       short branches, calls that return there, padding
//! any four bytes that could be a              near branches and calls, `lea`, addresses in fixed code
//!     displacement or an address to there
//! any two bytes that could be an              what tables hold, and where they end
//!     indirect jump
//! ```
//!
//! It selects too much rather than too little: such bytes may be in the middle of an instruction, or belong to two.

use std::ops::Range;

use crate::address::CodeRange;
use crate::patch_plan::code::Code;

/// For more functions, all code is swept.
const MAX_FUNCTIONS: usize = 64;

/// In real code, fewer places are found.
const MAX_FOUND: usize = 1 << 23;

/// How far from a function a patch of it looks for padding and branch targets.
const AROUND: u64 = 512;

/// How far a short branch reaches, and the longest instruction.
const REACH: u64 = 128 + LONGEST;
const LONGEST: u64 = 15;

/// The binary logarithm of the length of the blocks of code for which it is known whether they are in a window.
const BLOCK_BITS: u32 = 7;

/// How much code is looked at together, in bytes.
const PIECE_LEN: usize = 1 << 16;

/// The code that has to be swept.
pub(super) struct SweepFilter {
    /// The functions and what is around them.
    windows: Vec<Range<u64>>,
    /// Where there are bytes that may refer to them, or that may be an indirect jump; in order.
    found: Vec<u64>,
}

impl SweepFilter {
    /// Scans all code. `None` if all of it has to be swept.
    pub(super) fn of(code: &Code, functions: &[CodeRange]) -> Option<SweepFilter> {
        let window =
            |it: &CodeRange| it.start.0.saturating_sub(AROUND)..it.end().saturating_add(AROUND);
        let windows: Vec<Range<u64>> = functions.iter().map(window).collect();
        let start = windows.iter().map(|it| it.start).min()?;
        let end = windows.iter().map(|it| it.end).max()?;
        // Four bytes at a time are compared with addresses, so that these must have 32 bits.
        let is_low = |it: Range<u64>| it.end < 1 << 32;
        if functions.len() > MAX_FUNCTIONS || !is_low(0..end) || !code.executable().all(is_low) {
            return None;
        }
        let start = start & !((1 << BLOCK_BITS) - 1);
        let mut in_window = vec![false; ((end - start) >> BLOCK_BITS) as usize + 1];
        for window in &windows {
            let block = |at: u64| ((at - start) >> BLOCK_BITS) as usize;
            in_window[block(window.start)..=block(window.end)].fill(true);
        }
        let refers = |address: u32| {
            let block = address.wrapping_sub(start as u32) >> BLOCK_BITS;
            in_window.get(block as usize) == Some(&true)
        };
        let mut found = Vec::new();
        for segment in code.executable() {
            let bytes = code.bytes(segment.start, segment.end - segment.start);
            for start in (0..bytes.len()).step_by(PIECE_LEN) {
                let at = segment.start + start as u64;
                let is_possible = third_bytes(&windows, at, code.is_fixed());
                let fours = bytes[start..].windows(4).take(PIECE_LEN);
                if found.len() > MAX_FOUND {
                    return None;
                }
                for (at, four) in (at..).zip(fours) {
                    let &[one, two, three, four] = four else {
                        continue;
                    };
                    if one != 0xff && !is_possible[usize::from(three)] {
                        continue;
                    }
                    let word = u32::from_le_bytes([one, two, three, four]);
                    // All displacements of branches and of `lea` are the last four bytes of the instruction.
                    let relative = (at as u32).wrapping_add(4).wrapping_add(word);
                    let is_address = code.is_fixed() && refers(word);
                    if refers(relative) || is_address || may_jump(one, two) {
                        found.push(at);
                    }
                }
            }
            // For indirect jumps among the last bytes.
            found.push(segment.end.saturating_sub(1));
        }
        found.sort_unstable();
        Some(SweepFilter { windows, found })
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

/// Returns which values the third byte may have in a displacement from the piece of code at `at` to a window, and, if
/// `with_addresses`, in an address in one: few values, if the windows are few.
fn third_bytes(windows: &[Range<u64>], at: u64, with_addresses: bool) -> [bool; 256] {
    let mut is_possible = [false; 256];
    let mut add = |first: u32, len: u32| {
        if len >= 1 << 24 {
            is_possible.fill(true);
            return;
        }
        let last = first.wrapping_add(len) >> 16;
        for high in (first >> 16..).take_while(|high| high & 0xffff != (last + 1) & 0xffff) {
            is_possible[(high & 0xff) as usize] = true;
        }
    };
    for window in windows {
        // Of whole blocks.
        let block = 1 << BLOCK_BITS;
        let start = (window.start & !(block - 1)) as u32;
        let len = ((window.end - window.start) as u32).saturating_add(2 * block as u32);
        if with_addresses {
            add(start, len);
        }
        let end_of_piece = (at as u32).wrapping_add(4 + PIECE_LEN as u32);
        add(
            start.wrapping_sub(end_of_piece),
            len.saturating_add(PIECE_LEN as u32),
        );
    }
    is_possible
}

/// Returns whether these may be the opcode and the ModRM byte of an indirect jump through a table: `ff /4`, or `ff /5`
/// with a memory operand. A memory operand with neither a SIB byte nor a general register and a 32-bit displacement is
/// a single pointer ([`JumpSource::Pointer`](crate::patch_plan::tables::JumpSource::Pointer), `Slot`), and no table.
fn may_jump(opcode: u8, modrm: u8) -> bool {
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    let has_sib = rm == 4;
    let may_lead = match mode {
        3 => reg == 4,
        2 => true,
        _ => has_sib,
    };
    opcode == 0xff && matches!(reg, 4 | 5) && may_lead
}

#[cfg(test)]
mod tests {
    use iced_x86::{FlowControl, OpKind};

    use super::*;
    use crate::address::FileAddr;
    use crate::patch_plan::code::decode;
    use crate::patch_plan::tables::JumpSource;

    #[test]
    fn every_jump_through_a_table_is_noticed() {
        let mut noticed = 0;
        for modrm in 0..=u8::MAX {
            let bytes = [0xff, modrm, 0x8d, 0x10, 0x20, 0x30, 0x40];
            let instruction = decode(&bytes, 0x1000).next().unwrap();
            let is_jump = instruction.flow_control() == FlowControl::IndirectBranch;
            let is_pointer = is_jump
                && instruction.op0_kind() == OpKind::Memory
                && matches!(
                    JumpSource::of(&[], &instruction),
                    JumpSource::Pointer | JumpSource::Slot
                );
            assert!(may_jump(0xff, modrm) || !is_jump || is_pointer, "{modrm:x}");
            noticed += usize::from(may_jump(0xff, modrm));
        }
        assert!(noticed < 64 && !may_jump(0xfe, 0xe0));
    }

    /// Where the function is that is planned, and its length: so that what is around it begins and ends with a block.
    const FUNCTION: u64 = 0x41_0000;
    const LEN: u64 = 128;
    const WINDOW: Range<u64> = FUNCTION - AROUND..FUNCTION + LEN + AROUND;
    /// Two pieces of code before the function, and two from it on; and others so far away that all bytes of a
    /// displacement to there differ.
    const SEGMENTS: [Range<u64>; 4] = [
        0x3f_0000..0x43_0000,
        0x10_0000..0x10_1000,
        0x0300_0000..0x0300_1000,
        0x8765_0000..0x8765_1000,
    ];

    /// Returns whether code at `swept` has to be swept for the function, if all is nops but for these bytes at `at`.
    fn needs(at: u64, bytes: &[u8], swept: Range<u64>, is_fixed: bool) -> bool {
        let mut code = Code::default();
        for segment in &SEGMENTS {
            let mut all = vec![0x90; (segment.end - segment.start) as usize];
            if segment.contains(&at) {
                let start = (at - segment.start) as usize;
                all[start..start + bytes.len()].copy_from_slice(bytes);
            }
            code.add(FileAddr(segment.start), all, true);
        }
        if is_fixed {
            code.set_fixed();
        }
        let function = CodeRange {
            start: FileAddr(FUNCTION),
            len: LEN,
        };
        let filter = SweepFilter::of(&code, &[function]).unwrap();
        filter.needs(&swept)
    }

    /// Returns whether the code of a near jump from one address to another has to be swept.
    fn needs_jump(at: u64, target: u64) -> bool {
        let displacement = target.wrapping_sub(at + 5) as u32;
        let jump = [&[0xe9], &displacement.to_le_bytes()[..]].concat();
        let needed = needs(at, &jump, at..at + 5, false);
        // Other code is not needed for it.
        assert!(!needs(at, &jump, at + 8..at + 16, false));
        needed
    }

    #[test]
    fn references_are_found_wherever_they_are() {
        let starts = SEGMENTS.iter().map(|it| it.start);
        let ends = SEGMENTS.iter().map(|it| it.end - 64);
        // Where pieces begin, an instruction is in two of them.
        let borders = (0..8).flat_map(|it| [0x3f_fffa + it, 0x41_fffa + it]);
        for at in starts.chain(ends).chain(borders) {
            for target in [WINDOW.start, FUNCTION, FUNCTION + LEN, WINDOW.end] {
                assert!(needs_jump(at, target), "{at:x} {target:x}");
            }
            for other in [WINDOW.start - 1, WINDOW.end + 128, at + 5, 0] {
                assert!(!needs_jump(at, other), "{at:x} {other:x}");
            }
        }
    }

    #[test]
    fn addresses_are_references_if_they_are_fixed() {
        for segment in &SEGMENTS {
            let at = segment.start + 0x100;
            for (address, is_it) in [
                (WINDOW.start, true),
                (WINDOW.end, true),
                (WINDOW.start - 1, false),
                (WINDOW.end + 128, false),
            ] {
                // mov $address,%eax
                let bytes = [&[0xb8], &(address as u32).to_le_bytes()[..]].concat();
                let range = at..at + 5;
                assert_eq!(needs(at, &bytes, range.clone(), true), is_it, "{address:x}");
                assert!(!needs(at, &bytes, range, false));
            }
        }
    }

    #[test]
    fn third_bytes_are_those_of_windows() {
        let third = |window: Range<u64>, with_addresses| {
            let is_possible = third_bytes(&[window], 0x50_0000, with_addresses);
            let bytes = (0..=u8::MAX).filter(|it| is_possible[usize::from(*it)]);
            bytes.collect::<Vec<_>>()
        };
        // The last block, of which the window has one byte, has another third byte.
        let window = 0x40_f07f..0x41_0001;
        assert_eq!(third(window.clone(), false), [0xef, 0xf0, 0xf1]);
        assert_eq!(third(window, true), [0x40, 0x41, 0xef, 0xf0, 0xf1]);
        assert_eq!(third(0..(1 << 24) - 256, false).len(), 256);
    }

    #[test]
    fn indirect_jumps_are_swept_anywhere() {
        // jmp *table(,%rax,8)
        let jump = b"\xff\x24\xc5\0\0\0\x70";
        for segment in &SEGMENTS {
            let at = segment.start + 0x100;
            assert!(needs(at, jump, at..at + 7, false));
            assert!(!needs(at, jump, at + 7..at + 16, false));
            // The last bytes may be one.
            assert!(needs(at, &[], segment.end - 1..segment.end, false));
            let before = segment.end - 64;
            assert!(!needs(at, &[], before..before + 33, false));
        }
    }

    #[test]
    fn code_is_swept_around_functions_and_references() {
        let plain = |range: Range<u64>| needs(FUNCTION, &[], range, false);
        // A short branch, and the longest instruction.
        let (start, end) = (WINDOW.start - 143, WINDOW.end + 143);
        assert!(plain(FUNCTION..FUNCTION + 1));
        assert!(plain(start - 8..start + 1) && !plain(start - 8..start));
        assert!(plain(end - 1..end + 8) && !plain(end..end + 8));
        // An instruction may have begun before, with prefixes.
        let at = 0x3f_8000;
        let displacement = (FUNCTION - (at + 5)) as u32;
        let jump = [&[0xe9], &displacement.to_le_bytes()[..]].concat();
        let found = at + 1;
        for (range, is_it) in [
            (found..found + 8, true),
            (found + 1..found + 8, false),
            (found - 40..found - 29, true),
            (found - 40..found - 30, false),
        ] {
            assert_eq!(needs(at, &jump, range.clone(), false), is_it, "{range:x?}");
        }
    }

    #[test]
    fn many_functions_or_high_addresses_need_full_sweeps() {
        let filter = |many: u64, start: u64| {
            let mut code = Code::default();
            code.add(FileAddr(start), vec![0x90; 0x1000], true);
            let function = |index| CodeRange {
                start: FileAddr(start + 16 * index),
                len: 8,
            };
            let functions: Vec<CodeRange> = (0..many).map(function).collect();
            SweepFilter::of(&code, &functions).is_some()
        };
        assert!(filter(1, 0) && filter(MAX_FUNCTIONS as u64, 0x1000));
        assert!(!filter(MAX_FUNCTIONS as u64 + 1, 0x1000) && !filter(0, 0x1000));
        assert!(filter(1, (1 << 32) - 0x2000) && !filter(1, (1 << 32) - 0x1000));
        assert!(!filter(1, 1 << 33));
    }
}
