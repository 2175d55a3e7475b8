//! `hist`: histograms of what an expression is at each hit.

use std::collections::BTreeMap;

use serde_json::Value;
use test_support::{Scratch, Talker, fixture_forms, program, program_forms};

use crate::count_functions::{ObservingTool, start_observing};
use crate::support::{command, is_observed, object, run, run_command};

fn start_hist(flags: &str, pid: i32) -> ObservingTool {
    start_observing("hist", flags, pid)
}

/// How many times each value occurs.
pub(crate) type Values = BTreeMap<i64, u64>;

/// Returns the histogram of this name.
fn histogram<'j>(json: &'j Value, name: &str) -> &'j Value {
    let mut all = json["histograms"].as_array().unwrap().iter();
    let found = all.find(|it| it["name"] == name);
    found.unwrap_or_else(|| panic!("{name}: {json}"))
}

/// Asserts that each bucket of a histogram counts exactly those of these values that are in its range, and that count,
/// sum, mean, min, max and quantiles are those of the values.
pub(crate) fn assert_exact(histogram: &Value, values: &Values) {
    let buckets = histogram["buckets"].as_array().unwrap();
    let mut rest = values.clone();
    for bucket in buckets {
        let least = bucket["least"].as_i64().unwrap_or(i64::MIN);
        let most = bucket["most"].as_i64().unwrap_or(i64::MAX);
        let within: Vec<i64> = rest.range(least..=most).map(|(value, _)| *value).collect();
        let count: u64 = within.iter().map(|value| rest.remove(value).unwrap()).sum();
        assert_eq!(bucket["count"], count, "{bucket}");
    }
    assert!(rest.is_empty(), "{rest:?} are in no bucket of {histogram}");
    let count: u64 = values.values().sum();
    let sum: i64 = values
        .iter()
        .map(|(value, many)| value * *many as i64)
        .sum();
    assert_eq!(histogram["count"], count);
    assert_eq!(histogram["sum"], sum);
    assert_eq!(histogram["mean"], sum as f64 / count as f64);
    assert_eq!(histogram["min"], *values.keys().next().unwrap());
    assert_eq!(histogram["max"], *values.keys().next_back().unwrap());
    for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)] {
        let mut left = (count as f64 * share).ceil() as i64;
        let mut all = values.iter();
        let exact = all.find(|(_, many)| {
            left -= **many as i64;
            left <= 0
        });
        let exact = *exact.unwrap().0;
        let quantile = &histogram[name];
        let within = quantile["least"].as_i64().unwrap()..=quantile["most"].as_i64().unwrap();
        assert!(within.contains(&exact), "{name} is {exact}, not {quantile}");
    }
}

fn add(values: &mut Values, value: i64, many: u64) {
    *values.entry(value).or_default() += many;
}

// promise: Functions: `hist` has each argument of all calls in its bucket, with the exact sum, least and greatest (2 programs, 1, 4
//    and 16 threads)
#[test]
fn arguments_of_calls_are_in_their_buckets() {
    for file in program_forms("calls") {
        for (threads, rounds) in [(1, 20_000), (4, 20_000), (16, 3000)] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let tool = start_hist("-fn Calls.leaf,Calls.deep -of arg0*arg0-1000 -json", pid);
            target.ask(&format!("run {threads} {rounds}"), "calls");
            let json = object(&tool.end().answer());
            let (mut leaf, mut deep) = (Values::new(), Values::new());
            for round in 1..=rounds {
                // `raises` calls `leaf`, too, if the number is even.
                let calls = if round % 2 == 0 { 2 } else { 1 };
                add(&mut leaf, round * round - 1000, calls * threads);
                for depth in 0..=round % 8 {
                    add(&mut deep, depth * depth - 1000, threads);
                }
            }
            for (name, values) in [("Calls.leaf", leaf), ("Calls.deep", deep)] {
                let found = histogram(&json, name);
                assert_exact(found, &values);
                assert_eq!(found["untyped"], 0);
            }
            assert!(!is_observed(pid));
            target.ask("run 1 10", "calls");
        }
    }
}

// promise: Functions: `hist` has each argument of C functions in its bucket, also with `-linear` and `-where` (2 programs, 16 threads)
#[test]
fn arguments_of_c_functions_are_in_buckets() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (flags, above) in [
            ("", None),
            ("-linear -500,700,7", None),
            ("-linear 0,1,1", None),
            ("-where int(arg0)>1000", Some(1000)),
        ] {
            let flags = format!("-fn leaf -of int(arg0)-1000 -json {flags}");
            let tool = start_hist(flags.trim_end(), pid);
            target.ask("calls 16 2000", "called");
            let json = object(&tool.end().answer());
            let mut values = Values::new();
            for argument in (0..2000).flat_map(|round| [round, round + 1]) {
                if above.is_none_or(|above| argument > above) {
                    add(&mut values, argument - 1000, 16);
                }
            }
            assert_exact(histogram(&json, "leaf"), &values);
        }
    }
}

