//! What to do about an error: the line that is printed after its message, for every kind of error
//! that has a sensible next step.

mod mistaken;
mod names;
mod observation;
mod processes;
mod programs;
mod runtime_events;
mod shell;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use probes_lib::{
    Check, CheckKind, CheckResult, CodeDigest, Effect, Error, ErrorKind, Operation, SystemError,
};

pub(crate) use processes::sudo_after;
pub(crate) use runtime_events::{ANOTHER_PROGRAM, without_events};

pub(crate) const LIMITED: &str =
    "is memory or the number of processes limited (`ulimit -v`, `ulimit -u`)?";

const NO_BYTECODE: &str = "probes exist only in native code: build the program with ocamlopt, or as a .exe of dune that is not bytecode";

const ADD_CAPABILITY: &str = "start the container with --cap-add=SYS_PTRACE";

pub(crate) const KEEP_SYMBOLS: &str = "do not strip its symbols (`strip --strip-debug` keeps them), or install its separate debug file";

const NOT_LIVE: &str = "leave -live out: the process is then stopped for a moment";

/// What to do about closures that other processes refuse, or may refuse.
pub(crate) fn closures(pid: i32, digest: CodeDigest) -> String {
    match digest {
        CodeDigest::Pending => format!(
            "if it marshals closures (Marshal.Closures), enable or disable a probe with `ocaml-probes attach -pid {pid}`, \
             without -live, before it does: that writes the digest of its unpatched code"
        ),
        CodeDigest::OfPatchedCode => {
            "if it exchanges closures (Marshal.Closures) with other processes, restart it".to_owned()
        }
        _ => "if it marshals closures (Marshal.Closures), switch or observe its probes only after it has \
              marshalled one"
            .to_owned(),
    }
}

/// What the command that failed was to work on.
#[derive(Debug)]
pub(crate) enum CommandTarget {
    /// A running process.
    Process(i32),
    /// A running process that `attach` is to change: hints may name its flags -live and -gigatext.
    Attached(i32),
    /// A program that is to be started.
    Program(PathBuf),
    /// A file that is to be read.
    File(PathBuf),
}

impl CommandTarget {
    /// `list` for it.
    fn to_list(&self) -> String {
        match self {
            CommandTarget::Process(pid) | CommandTarget::Attached(pid) => {
                format!("ocaml-probes list -pid {pid}")
            }
            CommandTarget::Program(file) | CommandTarget::File(file) => {
                format!("ocaml-probes list -prog {}", file.display())
            }
        }
    }

    /// Whether the command is `attach`, whose -live needs neither ptrace nor a stop.
    fn is_attach(&self) -> bool {
        matches!(self, CommandTarget::Attached(_))
    }
}

/// What to do next; `None` where the error says all that is known.
pub(crate) fn of(error: &Error, target: &CommandTarget) -> Option<String> {
    if let (Effect::HalfChanged, Some(pid)) = (error.effect(), error.pid()) {
        return Some(format!(
            "`ocaml-probes info -pid {pid}` shows which probes are inconsistent; {}",
            repair(pid, "NAME")
        ));
    }
    match error.kind() {
        ErrorKind::File(kind) => programs::of_file(kind, error.subject(), target),
        ErrorKind::Probe(kind) => names::of_probe(kind, target),
        ErrorKind::Function(kind) => names::of_function(kind, target),
        ErrorKind::Process(kind) => processes::of_process(kind, error.pid(), target),
        ErrorKind::Memory(kind) => processes::of_memory(kind, error.pid(), target),
        ErrorKind::Observe(kind) => observation::of_observe(kind, error.pid(), target),
        ErrorKind::RuntimeEvents(kind) => runtime_events::of_runtime_events(kind, error.pid()),
        ErrorKind::Launch(kind) => programs::of_launch(kind, error.subject()),
        ErrorKind::System(kind) => of_system(kind),
        _ => None,
    }
}

