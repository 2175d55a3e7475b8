//! Stops every thread of a process, until no thread is left that runs.
//!
//! ```text
//! SEIZE + INTERRUPT each tid of /proc/PID/task
//! wait for each, without consuming its wait status
//! again, until as many are stopped as /proc/PID/status says there are
//! Stopped: change what is to be changed
//! DETACH each, injecting its signal
//! ```

use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use nix::errno::Errno;

use crate::error::{
    Denial, Error, ErrorKind, FOLLOWER_LOST, FOLLOWER_SILENT, Operation, ProcessError, Result,
    Subject,
};
use crate::process::denial;
use crate::process::{Process, ThreadList};
use crate::sys::priority;
use crate::sys::ptrace::{self, TraceScope, TraceeState};
use crate::sys::signals;
use crate::trace::lease::message::NotStopped;
use crate::trace::lease::{ANSWER_LIMIT, Lease, NoLease, is_closed};
use crate::trace::stopped::{Stopped, Tracee};
use crate::trace::time_budget::TimeBudget;
use crate::trace::tracee_set::is_follower;
use crate::trace::tracer::{TICK, Tracer, reap, reap_if_exited};

/// The least time that a thread takes to stop; threads stop one after the other.
const MIN_THREAD_STOP: Duration = Duration::from_micros(4);

/// How many unexplained refusals of the kernel are retried.
const MAX_REFUSALS: usize = 10;

/// How many attempts are made to stop a process while one of its threads is given no processor within the limit.
const TRIES: u32 = 3;

/// How long it may take to stop a launched program that has not begun: on a busy machine, a thread may have no
/// processor for a second.
const LIMIT_AT_LAUNCH: Duration = Duration::from_secs(10);

