//! The thread that finds the processes to observe, and begins to observe them. It is a thread of its own so that a
//! process that takes long to open or to stop delays no scrape.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use probes_lib::{Observation, Options, RuntimeEvents, Target, pids};

use super::notifications::{Notification, NotificationSender};
use super::observed::{ObservationId, Observed};
use crate::commands::open_target::open_to_observe;
use crate::failure::{Failure, exit_or_exec};
use crate::flags::{TargetSelection, comm, program_of};
use crate::messages::Messages;

/// The most processes that are observed at a time.
const MAX_PROCESSES: usize = 256;

/// The longest time until a process that was refused is tried again, unless `-scan` is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What to do with the processes that are found.
pub(super) struct ServeRequest<'s> {
    pub(super) selection: &'s TargetSelection,
    pub(super) observation: Option<Observation>,
    pub(super) needs_probes: bool,
    pub(super) events: bool,
    pub(super) options: Options,
    pub(super) interval: Duration,
    pub(super) messages: Messages,
}

/// What has ended, as the main thread, which reads the processes, tells the scanner.
pub(super) enum Ended {
    /// A process is observed no more; and whether another observer has taken it over.
    Observation {
        id: ObservationId,
        is_replaced: bool,
    },
    /// The runtime events of a process are read no more.
    RuntimeEvents(ObservationId),
}

/// Finds processes until the sender of `ends` is dropped.
pub(super) struct Scanner<'s> {
    pub(super) wanted: ServeRequest<'s>,
    notifications: NotificationSender,
    ends: Receiver<Ended>,
    /// Whether `serve` is about to end: no other process is looked at then.
    is_ending: Arc<AtomicBool>,
    known: BTreeMap<i32, Known>,
    /// How many observations have begun.
    begun: u64,
    /// Whether nothing was looked at so far.
    is_first: bool,
}

/// A process that was looked at.
struct Known {
    identity: Identity,
    state: KnownState,
    /// Of its latest observation.
    number: u64,
    /// Another observer has taken it over: it is not taken over again.
    was_replaced: bool,
}

/// Distinguishes a process from a later one with the same pid, and its program from another one that it execs later. An exec of
/// the same file is found by the next reading instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    started: Option<u64>,
    /// The device and inode of its executable, whose name may change while it runs; `None` if they may not be read.
    executable: Option<(u64, u64)>,
}

enum KnownState {
    /// And when to try again to read its runtime events, if they cannot be read.
    Observed(Option<Pause>),
    /// Observing it failed, its observation has ended, or it was selected by its name alone and cannot be used. And
    /// when to try again.
    NotObserved(Pause),
}

/// When to try again what has failed. Each pause is twice as long as the one before.
struct Pause {
    until: Instant,
    /// How long this pause is, before the quarter is taken off.
    last: Duration,
    /// The kind of the failure, so that it is not reported again while it stays the same; empty if none was reported.
    kind: String,
}

impl Pause {
    fn next(before: Option<&Pause>, kind: String, interval: Duration) -> Pause {
        let last = before.map_or(interval, |before| before.last.saturating_mul(2));
        let last = last.min(LONGEST_PAUSE.max(interval));
        Pause {
            // A quarter less, so that the scan that is due then finds the pause over even if it reaches the process a
            // little earlier.
            until: Instant::now() + last.mul_f32(0.75),
            last,
            kind,
        }
    }

    fn has_elapsed(&self) -> bool {
        self.until <= Instant::now()
    }
}

