//! Slow pairs and calls, a line each: as columns of a table, or as JSON.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::Duration;

use probes_lib::{Event, Latency, SlowPair, Stacks};
use serde::Serialize;

use super::LatencyReading;
use super::format::{Format, VERSION, json};
use super::hits::{Argument, argument_names, arguments_text, thread_text, time_of_day};
use super::latencies::{Evidence, with_unit};
use super::stacks::FoundStack;
use super::table::StreamedTable;
use crate::clock::in_nanoseconds;
use crate::failure::Failure;
use crate::text::Escaped;

/// Formats slow pairs.
pub(crate) struct SlowPairs {
    format: Format,
    /// Whether each line says which process it is about.
    shows_pid: bool,
    table: StreamedTable,
    /// What finds the stacks of each process, if they are shown.
    stacks: HashMap<Option<i32>, Stacks>,
    /// How many frames of a stack are shown at most.
    frames: usize,
}

/// A slow pair, as JSON.
#[derive(Serialize)]
#[serde(tag = "type", rename = "slow_pair")]
struct SlowPairLine<'p> {
    version: u32,
    /// If there are several processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    time: String,
    thread: Option<i32>,
    start: &'p str,
    stop: &'p str,
    duration_ns: u64,
    trusted: Option<bool>,
    started: Option<EndView<'p>>,
    stopped: EndView<'p>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<&'p FoundStack>,
}

/// The hit at an end of a pair.
#[derive(Serialize)]
struct EndView<'p> {
    thread: Option<i32>,
    address: String,
    arguments: Vec<Argument<'p>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    argument_names: Vec<&'p str>,
}

impl<'p> EndView<'p> {
    fn of(event: &'p Event) -> EndView<'p> {
        EndView {
            thread: event.thread,
            address: event.address().to_string(),
            arguments: event.arguments.iter().map(Argument::of).collect(),
            argument_names: argument_names(event).collect(),
        }
    }
}

impl<'p> SlowPairLine<'p> {
    fn of(
        pid: Option<i32>,
        pair: &'p SlowPair,
        measured: &'p Latency,
        stack: Option<&'p FoundStack>,
    ) -> SlowPairLine<'p> {
        SlowPairLine {
            version: VERSION,
            pid,
            time: humantime::format_rfc3339_nanos(pair.stop.time).to_string(),
            thread: pair.stop.thread,
            start: measured.start(),
            stop: measured.stop(),
            duration_ns: in_nanoseconds(pair.duration),
            trusted: measured.is_trusted(),
            started: pair.start.as_ref().map(EndView::of),
            stopped: EndView::of(&pair.stop),
            stack,
        }
    }
}

/// A slow call, as JSON.
#[derive(Serialize)]
#[serde(tag = "type", rename = "slow_call")]
struct SlowCallLine<'p> {
    version: u32,
    /// If there are several processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    time: String,
    thread: Option<i32>,
    name: &'p str,
    object: Cow<'p, str>,
    address: String,
    duration_ns: u64,
    arguments: Vec<Argument<'p>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Argument<'p>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stack: Option<&'p FoundStack>,
}

impl<'p> SlowCallLine<'p> {
    fn of(pid: Option<i32>, call: &'p SlowPair, stack: Option<&'p FoundStack>) -> SlowCallLine<'p> {
        let (entry, exit) = (call.start.as_ref(), &call.stop);
        let arguments = entry.into_iter().flat_map(|entry| &entry.arguments);
        SlowCallLine {
            version: VERSION,
            pid,
            time: humantime::format_rfc3339_nanos(exit.time).to_string(),
            thread: exit.thread,
            name: exit.name(),
            object: exit.path().to_string_lossy(),
            address: exit.address().to_string(),
            duration_ns: in_nanoseconds(call.duration),
            arguments: arguments.map(Argument::of).collect(),
            result: exit.arguments.first().map(Argument::of),
            stack,
        }
    }
}

const HEAD: [&str; 6] = ["ended", "thread", "time", "what", "at start", "at stop"];

impl SlowPairs {
    pub(crate) fn new(format: Format) -> SlowPairs {
        SlowPairs {
            format,
            shows_pid: false,
            table: StreamedTable::default(),
            stacks: HashMap::new(),
            frames: usize::MAX,
        }
    }

