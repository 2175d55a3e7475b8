//! The functions whose calls were timed, and those that could not be.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write;
use std::time::Duration;

use probes_lib::{CallerLatency, FunctionLatency, LiveAddr, RefusedFunction};
use serde::{Serialize, Serializer};

use super::{LatencyBucket, Summary, TimedSubject, buckets, nanoseconds, with_unit};
use crate::output::format::time_prefix;
use crate::output::function_sources::{CallSite, FunctionSources};
use crate::output::refused::RefusedView;
use crate::output::table;
use crate::output::view::text_or_null;
use crate::text::{Escaped, TERMINAL_LINES};

/// The functions that are timed.
#[derive(Debug, Serialize)]
pub(in crate::output) struct TimedFunctionsView<'l> {
    /// Those with the most time first. Of many, those without calls are left out.
    #[serde(rename = "functions")]
    rows: Vec<TimedFunctionRow<'l>>,
    /// How many there are.
    functions_timed: usize,
    /// Those that cannot be timed.
    refused: Vec<RefusedView<'l>>,
}

/// The times of the calls of a function.
#[derive(Debug, Serialize)]
struct TimedFunctionRow<'l> {
    /// If processes are distinguished.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    name: &'l str,
    /// Where it is; `None` of several processes together.
    object: Option<Cow<'l, str>>,
    #[serde(serialize_with = "text_or_null")]
    address: Option<LiveAddr>,
    #[serde(flatten)]
    summary: Summary,
    running: u64,
    unmatched_exits: u64,
    lost: u64,
    unwound: u64,
    untyped: u64,
    returns: usize,
    jumps: usize,
    #[serde(flatten)]
    own: Option<SelfTimes>,
    /// If they are distinguished.
    #[serde(skip_serializing_if = "Option::is_none")]
    callers: Option<Vec<CallerRow>>,
    /// From the first to the last that is not empty.
    buckets: Vec<LatencyBucket>,
}

/// The calls that some code has made of a function.
#[derive(Debug, Serialize)]
struct CallerRow {
    /// Where they return to; `None` of all callers together for which there was no room.
    #[serde(serialize_with = "text_or_null")]
    address: Option<LiveAddr>,
    #[serde(flatten)]
    site: Option<CallSite>,
    count: u64,
    #[serde(rename = "mean_ns", serialize_with = "nanoseconds")]
    mean: Duration,
    #[serde(rename = "max_ns", serialize_with = "nanoseconds")]
    max: Duration,
    #[serde(rename = "sum_ns", serialize_with = "nanoseconds")]
    sum: Duration,
    /// Of self times: the sum of the times from entry to exit.
    #[serde(
        rename = "total_ns",
        serialize_with = "nanoseconds_if_some",
        skip_serializing_if = "Option::is_none"
    )]
    total: Option<Duration>,
}

/// What is known of a function besides, if its times are self times.
#[derive(Debug, Serialize)]
struct SelfTimes {
    doubtful: u64,
    /// The sum of its self times.
    #[serde(rename = "self_ns", serialize_with = "nanoseconds")]
    sum: Duration,
    /// The sum of its times from entry to exit.
    #[serde(rename = "total_ns", serialize_with = "nanoseconds")]
    total: Duration,
    stack: StackKind,
}

/// The kind of stack that a function is called on; only calls on the same stack are subtracted from its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum StackKind {
    Thread,
    Fiber,
}

