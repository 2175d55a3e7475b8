//! [`TerminationSignals`]: the signals that ask the tool to end, and every wait that they interrupt.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll, ppoll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use nix::unistd::{Pid, getpid, getsid};
use probes_lib::{ReceivedSignal, Target};

use crate::destination::Destination;
use crate::failure::Failure;
use crate::poll::poll_timeout;
use crate::standard_error;

const TERMINATION_SIGNALS: [Signal; 5] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    // The limit of the tool's own time on processors (ulimit -t).
    Signal::SIGXCPU,
];

/// How long the tool may take to write the rest of its answer after a signal.
const TIME_TO_FINISH: Duration = Duration::from_secs(1);

/// The same if the tool then waits for a program that it has started: it misses the program's end only if nothing reads
/// the answer, not because a disk is slow.
const TIME_TO_FINISH_BEFORE_WAIT: Duration = Duration::from_secs(10);

/// The longest single wait: a longer one is split.
const MAX_WAIT: Duration = Duration::from_secs(1 << 24);

/// How many [`TerminationSignals`] were made: only the latest ones handle signals.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// The termination signals, blocked since this value was made, so that the tool undoes what it has
/// done before it exits.
pub(crate) struct TerminationSignals {
    pending: SignalFd,
    blocked: SigSet,
    /// The program that they are passed on to.
    program: Option<Pid>,
    /// The value of [`MADE`] after these were made.
    number: usize,
    /// Whether a signal was received.
    was_interrupted: Cell<bool>,
}

/// Starts a thread that waits for one of these signals, and lets it end the tool [`TIME_TO_FINISH`] later, or
/// [`TIME_TO_FINISH_BEFORE_WAIT`]; not if there are newer [`TerminationSignals`] then. A started program gets the signal first.
fn end_later(signals: TerminationSignals) -> io::Result<()> {
    let end = move || {
        let mut fds = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        while poll(&mut fds, PollTimeout::NONE) == Err(Errno::EINTR) {}
        let before_wait = signals.program.map(|_| TIME_TO_FINISH_BEFORE_WAIT);
        thread::sleep(before_wait.unwrap_or(TIME_TO_FINISH));
        if MADE.load(Ordering::SeqCst) != signals.number {
            return;
        }
        if let Some(program) = signals.program {
            signals.pass_on_and_keep(program);
        }
        // The signal is still pending. This cannot fail: the set holds valid signals.
        let _ = signals.blocked.thread_unblock();
    };
    thread::Builder::new().spawn(end).map(drop)
}

/// Why a wait has ended.
pub(crate) enum WaitEnd {
    /// The time is over, or one of the other descriptors is readable.
    Timeout,
    /// A termination signal came.
    Interrupted,
    /// All processes have exited.
    Exited,
}

impl TerminationSignals {
    /// Blocks the termination signals, except those that were already ignored when the tool was started (by nohup, or
    /// by a shell for a background job).
    pub(crate) fn block() -> Result<TerminationSignals, Failure> {
        TerminationSignals::block_and_pass_on(None)
    }

    /// Same as [`TerminationSignals::block`], and passes the signals on to a program that we have started, as
    /// [`is_for_program`] says. The program must not have been reaped.
    pub(crate) fn block_and_pass_on(program: Option<i32>) -> Result<TerminationSignals, Failure> {
        let ignored = ignored_signals();
        let is_ignored = |signal: &Signal| ignored & (1 << (*signal as u32 - 1)) != 0;
        let signals = TERMINATION_SIGNALS.into_iter();
        let blocked: SigSet = signals.filter(|signal| !is_ignored(signal)).collect();
        let pending = block(&blocked)?;
        standard_error::set_signals_blocked(true);
        Ok(TerminationSignals {
            pending,
            blocked,
            program: program.map(Pid::from_raw),
            number: MADE.fetch_add(1, Ordering::SeqCst) + 1,
            was_interrupted: Cell::new(false),
        })
    }

    /// Lets the signals end the tool, once there is nothing left to undo. If none has come so far, the first one ends it a little
    /// later ([`TIME_TO_FINISH`], [`TIME_TO_FINISH_BEFORE_WAIT`]): Ctrl-C may end an observed program and the tool at once, and the
    /// tool then still writes its answer.
    pub(crate) fn unblock(self) {
        // The pending ones have been handled; if they stayed pending, they would kill the tool now.
        self.take_interrupt();
        let unblocked = self.blocked;
        standard_error::set_signals_blocked(false);
        if self.was_interrupted.get() || end_later(self).is_err() {
            // It cannot fail: the set holds valid signals.
            let _ = unblocked.thread_unblock();
        }
    }

