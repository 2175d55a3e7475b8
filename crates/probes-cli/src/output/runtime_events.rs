//! Runtime events of OCaml 5, a line each, and how often each occurred. The field names are those of the JSON output.

mod counts;
mod lost;

use std::time::{Duration, SystemTime};

use humantime::Rfc3339Timestamp;
use nix::time::{ClockId, clock_gettime};
use probes_lib::{CustomBytes, RuntimeEventKind, RuntimeEventName, UserValue};
use serde::Serialize;

pub(crate) use self::counts::{EventCounts, EventTotals};
pub(crate) use self::lost::LostWords;
pub(super) use self::lost::{LostOfDomain, lost_lines, lost_of_domains};
use super::format::{Format, JsonLines, VERSION};
use super::hits::{Text, time_of_day};
use super::table::StreamedTable;
use super::view::text;
use crate::failure::Failure;
use crate::text::{Escaped, ocaml_string};

/// How many of the bytes of an event are shown at most.
const MAX_BYTES: usize = 64;

/// An event as it is shown.
#[derive(Debug)]
pub(crate) struct EventLine {
    /// In nanoseconds of CLOCK_MONOTONIC.
    time: u64,
    domain: u32,
    kind: &'static str,
    /// The index of its name.
    name: usize,
    value: Value,
}

#[derive(Debug)]
enum Value {
    Nothing,
    Number(i128),
    Sizes(Vec<u64>),
    Bytes { bytes: Vec<u8>, is_whole: bool },
}

impl EventLine {
    pub(crate) fn new(
        domain: u32,
        time: u64,
        name: usize,
        kind: RuntimeEventKind<'_>,
    ) -> EventLine {
        let (kind, value) = shown(kind);
        EventLine {
            time,
            domain,
            kind,
            name,
            value,
        }
    }
}

/// The word for the kind of an event, and its value.
fn shown(kind: RuntimeEventKind<'_>) -> (&'static str, Value) {
    match kind {
        RuntimeEventKind::Begin(_) => ("begin", Value::Nothing),
        RuntimeEventKind::End(_) => ("end", Value::Nothing),
        RuntimeEventKind::Counter(_, value) => ("counter", Value::Number(value.into())),
        RuntimeEventKind::Lifecycle(_, data) => {
            let number = data.map(|data| Value::Number(data.into()));
            ("lifecycle", number.unwrap_or(Value::Nothing))
        }
        RuntimeEventKind::Allocations(sizes) => ("alloc", Value::Sizes(sizes.to_vec())),
        RuntimeEventKind::User(_, value) => match value {
            UserValue::Unit => ("unit", Value::Nothing),
            UserValue::Int(number) => ("int", Value::Number(number.into())),
            UserValue::SpanBegin => ("span_begin", Value::Nothing),
            UserValue::SpanEnd => ("span_end", Value::Nothing),
            UserValue::Custom(bytes) => ("custom", first_of(bytes)),
            _ => ("unknown", Value::Nothing),
        },
        _ => ("unknown", Value::Nothing),
    }
}

fn first_of(bytes: CustomBytes<'_>) -> Value {
    let mut bytes = bytes.to_vec();
    let is_whole = bytes.len() <= MAX_BYTES;
    bytes.truncate(MAX_BYTES);
    Value::Bytes { bytes, is_whole }
}

impl Value {
    fn text(&self) -> String {
        match self {
            Value::Nothing => String::new(),
            Value::Number(number) => number.to_string(),
            Value::Sizes(sizes) => {
                let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
                sizes.join(",")
            }
            Value::Bytes { bytes, is_whole } => {
                ocaml_string(bytes) + if *is_whole { "" } else { "..." }
            }
        }
    }
}

/// An event as JSON.
#[derive(Serialize)]
#[serde(tag = "type", rename = "runtime_event")]
struct EventView<'e> {
    version: u32,
    #[serde(serialize_with = "text")]
    time: Rfc3339Timestamp,
    monotonic_ns: u64,
    domain: u32,
    kind: &'static str,
    name: &'e str,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<i128>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sizes: Option<&'e [u64]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<Text>,
}

/// Formats events.
pub(crate) struct EventLines {
    format: Format,
    table: StreamedTable,
    /// When CLOCK_MONOTONIC was zero.
    zero: SystemTime,
}

const COLUMNS: [&str; 5] = ["time", "domain", "event", "name", "value"];

impl EventLines {
    pub(crate) fn new(format: Format) -> EventLines {
        let monotonic = clock_gettime(ClockId::CLOCK_MONOTONIC);
        let monotonic = monotonic.map_or(Duration::ZERO, Duration::from);
        let zero = SystemTime::now().checked_sub(monotonic);
        EventLines {
            format,
            table: StreamedTable::default(),
            zero: zero.unwrap_or(SystemTime::UNIX_EPOCH),
        }
    }

