//! Programs started with their probes set.

use serde_json::{Value, json};
use test_support::{Talker, fixture, program, program_forms};

use crate::support::{Folder, command, run, run_command, run_on};

#[test]
fn without_actions_all_probes_are_on_before_any_code_runs() {
    for file in program_forms("terminating") {
        let run = run_on("trace -format plain", &file);
        assert_eq!(run.stderr, "");
        let answer = run.answer();
        assert!(answer.starts_with("handler fooia 5\n"), "{answer}");
        assert!(answer.ends_with("handlers fooia=5 foobar=2 collatz=112\nhandler finished\n"));
    }
}

#[test]
fn only_what_is_named_is_on() {
    for file in program_forms("terminating") {
        let answer = run_on("trace -enable foobar", &file).answer();
        let expected = "handler foobar 4 25\nhandler foobar 2 50\nsquares 55\ncollatz 111\n\
                        handlers fooia=0 foobar=2 collatz=0\n";
        assert_eq!(answer, expected);
        for (actions, expected) in [
            (
                "-enable-regexp foo",
                "handlers fooia=5 foobar=2 collatz=0\n",
            ),
            (
                "-enable-pair fooia,collatz",
                "handlers fooia=5 foobar=0 collatz=112\n",
            ),
            ("-disable-all", "handlers fooia=0 foobar=0 collatz=0\n"),
        ] {
            let answer = run_on(&format!("trace {actions}"), &file).answer();
            assert!(answer.ends_with(expected), "{actions}: {answer}");
        }
    }
}

#[test]
fn probes_that_start_enabled_can_be_switched_off() {
    let mut target =
        Talker::spawn(command(["trace", "-disable", "starts_on", "-prog"]).arg(program("init")));
    target.expect("ready");
    let line = target.ask("run", "round");
    assert_eq!(line, "round 1 starts_on=0 starts_on_twice=2 starts_off=0");
}

#[test]
fn it_returns_while_the_program_goes_on_and_says_its_pid() {
    let mut tool = Talker::spawn(command(["trace", "-json", "-prog"]).arg(program("many")));
    // Both write to the same pipe, each a whole line.
    let mut lines = [tool.line().unwrap(), tool.line().unwrap()];
    lines.sort();
    let [ready, answer] = lines.map(|line| line.trim().to_owned());
    let (ready, answer) = if ready.starts_with('{') {
        (answer, ready)
    } else {
        (ready, answer)
    };
    assert_eq!(tool.guard().wait().code(), Some(0));

    let json: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(ready, format!("ready pid={}", json["pid"]));
    assert_eq!(json["changed"].as_array().unwrap().len(), 200);
    let first = json!({"name": "many_000", "before": 0, "after": 1, "sites": 2});
    assert_eq!(json["changed"][0], first);
    assert_eq!(json["version"], 1);
    assert_eq!(tool.ask("run", "round"), "round 1 hits=220");
}

#[test]
fn arguments_environment_and_standard_streams_are_the_programs() {
    let mut tool = command(["trace", "-quiet", "-prog"]);
    tool.arg(program("service"))
        .args(["-enable", "tick", "--", "1", "2"]);
    let run = run_command(&mut tool);
    let ticks: Vec<_> = run
        .stdout
        .lines()
        .filter(|line| line.contains("tick"))
        .collect();
    assert_eq!(
        ticks,
        ["probe tick n=1", "tick 1", "probe tick n=2", "tick 2"]
    );
}

#[test]
fn a_name_without_a_slash_is_looked_up_in_path() {
    let service = program("terminating");
    let folder = service.parent().unwrap();
    let trace = || command(["trace", "-prog", "terminating.exe"]);
    assert!(
        run_command(trace().env("PATH", folder))
            .answer()
            .contains("handler finished")
    );
    let error = run_command(trace().env("PATH", "/nowhere").current_dir(folder)).failure();
    assert!(
        error.contains("cannot run terminating.exe: No such file"),
        "{error}"
    );
    assert!(error.contains("the program was not started"), "{error}");
    assert!(
        error.contains("the file in this folder is ./terminating.exe"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_done_is_found_before_the_program_runs() {
    let folder = Folder::new("untraceable");
    for (line, file, why) in [
        (
            "trace -enable fooai",
            program("terminating"),
            "did you mean \"fooia\"?",
        ),
        (
            "trace -disable fooia",
            program("terminating"),
            "probe \"fooia\" is not enabled",
        ),
        ("trace", fixture("no_probes.pie"), "no OCaml probes in "),
        ("trace", fixture("corrupt/not_elf"), "is not an ELF file"),
        (
            "trace",
            folder.0.join("missing"),
            "No such file or directory",
        ),
        ("trace", folder.0.clone(), "is not a regular file"),
    ] {
        let error = run_on(line, &file).failure();
        assert!(error.contains(why), "{error}");
        assert!(error.contains("the program was not started"), "{error}");
    }
    let file = folder.copy(&program("terminating"), "not_executable");
    let readable: std::fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&file, readable).unwrap();
    let error = run_on("trace", &file).failure();
    assert!(
        error.contains("Permission denied; the program was not started"),
        "{error}"
    );
    assert!(
        error.contains("hint: is it a program? `chmod +x "),
        "{error}"
    );
}

#[test]
fn verbose_says_the_pid_and_quiet_nothing() {
    let verbose = run_on("trace -v -disable-all", &program("terminating"));
    assert!(
        verbose.stderr.contains("terminating.exe as process "),
        "{verbose:?}"
    );
    assert!(
        verbose.stderr.contains("passed over, off already: collatz"),
        "{verbose:?}"
    );
    assert_eq!(
        run_on("trace -q -disable-all", &program("terminating")).stderr,
        ""
    );
    assert_eq!(run("trace -q -prog /nowhere/x").code, Some(1));
}
