//! `top`: shows live how often probes are hit; a key enables or disables the selected probe.

mod collector;
mod inputs;
mod keys;
mod model;
mod screen;
mod session;
mod sessions;
mod terminal;

use std::ffi::OsStr;
use std::io::{self, IsTerminal, stdin, stdout};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use probes_lib::{Latency, Observation, ObservationReport, Target};

use self::collector::{CollectorEvents, FoundCollector};
use self::inputs::{End, Input, Inputs, Stop, stop};
use self::model::{Model, PairLatency, Request};
use self::screen::{RowSources, Scroll, ShownProgram};
use self::session::Session;
use self::sessions::{Sessions, TotalReading};
use self::terminal::Screen;
use super::closures::warn_of_refused_closures;
use super::forked_processes::warn_of_unrestored;
use super::gaps::GapWarning;
use super::observation_messages::warn_of_still_mapped;
use super::open_target::open_to_observe;
use super::process_failures::{OTHERS_WERE_OBSERVED, ProcessFailures};
use super::reading_times::{COUNTS_INTERVAL, next_reading};
use super::step_failures::StepFailures;
use super::uncounted::warn_of_uncounted;
use super::undo::retry_each;
use crate::failure::{Failure, exit_or_exec};
use crate::flags::{
    Checked, CountedFlags, FilterFlags, ForkedFlag, OverrideFlags, PairFlags, TargetSelection,
    VerbosityFlags, duration, with_regexp_help,
};
use crate::messages::{Level, MessageForm, Messages};
use crate::output::{Evidence, FunctionSources};
use crate::signals::TerminationSignals;
use crate::text::join_first_few;
use crate::usage::UsageError;

/// Redrawing the screen more often than this costs time and shows nothing more.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// How often runtime events are read: a ring holds more than what is written in this time.
const EVENTS_INTERVAL: Duration = Duration::from_millis(20);

const HELP: &str = "\
Counts as `count` does, and shows for each probe whether it is enabled, its hits, hits a second, its
share of all hits, and its latest rates; with -fn the same of functions, with their source lines,
and of more than 24 only those that have been called; below, for each pair the number of times,
their mean, median, 99th percentile and maximum. With -where, as in `count`, only hits for which it
is true are counted, and it is shown how many were untyped; times of pairs are those of all hits. Of
a program of OCaml 5 whose runtime events are on, a line says what the collector does: the share of
the time in pauses, of the domain with the most, the longest pause and what is allocated a second,
all since the last redraw. With several processes, of -pid and -name, each row has the sum of all of
them, a key switches a probe in all of them, and nothing is said of collectors; with -by pid, each
process has rows of its own, which begin with its pid. One that exits keeps its last hits, and the
others go on. With -follow, it shows the processes that they have forked, too, and those that they
fork meanwhile. Keys:
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
undoes everything: it removes the instrumentation, and restores the probes that it has enabled or
disabled, and names them. Unless you quit with a key, the figures read last stay on the terminal,
also when the process exits. If top is killed by SIGKILL, the process goes on counting, which does
no harm, and probes stay as they are; the next count or top removes the instrumentation.";

#[derive(Debug, clap::Args)]
#[command(override_usage = "\
    ocaml-probes top -pid N [FLAGS]
       ocaml-probes top -pid N -pid M [FLAGS]
       ocaml-probes top -name RE [FLAGS]", after_help = with_regexp_help(HELP))]
#[command(next_help_heading = "Flags")]
pub(crate) struct Args {
    #[command(flatten)]
    selection: Checked<TargetSelection>,
    #[command(flatten)]
    counted: Checked<CountedFlags>,
    #[command(flatten)]
    filter: FilterFlags,
    #[command(flatten)]
    pairs: Checked<PairFlags>,
    /// Show the rows of each process by itself: -by pid
    #[arg(id = "by", long, value_name = "pid", value_parser = by_pid)]
    by: Option<ByPid>,
    /// How often the screen is redrawn
    #[arg(long, value_name = "DURATION", value_parser = screen_interval, default_value = "1s")]
    interval: Duration,
    #[command(flatten)]
    forked: ForkedFlag,
    #[command(flatten)]
    overrides: OverrideFlags,
    #[command(flatten)]
    pub(super) messages: Checked<VerbosityFlags>,
}

