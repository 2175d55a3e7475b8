//! `top`: shows live how often probes are hit; a key enables or disables the selected probe.

mod collector;
mod inputs;
mod keys;
mod model;
mod screen;
mod session;
mod terminal;

use std::ffi::OsStr;
use std::io::{self, IsTerminal, stdin, stdout};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use probes_lib::{Functions, Latency, Observation, Target};

use self::collector::{Collector, Found};
use self::inputs::{End, Input, Inputs, Stop, stop};
use self::model::{Model, PairLatency, Request};
use self::screen::{RowSources, Scroll, ShownProgram};
use self::session::{Sample, Session};
use self::terminal::Screen;
use super::closures::warn_of_refused_closures;
use super::gaps::GapWarning;
use super::observe_loop::{READ_INTERVAL, next_reading, warn_of_still_mapped};
use super::open_target::open_to_observe;
use super::uncounted::warn_of_uncounted;
use crate::failure::{Failure, exit_or_exec};
use crate::flags::{
    Checked, CountedFlags, FilterFlags, OneProcess, PairFlags, SeccompFlag, TakeOver,
    VerbosityFlags, duration, with_regexp_help,
};
use crate::messages::{Level, MessageForm, Messages};
use crate::output::{Evidence, FunctionSources};
use crate::signals::TerminationSignals;
use crate::text::join_first_few;

/// Redrawing the screen more often than this costs time and shows nothing more.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// How often runtime events are read: a ring holds more than what is written in this time.
const EVENTS_INTERVAL: Duration = Duration::from_millis(20);

const HELP: &str = "\
Counts as `count` does, and shows for each probe whether it is enabled, its hits, hits a second, its share of
all hits, and its latest rates; with -fn the same of functions, with their source lines, and of more than
24 only those that have been called; below, for each pair the number of times, their mean, median, 99th
percentile and maximum. With -where, as in `count`, only hits for which it is true are counted, and it is shown
how many were untyped; times of pairs are those of all hits. Of a program of OCaml 5 whose runtime events are on, a line
says what the collector does: the share of the time in pauses, of the domain with the most, the longest pause and
what is allocated a second, all since the last redraw. Keys:
    arrows j k PgUp PgDn Home End   select a probe
    e Enter space                   enable the selected probe, or the only one, or disable it
    s, r                            sort by rate, hits or name; reverse the order
    /                               filter by a part of the name: Enter keeps it, Esc drops it
    p                               pause: the screen does not change, counting goes on
    ?                               show the keys that work now, until Esc
    Ctrl-Z, Ctrl-L                  suspend, redraw
    Esc                             clear the filter; quit if there is none
    q Ctrl-C                        quit

When top ends (by a key, SIGINT, SIGTERM, SIGHUP, SIGQUIT, or because its terminal is gone), it
undoes everything: it removes the instrumentation, and restores the probes that it has
enabled or disabled, and names them. Unless you quit with a key, the figures read last stay on the terminal,
also when the process exits. If top is killed by SIGKILL, the process goes on counting, which does
no harm, and probes stay as they are; the next count or top removes the instrumentation.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "ocaml-probes top -pid N [FLAGS]", after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    process: OneProcess,
    #[command(flatten)]
    counted: Checked<CountedFlags>,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    pairs: Checked<PairFlags>,
    /// How often the screen is redrawn
    #[arg(long, value_name = "DURATION", value_parser = screen_interval, default_value = "1s")]
    interval: Duration,
    #[command(flatten)]
    seccomp: SeccompFlag,
    #[command(flatten)]
    take_over: TakeOver,
    #[command(flatten)]
    pub(super) messages: Checked<VerbosityFlags>,
}

