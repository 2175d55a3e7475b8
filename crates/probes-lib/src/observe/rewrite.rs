//! Rewrites sites of a process that stands: opcode and displacement together.
//!
//! All changes within a page are one write, which is made or not, even if we are killed meanwhile.
//! A site across the border of two pages is disabled first: while its opcode is `cmp`, its
//! displacement has no effect, and may be written in two.

use std::io;

use crate::addr::LiveAddr;
use crate::error::{Effect, ErrorKind, Result};
use crate::memory::{ReadMemory, WriteMemory};
use crate::patch::write_error;
use crate::site::{CMP, SITE_LEN, SiteCode};
use crate::snapshot::SITE;
use crate::spans::{self, PAGE};

/// What follows the nop of a site, before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Of the nop.
    pub(crate) site: LiveAddr,
    pub(crate) before: [u8; 5],
    pub(crate) after: [u8; 5],
}

impl Change {
    fn at(&self) -> LiveAddr {
        self.site.plus(1)
    }

    fn crosses_pages(&self) -> bool {
        crosses_pages(self.site)
    }

    fn back(&self) -> Change {
        Change {
            site: self.site,
            before: self.after,
            after: self.before,
        }
    }
}

/// Whether what follows the nop of a site lies on two pages, and is not written at once.
pub(crate) fn crosses_pages(site: LiveAddr) -> bool {
    site.plus(1).0 / PAGE != site.plus(SITE_LEN as u64 - 1).0 / PAGE
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
            .map_err(|source| write_error(pid, SITE, LiveAddr(run.start), source))?;
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
pub(crate) fn carry_out(pid: i32, memory: &mut impl WriteMemory, changes: &[Change]) -> Result<()> {
    if !is(pid, memory, changes, |change| change.before)? {
        return Err(ErrorKind::KeepsChanging { pid }.into());
    }
    let made =
        make(pid, memory, changes).and_then(|()| match is(pid, memory, changes, |it| it.after)? {
            true => Ok(()),
            false => Err(ErrorKind::NotKept {
                pid,
                what: SITE,
                address: changes.first().map_or(LiveAddr(0), Change::at),
            }
            .into()),
        });
    made.map_err(|error| {
        let back: Vec<Change> = changes.iter().map(Change::back).collect();
        // Whether it worked is seen by reading it back.
        let _ = make(pid, memory, &back);
        let is_back = is(pid, memory, changes, |change| change.before);
        error.leaving(match is_back {
            Ok(true) => Effect::PutBack,
            _ => Effect::HalfChanged,
        })
    })
}

/// Whether all sites are as `expected` says.
fn is(
    pid: i32,
    memory: &impl ReadMemory,
    changes: &[Change],
    expected: impl Fn(&Change) -> [u8; 5],
) -> Result<bool> {
    let found = read(pid, memory, changes.iter().map(|change| change.site))?;
    let mut both = found.iter().zip(changes);
    Ok(both.all(|(found, change)| found.tail() == expected(change)))
}

fn make(pid: i32, memory: &mut impl WriteMemory, changes: &[Change]) -> Result<()> {
    let mut sorted: Vec<&Change> = changes.iter().collect();
    sorted.sort_unstable_by_key(|change| change.site);
    for same in sorted
        .chunk_by(|one, other| !one.crosses_pages() && one.at().0 / PAGE == other.at().0 / PAGE)
    {
        let (Some(first), Some(last)) = (same.first(), same.last()) else {
            continue;
        };
        let start = first.at();
        let written = match (same, first.crosses_pages()) {
            ([_], true) => write_in_steps(memory, first),
            _ => {
                let end = last.site.plus(SITE_LEN as u64);
                let mut bytes = vec![0; (end.0 - start.0) as usize];
                memory.read(start, &mut bytes).and_then(|()| {
                    for change in same {
                        let at = (change.at().0 - start.0) as usize;
                        bytes[at..at + 5].copy_from_slice(&change.after);
                    }
                    memory.write_code(start, &bytes)
                })
            }
        };
        if let Err(source) = written {
            return Err(write_error(pid, SITE, start, source));
        }
    }
    Ok(())
}

fn write_in_steps(memory: &mut impl WriteMemory, change: &Change) -> io::Result<()> {
    memory.write_code(change.at(), &[CMP])?;
    memory.write_code(change.at().plus(1), &change.after[1..])?;
    memory.write_code(change.at(), &change.after[..1])
}
