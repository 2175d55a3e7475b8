//! `trace -wait`: represents the program to the shell that started us, until the program exits.
//!
//! ```text
//!                    ┌──────── the job, one process group ────────┐
//! the terminal ─────▶│ us, and the program itself                 │  nothing is to be done
//! kill, sigqueue ───▶│ us ───── the signal, passed on ──▶ program │
//! the shell ◀────────│ us, stopped too ◀──────── program, stopped │
//! the shell ◀────────│ us, with its status ◀───── program, exited │
//!                    └────────────────────────────────────────────┘
//! ```
//!
//! The program stays in the process group that the shell has made for us. So the terminal's signals (Ctrl-C, Ctrl-\,
//! Ctrl-Z, hang-up, window size) reach it from the kernel, and it may read from the terminal only while the group is
//! in the foreground. All our own signals are blocked and read one by one: none can end or stop us before the
//! program.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpgid, getpgrp, getpid, getppid, getsid};
use probes_lib::{Launched, ReceivedSignal};

use crate::signals::{is_for_program, received};
use crate::standard_error;

/// Everything that is needed to wait.
pub(super) struct Wait {
    /// All signals.
    signals: SignalFd,
    /// Reads the signal that `AwaitedProgram::take` asks for, if it is pending.
    pending: SignalFd,
    /// Held while we are stopped, and while a thread of ours may trace the program, which must not be left in a
    /// ptrace-stop.
    stop_lock: Arc<Mutex<()>>,
}

/// What the meaning of a signal depends on.
#[derive(Clone, Copy, Debug)]
struct JobState {
    /// Our own pid.
    own: i32,
    /// The pid of the program.
    program: i32,
    /// Whether the terminal's hang-up is sent to us, and only to us.
    leads_session: bool,
    program_is_stopped: bool,
    /// Whether a signal that may stop the program was passed on to it, and it has not stopped yet.
    awaits_stop: bool,
}

/// What to do about a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    /// Nothing: the program has it, or it is only for us.
    Nothing,
    PassOn,
    /// Stop, as the program has.
    Stop(Signal),
}

/// What has happened to the program.
enum ProgramChange {
    Nothing,
    /// It has stopped, and has not been continued since.
    Stopped(Signal),
    Exited(ExitStatus),
}

impl Wait {
    /// Has to be called before there is a program to wait for.
    pub(super) fn prepare() -> io::Result<Wait> {
        let flags = SfdFlags::SFD_CLOEXEC;
        Ok(Wait {
            signals: SignalFd::with_flags(&SigSet::all(), flags)?,
            pending: SignalFd::with_flags(&SigSet::empty(), flags | SfdFlags::SFD_NONBLOCK)?,
            stop_lock: Arc::default(),
        })
    }

    /// Returns the lock that is held while we are stopped. Another thread holds it while we must not stop.
    pub(super) fn stop_lock(&self) -> Arc<Mutex<()>> {
        self.stop_lock.clone()
    }

    /// Waits for the program; returns the status to exit with: the program's own, or 128 plus the number of
    /// the signal that ended it.
    pub(super) fn until_exit(self, launched: Launched) -> io::Result<u8> {
        // Blocks the signals of faults, too: sent by kill(2), they are meant for the program. A fault of
        // our own ends us even though they are blocked.
        SigSet::all().thread_block()?;
        standard_error::set_signals_blocked(true);
        let mut program = AwaitedProgram::new(launched, self.pending, self.stop_lock)?;
        let mut signal: Option<ReceivedSignal> = None;
        loop {
            let change = program.change_after_signal(&mut signal)?;
            if let Some(status) = program.imitate(change)? {
                return Ok(exit_status(status));
            }
            match signal.map(|signal| (signal, reaction(&signal, program.state))) {
                None | Some((_, Reaction::Nothing)) => {}
                Some((signal, Reaction::PassOn)) => program.pass_on(&signal),
                Some((_, Reaction::Stop(by))) => {
                    if let Some(status) = program.imitate(ProgramChange::Stopped(by))? {
                        return Ok(exit_status(status));
                    }
                }
            }
            signal = next_signal(&self.signals, &program)?;
        }
    }
}

/// How long to wait, in milliseconds, before asking again for a program that has exited and is not reported to us
/// yet.
const REAP_POLL_MS: u8 = 50;

