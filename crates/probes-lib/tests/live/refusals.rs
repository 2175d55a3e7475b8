//! Processes that are refused: each error gives the reason, and the process stays unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::unistd::geteuid;
use probes_lib::{
    Action, Denial, Effect, Error, ErrorKind, FunctionSelector, Launch, Observation, Options,
    ProbeError, ProbeTable, ProcessError, Selector, Target,
};
use test_support::process::{self, Image, settle};
use test_support::{
    Guard, Scratch, Talker, as_nobody, eventually, fixture, fixture_forms, output, program,
    program_forms,
};

use crate::session::{Session, all, heavy_test_lock};

fn refused(pid: i32) -> Error {
    match Target::open(pid) {
        Ok(target) => panic!("{pid} ({}) was opened", target.program().display()),
        Err(error) => error,
    }
}

#[test]
fn pid_of_no_process_is_refused() {
    for pid in [0, -1, i32::MIN, i32::MAX] {
        let error = refused(pid);
        assert!(matches!(
            error.kind(),
            ErrorKind::Process(ProcessError::NotFound)
        ));
        assert_eq!(error.to_string(), format!("no process {pid}"));
    }
    // A process that has just exited: its pid is not reused so soon.
    let mut guard = Guard::spawn(Command::new("true").stdin(Stdio::null()));
    guard.wait();
    let error = refused(guard.pid());
    assert_eq!(error.to_string(), format!("no process {}", guard.pid()));
}

// promise: Bad input: A process under valgrind is refused with the name of the translator (2)
#[test]
fn translated_process_is_refused_naming_the_translator() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=none", "--quiet", "--vgdb=no"]);
        let mut talker = Talker::spawn(valgrind.arg(&file));
        talker.expect("ready");
        let error = refused(talker.pid());
        assert!(matches!(
            error.kind(),
            ErrorKind::Process(ProcessError::Translated { .. })
        ));
        let message = format!("process {} runs under valgrind, which", talker.pid());
        assert!(error.to_string().starts_with(&message), "{error}");
        talker.hits();
    }
}

// promise: Bad input: A process under valgrind is not changed, also if it was opened as one without probes
#[test]
fn translated_process_is_not_changed() {
    let message = |pid| format!("process {pid} runs under valgrind, which");
    let (mut talker, target) = open_under_valgrind(&program("calls"));
    let leaf = FunctionSelector::Glob("Calls.leaf".parse().unwrap());
    let observation = Observation::new().count_functions(leaf);
    let observed = target.observe(&observation, Options::default()).map(drop);
    let error = observed.unwrap_err();
    assert!(
        error.to_string().starts_with(&message(talker.pid())),
        "{error}"
    );
    assert_eq!(error.effect(), Effect::NothingChanged);
    talker.ask("run 1 10", "calls");
    let (mut talker, target) = open_under_valgrind(&fixture("gen_ocaml_2.pie"));
    let error = target.update(&all(Action::Enable)).map(drop).unwrap_err();
    assert!(
        error.to_string().starts_with(&message(talker.pid())),
        "{error}"
    );
    assert_eq!(error.effect(), Effect::NothingChanged);
    talker.hits();
}

fn open_under_valgrind(program: &Path) -> (Talker, Target) {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=none", "--quiet", "--vgdb=no"]);
    let mut talker = Talker::spawn(valgrind.arg(program));
    talker.expect("ready");
    let target = Target::open_any(talker.pid()).unwrap();
    (talker, target)
}

// promise: Bad input: A process that runs OCaml bytecode, where probes have no effect, is refused (2)
#[test]
fn bytecode_is_refused() {
    let program = program("closures/bytecode");
    let scratch = Scratch::new();
    let mut talker = Talker::start(&program);
    let error = refused(talker.pid());
    let message = format!("process {} runs OCaml bytecode, in which", talker.pid());
    assert!(error.to_string().starts_with(&message), "{error}");
    assert!(matches!(
        error.kind(),
        ErrorKind::Process(ProcessError::Bytecode)
    ));
    let line = format!("write {}", scratch.file("closure").display());
    talker.ask(&line, "written");
    let launch = Launch::new(Command::new(&program)).actions(all(Action::Enable));
    let error = launch.spawn().map(drop).unwrap_err();
    assert!(
        error.to_string().contains(" runs OCaml bytecode"),
        "{error}"
    );
    let error = ProbeTable::read(&program).map(drop).unwrap_err();
    assert!(error.to_string().ends_with("never run"), "{error}");
}

