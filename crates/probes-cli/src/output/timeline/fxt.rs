//! Fuchsia's trace format (fuchsia.dev, "Fuchsia trace format"): records of 64-bit words, little-endian. Threads and
//! tracks are kernel objects, each with an id (koid); their names are in kernel object records.

use foldhash::{HashMap, HashMapExt};

use super::{
    Annotation, AnnotationValue, Encoder, NameId, TracedProcess, TrackEvent, TrackEventKind,
    TrackId, TrackOf,
};

/// The magic number record.
const MAGIC: u64 = 0x0016_5478_4604_0010;

/// The types of records.
const METADATA: u64 = 0;
const INITIALIZATION: u64 = 1;
const STRING: u64 = 2;
const EVENT: u64 = 4;
const KERNEL_OBJECT: u64 = 7;

/// The types of events.
const INSTANT: u64 = 0;
const COUNTER: u64 = 1;
const DURATION_BEGIN: u64 = 2;
const DURATION_END: u64 = 3;

/// The types of arguments.
const INT_64: u64 = 3;
const TEXT: u64 = 6;
const KOID: u64 = 8;

/// The types of kernel objects.
const PROCESS: u64 = 1;
const THREAD: u64 = 2;

/// An inline string: its length is in the other bits of the reference.
const INLINE: u64 = 1 << 15;

/// Strings are cut to this length, in bytes: a record has at most 4,095 words.
const MAX_TEXT_LEN: usize = 1024;

/// The largest index that a string can have.
const MAX_INDEX: u32 = (1 << 15) - 1;

/// The string with this index is the category of all events.
const CATEGORY_INDEX: u64 = 1;

/// Names have the indices after it.
const FIRST_NAME: u32 = CATEGORY_INDEX as u32 + 1;

/// The koid of the process's track; lanes have those after it. Above all pids of Linux (PID_MAX_LIMIT).
const PROCESS_TRACK: u64 = 1 << 23;

/// The header of an event counts its arguments in four bits.
const MAX_ARGUMENTS: usize = 15;

pub(super) struct Fxt {
    pid: u64,
    process: String,
    tracks: HashMap<TrackId, FxtTrack>,
    /// The names that have no index.
    unindexed_names: HashMap<NameId, String>,
}

enum FxtTrack {
    /// By its koid.
    Thread(u64),
    /// By its name.
    Counter(String),
}

/// A string in a record: the reference, and the words that follow if it is inline.
struct StringRef<'t> {
    reference: u64,
    inline: &'t [u8],
}

impl<'t> StringRef<'t> {
    fn inline(text: &'t str) -> StringRef<'t> {
        let mut len = text.len().min(MAX_TEXT_LEN);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        // The reference 0 is the empty string.
        let reference = if len == 0 { 0 } else { INLINE | len as u64 };
        StringRef {
            reference,
            inline: &text.as_bytes()[..len],
        }
    }

    fn indexed(index: u64) -> StringRef<'static> {
        StringRef {
            reference: index,
            inline: b"",
        }
    }

    fn write(&self, to: &mut Vec<u8>) {
        to.extend(self.inline);
        to.resize(to.len().next_multiple_of(8), 0);
    }
}

/// Writes a record whose length is known only when it is complete: `header` is its header without the length.
fn record(to: &mut Vec<u8>, header: u64, write: impl FnOnce(&mut Vec<u8>)) {
    // A multiple of 8 bytes, as the lengths of all records are: `StringRef::write` relies on it.
    let start = to.len();
    word(to, 0);
    write(to);
    let words = ((to.len() - start) / 8) as u64;
    to[start..start + 8].copy_from_slice(&(header | words << 4).to_le_bytes());
}

fn word(to: &mut Vec<u8>, word: u64) {
    to.extend(word.to_le_bytes());
}

impl Fxt {
    pub(super) fn new(process: &TracedProcess) -> Fxt {
        Fxt {
            pid: process.pid as u64,
            process: process.name.clone(),
            tracks: HashMap::new(),
            unindexed_names: HashMap::new(),
        }
    }

    fn write_string(index: u64, text: &str, to: &mut Vec<u8>) {
        let text = StringRef::inline(text);
        let header = STRING | index << 16 | (text.inline.len() as u64) << 32;
        record(to, header, |to| text.write(to));
    }

