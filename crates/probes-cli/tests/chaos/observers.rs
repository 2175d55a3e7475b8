//! Observations that count hits, take times and show hits, all at once. The observed OCaml programs
//! have small minor heaps, and their threads spend time in handlers: the handlers sleep, raise
//! exceptions, run the garbage collector, and wait for each other. Observations start and end under
//! load, and observers are killed at any moment.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use probes_lib::{Action, ErrorKind, ObserveError, Options, State, Target, faults};
use test_support::{Guard, fixture_forms, program_forms, test_name};

use crate::case::Case;
use crate::counting::anonymous_code_mappings;
use crate::observations::{all_but_watch, check, check_times, everything};
use crate::storm::Storm;
use crate::subject::{Subject, all, is_traced, patient_options, state_after};

/// How many observers are killed at any moment, at least; a tenth of them in the short form.
pub(crate) const KILLS: usize = 500;

/// How many observations start and end under load; a tenth of them in the short form.
const CYCLES: usize = 500;

/// How many observations start and end under a storm of signals; a tenth of them in the short form.
const STORM_CYCLES: usize = 200;

/// The environment variable that makes a test, run again in a process of its own, an observer: the
/// pid that it observes, how many times, and whether it takes over.
pub(crate) const OBSERVED: &str = "CHAOS_OBSERVED";

/// Small minor heaps, so that values are moved all the time.
const RUNTIME: (&str, &str) = ("OCAMLRUNPARAM", "v=0,s=4k");

pub(crate) fn start(file: &Path, args: &[&str]) -> Subject {
    // Otherwise, next to threads that never pause, the tool would get only as much time as one of
    // them.
    let mut command = Command::new("nice");
    command.args(["-n", "5", "--"]).arg(file).args(args);
    Subject::spawn(file, command.env(RUNTIME.0, RUNTIME.1))
}

/// Ends a program, and asserts that no value was corrupted.
pub(crate) fn end(mut subject: Subject) {
    if subject.file.to_string_lossy().contains("parked") {
        subject.talker.send("report");
        loop {
            let line = subject.talker.line().expect("a report");
            match line.rsplit_once("broken=") {
                Some((_, broken)) => assert_eq!(broken, "0", "{line}"),
                None => break,
            }
        }
    }
    subject.end();
}

/// Observes, as the process that [`observer`] starts: `what` is the pid, how many times (1, or
/// `u32::MAX`: until it is killed), and whether it takes over from another observer.
fn observe(what: &str) {
    let words: Vec<&str> = what.split(' ').collect();
    let [pid, times, take_over] = words[..] else {
        panic!("{what}");
    };
    let target = Target::open(pid.parse().unwrap()).unwrap();
    let observation = everything(&target);
    let options = Options {
        take_over: take_over.parse().unwrap(),
        ..patient_options()
    };
    for _ in 0..times.parse::<u32>().unwrap() {
        let mut observer = target.observe(&observation, options).unwrap();
        observer.events().unwrap();
        observer.latencies().unwrap();
        observer.counts().unwrap();
        observer.remove().unwrap();
    }
}

/// Runs the test of this name again, as an observer.
pub(crate) fn observer(test: &str, pid: i32, times: u32) -> Command {
    observer_with(test, pid, times, false)
}