    /// Passes a pending signal on to the started program, and sends it to ourselves again.
    fn pass_on_and_keep(&self, program: Pid) {
        if let Ok(Some(signal)) = self.pending.read_signal() {
            let signal = received(&signal);
            pass_on(&signal, program);
            if let Ok(number) = Signal::try_from(signal.number) {
                // A process may signal itself.
                let _ = kill(getpid(), number);
            }
        }
    }

    /// Consumes all pending signals, and passes them on; returns whether there were any.
    pub(crate) fn take_interrupt(&self) -> bool {
        let mut is_interrupted = false;
        while let Ok(Some(signal)) = self.pending.read_signal() {
            is_interrupted = true;
            self.was_interrupted.set(true);
            if let Some(program) = self.program {
                pass_on(&received(&signal), program);
            }
        }
        is_interrupted
    }

    /// Starts a thread that calls `action` once a signal comes, even while the calling thread waits for a
    /// reader of standard output.
    pub(crate) fn on_interrupt(
        self,
        action: impl FnOnce() + Send + 'static,
    ) -> Result<(), Failure> {
        let wait = move || {
            loop {
                let mut fds = [PollFd::new(self.pending.as_fd(), PollFlags::POLLIN)];
                if poll(&mut fds, PollTimeout::NONE) != Err(Errno::EINTR) {
                    return action();
                }
            }
        };
        let spawned = thread::Builder::new().spawn(wait);
        let failed = |source| Failure::System("wait for signals", source);
        spawned.map(drop).map_err(failed)
    }

    /// Waits until a few kilobytes can be written to `destination`, which may be a pipe that no process
    /// reads. Returns `None` if it can, `Some` if a signal or `deadline` comes first.
    pub(crate) fn wait_to_write(
        &self,
        destination: &Destination,
        deadline: Option<Instant>,
    ) -> Result<Option<WaitEnd>, Failure> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(PollTimeout::NONE, poll_timeout);
            let is_writable = destination.with_fd(|output| {
                let mut fds = [
                    PollFd::new(self.pending.as_fd(), PollFlags::POLLIN),
                    PollFd::new(output, PollFlags::POLLOUT),
                ];
                match poll(&mut fds, timeout) {
                    // True also if nothing can be written any more: the write then says why.
                    Ok(_) | Err(Errno::EINTR) => Ok(fds[1].any() == Some(true)),
                    Err(errno) => Err(Failure::System("write", errno.into())),
                }
            });
            if is_writable? {
                return Ok(None);
            }
            if self.take_interrupt() {
                return Ok(Some(WaitEnd::Interrupted));
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Some(WaitEnd::Timeout));
            }
        }
    }

    /// Waits until `input` can be read, or a signal comes; returns whether one did.
    pub(crate) fn wait_to_read(&self, input: BorrowedFd<'_>) -> Result<bool, Failure> {
        loop {
            let mut fds =
                [self.pending.as_fd(), input].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(Failure::System("wait", errno.into())),
            }
            if self.take_interrupt() {
                return Ok(true);
            }
            if fds[1].any() == Some(true) {
                return Ok(false);
            }
        }
    }

    /// Waits for `duration`, or until a signal comes, or until all processes have exited.
    pub(crate) fn wait<'t>(
        &self,
        targets: impl Iterator<Item = &'t Target>,
        duration: Duration,
    ) -> Result<WaitEnd, Failure> {
        self.wait_for(&mut RunningProcesses::of(targets)?, &[], duration)
    }

    /// Same as [`TerminationSignals::wait`], for processes that are waited for repeatedly; or until one of `others` is
    /// readable.
    pub(crate) fn wait_for(
        &self,
        RunningProcesses(running): &mut RunningProcesses,
        others: &[BorrowedFd<'_>],
        duration: Duration,
    ) -> Result<WaitEnd, Failure> {
        let begun = Instant::now();
        loop {
            if running.is_empty() {
                return Ok(WaitEnd::Exited);
            }
            let left = duration.saturating_sub(begun.elapsed());
            let mut fds: Vec<PollFd<'_>> = std::iter::once(self.pending.as_fd())
                .chain(running.iter().map(AsFd::as_fd))
                .chain(others.iter().copied())
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
                .collect();
            match ppoll(&mut fds, Some(left.min(MAX_WAIT).into()), None) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(Failure::System("wait", errno.into())),
            }
            let readable: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
            let (exited, others) = readable[1..].split_at(running.len());
            let mut exited = exited.iter();
            running.retain(|_| exited.next() == Some(&false));
            if readable[0] && !running.is_empty() {
                self.take_interrupt();
                return Ok(WaitEnd::Interrupted);
            }
            if others.contains(&true) && !running.is_empty() {
                return Ok(WaitEnd::Timeout);
            }
            // Checked last, so that a signal is seen even if the time is up.
            if begun.elapsed() >= duration && !running.is_empty() {
                return Ok(WaitEnd::Timeout);
            }
        }
    }
}

