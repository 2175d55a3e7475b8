//! Output streams: closed pipes, terminals, colours, files, messages as JSON, -quiet and -verbose.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid, pipe2};
use serde_json::Value;
use test_support::{Guard, Scratch, Talker, eventually, fixture, program};

use crate::support::{
    Run, command, full_pipe, is_observed, object, rest_of_full_pipe, run, run_command, run_on,
    started_by, states,
};

/// A pipe that no program inherits: its reading end, and its writing end.
fn pipe() -> (File, File) {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC).unwrap();
    (reader.into(), writer.into())
}

/// Runs the tool on a terminal; returns what it shows, with the terminal's line ends.
fn on_terminal(words: &str, environment: &[(&str, &str)]) -> Run {
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let mut script = Command::new("script");
    script.args(["-qec", &format!("'{tool}' {words}"), "/dev/null"]);
    script
        .env_remove("NO_COLOR")
        .envs(environment.iter().copied());
    run_command(&mut script)
}

#[test]
fn tool_exits_quietly_if_its_pipe_is_closed() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let many = program("many");
    for line in [
        "help".to_owned(),
        format!("info -json -pid {}", target.pid()),
        format!(
            "attach -quiet -format plain -enable plain -pid {}",
            target.pid()
        ),
        "list -sites -prog many.exe".to_owned(),
    ] {
        let (reader, writer) = pipe();
        drop(reader);
        let (mut errors, stderr) = pipe();
        let mut tool = command(line.split(' '));
        tool.current_dir(many.parent().unwrap());
        let mut guard = Guard::spawn(tool.stdout(writer).stderr(stderr));
        drop(tool);
        assert_eq!(guard.wait().code(), Some(0), "{line}");
        assert_eq!(std::io::read_to_string(&mut errors).unwrap(), "", "{line}");
    }
    assert!(states(target.pid()).contains("plain enabled"));
}

#[test]
fn answer_that_cannot_be_written_is_an_error() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (mut errors, stderr) = pipe();
    let mut tool = command(["version"]);
    let mut guard = Guard::spawn(tool.stdout(full).stderr(stderr));
    drop(tool);
    assert_eq!(guard.wait().code(), Some(1));
    let errors = std::io::read_to_string(&mut errors).unwrap();
    assert_eq!(
        errors,
        "ocaml-probes: cannot write the output: No space left on device\n"
    );
}

#[test]
fn output_that_does_not_block_is_waited_for() {
    for (line, is_answer) in [("help", true), ("info -pid 4194305", false)] {
        let (reader, writer) = full_pipe();
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        let mut tool = command(line.split(' '));
        if is_answer {
            tool.stdout(writer).stderr(Stdio::null());
        } else {
            tool.stdout(Stdio::null()).stderr(writer);
        }
        let mut guard = Guard::spawn(&mut tool);
        drop(tool);
        eventually("it waits for room, or has given up", || {
            let call = fs::read_to_string(format!("/proc/{}/syscall", guard.pid()));
            // poll(2)
            let waits = call.is_ok_and(|call| call.starts_with("7 "));
            (waits || !guard.is_running()).then_some(())
        });
        let usual = run(line);
        let expected = if is_answer {
            usual.stdout
        } else {
            usual.stderr
        };
        assert_eq!(rest_of_full_pipe(reader), expected);
        assert_eq!(guard.wait().code(), usual.code);
    }
}

// promise: Observations: A signal that comes when the observation is over already does not cut the answer off
#[test]
fn signal_after_the_end_cuts_no_answer_off() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let (reader, writer) = full_pipe();
    let mut tool = command(["count", "-quiet", "-for", "10ms", "-pid", &pid.to_string()]);
    let mut guard = Guard::spawn(tool.stdout(writer));
    drop(tool);
    eventually("it writes its answer", || {
        let call = fs::read_to_string(format!("/proc/{}/syscall", guard.pid())).unwrap();
        // write(2)
        call.starts_with("1 0x1 ").then_some(())
    });
    assert!(!is_observed(pid));
    kill(Pid::from_raw(guard.pid()), Signal::SIGINT).unwrap();
    let answer = rest_of_full_pipe(reader);
    assert!(answer.contains("0 plain\n"), "{answer}");
    assert_eq!(guard.wait().code(), Some(0));
}

