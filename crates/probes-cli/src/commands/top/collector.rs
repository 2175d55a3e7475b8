//! [`CollectorEvents`]: what the garbage collector of OCaml 5 does from one sample to the next, by runtime events.
//! `top` reads them if they are on, and does not switch them on.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::time::ClockId;
use probes_lib::{GcPause, GcPauses, RingEntry, RuntimeEventKind, RuntimeEvents, Target};

use super::model::CollectorFigures;
use crate::clock::nanoseconds;

/// Reads the events of a process.
pub(super) struct CollectorEvents {
    events: RuntimeEvents,
    work: CollectorWork,
}

/// What was read.
#[derive(Debug, Default)]
struct CollectorWork {
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
    /// Whether the program has paused its events.
    is_stopped: bool,
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
        let since = nanoseconds(ClockId::CLOCK_MONOTONIC);
        let work = CollectorWork {
            since,
            ..CollectorWork::default()
        };
        FoundCollector::Events(Box::new(CollectorEvents { events, work }))
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
        self.work.figures(nanoseconds(ClockId::CLOCK_MONOTONIC))
    }
}

impl CollectorWork {
    fn add(&mut self, entry: &RingEntry<'_>) {
        match *entry {
            RingEntry::Lost { words, .. } => {
                self.lost_words = self.lost_words.saturating_add(words);
            }
            RingEntry::Event {
                kind: RuntimeEventKind::Lifecycle(what, _),
                ..
            } => match what {
                "ring_pause" => self.is_stopped = true,
                "ring_resume" => self.is_stopped = false,
                _ => {}
            },
            _ => {}
        }
        if let Some(pause) = self.pauses.add(entry) {
            self.add_pause(&pause);
        }
    }

    /// Adds a pause: to the time in pauses only what is later than the last figures, but to the longest all of it.
    fn add_pause(&mut self, pause: &GcPause) {
        let before = Duration::from_nanos(self.since.saturating_sub(pause.began));
        *self.paused.entry(pause.domain).or_default() += pause.time.saturating_sub(before);
        self.longest = self.longest.max(pause.time);
    }

    /// The figures since the last call, at `now` in nanoseconds of CLOCK_MONOTONIC.
    fn figures(&mut self, now: u64) -> CollectorFigures {
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
            is_stopped: self.is_stopped,
        };
        self.since = now;
        self.paused.clear();
        self.longest = Duration::ZERO;
        self.allocated = allocated;
        figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn event(domain: u32, time: u64, kind: RuntimeEventKind<'static>) -> RingEntry<'static> {
        RingEntry::Event { domain, time, kind }
    }

    #[test]
    fn figures_are_those_of_the_interval() {
        let mut work = CollectorWork {
            since: SECOND,
            ..CollectorWork::default()
        };
        let pause = |work: &mut CollectorWork, domain, from, to| {
            work.add(&event(domain, from, RuntimeEventKind::Begin("minor")));
            work.add(&event(domain, to, RuntimeEventKind::End("minor")));
        };
        // Of the first one, a tenth of a second was before.
        pause(&mut work, 0, SECOND - SECOND / 10, SECOND + SECOND / 10);
        pause(&mut work, 1, SECOND, SECOND + SECOND / 4);
        pause(&mut work, 1, 2 * SECOND, 2 * SECOND + SECOND / 4);
        for bytes in [1_000, 3_000] {
            let counter = RuntimeEventKind::Counter("minor_allocated", bytes);
            work.add(&event(0, 2 * SECOND, counter));
        }
        let figures = work.figures(3 * SECOND);
        let expected = CollectorFigures {
            domain: 1,
            share: 0.25,
            longest: Duration::from_millis(250),
            allocated: 2_000.0,
            lost_words: 0,
            is_stopped: false,
        };
        assert_eq!(figures, expected);
        // Losses stay.
        work.add(&RingEntry::Lost {
            domain: 0,
            words: 7,
        });
        work.add(&event(
            0,
            3 * SECOND,
            RuntimeEventKind::Lifecycle("ring_pause", None),
        ));
        for at in [4, 5] {
            let figures = work.figures(at * SECOND);
            assert_eq!((figures.share, figures.allocated), (0.0, 0.0));
            assert_eq!((figures.lost_words, figures.is_stopped), (7, true));
        }
    }
}
