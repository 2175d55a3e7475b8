//! Stopping: threads that come and go, pending signals, processes that are already stopped, and
//! those that exec, fork or wait in vfork during an update.

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use probes_lib::{
    Action, Effect, ErrorKind, Observation, Options, ProcessError, Selector, State, Subject, Target,
};
use test_support::process;
use test_support::{Talker, eventually, fixture_forms};

use crate::session::{Session, all, heavy_test_lock, patient};

// promise: Stopping and resuming: A process whose first thread has exited is changed through
//    another thread (2 × 101 updates)
#[test]
fn process_without_first_thread_is_changed() {
    for file in fixture_forms("zombie_leader") {
        let mut session = Session::start(&file);
        assert_eq!(process::state(session.pid()), Some('Z'));
        for _ in 0..50 {
            session.apply(&all(Action::Enable)).unwrap();
            session.apply(&all(Action::Disable)).unwrap();
        }
        session.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(session.run()["ping"], 3);
        assert_eq!(process::state(session.pid()), Some('Z'));
        session.end();
    }
}

#[test]
fn job_control_stop_is_seen_without_first_thread() {
    for file in fixture_forms("zombie_leader") {
        let session = Session::start(&file);
        assert!(!session.target.is_stopped().unwrap());
        let pid = Pid::from_raw(session.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        let is_stopped = || session.target.is_stopped().unwrap().then_some(());
        eventually("it is seen to be stopped", is_stopped);
        kill(pid, Signal::SIGCONT).unwrap();
        eventually("it is seen to run", || {
            (!session.target.is_stopped().unwrap()).then_some(())
        });
        session.end();
    }
}

// promise: Stopping and resuming: The longest time limit is no limit (2)
#[test]
fn longest_time_limit_is_no_limit() {
    let options = Options {
        time_limit: Duration::MAX,
        ..Options::default()
    };
    for file in fixture_forms("timed") {
        let session = Session::start(&file);
        let target = &session.target;
        let enable = target.update_with(&all(Action::Enable), options).unwrap();
        let observation = Observation::new().count(Selector::All);
        let mut observer = target.observe(&observation, options).unwrap();
        observer.remove().unwrap();
        target.clean(options).unwrap();
        target.undo(&enable, options).unwrap();
        session.end();
    }
}

// promise: Stopping and resuming: A process that was stopped before an update stays stopped after
//    it (2 × 2 signals × 41 updates)
#[test]
fn stopped_process_stays_stopped_and_is_changed() {
    let flags = WaitPidFlag::WUNTRACED | WaitPidFlag::WCONTINUED | WaitPidFlag::WNOHANG;
    for file in fixture_forms("gen_ocaml_2") {
        for signal in [Signal::SIGSTOP, Signal::SIGTSTP] {
            let mut session = Session::of(Talker::start_job(&file));
            let pid = Pid::from_raw(session.pid());
            kill(pid, signal).unwrap();
            eventually("its parent sees that it has stopped", || {
                let status = waitpid(pid, Some(flags)).unwrap();
                (status == WaitStatus::Stopped(pid, signal)).then_some(())
            });
            for _ in 0..20 {
                session.apply(&all(Action::Enable)).unwrap();
                session.apply(&all(Action::Disable)).unwrap();
            }
            session.apply(&all(Action::Enable)).unwrap();
            session.assert_all((1, State::Enabled));
            eventually("it is stopped again", || {
                (process::state(session.pid()) == Some('T')).then_some(())
            });
            let seen = waitpid(pid, Some(flags)).unwrap();
            assert_eq!(seen, WaitStatus::StillAlive, "its parent notices nothing");

            kill(pid, Signal::SIGCONT).unwrap();
            eventually("its parent sees that it continues", || {
                let status = waitpid(pid, Some(flags)).unwrap();
                (status == WaitStatus::Continued(pid)).then_some(())
            });
            assert!(session.run().values().all(|&hits| hits > 0));
            session.end();
        }
    }
}

// promise: Stopping and resuming: Each thread of a process that was stopped before an update is
//    stopped again after it (2 targets)
#[test]
fn stopped_threads_stay_stopped_and_are_changed() {
    let _lock = heavy_test_lock();
    for file in fixture_forms("threads_spin") {
        let mut session = Session::start(&file);
        let pid = Pid::from_raw(session.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        let all_stopped = || {
            let are_stopped = process::threads(pid.as_raw())
                .into_iter()
                .all(|tid| process::status(tid, "State").starts_with('T'));
            are_stopped.then_some(())
        };
        eventually("every thread is stopped", all_stopped);
        session.apply(&all(Action::Enable)).unwrap();
        eventually("every thread is stopped again", all_stopped);
        kill(pid, Signal::SIGCONT).unwrap();
        eventually("its threads reach the probes", || {
            session.run().values().all(|&hits| hits > 0).then_some(())
        });
    }
}

// promise: Signals: Thousands of queued signals are delivered once and in order during updates (2 ×
//    200 updates, at least 2,000 signals)
#[test]
fn queued_signals_arrive_once_and_in_order() {
    let _lock = heavy_test_lock();
    for file in fixture_forms("signals") {
        let mut session = Session::start(&file);
        session.talker.ask("send", "sending");
        for _ in 0..100 {
            session.apply(&all(Action::Enable)).unwrap();
            session.apply(&all(Action::Disable)).unwrap();
        }
        assert_signals_arrived(&mut session.talker);
        session.end();
    }
}

/// Asserts that the fixture `signals` has received all its signals.
#[track_caller]
fn assert_signals_arrived(talker: &mut Talker) {
    let line = talker.ask("received", "received");
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let count: u64 = words[1].parse().unwrap();
    assert!(count >= 2000, "{line}");
    assert_eq!(words[2..], ["lost", "0", "disordered", "0"], "{line}");
}

// promise: Stopping and resuming: A thread of the tool that waits for the process all the time hides
//    neither its stops nor its signals from updates and observations (2 × 50, at least 2,000 signals)
#[test]
fn wait_in_another_thread_hides_no_stop() {
    let _lock = heavy_test_lock();
    for file in fixture_forms("signals") {
        let mut talker = Talker::start(&file);
        let pid = Pid::from_raw(talker.pid());
        let target = Target::open(talker.pid()).unwrap();
        talker.ask("send", "sending");
        let is_over = AtomicBool::new(false);
        let done = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    // Consumes the ptrace-stops of its child.
                    let _ = waitpid(pid, Some(WaitPidFlag::WUNTRACED | WaitPidFlag::WNOHANG));
                }
            });
            let update = |action| target.update_with(&all(action), patient()).map(drop);
            let change = || -> probes_lib::Result<()> {
                for _ in 0..20 {
                    update(Action::Enable)?;
                    update(Action::Disable)?;
                }
                for _ in 0..10 {
                    let counted = Observation::new().count(Selector::All);
                    let removed = target.observe(&counted, patient())?.remove()?;
                    assert_eq!(removed.still_mapped, 0);
                }
                Ok(())
            };
            let done = std::panic::catch_unwind(AssertUnwindSafe(change));
            is_over.store(true, Ordering::Relaxed);
            done
        });
        done.unwrap().unwrap();
        assert_signals_arrived(&mut talker);
    }
}

