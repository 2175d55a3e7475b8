//! `gc` with programs that write no runtime events; the matrix has those that do.

use test_support::{Talker, fixture, program};

use crate::support::{command, run, run_command};

#[test]
fn ocaml_4_is_told_what_times_its_collector() {
    if program("terminating")
        .with_file_name("ocaml5")
        .join("events.exe")
        .exists()
    {
        // Built by OCaml 5.
        return;
    }
    let target = Talker::start(&program("service"));
    let pid = target.pid();
    let expected = format!(
        "ocaml-probes: process {pid} has the runtime of OCaml 4, and only that of OCaml 5 writes runtime events\n\
         hint: `ocaml-probes latency -pid {pid} -gc minor,slice,major` times the collector without them\n"
    );
    assert_eq!(run(&format!("gc -pid {pid}")).failure(), expected);
    // The command of the hint.
    let timed = run(&format!(
        "latency -pid {pid} -gc minor,slice,major -for 10ms"
    ))
    .answer();
    assert!(!timed.is_empty());
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
    let missing = run("gc -prog /none").failure();
    assert!(
        missing.contains("cannot start /none: No such file"),
        "{missing}"
    );
}
