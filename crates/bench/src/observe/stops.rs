//! How long a program with many sites stands still to be observed, and to be put back.

use probes_lib::{Observation, Options, Selector, Target};

use crate::document::{Table, median_max};
use crate::failure::Result;
use crate::prepare::{self, Program};
use crate::spin::Spin;
use crate::stillness::Switch;

const SITES: [u64; 3] = [10, 1_000, 10_000];

/// With so many sites.
pub(crate) struct Stops {
    pub(crate) sites: u64,
    pub(crate) begin: Switch,
    pub(crate) end: Switch,
}

pub(crate) fn measure(programs: &[Program], rounds: usize) -> Result<Vec<Stops>> {
    let of = |sites| {
        eprintln!("bench: observing {sites} sites");
        let program = prepare::with_sites(programs, sites)?;
        let mut spin = Spin::start(&program.path)?;
        let target = Target::open(spin.pid())?;
        let (mut begin, mut end) = <(Switch, Switch)>::default();
        let observation = Observation::new().count(Selector::All);
        for _ in 0..rounds {
            let (mut observer, gap) =
                spin.watch(|| Ok(target.observe(&observation, Options::default())?))?;
            begin.push(observer.stopped(), gap);
            let (observed, gap) = spin.watch(|| Ok(observer.remove()?))?;
            end.push(observed.stopped, gap);
        }
        Ok(Stops { sites, begin, end })
    };
    SITES.into_iter().map(of).collect()
}

pub(crate) fn table(all: &[Stops]) -> String {
    let mut table = Table::new(&[
        "sites",
        "to be observed",
        "as reported",
        "to be put back",
        "as reported",
    ]);
    for one in all {
        table.row([
            one.sites.to_string(),
            median_max(&one.begin.gap),
            median_max(&one.begin.reported),
            median_max(&one.end.gap),
            median_max(&one.end.reported),
        ]);
    }
    table.finish()
}
