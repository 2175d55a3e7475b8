//! [`KeyedStarts`]: the starts of pairs that wait for the stop with their key, and the lanes of their slices. Pure.

use std::collections::BTreeMap;
use std::hash::Hash;

use foldhash::{HashMap, HashMapExt};

use super::lanes::Lanes;
use super::starts::PairInThread;
use crate::output::TrackId;

/// How many starts may wait, of all pairs: the oldest is forgotten for the next one.
pub(super) const MAX_WAITING: usize = 65_536;

/// How many lanes without a slice are known.
const MAX_FREE: usize = 65_536;

/// A pair, and its key.
type PairWithKey<K> = (usize, K);

/// The starts of all pairs.
pub(super) struct KeyedStarts<K> {
    waiting: HashMap<PairWithKey<K>, KeyedStart>,
    /// The keys of the starts that wait, in the order in which the starts came.
    by_number: BTreeMap<u64, PairWithKey<K>>,
    next_number: u64,
    lanes: HashMap<PairInThread, Lanes>,
    /// How many lanes have no slice.
    free: usize,
}

/// A start that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyedStart {
    pub(super) track: TrackId,
    /// The index of its lane among those of its pair and thread.
    index: usize,
    /// The thread in which it began.
    pub(super) thread: i32,
    pub(super) began: u64,
    number: u64,
}

impl<K> Default for KeyedStarts<K> {
    fn default() -> KeyedStarts<K> {
        KeyedStarts {
            waiting: HashMap::new(),
            by_number: BTreeMap::new(),
            next_number: 0,
            lanes: HashMap::new(),
            free: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> KeyedStarts<K> {
    /// Takes a lane of a pair in a thread: its index, and its track if it has one already.
    pub(super) fn take_lane(&mut self, of: PairInThread) -> (usize, Option<TrackId>) {
        let lanes = self.lanes.entry(of).or_default();
        let taken = lanes.take();
        self.free -= usize::from(taken.1.is_some());
        taken
    }

    /// Adds a start, with a lane that was taken. No start with its key may be waiting.
    pub(super) fn add(
        &mut self,
        of: PairWithKey<K>,
        (thread, began): (i32, u64),
        (index, track): (usize, TrackId),
    ) {
        let number = self.next_number;
        self.next_number += 1;
        self.by_number.insert(number, of.clone());
        let start = KeyedStart {
            track,
            index,
            thread,
            began,
            number,
        };
        self.waiting.insert(of, start);
    }

    /// Takes the start with a key: its slice ends now.
    pub(super) fn take(&mut self, of: &PairWithKey<K>) -> Option<KeyedStart> {
        let start = self.waiting.remove(of)?;
        self.by_number.remove(&start.number);
        self.release(of.0, start);
        Some(start)
    }

    /// Takes the oldest start, if there is no room for another.
    pub(super) fn take_if_full(&mut self) -> Option<KeyedStart> {
        if self.waiting.len() < MAX_WAITING {
            return None;
        }
        let (_, oldest) = self.by_number.pop_first()?;
        let start = self.waiting.remove(&oldest)?;
        self.release(oldest.0, start);
        Some(start)
    }

    /// Takes all starts, the oldest first.
    pub(super) fn take_all(&mut self) -> Vec<KeyedStart> {
        let mut all: Vec<KeyedStart> = self.waiting.drain().map(|(_, start)| start).collect();
        all.sort_unstable_by_key(|start| start.number);
        *self = KeyedStarts::default();
        all
    }

    /// Frees the lane of a start. If too many lanes are free, forgets the free ones: they get no more events.
    fn release(&mut self, pair: usize, start: KeyedStart) {
        let Some(lanes) = self.lanes.get_mut(&(pair, start.thread)) else {
            return;
        };
        lanes.release(start.index, start.track);
        self.free += 1;
        if self.free > MAX_FREE {
            self.free = 0;
            self.lanes.retain(|_, lanes| {
                lanes.forget_free();
                lanes.are_used()
            });
        }
    }

    /// The tracks that may get events.
    pub(super) fn tracks(&self) -> impl Iterator<Item = TrackId> {
        let used = self.waiting.values().map(|start| start.track);
        let free = self.lanes.values().flat_map(Lanes::free);
        used.chain(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts in one thread, and the tracks that were made for them.
    #[derive(Default)]
    struct OneThread {
        starts: KeyedStarts<u64>,
        tracks: u32,
    }

    impl OneThread {
        fn add(&mut self, key: u64) -> TrackId {
            let (index, track) = self.starts.take_lane((0, 1));
            let track = track.unwrap_or_else(|| {
                self.tracks += 1;
                TrackId(self.tracks)
            });
            self.starts.add((0, key), (1, key), (index, track));
            track
        }
    }

    #[test]
    fn open_slices_share_no_lane() {
        let mut thread = OneThread::default();
        let [first, second] = [10, 11].map(|key| thread.add(key));
        assert_ne!(first, second);
        assert_eq!(thread.starts.take(&(1, 10)), None, "of another pair");
        let taken = thread.starts.take(&(0, 10)).unwrap();
        assert_eq!((taken.track, taken.began), (first, 10));
        assert_eq!(thread.starts.take(&(0, 10)), None);
        // The lane that is free is used again.
        assert_eq!(thread.add(12), first);
        assert_eq!(thread.starts.tracks().count(), 2);
        let rest: Vec<u64> = thread.starts.take_all().iter().map(|it| it.began).collect();
        assert_eq!(rest, [11, 12]);
        assert_eq!(thread.starts.tracks().count(), 0);
    }

    #[test]
    fn oldest_key_is_forgotten_for_the_next() {
        let mut thread = OneThread::default();
        for key in 0..MAX_WAITING as u64 {
            assert_eq!(thread.starts.take_if_full(), None);
            thread.add(key);
        }
        assert_eq!(thread.starts.take_if_full().unwrap().began, 0);
        thread.add(u64::MAX);
        assert_eq!(thread.starts.take_if_full().unwrap().began, 1);
        assert_eq!(thread.starts.waiting.len(), thread.starts.by_number.len());
        assert_eq!(thread.tracks as usize, MAX_WAITING);
    }

    #[test]
    fn free_lanes_of_many_threads_are_forgotten() {
        let mut starts = KeyedStarts::default();
        let mut tracks = 0;
        let mut add = |starts: &mut KeyedStarts<i32>, thread| {
            let (index, _) = starts.take_lane((0, thread));
            tracks += 1;
            starts.add((0, thread), (thread, 0), (index, TrackId(tracks)));
        };
        add(&mut starts, -1);
        for thread in 0..2 * MAX_FREE as i32 {
            add(&mut starts, thread);
            starts.take(&(0, thread)).unwrap();
            assert!(starts.free <= MAX_FREE && starts.lanes.len() <= MAX_FREE + 1);
        }
        let free = starts.tracks().count() - 1;
        assert_eq!(free, starts.free);
        assert_eq!(starts.take(&(0, -1)).unwrap().track, TrackId(1));
    }
}
