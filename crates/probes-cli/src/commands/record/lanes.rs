//! [`Lanes`]: tracks below a thread for slices that overlap: no two open slices share a lane. Pure.
//!
//! ```text
//! thread ├ lane 1   a────────┘  c──┘
//!        └ lane 2      b──────────┘
//! ```

use std::collections::BTreeMap;

use crate::output::TrackId;

/// The lanes of one thread for one use: its fibers, or a pair.
#[derive(Default)]
pub(super) struct Lanes {
    free: BTreeMap<usize, TrackId>,
    used: usize,
    next: usize,
}

impl Lanes {
    /// Takes a lane: its index, and its track if it has one already.
    pub(super) fn take(&mut self) -> (usize, Option<TrackId>) {
        self.used += 1;
        if let Some((index, track)) = self.free.pop_first() {
            return (index, Some(track));
        }
        let index = self.next;
        self.next += 1;
        (index, None)
    }

    /// Frees a lane that was taken.
    pub(super) fn release(&mut self, index: usize, track: TrackId) {
        self.used -= 1;
        self.free.insert(index, track);
    }

    /// Whether any lane is taken.
    pub(super) fn are_used(&self) -> bool {
        self.used > 0
    }

    /// Forgets the free lanes.
    pub(super) fn forget_free(&mut self) {
        self.free.clear();
    }

    /// The tracks of the free lanes.
    pub(super) fn free(&self) -> impl Iterator<Item = TrackId> {
        self.free.values().copied()
    }
}

/// The name of a lane with this index.
pub(super) fn lane_name(of: &str, index: usize) -> String {
    match index {
        0 => of.to_owned(),
        _ => format!("{of} {}", index + 1),
    }
}
