//! `latency -by EXPR`: times by keys.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use test_support::{Talker, fixture_forms, program, program_forms};

use crate::count_functions::{ObservingTool, start_observing, start_observing_several};
use crate::count_several::{other_pid_flags, run_all, targets};
use crate::support::{is_observed, object, run};

fn timing(flags: &str, pid: i32) -> ObservingTool {
    start_observing("latency", flags, pid)
}

fn number(json: &Value, field: &str) -> u64 {
    json[field]
        .as_u64()
        .unwrap_or_else(|| panic!("{field}: {json}"))
}

/// How many times each key has, by the name and the integer.
fn counts(json: &Value) -> BTreeMap<(String, i64), u64> {
    let keys = json["keyed"]["keys"].as_array().unwrap().iter();
    let counts = keys.map(|it| {
        let buckets = it["buckets"].as_array().unwrap().iter();
        let in_buckets: u64 = buckets.map(|it| number(it, "count")).sum();
        assert_eq!(in_buckets, number(it, "count"), "{it}");
        let (count, max) = (number(it, "count"), number(it, "max_ns"));
        let sum = number(it, "sum_ns");
        assert!(sum >= max && sum <= count * (max + 1), "{it}");
        let key = it["key"].as_array().unwrap().last().unwrap();
        let name = it["name"].as_str().unwrap().to_owned();
        ((name, key["int"].as_i64().unwrap()), count)
    });
    counts.collect()
}

/// How many times have no key of their own: for lack of room, and because they have none.
fn rest(json: &Value) -> (u64, u64) {
    let keyed = &json["keyed"];
    (
        number(&keyed["other"], "count"),
        number(&keyed["untyped"], "count"),
    )
}

/// Asserts that the times of all keys are those of the pairs or functions.
fn assert_adds_up(json: &Value, of: &str) {
    let all = json[of].as_array().unwrap();
    let count: u64 = all.iter().map(|it| number(it, "count")).sum();
    let max = all.iter().map(|it| number(it, "max_ns")).max().unwrap();
    let keyed = &json["keyed"];
    let keys = keyed["keys"].as_array().unwrap().iter();
    let keys: Vec<&Value> = keys.chain([&keyed["other"], &keyed["untyped"]]).collect();
    assert_eq!(
        keys.iter().map(|it| number(it, "count")).sum::<u64>(),
        count
    );
    let longest = keys.iter().map(|it| number(it, "max_ns")).max().unwrap();
    // The rate of the clock is measured better and better, also between the two readings.
    assert!(
        longest.abs_diff(max) <= 2 + max / 100_000,
        "{longest} {max}"
    );
}

// promise: Functions: `latency -by` has each call with the key that its argument was at the entry (2 programs, 1, 4 and 16 threads)
#[test]
fn calls_have_keys_of_their_entries() {
    for file in program_forms("calls") {
        for threads in [1, 4, 16] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = timing("-fn Calls.leaf,Calls.deep -by arg0&7 -json", pid);
            target.ask(&format!("run {threads} 800"), "calls");
            let json = object(&tool.end().answer());
            let mut expected = BTreeMap::new();
            for round in 1..=800 {
                // Another function calls it with each even number.
                let calls = if round % 2 == 0 { 2 } else { 1 };
                *expected
                    .entry(("Calls.leaf".to_owned(), round & 7))
                    .or_default() += calls * threads;
                for depth in 0..=round % 8 {
                    *expected
                        .entry(("Calls.deep".to_owned(), depth))
                        .or_default() += threads;
                }
            }
            assert_eq!(counts(&json), expected);
            assert_eq!(
                (rest(&json), &json["keyed"]["by"]),
                ((0, 0), &json!(["arg0&7"]))
            );
            assert_adds_up(&json, "functions");
            assert!(!is_observed(pid));
            target.ask("run 1 10", "calls");
        }
    }
}

// promise: Functions: Times of 20,000 keys of C functions are in those of keys or of other, and add up, with `-where` as well (2 programs, 16
//    threads)
#[test]
fn more_keys_than_room_add_up() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        for (filter, least) in [("", 0), (" -where int(arg0)>=10000", 10_000)] {
            let tool = timing(
                &format!("-fn leaf -by int(arg0) -json{filter}"),
                target.pid(),
            );
            target.ask("calls 16 20000", "called");
            let run = tool.end();
            assert!(run.stderr.contains("found no room"), "{run:?}");
            let json = object(&run.stdout);
            let found = counts(&json);
            let (other, untyped) = rest(&json);
            assert!(found.len() >= 1000 && other > 0, "{} {other}", found.len());
            let meant = (0..20_000)
                .flat_map(|it| [it, it + 1])
                .filter(|it| *it >= least);
            let all = 16 * meant.count() as u64;
            assert_eq!((found.values().sum::<u64>() + other, untyped), (all, 0));
            assert!(found.keys().all(|(_, key)| (least..=20_000).contains(key)));
            assert_adds_up(&json, "functions");
        }
    }
}

// promise: Observations: `latency -by` has each pair with the key that its stop has, nested or by `-key` (2 programs, 3 ways)
#[test]
fn pairs_have_keys_of_their_stops() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        for (flags, flight) in [
            ("-by number&3", "flight 1 499"),
            ("-key number -by number&3", "flight 5 495"),
            (
                "-key number -where number>=0 -by tid,number&3",
                "flight 5 495",
            ),
        ] {
            let tool = timing(&format!("-pair start,stop {flags} -json"), target.pid());
            target.ask(flight, "flight");
            let json = object(&tool.end().answer());
            let found = counts(&json);
            assert_eq!(found.values().sum::<u64>(), 500, "{json}");
            assert_eq!(
                found.values().copied().collect::<Vec<_>>(),
                [125; 4],
                "{json}"
            );
            assert_eq!(rest(&json), (0, 0));
            assert!(found.keys().all(|(name, _)| name == "start,stop"));
            assert_adds_up(&json, "pairs");
        }
    }
}

