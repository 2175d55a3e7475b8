//! Reads the states of all probes of a running process, and reads them again if the process may have changed during
//! the reading.

use crate::error::{Error, ProcessError, Result};
use crate::memory::shadow::Shadowed;
use crate::process::maps::{Mapping, read_maps};
use crate::process::memory::ProcessMemory;
use crate::process::opened::OpenedProcess;
use crate::process::pagemap::UnwrittenPages;
use crate::update::attempt::ATTEMPTS;
use crate::update::lock;
use crate::update::report::{ObservedPoints, ProbeStates};
use crate::update::snapshot::Layout;

/// The memory of a process that may be observed.
pub(crate) struct ObservedMemory {
    /// With the shadow contents of observed sites.
    pub(crate) shadowed: Shadowed<ProcessMemory>,
    /// What is observed.
    pub(crate) points: ObservedPoints,
}

/// Reads the states of the probes of one process.
pub(crate) struct StatesReader<'r, F> {
    pub(crate) opened: &'r OpenedProcess,
    /// Finds what is observed in the memory of the process, which has these mappings.
    pub(crate) find_observed: F,
}

impl<F: Fn(ProcessMemory, &[Mapping]) -> ObservedMemory> StatesReader<'_, F> {
    /// Reads the states, without stopping the process.
    ///
    /// # Errors
    ///
    /// See [`Target::states`](crate::Target::states).
    pub(crate) fn read(&self) -> Result<ProbeStates> {
        let opened = self.opened;
        for _ in 0..ATTEMPTS {
            match opened.while_nothing_unloads(|| self.read_until_consistent()) {
                // An object has just been unloaded or loaded.
                Err(error) if opened.is_unloaded(&error) => {}
                Err(error) if error.keeps_changing() => {}
                done => return done,
            }
        }
        self.keeps_changing()
    }

    /// Reads the states, and reads them again if they are inconsistent: states that are just being
    /// written, or whose object is just being loaded, look inconsistent too, so one reading proves
    /// nothing. Returns inconsistent states only if they stay inconsistent.
    fn read_until_consistent(&self) -> Result<ProbeStates> {
        let mut states = self.read_once()?;
        let mut always_the_same = true;
        for _ in 1..ATTEMPTS {
            if states.is_consistent() {
                return Ok(states);
            }
            let keeps_objects = !states.can_lose_objects();
            if !keeps_objects {
                // Reading the maps waits for a thread that is changing them, so without a pause
                // each reading may come at the same point of what that thread repeats.
                lock::pause();
            }
            let again = self.read_once()?;
            let is_same = again.has_objects_of(&states) && again.snapshot == states.snapshot;
            always_the_same &= is_same;
            states = again;
            // A traced process may be stopped in the middle of an update: then equal readings prove nothing.
            if is_same && keeps_objects && !self.is_traced() {
                return Ok(states);
            }
        }
        if states.is_consistent() || always_the_same || !states.can_lose_objects() {
            return Ok(states);
        }
        self.keeps_changing()
    }

    fn read_once(&self) -> Result<ProbeStates> {
        let opened = self.opened;
        let maps = opened.maps().map_err(|error| opened.executed_or(error))?;
        let image = opened.renew_image(&maps);
        let program = &image.program;
        // The memory is opened after the maps are read, because opening it is what notices an exec.
        let memory = (self.find_observed)(opened.unshadowed_memory_to_read()?, &maps);
        let unwritten = UnwrittenPages::of(opened.process(), program.objects(), maps);
        let is_from_file = |start, len| {
            let unwritten = unwritten.as_ref();
            unwritten.is_some_and(|unwritten| unwritten.holds(start, len))
        };
        let layout = Layout::of(program, program.probes());
        let snapshot = layout
            .read_states(opened.pid(), &memory.shadowed, program, is_from_file)
            .map_err(|error| opened.executed_or(error))?;
        let states = ProbeStates::of(program.clone(), snapshot, memory.points);
        if !states.is_consistent() && !image.still_matches(&read_maps(opened.process())?) {
            return self.keeps_changing();
        }
        Ok(states)
    }

    fn is_traced(&self) -> bool {
        let status = self.opened.process().status();
        status.is_ok_and(|status| status.tracer != 0)
    }

    fn keeps_changing<T>(&self) -> Result<T> {
        let pid = self.opened.pid();
        Err(Error::of_process(pid, ProcessError::KeepsChanging))
    }
}
