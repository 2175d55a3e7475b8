//! [`Shadowed`]: the memory of a process as it would be if it were not observed, so that code which
//! reads and switches probes need not know of observations.
//!
//! ```text
//!                      in memory              shown
//! site, tail is ret    nop; call trampoline   nop; cmp wrapper
//! site, tail is jmp    nop; call trampoline   nop; call wrapper
//! ```
//!
//! The tail is the last instruction of the site's trampoline: `ret` if the site is disabled,
//! `jmp wrapper` if it is enabled.

use std::io;
use std::sync::Arc;

use super::{CounterFault, ReadMemory, WriteMemory};
use crate::address::LiveAddr;
use crate::site::{CALL, CMP, JMP, OPCODE_OFFSET, RET, SITE_LEN};

/// A site that may be observed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShadowedSite {
    /// The address of its nop.
    pub(crate) site: LiveAddr,
    /// The operand of the site's call to the trampoline. If the site has another operand, this
    /// trampoline does not observe it.
    pub(crate) trampoline_operand: [u8; 4],
    /// The operand of the site when it is not observed.
    pub(crate) unobserved_operand: [u8; 4],
    /// The address of the trampoline's tail: the byte there is [`RET`] if the site is disabled,
    /// [`JMP`] if it is enabled.
    pub(crate) tail: LiveAddr,
}

/// The sites of a process that may be observed.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    /// Sorted by address. A site has several entries if an earlier observation has left its memory
    /// mapped; the entry whose trampoline the site calls is the valid one.
    sites: Vec<ShadowedSite>,
}

/// What to write so that the wanted bytes are shown.
#[derive(Debug, PartialEq, Eq)]
struct ShadowedWrite {
    /// The bytes to write at the wanted address, if any of them differs from what is there.
    bytes: Option<Vec<u8>>,
    /// The tails to write, each with its byte.
    tails: Vec<(LiveAddr, u8)>,
}

impl Shadow {
    /// Returns the shadow of these sites, in any order.
    pub(crate) fn of(mut sites: Vec<ShadowedSite>) -> Shadow {
        sites.sort_by_key(|shadowed| shadowed.site);
        Shadow { sites }
    }

    /// The sites of which at least a part lies in `len` bytes at `at`.
    fn overlapping(&self, at: LiveAddr, len: usize) -> impl Iterator<Item = &ShadowedSite> {
        let first = LiveAddr(at.0.saturating_sub(SITE_LEN as u64 - 1));
        let end = LiveAddr(at.0.saturating_add(len as u64));
        let first = self.sites.partition_point(|it| it.site < first);
        let sites = self.sites[first..].iter();
        sites.take_while(move |it| it.site < end)
    }

    /// Replaces observed sites in `bytes`, which were read from `memory` at `at`, by what is to be
    /// shown of them.
    fn show(&self, at: LiveAddr, bytes: &mut [u8], memory: &impl ReadMemory) -> io::Result<()> {
        for shadowed in self.overlapping(at, bytes.len()) {
            let Some(shown) = shadowed.shown(memory)? else {
                continue;
            };
            for (address, byte) in (shadowed.site.0..).zip(shown) {
                // If the address is below `at`, the index wraps around and is out of range as well.
                let index = address.wrapping_sub(at.0) as usize;
                if let Some(place) = bytes.get_mut(index) {
                    *place = byte;
                }
            }
        }
        Ok(())
    }

    /// Returns what to write so that `bytes` are shown at `at`. Of an observed site, only the opcode can be
    /// changed, to that of `cmp` or `call`: everything else in it stays as it is, and so is shown unchanged.
    fn plan_write(
        &self,
        at: LiveAddr,
        bytes: &[u8],
        memory: &impl ReadMemory,
    ) -> io::Result<ShadowedWrite> {
        let mut real = vec![0; bytes.len()];
        memory.read(at, &mut real)?;
        let mut wanted = bytes.to_vec();
        let mut tails = Vec::new();
        for shadowed in self.overlapping(at, bytes.len()) {
            if shadowed.shown(memory)?.is_none() {
                // It is not observed any more, or calls the trampoline of another observation.
                continue;
            }
            for offset in 0..SITE_LEN as u64 {
                let address = shadowed.site.plus(offset);
                let index = address.0.wrapping_sub(at.0) as usize;
                let Some(byte) = wanted.get_mut(index) else {
                    continue;
                };
                if offset == OPCODE_OFFSET {
                    match *byte {
                        CMP => tails.push((shadowed.tail, RET)),
                        CALL => tails.push((shadowed.tail, JMP)),
                        _ => {}
                    }
                }
                *byte = real[index];
            }
        }
        Ok(ShadowedWrite {
            bytes: (wanted != real).then_some(wanted),
            tails,
        })
    }
}

