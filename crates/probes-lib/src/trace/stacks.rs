//! [`StackRanges`] and [`StackSearch`]: whether the stack of a stopped thread holds an address of some code, to which the
//! thread may return.

use std::collections::BTreeMap;
use std::ops::Range;

use memchr::memmem::Finder;

use crate::address::{LiveAddr, PAGE};
use crate::memory::ReadMemory;
use crate::numbers::{u64_at, words};
use crate::process::maps::Mapping;

/// How many bytes of a stack are searched for addresses of code. What is further up may be no stack any more: memory that
/// is mapped right after one.
const MAX_SEARCHED: u64 = 1 << 20;

/// How many bytes of a stack are searched for signal frames.
const MAX_SEARCHED_FOR_FRAMES: u64 = 64 << 20;

/// How many bytes of a stack are read at once.
const READ_AT_ONCE: u64 = 16 * PAGE;

/// Where a stack may be if the maps cannot be read.
const ANYWHERE: Range<u64> = 0..u64::MAX;

/// How many stacks are searched for each thread: more than nested signal handlers use. Those that are left are searched with the
/// next thread.
const MAX_STACKS: usize = 16;

/// In a signal frame, what follows the stack pointer, the program counter and the flags of a
/// 64-bit program: its segments `cs`, `gs`, `fs` and `ss` (struct sigcontext of asm/sigcontext.h).
const SEGMENTS: [u8; 8] = 0x002b_0000_0000_0033_u64.to_le_bytes();

/// How many bytes of a signal frame are before its [`SEGMENTS`]: the stack pointer, the program counter and the flags.
const BEFORE: usize = 24;

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
        // Only words that are at a multiple of their length are looked at.
        (start & !7)..(end & !7)
    }

    /// Begins a search of the stacks of all threads.
    pub(crate) fn search<'s, M: ReadMemory>(&'s self, memory: &'s M) -> StackSearch<'s, M> {
        StackSearch {
            stacks: self,
            memory,
            segments: Finder::new(&SEGMENTS),
            words: Searched::default(),
            frames: Searched::default(),
            tops: Vec::new(),
            buffer: vec![0; BEFORE + READ_AT_ONCE as usize],
        }
    }
}

/// A search of the stacks of a process, thread by thread. Many stacks may be in one mapping, so that each is in what is searched of
/// those below it: what was searched for one thread is not searched again for the next.
pub(crate) struct StackSearch<'s, M> {
    stacks: &'s StackRanges,
    memory: &'s M,
    segments: Finder<'static>,
    /// Where each word was compared with the code that is looked for.
    words: Searched,
    /// Where signal frames were looked for.
    frames: Searched,
    /// The stack pointers of stacks to search.
    tops: Vec<u64>,
    /// What was read last, after the [`BEFORE`] bytes before it.
    buffer: Vec<u8>,
}

/// What is on a stack.
#[derive(Default)]
struct StackContents {
    /// The first word that is an address of the code.
    into_code: Option<u64>,
    frames: Vec<SignalFrame>,
}

/// What a signal has interrupted.
struct SignalFrame {
    stack_pointer: u64,
    /// Where the program counter is on the stack.
    at: LiveAddr,
    counter: u64,
}

