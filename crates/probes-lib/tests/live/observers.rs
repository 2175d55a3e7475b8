//! A process has one observer at a time, and other tools can see which process that is.

use std::fs::File;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::thread;

use probes_lib::{
    Action, CleanReport, Effect, Error, ErrorKind, Launch, Observation, ObserveError, Options,
    Selector, Target, ToolProcess,
};
use test_support::process::Image;
use test_support::{Guard, Scratch, Talker, fixture_forms};

use crate::observe::{anonymous_code, options};
use crate::session::named;

fn take_over() -> Options {
    Options {
        take_over: true,
        ..options()
    }
}

/// The observer that an error names as the one that observes the process.
#[track_caller]
fn already_observed(error: &Error) -> &ToolProcess {
    match error.kind() {
        ErrorKind::Observe(ObserveError::AlreadyObserved { observer }) => observer,
        _ => panic!("{error}"),
    }
}

/// Asserts that the error names this process as the successor; returns whether the successor is alive.
#[track_caller]
fn assert_replaced_from_here(error: &Error) -> bool {
    let ErrorKind::Observe(ObserveError::Replaced { observer: Some(by) }) = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(by.pid, std::process::id() as i32);
    assert!(!by.command.is_empty());
    by.is_alive
}

fn everything() -> Observation {
    let counted = Observation::new().count(Selector::All);
    counted.time("start", "stop").watch(Selector::All)
}

// promise: Observations: A second observer gets an error with the pid and command of the first, and
//    changes nothing (2)
#[test]
fn second_observer_is_refused_naming_the_first() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let target = Target::open(pid).unwrap();
        let mut first = target.observe(&everything(), options()).unwrap();
        let before = Image::of(pid).text();
        let mapped = anonymous_code(pid);
        // Also through another `Target` of the same process.
        for target in [&target, &Target::open(pid).unwrap()] {
            let Err(error) = target.observe(&everything(), options()) else {
                panic!("process {pid} accepted a second observer");
            };
            let observer = already_observed(&error);
            assert_eq!(observer.pid, std::process::id() as i32);
            assert!(observer.is_alive && observer.is_in_our_namespace);
            assert_eq!(error.effect(), Effect::NothingChanged);
            let cleaned = target.clean(options()).unwrap_err();
            already_observed(&cleaned);
            let states = target.states().unwrap();
            let shown = states.observer().unwrap();
            assert_eq!((shown.pid, shown.is_alive), (observer.pid, true));
            assert_eq!(shown.command, observer.command);
        }
        before.assert_same(&Image::of(pid).text(), "the observed program");
        assert_eq!(anonymous_code(pid), mapped);
        // The probes of an observed process can be switched.
        target.update(&named(Action::Enable, "start")).unwrap();
        talker.hits();
        target.update(&named(Action::Disable, "start")).unwrap();
        let observed = first.remove().unwrap();
        assert_eq!(observed.counts.total(), 2);
        assert_eq!(observed.latencies[0].count(), 1);
        assert!(target.states().unwrap().observer().is_none());
        // Once the observation has been removed, the next observer needs no `take_over`.
        target
            .observe(&everything(), options())
            .unwrap()
            .remove()
            .unwrap();
    }
}

// promise: Observations: An observer that takes over gets all hits, and the error of the other one
//    names the process that replaced it (2)
#[test]
fn replaced_observer_gets_an_error() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let mut first = target.observe(&everything(), options()).unwrap();
        first.check().unwrap();
        let mut second = target.observe(&everything(), take_over()).unwrap();
        talker.hits();
        assert!(assert_replaced_from_here(&first.check().unwrap_err()));
        assert_replaced_from_here(&first.counts().unwrap_err());
        assert_replaced_from_here(&first.latencies().unwrap_err());
        assert_replaced_from_here(&first.events().unwrap_err());
        assert_replaced_from_here(&first.remove().unwrap_err());
        let observed = second.remove().unwrap();
        assert_eq!(observed.counts.total(), 2);
        assert_eq!(observed.events.events.len(), 2);
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        // The successor has removed its observation: its pid and command are no longer known.
        let error = first.remove().unwrap_err();
        let kind = error.kind();
        assert!(
            matches!(
                kind,
                ErrorKind::Observe(ObserveError::Replaced { observer: None })
            ),
            "{error}"
        );
        assert_eq!(target.clean(options()).unwrap(), CleanReport::default());
    }
}

