//! [`TraceeSet`]: processes that stay traced while they run, with all their threads and all that
//! they start.
//!
//! ```text
//!          next_stopped()                  stopped for                what becomes of the thread
//! SIGCHLD ─▶ stopped tid ─▶ peek_state() ─▶ a signal                   resumes with it; maybe Starved
//!                                          its start                  stays stopped: Forked; then resumes
//!                                          our interrupt              resumes
//!                                          a group-stop               stays stopped until SIGCONT
//!                                          a clone, fork, vfork       resumes, and the new one too: Forked
//!                                          an exec                    stays stopped: Executed
//!                                          a clone in a loader hook   stays stopped: AtLoader
//!                                          its exit                   is reaped, so that its parent sees it: Exited
//! ```
//!
//! A stop is not consumed before the thread resumes, except that of an exec. So a thread that is looked at once more is
//! still stopped for the same reason, and should we die, the kernel resumes every thread as if it had never been
//! traced.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use nix::sys::prctl;

use crate::error::Result;
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::process::children::children;
use crate::sys::ptrace::{self, TraceScope, TraceeState};
use crate::sys::signals;
use crate::trace::starvation::StarvedThreads;
use crate::trace::stopped::Stopped;
use crate::trace::tracer::Tracer;

/// How often to look for stopped threads even if no signal has come: another thread of this process may have received
/// our SIGCHLD.
pub(crate) const FOLLOW_TICK: Duration = Duration::from_millis(10);

/// The name of the tracing thread once it has a tracee set: unlike other tracers of ours, it goes
/// on tracing.
const FOLLOWER_NAME: &std::ffi::CStr = c"probes-follower";

/// Returns whether a thread has a tracee set, by its name.
pub(crate) fn is_follower(tid: i32) -> bool {
    if tid == 0 {
        return false;
    }
    let thread = Process::open(tid).ok();
    let status = thread.and_then(|thread| thread.status().ok());
    status.is_some_and(|status| status.name.as_bytes() == FOLLOWER_NAME.to_bytes())
}

/// How long a thread that a loader hook has started may take to exit.
const HOOK_THREAD_EXIT_LIMIT: Duration = Duration::from_millis(100);

/// How long a process may take to stop before other processes, which may keep it from stopping, are
/// resumed.
const FIRST_STOP_LIMIT: Duration = Duration::from_millis(20);

/// The processes that this thread traces until they exit or are detached.
pub(crate) struct TraceeSet<'t> {
    tracer: &'t Tracer<'t>,
    /// The process of each thread. Some threads may have exited: those that were reaped while a process was stopped.
    threads: HashMap<i32, i32>,
    /// Where the loader hook is in each process that has one. The hook starts a thread whenever the
    /// loader changes the list of loaded objects: its clone is what tells us.
    hooks: HashMap<i32, Range<u64>>,
    /// Processes that are detached thread by thread, as each stops.
    given_up: HashMap<i32, Option<Process>>,
    /// The threads that they had then: known even if /proc cannot be opened.
    given_up_tids: HashSet<i32>,
    /// Exited children of our own process, which it may want to wait for.
    unreaped: HashSet<i32>,
    /// Those of which it could not be found out whose children they are, each with whether files or memory were lacking.
    undecided: HashMap<i32, bool>,
    starved: StarvedThreads,
}

/// What has happened to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceEvent {
    /// It has been started by `parent`.
    /// `parent` is 0 if it could not be found out.
    Forked { parent: i32, pid: i32 },
    /// It has executed a program, and is stopped before its first instruction.
    Executed { pid: i32 },
    /// Its thread `tid` is stopped in the loader hook.
    AtLoader { pid: i32, tid: i32 },
    /// A thread of it receives signals faster than it can be resumed.
    Starved { pid: i32 },
    /// It has exited.
    Exited { pid: i32 },
}

