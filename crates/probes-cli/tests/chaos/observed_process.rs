//! What may happen to a process while it is observed: it exits or execs before any call, it is
//! stopped and continued, it forks all the time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{ErrorKind, Observation, ObservationReport, ProcessError, State, Target, faults};
use test_support::process::{processes, state};
use test_support::{eventually, fixture_forms, output_while, program_forms};

use crate::case::Case;
use crate::counting::strange_code;
use crate::observations::{check, everything};
use crate::observers::{end, start};
use crate::subject::{Subject, patient};
use crate::tool;

/// Processes of each kind that exit or exec before a call of an observation; a tenth of them in the
/// short form.
const ENDS: usize = 70;

/// Processes that exit while `count` counts, in the short form.
const LEAST: usize = 96;

/// Cycles of each program that is stopped, or forks, meanwhile.
const CYCLES: usize = 36;

/// What happens to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    Exit,
    Exec,
}

fn observe(target: &Target, observation: &Observation) -> probes_lib::Result<ObservationReport> {
    let mut observer = target.observe(observation, patient())?;
    observer.events()?;
    observer.counts()?;
    observer.latencies()?;
    observer.remove()
}

/// Observes a process that meets `end` before the nth call; returns how many calls were made.
fn end_before(case: &mut Case, file: &Path, args: &[&str], end: End, nth: usize) -> usize {
    let subject = Subject::start(file, args);
    let pid = subject.pid();
    let talker = Arc::new(Mutex::new(subject.talker));
    let theirs = Arc::clone(&talker);
    let tell = move |line: &str| {
        let mut talker = theirs.lock().unwrap_or_else(PoisonError::into_inner);
        talker.send(line);
    };
    let target = Target::open(pid).unwrap();
    let observation = everything(&target);
    faults::arm_event(nth, move || match end {
        End::Killed => kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap(),
        End::Exit => tell("quit"),
        End::Exec => tell("exec"),
    });
    let result = observe(&target, &observation);
    let calls = faults::disarm().calls.len();
    let is_met = calls >= nth;
    let what = format!("{end:?} before call {nth} of {}", file.display());
    match &result {
        Ok(_) => case.count(format!("{end:?}: done")),
        Err(error) => match error.kind() {
            _ if !is_met => panic!("{what}: {error}"),
            ErrorKind::Process(ProcessError::Exited)
            | ErrorKind::Process(ProcessError::Zombie { .. })
            | ErrorKind::Process(ProcessError::NotFound) => {
                case.count(format!("{end:?}: said to have exited"))
            }
            ErrorKind::Process(ProcessError::Executed) => {
                assert_eq!(end, End::Exec, "{what}: {error}");
                case.count(format!("{end:?}: said to have executed"));
            }
            _ => panic!("{what}: {error}"),
        },
    }
    let mut talker = talker.lock().unwrap();
    if end == End::Exec && is_met {
        talker.expect("ready");
        // The new program is not observed.
        let states = Target::open(pid).unwrap().states().unwrap();
        assert_eq!(states.observed_sites(), 0, "{what}");
        let mut states = states.probes().map(|probe| probe.state());
        assert!(states.all(|state| state == State::Disabled), "{what}");
        assert_eq!(strange_code(pid), 0, "{what}");
        talker.hits();
    }
    talker.hang_up();
    let status = talker.guard().wait();
    let is_killed = end == End::Killed && is_met;
    assert_eq!(status.success(), !is_killed, "{what}: {status}");
    eventually("nothing is left of it", || {
        (!processes().contains(&pid)).then_some(())
    });
    calls
}

/// Before this many of its calls, at random: how many there are depends on when its threads stop.
fn sweep(case: &mut Case, file: &Path, args: &[&str], end: End) {
    let calls = end_before(case, file, args, end, usize::MAX);
    for _ in 0..case.part_of(ENDS) {
        let nth = 1 + case.random(calls as u64) as usize;
        end_before(case, file, args, end, nth);
    }
}

// promise: Observations: An exit or exec of the process before any system call of an observation is
//    reported (700 exits and execs)
#[test]
fn exit_before_any_call_of_observation_is_reported() {
    let mut case = Case::begin("exited while it was observed", 4);
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        for file in fixture_forms("threads_spin") {
            sweep(&mut case, &file, &["2"], End::Killed);
            sweep(&mut case, &file, &["2"], End::Exit);
        }
        for file in program_forms("threads") {
            sweep(&mut case, &file, &["2"], End::Killed);
            sweep(&mut case, &file, &["2"], End::Exit);
        }
        for file in fixture_forms("exec_self") {
            sweep(&mut case, &file, &[], End::Exec);
        }
        rounds += 1;
    }
    assert!(case.counted("Killed: said to have exited") > 0);
    assert!(case.counted("Exec: said to have executed") > 0);
}

