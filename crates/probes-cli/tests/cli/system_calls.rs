//! The tool's system calls, one by one, as strace sees them: kept as a golden file, so that one
//! more stop of the target, or one more write to it, shows in review.
//!
//! Calls that only concern the tool itself (memory, signals, its output) are left out. If a call
//! that only reads, or a wait, is repeated with no other call in between, only the first is kept.
//! Every write is kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use test_support::{Scratch, Talker, eventually, fixture_forms};

use crate::support::{Run, golden, run_command, states};

/// Names of calls that are left out. Unknown calls are kept, so that they are noticed.
const OWN: [&str; 35] = [
    "brk",
    "clock_nanosleep",
    "close",
    "exit",
    "exit_group",
    "fcntl",
    "futex",
    "getpid",
    "getrandom",
    "gettid",
    "geteuid",
    "ioctl",
    "lseek",
    "madvise",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "newfstatat",
    "prctl",
    // Limits of the tool.
    "prlimit64",
    // Stands for a kill(2) to itself (see `run_under_strace`), if it received a signal while it
    // waited.
    "raise",
    "rseq",
    "rt_sigaction",
    "rt_sigpending",
    "rt_sigprocmask",
    "rt_sigtimedwait",
    "rt_sigreturn",
    "sched_getaffinity",
    "sched_setscheduler",
    "sched_yield",
    "set_robust_list",
    "setpriority",
    "sigaltstack",
    "statx",
];

/// What is kept instead of the call with which the tool starts the thread that traces.
const TRACER: &str = "-- the tracer's thread --";

/// Runs the tool on process `pid` under strace until it succeeds: on a busy machine the process
/// may not stop in time, and it is safe to try again. Returns its output and the system calls of
/// each of its threads, the first thread first.
fn run_under_strace(line: &str, pid: i32) -> (Run, Vec<String>) {
    eventually("the program succeeds", || {
        let scratch = Scratch::new();
        let prefix = scratch.file("calls");
        let mut strace = Command::new("strace");
        strace
            .args(["-ff", "-y", "-qq", "-s", "4096", "-o"])
            .arg(&prefix);
        strace.arg(env!("CARGO_BIN_EXE_ocaml-probes"));
        strace
            .args(line.split(' '))
            .args(["-pid", &pid.to_string()]);
        let run = run_command(&mut strace);
        if run.stderr.contains("safe to retry") {
            return None;
        }
        let files = fs::read_dir(scratch.path()).unwrap();
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        let tid = |path: &PathBuf| {
            let tid = path.extension().and_then(|tid| tid.to_str());
            tid.unwrap().parse::<i32>().unwrap()
        };
        files.sort_by_key(tid);
        let own = tid(&files[0]);
        let read = |path: &PathBuf| {
            // What is written to other processes need not be text.
            let text = String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
            text.replace(&format!("kill({own}, SIGCHLD)"), "raise(SIGCHLD)")
        };
        Some((run, files.iter().map(read).collect()))
    })
}

/// One call as strace writes it: `name(arguments) = result`.
#[derive(Clone, Copy)]
struct Call<'t> {
    name: &'t str,
    arguments: &'t str,
    result: &'t str,
}

