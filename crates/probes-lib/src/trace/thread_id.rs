//! Finds where threads keep their ids in their control blocks, whose layout only the C library knows:
//! by searching the blocks for the ids.

use crate::address::LiveAddr;
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::trace::stopped::Stopped;

/// How much of a control block is searched, in bytes: glibc's and musl's are not much larger.
const BLOCK: usize = 2048;

/// The offsets that glibc and musl have used for years.
const USUAL: [u32; 2] = [0x2d0, 0x30];

/// How many threads' blocks are compared.
const SAMPLE: usize = 64;

impl Stopped<'_> {
    /// Returns the offset from `fs` of a thread's id in its own pid namespace, if it is stored there.
    pub(crate) fn tid_offset(&self, process: &Process, memory: &impl ReadMemory) -> Option<u32> {
        let mut common: Option<Vec<u32>> = None;
        for tid in self.tids().take(SAMPLE) {
            let registers = self.calls().registers(tid);
            let block = registers.map_or(0, |registers| registers.fs_base);
            let mut bytes = [0; BLOCK];
            // A thread that has just started has no block.
            if block == 0 || memory.read(LiveAddr(block), &mut bytes).is_err() {
                continue;
            }
            let own = process.thread_status(tid).ok()?.innermost;
            let places = places(&bytes, own);
            common = Some(match common {
                None => places,
                Some(common) => common
                    .into_iter()
                    .filter(|at| places.contains(at))
                    .collect(),
            });
        }
        choose(&common?)
    }
}

fn places(block: &[u8], tid: i32) -> Vec<u32> {
    let words = block.chunks_exact(4).zip((0..).step_by(4));
    let is_it = |(word, _): &(&[u8], u32)| *word == tid.to_le_bytes();
    words.filter(is_it).map(|(_, at)| at).collect()
}

fn choose(places: &[u32]) -> Option<u32> {
    let mut usual = USUAL.iter().filter(|at| places.contains(at));
    match (usual.next(), places) {
        (Some(at), _) => Some(*at),
        (None, [only]) => Some(*only),
        // All but one are there by chance, and it is unknown which.
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_offset_is_preferred_and_ambiguity_gives_none() {
        let with = |offsets: &[usize]| {
            let mut block = [0; BLOCK];
            for &at in offsets {
                block[at..at + 4].copy_from_slice(&77_i32.to_le_bytes());
            }
            places(&block, 77)
        };
        assert_eq!(choose(&with(&[0x100])), Some(0x100));
        assert_eq!(choose(&with(&[0x100, 0x104])), None);
        assert_eq!(choose(&with(&[0x100, 0x2d0])), Some(0x2d0));
        assert_eq!(choose(&with(&[])), None);
    }
}
