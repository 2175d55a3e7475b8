//! `gc` with programs that write no runtime events; the matrix has those that do.

use serde_json::Value;
use test_support::{Talker, fixture, program, program_forms};

use crate::count_functions::observing;
use crate::support::{command, object, run, run_command};

/// Whether the test programs have runtime events.
fn is_built_by_ocaml_5() -> bool {
    let events = program("terminating").with_file_name("ocaml5");
    events.join("events.exe").exists()
}

// promise: Runtime events: The collector of a program of OCaml 4 is shown by the calls of its functions, in the same form
//    (2 programs)
#[test]
fn ocaml_4_is_shown_by_functions() {
    if is_built_by_ocaml_5() {
        return;
    }
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = observing("gc", "-json -interval 20ms", target.pid());
        target.ask("run 4 200000", "calls");
        let ended = tool.end();
        let last = object(ended.stdout.lines().last().unwrap());
        assert_eq!(
            (&last["at"], &last["from"]),
            (&Value::Null, &"functions".into())
        );
        for unknown in [
            "ocaml",
            "allocated_bytes",
            "promoted_bytes",
            "heap_bytes",
            "lost_words",
        ] {
            assert_eq!(last[unknown], Value::Null, "{unknown}");
        }
        let phases = last["phases"].as_array().unwrap();
        let sum = |what: &str| {
            phases
                .iter()
                .map(|it| it[what].as_u64().unwrap())
                .sum::<u64>()
        };
        let count = |phase: &str| {
            let found = phases.iter().find(|it| it["phase"] == phase).unwrap();
            found["count"].as_u64().unwrap()
        };
        assert!(count("minor") > 0 && count("slice") > 0, "{last}");
        assert_eq!(last["pauses"]["count"], sum("count"));
        assert_eq!(last["pauses"]["total_ns"], sum("total_ns"));
        let domain = &last["domains"][0];
        assert_eq!(domain["count"], last["pauses"]["count"]);
        assert!(domain["share"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn figures_of_functions_say_what_is_unknown() {
    let target = Talker::start(&program("service"));
    let plain = run(&format!("gc -pid {} -for 10ms", target.pid()));
    if !is_built_by_ocaml_5() {
        let why = "has the runtime of OCaml 4, and only that of OCaml 5 writes runtime events: its functions are timed";
        assert!(plain.stderr.contains(why), "{plain:?}");
        let answer = plain.answer();
        assert!(
            answer.contains(" allocated - promoted - heap - lost - compactions "),
            "{answer}"
        );
        assert!(!answer.contains("stw domain"), "{answer}");
        let table = run(&format!("gc -pid {} -for 10ms -format table", target.pid())).answer();
        assert!(table.contains("what is allocated is not known"), "{table}");
        let over = run(&format!("gc -pid {} -over 5ms", target.pid()));
        assert_eq!(over.code, Some(2));
        assert!(
            over.stderr.contains("-over needs runtime events"),
            "{over:?}"
        );
    }
}

#[test]
fn program_without_runtime_of_ocaml_is_refused() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    assert_eq!(
        run(&format!("gc -pid {pid} -over 5ms -interval 1s")).failure(),
        format!(
            "ocaml-probes: process {pid} writes no runtime events, and has no OCaml runtime with symbols\n"
        )
    );
    let gone = run("gc -pid 2147483647").failure();
    assert!(gone.contains("2147483647"), "{gone}");
}

#[test]
fn status_of_a_started_program_is_ours() {
    let said = run_command(&mut command(["gc", "-prog", "sh", "--", "-c", "exit 7"]));
    assert_eq!(said.code, Some(7));
    assert!(
        said.stderr.contains("sh has written no runtime events"),
        "{said:?}"
    );
    assert!(
        said.stderr.contains("hint: only programs of OCaml 5"),
        "{said:?}"
    );
    let failed = run_command(&mut command(["gc", "-prog", "true"]));
    assert_eq!(failed.code, Some(1), "{failed:?}");
    let missing = run("gc -prog /none").failure();
    assert!(
        missing.contains("cannot start /none: No such file"),
        "{missing}"
    );
}
