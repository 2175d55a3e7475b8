//! `latency -over`: slow pairs one by one, in all formats.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use test_support::{Talker, program_forms};

use crate::count::{end, observing};
use crate::support::{both_forms, is_observed, object};
use crate::trace_observe::trace;

/// A line in plain format, without its times and thread.
fn words(line: &str) -> Vec<&str> {
    let words: Vec<&str> = line.split(' ').collect();
    assert!(
        words[0] == "slow" && words[3].parse::<u64>().is_ok(),
        "{line}"
    );
    words[4..].to_vec()
}

#[test]
fn slow_pairs_are_shown_with_both_ends() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut answer = |flags: &str| {
            let line = format!("latency -quiet -pair start,stop -over 0 {flags}");
            let tool = observing(&line, target.pid());
            target.ask("flight 1 99", "flight");
            end(tool, Signal::SIGINT)
        };
        let plain = answer("-format plain");
        let (figures, slow) = plain.split_last().unwrap();
        assert!(figures.starts_with("100 "), "{figures}");
        let expected = |number: usize| {
            let ends = format!("number={number} text=\"request {number}\"");
            format!("start,stop {ends} -> {ends}")
        };
        let shown: Vec<String> = slow.iter().map(|line| words(line).join(" ")).collect();
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
fn only_pairs_of_the_bound_are_shown() {
    for mut target in both_forms("timed") {
        let tool = observing("latency -quiet -pair start,stop -over 1m", target.pid());
        target.ask("do (.)", "done");
        assert_eq!(end(tool, Signal::SIGINT).len(), 1);
        let line = "latency -quiet -json -interval 1ms -pair start,stop -over 3ms";
        let mut tool = observing(line, target.pid());
        target.ask("do (...)", "done");
        // It is shown while the observation goes on.
        let shown = std::iter::from_fn(|| tool.line()).map(|line| object(&line));
        let slow = shown
            .into_iter()
            .find(|line| line["type"] == "slow_pair")
            .unwrap();
        assert!(slow["duration_ns"].as_u64().unwrap() >= 3_000_000);
        end(tool, Signal::SIGINT);
    }
}

#[test]
fn slow_pairs_that_interleave_are_untrusted() {
    for file in program_forms("requests") {
        let mut target = Talker::start(&file);
        let mut answer = |flags: &str| {
            let line = format!("latency -quiet -pair start,stop -over 0 {flags}");
            let tool = observing(&line, target.pid());
            target.ask("flight 5 100", "flight");
            end(tool, Signal::SIGINT)
        };
        // What is shown before any stop tells it is what was known then.
        let plain = answer("-format plain");
        assert_eq!(plain.len(), 106);
        assert_eq!(words(&plain[104])[1], "untrusted");
        assert_eq!(object(&answer("-json")[104])["trusted"], false);
        let table = answer("-format table");
        assert!(
            table[106].contains(" start,stop (untrusted) "),
            "{}",
            table[106]
        );
        assert!(words(&answer("-key number")[104])[1].starts_with("number="));
    }
}

#[test]
fn slow_pairs_that_are_dropped_are_counted() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        let mut tool = observing("latency -json -pair start,stop -over 0", pid);
        // The tool does not read meanwhile.
        kill(Pid::from_raw(tool.pid()), Signal::SIGSTOP).unwrap();
        target.ask("pairs 4 20000", "pairs");
        kill(Pid::from_raw(tool.pid()), Signal::SIGCONT).unwrap();
        kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
        let (mut shown, mut lost, mut count) = (0, 0, None);
        for line in std::iter::from_fn(|| tool.line()) {
            let line = object(&line);
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
fn killed_observers_of_slow_pairs_do_no_harm() {
    for mut target in both_forms("timed") {
        let pid = target.pid();
        let mut killed = observing("latency -pair start,stop -over 0", pid);
        kill(Pid::from_raw(killed.pid()), Signal::SIGKILL).unwrap();
        killed.guard().wait();
        target.ask("pairs 4 20000", "pairs");
        let tool = observing("latency -quiet -pair start,stop -over 0", pid);
        target.ask("do (.)", "done");
        let lines = end(tool, Signal::SIGINT);
        assert_eq!((lines.len(), words(&lines[0])[0]), (2, "start,stop"));
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
        let many = |kind: &str| said.iter().filter(|line| line["type"] == kind).count();
        assert_eq!(
            (many("slow_pair"), many("hit"), many("latency")),
            (10, 10, 1)
        );
    }
}
