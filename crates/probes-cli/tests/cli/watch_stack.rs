//! `watch -stack`: the stack of each hit.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::tmux::Terminal;
use test_support::{
    Guard, Scratch, Talker, eventually, fixture_forms, gdb, program, program_forms,
};

use crate::count_functions::start_observing;
use crate::hit_stacks::{StackWatch, has_callers, last_stacks};
use crate::stacks::{addresses, functions, read_when};
use crate::support::{command, full_pipe, is_observed, object, run, run_command};

// promise: Stacks: The stack of a call of read(2), copied at its entry, is the one that gdb finds while it waits: below OCaml, C, frames
//    with alloca(3), callbacks, exceptions and signal handlers, in all threads; on a stack of its own (sigaltstack(2)), it is cut, and
//    said to be (4 programs of 7 to 8 threads)
#[test]
fn stacks_of_calls_are_those_of_gdb() {
    let ocaml = program_forms("stacks").map(|file| (file, "wait", "waits", 8));
    let c = fixture_forms("blocked").map(|file| (file, "block", "blocked", 6));
    for (file, ask, answer, many) in ocaml.into_iter().chain(c) {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = StackWatch::begin(pid, "-stack -fn read");
        target.ask(ask, answer);
        let threads = read_when(pid, "", |threads| {
            let waiting = threads
                .iter()
                .filter(|it| it["system_call"]["name"] == "read");
            waiting.count() >= many
        });
        let hits = last_stacks(tool.end());
        assert!(!is_observed(pid));
        let expected = gdb::stacks(pid);
        let mut compared = 0;
        for thread in &threads {
            let functions = functions(thread);
            let tid = thread["tid"].as_i64().unwrap() as i32;
            let Some(stack) = hits.get(&tid) else {
                continue;
            };
            if thread["system_call"]["name"] != "read" {
                continue;
            }
            let is_elsewhere = functions.contains(&"on_other_stack".to_owned());
            let state = if is_elsewhere { "cut" } else { "complete" };
            assert_eq!(stack["state"], state, "{thread} {stack}");
            assert_eq!(stack["cut"].is_null(), !is_elsewhere);
            let found = addresses(stack);
            assert!(
                has_callers(&expected[&tid], &found, !is_elsewhere),
                "{thread} {stack}"
            );
            assert!(is_elsewhere || found.len() > 3);
            compared += 1;
        }
        assert!(compared >= many - 1, "{compared}");
    }
}

#[test]
fn stacks_of_probes_begin_at_their_sites() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let flags = format!("watch -pid {pid} -probe req_end -limit 2 -fields name,args");
        let plain = run(&format!("{flags} -stack")).answer();
        let lines: Vec<&str> = plain.lines().collect();
        let names: Vec<&str> = lines[1..]
            .iter()
            .map_while(|line| line.strip_prefix("frame "))
            .map(|line| line.split(' ').nth(1).unwrap())
            .collect();
        assert_eq!(
            names[..5],
            [
                "Service.serve",
                "Service.serve",
                "Service.tick",
                "Service.entry",
                "caml_program"
            ],
            "{plain}"
        );
        assert_eq!(*names.last().unwrap(), "_start", "{plain}");
        assert!(lines[0].starts_with("req_end request="), "{plain}");
        assert!(lines[names.len() + 1].starts_with("req_end request="));
        let short = run(&format!("{flags} -stack 2")).answer();
        let more = format!("more {}", names.len() - 2);
        assert_eq!(short.lines().nth(3), Some(&*more), "{short}");
        let table = run(&format!("{flags} -stack 2 -format table")).answer();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[3].starts_with("    Service.serve  "), "{table}");
        assert_eq!(lines[5], format!("    ({} more)", names.len() - 2));
        let json = run(&format!("{flags} -stack 2 -json").replace(" -fields name,args", ""));
        for line in json.answer().lines() {
            let hit = object(line);
            assert_eq!(hit["stack"]["left_out"], names.len() - 2);
            assert_eq!(hit["stack"]["frames"].as_array().unwrap().len(), 2);
        }
    }
}

