//! What it costs to count, time or record a hit inside the process.

use std::time::{Duration, Instant};

use probes_lib::{Events, Observation, Observer, Options, Selector, Target};

use crate::failure::{Failure, Result};
use crate::observe::workload::{Kind, Workload};
use crate::stats::Samples;

/// The pause after a read that returned no events.
const PAUSE: Duration = Duration::from_millis(10);

/// The cost of hits of one kind, observed and not; the samples alternate.
#[derive(Default)]
pub(super) struct HitCost {
    bare: Samples,
    observed: Samples,
    /// Hits whose events were read, and hits whose events were dropped.
    pub(super) shown: u64,
    pub(super) dropped: u64,
}

impl HitCost {
    /// Returns the cost of a hit that is not observed, in picoseconds.
    pub(super) fn bare(&self) -> f64 {
        self.bare.median() as f64
    }

    /// Returns what observing adds to the cost of a hit, in picoseconds.
    pub(super) fn adds(&self) -> f64 {
        self.observed.median() as f64 - self.bare()
    }

    fn add_events(&mut self, events: &Events) {
        self.shown += events.events.len() as u64;
        self.dropped += events.dropped;
    }
}

/// The costs in a row of the table.
#[derive(Default)]
pub(super) struct OwnCosts {
    pub(super) count: HitCost,
    pub(super) latency: HitCost,
    pub(super) latency_by_key: HitCost,
    pub(super) watch: HitCost,
    pub(super) watch_int: HitCost,
    pub(super) watch_string: HitCost,
}

/// Measures the cost of each kind of hit, `rounds` times.
pub(super) fn measure(work: &mut Workload, target: &Target, rounds: usize) -> Result<OwnCosts> {
    let mut ours = OwnCosts::default();
    for _ in 0..rounds {
        for (kind, cost) in [
            (Kind::Silent, &mut ours.watch),
            (Kind::Int, &mut ours.watch_int),
            (Kind::String, &mut ours.watch_string),
        ] {
            let watch = Observation::new().watch(Selector::name(kind.probe()));
            compare(work, target, kind, &watch, cost)?;
        }
        let latency = Observation::new().time("start", "stop");
        compare(work, target, Kind::Pair, &latency, &mut ours.latency)?;
        // A key of its own for each thread.
        let key = "tid".parse().map_err(|_| Failure::new("no key"))?;
        let by_key = latency.match_by(key);
        compare(work, target, Kind::Pair, &by_key, &mut ours.latency_by_key)?;
        // Last, so that the other tools, which are compared with it, are measured right after it.
        let kind = Kind::Silent;
        let count = Observation::new().count(Selector::name(kind.probe()));
        compare(work, target, kind, &count, &mut ours.count)?;
    }
    Ok(ours)
}

/// Measures hits of one kind without the observation, and then with it.
fn compare(
    work: &mut Workload,
    target: &Target,
    kind: Kind,
    observation: &Observation,
    cost: &mut HitCost,
) -> Result<()> {
    work.run_only(kind);
    cost.bare.push(work.sample()?.cpu_ps);
    let mut observer = target.observe(observation, Options::default())?;
    let sample = work.sample_while(|until| drain(&mut observer, until, cost))?;
    cost.observed.push(sample.cpu_ps);
    cost.add_events(&observer.remove()?.events);
    Ok(())
}

/// Reads events until `until`, often enough that few are dropped.
fn drain(observer: &mut Observer, until: Instant, cost: &mut HitCost) -> Result<()> {
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        let events = observer.events()?;
        cost.add_events(&events);
        if events.events.is_empty() {
            std::thread::sleep(left.min(PAUSE));
        }
    }
    Ok(())
}