impl ShadowedSite {
    /// Returns what to show of the site; `None` if it does not call this trampoline, or if the
    /// trampoline's tail holds an unexpected byte.
    fn shown(&self, memory: &impl ReadMemory) -> io::Result<Option<[u8; SITE_LEN]>> {
        let mut tail = [0];
        let read = memory.read(self.tail, &mut tail);
        // Read after the tail: if the tail was already unmapped, the site no longer calls the trampoline.
        let mut real = [0; SITE_LEN];
        memory.read(self.site, &mut real)?;
        let [nop, CALL, call @ ..] = real else {
            return Ok(None);
        };
        if call != self.trampoline_operand {
            return Ok(None);
        }
        read?;
        let opcode = match tail[0] {
            RET => CMP,
            JMP => CALL,
            _ => return Ok(None),
        };
        let [a, b, c, d] = self.unobserved_operand;
        Ok(Some([nop, opcode, a, b, c, d]))
    }
}

/// Memory whose observed sites are read and written as if they were not observed.
#[derive(Debug)]
pub(crate) struct Shadowed<M> {
    memory: M,
    shadow: Arc<Shadow>,
}

impl<M> Shadowed<M> {
    /// Returns `memory` with `shadow` over it.
    pub(crate) fn new(memory: M, shadow: Shadow) -> Shadowed<M> {
        let shadow = Arc::new(shadow);
        Shadowed { memory, shadow }
    }

    /// Returns `memory`, which is another way to access the same process memory, with the same
    /// shadow over it.
    pub(crate) fn over<N>(&self, memory: N) -> Shadowed<N> {
        let shadow = self.shadow.clone();
        Shadowed { memory, shadow }
    }

    /// Returns the memory without the shadow.
    pub(crate) fn bare(&self) -> &M {
        &self.memory
    }

    /// Returns whether an address lies in a site that may be observed.
    pub(crate) fn covers(&self, at: LiveAddr) -> bool {
        self.shadow.overlapping(at, 1).next().is_some()
    }
}

impl<M: ReadMemory> ReadMemory for Shadowed<M> {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read(at, bytes)?;
        self.shadow.show(at, bytes, &self.memory)
    }
}

