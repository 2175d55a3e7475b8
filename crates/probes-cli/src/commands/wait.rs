//! `trace -wait`: stands in for the program towards those who started us, until it ends.
//!
//! ```text
//!                    ┌──────── the job, one process group ────────┐
//! the terminal ─────▶│ us, and the program itself                 │  nothing is to be done
//! kill, sigqueue ───▶│ us ───── the signal, passed on ──▶ program │
//! the shell ◀────────│ us, stopped too ◀──────── program, stopped │
//! the shell ◀────────│ us, with its status ◀────── program, ended │
//!                    └────────────────────────────────────────────┘
//! ```
//!
//! The program stays in the process group that the shell has made for us. So the terminal's signals
//! (Ctrl-C, Ctrl-\, Ctrl-Z, hang-up, window size) reach it from the kernel, and only in the
//! foreground it may read. All our own signals are held back and read one by one: none can end or
//! stop us before the program.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpgid, getpgrp, getpid, getppid, getsid};
use probes_lib::{Launched, ReceivedSignal};

/// Everything that is needed to wait.
pub(super) struct Wait {
    /// All signals.
    signals: SignalFd,
    /// Any one of them, if it is there.
    pending: SignalFd,
}

/// The processes that matter for what a signal means.
#[derive(Clone, Copy, Debug)]
struct Scene {
    /// Ourselves.
    own: i32,
    program: i32,
    /// Whether the terminal tells us, and only us, that it has gone.
    leads_session: bool,
    /// Whether the program is stopped.
    stands: bool,
    /// Whether we have passed on to it what may stop it, and nothing has come of that yet.
    told_to_stop: bool,
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

/// What has become of the program.
enum News {
    Nothing,
    /// It has stopped, and has not been continued since.
    Stopped(Signal),
    Ended(ExitStatus),
}

impl Wait {
    /// To be called before there is a program to wait for.
    pub(super) fn prepare() -> io::Result<Wait> {
        let flags = SfdFlags::SFD_CLOEXEC;
        Ok(Wait {
            signals: SignalFd::with_flags(&SigSet::all(), flags)?,
            pending: SignalFd::with_flags(&SigSet::empty(), flags | SfdFlags::SFD_NONBLOCK)?,
        })
    }

