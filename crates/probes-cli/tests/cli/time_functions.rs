//! `latency -fn`: how long calls of functions last.

use serde_json::Value;
use test_support::{Talker, fixture_forms, program_forms};

use crate::count_functions::observing;
use crate::support::{is_observed, object, run};

/// The figures of a plain line before its name.
const FIGURES: usize = 11;

/// COUNT, RUNNING, EXITS, LOST, UNWOUND and the name of each plain line, by name.
fn figures(plain: &str) -> Vec<String> {
    let line = |line: &str| {
        let words: Vec<&str> = line.splitn(FIGURES + 1, ' ').collect();
        let numbers: Vec<u64> = words[..FIGURES]
            .iter()
            .map(|word| word.parse().unwrap())
            .collect();
        assert!(numbers[2..7].is_sorted(), "{line}");
        let others = words[7..FIGURES].join(" ");
        format!("{} {} {others}", words[FIGURES], words[0])
    };
    let mut lines: Vec<String> = plain.lines().map(line).collect();
    lines.sort();
    lines
}

// promise: Functions: Calls of C functions, nested, ended by a jump, and unwound by longjmp(3), in one thread and in 16,
//    are timed to the last one (2)
#[test]
fn every_call_of_c_is_timed_or_unwound() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for threads in [1, 4, 16] {
            let tool = observing(
                "latency",
                "-fn deep,tail,returns_long_double -fn unwound,leaf",
                pid,
            );
            target.ask(&format!("call {threads} 2000"), "called");
            let run = tool.end();
            assert_eq!(run.stderr, "");
            let rounds = threads * 2000;
            let expected = [
                format!("deep {} 0 0 0 0", 6 * rounds),
                format!("leaf {} 0 0 0 0", 5 * rounds + rounds / 2),
                format!("returns_long_double {rounds} 0 0 0 0"),
                format!("tail {rounds} 0 0 0 0"),
            ];
            let mut figures = figures(&run.answer());
            let unwound = figures.pop().unwrap();
            assert_eq!(figures, expected, "{threads}");
            // Those of the last round of a thread are noticed only if its stack is used again.
            let words: Vec<&str> = unwound.split(' ').collect();
            let ["unwound", "0", running, "0", "0", unwound] = words[..] else {
                panic!("{words:?}");
            };
            let [running, unwound]: [u64; 2] = [running, unwound].map(|it| it.parse().unwrap());
            assert_eq!(running + unwound, 3 * rounds);
            assert!(running <= 3 * threads, "{running}");
            assert!(!is_observed(pid));
        }
        target.ask("call 1 1", "called");
    }
}

#[test]
fn exits_do_not_count_as_functions() {
    for file in fixture_forms("lasting") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let tool = observing("latency", "-fn deep,tail,returns_long_double", pid);
        let info = run(&format!("info -json -pid {pid}")).json();
        assert_eq!(info["observed_functions"], 3);
        tool.kill();
        let cleaned = run(&format!("observe -clean -pid {pid}")).answer();
        assert_eq!(cleaned, format!("{pid} 3\n"));
        assert!(!is_observed(pid));
    }
}

#[test]
fn times_are_those_of_the_program() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let tool = observing("latency", "-json -fn lasts", target.pid());
        let answer = target.ask("last 20 2000", "lasted");
        let own: u64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let json = object(&tool.end().answer());
        let function = &json["functions"][0];
        let number = |name: &str| function[name].as_u64().unwrap();
        assert_eq!((number("count"), number("unwound")), (20, 0));
        let measured = 20 * number("mean_ns");
        // The program reads its clock before the first call and after the last one.
        assert!(measured <= own + own / 100, "{measured} {own}");
        assert!(measured >= 20 * 2_000_000 * 99 / 100, "{measured}");
        assert!(number("max_ns") >= number("p50_ns") && number("p50_ns") >= 1_980_000);
        let counted = function["buckets"].as_array().unwrap().iter();
        let counted: u64 = counted.map(|it| it["count"].as_u64().unwrap()).sum();
        assert_eq!(counted, 20);
        assert_eq!(json["pairs"], Value::Array(Vec::new()));
    }
}

/// The calls of each function that the program `calls` has counted.
fn own_calls(target: &mut Talker, command: &str) -> Vec<u64> {
    let answer = target.ask(command, "calls");
    let words = answer.split(' ').skip(1);
    words
        .map(|word| word.split_once('=').unwrap().1.parse().unwrap())
        .collect()
}

