//! [`Shadow`]: shows the sites of an observed process as they would be if it were not observed. So
//! that everybody else, who looks at probes and switches them, need not know.
//!
//! ```text
//!              in memory                      as it is watched
//! site         nop; call trampoline                 nop; cmp or call wrapper
//! trampoline's tail  ret, or jmp wrapper            (which of the two)
//! ```

use std::io;

use crate::address::LiveAddr;
use crate::observe::layout::arena::Arena;
use crate::observe::trampoline;
use crate::site::{CALL, CMP, OPCODE_OFFSET, SITE_LEN};

/// What an observed site is in memory.
#[derive(Clone, Copy, Debug)]
struct ShadowedSite {
    /// The displacement of its trampoline.
    call: [u8; 4],
    /// The displacement of its wrapper.
    operand: [u8; 4],
    tail: LiveAddr,
}

/// The sites that are observed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shadow {
    /// By address. There are several of a site if an observation that is over has left its memory: the
    /// one that the site calls is the one that counts.
    sites: Vec<(LiveAddr, ShadowedSite)>,
    /// How many really are.
    observed: usize,
}

/// What has to be written, so that it is watched as was wanted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ShadowedWrite {
    /// The bytes to be written where it was wanted, if any of them differ.
    pub(crate) bytes: Option<Vec<u8>>,
    /// Tails, and what becomes of them.
    pub(crate) tails: Vec<(LiveAddr, u8)>,
}

impl Shadow {
    /// The shadow over what these observe: so many sites just now.
    pub(crate) fn over(arenas: &[Arena], observed: usize) -> Shadow {
        let mut sites = Vec::new();
        for arena in arenas {
            sites.extend(arena.entries.iter().enumerate().map(|(index, entry)| {
                let shadowed = ShadowedSite {
                    call: arena.call(index),
                    operand: entry.operand,
                    tail: arena.tail(index),
                };
                (entry.site, shadowed)
            }));
        }
        sites.sort_by_key(|(site, _)| *site);
        Shadow { sites, observed }
    }

    /// How many sites are observed.
    pub(crate) fn len(&self) -> usize {
        self.observed
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    /// The sites that lie in `len` bytes at `at`, at least in part.
    fn within(&self, at: LiveAddr, len: usize) -> impl Iterator<Item = (LiveAddr, &ShadowedSite)> {
        let first = LiveAddr(at.0.saturating_sub(SITE_LEN as u64 - 1));
        let end = LiveAddr(at.0.saturating_add(len as u64));
        let first = self.sites.partition_point(|(site, _)| *site < first);
        let sites = self.sites[first..].iter();
        sites
            .take_while(move |(site, _)| *site < end)
            .map(|(site, shadowed)| (*site, shadowed))
    }

    /// Whether an address lies in an observed site.
    pub(crate) fn covers(&self, at: LiveAddr) -> bool {
        self.within(at, 1).next().is_some()
    }

    /// Makes `bytes`, read at `at`, what is to be watched; `read` reads more.
    pub(crate) fn show(
        &self,
        at: LiveAddr,
        bytes: &mut [u8],
        read: impl Fn(LiveAddr, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        for (site, shadowed) in self.within(at, bytes.len()) {
            let Some(watched) = shadowed.watched(site, &read)? else {
                continue;
            };
            for (address, byte) in (site.0..).zip(watched) {
                let index = address.wrapping_sub(at.0) as usize;
                if let Some(place) = bytes.get_mut(index).filter(|_| address >= at.0) {
                    *place = byte;
                }
            }
        }
        Ok(())
    }

    /// What has to be written so that `bytes` are watched at `at`.
    pub(crate) fn behind(
        &self,
        at: LiveAddr,
        bytes: &[u8],
        read: impl Fn(LiveAddr, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<ShadowedWrite> {
        let mut real = vec![0; bytes.len()];
        read(at, &mut real)?;
        let mut wanted = bytes.to_vec();
        let mut tails = Vec::new();
        for (site, shadowed) in self.within(at, bytes.len()) {
            if shadowed.watched(site, &read)?.is_none() {
                // It is not observed any more, or calls another's trampoline.
                continue;
            }
            for offset in 0..SITE_LEN as u64 {
                let address = site.plus(offset);
                let index = address.0.wrapping_sub(at.0) as usize;
                let Some(byte) = wanted.get_mut(index).filter(|_| address >= at) else {
                    continue;
                };
                if offset == OPCODE_OFFSET {
                    match *byte {
                        CMP => tails.push((shadowed.tail, trampoline::tail_byte(false))),
                        CALL => tails.push((shadowed.tail, trampoline::tail_byte(true))),
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
    /// The bytes that are watched of a site, if it is observed as it should be.
    fn watched(
        &self,
        site: LiveAddr,
        read: impl Fn(LiveAddr, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<Option<[u8; SITE_LEN]>> {
        let mut real = [0; SITE_LEN];
        read(site, &mut real)?;
        let mut tail = [0];
        read(self.tail, &mut tail)?;
        let opcode = match tail[0] {
            trampoline::RET => CMP,
            trampoline::JMP => CALL,
            _ => return Ok(None),
        };
        let [nop, CALL, call @ ..] = real else {
            return Ok(None);
        };
        let [a, b, c, d] = self.operand;
        Ok((call == self.call).then_some([nop, opcode, a, b, c, d]))
    }
}
