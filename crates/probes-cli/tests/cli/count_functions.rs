//! `count -fn`, and `trace -count -fn`: calls of functions, in programs with and without probes.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::{
    Scratch, Talker, eventually, fixture, fixture_forms, output, program, program_forms,
};

use crate::support::{Run, command, is_observed, object, run, run_command};

/// The tool, while it observes functions.
pub(crate) struct ObservingTool {
    tool: Talker,
    errors: BufReader<ChildStderr>,
}

/// Starts `count`, and waits until it counts.
pub(crate) fn counting(flags: &str, pid: i32) -> ObservingTool {
    start_observing("count", flags, pid)
}

/// Starts a command, and waits until it observes.
pub(crate) fn start_observing(name: &str, flags: &str, pid: i32) -> ObservingTool {
    start_observing_several(name, flags, pid, 1)
}

/// Same as [`start_observing`], with `many` processes, of which `pid` is one.
pub(crate) fn start_observing_several(
    name: &str,
    flags: &str,
    pid: i32,
    many: usize,
) -> ObservingTool {
    let mut command = command([name, "-pid", &pid.to_string()]);
    start_observing_by(command.args(flags.split(' ')), many)
}

/// Same as [`start_observing_several`], with a command that the caller has made.
pub(crate) fn start_observing_by(command: &mut Command, many: usize) -> ObservingTool {
    let mut tool = Talker::spawn(command.stderr(Stdio::piped()));
    let stderr = tool.guard().child().stderr.take().unwrap();
    let mut errors = BufReader::new(stderr);
    let mut said = String::new();
    while said.matches("stopped ").count() < many {
        assert!(
            errors.read_line(&mut said).unwrap() > 0,
            "{command:?}: {said}"
        );
    }
    ObservingTool { tool, errors }
}

impl ObservingTool {
    pub(crate) fn pid(&self) -> i32 {
        self.tool.pid()
    }

    /// Kills it, so that what it has installed stays.
    pub(crate) fn kill(mut self) {
        kill(Pid::from_raw(self.tool.pid()), Signal::SIGKILL).unwrap();
        self.tool.guard().wait();
    }

    /// Returns the next line that it prints.
    pub(crate) fn line(&mut self) -> Option<String> {
        self.tool.line()
    }

    /// Reads its standard error until a line contains `text`.
    pub(crate) fn expect_said(&mut self, text: &str) {
        let mut said = String::new();
        while !said.contains(text) {
            assert!(self.errors.read_line(&mut said).unwrap() > 0, "{said}");
        }
    }

    /// Interrupts it; returns what it prints to the end.
    pub(crate) fn end(self) -> Run {
        kill(Pid::from_raw(self.tool.pid()), Signal::SIGINT).unwrap();
        self.until_end()
    }

    /// Returns what it prints to the end.
    pub(crate) fn until_end(mut self) -> Run {
        let mut stdout = String::new();
        while let Some(line) = self.tool.line() {
            stdout += &(line + "\n");
        }
        let mut stderr = String::new();
        self.errors.read_to_string(&mut stderr).unwrap();
        Run {
            code: self.tool.guard().wait().code(),
            stdout,
            stderr,
        }
    }
}

/// Hits and name of each plain line.
fn hits(plain: &str) -> Vec<String> {
    let hit = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        assert!(words[1].parse::<f64>().unwrap() >= 0.0, "{line}");
        format!("{} {}", words[0], words[2])
    };
    plain.lines().map(hit).collect()
}

/// Turns the calls that a program has counted itself, `WORD name=N name=N`, into plain lines, most calls first.
pub(crate) fn calls(answer: &str, prefix: &str) -> Vec<String> {
    let words = answer.split(' ').skip(1);
    let mut calls: Vec<(u64, &str)> = words
        .map(|word| {
            let (name, calls) = word.split_once('=').unwrap();
            (calls.parse().unwrap(), name)
        })
        .collect();
    calls.sort_by_key(|(calls, _)| std::cmp::Reverse(*calls));
    let line = |(calls, name): (u64, &str)| format!("{calls} {prefix}{name}");
    calls.into_iter().map(line).collect()
}

