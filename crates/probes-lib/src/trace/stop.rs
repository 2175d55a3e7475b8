//! Stops every thread of a process, to a fixpoint, and lets them all go again.
//!
//! ```text
//!  caller's thread        tracer thread (makes all ptrace calls)
//!  ───────────────        ──────────────────────────────────────────────
//!  watches that the       SEIZE + INTERRUPT each tid of /proc/PID/task
//!  tracer is not stuck    wait for each, consuming nothing
//!  in PTRACE_SEIZE, and   again, until as many stand as /proc/PID/status
//!  reaps dead tracees     says there are
//!  for it if it is        Stopped: change what is to be changed
//!                         DETACH each, giving back its signal
//! ```
//!
//! ptrace belongs to a thread, and the kernel lets every tracee go when its tracer thread ends: so
//! the path of dying is the path of recovery.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::{ErrorKind, Operation, Result};
use crate::process::denial;
use crate::process::memory::ProcessMemory;
use crate::process::{Process, ThreadList};
use crate::sys::ptrace::{self, Scope, Wait};
use crate::sys::signals::{self, SignalsHeldBack};
use crate::trace::memory::StoppedMemory;
use crate::trace::stacks::Stacks;

/// How often those look who may not be told: the watchdog at the tracer, and the tracer at tracees
/// whose SIGCHLD another thread of this process may have applied.
const TICK: Duration = Duration::from_millis(1);

/// How often the watchdog looks while nothing is being seized.
const AT_REST: Duration = Duration::from_millis(20);

/// How long a thread takes to stop, at least, when it is its lock.
const STOPPING: Duration = Duration::from_micros(4);

/// What the threads are called that trace: others tell by it that they will not for long.
pub(crate) const TRACER_NAME: &str = "probes-tracer";

/// How often a refusal without a visible reason is put to the test again.
const MAX_REFUSALS: usize = 10;

/// The right to make ptrace calls, which belongs to one thread.
pub(crate) struct Tracer<'a> {
    /// Odd while the thread is in `PTRACE_SEIZE`.
    seizes: &'a AtomicU64,
    sigchld_taken: &'a AtomicBool,
    not_send: PhantomData<*const ()>,
}

