//! `hist -by`: a histogram for each key.

use std::time::Duration;

use probes_lib::{Functions, Target};

use crate::commands::observe_loop::{Display, ObservationLoop, ShownReading};
use crate::commands::report_file::ReportFile;
use crate::commands::several::SeveralObservations;
use crate::commands::untyped::warn_of_untyped;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{
    self, FunctionSources, KeyedHistogramReading, KeyedHistogramReport, KeyedQuestion,
};

/// Shows the histograms of one process until the observation is over, then prints the final ones.
pub(super) fn run(
    asked: KeyedQuestion<'_>,
    active: ObservationLoop<'_>,
    display: Display,
    target: &Target,
    report_file: Option<ReportFile>,
    output: &Output,
) -> Result<(), Failure> {
    // If the functions of the process cannot be read (it may have exited meanwhile), callers are not named.
    let functions = asked
        .by
        .has_caller()
        .then(|| Functions::of_process(target.pid()).ok());
    let sources = functions.flatten().map(FunctionSources::of);
    let reporter = KeyedReporter {
        output,
        asked,
        sources: sources.unwrap_or_default(),
    };
    let targets = std::slice::from_ref(target);
    let mut last: Option<(KeyedHistogramReading, Duration)> = None;
    let mut outcome = active.run(
        display,
        KeyedHistogramReading::of,
        |shown, interruptible| {
            let ShownReading {
                reading,
                at,
                table,
                gaps,
            } = shown;
            let shown = ShownReading {
                reading: (),
                at,
                table,
                gaps,
            };
            let next = reporter.show(targets, &reading, shown, interruptible);
            // Kept even if it could not be written.
            last = Some((reading, at));
            next
        },
    );
    let total = match outcome.observed.take() {
        Some(report) => {
            let refused = report.counts.refused();
            let reading = KeyedHistogramReading::last(report.keyed_histograms, refused);
            Some((reading, outcome.lasted))
        }
        None => outcome.last.take().or_else(|| last.take()),
    };
    if let Some((reading, lasted)) = total {
        let report = reporter.report(targets, &reading, lasted);
        outcome.print(output, output::keyed_histograms(output.format, &report));
        if let Some(report_file) = report_file {
            let written = report_file.write(report.picture());
            outcome.failures.add(written);
        }
        let (lines, summary) = report.sum();
        output.sum_up(&output.messages, lines, || summary);
        if outcome.output_was_read {
            warn_of_untyped(&output.messages, report.only_untyped());
        }
    }
    outcome.finish(&output.messages)
}

/// Same as [`run`], for several processes together.
pub(super) fn run_of_several(
    asked: KeyedQuestion<'_>,
    active: SeveralObservations<'_>,
    display: Display,
    report_file: Option<ReportFile>,
    output: &Output,
) -> Result<(), Failure> {
    let reporter = KeyedReporter {
        output,
        asked,
        // Not needed: `-by caller` is refused for several processes.
        sources: FunctionSources::default(),
    };
    let of_all = |each: &[_]| KeyedHistogramReading::of_processes(each, asked.by.has_pid());
    let outcome = active.run(
        display,
        |_| (),
        |_, observer, _| KeyedHistogramReading::of(observer).map(Some),
        |_, report, _| {
            KeyedHistogramReading::last(report.keyed_histograms, report.counts.refused())
        },
        |targets, each, shown, interruptible| {
            reporter.show(targets, &of_all(each), shown, interruptible)
        },
    );
    if outcome.last.is_empty() {
        return outcome.finish(output, Ok(String::new()));
    }
    let (reading, targets) = (of_all(&outcome.last), outcome.targets.clone());
    let report = reporter.report(&targets, &reading, outcome.lasted);
    let text = output::keyed_histograms(output.format, &report);
    let written = report_file.map_or(Ok(()), |file| file.write(report.picture()));
    let (lines, summary) = report.sum();
    output.sum_up(&output.messages, lines, || summary);
    if outcome.output_was_read {
        warn_of_untyped(&output.messages, report.only_untyped());
    }
    outcome.warn_of_lead(&output.messages);
    outcome.finish(output, text).and(written)
}

/// What the reports of an observation are made with.
struct KeyedReporter<'q> {
    output: &'q Output,
    asked: KeyedQuestion<'q>,
    sources: FunctionSources,
}

impl KeyedReporter<'_> {
    fn show(
        &self,
        targets: &[Target],
        reading: &KeyedHistogramReading,
        shown: ShownReading<'_, ()>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let so_far = self.report(targets, reading, shown.at).so_far();
        if let Some(table) = shown.table {
            return table.redraw(&so_far.table(), &shown.gaps, interruptible);
        }
        let text = output::keyed_histograms(self.output.format, &so_far);
        text.and_then(|text| interruptible.write(&text))
    }

    fn report<'r>(
        &'r self,
        targets: &'r [Target],
        reading: &'r KeyedHistogramReading,
        elapsed: Duration,
    ) -> KeyedHistogramReport<'r> {
        KeyedHistogramReport::new(targets, reading, elapsed, self.asked, &self.sources)
    }
}
