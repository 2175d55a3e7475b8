//! Faults on demand: every system call by which a process is looked at, stopped and changed can be
//! made to fail, to be cut short, to be our last, or to be met by something that happens just then.
//!
//! Only in builds with the feature `fault-injection`, which the chaos suite makes; in all others
//! `can_fail!` and its kin are nothing at all. A fault is armed by [`arm`], or for a whole process
//! by the variable [`VARIABLE`], in this language:
//!
//! ```text
//! kill:17             SIGKILL to ourselves before the 17th call
//! kill-write:3        … before the 3rd write
//! kill-within:3       … when half of the 3rd write is made
//! panic:17            a panic in the thread that makes the 17th call
//! stop:17             SIGSTOP to ourselves, and on at SIGCONT; also `stop-write`, `stop-within`
//! error:17:EIO        the 17th call fails with EIO; `error-write`, `error-within` as above
//! error:17:#0         … with the first of the errors that this call can give
//! errors-write:3:EIO  the 3rd write and every one after it fails; also `errors`, `errors-within`
//! ```

use std::fmt;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use nix::errno::Errno;
use nix::sys::signal::{Signal, raise};

// The macros that call this are in sys.rs.

/// Holds a script that is armed from the start.
pub const VARIABLE: &str = "OCAML_PROBES_FAULT";

/// A system call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "they are called what they are")]
pub enum Call {
    Pipe,
    OpenProcess,
    Open,
    ReadFile,
    /// Of the file of the program, not of its memory.
    ReadElf,
    ReadLink,
    Stat,
    ListThreads,
    Seize,
    SeizeForExec,
    Interrupt,
    /// `PTRACE_DETACH`, `PTRACE_CONT`, `PTRACE_LISTEN`.
    Restart,
    SignalInfo,
    EventMessage,
    Wait,
    PeekText,
    PokeText,
    ReadMemory,
    WriteMemory,
    WriteVm,
}

/// Errors, and what scripts call them.
const ERRNOS: [(&str, Errno); 11] = [
    ("EACCES", Errno::EACCES),
    ("ECHILD", Errno::ECHILD),
    ("EFAULT", Errno::EFAULT),
    ("EINTR", Errno::EINTR),
    ("EIO", Errno::EIO),
    ("EMFILE", Errno::EMFILE),
    ("ENOENT", Errno::ENOENT),
    ("ENOMEM", Errno::ENOMEM),
    ("ENOSYS", Errno::ENOSYS),
    ("EPERM", Errno::EPERM),
    ("ESRCH", Errno::ESRCH),
];

impl Call {
    /// The errors that the kernel can give here while the process lives.
    ///
    /// EINTR is in no list: each of these calls either does not wait, or waits in a way that only a
    /// signal interrupts which kills us.
    fn errors(self) -> &'static [Errno] {
        match self {
            Call::Pipe => &[Errno::EMFILE],
            Call::OpenProcess => &[Errno::ENOENT, Errno::EMFILE, Errno::ENOMEM],
            Call::Open => &[
                Errno::ENOENT,
                Errno::ESRCH,
                Errno::EACCES,
                Errno::EMFILE,
                Errno::ENOMEM,
            ],
            Call::ReadFile => &[Errno::ESRCH, Errno::EIO, Errno::ENOMEM],
            Call::ReadElf => &[Errno::EIO],
            Call::ReadLink | Call::Stat => &[Errno::ENOENT, Errno::EACCES],
            Call::ListThreads => &[Errno::ENOENT, Errno::ESRCH, Errno::ENOMEM],
            Call::Seize | Call::SeizeForExec => &[Errno::EPERM, Errno::ESRCH],
            Call::Interrupt | Call::Restart | Call::EventMessage => &[Errno::ESRCH],
            Call::SignalInfo => &[Errno::ESRCH, Errno::EINVAL],
            Call::Wait => &[Errno::ECHILD],
            Call::PeekText | Call::PokeText => &[Errno::EIO, Errno::EFAULT],
            Call::ReadMemory | Call::WriteMemory => &[Errno::EIO, Errno::EFAULT, Errno::ENOMEM],
            Call::WriteVm => &[Errno::EPERM, Errno::ENOSYS, Errno::EFAULT, Errno::ENOMEM],
        }
    }

    /// Whether it changes the memory of the process.
    pub fn is_write(self) -> bool {
        matches!(self, Call::PokeText | Call::WriteMemory | Call::WriteVm)
    }
}

/// What a script says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Script {
    fault: Fault,
    place: Place,
    /// Counted from 1.
    nth: usize,
    /// Whether every call after it fails as well.
    on_and_on: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    Panic,
    Stop,
    Error(Errno),
    /// One of those that the call can give.
    OneOf(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    BeforeCall,
    BeforeWrite,
    WithinWrite,
}

