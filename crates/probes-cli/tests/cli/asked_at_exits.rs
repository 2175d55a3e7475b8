//! `retval` and `elapsed` in expressions: what a function returns, and how long a pair or call took.

use serde_json::Value;
use test_support::{Talker, fixture_forms, program, program_forms};

use crate::count_functions::start_observing;
use crate::hist::{Values, assert_exact};
use crate::support::{is_observed, object, run};

/// Observes while the program executes a command; returns the JSON at the end.
fn observed(
    target: &mut Talker,
    (name, flags): (&str, &str),
    (command, word): (&str, &str),
) -> Value {
    let tool = start_observing(name, &format!("-json {flags}"), target.pid());
    target.ask(command, word);
    let json = object(&tool.end().answer());
    assert!(!is_observed(target.pid()));
    json
}

/// The element of a list with this name.
fn named<'j>(json: &'j Value, list: &str, name: &str) -> &'j Value {
    let mut all = json[list].as_array().unwrap().iter();
    let found = all.find(|it| it["name"] == name);
    found.unwrap_or_else(|| panic!("{name}: {json}"))
}

// promise: Functions: `hist -of retval` has each result of all returns in its bucket, and calls that end with a jump to another function
//    are untyped (2 programs, 1 and 4 threads)
#[test]
fn results_of_calls_are_in_their_buckets() {
    for file in program_forms("calls") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let rounds = 5000;
            let flags = "-fn Calls.leaf,Calls.deep,Calls.raises -of retval";
            let command = format!("run {threads} {rounds}");
            let json = observed(&mut target, ("hist", flags), (&command, "calls"));
            let (mut leaf, mut deep) = (Values::new(), Values::new());
            for round in 1..=rounds {
                let calls = if round % 2 == 0 { 2 } else { 1 };
                *leaf.entry(round + 1).or_default() += calls * threads;
                for depth in 0..=round % 8 {
                    *deep.entry(depth).or_default() += threads;
                }
            }
            for (name, values) in [("Calls.leaf", leaf), ("Calls.deep", deep)] {
                let found = named(&json, "histograms", name);
                assert_exact(found, &values);
                assert_eq!(found["untyped"], 0);
            }
            let raises = named(&json, "histograms", "Calls.raises");
            assert_eq!(
                (&raises["count"], &raises["untyped"]),
                (&0.into(), &(threads * 2500).into())
            );
            target.ask("run 1 10", "calls");
        }
    }
}

// promise: Functions: The same of functions of C, also of those that return in the x87 unit; the program computes what it did (2 programs, 1,
//    4 and 16 threads)
#[test]
fn results_of_c_functions_are_in_their_buckets() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        for threads in [1, 4, 16] {
            let flags = "-fn deep,tail,returns_long_double -of int(retval)";
            let command = format!("call {threads} 1000");
            let json = observed(&mut target, ("hist", flags), (&command, "called"));
            let mut deep = Values::new();
            for result in [1, 3, 6, 10, 15, 21] {
                deep.insert(result, 1000 * threads);
            }
            assert_exact(named(&json, "histograms", "deep"), &deep);
            let mut tail = Values::new();
            for round in (0..1000).step_by(2) {
                *tail.entry(round ^ 4).or_default() += threads;
            }
            let found = named(&json, "histograms", "tail");
            assert_exact(found, &tail);
            assert_eq!(found["untyped"], 500 * threads);
            let counted = named(&json, "histograms", "returns_long_double");
            assert_eq!(counted["count"], 1000 * threads);
        }
    }
}

#[test]
fn calls_are_counted_by_results() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        for (flags, hits, untyped) in [
            ("-fn Calls.deep -where retval==0", 2000, 0),
            ("-fn Calls.deep -where !(retval==0)", 7000, 0),
            ("-fn Calls.leaf -where retval<=101", 150, 0),
            ("-fn Calls.leaf -where len(retval)==1", 0, 3000),
            ("-fn Calls.raises -where retval>=0", 0, 1000),
        ] {
            let json = observed(&mut target, ("count", flags), ("run 1 2000", "calls"));
            let function = &json["functions"][0];
            assert_eq!(function["hits"], hits, "{flags} {function}");
            assert_eq!(function["untyped"], untyped, "{flags} {function}");
        }
        let by = "-fn Calls.deep -by retval";
        let json = observed(&mut target, ("count", by), ("run 1 80", "calls"));
        let keys = json["keys"].as_array().unwrap();
        assert_eq!(keys.len(), 8, "{json}");
        let hits: u64 = keys.iter().map(|it| it["hits"].as_u64().unwrap()).sum();
        assert_eq!(hits, 360, "{json}");
    }
}

