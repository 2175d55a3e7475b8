//! Tests of `ocaml/probes_self`, with services in OCaml that switch their own probes
//! (`test-programs/own`).

use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{State, Target};
use test_support::process::{Image, settle};
use test_support::{Talker, eventually, output, program_forms};

use crate::own::path_beside_tests;

fn services() -> impl Iterator<Item = Talker> {
    let library = path_beside_tests("libprobes.so");
    let programs = program_forms("own/own").into_iter();
    programs.map(move |program| Talker::start_with(&program, [&library]))
}

// promise: Own probes: An OCaml service switches its own probe in a SIGUSR1 handler (2 × 40
//    updates)
#[test]
fn service_switches_its_own_probe_on_sigusr1() {
    for mut service in services() {
        let target = Target::open(service.pid()).unwrap();
        let state = || target.states().unwrap().probe("request").unwrap().state();
        let pid = Pid::from_raw(service.pid());
        let signal = || {
            // The runtime handles a signal that arrives just before the service waits for a line only after that line.
            settle(pid.as_raw());
            kill(pid, Signal::SIGUSR1).unwrap();
        };
        let becomes = |wanted| {
            eventually("it has switched its probe", || {
                (state() == wanted).then_some(())
            });
        };
        settle(service.pid());
        let text = Image::of(service.pid()).text();
        for round in 0..20 {
            assert_eq!(state(), State::Disabled);
            signal();
            becomes(State::Enabled);
            service.send("serve");
            let number = 2 * round + 1;
            assert_eq!(service.line().unwrap(), format!("probe request {number}"));
            assert_eq!(service.line().unwrap(), "served");
            assert_eq!(service.ask("states", ""), "states even=off/0 request=on/1");
            signal();
            becomes(State::Disabled);
            assert_eq!(service.ask("serve", ""), "served");
        }
        settle(service.pid());
        let after = Image::of(service.pid()).text();
        after.assert_same(&text, "the code, on and off again");
    }
}

#[test]
fn each_function_does_what_its_documentation_says() {
    for mut service in services() {
        for (line, answer) in [
            ("enable request", "done"),
            ("enable-all", "done"),
            ("states", "states even=on/1 request=on/2"),
            ("disable request", "done"),
            ("disable-regexp ev", "done"),
            ("states", "states even=off/0 request=on/1"),
            ("disable-all", "done"),
            ("enable-regexp .*e", "done"),
            ("states", "states even=on/1 request=on/1"),
            ("set-all off", "done"),
            ("set even on", "done"),
            ("set even on", "done"),
            ("state even", "state on"),
            ("states", "states even=on/1 request=off/0"),
            ("set-all on", "done"),
            ("set even off", "done"),
            ("states", "states even=off/0 request=on/1"),
            ("state nothing", "failed no probe \"nothing\""),
            (
                "disable even",
                "failed probe \"even\" is not enabled; nothing was changed",
            ),
            (
                "zero",
                "failed a name, regular expression or path contains a NUL byte",
            ),
        ] {
            assert_eq!(service.ask(line, ""), answer, "{line}");
        }
        for library in ["nonesuch.so", "libm.so.6"] {
            let answer = service.ask(&format!("library {library}"), "");
            let start = "failed cannot load libprobes: ";
            assert!(answer.starts_with(start), "{answer}");
        }
    }
}

// promise: Own probes: If OCaml threads switch the same probes, every update counts (2 × 400
//    updates)
#[test]
fn updates_by_several_ocaml_threads_all_take_effect() {
    for mut service in services() {
        let answer = service.ask("threads 4", "updates");
        assert_eq!(answer, "updates 400 failed 0");
        let states = service.ask("states", "states");
        assert_eq!(states, "states even=off/0 request=off/0");
    }
}

#[test]
fn forked_child_does_not_switch_its_parents_probes() {
    for mut service in services() {
        let refusal = service.ask("fork", "child ");
        assert!(
            refusal.contains(" cannot be changed from its forked child, "),
            "{refusal}"
        );
        // The child has switched its own probe, and printed this.
        service.expect("probe request 1");
        service.expect("done");
        let states = service.ask("states", "states");
        assert_eq!(states, "states even=off/0 request=off/0");
    }
}

#[test]
fn service_without_the_library_reports_it() {
    for file in program_forms("own/own") {
        let output = output(Command::new(file).arg("/nonesuch/libprobes.so"));
        assert!(!output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("cannot load libprobes: /nonesuch"), "{said}");
    }
}
