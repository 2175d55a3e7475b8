//! What is exported of a process, as plain numbers, which are added up over its observations. Those that are exported
//! as counters and histograms never decrease. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use probes_lib::{Counts, FunctionLatency, GcPauses, Latency, State, Times};

use super::exposition::shortened;
use crate::output::Evidence;

/// Times: how many are not longer than each bound, how many there are, and their sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Histogram {
    /// For each bound, the shortest first.
    pub(super) not_longer: Vec<u64>,
    pub(super) count: u64,
    pub(super) sum: Duration,
}

/// Times, and what is wrong with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TimedFigures {
    pub(super) times: Histogram,
    /// How many have begun and have not ended.
    pub(super) open: u64,
    /// How many times are missing or doubtful, by why.
    pub(super) problems: BTreeMap<&'static str, u64>,
}

/// What the collector has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CollectorTotals {
    pub(super) pauses: Histogram,
    pub(super) allocated: u64,
    pub(super) promoted: u64,
    pub(super) lost_words: u64,
    /// In bytes, if it is known.
    pub(super) heap: Option<u64>,
}

/// The name of a function and of the file that it is in.
pub(super) type FunctionKey = (String, String);

/// All figures of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessFigures {
    /// Of each probe.
    pub(super) hits: BTreeMap<String, u64>,
    /// Of each pair, by the names of its ends.
    pub(super) pairs: BTreeMap<(String, String), TimedFigures>,
    pub(super) calls: BTreeMap<FunctionKey, TimedFigures>,
    pub(super) collector: Option<CollectorTotals>,
}

/// What is wrong with times of pairs: the values of a label.
pub(super) const PAIR_PROBLEMS: [&str; 6] = [
    "unmatched_stop",
    "lost",
    "interleaved",
    "doubtful",
    "may_interleave",
    "untyped",
];

/// What is wrong with times of calls.
pub(super) const CALL_PROBLEMS: [&str; 3] = ["unmatched_exit", "lost", "unwound"];

impl Histogram {
    /// A histogram of `times`, each given with its number.
    fn of(
        bounds: &[Duration],
        times: impl Iterator<Item = (Duration, u64)>,
        count: u64,
        sum: Duration,
    ) -> Histogram {
        let mut not_longer = vec![0_u64; bounds.len()];
        for (time, count) in times {
            let bucket = bounds.partition_point(|bound| *bound < time);
            if let Some(bucket) = not_longer.get_mut(bucket) {
                *bucket = bucket.saturating_add(count);
            }
        }
        let mut all = 0_u64;
        for bucket in &mut not_longer {
            all = all.saturating_add(*bucket);
            *bucket = all;
        }
        Histogram {
            not_longer,
            count,
            sum,
        }
    }

    /// Raises each number to what was read later, if that is more. It may be less: the longer an observation lasts, the
    /// more exactly the length of a tick is known, so that a time near a bound may turn out longer, and the sum of all
    /// smaller.
    fn raise_to(&mut self, later: Histogram) {
        raise_all(&mut self.not_longer, &later.not_longer);
        self.count = self.count.max(later.count);
        self.sum = self.sum.max(later.sum);
    }

    fn add(&mut self, other: &Histogram) {
        if self.not_longer.is_empty() {
            self.not_longer.clone_from(&other.not_longer);
        } else {
            for (one, other) in self.not_longer.iter_mut().zip(&other.not_longer) {
                *one = one.saturating_add(*other);
            }
        }
        self.count = self.count.saturating_add(other.count);
        self.sum = self.sum.saturating_add(other.sum);
    }
}

fn raise_all(values: &mut Vec<u64>, later: &[u64]) {
    values.resize(later.len(), 0);
    for (value, later) in values.iter_mut().zip(later) {
        *value = (*value).max(*later);
    }
}

