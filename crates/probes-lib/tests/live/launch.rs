//! Programs that are started with their probes set before their first instruction, and otherwise
//! run exactly as without the tool. If their probes cannot be set, they are not started at all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use probes_lib::{
    Action, Actions, Effect, Error, ErrorKind, Launch, ProbeError, ReceivedSignal, Report,
    Selector, State,
};
use test_support::process::{self, children, descriptors};
use test_support::{
    Guard, Scratch, Talker, eventually, fixture, fixture_forms, program, program_forms,
};

use crate::expected;
use crate::own_process::alone;
use crate::session::{Session, all, named};

fn launch(program: &Path, actions: Actions) -> (Talker, Report) {
    let mut command = Command::new(program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let launched = Launch::new(command).actions(actions).spawn();
    let launched = launched.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let report = launched.report().clone();
    let mut talker = Talker::of(Guard::from(launched.into_child()));
    talker.expect("ready");
    (talker, report)
}

/// Everything that `program` prints, run to its exit with its probes set.
fn printed(program: &Path, actions: Actions) -> String {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let launched = Launch::new(command).actions(actions).spawn().unwrap();
    let mut talker = Talker::of(Guard::from(launched.into_child()));
    let mut lines = String::new();
    while let Some(line) = talker.line() {
        lines += &line;
        lines += "\n";
    }
    assert!(talker.guard().wait().success());
    lines
}

#[test]
fn terminating_program_runs_exactly_the_enabled_handlers() {
    let files = ["terminating", "static/terminating"].map(program_forms);
    for file in files.concat() {
        assert_eq!(
            printed(&file, Actions::new()),
            "squares 55\ncollatz 111\nhandlers fooia=0 foobar=0 collatz=0\n"
        );
        assert_eq!(
            printed(&file, named(Action::Enable, "foobar")),
            "handler foobar 4 25\nhandler foobar 2 50\nsquares 55\ncollatz 111\n\
             handlers fooia=0 foobar=2 collatz=0\n"
        );
        assert_eq!(
            printed(
                &file,
                Actions::new().enable(Selector::regexp("fi|co").unwrap())
            ),
            "squares 55\ncollatz 111\nhandlers fooia=0 foobar=0 collatz=112\nhandler finished\n"
        );
        assert_eq!(
            printed(&file, all(Action::Enable)),
            "handler fooia 5\nhandler fooia 4\nhandler foobar 4 25\nhandler fooia 3\n\
             handler fooia 2\nhandler foobar 2 50\nhandler fooia 1\nsquares 55\ncollatz 111\n\
             fooia is enabled\nhandlers fooia=5 foobar=2 collatz=112\nhandler finished\n"
        );
    }
}

#[test]
fn initially_enabled_probes_can_be_off_from_start() {
    for file in program_forms("init") {
        let (talker, report) = launch(&file, all(Action::Disable));
        assert_eq!(report.skipped, ["starts_off", "tested_only"]);
        let mut session = Session::of(talker);
        assert_eq!(session.run().values().sum::<u64>(), 0);
        let states = session.states();
        assert!(
            states.values().all(|&state| state == (0, State::Disabled)),
            "{states:?}"
        );

        let (talker, _) = launch(&file, all(Action::Enable));
        let session = Session::of(talker);
        let counters: Vec<u16> = session.states().values().map(|state| state.0).collect();
        assert_eq!(counters, [1, 2, 2, 1], "off, on, on twice, tested only");
    }
}

#[test]
fn every_fixture_starts_with_all_its_probes_on() {
    for subject in expected::fixtures() {
        let stem = subject.file.file_stem().unwrap().to_str().unwrap();
        // The first maps its code anew when it starts; in the others, threads or children execute the sites without a
        // pause.
        if [
            "shared_text",
            "threads_spin",
            "kinds_spin",
            "interrupted_trampolines",
            "churn",
            "churn_1000",
            "fork_storm",
        ]
        .contains(&stem)
        {
            continue;
        }
        let force = stem == "interrupted";
        let (talker, report) = launch(&subject.file, all(Action::Enable).force(force));
        assert_eq!(report.pid, talker.pid());
        assert_eq!(report.changed.len(), subject.probes.len());
        assert!(report.stopped.is_zero(), "it did not run yet");
        let mut session = Session::of(talker);
        assert_eq!(
            session.run(),
            subject.hits(|_, probe| probe.on),
            "{}",
            subject.file.display()
        );
        assert!(
            session
                .states()
                .values()
                .all(|state| state.1 == State::Enabled)
        );
        session.end();
    }
}

#[test]
fn launched_program_is_controlled_like_any_other() {
    for subject in expected::fixture_subjects("gen_ocaml_2") {
        let (talker, _) = launch(&subject.file, named(Action::Enable, "plain"));
        let mut session = Session::of(talker);
        session.update(Action::Enable, Selector::All, |_| true);
        session.update(Action::Disable, Selector::All, |_| true);
        assert_eq!(session.run()["plain"], 1);
        session.end();
    }
}

/// Tries to start `command`, which has to fail; nothing may have been printed, and no child
/// remains.
fn refused(mut command: Command, actions: Actions) -> Error {
    let scratch = Scratch::new();
    let output = File::create(scratch.file("output")).unwrap();
    command.stdin(Stdio::null()).stdout(output);
    let own = std::process::id() as i32;
    let before = descriptors(own);
    let error = match Launch::new(command).actions(actions).spawn() {
        Ok(launched) => panic!("it was started: {launched:?}"),
        Err(error) => error,
    };
    assert_eq!(error.effect(), Effect::NotStarted, "{error}");
    assert_eq!(children(own), [] as [i32; 0], "{error}");
    // One fewer than before: the file for the program's output is closed.
    assert_eq!(descriptors(own).len(), before.len() - 1, "{error}");
    let printed = fs::read_to_string(scratch.file("output")).unwrap();
    assert_eq!(printed, "", "{error}: it ran");
    error
}

#[test]
fn program_whose_probes_cannot_be_set_never_runs() {
    alone(|| {
        for file in program_forms("terminating") {
            let error = refused(Command::new(&file), named(Action::Enable, "foobaz"));
            assert!(matches!(
                error.kind(),
                ErrorKind::Probe(ProbeError::Unknown { .. })
            ));
            assert_eq!(
                error.to_string(),
                format!(
                    "no probe \"foobaz\" in {}; did you mean \"foobar\"? \
                     the program was not started",
                    file.file_name().unwrap().to_str().unwrap()
                )
            );
            let error = refused(Command::new(&file), named(Action::Disable, "foobar"));
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::Probe(ProbeError::NotEnabled { .. })
                ),
                "{error}"
            );
        }
        // This is found only when the program is stopped before its first instruction.
        for file in fixture_forms("interrupted") {
            let error = refused(Command::new(&file), all(Action::Enable));
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::Probe(ProbeError::Inconsistent { .. })
                ),
                "{error}"
            );
        }
    });
}