/// A row of JSON output.
pub(crate) fn function<'j>(json: &'j Value, name: &str) -> &'j Value {
    let functions = json["functions"].as_array().unwrap();
    functions.iter().find(|it| it["name"] == name).unwrap()
}

// promise: Functions: The code of probe sites, which has the names of the functions around it, is not counted as a function unless its
//    address is given, and is marked (2 programs)
#[test]
fn probe_sites_are_not_counted_as_functions() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let listed = run(&format!("list -functions -pid {pid} Service.serve")).answer();
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(lines.len(), 3, "{listed}");
        let is_marked = |line: &&&str| line.ends_with(" Service.serve (probe site)");
        assert_eq!(lines.iter().filter(is_marked).count(), 2, "{listed}");
        let json = run(&format!("list -functions -json -pid {pid} Service.serve")).json();
        let kinds = json["functions"].as_array().unwrap().iter();
        let of_sites = kinds.filter(|it| it["kind"] == "probe_site").count();
        assert_eq!(of_sites, 2, "{json}");
        let json = counting("-json -fn Service.*", pid).end().json();
        let names = json["functions"].as_array().unwrap().iter();
        let names: Vec<&Value> = names.map(|it| &it["name"]).collect();
        let serve = names.iter().filter(|name| **name == "Service.serve");
        assert_eq!(serve.count(), 1, "{names:?}");
        let site = lines.iter().find(is_marked).unwrap();
        let address = site.split(' ').next().unwrap();
        let counted = counting(&format!("-fn {address}"), pid).end();
        assert!(
            counted.stdout.ends_with(" Service.serve (probe site)\n"),
            "{counted:?}"
        );
    }
}

// promise: Functions: Calls of functions of a C program in four threads are counted to the last one (2)
#[test]
fn calls_of_c_functions_are_counted_exactly() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = counting("-fn leaf,outer -fn indirect,pthread_create", pid);
        let answer = target.ask("calls 4 50000", "called");
        let run = tool.end();
        assert_eq!(run.stderr, "");
        let mut expected = calls(&answer, "");
        expected.push("4 pthread_create".to_owned());
        let mut counted = hits(&run.answer());
        counted.sort();
        expected.sort();
        assert_eq!(counted, expected);
        assert!(!is_observed(pid));
        target.ask("calls 1 1", "called");
    }
}

/// The program `calls` in both forms, and stripped.
fn ocaml_programs(scratch: &Scratch) -> Vec<PathBuf> {
    let mut files = program_forms("calls").to_vec();
    let stripped = scratch.file("stripped");
    let mut strip = Command::new("strip");
    let strip = strip.arg("-o").arg(&stripped).arg(&files[0]);
    assert!(strip.status().unwrap().success());
    files.push(stripped);
    files
}

// promise: Functions: Calls of OCaml functions, with exceptions and in four threads, are counted to the last one (3
//    programs, of which one is stripped)
#[test]
fn calls_of_ocaml_functions_are_counted_exactly() {
    let scratch = Scratch::new();
    for file in ocaml_programs(&scratch) {
        for (threads, calls_before) in [("1", false), ("4", true)] {
            let mut target = Talker::start(&file);
            if calls_before {
                target.ask("run 1 100", "calls");
            }
            let before = target.ask("run 1 0", "calls");
            let tool = counting("-fn Calls.leaf,Calls.deep,Calls.raises", target.pid());
            let after = target.ask(&format!("run {threads} 20000"), "calls");
            let counted = hits(&tool.end().answer());
            let number = |line: &str| line.split(' ').next().unwrap().parse::<u64>().unwrap();
            let both = calls(&before, "").into_iter().zip(calls(&after, ""));
            let added = both.zip(&counted).map(|((before, after), counted)| {
                let name = after.split_once(' ').unwrap().1;
                assert!(counted.ends_with(&format!(" Calls.{name}")), "{counted}");
                number(&after) - number(&before)
            });
            let added: Vec<u64> = added.collect();
            let counted: Vec<u64> = counted.iter().map(|line| number(line)).collect();
            assert_eq!(counted, added, "{} {threads}", file.display());
        }
    }
}

