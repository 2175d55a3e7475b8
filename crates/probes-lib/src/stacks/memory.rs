//! What is read of a process to find the rest of a stack that was copied: its code only, or only so many words.

use std::ops::Range;

use crate::process::memory::ProcessMemory;
use crate::unwind::Unwinder;
use crate::unwind::memory::{CachedPages, StackMemory};

/// How many words are read, at most, to complete a stack that was copied: those of about 1,000 frames.
const MAX_READS: u32 = 1 << 12;

/// The memory of a process, of which only code can be read.
pub(super) struct OnlyCode<'m> {
    ranges: Vec<Range<u64>>,
    pages: CachedPages<'m, ProcessMemory>,
}

impl<'m> OnlyCode<'m> {
    pub(super) fn of(unwinder: &Unwinder, memory: &'m ProcessMemory) -> OnlyCode<'m> {
        OnlyCode {
            ranges: unwinder.code().collect(),
            pages: CachedPages::new(memory),
        }
    }
}

impl StackMemory for OnlyCode<'_> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let end = at.checked_add(bytes.len() as u64)?;
        let mut ranges = self.ranges.iter();
        let is_code = ranges.any(|range| range.start <= at && end <= range.end);
        is_code.then(|| self.pages.read(at, bytes))?
    }
}

/// Memory of which only so much is read.
pub(super) struct LimitedMemory<M> {
    memory: M,
    /// How often it may still be read.
    left: u32,
}

impl<M> LimitedMemory<M> {
    pub(super) fn of(memory: M) -> LimitedMemory<M> {
        LimitedMemory {
            memory,
            left: MAX_READS,
        }
    }
}

impl<M: StackMemory> StackMemory for LimitedMemory<M> {
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        self.left = self.left.checked_sub(1)?;
        self.memory.read(at, bytes)
    }
}
