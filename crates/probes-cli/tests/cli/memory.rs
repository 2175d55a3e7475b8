//! With little memory, commands that stop processes work, or fail with an error.

use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_support::{Talker, eventually, fixture, fixture_forms, program};

use crate::count_functions::start_observing_by;
use crate::support::{Run, command, image, is_observed, run, run_command, started_by, states};

/// The tool with the arguments `line`, under a limit of prlimit(1).
fn limited(limit: &str, line: &str) -> Command {
    started_by(&format!("prlimit {limit}"), &command(line.split(' ')))
}

/// Runs it in 40,000 KiB of address space: too little for malloc to give a thread a heap of its own.
fn in_little_memory(line: &str) -> Run {
    run_command(&mut limited("--as=40960000", line))
}

// promise: Bad input: With 40 MB of address space, commands work (5)
#[test]
fn commands_work_in_little_memory() {
    let file = program("terminating");
    let counted = in_little_memory(&format!("trace -count -prog {}", file.display()));
    assert_eq!(counted.code, Some(0), "{}", counted.stderr);
    assert!(counted.stderr.starts_with("112 "), "{}", counted.stderr);
    for file in fixture_forms("timed") {
        let mut target = Talker::start(&file);
        let pid = target.pid();
        for line in [
            "count -for 1ms",
            "latency -pair start,stop -for 1ms",
            "attach -enable start -for 1ms",
        ] {
            in_little_memory(&format!("{line} -pid {pid}")).answer();
        }
        let line = format!("attach -follow -enable-all -pid {pid}");
        let mut follow = limited("--as=40960000", &line);
        let mut follow = Talker::spawn(follow.stderr(Stdio::null()));
        eventually("it is followed", || {
            states(pid).contains("start enabled").then_some(())
        });
        kill(Pid::from_raw(follow.pid()), Signal::SIGTERM).unwrap();
        assert_eq!(follow.guard().wait().code(), Some(0));
        target.hits();
    }
}

// promise: Observations: `trace` does not start a program to which a limit would leave less memory than observing
//    takes (2)
#[test]
fn program_is_not_started_with_too_little_memory() {
    for file in fixture_forms("timed") {
        let line = format!("trace -watch start -prog {}", file.display());
        let error = in_little_memory(&line).failure();
        let why =
            " KiB more have to be left to the program, but RLIMIT_AS allows 40000 KiB, of which ";
        assert!(error.contains(why), "{error}");
        assert!(error.contains("; the program was not started\n"), "{error}");
        assert!(
            error.contains(
                "hint: `ulimit -v` sets the limit; -count without -by needs the least memory"
            ),
            "{error}"
        );
    }
}

#[test]
fn too_little_memory_is_an_error_at_once() {
    let target = Talker::start(&fixture("timed.pie"));
    let pid = target.pid();
    let before = image(pid);
    for line in ["count", "watch -regexp .", "attach -enable-all", "top"] {
        let line = format!("{line} -pid {pid}");
        let error = run_command(&mut limited("--data=7340032", &line)).failure();
        let why = "ocaml-probes: too little memory: 8 MiB have to be free to begin; nothing was changed\n\
                   hint: is memory or the number of processes limited (`ulimit -v`, `ulimit -u`)?\n";
        assert_eq!(error, why, "{line}");
    }
    assert!(image(pid) == before);
}

#[test]
fn times_larger_than_memory_are_an_error() {
    let mut target = Talker::start(&fixture("timed.pie"));
    let pid = target.pid();
    let pairs = "-pair start,stop -pair stop,start -pair start,start -pair stop,stop";
    let line = format!("latency {pairs} -for 60s -pid {pid}");
    // The observation is read piece by piece: the larger the limit, the later the piece that exceeds it.
    for megabytes in [10, 11, 12, 13] {
        let limit = format!("--data={megabytes}000000");
        let tool = start_observing_by(&mut limited(&limit, &line), 1);
        // If a thousand threads have slots, each pair takes five megabytes.
        target.ask("pairs 1500 1", "pairs");
        let failed = tool.until_end();
        assert_eq!(failed.code, Some(1), "{limit}: {}", failed.stderr);
        for part in ["cannot read observation data", ": Out of memory"] {
            assert!(failed.stderr.contains(part), "{limit}: {}", failed.stderr);
        }
        target.hits();
        // The next observation unmaps what this one has left mapped.
        run(&format!("count -for 1ms -pid {pid}")).answer();
        assert!(!is_observed(pid));
    }
}