/// Runs `prepared` on a thread of its own, which may trace; `targets` are watched over meanwhile.
///
/// Signals that could end or stop us half way are held back until `prepared` is done.
pub(crate) fn with_tracer<T: Send>(
    targets: &[&Process],
    prepared: impl FnOnce(&Tracer<'_>) -> Result<T> + Send,
) -> Result<T> {
    let sigchld_taken = AtomicBool::new(false);
    let result = {
        let _held_back = SignalsHeldBack::new();
        run_watched(targets, &sigchld_taken, prepared)
    };
    if sigchld_taken.load(Ordering::Relaxed) {
        // It may have stop_time for a child of our caller's as well: signals of one kind merge.
        signals::raise_sigchld();
    }
    result
}

fn run_watched<T: Send>(
    targets: &[&Process],
    sigchld_taken: &AtomicBool,
    prepared: impl FnOnce(&Tracer<'_>) -> Result<T> + Send,
) -> Result<T> {
    let seizes = AtomicU64::new(0);
    let (alive, ended) = mpsc::channel::<Infallible>();
    std::thread::scope(|scope| {
        let run = || {
            let _alive = alive;
            prepared(&Tracer {
                seizes: &seizes,
                sigchld_taken,
                not_send: PhantomData,
            })
        };
        let spawned = std::thread::Builder::new()
            .name(TRACER_NAME.to_owned())
            .spawn_scoped(scope, run);
        let tracer = spawned.map_err(|source| ErrorKind::NoThread { source })?;
        let (mut before, mut tick) = (0, TICK);
        while ended.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
            let now = seizes.load(Ordering::Relaxed);
            let (is_seizing, is_same) = (now % 2 == 1, now == before);
            if is_seizing && is_same {
                targets.iter().copied().for_each(reap_for_exec);
            }
            tick = if is_same && !is_seizing {
                AT_REST
            } else {
                TICK
            };
            before = now;
        }
        match tracer.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Reaps tracees that have ended, for a tracer that cannot.
///
/// execve(2) in a thread of the target waits, holding the lock that `PTRACE_SEIZE` wants, until its
/// dead siblings are reaped, which only their tracer's process can do.
fn reap_for_exec(target: &Process) {
    let tids = target.threads().and_then(|mut list| list.read());
    for tid in tids.unwrap_or_default() {
        reap_if_ended(target, tid);
    }
}

/// Whether this thread traces a thread, which is made to stand then.
///
/// To be asked before `PTRACE_SEIZE`, which waits for an execve in progress even if it is to be
/// refused: for one that waits for us to reap its siblings, perhaps, and the watchdog knows only
/// the processes that were there at the beginning.
fn is_traced(tid: i32) -> bool {
    match ptrace::peek(tid) {
        Wait::Gone => false,
        Wait::Trapped | Wait::Suspended | Wait::Cloned(_) | Wait::Executed => true,
        // Or a child of our own that nobody traces.
        Wait::Running | Wait::Signal(_) | Wait::Ended => ptrace::interrupt(tid).is_ok(),
    }
}

fn reap_if_ended(target: &Process, tid: i32) {
    if ptrace::peek(tid) == Wait::Ended {
        reap(target, tid);
    }
}

/// Reaps a thread that has ended. The leader is left to its own parent: nothing waits for it to be
/// reaped.
fn reap(target: &Process, tid: i32) {
    if tid != target.pid() {
        ptrace::reap(tid);
    }
}

impl Tracer<'_> {
    /// Stops every thread of `process` within `limit`.
    ///
    /// # Errors
    ///
    /// If the kernel does not permit it, if a thread does not stop in time, or if the process exits
    /// or executes another program meanwhile. Then every thread goes on as if nothing had been.
    pub(crate) fn stop<'p>(&self, process: &'p Process, limit: Duration) -> Result<Stopped<'p>> {
        self.stop_all(process, limit, Scope::Threads)
    }

    /// As `stop`, and traces what the process starts from now on. Nothing goes on by itself, not
    /// even on an error: all threads of the process stay traced.
    pub(crate) fn hold<'p>(&self, process: &'p Process, limit: Duration) -> Result<Stopped<'p>> {
        self.stop_all(process, limit, Scope::Descendants)
    }

    fn stop_all<'p>(
        &self,
        process: &'p Process,
        limit: Duration,
        scope: Scope,
    ) -> Result<Stopped<'p>> {
        if scope == Scope::Threads {
            // Not of who stays, and may have to do without a pause.
            signals::raise_priority();
        }
        let since = Instant::now();
        let mut stopping = Stopping {
            tracer: self,
            stopped: Stopped {
                process,
                tracees: HashMap::new(),
                since,
                stays_traced: scope == Scope::Descendants,
                is_doomed: false,
                stacks: OnceCell::new(),
                not_send: PhantomData,
            },
            scope,
            order: Vec::new(),
            refusals: 0,
            born: HashSet::new(),
            deadline: since + limit,
            limit,
        };
        stopping.run()?;
        Ok(stopping.stopped)
    }

    /// Waits, not for long, until something may have happened to a tracee; false if nothing has.
    pub(crate) fn wait_for_news(&self) -> bool {
        self.wait_up_to(TICK)
    }

    pub(crate) fn wait_up_to(&self, limit: Duration) -> bool {
        let news = signals::take_sigchld(limit);
        if news {
            self.sigchld_taken.store(true, Ordering::Relaxed);
        }
        news
    }

    /// Whether a signal that ends us is waiting until we are done.
    pub(crate) fn is_interrupted(&self) -> bool {
        signals::is_interrupted()
    }

    fn seize(&self, tid: i32, scope: Scope) -> Result<(), Errno> {
        self.seizes.fetch_add(1, Ordering::Relaxed);
        let result = ptrace::seize(tid, scope);
        self.seizes.fetch_add(1, Ordering::Relaxed);
        result
    }
}

/// What a traced thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracee {
    Running,
    /// It stands, and is to be given this signal (0 for none) when it goes on.
    Stopped(i32),
    /// As `Stopped`, but of another process: a child made by clone(2), seized for us.
    Foreign(i32),
    Gone,
}

