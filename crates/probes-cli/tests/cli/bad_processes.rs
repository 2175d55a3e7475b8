//! Processes that have exited, belong to others, are traced, or are of the kernel: each with its
//! message.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, geteuid};
use test_support::process::{children, status};
use test_support::{
    Scratch, Talker, as_nobody, as_ordinary_user, eventually, fixture, fixture_forms, program,
};

use crate::observers::rest;
use crate::support::{
    Directory, command, image, is_observed, run, run_command, started_by, states,
};

/// Asserts that `info` and `attach` of `pid` fail alike, with `why` and `hint`.
#[track_caller]
fn refused(pid: i32, why: &str, hint: &str) {
    for line in ["info", "attach -enable-all"] {
        let error = run(&format!("{line} -pid {pid}")).failure();
        assert!(error.contains(why), "{error}");
        assert!(error.contains(&format!("hint: {hint}")), "{error}");
    }
}

/// The pids of all processes.
fn processes() -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .collect()
}

fn is_kernel_thread(pid: i32) -> bool {
    /// `PF_KTHREAD` of the kernel's include/linux/sched.h.
    const PF_KTHREAD: u64 = 0x0020_0000;
    // proc_pid_stat(5): flags are field 9; the name before may contain spaces and parentheses.
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat).into_owned();
    let flags = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split(' ').nth(7));
    flags.is_some_and(|flags| flags.parse::<u64>().unwrap() & PF_KTHREAD != 0)
}

#[test]
fn pid_of_no_process_is_refused() {
    // proc_sys_kernel_pid_max(5): pids are below 2^22.
    refused(
        4_194_305,
        "no process 4194305",
        "it has exited, or the pid is one of another pid namespace (a container)",
    );
}

#[test]
fn exited_process_is_refused() {
    let mut target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    target.close_input();
    target.guard().wait();
    refused(pid, &format!("no process {pid}"), "it has exited");
}

#[test]
fn zombie_is_refused_with_its_parent() {
    let mut target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    target.close_input();
    let unreaped = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    waitid(Id::Pid(Pid::from_raw(pid)), unreaped).unwrap();
    let parent = std::process::id();
    let why = format!("process {pid} has exited and is a zombie: its parent {parent} (");
    refused(pid, &why, "it has exited: start it again");
}

#[test]
fn thread_id_is_refused_with_its_process() {
    let target = Talker::start_with(&program("threads"), ["2"]);
    let pid = target.pid();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut threads = threads.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let tid = threads.find(|tid| *tid != pid.to_string()).unwrap();
    let why = format!("{tid} is a thread of process {pid}, not a process");
    refused(
        tid.parse().unwrap(),
        &why,
        &format!("give the pid of its process: -pid {pid}"),
    );
}

#[test]
fn pid_of_a_shell_names_its_children() {
    let directory = Directory::new("shell");
    let bash = directory.copy("/bin/bash".as_ref(), "bash");
    let mut shell = Command::new(&bash);
    let shell = Talker::spawn(shell.args(["-c", "cat <&0 & wait"]));
    let pid = shell.pid();
    let child = eventually("it starts cat", || {
        let mut children = children(pid).into_iter();
        children.find(|&child| status(child, "Name") == "cat")
    });
    let hint = format!("process {pid} is a shell (bash); it has started cat (-pid {child})");
    refused(pid, "no OCaml probes in ", &hint);
    let error = run(&format!("count -fn Bakery.insert -pid {pid}")).failure();
    assert!(error.contains(&format!("hint: {hint}")), "{error}");
    // As the upgrade of a package does.
    fs::remove_file(&bash).unwrap();
    refused(pid, "no OCaml probes in ", &hint);
}

#[test]
fn kernel_thread_is_refused() {
    match processes().into_iter().find(|&pid| is_kernel_thread(pid)) {
        Some(pid) => refused(
            pid,
            "is a kernel thread",
            "give the pid of a process that runs a program",
        ),
        None => {
            // In a pid namespace that shows no kernel threads, pid 2 is another process, or none.
            assert!(!is_kernel_thread(2));
            let error = run("info -pid 2");
            assert!(!error.stderr.contains("kernel thread"), "{error:?}");
        }
    }
}

#[test]
fn program_file_without_read_permission_is_named() {
    let directory = Directory::new("unreadable");
    let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
    let program = directory.copy(&fixture("gen_ocaml_2.pie"), "program");
    let mut target = Talker::spawn(&mut as_ordinary_user(&program));
    target.expect("ready");
    // After it was started: a program that its user may not read then makes the process not dumpable.
    fs::set_permissions(&program, Permissions::from_mode(0o111)).unwrap();
    for command in ["info", "stack", "count -fn main"] {
        let mut tool = as_ordinary_user(&tool);
        tool.args(command.split(' '));
        let error = run_command(tool.arg(format!("-pid={}", target.pid()))).failure();
        let why = format!(
            "process {} executes a program file that this user may not read",
            target.pid()
        );
        assert!(error.contains(&why), "{error}");
        assert!(
            error.ends_with("\nhint: use sudo, or permit it: sudo chmod +r FILE\n"),
            "{error}"
        );
    }
}

