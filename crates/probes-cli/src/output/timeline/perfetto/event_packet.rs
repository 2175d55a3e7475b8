//! The bytes of a packet with a track event, field by field: all lengths are known before the first byte is written.

use super::super::{Annotation, AnnotationValue};
use super::{MONOTONIC, NEEDS_INCREMENTAL_STATE, PACKET, SEQUENCE};

/// The types of fields.
const VARINT: u32 = 0;
const BYTES: u32 = 2;

/// The numbers of the fields of a `TracePacket`.
mod packet {
    pub(super) const TIMESTAMP: u32 = 8;
    pub(super) const SEQUENCE_ID: u32 = 10;
    pub(super) const TRACK_EVENT: u32 = 11;
    pub(super) const SEQUENCE_FLAGS: u32 = 13;
    pub(super) const CLOCK_ID: u32 = 58;
}

/// Those of a `TrackEvent`.
mod track_event {
    pub(super) const DEBUG_ANNOTATIONS: u32 = 4;
    pub(super) const TYPE: u32 = 9;
    pub(super) const NAME_IID: u32 = 10;
    pub(super) const TRACK_UUID: u32 = 11;
    pub(super) const COUNTER_VALUE: u32 = 30;
}

/// Those of a `DebugAnnotation`.
mod debug_annotation {
    pub(super) const INT_VALUE: u32 = 4;
    pub(super) const STRING_VALUE: u32 = 6;
    pub(super) const NAME: u32 = 10;
}

/// The time of a packet.
#[derive(Clone, Copy, Debug)]
pub(super) enum PacketTime {
    /// So much later than the last one, in nanoseconds.
    Later(u64),
    /// This time on CLOCK_MONOTONIC.
    At(u64),
}

/// The fields of a track event.
#[derive(Debug)]
pub(super) struct EventFields {
    pub(super) kind: u64,
    pub(super) name: Option<u64>,
    pub(super) track: u64,
    pub(super) value: Option<u64>,
}

/// The most bytes of a packet without annotations: ten fields and lengths, each with its number and a value of at
/// most ten bytes.
const MAX_PACKET: usize = 112;

/// A packet that is written in place: bytes that were just written one by one are slow to copy together.
struct Packet<'t> {
    bytes: &'t mut [u8],
    len: usize,
}

impl Packet<'_> {
    #[inline]
    fn byte(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    #[inline]
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.byte(value as u8 | 0x80);
            value >>= 7;
        }
        self.byte(value as u8);
    }

    #[inline]
    fn field(&mut self, number: u32, value: u64) {
        self.varint(key(number, VARINT));
        self.varint(value);
    }
}

/// The key of a field: its number and type.
const fn key(number: u32, kind: u32) -> u64 {
    (number << 3 | kind) as u64
}

/// How many bytes a number takes.
#[inline]
const fn varint_len(value: u64) -> usize {
    (70 - (value | 1).leading_zeros() as usize) / 7
}

#[inline]
const fn field_len(number: u32, value: u64) -> usize {
    varint_len(key(number, VARINT)) + varint_len(value)
}

/// How many bytes a field of so many bytes takes.
#[inline]
const fn bytes_len(number: u32, len: usize) -> usize {
    varint_len(key(number, BYTES)) + varint_len(len as u64) + len
}

/// Writes a packet with an event, and its annotations.
#[inline]
pub(super) fn write_event(
    time: PacketTime,
    fields: &EventFields,
    annotations: &[u8],
    to: &mut Vec<u8>,
) {
    let (time, clock) = match time {
        PacketTime::Later(time) => (time, None),
        PacketTime::At(time) => (time, Some(MONOTONIC.into())),
    };
    let optional_len =
        |number, value: Option<u64>| value.map_or(0, |value| field_len(number, value));
    let event_len = field_len(track_event::TYPE, fields.kind)
        + optional_len(track_event::NAME_IID, fields.name)
        + field_len(track_event::TRACK_UUID, fields.track)
        + optional_len(track_event::COUNTER_VALUE, fields.value)
        + annotations.len();
    let (sequence, flags) = (SEQUENCE.into(), NEEDS_INCREMENTAL_STATE.into());
    let packet_len = field_len(packet::TIMESTAMP, time)
        + field_len(packet::SEQUENCE_ID, sequence)
        + field_len(packet::SEQUENCE_FLAGS, flags)
        + optional_len(packet::CLOCK_ID, clock)
        + bytes_len(packet::TRACK_EVENT, event_len);
    let start = to.len();
    to.extend_from_slice(&[0; MAX_PACKET]);
    let mut written = Packet {
        bytes: &mut to[start..],
        len: 0,
    };
    written.varint(key(PACKET, BYTES));
    written.varint(packet_len as u64);
    written.field(packet::TIMESTAMP, time);
    written.field(packet::SEQUENCE_ID, sequence);
    written.field(packet::SEQUENCE_FLAGS, flags);
    if let Some(clock) = clock {
        written.field(packet::CLOCK_ID, clock);
    }
    written.varint(key(packet::TRACK_EVENT, BYTES));
    written.varint(event_len as u64);
    written.field(track_event::TYPE, fields.kind);
    if let Some(name) = fields.name {
        written.field(track_event::NAME_IID, name);
    }
    written.field(track_event::TRACK_UUID, fields.track);
    if let Some(value) = fields.value {
        written.field(track_event::COUNTER_VALUE, value);
    }
    let end = start + written.len;
    to.truncate(end);
    if !annotations.is_empty() {
        to.extend_from_slice(annotations);
    }
}

/// Writes an annotation, as a field of a track event.
pub(super) fn write_annotation(annotation: &Annotation, to: &mut Vec<u8>) {
    use debug_annotation::{INT_VALUE, NAME, STRING_VALUE};
    let name = annotation.key.as_bytes();
    let value_len = match &annotation.value {
        AnnotationValue::Int(number) => field_len(INT_VALUE, *number as u64),
        AnnotationValue::Text(text) => bytes_len(STRING_VALUE, text.len()),
    };
    let len = value_len + bytes_len(NAME, name.len());
    put_varint(key(track_event::DEBUG_ANNOTATIONS, BYTES), to);
    put_varint(len as u64, to);
    match &annotation.value {
        AnnotationValue::Int(number) => {
            put_varint(key(INT_VALUE, VARINT), to);
            put_varint(*number as u64, to);
        }
        AnnotationValue::Text(text) => put_bytes(STRING_VALUE, text.as_bytes(), to),
    }
    put_bytes(NAME, name, to);
}

fn put_varint(value: u64, to: &mut Vec<u8>) {
    prost::encoding::encode_varint(value, to);
}

fn put_bytes(number: u32, bytes: &[u8], to: &mut Vec<u8>) {
    put_varint(key(number, BYTES), to);
    put_varint(bytes.len() as u64, to);
    to.extend_from_slice(bytes);
}
