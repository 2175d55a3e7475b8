//! What can keep a process from being observed.

use std::fmt;
use std::io;
use std::time::Duration;

use nix::errno::Errno;

use super::reason;

/// The process that observes another one, as recorded in that: it may have exited since.
///
/// ```no_run
/// let states = probes_lib::Target::open(4242)?.states()?;
/// if let Some(observer) = states.observer() {
///     println!("{observer}: {}", if observer.is_alive { "running" } else { "gone" });
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObserverProcess {
    /// Its pid in its own pid namespace.
    pub pid: i32,
    /// Whether that is also ours.
    pub is_in_our_namespace: bool,
    /// The command that it executes, with the first of its arguments.
    pub command: String,
    /// How long ago the observation began.
    pub age: Duration,
    /// Whether it still observes that process. If not, it was killed or has dropped its
    /// [`Observer`](crate::Observer), or it observes the process that this one was forked from.
    pub is_alive: bool,
}

/// Its pid and its command.
impl fmt::Display for ObserverProcess {
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
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum ObserveError {
    /// The probes to be observed have counters, but no sites.
    #[error("has no site of any probe that is to be observed")]
    NoSites,
    /// No address range for trampolines is free within reach of the sites.
    #[error("has no address range free for trampolines within reach of its sites")]
    NoRoom,
    /// No object of the process has unused bytes after its code, in which a remote call could be
    /// placed. This happens if the program is linked statically and its last page of code is full.
    #[error(
        "has no loaded object with {bytes} free bytes after its code, which observing needs to inject system calls"
    )]
    NoCodeCave {
        /// How many there have to be.
        bytes: usize,
    },
    /// No thread of the process can be made to execute a remote call.
    #[error(
        "has no thread that can execute an injected system call: all are busy with signals or in restartable sequences"
    )]
    NoThreadToRedirect,
    /// Each thread of the process has a seccomp filter that refuses a system call which observing injects.
    #[error("has a seccomp filter that {}, which observing injects", .action.text(.call))]
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
        "has a seccomp filter, which may kill it for the system calls that observing injects, and which {why}"
    )]
    SeccompUnreadable {
        /// Why it cannot be read.
        why: UnreadableFilter,
    },
    /// The process is not allowed to map executable memory.
    #[error("cannot map memory for trampolines: the kernel or a seccomp filter refuses")]
    MapRefused,
    /// Another process observes it ([`Options::take_over`](crate::Options::take_over)).
    #[error("is already observed by {observer}, for {}", in_words(observer.age))]
    AlreadyObserved {
        /// Which one.
        observer: ObserverProcess,
    },
    /// Another tool has removed this observation ([`Options::take_over`](crate::Options::take_over)).
    #[error("{}", replaced(observer.as_ref()))]
    Replaced {
        /// Which one, if that is known: it may have ended since.
        observer: Option<ObserverProcess>,
    },
    /// The observation has been removed.
    #[error("is not observed any more: the observation was removed")]
    Removed,
    /// The processors have no time stamp counter that runs at one rate; without a subject.
    #[error("this machine has no invariant TSC; latencies and timestamps are unavailable")]
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
    /// No memory can be shared with a program to be started; without a subject.
    #[error("cannot create memory to share with the program: {}", reason(source))]
    NoSharedMemory {
        /// What memfd_create(2) or ftruncate(2) says.
        source: io::Error,
    },
    /// More pairs than can be timed together; without a subject.
    #[error("{given} pairs are too many to be timed together: at most {most}")]
    TooManyPairs {
        /// How many there were.
        given: usize,
        /// How many there can be.
        most: usize,
    },
}

/// Why a thread may not read the time stamp counter.
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

impl SeccompAction {
    /// What a filter does, for a system call.
    fn text(self, call: &str) -> String {
        match self {
            SeccompAction::Kill => format!("kills it for {call}"),
            SeccompAction::Trap => format!("sends it SIGSYS for {call}"),
            SeccompAction::Errno(0) => format!("skips {call}"),
            SeccompAction::Errno(errno) => match Errno::from_raw(errno) {
                Errno::UnknownErrno => format!("refuses {call} with error {errno}"),
                known => format!("refuses {call} with {known:?}"),
            },
            SeccompAction::Notify => format!("lets another process decide on {call}"),
            SeccompAction::Trace => format!("lets a tracer decide on {call}"),
        }
    }
}

/// Why a seccomp filter cannot be read; reads on from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnreadableFilter {
    /// It takes `CAP_SYS_ADMIN` in the initial user namespace.
    #[error("only root can read, outside of containers")]
    NotPermitted,
    /// The kernel allows it only to processes that have no filter themselves.
    #[error("cannot be read from here: ocaml-probes is under a seccomp filter itself")]
    ReaderFiltered,
    /// The kernel was built without `CONFIG_CHECKPOINT_RESTORE`.
    #[error("this kernel does not let be read (CONFIG_CHECKPOINT_RESTORE)")]
    NotSupported,
    /// It has instructions that classic BPF does not have.
    #[error("is not a classic BPF program")]
    NotClassic,
}

fn replaced(observer: Option<&ObserverProcess>) -> String {
    observer.map_or_else(
        || "is not observed any more: another tool has removed this observation".to_owned(),
        |observer| format!("has been taken over by {observer}, which has removed this observation"),
    )
}

/// The age of an observation, in its largest unit.
fn in_words(age: Duration) -> String {
    const UNITS: [(u64, &str); 4] = [
        (86_400, "days"),
        (3_600, "hours"),
        (60, "minutes"),
        (1, "s"),
    ];
    let seconds = age.as_secs();
    // Two of a unit at least: 90 s is not a minute.
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
        let observer = ObserverProcess {
            pid: 4711,
            is_in_our_namespace: true,
            command: "ocaml-probes count -pid 4242".to_owned(),
            age: Duration::from_secs(100),
            is_alive: true,
        };
        let text = |kind| Error::of_process(4242, kind).to_string();
        let already = |observer| text(ObserveError::AlreadyObserved { observer });
        assert_eq!(
            already(observer.clone()),
            "process 4242 is already observed by pid 4711 (ocaml-probes count -pid 4242), for 100 s"
        );
        let elsewhere = ObserverProcess {
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
    fn age_is_told_in_its_largest_unit() {
        let told = |seconds| in_words(Duration::from_secs(seconds));
        let day = 86_400;
        assert_eq!([told(0), told(1), told(119)], ["0 s", "1 s", "119 s"]);
        assert_eq!([told(120), told(7199)], ["2 minutes", "119 minutes"]);
        assert_eq!([told(7200), told(2 * day - 1)], ["2 hours", "47 hours"]);
        assert_eq!(told(365 * day), "365 days");
    }
}
