//! Signals and priority of our own threads while a process is stopped or being started.

use std::mem::MaybeUninit;
use std::time::Duration;

use libc::c_int;
use nix::errno::Errno;

/// While this lives, the thread that made it, and threads that it starts, receive no signals but faults.
pub(crate) struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    pub(crate) fn new() -> BlockedSignals {
        let mut blocked = empty();
        let mut before = empty();
        // SAFETY: both sets are initialised and outlive the calls; a thread may always change its
        // own mask.
        unsafe {
            libc::sigfillset(&raw mut blocked);
            // A fault has to reach its handler. sigprocmask(2): if one is generated while
            // it is blocked, "the result is undefined".
            for fault in [
                libc::SIGSEGV,
                libc::SIGBUS,
                libc::SIGFPE,
                libc::SIGILL,
                libc::SIGTRAP,
                libc::SIGABRT,
                libc::SIGSYS,
            ] {
                libc::sigdelset(&raw mut blocked, fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, &raw mut before);
        }
        BlockedSignals { before }
    }
}

impl Drop for BlockedSignals {
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

/// The signals of a thread while it starts a program. They are blocked from before the child
/// exists.
pub(crate) struct SignalsAtLaunch {
    blocked: BlockedSignals,
    /// Whether SIGCHLD was ignored, and is not any more.
    ignored_sigchld: bool,
}

impl SignalsAtLaunch {
    /// Blocks signals. With `wait`, also makes children waitable if SIGCHLD is ignored.
    pub(crate) fn new(wait: bool) -> SignalsAtLaunch {
        SignalsAtLaunch {
            blocked: BlockedSignals::new(),
            // waitpid(2): while SIGCHLD is ignored, no status of a child is kept for its parent.
            ignored_sigchld: wait && stop_ignoring_sigchld(),
        }
    }

    /// Returns what the program would have inherited without these changes.
    pub(crate) fn inherited(&self) -> InheritedSignals {
        InheritedSignals {
            mask: self.blocked.before,
            ignores_sigchld: self.ignored_sigchld,
        }
    }

    /// Leaves the signals blocked, and SIGCHLD not ignored, for good.
    pub(crate) fn keep_blocked(self) {
        std::mem::forget(self);
    }
}

impl Drop for SignalsAtLaunch {
    fn drop(&mut self) {
        if self.ignored_sigchld {
            ignore_sigchld();
        }
    }
}

/// What a program is to inherit: the signals of the thread that asked for its start, not of the one
/// that starts it.
#[derive(Clone, Copy)]
pub(crate) struct InheritedSignals {
    mask: libc::sigset_t,
    ignores_sigchld: bool,
}

impl InheritedSignals {
    /// Restores the inherited signals, in the child before its execve; makes only system calls.
    pub(crate) fn restore(&self) {
        if self.ignores_sigchld {
            ignore_sigchld();
        }
        // SAFETY: the mask was filled by pthread_sigmask; the child has this one thread.
        unsafe {
            libc::sigprocmask(
                libc::SIG_SETMASK,
                &raw const self.mask,
                std::ptr::null_mut(),
            );
        }
    }
}

fn ignore_sigchld() {
    // SAFETY: no handler is installed.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
    }
}

/// Gives SIGCHLD its default action if it is ignored; returns whether it was.
fn stop_ignoring_sigchld() -> bool {
    // SAFETY: sigaction is plain data, for which all zeroes is a valid value; it is filled by the
    // first call, and no handler is installed.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGCHLD, std::ptr::null(), &raw mut action);
        let ignored = action.sa_sigaction == libc::SIG_IGN;
        if ignored {
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        }
        ignored
    }
}

/// A signal that this process has received, with fields of its siginfo_t, which sigaction(2)
/// explains.
///
/// ```no_run
/// use std::process::Command;
/// use probes_lib::{Launch, ReceivedSignal};
///
/// let mut launched = Launch::new(Command::new("./server.exe")).attended().spawn()?;
/// // The fields come from sigwaitinfo(2), or from what is read from a signalfd(2).
/// let hang_up = ReceivedSignal { number: 1, code: 0, sender: 4711, uid: 1000, value: 0 };
/// launched.pass_on(&hang_up).unwrap();
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    /// Which signal.
    pub number: i32,
    /// How it came to be sent (`si_code`).
    pub code: i32,
    /// The process that sent it, if one has.
    pub sender: i32,
    /// The real user id of that process.
    pub uid: u32,
    /// The value that was queued with it, a number or an address.
    pub value: u64,
}

