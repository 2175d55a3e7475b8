//! What a hit costs that is counted, timed or shown inside the process.

use std::time::{Duration, Instant};

use probes_lib::{Events, Observation, Observer, Options, Selector, Target};

use crate::failure::Result;
use crate::observe::work::{Kind, Work};
use crate::stats::Samples;

/// Where nothing has come, it is asked for again after so long.
const PAUSE: Duration = Duration::from_millis(10);

/// One way to look at the hits of one kind, beside hits that nobody looks at: in turns.
#[derive(Default)]
pub(super) struct Cost {
    bare: Samples,
    observed: Samples,
    /// Hits that were shown, and that could not be.
    pub(super) shown: u64,
    pub(super) lost: u64,
}

impl Cost {
    /// In picoseconds.
    pub(super) fn bare(&self) -> f64 {
        self.bare.median() as f64
    }

    /// In picoseconds.
    pub(super) fn adds(&self) -> f64 {
        self.observed.median() as f64 - self.bare()
    }

    fn take(&mut self, events: &Events) {
        self.shown += events.events.len() as u64;
        self.lost += events.dropped;
    }
}

/// All ways of a row.
#[derive(Default)]
pub(super) struct Ours {
    pub(super) count: Cost,
    pub(super) latency: Cost,
    pub(super) watch: Cost,
    pub(super) watch_int: Cost,
    pub(super) watch_string: Cost,
}

pub(super) fn measure(work: &mut Work, target: &Target, rounds: usize) -> Result<Ours> {
    let mut ours = Ours::default();
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
        // The last one: what others add is compared with it.
        let kind = Kind::Silent;
        let count = Observation::new().count(Selector::name(kind.probe()));
        compare(work, target, kind, &count, &mut ours.count)?;
    }
    Ok(ours)
}

/// One round.
fn compare(
    work: &mut Work,
    target: &Target,
    kind: Kind,
    observation: &Observation,
    cost: &mut Cost,
) -> Result<()> {
    work.only(kind);
    cost.bare.push(work.sample()?.cpu_ps);
    let mut observer = target.observe(observation, Options::default())?;
    let sample = work.sample_while(|until| drain(&mut observer, until, cost))?;
    cost.observed.push(sample.cpu_ps);
    cost.take(&observer.remove()?.events);
    Ok(())
}

/// Takes what is shown, if anything is, as often as a reader would who wants to lose little.
fn drain(observer: &mut Observer<'_>, until: Instant, cost: &mut Cost) -> Result<()> {
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        let events = observer.events()?;
        cost.take(&events);
        if events.events.is_empty() {
            std::thread::sleep(left.min(PAUSE));
        }
    }
    Ok(())
}
