//! Histograms of values by keys, in one shape for all formats. The field names are those of the JSON output.

use std::fmt::Write;
use std::time::Duration;

use probes_lib::{KeyedHistograms, Observer, RefusedFunction, Target, ValueHistogram};
use serde::Serialize;

use super::FunctionSources;
use super::bars;
use super::format::{ReportedFigures, VERSION, seconds, seconds_or_null, time_prefix};
use super::histograms::{HEAD, ValueFigures};
use super::keyed::KeyView;
use super::refused::RefusedView;
use super::subjects::Subjects;
use super::svg::{self, Chart};
use super::table;
use crate::question::{CountedBy, WantedHistogram};
use crate::text::{Escaped, number_of};

/// The histograms that one observer or several have recorded, and the functions that are not observed.
#[derive(Clone)]
pub(crate) struct KeyedHistogramReading {
    histograms: KeyedHistograms,
    refused: Vec<RefusedFunction>,
}

impl KeyedHistogramReading {
    pub(crate) fn of(observer: &mut Observer) -> Result<KeyedHistogramReading, probes_lib::Error> {
        Ok(KeyedHistogramReading::last(
            observer.keyed_histograms()?,
            observer.refused(),
        ))
    }

    /// The histograms of several processes together. If these are `distinguished`, the pid is the first part of a key.
    pub(crate) fn of_processes(
        each: &[(i32, KeyedHistogramReading)],
        distinguished: bool,
    ) -> KeyedHistogramReading {
        let histograms = each.iter().map(|(pid, it)| (*pid, &it.histograms));
        KeyedHistogramReading {
            histograms: KeyedHistograms::of_processes(histograms, distinguished),
            refused: each.iter().flat_map(|(_, it)| it.refused.clone()).collect(),
        }
    }

    /// Of histograms that were already read; `None` if there are none by key.
    pub(crate) fn last(
        histograms: Option<KeyedHistograms>,
        refused: &[RefusedFunction],
    ) -> KeyedHistogramReading {
        KeyedHistogramReading {
            histograms: histograms.unwrap_or_default(),
            refused: refused.to_vec(),
        }
    }
}

/// What was asked: what the histograms are of, and by which keys.
#[derive(Clone, Copy)]
pub(crate) struct KeyedQuestion<'q> {
    pub(crate) of: &'q WantedHistogram,
    pub(crate) by: &'q CountedBy,
}

/// The histograms of the keys of a process, or of several, those with most values first.
#[derive(Serialize)]
#[serde(tag = "type", rename = "keyed_histogram")]
pub(crate) struct KeyedHistogramReport<'h> {
    version: u32,
    #[serde(flatten)]
    subjects: Subjects<'h>,
    /// The time since the observation began; `None` once it has ended.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// The expression.
    of: &'h str,
    /// The keys' expressions.
    by: Vec<&'h str>,
    keys: Vec<KeyedHistogramRow<'h>>,
    /// Values of keys for which there was no room.
    other: Values,
    /// Hits without a value or a key.
    untyped: u64,
    /// The functions that are not observed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<RefusedView<'h>>,
    #[serde(skip)]
    asked: KeyedQuestion<'h>,
}

#[derive(Serialize)]
struct KeyedHistogramRow<'h> {
    key: Vec<KeyView<'h>>,
    #[serde(flatten)]
    values: Values,
}

#[derive(Serialize)]
struct Values {
    count: u64,
    #[serde(flatten)]
    figures: ValueFigures,
}

impl Values {
    fn of(histogram: &ValueHistogram) -> Values {
        Values {
            count: histogram.count(),
            figures: ValueFigures::of(histogram),
        }
    }

    /// `count 3 sum 12 mean 4.0 min 1 max 9 p50 2 …`.
    fn text(&self) -> String {
        match self.count {
            0 => "count 0".to_owned(),
            count => format!("count {count} {}", self.figures.text()),
        }
    }
}

impl KeyedHistogramRow<'_> {
    fn title(&self) -> String {
        let key: Vec<String> = self.key.iter().map(KeyView::plain).collect();
        key.join(" ")
    }
}

