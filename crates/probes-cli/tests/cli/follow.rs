//! `attach -follow` and `trace -follow`: following fork and exec, and detaching.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid};
use test_support::process::{self, status};
use test_support::{Guard, Talker, as_nobody, eventually, fixture, fixture_forms, program_forms};

use crate::count::{end, start_observing};
use crate::support::{
    Directory, command, full_pipe, is_observed, object, run, run_command, started_by, states,
};

const ON: &str = "ping enabled\npong enabled\n";
pub(crate) const OFF: &str = "ping disabled\npong disabled\n";

/// The tool, following a process.
pub(crate) struct Following(pub(crate) Talker);

impl Following {
    pub(crate) fn attach(pid: i32) -> Following {
        let mut tool = command(["attach", "-follow", "-quiet", "-enable-all", "-pid"]);
        Following::started(tool.arg(pid.to_string()), pid)
    }

    pub(crate) fn started(tool: &mut Command, pid: i32) -> Following {
        let following = Following(Talker::spawn(tool));
        eventually("its loader is hooked", || {
            process::is_loader_changed(pid).then_some(())
        });
        following
    }

    /// Interrupts the tool, and asserts that it exits with status 0.
    pub(crate) fn end(mut self) {
        kill(Pid::from_raw(self.0.pid()), Signal::SIGTERM).unwrap();
        assert_eq!(self.0.guard().wait().code(), Some(0));
    }
}

/// Asserts that nothing of ours remains in a process, and that it is not traced.
#[track_caller]
pub(crate) fn assert_left_alone(pid: i32) {
    eventually("it is not traced", || {
        (status(pid, "TracerPid") == "0").then_some(())
    });
    assert!(
        !process::is_loader_changed(pid),
        "the loader of {pid} is not as it was"
    );
}

pub(crate) fn quit(mut talker: Talker) {
    talker.send("quit");
    assert_eq!(talker.guard().wait().code(), Some(0));
}

/// Ends following, which must leave nothing in the process, and then the process.
pub(crate) fn leave(following: Following, talker: Talker) {
    following.end();
    assert_left_alone(talker.pid());
    quit(talker);
}

/// The hits of one round of a program that has just started.
fn first_round(talker: &mut Talker) -> u64 {
    talker.hits().iter().map(|(_, hits)| hits).sum()
}

/// Commands of `family` that start another program in a new process.
const START_COMMANDS: [&str; 4] = ["spawn", "vfork", "shell exec", "grandchild"];

// promise: Following: A process that receives signals faster than a tracer can resume it is detached
//    and runs on
#[test]
fn fast_signals_do_not_stop_a_followed_process() {
    for program in fixture_forms("ticking") {
        let mut talker = Talker::start(&program);
        let following = Following::attach(talker.pid());
        for command in ["sleep", "tick", "child"] {
            talker.ask(command, "ticked");
        }
        leave(following, talker);
    }
}

// promise: Following: Every process that a followed one starts or executes has its probes set
//    before it runs (2 × 14 children)
#[test]
fn started_processes_have_their_probes_before_they_run() {
    for [family, other] in [["pie", "nopie"], ["nopie", "pie"]] {
        let mut talker = Talker::start(&fixture(&format!("family.{family}")));
        let following = Following::attach(talker.pid());
        for line in ["fork", "clone"] {
            assert_eq!(talker.ask(line, "child"), "child hits ping=3 pong=1");
            talker.expect("started 0");
        }
        // Static, dynamic, and with all probes in a library, whose counts are those of its constructor.
        let programs = ["gen_ocaml_2_static", "idle_threads", "objects/linked"];
        for program in programs {
            for way in START_COMMANDS {
                // A shell has no probes: it is detached, and what it executes is not followed.
                let followed = u64::from(way != "shell exec");
                let path = fixture(&format!("{program}.{other}"));
                talker.ask(&format!("{way} {}", path.display()), "ready");
                match program {
                    "gen_ocaml_2_static" => assert_eq!(first_round(&mut talker), followed * 4),
                    "idle_threads" => assert_eq!(first_round(&mut talker), followed * 4),
                    _ => assert_eq!(
                        talker.ask("plugins", "plugins"),
                        format!("plugins 0:ping={followed},plug={}", 2 * followed)
                    ),
                }
                talker.ask("quit", "started 0");
            }
        }
        following.end();
        assert_eq!(states(talker.pid()), ON);
        assert_left_alone(talker.pid());
        quit(talker);
    }
}

