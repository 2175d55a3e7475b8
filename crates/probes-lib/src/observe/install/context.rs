//! [`InstallContext`]: what is done for an observation to a process that stands.

use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, ObserveError, ProbeError, ProcessError, Result};
use crate::inject::injector::Injector;
use crate::inject::remote_call::RemoteCall;
use crate::memory::{ReadMemory, WriteMemory};
use crate::observe::install::patch_sites;
use crate::observe::install::patch_sites::SiteRewrite;
use crate::observe::layout::arena::{Arena, ObservedSite};
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::shared;
use crate::observe::read::data_source::SharedData;
use crate::observe::read::events::pages_valid_until;
use crate::observe::trampoline;
use crate::process::Process;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::program::Program;
use crate::site::{CALL, CMP, SiteCode};
use crate::trace::stopped::Stopped;

/// What is done to a process that stands.
pub(crate) struct InstallContext<'w> {
    pub(crate) process: &'w Process,
    pub(crate) memory: &'w ProcessMemory,
    pub(crate) injector: Injector<'w>,
}

impl<'w> InstallContext<'w> {
    pub(crate) fn of(injector: Injector<'w>) -> InstallContext<'w> {
        InstallContext {
            process: injector.process,
            memory: injector.memory,
            injector,
        }
    }

    pub(crate) fn put(&self, stopped: &Stopped<'_>, at: LiveAddr, bytes: &[u8]) -> Result<()> {
        let mut memory = stopped.memory(self.memory)?;
        memory.write_code(at, bytes).map_err(|source| {
            Error::of_write(self.process.pid(), MemoryPart::Trampoline, at, source)
        })
    }

    /// Tells the trampolines what they need to know.
    pub(crate) fn share(
        &self,
        sharing: &Arena,
        tid_offset: Option<u32>,
        (pages, until): (&ReadablePages, u64),
    ) -> Result<()> {
        let tid_offset = tid_offset.map(|offset| (shared::TID_AT, offset.to_le_bytes().to_vec()));
        let pages = pages.writes().into_iter();
        let pages = pages.map(|write| (sharing.shared.pages() + write.at, write.bytes));
        let until = (!sharing.shared.is_empty()).then(|| pages_valid_until(until));
        let writes: Vec<_> = tid_offset.into_iter().chain(pages).chain(until).collect();
        put_shared(self.process.pid(), self.memory, sharing, &writes)
    }

    /// Makes the sites call the trampolines.
    pub(crate) fn patch_to_trampolines(
        &self,
        stopped: &Stopped<'_>,
        arenas: &[Arena],
        sites: &[Vec<usize>],
        codes: &mut [Vec<u8>],
        program: &Program,
    ) -> Result<()> {
        let mut changes = Vec::new();
        for ((arena, sites), code) in arenas.iter().zip(sites).zip(codes) {
            let found = read_sites(self.process.pid(), self.memory, arena)?;
            for (index, code) in sites.iter().zip(&found) {
                let site = program.site(*index);
                if !code.same_but_for_opcode(site.site.code()) {
                    return Err(ProbeError::UnexpectedSite {
                        name: name_of(program, *index),
                        address: site.address(),
                        found: *code,
                        expected: site.site.code(),
                    }
                    .into());
                }
            }
            let enabled = found
                .iter()
                .enumerate()
                .filter(|(_, it)| it.enabled() == Some(true));
            for (index, _) in enabled.clone() {
                let tail = (arena.tail(index).0 - arena.code.0) as usize;
                code[tail] = trampoline::tail_byte(true);
            }
            if enabled.count() > 0 {
                self.put(stopped, arena.code, code)?;
            }
            changes.extend(found.iter().enumerate().map(|(index, code)| SiteRewrite {
                site: arena.entries[index].site,
                before: code.tail(),
                after: observed(arena, index),
            }));
        }
        patch_sites::carry_out(
            self.process.pid(),
            &mut stopped.memory(self.memory)?,
            &changes,
        )
    }

    /// Makes sure that nothing is where an arena is to be: it has come since it was laid out.
    pub(crate) fn refuse_taken(&self, arena: &Arena) -> Result<()> {
        let end = arena.data().plus(arena.data_len());
        let is_within = |it: &Mapping| it.start < end && it.end > arena.code;
        match read_maps(self.process)?.iter().any(is_within) {
            true => Err(Error::of_process(
                self.process.pid(),
                ProcessError::KeepsChanging,
            )),
            false => Ok(()),
        }
    }

    /// The first bytes of the tails of all trampolines.
    fn read_tails(&self, stopped: &Stopped<'_>, arena: &Arena) -> Result<Vec<u8>> {
        // In few calls, and not all at once.
        const PIECE: u64 = 1 << 20;
        let memory = stopped.memory(self.memory)?;
        let end = arena.trampoline(arena.entries.len());
        let (mut start, mut piece) = (end, Vec::new());
        let tail = |index| {
            let at = arena.tail(index);
            let offset = at.0.wrapping_sub(start.0) as usize;
            if let Some(&byte) = piece.get(offset).filter(|_| at >= start) {
                return Ok(byte);
            }
            start = at;
            piece.resize((end.0 - at.0).min(PIECE) as usize, 0);
            let read = memory.read(at, &mut piece);
            read.map_err(|source| {
                Error::of_read(self.process.pid(), MemoryPart::Trampoline, at, source)
            })?;
            Ok(piece.first().copied().unwrap_or_default())
        };
        (0..arena.entries.len()).map(tail).collect()
    }

    /// Says where it will be found that all sites have got their own calls back.
    pub(crate) fn mark_restored(&self, stopped: &Stopped<'_>, arenas: &[Arena]) -> Result<()> {
        let mut arenas = arenas.iter();
        arenas.try_for_each(|arena| self.put(stopped, arena.restored_flag(), &[1]))
    }

    /// What gives the sites their own calls back; those that are not as they were left stay.
    pub(crate) fn changes_back(
        &self,
        stopped: &Stopped<'_>,
        arenas: &[Arena],
    ) -> Result<Vec<SiteRewrite>> {
        let mut changes = Vec::new();
        for arena in arenas {
            let those = observed_of(self.process, self.memory, arena)?;
            let tails = self.read_tails(stopped, arena)?;
            changes.extend(those.into_iter().map(|(index, before)| {
                let entry = arena.entries[index];
                SiteRewrite {
                    site: entry.site,
                    before,
                    after: entry.own(tails[index] == trampoline::JMP),
                }
            }));
        }
        Ok(changes)
    }
}

fn name_of(program: &Program, site: usize) -> String {
    let mut probes = program.probes();
    let probe = probes.find(|probe| probe.sites().any(|one| one == site));
    probe.map_or_else(String::new, |probe| probe.name().to_owned())
}

/// What follows the nop of a site that is observed.
fn observed(arena: &Arena, index: usize) -> [u8; 5] {
    let [a, b, c, d] = arena.call(index);
    [CALL, a, b, c, d]
}

/// Those of the sites of an arena that are observed, or on the way to it or back, and what follows
/// their nops.
pub(crate) fn observed_of(
    process: &Process,
    memory: &ProcessMemory,
    arena: &Arena,
) -> Result<Vec<(usize, [u8; 5])>> {
    let is_restored = arena.is_restored(|at, bytes| memory.read(at, bytes));
    if is_restored.map_err(|source| {
        Error::of_read(process.pid(), MemoryPart::Trampoline, arena.code, source)
    })? {
        return Ok(Vec::new());
    }
    let found = read_those_there(process, memory, arena)?;
    let found = found.into_iter().zip(&arena.entries).enumerate();
    let is_left = |(index, (code, entry)): (usize, (Option<SiteCode>, &ObservedSite))| {
        let found = code?.tail();
        let is_left =
            found == observed(arena, index) || entry.is_cut_short(found, arena.call(index));
        is_left.then_some((index, found))
    };
    Ok(found.filter_map(is_left).collect())
}

/// What the sites are; `None` of those whose object has been unloaded.
fn read_those_there(
    process: &Process,
    memory: &ProcessMemory,
    arena: &Arena,
) -> Result<Vec<Option<SiteCode>>> {
    let pid = process.pid();
    if let Ok(all) = read_sites(pid, memory, arena) {
        return Ok(all.into_iter().map(Some).collect());
    }
    // It may have ended.
    read_maps(process)?;
    let one = |entry: &ObservedSite| {
        let found = patch_sites::read(pid, memory, std::iter::once(entry.site));
        found.ok()?.into_iter().next()
    };
    Ok(arena.entries.iter().map(one).collect())
}

fn read_sites(pid: i32, memory: &ProcessMemory, arena: &Arena) -> Result<Vec<SiteCode>> {
    patch_sites::read(pid, memory, arena.entries.iter().map(|it| it.site))
}

impl ObservedSite {
    /// Whether this follows the nop of a site whose rewriting was cut short: disabled, with a displacement
    /// that is in part the one and in part the other. It may still be its own where sites are always
    /// written in steps, across the border of two pages.
    fn is_cut_short(&self, found: [u8; 5], call: [u8; 4]) -> bool {
        let [opcode, displacement @ ..] = found;
        let mut bytes = displacement.iter().zip(self.operand).zip(call);
        let is_between = bytes.all(|((&byte, own), call)| byte == own || byte == call);
        let is_begun = displacement != self.operand || patch_sites::crosses_pages(self.site);
        opcode == CMP && is_between && is_begun
    }