#[test]
fn functions_and_probes_are_counted_together() {
    for file in fixture_forms("gen_ocaml") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = counting("-regexp . -fn Alpha.work -sites", pid);
        let info = run(&format!("info -pid {pid}"));
        let said = "4 sites and 1 function are observed by pid ";
        assert!(info.stderr.contains(said), "{}", info.stderr);
        target.hits();
        let answer = tool.end().answer();
        let mut lines = hits(&answer);
        lines.sort();
        assert_eq!(
            lines,
            [
                "1 Alpha.work",
                "1 only_alpha",
                "1 shared",
                "1 shared",
                "1 shared"
            ]
        );
        let row = answer.lines().find(|line| line.contains(" Alpha.work 0x"));
        let words: Vec<&str> = row.unwrap().split(' ').collect();
        let [_, _, _, address, path, source] = words[..] else {
            panic!("{answer}");
        };
        assert!(address.starts_with("0x"), "{answer}");
        assert_eq!(path, file.file_name().unwrap().to_str().unwrap());
        assert!(source.starts_with("gen_ocaml.S:"), "{answer}");

        let tool = counting("-fn Alpha.work -sites -json", pid);
        target.hits();
        let json = object(&tool.end().answer());
        assert_eq!(json["probes"], Value::Array(Vec::new()));
        let row = function(&json, "Alpha.work");
        assert_eq!(
            (&row["hits"], &row["address"]),
            (&1.into(), &address.into())
        );
        assert_eq!(row["object"], file.to_str().unwrap());
        assert!(row["line"].is_u64(), "{row}");

        let by_address = counting(&format!("-format table -fn {address}"), pid);
        target.hits();
        let table = by_address.end().answer();
        let row = table.lines().nth(2).unwrap();
        assert!(table.starts_with(" function "), "{table}");
        assert!(row.starts_with(" Alpha.work | 1 "), "{table}");
    }
}

#[test]
fn only_called_functions_of_many_are_listed() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut tool = counting("-fn * -interval 1ms -json", pid);
        // Wait for an interval, so that the calls come after it.
        let mut objects = vec![object(&tool.tool.line().unwrap())];
        let answer = target.ask("calls 2 10000", "called");
        let run = tool.end();
        objects.extend(run.stdout.lines().map(object));
        let total = objects.pop().unwrap();
        let all = total["functions_counted"].as_u64().unwrap();
        let shown = total["functions"].as_array().unwrap();
        assert!(all > 1000 && shown.len() < 500, "{all} {}", shown.len());
        assert!(shown.iter().all(|it| it["hits"].as_u64() > Some(0)));
        // A pattern does not select functions of the kernel.
        let refused = total["refused"].as_array().unwrap();
        assert!(
            refused.iter().all(|it| it["reason"] != "kernel_code"),
            "{total}"
        );
        for line in calls(&answer, "") {
            let (calls, name) = line.split_once(' ').unwrap();
            let hits = |it: &Value| {
                let functions = it["functions"].as_array().unwrap().iter();
                let mut of_name = functions.filter(|it| it["name"] == name);
                of_name.next().map_or(0, |it| it["hits"].as_u64().unwrap())
            };
            let calls: u64 = calls.parse().unwrap();
            assert_eq!(hits(&total), calls);
            assert_eq!(objects.iter().map(hits).sum::<u64>(), calls);
        }
        assert!(objects.iter().all(|it| it["refused"].is_null()));

        let tool = counting("-fn *", pid);
        target.ask("calls 2 10", "called");
        let run = tool.end();
        let sum = run.stderr.lines().last().unwrap();
        let (functions, rest) = sum.split_once(" functions (").unwrap();
        assert_eq!(functions, all.to_string());
        let listed = run.stdout.lines().count();
        assert!(
            rest.starts_with(&format!("{listed} of them called), ")),
            "{sum}"
        );
    }
}

/// A program with functions `fixed_1` to `fixed_N` that begin with a system call, which cannot be moved.
pub(crate) fn with_fixed_functions(scratch: &Scratch, number: usize) -> PathBuf {
    let (source, file) = (scratch.file("fixed.c"), scratch.file("fixed"));
    let mut text = String::from("#include <stdio.h>\n");
    for number in 1..=number {
        let name = format!("fixed_{number}");
        text += &format!(
            "asm(\".type {name}, @function\\n{name}: syscall; ret\\n.size {name}, 3\");\n"
        );
    }
    text += "int main(void) { puts(\"ready\"); fflush(stdout); while (getchar() >= 0); }\n";
    fs::write(&source, text).unwrap();
    let gcc = Command::new("gcc")
        .arg("-o")
        .arg(&file)
        .arg(&source)
        .status();
    assert!(gcc.unwrap().success());
    file
}

