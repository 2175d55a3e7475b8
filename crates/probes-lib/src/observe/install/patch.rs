//! Writes the patches of points of a stopped process: opcode and displacement together.
//!
//! Patches in adjacent pages are written together, by two writes: one up to the end of the first page, and one of the pages
//! after it. The part in each page is written as a whole or not at all, even if we are killed: the kernel copies as many
//! bytes as a page has at a time (`mem_rw` of fs/proc/base.c), and we may be killed between two of these copies. That
//! is why the second write begins at a page boundary: otherwise its copies would end within pages, perhaps within an
//! instruction. What was written is read back. The parts of a patch between breakpoints of other tools are one write
//! each.
//! The patch of a site across a page boundary is written in steps, and so is one across the boundary of two
//! words if the kernel lets code be written only word by word: the site is disabled first, and while its
//! opcode is `cmp`, its displacement has no effect and can be written in two parts. No patch of an instruction crosses
//! a page boundary, and none is written word by word.

use std::io;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::error::{Effect, Error, MemoryError, MemoryPart, ProcessError, Result};
use crate::memory::{ReadMemory, WriteMemory};
use crate::observe::point::{PATCH_LEN, PatchBytes, crosses};
use crate::site::{CMP, INT3};

/// The bytes of a point that a patch replaces, or that replace it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patch {
    pub(crate) at: LiveAddr,
    pub(crate) before: PatchBytes,
    /// As many bytes as `before`.
    pub(crate) after: PatchBytes,
    /// Whether it may be written in steps, as that of a site.
    pub(crate) may_be_written_in_steps: bool,
    /// Whether another tool's breakpoint is before or after it. That tool may remove the breakpoint at any time, so
    /// the byte of the breakpoint must not be written together with those around it.
    pub(crate) is_beside_breakpoint: bool,
}

impl Patch {
    fn end(&self) -> LiveAddr {
        self.at.plus(self.after.len() as u64)
    }

    fn crosses(&self, block: u64) -> bool {
        crosses(self.at, block)
    }

    /// Returns the parts of it that are not breakpoints now.
    pub(crate) fn around_breakpoints(&self) -> Vec<Patch> {
        let part = |range: Range<usize>| Patch {
            at: self.at.plus(range.start as u64),
            before: PatchBytes::of(&self.before[range.clone()]),
            after: PatchBytes::of(&self.after[range]),
            is_beside_breakpoint: true,
            ..*self
        };
        let mut parts = Vec::new();
        let mut start = 0;
        for bytes in self.before.split(|&byte| byte == INT3) {
            let end = start + bytes.len();
            if start < end {
                parts.push(part(start..end));
            }
            start = end + 1;
        }
        parts
    }

    fn reverse(&self) -> Patch {
        Patch {
            before: self.after,
            after: self.before,
            ..*self
        }
    }
}

/// How many bytes ptrace writes at once.
const WORD: u64 = 8;

/// Writes all patches, or none. `before` is the memory as it is now; or a copy, which is read faster.
///
/// # Errors
///
/// If a point does not hold what it is expected to, or cannot be written. [`Error::effect`] says
/// whether everything was restored.
pub(crate) fn write_all(
    pid: i32,
    memory: &mut impl WriteMemory,
    before: &impl ReadMemory,
    patches: &[Patch],
) -> Result<()> {
    if !holds_before(pid, before, patches)? {
        return Err(Error::of_process(pid, ProcessError::KeepsChanging));
    }
    write_sorted(pid, memory, patches).map_err(|error| {
        let reversed: Vec<Patch> = patches.iter().map(Patch::reverse).collect();
        // Its result is ignored: the points are read again below to see whether they are restored.
        let _ = write_sorted(pid, memory, &reversed);
        error.with_effect_if_none(match holds_before(pid, memory, patches) {
            Ok(true) => Effect::Restored,
            _ => Effect::HalfChanged,
        })
    })
}

