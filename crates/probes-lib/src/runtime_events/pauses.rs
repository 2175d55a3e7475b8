//! [`GcPauses`]: what runtime events say of the collector's work: pauses, phases, allocation. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::numbers::nanoseconds;

use super::gaps::EventGaps;
use super::gc_times::GcTimes;
use super::open_phases::{OpenPhase, OpenPhases};
use super::requests::{DomainRequests, StwRequests};
use super::{PhaseUnderWay, RingEntry, RuntimeEventKind};

/// How long the collector has worked, by domain and by phase, and how much was allocated.
///
/// ```no_run
/// use probes_lib::{GcPauses, RuntimeEvents};
///
/// let mut events = RuntimeEvents::of_process(4242)?;
/// let mut pauses = GcPauses::within(events.under_way());
/// for _ in 0..100 {
///     std::thread::sleep(events.next_read());
///     events.read(|entry| drop(pauses.add(&entry)))?;
///     pauses.match_requests();
/// }
/// pauses.finish();
/// for (number, domain) in pauses.domains() {
///     let (longest, led) = (domain.pauses.max(), pauses.requests(number).led);
///     println!("{number}: {} pauses, the longest {longest:?}; {led} requests", domain.pauses.count());
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct GcPauses {
    domains: BTreeMap<u32, DomainPauses>,
    phases: BTreeMap<&'static str, GcTimes>,
    requests: StwRequests,
    /// Where events are missing, in any domain: the end of a phase that began before a gap may be lost.
    gaps: EventGaps,
}

/// The pauses of one domain, or of all domains that have had the same number, one after another.
///
/// [`GcPauses`] has an example.
#[derive(Clone, Debug, Default)]
pub struct DomainPauses {
    /// Its pauses: the times from when it begins work of the collector until it goes on with its own.
    pub pauses: GcTimes,
    /// How long it has waited for other domains, at barriers.
    pub waits: GcTimes,
    /// How many compactions of the heap it took part in.
    pub compactions: u64,
    /// What was allocated in its minor heap, in bytes.
    pub allocated: u64,
    /// What survived there and was moved to the major heap, in bytes.
    pub promoted: u64,
    /// How many words of events were lost.
    pub lost_words: u64,
    /// How long it was in a pause that was under way when the events were opened, and is none of the pauses.
    left_out: Duration,
    /// The words of its pools and of its large blocks in the major heap, when it said so last.
    pool_words: Option<u64>,
    large_words: Option<u64>,
    /// The phases that have begun and have not ended.
    open: OpenPhases<PhaseRecord>,
    /// The phases of the pause so far, in the order in which they have begun.
    inner: Vec<PausePhase>,
}

/// A pause that has ended.
///
/// ```
/// use probes_lib::{GcPauses, RingEntry, RuntimeEventKind};
///
/// let entry = |time, kind| RingEntry::Event { domain: 0, time, kind };
/// let mut pauses = GcPauses::default();
/// assert_eq!(pauses.add(&entry(1000, RuntimeEventKind::Begin("minor"))), None);
/// let pause = pauses.add(&entry(1500, RuntimeEventKind::End("minor"))).unwrap();
/// assert_eq!((pause.domain, pause.began, pause.time.as_nanos()), (0, 1000, 500));
/// assert_eq!((pause.phases[0].name, pause.phases[0].depth), ("minor", 0));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcPause {
    /// The domain.
    pub domain: u32,
    /// When it began, in nanoseconds of CLOCK_MONOTONIC.
    pub began: u64,
    /// How long it was.
    pub time: Duration,
    /// Its phases in the order in which they began. The first is all of it.
    pub phases: Vec<PausePhase>,
}

/// A phase in a pause.
///
/// [`GcPause`] has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PausePhase {
    /// Its name.
    pub name: &'static str,
    /// In how many other phases it is.
    pub depth: usize,
    /// How long it was, with those in it.
    pub time: Duration,
}

