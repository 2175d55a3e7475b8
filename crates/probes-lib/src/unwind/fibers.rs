//! Finds the parent of a fiber of OCaml 5, where the unwind tables do not lead to it.

use std::ops::Range;

use super::memory::StackMemory;

/// `Cont_tag` of runtime/caml/mlvalues.h: a block that holds a suspended stack.
const CONTINUATION_TAG: u64 = 245;

/// The most bytes of the frames of C code that are searched.
const MAX_SEARCHED: u64 = 1 << 20;

/// The stack pointers below and above the last two frames that have changed the stack, as far as they are needed.
#[derive(Debug)]
pub(super) struct StackSwitches {
    /// From here to `below_last` are the frames between the last two changes: those of C code, if there is a fiber on
    /// each side.
    above_last_but_one: u64,
    below_last: u64,
    above_last: u64,
}

impl StackSwitches {
    /// The innermost frames may be those of C code.
    pub(super) fn beginning_at(stack_pointer: u64) -> StackSwitches {
        StackSwitches {
            above_last_but_one: stack_pointer,
            below_last: stack_pointer,
            above_last: stack_pointer,
        }
    }

    pub(super) fn add(&mut self, below: u64, above: u64) {
        self.above_last_but_one = self.above_last;
        self.below_last = below;
        self.above_last = above;
    }

    /// Returns the CFA of `caml_runstack` of the fiber's parent.
    ///
    /// While C code calls back into OCaml, the running fiber has no link to its parent: no effect may cross the frames
    /// of C. The link is kept in a continuation, which a local root in `caml_callback_exn` holds (runtime/callback.c).
    pub(super) fn cleared_parent(&self, memory: &mut impl StackMemory) -> Option<u64> {
        cleared_parent(self.above_last_but_one..self.below_last, memory)
    }
}

fn cleared_parent(c_frames: Range<u64>, memory: &mut impl StackMemory) -> Option<u64> {
    if c_frames.end.wrapping_sub(c_frames.start) > MAX_SEARCHED {
        return None;
    }
    c_frames.step_by(8).find_map(|at| {
        let block = memory.word(at).filter(|block| block % 8 == 0)?;
        let header = memory.word(block.checked_sub(8)?)?;
        if header & 0xff != CONTINUATION_TAG {
            return None;
        }
        let stack = memory.word(block).filter(|stack| stack & 1 == 1)? - 1;
        // struct stack_info of runtime/caml/fiber.h: sp, exception_ptr, handler, ...; the handler is above the stack.
        let (top, handler) = (memory.word(stack)?, memory.word(stack.checked_add(16)?)?);
        (stack < top && top < handler).then(|| top.wrapping_add(8))
    })
}
