//! `attach -for`: the earlier state is restored when the time is over, or sooner on a signal,
//! whatever has happened to the process meanwhile; and `attach -live`.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::{Guard, Talker, eventually, fixture, fixture_forms, process, program_forms};

use crate::support::{
    both_forms, command, full_pipe, image, object, poke, probe, rest_of_full_pipe, run, states,
};

/// A waiting `attach`.
pub(crate) struct Waiting(Talker);

impl Waiting {
    /// Starts `attach` on a process, and waits until it has reported its changes.
    fn start(target: &Talker, flags: &str) -> Waiting {
        Waiting::start_on(&format!("-pid {} {flags}", target.pid()))
    }

    /// Like `start`, but `flags` are all flags, including those that name the process.
    pub(crate) fn start_on(flags: &str) -> Waiting {
        let line = format!("attach {flags}");
        Waiting::spawn(&mut command(line.split(' ')))
    }

    pub(crate) fn spawn(command: &mut Command) -> Waiting {
        let mut waiting = Waiting(Talker::spawn(command.stderr(Stdio::piped())));
        let line = waiting.line();
        assert!(line.contains(" -> ") || line.starts_with('{'), "{line}");
        waiting
    }

    pub(crate) fn line(&mut self) -> String {
        self.0.line().unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.pid()
    }

    pub(crate) fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.pid()), signal).unwrap();
    }

    /// Waits until it exits; returns its exit status, the rest of its output, and its standard
    /// error.
    pub(crate) fn wait_for_exit(mut self) -> (Option<i32>, String, String) {
        let mut stdout = String::new();
        while let Some(line) = self.0.line() {
            stdout += &line;
            stdout.push('\n');
        }
        let mut stderr = String::new();
        let mut pipe = self.0.guard().child().stderr.take().unwrap();
        pipe.read_to_string(&mut stderr).unwrap();
        (self.0.guard().wait().code(), stdout, stderr)
    }
}

// promise: Updates for a time: The earlier state is restored when the time is over (4 processes,
//    compared byte by byte)
#[test]
fn state_is_restored_when_the_time_is_over() {
    for live in ["", " -live"] {
        for target in both_forms("gen_ocaml_2") {
            let before = image(target.pid());
            let flags = format!("-enable plain,flag -for 300ms{live}");
            let (code, stdout, stderr) = Waiting::start(&target, &flags).wait_for_exit();
            assert_eq!(code, Some(0), "{stderr}");
            assert_eq!(
                stdout,
                "flag 0 -> 1, 0 sites\nflag 1 -> 0, 0 sites\nplain 1 -> 0, 1 site\n"
            );
            assert!(
                stderr.contains("the changes will be undone in 300ms, or on Ctrl-C\n"),
                "{stderr}"
            );
            assert_eq!(stderr.contains("stopped "), live.is_empty(), "{stderr}");
            assert!(image(target.pid()) == before);
        }
    }
}

// promise: Updates for a time: The earlier state is restored on SIGINT, SIGTERM, SIGHUP and SIGQUIT
//    (2 × 4)
#[test]
fn state_is_restored_on_a_termination_signal() {
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        for target in both_forms("gen_ocaml_2") {
            run(&format!("attach -pid {} -enable plain", target.pid())).answer();
            let before = image(target.pid());
            let waiting = Waiting::start(&target, "-disable plain -for 1h -quiet -format plain");
            assert!(states(target.pid()).contains("plain disabled"));
            waiting.send(signal);
            let expected = (Some(0), "plain 0 -> 1, 1 site\n".to_owned(), String::new());
            assert_eq!(waiting.wait_for_exit(), expected);
            assert!(image(target.pid()) == before);
        }
    }
}