/// What is known of an open phase.
#[derive(Clone, Copy, Debug)]
struct PhaseRecord {
    /// Its index in the phases of the pause; `None` if there are too many.
    index: Option<usize>,
    /// When the events were opened, if it was under way then.
    seen: Option<u64>,
}

/// A phase that has ended.
enum EndedPhase {
    Seen(PausePhase),
    /// It was under way when the events were opened.
    LeftOut,
}

/// In this phase, a domain waits to be used; no OCaml code waits for the collector.
const IDLE: &str = "domain_condition_wait";

/// What the domain does that has made a stop-the-world request, and what the others do.
const LEADER: &str = "stw_leader";
const HANDLER: &str = "stw_handler";

/// How the names of phases end in which domains wait for each other.
const BARRIER: &str = "_barrier";

/// All of a compaction.
const COMPACTION: &str = "compact";

/// How many phases of a pause are kept.
const MAX_PHASES: usize = 1024;

impl GcPauses {
    /// Begins within these phases ([`RuntimeEvents::under_way`](super::RuntimeEvents::under_way)). Neither they nor the
    /// phases in them are pauses, because only a part of each is seen.
    #[must_use]
    pub fn within(phases: &[PhaseUnderWay]) -> GcPauses {
        let mut pauses = GcPauses::default();
        for phase in phases.iter().filter(|phase| phase.name != IDLE) {
            let domain = pauses.domains.entry(phase.domain).or_default();
            let (name, began) = (phase.name, phase.began);
            let about = PhaseRecord {
                index: None,
                seen: Some(phase.seen),
            };
            domain.open.begin(OpenPhase { name, began }, about);
        }
        pauses
    }

    /// Adds what a ring has next; returns the pause that ends with it.
    pub fn add(&mut self, entry: &RingEntry<'_>) -> Option<GcPause> {
        match *entry {
            RingEntry::Lost { domain, words } => {
                let domain = self.domains.entry(domain).or_default();
                domain.lost_words = domain.lost_words.saturating_add(words);
                domain.forget_open();
                self.requests.forget();
                None
            }
            RingEntry::Event { domain, time, kind } => self.add_event(domain, time, kind),
        }
    }

    fn add_event(&mut self, number: u32, time: u64, kind: RuntimeEventKind<'_>) -> Option<GcPause> {
        let domain = self.domains.entry(number).or_default();
        // Rings are read one after the other: what this one has from before that time may come after it.
        let outermost = domain.open.each().next();
        if outermost.is_some_and(|(it, _)| self.gaps.last_in(it.began, time).is_some()) {
            domain.forget_open();
        }
        match kind {
            RuntimeEventKind::Begin(name) if name != IDLE => {
                match name {
                    LEADER => self.requests.led(number, time),
                    HANDLER => self.requests.joined(number, time),
                    _ => {}
                }
                domain.begin(name, time);
            }
            RuntimeEventKind::End(name) if name != IDLE => {
                let phase = match domain.end(name, time)? {
                    EndedPhase::Seen(phase) => phase,
                    EndedPhase::LeftOut => return None,
                };
                let began = time.saturating_sub(nanoseconds(phase.time));
                self.phases.entry(name).or_default().add(phase.time);
                if name == LEADER {
                    self.requests.ended(began, time);
                }
                if name.ends_with(BARRIER) {
                    domain.waits.add(phase.time);
                }
                domain.compactions += u64::from(name == COMPACTION);
                if phase.depth > 0 {
                    return None;
                }
                domain.pauses.add(phase.time);
                return Some(GcPause {
                    domain: number,
                    began,
                    time: phase.time,
                    phases: std::mem::take(&mut domain.inner),
                });
            }
            RuntimeEventKind::Counter("minor_allocated", bytes) => {
                domain.allocated = domain.allocated.saturating_add(bytes);
            }
            RuntimeEventKind::Counter("minor_promoted", bytes) => {
                domain.promoted = domain.promoted.saturating_add(bytes);
            }
            RuntimeEventKind::Counter("major_heap_pool_words", words) => {
                domain.pool_words = Some(words);
            }
            RuntimeEventKind::Counter("major_heap_large_words", words) => {
                domain.large_words = Some(words);
            }
            RuntimeEventKind::Lifecycle("domain_terminate", _) => {
                domain.forget_open();
                (domain.pool_words, domain.large_words) = (None, None);
            }
            RuntimeEventKind::Lifecycle("ring_pause" | "ring_resume", _) => {
                self.gaps.add(time);
                self.requests.forget();
            }
            _ => {}
        }
        None
    }