// promise: Observations: `hist` has each value of a probe in its bucket, and what has none is untyped (14 expressions, 2 programs)
#[test]
fn values_of_probes_are_in_their_buckets() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let max = (1_i64 << 62) - 1;
        for (probe, expression, value) in [
            ("ints", "arg3", Some(42)),
            ("ints", "answer-43", Some(-1)),
            ("ints", "zero", Some(0)),
            ("ints", "minus_one*1024", Some(-1024)),
            ("ints", "minus_one*1025", Some(-1025)),
            ("ints", "arg4", Some(max)),
            ("ints", "arg5", Some(-max - 1)),
            ("ints", "len(arg0)", None),
            ("constants", "arg4", Some(99)),
            ("strings", "len(arg5)", Some(100_000)),
            ("strings", "arg0", None),
            ("arrays", "arg2.999", Some(999)),
            ("blocks", "tag(arg5)+arg0.0", Some(2)),
            ("blocks", "arg2.1", None),
        ] {
            let flags = format!("-probe {probe} -of {expression} -json");
            let tool = start_hist(&flags, pid);
            target.ask("hit 10", "done");
            let json = object(&tool.end().answer());
            let found = histogram(&json, probe);
            if let Some(value) = value {
                let bucket = &found["buckets"][0];
                let least = i128::from(bucket["least"].as_i64().unwrap());
                let most = i128::from(bucket["most"].as_i64().unwrap());
                let value = i128::from(value);
                assert!((least..=most).contains(&value), "{expression}: {bucket}");
                assert_eq!(bucket["count"], 10, "{expression}");
                for field in ["min", "max"] {
                    assert_eq!(
                        found[field].as_i64().map(i128::from),
                        Some(value),
                        "{found}"
                    );
                }
                let sum = value * 10;
                match i64::try_from(sum) {
                    Ok(sum) => assert_eq!(found["sum"], sum, "{expression}"),
                    // JSON readers take an integer of more than 64 bits for a float.
                    Err(_) => assert_eq!(found["sum"].as_f64(), Some(sum as f64)),
                }
                assert_eq!(
                    (&found["count"], &found["untyped"]),
                    (&10.into(), &0.into())
                );
            } else {
                assert_eq!(
                    (&found["count"], &found["untyped"]),
                    (&0.into(), &10.into())
                );
                assert!(found["min"].is_null() && found["p50"].is_null(), "{found}");
                assert_eq!(found["buckets"], Value::Array(Vec::new()));
            }
        }
        assert!(!is_observed(pid));
        target.ask("hit 1", "done");
    }
}

#[test]
fn arguments_in_any_register_are_in_their_buckets() {
    for file in fixture_forms("arguments") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for (probe, expression, value) in [
            ("widths", "arg0", -7),
            ("widths", "arg2", -7),
            ("widths", "arg3", 200),
            ("registers", "arg5*arg4*(arg3+arg2*arg1)", 100),
        ] {
            let tool = start_hist(&format!("-probe {probe} -of {expression} -json"), pid);
            target.hits();
            let json = object(&tool.end().answer());
            assert_exact(histogram(&json, probe), &Values::from([(value, 1)]));
        }
    }
}

// promise: Functions: `hist` at code without free registers has each call in its bucket, or as untyped (2 programs, 4 threads)
#[test]
fn calls_without_free_registers_are_counted_or_untyped() {
    for file in fixture_forms("passing") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        // The expression reads arg0, but always has the same value.
        let tool = start_hist("-fn scales -of 1500+arg0-arg0 -where arg0==arg0 -json", pid);
        target.ask("pass 4 2000", "passed");
        let json = object(&tool.end().answer());
        let found = histogram(&json, "scales");
        let count = found["count"].as_u64().unwrap();
        assert_eq!(count + found["untyped"].as_u64().unwrap(), 8000);
        assert_eq!(found["sum"], count * 1500, "{found}");
    }
}

/// Returns the output of `hist` with these flags that docs/ask.md shows.
fn documented(flags: &str) -> String {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ask.md"));
    let command = format!("$ ocaml-probes hist -pid 4242 {flags}\n");
    let (_, answer) = page.split_once(&command).unwrap();
    let lines = answer.lines();
    let lines = lines.take_while(|line| !line.starts_with(['$', '`']));
    lines.map(|line| line.to_owned() + "\n").collect()
}

