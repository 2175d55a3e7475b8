//! `attach -for` is killed: before each of its system calls, before and within each of its writes. Then
//! `attach -release-dead` undoes what it had changed, and nothing else.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use probes_lib::{Action, State};
use test_support::process::settle;
use test_support::{Guard, eventually, fixture_forms};

use crate::case::Case;
use crate::subject::{States, Subject, all};
use crate::tool;

/// A fault that no tool reaches.
const NEVER_KILLED: &str = "kill:1000000";

fn run(line: &str) -> bool {
    let mut tool = tool::start(tool::command(line), NEVER_KILLED);
    tool.wait().success()
}

/// The states with `more` added to each counter.
fn plus(states: &States, more: u16) -> States {
    let plus = |(name, &(counter, _)): (&String, &(u16, State))| {
        (name.clone(), (counter + more, State::Enabled))
    };
    states.iter().map(plus).collect()
}

/// Kills an `attach -for` with `flags` by `fault`, releases what it held, and asserts that all is as before.
/// With `other`, another tool enables all probes in between. Returns whether it was killed.
fn kill_and_release(
    case: &mut Case,
    subject: &mut Subject,
    flags: &str,
    fault: &str,
    other: bool,
) -> bool {
    let pid = subject.pid();
    let what = format!("{fault} of {flags} of {}", subject.file.display());
    let before = subject.states();
    let line = format!("attach -pid {pid} {flags} -for 1ms");
    let status = tool::start(tool::command(&line), fault).wait();
    subject.assert_released();
    settle(pid);
    let left = subject.states();
    assert_eq!(tool::info(subject), left, "{what}");
    let is_killed = status.signal() == Some(Signal::SIGKILL as i32);
    assert!(is_killed || status.success(), "{what}: {status}");
    let has_enabled = other && run(&format!("attach -pid {pid} -enable-all"));
    let is_released = run(&format!("attach -pid {pid} -release-dead"));
    assert!(is_released, "{what}: {left:?}");
    let expected = if has_enabled {
        plus(&before, 1)
    } else {
        before.clone()
    };
    assert_eq!(subject.states(), expected, "{what}: {left:?}");
    if has_enabled {
        subject.apply(&all(Action::Disable));
    }
    subject.run();
    if is_killed {
        case.count(if left == before {
            "killed: nothing was held"
        } else if left
            .values()
            .any(|&(_, state)| state == State::Inconsistent)
        {
            "killed: half changed"
        } else {
            "killed: held"
        });
        case.add("killed: then enabled by another", u64::from(has_enabled));
    }
    is_killed
}

fn kill_at_each(case: &mut Case, subject: &mut Subject, flags: &str, fault: &str, other: bool) {
    let mut killed = 0;
    while kill_and_release(
        case,
        subject,
        flags,
        &format!("{fault}:{}", killed + 1),
        other,
    ) {
        killed += 1;
    }
    assert!(killed >= 2, "{fault}: {killed} killed");
}

fn kill_in_every_way(case: &mut Case, file: PathBuf, fault: &str) {
    let mut subject = Subject::start(&file, [] as [&str; 0]);
    kill_at_each(case, &mut subject, "-enable-all", fault, true);
    kill_at_each(case, &mut subject, "-live -enable-all", fault, false);
    if case.is_long() {
        kill_at_each(case, &mut subject, "-enable-all", fault, false);
        kill_at_each(case, &mut subject, "-live -enable-all", fault, true);
    }
    // A living holder keeps what it holds.
    let line = format!("attach -pid {} -enable-all -for 1h", subject.pid());
    let held = plus(&subject.states(), 1);
    let mut living = Guard::spawn(&mut tool::command(&line));
    let one = |states: &States| states.values().all(|&state| state == (1, State::Enabled));
    assert!(one(&held));
    eventually("it holds", || {
        // Read by another process: the holder may be writing.
        (tool::info(&subject) == held).then_some(())
    });
    kill_at_each(case, &mut subject, "-disable-all", fault, false);
    if case.is_long() {
        kill_at_each(case, &mut subject, "-enable-all", fault, false);
    }
    assert_eq!(subject.states(), held);
    living.child().kill().unwrap();
    living.wait();
    assert!(run(&format!("attach -pid {} -release-dead", subject.pid())));
    subject.assert_all((0, State::Disabled), "undone");
    subject.end();
}

// promise: Death of the tool: If an `attach -for` is killed before any of its system calls, `-release-dead` undoes
//    what it holds, and nothing else (about 1,100 kills, half of them while others enable or hold the
//    same probes)
#[test]
fn hold_killed_before_each_call_is_undone() {
    let mut case = Case::begin("holds, killed before each call", 5);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("multi_semaphore") {
            kill_in_every_way(&mut case, file, "kill");
        }
        rounds += 1;
    }
    assert!(case.counted("killed: held") > 0);
}

// promise: Death of the tool: If an `attach -for` is killed before or within any of its writes, `-release-dead` undoes
//    what it holds, and nothing else (164 kills)
#[test]
fn hold_killed_within_each_write_is_undone() {
    let mut case = Case::begin("holds, killed before or within each write", 3);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for fault in ["kill-write", "kill-within"] {
            for file in fixture_forms("multi_semaphore") {
                kill_in_every_way(&mut case, file, fault);
            }
        }
        rounds += 1;
    }
    assert!(case.counted("killed: half changed") > 0);
}