// promise: Following: A followed process can be observed and updated: its follower lends it, and follows
//    what it forks, executes and loads meanwhile (2)
#[test]
fn followed_process_is_observed_and_updated() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        let pid = talker.pid();
        let mut following = Following::attach(pid);
        let count = start_observing("count -quiet", pid);
        talker.hits();
        for line in ["fork", "clone"] {
            assert_eq!(talker.ask(line, "child"), "child hits ping=3 pong=1");
            talker.expect("started 0");
        }
        let program = fixture("idle_threads.pie");
        talker.ask(&format!("spawn {}", program.display()), "ready");
        assert_eq!(first_round(&mut talker), 4);
        talker.ask("quit", "started 0");
        let lines = end(count, Signal::SIGINT);
        assert!(
            lines[0].starts_with("3 ") && lines[0].ends_with(" ping"),
            "{lines:?}"
        );
        assert!(
            lines[1].starts_with("1 ") && lines[1].ends_with(" pong"),
            "{lines:?}"
        );
        assert!(!is_observed(pid));

        for line in ["watch -probe ping", "latency -pair ping,pong"] {
            let tool = start_observing(&format!("{line} -quiet -for 1h"), pid);
            talker.hits();
            assert!(!end(tool, Signal::SIGTERM).is_empty(), "{line}");
        }
        run(&format!("attach -quiet -disable ping -pid {pid}")).answer();
        assert_eq!(states(pid), "ping disabled\npong enabled\n");

        // An exec is followed while the process is observed, which ends the observation.
        let count = start_observing("count -quiet", pid);
        talker.ask(&format!("exec {}", program.display()), "ready");
        assert_eq!(first_round(&mut talker), 4);
        drop(count);
        assert!(following.0.guard().is_running());
        following.end();
        assert_left_alone(pid);
        quit(talker);
    }
}

// promise: Following: A tool that another user's follower does not lend to says whose it is (2, as root)
#[test]
fn follower_of_another_user_is_named() {
    // Only root can be two users.
    if !geteuid().is_root() {
        return;
    }
    for file in fixture_forms("idle_threads") {
        // The user `nobody` possibly cannot enter the build directory.
        let directory = Directory::new("follower");
        let tool = directory.copy(env!("CARGO_BIN_EXE_ocaml-probes").as_ref(), "ocaml-probes");
        let file = directory.copy(&file, "program");
        let mut talker = Talker::spawn(&mut as_nobody(&file));
        talker.expect("ready");
        let pid = talker.pid();
        let mut attach = as_nobody(&tool);
        attach.args(["attach", "-follow", "-quiet", "-enable-all", "-pid"]);
        let following = Following::started(attach.arg(pid.to_string()), pid);
        let follower = following.0.pid();
        let why = format!(
            "process {pid} is followed by pid {follower} (ocaml-probes), a tool of another user"
        );
        for (line, live) in [
            ("count", ""),
            (
                "attach -disable-all",
                "; or use -live, which does not use ptrace",
            ),
        ] {
            let error = run(&format!("{line} -pid {pid}")).failure();
            assert!(error.contains(&why), "{error}");
            let hint = format!(
                "hint: run ocaml-probes as the user of process {follower}, or end that process{live}\n"
            );
            assert!(error.ends_with(&hint), "{error}");
        }
        talker.hits();
        leave(following, talker);
    }
}