#[test]
fn files_without_probes_are_refused_and_named() {
    alone(|| {
        let scratch = Scratch::new();
        let text = scratch.script("text", "plain text\n");
        let script = scratch.script("script", "#!/bin/sh\necho ran\n");
        let plain = scratch.copy(&fixture("gen_ocaml_2.pie"), "plain");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::set_permissions(&plain, mode).unwrap();
        let shown = |path: &Path| path.display().to_string();
        let cases = [
            (
                scratch.file("nothing"),
                "cannot run FILE: No such file or directory",
            ),
            (plain, "cannot run FILE: Permission denied"),
            (text, "FILE is not an ELF file"),
            (script, "FILE is not an ELF file"),
            (scratch.path().to_owned(), "FILE is not a regular file"),
            ("/dev/null".into(), "FILE is not a regular file"),
            (fixture("corrupt/not_elf"), "FILE is not an ELF file"),
            (fixture("corrupt/empty"), "FILE is not an ELF file"),
            (
                fixture("corrupt/elf_aarch64.pie"),
                "FILE is a program for AArch64; only x86-64 programs are supported",
            ),
            (
                fixture("corrupt/elf_32_bit"),
                "FILE is a 32-bit program; only x86-64 programs are supported",
            ),
            (
                fixture("no_probes.nopie"),
                "no OCaml probes in FILE (build-id …)",
            ),
            (
                fixture("foreign_only.pie"),
                "no OCaml probes in FILE (build-id …)",
            ),
        ];
        for (file, message) in cases {
            let error = refused(Command::new(&file), all(Action::Enable));
            let mut found = error.to_string().replace(&shown(&file), "FILE");
            if let Some((start, _)) = found.split_once("build-id ") {
                found = format!("{start}build-id …); the program was not started");
            }
            assert_eq!(found, format!("{message}; the program was not started"));
        }
        let mut command = Command::new("no-such-program");
        command.env("PATH", scratch.path());
        let error = refused(command, Actions::new());
        assert_eq!(
            error.to_string(),
            "cannot run no-such-program: No such file or directory; the program was not started"
        );
    });
}