impl<'h> KeyedHistogramReport<'h> {
    /// The histograms that were recorded in the time `seconds`; `sources` name callers.
    pub(crate) fn new(
        targets: &'h [Target],
        reading: &'h KeyedHistogramReading,
        seconds: Duration,
        asked: KeyedQuestion<'h>,
        sources: &FunctionSources,
    ) -> KeyedHistogramReport<'h> {
        let keys = reading
            .histograms
            .keys()
            .iter()
            .map(|keyed| KeyedHistogramRow {
                key: keyed
                    .key
                    .iter()
                    .map(|it| KeyView::of(it, sources))
                    .collect(),
                values: Values::of(&keyed.values),
            });
        KeyedHistogramReport {
            version: VERSION,
            subjects: Subjects::of(targets),
            at: None,
            seconds,
            of: asked.of.expression.as_str(),
            by: asked.by.texts().collect(),
            keys: keys.collect(),
            other: Values::of(reading.histograms.other()),
            untyped: reading.histograms.untyped(),
            refused: reading.refused.iter().map(RefusedView::of).collect(),
            asked,
        }
    }

    /// The keys that are shown, and those that are not.
    fn shown(&self) -> (&[KeyedHistogramRow<'h>], &[KeyedHistogramRow<'h>]) {
        let shown = self.asked.by.shown().min(self.keys.len());
        self.keys.split_at(shown)
    }

    /// What is not shown: how many values, and of what.
    fn hidden(&self) -> Option<(u64, String)> {
        let (_, hidden) = self.shown();
        let keys = || format!("of {} more", number_of(hidden.len(), "key"));
        (!hidden.is_empty()).then(|| (sum(hidden), keys()))
    }

    /// What has a chart: the keys that are shown, and the other ones together, if they have values.
    fn charted(&self) -> impl Iterator<Item = (String, &Values)> {
        let shown = self.shown().0.iter().map(|it| (it.title(), &it.values));
        let other = (self.other.count > 0).then(|| ("other".to_owned(), &self.other));
        shown.chain(other)
    }
}

impl ReportedFigures for KeyedHistogramReport<'_> {
    /// A line of figures for each key that is shown, and its chart; and lines for what is left.
    fn plain(&self) -> String {
        let at = time_prefix(self.at);
        let histogram = |values: &Values, title: &str| {
            let chart = bars::chart(&values.figures.bars(self.asked.of.linear));
            format!("{at}{} {title}\n{chart}", values.text())
        };
        let shown = self.shown().0.iter();
        let mut text: String = shown.map(|it| histogram(&it.values, &it.title())).collect();
        if let Some((many, what)) = self.hidden() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{at}count {many} {what}");
        }
        text += &histogram(&self.other, "other");
        text + &format!("{at}untyped {}\n", self.untyped)
    }

    /// The table, and a chart of each key that is shown.
    fn charts(&self) -> String {
        let mut text = self.table();
        for (title, values) in self.charted() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "\n{title}, {}:", Escaped(self.of));
            text += &bars::chart(&values.figures.bars(self.asked.of.linear));
        }
        text
    }

    /// A table of the figures of each key that is shown, and of what is left.
    fn table(&self) -> String {
        let by = self.by.iter().map(|it| Escaped(it).to_string());
        let head = by.chain(["count".to_owned()]);
        let head: Vec<String> = head.chain(HEAD.map(str::to_owned)).collect();
        let row = |key: Vec<String>, values: &Values| {
            let cells = key.into_iter().chain([values.count.to_string()]);
            cells.chain(values.figures.cells()).collect::<Vec<_>>()
        };
        let shown = self.shown().0.iter().map(|it| {
            let key = it.key.iter().map(KeyView::plain).collect();
            row(key, &it.values)
        });
        let named = |what: String| {
            let mut key = vec![String::new(); self.by.len()];
            key[0] = what;
            key
        };
        let without_figures = |(many, what): (u64, String)| {
            let key = named(what).into_iter().chain([many.to_string()]);
            key.chain(HEAD.map(|_| String::new())).collect::<Vec<_>>()
        };
        let hidden = self.hidden().map(without_figures);
        let other = row(named("other".to_owned()), &self.other);
        let untyped = without_figures((self.untyped, "untyped".to_owned()));
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        table::table(&head, shown.chain(hidden).chain([other, untyped]))
    }

    /// A picture with a chart of each key that is shown.
    fn picture(&self) -> String {
        let charts = self.charted().map(|(title, values)| Chart {
            title: format!("{title}, {}", self.of),
            figures: values.text(),
            caution: None,
            bars: values.figures.bars(self.asked.of.linear),
        });
        svg::picture(&charts.collect::<Vec<_>>())
    }

    /// What cannot be observed is left to the last report.
    fn so_far(mut self) -> Self {
        self.at = Some(self.seconds);
        self.refused.clear();
        self
    }

    /// How many keys there are, and what they add up to: `12 keys, 4711 values, 0 other, 0 untyped`.
    fn sum(&self) -> (usize, String) {
        let keys = number_of(self.keys.len(), "key");
        let (values, other, untyped) = (sum(&self.keys), self.other.count, self.untyped);
        let values = number_of(values, "value");
        let sum = format!("{keys}, {values}, {other} other, {untyped} untyped");
        (self.keys.len(), sum)
    }

    /// How many hits there are, if all are untyped.
    fn only_untyped(&self) -> Option<u64> {
        let are_typed = !self.keys.is_empty() || self.other.count > 0;
        (self.untyped > 0 && !are_typed).then_some(self.untyped)
    }

    fn of_other_keys(&self) -> u64 {
        self.other.count
    }
}

fn sum(rows: &[KeyedHistogramRow<'_>]) -> u64 {
    let counts = rows.iter().map(|row| row.values.count);
    counts.fold(0, u64::saturating_add)
}