    /// Adds the stacks of the slow pairs of a process, at most `frames` frames of each. `pid` is `None` if
    /// there is only one process.
    pub(crate) fn add_stacks(&mut self, pid: Option<i32>, stacks: Stacks, frames: usize) {
        self.stacks.insert(pid, stacks);
        self.frames = frames;
    }

    /// The same, of several processes: each line says which it is about.
    pub(crate) fn with_pids(self) -> SlowPairs {
        SlowPairs {
            shows_pid: true,
            ..self
        }
    }

    /// Returns the lines of slow pairs, and how many pairs are left out because they are not in `reading`, which
    /// returns what was measured in a process until now. A pair comes with the pid of its process if there are
    /// several. A table continues that of the call before.
    pub(crate) fn lines<'r>(
        &mut self,
        pairs: &[(Option<i32>, SlowPair)],
        reading: impl Fn(Option<i32>) -> Option<&'r LatencyReading>,
    ) -> Result<(String, u64), Failure> {
        let mut lines = String::new();
        let mut head = HEAD.to_vec();
        if self.shows_pid {
            head.insert(1, "pid");
        }
        let mut rows = Vec::new();
        let mut unknown = 0;
        for (pid, pair) in pairs {
            let measured = match pair.pair.map(|index| reading(*pid)?.pair(index)) {
                Some(None) => {
                    unknown += 1;
                    continue;
                }
                measured => measured.flatten(),
            };
            let stack = self.stacks.get_mut(pid).zip(pair.stop.stack.as_ref());
            let stack = stack.map(|(stacks, copied)| stacks.of_hit(copied));
            let stack = stack.map(|stack| FoundStack::of(&stack, self.frames));
            match self.format {
                Format::Json => {
                    let stack = stack.as_ref();
                    lines += &match measured {
                        Some(measured) => json(&SlowPairLine::of(*pid, pair, measured, stack))?,
                        None => json(&SlowCallLine::of(*pid, pair, stack))?,
                    };
                    continue;
                }
                Format::Table => rows.push(SlowPairText::of(*pid, pair, measured).cells()),
                Format::Plain => lines += &SlowPairText::of(*pid, pair, measured).line(),
            }
            if let Some(stack) = stack {
                self.table.append(&head, &mut rows, &mut lines);
                lines += &stack.lines(self.format);
            }
        }
        self.table.append(&head, &mut rows, &mut lines);
        Ok((lines, unknown))
    }
}

/// A slow pair or call, in words.
struct SlowPairText {
    /// If there are several processes.
    pid: Option<String>,
    time: String,
    thread: String,
    duration: Duration,
    names: String,
    /// What may be wrong with its time; empty if nothing is.
    caution: &'static str,
    at_start: String,
    at_stop: String,
}

impl SlowPairText {
    /// `measured` are the times of the pair; `None` of a call.
    fn of(pid: Option<i32>, pair: &SlowPair, measured: Option<&Latency>) -> SlowPairText {
        let names = measured.map_or_else(
            || Escaped(pair.stop.name()).to_string(),
            |it| format!("{},{}", Escaped(it.start()), Escaped(it.stop())),
        );
        let at_start = pair.start.as_ref();
        SlowPairText {
            pid: pid.map(|pid| pid.to_string()),
            time: time_of_day(pair.stop.time),
            thread: thread_text(&pair.stop),
            duration: pair.duration,
            names,
            caution: measured.map_or("", |it| Evidence::of(it).short_words()),
            at_start: at_start.map_or("unknown".to_owned(), arguments_text),
            at_stop: arguments_text(&pair.stop),
        }
    }

    /// The row of a table.
    fn cells(self) -> Vec<String> {
        let names = if self.caution.is_empty() {
            self.names
        } else {
            format!("{} ({})", self.names, self.caution)
        };
        let ends = [names, self.at_start, self.at_stop];
        let time = with_unit(self.duration);
        let cells = [self.time].into_iter().chain(self.pid);
        cells.chain([self.thread, time]).chain(ends).collect()
    }

    /// The line in plain format.
    fn line(&self) -> String {
        let nanoseconds = self.duration.as_nanos().to_string();
        let words = [
            "slow",
            &self.time,
            self.pid.as_deref().unwrap_or_default(),
            &self.thread,
            &nanoseconds,
            &self.names,
            self.caution,
            &self.at_start,
            "->",
            &self.at_stop,
        ];
        let words = words.into_iter().filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join(" ") + "\n"
    }
}