// promise: Functions: Calls of OCaml functions are timed to the last one, and those that an exception ends are told
//    apart (2 programs, 1 and 4 threads)
#[test]
fn calls_that_raise_are_unwound() {
    for file in program_forms("calls") {
        for threads in [1, 4] {
            let mut target = Talker::start(&file);
            let before = own_calls(&mut target, "run 1 0");
            let tool = observing(
                "latency",
                "-fn Calls.leaf,Calls.deep,Calls.raises",
                target.pid(),
            );
            let after = own_calls(&mut target, &format!("run {threads} 20000"));
            let run = tool.end();
            let added: Vec<u64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
            let [leaves, deep, raises] = added[..] else {
                panic!("{added:?}");
            };
            // Every other call of `raises` raises; the others end with a jump to `leaf`.
            let half = raises / 2;
            let expected = [
                format!("Calls.deep {deep} 0 0 0 0"),
                format!("Calls.leaf {leaves} 0 0 0 0"),
                format!("Calls.raises {half} 0 0 0 {half}"),
            ];
            assert_eq!(figures(&run.answer()), expected, "{threads}");
        }
    }
}

// promise: Functions: An OCaml program that overflows its stack in functions that are timed catches it (2)
#[test]
fn overflow_within_timed_functions_is_caught() {
    for file in program_forms("overflow") {
        let mut target = Talker::start(&file);
        let tool = observing("latency", "-fn Overflow.*", target.pid());
        for threads in [0, 4] {
            let answer = target.ask(&format!("overflow {threads}"), "overflow");
            assert_eq!(answer, "overflow caught=9 others=same");
        }
        let answer = tool.end().answer();
        let small = answer.lines().find(|it| it.ends_with(" Overflow.small"));
        let words: Vec<&str> = small.unwrap().split(' ').collect();
        // Some 500 calls of each overflow are recorded, and lost are those within them.
        let (lost, unwound): (u64, u64) = (words[9].parse().unwrap(), words[10].parse().unwrap());
        assert!(lost > 1000 && unwound > 1000, "{answer}");
    }
}

#[test]
fn functions_and_pairs_are_timed_together() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let tool = observing(
            "latency",
            "-pair start,stop -fn fixture_command",
            target.pid(),
        );
        target.ask("do ()()", "done");
        let answer = tool.end().answer();
        let mut lines = answer.lines();
        assert!(lines.next().unwrap().starts_with("2 "), "{answer}");
        assert!(
            lines.next().unwrap().ends_with(" 0 0 0 0 fixture_command"),
            "{answer}"
        );
    }
}

#[test]
fn work_of_the_collector_is_timed() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = observing("latency", "-gc minor,slice", target.pid());
        target.ask("run 4 200000", "calls");
        let answer = tool.end().answer();
        let lines = figures(&answer);
        let [minor, slice] = &lines[..] else {
            panic!("{answer}");
        };
        // Of OCaml 4, or of OCaml 5.
        let names = ["caml_empty_minor_heap", "caml_empty_minor_heaps_once"];
        let name = minor.split(' ').next().unwrap();
        assert!(names.contains(&name), "{minor}");
        assert!(slice.starts_with("caml_major_collection_slice "), "{slice}");
        for line in [minor, slice] {
            let count = line.split(' ').nth(1).unwrap();
            assert!(count != "0" && line.ends_with(" 0 0 0 0"), "{line}");
        }
    }
    let target = Talker::start(&fixture_forms("lasting")[0]);
    let none = run(&format!("latency -pid {} -gc stw", target.pid()));
    assert_eq!(none.code, Some(1));
    let name = "is caml_try_run_on_all_domains_with_spin_work";
    assert!(none.stderr.contains(name), "{}", none.stderr);
}

#[test]
fn errors_say_what_to_give() {
    let target = Talker::start(&fixture_forms("lasting")[0]);
    let latency = |flags: &str| run(&format!("latency -pid {}{flags}", target.pid()));
    let missing = latency("");
    assert_eq!(missing.code, Some(2));
    assert!(
        missing
            .stderr
            .contains("needs -pair START,STOP, -fn GLOBS or -gc WORK")
    );
    let unknown = latency(" -fn depe");
    assert_eq!(unknown.code, Some(1));
    assert!(
        unknown.stderr.contains("did you mean"),
        "{}",
        unknown.stderr
    );
    assert!(!is_observed(target.pid()));
}
