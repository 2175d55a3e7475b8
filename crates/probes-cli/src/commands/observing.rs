//! What `count`, `latency` and `watch` have in common: a process is observed until it is over, looked at
//! now and then, and everything is put back, whatever has happened.

use std::fs::File;
use std::io::{self, IsTerminal, Write, stdout};
use std::iter;
use std::time::{Duration, Instant};

use probes_lib::{
    Effect, ErrorKind, Object, Observation, Observed, Observer, Options, SourceMap, Target,
};

use super::clean::say_still_mapped;
use super::put_back::{Endings, Over, nothing_is_left, patiently};
use super::{Failure, Subject, say_what};
use crate::messages::Messages;
use crate::output;

/// How often a process is looked at that ends some day: what was learnt until then is all there is.
pub(super) const LOOKING: Duration = Duration::from_millis(200);

/// How often a table on a terminal is renewed, unless it is said.
pub(super) const RENEWAL: Duration = Duration::from_secs(1);

/// A process that is observed.
pub(super) struct Observing<'t> {
    target: &'t Target,
    observer: Observer<'t>,
    begun: Instant,
    duration: Option<Duration>,
    pen: Pen,
    messages: Messages,
}

/// What is done with what has been learnt when it was looked at.
pub(super) enum Next {
    GoOn,
    /// There is enough.
    Enough,
}

/// Writes what is shown of an observation before it is over, unless nobody reads it when it is over.
pub(super) struct Pen {
    endings: Endings,
    end: Option<Instant>,
    /// If standard output is one.
    terminal: Option<File>,
    is_read: bool,
}

impl Pen {
    fn take(endings: Endings) -> Result<Pen, Failure> {
        let terminal = stdout().is_terminal().then(output::terminal).transpose();
        Ok(Pen {
            endings,
            end: None,
            terminal: terminal.map_err(Failure::Output)?,
            is_read: true,
        })
    }

    /// Writes lines to standard output; [`Next::Enough`] if it is over before there is room for them.
    pub(super) fn write(&mut self, text: &str) -> Result<Next, Failure> {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            if let Some(over) = self.endings.wait_to_write(self.end)? {
                self.is_read = !matches!(over, Over::Told);
                return Ok(Next::Enough);
            }
            match self.write_some(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if is_for_later(&error) => {}
                Err(error) => return Err(Failure::Output(error)),
            }
        }
        Ok(Next::GoOn)
    }

    /// Where there is room now.
    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        // poll(2) tells of a pipe that it can be written if there is room for PIPE_BUF.
        const PIECE: usize = 4096;
        if let Some(terminal) = &self.terminal {
            let mut terminal = terminal;
            return terminal.write(bytes);
        }
        let piece = &bytes[..bytes.len().min(PIECE)];
        let mut output = stdout().lock();
        output.write_all(piece)?;
        output.flush()?;
        Ok(piece.len())
    }
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// What has come of an observation.
pub(super) struct Outcome {
    /// `None` if the process is gone: then there is what was read last.
    pub(super) observed: Option<Observed>,
    /// How long it took.
    pub(super) lasted: Duration,
    /// Whether nobody had to tell it to end because what it showed was not read.
    pub(super) is_read: bool,
    /// What is to be told in the end: why it was not removed.
    pub(super) failure: Option<Failure>,
}

/// Opens a process to observe it.
pub(super) fn open(pid: i32, messages: &Messages) -> Result<Target, Failure> {
    let target = Target::open(pid).map_err(|error| error.leaving(Effect::NothingChanged));
    let target = target.map_err(|error| Failure::Target(Subject::Process(pid), error))?;
    say_what(messages, &target);
    Ok(target)
}

/// The source lines of each object.
pub(super) fn sources(target: &Target) -> Vec<Option<SourceMap>> {
    let source = |object: &Object| object.source_map().ok();
    target.objects().iter().map(source).collect()
}

