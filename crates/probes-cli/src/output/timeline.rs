//! Time lines: what has happened in a process, on tracks, in the formats that viewers read.
//!
//! ```text
//! what was read ─▶ track, name, event ─▶ Encoder ─▶ bytes ─▶ TimelineFile
//!                                        perfetto, chrome, fxt
//! ```
//!
//! A track has slices, which nest, and instants; that of a counter has values. Times are nanoseconds of
//! CLOCK_MONOTONIC.

mod chrome;
mod file;
mod fxt;
mod perfetto;

use std::borrow::Cow;
use std::path::Path;

pub(crate) use file::TimelineFile;

/// A format of timelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TimelineFormat {
    /// Perfetto's protobuf (`perfetto/trace/trace.proto`).
    Perfetto,
    /// The JSON array of Chrome's Trace Event Format.
    Chrome,
    /// Fuchsia's trace format.
    Fxt,
}

/// The extensions of files in these formats, for messages.
pub(crate) const SUFFIXES: &str = ".perfetto-trace, .pftrace, .json or .fxt";

impl TimelineFormat {
    /// The format that the name of a file asks for.
    pub(crate) fn of(path: &Path) -> Option<TimelineFormat> {
        let name = path.file_name()?.to_string_lossy();
        let suffixes = [
            (".perfetto-trace", TimelineFormat::Perfetto),
            (".pftrace", TimelineFormat::Perfetto),
            (".json", TimelineFormat::Chrome),
            (".fxt", TimelineFormat::Fxt),
        ];
        let found = suffixes.iter().find(|(suffix, _)| name.ends_with(suffix));
        found.map(|(_, format)| *format)
    }

    pub(crate) fn encoder(self, process: &TracedProcess) -> Box<dyn Encoder> {
        match self {
            TimelineFormat::Perfetto => Box::new(perfetto::Perfetto::new(process)),
            TimelineFormat::Chrome => Box::new(chrome::Chrome::new(process)),
            TimelineFormat::Fxt => Box::new(fxt::Fxt::new(process)),
        }
    }
}

/// The process that a timeline is of, and its clocks at one moment.
#[derive(Clone, Debug)]
pub(crate) struct TracedProcess {
    pub(crate) pid: i32,
    pub(crate) name: String,
    /// CLOCK_MONOTONIC, CLOCK_BOOTTIME and CLOCK_REALTIME, in nanoseconds.
    pub(crate) monotonic: u64,
    pub(crate) boottime: u64,
    pub(crate) realtime: u64,
}

/// A track, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TrackId(pub(crate) u32);

impl TrackId {
    /// The track of the process.
    pub(crate) const PROCESS: TrackId = TrackId(0);
}

/// A name of slices and instants, by its number: from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NameId(pub(crate) u32);

/// What a track is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TrackOf {
    /// The process itself.
    Process,
    /// The thread with this id.
    Thread(i32),
    /// Something else that has slices, shown below another track.
    Lane(TrackId),
    /// A counter, shown in the same way.
    Counter(TrackId),
}

/// What happens on a track.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TrackEvent {
    pub(crate) time: u64,
    pub(crate) track: TrackId,
    pub(crate) kind: TrackEventKind,
    pub(crate) arguments: Vec<Annotation>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TrackEventKind {
    Begin(NameId),
    /// The end of the innermost slice.
    End,
    Instant(NameId),
    Value(i64),
}

/// What is said of a slice or an instant beside its name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Annotation {
    pub(crate) key: Cow<'static, str>,
    pub(crate) value: AnnotationValue,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AnnotationValue {
    Int(i64),
    Text(Cow<'static, str>),
}

impl Annotation {
    pub(crate) fn int(key: &'static str, value: impl TryInto<i64>) -> Annotation {
        Annotation {
            key: key.into(),
            value: AnnotationValue::Int(value.try_into().unwrap_or(i64::MAX)),
        }
    }

    pub(crate) fn text(key: &'static str, value: impl Into<Cow<'static, str>>) -> Annotation {
        Annotation {
            key: key.into(),
            value: AnnotationValue::Text(value.into()),
        }
    }
}

/// Encodes a timeline in one format. A track and a name are encoded before the events that have them.
pub(crate) trait Encoder: Send {
    /// The beginning of the file.
    fn begin(&mut self, to: &mut Vec<u8>);
    fn track(&mut self, id: TrackId, of: &TrackOf, name: &str, to: &mut Vec<u8>);
    fn name(&mut self, id: NameId, name: &str, to: &mut Vec<u8>);
    fn event(&mut self, event: &TrackEvent, to: &mut Vec<u8>);
    /// What a file of this format ends with; the next block is written over it.
    fn end(&self) -> &'static [u8] {
        b""
    }
}
