//! [`ProcessError`], and [`Denial`]: why a process cannot be opened, observed or changed.

use super::{Operation, Subject};

/// Why a process cannot be opened, observed or changed; the message continues a sentence that begins with the process
/// or its thread.
///
/// [`Error`](crate::Error) has an example.
#[derive(Debug, strum::IntoStaticStr, thiserror::Error)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum ProcessError {
    /// There is no such process.
    #[error("does not exist")]
    NotFound,
    /// A thread's id was given where a process's is wanted; the thread is the subject.
    #[error("is not a process itself")]
    NotAProcess,
    /// It exited meanwhile.
    #[error("exited")]
    Exited,
    /// It has exited, and waits to be reaped.
    #[error("has exited and is a zombie: its parent {parent} ({parent_name}) has not reaped it")]
    Zombie {
        /// Its parent.
        parent: i32,
        /// The parent's command name.
        parent_name: String,
    },
    /// A thread of the kernel has no program.
    #[error("is a kernel thread ({name}) and has no program")]
    KernelThread {
        /// Its name.
        name: String,
    },
    /// A translator such as valgrind or qemu-user executes a translation of its code.
    #[error(
        "runs under {translator}, which executes a translation of its code: probes in the code itself have no effect"
    )]
    Translated {
        /// The name of the translator.
        translator: &'static str,
    },
    /// It interprets OCaml bytecode.
    #[error("runs OCaml bytecode, in which the handlers of probes never run")]
    Bytecode,
    /// It is the calling process itself or an ancestor, which may be waiting for the caller: stopping it would
    /// deadlock. A program changes its own probes with [`Target::current`](crate::Target::current).
    #[error("cannot be stopped from here: it is {}", if *.own { "the calling process itself" } else { "an ancestor of the calling process" })]
    SelfOrAncestor {
        /// Whether it is this process, and not an ancestor.
        own: bool,
    },
    /// A [`Target`](crate::Target) for the current process is used in a child of it.
    #[error(
        "cannot be changed from its forked child, process {child}: the child needs a target of its own (Target::current, probes_current)"
    )]
    Forked {
        /// The pid of the child, which is the calling process.
        child: i32,
    },
    /// The kernel or another process does not permit it.
    #[error("{denial}")]
    Denied {
        /// What was tried.
        operation: Operation,
        /// Why not.
        denial: Denial,
    },
    /// A thread, which is the subject, did not stop in time.
    #[error(
        "({name}) did not stop within {limit_ms} ms: it is {}; the process was resumed; it is safe to retry",
        state_text(*.state, .wchan)
    )]
    Busy {
        /// The thread's name.
        name: String,
        /// Its state, as in /proc.
        state: char,
        /// The kernel function it waits in, where known.
        wchan: String,
        /// The limit, in milliseconds.
        limit_ms: u64,
    },
    /// Threads were started faster than they could be stopped.
    #[error(
        "kept starting threads, and could not be stopped within {limit_ms} ms; the process was resumed; it is safe to retry"
    )]
    ThreadsKeepStarting {
        /// The limit, in milliseconds.
        limit_ms: u64,
    },
    /// The tool that follows it ([`Follow`](crate::Follow)) stopped it for this tool, and then exited, or resumed it
    /// because this tool sent nothing for two seconds or kept it stopped for more than five. The process is running
    /// again.
    #[error(
        "was resumed too early: the tool that follows it has exited, or this tool kept it stopped too long"
    )]
    FollowerLost,
    /// The tool that follows it ([`Follow`](crate::Follow)) was asked to stop it for this tool, and does not answer.
    /// The process may stay stopped until the follower runs again.
    #[error("is followed by a tool that does not answer, and may be stopped until that does")]
    FollowerSilent,
    /// The kernel does not record when its threads wait.
    #[error("cannot have its waits recorded: {why}")]
    WaitsNotRecorded {
        /// Why not.
        why: String,
    },
    /// It executed a new program meanwhile.
    #[error("executed a new program meanwhile")]
    Executed,
    /// Another process changed its probes, or it changed its mappings, again and again meanwhile.
    #[error("kept changing its probes or mappings")]
    KeepsChanging,
}