fn screen_interval(typed: &str) -> Result<Duration, String> {
    let interval = duration(typed)?;
    if interval < SHORTEST_INTERVAL {
        let shortest = humantime::format_duration(SHORTEST_INTERVAL);
        return Err(format!(
            "{typed} is too short for a screen; {shortest} is the shortest"
        ));
    }
    Ok(interval)
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let pid = args.process.pid;
    refuse_no_terminal(pid)?;
    let mut messages = *args.messages;
    let failed = Failure::of_process(pid);
    let needs_probes = args.counted.needs_probes() || !args.pairs.is_empty();
    let target = open_to_observe(pid, needs_probes, &messages)?;
    // Before anything is changed, so that a signal cannot keep it from being undone.
    let signals = TerminationSignals::block()?;
    let exit = target.pidfd().map_err(&failed)?;
    let mut inputs = Inputs::new(&signals, exit)?;
    let mut session = Session::begin(
        &target,
        &observation(args),
        args.seccomp.options(args.take_over.options()),
    )
    .map_err(&failed)?;
    warn_of_refused_closures(&messages, pid, session.code_digest());
    messages.step(format_args!("stopped {} us", session.stopped().as_micros()));
    if let (true, Some(observer)) = (args.counted.has_functions(), session.observer()) {
        warn_of_uncounted(&messages, observer, "counted");
    }
    let (end, is_restored) = match Screen::take(signals.as_fd()) {
        Ok(screen) => View::new(args, &target, screen, &mut session).run(&mut inputs),
        Err(error) => (Err(Failure::System("set up the terminal", error)), false),
    };
    if end.is_ok() && !is_restored {
        // The terminal could not be restored, so it accepts no output: a write would block.
        messages = Messages::new(Level::Errors, MessageForm::Text);
    }
    // Also if something has failed before.
    undo(&mut session, end, &signals, &messages, pid)
}

fn observation(args: &Args) -> Observation {
    let counted = args.filter.of(args.counted.observation());
    args.pairs.of(counted)
}

fn refuse_no_terminal(pid: i32) -> Result<(), Failure> {
    let streams = [
        ("standard input", stdin().is_terminal()),
        ("standard output", stdout().is_terminal()),
    ];
    let found = streams.iter().find(|(_, is_terminal)| !is_terminal);
    let is_dumb = std::env::var_os("TERM").is_some_and(|name| name == OsStr::new("dumb"));
    match found {
        Some((stream, _)) => Err(Failure::NoTerminal(format!("{stream} is not one"), pid)),
        None if is_dumb => Err(Failure::NoTerminal("TERM is \"dumb\"".to_owned(), pid)),
        None => Ok(()),
    }
}

/// Removes the observation and switches probes back; prints what it has done.
fn undo(
    session: &mut Session<'_>,
    end: Result<End, Failure>,
    signals: &TerminationSignals,
    messages: &Messages,
    pid: i32,
) -> Result<(), Failure> {
    let removed = session.remove(signals, messages);
    if let Some(gaps) = session.gaps() {
        GapWarning::default().update(messages, &gaps);
    }
    if let Some(exit_or_exec) = removed.as_ref().err().and_then(exit_or_exec) {
        session.forget();
        let figures = if leaves_figures(&end) {
            ": these are the figures read last"
        } else {
            ""
        };
        messages.note(&format!("process {pid} {exit_or_exec}{figures}"));
        return end.map(drop);
    }
    let switched_back = session.switch_back(signals, messages);
    match removed {
        Ok(still_mapped) => warn_of_still_mapped(messages, pid, still_mapped),
        Err(error) => {
            if let Err(failure) = switched_back {
                messages.failure(&failure);
            }
            return Err(Failure::of_removal(pid, error));
        }
    }
    if let Some(names) = join_first_few(&switched_back?) {
        messages.note(&format!("restored: {names}"));
    }
    match end? {
        End::TerminalLost => messages.step(format_args!("the terminal is gone")),
        End::Interrupted => messages.step(format_args!("interrupted")),
        End::Quit | End::Exited => {}
    }
    Ok(())
}

/// Shows on a screen what is counted.
struct View<'l, 't> {
    interval: Duration,
    session: &'l mut Session<'t>,
    screen: Screen,
    program: ShownProgram,
    model: Model,
    scroll: Scroll,
    /// A reading after the last one that was shown.
    latest: Option<Sample>,
    /// If runtime events are on.
    collector: Option<Box<Collector>>,
}

