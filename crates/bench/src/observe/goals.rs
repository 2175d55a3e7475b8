//! The figures of observing hits that there are goals for, next to them.

use probes_lib::Action;

use crate::document::{Table, median_max};
use crate::failure::{Failure, Result};
use crate::observe::exact::{Exact, What, millions};
use crate::observe::others::Tool;
use crate::observe::stops::Stops;
use crate::observe::{Costs, ns};

/// In picoseconds.
const COUNT: f64 = 8e3;
const LATENCY: f64 = 20e3;
const WATCH: f64 = 25e3;

/// How many times more bpftrace is to add.
const TIMES: f64 = 50.0;

/// A second.
const HITS: u64 = 50_000_000;
const PAIRS: u64 = 5_000_000;

/// With 10,000 sites.
const SITES: u64 = 10_000;
const STOP_NS: u64 = 10_000_000;

pub(crate) fn table(costs: &[Costs], exact: &[Exact], stops: &[Stops]) -> Result<String> {
    let mut table = Table::new(&["one thread", "measured", "goal", "reached"]);
    let mut row = |what: &str, measured: String, goal: &str, reached: Option<bool>| {
        let reached = match reached {
            Some(true) => "yes",
            Some(false) => "no",
            None => "–",
        };
        table.row([what, &measured, goal, reached].map(str::to_owned));
    };
    for action in [Action::Disable, Action::Enable] {
        let mut all = costs.iter();
        let one = all.find(|one| one.threads == 1 && one.action == action);
        let one = one.ok_or_else(|| Failure::new("one thread was not measured"))?;
        let [_, on] = one.who();
        let mut costs = |what: &str, goal: &str, adds: f64, most: f64| {
            row(&format!("{what}, {on}"), ns(adds), goal, Some(adds <= most));
        };
        let ours = &one.ours;
        costs(
            "count adds to a hit",
            "at most 8 ns",
            ours.count.adds(),
            COUNT,
        );
        costs(
            "latency adds to an event",
            "at most 20 ns",
            ours.latency.adds(),
            LATENCY,
        );
        let watch = ours.watch_int.adds();
        costs(
            "watch adds to a hit, with an int",
            "at most 25 ns",
            watch,
            WATCH,
        );
        let times = one.times(Tool::Bpftrace);
        row(
            &format!("bpftrace adds, {on}"),
            times.map_or("–".to_owned(), |times| {
                format!("{times:.0} times as much")
            }),
            "at least 50 times",
            times.map(|times| times >= TIMES),
        );
    }
    for (what, text, goal, least) in [
        (
            What::Hits,
            "hits a second counted",
            "50 million, none missed",
            HITS,
        ),
        (
            What::Pairs,
            "pairs a second timed",
            "5 million, none missed",
            PAIRS,
        ),
    ] {
        let mut all = exact.iter();
        let one = all.find(|one| one.threads == 1 && one.what == what);
        let one = one.ok_or_else(|| Failure::new("one thread was not measured"))?;
        let reached = one.rate() >= least && one.is_exact();
        row(text, millions(one.rate()), goal, Some(reached));
    }
    let stops = stops.iter().find(|stops| stops.sites == SITES);
    let stops = stops.ok_or_else(|| Failure::new("10,000 sites were not measured"))?;
    for (what, stop) in [
        ("stood to be observed, 10,000 sites", &stops.begin.gap),
        ("stood to be put back, 10,000 sites", &stops.end.gap),
    ] {
        let reached = stop.median() <= STOP_NS;
        row(what, median_max(stop), "at most 10 ms", Some(reached));
    }
    Ok(table.finish())
}
