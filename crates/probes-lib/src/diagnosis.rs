//! [`Diagnosis`]: what this machine and a process allow. Each [`Check`] looks at one thing that decides whether
//! something can be done, by the code that does it: so a failed check has the error that a command would fail with.
//!
//! ```text
//! machine   this tool, its user, the kernel, the processor
//! access    the kernel's checks before one process may read or trace another, one by one; then what the kernel says
//! program   what is mapped: translator, probes, symbols, tables, the runtime
//! stale     what killed observers have left
//! ```
//!
//! Nothing is stopped and nothing changed: not even a page of code is copied.

mod access;
mod machine;
mod program;
mod stale;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::process::Process;
use crate::process::image::open_executable;

/// What was checked. The variants are in the order of the checks; new ones may be added.
///
/// ```no_run
/// use probes_lib::{CheckKind, CheckResult, Diagnosis};
///
/// let machine = Diagnosis::of_machine();
/// let tsc = machine.check(CheckKind::InvariantTsc);
/// if let Some(check) = tsc.filter(|check| check.result() == CheckResult::Fail) {
///     println!("no latencies here: {}", check.finding());
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum CheckKind {
    /// Whether /proc is mounted and shows the pids of this pid namespace.
    Proc,
    /// Whether /proc hides processes of other users (proc(5), `hidepid`).
    Hidepid,
    /// Whose processes may be read; for a process, whether it belongs to the same user.
    User,
    /// `CAP_SYS_PTRACE`; for a process, whether it has capabilities that this one lacks.
    Capabilities,
    /// The user namespace.
    UserNamespace,
    /// The pid namespace of a process.
    PidNamespace,
    /// Whether a process may be read by its own user (prctl(2), `PR_SET_DUMPABLE`).
    Dumpable,
    /// `kernel.yama.ptrace_scope`.
    Yama,
    /// Whether a seccomp filter of this process, as in many containers, blocks ptrace(2).
    Ptrace,
    /// Whether the maps and the executable of a process may be read.
    Files,
    /// What the kernel says when the memory of a process is opened: the sum of the checks of users, capabilities,
    /// namespaces and security modules.
    Memory,
    /// Whether another tool traces the process.
    Tracer,
    /// Whether it is this process, or an ancestor that waits for it.
    Ancestor,
    /// Whether another observer is at work.
    Observer,
    /// Whether a killed observer has left something in the process; for a machine, in any process that may be read.
    StaleObservation,
    /// The process's seccomp filters, which may refuse the system calls that an observation injects.
    Seccomp,
    /// Limits of the memory that the process may map.
    MemoryLimit,
    /// Whether some object of the process has a code cave for the system calls that an observation injects.
    /// [`CheckKind::name`] says `code_room`.
    #[strum(serialize = "code_room")]
    CodeCave,
    /// `proc_mem.force_override`: whether code may be written through /proc without ptrace.
    ForceOverride,
    /// Whether the time stamp counter has one rate in all states of the processors.
    InvariantTsc,
    /// Whether perf_event_open(2) is permitted for the events of a profile. Without them, a profile only samples waits.
    PerfEvents,
    /// Whether the kernel samples running threads, also while they are in the kernel: tried with the events of a
    /// profile. Without such samples, a profile stops the threads.
    PerfSamples,
    /// Whether a translator, such as valgrind, executes the program.
    Translator,
    /// Whether the program is OCaml bytecode.
    Bytecode,
    /// The notes of OCaml probes, and their states.
    Probes,
    /// Whether the sites of the probes lie in memory that can be changed: not shared, and not on pages of 1 GiB.
    HugePages,
    /// Names of functions in symbol tables.
    Symbols,
    /// Names of OCaml functions in frametables.
    Frametables,
    /// `.eh_frame`, with which stacks are read.
    UnwindTables,
    /// The version of OCaml that the program was compiled with.
    OcamlVersion,
    /// The events that the runtime of OCaml 5 writes itself: whether they are on, or can be switched on.
    RuntimeEvents,
    /// Whether these events are on already, so that nothing has to be switched on to read them.
    RuntimeEventsOn,
}

impl CheckKind {
    /// Returns its name: the variant in snake case, except `code_room`.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// What a check has found.
///
/// [`Diagnosis`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum CheckResult {
    /// It prevents nothing.
    Pass,
    /// Something is not possible because of it.
    Fail,
    /// It cannot be known without stopping the process, or because the process may not be read.
    Unknown,
}