#[test]
fn failed_command_leaves_no_new_file() {
    let scratch = Scratch::new();
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let (new, kept) = (scratch.file("new"), scratch.file("kept"));
    fs::write(&kept, "an earlier answer").unwrap();
    for line in [
        "count -pid 4194305".to_owned(),
        format!("watch -pid {} -probe nosuch", target.pid()),
        format!("attach -pid {} -enable nosuch -for 100ms", target.pid()),
    ] {
        let mut tool = command(line.split(' '));
        run_command(tool.arg("-o").arg(&new)).failure();
        assert!(!new.exists(), "{line}");
        let mut tool = command(line.split(' '));
        run_command(tool.arg("-o").arg(&kept)).failure();
        assert_eq!(fs::read(&kept).unwrap(), b"an earlier answer", "{line}");
    }
    // An answer is in the file, even an empty one.
    let mut tool = command(["count", "-for", "10ms", "-pid", &target.pid().to_string()]);
    run_command(tool.arg("-o").arg(&new)).answer();
    assert!(new.exists());
}

#[test]
fn full_disk_error_names_the_file() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let file = fixture("gen_ocaml_2.pie");
    // The write fails at the end, at an interval, after a change, and where an answer is written part by part.
    for line in [
        format!("count -for 1ms -pid {pid}"),
        format!("count -interval 1ms -pid {pid}"),
        format!("attach -enable plain -pid {pid}"),
        format!("list -functions -prog {}", file.display()),
    ] {
        let line = format!("{line} -quiet -o /dev/full");
        let tool = command(line.split(' ')).output().unwrap();
        let said = String::from_utf8(tool.stderr).unwrap();
        assert_eq!(tool.status.code(), Some(1), "{line}: {said}");
        let why = "cannot write the output to /dev/full: No space left on device";
        assert_eq!(said.matches(why).count(), 1, "{line}: {said}");
        assert!(!is_observed(pid));
    }
}

#[test]
fn completed_change_is_not_reported_as_failed() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (mut errors, stderr) = pipe();
    let line = format!(
        "attach -quiet -format plain -pid {} -enable plain",
        target.pid()
    );
    let mut tool = command(line.split(' '));
    let mut guard = Guard::spawn(tool.stdout(full).stderr(stderr));
    drop(tool);
    assert_eq!(guard.wait().code(), Some(1));
    assert_eq!(
        std::io::read_to_string(&mut errors).unwrap(),
        "ocaml-probes: cannot write the output: No space left on device; the probes were changed\n"
    );
    assert!(states(target.pid()).contains("plain enabled"));
}

#[test]
fn completed_removal_is_not_reported_as_failed() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    crate::count_functions::start_observing("count", "-probe plain", pid).kill();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let line = format!("observe -clean -quiet -format plain -pid {pid}");
    let mut tool = command(line.split(' '));
    let mut guard = Guard::spawn(tool.stdout(full).stderr(Stdio::piped()));
    assert_eq!(guard.wait().code(), Some(1));
    let errors = guard.child().stderr.take().unwrap();
    assert_eq!(
        std::io::read_to_string(errors).unwrap(),
        "ocaml-probes: cannot write the output: No space left on device; the observation was removed\n"
    );
    assert!(!is_observed(pid));
}