impl<'t> Call<'t> {
    fn parse(line: &'t str) -> Option<Call<'t>> {
        // Signals are "--- SIGCHLD … ---".
        let (name, rest) = line.split_once('(')?;
        let (arguments, result) = rest.rsplit_once(" = ")?;
        let arguments = arguments.trim_end().strip_suffix(')')?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        name.chars().all(is_name).then_some(Call {
            name,
            arguments,
            result,
        })
    }

    /// The path of the descriptor that `text` begins with: `3</proc/42/status>, …`.
    fn path(text: &str) -> &str {
        let path = text.split_once('<').map_or("", |(_, path)| path);
        path.split('>').next().unwrap_or(path)
    }

    /// Whether it writes to standard output or standard error.
    fn is_answer(&self) -> bool {
        self.name == "write" && ["1<", "2<"].iter().any(|fd| self.arguments.starts_with(fd))
    }

    /// How it is kept: its name, its object, and how many bytes are written.
    fn summary(&self) -> String {
        let Call {
            name,
            arguments,
            result,
        } = *self;
        let words: Vec<&str> = arguments.split(", ").collect();
        let object = Call::path(words[0]);
        match name {
            "openat" => {
                let flags = words[2].replace("|O_CLOEXEC", "");
                format!("openat({}, {flags})", Call::path(result))
            }
            "read" | "pread64" | "getdents64" => format!("{name}({object})"),
            "readlinkat" => format!("readlinkat({object}/{})", words[1].trim_matches('"')),
            "write" | "pwrite64" => format!("{name}({object}, {result} bytes)"),
            "flock" => format!("flock({object}, {})", words[1]),
            "process_vm_writev" => format!("{name}({}, {result} bytes)", words[0]),
            // Without the siginfo, which has commas of its own.
            "waitid" => {
                let flags = words[words.len() - 2];
                format!("waitid({}, {}, {flags})", words[0], words[1])
            }
            "ptrace" => {
                let more = match words[0] {
                    "PTRACE_SEIZE" | "PTRACE_DETACH" => format!(", {}", words[3]),
                    _ => String::new(),
                };
                format!("ptrace({}, {}{more})", words[0], words[1])
            }
            _ => format!("{name}({arguments})"),
        }
    }
}

/// Whether a call only reads or waits: if it is repeated with no other call kept in between, only
/// the first is kept.
fn only_reads(name: &str) -> bool {
    ["read", "pread64", "getdents64", "waitid"].contains(&name)
}

/// The relevant calls of a thread, from the first that concerns the target.
fn calls(trace: &str, program: &Path, pid: i32) -> Vec<String> {
    let target = format!("/proc/{pid}");
    let mut kept: Vec<String> = Vec::new();
    for line in trace.lines().skip_while(|line| !line.contains(&target)) {
        let Some(call) = Call::parse(line) else {
            continue;
        };
        // Directories with records of holds are there or not.
        let is_of_holds = ["/run/ocaml-probes", "/tmp/ocaml-probes-"]
            .iter()
            .any(|directory| line.contains(directory));
        if OWN.contains(&call.name) || call.is_answer() || is_of_holds {
            continue;
        }
        let line = match call.name {
            "clone" | "clone3" => TRACER.to_owned(),
            _ => with_library_names(&with_process_names(&call.summary(), program, pid)),
        };
        // The tool reads its ancestors, and the libraries of the target, one after the other. How
        // many there are is not up to the tool, so equal lines are kept only once.
        let is_other = line.contains("/proc/OTHER") || line.contains("LIBRARY");
        let is_write = call.name.contains("write");
        let is_known = is_other && !is_write && kept.contains(&line);
        let is_repeated = only_reads(call.name) && kept.last() == Some(&line);
        if !is_known && !is_repeated {
            kept.push(line);
        }
    }
    kept
}

/// `text` with one name for all files except the target's own.
fn with_library_names(text: &str) -> String {
    let Some((name, rest)) = text.split_once('(') else {
        return text.to_owned();
    };
    let end = rest.find([',', ')']).unwrap_or(rest.len());
    let (path, rest) = rest.split_at(end);
    if path.starts_with('/') && !path.starts_with("/proc/") {
        format!("{name}(LIBRARY{rest}")
    } else {
        text.to_owned()
    }
}

/// `text` with names for processes and for the target's file.
fn with_process_names(text: &str, program: &Path, pid: i32) -> String {
    let text = text.replace(program.to_str().unwrap(), "FILE");
    let mut named = String::new();
    let mut digits = String::new();
    for character in text.chars().chain(['\n']) {
        if character.is_ascii_digit() {
            digits.push(character);
            continue;
        }
        let is_process = named.ends_with("/proc/") || named.ends_with("/task/");
        named += match digits.as_str() {
            "" => "",
            number if number == pid.to_string() => "TARGET",
            _ if is_process => "OTHER",
            number => number,
        };
        digits.clear();
        named.push(character);
    }
    named.pop();
    named
}

/// The system calls of all threads; those of the tracer's thread follow the line of its start. How
/// often the threads check the target until it is stopped is left out, as it is not up to them.
fn all_calls(traces: &[String], program: &Path, pid: i32) -> String {
    // The first thread is the watchdog of the one that traces, and checks only if that takes long.
    let watches = |call: &str| {
        let looks = ["waitid(", "getdents64(", "openat(/proc/TARGET/task, "];
        looks.iter().any(|start| call.starts_with(start))
    };
    let waits = |call: &str| call.starts_with("waitid(") || call.contains("TARGET/stat");
    let mut all = String::new();
    for call in calls(&traces[0], program, pid) {
        if watches(&call) {
            continue;
        }
        let is_tracer = call == TRACER;
        all += &(call + "\n");
        if !is_tracer {
            continue;
        }
        for trace in &traces[1..] {
            let (mut has_waited, mut was_waitid) = (false, false);
            for call in calls(trace, program, pid) {
                // Until it is stopped, it is also asked whether another thread has waited for the stop.
                let asks_again = was_waitid && call.starts_with("ptrace(PTRACE_GETSIGINFO, ");
                was_waitid = call.starts_with("waitid(");
                if asks_again || has_waited && waits(&call) && !call.contains("TARGET/status") {
                    continue;
                }
                has_waited |= waits(&call);
                all += &format!("    {call}\n");
            }
        }
    }
    all
}

// promise: Stopping and resuming: An attach makes exactly the system calls that it needs, in their
//    order (2, compared with a golden list)
#[test]
fn attach_makes_exactly_the_necessary_calls() {
    for file in fixture_forms("gen_ocaml_dot1") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let (run, traces) = run_under_strace("attach -quiet -format plain -enable-all", pid);
        assert_eq!(
            run.answer(),
            "first 0 -> 1, 2 sites\nsecond 0 -> 1, 1 site\n"
        );
        assert_eq!(traces.len(), 2, "one thread that traces");
        golden("system-calls-attach.txt", &all_calls(&traces, &file, pid));
        assert_eq!(states(pid), "first enabled\nsecond enabled\n");
    }
}

