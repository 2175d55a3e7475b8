//! Threads that are born and die all the time, and tools that are killed or interrupted at any
//! moment of an update.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, State, Target};
use test_support::process::{self, Image};
use test_support::{DEADLINE, Guard, Scratch, Talker, eventually, fixture_forms};

use crate::alone::{again, role};
use crate::examples::example;
use crate::session::{Session, all, busy, patient};

const UPDATES: usize = 200;

/// Tools killed, or interrupted, on each of four targets.
const TOOLS_OF_EACH: u32 = 50;

/// Moments at which they are met, in a run or in an update.
const STEPS: u32 = 25;

/// How long a thread of `churn` lives.
const LIFE: Duration = Duration::from_micros(200);

/// About as long as an update takes.
const UPDATE: Duration = Duration::from_micros(200);

/// How often each thread, or chain of threads, has gone over all sites.
fn rounds(session: &mut Session) -> Vec<u64> {
    let line = session.talker.ask("report", "report");
    let words = line.split_ascii_whitespace().skip(1);
    words.map(|word| word.parse().unwrap()).collect()
}

/// Waits until each thread, or chain of threads, has gone over all sites.
fn go_round(session: &mut Session) {
    let then = rounds(session);
    eventually("every thread has gone on", || {
        let now = rounds(session);
        let on = now.iter().zip(&then).all(|(now, then)| now > then);
        on.then_some(())
    });
}

/// Threads that are not told to meet the probes, too.
fn assert_hit_by_all(session: &mut Session) {
    session.run();
    go_round(session);
    let hits = session.run();
    assert!(hits["ping"] > 3 && hits["pong"] > 1, "{hits:?}");
}

fn assert_hit_by_none(session: &mut Session) {
    // What was under way when it was disabled.
    go_round(session);
    session.run();
    go_round(session);
    let hits = session.run();
    assert!(hits.values().all(|&hits| hits == 0), "{hits:?}");
}

fn assert_all(session: &Session, expected: (u16, State), what: &str) {
    let states = session.states();
    assert!(
        states.values().all(|&state| state == expected),
        "{what}: {states:?}"
    );
}

fn update_again_and_again(mut session: Session) {
    for update in 0..UPDATES {
        let what = format!("update {update}");
        let (action, state) = match update % 2 {
            0 => (Action::Enable, (1, State::Enabled)),
            _ => (Action::Disable, (0, State::Disabled)),
        };
        let report = session.apply(&all(action));
        let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(report.changed.len(), 2, "{what}");
        assert_all(&session, state, &what);
        match update % 20 {
            0 => assert_hit_by_all(&mut session),
            19 => assert_hit_by_none(&mut session),
            _ => {}
        }
    }
    assert_released(session.pid());
    session.end();
}

#[test]
fn threads_that_are_born_and_die_meanwhile_are_all_stopped_two_hundred_times() {
    let _busy = busy();
    for file in fixture_forms("churn") {
        let session = Session::start(&file);
        let text = Image::of(session.pid()).text();
        let pid = session.pid();
        session.apply(&all(Action::Enable)).unwrap();
        session.apply(&all(Action::Disable)).unwrap();
        Image::of(pid).text().assert_same(&text, "the text");
        update_again_and_again(session);
    }
}

#[test]
fn a_process_of_which_no_thread_lives_long_is_changed_two_hundred_times() {
    let _busy = busy();
    for file in fixture_forms("churn") {
        let session = Session::of(Talker::start_with(&file, ["leader-exits"]));
        assert_eq!(process::state(session.pid()), Some('Z'));
        update_again_and_again(session);
    }
}

/// What is seen of an update from outside: between its first write and its last, the process has to
/// stand still.
struct Watch {
    memory: File,
    /// The opcode that is written first, and the counter that is written last.
    first: u64,
    last: u64,
    /// The threads that each chain has had.
    lives: File,
}

impl Watch {
    fn of(session: &Session, lives: &Path) -> Watch {
        let states = session.target.states().unwrap();
        let sites = states.probes().flat_map(|probe| probe.sites());
        let semaphores = states.probes().flat_map(|probe| probe.semaphores());
        Watch {
            memory: File::open(format!("/proc/{}/mem", session.pid())).unwrap(),
            first: sites.map(|site| site.address.0).min().unwrap() + 1,
            last: semaphores.map(|one| one.address.0).max().unwrap(),
            lives: File::open(lives).unwrap(),
        }
    }

    fn has_begun(&self) -> bool {
        let mut opcode = [0];
        self.memory.read_exact_at(&mut opcode, self.first).unwrap();
        opcode == [0xe8]
    }

    fn has_ended(&self) -> bool {
        let mut counter = [0; 2];
        self.memory.read_exact_at(&mut counter, self.last).unwrap();
        counter != [0; 2]
    }

    fn lives(&self) -> [u8; 32] {
        let mut lives = [0; 32];
        self.lives.read_exact_at(&mut lives, 0).unwrap();
        lives
    }

