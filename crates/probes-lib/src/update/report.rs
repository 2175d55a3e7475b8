//! The state of the probes of a process ([`ProbeStates`]), and what an update did ([`Report`]).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::address::LiveAddr;
use crate::elf::table::{Semaphore, Site};
use crate::error::ToolProcess;
use crate::process::object::Object;
use crate::process::program::{MergedProbe, Program};
use crate::select::AppliedChange;
use crate::site::SiteCode;
use crate::update::code_digest::CodeDigest;
use crate::update::snapshot::{ProbeReading, Snapshot, State};

/// The state of every probe of a process at one moment.
///
/// ```no_run
/// use probes_lib::{State, Target};
///
/// let states = Target::open(4242)?.states()?;
/// let enabled = states.probes().filter(|probe| probe.state() == State::Enabled);
/// for probe in enabled {
///     println!("{} is enabled, its counter is {}", probe.name(), probe.counter());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct ProbeStates {
    program: Arc<Program>,
    pub(crate) snapshot: Snapshot,
    /// By id of the probe.
    readings: Vec<ProbeReading>,
    observed: ObservedPoints,
}

/// What is observed of a process.
#[derive(Debug, Default)]
pub(crate) struct ObservedPoints {
    pub(crate) sites: usize,
    /// Functions, and instructions inside of functions.
    pub(crate) functions: usize,
    /// How many of these are sites of USDT probes.
    pub(crate) usdt_sites: usize,
    /// `None` if nothing is observed, or if the observer has not recorded itself.
    pub(crate) observer: Option<ToolProcess>,
}

impl ProbeStates {
    pub(crate) fn of(
        program: Arc<Program>,
        snapshot: Snapshot,
        observed: ObservedPoints,
    ) -> ProbeStates {
        ProbeStates {
            observed,
            readings: program
                .probes()
                .map(|probe| snapshot.reading(probe))
                .collect(),
            program,
            snapshot,
        }
    }

    /// Returns all probes, sorted by name.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = ProbeState<'_>> {
        self.program.probes().map(|probe| self.state(probe))
    }

    /// Returns the probe of that name.
    pub fn probe(&self, name: &str) -> Option<ProbeState<'_>> {
        self.program.probe(name).map(|probe| self.state(probe))
    }

    /// Returns the objects that have probes: the executable if it has any, then others by address.
    pub fn objects(&self) -> &[Object] {
        self.program.objects()
    }

    /// Returns how many sites are observed ([`Target::observe`](crate::Target::observe)), by a running tool or
    /// one that was killed.
    pub fn observed_sites(&self) -> usize {
        self.observed.sites
    }

    /// Returns how many functions, and instructions inside of functions, are observed, by a running tool or one that
    /// was killed; also of a process without probes ([`Target::open_any`](crate::Target::open_any)).
    pub fn observed_functions(&self) -> usize {
        self.observed.functions
    }

    /// Returns the observer of the process. It may have been killed and have left the process
    /// observed: see [`ToolProcess::is_alive`]. `None` if nothing is observed, or if the
    /// observer is of a version of this crate that does not record it.
    pub fn observer(&self) -> Option<&ToolProcess> {
        self.observed.observer.as_ref()
    }

    /// Returns how many sites and functions are observed, in words to which "observed" may be added:
    /// `2 sites and 1 function are`; `None` if there are none.
    pub fn observed_in_words(&self) -> Option<String> {
        let ObservedPoints {
            sites,
            functions,
            usdt_sites,
            ..
        } = self.observed;
        let functions = functions.saturating_sub(usdt_sites);
        let parts = [
            (sites, "site"),
            (functions, "function"),
            (usdt_sites, "USDT site"),
        ];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts = parts.map(|(count, noun)| {
            let plural = if *count == 1 { "" } else { "s" };
            format!("{count} {noun}{plural}")
        });
        let parts: Vec<String> = parts.collect();
        let are_several = sites + functions + usdt_sites > 1;
        let verb = if are_several { "are" } else { "is" };
        Some(match &parts[..] {
            [] => return None,
            [all] => format!("{all} {verb}"),
            [others @ .., last] => format!("{} and {last} {verb}", others.join(", ")),
        })
    }

    /// Returns what a killed observer has left in the process, in words; `None` if there is nothing, or the observer
    /// is alive. It is not known whether an observer of an earlier version of this crate is alive; the text says so.
    pub fn stale_observation(&self) -> Option<String> {
        let are = self.observed_in_words()?;
        match self.observer() {
            Some(observer) if observer.is_alive || observer.observes_another => None,
            Some(observer) => Some(format!(
                "{are} instrumented, but no observer reads them: installed by {observer}"
            )),
            None => Some(format!(
                "{are} observed by an earlier version of ocaml-probes, running or killed"
            )),
        }
    }

    /// Whether code is known to be patched: a site does not hold the bytes of its file, or anything is observed.
    pub(crate) fn is_any_site_patched(&self) -> bool {
        let mut sites = self.snapshot.sites.iter().enumerate();
        let in_file = |index| self.program.site(index).site.code();
        let is_observed = self.observed.sites + self.observed.functions > 0;
        is_observed || sites.any(|(index, code)| *code != in_file(index))
    }

    /// Whether every probe is either enabled or disabled.
    pub fn is_consistent(&self) -> bool {
        let mut readings = self.readings.iter();
        readings.all(|reading| reading.state != State::Inconsistent)
    }

    /// Whether both were read from the same objects.
    pub(crate) fn has_objects_of(&self, other: &ProbeStates) -> bool {
        Arc::ptr_eq(&self.program, &other.program)
    }

    /// Whether some of the objects can be unloaded at any time, and others loaded in their place.
    pub(crate) fn can_lose_objects(&self) -> bool {
        let program = &self.program;
        let mut objects = program.objects().iter();
        objects.any(|object| program.can_unload(object))
    }

    fn state<'s>(&'s self, probe: MergedProbe<'s>) -> ProbeState<'s> {
        ProbeState {
            states: self,
            probe,
            reading: self.readings[probe.id()],
        }
    }
}

