//! `count -by`: counts hits by their keys.

use std::borrow::Cow;
use std::mem::take;
use std::time::Duration;

use probes_lib::{ObservationReport, Observer, Target};

use crate::commands::other_keys::warn_of_other_keys;
use crate::commands::readings::{Outcome, ReadingHandler, ShownReadings, as_one};
use crate::commands::untyped::warn_of_untyped;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{self, FunctionSources, KeyedReading, KeyedReport};
use crate::question::CountedBy;

/// Reads and shows counts by keys: of one process, or of several together.
pub(super) struct KeyedCounting<'o> {
    output: &'o Output,
    by: &'o CountedBy,
    is_of_several: bool,
    sources: FunctionSources,
    is_redrawn: bool,
    /// The last reading that was shown, and when that was.
    shown: Option<(KeyedReading, Duration)>,
}

impl<'o> KeyedCounting<'o> {
    /// `only` is the process, if the answer is about a single one.
    pub(super) fn new(
        by: &'o CountedBy,
        only: Option<&Target>,
        is_redrawn: bool,
        output: &'o Output,
    ) -> KeyedCounting<'o> {
        let of_callers = only.filter(|_| by.has_caller());
        let sources = of_callers.map(|target| FunctionSources::of_process(target.pid()));
        KeyedCounting {
            output,
            by,
            is_of_several: only.is_none(),
            sources: sources.unwrap_or_default(),
            is_redrawn,
            shown: None,
        }
    }

    /// Prints the hits since the last time that some were shown, and the final counts.
    pub(super) fn finish(&self, mut outcome: Outcome<KeyedReading>) -> Result<(), Failure> {
        let (output, messages) = (self.output, &self.output.messages);
        let (targets, last) = (take(&mut outcome.targets), take(&mut outcome.last));
        if last.is_empty() {
            return outcome.finish(messages);
        }
        let lasted = outcome.read_until;
        let reading = self.reading(&last, lasted);
        let mut text = Ok(String::new());
        let has_unshown_rest = self.shown.as_ref().is_some_and(|(_, at)| *at < lasted);
        if has_unshown_rest && outcome.output_was_read && !self.is_redrawn {
            text = self.since_last(&targets, &reading, lasted);
        }
        let total = self.report(&targets, &reading, None, lasted);
        let total_text = output::keyed(output.format, &total);
        outcome.print(output, text.and_then(|text| Ok(text + &total_text?)));
        let (many, sum) = total.sum();
        output.sum_up(messages, many, || sum);
        if outcome.output_was_read {
            warn_of_untyped(messages, total.only_untyped(), outcome.of_results);
            warn_of_other_keys(messages, total.of_other_keys());
        }
        outcome.warn_of_uneven_times(messages);
        outcome.finish(messages)
    }

    /// The readings of all processes as one.
    fn reading<'r>(&self, each: &'r [(i32, KeyedReading)], at: Duration) -> Cow<'r, KeyedReading> {
        let join = || KeyedReading::of_processes(each, self.by.has_pid(), at);
        as_one(each, self.is_of_several, join)
    }

    /// The hits since the last time that some were shown.
    fn since_last(
        &self,
        targets: &[Target],
        reading: &KeyedReading,
        at: Duration,
    ) -> Result<String, Failure> {
        let last = self.shown.as_ref();
        let since = last.map_or(at, |(_, last)| at.saturating_sub(*last));
        let report = self.report(targets, reading, last.map(|(before, _)| before), since);
        output::keyed(self.output.format, &report.at(at))
    }

    fn report<'r>(
        &'r self,
        targets: &'r [Target],
        reading: &'r KeyedReading,
        before: Option<&KeyedReading>,
        elapsed: Duration,
    ) -> KeyedReport<'r> {
        KeyedReport::new(targets, reading, before, elapsed, self.by, &self.sources)
    }
}

impl ReadingHandler for KeyedCounting<'_> {
    type Reading = KeyedReading;

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        extra_time: Duration,
    ) -> probes_lib::Result<Option<KeyedReading>> {
        let reading = if self.by.has_expressions() {
            KeyedReading::of(observer)?
        } else {
            KeyedReading::by_name(&observer.counts()?)
        };
        Ok(Some(reading.with_extra_time(extra_time)))
    }

    fn last(&mut self, _: i32, report: ObservationReport, extra_time: Duration) -> KeyedReading {
        let reading = if self.by.has_expressions() {
            KeyedReading::last(report.keyed_counts, report.counts.refused())
        } else {
            KeyedReading::by_name(&report.counts)
        };
        reading.with_extra_time(extra_time)
    }

    /// Shows the hits since the last time; in the redrawn table, all hits so far.
    fn show(
        &mut self,
        shown: ShownReadings<'_, KeyedReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let at = shown.at;
        let reading = self.reading(shown.each, at);
        let next = if let Some(table) = shown.table {
            let text = self.report(shown.targets, &reading, None, at).table();
            table.redraw(&text, &shown.gaps, interruptible)
        } else {
            let text = self.since_last(shown.targets, &reading, at);
            text.and_then(|text| interruptible.write(&text))
        };
        // Kept even if it could not be written.
        self.shown = Some((reading.into_owned(), at));
        next
    }
}
