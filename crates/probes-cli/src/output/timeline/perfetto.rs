//! Perfetto's protobuf: packets with track descriptors, interned names and track events. The numbers of fields are
//! those of `protos/perfetto/trace/` in Perfetto's sources.
//!
//! Most packets have events, a million a second, so these are small: the time of one is the difference to the latest
//! time before it, on a clock of the sequence (`is_incremental`), as in Perfetto's own writer. An earlier packet has
//! a time of CLOCK_MONOTONIC.

mod event_packet;

use prost::Message;

use self::event_packet::{FieldsCache, PacketTime, write_annotation, write_event};
use super::{Encoder, NameId, TracedProcess, TrackEvent, TrackId, TrackOf};

/// Clocks (`builtin_clock.proto`).
const REALTIME: u32 = 1;
const MONOTONIC: u32 = 3;
const BOOTTIME: u32 = 6;

/// `TracePacket.SequenceFlags`.
const INCREMENTAL_STATE_CLEARED: u32 = 1;
const NEEDS_INCREMENTAL_STATE: u32 = 2;

/// The clock of the sequence, by which each time is the difference to the last one.
const INCREMENTAL: u32 = 64;

/// `TrackEvent.Type`.
const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;
const COUNTER: u64 = 4;

/// All packets are of one sequence.
const SEQUENCE: u32 = 1;

/// The uuid of the process's track; those of other tracks follow it. 0 is no uuid.
const PROCESS_TRACK: u64 = 1;

/// The number of the field `packet` of a `Trace`.
const PACKET: u32 = 1;

/// A `TracePacket` without a track event.
#[derive(Clone, PartialEq, Message)]
struct TracePacket {
    #[prost(message, optional, tag = "6")]
    clock_snapshot: Option<ClockSnapshot>,
    #[prost(uint32, optional, tag = "10")]
    trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "12")]
    interned_data: Option<InternedData>,
    #[prost(uint32, optional, tag = "13")]
    sequence_flags: Option<u32>,
    #[prost(message, optional, tag = "59")]
    trace_packet_defaults: Option<TracePacketDefaults>,
    #[prost(message, optional, tag = "60")]
    track_descriptor: Option<TrackDescriptor>,
}

impl TracePacket {
    /// With nothing but its sequence.
    fn of_sequence() -> TracePacket {
        TracePacket {
            trusted_packet_sequence_id: Some(SEQUENCE),
            ..TracePacket::default()
        }
    }
}

