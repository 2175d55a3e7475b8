//! [`Timeline`]: hits, calls and events of the collector → slices, instants and counters on tracks. No slice ends
//! before it begins, and those of a track nest, whatever was lost.
//!
//! ```text
//! call    entry: calls at this place of the stack or a lower one were unwound; push
//!         exit:  calls at a lower place were unwound; if the last one left is at this place, and of this function, pop
//! pair    START: push; STOP: pop, in the same thread; or by a key, each slice on a lane of its own
//! phase   begin: push; end: pop up to the last one of its name
//! wait    a slice by itself
//! ```
//!
//! The calls of a thread are on its track. Those of a fiber of OCaml 5 are on a lane below the thread in which the
//! outermost one began: a fiber may be suspended while its thread goes on, and then be resumed in another one.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::mem::take;

use foldhash::{HashMap, HashMapExt};
use probes_lib::{
    CallFrame, Event, EventGaps, EventKind, Events, LiveAddr, PairKey, RecordedWait, RingEntry,
    RuntimeEventKind, Selector,
};

use super::keyed_starts::{KeyedStart, KeyedStarts};
use super::sink::Sink;
use super::starts::{OpenStarts, StartsInThread};
use crate::flags::{Pair, selects};
use crate::output::{
    Annotation, FrequentName, LostWords, NameId, RecordCounts, TrackEvent, TrackEventKind, TrackId,
    TrackOf, hit_annotations, wait_annotations, wait_name,
};

/// How many calls may be open at once, of all stacks; what is called within them is not recorded.
const MAX_OPEN: usize = 500_000;

/// How many stacks are known at once.
const MAX_STACKS: usize = 16_384;

/// The tracks of how many threads are known at once.
const MAX_THREADS: usize = 65_536;

/// How many tracks are known before those that get no more events are forgotten.
const MAX_TRACKS: usize = 131_072;

/// More phases than any runtime nests.
const MAX_PHASES: usize = 64;

/// Makes the time line of a process.
pub(super) struct Timeline {
    sink: Sink,
    pid: i32,
    pairs: Vec<Pair>,
    /// Of each pair, how long the longest lasted that has ended, in nanoseconds; `None` if its times cannot be trusted.
    longest_pairs: Vec<Option<u64>>,
    /// The probes whose hits are instants, also if they are ends of pairs.
    probes: Vec<Selector>,
    /// The probe whose hit ends the recording, and whether it was hit.
    until: Option<String>,
    is_hit: bool,
    /// Of each track that may still get events, the latest time: none goes back.
    tracks: BTreeMap<TrackId, u64>,
    next_track: u32,
    /// At how many tracks those that get no more events are forgotten.
    max_tracks: usize,
    names: HashMap<String, NameId>,
    threads: HashMap<i32, ThreadTracks>,
    stacks: HashMap<StackId, OpenCalls>,
    /// How many calls are open.
    open: usize,
    starts: OpenStarts,
    /// Instead of these, if stops find their starts by a key.
    keyed_starts: Option<KeyedStarts<PairKey>>,
    domains: HashMap<u32, DomainTracks>,
    /// When runtime events were paused and resumed.
    gaps: EventGaps,
    latest: u64,
    pub(super) counts: RecordCounts,
    /// The same words as in `counts`, by domain.
    pub(super) lost_words: LostWords,
    /// How many hits had which name in those readings that had lost others.
    read_beside_losses: HashMap<String, u64>,
    /// How long the longest call lasted that has ended, in nanoseconds.
    longest_call: u64,
}

/// The stack that a call is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum StackId {
    OfThread(i32),
    OfFiber(u64),
}

struct ThreadTracks {
    track: TrackId,
    /// The lanes for fibers whose outermost call began in it, and whether they are in use.
    lanes: Vec<(TrackId, bool)>,
    /// The lane for its waits.
    waits: Option<TrackId>,
}

struct OpenCalls {
    track: TrackId,
    /// Of a fiber, the thread and the number of its lane.
    lane: Option<(i32, usize)>,
    calls: Vec<OpenCall>,
    left_out: LeftOut,
    /// When it had the last event.
    used: u64,
}

impl OpenCalls {
    /// Whether no call is open, and none that was left out.
    fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.left_out.0.is_none()
    }
}