/// Why a process may not be traced or read; the message continues a sentence that begins with the
/// process, or with what was tried. Below, *the process* is the target, and *this process* is the caller.
///
/// ```no_run
/// use probes_lib::{Denial, Target};
///
/// if let Err(error) = Target::open(4242) {
///     match error.denial() {
///         Some(Denial::OtherUser { name, .. }) => println!("run this as {name}"),
///         Some(denial) => println!("not permitted: {denial}"),
///         None => println!("{error}"),
///     }
/// }
/// ```
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Denial {
    /// The Yama security module.
    #[error("kernel.yama.ptrace_scope={scope} {}", yama(*.scope))]
    Yama {
        /// The value of `kernel.yama.ptrace_scope`.
        scope: u8,
    },
    /// A seccomp filter on this process, as in many containers.
    #[error("this container's or service's seccomp filter blocks ptrace")]
    Seccomp,
    /// The process is of another user.
    #[error("belongs to uid {uid} ({name})")]
    OtherUser {
        /// Its real uid.
        uid: u32,
        /// That user's name.
        name: String,
    },
    /// /proc is mounted with the option `hidepid` (proc(5)), and does not show the process to this user.
    #[error("is hidden from this user by /proc, which is mounted with hidepid")]
    Hidden,
    /// The process is in a user namespace in which this process has no capabilities.
    #[error("is in another user namespace")]
    UserNamespace,
    /// The process gained privileges, executed a program file that its user may not read, or asked not to be traced
    /// (prctl(2), `PR_SET_DUMPABLE`).
    #[error(
        "is not dumpable (setuid or file capabilities, a program file that its user may not read, or prctl)"
    )]
    NotDumpable,
    /// The user may not read the file of the program that the process executes.
    #[error("executes a program file that this user may not read")]
    UnreadableProgram,
    /// The process has capabilities that this process lacks.
    #[error("has capabilities that the calling process lacks")]
    MorePrivileged,
    /// The denial in the field. `CAP_SYS_PTRACE` would overcome it, but no process of this
    /// container can have that capability, because it is not in the bounding set.
    #[error("{0}, and this container or service lacks CAP_SYS_PTRACE")]
    Incapable(Box<Denial>),
    /// A Linux security module.
    #[error("a security module (AppArmor, SELinux, Landlock) does not permit it")]
    Policy,
    /// Another tool traces it.
    #[error("is already traced by pid {tracer} ({name})")]
    Traced {
        /// The tracer.
        tracer: i32,
        /// The tracer's command name.
        name: String,
    },
    /// Another version of this tool follows it, and does not lend it to this one
    /// ([`Follow`](crate::Follow)).
    #[error(
        "is followed by pid {tracer} ({name}), another version of this tool, which does not lend it"
    )]
    OtherVersion {
        /// The process that follows it.
        tracer: i32,
        /// That process's command name.
        name: String,
    },
    /// A tool of another user follows it, and lends it only to tools of its own user ([`Follow`](crate::Follow)).
    #[error(
        "is followed by pid {tracer} ({name}), a tool of another user, which lends it only to tools of that user"
    )]
    FollowedByOtherUser {
        /// The process that follows it.
        tracer: i32,
        /// That process's command name.
        name: String,
    },
    /// Another update of it is in progress, or was at that moment.
    #[error("is being changed by {}", changer(*.updater, .name))]
    BeingChanged {
        /// The process that changes it; 0 if it is of another pid namespace.
        updater: i32,
        /// That process's command name, `?` if it has exited.
        name: String,
    },
    /// None of the known causes.
    #[error(
        "the kernel does not permit it, possibly because it is traced from outside this container"
    )]
    Unexplained,
}

impl ProcessError {
    /// Returns the whole message where the subject does not come first; `None` where the message
    /// continues a sentence that begins with the subject.
    pub(super) fn with_subject(&self, subject: &Subject) -> Option<String> {
        match (self, subject) {
            (ProcessError::NotFound, Subject::Process(pid)) => Some(format!("no process {pid}")),
            (ProcessError::NotAProcess, Subject::Thread { pid, tid }) => {
                Some(format!("{tid} is a thread of process {pid}, not a process"))
            }
            (ProcessError::Denied { operation, denial }, subject) => {
                denial.is_about_the_attempt().then(|| match subject.pid() {
                    Some(pid) => format!("cannot {operation} process {pid}: {denial}"),
                    None => format!("cannot {operation} it: {denial}"),
                })
            }
            _ => None,
        }
    }
}

impl Denial {
    /// Returns whether the message continues a sentence that begins with what was tried, as in
    /// `cannot attach to process 1: …`, and not one that begins with the process.
    fn is_about_the_attempt(&self) -> bool {
        match self {
            Denial::Yama { .. } | Denial::Seccomp | Denial::Policy | Denial::Unexplained => true,
            Denial::Incapable(of) => matches!(**of, Denial::Yama { .. }),
            _ => false,
        }
    }
}

/// The functions of the kernel in which threads wait that a cgroup freezer keeps from running: the first of version 1;
/// the others of version 2, where the compiler may have inlined `do_freezer_trap` into `get_signal`.
pub(crate) const FREEZERS: [&str; 3] = ["__refrigerator", "do_freezer_trap", "get_signal"];

fn state_text(state: char, wchan: &str) -> String {
    if state == 'D' && FREEZERS.contains(&wchan) {
        return "frozen by its cgroup, and can be changed once it is thawed".to_owned();
    }
    let wchan = match wchan {
        "" | "0" => String::new(),
        function => format!(", wchan {function}"),
    };
    match state {
        'D' => format!("in uninterruptible sleep (D{wchan})"),
        'R' => "runnable (R), but has had no processor: more threads want to run than there are processors".to_owned(),
        state => format!("busy in the kernel ({state}{wchan})"),
    }
}

fn changer(pid: i32, name: &str) -> String {
    match pid {
        0 => "a process outside this container".to_owned(),
        pid => format!("pid {pid} ({name})"),
    }
}

fn yama(scope: u8) -> &'static str {
    match scope {
        1 => "allows only descendants",
        2 => "allows only CAP_SYS_PTRACE",
        _ => "disables ptrace until reboot",
    }
}