#[test]
fn ignored_signal_does_not_end_the_wait() {
    for target in both_forms("gen_ocaml_2") {
        let mut shell = Command::new("sh");
        let tool = env!("CARGO_BIN_EXE_ocaml-probes");
        let script = "trap '' HUP; exec \"$@\"";
        shell.args(["-c", script, "sh", tool, "attach", "-enable", "plain"]);
        shell.args(["-for", "1h", "-pid", &target.pid().to_string()]);
        let waiting = Waiting::spawn(&mut shell);
        waiting.send(Signal::SIGHUP);
        // Signals are taken in order: when it takes the second one, it has skipped the first.
        assert!(states(target.pid()).contains("plain enabled"));
        waiting.send(Signal::SIGTERM);
        let (code, stdout, _) = waiting.wait_for_exit();
        assert_eq!((code, &stdout[..]), (Some(0), "plain 1 -> 0, 1 site\n"));
    }
}

#[test]
fn each_answer_is_a_line_of_json() {
    for target in both_forms("gen_ocaml_2") {
        let (code, stdout, _) =
            Waiting::start(&target, "-json -enable plain -for 10ms").wait_for_exit();
        assert_eq!(code, Some(0));
        assert_eq!(stdout.matches('\n').count(), 1, "{stdout}");
        let back = object(&stdout);
        let change = &back["changed"][0];
        assert_eq!(
            (&change["before"], &change["after"]),
            (&1.into(), &0.into())
        );
    }
}

// promise: Updates for a time: What other tools have changed meanwhile stays, and no counter goes
//    below 0 (2 × 2)
#[test]
fn changes_by_other_tools_stay() {
    for target in both_forms("gen_ocaml_2") {
        let attach = |flags: &str| {
            run(&format!("attach -pid {} {flags}", target.pid())).answer();
        };
        let waiting = Waiting::start(&target, "-enable plain -for 1h");
        attach("-enable plain");
        waiting.send(Signal::SIGINT);
        let (code, stdout, stderr) = waiting.wait_for_exit();
        assert_eq!((code, &stdout[..]), (Some(0), "plain 2 -> 1, 0 sites\n"));
        assert!(stderr.contains("still enabled, because others"), "{stderr}");

        let waiting = Waiting::start(&target, "-enable plain -for 1h");
        attach("-force -disable plain");
        waiting.send(Signal::SIGINT);
        let (code, stdout, stderr) = waiting.wait_for_exit();
        assert_eq!((code, &stdout[..]), (Some(0), ""));
        assert!(
            stderr.contains("no changes of plain are left to undo\n"),
            "{stderr}"
        );
        assert!(states(target.pid()).contains("plain disabled"));
    }
}

// promise: Updates for a time: A process that has exited or executed a new program is left alone
#[test]
fn nothing_is_restored_after_exit_or_exec() {
    for file in program_forms("service") {
        let mut target = Talker::start_with(&file, ["5"]);
        let waiting = Waiting::start(&target, "-enable tick -for 1h");
        target.guard().child().kill().unwrap();
        target.guard().wait();
        let (code, stdout, stderr) = waiting.wait_for_exit();
        assert_eq!((code, &stdout[..]), (Some(0), ""), "{stderr}");
        let note = format!(
            "process {} has exited: there is nothing to undo\n",
            target.pid()
        );
        assert!(stderr.ends_with(&note), "{stderr}");
    }
    for file in fixture_forms("exec_self") {
        let mut target = Talker::start(&file);
        let waiting = Waiting::start(&target, "-enable ping -for 1h");
        target.ask("exec", "ready");
        let before = image(target.pid());
        waiting.send(Signal::SIGTERM);
        let (code, stdout, stderr) = waiting.wait_for_exit();
        assert_eq!((code, &stdout[..]), (Some(0), ""), "{stderr}");
        let note = "has executed a new program: there is nothing to undo\n";
        assert!(stderr.ends_with(note), "{stderr}");
        assert!(image(target.pid()) == before);
    }
}

