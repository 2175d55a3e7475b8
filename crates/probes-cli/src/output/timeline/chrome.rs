//! Chrome's Trace Event Format: a JSON array of objects, one a line. Lanes and counters have thread ids of their own,
//! above those of Linux.

use std::io::Write;

use foldhash::{HashMap, HashMapExt};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    AnnotationValue, Encoder, NameId, TracedProcess, TrackEvent, TrackEventKind, TrackId, TrackOf,
};

/// Above the pids of Linux (PID_MAX_LIMIT).
const FIRST_LANE: i64 = 1 << 23;

pub(super) struct Chrome {
    pid: i32,
    process: String,
    /// Of each track, by its number, the thread id, and the name if it is a counter: a JSON string.
    tracks: HashMap<TrackId, (i64, String)>,
    /// Of each name, by its number, the JSON string.
    names: Vec<String>,
    has_objects: bool,
}

/// A metadata event: the name of the process or of a thread.
#[derive(Serialize)]
struct Metadata<'m> {
    ph: &'static str,
    pid: i32,
    tid: i64,
    name: &'static str,
    args: NameArgument<'m>,
}

#[derive(Serialize)]
struct NameArgument<'m> {
    name: &'m str,
}

impl Chrome {
    pub(super) fn new(process: &TracedProcess) -> Chrome {
        Chrome {
            pid: process.pid,
            process: process.name.clone(),
            tracks: HashMap::new(),
            names: Vec::new(),
            has_objects: false,
        }
    }

    /// Writes what separates the objects.
    fn separate(&mut self, to: &mut Vec<u8>) {
        to.extend(if self.has_objects {
            &b",\n"[..]
        } else {
            &b"[\n"[..]
        });
        self.has_objects = true;
    }

    fn metadata(&mut self, tid: i64, what: &'static str, name: &str, to: &mut Vec<u8>) {
        self.separate(to);
        let metadata = Metadata {
            ph: "M",
            pid: self.pid,
            tid,
            name: what,
            args: NameArgument { name },
        };
        // Writing to memory cannot fail.
        let _ = serde_json::to_writer(to, &metadata);
    }
}

fn text(name: &str) -> String {
    serde_json::to_string(name).unwrap_or_default()
}

fn at<T>(list: &mut Vec<T>, number: u32, value: T, filler: impl Fn() -> T) {
    let index = number as usize;
    if list.len() <= index {
        list.resize_with(index + 1, filler);
    }
    list[index] = value;
}

impl Encoder for Chrome {
    fn begin(&mut self, to: &mut Vec<u8>) {
        let (pid, name) = (i64::from(self.pid), self.process.clone());
        self.metadata(pid, "process_name", &name, to);
    }

    fn track(&mut self, id: TrackId, of: &TrackOf, name: &str, to: &mut Vec<u8>) {
        let tid = match of {
            TrackOf::Process => i64::from(self.pid),
            TrackOf::Thread(tid) => i64::from(*tid),
            TrackOf::Lane(_) | TrackOf::Counter(_) => FIRST_LANE + i64::from(id.0),
        };
        if matches!(of, TrackOf::Thread(_) | TrackOf::Lane(_)) {
            self.metadata(tid, "thread_name", name, to);
        }
        let counter = match of {
            TrackOf::Counter(_) => text(name),
            _ => String::new(),
        };
        self.tracks.insert(id, (tid, counter));
    }

    fn name(&mut self, id: NameId, name: &str, _: &mut Vec<u8>) {
        at(&mut self.names, id.0, text(name), String::new);
    }

    fn event(&mut self, event: &TrackEvent, to: &mut Vec<u8>) {
        self.separate(to);
        let empty = (0, String::new());
        let (tid, counter) = self.tracks.get(&event.track).unwrap_or(&empty);
        let name = |id: NameId| self.names.get(id.0 as usize).map_or("\"\"", |it| it);
        let (phase, name) = match event.kind {
            TrackEventKind::Begin(id) => ("B", name(id)),
            TrackEventKind::End => ("E", ""),
            TrackEventKind::Instant(id) => ("i", name(id)),
            TrackEventKind::Value(_) => ("C", &**counter),
        };
        let (micros, nanos) = (event.time / 1000, event.time % 1000);
        let pid = self.pid;
        // Writing to memory cannot fail.
        let _ = write!(
            to,
            r#"{{"ph":"{phase}","pid":{pid},"tid":{tid},"ts":{micros}.{nanos:03}"#
        );
        if !name.is_empty() {
            let _ = write!(to, r#","name":{name}"#);
        }
        if let TrackEventKind::Instant(_) = event.kind {
            to.extend(br#","s":"t""#);
        }
        if let TrackEventKind::Value(value) = event.kind {
            let _ = write!(to, r#","args":{{"value":{value}}}"#);
        } else if !event.arguments.is_empty() {
            let mut arguments = Map::new();
            for argument in &event.arguments {
                let value = match &argument.value {
                    AnnotationValue::Int(number) => Value::from(*number),
                    AnnotationValue::Text(text) => Value::from(&**text),
                };
                arguments.insert(argument.key.to_string(), value);
            }
            to.extend(br#","args":"#);
            let _ = serde_json::to_writer(&mut *to, &arguments);
        }
        to.push(b'}');
    }

    fn end(&self) -> &'static [u8] {
        b"\n]\n"
    }
}
