//! Processes that are followed, and lent to tools that observe them: whatever happens to the follower or the tool
//! meanwhile, the process runs on.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::process::{self, status};
use test_support::{Guard, Talker, eventually, fixture, fixture_forms};

use crate::count::{end, start_observing};
use crate::follow::{Following, OFF, assert_left_alone, quit};
use crate::support::{command, is_observed, run, states};

/// What happens while a process is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accident {
    FollowerKilled,
    /// It is stopped until the tool has given up.
    FollowerSilent,
    ToolKilled,
    /// It is stopped, and continued later.
    ToolSilent,
    /// They are stopped, and continued later, like a job of the shell.
    BothSilent,
}

/// Longer than a tool waits for its follower.
const LONG_SILENCE: Duration = Duration::from_secs(7);

/// How long it may take until a process is seen while it is lent.
const LENDING_LIMIT: Duration = Duration::from_secs(120);

/// Stops the process `tool` with a signal; returns whether the process `pid`, which is lent, is then stopped, and so
/// stays for as long as the other tool waits. If not, `tool` is continued.
fn stop_while_lent(tool: i32, pid: i32) -> bool {
    let send = |signal| kill(Pid::from_raw(tool), signal).unwrap();
    send(Signal::SIGSTOP);
    // It may have exited.
    let is_still = |tid: &i32| matches!(process::state(*tid), Some('T' | 'Z') | None);
    eventually("all its threads are stopped", || {
        process::threads(tool).iter().all(is_still).then_some(())
    });
    let is_lent = process::state(tool) == Some('T') && process::state(pid) == Some('t');
    if !is_lent {
        send(Signal::SIGCONT);
    }
    is_lent
}

/// Follows a process and observes it again and again, until it is stopped for an observer; then the accident happens.
/// Asserts that each observer has succeeded, or said why it has not. Returns whether the last one has not succeeded.
fn end_lending_by(accident: Accident, talker: &mut Talker) -> bool {
    let lost = if accident == Accident::FollowerSilent {
        "is followed by a tool that does not answer, and may be stopped until that does"
    } else {
        "was resumed too early: the tool that follows it has exited"
    };
    let pid = talker.pid();
    let begun = Instant::now();
    let mut attach = command(["attach", "-follow", "-enable-all", "-pid"]);
    let mut following = Following::started(attach.arg(pid.to_string()), pid);
    let follower = following.0.pid();
    let resume = |tool| kill(Pid::from_raw(tool), Signal::SIGCONT).unwrap();
    // It prints what it has changed once it follows. Its loader may be hooked since an earlier follower was killed.
    following.0.expect(&format!("{pid} pong"));
    eventually("it runs", || {
        (process::state(pid) != Some('t')).then_some(())
    });
    assert_ne!(status(pid, "TracerPid"), "0");
    let mut has_happened = false;
    let mut has_failed = false;
    while !has_happened {
        assert!(
            begun.elapsed() < LENDING_LIMIT,
            "never seen while it was lent"
        );
        let mut observer = command(["count", "-quiet", "-for", "1ms", "-pid"]);
        observer.arg(pid.to_string()).stdout(Stdio::null());
        let mut observer = Guard::spawn(observer.stderr(Stdio::piped()));
        let victim = match accident {
            Accident::FollowerKilled | Accident::FollowerSilent | Accident::BothSilent => follower,
            Accident::ToolKilled | Accident::ToolSilent => observer.pid(),
        };
        while observer.is_running() && !has_happened {
            if process::state(pid) != Some('t') || !stop_while_lent(victim, pid) {
                std::thread::yield_now();
                continue;
            }
            has_happened = true;
            match accident {
                Accident::FollowerKilled => following.0.guard().child().kill().unwrap(),
                Accident::ToolKilled => observer.child().kill().unwrap(),
                Accident::FollowerSilent => {
                    observer.wait();
                    resume(follower);
                }
                Accident::ToolSilent => {
                    talker.hits();
                    resume(observer.pid());
                }
                Accident::BothSilent => {
                    let send = |signal| kill(Pid::from_raw(observer.pid()), signal).unwrap();
                    send(Signal::SIGSTOP);
                    std::thread::sleep(LONG_SILENCE);
                    send(Signal::SIGCONT);
                    resume(follower);
                }
            }
        }
        let status = observer.wait();
        let mut said = String::new();
        let stderr = observer.child().stderr.as_mut().unwrap();
        stderr.read_to_string(&mut said).unwrap();
        let is_killed = accident == Accident::ToolKilled && status.signal().is_some();
        let is_reported = has_happened && said.contains(lost);
        assert!(
            status.success() || is_killed || is_reported,
            "{accident:?}, has happened: {has_happened}; {status}; {said}"
        );
        has_failed = !status.success();
    }
    if accident == Accident::FollowerKilled {
        following.0.guard().wait();
    } else {
        assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
        talker.expect("started 0");
        following.end();
    }
    has_failed
}

