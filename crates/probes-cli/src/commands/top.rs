//! `top`: how often probes are hit, live, and a key to switch each.

mod events;
mod keys;
mod model;
mod screen;
mod session;
mod terminal;

use std::ffi::OsStr;
use std::io::{self, IsTerminal, stdin, stdout};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use probes_lib::{Latency, Observation, Target};

use self::events::{Event, Events, Over, stop};
use self::model::{Model, Times, Wish};
use self::screen::{Head, Scroll};
use self::session::Session;
use self::terminal::Screen;
use super::clean::say_still_mapped;
use super::put_back::{Endings, nothing_is_left};
use super::{Failure, Subject, few, observing};
use crate::messages::{Level, Messages};
use crate::request::Top;

pub(super) fn run(request: &Top) -> Result<(), Failure> {
    let pid = request.pid;
    refuse_no_terminal(pid)?;
    let messages = request.messages;
    let failed = |error| Failure::Target(Subject::Process(pid), error);
    let target = observing::open(pid, &messages)?;
    // From here on, so that everything is put back whenever they come.
    let endings = Endings::hold_back()?;
    let exit = target.pidfd().map_err(failed)?;
    let mut events = Events::new(&endings, exit)?;
    let mut session = Session::begin(&target, &observation(request)).map_err(failed)?;
    messages.step(format_args!("stopped {} us", session.stopped().as_micros()));
    let (over, is_given_back) = match Screen::take(endings.as_fd()) {
        Ok(screen) => Live::begin(request, &target, screen, &mut session).run(&mut events),
        Err(error) => (Err(Failure::Waiting("set up the terminal", error)), false),
    };
    // On a terminal that takes nothing, words would keep us here.
    let messages = match (&over, is_given_back) {
        (Ok(_), false) => Messages::new(Level::Errors),
        _ => messages,
    };
    // Whatever has gone wrong so far, it is put back.
    end(&mut session, over, &endings, &messages, pid)
}

/// What is to be learnt.
fn observation(request: &Top) -> Observation {
    let selectors = request.selectors.iter().cloned();
    let counted = selectors.fold(Observation::new(), Observation::count);
    let pairs = request.pairs.iter();
    pairs.fold(counted, |all, (start, stop)| all.time(start, stop))
}

fn refuse_no_terminal(pid: i32) -> Result<(), Failure> {
    let streams = [
        ("standard input", stdin().is_terminal()),
        ("standard output", stdout().is_terminal()),
    ];
    let found = streams.iter().find(|(_, is_terminal)| !is_terminal);
    let is_dumb = std::env::var_os("TERM").is_some_and(|name| name == OsStr::new("dumb"));
    match found {
        Some((stream, _)) => Err(Failure::NoTerminal(format!("{stream} is none"), pid)),
        None if is_dumb => Err(Failure::NoTerminal("TERM says it is dumb".to_owned(), pid)),
        None => Ok(()),
    }
}

/// Puts back what was switched, and what counts; says so.
fn end(
    session: &mut Session<'_>,
    over: Result<Over, Failure>,
    endings: &Endings,
    messages: &Messages,
    pid: i32,
) -> Result<(), Failure> {
    let removed = session.remove(endings, messages);
    let error = removed.as_ref().err();
    if let Some(what) = error.and_then(|error| nothing_is_left(error.kind())) {
        session.forget();
        messages.note(&format!("process {pid} {what}"));
        return over.map(drop);
    }
    let back = session.switch_back(endings, messages);
    match removed {
        Ok(still_mapped) => say_still_mapped(messages, pid, still_mapped),
        Err(error) => {
            if let Err(failure) = back {
                messages.error(&failure.to_string(), failure.hint());
            }
            return Err(observing::not_removed(pid, error));
        }
    }
    if let Some(names) = few(&back?) {
        messages.note(&format!("put back as they were found: {names}"));
    }
    match over? {
        Over::Lost => messages.step(format_args!("the terminal has gone")),
        Over::Told => messages.step(format_args!("told to end")),
        Over::Quit | Over::Exited => {}
    }
    Ok(())
}

/// A screen that shows what is counted.
struct Live<'l, 't> {
    interval: Duration,
    session: &'l mut Session<'t>,
    screen: Screen,
    head: Head,
    model: Model,
    scroll: Scroll,
}

