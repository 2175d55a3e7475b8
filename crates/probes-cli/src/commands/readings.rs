//! What commands do with the readings of the processes that they observe, and what they have at the end: the same for
//! one process and for several.

use std::borrow::Cow;
use std::mem::take;
use std::time::Duration;

use probes_lib::{ObservationReport, Observer, Target};

use super::gaps::{GapWarning, Gaps};
use super::process_failures::{OTHERS_WERE_OBSERVED, ProcessFailures};
use super::redraw::RedrawnTable;
use super::report_file::ReportFile;
use super::step_failures::StepFailures;
use super::untyped::warn_of_figures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::interruptible_output::{InterruptibleOutput, Next};
use crate::messages::Messages;
use crate::output::{Format, ReportedFigures, WarningKind};

/// How often a table on a terminal is redrawn, unless -interval says how often.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// What a command does with the readings of the processes that it observes.
///
/// `extra_time` is for how long a process was observed before the time of the observation began: if there are several, the
/// first is observed for longer.
pub(super) trait ReadingHandler {
    /// What is read of a process.
    type Reading;

    /// Prepares for the readings of a process that an observed one has forked.
    fn add_process(&mut self, _target: &Target) {}

    /// Reads a process. A reading replaces the previous one of its process; `None` leaves that in place.
    fn read(
        &mut self,
        pid: i32,
        observer: &mut Observer,
        extra_time: Duration,
    ) -> probes_lib::Result<Option<Self::Reading>>;

    /// Returns the last reading of a process, whose observation has been removed.
    fn last(&mut self, pid: i32, report: ObservationReport, extra_time: Duration) -> Self::Reading;

    /// How long to wait before the processes are read and shown again, if that is not at the intervals of the
    /// [`Display`].
    fn next_read(&self, _observer: &Observer) -> Option<Duration> {
        None
    }

    /// Shows the readings: after each time that the processes were read, also if nothing was new.
    fn show(
        &mut self,
        shown: ShownReadings<'_, Self::Reading>,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure>;
}

/// A handler that shows figures of all processes together.
pub(super) trait FiguresHandler: ReadingHandler<Reading: Clone> {
    type Figures<'f>: ReportedFigures
    where
        Self: 'f;

    /// The readings of all processes as one.
    fn joined<'r>(&self, each: &'r [(i32, Self::Reading)]) -> Cow<'r, Self::Reading>;

    /// The figures of a reading that was made so long after the beginning.
    fn figures<'f>(
        &'f self,
        targets: &'f [Target],
        reading: &'f Self::Reading,
        at: Duration,
    ) -> Self::Figures<'f>;

    /// Warns of figures that cannot be trusted.
    fn warn(&self, _messages: &Messages, _figures: &Self::Figures<'_>) {}
}

/// The readings of all processes as one: that of the process, unless the answer has the form for several; else what
/// `join` makes of them.
pub(super) fn as_one<'r, R: Clone>(
    each: &'r [(i32, R)],
    is_of_several: bool,
    join: impl FnOnce() -> R,
) -> Cow<'r, R> {
    match each {
        [(_, reading)] if !is_of_several => Cow::Borrowed(reading),
        _ => Cow::Owned(join()),
    }
}

/// Readings that are shown.
pub(super) struct ShownReadings<'t, T> {
    pub(super) targets: &'t [Target],
    /// The latest of each process of which anything was read, by its pid.
    pub(super) each: &'t [(i32, T)],
    /// Since the beginning.
    pub(super) at: Duration,
    /// To be shown in a table that is redrawn. Otherwise, warnings tell of them, before the reading is shown.
    pub(super) gaps: Gaps,
    /// The table that is redrawn, if one is.
    pub(super) table: Option<&'t mut RedrawnTable>,
}

impl<T> ShownReadings<'_, T> {
    /// Shows the figures so far.
    pub(super) fn show(
        self,
        handler: &impl FiguresHandler<Reading = T>,
        format: Format,
        interruptible: &mut InterruptibleOutput,
    ) -> Result<Next, Failure> {
        let reading = handler.joined(self.each);
        let so_far = handler.figures(self.targets, &reading, self.at).so_far();
        match self.table {
            Some(table) => table.redraw(&so_far.table(), &self.gaps, interruptible),
            None => interruptible.write(&so_far.text(format)?),
        }
    }
}

/// How often the figures so far are shown, and whether as a table that is redrawn.
#[derive(Default)]
pub(super) struct Display {
    /// `None` if they are shown only at the end, or as often as [`ReadingHandler::next_read`] says.
    pub(super) interval: Option<Duration>,
    pub(super) table: Option<RedrawnTable>,
}