#[test]
fn file_that_cannot_be_emptied_ends_the_observation() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let file = memfd_create(c"answer", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    fs::write(&path, "the last answer").unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    let line = format!("count -q -probe plain -for 1h -pid {pid} -o {path}");
    let mut tool = command(line.split(' '));
    let mut guard = Guard::spawn(tool.stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(guard.wait().code(), Some(1));
    let errors = std::io::read_to_string(guard.child().stderr.take().unwrap()).unwrap();
    let why = format!("ocaml-probes: cannot write the output to {path}: Operation not permitted\n");
    assert!(errors.ends_with(&why), "{errors}");
    assert!(!is_observed(pid));
}

#[test]
fn closed_standard_error_does_not_matter() {
    let (reader, writer) = pipe();
    drop(reader);
    let mut tool = command(["info", "-pid", "0"]);
    let mut guard = Guard::spawn(tool.stdout(Stdio::null()).stderr(writer));
    assert_eq!(guard.wait().code(), Some(2));
}

#[test]
fn unread_messages_keep_no_command_from_ending() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let start = |time: &str| {
        let (reader, stderr) = full_pipe();
        let line = format!("count -probe plain -for {time} -pid {pid}");
        let mut tool = command(line.split(' '));
        let guard = Guard::spawn(tool.stdout(Stdio::null()).stderr(stderr));
        (guard, reader)
    };
    let (mut tool, _reader) = start("10ms");
    assert_eq!(tool.wait().code(), Some(0));
    assert!(!is_observed(pid));

    let (mut tool, mut reader) = start("1h");
    eventually("it has given up to wait for room", || {
        // ppoll(2): it waits for signals, and for the time to read.
        let call = fs::read_to_string(format!("/proc/{}/syscall", tool.pid())).unwrap();
        call.starts_with("271 ").then_some(())
    });
    reader.read_exact(&mut [0; 4096]).unwrap();
    kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(tool.wait().code(), Some(0));
    assert_eq!(
        rest_of_full_pipe(reader),
        "1 message was dropped here: standard error was not read\n"
    );
}

#[test]
fn unwritable_standard_output_is_an_error() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let attach = format!("attach -enable plain -pid {}", target.pid());
    for line in ["version", &attach] {
        let mut tool = command(line.split(' '));
        tool.stdout(File::open("/dev/null").unwrap());
        let mut guard = Guard::spawn(tool.stderr(Stdio::piped()));
        assert_eq!(guard.wait().code(), Some(1), "{line}");
        let errors = guard.child().stderr.take().unwrap();
        assert_eq!(
            std::io::read_to_string(errors).unwrap(),
            "ocaml-probes: cannot write the output: Bad file descriptor\n"
        );
    }
    assert!(states(target.pid()).contains("plain disabled"));
}

#[test]
fn limit_of_file_size_leaves_no_observation() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let (scratch, pid) = (Scratch::new(), target.pid());
    let line = format!("count -probe plain -interval 1ms -for 1h -pid {pid} -o");
    let mut tool = command(line.split(' '));
    tool.arg(scratch.file("answer"));
    let run = run_command(&mut started_by("prlimit --fsize=4096", &tool));
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains(": File too large"), "{run:?}");
    assert!(!is_observed(pid));
}

// promise: Bad input: A file of the tool's own that is longer than files may be (ulimit -f) does not end an observation
#[test]
fn limit_of_file_size_ends_no_observation() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    // The kernel's code in the process is copied to a file in memory.
    let line = format!("count -fn * -for 500ms -pid {}", target.pid());
    let begun = Instant::now();
    let run = run_command(&mut started_by(
        "prlimit --fsize=4096",
        &command(line.split(' ')),
    ));
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(begun.elapsed() >= Duration::from_millis(500), "{run:?}");
    assert!(run.stderr.contains("File too large"), "{run:?}");
}

#[test]
fn format_is_table_on_terminals_and_plain_elsewhere() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let line = format!("info -pid {}", target.pid());
    assert!(run(&line).answer().starts_with("flag disabled\n"));
    let shown = on_terminal(&line, &[]).answer();
    assert!(
        shown.contains(" probe   | state    | counter | sites "),
        "{shown}"
    );
    let shown = on_terminal(&format!("{line} -format plain"), &[]).answer();
    assert!(shown.starts_with("flag disabled\r\n"), "{shown}");
}

#[test]
fn colours_are_for_terminals_unless_no_color_set() {
    assert!(!run("help").answer().contains('\u{1b}'));
    assert!(
        on_terminal("help", &[("TERM", "xterm")])
            .answer()
            .contains('\u{1b}')
    );
    let asked = on_terminal("help", &[("TERM", "xterm"), ("NO_COLOR", "1")]);
    assert!(!asked.answer().contains('\u{1b}'));
}