/// Waits for a signal, or for the exit of the program. SIGCHLD alone need not report the exit: a
/// thread of a library that is preloaded into this process (LD_PRELOAD) may have received that
/// signal.
fn next_signal(signals: &SignalFd, program: &AwaitedProgram) -> io::Result<Option<ReceivedSignal>> {
    let mut fds = [
        PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        PollFd::new(program.pidfd.as_fd(), PollFlags::POLLIN),
    ];
    match poll(&mut fds, PollTimeout::NONE) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    let [has_signal, has_exited] = fds.each_ref().map(|fd| fd.any() == Some(true));
    if !has_signal {
        if has_exited && matches!(program.launched.has_exited(), Ok(false)) {
            // Another tracer has to reap it first, and may take its time.
            match poll(&mut fds[..1], REAP_POLL_MS) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        return Ok(None);
    }
    match signals.read_signal() {
        Ok(info) => Ok(info.as_ref().map(received)),
        Err(Errno::EINTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The program that is waited for.
struct AwaitedProgram {
    launched: Launched,
    /// Readable once it has exited.
    pidfd: OwnedFd,
    state: JobState,
    pending: SignalFd,
    stop_lock: Arc<Mutex<()>>,
}

impl AwaitedProgram {
    fn new(
        launched: Launched,
        pending: SignalFd,
        stop_lock: Arc<Mutex<()>>,
    ) -> io::Result<AwaitedProgram> {
        let state = JobState {
            own: getpid().as_raw(),
            program: launched.report().pid,
            leads_session: getsid(None)? == getpid(),
            program_is_stopped: false,
            awaits_stop: false,
        };
        Ok(AwaitedProgram {
            pidfd: launched.pidfd()?,
            launched,
            state,
            pending,
            stop_lock,
        })
    }

    /// Returns what has happened to it, after `signal` was received.
    fn change_after_signal(
        &mut self,
        signal: &mut Option<ReceivedSignal>,
    ) -> io::Result<ProgramChange> {
        let change = self.read_change()?;
        if !matches!(change, ProgramChange::Stopped(_)) {
            return Ok(change);
        }
        // A stop signal is dropped: we are about to stop anyway.
        *signal = signal.filter(|signal| stop_signal(signal.number).is_none());
        if !self.state.awaits_stop {
            return Ok(change);
        }
        // Perhaps the stop signal that we passed on has stopped it. If a SIGCONT was sent to our
        // process group since, the program received it before it stopped, and would stay stopped:
        // pass it on again.
        self.state.awaits_stop = false;
        let continued = match *signal {
            Some(signal) if signal.number == libc::SIGCONT => Some(signal),
            _ => self.take(Signal::SIGCONT)?,
        };
        match continued {
            Some(continued) => {
                self.pass_on(&continued);
                self.read_change()
            }
            None => Ok(change),
        }
    }

    /// Returns what has happened to it since this was called last.
    fn read_change(&mut self) -> io::Result<ProgramChange> {
        let stops = WaitPidFlag::WSTOPPED | WaitPidFlag::WCONTINUED | WaitPidFlag::WNOHANG;
        let wait = |flags| waitid(Id::Pid(Pid::from_raw(self.state.program)), flags);
        let mut change = ProgramChange::Nothing;
        // Another thread of ours may trace the program, to change its code. Waits here report the stops that are
        // meant for that thread, too. It must not miss them: nothing is consumed before it is known what it is.
        while let Ok(WaitStatus::Stopped(..) | WaitStatus::Continued(_)) =
            wait(stops | WaitPidFlag::WNOWAIT)
        {
            match wait(stops) {
                Ok(WaitStatus::Stopped(_, by)) => {
                    self.state.program_is_stopped = true;
                    change = ProgramChange::Stopped(by);
                }
                Ok(WaitStatus::Continued(_)) => {
                    self.state.program_is_stopped = false;
                    change = ProgramChange::Nothing;
                }
                _ => {}
            }
        }
        if matches!(self.launched.has_exited(), Ok(false)) {
            return Ok(change);
        }
        let status = self.launched.child().try_wait()?;
        let has_exited = |it: &ExitStatus| it.code().or(it.signal()).is_some();
        Ok(status
            .filter(has_exited)
            .map_or(change, ProgramChange::Exited))
    }

    /// Stops us as often as it stops; returns how it has exited, if it has.
    fn imitate(&mut self, mut change: ProgramChange) -> io::Result<Option<ExitStatus>> {
        loop {
            change = match change {
                ProgramChange::Nothing => return Ok(None),
                ProgramChange::Exited(status) => return Ok(Some(status)),
                ProgramChange::Stopped(by) => self.stop(by)?,
            }
        }
    }

    /// Stops us by the signal that has stopped it, so that a shell that waits for us sees what it would
    /// have seen of the program. Returns, when we are continued, what has happened to the program.
    fn stop(&mut self, by: Signal) -> io::Result<ProgramChange> {
        let stop_lock = self.stop_lock.clone();
        if by == Signal::SIGSTOP {
            // What stops and continues the program alone (a throttle, a debugger) would leave us stopped
            // for ever. So we stop only where there is a shell to see it, and to continue us.
            if has_shell() {
                let _guard = lock(&stop_lock);
                let change = self.read_change()?;
                if !self.is_still_stopped(&change) {
                    return Ok(change);
                }
                raise(by)?;
            }
            return self.read_change();
        }
        let _guard = lock(&stop_lock);
        // The signal is raised while it is blocked, before we look at the program. If a SIGCONT comes after
        // that, the kernel discards the pending stop signal; if one came before, it has reached the program
        // before it reached us. So we are never stopped while the program runs, though the shell may
        // wait for and continue a process other than us: `bash -c 'ocaml-probes trace -wait ...'`.
        raise(by)?;
        let mut only = SigSet::empty();
        only.add(by);
        let change = self.read_change()?;
        if self.is_still_stopped(&change) {
            // In an orphaned process group, where no shell could continue us, the kernel ignores it.
            only.thread_unblock()?;
            only.thread_block()?;
            return self.read_change();
        }
        self.take(by)?;
        Ok(change)
    }

    /// Whether it is still in the same stop: `change` says if it was continued and stopped again.
    fn is_still_stopped(&self, change: &ProgramChange) -> bool {
        self.state.program_is_stopped && matches!(change, ProgramChange::Nothing)
    }

    /// Sends it a signal that we have received.
    fn pass_on(&mut self, signal: &ReceivedSignal) {
        // May fail: the program may belong to another user by now, or its queue of signals may be full.
        let _ = self.launched.pass_on(signal);
        self.state.awaits_stop = stop_signal(signal.number).is_some()
            || (self.state.awaits_stop && signal.number != libc::SIGCONT);
    }

    /// Takes a signal if it is pending.
    fn take(&self, signal: Signal) -> io::Result<Option<ReceivedSignal>> {
        let mut only = SigSet::empty();
        only.add(signal);
        self.pending.set_mask(&only)?;
        Ok(self.pending.read_signal()?.as_ref().map(received))
    }
}

/// Takes the lock that is held while we are stopped, and while another thread may trace the program.
pub(super) fn lock(stop_lock: &Mutex<()>) -> MutexGuard<'_, ()> {
    stop_lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the signal with this number if it stops a process and can be blocked: not SIGSTOP.
fn stop_signal(number: i32) -> Option<Signal> {
    [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU]
        .into_iter()
        .find(|&signal| signal as i32 == number)
}

/// What to do about a signal that has reached us.
fn reaction(signal: &ReceivedSignal, state: JobState) -> Reaction {
    // Signals that stop or continue are not passed on a second time: a stopped program needs no other
    // signal to stop, a running one no SIGCONT. They are received in the order in which they were sent,
    // because each discards the pending ones of the other kind.
    if signal.number == libc::SIGCONT {
        return if state.program_is_stopped || state.awaits_stop {
            Reaction::PassOn
        } else {
            Reaction::Nothing
        };
    }
    if let (Some(stop), true) = (stop_signal(signal.number), state.program_is_stopped) {
        return Reaction::Stop(stop);
    }
    if is_for_program(signal, [state.own, state.program], state.leads_session) {
        Reaction::PassOn
    } else {
        Reaction::Nothing
    }
}

/// Whether our parent does job control: it has given us a process group of our own in its session.
fn has_shell() -> bool {
    let parent = Some(getppid());
    getpgid(parent).is_ok_and(|group| group != getpgrp()) && getsid(parent) == getsid(None)
}

fn exit_status(status: ExitStatus) -> u8 {
    const BY_SIGNAL: i32 = 128;
    let code = status.code().or_else(|| Some(BY_SIGNAL + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: i32 = 0x80;
    const STATE: JobState = JobState {
        own: 100,
        program: 101,
        leads_session: false,
        program_is_stopped: false,
        awaits_stop: false,
    };
    const STOPPED: JobState = JobState {
        program_is_stopped: true,
        ..STATE
    };

    /// What is done about signal `number`, sent in the way `code` by process `sender`.
    fn reaction_to(number: i32, code: i32, sender: i32, state: JobState) -> Reaction {
        let signal = ReceivedSignal {
            number,
            code,
            sender,
            uid: 0,
            value: 0,
        };
        reaction(&signal, state)
    }

    fn real_time() -> impl Iterator<Item = i32> {
        libc::SIGRTMIN()..=libc::SIGRTMAX()
    }

    #[test]
    fn signals_from_other_processes_are_passed_on() {
        for code in [libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL] {
            for number in (1..=31).chain(real_time()) {
                let expected = match number {
                    libc::SIGCONT => Reaction::Nothing,
                    _ => Reaction::PassOn,
                };
                assert_eq!(reaction_to(number, code, 7, STATE), expected, "{number}");
                // A signal that one of the two has sent to the other does not come back again and again.
                for ours in [STATE.own, STATE.program] {
                    let reaction = reaction_to(number, code, ours, STATE);
                    assert_eq!(reaction, Reaction::Nothing, "{number} from {ours}");
                }
            }
        }
        // siginfo has the timer's id (si_timerid) in the place of a sender's pid.
        let timer = reaction_to(libc::SIGUSR1, libc::SI_TIMER, STATE.program, STATE);
        assert_eq!(timer, Reaction::PassOn);
    }

    #[test]
    fn signals_of_the_terminal_are_not_passed_on() {
        for number in [
            libc::SIGINT,
            libc::SIGQUIT,
            libc::SIGTSTP,
            libc::SIGTTIN,
            libc::SIGTTOU,
            libc::SIGHUP,
            libc::SIGWINCH,
            libc::SIGCONT,
        ] {
            let reaction = reaction_to(number, KERNEL, 0, STATE);
            assert_eq!(reaction, Reaction::Nothing, "{number}");
        }
        let leader = JobState {
            leads_session: true,
            ..STATE
        };
        let hang_up = reaction_to(libc::SIGHUP, KERNEL, 0, leader);
        assert_eq!(hang_up, Reaction::PassOn);
        let interrupt = reaction_to(libc::SIGINT, KERNEL, 0, leader);
        assert_eq!(interrupt, Reaction::Nothing);
    }

    #[test]
    fn inherited_alarm_is_passed_on_sigchld_is_not() {
        let alarm = reaction_to(libc::SIGALRM, KERNEL, 0, STATE);
        assert_eq!(alarm, Reaction::PassOn);
        let child = reaction_to(libc::SIGCHLD, libc::CLD_STOPPED, STATE.program, STATE);
        assert_eq!(child, Reaction::Nothing);
    }

    #[test]
    fn tool_stops_with_the_program_and_passes_sigcont() {
        for (code, sender) in [(KERNEL, 0), (libc::SI_USER, 7), (libc::SI_QUEUE, 7)] {
            for stop in [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU] {
                let reaction = reaction_to(stop as i32, code, sender, STOPPED);
                assert_eq!(reaction, Reaction::Stop(stop));
            }
            let awaits_stop = JobState {
                awaits_stop: true,
                ..STATE
            };
            for state in [STOPPED, awaits_stop] {
                let reaction = reaction_to(libc::SIGCONT, code, sender, state);
                assert_eq!(reaction, Reaction::PassOn);
            }
        }
        let ended = reaction_to(libc::SIGTERM, libc::SI_USER, 7, STOPPED);
        assert_eq!(ended, Reaction::PassOn);
    }

    #[test]
    fn exit_status_is_kept_or_128_plus_signal() {
        for code in [0, 1, 2, 127, 255] {
            let status = ExitStatus::from_raw(i32::from(code) << 8);
            assert_eq!(exit_status(status), code);
        }
        for signal in (1..=31).chain(real_time()) {
            for dumped in [0, 0x80] {
                let status = ExitStatus::from_raw(signal | dumped);
                assert_eq!(i32::from(exit_status(status)), 128 + signal);
            }
        }
    }
}
