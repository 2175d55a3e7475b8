//! One observer per process: other tools name it in their errors, or take over with -force.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_support::container::{Container, enter, only_child};
use test_support::tmux::Terminal;
use test_support::{Guard, Scratch, Talker, eventually, fixture, fixture_forms};

use crate::count::{end, start_observing};
use crate::support::{Run, command, is_observed, object, run, run_command};

const TOOL: &str = env!("CARGO_BIN_EXE_ocaml-probes");

const HINT: &str = "hint: wait until that observer exits, or use -force: that observer then ends with an error, or waits if it is `serve`\n";

/// What `info` says of the observer of a process.
fn observer(pid: i32) -> Value {
    let info = run(&format!("info -json -quiet -pid {pid}")).json();
    info["observer"].clone()
}

/// Waits until the tool with this pid observes a process.
fn wait_for_observer(pid: i32, tool: i32) {
    eventually("the tool observes", || {
        (observer(pid)["pid"] == tool).then_some(())
    });
}

/// Starts a tool that takes a process over, and waits until it has.
fn taking_over(line: &str, pid: i32) -> Talker {
    taking_over_by(command(line.split(' ')), pid)
}

fn taking_over_by(mut command: Command, pid: i32) -> Talker {
    let tool = Talker::spawn(command.args(["-pid", &pid.to_string()]));
    wait_for_observer(pid, tool.pid());
    tool
}

/// Starts a tool whose standard error can be read, and waits until it observes.
pub(crate) fn watched(line: &str, pid: i32) -> Talker {
    let mut command = command(line.split(' '));
    command
        .args(["-pid", &pid.to_string()])
        .stderr(Stdio::piped());
    let tool = Talker::spawn(&mut command);
    wait_for_observer(pid, tool.pid());
    tool
}

/// Waits until a tool that counts has read the counters, from the first to the last.
pub(crate) fn wait_for_reading(tool: i32) {
    let bytes_read = || -> u64 {
        let io = std::fs::read_to_string(format!("/proc/{tool}/io")).unwrap();
        let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
        read.unwrap().parse().unwrap()
    };
    // One reading may look like two, if the tool is preempted within it, and the first may have begun before.
    const APART: Duration = Duration::from_millis(50);
    let (mut bytes, mut counted_at, mut readings) = (bytes_read(), Instant::now(), 0);
    eventually("the counters are read", || {
        let now = bytes_read();
        if now > bytes && counted_at.elapsed() > APART {
            (bytes, counted_at, readings) = (now, Instant::now(), readings + 1);
        }
        (readings == 4).then_some(())
    });
}

/// What a tool prints until it exits: its lines, what it says on standard error, and its status.
pub(crate) fn rest(mut tool: Talker) -> (Vec<String>, String, Option<i32>) {
    let lines = std::iter::from_fn(|| tool.line()).collect();
    let mut said = String::new();
    let mut stderr = tool.guard().child().stderr.take().unwrap();
    stderr.read_to_string(&mut said).unwrap();
    (lines, said, tool.guard().wait().code())
}

// promise: Observations: A second observer, whatever its command, is refused with the pid, command
//    and age of the first, and changes nothing (2 × 4 commands)
#[test]
fn second_observer_is_refused_whatever_the_command() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let first = start_observing("count -quiet -for 1h", pid);
        let who = format!(
            "pid {} (ocaml-probes count -quiet -for 1h -pid {pid})",
            first.pid()
        );
        for line in [
            "count",
            "watch -probe start",
            "latency -pair start,stop",
            "observe -clean",
        ] {
            let error = run(&format!("{line} -pid {pid}")).failure();
            let why = format!("ocaml-probes: process {pid} is already observed by {who}, for ");
            let age = error
                .strip_prefix(&why)
                .unwrap_or_else(|| panic!("{error}"));
            let expected = format!(" s; nothing was changed\n{HINT}");
            let age = age
                .strip_suffix(&expected)
                .unwrap_or_else(|| panic!("{error}"));
            assert!(age.parse::<u32>().unwrap() < 600, "{error}");
        }
        // Others read and switch its probes meanwhile.
        let info = run(&format!("info -pid {pid}"));
        let said = format!("2 sites are observed by {who}, for ");
        assert!(info.stderr.starts_with(&said), "{}", info.stderr);
        run(&format!("attach -enable start -pid {pid}")).answer();
        target.hits();
        run(&format!("attach -disable start -pid {pid}")).answer();
        let lines = end(first, Signal::SIGINT);
        assert!(
            lines[0].starts_with("1 ") && lines[1].starts_with("1 "),
            "{lines:?}"
        );
        assert_eq!(observer(pid), Value::Null);
        assert!(!is_observed(pid));
    }
}