/// Repeats `step` while other tools begin and end observing a process.
fn while_others_observe(pid: i32, mut step: impl FnMut()) {
    let observing = std::thread::spawn(move || {
        for _ in 0..20 {
            run(&format!("count -quiet -for 1ms -pid {pid}")).answer();
        }
    });
    while !observing.is_finished() {
        step();
    }
    observing.join().unwrap();
    assert!(!is_observed(pid));
}

// promise: Following: No load is missed while other tools begin and end observing the process (2 × 20
//    observations)
#[test]
fn no_load_is_missed_while_others_observe() {
    for host in fixture_forms("objects/host") {
        let mut talker = Talker::start(&host);
        let pid = talker.pid();
        let following = Following::attach(pid);
        let directory = Directory::new("follow-lending");
        let eager = directory.copy(&fixture("objects/eager.so"), "eager.so");
        let load = format!("load {}", eager.display());
        while_others_observe(pid, || {
            talker.ask(&load, "loaded 0");
            // In its own constructor, and in a round.
            let hits = talker.ask("plugins", "plugins");
            assert_eq!(hits, "plugins 0:ping=2,plug=4");
            talker.ask("unload 0", "unloaded");
        });
        following.end();
        assert_left_alone(pid);
        quit(talker);
    }
}

// promise: Following: No process that is started is missed while other tools begin and end observing
//    (2 × 20 observations)
#[test]
fn no_child_is_missed_while_others_observe() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        let pid = talker.pid();
        let following = Following::attach(pid);
        let program = fixture("idle_threads.pie");
        while_others_observe(pid, || {
            assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
            talker.expect("started 0");
            for way in ["spawn", "vfork", "grandchild"] {
                talker.ask(&format!("{way} {}", program.display()), "ready");
                assert_eq!(first_round(&mut talker), 4, "{way}");
                talker.ask("quit", "started 0");
            }
        });
        following.end();
        assert_left_alone(pid);
        quit(talker);
    }
}

#[test]
fn process_is_followed_through_several_execs() {
    for way in ["exec", "thread"] {
        let [pie, nopie] = fixture_forms("family");
        let mut talker = Talker::start(&pie);
        let pid = talker.pid();
        let following = Following::attach(pid);
        for program in [&nopie, &pie, &pie, &nopie] {
            talker.ask(&format!("{way} {}", program.display()), "ready");
            assert_eq!(first_round(&mut talker), 4);
        }
        // The last program has no probes, so its process is not changed.
        let without = fixture("no_probes.pie");
        talker.ask(&format!("{way} {}", without.display()), "ready");
        let mut tool = following.0;
        assert_eq!(tool.guard().wait().code(), Some(0), "no process remains");
        assert_left_alone(pid);
        quit(talker);
    }
}

#[test]
fn killed_follower_is_cleaned_up_by_the_next() {
    for host in fixture_forms("objects/host") {
        let mut talker = Talker::start(&host);
        let pid = talker.pid();
        let plugin = fixture("objects/plugin.so");
        let load = format!("load {}", plugin.display());
        let churn = format!("churn 200 {}", plugin.display());
        let mut following = Following::attach(pid);
        talker.ask(&load, "loaded 0");
        kill(Pid::from_raw(following.0.pid()), Signal::SIGKILL).unwrap();
        following.0.guard().wait();
        // What remains in its loader does no harm.
        assert!(process::is_loader_changed(pid));
        talker.ask("unload 0", "unloaded");
        talker.ask(&churn, "churned 200");
        talker.ask(&load, "loaded 0");
        assert_eq!(talker.ask("plugins", "plugins"), "plugins 0:ping=0,plug=0");
        let following = Following(Talker::spawn(&mut {
            let mut tool = command(["attach", "-follow", "-quiet", "-enable", "plug", "-pid"]);
            tool.arg(pid.to_string());
            tool
        }));
        eventually("it is traced", || {
            (status(pid, "TracerPid") != "0").then_some(())
        });
        following.end();
        assert_left_alone(pid);
        quit(talker);
    }
}