impl<'t> TraceeSet<'t> {
    pub(crate) fn new(tracer: &'t Tracer<'t>) -> TraceeSet<'t> {
        // The name tells other tools not to wait for this thread to detach. Setting it fails only
        // for names that are too long.
        let _ = prctl::set_name(FOLLOWER_NAME);
        TraceeSet {
            tracer,
            threads: HashMap::new(),
            hooks: HashMap::new(),
            given_up: HashMap::new(),
            given_up_tids: HashSet::new(),
            unreaped: HashSet::new(),
            undecided: HashMap::new(),
            starved: StarvedThreads::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Returns whether a thread of the process is in the set.
    pub(crate) fn has(&self, pid: i32) -> bool {
        self.threads.values().any(|&process| process == pid)
    }

    /// Returns the process of a thread, if that is in the set.
    pub(crate) fn process_of(&self, tid: i32) -> Option<i32> {
        self.threads.get(&tid).copied()
    }

    /// Stops all threads of a process, and keeps tracing them and all that it starts. It is in the
    /// set from [`TraceeSet::resume`] on.
    ///
    /// # Errors
    ///
    /// See [`Tracer::stop`]. Threads that have been stopped resume in [`TraceeSet::next`].
    pub(crate) fn stop_and_keep<'p>(
        &self,
        process: &'p Process,
        limit: Duration,
    ) -> Result<Stopped<'p>> {
        match self
            .tracer
            .stop_and_keep(process, limit.min(FIRST_STOP_LIMIT))
        {
            Err(error) if error.is_stop_timeout() => {
                self.resume_others(process.pid());
                self.tracer.stop_and_keep(process, limit)
            }
            done => done,
        }
    }

    /// Resumes stopped threads of other processes. A thread in vfork(2) stops only after its child
    /// has executed a program or exited, and the child may be one of those that we have stopped.
    pub(crate) fn resume_others(&self, pid: i32) {
        for (&tid, _) in self.threads.iter().filter(|(_, other)| **other != pid) {
            resume_unless_it_reports(tid);
        }
    }

    /// Gives up a process that could not be changed: each of its threads is detached when it stops.
    pub(crate) fn give_up(&mut self, pid: i32) {
        let threads = self.threads.iter().filter(|(_, process)| **process == pid);
        let tids: Vec<i32> = threads.map(|(tid, _)| *tid).collect();
        self.forget(pid);
        for tid in tids {
            self.given_up_tids.insert(tid);
            // It fails only if the thread has exited.
            let _ = ptrace::interrupt(tid);
        }
        match Process::open(pid) {
            // Nothing is left to detach.
            Err(error) if error.is_gone() => {}
            // If it could not be opened, neither its exit nor a new process with its pid is noticed.
            process => drop(self.given_up.insert(pid, process.ok())),
        }
    }

    /// Resumes at once the threads of a process that have nothing to report; [`TraceeSet::next`]
    /// handles the others. Starvation is measured anew: while the process was stopped, other
    /// processes received signals that were not counted, and its own threads could not run.
    pub(crate) fn resume_now(&mut self, pid: i32) {
        self.starved = StarvedThreads::default();
        for (&tid, _) in self.threads.iter().filter(|(_, other)| **other == pid) {
            resume_unless_it_reports(tid);
        }
    }

    /// Interrupts the running threads of a process. If the process is in a group-stop, threads of
    /// it that were resumed nevertheless enter the group-stop again.
    pub(crate) fn interrupt_running(&self, pid: i32) {
        for (&tid, _) in self.threads.iter().filter(|(_, other)| **other == pid) {
            if ptrace::peek_state(tid) == TraceeState::Running {
                // It fails only if the thread has been killed.
                let _ = ptrace::interrupt(tid);
            }
        }
    }

    /// Resumes a process that `stop_and_keep` has stopped, in the next calls of [`TraceeSet::next`].
    pub(crate) fn resume(&mut self, process: &Process, stopped: Stopped<'_>) {
        let pid = process.pid();
        // Threads that are not among `stopped` have exited, and were reaped when it was stopped.
        self.threads.retain(|_, other| *other != pid);
        self.threads
            .extend(stopped.keep_stopped().into_iter().map(|tid| (tid, pid)));
    }

    /// Adds a stopped process that this thread traces without its descendants; from now on, also what it starts is
    /// traced. Its threads resume now or in the next calls of [`TraceeSet::next`].
    pub(crate) fn adopt(&mut self, process: &Process, stopped: Stopped<'_>) {
        for tid in stopped.keep_stopped() {
            // It fails only if the process has been killed.
            let _ = ptrace::set_scope(tid, TraceScope::Descendants);
            if ptrace::is_at_exec(tid) {
                ptrace::resume(tid, 0);
            }
            self.threads.insert(tid, process.pid());
        }
    }

    /// Returns a process that is stopped after its execve as [`Stopped`].
    pub(crate) fn at_exec<'p>(&self, process: &'p Process) -> Stopped<'p> {
        Stopped::adopt_traced(process)
    }

    /// Resumes a thread that an event has reported as stopped.
    pub(crate) fn resume_thread(&self, tid: i32) {
        ptrace::resume(tid, 0);
    }

    /// Detaches from a thread of which [`TraceEvent::Executed`] was reported: its stop is consumed, and carries no signal.
    pub(crate) fn detach_executed(&self, tid: i32) {
        // It fails only if the thread has been killed.
        let _ = ptrace::detach(tid, 0);
    }

    /// Treats the threads that code in `hook` starts as reports of the loader; `None` if there is
    /// no hook.
    pub(crate) fn set_hook(&mut self, pid: i32, hook: Option<Range<u64>>) {
        match hook {
            Some(hook) => self.hooks.insert(pid, hook),
            None => self.hooks.remove(&pid),
        };
    }

    /// Returns whether any thread of a stopped process executes the loader hook, or the handler of a
    /// signal that it has received there.
    pub(crate) fn has_thread_in_hook(
        &self,
        pid: i32,
        stopped: &Stopped<'_>,
        memory: &impl ReadMemory,
    ) -> bool {
        let hook = self.hooks.get(&pid);
        hook.is_some_and(|hook| stopped.leads_into(memory, std::slice::from_ref(hook)))
    }

    /// Removes a process from the set.
    pub(crate) fn forget(&mut self, pid: i32) {
        self.threads.retain(|tid, process| {
            let is_kept = *process != pid;
            if !is_kept {
                self.starved.forget(*tid);
            }
            is_kept
        });
        self.hooks.remove(&pid);
    }

    /// Waits for a short time until something may have happened.
    pub(crate) fn wait(&mut self) {
        if self.next_stopped().is_none() {
            self.tracer.wait_up_to(FOLLOW_TICK);
        }
    }

    /// Returns the next event, if there is one. Resumes the threads that have stopped, except one
    /// that the event reports as stopped. Returns `None` after `end`, even if there are more
    /// events: otherwise it might never return `None` for busy processes.
    pub(crate) fn next(&mut self, end: Instant) -> Option<TraceEvent> {
        self.reap_undecided();
        while Instant::now() < end {
            let tid = self.next_stopped()?;
            let event = self.handle(tid);
            if event.is_some() {
                return event;
            }
        }
        None
    }

    /// Resumes a stopped thread, or reaps it; returns an event if its stop is one.
    fn handle(&mut self, tid: i32) -> Option<TraceEvent> {
        let pid = self.threads.get(&tid).copied();
        let state = ptrace::peek_state(tid);
        if pid.is_none() && self.is_given_up(tid) && state != TraceeState::Exited {
            detach(tid, state);
            self.given_up_tids.remove(&tid);
            return None;
        }
        match state {
            TraceeState::Signal(signal) => {
                let is_starved = self.starved.is_starved(tid, signal);
                ptrace::resume(tid, signal);
                return pid
                    .filter(|_| is_starved)
                    .map(|pid| TraceEvent::Starved { pid });
            }
            TraceeState::GroupStopped => ptrace::listen(tid),
            TraceeState::EventStopped => {
                let event = self.register(tid, None);
                // A new process resumes when its stop is handled once more: it must not exit before its event is handled.
                if event.is_none() {
                    ptrace::resume(tid, 0);
                }
                return event;
            }
            TraceeState::Cloned(child) => return self.cloned(pid, tid, child),
            TraceeState::Executed => {
                if let Some(event) = self.register_child(tid) {
                    return Some(event);
                }
                // The other threads have exited, and the one that called execve has this tid now.
                self.forget(tid);
                self.threads.insert(tid, tid);
                ptrace::consume_exec(tid);
                return Some(TraceEvent::Executed { pid: tid });
            }
            TraceeState::Exited => {
                self.reap(tid, pid);
                return self.gone(pid, tid);
            }
            TraceeState::Gone => return self.gone(pid, tid),
            // Killed at this moment.
            TraceeState::Running => {}
        }
        None
    }

    /// Handles the start of `child` by a thread, which stays stopped if it executes a loader hook.
    fn cloned(&mut self, pid: Option<i32>, tid: i32, child: i32) -> Option<TraceEvent> {
        if let Some(pid) = pid.filter(|pid| self.is_in_hook(*pid, tid)) {
            self.reap_hook_thread(child);
            return Some(TraceEvent::AtLoader { pid, tid });
        }
        // A thread that had this tid earlier would hide the new one.
        self.threads.remove(&child);
        // The child may have been detached already, if thread `tid` was slow to stop.
        let is_traced = ptrace::peek_state(child) != TraceeState::Gone;
        let event = is_traced.then(|| self.register(child, pid)).flatten();
        ptrace::resume(tid, 0);
        event
    }

    /// Removes a thread that has exited; returns an event if its process has, too.
    fn gone(&mut self, pid: Option<i32>, tid: i32) -> Option<TraceEvent> {
        self.threads.remove(&tid);
        self.given_up_tids.remove(&tid);
        self.starved.forget(tid);
        // The exit of the first thread is reported last, unless that thread was not traced any more. It may have ended
        // before the others, and not be in the set.
        let pid = pid.or_else(|| self.has(tid).then_some(tid));
        let pid = pid.filter(|pid| *pid == tid || !self.has(*pid))?;
        self.forget(pid);
        Some(TraceEvent::Exited { pid })
    }

    fn is_given_up(&mut self, tid: i32) -> bool {
        if self.given_up_tids.contains(&tid) {
            return true;
        }
        // A later process may have the same pid.
        let has_exited = |it: &Option<Process>| it.as_ref().is_some_and(Process::has_exited);
        self.given_up.retain(|_, process| !has_exited(process));
        let process = || Process::open(tid).ok()?.status().ok();
        !self.given_up.is_empty()
            && process().is_some_and(|status| self.given_up.contains_key(&status.tgid))
    }

    fn next_stopped(&mut self) -> Option<i32> {
        let tid = ptrace::next_stopped()?;
        if !self.unreaped.contains(&tid) {
            return Some(tid);
        }
        if ptrace::peek_state(tid) != TraceeState::Exited {
            // That child was waited for, and a new process has its pid.
            self.unreaped.remove(&tid);
            return Some(tid);
        }
        // The exited child hides the others until it is waited for.
        let given_up = self.given_up.values().flatten();
        let given_up =
            given_up.filter_map(|process| process.threads().and_then(|mut it| it.read()).ok());
        let given_up = given_up
            .flatten()
            .filter(|tid| ptrace::peek_state(*tid) != TraceeState::Gone);
        let mut tids = self.threads.keys().copied().chain(given_up);
        tids.find(|tid| {
            !self.unreaped.contains(tid) && ptrace::peek_state(*tid) != TraceeState::Running
        })
    }

    /// Adds a thread that is new; returns an event if its process is, too. `creator` is the process that has started it,
    /// if known.
    fn register(&mut self, tid: i32, creator: Option<i32>) -> Option<TraceEvent> {
        if self.knows(tid) {
            return None;
        }
        let status = Process::open(tid).and_then(|process| {
            let status = process.status();
            status.map_err(|source| process.exited_or(source))
        });
        let (pid, parent) = match status {
            Ok(status) => (status.tgid, status.ppid),
            // It has been killed, which is reported separately.
            Err(error) if error.is_gone() => return None,
            // For example because too many files are open.
            Err(_) => (self.process_of_new(tid)?, creator.unwrap_or_default()),
        };
        self.threads.insert(tid, pid);
        (pid == tid).then_some(TraceEvent::Forked { parent, pid: tid })
    }

    /// Returns whether a thread is in the set. One that was reaped while its process was stopped may have had its tid.
    fn knows(&self, tid: i32) -> bool {
        let known = self.threads.get(&tid);
        known.is_some_and(|pid| signals::is_thread_of(*pid, tid))
    }

    /// Returns the process of a thread that is not in the set, without opening a file.
    fn process_of_new(&self, tid: i32) -> Option<i32> {
        let known = self.threads.values().copied();
        let mut pids = std::iter::once(tid).chain(known);
        pids.find(|&pid| signals::is_thread_of(pid, tid))
    }

    /// Adds a child of a process that has executed a program, if there is one that is not in the set: another thread has
    /// started it, and was ended by the execve before that could be reported. To be called before the execve is reported:
    /// the child has the memory of the program before.
    fn register_child(&mut self, pid: i32) -> Option<TraceEvent> {
        if !self.has(pid) {
            return None;
        }
        let process = Process::open(pid).ok()?;
        children(&process).into_iter().find_map(|child| {
            let is_known = self.knows(child) || self.unreaped.contains(&child);
            let is_new = !is_known && !self.is_given_up(child);
            if is_new && ptrace::peek_state(child) != TraceeState::Gone {
                self.register(child, Some(pid))
            } else {
                None
            }
        })
    }

    /// Returns whether a thread that has started another is stopped in the loader hook.
    fn is_in_hook(&self, pid: i32, tid: i32) -> bool {
        let hook = self.hooks.get(&pid);
        hook.is_some_and(|hook| ptrace::program_counter(tid).is_ok_and(|at| hook.contains(&at)))
    }

    /// Lets a thread that a loader hook has started exit, which is all that it does, and reaps it.
    fn reap_hook_thread(&mut self, tid: i32) {
        let begun = Instant::now();
        while begun.elapsed() < HOOK_THREAD_EXIT_LIMIT {
            match ptrace::peek_state(tid) {
                state @ (TraceeState::Exited | TraceeState::Gone) => {
                    if state == TraceeState::Exited {
                        ptrace::reap(tid);
                    }
                    // Its own stop may have been handled before its creator's.
                    self.threads.remove(&tid);
                    return;
                }
                TraceeState::Running | TraceeState::GroupStopped => {
                    self.tracer.wait_for_event();
                }
                TraceeState::Signal(signal) => ptrace::resume(tid, signal),
                TraceeState::EventStopped | TraceeState::Cloned(_) | TraceeState::Executed => {
                    ptrace::resume(tid, 0)
                }
            }
        }
        // It may be in a group-stop.
        let _ = self.register(tid, None);
    }

    /// Reaps a thread that has exited; its real parent is notified only then. A child of our own
    /// process is not reaped: our process may wait for it. `pid` is the process of the thread, if known.
    fn reap(&mut self, tid: i32, pid: Option<i32>) {
        // Only the first thread of a process can be waited for. An execve or exit waits until all others are reaped.
        if pid.is_some_and(|pid| pid != tid) {
            return ptrace::reap(tid);
        }
        let status = Process::open(tid).and_then(|process| {
            let status = process.status();
            status.map_err(|source| process.exited_or(source))
        });
        let own = std::process::id() as i32;
        match status {
            Ok(status) if status.ppid == own && status.tgid == tid => {
                self.unreaped.insert(tid);
            }
            // For example because too many files are open: decided later.
            Err(error) if !error.is_gone() => {
                self.unreaped.insert(tid);
                self.undecided.insert(tid, error.is_shortage());
            }
            _ => ptrace::reap(tid),
        }
    }

    /// Returns whether there are threads of which it could not be found out, when they exited, whether they are children
    /// of our own process, because too many files were open or for lack of memory.
    pub(crate) fn lacks_files(&self) -> bool {
        self.undecided.values().any(|lacked| *lacked)
    }

    /// Reaps these threads, unless it still cannot be found out.
    pub(crate) fn reap_undecided(&mut self) {
        for tid in std::mem::take(&mut self.undecided).into_keys() {
            self.unreaped.remove(&tid);
            if ptrace::peek_state(tid) == TraceeState::Exited {
                self.reap(tid, None);
            }
        }
    }
}

/// Detaches a thread that is stopped in `state`.
fn detach(tid: i32, state: TraceeState) {
    let signal = match state {
        TraceeState::Exited | TraceeState::Gone | TraceeState::Running => return,
        TraceeState::Signal(signal) => signal,
        TraceeState::EventStopped | TraceeState::GroupStopped | TraceeState::Cloned(_) => 0,
        TraceeState::Executed => {
            ptrace::consume_exec(tid);
            0
        }
    };
    // It fails only if the thread has been killed, which is reported next.
    let _ = ptrace::detach(tid, signal);
}

/// Resumes a tracee with the signal that has stopped it, if it has nothing else to report.
fn resume_unless_it_reports(tid: i32) {
    match ptrace::peek_state(tid) {
        TraceeState::Signal(signal) => ptrace::resume(tid, signal),
        TraceeState::EventStopped => ptrace::resume(tid, 0),
        TraceeState::GroupStopped => ptrace::listen(tid),
        // They have something to report, or are not stopped.
        TraceeState::Cloned(_)
        | TraceeState::Executed
        | TraceeState::Running
        | TraceeState::Exited
        | TraceeState::Gone => {}
    }
}

#[cfg(test)]
mod tests;
