//! `-for`: waits until a change has been made for long enough, and puts back what was before.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use probes_lib::{Denial, ErrorKind, Options, Report, Target};

use super::{Failure, few};
use crate::messages::Messages;

/// Those who end a command that waits.
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// How long somebody else may be in the way of putting back.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long until it is tried again.
const PAUSE: Duration = Duration::from_millis(100);

/// The signals that end the waiting, held back from when this is made on.
pub(super) struct Endings {
    signals: SignalFd,
    held_back: SigSet,
}

/// Why the waiting is over.
pub(super) enum Over {
    Time,
    Told,
    Exited,
}

impl Endings {
    /// Holds the signals back, but for those that we were started to ignore (nohup, a shell's
    /// background jobs).
    pub(super) fn hold_back() -> Result<Endings, Failure> {
        let ignored = ignored();
        let mut signals = SigSet::empty();
        for signal in ENDING {
            if ignored & (1 << (signal as u32 - 1)) == 0 {
                signals.add(signal);
            }
        }
        let failed = |errno: nix::errno::Errno| Failure::Waiting("hold signals back", errno.into());
        signals.thread_block().map_err(failed)?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Endings {
            signals: SignalFd::with_flags(&signals, flags).map_err(failed)?,
            held_back: signals,
        })
    }

    /// Lets the signals do what they do, once there is nothing left to be put back.
    pub(super) fn let_through(self) {
        // Those that have come are obeyed by now.
        self.is_told();
        // It fails for no signals that there are.
        let _ = self.held_back.thread_unblock();
    }

    /// Waits until a few kilobytes can be written to standard output, a pipe perhaps that nobody reads.
    /// Why, if it is over first: told to end, or at `end`.
    pub(super) fn wait_to_write(&self, end: Option<Instant>) -> Result<Option<Over>, Failure> {
        let output = io::stdout();
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(PollTimeout::NONE, poll_timeout);
            let mut ends = [
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
                PollFd::new(output.as_fd(), PollFlags::POLLOUT),
            ];
            match poll(&mut ends, timeout) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(Failure::Waiting("write", errno.into())),
            }
            // What cannot be written any more is told by writing.
            if ends[1].any() == Some(true) {
                return Ok(None);
            }
            if self.is_told() {
                return Ok(Some(Over::Told));
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Some(Over::Time));
            }
        }
    }

    /// Waits for `duration`, or until told to end, or until all processes have ended.
    pub(super) fn wait<'t>(
        &self,
        targets: impl Iterator<Item = &'t Target>,
        duration: Duration,
    ) -> Result<Over, Failure> {
        let failed = |source| Failure::Waiting("wait", source);
        let mut running: Vec<OwnedFd> = Vec::new();
        for target in targets {
            match target.pidfd() {
                Ok(pidfd) => running.push(pidfd),
                Err(error) if has_ended(error.kind()) => {}
                Err(error) => return Err(failed(io::Error::other(error.to_string()))),
            }
        }
        let begun = Instant::now();
        loop {
            let left = duration.saturating_sub(begun.elapsed());
            if running.is_empty() {
                return Ok(Over::Exited);
            }
            let signals = std::iter::once(self.signals.as_fd());
            let mut ends: Vec<PollFd<'_>> = signals
                .chain(running.iter().map(AsFd::as_fd))
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
                .collect();
            let timeout = poll_timeout(left);
            match poll(&mut ends, timeout) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
            let is_readable: Vec<bool> = ends.iter().map(|end| end.any() == Some(true)).collect();
            let mut ended = is_readable[1..].iter();
            running.retain(|_| ended.next() == Some(&false));
            if is_readable[0] && !running.is_empty() {
                self.is_told();
                return Ok(Over::Told);
            }
            // Last, so that it is told to end whatever the time is.
            if left.is_zero() && !running.is_empty() {
                return Ok(Over::Time);
            }
        }
    }

    /// Whether one of the signals has come since this was asked.
    pub(super) fn is_told(&self) -> bool {
        let mut told = false;
        while let Ok(Some(_)) = self.signals.read_signal() {
            told = true;
        }
        told
    }
}

