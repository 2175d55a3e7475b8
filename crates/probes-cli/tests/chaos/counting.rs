//! Observations that are cut short: the tool is killed before each of its system calls in turn, and
//! at random moments. The process runs on, its probes have the states they had, and the next
//! observation removes what the killed tool left behind.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use probes_lib::{Action, FunctionSelector, Observation, Options, Selector, State, Target};
use test_support::process::Image;
use test_support::{Guard, Talker, fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, patient_options};
use crate::tool;

/// How many tools are killed at a random moment; a tenth of them in the short form.
const KILLS: usize = 500;

/// Cycles under load; a tenth of them in the short form.
const CYCLES: usize = 500;

/// Mappings of code that belong to no file.
pub(crate) fn anonymous_code_mappings(pid: i32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines = maps
        .lines()
        .filter(|line| line.contains(" r-xp ") && line.contains(" 00:00 0"));
    lines.filter(|line| !line.contains("[v")).count()
}

/// Removes what a killed tool left behind, and asserts that no trace of it is left.
fn clean(case: &mut Case, subject: &mut Subject, states: (u16, State), what: &str) {
    subject.assert_released();
    subject.run();
    let target = Target::open(subject.pid()).unwrap();
    // The states that are shown are the usual ones, whatever the killed tool left behind.
    let shown = target.states().unwrap();
    for probe in shown.probes() {
        let state = (probe.counter(), probe.state());
        // A site across two pages is off while it is patched; a kill meanwhile leaves it off.
        let is_cut_short = what.contains("page_borders") && state.1 == State::Inconsistent;
        assert!(state == states || is_cut_short, "{what}: {state:?}");
    }
    let left = target.clean(patient_options()).unwrap();
    case.count(match left.sites {
        0 => "killed: no site was observed",
        _ => "killed: sites were observed, and are removed",
    });
    assert_eq!(anonymous_code_mappings(subject.pid()), 0, "{what}");
    subject.assert_all(states, what);
    subject.run();
}

/// Counts for a moment, and kills the tool at each fault in turn.
fn kill_at_each(case: &mut Case, file: &Path, fault: &str, action: Action, points: &str) {
    let mut subject = Subject::start(file, [] as [&str; 0]);
    let code = Image::of(subject.pid()).text();
    let mut states = (0, State::Disabled);
    if action == Action::Enable {
        subject.apply(&all(action));
        states = (1, State::Enabled);
    }
    for nth in 1.. {
        let count = format!("count{points} -for 1ms -pid {}", subject.pid());
        let count = tool::command(&count);
        let status = tool::start(count, &format!("{fault}:{nth}")).wait();
        let what = format!("{fault}:{nth} in {}", file.display());
        clean(case, &mut subject, states, &what);
        if action == Action::Disable {
            code.assert_same(&Image::of(subject.pid()).text(), &what);
        }
        if status.signal() != Some(Signal::SIGKILL as i32) {
            assert!(status.success() && nth > 3, "{what}: {status}");
            break;
        }
    }
    subject.end();
}

// promise: Observations: What a tool leaves behind if it is killed before any of its system calls
//    while it counts is removed by the next one (about 600 kills)
#[test]
fn remains_of_killed_counting_tools_are_removed() {
    let mut case = Case::begin("killed while it counts", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("page_borders") {
            // No kill takes effect within a write: the kernel completes a write within one page.
            kill_at_each(&mut case, &file, "kill-write", Action::Enable, "");
            kill_at_each(&mut case, &file, "kill-write", Action::Disable, "");
        }
        for file in fixture_forms("gen_ocaml_2") {
            kill_at_each(&mut case, &file, "kill", Action::Disable, "");
        }
        rounds += 1;
    }
    assert!(case.counted("killed: sites were observed, and are removed") > 0);
}

// promise: Observations: What a tool leaves behind if it is killed before any of its writes while it counts functions is
//    removed by the next one, and the code is as before (about 200 kills)
#[test]
fn remains_of_killed_function_counts_are_removed() {
    let mut case = Case::begin("killed while it counts functions", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in program_forms("twolibs") {
            kill_at_each(
                &mut case,
                &file,
                "kill-write",
                Action::Disable,
                " -fn Stdlib.List.*,malloc -regexp .",
            );
        }
        rounds += 1;
    }
    assert!(case.counted("killed: sites were observed, and are removed") > 0);
}

