//! Programs that overflow their stacks in frames with probes, and catch that, as OCaml does.

use std::num::NonZeroU64;
use std::path::Path;

use probes_lib::{Action, Actions, Observation, Selector, Target};
use test_support::process::Image;
use test_support::{Talker, fixture_forms, program_forms};

use crate::observe::options;

/// Counting, timing and watching, each alone and all at once, and with stacks.
fn observations() -> [Observation; 5] {
    let count = |observation: Observation| observation.count(Selector::All);
    let time = |observation: Observation| observation.time("enter", "leave");
    let watch = |observation: Observation| observation.watch(Selector::All);
    let new = Observation::new;
    [
        count(new()),
        time(new()),
        watch(new()),
        watch(time(count(new()))),
        // A stack that is about to overflow takes long to copy: not at each hit.
        watch(new())
            .sample(NonZeroU64::new(1009).unwrap())
            .with_stacks(),
    ]
}

fn switch(target: &Target, action: Action) {
    let actions = Actions::of(action, Selector::All);
    target.update_with(&actions, options()).unwrap();
}

/// Asserts that a program catches all its overflows, enabled and disabled, under every observation.
/// `answer(n)` is the line that it must print when the main thread and `n` others overflow.
fn assert_caught(file: &Path, answer: impl Fn(u32) -> String) {
    for enabled in [false, true] {
        let mut talker = Talker::start(file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let mut overflow = |threads: u32| {
            let line = talker.ask(&format!("overflow {threads}"), "overflow");
            assert_eq!(line, answer(threads), "{}", file.display());
        };
        if enabled {
            switch(&target, Action::Enable);
            overflow(1);
        }
        for observation in observations() {
            let mut observer = target.observe(&observation, options()).unwrap();
            for threads in [0, 1, 4] {
                overflow(threads);
            }
            let observed = observer.remove().unwrap();
            // Every overflow takes hundreds of frames.
            let counted = observed.counts.total();
            assert!(counted == 0 || counted > 100_000, "{counted}");
        }
        if enabled {
            switch(&target, Action::Disable);
        }
        overflow(1);
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
    }
}

// promise: Observations: A program that overflows its stack catches that while it is observed, at every
//    distance of the frame from the end of the stack (4 × 30 observations)
#[test]
fn overflows_at_observed_sites_are_caught() {
    for file in fixture_forms("overflow") {
        // 2, 3, 7 and 27 overflows, with frames of four sizes.
        let all = |threads: u32| 39 * threads.max(1);
        assert_caught(&file, |threads| {
            format!("overflow overflows={} elsewhere=0", all(threads))
        });
    }
    for file in program_forms("overflow") {
        assert_caught(&file, |_| "overflow caught=9 others=same".to_owned());
    }
}
