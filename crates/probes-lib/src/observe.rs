//! [`Observer`]: counts hits inside a process, without the kernel.
//!
//! ```text
//! choose ─▶ lay out ─▶ stop ─▶ map memory ─▶ write stubs ─▶ retarget sites ─▶ let go
//! select    arena      sys     detour        stub           rewrite
//!                                                               count, as long as wanted
//! let go ◀─ unmap ◀─ nobody inside? ◀─ give sites their own calls back ◀─ stop
//! ```
//!
//! What is needed to undo it lies in the process ([`arena`]), so that whoever comes next can do it if
//! we are killed.

pub(crate) mod arena;
pub(crate) mod detour;
mod place;
mod rewrite;
pub(crate) mod stub;
pub(crate) mod veil;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::addr::LiveAddr;
use crate::error::{Effect, Error, ErrorKind, Result};
use crate::image::read_maps;
use crate::maps::{self, Mapping};
use crate::memory::{ReadMemory, WriteMemory};
use crate::object::Object;
use crate::observe::arena::{Arena, Entry};
use crate::observe::rewrite::Change;
use crate::observe::veil::Veil;
use crate::process::Process;
use crate::program::Program;
use crate::select::{Actions, Selector, choose};
use crate::session::{Options, Target};
use crate::site::SiteCode;
use crate::sys::mem::ProcessMemory;
use crate::sys::threads::{Stopped, Tracer, with_tracer};
use crate::table::Site;
use crate::turn::Turn;

/// How long threads are given to get out of the stubs.
const LEAVING: Duration = Duration::from_secs(2);

/// How much of a stack is looked at, from its top.
const MOST_STACK: u64 = 8 << 20;

/// Counts the hits of probes of a process until it is removed. Whether probes are enabled is not
/// touched: those that are off are counted as well, and can be switched meanwhile.
///
/// If it is dropped without [`Observer::remove`], the process goes on counting, which does no harm;
/// [`Target::clean`] puts everything back.
pub struct Observer<'t> {
    target: &'t Target,
    program: Arc<Program>,
    options: Options,
    arenas: Vec<Arena>,
    /// Of each entry of each arena, its index in the program.
    sites: Vec<Vec<usize>>,
    stopped: Duration,
}

/// How often the sites of probes were executed since they have been observed.
#[derive(Clone, Debug)]
pub struct Counts {
    program: Arc<Program>,
    /// By index in the program; `None` of sites that are not observed.
    hits: Vec<Option<u64>>,
}

/// How often one site was executed.
#[derive(Clone, Copy, Debug)]
pub struct SiteHits<'c> {
    /// The object that it is in.
    pub object: &'c Object,
    /// The site.
    pub site: Site<'c>,
    /// Where its nop is in the process.
    pub address: LiveAddr,
    /// How often it was executed, enabled or not.
    pub hits: u64,
}

impl Counts {
    /// Each probe that is observed, by name, and its hits at all of its sites.
    pub fn probes(&self) -> impl Iterator<Item = (&str, u64)> {
        let names = self.program.probes().map(|probe| probe.name());
        names.filter_map(|name| Some((name, self.hits(name)?)))
    }

    /// The hits of one probe at all of its sites, if it is observed.
    pub fn hits(&self, name: &str) -> Option<u64> {
        let sites = self.program.probe(name)?.sites();
        sites
            .filter_map(|site| self.hits[site])
            .reduce(|sum, hits| sum + hits)
    }

    /// Each site of a probe that is observed, object by object, by address.
    pub fn sites(&self, name: &str) -> impl Iterator<Item = SiteHits<'_>> {
        let probe = self.program.probe(name).into_iter();
        probe.flat_map(|probe| probe.sites()).filter_map(|index| {
            let site = self.program.site(index);
            Some(SiteHits {
                object: site.object,
                site: site.site,
                address: site.address(),
                hits: self.hits[index]?,
            })
        })
    }

    /// The objects that are observed, as of the beginning.
    pub fn objects(&self) -> &[Object] {
        self.program.objects()
    }

    /// All hits together.
    pub fn total(&self) -> u64 {
        self.hits.iter().flatten().sum()
    }
}

