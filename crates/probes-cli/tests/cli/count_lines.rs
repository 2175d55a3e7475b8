//! `count -fn FILE:LINE`: executions of source lines.

use std::fs;
use std::path::Path;
use std::process::Command;

use test_support::{Scratch, Talker, fixture, fixture_forms, program, program_forms};

use crate::count_functions::{calls, counting, function, start_observing};
use crate::support::{object, run, run_on};

// promise: Functions: Executions of a source line, of OCaml and of C, are counted to the last one (2 of each)
#[test]
fn executions_of_source_lines_are_counted_exactly() {
    for (files, commands, lines) in [
        (
            program_forms("calls"),
            ["run 1 0", "run 4 20000"],
            // Each line as it is given, the program's counter to compare with, and the name that is shown.
            [
                ("calls.ml:13", "leaf", "calls.ml:13 in Calls.leaf"),
                // The code of this line is a call.
                ("calls.ml:29", "raises", "calls.ml:29 in Calls.work"),
                (
                    "test-programs/calls.ml:22",
                    "raises",
                    "test-programs/calls.ml:22 in Calls.raises",
                ),
            ],
        ),
        (
            fixture_forms("calls"),
            ["calls 1 0", "calls 4 20000"],
            [
                ("calls.c:30", "outer", "calls.c:30 in outer"),
                ("calls.c:45", "outer", "calls.c:45 in work"),
                ("calls.c:35", "indirect", "calls.c:35 in indirect"),
            ],
        ),
    ] {
        for file in files {
            let mut target = Talker::start(&file);
            target.ask(commands[0], "call");
            let typed = lines.map(|(typed, ..)| typed).join(",");
            let flags = format!("-json -fn {typed}");
            let tool = counting(&flags, target.pid());
            let answer = target.ask(commands[1], "call");
            let counted = object(&tool.end().answer());
            for (_, name, shown) in lines {
                let calls = calls(&answer, "");
                let line = calls
                    .iter()
                    .find(|line| line.ends_with(&format!(" {name}")));
                let hits = function(&counted, shown)["hits"].to_string();
                assert_eq!(line.unwrap().split(' ').next(), Some(&*hits), "{answer}");
            }
        }
    }
}

// promise: Functions: A result in the x87 unit, which a function passes on without using the unit, is kept where its lines
//    are counted and its calls are timed (2 × 2)
#[test]
fn x87_results_are_kept() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../test-programs/fixtures/owners.c");
    let source = fs::read_to_string(file).unwrap();
    let line = 1 + source
        .lines()
        .position(|it| it.contains("last = x"))
        .unwrap();
    for file in fixture_forms("owners") {
        let mut target = Talker::start(&file);
        for (name, flags) in [
            ("count", format!("-fn owners.c:{line}")),
            ("latency", "-fn passed_on".to_owned()),
        ] {
            let tool = start_observing(name, &flags, target.pid());
            // The program exits if a result is wrong.
            target.ask("threads 2 5000", "done");
            let answer = tool.end().answer();
            assert!(answer.starts_with("10000 "), "{answer}");
        }
    }
}

#[test]
fn function_keeps_its_calls_beside_its_first_line() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        for fns in [
            "indirect,calls.c:34",
            "calls.c:34,indirect",
            "calls.c:34,in*t",
        ] {
            let tool = counting(&format!("-json -fn {fns}"), target.pid());
            target.ask("calls 2 100", "called");
            let counted = object(&tool.end().answer());
            assert_eq!(function(&counted, "indirect")["hits"], 200, "{fns}");
        }
        let flags = "-json -results -args 1 -fn calls.c:34,indirect";
        let tool = start_observing("watch", flags, target.pid());
        target.ask("calls 1 1", "called");
        let answer = tool.end().answer();
        let lines: Vec<&str> = answer.lines().collect();
        assert_eq!(lines.len(), 2, "{answer}");
        assert!(lines[1].contains("\"result\""), "{answer}");
    }
}

#[test]
fn each_range_of_a_line_is_counted() {
    let mut target = Talker::start(&fixture("calls.pie"));
    let tool = counting("-sites -fn calls.c:44,work", target.pid());
    target.ask("calls 2 100", "called");
    let answer = tool.end().answer();
    let mut rows: Vec<Vec<&str>> = answer
        .lines()
        .map(|line| line.split(' ').collect())
        .collect();
    rows.retain(|row| row[2] == "calls.c:44");
    // The loop's rounds, and its beginning.
    let hits: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(hits, ["200", "2"], "{answer}");
    for row in rows {
        assert_eq!(row[3..5], ["in", "work"], "{answer}");
        assert_eq!(row[7], "calls.c:44", "{answer}");
    }
}

#[test]
fn lines_without_code_are_errors() {
    let target = Talker::start(&program("calls"));
    let pid = target.pid();
    let refused = |line: &str| run(&format!("count -pid {pid} -fn {line}")).failure();
    for (line, message, hint) in [
        (
            "calls.ml:16",
            "calls.exe: no code begins at calls.ml:16; the nearest lines with code are 14 and 17; nothing was changed",
            "hint: give calls.ml:17, which has code",
        ),
        (
            "calls.ml:4000",
            "calls.exe: no code begins at calls.ml:4000; the nearest line with code is 57; nothing was changed",
            "hint: give calls.ml:57, which has code",
        ),
        (
            "call.ml:13",
            "no code in calls.exe or its 3 libraries is from call.ml; did you mean \"calls.ml\"",
            "lists the source line of each function",
        ),
    ] {
        let error = refused(line);
        assert!(error.contains(message), "{error}");
        assert!(error.contains(hint), "{error}");
    }
    let scratch = Scratch::new();
    let stripped = scratch.file("stripped");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&stripped).arg(program("calls"));
    assert!(strip.status().unwrap().success());
    let error = run_on("list -functions calls.ml:13", &stripped).failure();
    assert!(
        error.starts_with("ocaml-probes: no source lines in stripped\nhint: build it with -g"),
        "{error}"
    );
}

#[test]
fn files_of_the_same_name_are_distinguished() {
    let scratch = Scratch::new();
    let file = scratch.file("twice");
    let mut gcc = Command::new("gcc");
    gcc.args(["-g", "-o"]).arg(&file);
    for (directory, name) in [("one", "main"), ("two", "other")] {
        let directory = scratch.path().join(directory);
        fs::create_dir(&directory).unwrap();
        let source = directory.join("same.c");
        fs::write(&source, format!("int {name}(void)\n{{\n  return 0;\n}}\n")).unwrap();
        gcc.arg(source);
    }
    assert!(gcc.status().unwrap().success());
    let list = |line: &str| run_on(&format!("list -functions {line}"), &file);
    let error = list("same.c:3").failure();
    let why = format!(
        "same.c may be {0}/one/same.c or {0}/two/same.c",
        scratch.path().display()
    );
    assert!(error.contains(&why), "{error}");
    assert!(error.contains("hint: give more of its path"), "{error}");
    let other = list("two/same.c:3").answer();
    assert!(other.ends_with(" other\n"), "{other}");
}