#[test]
fn deep_stacks_are_cut_and_say_so() {
    for file in program_forms("overflow") {
        let mut target = Talker::start(&file);
        let tool = StackWatch::begin(target.pid(), "-stack 20 -probe enter -sample 1/20000");
        target.ask("overflow 1", "overflow");
        let hits = tool.end();
        let mut depths: Vec<usize> = Vec::new();
        for hit in &hits {
            let stack = &hit["stack"];
            let frames = addresses(stack).len();
            if stack["state"] == "cut" {
                assert_eq!(stack["cut"], "no more of the stack was copied");
                depths.push(frames + stack["left_out"].as_u64().unwrap() as usize);
            } else {
                assert_eq!(stack["state"], "complete", "{stack}");
            }
        }
        assert!(!depths.is_empty() && depths.iter().all(|frames| *frames > 1000));
    }
}

// promise: Stacks: With -buffer, each hit of a burst that does not fit into the usual rings has its stack (1)
#[test]
fn large_buffer_keeps_stacks_of_bursts() {
    let mut target = Talker::start(&fixture_forms("lasting")[0]);
    for (flags, is_whole) in [("", false), (" -buffer 64", true)] {
        let flags = format!("-by stack -json -fn leaf{flags}");
        let tool = start_observing("count", &flags, target.pid());
        // The tool does not read meanwhile.
        let pid = Pid::from_raw(tool.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        target.ask("call 1 50", "called");
        kill(pid, Signal::SIGCONT).unwrap();
        let json = object(&tool.end().answer());
        assert_eq!(json["hits"], 5 * 50 + 25);
        assert_eq!(json["other"] == 0, is_whole, "{json}");
    }
}

// promise: Stacks: On a narrow terminal, a table of stacks shows their inner functions (3 widths)
#[test]
fn narrow_terminals_show_inner_functions() {
    let mut target = Talker::start(&fixture_forms("lasting")[0]);
    let pid = target.pid();
    for width in [64, 56, 44] {
        let terminal = Terminal::open(width, 20);
        let tool = env!("CARGO_BIN_EXE_ocaml-probes");
        terminal.type_line(&format!(
            "clear; {tool} count -pid {pid} -fn leaf -by stack"
        ));
        terminal.wait_for("stopped ");
        target.ask("call 1 2", "called");
        terminal.press(&["C-c"]);
        let screen = terminal.wait_for("... stands for outer functions; -format plain shows all");
        let mut lines = screen.lines().map(str::trim_end);
        let longest = lines.find(|line| line.starts_with(" 2 "));
        let longest = longest.unwrap_or_else(|| panic!("{screen}"));
        assert!(
            longest.contains("| ...;") && longest.ends_with(";deep;leaf"),
            "{screen}"
        );
        assert!(longest.len() <= width.into(), "{screen}");
        target.ask("call 1 1", "called");
    }
}

// promise: Stacks: `count -by stack`: hits of all stacks and `other` add up to all hits, also if they come faster than they can be read, and
//    each stack has as many as the program says (2 programs, 4 threads)
#[test]
fn hits_by_stack_add_up() {
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let tool = start_observing("count", "-by stack -json -fn Calls.deep", pid);
        // `deep (i land 7)` calls itself: each inner call has one frame more.
        target.ask("run 4 160", "calls");
        let counted = tool.end().json();
        let hits = |it: &Value| it["hits"].as_u64().unwrap();
        let stacks = counted["stacks"].as_array().unwrap();
        let sum: u64 = stacks.iter().map(hits).sum();
        let other = counted["other"].as_u64().unwrap();
        assert_eq!(sum + other, hits(&counted));
        assert_eq!(hits(&counted), 4 * 160 * 9 / 2);
        for stack in stacks {
            assert_eq!(stack["stack"], "complete", "{stack}");
            let frames = stack["frames"].as_array().unwrap().iter();
            let depth = frames.filter(|it| *it == "Calls.deep").count() as u64;
            // 80 of 640 calls begin with each number from 0 to 7.
            let all = 80 * (9 - depth);
            assert!(hits(stack) <= all && hits(stack) + other >= all, "{stack}");
        }
        assert_eq!(stacks.len(), 8);
    }
}

#[test]
fn picture_by_stack_stays_if_nothing_is_read() {
    let scratch = Scratch::new();
    let picture = scratch.file("a.svg");
    fs::write(&picture, "the old picture").unwrap();
    let mut target = Talker::start(&program("service"));
    let pid = target.pid();
    let (reader, stderr) = full_pipe();
    let line = format!("count -pid {pid} -fn Service.sleep -by stack -svg");
    let mut tool = command(line.split(' '));
    tool.arg(&picture).stdout(Stdio::null()).stderr(stderr);
    let mut tool = Guard::spawn(&mut tool);
    // It waits for a second to say that it observes, and reads only then.
    eventually("it observes", || is_observed(pid).then_some(()));
    target.guard().child().kill().unwrap();
    target.guard().wait();
    drop(reader);
    tool.wait();
    assert_eq!(fs::read_to_string(&picture).unwrap(), "the old picture");
}