impl<'l, 't> Live<'l, 't> {
    fn begin(
        request: &Top,
        target: &Target,
        screen: Screen,
        session: &'l mut Session<'t>,
    ) -> Live<'l, 't> {
        let program = target.program();
        let name = program.file_name().unwrap_or(program.as_os_str());
        let sample = session.sample();
        let names = sample.iter().flat_map(|(_, counts, _)| counts.probes());
        Live {
            interval: request.interval,
            model: Model::new(names.map(|(name, _)| name)),
            session,
            screen,
            head: Head {
                program: name.to_string_lossy().into_owned(),
                pid: target.pid(),
            },
            scroll: Scroll::default(),
        }
    }

    /// Says why it is over, and whether the terminal could be given back.
    fn run(mut self, events: &mut Events<'_>) -> (Result<Over, Failure>, bool) {
        let over = self.until_it_is_over(events);
        (over, self.screen.give_back())
    }

    fn until_it_is_over(&mut self, events: &mut Events<'_>) -> Result<Over, Failure> {
        self.look_at_states();
        // `None`: after more time than there is.
        let mut next = Instant::now().checked_add(self.interval);
        loop {
            // Before keys are looked for, which may come without a pause.
            if next.is_some_and(|next| next <= Instant::now()) {
                if !self.sample() {
                    // It has ended, or executed another program.
                    return Ok(Over::Exited);
                }
                // From now on: where looking takes long, it is not all that we do.
                next = Instant::now().checked_add(self.interval);
            }
            let (head, model, scroll) = (&self.head, &self.model, &mut self.scroll);
            let drawn = self
                .screen
                .draw(|frame| screen::draw(frame, head, model, scroll));
            if let Err(error) = drawn {
                return Ok(lost(&error));
            }
            let left = next.map_or(Duration::MAX, |next| {
                next.saturating_duration_since(Instant::now())
            });
            let done = match events.wait(left)? {
                Event::Over(over) => return Ok(over),
                Event::Time => Ok(None),
                Event::Keys(keys) => self.press(&keys),
                Event::Suspend => self.screen.lend(|| stop(false)).map(|()| None),
                Event::Redraw { was_stopped: true } => self.screen.lend(|| ()).map(|()| None),
                Event::Redraw { was_stopped: false } => Ok(None),
            };
            match done {
                Ok(None) => {}
                Ok(Some(over)) => return Ok(over),
                Err(error) => return Ok(lost(&error)),
            }
        }
    }

    /// Says whether the process is still there.
    fn sample(&mut self) -> bool {
        let Some((at, counts, latencies)) = self.session.sample() else {
            return false;
        };
        self.model.time(latencies.iter().map(times).collect());
        self.model.count(at, |name| counts.hits(name));
        self.look_at_states();
        true
    }

    fn look_at_states(&mut self) {
        if let Some(states) = self.session.states() {
            let state = |name: &str| states.probe(name).map(|probe| probe.state());
            self.model.set_states(state);
        }
    }

    fn press(&mut self, keys: &[keys::Key]) -> io::Result<Option<Over>> {
        for &key in keys {
            match self.model.press(key, self.scroll.page) {
                None => {}
                Some(Wish::Quit) => return Ok(Some(Over::Quit)),
                Some(Wish::Suspend) => self.screen.lend(|| stop(true))?,
                Some(Wish::Redraw) => self.screen.lend(|| ())?,
                Some(Wish::Switch { name, on }) => self.switch(&name, on),
            }
        }
        Ok(None)
    }

    fn switch(&mut self, name: &str, on: bool) {
        let said = match self.session.switch(name, on) {
            Ok((before, after)) if !on && after > 0 => {
                format!("{name} {before} -> {after}: still on, as others have enabled it too")
            }
            Ok((before, after)) => format!("{name} {before} -> {after}"),
            Err(error) => error.to_string(),
        };
        self.model.say(said);
        self.look_at_states();
    }
}

fn times(latency: &Latency) -> Times {
    Times {
        start: latency.start().to_owned(),
        stop: latency.stop().to_owned(),
        count: latency.count(),
        mean: latency.mean(),
        p50: latency.quantile(0.5),
        p99: latency.quantile(0.99),
        max: latency.max(),
    }
}

/// What it means that the terminal takes nothing.
fn lost(error: &io::Error) -> Over {
    match error.kind() {
        // By who could not wait any longer.
        io::ErrorKind::TimedOut => Over::Told,
        _ => Over::Lost,
    }
}
