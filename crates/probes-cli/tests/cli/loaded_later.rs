//! Warnings of functions that are not observed, because the process has loaded their file since.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use test_support::tmux::Terminal;
use test_support::{Talker, fixture, fixture_forms};

use crate::observers::{rest, watched};
use crate::support::{command, object};

fn message() -> String {
    format!(
        "functions in {} are not observed: the process has loaded it since the observation began",
        fixture("objects/plugin.so").display()
    )
}

fn load() -> String {
    format!("load {}", fixture("objects/plugin.so").display())
}

/// The standard error of a tool that observes a process while that executes a command.
fn stderr_of(target: &mut Talker, line: &str, command: &str) -> String {
    let tool = watched(line, target.pid());
    target.ask(command, "loaded");
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    let (_, stderr, status) = rest(tool);
    assert_eq!(status, Some(0), "{stderr}");
    stderr
}

// promise: Functions: If the process loads a library with functions that were asked for, each command warns that they are not
//    observed (2 × 3 commands)
#[test]
fn each_command_warns_of_libraries_loaded_later() {
    for file in fixture_forms("objects/host") {
        for line in [
            "count -fn fixture_*",
            "latency -fn fixture_*",
            "watch -fn fixture_*",
        ] {
            let mut target = Talker::start(&file);
            let text = stderr_of(&mut target, line, &load());
            let warning = format!(
                "ocaml-probes: warning: {}\nhint: run the command again with -pid to observe them, too\n",
                message()
            );
            assert_eq!(text.matches(&warning).count(), 1, "{line}: {text}");

            let mut target = Talker::start(&file);
            let said = stderr_of(&mut target, &format!("{line} -json"), &load());
            let said: Vec<_> = said.lines().map(object).collect();
            let later: Vec<_> = said
                .iter()
                .filter(|it| it["kind"] == "loaded_later")
                .collect();
            assert_eq!(later.len(), 1, "{said:?}");
            assert_eq!(later[0]["message"], message());
            assert_eq!(later[0]["pid"], json!(target.pid()));
        }
    }
}

// promise: Functions: A library loaded a second time, at another place, is noticed (2)
#[test]
fn library_loaded_twice_is_noticed() {
    for file in fixture_forms("objects/host") {
        let mut target = Talker::start(&file);
        target.ask(&load(), "loaded");
        let isolate = load().replacen("load", "isolate", 1);
        let said = stderr_of(&mut target, "count -fn plugin_*", &isolate);
        assert_eq!(said.matches(&message()).count(), 1, "{said}");
    }
}

#[test]
fn libraries_without_selected_functions_are_not_named() {
    for file in fixture_forms("objects/host") {
        let mut target = Talker::start(&file);
        let said = stderr_of(&mut target, "count -fn main", &load());
        assert!(!said.contains("not observed"), "{said}");
    }
}

#[test]
fn trace_warns_of_libraries_at_once() {
    for file in fixture_forms("objects/host") {
        let mut tool = command(["trace", "-count", "-fn", "fixture_*", "-prog"]);
        let mut tool = Talker::spawn(tool.arg(&file).stderr(Stdio::piped()));
        tool.expect("ready");
        tool.ask(&load(), "loaded");
        // The program runs until the warning has come.
        let stderr = tool.guard().child().stderr.take().unwrap();
        let mut lines = BufReader::new(stderr).lines().map(Result::unwrap);
        let warning = format!("ocaml-probes: warning: {}", message());
        assert!(lines.by_ref().any(|line| line == warning));
        tool.close_input();
        assert!(!lines.any(|line| line == warning));
    }
}

#[test]
fn terminals_show_which_libraries_were_loaded_later() {
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    for file in fixture_forms("objects/host") {
        for (line, shown) in [
            ("count -interval 10ms", "hits/s"),
            ("top -interval 10ms", "SHARE"),
        ] {
            let mut target = Talker::start(&file);
            let terminal = Terminal::open(240, 20);
            let pid = target.pid();
            terminal.type_line(&format!("clear; {tool} {line} -fn 'fixture_*' -pid {pid}"));
            terminal.wait_for(shown);
            assert!(!terminal.screen().contains("not observed"));
            target.ask(&load(), "loaded");
            terminal.wait_for(&message());
            terminal.press(&["C-c"]);
            terminal.wait_for("hint: run the command again");
        }
    }
}