impl<M: WriteMemory> Shadowed<M> {
    /// Writes so that `bytes` are shown at `at`: first the bytes at `at`, then the tails. Stops at
    /// the first `write` that returns false, and returns false.
    fn write_shown(
        &mut self,
        at: LiveAddr,
        bytes: &[u8],
        write: impl Fn(&mut M, LiveAddr, &[u8]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        if self.shadow.sites.is_empty() {
            return write(&mut self.memory, at, bytes);
        }
        let planned = self.shadow.plan_write(at, bytes, &self.memory)?;
        if let Some(bytes) = planned.bytes {
            if !write(&mut self.memory, at, &bytes)? {
                return Ok(false);
            }
        }
        for (tail, byte) in planned.tails {
            if !write(&mut self.memory, tail, &[byte])? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl<M: WriteMemory> WriteMemory for Shadowed<M> {
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        let write = |memory: &mut M, at, bytes: &[u8]| memory.write_code(at, bytes).map(|()| true);
        self.write_shown(at, bytes, write).map(drop)
    }

    fn write_pages(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
        self.write_shown(at, bytes, M::write_pages)
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        self.memory.write_counters(writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::double::SliceMemory;

    const SITE: LiveAddr = LiveAddr(0x1002);
    const TAIL: LiveAddr = LiveAddr(0x8000);
    const OPERAND: [u8; 4] = [1, 2, 3, 4];
    const TRAMPOLINE: [u8; 4] = [5, 6, 7, 8];

    /// A site between two bytes on each side, and its trampoline's tail.
    fn observed(tail: u8) -> Shadowed<SliceMemory> {
        let memory = SliceMemory::new([
            (0x1000, vec![9, 9, 0x90, CALL, 5, 6, 7, 8, 9, 9]),
            (TAIL.0, vec![tail]),
        ]);
        let entry = |trampoline_operand| ShadowedSite {
            site: SITE,
            trampoline_operand,
            unobserved_operand: OPERAND,
            tail: TAIL,
        };
        // The first entry is one that an earlier observation has left: its trampoline is not
        // called.
        Shadowed::new(memory, Shadow::of(vec![entry([0; 4]), entry(TRAMPOLINE)]))
    }

    fn shown<const N: usize>(memory: &impl ReadMemory, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        memory.read(LiveAddr(at), &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn observed_site_is_shown_as_its_tail_says() {
        for (tail, opcode) in [(RET, CMP), (JMP, CALL)] {
            let memory = observed(tail);
            let whole = [9, 9, 0x90, opcode, 1, 2, 3, 4, 9, 9];
            assert_eq!(shown(&memory, 0x1000), whole);
            for at in 0..9 {
                let two = [whole[at], whole[at + 1]];
                assert_eq!(shown(&memory, 0x1000 + at as u64), two, "{at}");
            }
        }
        let other = observed(0xcc);
        assert_eq!(shown(&other, 0x1000), shown::<10>(other.bare(), 0x1000));
        let mut removed = observed(RET);
        removed.memory.poke(SITE.plus(2), &[0]);
        assert_eq!(shown(&removed, SITE.0), [0x90, CALL, 0, 6, 7, 8]);
    }

    #[test]
    fn unmapped_trampoline_matters_only_if_called() {
        let site = |code: [u8; SITE_LEN]| {
            let memory = SliceMemory::new([(SITE.0, code.to_vec())]);
            observed(RET).over(memory)
        };
        let [a, b, c, d] = OPERAND;
        let removed = [0x90, CMP, a, b, c, d];
        assert_eq!(shown(&site(removed), SITE.0), removed);
        let [a, b, c, d] = TRAMPOLINE;
        let called = site([0x90, CALL, a, b, c, d]);
        assert!(called.read(SITE, &mut [0; SITE_LEN]).is_err());
    }

    #[test]
    fn writing_an_observed_opcode_switches_its_tail() {
        for (opcode, tail) in [(CMP, RET), (CALL, JMP)] {
            let mut memory = observed(RET);
            let before = memory.bare().clone();
            memory.write_code(SITE.plus(1), &[opcode]).unwrap();
            assert_eq!(memory.bare().byte(TAIL), tail);
            assert_eq!(shown(&memory, SITE.plus(1).0), [opcode]);
            assert_eq!(memory.bare().writes, 1);
            assert_eq!(shown(memory.bare(), 0x1000), shown::<10>(&before, 0x1000));
        }
    }

    #[test]
    fn bytes_beside_an_observed_site_are_written() {
        let mut memory = observed(RET);
        let bytes = [0, 0, 0x90, CALL, 1, 2, 3, 4, 0, 0];
        assert!(memory.write_pages(LiveAddr(0x1000), &bytes).unwrap());
        assert_eq!(shown(&memory, 0x1000), bytes);
        let real = [0, 0, 0x90, CALL, 5, 6, 7, 8, 0, 0];
        assert_eq!(shown(memory.bare(), 0x1000), real);
        assert_eq!(memory.bare().byte(TAIL), JMP);
    }

    #[test]
    fn counters_are_written_as_they_are() {
        let counter = LiveAddr(0x9000);
        let mut memory = observed(RET).over(SliceMemory::new([(counter.0, vec![0; 2])]));
        memory.write_counters(&[(counter, 0x0102)]).unwrap();
        assert_eq!(shown(&memory, counter.0), [2, 1]);
    }

    #[test]
    fn site_covers_its_six_bytes_only() {
        let memory = observed(RET);
        let covered = |offset: u64| memory.covers(LiveAddr(0x1000 + offset));
        let covered: Vec<u64> = (0..10).filter(|&offset| covered(offset)).collect();
        assert_eq!(covered, [2, 3, 4, 5, 6, 7]);
    }
}
