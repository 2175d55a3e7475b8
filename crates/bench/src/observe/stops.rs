//! How long a program with many sites is stopped to install an observation, and to remove it.

use probes_lib::{Observation, Options, Selector, Target};

use crate::document::{Table, median_max};
use crate::failure::Result;
use crate::prepare::{self, Program};
use crate::spin::Spin;
use crate::stop_time::MeasuredStops;

const SITES: [u64; 3] = [10, 1_000, 10_000];

/// How long a program with `sites` sites was stopped.
pub(crate) struct Stops {
    pub(crate) sites: u64,
    pub(crate) install: MeasuredStops,
    pub(crate) remove: MeasuredStops,
}

pub(crate) fn measure(programs: &[Program], rounds: usize) -> Result<Vec<Stops>> {
    let of = |sites| {
        eprintln!("bench: observing {sites} sites");
        let program = prepare::with_sites(programs, sites)?;
        let mut spin = Spin::start(&program.path)?;
        let target = Target::open(spin.pid())?;
        let (mut install, mut remove) = <(MeasuredStops, MeasuredStops)>::default();
        let observation = Observation::new().count(Selector::All);
        for _ in 0..rounds {
            let (mut observer, gap) =
                spin.longest_gap_during(|| Ok(target.observe(&observation, Options::default())?))?;
            install.push(observer.stopped(), gap);
            let (observed, gap) = spin.longest_gap_during(|| Ok(observer.remove()?))?;
            remove.push(observed.stopped, gap);
        }
        Ok(Stops {
            sites,
            install,
            remove,
        })
    };
    SITES.into_iter().map(of).collect()
}

pub(crate) fn table(all: &[Stops]) -> String {
    let mut table = Table::new(&["sites", "install", "as reported", "remove", "as reported"]);
    for one in all {
        table.row([
            one.sites.to_string(),
            median_max(&one.install.gap),
            median_max(&one.install.reported),
            median_max(&one.remove.gap),
            median_max(&one.remove.reported),
        ]);
    }
    table.finish()
}
