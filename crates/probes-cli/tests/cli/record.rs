//! `record`: time lines, read back by other people's readers and compared with what the programs say that they did.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use serde_json::Value;
use test_support::tmux::Terminal;
use test_support::{Scratch, Talker, eventually, fixture_forms, program, program_forms};

use crate::support::{Run, command, is_observed, object, run, run_command};

/// A recording that is being made.
pub(crate) struct Recording {
    pub(crate) tool: Talker,
    errors: BufReader<ChildStderr>,
}

/// Starts `record` by this command, and waits until it says that it records.
pub(crate) fn started(mut command: Command, saying: &str) -> Recording {
    let mut tool = Talker::spawn(command.stderr(Stdio::piped()));
    let stderr = tool.guard().child().stderr.take().unwrap();
    let mut errors = BufReader::new(stderr);
    let mut said = String::new();
    while !said.contains(saying) {
        assert!(errors.read_line(&mut said).unwrap() > 0, "{said}");
    }
    Recording { tool, errors }
}

pub(crate) fn recording(pid: i32, flags: &[&str], file: &Path) -> Recording {
    started(record_command(pid, flags, file), "stopped ")
}

pub(crate) fn record_command(pid: i32, flags: &[&str], file: &Path) -> Command {
    let mut command = command(["record", "-pid", &pid.to_string()]);
    command.args(flags).arg("-o").arg(file);
    command
}

/// `record` of a process, which cannot write more than so many blocks of 512 or 1024 bytes to a file: that is then an
/// error, and no signal.
pub(crate) fn limited_command(blocks: u32, pid: i32, flags: &[&str], file: &Path) -> Command {
    let tool = record_command(pid, flags, file);
    let mut limited = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
    limited.args(["-c", &script, "sh"]);
    limited.arg(tool.get_program()).args(tool.get_args());
    for (name, value) in tool.get_envs() {
        limited.env(name, value.unwrap_or_default());
    }
    limited
}

impl Recording {
    /// Interrupts it; returns what it prints.
    pub(crate) fn end(self) -> Run {
        kill(Pid::from_raw(self.tool.pid()), Signal::SIGINT).unwrap();
        self.until_end()
    }

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

/// What a file has, by a reader that is not ours.
pub(crate) fn read(file: &Path) -> Value {
    read_by(file, &[])
}

/// The same of one that was not written to its end.
fn read_cut(file: &Path) -> Value {
    read_by(file, &["cut"])
}

fn read_by(file: &Path, flags: &[&str]) -> Value {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readers = package.join("../../target/trace-readers");
    let script = package.join("tests/cli/read_timeline.py");
    let mut python = Command::new("python3");
    python.arg(script).arg(file).args(flags);
    python.env("PYTHONPATH", readers);
    let read = python.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    let why = String::from_utf8_lossy(&read.stderr);
    let hint = "`scripts/setup --tests` installs the readers";
    assert!(read.status.success(), "{}: {why}{hint}", file.display());
    serde_json::from_slice(&read.stdout).unwrap()
}

pub(crate) fn slices<'t>(timeline: &'t Value, name: &str) -> Vec<&'t Value> {
    let slices = timeline["slices"].as_array().unwrap().iter();
    slices.filter(|slice| slice["name"] == name).collect()
}

/// A figure of the line that `record` prints, before which there may be messages.
#[track_caller]
pub(crate) fn figure(answer: &str, name: &str) -> u64 {
    let mut words = answer.split_ascii_whitespace();
    assert!(words.any(|word| word == name), "{answer}");
    words.next().unwrap().parse().unwrap()
}

/// A figure of what the program `calls` answers.
pub(crate) fn called(answer: &str, name: &str) -> usize {
    let mut words = answer.split(' ').filter_map(|word| word.split_once('='));
    words
        .find(|(key, _)| *key == name)
        .unwrap()
        .1
        .parse()
        .unwrap()
}

pub(crate) const FORMATS: [&str; 3] = ["calls.perfetto-trace", "calls.json", "calls.fxt"];