impl Script {
    fn parse(text: &str) -> Option<Script> {
        let mut words = text.split(':');
        let (what, nth) = (words.next()?, words.next()?.parse().ok()?);
        let (what, place) = match what.split_once('-') {
            None => (what, Place::BeforeCall),
            Some((what, "write")) => (what, Place::BeforeWrite),
            Some((what, "within")) => (what, Place::WithinWrite),
            Some(_) => return None,
        };
        let fault = match (what, words.next()) {
            ("kill", None) => Fault::Kill,
            ("panic", None) => Fault::Panic,
            ("stop", None) => Fault::Stop,
            ("error" | "errors", Some(error)) => match error.strip_prefix('#') {
                Some(index) => Fault::OneOf(index.parse().ok()?),
                None => Fault::Error(ERRNOS.iter().find(|(name, _)| *name == error)?.1),
            },
            _ => return None,
        };
        let script = Script {
            fault,
            place,
            nth,
            on_and_on: what == "errors",
        };
        (nth > 0 && words.next().is_none()).then_some(script)
    }
}

/// What is to happen at the nth call.
type Event = (usize, Box<dyn FnOnce() + Send>);

/// What is armed, and what was met since.
#[derive(Default)]
struct Armed {
    script: Option<Script>,
    event: Option<Event>,
    calls: Vec<Call>,
    writes: usize,
    failed: Option<Failed>,
    /// A write was cut short: the next call of its kind is the one that fails.
    cut: Option<Call>,
}

/// A call that was made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The first of them.
    pub call: Call,
    /// What it was said to have met.
    pub errno: i32,
}

/// What happened between [`arm`] and [`disarm`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// All calls, in order.
    pub calls: Vec<Call>,
    /// The first that was made to fail, if any was.
    pub failed: Option<Failed>,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.failed {
            Some(Failed { call, errno }) => {
                write!(f, "{call:?} failed with {}", Errno::from_raw(errno))
            }
            None => write!(f, "nothing failed in {} calls", self.calls.len()),
        }
    }
}

static ARMED: Mutex<Option<Armed>> = Mutex::new(None);

fn armed() -> MutexGuard<'static, Option<Armed>> {
    static VARIABLE_IS_READ: Once = Once::new();
    VARIABLE_IS_READ.call_once(|| {
        if let Some(script) = std::env::var_os(VARIABLE) {
            arm(&script.to_string_lossy());
        }
    });
    lock()
}

fn lock() -> MutexGuard<'static, Option<Armed>> {
    ARMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Arms a fault for the calls that any thread of this process makes from now on.
///
/// # Panics
///
/// If `script` is not one.
pub fn arm(script: &str) {
    let Some(parsed) = Script::parse(script) else {
        panic!("{script:?} is no fault");
    };
    *lock() = Some(Armed {
        script: Some(parsed),
        ..Armed::default()
    });
}

/// Has something happen just before the nth call, counted from 1.
pub fn arm_event(nth: usize, event: impl FnOnce() + Send + 'static) {
    *lock() = Some(Armed {
        event: Some((nth, Box::new(event))),
        ..Armed::default()
    });
}

/// Disarms what is armed; says what calls were made meanwhile.
pub fn disarm() -> Record {
    let armed = lock().take().unwrap_or_default();
    Record {
        calls: armed.calls,
        failed: armed.failed,
    }
}

/// What is to become of a call.
enum Verdict {
    Made,
    CutShort,
    Failed(Errno),
    Panicked,
    Signalled(Signal),
}

impl Armed {
    fn judge(&mut self, call: Call) -> Verdict {
        self.calls.push(call);
        self.writes += usize::from(call.is_write());
        let Some(script) = self.script else {
            return Verdict::Made;
        };
        let count = match script.place {
            Place::BeforeCall => self.calls.len(),
            Place::BeforeWrite | Place::WithinWrite if call.is_write() => self.writes,
            Place::BeforeWrite | Place::WithinWrite => 0,
        };
        if count == script.nth && script.place == Place::WithinWrite {
            return Verdict::CutShort;
        }
        let after = count > script.nth && script.on_and_on;
        if count == script.nth || after || self.cut == Some(call) {
            return self.fail(script, call);
        }
        Verdict::Made
    }

    fn fail(&mut self, script: Script, call: Call) -> Verdict {
        self.cut = None;
        let errno = match script.fault {
            Fault::Kill => return Verdict::Signalled(Signal::SIGKILL),
            Fault::Panic => return Verdict::Panicked,
            Fault::Stop => return Verdict::Signalled(Signal::SIGSTOP),
            Fault::Error(errno) => errno,
            Fault::OneOf(index) => match call.errors().get(index) {
                Some(&errno) => errno,
                None if self.failed.is_some() => call.errors()[0],
                None => {
                    // It cannot be made to fail so, and none after it is to.
                    self.script = None;
                    return Verdict::Made;
                }
            },
        };
        self.failed.get_or_insert(Failed {
            call,
            errno: errno as i32,
        });
        Verdict::Failed(errno)
    }
}

fn judge(call: Call) -> Verdict {
    let mut armed = armed();
    let Some(armed) = armed.as_mut() else {
        return Verdict::Made;
    };
    armed.judge(call)
}