impl<'l> TimedFunctionsView<'l> {
    pub(super) fn of(
        functions: &'l [(Option<i32>, FunctionLatency)],
        are_together: bool,
        refused: &'l [RefusedFunction],
        sources: &FunctionSources,
    ) -> TimedFunctionsView<'l> {
        let rows = functions.iter().map(|(pid, function)| TimedFunctionRow {
            pid: *pid,
            object: (!are_together).then(|| function.object().to_string_lossy()),
            address: (!are_together).then(|| function.address()),
            ..TimedFunctionRow::of(function, sources)
        });
        let mut rows: Vec<TimedFunctionRow<'l>> = rows.collect();
        // Stable: equal ones stay in the order in which they were read.
        rows.sort_by_key(|row| std::cmp::Reverse((row.time(), row.unwound, row.running)));
        let functions_timed = rows.len();
        if functions_timed > TERMINAL_LINES {
            rows.retain(TimedFunctionRow::is_called);
        }
        TimedFunctionsView {
            rows,
            functions_timed,
            refused: refused.iter().map(RefusedView::of).collect(),
        }
    }

    /// Whether no functions are timed, nor were to be.
    pub(super) fn is_empty(&self) -> bool {
        self.functions_timed == 0 && self.refused.is_empty()
    }

    /// How many there are, how many of them were called, and how many calls have ended.
    pub(super) fn sum(&self) -> (usize, usize, u64) {
        let called = self.rows.iter().filter(|row| row.is_called()).count();
        let calls = self.rows.iter();
        let calls = calls.flat_map(|row| [row.summary.count, row.unwound]);
        (self.functions_timed, called, saturating_sum(calls))
    }

    /// How many calls were timed, unwound, or are still running, and how many are untyped.
    pub(super) fn typed_and_untyped(&self) -> (u64, u64) {
        let typed = self.rows.iter();
        let typed = typed.flat_map(|row| [row.summary.count, row.unwound, row.running]);
        let untyped = self.rows.iter().map(|row| row.untyped);
        (saturating_sum(typed), saturating_sum(untyped))
    }

    /// The names of the functions that have lost calls, how many calls they have lost, and how many they had.
    pub(super) fn lost(&self) -> (Vec<&str>, u64, u64) {
        let rows = self.rows.iter().filter(|row| row.lost > 0);
        let rows: Vec<&TimedFunctionRow<'_>> = rows.collect();
        let names = unique(rows.iter().map(|row| row.name));
        let lost = saturating_sum(rows.iter().map(|row| row.lost));
        let others = rows.iter();
        let others = others.flat_map(|row| [row.summary.count, row.running, row.unwound]);
        (names, lost, saturating_sum(others.chain([lost])))
    }

    /// The names of the functions with times that can end with a jump to another function.
    pub(super) fn that_jump(&self) -> Vec<&str> {
        let rows = self.rows.iter();
        let rows = rows.filter(|row| row.jumps > 0 && row.summary.count > 0);
        unique(rows.map(|row| row.name))
    }

    /// A line for each function, and below it one for each of its callers; all begin with the time `at`, if given.
    pub(super) fn plain(&self, at: Option<Duration>) -> String {
        let (mut text, at) = (String::new(), time_prefix(at));
        for row in &self.rows {
            // Writing to a string does not fail.
            let _ = write!(text, "{at}{}", row.summary);
            for other in row.others() {
                let _ = write!(text, " {other}");
            }
            if let Some(own) = &row.own {
                let (sum, total) = (own.sum.as_nanos(), own.total.as_nanos());
                let _ = write!(text, " {sum} {total}");
            }
            let _ = write!(text, " {}", row.title());
            if self.has_separate_stacks() {
                let _ = write!(text, " on {}", row.stack());
            }
            if row.untyped > 0 {
                let _ = write!(text, " untyped {}", row.untyped);
            }
            text.push('\n');
            for caller in row.callers.iter().flatten() {
                let _ = write!(text, "{at}by {}", caller.count);
                for time in caller.times() {
                    let _ = write!(text, " {}", time.as_nanos());
                }
                let _ = writeln!(text, " {}", caller.name());
            }
        }
        text
    }

    /// A table of all functions.
    pub(super) fn table(&self) -> String {
        let mut head = vec![
            "function", "count", "mean", "p50", "p90", "p99", "p99.9", "max",
        ];
        const OTHERS: [&str; 5] = ["running", "unmatched exits", "lost", "unwound", "doubtful"];
        let self_times = self.rows.iter().any(|row| row.own.is_some());
        let has_separate_stacks = self.has_separate_stacks();
        let by_pid = self.rows.iter().any(|row| row.pid.is_some());
        if self_times {
            head.splice(2..2, ["self", "total"]);
        }
        if has_separate_stacks {
            head.insert(1, "stack");
        }
        if by_pid {
            head.insert(0, "pid");
        }
        let other = |row: &TimedFunctionRow<'_>, index: usize| row.others().nth(index).unwrap_or(0);
        let is_shown = |index: usize| self.rows.iter().any(|row| other(row, index) > 0);
        let shown: Vec<usize> = (0..OTHERS.len()).filter(|index| is_shown(*index)).collect();
        head.extend(shown.iter().map(|index| OTHERS[*index]));
        let are_typed = self.rows.iter().all(|row| row.untyped == 0);
        if !are_typed {
            head.push("untyped");
        }
        let rows = self.rows.iter().map(|row| {
            let mut cells: Vec<String> = row.pid.iter().map(i32::to_string).collect();
            cells.push(Escaped(row.name).to_string());
            if has_separate_stacks {
                cells.push(row.stack().to_owned());
            }
            cells.push(row.summary.count.to_string());
            if let Some(own) = &row.own {
                cells.extend([own.sum, own.total].map(with_unit));
            }
            cells.extend(row.summary.cells());
            cells.extend(shown.iter().map(|index| other(row, *index).to_string()));
            if !are_typed {
                cells.push(row.untyped.to_string());
            }
            cells
        });
        table::table(&head, rows)
    }

    /// A table of the callers of all functions, if they are distinguished.
    pub(super) fn table_of_callers(&self) -> Option<String> {
        self.rows.iter().find(|row| row.callers.is_some())?;
        let mut head = vec!["function", "caller", "count", "mean", "max"];
        if self.rows.iter().any(|row| row.own.is_some()) {
            head.extend(["self", "total"]);
        } else {
            head.push("sum");
        }
        let rows = self.rows.iter().flat_map(|row| {
            let callers = row.callers.iter().flatten();
            callers.map(|caller| {
                let mut cells = vec![Escaped(row.name).to_string(), caller.name()];
                cells.push(caller.count.to_string());
                cells.extend(caller.times().map(with_unit));
                cells
            })
        });
        Some(table::table(&head, rows))
    }

    /// Whether the times are self times, of some functions on fibers and of others on stacks of threads: calls of the
    /// one kind are not subtracted from the other.
    fn has_separate_stacks(&self) -> bool {
        let is_on = |kind| {
            let mut own = self.rows.iter().filter_map(|row| row.own.as_ref());
            own.any(|own| own.stack == kind)
        };
        is_on(StackKind::Fiber) && is_on(StackKind::Thread)
    }

    pub(super) fn subjects(&self) -> impl Iterator<Item = TimedSubject<'_>> {
        self.rows.iter().map(|row| TimedSubject {
            title: match (row.pid, &row.own) {
                (Some(pid), Some(_)) => format!("{pid} {}, self time", row.name),
                (Some(pid), None) => format!("{pid} {}", row.name),
                (None, Some(_)) => format!("{}, self time", row.name),
                (None, None) => row.name.to_owned(),
            },
            summary: &row.summary,
            caution: row.caution(),
            buckets: &row.buckets,
        })
    }
}

