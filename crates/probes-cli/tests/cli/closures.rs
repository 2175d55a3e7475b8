//! Warnings about marshalled closures that other processes will refuse; none if they are accepted.

use std::process::Stdio;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_support::{Scratch, Talker, eventually, program, program_forms};

use crate::count::{end, start_observing};
use crate::support::{Run, command, run, run_command};

/// Runs a command until the process could be stopped in time.
fn attach(flags: &str, pid: i32) -> Run {
    eventually("the process is changed", || {
        let run = run(&format!("attach -pid {pid} {flags}"));
        (!run.stderr.contains("safe to retry")).then_some(run)
    })
}

fn info(pid: i32) -> Run {
    run(&format!("info -pid {pid}"))
}

fn digest_of(pid: i32) -> Value {
    run(&format!("info -json -quiet -pid {pid}")).json()["code_digest"].clone()
}

// promise: Closures: If closures of a process will be refused, the command that causes it warns,
//    and so does `info` as long as that is so (2)
#[test]
fn closures_that_will_be_refused_are_warned_of() {
    for file in program_forms("closures/within") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        assert_eq!(digest_of(pid), "not_computed");
        assert_eq!(info(pid).stderr, "");

        let live = attach("-json -live -enable-all", pid);
        let said = live.said();
        let warning = said.iter().find(|it| it["type"] == "warning").unwrap();
        assert_eq!(
            (&warning["kind"], &warning["pid"]),
            (&json!("closures_refused"), &json!(pid))
        );
        let text = |field: &str| warning[field].as_str().unwrap();
        assert!(
            text("message").contains("will refuse closures"),
            "{warning}"
        );
        assert!(
            text("hint").starts_with("if it marshals closures"),
            "{warning}"
        );
        assert_eq!(live.json()["code_digest"], "pending");
        assert_eq!(digest_of(pid), "pending");
        assert!(info(pid).stderr.contains("will refuse closures"));

        let again = attach("-json -enable-all", pid);
        assert!(!again.stderr.contains("closures"), "{again:?}");
        assert_eq!(again.json()["code_digest"], "of_file");
        assert_eq!(digest_of(pid), "of_file");
        assert!(!info(pid).stderr.contains("closures"));

        // One that has marshalled a closure while its sites were patched.
        let scratch = Scratch::new();
        talker = Talker::start(&file);
        let pid = talker.pid();
        assert_eq!(attach("-live -enable-all", pid).code, Some(0));
        talker.ask(
            &format!("write {}", scratch.file("closure").display()),
            "written",
        );
        assert_eq!(attach("-disable-all", pid).code, Some(0));
        assert_eq!(digest_of(pid), "of_patched_code");
        assert!(
            info(pid)
                .stderr
                .contains("refuse closures that it marshals")
        );
    }
}

#[test]
fn accepted_closures_give_no_warning() {
    for file in program_forms("closures/within") {
        let talker = Talker::start(&file);
        let tool = start_observing("count", talker.pid());
        assert_eq!(digest_of(talker.pid()), "of_file");
        end(tool, Signal::SIGINT);
        let mut trace = command(["trace", "-wait", "-json", "-enable-all", "-prog"]);
        trace.arg(&file).stdin(Stdio::null());
        let run = run_command(&mut trace);
        assert_eq!(run.code, Some(0));
        let said = run.said();
        let [started] = &said[..] else {
            panic!("{run:?}");
        };
        assert_eq!(started["code_digest"], "of_file");
    }
    // Its sites lie after the OCaml code.
    let talker = Talker::start(&program("closures/closures"));
    let pid = talker.pid();
    let run = attach("-live -json -enable-all", pid);
    assert!(!run.stderr.contains("closures that"), "{run:?}");
    assert_eq!(run.json().get("code_digest"), None);
    assert_eq!(digest_of(pid), json!(null));
    assert!(!info(pid).stderr.contains("closures that"));
}

#[test]
fn followed_program_is_warned_of() {
    let mut trace = command(["trace", "-follow", "-wait", "-enable-all", "-prog"]);
    trace.arg(program("closures/within")).stdin(Stdio::null());
    let run = run_command(&mut trace);
    assert_eq!(run.code, Some(0));
    assert!(run.stderr.contains("will refuse closures"), "{run:?}");
}