#[test]
fn daemons_are_followed_and_detached_with_the_others() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        let following = Following::attach(talker.pid());
        let program = fixture("idle_threads.pie");
        let line = talker.ask(&format!("daemon {}", program.display()), "daemon");
        let daemon: i32 = line.split(' ').nth(1).unwrap().parse().unwrap();
        eventually("it has executed its program", || {
            (status(daemon, "Name") == "idle_threads.pi").then_some(())
        });
        eventually("its probes are on", || (states(daemon) == ON).then_some(()));
        following.end();
        assert_left_alone(daemon);
        kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
        eventually(
            "it has exited, and does not read what is sent to its parent",
            || matches!(process::state(daemon), Some('Z') | None).then_some(()),
        );
        assert_left_alone(talker.pid());
        quit(talker);
    }
}

// promise: Following: Without `-follow`, a fork inherits the state of the probes and an exec loses
//    it (2)
#[test]
fn unfollowed_forks_inherit_probes_and_execs_lose_them() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start(&family);
        let pid = talker.pid();
        run(&format!("attach -quiet -pid {pid} -enable ping")).answer();
        assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=0");
        talker.expect("started 0");
        talker.ask(&format!("spawn {}", family.display()), "ready");
        assert_eq!(first_round(&mut talker), 0);
        talker.ask("quit", "started 0");
        talker.ask(&format!("exec {}", family.display()), "ready");
        assert_eq!(states(pid), OFF);
        quit(talker);
    }
}

#[test]
fn traced_program_is_followed_from_its_start() {
    for family in fixture_forms("family") {
        let mut tool = command(["trace", "-follow", "-wait", "-enable-all", "-prog"]);
        let mut talker = Talker::spawn(tool.arg(&family));
        talker.expect("ready");
        assert_eq!(first_round(&mut talker), 4);
        assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
        talker.expect("started 0");
        let eager = fixture("objects/eager.pie");
        talker.ask(&format!("spawn {}", eager.display()), "ready");
        assert_eq!(talker.ask("plugins", "plugins"), "plugins 0:ping=2,plug=4");
        talker.ask("quit", "started 0");
        talker.ask(&format!("exec {}", eager.display()), "ready");
        assert_eq!(talker.ask("plugins", "plugins"), "plugins 0:ping=2,plug=4");
        talker.send("quit");
        assert_eq!(talker.guard().wait().code(), Some(0));
    }
}

#[test]
fn followed_program_is_an_ordinary_job() {
    for job in fixture_forms("job") {
        let mut tool = command(["trace", "-follow", "-wait", "-quiet", "-prog"]);
        let mut talker = Talker::spawn(tool.arg(&job));
        talker.expect("ready");
        let pid = program_of(&talker);
        for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
            kill(Pid::from_raw(pid), signal).unwrap();
        }
        let probes = talker.hits().len();
        assert!(probes > 0);
        talker.send("exit 7");
        assert_eq!(talker.guard().wait().code(), Some(7));
    }
}

/// The program that a tool has started: the child of the tool that is not called `ocaml-probes`.
fn program_of(tool: &Talker) -> i32 {
    let children = process::children(tool.pid());
    let is_program = |pid: &&i32| status(**pid, "Name") != "ocaml-probes";
    *children.iter().find(is_program).unwrap()
}

#[test]
fn unread_output_does_not_keep_following_from_ending() {
    for file in fixture_forms("family") {
        let mut talker = Talker::start(&file);
        let pid = talker.pid();
        let (_reader, writer) = full_pipe();
        let line = format!("attach -follow -enable-all -pid {pid}");
        let mut tool = command(line.split(' '));
        let mut guard = Guard::spawn(tool.stdout(writer).stderr(Stdio::piped()));
        drop(tool);
        eventually("its probes are enabled", || {
            states(pid).contains("ping enabled").then_some(())
        });
        kill(Pid::from_raw(guard.pid()), Signal::SIGTERM).unwrap();
        assert_eq!(guard.wait().code(), Some(0));
        let mut said = String::new();
        let mut errors = guard.child().stderr.take().unwrap();
        errors.read_to_string(&mut said).unwrap();
        assert!(said.contains("the answer is cut off"), "{said}");
        assert_eq!(status(pid, "TracerPid"), "0");
        talker.ask("fork", "child");
    }
}