#[test]
fn everything_is_an_object_with_json() {
    let absent = object(&run("info -json -pid 4194305").stderr);
    let kind = |object: &Value| object["kind"].as_str().unwrap().to_owned();
    assert_eq!(kind(&absent), "process.not_found");
    assert_eq!(absent["message"], "no process 4194305");
    assert_eq!(absent["pid"], 4_194_305);
    assert!(absent["hint"].is_string());
    for senseless in [
        "info -json",
        "info -j -pid x",
        "inf -form=json -pid",
        "attch -format json",
        "attach -enable -json -json",
        "info -pid 7 -json -format plain",
    ] {
        let run = run(senseless);
        assert_eq!(
            (run.code, kind(&object(&run.stderr))),
            (Some(2), "usage".to_owned())
        );
    }
    // Not asked for JSON: the value of another flag, and the arguments of a program.
    for text in ["attach -enable -json", "trace -- -json"] {
        assert!(run(text).stderr.starts_with("ocaml-probes: "), "{text}");
    }

    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    for actions in ["-disable-all", "-enable-all -for 1ms"] {
        let line = format!("attach -json -v {actions} -pid {}", target.pid());
        let run = run(&line);
        let said: Vec<Value> = run.stderr.lines().map(object).collect();
        assert!(said.iter().any(|it| it["type"] == "step"), "{said:?}");
        assert!(said.iter().any(|it| it["type"] == "note"), "{said:?}");
        assert!(said.iter().all(|it| it["pid"] == target.pid()), "{said:?}");
    }
}

#[test]
fn answer_goes_into_the_file_of_o() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let (scratch, pid) = (Scratch::new(), target.pid());
    let file = scratch.file("answer");
    for (line, expected) in [
        (
            "attach -q -enable plain".to_owned(),
            "plain 0 -> 1, 1 site\n",
        ),
        (
            "attach -q -disable plain -for 1ms".to_owned(),
            "plain 1 -> 0, 1 site\nplain 0 -> 1, 1 site\n",
        ),
        (
            "info".to_owned(),
            "flag disabled\nplain enabled\nwatched disabled\n",
        ),
        ("count -q -for 1ms -probe plain".to_owned(), "0 0.0 plain\n"),
        (
            "latency -q -for 1ms -pair plain,watched".to_owned(),
            "0 0 0 0 0 0 0 0 0 0 plain,watched\n",
        ),
        ("watch -q -for 1ms -probe plain".to_owned(), ""),
        ("observe -clean".to_owned(), &format!("{pid} 0\n")),
    ] {
        fs::write(
            &file,
            "what was there before, which is longer than any answer, and is removed",
        )
        .unwrap();
        let mut tool = command(format!("{line} -pid {pid} -output").split(' '));
        let run = run_command(tool.arg(&file));
        assert_eq!(
            (run.code, &*run.stdout, &*run.stderr),
            (Some(0), "", ""),
            "{line}"
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), expected, "{line}");
    }
    assert_eq!(run_command(command(["ps", "-o"]).arg(&file)).answer(), "");
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .contains(&format!("{pid} "))
    );
    for line in ["version", "list -prog gen_ocaml_2.pie"] {
        let mut tool = command(line.split(' '));
        tool.current_dir(fixture("gen_ocaml_2.pie").parent().unwrap());
        let shown = run_command(&mut tool).answer();
        assert_eq!(run_command(tool.arg("-o").arg(&file)).answer(), "");
        assert_eq!(fs::read_to_string(&file).unwrap(), shown, "{line}");
    }
}

#[test]
fn file_that_cannot_be_written_changes_nothing() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let line = format!("attach -pid {} -enable plain -o /nowhere/x", target.pid());
    let error = run(&line).failure();
    assert_eq!(
        error,
        "ocaml-probes: cannot write /nowhere/x: No such file or directory\n"
    );
    assert!(states(target.pid()).contains("plain disabled"));
}

