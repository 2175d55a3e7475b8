//! `hist -by`: a histogram for each key.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use test_support::{Talker, fixture_forms, program, program_forms};

use crate::count_functions::{ObservingTool, start_observing, start_observing_several};
use crate::count_several::{other_pid_flags, run_all, targets};
use crate::hist::{Values, assert_exact};
use crate::support::{command, is_observed, object, run};

fn making(flags: &str, pid: i32) -> ObservingTool {
    start_observing("hist", flags, pid)
}

/// The histogram of each key, which is an integer.
fn of_integers(json: &Value) -> BTreeMap<i64, &Value> {
    let keys = json["keys"].as_array().unwrap().iter();
    let all = keys.map(|it| (it["key"][0]["int"].as_i64().unwrap(), it));
    let found: BTreeMap<i64, &Value> = all.clone().collect();
    assert_eq!(found.len(), all.count(), "{json}");
    found
}

/// The values of `Calls.leaf`, of each key.
fn leaves(
    threads: u64,
    rounds: i64,
    key: fn(i64) -> i64,
    value: fn(i64) -> i64,
) -> BTreeMap<i64, Values> {
    let mut all: BTreeMap<i64, Values> = BTreeMap::new();
    for round in 1..=rounds {
        // Another function calls it with each even number.
        let calls = if round % 2 == 0 { 2 } else { 1 };
        let values = all.entry(key(round)).or_default();
        *values.entry(value(round)).or_default() += calls * threads;
    }
    all
}

// promise: Functions: `hist -by` has each argument of all calls in its bucket of the histogram of its key, with the exact sum, least and
//    greatest (2 programs, 1, 4 and 16 threads)
#[test]
fn values_are_in_histograms_of_their_keys() {
    for file in program_forms("calls") {
        for threads in [1, 4, 16] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = making("-fn Calls.leaf -of arg0*arg0-1000 -by arg0&255 -json", pid);
            target.ask(&format!("run {threads} 5000"), "calls");
            let json = object(&tool.end().answer());
            let expected = leaves(threads, 5000, |it| it & 255, |it| it * it - 1000);
            let found = of_integers(&json);
            assert_eq!(found.len(), 256);
            for (key, values) in &expected {
                assert_exact(found[key], values);
            }
            assert_eq!(
                (&json["untyped"], &json["other"]["count"]),
                (&json!(0), &json!(0))
            );
            assert_eq!(
                (&json["by"], &json["of"]),
                (&json!(["arg0&255"]), &json!("arg0*arg0-1000"))
            );
            assert!(!is_observed(pid));
            target.ask("run 1 10", "calls");
        }
    }
}

// promise: Functions: `hist -by` of 100,000 keys has all values, in histograms of keys or as other, with their exact sum (2 programs, 1
//    and 16 threads)
#[test]
fn more_keys_than_room_add_up() {
    const KEYS: i64 = 100_000;
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        for threads in [1, 16] {
            let tool = making(
                "-fn leaf -of int(arg0) -by int(arg0)*-1 -json",
                target.pid(),
            );
            target.ask(&format!("calls {threads} {KEYS}"), "called");
            let json = object(&tool.end().answer());
            let found = of_integers(&json);
            assert!(found.len() >= 1000, "{}", found.len());
            let (mut count, mut sum) = (0, 0);
            for (key, histogram) in &found {
                let of_key = histogram["count"].as_i64().unwrap();
                // The first and the last argument are passed once.
                let most = if (1..KEYS).contains(&-key) { 2 } else { 1 };
                assert!(of_key <= most * threads, "{histogram}");
                assert_eq!(histogram["sum"], -key * of_key, "{histogram}");
                assert_eq!(
                    (&histogram["min"], &histogram["max"]),
                    (&json!(-key), &json!(-key))
                );
                count += of_key;
                sum += -key * of_key;
            }
            let other = &json["other"];
            assert!(other["count"].as_i64().unwrap() > KEYS, "{other}");
            let buckets = other["buckets"].as_array().unwrap().iter();
            let in_buckets: i64 = buckets.map(|it| it["count"].as_i64().unwrap()).sum();
            assert_eq!(other["count"], in_buckets);
            assert_eq!(json["untyped"], 0);
            assert_eq!(count + in_buckets, 2 * threads * KEYS);
            assert_eq!(sum + other["sum"].as_i64().unwrap(), threads * KEYS * KEYS);
        }
    }
}

// promise: Observations: `hist -by` has strings, probes and threads as keys, up to four together (2 programs)
#[test]
fn keys_are_of_any_kind() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let flags = "-probe strings -of len(arg1)-1000 -by str(arg1),len(arg2),probe,tid -json";
        let tool = making(flags, pid);
        target.ask("hit 10", "done");
        let json = object(&tool.end().answer());
        let keys = json["keys"].as_array().unwrap();
        let key = json!([
            {"string": {"text": "hello", "is_whole": true}},
            {"int": 8}, {"probe": "strings"}, {"thread": pid},
        ]);
        assert_eq!((&keys[0]["key"], keys.len()), (&key, 1), "{json}");
        assert_exact(&keys[0], &Values::from([(-995, 10)]));
        // With an unsigned value of the probe, which is kept apart.
        let tool = making("-probe ints -of u64(arg3) -by probe -json", pid);
        target.ask("hit 10", "done");
        let json = object(&tool.end().answer());
        assert_exact(&json["keys"][0], &Values::from([(85, 10)]));
    }
}

