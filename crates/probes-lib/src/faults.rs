//! Fault injection: every system call by which a process is read, stopped and changed can be made to
//! fail, to be cut short, to kill our own process, or to call a function of the test before it.
//!
//! Only with the feature `fault-injection`, which what is built for tests has; in all other builds, `fault_point!` and
//! the like (sys.rs) expand to nothing. A fault is armed by [`arm`], or for a whole process by the environment
//! variable [`VARIABLE`], with a script:
//!
//! ```text
//! kill:17             SIGKILL to ourselves before the 17th call
//! kill-write:3        … before the 3rd write
//! kill-within:3       … after half of the 3rd write
//! panic:17            a panic in the thread that makes the 17th call
//! stop:17             SIGSTOP to ourselves until SIGCONT; also `stop-write`, `stop-within`
//! error:17:EIO        the 17th call fails with EIO; `error-write`, `error-within` as above
//! error:17:#0         … with the first of the errors that this call can give
//! errors-write:3:EIO  the 3rd write and every one after it fails; also `errors`, `errors-within`
//! ```

use std::fmt;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use nix::errno::Errno;
use nix::sys::signal::{Signal, raise};

/// The environment variable with a script that is armed from the start.
pub const VARIABLE: &str = "OCAML_PROBES_FAULT";

/// A system call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "their names say which they are")]
pub enum Call {
    Pipe,
    OpenProcess,
    Open,
    ReadFile,
    /// A read of the ELF file of the program, not of its memory.
    ReadElf,
    ReadLink,
    Stat,
    ListThreads,
    Seize,
    SeizeForExec,
    SetOptions,
    Interrupt,
    /// `PTRACE_CONT`, `PTRACE_LISTEN`.
    Restart,
    Detach,
    SignalInfo,
    EventMessage,
    Wait,
    PeekText,
    PokeText,
    ReadMemory,
    WriteMemory,
    WriteVm,
    /// A change of the file that records a hold, or of its directory.
    Record,
}

/// The names of errors in scripts.
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
    /// Returns the errors that the kernel can return here while the process lives.
    ///
    /// EINTR is in no list: each of these calls either does not wait, or can be interrupted only by a
    /// signal that kills us.
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
            Call::SetOptions
            | Call::Interrupt
            | Call::Restart
            | Call::Detach
            | Call::EventMessage => &[Errno::ESRCH],
            Call::SignalInfo => &[Errno::ESRCH, Errno::EINVAL],
            Call::Wait => &[Errno::ECHILD],
            Call::PeekText | Call::PokeText => &[Errno::EIO, Errno::EFAULT],
            Call::ReadMemory | Call::WriteMemory => &[Errno::EIO, Errno::EFAULT, Errno::ENOMEM],
            Call::Record => &[Errno::EACCES, Errno::EIO, Errno::EMFILE],
            Call::WriteVm => &[Errno::EPERM, Errno::ENOSYS, Errno::EFAULT, Errno::ENOMEM],
        }
    }

    /// Returns whether it changes the memory of the process.
    pub fn is_write(self) -> bool {
        matches!(self, Call::PokeText | Call::WriteMemory | Call::WriteVm)
    }
}

/// A parsed script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Script {
    fault: Fault,
    place: FaultPoint,
    /// Counted from 1.
    nth: usize,
    /// Whether every call after it fails as well.
    repeats: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    Panic,
    Stop,
    Error(Errno),
    /// One of those that the call can return.
    OneOf(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultPoint {
    BeforeCall,
    BeforeWrite,
    WithinWrite,
}

impl Script {
    fn parse(text: &str) -> Option<Script> {
        let mut words = text.split(':');
        let (what, nth) = (words.next()?, words.next()?.parse().ok()?);
        let (what, place) = match what.split_once('-') {
            None => (what, FaultPoint::BeforeCall),
            Some((what, "write")) => (what, FaultPoint::BeforeWrite),
            Some((what, "within")) => (what, FaultPoint::WithinWrite),
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
            repeats: what == "errors",
        };
        (nth > 0 && words.next().is_none()).then_some(script)
    }
}

/// What happens at the nth call.
type CallHook = (usize, Box<dyn FnOnce() + Send>);

/// What is armed, and what has been recorded since.
#[derive(Default)]
struct Armed {
    script: Option<Script>,
    event: Option<CallHook>,
    calls: Vec<Call>,
    writes: usize,
    first_failed: Option<FailedCall>,
    failed_calls: Vec<Call>,
    /// A write was cut short: the next call of its kind is the one that fails.
    cut: Option<Call>,
}

/// A call that was made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedCall {
    /// The call; the first one if several were made to fail.
    pub call: Call,
    /// The error that it returned.
    pub errno: i32,
}

/// What happened between [`arm`] and [`disarm`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// All calls, in order.
    pub calls: Vec<Call>,
    /// The first that was made to fail, if any was.
    pub first_failed: Option<FailedCall>,
    /// All that were made to fail, in order.
    pub failed_calls: Vec<Call>,
}

impl fmt::Display for FaultRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first_failed {
            Some(FailedCall { call, errno }) => {
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
        panic!("{script:?} is not a fault script");
    };
    *lock() = Some(Armed {
        script: Some(parsed),
        ..Armed::default()
    });
}

/// Arms an event that happens just before the nth call, counted from 1.
pub fn arm_event(nth: usize, event: impl FnOnce() + Send + 'static) {
    *lock() = Some(Armed {
        event: Some((nth, Box::new(event))),
        ..Armed::default()
    });
}