#[test]
fn process_of_another_user_is_refused() {
    if geteuid().is_root() {
        let target = Talker::start(&fixture("gen_ocaml_2.pie"));
        let before = image(target.pid());
        // The user `nobody` possibly cannot enter the build directory.
        let directory = Directory::new("nobody");
        let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
        for action in ["info", "attach"] {
            let mut nobody = as_nobody(&tool);
            nobody.arg(action).arg(format!("-pid={}", target.pid()));
            if action == "attach" {
                nobody.arg("-enable-all");
            }
            let error = run_command(&mut nobody).failure();
            assert!(error.contains(" belongs to uid 0 (root)"), "{error}");
            assert!(error.ends_with("\nhint: use sudo\n"), "{error}");
        }
        assert!(image(target.pid()) == before);
        return;
    }
    let own = geteuid().as_raw();
    let uid = |pid| fs::metadata(format!("/proc/{pid}")).map_or(own, |meta| meta.uid());
    let others = processes()
        .into_iter()
        .filter(|&pid| !is_kernel_thread(pid));
    match others.min_by_key(|&pid| (uid(pid) == own, pid)) {
        Some(pid) if uid(pid) != own => {
            let why = format!("process {pid} belongs to uid {} (", uid(pid));
            refused(pid, &why, "use sudo");
        }
        // All visible processes are ours: those are not refused for their owner.
        _ => assert!(!run("info -pid 1").stderr.contains("belongs to")),
    }
}

#[test]
fn process_under_gdb_is_readable_but_not_changed() {
    let mut target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let pid = target.pid();
    let expected = states(pid);
    let before = image(pid);
    let mut gdb = Command::new("gdb");
    gdb.args([
        "-q",
        "-nx",
        "-ex",
        r#"printf "attached\n""#,
        "-p",
        &pid.to_string(),
    ]);
    gdb.env("DEBUGINFOD_URLS", "").stderr(Stdio::null());
    let mut gdb = Talker::spawn(&mut gdb);
    gdb.expect("attached");

    // gdb holds the process stopped, so info can neither stop it nor wait for it.
    assert_eq!(states(pid), expected);
    let error = run(&format!("attach -enable-all -pid {pid}")).failure();
    let why = format!(
        "is already traced by pid {} (gdb); nothing was changed",
        gdb.pid()
    );
    assert!(error.contains(&why), "{error}");
    let hint = format!(
        "hint: detach or end the other tracer, gdb with pid {}",
        gdb.pid()
    );
    assert!(error.contains(&hint), "{error}");
    let error = run(&format!("attach -enable-all -for 1h -pid {pid}")).failure();
    assert!(error.contains(&why) && !error.contains("undo"), "{error}");
    assert!(image(pid) == before);

    gdb.send("detach");
    gdb.send("quit");
    gdb.guard().wait();
    assert!(!target.hits().is_empty());
    run(&format!("attach -enable-all -pid {pid}")).answer();
}

// promise: Processes that are hard to change: If a process becomes undumpable, each command that its user can no longer
//    carry out or undo says so, and that sudo is needed (2 × 5 commands)
#[test]
fn commands_on_undumpable_processes_suggest_sudo() {
    for file in fixture_forms("undumpable") {
        // The user `nobody` possibly cannot enter the build directory.
        let directory = Directory::new("undumpable");
        let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
        let copy = directory.copy(&file, "undumpable");
        let start = || {
            let mut target = Talker::spawn(&mut as_ordinary_user(&copy));
            target.expect("ready");
            target
        };
        let tool = |line: &str, pid: i32| {
            let mut command = as_ordinary_user(&tool);
            command
                .args(line.split(' '))
                .args(["-pid", &pid.to_string()]);
            command
        };

        let mut target = start();
        let pid = target.pid();
        target.ask("hide", "hidden");
        let why = format!(
            "ocaml-probes: process {pid} is not dumpable (setuid or file capabilities, a program file that its user may not read, or prctl)"
        );
        for line in [
            "info",
            "attach -enable-all",
            "attach -live -enable-all",
            "count",
        ] {
            let error = run_command(&mut tool(line, pid)).failure();
            assert!(error.starts_with(&why), "{line}: {error}");
            assert!(error.ends_with("\nhint: use sudo\n"), "{line}: {error}");
        }

        // The process becomes undumpable while a command waits: what the command has begun cannot be undone.
        for (line, begun, hint) in [
            (
                "attach -enable ping -for 1h",
                "ping 0 -> 1",
                "attach -pid PID -disable ping` undoes the changes",
            ),
            (
                "count -json -interval 10ms",
                "{",
                "observe -clean -pid PID` removes the observation",
            ),
        ] {
            let mut target = start();
            let pid = target.pid();
            let mut waiting = Talker::spawn(tool(line, pid).stderr(Stdio::piped()));
            waiting.expect(begun);
            target.ask("hide", "hidden");
            kill(Pid::from_raw(waiting.pid()), Signal::SIGTERM).unwrap();
            let (_, said, status) = rest(waiting);
            assert_eq!(status, Some(1), "{said}");
            assert!(said.contains("is not dumpable"), "{said}");
            let hint = format!(
                "`sudo ocaml-probes {}",
                hint.replace("PID", &pid.to_string())
            );
            assert!(said.contains(&hint), "{said}");
            if geteuid().is_root() {
                // The command of the hint.
                let words = hint.split('`').nth(1).unwrap();
                run(words.strip_prefix("sudo ocaml-probes ").unwrap()).answer();
                assert_eq!(states(pid), "ping disabled\npong disabled\n");
                assert!(!is_observed(pid));
            }
        }
    }
}