#[derive(Clone, PartialEq, Message)]
struct ClockSnapshot {
    #[prost(message, repeated, tag = "1")]
    clocks: Vec<Clock>,
    #[prost(uint32, optional, tag = "2")]
    primary_trace_clock: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct Clock {
    #[prost(uint32, optional, tag = "1")]
    clock_id: Option<u32>,
    #[prost(uint64, optional, tag = "2")]
    timestamp: Option<u64>,
    #[prost(bool, optional, tag = "3")]
    is_incremental: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct TracePacketDefaults {
    #[prost(uint32, optional, tag = "58")]
    timestamp_clock_id: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(message, optional, tag = "3")]
    process: Option<ProcessDescriptor>,
    #[prost(message, optional, tag = "4")]
    thread: Option<ThreadDescriptor>,
    #[prost(uint64, optional, tag = "5")]
    parent_uuid: Option<u64>,
    #[prost(message, optional, tag = "8")]
    counter: Option<CounterDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct ProcessDescriptor {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(string, optional, tag = "6")]
    process_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ThreadDescriptor {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(int32, optional, tag = "2")]
    tid: Option<i32>,
    #[prost(string, optional, tag = "5")]
    thread_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct CounterDescriptor {}

#[derive(Clone, PartialEq, Message)]
struct InternedData {
    #[prost(message, repeated, tag = "2")]
    event_names: Vec<EventName>,
}

#[derive(Clone, PartialEq, Message)]
struct EventName {
    #[prost(uint64, optional, tag = "1")]
    iid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
}

pub(super) struct Perfetto {
    process: TracedProcess,
    /// What the clock of the sequence says.
    latest: u64,
    recent: FieldsCache,
    /// The annotations of an event.
    annotations: Vec<u8>,
}

impl Perfetto {
    pub(super) fn new(process: &TracedProcess) -> Perfetto {
        Perfetto {
            process: process.clone(),
            latest: process.monotonic,
            recent: FieldsCache::new(),
            annotations: Vec::new(),
        }
    }
}

fn uuid(track: TrackId) -> u64 {
    PROCESS_TRACK + u64::from(track.0)
}

/// Writes a packet. A file is one `Trace`, and each packet a field of it, so packets can be written one by one.
fn write(packet: &impl Message, to: &mut Vec<u8>) {
    prost::encoding::message::encode(PACKET, packet, to);
}

impl Encoder for Perfetto {
    fn begin(&mut self, to: &mut Vec<u8>) {
        let process = &self.process;
        let clocks = [
            (MONOTONIC, process.monotonic),
            (BOOTTIME, process.boottime),
            (REALTIME, process.realtime),
            (INCREMENTAL, self.latest),
        ];
        let clocks = clocks.map(|(id, time)| Clock {
            clock_id: Some(id),
            timestamp: Some(time),
            is_incremental: (id == INCREMENTAL).then_some(true),
        });
        write(
            &TracePacket {
                clock_snapshot: Some(ClockSnapshot {
                    clocks: clocks.to_vec(),
                    primary_trace_clock: Some(MONOTONIC),
                }),
                sequence_flags: Some(INCREMENTAL_STATE_CLEARED),
                trace_packet_defaults: Some(TracePacketDefaults {
                    timestamp_clock_id: Some(INCREMENTAL),
                }),
                ..TracePacket::of_sequence()
            },
            to,
        );
    }

    fn track(&mut self, id: TrackId, of: &TrackOf, name: &str, to: &mut Vec<u8>) {
        let pid = Some(self.process.pid);
        let mut descriptor = TrackDescriptor {
            uuid: Some(uuid(id)),
            ..TrackDescriptor::default()
        };
        match of {
            TrackOf::Process => {
                descriptor.process = Some(ProcessDescriptor {
                    pid,
                    process_name: Some(name.to_owned()),
                });
            }
            TrackOf::Thread(tid) => {
                descriptor.thread = Some(ThreadDescriptor {
                    pid,
                    tid: Some(*tid),
                    thread_name: Some(name.to_owned()),
                });
            }
            TrackOf::Lane(parent) | TrackOf::Counter(parent) => {
                descriptor.name = Some(name.to_owned());
                descriptor.parent_uuid = Some(uuid(*parent));
                let is_counter = matches!(of, TrackOf::Counter(_));
                descriptor.counter = is_counter.then_some(CounterDescriptor {});
            }
        }
        let track_descriptor = Some(descriptor);
        let packet = TracePacket {
            track_descriptor,
            ..TracePacket::of_sequence()
        };
        write(&packet, to);
    }

    fn name(&mut self, id: NameId, name: &str, to: &mut Vec<u8>) {
        let name = EventName {
            iid: Some(id.0.into()),
            name: Some(name.to_owned()),
        };
        let packet = TracePacket {
            interned_data: Some(InternedData {
                event_names: vec![name],
            }),
            sequence_flags: Some(NEEDS_INCREMENTAL_STATE),
            ..TracePacket::of_sequence()
        };
        write(&packet, to);
    }

    fn event(&mut self, event: &TrackEvent, to: &mut Vec<u8>) {
        let time = match event.time.checked_sub(self.latest) {
            Some(later) => {
                self.latest = event.time;
                PacketTime::SinceLast(later)
            }
            None => PacketTime::At(event.time),
        };
        self.annotations.clear();
        for argument in &event.arguments {
            write_annotation(argument, &mut self.annotations);
        }
        let fields = self.recent.of(event.track, event.kind);
        write_event(time, fields, &self.annotations, to);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Annotation, TrackEventKind};
    use super::*;

    /// What [`event_packet`] writes, for prost to read.
    #[derive(Clone, PartialEq, Message)]
    struct Trace {
        #[prost(message, repeated, tag = "1")]
        packet: Vec<EventPacket>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct EventPacket {
        #[prost(uint64, optional, tag = "8")]
        timestamp: Option<u64>,
        #[prost(uint32, optional, tag = "10")]
        trusted_packet_sequence_id: Option<u32>,
        #[prost(message, optional, tag = "11")]
        track_event: Option<PacketEvent>,
        #[prost(uint32, optional, tag = "13")]
        sequence_flags: Option<u32>,
        #[prost(uint32, optional, tag = "58")]
        timestamp_clock_id: Option<u32>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct PacketEvent {
        #[prost(message, repeated, tag = "4")]
        debug_annotations: Vec<DebugAnnotation>,
        #[prost(uint64, optional, tag = "9")]
        r#type: Option<u64>,
        #[prost(uint64, optional, tag = "10")]
        name_iid: Option<u64>,
        #[prost(uint64, optional, tag = "11")]
        track_uuid: Option<u64>,
        #[prost(int64, optional, tag = "30")]
        counter_value: Option<i64>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct DebugAnnotation {
        #[prost(int64, optional, tag = "4")]
        int_value: Option<i64>,
        #[prost(string, optional, tag = "6")]
        string_value: Option<String>,
        #[prost(string, optional, tag = "10")]
        name: Option<String>,
    }

    fn process() -> TracedProcess {
        TracedProcess {
            pid: 1,
            name: "p".to_owned(),
            monotonic: 1000,
            boottime: 1000,
            realtime: 1000,
        }
    }

    fn event(time: u64, track: u32, kind: TrackEventKind) -> TrackEvent {
        TrackEvent {
            time,
            track: TrackId(track),
            kind,
            arguments: Vec::new(),
        }
    }

    #[test]
    fn packets_are_read_by_prost() {
        let long = "x".repeat(1000);
        let mut begin = event(1005, u32::MAX, TrackEventKind::Begin(NameId(u32::MAX)));
        begin.arguments = vec![
            Annotation::int("arg0", -7),
            Annotation::text("arg1", long.clone()),
            Annotation::text("", ""),
        ];
        let events = [
            begin,
            event(1005, 3, TrackEventKind::End),
            event(900, 3, TrackEventKind::Value(i64::MIN)),
            event(u64::MAX, 3, TrackEventKind::Instant(NameId(1))),
        ];
        let mut perfetto = Perfetto::new(&process());
        let mut bytes = Vec::new();
        for event in &events {
            perfetto.event(event, &mut bytes);
        }
        let trace = Trace::decode(&bytes[..]).unwrap();
        let times = trace.packet.iter();
        let times: Vec<_> = times
            .map(|it| (it.timestamp.unwrap(), it.timestamp_clock_id))
            .collect();
        let last = u64::MAX - 1005;
        assert_eq!(
            times,
            [(5, None), (0, None), (900, Some(MONOTONIC)), (last, None)]
        );
        for (packet, event) in trace.packet.iter().zip(&events) {
            assert_eq!(packet.trusted_packet_sequence_id, Some(SEQUENCE));
            assert_eq!(packet.sequence_flags, Some(NEEDS_INCREMENTAL_STATE));
            let read = packet.track_event.as_ref().unwrap();
            assert_eq!(read.track_uuid, Some(uuid(event.track)));
            let (kind, name, value) = match event.kind {
                TrackEventKind::Begin(name) => (SLICE_BEGIN, Some(name.0.into()), None),
                TrackEventKind::End => (SLICE_END, None, None),
                TrackEventKind::Instant(name) => (INSTANT, Some(name.0.into()), None),
                TrackEventKind::Value(value) => (COUNTER, None, Some(value)),
            };
            let written = (Some(kind), name, value);
            assert_eq!((read.r#type, read.name_iid, read.counter_value), written);
        }
        let annotations = &trace.packet[0]
            .track_event
            .as_ref()
            .unwrap()
            .debug_annotations;
        let annotations: Vec<_> = annotations
            .iter()
            .map(|it| (it.name.as_deref(), it.int_value, it.string_value.as_deref()))
            .collect();
        let expected = [
            (Some("arg0"), Some(-7), None),
            (Some("arg1"), None, Some(&long[..])),
            (Some(""), None, Some("")),
        ];
        assert_eq!(annotations, expected);
    }

    #[test]
    fn kept_fields_are_those_of_their_event() {
        // More tracks and names than are kept, each twice in a row, and then all again.
        let kinds = (0..200).map(|number| match number % 4 {
            0 => TrackEventKind::Begin(NameId(1 + number)),
            1 => TrackEventKind::Instant(NameId(number)),
            2 => TrackEventKind::Value(number.into()),
            _ => TrackEventKind::End,
        });
        let kinds: Vec<TrackEventKind> = kinds.flat_map(|kind| [kind; 2]).collect();
        let events = kinds.iter().cycle().take(2 * kinds.len()).enumerate();
        let events: Vec<TrackEvent> = events
            .map(|(index, kind)| event(2000, index as u32 / 2 % 7, *kind))
            .collect();
        let encode = |perfetto: &mut Perfetto, event: &TrackEvent| {
            let mut bytes = Vec::new();
            perfetto.event(event, &mut bytes);
            bytes
        };
        let mut perfetto = Perfetto::new(&process());
        perfetto.latest = 2000;
        for event in &events {
            let mut first = Perfetto::new(&process());
            first.latest = 2000;
            assert_eq!(encode(&mut perfetto, event), encode(&mut first, event));
        }
    }

    #[test]
    fn packet_of_a_slice_is_small() {
        let mut perfetto = Perfetto::new(&process());
        let mut bytes = Vec::new();
        perfetto.event(
            &event(1500, 2, TrackEventKind::Begin(NameId(1))),
            &mut bytes,
        );
        perfetto.event(&event(1900, 2, TrackEventKind::End), &mut bytes);
        assert_eq!(bytes.len(), 32);
    }
}
