//! What to do about an error: the line that is printed after its message, for every kind of error
//! that has a sensible next step.

mod mistaken;
mod shell;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use probes_lib::{
    Check, CheckKind, CheckResult, CodeDigest, Denial, Effect, ElfDefect, Error, ErrorKind,
    ExpressionProblem, FileError, FunctionError, LaunchError, MemoryError, MemoryLimitKind,
    ObserveError, ProbeError, ProcessError, Refusal, RuntimeEventsError, SystemError,
    UnreadableFilter, pids,
};

use crate::text::join_first_few;

pub(crate) const LIMITED: &str =
    "is memory or the number of processes limited (`ulimit -v`, `ulimit -u`)?";

const NO_BYTECODE: &str = "probes exist only in native code: build the program with ocamlopt, or as a .exe of dune that is not bytecode";

const NO_FUNCTIONS_OF_BYTECODE: &str = "the program is OCaml bytecode, whose functions are no native code: build it with ocamlopt, or as a .exe of dune that is not bytecode";

const ADD_CAPABILITY: &str = "start the container with --cap-add=SYS_PTRACE";

const KEEP_SYMBOLS: &str = "do not strip its symbols (`strip --strip-debug` keeps them)";

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
pub(crate) fn of(error: &Error, operand: &CommandTarget) -> Option<String> {
    if let (Effect::HalfChanged, Some(pid)) = (error.effect(), error.pid()) {
        return Some(format!(
            "`ocaml-probes info -pid {pid}` shows which probes are inconsistent; {}",
            repair(pid, "NAME")
        ));
    }
    match error.kind() {
        ErrorKind::File(kind) => of_file(kind, error.subject(), operand),
        ErrorKind::Probe(kind) => of_probe(kind, operand),
        ErrorKind::Function(kind) => of_function(kind, operand),
        ErrorKind::Process(kind) => of_process(kind, error.pid(), operand.is_attach()),
        ErrorKind::Memory(kind) => of_memory(kind, error.pid(), operand.is_attach()),
        ErrorKind::Observe(kind) => of_observe(kind, error.pid(), operand),
        ErrorKind::RuntimeEvents(kind) => of_runtime_events(kind, error.pid()),
        ErrorKind::Launch(kind) => of_launch(kind, error.subject()),
        ErrorKind::System(kind) => of_system(kind),
        _ => None,
    }
}

/// What to do about a program that writes no runtime events when it is started.
pub(crate) fn without_events(program: &Path) -> String {
    format!(
        "only programs of OCaml 5 write them; `ocaml-probes gc -prog {}` times the functions of the collector of OCaml 4, if they have symbols",
        program.display()
    )
}

