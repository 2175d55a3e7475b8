//! [`Sink`]: where the events of a time line go: into a file, block by block, or with `-last` into memory, from where
//! the latest are written in the end.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::{size_of, take};
use std::time::{Duration, Instant};

use crate::clock::in_nanoseconds;
use crate::failure::Failure;
use crate::output::{
    Annotation, AnnotationValue, Encoder, NameId, TimelineFile, TimelineFormat, TracedProcess,
    TrackEvent, TrackEventKind, TrackId, TrackOf,
};

/// How many bytes are written at once: if the disk is full, the last block is lost.
const BLOCK: usize = 64 << 10;

/// How long events may wait to be written.
const WAIT: Duration = Duration::from_millis(200);

/// How many bytes the events that are kept may take.
pub(super) const MAX_KEPT: usize = 20 << 20;

/// How many open slices that began before the kept events keep their arguments.
const MAX_WITH_ARGUMENTS: usize = 10_000;

/// Writes events.
pub(super) struct Sink {
    encoder: Box<dyn Encoder>,
    file: TimelineFile,
    block: Vec<u8>,
    written: Instant,
    /// Why a block could not be written, if that has not been reported.
    failure: Option<Failure>,
    /// What is in `block`, and what is in the file.
    in_block: WrittenEvents,
    in_file: WrittenEvents,
    last: Option<LastEvents>,
    /// How long a time the written events span, if only the last ones were written.
    last_written: Option<Duration>,
    is_short: bool,
}

/// How many events were written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WrittenEvents {
    pub(super) slices: u64,
    pub(super) instants: u64,
    pub(super) values: u64,
}

/// The latest events.
#[derive(Debug, Default)]
struct LastEvents {
    /// For how long they are kept, in nanoseconds.
    lasting: u64,
    events: VecDeque<TrackEvent>,
    bytes: usize,
    newest: u64,
    /// The begins of the slices that were open when the first of `events` came, the outermost first.
    open: BTreeMap<TrackId, Vec<TrackEvent>>,
    open_with_arguments: usize,
    /// Each track, with its name: those of the kept events, and those that may get more events.
    tracks: BTreeMap<TrackId, (TrackOf, String)>,
    /// The time of the latest event for which there was no room.
    left_out: Option<u64>,
}

impl Sink {
    pub(super) fn new(
        format: TimelineFormat,
        process: &TracedProcess,
        file: TimelineFile,
        last: Option<Duration>,
    ) -> Sink {
        let mut encoder = format.encoder(process);
        let mut block = Vec::new();
        encoder.begin(&mut block);
        encoder.track(
            TrackId::PROCESS,
            &TrackOf::Process,
            &process.name,
            &mut block,
        );
        Sink {
            encoder,
            file,
            block,
            written: Instant::now(),
            failure: None,
            in_block: WrittenEvents::default(),
            in_file: WrittenEvents::default(),
            last: last.map(LastEvents::of),
            last_written: None,
            is_short: false,
        }
    }

    pub(super) fn track(&mut self, id: TrackId, of: &TrackOf, name: &str) {
        match &mut self.last {
            Some(last) => drop(last.tracks.insert(id, (of.clone(), name.to_owned()))),
            None => self.encoder.track(id, of, name, &mut self.block),
        }
    }

    /// Forgets the tracks that have no kept event and get no more events: all but those `used`.
    pub(super) fn forget_tracks(&mut self, used: &BTreeSet<TrackId>) {
        if let Some(last) = &mut self.last {
            let mut needed = last.shown_tracks();
            needed.extend(used);
            last.retain_tracks(needed);
        }
    }

    #[cfg(test)]
    pub(super) fn known_tracks(&self) -> usize {
        self.last.as_ref().map_or(0, |last| last.tracks.len())
    }

    pub(super) fn name(&mut self, id: NameId, name: &str) {
        self.encoder.name(id, name, &mut self.block);
    }

    pub(super) fn event(&mut self, event: TrackEvent) {
        match &mut self.last {
            Some(last) => last.add(event),
            None => self.encode(&event),
        }
    }

    fn encode(&mut self, event: &TrackEvent) {
        match event.kind {
            TrackEventKind::Begin(_) => self.in_block.slices += 1,
            TrackEventKind::Instant(_) => self.in_block.instants += 1,
            TrackEventKind::Value(_) => self.in_block.values += 1,
            TrackEventKind::End => {}
        }
        self.encoder.event(event, &mut self.block);
        if self.block.len() >= BLOCK {
            self.write_block();
        }
    }