/// Processes that have not been seen to exit, by their descriptors.
pub(crate) struct RunningProcesses(Vec<OwnedFd>);

impl RunningProcesses {
    pub(crate) fn of<'t>(
        targets: impl Iterator<Item = &'t Target>,
    ) -> Result<RunningProcesses, Failure> {
        let mut running = Vec::new();
        for target in targets {
            match target.pidfd() {
                Ok(pidfd) => running.push(pidfd),
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    let source = io::Error::other(error.to_string());
                    return Err(Failure::System("wait", source));
                }
            }
        }
        Ok(RunningProcesses(running))
    }
}

/// Readable, as poll(2) says, once a signal has come.
impl AsFd for TerminationSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pending.as_fd()
    }
}

/// Blocks signals in this thread, and returns a signalfd(2) for them.
pub(crate) fn block(signals: &SigSet) -> Result<SignalFd, Failure> {
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let pending = SignalFd::with_flags(signals, flags).map_err(not_blocked)?;
    signals.thread_block().map_err(not_blocked)?;
    Ok(pending)
}

fn not_blocked(errno: Errno) -> Failure {
    Failure::System("block signals", errno.into())
}

/// A signal that was read from a signalfd(2).
pub(crate) fn received(info: &siginfo) -> ReceivedSignal {
    ReceivedSignal {
        number: info.ssi_signo as i32,
        code: info.ssi_code,
        sender: info.ssi_pid as i32,
        uid: info.ssi_uid,
        value: info.ssi_ptr,
    }
}

/// Passes a signal on to the program that we have started, if it is for that one.
fn pass_on(signal: &ReceivedSignal, program: Pid) {
    let own = [getpid(), program].map(Pid::as_raw);
    let leads_session = getsid(None).is_ok_and(|leader| leader == getpid());
    let number = Signal::try_from(signal.number);
    if let (true, Ok(number)) = (is_for_program(signal, own, leads_session), number) {
        // If it has exited, there is nothing to be passed on.
        let _ = kill(program, number);
    }
}

/// Whether a signal that has reached us is to be passed on to the program that we have started. Not if the program
/// has sent it, or has received it as well: the kernel sends the terminal's signals to both. `own` are our pid and
/// that of the program.
///
/// A signal does not say whether kill(2) sent it to us or to our whole process group. If in doubt, it is passed on:
/// it is better if the program gets a signal twice than if it misses one that only we received.
pub(crate) fn is_for_program(signal: &ReceivedSignal, own: [i32; 2], leads_session: bool) -> bool {
    // sigaction(2): the kernel's own codes are positive.
    if signal.code > 0 {
        return match signal.number {
            // alarm(2) survives execve(2): the process that executed us has set it.
            libc::SIGALRM => true,
            // setsid(2), tty(4): the hang-up of a terminal is sent to the leader of its session.
            libc::SIGHUP => leads_session,
            _ => false,
        };
    }
    let names_sender = matches!(signal.code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
    // What the program sends its parent would otherwise come back to it, and perhaps again and again.
    !(names_sender && own.contains(&signal.sender))
}

/// Blocks all signals in this thread, and in those that it starts.
pub(crate) fn block_all() -> Result<(), Failure> {
    let blocked = SigSet::all().thread_block();
    blocked.map_err(not_blocked)
}

/// The signals that this process ignores, as bits; proc(5), SigIgn.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
