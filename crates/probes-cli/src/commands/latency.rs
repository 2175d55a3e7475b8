//! `latency`: how long it takes from one probe to another.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write, stdout};
use std::path::PathBuf;
use std::time::Duration;

use probes_lib::{Latency, Observation, Target};

use super::Failure;
use super::live::Live;
use super::observing::{self, LOOKING, Next, Observing, Pen, RENEWAL};
use crate::output::{self, Format, Latencies};
use crate::request;

pub(super) fn run(request: &request::Latency) -> Result<(), Failure> {
    let messages = request.answer.messages;
    let target = observing::open(request.pid, &messages)?;
    // Before anything is changed: it may be that it cannot be written.
    let picture = request.picture.clone().map(Picture::create).transpose()?;
    let pairs = request.pairs.iter();
    let observation = pairs.fold(Observation::new(), |all, (start, stop)| {
        all.time(start, stop)
    });
    let observing = Observing::begin(&target, &observation, request.duration, messages)?;
    let mut timing = Timing {
        request,
        target: &target,
        is_live: request.answer.format == Format::Table && stdout().is_terminal(),
        last: None,
        live: Live::default(),
    };
    let pause = timing.shown().unwrap_or(LOOKING);
    let outcome = observing.until_it_is_over(
        pause,
        |observer| observer.latencies(),
        |latencies, pen, at| timing.look(latencies, pen, at),
    )?;
    let total = match outcome.observed {
        Some(observed) => Some((observed.latencies, outcome.lasted)),
        None => timing.last.take(),
    };
    if let Some((latencies, all)) = total {
        let latencies = Latencies::new(&target, &latencies, all);
        if let Some(picture) = picture {
            picture.write(&latencies.picture())?;
        }
        if outcome.is_read {
            let text = output::latencies(request.answer.format, &latencies)?;
            output::print(&(timing.live.erased() + &text))?;
        }
    }
    outcome.failure.map_or(Ok(()), Err)
}

/// What is shown of an observation.
struct Timing<'t> {
    request: &'t request::Latency,
    target: &'t Target,
    /// Whether it is shown as a table that is renewed.
    is_live: bool,
    /// What was seen last, and when.
    last: Option<(Vec<Latency>, Duration)>,
    live: Live,
}

impl Timing<'_> {
    /// How often it is shown, if it is before the end.
    fn shown(&self) -> Option<Duration> {
        self.request.interval.or(self.is_live.then_some(RENEWAL))
    }

    /// All times so far.
    fn look(
        &mut self,
        latencies: Vec<Latency>,
        pen: &mut Pen,
        at: Duration,
    ) -> Result<Next, Failure> {
        let mut next = Next::GoOn;
        if self.shown().is_some() {
            let shown = Latencies::new(self.target, &latencies, at).so_far();
            next = match self.is_live {
                true => self.live.renew(&shown.table(), pen)?,
                false => pen.write(&output::latencies(self.request.answer.format, &shown)?)?,
            };
        }
        self.last = Some((latencies, at));
        Ok(next)
    }
}

/// A file for a picture.
struct Picture {
    path: PathBuf,
    file: File,
}

impl Picture {
    fn create(path: PathBuf) -> Result<Picture, Failure> {
        // What was there stays until there is a new one.
        let mut file = OpenOptions::new();
        match file.write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(Picture { path, file }),
            Err(error) => Err(Failure::File(path, error)),
        }
    }

    fn write(mut self, picture: &str) -> Result<(), Failure> {
        // A pipe or a terminal has no length.
        let _ = self.file.set_len(0);
        let written = self.file.write_all(picture.as_bytes());
        written.map_err(|error| Failure::File(self.path, error))
    }
}