#[test]
fn followed_program_that_cannot_start_is_an_error() {
    let cases = [
        (
            "trace -follow -prog",
            "corrupt/not_elf",
            "is not an ELF file",
        ),
        ("trace -follow -prog", "nowhere", "No such file"),
    ];
    for (line, program, message) in cases {
        let mut tool = command(line.split(' '));
        let directory = fixture("family.pie").parent().unwrap().to_owned();
        tool.arg(directory.join(program));
        // While SIGCHLD is ignored, the kernel keeps no child that has exited.
        for starter in ["env", "env --ignore-signal=CHLD"] {
            let failure = run_command(&mut started_by(starter, &tool)).failure();
            assert!(failure.contains(message), "{failure}");
            assert!(failure.contains("the program was not started"), "{failure}");
        }
    }
}

#[test]
fn detached_follower_runs_on_after_the_tool_returns() {
    for family in fixture_forms("family") {
        let mut tool = command(["trace", "-follow", "-json", "-prog"]);
        tool.arg(&family)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut guard = Guard::spawn(&mut tool);
        let mut errors = BufReader::new(guard.child().stderr.take().unwrap());
        let mut talker = Talker::of(guard);
        let mut line = String::new();
        errors.read_line(&mut line).unwrap();
        let answer = object(&line);
        assert_eq!(answer["type"], "started");
        let pid = answer["pid"].as_i64().unwrap() as i32;
        talker.expect("ready");
        assert_eq!(talker.guard().wait().code(), Some(0));
        let follower: i32 = status(pid, "TracerPid").parse().unwrap();
        // The tracer is a thread of the follower.
        let follower: i32 = status(follower, "Tgid").parse().unwrap();
        assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
        talker.expect("started 0");
        kill(Pid::from_raw(follower), Signal::SIGTERM).unwrap();
        assert_left_alone(pid);
        talker.send("quit");
        eventually("the program ends", || {
            fs::metadata(format!("/proc/{pid}")).is_err().then_some(())
        });
    }
}

/// Waits for the next stop or continuation of a child of this process, as its parent sees it.
fn wait_status(pid: i32) -> WaitStatus {
    let flags = WaitPidFlag::WUNTRACED | WaitPidFlag::WCONTINUED | WaitPidFlag::WNOHANG;
    eventually("its parent sees it", || {
        match waitpid(Pid::from_raw(pid), Some(flags)).unwrap() {
            WaitStatus::StillAlive => None,
            status => Some(status),
        }
    })
}