// promise: Observations: An observation left by a dropped observer is replaced without
//    `take_over` (2)
#[test]
fn dropped_observer_does_not_block_others() {
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        drop(target.observe(&everything(), options()).unwrap());
        let states = target.states().unwrap();
        let left = states.observer().unwrap();
        assert_eq!(left.pid, std::process::id() as i32);
        assert!(!left.is_alive && states.observed_sites() == 2);
        let mut second = target.observe(&everything(), options()).unwrap();
        talker.hits();
        assert_eq!(second.remove().unwrap().counts.total(), 2);
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

// promise: Observations: Of several observers that begin at the same moment, one observes, and
//    the others get an error that names it (2 × 5, 4 at once)
#[test]
fn one_of_several_observers_at_once_wins() {
    const AT_ONCE: usize = 4;
    for file in fixture_forms("timed") {
        let mut talker = Talker::start(&file);
        let targets: Vec<Target> = (0..AT_ONCE)
            .map(|_| Target::open(talker.pid()).unwrap())
            .collect();
        for _ in 0..5 {
            let barrier = Barrier::new(AT_ONCE);
            let observe = |target: &Target| {
                barrier.wait();
                target.observe(&everything(), options())
            };
            let results: Vec<_> = thread::scope(|scope| {
                let begin = |target| scope.spawn(move || observe(target));
                let threads: Vec<_> = targets.iter().map(begin).collect();
                let results = threads.into_iter().map(|thread| thread.join().unwrap());
                results.collect()
            });
            let (winners, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
            for error in refused.iter().map(|it| it.as_ref().err().unwrap()) {
                assert!(already_observed(error).is_alive);
                assert_eq!(error.effect(), Effect::NothingChanged);
            }
            let mut winners = winners.into_iter().map(Result::unwrap);
            let mut winner = winners.next().unwrap();
            assert!(winners.next().is_none());
            talker.hits();
            assert_eq!(winner.remove().unwrap().counts.total(), 2);
        }
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

/// Starts a program that is observed from its start.
fn launch(file: &std::path::Path, input: Stdio) -> probes_lib::Launched {
    let mut command = Command::new(file);
    command.stdin(input).stdout(Stdio::piped());
    let launch = Launch::new(command)
        .options(options())
        .observe(everything());
    launch.spawn().unwrap()
}

// promise: Observations: If another tool takes over a program that was launched to be observed, what was recorded before can be
//    read, and checking or removing the observation fails with the pid of that tool (2 × 2)
#[test]
fn replaced_observer_of_launched_program_keeps_results() {
    for file in fixture_forms("timed") {
        for exits in [false, true] {
            let mut launched = launch(&file, Stdio::piped());
            let mut first = launched.take_observer().unwrap();
            let target = first.target().clone();
            let mut talker = Talker::of(Guard::from(launched.into_child()));
            talker.hits();
            first.check().unwrap();
            let mut second = target.observe(&everything(), take_over()).unwrap();
            talker.hits();
            talker.hits();
            if exits {
                talker.close_input();
                assert!(talker.guard().wait().success());
            } else {
                assert_eq!(second.remove().unwrap().counts.total(), 4);
            }
            assert_replaced_from_here(&first.check().unwrap_err());
            assert_replaced_from_here(&first.remove().unwrap_err());
            assert_eq!(first.counts().unwrap().total(), 2);
            assert_eq!(first.latencies().unwrap()[0].count(), 1);
            assert_eq!(first.events().unwrap().events.len(), 2);
        }
    }
}

#[test]
fn launched_program_that_exits_was_not_replaced() {
    for file in fixture_forms("timed") {
        let scratch = Scratch::new();
        std::fs::write(scratch.file("commands"), "run\nquit\n").unwrap();
        let commands = File::open(scratch.file("commands")).unwrap();
        let mut launched = launch(&file, commands.into());
        let mut observer = launched.take_observer().unwrap();
        assert!(launched.child().wait().unwrap().success());
        assert_eq!(observer.remove().unwrap().counts.total(), 2);
    }
}