/// Rows are distinguished by their processes.
#[derive(Clone, Copy, Debug)]
struct ByPid;

fn by_pid(typed: &str) -> Result<ByPid, String> {
    match typed {
        "pid" => Ok(ByPid),
        _ => Err(format!(
            "\"{typed}\" is not pid: `count -by` counts by other keys"
        )),
    }
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
    refuse_rows_that_come_later(args)?;
    let mut messages = *args.messages;
    let needs_probes = args.counted.needs_probes() || !args.pairs.is_empty();
    let pids = args.selection.pids(needs_probes, &messages)?;
    refuse_no_terminal(pids.first().copied().unwrap_or_default())?;
    let mut failures = ProcessFailures::new(&args.selection, pids.len(), messages);
    if args.forked.follow {
        failures = failures.of_any_number();
    }
    let mut targets = Vec::new();
    for &pid in &pids {
        let opened = open_to_observe(pid, needs_probes, &failures.messages(pid));
        targets.extend(failures.record_unless_exited(pid, opened));
    }
    // Before anything is changed, so that a signal cannot keep it from being undone.
    let signals = TerminationSignals::block()?;
    let exit = match (&pids[..], &targets[..]) {
        ([pid], [target]) if !args.forked.follow => {
            Some(target.pidfd().map_err(Failure::of_process(*pid))?)
        }
        _ => None,
    };
    let mut inputs = Inputs::new(&signals, exit)?;
    let mut sessions = Vec::new();
    for target in &targets {
        let pid = target.pid();
        let options = args.overrides.options();
        let session = Session::begin(target, &observation(args), options);
        let session = session.map_err(Failure::of_process(pid));
        let Some(session) = failures.record_unless_exited(pid, session) else {
            continue;
        };
        let messages = failures.messages(pid);
        warn_of_refused_closures(&messages, pid, session.code_digest());
        messages.step(format_args!("stopped {} us", session.stopped().as_micros()));
        if let (true, Some(observer)) = (args.counted.has_functions(), session.observer()) {
            warn_of_uncounted(&messages, observer, "counted");
        }
        sessions.push(session);
    }
    if sessions.is_empty() {
        return failures.finish(OTHERS_WERE_OBSERVED);
    }
    let mut sessions = Sessions::new(sessions, args.by.is_some());
    if args.forked.follow {
        let options = args.overrides.options();
        sessions.follow(observation(args), options);
    }
    let (end, is_restored) = match Screen::take(signals.as_fd()) {
        Ok(screen) => TopView::new(args, &targets, screen, &mut sessions).run(&mut inputs),
        Err(error) => (Err(Failure::System("set up the terminal", error)), false),
    };
    if end.is_ok() && !is_restored {
        // The terminal could not be restored, so it accepts no output: a write would block.
        messages = Messages::new(Level::Errors, MessageForm::Text);
    }
    // Also if something has failed before.
    let undone = undo(&mut sessions, end, &signals, &messages, &mut failures);
    let mut failed = StepFailures::default();
    failed.add(undone);
    failed.add(failures.finish(OTHERS_WERE_OBSERVED));
    failed.finish(&messages)
}

/// Refuses rows of processes that are found while the screen shows.
fn refuse_rows_that_come_later(args: &Args) -> Result<(), Failure> {
    if args.by.is_none() || args.pairs.is_empty() || !args.forked.follow {
        return Ok(());
    }
    let message = "-by pid cannot be combined with both -follow and -pair: a process that is forked meanwhile would have no row";
    Err(Failure::Usage(UsageError::new(Some("top"), message)))
}