/// Asserts that the slices of `calls` are those of its rounds.
fn assert_calls(timeline: &Value, answer: &str) {
    for name in ["leaf", "deep", "raises"] {
        let found = slices(timeline, &format!("Calls.{name}"));
        assert_eq!(found.len(), called(answer, name), "{name}");
    }
    for slice in slices(timeline, "Calls.raises") {
        let argument = slice["args"]["arg0"].as_i64().unwrap();
        let ended = slice["args"]["ended"].as_str().unwrap();
        // An odd one ends by an exception, an even one by a call in tail position.
        let expected = ["by a call in tail position", "unwound"][argument as usize % 2];
        assert!(ended.starts_with(expected), "{slice}");
    }
    let deep = slices(timeline, "Calls.deep");
    for slice in &deep {
        assert!(slice["args"]["ended"].is_null(), "{slice}");
        let number = |slice: &Value| slice["args"]["arg0"].as_i64().unwrap();
        let is_within = |one: &&&Value| {
            one["track"] == slice["track"]
                && one["depth"].as_u64() == slice["depth"].as_u64().map(|depth| depth + 1)
                && number(one) == number(slice) - 1
                && one["begin"].as_u64() >= slice["begin"].as_u64()
                && one["end"].as_u64() <= slice["end"].as_u64()
        };
        // It calls itself with one less, down to 0.
        let inner = deep.iter().filter(is_within).count();
        assert_eq!(inner, usize::from(number(slice) > 0), "{slice}");
    }
}

// promise: Time lines: The slices of functions, recursive, tail calling and raising, in two threads, are the calls of the program in
//    each format (3 formats of 2 programs)
#[test]
fn calls_are_slices_in_each_format() {
    let scratch = Scratch::new();
    let functions = ["-fn", "Calls.leaf,Calls.deep,Calls.raises"];
    for program in program_forms("calls") {
        for format in FORMATS {
            let mut target = Talker::start(&program);
            let file = scratch.file(format);
            let tool = recording(target.pid(), &functions, &file);
            let answer = target.ask("run 2 20", "calls");
            let answered = tool.end().answer();
            let timeline = read(&file);
            assert_calls(&timeline, &answer);
            let name = program.file_name().unwrap().to_str().unwrap();
            assert_eq!(timeline["process"], name);
            let all = timeline["slices"].as_array().unwrap().len() as u64;
            assert_eq!(figure(&answered, "slices"), all);
            assert_eq!(figure(&answered, "unwound"), 20);
            let length = fs::metadata(&file).unwrap().len();
            assert_eq!(figure(&answered, "bytes"), length);
            assert!(!is_observed(target.pid()));
            target.ask("run 1 1", "calls");
        }
    }
}

#[test]
fn calls_of_c_nest_by_thread() {
    let scratch = Scratch::new();
    let file = scratch.file("c.fxt");
    for program in fixture_forms("calls") {
        let mut target = Talker::start(&program);
        let tool = recording(target.pid(), &["-fn", "leaf,outer,indirect"], &file);
        target.ask("calls 3 40", "called");
        tool.end().answer();
        let timeline = read(&file);
        let count = |name: &str| slices(&timeline, name).len();
        assert_eq!(
            (count("leaf"), count("outer"), count("indirect")),
            (240, 120, 120)
        );
        for outer in slices(&timeline, "outer") {
            let is_within = |leaf: &&&Value| {
                leaf["track"] == outer["track"]
                    && leaf["begin"].as_u64() >= outer["begin"].as_u64()
                    && leaf["end"].as_u64() <= outer["end"].as_u64()
            };
            let leaves = slices(&timeline, "leaf");
            assert_eq!(leaves.iter().filter(is_within).count(), 2, "{outer}");
        }
    }
}

#[test]
fn pairs_are_slices_and_hits_are_instants() {
    let scratch = Scratch::new();
    for format in FORMATS {
        let target = Talker::start(&program("service"));
        let file = scratch.file(format);
        let flags = [
            "-pair",
            "req_start,req_end",
            "-probe",
            "tick",
            "-for",
            "1s",
            "-json",
        ];
        let run = recording(target.pid(), &flags, &file).until_end();
        let report = object(&run.answer());
        let timeline = read(&file);
        let requests = slices(&timeline, "req_start,req_end");
        let number = |slice: &Value| slice["args"]["request"].as_i64().unwrap();
        assert!(!requests.is_empty());
        for slice in &requests {
            // What its stop says is said of the same slice.
            let page = format!("\"<p>{}</p>\"", number(slice) % 7);
            assert_eq!(slice["args"]["page"], page, "{slice}");
        }
        for both in requests.windows(2) {
            assert_eq!(number(both[0]) + 1, number(both[1]));
        }
        let ticks = timeline["instants"].as_array().unwrap();
        for tick in ticks {
            assert_eq!(tick["name"], "tick");
            let first = 3 * tick["args"]["n"].as_i64().unwrap();
            let of_tick = requests.iter().filter(|it| number(it) / 3 == first / 3);
            let mut times = of_tick.map(|it| it["begin"].as_u64());
            assert!(times.all(|time| time >= tick["time"].as_u64()));
        }
        assert_eq!(report["slices"], requests.len());
        assert_eq!(report["instants"], ticks.len());
    }
}

