//! [`TraceeSet`]: processes that stay traced, with all their threads and all that they start, and run on
//! meanwhile.
//!
//! ```text
//!            next_stopped()                   what happened         what becomes of the thread
//! SIGCHLD ─▶ one that stands ─▶ peek() ─▶ a signal              goes on with it
//!                                         a group-stop          stands until it is resumed
//!                                         a clone, fork, vfork  goes on; the new one, too: Forked
//!                                         an exec               stands: Executed
//!                                         a clone in our trampoline   stands: AtLoader
//!                                         its end               reaped, so that its parent is told
//! ```
//!
//! Nothing that a thread stands for is consumed before it goes on. So a thread that is looked at
//! once more still stands for the same, and should we die, the kernel lets every thread go on as if
//! it had never been traced.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use nix::sys::prctl;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::ReadMemory;
use crate::process::Process;
use crate::sys::ptrace::{self, Scope, Wait};
use crate::trace::stop::{Stopped, Tracer};

/// How often to look, whatever happens: another thread of this process may have applied our SIGCHLD.
pub(crate) const TICK: Duration = Duration::from_millis(10);

/// What the thread is called from then on: unlike other tracers of ours, it stays.
const FOLLOWER_NAME: &std::ffi::CStr = c"probes-follower";

/// How long a thread of our trampoline may take to end.
const ENDING: Duration = Duration::from_millis(100);

/// How long a process may take to stand before we look who keeps it from that.
const STANDING: Duration = Duration::from_millis(20);

/// Processes that are traced by this thread until it ends.
pub(crate) struct TraceeSet<'t> {
    tracer: &'t Tracer<'t>,
    /// The process of each thread. Some may have ended with their process.
    threads: HashMap<i32, i32>,
    /// Where the trampoline is, in each process that has one: threads that it starts tell that the
    /// process's loader has done something.
    trampolines: HashMap<i32, Range<u64>>,
    /// Processes that go by themselves, thread by thread, as soon as one stands.
    given_up: HashSet<i32>,
    /// Children of our own process that have ended, which it may want to wait for.
    left: HashSet<i32>,
}

/// What has happened to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceEvent {
    /// It has been started by `parent`.
    Forked {
        /// 0 if that is not known.
        parent: i32,
        pid: i32,
    },
    /// It has executed a program, and stands before its first instruction.
    Executed { pid: i32 },
    /// Its thread `tid` stands in the trampoline.
    AtLoader { pid: i32, tid: i32 },
    /// It has ended.
    Ended { pid: i32 },
}

