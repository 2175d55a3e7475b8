//! `count`: how often probes are hit.

use std::io::{IsTerminal, stdout};
use std::time::Duration;

use probes_lib::{Counts, Observation, SourceMap, Target};

use super::Failure;
use super::live::Live;
use super::observing::{self, LOOKING, Next, Observing, Pen, RENEWAL};
use crate::output::{self, Counted, Format};
use crate::request::Count;

pub(super) fn run(request: &Count) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let target = observing::open(request.pid, &messages)?;
    let selectors = request.selectors.iter().cloned();
    let observation = selectors.fold(Observation::new(), Observation::count);
    let observing = Observing::begin(&target, &observation, request.duration, messages)?;
    let mut counting = Counting::begin(request, &target);
    let outcome = observing.until_it_is_over(
        counting.pause(),
        |observer| observer.counts(),
        |counts, pen, at| counting.look(counts, pen, at),
    )?;
    let total = match outcome.observed {
        Some(observed) => Some((observed.counts, outcome.lasted)),
        None => counting.last.take(),
    };
    if let Some((counts, all)) = total.filter(|_| outcome.is_read) {
        counting.show_total(&counts, all)?;
    }
    outcome.failure.map_or(Ok(()), Err)
}

/// What is shown of an observation.
struct Counting<'c> {
    request: &'c Count,
    target: &'c Target,
    /// Of each object, if sites are shown.
    sources: Vec<Option<SourceMap>>,
    /// Whether it is shown as a table that is renewed.
    is_live: bool,
    /// What was seen last, and when.
    last: Option<(Counts, Duration)>,
    live: Live,
}

impl<'c> Counting<'c> {
    fn begin(request: &'c Count, target: &'c Target) -> Counting<'c> {
        let sources = match request.sites {
            true => observing::sources(target),
            false => Vec::new(),
        };
        Counting {
            request,
            target,
            sources,
            is_live: request.answer.format == Format::Table && stdout().is_terminal(),
            last: None,
            live: Live::default(),
        }
    }

    /// How often it is shown, if it is before the end.
    fn shown(&self) -> Option<Duration> {
        self.request.interval.or(self.is_live.then_some(RENEWAL))
    }

    /// How often it is looked at.
    fn pause(&self) -> Duration {
        self.shown().unwrap_or(LOOKING)
    }

    fn look(&mut self, counts: Counts, pen: &mut Pen, at: Duration) -> Result<Next, Failure> {
        let next = match self.shown() {
            Some(_) => self.show(&counts, pen, at)?,
            None => Next::GoOn,
        };
        self.last = Some((counts, at));
        Ok(next)
    }

    /// What was counted since it was shown last; live, all that was counted, and how often lately.
    fn show(&mut self, counts: &Counts, pen: &mut Pen, at: Duration) -> Result<Next, Failure> {
        let since = self.last.as_ref().map_or(Duration::ZERO, |(_, at)| *at);
        let last = self.last.as_ref().map(|(counts, _)| counts);
        let counted = Counted::new(self.target, counts, &self.sources);
        if self.is_live {
            return self
                .live
                .renew(&counted.lately(last, at - since).table(), pen);
        }
        let counted = counted.since(last, at - since).at(at);
        pen.write(&output::counted(self.request.answer.format, &counted)?)
    }

    /// All that was counted.
    fn show_total(&self, counts: &Counts, all: Duration) -> Result<(), Failure> {
        let counted = Counted::new(self.target, counts, &self.sources).since(None, all);
        let text = output::counted(self.request.answer.format, &counted)?;
        output::print(&(self.live.erased() + &text))
    }
}
