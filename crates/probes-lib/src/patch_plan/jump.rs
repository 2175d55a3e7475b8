//! [`Jump`]: the jumps that can be put at a patch site.

use crate::address::FileAddr;
use crate::site;

/// Length of a near jump: opcode and displacement.
pub(crate) const JUMP_LEN: u64 = site::JUMP_LEN as u64;

/// Length of a short jump: opcode and displacement.
pub(crate) const SHORT_LEN: u64 = 2;

/// How many bytes of the site stay before a prefixed jump.
pub(crate) const PREFIX_LEN: u64 = 1;

pub(crate) const SHORT_JMP: u8 = 0xeb;

/// How a patch site jumps to its trampoline.
///
/// ```text
/// near     e9 d d d d           over whole instructions, and padding after them
/// punned   e9 d d d|83          the last bytes of the displacement are those of the instruction
///                               that follows, which stays: the trampoline has to lie in a window
/// short    eb d ──▶ e9 d d d d  to padding within 127 bytes, the island, and from there
/// prefixed 48|e9 d d d d        after the first byte, which stays: a REX prefix does not matter to
///                               a jump, and the patch of the code before the site may overwrite that byte
/// ```
///
/// [`PatchPlanner::new`](crate::PatchPlanner::new) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Jump {
    /// Five bytes of our own.
    Near {
        /// How many of them are padding after the displaced instructions.
        padding: u8,
    },
    /// Five bytes, the last of which are those of the next instruction.
    Punned {
        /// How many bytes of the displacement can be chosen, the lowest ones: 0 to 3.
        chosen: u8,
        /// The displacement, with zeros where it can be chosen.
        displacement: i32,
    },
    /// Two bytes.
    Short {
        /// Where the five bytes of the second jump are.
        island: FileAddr,
    },
    /// Five bytes of our own, after the first byte of the site.
    Prefixed,
}
