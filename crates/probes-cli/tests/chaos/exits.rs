//! A process is killed, exits or execs just before each system call of an update: the update
//! succeeds or reports what happened, and no process or zombie remains.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::faults;
use probes_lib::{Action, Effect, Report, State};
use test_support::process::{children, stat, state};
use test_support::{Scratch, Talker, eventually, fixture, fixture_forms, program_forms};

use crate::case::Case;
use crate::process_with_event::{Event, ProcessWithEvent, assert_gone};
use crate::subject::{Subject, all, patient_options, state_after};
use crate::tool;

/// Enables all probes of a process.
fn enable_all(pid: i32) -> probes_lib::Result<Report> {
    probes_lib::Target::open(pid)
        .map_err(|error| error.with_effect_if_none(Effect::NothingChanged))
        .and_then(|target| target.update_with(&all(Action::Enable), patient_options()))
}

/// Updates a process to which `event` happens before the nth system call of the update; returns how many calls were
/// made.
fn update_with_event_before(
    case: &mut Case,
    file: &Path,
    args: &[&str],
    event: Event,
    nth: usize,
) -> usize {
    let process = ProcessWithEvent::of(Subject::start(file, args), event);
    let (result, calls) = process.run_with_event_before(nth, || enable_all(process.pid));
    let has_happened = calls >= nth;
    let what = format!(
        "{event:?} before call {nth} of {}: {result:?}",
        file.display()
    );
    if has_happened {
        case.count(match &result {
            Ok(_) => format!("{event:?}: done"),
            Err(error) if error.is_gone() => {
                assert_ne!(event, Event::Exec, "{what}");
                format!("{event:?}: reported as exited")
            }
            Err(error) if error.is_exec() => {
                assert_eq!(event, Event::Exec, "{what}");
                assert_eq!(error.effect(), Effect::NothingChanged, "{what}");
                format!("{event:?}: reported as exec'd")
            }
            Err(_) => panic!("{what}"),
        });
    } else {
        assert!(result.is_ok(), "{what}");
    }
    if event == Event::Exec && has_happened {
        process.talker().expect("ready");
        let target = probes_lib::Target::open(process.pid).unwrap();
        let states = target.states().unwrap();
        let has = |state| states.probes().all(|probe| probe.state() == state);
        // If the exec came first, it is the new program that was changed.
        let is_changed = result.is_ok() && has(State::Enabled);
        assert!(is_changed || has(State::Disabled), "{what}");
    }
    process.end(has_happened, &what);
    calls
}

/// Runs [`update_with_event_before`] for the first call, the second, and so on, until an update makes fewer.
fn end_before_each_call(case: &mut Case, file: &Path, args: &[&str], event: Event) {
    for nth in 1.. {
        if update_with_event_before(case, file, args, event, nth) < nth {
            break;
        }
    }
}

/// The zombies among the children of this process.
fn zombies() -> Vec<i32> {
    let own = children(std::process::id() as i32);
    own.into_iter().filter(|&pid| stat(pid, 3) == "Z").collect()
}

// promise: Exit, exec and fork of the process: A process that exits before any system call of an
//    update is reported as exited; nothing hangs, no zombie remains (before each call, about 400 in
//    all)
#[test]
fn exit_before_any_call_of_update_is_reported() {
    let mut case = Case::begin("exited before each call", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("threads_spin") {
            end_before_each_call(&mut case, &file, &["3"], Event::Kill);
            end_before_each_call(&mut case, &file, &["2"], Event::Exit);
        }
        for file in program_forms("threads") {
            end_before_each_call(&mut case, &file, &["2"], Event::Kill);
        }
        if case.is_long() {
            for file in fixture_forms("churn") {
                end_before_each_call(&mut case, &file, &[], Event::Kill);
                end_before_each_call(&mut case, &file, &[], Event::Exit);
            }
        }
        rounds += 1;
    }
    for event in [Event::Kill, Event::Exit] {
        let reported = case.counted(&format!("{event:?}: reported as exited"));
        assert!(reported > 0, "{event:?}");
    }
    assert!(zombies().is_empty(), "{:?}", zombies());
}

// promise: Exit, exec and fork of the process: An exec before any system call of an update is reported, and the new program is not
//    written to; or if it came first, the new program is changed (before each call, about 110 in all)
#[test]
fn exec_before_any_call_of_update_is_reported() {
    let mut case = Case::begin("exec'd before each call", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("exec_self") {
            end_before_each_call(&mut case, &file, &[], Event::Exec);
        }
        rounds += 1;
    }
    assert!(case.counted("Exec: reported as exec'd") > 0);
    assert!(zombies().is_empty(), "{:?}", zombies());
}