/// A process none of whose threads runs. Dropping it lets them go on.
pub(crate) struct Stopped<'p> {
    process: &'p Process,
    tracees: HashMap<i32, Tracee>,
    since: Instant,
    /// Whether it is to be left as it is when this is dropped.
    stays_traced: bool,
    /// Whether it is to be killed then, as it is not to run as it is.
    is_doomed: bool,
    /// Where its stacks are, if somebody has asked: nobody maps memory meanwhile.
    stacks: OnceCell<Stacks>,
    not_send: PhantomData<*const ()>,
}

impl<'p> Stopped<'p> {
    /// A process whose only thread is in a ptrace-stop of this thread's.
    pub(crate) fn adopt(process: &'p Process) -> Stopped<'p> {
        Stopped::adopt_to(process, false)
    }

    /// As `adopt`, of a process that stays traced.
    pub(crate) fn adopt_traced(process: &'p Process) -> Stopped<'p> {
        Stopped::adopt_to(process, true)
    }

    fn adopt_to(process: &'p Process, stays_traced: bool) -> Stopped<'p> {
        Stopped {
            process,
            tracees: HashMap::from([(process.pid(), Tracee::Stopped(0))]),
            since: Instant::now(),
            stays_traced,
            is_doomed: false,
            stacks: OnceCell::new(),
            not_send: PhantomData,
        }
    }

    /// Has the process killed if this is dropped, and not released.
    pub(crate) fn killed_on_drop(mut self) -> Stopped<'p> {
        self.is_doomed = true;
        self
    }

    pub(crate) fn process(&self) -> &'p Process {
        self.process
    }

    /// Those that stand.
    pub(crate) fn tids(&self) -> impl Iterator<Item = i32> {
        let standing =
            |(&tid, tracee): (&i32, &Tracee)| matches!(tracee, Tracee::Stopped(_)).then_some(tid);
        self.tracees.iter().filter_map(standing)
    }

    pub(crate) fn stacks(&self) -> &Stacks {
        self.stacks.get_or_init(|| Stacks::of(self.process))
    }

    /// The memory of the process, which nobody else changes now.
    ///
    /// # Errors
    ///
    /// If all its threads have been killed meanwhile.
    pub(crate) fn memory<'m>(&self, memory: &'m ProcessMemory) -> Result<StoppedMemory<'m>> {
        match self.tids().next() {
            Some(tid) => Ok(StoppedMemory::new(memory, tid)),
            None => Err(ErrorKind::Exited {
                pid: self.process.pid(),
            }
            .into()),
        }
    }

    /// How long the process has stop_time still, at most.
    pub(crate) fn stop_time(&self) -> Duration {
        self.since.elapsed()
    }

    /// Leaves the threads as they are, traced and standing; says which they are.
    pub(crate) fn leave(mut self) -> Vec<i32> {
        let stands = |(tid, tracee)| {
            matches!(tracee, Tracee::Stopped(_) | Tracee::Foreign(_)).then_some(tid)
        };
        self.tracees.drain().filter_map(stands).collect()
    }

    /// Lets every thread go on, with the signals that were on their way; says how long the process
    /// has stop_time still, at most.
    pub(crate) fn release(mut self) -> Duration {
        self.detach();
        self.since.elapsed()
    }

    fn detach(&mut self) {
        for (tid, tracee) in self.tracees.drain() {
            let (Tracee::Stopped(signal) | Tracee::Foreign(signal)) = tracee else {
                continue;
            };
            if ptrace::detach(tid, signal) == Err(Errno::ESRCH) {
                // Killed while it stop_time.
                reap_if_ended(self.process, tid);
            }
        }
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if self.stays_traced {
            return;
        }
        if self.is_doomed && !self.tracees.is_empty() {
            // It fails only if the process has been killed already.
            let _ = kill(Pid::from_raw(self.process.pid()), Signal::SIGKILL);
        }
        // A thread that has not stopped cannot be detached; it is let go when this thread ends.
        self.detach();
    }
}

