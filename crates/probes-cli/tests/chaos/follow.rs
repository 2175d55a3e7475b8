//! `attach -follow` of processes that fork, exec, load objects and start threads all the time. The
//! tool is killed or interrupted at a random moment, or its system calls fail: the process runs on,
//! with all its children, and is not traced any more.

use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, State};
use test_support::process::{descriptors, is_loader_changed, status};
use test_support::{DEADLINE, Guard, Scratch, Talker, eventually, fixture, fixture_forms};

use crate::case::Case;
use crate::storm::Storm;
use crate::subject::{Subject, is_traced, state_after};
use crate::tool;

/// Followers of each program that are killed or interrupted, in the short form.
const FOLLOWERS: usize = 25;

/// The longest time that a follower follows.
const LONGEST: Duration = Duration::from_millis(25);

/// Faults of each kind, in the short form.
const FAULTS: u64 = 12;

fn follow(pid: i32, action: Action, force: bool) -> Command {
    let mut command = tool::attach(pid, action, force);
    command.arg("-follow");
    command
}

/// How a follower ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    Interrupted,
}

/// Starts a follower; returns once it traces the process, or has exited because it could not start.
fn start_follower(pid: i32, action: Action, force: bool) -> Guard {
    let mut tool = Guard::spawn(&mut follow(pid, action, force));
    wait_until_begun(pid, &mut tool);
    tool
}

fn wait_until_begun(pid: i32, tool: &mut Guard) {
    eventually("the tool traces the process, or exits", || {
        (is_traced(pid) || !tool.is_running()).then_some(())
    });
}

/// Ends a follower at a random moment; returns `None` if it has failed to start.
fn end_at_random(case: &mut Case, pid: i32, mut tool: Guard) -> Option<End> {
    let end = match case.random(3) {
        0 => End::Interrupted,
        _ => End::Killed,
    };
    let longest = [LONGEST / 10, LONGEST][case.random(2) as usize];
    let delay = Duration::from_nanos(case.random(longest.as_nanos() as u64));
    let started = Instant::now();
    while started.elapsed() < delay {
        std::hint::spin_loop();
    }
    let signal = match end {
        End::Killed => Signal::SIGKILL,
        End::Interrupted => Signal::SIGTERM,
    };
    let _ = kill(Pid::from_raw(tool.pid()), signal);
    let status = tool.wait();
    eventually("it is not traced", || (!is_traced(pid)).then_some(()));
    match (end, status.code()) {
        (End::Killed, None) => case.count("followers killed"),
        (End::Interrupted, Some(0)) => case.count("followers interrupted"),
        // The process did not stop in time: the follower failed to start.
        (_, Some(1)) => {
            case.count("followers that could not start");
            return None;
        }
        other => panic!("{other:?}: {status}"),
    }
    Some(end)
}

/// Starts and ends many followers of one process, and asserts that the process runs on.
fn follow_many_times(case: &mut Case, subject: &mut Subject, followers: usize) {
    let mut started = 0;
    while started < followers {
        let states = subject.states_in_memory();
        let has = |expected| states.values().any(|&(_, state)| state == expected);
        let action = if has(State::Disabled) {
            Action::Enable
        } else {
            Action::Disable
        };
        // Objects that were loaded while no tool followed have other states, hence -force.
        let tool = start_follower(subject.pid(), action, true);
        if let Some(end) = end_at_random(case, subject.pid(), tool) {
            started += 1;
            let is_changed = is_loader_changed(subject.pid());
            assert!(end == End::Killed || !is_changed, "its loader is as it was");
            case.add("followers that left a hook", u64::from(is_changed));
        }
        subject.assert_released();
        let mut states = subject.states_in_memory().into_values();
        let is_half = states.any(|(_, state)| state == State::Inconsistent);
        case.add("followers that left half an update", u64::from(is_half));
    }
    subject.wait_for_round();
    // The next follower removes whatever the earlier ones left behind.
    let mut last = Guard::spawn(&mut follow(subject.pid(), Action::Enable, true));
    eventually("its loader is hooked", || {
        (is_traced(subject.pid()) && is_loader_changed(subject.pid())).then_some(())
    });
    interrupt(&mut last);
    assert!(!is_loader_changed(subject.pid()), "its loader is as it was");
    let states = subject.states_in_memory();
    assert!(
        states
            .values()
            .all(|&state| state == state_after(Action::Enable))
    );
    subject.wait_for_round();
}

