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
mod put_back;
mod rewrite;
pub(crate) mod stub;
pub(crate) mod veil;
mod work;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::addr::LiveAddr;
use crate::error::{Effect, Error, ErrorKind, Result};
use crate::image::read_maps;
use crate::maps::Mapping;
use crate::memory::ReadMemory;
use crate::object::Object;
use crate::observe::arena::Arena;
use crate::observe::put_back::{Left, put_back};
use crate::observe::veil::Veil;
use crate::observe::work::{Work, map, read_data, unmap};
use crate::program::Program;
use crate::select::{Actions, Selector, choose};
use crate::session::{Options, Target};
use crate::sys::mem::ProcessMemory;
use crate::sys::threads::with_tracer;
use crate::table::Site;
use crate::turn::Turn;

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
