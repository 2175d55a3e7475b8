//! `trace -count`, `-latency` and `-watch`: what is learnt of a program from its first instruction to its
//! last.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use probes_lib::{Installed, Launch, Launched, Observation, Observer, Target};

use super::clean::say_still_mapped;
use super::observing::{LOOKING, sources};
use super::trace::say_started;
use super::wait::Wait;
use super::watch::{READING, Watching};
use super::{Failure, Subject};
use crate::output::{self, Counted, Format, Hits, Latencies};
use crate::request::{Answer, Observed};

/// What is to be learnt.
fn observation(wanted: &Observed) -> Observation {
    let mut observation = Observation::new();
    if wanted.counts {
        observation = observation.count(probes_lib::Selector::All);
    }
    for (start, stop) in &wanted.pairs {
        observation = observation.time(start, stop);
    }
    let watched = wanted.watched.iter().cloned();
    watched.fold(observation, Observation::watch)
}

/// Starts a program, waits for its end and says what was learnt; returns the status to exit with.
pub(super) fn run(
    launch: Launch,
    wait: Wait,
    wanted: &Observed,
    answer: Answer,
    program: &Path,
) -> Result<u8, Failure> {
    let failed = |error| Failure::Target(Subject::Program(program.to_owned()), error);
    let begun = Instant::now();
    let launched = launch.observe(observation(wanted)).spawn();
    let mut launched = launched.map_err(failed)?;
    let said = say_started(answer, program, launched.report());
    let observed = launched.observed();
    let status = match observed {
        Some((target, installed)) => {
            let learning = Learning::begin(&target, wanted, answer, begun);
            until_the_end(launched, wait, learning, installed)
        }
        None => wait.until_the_end(launched),
    };
    if let Err(failure) = said {
        // The program has run, and whoever waits for us waits for its status.
        answer.messages.error(&failure.to_string(), failure.hint());
    }
    status.map_err(|source| Failure::Waiting("wait for the program", source))
}

fn until_the_end(
    launched: Launched,
    wait: Wait,
    learning: Learning<'_>,
    installed: Installed,
) -> std::io::Result<u8> {
    let (alive, ended) = channel::<()>();
    std::thread::scope(|scope| {
        let learn = move || {
            let answer = learning.answer;
            let learnt = learning.learn(installed, &ended);
            if let Err(failure) = learnt {
                answer.messages.error(&failure.to_string(), failure.hint());
            }
        };
        std::thread::Builder::new().spawn_scoped(scope, learn)?;
        let status = wait.until_the_end(launched);
        drop(alive);
        status
    })
}

/// Tells what is learnt.
struct Learning<'l> {
    target: &'l Target,
    wanted: &'l Observed,
    answer: Answer,
    watching: Watching,
    begun: Instant,
}

impl<'l> Learning<'l> {
    fn begin(
        target: &'l Target,
        wanted: &'l Observed,
        answer: Answer,
        begun: Instant,
    ) -> Learning<'l> {
        let hits = Hits::new(answer.format, sources(target));
        Learning {
            target,
            wanted,
            answer,
            watching: Watching::begin(hits, answer, printer(answer.format)),
            begun,
        }
    }

    fn learn(mut self, installed: Installed, ended: &Receiver<()>) -> Result<(), Failure> {
        let mut observer = installed.observer(self.target);
        while ended.recv_timeout(self.pause()) == Err(RecvTimeoutError::Timeout) {
            self.watch(&mut observer)?;
        }
        let all = self.begun.elapsed();
        let observed = observer.remove();
        let pid = self.target.pid();
        let observed = observed.map_err(|error| Failure::Target(Subject::Process(pid), error))?;
        say_still_mapped(&self.answer.messages, pid, observed.still_mapped);
        let (format, print) = (self.answer.format, printer(self.answer.format));
        self.watching.show_all(observed.events)?;
        self.watching.tell()?;
        if self.wanted.counts {
            let counted = Counted::new(self.target, &observed.counts, &[]).since(None, all);
            print(&output::counted(format, &counted)?)?;
        }
        if !observed.latencies.is_empty() {
            let latencies = Latencies::new(self.target, &observed.latencies, all);
            print(&output::latencies(format, &latencies)?)?;
        }
        Ok(())
    }

    fn pause(&self) -> Duration {
        match self.wanted.watched.is_empty() {
            true => LOOKING,
            false => READING,
        }
    }

    /// What cannot be read, because the process has just ended, is read in the end.
    fn watch(&mut self, observer: &mut Observer<'_>) -> Result<(), Failure> {
        if let (false, Ok(events)) = (self.wanted.watched.is_empty(), observer.events()) {
            self.watching.show_all(events)?;
        }
        Ok(())
    }
}

/// Standard output is the program's, too: nothing of ours goes there unless it is asked for.
fn printer(format: Format) -> fn(&str) -> Result<(), Failure> {
    match format {
        Format::Json => output::print,
        Format::Plain | Format::Table => output::print_beside,
    }
}
