//! Perfetto's protobuf: packets with track descriptors, interned names and track events. The numbers of fields are those of
//! `protos/perfetto/trace/` in Perfetto's sources.

use prost::Message;

use super::{
    AnnotationValue, Encoder, NameId, TracedProcess, TrackEvent, TrackEventKind, TrackId, TrackOf,
};

/// Clocks (`builtin_clock.proto`).
const REALTIME: u32 = 1;
const MONOTONIC: u32 = 3;
const BOOTTIME: u32 = 6;

/// `TracePacket.SequenceFlags`.
const INCREMENTAL_STATE_CLEARED: u32 = 1;
const NEEDS_INCREMENTAL_STATE: u32 = 2;

/// `TrackEvent.Type`.
const SLICE_BEGIN: i32 = 1;
const SLICE_END: i32 = 2;
const INSTANT: i32 = 3;
const COUNTER: i32 = 4;

/// All packets are of one sequence.
const SEQUENCE: u32 = 1;

/// The uuid of the process's track; those of other tracks follow it.
const PROCESS_TRACK: u64 = 1 << 32;

/// The number of the field `packet` of a `Trace`.
const PACKET: u32 = 1;

/// A `TracePacket` with a track event: most are, and so it is small.
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
}

/// Any other `TracePacket`.
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

/// Perfetto's `TrackEvent`.
#[derive(Clone, PartialEq, Message)]
struct PacketEvent {
    #[prost(message, repeated, tag = "4")]
    debug_annotations: Vec<DebugAnnotation>,
    #[prost(int32, optional, tag = "9")]
    r#type: Option<i32>,
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

pub(super) struct Perfetto {
    process: TracedProcess,
}

impl Perfetto {
    pub(super) fn new(process: &TracedProcess) -> Perfetto {
        Perfetto {
            process: process.clone(),
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
        ];
        let clocks = clocks.map(|(id, time)| Clock {
            clock_id: Some(id),
            timestamp: Some(time),
        });
        write(
            &TracePacket {
                clock_snapshot: Some(ClockSnapshot {
                    clocks: clocks.to_vec(),
                    primary_trace_clock: Some(MONOTONIC),
                }),
                sequence_flags: Some(INCREMENTAL_STATE_CLEARED),
                trace_packet_defaults: Some(TracePacketDefaults {
                    timestamp_clock_id: Some(MONOTONIC),
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
        let (kind, name, value) = match event.kind {
            TrackEventKind::Begin(name) => (SLICE_BEGIN, Some(name), None),
            TrackEventKind::End => (SLICE_END, None, None),
            TrackEventKind::Instant(name) => (INSTANT, Some(name), None),
            TrackEventKind::Value(value) => (COUNTER, None, Some(value)),
        };
        let annotations = event.arguments.iter().map(|argument| {
            let (int_value, string_value) = match &argument.value {
                AnnotationValue::Int(number) => (Some(*number), None),
                AnnotationValue::Text(text) => (None, Some(text.to_string())),
            };
            DebugAnnotation {
                int_value,
                string_value,
                name: Some(argument.key.to_string()),
            }
        });
        let packet = EventPacket {
            timestamp: Some(event.time),
            trusted_packet_sequence_id: Some(SEQUENCE),
            track_event: Some(PacketEvent {
                debug_annotations: annotations.collect(),
                r#type: Some(kind),
                name_iid: name.map(|name| name.0.into()),
                track_uuid: Some(uuid(event.track)),
                counter_value: value,
            }),
            sequence_flags: Some(NEEDS_INCREMENTAL_STATE),
        };
        write(&packet, to);
    }
}
