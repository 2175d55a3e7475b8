//! [`TrackWriter`]: gives events on tracks to a [`Sink`], and remembers the names and tracks that it knows.

use std::collections::BTreeSet;

use foldhash::{HashMap, HashMapExt};
use probes_lib::{Event, LiveAddr};

use super::sink::Sink;
use crate::output::{Annotation, NameId, TrackEvent, TrackEventKind, TrackId, TrackOf};

/// How many tracks are known before those that get no more events are forgotten.
pub(super) const MAX_TRACKS: usize = 131_072;

/// How a slice has ended, if not as it should.
pub(super) const ENDED: &str = "ended";

/// Writes events on tracks.
pub(super) struct TrackWriter {
    pub(super) sink: Sink,
    /// Of each track that may still get events, the place of its latest time in `times`.
    places: HashMap<TrackId, usize>,
    /// No time is earlier than the one before.
    times: Vec<u64>,
    /// The track of the last event, and its place: most tracks have many events in a row.
    last: Option<(TrackId, usize)>,
    next_track: u32,
    /// At this many tracks, those that get no more events are forgotten.
    max_tracks: usize,
    names: HashMap<String, NameId>,
    /// The names of functions, by their addresses.
    functions: HashMap<LiveAddr, NameId>,
}

impl TrackWriter {
    pub(super) fn new(sink: Sink) -> TrackWriter {
        let mut places = HashMap::new();
        places.insert(TrackId::PROCESS, 0);
        TrackWriter {
            sink,
            places,
            times: vec![0],
            last: None,
            next_track: TrackId::PROCESS.0 + 1,
            max_tracks: MAX_TRACKS,
            names: HashMap::new(),
            functions: HashMap::new(),
        }
    }

    pub(super) fn emit(
        &mut self,
        track: TrackId,
        time: u64,
        kind: TrackEventKind,
        arguments: Vec<Annotation>,
    ) {
        let Some(place) = self.place(track) else {
            return;
        };
        // Times of two readings may overlap a little.
        let time = time.max(self.times[place]);
        self.times[place] = time;
        self.sink.event(TrackEvent {
            time,
            track,
            kind,
            arguments,
        });
    }

    /// The place of the time of a track; `None` if it gets no more events.
    fn place(&mut self, track: TrackId) -> Option<usize> {
        match self.last {
            Some((last, place)) if last == track => Some(place),
            _ => {
                let place = *self.places.get(&track)?;
                self.last = Some((track, place));
                Some(place)
            }
        }
    }

    /// Ends the innermost slices of a track.
    pub(super) fn end_slices(&mut self, track: TrackId, many: usize, time: u64, how: &'static str) {
        for _ in 0..many {
            let arguments = vec![Annotation::text(ENDED, how)];
            self.emit(track, time, TrackEventKind::End, arguments);
        }
    }

    pub(super) fn name(&mut self, name: &str) -> NameId {
        if let Some(known) = self.names.get(name) {
            return *known;
        }
        let id = NameId(self.names.len() as u32 + 1);
        self.sink.name(id, name);
        self.names.insert(name.to_owned(), id);
        id
    }

    /// The name of a function that is called.
    pub(super) fn function_name(&mut self, call: &Event) -> NameId {
        let address = call.address();
        if let Some(known) = self.functions.get(&address) {
            return *known;
        }
        let id = self.name(call.name());
        self.functions.insert(address, id);
        id
    }

    pub(super) fn add_track(&mut self, of: &TrackOf, name: &str) -> TrackId {
        let id = TrackId(self.next_track);
        self.next_track = self.next_track.saturating_add(1);
        self.places.insert(id, self.times.len());
        self.times.push(0);
        self.sink.track(id, of, name);
        id
    }

    /// The time of the latest event of a track, if it has one.
    pub(super) fn latest(&self, track: TrackId) -> Option<u64> {
        let latest = self.places.get(&track).map(|place| self.times[*place]);
        latest.filter(|time| *time > 0)
    }

    /// Whether tracks are to be forgotten before another is added.
    pub(super) fn is_full(&self) -> bool {
        self.times.len() >= self.max_tracks
    }

    /// Forgets all tracks but those `used`: they get no more events.
    pub(super) fn forget_tracks(&mut self, used: &BTreeSet<TrackId>) {
        let mut times = Vec::new();
        self.places.retain(|track, place| {
            let is_used = used.contains(track);
            if is_used {
                times.push(self.times[*place]);
                *place = times.len() - 1;
            }
            is_used
        });
        self.times = times;
        self.last = None;
        self.sink.forget_tracks(used);
        self.max_tracks = MAX_TRACKS.max(2 * self.times.len());
    }

    #[cfg(test)]
    pub(super) fn known_tracks(&self) -> usize {
        self.times.len()
    }
}