// promise: Functions: Code of a file that the program has mapped a second time is reported, and not counted (2 targets × 2 commands)
#[test]
fn code_that_is_mapped_again_is_reported() {
    for file in fixture_forms("mapped_again") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let called = target.ask("again 1", "called");
        let address = called.strip_prefix("called ").unwrap();
        for command in ["count", "latency"] {
            let flags = "-fn leaf -json";
            let running = start_observing(command, flags, pid);
            target.ask("again 5", "called");
            let ended = running.end();
            let warning = object(ended.stderr.lines().next().unwrap());
            assert_eq!(warning["kind"], "uncounted");
            let text = warning["message"].as_str().unwrap();
            let begin = "calls of leaf in a second mapping of the file are not ";
            assert!(text.starts_with(begin), "{text}");
            let answer = object(ended.answer().lines().next().unwrap());
            let refused = &answer["refused"];
            assert_eq!(refused[1], Value::Null, "{refused}");
            assert_eq!(refused[0]["name"], "leaf");
            assert_eq!(refused[0]["reason"], "mapped_again");
            assert_eq!(refused[0]["address"], address);
            let hits = if command == "count" { "hits" } else { "count" };
            assert_eq!(answer["functions"][0][hits], 5, "{answer}");
        }
    }
}

#[test]
fn functions_that_cannot_be_counted_are_named() {
    let scratch = Scratch::new();
    let target = Talker::start(&with_fixed_functions(&scratch, 5));
    let pid = target.pid();
    let reason = "has a system call at +0x0, which cannot be moved";
    let few = counting("-fn main,fixed_[12]", pid).end();
    let named = run(&format!("count -fn main,fixed_2 -pid {pid}")).failure();
    assert!(
        named.contains(&format!("fixed: fixed_2 {reason}; nothing was changed")),
        "{named}"
    );
    let warning = format!(
        "ocaml-probes: warning: 2 of 3 functions cannot be counted: fixed_1 {reason}; fixed_2 {reason}\nhint: "
    );
    assert!(few.stderr.starts_with(&warning), "{}", few.stderr);
    assert_eq!(hits(&few.answer()), ["0 main"]);
    let more = counting("-fn main,fixed_* -verbose", pid).end();
    let why = "warning: 5 of 6 functions cannot be counted: 5 unmovable\n";
    assert!(more.stderr.contains(why), "{}", more.stderr);
    let step = format!("is not counted: it {reason}");
    assert_eq!(more.stderr.matches(&step).count(), 5, "{}", more.stderr);

    let json = counting("-fn main,fixed_[1] -json", pid).end();
    let warning = object(json.stderr.lines().next().unwrap());
    assert_eq!(warning["kind"], "uncounted");
    let json = object(&json.answer());
    let refused = &json["refused"][0];
    assert_eq!(refused["name"], "fixed_1");
    assert_eq!(refused["reason"], "unmovable");
    assert_eq!(refused["text"], reason);
    assert!(refused["address"].as_str().unwrap().starts_with("0x"));
    assert!(refused["object"].as_str().unwrap().ends_with("/fixed"));

    let error = run(&format!("count -fn fixed_* -pid {pid}")).failure();
    let why = format!("fixed: fixed_1 {reason}, and 4 more cannot be observed either");
    assert!(error.contains(&why), "{error}");
    assert!(error.contains(" -functions` says of each "), "{error}");
    assert!(!is_observed(pid));
}

#[test]
fn functions_of_the_kernel_are_refused_by_name() {
    let target = Talker::start(&program("calls"));
    let pid = target.pid();
    let error = run(&format!("count -fn main,__vdso_time -pid {pid}")).failure();
    let why = "calls.exe: __vdso_time is code of the kernel (vDSO); nothing was changed";
    assert!(error.contains(why), "{error}");
}