// promise: Following: A followed process is stopped and continued as without a tool, and its parent
//    sees it (2 × 41 stops)
#[test]
fn followed_process_stops_as_usual_for_its_parent() {
    for family in fixture_forms("family") {
        let mut talker = Talker::start_job(&family);
        let pid = Pid::from_raw(talker.pid());
        let following = Following::attach(talker.pid());
        for signal in [Signal::SIGSTOP, Signal::SIGTSTP] {
            for _ in 0..20 {
                kill(pid, signal).unwrap();
                assert_eq!(wait_status(talker.pid()), WaitStatus::Stopped(pid, signal));
                kill(pid, Signal::SIGCONT).unwrap();
                assert_eq!(wait_status(talker.pid()), WaitStatus::Continued(pid));
                assert_eq!(talker.ask("fork", "child"), "child hits ping=3 pong=1");
                talker.expect("started 0");
            }
        }
        // It stays stopped when it is no longer followed, ...
        kill(pid, Signal::SIGSTOP).unwrap();
        assert_eq!(
            wait_status(talker.pid()),
            WaitStatus::Stopped(pid, Signal::SIGSTOP)
        );
        following.end();
        assert_left_alone(talker.pid());
        // A stopped thread that is detached wakes up for a moment before it stops again.
        eventually("it is stopped", || {
            (process::state(talker.pid()) == Some('T')).then_some(())
        });
        // ... and when it is followed again.
        let following = Following(Talker::spawn(&mut {
            let mut tool = command(["attach", "-follow", "-quiet", "-disable-all", "-pid"]);
            tool.arg(talker.pid().to_string());
            tool
        }));
        eventually("its loader is hooked", || {
            process::is_loader_changed(talker.pid()).then_some(())
        });
        talker.send("fork");
        let flags = Some(WaitPidFlag::WCONTINUED | WaitPidFlag::WNOHANG);
        assert_eq!(waitpid(pid, flags).unwrap(), WaitStatus::StillAlive);
        kill(pid, Signal::SIGCONT).unwrap();
        assert_eq!(wait_status(talker.pid()), WaitStatus::Continued(pid));
        talker.expect("child hits ping=0 pong=0");
        talker.expect("started 0");
        leave(following, talker);
    }
}

// promise: Following: Signals of a followed process arrive once, in order, and keep their
//    information (2 × 50 reports of 8 kinds)
#[test]
fn signals_of_a_followed_process_keep_their_information() {
    for signals in fixture_forms("signals") {
        let mut talker = Talker::start(&signals);
        let following = Following::attach(talker.pid());
        talker.ask("send", "sending");
        let received = talker.ask("received", "received");
        assert!(received.ends_with("lost 0 disordered 0"), "{received}");
        leave(following, talker);
    }
    for siginfo in fixture_forms("siginfo") {
        let mut talker = Talker::start(&siginfo);
        let following = Following::attach(talker.pid());
        for _ in 0..50 {
            let report = talker.ask("report", "report");
            assert!(report.ends_with("wrong=0"), "{report}");
        }
        leave(following, talker);
    }
}

// promise: Following: A process in vfork, or whose first thread has exited, is followed as far as
//    possible (2 × 3)
#[test]
fn vfork_and_exited_first_thread_are_followed() {
    for vforker in fixture_forms("vforker") {
        let mut talker = Talker::start(&vforker);
        let following = Following::attach(talker.pid());
        talker.vfork();
        // The tool cannot stop it to remove the hook, so the hook stays in its loader and does
        // nothing.
        following.end();
        eventually("it is not traced", || {
            (status(talker.pid(), "TracerPid") == "0").then_some(())
        });
        talker.ask("go", "vforked");
        // A process that is already in vfork when the tool attaches is reported as busy: the tool
        // does not wait for the end of the vfork.
        talker.vfork();
        let pid = talker.pid();
        let failure = run(&format!(
            "attach -follow -quiet -enable-all -force -pid {pid}"
        ))
        .failure();
        assert!(failure.contains("uninterruptible sleep"), "{failure}");
        talker.ask("go", "vforked");
        quit(talker);
    }
    for zombie in fixture_forms("zombie_leader") {
        let mut talker = Talker::start(&zombie);
        let mut tool = command(["attach", "-follow", "-quiet", "-enable-all", "-pid"]);
        let mut following = Talker::spawn(tool.arg(talker.pid().to_string()));
        eventually("it runs its handlers", || {
            (talker.hits().iter().map(|(_, hits)| hits).sum::<u64>() > 0).then_some(())
        });
        quit(talker);
        assert_eq!(
            following.guard().wait().code(),
            Some(0),
            "no process remains"
        );
    }
}

