//! The thread that finds the processes to observe, and begins to observe them. It is a thread of its own so that a
//! process that takes long to open or to stop delays no scrape.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};
use probes_lib::{
    Error, Observation, Options, RuntimeEvents, Target, check_proc, pids, proc_hides_others,
};

use super::notifications::{Notification, NotificationSender};
use super::observed::{ObservationId, Observed};
use crate::commands::open_target::open_to_observe;
use crate::failure::{Failure, exit_or_exec, may_have_functions};
use crate::flags::{HIDDEN_OTHERS, TargetSelection, comm, program_of};
use crate::messages::Messages;
use crate::output::WarningKind;

/// The most processes that are observed at a time.
const MAX_PROCESSES: usize = 256;

/// The longest time until a process that was refused is tried again, unless `-scan` is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How often, and for how long, a process that has exec'd is tried again at once. Meanwhile, no error is reported: it
/// may not have loaded its libraries, or not have switched on its runtime events.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
const LOADING: Duration = Duration::from_secs(2);

/// What a scan does first.
const LISTING: &str = "list the processes";

/// What to do with the processes that are found.
pub(super) struct ServeRequest<'s> {
    pub(super) selection: &'s TargetSelection,
    pub(super) observation: Option<Observation>,
    pub(super) needs_probes: bool,
    /// Whether functions or USDT probes are asked for, which programs without OCaml may have.
    pub(super) has_functions: bool,
    pub(super) events: bool,
    pub(super) options: Options,
    pub(super) interval: Duration,
    pub(super) messages: Messages,
}

/// What has ended: sent to the scanner by the main thread, which reads the processes.
pub(super) enum Ended {
    /// A process is observed no more: whether another observer has taken it over, and whether it may have executed a
    /// program, rather than exited.
    Observation {
        id: ObservationId,
        is_replaced: bool,
        may_have_executed: bool,
    },
    /// The runtime events of a process are read no more.
    RuntimeEvents(ObservationId),
}

/// Finds processes until the sender of `ends` is dropped.
pub(super) struct Scanner<'s> {
    pub(super) wanted: ServeRequest<'s>,
    notifications: NotificationSender,
    ends: Receiver<Ended>,
    /// Whether `serve` is about to end: then no more processes are looked at.
    is_ending: Arc<AtomicBool>,
    /// When each process that was given by its pid was started, `None` if it did not exist: one that gets the pid of
    /// another later is not meant.
    given: BTreeMap<i32, Option<u64>>,
    known: BTreeMap<i32, KnownProcess>,
    /// The processes that may just have executed a program, and since when that is known.
    executed: BTreeMap<i32, Instant>,
    /// How many observations have begun.
    begun: u64,
    /// Whether nothing was looked at so far.
    is_first: bool,
    /// Whether the last scan could not find out which processes there are.
    has_failed: bool,
}

/// A process that was looked at.
struct KnownProcess {
    identity: Identity,
    state: KnownState,
    /// The number of its latest observation.
    number: u64,
    /// Another observer has taken it over: it is not taken over again.
    was_replaced: bool,
}

/// Distinguishes a process from a later one with the same pid, and its program from another one that it execs later.
/// An exec of the same file is found by the next reading instead.
#[derive(Clone, Copy, Debug)]
struct Identity {
    started: Option<u64>,
    /// The device and inode of its executable, whose name may change while it runs; `None` if they may not be read.
    executable: Option<(u64, u64)>,
}

impl KnownProcess {
    /// Whether the process that was found now is this one, and executes the same program. One whose executable may not be
    /// read any more does: it may have become undumpable. One whose executable can be read only now may have executed
    /// another program, and is looked at again, unless it is observed.
    fn is_still(&self, now: &Identity) -> bool {
        let is_same_program = match (self.identity.executable, now.executable) {
            (Some(before), Some(now)) => before == now,
            (None, Some(_)) => matches!(self.state, KnownState::Observed(_)),
            (_, None) => true,
        };
        self.identity.started == now.started && is_same_program
    }
}

/// What has begun, and why the rest has not.
struct StartedObservation {
    observed: Observed,
    /// Why its runtime events are not read although they are asked for.
    no_events: Option<Failure>,
    /// Why selections are left out that the process does not have.
    missing: Vec<Failure>,
}