impl<'t> TraceeSet<'t> {
    pub(crate) fn new(tracer: &'t Tracer<'t>) -> TraceeSet<'t> {
        // OtherObjects are not to wait for it. It fails for names that are too long.
        let _ = prctl::set_name(FOLLOWER_NAME);
        TraceeSet {
            tracer,
            threads: HashMap::new(),
            trampolines: HashMap::new(),
            given_up: HashSet::new(),
            left: HashSet::new(),
        }
    }

    /// Whether nobody is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Whether the process is in the tracees.
    fn has(&self, pid: i32) -> bool {
        self.threads.values().any(|&process| process == pid)
    }

    /// Stops all threads of a process, which belongs to the tracees from now on.
    ///
    /// # Errors
    ///
    /// As of [`Tracer::stop`]. Threads that have been stopped go on by [`TraceeSet::next`].
    pub(crate) fn hold<'p>(&self, process: &'p Process, limit: Duration) -> Result<Stopped<'p>> {
        match self.tracer.hold(process, limit.min(STANDING)) {
            Err(error) if is_late(&error) => {
                self.resume_others(process.pid());
                self.tracer.hold(process, limit)
            }
            done => done,
        }
    }

    /// Lets go on what stands of other processes. A thread in vfork(2) stands only when its child
    /// has executed a program, and that may wait for us.
    fn resume_others(&self, pid: i32) {
        for (&tid, _) in self.threads.iter().filter(|(_, other)| **other != pid) {
            match ptrace::peek(tid) {
                Wait::Signal(signal) => ptrace::resume(tid, signal),
                Wait::Trapped => ptrace::resume(tid, 0),
                // They have something to tell, or do not stand.
                Wait::Suspended
                | Wait::Cloned(_)
                | Wait::Executed
                | Wait::Running
                | Wait::Ended
                | Wait::Gone => {}
            }
        }
    }

    /// Gives up a process that could not be changed: its threads are let go as they come to stand.
    pub(crate) fn give_up(&mut self, pid: i32) {
        self.forget(pid);
        self.given_up.insert(pid);
    }

    /// Lets a process go on that `hold` has stopped.
    pub(crate) fn resume(&mut self, process: &Process, held: Stopped<'_>) {
        let pid = process.pid();
        // OtherObjects have ended, and were reaped when it was stopped.
        self.threads.retain(|_, other| *other != pid);
        self.threads
            .extend(held.leave().into_iter().map(|tid| (tid, pid)));
    }

    /// Takes in a process that stands, traced by this thread in another way, and lets it go on.
    pub(crate) fn adopt(&mut self, process: &Process, stopped: Stopped<'_>) {
        for tid in stopped.leave() {
            // It fails only if the process has been killed.
            let _ = ptrace::set_scope(tid, Scope::Descendants);
            if ptrace::is_at_exec(tid) {
                ptrace::resume(tid, 0);
            }
            self.threads.insert(tid, process.pid());
        }
    }

    /// The process, which stands after its execve.
    pub(crate) fn at_exec<'p>(&self, process: &'p Process) -> Stopped<'p> {
        Stopped::adopt_traced(process)
    }

    /// Lets a thread go on that was told of.
    pub(crate) fn resume_thread(&self, tid: i32) {
        ptrace::resume(tid, 0);
    }

    /// From now on, the threads that code in `trampoline` starts tell what the loader does; `None` for
    /// none.
    pub(crate) fn watch(&mut self, pid: i32, trampoline: Option<Range<u64>>) {
        match trampoline {
            Some(trampoline) => self.trampolines.insert(pid, trampoline),
            None => self.trampolines.remove(&pid),
        };
    }

    /// Whether any thread of a process that stands is in the trampoline, or in the handler of a signal that
    /// it has received there.
    pub(crate) fn is_in_hook_code(
        &self,
        pid: i32,
        held: &Stopped<'_>,
        memory: &impl ReadMemory,
    ) -> bool {
        let trampoline = self.trampolines.get(&pid);
        trampoline.is_some_and(|trampoline| held.leads_into(memory, trampoline))
    }

    /// Forgets a process that is not to be followed any more.
    pub(crate) fn forget(&mut self, pid: i32) {
        self.threads.retain(|_, process| *process != pid);
        self.trampolines.remove(&pid);
    }

    /// Waits, not for long, until something may have happened.
    pub(crate) fn wait(&mut self) {
        if self.next_stopped().is_none() {
            self.tracer.wait_up_to(TICK);
        }
    }

    /// What has happened, if anything has. All threads go on but those that it says stand. Looks no
    /// longer than to `end`: where things happen without a pause, there is always something.
    pub(crate) fn next(&mut self, end: Instant) -> Option<TraceEvent> {
        while Instant::now() < end {
            let tid = self.next_stopped()?;
            let pid = self.threads.get(&tid).copied();
            let what = ptrace::peek(tid);
            if pid.is_none() && self.is_given_up(tid) {
                detach_or_reap(tid, what);
                continue;
            }
            match what {
                Wait::Signal(signal) => ptrace::resume(tid, signal),
                Wait::Suspended => ptrace::listen(tid),
                Wait::Trapped => {
                    let news = self.register(tid);
                    ptrace::resume(tid, 0);
                    if news.is_some() {
                        return news;
                    }
                }
                Wait::Cloned(child) => match pid.filter(|pid| self.is_in_hook(*pid, tid)) {
                    Some(pid) => {
                        self.reap_hook_thread(child);
                        return Some(TraceEvent::AtLoader { pid, tid });
                    }
                    None => {
                        self.threads.remove(&child);
                        // It may have been let go, if this thread record_time its time to stop.
                        let is_traced = ptrace::peek(child) != Wait::Gone;
                        let news = is_traced.then(|| self.register(child)).flatten();
                        ptrace::resume(tid, 0);
                        if news.is_some() {
                            return news;
                        }
                    }
                },
                Wait::Executed => {
                    // Its other threads have ended, and the one that called has this tid now.
                    self.forget(tid);
                    self.threads.insert(tid, tid);
                    ptrace::take_exec(tid);
                    return Some(TraceEvent::Executed { pid: tid });
                }
                ended @ (Wait::Ended | Wait::Gone) => {
                    if ended == Wait::Ended {
                        self.reap(tid);
                    }
                    self.threads.remove(&tid);
                    // The first thread is the last to be told of, but perhaps it was no more.
                    if let Some(pid) = pid.filter(|pid| *pid == tid || !self.has(*pid)) {
                        self.forget(pid);
                        return Some(TraceEvent::Ended { pid });
                    }
                }
                // Killed this moment.
                Wait::Running => {}
            }
        }
        None
    }

    fn is_given_up(&self, tid: i32) -> bool {
        let process = || Process::open(tid).ok()?.status().ok();
        !self.given_up.is_empty()
            && process().is_some_and(|status| self.given_up.contains(&status.tgid))
    }

    fn next_stopped(&mut self) -> Option<i32> {
        let tid = ptrace::next_stopped()?;
        if !self.left.contains(&tid) {
            return Some(tid);
        }
        if ptrace::peek(tid) != Wait::Ended {
            // Another, that has the tid of one that was waited for.
            self.left.remove(&tid);
            return Some(tid);
        }
        // It hides the others until it is waited for.
        let mut tids = self.threads.keys().copied();
        tids.find(|tid| !self.left.contains(tid) && ptrace::peek(*tid) != Wait::Running)
    }

    /// Takes in a thread that is new; tells if its process is.
    fn register(&mut self, tid: i32) -> Option<TraceEvent> {
        if self.threads.contains_key(&tid) {
            return None;
        }
        // If it has been killed, it is told of once more.
        let status = Process::open(tid).ok()?.status().ok()?;
        self.threads.insert(tid, status.tgid);
        (status.tgid == tid).then_some(TraceEvent::Forked {
            parent: status.ppid,
            pid: tid,
        })
    }

    /// Whether a thread that has started another stands in the trampoline.
    fn is_in_hook(&self, pid: i32, tid: i32) -> bool {
        let trampoline = self.trampolines.get(&pid);
        trampoline.is_some_and(|trampoline| {
            ptrace::program_counter(tid).is_ok_and(|at| trampoline.contains(&at))
        })
    }

    /// Lets a thread of the trampoline end: all that it does.
    fn reap_hook_thread(&mut self, tid: i32) {
        let begun = Instant::now();
        while begun.elapsed() < ENDING {
            match ptrace::peek(tid) {
                ended @ (Wait::Ended | Wait::Gone) => {
                    if ended == Wait::Ended {
                        ptrace::reap(tid);
                    }
                    // It may have been met before its creator.
                    self.threads.remove(&tid);
                    return;
                }
                Wait::Running | Wait::Suspended => {
                    self.tracer.wait_for_news();
                }
                Wait::Signal(signal) => ptrace::resume(tid, signal),
                Wait::Trapped | Wait::Cloned(_) | Wait::Executed => ptrace::resume(tid, 0),
            }
        }
        // In a group-stop, perhaps.
        let _ = self.register(tid);
    }

    /// Reaps what has ended: its parent is told only then. What is a child of this process as well
    /// is left to it.
    fn reap(&mut self, tid: i32) {
        let is_own = || {
            let status = Process::open(tid).map(|process| process.status());
            let own = std::process::id() as i32;
            matches!(status, Ok(Ok(status)) if status.ppid == own && status.tgid == tid)
        };
        if is_own() {
            self.left.insert(tid);
        } else {
            ptrace::reap(tid);
        }
    }
}

fn is_late(error: &Error) -> bool {
    use ErrorKind::{Busy, ThreadsKeepStarting};
    matches!(error.kind(), Busy { .. } | ThreadsKeepStarting { .. })
}

/// Lets a thread go for good, which stands for `what`, or reaps it.
fn detach_or_reap(tid: i32, what: Wait) {
    let signal = match what {
        Wait::Ended => return ptrace::reap(tid),
        Wait::Gone | Wait::Running => return,
        Wait::Signal(signal) => signal,
        Wait::Trapped | Wait::Suspended | Wait::Cloned(_) | Wait::Executed => 0,
    };
    // It fails only if the thread has been killed, which is told of next.
    let _ = ptrace::detach(tid, signal);
}
