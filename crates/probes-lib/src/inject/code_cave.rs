//! Finds a code cave: unused bytes at the end of a code page, into which injected calls are written.

use std::ops::Range;

use crate::address::{FileAddr, LiveAddr, LoadBias, PAGE};
use crate::error::{Error, ObserveError, Result};
use crate::inject::injected_call;
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::objects;

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
            let Some(end) = segment.start.0.checked_add(segment.file_len) else {
                continue;
            };
            // The last bytes of the page: in a dynamic loader, our loader hook may be in the first unused ones.
            let len = injected_call::MAX_LEN as u64;
            let at = end.next_multiple_of(PAGE).wrapping_sub(len);
            let cave = bias.live(FileAddr(at));
            let is_unused = at >= end && mapping.contains(cave, len);
            let mut bytes = [0; injected_call::MAX_LEN];
            if is_unused && memory.read(cave, &mut bytes).is_ok() && injected_call::is_free(&bytes)
            {
                return Ok(CodeCave { at: cave, len });
            }
        }
    }
    // If the process has exited meanwhile, none of its files could be opened: report that it has exited.
    read_maps(process)?;
    let bytes = injected_call::MAX_LEN;
    Err(Error::of_process(pid, ObserveError::NoCodeCave { bytes }))
}
