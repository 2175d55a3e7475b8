//! Histograms of values, in one shape for all formats. The field names are those of the JSON output.

use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

use probes_lib::{
    Counts, Linear, LiveAddr, Observer, Quantile, RefusedFunction, Target, ValueBucket,
    ValueHistogram,
};
use serde::Serialize;

use super::bars;
use super::format::{Format, ReportedFigures, VERSION, seconds, seconds_or_null, time_prefix};
use super::refused::RefusedView;
use super::runtime_events::{LostOfDomain, LostWords, lost_lines, lost_of_domains};
use super::subjects::Subjects;
use super::svg::{self, Chart};
use super::table;
use super::view::text;
use crate::question::WantedHistogram;
use crate::text::{Escaped, TERMINAL_LINES, number_of, or_dash};

/// What an observer has recorded so far.
#[derive(Clone)]
pub(crate) struct HistogramReading {
    /// If processes are distinguished, each with its pid.
    histograms: Vec<(Option<i32>, ValueHistogram)>,
    refused: Vec<RefusedFunction>,
}

impl HistogramReading {
    pub(crate) fn of(observer: &mut Observer) -> Result<HistogramReading, probes_lib::Error> {
        let histograms = observer.histograms()?;
        Ok(HistogramReading::new(histograms, observer.refused()))
    }

    fn new(histograms: Vec<ValueHistogram>, refused: &[RefusedFunction]) -> HistogramReading {
        HistogramReading {
            histograms: histograms.into_iter().map(|it| (None, it)).collect(),
            refused: refused.to_vec(),
        }
    }

    /// The histograms of several processes, given with their pids: of each by itself if they are `distinguished`, else
    /// together.
    pub(crate) fn of_processes(
        each: &[(i32, HistogramReading)],
        distinguished: bool,
    ) -> HistogramReading {
        let of = |reading: &HistogramReading| -> Vec<ValueHistogram> {
            let histograms = reading.histograms.iter();
            histograms.map(|(_, it)| it.clone()).collect()
        };
        let refused = each.iter().flat_map(|(_, it)| it.refused.clone()).collect();
        let histograms: Vec<_> = if distinguished {
            let each = each.iter();
            each.flat_map(|(pid, it)| of(it).into_iter().map(|it| (Some(*pid), it)))
                .collect()
        } else {
            let each: Vec<Vec<ValueHistogram>> = each.iter().map(|(_, it)| of(it)).collect();
            let all = ValueHistogram::of_processes(each.iter().map(|it| &it[..]));
            all.into_iter().map(|it| (None, it)).collect()
        };
        HistogramReading {
            histograms,
            refused,
        }
    }

    /// What it had recorded when it ended.
    pub(crate) fn last(histograms: Vec<ValueHistogram>, counts: &Counts) -> HistogramReading {
        HistogramReading::new(histograms, counts.refused())
    }
}

/// The values of runtime events of one name.
pub(crate) struct EventHistogram {
    /// What the events are.
    pub(crate) group: &'static str,
    /// Whether the values are times in nanoseconds.
    pub(crate) are_times: bool,
    pub(crate) values: ValueHistogram,
}

/// The histograms of a process, or of several.
#[derive(Serialize)]
#[serde(tag = "type", rename = "histogram")]
pub(crate) struct Histograms<'h> {
    version: u32,
    #[serde(flatten)]
    subjects: Subjects<'h>,
    /// The time since the observation began; `None` once it has ended.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    /// The expression.
    of: String,
    /// Of many, those without hits are left out.
    histograms: Vec<HistogramRow<'h>>,
    /// How many there are.
    total: usize,
    /// The functions that have none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    refused: Vec<RefusedView<'h>>,
    /// Of runtime events, what was lost; `None` of hits.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<Vec<LostOfDomain>>,
    #[serde(skip)]
    linear: Option<Linear>,
}

/// The values of a probe or function.
#[derive(Serialize)]
struct HistogramRow<'h> {
    /// If processes are distinguished.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    name: &'h str,
    /// What runtime events are, and the unit of their values.
    #[serde(flatten)]
    event: Option<EventOfRow>,
    #[serde(flatten)]
    function: Option<FunctionPlace<'h>>,
    count: u64,
    untyped: u64,
    #[serde(flatten)]
    figures: ValueFigures,
}

/// The figures of values, except how many there are.
#[derive(Serialize)]
pub(super) struct ValueFigures {
    sum: Option<i128>,
    mean: Option<f64>,
    min: Option<i128>,
    max: Option<i128>,
    p50: Option<Range>,
    p90: Option<Range>,
    p99: Option<Range>,
    p999: Option<Range>,
    buckets: Vec<BucketView>,
}

