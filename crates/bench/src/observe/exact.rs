//! Whether all hits of a program are counted, and all its pairs timed, while it executes a given
//! number of them as fast as it can.

use std::path::Path;
use std::time::Duration;

use probes_lib::{Observation, ObservationReport, Options, Selector, Target};
use test_support::Talker;

use crate::document::Table;
use crate::failure::{Failure, Result};
use crate::stats::Samples;

/// The approximate duration of a round.
const ROUND: Duration = Duration::from_millis(300);

/// The number of pairs that each thread executes in the first round, which shows how many fit in
/// [`ROUND`].
const TRIAL: u64 = 100_000;

const THREADS: [u64; 2] = [1, 4];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HitsOrPairs {
    Hits,
    Pairs,
}

/// The results of one program.
pub(crate) struct Exact {
    pub(crate) what: HitsOrPairs,
    pub(crate) threads: u64,
    /// How many hits or pairs the program was asked for, in all rounds but the first.
    executed: u64,
    /// How many the [`ObservationReport`]s say, in all rounds but the first.
    observed: u64,
    /// How many were executed in a second, for each round but the first.
    rates: Samples,
}

impl Exact {
    pub(crate) fn rate(&self) -> u64 {
        self.rates.median()
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.executed == self.observed
    }
}

pub(crate) fn measure(file: &Path, rounds: usize) -> Result<Vec<Exact>> {
    let both = [HitsOrPairs::Hits, HitsOrPairs::Pairs].into_iter();
    let measured = both.flat_map(|what| THREADS.map(|threads| (what, threads)));
    measured
        .map(|(what, threads)| measure_one(file, what, threads, rounds))
        .collect()
}

fn measure_one(file: &Path, what: HitsOrPairs, threads: u64, rounds: usize) -> Result<Exact> {
    eprintln!("bench: whether all {what:?} of {threads} threads are observed");
    let mut talker = Talker::start(file);
    let target = Target::open(talker.pid())?;
    let observation = match what {
        HitsOrPairs::Hits => Observation::new().count(Selector::All),
        HitsOrPairs::Pairs => Observation::new().time("start", "stop"),
    };
    let mut exact = Exact {
        what,
        threads,
        executed: 0,
        observed: 0,
        rates: Samples::default(),
    };
    let mut pairs_per_thread = TRIAL;
    for round in 0..=rounds {
        let mut observer = target.observe(&observation, Options::default())?;
        let took = execute(&mut talker, threads, pairs_per_thread)?;
        let count = exact.count(&observer.remove()?)?;
        let executed = threads * pairs_per_thread * exact.expected_per_pair();
        if round > 0 {
            exact.executed += executed;
            exact.observed += count;
            let rate = executed as f64 / took.as_secs_f64();
            exact.rates.push(rate as u64);
        } else {
            // The first round shows how long the pairs take.
            let longer = ROUND.as_secs_f64() / took.as_secs_f64();
            pairs_per_thread = (pairs_per_thread as f64 * longer) as u64;
        }
    }
    Ok(exact)
}

impl Exact {
    fn expected_per_pair(&self) -> u64 {
        match self.what {
            HitsOrPairs::Hits => 2,
            HitsOrPairs::Pairs => 1,
        }
    }

    /// Returns the number of hits or pairs in the results.
    fn count(&self, observed: &ObservationReport) -> Result<u64> {
        match (self.what, &observed.latencies[..]) {
            (HitsOrPairs::Hits, _) => Ok(observed.counts.total()),
            (HitsOrPairs::Pairs, [pairs]) => {
                let others = [pairs.unmatched_starts(), pairs.unmatched_stops()];
                if others != [0; 2] || pairs.dropped() > 0 {
                    eprintln!("bench: {others:?} unmatched, {} dropped", pairs.dropped());
                }
                Ok(pairs.count())
            }
            (HitsOrPairs::Pairs, _) => Err(Failure::new("the pair was not timed")),
        }
    }
}

/// Makes each thread execute `pairs_per_thread` pairs; returns how long that took by the target's clock.
fn execute(talker: &mut Talker, threads: u64, pairs_per_thread: u64) -> Result<Duration> {
    let answer = talker.ask(&format!("pairs {threads} {pairs_per_thread}"), "pairs");
    let number = answer.split_ascii_whitespace().nth(1);
    let number = number.and_then(|number| number.parse().ok());
    let unclear = || Failure::new(format!("the target's answer is not understood: {answer:?}"));
    number.map(Duration::from_nanos).ok_or_else(unclear)
}

pub(crate) fn table(all: &[Exact]) -> String {
    let mut table = Table::new(&[
        "what",
        "threads",
        "per second",
        "executed",
        "observed",
        "missed",
    ]);
    for one in all {
        let what = match one.what {
            HitsOrPairs::Hits => "hits counted",
            HitsOrPairs::Pairs => "pairs timed",
        };
        table.row([
            what.to_owned(),
            one.threads.to_string(),
            millions(one.rate()),
            one.executed.to_string(),
            one.observed.to_string(),
            (one.executed as i64 - one.observed as i64).to_string(),
        ]);
    }
    table.finish()
}

pub(crate) fn millions(number: u64) -> String {
    format!("{:.1} million", number as f64 / 1e6)
}
