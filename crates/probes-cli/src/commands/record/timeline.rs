//! [`Timeline`]: hits, calls and events of the collector → slices, instants and counters on tracks. No slice ends
//! before it begins, and those of a track nest, whatever was lost.
//!
//! ```text
//! call    entry: calls at this place of the stack or a lower one were unwound; push                 CallStacks
//!         exit:  calls at a lower place were unwound; if the last one left is at this place, and of this function, pop
//! pair    START: push; STOP: pop, in the same thread; or by a key, each slice on a lane of its own   pairs.rs
//! phase   begin: push; end: pop up to the last one of its name                                      phases.rs
//! wait    a slice by itself
//! ```
//!
//! The calls of a thread are on its track. Those of a fiber of OCaml 5 are on a lane below the thread in which the
//! outermost one began: a fiber may be suspended while its thread goes on, and then be resumed in another one.

mod pairs;
mod phases;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::iter;

use foldhash::{HashMap, HashMapExt};
use probes_lib::{
    CallFrame, Event, EventBatch, EventGaps, EventKind, Events, PairKey, RecordedWait, Selector,
};

use self::phases::DomainTracks;
use super::calls::{CallStacks, FiberLane, StackId};
use super::keyed_starts::KeyedStarts;
use super::lanes::{Lanes, lane_name};
use super::sink::Sink;
use super::starts::OpenStarts;
use super::track_writer::TrackWriter;
use crate::flags::{Pair, selects};
use crate::output::{
    Annotation, FrequentName, LostWords, NameId, RecordCounts, TrackEventKind, TrackId, TrackOf,
    hit_annotations, wait_annotations, wait_name,
};

/// How many threads are known at once.
const MAX_THREADS: usize = 65_536;

/// Makes the time line of a process.
pub(super) struct Timeline {
    writer: TrackWriter,
    pid: i32,
    pairs: Vec<Pair>,
    /// Of each pair in `pairs`, once it has a slice.
    pair_names: Vec<Option<NameId>>,
    /// Of each pair in `pairs`.
    longest_pairs: Vec<LongestPair>,
    /// The probes whose hits are instants, also if they are ends of pairs.
    probes: Vec<Selector>,
    /// The probe whose hit ends the recording, and whether it was hit.
    until: Option<String>,
    is_hit: bool,
    threads: HashMap<i32, ThreadTracks>,
    calls: CallStacks,
    starts: OpenStarts,
    /// Used instead of `starts` if stops find their starts by a key.
    keyed_starts: Option<KeyedStarts<PairKey>>,
    domains: HashMap<u32, DomainTracks>,
    /// When runtime events were paused and resumed.
    gaps: EventGaps,
    latest: u64,
    pub(super) counts: RecordCounts,
    /// The same words as in `counts`, by domain.
    pub(super) lost_words: LostWords,
    /// How many hits each name had in readings that had lost others.
    hits_in_lossy_readings: HashMap<String, u64>,
}

struct ThreadTracks {
    track: TrackId,
    /// The lanes for fibers whose outermost call began in it.
    lanes: Lanes,
    /// The lane for its waits.
    waits: Option<TrackId>,
}

/// The longest time of a pair.
#[derive(Clone, Copy, Default)]
struct LongestPair {
    /// In nanoseconds; `None` if it was not stopped so far.
    longest: Option<u64>,
    /// Whether its times cannot be trusted.
    is_untrusted: bool,
}

/// How a slice has ended, if not as it should.
const RUNNING: &str = "still running";
const NO_STOP: &str = "without a stop";

impl Timeline {
    pub(super) fn new(pid: i32, pairs: Vec<Pair>, until: Option<String>, sink: Sink) -> Timeline {
        Timeline {
            writer: TrackWriter::new(sink),
            pid,
            pair_names: vec![None; pairs.len()],
            longest_pairs: vec![LongestPair::default(); pairs.len()],
            pairs,
            probes: Vec::new(),
            until,
            is_hit: false,
            threads: HashMap::new(),
            calls: CallStacks::default(),
            starts: OpenStarts::default(),
            keyed_starts: None,
            domains: HashMap::new(),
            gaps: EventGaps::default(),
            latest: 0,
            counts: RecordCounts::default(),
            lost_words: LostWords::default(),
            hits_in_lossy_readings: HashMap::new(),
        }
    }

