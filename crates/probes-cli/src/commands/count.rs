//! `count`: how often probes are hit.

use std::io::{IsTerminal, stdout};
use std::iter;
use std::time::{Duration, Instant};

use probes_lib::{Counts, Object, Observation, Observer, Options, SourceMap, Target};

use super::put_back::{Endings, Over};
use super::{Failure, Subject, say_what};
use crate::output::{self, Counted, Format};
use crate::request::Count;

/// How often the table on a terminal is renewed, unless it is said.
const RENEWAL: Duration = Duration::from_secs(1);

pub(super) fn run(request: &Count) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let failed = |error| Failure::Target(Subject::Process(request.pid), error);
    let target = Target::open_to_change(request.pid).map_err(failed)?;
    say_what(&messages, &target);
    // From here on, so that everything is put back whenever they come.
    let endings = Endings::hold_back()?;
    let selectors = request.selectors.iter().cloned();
    let observation = selectors.fold(Observation::new(), Observation::count);
    let observer = target
        .observe(&observation, Options::default())
        .map_err(failed)?;
    messages.note(&format!("stopped {} us", observer.stopped().as_micros()));
    let mut counting = Counting::begin(request, &target);
    let over = counting.until_it_is_over(&observer, &endings);
    // Whatever has gone wrong so far, it is put back.
    let counts = match (&over, observer.remove()) {
        (_, Ok(observed)) => observed.counts,
        (Ok(Over::Exited), Err(_)) => {
            messages.note("the process has ended: this is what was read last");
            match counting.last.take() {
                Some(last) => last.counts,
                None => return over.map(drop),
            }
        }
        (_, Err(error)) => return Err(failed(error)),
    };
    over?;
    counting.show_total(&counts)
}

/// What is shown of an observation.
struct Counting<'c> {
    request: &'c Count,
    target: &'c Target,
    /// Of each object, if sites are shown.
    sources: Vec<Option<SourceMap>>,
    begun: Instant,
    last: Option<Last>,
    /// How many lines of a table are on the terminal.
    lines: usize,
}

/// What was shown last, and when.
struct Last {
    counts: Counts,
    at: Duration,
}

impl<'c> Counting<'c> {
    fn begin(request: &'c Count, target: &'c Target) -> Counting<'c> {
        let source = |object: &Object| object.source_map().ok();
        let objects = target.objects();
        let objects = objects.iter().filter(|_| request.sites);
        Counting {
            request,
            target,
            sources: objects.map(source).collect(),
            begun: Instant::now(),
            last: None,
            lines: 0,
        }
    }

    /// Shows what is counted, now and then.
    fn until_it_is_over(
        &mut self,
        observer: &Observer<'_>,
        endings: &Endings,
    ) -> Result<Over, Failure> {
        let is_live = self.request.answer.format == Format::Table && stdout().is_terminal();
        let shown = self.request.interval.or(is_live.then_some(RENEWAL));
        // What was counted until then is all there is of a process that ends.
        let pause = shown.unwrap_or(RENEWAL);
        let mut next = pause;
        loop {
            let end = self.request.duration.unwrap_or(Duration::MAX);
            let left = end.min(next).saturating_sub(self.begun.elapsed());
            match endings.wait(iter::once(self.target), left)? {
                Over::Time => {}
                over => return Ok(over),
            }
            if self.begun.elapsed() >= end {
                return Ok(Over::Time);
            }
            let Ok(counts) = observer.counts() else {
                // It has ended, which is told of next, or executed another program.
                return Ok(Over::Exited);
            };
            let at = self.begun.elapsed();
            if shown.is_some() {
                self.show(&counts, at, is_live)?;
            }
            self.last = Some(Last { counts, at });
            while next <= at {
                next += pause;
            }
        }
    }

    /// What was counted since it was shown last; live, all that was counted.
    fn show(&mut self, counts: &Counts, at: Duration, is_live: bool) -> Result<(), Failure> {
        let last = self.last.as_ref();
        let since = last.map_or(Duration::ZERO, |last| last.at);
        let counted = Counted::new(self.target, counts, &self.sources)
            .since(last.map(|last| &last.counts), at - since)
            .at(at);
        if !is_live {
            return output::print_counted(self.request.answer.format, &counted);
        }
        self.lines = output::print_live(&counted, self.lines)?;
        Ok(())
    }

    /// All that was counted.
    fn show_total(&self, counts: &Counts) -> Result<(), Failure> {
        let all = self.begun.elapsed();
        let counted = Counted::new(self.target, counts, &self.sources).since(None, all);
        match self.lines {
            0 => output::print_counted(self.request.answer.format, &counted),
            lines => output::print_live(&counted, lines).map(drop),
        }
    }
}