/// A copy of a program in which its dynamic linker's name is another of the same length.
fn with_interpreter(scratch: &Scratch, name: &str, interpreter: &[u8]) -> PathBuf {
    const USUAL: &[u8] = b"/lib64/ld-linux-x86-64.so.2\0";
    let mut bytes = fs::read(fixture("gen_ocaml_2.pie")).unwrap();
    let at = bytes.windows(USUAL.len()).position(|bytes| bytes == USUAL);
    let at = at.unwrap();
    bytes[at..at + USUAL.len()].copy_from_slice(interpreter);
    let source = scratch.file(&format!("{name}.source"));
    fs::write(&source, bytes).unwrap();
    scratch.copy(&source, name)
}

/// A copy of a program that wants 112 TiB of zeroed memory.
fn with_huge_data(scratch: &Scratch, program: &Path) -> PathBuf {
    let mut bytes = fs::read(program).unwrap();
    let number = |bytes: &[u8], at: usize, len: usize| {
        let mut number = [0; 8];
        number[..len].copy_from_slice(&bytes[at..at + len]);
        u64::from_le_bytes(number) as usize
    };
    // Of the ELF header: e_phoff, e_phnum; of a program header: p_type, p_flags, p_memsz.
    let (table, count) = (number(&bytes, 32, 8), number(&bytes, 56, 2));
    let mut headers = (0..count).map(|index| table + 56 * index);
    let is_data = |&at: &usize| number(&bytes, at, 4) == 1 && number(&bytes, at + 4, 4) & 2 != 0;
    let at = headers.rfind(is_data).unwrap();
    bytes[at + 40..at + 48].copy_from_slice(&0x7000_0000_0000_u64.to_le_bytes());
    let name = program.file_name().unwrap().to_str().unwrap();
    let source = scratch.file(&format!("{name}.source"));
    fs::write(&source, bytes).unwrap();
    scratch.copy(&source, name)
}

// promise: Launching programs: A file that cannot be executed is refused with the reason
#[test]
fn file_that_cannot_execute_is_refused_with_reason() {
    alone(|| {
        let scratch = Scratch::new();
        let plain = fixture("gen_ocaml_2.pie");
        let link = |target: &Path, name: &str| {
            let link = scratch.file(name);
            std::os::unix::fs::symlink(target, &link).unwrap();
            link
        };
        let foreign = with_interpreter(&scratch, "foreign", b"/lib64/ld-linux-x86-64.so.9\0");
        let mangled = with_interpreter(&scratch, "mangled", b"/lib64/ld-linux-x86-64.so.2x");
        let mut cases = vec![
            (
                foreign,
                "cannot run FILE: its dynamic linker /lib64/ld-linux-x86-64.so.9 does not exist",
            ),
            // execvp(3) would have the shell run it.
            (mangled, "cannot run FILE: Exec format error"),
            (
                link(Path::new("loop"), "loop"),
                "cannot run FILE: Too many symbolic links encountered",
            ),
            (plain.join("below"), "cannot run FILE: Not a directory"),
            (
                scratch.file(&"long".repeat(64)),
                "cannot run FILE: File name too long",
            ),
        ];
        for file in fixture_forms("gen_ocaml_2") {
            let huge = with_huge_data(&scratch, &file);
            cases.push((
                huge,
                "cannot run FILE: it was killed by SIGSEGV before its first instruction",
            ));
        }
        let refused = |command| refused(command, all(Action::Enable)).to_string();
        for (file, message) in &cases {
            let found = refused(Command::new(file));
            let found = found.replace(&file.display().to_string(), "FILE");
            assert_eq!(found, format!("{message}; the program was not started"));
        }

        let mut with_long_argument = Command::new(&plain);
        with_long_argument.arg("x".repeat(1 << 20));
        let error = refused(with_long_argument);
        assert!(error.contains(": Argument list too long; the "), "{error}");

        let written = scratch.copy(&plain, "being written");
        let _writer = File::options().append(true).open(&written).unwrap();
        let error = refused(Command::new(&written));
        assert!(error.contains(": Text file busy; the "), "{error}");
    });
}