impl<M: ReadMemory> StackSearch<'_, M> {
    /// Returns a word on the stack above `top` that is an address of one of these ranges of code; further up, one that a
    /// signal frame returns to: a handler may use more than [`MAX_SEARCHED`]. If that stack
    /// has a signal frame, the stack that the signal has interrupted is searched too: a signal handler
    /// may have a stack of its own (sigaltstack(2)).
    ///
    /// To be called with the same code for each thread, until it returns a word.
    pub(crate) fn lead_into(&mut self, top: LiveAddr, code: &[Range<u64>]) -> Option<LiveAddr> {
        let found = self.find(top, code, |contents| {
            let mut counters = contents.frames.iter().map(|frame| frame.counter);
            let interrupted = || counters.find(|to| is_in(code, *to));
            contents.into_code.or_else(interrupted)
        });
        found.map(LiveAddr)
    }

    /// Returns the program counters in the signal frames on the stack above `top`, and on the stacks that these signals
    /// have interrupted: the address of each, and its value. Those found for another thread are left out.
    pub(crate) fn contexts(&mut self, top: LiveAddr) -> Vec<(LiveAddr, u64)> {
        let mut contexts = Vec::new();
        self.find(top, &[], |contents| {
            let frames = contents.frames.iter();
            contexts.extend(frames.map(|frame| (frame.at, frame.counter)));
            None::<()>
        });
        contexts
    }

    /// Calls `visit` for the stack above `top`, and the stacks that signal frames there lead to, until it returns something.
    fn find<T>(
        &mut self,
        top: LiveAddr,
        code: &[Range<u64>],
        mut visit: impl FnMut(&StackContents) -> Option<T>,
    ) -> Option<T> {
        self.tops.push(top.0);
        let mut stacks_left = MAX_STACKS;
        // What is left then is searched for the next thread.
        while stacks_left > 0 {
            let top = self.tops.pop()?;
            if let Some(contents) = self.search_stack(top, code) {
                stacks_left -= 1;
                self.tops
                    .extend(contents.frames.iter().map(|frame| frame.stack_pointer));
                let found = visit(&contents);
                if found.is_some() {
                    return found;
                }
            }
        }
        None
    }

    /// Searches what was not searched so far of the stack above `top`; returns `None` if that is nothing.
    fn search_stack(&mut self, top: u64, code: &[Range<u64>]) -> Option<StackContents> {
        let whole = self.stacks.above(top, MAX_SEARCHED_FOR_FRAMES);
        let near = self.stacks.above(top, MAX_SEARCHED);
        let near = if code.is_empty() {
            Vec::new()
        } else {
            self.words.gaps(&near)
        };
        if near.is_empty() && self.frames.gaps(&whole).is_empty() {
            return None;
        }
        let mut contents = StackContents::default();
        for part in near {
            let searched = self.search_part(part, code, &mut contents);
            self.frames.add(searched.clone());
            self.words.add(searched);
        }
        for part in self.frames.gaps(&whole) {
            let searched = self.search_part(part, &[], &mut contents);
            self.frames.add(searched);
        }
        Some(contents)
    }

    /// Adds what is in a part of a stack. Returns the part up to where the memory ends.
    fn search_part(
        &mut self,
        part: Range<u64>,
        code: &[Range<u64>],
        contents: &mut StackContents,
    ) -> Range<u64> {
        let mut at = part.start;
        while let Some(len) = self.read_piece(at..part.end) {
            let with_before = &self.buffer[..BEFORE + len];
            let piece = &with_before[BEFORE..];
            if contents.into_code.is_none() && !code.is_empty() {
                contents.into_code = words(piece).find(|to| is_in(code, *to));
            }
            let found = self.segments.find_iter(piece);
            // Each word is at a multiple of its length.
            let frames = found.filter(|index| index % 8 == 0).map(|index| {
                let word = |number: usize| u64_at(with_before, index + 8 * number).unwrap_or(0);
                SignalFrame {
                    stack_pointer: word(0),
                    at: LiveAddr((at + index as u64).wrapping_sub(16)),
                    counter: word(1),
                }
            });
            contents.frames.extend(frames);
            at += len as u64;
        }
        part.start..at
    }

    /// Reads the first piece of a part of a stack, and the [`BEFORE`] bytes before it; returns its length in bytes. `None` if it has
    /// none, or cannot be read.
    ///
    /// What is before a stack pointer is read as well: the rest of a frame in which the stack of another thread begins.
    fn read_piece(&mut self, part: Range<u64>) -> Option<usize> {
        let whole = (part.end - part.start).min(READ_AT_ONCE);
        let page = whole.min(PAGE - part.start % PAGE);
        let before = part.start.min(BEFORE as u64);
        // The memory may begin with the part, and end within it.
        let tries = [(before, whole), (before, page), (0, whole), (0, page)];
        let read = tries.into_iter().find(|&(before, len)| {
            let unread = BEFORE - before as usize;
            self.buffer[..unread].fill(0);
            let bytes = &mut self.buffer[unread..BEFORE + len as usize];
            let from = LiveAddr(part.start - before);
            len > 0 && self.memory.read(from, bytes).is_ok()
        });
        read.map(|(_, len)| len as usize)
    }
}

fn is_in(code: &[Range<u64>], at: u64) -> bool {
    code.iter().any(|code| code.contains(&at))
}

/// Parts of memory with gaps between them: where each begins, and where it ends.
#[derive(Default)]
struct Searched(BTreeMap<u64, u64>);

