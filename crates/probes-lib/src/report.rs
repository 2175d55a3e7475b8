//! What callers see of a process: the state of its probes, and what an update did.

use std::path::Path;
use std::time::Duration;

use crate::addr::{LiveAddr, LoadBias};
use crate::site::SiteCode;
use crate::snapshot::{Reading, Snapshot, State};
use crate::table::{Probe, ProbeTable, Semaphore, Site};

/// The state of every probe of a process at one moment.
#[derive(Debug)]
pub struct ProbeStates<'t> {
    table: &'t ProbeTable,
    bias: LoadBias,
    pub(crate) snapshot: Snapshot,
    /// By id of the probe.
    readings: Vec<Reading>,
}

impl<'t> ProbeStates<'t> {
    pub(crate) fn of(table: &'t ProbeTable, bias: LoadBias, snapshot: Snapshot) -> Self {
        ProbeStates {
            readings: table
                .probes()
                .map(|probe| snapshot.reading(probe))
                .collect(),
            table,
            bias,
            snapshot,
        }
    }

    /// All probes, sorted by name.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = ProbeState<'_, 't>> {
        self.table.probes().map(|probe| self.state(probe))
    }

    /// The probe of that name.
    pub fn probe(&self, name: &str) -> Option<ProbeState<'_, 't>> {
        self.table.probe(name).map(|probe| self.state(probe))
    }

    /// Whether every probe is either on or off.
    pub fn is_consistent(&self) -> bool {
        let mut readings = self.readings.iter();
        readings.all(|reading| reading.state != State::Inconsistent)
    }

    fn state(&self, probe: Probe<'t>) -> ProbeState<'_, 't> {
        ProbeState {
            states: self,
            probe,
            reading: self.readings[probe.id()],
        }
    }
}

/// The state of one probe.
#[derive(Clone, Copy, Debug)]
pub struct ProbeState<'s, 't> {
    states: &'s ProbeStates<'t>,
    probe: Probe<'t>,
    reading: Reading,
}

impl<'s, 't> ProbeState<'s, 't> {
    /// Its name.
    pub fn name(&self) -> &'t str {
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

    /// The file that has it.
    pub fn object(&self) -> &'t Path {
        self.states.table.path()
    }

    /// Its sites, by address.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = SiteState<'t>> + use<'s, 't> {
        let states = self.states;
        let indices = self.probe.site_range();
        self.probe
            .sites()
            .zip(indices)
            .map(|(site, index)| SiteState {
                site,
                address: states.bias.live(site.address()),
                code: states.snapshot.sites[index],
            })
    }

    /// Its semaphores, by address.
    pub fn semaphores(&self) -> impl ExactSizeIterator<Item = SemaphoreState<'t>> + use<'s, 't> {
        let states = self.states;
        let indices = self.probe.semaphore_range();
        let semaphores = self.probe.semaphores().zip(indices);
        semaphores.map(|(semaphore, index)| SemaphoreState {
            semaphore,
            address: states.bias.live(semaphore.counter()),
            value: states.snapshot.counters[index],
        })
    }
}

/// One site in a process.
#[derive(Clone, Copy, Debug)]
pub struct SiteState<'t> {
    /// The site in the file.
    pub site: Site<'t>,
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
pub struct SemaphoreState<'t> {
    /// The semaphore in the file.
    pub semaphore: Semaphore<'t>,
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
    pub passed_over: Vec<String>,
    /// Probes that [`Target::put_back`](crate::Target::put_back) has left as they are, because a
    /// site of theirs holds foreign bytes: a breakpoint, perhaps.
    pub left: Vec<String>,
    /// What can be taken back, in the order in which it was done.
    pub(crate) taken: Vec<Taken>,
    /// How long a thread of the process stood still, at most: from the first one's stop to the last
    /// one's release. Zero if nothing had to be changed.
    pub stopped: Duration,
}

/// What an update did to the counters of one probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) name: String,
    pub(crate) stage: u8,
    /// What was added to each of its counters.
    pub(crate) added: Box<[i32]>,
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