// promise: Time lines: Slices have the results of their calls, and hits of lines and USDT probes are instants, in each format
#[test]
fn results_lines_and_usdt_probes_are_recorded() {
    let scratch = Scratch::new();
    for format in FORMATS {
        let mut target = Talker::start(&program("calls"));
        let file = scratch.file(format);
        let flags = ["-results", "-fn", "Calls.leaf,calls.ml:29"];
        let tool = recording(target.pid(), &flags, &file);
        let answer = target.ask("run 1 5", "calls");
        tool.end().answer();
        let timeline = read(&file);
        let leaves = slices(&timeline, "Calls.leaf");
        assert_eq!(leaves.len(), called(&answer, "leaf"));
        for slice in leaves {
            let argument = slice["args"]["arg0"].as_i64().unwrap();
            assert_eq!(slice["args"]["result"], argument + 1, "{slice}");
        }
        let lines = timeline["instants"].as_array().unwrap();
        assert_eq!(lines.len(), called(&answer, "raises"));
        let is_named = |it: &Value| it["name"] == "calls.ml:29 in Calls.work";
        assert!(lines.iter().all(is_named), "{lines:?}");

        let mut target = Talker::start(&fixture_forms("usdt_arguments")[0]);
        let tool = recording(target.pid(), &["-usdt", "forms:registers"], &file);
        target.ask("form 1 3", "formed");
        tool.end().answer();
        let timeline = read(&file);
        let hits = timeline["instants"].as_array().unwrap();
        assert_eq!(hits.len(), 3);
        for (hit, number) in hits.iter().zip(1..) {
            assert_eq!(hit["name"], "forms:registers in forms_round", "{hit}");
            assert_eq!(hit["args"]["arg0"], number, "{hit}");
        }
    }
}

/// When a slice began and ended, in nanoseconds.
pub(crate) fn span(slice: &Value) -> (u64, u64) {
    let time = |field: &str| slice[field].as_u64().unwrap();
    (time("begin"), time("end"))
}

/// The waits of `turns` in its naps of 30 ms, of which not all were looked at, and those that were.
fn naps(timeline: &Value) -> (Vec<&Value>, Vec<&Value>) {
    let seen = slices(timeline, "clock_nanosleep");
    let unseen = slices(timeline, "waits, not looked at");
    let all = seen.iter().chain(&unseen).copied();
    let is_long = |slice: &&Value| {
        let (begin, end) = span(slice);
        end - begin >= 29_000_000
    };
    (all.filter(is_long).collect(), seen)
}

// promise: Time lines: With -off-cpu, each wait is a slice with the stack that it was in, alone and beside functions, in each format; what
//    stops the process to observe it is none (2 programs, 20 naps)
#[test]
fn waits_are_slices_with_their_stacks() {
    let scratch = Scratch::new();
    for program in fixture_forms("turns") {
        for (format, flags) in FORMATS.into_iter().zip([
            &["-off-cpu", "-verbose"][..],
            &["-off-cpu", "-fn", "naps"],
            &["-off-cpu", "-fn", "naps", "-last", "1h"],
        ]) {
            let mut target = Talker::start(&program);
            let file = scratch.file(format);
            let observes = flags.contains(&"-fn");
            let saying = if observes {
                "stopped "
            } else {
                "recording the waits"
            };
            let tool = started(record_command(target.pid(), flags, &file), saying);
            let answer = target.ask("turns 20", "turned");
            let answered = tool.end().answer();
            let timeline = read(&file);
            let (naps, seen) = naps(&timeline);
            // It may have waited for its command as long.
            assert!((20..24).contains(&naps.len()), "{flags:?}: {naps:?}");
            let waited: u64 = naps.iter().map(|it| span(it).1 - span(it).0).sum();
            let napped: u64 = answer.rsplit(' ').next().unwrap().parse().unwrap();
            assert!(waited >= napped / 2, "{waited}: {answer}");
            let stack = seen[0]["args"]["stack"].as_str().unwrap();
            assert!(stack.contains(";naps;"), "{stack}");
            assert!(seen[0]["args"]["part"].is_null());
            assert!(seen[0]["track"].as_str().unwrap().ends_with(" waits"));
            assert_eq!(figure(&answered, "lost_switches"), 0);
            let all = timeline["slices"].as_array().unwrap();
            assert_eq!(figure(&answered, "slices"), all.len() as u64);
            assert!(all.iter().all(|it| it["name"] != "stopped"), "{all:?}");
            let calls = slices(&timeline, "naps");
            assert_eq!(calls.len(), if observes { 20 } else { 0 });
            for call in calls {
                let (begin, end) = span(call);
                // The two are of different clocks, which differ by less than a microsecond.
                let is_within = |wait: &&&Value| {
                    let wait = span(wait);
                    begin <= wait.0 + 10_000 && wait.1 <= end + 10_000
                };
                assert_eq!(naps.iter().filter(is_within).count(), 1, "{call}");
            }
            target.ask("turns 1", "turned");
        }
    }
}

