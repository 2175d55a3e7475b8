//! Processes that are killed, exit or execute themselves anew just before each of the calls of an
//! update: it succeeds or says so, and nothing is left.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::faults;
use probes_lib::{Action, Effect, ErrorKind, State};
use test_support::process::{children, processes, stat};
use test_support::{Talker, eventually, fixture_forms, program_forms};

use crate::case::Case;
use crate::subject::{Subject, all, patient};

/// What happens to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    Exit,
    Exec,
}

/// No process with this id, and no zombie.
fn assert_gone(pid: i32) {
    eventually("nothing is left of it", || {
        (!processes().contains(&pid)).then_some(())
    });
}

/// Runs an update that meets the end before its nth call; says how many calls it made.
fn meet(case: &mut Case, file: &Path, args: &[&str], end: End, nth: usize) -> usize {
    let subject = Subject::start(file, args);
    let pid = subject.pid();
    let talker = Arc::new(Mutex::new(subject.talker));
    let theirs = Arc::clone(&talker);
    let lock = |talker: &Mutex<Talker>, line: &str| {
        let mut talker = talker.lock().unwrap_or_else(PoisonError::into_inner);
        talker.send(line);
    };
    faults::arm_event(nth, move || match end {
        End::Killed => kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap(),
        End::Exit => lock(&theirs, "quit"),
        End::Exec => lock(&theirs, "exec"),
    });
    let result = probes_lib::Target::open_to_change(pid)
        .and_then(|target| target.update_with(&all(Action::Enable), patient()));
    let record = faults::disarm();
    let is_met = record.calls.len() >= nth;
    let what = format!(
        "{end:?} before call {nth} of {}: {result:?}",
        file.display()
    );
    if is_met {
        case.count(match &result {
            Ok(_) => format!("{end:?}: done"),
            Err(error) => match error.kind() {
                ErrorKind::Exited { .. }
                | ErrorKind::Zombie { .. }
                | ErrorKind::NoSuchProcess { .. } => {
                    assert_ne!(end, End::Exec, "{what}");
                    format!("{end:?}: said to have exited")
                }
                ErrorKind::Executed { .. } => {
                    assert_eq!(end, End::Exec, "{what}");
                    assert_eq!(error.effect(), Effect::NothingChanged, "{what}");
                    format!("{end:?}: said to have executed")
                }
                _ => panic!("{what}"),
            },
        });
    } else {
        assert!(result.is_ok(), "{what}");
    }
    let mut talker = talker.lock().unwrap();
    if end == End::Exec && is_met {
        talker.expect("ready");
        let target = probes_lib::Target::open(pid).unwrap();
        let states = target.states().unwrap();
        let has = |state| states.probes().all(|probe| probe.state() == state);
        // It is the new program that was changed, if it was there first.
        let is_changed = result.is_ok() && has(State::Enabled);
        assert!(is_changed || has(State::Disabled), "{what}");
    }
    talker.hang_up();
    let status = talker.guard().wait();
    let is_killed = end == End::Killed && is_met;
    assert_eq!(status.success(), !is_killed, "{what}: {status}");
    assert_gone(pid);
    record.calls.len()
}

/// Before the first call, the second, and so on, until an update makes fewer.
fn sweep(case: &mut Case, file: &Path, args: &[&str], end: End) {
    for nth in 1.. {
        if meet(case, file, args, end, nth) < nth {
            break;
        }
    }
}

/// The children of this process that nobody has reaped.
fn zombies() -> Vec<i32> {
    let own = children(std::process::id() as i32);
    own.into_iter().filter(|&pid| stat(pid, 3) == "Z").collect()
}

#[test]
fn a_process_that_ends_before_any_call_of_an_update_is_said_to_have_ended() {
    let mut case = Case::begin("ended before each call", 4);
    let mut rounds = 0;
    while case.goes_on(rounds, 1) {
        for file in fixture_forms("threads_spin") {
            sweep(&mut case, &file, &["3"], End::Killed);
            sweep(&mut case, &file, &["2"], End::Exit);
        }
        for file in program_forms("threads") {
            sweep(&mut case, &file, &["2"], End::Killed);
        }
        if case.is_long() {
            for file in fixture_forms("churn") {
                sweep(&mut case, &file, &[], End::Killed);
                sweep(&mut case, &file, &[], End::Exit);
            }
        }
        rounds += 1;
    }
    assert_eq!(zombies(), [0; 0]);
}

#[test]
fn a_process_that_executes_another_program_before_any_call_of_an_update_is_said_to() {
    let mut case = Case::begin("executed before each call", 4);
    let mut rounds = 0;
    while case.goes_on(rounds, 1) {
        for file in fixture_forms("exec_self") {
            sweep(&mut case, &file, &[], End::Exec);
        }
        rounds += 1;
    }
    assert_eq!(zombies(), [0; 0]);
}