    /// What follows the nop of the site when it is not observed.
    fn own(&self, enabled: bool) -> [u8; 5] {
        let opcode = if enabled { CALL } else { CMP };
        let [a, b, c, d] = self.operand;
        [opcode, a, b, c, d]
    }
}

/// What maps an arena, its data `shared` with us if there is a file for them.
pub(crate) fn map(arena: &Arena, shared: Option<&SharedData>) -> [RemoteCall; 2] {
    let (read, write, execute) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
    [
        RemoteCall::map(arena.code, arena.code_len(), read | execute),
        match shared {
            Some(shared) => shared.map(arena),
            None => RemoteCall::map(arena.data(), arena.data_len(), read | write),
        },
    ]
}

pub(crate) fn unmap(arena: &Arena) -> RemoteCall {
    RemoteCall::unmap(&arena.range(), libc::PROT_READ | libc::PROT_EXEC)
}

/// Writes into what is shared, at offsets in it.
pub(crate) fn put_shared(
    pid: i32,
    memory: &ProcessMemory,
    sharing: &Arena,
    writes: &[(u64, Vec<u8>)],
) -> Result<()> {
    for (offset, bytes) in writes {
        let at = sharing.shared_at().plus(*offset);
        let written = memory.while_it_runs().write_code(at, bytes);
        written.map_err(|source| Error::of_write(pid, MemoryPart::ObservationData, at, source))?;
    }
    Ok(())
}

/// Makes sure that arenas are where they were put: another observation takes their place if it begins.
pub(crate) fn refuse_replaced(pid: i32, memory: &impl ReadMemory, arenas: &[Arena]) -> Result<()> {
    for arena in arenas {
        match arena.is_there(|at, bytes| memory.read(at, bytes)) {
            Ok(true) => {}
            Err(source) if source.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Err(Error::of_process(pid, ProcessError::Exited));
            }
            // What cannot be read is not there.
            Ok(false) | Err(_) => return Err(Error::of_process(pid, ObserveError::Replaced)),
        }
    }
    Ok(())
}

/// Reads what was results.
pub(crate) fn read(pid: i32, memory: &impl ReadMemory, at: LiveAddr, len: u64) -> Result<Vec<u8>> {
    let mut data = vec![0; len as usize];
    let read = memory.read(at, &mut data);
    read.map_err(|source| Error::of_read(pid, MemoryPart::ObservationData, at, source))?;
    Ok(data)
}