// promise: Following: A program is still followed after the process that started it was killed (2)
#[test]
fn program_is_followed_after_its_parent_was_killed() {
    for family in fixture_forms("family") {
        let mut tool = command([
            "trace",
            "-follow",
            "-wait",
            "-quiet",
            "-enable-all",
            "-prog",
        ]);
        let mut talker = Talker::spawn(tool.arg(&family));
        talker.expect("ready");
        let pid = program_of(&talker);
        kill(Pid::from_raw(talker.pid()), Signal::SIGKILL).unwrap();
        talker.guard().wait();
        talker.ask(&format!("exec {}", family.display()), "ready");
        assert_eq!(first_round(&mut talker), 4);
        talker.send("quit");
        eventually("the program ends", || {
            fs::metadata(format!("/proc/{pid}")).is_err().then_some(())
        });
    }
}

/// Makes `dynhost` fork, and start programs by create_process, system and execv; these programs
/// load its plugin, which executes a site when it is loaded.
fn start_programs_in_every_way(talker: &mut Talker, file: &Path) {
    let plugin = file.with_file_name("plug.cmxs");
    let load = format!("load {}", plugin.display());
    for way in ["create", "system", "exec"] {
        assert!(
            talker
                .ask("fork", "round")
                .starts_with("round host.shared=1")
        );
        assert_eq!(talker.expect("at exit"), "at exit");
        talker.expect("started 0");
        talker.ask(&format!("{way} {}", file.display()), "ready");
        // `system` starts a shell, which has no probes: neither it nor its command is followed.
        let hits = u64::from(way != "system");
        talker.ask(&load, "loaded");
        let round = talker.ask("run", "round");
        let expected = format!(
            "round host.shared={hits} shared={} plug_only={hits}",
            2 * hits
        );
        assert_eq!(round, expected, "{way}");
        if way != "exec" {
            talker.ask("quit", "started 0");
        }
    }
}

// promise: Following: OCaml programs are followed through `Unix.fork`, `create_process`, `execv`
//    and `Dynlink` (4)
#[test]
fn ocaml_programs_are_followed_with_their_plugins() {
    for file in program_forms("plugins/dynhost") {
        let mut talker = Talker::start(&file);
        let following = Following::attach(talker.pid());
        start_programs_in_every_way(&mut talker, &file);
        leave(following, talker);
        let mut tool = command([
            "trace",
            "-follow",
            "-wait",
            "-quiet",
            "-enable-all",
            "-prog",
        ]);
        let mut talker = Talker::spawn(tool.arg(&file));
        talker.expect("ready");
        start_programs_in_every_way(&mut talker, &file);
        quit(talker);
    }
}

// promise: Following: Several processes are followed at once, and if one of them is traced already,
//    none is changed (2)
#[test]
fn several_are_followed_unless_one_is_already_traced() {
    for family in fixture_forms("family") {
        let [one, mut other] = [(); 2].map(|()| Talker::start(&family));
        let first = Following::attach(one.pid());
        let pids = [one.pid(), other.pid()];
        let flags = pids.map(|pid| format!("-pid {pid}")).join(" ");
        let line = format!("attach -follow -json -enable-all {flags}");
        let refused = run(&line);
        assert_eq!((refused.code, &refused.stdout[..]), (Some(1), ""));
        assert!(
            refused.stderr.contains("is already traced by"),
            "{}",
            refused.stderr
        );
        assert_left_alone(other.pid());
        assert_eq!(states(other.pid()), OFF);
        first.end();

        let mut tool = command(line.split(' '));
        let mut tool = Guard::spawn(tool.stdout(Stdio::piped()));
        eventually("both are followed", || {
            let are_hooked = pids.into_iter().all(process::is_loader_changed);
            are_hooked.then_some(())
        });
        other.ask(&format!("exec {}", family.display()), "ready");
        assert_eq!(first_round(&mut other), 4);
        kill(Pid::from_raw(tool.pid()), Signal::SIGTERM).unwrap();
        assert_eq!(tool.wait().code(), Some(0));
        let answers = read(tool.child().stdout.take().unwrap());
        let reported = answers.lines().map(|line| {
            let answer = object(line);
            answer["pid"].as_i64().unwrap() as i32
        });
        // Once each when they were attached to, and once more when the other had exec'd.
        assert_eq!(
            reported.collect::<Vec<_>>(),
            [pids[0], pids[1], pids[1]],
            "{answers}"
        );
        pids.into_iter().for_each(assert_left_alone);
        quit(one);
        quit(other);
    }
}