impl Tracer<'_> {
    /// Stops every thread of `process` within `limit`.
    ///
    /// A thread needs a processor to stop. If one is not given any for the whole limit, all are resumed, and stopped
    /// again after a pause as long as the limit: three attempts in all.
    ///
    /// # Errors
    ///
    /// If the kernel does not permit it, if a thread does not stop in time, or if the process exits
    /// or execs meanwhile. Then every thread is resumed as if it had not been stopped.
    pub(crate) fn stop<'p>(&self, process: &'p Process, limit: Duration) -> Result<Stopped<'p>> {
        with_retries(limit, || self.stop_once(process, limit))
    }

    fn stop_once<'p>(&self, process: &'p Process, limit: Duration) -> Result<Stopped<'p>> {
        if self.lease.borrow().is_some() {
            if let LeaseOutcome::Stopped(stopped) = self.stop_leased(process, limit)? {
                return Ok(stopped);
            }
        }
        let mut budget = TimeBudget::new(limit);
        loop {
            let none = Stopped::none_yet(process, false);
            let error = match self.stop_all(none, limit, TraceScope::Threads) {
                Err(error) if is_traced(&error) => error,
                stopped => return stopped,
            };
            match self.stop_leased(process, limit)? {
                LeaseOutcome::Stopped(stopped) => return Ok(stopped),
                // The kernel is about to detach it.
                LeaseOutcome::FollowerEnds if !budget.is_spent() => std::thread::sleep(TICK),
                LeaseOutcome::FollowerEnds | LeaseOutcome::Refused => return Err(error),
            }
        }
    }

    /// Has the follower of a process, if it has one, stop it; waits for its answers for some time more than `limit`.
    ///
    /// # Errors
    ///
    /// Same as [`Tracer::stop`], [`ProcessError::FollowerLost`], and [`ProcessError::FollowerSilent`]. If the lease was
    /// lost while the process was stopped, this tracer never stops it again.
    fn stop_leased<'p>(&self, process: &'p Process, limit: Duration) -> Result<LeaseOutcome<'p>> {
        let pid = process.pid();
        let failed = |errno: Errno| denial::error(process, Operation::StopByFollower, errno);
        let known = self.lease.borrow().clone();
        let tracer = known
            .as_ref()
            .map_or_else(|| tracer_of(process), |it| it.tracer());
        let refused = || {
            // It does not lend a process from which it has just detached.
            if tracer == 0 || tracer_of(process) != tracer {
                LeaseOutcome::FollowerEnds
            } else {
                LeaseOutcome::Refused
            }
        };
        let lease = match known.map_or_else(|| self.lease(process, tracer, limit), Ok) {
            Ok(lease) => lease,
            Err(NoLease::Absent) => return Ok(LeaseOutcome::FollowerEnds),
            Err(NoLease::Refused) => return Ok(refused()),
            Err(why @ (NoLease::OtherUser | NoLease::OtherVersion)) => {
                return match refused() {
                    LeaseOutcome::Refused if why == NoLease::OtherUser => {
                        Err(denial::followed_by_other_user(process, tracer))
                    }
                    LeaseOutcome::Refused => Err(denial::other_version(process, tracer)),
                    ends => Ok(ends),
                };
            }
            Err(NoLease::Silent) => return Err(failed(FOLLOWER_SILENT)),
            Err(NoLease::Failed(errno)) => return Err(failed(errno)),
        };
        let was_stopped = lease.has_stopped();
        let error = match lease.stop(limit) {
            Ok(Ok(tids)) => {
                let stopped = Stopped::leased(process, tids, lease);
                return Ok(LeaseOutcome::Stopped(stopped));
            }
            Ok(Err(NotStopped::NotLent)) => {
                self.lease.take();
                return Ok(refused());
            }
            Err(error) if is_closed(&error) && !was_stopped => {
                self.lease.take();
                return Ok(LeaseOutcome::FollowerEnds);
            }
            Err(_) => failed(lease.loss().unwrap_or(FOLLOWER_LOST)),
            Ok(Err(NotStopped::Failed(errno))) => failed(errno),
            Ok(Err(NotStopped::Exited)) => Error::of_process(pid, ProcessError::Exited),
            Ok(Err(NotStopped::Executed)) => Error::of_process(pid, ProcessError::Executed),
            Ok(Err(NotStopped::Busy(tid))) => busy(process, tid, limit),
            Ok(Err(NotStopped::ThreadsKeepStarting)) => threads_keep_starting(process, limit),
        };
        Err(error)
    }

    /// Connects to the thread `tracer` of a process, if it is a follower.
    fn lease(&self, process: &Process, tracer: i32, limit: Duration) -> Result<Rc<Lease>, NoLease> {
        if tracer == 0 {
            return Err(NoLease::Absent);
        }
        if !is_follower(tracer) {
            return Err(NoLease::Refused);
        }
        let holds_lock = self.holds_update_lock.get();
        let limit = limit.saturating_add(ANSWER_LIMIT);
        let lease = Lease::connect(tracer, process, holds_lock, limit)?;
        let lease = Rc::new(lease);
        *self.lease.borrow_mut() = Some(lease.clone());
        Ok(lease)
    }

    /// Same as [`Tracer::stop`], but also traces the processes and threads that it creates from now
    /// on. Its threads stay traced when the result is dropped, and even on an error.
    pub(crate) fn stop_and_keep<'p>(
        &self,
        process: &'p Process,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        let stopped = Stopped::none_yet(process, true);
        self.stop_all(stopped, limit, TraceScope::Descendants)
    }

    /// Same as [`Tracer::stop`], for a process that this thread traces already and that must not run as it is: on an
    /// error it is not resumed but killed, at the latest when this thread ends; see [`Stopped::killed_on_drop`]. Nothing
    /// waits for it yet, so the limit is [`LIMIT_AT_LAUNCH`].
    pub(crate) fn stop_or_kill<'p>(&self, process: &'p Process) -> Result<Stopped<'p>> {
        let stopped = Stopped::none_yet(process, false).killed_on_drop();
        self.stop_all(stopped, LIMIT_AT_LAUNCH, TraceScope::Threads)
    }

    fn stop_all<'p>(
        &self,
        stopped: Stopped<'p>,
        limit: Duration,
        scope: TraceScope,
    ) -> Result<Stopped<'p>> {
        if scope == TraceScope::Threads {
            // A stopped process waits for this thread. A thread that goes on tracing keeps its priority: it may be busy
            // all the time.
            priority::make_real_time();
        }
        let mut stopping = Stopping {
            tracer: self,
            stopped,
            scope,
            kept: self.kept.take(),
            order: Vec::new(),
            refusals: 0,
            born: HashSet::new(),
            budget: TimeBudget::new(limit),
            limit,
        };
        stopping.run()?;
        Ok(stopping.stopped)
    }
}