// promise: Observations: Hits without a value or without a key are untyped in `hist -by` (2 programs, 4 ways)
#[test]
fn hits_without_value_or_key_are_untyped() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        for flags in [
            "-of len(arg0) -by arg3",
            "-of arg3 -by str(arg0)",
            "-of arg3 -by probe,len(arg0)",
            "-of arg3 -by arg3 -where len(arg0)>1",
        ] {
            let tool = making(&format!("-probe ints {flags} -json"), target.pid());
            target.ask("hit 10", "done");
            let json = object(&tool.end().answer());
            let keys = json["keys"].as_array().unwrap();
            assert_eq!((keys.len(), &json["untyped"]), (0, &json!(10)), "{flags}");
        }
    }
}

#[test]
fn calls_without_free_registers_are_counted_or_untyped() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let tool = making(
            "-fn scales -of 1500+arg0-arg0 -by 3,tid -json",
            target.pid(),
        );
        target.ask("pass 4 2000", "passed");
        let json = object(&tool.end().answer());
        let mut count = json["untyped"].as_u64().unwrap();
        for of_thread in json["keys"].as_array().unwrap() {
            let values = of_thread["count"].as_u64().unwrap();
            assert_eq!(of_thread["sum"], values * 1500);
            count += values;
        }
        assert_eq!(count, 8000, "{json}");
    }
}

#[test]
fn usdt_probes_are_keys() {
    for file in fixture_forms("usdt") {
        let mut target = Talker::start(&file);
        let tool = making("-usdt demo:* -of 7 -by probe -json", target.pid());
        target.ask("fire 4 1000", "fired");
        let json = object(&tool.end().answer());
        let mut count = json["untyped"].as_u64().unwrap();
        for of_probe in json["keys"].as_array().unwrap() {
            let values = of_probe["count"].as_u64().unwrap();
            assert_eq!(of_probe["sum"], values * 7);
            count += values;
        }
        assert_eq!(count, 4 * 3500, "{json}");
    }
}

// promise: Functions: Histograms of keys of several processes have all their values, together and by process (3 processes, 2 ways)
#[test]
fn keys_of_several_processes_add_up() {
    let mut targets = targets("calls");
    let pids: Vec<i32> = targets.iter().map(Talker::pid).collect();
    let others = other_pid_flags(&targets);
    for way in ["", "pid,"] {
        let flags = format!("-json -fn Calls.raises -of arg0 -by {way}arg0&1{others}");
        let tool = start_observing_several("hist", &flags, pids[0], 3);
        run_all(&mut targets);
        let json = object(&tool.end().answer());
        let mut found = BTreeMap::new();
        for it in json["keys"].as_array().unwrap() {
            let pid = it["key"][0]["process"].as_i64();
            let parity = it["key"].as_array().unwrap().last().unwrap()["int"].as_i64();
            let figures = ["count", "sum"].map(|field| it[field].as_i64().unwrap());
            found.insert((pid, parity.unwrap()), figures);
        }
        let mut expected = BTreeMap::new();
        for (pid, rounds) in pids.iter().zip([100, 200, 300]) {
            let pid = (!way.is_empty()).then_some(i64::from(*pid));
            for round in 1..=rounds {
                let [count, sum] = expected.entry((pid, round & 1)).or_insert([0, 0]);
                *count += 2;
                *sum += 2 * round;
            }
        }
        assert_eq!(found, expected, "{json}");
        assert!(!pids.iter().any(|pid| is_observed(*pid)));
    }
}