    pub(super) fn sink(&mut self) -> &mut Sink {
        &mut self.writer.sink
    }

    /// Hits of these probes are instants, also if they are ends of pairs.
    pub(super) fn with_instants(mut self, probes: Vec<Selector>) -> Timeline {
        self.probes = probes;
        self
    }

    /// Stops find their starts by a key, in whichever thread.
    pub(super) fn with_pairs_by_key(mut self) -> Timeline {
        self.keyed_starts = Some(KeyedStarts::default());
        self
    }

    /// Returns the longest time of a pair or call that has ended so far, in nanoseconds, and the name of the pair or
    /// function; `None` if none has. The pairs whose times cannot be trusted are left out.
    pub(super) fn longest(&self) -> Option<(u64, &dyn Display)> {
        let call = self.calls.longest();
        let call = call.map(|(lasted, name)| (lasted, name as &dyn Display));
        let all = call.into_iter().chain(self.longest_pair());
        all.max_by_key(|(lasted, _)| *lasted)
    }

    /// Same as [`Timeline::longest`], for pairs alone.
    pub(super) fn longest_pair(&self) -> Option<(u64, &dyn Display)> {
        let pairs = self.longest_pairs.iter().zip(&self.pairs);
        let trusted = pairs.filter(|(longest, _)| !longest.is_untrusted);
        let times = trusted.filter_map(|(it, pair)| Some((it.longest?, pair as &dyn Display)));
        times.max_by_key(|(lasted, _)| *lasted)
    }

    /// The times of the pair with this index cannot be trusted.
    pub(super) fn distrust_pair(&mut self, index: usize) {
        if let Some(pair) = self.longest_pairs.get_mut(index) {
            pair.is_untrusted = true;
        }
    }

    /// Shows in the time line itself that times of pairs may be wrong: `doubt` says why.
    pub(super) fn add_doubt(&mut self, doubt: String) {
        let time = self.latest;
        let doubt = vec![Annotation::text("pair", doubt)];
        self.instant(TrackId::PROCESS, time, "times of pairs may be wrong", doubt);
    }

    /// Returns whether the probe that ends the recording was hit.
    pub(super) fn is_hit(&self) -> bool {
        self.is_hit
    }

    /// Adds hits that were read.
    pub(super) fn add_hits(&mut self, hits: &Events) {
        // Before the hits that were read: those that were lost came before them.
        self.add_lost_hits(hits.dropped);
        for event in &hits.events {
            self.add_hit(event, hits.dropped > 0);
        }
        self.draw_lost_hits(hits.dropped);
    }

    /// The same, of hits that are decoded now.
    pub(super) fn add_batch(&mut self, mut batch: EventBatch<'_>) {
        let dropped = batch.dropped();
        self.add_lost_hits(dropped);
        while let Some(event) = batch.next_event() {
            self.add_hit(event, dropped > 0);
        }
        self.add_lost_hits(batch.dropped() - dropped);
        self.draw_lost_hits(batch.dropped());
    }

    fn add_lost_hits(&mut self, lost: u64) {
        self.counts.lost_hits = self.counts.lost_hits.saturating_add(lost);
    }

    fn add_hit(&mut self, event: &Event, is_beside_losses: bool) {
        self.latest = self.latest.max(event.monotonic);
        match event.frame {
            Some(frame) => self.add_call(event, frame),
            None => self.hit(event),
        }
        if is_beside_losses {
            match self.hits_in_lossy_readings.get_mut(event.name()) {
                Some(hits) => *hits += 1,
                None => drop(
                    self.hits_in_lossy_readings
                        .insert(event.name().to_owned(), 1),
                ),
            }
        }
    }

    /// Shows that hits were lost before the latest ones.
    fn draw_lost_hits(&mut self, lost: u64) {
        if lost > 0 {
            let time = self.latest;
            let lost = vec![Annotation::int("hits", lost)];
            self.instant(TrackId::PROCESS, time, "hits were lost", lost);
        }
    }

