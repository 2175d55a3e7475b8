//! `count -events`: how often runtime events occur.

use std::time::Duration;

use probes_lib::{Glob, RuntimeEventKind, SelectedEntry, UserValue};

use super::Args;
use crate::commands::event_reading::{EventConsumer, EventRequest, ReadingState};
use crate::commands::readings::Display;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::{EventCounts, EventTotals};

pub(super) fn run(args: &Args, globs: &[Glob], output: &Output) -> Result<(), Failure> {
    let options = args.overrides.options();
    let request = EventRequest::new("count", &args.selection, options, globs, output)?;
    let output = &request.output;
    let display = Display::new(output, args.interval)?;
    let mut counting = CountedEvents {
        output,
        totals: EventTotals::default(),
        shown: None,
    };
    request.run(&mut counting, display, args.until.duration)
}

/// The events that were read so far, by their names.
struct CountedEvents<'o> {
    output: &'o Output,
    totals: EventTotals,
    /// What was shown last, and when.
    shown: Option<(EventTotals, Duration)>,
}

impl EventConsumer for CountedEvents<'_> {
    fn add(&mut self, entry: &SelectedEntry<'_>) {
        match *entry {
            // Counted when they begin.
            SelectedEntry::Event {
                kind: RuntimeEventKind::End(_) | RuntimeEventKind::User(_, UserValue::SpanEnd),
                ..
            } => {}
            SelectedEntry::Event { name, .. } => self.totals.add(name),
            SelectedEntry::Lost { domain, words } => self.totals.lost.add(domain, words),
            _ => {}
        }
    }

    fn show(&mut self, state: ReadingState<'_>) -> Result<String, Failure> {
        if state.is_redrawn {
            return Ok(self.since_beginning(state).table());
        }
        let none = EventTotals::default();
        let (before, since) = match &self.shown {
            Some((before, at)) => (before, *at),
            None => (&none, Duration::ZERO),
        };
        let elapsed = state.at.saturating_sub(since);
        let text = self.counts(state, before, elapsed).at(state.at);
        let text = text.text(self.output.format)?;
        self.shown = Some((self.totals.clone(), state.at));
        Ok(text)
    }

    fn last(&mut self, state: ReadingState<'_>) -> Result<String, Failure> {
        let mut text = String::new();
        if self.shown.is_some() {
            // The last interval too, so that the intervals add up to the total.
            text = self.show(state)?;
        }
        let all = self.since_beginning(state);
        text += &all.text(self.output.format)?;
        let (many, sum) = all.sum();
        self.output.sum_up(&self.output.messages, many, || sum);
        Ok(text)
    }
}

impl CountedEvents<'_> {
    fn since_beginning<'c>(&self, state: ReadingState<'c>) -> EventCounts<'c> {
        self.counts(state, &EventTotals::default(), state.at)
    }

    fn counts<'c>(
        &self,
        state: ReadingState<'c>,
        before: &EventTotals,
        elapsed: Duration,
    ) -> EventCounts<'c> {
        let (target, ocaml, names) = (state.target, state.ocaml, state.names);
        EventCounts::new(target, ocaml, names, &self.totals, before, elapsed)
    }
}