impl<'s> Scanner<'s> {
    pub(super) fn new(
        wanted: ServeRequest<'s>,
        notifications: NotificationSender,
        ends: Receiver<Ended>,
        is_ending: Arc<AtomicBool>,
    ) -> Scanner<'s> {
        Scanner {
            wanted,
            notifications,
            ends,
            is_ending,
            known: BTreeMap::new(),
            begun: 0,
            is_first: true,
        }
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
                match self.ends.recv_timeout(left) {
                    Ok(ended) => self.try_again_later(ended),
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    /// Notes what has ended, and when to try it again.
    fn try_again_later(&mut self, ended: Ended) {
        let pause = Pause::next(None, String::new(), self.wanted.interval);
        let (Ended::Observation { id, .. } | Ended::RuntimeEvents(id)) = ended;
        let known = self.known.get_mut(&id.pid);
        let Some(known) = known.filter(|known| known.number == id.number) else {
            return;
        };
        match (ended, &mut known.state) {
            (Ended::Observation { is_replaced, .. }, state) => {
                *state = KnownState::NotObserved(pause);
                known.was_replaced |= is_replaced;
            }
            (Ended::RuntimeEvents(_), KnownState::Observed(events)) => *events = Some(pause),
            (Ended::RuntimeEvents(_), KnownState::NotObserved(_)) => {}
        }
    }

    fn scan(&mut self) {
        let candidates = self.candidates();
        let is_there = |pid: &i32, known: &Known| {
            let found = candidates.get(pid);
            found.is_some_and(|(identity, _)| *identity == known.identity)
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

    /// The processes that are selected and run now, with the names of their programs; in the first scan, also pids that were given
    /// and do not exist.
    fn candidates(&self) -> BTreeMap<i32, (Identity, String)> {
        let given = self.wanted.selection.given();
        let mut looked_at = given.to_vec();
        if self.wanted.selection.is_by_name() {
            let all = pids().into_iter().flatten();
            looked_at.extend(all.filter(|pid| !given.contains(pid)));
        }
        let own = std::process::id() as i32;
        let mut candidates = BTreeMap::new();
        for pid in looked_at {
            let name = program_name(pid);
            let is_given = given.contains(&pid);
            let is_named = name
                .as_ref()
                .is_some_and(|name| pid != own && self.wanted.selection.selects_program(name));
            let started = started(pid);
            // In the first scan, a given pid that does not exist is kept, so that opening it fails and is reported.
            if (is_named || is_given) && (started.is_some() || self.is_first) {
                let executable = executable(pid);
                let identity = Identity {
                    started,
                    executable,
                };
                candidates.insert(pid, (identity, name.unwrap_or_default()));
            }
        }
        candidates
    }

    fn look_at(&mut self, pid: i32, identity: Identity, program: String) {
        let interval = self.wanted.interval;
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
                match self.begin(pid, was_replaced) {
                    Ok(Some((observed, no_events))) => {
                        number = observed.id.number;
                        self.begun = number;
                        self.notifications
                            .send(Notification::Observed(Box::new(observed)));
                        KnownState::Observed(no_events.map(|failure| {
                            let pause = Pause::next(None, failure.kind(), interval);
                            self.notifications
                                .send(Notification::NoRuntimeEvents(pid, failure));
                            pause
                        }))
                    }
                    Ok(None) => {
                        KnownState::NotObserved(Pause::next(before, String::new(), interval))
                    }
                    Err(failure) => {
                        let pause = Pause::next(before, failure.kind(), interval);
                        if before.is_none_or(|before| before.kind != pause.kind) {
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
        let known = Known {
            identity,
            state,
            number,
            was_replaced,
        };
        self.known.insert(pid, known);
    }

    /// Begins to observe a process; also returns why its runtime events are not read although they are asked for.
    /// `None` if it is selected by its name alone, and it has exited or exec'd meanwhile, or opening it failed for a
    /// reason other than denied access (it has no probes, for example): then no error is reported.
    fn begin(
        &self,
        pid: i32,
        was_replaced: bool,
    ) -> Result<Option<(Observed, Option<Failure>)>, Failure> {
        let is_observed = |known: &&Known| matches!(known.state, KnownState::Observed(_));
        if self.known.values().filter(is_observed).count() >= MAX_PROCESSES {
            return Err(Failure::TooManyProcesses(MAX_PROCESSES));
        }
        let wanted = &self.wanted;
        let messages = wanted
            .messages
            .about_one(pid, wanted.selection.is_one_pid());
        let is_given = wanted.selection.given().contains(&pid);
        let target = match open_to_observe(pid, wanted.needs_probes, &messages) {
            Err(Failure::Target(_, error)) if error.denial().is_none() && !is_given => {
                messages.step(format_args!("left out: {error}"));
                return Ok(None);
            }
            target => target?,
        };
        let (events, no_events) = if wanted.events {
            match RuntimeEvents::of_process(pid).map_err(Failure::of_process(pid)) {
                Ok(events) => (Some(events), None),
                Err(Failure::Target(_, error)) if exit_or_exec(&error).is_some() && !is_given => {
                    return Ok(None);
                }
                // Nothing else is asked for.
                Err(failure) if wanted.observation.is_none() => return Err(failure),
                Err(failure) => (None, Some(failure)),
            }
        } else {
            (None, None)
        };
        let options = Options {
            take_over: wanted.options.take_over && !was_replaced,
            ..wanted.options
        };
        let observation = wanted.observation.as_ref();
        let number = self.begun + 1;
        let id = ObservationId { pid, number };
        match Observed::begin(id, target, observation, options, events, &messages) {
            Ok(observed) => Ok(Some((observed, no_events))),
            Err(Failure::Target(_, error)) if exit_or_exec(&error).is_some() && !is_given => {
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Tries again to read the runtime events of a process that is observed; returns when to try once more.
    fn open_events(&self, pid: i32, before: &Pause) -> Option<Pause> {
        match RuntimeEvents::of_process(pid) {
            Ok(events) => {
                let events = Box::new(events);
                self.notifications
                    .send(Notification::RuntimeEvents(pid, events));
                None
            }
            Err(error) => {
                let failure = Failure::of_process(pid)(error);
                let pause = Pause::next(Some(before), failure.kind(), self.wanted.interval);
                if before.kind != pause.kind {
                    self.notifications
                        .send(Notification::NoRuntimeEvents(pid, failure));
                }
                Some(pause)
            }
        }
    }
}

/// The name of the program of a process: the file name of its executable or, if its `exe` link may not be read (a
/// process of another user), `/proc/PID/comm`, which has at most 15 bytes.
fn program_name(pid: i32) -> Option<String> {
    match program_of(pid) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => comm(pid),
        // It has exited, or it is a kernel thread and we are root (for others, the link of a kernel thread is denied).
        program => program.ok(),
    }
}

/// The device and inode of the executable of a process.
fn executable(pid: i32) -> Option<(u64, u64)> {
    let file = fs::metadata(format!("/proc/{pid}/exe")).ok()?;
    Some((file.dev(), file.ino()))
}

/// When a process was started, in ticks since boot; proc(5), field 22.
fn started(pid: i32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// The name of the program of a process that is open.
pub(super) fn name_of(target: &Target) -> String {
    let name = target.program().file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    name.strip_suffix(" (deleted)").unwrap_or(&name).to_owned()
}