impl Target {
    /// Counts the hits of the probes of `selectors` from now on. What an earlier observation has left
    /// is put back first.
    ///
    /// # Errors
    ///
    /// If no probe is selected, none of them has a site, a site does not hold what its file says,
    /// the process cannot be stopped, or memory cannot be mapped into it: the process has set itself a
    /// seccomp filter ([`ErrorKind::Filtered`]), or its kernel refuses.
    /// [`Error::effect`] says what it is left with.
    pub fn observe(&self, selectors: &[Selector], options: Options) -> Result<Observer<'_>> {
        self.try_observe(selectors, options)
            .map_err(|error| error.leaving(Effect::NothingChanged))
    }

    fn try_observe(&self, selectors: &[Selector], options: Options) -> Result<Observer<'_>> {
        let process = self.process();
        process.refuse_own_family()?;
        // To choose by; nothing is enabled.
        let actions = selectors
            .iter()
            .cloned()
            .fold(Actions::new(), Actions::enable);
        choose(&self.look_at_objects()?.program, &actions)?;
        let _turn = Turn::wait(process, Instant::now() + options.deadline)?;
        self.put_back_observed(options)?;
        let image = self.look_at_objects()?;
        let program = image.program.clone();
        let mut wanted = vec![false; program.site_count()];
        for choice in choose(&program, &actions)? {
            for site in program.by_id(choice.probe).sites() {
                wanted[site] = true;
            }
        }
        let maps = read_maps(process)?;
        let laid_out = place::lay_out(process, &program, &wanted, &maps)?;
        let memory = self.bare_memory()?;
        let is_filtered = process.has_filtered_itself();
        if is_filtered.map_err(|source| process.lost(source))? {
            let pid = process.pid();
            return Err(ErrorKind::Filtered { pid }.into());
        }
        let cave = place::cave(process, &memory, &maps)?;
        let (arenas, sites): (Vec<Arena>, Vec<Vec<usize>>) = laid_out.into_iter().unzip();
        // As much as can be is done before the process stands.
        let codes = arenas.iter().map(Arena::code_bytes);
        let pid = process.pid();
        let mut codes = codes
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|_| ErrorKind::NoRoom { pid })?;
        let stopped = with_tracer(&[process], |tracer| {
            let begun = Instant::now();
            let work = Work {
                tracer,
                process,
                memory: &memory,
                cave,
                limit: options.deadline,
            };
            let mut stopped = tracer.stop(process, options.deadline)?;
            for (arena, bytes) in arenas.iter().zip(&codes) {
                // Until it has a header, the detour tells what was mapped.
                stopped = work.run(stopped, &map(arena))?;
                work.put(&stopped, arena.code, bytes)?;
            }
            work.clear(&stopped)?;
            let written = work.retarget(&stopped, &arenas, &sites, &mut codes, &program);
            if let Err(error) = written {
                work.unmap_all(stopped, arenas.iter().map(unmap))?.release();
                return Err(error);
            }
            stopped.release();
            Ok(begun.elapsed())
        })?;
        Ok(Observer {
            target: self,
            program,
            options,
            arenas,
            sites,
            stopped,
        })
    }

    /// Puts back what observations have left in the process; says how many sites that were.
    ///
    /// # Errors
    ///
    /// As of [`Observer::remove`].
    pub fn clean(&self, options: Options) -> Result<usize> {
        let clean = || {
            let process = self.process();
            process.refuse_own_family()?;
            let _turn = Turn::wait(process, Instant::now() + options.deadline)?;
            self.put_back_observed(options)
        };
        clean().map_err(|error: Error| error.leaving(Effect::NothingChanged))
    }

    /// The caller has the turn.
    fn put_back_observed(&self, options: Options) -> Result<usize> {
        let memory = self.bare_memory()?;
        let maps = read_maps(self.process())?;
        let arenas = find(&memory, &maps);
        let left = Left::find(self.process(), &memory, &maps, &arenas);
        if !arenas.is_empty() || left.is_some() {
            put_back(self.process(), &memory, &arenas, left, options)?;
        }
        Ok(arenas.iter().map(|arena| arena.entries.len()).sum())
    }
}

/// What somebody has left who was killed before there was a header.
struct Left {
    /// What he has mapped.
    maps: Vec<Range<u64>>,
}

