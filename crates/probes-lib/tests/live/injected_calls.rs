//! Injected calls that map or unmap memory, while the process maps memory itself, receives signals,
//! or is in a restartable sequence.

use std::collections::BTreeMap;

use probes_lib::{Observation, Selector, Target};
use test_support::process::Image;
use test_support::{Talker, fixture_forms};

use crate::observe::{anonymous_code, options};
use crate::trampolines::numbers;

// promise: Observations: Memory that the process maps at an address that the tool is about to
//    use, or has used, is neither written nor unmapped (2 × 30 mappings)
#[test]
fn memory_mapped_meanwhile_is_not_written_or_unmapped() {
    for file in fixture_forms("squatter") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let observation = Observation::new().count(Selector::All);
        for _ in 0..10 {
            talker.ask("squat 3", "squatting");
            loop {
                // The tool looks for another address when the first is no longer free.
                let mut observer = target.observe(&observation, options()).unwrap();
                talker.hits();
                assert_eq!(observer.remove().unwrap().counts.total(), 4);
                let squatted = numbers(&talker.ask("squatted", "squatted"));
                assert_eq!(squatted["overwritten"], 0);
                if squatted["left"] == 0 {
                    break;
                }
            }
        }
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

/// How often each call is interrupted while the process is observed, and while it is not.
const TIMES: u64 = 100;
const TIMES_UNOBSERVED: u64 = 20;

/// How many signals may fail to interrupt a call. After every stop, the kernel restarts the call; a
/// signal that arrives before it has started again does not interrupt it. The same happens with
/// SIGSTOP and SIGCONT; programs that cannot allow it use sigsuspend(2) (signal(7)).
const MAX_SWALLOWED: u64 = 3;

/// Has the process make `times` calls that signals interrupt, and returns what it counted. With a
/// `target`, the process is observed again and again meanwhile.
fn interrupt(
    talker: &mut Talker,
    (call, times): (&str, u64),
    target: Option<&Target>,
) -> BTreeMap<String, u64> {
    let observation = Observation::new().count(Selector::All);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| talker.ask(&format!("{call} {times}"), call));
        while let Some(target) = target.filter(|_| !asks.is_finished()) {
            let mut observer = target.observe(&observation, options()).unwrap();
            observer.remove().unwrap();
        }
        numbers(&asks.join().unwrap())
    })
}

// promise: Observations: A call that a signal interrupts fails with EINTR, even if its thread is
//    just mapping memory for the tool (2 × 5 calls × 100 signals)
#[test]
fn signals_interrupt_calls_during_an_injected_call() {
    for file in fixture_forms("interrupted_calls") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        for call in ["pause", "sigsuspend", "read", "nanosleep", "wait"] {
            for (target, times) in [(None, TIMES_UNOBSERVED), (Some(&target), TIMES)] {
                let counts = interrupt(&mut talker, (call, times), target);
                let most = match (target, call) {
                    (None, _) | (_, "sigsuspend") => 0,
                    _ => MAX_SWALLOWED,
                };
                assert_eq!(
                    (counts["interrupted"], counts["other"]),
                    (times, 0),
                    "{call}"
                );
                assert!(counts["swallowed"] <= most, "{call}: {counts:?}");
            }
        }
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        talker.hits();
    }
}

// promise: Observations: No call is injected into a thread inside a restartable sequence (2 × 20)
#[test]
fn injected_calls_avoid_restartable_sequences() {
    for file in fixture_forms("sequences") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let observation = Observation::new().count(Selector::All);
        for _ in 0..20 {
            target
                .observe(&observation, options())
                .unwrap()
                .remove()
                .unwrap();
            let counts = numbers(&talker.ask("sequences", "sequences"));
            assert_eq!(counts["broken"], 0);
        }
    }
}