/// Runs `attach` on two processes, of which the second is killed before the tool's nth system call of the update.
/// Returns what happened to them; `None` if the tool makes fewer calls.
fn kill_second_before(file: &Path, nth: usize) -> Option<String> {
    let first = Subject::start(file, [] as [&str; 0]);
    let mut second = Talker::start(file);
    let line = format!(
        "attach -enable-all -pid {} -pid {}",
        first.pid(),
        second.pid()
    );
    let mut command = tool::command(&line);
    command.stderr(Stdio::piped());
    let mut attach = tool::start(command, &format!("stop:{nth}"));
    let is_stopped = eventually("the tool is stopped, or has exited", || {
        let is_over = !attach.is_running();
        let is_stopped = !is_over && state(attach.pid()) == Some('T');
        (is_over || is_stopped).then_some(is_stopped)
    });
    if !is_stopped {
        let status = attach.wait();
        assert!(status.success(), "without a kill: {status}");
        return None;
    }
    second.guard().child().kill().unwrap();
    // It is not waited for: as long as the tool that traces it is stopped, it cannot be reaped.
    eventually("it is a zombie", || {
        (state(second.pid()) == Some('Z')).then_some(())
    });
    kill(Pid::from_raw(attach.pid()), Signal::SIGCONT).unwrap();
    let mut errors = String::new();
    let mut stderr = attach.child().stderr.take().unwrap();
    stderr.read_to_string(&mut errors).unwrap();
    let code = attach.wait().code();
    let last = errors.lines().next_back().unwrap_or_default();
    let (outcome, action) = match (code, last) {
        (Some(0), _) => ("changed both", Action::Enable),
        (Some(1), "ocaml-probes: failed for 1 of 2 processes; no process was changed") => {
            ("changed none", Action::Disable)
        }
        (Some(1), "ocaml-probes: failed for 1 of 2 processes; the others were changed") => {
            ("changed the other", Action::Enable)
        }
        _ => panic!("before call {nth}: {code:?}, {errors}"),
    };
    let prefix = format!("ocaml-probes: {}: ", second.pid());
    assert_eq!(code == Some(0), !errors.contains(&prefix), "{errors}");
    first.assert_all(state_after(action), &errors);
    first.end();
    Some(outcome.to_owned())
}

// promise: Objects that come and go: If one of several processes exits during the update, it is
//    named, and the error says what happened to the other (before each call, about 500 in all)
#[test]
fn exit_of_one_of_several_processes_is_reported() {
    let mut case = Case::begin("one of two exited before each call", 2);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("multi_semaphore") {
            for nth in 1.. {
                match kill_second_before(&file, nth) {
                    Some(outcome) => case.count(outcome),
                    None => break,
                }
            }
        }
        rounds += 1;
    }
    for outcome in ["changed none", "changed the other"] {
        assert!(case.counted(outcome) > 0, "{outcome}");
    }
}

/// Updates a process in a container, whose plugin is on a mount that only the container has, and
/// whose init is killed before the nth system call of the update; returns how many calls were made.
fn kill_container_before(case: &mut Case, file: &Path, nth: usize) -> usize {
    const SCRIPT: &str = r#"mount -t tmpfs tmpfs "$1"; cp "$2" "$1"; "$0"; true"#;
    let scratch = Scratch::new();
    let mut unshare = Command::new("unshare");
    let namespaces = ["--user", "--map-root-user", "--mount", "--pid", "--fork"];
    unshare
        .args(namespaces)
        .args(["--kill-child", "sh", "-euc", SCRIPT]);
    unshare
        .arg(file)
        .arg(scratch.path())
        .arg(fixture("objects/plugin.so"));
    let mut outer = Talker::spawn(&mut unshare);
    outer.expect("ready");
    outer.ask(
        &format!("load {}/plugin.so", scratch.path().display()),
        "loaded",
    );
    let init = children(outer.pid())[0];
    let pid = children(init)[0];

    faults::arm_event(nth, move || {
        kill(Pid::from_raw(init), Signal::SIGKILL).unwrap();
    });
    let result = enable_all(pid);
    let calls = faults::disarm().calls.len();
    let what = format!("before call {nth} of {}: {result:?}", file.display());
    match &result {
        Ok(report) => {
            let plug = report.changed.iter().find(|one| one.name == "plug");
            assert_eq!(plug.map(|plug| plug.sites), Some(2), "{what}");
        }
        Err(error) => {
            assert!(calls >= nth && error.is_gone(), "{what}");
            case.count("reported as exited");
        }
    }
    outer.close_input();
    outer.guard().wait();
    assert_gone(pid);
    calls
}

// promise: Containers: A container that exits before any system call of an update is reported as
//    exited (before each call, about 170 in all)
#[test]
fn exit_of_a_container_during_update_is_reported() {
    let mut case = Case::begin("container exited before each call", 2);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("objects/host") {
            for nth in 1.. {
                if kill_container_before(&mut case, &file, nth) < nth {
                    break;
                }
            }
        }
        rounds += 1;
    }
    assert!(case.counted("reported as exited") > 0);
}
