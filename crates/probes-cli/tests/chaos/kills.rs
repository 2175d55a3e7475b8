//! The tool is killed: before each of its system calls, before and within each of its writes,
//! and at any time. The process runs on, `info` reports its state, and `attach -force` repairs it.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use probes_lib::{Action, State};
use test_support::process::settle;
use test_support::{DEADLINE, Guard, eventually, fixture_forms, program_forms};

use crate::case::Case;
use crate::storm::Storm;
use crate::subject::{Subject, all, is_traced, state_after};
use crate::tool;

/// How many tools are killed at a random moment, at least, in the short form of the test.
const MIN_KILLS: usize = 500;

/// A fault that no tool reaches.
const NEVER_KILLED: &str = "kill:1000000";

/// Longer than an update takes.
const UPDATE: Duration = Duration::from_micros(400);

fn opposite(action: Action) -> Action {
    match action {
        Action::Enable => Action::Disable,
        Action::Disable => Action::Enable,
    }
}

/// Runs a tool that switches every probe, with `fault`, checks the state that it leaves, repairs
/// the process and undoes the change. Returns whether the tool was killed.
fn kill_check_and_repair(
    case: &mut Case,
    subject: &mut Subject,
    action: Action,
    fault: &str,
) -> bool {
    let what = format!("{fault} of {action:?} of {}", subject.file.display());
    let mut tool = tool::start(tool::attach(subject.pid(), action, false), fault);
    let status = tool.wait();
    subject.assert_released();
    settle(subject.pid());
    let states = subject.states();
    assert_eq!(tool::info(subject), states, "{what}");
    let has = |expected| states.values().all(|&state| state == expected);
    let half = states
        .values()
        .any(|&(_, state)| state == State::Inconsistent);
    if status.success() {
        assert!(has(state_after(action)), "{what}: {states:?}");
    } else {
        assert_eq!(
            status.signal(),
            Some(Signal::SIGKILL as i32),
            "{what}: {status}"
        );
        case.count(match () {
            () if half => "killed: half changed",
            () if has(state_after(action)) => "killed: done",
            () if has(state_after(opposite(action))) => "killed: nothing changed",
            () => "killed: some probes changed, each whole",
        });
    }
    if half {
        // An update without force is refused, and changes nothing.
        let mut refused = tool::start(tool::attach(subject.pid(), action, false), NEVER_KILLED);
        assert_eq!(refused.wait().code(), Some(1), "{what}");
        assert_eq!(subject.states(), states, "{what}");
    }
    subject.run();
    let mut repair = tool::start(tool::attach(subject.pid(), action, true), NEVER_KILLED);
    assert!(repair.wait().success(), "{what}");
    subject.assert_all(state_after(action), &what);
    assert_eq!(subject.run() > 0, action == Action::Enable, "{what}");
    subject.apply(&all(opposite(action)));
    !status.success()
}

fn kill_at_each(case: &mut Case, files: impl IntoIterator<Item = PathBuf>, fault: &str) {
    for file in files {
        let mut subject = Subject::start(&file, [] as [&str; 0]);
        for action in [Action::Enable, Action::Disable] {
            let mut killed = 0;
            while kill_check_and_repair(
                case,
                &mut subject,
                action,
                &format!("{fault}:{}", killed + 1),
            ) {
                killed += 1;
            }
            assert!(killed > 2, "{fault}: {killed} killed");
            subject.apply(&all(action));
        }
        subject.end();
    }
}

// promise: Death of the tool: A tool killed before any of its system calls leaves a process that
//    runs on and is whole or can be repaired (about 240 kills)
#[test]
fn kill_before_each_call_leaves_a_repairable_process() {
    let mut case = Case::begin("killed before each call", 5);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        kill_at_each(&mut case, fixture_forms("multi_semaphore"), "kill");
        if case.is_long() {
            kill_at_each(&mut case, program_forms("twolibs"), "kill");
        }
        rounds += 1;
    }
}

// promise: Death of the tool: A tool killed before or within any of its writes leaves a state that
//    `info` shows, other updates refuse and `-force` repairs (96 kills, half of them leave
//    an update half done)
#[test]
fn kill_within_each_write_leaves_a_repairable_process() {
    let mut case = Case::begin("killed before or within each write", 5);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for fault in ["kill-write", "kill-within"] {
            kill_at_each(&mut case, fixture_forms("segments"), fault);
            kill_at_each(&mut case, program_forms("many"), fault);
            if case.is_long() {
                kill_at_each(&mut case, fixture_forms("page_borders"), fault);
                kill_at_each(&mut case, fixture_forms("multi_semaphore"), fault);
            }
        }
        rounds += 1;
    }
    assert!(case.counted("killed: half changed") > 0);
}

