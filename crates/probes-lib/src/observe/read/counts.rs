//! [`Counts`]: how often the sites of probes were executed.

use std::sync::Arc;

use crate::address::LiveAddr;
use crate::elf::table::Site;
use crate::process::object::Object;
use crate::process::program::Program;

/// How often the sites of probes were executed since they have been observed.
#[derive(Clone, Debug)]
pub struct Counts {
    pub(crate) program: Arc<Program>,
    /// By index in the program; `None` of sites that are not counted.
    pub(crate) hits: Vec<Option<u64>>,
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
    /// Each probe that is counted, by name, and its hits at all of its sites.
    pub fn probes(&self) -> impl Iterator<Item = (&str, u64)> {
        let names = self.program.probes().map(|probe| probe.name());
        names.filter_map(|name| Some((name, self.hits(name)?)))
    }

    /// The hits of one probe at all of its sites, if it is counted.
    pub fn hits(&self, name: &str) -> Option<u64> {
        let sites = self.program.probe(name)?.sites();
        sites
            .filter_map(|site| self.hits[site])
            .reduce(u64::saturating_add)
    }

    /// Each site of a probe that is counted, object by object, by address.
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
        let hits = self.hits.iter().flatten();
        hits.fold(0, |sum, hits| sum.saturating_add(*hits))
    }
}