// promise: Observations: A process that exits at any moment ends the counting tool with a message
//    (60 exits)
#[test]
fn exit_at_any_moment_ends_the_counting_tool() {
    let mut case = Case::begin("exited while a tool counted", 2);
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        let files = program_forms("parked")
            .into_iter()
            .chain(fixture_forms("exec_self"));
        for file in files {
            let is_exec = file.to_string_lossy().contains("exec_self");
            for round in 0..case.part_of(LEAST) / 4 {
                let mut subject = start(&file, &[]);
                // It may have exec'd before it was observed.
                let time = if is_exec { "200ms" } else { "60s" };
                let line = format!("count -for {time} -pid {}", subject.pid());
                let mut tool = tool::command(&line);
                let started = Instant::now();
                let output = output_while(&mut tool, || {
                    let delay = Duration::from_micros(case.random(30_000));
                    while started.elapsed() < delay {
                        std::hint::spin_loop();
                    }
                    match (is_exec, round % 2) {
                        (true, _) => subject.talker.send("exec"),
                        (false, 0) => subject.talker.guard().child().kill().unwrap(),
                        (false, _) => subject.talker.hang_up(),
                    }
                });
                let errors = String::from_utf8(output.stderr).unwrap();
                let line = errors
                    .lines()
                    .find(|line| line.starts_with("ocaml-probes: "));
                let line = line.or(errors.lines().next_back()).unwrap_or_default();
                case.count(format!(
                    "{:?}: {}",
                    output.status.code(),
                    line.replace(&subject.pid().to_string(), "N")
                ));
            }
        }
        rounds += 1;
    }
}

// promise: Observations: A process that is stopped and continued all the time is observed, and a
//    stopped one stays stopped (20 and 80 observations)
#[test]
fn process_stopped_and_continued_repeatedly_is_observed() {
    let mut case = Case::begin("observed while it is stopped and continued", 2);
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        let files = fixture_forms("threads_spin")
            .into_iter()
            .chain(program_forms("parked"));
        for file in files {
            let subject = start(&file, &["3"]);
            let pid = subject.pid();
            let send = |signal| kill(Pid::from_raw(pid), signal).unwrap();
            let is_stopped = || state(pid) == Some('T');
            let target = Target::open(pid).unwrap();
            let observation = everything(&target);
            // A stopped process stays stopped.
            send(Signal::SIGSTOP);
            eventually("it is stopped", || is_stopped().then_some(()));
            for _ in 0..5 {
                let mut observer = target.observe(&observation, patient()).unwrap();
                eventually("it is stopped again", || is_stopped().then_some(()));
                let counts = observer.counts().unwrap();
                assert_eq!(counts.total(), 0);
                observer.remove().unwrap();
                eventually("it is stopped again", || is_stopped().then_some(()));
                case.count("observed while it was stopped");
            }
            assert_eq!(strange_code(pid), 0);
            send(Signal::SIGCONT);
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
                            send(signal);
                            std::thread::sleep(Duration::from_millis(3));
                        }
                    }
                });
                for _ in 0..case.part_of(CYCLES) {
                    let observed = observe(&target, &observation);
                    if observed.is_err() {
                        is_over.store(true, Ordering::Relaxed);
                    }
                    case.add("hits counted", observed.unwrap().counts.total());
                    case.count("observed while it was stopped and continued");
                }
                is_over.store(true, Ordering::Relaxed);
            });
            target.clean(patient()).unwrap();
            assert_eq!(strange_code(pid), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            end(subject);
        }
        rounds += 1;
    }
}

// promise: Observations: The children of a process that forks all the time run on and exit well
//    under observation (40 observations, 10,000 children)
#[test]
fn forking_process_is_observed_and_children_run_on() {
    let mut case = Case::begin("observed while it forks", 2);
    let mut rounds = 0;
    while case.is_due(rounds, 1) {
        for file in fixture_forms("fork_storm") {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            let born: u64 = subject.rounds().iter().sum();
            let target = Target::open(subject.pid()).unwrap();
            let observation = everything(&target);
            for _ in 0..case.part_of(CYCLES) {
                let mut observer = target.observe(&observation, patient()).unwrap();
                subject.wait_for_round();
                let events = observer.events().unwrap();
                assert!(events.events.is_empty(), "those of children are their own");
                let observed = observer.remove().unwrap();
                check(&observed, &events, "forks");
                case.count("cycles");
            }
            let born = subject.rounds().iter().sum::<u64>() - born;
            case.add("children, each of which exited well", born);
            subject.wait_for_round();
            assert_eq!(strange_code(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}