#[test]
fn probes_and_functions_are_not_confused() {
    let file = fixture("gen_ocaml.pie");
    let target = Talker::start(&file);
    let pid = target.pid();
    let hint = |line: &str| run(line).failure().lines().last().unwrap().to_owned();
    assert_eq!(
        hint(&format!("count -pid {pid} -probe Alpha.work")),
        "hint: Alpha.work is a function: `count -fn Alpha.work` counts its calls, `latency -fn Alpha.work` times them"
    );
    assert_eq!(
        hint(&format!("count -pid {pid} -fn only_*")),
        "hint: only_alpha is a probe: `count -probe only_alpha` counts its hits"
    );
    let file = file.display();
    assert_eq!(
        hint(&format!("trace -prog {file} -watch Alpha.work")),
        "hint: Alpha.work is a function: `trace -count -fn Alpha.work` counts its calls, `trace -latency -fn Alpha.work` times them"
    );
    assert_eq!(
        hint(&format!("trace -prog {file} -count -fn only_alpha")),
        "hint: only_alpha is a probe: `trace -count` without -fn counts the hits of probes"
    );
    assert_eq!(
        hint(&format!("list -prog {file} -functions only_alpha")),
        "hint: only_alpha is a probe: without -functions, `list` lists probes"
    );
}

#[test]
fn stopped_process_is_noted() {
    let target = Talker::start(&fixture("calls.pie"));
    let pid = target.pid();
    let line = format!("count -fn leaf -for 1ms -pid {pid}");
    let stopped = format!(
        "process {pid} is stopped (state T): it executes nothing until `kill -CONT {pid}`\n"
    );
    assert!(!run(&line).stderr.contains("is stopped"));
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    eventually("it is stopped", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.contains(") T ").then_some(())
    });
    assert!(run(&line).stderr.contains(&stopped));
    kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
}

// promise: Observations: Copying stacks of hits kills no program: threads that wait for a processor meanwhile (2 × 3 commands), and
//    a stack of the program's own above which memory is unmapped (2 × 3)
#[test]
fn copying_stacks_kills_no_program() {
    for file in fixture_forms("calls") {
        for (name, flags) in [
            ("count", "-fn burst -by stack"),
            ("watch", "-fn burst -stack -rate 1"),
            ("latency", "-fn burst -over 0 -stack"),
        ] {
            for line in ["bursts 40 150", "coroutine 500"] {
                let mut target = Talker::start(&file);
                let tool = start_observing(name, flags, target.pid());
                target.ask(line, "done");
                tool.kill();
            }
        }
    }
}

#[test]
fn age_of_the_last_reading_is_noted() {
    let mut target = Talker::start(&fixture("calls.pie"));
    let mut tool = counting("-fn leaf -interval 1ms", target.pid());
    // Once it prints a line, it has read the process.
    tool.tool.line().unwrap();
    target.guard().child().kill().unwrap();
    target.guard().wait();
    let stderr = tool.until_end().stderr;
    let warning = stderr.lines().next().unwrap();
    let age =
        warning.strip_prefix("ocaml-probes: warning: the process has exited: the last reading is ");
    let (age, rest) = age.unwrap().split_once(' ').unwrap();
    assert!(age.parse::<u64>().is_ok(), "{stderr}");
    assert_eq!(rest, "ms old, and hits since then are missing");
}

