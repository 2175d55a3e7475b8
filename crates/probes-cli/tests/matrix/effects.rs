//! Probe handlers that perform effects, and sites in effect handlers.

use test_support::program_forms;

use crate::chroot::{ChrootProgram, Isolation};
use crate::support::run;

/// Each probe, and its hits in a round: with all on, and alone.
const PROBES: [(&str, u64, u64); 8] = [
    ("asks", 1, 1),
    ("inner", 1, 1),
    // At every effect that is handled: one of the work, and one of each of three other probes'
    // handlers.
    ("in_branch", 4, 1),
    ("gives_up", 1, 1),
    ("later", 1, 1),
    ("deep", 1, 1),
    ("collects", 1, 1),
    ("finaliser", 1, 1),
];

fn attach(program: &ChrootProgram, actions: &str) {
    run(&format!("attach -pid {} {actions}", program.pid)).answer();
}

/// Asserts that the work of a round is the same, whatever probes are on, and that the handler of
/// each probe ran as often as `hits` says.
#[track_caller]
fn check(program: &mut ChrootProgram, hits: impl Fn(&(&'static str, u64, u64)) -> u64) {
    let work = [("work".to_owned(), 207)];
    let hits = PROBES.iter().map(|probe| (probe.0.to_owned(), hits(probe)));
    let expected: Vec<_> = work.into_iter().chain(hits).collect();
    assert_eq!(program.round(), expected);
}

// promise: OCaml 5: Probe handlers perform effects and handle them, and sites may be in effect
//    handlers (2 × 36 updates)
#[test]
fn handlers_perform_effects_and_handle_them() {
    for file in program_forms("ocaml5/effects") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        check(&mut program, |_| 0);
        for _ in 0..10 {
            attach(&program, "-enable-all");
            check(&mut program, |&(_, all, _)| all);
            attach(&program, "-disable-all");
            check(&mut program, |_| 0);
        }
        for (name, ..) in PROBES {
            attach(&program, &format!("-enable {name}"));
            check(
                &mut program,
                |&(probe, _, alone)| if probe == name { alone } else { 0 },
            );
            attach(&program, &format!("-disable {name}"));
        }
        program.end();
    }
}

// promise: OCaml 5: A handler suspended in an effect continues after its probe is disabled, on
//    another domain too (2 × 40 updates)
#[test]
fn suspended_handler_continues_though_its_probe_is_off() {
    for file in program_forms("ocaml5/effects") {
        let mut program = ChrootProgram::start(Isolation::Chroot, &file, &[]);
        assert_eq!(
            program.talker.ask("park", "parked"),
            "parked 0",
            "it is off"
        );
        for parked in 1..=20 {
            attach(&program, "-enable later");
            let line = program.talker.ask("park", "parked");
            assert_eq!(line, format!("parked {parked}"));
            attach(&program, "-disable later");
            check(&mut program, |_| 0);
        }
        // The handlers continue on another domain, through code that has been restored.
        assert_eq!(program.talker.ask("resume", "resumed"), "resumed 20");
        program.end();
    }
}
