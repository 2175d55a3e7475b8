//! `hist -by`: a histogram for each key.

use std::borrow::Cow;
use std::time::Duration;

use probes_lib::{ObservationReport, Observer, Target};

use crate::commands::readings::{FiguresHandler, ReadingHandler, ShownReadings, as_one};
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::output::{FunctionSources, KeyedHistogramReading, KeyedHistogramReport, KeyedQuestion};

/// Reads and shows histograms by keys.
pub(super) struct KeyedHistogramPrinter<'q> {
    output: &'q Output,
    asked: KeyedQuestion<'q>,
    is_of_several: bool,
    sources: FunctionSources,
}

impl<'q> KeyedHistogramPrinter<'q> {
    /// `only` is the process, if the answer is about one.
    pub(super) fn new(
        asked: KeyedQuestion<'q>,
        only: Option<&Target>,
        output: &'q Output,
    ) -> KeyedHistogramPrinter<'q> {
        let of_callers = only.filter(|_| asked.by.has_caller());
        let sources = of_callers.map(|target| FunctionSources::of_process(target.pid()));
        KeyedHistogramPrinter {
            output,
            asked,
            is_of_several: only.is_none(),
            sources: sources.unwrap_or_default(),
        }
    }
}

impl ReadingHandler for KeyedHistogramPrinter<'_> {
    type Reading = KeyedHistogramReading;

    fn read(
        &mut self,
        _: i32,
        observer: &mut Observer,
        _: Duration,
    ) -> probes_lib::Result<Option<KeyedHistogramReading>> {
        KeyedHistogramReading::of(observer).map(Some)
    }

    fn last(&mut self, _: i32, report: ObservationReport, _: Duration) -> KeyedHistogramReading {
        KeyedHistogramReading::last(report.keyed_histograms, report.counts.refused())
    }

    fn show(
        &mut self,
        shown: ShownReadings<'_, KeyedHistogramReading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        shown.show(self, self.output.format, interruptible)
    }
}

impl FiguresHandler for KeyedHistogramPrinter<'_> {
    type Figures<'f>
        = KeyedHistogramReport<'f>
    where
        Self: 'f;

    fn joined<'r>(
        &self,
        each: &'r [(i32, KeyedHistogramReading)],
    ) -> Cow<'r, KeyedHistogramReading> {
        let join = || KeyedHistogramReading::of_processes(each, self.asked.by.has_pid());
        as_one(each, self.is_of_several, join)
    }

    fn figures<'f>(
        &'f self,
        targets: &'f [Target],
        reading: &'f KeyedHistogramReading,
        at: Duration,
    ) -> KeyedHistogramReport<'f> {
        KeyedHistogramReport::new(targets, reading, at, self.asked, &self.sources)
    }
}