    /// Watches an update that enables everything, from its first write until before its last, and
    /// says how long that was; nothing if it was too fast.
    fn stands(&self, is_over: impl Fn() -> bool) -> Duration {
        while !self.has_begun() {
            if is_over() {
                return Duration::ZERO;
            }
        }
        let (begun, then) = (Instant::now(), self.lives());
        let mut stood = Duration::ZERO;
        loop {
            let (now, elapsed) = (self.lives(), begun.elapsed());
            // Asked afterwards: what was seen was in time, then.
            if self.has_ended() {
                return stood;
            }
            assert_eq!(now, then, "a thread ran {elapsed:?} after the first write");
            stood = elapsed;
        }
    }
}

#[test]
fn no_thread_runs_from_the_first_write_of_an_update_to_the_last() {
    let _busy = busy();
    let folder = Scratch::new();
    let mut stood = Duration::ZERO;
    for file in fixture_forms("churn_1000") {
        let lives = folder.file("lives");
        let session = Session::of(Talker::start_with(&file, [&lives]));
        let watch = Watch::of(&session, &lives);
        for _ in 0..UPDATES {
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let watching = scope.spawn(|| watch.stands(|| is_over.load(Ordering::Acquire)));
                session.apply(&all(Action::Enable)).unwrap();
                is_over.store(true, Ordering::Release);
                stood += watching.join().unwrap();
            });
            session.apply(&all(Action::Disable)).unwrap();
        }
        session.end();
    }
    println!("stood for {stood:?} that were seen");
    assert!(stood > LIFE * 10, "{stood:?}: too short to see anybody run");
}

/// Whether somebody traces one of the process's threads.
fn is_traced(pid: i32) -> bool {
    process::threads(pid).into_iter().any(|tid| {
        let tracer = process::status(tid, "TracerPid");
        !matches!(tracer.as_str(), "" | "0")
    })
}

/// Nobody traces it, and no thread stands.
fn assert_released(pid: i32) {
    eventually("every thread is released", || {
        let stands = |tid| process::status(tid, "State").starts_with(['t', 'T']);
        let stands = process::threads(pid).into_iter().any(stands);
        (!stands && !is_traced(pid)).then_some(())
    });
}

/// Turns without giving up the processor: the moments that count here are microseconds apart.
fn turn_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < DEADLINE, "still waiting until {what}");
        std::hint::spin_loop();
    }
}

/// A tool that updates the process.
fn toggle(pid: i32) -> Guard {
    let pid = pid.to_string();
    let mut toggle = Command::new(example("toggle"));
    toggle.args([&pid, "ping"]).stdin(Stdio::null());
    Guard::spawn(toggle.stdout(Stdio::null()).stderr(Stdio::null()))
}

/// Sends `signal` to so many tools that update the process, one after the other: to one somewhere
/// in its run, to the next somewhere in its update, a little later each time. Says how many were
/// met in an update.
fn meet_tools(
    pid: i32,
    tools: u32,
    signal: Signal,
    mut afterwards: impl FnMut(u32, ExitStatus),
) -> u32 {
    let begun = Instant::now();
    let mut tool = toggle(pid);
    turn_until("the tool ends", || !tool.is_running());
    let run = begun.elapsed();
    afterwards(0, tool.wait());

    let (mut sent, mut met) = (0, 0);
    for number in 0.. {
        if sent == tools {
            break;
        }
        assert!(number < 20 * tools, "{sent} of {number} tools were met");
        let step = number / 2 % STEPS;
        let mut tool = toggle(pid);
        let mut delay = run * step / STEPS;
        if number % 2 == 1 {
            turn_until("the tool traces the process, or ends", || {
                is_traced(pid) || !tool.is_running()
            });
            delay = UPDATE * step / STEPS;
        }
        let begun = Instant::now();
        turn_until("it is time", || begun.elapsed() >= delay);
        if tool.is_running() {
            met += u32::from(is_traced(pid));
            sent += 1;
            kill(Pid::from_raw(tool.pid()), signal).unwrap();
        }
        afterwards(number, tool.wait());
    }
    met
}

/// The fixtures that are never idle.
fn targets() -> impl Iterator<Item = (PathBuf, &'static [&'static str])> {
    let spinning = fixture_forms("threads_spin").map(|file| (file, &["4"] as &[&str]));
    let churning = fixture_forms("churn").map(|file| (file, &[] as &[&str]));
    spinning.into_iter().chain(churning)
}

/// The process was let go, goes on, and what it is left with can be told. Returns the state.
fn assert_well(session: &mut Session, number: u32) -> State {
    assert_released(session.pid());
    session.talker.ask("counters", "sem");
    // Takes its time where there are more threads than processors.
    if number % 10 == 0 {
        go_round(session);
    }
    let states = session.states();
    assert_eq!(states["pong"], (0, State::Disabled), "tool {number}");
    states["ping"].1
}