/// The state of one probe.
///
/// ```no_run
/// let states = probes_lib::Target::open(4242)?.states()?;
/// if let Some(probe) = states.probe("req_start") {
///     let enabled = probe.sites().filter(|site| site.enabled() == Some(true));
///     println!("{} of {} sites are enabled", enabled.count(), probe.site_count());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ProbeState<'s> {
    states: &'s ProbeStates,
    probe: MergedProbe<'s>,
    reading: ProbeReading,
}

impl<'s> ProbeState<'s> {
    /// Returns its name.
    pub fn name(&self) -> &'s str {
        self.probe.name()
    }

    /// Returns whether it is enabled, disabled, or neither.
    pub fn state(&self) -> State {
        self.reading.state
    }

    /// Returns the smallest of its counters: how many tools have enabled it.
    pub fn counter(&self) -> u16 {
        self.reading.counter
    }

    /// Returns how many sites it has, in all objects.
    pub fn site_count(&self) -> usize {
        self.probe.parts().map(|part| part.sites.len()).sum()
    }

    /// Returns its sites, object by object, by address.
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

    /// Returns its semaphores, object by object, by address.
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
///
/// ```no_run
/// let states = probes_lib::Target::open(4242)?.states()?;
/// for site in states.probes().flat_map(|probe| probe.sites()) {
///     println!("{} in {}: {}", site.address, site.object.path().display(), site.code);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SiteState<'s> {
    /// The object that has it.
    pub object: &'s Object,
    /// The site in the file.
    pub site: Site<'s>,
    /// The address of its nop in the process.
    pub address: LiveAddr,
    /// The bytes found there.
    pub code: SiteCode,
}

impl SiteState<'_> {
    /// Returns whether it calls its handler; `None` if it holds foreign bytes.
    pub fn enabled(&self) -> Option<bool> {
        self.code.enabled()
    }
}

/// One semaphore in a process.
///
/// ```no_run
/// let states = probes_lib::Target::open(4242)?.states()?;
/// for semaphore in states.probes().flat_map(|probe| probe.semaphores()) {
///     println!("{}: {}", semaphore.address, semaphore.value);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SemaphoreState<'s> {
    /// The object that has it.
    pub object: &'s Object,
    /// The semaphore in the file.
    pub semaphore: Semaphore<'s>,
    /// The address of its counter in the process.
    pub address: LiveAddr,
    /// Its value.
    pub value: u16,
}

/// What an update did: returned by [`Target::update`](crate::Target::update), and taken by
/// [`Target::undo`](crate::Target::undo).
///
/// ```no_run
/// use probes_lib::{Actions, Selector, Target};
///
/// let target = Target::open(4242)?;
/// let report = target.update(&Actions::new().enable(Selector::All))?;
/// for change in &report.changed {
///     println!("{}: {} -> {}", change.name, change.before, change.after);
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The process.
    pub pid: i32,
    /// The selected probes that are neither in `skipped` nor in `not_undone`, in the order of the actions.
    pub changed: Vec<ProbeChange>,
    /// Probes that were to be disabled but were disabled already, and probes whose update was to be undone but had
    /// left nothing to undo.
    pub skipped: Vec<String>,
    /// Probes that [`Target::undo`](crate::Target::undo) has not undone, because one of their sites holds
    /// foreign bytes: a breakpoint, perhaps. When a dead holder is released, also probes that another holder keeps
    /// disabled: their counters would go below zero.
    pub not_undone: Vec<String>,
    /// What can be undone, in the order in which it was done.
    pub(crate) applied: Vec<AppliedChange>,
    /// The longest time that a thread of the process can have been stopped: from the stop of the first
    /// thread until the last one ran again, for all attempts together. Zero if it was not stopped.
    pub stopped: Duration,
    /// Whether closures that the process marshals are accepted by other processes of its program, as far as the
    /// selected probes matter; [`CodeDigest::Unaffected`] if nothing had to be changed.
    pub code_digest: CodeDigest,
}

impl Report {
    /// Returns the report of a process that was not changed.
    pub(crate) fn of_nothing(pid: i32) -> Report {
        Report {
            pid,
            changed: Vec::new(),
            skipped: Vec::new(),
            not_undone: Vec::new(),
            applied: Vec::new(),
            stopped: Duration::ZERO,
            code_digest: CodeDigest::Unaffected,
        }
    }

    /// Returns the report with these probes, which are still held, as not undone.
    pub(crate) fn with_held(mut self, held: &HashSet<String>) -> Report {
        let mut left: Vec<String> = held.iter().cloned().collect();
        left.retain(|name| !self.not_undone.contains(name));
        let place = |name: &String| {
            let changed = self.changed.iter().map(|change| &change.name);
            changed.chain(&self.skipped).position(|it| it == name)
        };
        // Probes that the program does not have come last.
        left.sort_by_cached_key(|name| (place(name).unwrap_or(usize::MAX), name.clone()));
        self.skipped.retain(|name| !held.contains(name));
        self.not_undone.extend(left);
        self
    }
}

/// What an update did to one probe.
///
/// [`Report`] has an example.
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
