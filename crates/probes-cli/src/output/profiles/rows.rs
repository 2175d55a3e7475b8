//! The times of a profile by function, stack, thread or system call, as lines and as a table.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::time::Duration;

use probes_lib::WaitTimes;

use super::super::latencies::with_unit;
use super::super::table::{table, table_of_stacks};
use super::waits::Distribution;
use super::{FunctionTimes, NOT_SAMPLED, ProfileBy, ProfileReport, StackTimes, TotalTimes};
use crate::text::{Escaped, folded_path, number_of, or_dash};

/// How many rows a table has at most.
const FEW: usize = 30;

/// What was added up for one key.
struct ProfileRow<'r> {
    name: String,
    seconds: f64,
    /// Of a function: the time in it and in what it calls, and two standard deviations of that.
    total: Option<(f64, f64)>,
    /// Two standard deviations of `seconds`.
    error: f64,
    waits: Option<&'r Distribution>,
}

/// The sums of some stacks.
#[derive(Default)]
struct Sums {
    seconds: f64,
    total: f64,
    /// Of `seconds`.
    variance: f64,
    total_variance: f64,
    waits: Option<WaitTimes>,
}

impl Sums {
    fn add(&mut self, stack: &StackTimes, variance: f64, is_innermost: bool) {
        self.total += stack.seconds;
        self.total_variance += variance;
        if is_innermost {
            self.seconds += stack.seconds;
            self.variance += variance;
        }
        if let Some(lengths) = &stack.lengths {
            self.waits.get_or_insert_default().merge(lengths);
        }
    }

    /// Two standard deviations of `seconds`.
    fn error(&self) -> f64 {
        2.0 * self.variance.sqrt()
    }

    /// Two standard deviations of `total`.
    fn total_error(&self) -> f64 {
        2.0 * self.total_variance.sqrt()
    }

    fn distribution(&self) -> Option<Distribution> {
        self.waits.as_ref().map(Distribution::of)
    }
}

/// The times of each function, in itself and with what it calls; most time in itself first.
pub(super) fn functions(stacks: &[StackTimes]) -> Vec<FunctionTimes> {
    let mut sums: BTreeMap<&str, Sums> = BTreeMap::new();
    for stack in stacks {
        // A function that calls itself counts once.
        let mut seen = HashSet::new();
        for (depth, name) in stack.frames.iter().enumerate() {
            if seen.insert(name) {
                let sums = sums.entry(name).or_default();
                sums.add(stack, stack.variance, depth == 0);
            }
        }
    }
    let mut functions: Vec<FunctionTimes> = sums
        .into_iter()
        .map(|(function, sums)| FunctionTimes {
            function: function.to_owned(),
            self_seconds: sums.seconds,
            total_seconds: sums.total,
            self_error_seconds: sums.error(),
            error_seconds: sums.total_error(),
            waits: sums.distribution(),
        })
        .collect();
    functions.sort_by(|one, other| {
        let keys = [one, other].map(|it| (it.self_seconds, it.total_seconds));
        keys[1]
            .partial_cmp(&keys[0])
            .unwrap_or(std::cmp::Ordering::Equal)
    });
    functions
}