#[test]
fn picture_is_shown_below_the_figures() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for flags in [
            "-fn Calls.deep -of arg0",
            "-fn Calls.deep -of arg0 -linear 1,7,3",
        ] {
            let svg = std::env::temp_dir().join(format!("ocaml-probes-hist-{pid}.svg"));
            let tool = start_hist(&format!("{flags} -svg {}", svg.display()), pid);
            target.ask("run 1 8", "calls");
            assert_eq!(tool.end().answer(), documented(flags));
            let picture = std::fs::read_to_string(&svg).unwrap();
            std::fs::remove_file(svg).unwrap();
            assert!(picture.contains(">Calls.deep, arg0</text>"), "{picture}");
            // As many bars as the output has.
            assert_eq!(picture.matches("fill=\"#c60\"").count(), 4);
        }
        let tool = start_hist("-fn Calls.deep -of arg0 -linear 1,7,3 -format table", pid);
        target.ask("run 1 8", "calls");
        let answer = tool.end().answer();
        let lines: Vec<&str> = answer.lines().collect();
        let figures =
            " Calls.deep | 36    | 0       | 2.3  | 0   | 2+-1 | 5+-1 | 7   | 7     | 7   ";
        assert_eq!(lines[2], figures, "{answer}");
        let labels = lines[5..].iter().map(|line| line.split_at(8).0.trim_end());
        let expected = ["(..., 1)", "[1, 4)", "[4, 7)", "[7, ...)"];
        assert_eq!(labels.collect::<Vec<_>>(), expected, "{answer}");
    }
}

#[test]
fn intervals_have_all_values_so_far() {
    let mut target = Talker::start(&program("calls"));
    let pid = target.pid();
    let mut tool = start_hist("-fn Calls.leaf -of arg0 -interval 20ms -json", pid);
    target.ask("run 1 1000", "calls");
    // The first lines may be about intervals that ended before the last call.
    let mut last = 0;
    while last < 1500 {
        let json = object(&tool.line().unwrap());
        assert!(json["at"].as_f64().unwrap() > 0.0);
        let count = histogram(&json, "Calls.leaf")["count"].as_u64().unwrap();
        assert!(count >= last);
        last = count;
    }
    let rest = tool.end().answer();
    let json = object(rest.lines().last().unwrap());
    assert!(json["at"].is_null());
    assert_eq!(histogram(&json, "Calls.leaf")["count"], 1500);
}

#[test]
fn programs_have_histograms_from_their_start() {
    for file in program_forms("calls") {
        let line = format!(
            "trace -hist -fn Calls.leaf -of arg0 -where arg0!=3 -linear 0,4,2 -prog {}",
            file.display()
        );
        let mut command = crate::support::command(line.split(' '));
        let mut tool = Talker::spawn(command.stderr(std::process::Stdio::piped()));
        tool.ask("run 4 10", "calls");
        tool.close_input();
        let mut stderr = String::new();
        let mut pipe = tool.guard().child().stderr.take().unwrap();
        std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
        let lines: Vec<&str> = stderr.lines().collect();
        assert!(lines[0].starts_with("count 56 untyped 0 sum 328 mean 5.9 min 1 max 10 "));
        let counts = lines[1..]
            .iter()
            .map(|line| line.split('|').next().unwrap());
        let counts: Vec<&str> = counts.map(str::trim_end).collect();
        assert_eq!(
            counts,
            ["[0, 2)    4", "[2, 4)    8", "[4, ...) 44"],
            "{stderr}"
        );
    }
}

#[test]
fn hits_are_shown_beside_histograms() {
    for (filter, hits, untyped) in [
        ("", 10, 0),
        (" -where arg3==42", 10, 0),
        (" -where arg3==43", 0, 0),
        (" -where len(arg0)==1", 0, 10),
    ] {
        let file = program("shown");
        let flags = format!("trace -json -hist ints,constants -of arg3 -watch ints{filter} -prog");
        let words = flags.split(' ').map(std::ffi::OsStr::new);
        let words = words.chain([file.as_os_str()]);
        let mut tool = crate::support::command(words);
        let mut tool = Talker::spawn(tool.stderr(std::process::Stdio::piped()));
        tool.ask("hit 10", "done");
        tool.close_input();
        let mut stderr = String::new();
        let mut pipe = tool.guard().child().stderr.take().unwrap();
        std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
        let objects: Vec<Value> = stderr.lines().map(object).collect();
        let shown = objects.iter().filter(|it| it["type"] == "hit").count();
        assert_eq!(shown, hits, "{filter}: {stderr}");
        let found = objects.iter().find(|it| it["type"] == "histogram").unwrap();
        let ints = histogram(found, "ints");
        assert_eq!(
            (&ints["count"], &ints["untyped"]),
            (&hits.into(), &untyped.into())
        );
        if hits > 0 {
            assert_exact(ints, &Values::from([(42, 10)]));
        }
    }
}

