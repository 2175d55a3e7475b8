//! [`Arena`]: the memory that an observation maps into a process, as bytes. Nothing here accesses a
//! process by itself.
//!
//! ```text
//! code, R-X   header        magic, version, how many points, where the data are, the observer
//!             table         of each point: its address, what its patch overwrites
//!             semaphores    those that are raised, and other words that are changed (semaphores.rs)
//!             routine       counts hits of threads that have not claimed a row (trampoline/count.rs)
//!             trampolines   all of the same length (trampoline.rs)
//! data, RW-   counters      rows with one u64 for each point (rows.rs)
//!             shared data   of all points, in the first arena (shared.rs)
//!             successor     the observer that takes over from a live one
//!             registers     saved here by trampolines that may not use the stack
//! ```
//!
//! The code part has all that is needed to remove the observation: if the tool is killed, the next one
//! does it. Once it is complete, only three things in it are written again: the tails of trampolines, how far each
//! semaphore has been changed, and the flag that says that all points are restored.

mod header;

use std::ops::Range;

use crate::address::{LiveAddr, PAGE};
use crate::inject::code_cave::CodeCave;
use crate::observe::layout::groups::GROUPS;
use crate::observe::layout::observer_record::OBSERVER_RECORD_LEN;
use crate::observe::layout::rows::Rows;
use crate::observe::layout::semaphores::{PROGRESS_AT, SEMAPHORE_RECORD_LEN, SemaphoreRecord};
use crate::observe::layout::shared::SharedLayout;
use crate::observe::point::{PATCH_LEN, PatchPlace, Point, PointKind};
use header::ENTRY_LEN;
pub(crate) use header::{HEADER_LEN, HeaderVersion};

/// The length of a cache line in bytes. The length of a trampoline is a multiple of it.
pub(crate) const LINE: u64 = 64;

/// The length of the routine that trampolines share, in bytes.
pub(crate) const ROUTINE_LEN: u64 = 6 * LINE;

/// The bytes of the tail, with which a trampoline ends. Its first byte decides what the trampoline does
/// after it has recorded a hit: [`RET`](crate::site::RET) or [`JMP`](crate::site::JMP).
pub(crate) const TAIL_LEN: u64 = 8;

/// The bytes of [`Arena::saved_registers`]: the lock, and the registers.
const SAVED_REGISTERS_LEN: u64 = 2 * LINE;

/// The memory of an observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arena {
    /// Where its code begins, at a page.
    pub(crate) code: LiveAddr,
    /// Sorted by address.
    pub(crate) points: Vec<Point>,
    /// The semaphores that are raised, and other words that are changed, while their points are observed.
    pub(crate) semaphores: Vec<SemaphoreRecord>,
    /// The length of a trampoline in bytes.
    pub(crate) trampoline_len: u64,
    /// How many bytes stay unused before the first trampoline, less than a page, so that it begins where a jump leads.
    pub(crate) lead: u64,
    /// The layout of the shared data: empty if another arena has them.
    pub(crate) shared: SharedLayout,
    /// Whether hits are filtered: each point has a second counter, for those that the filter has no answer for.
    pub(crate) is_filtered: bool,
    /// Whether hits are sampled: each point has another counter, the last one, of the hits that samples are taken from.
    pub(crate) is_sampled: bool,
    /// Random: an arena that is mapped later at the same address has another.
    pub(crate) id: u64,
    pub(crate) version: HeaderVersion,
}

impl Arena {
    /// Returns the length of the code in bytes, whole pages.
    pub(crate) fn code_len(&self) -> u64 {
        let len = self.trampoline(self.points.len()).0 - self.code.0;
        len.next_multiple_of(PAGE)
    }

    /// Returns the addresses of code and data.
    pub(crate) fn range(&self) -> Range<u64> {
        self.code.0..self.data().plus(self.data_len()).0
    }

    /// Returns where the data begin: they follow the code.
    pub(crate) fn data(&self) -> LiveAddr {
        self.code.plus(self.code_len())
    }

    /// Returns the length of the data in bytes, whole pages.
    pub(crate) fn data_len(&self) -> u64 {
        match self.version {
            HeaderVersion::WithoutRecord { data_len } => data_len,
            HeaderVersion::Grouped(_) => {
                let successor = self.counters_len() + self.shared.len();
                (successor + OBSERVER_RECORD_LEN as u64).next_multiple_of(PAGE)
            }
            HeaderVersion::Current(_) => {
                let end = self.saved_registers().plus(SAVED_REGISTERS_LEN);
                (end.0 - self.data().0).next_multiple_of(PAGE)
            }
        }
    }

    /// Returns the layout of the counters of this version.
    pub(crate) fn rows(&self) -> Rows {
        let counters_of_each = 1 + usize::from(self.is_filtered) + usize::from(self.is_sampled);
        Rows {
            points: self.points.len() * counters_of_each,
        }
    }

    /// Returns the index of the second counter of a point, for hits without an answer.
    pub(crate) fn untyped_counter(&self, index: usize) -> usize {
        self.points.len() + index
    }