#[test]
fn observers_of_a_traced_process_suggest_no_live() {
    let target = Talker::start(&fixture("timed.pie"));
    let pid = target.pid();
    let mut gdb = Command::new("gdb");
    gdb.args(["-q", "-nx", "-p", &pid.to_string()]);
    gdb.args(["-ex", "echo \\nattached\\n"]);
    let mut gdb = Talker::spawn(gdb.stderr(Stdio::null()));
    gdb.expect("attached");
    let hint = format!(
        "\nhint: detach or end the other tracer, gdb with pid {}",
        gdb.pid()
    );
    for line in ["count", "watch -probe start", "latency -pair start,stop"] {
        let error = run(&format!("{line} -pid {pid}")).failure();
        assert!(error.ends_with(&format!("{hint}\n")), "{error}");
    }
    // Only `attach` can do without ptrace.
    let error = run(&format!("attach -enable start -pid {pid}")).failure();
    assert!(error.contains(&format!("{hint}; or use -live")), "{error}");
}

// promise: Observations: An observer that is replaced prints its results, and then the process that
//    replaced it (2 × 4 commands)
#[test]
fn replaced_observer_prints_results_and_its_successor() {
    for file in fixture_forms("timed") {
        for (line, results) in [
            ("count -interval 1ms", 2),
            ("latency -pair start,stop -interval 1ms", 1),
            ("watch -probe start", 0),
            // They are read more often than shown.
            ("count -interval 1h", 2),
        ] {
            let mut target = Talker::start(&file);
            let pid = target.pid();
            let mut first = watched(line, pid);
            target.hits();
            if line.contains("1ms") {
                // Wait until the tool has read the hits.
                while !first.line().unwrap().contains(" 1 ") {}
            } else if line.contains("1h") {
                wait_for_reading(first.pid());
            }
            let mut second = taking_over("count -force -quiet", pid);
            let (lines, said, status) = rest(first);
            let who = format!(
                "pid {} (ocaml-probes count -force -quiet -pid {pid})",
                second.pid()
            );
            let expected = format!(
                "ocaml-probes: process {pid} has been taken over by {who}, which has removed this \
                 observation\n"
            );
            assert!(said.ends_with(&expected), "{line}: {said}");
            assert_eq!(status, Some(1), "{line}");
            let last = &lines[lines.len() - results..];
            assert!(
                last.iter().all(|it| it.starts_with("1 ")),
                "{line}: {lines:?}"
            );
            assert!(second.guard().is_running());
            target.hits();
            let lines = end(second, Signal::SIGINT);
            assert!(lines.iter().all(|it| it.starts_with("1 ")), "{lines:?}");
            assert!(!is_observed(pid));
        }
    }
}

// promise: Observations: If another tool replaces the observer of one of several processes, the others are still observed,
//    and it is reported once (2)
#[test]
fn others_are_observed_if_one_observer_is_replaced() {
    for file in fixture_forms("timed") {
        let (one, mut other) = (Talker::start(&file), Talker::start(&file));
        let mut count = command(["count", "-interval", "10ms"]);
        for target in [&one, &other] {
            count.args(["-pid", &target.pid().to_string()]);
        }
        let first = Talker::spawn(count.stderr(Stdio::piped()));
        for target in [&one, &other] {
            wait_for_observer(target.pid(), first.pid());
        }
        let pid = one.pid();
        let second = taking_over("count -force -quiet", pid);
        other.hits();
        wait_for_reading(first.pid());
        kill(Pid::from_raw(first.pid()), Signal::SIGINT).unwrap();
        let (lines, said, status) = rest(first);
        assert_eq!(status, Some(1), "{said}");
        let total = &lines[lines.len() - 2..];
        assert!(total.iter().all(|it| it.starts_with("1 ")), "{lines:?}");
        for once in [
            format!("process {pid} has been taken over by pid {}", second.pid()),
            format!(
                "another tool has replaced this observer of process {pid}: the results are those of the last reading"
            ),
            "failed for 1 of 2 processes; the others were observed".to_owned(),
        ] {
            assert_eq!(said.matches(&once).count(), 1, "{once}: {said}");
        }
        end(second, Signal::SIGINT);
        assert!(!is_observed(other.pid()));
    }
}