#[test]
fn unread_answer_keeps_no_change() {
    for (time, signal) in [("5s", None), ("1h", Some(Signal::SIGTERM))] {
        let target = Talker::start(&fixture("gen_ocaml_2.pie"));
        let pid = target.pid();
        let (reader, writer) = full_pipe();
        let line = format!("attach -quiet -format plain -enable plain -for {time} -pid {pid}");
        let mut tool = command(line.split(' '));
        let mut guard = Guard::spawn(tool.stdout(writer).stderr(Stdio::piped()));
        drop(tool);
        let becomes = |state: &str| {
            eventually(state, || states(pid).contains(state).then_some(()));
        };
        becomes("plain enabled");
        if let Some(signal) = signal {
            kill(Pid::from_raw(guard.pid()), signal).unwrap();
        }
        becomes("plain disabled");
        let mut errors = guard.child().stderr.take().unwrap();
        let undone = "plain 1 -> 0, 1 site\n";
        if signal.is_none() {
            let answer = format!("plain 0 -> 1, 1 site\n{undone}");
            assert_eq!(rest_of_full_pipe(reader), answer);
            assert_eq!(std::io::read_to_string(&mut errors).unwrap(), "");
        } else {
            // What was undone goes where it may be read.
            assert_eq!(std::io::read_to_string(&mut errors).unwrap(), undone);
            drop(reader);
        }
        assert_eq!(guard.wait().code(), Some(0));
    }
}