#[test]
fn hits_by_stack_are_drawn() {
    let scratch = Scratch::new();
    let target = Talker::start(&program("service"));
    let pid = target.pid();
    let of = |rest: &str, svg: Option<&Path>| {
        let line = format!("count -pid {pid} -for 500ms -fn Service.sleep {rest}");
        let mut command = command(line.split(' '));
        if let Some(svg) = svg {
            command.arg("-svg").arg(svg);
        }
        run_command(&mut command)
    };
    let folded = scratch.file("a.folded");
    let plain = of("-by stack", Some(&folded)).answer();
    let lines: Vec<&str> = plain.lines().collect();
    assert_eq!(lines.len(), 3, "{plain}");
    let [hits, _, stack] = lines[0].split(' ').collect::<Vec<_>>()[..] else {
        panic!("{plain}");
    };
    assert!(stack.starts_with("_start;") && stack.ends_with(";Service.entry;Service.sleep"));
    assert_eq!(lines[1..], ["0 0.0 other", "0 0.0 untyped"]);
    assert_eq!(
        fs::read_to_string(&folded).unwrap(),
        format!("{stack} {hits}\n")
    );
    let svg = scratch.file("a.svg");
    let table = of("-by stack -format table", Some(&svg)).answer();
    assert!(table.contains("| stack"), "{table}");
    let svg = fs::read_to_string(&svg).unwrap();
    assert!(svg.contains("<svg") && svg.contains("Service.sleep"));
    let refused = [
        ("-svg a.svg", "-svg needs -by stack"),
        (
            "-by stack -interval 1s",
            "-interval cannot be combined with -by stack",
        ),
        ("-by stack -sites", "-sites cannot be combined with -by"),
        ("-by stack,arg0", "stack cannot be combined with other keys"),
        (
            "-by arg0,pid",
            "pid has to be the first key, as in -by pid,arg0",
        ),
        ("-by pid,", "the expression is empty"),
    ];
    for (flags, why) in refused {
        let run = of(flags, None);
        assert_eq!(run.code, Some(2), "{flags}");
        assert!(run.stderr.contains(why), "{}", run.stderr);
    }
}

// promise: Stacks: The stack of a slow pair or call is that of its end, with its callers (2 programs, 2 forms of each)
#[test]
fn slow_pairs_have_their_stacks() {
    for file in program_forms("service") {
        let target = Talker::start(&file);
        let pid = target.pid();
        let slow = |flags: &str| {
            let line = format!("latency -json -pid {pid} -over 0 -stack -for 500ms {flags}");
            let text = run(&line).answer();
            let objects: Vec<Value> = text.lines().map(object).collect();
            let slow = objects.into_iter();
            let slow: Vec<Value> = slow
                .filter(|it| it["type"].as_str().unwrap().starts_with("slow_"))
                .collect();
            assert!(!slow.is_empty(), "{text}");
            slow
        };
        for (flags, innermost) in [
            (
                "-pair req_start,req_end",
                ["Service.serve", "Service.serve"],
            ),
            ("-fn Service.render", ["Service.render", "Service.serve"]),
        ] {
            for pair in slow(flags) {
                let stack = &pair["stack"];
                assert_eq!(stack["state"], "complete", "{stack}");
                let functions = functions(stack);
                assert_eq!(functions[..2], innermost);
                assert_eq!(functions[2], "Service.tick");
            }
        }
        let run = run(&format!(
            "latency -pid {pid} -pair req_start,req_end -stack"
        ));
        assert_eq!(run.code, Some(2));
        assert!(run.stderr.contains("-stack needs -over"), "{}", run.stderr);
    }
}

#[test]
fn limits_are_numbers_of_frames() {
    for limit in ["0", "-1", "all"] {
        let run = run(&format!("watch -pid 1 -probe a -stack={limit}"));
        assert_eq!(run.code, Some(2));
        let why = "is not a number of frames above 0";
        assert!(run.stderr.contains(why), "{}", run.stderr);
    }
}
