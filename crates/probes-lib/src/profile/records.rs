//! Parses the records of perf_event_open(2): switches, exits, samples, losses. Pure.
//!
//! Each begins with a header of eight bytes: type, flags, and its length with the header (linux/perf_event.h).

use std::sync::Arc;
use std::time::Duration;

use crate::observe::CopiedStack;
use crate::sys::perf::SAMPLED_REGISTERS;
use crate::unwind::RawStack;
use crate::unwind::registers::{self, FrameRegisters};

/// `enum perf_event_type` and `PERF_RECORD_MISC_*` of linux/perf_event.h.
const LOST: u32 = 2;
const EXIT: u32 = 4;
const SAMPLE: u32 = 9;
const SWITCH: u32 = 14;
const SWITCH_OUT: u16 = 1 << 13;
const SWITCH_OUT_PREEMPT: u16 = 1 << 14;

const HEADER: usize = 8;

/// A record of a thread: one of the kernel's, or [`RecordKind::Full`], which the reader adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PerfRecord {
    /// By `CLOCK_MONOTONIC`.
    pub(super) at: Duration,
    pub(super) pid: i32,
    pub(super) tid: i32,
    /// The number of its event.
    pub(super) event: u64,
    pub(super) kind: RecordKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// It was switched to.
    In,
    /// It was switched from: it waits.
    Out,
    /// It was switched from, and waits for nothing but a processor.
    Preempted,
    Exited,
    /// It has run for another period; `None` if its registers are not known.
    Sample(Option<Arc<SampledStack>>),
    /// So many records before this one were not written, because there was no room.
    Lost(u64),
    /// The ring was full, or nearly: records may have been lost from then until this time. The kernel writes their number
    /// ([`RecordKind::Lost`]) with its next record.
    Full(Duration),
}

/// The stack of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SampledStack {
    pub(super) copied: CopiedStack,
    /// The frames, if more memory than was copied was needed for them, and was read a moment later.
    pub(super) completed: Option<RawStack>,
}

impl SampledStack {
    fn of(copied: CopiedStack) -> Arc<SampledStack> {
        Arc::new(SampledStack {
            copied,
            completed: None,
        })
    }
}

impl PerfRecord {
    /// If it is a sample that was just read, finds the frames for which the copy is not enough.
    pub(super) fn complete(&mut self, find: impl FnOnce(&CopiedStack) -> Option<RawStack>) {
        if let RecordKind::Sample(Some(sampled)) = &mut self.kind {
            if let Some(sampled) = Arc::get_mut(sampled) {
                sampled.completed = find(&sampled.copied);
            }
        }
    }

    /// Returns the record to put after `last`, the last one of a ring that was full; `until` is when the ring was read.
    pub(super) fn of_full_ring(last: &PerfRecord, until: Duration) -> PerfRecord {
        PerfRecord {
            kind: RecordKind::Full(until),
            ..last.clone()
        }
    }
}