/// What to do about a check that has not passed: the hint of a command that fails because of it, where there is one.
pub(crate) fn of_check(check: &Check, operand: &CommandTarget) -> Option<String> {
    if check.result() == CheckResult::Pass {
        return None;
    }
    if let Some(error) = check.cause() {
        if let Some(hint) = of(error, operand) {
            return Some(hint);
        }
    }
    let failed = check.result() == CheckResult::Fail;
    let hint = match (check.kind(), operand) {
        (CheckKind::Seccomp, _) if !failed => {
            "a command that observes says which call they refuse, and changes nothing then"
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
            "`profile` stops the threads that run for a moment instead; -live does not, and says what it lacks"
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

/// The hint about events that a process does not write, or that are not known.
fn of_runtime_events(kind: &RuntimeEventsError, pid: Option<i32>) -> Option<String> {
    let pid = pid?;
    let instead = format!(
        "`ocaml-probes gc -pid {pid}` times the functions of its collector, if they have symbols"
    );
    match kind {
        RuntimeEventsError::NotOn => Some(format!(
            "start it with OCAML_RUNTIME_EVENTS_START=1 in its environment; {instead}"
        )),
        RuntimeEventsError::CannotSwitchOn { .. } => Some(format!(
            "start it with OCAML_RUNTIME_EVENTS_START=1 in its environment, and with OCAML_RUNTIME_EVENTS_DIR if it cannot \
             create files where it works; {instead}"
        )),
        RuntimeEventsError::NoRoom { .. } => Some(
            "make room there, or start it with OCAML_RUNTIME_EVENTS_DIR in its environment, a directory on another disk"
                .to_owned(),
        ),
        RuntimeEventsError::Idle => Some(
            "a program that does not run, or is in C code all the time, does not collect either: nothing was changed"
                .to_owned(),
        ),
        RuntimeEventsError::UnknownEvent { .. } => Some(format!(
            "`ocaml-probes count -pid {pid} -events all -for 5s` shows which events occur; a program registers its own \
             before it writes them"
        )),
        RuntimeEventsError::Ocaml4
        | RuntimeEventsError::UnknownVersion { .. }
        | RuntimeEventsError::NoVersion => Some(instead),
        _ => None,
    }
}

fn of_file(
    kind: &FileError,
    file: &probes_lib::Subject,
    operand: &CommandTarget,
) -> Option<String> {
    let hint = match kind {
        FileError::Open { source } => return of_open(source, operand),
        FileError::Elf(defect) => return of_elf(defect),
        FileError::Nameless { .. } => {
            "use sudo outside of containers: only root can open such a file, through /proc/PID/map_files"
        }
        FileError::UnknownLayout { .. } => KEEP_SYMBOLS,
        FileError::MalformedNote(_) | FileError::WrongNote { .. } => {
            return Some(format!(
                "the file is damaged, build it again; `readelf -n {file}` shows its notes"
            ));
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// The hint about probes that do not exist, that cannot be selected in the way that was asked for,
/// or that cannot be changed in the state that they are in.
fn of_probe(kind: &ProbeError, operand: &CommandTarget) -> Option<String> {
    let pid = match operand {
        CommandTarget::Process(pid) | CommandTarget::Attached(pid) => Some(*pid),
        CommandTarget::Program(_) | CommandTarget::File(_) => None,
    };
    let hint = match kind {
        ProbeError::NoProbes {
            runs_bytecode: true,
            ..
        } => NO_BYTECODE,
        ProbeError::NoProbes { unreadable, .. } if !unreadable.is_empty() => {
            "root (outside of containers) can read files that others may not read, or that were \
             deleted or replaced"
        }
        ProbeError::NoProbes { .. } => {
            if let Some(hint) = pid.and_then(shell::with_children) {
                return Some(hint);
            }
            let built = "was it built by a compiler with probes, or with ppx_probe? was the code with the probes \
                         linked in? was .note.stapsdt kept when it was stripped?";
            return Some(match operand {
                CommandTarget::Process(_) => {
                    format!(
                        "{built} `count -fn GLOB` counts functions of any program, `latency -fn GLOB` times them"
                    )
                }
                CommandTarget::Program(_) => format!(
                    "{built} -count -fn GLOB counts functions of any program, -latency -fn GLOB times them"
                ),
                CommandTarget::File(_) => {
                    format!("{built} `list -functions` lists the functions of any program")
                }
                CommandTarget::Attached(_) => built.to_owned(),
            });
        }
        ProbeError::Unknown { name, .. } => {
            let as_function = mistaken::as_function(name, operand);
            let list = || format!("`{}` lists the names", listing(operand));
            return Some(as_function.unwrap_or_else(list));
        }
        ProbeError::NoMatch { .. } => {
            return Some(format!(
                "`{}` lists the names; a regular expression has to match from the start of a name: `.*_end`, not `_end`",
                listing(operand)
            ));
        }
        ProbeError::SelectedTwice { .. } => "select each probe once",
        ProbeError::Conflict { .. } => "either enable the probe or disable it",
        ProbeError::NotEnabled { .. } => {
            "leave it out; -disable-all, -disable-regexp and -disable-pair skip probes that are disabled"
        }
        ProbeError::CounterFull { name } | ProbeError::Inconsistent { name, .. } => {
            return Some(repair(pid?, name));
        }
        ProbeError::UnequalCounters { name, .. } => {
            let pid = pid?;
            return Some(format!(
                "`ocaml-probes attach -pid {pid} -force -disable {name}` disables all its sites"
            ));
        }
        ProbeError::UnexpectedSite { found, .. } if found.has_breakpoint() => {
            "remove the breakpoint or uprobe, or leave this probe out"
        }
        ProbeError::UnexpectedSite { .. } => {
            "something else has changed this code: leave this probe out, or restart the program"
        }
        ProbeError::LiveUnloadable { .. } => NOT_LIVE,
        _ => return None,
    };
    Some(hint.to_owned())
}

fn of_function(kind: &FunctionError, operand: &CommandTarget) -> Option<String> {
    let list = operand.to_list();
    let hint = match kind {
        FunctionError::NoMatch {
            runs_bytecode: true,
            ..
        } => NO_FUNCTIONS_OF_BYTECODE.to_owned(),
        FunctionError::NoMatch {
            is_probe_site: true,
            ..
        } => format!(
            "this is the function that ppx_probe makes for a probe site, named after the function around it; that one may be \
             inlined, and then has no code of its own: `{}` lists the probes, and `count -probe NAME` counts hits",
            listing(operand)
        ),
        FunctionError::NoMatch { glob, .. } => {
            if let Some(as_probe) = mistaken::as_probe(glob, operand) {
                return Some(as_probe);
            }
            let of_shell = match operand {
                CommandTarget::Process(pid) => shell::with_children(*pid),
                _ => None,
            };
            if of_shell.is_some() {
                return of_shell;
            }
            if glob.contains(", ") {
                return Some(
                    "a comma with a space behind it belongs to a name if there are parentheses or angle brackets: \
                     write the list without spaces, or repeat the flag"
                        .to_owned(),
                );
            }
            let later = match operand {
                CommandTarget::Program(_) => {
                    "; functions of libraries that the program loads itself are not found at its start"
                }
                _ => "",
            };
            format!(
                "`{list} -functions` lists the names; a glob has to match a whole name: `*.map`, not `map`{later}"
            )
        }
        FunctionError::NoneAt { .. } if matches!(operand, CommandTarget::Program(_)) => format!(
            "a position-independent program, and a library, has its addresses only when it runs: give the name; \
             `{list} -functions` lists the names"
        ),
        FunctionError::NoneAt { .. } => {
            format!("`{list} -functions` lists the addresses of its functions")
        }
        // That command itself has found none.
        FunctionError::NoUsdt { glob, .. } if glob == "*:*" => return None,
        FunctionError::NoUsdt { is_ocamls: true, .. } => {
            "give -probe NAME for a probe of OCaml; -usdt is for those of other providers".to_owned()
        }
        FunctionError::NoUsdt { .. } => format!("`{list} -provider any` lists the USDT probes"),
        FunctionError::NoRuntime { .. } => {
            "-gc is for OCaml programs that have the symbols of their runtime: do not strip them".to_owned()
        }
        FunctionError::NeedsOcaml5 { .. } => {
            "-gc stw needs OCaml 5; minor, slice, major and compact work with OCaml 4, too".to_owned()
        }
        FunctionError::NoCollector { .. } => {
            format!("`{list} -functions 'caml_*'` lists the functions of its runtime, for -fn")
        }
        FunctionError::NoLines { .. } => {
            "build it with -g, and do not strip it; `-fn NAME` and `-fn 0xADDRESS` need no source lines"
                .to_owned()
        }
        FunctionError::UnknownFile { .. } => {
            format!("`{list} -functions` lists the source line of each function")
        }
        FunctionError::SeveralFiles { .. } => "give more of its path".to_owned(),
        FunctionError::NoCodeAt { file, near, .. } => {
            format!("give {file}:{}, which has code", near.last()?)
        }
        FunctionError::TooManyTimed { .. } => "give globs that match fewer functions".to_owned(),
        FunctionError::NonePossible { refused, is_usdt } => {
            let is_breakpoint = |(_, why): &(String, Refusal)| *why == Refusal::Breakpoint;
            if refused.iter().all(is_breakpoint) {
                "remove the breakpoint or uprobe".to_owned()
            } else if let [(_, Refusal::NoInstruction { .. }), ..] = &refused[..] {
                "give the address at which an instruction begins: `x/i` of gdb shows instructions with their addresses"
                    .to_owned()
            } else if let [(name, Refusal::NotEntry), ..] = &refused[..] {
                // A source line is shown with its function: `http.ml:42 in Http.parse`.
                let place = name.split_once(" in ").map_or("0xADDRESS", |(line, _)| line);
                format!("`count -fn {place}` counts how often it is executed")
            } else if *is_usdt {
                format!(
                    "`{list} -provider any -sites` shows where the sites of USDT probes are; docs/functions.md explains the reasons"
                )
            } else {
                format!(
                    "`{list} -functions` says of each function whether it can be counted and timed; a glob with *, ? or [ leaves out those that cannot"
                )
            }
        }
        _ => return None,
    };
    Some(hint)
}

/// The hint about a process that is gone, or cannot be stopped.
fn of_process(kind: &ProcessError, pid: Option<i32>, is_attach: bool) -> Option<String> {
    let hint = match kind {
        ProcessError::Denied { denial, .. } => return of_denial(denial, true, is_attach),
        ProcessError::NotFound => return Some(no_such_process(pid?)),
        ProcessError::NotAProcess => {
            return Some(format!("give the pid of its process: -pid {}", pid?));
        }
        ProcessError::Zombie { .. } => "it has exited, start it again",
        ProcessError::KernelThread { .. } => "give the pid of a process that runs a program",
        ProcessError::Bytecode => NO_BYTECODE,
        ProcessError::Translated { .. } => "run the program without the translator",
        ProcessError::SelfOrAncestor { .. } if is_attach => {
            "use -live, which changes the process without stopping it; or run ocaml-probes from a shell that the process has not started"
        }
        ProcessError::SelfOrAncestor { .. } => {
            "run ocaml-probes from a shell that the process has not started"
        }
        ProcessError::Busy { .. } | ProcessError::ThreadsKeepStarting { .. } if is_attach => {
            "try again; -live changes it without stopping it"
        }
        ProcessError::Busy { .. }
        | ProcessError::ThreadsKeepStarting { .. }
        | ProcessError::FollowerLost
        | ProcessError::Executed => "try again",
        ProcessError::FollowerSilent => {
            return Some(format!(
                "look whether its tracer is stopped (TracerPid in /proc/{}/status); `kill -CONT` resumes it",
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

fn of_memory(kind: &MemoryError, pid: Option<i32>, is_attach: bool) -> Option<String> {
    let hint = match kind {
        MemoryError::LiveRefused => NOT_LIVE,
        MemoryError::GigaText if is_attach => {
            "-gigatext changes it nevertheless: the process waits while a gigabyte is copied"
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

/// The hint about a process or program that cannot be observed because its memory is limited.
fn of_limit(kind: MemoryLimitKind, pid: Option<i32>, operand: &CommandTarget) -> Option<String> {
    let (option, flag) = match kind {
        MemoryLimitKind::Data => ("--data", "-d"),
        MemoryLimitKind::Cgroup => {
            return Some(
                "raise the limit (systemd: MemoryMax=, Docker: --memory), or ask for what needs less: `count`, then `latency`"
                    .to_owned(),
            );
        }
        _ => ("--as", "-v"),
    };
    if let CommandTarget::Program(_) = operand {
        return Some(format!(
            "`ulimit {flag}` sets the limit; -count needs the least memory, then -latency"
        ));
    }
    Some(format!(
        "`prlimit --pid {} {option}=BYTES:` raises the limit; `count` needs the least memory, then `latency`",
        pid?
    ))
}

/// The hint about a process that cannot be observed.
fn of_observe(kind: &ObserveError, pid: Option<i32>, operand: &CommandTarget) -> Option<String> {
    let hint = match kind {
        ObserveError::AlreadyObserved { .. } => {
            "wait until that observer exits, or use -force, which ends its observation with an error"
        }
        ObserveError::StillInside { .. }
        | ObserveError::NoThreadToRedirect
        | ObserveError::CallUnfinished => "try again",
        ObserveError::SeccompRefuses { call, .. } => {
            return Some(format!(
                "its filter would have to allow {call}; `attach` and `info` inject no system calls, and work"
            ));
        }
        ObserveError::MemoryLimited { limit, .. } => {
            return of_limit(limit.kind, pid, operand);
        }
        ObserveError::MemoryLocked { .. } => {
            "ask for what needs less memory: `count`, then `latency`"
        }
        ObserveError::NoCodeCave { .. } => {
            "link it dynamically to observe it; if it is started with OCAML_RUNTIME_EVENTS_START=1, `gc` reads the events of OCaml 5 without injecting calls"
        }
        ObserveError::SemaphoreFull { .. } => {
            "the program, or a tool that was killed, has set it so; a restart of the program resets it"
        }
        ObserveError::TooManyHistograms { .. } => "give globs that match fewer functions",
        ObserveError::Expression(bad) => return of_expression(bad.problem(), operand),
        ObserveError::SeccompStrict => "`attach` and `info` inject no system calls, and work",
        ObserveError::TscDenied { .. }
        | ObserveError::NoControlBlock { .. }
        | ObserveError::NoInvariantTsc => "`count` needs no times",
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

/// The hint about an expression that makes no sense at a point.
fn of_expression(problem: &ExpressionProblem, operand: &CommandTarget) -> Option<String> {
    match problem {
        ExpressionProblem::GoneAtExit { .. } => {
            Some("`watch -fn FUNCTION -results` shows arguments and results".to_owned())
        }
        ExpressionProblem::NoArgument { point, .. }
        | ExpressionProblem::UnreadArgument { point, .. }
            if point.starts_with("probe ") =>
        {
            let shows = match operand {
                CommandTarget::Process(pid) | CommandTarget::Attached(pid) => {
                    format!("`ocaml-probes info -pid {pid} -sites`")
                }
                CommandTarget::Program(_) | CommandTarget::File(_) => {
                    format!("`{} -sites`", operand.to_list())
                }
            };
            Some(format!(
                "{shows} shows where the arguments of probes are; select only probes that have this one"
            ))
        }
        ExpressionProblem::NoArgument { point, .. }
        | ExpressionProblem::UnknownArguments { point }
            if point.starts_with("function ") =>
        {
            let hint = "`watch -fn` shows which arguments of a function are known; a glob with *, ? or [ leaves out functions without this one";
            Some(hint.to_owned())
        }
        ExpressionProblem::UnknownArguments { .. } => {
            let hint = "arguments are known of probes of OCaml and at the beginning of functions";
            Some(hint.to_owned())
        }
        _ => None,
    }
}

/// The hint about a program that cannot be started.
fn of_launch(kind: &LaunchError, program: &probes_lib::Subject) -> Option<String> {
    let hint = match (kind, program) {
        (LaunchError::Exec { source }, probes_lib::Subject::Program(program)) => {
            return of_exec(program, source);
        }
        (LaunchError::Denied(denial), _) => return of_denial(denial, false, false),
        (LaunchError::Setuid | LaunchError::FileCapabilities, _) => {
            "start it without ocaml-probes, then `attach` to it with sudo"
        }
        (LaunchError::DiedAtStart { .. }, _) => {
            "is memory limited (`ulimit -v`), or the file damaged? run it without ocaml-probes to see"
        }
        (LaunchError::DiedLoading, _) => {
            "`ldd` says which libraries it needs and which are missing"
        }
        (LaunchError::NoInterpreter { .. }, _) => {
            "install what the program needs, or build it for this system"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

fn of_system(kind: &SystemError) -> Option<String> {
    let hint = match kind {
        SystemError::NoThread { .. } => LIMITED,
        SystemError::ForeignProc => {
            "enter the mount namespace, too (`nsenter --mount --pid`), or mount a /proc of this pid namespace in a new one (`unshare --mount-proc`)"
        }
        SystemError::NoProc => "`mount -t proc proc /proc` mounts it",
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

/// How to make counter and sites of a probe agree again.
pub(crate) fn repair(pid: i32, name: &str) -> String {
    format!(
        "`ocaml-probes attach -pid {pid} -force -enable {name}` or `-force -disable {name}` repairs it"
    )
}

fn listing(operand: &CommandTarget) -> String {
    match operand {
        CommandTarget::Process(pid) | CommandTarget::Attached(pid) => {
            format!("ocaml-probes info -pid {pid}")
        }
        CommandTarget::Program(_) | CommandTarget::File(_) => operand.to_list(),
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

fn of_open(source: &io::Error, operand: &CommandTarget) -> Option<String> {
    let is_typed = matches!(operand, CommandTarget::Program(_) | CommandTarget::File(_));
    let hint = match source.kind() {
        io::ErrorKind::NotFound if is_typed => "give its path: it is not looked up in PATH",
        io::ErrorKind::PermissionDenied => "use sudo, or be a user with permission to read it",
        _ => return None,
    };
    Some(hint.to_owned())
}

fn of_exec(program: &Path, source: &io::Error) -> Option<String> {
    let has_slash = program.components().count() > 1;
    let hint = match source.kind() {
        io::ErrorKind::NotFound if !has_slash && program.is_file() => format!(
            "without a slash it is looked up in PATH; the file in this directory is ./{}",
            program.display()
        ),
        io::ErrorKind::NotFound if !has_slash => {
            "without a slash it is looked up in PATH".to_owned()
        }
        io::ErrorKind::PermissionDenied if !has_slash => {
            "a file of that name is in PATH, but cannot be executed".to_owned()
        }
        io::ErrorKind::PermissionDenied => permission_denied(program),
        io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => LIMITED.to_owned(),
        io::ErrorKind::ExecutableFileBusy => {
            "another process has the file open for writing: wait until it is complete".to_owned()
        }
        io::ErrorKind::ArgumentListTooLong => {
            "give it fewer or shorter arguments and environment variables".to_owned()
        }
        _ => return None,
    };
    Some(hint)
}

fn permission_denied(program: &Path) -> String {
    const EXECUTE: u32 = 0o111;
    match program.metadata() {
        Ok(metadata) if metadata.mode() & EXECUTE == 0 => format!(
            "is it a program? `chmod +x {}` makes it one",
            program.display()
        ),
        Ok(_) => "does this user have permission to execute it, and is its file system mounted without noexec?".to_owned(),
        Err(_) => "does this user have permission to enter the directories above it?".to_owned(),
    }
}

fn of_elf(defect: &ElfDefect) -> Option<String> {
    let hint = match defect {
        ElfDefect::NotElf => "give the native program itself, not bytecode or a script",
        ElfDefect::NotAProgram(_) => "give the linked program",
        ElfDefect::NoSectionHeaders => {
            "keep the section headers and .note.stapsdt when stripping: plain `strip` does"
        }
        ElfDefect::UnknownClass(_)
        | ElfDefect::Truncated { .. }
        | ElfDefect::Table(_)
        | ElfDefect::Contradiction(_) => "the file is damaged, build it again",
        _ => return None,
    };
    Some(hint.to_owned())
}

/// `attach`: whether the process was already running, and not started by us. `is_attach`: whether the command is
/// `attach`, whose -live does not use ptrace.
fn of_denial(denial: &Denial, attach: bool, is_attach: bool) -> Option<String> {
    let hint = match denial {
        Denial::Yama { scope: 1 } if attach => {
            "use sudo, or start the program with `trace`, or let it call \
             prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)"
                .to_owned()
        }
        Denial::Yama { scope: 0..=2 } => "use sudo".to_owned(),
        Denial::Yama { .. } => {
            "set a lower kernel.yama.ptrace_scope in /etc/sysctl.d and reboot".to_owned()
        }
        Denial::Seccomp if is_attach => {
            format!("{ADD_CAPABILITY}; or use -live, which does not use ptrace")
        }
        Denial::Seccomp => ADD_CAPABILITY.to_owned(),
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
        Denial::NotDumpable | Denial::MorePrivileged => "use sudo".to_owned(),
        Denial::BeingChanged { updater: 0, .. } => "try again".to_owned(),
        Denial::BeingChanged { updater, .. } => {
            format!("try again; `kill -CONT {updater}` if that process is stopped")
        }
        Denial::Policy => {
            "the audit log may say which rule: `dmesg`, or `ausearch -m AVC`; or run ocaml-probes \
                           outside of the sandbox that it is in"
                .to_owned()
        }
        Denial::Traced { tracer, name } if is_attach => format!(
            "detach or end the other tracer, {name} with pid {tracer}; or use -live, which does not use ptrace"
        ),
        Denial::Traced { tracer, name } => {
            format!("detach or end the other tracer, {name} with pid {tracer}")
        }
        Denial::OtherVersion { tracer, .. } if is_attach => {
            format!(
                "use the version of process {tracer}, or end that; or use -live, which does not use ptrace"
            )
        }
        Denial::OtherVersion { tracer, .. } => {
            format!("use the version of process {tracer}, or end that")
        }
        Denial::FollowedByOtherUser { tracer, .. } => {
            let live = if is_attach {
                "; or use -live, which does not use ptrace"
            } else {
                ""
            };
            format!("be the user of process {tracer}, or end that{live}")
        }
        Denial::Unexplained => {
            "look for a debugger or tracer outside this container, or use sudo".to_owned()
        }
        _ => return None,
    };
    Some(hint)
}

/// What a suggested command that tries again what failed with this error has to begin with: `sudo ` if root may do it.
pub(crate) fn sudo_after(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Process(ProcessError::Denied { denial, .. }) if is_overcome_by_root(denial) => {
            "sudo "
        }
        _ => "",
    }
}

fn is_overcome_by_root(denial: &Denial) -> bool {
    matches!(
        denial,
        Denial::Yama { scope: 0..=2 }
            | Denial::OtherUser { .. }
            | Denial::NotDumpable
            | Denial::MorePrivileged
    )
}

#[cfg(test)]
mod tests {
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
                "be the user of process 99, or end that; or use -live, which does not use ptrace",
            ),
            (
                Denial::UserNamespace,
                "process 4242 is in another user namespace",
                "run ocaml-probes inside that container, or as root outside of it",
            ),
            (
                Denial::NotDumpable,
                "process 4242 is not dumpable (setuid or file capabilities, or prctl)",
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
                "use the version of process 99, or end that; or use -live, which does not use ptrace",
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
}
