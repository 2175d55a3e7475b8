//! [`DiscardedPatches`]: patches that are gone although the observation was not removed.
//!
//! A patched page is a private copy of a page of a file. If the process discards the copy, the bytes of the
//! file are back, and the sites of the page record nothing any more.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::address::LiveAddr;
use crate::observe::functions::ObservedFunctions;
use crate::observe::plan::{ObservationPlan, PointOwner};
use crate::process::maps::{self, Mapping};
use crate::process::program::Program;

/// The shortest time between two checks.
const INTERVAL: Duration = Duration::from_millis(200);

/// Sites and functions of an observation that record no hits any more: the process has discarded its copies of the
/// patched pages (by `madvise(MADV_DONTNEED)`, or by a new mapping of the file), or has unloaded an object and loaded
/// it again at the same address. Their hits, times and events are missing. Those of objects that are no longer loaded
/// are not among them.
///
/// ```no_run
/// # let mut observer: probes_lib::Observer = unimplemented!();
/// let report = observer.remove()?;
/// for name in report.discarded.probes() {
///     println!("the figures of {name} are too low");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DiscardedPatches {
    program: Arc<Program>,
    functions: Arc<ObservedFunctions>,
    points: BTreeSet<PointOwner>,
}

impl DiscardedPatches {
    /// Returns how many sites and functions there are.
    pub fn patches(&self) -> usize {
        self.points.len()
    }

    /// Returns the names of the probes of these sites, in order.
    pub fn probes(&self) -> impl Iterator<Item = &str> {
        let probes = self.program.probes();
        let has_any = |site: usize| self.points.contains(&PointOwner::Site(site));
        let probes =
            probes.filter(move |probe| !self.points.is_empty() && probe.sites().any(has_any));
        probes.map(|probe| probe.name())
    }

    /// Returns the names of the functions, in the order of their addresses.
    pub fn functions(&self) -> impl Iterator<Item = &str> {
        self.points.iter().filter_map(|point| match point {
            PointOwner::Site(_) => None,
            PointOwner::Function(function) => {
                Some(&*self.functions.functions[*function].wanted.name)
            }
        })
    }
}

/// Collects the patches that are found to be discarded while an observation lasts.
#[derive(Debug)]
pub(crate) struct DiscardCheck {
    found: DiscardedPatches,
    /// When the process is checked next; `None`: never, because its sites are being restored.
    next: Option<Instant>,
}

impl DiscardCheck {
    pub(crate) fn new(plan: &ObservationPlan) -> DiscardCheck {
        DiscardCheck {
            found: DiscardedPatches {
                program: plan.program.clone(),
                functions: plan.functions.clone(),
                points: BTreeSet::new(),
            },
            next: Some(Instant::now()),
        }
    }

    /// Returns whether a check of the process is due; if so, the next one is due after [`INTERVAL`].
    pub(crate) fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.next.is_some_and(|next| next <= now);
        if is_due {
            self.next = Some(now + INTERVAL);
        }
        is_due
    }

    /// Ends the checks: from now on, unpatched sites are those that we have restored.
    pub(crate) fn end(&mut self) {
        self.next = None;
    }

    /// Returns the points at these `addresses` that were not found before; none once the checks have ended.
    pub(crate) fn new_among(
        &self,
        plan: &ObservationPlan,
        addresses: &[LiveAddr],
    ) -> Vec<(LiveAddr, PointOwner)> {
        if self.next.is_none() || addresses.is_empty() {
            return Vec::new();
        }
        let addresses: HashSet<&LiveAddr> = addresses.iter().collect();
        let points = plan.points.iter();
        let points = points.map(|planned| (planned.point.address, planned.of));
        points
            .filter(|(address, of)| addresses.contains(address) && !self.found.points.contains(of))
            .collect()
    }

    /// Adds points whose patch is gone, except sites whose object is no longer mapped there, and functions where no
    /// code is mapped.
    pub(crate) fn add(&mut self, points: &[(LiveAddr, PointOwner)], maps: &[Mapping]) {
        let program = &self.found.program;
        let is_loaded = |&&(address, of): &&(LiveAddr, PointOwner)| {
            let mapping = maps::find(maps, address, 1);
            mapping.is_some_and(|mapping| match of {
                PointOwner::Site(site) => program.site(site).object.is_mapped_by(mapping),
                PointOwner::Function(_) => mapping.executable,
            })
        };
        let loaded: Vec<PointOwner> = points.iter().filter(is_loaded).map(|(_, of)| *of).collect();
        self.found.points.extend(loaded);
    }

    pub(crate) fn found(&self) -> DiscardedPatches {
        self.found.clone()
    }
}
