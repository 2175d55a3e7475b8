//! Signals and priority of our own threads while a process stands still.

use std::time::Duration;

/// While this lives, the thread that made it, and threads it starts, receive no signal but faults.
pub(super) struct SignalsHeldBack {
    before: libc::sigset_t,
}

impl SignalsHeldBack {
    pub(super) fn new() -> SignalsHeldBack {
        let mut held_back = empty();
        let mut before = empty();
        // SAFETY: both sets are initialised and outlive the calls; a thread may always change its
        // own mask.
        unsafe {
            libc::sigfillset(&raw mut held_back);
            // A fault in this thread has to end it: held back, it would loop for ever.
            for fault in [
                libc::SIGSEGV,
                libc::SIGBUS,
                libc::SIGFPE,
                libc::SIGILL,
                libc::SIGTRAP,
                libc::SIGABRT,
                libc::SIGSYS,
            ] {
                libc::sigdelset(&raw mut held_back, fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held_back, &raw mut before);
        }
        SignalsHeldBack { before }
    }

    /// The mask of the thread that made it, as it was and will be again.
    pub(super) fn before(&self) -> libc::sigset_t {
        self.before
    }
}

impl Drop for SignalsHeldBack {
    fn drop(&mut self) {
        // SAFETY: `before` was filled by pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const self.before,
                std::ptr::null_mut(),
            );
        }
    }
}

/// Waits up to `limit` for a SIGCHLD, which has to be held back; true if one came.
pub(super) fn take_sigchld(limit: Duration) -> bool {
    let timeout = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    let mut sigchld = empty();
    // SAFETY: the set and the timeout are initialised and outlive the calls; no siginfo is asked for.
    unsafe {
        libc::sigaddset(&raw mut sigchld, libc::SIGCHLD);
        let signal =
            libc::sigtimedwait(&raw const sigchld, std::ptr::null_mut(), &raw const timeout);
        signal == libc::SIGCHLD
    }
}

/// Whether SIGINT, SIGTERM, SIGHUP or SIGQUIT is pending, which has to be held back.
pub(super) fn is_told_to_end() -> bool {
    let mut pending = empty();
    // SAFETY: the set is initialised and outlives the calls.
    unsafe {
        libc::sigpending(&raw mut pending);
        [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT]
            .iter()
            .any(|&signal| libc::sigismember(&raw const pending, signal) == 1)
    }
}

/// Sends this process the SIGCHLD that `take_sigchld` took.
pub(super) fn raise_sigchld() {
    // SAFETY: sends a signal to ourselves; SIGCHLD is ignored unless our caller handles it.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGCHLD);
    }
}

/// Asks that this thread runs before others while a process waits for it: real-time priority, or
/// else the best ordinary one. Threads and programs it starts do not inherit it.
pub(super) fn raise_priority() {
    let param = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` outlives the call; 0 is the calling thread. Without the privilege both calls
    // fail, which only costs time.
    unsafe {
        if libc::sched_setscheduler(0, policy, &raw const param) != 0 {
            libc::setpriority(libc::PRIO_PROCESS, 0, -20);
        }
    }
}

fn empty() -> libc::sigset_t {
    // SAFETY: sigset_t is plain data, and sigemptyset initialises all of it.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        set
    }
}
