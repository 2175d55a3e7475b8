//! The room for registers below the stack pointer of the program.

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, CodeLabel, esp};

use crate::address::PAGE;

/// How many bytes below the stack pointer a function may use (psABI 3.2.2).
pub(super) const RED_ZONE: i32 = 128;

/// Some bits of the stack pointer: if all of them are zero, the 128 bytes below it are not all in its page.
const IN_PAGE: i32 = PAGE as i32 - RED_ZONE;

/// Emits a jump to `otherwise` unless there is room for registers below the stack pointer.
pub(super) fn unless_room_on_stack(
    a: &mut CodeAssembler,
    otherwise: CodeLabel,
) -> Result<(), IcedError> {
    a.test(esp, IN_PAGE)?;
    a.je(otherwise)
}
