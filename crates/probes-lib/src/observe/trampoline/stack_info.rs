//! The fields of the description of a fiber's stack in the runtime of OCaml 5 (`struct stack_info` of
//! runtime/caml/fiber.h), as offsets.

/// The upper end of the stack: the address of its handler.
pub(super) const UPPER_END: i32 = 0x10;
/// The number of the fiber.
pub(super) const FIBER: i32 = 0x30;
