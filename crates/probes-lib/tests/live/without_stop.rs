//! Live updates, which are made without a stop: they write the same memory as updates with a stop,
//! and also work on processes that cannot be stopped.

use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{
    Action, ErrorKind, MemoryError, Options, ProbeError, ProcessError, Selector, State, Target,
};
use test_support::process::{self, Image};
use test_support::{Guard, Talker, eventually, fixture_forms, program_forms};

use crate::expected;
use crate::fixtures::{on_and_off, ordinary};
use crate::refusals::traced_by;
use crate::session::{Session, all, heavy_test_lock, named, patient};

// promise: Live updates: A live update writes the same memory as an update with a stop (6 updates
//    of each)
#[test]
fn all_probes_are_switched_twice_without_a_stop() {
    for subject in ordinary().chain(expected::round_programs()) {
        let mut session = Session::start(&subject.file).live();
        on_and_off(&subject, &mut session);
        session.end();
    }
}

#[test]
fn pair_is_switched_without_a_stop() {
    for file in fixture_forms("gen_ocaml_2") {
        let session = Session::start(&file).live();
        let pair = || Selector::Pair {
            start: "plain".to_owned(),
            stop: "watched".to_owned(),
        };
        let is_of_pair = |name: &str| ["plain", "watched"].contains(&name);
        session.update(Action::Enable, pair(), is_of_pair);
        session.update(Action::Disable, pair(), is_of_pair);
    }
}

// promise: Live updates: A process that waits in vfork is changed (2)
#[test]
fn process_in_vfork_is_changed_live() {
    for file in fixture_forms("vforker") {
        let mut session = Session::start(&file).live();
        session.talker.vfork();
        session.apply(&all(Action::Enable)).unwrap();
        session.assert_all((1, State::Enabled));
        session.talker.ask("", "vforked");
        assert_eq!(session.run()["ping"], 3);
        session.end();
    }
}

// promise: Live updates: A process that was stopped stays stopped and is changed (2)
#[test]
fn stopped_process_is_changed_live_and_stays_stopped() {
    for file in fixture_forms("gen_ocaml_2") {
        let mut session = Session::start(&file).live();
        let pid = Pid::from_raw(session.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        eventually("it is stopped", || {
            (process::state(session.pid()) == Some('T')).then_some(())
        });
        session.apply(&named(Action::Enable, "plain")).unwrap();
        assert_eq!(process::state(session.pid()), Some('T'));
        kill(pid, Signal::SIGCONT).unwrap();
        assert!(session.run()["plain"] > 0);
        session.end();
    }
}

// promise: Live updates: A process under a debugger or strace is changed, and stays with it (4)
#[test]
fn traced_process_is_changed_live() {
    let gdb = |pid: &str| {
        let mut gdb = Command::new("gdb");
        gdb.args(["-q", "-nx", "-p", pid]);
        gdb
    };
    let strace = |pid: &str| {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-e", "trace=none", "-p", pid]);
        strace
    };
    let close_input = |tracer: &mut Guard| drop(tracer.child().stdin.take());
    let send_sigterm = |tracer: &mut Guard| {
        kill(Pid::from_raw(tracer.pid()), Signal::SIGTERM).unwrap();
    };
    type Tool<'a> = (&'a dyn Fn(&str) -> Command, &'a dyn Fn(&mut Guard));
    let tools: [Tool<'_>; 2] = [(&gdb, &close_input), (&strace, &send_sigterm)];
    for (tool, end) in tools {
        for file in fixture_forms("forker") {
            let mut session = Session::start(&file).live();
            let pid = session.pid();
            let mut tracer = traced_by(pid, &mut tool(&pid.to_string()));
            session.apply(&all(Action::Enable)).unwrap();
            session.assert_all((1, State::Enabled));
            assert_eq!(process::status(pid, "TracerPid"), tracer.pid().to_string());
            end(&mut tracer);
            tracer.wait();
            assert_eq!(session.run()["ping"], 3);
            session.end();
        }
    }
}

// promise: Live updates: Threads that never pause run on through live updates (4 × 600 updates)
#[test]
fn threads_that_never_pause_run_on() {
    const UPDATES: usize = 300;
    let _lock = heavy_test_lock();
    let mut targets: Vec<_> = fixture_forms("threads_spin").map(|it| (it, "8")).into();
    targets.extend(program_forms("threads").map(|it| (it, "8")));
    for (file, threads) in targets {
        let session = Session::of(Talker::start_with(&file, [threads])).live();
        let text = Image::of(session.pid()).text();
        for _ in 0..UPDATES {
            let report = session.apply(&all(Action::Enable)).unwrap();
            assert!(report.stopped.is_zero());
            session.assert_all((1, State::Enabled));
            session.apply(&all(Action::Disable)).unwrap();
            session.assert_all((0, State::Disabled));
        }
        assert_eq!(process::status(session.pid(), "TracerPid"), "0");
        let after = Image::of(session.pid()).text();
        after.assert_same(&text, "the text at the end");
    }
}

// promise: Live updates: An exec during a live update is noticed, and the new program is as built
//    (2 × 100 execs)
#[test]
fn exec_during_live_update_is_noticed() {
    for file in fixture_forms("exec_self") {
        let mut session = Session::start(&file).live();
        for _ in 0..100 {
            session.target = Target::open(session.pid()).unwrap();
            session.talker.send("exec");
            update_until_executed(&session);
            session.talker.expect("ready");
            let error = session.apply(&all(Action::Enable)).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Process(ProcessError::Executed)),
                "{error}"
            );
            session.target = Target::open(session.pid()).unwrap();
            session.assert_all((0, State::Disabled));
        }
        session.end();
    }
}

