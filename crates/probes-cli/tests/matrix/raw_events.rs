//! `watch`, `count` and `hist` with -events, compared with what the program's own consumer of runtime events reads.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{ChildStderr, Stdio};

use serde_json::Value;
use test_support::{Talker, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::events::own_lines;
use crate::gc::{collect_until_exit, collect_until_line, signal, writes_events};
use crate::support::{command, object, run};

/// A command that reads events from now on.
struct Tool {
    talker: Talker,
    errors: BufReader<ChildStderr>,
}

impl Tool {
    /// Starts it, and waits until it reads.
    fn start(line: &str) -> Tool {
        let mut command = command(line.split(' ').chain(["-verbose"]));
        let mut talker = Talker::spawn(command.stderr(Stdio::piped()));
        let errors = talker.guard().child().stderr.take().unwrap();
        let mut tool = Tool {
            talker,
            errors: BufReader::new(errors),
        };
        let mut said = String::new();
        tool.errors.read_line(&mut said).unwrap();
        assert!(said.contains("reading the runtime events"), "{said}");
        tool
    }

    /// What it prints until it ends by itself, and what it says on standard error.
    fn end(mut self) -> (Vec<String>, String) {
        let lines = std::iter::from_fn(|| self.talker.line()).collect();
        let mut said = String::new();
        self.errors.read_to_string(&mut said).unwrap();
        assert!(self.talker.guard().wait().success(), "{said}");
        (lines, said)
    }
}

/// An event of `watch -json`, as the program prints it.
fn own_form(event: &Value) -> String {
    let text = |field: &str| event[field].as_str().unwrap().to_owned();
    let (kind, name, value) = (text("kind"), text("name"), &event["value"]);
    let what = match kind.as_str() {
        "begin" | "end" | "lifecycle" => format!("{kind} {name}"),
        "counter" => format!("{kind} {name} {value}"),
        "unit" => format!("user {name} unit"),
        "int" => format!("user {name} {value}"),
        "span_begin" => format!("user {name} begin"),
        "span_end" => format!("user {name} end"),
        "custom" => {
            assert_eq!(event["custom"]["is_whole"], true);
            format!("user {name} {}", event["custom"]["text"])
        }
        other => panic!("{other}"),
    };
    format!("event {} {} {what}", event["domain"], event["monotonic_ns"])
}

fn domain_of(line: &str) -> u32 {
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

fn time_of(line: &str) -> u64 {
    line.split(' ').nth(2).unwrap().parse().unwrap()
}

/// What the program's own consumer reads once it has worked, by domain.
fn worked(program: &mut ChrootProgram, work: &str) -> Vec<String> {
    program.talker.ask(work, "worked");
    let mut lines = own_lines(program);
    lines.sort_by_key(|line| domain_of(line));
    lines
}

// promise: Runtime events: `watch -events all` shows exactly the events of the program's own consumer, of any kind, in domains that come and go
//    (10 runs of 4 domains in each chroot, about 30,000 events in all)
#[test]
fn watched_events_equal_those_of_the_own_consumer() {
    let forms = program_forms("ocaml5/events");
    for run in 0..10 {
        let isolation = Isolation::ALL[run / 2 % 2];
        let mut program = ChrootProgram::start(isolation, &forms[run % 2], &[]);
        program.talker.ask("start", "started");
        let tool = Tool::start(&format!("watch -json -pid {} -events all", program.pid));
        let own = worked(&mut program, "work 4 10");
        program.end();
        let (lines, said) = tool.end();
        assert!(said.contains("has exited"), "{said}");
        let mut ours: Vec<String> = lines.iter().map(|it| own_form(&object(it))).collect();
        ours.sort_by_key(|line| domain_of(line));
        // The program writes these after its own consumer has read.
        ours.retain(|line| !line.ends_with("ring_pause") && !line.ends_with("ring_stop"));
        let first = ours.iter().map(|it| time_of(it)).min().unwrap();
        let (own, before): (Vec<String>, Vec<String>) =
            own.into_iter().partition(|it| time_of(it) >= first);
        // It has written nothing between its start, which is a stop of all domains, and its work.
        let is_start = |it: &String| domain_of(it) == 0 && !it.contains("domain_spawn");
        assert!(
            before.len() < 30 && before.iter().all(is_start),
            "{before:?}"
        );
        let own: Vec<String> = own
            .into_iter()
            .filter(|line| !line.ends_with("ring_pause"))
            .collect();
        let difference = own.iter().zip(&ours).find(|(own, ours)| own != ours);
        assert_eq!(difference, None, "{isolation:?} run {run}");
        assert_eq!(own.len(), ours.len(), "{isolation:?} run {run}");
        assert!(own.len() > 1000, "{}", own.len());
    }
}

/// How often each event is in what the program's own consumer reads, as `count -events` names them; phases and spans
/// by their begins.
fn counted(lines: &[String]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let name = match words[3..] {
            ["begin", name] => format!("phase {name}"),
            ["counter", name, _] => format!("counter {name}"),
            ["lifecycle", name] => format!("lifecycle {name}"),
            ["end", _] | ["user", "events.span", "end"] => continue,
            ["user", name, ..] => format!("user {name}"),
            _ => panic!("{line}"),
        };
        *counts.entry(name).or_default() += 1;
    }
    counts
}

#[test]
fn counts_and_histograms_equal_the_own_consumer() {
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let pid = program.pid;
        program.talker.ask("start", "started");
        let count = Tool::start(&format!(
            "count -pid {pid} -json -events minor,minor_promoted,events.*"
        ));
        let hist = Tool::start(&format!(
            "hist -pid {pid} -json -events events.*,minor,minor_promoted"
        ));
        let own = worked(&mut program, "work 3 10");
        program.end();
        let expected = counted(&own);
        let (lines, _) = count.end();
        let count = object(lines.last().unwrap());
        for event in count["events"].as_array().unwrap() {
            let name = format!(
                "{} {}",
                event["group"].as_str().unwrap(),
                event["name"].as_str().unwrap()
            );
            assert_eq!(event["hits"], expected[&name], "{name}");
        }
        assert_eq!(count["events"].as_array().unwrap().len(), 6);
        assert_eq!(count["lost"], Value::Array(Vec::new()));

        let (lines, _) = hist.end();
        let hist = object(lines.last().unwrap());
        let of = |name: &str| {
            let all = hist["histograms"].as_array().unwrap();
            all.iter().find(|it| it["name"] == name).unwrap()
        };
        let values = |what: &str| -> Vec<i64> {
            let of = own.iter().filter_map(|line| line.split_once(what));
            of.filter_map(|(_, value)| value.trim().parse().ok())
                .collect()
        };
        for (name, what) in [
            ("minor_promoted", " counter minor_promoted "),
            ("events.int", " user events.int "),
        ] {
            let values = values(what);
            assert!(!values.is_empty());
            assert_eq!(of(name)["count"], values.len());
            assert_eq!(of(name)["sum"], values.iter().sum::<i64>());
            assert_eq!(of(name)["min"], *values.iter().min().unwrap());
            assert_eq!(of(name)["unit"], Value::Null);
        }
        // Spans are not in each other: the sum of their times is that of the ends without that of the begins.
        let sum = |what: &str| -> i64 {
            let lines = own.iter().filter(|it| it.ends_with(what));
            lines
                .map(|it| it.split(' ').nth(2).unwrap().parse::<i64>().unwrap())
                .sum()
        };
        for (name, begin, end) in [
            (
                "events.span",
                " user events.span begin",
                " user events.span end",
            ),
            ("minor", " begin minor", " end minor"),
        ] {
            assert_eq!(of(name)["sum"], sum(end) - sum(begin), "{name}");
            assert_eq!(of(name)["unit"], "ns");
        }
        assert_eq!(of("events.unit")["untyped"], expected["user events.unit"]);
        assert_eq!(of("events.unit")["count"], 0);
    }
}