/// Asserts that a process answers and that what a killed tool has left can be removed.
fn assert_runs_and_can_be_cleaned(talker: &mut Talker) {
    let pid = talker.pid();
    talker.hits();
    assert_eq!(status(pid, "TracerPid"), "0");
    run(&format!("observe -clean -quiet -pid {pid}")).answer();
    assert!(!is_observed(pid));
    // The probes stay as the follower has set them.
    run(&format!("attach -quiet -disable-all -pid {pid}")).answer();
    assert_eq!(states(pid), OFF);
}

/// Repeats the accident at least `times` times, and until an observer fails: an observer that has only to resume the
/// process succeeds.
fn end_lendings_by(accident: Accident, times: usize, talker: &mut Talker) {
    let mut has_failed = false;
    let mut done = 0;
    while done < times || !has_failed {
        assert!(done < times + 20, "no observer has failed");
        has_failed |= end_lending_by(accident, talker);
        assert_runs_and_can_be_cleaned(talker);
        done += 1;
    }
}

// promise: Following: If the follower is killed while it lends a process, the process runs on, and what is left
//    can be removed (2 × 10 kills)
#[test]
fn killed_follower_leaves_lent_process_running() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        end_lendings_by(Accident::FollowerKilled, 10, &mut talker);
        quit(talker);
    }
}

// promise: Following: If a tool is killed while a followed process is lent to it, the process runs on and is still
//    followed (2 × 10 kills)
#[test]
fn killed_tool_leaves_lent_process_running() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        for _ in 0..10 {
            assert!(end_lending_by(Accident::ToolKilled, &mut talker));
            assert_runs_and_can_be_cleaned(&mut talker);
        }
        assert_left_alone(talker.pid());
        quit(talker);
    }
}

// promise: Following: If a tool is silent while a followed process is lent to it, the process runs on and is still
//    followed (2 × 3 times)
#[test]
fn silent_tool_leaves_lent_process_running() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        end_lendings_by(Accident::ToolSilent, 3, &mut talker);
        assert_left_alone(talker.pid());
        quit(talker);
    }
}

#[test]
fn tool_stopped_with_its_follower_reports_no_error() {
    let mut talker = Talker::start(&fixture("family.pie"));
    for _ in 0..3 {
        end_lending_by(Accident::BothSilent, &mut talker);
        assert_runs_and_can_be_cleaned(&mut talker);
    }
    assert_left_alone(talker.pid());
    quit(talker);
}

#[test]
fn silent_follower_leaves_lent_process_running() {
    let mut talker = Talker::start(&fixture("family.pie"));
    end_lendings_by(Accident::FollowerSilent, 1, &mut talker);
    assert_left_alone(talker.pid());
    quit(talker);
}

#[test]
fn observation_outlives_its_follower() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        let pid = talker.pid();
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let mut following = Following::attach(pid);
            let count = start_observing("count -quiet", pid);
            kill(Pid::from_raw(following.0.pid()), signal).unwrap();
            following.0.guard().wait();
            talker.hits();
            let lines = end(count, Signal::SIGINT);
            assert!(lines[0].starts_with("3 "), "{lines:?}");
            assert!(!is_observed(pid));
        }
        quit(talker);
    }
}