impl Searched {
    /// Returns the parts of a range that are not among them.
    fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.0.range(..=range.start).next_back();
        let mut at = before.map_or(range.start, |(_, &end)| end.max(range.start));
        let mut gaps = Vec::new();
        if at < range.end {
            for (&start, &end) in self.0.range(at..range.end) {
                gaps.push(at..start);
                at = end;
            }
            gaps.push(at..range.end);
        }
        gaps.retain(|gap| !gap.is_empty());
        gaps
    }

    fn add(&mut self, mut part: Range<u64>) {
        if part.is_empty() {
            return;
        }
        // Those that it touches become one with it.
        while let Some((&start, &end)) = self.0.range(..=part.end).next_back() {
            if end < part.start {
                break;
            }
            self.0.remove(&start);
            part = start.min(part.start)..end.max(part.end);
        }
        self.0.insert(part.start, part.end);
    }
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
    const FRAME_END: u64 = u64::from_le_bytes(SEGMENTS);

    fn frame(at: u64, stack: u64, counter: u64) -> Vec<(u64, u64)> {
        let words = [stack, counter, 0x246, FRAME_END];
        (at..).step_by(8).zip(words).collect()
    }

    #[test]
    fn stack_leads_to_the_trampolines_it_returns_to() {
        let (one, other) = (0x10_0000, 0x20_0000);
        let leads = |on_one: Vec<(u64, u64)>, on_other: Vec<(u64, u64)>| {
            let memory = Pages([(one, on_one), (other, on_other)]);
            let stacks = StackRanges(vec![one..one + PAGE, other..other + PAGE]);
            let code = [0x7000..0x8000, CODE];
            let found = stacks
                .search(&memory)
                .lead_into(LiveAddr(one + 0x20), &code);
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
        let contexts = stacks.search(&memory).contexts(LiveAddr(one + 0x20));
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
        let found = |words| {
            let memory = FrameFarUp(far, words);
            stacks.search(&memory).lead_into(LiveAddr(top), &[CODE])
        };
        assert_eq!(found([0, 0x5008, 0x246, FRAME_END]), Some(LiveAddr(0x5008)));
        // What looks like an address of code need not be on a stack there.
        assert_eq!(found([0x5008, 0x1234, 0x246, FRAME_END]), None);
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
        let mut search = stacks.search(&memory);
        for thread in 0..THREADS {
            let found = search.lead_into(LiveAddr(end_of(thread) - USED), &[CODE]);
            assert_eq!(found, None);
        }
        // And the bytes right before it.
        assert_eq!(memory.read.get(), THREADS * (USED + BEFORE as u64));
    }

    /// The stack pointers of threads whose stacks are in one mapping, each near the next.
    fn tops_in_one_mapping() -> (StackRanges, impl Iterator<Item = LiveAddr>) {
        let tops = (0..THREADS).map(|thread| LiveAddr(START + thread * MAX_SEARCHED / 2));
        let all = START..START + 1000 * LEN;
        (StackRanges(vec![all]), tops)
    }

    // promise: Observations: Memory that many threads have their stacks in is read twice at most (1,000 stacks)
    #[test]
    fn shared_mapping_is_read_twice_at_most() {
        let (stacks, tops) = tops_in_one_mapping();
        let memory = Everywhere {
            read: Cell::new(0),
            word: 0,
        };
        let mut search = stacks.search(&memory);
        for top in tops {
            assert_eq!(search.lead_into(top, &[CODE]), None);
        }
        let used = (THREADS - 1) * MAX_SEARCHED / 2 + MAX_SEARCHED_FOR_FRAMES;
        // Each piece with what is before it.
        let pieces = used / READ_AT_ONCE + THREADS;
        let most = 2 * (used + pieces * BEFORE as u64);
        let read = memory.read.get();
        assert!((used..=most).contains(&read), "{read}");
    }

    #[test]
    fn each_thread_finds_what_is_near() {
        // Not a frame: it counts only on the stack of a thread, but is in what is searched for frames for all those below.
        let (stacks, tops) = tops_in_one_mapping();
        let at = START + 500 * MAX_SEARCHED / 2 - 8;
        let memory = FrameFarUp(at, [0x5008, 0, 0, 0]);
        let mut search = stacks.search(&memory);
        let found: Vec<_> = tops.map(|top| search.lead_into(top, &[CODE])).collect();
        let first = found.iter().position(Option::is_some);
        assert_eq!((first, found[498]), (Some(498), Some(LiveAddr(0x5008))));
    }

    #[test]
    fn frames_at_any_place_are_found() {
        let all = START..START + LEN;
        let stacks = StackRanges(vec![all]);
        let ends = [3 * 8, MAX_SEARCHED, 2 * MAX_SEARCHED + READ_AT_ONCE];
        for at in ends
            .into_iter()
            .flat_map(|end| (end - 24..=end + 8).step_by(8))
        {
            let memory = FrameFarUp(START + at, [0x1234, 0x5008, 0x246, FRAME_END]);
            let mut search = stacks.search(&memory);
            // What is searched for the first ends before the frame, within it, or after it.
            let low = [START + MAX_SEARCHED, START];
            let found = low.map(|top| search.contexts(LiveAddr(top)));
            let expected = [(LiveAddr(START + at + 8), 0x5008)];
            assert_eq!(found.concat(), expected, "{at:#x}");
        }
    }

    #[test]
    fn searched_parts_leave_gaps() {
        let mut searched = Searched::default();
        for part in [0x10..0x20, 0x40..0x50, 0x30..0x38, 0x60..0x60] {
            searched.add(part);
        }
        assert_eq!(searched.gaps(&(0x18..0x48)), [0x20..0x30, 0x38..0x40]);
        let between = 0x50..0x60;
        assert_eq!(searched.gaps(&between), vec![between]);
        assert_eq!(searched.gaps(&(0x12..0x1c)), []);
        searched.add(0x1c..0x40);
        assert_eq!(searched.0, BTreeMap::from([(0x10, 0x50)]));
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
