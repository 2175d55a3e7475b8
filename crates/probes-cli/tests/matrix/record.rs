//! `record` with the collector of OCaml 5, and with fibers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::{Scratch, Talker, eventually, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::events::own_lines;
use crate::support::{command, is_observed, object};

/// The events of a file in Chrome's format.
fn events(file: &Path) -> Vec<Value> {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

// promise: Time lines: The phases and counters of OCaml 5's collector are those that the program reads itself (4 programs in each
//    chroot)
#[test]
fn phases_are_those_of_the_own_consumer() {
    for isolation in Isolation::ALL {
        for program in program_forms("ocaml5/events") {
            let scratch = Scratch::new();
            let mut program = ChrootProgram::start(isolation, &program, &[]);
            program.talker.ask("start", "started");
            let file = scratch.file("gc.json");
            let pid = program.pid.to_string();
            let mut tool = command(["record", "-json", "-gc", "-pid", &pid, "-o"]);
            let mut tool = Talker::spawn(tool.arg(&file));
            eventually("it records", || {
                (fs::metadata(&file).ok()?.len() > 0).then_some(())
            });
            program.talker.ask("work 3 10", "worked");
            let mut expected: BTreeMap<String, usize> = BTreeMap::new();
            for line in own_lines(&mut program) {
                let words: Vec<&str> = line.split(' ').collect();
                if let [_, _, _, "begin" | "counter", name, ..] = words[..] {
                    *expected.entry(name.to_owned()).or_default() += 1;
                }
            }
            program.end();
            let report = object(&tool.line().expect("its summary"));
            assert!(tool.guard().wait().success());
            assert_eq!(report["lost_words"], 0);
            let mut found: BTreeMap<String, usize> = BTreeMap::new();
            for event in events(&file) {
                let name = match event["ph"].as_str() {
                    Some("B") => event["name"].as_str(),
                    Some("C") => event["name"].as_str().and_then(|it| it.rsplit(' ').next()),
                    _ => None,
                };
                if let Some(name) = name {
                    *found.entry(name.to_owned()).or_default() += 1;
                }
            }
            for (name, count) in &found {
                assert!(
                    expected.get(name) >= Some(count),
                    "{name} {count}: {expected:?}"
                );
            }
            for name in ["minor", "minor_allocated", "major_slice"] {
                assert_eq!(found.get(name), expected.get(name), "{name}: {report}");
            }
        }
    }
}

// promise: Time lines: Calls of fibers that are suspended within each other have a track each, and end (4 programs in each chroot)
#[test]
fn calls_of_suspended_fibers_do_not_mix() {
    for isolation in Isolation::ALL {
        for program in program_forms("ocaml5/fibers") {
            let scratch = Scratch::new();
            let file = scratch.file("fibers.json");
            // Whether their exits can be patched depends on what else is mapped near them, and the warning says so: the
            // next process has another layout.
            let recorded = (0..20).find_map(|_| record_fibers(isolation, &program, &file));
            let (calls, most) = recorded.expect("a layout in which calls have ends");
            // Eight at a time are suspended within `overlapping`.
            assert_eq!((calls, most), (40, 9));
        }
    }
}

/// Records calls of fibers into a file; returns how many there are, and how many are open at once. `None` if their
/// ends could not be recorded.
fn record_fibers(isolation: Isolation, program: &Path, file: &Path) -> Option<(usize, usize)> {
    let mut program = ChrootProgram::start(isolation, program, &[]);
    let pid = program.pid.to_string();
    let functions = "Fibers.event,Fibers.overlapping";
    let mut tool = command(["record", "-json", "-fn", functions, "-pid", &pid, "-o"]);
    let mut tool = Talker::spawn(tool.arg(file));
    eventually("it records", || is_observed(program.pid).then_some(()));
    program.talker.ask("overlapping 5", "overlapping");
    kill(Pid::from_raw(tool.pid()), Signal::SIGINT).unwrap();
    let report = object(&tool.line().expect("its summary"));
    assert!(tool.guard().wait().success());
    assert_eq!(report["lost_hits"], 0, "{report}");
    assert_eq!(report["unwound"], 0, "{report}");
    let mut open: BTreeMap<u64, usize> = BTreeMap::new();
    let mut most = 0;
    let (mut calls, mut has_outer) = (0, false);
    for event in events(file) {
        let track = open.entry(event["tid"].as_u64().unwrap()).or_default();
        match event["ph"].as_str() {
            Some("B") => {
                *track += 1;
                calls += usize::from(event["name"] == "Fibers.event");
                has_outer |= event["name"] == "Fibers.overlapping";
            }
            Some("E") => *track -= 1,
            _ => continue,
        }
        assert!(*track <= 1, "{event}");
        most = most.max(open.values().sum());
    }
    // Calls without ends are instants.
    (calls > 0 && has_outer).then_some((calls, most))
}
