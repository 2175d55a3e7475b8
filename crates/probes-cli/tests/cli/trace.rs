//! `trace`: programs that are started with their probes enabled or disabled as asked.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::unistd::geteuid;
use serde_json::{Value, json};
use test_support::{Guard, Scratch, Talker, as_ordinary_user, fixture, program, program_forms};

use crate::support::{Directory, Run, command, object, run, run_command, run_on};

#[test]
fn all_probes_are_on_before_any_code_runs() {
    let files = ["terminating", "static/terminating"].map(program_forms);
    for file in files.concat() {
        let run = run_on("trace -format plain", &file);
        assert_eq!(run.stderr, "");
        let answer = run.answer();
        assert!(answer.starts_with("handler fooia 5\n"), "{answer}");
        assert!(answer.ends_with("handlers fooia=5 foobar=2 collatz=112\nhandler finished\n"));
    }
}

#[test]
fn only_named_probes_are_on() {
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
fn initially_enabled_probes_can_be_switched_off() {
    let mut target =
        Talker::spawn(command(["trace", "-disable", "starts_on", "-prog"]).arg(program("init")));
    target.expect("ready");
    let line = target.ask("run", "round");
    assert_eq!(line, "round 1 starts_on=0 starts_on_twice=2 starts_off=0");
}

#[test]
fn trace_returns_with_the_pid_of_the_program() {
    let mut command = command(["trace", "-json", "-prog"]);
    command
        .arg(program("many"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut guard = Guard::spawn(&mut command);
    let mut errors = BufReader::new(guard.child().stderr.take().unwrap());
    let mut tool = Talker::of(guard);
    let ready = tool.line().unwrap();
    assert_eq!(tool.guard().wait().code(), Some(0));

    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    let json = object(&line);
    assert_eq!(json["type"], "started");
    assert_eq!(ready, format!("ready pid={}", json["pid"]));
    assert_eq!(json["changed"].as_array().unwrap().len(), 200);
    let first = json!({"name": "many_000", "before": 0, "after": 1, "sites": 2});
    assert_eq!(json["changed"][0], first);
    assert_eq!(json["version"], 1);
    assert_eq!(tool.ask("run", "round"), "round 1 hits=220");
}

#[test]
fn standard_output_is_only_the_programs() {
    for file in program_forms("service") {
        // Its first line has its pid.
        let below_pid = |run: Run| run.answer().split_once('\n').unwrap().1.to_owned();
        let direct = below_pid(run_command(Command::new(&file).args(["1", "2"])));
        for flags in [
            "-json",
            "-json -count",
            "-count",
            "-json -watch tick",
            "-json -wait",
            "-json -follow -wait",
        ] {
            let mut tool = command(["trace", "-disable-all"]);
            tool.args(flags.split(' '))
                .arg("-prog")
                .arg(&file)
                .args(["--", "1", "2"]);
            let traced = run_command(&mut tool);
            assert_eq!(traced.said().is_empty(), flags == "-count", "{flags}");
            assert_eq!(below_pid(traced), direct, "{flags}");
        }
    }
}

#[test]
fn output_file_has_only_our_lines() {
    let scratch = Scratch::new();
    for file in program_forms("service") {
        let answer = scratch.file("answer");
        let lines = |flags: &str| {
            let mut tool = command(["trace", "-wait", "-enable", "tick", "-o"]);
            tool.arg(&answer)
                .args(flags.split(' '))
                .arg("-prog")
                .arg(&file)
                .args(["--", "1", "2"]);
            let run = run_command(&mut tool);
            assert_eq!((run.code, &*run.stderr), (Some(0), ""), "{flags}");
            fs::read_to_string(&answer).unwrap()
        };
        assert_eq!(lines("-format plain"), "tick 0 -> 1, 1 site\n");
        let types = |flags: &str| -> Vec<Value> {
            lines(flags)
                .lines()
                .map(|line| object(line)["type"].clone())
                .collect()
        };
        assert_eq!(types("-json"), ["started"]);
        assert_eq!(types("-json -follow"), ["started"]);
        assert_eq!(
            types("-json -count -watch tick"),
            ["started", "hit", "hit", "count"]
        );
    }
}

#[test]
fn program_gets_its_arguments_environment_and_streams() {
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
fn name_without_a_slash_is_searched_in_path() {
    let service = program("terminating");
    let directory = service.parent().unwrap();
    let trace = || command(["trace", "-prog", "terminating.exe"]);
    assert!(
        run_command(trace().env("PATH", directory))
            .answer()
            .contains("handler finished")
    );
    let error = run_command(trace().env("PATH", "/nowhere").current_dir(directory)).failure();
    assert!(
        error.contains("cannot run terminating.exe: No such file"),
        "{error}"
    );
    assert!(error.contains("the program was not started"), "{error}");
    assert!(
        error.contains("the file in this directory is ./terminating.exe"),
        "{error}"
    );
}

#[test]
fn errors_are_found_before_the_program_runs() {
    let directory = Directory::new("untraceable");
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
            directory.0.join("missing"),
            "No such file or directory",
        ),
        ("trace", directory.0.clone(), "is not a regular file"),
    ] {
        let error = run_on(line, &file).failure();
        assert!(error.contains(why), "{error}");
        assert!(error.contains("the program was not started"), "{error}");
    }
    let file = directory.copy(&program("terminating"), "not_executable");
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
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
fn verbose_prints_the_pid_and_quiet_nothing() {
    let verbose = run_on("trace -v -disable-all", &program("terminating"));
    assert!(
        verbose.stderr.contains("terminating.exe as process "),
        "{verbose:?}"
    );
    assert!(
        verbose
            .stderr
            .contains("skipped, already disabled: collatz"),
        "{verbose:?}"
    );
    assert_eq!(
        run_on("trace -q -disable-all", &program("terminating")).stderr,
        ""
    );
    assert_eq!(run("trace -q -prog /nowhere/x").code, Some(1));
}

#[test]
fn failures_to_execute_come_with_a_hint() {
    let directory = Directory::new("unexecutable");
    let copied = |name: &str| directory.copy(&fixture("gen_ocaml_2.pie"), name);
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    };

    mode(&copied("plain"), 0o644);
    let path = std::env::join_paths([&directory.0]).unwrap();
    let mut tool = command(["trace", "-prog", "plain"]);
    let error = run_command(tool.env("PATH", path)).failure();
    assert!(
        error.contains("cannot run plain: Permission denied; "),
        "{error}"
    );
    assert!(
        error.contains("of that name is in PATH, but cannot be executed"),
        "{error}"
    );

    // Root cannot enter the directory either, without the capabilities that permit it.
    let closed = directory.0.join("closed");
    fs::create_dir(&closed).unwrap();
    copied("closed/program");
    mode(&closed, 0);
    let mut tool = Command::new("setpriv");
    if geteuid().is_root() {
        tool.arg("--bounding-set=-dac_override,-dac_read_search");
    }
    tool.args([env!("CARGO_BIN_EXE_ocaml-probes"), "trace", "-prog"]);
    let run = run_command(tool.arg(closed.join("program")));
    mode(&closed, 0o755);
    let error = run.failure();
    assert!(
        error.contains("closed/program: Permission denied; the"),
        "{error}"
    );
    assert!(
        error.contains("does this user have permission to enter the directories"),
        "{error}"
    );
}

/// Gives a file capabilities, by setcap(8), which `starter` starts.
fn set_capabilities(starter: &[&str], capabilities: &str, file: &Path) {
    let path = std::env::var("PATH").unwrap() + ":/usr/sbin:/sbin";
    let mut setcap = Command::new("env");
    setcap
        .args(starter)
        .args(["setcap", capabilities])
        .arg(file);
    assert!(setcap.env("PATH", path).status().unwrap().success());
}

// promise: Launching programs: A program is not started without the privileges that its file gives it (set-user-ID bit,
//    capabilities)
#[test]
fn program_with_privileges_of_its_file_is_refused() {
    // The user `nobody` possibly cannot enter the build directory.
    let directory = Directory::new("privileged");
    let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
    let trace =
        |file: &Path| run_command(as_ordinary_user(&tool).args(["trace", "-prog"]).arg(file));
    let copied = |name| directory.copy(&program("terminating"), name);
    let (setuid, capable) = (copied("setuid"), copied("capable"));
    fs::set_permissions(&setuid, Permissions::from_mode(0o4755)).unwrap();
    if !geteuid().is_root() {
        // The user's own program gives nobody else's privilege, nor do capabilities of a namespace that is not ours.
        let starter = ["unshare", "--user", "--map-root-user"];
        set_capabilities(&starter, "cap_net_raw+ep", &capable);
        for file in [&setuid, &capable] {
            assert!(trace(file).answer().starts_with("handler fooia 5\n"));
        }
        return;
    }
    set_capabilities(&[], "cap_net_raw+ep", &capable);
    for (file, why) in [
        (
            &setuid,
            "is setuid or setgid, and would run without that privilege",
        ),
        (
            &capable,
            "has file capabilities, and would run without them",
        ),
    ] {
        let error = trace(file).failure();
        let message =
            format!("{why} if it was traced from its start; the program was not started\n");
        assert!(error.contains(&message), "{error}");
        let hint = "hint: start it without ocaml-probes, then `attach` to it with sudo\n";
        assert!(error.ends_with(hint), "{error}");
        // Root has the privileges, and keeps them.
        assert!(
            run_on("trace", file)
                .answer()
                .starts_with("handler fooia 5\n")
        );
    }
    // Capabilities that are only inheritable give nothing to a user without any.
    set_capabilities(&[], "cap_net_raw+i", &capable);
    assert!(trace(&capable).answer().starts_with("handler fooia 5\n"));
}

#[test]
fn memory_limit_is_an_error_or_no_obstacle() {
    const MIB: usize = 1 << 20;
    let program = program("terminating");
    let mut refused = 0;
    // From where the tool itself cannot be loaded, to where there is enough for everything.
    for limit in (8 * MIB..256 * MIB).step_by(MIB / 2) {
        let mut tool = Command::new("prlimit");
        tool.arg(format!("--as={limit}")).args([
            "--core=0",
            env!("CARGO_BIN_EXE_ocaml-probes"),
            "trace",
            "-prog",
        ]);
        // A backtrace takes memory, too.
        let run = run_command(tool.arg(&program).env_remove("RUST_BACKTRACE"));
        if run
            .stderr
            .contains("failed to allocate an alternative stack")
        {
            // Memory that Rust's runtime needs for a thread before any of our code runs.
            assert_eq!(run.stdout, "", "{run:?}");
            continue;
        }
        assert!(!run.stderr.contains("panicked"), "{run:?}");
        if run.code == Some(1) && run.stderr.starts_with("ocaml-probes: ") {
            let error = run.failure();
            let reasons = [
                "too little memory: 8 MiB have to be free to begin; nothing was changed",
                "terminating.exe: Resource temporarily unavailable; the program was",
            ];
            assert!(reasons.iter().any(|it| error.contains(it)), "{error}");
            assert!(error.contains("`ulimit -v`"), "{error}");
            refused += 1;
        } else if run.stdout.contains("handler finished") {
            break;
        }
    }
    assert!(refused > 0, "the tool reported no limit as an error");
}
