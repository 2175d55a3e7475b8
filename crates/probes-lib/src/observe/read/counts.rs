//! [`Counts`]: how often the sites of probes were executed.

use std::sync::Arc;

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::data_source;
use crate::process::object::Object;
use crate::process::program::Program;

/// How often the sites of probes were executed since the observation began.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::All);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// for (name, hits) in observer.counts()?.probes() {
///     println!("{name} {hits}");
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Counts {
    program: Arc<Program>,
    /// By index of the site in the program; `None` if it is not counted.
    hits: Vec<Option<u64>>,
}

/// How often one site was executed.
///
/// ```no_run
/// # let counts: probes_lib::Counts = unimplemented!();
/// for site in counts.sites("req_start") {
///     println!("{} at {}: {}", site.object.path().display(), site.address, site.hits);
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SiteHits<'c> {
    /// The object that it is in.
    pub object: &'c Object,
    /// The site.
    pub site: Site<'c>,
    /// The address of its nop in the process.
    pub address: LiveAddr,
    /// How often it was executed, enabled or not.
    pub hits: u64,
}

impl Counts {
    /// Reads the counters of all points that are counted.
    pub(crate) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
    ) -> Result<Counts> {
        let program = plan.program.clone();
        let mut hits = vec![None; program.site_count()];
        let mut planned = plan.points.iter();
        for arena in arenas {
            let data = data_source::read(pid, source, arena.data(), arena.counters_len())?;
            for (count, planned) in arena.hits(&data).into_iter().zip(planned.by_ref()) {
                hits[planned.site] = planned.role.is_counted.then_some(count);
            }
        }
        Ok(Counts { program, hits })
    }

    /// Returns each probe that is counted, by name, with the sum of the hits of its sites.
    pub fn probes(&self) -> impl Iterator<Item = (&str, u64)> {
        let names = self.program.probes().map(|probe| probe.name());
        names.filter_map(|name| Some((name, self.hits(name)?)))
    }

    /// Returns the sum of the hits of a probe's sites; `None` if it is not counted.
    pub fn hits(&self, name: &str) -> Option<u64> {
        let sites = self.program.probe(name)?.sites();
        sites
            .filter_map(|site| self.hits[site])
            .reduce(u64::saturating_add)
    }

    /// Returns each site of a probe that is counted: object by object, by address.
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

    /// Returns the objects that had probes when the observation began.
    pub fn objects(&self) -> &[Object] {
        self.program.objects()
    }

    /// Returns the sum of all hits.
    pub fn total(&self) -> u64 {
        let hits = self.hits.iter().flatten();
        hits.fold(0, |sum, hits| sum.saturating_add(*hits))
    }
}