#[test]
fn returns_are_watched_by_results() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let flags = "-json -fn Calls.deep,Calls.raises -where retval>=6";
        let tool = start_observing("watch", flags, target.pid());
        target.ask("run 1 7", "calls");
        let run = tool.end();
        let lines: Vec<Value> = run.stdout.lines().map(object).collect();
        let returns = lines.iter().filter(|it| it["type"] == "return");
        let results: Vec<&Value> = returns.map(|it| &it["result"]["int"]).collect();
        assert_eq!(results, [6, 6, 7], "{run:?}");
        let untyped: u64 = lines.iter().filter_map(|it| it["untyped"].as_u64()).sum();
        assert_eq!((untyped, lines.len()), (3, 4), "{run:?}");
    }
}

#[test]
fn untyped_results_are_explained() {
    let mut target = Talker::start(&program("calls"));
    let results = "no result, and 3 hits are untyped: the function has no result there";
    let arguments = "no result, and 6 hits are untyped: an argument does not have the type";
    for (asked, why) in [
        ("count -fn Calls.raises -where retval>=0", results),
        ("count -fn Calls.raises -by retval", results),
        ("hist -fn Calls.raises -of retval", results),
        ("hist -fn Calls.raises -of retval -by retval", results),
        ("count -fn Calls.raises -where len(arg0)==1", arguments),
    ] {
        let (command, flags) = asked.split_once(' ').unwrap();
        let tool = start_observing(command, flags, target.pid());
        target.ask("run 1 6", "calls");
        let run = tool.end();
        assert!(run.stderr.contains(why), "{asked}: {run:?}");
        let has_hint = run
            .stderr
            .contains("has no retval: ask for that of the function");
        assert_eq!(has_hint, why == results, "{asked}: {run:?}");
    }
}

#[test]
fn expressions_that_cannot_be_answered_are_refused() {
    for file in program_forms("calls") {
        let target = Talker::start(&file);
        let pid = target.pid();
        for (line, why) in [
            (
                "hist -fn Calls.leaf -of retval-arg0",
                "arg0 is not known where a function returns, which is where retval is asked",
            ),
            (
                "latency -fn Calls.leaf -where retval>0",
                "a result is known where a function returns",
            ),
            (
                "hist -fn Calls.leaf -of elapsed",
                "-of: elapsed is not known at a hit",
            ),
            (
                "latency -fn Calls.leaf -where elapsed>10",
                "elapsed is compared with a time by <, <=, > or >=",
            ),
            (
                "latency -fn Calls.leaf -where elapsed>1ms||arg0==1",
                "elapsed is compared with a time by <, <=, > or >=",
            ),
        ] {
            let (command, flags) = line.split_once(' ').unwrap();
            let refused = run(&format!("{command} -pid {pid} {flags}"));
            assert_ne!(refused.code, Some(0));
            assert!(refused.stderr.contains(why), "{refused:?}");
        }
        assert!(!is_observed(pid));
    }
}

// promise: Observations: `latency -where 'elapsed > 80ms'` has the pairs that take so long, and no others, also by key (2 programs)
#[test]
fn pairs_are_chosen_by_their_times() {
    let long = ".".repeat(100);
    let command = format!("do ({long})()()({long})()");
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        for key in ["", " -by tid"] {
            for (times, counts) in [
                ("elapsed>80ms", 2),
                ("elapsed<=80ms", 3),
                ("80ms<elapsed&&elapsed<1000s", 2),
                ("elapsed>1000s", 0),
                ("elapsed>0.2s&&elapsed<80ms", 0),
            ] {
                let flags = format!("-pair start,stop -where {times}{key}");
                let json = observed(&mut target, ("latency", &flags), (&command, "done"));
                let pair = &json["pairs"][0];
                assert_eq!(pair["count"], counts, "{flags} {pair}");
                assert_eq!(pair["untyped"], 0);
            }
        }
    }
}

// promise: Functions: With `elapsed` in `-where`, `latency -fn` has the calls that take so long, and no others, also with self
//    times, with keys, and with a condition where they begin (2 programs)
#[test]
fn calls_are_chosen_by_their_times() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        for more in ["", " -self", " -by probe", " -by caller"] {
            for (times, counts) in [
                ("elapsed>80ms", 2),
                ("elapsed<=80ms", 7),
                ("arg0>3000000&&elapsed>80ms", 2),
                ("elapsed>80ms&&arg0<3000000", 0),
            ] {
                let flags = format!("-fn lasts -where {times}{more}");
                let tool = start_observing("latency", &format!("-json {flags}"), target.pid());
                target.ask("last 2 100000", "lasted");
                target.ask("last 7 20", "lasted");
                let json = object(&tool.end().answer());
                let function = &json["functions"][0];
                assert_eq!(function["count"], counts, "{flags} {function}");
                assert_eq!(function["unwound"], 0, "{flags} {function}");
            }
        }
        // The same for calls that are shown one by one.
        let flags = "-json -over 1ms -fn lasts -where elapsed<80ms";
        let tool = start_observing("latency", flags, target.pid());
        target.ask("last 2 100000", "lasted");
        target.ask("last 3 2000", "lasted");
        let run = tool.end();
        let slow = run.stdout.lines().map(object);
        assert_eq!(
            slow.filter(|it| it["type"] == "slow_call").count(),
            3,
            "{run:?}"
        );
    }
}