#[test]
fn unknown_functions_are_errors() {
    let target = Talker::start(&program("calls"));
    let pid = target.pid();
    let count = |flags: &str| run(&format!("count -pid {pid} {flags}"));
    for (flags, message, hint) in [
        (
            "-fn Calls.leaf,Calls.lef",
            "no function in calls.exe or its 3 libraries matches Calls.lef; did you mean \"Calls.leaf\"",
            "` lists the names; a glob has to match a whole name",
        ),
        (
            "-fn 0x10",
            "no function in calls.exe or its 3 libraries is known at 0x10; nothing was changed",
            "` lists the addresses of its functions",
        ),
        (
            "-fn Calls.Work.leaf",
            "matches Calls.Work.leaf; did you mean \"Calls.leaf\"?",
            "` lists the names",
        ),
        (
            "-fn camlCalls__leaf_75",
            "matches camlCalls__leaf_75; did you mean \"Calls.leaf\"?",
            "` lists the names",
        ),
        (
            "-fn Clals.l*",
            "matches Clals.l*; did you mean \"Calls.leaf\"?",
            "` lists the names; a glob has to match a whole name",
        ),
        (
            "-fn lea?",
            "matches lea?; did you mean \"Calls.leaf\"",
            "a glob has to match a whole name: `*.map`, not `map`",
        ),
        (
            "-fn Calls.leaf -probe tick",
            "no OCaml probes in ",
            "`count -fn GLOB` counts functions of any program",
        ),
    ] {
        let error = count(flags).failure();
        assert!(error.contains(message), "{error}");
        assert!(error.contains(hint), "{error}");
    }
    let mut spaced = command([
        "count",
        "-pid",
        &pid.to_string(),
        "-fn",
        "Calls.leaf, Calls.deep",
    ]);
    let counted = run_command(spaced.args(["-for", "10ms"])).answer();
    assert_eq!(counted.lines().count(), 2, "{counted}");
    let mut spaced = command([
        "count",
        "-pid",
        &pid.to_string(),
        "-fn",
        "f(int), Calls.deep",
    ]);
    let error = run_command(&mut spaced).failure();
    let hint = "a comma with a space after it belongs to a name if there are parentheses or angle brackets";
    assert!(error.contains(hint), "{error}");
    for (flags, message) in [
        ("-gc minor -gc minor", "-gc: \"minor\" is given twice"),
        (
            "-functions Calls.leaf",
            "unknown flag -functions; did you mean -fn?",
        ),
        (
            "-fn Calls.[",
            "\"Calls.[\" is not a glob: it has a [ without a ]\n",
        ),
        ("-fn 0xcalls", "\"0xcalls\" is not an address"),
        ("-fn main,main", "-fn: \"main\" is given twice"),
        ("-fn main,", "a name in the comma list is empty"),
    ] {
        let usage = count(flags);
        assert_eq!(usage.code, Some(2));
        assert!(usage.stderr.contains(message), "{}", usage.stderr);
    }
    let tool = counting("-fn Calls.leaf", pid);
    let refused = count("-fn Calls.deep").failure();
    assert!(refused.contains("is already observed by"), "{refused}");
    tool.end().answer();
}

#[test]
fn functions_of_bytecode_are_refused() {
    let target = Talker::start(&program("bytecode/unprobed.bc"));
    let error = run(&format!("count -pid {} -fn App.*", target.pid())).failure();
    assert!(error.contains(", which runs OCaml bytecode,"), "{error}");
    let hint = "hint: the program is OCaml bytecode, whose functions are no native code";
    assert!(error.contains(hint), "{error}");
}

/// Runs `trace` with a program that reads `words`, a format of printf(1), from standard input.
pub(crate) fn trace(file: &Path, flags: &str, words: &str) -> Run {
    let mut shell = Command::new("sh");
    shell.args([
        "-c",
        "words=$1; shift; printf \"$words\" | \"$@\"",
        "-",
        words,
    ]);
    shell.arg(env!("CARGO_BIN_EXE_ocaml-probes"));
    shell.args(["trace", "-prog"]).arg(file);
    run_command(shell.args(flags.split(' ')))
}

// promise: Functions: An instruction of a restartable sequence (rseq) is refused, by name and reason (1)
#[test]
fn restartable_sequences_are_not_patched() {
    let file = fixture("sequences.nopie");
    let symbols = output(Command::new("nm").arg(&file)).stdout;
    let symbols = String::from_utf8(symbols).unwrap();
    let line = symbols.lines().find(|it| it.ends_with(" in_sequence"));
    let address = line.unwrap().split(' ').next().unwrap();
    let target = Talker::start(&file);
    let ran = run(&format!("count -fn 0x{address} -pid {}", target.pid()));
    let reason = "an instruction of a restartable sequence";
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains(reason), "{}", ran.stderr);
    let answer = run(&format!(
        "count -fn go_through -for 1ms -pid {}",
        target.pid()
    ))
    .answer();
    assert!(answer.ends_with(" go_through\n"), "{answer}");
}

