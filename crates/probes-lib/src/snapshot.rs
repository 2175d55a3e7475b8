//! [`Snapshot`]: the bytes of some probes' sites and counters in one process at one moment, and
//! what state they mean.

use std::io;

use crate::addr::{LiveAddr, LoadBias};
use crate::error::{ErrorKind, Result};
use crate::memory::ReadMemory;
use crate::site::{SITE_LEN, SiteCode};
use crate::spans::{self, Run};
use crate::table::{COUNTER_LEN, Probe, ProbeTable};

/// Whether a probe is on, off, or neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Every counter is above 0 and every site calls its handler.
    Enabled,
    /// Every counter is 0 and no site calls its handler.
    Disabled,
    /// Anything else: counters and sites disagree, or a site holds foreign bytes.
    Inconsistent,
}

/// Which sites and counters to read, and in which runs.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Indices in the table, by address.
    pub(crate) sites: Vec<usize>,
    counters: Vec<usize>,
    site_runs: Vec<Run>,
    counter_runs: Vec<Run>,
    site_addresses: Vec<u64>,
    counter_addresses: Vec<u64>,
    total_sites: usize,
    total_counters: usize,
}

impl Layout {
    /// The sites and counters of `probes`.
    pub(crate) fn of<'t>(
        table: &'t ProbeTable,
        probes: impl Iterator<Item = Probe<'t>>,
        bias: LoadBias,
    ) -> Layout {
        let (mut sites, mut counters) = (Vec::new(), Vec::new());
        for probe in probes {
            sites.extend(probe.site_range());
            counters.extend(probe.semaphore_range());
        }
        let site_address = |&site: &usize| bias.live(table.site(site).address()).0;
        let counter_address = |&one: &usize| bias.live(table.semaphore(one).counter()).0;
        sites.sort_unstable_by_key(site_address);
        counters.sort_unstable_by_key(counter_address);
        let site_addresses: Vec<u64> = sites.iter().map(site_address).collect();
        let counter_addresses: Vec<u64> = counters.iter().map(counter_address).collect();
        Layout {
            site_runs: spans::runs(&site_addresses, SITE_LEN as u64, |_| None),
            counter_runs: spans::runs(&counter_addresses, COUNTER_LEN, |_| None),
            sites,
            counters,
            site_addresses,
            counter_addresses,
            total_sites: table.site_count(),
            total_counters: table.semaphore_count(),
        }
    }

    /// First and last byte of each run of sites, then of counters.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (LiveAddr, u64, &'static str)> {
        let range = |addresses: &[u64], run: &Run| (LiveAddr(addresses[run.first]), run.len);
        let sites = self.site_runs.iter().map(move |run| {
            let (start, len) = range(&self.site_addresses, run);
            (start, len, SITE)
        });
        let counters = self.counter_runs.iter().map(move |run| {
            let (start, len) = range(&self.counter_addresses, run);
            (start, len, SEMAPHORE)
        });
        sites.chain(counters)
    }

    /// Reads everything, in few calls.
    pub(crate) fn read(&self, pid: i32, memory: &impl ReadMemory) -> Result<Snapshot> {
        let mut snapshot = Snapshot {
            code: Vec::with_capacity(self.site_runs.len()),
            sites: vec![SiteCode([0; SITE_LEN]); self.total_sites],
            counters: vec![0; self.total_counters],
        };
        for run in &self.site_runs {
            let start = self.site_addresses[run.first];
            let bytes = read_run(pid, memory, start, run.len, SITE)?;
            for index in run.range() {
                let at = (self.site_addresses[index] - start) as usize;
                let site = &mut snapshot.sites[self.sites[index]];
                site.0.copy_from_slice(&bytes[at..at + SITE_LEN]);
            }
            snapshot.code.push(CodeRun {
                start: LiveAddr(start),
                bytes,
            });
        }
        for run in &self.counter_runs {
            let start = self.counter_addresses[run.first];
            let bytes = read_run(pid, memory, start, run.len, SEMAPHORE)?;
            for index in run.range() {
                let at = (self.counter_addresses[index] - start) as usize;
                snapshot.counters[self.counters[index]] =
                    u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            }
        }
        Ok(snapshot)
    }
}

pub(crate) const SITE: &str = "a site";
pub(crate) const SEMAPHORE: &str = "a semaphore";

fn read_run(
    pid: i32,
    memory: &impl ReadMemory,
    start: u64,
    len: u64,
    what: &'static str,
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len as usize];
    memory
        .read(LiveAddr(start), &mut bytes)
        .map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => ErrorKind::Exited { pid },
            _ => ErrorKind::ReadMemory {
                pid,
                what,
                address: LiveAddr(start),
                source,
            },
        })?;
    Ok(bytes)
}

/// What was read; sites and counters outside the layout are zero.
///
/// Two snapshots of one layout are equal if no byte of the code between its sites, and no counter,
/// has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The runs of code that hold the sites, by address, the bytes between them included.
    pub(crate) code: Vec<CodeRun>,
    /// By index in the table.
    pub(crate) sites: Vec<SiteCode>,
    /// By index in the table.
    pub(crate) counters: Vec<u16>,
}

/// Consecutive bytes of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeRun {
    pub(crate) start: LiveAddr,
    pub(crate) bytes: Vec<u8>,
}

/// What the bytes of one probe mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) state: State,
    /// The smallest counter; a probe without semaphores does not occur.
    pub(crate) counter: u16,
    /// Sites that call their handler.
    pub(crate) enabled_sites: usize,
}

impl Snapshot {
    /// `len` bytes of code at `at`, if they are in one of the runs.
    pub(crate) fn code_at(&self, at: LiveAddr, len: usize) -> Option<&[u8]> {
        let after = self.code.partition_point(|run| run.start <= at);
        let run = &self.code[after.checked_sub(1)?];
        run.bytes.get((at.0 - run.start.0) as usize..)?.get(..len)
    }

    /// The state of `probe`, which has to be in the snapshot's layout.
    pub(crate) fn reading(&self, probe: Probe<'_>) -> Reading {
        let counters = &self.counters[probe.semaphore_range()];
        let codes = &self.sites[probe.site_range()];
        let enabled_sites = codes
            .iter()
            .filter(|code| code.enabled() == Some(true))
            .count();
        let foreign = probe
            .sites()
            .zip(codes)
            .any(|(site, code)| !is_own(*code, site.code()));
        let all = |on: bool| {
            let sites = if on { codes.len() } else { 0 };
            enabled_sites == sites && counters.iter().all(|&counter| (counter > 0) == on)
        };
        let state = match foreign {
            false if all(true) => State::Enabled,
            false if all(false) => State::Disabled,
            _ => State::Inconsistent,
        };
        Reading {
            state,
            counter: counters.iter().copied().min().unwrap_or(0),
            enabled_sites,
        }
    }
}

/// Whether the bytes are those of the file but for the opcode; a breakpoint on the nop, where
/// debuggers and uprobes are meant to put it, leaves the state readable.
fn is_own(found: SiteCode, in_file: SiteCode) -> bool {
    let mut without_breakpoint = found;
    if found.has_breakpoint() {
        without_breakpoint.0[0] = in_file.0[0];
    }
    without_breakpoint.same_but_for_opcode(in_file)
}

#[cfg(test)]
mod tests;
