//! Observations that are cut short: the tool is killed before each of its calls, and at any moment.
//! The process runs on, its probes are what they were, and the next observation removes what
//! remains.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use probes_lib::{Action, Observation, Options, Selector, State, Target};
use test_support::{Guard, fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, patient};
use crate::tool;

/// Killed at any moment; a tenth of them in the short form.
const LEAST: usize = 500;

/// Cycles under load; a tenth of them in the short form.
const CYCLES: usize = 500;

/// Mappings of code that belong to no file.
pub(crate) fn strange_code(pid: i32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines = maps
        .lines()
        .filter(|line| line.contains(" r-xp ") && line.contains(" 00:00 0"));
    lines.filter(|line| !line.contains("[v")).count()
}

/// Removes what remains, which leaves no trace.
fn clean(case: &mut Case, subject: &mut Subject, states: (u16, State), what: &str) {
    subject.assert_released();
    subject.run();
    let target = Target::open(subject.pid()).unwrap();
    // As usual, whatever remains.
    let shown = target.states().unwrap();
    for probe in shown.probes() {
        let state = (probe.counter(), probe.state());
        // A site across two pages is off while it is patched.
        let is_cut_short = what.contains("page_borders") && state.1 == State::Inconsistent;
        assert!(state == states || is_cut_short, "{what}: {state:?}");
    }
    let left = target.clean(patient()).unwrap();
    case.count(match left.sites {
        0 => "killed: no site was observed",
        _ => "killed: sites were observed, and are removed",
    });
    assert_eq!(strange_code(subject.pid()), 0, "{what}");
    subject.assert_all(states, what);
    subject.run();
}

fn kill_at_each(case: &mut Case, file: &Path, fault: &str, action: Action) {
    let mut subject = Subject::start(file, [] as [&str; 0]);
    let mut states = (0, State::Disabled);
    if action == Action::Enable {
        subject.apply(&all(action));
        states = (1, State::Enabled);
    }
    for nth in 1.. {
        let count = tool::command(&format!("count -for 1ms -pid {}", subject.pid()));
        let status = tool::start(count, &format!("{fault}:{nth}")).wait();
        let what = format!("{fault}:{nth} in {}", file.display());
        clean(case, &mut subject, states, &what);
        if status.signal() != Some(Signal::SIGKILL as i32) {
            assert!(status.success() && nth > 3, "{what}: {status}");
            break;
        }
    }
    subject.end();
}

// promise: Observations: A tool killed before any of its system calls while it counts leaves what
//    the next one removes (about 600 kills)
#[test]
fn counting_tool_killed_before_each_call_is_removed() {
    let mut case = Case::begin("killed while it counts", 4);
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        for file in fixture_forms("page_borders") {
            // Not within a write: the kernel does a write within a page as a whole.
            kill_at_each(&mut case, &file, "kill-write", Action::Enable);
            kill_at_each(&mut case, &file, "kill-write", Action::Disable);
        }
        for file in fixture_forms("gen_ocaml_2") {
            kill_at_each(&mut case, &file, "kill", Action::Disable);
        }
        rounds += 1;
    }
    assert!(case.counted("killed: sites were observed, and are removed") > 0);
}

// promise: Observations: A tool killed at any moment while it counts leaves threads that run on
//    (200 kills)
#[test]
fn counting_tool_killed_anytime_leaves_threads_running() {
    let mut case = Case::begin("killed at any moment while it counts", 4);
    let files: Vec<PathBuf> = fixture_forms("threads_spin")
        .into_iter()
        .chain(program_forms("threads"))
        .collect();
    let each = case.part_of(LEAST).div_ceil(files.len());
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        for file in &files {
            let subject = Subject::start(file, ["3"]);
            let line = format!("count -for 1ms -pid {}", subject.pid());
            let started = Instant::now();
            let output = test_support::output(&mut tool::command(&line));
            assert!(output.status.success(), "{output:?}");
            let longest = started.elapsed().as_nanos() as u64;
            for _ in 0..each {
                let mut tool = Guard::spawn(&mut tool::command(&line));
                std::thread::sleep(Duration::from_nanos(case.random(longest)));
                // It may have exited.
                let _ = tool.child().kill();
                let killed = tool.wait().signal().is_some();
                case.add("killed at random", u64::from(killed));
                subject.assert_released();
            }
            let target = Target::open(subject.pid()).unwrap();
            target.clean(patient()).unwrap();
            assert_eq!(strange_code(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}

// promise: Observations: Counting starts and ends under full load, and every thread runs on (204
//    observations)
#[test]
fn counting_under_load_starts_and_ends_without_loss() {
    let mut case = Case::begin("observed under load, over and over", 4);
    let files: Vec<PathBuf> = fixture_forms("threads_spin")
        .into_iter()
        .chain(program_forms("threads"))
        .chain(fixture_forms("churn"))
        .collect();
    let each = case.part_of(CYCLES).div_ceil(files.len());
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        for file in &files {
            let subject = Subject::start(file, [] as [&str; 0]);
            let target = Target::open(subject.pid()).unwrap();
            let mut hits = 0;
            for cycle in 0..each {
                let options = Options {
                    live: cycle % 2 == 0,
                    ..patient()
                };
                let mut observer = target
                    .observe(&Observation::new().count(Selector::All), options)
                    .unwrap();
                target.update_with(&all(Action::Enable), options).unwrap();
                target.update_with(&all(Action::Disable), options).unwrap();
                hits += observer.remove().unwrap().counts.total();
            }
            assert!(hits > 0);
            case.add("cycles", each as u64);
            case.add("hits counted", hits);
            assert_eq!(strange_code(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}
