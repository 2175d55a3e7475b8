//! The times of pairs and calls by keys.

use std::fmt::Write;
use std::time::Duration;

use probes_lib::{KeyedTimes, Times};
use serde::Serialize;

use super::{LatencyBucket, Summary, buckets, nanoseconds};
use crate::output::format::time_prefix;
use crate::output::function_sources::FunctionSources;
use crate::output::keyed::KeyView;
use crate::output::table;
use crate::question::CountedBy;
use crate::text::{Escaped, number_of};

/// The times of each key, the greatest sum first. Together with `other` and `untyped`, they are the times of all pairs
/// and functions.
#[derive(Debug, Serialize)]
pub(super) struct TimesByKey<'l> {
    /// The expressions.
    by: Vec<&'l str>,
    /// The heading of the names.
    #[serde(skip)]
    what: &'static str,
    keys: Vec<TimesOfKey<'l>>,
    /// Those of keys for which there was no room.
    other: KeyFigures,
    /// Those without a key.
    untyped: KeyFigures,
    #[serde(skip)]
    shown: usize,
}

#[derive(Debug, Serialize)]
struct TimesOfKey<'l> {
    /// The pair or the function.
    name: &'l str,
    key: Vec<KeyView<'l>>,
    #[serde(flatten)]
    figures: KeyFigures,
}

#[derive(Debug, Serialize)]
struct KeyFigures {
    #[serde(flatten)]
    summary: Summary,
    #[serde(rename = "sum_ns", serialize_with = "nanoseconds")]
    sum: Duration,
    buckets: Vec<LatencyBucket>,
}

impl KeyFigures {
    fn of(times: &Times) -> KeyFigures {
        KeyFigures {
            summary: Summary::of(times),
            sum: times.sum(),
            buckets: buckets(times.times()),
        }
    }

    /// In nanoseconds, as in the plain format.
    fn plain(&self) -> String {
        format!("{} {}", self.summary, self.sum.as_nanos())
    }

    fn cells(&self) -> impl Iterator<Item = String> {
        let count = self.summary.count.to_string();
        let sum = super::with_unit(self.sum);
        [count].into_iter().chain(self.summary.cells()).chain([sum])
    }
}

impl<'l> TimesByKey<'l> {
    pub(super) fn of(
        times: &'l KeyedTimes,
        by: &'l CountedBy,
        what: &'static str,
        sources: &FunctionSources,
    ) -> TimesByKey<'l> {
        let keys = times.keys().iter().map(|keyed| TimesOfKey {
            name: &keyed.name,
            key: keyed
                .key
                .iter()
                .map(|it| KeyView::of(it, sources))
                .collect(),
            figures: KeyFigures::of(&keyed.times),
        });
        TimesByKey {
            by: by.texts().collect(),
            what,
            keys: keys.collect(),
            other: KeyFigures::of(times.other()),
            untyped: KeyFigures::of(times.untyped()),
            shown: by.shown(),
        }
    }

    /// `12 keys, 3 other, 0 untyped`.
    pub(super) fn sum(&self) -> String {
        let keys = number_of(self.keys.len(), "key");
        let (other, untyped) = (self.other.summary.count, self.untyped.summary.count);
        format!("{keys}, {other} other, {untyped} untyped")
    }

    /// How many times there are, if none has a key.
    pub(super) fn only_untyped(&self) -> Option<u64> {
        let untyped = self.untyped.summary.count;
        let have_keys = !self.keys.is_empty() || self.other.summary.count > 0;
        (untyped > 0 && !have_keys).then_some(untyped)
    }

    /// How many times have keys that found no room.
    pub(super) fn of_other_keys(&self) -> u64 {
        self.other.summary.count
    }

    /// The keys that are shown; and, if others are not, how many times these have, and how many keys they are.
    fn shown(&self) -> (&[TimesOfKey<'l>], Option<(u64, String)>) {
        let (shown, hidden) = self.keys.split_at(self.shown.min(self.keys.len()));
        let counts = hidden.iter().map(|it| it.figures.summary.count);
        let count = counts.fold(0, u64::saturating_add);
        let what = || format!("of {} more", number_of(hidden.len(), "key"));
        (shown, (!hidden.is_empty()).then(|| (count, what())))
    }

    /// The times that have no key of their own.
    fn rest(&self) -> [(&KeyFigures, &'static str); 2] {
        [(&self.other, "other"), (&self.untyped, "untyped")]
    }

    /// A line for each key that is shown, and for what is left.
    pub(super) fn plain(&self, at: Option<Duration>) -> String {
        let at = time_prefix(at);
        let (shown, hidden) = self.shown();
        let mut text = String::new();
        for row in shown {
            let key: Vec<String> = row.key.iter().map(KeyView::plain).collect();
            let (name, key) = (Escaped(row.name), key.join(" "));
            // Writing to a string does not fail.
            let _ = writeln!(text, "{at}by {} {name} {key}", row.figures.plain());
        }
        if let Some((count, what)) = hidden {
            let _ = writeln!(text, "{at}by {count} {what}");
        }
        for (figures, what) in self.rest() {
            let _ = writeln!(text, "{at}by {} {what}", figures.plain());
        }
        text
    }

    pub(super) fn table(&self) -> String {
        let by = self.by.iter().map(|it| Escaped(it).to_string());
        let times = ["count", "mean", "p50", "p90", "p99", "p99.9", "max", "sum"];
        let head = [self.what.to_owned()].into_iter().chain(by);
        let head: Vec<String> = head.chain(times.map(str::to_owned)).collect();
        let (shown, hidden) = self.shown();
        let empty = |many: usize| std::iter::repeat_n(String::new(), many);
        let rows = shown.iter().map(|row| {
            let name = Escaped(row.name).to_string();
            let key = row.key.iter().map(KeyView::plain);
            [name]
                .into_iter()
                .chain(key)
                .chain(row.figures.cells())
                .collect()
        });
        let hidden = hidden.map(|(count, what)| {
            let cells = [what].into_iter().chain(empty(self.by.len()));
            let cells = cells.chain([count.to_string()]);
            cells.chain(empty(times.len() - 1)).collect::<Vec<String>>()
        });
        let rest = self.rest().map(|(figures, what)| {
            let cells = [what.to_owned()].into_iter().chain(empty(self.by.len()));
            cells.chain(figures.cells()).collect()
        });
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        table::table(&head, rows.chain(hidden).chain(rest))
    }
}
