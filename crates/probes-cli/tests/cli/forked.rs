//! Warnings of hits that are missing, because they are those of processes that the observed one has forked.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use test_support::process::children;
use test_support::tmux::Terminal;
use test_support::{Talker, fixture_forms};

use crate::observers::{rest, watched};
use crate::support::{command, object};

/// The commands that observe a running process.
const COMMANDS: [&str; 5] = [
    "count",
    "count -by tid",
    "hist -of tid -probe ping",
    "latency -pair ping,pong",
    "watch -probe ping",
];

/// What a tool says on standard error if the process does this meanwhile.
fn said(target: &mut Talker, line: &str, meanwhile: impl FnOnce(&mut Talker)) -> String {
    let tool = watched(line, target.pid());
    meanwhile(target);
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    let (_, said, status) = rest(tool);
    assert_eq!(status, Some(0), "{line}: {said}");
    said
}

// promise: Observations: If the process forks a child that lives when the observation ends, each command warns that its hits
//    are missing (2 × 5 commands)
#[test]
fn each_command_warns_of_forked_children() {
    for file in fixture_forms("forker") {
        let mut target = Talker::start(&file);
        for line in COMMANDS {
            let mut child = 0;
            let mut fork = |target: &mut Talker| {
                target.ask("child", "child");
                child = children(target.pid())[0];
                // Only the child reads it.
                target.hits();
            };
            let said = said(&mut target, line, &mut fork);
            target.ask("quit", "forked");
            let message = |child: i32| {
                format!("hits in forked processes are missing: the process has forked pid {child}")
            };
            let warning = format!(
                "ocaml-probes: warning: {}\nhint: `-pid CHILD` ",
                message(child)
            );
            assert_eq!(said.matches(&warning).count(), 1, "{line}: {said}");
            let mut fork = |target: &mut Talker| {
                target.ask("child", "child");
                child = children(target.pid())[0];
            };
            let said = self::said(&mut target, &format!("{line} -json"), &mut fork);
            target.ask("quit", "forked");
            let said: Vec<_> = said.lines().map(object).collect();
            let warning = said.iter().find(|it| it["type"] == "warning").unwrap();
            assert_eq!(warning["kind"], "forked");
            assert_eq!(warning["message"], message(child));
            assert_eq!(warning["pid"], json!(target.pid()));
        }
        let said = said(&mut target, "count", |_| {});
        assert!(!said.contains("fork"), "{said}");
    }
}

// promise: Observations: A child that shares its parent's memory, or executes a program at once, causes no warning (2 × 2)
#[test]
fn children_without_hits_give_no_warning() {
    for file in fixture_forms("vforker") {
        let mut target = Talker::start(&file);
        let mut tool = watched("count -interval 50ms", target.pid());
        target.vfork();
        target.guard();
        for _ in 0..10 {
            tool.line().unwrap();
        }
        target.ask("", "vforked");
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
        let (_, said, _) = rest(tool);
        assert!(!said.contains("fork"), "{said}");
    }
    for file in fixture_forms("family") {
        let mut target = Talker::start(&file);
        let shell = |target: &mut Talker| {
            target.ask("shell sleep 0.5", "started 0");
        };
        let said = said(&mut target, "count", shell);
        assert!(!said.contains("fork"), "{said}");
    }
}

// promise: Observations: `trace` counts the hits of forked children, and warns that their times are missing or wrong (2)
#[test]
fn trace_warns_of_times_of_forked_children() {
    for file in fixture_forms("forker") {
        for (flags, warns) in [("-count", false), ("-latency ping,pong", true)] {
            let mut tool = command(["trace"]);
            tool.args(flags.split(' ')).arg("-prog").arg(&file);
            let mut tool = Talker::spawn(tool.stderr(Stdio::piped()));
            tool.expect("ready");
            tool.ask("child", "child");
            let stderr = tool.guard().child().stderr.take().unwrap();
            let mut lines = BufReader::new(stderr).lines().map(Result::unwrap);
            let warning = "ocaml-probes: warning: times in forked processes are missing or wrong, and their hits are \
                           counted: the process has forked pid ";
            if warns {
                assert!(lines.by_ref().any(|line| line.starts_with(warning)));
            }
            tool.ask("quit", "forked");
            tool.send("quit");
            let left: Vec<String> = lines.collect();
            assert_eq!(
                left.iter().filter(|line| line.contains("fork")).count(),
                usize::from(warns),
                "{left:?}"
            );
        }
    }
}

#[test]
fn terminals_show_that_hits_are_missing() {
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    for file in fixture_forms("forker") {
        for (line, shown) in [
            ("count -interval 10ms", "hits/s"),
            ("top -interval 10ms", "STATE"),
        ] {
            let mut target = Talker::start(&file);
            let terminal = Terminal::open(160, 20);
            terminal.type_line(&format!("clear; {tool} {line} -pid {}", target.pid()));
            terminal.wait_for(shown);
            target.ask("child", "child");
            terminal.wait_for("hits in forked processes are missing");
            terminal.press(&["C-c"]);
            terminal.wait_for("hint: `-pid CHILD`");
            target.ask("quit", "forked");
        }
    }
}
