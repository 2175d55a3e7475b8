//! [`StackRanges`]: whether the stack of a stopped thread holds an address of some code, to which the
//! thread may return.

use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::memory::ReadMemory;
use crate::numbers::words;
use crate::process::maps::Mapping;

/// How many bytes of a stack are searched for addresses of code. What is further up may be no stack any more: memory that
/// is mapped right after one.
const MAX_SEARCHED: u64 = 1 << 20;

/// How many bytes of a stack are searched for signal frames; to search so many takes about 3 ms.
const MAX_SEARCHED_FOR_FRAMES: u64 = 64 << 20;

/// How many bytes of a stack are read at once.
const READ_AT_ONCE: u64 = 16 * PAGE;

/// Where a stack may be if the maps cannot be read.
const ANYWHERE: Range<u64> = 0..u64::MAX;

/// How many stacks of one thread are searched: more than nested signal handlers use.
const MAX_STACKS: usize = 16;

/// In a signal frame, what follows the stack pointer, the program counter and the flags of a
/// 64-bit program: its segments `cs`, `gs`, `fs` and `ss` (struct sigcontext of asm/sigcontext.h).
const SEGMENTS: u64 = 0x002b_0000_0000_0033;

/// A word on a stack.
struct StackWord {
    at: u64,
    /// How many bytes there are between the stack pointer and it.
    above: u64,
    word: u64,
    /// The three words before it.
    before: [u64; 3],
}

/// Where the stacks of a process may be: memory that can be written, in order.
#[derive(Debug)]
pub(crate) struct StackRanges(Vec<Range<u64>>);

impl StackRanges {
    /// Returns where the stacks of a process may be if its maps cannot be read: searching too much is safe; searching
    /// too little is not.
    pub(crate) fn anywhere() -> StackRanges {
        StackRanges(vec![ANYWHERE])
    }

    /// Returns where the stacks of a process with these mappings may be. Treats adjacent mappings as one stack, because
    /// a part of a stack may be locked, or have a name, and then is a mapping of its own. A stack ends at its guard
    /// page.
    pub(crate) fn among(maps: &[Mapping]) -> StackRanges {
        let mut stacks: Vec<Range<u64>> = Vec::new();
        for mapping in maps.iter().filter(|mapping| mapping.is_writable()) {
            match stacks.last_mut() {
                Some(last) if last.end == mapping.start.0 => last.end = mapping.end.0,
                _ => stacks.push(mapping.start.0..mapping.end.0),
            }
        }
        StackRanges(stacks)
    }

    /// The same stacks, none of which goes beyond one of these thread control blocks: the C library puts that of a thread at the end of its
    /// stack, and what is mapped right after it may be megabytes of something else.
    pub(crate) fn up_to_blocks(self, blocks: impl IntoIterator<Item = LiveAddr>) -> StackRanges {
        let mut blocks: Vec<u64> = blocks.into_iter().map(|it| it.0).collect();
        blocks.sort_unstable();
        let parts = self.0.into_iter().flat_map(|stack| {
            let first = blocks.partition_point(|block| *block <= stack.start);
            let inside = blocks[first..].iter().copied();
            let ends = inside.take_while(|block| *block < stack.end);
            let mut start = stack.start;
            let parts = ends.chain([stack.end]).map(|end| {
                let part = start..end;
                start = end;
                part
            });
            parts.collect::<Vec<_>>()
        });
        StackRanges(parts.filter(|part| !part.is_empty()).collect())
    }

    /// Returns the range to search if the stack pointer is `top`: at most `most` bytes. It ends where this stack ends,
    /// because the stacks at higher addresses belong to other threads.
    fn above(&self, top: u64, most: u64) -> Range<u64> {
        let index = self.0.partition_point(|stack| stack.end <= top);
        let Some(stack) = self.0.get(index) else {
            return top..top;
        };
        // The stack pointer may be in memory that is mapped only when it is written to.
        let start = top.max(stack.start);
        let end = top.saturating_add(most).min(stack.end);
        (start & !7)..end
    }