#[test]
fn keys_with_most_values_are_shown() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    // Without a space, at which flags are split.
    let picture = std::env::temp_dir().join(format!("hist-by-{pid}.svg"));
    let flags = format!(
        "-fn Calls.deep -of arg0 -by arg0&3 -top 1 -svg {}",
        picture.display()
    );
    let tool = making(&flags, pid);
    target.ask("run 1 8", "calls");
    let answer = tool.end().answer();
    // Each round calls it with 0 to the number of the round, modulo 8.
    let expected = "\
count 12 sum 16 mean 1.3 min 0 max 4 p50 0 p90 4 p99 4 p99.9 4 0
[0]    8 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|
[1]    0 |                                                  |
[2, 4) 0 |                                                  |
[4, 8) 4 |@@@@@@@@@@@@@@@@@@@@@@@@@                         |
count 24 of 3 keys more
count 0 other
untyped 0
";
    assert_eq!(answer, expected);
    let drawn = std::fs::read_to_string(&picture).unwrap();
    std::fs::remove_file(picture).unwrap();
    assert!(
        drawn.contains(">0, arg0<") && !drawn.contains(">1, arg0<"),
        "{drawn}"
    );
    let tool = making(
        "-fn Calls.deep -of arg0 -by arg0&3,probe -top 2 -format table",
        pid,
    );
    target.ask("run 1 8", "calls");
    let table = tool.end().answer();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| !line.starts_with('-'))
        .map(|line| line.split([' ', '|']).filter(|it| !it.is_empty()).collect())
        .collect();
    let head = "arg0&3 probe count mean min p50 p90 p99 p99.9 max";
    assert_eq!(rows[0].join(" "), head);
    assert_eq!(rows[1].join(" "), "0 Calls.deep 12 1.3 0 0 4 4 4 4");
    assert!(rows[3].join(" ").starts_with("of 2 keys more "), "{table}");
    assert!(rows[4].join(" ").starts_with("other 0 "), "{table}");
    assert_eq!(rows[5].join(" "), "untyped 0");
    assert!(table.contains("\n0 Calls.deep, arg0:\n[0]"), "{table}");
}

#[test]
fn programs_have_histograms_of_keys_from_their_start() {
    for file in program_forms("calls") {
        let line = format!(
            "trace -json -hist -fn Calls.leaf -of arg0 -by arg0&1,tid -where arg0>5 -prog {}",
            file.display()
        );
        let mut command = command(line.split(' '));
        let mut tool = Talker::spawn(command.stderr(std::process::Stdio::piped()));
        tool.ask("run 4 10", "calls");
        tool.close_input();
        let mut stderr = String::new();
        let mut pipe = tool.guard().child().stderr.take().unwrap();
        std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
        let said: Vec<Value> = stderr.lines().map(object).collect();
        let found = said
            .iter()
            .find(|it| it["type"] == "keyed_histogram")
            .unwrap();
        let keys = found["keys"].as_array().unwrap();
        assert_eq!(keys.len(), 8, "{stderr}");
        for key in keys {
            let is_odd = key["key"][0]["int"] == 1;
            let values = if is_odd {
                Values::from([(7, 1), (9, 1)])
            } else {
                Values::from([(6, 2), (8, 2), (10, 2)])
            };
            assert_exact(key, &values);
        }
    }
}

#[test]
fn histograms_so_far_grow() {
    let mut target = Talker::start(&program("calls"));
    let mut tool = making(
        "-fn Calls.leaf -of arg0 -by arg0&1 -interval 20ms -json",
        target.pid(),
    );
    target.ask("run 4 2000", "calls");
    let expected = [8000, 4000];
    let counts = |json: &Value| {
        let of =
            |key| {
                json["keys"].as_array().unwrap().iter().find_map(|it| {
                    (it["key"][0]["int"] == key).then(|| it["count"].as_u64().unwrap())
                })
            };
        [of(0).unwrap_or(0), of(1).unwrap_or(0)]
    };
    let mut before = [0, 0];
    while before != expected {
        let json = object(&tool.line().unwrap());
        assert!(json["at"].as_f64().unwrap() > 0.0);
        let now = counts(&json);
        assert!(now[0] >= before[0] && now[1] >= before[1], "{json}");
        before = now;
    }
    let answer = tool.end().answer();
    let total = object(answer.lines().last().unwrap());
    assert!(total["at"].is_null());
    assert_eq!(counts(&total), expected);
}

/// A product of products, `depth` levels deep.
fn square(depth: u32) -> String {
    match depth {
        0 => "arg3".to_owned(),
        _ => format!("({0}*{0})", square(depth - 1)),
    }
}

#[test]
fn what_cannot_be_is_refused_before() {
    let target = Talker::start(&program("shown"));
    let pid = target.pid();
    for (flags, message) in [
        ("-probe ints -of arg0 -by arg9", "probe ints has no arg9"),
        (
            "-probe ints -of arg0 -by arg0==1",
            "arg0==1 is a comparison",
        ),
        (
            "-probe ints -of arg0 -by arg0,arg1,arg2",
            "at most 2 keys can be made of arguments; nothing was changed",
        ),
        ("-probe ints -of arg0 -top 3", "-top needs -by"),
        (
            // As many numbers wait at a time as there are registers for without keys.
            &format!("-probe ints -of {} -by arg0", square(4)),
            "too many numbers are calculated at a time; nothing was changed",
        ),
    ] {
        let run = run(&format!("hist -pid {pid} {flags}"));
        assert!(run.stderr.contains(message), "{flags}: {}", run.stderr);
        assert_eq!(run.stdout, "");
        assert!(run.code == Some(1) || run.code == Some(2), "{run:?}");
    }
    let two = run(&format!(
        "hist -pid {pid} -pid 1 -probe ints -of arg0 -by caller"
    ));
    assert!(
        two.stderr.contains("-by caller is for one process"),
        "{two:?}"
    );
    assert!(!is_observed(pid));
}