impl<'t> Observing<'t> {
    /// Observes a process, for so long or until told to end.
    pub(super) fn begin(
        target: &'t Target,
        observation: &Observation,
        duration: Option<Duration>,
        messages: Messages,
    ) -> Result<Observing<'t>, Failure> {
        // From here on, so that everything is put back whenever they come.
        let mut pen = Pen::take(Endings::hold_back()?)?;
        let failed = |error| Failure::Target(Subject::Process(target.pid()), error);
        let observer = target.observe(observation, Options::default());
        let observer = observer.map_err(failed)?;
        messages.note(&format!("stopped {} us", observer.stopped().as_micros()));
        let begun = Instant::now();
        pen.end = duration.and_then(|after| begun.checked_add(after));
        Ok(Observing {
            target,
            observer,
            begun,
            duration,
            pen,
            messages,
        })
    }

    /// Reads every `pause` and has `show` show it, until it is over; puts everything back then.
    pub(super) fn until_it_is_over<T>(
        mut self,
        pause: Duration,
        read: impl FnMut(&mut Observer<'t>) -> probes_lib::Result<T>,
        show: impl FnMut(T, &mut Pen, Duration) -> Result<Next, Failure>,
    ) -> Result<Outcome, Failure> {
        let unread = self.watch(pause, read, show);
        let lasted = self.begun.elapsed();
        // Whatever has gone wrong so far, it is put back.
        let endings = &self.pen.endings;
        let removed = patiently(endings, &self.messages, || self.observer.remove());
        self.pen.endings.let_through();
        let pid = self.target.pid();
        let failed = |error| Failure::Target(Subject::Process(pid), error);
        let mut failure = None;
        let observed = match removed {
            Ok(observed) => {
                say_still_mapped(&self.messages, pid, observed.still_mapped);
                match unread? {
                    Some(error) => return Err(failed(error)),
                    None => Some(observed),
                }
            }
            Err(error) => {
                let last = "this is what was read last";
                match nothing_is_left(error.kind()) {
                    Some(what) => {
                        unread?;
                        self.messages.note(&format!("the process {what}: {last}"));
                    }
                    None => {
                        self.messages.note(last);
                        failure = Some(not_removed(pid, error));
                    }
                }
                None
            }
        };
        Ok(Outcome {
            observed,
            lasted,
            is_read: self.pen.is_read,
            failure,
        })
    }

    /// What cannot be read, if that is why there is nothing more to learn.
    fn watch<T>(
        &mut self,
        pause: Duration,
        mut read: impl FnMut(&mut Observer<'t>) -> probes_lib::Result<T>,
        mut show: impl FnMut(T, &mut Pen, Duration) -> Result<Next, Failure>,
    ) -> Result<Option<probes_lib::Error>, Failure> {
        let end = self.duration.unwrap_or(Duration::MAX);
        let mut next = pause;
        loop {
            let left = end.min(next).saturating_sub(self.begun.elapsed());
            let over = self.pen.endings.wait(iter::once(self.target), left)?;
            let at = self.begun.elapsed();
            if !matches!(over, Over::Time) || at >= end {
                return Ok(None);
            }
            let seen = match read(&mut self.observer) {
                Ok(seen) => seen,
                Err(error) => return Ok(Some(error)),
            };
            if let Next::Enough = show(seen, &mut self.pen, at)? {
                return Ok(None);
            }
            next = after(at, pause);
        }
    }
}

/// What has kept an observation from being removed: the process stays observed, unless it is observed by
/// another or has nothing left but memory.
pub(super) fn not_removed(pid: i32, error: probes_lib::Error) -> Failure {
    let is_anothers = matches!(error.kind(), ErrorKind::ObserverReplaced { .. });
    match is_anothers || error.effect() == Effect::StillMapped {
        true => Failure::Target(Subject::Process(pid), error),
        false => Failure::NotRemoved(pid, error),
    }
}

/// The next of the times that are `pause` apart.
fn after(at: Duration, pause: Duration) -> Duration {
    let passed = at.as_nanos() % pause.as_nanos().max(1);
    let left = pause.as_nanos().saturating_sub(passed);
    // The rest of a pause: there is such a time for each that was asked for.
    at.saturating_add(Duration::from_nanos(
        u64::try_from(left).unwrap_or(u64::MAX),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_read_once_in_each_interval() {
        let ms = Duration::from_millis;
        assert_eq!(after(ms(1000), ms(1000)), ms(2000));
        assert_eq!(after(ms(1001), ms(1000)), ms(2000));
        assert_eq!(after(ms(5900), ms(1000)), ms(6000));
        assert_eq!(
            after(ms(7), Duration::from_nanos(1)),
            ms(7) + Duration::from_nanos(1)
        );
        assert_eq!(after(Duration::MAX, ms(1)), Duration::MAX);
    }
}
