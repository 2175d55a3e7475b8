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
    /// the process cannot be stopped, or memory cannot be mapped into it: seccomp may forbid that.
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
            for arena in &arenas {
                let code = detour::map(
                    arena.code,
                    arena.code_len(),
                    libc::PROT_READ | libc::PROT_EXEC,
                );
                let data = detour::map(
                    arena.data(),
                    arena.data_len(),
                    libc::PROT_READ | libc::PROT_WRITE,
                );
                stopped = work.run(stopped, &[code, data])?;
            }
            let written = work.write(&stopped, &arenas, &sites, &mut codes, &program);
            if let Err(error) = written {
                for arena in &arenas {
                    stopped = work.run(stopped, &[unmap(arena)])?;
                }
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

    /// Whether the process is observed, or was by somebody who was killed: how many of its sites.
    ///
    /// # Errors
    ///
    /// If the process has ended, or may not be looked into.
    pub fn observed_sites(&self) -> Result<usize> {
        let maps = read_maps(self.process())?;
        let arenas = find(&self.bare_memory_to_read()?, &maps);
        Ok(arenas.iter().map(|arena| arena.entries.len()).sum())
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
        let arenas = find(&memory, &read_maps(self.process())?);
        if arenas.is_empty() {
            return Ok(0);
        }
        put_back(self.process(), &memory, &arenas, options)?;
        Ok(arenas.iter().map(|arena| arena.entries.len()).sum())
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
        let data = put_back(process, &memory, &self.arenas, self.options)?;
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

/// The observations that a process has in its memory.
pub(crate) fn find(memory: &ProcessMemory, maps: &[Mapping]) -> Vec<Arena> {
    let may_be = |mapping: &&Mapping| mapping.executable && mapping.inode == 0 && !mapping.shared;
    let found = maps.iter().filter(may_be).map(|mapping| {
        let len = mapping.end.0 - mapping.start.0;
        Arena::find(mapping.start, len, |at, bytes| memory.read(at, bytes))
    });
    // What cannot be read is the kernel's own: vsyscall.
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

fn unmap(arena: &Arena) -> detour::Call {
    detour::unmap(arena.code, arena.code_len() + arena.data_len())
}

/// Gives the sites their own calls back, waits until nobody is in the stubs, and unmaps them; says
/// what the counters were then.
fn put_back(
    process: &Process,
    memory: &ProcessMemory,
    arenas: &[Arena],
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
        for arena in arenas {
            stopped = work.run(stopped, &[unmap(arena)])?;
        }
        stopped.release();
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
        let range = self.cave.0..self.cave.plus(detour::ROOM as u64).0;
        let mut stopped = stopped;
        let begun = Instant::now();
        let (tid, registers) = loop {
            match stopped.traveller() {
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
        self.put(&stopped, self.cave, &code)?;
        let entry = detour::entry(self.cave).0;
        let stopped = self
            .tracer
            .send(self.process, stopped, tid, entry, &range, self.limit)?;
        if !stopped.is_within(&range) {
            self.put(&stopped, self.cave, &[0; detour::ROOM])?;
        }
        self.check(calls)?;
        Ok(stopped)
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

    /// Writes the stubs, and retargets the sites.
    fn write(
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
            for (index, _) in found
                .iter()
                .enumerate()
                .filter(|(_, it)| it.enabled() == Some(true))
            {
                let tail = (arena.tail(index).0 - arena.code.0) as usize;
                code[tail] = stub::tail_byte(true);
            }
            self.put(stopped, arena.code, code)?;
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
                if found[index].tail() != observed(arena, index) {
                    continue;
                }
                let tail = code[(arena.tail(index).0 - arena.code.0) as usize];
                changes.push(Change {
                    site: entry.site,
                    before: observed(arena, index),
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