/// Can be read, as poll(2) says, once one of the signals has come.
impl AsFd for Endings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}

/// Rounded up, so that it is not asked again and again in the last millisecond.
pub(super) fn poll_timeout(left: Duration) -> PollTimeout {
    let timeout = left.saturating_add(Duration::from_micros(999));
    PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX)
}

/// Takes back what `report` says was done. Others who are in the way are waited for, unless told to
/// end once more. `None` if nothing is left of it, because the process has ended or executed another
/// program.
pub(super) fn put_back(
    target: &Target,
    report: &Report,
    options: Options,
    endings: &Endings,
    messages: &Messages,
) -> Result<Option<Report>, Failure> {
    let back = patiently(endings, messages, || target.undo(report, options));
    let error = match back {
        Ok(back) => return Ok(Some(back)),
        Err(error) => error,
    };
    match nothing_is_left(error.kind()) {
        Some(why) => {
            let pid = report.pid;
            messages.note(&format!(
                "process {pid} {why}: there is nothing to put back"
            ));
            Ok(None)
        }
        None => Err(Failure::NotPutBack(error, by_hand(report, |_| true))),
    }
}

/// Puts something back, again and again while others are in the way, unless told to end once more.
pub(super) fn patiently<T>(
    endings: &Endings,
    messages: &Messages,
    mut back: impl FnMut() -> probes_lib::Result<T>,
) -> probes_lib::Result<T> {
    let begun = Instant::now();
    loop {
        match back() {
            Err(error)
                if is_passing(error.kind()) && begun.elapsed() < PATIENCE && !endings.is_told() =>
            {
                messages.step(format_args!("put back later: {error}"));
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

/// Fails if `back`, which has taken back `report`, has left some probes as they are.
pub(super) fn refuse_leftovers(report: &Report, back: &Report) -> Result<(), Failure> {
    let Some(names) = few(&back.not_undone) else {
        return Ok(());
    };
    let is_left = |name: &str| back.not_undone.iter().any(|one| one == name);
    Err(Failure::LeftOver(names, by_hand(report, is_left)))
}

/// What has become of a process in which there is nothing to put back.
pub(super) fn nothing_is_left(kind: &ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::Executed { .. } => Some("has executed another program"),
        kind => has_ended(kind).then_some("has exited"),
    }
}

fn has_ended(kind: &ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Exited { .. } | ErrorKind::NoSuchProcess { .. } | ErrorKind::Zombie { .. }
    )
}

/// Whether it may be otherwise in a moment.
fn is_passing(kind: &ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Busy { .. }
            | ErrorKind::ThreadsKeepStarting { .. }
            | ErrorKind::KeepsChanging { .. }
            | ErrorKind::NoThread { .. }
            | ErrorKind::Denied {
                denial: Denial::BeingChanged { .. } | Denial::Traced { .. },
                ..
            }
    )
}

/// What does by hand what could not be done, for the probes that `is_meant` is true of.
fn by_hand(report: &Report, is_meant: impl Fn(&str) -> bool) -> String {
    let of = |wanted: fn(u16, u16) -> bool| -> Vec<&str> {
        let changed = report.changed.iter();
        changed
            .filter(|change| wanted(change.before, change.after) && is_meant(&change.name))
            .map(|change| change.name.as_str())
            .collect()
    };
    let enabled = of(|before, after| after > before);
    let disabled = of(|before, after| after < before);
    let lists = [("-disable", enabled), ("-enable", disabled)];
    let flags: Vec<String> = lists
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(flag, names)| format!("{flag} {}", names.join(",")))
        .collect();
    let pid = report.pid;
    match flags.as_slice() {
        [] => format!("`ocaml-probes info -pid {pid}` says what is on"),
        flags => format!(
            "`ocaml-probes attach -pid {pid} {}` does it by hand",
            flags.join(" ")
        ),
    }
}

/// The signals that this process ignores, as bits; proc(5), SigIgn.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
