//! [`SemaphoreRecord`]: what the code part of an arena says of a semaphore that is raised while a USDT probe is
//! observed, or of another word of the program that is changed for that time (here, `raised` means changed). Pure.
//!
//! ```text
//! +0 address   +8 index of the point   +11 how it is changed   +12 value before the last change   +14 state
//! ```
//!
//! Value and state are written together before the semaphore is written, and the state once more afterwards. The
//! process is stopped meanwhile, so a tool that finds the record of a killed tool knows whether the semaphore has
//! been changed.

use crate::address::LiveAddr;
use crate::numbers::u64_at;

/// The length of a record in bytes.
pub(crate) const SEMAPHORE_RECORD_LEN: usize = 16;

/// Where value and state are in it: [`Progress`].
pub(crate) const PROGRESS_AT: u64 = 12;
pub(crate) const PROGRESS_LEN: usize = 4;

/// A semaphore, and the point of its probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SemaphoreRecord {
    pub(crate) at: LiveAddr,
    /// The index of the point in its arena.
    pub(crate) point: usize,
    pub(crate) change: WordChange,
}

/// How a word is changed while its point is observed, and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WordChange {
    /// A semaphore: one more.
    Count,
    /// A flag that is clear: set.
    Set,
    /// A flag that is set: cleared.
    Clear,
    /// A flag that the process itself sets meanwhile: cleared at the end.
    ClearAtEnd,
}

/// A word that is changed while a point is observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChangedWord {
    pub(crate) at: LiveAddr,
    pub(crate) change: WordChange,
}

impl WordChange {
    /// Returns what to write over this value while the point is observed; `None` if it stays.
    pub(crate) fn changed(self, value: u16) -> Option<u16> {
        match (self, value) {
            (WordChange::Count, value) => Some(value.saturating_add(1)),
            (WordChange::Set, 0) => Some(1),
            (WordChange::Clear, 1) => Some(0),
            _ => None,
        }
    }

    /// Returns what to write over this value at the end.
    pub(crate) fn restored(self, value: u16) -> u16 {
        match self {
            // Another tool may have set it to 0.
            WordChange::Count => value.saturating_sub(1),
            WordChange::Clear => 1,
            WordChange::Set | WordChange::ClearAtEnd => 0,
        }
    }

    fn to_byte(self) -> u8 {
        match self {
            WordChange::Count => 0,
            WordChange::Set => 1,
            WordChange::Clear => 2,
            WordChange::ClearAtEnd => 3,
        }
    }

    fn parse(byte: u8) -> WordChange {
        match byte {
            1 => WordChange::Set,
            2 => WordChange::Clear,
            3 => WordChange::ClearAtEnd,
            _ => WordChange::Count,
        }
    }
}

/// How far a semaphore has been changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// It was not raised, or was lowered again.
    Lowered,
    /// It is being raised; its value before that.
    Raising(u16),
    Raised,
    /// It is being lowered; its value before that.
    Lowering(u16),
}

impl SemaphoreRecord {
    pub(crate) fn to_bytes(self) -> [u8; SEMAPHORE_RECORD_LEN] {
        let mut bytes = [0; SEMAPHORE_RECORD_LEN];
        bytes[..8].copy_from_slice(&self.at.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.point as u32).to_le_bytes());
        // An arena has fewer than 2^24 points.
        bytes[11] = self.change.to_byte();
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> SemaphoreRecord {
        let at = u64_at(bytes, 0).unwrap_or(0);
        let point = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], 0]);
        SemaphoreRecord {
            at: LiveAddr(at),
            point: point as usize,
            change: WordChange::parse(bytes[11]),
        }
    }
}

impl Progress {
    pub(crate) fn to_bytes(self) -> [u8; PROGRESS_LEN] {
        let (value, state) = match self {
            Progress::Lowered => (0, 0),
            Progress::Raising(value) => (value, 1),
            Progress::Raised => (0, 2),
            Progress::Lowering(value) => (value, 3),
        };
        let [low, high] = value.to_le_bytes();
        [low, high, state, 0]
    }

    pub(crate) fn parse(bytes: [u8; PROGRESS_LEN]) -> Progress {
        let [low, high, state, _] = bytes;
        let value = u16::from_le_bytes([low, high]);
        match state {
            1 => Progress::Raising(value),
            2 => Progress::Raised,
            3 => Progress::Lowering(value),
            _ => Progress::Lowered,
        }
    }

    /// Returns whether a semaphore that has this value is raised.
    pub(crate) fn is_raised(self, value: u16) -> bool {
        match self {
            Progress::Lowered => false,
            Progress::Raising(before) => value != before,
            Progress::Raised => true,
            Progress::Lowering(before) => value == before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_undone_from_any_value() {
        use WordChange::{Clear, ClearAtEnd, Count, Set};
        for (change, before, during) in [
            (Count, 3, Some(4)),
            (Set, 0, Some(1)),
            (Set, 1, None),
            (Clear, 1, Some(0)),
            (Clear, 0, None),
            (ClearAtEnd, 0, None),
        ] {
            assert_eq!(change.changed(before), during, "{change:?}");
            if let Some(during) = during {
                assert_eq!(change.restored(during), before, "{change:?}");
            }
            let record = SemaphoreRecord {
                at: LiveAddr(0x1234_5678),
                point: 0x12_3456,
                change,
            };
            assert_eq!(SemaphoreRecord::parse(&record.to_bytes()), record);
        }
        assert_eq!((Count.restored(0), ClearAtEnd.restored(1)), (0, 0));
    }

    #[test]
    fn progress_tells_whether_a_semaphore_is_raised() {
        for (progress, value, is_raised) in [
            (Progress::Lowered, 3, false),
            (Progress::Raising(3), 3, false),
            (Progress::Raising(3), 4, true),
            (Progress::Raised, 4, true),
            (Progress::Lowering(4), 4, true),
            (Progress::Lowering(4), 3, false),
        ] {
            let read = Progress::parse(progress.to_bytes());
            assert_eq!((read, read.is_raised(value)), (progress, is_raised));
        }
        assert_eq!(Progress::parse([1, 2, 9, 0]), Progress::Lowered);
    }
}
