//! What callers see of a process: the state of its probes, and what an update did.

use std::sync::Arc;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::elf::table::{Semaphore, Site};
use crate::process::object::Object;
use crate::process::program::{Member, Program};
use crate::site::SiteCode;
use crate::update::snapshot::{Reading, Snapshot, State};

/// The state of every probe of a process at one moment.
#[derive(Debug)]
pub struct ProbeStates {
    program: Arc<Program>,
    pub(crate) snapshot: Snapshot,
    /// By id of the probe.
    readings: Vec<Reading>,
    observed_sites: usize,
}

impl ProbeStates {
    pub(crate) fn of(
        program: Arc<Program>,
        snapshot: Snapshot,
        observed_sites: usize,
    ) -> ProbeStates {
        ProbeStates {
            observed_sites,
            readings: program
                .probes()
                .map(|probe| snapshot.reading(probe))
                .collect(),
            program,
            snapshot,
        }
    }

    /// All probes, sorted by name.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = ProbeState<'_>> {
        self.program.probes().map(|probe| self.state(probe))
    }

    /// The probe of that name.
    pub fn probe(&self, name: &str) -> Option<ProbeState<'_>> {
        self.program.probe(name).map(|probe| self.state(probe))
    }

    /// The objects that have probes: the executable if it has any, then others by address.
    pub fn objects(&self) -> &[Object] {
        self.program.objects()
    }

    /// How many sites are observed ([`Target::observe`](crate::Target::observe)): by somebody who does so
    /// now, or who was killed.
    pub fn observed_sites(&self) -> usize {
        self.observed_sites
    }

    /// Whether every probe is either on or off.
    pub fn is_consistent(&self) -> bool {
        let mut readings = self.readings.iter();
        readings.all(|reading| reading.state != State::Inconsistent)
    }

    /// Whether both are of the same look at what is loaded.
    pub(crate) fn has_objects_of(&self, other: &ProbeStates) -> bool {
        Arc::ptr_eq(&self.program, &other.program)
    }

    /// Whether some of the objects can be unloaded at any time, and others loaded in their place.
    pub(crate) fn can_lose_objects(&self) -> bool {
        let program = &self.program;
        let mut objects = program.objects().iter();
        objects.any(|object| program.can_unload(object))
    }

    fn state<'s>(&'s self, probe: Member<'s>) -> ProbeState<'s> {
        ProbeState {
            states: self,
            probe,
            reading: self.readings[probe.id()],
        }
    }
}

/// The state of one probe.
#[derive(Clone, Copy, Debug)]
pub struct ProbeState<'s> {
    states: &'s ProbeStates,
    probe: Member<'s>,
    reading: Reading,
}

impl<'s> ProbeState<'s> {
    /// Its name.
    pub fn name(&self) -> &'s str {
        self.probe.name()
    }

    /// Whether it is on, off, or neither.
    pub fn state(&self) -> State {
        self.reading.state
    }

    /// How many want it enabled: the smallest of its counters.
    pub fn counter(&self) -> u16 {
        self.reading.counter
    }

    /// How many sites it has, in all objects.
    pub fn site_count(&self) -> usize {
        self.probe.parts().map(|part| part.sites.len()).sum()
    }

    /// Its sites, object by object, by address.
    pub fn sites(&self) -> impl Iterator<Item = SiteState<'s>> + use<'s> {
        let states = self.states;
        self.probe.parts().flat_map(move |part| {
            let sites = part.probe.sites().zip(part.sites);
            sites.map(move |(site, index)| SiteState {
                object: part.object,
                site,
                address: part.object.bias.live(site.address()),
                code: states.snapshot.sites[index],
            })
        })
    }

    /// Its semaphores, object by object, by address.
    pub fn semaphores(&self) -> impl Iterator<Item = SemaphoreState<'s>> + use<'s> {
        let states = self.states;
        self.probe.parts().flat_map(move |part| {
            let semaphores = part.probe.semaphores().zip(part.semaphores);
            semaphores.map(move |(semaphore, index)| SemaphoreState {
                object: part.object,
                semaphore,
                address: part.object.bias.live(semaphore.counter()),
                value: states.snapshot.counters[index],
            })
        })
    }
}

/// One site in a process.
#[derive(Clone, Copy, Debug)]
pub struct SiteState<'s> {
    /// The object that has it.
    pub object: &'s Object,
    /// The site in the file.
    pub site: Site<'s>,
    /// Where its nop is in the process.
    pub address: LiveAddr,
    /// The bytes found there.
    pub code: SiteCode,
}

impl SiteState<'_> {
    /// Whether it calls its handler; `None` if it holds foreign bytes.
    pub fn enabled(&self) -> Option<bool> {
        self.code.enabled()
    }
}

/// One semaphore in a process.
#[derive(Clone, Copy, Debug)]
pub struct SemaphoreState<'s> {
    /// The object that has it.
    pub object: &'s Object,
    /// The semaphore in the file.
    pub semaphore: Semaphore<'s>,
    /// Where the counter is in the process.
    pub address: LiveAddr,
    /// Its value.
    pub value: u16,
}

/// What an update did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The process.
    pub pid: i32,
    /// The probes that were selected and not passed over, in the order of the actions.
    pub changed: Vec<ProbeChange>,
    /// Probes that were to be disabled and were off already.
    pub skipped: Vec<String>,
    /// Probes that [`Target::undo`](crate::Target::undo) has left as they are, because a
    /// site of theirs holds foreign bytes: a breakpoint, perhaps.
    pub not_undone: Vec<String>,
    /// What can be applied back, in the order in which it was done.
    pub(crate) applied: Vec<AppliedChange>,
    /// How long a thread of the process stop_time still, at most: from the first one's stop to the last
    /// one's release. Zero if nothing had to be changed.
    pub stopped: Duration,
}

impl Report {
    /// Of a process to which nothing was done.
    pub(crate) fn of_nothing(pid: i32) -> Report {
        Report {
            pid,
            changed: Vec::new(),
            skipped: Vec::new(),
            not_undone: Vec::new(),
            applied: Vec::new(),
            stopped: Duration::ZERO,
        }
    }
}

/// What an update did to the counters of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AppliedChange {
    pub(crate) name: String,
    pub(crate) stage: u8,
    /// What was added to each of its counters, and where they were.
    pub(crate) added: Box<[(LiveAddr, i32)]>,
}

/// What an update did to one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeChange {
    /// Its name.
    pub name: String,
    /// The smallest of its counters before.
    pub before: u16,
    /// The smallest of its counters after.
    pub after: u16,
    /// How many of its sites were switched.
    pub sites: usize,
}