// promise: Runtime events: Words that were lost are in every form of the output of `watch`, `count` and `hist -events`, by domain (rings of 1,024 words)
#[test]
fn lost_words_of_each_domain_are_shown() {
    let [file, _] = program_forms("ocaml5/events");
    for (command, format, expected) in [
        ("watch", "plain", " lost - "),
        ("watch", "table", "| lost "),
        ("watch", "json", "\"runtime_events_lost\""),
        ("count", "plain", "lost "),
        ("count", "table", "words of domain 1"),
        ("count", "json", "\"words\":"),
        ("hist", "plain", "lost "),
        ("hist", "table", "words of domain 1"),
        ("hist", "json", "\"words\":"),
    ] {
        let mut program = ChrootProgram::start_with(Isolation::Chroot, &file, &[], "e=10");
        program.talker.ask("start", "started");
        let pid = program.pid;
        let tool = Tool::start(&format!(
            "{command} -format {format} -pid {pid} -events minor*"
        ));
        // The tool does not run while more is written than a ring holds.
        signal(tool.talker.pid(), "STOP");
        program.talker.ask("work 2 30", "worked");
        signal(tool.talker.pid(), "CONT");
        program.end();
        let (lines, said) = tool.end();
        let output = lines.join("\n");
        assert!(output.contains(expected), "{command} {format}: {output}");
        assert!(
            said.contains("counts, totals and shares are too low: "),
            "{said}"
        );
        assert!(said.contains(" of domain 1"), "{said}");
    }
}

