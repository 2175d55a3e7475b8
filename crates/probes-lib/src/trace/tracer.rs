//! [`Tracer`]: the thread that makes all ptrace calls, and the caller's thread that watches it.
//!
//! ```text
//!  caller's thread        tracer thread (makes all ptrace calls)
//!  ───────────────        ──────────────────────────────────────
//!  checks that the        PTRACE_SEIZE …
//!  tracer does not hang
//!  in PTRACE_SEIZE, and
//!  reaps dead tracees
//!  for it if it does
//! ```
//!
//! ptrace belongs to a thread, and the kernel detaches every tracee when its tracer thread ends: so
//! the tracees resume however the tracer ends.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::convert::Infallible;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::errno::Errno;

use crate::error::{Result, SystemError};
use crate::process::Process;
use crate::process::denial::TRACER_NAME;
use crate::sys::ptrace::{self, TraceScope, TraceeState};
use crate::sys::signals::{self, BlockedSignals};
use crate::trace::lease::Lease;

/// The polling interval, for what no signal announces: how often the watchdog (the caller's thread) checks the tracer,
/// and how often the tracer checks its tracees, because another thread of this process may have received their SIGCHLD.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// How often the watchdog checks the tracer while no thread is being seized.
const IDLE_TICK: Duration = Duration::from_millis(20);

/// The right to make ptrace calls, which belongs to one thread.
pub(crate) struct Tracer<'a> {
    /// Odd while the thread is in `PTRACE_SEIZE`.
    seizes: &'a AtomicU64,
    sigchld_taken: &'a AtomicBool,
    /// The connection to the follower, if the process is lent to us.
    pub(crate) lease: RefCell<Option<Rc<Lease>>>,
    /// Whether we hold the update lock of the process.
    pub(crate) holds_update_lock: Cell<bool>,
    /// The threads that were left traced and stopped when some of the process were resumed, to be stopped again soon.
    pub(crate) kept: RefCell<HashSet<i32>>,
    not_send: PhantomData<*const ()>,
}

/// Runs `work` on a new thread, which may make ptrace calls. Meanwhile, reaps exited threads of
/// `targets` if the new thread hangs in `PTRACE_SEIZE`.
///
/// Signals that could end or stop us halfway are blocked until `work` is done.
pub(crate) fn with_tracer<T: Send>(
    targets: &[&Process],
    work: impl FnOnce(&Tracer<'_>) -> Result<T> + Send,
) -> Result<T> {
    let sigchld_taken = AtomicBool::new(false);
    let result = {
        let _blocked = BlockedSignals::new();
        run_watched(targets, &sigchld_taken, work)
    };
    if sigchld_taken.load(Ordering::Relaxed) {
        // The SIGCHLD may have been for another child of this process as well, as pending signals of
        // one kind merge.
        signals::raise_sigchld();
    }
    result
}

fn run_watched<T: Send>(
    targets: &[&Process],
    sigchld_taken: &AtomicBool,
    work: impl FnOnce(&Tracer<'_>) -> Result<T> + Send,
) -> Result<T> {
    let seizes = AtomicU64::new(0);
    let (alive, ended) = mpsc::channel::<Infallible>();
    std::thread::scope(|scope| {
        let run = || {
            let _alive = alive;
            work(&Tracer {
                seizes: &seizes,
                sigchld_taken,
                lease: RefCell::default(),
                holds_update_lock: Cell::new(false),
                kept: RefCell::default(),
                not_send: PhantomData,
            })
        };
        let spawned = std::thread::Builder::new()
            .name(TRACER_NAME.to_owned())
            .spawn_scoped(scope, run);
        let tracer = spawned.map_err(|source| SystemError::NoThread { source })?;
        let (mut before, mut tick) = (0, TICK);
        while ended.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
            let now = seizes.load(Ordering::Relaxed);
            let (is_seizing, is_same) = (now % 2 == 1, now == before);
            if is_seizing && is_same {
                targets.iter().copied().for_each(reap_for_exec);
            }
            tick = if is_same && !is_seizing {
                IDLE_TICK
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

/// Reaps exited tracees for a tracer that cannot.
///
/// execve(2) in a thread of the target waits, holding the lock that `PTRACE_SEIZE` wants, until its
/// dead siblings are reaped, which only their tracer's process can do.
fn reap_for_exec(target: &Process) {
    let tids = target.threads().and_then(|mut list| list.read());
    for tid in tids.unwrap_or_default() {
        reap_if_exited(target, tid);
    }
}

/// Reaps a tracee of `target` if it has exited.
pub(crate) fn reap_if_exited(target: &Process, tid: i32) {
    if ptrace::peek_state(tid) == TraceeState::Exited {
        reap(target, tid);
    }
}

/// Reaps a thread that has exited. The leader is left to its own parent: nothing waits for it to be
/// reaped.
pub(crate) fn reap(target: &Process, tid: i32) {
    if tid != target.pid() {
        ptrace::reap(tid);
    }
}

impl Tracer<'_> {
    /// Waits for a short time until something may have happened to a tracee; returns whether a SIGCHLD came.
    pub(crate) fn wait_for_event(&self) -> bool {
        self.wait_up_to(TICK)
    }

    /// The same, for at most `limit`.
    pub(crate) fn wait_up_to(&self, limit: Duration) -> bool {
        let has_come = signals::take_sigchld(limit);
        if has_come {
            self.sigchld_taken.store(true, Ordering::Relaxed);
        }
        has_come
    }

    /// Returns whether SIGINT, SIGTERM, SIGHUP, SIGQUIT or SIGXCPU is pending and not ignored: they stay blocked until the
    /// `work` of [`with_tracer`] is done.
    pub(crate) fn is_interrupted(&self) -> bool {
        signals::is_interrupted()
    }

    /// Starts to trace a thread; the watchdog checks whether that hangs.
    pub(crate) fn seize(&self, tid: i32, scope: TraceScope) -> Result<(), Errno> {
        self.seizes.fetch_add(1, Ordering::Relaxed);
        let result = ptrace::seize(tid, scope);
        self.seizes.fetch_add(1, Ordering::Relaxed);
        result
    }
}