    /// Adds the entry or the exit of a function.
    fn add_call(&mut self, event: &Event, frame: CallFrame) {
        let index = self.stack(event, frame);
        let (writer, counts) = (&mut self.writer, &mut self.counts);
        if event.kind == EventKind::Hit {
            self.calls.enter(index, (event, frame), writer, counts);
            return;
        }
        let unused = self.calls.leave(index, (event, frame), writer, counts);
        self.release_lanes(unused);
    }

    /// Returns the index of the stack that a call is on.
    fn stack(&mut self, event: &Event, frame: CallFrame) -> usize {
        let thread = event.thread.unwrap_or(0);
        let id = match frame.fiber {
            Some(fiber) => StackId::OfFiber(fiber),
            None => StackId::OfThread(thread),
        };
        if let Some(known) = self.calls.find(id) {
            return known;
        }
        let unused = self.calls.make_room(&mut self.writer, &mut self.counts);
        self.release_lanes(unused);
        let (track, lane) = match id {
            StackId::OfThread(_) => (self.thread(thread), None),
            StackId::OfFiber(_) => self.fiber_lane(thread),
        };
        self.calls.add(id, (track, lane), event.monotonic)
    }

    /// Takes a lane of a thread.
    fn fiber_lane(&mut self, thread: i32) -> (TrackId, Option<FiberLane>) {
        let parent = self.thread(thread);
        let lanes = self.threads.get_mut(&thread).map(|it| &mut it.lanes);
        let Some((index, track)) = lanes.map(Lanes::take) else {
            return (parent, None);
        };
        let track = track.unwrap_or_else(|| {
            let name = lane_name(&format!("{thread} fiber"), index);
            self.track(&TrackOf::Lane(parent), &name)
        });
        let lane = FiberLane {
            thread,
            index,
            track,
        };
        (track, Some(lane))
    }

    /// Frees lanes of fibers without calls.
    fn release_lanes(&mut self, unused: impl IntoIterator<Item = FiberLane>) {
        for lane in unused {
            if let Some(thread) = self.threads.get_mut(&lane.thread) {
                thread.lanes.release(lane.index, lane.track);
            }
        }
    }

