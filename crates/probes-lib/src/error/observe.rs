//! What can keep a process from being observed.

use std::fmt;
use std::io;
use std::time::Duration;

use nix::errno::Errno;

use super::reason;
use crate::address::LiveAddr;
use crate::expression::BadExpression;

/// The process of a tool that observes another process, or holds its probes ([`Holder`](crate::Holder)), according to
/// its own record: it may have exited since.
///
/// ```no_run
/// let states = probes_lib::Target::open(4242)?.states()?;
/// if let Some(observer) = states.observer() {
///     println!("{observer}: {}", if observer.is_alive { "running" } else { "gone" });
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolProcess {
    /// Its pid in its own pid namespace.
    pub pid: i32,
    /// Whether that is also ours.
    pub is_in_our_namespace: bool,
    /// Its command line, without the directory of the program; cut off if it is long.
    pub command: String,
    /// How long ago the observation or the hold began.
    pub age: Duration,
    /// Whether it still observes or holds. If not, it was killed or has dropped its
    /// [`Observer`](crate::Observer) or [`Hold`](crate::Hold), or it observes the process that this one was
    /// forked from.
    pub is_alive: bool,
    /// Whether it is not alive for this process, but observes another: the one that this process was forked from.
    pub observes_another: bool,
}

/// A limit of the memory of a process.
///
/// ```
/// use probes_lib::{Error, MemoryLimit, MemoryLimitKind, ObserveError, Subject};
///
/// let limit = MemoryLimit { kind: MemoryLimitKind::Data, limit: 64 << 20, used: 63 << 20 };
/// let error = Error::new(Subject::Process(4242), ObserveError::MemoryLimited { needed: 2 << 20, limit });
/// assert!(error.to_string().contains("RLIMIT_DATA"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// What is limited.
    pub kind: MemoryLimitKind,
    /// How much the process may use, in bytes.
    pub limit: u64,
    /// How much it uses, in bytes.
    pub used: u64,
}

/// What a limit of memory limits.
///
/// [`MemoryLimit`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryLimitKind {
    /// What a process maps: `RLIMIT_AS` of setrlimit(2).
    AddressSpace,
    /// What it maps private and writable: `RLIMIT_DATA`.
    Data,
    /// The memory of all processes of a cgroup, without page cache that the kernel can drop. Beyond the limit, the
    /// kernel kills a process.
    Cgroup,
}

impl fmt::Display for MemoryLimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryLimitKind::AddressSpace => "RLIMIT_AS",
            MemoryLimitKind::Data => "RLIMIT_DATA",
            MemoryLimitKind::Cgroup => "the memory limit of its cgroup",
        })
    }
}

impl ToolProcess {
    /// Returns how long ago the observation or the hold began, in the largest unit of which that is at least two:
    /// `100 s`, `2 minutes`.
    pub fn age_in_words(&self) -> String {
        in_words(self.age)
    }
}

/// Its pid and its command.
impl fmt::Display for ToolProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let elsewhere = if self.is_in_our_namespace {
            ""
        } else {
            " of another pid namespace"
        };
        write!(f, "pid {}{elsewhere} ({})", self.pid, self.command)
    }
}