#[derive(Serialize)]
struct EventOfRow {
    group: &'static str,
    /// `None` of plain numbers.
    unit: Option<&'static str>,
}

#[derive(Serialize)]
struct FunctionPlace<'h> {
    object: Cow<'h, str>,
    #[serde(serialize_with = "text")]
    address: LiveAddr,
}

/// What a quantile can be.
#[derive(Clone, Copy, Serialize)]
struct Range {
    least: i128,
    most: i128,
}

/// The values from the least to the most, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct BucketView {
    least: Option<i128>,
    most: Option<i128>,
    count: u64,
}

impl<'h> Histograms<'h> {
    /// The histograms that were recorded in the time `seconds`.
    pub(crate) fn new(
        targets: &'h [Target],
        reading: &'h HistogramReading,
        seconds: Duration,
        wanted: &'h WantedHistogram,
    ) -> Histograms<'h> {
        let rows = reading.histograms.iter();
        let rows = rows.map(|(pid, histogram)| HistogramRow::of(*pid, histogram));
        Histograms {
            refused: reading.refused.iter().map(RefusedView::of).collect(),
            linear: wanted.linear,
            ..Histograms::of_rows(targets, rows.collect(), seconds, wanted.expression.as_str())
        }
    }

    /// Those of the values of runtime events that were read in the time `seconds`.
    pub(crate) fn of_events(
        target: &'h [Target],
        events: &'h [EventHistogram],
        seconds: Duration,
        linear: Option<Linear>,
        lost: &LostWords,
    ) -> Histograms<'h> {
        let rows = events.iter().map(|event| HistogramRow {
            event: Some(EventOfRow {
                group: event.group,
                unit: event.are_times.then_some("ns"),
            }),
            ..HistogramRow::of(None, &event.values)
        });
        Histograms {
            lost: Some(lost_of_domains(lost)),
            linear,
            ..Histograms::of_rows(target, rows.collect(), seconds, "value")
        }
    }

    fn of_rows(
        targets: &'h [Target],
        mut histograms: Vec<HistogramRow<'h>>,
        seconds: Duration,
        of: &str,
    ) -> Histograms<'h> {
        let total = histograms.len();
        if total > TERMINAL_LINES {
            histograms.retain(|it| it.count + it.untyped > 0);
        }
        // Stable: of equal ones the first by name or address.
        histograms.sort_by_key(|row| std::cmp::Reverse(row.count));
        Histograms {
            version: VERSION,
            subjects: Subjects::of(targets),
            at: None,
            seconds,
            of: of.to_owned(),
            histograms,
            total,
            refused: Vec::new(),
            lost: None,
            linear: None,
        }
    }

    /// Lines for what was lost.
    fn lost(&self, format: Format, at: &str) -> String {
        lost_lines(self.lost.as_deref().unwrap_or_default(), format, at)
    }

    /// What the values of a row are.
    fn of(&self, row: &HistogramRow<'_>) -> &str {
        let unit = row.event.as_ref().and_then(|event| event.unit);
        unit.unwrap_or(&self.of)
    }
}

impl ReportedFigures for Histograms<'_> {
    /// A line of figures for each, and its chart.
    fn plain(&self) -> String {
        let (mut text, at) = (String::new(), time_prefix(self.at));
        for row in &self.histograms {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{at}{} {}", row.text(), row.title());
            text += &bars::chart(&row.figures.bars(self.linear));
        }
        text + &self.lost(Format::Plain, &at)
    }

    /// A table of their figures, and a chart of each.
    fn charts(&self) -> String {
        let mut text = self.table();
        for row in self.histograms.iter().filter(|it| it.count > 0) {
            // Writing to a string does not fail.
            let _ = writeln!(text, "\n{}, {}:", row.title(), Escaped(self.of(row)));
            text += &bars::chart(&row.figures.bars(self.linear));
        }
        text
    }

    /// A table of their figures.
    fn table(&self) -> String {
        let head = ["name", "count", "untyped"].into_iter().chain(HEAD);
        let head: Vec<&str> = head.collect();
        let rows = self.histograms.iter().map(|row| {
            let mut cells = vec![row.title(), row.count.to_string(), row.untyped.to_string()];
            cells.extend(row.figures.cells());
            cells
        });
        table::table(&head, rows) + &self.lost(Format::Table, "")
    }

    /// A picture of each.
    fn picture(&self) -> String {
        let charts = self.histograms.iter().map(|row| Chart {
            title: format!("{}, {}", row.title(), self.of(row)),
            figures: row.text(),
            caution: None,
            bars: row.figures.bars(self.linear),
        });
        svg::picture(&charts.collect::<Vec<_>>())
    }

    fn so_far(mut self) -> Self {
        self.at = Some(self.seconds);
        self
    }

    /// How many there are, and what they add up to: `2 histograms, 4711 values, 0 untyped`.
    fn sum(&self) -> (usize, String) {
        let add = |of: fn(&HistogramRow<'_>) -> u64| {
            let all = self.histograms.iter().map(of);
            all.fold(0, u64::saturating_add)
        };
        let (values, untyped) = (add(|it| it.count), add(|it| it.untyped));
        let histograms = number_of(self.total, "histogram");
        let values = number_of(values, "value");
        (
            self.total,
            format!("{histograms}, {values}, {untyped} untyped"),
        )
    }

    /// How many hits there are, if all are untyped.
    fn only_untyped(&self) -> Option<u64> {
        let mut values = self.histograms.iter().map(|it| it.count);
        let untyped = self.histograms.iter().map(|it| it.untyped);
        let untyped = untyped.fold(0, u64::saturating_add);
        (untyped > 0 && values.all(|count| count == 0)).then_some(untyped)
    }
}