#[test]
fn waits_of_a_started_program_are_recorded() {
    let scratch = Scratch::new();
    let file = scratch.file("waits.json");
    let script = ["sh", "--", "-c", "sleep 2; exit 5"];
    let mut command = command(["record", "-off-cpu", "-prog"]);
    command
        .arg(script[0])
        .arg("-o")
        .arg(&file)
        .args(&script[1..]);
    let run = run_command(&mut command);
    assert_eq!(run.code, Some(5), "{run:?}");
    let timeline = read(&file);
    let waits = slices(&timeline, "wait4");
    assert!(!waits.is_empty(), "{timeline}");
}

#[test]
fn running_calls_are_ended_and_marked() {
    let scratch = Scratch::new();
    let file = scratch.file("running.json");
    let mut target = Talker::start(&program("calls"));
    let tool = recording(target.pid(), &["-fn", "Calls.work"], &file);
    // It has not answered, so that its thread is in `work`.
    target.send("run 1 10000000000");
    eventually("it calls", || {
        let written = fs::read_to_string(&file).ok()?;
        written.contains("Calls.work").then_some(())
    });
    let answered = tool.end().answer();
    let timeline = read(&file);
    let [outer] = slices(&timeline, "Calls.work")[..] else {
        panic!("{answered}");
    };
    assert_eq!(outer["args"]["ended"], "still running");
    assert_eq!(figure(&answered, "running"), 1);
}

#[test]
fn recording_ends_with_the_process() {
    let scratch = Scratch::new();
    for format in FORMATS {
        let mut target = Talker::start(&program("calls"));
        let file = scratch.file(format);
        let tool = recording(target.pid(), &["-fn", "Calls.leaf"], &file);
        target.ask("run 1 100", "calls");
        eventually("it is written", || {
            (fs::metadata(&file).ok()?.len() > 3_000).then_some(())
        });
        drop(target);
        let run = tool.until_end();
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        assert_eq!(slices(&read(&file), "Calls.leaf").len(), 150);
    }
}

// promise: Time lines: A file that could not be written to its end, and one whose recorder was killed, can be read (3 formats)
#[test]
fn file_that_was_cut_can_be_read() {
    let scratch = Scratch::new();
    for format in FORMATS {
        let mut target = Talker::start(&program("calls"));
        let file = scratch.file(format);
        let limited = limited_command(400, target.pid(), &["-fn", "Calls.*"], &file);
        let mut tool = started(limited, "stopped ");
        eventually("the file is full", || {
            target.ask("run 1 300", "calls");
            (!tool.tool.guard().is_running()).then_some(())
        });
        let cut = tool.until_end();
        let expected = format!("cannot write more to {}: File too large; ", file.display());
        assert!(cut.stderr.contains(&expected), "{}", cut.stderr);
        let expected = " bytes were written and can be read";
        assert!(cut.stderr.contains(expected), "{}", cut.stderr);
        assert_eq!(cut.code, Some(1));
        assert!(!is_observed(target.pid()));
        let timeline = read_cut(&file);
        assert!(slices(&timeline, "Calls.leaf").len() > 100);
        // What was lost with the last block is not counted.
        let all = timeline["slices"].as_array().unwrap().len() as u64;
        assert_eq!(figure(&cut.stdout, "slices"), all);

        let mut tool = recording(target.pid(), &["-fn", "Calls.*"], &file);
        target.ask("run 1 300", "calls");
        eventually("something is written", || {
            (fs::metadata(&file).ok()?.len() > 10_000).then_some(())
        });
        kill(Pid::from_raw(tool.tool.pid()), Signal::SIGKILL).unwrap();
        assert_eq!(tool.tool.guard().wait().signal(), Some(9));
        assert!(!slices(&read_cut(&file), "Calls.leaf").is_empty());
        run(&format!("observe -clean -pid {}", target.pid())).answer();
    }
}