// promise: Live updates: A live attach traces nothing and writes one byte at a time (2, compared
//    with a golden list)
#[test]
fn live_attach_writes_one_byte_at_a_time() {
    for file in fixture_forms("gen_ocaml_dot1") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let (run, traces) = run_under_strace("attach -live -quiet -format plain -enable-all", pid);
        assert_eq!(
            run.answer(),
            "first 0 -> 1, 2 sites\nsecond 0 -> 1, 1 site\n"
        );
        let calls = all_calls(&traces, &file, pid);
        assert!(!calls.contains("ptrace("), "{calls}");
        golden("system-calls-attach-live.txt", &calls);
        assert_eq!(states(pid), "first enabled\nsecond enabled\n");
    }
}

// promise: Objects that come and go: `ps` reads each file once, however many processes run it (2 ×
//    1 and 21 processes)
#[test]
fn ps_reads_each_file_once() {
    let scratch = Scratch::new();
    for file in fixture_forms("gen_ocaml_2") {
        // One that no other test runs.
        let file = scratch.copy(&file, file.file_name().unwrap().to_str().unwrap());
        let reads = |processes: &[Talker]| {
            let log = scratch.file("calls");
            let mut strace = Command::new("strace");
            strace.args(["-f", "-y", "-qq", "-e", "trace=read,pread64,mmap", "-o"]);
            strace.arg(&log).arg(env!("CARGO_BIN_EXE_ocaml-probes"));
            let answer = run_command(strace.args(["ps", "-quiet"])).answer();
            let name = file.to_str().unwrap();
            let found = answer.lines().filter(|line| line.ends_with(name));
            assert_eq!(found.count(), processes.len(), "{answer}");
            let calls = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
            let path = format!("<{name}>");
            calls.lines().filter(|line| line.contains(&path)).count()
        };
        let mut processes = vec![Talker::start(&file)];
        let of_one = reads(&processes);
        processes.extend((0..20).map(|_| Talker::start(&file)));
        assert_eq!(reads(&processes), of_one);
        assert!(of_one > 0);
    }
}

// promise: Stopping and resuming: `info` traces nothing and writes nothing but its output (2,
//    compared with a golden list)
#[test]
fn info_traces_and_writes_nothing() {
    for file in fixture_forms("gen_ocaml_dot1") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let (run, traces) = run_under_strace("info -quiet", pid);
        assert_eq!(run.answer(), "first disabled\nsecond disabled\n");
        assert_eq!(traces.len(), 1, "no thread but its own");
        for call in traces[0].lines().filter_map(Call::parse) {
            let harmful = [
                "ptrace",
                "kill",
                "pwrite",
                "writev",
                "process_vm_writev",
                "tgkill",
            ];
            assert!(
                !harmful.iter().any(|name| call.name.starts_with(name)),
                "{}",
                call.summary()
            );
            let is_answer = call.is_answer();
            assert!(call.name != "write" || is_answer, "{}", call.summary());
            for flag in ["O_RDWR", "O_WRONLY", "O_CREAT"] {
                assert!(!call.arguments.contains(flag), "{}", call.summary());
            }
        }
        golden("system-calls-info.txt", &all_calls(&traces, &file, pid));
    }
}
