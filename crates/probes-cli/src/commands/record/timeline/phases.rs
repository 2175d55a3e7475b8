//! The phases and counters of the collector: a track for the phases of each domain, and one for each of its counters.

use std::iter;
use std::mem::take;

use foldhash::{HashMap, HashMapExt};
use probes_lib::{RingEntry, RuntimeEventKind};

use super::Timeline;
use crate::output::{Annotation, TrackEventKind, TrackId, TrackOf};

/// More phases than any runtime nests.
const MAX_PHASES: usize = 64;

/// How a slice is said to end if the event that ends its phase was lost.
pub(super) const LOST: &str = "its end was lost";

/// The tracks of a domain.
pub(super) struct DomainTracks {
    track: TrackId,
    open: Vec<OpenPhase>,
    counters: HashMap<&'static str, TrackId>,
    /// How many words were lost before its first event.
    lost_first: u64,
}

impl DomainTracks {
    /// All of them.
    pub(super) fn tracks(&self) -> impl Iterator<Item = TrackId> {
        iter::once(self.track).chain(self.counters.values().copied())
    }
}

#[derive(Clone, Copy)]
struct OpenPhase {
    name: &'static str,
    began: u64,
}

impl Timeline {
    /// Adds an entry of a ring: an event of the runtime, or how many words of a domain were lost.
    pub(in super::super) fn add_runtime_event(&mut self, entry: &RingEntry<'_>) {
        match *entry {
            RingEntry::Lost { domain, words } => {
                self.counts.lost_words = self.counts.lost_words.saturating_add(words);
                self.lost_words.add(domain, words);
                let track = self.domain_track(domain);
                match self.writer.latest(track) {
                    Some(time) => self.lost_words(domain, time, words),
                    // The time of the loss is known only once there is an event.
                    None => {
                        if let Some(domain) = self.domains.get_mut(&domain) {
                            domain.lost_first = domain.lost_first.saturating_add(words);
                        }
                    }
                }
            }
            RingEntry::Event { domain, time, kind } => {
                self.latest = self.latest.max(time);
                self.domain_track(domain);
                self.lost_first_words(domain, time);
                self.runtime_event(domain, time, kind);
            }
        }
    }

    /// Shows that events of a domain were lost before its first one, if any were.
    fn lost_first_words(&mut self, domain: u32, time: u64) {
        let words = self.domains.get_mut(&domain);
        match words.map_or(0, |it| take(&mut it.lost_first)) {
            0 => {}
            words => self.lost_words(domain, time, words),
        }
    }

    fn lost_words(&mut self, domain: u32, time: u64, words: u64) {
        let track = self.domain_track(domain);
        self.end_phases(domain, 0, time, LOST);
        let words = vec![Annotation::int("words", words)];
        self.instant(track, time, "runtime events were lost", words);
    }

    fn runtime_event(&mut self, domain: u32, time: u64, kind: RuntimeEventKind<'_>) {
        let track = self.domain_track(domain);
        self.end_cut_phases(domain, time);
        match kind {
            RuntimeEventKind::Begin(phase) => {
                let id = self.writer.name(phase);
                let open = self.domains.get_mut(&domain).map(|it| &mut it.open);
                if let Some(open) = open.filter(|open| open.len() < MAX_PHASES) {
                    open.push(OpenPhase {
                        name: phase,
                        began: time,
                    });
                    self.counts.slices += 1;
                    self.writer
                        .emit(track, time, TrackEventKind::Begin(id), Vec::new());
                }
            }
            RuntimeEventKind::End(phase) => {
                let open = self.domains.get(&domain).map(|it| &it.open);
                let begun = open.and_then(|open| open.iter().rposition(|it| it.name == phase));
                // The event that begins a phase is missing if the phase began before the recording.
                if let Some(depth) = begun {
                    self.end_phases(domain, depth + 1, time, LOST);
                    if let Some(domain) = self.domains.get_mut(&domain) {
                        domain.open.pop();
                    }
                    self.writer
                        .emit(track, time, TrackEventKind::End, Vec::new());
                }
            }
            RuntimeEventKind::Counter(counter, value) => {
                let track = self.counter_track(domain, counter);
                self.counts.values += 1;
                let value = i64::try_from(value).unwrap_or(i64::MAX);
                self.writer
                    .emit(track, time, TrackEventKind::Value(value), Vec::new());
            }
            RuntimeEventKind::Lifecycle(what, number) => {
                match what {
                    "ring_pause" | "ring_resume" => self.gaps.add(time),
                    "domain_terminate" => self.end_phases(domain, 0, time, LOST),
                    _ => {}
                }
                let number = number.map(|number| Annotation::int("number", number));
                self.instant(track, time, what, number.into_iter().collect());
            }
            _ => {}
        }
    }

    /// Ends the phases of a domain that were open when events were paused or resumed before `now`: their ends may not
    /// have been written. Rings are read one after the other, so a domain may have begun others since.
    fn end_cut_phases(&mut self, domain: u32, now: u64) {
        let outermost = self.domains.get(&domain).and_then(|it| it.open.first());
        let cut = outermost.and_then(|it| self.gaps.last_in(it.began, now));
        if let Some(time) = cut {
            self.end_phases(domain, 0, time, LOST);
        }
    }

    /// Ends the open phases of a domain from this depth on; 0 is the outermost.
    fn end_phases(&mut self, domain: u32, depth: usize, time: u64, how: &'static str) {
        let Some(domain) = self.domains.get_mut(&domain) else {
            return;
        };
        let track = domain.track;
        let ended = domain.open.len().saturating_sub(depth);
        domain.open.truncate(depth);
        self.writer.end_slices(track, ended, time, how);
    }

    /// Takes the phases that are still open when the recording ends, at `time`; returns the track of each.
    pub(super) fn take_phases(&mut self, time: u64) -> Vec<TrackId> {
        let domains: Vec<u32> = self.domains.keys().copied().collect();
        for domain in domains {
            self.lost_first_words(domain, time);
            self.end_cut_phases(domain, u64::MAX);
        }
        let domains = self.domains.drain();
        let open = domains.flat_map(|(_, it)| it.open.into_iter().map(move |_| it.track));
        open.collect()
    }

    /// Returns the track of the phases of a domain, which is added if it is new.
    fn domain_track(&mut self, number: u32) -> TrackId {
        if let Some(known) = self.domains.get(&number) {
            return known.track;
        }
        let of = TrackOf::Lane(TrackId::PROCESS);
        let track = self.track(&of, &format!("GC of domain {number}"));
        let domain = DomainTracks {
            track,
            open: Vec::new(),
            counters: HashMap::new(),
            lost_first: 0,
        };
        self.domains.insert(number, domain);
        track
    }

    /// Returns the track of a counter of a domain, which is added if it is new.
    fn counter_track(&mut self, number: u32, counter: &'static str) -> TrackId {
        let known = self.domains.get(&number);
        if let Some(known) = known.and_then(|it| it.counters.get(counter)) {
            return *known;
        }
        let of = TrackOf::Counter(TrackId::PROCESS);
        let track = self.track(&of, &format!("domain {number} {counter}"));
        if let Some(domain) = self.domains.get_mut(&number) {
            domain.counters.insert(counter, track);
        }
        track
    }
}