// promise: Exit, exec and fork of the process: A process that exits after it was opened is reported
//    as exited (2)
#[test]
fn exit_after_opening_is_reported() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut session = Session::start(&file);
        session.talker.close_input();
        session.talker.guard().wait();
        let pid = session.pid();
        let error = session.target.states().unwrap_err();
        assert_eq!(error.to_string(), format!("process {pid} exited"));
        let error = session.apply(&all(Action::Enable)).unwrap_err();
        assert_eq!(error.to_string(), format!("process {pid} exited"));
    }
}

#[test]
fn thread_is_refused_naming_its_process() {
    let _lock = heavy_test_lock();
    for file in fixture_forms("threads_spin") {
        let talker = Talker::start(&file);
        let tid = *process::threads(talker.pid()).last().unwrap();
        assert_ne!(tid, talker.pid());
        assert_eq!(
            refused(tid).to_string(),
            format!(
                "{tid} is a thread of process {}, not a process",
                talker.pid()
            )
        );
    }
}

#[test]
fn zombie_is_refused_naming_its_parent() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let target = Target::open(pid).unwrap();
        talker.close_input();
        eventually("it is a zombie", || {
            (process::state(pid) == Some('Z')).then_some(())
        });
        let own = std::process::id();
        let comm = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(
            refused(pid).to_string(),
            format!(
                "process {pid} has exited and is a zombie: its parent {own} ({}) has not reaped it",
                comm.trim()
            )
        );
        let error = target.update(&all(Action::Enable)).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Process(ProcessError::Exited)),
            "{error}"
        );
    }
}

#[test]
fn kernel_threads_are_refused_and_named() {
    // Where a container hides kernel threads, the test opens init instead, which an ordinary user
    // cannot change.
    const PF_KTHREAD: u64 = 0x0020_0000;
    let is_kernel_thread = |pid: &i32| {
        let flags = process::stat(*pid, 9).parse::<u64>();
        flags.is_ok_and(|flags| flags & PF_KTHREAD != 0)
    };
    let pids = process::processes().into_iter();
    let threads: Vec<i32> = pids.filter(is_kernel_thread).collect();
    for &pid in threads.iter().take(5) {
        let name = process::status(pid, "Name");
        let error = refused(pid);
        assert_eq!(
            error.to_string(),
            format!("process {pid} is a kernel thread ({name}) and has no program")
        );
    }
    if threads.is_empty() {
        assert!(!matches!(
            refused(1).kind(),
            ErrorKind::Process(ProcessError::KernelThread { .. })
        ));
    }
}

// promise: Processes that are hard to change: The tool refuses to stop itself or one of its
//    ancestors (2)
#[test]
fn own_process_and_ancestors_are_not_stopped() {
    // This process itself is refused earlier: its program has no probes.
    let error = refused(std::process::id() as i32);
    assert!(matches!(
        error.kind(),
        ErrorKind::Probe(ProbeError::NoProbes { .. })
    ));
    for file in fixture_forms("parent") {
        let scratch = Scratch::new();
        let answer = scratch.file("answer");
        let toggle = crate::examples::example("toggle");
        let command = format!("'{}' $PPID ping 2>'{}'", toggle.display(), answer.display());
        let mut talker = Talker::start_with(&file, [command]);
        settle(talker.pid());
        let text = Image::of(talker.pid()).text();
        assert_eq!(talker.ask("child", "child ended"), "child ended 1");
        let answer = fs::read_to_string(answer).unwrap();
        let ancestor = format!("Process({})", talker.pid());
        assert!(answer.contains(&ancestor), "{answer}");
        assert!(answer.contains("SelfOrAncestor { own: false }"), "{answer}");
        Image::of(talker.pid())
            .text()
            .assert_same(&text, "after its child's try");
        assert!(talker.hits().iter().all(|&(_, hits)| hits == 0));
    }
}

