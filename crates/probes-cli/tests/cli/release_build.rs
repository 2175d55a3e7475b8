//! A build without the feature `fault-injection` cannot inject faults.

use test_support::output;

use crate::support::command;

/// The variable that makes system calls fail, with the feature `fault-injection` (probes-lib,
/// faults.rs).
const VARIABLE: &str = "OCAML_PROBES_FAULT";

#[test]
fn fault_injection_needs_its_feature() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_ocaml-probes")).unwrap();
    let mut words = program.windows(VARIABLE.len());
    let knows = words.any(|word| word == VARIABLE.as_bytes());
    assert_eq!(knows, cfg!(feature = "fault-injection"));

    // The tool is run on this process: with fault injection it is killed, so it has no exit code.
    let pid = std::process::id().to_string();
    let mut info = command(["info", "-pid", &pid]);
    let code = output(info.env(VARIABLE, "kill:1")).status.code();
    assert_eq!(code, if knows { None } else { Some(1) });
}
