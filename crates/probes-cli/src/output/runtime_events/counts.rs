//! How often runtime events have occurred, in one shape for all formats.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt::Write;
use std::time::Duration;

use probes_lib::{RuntimeEventName, Target};
use serde::Serialize;

use super::super::format::{Format, VERSION, json, seconds, seconds_or_null, time_prefix};
use super::super::table;
use super::lost::{LostOfDomain, LostWords, lost_lines, lost_of_domains};
use crate::failure::Failure;
use crate::text::{Escaped, TERMINAL_LINES, number_of};

/// How often events have occurred so far, by the indices of their names, and what was lost.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventTotals {
    pub(crate) hits: Vec<u64>,
    pub(crate) lost: LostWords,
}

impl EventTotals {
    /// Adds an event.
    pub(crate) fn add(&mut self, name: usize) {
        if name >= self.hits.len() {
            self.hits.resize(name + 1, 0);
        }
        if let Some(hits) = self.hits.get_mut(name) {
            *hits += 1;
        }
    }
}

/// How often runtime events have occurred, most first.
#[derive(Serialize)]
#[serde(tag = "type", rename = "runtime_event_count")]
pub(crate) struct EventCounts<'c> {
    version: u32,
    pid: i32,
    program: Cow<'c, str>,
    /// The version of OCaml.
    ocaml: &'c str,
    /// The time since the beginning; `None` in the final answer.
    #[serde(serialize_with = "seconds_or_null")]
    at: Option<Duration>,
    #[serde(serialize_with = "seconds")]
    seconds: Duration,
    events: Vec<EventRow<'c>>,
    lost: Vec<LostOfDomain>,
}

#[derive(Serialize)]
struct EventRow<'c> {
    group: &'static str,
    name: &'c str,
    hits: u64,
    /// Events a second.
    rate: f64,
}

impl<'c> EventCounts<'c> {
    /// What has occurred since `before`, which was `elapsed` ago. If there are many names, those without events are
    /// left out.
    pub(crate) fn new(
        target: &'c Target,
        ocaml: &'c str,
        names: &'c [RuntimeEventName],
        totals: &EventTotals,
        before: &EventTotals,
        elapsed: Duration,
    ) -> EventCounts<'c> {
        let per_second = elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
        let of = |totals: &EventTotals, index: usize| totals.hits.get(index).copied().unwrap_or(0);
        let rows = names.iter().enumerate().map(|(index, name)| {
            let hits = of(totals, index).saturating_sub(of(before, index));
            EventRow {
                group: name.group.into(),
                name: &name.name,
                hits,
                rate: hits as f64 / per_second,
            }
        });
        let mut events: Vec<EventRow<'c>> = rows.collect();
        if events.len() > TERMINAL_LINES {
            events.retain(|it| it.hits > 0);
        }
        // The sort is stable: names with equally many events stay in the order of the runtime.
        events.sort_by_key(|it| Reverse(it.hits));
        EventCounts {
            version: VERSION,
            pid: target.pid(),
            program: target.program().to_string_lossy(),
            ocaml,
            at: None,
            seconds: elapsed,
            events,
            lost: lost_of_domains(&totals.lost.since(&before.lost)),
        }
    }

    /// The same as an answer so far, at this time since the beginning.
    pub(crate) fn at(self, at: Duration) -> EventCounts<'c> {
        EventCounts {
            at: Some(at),
            ..self
        }
    }

    /// How many names there are, and what they add up to: `12 names, 4711 events`.
    pub(crate) fn sum(&self) -> (usize, String) {
        let hits = self.events.iter().map(|it| it.hits);
        let hits = hits.fold(0, u64::saturating_add);
        let names = number_of(self.events.len(), "name");
        (
            self.events.len(),
            format!("{names}, {}", number_of(hits, "event")),
        )
    }

    pub(crate) fn text(&self, format: Format) -> Result<String, Failure> {
        match format {
            Format::Plain => Ok(self.plain()),
            Format::Table => Ok(self.table()),
            Format::Json => json(self),
        }
    }

    fn plain(&self) -> String {
        let at = time_prefix(self.at);
        let mut text = String::new();
        for row in &self.events {
            let name = Escaped(row.name);
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{at}{} {:.1} {} {name}",
                row.hits, row.rate, row.group
            );
        }
        text + &lost_lines(&self.lost, Format::Plain, &at)
    }

    /// A table; with the time since the beginning, if there is one.
    pub(crate) fn table(&self) -> String {
        let at = self.at.map(|at| format!("{:.1}", at.as_secs_f64()));
        let mut head: Vec<&str> = at.iter().map(|_| "seconds").collect();
        head.extend(["events", "events/s", "what", "name"]);
        let rows = self.events.iter().map(|row| {
            let cells = [
                row.hits.to_string(),
                format!("{:.0}", row.rate),
                row.group.to_owned(),
                Escaped(row.name).to_string(),
            ];
            at.iter().cloned().chain(cells).collect()
        });
        table::table(&head, rows) + &lost_lines(&self.lost, Format::Table, "")
    }
}