/// Why a process cannot be observed, or not any more. Most messages continue a sentence that begins
/// with the process; those "without a subject" are complete.
///
/// ```no_run
/// use probes_lib::{ErrorKind, Observation, ObserveError, Options, Selector, Target};
///
/// let observation = Observation::new().count(Selector::All);
/// if let Err(error) = Target::open(4242)?.observe(&observation, Options::default()) {
///     match error.kind() {
///         ErrorKind::Observe(ObserveError::AlreadyObserved { observer }) => println!("{observer} observes it"),
///         _ => return Err(error),
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum ObserveError {
    /// The semaphore of a USDT probe has so high a value that it cannot be raised.
    #[error(
        "has the semaphore of a USDT probe at {address} at its highest value: it cannot be raised"
    )]
    SemaphoreFull {
        /// Its address in the process.
        address: LiveAddr,
    },
    /// The probes to be observed have counters, but no sites.
    #[error("has no sites for the probes to be observed: they have semaphores only")]
    NoSites,
    /// No address range for trampolines is free within reach of the sites.
    #[error("has no free addresses for trampolines within 2 GiB of its sites")]
    NoRoom,
    /// No object of the process has unused bytes after its code, in which an injected call could be
    /// placed. This happens if the program is linked statically and its last page of code is full.
    #[error(
        "has no loaded object with {bytes} free bytes after its code, which observing needs to inject system calls"
    )]
    NoCodeCave {
        /// How many there have to be.
        bytes: usize,
    },
    /// No thread of the process can be made to execute an injected call.
    #[error(
        "has no thread that can execute an injected system call: each has a pending signal, is in a restartable sequence (rseq), or still executes the calls of a killed tool"
    )]
    NoThreadToRedirect,
    /// A thread that was resumed to execute an injected call has executed no instruction: a cgroup freezer keeps the
    /// process frozen, or it gets no processor.
    #[error(
        "did not run when resumed for an injected mmap or munmap: it is frozen (cgroup freezer), or gets no processor"
    )]
    NotRunning,
    /// A thread that was resumed to execute an injected call has not finished it: it gets too little time on a processor.
    /// It goes on from there by itself, and then returns to where it was.
    #[error(
        "did not finish an injected mmap or munmap in time: it gets too little time on a processor"
    )]
    CallUnfinished,
    /// A thread, which is the subject, is in code that an earlier observation has added to the process, or may return
    /// to it. So that code stays mapped.
    #[error(
        "({name}) {} {code}, which an earlier observation has left: it cannot be removed until the thread is out of it",
        if *.is_executing { "still executes" } else { "may still return to" }
    )]
    StillInside {
        /// The thread's name.
        name: String,
        /// Whether it executes the code; if not, its stack holds an address there.
        is_executing: bool,
        /// The code, and the function that it belongs to.
        code: String,
    },
    /// Each thread of the process has a seccomp filter that refuses a system call which observing injects.
    #[error("cannot be observed: observing injects {call}, and its seccomp filter {action}")]
    SeccompRefuses {
        /// The system call, and what for.
        call: &'static str,
        /// What the filter does instead.
        action: SeccompAction,
    },
    /// Each thread of the process is in strict seccomp mode, or has a seccomp filter that refuses a
    /// system call; the first thread is in strict mode.
    #[error("is in strict seccomp mode, which kills it for any system call that observing injects")]
    SeccompStrict,
    /// Each thread of the process has a seccomp filter that is not that of its parent and cannot be read.
    /// It may kill the process for an injected system call.
    /// [`Options::despite_seccomp`](crate::Options::despite_seccomp) takes the risk.
    #[error(
        "has a seccomp filter that {why}: it may kill the process for the system calls that observing injects"
    )]
    SeccompUnreadable {
        /// Why it cannot be read.
        why: UnreadableFilter,
    },
    /// A system call that maps or unmaps memory has failed in the process.
    #[error("{}", map_refused(call, *errno, *needed))]
    MapRefused {
        /// The system call, and what for.
        call: &'static str,
        /// Its error number, if that could be read.
        errno: Option<i32>,
        /// How many bytes were to be mapped.
        needed: u64,
    },
    /// A limit of the process leaves too little memory: the program could fail for lack of it while it is observed.
    #[error("{}", memory_limited(*needed, limit))]
    MemoryLimited {
        /// How many bytes observing takes; as many have to be left to the program, but for the limit of a cgroup: there,
        /// memory counts only once it is used.
        needed: u64,
        /// The limit.
        limit: MemoryLimit,
    },
    /// The process keeps all its memory in RAM, also what is mapped later.
    #[error(
        "cannot be observed: it has locked its memory (mlockall), so that all of the {} KiB which are reserved could be \
         filled at once, while it is stopped",
        kib(*needed)
    )]
    MemoryLocked {
        /// How many bytes are to be reserved.
        needed: u64,
    },
    /// Another process observes it ([`Options::take_over`](crate::Options::take_over)).
    #[error("is already observed by {observer}, for {}", observer.age_in_words())]
    AlreadyObserved {
        /// Which one.
        observer: ToolProcess,
    },
    /// Another tool has removed this observation ([`Options::take_over`](crate::Options::take_over)).
    #[error("{}", replaced(observer.as_ref()))]
    Replaced {
        /// Which one, if that is known: it may have exited since.
        observer: Option<ToolProcess>,
    },
    /// The observation has been removed.
    #[error("is not observed any more: the observation was removed")]
    Removed,
    /// The processors have no time stamp counter that runs at one rate; without a subject.
    #[error(
        "this machine has no invariant TSC (constant_tsc and nonstop_tsc in /proc/cpuinfo, or the clock source tsc): nothing can be timed"
    )]
    NoInvariantTsc,
    /// A thread of the process may not read the time stamp counter, and is killed if it does.
    #[error(
        "cannot be timed: its thread {tid} may not read the time stamp counter ({denial}), and would be killed at a hit"
    )]
    TscDenied {
        /// The thread.
        tid: i32,
        /// What forbids it.
        denial: TscDenial,
    },
    /// Hits are to be timed, recorded, or counted by stack or thread, and a thread of the process has no thread control
    /// block (`fs` does not point to one), by which its hits are distinguished from those of others: the program has just been started, or has no C library. If a
    /// program is observed from its first instruction, this is an error only where the base of `fs` cannot be read:
    /// before Linux 5.9, or on an old processor.
    #[error(
        "cannot be timed, watched, or counted by stack or thread: its thread {tid} has no thread control block (fs does not point to one)"
    )]
    NoControlBlock {
        /// The thread.
        tid: i32,
    },
    /// No memory can be shared with a program to be started; without a subject.
    #[error("cannot create memory to share with the program: {}", reason(source))]
    NoSharedMemory {
        /// What memfd_create(2) or ftruncate(2) says.
        source: io::Error,
    },
    /// What is asked of each hit makes no sense at a point; without a subject.
    #[error(transparent)]
    Expression(BadExpression),
    /// What is asked of each hit takes too much code; without a subject.
    #[error(transparent)]
    LongExpression(BadExpression),
    /// It is not known where the ids of its threads are.
    #[error("keeps the ids of threads at an unknown place: hits cannot be counted by tid")]
    NoThreadIds,
    /// More histograms than are possible together; without a subject.
    #[error("{given} histograms were asked for; at most {most} are possible")]
    TooManyHistograms {
        /// How many there were.
        given: usize,
        /// How many there can be.
        most: usize,
    },
    /// More pairs than can be timed together; without a subject.
    #[error("{given} pairs were asked for; at most {most} are possible")]
    TooManyPairs {
        /// How many there were.
        given: usize,
        /// How many there can be.
        most: usize,
    },
    /// Results or exits of functions are to be recorded, but only some of their calls; without a subject.
    #[error(
        "results of functions cannot be combined with a filter or a sample: a return does not show whether its call was recorded"
    )]
    ResultsOfSomeCalls,
    /// Times are to be distinguished by keys in a way that is not possible.
    #[error("times by keys {0}")]
    TimesByKeys(&'static str),
}

