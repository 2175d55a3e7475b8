//! What an observation misses: patches that the process has discarded, files that it has loaded since, processes that it has forked.

use std::path::PathBuf;
use std::sync::{MutexGuard, PoisonError};

use crate::error::Result;
use crate::observe::install::installed::{find_points, refuse_replaced};
use crate::observe::read::discarded::DiscardCheck;
use crate::observe::read::forked::{ForkCheck, with_copies};
use crate::observe::read::loaded_later::LoadedLater;
use crate::observe::{DiscardedPatches, ForkedChildren};
use crate::observer::Observer;
use crate::process::maps::read_maps;

impl Observer {
    /// Returns the sites that have been found to record no hits any more. They are looked for whenever something is
    /// read, but at most five times a second; [`Observer::remove`] looks once more.
    pub fn discarded(&self) -> DiscardedPatches {
        self.lock_discards().found()
    }

    /// Returns the files with functions that were asked for and are not observed, because the process has loaded them
    /// since: a new observation has them as well. Looked for when [`Observer::discarded`] are. Functions that were
    /// asked for by their addresses do not matter.
    pub fn loaded_later(&self) -> Vec<PathBuf> {
        self.lock_loaded_later().found()
    }

    pub(super) fn lock_loaded_later(&self) -> MutexGuard<'_, LoadedLater> {
        let loaded = self.active.loaded_later.lock();
        loaded.unwrap_or_else(PoisonError::into_inner)
    }

    fn find_loaded_later(&self) -> Result<()> {
        let mut loaded = self.lock_loaded_later();
        if loaded.is_possible() {
            let process = self.target.opened.process();
            let maps = read_maps(process)?;
            let memory = self.target.opened.unshadowed_memory_to_read()?;
            // Afterwards: so these are not the mappings of another program that it has executed.
            refuse_replaced(process, &memory, &self.active.arenas)?;
            loaded.look(process, &maps);
        }
        Ok(())
    }

    /// Returns the processes that the observed process was found to have forked, whose hits or times are missing.
    /// Looked for when [`Observer::discarded`] are.
    pub fn forked(&self) -> ForkedChildren {
        self.lock_forked().found()
    }

    /// Returns whether the hits of a process that this one, or one of its children, has forked are recorded with its own: it was forked while
    /// this one was observed, and the data are shared ([`Observation::record_forked`](crate::Observation::record_forked)).
    pub fn records_forked(&self, pid: i32) -> bool {
        let process = self.target.opened.process();
        let forked = self.lock_forked();
        forked.is_recorded(pid, process, &self.active.arenas)
    }

    /// Returns the pids of all processes for which [`Observer::records_forked`] is true. Looks at all processes of the
    /// machine, because the parent of a process (a daemon, for example) may have exited.
    pub fn recorded_forked(&self) -> Vec<i32> {
        let arena = self.active.arenas.first();
        let arena = arena.filter(|_| self.active.plan.records_forked);
        arena.map_or_else(Vec::new, |arena| {
            with_copies(self.target.opened.process(), arena)
        })
    }

    pub(super) fn lock_forked(&self) -> MutexGuard<'_, ForkCheck> {
        self.active
            .forked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_discards(&self) -> MutexGuard<'_, DiscardCheck> {
        let discards = self.active.discards.lock();
        discards.unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks for patches that the process has discarded, for files that it has loaded, and for processes that it has
    /// forked, if it is time. If the process cannot be read, the next reading reports that.
    pub(super) fn look_for_gaps(&self) {
        self.lock_forked()
            .look_if_due(self.target.opened.process(), &self.active.arenas);
        let mut discards = self.lock_discards();
        if discards.is_due() {
            let _ = self.look_for_discarded(&mut discards);
            let _ = self.find_loaded_later();
        }
    }

    fn look_for_discarded(&self, discards: &mut DiscardCheck) -> Result<()> {
        let (process, active) = (self.target.opened.process(), &self.active);
        let memory = self.target.opened.unshadowed_memory_to_read()?;
        let mut points = Vec::new();
        for arena in &active.arenas {
            points.extend(find_points(process, &memory, arena)?.discarded);
        }
        let points = discards.new_among(&active.plan, &points);
        if !points.is_empty() {
            let maps = read_maps(process)?;
            // Afterwards: another tool that removes this observation says so before it restores the sites.
            refuse_replaced(process, &memory, &active.arenas)?;
            discards.add(&points, &maps);
        }
        Ok(())
    }
}
