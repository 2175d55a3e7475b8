//! `count`: how often probes are hit.

use std::io::{IsTerminal, stdout};
use std::time::Duration;

use probes_lib::{Counts, Observation, SourceMap, Target};

use super::Failure;
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
    let begun = std::time::Instant::now();
    let observed = observing.until_it_is_over(
        counting.pause(),
        |observer| observer.counts(),
        |counts, pen, at| counting.look(counts, pen, at),
    )?;
    match (observed, counting.last.take()) {
        (Some(observed), _) => counting.show_total(&observed.counts, begun.elapsed()),
        (None, Some((last, at))) => counting.show_total(&last, at),
        (None, None) => Ok(()),
    }
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
    /// How many lines of a table are on the terminal.
    lines: usize,
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
            lines: 0,
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

    fn look(&mut self, counts: Counts, pen: &Pen<'_>, at: Duration) -> Result<Next, Failure> {
        let next = match self.shown() {
            Some(_) => self.show(&counts, pen, at)?,
            None => Next::GoOn,
        };
        self.last = Some((counts, at));
        Ok(next)
    }

    /// What was counted since it was shown last; live, all that was counted.
    fn show(&mut self, counts: &Counts, pen: &Pen<'_>, at: Duration) -> Result<Next, Failure> {
        let last = self.last.as_ref();
        let since = last.map_or(Duration::ZERO, |(_, at)| *at);
        let counted = Counted::new(self.target, counts, &self.sources)
            .since(last.map(|(counts, _)| counts), at - since)
            .at(at);
        if !self.is_live {
            return pen.write(&output::counted(self.request.answer.format, &counted)?);
        }
        self.lines = output::print_live(&counted.table(), self.lines)?;
        Ok(Next::GoOn)
    }

    /// All that was counted.
    fn show_total(&self, counts: &Counts, all: Duration) -> Result<(), Failure> {
        let counted = Counted::new(self.target, counts, &self.sources).since(None, all);
        match self.lines {
            0 => output::print(&output::counted(self.request.answer.format, &counted)?),
            lines => output::print_live(&counted.table(), lines).map(drop),
        }
    }
}
