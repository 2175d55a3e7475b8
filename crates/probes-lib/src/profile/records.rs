//! The records that the kernel writes of switches: bytes → records. Pure.
//!
//! Each begins with a header of eight bytes: type, flags, and its length with the header (linux/perf_event.h).

use std::time::Duration;

/// `enum perf_event_type` and `PERF_RECORD_MISC_*` of linux/perf_event.h.
const LOST: u32 = 2;
const EXIT: u32 = 4;
const SWITCH: u32 = 14;
const SWITCH_OUT: u16 = 1 << 13;
const SWITCH_OUT_PREEMPT: u16 = 1 << 14;

const HEADER: usize = 8;

/// What the kernel has recorded of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// By `CLOCK_MONOTONIC`.
    pub(super) at: Duration,
    pub(super) pid: i32,
    pub(super) tid: i32,
    pub(super) kind: RecordKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// It was switched to.
    In,
    /// It was switched from: it waits.
    Out,
    /// It was switched from, and waits for nothing but a processor.
    Preempted,
    Exited,
    /// So many records before this one were not written, because there was no room.
    Lost(u64),
}

/// Appends the records that `bytes` hold. What cannot be understood ends it.
pub(super) fn parse(mut bytes: &[u8], records: &mut Vec<Record>) {
    while let Some(header) = bytes.first_chunk::<HEADER>() {
        let [a, b, c, d, e, f, g, h] = *header;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let flags = u16::from_le_bytes([e, f]);
        let len = usize::from(u16::from_le_bytes([g, h]));
        let Some((record, rest)) = bytes.split_at_checked(len) else {
            return;
        };
        let Some(body) = record.get(HEADER..) else {
            return;
        };
        records.extend(parse_one(kind, flags, body));
        bytes = rest;
    }
}

fn parse_one(kind: u32, flags: u16, body: &[u8]) -> Option<Record> {
    // Each ends with the process, the thread and the time (`PERF_SAMPLE_TID`, `PERF_SAMPLE_TIME`).
    let (kind, at) = match kind {
        SWITCH if flags & SWITCH_OUT == 0 => (RecordKind::In, 0),
        SWITCH if flags & SWITCH_OUT_PREEMPT != 0 => (RecordKind::Preempted, 0),
        SWITCH => (RecordKind::Out, 0),
        // Before these: pid, parent's pid, tid, parent's tid, time. The thread that exits writes it.
        EXIT => (RecordKind::Exited, 24),
        // Before these: the number of the event, and how many.
        LOST => {
            let many = body.get(8..16)?.try_into().ok()?;
            (RecordKind::Lost(u64::from_le_bytes(many)), 16)
        }
        _ => return None,
    };
    let sample = body.get(at..)?.first_chunk::<16>()?;
    let number = |at: usize| Some(i32::from_le_bytes(*sample.get(at..)?.first_chunk()?));
    let time = u64::from_le_bytes(*sample.last_chunk()?);
    Some(Record {
        at: Duration::from_nanos(time),
        pid: number(0)?,
        tid: number(4)?,
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, flags: u16, words: &[u64]) -> Vec<u8> {
        let len = (HEADER + 8 * words.len()) as u16;
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(flags.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    fn parsed(bytes: &[u8]) -> Vec<Record> {
        let mut records = Vec::new();
        parse(bytes, &mut records);
        records
    }

    const THREAD: u64 = 4243 << 32 | 4242;

    #[test]
    fn records_of_the_kernel_are_parsed() {
        let bytes = [
            record(SWITCH, SWITCH_OUT, &[THREAD, 1000]),
            record(SWITCH, 0, &[THREAD, 2000]),
            record(SWITCH, SWITCH_OUT | SWITCH_OUT_PREEMPT, &[THREAD, 3000]),
            // One of another type, of the start of a thread.
            record(7, 0, &[1, 2, 3, 4, 5]),
            record(LOST, 0, &[9, 17, THREAD, 4000]),
            record(EXIT, 0, &[0, 0, 4000, THREAD, 5000]),
        ]
        .concat();
        let expected = [
            (1000, RecordKind::Out),
            (2000, RecordKind::In),
            (3000, RecordKind::Preempted),
            (4000, RecordKind::Lost(17)),
            (5000, RecordKind::Exited),
        ];
        let expected = expected.map(|(time, kind)| Record {
            at: Duration::from_nanos(time),
            pid: 4242,
            tid: 4243,
            kind,
        });
        assert_eq!(parsed(&bytes), expected);
        // What is cut off says nothing.
        for len in 0..bytes.len() {
            assert!(expected.starts_with(&parsed(&bytes[..len])));
        }
    }

    #[test]
    fn records_may_hold_any_bytes() {
        fastrand::seed(7);
        for _ in 0..10_000 {
            let bytes: Vec<u8> = (0..fastrand::usize(..64))
                .map(|_| fastrand::u8(..32))
                .collect();
            assert!(parsed(&bytes).len() <= bytes.len() / HEADER);
        }
        // No length, and one that is shorter than the header.
        assert_eq!(parsed(&[0; 64]), []);
        assert_eq!(parsed(&[14, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0]), []);
    }
}