/// Same as [`observer`]; with `take_over`, it replaces the current observer.
fn observer_with(test: &str, pid: i32, times: u32, take_over: bool) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", test]);
    command.env(OBSERVED, format!("{pid} {times} {take_over}"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Programs, and how many threads they have.
fn programs() -> Vec<(PathBuf, &'static [&'static str])> {
    let of = |name, args: &'static [&str]| program_forms(name).map(|file| (file, args));
    let mut programs = Vec::from(of("parked", &["6"]));
    programs.extend(of("threads", &["3"]));
    programs
}

/// Kills an observer of a process, whose observations take `longest` at most: one at any moment of its run, the next,
/// by the number `kill`, soon after it has begun to trace the process.
pub(crate) fn kill_at_random(
    case: &mut Case,
    pid: i32,
    mut observer: Guard,
    kill: usize,
    mut longest: Duration,
) {
    if kill % 2 == 1 {
        let started = Instant::now();
        while !is_traced(pid) {
            assert!(started.elapsed() < test_support::DEADLINE && observer.is_running());
        }
        longest /= 10;
    }
    let delay = case.random(longest.as_nanos() as u64);
    std::thread::sleep(Duration::from_nanos(delay));
    let was_tracing = is_traced(pid);
    observer.child().kill().unwrap();
    let status = observer.wait();
    assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{status}");
    case.count("killed at random");
    case.add("killed at random while tracing", u64::from(was_tracing));
}

// promise: Observations: An observer killed at any moment leaves threads that run on, and the next
//    one removes what remains (504 kills)
#[test]
fn observer_killed_at_any_moment_leaves_threads_running() {
    let name = test_name(observer_killed_at_any_moment_leaves_threads_running);
    if let Ok(what) = std::env::var(OBSERVED) {
        return observe(&what);
    }
    let mut case = Case::begin(
        "observer killed at any moment while it observes everything",
        4,
    );
    let mut files = programs();
    files.extend(fixture_forms("threads_spin").map(|file| (file, &["3"] as &[&str])));
    let each = case.part_of(KILLS).div_ceil(2 * files.len());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (file, args) in &files {
            for action in [Action::Disable, Action::Enable] {
                let mut subject = start(file, args);
                let pid = subject.pid();
                subject.apply(&all(action));
                let started = Instant::now();
                assert!(Guard::spawn(&mut observer(name, pid, 1)).wait().success());
                let longest = started.elapsed();
                for kill in 0..each {
                    let observer = Guard::spawn(&mut observer(name, pid, u32::MAX));
                    kill_at_random(&mut case, pid, observer, kill, longest);
                    subject.assert_released();
                    if kill % 10 == 0 {
                        subject.talker.ask("report", "report");
                    }
                }
                let target = Target::open(pid).unwrap();
                target.clean(patient_options()).unwrap();
                let observed = target.states().unwrap().observed_sites();
                assert_eq!((anonymous_code_mappings(pid), observed), (0, 0));
                let states = if action == Action::Enable {
                    state_after(action)
                } else {
                    (0, State::Disabled)
                };
                subject.assert_all(states, "in the end");
                end(subject);
            }
        }
        rounds += 1;
    }
}

/// Kills an observer before its nth system call, for one n after the other, until it ends before it is
/// killed; in both forms of a program whose probes are on. `observe_once` runs the observer with the
/// fault that it is given, removes what it leaves, and returns its status.
fn kill_before_each_call(
    case: &mut Case,
    observe_once: impl Fn(&mut Case, &mut Subject, &str) -> ExitStatus,
) {
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (file, fault) in fixture_forms("timed")
            .into_iter()
            .zip(["kill", "kill-write"])
        {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            subject.apply(&all(Action::Enable));
            // In the short form, only every fifth call, from a random first one for each program.
            let step = if case.is_long() { 1 } else { 5 };
            let first = 1 + case.random(step) as usize;
            for nth in (first..).step_by(step as usize) {
                let what = format!("{fault}:{nth}");
                let status = observe_once(case, &mut subject, &what);
                assert_eq!(anonymous_code_mappings(subject.pid()), 0, "{what}");
                subject.assert_all(state_after(Action::Enable), &what);
                assert_eq!(subject.run(), 2, "{what}");
                if status.success() {
                    assert!(nth > 10, "{what}");
                    break;
                }
                let killed = Some(Signal::SIGKILL as i32);
                assert_eq!(status.signal(), killed, "{what}: {status}");
            }
            subject.end();
        }
        rounds += 1;
    }
}

// promise: Observations: If an observer is killed before any of its system calls, the next observer
//    removes what it leaves behind (about 280 kills)
#[test]
fn remains_of_killed_observers_are_removed_later() {
    let name = test_name(remains_of_killed_observers_are_removed_later);
    if let Ok(what) = std::env::var(OBSERVED) {
        return observe(&what);
    }
    let mut case = Case::begin(
        "observer killed before each call while it observes everything",
        4,
    );
    kill_before_each_call(&mut case, |case, subject, what| {
        let mut observer = observer(name, subject.pid(), 1);
        let status = Guard::spawn(observer.env(faults::VARIABLE, what)).wait();
        subject.assert_released();
        assert_eq!(subject.run(), 2, "{what}");
        let target = Target::open(subject.pid()).unwrap();
        let left = target.clean(patient_options()).unwrap();
        let (fault, _) = what.split_once(':').unwrap();
        case.count(format!("{fault}: {} sites were observed", left.sites));
        status
    });
    assert!(case.counted("kill: 2 sites were observed") > 0);
}

