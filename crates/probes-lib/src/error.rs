//! [`Error`]: what it is about, what went wrong, and what became of the target. Messages are in
//! lower case, without a full stop. What to do next is for the caller to say, based on the [`ErrorKind`].

mod file;
mod function;
mod launch;
mod memory;
mod observe;
mod probe;
mod process;
mod refusal;
mod runtime_events;
mod subject;
mod system;

use std::fmt;
use std::io;
use std::path::PathBuf;

use nix::errno::Errno;

use crate::address::LiveAddr;

pub use file::{ElfDefect, FileError, MalformedNote, NoteDefect, ProbeDefect};
pub use function::FunctionError;
pub(crate) use function::and_unusable;
pub use launch::LaunchError;
pub use memory::{MemoryError, MemoryPart};
pub use observe::{
    MemoryLimit, MemoryLimitKind, ObserveError, SeccompAction, ToolProcess, TscDenial,
    UnreadableFilter,
};
pub use probe::ProbeError;
pub(crate) use process::FREEZERS;
pub use process::{Denial, ProcessError};
pub use refusal::Refusal;
pub use runtime_events::RuntimeEventsError;
pub use subject::Subject;
pub use system::{Operation, SystemError};

/// `1 site`, `2 sites`.
pub(crate) fn number_of(many: usize, noun: &str) -> String {
    let plural = match noun {
        _ if many == 1 => "",
        noun if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{many} {noun}{plural}")
}

/// A ptrace call or write that the follower was to make fails with this if the follower does not lend the process any
/// more ([`ProcessError::FollowerLost`]). It fails with it for no other reason.
pub(crate) const FOLLOWER_LOST: Errno = Errno::ENOTCONN;

/// The same if the follower does not answer ([`ProcessError::FollowerSilent`]).
pub(crate) const FOLLOWER_SILENT: Errno = Errno::EHOSTDOWN;

/// The result of this crate's functions.
///
/// ```no_run
/// use probes_lib::{State, Target};
///
/// fn enabled(pid: i32) -> probes_lib::Result<usize> {
///     let states = Target::open(pid)?.states()?;
///     Ok(states.probes().filter(|probe| probe.state() == State::Enabled).count())
/// }
/// println!("{} probes are enabled", enabled(4242)?);
/// # Ok::<(), probes_lib::Error>(())
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something could not be done, and what that leaves behind.
///
/// Displayed as a sentence: the [`ErrorKind`] with its [`Subject`], and the [`Effect`].
///
/// ```
/// use probes_lib::{Error, ErrorKind, ProcessError, Subject};
///
/// let error = Error::new(Subject::Process(4242), ProcessError::Exited);
/// assert_eq!(error.to_string(), "process 4242 exited");
/// assert_eq!(error.pid(), Some(4242));
/// assert!(error.is_gone());
/// assert!(matches!(error.kind(), ErrorKind::Process(ProcessError::Exited)));
/// ```
pub struct Error(Box<Parts>);

struct Parts {
    subject: Subject,
    kind: ErrorKind,
    effect: Effect,
}

/// What went wrong, by area.
///
/// [`Error`] has an example.
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// Probes cannot be found, or cannot be changed as asked.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// Functions cannot be found.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// A process cannot be opened, observed or changed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Memory of a process cannot be used.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A process cannot be observed, or not any more.
    #[error(transparent)]
    Observe(#[from] ObserveError),
    /// The events of a runtime cannot be read.
    #[error(transparent)]
    RuntimeEvents(#[from] RuntimeEventsError),
    /// A program cannot be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The operating system refused something.
    #[error(transparent)]
    System(#[from] SystemError),
}

impl ErrorKind {
    /// A name for programs, which stays the same when messages change: the area and the variant, in
    /// snake case.
    ///
    /// ```
    /// use probes_lib::{ErrorKind, ProcessError};
    ///
    /// let kind = ErrorKind::Process(ProcessError::NotFound);
    /// assert_eq!(kind.name(), "process.not_found");
    /// ```
    pub fn name(&self) -> String {
        let area: &str = self.into();
        let variant: &str = match self {
            ErrorKind::File(kind) => kind.into(),
            ErrorKind::Probe(kind) => kind.into(),
            ErrorKind::Function(kind) => kind.into(),
            ErrorKind::Process(kind) => kind.into(),
            ErrorKind::Memory(kind) => kind.into(),
            ErrorKind::Observe(kind) => kind.into(),
            ErrorKind::RuntimeEvents(kind) => kind.into(),
            ErrorKind::Launch(kind) => kind.into(),
            ErrorKind::System(kind) => kind.into(),
        };
        format!("{area}.{variant}")
    }

    /// Returns the message for this kind of error about `subject`.
    fn with_subject(&self, subject: &Subject) -> String {
        let name = match subject {
            Subject::None => return self.to_string(),
            subject => subject.to_string(),
        };
        let text = match self {
            ErrorKind::File(kind) => kind.with_subject(&name),
            ErrorKind::Probe(kind) => kind.with_subject(&name),
            ErrorKind::Function(kind) => Some(kind.with_subject(&name)),
            ErrorKind::Process(kind) => kind.with_subject(subject),
            ErrorKind::Memory(kind) => Some(kind.with_subject(&name)),
            ErrorKind::Launch(kind) => kind.with_subject(&name),
            ErrorKind::System(kind) => kind.with_subject(&name),
            ErrorKind::Observe(_) | ErrorKind::RuntimeEvents(_) => None,
        };
        text.unwrap_or_else(|| format!("{name} {self}"))
    }
}

/// What a failed call has done to the process or program it was about.
///
/// ```no_run
/// use probes_lib::{Actions, Effect, Selector, Target};
///
/// let target = Target::open(4242)?;
/// if let Err(error) = target.update(&Actions::new().enable(Selector::All)) {
///     if error.effect() == Effect::HalfChanged {
///         println!("process {} should be restarted: {error}", target.pid());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The error does not say: the call changes nothing, or the process has exited or executed a new program.
    Unspecified,
    /// Nothing: it failed before the first write.
    NothingChanged,
    /// Bytes were written, and restored. In an update, every thread was stopped meanwhile, unless the update was made
    /// without a stop.
    Restored,
    /// All probes are as they were, but memory of an observation may stay mapped, which does no harm;
    /// [`Target::clean`](crate::Target::clean) unmaps it.
    StillMapped,
    /// Bytes were written and could not be restored: some probes may be half changed.
    HalfChanged,
    /// A program that was to be started with its probes set was not started, or was killed before
    /// its first OCaml code ran.
    NotStarted,
}

impl Error {
    /// Returns an error of a call that changed nothing; public for tests of code that handles
    /// errors.
    pub fn new(subject: Subject, kind: impl Into<ErrorKind>) -> Error {
        Error(Box::new(Parts {
            subject,
            kind: kind.into(),
            effect: Effect::Unspecified,
        }))
    }

    pub(crate) fn of_process(pid: i32, kind: impl Into<ErrorKind>) -> Error {
        Error::new(Subject::Process(pid), kind)
    }

    pub(crate) fn of_file(path: impl Into<PathBuf>, kind: impl Into<ErrorKind>) -> Error {
        Error::new(Subject::File(path.into()), kind)
    }

    pub(crate) fn of_program(program: impl Into<PathBuf>, kind: impl Into<ErrorKind>) -> Error {
        Error::new(Subject::Program(program.into()), kind)
    }

    /// Returns the error for a failed system call on a process; ESRCH means that it has exited.
    pub(crate) fn of_call(pid: i32, operation: Operation, source: io::Error) -> Error {
        match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ESRCH) => Error::of_process(pid, ProcessError::Exited),
            Some(FOLLOWER_LOST) => Error::of_process(pid, ProcessError::FollowerLost),
            Some(FOLLOWER_SILENT) => Error::of_process(pid, ProcessError::FollowerSilent),
            _ => Error::of_process(pid, SystemError::Call { operation, source }),
        }
    }

    /// Returns the error for memory that could not be read.
    pub(crate) fn of_read(
        pid: i32,
        part: MemoryPart,
        address: LiveAddr,
        source: io::Error,
    ) -> Error {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => Error::of_process(pid, ProcessError::Exited),
            _ => Error::of_process(
                pid,
                MemoryError::Read {
                    part,
                    address,
                    source,
                },
            ),
        }
    }

    /// Returns the error for memory that could not be written.
    pub(crate) fn of_write(
        pid: i32,
        part: MemoryPart,
        address: LiveAddr,
        source: io::Error,
    ) -> Error {
        match (source.kind(), source.raw_os_error().map(Errno::from_raw)) {
            // ESRCH: the thread through which the memory was to be written was killed while it was stopped.
            (io::ErrorKind::UnexpectedEof, _) | (_, Some(Errno::ESRCH)) => {
                Error::of_process(pid, ProcessError::Exited)
            }
            (_, Some(FOLLOWER_LOST)) => Error::of_process(pid, ProcessError::FollowerLost),
            (_, Some(FOLLOWER_SILENT)) => Error::of_process(pid, ProcessError::FollowerSilent),
            _ => Error::of_process(
                pid,
                MemoryError::Write {
                    part,
                    address,
                    source,
                },
            ),
        }
    }

    /// What it is about.
    pub fn subject(&self) -> &Subject {
        &self.0.subject
    }

    /// The process that it is about, if it is about one.
    pub fn pid(&self) -> Option<i32> {
        self.0.subject.pid()
    }

    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    pub(crate) fn kind_mut(&mut self) -> &mut ErrorKind {
        &mut self.0.kind
    }

    /// What the failed call left behind.
    pub fn effect(&self) -> Effect {
        self.0.effect
    }

    /// Whether the process is not there any more, or never was: [`ProcessError::NotFound`],
    /// [`ProcessError::Exited`], [`ProcessError::Zombie`].
    pub fn is_gone(&self) -> bool {
        use ProcessError::{Exited, NotFound, Zombie};
        let ErrorKind::Process(kind) = self.kind() else {
            return false;
        };
        matches!(kind, NotFound | Exited | Zombie { .. })
    }

    /// Whether the process executed a new program meanwhile: [`ProcessError::Executed`].
    pub fn is_exec(&self) -> bool {
        matches!(self.kind(), ErrorKind::Process(ProcessError::Executed))
    }

    /// Whether the program that was meant is not there any more: the process is gone, or it executed a new program.
    pub fn is_program_gone(&self) -> bool {
        self.is_gone() || self.is_exec()
    }

    /// Whether another observer has replaced the one that failed: [`ObserveError::Replaced`].
    pub fn is_replaced(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::Observe(ObserveError::Replaced { .. })
        )
    }

    /// Whether the kernel failed to open or read something that is there and may be read.
    pub(crate) fn is_failed_call(&self) -> bool {
        let is_input_error = |it: &io::Error| it.raw_os_error() == Some(Errno::EIO as i32);
        self.is_shortage() || self.call_error().is_some_and(is_input_error)
    }

    /// Whether we lacked files or memory for a while, see [`is_shortage`].
    pub(crate) fn is_shortage(&self) -> bool {
        self.call_error().is_some_and(is_shortage)
    }

    /// Returns the error of the system call that failed, if that is the reason.
    fn call_error(&self) -> Option<&io::Error> {
        let source = std::error::Error::source(self);
        source.and_then(|source| source.downcast_ref())
    }

    /// Whether a program or file has no probes: [`ProbeError::NoProbes`].
    pub(crate) fn has_no_probes(&self) -> bool {
        matches!(self.kind(), ErrorKind::Probe(ProbeError::NoProbes { .. }))
    }

    /// Whether a program has no site of a probe: it has no probes, or its probes are bytecode
    /// ([`ProcessError::Bytecode`]).
    pub(crate) fn has_no_sites(&self) -> bool {
        let is_bytecode = matches!(self.kind(), ErrorKind::Process(ProcessError::Bytecode));
        is_bytecode || self.has_no_probes()
    }

    /// Whether a probe was asked for that is not there: [`ProbeError::NoProbes`],
    /// [`ProbeError::Unknown`], [`ProbeError::NoMatch`]. It may come with an object that is loaded
    /// later, or with a program that is executed.
    pub fn is_missing_name(&self) -> bool {
        use ProbeError::{NoMatch, NoProbes, Unknown};
        let ErrorKind::Probe(kind) = self.kind() else {
            return false;
        };
        matches!(kind, NoProbes { .. } | Unknown { .. } | NoMatch { .. })
    }

    /// Whether functions, places in them or USDT probes were asked for that are not there. They may come with an object that
    /// is loaded later.
    pub fn is_missing_function(&self) -> bool {
        use FunctionError::{
            NeedsOcaml5, NoCodeAt, NoCollector, NoLines, NoMatch, NoRuntime, NoUsdt, NoneAt,
            UnknownFile,
        };
        let ErrorKind::Function(kind) = self.kind() else {
            return false;
        };
        matches!(
            kind,
            NoMatch { .. }
                | NoneAt { .. }
                | NoUsdt { .. }
                | NoLines { .. }
                | UnknownFile { .. }
                | NoCodeAt { .. }
                | NoRuntime { .. }
                | NeedsOcaml5 { .. }
                | NoCollector { .. }
        )
    }

    /// Whether the threads of the process did not all stop in time: [`ProcessError::Busy`],
    /// [`ProcessError::ThreadsKeepStarting`].
    pub fn is_stop_timeout(&self) -> bool {
        use ProcessError::{Busy, ThreadsKeepStarting};
        let ErrorKind::Process(kind) = self.kind() else {
            return false;
        };
        matches!(kind, Busy { .. } | ThreadsKeepStarting { .. })
    }

    /// Whether another update of the process is in progress: [`Denial::BeingChanged`].
    pub fn is_being_updated(&self) -> bool {
        matches!(self.denial(), Some(Denial::BeingChanged { .. }))
    }

    /// Whether the process changed its mappings, or another one its probes, during each attempt.
    pub(crate) fn keeps_changing(&self) -> bool {
        matches!(self.kind(), ErrorKind::Process(ProcessError::KeepsChanging))
    }

    /// Whether the same call may succeed in a moment: a [stop timeout](Error::is_stop_timeout),
    /// [`ProcessError::KeepsChanging`], [`ObserveError::CallUnfinished`], [`SystemError::NoThread`],
    /// [`Denial::BeingChanged`], [`Denial::Traced`], or [`Denial::FollowedByOtherUser`].
    pub fn is_transient(&self) -> bool {
        self.is_stop_timeout()
            || self.is_being_updated()
            || self.keeps_changing()
            || matches!(
                self.denial(),
                Some(Denial::Traced { .. } | Denial::FollowedByOtherUser { .. })
            )
            || matches!(
                self.kind(),
                ErrorKind::Observe(ObserveError::CallUnfinished)
                    | ErrorKind::System(SystemError::NoThread { .. })
            )
    }

    /// Whether seccomp keeps the process from being observed: [`ObserveError::SeccompRefuses`],
    /// [`ObserveError::SeccompStrict`], [`ObserveError::SeccompUnreadable`].
    pub fn is_refused_by_seccomp(&self) -> bool {
        use ObserveError::{SeccompRefuses, SeccompStrict, SeccompUnreadable};
        let ErrorKind::Observe(kind) = self.kind() else {
            return false;
        };
        matches!(
            kind,
            SeccompRefuses { .. } | SeccompStrict | SeccompUnreadable { .. }
        )
    }

    /// Why a process may not be traced, read or updated, if that is the error ([`ProcessError::Denied`]).
    pub fn denial(&self) -> Option<&Denial> {
        match self.kind() {
            ErrorKind::Process(ProcessError::Denied { denial, .. }) => Some(denial),
            _ => None,
        }
    }

    /// Returns the same error about this subject.
    pub(crate) fn about(mut self, subject: Subject) -> Error {
        self.0.subject = subject;
        self
    }

    /// Returns the same error with this effect, whatever effect it had before.
    pub(crate) fn with_effect(mut self, effect: Effect) -> Error {
        self.0.effect = effect;
        self
    }

    /// Returns the message without the effect: for a caller that tries again.
    ///
    /// ```no_run
    /// if let Err(error) = probes_lib::Target::open(4242) {
    ///     println!("trying again: {}", error.text_without_effect());
    /// }
    /// ```
    pub fn text_without_effect(&self) -> String {
        self.kind().with_subject(self.subject())
    }

    /// Returns the same error without an effect: for a caller that tries another way, whose effect this error cannot
    /// know.
    #[must_use]
    pub fn without_effect(self) -> Error {
        self.with_effect(Effect::Unspecified)
    }

    /// Returns the same error with this effect, unless it has one already or the process has exited: for a caller whose
    /// operation consists of several calls.
    #[must_use]
    pub fn with_effect_if_none(self, effect: Effect) -> Error {
        let has_exited = matches!(self.kind(), ErrorKind::Process(ProcessError::Exited));
        if self.effect() == Effect::Unspecified && !has_exited {
            self.with_effect(effect)
        } else {
            self
        }
    }
}