/// Returns the thread that traces a process; 0 if none does.
fn tracer_of(process: &Process) -> i32 {
    process.status().map_or(0, |status| status.tracer)
}

/// What comes of asking the follower of a process to stop it.
enum LeaseOutcome<'p> {
    Stopped(Stopped<'p>),
    /// Its tracer is no follower, or one that does not lend it.
    Refused,
    /// The follower is ending, or has ended; or the process has no tracer.
    FollowerEnds,
}

/// Returns whether a process could not be stopped because it has a tracer.
fn is_traced(error: &Error) -> bool {
    let ErrorKind::Process(ProcessError::Denied { denial, .. }) = error.kind() else {
        return false;
    };
    matches!(denial, Denial::Traced { .. } | Denial::BeingChanged { .. })
}

/// Calls `stop` again, `pause` later, if a thread had no processor: [`TRIES`] times in all.
fn with_retries<T>(pause: Duration, mut stop: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..TRIES {
        match stop() {
            Err(error) if waits_for_processor(&error) => std::thread::sleep(pause),
            stopped => return stopped,
        }
    }
    stop()
}

/// Returns whether a process could not be stopped because one of its threads is ready to run, and had no processor.
pub(crate) fn waits_for_processor(error: &Error) -> bool {
    let ErrorKind::Process(kind) = error.kind() else {
        return false;
    };
    matches!(kind, ProcessError::Busy { state: 'R', .. })
}

/// Returns whether the calling thread already traces the thread `tid`, and if so makes `tid` stop.
///
/// To be called before `PTRACE_SEIZE`, which waits for an execve in progress even if it will then
/// be refused. The execve may be waiting for us to reap sibling threads: a deadlock that the
/// watchdog does not break, as it knows only the processes that were there at the beginning.
fn interrupt_if_traced(tid: i32) -> bool {
    match ptrace::peek_state(tid) {
        TraceeState::Gone => false,
        TraceeState::EventStopped
        | TraceeState::GroupStopped
        | TraceeState::Cloned(_)
        | TraceeState::Executed => true,
        // Or it is a child of our own that is not traced, which cannot be interrupted.
        TraceeState::Running | TraceeState::Signal(_) | TraceeState::Exited => {
            ptrace::interrupt(tid).is_ok()
        }
    }
}

/// A process on the way to [`Stopped`].
struct Stopping<'t, 'p> {
    tracer: &'t Tracer<'t>,
    stopped: Stopped<'p>,
    scope: TraceScope,
    /// See [`Tracer::kept`].
    kept: HashSet<i32>,
    /// All tids of `stopped.tracees`, in the order in which they were found.
    order: Vec<i32>,
    /// The tids that a clone event reported before /proc listed them.
    born: HashSet<i32>,
    /// How often the kernel has refused a thread for no visible reason.
    refusals: usize,
    budget: TimeBudget,
    limit: Duration,
}

impl Stopping<'_, '_> {
    fn run(&mut self) -> Result<()> {
        let process = self.stopped.process();
        let mut list = process
            .threads()
            .map_err(|source| process.exited_or(source))?;
        let mut passes = 0;
        loop {
            let has_new = self.seize_new(&mut list)?;
            self.wait_for_all()?;
            passes += 1;
            // A pass that finds no new thread does not prove that there is none: the walk through
            // /proc/PID/task ends early at a thread that exits meanwhile. The count proves it, and
            // no such pass is needed: stopped threads are alive, so if their number is the number
            // of living threads, and all are threads of this process, none runs.
            let (stopped, living) = (self.stopped_count(), self.living_count(&list)?);
            let has_strangers = stopped >= living && self.has_detached_strangers();
            if stopped == living && !has_strangers {
                break;
            }
            if !has_new {
                self.reap_exited();
                // A thread that is exiting needs a processor.
                if passes > 3 {
                    self.tracer.wait_for_event();
                }
            }
            // The threads of the first pass are stopped in time. If they are all threads, a second
            // pass takes no time, so it is made even after the limit.
            if passes > 1 && self.budget.is_spent() {
                let unreaped = self.tracer_of_unreaped(list)?;
                return Err(match unreaped {
                    Some(tracer) => denial::traced(process, Operation::Attach, tracer),
                    None => threads_keep_starting(process, self.limit),
                });
            }
        }
        if ptrace::is_at_exec(process.pid()) {
            return Err(self.executed());
        }
        let is_stopped = |tracee: &Tracee| matches!(tracee, Tracee::Stopped(_));
        if self.stopped.tracees.values().any(is_stopped) {
            Ok(())
        } else {
            Err(Error::of_process(process.pid(), ProcessError::Exited))
        }
    }