#[test]
fn probes_and_functions_have_histograms_together() {
    let mut target = Talker::start(&program("shown"));
    let pid = target.pid();
    let tool = start_hist("-regexp ^(ints|constants)$ -fn Shown.ints -of 7 -json", pid);
    target.ask("hit 5", "done");
    let json = object(&tool.end().answer());
    let all = json["histograms"].as_array().unwrap();
    assert_eq!(all.len(), 3, "{json}");
    for one in all {
        assert_exact(one, &Values::from([(7, 5)]));
    }
    assert_eq!(all.iter().filter(|it| it["address"].is_string()).count(), 1);
}

#[test]
fn usdt_probes_have_histograms() {
    for file in fixture_forms("usdt") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = start_hist("-usdt demo:* -of 7 -json", pid);
        // A constant, because one of the probes has no arguments. Only every second round executes the second site of
        // `guarded`.
        target.ask("fire 1 1000", "fired");
        let json = object(&tool.end().answer());
        let mut counts = Vec::new();
        for one in json["histograms"].as_array().unwrap() {
            let count = one["count"].as_u64().unwrap();
            assert_eq!(
                (&one["untyped"], &one["sum"]),
                (&0.into(), &(7 * count).into())
            );
            counts.push(count);
        }
        counts.sort_unstable();
        assert_eq!(counts, [500, 1000, 1000, 1000], "{json}");
        assert!(!is_observed(pid));
    }
}

#[test]
fn unusable_expressions_are_refused_before_any_change() {
    let target = Talker::start(&program("shown"));
    let pid = target.pid();
    for (flags, message) in [
        (
            "-probe ints -of arg0==1",
            "arg0==1 is a comparison, where an integer is needed; nothing was changed\n    arg0==1\n    ^^^^^^^",
        ),
        (
            "-probe strings -of str(arg0)",
            "str(arg0) is a string, where an integer is needed; nothing was changed\n    str(arg0)\n    ^^^^^^^^^\n\
             hint: `count -by 'str(arg0)'` counts by strings; the length of a string of OCaml is `len(arg0)`\n",
        ),
        (
            "-probe nothing -of arg0",
            "probe nothing has no arg0: it has no arguments; nothing was changed\n    arg0\n    ^^^^\nhint: ",
        ),
        (
            "-fn * -of 1",
            " histograms were asked for; at most 1024 are possible; nothing was changed\nhint: give globs that match fewer",
        ),
        ("-probe ints", "needs -of EXPR"),
    ] {
        let run = run(&format!("hist -pid {pid} {flags}"));
        assert!(run.stderr.contains(message), "{}", run.stderr);
        assert_eq!(run.stdout, "");
        assert!(run.code == Some(1) || run.code == Some(2), "{run:?}");
    }
    assert!(!is_observed(pid));
}

#[test]
fn killed_histograms_are_removed() {
    for file in program_forms("shown") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        start_hist("-probe strings -of len(arg1)", pid).kill();
        assert!(is_observed(pid));
        target.ask("hit 10", "done");
        let cleaned = run(&format!("observe -clean -pid {pid}"));
        assert_eq!(cleaned.code, Some(0), "{cleaned:?}");
        assert!(!is_observed(pid));
        target.ask("hit 10", "done");
    }
}

#[test]
fn failed_histograms_leave_no_picture() {
    let scratch = Scratch::new();
    let target = Talker::start(&fixture_forms("calls")[0]);
    let picture = scratch.file("picture.svg");
    let histogram = |function: &str| {
        let line = format!(
            "hist -for 1ms -pid {} -fn {function} -of arg0 -svg",
            target.pid()
        );
        let mut command = command(line.split(' '));
        run_command(command.arg(&picture))
    };
    histogram("nosuch").failure();
    assert!(!picture.exists());
    histogram("leaf").answer();
    let drawn = std::fs::read(&picture).unwrap();
    histogram("nosuch").failure();
    assert_eq!(std::fs::read(&picture).unwrap(), drawn);
}