impl<'h> HistogramRow<'h> {
    fn of(pid: Option<i32>, histogram: &'h ValueHistogram) -> HistogramRow<'h> {
        let function = histogram.function().map(|(object, address)| FunctionPlace {
            object: object.to_string_lossy(),
            address,
        });
        HistogramRow {
            pid,
            name: histogram.name(),
            event: None,
            function,
            count: histogram.count(),
            untyped: histogram.untyped(),
            figures: ValueFigures::of(histogram),
        }
    }

    /// The name: if processes are distinguished, with the pid before it; of runtime events, with their group before it.
    fn title(&self) -> String {
        let name = Escaped(self.name);
        if let Some(event) = &self.event {
            return format!("{} {name}", event.group);
        }
        match self.pid {
            Some(pid) => format!("{pid} {name}"),
            None => name.to_string(),
        }
    }

    /// `count 3 untyped 0 sum 12 mean 4.0 min 1 max 9 p50 2 …`.
    fn text(&self) -> String {
        let (count, untyped) = (self.count, self.untyped);
        format!("count {count} untyped {untyped} {}", self.figures.text())
    }
}

/// The columns of [`ValueFigures::cells`].
pub(super) const HEAD: [&str; 7] = ["mean", "min", "p50", "p90", "p99", "p99.9", "max"];

impl ValueFigures {
    pub(super) fn of(histogram: &ValueHistogram) -> ValueFigures {
        let quantile = |share| histogram.quantile(share).map(Range::of);
        ValueFigures {
            sum: histogram.sum(),
            mean: histogram.mean(),
            min: histogram.min(),
            max: histogram.max(),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            buckets: histogram.buckets().iter().map(BucketView::of).collect(),
        }
    }

    fn quantiles(&self) -> [(&'static str, Option<Range>); 4] {
        [
            ("p50", self.p50),
            ("p90", self.p90),
            ("p99", self.p99),
            ("p99.9", self.p999),
        ]
    }

    fn mean(&self) -> String {
        or_dash(self.mean.map(|mean| format!("{mean:.1}")))
    }

    /// `sum 12 mean 4.0 min 1 max 9 p50 2 …`.
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "sum {} mean {} min {} max {}",
            or_dash(self.sum),
            self.mean(),
            or_dash(self.min),
            or_dash(self.max),
        );
        for (name, quantile) in self.quantiles() {
            // Writing to a string does not fail.
            let _ = write!(text, " {name} {}", or_dash(quantile));
        }
        text
    }

    pub(super) fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.mean(), or_dash(self.min)];
        cells.extend(self.quantiles().map(|(_, it)| or_dash(it)));
        cells.push(or_dash(self.max));
        cells
    }

    /// The bars of a histogram: the powers of two, or the steps of a range, from the first that has values to the last.
    pub(super) fn bars(&self, linear: Option<Linear>) -> Vec<(String, u64)> {
        match linear {
            Some(linear) => steps(&self.buckets, linear.width().into()),
            None => powers(&self.buckets),
        }
    }
}

impl Range {
    fn of(quantile: Quantile) -> Range {
        Range {
            least: quantile.least,
            most: quantile.most,
        }
    }
}

/// The middle, with the largest error if it is not exact: `2049+-1`.
impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let middle = self.least + (self.most - self.least) / 2;
        match self.most - middle {
            0 => write!(f, "{middle}"),
            error => write!(f, "{middle}+-{error}"),
        }
    }
}

impl BucketView {
    fn of(bucket: &ValueBucket) -> BucketView {
        BucketView {
            least: bucket.least,
            most: bucket.most,
            count: bucket.count,
        }
    }
}

