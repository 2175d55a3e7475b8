//! [`CollectorEvents`]: what the garbage collector of OCaml 5 does from one sample to the next, by runtime events.
//! `top` reads them if they are on, and does not switch them on.

use std::collections::BTreeMap;
use std::time::Duration;

use probes_lib::{GcPauses, RingEntry, RuntimeEvents, Target};

use super::model::CollectorFigures;
use crate::clock::monotonic_now;

/// While no events come, the flag is read at least once in this many figures.
const LONGEST_UNREAD: u32 = 32;

/// Reads the events of a process.
pub(super) struct CollectorEvents {
    target: Target,
    events: RuntimeEvents,
    work: CollectorActivity,
}

/// What was read.
#[derive(Debug, Default)]
struct CollectorActivity {
    pauses: GcPauses,
    /// When the last figures were taken, in nanoseconds of CLOCK_MONOTONIC.
    since: u64,
    /// How long each domain was in pauses since then.
    paused: BTreeMap<u32, Duration>,
    longest: Duration,
    /// What was allocated until then, in bytes.
    allocated: u64,
    /// Since the events were opened.
    lost_words: u64,
    silence: Silence,
}

/// For how long no events have come. A program that pauses its events writes no event about that: its flag is read
/// now and then.
#[derive(Debug, Default)]
struct Silence {
    /// Whether an event was read since the last figures.
    is_broken: bool,
    /// How many times figures were taken since the last event.
    figures: u32,
    /// Whether events were paused when the flag was last read.
    events_are_paused: bool,
}

/// Whether there is a collector to show.
pub(super) enum FoundCollector {
    Events(Box<CollectorEvents>),
    /// The runtime could write events, but they are off or paused.
    EventsAreOff,
    /// There are none, or they cannot be read.
    Nothing,
}

impl CollectorEvents {
    /// Opens the events of a process, from now on.
    pub(super) fn find(target: &Target) -> FoundCollector {
        match target.check_events() {
            Ok(true) => {}
            Ok(false) => return FoundCollector::EventsAreOff,
            Err(_) => return FoundCollector::Nothing,
        }
        let Ok(events) = RuntimeEvents::of_process(target.pid()) else {
            return FoundCollector::Nothing;
        };
        let since = monotonic_now();
        let work = CollectorActivity {
            since,
            pauses: GcPauses::within(events.under_way()),
            ..CollectorActivity::default()
        };
        let target = target.clone();
        FoundCollector::Events(Box::new(CollectorEvents {
            target,
            events,
            work,
        }))
    }

    /// Reads what was written since the last call.
    ///
    /// # Errors
    ///
    /// If the events cannot be read any more.
    pub(super) fn read(&mut self) -> probes_lib::Result<()> {
        let work = &mut self.work;
        let read = self.events.read(|entry| work.add(&entry));
        work.pauses.match_requests();
        read
    }

    /// The figures since the last call.
    pub(super) fn figures(&mut self) -> CollectorFigures {
        let now = monotonic_now();
        // Reads what was written until now: of what is read later, only what is later than these figures counts. If
        // it cannot be read, the next reading says so.
        let _ = self.read();
        let target = &self.target;
        let are_off = || matches!(target.check_events(), Ok(false));
        self.work.figures(now, are_off)
    }
}

impl CollectorActivity {
    fn add(&mut self, entry: &RingEntry<'_>) {
        self.silence.is_broken = true;
        if let RingEntry::Lost { words, .. } = *entry {
            self.lost_words = self.lost_words.saturating_add(words);
        }
        if let Some(pause) = self.pauses.add(entry) {
            self.add_pause(pause.domain, pause.began, pause.time);
        }
    }

    /// Adds a pause that has ended, or the part so far of one that is under way. Only its time after the last figures
    /// counts as time in pauses, but all of it for the longest pause.
    fn add_pause(&mut self, domain: u32, began: u64, time: Duration) {
        let before = Duration::from_nanos(self.since.saturating_sub(began));
        *self.paused.entry(domain).or_default() += time.saturating_sub(before);
        self.longest = self.longest.max(time);
    }

    /// The figures since the last call, at `now` in nanoseconds of CLOCK_MONOTONIC. `are_paused` reads the flag of
    /// the program.
    fn figures(&mut self, now: u64, are_paused: impl FnOnce() -> bool) -> CollectorFigures {
        let events_are_paused = self.silence.are_paused(are_paused);
        // While events are paused, the ends of pauses are not written.
        let under_way = self.pauses.under_way().filter(|_| !events_are_paused);
        for (domain, began) in under_way.collect::<Vec<_>>() {
            let time = Duration::from_nanos(now.saturating_sub(began));
            self.add_pause(domain, began, time);
        }
        let seconds = Duration::from_nanos(now.saturating_sub(self.since));
        let seconds = seconds.as_secs_f64().max(0.001);
        let most = self.paused.iter().max_by_key(|(_, paused)| **paused);
        let (domain, paused) = most.map_or((0, Duration::ZERO), |(domain, it)| (*domain, *it));
        let domains = self.pauses.domains().map(|(_, domain)| domain.allocated);
        let allocated = domains.fold(0, u64::saturating_add);
        let new = allocated.saturating_sub(self.allocated);
        let figures = CollectorFigures {
            domain,
            share: (paused.as_secs_f64() / seconds).min(1.0),
            longest: self.longest,
            allocated: new as f64 / seconds,
            lost_words: self.lost_words,
            events_are_paused,
        };
        self.since = now;
        self.paused.clear();
        self.longest = Duration::ZERO;
        self.allocated = allocated;
        figures
    }
}