// promise: Observations: Semaphores of USDT probes are as before, whichever of its writes a tool is killed before (2 × about
//    30 kills)
#[test]
fn semaphores_survive_kills_before_each_write() {
    let mut case = Case::begin("killed while semaphores are raised", 1);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("usdt") {
            let mut talker = Talker::start(&file);
            let pid = talker.pid();
            let semaphores = talker.ask("counters", "sem");
            let code = Image::of(pid).text();
            for nth in 1.. {
                let count = tool::command(&format!("count -usdt demo:* -for 1ms -pid {pid}"));
                let status = tool::start(count, &format!("kill-write:{nth}")).wait();
                let target = Target::open_any(pid).unwrap();
                target.clean(patient_options()).unwrap();
                let what = format!("kill-write:{nth} in {}", file.display());
                assert_eq!(talker.ask("counters", "sem"), semaphores, "{what}");
                code.assert_same(&Image::of(pid).text(), &what);
                assert_eq!(anonymous_code_mappings(pid), 0, "{what}");
                talker.ask("fire 2 10", "fired");
                if status.signal() != Some(Signal::SIGKILL as i32) {
                    assert!(status.success() && nth > 3, "{what}: {status}");
                    break;
                }
                case.count("killed, and the semaphores are as before");
            }
        }
        rounds += 1;
    }
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
    let each = case.part_of(KILLS).div_ceil(files.len());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
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
            target.clean(patient_options()).unwrap();
            assert_eq!(anonymous_code_mappings(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}

// promise: Observations: Counting starts and ends under full load, and every thread runs on (204
//    observations)
#[test]
fn counting_starts_and_ends_under_load() {
    let mut case = Case::begin("observed under load, over and over", 4);
    let files: Vec<PathBuf> = fixture_forms("threads_spin")
        .into_iter()
        .chain(program_forms("threads"))
        .chain(fixture_forms("churn"))
        .collect();
    let each = case.part_of(CYCLES).div_ceil(files.len());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in &files {
            let subject = Subject::start(file, [] as [&str; 0]);
            let target = Target::open(subject.pid()).unwrap();
            let mut hits = 0;
            for cycle in 0..each {
                let options = Options {
                    live: cycle % 2 == 0,
                    ..patient_options()
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
            assert_eq!(anonymous_code_mappings(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}

/// Counts functions that match these globs, or times them.
fn functions(globs: &[&str], is_timed: bool) -> Observation {
    let selectors = globs
        .iter()
        .map(|glob| FunctionSelector::Glob(glob.parse().unwrap()));
    let add = if is_timed {
        Observation::time_functions
    } else {
        Observation::count_functions
    };
    selectors.fold(Observation::new(), add)
}

// promise: Functions: Functions are patched and restored under full load, over and over, and every thread runs on (500
//    observations)
#[test]
fn functions_are_patched_and_restored_under_load() {
    let mut case = Case::begin("functions observed under load, over and over", 4);
    let of_c = fixture_forms("threads_spin").map(|file| (file, ["Few.*", "fixture_*"]));
    let of_ocaml = program_forms("threads").map(|file| (file, ["Threads.*", "caml_*"]));
    let files: Vec<_> = of_c.into_iter().chain(of_ocaml).collect();
    let each = case.part_of(CYCLES).div_ceil(files.len());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (file, globs) in &files {
            let subject = Subject::start(file, [] as [&str; 0]);
            let target = Target::open(subject.pid()).unwrap();
            let (mut hits, mut calls) = (0, 0);
            for cycle in 0..each {
                let is_timed = cycle % 2 == 1;
                let options = patient_options();
                let mut observer = target
                    .observe(&functions(globs, is_timed), options)
                    .unwrap();
                target.update_with(&all(Action::Enable), options).unwrap();
                target.update_with(&all(Action::Disable), options).unwrap();
                let report = observer.remove().unwrap();
                hits += report.counts.functions().map(|it| it.hits).sum::<u64>();
                calls += report
                    .function_latencies
                    .iter()
                    .map(|it| it.count())
                    .sum::<u64>();
            }
            assert!(hits > 0 && calls > 0, "{hits} {calls}");
            case.add("cycles", each as u64);
            case.add("calls counted", hits);
            case.add("calls timed", calls);
            assert_eq!(anonymous_code_mappings(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}
