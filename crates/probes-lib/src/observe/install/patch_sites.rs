//! Rewrites sites of a process that stands: opcode and displacement together.
//!
//! All changes within a page are one write, which is made or not, even if we are killed meanwhile.
//! A site across the border of two pages is written in steps, and so is one across the border of two
//! words where the kernel lets code be written word by word alone: it is disabled first, and while its
//! opcode is `cmp`, its displacement has no effect, and may be written in two.

use std::io;
use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::error::{Effect, Error, MemoryError, MemoryPart, ProcessError, Result};
use crate::memory::{ReadMemory, WriteMemory};
use crate::site::{CMP, SITE_LEN, SiteCode};
use crate::update::spans;

/// What follows the nop of a site, before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SiteRewrite {
    /// Of the nop.
    pub(crate) site: LiveAddr,
    pub(crate) before: [u8; 5],
    pub(crate) after: [u8; 5],
}

impl SiteRewrite {
    fn at(&self) -> LiveAddr {
        self.site.plus(1)
    }

    fn crosses(&self, border: u64) -> bool {
        crosses(self.site, border)
    }

    fn back(&self) -> SiteRewrite {
        SiteRewrite {
            site: self.site,
            before: self.after,
            after: self.before,
        }
    }
}

/// What ptrace writes at once.
const WORD: u64 = 8;

/// Whether what follows the nop of a site lies on two pages.
pub(crate) fn crosses_pages(site: LiveAddr) -> bool {
    crosses(site, PAGE)
}

fn crosses(site: LiveAddr, border: u64) -> bool {
    site.plus(1).0 / border != site.plus(SITE_LEN as u64 - 1).0 / border
}

/// Reads sites, in few calls.
pub(crate) fn read(
    pid: i32,
    memory: &impl ReadMemory,
    sites: impl Iterator<Item = LiveAddr>,
) -> Result<Vec<SiteCode>> {
    let sites: Vec<LiveAddr> = sites.collect();
    let mut order: Vec<usize> = (0..sites.len()).collect();
    order.sort_unstable_by_key(|&index| sites[index]);
    let runs = spans::runs(
        order.iter().map(|&index| (sites[index].0, 0)),
        SITE_LEN as u64,
    );
    let mut found = vec![SiteCode([0; SITE_LEN]); sites.len()];
    let mut bytes = Vec::new();
    for run in &runs {
        bytes.resize(run.len as usize, 0);
        memory
            .read(LiveAddr(run.start), &mut bytes)
            .map_err(|source| Error::of_read(pid, MemoryPart::Site, LiveAddr(run.start), source))?;
        for &index in &order[run.range()] {
            let at = (sites[index].0 - run.start) as usize;
            found[index].0.copy_from_slice(&bytes[at..at + SITE_LEN]);
        }
    }
    Ok(found)
}

/// Makes all changes, or none.
///
/// # Errors
///
/// If a site is not as it is expected to be, or cannot be written. [`Error::effect`] says whether
/// everything was put back.
pub(crate) fn carry_out(
    pid: i32,
    memory: &mut impl WriteMemory,
    changes: &[SiteRewrite],
) -> Result<()> {
    if !is(pid, memory, changes, |change| change.before)? {
        return Err(Error::of_process(pid, ProcessError::KeepsChanging));
    }
    let made =
        make(pid, memory, changes).and_then(|()| match is(pid, memory, changes, |it| it.after)? {
            true => Ok(()),
            false => Err(Error::of_process(
                pid,
                MemoryError::NotHeld {
                    part: MemoryPart::Site,
                    address: changes.first().map_or(LiveAddr(0), SiteRewrite::at),
                },
            )),
        });
    made.map_err(|error| {
        let back: Vec<SiteRewrite> = changes.iter().map(SiteRewrite::back).collect();
        // Whether it worked is seen by reading it back.
        let _ = make(pid, memory, &back);
        let has_returned = is(pid, memory, changes, |change| change.before);
        error.leaving(match has_returned {
            Ok(true) => Effect::Restored,
            _ => Effect::HalfChanged,
        })
    })
}

/// Whether all sites are as `expected` says.
fn is(
    pid: i32,
    memory: &impl ReadMemory,
    changes: &[SiteRewrite],
    expected: impl Fn(&SiteRewrite) -> [u8; 5],
) -> Result<bool> {
    let found = read(pid, memory, changes.iter().map(|change| change.site))?;
    let mut both = found.iter().zip(changes);
    Ok(both.all(|(found, change)| found.tail() == expected(change)))
}

fn make(pid: i32, memory: &mut impl WriteMemory, changes: &[SiteRewrite]) -> Result<()> {
    let mut sorted: Vec<&SiteRewrite> = changes.iter().collect();
    sorted.sort_unstable_by_key(|change| change.site);
    let is_together = |one: &&SiteRewrite, other: &&SiteRewrite| {
        let crosses = one.crosses(PAGE) || other.crosses(PAGE);
        !crosses && one.at().0 / PAGE == other.at().0 / PAGE
    };
    for same in sorted.chunk_by(is_together) {
        let (Some(first), Some(last)) = (same.first(), same.last()) else {
            continue;
        };
        let written = match first.crosses(PAGE) {
            true => write_in_steps(memory, first),
            false => write_together(memory, same, first.at()..last.site.plus(SITE_LEN as u64)),
        };
        if let Err(source) = written {
            return Err(Error::of_write(pid, MemoryPart::Site, first.at(), source));
        }
    }
    Ok(())
}