impl Left {
    fn find(
        process: &Process,
        memory: &ProcessMemory,
        maps: &[Mapping],
        arenas: &[Arena],
    ) -> Option<Left> {
        let cave = place::cave(process, memory, maps).ok()?;
        let mut bytes = [0; detour::ROOM];
        memory.read(cave, &mut bytes).ok()?;
        if bytes == [0; detour::ROOM] {
            return None;
        }
        let is_left = |range: &Range<u64>| {
            let is_whole = |mapping: &Mapping| {
                let of_nobody = mapping.inode == 0 && !mapping.shared;
                of_nobody && (mapping.start.0..mapping.end.0) == *range
            };
            let has_header = arenas.iter().any(|arena| {
                let len = arena.code_len() + arena.data_len();
                (arena.code.0..arena.code.plus(len).0).contains(&range.start)
            });
            !has_header && maps.iter().any(is_whole)
        };
        let maps = detour::mapped_by(&bytes).into_iter().filter(is_left);
        Some(Left {
            maps: maps.collect(),
        })
    }
}

impl Observer<'_> {
    /// How long the process stood still to be observed, at most.
    pub fn stopped(&self) -> Duration {
        self.stopped
    }

    /// The hits so far. Does not stop the process.
    ///
    /// # Errors
    ///
    /// If the process has ended or executed another program.
    pub fn counts(&self) -> Result<Counts> {
        let memory = self.target.bare_memory_to_read()?;
        let data = read_data(self.target.pid(), &memory, &self.arenas)?;
        Ok(self.counts_of(&data))
    }

    /// Puts everything back; says how often the sites were executed, to the last one.
    ///
    /// # Errors
    ///
    /// If the process has ended, or cannot be stopped.
    pub fn remove(self) -> Result<Counts> {
        let process = self.target.process();
        let _turn = Turn::wait(process, Instant::now() + self.options.deadline)?;
        let memory = self.target.bare_memory()?;
        let data = put_back(process, &memory, &self.arenas, None, self.options)?;
        Ok(self.counts_of(&data))
    }

    fn counts_of(&self, data: &[Vec<u8>]) -> Counts {
        let mut hits = vec![None; self.program.site_count()];
        for ((arena, sites), data) in self.arenas.iter().zip(&self.sites).zip(data) {
            for (site, count) in sites.iter().zip(arena.hits(data)) {
                hits[*site] = Some(count);
            }
        }
        let program = self.program.clone();
        Counts { program, hits }
    }
}

/// The memory of a process, with sites that are observed behind a veil.
pub(crate) fn behind_veil(memory: ProcessMemory, maps: &[Mapping]) -> ProcessMemory {
    let arenas = find(&memory, maps);
    memory.behind(Veil::over(&arenas))
}

/// The observations that a process has in its memory.
pub(crate) fn find(memory: &ProcessMemory, maps: &[Mapping]) -> Vec<Arena> {
    let may_be = |mapping: &&Mapping| {
        // The kernel's own have names: [vdso], [vsyscall].
        let is_nobodys = mapping.inode == 0 && !mapping.path().starts_with(b"[v");
        mapping.executable && is_nobodys && !mapping.shared
    };
    let found = maps.iter().filter(may_be).map(|mapping| {
        let len = mapping.end.0 - mapping.start.0;
        Arena::find(mapping.start, len, |at, bytes| memory.read(at, bytes))
    });
    // What cannot be read is none.
    found.filter_map(|arena| arena.ok().flatten()).collect()
}

fn read_data(pid: i32, memory: &impl ReadMemory, arenas: &[Arena]) -> Result<Vec<Vec<u8>>> {
    let read = |arena: &Arena| {
        let mut data = vec![0; arena.data_len() as usize];
        memory
            .read(arena.data(), &mut data)
            .map_err(|source| read_error(pid, arena.data(), source))?;
        Ok(data)
    };
    arenas.iter().map(read).collect()
}

fn read_error(pid: i32, address: LiveAddr, source: std::io::Error) -> Error {
    match source.kind() {
        std::io::ErrorKind::UnexpectedEof => ErrorKind::Exited { pid },
        _ => ErrorKind::ReadMemory {
            pid,
            what: "what was counted",
            address,
            source,
        },
    }
    .into()
}

fn map(arena: &Arena) -> [detour::Call; 2] {
    let (read, write, execute) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
    [
        detour::map(arena.code, arena.code_len(), read | execute),
        detour::map(arena.data(), arena.data_len(), read | write),
    ]
}

fn unmap(arena: &Arena) -> detour::Call {
    detour::unmap(arena.code, arena.code_len() + arena.data_len())
}