/// Updates a process that executes a program; the exec may come before, during or after the update.
/// Returns true if the update succeeded, false if it failed because of the exec.
fn update_across_exec(program: &Path, target: &Target) -> bool {
    match target.update_with(&all(Action::Enable), patient()) {
        Ok(_) => true,
        Err(error) => {
            assert!(
                matches!(error.kind(), ErrorKind::Process(ProcessError::Executed)),
                "{}: {error}",
                program.display()
            );
            assert_eq!(error.effect(), Effect::NothingChanged);
            false
        }
    }
}

// promise: Exit, exec and fork of the process: An exec during an update gives success or an error
//    that names the exec, and the new program is unmodified (2 × 100 execs)
#[test]
fn exec_during_update_is_success_or_reported() {
    let (mut succeeded, mut failed_by_exec) = (0, 0);
    for file in fixture_forms("exec_self") {
        let mut session = Session::start(&file);
        let no_hits = [("ping".to_owned(), 0), ("pong".to_owned(), 0)];
        for _ in 0..100 {
            session.target = Target::open(session.pid()).unwrap();
            session.talker.send("exec");
            if update_across_exec(&file, &session.target) {
                succeeded += 1
            } else {
                failed_by_exec += 1
            }
            session.talker.expect("ready");
            // Another update through the target that was opened before the exec notices the exec,
            // and writes nothing.
            let error = session.apply(&all(Action::Enable)).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Process(ProcessError::Executed)),
                "{error}"
            );
            session.target = Target::open(session.pid()).unwrap();
            let states = session.states();
            assert!(
                states.values().all(|&state| state == (0, State::Disabled)),
                "{states:?}"
            );
            assert_eq!(session.talker.hits(), no_hits);
        }
        session.end();
    }
    assert_eq!(succeeded + failed_by_exec, 200);
}