#[test]
fn lost_hits_are_in_the_file() {
    let scratch = Scratch::new();
    let file = scratch.file("lost.json");
    let mut target = Talker::start(&program("calls"));
    let tool = recording(target.pid(), &["-fn", "Calls.leaf,Calls.deep"], &file);
    // The tool does not read meanwhile.
    kill(Pid::from_raw(tool.tool.pid()), Signal::SIGSTOP).unwrap();
    let answer = target.ask("run 1 50000", "calls");
    kill(Pid::from_raw(tool.tool.pid()), Signal::SIGCONT).unwrap();
    let run = tool.end();
    assert!(run.stderr.contains("hits were lost"), "{}", run.stderr);
    // Most calls are of one function, which is named.
    let (_, named) = run
        .stderr
        .split_once("; of the hits read meanwhile, ")
        .unwrap();
    let (share, name) = named.split_once(" % were of ").unwrap();
    assert!(share.parse::<u32>().unwrap() > 50, "{named}");
    assert!(name.starts_with("Calls.deep and "), "{named}");
    let summary = run.answer();
    let frequent: Vec<&str> = summary.lines().skip(1).collect();
    assert!(frequent[0].starts_with("frequent 0.") && frequent[0].ends_with(" Calls.deep"));
    assert!(
        frequent[1].ends_with(" Calls.leaf") && frequent.len() == 2,
        "{frequent:?}"
    );
    let lost = figure(&summary, "lost_hits");
    let timeline = read(&file);
    let instants = timeline["instants"].as_array().unwrap().iter();
    let in_file = instants.filter(|it| it["name"] == "hits were lost");
    let in_file: u64 = in_file.map(|it| it["args"]["hits"].as_u64().unwrap()).sum();
    assert_eq!(in_file, lost);
    let found = slices(&timeline, "Calls.leaf").len();
    assert!(lost > 0 && found < called(&answer, "leaf"));
}

// promise: Time lines: With -buffer, a burst that does not fit into the usual rings is recorded without a loss (1)
#[test]
fn large_buffer_keeps_whole_bursts() {
    let scratch = Scratch::new();
    let file = scratch.file("burst.json");
    for (flags, is_whole) in [(&[][..], false), (&["-buffer", "64"][..], true)] {
        let mut target = Talker::start(&program("calls"));
        let flags = [&["-fn", "Calls.leaf"], flags].concat();
        let tool = recording(target.pid(), &flags, &file);
        // The tool does not read meanwhile.
        kill(Pid::from_raw(tool.tool.pid()), Signal::SIGSTOP).unwrap();
        let answer = target.ask("run 1 30000", "calls");
        kill(Pid::from_raw(tool.tool.pid()), Signal::SIGCONT).unwrap();
        let summary = tool.end().answer();
        assert_eq!(figure(&summary, "lost_hits") == 0, is_whole, "{summary}");
        let found = slices(&read(&file), "Calls.leaf").len();
        assert_eq!(
            found == called(&answer, "leaf"),
            is_whole,
            "{found}, {answer}"
        );
    }
}

// promise: Time lines: A recording that is taken over from is written, and names its successor (1)
#[test]
fn replaced_recording_is_written() {
    let scratch = Scratch::new();
    let files = ["first.json", "second.json"].map(|name| scratch.file(name));
    let mut target = Talker::start(&program("calls"));
    let first = recording(target.pid(), &["-fn", "Calls.leaf"], &files[0]);
    target.ask("run 1 10", "calls");
    let second = recording(target.pid(), &["-force", "-fn", "Calls.leaf"], &files[1]);
    let who = format!(
        "has been taken over by pid {} (ocaml-probes record ",
        second.tool.pid()
    );
    let first = first.until_end();
    assert_eq!(first.code, Some(1), "{}", first.stderr);
    assert!(first.stderr.contains(&who), "{}", first.stderr);
    assert_eq!(figure(&first.stdout, "slices"), 15);
    assert_eq!(slices(&read(&files[0]), "Calls.leaf").len(), 15);
    target.ask("run 1 2", "calls");
    assert_eq!(figure(&second.end().answer(), "slices"), 3);
    assert_eq!(slices(&read(&files[1]), "Calls.leaf").len(), 3);
    assert!(!is_observed(target.pid()));
}