/// A process on the way to [`Stopped`].
struct Stopping<'t, 'p> {
    tracer: &'t Tracer<'t>,
    stopped: Stopped<'p>,
    scope: Scope,
    /// All tids of `stopped.tracees`, as they were met.
    order: Vec<i32>,
    /// Those that a clone(2) told of, before /proc listed them.
    born: HashSet<i32>,
    /// How often the kernel has refused a thread for no reason that can be seen.
    refusals: usize,
    deadline: Instant,
    limit: Duration,
}

impl Stopping<'_, '_> {
    fn run(&mut self) -> Result<()> {
        let process = self.stopped.process;
        let mut list = process
            .threads()
            .map_err(|source| process.exited_or(source))?;
        let mut passes = 0;
        loop {
            let clean = self.seize_unknown(&mut list)?;
            self.wait_for_all()?;
            passes += 1;
            // A pass that meets no new thread would be no proof that there is none: the walk through
            // /proc/PID/task ends early at a thread that dies under it. The count is one, and needs
            // no such pass: all that stand are alive, so if they are as many as live, nobody runs.
            if self.standing() == self.alive()? {
                break;
            }
            if clean {
                self.reap_ended();
            }
            // All that the first pass has met stand: a second one takes no time, if they are all.
            if passes > 1 && Instant::now() > self.deadline {
                return Err(ErrorKind::ThreadsKeepStarting {
                    pid: process.pid(),
                    deadline_ms: self.limit.as_millis() as u64,
                }
                .into());
            }
        }
        if ptrace::is_at_exec(process.pid()) {
            return Err(self.executed());
        }
        let any = |tracee: &Tracee| matches!(tracee, Tracee::Stopped(_));
        if self.stopped.tracees.values().any(any) {
            Ok(())
        } else {
            Err(ErrorKind::Exited { pid: process.pid() }.into())
        }
    }

    /// Seizes the threads not seen before; false if there were any.
    fn seize_unknown(&mut self, list: &mut ThreadList) -> Result<bool> {
        let process = self.stopped.process;
        let tids = list.read().map_err(|source| process.exited_or(source))?;
        if tids.is_empty() {
            return Err(ErrorKind::Exited { pid: process.pid() }.into());
        }
        let mut clean = true;
        for tid in tids {
            if self.stopped.tracees.contains_key(&tid) {
                continue;
            }
            clean = false;
            if self.scope == Scope::Descendants && is_traced(tid) {
                self.add(tid, Tracee::Running);
                continue;
            }
            match self.tracer.seize(tid, self.scope) {
                Ok(()) => {
                    self.add(tid, Tracee::Running);
                    // If it has just died, the wait will say so.
                    let _ = ptrace::interrupt(tid);
                }
                Err(Errno::ESRCH) => {}
                Err(errno) => self.refused(tid, errno)?,
            }
        }
        Ok(clean)
    }