/// Disarms what is armed; returns the calls that were made meanwhile.
pub fn disarm() -> FaultRecord {
    let armed = lock().take().unwrap_or_default();
    FaultRecord {
        calls: armed.calls,
        first_failed: armed.first_failed,
        failed_calls: armed.failed_calls,
    }
}

/// What becomes of a call.
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
            FaultPoint::BeforeCall => self.calls.len(),
            FaultPoint::BeforeWrite | FaultPoint::WithinWrite if call.is_write() => self.writes,
            FaultPoint::BeforeWrite | FaultPoint::WithinWrite => 0,
        };
        if count == script.nth && script.place == FaultPoint::WithinWrite {
            return Verdict::CutShort;
        }
        let after = count > script.nth && script.repeats;
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
                None if self.first_failed.is_some() => call.errors()[0],
                None => {
                    // This call has fewer errors than that, and no later call is to fail instead.
                    self.script = None;
                    return Verdict::Made;
                }
            },
        };
        self.failed_calls.push(call);
        self.first_failed.get_or_insert(FailedCall {
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

fn run_event() {
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
            Verdict::Panicked => panic!("injected panic"),
            // To this very thread, so that it does not continue; the signal stops or ends the process.
            Verdict::Signalled(signal) => raise(signal),
        }
    }
}

/// To be called before any system call but a write of several bytes.
pub(crate) fn before(call: Call) -> Result<(), Errno> {
    run_event();
    judge(call).carry_out()
}

/// To be called before a write of `len` parts: returns `Some(n)` if the caller is to write only the
/// first `n` of them, and then to call [`cut_short`] or [`made_in_part`].
pub(crate) fn before_write(call: Call, len: usize) -> Result<Option<usize>, Errno> {
    run_event();
    match judge(call) {
        Verdict::CutShort => Ok(Some(len / 2)),
        verdict => verdict.carry_out().map(|()| None),
    }
}

/// To be called after a write that [`before_write`] has cut short: the fault happens now.
pub(crate) fn cut_short(call: Call) -> Result<(), Errno> {
    let fail = |armed: &mut Armed| Some(armed.fail(armed.script?, call));
    let verdict = lock().as_mut().and_then(fail);
    verdict.unwrap_or(Verdict::Made).carry_out()
}

/// To be called instead of [`cut_short`] if the kernel reports short writes to its caller: returns
/// `part`, the result of the short write, and makes the next call of this kind fail. A fault of our
/// own process (kill, panic, stop) happens now.
pub(crate) fn made_in_part<T>(call: Call, part: T) -> Result<T, Errno> {
    let fail_now = |armed: &mut Armed| {
        let script = armed.script?;
        let is_of_own_process = matches!(script.fault, Fault::Kill | Fault::Panic | Fault::Stop);
        armed.cut = (!is_of_own_process).then_some(call);
        is_of_own_process.then(|| armed.fail(script, call))
    };
    let verdict = lock().as_mut().and_then(fail_now);
    verdict.unwrap_or(Verdict::Made).carry_out()?;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_fault_scripts_are_parsed_others_refused() {
        let script = |fault, place, nth, repeats| {
            Some(Script {
                fault,
                place,
                nth,
                repeats,
            })
        };
        for (text, expected) in [
            (
                "kill:17",
                script(Fault::Kill, FaultPoint::BeforeCall, 17, false),
            ),
            (
                "panic:9",
                script(Fault::Panic, FaultPoint::BeforeCall, 9, false),
            ),
            (
                "kill-write:3",
                script(Fault::Kill, FaultPoint::BeforeWrite, 3, false),
            ),
            (
                "kill-within:1",
                script(Fault::Kill, FaultPoint::WithinWrite, 1, false),
            ),
            (
                "error:2:EIO",
                script(Fault::Error(Errno::EIO), FaultPoint::BeforeCall, 2, false),
            ),
            (
                "errors-write:2:#4",
                script(Fault::OneOf(4), FaultPoint::BeforeWrite, 2, true),
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

    fn errors_of(script: &str, calls: &[Call]) -> Vec<Option<Errno>> {
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
    fn numbered_call_fails_alone_or_with_later_ones() {
        let calls = [Call::Seize, Call::WriteMemory, Call::Wait, Call::WriteVm];
        let (eio, eperm) = (Some(Errno::EIO), Some(Errno::EPERM));
        assert_eq!(errors_of("error:2:EIO", &calls), [None, eio, None, None]);
        assert_eq!(
            errors_of("error-write:2:EIO", &calls),
            [None, None, None, eio]
        );
        assert_eq!(errors_of("errors:3:EIO", &calls), [None, None, eio, eio]);
        assert_eq!(
            errors_of("errors-write:1:EIO", &calls),
            [None, eio, None, eio]
        );
        assert_eq!(errors_of("error:1:#0", &calls), [eperm, None, None, None]);
        assert_eq!(errors_of("error:1:#9", &calls), [None; 4]);
        assert_eq!(errors_of("errors:1:#9", &calls), [None; 4]);
        let one_of_each = [Errno::ESRCH, Errno::EFAULT, Errno::ECHILD, Errno::ENOSYS];
        assert_eq!(errors_of("errors:1:#1", &calls), one_of_each.map(Some));
        assert_eq!(errors_of("error:5:EIO", &calls), [None; 4]);
    }
}
