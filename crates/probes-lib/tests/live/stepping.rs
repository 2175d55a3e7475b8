//! Signal handlers that interrupt the trampolines of timed functions at every instruction, and call timed functions
//! themselves. The process is stepped through a call of `outer`, which calls `leaf`:
//!
//! ```text
//! outer  ──▶ entry ──▶ call leaf ──▶ entry ──▶ x + 1 ──▶ exit ──▶ exit ──▶
//!                ↑   ↑                              ↑
//!              handlers, one or several, each of which calls `leaf`, or leaves by siglongjmp(3)
//! ```
//!
//! `steps` calls `outer`, and nothing interrupts its own trampolines. So the self times of all calls that it encloses
//! add up to its total time, whatever is interrupted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use nix::libc::SYS_rt_sigreturn;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use probes_lib::{FunctionSelector, Observation, Observer, Target};
use test_support::{Talker, fixture_forms};

use crate::lockstep::tracee::{Tracee, pin};
use crate::observe::options;

const FUNCTIONS: [&str; 4] = ["steps", "outer", "leaf", "lasts"];

/// Also observed, though nothing is asserted of them: with more functions, each has fewer histograms, which take long
/// to read.
const OTHERS: &str = "fixture_*";

/// What was counted of a function.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    calls: u64,
    unwound: u64,
    unmatched: u64,
    lost: u64,
    doubtful: u64,
    own: Duration,
    total: Duration,
}

/// Times calls of these functions.
fn timing<'f>(functions: impl Iterator<Item = &'f str>) -> Observation {
    let selectors = functions.map(|name| FunctionSelector::Glob(name.parse().unwrap()));
    selectors.fold(Observation::new(), Observation::time_functions)
}

fn by_caller_if(by_caller: bool, observation: Observation) -> Observation {
    if by_caller {
        // What else the trampolines can do: report each call.
        observation.by_caller().report_slow(Duration::ZERO)
    } else {
        observation
    }
}

/// Fixture `lasting`, observed and traced.
struct Stepped {
    talker: Talker,
    tracee: Tracee,
    observer: Observer,
    calls_of_outer: u64,
}

impl Stepped {
    fn start(file: &Path, by_caller: bool) -> Stepped {
        let functions = FUNCTIONS.into_iter().chain([OTHERS]);
        let observation = timing(functions).self_times();
        Stepped::start_observing(file, &by_caller_if(by_caller, observation))
    }

    fn start_observing(file: &Path, observation: &Observation) -> Stepped {
        let talker = Talker::start(file);
        pin(talker.pid());
        let target = Target::open_any(talker.pid()).unwrap();
        let observer = target.observe(observation, options()).unwrap();
        let tracee = Tracee::of(Pid::from_raw(talker.pid()));
        tracee.seize();
        ptrace::cont(tracee.pid, None).unwrap();
        Stepped {
            talker,
            tracee,
            observer,
            calls_of_outer: 0,
        }
    }

    fn wait(&self, signal: Signal) {
        let stopped = waitpid(self.tracee.pid, Some(WaitPidFlag::__WALL)).unwrap();
        assert_eq!(stopped, WaitStatus::Stopped(self.tracee.pid, signal));
    }

    /// Begins a call of `steps`, which goes on until it calls `outer` for the first time.
    fn begin(&mut self, rounds: usize) {
        self.begin_by("step", rounds);
    }

    fn begin_by(&mut self, command: &str, rounds: usize) {
        self.talker.send(&format!("{command} {rounds}"));
        self.wait(Signal::SIGTRAP);
    }

