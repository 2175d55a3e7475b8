//! `record` with runtime events that it switches on: in programs that it starts, and in running ones.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use test_support::{Scratch, Talker, eventually, output, program_forms};

use crate::chroot::{ChrootProgram, Isolation, inside, tool_inside};
use crate::gc::{collect_until_exit, signal, writes_events};
use crate::support::{command, run};

/// Runs `record -prog` with a program inside the chroot that reads `words` from standard input; returns what is printed
/// on standard error, and the events in the file.
fn record_inside(program: &Path, flags: &str, words: &str) -> (String, Vec<Value>) {
    let scratch = Scratch::new();
    let file = scratch.file("events.json");
    let program = inside(program);
    let flags = format!(
        "record {flags} -o /tmp/files/events.json -prog {}",
        program.display()
    );
    let flags: Vec<&str> = flags.split(' ').collect();
    let run = output(&mut tool_inside(file.parent().unwrap(), &flags, words));
    let said = String::from_utf8(run.stderr).unwrap();
    assert!(run.status.success(), "{said}");
    let text = std::fs::read_to_string(&file).unwrap();
    (said, serde_json::from_str(&text).unwrap())
}

/// How many events have this name and kind, the `ph` of Chrome's trace event format.
fn count(events: &[Value], kind: &str, name: &str) -> usize {
    let found = |event: &&Value| event["ph"] == kind && event["name"] == name;
    events.iter().filter(found).count()
}

/// How many calls of `Events.round` there are. A call is an instant if its end cannot be recorded, because of what is
/// mapped near the function.
fn calls(events: &[Value]) -> usize {
    count(events, "B", "Events.round") + count(events, "i", "Events.round")
}

// promise: Time lines: `record -prog -gc` has the runtime events of a program from the first, also of one that exits at once
//    (2 programs × 2 inputs in each chroot)
#[test]
fn events_are_recorded_from_the_first() {
    for file in program_forms("ocaml5/events") {
        for words in ["", "work 2 5\n"] {
            let (said, events) = record_inside(&file, "-gc", words);
            assert_eq!(count(&events, "i", "ring_start"), 1, "{words}: {said}");
            let minors = count(&events, "B", "minor");
            assert_eq!(minors > 0, !words.is_empty(), "{said}");
            assert!(said.contains(" lost_words 0 "), "{said}");
        }
    }
}

// promise: Time lines: `record -prog -gc -fn` has the calls and the runtime events of a program, both from the first
//    (2 programs × 2 inputs in each chroot)
#[test]
fn calls_and_events_are_recorded_from_the_first() {
    for file in program_forms("ocaml5/events") {
        for (words, rounds) in [("", 0), ("work 2 5\n", 20)] {
            let (said, events) = record_inside(&file, "-gc -fn Events.round", words);
            assert_eq!(calls(&events), rounds, "{said}");
            assert_eq!(count(&events, "i", "ring_start"), 1, "{words}: {said}");
            let minors = count(&events, "B", "minor");
            assert_eq!(minors > 0, rounds > 0, "{said}");
        }
    }
}

// promise: Time lines: `record -gc` switches runtime events on, alone and beside functions, and off again, however it ends
//    (4 programs × 2 sets of flags × 2 ends in each chroot)
#[test]
fn recorded_events_are_switched_on_and_off() {
    let scratch = Scratch::new();
    for isolation in Isolation::ALL {
        for program in program_forms("ocaml5/events") {
            let mut program = ChrootProgram::start(isolation, &program, &[]);
            let pid = program.pid;
            for flags in ["-gc", "-gc -fn Events.round,caml_handle_*"] {
                for end in ["INT", "KILL"] {
                    let file = scratch.file(&format!("{pid} {flags} {end}.json"));
                    let line = format!("record -pid {pid} {flags} -o");
                    let mut tool = command(line.split(' '));
                    let mut tool = Talker::spawn(tool.arg(&file).stderr(Stdio::piped()));
                    eventually("phases are in the file", || {
                        program.talker.ask("work 2 5", "worked");
                        let text = std::fs::read_to_string(&file).unwrap_or_default();
                        text.contains("\"minor\"").then_some(())
                    });
                    signal(tool.pid(), end);
                    if end == "KILL" {
                        tool.guard().wait();
                        assert_eq!(writes_events(&mut program), (true, false));
                        run(&format!("observe -clean -pid {pid}")).answer();
                    } else {
                        let output = collect_until_exit(&mut program, tool);
                        assert!(output.is_success, "{}", output.err);
                        assert!(output.err.contains("stopped "), "{}", output.err);
                        let text = std::fs::read_to_string(&file).unwrap();
                        let events: Vec<Value> = serde_json::from_str(&text).unwrap();
                        let has_calls = calls(&events) > 0;
                        assert_eq!(has_calls, flags.contains("-fn"), "{}", output.out);
                    }
                    assert_eq!(writes_events(&mut program), (false, false), "{end}");
                }
            }
            program.end();
        }
    }
}

#[test]
fn idle_program_is_recorded_without_events() {
    let scratch = Scratch::new();
    let [program, _] = program_forms("ocaml5/events");
    let mut program = ChrootProgram::start(Isolation::Chroot, &program, &[]);
    let file = scratch.file("idle.json");
    let line = format!(
        "record -pid {} -gc -fn Events.round -for 400ms -o",
        program.pid
    );
    let run = crate::support::run_command(command(line.split(' ')).arg(&file));
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for said in [
        "waiting for the process to allocate",
        "the file has no runtime events",
    ] {
        assert!(run.stderr.contains(said), "{}", run.stderr);
    }
    program.talker.ask("work 2 5", "worked");
    assert_eq!(writes_events(&mut program), (false, false));
    program.end();
}
