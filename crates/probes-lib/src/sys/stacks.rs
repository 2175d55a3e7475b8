//! Where threads that stand will go on: by their program counters, and by what is on their stacks.

use std::ops::Range;

use crate::addr::LiveAddr;
use crate::memory::ReadMemory;
use crate::spans::PAGE;
use crate::sys::ptrace;
use crate::sys::threads::Stopped;

/// How much of a stack is searched for the frame of a signal, which is where the handler began.
const STACK: u64 = 1 << 20;

impl Stopped<'_> {
    /// Whether a thread is in `code`, or may return there: from the handler of a signal, for one.
    pub(crate) fn leads_into(&self, memory: &impl ReadMemory, code: &Range<u64>) -> bool {
        let mut places = self.tids().filter_map(|tid| ptrace::place(tid).ok());
        places.any(|(at, stack)| code.contains(&at) || points_to(memory, stack, code))
    }
}

/// Whether a word on a stack that ends at `top` is an address of `code`.
fn points_to(memory: &impl ReadMemory, top: LiveAddr, code: &Range<u64>) -> bool {
    let mut at = top.0.next_multiple_of(8);
    let end = at.saturating_add(STACK);
    let mut page = [0; PAGE as usize];
    while at < end {
        let rest = &mut page[(at % PAGE) as usize..];
        if memory.read(LiveAddr(at), rest).is_err() {
            // Here the stack begins.
            return false;
        }
        let mut words = rest.chunks_exact(8);
        let word = |word: &[u8]| word.try_into().map(u64::from_le_bytes);
        if words.any(|bytes| word(bytes).is_ok_and(|word| code.contains(&word))) {
            return true;
        }
        at += rest.len() as u64;
    }
    false
}