/// Returns whether all points hold what they are expected to hold before they are patched.
fn holds_before(pid: i32, memory: &impl ReadMemory, patches: &[Patch]) -> Result<bool> {
    let mut found = [0; PATCH_LEN];
    for patch in patches {
        let found = &mut found[..patch.before.len()];
        let read = memory.read(patch.at, found);
        read.map_err(|source| Error::of_read(pid, MemoryPart::Code, patch.at, source))?;
        if *found != *patch.before {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes patches in the order of their addresses, and reads them back. What is between patches that are written together
/// is read just before: another tool may insert or remove a breakpoint there at any moment.
fn write_sorted(pid: i32, memory: &mut impl WriteMemory, patches: &[Patch]) -> Result<()> {
    let mut sorted: Vec<&Patch> = patches.iter().collect();
    sorted.sort_unstable_by_key(|patch| patch.at);
    let mut buffers = Buffers::default();
    let mut rest = &sorted[..];
    while let Some(first) = rest.first() {
        let (together, others) = rest.split_at(count_together(rest));
        rest = others;
        let end = together.last().map_or(first.end(), |last| last.end());
        let range = first.at..end;
        let written = buffers.build(memory, together, &range).and_then(|()| {
            if first.crosses(PAGE) && first.may_be_written_in_steps {
                write_in_steps(memory, first)
            } else {
                write_together(memory, together, range.start, &buffers.written)
            }
        });
        written.map_err(|source| Error::of_write(pid, MemoryPart::Code, first.at, source))?;
        let is_as_written = buffers.are_in(memory, &range);
        let is_as_written = is_as_written
            .map_err(|source| Error::of_read(pid, MemoryPart::Code, first.at, source))?;
        if !is_as_written {
            let not_held = MemoryError::NotAsWritten {
                part: MemoryPart::Code,
                address: first.at,
            };
            return Err(Error::of_process(pid, not_held));
        }
    }
    Ok(())
}

/// Returns how many of the first patches are written together ([`write_together`]): those in adjacent pages. No page
/// between them is without a patch: it would be copied for nothing.
fn count_together(patches: &[&Patch]) -> usize {
    let Some(first) = patches.first() else {
        return 0;
    };
    let page = |patch: &Patch| patch.at.0 / PAGE;
    let is_adjacent = |pair: &&[&Patch]| {
        let [one, other] = **pair else {
            return false;
        };
        let is_alone = |patch: &Patch| patch.crosses(PAGE) || patch.is_beside_breakpoint;
        let is_near = page(other) - page(first) < MAX_PAGES || page(other) == page(one);
        !is_alone(one) && !is_alone(other) && is_near && page(other) - page(one) <= 1
    };
    1 + patches.windows(2).take_while(is_adjacent).count()
}

/// How many pages are written together, at most. More need larger buffers, and save no time.
const MAX_PAGES: u64 = 64;

/// What is written, and what is read back.
#[derive(Default)]
struct Buffers {
    written: Vec<u8>,
    found: Vec<u8>,
}

impl Buffers {
    /// Prepares what is written: the bytes of `range` with these patches.
    fn build(
        &mut self,
        memory: &impl ReadMemory,
        patches: &[&Patch],
        range: &Range<LiveAddr>,
    ) -> io::Result<()> {
        self.written
            .resize((range.end.0 - range.start.0) as usize, 0);
        memory.read(range.start, &mut self.written)?;
        for patch in patches {
            let at = (patch.at.0 - range.start.0) as usize;
            self.written[at..at + patch.after.len()].copy_from_slice(&patch.after);
        }
        Ok(())
    }

    /// Returns whether memory holds what was written.
    fn are_in(&mut self, memory: &impl ReadMemory, range: &Range<LiveAddr>) -> io::Result<bool> {
        self.found.resize(self.written.len(), 0);
        memory.read(range.start, &mut self.found)?;
        Ok(self.found == self.written)
    }
}

/// Writes the patches of adjacent pages, page by page if the kernel allows it. `written` are the bytes from `start` on
/// with these patches.
fn write_together(
    memory: &mut impl WriteMemory,
    patches: &[&Patch],
    start: LiveAddr,
    written: &[u8],
) -> io::Result<()> {
    let first_page = ((PAGE - start.0 % PAGE) as usize).min(written.len());
    let (first, others) = written.split_at(first_page);
    if memory.write_pages(start, first)? {
        let others_at = start.plus(first_page as u64);
        if others.is_empty() || memory.write_pages(others_at, others)? {
            return Ok(());
        }
    }
    if !patches.iter().all(|patch| patch.may_be_written_in_steps) {
        let why = "this kernel lets code be written only word by word, so that jumps cannot be written as a whole";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    for patch in patches {
        if patch.crosses(WORD) {
            write_in_steps(memory, patch)?;
        } else {
            memory.write_code(patch.at, &patch.after)?;
        }
    }
    Ok(())
}

fn write_in_steps(memory: &mut impl WriteMemory, patch: &Patch) -> io::Result<()> {
    memory.write_code(patch.at, &[CMP])?;
    memory.write_code(patch.at.plus(1), &patch.after[1..])?;
    memory.write_code(patch.at, &patch.after[..1])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::CounterFault;
    use crate::memory::double::{SliceMemory, WriteFault};
    use crate::observe::install::installed::read_each;
    use crate::site::CALL;

    const START: u64 = 0x10000;
    const PAGES: u64 = 4;

    /// Memory that splits writes as the kernel does, into parts each of which is made as a whole or
    /// not at all, and keeps a copy of itself after each part.
    struct Steps {
        memory: SliceMemory,
        is_by_words: bool,
        seen: Vec<SliceMemory>,
    }

    impl Steps {
        /// Writes as the kernel does: word by word, or in copies of as many bytes as a page has, of which the part
        /// within one page is written at once.
        fn write(&mut self, at: LiveAddr, bytes: &[u8]) {
            let block = if self.is_by_words { WORD } else { PAGE };
            let mut rest = (at, bytes);
            while !rest.1.is_empty() {
                let to_border = block - rest.0.0 % block;
                let to_next_copy = PAGE - (rest.0.0 - at.0) % PAGE;
                let room = to_border.min(to_next_copy) as usize;
                let (now, later) = rest.1.split_at(room.min(rest.1.len()));
                self.memory.poke(rest.0, now);
                self.seen.push(self.memory.clone());
                rest = (rest.0.plus(now.len() as u64), later);
            }
        }
    }

    impl ReadMemory for Steps {
        fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
            self.memory.read(at, bytes)
        }
    }

    impl WriteMemory for Steps {
        fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
            self.write(at, bytes);
            Ok(())
        }

        fn write_pages(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
            if !self.is_by_words {
                self.write(at, bytes);
            }
            Ok(!self.is_by_words)
        }

        fn write_counters(&mut self, _: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
            unreachable!("these are no counters")
        }
    }

    fn patch(at: u64, before: &[u8], after: &[u8]) -> Patch {
        Patch {
            at: LiveAddr(at),
            before: PatchBytes::of(before),
            after: PatchBytes::of(after),
            may_be_written_in_steps: false,
            is_beside_breakpoint: false,
        }
    }

    /// Returns the patch of a site that has this opcode.
    fn site_patch(at: u64, opcode: u8) -> Patch {
        Patch {
            may_be_written_in_steps: true,
            ..patch(at, &[opcode, 1, 2, 3, 4], &[CALL, 0x11, 0x12, 0x13, 0x14])
        }
    }

    /// Returns whether these bytes can be executed, and be restored by a tool that finds them.
    fn is_safe(patch: &Patch, found: [u8; PATCH_LEN]) -> bool {
        let mut both = patch.before.iter().zip(patch.after.iter()).zip(found);
        let is_mixed = both.all(|((&one, &other), it)| it == CMP || it == one || it == other);
        found == *patch.before || found == *patch.after || (found[0] == CMP && is_mixed)
    }

    /// Patches sites, and checks all of them after each write.
    fn check(sites: &[u64], enabled: bool, is_by_words: bool) -> Steps {
        let opcode = if enabled { CALL } else { CMP };
        let patches = sites.iter().map(|site| site_patch(site + 1, opcode));
        let patches: Vec<Patch> = patches.collect();
        let mut bytes = vec![0x90; (PAGES * PAGE) as usize];
        for patch in &patches {
            let at = (patch.at.0 - START) as usize;
            bytes[at..at + PATCH_LEN].copy_from_slice(&patch.before);
        }
        let mut steps = Steps {
            memory: SliceMemory::new([(START, bytes)]),
            is_by_words,
            seen: Vec::new(),
        };
        let before = steps.memory.clone();
        write_all(1, &mut steps, &before, &patches).unwrap();
        let places: Vec<LiveAddr> = patches.iter().map(|patch| patch.at).collect();
        for memory in &steps.seen {
            let found = read_each(1, memory, &places).unwrap();
            for (patch, found) in patches.iter().zip(found) {
                assert!(is_safe(patch, found), "{patch:x?}: {found:x?}");
            }
        }
        steps
    }

    /// Patches one site in each of two pages that do not follow each other, in memory where the writes with the numbers
    /// `writes` go wrong; returns the error's effect, and whether the memory is as it was.
    fn effect_of(writes: Range<usize>, fault: WriteFault) -> (Effect, bool) {
        let patches = [START, START + 2 * PAGE].map(|at| site_patch(at, CMP));
        let mut before = SliceMemory::new([(START, vec![0x90; 3 * PAGE as usize])]);
        for patch in &patches {
            before.poke(patch.at, &patch.before);
        }
        let mut memory = before.failing(writes, fault);
        let error = write_all(1, &mut memory, &before, &patches).unwrap_err();
        (error.effect(), memory == before)
    }

    #[test]
    fn failed_write_is_undone_or_reported() {
        for fault in [WriteFault::Refused, WriteFault::Dropped] {
            // Only the second write fails, or the writes that restore the sites fail as well.
            assert_eq!(effect_of(1..2, fault), (Effect::Restored, true));
            assert_eq!(effect_of(1..4, fault), (Effect::HalfChanged, false));
        }
        assert_eq!(effect_of(0..2, WriteFault::Torn), (Effect::Restored, true));
        assert_eq!(
            effect_of(1..2, WriteFault::Corrupted),
            (Effect::Restored, true)
        );
    }

    #[test]
    fn unexpected_bytes_are_not_overwritten() {
        let memory = SliceMemory::new([(START, vec![0x90; 5])]);
        let patch = site_patch(START, CMP);
        let mut found = memory.clone();
        let error = write_all(1, &mut found, &memory, &[patch]).unwrap_err();
        assert_eq!((error.effect(), found.writes), (Effect::Unspecified, 0));
        assert_eq!(found, memory);
    }

    #[test]
    fn breakpoints_are_not_written_over() {
        for (before, after) in [
            ([INT3, 0x12, 0x13, 0x14, 0x15], [INT3, 2, 3, 4, 5]),
            ([0xe9, 0x12, INT3, 0x14, INT3], [1, 2, INT3, 4, INT3]),
            ([0xe9, 0x12, 0x13, INT3, INT3], [1, 2, 3, INT3, INT3]),
        ] {
            let mut memory = SliceMemory::new([(START, before.to_vec())]);
            let seen = memory.clone();
            let parts = patch(START, &before, &[1, 2, 3, 4, 5]).around_breakpoints();
            assert_eq!(count_together(&parts.iter().collect::<Vec<_>>()), 1);
            write_all(1, &mut memory, &seen, &parts).unwrap();
            assert_eq!(read_each(1, &memory, &[LiveAddr(START)]).unwrap(), [after]);
        }
    }

    // promise: Observations: A site across two pages is written in steps that are safe, whatever is
    //    before and after it (42 layouts)
    #[test]
    fn site_across_two_pages_is_written_in_steps() {
        // Each is 6 bytes long; the patches of the third and the fourth cross a page boundary.
        let sites = [0x10100, 0x10f00, 0x10ffd, 0x11ffe, 0x12100, 0x12200];
        for from in 0..sites.len() {
            for to in from + 1..=sites.len() {
                for enabled in [false, true] {
                    check(&sites[from..to], enabled, false);
                }
            }
        }
        // The first two sites by one write; the third in three steps, the second of which takes two
        // writes; the fourth in three steps of one write each; the last two by one write.
        assert_eq!(check(&sites, true, false).seen.len(), 1 + 4 + 3 + 1);
    }

    // promise: Observations: No site is torn where the kernel writes code one word at a time (16
    //    layouts)
    #[test]
    fn word_sized_writes_tear_no_site() {
        for at in 0..WORD {
            for enabled in [false, true] {
                let steps = check(&[START + at], enabled, true);
                // The patch lies in one word and is one write, or it is written in steps while the
                // site is disabled.
                assert_eq!(steps.seen.len() > 1, (3..7).contains(&at), "{at}");
            }
        }
    }

    // promise: Functions: A tool killed while it writes the patches of several pages leaves each instruction as it was, or
    //    patched (10 layouts)
    #[test]
    fn kill_between_copies_tears_no_instruction() {
        let patch = |at| patch(at, &[1, 2, 3, 4, 5], &[0xe9, 0x12, 0x13, 0x14, 0x15]);
        for first in [START, START + 0x100] {
            // The patches begin this many bytes before the ends of copies, if all pages were one write.
            for before in 0..PATCH_LEN as u64 {
                let mut patches = vec![patch(first)];
                patches.extend((1..PAGES - 1).map(|page| patch(first + page * PAGE - before)));
                patches.retain(|patch| !patch.crosses(PAGE));
                patches.push(patch(START + (PAGES - 1) * PAGE));
                let mut memory = SliceMemory::new([(START, vec![0x90; (PAGES * PAGE) as usize])]);
                for patch in &patches {
                    memory.poke(patch.at, &patch.before);
                }
                let before = memory.clone();
                let mut steps = Steps {
                    memory,
                    is_by_words: false,
                    seen: Vec::new(),
                };
                write_all(1, &mut steps, &before, &patches).unwrap();
                assert!(steps.seen.len() > 1);
                let places: Vec<LiveAddr> = patches.iter().map(|patch| patch.at).collect();
                for memory in &steps.seen {
                    let found: Vec<[u8; PATCH_LEN]> = read_each(1, memory, &places).unwrap();
                    for (patch, found) in patches.iter().zip(found) {
                        let is_whole = found == *patch.before || found == *patch.after;
                        assert!(is_whole, "{patch:x?}: {found:x?}");
                    }
                }
            }
        }
    }

    proptest! {
        // promise: Observations: A tool killed after any write to a site leaves a site that can be
        //    executed and restored (256 layouts)
        #[test]
        fn kill_after_any_write_leaves_executable_sites(
            gaps in prop::collection::vec((0..40_u64, 0..3_usize), 1..60),
            enabled: bool,
            is_by_words: bool,
        ) {
            let mut sites = Vec::new();
            let mut next = START;
            for (gap, scale) in gaps {
                next += gap * [1, 7, 101][scale];
                if next + 6 <= START + PAGES * PAGE {
                    sites.push(next);
                }
                next += 6;
            }
            if !sites.is_empty() {
                check(&sites, enabled, is_by_words);
            }
        }
    }

    #[test]
    fn patches_in_adjacent_pages_are_written_together() {
        let patch = |at| site_patch(START + at, CMP);
        let together = |patches: Vec<Patch>| count_together(&patches.iter().collect::<Vec<_>>());
        let of = |places: &[u64]| together(places.iter().map(|at| patch(*at)).collect());
        assert_eq!((of(&[]), of(&[0]), of(&[0, 8, 16])), (0, 1, 3));
        assert_eq!(of(&[PAGE - 8, PAGE, 2 * PAGE]), 3);
        // A page between them, and one that crosses a page boundary.
        assert_eq!(of(&[0, 8, 2 * PAGE]), 2);
        assert_eq!(of(&[0, PAGE - 2, PAGE + 8]), 1);
        assert_eq!(of(&[PAGE - 2, PAGE + 8]), 1);
        // At most MAX_PAGES pages, with all patches of the last.
        let pages: Vec<u64> = (0..MAX_PAGES + 2).map(|page| page * PAGE).collect();
        assert_eq!(of(&pages) as u64, MAX_PAGES);
        let mut more = pages[..MAX_PAGES as usize].to_vec();
        more.extend([(MAX_PAGES - 1) * PAGE + 8, MAX_PAGES * PAGE]);
        assert_eq!(of(&more) as u64, MAX_PAGES + 1);
        let beside = Patch {
            is_beside_breakpoint: true,
            ..patch(8)
        };
        assert_eq!(together(vec![patch(0), beside, patch(16)]), 1);
    }

    #[test]
    fn reversed_patches_expect_what_was_written() {
        let reversed = patch(START, &[1, 2], &[3, 4]).reverse();
        assert_eq!(
            (&reversed.before[..], &reversed.after[..]),
            (&[3, 4][..], &[1, 2][..])
        );
    }
}