/// Busy-waits: the moments that count here are microseconds apart.
fn spin_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < DEADLINE, "still waiting until {what}");
        std::hint::spin_loop();
    }
}

/// Starts a tool that switches all probes from their present state.
fn spawn_switch(subject: &Subject, states: &crate::subject::States) -> Guard {
    let is_half = states
        .values()
        .any(|&(_, state)| state == State::Inconsistent);
    let is_on = states.values().all(|&(_, state)| state == State::Enabled);
    let action = if is_on {
        Action::Disable
    } else {
        Action::Enable
    };
    Guard::spawn(&mut tool::attach(subject.pid(), action, is_half))
}

/// Kills `tools` tools that change a process whose threads never pause: alternately at a random
/// time of the tool's whole run, and at a random time after it has begun to trace the process.
fn kill_at_random(case: &mut Case, subject: &mut Subject, tools: usize) {
    let pid = subject.pid();
    let started = Instant::now();
    spawn_switch(subject, &subject.states()).wait();
    let run = started.elapsed();
    let (mut killed, mut tried) = (0, 0);
    while killed < tools {
        tried += 1;
        assert!(
            tried < 20 * tools,
            "only {killed} of {tried} tools were killed before they exited"
        );
        let mut tool = spawn_switch(subject, &subject.states());
        let mut longest = run;
        if tried % 2 == 1 {
            spin_until("the tool traces the process, or ends", || {
                is_traced(pid) || !tool.is_running()
            });
            longest = UPDATE;
        }
        let delay = Duration::from_nanos(case.random(longest.as_nanos() as u64));
        let started = Instant::now();
        spin_until("it is time", || started.elapsed() >= delay);
        let is_in_update = is_traced(pid);
        tool.child().kill().unwrap();
        let status = tool.wait();
        subject.assert_released();
        // Not each time: an OCaml thread that never pauses seldom lets the answering thread run.
        if tried % 10 == 0 {
            subject.talker.ask("report", "report");
        }
        let states = subject.states();
        if status.signal() != Some(Signal::SIGKILL as i32) {
            case.count("exited before the kill");
            continue;
        }
        killed += 1;
        case.count("killed at random");
        case.add("killed at random, in an update", u64::from(is_in_update));
        let half = states
            .values()
            .any(|&(_, state)| state == State::Inconsistent);
        case.add("killed at random, half changed", u64::from(half));
        if half || killed % 25 == 0 {
            assert_eq!(tool::info(subject), states);
        }
    }
    for action in [Action::Enable, Action::Disable] {
        // Some thread may not stop in the time that the tool has.
        eventually("it is repaired", || {
            let mut repair = Guard::spawn(&mut tool::attach(pid, action, true));
            repair.wait().success().then_some(())
        });
        subject.assert_all(state_after(action), "forced");
    }
}

// promise: Signals: Signals that the tool holds when it is killed are delivered once and in order
//    (504 kills)
// promise: Death of the tool: A tool killed at any moment leaves a process that runs on and can be
//    repaired (504 kills)
#[test]
fn kill_at_any_moment_leaves_a_repairable_process() {
    let mut case = Case::begin("killed at any moment", 15);
    let stormy = || -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fixture_forms("threads_spin").into();
        files.extend(program_forms("threads"));
        files
    };
    let churning = || {
        fixture_forms("churn")
            .into_iter()
            .chain(fixture_forms("churn_1000"))
    };
    let each = MIN_KILLS.div_ceil(stormy().len() + churning().count());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in stormy() {
            let (mut storm, mut subject) = Storm::start(&file, "3");
            kill_at_random(&mut case, &mut subject, each);
            storm.end(&mut case);
            subject.end();
        }
        for file in churning() {
            let mut subject = Subject::start(&file, [] as [&Path; 0]);
            kill_at_random(&mut case, &mut subject, each);
            subject.wait_for_round();
            subject.end();
        }
        rounds += 1;
    }
    assert!(case.counted("killed at random, in an update") > 0);
}
