//! The functions whose calls were timed, and those that could not be.

use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

use probes_lib::{FunctionLatency, LiveAddr, RefusedFunction};
use serde::Serialize;

use super::{Bucket, Subject, Summary, buckets};
use crate::output::refused::RefusedView;
use crate::output::table;
use crate::output::view::text;
use crate::text::Escaped;

/// The functions that are timed.
#[derive(Debug, Serialize)]
pub(in crate::output) struct TimedFunctions<'l> {
    /// Those with the most time first.
    #[serde(rename = "functions")]
    rows: Vec<FunctionRow<'l>>,
    /// Those that cannot be timed.
    refused: Vec<RefusedView<'l>>,
}

/// The times of the calls of a function.
#[derive(Debug, Serialize)]
struct FunctionRow<'l> {
    name: &'l str,
    object: Cow<'l, str>,
    #[serde(serialize_with = "text")]
    address: LiveAddr,
    #[serde(flatten)]
    summary: Summary,
    running: u64,
    unmatched_exits: u64,
    lost: u64,
    unwound: u64,
    /// From the first to the last that is not empty.
    buckets: Vec<Bucket>,
}

impl<'l> TimedFunctions<'l> {
    pub(super) fn of(
        functions: &'l [FunctionLatency],
        refused: &'l [RefusedFunction],
    ) -> TimedFunctions<'l> {
        let mut rows: Vec<FunctionRow<'l>> = functions.iter().map(FunctionRow::of).collect();
        let total =
            |row: &FunctionRow<'_>| row.summary.mean.as_nanos() * u128::from(row.summary.count);
        // Stable: of equal ones the first by address.
        rows.sort_by_key(|row| std::cmp::Reverse((total(row), row.unwound, row.running)));
        TimedFunctions {
            rows,
            refused: refused.iter().map(RefusedView::of).collect(),
        }
    }

    /// Whether no functions are timed, nor were to be.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.refused.is_empty()
    }

    /// A line for each function, with the time `at` which it was.
    pub(super) fn plain(&self, at: Option<Duration>) -> String {
        let mut text = String::new();
        for row in &self.rows {
            if let Some(at) = at {
                // Writing to a string does not fail.
                let _ = write!(text, "{:.1} ", at.as_secs_f64());
            }
            let [running, exits, lost, unwound] = row.others();
            let name = Escaped(row.name);
            let _ = writeln!(
                text,
                "{} {running} {exits} {lost} {unwound} {name}",
                row.summary
            );
        }
        text
    }

    /// A table of all functions.
    pub(super) fn table(&self) -> String {
        let mut head = vec![
            "function", "count", "mean", "p50", "p90", "p99", "p99.9", "max",
        ];
        const OTHERS: [&str; 4] = ["running", "unmatched exits", "lost", "unwound"];
        let is_shown = |index: usize| self.rows.iter().any(|row| row.others()[index] > 0);
        let shown: Vec<usize> = (0..OTHERS.len()).filter(|index| is_shown(*index)).collect();
        head.extend(shown.iter().map(|index| OTHERS[*index]));
        let rows = self.rows.iter().map(|row| {
            let mut cells = vec![Escaped(row.name).to_string(), row.summary.count.to_string()];
            cells.extend(row.summary.cells());
            cells.extend(shown.iter().map(|index| row.others()[*index].to_string()));
            cells
        });
        table::table(&head, rows)
    }

    pub(super) fn subjects(&self) -> impl Iterator<Item = Subject<'_>> {
        self.rows.iter().map(|row| Subject {
            title: row.name.to_owned(),
            summary: &row.summary,
            caution: row.caution(),
            buckets: &row.buckets,
        })
    }
}

impl<'l> FunctionRow<'l> {
    fn of(function: &'l FunctionLatency) -> FunctionRow<'l> {
        FunctionRow {
            name: function.name(),
            object: function.object().to_string_lossy(),
            address: function.address(),
            summary: Summary::of(function),
            running: function.running(),
            unmatched_exits: function.unmatched_exits(),
            lost: function.lost(),
            unwound: function.unwound(),
            buckets: buckets(function.times()),
        }
    }

    /// Says of how many calls the time is not known.
    fn caution(&self) -> Option<String> {
        let unknown = [(self.unwound, "unwound"), (self.lost, "lost")];
        let unknown: Vec<String> = unknown
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (!unknown.is_empty()).then(|| format!("without a time: {}", unknown.join(", ")))
    }

    fn others(&self) -> [u64; 4] {
        [self.running, self.unmatched_exits, self.lost, self.unwound]
    }
}