    /// Waits for the program, and returns the status to exit with: the program's own, or 128 and
    /// the number of the signal that ended it.
    pub(super) fn until_the_end(self, launched: Launched) -> io::Result<u8> {
        // Those of faults, too: sent by kill(2), they are meant for the program. A fault of our own
        // ends us nevertheless.
        SigSet::all().thread_block()?;
        let mut program = Program::new(launched, self.pending)?;
        let mut signal: Option<ReceivedSignal> = None;
        loop {
            let news = program.news(&mut signal)?;
            if let Some(status) = program.follow(news)? {
                return Ok(exit_status(status));
            }
            match signal.map(|signal| (signal, reaction(&signal, program.scene))) {
                None | Some((_, Reaction::Nothing)) => {}
                Some((signal, Reaction::PassOn)) => program.pass_on(&signal),
                Some((_, Reaction::Stop(by))) => {
                    if let Some(status) = program.follow(News::Stopped(by))? {
                        return Ok(exit_status(status));
                    }
                }
            }
            signal = next_signal(&self.signals, &program)?;
        }
    }
}

/// Waits for a signal, or for the end of the program, of which SIGCHLD need not tell: a thread
/// that was preloaded into this process (LD_PRELOAD) may have taken it.
fn next_signal(signals: &SignalFd, program: &Program) -> io::Result<Option<ReceivedSignal>> {
    let mut news = [
        PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        PollFd::new(program.pidfd.as_fd(), PollFlags::POLLIN),
    ];
    match poll(&mut news, PollTimeout::NONE) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    if news[0].any() != Some(true) {
        return Ok(None);
    }
    match signals.read_signal() {
        Ok(info) => Ok(info.as_ref().map(received)),
        Err(Errno::EINTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The program that is waited for.
struct Program {
    launched: Launched,
    /// Can be read once it has ended.
    pidfd: OwnedFd,
    scene: Scene,
    pending: SignalFd,
}

impl Program {
    fn new(launched: Launched, pending: SignalFd) -> io::Result<Program> {
        let scene = Scene {
            own: getpid().as_raw(),
            program: launched.report().pid,
            leads_session: getsid(None)? == getpid(),
            stands: false,
            told_to_stop: false,
        };
        Ok(Program {
            pidfd: launched.pidfd()?,
            launched,
            scene,
            pending,
        })
    }

    /// Looks what it has come to, `signal` being what we have received last.
    fn news(&mut self, signal: &mut Option<ReceivedSignal>) -> io::Result<News> {
        let news = self.look()?;
        if !matches!(news, News::Stopped(_)) {
            return Ok(news);
        }
        // Told to stop as well, we are about to.
        *signal = signal.filter(|signal| stop_signal(signal.number).is_none());
        if !self.scene.told_to_stop {
            return Ok(news);
        }
        // By what we have passed on, perhaps. What has come since, to continue both of us, was too
        // early for it then.
        self.scene.told_to_stop = false;
        let continued = match *signal {
            Some(signal) if signal.number == libc::SIGCONT => Some(signal),
            _ => self.take(Signal::SIGCONT)?,
        };
        match continued {
            Some(continued) => {
                self.pass_on(&continued);
                self.look()
            }
            None => Ok(news),
        }
    }

    /// Looks what it has come to since it was last looked at.
    fn look(&mut self) -> io::Result<News> {
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WCONTINUED | WaitPidFlag::WNOHANG;
        let mut news = News::Nothing;
        loop {
            match waitid(Id::Pid(Pid::from_raw(self.scene.program)), flags) {
                Ok(WaitStatus::Stopped(_, by)) => {
                    self.scene.stands = true;
                    news = News::Stopped(by);
                }
                Ok(WaitStatus::Continued(_)) => {
                    self.scene.stands = false;
                    news = News::Nothing;
                }
                // Nothing more, or it has ended.
                _ => break,
            }
        }
        Ok(match self.launched.child().try_wait()? {
            Some(status) => News::Ended(status),
            None => news,
        })
    }

    /// Does as it has done, as long as it stops; says how it has ended, if it has.
    fn follow(&mut self, mut news: News) -> io::Result<Option<ExitStatus>> {
        loop {
            news = match news {
                News::Nothing => return Ok(None),
                News::Ended(status) => return Ok(Some(status)),
                News::Stopped(by) => self.stop(by)?,
            }
        }
    }

    /// Stops us by the signal that has stopped it: whoever waits for us, a shell, sees what it would
    /// have seen of the program. When we are continued, says what the program has come to.
    fn stop(&mut self, by: Signal) -> io::Result<News> {
        if by == Signal::SIGSTOP {
            // Who stops and continues the program alone (a throttle, a debugger) would leave us
            // standing for ever: only where there is a shell to see it, and to continue us.
            if has_shell() {
                raise(by)?;
            }
            return self.look();
        }
        // Sent first, while it is held back, and looked then: the kernel takes back what is pending
        // when a SIGCONT comes, and one that came before has reached the program before it reached
        // us. So we never stand while it goes on, though another than us may have been waited for
        // and continued by the shell: `bash -c 'ocaml-probes trace -wait ...'`.
        raise(by)?;
        let mut only = SigSet::empty();
        only.add(by);
        let news = self.look()?;
        if self.scene.stands && matches!(news, News::Nothing) {
            // Where nobody could continue us, in an orphaned process group, the kernel ignores it.
            only.thread_unblock()?;
            only.thread_block()?;
            return self.look();
        }
        self.take(by)?;
        Ok(news)
    }

    /// Gives it a signal that we have received.
    fn pass_on(&mut self, signal: &ReceivedSignal) {
        // It may have become another user's and be out of our reach, or its queue may be full.
        let _ = self.launched.pass_on(signal);
        self.scene.told_to_stop = stop_signal(signal.number).is_some()
            || (self.scene.told_to_stop && signal.number != libc::SIGCONT);
    }

    /// Takes a signal that may be pending.
    fn take(&self, signal: Signal) -> io::Result<Option<ReceivedSignal>> {
        let mut only = SigSet::empty();
        only.add(signal);
        self.pending.set_mask(&only)?;
        Ok(self.pending.read_signal()?.as_ref().map(received))
    }
}

fn received(info: &siginfo) -> ReceivedSignal {
    ReceivedSignal {
        number: info.ssi_signo as i32,
        code: info.ssi_code,
        sender: info.ssi_pid as i32,
        uid: info.ssi_uid,
        value: info.ssi_ptr,
    }
}

/// The signals that stop, but the one that cannot be held back.
fn stop_signal(number: i32) -> Option<Signal> {
    [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU]
        .into_iter()
        .find(|&signal| signal as i32 == number)
}

/// What to do about a signal that has reached us.
///
/// kill(2) does not say whether it was meant for us or for all of our group. To pass on what the
/// program has already is a smaller fault than to lose what only we have got.
fn reaction(signal: &ReceivedSignal, scene: Scene) -> Reaction {
    // Neither ever comes in twos: what stands needs no other signal to stop, what runs no SIGCONT.
    // They come in the order in which they were sent: each takes back the others that are pending.
    if signal.number == libc::SIGCONT {
        return match scene.stands || scene.told_to_stop {
            true => Reaction::PassOn,
            false => Reaction::Nothing,
        };
    }
    if let (Some(stop), true) = (stop_signal(signal.number), scene.stands) {
        return Reaction::Stop(stop);
    }
    // sigaction(2): the kernel's own codes are positive.
    if signal.code > 0 {
        return match signal.number {
            // A timer from before our execve.
            libc::SIGALRM => Reaction::PassOn,
            // setsid(2), tty(4): the hang-up of a terminal is told to the leader of its session.
            libc::SIGHUP if scene.leads_session => Reaction::PassOn,
            _ => Reaction::Nothing,
        };
    }
    let names_sender = matches!(signal.code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
    // What the program sends its parent would otherwise come back to it, and perhaps again and again.
    if names_sender && [scene.own, scene.program].contains(&signal.sender) {
        return Reaction::Nothing;
    }
    Reaction::PassOn
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
    const SCENE: Scene = Scene {
        own: 100,
        program: 101,
        leads_session: false,
        stands: false,
        told_to_stop: false,
    };
    const STANDING: Scene = Scene {
        stands: true,
        ..SCENE
    };

    /// What is done about signal `number`, sent in the way `code` by process `sender`.
    fn reaction_to(number: i32, code: i32, sender: i32, scene: Scene) -> Reaction {
        let signal = ReceivedSignal {
            number,
            code,
            sender,
            uid: 0,
            value: 0,
        };
        reaction(&signal, scene)
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
                assert_eq!(reaction_to(number, code, 7, SCENE), expected, "{number}");
                // It cannot come back for ever.
                for ours in [SCENE.own, SCENE.program] {
                    let reaction = reaction_to(number, code, ours, SCENE);
                    assert_eq!(reaction, Reaction::Nothing, "{number} from {ours}");
                }
            }
        }
        // A timer's number is where a sender's would be.
        let timer = reaction_to(libc::SIGUSR1, libc::SI_TIMER, SCENE.program, SCENE);
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
            let reaction = reaction_to(number, KERNEL, 0, SCENE);
            assert_eq!(reaction, Reaction::Nothing, "{number}");
        }
        let leader = Scene {
            leads_session: true,
            ..SCENE
        };
        let hang_up = reaction_to(libc::SIGHUP, KERNEL, 0, leader);
        assert_eq!(hang_up, Reaction::PassOn);
        let interrupt = reaction_to(libc::SIGINT, KERNEL, 0, leader);
        assert_eq!(interrupt, Reaction::Nothing);
    }

    #[test]
    fn inherited_alarm_is_passed_on_sigchld_is_not() {
        let alarm = reaction_to(libc::SIGALRM, KERNEL, 0, SCENE);
        assert_eq!(alarm, Reaction::PassOn);
        let child = reaction_to(libc::SIGCHLD, libc::CLD_STOPPED, SCENE.program, SCENE);
        assert_eq!(child, Reaction::Nothing);
    }

    #[test]
    fn stopped_tool_follows_stops_and_passes_continues() {
        for (code, sender) in [(KERNEL, 0), (libc::SI_USER, 7), (libc::SI_QUEUE, 7)] {
            for stop in [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU] {
                let reaction = reaction_to(stop as i32, code, sender, STANDING);
                assert_eq!(reaction, Reaction::Stop(stop));
            }
            let told_to_stop = Scene {
                told_to_stop: true,
                ..SCENE
            };
            for scene in [STANDING, told_to_stop] {
                let reaction = reaction_to(libc::SIGCONT, code, sender, scene);
                assert_eq!(reaction, Reaction::PassOn);
            }
        }
        let ended = reaction_to(libc::SIGTERM, libc::SI_USER, 7, STANDING);
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
