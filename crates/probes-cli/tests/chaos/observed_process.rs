//! What may happen to a process while it is observed: it exits or execs before any system call of
//! the observation, it is stopped and continued, it forks all the time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{ErrorKind, Observation, ObservationReport, ProcessError, State, Target};
use test_support::process::state;
use test_support::{eventually, fixture_forms, output_while, program_forms};

use crate::case::Case;
use crate::counting::anonymous_code_mappings;
use crate::observations::{check, everything};
use crate::observers::{end, start};
use crate::process_with_event::{Event, ProcessWithEvent};
use crate::subject::{Subject, patient_options};
use crate::tool;

/// Processes of each kind that exit or exec before a call of an observation; a tenth of them in the
/// short form.
const ENDS: usize = 70;

/// Processes that exit while `count` counts; a tenth of them in the short form.
const EXITS: usize = 96;

/// Cycles of each program that is stopped, or forks, meanwhile.
const CYCLES: usize = 36;

fn observe(target: &Target, observation: &Observation) -> probes_lib::Result<ObservationReport> {
    let mut observer = target.observe(observation, patient_options())?;
    observer.events()?;
    observer.counts()?;
    observer.latencies()?;
    observer.remove()
}

/// Observes a process to which `event` happens before the nth system call of the observation;
/// returns how many system calls were made.
fn end_before(case: &mut Case, file: &Path, args: &[&str], event: Event, nth: usize) -> usize {
    let process = ProcessWithEvent::of(Subject::start(file, args), event);
    let pid = process.pid;
    let target = Target::open(pid).unwrap();
    let observation = everything(&target);
    let (result, calls) = process.run_with_event_before(nth, || observe(&target, &observation));
    let has_happened = calls >= nth;
    let what = format!("{event:?} before call {nth} of {}", file.display());
    match &result {
        Ok(_) => case.count(format!("{event:?}: done")),
        Err(error) => match error.kind() {
            _ if !has_happened => panic!("{what}: {error}"),
            ErrorKind::Process(ProcessError::Exited)
            | ErrorKind::Process(ProcessError::Zombie { .. })
            | ErrorKind::Process(ProcessError::NotFound) => {
                case.count(format!("{event:?}: reported as exited"))
            }
            ErrorKind::Process(ProcessError::Executed) => {
                assert_eq!(event, Event::Exec, "{what}: {error}");
                case.count(format!("{event:?}: reported as exec'd"));
            }
            _ => panic!("{what}: {error}"),
        },
    }
    if event == Event::Exec && has_happened {
        process.talker().expect("ready");
        // The new program is not observed.
        let states = Target::open(pid).unwrap().states().unwrap();
        assert_eq!(
            (states.observed_sites(), states.observed_functions()),
            (0, 0),
            "{what}"
        );
        let mut states = states.probes().map(|probe| probe.state());
        assert!(states.all(|state| state == State::Disabled), "{what}");
        assert_eq!(anonymous_code_mappings(pid), 0, "{what}");
        process.talker().hits();
    }
    process.end(has_happened, &what);
    calls
}

/// Ends processes before random system calls of an observation. Not before each in turn: how many
/// there are depends on when the threads of the process stop.
fn end_before_random_calls(case: &mut Case, file: &Path, args: &[&str], event: Event) {
    let calls = end_before(case, file, args, event, usize::MAX);
    for _ in 0..case.part_of(ENDS) {
        let nth = 1 + case.random(calls as u64) as usize;
        end_before(case, file, args, event, nth);
    }
}

// promise: Observations: An exit or exec of the process before any system call of an observation is
//    reported (700 exits and execs)
#[test]
fn exit_before_any_call_of_observation_is_reported() {
    let mut case = Case::begin("exited while it was observed", 4);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("threads_spin") {
            end_before_random_calls(&mut case, &file, &["2"], Event::Kill);
            end_before_random_calls(&mut case, &file, &["2"], Event::Exit);
        }
        for file in program_forms("threads") {
            end_before_random_calls(&mut case, &file, &["2"], Event::Kill);
            end_before_random_calls(&mut case, &file, &["2"], Event::Exit);
        }
        for file in fixture_forms("exec_self") {
            end_before_random_calls(&mut case, &file, &[], Event::Exec);
        }
        rounds += 1;
    }
    assert!(case.counted("Kill: reported as exited") > 0);
    assert!(case.counted("Exec: reported as exec'd") > 0);
}

// promise: Observations: A process that exits at any moment ends the counting tool with a message
//    (60 exits)
#[test]
fn exit_at_any_moment_ends_the_counting_tool() {
    let mut case = Case::begin("exited while a tool counted", 2);
    let mut rounds = 0;
    while case.has_another_round(rounds, 1) {
        let files = program_forms("parked")
            .into_iter()
            .chain(fixture_forms("exec_self"));
        for file in files {
            let is_exec = file.to_string_lossy().contains("exec_self");
            for round in 0..case.part_of(EXITS) / 4 {
                let mut subject = start(&file, &[]);
                // The process may have exec'd before it was observed: then the new program is
                // counted, and does not exit.
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
                        (false, _) => subject.talker.close_input(),
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
    while case.has_another_round(rounds, 1) {
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
                let mut observer = target.observe(&observation, patient_options()).unwrap();
                eventually("it is stopped again", || is_stopped().then_some(()));
                let counts = observer.counts().unwrap();
                assert_eq!(counts.total(), 0);
                observer.remove().unwrap();
                eventually("it is stopped again", || is_stopped().then_some(()));
                case.count("observed while it was stopped");
            }
            assert_eq!(anonymous_code_mappings(pid), 0);
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
            target.clean(patient_options()).unwrap();
            assert_eq!(anonymous_code_mappings(pid), 0);
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
    while case.has_another_round(rounds, 1) {
        for file in fixture_forms("fork_storm") {
            let mut subject = Subject::start(&file, [] as [&str; 0]);
            let born: u64 = subject.rounds().iter().sum();
            let target = Target::open(subject.pid()).unwrap();
            let observation = everything(&target);
            for _ in 0..case.part_of(CYCLES) {
                let mut observer = target.observe(&observation, patient_options()).unwrap();
                subject.wait_for_round();
                let events = observer.events().unwrap();
                assert!(
                    events.events.is_empty(),
                    "hits of children are not recorded for their parent"
                );
                let observed = observer.remove().unwrap();
                check(&observed, &events, "forks");
                case.count("cycles");
            }
            let born = subject.rounds().iter().sum::<u64>() - born;
            case.add("children, each of which exited with status 0", born);
            subject.wait_for_round();
            assert_eq!(anonymous_code_mappings(subject.pid()), 0);
            subject.assert_all((0, State::Disabled), "in the end");
            subject.end();
        }
        rounds += 1;
    }
}