/// The message of the `toggle` example for a process, run through `setpriv` as nobody.
pub(crate) fn toggle_as_nobody(pid: i32) -> String {
    // The build directory may be one that other users cannot read.
    let scratch = Scratch::new();
    let toggle = scratch.copy(&crate::examples::example("toggle"), "toggle");
    let output = output(as_nobody(toggle).args([&pid.to_string(), "ping"]));
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn another_users_process_is_refused_naming_its_owner() {
    if geteuid().is_root() {
        for file in fixture_forms("forker") {
            let talker = Talker::start(&file);
            settle(talker.pid());
            let image = Image::of(talker.pid());
            let message = toggle_as_nobody(talker.pid());
            let owner = "OtherUser { uid: 0, name: \"root\" }";
            assert!(message.contains(owner), "{message}");
            Image::of(talker.pid()).assert_same(&image, "after another user's try");
        }
    } else {
        let error = refused(1);
        assert_eq!(error.pid(), Some(1));
        match error.kind() {
            ErrorKind::Process(ProcessError::Denied {
                denial: Denial::OtherUser { uid, .. },
                ..
            }) => assert_eq!(
                process::status(1, "Uid").split('\t').next(),
                Some(&*uid.to_string())
            ),
            _ => panic!("{error}"),
        }
    }
}

#[test]
fn root_changes_any_process_and_users_their_own() {
    let scratch = Scratch::new();
    for file in fixture_forms("forker") {
        let mut command = if geteuid().is_root() {
            let file = scratch.copy(&file, file.file_name().unwrap().to_str().unwrap());
            as_nobody(file)
        } else {
            Command::new(&file)
        };
        let mut talker = Talker::spawn(&mut command);
        talker.expect("ready");
        let mut session = Session::of(talker);
        session.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(session.run()["ping"], 3);
    }
}

/// Starts a tool on process `pid` and waits until the tool traces the process.
pub(crate) fn traced_by(pid: i32, tool: &mut Command) -> Guard {
    let tool = tool
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let guard = Guard::spawn(tool);
    eventually("the tool traces the process", || {
        (process::status(pid, "TracerPid") == guard.pid().to_string()).then_some(())
    });
    guard
}

fn refused_as_traced(session: &Session, tracer: i32, name: &str) {
    let pid = session.pid();
    let error = session.apply(&all(Action::Enable)).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("process {pid} is already traced by pid {tracer} ({name}); nothing was changed")
    );
    assert!(matches!(
        error.kind(),
        ErrorKind::Process(ProcessError::Denied {
            denial: Denial::Traced { .. },
            ..
        })
    ));
    assert_eq!(error.effect(), Effect::NothingChanged);
}

// promise: Other tracers and tools: A process under gdb is refused with the name of the tracer, and
//    stays with it (2)
#[test]
fn debugged_process_is_refused_with_the_debuggers_name() {
    for file in fixture_forms("forker") {
        let session = Session::start(&file);
        let pid = session.pid();
        let image = session.image();
        let mut gdb = Command::new("gdb");
        gdb.args(["-q", "-nx", "-p", &pid.to_string()]);
        let gdb = traced_by(pid, &mut gdb);
        refused_as_traced(&session, gdb.pid(), "gdb");
        // Reading stays allowed.
        assert_eq!(session.states().len(), 2);
        drop(gdb);
        eventually("gdb has detached", || {
            (process::status(pid, "TracerPid") == "0").then_some(())
        });
        session.image().assert_same(&image, "after gdb");
        session.update(Action::Enable, Selector::All, |_| true);
    }
}

// promise: Other tracers and tools: A process under strace is refused with the name of the tracer,
//    and stays with it (4)
#[test]
fn process_under_strace_is_refused_and_runs_on() {
    let _lock = heavy_test_lock();
    for file in fixture_forms("threads_spin")
        .into_iter()
        .chain(program_forms("service"))
    {
        let session = Session::start(&file);
        let pid = session.pid();
        let image = Image::of(pid).text();
        let mut strace = Command::new("strace");
        strace.args(["-f", "-e", "trace=none", "-p", &pid.to_string()]);
        let strace = traced_by(pid, &mut strace);
        refused_as_traced(&session, strace.pid(), "strace");
        Image::of(pid).text().assert_same(&image, "under strace");
        drop(strace);
        eventually("strace has detached", || {
            (process::status(pid, "TracerPid") == "0").then_some(())
        });
        eventually("it can be changed again", || {
            session.apply(&all(Action::Enable)).ok()
        });
    }
}

#[test]
fn program_without_base_section_counts_as_not_prelinked() {
    for file in fixture_forms("corrupt/base_section_renamed") {
        let mut session = Session::start(&file);
        let before = session.image();
        session.update(Action::Enable, Selector::All, |_| true);
        assert!(session.run().values().all(|&hits| hits > 0));
        session.update(Action::Disable, Selector::All, |_| true);
        session
            .image()
            .text()
            .assert_same(&before.text(), "off again");
    }
}

/// The damaged files that run; the library's tests of files cover the rest.
fn corrupt() -> Vec<PathBuf> {
    let directory = fixture("corrupt");
    let mut files: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_form = name.ends_with(".pie") || name.ends_with(".nopie");
            is_form && !name.starts_with("elf_") && !name.starts_with("base_section")
        })
        .collect();
    files.sort();
    files
}