    /// Ends the call of `steps`; returns how many times a handler has called `leaf` in it.
    fn end(&mut self) -> u64 {
        ptrace::cont(self.tracee.pid, None).unwrap();
        let answer = self.talker.expect("handled");
        answer.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Steps through a call of `outer`, up to its end or as long as `before`, which is called before each instruction
    /// with its address, returns true. Returns whether it has ended.
    fn step_through_outer(&mut self, mut before: impl FnMut(&Self, u64) -> bool) -> bool {
        self.calls_of_outer += 1;
        let outside = self.tracee.registers().rsp;
        let mut is_inside = false;
        loop {
            assert_eq!(self.tracee.step(), None);
            let registers = self.tracee.registers();
            if is_inside && registers.rsp == outside {
                return true;
            }
            is_inside |= registers.rsp != outside;
            if is_inside && !before(self, registers.rip) {
                return false;
            }
        }
    }

    /// Sends it a signal, and waits until it arrives: the handler is executed next.
    fn deliver(&self, signal: Signal) {
        kill(self.tracee.pid, signal).unwrap();
        assert_eq!(self.tracee.step(), Some(signal));
    }

    /// A handler calls a function, uninterrupted: that of SIGUSR1 `leaf`, that of SIGHUP `lasts`.
    fn handle(&self, signal: Signal) {
        let pid = self.tracee.pid;
        let interrupted = self.tracee.registers();
        self.deliver(signal);
        ptrace::syscall(pid, signal).unwrap();
        self.wait(Signal::SIGTRAP);
        assert_eq!(self.tracee.registers().orig_rax, SYS_rt_sigreturn as u64);
        ptrace::syscall(pid, None).unwrap();
        self.wait(Signal::SIGTRAP);
        let registers = self.tracee.registers();
        assert_eq!(
            (registers.rip, registers.rsp),
            (interrupted.rip, interrupted.rsp)
        );
    }

    /// A handler calls `leaf`; every so many instructions, from one on, another one does.
    fn handle_interrupted(&self, first: usize, every: usize) {
        let interrupted = self.tracee.registers();
        self.deliver(Signal::SIGUSR1);
        ptrace::step(self.tracee.pid, Signal::SIGUSR1).unwrap();
        self.wait(Signal::SIGTRAP);
        for step in 0.. {
            if step % every == first {
                self.handle(Signal::SIGUSR1);
            }
            assert_eq!(self.tracee.step(), None);
            let registers = self.tracee.registers();
            if (registers.rip, registers.rsp) == (interrupted.rip, interrupted.rsp) {
                return;
            }
        }
    }

    /// The calls of each function, and those that are unwound, unmatched and lost.
    fn figures(&mut self) -> BTreeMap<String, [u64; 4]> {
        let functions = self.observer.function_latencies().unwrap();
        let figures = functions.iter().map(|it| {
            let others = [it.count(), it.unwound(), it.unmatched_exits(), it.lost()];
            (it.name().to_owned(), others)
        });
        figures.collect()
    }

    fn counted(&mut self) -> BTreeMap<String, Counted> {
        let functions = self.observer.function_latencies().unwrap();
        let functions = functions.iter().filter(|it| FUNCTIONS.contains(&it.name()));
        let counted = functions.map(|it| {
            let counted = Counted {
                calls: it.count(),
                unwound: it.unwound(),
                unmatched: it.unmatched_exits(),
                lost: it.lost(),
                doubtful: it.doubtful(),
                own: it.sum(),
                total: it.total().unwrap(),
            };
            (it.name().to_owned(), counted)
        });
        counted.collect()
    }
}

/// Asserts that what is counted is exact after so many calls of each function, and that nothing is missing.
#[track_caller]
fn assert_exact(counted: &BTreeMap<String, Counted>, calls: [u64; 4], what: &str) {
    for (name, calls) in FUNCTIONS.iter().zip(calls) {
        let it = counted[*name];
        let others = [it.unwound, it.unmatched, it.lost, it.doubtful];
        assert_eq!((it.calls, others), (calls, [0; 4]), "{what}: {name}");
    }
    let own: Duration = counted.values().map(|it| it.own).sum();
    let total = counted["steps"].total;
    // Each sum is rounded down to nanoseconds.
    let rounding = Duration::from_nanos(FUNCTIONS.len() as u64);
    let is_sum = own <= total + Duration::from_nanos(1) && total <= own + rounding;
    assert!(is_sum, "{what}: {own:?} of {total:?}");
}

/// Steps through calls of `outer` until nothing is new in one: `before` says, before an instruction, whether anything is.
fn step_until_nothing_is_new(
    stepped: &mut Stepped,
    what: &str,
    mut before: impl FnMut(&Stepped, u64) -> bool,
) {
    let counted = stepped.counted();
    let mut rounds = counted["steps"].calls;
    let mut handled = counted["leaf"].calls - counted["outer"].calls;
    loop {
        stepped.begin(1);
        let mut is_new = false;
        assert!(stepped.step_through_outer(|stepped, address| {
            is_new |= before(stepped, address);
            true
        }));
        handled += stepped.end();
        rounds += 1;
        if !is_new {
            break;
        }
    }
    let outer = stepped.calls_of_outer;
    let calls = [rounds, outer, outer + handled, 0];
    assert_exact(&stepped.counted(), calls, what);
}

// promise: Functions: Self times are exact although signal handlers that call timed functions interrupt the trampolines, two of them
//    at any two instructions (2 programs, each instruction, 22 and 8 distances)
#[test]
fn two_handlers_anywhere_leave_self_times_exact() {
    // A record is incomplete for 14 instructions at an entry, and at an exit for 24 until its time is that of a child.
    let distances: Vec<usize> = (0..=16).chain([20, 24, 32, 48, 64]).collect();
    for (file, (by_caller, every)) in fixture_forms("lasting").iter().zip([(false, 1), (true, 3)]) {
        let mut stepped = Stepped::start(file, by_caller);
        for &distance in distances.iter().step_by(every) {
            let what = format!("{}, distance {distance}", file.display());
            let (mut interrupted, mut to_second) = (BTreeSet::new(), None);
            step_until_nothing_is_new(&mut stepped, &what, |stepped, address| {
                let is_new = to_second.is_none() && interrupted.insert(address);
                if is_new {
                    stepped.handle(Signal::SIGUSR1);
                    to_second = Some(distance);
                }
                if to_second == Some(0) {
                    stepped.handle(Signal::SIGUSR1);
                }
                to_second = to_second.and_then(|steps| steps.checked_sub(1));
                is_new
            });
            // The trampolines of two entries and two exits.
            assert!(interrupted.len() > 200, "{}", interrupted.len());
        }
        stepped.talker.send("quit");
    }
}

// promise: Functions: A call is no shorter than the calls of two signal handlers that interrupt its entry (2 programs, each of the
//    first 70 instructions, 25 distances)
#[test]
fn calls_begin_after_handlers_that_interrupt_entries() {
    for (file, by_caller) in fixture_forms("lasting").iter().zip([false, true]) {
        let mut stepped = Stepped::start(file, by_caller);
        let (mut rounds, mut slow) = (0, 0);
        for distance in 0..=24 {
            for first in 0..70 {
                let mut steps = 0;
                stepped.begin(1);
                stepped.step_through_outer(|stepped, _| {
                    for at in [first, first + distance] {
                        if steps == at {
                            stepped.handle(Signal::SIGHUP);
                            slow += 1;
                        }
                    }
                    steps += 1;
                    // The rest takes far less time than a handler.
                    steps <= first + distance
                });
                stepped.end();
                rounds += 1;
            }
            let what = format!("{}, distance {distance}", file.display());
            let outer = stepped.calls_of_outer;
            let calls = [rounds, outer, outer, slow];
            assert_exact(&stepped.counted(), calls, &what);
        }
        stepped.talker.send("quit");
    }
}

// promise: Functions: Self times are exact although signal handlers interrupt the trampolines of the calls of signal handlers (2
//    programs, each instruction)
#[test]
fn interrupted_handlers_leave_self_times_exact() {
    const EVERY: usize = 7;
    for (file, by_caller) in fixture_forms("lasting").iter().zip([false, true]) {
        let mut stepped = Stepped::start(file, by_caller);
        let what = file.display().to_string();
        let mut interrupted = BTreeSet::new();
        step_until_nothing_is_new(&mut stepped, &what, |stepped, address| {
            let is_new = interrupted.insert(address);
            if is_new {
                stepped.handle_interrupted(interrupted.len() % EVERY, EVERY);
            }
            is_new
        });
        assert!(interrupted.len() > 200, "{}", interrupted.len());
        stepped.talker.send("quit");
    }
}

/// Calls `steps`, and has a handler leave its first call of `outer` by siglongjmp(3) before this instruction. Returns
/// whether the call had ended before.
fn leave_at(stepped: &mut Stepped, instruction: usize, rounds: usize) -> bool {
    let mut steps = 0;
    stepped.begin(rounds);
    let has_ended = stepped.step_through_outer(|_, _| {
        steps += 1;
        steps <= instruction
    });
    let mut signal = None;
    if !has_ended {
        stepped.deliver(Signal::SIGUSR2);
        signal = Some(Signal::SIGUSR2);
    }
    for _ in 1..rounds {
        ptrace::cont(stepped.tracee.pid, signal.take()).unwrap();
        stepped.wait(Signal::SIGTRAP);
    }
    ptrace::cont(stepped.tracee.pid, signal).unwrap();
    stepped.talker.expect("handled 0");
    has_ended
}

// promise: Functions: A call that a signal handler leaves by siglongjmp(3), in a trampoline or not, is in the self times, or the call
//    around it is doubtful (2 programs, each instruction; another call follows, or none)
#[test]
fn times_missed_after_siglongjmp_are_doubtful() {
    for (file, by_caller) in fixture_forms("lasting").iter().zip([false, true]) {
        let mut stepped = Stepped::start(file, by_caller);
        let (mut certain, mut doubtful) = (0, 0);
        let mut counted = stepped.counted();
        for instruction in 0.. {
            // Every other instruction is followed by another call: in the other program, those between.
            let rounds = 1 + (instruction + usize::from(by_caller)) % 2;
            let has_ended = leave_at(&mut stepped, instruction, rounds);
            let before = std::mem::replace(&mut counted, stepped.counted());
            let what = format!("{}, instruction {instruction}", file.display());
            let all = |counted: &BTreeMap<_, Counted>| -> Duration {
                counted.values().map(|it| it.own).sum()
            };
            let own = all(&counted) - all(&before);
            let total = counted["steps"].total - before["steps"].total;
            if counted["steps"].doubtful == before["steps"].doubtful {
                // Each sum is rounded down to nanoseconds.
                let rounding = Duration::from_nanos(1 + FUNCTIONS.len() as u64);
                let is_sum = own.abs_diff(total) <= rounding;
                assert!(is_sum, "{what}: {own:?} of {total:?}");
                certain += 1;
            } else {
                doubtful += 1;
            }
            let others = counted.values().map(|it| it.lost + it.unmatched);
            assert_eq!(others.sum::<u64>(), 0, "{what}");
            if has_ended {
                break;
            }
        }
        assert!(certain > 20 && doubtful > 100, "{certain} {doubtful}");
        stepped.talker.send("quit");
    }
}

// promise: Functions: A process goes on, and its next calls are timed exactly, whatever instruction of a trampoline a signal handler
//    interrupts that calls a timed function on a stack above (2 programs, each instruction)
#[test]
fn handlers_on_stacks_above_leave_depths_whole() {
    let files = fixture_forms("lasting");
    // No call of another function is around these.
    let plain = timing(FUNCTIONS.into_iter());
    let by_caller = by_caller_if(true, plain.clone().self_times());
    for (observation, file) in [plain, by_caller].iter().zip(&files) {
        let mut stepped = Stepped::start_observing(file, observation);
        // Returns how many instructions it has.
        let call_below = |stepped: &mut Stepped, interrupted: Option<usize>| {
            let mut steps = 0;
            stepped.begin_by("below", 1);
            assert!(stepped.step_through_outer(|stepped, _| {
                if interrupted == Some(steps) {
                    stepped.handle(Signal::SIGUSR1);
                }
                steps += 1;
                true
            }));
            stepped.end();
            steps
        };
        let all = call_below(&mut stepped, None);
        assert!(all > 100, "{all}");
        // Those of exits first, while no record is left of another one that was interrupted.
        for interrupted in (0..all).rev() {
            call_below(&mut stepped, Some(interrupted));
        }
        let before = stepped.figures();
        call_below(&mut stepped, None);
        for (name, figures) in stepped.figures() {
            let [calls, others @ ..] = before[&name];
            let expected = [
                calls + u64::from(name != "lasts"),
                others[0],
                others[1],
                others[2],
            ];
            assert_eq!(figures, expected, "{name}");
        }
        stepped.talker.send("quit");
    }
}