    /// Returns the tracer of a thread that has exited and that its tracer has not reaped, so that it is still counted.
    fn tracer_of_unreaped(&self, mut list: ThreadList) -> Result<Option<i32>> {
        let process = self.stopped.process();
        let tids = list.read().map_err(|source| process.exited_or(source))?;
        let own = nix::unistd::gettid().as_raw();
        let tracer = |tid: i32| {
            let status = process.thread_status(tid).ok()?;
            let is_unreaped = status.state == 'Z' && status.tracer != 0 && status.tracer != own;
            is_unreaped.then_some(status.tracer)
        };
        let unknown = |tid: &i32| !self.stopped.tracees.contains_key(tid);
        Ok(tids.into_iter().filter(unknown).find_map(tracer))
    }

    /// Seizes the threads not seen before; returns whether there were any.
    fn seize_new(&mut self, list: &mut ThreadList) -> Result<bool> {
        let process = self.stopped.process();
        let tids = list.read().map_err(|source| process.exited_or(source))?;
        if tids.is_empty() {
            return Err(Error::of_process(process.pid(), ProcessError::Exited));
        }
        let known = self.stopped.tracees.len();
        for tid in tids {
            if self.stopped.tracees.contains_key(&tid) {
                continue;
            }
            let may_be_traced = self.scope == TraceScope::Descendants || self.kept.contains(&tid);
            if may_be_traced && interrupt_if_traced(tid) {
                self.add(tid, Tracee::Running);
                continue;
            }
            match self.tracer.seize(tid, self.scope) {
                Ok(()) => {
                    self.add(tid, Tracee::Running);
                    // If it has just exited, the wait reports that.
                    let _ = ptrace::interrupt(tid);
                }
                Err(Errno::ESRCH) => {}
                Err(errno) => self.refused(tid, errno)?,
            }
        }
        Ok(self.stopped.tracees.len() > known)
    }

    /// Handles a thread that cannot be seized: it may be exiting, or be our tracee already.
    fn refused(&mut self, tid: i32, errno: Errno) -> Result<()> {
        let process = self.stopped.process();
        let Ok(status) = process.thread_status(tid) else {
            return Ok(());
        };
        if matches!(status.state, 'Z' | 'X') {
            if tid == process.pid() {
                // A zombie leader stays listed and counted as long as other threads live.
                self.add(tid, Tracee::Gone);
            } else {
                // If it was our tracee, it is counted until we reap it.
                reap_if_exited(process, tid);
            }
            return Ok(());
        }
        if status.tracer == nix::unistd::gettid().as_raw() {
            // We have traced it before, or its creator, so that it was traced from its start.
            self.add(tid, Tracee::Running);
            if ptrace::peek_state(tid) == TraceeState::Running {
                // If it has just exited, the wait reports that.
                let _ = ptrace::interrupt(tid);
            }
            return Ok(());
        }
        if process.is_exiting(tid) {
            return Ok(());
        }
        if status.tracer != 0 {
            return Err(denial::traced(process, Operation::Attach, status.tracer));
        }
        if self.refusals < MAX_REFUSALS {
            // Another tracer may have been there, and have detached before we could see which.
            self.refusals += 1;
            return Ok(());
        }
        Err(denial::error(process, Operation::Attach, errno))
    }

    /// Detaches the threads that are not of this process, and returns whether there were any: after a thread has exited, and before it
    /// was seized, another process may have got a thread of the same number. Each would be counted as one of ours, which then runs.
    fn has_detached_strangers(&mut self) -> bool {
        let process = self.stopped.process();
        let stopped = |(&tid, tracee): (&i32, &Tracee)| match tracee {
            Tracee::Stopped(signal) => Some((tid, *signal)),
            _ => None,
        };
        let stopped = self.stopped.tracees.iter().filter_map(stopped);
        let strangers: Vec<_> = stopped
            .filter(|&(tid, _)| !signals::is_thread_of(process.pid(), tid))
            .collect();
        for &(tid, signal) in &strangers {
            if ptrace::detach(tid, signal) == Err(Errno::ESRCH) {
                // It is one of ours, killed while it was stopped.
                reap_if_exited(process, tid);
            }
            self.stopped.tracees.remove(&tid);
            self.order.retain(|known| *known != tid);
        }
        !strangers.is_empty()
    }