fn observation(args: &Args) -> Observation {
    let counted = args.filter.add_to(args.counted.observation());
    let observation = args.pairs.add_to(counted);
    if args.forked.follow {
        observation.record_forked()
    } else {
        observation
    }
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

/// Removes the observations and switches probes back; prints what it has done.
fn undo(
    sessions: &mut Sessions,
    end: Result<End, Failure>,
    signals: &TerminationSignals,
    messages: &Messages,
    failures: &mut ProcessFailures,
) -> Result<(), Failure> {
    let leaves_figures = leaves_figures(&end);
    let shows_pid = failures.shows_pid();
    let mut have_all_gone = true;
    let messages_of = |pid| {
        if shows_pid {
            messages.about(pid)
        } else {
            messages.with_pid(pid)
        }
    };
    (0..sessions.joined()).for_each(|_| failures.add_process());
    let observed_separately = sessions.observed_separately();
    let mut gone = Vec::new();
    let mut finish = |session: &mut Session, removed| {
        let pid = session.pid();
        let messages = &messages_of(pid);
        let undone = undo_one(session, removed, leaves_figures, signals, messages);
        if let Some(gaps) = session.gaps() {
            let gaps = gaps.without_separate(&observed_separately);
            GapWarning::default().update(messages, &gaps);
        }
        match undone {
            Ok(true) => gone.push(pid),
            Ok(false) => have_all_gone = false,
            Err(failure) => {
                have_all_gone = false;
                failures.add(pid, failure);
            }
        }
    };
    // No process waits for another that is busy.
    let mut busy = Vec::new();
    for session in sessions.each_mut() {
        match session.remove() {
            Err(error) if error.is_transient() => busy.push(session),
            removed => finish(session, removed),
        }
    }
    let messages_of_session = |session: &&mut Session| messages_of(session.pid());
    let removed = retry_each(signals, &mut busy, messages_of_session, |it| it.remove());
    for (session, removed) in busy.into_iter().zip(removed) {
        finish(session, removed);
    }
    for (pid, failure) in sessions.end_following(messages_of) {
        failures.add_process();
        failures.add(pid, failure);
    }
    for session in sessions.each_mut() {
        if gone.contains(&session.pid()) {
            session.forget();
        }
    }
    if have_all_gone {
        return end.map(drop);
    }
    match end? {
        End::TerminalLost => messages.step(format_args!("the terminal is gone")),
        End::Interrupted => messages.step(format_args!("interrupted")),
        End::Quit | End::Exited => {}
    }
    Ok(())
}

/// Undoes one session, whose observation was `removed`; returns whether its process has exited or exec'd.
fn undo_one(
    session: &mut Session,
    removed: probes_lib::Result<Option<ObservationReport>>,
    leaves_figures: bool,
    signals: &TerminationSignals,
    messages: &Messages,
) -> Result<bool, Failure> {
    let pid = session.pid();
    if let Some(exit_or_exec) = removed.as_ref().err().and_then(exit_or_exec) {
        let figures = if leaves_figures {
            ": these are the figures read last"
        } else {
            ""
        };
        messages.note(&format!("process {pid} {exit_or_exec}{figures}"));
        return Ok(true);
    }
    let switched_back = session.undo_switches(signals, messages);
    if let Some(names) = switched_back
        .as_ref()
        .ok()
        .and_then(|it| join_first_few(it))
    {
        messages.note(&format!("restored: {names}"));
    }
    match removed {
        Ok(None) => {}
        Ok(Some(report)) => {
            warn_of_unrestored(messages, pid, &report);
            warn_of_still_mapped(messages, pid, report.still_mapped);
        }
        Err(error) => {
            if let Err(failure) = switched_back {
                messages.failure(&failure);
            }
            return Err(Failure::of_removal(pid, error));
        }
    }
    switched_back.map(|_| false)
}

/// Shows on a screen what is counted.
struct TopView<'l> {
    interval: Duration,
    sessions: &'l mut Sessions,
    /// The names of the rows of probes.
    probes: Vec<String>,
    screen: Screen,
    program: ShownProgram,
    model: Model,
    scroll: Scroll,
    /// The last reading, if it has not been shown yet.
    latest: Option<TotalReading>,
    /// If runtime events are on.
    collector: Option<Box<CollectorEvents>>,
}