    /// Returns the most frequent names of the hits that were read while others were lost, the most frequent first.
    /// The ring holds the last hits before a reading, so what floods it is most of these, too.
    pub(super) fn frequent(&self) -> Vec<FrequentName> {
        /// A name with a smaller share does not flood the ring.
        const MIN_SHARE: f64 = 0.1;
        const MAX_SHOWN: usize = 3;
        let all: u64 = self.hits_in_lossy_readings.values().sum();
        let names = self.hits_in_lossy_readings.iter();
        let names = names.map(|(name, &hits)| FrequentName {
            name: name.clone(),
            share: hits as f64 / all.max(1) as f64,
        });
        let mut names: Vec<FrequentName> = names.filter(|it| it.share >= MIN_SHARE).collect();
        names.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.name.cmp(&b.name)));
        names.truncate(MAX_SHOWN);
        names
    }

    /// Adds a hit of a probe, or a call of a function whose exits are not recorded.
    fn hit(&mut self, event: &Event) {
        let (is_probe, name) = (event.site().is_some(), event.name());
        self.is_hit |= is_probe && self.until.as_deref() == Some(name);
        let mut is_end = false;
        for index in 0..self.pairs.len() {
            let pair = &self.pairs[index];
            let (starts, stops) = (pair.start == name, pair.stop == name);
            if !is_probe || !(starts || stops) {
                continue;
            }
            is_end = true;
            if self.keyed_starts.is_some() {
                self.hit_by_key(event, index, (starts, stops));
                continue;
            }
            if stops {
                self.stop(event, index, starts);
            }
            if starts {
                self.start(event, index);
            }
        }
        let is_selected = |probe: &Selector| selects(probe, name);
        if !is_end || self.probes.iter().any(is_selected) {
            let track = self.thread(event.thread.unwrap_or(0));
            let arguments = hit_annotations(event);
            self.instant(track, event.monotonic, name, arguments);
        }
    }

    /// Adds a wait of a thread.
    pub(super) fn add_wait(&mut self, wait: &RecordedWait) {
        self.latest = self.latest.max(wait.until);
        let track = self.lane_of_waits(wait);
        let name = self.writer.name(&wait_name(wait));
        self.counts.slices += 1;
        let begin = TrackEventKind::Begin(name);
        self.writer
            .emit(track, wait.since, begin, wait_annotations(wait));
        self.writer
            .emit(track, wait.until, TrackEventKind::End, Vec::new());
    }

    /// Returns the track of a thread's waits, below that of the thread: a call whose entry or exit was recorded a
    /// moment too early or too late would not nest with them.
    fn lane_of_waits(&mut self, wait: &RecordedWait) -> TrackId {
        let tid = wait.tid;
        let known = self.threads.get(&tid);
        if let Some(lane) = known.and_then(|it| it.waits) {
            return lane;
        }
        // The name of a thread that has exited cannot be read any more.
        let parent = match known {
            Some(known) => known.track,
            None if wait.thread_name.is_empty() => self.thread(tid),
            None => self.add_thread(tid, &wait.thread_name),
        };
        let lane = self.track(&TrackOf::Lane(parent), &format!("{tid} waits"));
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.waits = Some(lane);
        }
        lane
    }

    /// Shows that records of switches were lost.
    pub(super) fn add_lost_switches(&mut self, many: u64) {
        self.counts.lost_switches = many;
        if many > 0 {
            let time = self.latest;
            let lost = vec![Annotation::int("records", many)];
            self.instant(TrackId::PROCESS, time, "records of waits were lost", lost);
        }
    }

    /// Ends all slices that are open: the recording is over at `now`, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) fn finish(&mut self, now: u64) {
        let time = now.max(self.latest);
        let calls = self.calls.take_all();
        self.counts.running += calls.len() as u64;
        let starts = self.starts.take_all();
        self.end_starts(starts, time);
        let keyed = self.keyed_starts.as_mut().map(KeyedStarts::take_all);
        for start in keyed.unwrap_or_default() {
            self.counts.without_stop += 1;
            self.writer.end_slices(start.track, 1, time, NO_STOP);
        }
        let phases = self.take_phases(time);
        for track in calls.into_iter().chain(phases) {
            self.writer.end_slices(track, 1, time, RUNNING);
        }
    }

    fn instant(&mut self, track: TrackId, time: u64, name: &str, arguments: Vec<Annotation>) {
        let name = self.writer.name(name);
        self.counts.instants += 1;
        let kind = TrackEventKind::Instant(name);
        self.writer.emit(track, time, kind, arguments);
    }

    fn track(&mut self, of: &TrackOf, name: &str) -> TrackId {
        if self.writer.is_full() {
            self.forget_tracks();
        }
        self.writer.add_track(of, name)
    }

    /// Forgets the tracks that get no more events: threads come and go.
    fn forget_tracks(&mut self) {
        let threads = self.threads.values();
        let threads = threads.flat_map(|it| {
            let lanes = it.lanes.free().chain(it.waits);
            iter::once(it.track).chain(lanes)
        });
        let used: BTreeSet<TrackId> = threads
            .chain(self.domains.values().flat_map(DomainTracks::tracks))
            .chain(self.calls.tracks())
            .chain(self.starts.tracks())
            .chain(self.keyed_starts.iter().flat_map(KeyedStarts::tracks))
            .chain([TrackId::PROCESS])
            .collect();
        self.writer.forget_tracks(&used);
    }

    /// Returns the track of a thread; 0 stands for an unknown thread.
    fn thread(&mut self, thread: i32) -> TrackId {
        if let Some(known) = self.threads.get(&thread) {
            return known.track;
        }
        let comm = std::fs::read_to_string(format!("/proc/{}/task/{thread}/comm", self.pid));
        self.add_thread(thread, comm.unwrap_or_default().trim_end())
    }

    fn add_thread(&mut self, thread: i32, comm: &str) -> TrackId {
        let track = if thread == 0 {
            self.track(&TrackOf::Lane(TrackId::PROCESS), "unknown thread")
        } else if comm.is_empty() {
            self.track(&TrackOf::Thread(thread), &format!("thread {thread}"))
        } else {
            self.track(&TrackOf::Thread(thread), comm)
        };
        if self.threads.len() >= MAX_THREADS {
            // A thread that is needed again gets another track of the same name.
            self.threads.retain(|_, it| it.lanes.are_used());
        }
        let tracks = ThreadTracks {
            track,
            lanes: Lanes::default(),
            waits: None,
        };
        self.threads.insert(thread, tracks);
        track
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use probes_lib::{Activity, RingEntry, RuntimeEventKind};

    use super::super::track_writer::{ENDED, MAX_TRACKS};
    use super::phases::LOST;
    use super::*;
    use crate::messages::Messages;
    use crate::output::{TimelineFile, TimelineFormat, TracedProcess};

    fn sink(path: &std::path::Path, last: Option<Duration>) -> Sink {
        let process = TracedProcess {
            pid: 1,
            name: "p".to_owned(),
            monotonic: 0,
            boottime: 0,
            realtime: 0,
        };
        let file = TimelineFile::create(path, &Messages::default()).unwrap();
        let format = TimelineFormat::of(path).unwrap();
        Sink::new(format, &process, file, last)
    }

    fn written(mut timeline: Timeline, path: &std::path::Path) -> Vec<serde_json::Value> {
        timeline.sink().flush(true).unwrap();
        let written = std::fs::read_to_string(path).unwrap();
        serde_json::from_str(&written).unwrap()
    }

    /// The events in the file of a timeline with these entries of rings.
    fn drawn(entries: &[RingEntry<'_>], end: u64) -> Vec<serde_json::Value> {
        let scratch = test_support::Scratch::new();
        let path = scratch.file("timeline.json");
        let mut timeline = Timeline::new(1, Vec::new(), None, sink(&path, None));
        for entry in entries {
            timeline.add_runtime_event(entry);
        }
        timeline.finish(end);
        written(timeline, &path)
    }

    fn event(domain: u32, time: u64, kind: RuntimeEventKind<'_>) -> RingEntry<'_> {
        RingEntry::Event { domain, time, kind }
    }

    #[test]
    fn tracks_of_many_threads_are_forgotten() {
        let scratch = test_support::Scratch::new();
        let path = scratch.file("timeline.json");
        let mut timeline = Timeline::new(
            1,
            Vec::new(),
            None,
            sink(&path, Some(Duration::from_nanos(9))),
        );
        let most = MAX_TRACKS as i32;
        for thread in 1..=2 * most {
            let track = timeline.thread(thread);
            timeline.instant(track, thread as u64, "hit", Vec::new());
            assert!(timeline.writer.known_tracks() <= MAX_TRACKS);
        }
        assert!(timeline.sink().known_tracks() <= MAX_TRACKS);
        timeline.finish(2 * most as u64);
        let events = written(timeline, &path);
        let of = |kind: &str| {
            let events = events.iter().filter(|it| it["ph"] == kind);
            events
                .map(|it| it["tid"].as_i64().unwrap())
                .collect::<Vec<_>>()
        };
        let latest: Vec<i64> = (2 * i64::from(most) - 9..=2 * i64::from(most)).collect();
        assert_eq!(of("i"), latest);
        let named = of("M");
        assert!(latest.iter().all(|thread| named.contains(thread)));
        assert!(
            named.len() < 20,
            "only the threads of these events are named"
        );
    }

    #[test]
    fn waits_are_drawn_below_their_threads() {
        let scratch = test_support::Scratch::new();
        let path = scratch.file("timeline.json");
        let mut timeline = Timeline::new(1, Vec::new(), None, sink(&path, None));
        let wait = |tid, since, until, is_whole| RecordedWait {
            tid,
            thread_name: format!("worker {tid}").into(),
            since,
            until,
            is_whole,
            activity: Activity::Blocked(35),
            frames: Vec::new(),
            end: None,
        };
        for wait in [
            wait(7, 1_000_000, 2_000_000, true),
            wait(8, 1_000_000, 5_000_000, false),
            wait(7, 3_000_000, 4_000_000, true),
        ] {
            timeline.add_wait(&wait);
        }
        timeline.add_lost_switches(3);
        timeline.finish(9_000_000);
        assert_eq!((timeline.counts.slices, timeline.counts.running), (3, 0));
        assert_eq!(timeline.counts.lost_switches, 3);
        let events = written(timeline, &path);
        let names = events.iter().filter(|it| it["ph"] == "M");
        let names: Vec<&str> = names
            .map(|it| it["args"]["name"].as_str().unwrap())
            .collect();
        let tracks = ["worker 7", "7 waits", "worker 8", "8 waits"];
        assert!(names.ends_with(&tracks), "{names:?}");
        let slices = events
            .iter()
            .filter(|it| it["ph"] == "B" || it["ph"] == "E");
        let slices: Vec<(f64, &str, bool)> = slices
            .map(|it| {
                let is_part = it["args"]["part"].is_string();
                let name = it["name"].as_str().unwrap_or_default();
                (it["ts"].as_f64().unwrap(), name, is_part)
            })
            .collect();
        let call = "nanosleep";
        let expected = [
            (1000.0, call, false),
            (2000.0, "", false),
            (1000.0, call, true),
            (5000.0, "", false),
            (3000.0, call, false),
            (4000.0, "", false),
        ];
        assert_eq!(slices, expected);
        let lost = events.iter().find(|it| it["ph"] == "i").unwrap();
        assert_eq!(lost["args"]["records"], 3);
    }

    #[test]
    fn losses_are_drawn_beside_the_first_event() {
        let lost = |domain| RingEntry::Lost { domain, words: 7 };
        let begin = event(3, 5_000_000, RuntimeEventKind::Begin("minor"));
        let events = drawn(&[lost(3), lost(3), lost(4), begin], 9_000_000);
        let lost = events.iter();
        let lost = lost.filter(|it| it["name"] == "runtime events were lost");
        let lost: Vec<_> = lost
            .map(|it| (it["ts"].as_f64().unwrap(), it["args"]["words"].clone()))
            .collect();
        assert_eq!(lost, [(5000.0, 14.into()), (9000.0, 7.into())]);
    }

    #[test]
    fn phases_end_where_events_were_paused() {
        let begin = RuntimeEventKind::Begin("minor");
        let end = RuntimeEventKind::End("minor");
        let paused = RuntimeEventKind::Lifecycle("ring_pause", None);
        let resumed = RuntimeEventKind::Lifecycle("ring_resume", None);
        // Rings are read one after the other: 0 before 1, 2 and 3.
        let entries = [
            event(0, 1_000_000, begin),
            event(0, 7_000_000, begin),
            event(1, 3_000_000, paused),
            event(1, 5_000_000, resumed),
            event(2, 2_000_000, begin),
            event(2, 6_000_000, begin),
            event(3, 2_000_000, begin),
            event(0, 8_000_000, end),
            event(2, 8_000_000, end),
        ];
        let events = drawn(&entries, 9_000_000);
        let ends = events.iter().filter(|it| it["ph"] == "E");
        let mut ends: Vec<(u64, Option<&str>)> = ends
            .map(|it| {
                let time = it["ts"].as_f64().unwrap() as u64;
                (time, it["args"][ENDED].as_str())
            })
            .collect();
        ends.sort_unstable();
        // Of ring 0, both are ended by the pause, since the later one is drawn in the first one.
        let lost = Some(LOST);
        assert_eq!(
            ends,
            [
                (5000, lost),
                (5000, lost),
                (7000, lost),
                (7000, lost),
                (8000, None)
            ]
        );
    }

    #[test]
    fn each_pause_of_events_ends_phases() {
        let begin = RuntimeEventKind::Begin("minor");
        let end = RuntimeEventKind::End("minor");
        let paused = RuntimeEventKind::Lifecycle("ring_pause", None);
        let resumed = RuntimeEventKind::Lifecycle("ring_resume", None);
        let entries = [
            event(1, 2_000_000, paused),
            event(1, 3_000_000, resumed),
            event(1, 6_000_000, paused),
            event(1, 7_000_000, resumed),
            event(2, 1_000_000, begin),
            event(2, 4_000_000, end),
            event(2, 5_000_000, begin),
        ];
        let events = drawn(&entries, 9_000_000);
        let ends = events.iter().filter(|it| it["ph"] == "E");
        let ends: Vec<(u64, Option<&str>)> = ends
            .map(|it| {
                let time = it["ts"].as_f64().unwrap() as u64;
                (time, it["args"][ENDED].as_str())
            })
            .collect();
        assert_eq!(ends, [(3000, Some(LOST)), (7000, Some(LOST))]);
    }
}
