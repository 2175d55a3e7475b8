//! The programs that every compiler builds: a process has the probes of its file, and the handlers
//! of the probes run while these are enabled.

use serde_json::Value;
use test_support::{fixture, fixture_forms, program_forms};

use crate::chroot::{ChrootProgram, Isolation, inside};
use crate::support::{run, run_on};

/// The names in an answer, each with its state if it has one.
fn names(json: &Value) -> Vec<(String, Option<String>)> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let probes = json["probes"].as_array().unwrap().iter();
    probes
        .map(|probe| (text(&probe["name"]).unwrap(), text(&probe["state"])))
        .collect()
}

// promise: Containers: The probes of a program in a chroot with another C library are listed,
//    enabled and disabled (4 × 4 updates in each chroot)
#[test]
fn programs_in_a_chroot_are_listed_and_switched() {
    for isolation in Isolation::ALL {
        for file in program_forms("handlers") {
            let mut program = ChrootProgram::start(isolation, &file, &[]);
            let pid = program.pid;
            let listed = names(&run_on("list -json", &file).json());
            assert_eq!(listed.len(), 11);
            let states = |state: &str| {
                let info = run(&format!("info -json -pid {pid}")).json();
                assert_eq!(info["pid"], pid, "the pid in the namespace of the caller");
                let expected = listed
                    .iter()
                    .map(|(name, _)| (name.clone(), Some(state.into())));
                assert_eq!(names(&info), expected.collect::<Vec<_>>());
            };
            states("disabled");
            for how in ["", " -live"] {
                let attached = run(&format!("attach -json -pid {pid} -enable-all{how}")).json();
                assert_eq!(attached["pid"], pid);
                states("enabled");
                let hits: u64 = program.round().iter().map(|(_, hits)| hits).sum();
                assert_eq!(hits, 516 + 23, "{isolation:?} {}", file.display());
                run(&format!("attach -pid {pid} -disable-all{how}")).answer();
                states("disabled");
                let hits: u64 = program.round().iter().map(|(_, hits)| hits).sum();
                assert_eq!(hits, 516);
            }
            program.end();
        }
    }
}

#[test]
fn program_in_a_chroot_has_its_outer_pid() {
    for file in program_forms("init") {
        let program = ChrootProgram::start(Isolation::Namespaces, &file, &[]);
        assert_eq!(program.ready, "ready pid=1");
        assert_ne!(program.pid, 1);
        let ps = run("ps -json").json();
        let processes = ps["processes"].as_array().unwrap();
        let it = processes.iter().find(|one| one["pid"] == program.pid);
        assert_eq!(it.unwrap()["probes"], 4, "{ps}");
        program.end();
    }
}

#[test]
fn sites_in_a_chroot_have_source_lines() {
    for isolation in Isolation::ALL {
        for file in program_forms("handlers") {
            let program = ChrootProgram::start(isolation, &file, &[]);
            let sites = run(&format!("info -sites -pid {}", program.pid)).answer();
            assert!(sites.contains(" handlers.ml:"), "{sites}");
            assert!(sites.contains("Handlers.allocating"), "{sites}");
            program.end();
        }
    }
}

#[test]
fn plugin_is_found_by_its_path_inside() {
    let plugin = inside(&fixture("objects/plugin.so"));
    for isolation in Isolation::ALL {
        for file in fixture_forms("objects/host") {
            let mut program = ChrootProgram::start(isolation, &file, &[]);
            let load = format!("load {}", plugin.display());
            program.talker.ask(&load, "loaded");
            run(&format!("attach -pid {} -enable plug", program.pid)).answer();
            let plugins = program.talker.ask("plugins", "plugins");
            assert_eq!(plugins, "plugins 0:ping=0,plug=2");
            program.end();
        }
    }
}

#[test]
fn static_programs_of_a_chroot_are_started_outside() {
    for file in program_forms("static/terminating") {
        let answer = run_on("trace -format plain", &file).answer();
        let end = "handlers fooia=5 foobar=2 collatz=112\nhandler finished\n";
        assert!(answer.ends_with(end), "{answer}");
    }
}

// promise: Functions: At least 97 % of the OCaml functions of a position-independent program of OCaml 5 are timed together, and 95 % of
//    one at a fixed address (2 × 2 programs)
#[test]
fn nearly_all_functions_are_timed_together() {
    for name in ["handlers", "service"] {
        for (file, least) in program_forms(name).iter().zip([97, 95]) {
            let program = ChrootProgram::start(Isolation::Chroot, file, &[]);
            let pid = program.pid;
            let timed = run(&format!("latency -json -pid {pid} -fn [A-Z]* -for 100ms")).json();
            let refused = timed["refused"].as_array().unwrap().len() as u64;
            let timed = timed["functions_timed"].as_u64().unwrap();
            assert!(
                100 * timed >= least * (timed + refused),
                "{}: {timed}, {refused} refused",
                file.display()
            );
            drop(program);
        }
    }
}
