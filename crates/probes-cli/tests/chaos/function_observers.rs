//! Observers of functions that end with a return of one byte, each right before the next (fixture `externals`), are
//! killed: before each of their system calls, and at any moment while threads and a signal handler call these
//! functions. The functions return what they should (the program checks it), the next observer times every call, and
//! nothing is left.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Instant;

use nix::sys::signal::Signal;
use probes_lib::{FunctionSelector, Observation, Target, faults};
use test_support::process::Image;
use test_support::{Guard, Talker, fixture_forms, test_name};

use crate::case::Case;
use crate::counting::anonymous_code_mappings;
use crate::observers::{KILLS, OBSERVED, kill_at_random, observer};
use crate::subject::{assert_released, patient_options};

/// How many functions the fixture has.
const FUNCTIONS: usize = 9;

fn timed() -> Observation {
    let globs = ["wrapper_?", "padded_wrapper", "after_wrappers"];
    let selectors = globs.map(|glob| FunctionSelector::Glob(glob.parse().unwrap()));
    let selectors = selectors.into_iter();
    selectors.fold(Observation::new(), Observation::time_functions)
}

/// Observes a process, in the process that [`observer`] starts: `what` begins with the pid and the number of times.
fn observe(what: &str) {
    let mut words = what.split(' ').map(str::parse::<u32>).map_while(Result::ok);
    let (pid, times) = (words.next().unwrap(), words.next().unwrap());
    let target = Target::open_any(pid as i32).unwrap();
    for _ in 0..times {
        let mut observer = target.observe(&timed(), patient_options()).unwrap();
        observer.function_latencies().unwrap();
        observer.remove().unwrap();
    }
}

/// Asserts that the next observer, which removes what a killed one has left, times every call, and leaves nothing.
fn assert_every_call_is_timed(talker: &mut Talker, built: &Image, what: &str) {
    let pid = talker.pid();
    let target = Target::open_any(pid).unwrap();
    let mut observer = target.observe(&timed(), patient_options()).unwrap();
    assert!(observer.refused().is_empty(), "{:?}", observer.refused());
    talker.ask("call 2 100", "called");
    let report = observer.remove().unwrap();
    let counts = report.function_latencies.iter().map(|it| it.count());
    assert_eq!(counts.collect::<Vec<_>>(), [200; FUNCTIONS], "{what}");
    built.assert_same(&Image::of(pid).text(), what);
    assert_eq!(anonymous_code_mappings(pid), 0, "{what}");
    talker.ask("call 2 100", "called");
}

// promise: Functions: If an observer of functions that end with a return of one byte, each right before the next, is killed
//    before any of its system calls, the program calls them as before, and the next observer times every call and leaves
//    nothing (about 430 kills)
#[test]
fn killed_observers_of_wrappers_lose_no_call() {
    let name = test_name(killed_observers_of_wrappers_lose_no_call);
    if let Ok(what) = std::env::var(OBSERVED) {
        return observe(&what);
    }
    let mut case = Case::begin("observer of wrappers killed before each call", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (file, fault) in fixture_forms("externals")
            .into_iter()
            .zip(["kill", "kill-write"])
        {
            let mut talker = Talker::start(&file);
            let pid = talker.pid();
            let built = Image::of(pid).text();
            // In the short form, only every fifth call, from a random first one for each program.
            let step = if case.is_long() || fault == "kill-write" {
                1
            } else {
                5
            };
            let first = 1 + case.random(step) as usize;
            for nth in (first..).step_by(step as usize) {
                let what = format!("{fault}:{nth}");
                let mut command = observer(name, pid, 1);
                let status = Guard::spawn(command.env(faults::VARIABLE, &what)).wait();
                assert_released(pid);
                talker.ask("call 3 100", "called");
                let is_patched = !built.differences(&Image::of(pid).text()).is_empty();
                assert_every_call_is_timed(&mut talker, &built, &what);
                if status.success() {
                    assert!(nth > 10 && !is_patched, "{what}");
                    break;
                }
                let killed = Some(Signal::SIGKILL as i32);
                assert_eq!(status.signal(), killed, "{what}: {status}");
                case.count(fault);
                case.add(format!("{fault}, patched"), u64::from(is_patched));
            }
        }
        rounds += 1;
    }
    assert!(case.counted("kill, patched") > 0 && case.counted("kill-write, patched") > 0);
}

// promise: Functions: If such an observer is killed at any moment while threads are in the functions and signal handlers call
//    them, the program calls them as before, and the next observer times every call and leaves nothing (500 kills)
#[test]
fn wrappers_work_when_observers_are_killed() {
    let name = test_name(wrappers_work_when_observers_are_killed);
    if let Ok(what) = std::env::var(OBSERVED) {
        return observe(&what);
    }
    let mut case = Case::begin("observer of wrappers killed at any moment", 4);
    let each = case.part_of(KILLS).div_ceil(2);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("externals") {
            // At the same priority as threads that never pause, the tool would get only as much CPU time as one of
            // them.
            let mut talker = Talker::spawn(Command::new("nice").args(["-n", "5", "--"]).arg(&file));
            talker.expect("ready");
            let pid = talker.pid();
            let built = Image::of(pid).text();
            let target = Target::open_any(pid).unwrap();
            talker.ask("storm 3", "storming");
            let started = Instant::now();
            assert!(Guard::spawn(&mut observer(name, pid, 1)).wait().success());
            let longest = started.elapsed();
            for kill in 0..each {
                let killed = Guard::spawn(&mut observer(name, pid, u32::MAX));
                kill_at_random(&mut case, pid, killed, kill, longest);
                assert_released(pid);
                let is_patched = !built.differences(&Image::of(pid).text()).is_empty();
                case.add("killed at random, patched", u64::from(is_patched));
                // In the other rounds, the next observer removes what is left.
                if kill % 3 == 0 {
                    target.clean(patient_options()).unwrap();
                    built.assert_same(&Image::of(pid).text(), "the program");
                }
            }
            talker.ask("calm", "calm");
            assert_every_call_is_timed(&mut talker, &built, "in the end");
        }
        rounds += 1;
    }
    assert!(case.counted("killed at random, patched") > 0);
}
