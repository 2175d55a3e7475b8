//! Two tools, or three tools and two threads of this process, update one process at once: each makes its whole update,
//! or fails with the pid of the tool that holds the update lock or traces the process.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::sync::Mutex;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, Denial, ErrorKind, ProcessError, State, Target};
use test_support::process::state;
use test_support::{Guard, eventually, fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, state_after};
use crate::tool;

/// Updates of each tool.
const UPDATES: u16 = 20;

/// The tools that ran at once.
#[derive(Default)]
struct Tools {
    pids: Vec<i32>,
    /// The pids that error messages named.
    named: Vec<i32>,
}

/// Waits for a tool that enables every probe. If another tool kept it from doing so, the error is the pid and name of
/// that tool. If threads did not stop in time, as there may be more than processors, it is the pid 0 and the message.
fn wait_for_enable(tool: &mut Guard) -> Result<(), (i32, String)> {
    let mut error = String::new();
    let mut stderr = tool.child().stderr.take().unwrap();
    stderr.read_to_string(&mut error).unwrap();
    if tool.wait().success() {
        return Ok(());
    }
    if error.contains("; the process was resumed; it is safe to retry; nothing was changed") {
        return Err((0, error));
    }
    let words = ["is being changed by pid ", "is already traced by pid "];
    let said = words.iter().find_map(|words| error.split_once(words));
    let (_, named) = said.unwrap_or_else(|| panic!("{error}"));
    let (pid, name) = named.split_once(" (").unwrap();
    let (name, _) = name.split_once(')').unwrap();
    Err((pid.parse().unwrap(), name.to_owned()))
}

fn spawn_enable(pid: i32) -> Guard {
    Guard::spawn(tool::attach(pid, Action::Enable, false).stderr(Stdio::piped()))
}

/// Runs one tool after the other, until [`UPDATES`] of them have done their update.
fn run_tools(pid: i32, ran: &Mutex<Tools>) {
    let mut done = 0;
    while done < UPDATES {
        let mut tool = spawn_enable(pid);
        ran.lock().unwrap().pids.push(tool.pid());
        match wait_for_enable(&mut tool) {
            Ok(()) => done += 1,
            Err((0, _)) => {}
            Err((tracer, name)) => {
                assert!(!name.is_empty());
                ran.lock().unwrap().named.push(tracer);
            }
        }
    }
}

/// Makes [`UPDATES`] updates in the same way, by this process itself.
fn run_updates(pid: i32, ran: &Mutex<Tools>) {
    let mut done = 0;
    while done < UPDATES {
        let target = Target::open(pid).unwrap();
        let Err(error) = target.update(&all(Action::Enable)) else {
            done += 1;
            continue;
        };
        match error.kind() {
            ErrorKind::Process(ProcessError::Denied {
                denial:
                    Denial::Traced { tracer: tool, .. } | Denial::BeingChanged { updater: tool, .. },
                ..
            }) => ran.lock().unwrap().named.push(*tool),
            ErrorKind::Process(ProcessError::Busy { .. })
            | ErrorKind::Process(ProcessError::ThreadsKeepStarting { .. }) => {}
            _ => panic!("{error}"),
        }
    }
}

/// Runs this many tools, and threads of this process, at once on one target, and undoes what they did.
fn run_at_once(case: &mut Case, file: &Path, args: &[&str], tools: usize, threads: usize) {
    let subject = Subject::start(file, args);
    let pid = subject.pid();
    let ran = Mutex::new(Tools::default());
    thread::scope(|scope| {
        for _ in 0..tools {
            scope.spawn(|| run_tools(pid, &ran));
        }
        for _ in 0..threads {
            scope.spawn(|| run_updates(pid, &ran));
        }
    });
    let ran = ran.into_inner().unwrap();
    let is_known = |pid: &i32| ran.pids.contains(pid) || *pid == std::process::id() as i32;
    assert!(ran.named.iter().all(is_known), "{:?}", ran.named);
    let updates = UPDATES * (tools + threads) as u16;
    subject.assert_all((updates, State::Enabled), "after all");
    for _ in 0..updates {
        subject.apply(&all(Action::Disable));
    }
    subject.assert_all((0, State::Disabled), "all undone");
    case.add("updates made by several at once", updates.into());
    case.add("refused, naming the other tool", ran.named.len() as u64);
    subject.end();
}

// promise: Other tracers and tools: Two or five tools at once: each makes its whole update or names
//    the tool that updates or traces the process, and the counters add up (840 updates)
#[test]
fn no_update_of_concurrent_tools_is_lost() {
    let mut case = Case::begin("two and five tools at once", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (tools, threads) in [(2, 0), (3, 2)] {
            for file in fixture_forms("gen_ocaml_2_static") {
                run_at_once(&mut case, &file, &[], tools, threads);
            }
            for file in fixture_forms("threads_spin") {
                run_at_once(&mut case, &file, &["2"], tools, threads);
            }
            for file in program_forms("threads") {
                run_at_once(&mut case, &file, &["2"], tools, threads);
            }
        }
        rounds += 1;
    }
}

// promise: Other tracers and tools: A tool that is stopped in the middle of its update is named by
//    the others, and finishes when it is resumed (stopped before each write)
#[test]
fn tool_stopped_amid_its_update_is_named() {
    let mut case = Case::begin("one tool is stopped, others come", 2);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("multi_semaphore") {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            let mut stops = 0;
            for nth in 1.. {
                let fault = format!("stop-write:{nth}");
                let attach = tool::attach(subject.pid(), Action::Enable, false);
                let mut first = tool::start(attach, &fault);
                let is_stopped = eventually("the first tool is stopped, or has exited", || {
                    let is_over = !first.is_running();
                    let is_stopped = !is_over && state(first.pid()) == Some('T');
                    (is_over || is_stopped).then_some(is_stopped)
                });
                if !is_stopped {
                    subject.apply(&all(Action::Disable));
                    break;
                }
                stops += 1;
                let mut others: Vec<Guard> = (0..3).map(|_| spawn_enable(subject.pid())).collect();
                for other in &mut others {
                    let expected = (first.pid(), "ocaml-probes".to_owned());
                    assert_eq!(wait_for_enable(other), Err(expected), "{fault}");
                    case.count("refused, naming the other tool");
                }
                kill(Pid::from_raw(first.pid()), Signal::SIGCONT).unwrap();
                assert!(first.wait().success(), "{fault}");
                subject.assert_all(state_after(Action::Enable), &fault);
                assert!(subject.run() > 0);
                subject.apply(&all(Action::Disable));
            }
            assert!(stops > 1, "it was stopped before {stops} writes");
            subject.end();
        }
        rounds += 1;
    }
}
