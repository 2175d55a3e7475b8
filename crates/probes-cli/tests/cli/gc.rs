//! `gc` with programs that write no runtime events; the matrix has those that do.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use serde_json::Value;
use test_support::container::unshare;
use test_support::tmux::Terminal;
use test_support::{
    Scratch, Talker, as_ordinary_user, eventually, fixture, program, program_forms,
};

use crate::count_functions::start_observing;
use crate::support::{
    Directory, blocks_termination, command, full_pipe, object, run, run_command, run_with_input,
};
use crate::waits::TOOL;

/// Whether the test programs have runtime events.
fn is_built_by_ocaml_5() -> bool {
    let events = program("terminating").with_file_name("ocaml5");
    events.join("events.exe").exists()
}

// promise: Runtime events: The collector of a program of OCaml 4 is shown by the calls of its functions, in the same form
//    (2 programs)
#[test]
fn ocaml_4_is_shown_by_functions() {
    if is_built_by_ocaml_5() {
        return;
    }
    for file in program_forms("calls") {
        let mut target = Talker::start(&file);
        let tool = start_observing("gc", "-json -interval 20ms", target.pid());
        target.ask("run 4 200000", "calls");
        let ended = tool.end();
        let last = object(ended.stdout.lines().last().unwrap());
        assert_eq!(
            (&last["at"], &last["from"]),
            (&Value::Null, &"functions".into())
        );
        for unknown in [
            "ocaml",
            "allocated_bytes",
            "promoted_bytes",
            "heap_bytes",
            "lost_words",
        ] {
            assert_eq!(last[unknown], Value::Null, "{unknown}");
        }
        let phases = last["phases"].as_array().unwrap();
        let sum = |what: &str| {
            phases
                .iter()
                .map(|it| it[what].as_u64().unwrap())
                .sum::<u64>()
        };
        let count = |phase: &str| {
            let found = phases.iter().find(|it| it["phase"] == phase).unwrap();
            found["count"].as_u64().unwrap()
        };
        assert!(count("minor") > 0 && count("slice") > 0, "{last}");
        assert_eq!(last["pauses"]["count"], sum("count"));
        assert_eq!(last["pauses"]["total_ns"], sum("total_ns"));
        let domain = &last["domains"][0];
        assert_eq!(domain["count"], last["pauses"]["count"]);
        assert!(domain["share"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn figures_of_functions_say_what_is_unknown() {
    let target = Talker::start(&program("service"));
    let plain = run(&format!("gc -pid {} -for 10ms", target.pid()));
    if !is_built_by_ocaml_5() {
        let why = "has the runtime of OCaml 4, and only that of OCaml 5 writes runtime events: the collector's functions are timed instead";
        assert!(plain.stderr.contains(why), "{plain:?}");
        let answer = plain.answer();
        assert!(
            answer.contains(" allocated - promoted - heap - lost - compactions "),
            "{answer}"
        );
        assert!(!answer.contains("stw domain"), "{answer}");
        let table = run(&format!("gc -pid {} -for 10ms -format table", target.pid())).answer();
        assert!(table.contains("what is allocated is not known"), "{table}");
        let over = run(&format!("gc -pid {} -over 5ms", target.pid()));
        assert_eq!(over.code, Some(2));
        assert!(
            over.stderr.contains("-over needs runtime events"),
            "{over:?}"
        );
    }
}

// promise: Runtime events: `gc` warns of pauses of a program of OCaml 4 of which it sees only a part
#[test]
fn partly_seen_pauses_are_reported() {
    if is_built_by_ocaml_5() {
        return;
    }
    let mut target = Talker::start(&program("stacks"));
    let pid = target.pid();
    target.ask("pause", "pauses");
    let during = run(&format!("gc -pid {pid} -for 10ms"));
    let why = "the process is in a pause that began before the observation and has not ended: it is left out";
    assert!(during.stderr.contains(why), "{during:?}");
    assert!(during.stdout.starts_with("all count 0 "), "{during:?}");
    let tool = start_observing("gc", "-json", pid);
    target.ask("end", "paused");
    let ended = tool.end();
    let why = "1 pause was not seen from beginning to end: the figures are those of the others";
    assert!(ended.stderr.contains(why), "{ended:?}");
}

#[test]
fn bytecode_of_ocaml_4_is_shown_by_functions() {
    if is_built_by_ocaml_5() {
        return;
    }
    let target = Talker::start(&program("bytecode/unprobed.bc"));
    let said = run(&format!("gc -pid {} -for 10ms", target.pid()));
    let note = "the collector's functions are timed";
    assert!(said.stderr.contains(note), "{said:?}");
}

#[test]
fn program_without_runtime_of_ocaml_is_refused() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    assert_eq!(
        run(&format!("gc -pid {pid} -over 5ms -interval 1s")).failure(),
        format!(
            "ocaml-probes: process {pid} writes no runtime events, and has no OCaml runtime with symbols\n"
        )
    );
    let gone = run("gc -pid 2147483647").failure();
    assert!(gone.contains("2147483647"), "{gone}");
}

#[test]
fn it_shows_that_it_goes_on() {
    let target = Talker::start(&program("service"));
    let terminal = Terminal::open(100, 24);
    terminal.type_line(&format!("{TOOL} gc -pid {} >/dev/null", target.pid()));
    let shown = "watching the collector until Ctrl-C: ";
    terminal.wait_until("it goes on", |screen| screen.contains(shown));
    terminal.press(&["C-c"]);
    terminal.wait_until("it is gone", |screen| !screen.contains(shown));
}

#[test]
fn time_ends_although_a_program_writes_no_events() {
    let scratch = Scratch::new();
    for subcommand in ["gc", "record -gc -o events.json"] {
        let line = format!("{subcommand} -for 100ms -prog sh -- -c");
        let mut tool = command(line.split(' '));
        tool.current_dir(scratch.path());
        let said = run_command(tool.arg("sleep 5; echo ended >&2")).stderr;
        let (before, after) = said.split_once("ended\n").unwrap();
        let why = "sh has written no runtime events";
        assert!(before.contains(why) && !after.contains(why), "{said}");
    }
}

#[test]
fn started_program_may_change_user_and_directory() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.file("temporary")).unwrap();
    let mut tool = command(["gc", "-prog", "sh", "--", "-c"]);
    tool.current_dir(scratch.path()).env("TMPDIR", "temporary");
    let said = run_command(tool.arg("cd / && stat -c %a \"$OCAML_RUNTIME_EVENTS_DIR\""));
    let mode = if geteuid().is_root() { "1733" } else { "700" };
    assert_eq!(said.stdout, format!("{mode}\n"), "{said:?}");
}

#[test]
fn status_of_a_started_program_is_ours() {
    let said = run_command(&mut command(["gc", "-prog", "sh", "--", "-c", "exit 7"]));
    assert_eq!(said.code, Some(7));
    assert!(
        said.stderr.contains("sh has written no runtime events"),
        "{said:?}"
    );
    assert!(
        said.stderr.contains("hint: only programs of OCaml 5"),
        "{said:?}"
    );
    // What has just failed is no advice.
    assert!(!said.stderr.contains("gc -prog"), "{said:?}");
    let failed = run_command(&mut command(["gc", "-prog", "true"]));
    assert_eq!(failed.code, Some(1), "{failed:?}");
    let missing = run("gc -prog /none").failure();
    assert!(
        missing.contains("cannot start /none: No such file"),
        "{missing}"
    );
}

// promise: Runtime events: The directory for the files of events stays as long as a process that the program has started uses
//    it, and a message says where it is
#[test]
fn directory_of_events_stays_while_used() {
    let scratch = Scratch::new();
    let of = |script: &str| {
        let mut command = command(["gc", "-prog", "sh", "--", "-c", script]);
        run_command(command.env("TMPDIR", scratch.path()))
    };
    let left = || {
        let entries = fs::read_dir(scratch.path()).unwrap();
        entries.map(|it| it.unwrap().path()).collect::<Vec<_>>()
    };
    let said = of("sleep 1000 > /dev/null 2>&1 & echo $!");
    let pid = said.stdout.trim();
    let [directory] = &left()[..] else {
        panic!("{said:?}, {:?}", left());
    };
    kill(Pid::from_raw(pid.parse().unwrap()), Signal::SIGKILL).unwrap();
    let expected = format!(
        "{} stays, with files of runtime events: process {pid} uses it and runs; remove it later\n",
        directory.display()
    );
    assert!(said.stderr.contains(&expected), "{said:?}");
    fs::remove_dir_all(directory).unwrap();
    of("sleep 1000 > /dev/null 2>&1 & kill $!; wait");
    assert_eq!(left(), Vec::<PathBuf>::new());
}

// promise: Runtime events: The collector of a program of OCaml 4 that is started is shown by the calls of its functions, from the first
//    instruction to the last (2 programs)
#[test]
fn started_program_of_ocaml_4_is_timed() {
    if is_built_by_ocaml_5() {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.file("gc.json");
    for program in program_forms("calls") {
        let mut command = command(["gc", "-json", "-interval", "1ms", "-o"]);
        command.arg(&file).arg("-prog").arg(&program);
        let ended = run_with_input("run 4 200000\n", &command);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("calls leaf="), "{ended:?}");
        let why = "has the runtime of OCaml 4, and only that of OCaml 5 writes runtime events: the collector's functions are timed instead";
        assert!(ended.stderr.contains(why), "{ended:?}");
        let shown = fs::read_to_string(&file).unwrap();
        let last = object(shown.lines().last().unwrap());
        assert_eq!(
            (&last["at"], &last["from"]),
            (&Value::Null, &"functions".into())
        );
        let mut timed = Talker::start(&program);
        let tool = start_observing("gc", "-json", timed.pid());
        timed.ask("run 4 200000", "calls");
        let attached = object(tool.end().stdout.lines().last().unwrap());
        let counts = |gc: &Value| {
            let phases = gc["phases"].as_array().unwrap().iter();
            let mut counts: Vec<_> = phases
                .map(|it| (it["phase"].to_string(), it["count"].as_u64().unwrap()))
                .collect();
            counts.sort();
            counts
        };
        // The started program does the same work, and what it does at its start and end.
        let pairs = counts(&last).into_iter().zip(counts(&attached));
        for ((phase, all), (same, attached)) in pairs {
            assert_eq!(phase, same);
            assert!(
                (attached..=attached + 4).contains(&all),
                "{phase}: {all} {attached}"
            );
        }
    }
    let mut over = command(["gc", "-over", "1ms", "-prog"]);
    let over = run_command(over.arg(program("calls")));
    assert_eq!((over.code, &*over.stdout), (Some(2), ""), "{over:?}");
}

// promise: Runtime events: A program of OCaml 4 that is to write events is started all the same, as what it executes may write some, and
//    that it writes none is said at once (3 commands)
#[test]
fn ocaml_4_is_reported_to_write_no_events() {
    if is_built_by_ocaml_5() {
        return;
    }
    let scratch = Scratch::new();
    for flags in [
        "trace -gc -prog",
        "record -gc -prog",
        "record -gc -fn Calls.leaf -prog",
    ] {
        let mut command = command(flags.split(' '));
        command.arg(program("calls"));
        if flags.starts_with("record") {
            command.arg("-o").arg(scratch.file("trace.json"));
        }
        let said = run_with_input("run 1 10\n", &command);
        assert_eq!(said.code, Some(1), "{flags}: {said:?}");
        assert!(said.stdout.contains("calls leaf="), "{flags}: {said:?}");
        let note = said
            .stderr
            .find("runtime events: only a program that it executes may\n");
        let error = said
            .stderr
            .find("calls.exe has written no runtime events\n");
        assert!(note.unwrap() < error.unwrap(), "{flags}: {said:?}");
    }
}

// promise: Runtime events: A file of events that an earlier process of the same pid has left is not taken for those of the process
//    (3 commands)
#[test]
fn file_of_an_earlier_process_is_ignored() {
    if is_built_by_ocaml_5() {
        return;
    }
    let scratch = Scratch::new();
    let mut calls = Command::new(program("calls"));
    let mut target = Talker::spawn(calls.current_dir(scratch.file("")));
    target.expect("ready");
    let pid = target.pid();
    // Where its own would be.
    let left = scratch.file(&format!("{pid}.events"));
    fs::write(&left, [1; 4096]).unwrap();
    for flags in [
        "watch -events all -for 10ms",
        "count -events minor -for 10ms",
    ] {
        let error = run(&format!("{flags} -pid {pid}")).failure();
        let why = format!(
            "process {pid} has the runtime of OCaml 4, and only that of OCaml 5 writes runtime events"
        );
        assert!(error.contains(&why), "{flags}: {error}");
    }
    let said = run(&format!("gc -pid {pid} -for 10ms"));
    assert!(
        said.stderr.contains("the collector's functions are timed"),
        "{said:?}"
    );
    assert_eq!(fs::read(&left).unwrap(), [1; 4096]);
    // A process that has this pid now, and is no program of OCaml.
    let other = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = other.pid();
    let directory = fs::read_link(format!("/proc/{pid}/cwd")).unwrap();
    assert!(!directory.join(format!("{pid}.events")).exists());
    let error = run(&format!("watch -events all -pid {pid}")).failure();
    assert!(
        error.contains("has no OCaml runtime with symbols"),
        "{error}"
    );
}

#[test]
fn events_of_another_user_are_refused() {
    if !geteuid().is_root() {
        return;
    }
    let target = Talker::start(&program("calls"));
    let directory = Directory::new("nobody");
    let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
    for flags in [
        "gc",
        "gc -over 1ms",
        "watch -events all",
        "count -events all",
        "hist -events all",
    ] {
        let mut nobody = as_ordinary_user(&tool);
        nobody
            .args(flags.split(' '))
            .arg(format!("-pid={}", target.pid()));
        let error = run_command(&mut nobody).failure();
        assert!(
            error.contains(" belongs to uid 0 (root)"),
            "{flags}: {error}"
        );
        assert!(error.ends_with("\nhint: use sudo\n"), "{flags}: {error}");
    }
}

// promise: Launching programs: A signal that a process sends to the tool, which has started a program and waits for it, is passed on to the program
//    (`gc`, `profile`, `record`; while they read and afterwards)
#[test]
fn signals_are_passed_on_to_started_programs() {
    let program = program("calls");
    let scratch = Scratch::new();
    let (file, errors) = (scratch.file("timeline.json"), scratch.file("errors"));
    for (what, answer) in [
        ("gc", "all "),
        ("profile -off-cpu", "waits "),
        ("record -off-cpu -o", "slices "),
    ] {
        for flags in ["", "-for 20ms"] {
            let mut tool = command(what.split(' '));
            if what.ends_with("-o") {
                tool.arg(&file);
            }
            tool.args(flags.split_ascii_whitespace()).arg("-prog");
            tool.arg(&program)
                .stderr(fs::File::create(&errors).unwrap());
            let mut tool = Talker::spawn(&mut tool);
            assert!(tool.line().unwrap().starts_with("ready"));
            eventually("the tool waits for the program", || {
                let said = fs::read_to_string(&errors).unwrap();
                let has_answered = said.lines().any(|line| line.starts_with(answer));
                (blocks_termination(tool.pid()) && has_answered != flags.is_empty()).then_some(())
            });
            kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
            let status = tool.guard().wait();
            assert_eq!(status.code(), Some(143), "{what} {flags}");
        }
    }
}

// promise: Launching programs: A signal to the tool is passed on to the program that it has started, even if the tool cannot write
//    its answer
#[test]
fn program_gets_signals_though_nothing_reads_the_answer() {
    let (_reader, writer) = full_pipe();
    let mut gc = command(["gc", "-quiet", "-for", "20ms", "-prog"]);
    let mut tool = Talker::spawn(gc.arg(program("calls")).stderr(writer));
    assert!(tool.line().unwrap().starts_with("ready"));
    eventually("a thread of the tool waits for signals", || {
        let threads = fs::read_dir(format!("/proc/{}/task", tool.pid())).unwrap();
        (blocks_termination(tool.pid()) && threads.count() == 2).then_some(())
    });
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    // The program held this pipe as well.
    assert_eq!(tool.line(), None);
    assert_eq!(tool.guard().wait().signal(), Some(Signal::SIGTERM as i32));
}

// promise: Launching programs: Without /proc, no program is started that could not be read (3 commands)
#[test]
fn nothing_is_started_without_proc() {
    let scratch = Scratch::new();
    let file = scratch.file("timeline.json");
    for what in ["gc", "profile", "record -gc -o"] {
        let mut unshare = unshare();
        unshare.args(["sh", "-ec", "mount -t tmpfs none /proc; exec \"$0\" \"$@\""]);
        unshare
            .arg(env!("CARGO_BIN_EXE_ocaml-probes"))
            .args(what.split(' '));
        if what.ends_with("-o") {
            unshare.arg(&file);
        }
        let shown = run_command(unshare.args(["-prog", "/bin/echo", "--", "started"]));
        assert_eq!(
            (shown.code, shown.stdout.as_str()),
            (Some(1), ""),
            "{}",
            shown.stderr
        );
        for said in ["/proc is not mounted", "the program was not started"] {
            assert!(shown.stderr.contains(said), "{what}: {}", shown.stderr);
        }
    }
}