impl TimedFigures {
    fn of(
        bounds: &[Duration],
        times: &Times,
        open: u64,
        problems: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> TimedFigures {
        TimedFigures {
            times: Histogram::of(bounds, times.times(), times.count(), times.sum()),
            open,
            problems: problems.into_iter().collect(),
        }
    }

    fn of_pair(bounds: &[Duration], pair: &Latency) -> TimedFigures {
        let problems = [
            pair.unmatched_stops(),
            pair.dropped(),
            pair.interleaved().saturating_add(pair.moved()),
            pair.doubtful(),
            if Evidence::of(pair).is_unseen {
                pair.count()
            } else {
                0
            },
            pair.untyped(),
        ];
        let problems = PAIR_PROBLEMS.into_iter().zip(problems);
        TimedFigures::of(bounds, pair, pair.unmatched_starts(), problems)
    }

    fn of_calls(bounds: &[Duration], calls: &FunctionLatency) -> TimedFigures {
        let problems = [calls.unmatched_exits(), calls.lost(), calls.unwound()];
        let problems = CALL_PROBLEMS.into_iter().zip(problems);
        TimedFigures::of(bounds, calls, calls.running(), problems)
    }

    fn raise_to(&mut self, later: TimedFigures) {
        self.times.raise_to(later.times);
        self.open = later.open;
        for (why, count) in later.problems {
            let most = self.problems.entry(why).or_default();
            *most = (*most).max(count);
        }
    }

    fn add(&mut self, other: &TimedFigures) {
        self.times.add(&other.times);
        self.open = self.open.saturating_add(other.open);
        for (why, count) in &other.problems {
            let all = self.problems.entry(why).or_default();
            *all = all.saturating_add(*count);
        }
    }
}

impl CollectorTotals {
    pub(super) fn of(bounds: &[Duration], pauses: &GcPauses) -> CollectorTotals {
        let all = pauses.all();
        let mut collector = CollectorTotals {
            pauses: Histogram::of(bounds, all.times(), all.count(), all.total()),
            heap: pauses.heap(),
            ..CollectorTotals::default()
        };
        for (_, domain) in pauses.domains() {
            collector.allocated = collector.allocated.saturating_add(domain.allocated);
            collector.promoted = collector.promoted.saturating_add(domain.promoted);
            collector.lost_words = collector.lost_words.saturating_add(domain.lost_words);
        }
        collector
    }

    fn add(&mut self, other: &CollectorTotals) {
        self.pauses.add(&other.pauses);
        self.allocated = self.allocated.saturating_add(other.allocated);
        self.promoted = self.promoted.saturating_add(other.promoted);
        self.lost_words = self.lost_words.saturating_add(other.lost_words);
        self.heap = other.heap;
    }
}

impl ProcessFigures {
    fn add_hits(&mut self, name: &str, hits: u64) {
        let all = self.hits.entry(bounded(name)).or_default();
        *all = all.saturating_add(hits);
    }

    /// The figures of what has been recorded. Functions that have one name in one file are one.
    pub(super) fn of(
        bounds: &[Duration],
        counts: &Counts,
        pairs: &[Latency],
        calls: &[FunctionLatency],
    ) -> ProcessFigures {
        let mut figures = ProcessFigures::default();
        for (name, hits) in counts.probes() {
            figures.add_hits(name, hits);
        }
        // These are USDT probes.
        for function in counts.functions() {
            figures.add_hits(function.name, function.hits);
        }
        for pair in pairs {
            let key = (bounded(pair.start()), bounded(pair.stop()));
            let all = figures.pairs.entry(key).or_default();
            all.add(&TimedFigures::of_pair(bounds, pair));
        }
        for function in calls {
            let object = function.object().file_name().unwrap_or_default();
            let key = (bounded(function.name()), bounded(&object.to_string_lossy()));
            let all = figures.calls.entry(key).or_default();
            all.add(&TimedFigures::of_calls(bounds, function));
        }
        figures
    }

    /// How many rows these figures have: what has labels of its own.
    pub(super) fn rows(&self) -> usize {
        self.hits.len() + self.pairs.len() + self.calls.len()
    }

    /// Leaves out all but this many rows: always the same ones, because those of an observation do not change.
    pub(super) fn keep_rows(&mut self, most: usize) {
        let mut left = most;
        let mut keeps = || {
            let keeps = left > 0;
            left = left.saturating_sub(1);
            keeps
        };
        self.hits.retain(|_, _| keeps());
        self.pairs.retain(|_, _| keeps());
        self.calls.retain(|_, _| keeps());
    }

