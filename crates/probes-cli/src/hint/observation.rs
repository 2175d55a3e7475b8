//! Hints about processes that cannot be observed, or not in the way that was asked for.

use probes_lib::{ExpressionProblem, MemoryLimitKind, ObserveError, TscDenial, UnreadableFilter};

use super::CommandTarget;

/// The hint about a process that cannot be observed.
pub(super) fn of_observe(
    kind: &ObserveError,
    pid: Option<i32>,
    target: &CommandTarget,
) -> Option<String> {
    let hint = match kind {
        ObserveError::AlreadyObserved { .. } => {
            "wait until that observer exits, or use -force: that observer then ends with an error, or waits if it is `serve`"
        }
        ObserveError::NoThreadToRedirect | ObserveError::CallUnfinished => "try again",
        ObserveError::StillInside { .. } => {
            "try again in a moment, or restart the program if the thread never leaves that code"
        }
        ObserveError::NotRunning => {
            return Some(format!(
                "thaw its cgroup if it is frozen (`cat /proc/{}/cgroup`), or try again when processors are free",
                pid.map_or("PID".to_owned(), |pid| pid.to_string())
            ));
        }
        ObserveError::NoRoom => "observe fewer functions, or those of one library at a time",
        ObserveError::NoThreadIds => "count by another key, such as arg0 or caller",
        ObserveError::SeccompRefuses { call, .. } => {
            return Some(format!(
                "its filter would have to allow {call}; `attach` and `info` inject no system calls, and work"
            ));
        }
        ObserveError::MemoryLimited { limit, .. } => {
            return of_limit(limit.kind, pid, target);
        }
        ObserveError::MemoryLocked { .. } => {
            "ask for what needs less memory: `count` without -by, then `latency`"
        }
        ObserveError::NoCodeCave { .. } => {
            "link it dynamically to observe it; if it is started with OCAML_RUNTIME_EVENTS_START=1, `gc` reads the events of OCaml 5 without injecting calls"
        }
        ObserveError::SemaphoreFull { .. } => {
            "the program, or a tool that was killed, has set it so; a restart of the program resets it"
        }
        ObserveError::TooManyHistograms { .. } => "give globs that match fewer functions",
        ObserveError::Expression(bad) => return of_expression(bad.problem(), target),
        ObserveError::SeccompStrict
        | ObserveError::TscDenied {
            denial: TscDenial::StrictSeccomp,
            ..
        } => "`attach` and `info` inject no system calls, and work",
        ObserveError::TscDenied { .. } | ObserveError::NoInvariantTsc => {
            "`count` needs no times, unless it counts by stack"
        }
        ObserveError::NoControlBlock { .. } => {
            "`count` works if it is not asked for stacks or threads (-by stack, -by tid)"
        }
        ObserveError::SeccompUnreadable { why } => {
            let advice = match why {
                UnreadableFilter::NotPermitted => "use sudo, outside of containers, to read it",
                UnreadableFilter::ReaderFiltered => {
                    "run ocaml-probes outside of the container or service that restricts it"
                }
                _ => "`attach` and `info` inject no system calls, and work",
            };
            return Some(format!(
                "{advice}; or use -despite-seccomp, if you know that the filter allows mmap, munmap and (for watch) madvise: otherwise it may kill the process"
            ));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// The hint about a process or program that cannot be observed because its memory is limited.
fn of_limit(kind: MemoryLimitKind, pid: Option<i32>, target: &CommandTarget) -> Option<String> {
    let (option, flag) = match kind {
        MemoryLimitKind::Data => ("--data", "-d"),
        MemoryLimitKind::Cgroup => {
            return Some(
                "raise the limit (systemd: MemoryMax=, Docker: --memory), or ask for what needs less: `count` without -by, then `latency`"
                    .to_owned(),
            );
        }
        _ => ("--as", "-v"),
    };
    if let CommandTarget::Program(_) = target {
        return Some(format!(
            "`ulimit {flag}` sets the limit; -count without -by needs the least memory, then -latency"
        ));
    }
    Some(format!(
        "`prlimit --pid {} {option}=BYTES:` raises the limit; `count` without -by needs the least memory, then `latency`",
        pid?
    ))
}

/// The hint about an expression that makes no sense at a point.
fn of_expression(problem: &ExpressionProblem, target: &CommandTarget) -> Option<String> {
    match problem {
        ExpressionProblem::GoneAtExit { .. } => {
            Some("`watch -fn FUNCTION -results` shows arguments and results".to_owned())
        }
        ExpressionProblem::NoArgument { point, .. }
        | ExpressionProblem::UnreadArgument { point, .. }
            if point.starts_with("probe ") =>
        {
            let shows = match target {
                CommandTarget::Process(pid) | CommandTarget::Attached(pid) => {
                    format!("`ocaml-probes info -pid {pid} -sites`")
                }
                CommandTarget::Program(_) | CommandTarget::File(_) => {
                    format!("`{} -sites`", target.to_list())
                }
            };
            Some(format!(
                "{shows} shows where the arguments of probes are; select only probes that have this one"
            ))
        }
        ExpressionProblem::UnknownArguments { point }
            if point.starts_with("function ") && point.ends_with(" of Go") =>
        {
            let hint = "Go passes arguments in other registers than C; `retval`, the word in rax, can be asked for";
            Some(hint.to_owned())
        }
        ExpressionProblem::NoArgument { point, .. }
        | ExpressionProblem::UnknownArguments { point }
            if point.starts_with("function ") =>
        {
            let hint = "`watch -fn` shows which arguments of a function are known; a glob with *, ? or [ leaves out functions without this one";
            Some(hint.to_owned())
        }
        ExpressionProblem::WrongKind { text, .. } => of_string(text),
        ExpressionProblem::UnknownArguments { .. } => {
            let hint = "arguments are known of probes of OCaml and at the beginning of functions";
            Some(hint.to_owned())
        }
        _ => None,
    }
}

/// The hint about a string that is used as another value. Of a literal there is none.
fn of_string(text: &str) -> Option<String> {
    let argument = text.strip_prefix("str(")?.strip_suffix(')')?;
    Some(format!(
        "`count -by '{text}'` counts by strings; the length of a string of OCaml is `len({argument})`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(kind: &ObserveError) -> String {
        let pid = 4242;
        of_observe(kind, Some(pid), &CommandTarget::Process(pid)).unwrap()
    }

    #[test]
    fn hints_about_times_exclude_counts_by_stack() {
        let denied = ObserveError::TscDenied {
            tid: 4243,
            denial: TscDenial::Prctl,
        };
        for kind in [denied, ObserveError::NoInvariantTsc] {
            let expected = "`count` needs no times, unless it counts by stack";
            assert_eq!(hint(&kind), expected);
        }
    }

    #[test]
    fn strict_mode_leaves_only_attach_and_info() {
        let timed = ObserveError::TscDenied {
            tid: 4243,
            denial: TscDenial::StrictSeccomp,
        };
        assert_eq!(hint(&timed), hint(&ObserveError::SeccompStrict));
        assert!(!hint(&timed).contains("count"));
    }

    #[test]
    fn hints_about_memory_exclude_counts_by_key() {
        let limits = [
            MemoryLimitKind::AddressSpace,
            MemoryLimitKind::Data,
            MemoryLimitKind::Cgroup,
        ];
        let limited = limits.map(|kind| ObserveError::MemoryLimited {
            needed: 2 << 20,
            limit: probes_lib::MemoryLimit {
                kind,
                limit: 64 << 20,
                used: 63 << 20,
            },
        });
        let locked = ObserveError::MemoryLocked { needed: 2 << 20 };
        for kind in limited.into_iter().chain([locked]) {
            let hint = hint(&kind);
            assert!(hint.contains("`count` without -by"), "{hint}");
        }
    }
}