// promise: Exit, exec and fork of the process: A child keeps the state that its parent had, and
//    neither changes the other (2 × 60 updates)
#[test]
fn child_inherits_the_probe_states_and_keeps_them() {
    for file in fixture_forms("forker") {
        let mut session = Session::start(&file);
        session.update(Action::Enable, Selector::name("pong"), |name| {
            name == "pong"
        });
        let child = session.talker.ask("fork", "child hits");
        assert_eq!(child, "child hits ping=0 pong=1");
        session.talker.expect("forked");
        session.update(Action::Enable, Selector::All, |_| true);
        let child = session.talker.ask("fork", "child hits");
        assert_eq!(child, "child hits ping=3 pong=1");
        session.talker.expect("forked");
        // The process forks during updates: in each child, all sites of a name are enabled or none.
        for _ in 0..30 {
            session.talker.send("fork");
            session.apply(&all(Action::Disable)).unwrap();
            let child = session.talker.expect("child hits");
            assert!(
                child.contains("ping=3") || child.contains("ping=0"),
                "{child}"
            );
            session.talker.expect("forked");
            session.apply(&all(Action::Enable)).unwrap();
        }
        session.end();
    }
}

// promise: Stopping and resuming: A thread that cannot be stopped in time (vfork) is resumed, and
//    the error names it and the reason (2 targets)
#[test]
fn process_in_vfork_is_busy_and_resumed_soon() {
    let time_limit = Duration::from_millis(100);
    let options = Options {
        time_limit,
        ..Options::default()
    };
    for file in fixture_forms("vforker") {
        let mut session = Session::start(&file);
        let pid = session.pid();
        let image = session.image();
        session.talker.vfork();
        let started = Instant::now();
        let enable = all(Action::Enable);
        let error = session.target.update_with(&enable, options).unwrap_err();
        // The limit is far below a test's deadline; it is above the update's, for busy machines.
        assert!(
            started.elapsed() < time_limit * 60,
            "{:?}",
            started.elapsed()
        );
        match error.kind() {
            ErrorKind::Process(ProcessError::Busy {
                state,
                limit_ms,
                name,
                ..
            }) => assert_eq!(
                (error.subject(), *state, *limit_ms, &name[..7]),
                (&Subject::Thread { pid, tid: pid }, 'D', 100, "vforker")
            ),
            _ => panic!("{error}"),
        }
        assert_eq!(error.effect(), Effect::NothingChanged);
        let message = error.to_string();
        assert!(
            message.contains("is in uninterruptible sleep (D"),
            "{message}"
        );
        let end = "; the process was resumed; it is safe to retry; nothing was changed";
        assert!(message.ends_with(end), "{message}");

        assert_eq!(process::status(pid, "TracerPid"), "0");
        // It runs on by itself, and can be changed as usual.
        session.talker.ask("", "vforked");
        session
            .image()
            .text()
            .assert_same(&image.text(), "the text");
        session.assert_all((0, State::Disabled));
        session.update(Action::Enable, Selector::All, |_| true);
        assert_eq!(session.run()["ping"], 3);
        session.end();
    }
}
