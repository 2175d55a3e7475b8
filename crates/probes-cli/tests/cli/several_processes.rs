//! Several processes at once: `info` shows those that it can read, and `attach` checks all before
//! the first is changed.

use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::{Guard, Scratch, Talker, eventually, fixture, process};

use crate::restore::Waiting;
use crate::support::{
    both_forms, command, full_pipe, image, is_observed, object, rest_of_full_pipe, run,
    run_command, states,
};

/// `-pid N` for each.
fn pids(targets: &[Talker]) -> String {
    let flags: Vec<String> = targets
        .iter()
        .map(|target| format!("-pid {}", target.pid()))
        .collect();
    flags.join(" ")
}

#[test]
fn signal_ends_the_preparation_of_several() {
    let targets = both_forms("gen_ocaml_2");
    let [first, second] = [&targets[0], &targets[1]].map(Talker::pid);
    let (reader, stderr) = full_pipe();
    let line = format!("count -probe plain {}", pids(&targets));
    let mut tool = command(line.split(' '));
    let mut guard = Guard::spawn(tool.stdout(Stdio::null()).stderr(stderr));
    drop(tool);
    // To report this, the tool waits up to a second for room in the pipe.
    eventually("the first is observed", || is_observed(first).then_some(()));
    kill(Pid::from_raw(guard.pid()), Signal::SIGTERM).unwrap();
    let said = rest_of_full_pipe(reader);
    assert!(!said.contains(&format!("{second}: stopped ")), "{said}");
    assert_eq!(guard.wait().code(), Some(0), "{said}");
    assert!(!is_observed(first) && !is_observed(second));
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

    let stopped = run(&format!("attach {} -disable plain", pids(&targets))).stderr;
    for (line, target) in stopped.lines().zip(&targets) {
        let start = format!("{}: stopped ", target.pid());
        assert!(line.starts_with(&start), "{stopped}");
    }
    run(&format!("attach {} -enable plain", pids(&targets))).answer();

    let line = format!("attach -json {} -disable plain", pids(&targets));
    let answer = run(&line).answer();
    for (line, target) in answer.lines().zip(&targets) {
        let json = object(line);
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

// promise: Objects that come and go: If one of several processes cannot be changed, none is (4
//    processes, compared byte by byte)
#[test]
fn one_unsuitable_process_keeps_all_unchanged() {
    let mut targets = both_forms("gen_ocaml_2");
    targets.extend(both_forms("gen_ocaml_dot1"));
    let before: Vec<_> = targets.iter().map(|target| image(target.pid())).collect();
    let refused = run(&format!("attach {} -enable plain", pids(&targets)));
    assert_eq!((refused.code, &refused.stdout[..]), (Some(1), ""));
    for target in &targets[2..] {
        let start = format!("ocaml-probes: {}: ", target.pid());
        let why = "no probe \"plain\" in ";
        let mut lines = refused.stderr.lines();
        assert!(
            lines.any(|line| line.starts_with(&start) && line.contains(why)),
            "{}",
            refused.stderr
        );
    }
    assert!(
        refused
            .stderr
            .ends_with("ocaml-probes: failed for 2 of 4 processes; no process was changed\n"),
        "{}",
        refused.stderr
    );
    let gone = format!("attach {} -pid 4194305 -enable-all", pids(&targets));
    assert_eq!(run(&gone).code, Some(1));
    for (target, before) in targets.iter().zip(before) {
        assert!(image(target.pid()) == before);
    }
}

// promise: Objects that come and go: If one of several processes is traced, none is changed
#[test]
fn one_traced_process_keeps_all_unchanged() {
    let targets = both_forms("gen_ocaml_2");
    let [first, second] = [targets[0].pid(), targets[1].pid()];
    let before = image(first);
    let mut gdb = Command::new("gdb");
    gdb.args(["-q", "-nx", "-ex", r#"printf "attached\n""#, "-p"]);
    gdb.arg(second.to_string()).env("DEBUGINFOD_URLS", "");
    let mut gdb = Talker::spawn(gdb.stderr(std::process::Stdio::null()));
    gdb.expect("attached");
    let refused = run(&format!("attach {} -enable plain", pids(&targets)));
    assert_eq!((refused.code, &refused.stdout[..]), (Some(1), ""));
    let why = format!(
        "ocaml-probes: {second}: process {second} is already traced by pid {} (gdb); nothing was changed\n",
        gdb.pid()
    );
    assert!(refused.stderr.starts_with(&why), "{}", refused.stderr);
    let end = "ocaml-probes: failed for 1 of 2 processes; no process was changed\n";
    assert!(refused.stderr.ends_with(end), "{}", refused.stderr);
    assert!(image(first) == before);
}

#[test]
fn each_process_is_shown_in_every_format() {
    let targets = both_forms("gen_ocaml_2");
    let pids = pids(&targets);
    let alone = |line: &str, target: &Talker| {
        let answer = run(&format!("{line} -pid {}", target.pid())).answer();
        let lines = answer.lines().map(str::to_owned);
        lines.collect::<Vec<String>>()
    };
    for line in ["info", "info -sites"] {
        let with_pid = |target: &Talker| {
            let lines = alone(line, target).into_iter();
            lines
                .map(|line| format!("{} {line}\n", target.pid()))
                .collect::<String>()
        };
        let expected: String = targets.iter().map(with_pid).collect();
        assert_eq!(run(&format!("{line} {pids}")).answer(), expected);
    }
    let expected: Vec<String> = targets
        .iter()
        .flat_map(|it| alone("info -json", it))
        .collect();
    let json = run(&format!("info -json {pids}")).answer();
    assert_eq!(json.lines().collect::<Vec<_>>(), expected);

    let table = run(&format!("info -format table {pids}")).answer();
    let heads = table
        .lines()
        .filter(|line| line.trim_start().starts_with("pid "));
    assert_eq!(heads.count(), 2, "{table}");
    for target in &targets {
        let row = format!(" {} ", target.pid());
        let rows = table.lines().filter(|line| line.starts_with(&row));
        assert_eq!(rows.count(), 3, "{table}");
    }
}

#[test]
fn readable_processes_are_shown_though_another_is_not() {
    let targets = both_forms("gen_ocaml_2");
    let mut exited = Guard::spawn(&mut Command::new("true"));
    eventually("it is a zombie", || {
        (process::state(exited.pid()) == Some('Z')).then_some(())
    });
    let (impossible_pid, line) = (4_194_305, pids(&targets));
    let shown = run(&format!(
        "info -pid {} -pid {impossible_pid} {line}",
        exited.pid()
    ));
    assert_eq!(shown.code, Some(1));
    assert_eq!(shown.stdout, run(&format!("info {line}")).answer());
    let zombie = format!(
        "ocaml-probes: {0}: process {0} has exited and is a zombie: ",
        exited.pid()
    );
    assert!(shown.stderr.starts_with(&zombie), "{}", shown.stderr);
    let end = format!(
        "ocaml-probes: {impossible_pid}: no process {impossible_pid}\n\
         hint: it has exited, or the pid is one of another pid namespace (a container)\n\
         ocaml-probes: failed for 2 of 4 processes\n"
    );
    assert!(shown.stderr.ends_with(&end), "{}", shown.stderr);
    exited.wait();
}

#[test]
fn processes_are_selected_by_program_name() {
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
    // The tool itself does not match, whatever it is called.
    let tool = env!("CARGO_BIN_EXE_ocaml-probes").as_ref();
    let tool = scratch.copy(tool, &format!("{name}-a-tool"));
    let words = format!(
        "attach -enable plain -pid {} -name {name}-a",
        targets[1].pid()
    );
    let changed = run_command(Command::new(tool).args(words.split(' '))).answer();
    let line = |target: &Talker| format!("{} plain 0 -> 1, 1 site\n", target.pid());
    assert_eq!(changed, line(&targets[1]) + &line(&targets[0]));
    let on = |target: &Talker| states(target.pid()).contains("plain enabled");
    assert_eq!(targets.each_ref().map(on), [true, true, false]);

    // `-name` has to match from the start of a program's name.
    for line in [
        format!("attach -enable plain -name {name}-c"),
        format!("attach -enable plain -name ked-{}", std::process::id()),
        format!("info -name {name}-c"),
    ] {
        let none = run(&line).failure();
        let name = line.split(' ').next_back().unwrap();
        assert_eq!(
            none,
            format!(
                "ocaml-probes: no process with OCaml probes runs a program whose name matches \"{name}\"\n\
                 hint: `ocaml-probes ps` lists the processes with probes; `count -fn GLOB` counts functions of any program, `latency -fn GLOB` times them\n"
            )
        );
    }
    let shown = run(&format!("info -name {name}")).answer();
    let start = |target: &Talker| format!("{} ", target.pid());
    for start in targets.each_ref().map(start) {
        let lines = shown.lines().filter(|line| line.starts_with(&start));
        assert_eq!(lines.count(), 3, "{shown}");
    }
}

#[test]
fn all_are_restored_when_the_tool_is_interrupted() {
    let targets = both_forms("gen_ocaml_2");
    let before: Vec<_> = targets.iter().map(|target| image(target.pid())).collect();
    let flags = format!("{} -enable plain -for 1h", pids(&targets));
    let mut waiting = Waiting::start_on(&flags);
    let second = waiting.line();
    assert!(second.contains(" plain 0 -> 1, "), "{second}");
    waiting.send(Signal::SIGTERM);
    let (code, stdout, stderr) = waiting.wait_for_exit();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(stdout.matches(" plain 1 -> 0, 1 site\n").count(), 2);
    for (target, before) in targets.iter().zip(before) {
        assert!(image(target.pid()) == before);
    }
}

#[test]
fn wait_ends_when_all_processes_have_exited() {
    let targets = both_forms("gen_ocaml_2");
    let flags = format!("{} -enable plain -for 1h", pids(&targets));
    let mut waiting = Waiting::start_on(&flags);
    waiting.line();
    for target in &targets {
        kill(Pid::from_raw(target.pid()), Signal::SIGKILL).unwrap();
    }
    let (code, stdout, stderr) = waiting.wait_for_exit();
    assert_eq!((code, &stdout[..]), (Some(0), ""), "{stderr}");
    assert_eq!(stderr.matches("there is nothing to undo\n").count(), 2);
}
