//! The slices of pairs: from a start to its stop, in the same thread or by a key.

use probes_lib::{Event, PairKey};

use super::super::keyed_starts::KeyedStart;
use super::super::lanes::lane_name;
use super::super::starts::StartsInThread;
use super::{NO_STOP, Timeline};
use crate::output::{Annotation, NameId, TrackEventKind, TrackOf, hit_annotations};

/// How a slice has ended, if not as it should.
const TOO_MANY: &str = "too many starts wait: lasted longer";
const KEY_AGAIN: &str = "without a stop: the next start has its key";

impl Timeline {
    pub(super) fn start(&mut self, event: &Event, index: usize) {
        let thread = event.thread.unwrap_or(0);
        let (key, time) = ((index, thread), event.monotonic);
        if self.starts.get_mut(key).is_none() {
            let parent = self.thread(thread);
            let name = format!("{thread} {}", self.pairs[index]);
            let track = self.track(&TrackOf::Lane(parent), &name);
            let forgotten = self.starts.add(key, track);
            self.end_starts(forgotten, time);
        }
        let name = self.pair_name(index);
        let Some(open) = self.starts.get_mut(key) else {
            return;
        };
        let (track, too_many) = (open.track, open.start(time));
        self.counts.without_stop += too_many.forgotten;
        self.writer
            .end_slices(track, too_many.slices, time, TOO_MANY);
        self.counts.slices += 1;
        let kind = TrackEventKind::Begin(name);
        self.writer.emit(track, time, kind, hit_annotations(event));
    }

    /// The name of the slices of a pair.
    fn pair_name(&mut self, index: usize) -> NameId {
        if let Some(known) = self.pair_names[index] {
            return known;
        }
        let name = self.writer.name(&self.pairs[index].to_string());
        self.pair_names[index] = Some(name);
        name
    }

    pub(super) fn stop(&mut self, event: &Event, index: usize, is_start: bool) {
        let thread = event.thread.unwrap_or(0);
        let open = self.starts.get_mut((index, thread));
        let stopped = open.and_then(|open| Some((open.track, open.stop()?)));
        match stopped {
            Some((track, (began, is_drawn))) => {
                self.add_pair_time(index, event.monotonic.saturating_sub(began));
                if is_drawn {
                    let arguments = hit_annotations(event);
                    self.writer
                        .emit(track, event.monotonic, TrackEventKind::End, arguments);
                }
            }
            // If one probe is both start and stop, its first hit stops nothing.
            None if is_start => {}
            None => self.counts.unmatched_stops += 1,
        }
    }

    /// Notes that a pair lasted this many nanoseconds.
    fn add_pair_time(&mut self, index: usize, lasted: u64) {
        if let Some(pair) = self.longest_pairs.get_mut(index) {
            pair.longest = pair.longest.max(Some(lasted));
        }
    }

    /// Adds a hit that starts or stops a pair, or does both, where stops find their starts by a key.
    pub(super) fn hit_by_key(
        &mut self,
        event: &Event,
        index: usize,
        (starts, stops): (bool, bool),
    ) {
        let (Some(keyed), Some(key)) = (&mut self.keyed_starts, &event.pair_key) else {
            self.counts.without_key += 1;
            return;
        };
        let key = (index, key.clone());
        let time = event.monotonic;
        if stops {
            match keyed.take(&key) {
                Some(start) => self.stop_by_key(event, index, start),
                None if starts => {}
                None => self.counts.unmatched_stops += 1,
            }
        }
        if starts {
            let keyed = self.keyed_starts.as_mut();
            let (earlier, oldest) = keyed.map_or((None, None), |keyed| {
                (keyed.take(&key), keyed.take_if_full())
            });
            self.counts.lost_starts += u64::from(oldest.is_some());
            for (start, how) in [(earlier, KEY_AGAIN), (oldest, TOO_MANY)] {
                if let Some(start) = start {
                    self.counts.without_stop += 1;
                    self.writer.end_slices(start.track, 1, time, how);
                }
            }
            self.start_by_key(event, key);
        }
    }

    fn start_by_key(&mut self, event: &Event, key: (usize, PairKey)) {
        let (thread, time) = (event.thread.unwrap_or(0), event.monotonic);
        let Some(keyed) = &mut self.keyed_starts else {
            return;
        };
        let (lane, track) = keyed.take_lane((key.0, thread));
        let index = key.0;
        let track = track.unwrap_or_else(|| {
            let parent = self.thread(thread);
            let name = lane_name(&format!("{thread} {}", self.pairs[index]), lane);
            self.track(&TrackOf::Lane(parent), &name)
        });
        if let Some(keyed) = &mut self.keyed_starts {
            keyed.add(key, (thread, time), (lane, track));
        }
        let name = self.pair_name(index);
        self.counts.slices += 1;
        let kind = TrackEventKind::Begin(name);
        self.writer.emit(track, time, kind, hit_annotations(event));
    }

    fn stop_by_key(&mut self, event: &Event, index: usize, start: KeyedStart) {
        let time = event.monotonic;
        self.add_pair_time(index, time.saturating_sub(start.began));
        let mut arguments = hit_annotations(event);
        if let Some(thread) = event.thread.filter(|thread| *thread != start.thread) {
            arguments.push(Annotation::int("thread", thread));
        }
        self.writer
            .emit(start.track, time, TrackEventKind::End, arguments);
    }

    /// Ends starts that get no stop.
    pub(super) fn end_starts(&mut self, ended: Vec<StartsInThread>, time: u64) {
        for starts in ended {
            let (waiting, drawn) = starts.waiting();
            self.counts.without_stop += waiting as u64;
            self.writer.end_slices(starts.track, drawn, time, NO_STOP);
        }
    }
}