// promise: Functions: From the first instruction, also in forked children that run at the same time, and in threads
//    without thread-local storage, calls and hits are counted to the last one (4 programs)
#[test]
fn calls_in_forked_children_are_counted_exactly() {
    let words = "forks 6 20000\\nclones 4 20000\\nbare 4 20000\\nforks 30 500\\nthreads 4 20000\\n";
    for name in ["owners", "owners_static"] {
        for file in fixture_forms(name) {
            let rounds = (6 + 1 + 4 + 4 + 4) * 20_000 + (30 + 1) * 500;
            for (flags, expected) in [
                (
                    "-fn *",
                    [(3, "half"), (2, "leaf"), (1, "outer"), (1, "make_round")].as_slice(),
                ),
                ("-format plain", &[(3, "ping"), (1, "pong")]),
            ] {
                let traced = trace(&file, &format!("-count {flags}"), words);
                assert_eq!(traced.code, Some(0), "{}", traced.stderr);
                let done = format!("done {rounds}\n");
                assert!(traced.stdout.ends_with(&done), "{}", traced.stdout);
                for (times, name) in expected {
                    let line = format!("{} {name}", times * rounds);
                    let hits = traced.stderr.lines().map(|line| {
                        let words: Vec<&str> = line.split(' ').collect();
                        format!("{} {}", words[0], words.last().unwrap())
                    });
                    let of_name: Vec<String> = hits
                        .filter(|it| it.ends_with(&format!(" {name}")))
                        .collect();
                    assert_eq!(of_name, [line], "{}", file.display());
                }
            }
        }
    }
}

// promise: Functions: Calls of OCaml in forked children that run at the same time are counted to the last one (2 programs,
//    5 processes)
#[test]
fn calls_of_ocaml_in_children_are_counted() {
    for file in program_forms("calls") {
        // C functions too, so that the process owns rows of both kinds.
        let traced = trace(&file, "-count -fn Calls.*,caml_*", "forks 4 20000\\n");
        assert_eq!(traced.code, Some(0), "{}", traced.stderr);
        let answer = traced.stdout.lines().last().unwrap();
        let own = answer.split(' ').filter_map(|it| it.split_once('='));
        let expected: Vec<String> = own
            .map(|(name, calls)| format!("{} Calls.{name}", 5 * calls.parse::<u64>().unwrap()))
            .collect();
        assert_eq!(expected.len(), 3);
        let is_hits = |line: &&str| line.starts_with(|first: char| first.is_ascii_digit());
        let lines: Vec<&str> = traced.stderr.lines().filter(is_hits).collect();
        let counted = hits(&lines.join("\n"));
        for line in expected {
            assert!(counted.contains(&line), "{line} in {counted:?}");
        }
    }
}

#[test]
fn calls_are_counted_from_the_first_instruction() {
    let words = "run 2 100\\n";
    for file in program_forms("calls") {
        let flags = "-count -fn Calls.leaf,Calls.entry,main,pthread_create -fn calls.ml:13";
        let traced = trace(&file, flags, words);
        assert_eq!(traced.code, Some(0), "{}", traced.stderr);
        assert!(
            traced.stdout.contains("calls leaf=300 "),
            "{}",
            traced.stdout
        );
        let counted = hits(&traced.stderr);
        assert_eq!(counted[..2], ["300 Calls.leaf", "300 calls.ml:13"]);
        for one in ["1 Calls.entry", "1 main"] {
            assert!(counted.iter().any(|line| line == one), "{counted:?}");
        }
        let address = trace(&file, "-count -fn 0x10", words).stderr;
        let hint = "hint: a position-independent program, and a library, has its addresses only when it runs: give the name";
        assert!(address.contains(hint), "{address}");
        let missing = trace(&file, "-count -fn Calls.laef", words);
        assert_eq!((missing.code, &*missing.stdout), (Some(1), ""));
        let why = "matches Calls.laef; did you mean \"Calls.leaf\"? the program was not started";
        assert!(missing.stderr.contains(why), "{}", missing.stderr);
    }
    for file in fixture_forms("calls") {
        let traced = trace(&file, "-count -fn leaf -json", "calls 2 100\\nquit\\n");
        let counted = traced.said().pop().unwrap();
        assert_eq!(function(&counted, "leaf")["hits"], 400);
    }
}

