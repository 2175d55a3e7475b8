//! [`OpenStarts`]: the starts of pairs that wait for their stops. Pure.
//!
//! ```text
//! began   the last 64 of a pair in a thread ┐ of these, the last ones have slices that have not ended
//! drawn                                     ┘
//! ```
//!
//! A slice can only end before those around it. So that slices do not nest ever deeper if stops are missing, all end
//! once 64 are open; their starts wait on.

use std::collections::VecDeque;

use foldhash::HashMap;

use crate::output::TrackId;

/// How many starts of a pair may wait in a thread, as many as the trampolines of pairs keep: the oldest is forgotten
/// for the next one.
const MAX_STARTS: usize = 64;

/// For how many pairs and threads the starts are known at once.
const MAX_KNOWN: usize = 65_536;

/// A pair in a thread: the number of the pair, and the thread.
pub(super) type PairInThread = (usize, i32);

/// The starts of all pairs in all threads.
#[derive(Default)]
pub(super) struct OpenStarts(HashMap<PairInThread, StartsInThread>);

/// The starts of a pair in a thread.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StartsInThread {
    pub(super) track: TrackId,
    /// When the waiting starts were hit, the oldest first.
    began: VecDeque<u64>,
    /// How many of the waiting starts, the latest ones, have slices that have not ended.
    drawn: usize,
}

/// What is too much once another start is added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TooMany {
    /// How many starts are forgotten.
    pub(super) forgotten: u64,
    /// How many slices are to end.
    pub(super) slices: usize,
}

impl StartsInThread {
    fn new(track: TrackId) -> StartsInThread {
        StartsInThread {
            track,
            began: VecDeque::new(),
            drawn: 0,
        }
    }

    /// Adds a start.
    pub(super) fn start(&mut self, time: u64) -> TooMany {
        let mut too_many = TooMany::default();
        if self.drawn >= MAX_STARTS {
            too_many.slices = std::mem::take(&mut self.drawn);
        }
        if self.began.len() >= MAX_STARTS {
            self.began.pop_front();
            too_many.forgotten = 1;
        }
        self.began.push_back(time);
        self.drawn += 1;
        too_many
    }

    /// Takes the latest start: when it was, and whether its slice ends now.
    pub(super) fn stop(&mut self) -> Option<(u64, bool)> {
        let began = self.began.pop_back()?;
        let is_drawn = self.drawn > 0;
        self.drawn -= usize::from(is_drawn);
        Some((began, is_drawn))
    }

    /// How many starts wait, and how many slices have not ended.
    pub(super) fn waiting(&self) -> (usize, usize) {
        (self.began.len(), self.drawn)
    }
}

impl OpenStarts {
    /// The starts of a pair in a thread, if they are known.
    pub(super) fn get_mut(&mut self, of: PairInThread) -> Option<&mut StartsInThread> {
        self.0.get_mut(&of)
    }

    /// Adds a pair in a thread. If there are too many, first forgets those that no start waits in. If at least half
    /// are left, also forgets those whose last start is the oldest, and returns them.
    pub(super) fn add(&mut self, of: PairInThread, track: TrackId) -> Vec<StartsInThread> {
        let mut forgotten = Vec::new();
        if self.0.len() >= MAX_KNOWN {
            self.0.retain(|_, starts| !starts.began.is_empty());
            if self.0.len() >= MAX_KNOWN / 2 {
                let last = |starts: &StartsInThread| starts.began.back().copied();
                let mut all: Vec<(Option<u64>, PairInThread)> =
                    self.0.iter().map(|(key, it)| (last(it), *key)).collect();
                all.sort_unstable();
                let oldest = all.iter().take(MAX_KNOWN / 4);
                forgotten.extend(oldest.filter_map(|(_, key)| self.0.remove(key)));
            }
        }
        self.0.insert(of, StartsInThread::new(track));
        forgotten
    }

    /// The tracks of all pairs in all threads.
    pub(super) fn tracks(&self) -> impl Iterator<Item = TrackId> {
        self.0.values().map(|starts| starts.track)
    }

    /// Takes the starts of all pairs in all threads.
    pub(super) fn take_all(&mut self) -> Vec<StartsInThread> {
        self.0.drain().map(|(_, starts)| starts).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_start_is_forgotten_for_the_next() {
        let mut starts = StartsInThread::new(TrackId(1));
        let most = MAX_STARTS as u64;
        for time in 0..most {
            assert_eq!(starts.start(time), TooMany::default());
        }
        let expected = TooMany {
            forgotten: 1,
            slices: MAX_STARTS,
        };
        assert_eq!(starts.start(most), expected);
        assert_eq!(starts.waiting(), (MAX_STARTS, 1));
        // The slices of the others have ended, and the next starts end none.
        let one = TooMany {
            forgotten: 1,
            slices: 0,
        };
        assert_eq!(starts.start(most + 1), one);
        let stops: Vec<_> = std::iter::from_fn(|| starts.stop()).collect();
        assert_eq!(stops[..3], [(65, true), (64, true), (63, false)]);
        assert_eq!((stops.len(), stops.last()), (64, Some(&(2, false))));
        assert_eq!(starts.waiting(), (0, 0));
    }

    #[test]
    fn starts_of_many_threads_are_forgotten() {
        // A thread for each request: all starts have stops.
        let mut starts = OpenStarts::default();
        for thread in 0..2 * MAX_KNOWN as i32 {
            assert_eq!(starts.add((0, thread), TrackId(1)), []);
            let of_thread = starts.get_mut((0, thread)).unwrap();
            of_thread.start(1);
            of_thread.stop();
            assert!(starts.0.len() <= MAX_KNOWN);
        }
        // No start has a stop.
        let mut starts = OpenStarts::default();
        let mut forgotten = Vec::new();
        for thread in 0..2 * MAX_KNOWN as i32 {
            forgotten.extend(starts.add((0, thread), TrackId(thread as u32)));
            starts.get_mut((0, thread)).unwrap().start(thread as u64);
        }
        assert!(starts.0.len() <= MAX_KNOWN);
        let all = forgotten.len() + starts.take_all().len();
        assert_eq!(all, 2 * MAX_KNOWN);
        let first = forgotten.iter().take(MAX_KNOWN / 4);
        assert!(first.map(|it| it.track.0).eq(0..MAX_KNOWN as u32 / 4));
        assert!(forgotten.iter().all(|it| it.waiting() == (1, 1)));
    }
}