impl ProfileReport {
    /// Calls `each` with the rows, most time first; the time in the function itself counts first.
    fn with_rows<T>(&self, each: impl FnOnce(Vec<ProfileRow<'_>>) -> T) -> T {
        let key: &dyn Fn(&StackTimes) -> String = match self.how.by {
            ProfileBy::Function => {
                let rows = self.functions.iter().map(|it| ProfileRow {
                    name: it.function.clone(),
                    seconds: it.self_seconds,
                    total: Some((it.total_seconds, it.error_seconds)),
                    error: it.self_error_seconds,
                    waits: it.waits.as_ref(),
                });
                return each(rows.collect());
            }
            ProfileBy::Stack => &|stack| folded_path(stack.path(self.how.by)),
            ProfileBy::Thread => &StackTimes::thread_name,
            ProfileBy::Syscall => &|stack| match &stack.system_call {
                Some(call) => call.clone(),
                None if stack.tid.is_none() => NOT_SAMPLED.to_owned(),
                None => stack.state.to_owned(),
            },
        };
        let mut sums: BTreeMap<String, Sums> = BTreeMap::new();
        // Only stacks are split by whether there was a collection; the sums of others have both parts.
        let are_split = self.how.tells_collections && self.how.by == ProfileBy::Stack;
        for stack in &self.stacks {
            let variance = if are_split {
                stack.split_variance
            } else {
                stack.variance
            };
            sums.entry(key(stack))
                .or_default()
                .add(stack, variance, true);
        }
        let sums: Vec<(String, Sums, Option<Distribution>)> = sums
            .into_iter()
            .map(|(name, sums)| {
                let waits = sums.distribution();
                (name, sums, waits)
            })
            .collect();
        let rows = sums.iter().map(|(name, sums, waits)| ProfileRow {
            name: name.clone(),
            seconds: sums.seconds,
            total: None,
            error: sums.error(),
            waits: waits.as_ref(),
        });
        let mut rows: Vec<ProfileRow<'_>> = rows.collect();
        rows.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        each(rows)
    }

    pub(super) fn plain(&self) -> String {
        let or_not = |of: fn(&TotalTimes) -> f64| {
            let time = self.times.as_ref().map(of);
            or_dash(time.map(|time| format!("{time:.3}")))
        };
        let mut text = format!(
            "all {:.3} samples {} threads {} running {} runnable {} off {} stopped {:.6} error {}\n",
            self.seconds,
            self.samples,
            self.threads,
            or_not(|it| it.running_seconds),
            or_not(|it| it.runnable_seconds),
            or_not(|it| it.off_seconds),
            self.stopped_seconds,
            or_not(|it| it.off_error_seconds),
        );
        if let Some(split) = &self.in_collection {
            // Writing to a String does not fail.
            let _ = writeln!(
                text,
                "collection running {:.3} error {:.3} off {:.3} error {:.3}",
                split.running_seconds,
                split.running_error_seconds,
                split.off_seconds,
                split.off_error_seconds
            );
        }
        if self.shows_waits() {
            text.push_str(&self.waits.plain());
        }
        self.with_rows(|rows| {
            for row in rows {
                let _ = write!(text, "{:.3} {:.3} ", row.seconds, row.error);
                if let Some((total, error)) = row.total {
                    let _ = write!(text, "{total:.3} {error:.3} ");
                }
                if self.how.is_off_cpu {
                    let waits = match row.waits {
                        Some(waits) => waits.plain(),
                        None => "- - - - -".to_owned(),
                    };
                    let _ = write!(text, "{waits} ");
                }
                let _ = writeln!(text, "{}", Escaped(&row.name));
            }
        });
        text
    }

    /// Whether there are waits in the answer.
    fn shows_waits(&self) -> bool {
        !self.how.is_on_cpu
    }

    pub(super) fn tables(&self, is_terminal: bool) -> String {
        let mut text = self.table_of_rows(is_terminal);
        text.push('\n');
        text.push_str(&self.totals());
        text.push('\n');
        if self.shows_waits() {
            text.push_str(&self.waits.sentence());
        }
        text
    }

    /// The rows with the longest times.
    fn table_of_rows(&self, is_terminal: bool) -> String {
        let all: f64 = self.stacks.iter().map(|it| it.seconds).sum();
        let share = |time: f64| format!("{:.1} %", 100.0 * time / all.max(1e-9));
        let is_by_function = self.how.by == ProfileBy::Function;
        let shows_lengths = self.how.is_off_cpu && self.waits.count.is_some();
        let mut head = vec![if is_by_function { "self" } else { "share" }, "time"];
        if !shows_lengths {
            head.push("+-");
        }
        if is_by_function {
            head.push("total");
            if !shows_lengths {
                head.push("+-");
            }
        }
        if shows_lengths {
            head.extend(["waits", "p50", "p90", "p99", "max"]);
        }
        head.push(match self.how.by {
            ProfileBy::Function => "function",
            ProfileBy::Stack => "stack",
            ProfileBy::Thread => "thread",
            ProfileBy::Syscall => "system call",
        });
        self.with_rows(|rows| {
            let many = rows.len();
            let cells = rows.into_iter().take(FEW).map(|row| {
                let mut cells = vec![share(row.seconds), format!("{:.3} s", row.seconds)];
                if !shows_lengths {
                    cells.push(format!("{:.3} s", row.error));
                }
                if let Some((total, error)) = row.total {
                    cells.push(share(total));
                    if !shows_lengths {
                        cells.push(share(error));
                    }
                }
                if shows_lengths {
                    let none = || vec![String::new(); 5];
                    cells.extend(row.waits.map_or_else(none, Distribution::cells));
                }
                cells.push(Escaped(&row.name).to_string());
                cells
            });
            let mut text = if self.how.by == ProfileBy::Stack {
                table_of_stacks(is_terminal, &head, cells)
            } else {
                table(&head, cells)
            };
            if many > FEW {
                let _ = writeln!(text, "\nand {} more; -format plain shows all", many - FEW);
            }
            text
        })
    }

    /// The line below the table.
    fn totals(&self) -> String {
        let mut text = format!(
            "{:.1} s, {}, {}",
            self.seconds,
            number_of(self.samples, "sample"),
            number_of(self.threads, "thread")
        );
        if let Some(times) = &self.times {
            let _ = write!(
                text,
                ": {:.2} s on the processor, {:.2} s waiting for one, {:.2} s off it",
                times.running_seconds, times.runnable_seconds, times.off_seconds
            );
            if times.off_error_seconds > 0.0 {
                let _ = write!(text, " +- {:.2} s", times.off_error_seconds);
            }
        }
        if let Some(split) = &self.in_collection {
            let _ = write!(
                text,
                "; during collections {:.2} s +- {:.2} s on the processor, {:.2} s +- {:.2} s off it (sampled)",
                split.running_seconds,
                split.running_error_seconds,
                split.off_seconds,
                split.off_error_seconds
            );
        }
        if self.idle_seconds > 0.0 {
            let _ = write!(
                text,
                "; {:.2} s idle threads of the runtime left out",
                self.idle_seconds
            );
        }
        text
    }
}

impl Distribution {
    /// Their number, and in seconds p50, p90, p99 and the longest.
    fn plain(&self) -> String {
        let seconds = |time: u64| format!("{:.6}", time as f64 / 1e9);
        format!("{} {}", self.count, self.lengths(seconds, "-").join(" "))
    }

    /// The number of those that were seen whole, and after + that of the others; and the lengths.
    fn cells(&self) -> Vec<String> {
        let count = match self.parts {
            0 => self.count.to_string(),
            parts => format!("{}+{parts}", self.count),
        };
        let time = |time| with_unit(Duration::from_nanos(time));
        let times = self.lengths(time, "");
        [count].into_iter().chain(times).collect()
    }

    /// p50, p90, p99 and the longest, each in words; or what stands for it if there is none.
    fn lengths(&self, in_words: impl Fn(u64) -> String, none: &str) -> [String; 4] {
        match &self.lengths {
            Some(it) => [it.p50_ns, it.p90_ns, it.p99_ns, it.max_ns].map(in_words),
            None => std::array::from_fn(|_| none.to_owned()),
        }
    }
}