/// Makes changes within a page.
fn write_together(
    memory: &mut impl WriteMemory,
    changes: &[&SiteRewrite],
    place: Range<LiveAddr>,
) -> io::Result<()> {
    let mut bytes = vec![0; (place.end.0 - place.start.0) as usize];
    memory.read(place.start, &mut bytes)?;
    for change in changes {
        let at = (change.at().0 - place.start.0) as usize;
        bytes[at..at + 5].copy_from_slice(&change.after);
    }
    if memory.write_code_at_once(place.start, &bytes)? {
        return Ok(());
    }
    let mut changes = changes.iter();
    changes.try_for_each(|change| match change.crosses(WORD) {
        true => write_in_steps(memory, change),
        false => memory.write_code(change.at(), &change.after),
    })
}

fn write_in_steps(memory: &mut impl WriteMemory, change: &SiteRewrite) -> io::Result<()> {
    memory.write_code(change.at(), &[CMP])?;
    memory.write_code(change.at().plus(1), &change.after[1..])?;
    memory.write_code(change.at(), &change.after[..1])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::CounterFault;
    use crate::memory::double::SliceMemory;
    use crate::site::CALL;

    const START: u64 = 0x10000;
    const PAGES: u64 = 4;

    /// Memory that keeps what it was after each write that is made or not.
    struct Steps {
        memory: SliceMemory,
        is_by_words: bool,
        seen: Vec<SliceMemory>,
    }

    impl Steps {
        /// One write of the kernel's: a page of it at once, or a word.
        fn write(&mut self, at: LiveAddr, bytes: &[u8]) {
            let border = if self.is_by_words { WORD } else { PAGE };
            let mut rest = (at, bytes);
            while !rest.1.is_empty() {
                let room = (border - rest.0.0 % border) as usize;
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

        fn write_code_at_once(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<bool> {
            if !self.is_by_words {
                assert_eq!(at.0 / PAGE, (at.0 + bytes.len() as u64 - 1) / PAGE);
                self.write(at, bytes);
            }
            Ok(!self.is_by_words)
        }

        fn write_counters(&mut self, _: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
            unreachable!("these are no counters")
        }
    }

    /// Whether it can be executed, and be put back by who finds it so.
    fn is_safe(change: &SiteRewrite, found: [u8; 5]) -> bool {
        let mut both = change.before.iter().zip(change.after).zip(found);
        let is_between = both.all(|((&one, other), it)| it == CMP || it == one || it == other);
        found == change.before || found == change.after || (found[0] == CMP && is_between)
    }

    /// Makes changes of sites, and looks at them after each write.
    fn check(sites: &[u64], enabled: bool, is_by_words: bool) -> Steps {
        let changes: Vec<SiteRewrite> = sites
            .iter()
            .map(|&site| SiteRewrite {
                site: LiveAddr(site),
                before: [if enabled { CALL } else { CMP }, 1, 2, 3, 4],
                after: [CALL, 0x11, 0x12, 0x13, 0x14],
            })
            .collect();
        let mut bytes = vec![0x90; (PAGES * PAGE) as usize];
        for change in &changes {
            let at = (change.at().0 - START) as usize;
            bytes[at..at + 5].copy_from_slice(&change.before);
        }
        let mut steps = Steps {
            memory: SliceMemory::new([(START, bytes)]),
            is_by_words,
            seen: Vec::new(),
        };
        carry_out(1, &mut steps, &changes).unwrap();
        for memory in &steps.seen {
            let found = read(1, memory, changes.iter().map(|change| change.site)).unwrap();
            for (change, found) in changes.iter().zip(found) {
                assert!(is_safe(change, found.tail()), "{change:x?}: {found}");
            }
        }
        steps
    }

    // promise: Observations: A site across two pages is written in steps that are safe, whatever is
    //    before and after it (42 layouts)
    #[test]
    fn site_across_two_pages_is_written_in_steps() {
        // Each is 6 bytes long; the tails of the third and the fourth lie on two pages.
        let sites = [0x10100, 0x10f00, 0x10ffd, 0x11ffe, 0x12100, 0x12200];
        for from in 0..sites.len() {
            for to in from + 1..=sites.len() {
                for enabled in [false, true] {
                    check(&sites[from..to], enabled, false);
                }
            }
        }
        // Two at once; three steps, the second of one of them in two; two at once.
        assert_eq!(check(&sites, true, false).seen.len(), 1 + 4 + 3 + 1);
    }

    // promise: Observations: No site is torn where the kernel writes code one word at a time (16
    //    layouts)
    #[test]
    fn word_sized_writes_tear_no_site() {
        for at in 0..WORD {
            for enabled in [false, true] {
                let steps = check(&[START + at], enabled, true);
                // Its tail is in one word, or disabled while it is written in two.
                assert_eq!(steps.seen.len() > 1, (3..7).contains(&at), "{at}");
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
}
