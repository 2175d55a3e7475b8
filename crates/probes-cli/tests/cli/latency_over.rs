//! `latency -over`: slow pairs one by one, in all formats.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use test_support::process::state;
use test_support::{Scratch, Talker, eventually, fixture_forms, program_forms};

use crate::count::{end, start_observing, start_observing_with};
use crate::count_functions;
use crate::support::{both_forms, is_observed, object};
use crate::trace_observe::trace;

/// The words of a `slow` line in plain format after its times and its thread.
fn words_of_slow(line: &str) -> Vec<&str> {
    let words: Vec<&str> = line.split(' ').collect();
    assert!(
        words[0] == "slow" && words[3].parse::<u64>().is_ok(),
        "{line}"
    );
    words[4..].to_vec()
}

/// The lines of `latency -over 0` of a process that executes a command meanwhile, whose answer begins with `flight`.
fn answer_to_flight(target: &mut Talker, flags: &str, command: &str) -> Vec<String> {
    let line = format!("latency -quiet -pair start,stop -over 0 {flags}");
    let tool = start_observing(&line, target.pid());
    target.ask(command, "flight");
    end(tool, Signal::SIGINT)
}

/// The lines that a tool writes to a file while it observes a process, because a pipe that is not read would fill up.
/// `meanwhile` gets the pid of the tool.
fn lines_of_file(line: &str, pid: i32, meanwhile: impl FnOnce(i32)) -> Vec<Value> {
    let scratch = Scratch::new();
    let file = scratch.file("lines");
    let words = line.split(' ').map(OsStr::new);
    let words = words.chain([OsStr::new("-o"), file.as_os_str()]);
    let tool = start_observing_with(words, pid);
    meanwhile(tool.pid());
    end(tool, Signal::SIGINT);
    let lines = std::fs::read_to_string(&file).unwrap();
    lines.lines().map(object).collect()
}

#[test]
fn slow_pairs_are_shown_with_both_ends() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut answer = |flags: &str| answer_to_flight(&mut target, flags, "flight 1 99");
        let plain = answer("-format plain");
        let (figures, slow) = plain.split_last().unwrap();
        assert!(figures.starts_with("100 "), "{figures}");
        let expected = |number: usize| {
            let ends = format!("number={number} text=\"request {number}\"");
            format!("start,stop {ends} -> {ends}")
        };
        let shown: Vec<String> = slow
            .iter()
            .map(|line| words_of_slow(line).join(" "))
            .collect();
        assert_eq!(shown, (0..100).map(expected).collect::<Vec<_>>());

        let lines = answer("-json");
        let (latency, slow) = lines.split_last().unwrap();
        assert_eq!(object(latency)["pairs"][0]["count"], 100);
        assert_eq!(slow.len(), 100);
        let last = object(&slow[99]);
        let arguments = json!([{"int": 99}, {"string": {"text": "request 99", "is_whole": true}}]);
        for end in ["started", "stopped"] {
            assert_eq!(last[end]["arguments"], arguments);
            assert_eq!(last[end]["argument_names"], json!(["number", "text"]));
            assert_eq!(last[end]["thread"], last["thread"]);
        }
        assert_eq!(
            (&last["trusted"], &last["start"]),
            (&true.into(), &"start".into())
        );

        let table = answer("-format table").join("\n");
        let head = " ended           | thread ";
        assert!(table.starts_with(head), "{table}");
        assert!(
            table.contains(" | start,stop | number=7 text=\"request 7\" "),
            "{table}"
        );
        assert!(table.contains("\nstart to stop:\n"), "{table}");
        assert!(!is_observed(pid));
    }
}

#[test]
fn only_pairs_over_the_bound_are_shown() {
    for mut target in both_forms("timed") {
        let tool = start_observing("latency -quiet -pair start,stop -over 1m", target.pid());
        target.ask("do (.)", "done");
        assert_eq!(end(tool, Signal::SIGINT).len(), 1);
        let line = "latency -quiet -json -interval 1ms -pair start,stop -over 3ms";
        let mut tool = start_observing(line, target.pid());
        target.ask("do (...)", "done");
        // It is shown while the observation goes on.
        let mut shown = std::iter::from_fn(|| tool.line()).map(|line| object(&line));
        let slow = shown.find(|line| line["type"] == "slow_pair").unwrap();
        assert!(slow["duration_ns"].as_u64().unwrap() >= 3_000_000);
        end(tool, Signal::SIGINT);
    }
}