    /// To be called when all rings were read once more: matches the stop-the-world requests with the domains that
    /// joined them.
    pub fn match_requests(&mut self) {
        self.requests.match_joins(&self.gaps);
    }

    /// To be called when no more is read.
    pub fn finish(&mut self) {
        self.requests.finish(&self.gaps);
    }

    /// Returns what a domain had to do with stop-the-world requests, as far as these are matched
    /// ([`GcPauses::match_requests`]).
    pub fn requests(&self, domain: u32) -> DomainRequests {
        self.requests.of(domain)
    }

    /// Returns how often the heap was compacted.
    pub fn compactions(&self) -> u64 {
        let of_domains = self.domains.values().map(|domain| domain.compactions);
        of_domains.max().unwrap_or(0)
    }

    /// Returns the domains that have written anything, by their numbers.
    pub fn domains(&self) -> impl ExactSizeIterator<Item = (u32, &DomainPauses)> {
        self.domains
            .iter()
            .map(|(number, domain)| (*number, domain))
    }

    /// Returns the domains that were in a pause when the events were read last, and when it began, in nanoseconds of
    /// CLOCK_MONOTONIC. Pauses that began before events were resumed are left out: their end may not have been written.
    pub fn under_way(&self) -> impl Iterator<Item = (u32, u64)> {
        let domains = self.domains.iter();
        let began = domains.filter_map(|(number, domain)| {
            let (outermost, _) = domain.open.each().next()?;
            Some((*number, outermost.began))
        });
        began.filter(|(_, began)| *began >= self.gaps.latest())
    }

    /// Returns how long domains were in pauses that are left out: those that were under way when the events were
    /// opened, or still are at the time `now`, in nanoseconds of CLOCK_MONOTONIC.
    pub fn left_out(&self, now: u64) -> impl Iterator<Item = (u32, Duration)> {
        let domains = self.domains.iter();
        let left_out = domains.map(move |(number, domain)| {
            let outermost = domain.open.each().next();
            let outermost = outermost.filter(|(it, _)| it.began >= self.gaps.latest());
            let since = outermost.map_or(now, |(it, about)| about.seen.unwrap_or(it.began));
            let under_way = Duration::from_nanos(now.saturating_sub(since));
            (*number, domain.left_out + under_way)
        });
        left_out.filter(|(_, left_out)| !left_out.is_zero())
    }

    /// Returns the times of each phase in all domains, with the phases in it.
    pub fn phases(&self) -> impl ExactSizeIterator<Item = (&'static str, &GcTimes)> {
        self.phases.iter().map(|(name, times)| (*name, times))
    }

    /// Returns the pauses of all domains.
    pub fn all(&self) -> GcTimes {
        let mut all = GcTimes::default();
        for domain in self.domains.values() {
            all.merge(&domain.pauses);
        }
        all
    }

    /// Returns the bytes of the major heap, as far as its domains have said how large it is, which they do when a major
    /// collection ends; `None` if none has.
    pub fn heap(&self) -> Option<u64> {
        let words = self
            .domains
            .values()
            .filter_map(|domain| Some(domain.pool_words?.saturating_add(domain.large_words?)));
        words.reduce(u64::saturating_add)?.checked_mul(8)
    }
}

impl DomainPauses {
    fn begin(&mut self, name: &'static str, time: u64) {
        if self.open.is_empty() || self.open.is_full() {
            self.forget_open();
        }
        let index = (self.inner.len() < MAX_PHASES).then_some(self.inner.len());
        if index.is_some() {
            let (depth, time) = (self.open.len(), Duration::ZERO);
            self.inner.push(PausePhase { name, depth, time });
        }
        let about = PhaseRecord { index, seen: None };
        self.open.begin(OpenPhase { name, began: time }, about);
    }

