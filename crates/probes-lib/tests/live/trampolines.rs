//! Signals that a process receives in the trampolines of an observation: their handlers return
//! there, jump out of them, or run for a while.

use std::collections::BTreeMap;

use probes_lib::{Events, Keys, Observation, Observer, Selector, Target};
use test_support::process::Image;
use test_support::{Talker, eventually, fixture_forms};

use crate::observe::{anonymous_code, options};

fn observe(target: &Target) -> Observer {
    let observation = Observation::new()
        .count(Selector::All)
        .time("pong", "ping")
        .watch(Selector::All);
    target.observe(&observation, options()).unwrap()
}

/// The numbers in a line, by name.
pub(crate) fn numbers(line: &str) -> BTreeMap<String, u64> {
    let words = line.split_ascii_whitespace();
    let both = words.filter_map(|word| word.split_once('='));
    both.map(|(name, number)| (name.to_owned(), number.parse().unwrap()))
        .collect()
}

// promise: Observations: Handlers of signals received in trampolines return there, jump out, reach
//    sites, and have alternate stacks (2 × 25 observations)
#[test]
fn observations_start_and_end_while_signals_hit_trampolines() {
    for file in fixture_forms("interrupted_trampolines") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        talker.ask("storm", "storming");
        let (mut hits, mut not_shown) = (0, 0);
        for _ in 0..25 {
            let mut observer = observe(&target);
            let Events {
                events, dropped, ..
            } = observer.events().unwrap();
            let observed = observer.remove().unwrap();
            let rest = observed.events;
            let seen = events.len() as u64 + dropped + rest.events.len() as u64 + rest.dropped;
            // If a signal handler jumped out of a trampoline, the hit may have been counted, and
            // not shown.
            let counted = observed.counts.total();
            assert!(seen <= counted, "{seen} of {counted}");
            not_shown += counted - seen;
            hits += counted;
        }
        let met = numbers(&talker.ask("calm", "calm"));
        assert!(
            hits > 0 && met["in_trampolines"] > 0 && met["nested"] > 0,
            "{met:?}"
        );
        assert!(not_shown <= met["jumped"], "{not_shown}: {met:?}");
        target.clean(options()).unwrap();
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        talker.hits();
    }
}

// promise: Observations: Handlers of signals received while a hit is counted by its key, or its time is, return there, jump out and
//    reach the same sites (2 × 25 observations)
#[test]
fn keys_stay_whole_while_signals_hit_trampolines() {
    let key = |text: &str| text.parse::<Keys>().unwrap();
    for file in fixture_forms("interrupted_trampolines") {
        let mut talker = Talker::start(&file);
        let before = Image::of(talker.pid()).text();
        let target = Target::open(talker.pid()).unwrap();
        let observation = Observation::new()
            .count(Selector::All)
            .by(key("tid, probe"))
            .time("pong", "ping")
            .match_by(key("tid"));
        talker.ask("storm", "storming");
        let (mut hits, mut pairs) = (0, 0);
        for _ in 0..25 {
            let mut observer = target.observe(&observation, options()).unwrap();
            eventually("pairs are timed", || {
                (observer.latencies().unwrap()[0].count() > 0).then_some(())
            });
            let observed = observer.remove().unwrap();
            let keyed = observed.keyed_counts.unwrap();
            // Of four threads and two probes.
            assert!(keyed.keys().len() <= 8, "{keyed:?}");
            assert_eq!((keyed.other(), keyed.untyped()), (0, 0));
            hits += keyed.total();
            let latency = &observed.latencies[0];
            assert_eq!((latency.dropped(), latency.untyped()), (0, 0));
            pairs += latency.count();
        }
        let met = numbers(&talker.ask("calm", "calm"));
        assert!(met["in_trampolines"] > 0 && met["jumped"] > 0, "{met:?}");
        assert!(hits > pairs && pairs > 0, "{hits} {pairs}");
        target.clean(options()).unwrap();
        before.assert_same(&Image::of(talker.pid()).text(), "the program");
        assert_eq!(anonymous_code(talker.pid()), [""; 0]);
        talker.hits();
    }
}