    /// Finds out why a thread cannot be seized: it may be dying, or be ours already.
    fn refused(&mut self, tid: i32, errno: Errno) -> Result<()> {
        let process = self.stopped.process;
        let Ok(status) = process.thread_status(tid) else {
            return Ok(());
        };
        if matches!(status.state, 'Z' | 'X') {
            if tid == process.pid() {
                // A zombie leader stays listed, and counted, as long as other threads live.
                self.add(tid, Tracee::Gone);
            } else {
                // Traced by us before, it is counted until we reap it.
                reap_if_ended(process, tid);
            }
            return Ok(());
        }
        if status.tracer == nix::unistd::gettid().as_raw() {
            // We have traced it before, or its creator, and so it was traced from its start.
            self.add(tid, Tracee::Running);
            if ptrace::peek(tid) == Wait::Running {
                // If it has just died, the wait will say so.
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
            // Another tracer may have been there, and have let go before we could see who it was.
            self.refusals += 1;
            return Ok(());
        }
        Err(denial::error(process, Operation::Attach, errno))
    }

    /// Waits until every known thread stands or is gone.
    fn wait_for_all(&mut self) -> Result<()> {
        let mut next = 0;
        let mut rested = false;
        // `order` grows while we wait.
        while let Some(&tid) = self.order.get(next) {
            next += 1;
            while self.stopped.tracees.get(&tid) == Some(&Tracee::Running) && !self.look_at(tid)? {
                if Instant::now() > self.deadline {
                    return Err(self.busy(tid));
                }
                let behind = (self.order.len() - next) as u32;
                if behind > 0 && !rested {
                    // Each that stops sends a signal, and woken by it, we would get in the way of
                    // the next.
                    rested = true;
                    std::thread::sleep(TICK.min(STOPPING * behind));
                    continue;
                }
                if !self.tracer.wait_for_news() {
                    // An exec in another thread may wait for its dead siblings to be reaped.
                    self.reap_ended();
                }
            }
        }
        Ok(())
    }

    /// Takes note of what a running thread has come to; false if it still runs.
    fn look_at(&mut self, tid: i32) -> Result<bool> {
        let tracee = match ptrace::peek(tid) {
            Wait::Running => return Ok(false),
            Wait::Signal(signal) => self.standing_as(tid, signal),
            Wait::Trapped | Wait::Suspended => self.standing_as(tid, 0),
            Wait::Cloned(_) if self.scope == Scope::Descendants => self.standing_as(tid, 0),
            Wait::Cloned(child) => {
                if !self.stopped.tracees.contains_key(&child) {
                    self.add(child, Tracee::Running);
                    self.born.insert(child);
                }
                self.standing_as(tid, 0)
            }
            Wait::Executed => {
                self.stopped.tracees.insert(tid, Tracee::Stopped(0));
                return Err(self.executed());
            }
            Wait::Ended => {
                reap(self.stopped.process, tid);
                Tracee::Gone
            }
            Wait::Gone => Tracee::Gone,
        };
        self.stopped.tracees.insert(tid, tracee);
        Ok(true)
    }

    fn standing_as(&self, tid: i32, signal: i32) -> Tracee {
        // clone(2) without CLONE_THREAD makes a process of its own.
        let foreign = self.born.contains(&tid) && self.stopped.process.thread_status(tid).is_err();
        if foreign {
            Tracee::Foreign(signal)
        } else {
            Tracee::Stopped(signal)
        }
    }

    /// Takes note of those that have ended, standing ones among them: a stop does not save from
    /// SIGKILL.
    fn reap_ended(&mut self) {
        let process = self.stopped.process;
        let known = self.stopped.tracees.iter_mut();
        for (&tid, tracee) in known.filter(|(_, tracee)| **tracee != Tracee::Gone) {
            let gone = match ptrace::peek(tid) {
                // waitid(2) says nothing of a leader that has ended before its other threads.
                Wait::Running => tid == process.pid() && process.is_exiting(tid),
                Wait::Ended => {
                    reap(process, tid);
                    true
                }
                Wait::Gone => true,
                Wait::Signal(_)
                | Wait::Trapped
                | Wait::Suspended
                | Wait::Cloned(_)
                | Wait::Executed => false,
            };
            if gone {
                *tracee = Tracee::Gone;
            }
        }
    }

    fn add(&mut self, tid: i32, tracee: Tracee) {
        self.stopped.tracees.insert(tid, tracee);
        self.order.push(tid);
    }

    /// Threads that stand, and a zombie leader.
    fn standing(&self) -> usize {
        let leader = self.stopped.process.pid();
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

    fn alive(&self) -> Result<usize> {
        let process = self.stopped.process;
        let status = process
            .status()
            .map_err(|source| process.exited_or(source))?;
        Ok(status.threads)
    }

    fn executed(&self) -> crate::Error {
        let pid = self.stopped.process.pid();
        ErrorKind::Executed { pid }.into()
    }

    fn busy(&self, tid: i32) -> crate::Error {
        let process = self.stopped.process;
        let status = process.thread_status(tid).unwrap_or_default();
        let wchan = process
            .read(&format!("task/{tid}/wchan"))
            .unwrap_or_default();
        ErrorKind::Busy {
            pid: process.pid(),
            tid,
            name: status.name,
            state: status.state,
            wchan: String::from_utf8_lossy(&wchan).into_owned(),
            deadline_ms: self.limit.as_millis() as u64,
        }
        .into()
    }
}
