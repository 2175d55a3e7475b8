//! [`EventReader`]: reads the records of an observation, and what is counted beside them.

use std::mem;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use super::decoder::{EventDecoder, RecordedProcess};
use super::point_counters::PointCounters;
use super::{Event, Events, SlowPair};
use crate::address::LiveAddr;
use crate::error::{Error, MemoryPart, Result};
use crate::memory::ReadMemory;
use crate::observe::install::thread_ids::ThreadIds;
use crate::observe::layout::arena::Arena;
use crate::observe::layout::shared::{SharedLayout, record};
use crate::observe::plan::{ObservationPlan, PlannedPoint};
use crate::observe::read::page_table::PageTable;
use crate::observe::read::ring::{Heads, Records, Rings, word};
use crate::process::Process;
use crate::process::memory::ProcessMemory;
use crate::ticks::Clock;

/// The shortest time between two readings of the mappings, once [`STARTUP_TIME`] is over.
const MIN_RENEWAL_INTERVAL: Duration = Duration::from_millis(100);

/// For how long after the beginning the mappings are read anew whenever hits are read.
const STARTUP_TIME: Duration = Duration::from_secs(1);

/// How long after a reading the next one should be while hits come.
const READ_INTERVAL: Duration = Duration::from_millis(2);

/// The longest time between two readings, once no hit has come for [`QUIET_TIME`].
const QUIET_INTERVAL: Duration = Duration::from_millis(10);
const QUIET_TIME: Duration = Duration::from_millis(100);

/// The shortest time expected between two hits of a thread after a quiet time: a ring must have room for the hits
/// between two readings.
const QUIET_HIT: Duration = Duration::from_micros(1);

/// How often more than the heads of the rings is read even if they have not changed.
const FULL_READ_INTERVAL: Duration = Duration::from_millis(50);

/// Reads records, and makes events of them.
#[derive(Debug)]
pub(crate) struct EventReader {
    layout: SharedLayout,
    rings: Rings,
    /// What was read last.
    records: Records,
    decoder: EventDecoder,
    may_need_memory: bool,
    pages: PageTable,
    /// The least duration of slow pairs.
    slow_from: Duration,
    began_at: Instant,
    pages_renewed_at: Instant,
    /// When the last new records were read.
    last_records_at: Instant,
    /// When more than the heads of the rings was last read.
    last_full_read_at: Instant,
    /// Counts the calls that could not be recorded, because no registers could be saved.
    lost: PointCounters<()>,
    /// Counts the hits that the filter has no answer for, if there is a filter.
    untyped: Option<PointCounters<()>>,
    /// Counts the hits of the points of which only every Nth hit is recorded; the number with each counter is N.
    skipped: PointCounters<NonZeroU64>,
}

/// What a reading has beside its events. See [`Events`].
#[derive(Debug, Default)]
pub(crate) struct ReadingTotals {
    pub(super) dropped: u64,
    pub(super) without_place: u64,
    pub(super) skipped: u64,
    pub(super) untyped: Option<u64>,
    pub(super) slow_pairs: Vec<SlowPair>,
}

impl EventReader {
    /// Begins to read the events of a plan, whose points are in `arenas`; `shared` is the address of its shared data,
    /// and `pages` is the table of readable pages.
    pub(crate) fn begin(
        plan: &ObservationPlan,
        arenas: &[Arena],
        shared: LiveAddr,
        thread_ids: ThreadIds,
        pages: PageTable,
    ) -> EventReader {
        let decoder = EventDecoder::of(plan, thread_ids);
        EventReader {
            layout: plan.shared,
            rings: Rings::at(shared, plan.shared),
            records: Records::default(),
            may_need_memory: decoder.may_need_memory(),
            decoder,
            pages,
            slow_from: plan.slow_from,
            began_at: Instant::now(),
            pages_renewed_at: Instant::now(),
            last_records_at: Instant::now(),
            last_full_read_at: Instant::now(),
            lost: PointCounters::of(plan, arenas, |it| may_lose_calls(it).then_some(()), |_| 0),
            untyped: plan.points.iter().any(is_filtered).then(|| {
                let filtered = |it: &PlannedPoint| is_filtered(it).then_some(());
                PointCounters::of(plan, arenas, filtered, |arena| arena.untyped_counter(0))
            }),
            skipped: PointCounters::of(
                plan,
                arenas,
                |planned| planned.role.watched.as_ref()?.sample,
                |arena| arena.sampled_counter(0),
            ),
        }
    }