// promise: Observations: Handlers of signals received while a hit's stack is copied return there, jump out and reach the same
//    sites: later hits have their stacks, and the rest is counted as missing (2)
#[test]
fn stacks_are_copied_after_handlers_jump_out() {
    for file in fixture_forms("interrupted_trampolines") {
        let mut talker = Talker::start(&file);
        let target = Target::open(talker.pid()).unwrap();
        let observation = Observation::new()
            .count(Selector::All)
            .watch(Selector::All)
            .with_stacks();
        let mut observer = target.observe(&observation, options()).unwrap();
        talker.ask("storm", "storming");
        let (mut seen, mut without_place) = (0, 0);
        let mut add = |events: Events| {
            assert!(events.without_place <= events.dropped);
            assert!(events.events.iter().all(|event| event.stack.is_some()));
            seen += events.events.len() as u64 + events.dropped;
            without_place += events.without_place;
            events.events.len()
        };
        for _ in 0..40 {
            add(observer.events().unwrap());
            std::thread::sleep(observer.next_read());
        }
        let met = numbers(&talker.ask("calm", "calm"));
        assert!(met["in_trampolines"] > 0 && met["jumped"] > 0, "{met:?}");
        let mut later = 0;
        eventually("hits after the storm have their stacks", || {
            later += add(observer.events().unwrap());
            (later > 1000).then_some(())
        });
        let observed = observer.remove().unwrap();
        add(observed.events);
        let counted = observed.counts.total();
        assert!(seen <= counted, "{seen} of {counted}");
        // The hit of a handler that jumped out is counted, and may not be shown.
        assert!(
            counted - seen <= met["jumped"],
            "{seen} of {counted}: {met:?}"
        );
        println!("{met:?}: {seen} of {counted}, {without_place} without a place");
        talker.hits();
    }
}

// promise: Observations: A signal handler that interrupted a trampoline returns into it, however
//    long it took (4)
#[test]
fn long_signal_handler_returns_into_its_trampoline() {
    let leaves = [["return", "jump"], ["jump", "return"]];
    for (file, leaves) in fixture_forms("interrupted_trampolines")
        .into_iter()
        .zip(leaves)
    {
        for (stay, leave) in ["park", "park nested"].into_iter().zip(leaves) {
            let mut talker = Talker::start_with(&file, ["2"]);
            let before = Image::of(talker.pid()).text();
            let target = Target::open(talker.pid()).unwrap();
            let mut observer = observe(&target);
            assert_eq!(talker.ask(stay, "parked"), "parked 2");
            observer.remove().unwrap();
            // No thread can enter any more, but those inside have to leave.
            assert_eq!(anonymous_code(talker.pid()).len(), 1, "{stay}, {leave}");
            before.assert_same(&Image::of(talker.pid()).text(), "the program");
            talker.ask(leave, "resumed");
            eventually("it is removed", || {
                target.clean(options()).unwrap();
                anonymous_code(talker.pid()).is_empty().then_some(())
            });
            before.assert_same(&Image::of(talker.pid()).text(), "the program");
            talker.hits();
        }
    }
}

/// The sites of the fixture have no arguments, one or two, in turn: probes 1 and 5 have the same
/// two, 2 and 6 have none.
// promise: Observations: Every trampoline is complete, whatever is observed at other sites (2 × 3)
#[test]
fn sites_with_different_roles_have_complete_trampolines() {
    let name = |number: u32| format!("probe_{number}");
    let time = |observation: Observation, (start, stop)| observation.time(name(start), name(stop));
    let watch = |observation: Observation, number| observation.watch(Selector::name(name(number)));
    let timed = |pairs: &[(u32, u32)]| pairs.iter().copied().fold(Observation::new(), time);
    // Each observation, and what it has after three runs: the number of hits that are counted, of
    // times of each pair, and of hits that are shown.
    let observations: [(Observation, u64, &[u64], u64); 3] = [
        // Sites that are only counted come before one that is shown, which has no arguments.
        (
            watch(Observation::new().count(Selector::All), 6),
            30,
            &[],
            3,
        ),
        // Numbers of pairs take more bytes or fewer.
        (
            timed(&[(0, 1), (2, 1), (0, 4), (2, 4)]),
            0,
            &[3, 2, 3, 3],
            0,
        ),
        (watch(watch(timed(&[(0, 1), (4, 5)]), 1), 5), 0, &[3, 3], 6),
    ];
    for file in fixture_forms("spin_10") {
        for (observation, counted, timed, shown) in &observations {
            let mut talker = Talker::start(&file);
            let before = Image::of(talker.pid()).text();
            let target = Target::open(talker.pid()).unwrap();
            let mut observer = target.observe(observation, options()).unwrap();
            for _ in 0..3 {
                talker.hits();
            }
            let observed = observer.remove().unwrap();
            let times: Vec<u64> = observed.latencies.iter().map(|it| it.count()).collect();
            assert_eq!(observed.counts.total(), *counted);
            assert_eq!(times, *timed);
            assert_eq!(observed.events.events.len() as u64, *shown);
            before.assert_same(&Image::of(talker.pid()).text(), "the program");
            talker.hits();
        }
    }
}