/// An error without a subject.
impl<K: Into<ErrorKind>> From<K> for Error {
    fn from(kind: K) -> Error {
        Error::new(Subject::None, kind)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("subject", self.subject())
            .field("kind", self.kind())
            .field("effect", &self.effect())
            .finish()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.text_without_effect();
        f.write_str(&text)?;
        let effect = match self.effect() {
            Effect::Unspecified => return Ok(()),
            Effect::NothingChanged => "nothing was changed",
            Effect::Restored => "every change was undone",
            Effect::StillMapped => {
                "all probes are as they were, but memory may stay mapped, which does no harm"
            }
            Effect::HalfChanged => "some probes may be half changed (inconsistent)",
            Effect::NotStarted => "the program was not started",
        };
        let separator = if text.ends_with('?') { " " } else { "; " };
        write!(f, "{separator}{effect}")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(self.kind())
    }
}

/// The kernel's reason without Rust's "(os error 2)".
pub(crate) fn reason(error: &io::Error) -> String {
    match error.raw_os_error() {
        // "Try again", says nix, which sounds like advice.
        Some(libc::EAGAIN) => "Resource temporarily unavailable".to_owned(),
        Some(errno) => Errno::from_raw(errno).desc().to_owned(),
        None => error.to_string(),
    }
}

/// Whether an error says that we lack something for a while, and nothing about what was to be opened or read.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM))
}