    /// Returns the first word on the stack above `top` that is an address of one of these ranges of code; further up, the first
    /// that a signal frame returns to: a handler may use more than [`MAX_SEARCHED`]. If that stack
    /// has a signal frame, the stack that the signal has interrupted is searched too: a signal handler
    /// may have a stack of its own (sigaltstack(2)).
    pub(crate) fn lead_into(
        &self,
        memory: &impl ReadMemory,
        top: LiveAddr,
        code: &[Range<u64>],
    ) -> Option<LiveAddr> {
        let mut found = None;
        self.search(memory, top, MAX_SEARCHED_FOR_FRAMES, |word| {
            let to = if word.above < MAX_SEARCHED {
                word.word
            } else if word.word == SEGMENTS {
                word.before[1]
            } else {
                return true;
            };
            let leads = code.iter().any(|code| code.contains(&to));
            found = leads.then_some(LiveAddr(to));
            !leads
        });
        found
    }

    /// Returns the program counters in the signal frames on the stack above `top`, and on the stacks that these signals
    /// have interrupted: the address of each, and its value.
    pub(crate) fn contexts(&self, memory: &impl ReadMemory, top: LiveAddr) -> Vec<(LiveAddr, u64)> {
        let mut contexts = Vec::new();
        self.search(memory, top, MAX_SEARCHED_FOR_FRAMES, |word| {
            if word.word == SEGMENTS {
                contexts.push((LiveAddr(word.at.wrapping_sub(16)), word.before[1]));
            }
            true
        });
        contexts
    }

    /// Calls `visit` for each word on the stack above `top`, and on the stacks that signal frames there lead to, at
    /// most `most` bytes of each, until it returns false.
    fn search(
        &self,
        memory: &impl ReadMemory,
        top: LiveAddr,
        most: u64,
        mut visit: impl FnMut(StackWord) -> bool,
    ) {
        let mut tops = vec![top.0];
        let mut searched: Vec<Range<u64>> = Vec::new();
        while let Some(top) = tops.pop() {
            let is_known = searched.iter().any(|stack| stack.contains(&top));
            if is_known || searched.len() >= MAX_STACKS {
                continue;
            }
            let mut before = [0; 3];
            let mut goes_on = true;
            let range = self.above(top, most);
            let start = range.start;
            let mut at = start;
            let stack = each_word(memory, range, |word| {
                let above = at.wrapping_sub(start);
                goes_on = visit(StackWord {
                    at,
                    above,
                    word,
                    before,
                });
                if word == SEGMENTS {
                    tops.push(before[0]);
                }
                before = [before[1], before[2], word];
                at = at.wrapping_add(8);
                goes_on
            });
            if !goes_on {
                return;
            }
            searched.push(stack);
        }
    }
}