#[test]
fn slow_pairs_that_interleave_are_untrusted() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let mut answer = |flags: &str| answer_to_flight(&mut target, flags, "flight 5 100");
        // A pair that is shown before a stop reveals the interleaving has no mark, so only the last of 105 is checked.
        let last_slow = |lines: &[String]| lines[lines.len() - 2].clone();
        let plain = answer("-format plain");
        assert_eq!(plain.len(), 105 + 1);
        assert_eq!(words_of_slow(&last_slow(&plain))[1], "untrusted");
        let json = object(&last_slow(&answer("-json")));
        assert_eq!(
            (&json["type"], &json["trusted"]),
            (&json!("slow_pair"), &json!(false))
        );
        // Below a head of two lines.
        let table = &answer("-format table")[2 + 104];
        assert!(table.contains(" start,stop (untrusted) "), "{table}");
        let by_key = last_slow(&answer("-key number"));
        assert!(words_of_slow(&by_key)[1].starts_with("number="));
    }
}

#[test]
fn slow_pairs_that_are_dropped_are_counted() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        let lines = lines_of_file("latency -json -pair start,stop -over 0", pid, |tool| {
            // The tool does not read meanwhile.
            kill(Pid::from_raw(tool), Signal::SIGSTOP).unwrap();
            eventually("the tool is stopped", || {
                (state(tool) == Some('T')).then_some(())
            });
            target.ask("pairs 4 20000", "pairs");
            kill(Pid::from_raw(tool), Signal::SIGCONT).unwrap();
        });
        let (mut shown, mut lost, mut count) = (0, 0, None);
        for line in lines {
            match line["type"].as_str().unwrap() {
                "slow_pair" => shown += 1,
                "missing" => lost += line["lost"].as_u64().unwrap(),
                _ => count = line["pairs"][0]["count"].as_u64(),
            }
        }
        assert!(lost > 0);
        assert_eq!(count, Some(80_000));
        assert_eq!(shown + lost, 80_000);
    }
}

#[test]
fn pairs_are_observed_after_a_killed_observer() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        let mut killed = start_observing("latency -pair start,stop -over 0", pid);
        kill(Pid::from_raw(killed.pid()), Signal::SIGKILL).unwrap();
        killed.guard().wait();
        target.ask("pairs 4 20000", "pairs");
        let tool = start_observing("latency -quiet -pair start,stop -over 0", pid);
        target.ask("do (.)", "done");
        let lines = end(tool, Signal::SIGINT);
        assert_eq!(
            (lines.len(), words_of_slow(&lines[0])[0]),
            (2, "start,stop")
        );
        assert!(!is_observed(pid));
        target.ask("pairs 4 20000", "pairs");
    }
}

#[test]
fn started_programs_have_slow_pairs_too() {
    for file in program_forms("requests") {
        let flags = "-quiet -json -latency start,stop -over 0 -watch stop";
        let run = trace(&file, flags, "flight 1 9\n");
        let said: Vec<Value> = run.stderr.lines().map(object).collect();
        let count = |kind: &str| said.iter().filter(|line| line["type"] == kind).count();
        assert_eq!(
            (count("slow_pair"), count("hit"), count("latency")),
            (10, 10, 1)
        );
    }
}

/// What `latency -json -over 0` says while a program executes a command: the slow calls that were shown, how many
/// were dropped, and how many calls of each function the figures count.
fn slow_calls(
    target: &mut Talker,
    functions: &str,
    (command, word): (&str, &str),
) -> (Vec<Value>, u64, HashMap<String, u64>) {
    let line = format!("latency -quiet -json -over 0 -fn {functions}");
    let lines = lines_of_file(&line, target.pid(), |_| {
        target.ask(command, word);
    });
    let (mut calls, mut lost, mut counts) = (Vec::new(), 0, HashMap::new());
    for line in lines {
        match line["type"].as_str().unwrap() {
            "slow_call" => calls.push(line),
            "missing" => lost += line["lost"].as_u64().unwrap(),
            _ => {
                for function in line["functions"].as_array().unwrap() {
                    let name = function["name"].as_str().unwrap().to_owned();
                    counts.insert(name, function["count"].as_u64().unwrap());
                }
            }
        }
    }
    (calls, lost, counts)
}

/// Asserts that the figures count as many calls of each function as were shown; returns the first argument and the
/// result of each call of a function, if it has them.
fn values(
    calls: &[Value],
    counts: &HashMap<String, u64>,
    name: &str,
) -> Vec<(Option<i64>, Option<i64>)> {
    let of_function = calls.iter().filter(|it| it["name"] == name);
    let number = |value: &Value| value["int"].as_i64();
    let values = of_function.map(|it| (number(&it["arguments"][0]), number(&it["result"])));
    let values: Vec<_> = values.collect();
    assert_eq!(values.len() as u64, counts[name], "{name}");
    values
}

