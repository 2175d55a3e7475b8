//! Two thousand updates of a service: it keeps working, and nothing is left behind in it or in us.

use std::collections::BTreeMap;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, State};
use test_support::process::{self, Image, children, descriptors, threads};
use test_support::{Talker, eventually, program_forms};

use crate::own_process::alone;
use crate::session::{Session, all};

const ROUNDS: usize = 1000;

/// What must stay the same in a process that is updated, and in the one that updates it.
#[derive(Debug, PartialEq, Eq)]
struct ProcessState {
    descriptors: Vec<String>,
    threads: Vec<i32>,
    children: Vec<i32>,
    signals_and_tracer: Vec<String>,
}

impl ProcessState {
    /// The state of this process. Waits for tracer threads: a thread that was joined is listed until it has exited.
    fn own() -> ProcessState {
        let own = std::process::id() as i32;
        eventually("no thread traces", || {
            let is_tracer = |tid: &i32| process::status(*tid, "Name").starts_with("probes-");
            (!threads(own).iter().any(is_tracer)).then_some(())
        });
        ProcessState::of(own)
    }

    fn of(pid: i32) -> ProcessState {
        let status_lines = [
            "SigBlk",
            "SigIgn",
            "SigCgt",
            "SigPnd",
            "ShdPnd",
            "TracerPid",
        ];
        ProcessState {
            descriptors: descriptors(pid),
            threads: threads(pid),
            children: children(pid),
            signals_and_tracer: status_lines.map(|name| process::status(pid, name)).into(),
        }
    }
}

// promise: Stopping and resuming: A long-running service keeps running, and no descriptor, thread,
//    child or signal of ours remains (2 × 2,000 updates)
#[test]
fn service_survives_two_thousand_updates() {
    alone(|| {
        for file in program_forms("service") {
            let mut session = Session::of(Talker::start_with(&file, ["1"]));
            let pid = session.pid();
            session.talker.expect("tick");
            let mut hits = BTreeMap::new();
            let text = Image::of(pid).text();
            let states = session.states();
            let (ours, theirs) = (ProcessState::own(), ProcessState::of(pid));

            for round in 0..ROUNDS {
                let report = session.apply(&all(Action::Enable)).unwrap();
                assert!(
                    report
                        .changed
                        .iter()
                        .all(|one| (one.before, one.after) == (0, 1))
                );
                // Now and then, let it hit the probes, and check that it does.
                if round % 100 == 0 {
                    read_until(&mut session, &mut hits, "tick", "probe");
                }
                let report = session.apply(&all(Action::Disable)).unwrap();
                assert!(
                    report
                        .changed
                        .iter()
                        .all(|one| (one.before, one.after) == (1, 0))
                );
                if round % 100 == 0 {
                    read_until(&mut session, &mut hits, "tick", "tick");
                }
            }

            assert_eq!(session.states(), states);
            session.assert_all((0, State::Disabled));
            assert_eq!(ProcessState::own(), ours, "ours");
            assert_eq!(ProcessState::of(pid), theirs, "the service's");
            Image::of(pid)
                .text()
                .assert_same(&text, "the service's code");
            assert!(matches!(process::state(pid), Some('R' | 'S' | 'D')));

            // Every handler that ran has printed its line, and none was counted without running.
            kill(Pid::from_raw(pid), Signal::SIGUSR1).unwrap();
            let counts = loop {
                let line = session.talker.line().expect("the service still runs");
                if let Some(counts) = line.strip_prefix("handlers ") {
                    break counts.to_owned();
                }
                count(&line, &mut hits);
            };
            for one in counts.split_ascii_whitespace() {
                let (name, count) = one.split_once('=').unwrap();
                let printed = hits.get(name).copied().unwrap_or(0);
                assert_eq!(count, printed.to_string(), "{name}: counted, printed");
                // There may have been no cache miss just then.
                assert!(printed > 0 || name == "cache_miss", "{name}");
            }
            session.talker.expect("tick");
        }
    });
}

/// Reads until a line begins with `last`, and that line or an earlier one with `first`. Only if `first` is "probe",
/// the last line has to say that requests are being watched; otherwise it must not.
fn read_until(session: &mut Session, hits: &mut BTreeMap<String, u64>, last: &str, first: &str) {
    let mut started = false;
    loop {
        let line = session.talker.line().expect("it keeps ticking");
        count(&line, hits);
        let watched = line.ends_with("(requests are being watched)");
        started |= line.starts_with(first);
        if started && line.starts_with(last) && watched == (first == "probe") {
            return;
        }
    }
}

fn count(line: &str, hits: &mut BTreeMap<String, u64>) {
    if let Some(rest) = line.strip_prefix("probe ") {
        let name = rest.split(' ').next().unwrap();
        *hits.entry(name.to_owned()).or_default() += 1;
    }
}
