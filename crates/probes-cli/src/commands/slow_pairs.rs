//! Slow pairs, shown one by one while they are timed.

use std::mem::take;
use std::time::{Duration, Instant};

use probes_lib::{Observer, SlowPair};

use super::observe_loop::next_reading;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::{self, Format, LatencyReading, Missing, WarningKind};

/// So many are shown at once, however short ago the last were.
const MOST_WAITING: usize = 10_000;

/// Shows slow pairs, together with what is known then of whether their times can be trusted: so they wait for a reading of all times.
pub(super) struct SlowPairs {
    lines: output::SlowPairs,
    output: Output,
    begun: Instant,
    /// How often all times are to be shown, if they are.
    interval: Option<Duration>,
    /// When all times are to be read next, since the beginning.
    due: Duration,
    waiting: Vec<SlowPair>,
    dropped: u64,
}

impl SlowPairs {
    pub(super) fn new(output: &Output, interval: Option<Duration>) -> SlowPairs {
        SlowPairs {
            lines: output::SlowPairs::new(output.format),
            output: output.clone(),
            begun: Instant::now(),
            interval,
            due: Duration::ZERO,
            waiting: Vec::new(),
            dropped: 0,
        }
    }

    /// Reads the slow pairs since the last reading, and also all times if it is time for that.
    pub(super) fn read(
        &mut self,
        observer: &mut Observer,
    ) -> probes_lib::Result<Option<LatencyReading>> {
        let events = observer.events()?;
        self.add(events.slow_pairs);
        self.add_dropped(events.dropped);
        if !self.are_due() {
            return Ok(None);
        }
        LatencyReading::of(observer).map(Some)
    }

    /// Whether it is time to read all times, and to show those that wait.
    pub(super) fn are_due(&mut self) -> bool {
        let now = self.begun.elapsed();
        if now < self.due && self.waiting.len() < MOST_WAITING {
            return false;
        }
        let interval = self.interval.unwrap_or(Duration::MAX);
        self.due = next_reading(now).min(now.saturating_add(interval));
        true
    }

    pub(super) fn add(&mut self, pairs: Vec<SlowPair>) {
        self.waiting.extend(pairs);
    }

    pub(super) fn add_dropped(&mut self, dropped: u64) {
        self.dropped = self.dropped.saturating_add(dropped);
    }

    /// The lines of those that wait, and of how many were dropped if it is JSON; else a warning says that.
    pub(super) fn text(&mut self, reading: &LatencyReading) -> Result<String, Failure> {
        let text = self.lines.lines(&take(&mut self.waiting), reading)?;
        let dropped = take(&mut self.dropped);
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
                "{dropped} slow pairs or calls are not shown: they came faster than they could be read"
            ),
            "give a longer time with -over; the figures count them all",
        );
        Ok(text)
    }
}