    /// Waits until every known thread is stopped or gone.
    fn wait_for_all(&mut self) -> Result<()> {
        let mut next = 0;
        let mut rested = false;
        // `order` grows while we wait.
        while let Some(&tid) = self.order.get(next) {
            next += 1;
            while self.stopped.tracees.get(&tid) == Some(&Tracee::Running)
                && !self.has_stopped(tid)?
            {
                if self.budget.is_spent() {
                    return Err(busy(self.stopped.process(), tid, self.limit));
                }
                let remaining = (self.order.len() - next) as u32;
                if remaining > 0 && !rested {
                    // Each thread that stops sends us SIGCHLD; being woken by it would delay the
                    // next stop.
                    rested = true;
                    std::thread::sleep(TICK.min(MIN_THREAD_STOP * remaining));
                    continue;
                }
                if !self.tracer.wait_for_event() {
                    // An exec in another thread may wait for its dead siblings to be reaped.
                    self.reap_exited();
                }
            }
        }
        Ok(())
    }

    /// Records the new state of a running thread; returns false if it still runs.
    fn has_stopped(&mut self, tid: i32) -> Result<bool> {
        let state = match self.scope {
            TraceScope::Threads => ptrace::peek_state_even_if_consumed(tid),
            TraceScope::Descendants => ptrace::peek_state(tid),
        };
        let tracee = match state {
            TraceeState::Running => return Ok(false),
            TraceeState::Signal(signal) => self.stopped_with(tid, signal),
            TraceeState::EventStopped | TraceeState::GroupStopped => self.stopped_with(tid, 0),
            TraceeState::Cloned(_) if self.scope == TraceScope::Descendants => {
                self.stopped_with(tid, 0)
            }
            TraceeState::Cloned(child) => {
                if !self.stopped.tracees.contains_key(&child) {
                    self.add(child, Tracee::Running);
                    self.born.insert(child);
                }
                self.stopped_with(tid, 0)
            }
            TraceeState::Executed => {
                self.stopped.tracees.insert(tid, Tracee::Stopped(0));
                return Err(self.executed());
            }
            TraceeState::Exited => {
                reap(self.stopped.process(), tid);
                Tracee::Gone
            }
            TraceeState::Gone => Tracee::Gone,
        };
        self.stopped.tracees.insert(tid, tracee);
        Ok(true)
    }

    fn stopped_with(&self, tid: i32, signal: i32) -> Tracee {
        // clone(2) without CLONE_THREAD makes a process of its own.
        let pid = self.stopped.process().pid();
        let is_foreign = self.born.contains(&tid) && !signals::is_thread_of(pid, tid);
        if is_foreign {
            Tracee::Foreign(signal)
        } else {
            Tracee::Stopped(signal)
        }
    }

    /// Records which threads have exited, stopped ones among them: SIGKILL ends these, too.
    fn reap_exited(&mut self) {
        let process = self.stopped.process();
        let known = self.stopped.tracees.iter_mut();
        for (&tid, tracee) in known.filter(|(_, tracee)| **tracee != Tracee::Gone) {
            let is_gone = match ptrace::peek_state(tid) {
                // waitid(2) does not report a leader that has exited before its other threads.
                TraceeState::Running => tid == process.pid() && process.is_exiting(tid),
                TraceeState::Exited => {
                    reap(process, tid);
                    true
                }
                TraceeState::Gone => true,
                TraceeState::Signal(_)
                | TraceeState::EventStopped
                | TraceeState::GroupStopped
                | TraceeState::Cloned(_)
                | TraceeState::Executed => false,
            };
            if is_gone {
                *tracee = Tracee::Gone;
            }
        }
    }

    fn add(&mut self, tid: i32, tracee: Tracee) {
        self.stopped.tracees.insert(tid, tracee);
        self.order.push(tid);
    }

