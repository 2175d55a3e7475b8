//! The bytes of a packet with a track event, field by field: all lengths are known before the first byte is written.

use prost::encoding::encode_varint;

use super::super::{Annotation, AnnotationValue, TrackEventKind, TrackId};
use super::{
    COUNTER, INSTANT, MONOTONIC, NEEDS_INCREMENTAL_STATE, PACKET, SEQUENCE, SLICE_BEGIN, SLICE_END,
    uuid,
};

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
    /// The nanoseconds since the last packet.
    SinceLast(u64),
    /// This time on CLOCK_MONOTONIC.
    At(u64),
}

/// How many events the cache has room for: a power of two.
const CACHE_LEN: usize = 64;

/// At least as many bytes as the longest fields of an event have: a type, a track, and a name or a value.
const MAX_FIELDS: usize = 32;

/// The fields of a track event, without annotations.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventFields {
    track: TrackId,
    kind: TrackEventKind,
    bytes: [u8; MAX_FIELDS],
    len: usize,
}

/// The fields of recent events: those of a track differ in little but their times.
#[derive(Debug)]
pub(super) struct FieldsCache {
    entries: Box<[EventFields; CACHE_LEN]>,
    /// Reused to encode an entry.
    buffer: Vec<u8>,
}

impl EventFields {
    fn of(track: TrackId, kind: TrackEventKind, buffer: &mut Vec<u8>) -> EventFields {
        let (number, name, value) = match kind {
            TrackEventKind::Begin(name) => (SLICE_BEGIN, Some(name), None),
            TrackEventKind::End => (SLICE_END, None, None),
            TrackEventKind::Instant(name) => (INSTANT, Some(name), None),
            TrackEventKind::Value(value) => (COUNTER, None, Some(value)),
        };
        buffer.clear();
        put_number(track_event::TYPE, number, buffer);
        if let Some(name) = name {
            put_number(track_event::NAME_IID, name.0.into(), buffer);
        }
        put_number(track_event::TRACK_UUID, uuid(track), buffer);
        if let Some(value) = value {
            put_number(track_event::COUNTER_VALUE, value as u64, buffer);
        }
        let len = buffer.len();
        buffer.resize(MAX_FIELDS, 0);
        EventFields {
            track,
            kind,
            bytes: buffer.first_chunk().copied().unwrap_or_default(),
            len,
        }
    }
}

impl FieldsCache {
    pub(super) fn new() -> FieldsCache {
        let mut buffer = Vec::new();
        let first = EventFields::of(TrackId::PROCESS, TrackEventKind::End, &mut buffer);
        FieldsCache {
            entries: Box::new([first; CACHE_LEN]),
            buffer,
        }
    }

