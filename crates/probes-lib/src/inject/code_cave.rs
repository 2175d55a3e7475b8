//! Finds a code cave: unused bytes at the end of a code page, into which injected calls are written.

use std::ops::Range;

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::elf::Segment;
use crate::error::{Error, ObserveError, Result};
use crate::inject::injected_call;
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::objects;

/// How much is looked for, in bytes.
const LEN: u64 = injected_call::MAX_LEN as u64;

/// Memory for the code of injected calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CodeCave {
    pub(crate) at: LiveAddr,
    /// In bytes; at least [`injected_call::MAX_LEN`].
    pub(crate) len: u64,
}

impl CodeCave {
    pub(crate) fn range(&self) -> Range<u64> {
        self.at.0..self.at.plus(self.len).0
    }

    /// Returns how many calls fit: at least two.
    pub(crate) fn most_calls(&self) -> usize {
        injected_call::most_within(self.len as usize)
    }
}

/// Finds the code cave of a process: the end of the last code page of some object.
///
/// # Errors
///
/// [`ObserveError::NoCodeCave`] if there is none.
pub(crate) fn find(
    process: &Process,
    memory: &ProcessMemory,
    maps: &[Mapping],
) -> Result<CodeCave> {
    let pid = process.pid();
    let is_code = |it: &&Mapping| it.executable && !it.shared && it.inode != 0;
    for mapping in maps.iter().filter(is_code) {
        let Some(elf) = objects::elf_of(process, maps, mapping) else {
            continue;
        };
        for segment in elf.loaded().filter(|segment| segment.executable) {
            // A segment is mapped from the start of the page of its file in which it begins.
            if segment.offset & !(PAGE - 1) != mapping.offset {
                continue;
            }
            let start = FileAddr(segment.start.0 & !(PAGE - 1));
            let bias = LoadBias::between(start, mapping.start);
            let Some(unused) = unused_end(&segment) else {
                continue;
            };
            let cave = bias.live(unused);
            let mut bytes = [0; injected_call::MAX_LEN];
            if mapping.contains(cave, LEN)
                && memory.read(cave, &mut bytes).is_ok()
                && injected_call::is_free(&bytes)
            {
                return Ok(CodeCave { at: cave, len: LEN });
            }
        }
    }
    // If the process has exited meanwhile, none of its files could be opened: report that it has exited.
    read_maps(process)?;
    let bytes = injected_call::MAX_LEN;
    Err(Error::of_process(pid, ObserveError::NoCodeCave { bytes }))
}

/// Returns the last bytes of the last page of a segment if the segment ends before them. In a dynamic loader, our loader hook may be in the
/// first bytes after the segment.
fn unused_end(segment: &Segment) -> Option<FileAddr> {
    // More than the file holds: a segment that is also written (`ld -N`) ends with its .bss.
    let len = segment.len.max(segment.file_len);
    let end = segment.start.0.checked_add(len)?;
    let unused = end.checked_next_multiple_of(PAGE)?.checked_sub(LEN)?;
    (unused >= end).then_some(FileAddr(unused))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_cave_is_after_all_of_a_segment() {
        let segment = |start, file_len, len| Segment {
            start: FileAddr(start),
            offset: 0,
            file_len,
            len,
            executable: true,
            writable: false,
        };
        let cave = 0x402000 - LEN;
        for (segment, unused) in [
            (segment(0x401000, 0x800, 0x800), Some(cave)),
            (segment(0x401000, 0x1000 - LEN, 0x1000 - LEN), Some(cave)),
            (segment(0x401000, 0x1001 - LEN, 0x1001 - LEN), None),
            (segment(0x401000, 0x1000, 0x1000), None),
            // Its .bss is in the same page, or reaches into another one.
            (segment(0x401000, 0x800, 0x1001 - LEN), None),
            (segment(0x401000, 0x800, 0x1008), Some(0x403000 - LEN)),
            (segment(u64::MAX - 0x10, 8, 8), None),
            (segment(u64::MAX, 2, 2), None),
        ] {
            assert_eq!(unused_end(&segment), unused.map(FileAddr), "{segment:?}");
        }
    }
}