/// Sends a process a signal that we have received, with its siginfo_t as far as the kernel allows.
pub(crate) fn pass_on(pid: i32, signal: &ReceivedSignal) -> Result<(), Errno> {
    /// The siginfo_t of a signal that was queued: asm-generic/siginfo.h.
    #[repr(C)]
    struct Queued {
        number: i32,
        errno: i32,
        code: i32,
        padding: i32,
        sender: i32,
        uid: u32,
        value: u64,
        rest: [u64; 12],
    }
    const { assert!(size_of::<Queued>() == size_of::<libc::siginfo_t>()) };
    // rt_sigqueueinfo(2): to send to another process, the code must be negative and not SI_TKILL.
    if signal.code >= 0 || signal.code == libc::SI_TKILL {
        // SAFETY: a system call on numbers.
        return Errno::result(unsafe { libc::kill(pid, signal.number) }).map(drop);
    }
    let queued = Queued {
        number: signal.number,
        errno: 0,
        code: signal.code,
        padding: 0,
        sender: signal.sender,
        uid: signal.uid,
        value: signal.value,
        rest: [0; 12],
    };
    // SAFETY: `queued` has the size and layout of a siginfo_t and outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_rt_sigqueueinfo,
            pid,
            signal.number,
            &raw const queued,
        )
    };
    Errno::result(result).map(drop)
}

/// Returns whether `tid` is a thread of the process `pid`. Opens no file.
pub(crate) fn is_thread_of(pid: i32, tid: i32) -> bool {
    // SAFETY: takes no pointer, and sends nothing: "If sig is 0, then no signal is sent" (kill(2)).
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, 0) };
    // If we may not send it a signal, it is there.
    !matches!(Errno::result(sent), Err(Errno::ESRCH | Errno::EINVAL))
}

/// Waits up to `limit` for a SIGCHLD, which has to be blocked; returns whether one came.
pub(crate) fn take_sigchld(limit: Duration) -> bool {
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

/// Returns whether SIGINT, SIGTERM, SIGHUP, SIGQUIT or SIGXCPU is pending and not ignored; all have to be blocked. The
/// kernel keeps blocked signals pending even if they are ignored, as SIGHUP is under nohup(1).
pub(crate) fn is_interrupted() -> bool {
    let mut pending = empty();
    // SAFETY: the set is initialised and outlives the calls.
    unsafe {
        libc::sigpending(&raw mut pending);
        [
            libc::SIGINT,
            libc::SIGTERM,
            libc::SIGHUP,
            libc::SIGQUIT,
            libc::SIGXCPU,
        ]
        .into_iter()
        .any(|signal| libc::sigismember(&raw const pending, signal) == 1 && !is_ignored(signal))
    }
}

fn is_ignored(signal: c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the action is only read, into memory that outlives the call; all zeroes is a valid action.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Sends this process the SIGCHLD that `take_sigchld` has taken.
pub(crate) fn raise_sigchld() {
    // SAFETY: sends a signal to ourselves; SIGCHLD is ignored unless our caller handles it.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGCHLD);
    }
}

/// Lets a write fail (EFBIG) that would make a file longer than the limit of its length (`ulimit -f`), instead of ending
/// this process by SIGXFSZ. Programs that it starts inherit nothing of that: execve(2) resets the handler, which does
/// nothing, to the default. Without effect if the signal is ignored.
///
/// ```
/// probes_lib::survive_file_limit();
/// ```
pub fn survive_file_limit() {
    extern "C" fn do_nothing(_signal: c_int) {}
    if is_ignored(libc::SIGXFSZ) {
        return;
    }
    let handler: extern "C" fn(c_int) = do_nothing;
    // SAFETY: the action is plain data, for which all zeroes is a valid value; the handler has the type that is wanted
    // without SA_SIGINFO, and does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut());
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
