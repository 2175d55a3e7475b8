//! [`Prepared`]: an observation as far as it can be made ready while the process runs, and its beginning
//! once that stands.

use std::sync::Arc;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::error::{Error, ObserveError, Result};
use crate::inject::code_cave;
use crate::observe::install::context::{InstallContext, map};
use crate::observe::layout::arena::{Arena, HEADER_LEN};
use crate::observe::layout::readable_pages::ReadablePages;
use crate::observe::layout::shared::Shared;
use crate::observe::observation::Observation;
use crate::observe::plan::Role;
use crate::observe::read::data_source::SharedData;
use crate::observe::read::events::{EventReader, PAGES_VALID_FOR, ThreadIds};
use crate::observe::{ActiveObservation, Installed, placement};
use crate::process::Process;
use crate::process::maps::read_maps;
use crate::process::memory::ProcessMemory;
use crate::process::program::Program;
use crate::sys::ticks::{self, Ticks};
use crate::trace::stopped::Stopped;
use crate::update::options::Options;

/// An observation that is ready to begin.
pub(crate) struct Prepared {
    program: Arc<Program>,
    /// By index in the program.
    roles: Vec<Role>,
    pairs: Vec<(String, String)>,
    layout: Shared,
    arenas: Vec<Arena>,
    /// Of each entry of each arena, its index in the program.
    sites: Vec<Vec<usize>>,
    /// The code of each arena.
    codes: Vec<Vec<u8>>,
    /// What the trampolines may read.
    pages: ReadablePages,
    /// Until when, in ticks.
    pages_valid_until: u64,
    /// Whether the ids of its threads are ours, too.
    is_in_our_namespace: bool,
    ticks: Ticks,
    /// Where calls can be injected.
    pub(crate) code_cave: LiveAddr,
}

impl Prepared {
    /// # Errors
    ///
    /// As of [`Target::observe`](crate::Target::observe).
    pub(crate) fn of(
        process: &Process,
        program: Arc<Program>,
        memory: &ProcessMemory,
        observation: &Observation,
    ) -> Result<Prepared> {
        let pid = process.pid();
        let ticks = Ticks::begin();
        let roles = observation.roles(&program)?;
        if roles.iter().any(Role::is_timed) && !ticks::is_tsc_invariant() {
            return Err(ObserveError::NoInvariantTsc.into());
        }
        let layout = observation.shared(&roles);
        let maps = read_maps(process)?;
        let laid_out = placement::lay_out(process, &program, &roles, layout, &maps)?;
        let code_cave = code_cave::find(process, memory, &maps)?;
        let (arenas, sites): (Vec<Arena>, Vec<Vec<usize>>) = laid_out.into_iter().unzip();
        let sharing = arenas
            .first()
            .ok_or(Error::of_process(pid, ObserveError::NoSites))?;
        let codes = arenas.iter().zip(&sites).map(|(arena, sites)| {
            let roles = sites.iter().map(|site| &roles[*site]);
            arena.code_bytes(roles, sharing)
        });
        let codes = codes.collect::<std::result::Result<Vec<_>, _>>();
        let codes = codes.map_err(|_| Error::of_process(pid, ObserveError::NoRoom))?;
        let (pages, pages_valid_until) = match layout.record_len {
            0 => (ReadablePages::default(), 0),
            _ => (ReadablePages::of(&maps), ticks.ahead(PAGES_VALID_FOR)),
        };
        Ok(Prepared {
            program,
            roles,
            pairs: observation.pairs().to_vec(),
            layout,
            arenas,
            sites,
            codes,
            pages,
            pages_valid_until,
            is_in_our_namespace: process.status().is_ok_and(|status| status.levels <= 1),
            ticks,
            code_cave,
        })
    }

    /// Begins; the data are `shared` with us if there is a file for them. Says whether threads can be told
    /// by their ids. If it fails, what is left of it can be put back like any other observation.
    ///
    /// # Errors
    ///
    /// If the process cannot map memory, or a site does not hold what its file says;
    /// [`ProcessError::KeepsChanging`] if something else has come to be where it was to be.
    pub(crate) fn install<'s>(
        &mut self,
        work: &InstallContext<'s>,
        mut stopped: Stopped<'s>,
        shared: Option<&SharedData>,
    ) -> Result<(Stopped<'s>, bool)> {
        let arenas = &self.arenas;
        for (arena, bytes) in arenas.iter().zip(&self.codes) {
            work.refuse_taken(arena)?;
            // Until it has a header, which comes last, the detour tells what was mapped.
            stopped = work.injector.run(stopped, &map(arena, shared))?;
            let (header, rest) = bytes.split_at(HEADER_LEN.min(bytes.len()));
            work.put(&stopped, arena.code.plus(header.len() as u64), rest)?;
            work.put(&stopped, arena.code, header)?;
        }
        if let Some(shared) = shared {
            stopped = work.injector.run(stopped, &[shared.close()])?;
        }
        work.injector.clear(&stopped)?;
        let Some(sharing) = arenas.first() else {
            return Ok((stopped, false));
        };
        let tid_offset = match self.roles.iter().any(Role::is_timed) {
            true => stopped.tid_offset(work.process, work.memory),
            false => None,
        };
        let pages = (&self.pages, self.pages_valid_until);
        work.share(sharing, tid_offset, pages)?;
        let codes = &mut self.codes;
        work.patch_to_trampolines(&stopped, arenas, &self.sites, codes, &self.program)?;
        Ok((stopped, tid_offset.is_some()))
    }

    pub(crate) fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    /// What there is once it has begun.
    pub(crate) fn into_installed(
        self,
        has_tids: bool,
        data: Option<SharedData>,
        stopped: Duration,
        options: Options,
    ) -> Installed {
        let shared_at = self.arenas.first().map_or(LiveAddr(0), Arena::shared_at);
        let shared = (shared_at, self.layout);
        let program = self.program.clone();
        let tids = match (has_tids, self.is_in_our_namespace) {
            (false, _) => ThreadIds::Unknown,
            (true, true) => ThreadIds::Ours,
            (true, false) => ThreadIds::OtherObjects,
        };
        Installed {
            watch: EventReader::begin(program, &self.roles, shared, tids, self.pages),
            active: ActiveObservation {
                program: self.program,
                arenas: self.arenas,
                sites: self.sites,
                roles: self.roles,
                pairs: self.pairs,
                data,
                ticks: self.ticks,
            },
            options,
            stopped,
        }
    }
}
