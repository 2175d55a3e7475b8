//! Hints about processes that are gone, may not be attached to, or cannot be stopped or changed.

use std::fs;

use probes_lib::{Denial, Error, ErrorKind, MemoryError, ProcessError, pids};

use super::{ADD_CAPABILITY, CommandTarget, NO_BYTECODE, NOT_LIVE};
use crate::text::join_first_few;

/// The hint about a process that is gone, or cannot be stopped.
pub(super) fn of_process(
    kind: &ProcessError,
    pid: Option<i32>,
    target: &CommandTarget,
) -> Option<String> {
    let is_attach = target.is_attach();
    let hint = match kind {
        ProcessError::Denied { denial, .. } => return of_denial(denial, true, is_attach),
        ProcessError::NotFound => return Some(no_such_process(pid?)),
        ProcessError::NotAProcess => {
            return Some(format!("give the pid of its process: -pid {}", pid?));
        }
        ProcessError::Zombie { .. } => "it has exited: start it again",
        ProcessError::KernelThread { .. } => "give the pid of a process that runs a program",
        ProcessError::Bytecode => NO_BYTECODE,
        ProcessError::Translated { .. } => "run the program without the translator",
        ProcessError::SelfOrAncestor { .. } => {
            let live = if is_attach {
                "use -live, which changes the process without stopping it; or "
            } else {
                ""
            };
            return Some(format!(
                "{live}run ocaml-probes from a shell that the process has not started"
            ));
        }
        ProcessError::Busy { .. } | ProcessError::ThreadsKeepStarting { .. } if is_attach => {
            "try again; -live changes it without stopping it"
        }
        ProcessError::Busy { .. }
        | ProcessError::ThreadsKeepStarting { .. }
        | ProcessError::FollowerLost => "try again",
        ProcessError::Executed => {
            "it runs another program now: check that this is the one you mean, and try again"
        }
        ProcessError::FollowerSilent => {
            return Some(format!(
                "check whether its tracer is stopped (TracerPid in /proc/{}/status); `kill -CONT` resumes it",
                pid.map_or("PID".to_owned(), |pid| pid.to_string())
            ));
        }
        ProcessError::KeepsChanging => {
            "try again; is another ocaml-probes changing the same process?"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// The hint about memory that cannot be changed.
pub(super) fn of_memory(
    kind: &MemoryError,
    pid: Option<i32>,
    target: &CommandTarget,
) -> Option<String> {
    let hint = match kind {
        MemoryError::LiveRefused => NOT_LIVE,
        MemoryError::GigaText if target.is_attach() => {
            "-gigatext changes it nevertheless: the process waits while a gigabyte is copied"
        }
        MemoryError::UnknownLoadBias { .. } => {
            "try again; if it persists, a packer or a loader has moved its segments"
        }
        MemoryError::Shared { .. } => {
            return Some(format!(
                "leave out the probes with sites or counters there: `ocaml-probes info -pid {} -sites` lists the addresses",
                pid?
            ));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

fn no_such_process(pid: i32) -> String {
    match join_first_few(&with_pid_inside(pid)) {
        Some(others) => format!(
            "it has exited, or you mean the process that has this pid in its container: {others}"
        ),
        None => {
            "it has exited, or the pid is one of another pid namespace (a container)".to_owned()
        }
    }
}

/// The processes that have this pid in a pid namespace of their own, with their names.
fn with_pid_inside(pid: i32) -> Vec<String> {
    let known = pids().into_iter().flatten().filter_map(|outside| {
        let status = fs::read(format!("/proc/{outside}/status")).ok()?;
        let status = String::from_utf8_lossy(&status);
        let line = |name| status.lines().find_map(|line| line.strip_prefix(name));
        // proc_pid_status(5): "The leftmost entry shows the value with respect to the PID namespace
        // of the process that mounted this procfs"; the rightmost one is the value in the namespace
        // of the listed process itself.
        let inside = line("NStgid:")?.split_ascii_whitespace().next_back()?;
        let is_it = inside.parse() == Ok(pid);
        is_it.then(|| {
            format!(
                "-pid {outside} ({})",
                line("Name:").unwrap_or_default().trim()
            )
        })
    });
    known.collect()
}

/// The hint about a process that may not be attached to. `was_running`: whether it was already running, and not started
/// by us. `is_attach`: see [`CommandTarget::is_attach`].
pub(super) fn of_denial(denial: &Denial, was_running: bool, is_attach: bool) -> Option<String> {
    let or_live = if is_attach {
        "; or use -live, which does not use ptrace"
    } else {
        ""
    };
    let hint = match denial {
        Denial::Yama { scope: 1 } if was_running => {
            "use sudo, or start the program with `trace`, or let it call \
             prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)"
                .to_owned()
        }
        Denial::Yama { scope: 0..=2 } => "use sudo".to_owned(),
        Denial::Yama { .. } => {
            "set a lower kernel.yama.ptrace_scope in /etc/sysctl.d and reboot".to_owned()
        }
        Denial::Seccomp => format!("{ADD_CAPABILITY}{or_live}"),
        Denial::Incapable(of) => match &**of {
            Denial::OtherUser { name, .. } => {
                format!("{ADD_CAPABILITY}, or be that user: sudo -u {name}")
            }
            _ => ADD_CAPABILITY.to_owned(),
        },
        Denial::OtherUser { uid: 0, .. } => "use sudo".to_owned(),
        Denial::OtherUser { name, .. } => format!("use sudo, or be that user: sudo -u {name}"),
        Denial::UserNamespace => {
            "run ocaml-probes inside that container, or as root outside of it".to_owned()
        }
        Denial::Hidden | Denial::NotDumpable | Denial::MorePrivileged => "use sudo".to_owned(),
        Denial::UnreadableProgram => "use sudo, or permit it: sudo chmod +r FILE".to_owned(),
        Denial::BeingChanged { updater: 0, .. } => "try again".to_owned(),
        Denial::BeingChanged { updater, .. } => {
            format!("try again; `kill -CONT {updater}` if that process is stopped")
        }
        Denial::Policy => {
            "the audit log may say which rule: `dmesg`, or `ausearch -m AVC`; or run ocaml-probes \
             outside of the sandbox that it is in"
                .to_owned()
        }
        Denial::Traced { tracer, name } => {
            format!("detach or end the other tracer, {name} with pid {tracer}{or_live}")
        }
        Denial::OtherVersion { tracer, .. } => format!(
            "use the version of ocaml-probes that process {tracer} is, or end that process{or_live}"
        ),
        Denial::FollowedByOtherUser { tracer, .. } => format!(
            "run ocaml-probes as the user of process {tracer}, or end that process{or_live}"
        ),
        Denial::Unexplained => {
            "look for a debugger or tracer outside this container, or use sudo".to_owned()
        }
        _ => return None,
    };
    Some(hint)
}

/// The prefix of a suggested command that repeats what failed with this error: `sudo ` if root may do it.
pub(crate) fn sudo_after(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Process(ProcessError::Denied { denial, .. }) if is_overcome_by_root(denial) => {
            "sudo "
        }
        _ => "",
    }
}

/// Returns whether root may do what was denied: [`of_denial`] then suggests sudo first.
fn is_overcome_by_root(denial: &Denial) -> bool {
    matches!(
        denial,
        Denial::Yama { scope: 0..=2 }
            | Denial::OtherUser { .. }
            | Denial::Hidden
            | Denial::NotDumpable
            | Denial::UnreadableProgram
            | Denial::MorePrivileged
    )
}

#[cfg(test)]
mod tests {
    use probes_lib::LaunchError;

    use super::super::of;
    use super::*;

    /// Returns the message and the hint for an attach that was denied.
    fn denied_attach(denial: Denial) -> (String, String) {
        let (pid, operation) = (4242, probes_lib::Operation::Attach);
        let error = Error::new(
            probes_lib::Subject::Process(pid),
            ProcessError::Denied { operation, denial },
        );
        let hint = of(&error, &CommandTarget::Attached(pid)).unwrap_or_default();
        (error.to_string(), hint)
    }

    #[test]
    fn only_commands_with_live_suggest_it() {
        let pid = 4242;
        let denied = |denial| {
            let operation = probes_lib::Operation::Attach;
            ProcessError::Denied { operation, denial }
        };
        let name = "gdb".to_owned();
        let busy = ProcessError::Busy {
            name: String::new(),
            state: 'D',
            wchan: String::new(),
            limit_ms: 500,
        };
        for (kind, hint) in [
            (
                denied(Denial::Traced { tracer: 99, name }),
                "detach or end the other tracer, gdb with pid 99",
            ),
            (denied(Denial::Seccomp), ADD_CAPABILITY),
            (busy, "try again"),
            (
                ProcessError::ThreadsKeepStarting { limit_ms: 500 },
                "try again",
            ),
            (
                ProcessError::SelfOrAncestor { own: false },
                "run ocaml-probes from a shell that the process has not started",
            ),
        ] {
            let error = Error::new(probes_lib::Subject::Process(pid), kind);
            assert_eq!(
                of(&error, &CommandTarget::Process(pid)).as_deref(),
                Some(hint)
            );
            let with_live = of(&error, &CommandTarget::Attached(pid)).unwrap();
            assert!(with_live.contains("-live"), "{with_live}");
        }
    }

    #[test]
    fn every_denial_has_its_reason_and_remedy() {
        let root = || "root".to_owned();
        let cases = [
            (
                Denial::Yama { scope: 1 },
                "cannot attach to process 4242: kernel.yama.ptrace_scope=1 allows only descendants",
                "use sudo, or start the program with `trace`, or let it call \
                 prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)",
            ),
            (
                Denial::Yama { scope: 2 },
                "cannot attach to process 4242: kernel.yama.ptrace_scope=2 allows only CAP_SYS_PTRACE",
                "use sudo",
            ),
            (
                Denial::Yama { scope: 3 },
                "cannot attach to process 4242: kernel.yama.ptrace_scope=3 disables ptrace until reboot",
                "set a lower kernel.yama.ptrace_scope in /etc/sysctl.d and reboot",
            ),
            (
                Denial::Seccomp,
                "cannot attach to process 4242: this container's or service's seccomp filter blocks ptrace",
                "start the container with --cap-add=SYS_PTRACE; or use -live, which does not use ptrace",
            ),
            (
                Denial::Incapable(Box::new(Denial::OtherUser {
                    uid: 0,
                    name: root(),
                })),
                "process 4242 belongs to uid 0 (root), and this container or service lacks CAP_SYS_PTRACE",
                "start the container with --cap-add=SYS_PTRACE, or be that user: sudo -u root",
            ),
            (
                Denial::Incapable(Box::new(Denial::Yama { scope: 1 })),
                "cannot attach to process 4242: kernel.yama.ptrace_scope=1 allows only descendants, and this \
                 container or service lacks CAP_SYS_PTRACE",
                "start the container with --cap-add=SYS_PTRACE",
            ),
            (
                Denial::OtherUser {
                    uid: 0,
                    name: root(),
                },
                "process 4242 belongs to uid 0 (root)",
                "use sudo",
            ),
            (
                Denial::OtherUser {
                    uid: 33,
                    name: "www-data".to_owned(),
                },
                "process 4242 belongs to uid 33 (www-data)",
                "use sudo, or be that user: sudo -u www-data",
            ),
            (
                Denial::FollowedByOtherUser {
                    tracer: 99,
                    name: "ocaml-probes".to_owned(),
                },
                "process 4242 is followed by pid 99 (ocaml-probes), a tool of another user, which lends it only to \
                 tools of that user",
                "run ocaml-probes as the user of process 99, or end that process; or use -live, which does not use ptrace",
            ),
            (
                Denial::UserNamespace,
                "process 4242 is in another user namespace",
                "run ocaml-probes inside that container, or as root outside of it",
            ),
            (
                Denial::Hidden,
                "process 4242 is hidden from this user by /proc, which is mounted with hidepid",
                "use sudo",
            ),
            (
                Denial::NotDumpable,
                "process 4242 is not dumpable (setuid or file capabilities, a program file that its user may not read, or prctl)",
                "use sudo",
            ),
            (
                Denial::Policy,
                "cannot attach to process 4242: a security module (AppArmor, SELinux, Landlock) does not permit it",
                "the audit log may say which rule: `dmesg`, or `ausearch -m AVC`; or run ocaml-probes outside of \
                 the sandbox that it is in",
            ),
            (
                Denial::Traced {
                    tracer: 99,
                    name: "gdb".to_owned(),
                },
                "process 4242 is already traced by pid 99 (gdb)",
                "detach or end the other tracer, gdb with pid 99; or use -live, which does not use ptrace",
            ),
            (
                Denial::UnreadableProgram,
                "process 4242 executes a program file that this user may not read",
                "use sudo, or permit it: sudo chmod +r FILE",
            ),
            (
                Denial::MorePrivileged,
                "process 4242 has capabilities that the calling process lacks",
                "use sudo",
            ),
            (
                Denial::BeingChanged {
                    updater: 99,
                    name: "ocaml-probes".to_owned(),
                },
                "process 4242 is being changed by pid 99 (ocaml-probes)",
                "try again; `kill -CONT 99` if that process is stopped",
            ),
            (
                Denial::OtherVersion {
                    tracer: 99,
                    name: "ocaml-probes".to_owned(),
                },
                "process 4242 is followed by pid 99 (ocaml-probes), another version of this tool, which does not lend it",
                "use the version of ocaml-probes that process 99 is, or end that process; or use -live, which does not use ptrace",
            ),
            (
                Denial::Unexplained,
                "cannot attach to process 4242: the kernel does not permit it, possibly because it is traced from outside this \
                 container",
                "look for a debugger or tracer outside this container, or use sudo",
            ),
        ];
        for (denial, why, hint) in cases {
            assert_eq!(denied_attach(denial), (why.to_owned(), hint.to_owned()));
        }
    }

    #[test]
    fn denied_launch_gets_no_advice_to_use_trace() {
        let error = Error::new(
            probes_lib::Subject::Program("./server.exe".into()),
            LaunchError::Denied(Denial::Yama { scope: 1 }),
        );
        let hint = of(&error, &CommandTarget::Program("./server.exe".into()));
        assert_eq!(hint.as_deref(), Some("use sudo"));
    }

    #[test]
    fn huge_pages_and_busy_threads_have_a_hint() {
        let (pid, tid) = (4242, 4250);
        let busy = Error::new(
            probes_lib::Subject::Thread { pid, tid },
            ProcessError::Busy {
                name: "worker-3".to_owned(),
                state: 'D',
                wchan: String::new(),
                limit_ms: 500,
            },
        );
        for (error, hint) in [
            (
                Error::new(probes_lib::Subject::Process(pid), MemoryError::GigaText),
                "-gigatext changes it nevertheless: the process waits while a gigabyte is copied",
            ),
            (busy, "try again; -live changes it without stopping it"),
            (
                Error::new(probes_lib::Subject::Process(pid), MemoryError::LiveRefused),
                "leave -live out: the process is then stopped for a moment",
            ),
        ] {
            let said = of(&error, &CommandTarget::Attached(4242));
            assert_eq!(said.as_deref(), Some(hint), "{error}");
        }
        let huge = Error::new(probes_lib::Subject::Process(pid), MemoryError::GigaText);
        assert_eq!(of(&huge, &CommandTarget::Process(pid)), None);
    }
}
