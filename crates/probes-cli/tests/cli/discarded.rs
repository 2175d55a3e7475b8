//! Warnings that figures are too low, because the process has discarded patched pages.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use test_support::tmux::Terminal;
use test_support::{Talker, fixture_forms};

use crate::observers::{rest, watched};
use crate::support::{command, object, run, states};

const MESSAGE: &str = "the figures of guarded are too low: the process has discarded the patches of 2 sites, \
                       where no more hits are recorded";

/// The commands that observe a running process.
const COMMANDS: [&str; 3] = [
    "count",
    "latency -pair free,guarded",
    "watch -probe guarded,free",
];

/// Returns what a tool prints on standard error if the process discards a page while it is observed.
fn stderr_of_observer(target: &mut Talker, line: &str) -> String {
    let tool = watched(line, target.pid());
    target.hits();
    target.ask("discard", "discarded");
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    let (_, said, status) = rest(tool);
    assert_eq!(status, Some(0));
    said
}

// promise: Observations: If the process discards patched pages, each command warns that figures are too low (2 ×
//    3 commands)
#[test]
fn each_command_warns_of_discarded_patches() {
    for file in fixture_forms("discarding") {
        let mut target = Talker::start(&file);
        for line in COMMANDS {
            let said = stderr_of_observer(&mut target, line);
            let warning = format!("ocaml-probes: warning: {MESSAGE}\nhint: a new observation ");
            assert_eq!(said.matches(&warning).count(), 1, "{line}: {said}");
            let said = stderr_of_observer(&mut target, &format!("{line} -json"));
            let said: Vec<_> = said.lines().map(object).collect();
            let warning = said.iter().find(|it| it["type"] == "warning").unwrap();
            assert_eq!(warning["kind"], "discarded");
            assert_eq!(warning["message"], MESSAGE);
            assert_eq!(warning["pid"], json!(target.pid()));
        }
    }
}

#[test]
fn trace_warns_of_discarded_patches_at_once() {
    for file in fixture_forms("discarding") {
        let mut tool = command(["trace", "-count", "-prog"]);
        let mut tool = Talker::spawn(tool.arg(&file).stderr(Stdio::piped()));
        tool.expect("ready");
        tool.hits();
        tool.ask("discard", "discarded");
        // The program keeps running until the warning has been printed.
        let stderr = tool.guard().child().stderr.take().unwrap();
        let mut lines = BufReader::new(stderr).lines().map(Result::unwrap);
        let warning = format!("ocaml-probes: warning: {MESSAGE}");
        assert!(lines.by_ref().any(|line| line == warning));
        tool.send("quit");
        let left: Vec<String> = lines.collect();
        assert!(left[0].starts_with("hint: "), "{left:?}");
        assert!(left[1].starts_with("2 "), "{left:?}");
        assert!(!left.contains(&warning), "{left:?}");
    }
}

#[test]
fn terminals_show_that_figures_are_too_low() {
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    for file in fixture_forms("discarding") {
        for (line, shown) in [
            ("count -interval 10ms", "hits/s"),
            ("latency -pair free,guarded -interval 10ms", "p99"),
            ("top -interval 10ms", "STATE"),
        ] {
            let mut target = Talker::start(&file);
            let terminal = Terminal::open(160, 20);
            terminal.type_line(&format!("clear; {tool} {line} -pid {}", target.pid()));
            terminal.wait_for(shown);
            assert!(!terminal.screen().contains("too low"));
            target.ask("discard", "discarded");
            terminal.wait_for(MESSAGE);
            terminal.press(&["C-c"]);
            terminal.wait_for("hint: a new observation");
            assert_eq!(terminal.screen().matches("too low").count(), 1);
        }
    }
}

// promise: Observations: If the process discards pages with enabled probes, `info` shows them as inconsistent,
//    and `attach -force` repairs them (2 × 2 ways)
#[test]
fn enabled_probes_with_discarded_sites_are_inconsistent() {
    for file in fixture_forms("discarding") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for how in ["discard", "map"] {
            run(&format!("attach -enable-all -pid {pid}")).answer();
            target.ask(how, "discarded");
            assert_eq!(states(pid), "free enabled\nguarded inconsistent\n");
            let info = run(&format!("info -pid {pid}"));
            let why = "0 of 2 sites of \"guarded\" are enabled and its counter is 1";
            assert!(info.stderr.contains(why), "{}", info.stderr);
            assert!(target.hits().contains(&("guarded".to_owned(), 0)));
            run(&format!("attach -force -disable-all -pid {pid}")).answer();
            assert_eq!(states(pid), "free disabled\nguarded disabled\n");
        }
    }
}