#[derive(Clone, Copy)]
struct OpenCall {
    place: i64,
    address: LiveAddr,
    began: u64,
    /// How many hits were lost before it.
    lost: u64,
}

struct DomainTracks {
    track: TrackId,
    open: Vec<OpenPhase>,
    counters: HashMap<&'static str, TrackId>,
    /// How many words were lost before its first event.
    lost_first: u64,
}

#[derive(Clone, Copy)]
struct OpenPhase {
    name: &'static str,
    began: u64,
}

/// The place of the outermost call of a stack that was left out, and has not gone.
#[derive(Default)]
struct LeftOut(Option<i64>);

impl LeftOut {
    /// A call at this place is left out.
    fn add(&mut self, place: i64) {
        self.0 = self.0.max(Some(place));
    }

    /// A call at this place ends, and those at lower ones were unwound; returns whether it may be one that was left out.
    fn leave(&mut self, place: i64) -> bool {
        let is_left_out = self.0 >= Some(place);
        self.0 = self.0.filter(|outermost| *outermost > place);
        is_left_out
    }
}

/// Pops the innermost call if `is` holds for it.
fn pop_if(calls: &mut Vec<OpenCall>, is: impl Fn(&OpenCall) -> bool) -> Option<OpenCall> {
    let last = calls.last().copied().filter(|call| is(call))?;
    calls.pop();
    Some(last)
}

/// How a slice has ended, if not as it should.
const ENDED: &str = "ended";
const RUNNING: &str = "still running";
const UNWOUND: &str = "unwound: seen here at the latest";
const UNWOUND_OR_LOST: &str = "unwound, or its exit was lost: seen here at the latest";
const TAIL: &str = "by a call in tail position";
const NO_STOP: &str = "without a stop";
const TOO_MANY: &str = "too many starts wait: lasted longer";
const KEY_AGAIN: &str = "without a stop: the next start has its key";
const LOST: &str = "its end was lost";

impl Timeline {
    pub(super) fn new(pid: i32, pairs: Vec<Pair>, until: Option<String>, sink: Sink) -> Timeline {
        Timeline {
            sink,
            pid,
            longest_pairs: vec![Some(0); pairs.len()],
            pairs,
            probes: Vec::new(),
            until,
            is_hit: false,
            tracks: BTreeMap::from([(TrackId::PROCESS, 0)]),
            next_track: TrackId::PROCESS.0 + 1,
            max_tracks: MAX_TRACKS,
            names: HashMap::new(),
            threads: HashMap::new(),
            stacks: HashMap::new(),
            open: 0,
            starts: OpenStarts::default(),
            keyed_starts: None,
            domains: HashMap::new(),
            gaps: EventGaps::default(),
            latest: 0,
            counts: RecordCounts::default(),
            lost_words: LostWords::default(),
            read_beside_losses: HashMap::new(),
            longest_call: 0,
        }
    }