/// The buckets joined to those between powers of two.
fn powers(buckets: &[BucketView]) -> Vec<(String, u64)> {
    let octave = |number: u128| {
        number
            .checked_ilog2()
            .map_or(0, |power| i64::from(power) + 1)
    };
    let place = |bucket: &BucketView| {
        let least = bucket.least.unwrap_or(0);
        if least < 0 {
            -1 - octave((!least).unsigned_abs())
        } else {
            octave(least.unsigned_abs())
        }
    };
    let (Some(first), Some(last)) = (buckets.first(), buckets.last()) else {
        return Vec::new();
    };
    let first = place(first);
    let mut bars: Vec<(String, u64)> = (first..=place(last)).map(|it| (label(it), 0)).collect();
    for bucket in buckets {
        let (_, count) = &mut bars[(place(bucket) - first) as usize];
        *count = count.saturating_add(bucket.count);
    }
    bars
}

/// The label of the values between two powers of two, given by their place from 0.
fn label(place: i64) -> String {
    let border = |power: i64| 1_i128 << power.clamp(0, 64);
    match place {
        0 => "[0]".to_owned(),
        1 => "[1]".to_owned(),
        -1 => "[-1]".to_owned(),
        -2 => "[-2]".to_owned(),
        2.. => format!("[{}, {})", short(border(place - 1)), short(border(place))),
        _ => {
            let power = -1 - place;
            format!("[{}, {})", short(-border(power)), short(-border(power - 1)))
        }
    }
}

/// A power of two, in the largest unit that fits: `1K` is 1,024.
fn short(number: i128) -> String {
    let power = number.unsigned_abs().ilog2();
    let units = ["", "K", "M", "G", "T", "P", "E"];
    let unit = (power / 10).min(units.len() as u32 - 1);
    format!("{}{}", number >> (10 * unit), units[unit as usize])
}

/// The steps of this width, with those between that have no values.
fn steps(buckets: &[BucketView], width: i128) -> Vec<(String, u64)> {
    let mut bars: Vec<(String, u64)> = Vec::new();
    let mut next: Option<i128> = None;
    for bucket in buckets {
        if let (Some(next), Some(least)) = (next, bucket.least) {
            let mut from = next;
            while from < least {
                let to = (from + width).min(least);
                bars.push((format!("[{from}, {to})"), 0));
                from = to;
            }
        }
        next = bucket.most.map(|most| most + 1);
        let from = bucket
            .least
            .map_or("(...".to_owned(), |it| format!("[{it}"));
        let to = next.map_or("...)".to_owned(), |it| format!("{it})"));
        bars.push((format!("{from}, {to}"), bucket.count));
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(least: impl Into<Option<i128>>, most: impl Into<Option<i128>>) -> BucketView {
        BucketView {
            least: least.into(),
            most: most.into(),
            count: 1,
        }
    }

    #[test]
    fn bars_are_powers_of_two_of_either_sign() {
        let one = |value: i128| bucket(value, value);
        let few = [-4, -3, -2, -1, 0, 1, 2, 3, 4].map(one);
        let bars = powers(&few);
        let words: Vec<_> = bars
            .iter()
            .map(|(label, count)| format!("{label} {count}"))
            .collect();
        let expected = [
            "[-4, -2) 2",
            "[-2] 1",
            "[-1] 1",
            "[0] 1",
            "[1] 1",
            "[2, 4) 2",
            "[4, 8) 1",
        ];
        assert_eq!(words, expected);
        let extremes = [one(i64::MIN.into()), bucket(1 << 63, (1 << 64) - 1)];
        let bars = powers(&extremes);
        assert_eq!(bars.len(), 64 + 65);
        assert_eq!(bars[0].0, "[-8E, -4E)");
        assert_eq!(bars[128].0, "[8E, 16E)");
        assert_eq!(bars[127 - 52].0, "[1K, 2K)");
        assert!(powers(&[]).is_empty());
    }

    #[test]
    fn steps_without_values_are_shown_between() {
        let buckets = [bucket(None, -1), bucket(20, 29), bucket(45, None)];
        let bars = steps(&buckets, 10);
        let labels: Vec<&str> = bars.iter().map(|(label, _)| &label[..]).collect();
        let expected = [
            "(..., 0)",
            "[0, 10)",
            "[10, 20)",
            "[20, 30)",
            "[30, 40)",
            "[40, 45)",
            "[45, ...)",
        ];
        assert_eq!(labels, expected);
        assert_eq!(bars.iter().map(|(_, count)| count).sum::<u64>(), 3);
    }

    #[test]
    fn quantiles_are_shown_with_their_error() {
        let range = |least, most| Range { least, most }.to_string();
        assert_eq!(
            [range(7, 7), range(7, 8), range(7, 9)],
            ["7", "7+-1", "8+-1"]
        );
        assert_eq!(range(-9, -7), "-8+-1");
    }
}