enum KnownState {
    /// It is observed. `Some` if its runtime events cannot be read: when to try again.
    Observed(Option<RetryDelay>),
    /// Observing it failed, its observation has ended, or it is not selected after all: when to try again.
    NotObserved(RetryDelay),
}

/// When to try again what has failed. Each pause is twice as long as the one before.
struct RetryDelay {
    until: Instant,
    /// How long this pause is, before the quarter is taken off.
    last: Duration,
    /// The kind of the failure, so that it is not reported again while it stays the same; empty if none was reported.
    kind: String,
}

impl RetryDelay {
    fn next(before: Option<&RetryDelay>, kind: String, interval: Duration) -> RetryDelay {
        let last = before.map_or(interval, |before| before.last.saturating_mul(2));
        let last = last.min(LONGEST_PAUSE.max(interval));
        RetryDelay {
            // A quarter less, so that the scan that is due then finds the pause over even if it reaches the process a
            // little earlier.
            until: Instant::now() + last.mul_f32(0.75),
            last,
            kind,
        }
    }

    /// A pause that is over.
    fn over(interval: Duration) -> RetryDelay {
        RetryDelay {
            until: Instant::now(),
            last: interval / 2,
            kind: String::new(),
        }
    }

    fn has_elapsed(&self) -> bool {
        self.until <= Instant::now()
    }
}

