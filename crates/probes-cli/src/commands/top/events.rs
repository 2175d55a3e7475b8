//! [`Events`]: whatever comes next: a key, a signal, the end of the process or of the terminal.

use std::io::{self, stdin};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, read};

use super::keys::{Key, Keys};
use crate::commands::Failure;
use crate::commands::put_back::{Endings, poll_timeout};

/// How long Esc may be the beginning of what another key sends.
const SEQUENCE: Duration = Duration::from_millis(50);

/// What comes.
#[derive(Debug)]
pub(super) enum Event {
    Keys(Vec<Key>),
    /// The terminal has another size, or we were stopped, after which anything may be on it.
    Redraw {
        was_stopped: bool,
    },
    /// Somebody asks us to stop.
    Suspend,
    /// Nothing, for as long as was waited.
    Time,
    Over(Over),
}

/// Why it is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    Quit,
    /// By a signal.
    Told,
    /// The process has ended.
    Exited,
    /// There is no terminal any more.
    Lost,
}

/// Waits for what comes.
pub(super) struct Events<'e> {
    endings: &'e Endings,
    /// Those that end nothing.
    signals: SignalFd,
    exit: OwnedFd,
    keys: Keys,
}

impl<'e> Events<'e> {
    /// `exit` can be read from the end of the process on.
    pub(super) fn new(endings: &'e Endings, exit: OwnedFd) -> Result<Events<'e>, Failure> {
        let mut signals = SigSet::empty();
        for signal in [Signal::SIGWINCH, Signal::SIGTSTP, Signal::SIGCONT] {
            signals.add(signal);
        }
        let failed = |errno: Errno| Failure::Waiting("hold signals back", errno.into());
        signals.thread_block().map_err(failed)?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Events {
            endings,
            signals: SignalFd::with_flags(&signals, flags).map_err(failed)?,
            exit,
            keys: Keys::default(),
        })
    }

    /// What comes within `duration`.
    pub(super) fn wait(&mut self, duration: Duration) -> Result<Event, Failure> {
        let until = Instant::now().checked_add(duration);
        loop {
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            let left = match self.keys.is_waiting() {
                true => left.min(SEQUENCE),
                false => left,
            };
            let Some(is_ready) = self.poll(left)? else {
                continue;
            };
            if is_ready.ending && self.endings.is_told() {
                return Ok(Event::Over(Over::Told));
            }
            if is_ready.exit {
                return Ok(Event::Over(Over::Exited));
            }
            if is_ready.signal {
                if let Some(event) = self.signalled() {
                    return Ok(event);
                }
            }
            if is_ready.input {
                match self.typed() {
                    Ok(keys) if keys.is_empty() => {}
                    Ok(keys) => return Ok(Event::Keys(keys)),
                    Err(_) => return Ok(Event::Over(Over::Lost)),
                }
            } else if let Some(key) = self.keys.give_up() {
                return Ok(Event::Keys(vec![key]));
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Ok(Event::Time);
            }
        }
    }

    /// `None` if a signal came in between.
    fn poll(&self, left: Duration) -> Result<Option<Ready>, Failure> {
        let input = stdin();
        let ends = [
            self.endings.as_fd(),
            self.exit.as_fd(),
            self.signals.as_fd(),
            input.as_fd(),
        ];
        let mut ends = ends.map(|end| PollFd::new(end, PollFlags::POLLIN));
        let timeout = poll_timeout(left);
        match poll(&mut ends, timeout) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(Failure::Waiting("wait", errno.into())),
        }
        // A terminal that is gone is readable, and says so when it is read.
        let [ending, exit, signal, input] = ends.map(|end| end.any() == Some(true));
        Ok(Some(Ready {
            ending,
            exit,
            signal,
            input,
        }))
    }

    fn typed(&mut self) -> io::Result<Vec<Key>> {
        let mut bytes = [0; 256];
        match read(stdin().as_fd(), &mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => Ok(self.keys.feed(&bytes[..count])),
            Err(Errno::EINTR | Errno::EAGAIN) => Ok(Vec::new()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn signalled(&self) -> Option<Event> {
        let mut event = None;
        while let Ok(Some(info)) = self.signals.read_signal() {
            event = match (Signal::try_from(info.ssi_signo as i32), event) {
                (Ok(Signal::SIGTSTP), _) => return Some(Event::Suspend),
                (Ok(Signal::SIGCONT), _) => Some(Event::Redraw { was_stopped: true }),
                (Ok(Signal::SIGWINCH), None) => Some(Event::Redraw { was_stopped: false }),
                (_, event) => event,
            };
        }
        event
    }
}

/// What can be read.
struct Ready {
    ending: bool,
    exit: bool,
    signal: bool,
    input: bool,
}

/// Stops as Ctrl-Z does: `all` of the job if it was typed. Where no shell could let it go on, the
/// kernel does not stop it either (setpgid(2), orphaned process groups). Returns when it goes on.
pub(super) fn stop(all: bool) {
    let mut stopping = SigSet::empty();
    stopping.add(Signal::SIGTSTP);
    // It is held back until the terminal has been given back, which is now. These do not fail.
    let _ = match all {
        true => kill(Pid::from_raw(0), Signal::SIGTSTP),
        false => raise(Signal::SIGTSTP),
    };
    let _ = stopping.thread_unblock();
    let _ = stopping.thread_block();
}
