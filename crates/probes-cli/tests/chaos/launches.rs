//! Every system call of a launch with probes is made to fail in turn, or the tool is killed at it:
//! either the program runs with its probes set, or it does not run and no child remains.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use probes_lib::faults::{self, Call, FaultRecord};
use probes_lib::{Action, Effect, Launch, Observation, Selector};
use test_support::process::{children, processes};
use test_support::{Guard, Scratch, eventually, program_forms};

use crate::case::Case;
use crate::subject::all;
use crate::tool;

/// What `terminating` prints with all its probes on.
const HANDLED: &str = "handlers fooia=5 foobar=2 collatz=112";

/// The pids of the processes that run `file`.
fn running(file: &Path) -> Vec<i32> {
    let runs = |pid: &i32| {
        let exe = fs::read_link(format!("/proc/{pid}/exe"));
        exe.is_ok_and(|exe| exe == file)
    };
    processes().into_iter().filter(runs).collect()
}

/// Asserts that `output` is empty, or is what the program prints if its probes are set; returns
/// whether it is not empty.
fn has_run(output: &Path, what: &str) -> bool {
    let text = fs::read_to_string(output).unwrap();
    let is_handled = text.contains(HANDLED) && text.ends_with("handler finished\n");
    assert!(text.is_empty() || is_handled, "{what}: {text}");
    is_handled
}

fn launch(
    case: &mut Case,
    directory: &Scratch,
    file: &Path,
    script: &str,
    is_observed: bool,
) -> FaultRecord {
    let output = directory.file("output");
    let mut command = Command::new(file);
    command.stdin(Stdio::null());
    command.stdout(File::create(&output).unwrap());
    let mut launch = Launch::new(command).actions(all(Action::Enable));
    if is_observed {
        launch = launch.observe(Observation::new().count(Selector::All));
    }
    let before = children(std::process::id() as i32);
    faults::arm(script);
    let launched = launch.spawn();
    let record = faults::disarm();
    let what = format!("{script}, observed: {is_observed}: {record}: {launched:?}");
    match launched {
        Ok(launched) => {
            let status = Guard::from(launched.into_child()).wait();
            // An injected error of a resume leaves the program stopped; the kernel kills it when its
            // tracer exits, unless a later call has resumed it.
            assert!(
                status.success()
                    || record.failed_calls.contains(&Call::Restart)
                    || record.failed_calls.contains(&Call::Detach),
                "{what}: {status}"
            );
            assert_eq!(has_run(&output, &what), status.success(), "{what}");
            case.count("calls failed: started nevertheless");
        }
        Err(error) => {
            assert_eq!(error.effect(), Effect::NotStarted, "{what}");
            // Zombies are children too.
            assert_eq!(children(std::process::id() as i32), before, "{what}");
            assert_eq!(running(file), [0; 0], "{what}");
            assert!(!has_run(&output, &what), "{what}");
            // A program that was detached runs on until it is killed; this one must not run at all.
            assert!(!record.calls.contains(&Call::Detach), "{what}");
            case.count("calls failed: not started");
        }
    }
    record
}

// promise: Launching programs: If a system call of a launch fails, the program runs with its probes
//    set or does not run, and no child remains, whether it is to be observed or not (500 failed calls)
#[test]
fn failed_launch_leaves_no_program_with_probes_unset() {
    let mut case = Case::begin("failing calls of a launch", 2);
    let directory = Scratch::new();
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in program_forms("terminating") {
            let copy = directory.copy(&file, &format!("program{rounds}"));
            for (fault, is_observed) in [
                ("error", false),
                ("error-within", false),
                ("errors-write", false),
                ("errors", false),
                ("error", true),
            ] {
                for nth in 1.. {
                    let mut calls = 0;
                    // `#N` is the Nth error that this call can return (faults.rs); past the last one, no call fails.
                    for error in 0.. {
                        let script = format!("{fault}:{nth}:#{error}");
                        let record = launch(&mut case, &directory, &copy, &script, is_observed);
                        calls = match fault {
                            "error" | "errors" => record.calls.len(),
                            _ => record.calls.iter().filter(|call| call.is_write()).count(),
                        };
                        if record.first_failed.is_none() {
                            break;
                        }
                    }
                    if calls < nth {
                        break;
                    }
                }
            }
        }
        rounds += 1;
    }
}

// promise: Launching programs: If the tool is killed during a launch, the program runs with its
//    probes set or does not run (64 kills)
#[test]
fn killed_launch_leaves_no_program_with_probes_unset() {
    let mut case = Case::begin("tool killed before each call of a launch", 2);
    let directory = Scratch::new();
    let output = directory.file("output");
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in program_forms("terminating") {
            let copy = directory.copy(&file, &format!("program{rounds}"));
            let path = copy.to_str().unwrap();
            for fault in ["kill", "kill-within"] {
                for nth in 1.. {
                    let fault = format!("{fault}:{nth}");
                    let mut trace = tool::command("trace -enable-all -prog");
                    trace.arg(path).stdout(File::create(&output).unwrap());
                    let status = tool::start(trace, &fault).wait();
                    eventually("the program has exited, or was never started", || {
                        running(&copy).is_empty().then_some(())
                    });
                    case.count(if has_run(&output, &fault) {
                        "killed: the program has run"
                    } else {
                        "killed: the program has not run"
                    });
                    if status.success() {
                        break;
                    }
                }
            }
        }
        rounds += 1;
    }
}