// promise: Functions: With `-over 0` every call is shown, with its first argument and its result; a call that an exception ends is not
//    shown (2 programs)
#[test]
fn slow_calls_have_arguments_and_results() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let functions = "Calls.leaf,Calls.deep,Calls.raises";
        let (calls, lost, counts) = slow_calls(&mut target, functions, ("run 1 50", "calls"));
        assert_eq!(lost, 0);
        assert!(counts["Calls.leaf"] > 0 && counts["Calls.deep"] > 0);
        for (argument, result) in values(&calls, &counts, "Calls.leaf") {
            assert!(argument.is_some() && result == argument.map(|it| it + 1));
        }
        for (argument, result) in values(&calls, &counts, "Calls.deep") {
            assert!(result == argument && result.is_some());
        }
        // Those of odd numbers raise; the others end with a jump to `leaf`.
        let raises: Vec<_> = (1..=25).map(|it| (Some(2 * it), None)).collect();
        assert_eq!(values(&calls, &counts, "Calls.raises"), raises);
        let functions = "Calls.leaf -where arg0>40";
        let (calls, _, counts) = slow_calls(&mut target, functions, ("run 1 50", "calls"));
        let large = values(&calls, &counts, "Calls.leaf");
        assert!(!large.is_empty() && large.iter().all(|it| it.0 > Some(40)));
    }
}

// promise: Functions: Slow calls of C functions have the results of their returns, and none if they end with a jump (2)
#[test]
fn slow_calls_of_c_have_results() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let functions = "deep,tail,leaf,unwound,returns_long_double";
        let command = ("call 1 50", "called");
        let (calls, lost, counts) = slow_calls(&mut target, functions, command);
        assert_eq!((lost, counts["unwound"]), (0, 0));
        let results = |name: &str| -> Vec<Option<i64>> {
            let values = values(&calls, &counts, name);
            values.into_iter().map(|(_, result)| result).collect()
        };
        let tails: Vec<Option<i64>> = (0..50).map(|it| (it & 1 == 0).then_some(it ^ 4)).collect();
        assert_eq!(results("tail"), tails);
        // Without debugging information, it is not known how many arguments functions of C have.
        let scratch = Scratch::new();
        let bare = scratch.copy(&file, "bare");
        let mut strip = Command::new("strip");
        assert!(
            strip
                .arg("--strip-debug")
                .arg(&bare)
                .status()
                .unwrap()
                .success()
        );
        let mut bare = Talker::start(&bare);
        for (flags, argument) in [("deep -args 1", Some(0)), ("deep", None)] {
            let line = format!("latency -quiet -json -over 0 -fn {flags}");
            let pid = bare.pid();
            let lines = lines_of_file(&line, pid, |_| drop(bare.ask(command.0, command.1)));
            let call = lines.iter().find(|it| it["type"] == "slow_call").unwrap();
            let number = |value: &Value| value["int"].as_i64();
            assert_eq!(number(&call["arguments"][0]), argument);
            assert_eq!(number(&call["result"]), Some(1));
        }
        let deep: Vec<Option<i64>> = [1, 3, 6, 10, 15, 21].map(Some).repeat(50);
        assert_eq!(results("deep"), deep);
        assert_eq!(results("leaf").len(), 275);
        assert_eq!(results("returns_long_double").len(), 50);
    }
}

// promise: Functions: Slow calls that come faster than they are read are counted, every one (2 programs, 4 threads)
#[test]
fn slow_calls_are_shown_or_counted() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let functions = "Calls.leaf,Calls.deep -self";
        let (calls, lost, counts) = slow_calls(&mut target, functions, ("run 4 20000", "calls"));
        let all: u64 = counts.values().sum();
        assert!(all > 400_000, "{counts:?}");
        assert_eq!(calls.len() as u64 + lost, all);
    }
}

#[test]
fn only_slow_calls_are_shown() {
    for file in fixture_forms("lasting") {
        let mut target = Talker::start(&file);
        let tool =
            count_functions::start_observing("latency", "-over 3ms -fn lasts,leaf", target.pid());
        target.ask("last 2 3000", "lasted");
        let answer = tool.end().answer();
        let slow: Vec<_> = answer
            .lines()
            .filter(|it| it.starts_with("slow "))
            .collect();
        assert_eq!((slow.len(), words_of_slow(slow[0])[0]), (2, "lasts"));
        // It has no result.
        assert!(slow[0].ends_with(" ->"), "{slow:?}");
    }
}