impl<'l, 't> View<'l, 't> {
    fn new(
        args: &Args,
        target: &Target,
        screen: Screen,
        session: &'l mut Session<'t>,
    ) -> View<'l, 't> {
        let program = target.program();
        let name = program.file_name().unwrap_or(program.as_os_str());
        let sample = session.sample();
        let counts = || sample.iter().map(|sample| &sample.counts);
        let probes = counts().flat_map(|counts| counts.probes().map(|(name, _)| name));
        let functions = counts().flat_map(|counts| counts.functions());
        let functions = functions.map(|function| (function.name, function.address));
        // If it has exited meanwhile, source lines are not known.
        let sources = args
            .counted
            .has_functions()
            .then(|| Functions::of_process(target.pid()));
        let sources = sources.and_then(Result::ok).map(FunctionSources::of);
        let mut model = Model::new(probes, functions);
        let collector = match Collector::find(target) {
            Found::Events(collector) => Some(collector),
            Found::EventsAreOff => {
                model.set_events_off();
                None
            }
            Found::Nothing => None,
        };
        View {
            interval: args.interval,
            model,
            session,
            screen,
            program: ShownProgram {
                name: name.to_string_lossy().into_owned(),
                pid: target.pid(),
                sources: RowSources::of(sources.unwrap_or_default()),
            },
            scroll: Scroll::default(),
            latest: None,
            collector,
        }
    }

    /// Returns why it ended, and whether the terminal could be restored.
    fn run(mut self, inputs: &mut Inputs<'_>) -> (Result<End, Failure>, bool) {
        let end = self.run_until_end(inputs);
        let figures = if leaves_figures(&end) {
            self.last_figures()
        } else {
            String::new()
        };
        (end, self.screen.restore(&figures))
    }

    /// What stays on the terminal.
    fn last_figures(&mut self) -> String {
        self.take_latest();
        self.model.resume();
        let (width, height) = self.screen.size();
        screen::text(&self.program, &self.model, width, height)
    }

    fn run_until_end(&mut self, inputs: &mut Inputs<'_>) -> Result<End, Failure> {
        self.read_states();
        // `None`: never, as the interval is too long to be added to the present time.
        let mut next = Instant::now().checked_add(self.interval);
        let begun = Instant::now();
        let reads_between = self.interval > READ_INTERVAL;
        let mut read_at = reads_between.then_some(begun);
        loop {
            // Sample first: keys that arrive without a pause would delay the samples.
            let now = Instant::now();
            let is_shown = next.is_some_and(|next| next <= now);
            if is_shown || read_at.is_some_and(|next| next <= now) {
                if !self.sample() {
                    return Ok(End::Exited);
                }
                read_at = reads_between.then(|| begun + next_reading(begun.elapsed()));
            }
            if is_shown {
                self.take_latest();
                self.read_states();
                // From now on: if a sample takes longer than the interval, there is still time
                // for keys and drawing.
                next = Instant::now().checked_add(self.interval);
            }
            let (program, model, scroll) = (&self.program, &self.model, &mut self.scroll);
            let drawn = self
                .screen
                .draw(|frame| screen::draw(frame, program, model, scroll));
            if let Err(error) = drawn {
                return Ok(end_after_write_error(&error));
            }
            self.model.close_help_after(self.scroll.help_pages);
            let left = next.into_iter().chain(read_at).min();
            let left = left.map_or(Duration::MAX, |next| {
                next.saturating_duration_since(Instant::now())
            });
            let done = match self.wait(inputs, left)? {
                Input::End(end) => return Ok(end),
                Input::Timeout | Input::Redraw { was_stopped: false } => Ok(None),
                Input::Keys(keys) => self.press(&keys),
                Input::Suspend => self
                    .screen
                    .leave_while(|| stop(Stop::ThisProcess))
                    .map(|()| None),
                Input::Redraw { was_stopped: true } => self.redraw().map(|()| None),
            };
            match done {
                Ok(None) => {}
                Ok(Some(end)) => return Ok(end),
                Err(error) => return Ok(end_after_write_error(&error)),
            }
        }
    }