/// What to do about a check that has not passed: the hint of a command that fails because of it, where there is one.
pub(crate) fn of_check(check: &Check, target: &CommandTarget) -> Option<String> {
    if check.result() == CheckResult::Pass {
        return None;
    }
    if let Some(error) = check.cause() {
        if let Some(hint) = of(error, target) {
            return Some(hint);
        }
    }
    let failed = check.result() == CheckResult::Fail;
    let hint = match (check.kind(), target) {
        (CheckKind::Seccomp, _) if !failed => {
            "`count` and the other commands that observe read the filters first: if a filter refuses a call, they name that call and change nothing"
        }
        (CheckKind::MemoryLimit, CommandTarget::Process(pid)) if !failed => {
            return Some(format!("`prlimit --pid {pid}` shows and sets its limits"));
        }
        _ if !failed => return None,
        (CheckKind::Hidepid, _) => "use sudo",
        (CheckKind::PerfEvents, _) => {
            "`profile` samples waits instead, and says how large the error may be"
        }
        (CheckKind::StaleObservation, CommandTarget::Process(pid)) => return Some(clean(*pid)),
        (CheckKind::PerfSamples, _) => {
            "`profile` stops running threads briefly instead; with -live it stops none, and says what is missing"
        }
        (CheckKind::Symbols, _) => KEEP_SYMBOLS,
        (CheckKind::Frametables, _) => "build it with -g",
        (CheckKind::Probes, CommandTarget::Process(pid)) if check.cause().is_none() => {
            return Some(repair(*pid, "NAME"));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// How to remove what a killed observer has left in a process; 0 is any.
pub(crate) fn clean(pid: i32) -> String {
    let pid = if pid == 0 {
        "N".to_owned()
    } else {
        pid.to_string()
    };
    format!("`ocaml-probes observe -clean -pid {pid}` removes what a killed observer left")
}

fn of_system(kind: &SystemError) -> Option<String> {
    let hint = match kind {
        SystemError::Call {
            operation: Operation::RecordHold,
            ..
        } => {
            "nothing was undone, and the record stays: make room where records are (docs/holds.md), and release again"
        }
        SystemError::NoThread { .. } => LIMITED,
        SystemError::ForeignProc => {
            "enter the mount namespace, too (`nsenter --mount --pid`), or mount a /proc of this pid namespace in a \
             new one (`unshare --mount-proc`)"
        }
        SystemError::NoProc => "`mount -t proc proc /proc` mounts it",
        _ => return None,
    };
    Some(hint.to_owned())
}

/// How to make counter and sites of a probe agree again.
pub(crate) fn repair(pid: i32, name: &str) -> String {
    format!(
        "`ocaml-probes attach -pid {pid} -force -enable {name}` or `-force -disable {name}` repairs it"
    )
}

fn listing(target: &CommandTarget) -> String {
    match target {
        CommandTarget::Process(pid) | CommandTarget::Attached(pid) => {
            format!("ocaml-probes info -pid {pid}")
        }
        CommandTarget::Program(_) | CommandTarget::File(_) => target.to_list(),
    }
}

/// What to do if no client can be served at an address.
pub(crate) fn of_listen(address: SocketAddr, error: &io::Error) -> Option<String> {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            let port = address.port();
            Some(format!(
                "`ss -ltnp sport = {port}` shows which process listens there; -listen {} takes any port that is free",
                SocketAddr::new(address.ip(), 0)
            ))
        }
        io::ErrorKind::AddrNotAvailable => {
            Some("`ip address` shows the addresses of this machine".to_owned())
        }
        io::ErrorKind::PermissionDenied => Some(
            "ports below 1024 are for root, and for processes with CAP_NET_BIND_SERVICE".to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use probes_lib::ProcessError;

    use super::*;

    #[test]
    fn half_changed_process_has_a_hint() {
        let error = Error::new(
            probes_lib::Subject::Process(4242),
            ProcessError::KeepsChanging,
        );
        let error = error.with_effect_if_none(Effect::HalfChanged);
        assert_eq!(
            of(&error, &CommandTarget::Process(4242)).as_deref(),
            Some(
                "`ocaml-probes info -pid 4242` shows which probes are inconsistent; `ocaml-probes \
                 attach -pid 4242 -force -enable NAME` or `-force -disable NAME` repairs it"
            )
        );
    }

    #[test]
    fn another_program_is_to_be_checked_first() {
        let process = probes_lib::Subject::Process(4242);
        let error = Error::new(process, ProcessError::Executed);
        for target in [CommandTarget::Process(4242), CommandTarget::Attached(4242)] {
            assert_eq!(
                of(&error, &target).as_deref(),
                Some(
                    "it runs another program now: check that this is the one you mean, and try again"
                )
            );
        }
    }
}