fn happen() {
    let event = armed().as_mut().and_then(|armed| {
        let next = armed.calls.len() + 1;
        armed.event.take_if(|(nth, _)| *nth == next)
    });
    if let Some((_, event)) = event {
        event();
    }
}

impl Verdict {
    fn carry_out(self) -> Result<(), Errno> {
        match self {
            Verdict::Made | Verdict::CutShort => Ok(()),
            Verdict::Failed(errno) => Err(errno),
            Verdict::Panicked => panic!("a panic on demand"),
            // To this very thread, so that it does not go on meanwhile; it stops, or ends, all.
            Verdict::Signalled(signal) => raise(signal),
        }
    }
}

/// Before any call but a write of several bytes.
pub(crate) fn before(call: Call) -> Result<(), Errno> {
    happen();
    judge(call).carry_out()
}

/// Before a write of `len` parts: `Some` if only so many of them are to be made, by the caller,
/// before it calls [`cut_short`].
pub(crate) fn before_write(call: Call, len: usize) -> Result<Option<usize>, Errno> {
    happen();
    match judge(call) {
        Verdict::CutShort => Ok(Some(len / 2)),
        verdict => verdict.carry_out().map(|()| None),
    }
}

/// After a write of which only a part was made.
pub(crate) fn cut_short(call: Call) -> Result<(), Errno> {
    let fail = |armed: &mut Armed| Some(armed.fail(armed.script?, call));
    let verdict = lock().as_mut().and_then(fail);
    verdict.unwrap_or(Verdict::Made).carry_out()
}

/// After a part of a write was made that the kernel reports as such: says the part, and the next
/// call is the one that fails, unless it is we who do.
pub(crate) fn made_in_part<T>(call: Call, part: T) -> Result<T, Errno> {
    let ours = |armed: &mut Armed| {
        let script = armed.script?;
        let ours = matches!(script.fault, Fault::Kill | Fault::Panic | Fault::Stop);
        armed.cut = (!ours).then_some(call);
        ours.then(|| armed.fail(script, call))
    };
    let verdict = lock().as_mut().and_then(ours);
    verdict.unwrap_or(Verdict::Made).carry_out()?;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_fault_scripts_are_parsed_others_refused() {
        let script = |fault, place, nth, on_and_on| {
            Some(Script {
                fault,
                place,
                nth,
                on_and_on,
            })
        };
        for (text, expected) in [
            ("kill:17", script(Fault::Kill, Place::BeforeCall, 17, false)),
            ("panic:9", script(Fault::Panic, Place::BeforeCall, 9, false)),
            (
                "kill-write:3",
                script(Fault::Kill, Place::BeforeWrite, 3, false),
            ),
            (
                "kill-within:1",
                script(Fault::Kill, Place::WithinWrite, 1, false),
            ),
            (
                "error:2:EIO",
                script(Fault::Error(Errno::EIO), Place::BeforeCall, 2, false),
            ),
            (
                "errors-write:2:#4",
                script(Fault::OneOf(4), Place::BeforeWrite, 2, true),
            ),
            ("", None),
            ("kill", None),
            ("kill:0", None),
            ("kill:x", None),
            ("kill:1:EIO", None),
            ("error:1", None),
            ("error:1:EWHAT", None),
            ("error:1:EIO:2", None),
            ("kill-later:1", None),
        ] {
            assert_eq!(Script::parse(text), expected, "{text:?}");
        }
    }

    fn met(script: &str, calls: &[Call]) -> Vec<Option<Errno>> {
        let mut armed = Armed {
            script: Script::parse(script),
            ..Armed::default()
        };
        let mut judge = |&call: &Call| match armed.judge(call) {
            Verdict::Failed(errno) => Some(errno),
            _ => None,
        };
        calls.iter().map(&mut judge).collect()
    }

    #[test]
    fn only_the_named_call_or_all_later_fail() {
        let calls = [Call::Seize, Call::WriteMemory, Call::Wait, Call::WriteVm];
        let (eio, eperm) = (Some(Errno::EIO), Some(Errno::EPERM));
        assert_eq!(met("error:2:EIO", &calls), [None, eio, None, None]);
        assert_eq!(met("error-write:2:EIO", &calls), [None, None, None, eio]);
        assert_eq!(met("errors:3:EIO", &calls), [None, None, eio, eio]);
        assert_eq!(met("errors-write:1:EIO", &calls), [None, eio, None, eio]);
        assert_eq!(met("error:1:#0", &calls), [eperm, None, None, None]);
        assert_eq!(met("error:1:#9", &calls), [None; 4]);
        assert_eq!(met("errors:1:#9", &calls), [None; 4]);
        let one_of_each = [Errno::ESRCH, Errno::EFAULT, Errno::ECHILD, Errno::ENOSYS];
        assert_eq!(met("errors:1:#1", &calls), one_of_each.map(Some));
        assert_eq!(met("error:5:EIO", &calls), [None; 4]);
    }
}
