//! What `count`, `latency` and `watch` have in common: a process is observed until it is over, looked at
//! now and then, and everything is put back, whatever has happened.

use std::iter;
use std::time::{Duration, Instant};

use probes_lib::{Object, Observation, Observed, Observer, Options, SourceMap, Target};

use super::put_back::{Endings, Over, nothing_is_left};
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
    endings: Endings,
    begun: Instant,
    duration: Option<Duration>,
    messages: Messages,
}

/// What is done with what has been learnt when it was looked at.
pub(super) enum Next {
    GoOn,
    /// There is enough.
    Enough,
}

/// Why there is nothing more to learn.
enum End {
    /// The time is over, somebody has told it to end, or there is enough.
    Asked,
    Exited,
    /// What was counted cannot be read, as in a process that has executed another program.
    Unread(probes_lib::Error),
}

/// Writes what is shown of an observation before it is over, unless nobody reads it when it is over.
pub(super) struct Pen<'e> {
    endings: &'e Endings,
    end: Option<Instant>,
}

impl Pen<'_> {
    /// Writes lines to standard output; [`Next::Enough`] if it is over before there is room for them.
    pub(super) fn write(&self, text: &str) -> Result<Next, Failure> {
        // poll(2) tells of a pipe that it can be written if there is room for PIPE_BUF.
        const PIECE: usize = 4096;
        let mut rest = text;
        while !rest.is_empty() {
            let mut len = rest.len().min(PIECE);
            while !rest.is_char_boundary(len) {
                len -= 1;
            }
            if !self.endings.wait_to_write(self.end)? {
                return Ok(Next::Enough);
            }
            output::print(&rest[..len])?;
            rest = &rest[len..];
        }
        Ok(Next::GoOn)
    }
}

/// Opens a process to observe it.
pub(super) fn open(pid: i32, messages: &Messages) -> Result<Target, Failure> {
    let target = Target::open_to_change(pid);
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
        let endings = Endings::hold_back()?;
        let failed = |error| Failure::Target(Subject::Process(target.pid()), error);
        let observer = target.observe(observation, Options::default());
        let observer = observer.map_err(failed)?;
        messages.note(&format!("stopped {} us", observer.stopped().as_micros()));
        Ok(Observing {
            target,
            observer,
            endings,
            begun: Instant::now(),
            duration,
            messages,
        })
    }

    /// Reads every `pause` and has `show` show it, until it is over; puts everything back then. `None` if
    /// that cannot be, as the process has ended: then there is what was seen last.
    pub(super) fn until_it_is_over<T>(
        mut self,
        pause: Duration,
        read: impl FnMut(&mut Observer<'t>) -> probes_lib::Result<T>,
        show: impl FnMut(T, &Pen<'_>, Duration) -> Result<Next, Failure>,
    ) -> Result<Option<Observed>, Failure> {
        let over = self.watch(pause, read, show);
        // Whatever has gone wrong so far, it is put back.
        let removed = self.observer.remove();
        self.endings.let_through();
        let failed = |error| Failure::Target(Subject::Process(self.target.pid()), error);
        let gone = removed.as_ref().err();
        let gone = gone.and_then(|error| nothing_is_left(error.kind()));
        match (over, removed, gone) {
            (Ok(End::Asked | End::Exited), Ok(observed), _) => Ok(Some(observed)),
            (Ok(End::Unread(error)), Ok(_), _) => Err(failed(error)),
            (Ok(End::Exited | End::Unread(_)), Err(_), Some(what)) => {
                let last = "this is what was read last";
                self.messages.note(&format!("the process {what}: {last}"));
                Ok(None)
            }
            (Err(failure), Ok(_), _) => Err(failure),
            (_, Err(error), _) => Err(failed(error)),
        }
    }

    fn watch<T>(
        &mut self,
        pause: Duration,
        mut read: impl FnMut(&mut Observer<'t>) -> probes_lib::Result<T>,
        mut show: impl FnMut(T, &Pen<'_>, Duration) -> Result<Next, Failure>,
    ) -> Result<End, Failure> {
        let pen = Pen {
            endings: &self.endings,
            end: self
                .duration
                .and_then(|after| self.begun.checked_add(after)),
        };
        let end = self.duration.unwrap_or(Duration::MAX);
        let mut next = pause;
        loop {
            let left = end.min(next).saturating_sub(self.begun.elapsed());
            match self.endings.wait(iter::once(self.target), left)? {
                Over::Time => {}
                Over::Told => return Ok(End::Asked),
                Over::Exited => return Ok(End::Exited),
            }
            if self.begun.elapsed() >= end {
                return Ok(End::Asked);
            }
            let at = self.begun.elapsed();
            let seen = match read(&mut self.observer) {
                Ok(seen) => seen,
                Err(error) => return Ok(End::Unread(error)),
            };
            if let Next::Enough = show(seen, &pen, at)? {
                return Ok(End::Asked);
            }
            next = after(at, pause);
        }
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
    fn it_is_looked_at_once_in_each_pause() {
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