fn interrupt(follower: &mut Guard) {
    kill(Pid::from_raw(follower.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(follower.wait().code(), Some(0));
}

/// `host` with threads that load and unload an object each, all the time.
fn churning_host(file: &Path, directory: &Scratch) -> Subject {
    let mut host = Subject::start(file, [] as [&str; 0]);
    churn(&mut host, directory);
    host
}

fn churn(host: &mut Subject, directory: &Scratch) {
    for number in 0..3 {
        let plugin = directory.copy(&fixture("objects/plugin.so"), &format!("{number}.so"));
        let line = format!("churner {}", plugin.display());
        host.talker.ask(&line, "churner");
    }
}

/// A program that execs itself all the time.
struct Executing(Talker);

impl Executing {
    fn start(file: &Path, directory: &Scratch) -> Executing {
        Executing(Talker::start_with(file, [directory.file("state")]))
    }

    /// Makes it start, or continue.
    fn go(&mut self) {
        self.0.ask("go", "going");
    }

    /// Pauses the program; returns how many images it has executed so far, and how many of
    /// them have run no handler.
    fn halt(&mut self) -> [u64; 2] {
        let report = self.0.ask("report", "ready");
        assert_eq!(report, "ready");
        let report = self.0.expect("report");
        let mut words = report.split(' ').skip(1).map(|word| word.parse().unwrap());
        [words.next().unwrap(), words.next().unwrap()]
    }

    /// Pauses the program when it has executed at least `more` further images; returns what `halt`
    /// returns.
    fn halt_after(&mut self, more: u64) -> [u64; 2] {
        let [then, _] = self.halt();
        eventually("it executes itself again and again", || {
            self.go();
            std::thread::yield_now();
            let now = self.halt();
            (now[0] >= then + more).then_some(now)
        })
    }
}

// promise: Following: A follower that is killed or interrupted at any moment leaves processes that
//    run on, with all their children (200 followers of programs that fork, load, execute and start
//    threads all the time)
#[test]
fn processes_run_on_when_their_follower_ends() {
    let mut case = Case::begin("followers killed at any moment", 15);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for name in ["fork_storm", "churn"] {
            for file in fixture_forms(name) {
                let mut subject = Subject::start(&file, [] as [&str; 0]);
                follow_many_times(&mut case, &mut subject, FOLLOWERS);
                subject.end();
            }
        }
        for file in fixture_forms("objects/host") {
            let directory = Scratch::new();
            let mut host = churning_host(&file, &directory);
            follow_many_times(&mut case, &mut host, FOLLOWERS);
            host.end();
        }
        for file in fixture_forms("exec_storm") {
            let directory = Scratch::new();
            let mut executing = Executing::start(&file, &directory);
            let pid = executing.0.pid();
            for _ in 0..FOLLOWERS {
                let tool = start_follower(pid, Action::Enable, false);
                eventually("its loader is hooked", || {
                    is_loader_changed(pid).then_some(())
                });
                executing.go();
                assert!(end_at_random(&mut case, pid, tool).is_some());
                executing.halt_after(2);
            }
            executing.0.close_input();
            assert!(executing.0.guard().wait().success());
        }
        rounds += 1;
    }
    assert!(case.counted("followers interrupted") > 0);
}

/// A follower whose output is not read before it ends.
struct Follower {
    tool: Guard,
    answers: ChildStdout,
}

impl Follower {
    /// Starts a follower of a process whose loader is not hooked yet, and waits until it is hooked.
    fn of(pid: i32) -> Follower {
        let mut follow = follow(pid, Action::Enable, true);
        let mut tool = Guard::spawn(follow.stdout(Stdio::piped()));
        let answers = tool.child().stdout.take().unwrap();
        fcntl(&answers, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        wait_until_begun(pid, &mut tool);
        eventually("its loader is hooked", || {
            is_loader_changed(pid).then_some(())
        });
        Follower { tool, answers }
    }

    /// Its number of open descriptors, and KiB of memory.
    fn resources(&self) -> (usize, u64) {
        let resident = status(self.tool.pid(), "VmRSS");
        let resident = resident.split(' ').next().unwrap().parse().unwrap();
        (descriptors(self.tool.pid()).len(), resident)
    }

    /// Asserts that it has about as many descriptors and as much memory as before.
    #[track_caller]
    fn assert_resources(&self, (descriptors, resident): (usize, u64)) {
        // Up to 16 more may be open: those of children whose events have not been read yet.
        eventually("descriptors are closed", || {
            (self.resources().0 <= descriptors + 16).then_some(())
        });
        let now = self.resources().1;
        assert!(now < resident + 4096, "{resident} KiB, then {now} KiB");
    }

    fn end(mut self, pid: i32) {
        kill(Pid::from_raw(self.tool.pid()), Signal::SIGTERM).unwrap();
        eventually("it is not traced", || (!is_traced(pid)).then_some(()));
        std::io::copy(&mut self.answers, &mut std::io::sink()).unwrap();
        assert_eq!(self.tool.wait().code(), Some(0));
    }
}

/// Forks under one follower, in the short form; loads and execs are a quarter as many.
const FORKS: u64 = 1600;

// promise: Following: Nothing is missed in thousands of forks, loads and execs, and the tool's
//    memory and descriptors do not grow (3,200 forks, 800 loads by 3 threads, 800 execs)
// promise: Following: A followed process runs on though the follower's output is not read (400
//    execs, output to a pipe of 4 KiB, twice)
#[test]
fn thousands_of_forks_loads_and_execs_are_followed() {
    let mut case = Case::begin("followed without an end", 10);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("fork_storm") {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            let follower = Follower::of(subject.pid());
            let held = follower.resources();
            let many = wait_for_rounds(&mut subject, FORKS);
            case.add("forks followed", many);
            follower.assert_resources(held);
            follower.end(subject.pid());
            subject.end();
        }
        for file in fixture_forms("objects/host") {
            let directory = Scratch::new();
            let mut host = churning_host(&file, &directory);
            let follower = Follower::of(host.pid());
            // An object that was being loaded when the follower attached may be missed, but none that is
            // loaded after the next round.
            host.wait_for_round();
            let (held, missed) = (follower.resources(), host.talker.ask("missed", "missed"));
            case.add("loads followed", wait_for_rounds(&mut host, FORKS / 4));
            assert_eq!(host.talker.ask("missed", "missed"), missed);
            follower.assert_resources(held);
            follower.end(host.pid());
            host.end();
        }
        for file in fixture_forms("exec_storm") {
            let directory = Scratch::new();
            let mut executing = Executing::start(&file, &directory);
            let follower = Follower::of(executing.0.pid());
            let held = follower.resources();
            executing.go();
            let [images, without_hits] = executing.halt_after(FORKS / 4);
            assert_eq!(without_hits, 0, "of {images} images");
            case.add("execs followed", images);
            follower.assert_resources(held);
            follower.end(executing.0.pid());
            executing.0.close_input();
            assert!(executing.0.guard().wait().success());
        }
        rounds += 1;
    }
}

/// Waits until a program has done at least `more` further rounds; returns how many it has done.
fn wait_for_rounds(subject: &mut Subject, more: u64) -> u64 {
    let then = subject.rounds().iter().sum::<u64>();
    let started = Instant::now();
    loop {
        let now = subject.rounds().iter().sum::<u64>() - then;
        if now >= more {
            return now;
        }
        assert!(started.elapsed() < 4 * DEADLINE, "{now} of {more}");
        std::thread::yield_now();
    }
}

/// Follows a process that loads an object, while system calls of the follower fail as `fault` says.
fn follow_with_fault(case: &mut Case, host: &mut Subject, fault: &str) {
    let pid = host.pid();
    let mut tool = tool::start(follow(pid, Action::Enable, true), fault);
    wait_until_begun(pid, &mut tool);
    let plugin = fixture("objects/plugin.so");
    // A follower whose waiting calls fail may keep the process stopped until it ends, so the answer is
    // only read after that.
    host.talker.send(&format!("churn 4 {}", plugin.display()));
    let started = Instant::now();
    while started.elapsed() < LONGEST && tool.is_running() {
        std::thread::yield_now();
    }
    let _ = kill(Pid::from_raw(tool.pid()), Signal::SIGTERM);
    case.count(match tool.wait().code() {
        Some(0) => "faults: followed to the end",
        Some(1) => "faults: reported",
        other => panic!("{fault}: {other:?}"),
    });
    host.assert_released();
    host.talker.expect("churned 4");
    host.states_in_memory();
    host.run();
}

// promise: Following: If a system call of a follower fails, the process runs on (120 followers)
#[test]
fn processes_run_on_when_a_follower_call_fails() {
    let mut case = Case::begin("failing calls of a follower", 5);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("objects/host") {
            let mut host = Subject::start(&file, [] as [&str; 0]);
            for fault in [
                "error",
                "errors",
                "error-write",
                "error-within",
                "errors-write",
            ] {
                for number in 0..FAULTS {
                    // Intervals between the calls that fail grow: most of the first calls are those
                    // of an update, which are to be tried more densely.
                    let nth = 1 + number * number / 2 + case.random(1 + number);
                    let error = case.random(3);
                    follow_with_fault(&mut case, &mut host, &format!("{fault}:{nth}:#{error}"));
                }
            }
            host.end();
        }
        rounds += 1;
    }
    assert!(case.counted("faults: reported") > 0);
}

// promise: Following: Followers that start and end under a storm of signals lose none (48
//    followers, 40,000 signals)
#[test]
fn followers_under_a_signal_storm_lose_no_signal() {
    let mut case = Case::begin("followed under a storm of signals", 10);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("threads_spin") {
            let (mut storm, mut subject) = Storm::start(&file, "8");
            follow_many_times(&mut case, &mut subject, FOLLOWERS / 2);
            storm.end(&mut case);
            subject.end();
        }
        // Some of the signals are received in the hook.
        for file in fixture_forms("objects/host") {
            let directory = Scratch::new();
            let (mut storm, mut host) = Storm::start(&file, "0");
            churn(&mut host, &directory);
            follow_many_times(&mut case, &mut host, FOLLOWERS / 2);
            storm.end(&mut case);
            host.end();
        }
        rounds += 1;
    }
}