impl Silence {
    /// Whether events are paused; to be called for all figures. The flag is read only while no events come, first at
    /// once and then less and less often, since its address is looked up in the program's symbols.
    fn are_paused(&mut self, read: impl FnOnce() -> bool) -> bool {
        if std::mem::take(&mut self.is_broken) {
            *self = Silence::default();
        } else {
            self.figures = self.figures.saturating_add(1);
            if self.figures.is_power_of_two() || self.figures % LONGEST_UNREAD == 0 {
                self.events_are_paused = read();
            }
        }
        self.events_are_paused
    }
}

#[cfg(test)]
mod tests {
    use probes_lib::RuntimeEventKind;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn event(domain: u32, time: u64, kind: RuntimeEventKind<'static>) -> RingEntry<'static> {
        RingEntry::Event { domain, time, kind }
    }

    #[test]
    fn figures_are_those_of_the_interval() {
        let mut work = CollectorActivity {
            since: SECOND,
            ..CollectorActivity::default()
        };
        let pause = |work: &mut CollectorActivity, domain, from, to| {
            work.add(&event(domain, from, RuntimeEventKind::Begin("minor")));
            work.add(&event(domain, to, RuntimeEventKind::End("minor")));
        };
        // A tenth of a second of the first pause was before.
        pause(&mut work, 0, SECOND - SECOND / 10, SECOND + SECOND / 10);
        pause(&mut work, 1, SECOND, SECOND + SECOND / 4);
        pause(&mut work, 1, 2 * SECOND, 2 * SECOND + SECOND / 4);
        for bytes in [1_000, 3_000] {
            let counter = RuntimeEventKind::Counter("minor_allocated", bytes);
            work.add(&event(0, 2 * SECOND, counter));
        }
        let figures = work.figures(3 * SECOND, || panic!("not in silence"));
        let expected = CollectorFigures {
            domain: 1,
            share: 0.25,
            longest: Duration::from_millis(250),
            allocated: 2_000.0,
            lost_words: 0,
            events_are_paused: false,
        };
        assert_eq!(figures, expected);
        // Losses stay.
        work.add(&RingEntry::Lost {
            domain: 0,
            words: 7,
        });
        for at in [4, 5] {
            let figures = work.figures(at * SECOND, || false);
            assert_eq!((figures.share, figures.allocated), (0.0, 0.0));
            assert_eq!(figures.lost_words, 7);
        }
    }

    #[test]
    fn pauses_count_while_they_are_under_way() {
        let mut work = CollectorActivity::default();
        let half = SECOND / 2;
        work.add(&event(2, half, RuntimeEventKind::Begin("compact")));
        let expected = [(SECOND, 0.5, half), (2 * SECOND, 1.0, 3 * half)];
        for (now, share, longest) in expected {
            let figures = work.figures(now, || false);
            let longest = Duration::from_nanos(longest);
            assert_eq!(
                (figures.domain, figures.share, figures.longest),
                (2, share, longest)
            );
        }
        work.add(&event(2, 5 * half, RuntimeEventKind::End("compact")));
        let figures = work.figures(3 * SECOND, || false);
        assert_eq!(
            (figures.share, figures.longest),
            (0.5, 2 * Duration::from_secs(1))
        );
        assert_eq!(work.figures(4 * SECOND, || false).share, 0.0);
        // Its end is not written while events are paused.
        work.add(&event(2, 4 * SECOND, RuntimeEventKind::Begin("compact")));
        assert_eq!(
            work.figures(5 * SECOND, || panic!("not in silence")).share,
            1.0
        );
        assert_eq!(work.figures(6 * SECOND, || true).share, 0.0);
    }

    #[test]
    fn paused_events_are_noticed_in_silence() {
        let mut silence = Silence::default();
        let reads: Vec<u32> = (1..=100)
            .filter(|_| {
                let mut was_read = false;
                silence.are_paused(|| {
                    was_read = true;
                    true
                });
                was_read
            })
            .collect();
        assert_eq!(reads, [1, 2, 4, 8, 16, 32, 64, 96]);
        assert!(silence.events_are_paused);
        silence.is_broken = true;
        assert!(!silence.are_paused(|| true));
        assert!(silence.are_paused(|| true));
    }
}