    /// Returns the index of the counter of a point for the hits that samples are taken from.
    pub(crate) fn sampled_counter(&self, index: usize) -> usize {
        self.points.len() * (1 + usize::from(self.is_filtered)) + index
    }

    /// Returns the length of the counters in bytes, whole pages.
    fn counters_len(&self) -> u64 {
        match self.version {
            HeaderVersion::Current(_) => self.rows().len(),
            _ => {
                let row = (self.points.len() as u64 * 8).max(PAGE);
                GROUPS as u64 * row.next_power_of_two()
            }
        }
    }

    /// Returns where the shared data begin: they follow the counters.
    pub(crate) fn shared_at(&self) -> LiveAddr {
        self.data().plus(self.counters_len())
    }

    /// Returns the address of the table of readable pages; `None` if there is none.
    pub(crate) fn pages_at(&self) -> Option<LiveAddr> {
        let has_pages = self.shared.has_pages();
        has_pages.then(|| self.shared_at().plus(self.shared.pages()))
    }

    /// Returns where a successor writes its record before it removes the observation of a live
    /// observer; `None` if this version has no place for it.
    pub(crate) fn successor_at(&self) -> Option<LiveAddr> {
        self.observer()?;
        Some(self.shared_at().plus(self.shared.len()))
    }

    /// Returns where trampolines save registers if they may not use the stack, under a lock.
    pub(crate) fn saved_registers(&self) -> LiveAddr {
        let successor = self.shared_at().plus(self.shared.len());
        let end = successor.0 + OBSERVER_RECORD_LEN as u64;
        LiveAddr(end.next_multiple_of(LINE))
    }

    /// Returns the counter of a point that all threads may increment, by a locked instruction.
    pub(crate) fn locked_counter(&self, index: usize) -> LiveAddr {
        self.data()
            .plus(self.rows().shared_row(0) + 8 * index as u64)
    }

    /// Returns where the records of semaphores begin, as an offset.
    fn semaphores_offset(&self) -> usize {
        self.version.len() + ENTRY_LEN * self.points.len()
    }

    /// Returns the address of the progress of a semaphore, given by its index.
    pub(crate) fn semaphore_progress(&self, index: usize) -> LiveAddr {
        let record = self.semaphores_offset() + SEMAPHORE_RECORD_LEN * index;
        self.code.plus(record as u64 + PROGRESS_AT)
    }

    /// Returns where the routine that trampolines share begins.
    pub(crate) fn routine(&self) -> LiveAddr {
        let semaphores = SEMAPHORE_RECORD_LEN * self.semaphores.len();
        let end = self.semaphores_offset() + semaphores;
        self.code.plus((end as u64).next_multiple_of(LINE))
    }

    /// Returns where the trampoline of a point begins.
    pub(crate) fn trampoline(&self, index: usize) -> LiveAddr {
        let routine_len = match self.version {
            HeaderVersion::Current(_) => ROUTINE_LEN,
            _ => 0,
        };
        let trampolines = self.routine().plus(routine_len + self.lead);
        trampolines.plus(self.trampoline_len * index as u64)
    }

    /// Returns where the tail of the trampoline of a point begins.
    pub(crate) fn tail(&self, index: usize) -> LiveAddr {
        self.trampoline(index).plus(self.trampoline_len - TAIL_LEN)
    }

    /// Returns the addresses of all trampolines, and of what they share.
    pub(crate) fn trampolines(&self) -> Range<u64> {
        self.routine().0..self.trampoline(self.points.len()).0
    }

    /// Returns where the room of the trampolines begins: with the bytes that stay unused before the first one.
    pub(crate) fn trampoline_room(&self) -> LiveAddr {
        LiveAddr(self.trampoline(0).0 - self.lead)
    }

    /// Returns where calls can be injected as long as no point leads to a trampoline: the room of the trampolines, up
    /// to a page.
    pub(crate) fn call_room(&self) -> CodeCave {
        let at = self.trampoline_room();
        let len = (self.data().0 - at.0).min(PAGE);
        CodeCave { at, len }
    }

    /// Returns the places of the patches of all points, each with the index of its point.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, PatchPlace)> {
        let points = self.points.iter().enumerate();
        points.flat_map(|(index, point)| {
            let places = point.places(self.trampoline(index));
            places.map(move |place| (index, place))
        })
    }

    /// Returns the memory that shows how its points are patched: the places of the patches, the tails of the
    /// trampolines of sites, and the header, as addresses and lengths.
    pub(crate) fn patch_state(&self) -> impl Iterator<Item = (LiveAddr, u64)> {
        let places = self.places().map(|(_, place)| (place.at, PATCH_LEN as u64));
        let points = self.points.iter().enumerate();
        let sites = points.filter(|(_, it)| matches!(it.kind, PointKind::Site { .. }));
        let tails = sites.map(|(index, _)| (self.tail(index), TAIL_LEN));
        let header = (self.code, self.version.len() as u64);
        places.chain(tails).chain([header])
    }
}

#[cfg(test)]
mod tests;
