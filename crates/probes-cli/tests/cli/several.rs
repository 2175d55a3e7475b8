//! `attach` to several processes: all are checked before the first is changed.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::{Scratch, Talker, fixture};

use crate::put_back::Waiting;
use crate::support::{both_forms, image, run, states};

/// `-pid N` for each.
fn pids(targets: &[Talker]) -> String {
    let flags: Vec<String> = targets
        .iter()
        .map(|target| format!("-pid {}", target.pid()))
        .collect();
    flags.join(" ")
}

#[test]
fn each_process_is_changed_and_reported() {
    let targets = both_forms("gen_ocaml_2");
    let line = format!("attach {} -enable plain", pids(&targets));
    let lines: Vec<String> = targets
        .iter()
        .map(|target| format!("{} plain 0 -> 1, 1 site\n", target.pid()))
        .collect();
    assert_eq!(run(&line).answer(), lines.concat());

    let line = format!("attach -json {} -disable plain", pids(&targets));
    let answer = run(&line).answer();
    for (line, target) in answer.lines().zip(&targets) {
        let json: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(json["pid"], target.pid());
    }
    assert_eq!(answer.lines().count(), 2);

    let line = format!("attach -format table {} -enable plain", pids(&targets));
    let table = run(&line).answer();
    assert!(
        table.contains("| probe | before | after | sites "),
        "{table}"
    );
}

#[test]
fn one_that_does_not_fit_keeps_all_from_being_changed() {
    let mut targets = both_forms("gen_ocaml_2");
    targets.extend(both_forms("gen_ocaml_dot1"));
    let before: Vec<_> = targets.iter().map(|target| image(target.pid())).collect();
    let refused = run(&format!("attach {} -enable plain", pids(&targets)));
    assert_eq!((refused.code, &refused.stdout[..]), (Some(1), ""));
    assert_eq!(
        refused
            .stderr
            .matches("no probe \"plain\" in gen_ocaml_dot1")
            .count(),
        2
    );
    assert!(
        refused
            .stderr
            .ends_with("ocaml-probes: 2 of 4 processes failed; nothing was changed in any\n"),
        "{}",
        refused.stderr
    );
    let gone = format!("attach {} -pid 4194305 -enable-all", pids(&targets));
    assert_eq!(run(&gone).code, Some(1));
    for (target, before) in targets.iter().zip(before) {
        assert!(image(target.pid()) == before);
    }
}

#[test]
fn processes_are_picked_by_the_name_of_their_program() {
    let scratch = Scratch::new();
    // A name that no program of another test has.
    let name = format!("picked-{}", std::process::id());
    let file = scratch.copy(&fixture("gen_ocaml_2.pie"), &format!("{name}-a"));
    let other = scratch.copy(&fixture("gen_ocaml_2.nopie"), &format!("{name}-b"));
    let targets = [
        Talker::start(&file),
        Talker::start(&file),
        Talker::start(&other),
    ];
    let line = format!("attach -enable plain -name {name}-a");
    assert_eq!(run(&line).answer().lines().count(), 2);
    let on = |target: &Talker| states(target.pid()).contains("plain enabled");
    assert_eq!(targets.each_ref().map(on), [true, true, false]);

    let none = run(&format!("attach -enable plain -name {name}-c")).failure();
    assert!(
        none.contains("no process with OCaml probes runs a program called"),
        "{none}"
    );
    assert!(
        none.ends_with("hint: `ocaml-probes ps` lists those that there are\n"),
        "{none}"
    );
}

#[test]
fn all_are_put_back_when_the_time_is_over() {
    let targets = both_forms("gen_ocaml_2");
    let before: Vec<_> = targets.iter().map(|target| image(target.pid())).collect();
    let flags = format!("{} -enable plain -for 1h", pids(&targets));
    let mut waiting = Waiting::start_on(&flags);
    let second = waiting.line();
    assert!(second.contains(" plain 0 -> 1, "), "{second}");
    waiting.send(Signal::SIGTERM);
    let (code, stdout, stderr) = waiting.end();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(stdout.matches(" plain 1 -> 0, 1 site\n").count(), 2);
    for (target, before) in targets.iter().zip(before) {
        assert!(image(target.pid()) == before);
    }
}

#[test]
fn it_waits_for_those_that_are_left() {
    let targets = both_forms("gen_ocaml_2");
    let flags = format!("{} -enable plain -for 1h", pids(&targets));
    let mut waiting = Waiting::start_on(&flags);
    waiting.line();
    for target in &targets {
        kill(Pid::from_raw(target.pid()), Signal::SIGKILL).unwrap();
    }
    let (code, stdout, stderr) = waiting.end();
    assert_eq!((code, &stdout[..]), (Some(0), ""), "{stderr}");
    assert_eq!(stderr.matches("there is nothing to put back\n").count(), 2);
}
