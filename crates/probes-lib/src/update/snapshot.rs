//! [`Snapshot`]: the bytes of the sites and counters of some probes in one process at one moment, and the
//! states that they mean.

use crate::address::LiveAddr;
use crate::elf::table::COUNTER_LEN;
use crate::error::{Error, MemoryPart, Result};
use crate::memory::ReadMemory;
use crate::memory::runs::{self, Run};
use crate::process::program::{MergedProbe, PlacedSite, Program};
use crate::site::{SITE_LEN, SiteCode};

/// Whether a probe is enabled, disabled, or neither.
///
/// ```no_run
/// use probes_lib::{State, Target};
///
/// let states = Target::open(4242)?.states()?;
/// let broken = states.probes().filter(|probe| probe.state() == State::Inconsistent);
/// println!("{} probes need `Actions::force`", broken.count());
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Every counter is above 0 and every site calls its handler.
    Enabled,
    /// Every counter is 0 and no site calls its handler.
    Disabled,
    /// Anything else: counters and sites disagree, or a site holds foreign bytes.
    Inconsistent,
}

/// Which sites and counters to read, and in which runs (ranges of addresses that are read at once).
#[derive(Debug)]
pub(crate) struct Layout {
    /// Sorted by address.
    sites: Vec<PlacedSite>,
    /// Indices in the program, sorted by address.
    counters: Vec<usize>,
    site_runs: Vec<Run>,
    counter_runs: Vec<Run>,
    /// Of each of `counters`.
    counter_addresses: Vec<u64>,
    total_sites: usize,
    total_counters: usize,
}

impl Layout {
    /// Returns the layout of the sites and counters of `probes`.
    pub(crate) fn of<'p>(
        program: &'p Program,
        probes: impl Iterator<Item = MergedProbe<'p>>,
    ) -> Layout {
        let mut counters = Vec::new();
        let mut wanted = vec![false; program.site_count()];
        for part in probes.flat_map(MergedProbe::parts) {
            wanted[part.sites].fill(true);
            counters.extend(part.semaphores);
        }
        let mut sites = Vec::with_capacity(program.site_count());
        sites.extend(
            program
                .sites_by_address()
                .filter(|site| wanted[site.index()]),
        );
        // Objects are in any order, and a bias may wrap some addresses around the end of the address
        // space.
        sites.sort_unstable_by_key(|site| site.address);
        let counter_address = |&one: &usize| program.counter(one).0;
        counters.sort_unstable_by_key(counter_address);
        let counter_addresses: Vec<u64> = counters.iter().map(counter_address).collect();
        let address_and_object = |site: &PlacedSite| (site.address.0, site.object());
        Layout {
            site_runs: runs::group(sites.iter().map(address_and_object), SITE_LEN as u64),
            counter_runs: runs::group(counter_addresses.iter().map(|&at| (at, 0)), COUNTER_LEN),
            sites,
            counters,
            counter_addresses,
            total_sites: program.site_count(),
            total_counters: program.semaphore_count(),
        }
    }

    /// Returns the address and length of each run of sites, then of counters.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (LiveAddr, u64, MemoryPart)> {
        let range = |run: &Run, part| (LiveAddr(run.start), run.len, part);
        let sites = self
            .site_runs
            .iter()
            .map(move |run| range(run, MemoryPart::Site));
        let counters = self.counter_runs.iter();
        sites.chain(counters.map(move |run| range(run, MemoryPart::Semaphore)))
    }

    /// Reads everything, in few system calls.
    pub(crate) fn read(&self, pid: i32, memory: &impl ReadMemory) -> Result<Snapshot> {
        let mut snapshot = self.empty_snapshot();
        snapshot.code.reserve_exact(self.site_runs.len());
        for run in &self.site_runs {
            let start = run.start;
            let mut bytes = vec![0; run.len as usize];
            read_run(pid, memory, start, run.len, MemoryPart::Site, &mut bytes)?;
            self.store_sites(run, &bytes, &mut snapshot);
            snapshot.code.push(CodeRun {
                start: LiveAddr(start),
                object: run.key,
                bytes,
            });
        }
        snapshot.counters = self.read_counters(pid, memory)?;
        Ok(snapshot)
    }

    /// Reads the sites and counters, without keeping the code between the sites. Code that is known to be
    /// unchanged since it was mapped from the file is not read, but taken from `program`.
    pub(crate) fn read_states(
        &self,
        pid: i32,
        memory: &impl ReadMemory,
        program: &Program,
        is_from_file: impl Fn(LiveAddr, u64) -> bool,
    ) -> Result<Snapshot> {
        let mut snapshot = self.empty_snapshot();
        let mut bytes = Vec::new();
        for run in &self.site_runs {
            let start = run.start;
            if is_from_file(LiveAddr(start), run.len) {
                for site in &self.sites[run.range()] {
                    let index = site.index();
                    snapshot.sites[index] = program.site(index).site.code();
                }
            } else {
                read_run(pid, memory, start, run.len, MemoryPart::Site, &mut bytes)?;
                self.store_sites(run, &bytes, &mut snapshot);
            }
        }
        snapshot.counters = self.read_counters(pid, memory)?;
        Ok(snapshot)
    }

    /// Whether the memory is still as it was when `before` was read by this layout.
    pub(crate) fn is_unchanged(
        &self,
        pid: i32,
        memory: &impl ReadMemory,
        before: &Snapshot,
    ) -> Result<bool> {
        let mut same = true;
        self.visit_code(pid, memory, |index, _, bytes| {
            same = bytes == before.code[index].bytes;
            same
        })?;
        Ok(same && self.read_counters(pid, memory)? == before.counters)
    }

    /// Reads the counters, by index in the program; those outside the layout are zero.
    pub(crate) fn read_counters(&self, pid: i32, memory: &impl ReadMemory) -> Result<Vec<u16>> {
        let mut counters = vec![0; self.total_counters];
        let mut bytes = Vec::new();
        for run in &self.counter_runs {
            let start = run.start;
            read_run(
                pid,
                memory,
                start,
                run.len,
                MemoryPart::Semaphore,
                &mut bytes,
            )?;
            for index in run.range() {
                let at = (self.counter_addresses[index] - start) as usize;
                counters[self.counters[index]] = u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            }
        }
        Ok(counters)
    }

    /// Reads the runs of code one by one, by address, and calls `visit` with the index, address and bytes of
    /// each, as long as it returns true. All runs are read into the same buffer: the page faults of
    /// a new buffer for each would take longer than reading.
    pub(crate) fn visit_code(
        &self,
        pid: i32,
        memory: &impl ReadMemory,
        mut visit: impl FnMut(usize, LiveAddr, &[u8]) -> bool,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for (index, run) in self.site_runs.iter().enumerate() {
            let start = run.start;
            read_run(pid, memory, start, run.len, MemoryPart::Site, &mut bytes)?;
            if !visit(index, LiveAddr(start), &bytes) {
                break;
            }
        }
        Ok(())
    }

    fn empty_snapshot(&self) -> Snapshot {
        Snapshot {
            code: Vec::new(),
            sites: vec![SiteCode([0; SITE_LEN]); self.total_sites],
            counters: Vec::new(),
        }
    }

    fn store_sites(&self, run: &Run, bytes: &[u8], snapshot: &mut Snapshot) {
        let start = run.start;
        for site in &self.sites[run.range()] {
            let at = (site.address.0 - start) as usize;
            let code = &mut snapshot.sites[site.index()];
            code.0.copy_from_slice(&bytes[at..at + SITE_LEN]);
        }
    }
}