/// Enables and disables the probes of a process that is about to exec itself, again and again until
/// an update fails because it has.
fn update_until_executed(session: &Session) {
    for action in [Action::Enable, Action::Disable].into_iter().cycle() {
        if let Err(error) = session.apply(&all(action)) {
            assert!(
                matches!(error.kind(), ErrorKind::Process(ProcessError::Executed)),
                "{error}"
            );
            return;
        }
    }
}

// promise: Live updates: What is not as expected is refused before anything is written (4)
#[test]
fn unexpected_state_is_refused_before_any_write() {
    for file in fixture_forms("gen_ocaml_2") {
        let session = Session::start(&file).live();
        let site = session.target.states().unwrap();
        let site = site.probe("plain").unwrap().sites().next().unwrap();
        process::poke(session.pid(), site.address.0, &[0xcc]);
        let before = session.image();
        let error = session.apply(&all(Action::Enable)).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::Probe(ProbeError::UnexpectedSite { .. })
            ),
            "{error}"
        );
        assert!(error.to_string().ends_with("; nothing was changed"));
        session.image().assert_same(&before, "after a refusal");
    }
    for file in fixture_forms("shared_text") {
        assert_refused_as_shared(&file);
    }
}

fn assert_refused_as_shared(file: &Path) {
    let session = Session::start(file).live();
    let error = session.apply(&all(Action::Enable)).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Memory(MemoryError::Shared { .. })),
        "{error}"
    );
}

// promise: Other tracers and tools: Updates with and without `-live` at the same time all count (2
//    × 240 updates)
#[test]
fn simultaneous_updates_with_and_without_stop_take_effect() {
    const UPDATES: u16 = 60;
    let _lock = heavy_test_lock();
    for file in fixture_forms("threads_spin") {
        let session = Session::of(Talker::start_with(&file, ["2"]));
        let pid = session.pid();
        let enable = |live: bool| {
            let target = Target::open(pid).unwrap();
            let options = Options { live, ..patient() };
            for _ in 0..UPDATES {
                let ping = named(Action::Enable, "ping");
                target.update_with(&ping, options).unwrap();
            }
        };
        std::thread::scope(|scope| {
            for live in [true, false, true, false] {
                scope.spawn(move || enable(live));
            }
        });
        assert_eq!(session.states()["ping"], (4 * UPDATES, State::Enabled));
    }
}