    /// Ends a phase; `None` if its beginning, or the end of one in it, was not read, or the times make no sense.
    fn end(&mut self, name: &'static str, time: u64) -> Option<EndedPhase> {
        let Some((phase, about)) = self.open.end(name, time) else {
            self.inner.clear();
            return None;
        };
        if let Some(seen) = about.seen {
            if self.open.is_empty() {
                self.left_out += Duration::from_nanos(time.saturating_sub(seen));
                self.inner.clear();
            }
            return Some(EndedPhase::LeftOut);
        }
        let time = Duration::from_nanos(time - phase.began);
        let depth = self.open.len();
        if let Some(kept) = about.index.and_then(|index| self.inner.get_mut(index)) {
            kept.time = time;
        }
        Some(EndedPhase::Seen(PausePhase { name, depth, time }))
    }

    fn forget_open(&mut self) {
        self.open.forget();
        self.inner.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: fn(&'static str) -> RuntimeEventKind<'static> = RuntimeEventKind::Begin;
    const END: fn(&'static str) -> RuntimeEventKind<'static> = RuntimeEventKind::End;

    fn add(
        pauses: &mut GcPauses,
        domain: u32,
        time: u64,
        kind: RuntimeEventKind<'_>,
    ) -> Option<GcPause> {
        pauses.add(&RingEntry::Event { domain, time, kind })
    }

    fn ns(time: u64) -> Duration {
        Duration::from_nanos(time)
    }

    #[test]
    fn pause_under_way_is_left_out() {
        let under_way = |name, began| PhaseUnderWay {
            domain: 0,
            name,
            began,
            seen: 1000,
        };
        let mut pauses = GcPauses::within(&[
            under_way("explicit_gc_full_major", 100),
            under_way("major", 150),
        ]);
        assert_eq!(pauses.left_out(1200).collect::<Vec<_>>(), [(0, ns(200))]);
        assert_eq!(add(&mut pauses, 0, 1100, BEGIN("major_slice")), None);
        assert_eq!(add(&mut pauses, 0, 1300, END("major_slice")), None);
        assert_eq!(add(&mut pauses, 0, 1400, END("major")), None);
        assert_eq!(
            add(&mut pauses, 0, 1500, END("explicit_gc_full_major")),
            None
        );
        assert_eq!((pauses.all().count(), pauses.under_way().count()), (0, 0));
        assert_eq!(pauses.left_out(9999).collect::<Vec<_>>(), [(0, ns(500))]);
        assert_eq!(
            pauses.phases().map(|it| it.0).collect::<Vec<_>>(),
            ["major_slice"]
        );
        add(&mut pauses, 0, 2000, BEGIN("minor"));
        assert_eq!(pauses.left_out(2100).collect::<Vec<_>>(), [(0, ns(600))]);
        assert_eq!(
            add(&mut pauses, 0, 2200, END("minor")).unwrap().time,
            ns(200)
        );
        assert_eq!((pauses.all().count(), pauses.all().total()), (1, ns(200)));
    }

    #[test]
    fn pause_is_the_outermost_phase() {
        let mut pauses = GcPauses::default();
        for (time, kind) in [
            (100, BEGIN("stw_leader")),
            (110, BEGIN("minor")),
            (150, END("minor")),
            (150, BEGIN("minor")),
            (155, END("minor")),
        ] {
            assert_eq!(add(&mut pauses, 3, time, kind), None);
        }
        assert_eq!(pauses.under_way().collect::<Vec<_>>(), [(3, 100)]);
        let pause = add(&mut pauses, 3, 200, END("stw_leader")).unwrap();
        assert_eq!(pauses.under_way().count(), 0);
        let phase = |name, depth, time| PausePhase {
            name,
            depth,
            time: ns(time),
        };
        let phases = vec![
            phase("stw_leader", 0, 100),
            phase("minor", 1, 40),
            phase("minor", 1, 5),
        ];
        assert_eq!(
            pause,
            GcPause {
                domain: 3,
                began: 100,
                time: ns(100),
                phases
            }
        );
        let all = pauses.all();
        assert_eq!((all.count(), all.total(), all.max()), (1, ns(100), ns(100)));
        let phases: Vec<_> = pauses
            .phases()
            .map(|(name, it)| (name, it.count(), it.total()))
            .collect();
        assert_eq!(phases, [("minor", 2, ns(45)), ("stw_leader", 1, ns(100))]);
    }

    // The rings are read one after the other.
    #[test]
    fn phases_end_where_events_are_resumed() {
        let mut pauses = GcPauses::default();
        add(&mut pauses, 1, 10, BEGIN("minor"));
        add(&mut pauses, 1, 20, END("minor"));
        let resumed = RuntimeEventKind::Lifecycle("ring_resume", None);
        assert_eq!(add(&mut pauses, 0, 100, resumed), None);
        // The end of a phase that began before may not have been written.
        add(&mut pauses, 1, 50, BEGIN("major_slice"));
        assert_eq!(pauses.under_way().count(), 0);
        add(&mut pauses, 1, 110, BEGIN("minor"));
        let pause = add(&mut pauses, 1, 130, END("minor")).unwrap();
        assert_eq!((pause.began, pause.time), (110, ns(20)));
        // A phase that ended before the resume counts as usual.
        add(&mut pauses, 2, 60, BEGIN("minor"));
        assert_eq!(add(&mut pauses, 2, 90, END("minor")).unwrap().time, ns(30));
    }

    #[test]
    fn each_of_several_pauses_of_events_counts() {
        let mut pauses = GcPauses::default();
        for time in [100, 110, 200, 210] {
            let what = if time % 100 == 0 {
                "ring_pause"
            } else {
                "ring_resume"
            };
            let kind = RuntimeEventKind::Lifecycle(what, None);
            add(&mut pauses, 0, time, kind);
        }
        // The end of the first, and the begin of the second, were not written.
        add(&mut pauses, 1, 50, BEGIN("minor"));
        assert_eq!(add(&mut pauses, 1, 120, END("minor")), None);
        // Nor was the end of this one.
        add(&mut pauses, 1, 130, BEGIN("major"));
        add(&mut pauses, 2, 50, BEGIN("major"));
        add(&mut pauses, 2, 150, BEGIN("minor"));
        let pause = add(&mut pauses, 2, 160, END("minor")).unwrap();
        assert_eq!((pause.began, pause.time), (150, ns(10)));
        add(&mut pauses, 1, 220, BEGIN("minor"));
        assert_eq!(add(&mut pauses, 1, 230, END("minor")).unwrap().time, ns(10));
    }

    #[test]
    fn phases_of_domains_do_not_mix() {
        let mut pauses = GcPauses::default();
        add(&mut pauses, 0, 10, BEGIN("minor"));
        add(&mut pauses, 1, 11, BEGIN("minor"));
        assert_eq!(add(&mut pauses, 0, 20, END("minor")).unwrap().time, ns(10));
        assert_eq!(add(&mut pauses, 1, 31, END("minor")).unwrap().time, ns(20));
        let counts: Vec<_> = pauses
            .domains()
            .map(|(number, it)| (number, it.pauses.count()))
            .collect();
        assert_eq!(counts, [(0, 1), (1, 1)]);
    }

    #[test]
    fn phases_that_lost_an_end_are_dropped() {
        let mut pauses = GcPauses::default();
        // The beginning was before the first event.
        assert_eq!(add(&mut pauses, 0, 5, END("minor")), None);
        add(&mut pauses, 0, 10, BEGIN("major"));
        add(&mut pauses, 0, 11, BEGIN("minor"));
        pauses.add(&RingEntry::Lost {
            domain: 0,
            words: 7,
        });
        assert_eq!(add(&mut pauses, 0, 30, END("major")), None);
        add(&mut pauses, 0, 40, BEGIN("major"));
        add(&mut pauses, 0, 41, BEGIN("minor"));
        // The end of the inner one is missing.
        assert_eq!(add(&mut pauses, 0, 50, END("major")), None);
        for what in ["domain_terminate", "ring_pause", "ring_resume"] {
            add(&mut pauses, 0, 60, BEGIN("major"));
            add(&mut pauses, 0, 61, RuntimeEventKind::Lifecycle(what, None));
            assert_eq!(add(&mut pauses, 0, 62, END("major")), None, "{what}");
        }
        // Time does not go back.
        add(&mut pauses, 0, 70, BEGIN("major"));
        assert_eq!(add(&mut pauses, 0, 69, END("major")), None);
        assert_eq!(pauses.all().count(), 0);
        let (_, domain) = pauses.domains().next().unwrap();
        assert_eq!(domain.lost_words, 7);
        add(&mut pauses, 0, 80, BEGIN("major"));
        assert_eq!(add(&mut pauses, 0, 90, END("major")).unwrap().time, ns(10));
    }

    #[test]
    fn waiting_for_work_is_no_pause() {
        let mut pauses = GcPauses::default();
        add(&mut pauses, 0, 10, BEGIN(IDLE));
        assert_eq!(add(&mut pauses, 0, 9_999, END(IDLE)), None);
        assert_eq!(pauses.all().count(), 0);
    }

    #[test]
    fn hostile_phases_take_bounded_memory() {
        let mut pauses = GcPauses::default();
        for time in 0..100_000 {
            add(&mut pauses, 0, time, BEGIN("major"));
            add(&mut pauses, 0, time, BEGIN("minor"));
            add(&mut pauses, 0, time, END("minor"));
        }
        let (_, domain) = pauses.domains().next().unwrap();
        assert!(
            domain.open.len() <= super::super::open_phases::MAX_OPEN
                && domain.inner.len() <= MAX_PHASES
        );
    }

    #[test]
    fn allocation_is_summed_and_heap_is_the_last() {
        let mut pauses = GcPauses::default();
        assert_eq!(pauses.heap(), None);
        let counter = RuntimeEventKind::Counter;
        for domain in [0, 1] {
            for value in [5, 100] {
                for name in [
                    "minor_allocated",
                    "minor_promoted",
                    "major_heap_pool_words",
                    "major_heap_large_words",
                ] {
                    add(&mut pauses, domain, 1, counter(name, value));
                }
            }
        }
        let sums: Vec<_> = pauses
            .domains()
            .map(|(_, it)| (it.allocated, it.promoted))
            .collect();
        assert_eq!(sums, [(105, 105), (105, 105)]);
        assert_eq!(pauses.heap(), Some(2 * 200 * 8));
        add(
            &mut pauses,
            1,
            2,
            RuntimeEventKind::Lifecycle("domain_terminate", Some(1)),
        );
        assert_eq!(pauses.heap(), Some(200 * 8));
    }

    #[test]
    fn quantiles_are_close_and_maximum_exact() {
        let mut times = GcTimes::default();
        assert_eq!((times.per_mille(500), times.max()), (ns(0), ns(0)));
        (1..=100_000).for_each(|time| times.add(ns(time * 1_000)));
        assert_eq!(times.max(), ns(100_000_000));
        for part in [1, 500, 900, 990, 999, 1000] {
            let exact = (part * 100_000_u64).div_ceil(1000) * 1_000;
            let found = times.per_mille(part).as_nanos() as u64;
            assert!(
                found <= exact && exact - found <= exact / 500,
                "{part}: {found} {exact}"
            );
        }
        let alike = GcTimes::of([(ns(7), 3), (ns(9), 1)], ns(30), ns(9));
        let figures = (alike.count(), alike.total(), alike.per_mille(500));
        assert_eq!((figures, alike.max()), ((4, ns(30), ns(7)), ns(9)));
        let mut both = times.clone();
        both.merge(&times);
        assert_eq!(
            (both.count(), both.per_mille(500)),
            (200_000, times.per_mille(500))
        );
    }
}