    /// Reads the heads of the rings, if they can be read.
    pub(crate) fn heads(&self, source: &impl ReadMemory) -> Option<Heads> {
        self.rings.heads(source).ok()
    }

    /// Returns whether these heads say that there are no new records, and a full reading is not due. It is not checked
    /// whether the process is still observed.
    pub(crate) fn has_nothing_new(&self, heads: Option<&Heads>) -> bool {
        !self.is_full_reading_due() && heads.is_some_and(|heads| self.rings.have_nothing_new(heads))
    }

    /// Returns whether more than the rings has to be read: a full reading is due, something is counted beside the
    /// records, or decoding them may need the memory of the process.
    pub(crate) fn is_full_reading_needed(&self) -> bool {
        let counts = self.untyped.is_some() || !self.skipped.is_empty();
        counts || self.may_need_memory || self.is_full_reading_due()
    }

    fn is_full_reading_due(&self) -> bool {
        self.last_full_read_at.elapsed() >= FULL_READ_INTERVAL
    }

    /// Returns what a reading has beside its events, if there are no new records.
    pub(crate) fn nothing(&mut self) -> ReadingTotals {
        self.records.clear();
        ReadingTotals {
            untyped: self.untyped.as_ref().map(|_| 0),
            ..ReadingTotals::default()
        }
    }

    /// Reads the new events from `source`; `is_over` says that no trampoline writes any more. `memory` is
    /// that of the process, unless it has exited.
    ///
    /// # Errors
    ///
    /// If they cannot be read, or the process has exited.
    pub(crate) fn read(
        &mut self,
        process: &Process,
        source: &impl ReadMemory,
        memory: Option<&ProcessMemory>,
        clock: &Clock,
        is_over: bool,
    ) -> Result<Events> {
        let beside = self.read_records(process, source, None, is_over)?;
        let of = RecordedProcess {
            process,
            memory,
            clock,
        };
        Ok(self.decode_rest(of, &mut 0, beside))
    }

    /// Reads the new records from `source`, and nothing else; `heads` are those of the rings, if they were just read.
    ///
    /// # Errors
    ///
    /// If they cannot be read, or the process has exited.
    pub(crate) fn read_rings(
        &mut self,
        process: &Process,
        source: &impl ReadMemory,
        heads: Option<Heads>,
        is_over: bool,
    ) -> Result<ReadingTotals> {
        let read = self.rings.read(source, heads, is_over, &mut self.records);
        read.map_err(|source| {
            let (pid, at) = (process.pid(), self.rings.shared);
            Error::of_read(pid, MemoryPart::ObservationData, at, source)
        })?;
        if !self.records.is_empty() {
            self.last_records_at = Instant::now();
        }
        Ok(ReadingTotals {
            dropped: self.records.dropped,
            without_place: self.records.without_place,
            ..ReadingTotals::default()
        })
    }

    /// Reads the new records from `source`, and what is counted beside them.
    ///
    /// # Errors
    ///
    /// Same as [`EventReader::read_rings`].
    pub(crate) fn read_records(
        &mut self,
        process: &Process,
        source: &impl ReadMemory,
        heads: Option<Heads>,
        is_over: bool,
    ) -> Result<ReadingTotals> {
        let records = self.read_rings(process, source, heads, is_over)?;
        self.last_full_read_at = Instant::now();
        // If the process has just exited, the records that were read still count; the next call fails.
        let is_optional = !is_over && (!self.records.is_empty() || records.dropped > 0);
        let or_later = |read: Result<u64>| match read {
            Err(_) if is_optional => Ok(0),
            read => read,
        };
        let untyped = self.untyped.as_mut();
        let pid = process.pid();
        let hits = |hits: u64, (): &()| hits;
        let untyped = untyped.map(|it| or_later(it.read(pid, source, hits)));
        let skipped = |hits: u64, every: &NonZeroU64| hits - hits / *every;
        let skipped = or_later(self.skipped.read(pid, source, skipped))?;
        let untyped = untyped.transpose()?;
        let lost = or_later(self.lost.read(pid, source, hits))?;
        Ok(ReadingTotals {
            dropped: records.dropped.saturating_add(lost),
            skipped,
            untyped,
            ..records
        })
    }