    fn write_object(&self, kind: u64, koid: u64, name: &str, to: &mut Vec<u8>) {
        let name = StringRef::inline(name);
        let arguments = u64::from(kind == THREAD);
        let header = KERNEL_OBJECT | kind << 16 | name.reference << 24 | arguments << 40;
        record(to, header, |to| {
            word(to, koid);
            name.write(to);
            if kind == THREAD {
                let key = StringRef::inline("process");
                record(to, KOID | key.reference << 16, |to| {
                    key.write(to);
                    word(to, self.pid);
                });
            }
        });
    }
}

fn write_argument(argument: &Annotation, to: &mut Vec<u8>) {
    let key = StringRef::inline(&argument.key);
    match &argument.value {
        AnnotationValue::Int(number) => record(to, INT_64 | key.reference << 16, |to| {
            key.write(to);
            word(to, *number as u64);
        }),
        AnnotationValue::Text(text) => {
            let value = StringRef::inline(text);
            let header = TEXT | key.reference << 16 | value.reference << 32;
            record(to, header, |to| {
                key.write(to);
                value.write(to);
            });
        }
    }
}

/// The index of the string of a name, if there are enough indices.
fn index_of(id: NameId) -> Option<u64> {
    let index = id.0.checked_add(FIRST_NAME)?;
    (index <= MAX_INDEX).then_some(index.into())
}

impl Encoder for Fxt {
    fn begin(&mut self, to: &mut Vec<u8>) {
        word(to, MAGIC);
        // The provider: its number is 1.
        let (kind, provider, name) = (1_u64, 1_u64, StringRef::inline("ocaml-probes"));
        let len = name.inline.len() as u64;
        let header = METADATA | kind << 16 | provider << 20 | len << 52;
        record(to, header, |to| name.write(to));
        let section = METADATA | 2 << 16 | provider << 20;
        record(to, section, |_| {});
        // Ticks per second: times are nanoseconds.
        record(to, INITIALIZATION, |to| word(to, 1_000_000_000));
        Fxt::write_string(CATEGORY_INDEX, "ocaml-probes", to);
        self.write_object(PROCESS, self.pid, &self.process, to);
    }

    fn track(&mut self, id: TrackId, of: &TrackOf, name: &str, to: &mut Vec<u8>) {
        let koid = match of {
            // Not the pid: that is the id of the main thread, which has a track of its own.
            TrackOf::Process => PROCESS_TRACK,
            TrackOf::Thread(tid) => *tid as u64,
            TrackOf::Lane(_) => PROCESS_TRACK + u64::from(id.0),
            TrackOf::Counter(_) => {
                self.tracks.insert(id, FxtTrack::Counter(name.to_owned()));
                return;
            }
        };
        self.write_object(THREAD, koid, name, to);
        self.tracks.insert(id, FxtTrack::Thread(koid));
    }

    fn name(&mut self, id: NameId, name: &str, to: &mut Vec<u8>) {
        match index_of(id) {
            Some(index) => Fxt::write_string(index, name, to),
            None => {
                self.unindexed_names.insert(id, name.to_owned());
            }
        }
    }

    fn event(&mut self, event: &TrackEvent, to: &mut Vec<u8>) {
        let (koid, counter) = match self.tracks.get(&event.track) {
            Some(FxtTrack::Thread(koid)) => (*koid, ""),
            Some(FxtTrack::Counter(name)) => (PROCESS_TRACK, name.as_str()),
            None => (PROCESS_TRACK, ""),
        };
        let name = |id: NameId| match index_of(id) {
            Some(index) => StringRef::indexed(index),
            None => StringRef::inline(self.unindexed_names.get(&id).map_or("", |it| it)),
        };
        let (kind, name) = match event.kind {
            TrackEventKind::Begin(id) => (DURATION_BEGIN, name(id)),
            TrackEventKind::End => (DURATION_END, StringRef::indexed(0)),
            TrackEventKind::Instant(id) => (INSTANT, name(id)),
            TrackEventKind::Value(_) => (COUNTER, StringRef::inline(counter)),
        };
        let arguments = event.arguments.len().min(MAX_ARGUMENTS);
        let count = match event.kind {
            TrackEventKind::Value(_) => 1,
            _ => arguments as u64,
        };
        let header = EVENT | kind << 16 | count << 20 | CATEGORY_INDEX << 32 | name.reference << 48;
        record(to, header, |to| {
            word(to, event.time);
            // The thread is inline: the format's thread table has room for 255 only.
            word(to, self.pid);
            word(to, koid);
            name.write(to);
            if let TrackEventKind::Value(value) = event.kind {
                write_argument(&Annotation::int("value", value), to);
                word(to, u64::from(event.track.0));
            } else {
                for one in &event.arguments[..arguments] {
                    write_argument(one, to);
                }
            }
        });
    }
}