    fn write_block(&mut self) {
        self.written = Instant::now();
        let written = self.file.write(&mut self.block, self.encoder.end());
        self.failure = self.failure.take().or(written.err());
        let added = take(&mut self.in_block);
        if !self.file.is_cut() {
            self.in_file.slices += added.slices;
            self.in_file.instants += added.instants;
            self.in_file.values += added.values;
        }
    }

    /// Writes what has waited for long, or all there is if the recording is over.
    ///
    /// # Errors
    ///
    /// If that, or a block before, cannot be written.
    pub(super) fn flush(&mut self, is_over: bool) -> Result<(), Failure> {
        if !is_over && self.last.is_some() {
            return Ok(());
        }
        if let Some(last) = self.last.take() {
            self.is_short = last.is_short();
            self.file.replace()?;
            self.write_last(last);
        }
        if is_over || self.written.elapsed() >= WAIT {
            self.write_block();
        }
        if let Some(failure) = self.failure.take() {
            self.forget_unwritten();
            return Err(failure);
        }
        if is_over {
            let finished = self.file.finish(self.encoder.end());
            self.forget_unwritten();
            finished?;
        }
        Ok(())
    }

    /// If the file is as it was before, none of our events is in it.
    fn forget_unwritten(&mut self) {
        if self.file.is_cut() && self.file.len() == 0 {
            self.in_file = WrittenEvents::default();
            self.last_written = self.last_written.map(|_| Duration::ZERO);
            self.is_short = false;
        }
    }

    fn write_last(&mut self, mut last: LastEvents) {
        last.retain_tracks(last.shown_tracks());
        for (id, (of, name)) in &last.tracks {
            self.encoder.track(*id, of, name, &mut self.block);
        }
        let from = last.events.front().map_or(last.newest, |it| it.time);
        self.last_written = Some(Duration::from_nanos(if last.is_short() {
            last.newest.saturating_sub(from)
        } else {
            last.lasting
        }));
        // Each source of events is read by itself: the first event on a track may be earlier than all before it.
        let mut firsts = BTreeMap::new();
        for event in &last.events {
            firsts.entry(event.track).or_insert(event.time);
        }
        let open = last.open.into_values().flatten().map(|mut begin| {
            let first = firsts.get(&begin.track).copied().unwrap_or(u64::MAX);
            let time = from.max(begin.time).min(first);
            let earlier = time.saturating_sub(begin.time);
            begin
                .arguments
                .push(Annotation::int("began_ns_earlier", earlier));
            begin.time = time;
            begin
        });
        for event in open.chain(last.events) {
            self.encode(&event);
        }
    }

    /// How long a time the written events span, if only the last ones were written.
    pub(super) fn last_written(&self) -> Option<Duration> {
        self.last_written
    }

    /// What is in the file: if the disk is full, less than was recorded.
    pub(super) fn in_file(&self) -> WrittenEvents {
        self.in_file
    }

    /// How many of the latest events are kept until the end; `None` if events are written at once.
    pub(super) fn kept(&self) -> Option<usize> {
        self.last.as_ref().map(|last| last.events.len())
    }

    /// Whether less was written than was asked for, because it did not fit.
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    pub(super) fn file(&self) -> &TimelineFile {
        &self.file
    }
}

impl LastEvents {
    fn of(lasting: Duration) -> LastEvents {
        LastEvents {
            lasting: in_nanoseconds(lasting),
            ..LastEvents::default()
        }
    }

    /// Whether there was no room for an event that would still be among the latest.
    fn is_short(&self) -> bool {
        let left_out = self.left_out;
        left_out.is_some_and(|time| time.saturating_add(self.lasting) >= self.newest)
    }

    fn add(&mut self, event: TrackEvent) {
        self.newest = self.newest.max(event.time);
        self.bytes += size(&event);
        self.events.push_back(event);
        loop {
            let is_old = |it: &TrackEvent| it.time.saturating_add(self.lasting) < self.newest;
            let has_old = self.events.front().is_some_and(is_old);
            if !has_old && self.bytes <= MAX_KEPT {
                return;
            }
            let Some(event) = self.events.pop_front() else {
                return;
            };
            if !has_old {
                self.left_out = self.left_out.max(Some(event.time));
            }
            self.bytes -= size(&event);
            self.forget(event);
        }
    }