// promise: Observations: If an observer that takes over is killed before any of its system calls,
//    the other one goes on and misses nothing, or knows that it was replaced (about 400 kills)
#[test]
fn take_over_killed_before_each_call_misses_nothing() {
    let name = test_name(take_over_killed_before_each_call_misses_nothing);
    if let Ok(what) = std::env::var(OBSERVED) {
        return observe(&what);
    }
    let mut case = Case::begin("killed before each call while it takes over", 4);
    kill_before_each_call(&mut case, |case, subject, what| {
        let target = Target::open(subject.pid()).unwrap();
        let observation = everything(&target);
        let mut first = target.observe(&observation, patient_options()).unwrap();
        let mut second = observer_with(name, subject.pid(), 1, true);
        let status = Guard::spawn(second.env(faults::VARIABLE, what)).wait();
        subject.assert_released();
        assert_eq!(subject.run(), 2, "{what}");
        match first.remove() {
            Ok(observed) => {
                assert_eq!(observed.counts.total(), 2, "{what}");
                case.count("goes on");
            }
            Err(error) => {
                let kind = error.kind();
                assert!(
                    matches!(kind, ErrorKind::Observe(ObserveError::Replaced { .. })),
                    "{what}: {error}"
                );
                case.count("replaced");
                // What the killed tool has left is removed.
                assert_eq!(anonymous_code_mappings(subject.pid()), 0, "{what}");
            }
        }
        drop(first);
        target.clean(patient_options()).unwrap();
        status
    });
    assert!(case.counted("goes on") > 0 && case.counted("replaced") > 0);
}

// promise: Observations: Observations of every kind start and end while threads sleep, raise,
//    collect and wait in handlers, and all counts add up (500 observations)
#[test]
fn observations_start_and_end_while_threads_run_handlers() {
    let mut case = Case::begin("everything observed under load, over and over", 4);
    let files = programs();
    let each = case.part_of(CYCLES).div_ceil(files.len());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (file, args) in &files {
            let subject = start(file, args);
            let target = Target::open(subject.pid()).unwrap();
            let mut hits = 0;
            for cycle in 0..each {
                let is_parked = file.to_string_lossy().contains("parked");
                let is_shown = is_parked || cycle % 5 == 0;
                let observation = if is_shown {
                    everything(&target)
                } else {
                    all_but_watch(&target)
                };
                let options = Options {
                    live: cycle % 2 == 0,
                    ..patient_options()
                };
                let switch = |action| target.update_with(&all(action), options).unwrap();
                // The probes are on from before the observation until after it; or they are
                // switched on and off again while it lasts.
                let stays_on = cycle % 4 < 2;
                let what = format!("{}: cycle {cycle}", file.display());
                if stays_on {
                    switch(Action::Enable);
                }
                let mut observer = target.observe(&observation, options).unwrap();
                if !stays_on {
                    switch(Action::Enable);
                }
                let mut events = observer.events().unwrap();
                if !stays_on {
                    switch(Action::Disable);
                }
                let started = Instant::now();
                let mut observed = observer.remove().unwrap();
                let late = started.elapsed() > Duration::from_secs(2);
                case.add("removals that took more than two seconds", u64::from(late));
                events.dropped += observed.events.dropped;
                events.events.append(&mut observed.events.events);
                if is_shown {
                    check(&observed, &events, &what)
                } else {
                    check_times(&observed, &what)
                }
                hits += observed.counts.total();
                case.add("hits shown", events.events.len() as u64);
                case.add("hits dropped", events.dropped);
                case.add("times taken", observed.latencies[0].count());
                if stays_on {
                    switch(Action::Disable);
                }
            }
            assert!(hits > 0);
            case.add("cycles", each as u64);
            case.add("hits counted", hits);
            target.clean(patient_options()).unwrap();
            assert_eq!(anonymous_code_mappings(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            end(subject);
        }
        rounds += 1;
    }
}

// promise: Observations: Signals are delivered once and in order while observations start and end
//    (100 observations, at least 10,000 signals to each of 4 targets)
#[test]
fn observations_under_a_signal_storm_lose_no_signal() {
    let mut case = Case::begin("everything observed under a storm of signals", 4);
    let mut files: Vec<PathBuf> = fixture_forms("threads_spin").into();
    files.extend(program_forms("threads"));
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in &files {
            let (mut storm, subject) = Storm::start(file, "3");
            let target = Target::open(subject.pid()).unwrap();
            let observation = everything(&target);
            for _ in 0..case.part_of(STORM_CYCLES).div_ceil(files.len()) {
                let mut observer = target.observe(&observation, patient_options()).unwrap();
                let observed = observer.remove().unwrap();
                case.add("hits counted", observed.counts.total());
                case.count("cycles");
            }
            storm.end(&mut case);
            target.clean(patient_options()).unwrap();
            assert_eq!(anonymous_code_mappings(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}