impl<'s> Scanner<'s> {
    /// Fails if processes are to be found by name, but cannot be listed.
    pub(super) fn new(
        wanted: ServeRequest<'s>,
        notifications: NotificationSender,
        ends: Receiver<Ended>,
        is_ending: Arc<AtomicBool>,
    ) -> Result<Scanner<'s>, Failure> {
        if wanted.selection.is_by_name() {
            check_proc().map_err(Failure::Survey)?;
            pids().map_err(|error| Failure::System(LISTING, error))?;
            if proc_hides_others() {
                wanted.messages.note(HIDDEN_OTHERS);
            }
        }
        let given = wanted.selection.given().iter();
        let given = given.map(|&pid| (pid, started(pid).ok().flatten()));
        let given = given.collect();
        Ok(Scanner {
            given,
            wanted,
            notifications,
            ends,
            is_ending,
            known: BTreeMap::new(),
            executed: BTreeMap::new(),
            begun: 0,
            is_first: true,
            has_failed: false,
        })
    }

    pub(super) fn run(mut self) {
        loop {
            let begun = Instant::now();
            self.scan();
            self.is_first = false;
            self.notifications
                .send(Notification::Scanned(begun.elapsed()));
            loop {
                let left = self.wanted.interval.saturating_sub(begun.elapsed());
                let wait = if self.executed.is_empty() {
                    left
                } else {
                    left.min(RETRY_INTERVAL)
                };
                // Received even if the scan has taken the whole interval: what has ended meanwhile is noted.
                match self.ends.recv_timeout(wait) {
                    Ok(ended) => self.note_end(ended),
                    Err(RecvTimeoutError::Timeout) if left.is_zero() => break,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                self.look_at_executed();
            }
        }
    }

    /// Notes what has ended, and when to try it again.
    fn note_end(&mut self, ended: Ended) {
        let interval = self.wanted.interval;
        let pause = RetryDelay::next(None, String::new(), interval);
        let (Ended::Observation { id, .. } | Ended::RuntimeEvents(id)) = ended;
        let known = self.known.get_mut(&id.pid);
        let Some(known) = known.filter(|known| known.number == id.number) else {
            return;
        };
        match (ended, &mut known.state) {
            (
                Ended::Observation {
                    is_replaced,
                    may_have_executed,
                    ..
                },
                state,
            ) => {
                known.was_replaced |= is_replaced;
                *state = KnownState::NotObserved(pause);
                if may_have_executed {
                    *state = KnownState::NotObserved(RetryDelay::over(interval));
                    self.executed.insert(id.pid, Instant::now());
                }
            }
            (Ended::RuntimeEvents(_), KnownState::Observed(events)) => *events = Some(pause),
            (Ended::RuntimeEvents(_), KnownState::NotObserved(_)) => {}
        }
    }

    /// Looks at once at the processes that may have exec'd, so that few of their hits are missed.
    fn look_at_executed(&mut self) {
        let executed: Vec<(i32, Instant)> = self.executed.iter().map(|(&k, &v)| (k, v)).collect();
        for (pid, since) in executed {
            if self.is_ending.load(Ordering::Relaxed) {
                return;
            }
            let (identity, program) = match self.candidate(pid) {
                Ok(Some(found)) => found,
                // It has exited, or executes a program now that is not selected.
                Ok(None) => {
                    self.executed.remove(&pid);
                    continue;
                }
                // The next scan says so.
                Err(_) => return,
            };
            if since.elapsed() >= LOADING {
                self.executed.remove(&pid);
            }
            if (self.known.get(&pid)).is_some_and(|known| !known.is_still(&identity)) {
                self.known.remove(&pid);
            }
            self.look_at(pid, identity, program);
            let state = self.known.get(&pid).map(|known| &known.state);
            if matches!(state, Some(KnownState::Observed(None))) {
                self.executed.remove(&pid);
            }
        }
    }

    fn scan(&mut self) {
        let candidates = match self.candidates() {
            Ok(candidates) => candidates,
            // Those that are known stay.
            Err(error) => return self.report_failed_scan(error),
        };
        self.has_failed = false;
        let is_there = |pid: &i32, known: &KnownProcess| {
            let found = candidates.get(pid);
            found.is_some_and(|(identity, _)| known.is_still(identity))
        };
        let gone: Vec<i32> = self
            .known
            .iter()
            .filter(|(pid, known)| !is_there(pid, known))
            .map(|(pid, _)| *pid)
            .collect();
        for pid in gone {
            self.known.remove(&pid);
            self.notifications.send(Notification::Gone(pid));
        }
        for (pid, (identity, program)) in candidates {
            if self.is_ending.load(Ordering::Relaxed) {
                return;
            }
            self.look_at(pid, identity, program);
        }
    }

    /// Says why a scan has failed, once.
    fn report_failed_scan(&mut self, error: io::Error) {
        if !self.has_failed {
            self.wanted.messages.warning(
                WarningKind::UnreadableFile,
                &Failure::System(LISTING, error).to_string(),
                "those that are observed stay observed; others are looked for again at each scan",
            );
        }
        self.has_failed = true;
    }

    /// The processes that are selected and run now, with the names of their programs; in the first scan, also pids
    /// that were given and do not exist.
    fn candidates(&self) -> io::Result<BTreeMap<i32, (Identity, String)>> {
        let given = self.wanted.selection.given();
        let mut looked_at = given.to_vec();
        if self.wanted.selection.is_by_name() {
            let all = pids()?.into_iter();
            looked_at.extend(all.filter(|pid| !given.contains(pid)));
        }
        let with_pid = |pid| {
            let candidate = self.candidate(pid).transpose()?;
            Some(candidate.map(|it| (pid, it)))
        };
        looked_at.into_iter().filter_map(with_pid).collect()
    }

    /// Whether this process, and no earlier one of the same pid, was given by its pid.
    fn is_given(&self, pid: i32, started: Option<u64>) -> bool {
        self.given.get(&pid) == Some(&started)
    }

    /// A process, if it is selected and runs now, with the name of its program. An error if we lack descriptors or memory
    /// to find out.
    fn candidate(&self, pid: i32) -> io::Result<Option<(Identity, String)>> {
        let selection = self.wanted.selection;
        let name = program_name(pid);
        let started = started(pid)?;
        let is_given = self.is_given(pid, started);
        let is_own = pid == std::process::id() as i32;
        let is_named =
            (name.as_ref()).is_some_and(|name| !is_own && selection.selects_program(name));
        // In the first scan, a given pid that does not exist is kept, so that opening it fails and is reported.
        if !(is_named || is_given) || (started.is_none() && !self.is_first) {
            return Ok(None);
        }
        let identity = Identity {
            started,
            executable: executable(pid)?,
        };
        Ok(Some((identity, name.unwrap_or_default())))
    }

    fn look_at(&mut self, pid: i32, identity: Identity, program: String) {
        let known = self.known.get(&pid);
        let was_replaced = known.is_some_and(|known| known.was_replaced);
        let mut number = known.map_or(0, |known| known.number);
        let state = match known.map(|known| &known.state) {
            Some(KnownState::Observed(None)) => return,
            Some(KnownState::Observed(Some(pause)) | KnownState::NotObserved(pause))
                if !pause.has_elapsed() =>
            {
                return;
            }
            Some(KnownState::Observed(Some(pause))) => {
                KnownState::Observed(self.open_events(pid, pause))
            }
            before => {
                let before = match before {
                    Some(KnownState::NotObserved(pause)) => Some(pause),
                    _ => None,
                };
                match self.begin(pid, identity, was_replaced) {
                    Ok(Some(begun)) => {
                        number = begun.observed.id.number;
                        self.begun = number;
                        self.report_begun(pid, begun)
                    }
                    Ok(None) => KnownState::NotObserved(self.pause(pid, before, String::new())),
                    Err(failure) => {
                        let pause = self.pause(pid, before, failure.kind());
                        let is_new = before.is_none_or(|before| before.kind != pause.kind);
                        if is_new && !pause.kind.is_empty() {
                            self.notifications.send(Notification::Refused {
                                pid,
                                program,
                                failure,
                            });
                        }
                        KnownState::NotObserved(pause)
                    }
                }
            }
        };
        let known = KnownProcess {
            identity,
            state,
            number,
            was_replaced,
        };
        self.known.insert(pid, known);
    }

    /// When to try again what has failed: at once, and without a report, if the process has just executed a program.
    fn pause(&self, pid: i32, before: Option<&RetryDelay>, kind: String) -> RetryDelay {
        let interval = self.wanted.interval;
        if self.executed.contains_key(&pid) {
            RetryDelay::over(interval)
        } else {
            RetryDelay::next(before, kind, interval)
        }
    }

    /// Reports what is observed of a process from now on, and what it lacks.
    fn report_begun(&self, pid: i32, begun: StartedObservation) -> KnownState {
        let StartedObservation {
            observed,
            no_events,
            missing,
        } = begun;
        let notifications = &self.notifications;
        notifications.send(Notification::Observed(Box::new(observed)));
        notifications.send(Notification::Missing(pid, missing));
        KnownState::Observed(no_events.map(|failure| {
            let pause = self.pause(pid, None, failure.kind());
            if !pause.kind.is_empty() {
                notifications.send(Notification::NoRuntimeEvents(pid, failure));
            }
            pause
        }))
    }

    /// Begins to observe a process. `None` if it has exited or exec'd meanwhile, or is not meant: that is no error, except
    /// in the first scan if a given process has exited.
    fn begin(
        &self,
        pid: i32,
        identity: Identity,
        was_replaced: bool,
    ) -> Result<Option<StartedObservation>, Failure> {
        let is_reported = self.is_first && self.is_given(pid, identity.started);
        match self.try_begin(pid, identity, was_replaced) {
            Err(Failure::Target(_, error)) if exit_or_exec(&error).is_some() && !is_reported => {
                Ok(None)
            }
            begun => begun,
        }
    }

    fn try_begin(
        &self,
        pid: i32,
        identity: Identity,
        was_replaced: bool,
    ) -> Result<Option<StartedObservation>, Failure> {
        let is_given = self.is_given(pid, identity.started);
        let is_observed = |known: &&KnownProcess| matches!(known.state, KnownState::Observed(_));
        if self.known.values().filter(is_observed).count() >= MAX_PROCESSES {
            return Err(Failure::TooManyProcesses(MAX_PROCESSES));
        }
        let wanted = &self.wanted;
        let messages = wanted
            .messages
            .about_one(pid, wanted.selection.is_one_pid());
        let target = match open_to_observe(pid, wanted.needs_probes && is_given, &messages) {
            Err(Failure::Target(_, error)) if !is_given && is_no_program_of_ocaml(&error) => {
                messages.step(format_args!("left out: {error}"));
                return Ok(None);
            }
            target => target?,
        };
        // After it was opened: another process may have got its pid since it was found.
        if started(pid).ok() != Some(identity.started) {
            return Ok(None);
        }
        let (events, no_events) = match wanted.events.then(|| RuntimeEvents::of_process_if_on(pid))
        {
            None => (None, None),
            Some(Ok(events)) => (Some(events), None),
            Some(Err(error)) => (None, Some(Failure::of_process(pid)(error))),
        };
        let (observation, missing) = self.available(&target, is_given)?;
        if !missing.is_empty() && self.is_loading(pid) {
            return Ok(None);
        }
        if observation.is_none() && events.is_none() {
            if !is_given && !wanted.has_functions && !target.has_ocaml() {
                messages.step(format_args!("left out: it is no program of OCaml"));
                return Ok(None);
            }
            // There is nothing to observe: one of the failures says why.
            if let Some(failure) = missing.into_iter().chain(no_events).next() {
                return Err(failure);
            }
            return Ok(None);
        }
        let options = Options {
            take_over: wanted.options.take_over && !was_replaced,
            ..wanted.options
        };
        let number = self.begun + 1;
        let id = ObservationId { pid, number };
        let observation = observation.as_ref();
        let observed = Observed::begin(id, target, observation, options, events, &messages)?;
        Ok(Some(StartedObservation {
            observed,
            no_events,
            missing,
        }))
    }

    /// What is to be observed of a process: all that is selected if its pid was given, else what it has. Also returns
    /// why it lacks the rest.
    fn available(
        &self,
        target: &Target,
        is_given: bool,
    ) -> Result<(Option<Observation>, Vec<Failure>), Failure> {
        let (Some(observation), false) = (&self.wanted.observation, is_given) else {
            return Ok((self.wanted.observation.clone(), Vec::new()));
        };
        let of_process = Failure::of_process(target.pid());
        let observation = observation.clone().leave_out_refused();
        let available = target.available(&observation).map_err(&of_process)?;
        let missing = available.missing.into_iter().map(of_process).collect();
        Ok((available.observation, missing))
    }

    /// Whether a process may not have loaded all of its libraries so far.
    fn is_loading(&self, pid: i32) -> bool {
        let is_new = || age(pid).is_some_and(|age| age < LOADING);
        self.executed.contains_key(&pid) || (!self.is_first && is_new())
    }

    /// Tries again to read the runtime events of a process that is observed; returns when to try once more.
    fn open_events(&self, pid: i32, before: &RetryDelay) -> Option<RetryDelay> {
        match RuntimeEvents::of_process_if_on(pid) {
            Ok(events) => {
                let events = Box::new(events);
                self.notifications
                    .send(Notification::RuntimeEvents(pid, events));
                None
            }
            Err(error) => {
                let failure = Failure::of_process(pid)(error);
                let pause = self.pause(pid, Some(before), failure.kind());
                if before.kind != pause.kind && !pause.kind.is_empty() {
                    self.notifications
                        .send(Notification::NoRuntimeEvents(pid, failure));
                }
                Some(pause)
            }
        }
    }
}