    /// The tracks of the events that are kept.
    fn shown_tracks(&self) -> BTreeSet<TrackId> {
        let events = self.events.iter().map(|event| event.track);
        events.chain(self.open.keys().copied()).collect()
    }

    /// Forgets all tracks but the `needed` ones and their parents.
    fn retain_tracks(&mut self, mut needed: BTreeSet<TrackId>) {
        let mut below: Vec<TrackId> = needed.iter().copied().collect();
        while let Some(track) = below.pop() {
            if let Some((TrackOf::Lane(parent) | TrackOf::Counter(parent), _)) =
                self.tracks.get(&track)
            {
                if needed.insert(*parent) {
                    below.push(*parent);
                }
            }
        }
        self.tracks.retain(|track, _| needed.contains(track));
    }

    /// Drops an event, except for what later events need: the begin of an open slice.
    fn forget(&mut self, mut event: TrackEvent) {
        match event.kind {
            TrackEventKind::Begin(_) => {
                if self.open_with_arguments >= MAX_WITH_ARGUMENTS {
                    event.arguments = Vec::new();
                }
                self.open_with_arguments += usize::from(!event.arguments.is_empty());
                self.open.entry(event.track).or_default().push(event);
            }
            TrackEventKind::End => {
                let Entry::Occupied(mut open) = self.open.entry(event.track) else {
                    return;
                };
                let begin = open.get_mut().pop();
                if open.get().is_empty() {
                    open.remove();
                }
                let had_arguments = begin.is_some_and(|it| !it.arguments.is_empty());
                self.open_with_arguments -= usize::from(had_arguments);
            }
            TrackEventKind::Instant(_) | TrackEventKind::Value(_) => {}
        }
    }
}

/// How many bytes an event takes.
fn size(event: &TrackEvent) -> usize {
    let arguments = event.arguments.iter().map(|argument| {
        let text = match &argument.value {
            AnnotationValue::Text(text) => text.len(),
            AnnotationValue::Int(_) => 0,
        };
        size_of::<Annotation>() + argument.key.len() + text
    });
    size_of::<TrackEvent>() + arguments.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(time: u64, kind: TrackEventKind) -> TrackEvent {
        TrackEvent {
            time,
            track: TrackId(1),
            kind,
            arguments: Vec::new(),
        }
    }

    #[test]
    fn begins_of_open_slices_are_kept() {
        let mut last = LastEvents::of(Duration::from_nanos(10));
        let name = |number| TrackEventKind::Begin(NameId(number));
        for (time, kind) in [
            (1, name(1)),
            (2, name(2)),
            (3, TrackEventKind::End),
            (4, name(3)),
            (20, TrackEventKind::End),
            (21, TrackEventKind::Instant(NameId(4))),
        ] {
            last.add(event(time, kind));
        }
        let times: Vec<u64> = last.events.iter().map(|it| it.time).collect();
        assert_eq!(times, [20, 21]);
        let open: Vec<TrackEventKind> = last.open[&TrackId(1)].iter().map(|it| it.kind).collect();
        assert_eq!(open, [name(1), name(3)]);
        assert!(!last.is_short());
    }

    #[test]
    fn early_burst_does_not_shorten_later_events() {
        let mut last = LastEvents::of(Duration::from_nanos(10));
        for _ in 0..2 * (MAX_KEPT / size_of::<TrackEvent>()) {
            last.add(event(5, TrackEventKind::Value(1)));
        }
        assert!(last.is_short());
        last.add(event(15, TrackEventKind::Value(1)));
        assert!(last.is_short());
        last.add(event(16, TrackEventKind::Value(1)));
        assert!(!last.is_short());
    }

    #[test]
    fn tracks_of_ended_slices_are_not_kept() {
        let mut last = LastEvents::of(Duration::from_nanos(10));
        for time in 0..100 {
            for kind in [TrackEventKind::Begin(NameId(1)), TrackEventKind::End] {
                let track = TrackId(time);
                last.add(TrackEvent {
                    track,
                    ..event(time.into(), kind)
                });
            }
        }
        assert!(last.open.is_empty());
    }

    #[test]
    fn memory_of_last_events_is_bounded() {
        let mut last = LastEvents::of(Duration::MAX);
        for time in 0..2 * (MAX_KEPT / size_of::<TrackEvent>()) as u64 {
            last.add(event(time, TrackEventKind::Value(1)));
        }
        assert!(last.bytes <= MAX_KEPT && last.is_short());
        assert!(last.events.capacity() * size_of::<TrackEvent>() <= 2 * MAX_KEPT);
    }
}
