//! Where threads that stand will go on: by their program counters, and by what is on their stacks.

use std::ops::Range;

use crate::addr::LiveAddr;
use crate::memory::ReadMemory;
use crate::spans::PAGE;
use crate::sys::ptrace;
use crate::sys::threads::Stopped;

/// How much of a stack is searched for the frame of a signal, which is where the handler began.
const STACK: u64 = 1 << 20;

/// Stacks of a thread whose signals have interrupted each other: more than anybody has.
const MOST_STACKS: usize = 16;

/// In the frame of a signal, what follows the stack pointer, the program counter and the flags of a
/// 64-bit program: its segments `cs`, `gs`, `fs` and `ss` (struct sigcontext of asm/sigcontext.h).
const SEGMENTS: u64 = 0x002b_0000_0000_0033;

impl Stopped<'_> {
    /// Whether a thread is in `code`, or may return there: from the handler of a signal, for one.
    pub(crate) fn leads_into(&self, memory: &impl ReadMemory, code: &Range<u64>) -> bool {
        self.tids().any(|tid| thread_leads_into(tid, memory, code))
    }
}

/// Whether a thread that stands is in `code`, or may return there.
pub(crate) fn thread_leads_into(tid: i32, memory: &impl ReadMemory, code: &Range<u64>) -> bool {
    let place = ptrace::place(tid);
    place.is_ok_and(|(at, stack)| code.contains(&at) || points_to(memory, stack, code))
}

/// Whether a word on a stack that ends at `top` is an address of `code`, or on one that was left for
/// it: a signal may have a stack of its own (sigaltstack(2)).
fn points_to(memory: &impl ReadMemory, top: LiveAddr, code: &Range<u64>) -> bool {
    let mut tops = vec![top.0];
    let mut searched: Vec<Range<u64>> = Vec::new();
    while let Some(top) = tops.pop() {
        let is_known = searched.iter().any(|stack| stack.contains(&top));
        if is_known || searched.len() >= MOST_STACKS {
            continue;
        }
        let mut before = [0; 3];
        let mut found = false;
        let stack = each_word(memory, top, |word| {
            found |= code.contains(&word);
            if word == SEGMENTS {
                tops.push(before[0]);
            }
            before = [before[1], before[2], word];
            !found
        });
        if found {
            return true;
        }
        searched.push(stack);
    }
    false
}

/// Shows the words of a stack, from its end on, for as long as they are wanted; says where they were.
fn each_word(
    memory: &impl ReadMemory,
    top: u64,
    mut is_wanted: impl FnMut(u64) -> bool,
) -> Range<u64> {
    let start = top & !7;
    let end = start.saturating_add(STACK);
    let mut at = start;
    let mut page = [0; PAGE as usize];
    while at < end {
        let rest = &mut page[(at % PAGE) as usize..];
        if memory.read(LiveAddr(at), rest).is_err() {
            // Here the stack begins.
            break;
        }
        let mut words = rest.chunks_exact(8);
        let word = |word: &[u8]| word.try_into().map_or(0, u64::from_le_bytes);
        if !words.all(|bytes| is_wanted(word(bytes))) {
            break;
        }
        at = at.saturating_add(rest.len() as u64);
    }
    start..at
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Words of two stacks, of a page each.
    struct Stacks([(u64, Vec<(u64, u64)>); 2]);

    impl ReadMemory for Stacks {
        fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            let of = |(start, _): &&(u64, _)| (*start..start + PAGE).contains(&at.0);
            let stack = self.0.iter().find(of);
            let (_, words) = stack.ok_or(io::ErrorKind::UnexpectedEof)?;
            bytes.fill(0);
            for (place, word) in words {
                if let Some(index) = place.checked_sub(at.0) {
                    bytes[index as usize..][..8].copy_from_slice(&word.to_le_bytes());
                }
            }
            Ok(())
        }
    }

    const CODE: Range<u64> = 0x5000..0x6000;

    fn frame(at: u64, stack: u64, counter: u64) -> Vec<(u64, u64)> {
        let words = [stack, counter, 0x246, SEGMENTS];
        (at..).step_by(8).zip(words).collect()
    }

    #[test]
    fn a_stack_leads_to_those_that_were_left_for_it() {
        let (one, other) = (0x10_0000, 0x20_0000);
        let leads = |on_one: Vec<(u64, u64)>, on_other: Vec<(u64, u64)>| {
            let stacks = Stacks([(one, on_one), (other, on_other)]);
            points_to(&stacks, LiveAddr(one + 0x20), &CODE)
        };
        let left = || frame(one + 0x100, other + 0x80, 0x1234);
        assert!(!leads(vec![], vec![]));
        assert!(leads(frame(one + 0x100, 0, 0x5008), vec![]));
        assert!(leads(left(), frame(other + 0x100, 0, 0x5008)));
        // Below its end is nothing, nor on a stack that nobody was on.
        assert!(!leads(left(), frame(other + 0x10, 0, 0x5008)));
        assert!(!leads(vec![], frame(other + 0x100, 0, 0x5008)));
        // Round and round.
        assert!(!leads(left(), frame(other + 0x100, one + 0x20, 0)));
        assert!(!leads(frame(one + 0x100, u64::MAX, 0), vec![]));
    }
}