// promise: Functions: If the tool is killed, the functions are restored by the next one, also in a program without
//    probes (2)
#[test]
fn functions_of_a_killed_tool_are_restored() {
    for file in fixture_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = counting("-fn leaf,outer", pid);
        let tool_pid = tool.tool.pid();
        let by = format!("by pid {tool_pid} (ocaml-probes count -pid {pid} -fn leaf,outer)");
        let info = run(&format!("info -pid {pid}"));
        let said = format!("2 functions are observed {by}, for ");
        assert!(info.stderr.contains(&said), "{}", info.stderr);
        assert_eq!(info.stdout, "");
        tool.kill();
        target.ask("calls 2 10", "called");
        assert!(is_observed(pid));
        let json = run(&format!("info -quiet -json -pid {pid}")).json();
        assert_eq!(json["observed_functions"], 2);
        assert_eq!(
            (&json["observed_sites"], &json["observer"]["alive"]),
            (&0.into(), &false.into())
        );
        let info = run(&format!("info -pid {pid}"));
        let said = format!(
            "warning: 2 functions are instrumented, but no observer reads them: installed {by}\nhint: `ocaml-probes observe -clean -pid {pid}` removes "
        );
        assert!(info.stderr.contains(&said), "{}", info.stderr);
        let cleaned = run(&format!("observe -clean -pid {pid}")).answer();
        assert_eq!(cleaned, format!("{pid} 2\n"));
        assert!(!is_observed(pid));
        let error = run(&format!("info -pid {pid}")).failure();
        assert!(error.contains("no OCaml probes in "), "{error}");
        assert!(
            json["build_id"].as_str().is_some_and(|id| id.len() >= 8),
            "{json}"
        );
        target.ask("calls 2 10", "called");
    }
}

/// The program `closures`, and a copy without probes.
fn closure_programs(scratch: &Scratch) -> [PathBuf; 2] {
    let file = program("closures/closures");
    let without = scratch.file("without");
    let mut objcopy = Command::new("objcopy");
    objcopy.args(["--remove-section", ".note.stapsdt"]);
    assert!(objcopy.arg(&file).arg(&without).status().unwrap().success());
    [file, without]
}

// promise: Closures: A process whose functions are counted, also from its start, marshals closures that others of its
//    program accept (2 programs, of which one has no probes)
#[test]
fn closures_of_counted_functions_are_accepted() {
    let scratch = Scratch::new();
    let (running, started) = (scratch.file("running"), scratch.file("started"));
    for file in closure_programs(&scratch) {
        let mut target = Talker::start(&file);
        let tool = counting("-fn Closures.*", target.pid());
        target.ask(&format!("write {}", running.display()), "written");
        let run = tool.end();
        assert!(!run.stderr.contains("closures"), "{}", run.stderr);
        let words = format!("write {}\\n", started.display());
        let traced = trace(&file, "-count -fn Closures.*", &words);
        assert!(traced.stdout.contains("written"), "{}", traced.stderr);
        assert!(!traced.stderr.contains("refuse"), "{}", traced.stderr);
        let mut other = Talker::start(&file);
        for closure in [&running, &started] {
            other.ask(&format!("read {}", closure.display()), "got 42");
        }
    }
}

// promise: Functions: Handlers that do not block their signal are not interrupted by the next one over and over, because a process is
//    stopped again before they have run (2 programs)
#[test]
fn handlers_do_not_nest_while_threads_are_stopped() {
    for file in fixture_forms("nested_signals") {
        let mut target = Talker::start(&file);
        target.ask("ring 300", "ringing");
        let line = format!("count -pid {} -fn fixture_command -for 10ms", target.pid());
        for _ in 0..5 {
            // Perhaps no thread was found without a pending signal.
            let counted = run(&line);
            assert!(
                counted.code == Some(0) || counted.stderr.contains("has a pending signal"),
                "{counted:?}"
            );
        }
        let answer = target.ask("calm", "calm");
        let (handled, deepest) = answer.split_once(" deepest=").unwrap();
        assert_ne!(handled, "calm handled=0");
        // One handler takes about 3 KB with the registers that the kernel has saved.
        assert!(deepest.parse::<u32>().unwrap() < 200_000, "{answer}");
    }
}