    pub(super) fn sink(&mut self) -> &mut Sink {
        &mut self.sink
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

    /// Returns how long the longest pair or call lasted that has ended so far, in nanoseconds; without the pairs whose times cannot be
    /// trusted.
    pub(super) fn longest(&self) -> u64 {
        self.longest_call.max(self.longest_pair())
    }

    /// Returns the same of pairs alone.
    pub(super) fn longest_pair(&self) -> u64 {
        let longest = self.longest_pairs.iter().flatten();
        longest.copied().max().unwrap_or(0)
    }

    /// The times of the pair with this index cannot be trusted.
    pub(super) fn distrust_pair(&mut self, index: usize) {
        if let Some(longest) = self.longest_pairs.get_mut(index) {
            *longest = None;
        }
    }

    /// Shows in the time line itself that times of pairs may be wrong: `doubt` says why.
    pub(super) fn add_doubt(&mut self, doubt: String) {
        let time = self.latest;
        let doubt = vec![Annotation::text("pair", doubt)];
        self.instant(TrackId::PROCESS, time, "times of pairs may be wrong", doubt);
    }

    /// Returns whether the probe was hit that ends the recording.
    pub(super) fn is_hit(&self) -> bool {
        self.is_hit
    }

    /// Adds hits that were read.
    pub(super) fn add_hits(&mut self, events: &Events) {
        // Before the hits that were read: those that were lost came before them.
        self.counts.lost_hits = self.counts.lost_hits.saturating_add(events.dropped);
        for event in &events.events {
            self.latest = self.latest.max(event.monotonic);
            match (event.frame, event.kind) {
                (Some(frame), EventKind::Hit) => self.enter(event, frame),
                (Some(frame), _) => self.leave(event, frame),
                (None, _) => self.hit(event),
            }
        }
        if events.dropped > 0 {
            for event in &events.events {
                match self.read_beside_losses.get_mut(event.name()) {
                    Some(hits) => *hits += 1,
                    None => drop(self.read_beside_losses.insert(event.name().to_owned(), 1)),
                }
            }
            let time = self.latest;
            let lost = vec![Annotation::int("hits", events.dropped)];
            self.instant(TrackId::PROCESS, time, "hits were lost", lost);
        }
    }

    /// Returns the names of most of the hits that were read while others were lost, the most frequent first: the ring
    /// holds the last hits before a reading, and what floods it is most of these as well.
    pub(super) fn frequent(&self) -> Vec<FrequentName> {
        /// What has a smaller share does not flood the ring.
        const MIN_SHARE: f64 = 0.1;
        const MAX_SHOWN: usize = 3;
        let all: u64 = self.read_beside_losses.values().sum();
        let names = self.read_beside_losses.iter();
        let names = names.map(|(name, &hits)| FrequentName {
            name: name.clone(),
            share: hits as f64 / all.max(1) as f64,
        });
        let mut names: Vec<FrequentName> = names.filter(|it| it.share >= MIN_SHARE).collect();
        names.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.name.cmp(&b.name)));
        names.truncate(MAX_SHOWN);
        names
    }

    fn enter(&mut self, event: &Event, frame: CallFrame) {
        let key = self.stack(event, frame);
        self.leave_inner(key, frame.place.saturating_add(1), event.monotonic);
        if let Some(stack) = self.stacks.get_mut(&key) {
            stack.left_out.leave(frame.place);
        }
        if self.open >= MAX_OPEN {
            self.counts.too_deep += 1;
            if let Some(stack) = self.stacks.get_mut(&key) {
                stack.left_out.add(frame.place);
            }
            return;
        }
        let name = self.name(event.name());
        let Some(stack) = self.stacks.get_mut(&key) else {
            return;
        };
        let track = stack.track;
        stack.used = event.monotonic;
        stack.calls.push(OpenCall {
            place: frame.place,
            address: event.address(),
            began: event.monotonic,
            lost: self.counts.lost_hits,
        });
        self.open += 1;
        self.counts.slices += 1;
        let kind = TrackEventKind::Begin(name);
        self.emit(track, event.monotonic, kind, hit_annotations(event));
    }

    fn leave(&mut self, event: &Event, frame: CallFrame) {
        let key = self.stack(event, frame);
        self.leave_inner(key, frame.place, event.monotonic);
        let time = event.monotonic;
        let Some(stack) = self.stacks.get_mut(&key) else {
            return;
        };
        stack.used = time;
        let (track, lane) = (stack.track, stack.lane);
        let is_same = |call: &OpenCall| call.place == frame.place;
        let is_left_out = stack.left_out.leave(frame.place);
        let last = pop_if(&mut stack.calls, is_same);
        match last {
            Some(call) if call.address == event.address() => {
                let mut arguments = hit_annotations(event);
                if event.kind == EventKind::Jump {
                    arguments.push(Annotation::text(ENDED, TAIL));
                }
                if let (Some((began_in, _)), Some(thread)) = (lane, event.thread) {
                    if began_in != thread {
                        arguments.push(Annotation::int("thread", thread));
                    }
                }
                self.open -= 1;
                self.longest_call = self.longest_call.max(time.saturating_sub(call.began));
                self.emit(track, time, TrackEventKind::End, arguments);
            }
            Some(call) => {
                self.open -= 1;
                self.unwind(track, call, time);
                self.counts.unmatched_exits += 1;
            }
            None if is_left_out => {}
            None => self.counts.unmatched_exits += 1,
        }
        self.release_if_empty(key);
    }

    /// Ends the calls of a stack at places below this one: they were unwound.
    fn leave_inner(&mut self, key: StackId, place: i64, time: u64) {
        loop {
            let Some(stack) = self.stacks.get_mut(&key) else {
                return;
            };
            let track = stack.track;
            let Some(call) = pop_if(&mut stack.calls, |call| call.place < place) else {
                return;
            };
            self.open -= 1;
            self.unwind(track, call, time);
        }
    }

    fn unwind(&mut self, track: TrackId, call: OpenCall, time: u64) {
        self.counts.unwound += 1;
        let how = if call.lost == self.counts.lost_hits {
            UNWOUND
        } else {
            UNWOUND_OR_LOST
        };
        let arguments = vec![Annotation::text(ENDED, how)];
        self.emit(track, time, TrackEventKind::End, arguments);
    }

    /// Returns the stack that a call is on, which has a track.
    fn stack(&mut self, event: &Event, frame: CallFrame) -> StackId {
        let thread = event.thread.unwrap_or(0);
        let key = match frame.fiber {
            Some(fiber) => StackId::OfFiber(fiber),
            None => StackId::OfThread(thread),
        };
        if !self.stacks.contains_key(&key) {
            self.forget_stacks();
            let (track, lane) = match key {
                StackId::OfThread(_) => (self.thread(thread), None),
                StackId::OfFiber(_) => {
                    let (track, number) = self.lane(thread);
                    (track, Some((thread, number)))
                }
            };
            let calls = OpenCalls {
                track,
                lane,
                calls: Vec::new(),
                left_out: LeftOut::default(),
                used: event.monotonic,
            };
            self.stacks.insert(key, calls);
        }
        key
    }

    /// Takes a lane of a thread.
    fn lane(&mut self, thread: i32) -> (TrackId, usize) {
        let parent = self.thread(thread);
        let lanes = self.threads.get(&thread).map(|it| &it.lanes);
        let free = lanes.and_then(|lanes| lanes.iter().position(|(_, is_used)| !is_used));
        let number = free.unwrap_or_else(|| lanes.map_or(0, Vec::len));
        if free.is_none() {
            let name = match number {
                0 => format!("{thread} fiber"),
                _ => format!("{thread} fiber {}", number + 1),
            };
            let lane = self.track(&TrackOf::Lane(parent), &name);
            if let Some(tracks) = self.threads.get_mut(&thread) {
                tracks.lanes.push((lane, false));
            }
        }
        let lanes = self.threads.get_mut(&thread).map(|it| &mut it.lanes);
        let lane = lanes.and_then(|lanes| lanes.get_mut(number));
        match lane {
            Some((track, is_used)) => {
                *is_used = true;
                (*track, number)
            }
            None => (parent, number),
        }
    }

    /// Gives back the lane of a fiber without calls.
    fn release_if_empty(&mut self, key: StackId) {
        let Some(stack) = self.stacks.get(&key) else {
            return;
        };
        let Some((thread, number)) = stack.lane.filter(|_| stack.is_empty()) else {
            return;
        };
        self.stacks.remove(&key);
        let lanes = self.threads.get_mut(&thread).map(|it| &mut it.lanes);
        if let Some((_, is_used)) = lanes.and_then(|lanes| lanes.get_mut(number)) {
            *is_used = false;
        }
    }

    /// Makes room for another stack: those without calls are forgotten, and if more than half of the room is still
    /// taken, the [`MAX_STACKS`] / 4 that have had no event for longest.
    fn forget_stacks(&mut self) {
        if self.stacks.len() < MAX_STACKS {
            return;
        }
        self.stacks.retain(|_, stack| !stack.is_empty());
        if self.stacks.len() < MAX_STACKS / 2 {
            return;
        }
        let mut used: Vec<(u64, StackId)> = self
            .stacks
            .iter()
            .map(|(key, it)| (it.used, *key))
            .collect();
        used.sort_unstable_by_key(|(used, _)| *used);
        for (used, key) in used.drain(..MAX_STACKS / 4) {
            self.leave_inner(key, i64::MAX, used);
            self.release_if_empty(key);
            self.stacks.remove(&key);
        }
    }

    /// Adds a hit of a probe, or a call of a function whose exits are not recorded.
    fn hit(&mut self, event: &Event) {
        let is_probe = event.site().is_some();
        self.is_hit |= is_probe && self.until.as_deref() == Some(event.name());
        let mut is_end = false;
        for index in 0..self.pairs.len() {
            let pair = &self.pairs[index];
            let (starts, stops) = (pair.start == event.name(), pair.stop == event.name());
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
        let is_selected = |probe: &Selector| selects(probe, event.name());
        if !is_end || self.probes.iter().any(is_selected) {
            let track = self.thread(event.thread.unwrap_or(0));
            let arguments = hit_annotations(event);
            self.instant(track, event.monotonic, event.name(), arguments);
        }
    }

    fn start(&mut self, event: &Event, index: usize) {
        let thread = event.thread.unwrap_or(0);
        let (key, time) = ((index, thread), event.monotonic);
        let pair = self.pairs[index].to_string();
        if self.starts.get_mut(key).is_none() {
            let parent = self.thread(thread);
            let track = self.track(&TrackOf::Lane(parent), &format!("{thread} {pair}"));
            let forgotten = self.starts.add(key, track);
            self.end_starts(forgotten, time);
        }
        let name = self.name(&pair);
        let Some(open) = self.starts.get_mut(key) else {
            return;
        };
        let (track, too_many) = (open.track, open.start(time));
        self.counts.without_stop += too_many.forgotten;
        self.end_slices(track, too_many.slices, time, TOO_MANY);
        self.counts.slices += 1;
        let kind = TrackEventKind::Begin(name);
        self.emit(track, time, kind, hit_annotations(event));
    }

    fn stop(&mut self, event: &Event, index: usize, is_start: bool) {
        let thread = event.thread.unwrap_or(0);
        let open = self.starts.get_mut((index, thread));
        let stopped = open.and_then(|open| Some((open.track, open.stop()?)));
        match stopped {
            Some((track, (began, is_drawn))) => {
                self.add_pair_time(index, event.monotonic.saturating_sub(began));
                if is_drawn {
                    let arguments = hit_annotations(event);
                    self.emit(track, event.monotonic, TrackEventKind::End, arguments);
                }
            }
            // The first hit of a pair of one probe ends nothing.
            None if is_start => {}
            None => self.counts.unmatched_stops += 1,
        }
    }

    /// A pair lasted so many nanoseconds.
    fn add_pair_time(&mut self, index: usize, lasted: u64) {
        let longest = self.longest_pairs.get_mut(index);
        if let Some(longest) = longest.and_then(Option::as_mut) {
            *longest = lasted.max(*longest);
        }
    }

    /// Adds a hit that starts or stops a pair, or does both, where stops find their starts by a key.
    fn hit_by_key(&mut self, event: &Event, index: usize, (starts, stops): (bool, bool)) {
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
                    self.end_slices(start.track, 1, time, how);
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
        let pair = self.pairs[key.0].to_string();
        let track = track.unwrap_or_else(|| {
            let parent = self.thread(thread);
            let name = match lane {
                0 => format!("{thread} {pair}"),
                _ => format!("{thread} {pair} {}", lane + 1),
            };
            self.track(&TrackOf::Lane(parent), &name)
        });
        if let Some(keyed) = &mut self.keyed_starts {
            keyed.add(key, (thread, time), (lane, track));
        }
        let name = self.name(&pair);
        self.counts.slices += 1;
        let kind = TrackEventKind::Begin(name);
        self.emit(track, time, kind, hit_annotations(event));
    }

    fn stop_by_key(&mut self, event: &Event, index: usize, start: KeyedStart) {
        let time = event.monotonic;
        self.add_pair_time(index, time.saturating_sub(start.began));
        let mut arguments = hit_annotations(event);
        if let Some(thread) = event.thread.filter(|thread| *thread != start.thread) {
            arguments.push(Annotation::int("thread", thread));
        }
        self.emit(start.track, time, TrackEventKind::End, arguments);
    }

    /// Ends starts that get no stop.
    fn end_starts(&mut self, ended: Vec<StartsInThread>, time: u64) {
        for starts in ended {
            let (waiting, drawn) = starts.waiting();
            self.counts.without_stop += waiting as u64;
            self.end_slices(starts.track, drawn, time, NO_STOP);
        }
    }

    /// Ends the innermost slices of a track.
    fn end_slices(&mut self, track: TrackId, many: usize, time: u64, how: &'static str) {
        for _ in 0..many {
            let arguments = vec![Annotation::text(ENDED, how)];
            self.emit(track, time, TrackEventKind::End, arguments);
        }
    }

    /// Adds a wait of a thread.
    pub(super) fn add_wait(&mut self, wait: &RecordedWait) {
        self.latest = self.latest.max(wait.until);
        let track = self.lane_of_waits(wait);
        let name = self.name(&wait_name(wait));
        self.counts.slices += 1;
        let begin = TrackEventKind::Begin(name);
        self.emit(track, wait.since, begin, wait_annotations(wait));
        self.emit(track, wait.until, TrackEventKind::End, Vec::new());
    }

    /// Returns the track of a thread's waits, below that of the thread: a call whose entry or exit was recorded a moment too early or too
    /// late would not nest with them.
    fn lane_of_waits(&mut self, wait: &RecordedWait) -> TrackId {
        let tid = wait.tid;
        let known = self.threads.get(&tid);
        if let Some(lane) = known.and_then(|it| it.waits) {
            return lane;
        }
        // A thread that has exited has its name no more.
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

    /// Adds what the runtime of OCaml 5 has written of the collector.
    pub(super) fn add_runtime_event(&mut self, entry: &RingEntry<'_>) {
        match *entry {
            RingEntry::Lost { domain, words } => {
                self.counts.lost_words = self.counts.lost_words.saturating_add(words);
                self.lost_words.add(domain, words);
                let track = self.domain(domain);
                match self.tracks.get(&track) {
                    Some(&time) if time > 0 => self.lost_words(domain, time, words),
                    // When they were lost is only known once there is an event.
                    _ => {
                        if let Some(domain) = self.domains.get_mut(&domain) {
                            domain.lost_first = domain.lost_first.saturating_add(words);
                        }
                    }
                }
            }
            RingEntry::Event { domain, time, kind } => {
                self.latest = self.latest.max(time);
                self.domain(domain);
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
        let track = self.domain(domain);
        self.end_phases(domain, 0, time, LOST);
        let words = vec![Annotation::int("words", words)];
        self.instant(track, time, "runtime events were lost", words);
    }

    fn runtime_event(&mut self, domain: u32, time: u64, kind: RuntimeEventKind<'_>) {
        let track = self.domain(domain);
        self.end_cut_phases(domain, time);
        match kind {
            RuntimeEventKind::Begin(phase) => {
                let id = self.name(phase);
                let open = self.domains.get_mut(&domain).map(|it| &mut it.open);
                if let Some(open) = open.filter(|open| open.len() < MAX_PHASES) {
                    open.push(OpenPhase {
                        name: phase,
                        began: time,
                    });
                    self.counts.slices += 1;
                    self.emit(track, time, TrackEventKind::Begin(id), Vec::new());
                }
            }
            RuntimeEventKind::End(phase) => {
                let open = self.domains.get(&domain).map(|it| &it.open);
                let begun = open.and_then(|open| open.iter().rposition(|it| it.name == phase));
                // One that began before the recording has no begin.
                if let Some(depth) = begun {
                    self.end_phases(domain, depth + 1, time, LOST);
                    if let Some(domain) = self.domains.get_mut(&domain) {
                        domain.open.pop();
                    }
                    self.emit(track, time, TrackEventKind::End, Vec::new());
                }
            }
            RuntimeEventKind::Counter(counter, value) => {
                let track = self.counter(domain, counter);
                self.counts.values += 1;
                let value = i64::try_from(value).unwrap_or(i64::MAX);
                self.emit(track, time, TrackEventKind::Value(value), Vec::new());
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

    /// Ends the phases of a domain that were open when events were paused or resumed before `now`: their ends may not have been
    /// written. Rings are read one after the other, so a domain may have begun others since.
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
        self.end_slices(track, ended, time, how);
    }

    /// Ends all slices that are open: the recording is over at `now`, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) fn finish(&mut self, now: u64) {
        let time = now.max(self.latest);
        let mut ends = Vec::new();
        for (_, stack) in self.stacks.drain() {
            ends.extend(stack.calls.iter().map(|_| (stack.track, RUNNING)));
        }
        self.counts.running += ends.len() as u64;
        let starts = self.starts.take_all();
        self.end_starts(starts, time);
        let keyed = self.keyed_starts.as_mut().map(KeyedStarts::take_all);
        for start in keyed.unwrap_or_default() {
            self.counts.without_stop += 1;
            self.end_slices(start.track, 1, time, NO_STOP);
        }
        let domains: Vec<u32> = self.domains.keys().copied().collect();
        for domain in domains {
            self.lost_first_words(domain, time);
            self.end_cut_phases(domain, u64::MAX);
        }
        let phases = self.domains.values();
        let phases = phases.flat_map(|it| it.open.iter().map(|_| (it.track, RUNNING)));
        ends.extend(phases);
        self.domains.clear();
        self.open = 0;
        for (track, how) in ends {
            let arguments = vec![Annotation::text(ENDED, how)];
            self.emit(track, time, TrackEventKind::End, arguments);
        }
    }

    fn instant(&mut self, track: TrackId, time: u64, name: &str, arguments: Vec<Annotation>) {
        let name = self.name(name);
        self.counts.instants += 1;
        self.emit(track, time, TrackEventKind::Instant(name), arguments);
    }

    fn emit(
        &mut self,
        track: TrackId,
        time: u64,
        kind: TrackEventKind,
        arguments: Vec<Annotation>,
    ) {
        let Some(latest) = self.tracks.get_mut(&track) else {
            return;
        };
        // Times of two readings may overlap a little.
        *latest = time.max(*latest);
        self.sink.event(TrackEvent {
            time: *latest,
            track,
            kind,
            arguments,
        });
    }

    fn name(&mut self, name: &str) -> NameId {
        if let Some(known) = self.names.get(name) {
            return *known;
        }
        let id = NameId(self.names.len() as u32 + 1);
        self.sink.name(id, name);
        self.names.insert(name.to_owned(), id);
        id
    }

    fn track(&mut self, of: &TrackOf, name: &str) -> TrackId {
        if self.tracks.len() >= self.max_tracks {
            self.forget_tracks();
        }
        let id = TrackId(self.next_track);
        self.next_track = self.next_track.saturating_add(1);
        self.tracks.insert(id, 0);
        self.sink.track(id, of, name);
        id
    }

    /// Forgets the tracks that get no more events: threads come and go.
    fn forget_tracks(&mut self) {
        let threads = self.threads.values();
        let threads = threads.flat_map(|it| {
            let lanes = it.lanes.iter().map(|(track, _)| track);
            iter::once(&it.track).chain(lanes).chain(&it.waits)
        });
        let domains = self.domains.values();
        let domains = domains.flat_map(|it| iter::once(&it.track).chain(it.counters.values()));
        let stacks = self.stacks.values().map(|it| &it.track);
        let used = threads.chain(domains).chain(stacks).copied();
        let used: BTreeSet<TrackId> = used
            .chain(self.starts.tracks())
            .chain(self.keyed_starts.iter().flat_map(KeyedStarts::tracks))
            .chain([TrackId::PROCESS])
            .collect();
        self.tracks.retain(|track, _| used.contains(track));
        self.sink.forget_tracks(&used);
        self.max_tracks = MAX_TRACKS.max(2 * self.tracks.len());
    }

    /// Returns the track of a thread; 0 stands for those that are not known.
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
            // Those that are needed again get another track of the same name.
            self.threads
                .retain(|_, it| it.lanes.iter().any(|(_, is_used)| *is_used));
        }
        let tracks = ThreadTracks {
            track,
            lanes: Vec::new(),
            waits: None,
        };
        self.threads.insert(thread, tracks);
        track
    }

    fn domain(&mut self, number: u32) -> TrackId {
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

    fn counter(&mut self, number: u32, counter: &'static str) -> TrackId {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use probes_lib::Activity;

    use super::*;
    use crate::output::{TimelineFile, TimelineFormat, TracedProcess};

    #[test]
    fn exits_of_left_out_calls_are_known() {
        let mut left_out = LeftOut::default();
        assert!(!left_out.leave(5));
        for place in [9, 8, 7] {
            left_out.add(place);
        }
        assert!(left_out.leave(7) && left_out.leave(8) && left_out.leave(9));
        assert!(!left_out.leave(9));
        // An exception ends all of them.
        left_out.add(9);
        assert!(!left_out.leave(10) && !left_out.leave(9));
    }

    fn sink(path: &std::path::Path, last: Option<Duration>) -> Sink {
        let process = TracedProcess {
            pid: 1,
            name: "p".to_owned(),
            monotonic: 0,
            boottime: 0,
            realtime: 0,
        };
        let file = TimelineFile::create(path).unwrap();
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
            assert!(timeline.tracks.len() <= MAX_TRACKS);
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