impl<'l> TopView<'l> {
    fn new(
        args: &Args,
        targets: &[Target],
        screen: Screen,
        sessions: &'l mut Sessions,
    ) -> TopView<'l> {
        let mut names: Vec<String> = targets.iter().map(program_name).collect();
        names.sort();
        names.dedup();
        let (probes, functions) = sessions.rows();
        let rows = probes.iter().map(String::as_str);
        let mut model = Model::new(rows, &functions);
        let begun = sessions.sum();
        model.begin(begun.at, |row| begun.hits(row), &begun.functions);
        let processes_of_rows = sessions.processes();
        let first = processes_of_rows
            .first()
            .filter(|_| args.counted.has_functions());
        let sources = first.map(|(pid, _)| FunctionSources::of_process(*pid));
        let found = match targets {
            [target] => CollectorEvents::find(target),
            _ => FoundCollector::Nothing,
        };
        let collector = match found {
            FoundCollector::Events(collector) => Some(collector),
            FoundCollector::EventsAreOff => {
                model.set_events_off();
                None
            }
            FoundCollector::Nothing => None,
        };
        TopView {
            interval: args.interval,
            model,
            probes,
            program: ShownProgram {
                name: names.join(" "),
                processes: processes(sessions),
                sources: RowSources::of(sources.unwrap_or_default()),
            },
            sessions,
            screen,
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
        let reads_between = self.interval > COUNTS_INTERVAL;
        let mut read_at = Some(begun);
        loop {
            // Sample first: keys that arrive without a pause would delay the samples.
            let now = Instant::now();
            let is_shown = next.is_some_and(|next| next <= now);
            if is_shown || read_at.is_some_and(|next| next <= now) {
                if !self.sample() {
                    return Ok(End::Exited);
                }
                // Often at first, because the process may exit soon.
                let at = begun.elapsed();
                let is_first = at < self.interval;
                read_at = (is_first || reads_between).then(|| begun + next_reading(at));
            }
            if is_shown {
                self.take_latest();
                self.read_states();
                // Counted from now: if a sample takes longer than the interval, there is still time
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
        let sample = self.sessions.sample();
        let is_there = sample.is_some();
        self.latest = sample.or(self.latest.take());
        self.program.processes = processes(self.sessions);
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
            self.model.set_caution(self.sessions.caution());
            self.model.set_untyped(sample.untyped);
            self.model
                .set_counts(sample.at, |row| sample.hits(row), &sample.functions);
        }
    }

    fn read_states(&mut self) {
        let states = self.sessions.states(&self.probes);
        if !states.is_empty() {
            self.model.set_states(|row| states.get(row).copied());
        }
    }

    fn press(&mut self, keys: &[keys::KeyPress]) -> io::Result<Option<End>> {
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
        let said = self.sessions.switch(name, on);
        self.model.show_message(said);
        self.read_states();
    }
}

/// Which processes are shown.
fn processes(sessions: &Sessions) -> String {
    let all = sessions.processes();
    if let [(pid, _)] = all[..] {
        return format!("process {pid}");
    }
    let each = all.iter().map(|(pid, has_ended)| {
        let ended = if *has_ended { " not read any more" } else { "" };
        format!("{pid}{ended}")
    });
    let each: Vec<String> = each.collect();
    format!("{} processes: {}", all.len(), each.join(", "))
}

fn program_name(target: &Target) -> String {
    let program = target.program();
    let name = program.file_name().unwrap_or(program.as_os_str());
    name.to_string_lossy().into_owned()
}

fn times((pid, latency): &(Option<i32>, Latency)) -> PairLatency {
    PairLatency {
        start: match pid {
            Some(pid) => format!("{pid} {}", latency.start()),
            None => latency.start().to_owned(),
        },
        stop: latency.stop().to_owned(),
        count: latency.count(),
        mean: latency.mean(),
        p50: latency.quantile(0.5),
        p99: latency.quantile(0.99),
        max: latency.max(),
        evidence: Evidence::of(latency),
    }
}

/// Whether the last figures stay on the terminal: unless the user quit with a key, or the terminal is gone.
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