// promise: Observations: Every command that observes takes over with -force (2 × 7 commands)
#[test]
fn every_observing_command_takes_over_with_force() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut first = start_observing("count -quiet", pid);
        let serve = taking_over("serve -force -quiet -listen 127.0.0.1:0", pid);
        assert_eq!(first.guard().wait().code(), Some(1));
        end(serve, Signal::SIGTERM);
        let mut current = start_observing("count -quiet", pid);
        for line in [
            "count -force -quiet",
            "watch -force -quiet -probe start",
            "latency -force -quiet -pair start,stop",
            "hist -force -quiet -probe start -of tid",
        ] {
            let next = taking_over(line, pid);
            assert_eq!(current.guard().wait().code(), Some(1), "{line}");
            current = next;
        }
        let scratch = Scratch::new();
        let mut record = command(["record", "-force", "-quiet", "-probe", "start", "-o"]);
        record.arg(scratch.file("taken.json"));
        let next = taking_over_by(record, pid);
        assert_eq!(current.guard().wait().code(), Some(1), "record");
        current = next;
        let terminal = Terminal::open(100, 30);
        terminal.type_line(&format!("clear; {TOOL} top -force -pid {pid}"));
        terminal.wait_for(&format!(", process {pid}"));
        assert_eq!(current.guard().wait().code(), Some(1));
        wait_for_observer(pid, terminal.child("ocaml-probes"));
        // `top` learns it as well, and restores the terminal first.
        let cleaned = run(&format!("observe -clean -force -pid {pid}"));
        assert_eq!(cleaned.answer(), format!("{pid} 2\n"));
        terminal.wait_for("another tool has removed this");
        assert!(!is_observed(pid));
        target.hits();
    }
}

// promise: Observations: `info` distinguishes a running observer from a killed one, and the
//    observer after a killed one needs no `-force` (2)
#[test]
fn info_distinguishes_live_from_killed_observers() {
    let check = |line: &str| {
        let diagnosis = object(&run(line).stdout);
        let checks = diagnosis["checks"].as_array().unwrap();
        let mut checks = checks.iter().filter(|it| it["name"] == "stale_observation");
        checks.next().unwrap().clone()
    };

    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let mut tool = start_observing("count -quiet", pid);
        let alive = observer(pid);
        let keys: Vec<&String> = alive.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["alive", "command", "pid", "seconds"]);
        let command = format!("ocaml-probes count -quiet -pid {pid}");
        assert_eq!(
            (&alive["command"], &alive["alive"]),
            (&command.into(), &true.into())
        );
        assert!(alive["seconds"].as_f64().unwrap() >= 0.0);
        let of_process = format!("doctor -json -pid {pid}");
        assert_eq!(check(&of_process)["result"], "pass");
        kill(Pid::from_raw(tool.pid()), Signal::SIGKILL).unwrap();
        tool.guard().wait();
        let dead = observer(pid);
        assert_eq!(
            (&dead["pid"], &dead["alive"]),
            (&tool.pid().into(), &false.into())
        );
        let info = run(&format!("info -pid {pid}"));
        let expected = format!(
            "ocaml-probes: warning: 2 sites are instrumented, but no observer reads them: installed by pid {} \
             (ocaml-probes count -quiet -pid {pid})\n\
             hint: `ocaml-probes observe -clean -pid {pid}` removes what a killed observer left\n",
            tool.pid()
        );
        assert_eq!(info.stderr, expected);
        // `doctor` says the same, and without a process, in which ones.
        let found = check(&of_process);
        assert_eq!(found["result"], "fail", "{found}");
        let (left, hint) = (&found["finding"], &found["hint"]);
        let said = format!(
            "ocaml-probes: warning: {}\nhint: {}\n",
            left.as_str().unwrap(),
            hint.as_str().unwrap()
        );
        assert_eq!(said, expected);
        let found = check("doctor -json");
        let of_this = format!("process {pid}: {}", left.as_str().unwrap());
        let finding = found["finding"].as_str().unwrap();
        // Other tests have processes with killed observers, too.
        assert!(
            finding.contains(&of_this) || finding.contains(" more processes"),
            "{found}"
        );
        assert_eq!(
            found["hint"],
            "`ocaml-probes observe -clean -pid N` removes what a killed observer left"
        );
        let next = start_observing("count -quiet", pid);
        wait_for_observer(pid, next.pid());
        target.hits();
        assert_eq!(end(next, Signal::SIGINT).len(), 2);
    }
}

// promise: Observations: Of several tools that begin to observe at the same moment, one observes, and
//    the others are refused (2 × 4)
#[test]
fn one_of_several_tools_at_once_observes() {
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        let spawn = |_| {
            let mut tool = command(["count", "-pid", &pid.to_string()]);
            let tool = tool.stdin(Stdio::null()).stdout(Stdio::piped());
            Guard::spawn(tool.stderr(Stdio::piped()))
        };
        let mut tools: Vec<Guard> = (0..4).map(spawn).collect();
        let winner = eventually("one observes", || observer(pid)["pid"].as_i64());
        let is_winner = |tool: &Guard| i64::from(tool.pid()) == winner;
        let place = tools.iter().position(is_winner).unwrap();
        let mut winning = tools.remove(place);
        for mut tool in tools {
            assert_eq!(tool.wait().code(), Some(1));
            let mut said = String::new();
            let mut stderr = tool.child().stderr.take().unwrap();
            stderr.read_to_string(&mut said).unwrap();
            if said.contains("is being changed by") {
                // On a busy machine, the winner may take long to begin.
                said = run(&format!("count -pid {pid}")).stderr;
            }
            let expected = format!("process {pid} is already observed by pid {winner} (");
            assert!(said.contains(&expected), "{said}");
        }
        target.hits();
        kill(Pid::from_raw(winning.pid()), Signal::SIGINT).unwrap();
        assert_eq!(winning.wait().code(), Some(0));
        let mut counted = String::new();
        let mut stdout = winning.child().stdout.take().unwrap();
        stdout.read_to_string(&mut counted).unwrap();
        assert!(
            counted.lines().all(|line| line.starts_with("1 ")),
            "{counted}"
        );
    }
}

