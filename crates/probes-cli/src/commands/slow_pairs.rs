//! Slow pairs, shown one by one while they are timed.

use std::mem::take;
use std::time::{Duration, Instant};

use probes_lib::{Events, SlowPair, Stacks};

use super::reading_times::next_reading;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::{self, Format, LatencyReading, Missing, WarningKind};

/// If this many wait, they are shown even if it is not time for that.
const MAX_WAITING: usize = 10_000;

/// Slow pairs that wait to be shown until all times have been read, which tell whether those of the slow pairs can be
/// trusted.
pub(super) struct PendingSlowPairs {
    lines: output::SlowPairs,
    output: Output,
    begun: Instant,
    /// How often all times are to be shown, if they are.
    interval: Option<Duration>,
    /// When all times are to be read next, since the beginning.
    due: Duration,
    /// If there are several processes, each with its pid.
    waiting: Vec<(Option<i32>, SlowPair)>,
    dropped: u64,
    /// How many of these have found no room for their stack.
    without_place: u64,
}

impl PendingSlowPairs {
    pub(super) fn new(output: &Output, interval: Option<Duration>) -> PendingSlowPairs {
        PendingSlowPairs {
            lines: output::SlowPairs::new(output.format),
            output: output.clone(),
            begun: Instant::now(),
            interval,
            due: Duration::ZERO,
            waiting: Vec::new(),
            dropped: 0,
            without_place: 0,
        }
    }

    /// The same, of several processes.
    pub(super) fn of_several(mut self) -> PendingSlowPairs {
        self.lines = self.lines.with_pids();
        self
    }

    /// Adds the stacks of the slow pairs of a process, at most `frames` frames of each. `pid` is `None` if
    /// there is only one process.
    pub(super) fn add_stacks(&mut self, pid: Option<i32>, stacks: Stacks, frames: usize) {
        self.lines.add_stacks(pid, stacks, frames);
    }

    /// Returns whether all times are to be read now, and the slow pairs that wait are to be shown.
    pub(super) fn are_due(&self) -> bool {
        self.begun.elapsed() >= self.due || self.waiting.len() >= MAX_WAITING
    }

    /// Adds the slow pairs among `events`. `pid` is `None` if there is only one process.
    pub(super) fn add_events(&mut self, pid: Option<i32>, events: Events) {
        self.add_dropped(&events);
        self.add(pid, events.slow_pairs);
    }

    pub(super) fn add(&mut self, pid: Option<i32>, pairs: Vec<SlowPair>) {
        self.waiting
            .extend(pairs.into_iter().map(|pair| (pid, pair)));
    }

    pub(super) fn add_dropped(&mut self, events: &Events) {
        self.dropped = self.dropped.saturating_add(events.dropped);
        self.without_place = self.without_place.saturating_add(events.without_place);
    }

    /// Takes the slow pairs that wait, and returns their lines. How many were dropped is a line of JSON, or else a
    /// warning. `reading` returns what was measured until now in a process.
    pub(super) fn text<'r>(
        &mut self,
        reading: impl Fn(Option<i32>) -> Option<&'r LatencyReading>,
    ) -> Result<String, Failure> {
        let now = self.begun.elapsed();
        let interval = self.interval.unwrap_or(Duration::MAX);
        self.due = next_reading(now).min(now.saturating_add(interval));
        let mut waiting = take(&mut self.waiting);
        // Several processes were read one after the other.
        waiting.sort_by_key(|(_, pair)| pair.stop.time);
        let (text, unknown) = self.lines.lines(&waiting, reading)?;
        let dropped = take(&mut self.dropped).saturating_add(unknown);
        let without_place = take(&mut self.without_place);
        if dropped == 0 {
            return Ok(text);
        }
        if self.output.format == Format::Json {
            let missing = Missing {
                lost: dropped,
                ..Missing::default()
            };
            return Ok(text + &output::missing(missing)?);
        }
        self.output.messages.warning(
            WarningKind::LostHits,
            &format!(
                "not all slow pairs and calls are shown ({dropped} are missing): {}, or their process ended before that",
                output::why_lost(without_place)
            ),
            "give a longer time with -over; the figures count them all",
        );
        Ok(text)
    }
}