pub(crate) fn read(mut stream: impl Read) -> String {
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

#[test]
fn children_that_cannot_be_opened_are_reported() {
    const CHILDREN: usize = 30;
    for file in fixture_forms("forker") {
        let mut talker = Talker::start(&file);
        // Enough for the process itself, and too few for all its children.
        let attach = command(["attach", "-follow", "-v", "-enable-all", "-pid"]);
        let mut tool = started_by("prlimit --nofile=30", &attach);
        tool.arg(talker.pid().to_string()).stderr(Stdio::piped());
        let mut following = Following::started(&mut tool, talker.pid());
        let stderr = following.0.guard().child().stderr.take().unwrap();
        let said = std::thread::spawn(move || {
            let mut said = String::new();
            BufReader::new(stderr).read_to_string(&mut said).unwrap();
            said
        });
        // Each starts the next one.
        let mut pids = vec![talker.pid()];
        for _ in 0..CHILDREN {
            talker.ask("child", "child");
            let children = process::children(pids[pids.len() - 1]);
            pids.push(children[0]);
        }
        kill(Pid::from_raw(following.0.pid()), Signal::SIGTERM).unwrap();
        // Some were not followed.
        assert_eq!(following.0.guard().wait().code(), Some(1));
        let said = said.join().unwrap();
        let is_followed = |pid: &i32| said.contains(&format!(" started process {pid}\n"));
        // What the first one starts that could not be opened is not followed.
        let refused = pids[1..].iter().position(|pid| !is_followed(pid)).unwrap();
        assert!(refused > 0, "{said}");
        let error = said
            .lines()
            .find(|line| line.contains("Too many open files"));
        let pid = pids[refused + 1].to_string();
        assert!(
            error.is_some_and(|error| error.contains(&pid)),
            "{pid}: {said}"
        );
        pids.iter().for_each(|&pid| assert_left_alone(pid));
        // Each waits for the next one, and the last one reads the lines.
        talker.hits();
        eventually("all of them wait", || {
            let mut states = pids.iter().map(|&pid| process::state(pid));
            states.all(|state| state == Some('S')).then_some(())
        });
    }
}

// A process that has exited is hidden from its parent until its tracer reaps it.
#[test]
fn exits_are_seen_without_free_descriptors() {
    let mut talker = Talker::start(&fixture("forker.pie"));
    let attach = command(["attach", "-follow", "-v", "-enable-all", "-pid"]);
    let mut tool = started_by("prlimit --nofile=30", &attach);
    tool.arg(talker.pid().to_string()).stderr(Stdio::piped());
    let mut following = Following::started(&mut tool, talker.pid());
    let stderr = following.0.guard().child().stderr.take().unwrap();
    let mut said = BufReader::new(stderr).lines().map(Result::unwrap);
    // Each starts the next one, until one cannot be opened.
    let mut last = talker.pid();
    loop {
        talker.ask("child", "child");
        last = process::children(last)[0];
        let pid = last.to_string();
        let said = said.find(|line| line.contains(&pid)).unwrap();
        if said.contains("Too many open files") {
            break;
        }
    }
    assert_left_alone(last);
    talker.ask("quit", "forked");
    // Its parent is followed, and so are the children that it starts now: most exit before they can be opened.
    for _ in 0..30 {
        talker.ask("fork", "forked");
    }
    kill(Pid::from_raw(following.0.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(following.0.guard().wait().code(), Some(1));
    assert_left_alone(talker.pid());
}