// promise: Bad input: A command that fails before it has begun leaves the file of `-o` as it was (11)
#[test]
fn failed_command_leaves_its_file() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let (scratch, pid) = (Scratch::new(), target.pid());
    let file = scratch.file("answer");
    fs::write(&file, "the last answer").unwrap();
    let traced = fixture("gen_ocaml_2.pie");
    let traced = traced.display();
    for line in [
        "info -pid 4194305",
        "count -pid 4194305",
        "list -prog /nowhere",
        "list -functions -pid 4194305",
        &format!("attach -enable nothing -pid {pid}"),
        &format!("attach -follow -enable-all -pid {}", std::process::id()),
        &format!("count -probe nothing -pid {pid}"),
        &format!("watch -probe nothing -pid {pid}"),
        "trace -prog /nowhere",
        "trace -follow -prog /nowhere",
        &format!("trace -count -enable nothing -prog {traced}"),
    ] {
        let mut tool = command(line.split(' '));
        run_command(tool.arg("-o").arg(&file)).failure();
        let kept = fs::read_to_string(&file).unwrap();
        assert_eq!(kept, "the last answer", "{line}");
    }
}

#[test]
fn file_has_only_what_the_command_answers() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let (scratch, pid) = (Scratch::new(), target.pid());
    let file = scratch.file("answer");
    let plain = fixture("no_probes.pie");
    for line in [
        format!("attach -release-dead -pid {pid}"),
        format!("watch -for 1ms -probe plain -pid {pid}"),
        format!("trace -follow -wait -prog {}", plain.display()),
    ] {
        fs::write(&file, "the last answer").unwrap();
        let mut tool = command(line.split(' '));
        run_command(tool.arg("-o").arg(&file)).answer();
        assert_eq!(fs::read_to_string(&file).unwrap(), "", "{line}");
    }
}

#[test]
fn picture_without_room_keeps_the_old_one() {
    let target = Talker::start(&fixture("timed.pie"));
    let scratch = Scratch::new();
    let picture = scratch.file("picture.svg");
    fs::write(&picture, "the old picture").unwrap();
    let line = format!(
        "latency -q -for 1ms -pair start,stop -pid {} -svg",
        target.pid()
    );
    let mut tool = command(line.split(' '));
    let run = run_command(&mut started_by("prlimit --fsize=100", tool.arg(&picture)));
    assert_eq!(run.code, Some(1), "{run:?}");
    let why = "picture.svg: File too large; the file is as it was before\n";
    assert!(run.stderr.ends_with(why), "{run:?}");
    assert_eq!(fs::read_to_string(&picture).unwrap(), "the old picture");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
}

#[test]
fn picture_mounted_by_itself_is_written_in_place() {
    let scratch = Scratch::new();
    let picture = scratch.file("picture.svg");
    fs::write(&picture, "the old picture").unwrap();
    let mut unshare = Command::new("unshare");
    if !geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    unshare.args([
        "--mount",
        "sh",
        "-c",
        r#"mount --bind "$0" "$0" && exec "$@""#,
    ]);
    unshare
        .arg(&picture)
        .arg(env!("CARGO_BIN_EXE_ocaml-probes"));
    unshare.args(["profile", "-off-cpu", "-prog", "/bin/sh", "-o"]);
    unshare.arg(&picture).args(["--", "-c", "sleep 3"]);
    let run = run_command(&mut unshare);
    assert_eq!(run.code, Some(0), "{run:?}");
    let written = fs::read_to_string(&picture).unwrap();
    assert!(written.ends_with("</svg>"), "{written}");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
}