    /// Returns the fields of an event.
    #[inline]
    pub(super) fn of(&mut self, track: TrackId, kind: TrackEventKind) -> &EventFields {
        let name = match kind {
            TrackEventKind::Begin(name) | TrackEventKind::Instant(name) => name.0,
            TrackEventKind::End | TrackEventKind::Value(_) => 0,
        };
        let index = track.0.wrapping_mul(7).wrapping_add(name) as usize % CACHE_LEN;
        let entry = &mut self.entries[index];
        if entry.track != track || entry.kind != kind {
            *entry = EventFields::of(track, kind, &mut self.buffer);
        }
        entry
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
const fn number_len(number: u32, value: u64) -> usize {
    varint_len(key(number, VARINT)) + varint_len(value)
}

/// How many bytes a field of so many bytes takes.
#[inline]
const fn bytes_len(number: u32, len: usize) -> usize {
    varint_len(key(number, BYTES)) + varint_len(len as u64) + len
}

const _: () = assert!(SEQUENCE < 0x80 && NEEDS_INCREMENTAL_STATE < 0x80);

/// The fields between the time and the event: each number and value is one byte.
const OF_SEQUENCE: [u8; 4] = [
    key(packet::SEQUENCE_ID, VARINT) as u8,
    SEQUENCE as u8,
    key(packet::SEQUENCE_FLAGS, VARINT) as u8,
    NEEDS_INCREMENTAL_STATE as u8,
];

/// Writes a packet with an event, and its annotations.
#[inline]
pub(super) fn write_event(
    time: PacketTime,
    fields: &EventFields,
    annotations: &[u8],
    to: &mut Vec<u8>,
) {
    let event_len = fields.len + annotations.len();
    match time {
        PacketTime::SinceLast(time) if time < 1 << 14 && event_len < 100 => {
            write_short_head(time, event_len, to);
        }
        _ => write_head(time, event_len, to),
    }
    let end = to.len() + fields.len;
    // A length that the compiler knows: otherwise this is a call of memcpy(3).
    to.extend_from_slice(&fields.bytes);
    to.truncate(end);
    if !annotations.is_empty() {
        to.extend_from_slice(annotations);
    }
}

/// Same as [`write_head`], if the lengths of the packet and the event have one byte, and the time at most two.
#[inline]
fn write_short_head(time: u64, event_len: usize, to: &mut Vec<u8>) {
    let (time, time_len) = match time {
        ..0x80 => (time, 1),
        _ => (time & 0x7f | 0x80 | time >> 7 << 8, 2),
    };
    let packet_len = 1 + time_len + OF_SEQUENCE.len() + 2 + event_len;
    let (packet_key, time_key) = (key(PACKET, BYTES), key(packet::TIMESTAMP, VARINT));
    let bytes = packet_key | (packet_len as u64) << 8 | time_key << 16 | time << 24;
    let end = to.len() + 3 + time_len;
    to.extend_from_slice(&bytes.to_le_bytes());
    to.truncate(end);
    let [id_key, id, flags_key, flags] = OF_SEQUENCE;
    let event_key = key(packet::TRACK_EVENT, BYTES) as u8;
    to.extend_from_slice(&[id_key, id, flags_key, flags, event_key, event_len as u8]);
}

/// Writes what a packet has before the fields of an event.
fn write_head(time: PacketTime, event_len: usize, to: &mut Vec<u8>) {
    let (time, clock) = match time {
        PacketTime::SinceLast(time) => (time, None),
        PacketTime::At(time) => (time, Some(u64::from(MONOTONIC))),
    };
    let packet_len = number_len(packet::TIMESTAMP, time)
        + OF_SEQUENCE.len()
        + clock.map_or(0, |clock| number_len(packet::CLOCK_ID, clock))
        + bytes_len(packet::TRACK_EVENT, event_len);
    put_key_and_value(key(PACKET, BYTES), packet_len as u64, to);
    put_number(packet::TIMESTAMP, time, to);
    to.extend_from_slice(&OF_SEQUENCE);
    if let Some(clock) = clock {
        put_number(packet::CLOCK_ID, clock, to);
    }
    put_key_and_value(key(packet::TRACK_EVENT, BYTES), event_len as u64, to);
}

/// Writes an annotation, as a field of a track event.
pub(super) fn write_annotation(annotation: &Annotation, to: &mut Vec<u8>) {
    use debug_annotation::{INT_VALUE, NAME, STRING_VALUE};
    let name = annotation.key.as_bytes();
    let value_len = match &annotation.value {
        AnnotationValue::Int(number) => number_len(INT_VALUE, *number as u64),
        AnnotationValue::Text(text) => bytes_len(STRING_VALUE, text.len()),
    };
    let len = value_len + bytes_len(NAME, name.len());
    put_key_and_value(key(track_event::DEBUG_ANNOTATIONS, BYTES), len as u64, to);
    match &annotation.value {
        AnnotationValue::Int(number) => put_number(INT_VALUE, *number as u64, to),
        AnnotationValue::Text(text) => put_bytes(STRING_VALUE, text.as_bytes(), to),
    }
    put_bytes(NAME, name, to);
}

/// Writes a field with a number as its value.
#[inline]
fn put_number(number: u32, value: u64, to: &mut Vec<u8>) {
    put_key_and_value(key(number, VARINT), value, to);
}

#[inline]
fn put_key_and_value(key: u64, value: u64, to: &mut Vec<u8>) {
    encode_varint(key, to);
    encode_varint(value, to);
}

fn put_bytes(number: u32, bytes: &[u8], to: &mut Vec<u8>) {
    put_key_and_value(key(number, BYTES), bytes.len() as u64, to);
    to.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_heads_are_those_of_any_event() {
        for time in [0, 1, 0x7f, 0x80, (1 << 14) - 1] {
            for event_len in [0, 1, 99] {
                let (mut short, mut any) = (Vec::new(), Vec::new());
                write_short_head(time, event_len, &mut short);
                write_head(PacketTime::SinceLast(time), event_len, &mut any);
                assert_eq!(short, any, "{time} {event_len}");
            }
        }
    }
}
