//! Threads that are created and exit all the time, none of which runs during an update; and tools
//! that are interrupted at any moment. (The chaos suite kills tools.)

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use probes_lib::{Action, State};
use test_support::process;
use test_support::{DEADLINE, Guard, Scratch, Talker, eventually, fixture_forms};

use crate::examples::example;
use crate::session::{Session, all, heavy_test_lock};

const UPDATES: usize = 200;

/// Tools interrupted, on each of four targets.
const TOOLS_PER_TARGET: u32 = 50;

/// A run, or an update, is divided into this many parts. Each signal is sent at the start of the next part.
const STEPS: u32 = 25;

/// How long a thread of `churn` lives.
const LIFE: Duration = Duration::from_micros(200);

/// About as long as an update takes.
const UPDATE: Duration = Duration::from_micros(200);

/// How often each thread, or chain of threads that start one another, has executed all sites.
fn rounds(session: &mut Session) -> Vec<u64> {
    let line = session.talker.ask("report", "report");
    let words = line.split_ascii_whitespace().skip(1);
    words.map(|word| word.parse().unwrap()).collect()
}

/// Waits until each thread, or chain of threads that start one another, has executed all sites again.
fn wait_for_round(session: &mut Session) {
    let then = rounds(session);
    eventually("every thread has run on", || {
        let now = rounds(session);
        let on = now.iter().zip(&then).all(|(now, then)| now > then);
        on.then_some(())
    });
}

/// Checks an update from outside, by reading the memory of the process: between its first write and
/// its last, no thread may run.
struct StopMonitor {
    memory: File,
    /// The opcode that is written first, and the counter that is written last.
    first: u64,
    last: u64,
    /// The number of threads that each chain has had.
    thread_counts: File,
}

impl StopMonitor {
    fn of(session: &Session, lives: &Path) -> StopMonitor {
        let states = session.target.states().unwrap();
        let sites = states.probes().flat_map(|probe| probe.sites());
        let semaphores = states.probes().flat_map(|probe| probe.semaphores());
        StopMonitor {
            memory: File::open(format!("/proc/{}/mem", session.pid())).unwrap(),
            first: sites.map(|site| site.address.0).min().unwrap() + 1,
            last: semaphores.map(|one| one.address.0).max().unwrap(),
            thread_counts: File::open(lives).unwrap(),
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

    fn thread_counts(&self) -> [u8; 32] {
        let mut lives = [0; 32];
        self.thread_counts.read_exact_at(&mut lives, 0).unwrap();
        lives
    }

    /// Watches an update that enables everything, from its first write until before its last.
    /// Returns how long that was; zero if it was too fast.
    fn measure_stop(&self, is_over: impl Fn() -> bool) -> Duration {
        while !self.has_begun() {
            if is_over() {
                return Duration::ZERO;
            }
        }
        let (started, then) = (Instant::now(), self.thread_counts());
        let mut stop_time = Duration::ZERO;
        loop {
            let (now, elapsed) = (self.thread_counts(), started.elapsed());
            // Read afterwards, so the samples above were taken before the last write.
            if self.has_ended() {
                return stop_time;
            }
            assert_eq!(now, then, "a thread ran {elapsed:?} after the first write");
            stop_time = elapsed;
        }
    }
}

// promise: Stopping and resuming: No thread runs between the first write of an update and the last
//    (2 × 200 updates, watched from outside)
#[test]
fn no_thread_runs_between_first_and_last_write() {
    let _lock = heavy_test_lock();
    let directory = Scratch::new();
    let mut stop_time = Duration::ZERO;
    for file in fixture_forms("churn_1000") {
        let lives = directory.file("lives");
        let session = Session::of(Talker::start_with(&file, [&lives]));
        let monitor = StopMonitor::of(&session, &lives);
        for _ in 0..UPDATES {
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let watching =
                    scope.spawn(|| monitor.measure_stop(|| is_over.load(Ordering::Acquire)));
                session.apply(&all(Action::Enable)).unwrap();
                is_over.store(true, Ordering::Release);
                stop_time += watching.join().unwrap();
            });
            session.apply(&all(Action::Disable)).unwrap();
        }
        session.end();
    }
    println!("stopped for {stop_time:?}, as seen from outside");
    assert!(
        stop_time > LIFE * 10,
        "stopped for only {stop_time:?} in all: a thread that ran would not have been noticed"
    );
}