#[test]
fn a_tool_killed_at_any_moment_leaves_a_process_that_runs_on_and_can_be_repaired() {
    let _busy = busy();
    let (mut met, mut killed, mut broken) = (0, 0, 0);
    for (file, args) in targets() {
        let mut session = Session::of(Talker::start_with(&file, args));
        let pid = session.pid();
        let text = Image::of(pid).text();
        met += meet_tools(pid, TOOLS_OF_EACH, Signal::SIGKILL, |number, status| {
            killed += u32::from(status.signal() == Some(Signal::SIGKILL as i32));
            if assert_well(&mut session, number) == State::Inconsistent {
                broken += 1;
                // No tool would touch it again.
                force(&session, Action::Disable);
            }
        });
        force(&session, Action::Enable);
        assert_all(&session, (1, State::Enabled), "forced");
        assert_hit_by_all(&mut session);
        force(&session, Action::Disable);
        assert_all(&session, (0, State::Disabled), "forced");
        assert_hit_by_none(&mut session);
        Image::of(pid).text().assert_same(&text, "the text");
        session.end();
    }
    println!("{killed} killed, {met} of them in an update, {broken} left half an update");
    assert!(met > 0, "{killed} were killed, none of them in an update");
}

fn force(session: &Session, action: Action) {
    session.apply(&all(action).force(true)).unwrap();
}

#[test]
fn half_an_update_of_a_thousand_sites_is_seen_and_repaired() {
    // The part of the tool that is killed.
    if let Some(pid) = role() {
        let target = Target::open(pid.parse().unwrap()).unwrap();
        loop {
            for action in [Action::Enable, Action::Disable] {
                let actions = all(action).force(true);
                target.update_with(&actions, patient()).unwrap();
            }
        }
    }
    let _busy = busy();
    let this_test = || ();
    for file in fixture_forms("churn_1000") {
        let mut session = Session::start(&file);
        let pid = session.pid();
        let text = Image::of(pid).text();
        let (mut killed, mut broken) = (0, 0);
        while broken < 5 {
            let mut command = again(&this_test, &pid.to_string());
            let mut tool = Guard::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()));
            turn_until("the tool traces the process", || is_traced(pid));
            let (begun, delay) = (Instant::now(), UPDATE * (killed % STEPS) / 4);
            turn_until("it is time", || begun.elapsed() >= delay);
            kill(Pid::from_raw(tool.pid()), Signal::SIGKILL).unwrap();
            tool.wait();
            killed += 1;

            assert_released(pid);
            session.talker.ask("counters", "sem");
            let is_half = |(_, state): &(u16, State)| *state == State::Inconsistent;
            if session.states().values().any(is_half) {
                broken += 1;
                assert!(session.apply(&all(Action::Enable)).is_err());
            }
            let (action, state) = match killed % 2 {
                0 => (Action::Enable, (1, State::Enabled)),
                _ => (Action::Disable, (0, State::Disabled)),
            };
            force(&session, action);
            assert_all(&session, state, "forced");
            assert!(killed < 1000, "{broken} of {killed} were killed in between");
        }
        println!("{broken} of {killed} left half an update");
        force(&session, Action::Disable);
        Image::of(pid).text().assert_same(&text, "the text");
        let hits = |session: &mut Session| {
            session.run();
            go_round(session);
            session.run().values().sum::<u64>()
        };
        force(&session, Action::Enable);
        assert!(hits(&mut session) > 1000);
        force(&session, Action::Disable);
        assert_hit_by_none(&mut session);
        session.end();
    }
}

#[test]
fn a_tool_interrupted_at_any_moment_ends_and_leaves_all_or_nothing() {
    let _busy = busy();
    let (mut met, mut interrupted) = (0, 0);
    for (file, args) in targets() {
        let mut session = Session::of(Talker::start_with(&file, args));
        let pid = session.pid();
        met += meet_tools(pid, TOOLS_OF_EACH, Signal::SIGINT, |number, status| {
            interrupted += u32::from(status.signal() == Some(Signal::SIGINT as i32));
            let state = assert_well(&mut session, number);
            assert_ne!(state, State::Inconsistent, "tool {number}: {status}");
        });
        go_round(&mut session);
        session.end();
    }
    println!("{interrupted} interrupted, {met} signals came in an update");
    assert!(met > 0, "{interrupted} were interrupted, none in an update");
}

#[test]
fn thousands_of_queued_signals_arrive_once_and_in_order_while_tools_are_killed() {
    let _busy = busy();
    for file in fixture_forms("signals") {
        let mut session = Session::start(&file);
        let pid = session.pid();
        session.talker.ask("send", "sending");
        meet_tools(pid, TOOLS_OF_EACH, Signal::SIGKILL, |_, _| {
            assert_released(pid);
            if session.state("ping") == State::Inconsistent {
                force(&session, Action::Disable);
            }
        });
        assert_all_arrived(&mut session, &file);
        session.end();
    }
}

fn assert_all_arrived(session: &mut Session, file: &Path) {
    let line = session.talker.ask("received", "received");
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let what = format!("{}: {line}", file.display());
    assert!(words[1].parse::<u64>().unwrap() >= 2000, "{what}");
    assert_eq!(words[2..], ["lost", "0", "disordered", "0"], "{what}");
}