/// `record -prog` of `program`, with what it reads from standard input.
fn record_program(program: &Path, flags: &[&str], file: &Path, words: &str) -> Run {
    let input = file.with_extension("input");
    fs::write(&input, words).unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "input=$1; shift; exec \"$@\" < \"$input\"", "-"]);
    shell.arg(&input).arg(env!("CARGO_BIN_EXE_ocaml-probes"));
    shell.args(["record", "-prog"]).arg(program).args(flags);
    run_command(shell.arg("-o").arg(file))
}

// promise: Time lines: `record -prog` has all calls of a program, from the first to the last, and exits with its status
//    (3 formats of 2 programs)
#[test]
fn program_is_recorded_from_its_first_call() {
    let scratch = Scratch::new();
    let flags = ["-fn", "Calls.leaf,Calls.deep,Calls.raises"];
    for program in program_forms("calls") {
        for format in FORMATS {
            let file = scratch.file(format);
            let run = record_program(&program, &flags, &file, "run 2 20\n");
            assert_eq!(run.code, Some(0), "{}", run.stderr);
            // Standard output is the program's own.
            let lines: Vec<&str> = run.stdout.lines().collect();
            let [ready, answer] = lines[..] else {
                panic!("{lines:?}");
            };
            assert!(ready.starts_with("ready"), "{ready}");
            let timeline = read(&file);
            assert_calls(&timeline, answer);
            let all = timeline["slices"].as_array().unwrap().len() as u64;
            assert_eq!(figure(&run.stderr, "slices"), all, "{}", run.stderr);
            assert_eq!(figure(&run.stderr, "lost_hits"), 0);
            let name = program.file_name().unwrap().to_str().unwrap();
            assert_eq!(timeline["process"], name);
        }
    }
    for program in program_forms("terminating") {
        let file = scratch.file("hits.json");
        let flags = ["-regexp", ".", "-json"];
        let run = record_program(&program, &flags, &file, "");
        let [report] = &run.said()[..] else {
            panic!("{}", run.stderr);
        };
        assert_eq!(report["instants"], 112 + 5 + 2 + 1);
        let timeline = read(&file);
        let instants = timeline["instants"].as_array().unwrap().iter();
        assert_eq!(instants.filter(|it| it["name"] == "collatz").count(), 112);
    }
}

#[test]
fn status_of_a_recorded_program_is_ours() {
    let scratch = Scratch::new();
    let file = scratch.file("status.json");
    let ended = record_program(Path::new("sh"), &["-gc"], &file, "exit 7\n");
    assert_eq!(ended.code, Some(7));
    let none = "sh has written no runtime events";
    assert!(ended.stderr.contains(none), "{}", ended.stderr);
    let failed = record_program(Path::new("true"), &["-gc"], &file, "");
    assert_eq!(failed.code, Some(1), "{failed:?}");
    // A signal that is sent to the tool is passed on.
    let mut tool = command(["record", "-prog"]);
    tool.arg(program("calls")).args(["-fn", "Calls.leaf", "-o"]);
    let mut tool = Talker::spawn(tool.arg(&file).stderr(Stdio::piped()));
    tool.expect("ready");
    tool.ask("run 1 10", "calls");
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    let status = tool.guard().wait();
    assert_eq!(status.code(), Some(128 + Signal::SIGTERM as i32));
    assert_eq!(slices(&read(&file), "Calls.leaf").len(), 15);
    let missing = record_program(Path::new("/none"), &["-gc"], &file, "");
    assert!(missing.stderr.contains("cannot start /none"), "{missing:?}");
    let missing = record_program(Path::new("/none"), &["-fn", "*"], &file, "");
    assert!(missing.stderr.contains("/none"), "{missing:?}");
    assert_eq!(missing.code, Some(1));
}

#[test]
fn program_runs_on_when_its_recording_ends() {
    let scratch = Scratch::new();
    let file = scratch.file("begin.json");
    let mut tool = command(["record", "-fn", "Calls.leaf", "-for", "300ms", "-prog"]);
    tool.arg(program("calls")).arg("-o").arg(&file);
    let mut tool = Talker::spawn(tool.stderr(Stdio::piped()));
    tool.expect("ready");
    let first = tool.ask("run 1 10", "calls");
    let mut errors = BufReader::new(tool.guard().child().stderr.take().unwrap());
    // Messages may come before it.
    let mut said = String::new();
    let answer = loop {
        let mut line = String::new();
        assert!(errors.read_line(&mut line).unwrap() > 0, "{said}");
        if line.starts_with("slices ") {
            break line;
        }
        said += &line;
    };
    // However busy the machine is.
    let found = slices(&read(&file), "Calls.leaf").len() as u64;
    assert_eq!(figure(&answer, "slices"), found);
    assert!(found <= called(&first, "leaf") as u64);
    // The thread that waits for the program hides none of its stops from the one that changes it.
    let child = test_support::container::only_child(tool.pid());
    assert!(!is_observed(child), "{said}");
    assert!(!said.contains("stay mapped"), "{said}");
    tool.ask("run 1 10", "calls");
    tool.close_input();
    assert_eq!(tool.guard().wait().code(), Some(0));
}