/// Whether a thread of the process is traced.
fn is_traced(pid: i32) -> bool {
    process::threads(pid).into_iter().any(|tid| {
        let tracer = process::status(tid, "TracerPid");
        !matches!(tracer.as_str(), "" | "0")
    })
}

/// Asserts that soon no thread is traced or stopped.
fn assert_released(pid: i32) {
    eventually("every thread is released", || {
        let is_stopped = |tid| process::status(tid, "State").starts_with(['t', 'T']);
        let is_stopped = process::threads(pid).into_iter().any(is_stopped);
        (!is_stopped && !is_traced(pid)).then_some(())
    });
}

/// Waits without sleeping, because the delays here differ by microseconds.
fn spin_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < DEADLINE, "still waiting until {what}");
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

/// Runs tools that update the process, one after the other, until `tools` of them have been sent
/// `signal`. The delay grows with each pair of tools: it is counted from the start of the first
/// one, and from the moment at which the second one traces the process. Calls `afterwards` when a
/// tool has exited. Returns how many tools traced the process when they were sent the signal.
fn signal_tools(
    pid: i32,
    tools: u32,
    signal: Signal,
    mut afterwards: impl FnMut(u32, ExitStatus),
) -> u32 {
    let started = Instant::now();
    let mut tool = toggle(pid);
    spin_until("the tool exits", || !tool.is_running());
    let run = started.elapsed();
    afterwards(0, tool.wait());

    let (mut sent, mut during_update) = (0, 0);
    for number in 0.. {
        if sent == tools {
            break;
        }
        assert!(
            number < 20 * tools,
            "only {sent} of {number} tools still ran when they were signalled"
        );
        let step = number / 2 % STEPS;
        let mut tool = toggle(pid);
        let mut delay = run * step / STEPS;
        if number % 2 == 1 {
            spin_until("the tool traces the process, or exits", || {
                is_traced(pid) || !tool.is_running()
            });
            delay = UPDATE * step / STEPS;
        }
        let started = Instant::now();
        spin_until("it is time", || started.elapsed() >= delay);
        if tool.is_running() {
            during_update += u32::from(is_traced(pid));
            sent += 1;
            kill(Pid::from_raw(tool.pid()), signal).unwrap();
        }
        afterwards(number, tool.wait());
    }
    during_update
}

/// The fixtures that are never idle.
fn targets() -> impl Iterator<Item = (PathBuf, &'static [&'static str])> {
    let spinning = fixture_forms("threads_spin").map(|file| (file, &["4"] as &[&str]));
    let churning = fixture_forms("churn").map(|file| (file, &[] as &[&str]));
    spinning.into_iter().chain(churning)
}

/// Asserts that the process is detached and runs, with a state that can be read; returns the state.
fn assert_running(session: &mut Session, number: u32) -> State {
    assert_released(session.pid());
    session.talker.ask("counters", "sem");
    // Not for each tool: it takes a while if there are more threads than processors.
    if number % 10 == 0 {
        wait_for_round(session);
    }
    let states = session.states();
    assert_eq!(states["pong"], (0, State::Disabled), "tool {number}");
    states["ping"].1
}

// promise: All or nothing: Ctrl-C at any moment leaves the whole update or none of it (200 tools)
#[test]
fn interrupted_tool_leaves_all_or_nothing() {
    let _lock = heavy_test_lock();
    let (mut during_update, mut interrupted) = (0, 0);
    for (file, args) in targets() {
        let mut session = Session::of(Talker::start_with(&file, args));
        let pid = session.pid();
        during_update += signal_tools(pid, TOOLS_PER_TARGET, Signal::SIGINT, |number, status| {
            interrupted += u32::from(status.signal() == Some(Signal::SIGINT as i32));
            let state = assert_running(&mut session, number);
            assert_ne!(state, State::Inconsistent, "tool {number}: {status}");
        });
        wait_for_round(&mut session);
        session.end();
    }
    println!("{interrupted} interrupted, {during_update} signals arrived during an update");
    assert!(
        during_update > 0,
        "no signal was sent during an update; {interrupted} tools were interrupted"
    );
}
