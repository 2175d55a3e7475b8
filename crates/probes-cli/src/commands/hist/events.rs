//! `hist -events`: which values counters of the runtime and events of the program have, and how long phases and spans
//! take.

use probes_lib::{
    EventDurations, Glob, Linear, RuntimeEventGroup, RuntimeEventKind, SelectedEntry, UserValue,
    ValueRecorder,
};

use super::Args;
use crate::commands::event_reading::{EventConsumer, EventRequest, ReadingState};
use crate::commands::readings::Display;
use crate::commands::report_file::ReportFile;
use crate::commands::step_failures::StepFailures;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::{EventHistogram, Histograms, LostWords, ReportedFigures};

pub(super) fn run(
    args: &Args,
    globs: &[Glob],
    linear: Option<Linear>,
    output: &Output,
) -> Result<(), Failure> {
    let options = args.overrides.options();
    let request = EventRequest::new("hist", &args.selection, options, globs, output)?;
    let output = &request.output;
    // Before anything is read, because it may fail.
    let report_file = ReportFile::create_if_given(args.svg.as_deref(), &output.messages)?;
    let display = Display::new(output, args.interval)?;
    let mut recording = RecordedEvents {
        output,
        linear,
        recorders: Vec::new(),
        durations: EventDurations::default(),
        lost: LostWords::default(),
        picture: None,
        draws: report_file.is_some(),
    };
    let mut failures = StepFailures::default();
    failures.add(request.run(&mut recording, display, args.until.duration));
    if let (Some(file), Some(picture)) = (report_file, recording.picture) {
        failures.add(file.write(picture));
    }
    failures.finish(&output.messages)
}

/// Records values of events.
struct RecordedEvents<'o> {
    output: &'o Output,
    linear: Option<Linear>,
    /// One for each name, by its index.
    recorders: Vec<RecordedValues>,
    durations: EventDurations,
    lost: LostWords,
    /// For the file of `-svg`, drawn at the end.
    picture: Option<String>,
    /// Whether a picture is wanted.
    draws: bool,
}

/// The values of events of one name.
#[derive(Clone, Debug)]
struct RecordedValues {
    values: ValueRecorder,
    /// Whether they are times in nanoseconds.
    are_times: bool,
}

impl EventConsumer for RecordedEvents<'_> {
    fn add(&mut self, entry: &SelectedEntry<'_>) {
        let (name, domain, time, kind) = match *entry {
            SelectedEntry::Event {
                name,
                domain,
                time,
                kind,
            } => (name, domain, time, kind),
            SelectedEntry::Lost { domain, words } => {
                self.durations.forget(domain);
                return self.lost.add(domain, words);
            }
            SelectedEntry::DomainEnded(domain) => return self.durations.forget(domain),
            SelectedEntry::PausedOrResumed(time) => return self.durations.paused_or_resumed(time),
            SelectedEntry::Forked(_) => return,
        };
        match kind {
            RuntimeEventKind::Begin(_) | RuntimeEventKind::User(_, UserValue::SpanBegin) => {
                self.durations.begin(domain, name, time);
            }
            RuntimeEventKind::End(_) | RuntimeEventKind::User(_, UserValue::SpanEnd) => {
                let duration = self.durations.end(domain, name, time);
                let recorded = self.recorded(name);
                recorded.are_times = true;
                if let Some(duration) = duration {
                    recorded.values.add_unsigned(duration);
                }
            }
            RuntimeEventKind::Counter(_, value) => self.recorded(name).values.add_unsigned(value),
            RuntimeEventKind::User(_, UserValue::Int(value)) => {
                self.recorded(name).values.add(value)
            }
            _ => self.recorded(name).values.add_untyped(),
        }
    }

    fn show(&mut self, state: ReadingState<'_>) -> Result<String, Failure> {
        let histograms = self.histograms(state);
        let shown = self.shown(state, &histograms).so_far();
        if state.is_redrawn {
            return Ok(shown.table());
        }
        shown.text(self.output.format)
    }

    fn last(&mut self, state: ReadingState<'_>) -> Result<String, Failure> {
        let histograms = self.histograms(state);
        let shown = self.shown(state, &histograms);
        let text = shown.text(self.output.format)?;
        let (many, sum) = shown.sum();
        self.output.sum_up(&self.output.messages, many, || sum);
        let picture = self.draws.then(|| shown.picture());
        self.picture = picture;
        Ok(text)
    }
}

impl RecordedEvents<'_> {
    /// What was recorded under a name.
    fn recorded(&mut self, name: usize) -> &mut RecordedValues {
        if name >= self.recorders.len() {
            self.recorders
                .resize_with(name + 1, || RecordedValues::new(self.linear));
        }
        &mut self.recorders[name]
    }

    fn histograms(&self, state: ReadingState<'_>) -> Vec<EventHistogram> {
        let names = state.names.iter().enumerate();
        names
            .map(|(index, name)| {
                let recorded = self.recorders.get(index).cloned();
                let recorded = recorded.unwrap_or_else(|| RecordedValues::new(self.linear));
                let is_phase = name.group == RuntimeEventGroup::Phase;
                EventHistogram {
                    group: name.group.into(),
                    are_times: recorded.are_times || is_phase,
                    values: recorded.values.histogram(&name.name),
                }
            })
            .collect()
    }

    fn shown<'h>(
        &self,
        state: ReadingState<'h>,
        histograms: &'h [EventHistogram],
    ) -> Histograms<'h> {
        let target = std::slice::from_ref(state.target);
        Histograms::of_events(target, histograms, state.at, self.linear, &self.lost)
    }
}

impl RecordedValues {
    fn new(linear: Option<Linear>) -> RecordedValues {
        RecordedValues {
            values: ValueRecorder::new(linear),
            are_times: false,
        }
    }
}