// promise: Observations: Times without a key are those of `untyped` in `latency -by` (2 programs, pairs and functions)
#[test]
fn times_without_a_key_are_untyped() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let tool = timing("-pair start,stop -by str(number) -json", target.pid());
        target.ask("flight 1 99", "flight");
        let run = tool.end();
        let warning = "no key, and 100 times are untyped: an argument does not have the type";
        assert!(run.stderr.contains(warning), "{run:?}");
        let json = object(run.stdout.lines().next().unwrap());
        assert_eq!((counts(&json).len(), rest(&json)), (0, (0, 100)));
        assert_adds_up(&json, "pairs");
    }
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = timing("-fn Calls.leaf -by len(arg0) -json", target.pid());
        target.ask("run 2 100", "calls");
        let run = tool.end();
        assert!(
            run.stderr.contains("no key, and 300 times are untyped"),
            "{run:?}"
        );
        let json = object(run.stdout.lines().next().unwrap());
        assert_eq!((counts(&json).len(), rest(&json)), (0, (0, 300)));
        assert_adds_up(&json, "functions");
    }
}

// promise: Functions: Times by keys of several processes are together, or by process (3 processes, 2 ways)
#[test]
fn keys_of_several_processes_add_up() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let others = other_pid_flags(&targets);
    for way in ["", "pid,"] {
        let flags = format!("-json -fn Calls.leaf -by {way}arg0&1{others}");
        let tool = start_observing_several("latency", &flags, pids[0], 3);
        run_all(&mut targets);
        let json = object(&tool.end().answer());
        let mut found = BTreeMap::new();
        for it in json["keyed"]["keys"].as_array().unwrap() {
            let key = it["key"].as_array().unwrap();
            let pid = key[0]["process"].as_i64();
            let parity = key.last().unwrap()["int"].as_i64().unwrap();
            found.insert((pid, parity), number(it, "count"));
        }
        let mut expected = BTreeMap::new();
        for (pid, rounds) in pids.iter().zip([100, 200, 300]) {
            let pid = (!way.is_empty()).then_some(i64::from(*pid));
            // Two threads; twice with each even number.
            *expected.entry((pid, 0)).or_default() += 2 * rounds;
            *expected.entry((pid, 1)).or_default() += rounds;
        }
        assert_eq!(found, expected, "{json}");
        assert_adds_up(&json, "functions");
        assert!(!pids.iter().any(|pid| is_observed(*pid)));
    }
}

#[test]
fn keys_with_most_time_are_shown() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    let tool = timing("-fn Calls.deep -by arg0,probe -top 2", pid);
    target.ask("run 1 80", "calls");
    let answer = tool.end().answer();
    let lines: Vec<&str> = answer.lines().collect();
    assert!(lines[0].ends_with(" Calls.deep"), "{answer}");
    let mut rest = 360;
    for line in &lines[1..3] {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, count, .., name, key, probe] = words[..] else {
            panic!("{answer}");
        };
        assert_eq!(
            (words[0], words.len(), name, probe),
            ("by", 12, "Calls.deep", "Calls.deep")
        );
        // Of 80 rounds, each calls it with 0 to its number, modulo 8.
        let count: u64 = count.parse().unwrap();
        assert_eq!(count, 80 - 10 * key.parse::<u64>().unwrap(), "{answer}");
        rest -= count;
    }
    assert_eq!(lines[3], format!("by {rest} of 6 keys more"));
    assert_eq!(
        &lines[4..],
        ["by 0 0 0 0 0 0 0 0 other", "by 0 0 0 0 0 0 0 0 untyped"]
    );
    let tool = timing("-fn Calls.deep -by arg0 -top 1 -format table", pid);
    target.ask("run 1 80", "calls");
    let table = tool.end().answer();
    assert!(
        table.contains("\n function ") && table.contains("of 7 keys more"),
        "{table}"
    );
    assert!(
        table.contains("\n other ") && table.contains("\n untyped "),
        "{table}"
    );
}

#[test]
fn what_cannot_be_is_refused_before() {
    let target = Talker::start(&program("requests"));
    let pid = target.pid();
    for (flags, message) in [
        (
            "-pair start,stop -by number,number+1",
            "only one key of the times of a pair can be made of arguments; nothing was changed\n    number+1\n    ^^^^^^^^",
        ),
        (
            "-pair start,stop -by nothing",
            "unknown name nothing: the arguments of probe stop are number, text; text is \"nothing\", in quotes; nothing was changed",
        ),
        (
            "-pair start,stop -by tid,,number",
            "-by: a key is missing\n    tid,,number\n        ^",
        ),
        (
            "-fn Requests.* -by tid -self",
            "-self and -by EXPR cannot be combined",
        ),
        (
            "-pair start,stop -by tid -over 1ms",
            "-over and -by EXPR cannot be combined",
        ),
        ("-pair start,stop -by caller", "-by caller is for functions"),
        ("-pair start,stop -top 3", "-top needs -by"),
    ] {
        let run = run(&format!("latency -pid {pid} {flags}"));
        assert!(run.stderr.contains(message), "{flags}: {}", run.stderr);
        assert_eq!(run.stdout, "");
        assert!(run.code == Some(1) || run.code == Some(2), "{run:?}");
    }
    assert!(!is_observed(pid));
}