/// Appends the records that `bytes` hold. Those of other types are skipped; a length that is too short or too long ends it.
pub(super) fn parse(mut bytes: &[u8], records: &mut Vec<PerfRecord>) {
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

fn parse_one(kind: u32, flags: u16, body: &[u8]) -> Option<PerfRecord> {
    if kind == SAMPLE {
        let (head, rest) = body.split_at_checked(SAMPLE_ID_LEN)?;
        return with_sample_id(
            head,
            RecordKind::Sample(parse_stack(rest).map(SampledStack::of)),
        );
    }
    // Every other record ends with the process, the thread, the time and the event, with which a sample begins
    // (`PERF_SAMPLE_TID`, `_TIME`, `_ID`).
    let (kind, at) = match kind {
        SWITCH if flags & SWITCH_OUT == 0 => (RecordKind::In, 0),
        SWITCH if flags & SWITCH_OUT_PREEMPT != 0 => (RecordKind::Preempted, 0),
        SWITCH => (RecordKind::Out, 0),
        // Before these: pid, parent's pid, tid, parent's tid, time. The thread that exits writes it.
        EXIT => (RecordKind::Exited, 24),
        // Before these: the number of the event, and how many.
        LOST => {
            let count = body.get(8..16)?.try_into().ok()?;
            (RecordKind::Lost(u64::from_le_bytes(count)), 16)
        }
        _ => return None,
    };
    with_sample_id(body.get(at..)?, kind)
}

/// The bytes of the process, the thread, the time and the event: `struct sample_id` of linux/perf_event.h.
const SAMPLE_ID_LEN: usize = 24;

/// Parses these, and returns a record of this kind.
fn with_sample_id(bytes: &[u8], kind: RecordKind) -> Option<PerfRecord> {
    let sample = bytes.first_chunk::<SAMPLE_ID_LEN>()?;
    let number = |at: usize| Some(i32::from_le_bytes(*sample.get(at..)?.first_chunk()?));
    let [time, event] =
        [8, 16].map(|at| Some(u64::from_le_bytes(*sample.get(at..)?.first_chunk()?)));
    Some(PerfRecord {
        at: Duration::from_nanos(time?),
        pid: number(0)?,
        tid: number(4)?,
        event: event?,
        kind,
    })
}

/// The registers of a sample in its order (asm/perf_regs.h), as DWARF numbers them; `None` is the program counter.
const SAMPLE_ORDER: [Option<usize>; 17] = [
    Some(registers::RAX),
    Some(registers::RBX),
    Some(registers::RCX),
    Some(registers::RDX),
    Some(registers::RSI),
    Some(registers::RDI),
    Some(registers::RBP),
    Some(registers::RSP),
    None,
    Some(8),
    Some(9),
    Some(10),
    Some(11),
    Some(12),
    Some(13),
    Some(14),
    Some(15),
];
const _: () = assert!(SAMPLE_ORDER.len() == SAMPLED_REGISTERS.count_ones() as usize);

/// Parses the ABI, the registers, and the stack: its length, the bytes, and how many of them could be read. `None` if
/// the thread is not a 64-bit one, or a length does not fit.
fn parse_stack(bytes: &[u8]) -> Option<CopiedStack> {
    /// `PERF_SAMPLE_REGS_ABI_64` of linux/perf_event.h.
    const ABI_64: u64 = 2;
    /// What older kernels write for a register that they do not know.
    const NOT_KNOWN: u64 = u64::MAX;
    let mut words = bytes.chunks_exact(8);
    let mut word = || Some(u64::from_le_bytes(words.next()?.try_into().ok()?));
    if word()? != ABI_64 {
        return None;
    }
    let mut registers = FrameRegisters::new(0, 0);
    for register in SAMPLE_ORDER {
        let value = word()?;
        match register {
            Some(register) => registers.set(register, (value != NOT_KNOWN).then_some(value)),
            None => registers.ip = value,
        }
    }
    let len = usize::try_from(word()?).ok()?;
    let stack = bytes.get(8 * (SAMPLE_ORDER.len() + 2)..)?;
    let (stack, rest) = match len {
        0 => (&[][..], &[][..]),
        len => stack.split_at_checked(len)?,
    };
    let readable = rest.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
    let readable = usize::try_from(readable).ok()?;
    Some(CopiedStack::of_thread(registers, stack.get(..readable)?))
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

    fn parsed(bytes: &[u8]) -> Vec<PerfRecord> {
        let mut records = Vec::new();
        parse(bytes, &mut records);
        records
    }

    const THREAD: u64 = 4243 << 32 | 4242;
    const EVENT: u64 = 99;

    #[test]
    fn records_of_the_kernel_are_parsed() {
        let bytes = [
            record(SWITCH, SWITCH_OUT, &[THREAD, 1000, EVENT]),
            record(SWITCH, 0, &[THREAD, 2000, EVENT]),
            record(
                SWITCH,
                SWITCH_OUT | SWITCH_OUT_PREEMPT,
                &[THREAD, 3000, EVENT],
            ),
            // One of another type, of the start of a thread.
            record(7, 0, &[1, 2, 3, 4, 5]),
            record(LOST, 0, &[9, 17, THREAD, 4000, EVENT]),
            record(EXIT, 0, &[0, 0, 4000, THREAD, 5000, EVENT]),
        ]
        .concat();
        let expected = [
            (1000, RecordKind::Out),
            (2000, RecordKind::In),
            (3000, RecordKind::Preempted),
            (4000, RecordKind::Lost(17)),
            (5000, RecordKind::Exited),
        ];
        let expected = expected.map(|(time, kind)| PerfRecord {
            at: Duration::from_nanos(time),
            pid: 4242,
            tid: 4243,
            event: EVENT,
            kind,
        });
        assert_eq!(parsed(&bytes), expected);
        // What is cut off says nothing.
        for len in 0..bytes.len() {
            assert!(expected.starts_with(&parsed(&bytes[..len])));
        }
    }

    #[test]
    fn any_bytes_are_parsed_without_panic() {
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

    #[test]
    fn samples_have_registers_and_stack() {
        const STACK: u64 = 0x7ffc_0000;
        let registers = [1, u64::MAX, 2, 3, 4, 5, 0x7ffd_0000, STACK, 0x40_1000];
        let others = [8, 9, 10, 11, 12, 13, 14, 15];
        let head = [THREAD, 6000, EVENT, 2];
        let body = |stack: &[u64]| [&head[..], &registers, &others, stack].concat();
        // Three words of stack, of which two could be read.
        let whole = record(SAMPLE, 0, &body(&[24, 0x111, 0x222, 0, 16]));
        let [found] = &parsed(&whole)[..] else {
            panic!("{:?}", parsed(&whole));
        };
        assert_eq!((found.at, found.tid), (Duration::from_nanos(6000), 4243));
        let mut expected = FrameRegisters::new(0x40_1000, STACK);
        let known = [
            (registers::RAX, 1),
            (registers::RCX, 2),
            (registers::RDX, 3),
            (registers::RSI, 4),
            (registers::RDI, 5),
            (registers::RBP, 0x7ffd_0000),
        ];
        for (register, value) in known.into_iter().chain((8..16).map(|it| (it, it as u64))) {
            expected.set(register, Some(value));
        }
        let bytes: Vec<u8> = [0x111_u64, 0x222].map(u64::to_le_bytes).concat();
        let copied = CopiedStack::of_thread(expected, &bytes);
        assert_eq!(
            found.kind,
            RecordKind::Sample(Some(SampledStack::of(copied)))
        );
        // No stack; a 32-bit thread; one that has exited; lengths that cannot be.
        let kind = |words: &[u64]| parsed(&record(SAMPLE, 0, words)).pop().map(|it| it.kind);
        let empty = CopiedStack::of_thread(expected, &[]);
        let sample =
            |copied: Option<CopiedStack>| Some(RecordKind::Sample(copied.map(SampledStack::of)));
        assert_eq!(kind(&body(&[0])), sample(Some(empty)));
        for unusable in [
            &[THREAD, 6000, EVENT, 1, 2, 3][..],
            &[THREAD, 6000, EVENT, 0, 0],
            &[THREAD, 6000, EVENT],
            &body(&[24, 1, 2, 3, 32]),
            &body(&[32, 1, 2, 3]),
            &body(&[u64::MAX, 1]),
            &body(&[]),
        ] {
            assert_eq!(kind(unusable), sample(None), "{unusable:x?}");
        }
        assert_eq!(kind(&[THREAD]), None);
    }
}