#[test]
fn forked_children_have_rings_of_their_own() {
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let pid = program.pid;
        program.talker.ask("start", "started");
        let parent = Tool::start(&format!("watch -json -pid {pid} -events fork_*,events.*"));
        let forked = program.talker.ask("fork", "forked");
        let child: i32 = forked.rsplit(' ').next().unwrap().parse().unwrap();
        // The runtime of the child makes its ring after the fork.
        test_support::eventually("the child has a ring", || {
            let line = format!("count -pid {child} -events minor -for 1ms");
            (run(&line).code == Some(0)).then_some(())
        });
        let of_child = Tool::start(&format!("count -json -pid {child} -events events.*,minor"));
        program.talker.ask("tell", "told");
        program.talker.ask("tell", "told");
        program.end();
        let (lines, said) = parent.end();
        let [fork] = &lines[..] else {
            panic!("{lines:?}");
        };
        let fork = object(fork);
        assert_eq!(
            (&fork["name"], &fork["value"]),
            (&"fork_parent".into(), &child.into())
        );
        assert!(
            said.contains(&format!("forked a child (pid {child} ")),
            "{said}"
        );
        let (lines, _) = of_child.end();
        let count = object(lines.last().unwrap());
        let of = |name: &str| {
            let all = count["events"].as_array().unwrap();
            all.iter().find(|it| it["name"] == name).unwrap()["hits"].clone()
        };
        assert_eq!(of("events.int"), 2);
        assert!(of("minor").as_u64().unwrap() >= 2);
    }
}

#[test]
fn limit_and_duration_end_the_watch() {
    let [file, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let pid = program.pid;
    program.talker.ask("start", "started");
    let tool = Tool::start(&format!("watch -pid {pid} -events minor -limit 3"));
    program.talker.ask("work 2 5", "worked");
    let (lines, _) = tool.end();
    assert_eq!(lines.len(), 3);
    let words: Vec<&str> = lines[0].split(' ').collect();
    assert_eq!(words[2..], ["begin", "minor"]);
    let none = run(&format!("watch -pid {pid} -events minor -for 30ms")).answer();
    assert_eq!(none, "");
    let empty = run(&format!(
        "count -pid {pid} -events minor,events.int -for 30ms"
    ))
    .answer();
    assert_eq!(empty, "0 0.0 phase minor\n0 0.0 user events.int\n");
    let error = run(&format!("count -pid {pid} -events minor_promotd")).failure();
    let first = format!(
        "ocaml-probes: process {pid} has no runtime event that matches minor_promotd; did you mean \"minor_promoted\" or "
    );
    assert!(error.starts_with(&first), "{error}");
    program.end();
}

// promise: Runtime events: `watch`, `count` and `hist -events` switch them on in a program that runs, and off again, also if no name
//    matches (2 programs × 6 commands in each chroot)
#[test]
fn commands_with_events_switch_them_on() {
    for file in program_forms("ocaml5/events") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        let pid = program.pid;
        for line in [
            "watch -events minor",
            "count -events minor -interval 10ms -json",
            // The names of the program's own events come a moment later.
            "count -events events.int -interval 10ms -json",
            "count -events events.* -interval 10ms -json",
            "hist -events minor -interval 10ms -json",
            "count -events minro",
        ] {
            let is_known = !line.ends_with("minro");
            let mut tool = command(line.split(' ').chain(["-pid", &pid.to_string()]));
            let mut tool = Talker::spawn(tool.stderr(Stdio::piped()));
            if is_known {
                collect_until_line(&mut program, &mut tool);
                assert_eq!(writes_events(&mut program), (true, false), "{line}");
                signal(tool.pid(), "INT");
            }
            let output = collect_until_exit(&mut program, tool);
            assert_eq!(output.is_success, is_known, "{line}: {}", output.err);
            assert!(output.err.contains("to switch runtime events on"));
            assert_eq!(output.err.contains("did you mean \"minor\""), !is_known);
            assert_eq!(writes_events(&mut program), (false, false), "{line}");
        }
        program.end();
    }
}