// promise: Observations: If a program under `trace -count` is taken over, the tool prints the
//    results until then and the process that took over, and the program runs on (2)
#[test]
fn traced_program_that_is_taken_over_runs_on() {
    for file in fixture_forms("timed") {
        let mut command = command(["trace", "-count", "-prog"]);
        let mut tool = Talker::spawn(command.arg(&file).stderr(Stdio::piped()));
        tool.expect("ready");
        tool.hits();
        let pid = eventually("the program runs", || {
            test_support::process::children(tool.pid()).first().copied()
        });
        let refused = run(&format!("count -pid {pid}")).failure();
        let who = format!("pid {} (ocaml-probes trace -count -prog ", tool.pid());
        assert!(refused.contains(&who), "{refused}");
        let second = taking_over("count -force -quiet", pid);
        tool.hits();
        let counted = end(second, Signal::SIGINT);
        assert_eq!(counted.len(), 2);
        tool.hits();
        assert!(!is_observed(pid));
        tool.close_input();
        let (_, said, status) = rest(tool);
        assert_eq!(status, Some(1), "not observed to its end: {said}");
        let lines: Vec<&str> = said.lines().collect();
        let [one, other, why] = lines[..] else {
            panic!("{said}");
        };
        assert!(one.starts_with("1 ") && other.starts_with("1 "), "{said}");
        assert!(
            why.contains(&format!("process {pid} has been taken over by pid ")),
            "{said}"
        );
    }
}

/// A container with a program and the tool.
fn container(program: &Path) -> Container {
    let tool = Path::new(TOOL);
    Container::with(&[
        (program, Path::new("/host")),
        (tool, Path::new("/ocaml-probes")),
    ])
}

fn in_container(pid: i32, line: &str) -> Command {
    let mut command = enter(pid);
    command.arg("/ocaml-probes").args(line.split(' '));
    command
}

fn run_in_container(pid: i32, line: &str) -> Run {
    run_command(&mut in_container(pid, line))
}

// promise: Observations: An observer is seen from other pid namespaces and other mounts of /proc, and
//    that it was killed is seen there, too (2, from both sides)
#[test]
fn observer_is_seen_from_another_pid_namespace() {
    for program in fixture_forms("objects/host") {
        let container = container(&program);
        let (mut talker, pid) = container.start(Path::new("/host"));
        let elsewhere = "of another pid namespace (ocaml-probes count -quiet -pid ";

        let mut outside = start_observing("count -quiet", pid);
        let refused = run_in_container(pid, "count -pid 1").failure();
        let expected = format!("observed by pid {} {elsewhere}{pid}), for ", outside.pid());
        assert!(refused.contains(&expected), "{refused}");
        let info = run_in_container(pid, "info -json -quiet -pid 1").json();
        assert_eq!(info["observer"]["pid"], Value::Null);
        assert_eq!(info["observer"]["alive"], true);
        kill(Pid::from_raw(outside.pid()), Signal::SIGKILL).unwrap();
        outside.guard().wait();
        let info = run_in_container(pid, "info -json -quiet -pid 1").json();
        assert_eq!(info["observer"]["alive"], false);

        // Without -force, as the observer before it was killed.
        let mut inside = in_container(pid, "count -quiet -pid 1");
        let mut inside = Guard::spawn(inside.stdin(Stdio::null()).stdout(Stdio::null()));
        eventually("the tool inside observes", || {
            (observer(pid)["alive"] == true).then_some(())
        });
        let refused = run(&format!("count -pid {pid}")).failure();
        assert!(
            refused.contains(&format!(" {elsewhere}1), for ")),
            "{refused}"
        );
        let tool = only_child(inside.pid());
        kill(Pid::from_raw(tool), Signal::SIGKILL).unwrap();
        inside.wait();
        let next = run(&format!("count -quiet -for 1ms -pid {pid}"));
        assert_eq!(next.answer().lines().count(), 2);
        talker.ask("run", "hits");
        assert!(!is_observed(pid));
    }
}
