//! `attach -follow` of processes that fork, execute, load and start threads all the time. It is killed
//! or told to end at any moment, or its calls fail: the process goes on, with all its children, and
//! nobody traces it.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, State};
use test_support::process::is_loader_changed;
use test_support::{Guard, Scratch, Talker, eventually, fixture, fixture_forms};

use crate::case::Case;
use crate::subject::{Subject, after, is_traced};
use crate::tool;

/// Followers of each program that are killed or told to end, in the short form.
const LEAST: usize = 30;

/// How long the longest of them follows.
const LONGEST: Duration = Duration::from_millis(25);

fn follow(pid: i32, action: Action, force: bool) -> Command {
    let mut command = tool::attach(pid, action, force);
    command.arg("-follow");
    command
}

/// What is done to a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    Told,
}

/// A follower that has begun, or has failed to.
fn begin(pid: i32, action: Action, force: bool) -> Guard {
    let mut tool = Guard::spawn(&mut follow(pid, action, force));
    eventually("the tool traces the process, or ends", || {
        (is_traced(pid) || !tool.is_running()).then_some(())
    });
    tool
}

/// Ends a follower at any moment; `None` if it has failed to begin.
fn end_at_random(case: &mut Case, pid: i32, mut tool: Guard) -> Option<End> {
    let end = match case.random(3) {
        0 => End::Told,
        _ => End::Killed,
    };
    let longest = [LONGEST / 10, LONGEST][case.random(2) as usize];
    let delay = Duration::from_nanos(case.random(longest.as_nanos() as u64));
    let begun = Instant::now();
    while begun.elapsed() < delay {
        std::hint::spin_loop();
    }
    let signal = match end {
        End::Killed => Signal::SIGKILL,
        End::Told => Signal::SIGTERM,
    };
    let _ = kill(Pid::from_raw(tool.pid()), signal);
    let status = tool.wait();
    eventually("nobody traces it", || (!is_traced(pid)).then_some(()));
    match (end, status.code()) {
        (End::Killed, None) => case.count("followers killed"),
        (End::Told, Some(0)) => case.count("followers told to end"),
        // It did not stop in time.
        (_, Some(1)) => {
            case.count("followers that could not begin");
            return None;
        }
        other => panic!("{other:?}: {status}"),
    }
    Some(end)
}

/// Many followers of one process, which runs on.
fn meet_many(case: &mut Case, subject: &mut Subject, followers: usize) {
    let mut begun = 0;
    while begun < followers {
        let states = subject.truth();
        let has = |expected| states.values().any(|&(_, state)| state == expected);
        let action = match has(State::Disabled) {
            true => Action::Enable,
            false => Action::Disable,
        };
        // Objects that were loaded unfollowed are not as the others.
        let tool = begin(subject.pid(), action, true);
        if let Some(end) = end_at_random(case, subject.pid(), tool) {
            begun += 1;
            let is_changed = is_loader_changed(subject.pid());
            assert!(end == End::Killed || !is_changed, "its loader is as it was");
            case.add("followers that left a stub", u64::from(is_changed));
        }
        subject.assert_released();
        let is_half = has(State::Inconsistent);
        case.add("followers that left half an update", u64::from(is_half));
    }
    subject.go_round();
    // Whatever they have left, the next one takes away.
    let mut last = Guard::spawn(&mut follow(subject.pid(), Action::Enable, true));
    eventually("its loader is watched", || {
        (is_traced(subject.pid()) && is_loader_changed(subject.pid())).then_some(())
    });
    tell_to_end(&mut last);
    assert!(!is_loader_changed(subject.pid()), "its loader is as it was");
    let states = subject.truth();
    assert!(states.values().all(|&state| state == after(Action::Enable)));
    subject.go_round();
}

fn tell_to_end(follower: &mut Guard) {
    kill(Pid::from_raw(follower.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(follower.wait().code(), Some(0));
}

/// `host` with threads that load and unload an object each, all the time.
fn churning_host(file: &Path, folder: &Scratch) -> Subject {
    let mut host = Subject::start(file, [] as [&str; 0]);
    for number in 0..3 {
        let plugin = folder.copy(&fixture("objects/plugin.so"), &format!("{number}.so"));
        let line = format!("churner {}", plugin.display());
        host.talker.ask(&line, "churner");
    }
    host
}

/// A program that executes itself all the time.
struct Executing(Talker);

impl Executing {
    fn start(file: &Path, folder: &Scratch) -> Executing {
        Executing(Talker::start_with(file, [folder.file("state")]))
    }

    /// Has it begin, or go on.
    fn go(&mut self) {
        self.0.ask("go", "going");
    }

    /// Images so far, and those that have run no handler. It stands still meanwhile.
    fn report(&mut self) -> [u64; 2] {
        let report = self.0.ask("report", "ready");
        assert_eq!(report, "ready");
        let report = self.0.expect("report");
        let mut words = report.split(' ').skip(1).map(|word| word.parse().unwrap());
        [words.next().unwrap(), words.next().unwrap()]
    }

    /// Waits until there have been so many more.
    fn go_on(&mut self, more: u64) {
        let [then, _] = self.report();
        eventually("it executes itself again and again", || {
            self.go();
            std::thread::yield_now();
            (self.report()[0] >= then + more).then_some(())
        });
    }
}

#[test]
fn a_follower_that_ends_at_any_moment_leaves_processes_that_go_on_with_all_their_children() {
    let mut case = Case::begin("followers killed at any moment", 15);
    let mut rounds = 0;
    while case.goes_on(rounds, 1) {
        for name in ["fork_storm", "churn"] {
            for file in fixture_forms(name) {
                let mut subject = Subject::start(&file, [] as [&str; 0]);
                meet_many(&mut case, &mut subject, LEAST);
                subject.end();
            }
        }
        for file in fixture_forms("objects/host") {
            let folder = Scratch::new();
            let mut host = churning_host(&file, &folder);
            meet_many(&mut case, &mut host, LEAST);
            host.end();
        }
        for file in fixture_forms("exec_storm") {
            let folder = Scratch::new();
            let mut executing = Executing::start(&file, &folder);
            let pid = executing.0.pid();
            for _ in 0..LEAST {
                let tool = begin(pid, Action::Enable, false);
                eventually("its loader is watched", || {
                    is_loader_changed(pid).then_some(())
                });
                executing.go();
                assert!(end_at_random(&mut case, pid, tool).is_some());
                executing.go_on(2);
            }
            executing.0.hang_up();
            assert!(executing.0.guard().wait().success());
        }
        rounds += 1;
    }
    assert!(case.counted("followers told to end") > 0);
}