#[test]
fn restoring_waits_for_no_other_process() {
    let [busy, free] = both_forms("forker").try_into().unwrap();
    let flags = format!(
        "-pid {} -pid {} -enable ping -for 1h -verbose",
        busy.pid(),
        free.pid()
    );
    let mut waiting = Waiting::start_on(&flags);
    let tracer = strace(busy.pid());
    waiting.send(Signal::SIGINT);
    let mut stderr = BufReader::new(waiting.0.guard().child().stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("trying again: ") {
        assert!(stderr.read_line(&mut said).unwrap() > 0, "{said}");
    }
    assert!(states(free.pid()).contains("ping disabled"));
    assert!(states(busy.pid()).contains("ping enabled"));
    drop(tracer);
    assert!(waiting.0.guard().wait().success());
    assert!(states(busy.pid()).contains("ping disabled"));
}

/// Starts strace on a process, and waits until strace traces the process.
pub(crate) fn strace(pid: i32) -> Guard {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-e", "trace=none", "-p", &pid.to_string()]);
    let guard = Guard::spawn(strace.stderr(Stdio::null()));
    eventually("strace traces the process", || {
        (process::status(pid, "TracerPid") == guard.pid().to_string()).then_some(())
    });
    guard
}

// promise: Updates for a time: The tool waits for another tracer before it restores
#[test]
fn restoring_waits_for_another_tracer() {
    for target in both_forms("forker") {
        let mut waiting = Waiting::start(&target, "-enable ping -for 1h -verbose");
        let tracer = strace(target.pid());
        waiting.send(Signal::SIGINT);
        let mut stderr = BufReader::new(waiting.0.guard().child().stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("trying again: ") {
            assert!(stderr.read_line(&mut said).unwrap() > 0, "{said}");
        }
        assert!(states(target.pid()).contains("ping enabled"));
        drop(tracer);
        assert_eq!(waiting.line(), "ping 1 -> 0, 3 sites");
        assert!(waiting.0.guard().wait().success());
    }
}

// promise: Updates for a time: A second interrupt ends the wait, and the message says what to do
#[test]
fn second_interrupt_gives_up_waiting_with_a_hint() {
    for target in both_forms("forker") {
        let waiting = Waiting::start(&target, "-enable ping -for 1h");
        let _tracer = strace(target.pid());
        waiting.send(Signal::SIGINT);
        // The tool reads all pending signals at once: the second one is sent when it has read the first.
        eventually("it has received the signal", || {
            let pending = process::status(waiting.0.pid(), "ShdPnd");
            (u64::from_str_radix(&pending, 16).unwrap() == 0).then_some(())
        });
        waiting.send(Signal::SIGTERM);
        let (code, stdout, stderr) = waiting.wait_for_exit();
        assert_eq!((code, &stdout[..]), (Some(1), ""), "{stderr}");
        let why = format!(
            "ocaml-probes: cannot undo the temporary change: process {} is already traced by",
            target.pid()
        );
        assert!(stderr.contains(&why), "{stderr}");
        let hint = format!(
            "hint: once no other tool traces, stops or updates it, `ocaml-probes attach -pid {} -release-dead` undoes \
             the changes; with -live, at once\n",
            target.pid()
        );
        assert!(stderr.ends_with(&hint), "{stderr}");
        // With -live, the command of the hint works even now, while strace traces the process.
        let by_hand = format!("attach -live -pid {} -release-dead", target.pid());
        assert_eq!(run(&by_hand).answer(), "ping 1 -> 0, 3 sites\n");
    }
}

// promise: Updates for a time: A breakpoint keeps its own probe from being restored, and no other
//    (2)
#[test]
fn breakpoint_keeps_only_its_own_probe_from_restoring() {
    for (target, live) in both_forms("gen_ocaml_2").into_iter().zip(["", " -live"]) {
        let waiting = Waiting::start(&target, &format!("-enable-all -for 1h{live}"));
        let json = run(&format!("info -json -pid {}", target.pid())).json();
        let site = &probe(&json, "plain")["sites"][0]["address"];
        poke(target.pid(), site, &[0xcc]);
        waiting.send(Signal::SIGTERM);
        let (code, stdout, stderr) = waiting.wait_for_exit();
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stdout.contains("flag 1 -> 0, 0 sites\n"), "{stdout}");
        assert!(stdout.contains("watched 1 -> 0, 1 site\n"), "{stdout}");
        assert!(!stdout.contains("plain 1 -> 0"), "{stdout}");
        let why = "ocaml-probes: cannot undo the changes of plain: their sites hold other bytes, such as a breakpoint";
        assert!(stderr.contains(why), "{stderr}");
        let hint = format!(
            "attach{live} -pid {} -release-dead` undoes the changes\n",
            target.pid()
        );
        assert!(stderr.ends_with(&hint), "{stderr}");
        poke(target.pid(), site, &[0x90]);
        let by_hand = format!("attach -pid {} -release-dead", target.pid());
        assert_eq!(run(&by_hand).answer(), "plain 1 -> 0, 1 site\n");
    }
}

#[test]
fn attach_that_changes_nothing_does_not_wait() {
    for target in both_forms("gen_ocaml_2") {
        let line = format!("attach -pid {} -disable-all -for 1h", target.pid());
        let run = run(&line);
        assert!(
            run.stderr
                .ends_with("nothing was changed: -for has nothing to undo, and does not wait\n"),
            "{}",
            run.stderr
        );
        assert_eq!(run.answer(), "");
    }
}

#[test]
fn invalid_durations_are_refused() {
    for (typed, why) in [
        (
            "0s",
            "-for: \"0s\" is not a duration: it has to be longer than 0",
        ),
        ("5", "-for: \"5\" has no unit; did you mean 5s?"),
        (
            "-5s",
            "-for: \"-5s\" is not a duration, such as 30s, 5m or 1h30m",
        ),
        ("99999999999999999999s", "is too long"),
        ("1M", "-for: \"1M\" means months; minutes are m"),
    ] {
        let run = run(&format!("attach -pid 1 -enable a -for {typed}"));
        assert_eq!(run.code, Some(2));
        assert!(run.stderr.contains(why), "{}", run.stderr);
    }
}

// promise: Live updates: A live attach traces no thread
#[test]
fn live_attach_traces_no_thread() {
    for target in both_forms("gen_ocaml_2") {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-e", "trace=ptrace,kill,tkill,tgkill", "--"]);
        strace.arg(env!("CARGO_BIN_EXE_ocaml-probes"));
        let pid = target.pid().to_string();
        strace.args(["attach", "-live", "-enable-all", "-pid", &pid]);
        let output = test_support::output(&mut strace);
        assert!(output.status.success());
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}