#[test]
fn path_is_searched_as_by_a_shell() {
    let scratch = Scratch::new();
    for file in fixture_forms("gen_ocaml_2") {
        let (first, second) = (scratch.file("one"), scratch.file("two"));
        for directory in [&first, &second] {
            fs::create_dir_all(directory).unwrap();
        }
        // Skipped, because it is not executable.
        fs::write(first.join("prog"), "not a program").unwrap();
        scratch.copy(&file, "two/prog");
        let path = std::env::join_paths([Path::new("/nowhere"), &first, &second]).unwrap();
        let mut command = Command::new("prog");
        command
            .env("PATH", path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let launched = Launch::new(command)
            .actions(all(Action::Enable))
            .spawn()
            .unwrap();
        let mut talker = Talker::of(Guard::from(launched.into_child()));
        talker.expect("ready");
        assert!(talker.hits().iter().all(|&(_, hits)| hits > 0));
    }
}

/// What a process has inherited, as /proc shows it.
fn inheritance(pid: i32) -> Vec<(String, String)> {
    let file = |name: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap();
        String::from_utf8(bytes).unwrap().replace('\0', "\n")
    };
    let mut all: Vec<(String, String)> = [
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "SigPnd",
        "ShdPnd",
        "TracerPid",
        "PPid",
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "CapEff",
        "CapBnd",
        "NoNewPrivs",
        "Seccomp",
        "Cpus_allowed_list",
    ]
    .map(|name| (name.to_owned(), process::status(pid, name)))
    .into();
    for (name, signals) in &mut all {
        if name.starts_with("Sig") {
            // Signals 32 and 33 are glibc's own. Programs started by its posix_spawn(3) and by its fork(2) may
            // differ in them.
            let set = u64::from_str_radix(signals, 16).unwrap() & !(3 << 31);
            *signals = format!("{set:x}");
        }
    }
    // proc(5): the fields of the process group, session, priority, nice value, real-time priority
    // and policy.
    for (field, name) in [
        (5, "pgrp"),
        (6, "session"),
        (18, "priority"),
        (19, "nice"),
        (40, "rt_priority"),
        (41, "policy"),
    ] {
        all.push((name.to_owned(), process::stat(pid, field)));
    }
    for name in ["cmdline", "environ", "limits", "oom_score_adj"] {
        all.push((name.to_owned(), file(name)));
    }
    let cwd = fs::read_link(format!("/proc/{pid}/cwd")).unwrap();
    all.push(("cwd".to_owned(), cwd.display().to_string()));
    let numbers = descriptors(pid).into_iter();
    let numbers: Vec<String> = numbers
        .map(|fd| fd.split(' ').next().unwrap().to_owned())
        .collect();
    all.push(("descriptors".to_owned(), numbers.join(" ")));
    all
}

// promise: Launching programs: The program inherits the same as when it is started directly (4
//    programs)
#[test]
fn launched_program_equals_one_started_directly() {
    alone(|| {
        let scratch = Scratch::new();
        let mut blocked = nix::sys::signal::SigSet::empty();
        blocked.add(nix::sys::signal::Signal::SIGUSR1);
        blocked.thread_block().unwrap();
        for file in fixture_forms("gen_ocaml_2")
            .into_iter()
            .chain(program_forms("init"))
        {
            let command = || {
                let mut command = Command::new(&file);
                command
                    .args(["an argument", "", "--flag=a b", "*\\'\""])
                    .env("OCAMLRUNPARAM", "v=0")
                    .env("WITH SPACE", " a b ")
                    .env_remove("HOME")
                    .current_dir(scratch.path())
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                command
            };
            let mut direct = Talker::spawn(&mut command());
            direct.expect("ready");
            process::settle(direct.pid());

            let launched = Launch::new(command())
                .actions(all(Action::Enable))
                .spawn()
                .unwrap();
            let mut launched = Talker::of(Guard::from(launched.into_child()));
            launched.expect("ready");
            process::settle(launched.pid());

            assert_eq!(inheritance(launched.pid()), inheritance(direct.pid()));
            let own = process::status(std::process::id() as i32, "Threads");
            drop((direct, launched));
            assert!(
                own.parse::<usize>().unwrap() <= 6,
                "launching left threads behind: {own}"
            );
        }
    });
}

#[test]
fn exit_status_of_a_launched_program_is_kept() {
    let mut command = Command::new(program("terminating"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let launched = Launch::new(command)
        .actions(all(Action::Enable))
        .spawn()
        .unwrap();
    assert_eq!(Guard::from(launched.into_child()).wait().code(), Some(0));

    let mut command = Command::new(fixture("gen_ocaml_2.nopie"));
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let launched = Launch::new(command).spawn().unwrap();
    let mut guard = Guard::from(launched.into_child());
    guard.child().kill().unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&guard.wait()),
        Some(9)
    );
}

#[test]
fn signal_is_not_passed_on_after_the_exit() {
    const SIGTERM: i32 = 15;
    for file in fixture_forms("job") {
        let mut command = Command::new(&file);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut launched = Launch::new(command).spawn().unwrap();
        for queued in [false, true] {
            let signal = ReceivedSignal {
                number: SIGTERM,
                code: -i32::from(queued),
                sender: 7,
                uid: 0,
                value: 42,
            };
            launched.pass_on(&signal).unwrap();
            let status = eventually("the program exits", || launched.child().try_wait().unwrap());
            let signal = std::os::unix::process::ExitStatusExt::signal(&status);
            assert_eq!(signal, Some(SIGTERM));
        }
    }
}
