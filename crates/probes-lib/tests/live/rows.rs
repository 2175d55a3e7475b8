//! Hits of threads of every kind are counted to the last one: each thread counts in a row of its own, if it can be
//! distinguished from the others.

use probes_lib::{Counts, FunctionSelector, Observation, Selector, Target};
use test_support::process::Image;
use test_support::{Talker, eventually, fixture_forms};

use crate::observe::{anonymous_code, options};

fn observation() -> Observation {
    ["half", "leaf", "outer"]
        .map(|name| FunctionSelector::Glob(name.parse().unwrap()))
        .into_iter()
        .fold(Observation::new(), Observation::count_functions)
        .count(Selector::All)
}

/// The rounds that a program says it has made.
fn rounds(answer: &str) -> u64 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Asserts that the counts are those of so many rounds.
fn assert_rounds(counts: &Counts, rounds: u64, what: &str) {
    let hits = ["ping", "pong"].map(|name| counts.hits(name).unwrap());
    assert_eq!(hits, [3 * rounds, rounds], "{what}");
    let calls: Vec<(&str, u64)> = counts.functions().map(|it| (it.name, it.hits)).collect();
    let of_name = |name: &str| calls.iter().find(|it| it.0 == name).unwrap().1;
    let hits = ["half", "leaf", "outer"].map(of_name);
    assert_eq!(hits, [3 * rounds, 2 * rounds, rounds], "{what}");
}

// promise: Observations: Hits of 1, 4, 16 and 60 threads are counted to the last one, also of threads without
//    thread-local storage of their own, of many short ones, and in signal handlers (4 programs × 10)
#[test]
fn hits_of_all_kinds_of_threads_are_exact() {
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            let mut talker = Talker::start(&file);
            // So that the stacks exist in the first image: later threads use them again.
            talker.ask("threads 4 10", "done");
            let mut before = rounds(&talker.ask("clones 4 10", "done"));
            let image = Image::of(talker.pid()).text();
            let target = Target::open(talker.pid()).unwrap();
            for command in [
                "threads 1 50000",
                "threads 4 50000",
                "threads 16 10000",
                "threads 60 2000",
                "short 60 100",
                "clones 2 50000",
                "clones 16 10000",
                "bare 2 50000",
                "bare 16 10000",
                "signals 4 50000",
            ] {
                let mut observer = target.observe(&observation(), options()).unwrap();
                let after = rounds(&talker.ask(command, "done"));
                let observed = observer.remove().unwrap();
                let what = format!("{command} of {}", file.display());
                assert_rounds(&observed.counts, after - before, &what);
                before = after;
            }
            image.assert_same(&Image::of(talker.pid()).text(), "the program");
            assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        }
    }
}

// promise: Observations: Counts that are read while threads claim rows and run out of them never go down (2 programs)
#[test]
fn counts_never_go_down() {
    for file in fixture_forms("owners") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let mut observer = target.observe(&observation(), options()).unwrap();
        let mut total = 0;
        let mut expected = 0;
        for command in ["threads 1", "clones 20", "threads 60", "bare 20"] {
            talker.send(&format!("{command} 20000"));
            let threads: u64 = command.split(' ').nth(1).unwrap().parse().unwrap();
            expected += threads * 20_000 * 10;
            eventually("every hit is counted", || {
                let now = observer.counts().unwrap().total();
                assert!((total..=expected).contains(&now), "{total}, {now}");
                total = now;
                (now == expected).then_some(())
            });
            talker.expect("done");
        }
        let observed = observer.remove().unwrap();
        assert_eq!(observed.counts.total(), expected);
    }
}
