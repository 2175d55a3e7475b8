//! The goals for what observing a hit may cost, each next to what was measured.

use probes_lib::Action;

use crate::document::{Table, median_max};
use crate::failure::{Failure, Result};
use crate::observe::exact::{Exact, HitsOrPairs, millions};
use crate::observe::others::Tool;
use crate::observe::stops::Stops;
use crate::observe::{Costs, ns};

/// The most that each kind of observation may add to a hit or an event, in picoseconds.
const MAX_COUNT_PS: f64 = 8e3;
const MAX_LATENCY_PS: f64 = 20e3;
const MAX_LATENCY_BY_KEY_PS: f64 = 40e3;
const MAX_WATCH_PS: f64 = 25e3;

/// bpftrace has to add at least this many times as much as `count`.
const MIN_BPFTRACE_RATIO: f64 = 50.0;

/// The least number of hits to be counted, and of pairs to be timed, in a second.
const MIN_HITS_PER_SECOND: u64 = 50_000_000;
const MIN_PAIRS_PER_SECOND: u64 = 5_000_000;

/// The number of sites for which stop times have a goal.
const SITES: u64 = 10_000;
/// The longest stop time allowed to install or to remove an observation of that many sites, in nanoseconds.
const MAX_STOP_NS: u64 = 10_000_000;

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
        let one = one.ok_or_else(|| Failure::new("nothing was measured with one thread"))?;
        let [_, on_or_off] = one.row_head();
        let mut cost_row = |what: &str, goal: &str, adds: f64, most: f64| {
            row(
                &format!("{what}, {on_or_off}"),
                ns(adds),
                goal,
                Some(adds <= most),
            );
        };
        let ours = &one.ours;
        cost_row(
            "count adds to a hit",
            "at most 8 ns",
            ours.count.adds(),
            MAX_COUNT_PS,
        );
        cost_row(
            "latency adds to an event",
            "at most 20 ns",
            ours.latency.adds(),
            MAX_LATENCY_PS,
        );
        cost_row(
            "latency by key adds to an event",
            "at most 40 ns",
            ours.latency_by_key.adds(),
            MAX_LATENCY_BY_KEY_PS,
        );
        let watch = ours.watch_int.adds();
        cost_row(
            "watch adds to a hit, with an int",
            "at most 25 ns",
            watch,
            MAX_WATCH_PS,
        );
        let ratio = one.ratio_to(Tool::Bpftrace);
        row(
            &format!("bpftrace adds, {on_or_off}"),
            ratio.map_or("–".to_owned(), |ratio| {
                format!("{ratio:.0} times as much")
            }),
            "at least 50 times",
            ratio.map(|ratio| ratio >= MIN_BPFTRACE_RATIO),
        );
    }
    for (what, text, goal, least) in [
        (
            HitsOrPairs::Hits,
            "hits a second counted",
            "50 million, none missed",
            MIN_HITS_PER_SECOND,
        ),
        (
            HitsOrPairs::Pairs,
            "pairs a second timed",
            "5 million, none missed",
            MIN_PAIRS_PER_SECOND,
        ),
    ] {
        let mut all = exact.iter();
        let one = all.find(|one| one.threads == 1 && one.what == what);
        let one = one.ok_or_else(|| Failure::new("nothing was measured with one thread"))?;
        let reached = one.rate() >= least && one.is_exact();
        row(text, millions(one.rate()), goal, Some(reached));
    }
    let stops = stops.iter().find(|stops| stops.sites == SITES);
    let stops = stops.ok_or_else(|| Failure::new("10,000 sites were not measured"))?;
    for (what, stop) in [
        ("stop time to install, 10,000 sites", &stops.install.gap),
        ("stop time to remove, 10,000 sites", &stops.remove.gap),
    ] {
        let reached = stop.median() <= MAX_STOP_NS;
        row(what, median_max(stop), "at most 10 ms", Some(reached));
    }
    Ok(table.finish())
}