// promise: Signals: `record -prog` stops with its program, also while its recording ends (20)
#[test]
fn tool_stops_with_its_program_as_recording_ends() {
    let scratch = Scratch::new();
    for milliseconds in 1..=20 {
        let mut tool = command(["record", "-quiet", "-fn", "Calls.leaf", "-prog"]);
        tool.arg(program("calls"))
            .arg("-o")
            .arg(scratch.file("stopped.json"));
        tool.args(["-for", &format!("{milliseconds}ms")]);
        // In an orphaned process group, which ours may be, SIGTSTP stops nothing.
        let mut tool = Talker::spawn(tool.stderr(Stdio::null()).process_group(0));
        tool.expect("ready");
        let [tool_pid, child] = [tool.pid(), test_support::container::only_child(tool.pid())];
        kill(Pid::from_raw(child), Signal::SIGTSTP).unwrap();
        eventually("both are stopped", || {
            let both = [tool_pid, child].map(test_support::process::state);
            (both == [Some('T'); 2]).then_some(())
        });
        kill(Pid::from_raw(-tool_pid), Signal::SIGCONT).unwrap();
        tool.ask("run 1 10", "calls");
        tool.close_input();
        assert_eq!(tool.guard().wait().code(), Some(0));
    }
}

#[test]
fn program_is_not_started_without_its_file() {
    let wrong = command(["record", "-fn", "Calls.leaf", "-prog"])
        .arg(program("calls"))
        .args(["-o", "/nonexistent/x.json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(said.contains("cannot write /nonexistent/x.json"), "{said}");
    assert_eq!((wrong.status.code(), wrong.stdout.len()), (Some(1), 0));
}

#[test]
fn wrong_command_lines_change_nothing() {
    let scratch = Scratch::new();
    let target = Talker::start(&program("service"));
    let pid = target.pid();
    for (flags, why) in [
        (
            "-probe tick",
            "needs -o FILE, whose name ends with .perfetto-trace, .pftrace, .json or .fxt",
        ),
        (
            "-probe tick -o x.txt",
            "-o x.txt: the name of the file has to end with",
        ),
        (
            "-o x.json",
            "needs -probe NAMES, -regexp RE, -pair START,STOP, -fn GLOBS, -usdt GLOBS, -until NAME, -gc or -off-cpu",
        ),
        (
            "-probe tick -over 5ms -o x.json",
            "-over needs -pair or -fn",
        ),
        ("-probe tick -results -o x.json", "-results needs -fn"),
    ] {
        let run = run(&format!("record -pid {pid} {flags}"));
        assert_eq!(run.code, Some(2), "{flags}");
        assert!(run.stderr.contains(why), "{}", run.stderr);
    }
    let file = scratch.file("old.json");
    fs::write(&file, "old").unwrap();
    let mut wrong = command([
        "record",
        "-pid",
        &pid.to_string(),
        "-probe",
        "nothing",
        "-o",
    ]);
    let wrong = wrong.arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(said.contains("no probe \"nothing\""), "{said}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    let gone = run("record -pid 2147483647 -probe tick -o x.json").failure();
    assert!(gone.contains("2147483647"), "{gone}");
    let nowhere = run(&format!(
        "record -pid {pid} -probe tick -o /nonexistent/x.json"
    ))
    .failure();
    assert!(
        nowhere.contains("cannot write /nonexistent/x.json"),
        "{nowhere}"
    );
    assert!(!is_observed(pid));
}

// promise: Time lines: Progress of a recording is shown only on a terminal, and not with -quiet
#[test]
fn progress_of_recordings_is_shown_on_terminals_alone() {
    let scratch = Scratch::new();
    let file = scratch.file("progress.json");
    let target = Talker::start(&program("service"));
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let pid = target.pid();
    let line = |flags: &str| format!("record -pid {pid} {flags} -o '{}'", file.display());
    let terminal = Terminal::open(200, 24);
    for (flags, end) in [
        ("-probe tick", "B; Ctrl-C ends it"),
        ("-probe tick -last 5s", " of the last 5 s; Ctrl-C ends it"),
        ("-probe tick -for 60s", "B"),
        ("-off-cpu", "B; Ctrl-C ends it"),
    ] {
        terminal.type_line(&format!("clear; {tool} {} >/dev/null", line(flags)));
        let begin = "recording ";
        let is_line = |line: &str| {
            line.starts_with(begin)
                && line.contains(" slices, ")
                && line.contains(" instants, ")
                && line.ends_with(end)
        };
        terminal.wait_until("it shows how far it is", |screen| {
            screen.lines().any(is_line)
        });
        terminal.press(&["C-c"]);
        terminal.wait_until("it is gone", |screen| {
            !screen.lines().any(|line| line.starts_with(begin))
        });
    }
    // A line that is wider than the terminal would stay there, and each update would add another.
    terminal.resize(40, 24);
    let flags = line("-probe tick -last 5s");
    terminal.type_line(&format!("clear; {tool} {flags} >/dev/null"));
    let seen = RefCell::new(BTreeSet::new());
    terminal.wait_until("several lines were written", |screen| {
        let lines: Vec<&str> = screen
            .lines()
            .filter(|line| line.starts_with("recording "))
            .collect();
        assert!(lines.len() <= 1, "{screen}");
        let mut seen = seen.borrow_mut();
        seen.extend(lines.iter().map(|line| line.to_string()));
        seen.len() > 3
    });
    terminal.press(&["C-c"]);
    terminal.wait_until("it is gone", |screen| !screen.contains("recording "));
    terminal.resize(200, 24);
    let of_all = line("-probe tick -for 60s");
    terminal.type_line(&format!("clear; {tool} {of_all} >/dev/null"));
    terminal.wait_until("it shows all", |screen| screen.contains(" of 60 s, "));
    terminal.press(&["C-c"]);
    terminal.wait_until("it is gone", |screen| !screen.contains("recording "));
    terminal.type_line(&format!(
        "clear; {tool} {} -quiet >/dev/null; echo its end",
        line("-probe tick -for 700ms")
    ));
    terminal.wait_until("it has ended", |screen| {
        assert!(!screen.contains("recording "), "{screen}");
        screen.lines().any(|line| line == "its end")
    });
    let flags = ["-probe", "tick", "-for", "700ms"];
    let said = run_command(&mut record_command(pid, &flags, &file));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(!said.stderr.contains("recording "), "{}", said.stderr);
}

// promise: Time lines: The reader of a pipe that does not read keeps neither a signal nor the exit of a started program from ending the
//    recording: after 10 seconds, that is an error, and the process is restored
#[test]
fn unread_pipe_ends_the_recording() {
    let scratch = Scratch::new();
    let pipe = scratch.file("out.json");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    // Opened for both, so that it waits for no writer.
    let options = fs::File::options().read(true).write(true).clone();
    let _reader = options.open(&pipe).unwrap();
    let why = format!(
        "cannot write more to {}: its reader has read nothing for 10 s",
        pipe.display()
    );
    let mut target = Talker::start(&program("calls"));
    let mut tool = recording(target.pid(), &["-fn", "Calls.*"], &pipe);
    target.ask("run 1 3000", "calls");
    // It comes while the tool reads, or while it waits for room.
    kill(Pid::from_raw(tool.tool.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(tool.tool.guard().wait().code(), Some(1));
    let cut = tool.until_end();
    assert!(cut.stderr.contains(&why), "{}", cut.stderr);
    assert!(!is_observed(target.pid()));
    let mut command = command(["record", "-probe", "tick,req_start,req_end", "-o"]);
    command.arg(&pipe).arg("-prog").arg(program("service"));
    let cut = run_command(command.args(["--", "1", "2000"]));
    assert!(cut.stderr.contains(&why), "{}", cut.stderr);
    assert_eq!(cut.code, Some(1));
}

#[test]
fn signals_end_the_wait_for_a_reader() {
    let scratch = Scratch::new();
    let pipe = scratch.file("out.json");
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let program = program("requests");
    for flags in ["-fn Requests.stop", "-fn Requests.stop -gc", "-off-cpu"] {
        for signal in [Signal::SIGINT, Signal::SIGTERM] {
            let mut command = command(["record", "-prog"]);
            command.arg(&program).args(flags.split(' '));
            command.arg("-o").arg(&pipe);
            let mut waiting = started(command, "no process reads; waiting for a reader");
            kill(Pid::from_raw(waiting.tool.pid()), signal).unwrap();
            let status = waiting.tool.guard().wait();
            assert_eq!(status.signal(), Some(signal as i32), "{flags}");
        }
    }
}