    /// Returns an event to decode records into.
    pub(super) fn blank(&self) -> Event {
        self.decoder.blank()
    }

    /// Decodes the first hit from the record `next` on into `event`; returns whether there is one.
    #[inline]
    pub(super) fn decode_next(
        &mut self,
        of: RecordedProcess<'_>,
        next: &mut usize,
        beside: &mut ReadingTotals,
        event: &mut Event,
    ) -> bool {
        while let Some(record) = self.records.get(*next) {
            *next += 1;
            let point = (word(record, record::TID) >> 32) as u32;
            let decoded = if point & record::SLOW == 0 {
                self.decoder.decode(of, record, event)
            } else {
                let pair = self.decoder.slow_pair(of, record);
                pair.map(|pair| {
                    // The trampoline compares with a bound that is a little lower.
                    if pair.duration >= self.slow_from {
                        beside.slow_pairs.push(pair);
                    }
                })
            };
            match decoded {
                None => beside.dropped = beside.dropped.saturating_add(1),
                Some(()) if point & record::SLOW == 0 => return true,
                Some(()) => {}
            }
        }
        false
    }

    /// Returns all hits from the record `next` on.
    pub(super) fn decode_rest(
        &mut self,
        of: RecordedProcess<'_>,
        next: &mut usize,
        mut beside: ReadingTotals,
    ) -> Events {
        let mut events = Vec::with_capacity(self.records.count().saturating_sub(*next));
        let mut event = self.blank();
        while self.decode_next(of, next, &mut beside, &mut event) {
            events.push(mem::replace(&mut event, self.blank()));
        }
        Events {
            events,
            dropped: beside.dropped,
            without_place: beside.without_place,
            skipped: beside.skipped,
            untyped: beside.untyped,
            slow_pairs: beside.slow_pairs,
        }
    }

    /// See [`Observer::next_read`](crate::Observer::next_read).
    pub(crate) fn next_read(&self) -> Duration {
        if self.last_records_at.elapsed() < QUIET_TIME {
            return READ_INTERVAL;
        }
        let records = u32::try_from(self.layout.records()).unwrap_or(u32::MAX);
        let until_full = QUIET_HIT.saturating_mul(records);
        until_full.clamp(READ_INTERVAL, QUIET_INTERVAL)
    }

    /// Returns whether it is time, at `now`, to renew the table of readable pages. At the beginning
    /// it always is, because a program that has just started is still mapping its heap.
    pub(crate) fn pages_are_due(&self, now: Instant) -> bool {
        let since = |earlier| now.saturating_duration_since(earlier);
        let is_starting = since(self.began_at) < STARTUP_TIME;
        self.layout.has_pages()
            && (is_starting || since(self.pages_renewed_at) > MIN_RENEWAL_INTERVAL)
    }

    /// Renews the table of readable pages; see [`PageTable::renew`].
    ///
    /// # Errors
    ///
    /// If the mappings of the process cannot be read, or `write` fails.
    pub(crate) fn renew_pages(
        &mut self,
        process: &Process,
        write: impl FnOnce(&[(u64, Vec<u8>)]) -> Result<()>,
    ) -> Result<()> {
        self.pages_renewed_at = Instant::now();
        self.decoder.forget_threads();
        self.pages.renew(process, write)
    }
}

/// Returns whether a point records calls, and may find no place to save registers.
fn may_lose_calls(planned: &PlannedPoint) -> bool {
    let watched = planned.role.watched.as_ref();
    watched.is_some_and(|it| it.function.is_some_and(|it| !it.is_ocaml))
}