/// Passes the words of a stack to `visit`, from the stack pointer up, until that returns false;
/// returns their range.
fn each_word(
    memory: &impl ReadMemory,
    stack: Range<u64>,
    mut visit: impl FnMut(u64) -> bool,
) -> Range<u64> {
    let mut at = stack.start;
    let mut buffer = [0; READ_AT_ONCE as usize];
    let mut is_by_pages = false;
    while at < stack.end {
        let most = if is_by_pages {
            PAGE - at % PAGE
        } else {
            READ_AT_ONCE
        };
        let part = &mut buffer[..(stack.end - at).min(most) as usize];
        if memory.read(LiveAddr(at), part).is_err() {
            if is_by_pages {
                // The stack ends here.
                break;
            }
            is_by_pages = true;
            continue;
        }
        if !words(part).all(&mut visit) {
            break;
        }
        at += part.len() as u64;
    }
    stack.start..at
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use super::*;
    use crate::process::maps;

    /// Words of two stacks, of a page each.
    struct Pages([(u64, Vec<(u64, u64)>); 2]);

    impl ReadMemory for Pages {
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
    fn stack_leads_to_the_trampolines_it_returns_to() {
        let (one, other) = (0x10_0000, 0x20_0000);
        let leads = |on_one: Vec<(u64, u64)>, on_other: Vec<(u64, u64)>| {
            let memory = Pages([(one, on_one), (other, on_other)]);
            let stacks = StackRanges(vec![one..one + PAGE, other..other + PAGE]);
            let found = stacks.lead_into(&memory, LiveAddr(one + 0x20), &[0x7000..0x8000, CODE]);
            found.inspect(|at| assert_eq!(at.0, 0x5008)).is_some()
        };
        let frame_to_other = || frame(one + 0x100, other + 0x80, 0x1234);
        assert!(!leads(vec![], vec![]));
        assert!(leads(frame(one + 0x100, 0, 0x5008), vec![]));
        assert!(leads(frame_to_other(), frame(other + 0x100, 0, 0x5008)));
        // Words below the stack pointer do not count, nor those of a stack that no signal frame
        // leads to.
        assert!(!leads(frame_to_other(), frame(other + 0x10, 0, 0x5008)));
        assert!(!leads(vec![], frame(other + 0x100, 0, 0x5008)));
        // Frames that lead to each other in a circle.
        assert!(!leads(
            frame_to_other(),
            frame(other + 0x100, one + 0x20, 0)
        ));
        assert!(!leads(frame(one + 0x100, u64::MAX, 0), vec![]));
    }

    #[test]
    fn signal_frames_tell_the_interrupted_counters() {
        let (one, other) = (0x10_0000, 0x20_0000);
        let nested = frame(other + 0x200, one + 0x20, 0x5678);
        let memory = Pages([
            (one, frame(one + 0x100, other + 0x80, 0x1234)),
            (other, nested),
        ]);
        let stacks = StackRanges(vec![one..one + PAGE, other..other + PAGE]);
        let contexts = stacks.contexts(&memory, LiveAddr(one + 0x20));
        // Each after the stack pointer of its frame.
        let expected = [(one + 0x108, 0x1234), (other + 0x208, 0x5678)];
        assert_eq!(
            contexts,
            expected.map(|(at, counter)| (LiveAddr(at), counter))
        );
    }

    /// Stacks of threads as the C library lays them out: each after its guard page.
    const THREADS: u64 = 1000;
    const START: u64 = 0x7f00_0000_0000;
    const LEN: u64 = 8 << 20;

    fn above(stacks: &StackRanges, top: u64) -> Range<u64> {
        stacks.above(top, MAX_SEARCHED)
    }

    fn many_stacks() -> StackRanges {
        let lines = (0..THREADS).map(|thread| {
            let guard = START + thread * (PAGE + LEN);
            let (start, end) = (guard + PAGE, guard + PAGE + LEN);
            format!(
                "{guard:x}-{start:x} ---p 00000000 00:00 0 \n{start:x}-{end:x} rw-p 00000000 00:00 0 \n"
            )
        });
        StackRanges::among(&maps::parse(lines.collect::<String>().as_bytes()))
    }

    /// The highest address of a thread's stack.
    fn end_of(thread: u64) -> u64 {
        START + (thread + 1) * (PAGE + LEN)
    }

    /// Memory that can be read everywhere; counts the bytes read.
    struct Everywhere {
        read: Cell<u64>,
        word: u64,
    }

    impl ReadMemory for Everywhere {
        fn read(&self, _: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            self.read.set(self.read.get() + bytes.len() as u64);
            let words = bytes.chunks_exact_mut(8);
            words.for_each(|word| word.copy_from_slice(&self.word.to_le_bytes()));
            Ok(())
        }
    }

    /// Memory of zeros, but for some words at one place.
    struct FrameFarUp(u64, [u64; 4]);

    impl ReadMemory for FrameFarUp {
        fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            bytes.fill(0);
            let words = (self.0..).step_by(8).zip(self.1);
            for (place, word) in words {
                let index = place.wrapping_sub(at.0) as usize;
                if let Some(bytes) = bytes.get_mut(index..).and_then(|it| it.get_mut(..8)) {
                    bytes.copy_from_slice(&word.to_le_bytes());
                }
            }
            Ok(())
        }
    }

    #[test]
    fn signal_frames_far_up_are_found() {
        let stacks = many_stacks();
        let top = end_of(3) - LEN;
        let far = top + 5 * MAX_SEARCHED;
        let found = |words| stacks.lead_into(&FrameFarUp(far, words), LiveAddr(top), &[CODE]);
        assert_eq!(found([0, 0x5008, 0x246, SEGMENTS]), Some(LiveAddr(0x5008)));
        // What looks like an address of code need not be on a stack there.
        assert_eq!(found([0x5008, 0x1234, 0x246, SEGMENTS]), None);
        assert_eq!(found([0, 0x5008, 0x246, 0]), None);
    }

    // promise: Observations: Of each thread's stack, only the used part is searched (1,000 stacks)
    #[test]
    fn only_the_used_part_of_stacks_is_read() {
        const USED: u64 = 0x1230;
        let stacks = many_stacks();
        let memory = Everywhere {
            read: Cell::new(0),
            word: 0,
        };
        for thread in 0..THREADS {
            let found = stacks.lead_into(&memory, LiveAddr(end_of(thread) - USED), &[CODE]);
            assert_eq!(found, None);
        }
        assert_eq!(memory.read.get(), THREADS * USED);
    }

    #[test]
    fn stack_ends_at_its_guard_or_the_limit() {
        let stacks = many_stacks();
        let end = end_of(3);
        assert_eq!(above(&stacks, end - 0x20), end - 0x20..end);
        assert_eq!(
            above(&stacks, end - LEN),
            end - LEN..end - LEN + MAX_SEARCHED
        );
        // The stack pointer is in the guard page, or below the stack.
        assert_eq!(above(&stacks, end + 8).start, end + PAGE);
        assert_eq!(above(&stacks, START - 16).start, START + PAGE);
        assert!(above(&stacks, START - MAX_SEARCHED).is_empty());
        assert!(above(&stacks, end_of(THREADS)).is_empty());
        assert!(above(&stacks, u64::MAX).is_empty());
    }

    #[test]
    fn stacks_end_at_control_blocks() {
        let at = |offset: u64| LiveAddr(START + offset);
        let maps = format!("{START:x}-{:x} rw-p 00000000 00:00 0 \n", START + LEN);
        let stacks = StackRanges::among(&maps::parse(maps.as_bytes()));
        // Of two threads, of one outside, and of one twice.
        let blocks = [at(0x9000), at(0x5000), at(2 * LEN), at(0x5000)];
        let stacks = stacks.up_to_blocks(blocks);
        assert_eq!(above(&stacks, START + 8), START + 8..START + 0x5000);
        assert_eq!(
            above(&stacks, START + 0x5000),
            START + 0x5000..START + 0x9000
        );
        assert_eq!(
            above(&stacks, START + LEN - 16),
            START + LEN - 16..START + LEN
        );
        assert!(above(&stacks, START + LEN).is_empty());
    }

    #[test]
    fn stack_in_several_mappings_is_whole() {
        let maps = b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [anon: one]\n\
7f0000001000-7f0000002000 rw-p 00000000 00:00 0 \n7f0000002000-7f0000003000 r--p 00000000 00:00 0 \n\
7f0000003000-7f0000004000 rw-p 00000000 00:00 0 \n";
        let stacks = StackRanges::among(&maps::parse(maps));
        let start = 0x7f00_0000_0000;
        assert_eq!(above(&stacks, start), start..start + 0x2000);
        assert_eq!(
            above(&stacks, start + 0x3008),
            start + 0x3008..start + 0x4000
        );
    }
}
