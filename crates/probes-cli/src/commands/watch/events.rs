//! `watch -events`: runtime events, one by one.

use std::mem::take;
use std::time::Duration;

use probes_lib::{Glob, SelectedEntry};

use super::Args;
use crate::commands::event_reading::{EventConsumer, EventRequest, ReadingState};
use crate::commands::readings::Display;
use crate::destination::Output;
use crate::failure::Failure;
use crate::output::{EventLine, EventLines, LostWords, sort_by_time};

pub(super) fn run(args: &Args, globs: &[Glob], output: &Output) -> Result<(), Failure> {
    let options = args.overrides.options();
    let request = EventRequest::new("watch", &args.selection, options, globs, output)?;
    let mut watching = WatchedEvents {
        lines: EventLines::new(output.format),
        limit: args.limit,
        shown: 0,
        waiting: Vec::new(),
        lost: LostWords::default(),
    };
    let display = Display {
        // Zero: after each reading.
        interval: Some(Duration::ZERO),
        table: None,
    };
    request.run(&mut watching, display, args.until.duration)
}

/// Shows events.
struct WatchedEvents {
    lines: EventLines,
    /// How many are shown at most; `None`: all.
    limit: Option<u64>,
    shown: u64,
    /// Those that are to be shown next.
    waiting: Vec<EventLine>,
    /// What was lost since the last ones were shown.
    lost: LostWords,
}

impl EventConsumer for WatchedEvents {
    fn add(&mut self, entry: &SelectedEntry<'_>) {
        match *entry {
            SelectedEntry::Event {
                name,
                domain,
                time,
                kind,
            } => self.waiting.push(EventLine::new(domain, time, name, kind)),
            SelectedEntry::Lost { domain, words } => self.lost.add(domain, words),
            _ => {}
        }
    }

    fn show(&mut self, state: ReadingState<'_>) -> Result<String, Failure> {
        let mut events = take(&mut self.waiting);
        sort_by_time(&mut events);
        if let Some(limit) = self.limit {
            let left = usize::try_from(limit - self.shown).unwrap_or(usize::MAX);
            events.truncate(left);
        }
        self.shown += events.len() as u64;
        self.lines.text(state.names, &take(&mut self.lost), &events)
    }

    fn has_enough(&self) -> bool {
        self.limit.is_some_and(|limit| self.shown >= limit)
    }

    fn last(&mut self, state: ReadingState<'_>) -> Result<String, Failure> {
        self.show(state)
    }
}