/// Returns whether only the hits of a point are recorded for which a filter is true.
fn is_filtered(planned: &PlannedPoint) -> bool {
    planned.role.chooses_records()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::memory::double::SliceMemory;
    use crate::observe::layout::groups::GROUPS;
    use crate::observe::layout::readable_pages::ReadablePages;
    use crate::observe::layout::shared::HEADER_LEN;
    use crate::observe::observation::Observation;
    use crate::observe::read::events::decoder::tests::{
        function, plan, plan_of_functions, record_of,
    };
    use crate::select::Selector;
    use crate::testing::RecordedData;
    use crate::ticks::TickMeasurement;

    const BASE: LiveAddr = LiveAddr(0x10_0000);

    fn reader(thread_ids: ThreadIds) -> EventReader {
        let plan = plan();
        let pages = PageTable::of(plan.shared, ReadablePages::default(), 0, false);
        EventReader::begin(&plan, &[], BASE, thread_ids, pages)
    }

    fn reader_of(plan: &ObservationPlan, data: &RecordedData) -> EventReader {
        let arenas = std::slice::from_ref(&data.arena);
        let pages = PageTable::of(plan.shared, ReadablePages::default(), 0, false);
        let ids = ThreadIds::OfOurNamespace;
        EventReader::begin(plan, arenas, data.shared(), ids, pages)
    }

    #[test]
    fn quiet_rings_are_read_less_often() {
        let mut reader = reader(ThreadIds::Unknown);
        assert_eq!(reader.next_read(), READ_INTERVAL);
        reader.last_records_at -= QUIET_TIME;
        assert_eq!(reader.layout.records(), 4096);
        assert_eq!(reader.next_read(), 4096 * QUIET_HIT);
        reader.layout.record_len = 64;
        assert_eq!(reader.next_read(), QUIET_INTERVAL);
        // Rings with less room.
        reader.layout.record_len = 1 << 16;
        assert_eq!(reader.next_read(), READ_INTERVAL);
    }

    #[test]
    fn full_reading_is_due_after_50_ms() {
        let mut reader = reader(ThreadIds::Unknown);
        let has_nothing_new = |reader: &EventReader, source: &SliceMemory| {
            reader.has_nothing_new(reader.heads(source).as_ref())
        };
        let rings = vec![0; reader.layout.ring(GROUPS) as usize];
        let source = SliceMemory::new([(BASE.0, rings)]);
        // In the future, so that the test may be as slow as it likes.
        reader.last_full_read_at = Instant::now() + Duration::from_secs(600);
        assert!(has_nothing_new(&reader, &source));
        let unreadable = SliceMemory::new([]);
        assert!(!has_nothing_new(&reader, &unreadable));
        reader.last_full_read_at = Instant::now() - FULL_READ_INTERVAL;
        assert!(!has_nothing_new(&reader, &source));
    }

    #[test]
    fn records_of_no_point_are_dropped() {
        let layout = plan().shared;
        let mut bytes = vec![0; layout.ring(GROUPS) as usize];
        let ring = layout.ring(0) as usize;
        bytes[ring] = 3;
        for (index, point) in [1_u64, 0, 3].into_iter().enumerate() {
            let words = [
                (record::NUMBER, index as u64 + 1),
                (record::TID, point << 32),
            ];
            let at = ring + HEADER_LEN as usize + index * layout.record_len as usize;
            bytes[at..][..layout.record_len as usize].copy_from_slice(&record_of(&words));
        }
        let memory = SliceMemory::new([(BASE.0, bytes)]);
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let mut reader = reader(ThreadIds::Unknown);
        let events = reader.read(&process, &memory, None, &clock, false).unwrap();
        assert_eq!((events.events.len(), events.dropped), (2, 1));
        assert_eq!(events.events[0].thread, None);
    }

    #[test]
    fn pages_are_renewed_often_at_the_beginning() {
        let mut reader = reader(ThreadIds::Unknown);
        let begun = Instant::now();
        let after = |milliseconds| begun + Duration::from_millis(milliseconds);
        reader.began_at = begun;
        reader.pages_renewed_at = after(900);
        let is_due = |reader: &EventReader| {
            let due = |milliseconds: &u64| reader.pages_are_due(after(*milliseconds));
            [0, 950, 999, 1000, 1001]
                .into_iter()
                .filter(due)
                .collect::<Vec<u64>>()
        };
        assert_eq!(is_due(&reader), [0, 950, 999, 1001]);
        reader.layout = SharedLayout::default();
        assert_eq!(is_due(&reader), [0_u64; 0]);
    }

    #[test]
    fn pairs_shorter_than_asked_are_not_slow() {
        let timing = Observation::new().time("a", "b").time("b", "a");
        let plan = plan_of_functions(&timing.report_slow(Duration::from_millis(1)));
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let duration = clock.between(1 << 39, 1 << 40);
        let read = |slow_from: Duration, pair: u64, start: u32| {
            let mut data = RecordedData::of(&plan);
            let layout = plan.shared;
            let ring = data.shared().plus(layout.ring(0));
            let at = ring.plus(HEADER_LEN);
            let kept = u64::from(layout.kept_len);
            data.put(ring, 1);
            data.put(at.plus(record::NUMBER), 1);
            data.put(at.plus(record::TIME), 1 << 40);
            data.put(at.plus(record::TID), u64::from(record::SLOW | 1) << 32 | 77);
            data.put(at.plus(kept + record::NUMBER), pair);
            data.put(at.plus(kept + record::TIME), 1 << 39);
            data.put(at.plus(kept + record::TID), u64::from(start) << 32 | 77);
            let mut reader = reader_of(&plan, &data);
            reader.slow_from = slow_from;
            let events = reader.read(&process, &data.memory, None, &clock, false);
            let events = events.unwrap();
            assert!(events.events.is_empty());
            let pairs = events.slow_pairs.iter();
            let pairs: Vec<_> = pairs
                .map(|it| (it.pair, it.start.as_ref().map(|it| it.name().to_owned())))
                .collect();
            (pairs, events.dropped)
        };
        let from_a = |pair| vec![(Some(pair), Some("a".to_owned()))];
        assert_eq!(read(duration, 1, 0), (from_a(1), 0));
        assert_eq!(read(duration / 2, 0, 0), (from_a(0), 0));
        let longer = duration + Duration::from_nanos(1);
        assert_eq!(read(longer, 0, 0), (vec![], 0));
        let unknown = record::UNKNOWN_POINT;
        assert_eq!(read(duration, 0, unknown), (vec![(Some(0), None)], 0));
        // No such pair, and no such point.
        assert_eq!(read(duration, 2, 0), (vec![], 1));
        assert_eq!(read(duration, 0, 99), (vec![], 1));
    }

    #[test]
    fn hits_that_are_not_recorded_are_counted() {
        let process = Process::own().unwrap();
        let clock = TickMeasurement::begin().clock();
        let functions = || {
            let watching = Observation::new().watch_functions(function("leaf"));
            watching.watch_functions(function("outer"))
        };
        // Calls of C for which no registers could be saved.
        let plan = plan_of_functions(&functions().count(Selector::name("a")));
        let mut data = RecordedData::of(&plan);
        let is_site = |it: &PlannedPoint| it.site().is_some();
        let points = 0..plan.points.len();
        for point in points.clone() {
            let hits = if is_site(&plan.points[point]) {
                1000
            } else {
                3
            };
            data.hit(point, hits);
        }
        let mut reader = reader_of(&plan, &data);
        let read = |reader: &mut EventReader, data: &RecordedData| {
            let events = reader.read(&process, &data.memory, None, &clock, false);
            let events = events.unwrap();
            (events.dropped, events.skipped, events.untyped)
        };
        let lost = 3 * (plan.points.len() as u64 - 1);
        assert_eq!(read(&mut reader, &data), (lost, 0, None));
        // Only what is new.
        assert_eq!(read(&mut reader, &data), (0, 0, None));
        // Of the hits of probes, every tenth is recorded, and only if the filter is true.
        let sampled = Observation::new().watch(Selector::All);
        let sampled = sampled.sample(NonZeroU64::new(10).unwrap());
        let plan = plan_of_functions(&sampled.only_where("arg0 == 1".parse().unwrap()));
        let mut data = RecordedData::of(&plan);
        for (point, hits) in [(0, 25), (1, 100)] {
            data.hit(data.arena.sampled_counter(point), hits);
            data.hit(data.arena.untyped_counter(point), 4);
            // The counter of all hits, which is not added.
            data.hit(point, 7777);
        }
        let mut reader = reader_of(&plan, &data);
        assert_eq!(read(&mut reader, &data), (0, 23 + 90, Some(8)));
        data.hit(data.arena.sampled_counter(1), 110);
        assert_eq!(read(&mut reader, &data), (0, 9, Some(0)));
    }
}