impl<'l> TimedFunctionRow<'l> {
    fn of(function: &'l FunctionLatency, sources: &FunctionSources) -> TimedFunctionRow<'l> {
        let callers = |callers: &[CallerLatency]| {
            let rows = callers.iter().map(|it| CallerRow::of(it, sources));
            rows.collect()
        };
        TimedFunctionRow {
            pid: None,
            name: function.name(),
            object: Some(function.object().to_string_lossy()),
            address: Some(function.address()),
            summary: Summary::of(function),
            running: function.running(),
            unmatched_exits: function.unmatched_exits(),
            lost: function.lost(),
            unwound: function.unwound(),
            untyped: function.untyped(),
            returns: function.returns(),
            jumps: function.jumps(),
            own: function.total().map(|total| SelfTimes {
                doubtful: function.doubtful(),
                sum: function.sum(),
                total,
                stack: if function.is_on_fiber() {
                    StackKind::Fiber
                } else {
                    StackKind::Thread
                },
            }),
            callers: function.callers().map(callers),
            buckets: buckets(function.times()),
        }
    }

    /// Its name, with the pid before it if processes are distinguished.
    fn title(&self) -> String {
        match self.pid {
            Some(pid) => format!("{pid} {}", Escaped(self.name)),
            None => Escaped(self.name).to_string(),
        }
    }

    /// Says how many calls have no time, and how many self times may be wrong.
    fn caution(&self) -> Option<String> {
        let unknown = [(self.unwound, "unwound"), (self.lost, "lost")];
        let unknown: Vec<String> = unknown
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        let doubtful = self.own.as_ref().map_or(0, |own| own.doubtful);
        let unknown =
            (!unknown.is_empty()).then(|| format!("without a time: {}", unknown.join(", ")));
        let doubtful =
            (doubtful > 0).then(|| format!("{doubtful} may be too long: calls are not subtracted"));
        let cautions: Vec<String> = unknown.into_iter().chain(doubtful).collect();
        (!cautions.is_empty()).then(|| cautions.join("; "))
    }

    fn is_called(&self) -> bool {
        self.summary.count > 0 || self.untyped > 0 || self.others().any(|it| it > 0)
    }

    /// How long its calls lasted together; of self times, their sum.
    fn time(&self) -> u128 {
        match &self.own {
            Some(own) => own.sum.as_nanos(),
            None => self.summary.mean.as_nanos() * u128::from(self.summary.count),
        }
    }

    fn stack(&self) -> &'static str {
        match self.own.as_ref().map(|own| own.stack) {
            Some(StackKind::Fiber) => "fiber",
            _ => "thread",
        }
    }

    fn others(&self) -> impl Iterator<Item = u64> {
        let others = [self.running, self.unmatched_exits, self.lost, self.unwound];
        let doubtful = self.own.as_ref().map(|own| own.doubtful);
        others.into_iter().chain(doubtful)
    }
}

impl CallerRow {
    fn of(caller: &CallerLatency, sources: &FunctionSources) -> CallerRow {
        let address = caller.address();
        CallerRow {
            address,
            site: address.and_then(|address| sources.call_site(address)),
            count: caller.count(),
            mean: caller.mean(),
            max: caller.max(),
            sum: caller.sum(),
            total: caller.total(),
        }
    }

    /// The mean, the longest and the sums.
    fn times(&self) -> impl Iterator<Item = Duration> {
        [self.mean, self.max, self.sum]
            .into_iter()
            .chain(self.total)
    }

    fn name(&self) -> String {
        match (self.address, &self.site) {
            (None, _) => "other".to_owned(),
            (Some(address), site) => {
                let site = site.as_ref().and_then(CallSite::short);
                site.unwrap_or_else(|| address.to_string())
            }
        }
    }
}

fn nanoseconds_if_some<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => nanoseconds(time, to),
        None => to.serialize_none(),
    }
}

/// Returns names in their order, each once: several processes may have a function.
fn unique<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let mut seen = HashSet::new();
    names.filter(|name| seen.insert(*name)).collect()
}

/// Adds figures of a process, which may be any.
fn saturating_sum(figures: impl Iterator<Item = u64>) -> u64 {
    figures.fold(0, u64::saturating_add)
}
