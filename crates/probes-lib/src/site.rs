//! [`SiteCode`]: the six bytes of a site, and what they mean.
//!
//! ```text
//! pc+0  90            nop
//! pc+1  3d <rel32>    cmp $rel32,%eax    disabled: no effect, the operand is the displacement
//! pc+1  e8 <rel32>    call wrapper       enabled: one byte differs
//! ```

use std::fmt;

use crate::address::LiveAddr;

/// Length of a site in bytes: the nop, the opcode and its 32-bit operand.
pub const SITE_LEN: usize = 6;

/// Offset of the opcode byte in a site.
pub(crate) const OPCODE_OFFSET: u64 = 1;

pub(crate) const NOP: u8 = 0x90;
pub(crate) const CMP: u8 = 0x3d;
pub(crate) const CALL: u8 = 0xe8;

/// What the trampoline of an observed site ends with: `ret` if the site is disabled, a `jmp` to the
/// wrapper if it is enabled.
pub(crate) const RET: u8 = 0xc3;
pub(crate) const JMP: u8 = 0xe9;

/// The length of such a `jmp`, opcode and displacement.
pub(crate) const JUMP_LEN: usize = 5;

/// Returns the `call` or `jmp` with a displacement of four bytes, of this opcode, that leads from `from` to `to`.
pub(crate) fn near_branch(opcode: u8, from: LiveAddr, to: LiveAddr) -> [u8; JUMP_LEN] {
    let displacement = to.0.wrapping_sub(from.plus(JUMP_LEN as u64).0) as u32;
    let [a, b, c, d] = displacement.to_le_bytes();
    [opcode, a, b, c, d]
}

/// Returns the target of the direct call that ends at `end`; `None` if `bytes`, the bytes before `end`, are no such
/// call.
pub(crate) fn direct_call_target(bytes: [u8; JUMP_LEN], end: u64) -> Option<u64> {
    let [CALL, displacement @ ..] = bytes else {
        return None;
    };
    Some(end.wrapping_add_signed(i32::from_le_bytes(displacement).into()))
}

/// The length of the longest call without prefixes, in bytes: how many bytes [`ends_with_call`] looks at.
pub(crate) const LONGEST_CALL: usize = 7;

/// Whether bytes may end with a call: a direct one (`e8` and a displacement), or one by a register or through memory
/// (`ff /2`, with an operand of any length).
pub(crate) fn ends_with_call(bytes: &[u8]) -> bool {
    let byte = |from_end: usize| bytes.len().checked_sub(from_end).map(|at| bytes[at]);
    let is_indirect = |len: usize| {
        byte(len) == Some(0xff) && byte(len - 1).is_some_and(|operand| operand >> 3 & 7 == 2)
    };
    byte(JUMP_LEN) == Some(CALL) || (2..=LONGEST_CALL).any(is_indirect)
}

/// The breakpoint instruction of debuggers and uprobes.
pub(crate) const INT3: u8 = 0xcc;

/// The six bytes found at a site, in a file or in memory.
///
/// ```
/// use probes_lib::SiteCode;
///
/// let site = SiteCode([0x90, 0xe8, 0xfc, 0x01, 0x00, 0x00]);
/// assert_eq!(site.enabled(), Some(true));
/// assert_eq!(site.to_string(), "90 e8 fc 01 00 00");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SiteCode(pub [u8; SITE_LEN]);

/// The byte of a site that decides whether it calls its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Opcode {
    /// `cmp`: the probe is disabled.
    Cmp,
    /// `call`: the probe is enabled.
    Call,
}

impl Opcode {
    pub(crate) fn byte(self) -> u8 {
        match self {
            Opcode::Cmp => CMP,
            Opcode::Call => CALL,
        }
    }

    pub(crate) fn of(enabled: bool) -> Opcode {
        if enabled { Opcode::Call } else { Opcode::Cmp }
    }
}

impl SiteCode {
    /// Returns whether the site calls its handler; `None` if its opcode is neither `cmp` nor `call`.
    pub fn enabled(self) -> Option<bool> {
        match self.0[OPCODE_OFFSET as usize] {
            CMP => Some(false),
            CALL => Some(true),
            _ => None,
        }
    }

    /// Whether these are the bytes a compiler emits: a nop, then `cmp` or `call`.
    pub fn is_pristine(self) -> bool {
        self.0[0] == NOP && self.enabled().is_some()
    }

    /// Whether a debugger or a uprobe has put an `int3` on the nop or on the opcode.
    pub fn has_breakpoint(self) -> bool {
        self.0[0] == INT3 || self.0[OPCODE_OFFSET as usize] == INT3
    }

    /// Whether both are pristine and have the same operand.
    pub(crate) fn same_but_for_opcode(self, other: SiteCode) -> bool {
        self.is_pristine() && other.is_pristine() && self.operand() == other.operand()
    }

    /// Returns the operand: the displacement of the wrapper.
    pub(crate) fn operand(self) -> [u8; 4] {
        let [_, _, operand @ ..] = self.0;
        operand
    }

    /// Returns the same site with another opcode.
    pub(crate) fn with(self, opcode: Opcode) -> SiteCode {
        let mut bytes = self.0;
        bytes[OPCODE_OFFSET as usize] = opcode.byte();
        SiteCode(bytes)
    }
}

impl fmt::Display for SiteCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for SiteCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SiteCode({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // From a program built by OxCaml, at pc 0x561ee.
    const DISABLED: SiteCode = SiteCode([0x90, 0x3d, 0xfc, 0x01, 0x00, 0x00]);

    #[test]
    fn flipping_a_site_changes_one_byte_reversibly() {
        let enabled = DISABLED.with(Opcode::Call);
        assert_eq!(enabled.0, [0x90, 0xe8, 0xfc, 0x01, 0x00, 0x00]);
        assert_eq!(enabled.enabled(), Some(true));
        assert!(enabled.same_but_for_opcode(DISABLED));
        assert_eq!(enabled.with(Opcode::Cmp), DISABLED);
        assert_eq!(enabled.0[1..], [0xe8, 0xfc, 0x01, 0x00, 0x00]);
        assert_eq!(enabled.operand(), DISABLED.operand());
        assert_eq!(format!("{enabled:?}"), "SiteCode(90 e8 fc 01 00 00)");
    }

    #[test]
    fn foreign_bytes_are_distinguished_from_a_site() {
        let on_nop = SiteCode([0xcc, 0x3d, 0, 0, 0, 0]);
        assert!(on_nop.has_breakpoint() && !on_nop.is_pristine());
        assert_eq!(on_nop.enabled(), Some(false));

        let on_opcode = SiteCode([0x90, 0xcc, 0, 0, 0, 0]);
        assert!(on_opcode.has_breakpoint() && !on_opcode.is_pristine());
        assert_eq!(on_opcode.enabled(), None);

        let other_wrapper = SiteCode([0x90, 0x3d, 0xfd, 0x01, 0x00, 0x00]);
        assert!(!other_wrapper.same_but_for_opcode(DISABLED));
        assert_eq!(other_wrapper.to_string(), "90 3d fd 01 00 00");
    }
}