/// One thing that was checked.
///
/// [`Diagnosis`] has an example.
#[derive(Debug)]
pub struct Check {
    kind: CheckKind,
    result: CheckResult,
    finding: String,
    error: Option<Error>,
}

impl Check {
    fn pass(kind: CheckKind, finding: impl Into<String>) -> Check {
        Check::with(kind, CheckResult::Pass, finding)
    }

    fn unknown(kind: CheckKind, finding: impl Into<String>) -> Check {
        Check::with(kind, CheckResult::Unknown, finding)
    }

    fn fail(kind: CheckKind, finding: impl Into<String>) -> Check {
        Check::with(kind, CheckResult::Fail, finding)
    }

    fn with(kind: CheckKind, result: CheckResult, finding: impl Into<String>) -> Check {
        Check {
            kind,
            result,
            finding: finding.into(),
            error: None,
        }
    }

    /// A failed check, with the error that a command would fail with.
    fn error(kind: CheckKind, error: impl Into<Error>) -> Check {
        let error = error.into();
        Check::fail(kind, error.to_string()).because(error)
    }

    fn because(self, error: Error) -> Check {
        Check {
            error: Some(error),
            ..self
        }
    }

    /// Returns what was checked.
    pub fn kind(&self) -> CheckKind {
        self.kind
    }

    /// Returns whether it passed.
    pub fn result(&self) -> CheckResult {
        self.result
    }

    /// Returns what was found, in words.
    pub fn finding(&self) -> &str {
        &self.finding
    }

    /// Returns the error that a command which depends on it fails with, where that is known.
    pub fn cause(&self) -> Option<&Error> {
        self.error.as_ref()
    }
}

/// What this machine, or this machine and a process, allow.
///
/// ```no_run
/// use probes_lib::{CheckResult, Diagnosis};
///
/// for check in Diagnosis::of_process(4242)?.checks() {
///     if check.result() != CheckResult::Pass {
///         println!("{}: {}", check.kind().name(), check.finding());
///     }
/// }
/// # Ok::<(), probes_lib::Error>(())
/// ```
#[derive(Debug)]
pub struct Diagnosis {
    process: Option<(i32, Option<PathBuf>)>,
    checks: Vec<Check>,
}

impl Diagnosis {
    /// Checks this machine, and what this process may do on it.
    pub fn of_machine() -> Diagnosis {
        let mut of_machine = machine::checks();
        of_machine.push(stale::of_machine());
        of_machine.sort_by_key(|check| check.kind);
        Diagnosis {
            process: None,
            checks: of_machine,
        }
    }

    /// Checks this machine and a process. Stops and changes nothing. If the process was forked within the last second,
    /// waits until it has executed a program, or is older.
    ///
    /// # Errors
    ///
    /// If there is no such process, or it runs no program (a thread's id, a kernel thread, a zombie), or the pids in
    /// /proc are not those of this pid namespace.
    pub fn of_process(pid: i32) -> Result<Diagnosis> {
        let process = Process::open(pid)?;
        process.refuse_without_program()?;
        // Before its execve, a process still runs the program that starts it (a shell, for example).
        process.wait_until_executed();
        let mut checks = machine::checks();
        let of_process = access::checks(&process);
        let may_read = of_process
            .iter()
            .any(|it| it.kind == CheckKind::Files && it.result == CheckResult::Pass);
        let of_program = program::checks(&process, may_read);
        // The check of the process replaces the same check of the machine.
        checks.retain(|it| of_process.iter().all(|other| other.kind != it.kind));
        checks.extend(of_process);
        checks.extend(of_program);
        checks.sort_by_key(|check| check.kind);
        // If the process has exited meanwhile, the findings are about a dead process.
        process.refuse_without_program()?;
        let program = open_executable(&process).ok().map(|(path, _)| path);
        Ok(Diagnosis {
            process: Some((pid, program)),
            checks,
        })
    }

    /// Returns the process, if one was checked.
    pub fn pid(&self) -> Option<i32> {
        Some(self.process.as_ref()?.0)
    }

    /// Returns the path of its executable, as the kernel names it, if it may be read.
    pub fn program(&self) -> Option<&Path> {
        self.process.as_ref()?.1.as_deref()
    }

    /// Returns what was checked, in the order of [`CheckKind`].
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// Returns one check; `None` if it was not made. Checks of a process are made only if a process was given.
    pub fn check(&self, kind: CheckKind) -> Option<&Check> {
        self.checks.iter().find(|check| check.kind == kind)
    }
}
