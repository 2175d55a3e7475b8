//! `gc`, compared with what the program's own consumer of runtime events reads.

use std::collections::BTreeMap;

use test_support::{Talker, program_forms};

use crate::chroot::{ChrootProgram, Isolation};
use crate::events::own_lines;
use crate::support::{command, run};

/// What events of the program's own consumer add up to: the ends of each phase, and over all domains the count and sum of the
/// outermost ones, and what was allocated and promoted.
#[derive(Debug, Default, PartialEq)]
struct Sums {
    phases: BTreeMap<String, u64>,
    pauses: (u64, u64),
    bytes: (u64, u64),
}

fn sums(lines: &[String]) -> Sums {
    let mut sums = Sums::default();
    let mut open: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let ["event", domain, time, what, rest @ ..] = words.as_slice() else {
            panic!("{line}");
        };
        let time: u64 = time.parse().unwrap();
        let open = open.entry(domain).or_default();
        match (*what, rest) {
            (_, ["domain_condition_wait"]) => {}
            ("begin", _) => open.push(time),
            ("end", [phase]) => {
                // Events were switched on inside of some phases.
                let Some(began) = open.pop() else { continue };
                *sums.phases.entry((*phase).to_owned()).or_default() += 1;
                if open.is_empty() {
                    sums.pauses.0 += 1;
                    sums.pauses.1 += time - began;
                }
            }
            ("counter", ["minor_allocated", bytes]) => {
                sums.bytes.0 += bytes.parse::<u64>().unwrap();
            }
            ("counter", ["minor_promoted", bytes]) => {
                sums.bytes.1 += bytes.parse::<u64>().unwrap();
            }
            _ => {}
        }
    }
    sums
}

// promise: Runtime events: Pauses, their sum, phases and allocated bytes of `gc` are exactly those of the program's own events
//    (4 programs in each chroot)
#[test]
fn figures_equal_sums_of_the_own_consumer() {
    for isolation in Isolation::ALL {
        for file in program_forms("ocaml5/events") {
            let mut program = ChrootProgram::start(isolation, &file, &[]);
            let pid = program.pid;
            program.talker.ask("start", "started");
            let line = format!("gc -json -pid {pid} -interval 20ms -over 1ns");
            let mut tool = Talker::spawn(&mut command(line.split(' ')));
            let begun = tool.line().expect("it has begun");
            assert!(begun.starts_with("{\"type\":\"gc\""), "{begun}");
            program.talker.ask("work 3 10", "worked");
            let expected = sums(&own_lines(&mut program));
            program.end();
            let (mut last, mut long) = (begun, (0, 0));
            while let Some(line) = tool.line() {
                let object = crate::support::object(&line);
                if object["type"] == "gc_pause" {
                    long.0 += 1;
                    long.1 += object["ns"].as_u64().unwrap();
                    let first = &object["phases"][0];
                    assert_eq!((&first["depth"], &first["ns"]), (&0.into(), &object["ns"]));
                } else {
                    last = line;
                }
            }
            assert!(tool.guard().wait().success());
            let report = crate::support::object(&last);
            assert_eq!(report["at"], serde_json::Value::Null);
            let number = |name: &str| report[name].as_u64().unwrap();
            let phases = report["phases"].as_array().unwrap().iter();
            let phases = phases.map(|it| {
                let phase = it["phase"].as_str().unwrap().to_owned();
                (phase, it["count"].as_u64().unwrap())
            });
            let pauses = &report["pauses"];
            let pauses = ["count", "total_ns"].map(|name| pauses[name].as_u64().unwrap());
            let found = Sums {
                phases: phases.collect(),
                pauses: pauses.into(),
                bytes: (number("allocated_bytes"), number("promoted_bytes")),
            };
            assert_eq!(found, expected, "{isolation:?} {}", file.display());
            assert_eq!(number("lost_words"), 0);
            assert!(expected.bytes.0 > expected.bytes.1 && expected.bytes.1 > 0);
            // Those of a nanosecond or none are not longer than one.
            assert!(long.0 <= pauses[0] && long.1 <= pauses[1] && long.1 + pauses[0] >= pauses[1]);
        }
    }
}

#[test]
fn error_says_how_to_switch_events_on() {
    let [file, _] = program_forms("ocaml5/events");
    let program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
    let pid = program.pid;
    let error = run(&format!("gc -pid {pid}")).failure();
    let lines = format!(
        "ocaml-probes: process {pid} writes no runtime events: they are not switched on\n\
         hint: start it with OCAML_RUNTIME_EVENTS_START=1 in its environment; \
         `ocaml-probes latency -pid {pid} -gc minor,slice,major` times the collector without them\n"
    );
    assert_eq!(error, lines);
    program.end();
}

// promise: Runtime events: Words that were lost are in every form of the output of `gc` (rings of 1,024 words)
#[test]
fn lost_words_are_in_every_output() {
    let [file, _] = program_forms("ocaml5/events");
    for (format, expected) in [
        ("plain", " lost "),
        ("table", "lost words"),
        ("json", "\"lost_words\":"),
    ] {
        let mut program = ChrootProgram::start_with(Isolation::Chroot, &file, &[], "e=10");
        let pid = program.pid;
        program.talker.ask("start", "started");
        let line = format!("gc -format {format} -pid {pid} -interval 20ms");
        let mut tool = Talker::spawn(command(line.split(' ')).stderr(std::process::Stdio::piped()));
        tool.line().expect("it has begun");
        // The tool does not run while more is written than a ring holds.
        signal(tool.pid(), "STOP");
        program.talker.ask("work 2 30", "worked");
        signal(tool.pid(), "CONT");
        program.end();
        let mut output = String::new();
        while let Some(line) = tool.line() {
            output += &(line + "\n");
        }
        assert!(output.contains(expected), "{output}");
        assert!(!output.trim_end().ends_with("lost 0"), "{output}");
        let mut warning = String::new();
        let errors = tool.guard().child().stderr.take().unwrap();
        std::io::Read::read_to_string(&mut { errors }, &mut warning).unwrap();
        assert!(
            warning.contains("overwritten before they were read"),
            "{warning}"
        );
        assert!(tool.guard().wait().success());
    }
}

fn signal(pid: i32, name: &str) {
    let sent = std::process::Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status();
    assert!(sent.unwrap().success());
}
