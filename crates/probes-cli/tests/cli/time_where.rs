//! `latency -fn` with `-where`: how long the calls last for which an expression is true.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use test_support::{Talker, fixture_forms, program_forms};

use crate::count_functions::{start_observing, trace};
use crate::support::{is_observed, object, run};

/// Observes the calls of functions while the program executes a command; returns what is said of each function, by
/// name.
fn observed(
    target: &mut Talker,
    (name, flags): (&str, &str),
    command: &str,
) -> BTreeMap<String, Value> {
    let tool = start_observing(name, &format!("-json {flags}"), target.pid());
    let word = if command.starts_with("run") {
        "calls"
    } else {
        "called"
    };
    target.ask(command, word);
    let json = object(&tool.end().answer());
    assert!(!is_observed(target.pid()));
    by_name(&json)
}

/// What is said of each function, by name.
fn by_name(json: &Value) -> BTreeMap<String, Value> {
    let functions = json["functions"].as_array().unwrap().iter();
    functions
        .map(|it| (it["name"].as_str().unwrap().to_owned(), it.clone()))
        .collect()
}

fn number(function: &Value, field: &str) -> u64 {
    function[field].as_u64().unwrap()
}

/// A program, what it does, its functions, and expressions.
type Asked = ([PathBuf; 2], &'static str, &'static str, [&'static str; 3]);

fn asked() -> [Asked; 2] {
    [
        (
            program_forms("calls"),
            "run 4 2000",
            "Calls.leaf,Calls.deep,Calls.raises",
            ["arg0>3", "arg0&1==1", "len(arg0)==1"],
        ),
        (
            fixture_forms("lasting"),
            "call 4 2000",
            "deep,tail,leaf",
            ["arg0>3", "int(arg0)&1==1", "int(arg0)<0"],
        ),
    ]
}

// promise: Functions: With `-where`, the calls are timed or unwound for which an expression is true, as many as `count -where` counts; of
//    self times and by caller, too (4 programs, 3 expressions, 3 ways)
#[test]
fn chosen_calls_are_timed_or_unwound() {
    for (files, command, functions, expressions) in asked() {
        for file in files {
            let mut target = Talker::start(&file);
            for expression in expressions {
                let flags = format!("-fn {functions} -where {expression}");
                let expected = observed(&mut target, ("count", &flags), command);
                for way in ["", " -self", " -by caller"] {
                    let flags = flags.clone() + way;
                    let found = observed(&mut target, ("latency", &flags), command);
                    assert_eq!(found.len(), 3, "{found:?}");
                    for (name, function) in found {
                        let ended = ["count", "unwound", "running"].map(|it| number(&function, it));
                        let expected = &expected[&name];
                        let hits = number(expected, "hits");
                        assert_eq!(ended.iter().sum::<u64>(), hits, "{flags} {function}");
                        let both = [&function, expected].map(|it| number(it, "untyped"));
                        assert_eq!(both[0], both[1], "{flags} {function}");
                        let others = ["lost", "unmatched_exits"].map(|it| number(&function, it));
                        assert_eq!(others, [0, 0], "{flags} {function}");
                    }
                }
            }
        }
    }
}

/// What `trace` says of each function, by name, while the program executes a command.
fn traced(file: &Path, flags: &str, command: &str) -> BTreeMap<String, Value> {
    let run = trace(file, &format!("-json {flags}"), &format!("{command}\\n"));
    assert_eq!(run.code, Some(0), "{run:?}");
    let answer = run.stderr.lines().find(|it| it.contains("\"functions\":"));
    by_name(&object(answer.unwrap()))
}

// promise: Functions: `trace -latency -where` times the calls that `trace -count -where` counts, and of those that take some time
//    it has no others (4 programs, 3 expressions; 2 programs)
#[test]
fn calls_from_the_start_are_chosen() {
    for (files, command, functions, expressions) in asked() {
        for file in files {
            for expression in expressions {
                let of = |what| {
                    let flags = format!("-{what} -fn {functions} -where {expression}");
                    traced(&file, &flags, command)
                };
                let (counted, timed) = (of("count"), of("latency"));
                assert_eq!(timed.len(), 3, "{timed:?}");
                for (name, function) in timed {
                    let hits = number(&counted[&name], "hits");
                    let ended = ["count", "unwound", "running"].map(|it| number(&function, it));
                    let ended: u64 = ended.iter().sum();
                    // On a busy machine some are lost because their registers cannot be saved.
                    let with_lost = ended + number(&function, "lost");
                    assert!(
                        (ended..=with_lost).contains(&hits),
                        "{expression} {function}"
                    );
                }
            }
        }
    }
    for file in fixture_forms("lasting") {
        let (command, long) = (
            "last 2 100000\\nlast 7 20",
            "-latency -fn lasts -where elapsed>80ms",
        );
        let function = &traced(&file, long, command)["lasts"];
        assert_eq!(
            (number(function, "count"), number(function, "unwound")),
            (2, 0)
        );
    }
}

// promise: Functions: Self times of chosen calls are without the time of other calls, whether these are chosen or not (4 programs)
#[test]
fn calls_left_out_are_subtracted_from_callers() {
    for (files, command, functions, _) in asked() {
        for file in files {
            let mut target = Talker::start(&file);
            // The outermost calls of `deep` have other calls within them.
            let deep = functions
                .split(',')
                .find(|it| it.ends_with("deep"))
                .unwrap();
            let flags = format!("-self -fn {functions} -where arg0==5");
            let function = &observed(&mut target, ("latency", &flags), command)[deep];
            assert!(number(function, "count") > 0);
            let times = ["self_ns", "total_ns"].map(|it| number(function, it));
            assert!(times[0] < times[1], "{function}");
            assert_eq!(number(function, "doubtful"), 0);
        }
    }
}

#[test]
fn impossible_choices_of_calls_are_refused() {
    for file in program_forms("calls") {
        let target = Talker::start(&file);
        let pid = target.pid();
        for (expression, why) in [
            (
                "arg1>0",
                "Calls.leaf has no arg1: it has arg0 only; nothing was changed",
            ),
            ("retval>0", "retval"),
            ("arg0>", "arg0>"),
        ] {
            let refused = run(&format!(
                "latency -pid {pid} -fn Calls.leaf -where {expression}"
            ));
            assert_ne!(refused.code, Some(0));
            assert!(refused.stderr.contains(why), "{refused:?}");
        }
        assert!(!is_observed(pid));
    }
}