/// Why a thread may not read the time stamp counter.
///
/// ```
/// use probes_lib::{Error, ObserveError, Subject, TscDenial};
///
/// let denied = ObserveError::TscDenied { tid: 4243, denial: TscDenial::Prctl };
/// let error = Error::new(Subject::Process(4242), denied);
/// assert!(error.to_string().contains("thread 4243 may not read the time stamp counter (prctl(PR_SET_TSC))"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TscDenial {
    /// The program has forbidden it, by `PR_SET_TSC` of prctl(2).
    #[error("prctl(PR_SET_TSC)")]
    Prctl,
    /// The thread is in strict seccomp mode.
    #[error("strict seccomp mode")]
    StrictSeccomp,
}

/// What a seccomp filter does instead of a system call (seccomp(2)).
///
/// ```
/// use probes_lib::{Error, ObserveError, SeccompAction, Subject};
///
/// let refused = ObserveError::SeccompRefuses { call: "mmap", action: SeccompAction::Errno(1) };
/// let error = Error::new(Subject::Process(4242), refused);
/// assert!(error.is_refused_by_seccomp());
/// assert!(error.to_string().ends_with("its seccomp filter refuses that with EPERM"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SeccompAction {
    /// It kills the process, or the thread.
    Kill,
    /// It sends the thread SIGSYS.
    Trap,
    /// The call fails with this error; 0 if it seems to succeed.
    Errno(i32),
    /// Another process decides, which takes as long as it likes.
    Notify,
    /// A tracer decides; the call fails without one that has asked for it.
    Trace,
}

/// The end of a sentence that begins with the system call and the filter.
impl fmt::Display for SeccompAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            SeccompAction::Kill => f.write_str("kills it for that"),
            SeccompAction::Trap => f.write_str("sends it SIGSYS for that"),
            SeccompAction::Errno(0) => f.write_str("skips that call"),
            SeccompAction::Errno(errno) => match Errno::from_raw(errno) {
                Errno::UnknownErrno => write!(f, "refuses that with error {errno}"),
                known => write!(f, "refuses that with {known:?}"),
            },
            SeccompAction::Notify => f.write_str("lets another process decide on that"),
            SeccompAction::Trace => f.write_str("lets a tracer decide on that"),
        }
    }
}