// promise: Bad input: `-o` never overwrites the program that is read, nor another file of results (4)
#[test]
fn o_overwrites_no_other_file_of_the_command() {
    let target = Talker::start(&fixture("timed.pie"));
    let scratch = Scratch::new();
    let before = fs::read(fixture("timed.pie")).unwrap();
    let program = scratch.copy(&fixture("timed.pie"), "program");
    let alias = scratch.file("alias");
    symlink("program", &alias).unwrap();
    let refused = |tool: &mut Command, flag: &str| {
        let error = run_command(tool.current_dir(scratch.path())).failure();
        let end = format!(": {flag} names the same file\n");
        assert!(
            error.contains("cannot write ") && error.ends_with(&end),
            "{error}"
        );
    };
    refused(
        command("list -prog program -o".split(' ')).arg(&alias),
        "-prog",
    );
    refused(
        command("trace -prog ./program -wait -o".split(' ')).arg(&program),
        "-prog",
    );
    refused(
        command("trace -count -o alias -prog".split(' ')).arg(&program),
        "-prog",
    );
    assert!(fs::read(&program).unwrap() == before);
    let line = format!(
        "latency -pair start,stop -svg new -o new -pid {}",
        target.pid()
    );
    refused(&mut command(line.split(' ')), "-svg");
    let line = line.replace("-o new", "-o ./new");
    refused(&mut command(line.split(' ')), "-svg");
    assert!(!scratch.file("new").exists());
    // A program without a slash is looked up in PATH.
    let in_path = |line: &str| {
        let mut tool = command(line.split(' '));
        tool.current_dir(scratch.path()).env("PATH", scratch.path());
        tool
    };
    for subcommand in ["gc", "profile", "trace -wait"] {
        let line = format!("{subcommand} -prog program -o program");
        refused(&mut in_path(&line), "-prog");
    }
    let named = scratch.copy(&program, "program.json");
    refused(
        &mut in_path("record -gc -prog program.json -o program.json"),
        "-prog",
    );
    assert!(fs::read(&named).unwrap() == before);
    assert!(fs::read(&program).unwrap() == before);
    for subcommand in ["gc", "trace -wait"] {
        let line = format!("{subcommand} -prog true -o true");
        let other = run_command(command(line.split(' ')).current_dir(scratch.path()));
        assert!(!other.stderr.contains("names the same file"), "{other:?}");
    }
    // What is no file is overwritten by nothing.
    let line = format!(
        "latency -q -for 1ms -pair start,stop -svg /dev/null -o /dev/null -pid {}",
        target.pid()
    );
    assert_eq!(run(&line).answer(), "");
}

#[test]
fn long_answers_end_with_their_sum() {
    let file = program("many");
    let target = Talker::start(&file);
    let pid = target.pid();
    for (line, sum) in [
        (
            "attach -enable-all",
            "200 probes changed, 220 sites switched\n",
        ),
        ("info", "200 probes: 200 enabled, 0 disabled\n"),
        (
            "info -format table",
            "200 probes: 200 enabled, 0 disabled\n",
        ),
        ("count -for 1ms", "200 probes, 0 hits\n"),
    ] {
        let run = run(&format!("{line} -pid {pid}"));
        assert!(run.stderr.ends_with(sum), "{line}: {}", run.stderr);
        assert!(run.answer().lines().count() >= 200, "{line}");
    }
    assert_eq!(run_on("list", &file).stderr, "200 probes, 220 sites\n");
    for short in ["-quiet", "-json"] {
        assert_eq!(run_on(&format!("list {short}"), &file).stderr, "");
    }
    assert_eq!(run_on("list", &program("service")).stderr, "");
}

#[test]
fn quiet_prints_errors_only_and_verbose_each_step() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let attach = |flags: &str| run(&format!("attach -pid {} {flags}", target.pid()));
    let quiet = attach("-quiet -enable plain");
    assert_eq!(
        (quiet.code, &*quiet.stdout, &*quiet.stderr),
        (Some(0), "", "")
    );
    let asked_for = attach("-quiet -format plain -disable plain").answer();
    assert_eq!(asked_for, "plain 1 -> 0, 1 site\n");
    assert_eq!(
        attach("-quiet -json -enable plain").json()["type"],
        "changed"
    );
    for quiet in ["-quiet -enable plain -for 1ms", "-quiet -release-dead"] {
        assert_eq!(attach(quiet).answer(), "", "{quiet}");
    }
    let verbose = attach("-verbose -verbose -disable-all").stderr;
    let lines: Vec<_> = verbose.lines().collect();
    assert!(
        lines[1].contains("gen_ocaml_2.pie has 3 probes; load bias 0x"),
        "{verbose}"
    );
    assert_eq!(lines[2], "skipped, already disabled: flag, watched");
    assert!(lines[3].starts_with("stopped "), "{verbose}");
    assert!(attach("-quiet -disable plain").failure().contains("hint: "));
    let list = run_on("list -v", &program("service")).stderr;
    assert!(
        list.ends_with("service.exe has 4 probes and is position independent\n"),
        "{list}"
    );
}