    /// Takes over the later figures of the same observation, except where they would be less.
    pub(super) fn raise_to(&mut self, later: ProcessFigures) {
        for (name, hits) in later.hits {
            let most = self.hits.entry(name).or_default();
            *most = (*most).max(hits);
        }
        for (key, times) in later.pairs {
            self.pairs.entry(key).or_default().raise_to(times);
        }
        for (key, times) in later.calls {
            self.calls.entry(key).or_default().raise_to(times);
        }
        if let Some(later) = later.collector {
            self.collector = Some(later);
        }
    }

    /// Adds the figures of another observation of the same process.
    pub(super) fn add(&mut self, other: &ProcessFigures) {
        for (name, hits) in &other.hits {
            let all = self.hits.entry(name.clone()).or_default();
            *all = all.saturating_add(*hits);
        }
        for (key, times) in &other.pairs {
            self.pairs.entry(key.clone()).or_default().add(times);
        }
        for (key, times) in &other.calls {
            self.calls.entry(key.clone()).or_default().add(times);
        }
        if let Some(other) = &other.collector {
            self.collector.get_or_insert_default().add(other);
        }
    }

    /// Clears what is only known while a process is observed: what is open, and the size of the heap.
    pub(super) fn close(&mut self) {
        let timed = self.pairs.values_mut().chain(self.calls.values_mut());
        timed.for_each(|it| it.open = 0);
        self.forget_heap();
    }

    /// Clears the size of the heap, which is only known while runtime events are read.
    pub(super) fn forget_heap(&mut self) {
        if let Some(collector) = &mut self.collector {
            collector.heap = None;
        }
    }
}

/// A name as the value of a label.
fn bounded(name: &str) -> String {
    shortened(name).into_owned()
}

/// The value of a probe's state.
pub(super) fn value_of_state(state: State) -> &'static str {
    match state {
        State::Enabled => "1",
        State::Disabled => "0",
        _ => "NaN",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: [Duration; 3] = [
        Duration::from_millis(1),
        Duration::from_millis(10),
        Duration::from_millis(100),
    ];

    fn histogram(times: &[(u64, u64)]) -> Histogram {
        let times = times
            .iter()
            .map(|(time, count)| (Duration::from_micros(*time), *count));
        let count = times.clone().map(|(_, count)| count).sum();
        let sum = times.clone().map(|(time, count)| time * count as u32).sum();
        Histogram::of(&BOUNDS, times, count, sum)
    }

    #[test]
    fn buckets_count_times_up_to_their_bounds() {
        let histogram = histogram(&[(5, 2), (1000, 1), (1001, 4), (100_000, 1), (200_000, 3)]);
        assert_eq!(histogram.not_longer, [3, 7, 8]);
        assert_eq!(histogram.count, 11);
    }

    #[test]
    fn buckets_of_damaged_figures_never_decrease() {
        let damaged = [(5, u64::MAX), (6, 1), (2000, 7)];
        let times = damaged.map(|(time, count)| (Duration::from_micros(time), count));
        let histogram = Histogram::of(&BOUNDS, times.into_iter(), 8, Duration::ZERO);
        assert_eq!(histogram.not_longer, [u64::MAX; 3]);
    }

    #[test]
    fn figures_never_decrease() {
        let mut earlier = histogram(&[(1000, 5)]);
        earlier.raise_to(histogram(&[(1001, 6)]));
        assert_eq!((earlier.not_longer, earlier.count), (vec![5, 6, 6], 6));
        let of = |hits| ProcessFigures {
            hits: BTreeMap::from([("a".to_owned(), hits)]),
            ..ProcessFigures::default()
        };
        let mut figures = of(7);
        figures.raise_to(of(3));
        assert_eq!(figures, of(7));
        figures.add(&of(3));
        assert_eq!(figures, of(10));
    }

    #[test]
    fn same_rows_are_left_out_each_time() {
        let names = ["c", "a", "b"].map(|name| (name.to_owned(), 1));
        let mut figures = ProcessFigures {
            hits: BTreeMap::from(names),
            pairs: BTreeMap::from([(("a".to_owned(), "b".to_owned()), TimedFigures::default())]),
            ..ProcessFigures::default()
        };
        figures.keep_rows(3);
        assert_eq!((figures.hits.len(), figures.pairs.len()), (3, 0));
        figures.keep_rows(1);
        assert_eq!(figures.hits.keys().collect::<Vec<_>>(), ["a"]);
        assert_eq!(figures.rows(), 1);
    }
}