/// Why a seccomp filter cannot be read, as the rest of a relative clause: "a filter that ...".
///
/// ```no_run
/// # use probes_lib::{Observation, Options, Target};
/// # let (target, observation) = (Target::open(4242)?, Observation::new());
/// use probes_lib::{ErrorKind, ObserveError, UnreadableFilter};
///
/// if let Err(error) = target.observe(&observation, Options::default()) {
///     match error.kind() {
///         ErrorKind::Observe(ObserveError::SeccompUnreadable { why }) if *why == UnreadableFilter::NotPermitted => {
///             println!("root could read its filter");
///         }
///         _ => return Err(error),
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnreadableFilter {
    /// It takes `CAP_SYS_ADMIN` in the initial user namespace.
    #[error("only root can read, outside of containers")]
    NotPermitted,
    /// The kernel allows it only to processes that have no filter themselves.
    #[error("cannot be read by a process that is under a seccomp filter itself")]
    ReaderFiltered,
    /// The kernel was built without `CONFIG_CHECKPOINT_RESTORE`.
    #[error("this kernel cannot show (it was built without CONFIG_CHECKPOINT_RESTORE)")]
    NotSupported,
    /// It has instructions that classic BPF does not have.
    #[error("is not a classic BPF program")]
    NotClassic,
}

fn replaced(observer: Option<&ToolProcess>) -> String {
    observer.map_or_else(
        || "is not observed any more: another tool has removed this observation".to_owned(),
        |observer| format!("has been taken over by {observer}, which has removed this observation"),
    )
}

fn map_refused(call: &str, errno: Option<i32>, needed: u64) -> String {
    let mut text = format!("cannot be observed: {call} fails");
    if let Some(errno) = errno {
        let source = io::Error::from_raw_os_error(errno);
        text = format!(
            "{text} with {:?} ({})",
            Errno::from_raw(errno),
            reason(&source)
        );
    }
    if errno == Some(libc::ENOMEM) {
        format!("{text}: {} KiB are needed", kib(needed))
    } else {
        format!("{text}: the kernel or a seccomp filter refuses")
    }
}

fn memory_limited(needed: u64, limit: &MemoryLimit) -> String {
    let needed = kib(needed);
    let left = match limit.kind {
        MemoryLimitKind::Cgroup => String::new(),
        _ => format!(", and {needed} KiB more have to be left to the program"),
    };
    format!(
        "cannot be observed: {needed} KiB of memory are needed{left}, but {} allows {} KiB, of which {} KiB are in use",
        limit.kind,
        kib(limit.limit),
        kib(limit.used)
    )
}

fn kib(bytes: u64) -> u64 {
    bytes.div_ceil(1024)
}

/// Returns an age in the largest unit of which it has two.
fn in_words(age: Duration) -> String {
    const UNITS: [(u64, &str); 4] = [
        (86_400, "days"),
        (3_600, "hours"),
        (60, "minutes"),
        (1, "s"),
    ];
    let seconds = age.as_secs();
    // 90 s is not a minute.
    let unit = UNITS.into_iter().find(|(unit, _)| seconds >= 2 * unit);
    let (unit, name) = unit.unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn observer_is_named_by_pid_command_and_age() {
        let observer = ToolProcess {
            pid: 4711,
            is_in_our_namespace: true,
            command: "ocaml-probes count -pid 4242".to_owned(),
            age: Duration::from_secs(100),
            is_alive: true,
            observes_another: false,
        };
        let text = |kind| Error::of_process(4242, kind).to_string();
        let already = |observer| text(ObserveError::AlreadyObserved { observer });
        assert_eq!(
            already(observer.clone()),
            "process 4242 is already observed by pid 4711 (ocaml-probes count -pid 4242), for 100 s"
        );
        let elsewhere = ToolProcess {
            is_in_our_namespace: false,
            ..observer.clone()
        };
        assert_eq!(
            already(elsewhere),
            "process 4242 is already observed by pid 4711 of another pid namespace \
             (ocaml-probes count -pid 4242), for 100 s"
        );
        let observer = Some(observer);
        assert_eq!(
            text(ObserveError::Replaced { observer }),
            "process 4242 has been taken over by pid 4711 (ocaml-probes count -pid 4242), \
             which has removed this observation"
        );
        assert_eq!(
            text(ObserveError::Replaced { observer: None }),
            "process 4242 is not observed any more: another tool has removed this observation"
        );
    }

    #[test]
    fn age_uses_largest_unit_with_at_least_two() {
        let age = |seconds| in_words(Duration::from_secs(seconds));
        let day = 86_400;
        assert_eq!([age(0), age(1), age(119)], ["0 s", "1 s", "119 s"]);
        assert_eq!([age(120), age(7199)], ["2 minutes", "119 minutes"]);
        assert_eq!([age(7200), age(2 * day - 1)], ["2 hours", "47 hours"]);
        assert_eq!(age(365 * day), "365 days");
    }
}