impl Display {
    /// Redraws tables on a terminal; shows anything else only if there is an interval.
    pub(super) fn new(output: &Output, interval: Option<Duration>) -> Result<Display, Failure> {
        let is_terminal = output.destination.is_terminal_on_stdout();
        let is_redrawn = output.format == Format::Table && is_terminal;
        Ok(Display {
            interval: interval.or(is_redrawn.then_some(REDRAW_INTERVAL)),
            table: is_redrawn.then(RedrawnTable::new).transpose()?,
        })
    }

    /// How long to wait before the processes of these observers are read and shown again.
    pub(super) fn next_read<'o>(
        &self,
        handler: &impl ReadingHandler,
        observers: impl IntoIterator<Item = &'o Observer>,
    ) -> Duration {
        let each = observers.into_iter().map(|one| handler.next_read(one));
        let first = each.flatten().min();
        first.or(self.interval).unwrap_or(Duration::MAX)
    }
}

/// The result of an observation.
pub(super) struct Outcome<T> {
    pub(super) targets: Vec<Target>,
    /// What was read last of each process of which anything was read, by its pid.
    pub(super) last: Vec<(i32, T)>,
    /// When the last reading was, since the beginning. It is before the end only if each process is gone, or its
    /// observation could not be removed.
    pub(super) read_until: Duration,
    /// How long it took.
    pub(super) lasted: Duration,
    /// False if a blocked write to standard output was interrupted by a signal, because its reader
    /// did not read.
    pub(super) output_was_read: bool,
    /// Whether hits were asked for the results of functions.
    pub(super) of_results: bool,
    /// What has failed; to be reported after the results are printed.
    pub(super) failures: StepFailures,
    pub(super) unreported: Unreported,
    /// For how much longer than the last process the first was observed.
    pub(super) extra_time: Duration,
}

/// What is to be reported after the results are printed.
pub(super) struct Unreported {
    /// What the observation of each process misses, by its pid; a warning may have reported some of it already.
    pub(super) gaps: Vec<(GapWarning, (i32, Gaps))>,
    /// What has failed for some of the processes.
    pub(super) failures: ProcessFailures,
}

impl<T> Outcome<T> {
    /// Prints the results.
    pub(super) fn print(&mut self, output: &Output, text: Result<String, Failure>) {
        let printed = text.and_then(|text| output.print_last(&text, self.output_was_read));
        self.failures.add(printed);
    }

    /// Prints the final figures, with a text before them, and writes their picture, if there is a file for it. Warns
    /// of what is wrong with them, and reports what has failed. If nothing was read, there are no figures.
    pub(super) fn finish_with(
        mut self,
        before: Result<String, Failure>,
        handler: &impl FiguresHandler<Reading = T>,
        file: Option<ReportFile>,
        output: &Output,
    ) -> Result<(), Failure> {
        let messages = &output.messages;
        let (targets, last) = (take(&mut self.targets), take(&mut self.last));
        if last.is_empty() {
            return self.finish(messages);
        }
        let reading = handler.joined(&last);
        let report = handler.figures(&targets, &reading, self.read_until);
        let text = before.and_then(|before| Ok(before + &report.text(output.format)?));
        self.print(output, text);
        if let Some(file) = file {
            self.failures.add(file.write(report.picture()));
        }
        let (lines, sum) = report.sum();
        output.sum_up(messages, lines, || sum);
        // The results say it, too. A terminal that accepts no output would keep the command from ending.
        if self.output_was_read {
            handler.warn(messages, &report);
            warn_of_figures(messages, &report, self.of_results);
        }
        self.warn_of_uneven_times(messages);
        self.finish(messages)
    }

    /// Warns if the first process was observed for so much longer than the last that it matters: by more than a tenth.
    pub(super) fn warn_of_uneven_times(&self, messages: &Messages) {
        if self.extra_time > self.lasted / 10 {
            messages.warning(
                WarningKind::UnevenTimes,
                &format!(
                    "the first process was observed for {} ms longer than the last: its hits until then are counted, too",
                    self.extra_time.as_millis()
                ),
                "processes are observed one after the other: in a longer time, the difference matters less",
            );
        }
    }

    /// Reports gaps in the results, which have been printed, and what has failed.
    pub(super) fn finish(mut self, messages: &Messages) -> Result<(), Failure> {
        let Unreported { gaps, failures } = &mut self.unreported;
        for (warning, (pid, gaps)) in gaps {
            warning.update(&failures.messages(*pid), gaps);
        }
        self.failures.add(failures.finish(OTHERS_WERE_OBSERVED));
        self.failures.finish(messages)
    }
}