/// Gives the sites their own calls back, waits until nobody is in the stubs, and unmaps them; says
/// what the counters were then.
fn put_back(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
    left: Option<Left>,
    options: Options,
) -> Result<Vec<Vec<u8>>> {
    let maps = read_maps(process)?;
    let cave = place::cave(process, memory, &maps)?;
    with_tracer(&[process], |tracer| {
        let work = Work {
            tracer,
            process,
            memory,
            cave,
            limit: options.deadline,
        };
        let mut stopped = tracer.stop(process, options.deadline)?;
        let changes = work.changes_back(&stopped, arenas)?;
        rewrite::carry_out(process.pid(), &mut stopped.memory(memory)?, &changes)?;
        let begun = Instant::now();
        while is_inside(process, memory, &stopped, arenas)? {
            stopped.release();
            if begun.elapsed() > LEAVING {
                // Whoever is inside comes out by himself, some day; nobody gets in any more.
                return read_data(process.pid(), memory, arenas);
            }
            std::thread::sleep(Duration::from_millis(1));
            stopped = tracer.stop(process, options.deadline)?;
        }
        let data = read_data(process.pid(), memory, arenas)?;
        let left = left.into_iter().flat_map(|left| left.maps);
        let left = left.map(|range| detour::unmap(LiveAddr(range.start), range.end - range.start));
        let unmapped = work.unmap_all(stopped, arenas.iter().map(unmap).chain(left))?;
        unmapped.release();
        Ok(data)
    })
}