/// Reads a run into `bytes`, which is resized, so that callers can reuse one buffer.
fn read_run(
    pid: i32,
    memory: &impl ReadMemory,
    start: u64,
    len: u64,
    part: MemoryPart,
    bytes: &mut Vec<u8>,
) -> Result<()> {
    bytes.resize(len as usize, 0);
    memory
        .read(LiveAddr(start), bytes)
        .map_err(|source| Error::of_read(pid, part, LiveAddr(start), source))?;
    Ok(())
}

/// The bytes that were read; sites and counters outside the layout are zero.
///
/// Two snapshots of one layout are equal if no byte of its sites or of the code between them, and
/// no counter, differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The runs of code that hold the sites, by address, the bytes between them included; none if only states were
    /// read.
    pub(crate) code: Vec<CodeRun>,
    /// By index in the program.
    pub(crate) sites: Vec<SiteCode>,
    /// By index in the program.
    pub(crate) counters: Vec<u16>,
}

/// Consecutive bytes of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodeRun {
    pub(crate) start: LiveAddr,
    /// Index of the object whose code it is.
    pub(crate) object: usize,
    pub(crate) bytes: Vec<u8>,
}

/// The state of one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProbeReading {
    pub(crate) state: State,
    /// The smallest of the probe's counters; every probe has at least one.
    pub(crate) counter: u16,
    /// How many sites call their handler.
    pub(crate) enabled_sites: usize,
}

impl Snapshot {
    /// Returns `len` bytes of code at `at`, if they are in one of the runs.
    pub(crate) fn code_at(&self, at: LiveAddr, len: usize) -> Option<&[u8]> {
        let after = self.code.partition_point(|run| run.start <= at);
        let run = &self.code[after.checked_sub(1)?];
        run.bytes.get((at.0 - run.start.0) as usize..)?.get(..len)
    }

    /// Returns the state of `probe`, which must be in the snapshot's layout.
    pub(crate) fn reading(&self, probe: MergedProbe<'_>) -> ProbeReading {
        let (mut sites, mut enabled_sites, mut foreign) = (0, 0, false);
        let (mut smallest, mut largest) = (u16::MAX, 0);
        for part in probe.parts() {
            let codes = &self.sites[part.sites.clone()];
            sites += codes.len();
            enabled_sites += codes
                .iter()
                .filter(|code| code.enabled() == Some(true))
                .count();
            foreign |= part
                .probe
                .sites()
                .zip(codes)
                .any(|(site, code)| !matches_file(*code, site.code()));
            for &counter in &self.counters[part.semaphores] {
                smallest = smallest.min(counter);
                largest = largest.max(counter);
            }
        }
        let state = if !foreign && enabled_sites == sites && smallest > 0 {
            State::Enabled
        } else if !foreign && enabled_sites == 0 && largest == 0 {
            State::Disabled
        } else {
            State::Inconsistent
        };
        ProbeReading {
            state,
            counter: smallest,
            enabled_sites,
        }
    }
}

/// Whether the bytes are those of the file except for the opcode. A breakpoint on the nop is
/// accepted: the nop is there for the breakpoints of debuggers and uprobes.
fn matches_file(found: SiteCode, in_file: SiteCode) -> bool {
    found.same_but_for_opcode(in_file)
        || found.has_breakpoint() && {
            let mut without_breakpoint = found;
            without_breakpoint.0[0] = in_file.0[0];
            without_breakpoint.same_but_for_opcode(in_file)
        }
}

#[cfg(test)]
mod tests;
