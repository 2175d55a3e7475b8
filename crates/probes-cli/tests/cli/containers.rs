//! Programs in namespaces of their own, and the tool inside and outside of these namespaces.

use std::path::Path;
use std::process::Command;

use nix::unistd::geteuid;
use serde_json::{Value, json};
use test_support::container::{Container, enter};
use test_support::fixture_forms;

use crate::support::{Run, run, run_command};

/// A container with a program and the tool.
fn container(program: &Path) -> Container {
    let tool = Path::new(env!("CARGO_BIN_EXE_ocaml-probes"));
    Container::with(&[
        (program, Path::new("/host")),
        (tool, Path::new("/ocaml-probes")),
    ])
}

/// Runs the tool in the namespaces of process `pid`.
fn run_there(pid: i32, line: &str) -> Run {
    run_command(enter(pid).arg("/ocaml-probes").args(line.split(' ')))
}

fn pids(ps: &Value) -> Vec<&Value> {
    let processes = ps["processes"].as_array().unwrap().iter();
    processes.map(|process| &process["pid"]).collect()
}

// promise: Containers: A pid is the one that the caller sees, outside and inside a container
//    (2 programs)
#[test]
fn program_is_known_by_the_callers_pid() {
    for program in fixture_forms("objects/host") {
        let container = container(&program);
        let (mut talker, pid) = container.start(Path::new("/host"));
        assert_eq!(pids(&run_there(pid, "ps -json").json()), [&json!(1)]);
        let ps = run("ps -json").json();
        assert!(pids(&ps).contains(&&json!(pid)), "{ps}");

        let there = run_there(pid, "attach -json -pid 1 -enable ping").json();
        assert_eq!(there["pid"], 1);
        let here = run(&format!("info -json -pid {pid}")).json();
        assert_eq!(here["pid"], pid);
        assert_eq!(here["probes"][0]["state"], "enabled");
        assert_eq!(talker.ask("run", "hits"), "hits ping=3 pong=0");
        run(&format!("attach -pid {pid} -disable ping")).answer();
        let there = run_there(pid, "info -pid 1").answer();
        assert_eq!(there, "ping disabled\npong disabled\n");

        let error = run_there(pid, &format!("info -pid {pid}")).failure();
        let expected = format!("ocaml-probes: no process {pid}");
        assert!(error.starts_with(&expected), "{error}");
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}

// promise: Containers: The files of a program are read though its root directory is below one that the caller may not
//    enter: its functions are named, and observed (2 programs)
#[test]
fn files_below_a_hidden_root_are_read() {
    let tool = env!("CARGO_BIN_EXE_ocaml-probes");
    let run_there = |line: &str| {
        let mut command = Command::new(tool);
        if geteuid().is_root() {
            // Root without the capabilities by which it may enter every directory, and open every mapped file.
            command = Command::new("setpriv");
            command.arg("--bounding-set=-all,+sys_ptrace");
            command.arg(tool);
        }
        run_command(command.args(line.split(' ')))
    };
    for program in fixture_forms("objects/host") {
        let container = container(&program);
        let (mut talker, pid) = container.start(Path::new("/host"));
        container.hide(true);
        let functions = run_there(&format!("list -functions -json -pid {pid} getpid"));
        let count = run_there(&format!("count -fn getpid -for 10ms -pid {pid}"));
        container.hide(false);
        let objects = functions.json()["functions"].to_string();
        assert!(objects.contains("libc.so.6"), "{objects}");
        count.answer();
        talker.close_input();
        assert!(talker.guard().wait().success());
    }
}