#[test]
fn process_that_cannot_be_read_is_named() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let start = format!("{} ", target.pid());
    let limits = 3..40;
    let (mut listed, mut named) = (0, 0);
    for limit in limits.clone() {
        let starter = format!("prlimit --nofile={limit}");
        let ps = run_command(&mut started_by(&starter, &command(["ps"])));
        if ps.code != Some(0) {
            continue;
        }
        let is_listed = ps.stdout.lines().any(|line| line.starts_with(&start));
        let is_named = ps.stderr.contains("not listed: process");
        assert!(is_listed || is_named, "{limit}: {ps:?}");
        listed += usize::from(is_listed);
        named += usize::from(is_named);
    }
    assert!(listed > 0 && named > 0, "{listed} {named}");
}

/// A command line, run by a shell with this soft limit of open files.
fn with_soft_limit(limit: u32, line: &str) -> Command {
    let script = format!("ulimit -Sn {limit} && exec \"$@\"");
    let mut shell = Command::new("bash");
    shell.args(["-c", &script, "-", env!("CARGO_BIN_EXE_ocaml-probes")]);
    shell.args(line.split(' '));
    shell
}

// promise: Bad input: The soft limit of open files (`ulimit -Sn`) does not limit how many processes a command is about (40 × 3)
#[test]
fn many_processes_need_no_higher_soft_limit() {
    let file = fixture("gen_ocaml_2.pie");
    let targets: Vec<Talker> = (0..40).map(|_| Talker::start(&file)).collect();
    let pids: Vec<String> = targets
        .iter()
        .map(|target| format!("-pid {}", target.pid()))
        .collect();
    let pids = pids.join(" ");
    for line in ["count -for 1ms", "attach -enable plain", "info"] {
        let run = run_command(&mut with_soft_limit(64, &format!("{line} {pids}")));
        assert_eq!(run.code, Some(0), "{line}: {run:?}");
        assert!(!run.stderr.contains("Too many open files"), "{run:?}");
    }
}

/// A line of a file of `/proc/PID` of the OCaml program that a command has started, split into words.
fn of_started(tool: &Talker, file: &str, start: &str) -> Vec<String> {
    let started = children(tool.pid()).into_iter();
    let mut started = started.filter(|&child| status(child, "Name") == "gen_ocaml_2.pie");
    let text = fs::read_to_string(format!("/proc/{}/{file}", started.next().unwrap())).unwrap();
    let line = text.lines().find(|line| line.starts_with(start)).unwrap();
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

#[test]
fn started_program_keeps_its_limits_and_signals() {
    const SIGXFSZ: u64 = 1 << (25 - 1);
    let scratch = Scratch::new();
    for line in [
        "trace -wait -enable plain -prog",
        "trace -follow -wait -enable plain -prog",
        "trace -count -prog",
        "profile -o picture.svg -prog",
        "record -probe plain -o timeline.json -prog",
    ] {
        let mut tool = with_soft_limit(64, line);
        tool.current_dir(scratch.path());
        tool.arg(fixture("gen_ocaml_2.pie")).stderr(Stdio::null());
        let mut tool = Talker::spawn(&mut tool);
        tool.expect("ready");
        let limit = of_started(&tool, "limits", "Max open files");
        assert_eq!(limit[3], "64", "{line}");
        for mask in ["SigBlk:", "SigIgn:", "SigCgt:"] {
            let words = of_started(&tool, "status", mask);
            let mask = u64::from_str_radix(&words[1], 16).unwrap();
            assert_eq!(mask & SIGXFSZ, 0, "{line}: {words:?}");
        }
        tool.close_input();
        tool.guard().wait();
    }
}

// promise: Bad input: A file that may not be so long (`ulimit -f`) ends no command without a message (3 ×)
#[test]
fn file_limit_ends_no_command() {
    let target = Talker::start(&fixture("gen_ocaml_2.pie"));
    let scratch = Scratch::new();
    for line in ["list -functions", "info", "stack"] {
        let line = format!("{line} -pid {} -o answer", target.pid());
        let tool = command(line.split(' '));
        let mut limited = started_by("prlimit --fsize=1", &tool);
        let run = run_command(limited.current_dir(scratch.path()));
        assert_eq!(run.code, Some(1), "{line}: {run:?}");
        assert!(run.stderr.contains("File too large"), "{line}: {run:?}");
    }
}
