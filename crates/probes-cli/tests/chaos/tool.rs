//! Runs the tool with injected faults.

use std::process::{Command, Stdio};

use probes_lib::faults;
use serde_json::Value;
use test_support::Guard;

use crate::schema::object;
use crate::subject::{States, Subject};
use probes_lib::{Action, State};

/// Returns a command that runs the tool with the arguments in `line`, separated by single spaces.
/// Its output is discarded unless the caller redirects it.
pub(crate) fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ocaml-probes"));
    command.args(line.split(' ')).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Returns the `attach` command that enables or disables every probe.
pub(crate) fn attach(pid: i32, action: Action, force: bool) -> Command {
    let action = match action {
        Action::Enable => "-enable-all",
        Action::Disable => "-disable-all",
    };
    let force = if force { " -force" } else { "" };
    command(&format!("attach -pid {pid} {action}{force}"))
}

/// Starts a command in which `fault` is injected.
pub(crate) fn start(mut command: Command, fault: &str) -> Guard {
    Guard::spawn(command.env(faults::VARIABLE, fault))
}

/// Runs `info -json` and returns the counter and state of each probe.
pub(crate) fn info(subject: &Subject) -> States {
    let output = test_support::output(&mut command(&format!("info -json -pid {}", subject.pid())));
    assert!(output.status.success(), "{output:?}");
    let json = object(std::str::from_utf8(&output.stdout).unwrap());
    let probes = json["probes"].as_array().unwrap().iter();
    let one = |probe: &Value| {
        let state = match probe["state"].as_str().unwrap() {
            "enabled" => State::Enabled,
            "disabled" => State::Disabled,
            "inconsistent" => State::Inconsistent,
            other => panic!("{other}"),
        };
        let counter = probe["counter"].as_u64().unwrap() as u16;
        (probe["name"].as_str().unwrap().to_owned(), (counter, state))
    };
    probes.map(one).collect()
}
