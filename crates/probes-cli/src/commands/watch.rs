//! `watch`: the hits of probes, one by one.

use std::time::{Duration, Instant};

use probes_lib::{Event, Events, Observation};

use super::Failure;
use super::observing::{self, Next, Observing};
use crate::output::{self, Format, Hits};
use crate::request::{Answer, Watch};

/// How often hits are read: what the process holds of them lasts for longer than this, if there are not
/// some millions a second.
pub(super) const READING: Duration = Duration::from_millis(2);

/// How often it is said what was lost or skipped.
const TELLING: Duration = Duration::from_secs(1);

pub(super) fn run(request: &Watch) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let target = observing::open(request.pid, &messages)?;
    let selectors = request.selectors.iter().cloned();
    let observation = selectors.fold(Observation::new(), Observation::watch);
    let observing = Observing::begin(&target, &observation, request.duration, messages)?;
    let hits = Hits::new(request.answer.format, observing::sources(&target));
    let mut watching = Watching::begin(hits, request.answer, output::print);
    (watching.limit, watching.rate) = (request.limit, request.rate);
    let outcome = observing.until_it_is_over(
        READING,
        |observer| observer.events(),
        |events, pen, _| watching.show(events, |text| pen.write(text)),
    )?;
    // It was told to end otherwise while nobody read what it had to show.
    if outcome.is_read {
        if let Some(observed) = outcome.observed {
            watching.show_all(observed.events)?;
        }
        watching.tell()?;
    }
    outcome.failure.map_or(Ok(()), Err)
}

/// Writes text where hits are shown.
type Print = fn(&str) -> Result<(), Failure>;

/// What is shown of the hits.
pub(super) struct Watching {
    hits: Hits,
    answer: Answer,
    print: Print,
    /// How many are shown, if not all.
    limit: Option<u64>,
    /// How many are shown in a second, if not all.
    rate: Option<u64>,
    shown: u64,
    /// In the second that `begun` was the beginning of.
    shown_now: u64,
    begun: Instant,
    told: Instant,
    lost: u64,
    skipped: u64,
}

impl Watching {
    pub(super) fn begin(hits: Hits, answer: Answer, print: Print) -> Watching {
        Watching {
            hits,
            answer,
            print,
            limit: None,
            rate: None,
            shown: 0,
            shown_now: 0,
            begun: Instant::now(),
            told: Instant::now(),
            lost: 0,
            skipped: 0,
        }
    }

    /// Shows hits by `write`, which says whether there is enough.
    pub(super) fn show(
        &mut self,
        events: Events,
        write: impl FnOnce(&str) -> Result<Next, Failure>,
    ) -> Result<Next, Failure> {
        self.lost = self.lost.saturating_add(events.dropped);
        let mut text = String::new();
        for event in &events.events {
            if self.has_enough() {
                break;
            }
            match self.is_wanted() {
                true => self.line(event, &mut text)?,
                false => self.skipped += 1,
            }
        }
        if self.told.elapsed() >= TELLING {
            text.push_str(&self.missing()?);
        }
        if let Next::Enough = write(&text)? {
            return Ok(Next::Enough);
        }
        Ok(match self.has_enough() {
            true => Next::Enough,
            false => Next::GoOn,
        })
    }

    /// Shows hits where there is always room.
    pub(super) fn show_all(&mut self, events: Events) -> Result<(), Failure> {
        let print = self.print;
        self.show(events, |text| print(text).map(|()| Next::GoOn))
            .map(drop)
    }

    fn line(&mut self, event: &Event, text: &mut String) -> Result<(), Failure> {
        self.shown += 1;
        self.shown_now += 1;
        text.push_str(&self.hits.line(event)?);
        Ok(())
    }

    fn has_enough(&self) -> bool {
        self.limit.is_some_and(|limit| self.shown >= limit)
    }

    /// Whether the next may be shown in this second.
    fn is_wanted(&mut self) -> bool {
        let Some(rate) = self.rate else {
            return true;
        };
        if self.begun.elapsed() >= Duration::from_secs(1) {
            (self.begun, self.shown_now) = (Instant::now(), 0);
        }
        self.shown_now < rate
    }

    /// Says what was not shown since it was said last.
    pub(super) fn tell(&mut self) -> Result<(), Failure> {
        let text = self.missing()?;
        (self.print)(&text)
    }

    /// The same, but for what is to be among the hits.
    fn missing(&mut self) -> Result<String, Failure> {
        self.told = Instant::now();
        let (lost, skipped) = (
            std::mem::take(&mut self.lost),
            std::mem::take(&mut self.skipped),
        );
        if (lost, skipped) == (0, 0) {
            return Ok(String::new());
        }
        if self.answer.format == Format::Json {
            return self.hits.missing(lost, skipped);
        }
        if skipped > 0 {
            self.answer
                .messages
                .note(&format!("{skipped} hits were skipped"));
        }
        if lost > 0 {
            let hint = "watch fewer probes, or count them, which loses none";
            self.answer
                .messages
                .warning(&format!("{lost} hits were lost"), hint);
        }
        Ok(String::new())
    }
}
