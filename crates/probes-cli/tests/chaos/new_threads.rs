//! Threads and processes that are created and exit all the time, while their process is changed.

use std::path::Path;
use std::time::Instant;

use probes_lib::Action;
use test_support::process::children;
use test_support::{eventually, fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, state_after};

/// Times that the probes are switched on and off again, in the short form.
const CYCLES: usize = 500;

/// Switches the probes of a process on and off, `cycles` times. [`Subject::rounds`]
/// returns how many threads, or processes, it has created.
fn switch_repeatedly(case: &mut Case, file: &Path, args: &[&str], cycles: usize, what: &str) {
    let mut subject = Subject::start(file, args);
    let (started, born) = (Instant::now(), subject.rounds().iter().sum::<u64>());
    for cycle in 0..cycles {
        for action in [Action::Enable, Action::Disable] {
            let report = subject.apply(&all(action));
            assert!(report.changed.iter().all(|one| one.sites > 0));
            subject.assert_all(state_after(action), &format!("cycle {cycle}"));
            if cycle % 50 == 0 {
                subject.wait_for_round();
            }
        }
        case.count("cycles of attach, enable, attach, disable");
    }
    let born = subject.rounds().iter().sum::<u64>() - born;
    case.add(what, born);
    let rate = (born as f64 / started.elapsed().as_secs_f64()) as u64;
    println!("chaos: {}: {rate} {what} a second", file.display());
    subject.assert_released();
    subject.wait_for_round();
    // Its threads hit the probes exactly while these are enabled.
    for action in [Action::Enable, Action::Disable] {
        subject.apply(&all(action));
        subject.wait_for_round();
        subject.wait_for_round();
        subject.run();
        subject.wait_for_round();
        let hits = subject.run();
        assert_eq!(hits > 0, action == Action::Enable, "{hits} hits");
    }
    subject.end();
}

// promise: Stopping and resuming: Threads that are created and exit all the time are stopped too,
//    even if none lives long (504 cycles of C and OCaml programs, 2,000 to 7,000 threads a second)
#[test]
fn threads_created_by_the_thousand_are_all_stopped() {
    let mut case = Case::begin("switched while threads are created and exit", 8);
    let leaderless = || fixture_forms("churn").map(|file| (file, &["leader-exits"] as &[&str]));
    let with_leader = || {
        let files = fixture_forms("churn")
            .into_iter()
            .chain(fixture_forms("churn_1000"))
            .chain(program_forms("newborn"));
        files.map(|file| (file, &[] as &[&str]))
    };
    let each = CYCLES.div_ceil(leaderless().len() + with_leader().count());
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for (file, args) in with_leader().chain(leaderless()) {
            switch_repeatedly(&mut case, &file, args, each, "threads created");
        }
        rounds += 1;
    }
}

// promise: Exit, exec and fork of the process: Children inherit the state of the probes and run on
//    (200 cycles, 1,500 to 4,000 forks a second)
#[test]
fn forking_process_is_changed_and_children_run_on() {
    let mut case = Case::begin("switched while processes are forked", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("fork_storm") {
            // A child that fails ends the program.
            switch_repeatedly(&mut case, &file, &[], 100, "children forked");
        }
        rounds += 1;
    }
    eventually("all children of the test have exited", || {
        children(std::process::id() as i32).is_empty().then_some(())
    });
}
