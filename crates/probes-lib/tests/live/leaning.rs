//! Functions as OCaml 5 makes them of externals: each ends with a return of one byte, right after which the next function
//! begins. So two of them are patched together.

use probes_lib::{FunctionLatency, FunctionSelector, Observation, Observer, Target};
use test_support::process::Image;
use test_support::{Talker, fixture_forms};

use crate::observe::{anonymous_code, options};
use crate::trampolines::numbers;

fn observe(target: &Target) -> Observer {
    let globs = ["wrapper_?", "padded_wrapper", "after_wrappers"];
    let selectors = globs.map(|glob| FunctionSelector::Glob(glob.parse().unwrap()));
    let timed = selectors
        .into_iter()
        .fold(Observation::new(), Observation::time_functions);
    let observer = target.observe(&timed, options()).unwrap();
    assert!(observer.refused().is_empty(), "{:?}", observer.refused());
    observer
}

/// Calls that were timed; calls that were unwound, and lost ones.
fn figures(latency: &FunctionLatency) -> (u64, [u64; 2]) {
    (latency.count(), [latency.unwound(), latency.lost()])
}

// promise: Functions: Functions that end with a return of one byte, each right before the next, are timed together to the
//    last call (2 × 3)
#[test]
fn every_call_of_wrappers_is_timed() {
    for file in fixture_forms("externals") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open_any(talker.pid()).unwrap();
        for threads in [1, 3, 16] {
            let mut observer = observe(&target);
            talker.ask(&format!("call {threads} 2000"), "called");
            let report = observer.remove().unwrap();
            let found = report.function_latencies.iter().map(|latency| {
                assert_eq!(latency.unmatched_exits(), 0, "{latency:?}");
                figures(latency)
            });
            let found: Vec<_> = found.collect();
            assert_eq!(found, [(threads * 2000, [0, 0]); 9], "{threads}");
            before.assert_same(&Image::of(talker.pid()).text(), "the program");
        }
        talker.ask("call 2 100", "called");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
    }
}

// promise: Functions: They are patched and restored while threads are in them, interrupted by signals whose handlers call
//    them, too (2 × 250 observations)
#[test]
fn wrappers_are_patched_and_restored_under_signals() {
    for file in fixture_forms("externals") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open_any(talker.pid()).unwrap();
        talker.ask("storm 3", "storming");
        let mut calls = 0;
        for _ in 0..250 {
            let report = observe(&target).remove().unwrap();
            let found = report.function_latencies.iter();
            calls += found.map(|it| it.count()).sum::<u64>();
        }
        let met = talker.ask("calm", "calm");
        let met = numbers(&met);
        assert!(
            calls > 0 && met["rounds"] > 0 && met["handled"] > 0,
            "{calls} {met:?}"
        );
        target.clean(options()).unwrap();
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        talker.ask("call 2 100", "called");
    }
}