// promise: Bad input: Every damaged program that runs is refused with its defect named, and left
//    alone (more than 42 programs)
#[test]
fn damaged_running_program_is_refused_with_its_defect() {
    let files = corrupt();
    assert!(files.len() >= 42, "{}", files.len());
    for file in files {
        let mut talker = Talker::start(&file);
        settle(talker.pid());
        let image = Image::of(talker.pid());
        let stem = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let error = refused(talker.pid());
        let message = error.to_string();
        let (part, end) = defect(&stem);
        assert!(
            message.contains(part) && message.ends_with(end),
            "{stem}: {message}"
        );
        assert!(
            message.contains(file.to_str().unwrap()),
            "{stem}: {message}"
        );
        settle(talker.pid());
        Image::of(talker.pid()).assert_same(&image, &stem);
        let hits = talker.hits();
        assert!(
            hits.iter().all(|(_, count)| *count == 0),
            "{stem}: {hits:?}"
        );
    }
}

/// What the error message for a damaged program contains, besides its file, and what it ends with.
fn defect(stem: &str) -> (&'static str, &'static str) {
    const NOT_A_SITE: &str = "expected 90 3d or 90 e8 and four more bytes";
    const SECOND: &str = "probe note 1 at 0x40 is malformed (";
    const NOTE_1_OF_PROBE_MANY: &str = "probe note 1 at 0x40 (many) has its ";
    match stem {
        "note_descsz_9" => (SECOND, "(descsz 9 < 24)"),
        "note_descsz_huge" => (SECOND, "(needs 4294967301 bytes, 484 left)"),
        "note_namesz_huge" => (SECOND, "(needs 4294967340 bytes, 484 left)"),
        "note_strings_without_nul" => (SECOND, "(its provider does not end within the note)"),
        "note_truncated" => ("probe note 8 at ", "is malformed (needs 46 bytes, 40 left)"),
        "note_random_bytes" => (
            "probe note 0 at 0x0 is malformed (needs ",
            "bytes, 548 left)",
        ),
        "note_pc_in_data" | "note_pc_outside_segments" => (
            NOTE_1_OF_PROBE_MANY,
            "outside the executable segments of the file",
        ),
        "note_semaphore_outside_segments"
        | "note_semaphore_outside_probes"
        | "note_semaphore_half_outside_probes" => (NOTE_1_OF_PROBE_MANY, "outside .probes"),
        "note_semaphore_zero" => ("probe note 1 at 0x40 (many) has no semaphore", ""),
        "probes_section_renamed" => ("probe note 0 at 0x0 (many) has its", "outside .probes"),
        "note_section_removed" => ("no OCaml probes in ", ")"),
        "note_section_beyond_file" => (" is truncated", ""),
        "section_headers_beyond_file" => (" is truncated", ""),
        "section_headers_stripped" => ("has no section headers, so its probes cannot be found", ""),
        "note_pc_twice" => (
            "is corrupt: the sites of probes many and many overlap at ",
            "",
        ),
        "section_names_out_of_range" => ("is corrupt", "the section names cannot be read"),
        "site_nop_66" => ("(broken) has its site at", NOT_A_SITE),
        "site_nop_cc" => ("found cc 3d ", NOT_A_SITE),
        "site_opcode_0f" => ("found 90 0f ", NOT_A_SITE),
        "site_opcode_cc" => ("found 90 cc ", NOT_A_SITE),
        _ => panic!("{stem}: no message is expected of this program"),
    }
}

// promise: Other tracers and tools: A process that a shell has forked, and that has not yet exec'd
//    its program, is waited for (2)
#[test]
fn forked_process_is_opened_after_its_exec() {
    for file in fixture_forms("gen_ocaml") {
        // The pid is known before the process executes the program; the program exits when its
        // input ends.
        let late = "exec 3<&0; (sleep 0.05; exec \"$0\" <&3) & echo $!; wait";
        let mut shell = Command::new("sh");
        let mut shell = Talker::spawn(shell.args(["-c", late]).arg(&file));
        let pid = shell.line().unwrap().parse().unwrap();
        let target = Target::open(pid).unwrap();
        assert_eq!(target.program(), file);
        shell.expect("ready");
    }
}

#[test]
fn programs_without_our_probes_are_refused_by_name() {
    for name in ["no_probes", "foreign_only"] {
        for file in fixture_forms(name) {
            let talker = Talker::start(&file);
            let message = refused(talker.pid()).to_string();
            let start = format!("no OCaml probes in {} (build-id ", file.display());
            assert!(message.starts_with(&start), "{message}");
        }
    }
    // A script's process is its interpreter.
    let scratch = Scratch::new();
    let script = scratch.script("script", "#!/bin/sh\necho ready\nread line\n");
    let talker = Talker::start(Path::new(&script));
    let message = refused(talker.pid()).to_string();
    assert!(message.starts_with("no OCaml probes in /"), "{message}");
}