/// Whether a process that could not be opened has no program that could be meant: it was not denied, and has no
/// probes that are damaged.
fn is_no_program_of_ocaml(error: &Error) -> bool {
    error.denial().is_none() && !may_have_functions(error)
}

/// The name of the program of a process: the file name of its executable or, if its `exe` link may not be read (a
/// process of another user), `/proc/PID/comm`, which has at most 15 bytes.
fn program_name(pid: i32) -> Option<String> {
    match program_of(pid) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => comm(pid),
        // It has exited, or it is a kernel thread and we are root (for others, the link of a kernel thread is denied).
        program => program.ok(),
    }
}

/// The device and inode of the executable of a process; `None` if they may not be read, or it does not exist. An error if we
/// lack descriptors or memory to find out.
fn executable(pid: i32) -> io::Result<Option<(u64, u64)>> {
    match fs::metadata(format!("/proc/{pid}/exe")) {
        Ok(file) => Ok(Some((file.dev(), file.ino()))),
        Err(error) if is_shortage(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// When a process was started, in ticks since boot; `None` if it does not exist. An error if we lack descriptors or
/// memory to find out.
fn started(pid: i32) -> io::Result<Option<u64>> {
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(start_in(&String::from_utf8_lossy(&stat))),
        Err(error) if is_shortage(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// The time of the start in `/proc/PID/stat`: proc(5), field 22.
fn start_in(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Whether an error says nothing about the process.
fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM))
}

/// How long ago a process was started.
fn age(pid: i32) -> Option<Duration> {
    let ticks = sysconf(SysconfVar::CLK_TCK).ok()??;
    let started = Duration::from_secs(started(pid).ok()??) / u32::try_from(ticks).ok()?;
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    now.checked_sub(started)
}

/// The name of the program of a process that is open.
pub(super) fn name_of(target: &Target) -> String {
    let name = target.program().file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    name.strip_suffix(" (deleted)").unwrap_or(&name).to_owned()
}
