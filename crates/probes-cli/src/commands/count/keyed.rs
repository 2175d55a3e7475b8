//! `count -by`: how often hits have each key.

use std::time::Duration;

use probes_lib::{Functions, Target};

use crate::commands::observe_loop::{Display, ObservationLoop, ShownReading};
use crate::commands::several::{SeveralObservations, SeveralOutcome};
use crate::commands::untyped::warn_of_untyped;
use crate::destination::Output;
use crate::failure::Failure;
use crate::flags::CountedBy;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{self, FunctionSources, KeyedReading, KeyedReport};

/// Counts until the end, and prints what was counted.
pub(super) fn run(
    by: &CountedBy,
    active: ObservationLoop<'_>,
    display: Display,
    target: &Target,
    output: &Output,
) -> Result<(), Failure> {
    // If it has exited meanwhile, callers have no names.
    let functions = by
        .has_caller()
        .then(|| Functions::of_process(target.pid()).ok());
    let mut counting = KeyedCounting {
        target,
        output,
        by,
        sources: functions
            .flatten()
            .map(FunctionSources::of)
            .unwrap_or_default(),
        is_redrawn: display.table.is_some(),
        last: None,
    };
    let mut outcome = active.run(display, KeyedReading::of, |shown, interruptible| {
        counting.show(shown, interruptible)
    });
    let total = match outcome.observed.take() {
        Some(report) => {
            let reading = KeyedReading::last(report.keyed_counts, report.counts.refused());
            Some((reading, outcome.lasted))
        }
        None => outcome.last.take().or_else(|| counting.last.take()),
    };
    if let Some((reading, lasted)) = total {
        let mut text = Ok(String::new());
        let before = counting.last.as_ref().filter(|_| !counting.is_redrawn);
        if let Some((before, at)) = before.filter(|_| outcome.output_was_read) {
            let since = lasted.saturating_sub(*at);
            let rest = counting.report(&reading, Some(before), since).at(lasted);
            text = output::keyed(output.format, &rest);
        }
        let report = counting.report(&reading, None, lasted);
        let total = output::keyed(output.format, &report);
        outcome.print(output, text.and_then(|text| Ok(text + &total?)));
        let (many, sum) = report.sum();
        output.sum_up(&output.messages, many, || sum);
        if outcome.output_was_read {
            warn_of_untyped(&output.messages, report.only_untyped());
        }
    }
    outcome.finish(&output.messages)
}

/// Counts the hits of several processes together until the end, and prints what was counted.
pub(super) fn run_of_several(
    by: &CountedBy,
    active: SeveralObservations<'_>,
    display: Display,
    output: &Output,
) -> Result<(), Failure> {
    let mut counting = CountingSeveral {
        output,
        by,
        sources: FunctionSources::default(),
        is_redrawn: display.table.is_some(),
        shown: None,
    };
    let outcome = active.run(
        display,
        |_| (),
        |_, observer, lead| {
            let reading = if by.has_expressions() {
                KeyedReading::of(observer)?
            } else {
                KeyedReading::by_name(&observer.counts()?)
            };
            Ok(Some(reading.with_lead(lead)))
        },
        |_, report, lead| {
            let reading = if by.has_expressions() {
                KeyedReading::last(report.keyed_counts, report.counts.refused())
            } else {
                KeyedReading::by_name(&report.counts)
            };
            reading.with_lead(lead)
        },
        |targets, each, shown, interruptible| counting.show(targets, each, shown, interruptible),
    );
    let text = counting.rest_and_total(&outcome);
    outcome.warn_of_lead(&output.messages);
    outcome.finish(output, text)
}

/// Shows counts of several processes together.
struct CountingSeveral<'o> {
    output: &'o Output,
    by: &'o CountedBy,
    /// None: an address has no meaning for several.
    sources: FunctionSources,
    is_redrawn: bool,
    /// The last reading that was shown, and when that was.
    shown: Option<(KeyedReading, Duration)>,
}

impl CountingSeveral<'_> {
    /// Shows the hits since the last time; in the redrawn table, all hits so far.
    fn show(
        &mut self,
        targets: &[Target],
        each: &[(i32, KeyedReading)],
        shown: ShownReading<'_, ()>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let at = shown.at;
        let reading = KeyedReading::of_processes(each, self.by.has_pid(), at);
        let next = if let Some(table) = shown.table {
            let text = self.report(targets, &reading, None, at).table();
            table.redraw(&text, &shown.gaps, interruptible)
        } else {
            let text = self.since_last(targets, &reading, at);
            text.and_then(|text| interruptible.write(&text))
        };
        // Kept even if it could not be written.
        self.shown = Some((reading, at));
        next
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

    fn rest_and_total(&self, outcome: &SeveralOutcome<KeyedReading>) -> Result<String, Failure> {
        if outcome.last.is_empty() {
            return Ok(String::new());
        }
        let by_pid = self.by.has_pid();
        let reading = KeyedReading::of_processes(&outcome.last, by_pid, outcome.lasted);
        let mut text = String::new();
        if self.shown.is_some() && outcome.output_was_read && !self.is_redrawn {
            text = self.since_last(&outcome.targets, &reading, outcome.lasted)?;
        }
        let total = self.report(&outcome.targets, &reading, None, outcome.lasted);
        let (many, sum) = total.sum();
        text += &output::keyed(self.output.format, &total)?;
        let messages = &self.output.messages;
        self.output.sum_up(messages, many, || sum);
        if outcome.output_was_read {
            warn_of_untyped(messages, total.only_untyped());
        }
        Ok(text)
    }

    fn report<'r>(
        &'r self,
        targets: &'r [Target],
        reading: &'r KeyedReading,
        before: Option<&KeyedReading>,
        seconds: Duration,
    ) -> KeyedReport<'r> {
        KeyedReport::new(targets, reading, before, seconds, self.by, &self.sources)
    }
}

/// Shows counts.
struct KeyedCounting<'t> {
    target: &'t Target,
    output: &'t Output,
    by: &'t CountedBy,
    sources: FunctionSources,
    is_redrawn: bool,
    /// The last reading, and when it was.
    last: Option<(KeyedReading, Duration)>,
}

impl KeyedCounting<'_> {
    /// Shows the hits since the last time; in the redrawn table, all hits so far.
    fn show(
        &mut self,
        shown: ShownReading<'_, KeyedReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let (reading, at) = (shown.reading, shown.at);
        let next = if let Some(table) = shown.table {
            let text = self.report(&reading, None, at).table();
            table.redraw(&text, &shown.gaps, interruptible)
        } else {
            let last = self.last.as_ref();
            let since = last.map_or(at, |(_, last)| at.saturating_sub(*last));
            let report = self.report(&reading, last.map(|(before, _)| before), since);
            let text = output::keyed(self.output.format, &report.at(at));
            text.and_then(|text| interruptible.write(&text))
        };
        // Kept even if it could not be written.
        self.last = Some((reading, at));
        next
    }

    fn report<'r>(
        &'r self,
        reading: &'r KeyedReading,
        before: Option<&KeyedReading>,
        seconds: Duration,
    ) -> KeyedReport<'r> {
        KeyedReport::new(
            std::slice::from_ref(self.target),
            reading,
            before,
            seconds,
            self.by,
            &self.sources,
        )
    }
}