    /// The lines of events that were read together, in the order of their times, after what was lost before them in
    /// each domain.
    pub(crate) fn text(
        &mut self,
        names: &[RuntimeEventName],
        lost: &LostWords,
        events: &[EventLine],
    ) -> Result<String, Failure> {
        if self.format == Format::Json {
            return self.json_text(names, lost, events);
        }
        let lost = lost.each().map(|(domain, words)| {
            let (domain, words) = (domain.to_string(), words.to_string());
            [
                "-".to_owned(),
                domain,
                "lost".to_owned(),
                "-".to_owned(),
                words,
            ]
        });
        let events = events.iter().map(|event| {
            [
                time_of_day(self.time(event)),
                event.domain.to_string(),
                event.kind.to_owned(),
                Escaped(name_of(event, names)).to_string(),
                event.value.text(),
            ]
        });
        let rows = lost.chain(events);
        let mut text = String::new();
        if self.format == Format::Table {
            let mut rows: Vec<_> = rows.map(Vec::from).collect();
            self.table.append(&COLUMNS, &mut rows, &mut text);
        } else {
            for cells in rows {
                text += cells.join(" ").trim_end();
                text += "\n";
            }
        }
        Ok(text)
    }

    fn json_text(
        &self,
        names: &[RuntimeEventName],
        lost: &LostWords,
        events: &[EventLine],
    ) -> Result<String, Failure> {
        let mut lines = JsonLines::default();
        for (domain, words) in lost.each() {
            lines.add(&lost::view(domain, words))?;
        }
        for event in events {
            lines.add(&self.view(event, name_of(event, names)))?;
        }
        lines.text()
    }

    fn time(&self, event: &EventLine) -> SystemTime {
        let time = self.zero.checked_add(Duration::from_nanos(event.time));
        time.unwrap_or(self.zero)
    }

    fn view<'e>(&self, event: &'e EventLine, name: &'e str) -> EventView<'e> {
        let (mut value, mut sizes, mut custom) = (None, None, None);
        match &event.value {
            Value::Nothing => {}
            Value::Number(number) => value = Some(*number),
            Value::Sizes(all) => sizes = Some(&all[..]),
            Value::Bytes { bytes, is_whole } => custom = Some(Text::of(bytes, *is_whole)),
        }
        EventView {
            version: VERSION,
            time: humantime::format_rfc3339_nanos(self.time(event)),
            monotonic_ns: event.time,
            domain: event.domain,
            kind: event.kind,
            name,
            value,
            sizes,
            custom,
        }
    }
}

fn name_of<'n>(event: &EventLine, names: &'n [RuntimeEventName]) -> &'n str {
    names.get(event.name).map_or("", |it| it.name.as_str())
}

/// Brings events of several domains into the order of their times.
pub(crate) fn sort_by_time(events: &mut [EventLine]) {
    events.sort_by_key(|event| event.time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_by_their_kinds() {
        let text = |kind| {
            let (kind, value) = shown(kind);
            format!("{kind} {}", value.text())
        };
        let user = |value| RuntimeEventKind::User(3, value);
        assert_eq!(text(RuntimeEventKind::Begin("minor")), "begin ");
        assert_eq!(
            text(RuntimeEventKind::Counter("x", u64::MAX)),
            format!("counter {}", u64::MAX)
        );
        assert_eq!(
            text(RuntimeEventKind::Lifecycle("x", Some(-1))),
            "lifecycle -1"
        );
        assert_eq!(text(RuntimeEventKind::Lifecycle("x", None)), "lifecycle ");
        assert_eq!(text(RuntimeEventKind::Allocations(&[0, 4])), "alloc 0,4");
        assert_eq!(text(user(UserValue::Int(-7))), "int -7");
        assert_eq!(text(user(UserValue::SpanEnd)), "span_end ");
    }

    #[test]
    fn lines_end_with_their_last_word() {
        let names = [RuntimeEventName {
            group: probes_lib::RuntimeEventGroup::Phase,
            name: "mi\nnor".to_owned(),
        }];
        let events = [EventLine::new(2, 5, 0, RuntimeEventKind::Begin("minor"))];
        let mut lost = LostWords::default();
        lost.add(1, 12);
        let mut lines = EventLines::new(Format::Plain);
        let text = lines.text(&names, &lost, &events).unwrap();
        let (lost, event) = text.split_once('\n').unwrap();
        assert_eq!(lost, "- 1 lost - 12");
        assert!(event.ends_with(" 2 begin mi\\nnor\n"), "{event}");
    }
}