/// Whether a thread is in the stubs, or will return to them from a signal's handler.
fn is_inside(
    process: &Process,
    memory: &ProcessMemory,
    stopped: &Stopped<'_>,
    arenas: &[Arena],
) -> Result<bool> {
    let is_in = |address: u64| arenas.iter().any(|arena| arena.holds_code(address));
    let maps = read_maps(process)?;
    for (counter, stack) in stopped.places() {
        if is_in(counter) {
            return Ok(true);
        }
        let Some(mapping) = maps::find(&maps, LiveAddr(stack), 1) else {
            continue;
        };
        let len = (mapping.end.0 - stack).min(MOST_STACK) & !7;
        let mut words = vec![0; len as usize];
        memory
            .read(LiveAddr(stack), &mut words)
            .map_err(|source| read_error(process.pid(), LiveAddr(stack), source))?;
        let mut words = words.chunks_exact(8);
        if words.any(|word| {
            word.try_into()
                .is_ok_and(|word| is_in(u64::from_le_bytes(word)))
        }) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What is done to a process that stands.
struct Work<'w> {
    tracer: &'w Tracer<'w>,
    process: &'w Process,
    memory: &'w ProcessMemory,
    /// Where a detour can be put.
    cave: LiveAddr,
    limit: Duration,
}

impl<'w> Work<'w> {
    /// Makes a thread run system calls.
    fn run(&self, stopped: Stopped<'w>, calls: &[detour::Call]) -> Result<Stopped<'w>> {
        let pid = self.process.pid();
        let range = self.detour();
        let mut stopped = stopped;
        let begun = Instant::now();
        let (tid, registers) = loop {
            // Nobody may be on an earlier one, whose tool was killed.
            let traveller = stopped.traveller().filter(|_| !stopped.is_within(&range));
            match traveller {
                Some(found) => break found,
                None if begun.elapsed() > self.limit => {
                    return Err(ErrorKind::NoTraveller { pid }.into());
                }
                None => {
                    stopped.release();
                    stopped = self.tracer.stop(self.process, self.limit)?;
                }
            }
        };
        let code = detour::code(calls, &registers);
        let (mark, code) = code.split_at(detour::MARK_LEN);
        self.put(&stopped, self.cave, mark)?;
        self.put(&stopped, detour::entry(self.cave), code)?;
        let entry = detour::entry(self.cave).0;
        let stopped = self
            .tracer
            .send(self.process, stopped, tid, entry, &range, self.limit)?;
        self.check(calls)?;
        Ok(stopped)
    }

    /// Runs calls that unmap, each by itself, and leaves nothing where the detours were.
    fn unmap_all(
        &self,
        mut stopped: Stopped<'w>,
        calls: impl Iterator<Item = detour::Call>,
    ) -> Result<Stopped<'w>> {
        for call in calls {
            stopped = self.run(stopped, &[call])?;
        }
        self.clear(&stopped)?;
        Ok(stopped)
    }

    /// Takes the last detour away.
    fn clear(&self, stopped: &Stopped<'_>) -> Result<()> {
        match stopped.is_within(&self.detour()) {
            // Sent there by somebody who was killed; the next one takes it away.
            true => Ok(()),
            false => {
                let entry = detour::entry(self.cave);
                self.put(stopped, entry, &[0; detour::ROOM - detour::MARK_LEN])?;
                self.put(stopped, self.cave, &[0; detour::MARK_LEN])
            }
        }
    }

    fn detour(&self) -> Range<u64> {
        self.cave.0..self.cave.plus(detour::ROOM as u64).0
    }

    /// Makes sure that calls have done what they were to do.
    fn check(&self, calls: &[detour::Call]) -> Result<()> {
        let maps = read_maps(self.process)?;
        for call in calls {
            let [at, ..] = call.arguments;
            let is_mapped = maps::find(&maps, LiveAddr(at), 1).is_some();
            if is_mapped != call.is_map() {
                let pid = self.process.pid();
                return Err(ErrorKind::MapRefused { pid }.into());
            }
        }
        Ok(())
    }

    fn put(&self, stopped: &Stopped<'_>, at: LiveAddr, bytes: &[u8]) -> Result<()> {
        let mut memory = stopped.memory(self.memory)?;
        memory.write_code(at, bytes).map_err(|source| {
            let pid = self.process.pid();
            Error::from(match source.kind() {
                std::io::ErrorKind::UnexpectedEof => ErrorKind::Exited { pid },
                _ => ErrorKind::WriteMemory {
                    pid,
                    what: "a stub",
                    address: at,
                    source,
                },
            })
        })
    }

    /// Makes the sites call the stubs.
    fn retarget(
        &self,
        stopped: &Stopped<'_>,
        arenas: &[Arena],
        sites: &[Vec<usize>],
        codes: &mut [Vec<u8>],
        program: &Program,
    ) -> Result<()> {
        let mut changes = Vec::new();
        for ((arena, sites), code) in arenas.iter().zip(sites).zip(codes) {
            let found = self.read_sites(arena)?;
            for (index, code) in sites.iter().zip(&found) {
                let site = program.site(*index);
                if !code.same_but_for_opcode(site.site.code()) {
                    return Err(ErrorKind::UnexpectedSite {
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
                code[tail] = stub::tail_byte(true);
            }
            if enabled.count() > 0 {
                self.put(stopped, arena.code, code)?;
            }
            changes.extend(found.iter().enumerate().map(|(index, code)| Change {
                site: arena.entries[index].site,
                before: code.tail(),
                after: observed(arena, index),
            }));
        }
        rewrite::carry_out(
            self.process.pid(),
            &mut stopped.memory(self.memory)?,
            &changes,
        )
    }

    fn read_sites(&self, arena: &Arena) -> Result<Vec<SiteCode>> {
        rewrite::read(
            self.process.pid(),
            self.memory,
            arena.entries.iter().map(|it| it.site),
        )
    }

    /// What gives the sites their own calls back; those that are not as they were left stay.
    fn changes_back(&self, stopped: &Stopped<'_>, arenas: &[Arena]) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        for arena in arenas {
            let found = self.read_sites(arena)?;
            let mut code = vec![0; arena.code_len() as usize];
            stopped
                .memory(self.memory)?
                .read(arena.code, &mut code)
                .map_err(|source| read_error(self.process.pid(), arena.code, source))?;
            for (index, entry) in arena.entries.iter().enumerate() {
                let before = found[index].tail();
                if before != observed(arena, index)
                    && !entry.is_cut_short(before, arena.call(index))
                {
                    continue;
                }
                let tail = code[(arena.tail(index).0 - arena.code.0) as usize];
                changes.push(Change {
                    site: entry.site,
                    before,
                    after: entry.own(tail == stub::JMP),
                });
            }
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
    [crate::site::CALL, a, b, c, d]
}

impl Entry {
    /// Whether this follows the nop of a site whose rewriting was cut short, across the border of two
    /// pages: disabled, with a displacement that is in part the one and in part the other.
    fn is_cut_short(&self, found: [u8; 5], call: [u8; 4]) -> bool {
        let [opcode, displacement @ ..] = found;
        let mut bytes = displacement.iter().zip(self.operand).zip(call);
        let is_between = bytes.all(|((&byte, own), call)| byte == own || byte == call);
        opcode == crate::site::CMP && is_between && rewrite::crosses_pages(self.site)
    }

    /// What follows the nop of the site when it is not observed.
    fn own(&self, enabled: bool) -> [u8; 5] {
        let opcode = if enabled {
            crate::site::CALL
        } else {
            crate::site::CMP
        };
        let [a, b, c, d] = self.operand;
        [opcode, a, b, c, d]
    }
}
