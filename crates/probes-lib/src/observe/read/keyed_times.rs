//! [`KeyedTimes`]: how long pairs and calls took, by keys, from what the trampolines have recorded of them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

use crate::error::Result;
use crate::memory::ReadMemory;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::keys::histograms;
use crate::observe::layout::values::ValuesLayout;
use crate::observe::plan::ObservationPlan;
use crate::observe::read::keyed_values::RecordedHistograms;
use crate::observe::read::keys::Key;
use crate::observe::read::times::Times;
use crate::observe::read::values::ValueHistogram;
use crate::ticks::TickMeasurement;

/// How long pairs and calls took, by keys ([`Observation::time_by`](crate::Observation::time_by)). Each time is counted
/// once: for its key, or in [`other`](KeyedTimes::other) or [`untyped`](KeyedTimes::untyped).
///
/// Times are accurate to 3 %; the sum and the longest are exact.
///
/// ```no_run
/// use probes_lib::{Observation, Options, Target};
///
/// let observation = Observation::new().time("req_start", "req_end").time_by("arg0".parse()?);
/// let observer = Target::open(4242)?.observe(&observation, Options::default())?;
/// if let Some(times) = observer.keyed_times()? {
///     for keyed in times.keys() {
///         println!("{} {:?}: p99 {:?}", keyed.name, keyed.key, keyed.times.quantile(0.99));
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct KeyedTimes {
    recorded: Option<RecordedTimes>,
    /// The keys of `recorded`, once they are asked for.
    keys: OnceLock<Vec<KeyedTime>>,
    other: Times,
    untyped: Times,
}

/// How long the pairs or calls of a key took.
///
/// [`KeyedTimes`] has an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyedTime {
    /// The function, or the probes of the pair, `START,STOP`.
    pub name: String,
    /// What each expression of the key was.
    pub key: Vec<Key>,
    /// The times of that key.
    pub times: Times,
}

impl KeyedTimes {
    /// Returns the times of several processes together; each is given with its pid. If they are `distinguished`, the
    /// pid is the first part of each key; if not, the times of the same key in several processes are added up. `None`
    /// if there are no processes.
    ///
    /// ```no_run
    /// # let each: Vec<(i32, probes_lib::KeyedTimes)> = unimplemented!();
    /// let each = each.iter().map(|(pid, times)| (*pid, times));
    /// let all = probes_lib::KeyedTimes::of_processes(each, false);
    /// ```
    pub fn of_processes<'t>(
        each: impl IntoIterator<Item = (i32, &'t KeyedTimes)>,
        distinguished: bool,
    ) -> Option<KeyedTimes> {
        let mut all: HashMap<(String, Vec<Key>), Times> = HashMap::new();
        let mut rest: Option<(Times, Times)> = None;
        for (pid, of_process) in each {
            match &mut rest {
                None => rest = Some((of_process.other.clone(), of_process.untyped.clone())),
                Some((other, untyped)) => {
                    other.add(&of_process.other);
                    untyped.add(&of_process.untyped);
                }
            }
            for keyed in of_process.keys() {
                let process = distinguished.then_some(Key::Process(pid));
                let key = process.into_iter().chain(keyed.key.iter().cloned());
                let known = all.entry((keyed.name.clone(), key.collect()));
                known
                    .and_modify(|times| times.add(&keyed.times))
                    .or_insert_with(|| keyed.times.clone());
            }
        }
        let (other, untyped) = rest?;
        let keys = all
            .into_iter()
            .map(|((name, key), times)| KeyedTime { name, key, times });
        Some(KeyedTimes {
            recorded: None,
            keys: OnceLock::from(longest_first(keys)),
            other,
            untyped,
        })
    }

    /// Returns the keys, those with the most time first.
    pub fn keys(&self) -> &[KeyedTime] {
        self.keys.get_or_init(|| {
            let recorded = self.recorded.iter();
            longest_first(recorded.flat_map(RecordedTimes::of_keys))
        })
    }

    /// Returns the times of keys for which there was no room: more than about 1,024 are not distinguished.
    pub fn other(&self) -> &Times {
        &self.other
    }

    /// Returns the times that have no key, because an argument does not have the type that the expression needs, or
    /// memory could not be read.
    pub fn untyped(&self) -> &Times {
        &self.untyped
    }

    /// Reads them; `None` if times are not distinguished by keys.
    pub(crate) fn read(
        pid: i32,
        source: &impl ReadMemory,
        plan: &ObservationPlan,
        arenas: &[Arena],
        ticks: &TickMeasurement,
    ) -> Result<Option<KeyedTimes>> {
        if !plan.times_by_key {
            return Ok(None);
        }
        let Some(histograms) = RecordedHistograms::read(pid, source, plan, arenas)? else {
            return Ok(None);
        };
        let recorded = RecordedTimes {
            histograms,
            layout: plan.shared.values,
            nanoseconds: ticks.nanoseconds_per_tick(),
        };
        let times = |number| recorded.times(&recorded.histograms.histograms.histogram(number));
        Ok(Some(KeyedTimes {
            other: times(histograms::OTHER),
            untyped: times(histograms::UNTYPED_TIMES),
            recorded: Some(recorded),
            keys: OnceLock::new(),
        }))
    }
}

impl fmt::Debug for KeyedTimes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("KeyedTimes");
        fields.field("keys", &self.keys());
        fields.field("other", &self.other);
        fields.field("untyped", &self.untyped);
        fields.finish()
    }
}

/// The times of keys as they were in a process.
#[derive(Clone)]
struct RecordedTimes {
    histograms: RecordedHistograms,
    layout: ValuesLayout,
    /// The length of a tick.
    nanoseconds: f64,
}

impl RecordedTimes {
    fn of_keys(&self) -> impl Iterator<Item = KeyedTime> {
        let keys = self.histograms.of_keys().into_iter();
        keys.filter_map(|(mut key, histogram)| {
            let Some(Key::Probe(name)) = key.pop() else {
                return None;
            };
            let times = self.times(&histogram);
            (times.count() > 0).then_some(KeyedTime { name, key, times })
        })
    }

    fn times(&self, histogram: &ValueHistogram) -> Times {
        times(histogram, self.layout, self.nanoseconds)
    }
}

/// Returns the keys, those with the most time first.
fn longest_first(keys: impl Iterator<Item = KeyedTime>) -> Vec<KeyedTime> {
    let mut keys: Vec<KeyedTime> = keys.collect();
    keys.sort_by(|one, other| {
        let by_sum = Reverse(one.times.sum()).cmp(&Reverse(other.times.sum()));
        by_sum.then_with(|| (&one.name, &one.key).cmp(&(&other.name, &other.key)))
    });
    keys
}

/// Returns the times in a histogram of ticks.
fn times(histogram: &ValueHistogram, layout: ValuesLayout, nanoseconds: f64) -> Times {
    let counts = histogram.buckets().iter().map(|bucket| {
        let least = bucket.least.unwrap_or(0);
        // It is less than that only if something has overwritten the table.
        let number = layout.bucket(least, None);
        let number = number.saturating_sub(layout.negative());
        (number, bucket.count)
    });
    let longest = histogram.max().unwrap_or(0);
    Times::of(
        counts,
        layout.precision(),
        u64::try_from(longest).unwrap_or(u64::MAX),
        histogram.sum().and_then(|sum| u64::try_from(sum).ok()),
        nanoseconds,
    )
}