    /// Waits for input, and reads runtime events meanwhile, of which a ring holds only the latest.
    fn wait(&mut self, inputs: &mut Inputs<'_>, left: Duration) -> Result<Input, Failure> {
        let begun = Instant::now();
        loop {
            let left = left.saturating_sub(begun.elapsed());
            let Some(collector) = &mut self.collector else {
                return inputs.wait(left);
            };
            if collector.read().is_err() {
                // If the process has exited, that is noticed by itself.
                self.collector = None;
            }
            let input = inputs.wait(left.min(EVENTS_INTERVAL))?;
            if !matches!(input, Input::Timeout) || left <= EVENTS_INTERVAL {
                return Ok(input);
            }
        }
    }

    /// Leaves the screen and takes it again, so that all of it is drawn anew.
    fn redraw(&mut self) -> io::Result<()> {
        self.screen.leave_while(|| ())
    }

    /// Reads the figures, because later the process may be gone; returns whether there still is
    /// something to read.
    fn sample(&mut self) -> bool {
        let sample = self.session.sample();
        let is_there = sample.is_some();
        self.latest = sample.or(self.latest.take());
        is_there
    }

    /// Puts the latest reading into the model.
    fn take_latest(&mut self) {
        if let Some(sample) = self.latest.take() {
            let pairs = sample.latencies.iter();
            self.model.set_times(pairs.map(times).collect());
            let collector = self.collector.as_mut();
            self.model
                .set_collector(collector.map(|collector| collector.figures()));
            let gaps = self.session.gaps();
            self.model.set_caution(gaps.and_then(|gaps| gaps.caution()));
            let counts = &sample.counts;
            self.model.set_untyped(counts.total_untyped());
            let functions: Vec<u64> = counts.functions().map(|it| it.hits).collect();
            self.model
                .set_counts(sample.at, |name| counts.hits(name), &functions);
        }
    }

    fn read_states(&mut self) {
        if let Some(states) = self.session.states() {
            let state = |name: &str| states.probe(name).map(|probe| probe.state());
            self.model.set_states(state);
        }
    }

    fn press(&mut self, keys: &[keys::Key]) -> io::Result<Option<End>> {
        for &key in keys {
            match self.model.press(key, self.scroll.page) {
                None => {}
                Some(Request::Quit) => return Ok(Some(End::Quit)),
                Some(Request::Suspend) => self.screen.leave_while(|| stop(Stop::Job))?,
                Some(Request::Redraw) => self.redraw()?,
                Some(Request::Switch { name, on }) => self.switch(&name, on),
            }
        }
        Ok(None)
    }

    fn switch(&mut self, name: &str, on: bool) {
        let said = match self.session.switch(name, on) {
            Ok((before, after)) if !on && after > 0 => {
                format!(
                    "{name} {before} -> {after}: still enabled, because others have enabled it too"
                )
            }
            Ok((before, after)) => format!("{name} {before} -> {after}"),
            Err(error) => error.to_string(),
        };
        self.model.show_message(said);
        self.read_states();
    }
}

fn times(latency: &Latency) -> PairLatency {
    PairLatency {
        start: latency.start().to_owned(),
        stop: latency.stop().to_owned(),
        count: latency.count(),
        mean: latency.mean(),
        p50: latency.quantile(0.5),
        p99: latency.quantile(0.99),
        max: latency.max(),
        evidence: Evidence::of(latency),
    }
}

/// Whether the last figures stay on the terminal: unless the user has ended it, or the terminal is gone.
fn leaves_figures(end: &Result<End, Failure>) -> bool {
    !matches!(end, Ok(End::Quit | End::TerminalLost))
}

/// Why `top` ends when the terminal cannot be written to.
fn end_after_write_error(error: &io::Error) -> End {
    match error.kind() {
        // A signal came, and the write did not wait any longer.
        io::ErrorKind::TimedOut => End::Interrupted,
        _ => End::TerminalLost,
    }
}