    /// How many threads are stopped; a zombie leader is counted, too.
    fn stopped_count(&self) -> usize {
        let leader = self.stopped.process().pid();
        let counts = |(&tid, tracee): (&i32, &Tracee)| match tracee {
            Tracee::Stopped(_) => true,
            Tracee::Gone => tid == leader,
            Tracee::Running | Tracee::Foreign(_) => false,
        };
        self.stopped
            .tracees
            .iter()
            .filter(|&one| counts(one))
            .count()
    }

    /// How many threads are alive; a zombie leader is counted, too.
    fn living_count(&self, list: &ThreadList) -> Result<usize> {
        let process = self.stopped.process();
        list.count().map_err(|source| process.exited_or(source))
    }

    fn executed(&self) -> Error {
        let pid = self.stopped.process().pid();
        Error::of_process(pid, ProcessError::Executed)
    }
}

fn threads_keep_starting(process: &Process, limit: Duration) -> Error {
    Error::of_process(
        process.pid(),
        ProcessError::ThreadsKeepStarting {
            limit_ms: limit.as_millis() as u64,
        },
    )
}

/// Returns the error for a thread that has not stopped within `limit`.
fn busy(process: &Process, tid: i32, limit: Duration) -> Error {
    let status = process.thread_status(tid).unwrap_or_default();
    let wchan = process
        .read(&format!("task/{tid}/wchan"))
        .unwrap_or_default();
    Error::new(
        Subject::Thread {
            pid: process.pid(),
            tid,
        },
        ProcessError::Busy {
            name: status.name,
            state: status.state,
            wchan: String::from_utf8_lossy(&wchan).into_owned(),
            limit_ms: limit.as_millis() as u64,
        },
    )
}

#[cfg(test)]
mod tests {
    use test_support::{Talker, fixture};

    use super::*;
    use crate::trace::tracer::with_tracer;

    fn busy_in(state: char) -> Error {
        let kind = ProcessError::Busy {
            name: "spin".to_owned(),
            state,
            wchan: String::new(),
            limit_ms: 500,
        };
        Error::new(Subject::Thread { pid: 1, tid: 2 }, kind)
    }

    /// Returns how many attempts were made, and whether the last one succeeded: the one with the number `succeeds`
    /// does, and those before it fail with a thread in this state.
    fn tries(state: char, succeeds: u32) -> (u32, bool) {
        let mut tries = 0;
        let stopped = with_retries(Duration::ZERO, || {
            tries += 1;
            if tries == succeeds {
                Ok(())
            } else {
                Err(busy_in(state))
            }
        });
        (tries, stopped.is_ok())
    }

    // promise: Stopping and resuming: A process with a thread that had no processor for the whole time limit is resumed, and tried again twice
    #[test]
    fn thread_without_processor_is_tried_again() {
        assert_eq!(tries('R', 1), (1, true));
        assert_eq!(tries('R', 3), (3, true));
        assert_eq!(tries('R', 4), (3, false));
        assert_eq!(tries('D', 2), (1, false));
    }

    #[test]
    fn thread_of_another_process_is_let_go() {
        const LIMIT: Duration = Duration::from_secs(10);
        let talkers = [(); 2].map(|()| Talker::start(&fixture("idle_threads.pie")));
        let [process, other] = talkers
            .each_ref()
            .map(|it| Process::open(it.pid()).unwrap());
        let stranger = other.pid();
        let stopped = with_tracer(&[&process, &other], |tracer| {
            let mut stopping = Stopping {
                tracer,
                stopped: Stopped::none_yet(&process, false),
                scope: TraceScope::Threads,
                kept: HashSet::new(),
                order: Vec::new(),
                refusals: 0,
                born: HashSet::new(),
                budget: TimeBudget::new(LIMIT),
                limit: LIMIT,
            };
            // As if a thread that was listed had exited, and the other process had its number.
            tracer.seize(stranger, TraceScope::Threads).unwrap();
            ptrace::interrupt(stranger).unwrap();
            stopping.add(stranger, Tracee::Running);
            stopping.run()?;
            let tracer = other.status().unwrap().tracer;
            Ok((stopping.stopped.tids().collect::<Vec<_>>(), tracer))
        });
        let (tids, tracer) = stopped.unwrap();
        assert!(tids.contains(&process.pid()) && !tids.contains(&stranger));
        assert_eq!(tracer, 0);
    }
}
