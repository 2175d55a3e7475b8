//! [`SliceMemory`]: a test double for the memory of a process, with writes that can be made to fail.

use std::io;
use std::ops::Range;

use super::{CounterFault, ReadMemory, WriteMemory};
use crate::address::LiveAddr;

/// How a write fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteFault {
    /// Nothing is written, and an error is returned.
    Refused,
    /// The first byte is written, and an error is returned.
    Torn,
    /// Nothing is written, and no error is returned.
    Dropped,
    /// The last byte is written wrongly, and no error is returned.
    Corrupted,
    /// The process has exited.
    Gone,
}

impl WriteFault {
    /// Faults that an error reports.
    pub(crate) const REPORTED: [WriteFault; 3] =
        [WriteFault::Refused, WriteFault::Torn, WriteFault::Gone];
    /// Faults that only reading back shows.
    pub(crate) const SILENT: [WriteFault; 2] = [WriteFault::Dropped, WriteFault::Corrupted];
}

/// Pieces of memory at their addresses. The writes whose numbers, counted from 0, are in `fail` fail; a
/// counter is one write.
#[derive(Clone, Debug)]
pub(crate) struct SliceMemory {
    /// Sorted, and not adjacent.
    pieces: Vec<(u64, Vec<u8>)>,
    pub(crate) writes: usize,
    pub(crate) fail: Range<usize>,
    pub(crate) fault: WriteFault,
}

/// Two are equal if they hold the same bytes.
impl PartialEq for SliceMemory {
    fn eq(&self, other: &SliceMemory) -> bool {
        self.pieces == other.pieces
    }
}

impl SliceMemory {
    pub(crate) fn new(pieces: impl IntoIterator<Item = (u64, Vec<u8>)>) -> SliceMemory {
        let mut all: Vec<(u64, Vec<u8>)> = pieces.into_iter().collect();
        all.sort_by_key(|piece| piece.0);
        let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
        for (start, bytes) in all {
            match pieces.last_mut() {
                Some((first, joined)) if *first + joined.len() as u64 == start => {
                    joined.extend(bytes);
                }
                _ => pieces.push((start, bytes)),
            }
        }
        SliceMemory {
            pieces,
            writes: 0,
            fail: 0..0,
            fault: WriteFault::Refused,
        }
    }

    /// Returns a copy in which the writes with a number in `fail` fail; they are counted from now on.
    pub(crate) fn failing(&self, fail: Range<usize>, fault: WriteFault) -> SliceMemory {
        SliceMemory {
            writes: 0,
            fail,
            fault,
            ..self.clone()
        }
    }

    /// Writes bytes without counting it as a write.
    pub(crate) fn poke(&mut self, at: LiveAddr, bytes: &[u8]) {
        let found = self.find(at, bytes.len()).expect("it is mapped");
        found.copy_from_slice(bytes);
    }

    pub(crate) fn byte(&self, at: LiveAddr) -> u8 {
        let mut byte = [0];
        self.read(at, &mut byte).expect("it is mapped");
        byte[0]
    }

    /// Returns a few addresses where they differ, with both bytes, for messages.
    pub(crate) fn differences(&self, other: &SliceMemory) -> Vec<(LiveAddr, u8, u8)> {
        let pairs = self.pieces.iter().zip(&other.pieces);
        pairs
            .flat_map(|((start, ours), (_, theirs))| {
                let bytes = ours.iter().zip(theirs).zip(*start..);
                bytes.filter(|((one, other), _)| one != other)
            })
            .map(|((&one, &other), at)| (LiveAddr(at), one, other))
            .take(8)
            .collect()
    }

    fn find(&mut self, at: LiveAddr, len: usize) -> io::Result<&mut [u8]> {
        let (piece, range) = self.range(at, len)?;
        Ok(&mut self.pieces[piece].1[range])
    }

    /// Returns the index of the piece that has these bytes, and their range in it.
    fn range(&self, at: LiveAddr, len: usize) -> io::Result<(usize, Range<usize>)> {
        let fault = || io::Error::from_raw_os_error(libc::EIO);
        let after = self.pieces.partition_point(|piece| piece.0 <= at.0);
        let index = after.checked_sub(1).ok_or_else(fault)?;
        let (start, bytes) = &self.pieces[index];
        let from = (at.0 - start) as usize;
        match from.checked_add(len) {
            Some(to) if to <= bytes.len() => Ok((index, from..to)),
            _ => Err(fault()),
        }
    }

    fn write(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        let number = self.writes;
        self.writes += 1;
        let fails = self.fail.contains(&number);
        let fault = self.fault;
        let place = self.find(at, bytes.len())?;
        if !fails {
            place.copy_from_slice(bytes);
            return Ok(());
        }
        match fault {
            WriteFault::Refused => Err(io::Error::from_raw_os_error(libc::EIO)),
            WriteFault::Torn => {
                place[0] = bytes[0];
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            WriteFault::Dropped => Ok(()),
            WriteFault::Corrupted => {
                place.copy_from_slice(bytes);
                place[bytes.len() - 1] ^= 0x80;
                Ok(())
            }
            WriteFault::Gone => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl ReadMemory for SliceMemory {
    fn read(&self, at: LiveAddr, bytes: &mut [u8]) -> io::Result<()> {
        let (piece, range) = self.range(at, bytes.len())?;
        bytes.copy_from_slice(&self.pieces[piece].1[range]);
        Ok(())
    }
}

impl WriteMemory for SliceMemory {
    fn write_code(&mut self, at: LiveAddr, bytes: &[u8]) -> io::Result<()> {
        self.write(at, bytes)
    }

    fn write_counters(&mut self, writes: &[(LiveAddr, u16)]) -> Result<(), CounterFault> {
        for (done, &(at, value)) in writes.iter().enumerate() {
            self.write(at, &value.to_le_bytes())
                .map_err(|source| CounterFault { done, source })?;
        }
        Ok(())
    }
}
